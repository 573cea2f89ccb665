"""Tokenizes the data that pretrain_main.py and run_training.sh train on with the same words, and stops."""

from torchstone.doors import prepare

if __name__ == "__main__":
    prepare()

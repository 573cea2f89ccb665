"""Tokenizes the data that pretrain_main.py and run_training.sh train on with the same arguments, and stops."""

from torchstone.scripts.gpu import prepare_dataset

if __name__ == "__main__":
    prepare_dataset()

"""Trains on one GPU, in one process: `CUDA_VISIBLE_DEVICES=2 python3 pretrain_main.py --config single_gpu.json`."""

from torchstone.doors import pretrain

if __name__ == "__main__":
    pretrain()

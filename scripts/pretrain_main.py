"""Trains on one GPU, in one process: `CUDA_VISIBLE_DEVICES=2 python3 pretrain_main.py --config single_gpu.json`."""

from torchstone.scripts.gpu import pretrain_main

if __name__ == "__main__":
    pretrain_main()

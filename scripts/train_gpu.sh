#!/usr/bin/env bash
# Trains on one GPU, by default 0: train_gpu.sh [GPU_ID] [arguments of pretrain_main.py]
set -euo pipefail
gpu=0
if [[ $# -gt 0 && $1 != -* ]]; then
    gpu=$1
    shift
fi
if [[ ! $gpu =~ ^[0-9]+$ ]]; then
    echo "error: '$gpu' is not the number of a GPU; usage: train_gpu.sh [GPU_ID] [arguments of pretrain_main.py]" >&2
    exit 2
fi
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
export CUDA_VISIBLE_DEVICES=$gpu GPU_RANK=$gpu
exec "${PYTHON:-$(command -v python3 || echo python)}" "$here/pretrain_main.py" "$@"

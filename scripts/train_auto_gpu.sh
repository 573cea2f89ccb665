#!/usr/bin/env bash
# Trains on the GPU with the lowest utilization, then the least memory in use: train_auto_gpu.sh [words of pretrain_main.py]
# CUDA_VISIBLE_DEVICES says among which; without a GPU it is the CPU.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-$(command -v python3 || echo python)}
gpu=$("$python" -P -c 'from torchstone.doors import least_loaded; least_loaded()')
if [[ -z $gpu ]]; then
    echo "No GPU found: training on the CPU"
    exec "$python" "$here/pretrain_main.py" "$@"
fi
echo "Using GPU $gpu (lowest utilization)"
exec bash "$here/train_gpu.sh" "$gpu" "$@"

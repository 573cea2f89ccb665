#!/usr/bin/env bash
# Trains on the GPU with the lowest utilization, then the least memory in use: train_auto_gpu.sh [arguments of pretrain_main.py]
# It chooses among CUDA_VISIBLE_DEVICES. Without a GPU it trains on the CPU.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-$(command -v python3 || echo python)}
gpu=$("$python" -P -c 'from torchstone.scripts.gpu import print_least_loaded_gpu; print_least_loaded_gpu()')
if [[ -z $gpu ]]; then
    echo "No GPU found: training on the CPU"
    exec "$python" "$here/pretrain_main.py" "$@"
fi
echo "Using GPU $gpu (lowest utilization)"
exec bash "$here/train_gpu.sh" "$gpu" "$@"

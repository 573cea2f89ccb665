#!/usr/bin/env bash
# Trains one model on all GPUs, one process each: run_training.sh [--debug | --preset NAME] [--config FILE] [arguments of train]
# Without a GPU it trains on the CPU, with NPROC processes (by default 1).
set -euo pipefail
exec "${PYTHON:-$(command -v python3 || echo python)}" -P -c 'from torchstone.scripts.gpu import run_training; run_training()' "$@"

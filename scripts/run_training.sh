#!/usr/bin/env bash
# Trains one model on all GPUs, a process each: run_training.sh [--debug | --preset NAME] [--config FILE] [words of train]
# Without a GPU it is the CPU, with NPROC processes (1 unless set).
set -euo pipefail
exec "${PYTHON:-$(command -v python3 || echo python)}" -P -c 'from torchstone.doors import run_training; run_training()' "$@"

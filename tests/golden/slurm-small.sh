#!/bin/bash
# Written by `torchstone launch slurm`.
#SBATCH --job-name=torchstone
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
#SBATCH --requeue

set -e

# One launcher on each node; a node that fails ends the others.
code=0
srun --kill-on-bad-exit=1 --wait=0 \
    torchstone train run.yaml --gpus all || code=$?

# 75: saved, and the same command continues. A cancelled job is not requeued.
if [ "$code" -eq 75 ]; then
    if [ "${SLURM_RESTART_COUNT:-0}" -ge 100 ]; then
        echo "saved, but not requeued: already requeued 100 times" >&2
    elif scontrol requeue incomplete "$SLURM_JOB_ID"; then
        exit 0
    fi
fi
exit "$code"

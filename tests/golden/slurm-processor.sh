#!/bin/bash
# Written by `torchstone launch slurm`.
#SBATCH --job-name=torchstone
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=30
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
#SBATCH --no-requeue

set -e

# One launcher on each node; a node that fails ends the others.
code=0
srun --kill-on-bad-exit=1 --wait=0 \
    torchstone train run.yaml --nproc 4 || code=$?

exit "$code"

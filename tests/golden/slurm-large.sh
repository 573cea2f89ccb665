#!/bin/bash
# Written by `torchstone launch slurm`.
#SBATCH '--job-name=a name'
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --mem=0
#SBATCH --time=1-12:00:00
#SBATCH --partition=gpu,long
#SBATCH --account=nlp
#SBATCH --qos=high
#SBATCH '--constraint=h100&nvlink'
#SBATCH --output=logs/%x-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --reservation=mine
#SBATCH '--comment=two words'

set -e
module load cuda
source "$HOME/venv/bin/activate"

# One launcher on each node; a node that fails ends the others.
code=0
srun --kill-on-bad-exit=1 --wait=0 --cpus-per-task=96 \
    python -m torchstone train 'my runs/it'"'"'s.yaml' --gpus all --max-restarts 3 --training.max_steps 100 --output-dir '$(HOME) $$; rm -rf *' || code=$?

# 75: saved, and the same command continues. A cancelled job is not requeued.
if [ "$code" -eq 75 ]; then
    if [ "${SLURM_RESTART_COUNT:-0}" -ge 7 ]; then
        echo "saved, but not requeued: already requeued 7 times" >&2
    elif scontrol requeue incomplete "$SLURM_JOB_ID"; then
        exit 0
    fi
fi
exit "$code"

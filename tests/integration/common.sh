# Sourced by the tests of this folder: runs scripts/base_train.py in an empty folder, with its output in tests/results.
#
# With a GPU they train the real sizes. Without one they run the same code on a CPU, on a model of two layers and with a
# memory limit instead of a device that runs out of memory. Exit codes: 0 passed, 77 skipped, anything else failed.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
NAME=$(basename "$0" .sh)
PYTHON=${PYTHON:-python}
RESULTS=${RESULTS:-$ROOT/tests/results}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
mkdir -p "$RESULTS"
# Each test has a cache of its own, so that it measures.
export TORCHSTONE_CACHE=$WORK/cache

GPUS=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
if [ "$GPUS" -gt 0 ]; then
  DEPTH=${DEPTH:-12} SEQ=${SEQ:-2048} TOKENS=${TOKENS:-524288} STEPS=${STEPS:-20}
  DEVICE=(--system.device cuda)
else
  DEPTH=2 SEQ=64 TOKENS=4096 STEPS=${STEPS:-4}
  DEVICE=(--system.device cpu --system.threads 1 --auto_batch.memory_limit 48MiB)
fi

# train NAME ARGS...: one run, in runs/NAME below $WORK, with its output in $LOG. Returns its exit code.
train() {
  local run=$1
  shift
  LOG=$RESULTS/$NAME-$run.log
  (cd "$WORK" && "$PYTHON" "$ROOT/scripts/base_train.py" --depth "$DEPTH" --max-seq-len "$SEQ" \
    --total-batch-size "$TOKENS" --num-iterations "$STEPS" --run "$run" --observe.console lines \
    --data.cache_dir "$WORK/datasets" "${DEVICE[@]}" "$@") >"$LOG" 2>&1
}

# The size that the last run has found.
found() {
  sed -n 's/.*Auto-discovery found device_batch_size=\([0-9]*\).*/\1/p' "$LOG" | head -n 1
}

# metric RUN FIELD: the mean of a field of metrics.jsonl over all steps after the second.
metric() {
  "$PYTHON" - "$WORK/runs/$1/metrics.jsonl" "$2" <<'PY'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])][2:]
print(sum(line[sys.argv[2]] for line in lines) / len(lines))
PY
}

fail() {
  echo "FAILED $NAME: $1"
  [ -f "${LOG:-}" ] && tail -n 20 "$LOG"
  exit 1
}

skip() {
  echo "SKIPPED $NAME: $1"
  exit 77
}

pass() {
  echo "PASSED $NAME: $1"
}

# expect TEXT: the last run has printed it.
expect() {
  grep -qF -- "$1" "$LOG" || fail "the output does not have: $1"
}

# Sourced by the test_stability_depthN.sh, with DEPTH and perhaps STEPS. Without a GPU: two layers and a few steps.
ASKED=$DEPTH
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
[ "$gpus" -gt 0 ] && STEPS=${STEPS:-1000} || STEPS=${STEPS:-20}
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ "$GPUS" -gt 0 ] || [ "$ASKED" -eq 12 ] || skip "$ASKED layers need a GPU; test_stability_depth12.sh runs 2 layers on a CPU"
train "depth$DEPTH" --auto_batch_size=True || fail "exit code $?"
steps=$(wc -l <"$WORK/runs/depth$DEPTH/metrics.jsonl")
[ "$steps" -eq "$STEPS" ] || fail "$steps steps instead of $STEPS"
grep -qi "out of memory" <(grep -v " steps, 0 out of memory, in" "$LOG") && fail "a step ran out of memory"
pass "$steps steps of $DEPTH layers with device_batch_size=$(found)"

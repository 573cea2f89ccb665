#!/usr/bin/env bash
# The loss does not depend on the size of micro-batches: found, or set by hand.
source "$(dirname "$0")/common.sh"
train auto --auto_batch_size=True || fail "exit code $?"
size=$(found)
train manual --device-batch-size 1 || fail "exit code $?"
grep -q "Auto-discovery" "$LOG" && fail "a run with fixed sizes has searched"
"$PYTHON" - "$WORK/runs/auto/metrics.jsonl" "$WORK/runs/manual/metrics.jsonl" <<'PY' || fail "the losses differ"
import json, sys
auto, manual = ([json.loads(line)["loss"] for line in open(path)] for path in sys.argv[1:])
assert len(auto) == len(manual) > 0
worst = max(abs(a - b) / b for a, b in zip(auto, manual))
print(f"largest relative difference of {len(auto)} losses: {worst:.1e}")
# bf16 on a GPU, fp32 on a CPU.
sys.exit(worst > 5e-3)
PY
pass "device_batch_size=$size and 1 have the same losses"

#!/usr/bin/env bash
# All ranks find the same size: two GPUs, or without a GPU two processes on the CPU.
source "$(dirname "$0")/common.sh"
[ "$GPUS" -ne 1 ] || skip "needs two GPUs, and there is one; test_single_gpu_discovery.sh covers it"
train ddp --auto_batch_size=True --nproc 2 || fail "exit code $?"
sizes=$(sed -n 's/.*Auto-discovery found device_batch_size=\([0-9]*\).*/\1/p' "$WORK"/runs/ddp/logs/rank-*.log | sort | uniq -c)
[ "$(echo "$sizes" | wc -l)" -eq 1 ] && [ "$(echo "$sizes" | awk '{print $1}')" -eq 2 ] || fail "the ranks found: $sizes"
pass "device_batch_size=$(echo "$sizes" | awk '{print $2}') on both ranks"

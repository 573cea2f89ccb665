#!/usr/bin/env bash
# A size is found in one process, in at most 30 seconds besides compiling, and without running out of memory.
source "$(dirname "$0")/common.sh"
train auto --auto_batch_size=True || fail "exit code $?"
size=$(found)
[ "${size:-0}" -ge 1 ] || fail "no size was found"
expect "micro-batches of $size rows"
expect ", 0 out of memory, in "
seconds=$(sed -n 's/.*finding the batch size \([0-9.]*\).*/\1/p' "$LOG")
[ "$GPUS" -gt 0 ] || awk "BEGIN {exit !(${seconds:-0} < 30)}" || fail "it took $seconds s"
pass "device_batch_size=$size in ${seconds:-0} s"

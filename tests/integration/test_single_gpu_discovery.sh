#!/usr/bin/env bash
# A size is found in one process, in at most 30 seconds besides compiling, and without running out of memory.
source "$(dirname "$0")/common.sh"
train auto --auto_batch_size=True || fail "exit code $?"
size=$(found)
[ "${size:-0}" -ge 1 ] || fail "no size was found"
expect "micro-batches of $size rows"
expect ", 0 out of memory, in "
seconds=$(sed -n 's/.* out of memory, in \([0-9.]*\) s, cached in.*/\1/p' "$LOG")
[ -n "$seconds" ] || fail "the output does not say how long it took"
# What is compiled comes from torch's cache in a second run, whose measurements are not cached.
if [ "$GPUS" -gt 0 ]; then
  train warm --auto_batch_size=True --batch_size_cache=False || fail "exit code $?"
  seconds=$(sed -n 's/.* out of memory, in \([0-9.]*\) s, not cached.*/\1/p' "$LOG")
fi
awk "BEGIN {exit !($seconds < 30)}" || fail "it took $seconds s"
pass "device_batch_size=$size in $seconds s"

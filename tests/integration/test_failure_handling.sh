#!/usr/bin/env bash
# What does not fit ends with exit code 4 and says what to change; a cache that cannot be written is no error.
source "$(dirname "$0")/common.sh"
DEVICE+=(--auto_batch.memory_limit 1MiB)
[ "$GPUS" -gt 0 ] || DEVICE=(--system.device cpu --system.threads 1 --auto_batch.memory_limit 1MiB)
train small --auto_batch_size=True && fail "a step in 1 MiB" || code=$?
[ "$code" -eq 4 ] || fail "exit code $code instead of 4"
expect "not even one row fits"
unset 'DEVICE[-1]' 'DEVICE[-1]'
echo "" >"$WORK/file"
TORCHSTONE_CACHE=$WORK/file train unwritable --auto_batch_size=True || fail "exit code $?"
expect "could not be written"
[ "$(found)" -ge 1 ] || fail "no size was found"
pass "exit code 4, and a size without a cache"

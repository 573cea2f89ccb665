#!/usr/bin/env bash
# A size that is set wins; margin and other settings are checked and used.
source "$(dirname "$0")/common.sh"
train manual --auto_batch_size=True --device-batch-size 2 || fail "exit code $?"
expect "Auto-discovery skipped: training.batch_size 2 is set"
expect "micro-batches of 2 rows"
train margin --auto_batch_size --batch_size_margin 0.5 || fail "exit code $?"
expect "(margin 0.5)"
train key --device-batch-size auto || fail "exit code $?"
expect "Auto-discovery found device_batch_size="
train wrong --auto_batch_size=True --batch_size_margin=1.5 && fail "a margin of 1.5 was accepted" || code=$?
[ "$code" -eq 2 ] || fail "exit code $code instead of 2"
pass "manual size, margin, training.batch_size auto, a wrong margin"

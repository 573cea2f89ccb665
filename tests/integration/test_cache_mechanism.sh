#!/usr/bin/env bash
# The second run takes its size from the cache, in less than 5 seconds; a damaged file is measured again.
source "$(dirname "$0")/common.sh"
train first --auto_batch_size=True || fail "exit code $?"
expect "cached in $TORCHSTONE_CACHE/auto_batch_cache/"
size=$(found)
train second --auto_batch_size=True || fail "exit code $?"
expect "all from the cache"
[ "$(found)" = "$size" ] || fail "found $(found) instead of $size"
seconds=$(sed -n 's/.*in \([0-9.]*\) s, all from the cache.*/\1/p' "$LOG")
awk "BEGIN {exit !($seconds < 5)}" || fail "the cache took $seconds s"
train off --auto_batch_size=True --batch_size_cache=False || fail "exit code $?"
expect "not cached"
file=$(echo "$TORCHSTONE_CACHE"/auto_batch_cache/*.json)
echo "{" >"$file"
train damaged --auto_batch_size=True || fail "exit code $?"
expect "is damaged: measuring again"
"$PYTHON" -m json.tool "$file" >/dev/null || fail "the damaged file was not replaced"
pass "device_batch_size=$size, from the cache in $seconds s"

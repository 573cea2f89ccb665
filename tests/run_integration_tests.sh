#!/usr/bin/env bash
# Runs tests/integration/test_*.sh, or those whose names contain an argument. Their output goes to tests/results.
cd "$(dirname "$0")" || exit 1
failed=0 skipped=0 passed=0
for script in integration/test_*.sh; do
  [ $# -eq 0 ] || grep -qE "$(IFS='|'; echo "$*")" <<<"$script" || continue
  bash "$script"
  case $? in
    0) passed=$((passed + 1)) ;;
    77) skipped=$((skipped + 1)) ;;
    *) failed=$((failed + 1)) ;;
  esac
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]

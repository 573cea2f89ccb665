#!/usr/bin/env bash
# 26 layers: STABILITY_STEPS steps (1000 by default) at the size that is found, without running out of memory.
DEPTH=26 STEPS=${STABILITY_STEPS:-}
source "$(dirname "$0")/stability.sh"

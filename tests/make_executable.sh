#!/usr/bin/env bash
# For archives that lose file modes: makes the scripts of this folder executable.
cd "$(dirname "$0")" && chmod +x ./*.sh integration/test_*.sh

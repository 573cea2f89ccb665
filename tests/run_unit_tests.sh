#!/usr/bin/env bash
# The unit tests of the automatic batch size. Arguments go to pytest.
cd "$(dirname "$0")/.." && exec "${PYTHON:-python}" -m pytest tests/test_auto_batch_size.py "$@"

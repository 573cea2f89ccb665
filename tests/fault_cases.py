"""Which of tests/faults the ordinary suite runs: one of each kind, since each starts, and ends, a whole launch.

`make faults` (FAULTS=all) runs all of them.
"""

from __future__ import annotations

import os

import pytest

the_rest = pytest.mark.skipif(
    os.environ.get("FAULTS") != "all", reason="one of each kind is run; `make faults` runs all"
)

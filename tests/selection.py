"""Which of the longest tests the ordinary suite runs: of those that start and end whole launches one of each kind, and
of the largest layout one family. `make test-all` (TESTS=all) runs all of them.
"""

from __future__ import annotations

import os

import pytest

the_rest = pytest.mark.skipif(
    os.environ.get("TESTS") != "all", reason="one of its kind is run; `make test-all` runs all"
)

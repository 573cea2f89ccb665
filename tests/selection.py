"""Which of the longest tests `make test` runs: of those that start and end whole launches one of each kind, and of the
layouts those of up to eight processes. `make docs` (TESTS=docs) runs the documentation, `make test-all` (TESTS=all)
everything.
"""

from __future__ import annotations

import os

import pytest

RUNS_ALL = os.environ.get("TESTS") == "all"
the_rest = pytest.mark.skipif(not RUNS_ALL, reason="one of its kind is run; `make test-all` runs all")
documentation = pytest.mark.skipif(
    os.environ.get("TESTS") not in ("docs", "all"), reason="`make docs` runs the commands of the documentation"
)

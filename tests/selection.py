"""Which of the longest tests `make test` runs: of those that start and end whole launches one of each kind, and of the
largest layout one family. `make docs` (TESTS=docs) runs the documentation, `make test-all` (TESTS=all) everything.
"""

from __future__ import annotations

import os

import pytest

the_rest = pytest.mark.skipif(
    os.environ.get("TESTS") != "all", reason="one of its kind is run; `make test-all` runs all"
)
documentation = pytest.mark.skipif(
    os.environ.get("TESTS") not in ("docs", "all"), reason="`make docs` runs the commands of the documentation"
)

"""Runs the GPU tests: `python run_gpu_tests.py --overfitting -k test_single_sample_overfitting`.

What it does not know goes to pytest, whose exit code it returns. Without a GPU the tests are skipped with the reason.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent / "tests/gpu_tests"
FILES = {
    "overfitting": ("test_overfitting.py", "overfitting on one sample, and the loss against a reference"),
    "single": ("test_single_gpu_training.py", "training on one GPU"),
    "multi": ("test_multi_gpu_training.py", "training on two GPUs"),
}


def main() -> int:
    # Without abbreviations: -s and --si... are pytest's.
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--all", action="store_true", help="all GPU tests (the default)")
    for name, (file, text) in FILES.items():
        parser.add_argument(f"--{name}", action="store_true", help=f"{text}: {file}")
    chosen, pytest_args = parser.parse_known_args()
    files = [TESTS / file for name, (file, _) in FILES.items() if getattr(chosen, name)]
    paths = [TESTS] if chosen.all or not files else files
    command = [sys.executable, "-m", "pytest", *map(str, paths), *pytest_args]
    return subprocess.run(command, cwd=TESTS.parents[1], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

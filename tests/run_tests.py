"""Runs the suite with one line per file, then prints the tables of comparisons: `python tests/run_tests.py`.

Arguments go to pytest: `python tests/run_tests.py -k resume`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent
# As scripts these print what their tests measure.
TABLES = ("test_batch_lengths_to_minibatches.py", "training/test_custom_modeling.py")


def main() -> int:
    failed = []
    for path in sorted([*TESTS.glob("test_*.py"), *TESTS.glob("*/test_*.py")]):
        started = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", str(path), *sys.argv[1:]]
        process = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent, check=False)
        # 5: no test in this file matches the arguments.
        result = {0: "passed", 5: "nothing to run"}.get(process.returncode, "FAILED")
        lines = process.stdout.strip().splitlines()
        name = path.relative_to(TESTS.parent)
        print(f"{name!s:<45} {result:<15} {time.monotonic() - started:6.1f} s  {lines[-1] if lines else ''}")
        if result == "FAILED":
            failed.append(name)
            print(process.stdout[-4000:], process.stderr[-2000:])
    if not sys.argv[1:]:
        for name in TABLES:
            print(f"\n{name}", flush=True)
            subprocess.run([sys.executable, str(TESTS / name)], cwd=TESTS.parent, check=True)
    print(f"\n{len(failed)} files failed: {', '.join(map(str, failed))}" if failed else "\nall files passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

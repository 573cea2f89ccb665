"""How right the ETA was: a run of the demo model, and the error of its lines at shares of the time that it took.

    python benchmarks/launch/eta.py --training.max_steps 400 --training.validate_every_steps 40

Prints one JSON line. An error of 0.1 is an ETA that is 10 % of the time left too long. Lines are taken as they come,
rounded to seconds, so the share of 0.95 says little about a run of a minute.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time

SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # Prepared beforehand: what is measured is the loop.
        words = [
            "--preset",
            "demo",
            "--observe.log_every_steps",
            "1",
            "--data.cache_dir",
            f"{folder}/cache",
            *sys.argv[1:],
        ]
        command = [sys.executable, "-m", "torchstone.cli", "train", *words, "--output-dir", f"{folder}/run"]
        seen: list[tuple[float, float]] = []
        began = ended = 0.0
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as run:
            assert run.stderr is not None
            for line in run.stderr:
                if line.startswith("done:"):
                    # Python, and CUDA, still have to be taken down.
                    ended = time.monotonic()
                step = re.search(r"Step \[(\d+)/\d+\].*ETA: ([\d:]+|-)", line)
                if step is None:
                    continue
                now = time.monotonic()
                if step[1] == "1":
                    began = now
                elif step[2] != "-":
                    seen.append((now, seconds(step[2])))
        assert run.returncode == 0, f"exit code {run.returncode}"
    found = {}
    for share in SHARES:
        at, eta = next(each for each in seen if each[0] >= began + share * (ended - began))
        found[f"at {share:.0%}"] = (eta - (ended - at)) / (ended - at)
    print(json.dumps({"seconds": ended - began, "steps": len(seen) + 1, "error": found}))


def seconds(clock: str) -> float:
    total = 0.0
    for part in clock.split(":"):
        total = 60 * total + float(part)
    return total


if __name__ == "__main__":
    main()

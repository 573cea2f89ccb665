"""Measure the error of the ETA: train the demo model, and compare the ETA of its lines with the time it really took.

    python benchmarks/launch/eta.py --training.max_steps 400 --training.validate_every_steps 40

Arguments go to `torchstone train`. Prints one JSON line. An error of 0.1 means that the ETA was 10 % longer than the
time left. The ETA is printed in seconds, so the last lines of a short run say little.
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
        command = [sys.executable, "-m", "torchstone.cli", "train", "--preset", "demo", "--output-dir", f"{folder}/run"]
        command += ["--observe.log_every_steps", "1", "--data.cache_dir", f"{folder}/cache", *sys.argv[1:]]
        started, ended, etas = watch(command)
    errors = {}
    for share in SHARES:
        now, eta = next(each for each in etas if each[0] >= started + share * (ended - started))
        errors[f"at {share:.0%}"] = (eta - (ended - now)) / (ended - now)
    print(json.dumps({"seconds": ended - started, "steps": len(etas) + 1, "error": errors}))


def watch(command: list[str]) -> tuple[float, float, list[tuple[float, float]]]:
    """When step 1 and the run were done, and the ETA of every later step with the time of its line."""
    etas: list[tuple[float, float]] = []
    started = ended = 0.0
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            now = time.monotonic()
            if line.startswith("done:"):
                # Before Python and CUDA shut down.
                ended = now
            step = re.search(r"Step \[(\d+)/\d+\].*ETA: ([\d:]+|-)", line)
            if step is not None and step[1] == "1":
                started = now
            elif step is not None and step[2] != "-":
                etas.append((now, parse_time(step[2])))
    assert process.returncode == 0, f"exit code {process.returncode}"
    return started, ended, etas


def parse_time(text: str) -> float:
    """`1:02:05` in seconds."""
    seconds = 0.0
    for part in text.split(":"):
        seconds = 60 * seconds + float(part)
    return seconds


if __name__ == "__main__":
    main()

"""Measure the memory of preparing a large file, over all processes.

    python benchmarks/data/memory.py [--megabytes 2000] [--processes 2]

Writes the file, then runs `torchstone prepare` on it. Reports the peaks of the proportional set size (shared pages
count once) and of the sum of resident sizes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from rows import Prose, texts, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=2000)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="memory-"))
    try:
        measure(options, folder)
    finally:
        shutil.rmtree(folder)


def measure(options: argparse.Namespace, folder: Path) -> None:
    # The same 100 MB repeated: making new text would take longer than preparing it.
    part = min(options.megabytes, 100)
    write(folder / "part.jsonl", texts(Prose()), part)
    with (folder / "rows.jsonl").open("wb") as file:
        for _ in range(round(options.megabytes / part)):
            file.write((folder / "part.jsonl").read_bytes())
    size = (folder / "rows.jsonl").stat().st_size
    torchstone = [sys.executable, "-m", "torchstone.cli"]
    train = ["tokenizer", "train", str(folder / "tokenizer"), "--data", str(folder / "part.jsonl")]
    train += ["--vocab-size", "16384", "--max-bytes", "5000000"]
    subprocess.run([*torchstone, *train], check=True, capture_output=True)
    prepare = ["prepare", "--model.tokenizer", str(folder / "tokenizer"), "--data.path", str(folder / "rows.jsonl")]
    prepare += ["--data.cache_dir", str(folder / "cache"), "--data.prepare_workers", str(options.processes)]
    started = time.monotonic()
    process = subprocess.Popen([*torchstone, *prepare], stdout=subprocess.DEVNULL)
    peak_pss, peak_rss = 0, 0
    while process.poll() is None:
        pss, rss = tree_memory(psutil.Process(process.pid))
        peak_pss, peak_rss = max(peak_pss, pss), max(peak_rss, rss)
        time.sleep(0.2)
    assert process.returncode == 0
    seconds = time.monotonic() - started
    print(json.dumps({"megabytes": size / 1e6, "processes": options.processes, "s": seconds,
                      "megabytes_per_s": size / 1e6 / seconds, "peak_pss_mb": peak_pss / 1e6,
                      "peak_rss_sum_mb": peak_rss / 1e6}))  # fmt: skip


def tree_memory(parent: psutil.Process) -> tuple[int, int]:
    """PSS and RSS of a process and its children; zero if one of them has just ended."""
    try:
        infos = [process.memory_full_info() for process in (parent, *parent.children(recursive=True))]
    except psutil.NoSuchProcess:
        return 0, 0
    return sum(info.pss for info in infos), sum(info.rss for info in infos)


if __name__ == "__main__":
    main()

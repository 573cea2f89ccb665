"""The memory that preparing a large file takes: the whole tree of processes, watched while it works.

    python benchmarks/data/memory.py [--megabytes 2000] [--processes 2]

Writes the file first, then runs `torchstone prepare` on it in a process of its own. Reported are the peaks of the
proportional set size (pages shared by several processes counted once) and of the plain sum of resident sizes.
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
    # A hundred megabytes of text, over and over: making it all new would take longer than preparing it.
    part = min(options.megabytes, 100)
    write(folder / "part.jsonl", texts(Prose()), part)
    with (folder / "rows.jsonl").open("wb") as file:
        for _ in range(round(options.megabytes / part)):
            file.write((folder / "part.jsonl").read_bytes())
    size = (folder / "rows.jsonl").stat().st_size
    torchstone = [sys.executable, "-m", "torchstone.cli"]
    learn = [
        "tokenizer",
        "train",
        str(folder / "tokenizer"),
        "--data",
        str(folder / "part.jsonl"),
        "--vocab-size",
        "16384",
    ]
    subprocess.run([*torchstone, *learn, "--max-bytes", "5000000"], check=True, capture_output=True)
    prepare = ["prepare", "--model.tokenizer", str(folder / "tokenizer"), "--data.path", str(folder / "rows.jsonl")]
    prepare += ["--data.cache_dir", str(folder / "cache"), "--data.prepare_workers", str(options.processes)]
    began = time.monotonic()
    process = subprocess.Popen([*torchstone, *prepare], stdout=subprocess.DEVNULL)
    shared, plain = 0, 0
    while process.poll() is None:
        now = tree_memory(psutil.Process(process.pid))
        shared, plain = max(shared, now[0]), max(plain, now[1])
        time.sleep(0.2)
    assert process.returncode == 0
    seconds = time.monotonic() - began
    print(json.dumps({"megabytes": size / 1e6, "processes": options.processes, "s": seconds,
                      "megabytes_per_s": size / 1e6 / seconds, "peak_pss_mb": shared / 1e6,
                      "peak_rss_sum_mb": plain / 1e6}))  # fmt: skip


def tree_memory(parent: psutil.Process) -> tuple[int, int]:
    """Of a process and its children; one that has just ended holds nothing."""
    shared, plain = 0, 0
    try:
        for process in (parent, *parent.children(recursive=True)):
            found = process.memory_full_info()
            shared, plain = shared + found.pss, plain + found.rss
    except psutil.NoSuchProcess:
        return 0, 0
    return shared, plain


if __name__ == "__main__":
    main()

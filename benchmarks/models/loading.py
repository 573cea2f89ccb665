"""Peak memory of loading a model, over its size in the numbers it is loaded in; a JSON line an arm.

    python benchmarks/models/loading.py [--depth 16] [--folder /tmp/one-billion]

The folder (made if it is not there) holds a model of Llama 3.2 1B's shape in bf16, 2.5 GB: one file, and another time
in shards. Every arm is a process of its own. What is counted is the process's peak beyond what it had once everything
was imported and a model of one layer had been loaded the same way; Transformers is the same, for comparison.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

ARMS = [
    (who, numbers, kind)
    for who in ("torchstone", "transformers")
    for numbers in ("bfloat16", "float32")
    for kind in ("one-file", "shards")
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/one-billion"))
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--arm", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(measure(*options.arm, options.folder)))
        return
    make(options.folder, options.depth)
    for arm in ARMS:
        words = [sys.executable, __file__, "--folder", str(options.folder), "--arm", *arm]
        print(subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip(), flush=True)


def make(folder: Path, depth: int) -> None:
    from speed import LLAMA_1B

    from torchstone.models.families import new_config
    from torchstone.models.opening import new_model
    from torchstone.models.weights import save_weights

    for name, layers, shard_bytes in (("small", 1, 10**10), ("one-file", depth, 10**10), ("shards", depth, 5 * 10**8)):
        place = folder / name
        if (place / "config.json").is_file():
            continue
        place.mkdir(parents=True, exist_ok=True)
        shape = LLAMA_1B | {"depth": layers} | ({"vocab_size": 512} if name == "small" else {})
        model = new_model(new_config("llama", **shape), 0.02, 0, torch.device("cpu"), torch.bfloat16)
        model.save(place)
        if name == "shards":
            (place / "model.safetensors").unlink()
            save_weights(model.pieces(), model.family, place, shard_bytes)


def measure(who: str, numbers: str, kind: str, folder: Path) -> dict[str, object]:
    load = ours if who == "torchstone" else theirs
    dtype = getattr(torch, numbers)
    load(folder / "small", dtype)
    before, began = memory("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")
    module = load(folder / kind, dtype)
    peak, seconds = memory("VmHWM") - before, time.perf_counter() - began
    size = sum(parameter.nbytes for parameter in module.parameters())
    return {"who": who, "dtype": numbers, "files": kind, "parameters": sum(p.numel() for p in module.parameters()),
            "model_gb": round(size / 1e9, 3), "peak_gb": round(peak / 1e9, 3), "ratio": round(peak / size, 3),
            "seconds": round(seconds, 1)}  # fmt: skip


def ours(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    from torchstone.models.opening import load_model

    return load_model(folder, torch.device("cpu"), dtype).module


def theirs(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)


def memory(kind: str) -> int:
    """In bytes, of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {kind}")


if __name__ == "__main__":
    main()

"""Measure the peak memory of loading a model, over its size in the dtype it is loaded in; one JSON line per case.

    python benchmarks/models/loading.py [--depth 16] [--folder /tmp/one-billion]

The folder (made if it does not exist) holds a model of the sizes of Llama 3.2 1B in bf16, 2.5 GB: in one file, and in
several. Every case is a process of its own. The peak is that of RssAnon + RssShmem, sampled every 2 ms, beyond what the
process had after it loaded a model of one layer the same way. Pages of a mapped file are in RSS but not in the peak:
the kernel takes them back when it needs memory. Transformers is measured the same way, for comparison.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

CASES = [
    (library, dtype, files)
    for library in ("torchstone", "transformers")
    for dtype in ("bfloat16", "float32")
    for files in ("one-file", "shards")
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/one-billion"))
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(*options.case, options.folder)))
        return
    make_models(options.folder, options.depth)
    for case in CASES:
        command = [sys.executable, __file__, "--folder", str(options.folder), "--case", *case]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip(), flush=True)


def make_models(folder: Path, depth: int) -> None:
    from speed import LLAMA_1B

    from torchstone.checkpoint.save import full_unfused_parameters, save_model
    from torchstone.checkpoint.weight_files import save_weights
    from torchstone.checkpoint.weight_names import WEIGHT_NAMES
    from torchstone.models.families import new_hf_config
    from torchstone.parallel.build import build_new_model

    for name, layers, shard_bytes in (("small", 1, 10**10), ("one-file", depth, 10**10), ("shards", depth, 5 * 10**8)):
        path = folder / name
        if (path / "config.json").is_file():
            continue
        path.mkdir(parents=True, exist_ok=True)
        sizes = LLAMA_1B | {"depth": layers} | ({"vocab_size": 512} if name == "small" else {})
        model = build_new_model(new_hf_config("llama", **sizes), 0.02, 0, torch.device("cpu"), torch.bfloat16)
        save_model(model, path)
        if name == "shards":
            (path / "model.safetensors").unlink()
            save_weights(full_unfused_parameters(model), WEIGHT_NAMES["llama"], path, shard_bytes)


def measure(library: str, dtype_name: str, files: str, folder: Path) -> dict[str, object]:
    load = load_with_torchstone if library == "torchstone" else load_with_transformers
    dtype = getattr(torch, dtype_name)
    load(folder / "small", dtype)
    before, started = anonymous_memory(), time.perf_counter()
    samples, finished = [before], threading.Event()

    def sample() -> None:
        while not finished.wait(0.002):
            samples.append(anonymous_memory())

    sampler = threading.Thread(target=sample)
    sampler.start()
    module = load(folder / files, dtype)
    seconds = time.perf_counter() - started
    finished.set()
    sampler.join()
    peak = max(*samples, anonymous_memory()) - before
    size = sum(parameter.nbytes for parameter in module.parameters())
    return {"library": library, "dtype": dtype_name, "files": files,
            "parameters": sum(p.numel() for p in module.parameters()), "model_gb": round(size / 1e9, 3),
            "peak_gb": round(peak / 1e9, 3), "ratio": round(peak / size, 3), "seconds": round(seconds, 1)}  # fmt: skip


def load_with_torchstone(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    from torchstone.checkpoint.model_folder import load_model

    return load_model(folder, torch.device("cpu"), dtype).module


def load_with_transformers(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)


def anonymous_memory() -> int:
    """Bytes of this process that the kernel cannot take back without swapping."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


if __name__ == "__main__":
    main()

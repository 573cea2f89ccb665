"""The command of a new user, without a flag, against the same with sizes and settings chosen by hand.

    python benchmarks/default_run.py                                  the 1B model, on a GPU
    python benchmarks/default_run.py --shape tiny --device cpu --rows 128

The command is `torchstone train --model.path MODEL --data.path chat.jsonl`, on conversations with long-tailed lengths.
Every run trains one epoch and prints one JSON line: what it chose, and its tokens per second, the mean of all steps
after the second.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from train import PEERS, SHAPES, run_logged, summarize, write_job, write_tokenizer

# The conversations that do not fit into the default context length are dropped.
MEDIAN_LENGTH, MAX_LENGTH = 403, 1000
CHAT_TEMPLATE = """{% for message in messages %}<s>{{ message["content"] }}</s>{% endfor %}
{%- if add_generation_prompt %}<s>{% endif %}"""
BY_HAND = {
    "4096 tokens": ["--training.max_tokens_per_gpu", "4096"],
    "8192 tokens": ["--training.max_tokens_per_gpu", "8192"],
    "16384 tokens": ["--training.max_tokens_per_gpu", "16384"],
    "32768 tokens": ["--training.max_tokens_per_gpu", "32768"],
    "no recomputation": ["--model.recompute", "none"],
    "full recomputation": ["--model.recompute", "full"],
    "fused projections": ["--model.fused", "qkv,gate_up"],
    "flash": ["--model.attention", "flash"],
    "uncompiled": ["--model.compile", "none"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=["1b", "tiny"], default="1b")
    parser.add_argument("--rows", type=int, default=1280)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--arm", action="append", choices=list(BY_HAND), help="may be repeated; by default all")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model, data = write_model(options, folder), write_conversations(options, folder / "chat.jsonl")
        command = ["-m", "torchstone", "train", "--model.path", model, "--data.path", data]
        arms: dict[str, list[str]] = {"defaults": []}
        arms |= {name: BY_HAND[name] for name in options.arm or BY_HAND}
        for name, flags in arms.items():
            flags = flags + (["--system.device", "cpu"] if options.device == "cpu" else [])
            print(json.dumps({"arm": name, "flags": flags} | run(command, flags, folder / name)), flush=True)


def write_model(options: argparse.Namespace, folder: Path) -> Path:
    shape = SHAPES[options.shape]
    write_tokenizer(folder / "tokenizer", shape.vocab_size)
    settings = folder / "tokenizer/tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": CHAT_TEMPLATE}))
    job = {"device": options.device, "tokenizer": str(folder / "tokenizer"), "model": str(folder / "model")}
    run_logged([sys.executable, PEERS / "new_model.py", write_job(asdict(shape) | job, folder)], folder / "log")
    return folder / "model"


def write_conversations(options: argparse.Namespace, path: Path) -> Path:
    """Of two or four messages; the answers are longer than the questions."""
    rng, words = np.random.default_rng(0), SHAPES[options.shape].vocab_size
    with path.open("w") as file:
        for _ in range(options.rows):
            length = int(np.clip(rng.lognormal(math.log(MEDIAN_LENGTH), 0.9), 16, MAX_LENGTH))
            turns = int(rng.integers(1, 3))
            messages = []
            for role, share in [("user", 0.25), ("assistant", 0.75)] * turns:
                ids = (3 * (words / 3) ** rng.random(max(1, int(share * length / turns)))).astype(int)
                messages.append({"role": role, "content": " ".join(f"w{n}" for n in ids)})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def run(command: list[Any], flags: list[str], folder: Path) -> dict[str, Any]:
    arguments = [sys.executable, *map(str, command), *flags, "--output-dir", str(folder), "--observe.console", "lines"]
    result = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        return {"error": f"exit code {result.returncode}: {result.stdout[-2000:]}"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # Checkpoints of all runs would fill the disk.
    shutil.rmtree(folder)
    keys = {"tokens": "tokens", "seconds": "step_s", "loss": "loss", "grad_norm": "grad_norm"}
    steps = [{key: line[name] for key, name in keys.items()} for line in lines]
    said = [
        line.partition(" | ")[2] for line in result.stdout.splitlines() if "Auto-disc" in line or "attention" in line
    ]
    return {"said": said} | summarize({"steps": steps, "peak_bytes": max(line["memory"] for line in lines)})


if __name__ == "__main__":
    main()

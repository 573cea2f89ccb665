"""Compare the losses of FP8 training with those of bf16 on real text: the sources of Python's standard library.

    python benchmarks/models/fp8_loss.py [--steps 500] [--depth 12] [--width 768] [--arm bf16 fp8 fp8/rowwise]
    python benchmarks/models/fp8_loss.py --emulate --device cpu --steps 60 --depth 2 --width 64 --rows 8 --length 128
        --vocabulary 1024 --text-bytes 2000000

An arm is a training.precision, after a slash with training.fp8_recipe. All arms train from the same seed on the same
rows, as `torchstone train` does. One JSON line each, compared with the first arm: `all` is the relative difference of
the mean loss of all steps, `last_50` of the last 50, and `worst_20` the largest of 20 steps in a row, which end at
`worst_step`. bf16 is not exact either: `fp32` as an arm shows by how much. Without a GPU, `--emulate` multiplies FP8
values in fp32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from torchstone import api
from torchstone.models.fp8 import Fp8Options
from torchstone.observe.metrics import read_metrics
from torchstone.training import defaults

WINDOW = 20
SIZES = (("steps", 500), ("depth", 12), ("width", 768), ("heads", 12), ("rows", 16), ("length", 1024),
         ("vocabulary", 16384), ("text-bytes", 40_000_000), ("seed", 0))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in SIZES:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--arm", nargs="+", default=["bf16", "fp8"], help="precision, or precision/recipe")
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--compile", default="block")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--text", type=Path, help="a text file instead of Python's standard library")
    parser.add_argument("--emulate", action="store_true", help="FP8 without FP8 kernels, without torch.compile")
    options = parser.parse_args()
    if options.steps < WINDOW:
        parser.error(f"--steps must be at least {WINDOW}")
    if options.emulate:
        defaults.Fp8Options = partial(Fp8Options, emulate=True)  # type: ignore[misc,assignment]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = write_text(folder / "text.jsonl", options)
        api.train_tokenizer(data, folder / "tokenizer", options.vocabulary, chat_template=None, quiet=True)
        reference: list[float] = []
        for arm in options.arm:
            lines = train(arm, data, folder, options)
            losses = [line["loss"] for line in lines]
            reference = reference or losses
            tok_s = statistics.median(line["tok_s"] for line in lines)
            print(json.dumps({"arm": arm, "tok_s": round(tok_s)} | compare(losses, reference)), flush=True)


def write_text(path: Path, options: argparse.Namespace) -> str:
    """A row for every file of the standard library, or for every part of a text, up to --text-bytes."""
    if options.text is not None:
        text = options.text.read_text(errors="replace")
        texts = [text[start : start + 20_000] for start in range(0, len(text), 20_000)]
    else:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(file for file in root.rglob("*.py") if "site-packages" not in file.parts)
        texts = [file.read_text(errors="replace") for file in files]
    size = 0
    with path.open("w") as file:
        for text in texts:
            size += len(text)
            if text.strip() and size <= options.text_bytes:
                file.write(json.dumps({"text": text}) + "\n")
    return str(path)


def train(arm: str, data: str, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    precision, _, recipe = arm.partition("/")
    run = folder / arm.replace("/", "-")
    overrides = {
        "model.depth": options.depth,
        "model.width": options.width,
        "model.heads": options.heads,
        "model.tokenizer": str(folder / "tokenizer"),
        "model.compile": "none" if options.emulate else options.compile,
        "data.path": data,
        "data.context_length": options.length,
        "data.cache_dir": str(folder / "cache"),
        "training.max_steps": options.steps,
        "training.global_batch_size": options.rows,
        "training.batch_size": options.rows,
        "training.precision": precision,
        "training.fp8_recipe": recipe or "tensorwise",
        "training.seed": options.seed,
        "optim.learning_rate": options.learning_rate,
        "optim.warmup_steps": max(1, options.steps // 20),
        "checkpoint.at_end": False,
        "observe.console": "quiet",
        "system.device": options.device,
        "output_dir": str(run),
    }
    api.train(overrides=overrides)
    return read_metrics(run / "metrics.jsonl")


def compare(losses: list[float], reference: list[float]) -> dict[str, float]:
    """The last losses of a run, and how far it is from `reference`, as shares of the reference's loss."""
    windows = range(len(losses) - WINDOW + 1)
    differences = [relative_mean(losses[at : at + WINDOW], reference[at : at + WINDOW]) for at in windows]
    worst = max(differences, key=abs)
    return {
        "first_loss": losses[0],
        "last_50_loss": statistics.fmean(losses[-50:]),
        "all": relative_mean(losses, reference),
        "last_50": relative_mean(losses[-50:], reference[-50:]),
        "worst_20": worst,
        "worst_step": differences.index(worst) + WINDOW,
    }


def relative_mean(losses: list[float], reference: list[float]) -> float:
    return statistics.fmean(losses) / statistics.fmean(reference) - 1


if __name__ == "__main__":
    main()

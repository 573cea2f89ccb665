"""Compare `torchstone train` with other trainers: the same tokens, precision and optimizer, one after the other.

    python benchmarks/train.py 1b                        all arms of a shape, two repeats
    python benchmarks/train.py sft --recompute           with activation checkpointing in every arm
    python benchmarks/train.py lora                      adapters of an 8B model, against PEFT
    python benchmarks/train.py 1b --arm torchstone -- --training.precision fp8
    python benchmarks/train.py tiny --device cpu         on a CPU, against Transformers

Our arm is the command as a user types it, without performance flags: model, data and batch only (what follows `--` is
added to it). Each peer runs from its own package in its own process (`peers/`); one that is not installed is reported
as such. Arms take turns. Every run prints one JSON line; a table of ratios follows. The speed is the mean of all steps
after the second. A run in which a loss is not finite or a gradient norm is not positive is an error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from torchstone.launch.gpus import list_gpus

PEERS = Path(__file__).parent / "peers"
WARMUP_STEPS = 2
# Those of our defaults: for a new model, and for fine-tuning. The schedule is constant in every arm.
OPTIM = {"learning_rate": 3e-4, "weight_decay": 0.1}
FINE_TUNING_OPTIM = {"learning_rate": 2e-5, "weight_decay": 0.0}
LORA_OPTIM = {"learning_rate": 2e-4, "weight_decay": 0.0}


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama, and of a step: `rows` of `length` tokens, or packed documents of up to `length` tokens."""

    depth: int
    width: int
    heads: int
    kv_heads: int
    mlp_width: int
    vocab_size: int
    tied: bool
    rows: int
    length: int
    # Packed documents: the tokens that fit into a step, and their median length. They are fine-tuned from a folder.
    packed_tokens: int | None = None
    median_length: int = 403
    precision: str = "bf16"
    # LoRA of all linears of the blocks; alpha is twice the rank. It starts from a folder too.
    lora_rank: int | None = None
    # OSFT of all linears of the blocks, which trains the rest as well, as mini_trainer does.
    osft_ratio: float | None = None
    arms: tuple[str, ...] = ("torchstone", "transformers", "torchtitan")


LLAMA_1B = {
    "depth": 16,
    "width": 2048,
    "heads": 32,
    "kv_heads": 8,
    "mlp_width": 8192,
    "vocab_size": 128256,
    "tied": True,
}
TINY = {"depth": 2, "width": 64, "heads": 4, "kv_heads": 2, "mlp_width": 192, "vocab_size": 512, "tied": True}
SHAPES = {
    "1b": Shape(**LLAMA_1B, rows=8, length=4096),
    "8b": Shape(32, 4096, 32, 8, 14336, 128256, False, rows=2, length=4096, precision="bf16-pure"),
    "124m": Shape(12, 768, 12, 12, 2048, 50304, True, rows=64, length=1024),
    "sft": Shape(
        **LLAMA_1B, rows=50, length=4096, packed_tokens=32768, arms=("torchstone", "transformers", "mini_trainer")
    ),
    "lora": Shape(
        32, 4096, 32, 8, 14336, 128256, False, rows=4, length=4096, lora_rank=16, arms=("torchstone", "transformers")
    ),
    "osft": Shape(
        **LLAMA_1B, rows=50, length=4096, packed_tokens=32768, osft_ratio=0.25, arms=("torchstone", "mini_trainer")
    ),
    "100m": Shape(12, 768, 12, 12, 2048, 32000, True, 2, 256, precision="fp32", arms=("torchstone", "transformers")),
    "tiny": Shape(**TINY, rows=8, length=64, precision="fp32", arms=("torchstone", "transformers")),
    "tiny-sft": Shape(
        **TINY, rows=4, length=96, packed_tokens=192, median_length=32, precision="fp32",
        arms=("torchstone", "transformers"),
    ),
    "tiny-lora": Shape(
        **TINY, rows=4, length=64, precision="fp32", lora_rank=4, arms=("torchstone", "transformers")
    ),
}  # fmt: skip


def main() -> None:
    arguments, flags = split_flags(sys.argv[1:])
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Flags after -- are for torchstone train, such as -- --model.loss full",
    )
    parser.add_argument("shape", choices=list(SHAPES))
    arms = sorted({arm for shape in SHAPES.values() for arm in shape.arms})
    parser.add_argument("--arm", action="append", choices=arms, help="may be repeated; by default all of the shape")
    parser.add_argument("--steps", type=int, default=24, help="of every run")
    parser.add_argument("--repeats", type=int, default=2, help="of every arm, in turn")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="by default a GPU if there is one")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing in every arm")
    parser.add_argument("--folder", type=Path, help="keep the data, the model and all logs in this folder")
    options = parser.parse_args(arguments)
    shape = SHAPES[options.shape]
    options.device = options.device or ("cuda" if list_gpus() else "cpu")
    if options.device == "cpu" and shape.precision != "fp32":
        parser.error(f"{options.shape} needs a GPU; tiny, tiny-sft and 100m run on a CPU")
    if options.steps <= WARMUP_STEPS:
        parser.error(f"--steps must be more than {WARMUP_STEPS}: the first {WARMUP_STEPS} are not counted")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        job = make_job(shape, folder, options)
        results: list[dict[str, Any]] = []
        for repeat in range(1, options.repeats + 1):
            for arm in options.arm or shape.arms:
                run_folder = folder / f"{arm}-{repeat}-{time.time_ns()}"
                run_folder.mkdir()
                result = (
                    run_torchstone(job, run_folder, flags) if arm == "torchstone" else run_peer(arm, job, run_folder)
                )
                line = {"shape": options.shape, "arm": arm, "repeat": repeat} | summarize(result)
                print(json.dumps(line), flush=True)
                results.append(line)
    print(table(results))
    if any("error" in line for line in results):
        sys.exit(1)


def split_flags(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments of this program, and after `--` the flags for torchstone train."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def make_job(shape: Shape, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Writes tokens, tokenizer and, for fine-tuning, the model; returns what every arm needs to know."""
    tokenizer, data = folder / "tokenizer", folder / "tokens.jsonl"
    write_tokenizer(tokenizer, shape.vocab_size)
    write_tokens(shape, options.steps, data)
    is_new = shape.packed_tokens is None and shape.lora_rank is None
    optim = OPTIM if is_new else FINE_TUNING_OPTIM if shape.lora_rank is None else LORA_OPTIM
    job = asdict(shape) | optim | {
        "steps": options.steps, "device": options.device, "recompute": options.recompute, "tokenizer": str(tokenizer),
        "data": str(data), "cache": str(folder / "cache"), "model": None,
    }  # fmt: skip
    if not is_new:
        job["model"] = str(folder / "model")
        if not (folder / "model").exists():
            run_logged([sys.executable, PEERS / "new_model.py", write_job(job, folder)], folder / "new_model.log")
    return job


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer of `vocab_size` words, so that a new model gets this vocabulary. Nothing is tokenized with it."""
    folder.mkdir(exist_ok=True)
    words = {"<s>": 0, "</s>": 1, "<pad>": 2} | {f"w{n}": n for n in range(3, vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "<pad>"}))


def write_tokens(shape: Shape, steps: int, path: Path) -> None:
    """`steps` x `rows` rows. Ids follow Zipf's law, as those of text do; documents have long-tailed lengths."""
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for _ in range(steps):
            for length in [shape.length] * shape.rows if shape.packed_tokens is None else document_lengths(shape, rng):
                ids = (3 * (shape.vocab_size / 3) ** rng.random(length)).astype(int).tolist()
                file.write(json.dumps({"input_ids": ids, "labels": ids, "len": length}) + "\n")


def document_lengths(shape: Shape, rng: np.random.Generator) -> list[int]:
    """Lengths of the documents of a step, log-normal, drawn until they fill the step by 88 to 100 %."""
    assert shape.packed_tokens is not None
    while True:
        lengths = rng.lognormal(math.log(shape.median_length), 0.9, shape.rows).astype(int).clip(8, shape.length)
        if 0.88 * shape.packed_tokens <= lengths.sum() <= shape.packed_tokens:
            return [int(length) for length in lengths]


def write_job(job: dict[str, Any], folder: Path) -> Path:
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return path


def run_logged(command: list[Any], log: Path) -> None:
    """Raises if the command fails, with the end of its log."""
    with log.open("w") as file:
        code = subprocess.run([str(part) for part in command], stdout=file, stderr=file).returncode
    if code:
        raise RuntimeError(f"exit code {code}, see {log}:\n{log.read_text()[-2000:]}")


def torchstone_command(job: dict[str, Any], folder: Path, flags: list[str]) -> list[str]:
    """The command of a user: model, data and batch. The precision is given only where the shape asks for another."""
    command = [sys.executable, "-m", "torchstone", "train", "--output-dir", str(folder / "run")]
    command += ["--data.path", job["data"], "--data.context_length", str(job["length"]), "--data.shuffle", "false"]
    command += ["--data.cache_dir", job["cache"], "--training.global_batch_size", str(job["rows"])]
    command += ["--max-steps", str(job["steps"]), "--checkpoint.at_end", "false", "--system.device", job["device"]]
    command += ["--optim.schedule", "constant"]
    if job["model"] is not None:
        command += ["--model.path", job["model"], "--optim.warmup_ratio", "0"]
    else:
        for key in ("depth", "width", "heads", "kv_heads", "mlp_width"):
            command += [f"--model.{key}", str(job[key])]
        command += ["--model.tied", str(job["tied"]).lower(), "--model.tokenizer", job["tokenizer"]]
    if job["packed_tokens"] is not None:
        command += ["--training.max_tokens_per_gpu", str(job["packed_tokens"])]
    else:
        command += ["--data.packing", "false", "--training.batch_size", str(job["rows"])]
    if job["lora_rank"] is not None:
        command += ["--tuning.method", "lora", "--tuning.lora_rank", str(job["lora_rank"])]
    if job["osft_ratio"] is not None:
        command += ["--tuning.method", "osft", "--tuning.unfreeze_rank_ratio", str(job["osft_ratio"])]
        command += ["--tuning.osft_train_rest", "true"]
    if job["precision"] == "bf16-pure" and "--training.precision" not in flags:
        command += ["--training.precision", "bf16-pure"]
    if job["recompute"] and "--model.recompute" not in flags:
        command += ["--model.recompute", "full"]
    return command + flags


def run_torchstone(job: dict[str, Any], folder: Path, flags: list[str]) -> dict[str, Any]:
    """Steps from metrics.jsonl, and the seconds from the command to its first line there."""
    metrics, log, started = folder / "run/metrics.jsonl", folder / "log", time.monotonic()
    start_s = None
    with log.open("w") as file:
        process = subprocess.Popen(torchstone_command(job, folder, flags), stdout=file, stderr=file)
        while process.poll() is None:
            if start_s is None and metrics.exists() and metrics.stat().st_size:
                start_s = time.monotonic() - started
            time.sleep(0.02)
    if process.returncode:
        return {"error": f"exit code {process.returncode}: {log.read_text()[-2000:]}"}
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    keys = {"tokens": "tokens", "seconds": "step_s", "loss": "loss", "grad_norm": "grad_norm"}
    steps = [{key: line[name] for key, name in keys.items()} for line in lines]
    peak = max(line["memory"] for line in lines) if job["device"] == "cuda" else None
    notes = [line.partition(" | ")[2] for line in log.read_text().splitlines() if "attention" in line][:1]
    mfu = statistics.median(line["mfu"] for line in lines) if lines[-1].get("mfu") is not None else None
    return {"steps": steps, "peak_bytes": peak, "start_s": start_s, "notes": notes, "mfu": mfu, "flags": flags}


def run_peer(arm: str, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a peer prints as its last line; see peers/measure.py."""
    path = write_job(job | {"started": time.time(), "folder": str(folder)}, folder)
    with (folder / "log").open("w") as log:
        command = [sys.executable, str(PEERS / f"with_{arm}.py"), str(path)]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ)
    lines = result.stdout.splitlines()
    if result.returncode or not lines:
        log_end = (folder / "log").read_text()[-2000:]
        return {"error": f"exit code {result.returncode}: {log_end}"}
    return json.loads(lines[-1])


def summarize(result: dict[str, Any]) -> dict[str, Any]:
    """The same figures for every arm, from its steps."""
    steps = result.pop("steps", None)
    if steps is None:
        return result
    counted = steps[WARMUP_STEPS:]
    if not all(step["grad_norm"] > 0 and math.isfinite(step["loss"]) for step in steps):
        return {"error": f"a gradient norm is not positive or a loss is not finite: {steps}"}
    peak = result.pop("peak_bytes")
    return {
        "tok_s": sum(step["tokens"] for step in counted) / sum(step["seconds"] for step in counted),
        "tok_s_median": statistics.median(step["tokens"] / step["seconds"] for step in counted),
        "peak_gib": None if peak is None else peak / 2**30,
        "first_step_s": steps[0]["seconds"],
        "steps": len(steps),
        "tokens": sum(step["tokens"] for step in steps),
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "min_grad_norm": min(step["grad_norm"] for step in steps),
    } | result


def table(results: list[dict[str, Any]]) -> str:
    """Means over the repeats, and how many times as fast our arm is as each other arm."""
    measured: dict[str, list[dict[str, Any]]] = {}
    for line in results:
        if "tok_s" in line:
            measured.setdefault(line["arm"], []).append(line)

    def mean(arm: str, key: str) -> float:
        return statistics.mean(line[key] for line in measured[arm])

    rows = [
        "| arm | tok/s | tok/s, median step | peak GiB | first step, s | torchstone / arm |",
        "|---|---|---|---|---|---|",
    ]
    for arm, lines in measured.items():
        peak = "-" if lines[0]["peak_gib"] is None else f"{max(line['peak_gib'] for line in lines):.1f}"
        ratio = f"{mean('torchstone', 'tok_s') / mean(arm, 'tok_s'):.3f}x" if "torchstone" in measured else "-"
        speeds = f"{mean(arm, 'tok_s'):,.0f} | {mean(arm, 'tok_s_median'):,.0f}"
        rows.append(
            f"| {arm} | {speeds} | {peak} | {mean(arm, 'first_step_s'):.1f} | {'' if arm == 'torchstone' else ratio} |"
        )
    for line in results:
        if "tok_s" not in line and line["repeat"] == 1:
            missing = line.get("not_installed")
            rows.append(f"| {line['arm']} | {f'{missing} is not installed' if missing else 'failed'} | | | | |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()

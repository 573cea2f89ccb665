"""A tiny model overfits a small batch in every layout, and all layouts have the same losses.

Every step has all eight conversations. A loss close to zero shows that what is trained is what is measured. That
layouts agree is the sharper check: one that drops a rank's gradients, or sums them twice, still learns eight
conversations. One launch runs all layouts of two processes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tiny import write_rows
from torchstone import api
from torchstone.data.tokenize import Tokenizer
from torchstone.demo.corpus import chat_rows
from torchstone.observe.metrics import read_metrics
from torchstone.testing import launch_procs

STEPS, SAMPLES = 25, 8
# Relative, at every step. A large eps keeps Adam from turning rounding noise into full-size steps.
LOSS_LIMIT = 1e-4
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp_shard 2": {"parallel.dp_shard": 2, "training.max_tokens_per_gpu": 64},
    # All eight in one micro-batch: with tp, most of the time is overhead per micro-batch.
    "tp 2": {"parallel.tp": 2, "training.max_tokens_per_gpu": 256},
    "pp 2": {"parallel.pp": 2, "training.max_tokens_per_gpu": 40},
}
# From the data and the schedule, so the same in every layout.
SAME = ("step", "lr", "tokens", "loss_tokens", "samples", "epoch", "total_tokens", "bad_rows", "dropped_rows")
MEASURED = ("loss", "grad_norm", "padding", "micro_batches", "tok_s", "step_s", "mfu", "memory")


def train_each(runs: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """The last loss of each run, on one rank."""
    return {name: api.train(overrides=overrides).loss for name, overrides in runs.items()}


class TestOverfit:
    def test_every_layout_overfits_a_small_batch_with_the_same_losses(
        self, tmp_path: Path, tokenizer_dir: Path, tokenizer: Tokenizer
    ) -> None:
        single, parallel = make_runs(tmp_path, tokenizer_dir, tokenizer)
        train_each(single)
        for losses in launch_procs(train_each, 2, parallel):
            assert losses == {name: metrics(run)[-1]["loss"] for name, run in parallel.items()}
        for name, run in (single | parallel).items():
            lines, expected = metrics(run), metrics(single[f"{name.split(',')[0]}, single"])
            check_metrics(name, Path(run["output_dir"]), lines)
            check_overfit(name, lines)
            check_same_losses(name, lines, expected)
        for line in metrics(parallel["native, pp 2"]):
            assert line["micro_batches"] >= 4
            # A pipeline has an even number of micro-batches of one shape, whose length is a multiple of 8.
            assert (line["tokens"] + line["padding"]) % (8 * 2 * -(-line["micro_batches"] // 2)) == 0

    def test_adapters_overfit_it(self, tmp_path: Path, tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
        """LoRA on a model with random weights; the embedding, which is random too, is trained with it."""
        single, _ = make_runs(tmp_path, tokenizer_dir, tokenizer)
        base = single["native, single"] | {"training.max_steps": 1, "optim.learning_rate": 0.0}
        checkpoint = api.train(overrides=base | {"checkpoint.at_end": True}).checkpoint
        run = single["fallback, single"] | {
            "model.path": str(checkpoint), "tuning.method": "lora", "tuning.modules_to_save": ["embed_tokens"],
            "training.max_steps": 30, "optim.eps": 1e-8, "optim.warmup_ratio": 0.0, "optim.schedule": "constant",
        }  # fmt: skip
        api.train(overrides=run)
        lines = metrics(run)
        check_overfit("lora", lines)
        assert lines[-1]["loss"] <= 0.01


def make_runs(
    folder: Path, tokenizer_dir: Path, tokenizer: Tokenizer
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Overrides by model and layout: the runs of one process, and those of two."""
    rows = write_rows(folder / "rows.jsonl", chat_rows(SAMPLES))
    common: dict[str, Any] = {
        "data.path": str(rows), "data.context_length": 32, "data.cache_dir": str(folder / "datasets"),
        "data.shuffle": False, "training.global_batch_size": SAMPLES, "training.max_steps": STEPS,
        "optim.learning_rate": 1e-2, "optim.eps": 5e-4, "checkpoint.at_end": False,
        "observe.console": "quiet", "system.device": "cpu", "system.threads": 1,
    }  # fmt: skip
    native = {"model.depth": 2, "model.width": 64, "model.heads": 4, "model.tokenizer": str(tokenizer_dir)}
    fallback = {"model.path": str(make_neox(folder / "neox", tokenizer))}

    def run(name: str, **changes: Any) -> dict[str, Any]:
        return common | {"output_dir": str(folder / name)} | changes

    single = {"native, single": run("single", **native), "fallback, single": run("fallback single", **fallback)}
    parallel = {f"native, {name}": run(name, **native, **layout) for name, layout in LAYOUTS.items()}
    parallel["fallback, dp_shard 2"] = run("fallback dp", **fallback, **LAYOUTS["dp_shard 2"])
    return single, parallel


def make_neox(folder: Path, tokenizer: Tokenizer) -> Path:
    """A model that runs in the Transformers fallback."""
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=448, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=64, initializer_range=0.1, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    GPTNeoXForCausalLM(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def metrics(run: dict[str, Any]) -> list[dict[str, Any]]:
    return read_metrics(Path(run["output_dir"]) / "metrics.jsonl")


def check_overfit(name: str, lines: list[dict[str, Any]]) -> None:
    first, last = lines[0]["loss"], lines[-1]["loss"]
    # An untrained model guesses among 448 tokens.
    assert first == pytest.approx(math.log(448), rel=0.25), name
    assert last < 0.1, name
    assert last < 0.5 * first, name


def check_same_losses(name: str, lines: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for line, one in zip(lines, expected, strict=True):
        assert line["loss"] == pytest.approx(one["loss"], rel=LOSS_LIMIT), name
        assert line["grad_norm"] == pytest.approx(one["grad_norm"], rel=100 * LOSS_LIMIT), name
        assert {key: line[key] for key in SAME} == {key: one[key] for key in SAME}, name


def check_metrics(name: str, folder: Path, lines: list[dict[str, Any]]) -> None:
    """One complete line per step: only one rank writes."""
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "config.json", "logs", "metrics.jsonl"], name
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), name
    assert [line["epoch"] for line in lines] == list(range(1, STEPS + 1)), name
    for line in lines:
        assert set(SAME) | set(MEASURED) <= set(line), name
        assert all(math.isfinite(value) for value in line.values() if value is not None), name
        assert line["samples"] == SAMPLES, name
        assert line["grad_norm"] > 0, name
        assert line["tok_s"] == pytest.approx(line["tokens"] / line["step_s"]), name

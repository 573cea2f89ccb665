"""A tiny model learns one small batch by heart, in every layout, and all of them learn it alike.

Eight conversations, all of them in every step: a loss that falls to nearly nothing says that what is trained is what is
measured, whatever the layout. That layouts end at the same loss is the sharper half: one that forgets the gradients of
a rank, or sums them twice, still learns eight conversations. One launch runs all layouts of two processes.
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
# Relative, at any step. Adam's eps is large, so that it does not make whole steps of rounding noise on the way.
LIMIT = 1e-4
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp_shard 2": {"parallel.dp_shard": 2, "training.max_tokens_per_gpu": 64},
    # All eight in one micro-batch: sharing out matrices costs most of its time in going from one to the next.
    "tp 2": {"parallel.tp": 2, "training.max_tokens_per_gpu": 256},
    "pp 2": {"parallel.pp": 2},
}
# What ranks import before they train: half a second each that is not there when the forkserver has it.
PRELOADED = ("transformers.models.auto.tokenization_auto", "transformers.tokenization_utils_tokenizers")
# Of the data and the schedule: the same in every layout.
SAME = ("step", "lr", "tokens", "loss_tokens", "samples", "epoch", "total_tokens", "bad_rows", "dropped_rows")
MEASURED = ("loss", "grad_norm", "padding", "micro_batches", "tok_s", "step_s", "memory")


def train_each(runs: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """The last loss of each run, on one rank."""
    return {name: api.train(overrides=overrides).loss for name, overrides in runs.items()}


class TestOverfit:
    def test_every_layout_learns_a_small_batch_by_heart_and_ends_at_the_same_loss(
        self, tmp_path: Path, tokenizer_dir: Path, tokenizer: Tokenizer
    ) -> None:
        """One test for all: they are one launch, and compared with each other."""
        alone, together = runs(tmp_path, tokenizer_dir, tokenizer)
        train_each(alone)
        for found in launch_procs(train_each, 2, together, preload=PRELOADED):
            assert found == {name: lines_of(given)[-1]["loss"] for name, given in together.items()}
        for name, given in (alone | together).items():
            lines, wanted = lines_of(given), lines_of(alone[f"{name.split(',')[0]}, alone"])
            check_monitored(name, Path(given["output_dir"]), lines)
            check_learned(name, lines)
            check_like_one_process(name, lines, wanted)
        assert all(line["micro_batches"] >= 4 for line in lines_of(together["native, pp 2"]))


def runs(
    folder: Path, tokenizer_dir: Path, tokenizer: Tokenizer
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Settings by the model and the layout: those of one process, and those of two."""
    rows = write_rows(folder / "rows.jsonl", chat_rows(SAMPLES))
    shared: dict[str, Any] = {
        "data.path": str(rows), "data.context_length": 32, "data.cache_dir": str(folder / "datasets"),
        "data.shuffle": False, "training.global_batch_size": SAMPLES, "training.max_steps": STEPS,
        "optim.learning_rate": 1e-2, "optim.eps": 5e-4, "checkpoint.at_end": False,
        "observe.console": "quiet", "system.device": "cpu", "system.threads": 1,
    }  # fmt: skip
    native = {"model.depth": 2, "model.width": 64, "model.heads": 4, "model.tokenizer": str(tokenizer_dir)}
    fallback = {"model.path": str(make_neox(folder / "neox", tokenizer))}

    def run(name: str, **changes: Any) -> dict[str, Any]:
        return shared | {"output_dir": str(folder / name)} | changes

    alone = {"native, alone": run("alone", **native), "fallback, alone": run("fallback alone", **fallback)}
    together = {f"native, {name}": run(name, **native, **layout) for name, layout in LAYOUTS.items()}
    together["fallback, dp_shard 2"] = run("fallback dp", **fallback, **LAYOUTS["dp_shard 2"])
    return alone, together


def make_neox(folder: Path, tokenizer: Tokenizer) -> Path:
    """A family that is not native."""
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


def lines_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    return read_metrics(Path(run["output_dir"]) / "metrics.jsonl")


def check_learned(name: str, lines: list[dict[str, Any]]) -> None:
    first, last = lines[0]["loss"], lines[-1]["loss"]
    # A model that knows nothing guesses among 448 tokens.
    assert first == pytest.approx(math.log(448), rel=0.25), name
    assert last < 0.1, name
    assert last < 0.5 * first, name


def check_like_one_process(name: str, lines: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    off = [abs(line["loss"] - one["loss"]) / one["loss"] for line, one in zip(lines, wanted, strict=True)]
    print(f"{name}: at the end {off[-1]:.1e}, at worst {max(off):.1e}")
    assert max(off) <= LIMIT, name
    for line, one in zip(lines, wanted, strict=True):
        assert {key: line[key] for key in SAME} == {key: one[key] for key in SAME}, name
        assert line["grad_norm"] == pytest.approx(one["grad_norm"], rel=100 * LIMIT), name


def check_monitored(name: str, folder: Path, lines: list[dict[str, Any]]) -> None:
    """One line a step with every number. Were there a second rank that writes, every step would be there twice."""
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "config.json", "logs", "metrics.jsonl"], name
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), name
    assert [line["epoch"] for line in lines] == list(range(1, STEPS + 1)), name
    for line in lines:
        assert set(SAME) | set(MEASURED) <= set(line), name
        assert all(math.isfinite(value) for value in line.values()), name
        assert line["samples"] == SAMPLES, name
        assert line["grad_norm"] > 0, name
        assert line["tok_s"] == pytest.approx(line["tokens"] / line["step_s"]), name

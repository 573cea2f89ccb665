"""On a GPU: one sample is learned by heart, and the loss is the one Transformers computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchstone import api
from torchstone.config import load_config
from torchstone.data.collate import collate
from torchstone.data.encode import Encoded
from torchstone.data.loader import StepBatch
from torchstone.models.opening import load_model
from torchstone.observe.metrics import read_metrics
from torchstone.parallel.running import Runner
from torchstone.training.step import backward

Settings = Callable[..., dict[str, Any]]
CUDA = torch.device("cuda")


def some_sequences() -> list[Encoded]:
    rng = np.random.default_rng(0)
    found = []
    for size in (17, 5, 30, 12):
        ids = rng.integers(0, 448, size)
        found.append(Encoded(ids, np.where(rng.random(size) < 0.7, ids, -100)))
    return found


def step_batch(sequences: list[Encoded]) -> StepBatch:
    micro_batches = [collate([[sequence]], pad_id=0) for sequence in sequences]
    count = sum(int((batch.labels != -100).sum()) for batch in micro_batches)
    return StepBatch(micro_batches, len(sequences), 0, count, 0, 0)


class TestSingleSampleOverfitting:
    def test_single_sample_overfitting_loss_decreases(
        self, settings: Settings, chat_file: Path, tmp_path: Path
    ) -> None:
        one = tmp_path / "one.jsonl"
        one.write_text(chat_file.read_text().splitlines()[0] + "\n")
        overrides = settings(
            data__path=str(one), data__context_length=64, training__max_steps=60, training__global_batch_size=1,
            optim__learning_rate=1e-2, system__device="cuda",
        )  # fmt: skip
        api.train(load_config(overrides=overrides))
        losses = [line["loss"] for line in read_metrics(Path(overrides["output_dir"]) / "metrics.jsonl")]
        assert losses[-1] < 0.1
        assert losses[-1] < 0.5 * losses[0]

    def test_compare_loss_computation_methods(self, llama_dir: Path) -> None:
        """Our sum over the global count against Transformers' own loss, one sequence at a time."""
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(str(llama_dir), dtype=torch.float32).to(CUDA)
        ours = Runner(load_model(llama_dir, CUDA), CUDA, packed=False)
        for sequence in some_sequences():
            ids = torch.tensor(sequence.ids)[None].to(CUDA)
            standard = theirs(ids, labels=torch.tensor(sequence.labels)[None].to(CUDA)).loss.item()
            assert backward(ours, step_batch([sequence]), 1).loss == pytest.approx(standard, rel=1e-3, abs=1e-4)

    def test_loss_scaling_with_world_size(self, llama_dir: Path) -> None:
        """At world size 1 the scaled loss is the per-token mean over the whole batch, not a mean of means."""
        ours = Runner(load_model(llama_dir, CUDA), CUDA, packed=False)
        sequences = some_sequences()
        total = tokens = 0.0
        for sequence in sequences:
            batch = step_batch([sequence])
            total += backward(ours, batch, 1).loss * batch.loss_tokens
            tokens += batch.loss_tokens
        assert backward(ours, step_batch(sequences), 1).loss == pytest.approx(total / tokens, abs=1e-4)


class TestBatchOverfitting:
    def test_training_pipeline_with_small_batch(self, settings: Settings, chat_file: Path) -> None:
        overrides = settings(
            data__path=str(chat_file), data__context_length=64, training__max_steps=80,
            training__global_batch_size=30, training__max_tokens_per_gpu=256, optim__learning_rate=1e-2,
            system__device="cuda",
        )  # fmt: skip
        api.train(load_config(overrides=overrides))
        losses = [line["loss"] for line in read_metrics(Path(overrides["output_dir"]) / "metrics.jsonl")]
        assert losses[-1] < 0.3 * losses[0]

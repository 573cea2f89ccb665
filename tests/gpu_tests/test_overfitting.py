"""On a GPU: a model overfits one sample and a small batch, and its loss is Transformers' loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steps import step_batch
from torchstone import api
from torchstone.checkpoint.model_folder import load_model
from torchstone.config import load_config
from torchstone.data.collate import collate
from torchstone.data.encode import TokenSequence
from torchstone.data.loader import StepBatch
from torchstone.observe.metrics import read_metrics
from torchstone.parallel.runner import Runner
from torchstone.training.step import compute_gradients

Settings = Callable[..., dict[str, Any]]
CUDA = torch.device("cuda")
pytestmark = pytest.mark.diagnostic


def make_sequences() -> list[TokenSequence]:
    rng = np.random.default_rng(0)
    sequences = []
    for size in (17, 5, 30, 12):
        ids = rng.integers(0, 448, size)
        sequences.append(TokenSequence(ids, np.where(rng.random(size) < 0.7, ids, -100)))
    return sequences


def make_step_batch(sequences: list[TokenSequence]) -> StepBatch:
    return step_batch([collate([[sequence]], pad_id=0) for sequence in sequences])


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

        reference = AutoModelForCausalLM.from_pretrained(str(llama_dir), dtype=torch.float32).to(CUDA)
        runner = Runner(load_model(llama_dir, CUDA), CUDA, packed=False)
        for sequence in make_sequences():
            ids = torch.tensor(sequence.ids)[None].to(CUDA)
            expected = reference(ids, labels=torch.tensor(sequence.labels)[None].to(CUDA)).loss.item()
            loss = compute_gradients(runner, make_step_batch([sequence]), 1).loss
            assert loss == pytest.approx(expected, rel=1e-3, abs=1e-4)

    def test_loss_scaling_with_world_size(self, llama_dir: Path) -> None:
        """At world size 1 the scaled loss is the per-token mean over the whole batch, not a mean of means."""
        runner = Runner(load_model(llama_dir, CUDA), CUDA, packed=False)
        sequences = make_sequences()
        total = tokens = 0.0
        for sequence in sequences:
            batch = make_step_batch([sequence])
            total += compute_gradients(runner, batch, 1).loss * batch.loss_tokens
            tokens += batch.loss_tokens
        assert compute_gradients(runner, make_step_batch(sequences), 1).loss == pytest.approx(total / tokens, abs=1e-4)


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

"""The parts of a step: loss, gradients, clipping, optimizer groups, schedules, metrics, checkpoints, export."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as settings_of
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from steps import train_step
from tiny import make_llama
from torchstone import atomic
from torchstone.checkpoint import manifest
from torchstone.checkpoint.export import export_model
from torchstone.checkpoint.load import (
    find_resume_checkpoint,
    resolve_model_folder,
    restore_optimizer,
    restore_rng_states,
)
from torchstone.checkpoint.model_folder import load_model
from torchstone.checkpoint.save import best_step, mark_best, prune_checkpoints, save_checkpoint
from torchstone.config.schema import CheckpointConfig, Config, DataConfig, OptimConfig, TrainingConfig
from torchstone.data.batch_sizes import BatchSizes
from torchstone.data.collate import collate
from torchstone.data.encode import RowCounts, TokenSequence
from torchstone.data.loader import RunData, StepBatch
from torchstone.data.samples import Samples
from torchstone.data.tokenize import Tokenizer
from torchstone.errors import CheckpointError, DataError, NumericalError, UsageError
from torchstone.loss.cross_entropy import token_loss_sum
from torchstone.models.decoder import Fusion
from torchstone.models.execution import ExecutionOptions
from torchstone.models.model import Model
from torchstone.observe.metrics import MetricsFile, read_metrics
from torchstone.optim.adamw import AdamW
from torchstone.optim.build import build_optimizer
from torchstone.optim.clip import clip_coefficient, squared_norms
from torchstone.optim.schedule import lr_at_step, schedule_warnings
from torchstone.parallel.mesh import SINGLE_PROCESS
from torchstone.parallel.runner import Runner
from torchstone.training import schedule
from torchstone.training.checks import check_saved_state
from torchstone.training.schedule import check_loss_tokens, describe_saving, plan_schedule
from torchstone.training.state import Progress
from torchstone.training.step import compute_gradients, validation_loss

CPU = torch.device("cpu")


@pytest.fixture
def model(llama_dir: Path) -> Model:
    return load_model(llama_dir, CPU)


def sequence(rng: np.random.Generator, length: int, masked: float) -> TokenSequence:
    ids = rng.integers(0, 448, length)
    return TokenSequence(ids, np.where(rng.random(length) < masked, -100, ids))


def sequences(count: int, seed: int = 0, masked: float = 0.4) -> list[TokenSequence]:
    rng = np.random.default_rng(seed)
    return [sequence(rng, int(rng.integers(3, 20)), masked) for _ in range(count)]


def make_batch(micro_batches: list[list[list[TokenSequence]]]) -> StepBatch:
    """A step of micro-batches, each a list of rows, each a list of sequences."""
    tensors = [collate(rows, pad_id=0) for rows in micro_batches]
    count = sum(int((m.labels != -100).sum()) for m in tensors)
    return StepBatch(tensors, samples=8, tokens=100, loss_tokens=count, padding=0, first_sample=0)


def padded_batch(sequences: list[TokenSequence]) -> StepBatch:
    return make_batch([[[s] for s in sequences]])


def loss_and_gradients(model: Model, batch: StepBatch, packed: bool = False) -> tuple[float, torch.Tensor]:
    model.module.zero_grad()
    result = compute_gradients(Runner(model, CPU, packed), batch, 1)
    gradients = torch.cat([p.grad.flatten() for p in model.module.parameters()])
    assert result.grad_norm == pytest.approx(gradients.double().norm().item(), rel=1e-6)
    return result.loss, gradients


def optimizer_for(model: Model, **optim: Any) -> torch.optim.Optimizer:
    return build_optimizer(model.named_parameters(), OptimConfig(**optim), model.parameter_kinds())


class TestLoss:
    def test_it_is_the_sum_over_labeled_tokens(self) -> None:
        logits = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0))
        labels = torch.tensor([[1, -100, 3, 4, -100], [-100, -100, 7, 8, 10]])
        by_hand = sum(
            -logits[b, t].log_softmax(-1)[labels[b, t]].item() for b in range(2) for t in range(5) if labels[b, t] >= 0
        )
        assert token_loss_sum(logits, labels).item() == pytest.approx(by_hand, rel=1e-6)

    def test_no_labels_give_exactly_zero_and_zero_gradients(self) -> None:
        logits = torch.randn(1, 4, 11, requires_grad=True)
        loss = token_loss_sum(logits, torch.full((1, 4), -100))
        loss.backward()
        assert loss.item() == 0.0
        assert torch.equal(logits.grad, torch.zeros_like(logits))

    def test_bf16_logits_are_summed_in_fp32(self) -> None:
        logits = torch.randn(1, 3000, 11).bfloat16()
        labels = torch.zeros(1, 3000, dtype=torch.long)
        assert token_loss_sum(logits, labels).dtype == torch.float32
        assert token_loss_sum(logits, labels).item() == pytest.approx(
            token_loss_sum(logits.double(), labels).item(), rel=1e-5
        )


class TestGradientStep:
    @settings_of(
        deadline=None,
        max_examples=25,
        derandomize=True,
        # Computing gradients does not change the model.
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(
        lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
        masked=st.sampled_from([0.0, 0.5, 0.9]),
        seed=st.integers(0, 1000),
    )
    def test_splitting_a_batch_changes_neither_loss_nor_gradients(
        self, model: Model, lengths: list[int], masked: float, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        samples = [sequence(rng, length, masked) for length in lengths]
        samples.append(TokenSequence(np.array([5, 6]), np.array([5, 6])))
        loss, gradients = loss_and_gradients(model, make_batch([[samples]]), packed=True)
        splits = {
            "padded": loss_and_gradients(model, padded_batch(samples)),
            "one by one": loss_and_gradients(model, make_batch([[[s]] for s in samples])),
            "uneven": loss_and_gradients(model, make_batch([[samples[:1]], [samples[1:2], samples[2:]]]), packed=True),
            "an idle rank": loss_and_gradients(model, make_batch([[samples], []]), packed=True),
        }
        for split, (split_loss, split_gradients) in splits.items():
            assert split_loss == pytest.approx(loss, rel=1e-6), split
            assert ((split_gradients - gradients).norm() / gradients.norm()).item() < 2e-6, split

    def test_a_micro_batch_without_labels_contributes_nothing(self, model: Model) -> None:
        rows, masked_rows = ([[s] for s in each] for each in (sequences(4), sequences(2, seed=9, masked=1)))
        loss, gradients = loss_and_gradients(model, make_batch([rows]))
        masked_loss, masked_gradients = loss_and_gradients(model, make_batch([rows, masked_rows]))
        assert loss == masked_loss
        assert torch.equal(gradients, masked_gradients)

    def test_the_first_label_of_a_sequence_is_never_a_target(self) -> None:
        only_first = TokenSequence(np.array([5, 6, 7]), np.array([5, -100, -100]))
        assert padded_batch([only_first]).loss_tokens == 0

    def test_a_step_without_loss_tokens_is_an_error(self, model: Model) -> None:
        with pytest.raises(DataError, match="step 7 has no loss tokens"):
            compute_gradients(Runner(model, CPU, False), padded_batch(sequences(2, masked=1)), 7)

    def test_clipping_scales_to_the_limit_and_reports_the_norm_before(self) -> None:
        parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
        parameters[0].grad = torch.tensor([3.0, 0.0, 0.0])
        parameters[1].grad = torch.tensor([[0.0, 4.0], [0.0, 0.0]])
        squares = squared_norms([p.grad for p in parameters])
        assert squares.dtype == torch.float64
        assert squares.tolist() == pytest.approx([9.0, 16.0])
        AdamW([{"params": parameters}]).clip_and_step(clip_coefficient(squares.sum(), 1.0))
        assert torch.cat([p.grad.flatten() for p in parameters]).norm().item() == pytest.approx(1.0, rel=1e-5)

    @pytest.mark.parametrize("limit", [0.0, 100.0])
    def test_gradients_within_the_limit_stay_bit_for_bit(self, limit: float) -> None:
        parameter = nn.Parameter(torch.zeros(4))
        parameter.grad = torch.tensor([1.1, -2.2, 3.3, 0.1])
        before = parameter.grad.clone()
        AdamW([{"params": [parameter]}]).clip_and_step(clip_coefficient(squared_norms([parameter.grad]).sum(), limit))
        assert torch.equal(parameter.grad, before)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_gradients_that_are_not_finite_never_reach_the_weights(self, model: Model, bad: float) -> None:
        """The error has their Hugging Face names."""
        optimizer = optimizer_for(model)
        before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
        model.module.layers["1"].mlp.up.weight.register_hook(lambda gradient: gradient * bad)
        message = r"1 gradients are not finite, such as model\.layers\.1\.mlp\.up_proj\.weight;"
        with pytest.raises(NumericalError, match=message) as caught:
            train_step(Runner(model, CPU, False), optimizer, padded_batch(sequences(2)), 3, 1e-3, 1.0)
        assert caught.value.exit_code == 5
        for name, parameter in model.module.named_parameters():
            assert torch.equal(parameter, before[name]), name

    @pytest.mark.parametrize("training", [True, False])
    def test_validation_loss_is_per_token_without_gradients_and_restores_the_mode(
        self, model: Model, training: bool
    ) -> None:
        batch = make_batch([[[s] for s in sequences(4)], [[s] for s in sequences(3, seed=1)]])
        expected, _ = loss_and_gradients(model, batch)
        modes = []
        model.module.register_forward_hook(lambda *_: modes.append((torch.is_grad_enabled(), model.module.training)))
        model.module.train(training)
        loss, tokens = validation_loss(Runner(model, CPU, False), [batch, batch])
        assert loss == pytest.approx(expected, rel=1e-6)
        assert tokens == 2 * batch.loss_tokens
        assert modes == [(False, False)] * 4
        assert model.module.training == training

    def test_validation_loss_without_loss_tokens_is_an_error(self, model: Model) -> None:
        with pytest.raises(DataError, match="no loss tokens"):
            validation_loss(Runner(model, CPU, False), [padded_batch(sequences(2, masked=1))])


class TestOptimizerGroups:
    @staticmethod
    def decayed(model: Model, **optim: Any) -> set[str]:
        """The names of the parameters with weight decay. Every parameter is in one group."""
        groups = optimizer_for(model, weight_decay=0.3, **optim).param_groups
        decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
        names = dict(model.named_parameters())
        assert len(decay) == len(names)
        assert set(decay.values()) <= {0.0, 0.3}
        return {name for name, p in names.items() if decay[id(p)]}

    def test_norms_biases_and_embeddings_do_not_decay_by_default(self, tmp_path: Path) -> None:
        model = load_model(make_llama(tmp_path, attention_bias=True), CPU)
        names = {name for name, _ in model.named_parameters()}
        assert any(name.endswith("bias") for name in names)
        matrices = {name for name in names if re.search(r"(wq|wk|wv|wo|gate|up|down|head)\.weight$", name)}
        assert self.decayed(model) == matrices

    def test_no_decay_chooses_the_kinds_without_decay(self, model: Model) -> None:
        expected = {"tok_embed.weight"} | {name for name, p in model.named_parameters() if p.dim() == 1}
        assert self.decayed(model, no_decay=("matrix", "head")) == expected

    def test_the_settings_reach_the_optimizer(self, model: Model) -> None:
        for group in optimizer_for(model, learning_rate=0.123, betas=(0.7, 0.8), eps=1e-5).param_groups:
            assert (group["lr"], group["betas"], group["eps"]) == (0.123, (0.7, 0.8), 1e-5)


class TestSchedule:
    @pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
    def test_warmup_ends_at_the_peak(self, schedule: str) -> None:
        optim = OptimConfig(learning_rate=1.0, warmup_steps=10, schedule=schedule)
        rates = [lr_at_step(step, 100, optim) for step in range(100)]
        assert rates[:10] == pytest.approx([n / 10 for n in range(1, 11)])
        assert max(rates) == 1.0

    @pytest.mark.parametrize(
        ("schedule", "middle", "last"),
        [
            ("linear", 0.1 + 0.9 * 0.5, 0.1 + 0.9 * 0.01),
            ("cosine", 0.1 + 0.9 * 0.5, 0.1 + 0.45 * (1 + math.cos(math.pi * 0.99))),
            ("wsd", 1.0, 0.1 + 0.9 / 20),
        ],
    )
    def test_decay_at_the_middle_and_the_end(self, schedule: str, middle: float, last: float) -> None:
        optim = OptimConfig(learning_rate=1.0, schedule=schedule, min_lr_ratio=0.1)
        assert lr_at_step(50, 100, optim) == pytest.approx(middle)
        assert lr_at_step(99, 100, optim) == pytest.approx(last)

    def test_cosine_equals_transformers_after_warmup(self) -> None:
        from transformers import get_cosine_schedule_with_warmup

        parameter = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.AdamW([parameter], lr=3e-4)
        theirs = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=40)
        optim = OptimConfig(learning_rate=3e-4, warmup_steps=5, schedule="cosine")
        for step in range(40):
            if step >= 5:
                assert lr_at_step(step, 40, optim) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
            optimizer.step()
            theirs.step()

    @pytest.mark.parametrize(("total_steps", "warmup_steps"), [(100, 3), (101, 4), (3, 1), (1, 1)])
    def test_a_share_of_warm_up_is_rounded_up_to_steps(self, total_steps: int, warmup_steps: int) -> None:
        """As Transformers' warmup_ratio."""
        by_share, by_steps = OptimConfig(warmup_ratio=0.03), OptimConfig(warmup_steps=warmup_steps)
        for step in range(total_steps):
            assert lr_at_step(step, total_steps, by_share) == lr_at_step(step, total_steps, by_steps)

    def test_a_run_too_short_for_its_schedule_warns(self) -> None:
        assert "within its 6 steps of warm-up" in schedule_warnings(5, OptimConfig(warmup_steps=6))[0]
        expected = ["the run ends after 1 step, within its 50 steps of warm-up"]
        assert schedule_warnings(1, OptimConfig(warmup_steps=50)) == expected
        assert schedule_warnings(1, OptimConfig(warmup_steps=1)) == []
        short = OptimConfig(learning_rate=1.0, warmup_steps=6, schedule="wsd", decay_steps=6)
        assert "right after warm-up" in schedule_warnings(10, short)[0]
        assert [lr_at_step(step, 10, short) for step in (5, 6, 8)] == pytest.approx([1.0, 1.0, 0.5])
        assert schedule_warnings(100, short) == schedule_warnings(None, OptimConfig(schedule="constant")) == []


class FixedSamples(Samples):
    """Samples of which only the lengths are known."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = np.array(lengths)
        self.loss_tokens = self.lengths - 1

    def get(self, index: int) -> list[TokenSequence]:
        raise NotImplementedError

    def origin(self, index: int) -> str:
        return f"data.jsonl:{index + 1}"


def fixed_data(
    lengths: list[int], batch_size: int, sizes: list[int] | None = None, weights: list[float] | None = None
) -> RunData:
    sizes = sizes or [len(lengths)]
    batch_sizes, samples = BatchSizes(batch_size, batch_size, None), FixedSamples(lengths)
    return RunData(
        samples, {"": samples}, batch_sizes, ["a"], ["text"], sizes, weights or [], False, "", 0, RowCounts()
    )


class TestRunLength:
    @pytest.mark.parametrize(
        ("limits", "steps", "samples"),
        [
            ({"max_steps": 7}, 7, None),
            ({"max_epochs": 1}, 4, 10),
            ({"max_epochs": 2.5}, 9, 25),
            ({"max_epochs": 0.29}, 1, 3),
            ({"max_epochs": 0.01}, 1, 1),
            ({}, 4, 10),
            ({"max_tokens": 101}, 4, 12),
            ({"max_tokens": 91}, 4, 12),
            ({"max_tokens": 90}, 3, 9),
            ({"max_tokens": 30}, 1, 3),
            ({"max_tokens": 31}, 2, 6),
            ({"max_steps": 2, "max_epochs": 5}, 2, 50),
            ({"mode": "infinite"}, None, None),
        ],
    )
    def test_every_limit_becomes_steps(self, limits: dict[str, Any], steps: int | None, samples: int | None) -> None:
        plan = plan_schedule(Config(training=TrainingConfig(**limits)), fixed_data([10] * 10, 3), Progress())
        assert (plan.total_steps, plan.total_samples) == (steps, samples)

    @pytest.mark.parametrize("mixture", [{}, {"sizes": [3, 4], "weights": [3.0, 1.0]}], ids=["one source", "weighted"])
    @pytest.mark.parametrize("shuffle", [True, False])
    @pytest.mark.parametrize("tokens", [5, 40, 101, 130])
    def test_max_tokens_counts_samples_in_the_order_of_training(
        self, monkeypatch: pytest.MonkeyPatch, tokens: int, shuffle: bool, mixture: dict[str, Any]
    ) -> None:
        # So that counting crosses chunks.
        monkeypatch.setattr(schedule, "DRAWS_PER_CHUNK", 3)
        data = fixed_data([1, 2, 3, 5, 8, 13, 21], 1, **mixture)
        config = Config(data=DataConfig(shuffle=shuffle), training=TrainingConfig(max_tokens=tokens, seed=5))
        total = np.cumsum(data.train.lengths[data.sampler(config).take(100)])
        assert plan_schedule(config, data, Progress()).total_steps == 1 + int(np.argmax(total >= tokens))

    @pytest.mark.parametrize(
        ("validation", "saving", "at_end", "counts"),
        [
            ({"validate_every_steps": 4}, {"every_samples": 10}, True, [(3, 3), (2, 2), (1, 1), (0, 0)]),
            ({"validate_every_steps": 5}, {"every_epochs": 0.25}, False, [(2, 3), (2, 2), (1, 1), (0, 0)]),
            ({}, {"every_samples": 1}, True, [(1, 10), (1, 6), (1, 1), (0, 0)]),
        ],
    )
    def test_what_is_left_to_validate_and_save(
        self, validation: dict[str, Any], saving: dict[str, Any], at_end: bool, counts: list[tuple[int, int]]
    ) -> None:
        """For the ETA, after 0, 4, 9 and 10 of 10 steps of three samples; an epoch has 40."""
        training = TrainingConfig(max_steps=10, validate_at_end=at_end, **validation)
        config = Config(training=training, checkpoint=CheckpointConfig(at_end=at_end, **saving))
        plan = plan_schedule(config, fixed_data([10] * 40, 3), Progress())
        left = [
            (plan.count_left(plan.validation, progress), plan.count_left(plan.checkpoint, progress))
            for progress in (Progress(step, 3 * step) for step in (0, 4, 9, 10))
        ]
        assert left == counts

    def test_samples_of_skipped_batches_do_not_count(self) -> None:
        """Every 12 samples, in steps of 4: whatever was skipped, after the 3rd step and the 6th."""
        config = Config(checkpoint=CheckpointConfig(every_samples=12), training=TrainingConfig(max_steps=6))
        plan = plan_schedule(config, fixed_data([10] * 40, 4), Progress())
        for skipped in (0, 4, 8):
            steps = [Progress(step, samples=4 * step + skipped, skipped_samples=skipped) for step in range(1, 6)]
            assert [plan.is_due(plan.checkpoint, each, 4, is_final_step=False) for each in steps] == [
                False, False, True, False, False,
            ]  # fmt: skip

    @pytest.mark.parametrize(
        ("checkpoint", "words"),
        [
            ({}, "saves every 30 minutes and at the end, keeping 2"),
            ({"every_steps": 100, "keep_last": None}, "saves every 100 steps and at the end, keeping all"),
            ({"every_minutes": 0}, "saves at the end, keeping 2"),
            ({"every_minutes": 0, "at_end": False}, "saves only if a signal stops it, keeping 2"),
            (
                {"every_epochs": 1, "every_minutes": 7.5, "save_best": True},
                "saves every epoch, every 7.5 minutes, after every best validation and at the end, keeping 2 and the "
                "best",
            ),
            ({"every_samples": 10**6, "at_end": False}, "saves every 1,000,000 samples, keeping 2"),
        ],
    )
    def test_the_schedule_of_checkpoints_in_words(self, checkpoint: dict[str, Any], words: str) -> None:
        assert describe_saving(CheckpointConfig(**checkpoint)) == words


class TestMaskedSteps:
    @pytest.mark.parametrize("seed", range(12))
    def test_the_first_step_without_loss_tokens_is_found(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        """For random data, orders, lengths of the run and points to resume from; the steps are drawn as in training."""
        # So that the check crosses chunks.
        monkeypatch.setattr(schedule, "DRAWS_PER_CHUNK", 7)
        rng = np.random.default_rng(seed)
        found = 0
        for _ in range(40):
            size, batch_size, weighted = int(rng.integers(2, 12)), int(rng.integers(1, 6)), bool(rng.integers(2))
            mixture = {"sizes": [1, size - 1], "weights": [3.0, 1.0]} if weighted else {}
            data = fixed_data([10] * size, batch_size, **mixture)
            data.train.loss_tokens = np.where(rng.random(size) < rng.random(), 0, 9)
            training = TrainingConfig(seed=seed, max_epochs=float(rng.integers(1, 9)) / 2)
            config = Config(data=DataConfig(shuffle=bool(rng.integers(2))), training=training)
            progress = Progress(step=(done := int(rng.integers(3))), samples=done * batch_size)
            plan = plan_schedule(config, data, progress)
            sampler = data.sampler(config, progress.samples)
            expected = None
            for step in range(progress.step + 1, (plan.total_steps or 0) + 1):
                samples = sampler.take(min(batch_size, plan.end(progress)[1] - sampler.consumed_samples))
                if data.train.loss_tokens[samples].sum() == 0:
                    expected = f"step {step} has no loss tokens: all labels of its {len(samples)} samples are masked"
                    break
            if expected is None:
                check_loss_tokens(config, data, plan, progress)
            else:
                found += 1
                with pytest.raises(DataError, match=expected):
                    check_loss_tokens(config, data, plan, progress)
        assert 5 < found < 35

    @pytest.mark.parametrize("mode", ["infinite", None])
    def test_a_run_of_any_length_is_checked_in_bounded_time(self, mode: Any) -> None:
        """Every step has one of the two samples without a mask."""
        training = TrainingConfig(mode=mode, max_steps=None if mode else 10**12)
        config, data = Config(training=training, data=DataConfig(shuffle=False)), fixed_data([10] * 4, 2)
        data.train.loss_tokens = np.array([9, 0, 9, 0])
        check_loss_tokens(config, data, plan_schedule(config, data, Progress()), Progress())


class TestProgress:
    def test_it_survives_json(self) -> None:
        progress = Progress(3, 12, 384, 372, 1.5, 2, {"step": 3, "loss": 0.1 + 0.2})
        progress.count_validation(1.5)
        assert progress.stale_validations == 1
        assert Progress.from_dict(json.loads(json.dumps(progress.to_dict()))) == progress

    @pytest.mark.parametrize("metrics", [None, {"step": 3, "samples": 4, "loss": 1.25}])
    def test_state_of_version_0_1_loads(self, metrics: dict[str, Any] | None) -> None:
        state = {"step": 3, "samples": 12, "tokens": 384, "loss_tokens": 372, "best_loss": 1.5, "best_step": 2}
        owed = None if metrics is None else {"values": metrics, "before": state}
        assert Progress.from_dict(state | {"owed": owed}) == Progress(**state, pending_metrics=metrics)

    def test_a_missing_counter_is_named(self) -> None:
        with pytest.raises(CheckpointError, match=r"state\.json has no 'samples'"):
            Progress.from_dict({"step": 3})


class TestMetrics:
    def test_lines_after_the_last_step_and_half_written_ones_are_cut(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text("".join(json.dumps({"step": n}) + "\n" for n in (1, 2, 3, "x")) + '{"step": 5, "lo')
        metrics = MetricsFile(path, last_step=2)
        metrics.write({"step": 3, "loss": 0.1 + 0.2})
        metrics.close()
        assert metrics.removed_lines == 3
        assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3, "loss": 0.30000000000000004}]

    def test_a_file_without_a_line_to_keep_is_moved_aside(self, tmp_path: Path) -> None:
        """The lines of a run that was killed before its first checkpoint are all that is left of it."""
        path = tmp_path / "metrics.jsonl"
        for attempt, name in enumerate(("metrics-old.jsonl", "metrics-old-2.jsonl")):
            path.write_text(f'{{"step": 1, "loss": {attempt}}}\n{{"step": 2, "lo')
            old = path.read_text()
            metrics = MetricsFile(path, last_step=0)
            metrics.write({"step": 1})
            metrics.close()
            assert (metrics.moved_to, metrics.removed_lines) == (tmp_path / name, 0)
            assert (metrics.moved_to.read_text(), read_metrics(path)) == (old, [{"step": 1}])

    def test_steps_without_a_line_are_known(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text("".join(json.dumps({"step": n}) + "\n" for n in (3, 4, 7, 9)))
        assert MetricsFile(path, last_step=8).missing_steps == 5
        assert MetricsFile(path, last_step=7, first_step=3).missing_steps == 2
        assert MetricsFile(tmp_path / "none.jsonl", last_step=2).missing_steps == 2
        assert MetricsFile(tmp_path / "none.jsonl", last_step=0).missing_steps == 0

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    def test_a_full_disk_names_the_file_once(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        metrics = MetricsFile(path, last_step=0)
        (handle,) = [entry.fd for entry in psutil.Process().open_files() if entry.path == str(path)]
        with open("/dev/full", "wb") as full:
            os.dup2(full.fileno(), handle)
        with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
            metrics.write({"step": 1})
        metrics.close()

    def test_a_symlink_is_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(OSError, match="metrics.jsonl"):
            MetricsFile(tmp_path / "metrics.jsonl", last_step=0)
        assert not (tmp_path / "elsewhere").exists()

    def test_a_removed_file_is_noticed(self, tmp_path: Path) -> None:
        metrics = MetricsFile(tmp_path / "metrics.jsonl", last_step=0)
        assert not metrics.is_deleted
        (tmp_path / "metrics.jsonl").unlink()
        assert metrics.is_deleted

    def test_a_last_line_without_newline_gets_one(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1}\n{"step": 2}')
        metrics = MetricsFile(path, last_step=2)
        metrics.write({"step": 3})
        metrics.close()
        assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]


class TestCheckpointing:
    @pytest.fixture
    def optimizer(self, model: Model) -> torch.optim.Optimizer:
        """After one step."""
        optimizer = optimizer_for(model)
        train_step(Runner(model, CPU, False), optimizer, padded_batch(sequences(4)), 1, 1e-2, 1.0)
        return optimizer

    @pytest.fixture
    def checkpoint(self, model: Model, tokenizer: Tokenizer, optimizer: torch.optim.Optimizer, tmp_path: Path) -> Path:
        torch.manual_seed(123)
        return save_checkpoint(tmp_path, 1, model, tokenizer, optimizer, {"step": 1})

    def test_weights_moments_and_random_state_are_restored_bit_for_bit(
        self, model: Model, optimizer: torch.optim.Optimizer, checkpoint: Path
    ) -> None:
        expected = torch.randn(5)
        manifest.verify_checkpoint(checkpoint)
        restored = load_model(checkpoint, CPU)
        restored_optimizer = optimizer_for(restored)
        restore_optimizer(checkpoint, restored_optimizer, restored)
        restore_rng_states(checkpoint, CPU, SINGLE_PROCESS, 0, pytest.fail)
        assert torch.equal(torch.randn(5), expected)
        for (name, a), (_, b) in zip(model.named_parameters(), restored.named_parameters(), strict=True):
            assert torch.equal(a, b), name
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(optimizer.state[a][key], restored_optimizer.state[b][key]), (name, key)
        assert {path.suffix for path in checkpoint.iterdir()} <= {".json", ".safetensors", ".jinja"}, "no pickle"

    @pytest.mark.parametrize(
        ("damage", "problem"),
        [
            (lambda key, tensor: {key: torch.zeros(()) if "/exp_avg" in key else tensor}, "/exp_avg has shape []"),
            (lambda key, tensor: {key: tensor[..., :1] if "_sq" in key else tensor}, "/exp_avg_sq has shape ["),
            (lambda key, tensor: {key: torch.zeros(1) if key.endswith("/step") else tensor}, "does not have AdamW's"),
            (lambda key, tensor: {} if key.endswith("/exp_avg_sq") else {key: tensor}, "does not have AdamW's"),
            (lambda key, tensor: {key.replace("exp_avg_sq", "square"): tensor}, "does not have AdamW's"),
            (
                lambda key, tensor: {f"x.{key}": tensor},
                "has optimizer state, but none for the parameters of this model",
            ),
            (lambda key, tensor: {key: tensor, key.replace("step", "max_exp_avg_sq"): tensor}, "does not have AdamW's"),
        ],
    )
    def test_optimizer_state_of_other_keys_or_shapes_is_refused(
        self, checkpoint: Path, damage: Callable[[str, Tensor], dict[str, Tensor]], problem: str
    ) -> None:
        """Fused AdamW would write outside of its memory."""
        path = checkpoint / "optimizer.safetensors"
        damaged = [damage(key, tensor.clone()) for key, tensor in load_file(path).items()]
        save_file({key: tensor.clone() for each in damaged for key, tensor in each.items()}, path)
        restored = load_model(checkpoint, CPU)
        with pytest.raises(CheckpointError, match=re.escape(problem)):
            restore_optimizer(checkpoint, optimizer_for(restored), restored)

    def test_the_step_count_is_fp32_whatever_its_dtype_in_the_file(self, checkpoint: Path) -> None:
        """Fused AdamW reads four bytes of it."""
        path = checkpoint / "optimizer.safetensors"
        save_file({k: t.to(torch.uint8) if k.endswith("/step") else t for k, t in load_file(path).items()}, path)
        restored = load_model(checkpoint, CPU)
        optimizer = optimizer_for(restored)
        restore_optimizer(checkpoint, optimizer, restored)
        steps = [state["step"] for state in optimizer.state.values()]
        assert {(step.item(), step.dtype) for step in steps} == {(1.0, torch.float32)}

    @pytest.mark.parametrize("content", ["{}", "[" * 100_000, '{"step": "x"}', '{"step": null}'])
    def test_a_state_json_without_a_step_cannot_be_resumed(self, checkpoint: Path, content: str) -> None:
        path = checkpoint / "state.json"
        path.write_text(content)
        listed = manifest.read_json(checkpoint / "manifest.json")
        listed["files"]["state.json"] = {"bytes": path.stat().st_size, "sha256": manifest.file_hash(path)}
        manifest.write_json(checkpoint / "manifest.json", listed)
        with pytest.raises(CheckpointError, match="state.json: damaged"):
            find_resume_checkpoint(checkpoint.parent / "new", str(checkpoint), pytest.fail)

    @pytest.mark.parametrize(
        "states",
        [
            {"x": torch.zeros(1)},
            {"cpu": torch.zeros(5056)},
            {"cpu": torch.zeros(7).byte()},
            {"cpu": torch.zeros(5056).byte()},
        ],
        ids=["no cpu", "float", "short", "zeros"],
    )
    def test_random_states_that_torch_refuses_are_a_damaged_file(
        self, checkpoint: Path, states: dict[str, Tensor]
    ) -> None:
        save_file(states, checkpoint / "random.safetensors")
        with pytest.raises(CheckpointError, match=r"random\.safetensors: damaged: not the states of random"):
            restore_rng_states(checkpoint, CPU, SINGLE_PROCESS, 0, pytest.fail)

    def test_transformers_loads_a_checkpoint_as_it_is(self, model: Model, checkpoint: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        theirs = AutoModelForCausalLM.from_pretrained(str(checkpoint))
        ids = torch.tensor([AutoTokenizer.from_pretrained(str(checkpoint))("KATO read backwards is OTAK.").input_ids])
        with torch.no_grad():
            ours = model.module(ids, torch.arange(ids.shape[1])[None])
            assert (theirs(ids).logits - ours).abs().max().item() <= 1e-5

    @pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json"])
    def test_a_flipped_bit_in_any_file_is_found(self, checkpoint: Path, name: str) -> None:
        path = checkpoint / name
        content = bytearray(path.read_bytes())
        content[-len(content) // 3] ^= 4
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{name}: damaged"):
            manifest.verify_checkpoint(checkpoint)

    @pytest.mark.parametrize(
        "name",
        [
            "weights-00000.safetensors", "optimizer-00000.safetensors", "random-00007.safetensors",
            "model-00001-of-00002.safetensors", "model.safetensors.index.json", "model.fp16.safetensors",
            "pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.safetensors", "adapter_config.json",
            "tf_model.h5", "flax_model.msgpack", "consolidated.00.pth", "optimizer.pt", "MODEL.SAFETENSORS",
        ],
    )  # fmt: skip
    def test_files_that_could_be_loaded_must_be_in_the_manifest(self, checkpoint: Path, name: str) -> None:
        (checkpoint / "README.md").write_text("notes of a user are allowed")
        manifest.verify_checkpoint(checkpoint)
        (checkpoint / name).write_bytes((checkpoint / "model.safetensors").read_bytes())
        with pytest.raises(CheckpointError, match=f"does not list: {re.escape(name)}\\n"):
            resolve_model_folder(str(checkpoint))

    @pytest.mark.parametrize(
        "content",
        ['{"format": 1, "fi|es": {}}', '{"format": 1, "files": 3}', '{"format": 1, "files": {}}', "[]", "", "{"],
    )
    def test_a_damaged_manifest_is_found(self, tmp_path: Path, content: str) -> None:
        with manifest.commit_folder(tmp_path / "step-00000001") as folder:
            (folder / "file").write_text("x")
        (tmp_path / "step-00000001/manifest.json").write_text(content)
        with pytest.raises(CheckpointError, match="damaged|format"):
            manifest.verify_checkpoint(tmp_path / "step-00000001")

    def test_an_error_while_writing_leaves_nothing(self, tmp_path: Path) -> None:
        def fail(folder: Path) -> None:
            (folder / "file").write_text("half")
            raise RuntimeError("a bug")

        with pytest.raises(RuntimeError, match="a bug"), manifest.commit_folder(tmp_path / "step-00000001") as folder:
            fail(folder)
        assert list(tmp_path.iterdir()) == []

    def test_a_checkpoint_survives_being_killed_while_it_is_replaced(self, tmp_path: Path) -> None:
        final = tmp_path / "step-00000001"
        for content in ("one", "two"):
            with manifest.commit_folder(final) as folder:
                (folder / "file").write_text(content)
        assert (final / "file").read_text() == "two"
        # Killed between the two renames: the old one has its hidden name.
        final.rename(tmp_path / ".step-00000001.replaced")
        (tmp_path / ".step-00000002.partial").mkdir()
        atomic.clean_up(tmp_path, "step-*")
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        manifest.verify_checkpoint(final)

    @pytest.mark.parametrize("lock", [atomic.file_lock, lambda path: atomic.lock_run_folder(path.parent)])
    @pytest.mark.parametrize("exists", [True, False])
    def test_a_lock_that_is_a_link_is_refused_and_its_target_stays_as_it_was(
        self, tmp_path: Path, lock: Callable[[Path], AbstractContextManager[object]], exists: bool
    ) -> None:
        if exists:
            (tmp_path / "victim").write_text("precious")
        (tmp_path / "run").mkdir()
        (tmp_path / "run/.lock").symlink_to("../victim")
        with pytest.raises(OSError, match=r"symbolic links: '.*\.lock'"), lock(tmp_path / "run/.lock"):
            pass
        assert [path.read_text() for path in tmp_path.glob("victim")] == ["precious"] * exists

    @pytest.mark.parametrize("lock", [atomic.file_lock, lambda path: atomic.lock_run_folder(path.parent)])
    def test_a_lock_does_not_empty_a_file(
        self, tmp_path: Path, lock: Callable[[Path], AbstractContextManager[object]]
    ) -> None:
        (tmp_path / ".lock").write_text("precious")
        with lock(tmp_path / ".lock"):
            assert atomic.is_locked(tmp_path / ".lock")
        assert (tmp_path / ".lock").read_text() == "precious"

    def test_links_in_the_place_of_folders_are_removed_and_never_followed(self, tmp_path: Path) -> None:
        root, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
        for folder in (root, elsewhere):
            folder.mkdir()
        (elsewhere / "manifest.json").write_text("precious")
        for name in (".step-00000009.partial", ".step-00000008.removed", "step-00000001"):
            (root / name).symlink_to(elsewhere)
        (root / ".step-00000007.replaced").write_text("a file")
        (root / "step-00000007").symlink_to("gone")
        atomic.clean_up(root, "step-*9.*")
        with manifest.commit_folder(root / "step-00000007") as folder:
            (folder / "file").write_text("x")
        (root / ".step-00000008.partial").symlink_to(elsewhere)
        with manifest.commit_folder(root / "step-00000008") as folder:
            (folder / "file").write_text("x")
        assert prune_checkpoints(root, keep_last=1) == [1, 7]
        atomic.clean_up(root, "step-*")
        assert [path.name for path in root.iterdir()] == ["step-00000008"]
        assert (elsewhere / "manifest.json").read_text() == "precious"

    def test_remove_old_keeps_the_newest_and_the_best(self, tmp_path: Path) -> None:
        for step in range(1, 6):
            with manifest.commit_folder(tmp_path / manifest.checkpoint_name(step)) as folder:
                (folder / "file").write_text(str(step))
        mark_best(tmp_path, 2, 0.5)
        assert prune_checkpoints(tmp_path, keep_last=2) == [1, 3]
        assert [step for step, _ in manifest.list_checkpoints(tmp_path)] == [2, 4, 5]
        assert best_step(tmp_path) == 2

    def test_pruning_keeps_the_checkpoint_just_saved_and_the_one_resumed_from(self, tmp_path: Path) -> None:
        """Even if checkpoints with higher steps are present."""
        folders = [tmp_path / manifest.checkpoint_name(step) for step in range(1, 6)]
        for each in folders:
            with manifest.commit_folder(each) as folder:
                (folder / "file").write_text(each.name)
        assert prune_checkpoints(tmp_path, 1, protected=(folders[2], folders[0], None)) == [2, 4]
        assert [step for step, _ in manifest.list_checkpoints(tmp_path)] == [1, 3, 5]

    def test_the_model_of_a_run_is_its_best_checkpoint_or_its_newest(
        self, model: Model, tokenizer: Tokenizer, optimizer: torch.optim.Optimizer, tmp_path: Path
    ) -> None:
        root = tmp_path / "checkpoints"
        for step in (1, 2):
            save_checkpoint(root, step, model, tokenizer, optimizer, {"step": step})
        assert resolve_model_folder(str(tmp_path)) == root / "step-00000002"
        mark_best(root, 1, 0.5)
        assert resolve_model_folder(str(tmp_path)) == root / "step-00000001"
        with pytest.raises(UsageError, match="does not exist"):
            resolve_model_folder(str(tmp_path / "other"))

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"step": "1"}', "[" * 100_000, "\ud800"], ids=len)
    def test_a_damaged_best_json_only_warns(
        self, checkpoint: Path, content: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        root = checkpoint.parent / "run/checkpoints"
        root.mkdir(parents=True)
        checkpoint.rename(root / checkpoint.name)
        (root / "best.json").write_text(content, errors="surrogatepass")
        assert resolve_model_folder(str(root.parent)) == root / checkpoint.name
        assert "best.json: damaged" in capsys.readouterr().err


class TestSavedState:
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("kind", ["weight", "exp_avg", "exp_avg_sq"])
    @pytest.mark.parametrize("fused", [(), ("qkv", "gate_up")], ids=["plain", "fused"])
    def test_a_value_that_is_not_finite_is_found_by_its_hugging_face_name(
        self, llama_dir: Path, fused: tuple[Fusion, ...], kind: str, bad: float
    ) -> None:
        model = load_model(llama_dir, CPU, execution=ExecutionOptions(fused=fused))
        optimizer, runner = optimizer_for(model), Runner(model, CPU, False)
        train_step(runner, optimizer, padded_batch(sequences(2)), 1, 1e-3, 1.0)
        check_saved_state(1, runner, optimizer, None)
        parameters = dict(model.named_parameters())
        matrix = parameters["layers.1.attention.wqkv.weight" if fused else "layers.1.attention.wk.weight"]
        # In the fused matrix, the 32 features of q come first.
        tensor = matrix.detach() if kind == "weight" else optimizer.state[matrix][kind]
        tensor[35 if fused else 3, 5] = bad
        name = "model.layers.1.self_attn.k_proj.weight" + ("" if kind == "weight" else f" ({kind})")
        with pytest.raises(NumericalError, match=re.escape(f"infinite or NaN, such as {name};")) as caught:
            check_saved_state(1, runner, optimizer, Path("runs/a/checkpoints/step-00000001"))
        assert "step-00000001 is kept: resume from it" in str(caught.value)

    def test_names_of_the_fallback_have_no_prefix_of_ours(self, llama_dir: Path) -> None:
        model = load_model(llama_dir, CPU, execution=ExecutionOptions(implementation="fallback"))
        dict(model.named_parameters())["hf.model.norm.weight"].detach().fill_(float("nan"))
        with pytest.raises(NumericalError, match=r"made 1 weights .* such as model\.norm\.weight;"):
            check_saved_state(1, Runner(model, CPU, False), optimizer_for(model), None)


class TestExport:
    def test_an_untrained_model_is_exported_byte_for_byte(self, llama_dir: Path, tmp_path: Path) -> None:
        result = export_model(str(llama_dir), tmp_path / "out")
        assert result["max_logit_difference"] <= 1e-5
        for name in ("model.safetensors", "generation_config.json"):
            assert (tmp_path / "out" / name).read_bytes() == (llama_dir / name).read_bytes()

    def test_bf16_halves_the_file_with_the_same_logits(self, llama_dir: Path, tmp_path: Path) -> None:
        result = export_model(str(llama_dir), tmp_path / "out", dtype="bfloat16")
        assert result["max_logit_difference"] <= 1e-5
        assert result["bytes"] < 0.6 * (llama_dir / "model.safetensors").stat().st_size
        assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"

    def test_transformers_stops_at_the_end_of_a_turn(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        """A model without a generation config gets one with the end of a turn and the end of a text."""
        from transformers import AutoModelForCausalLM

        folder = make_llama(tmp_path / "model", tokenizer)
        (folder / "generation_config.json").unlink()
        export_model(str(folder), tmp_path / "out")
        model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"))
        end = tokenizer.hf.convert_tokens_to_ids("<|end|>")
        assert model.generation_config.eos_token_id == [tokenizer.eos_id, end]
        ids = torch.tensor([[7, 8, 9]])
        with torch.no_grad():
            hidden = model.model(ids).last_hidden_state[0, -1]
            model.lm_head.weight.zero_()
            model.lm_head.weight[end] = hidden
        assert model.generate(ids, max_new_tokens=5, do_sample=False)[0].tolist() == [7, 8, 9, end]

    def test_a_link_is_kept_and_the_folder_behind_it_written(self, llama_dir: Path, tmp_path: Path) -> None:
        (tmp_path / "large-disk").mkdir()
        (tmp_path / "out").symlink_to(tmp_path / "large-disk")
        export_model(str(llama_dir), tmp_path / "out", verify=False)
        assert (tmp_path / "out").is_symlink()
        assert (tmp_path / "large-disk/model.safetensors").is_file()

    def test_a_folder_that_is_not_empty_is_not_overwritten(self, llama_dir: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out/precious").write_text("x")
        with pytest.raises(UsageError, match="not empty"):
            export_model(str(llama_dir), tmp_path / "out")
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]

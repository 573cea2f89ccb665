"""The parts of a step: loss, gradients, clipping, schedule, groups, metrics, checkpoints."""

from __future__ import annotations

import json
import math
import mmap
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as settings_of
from hypothesis import strategies as st
from torch import nn

from tiny import make_llama
from torchstone.checkpoint import manifest
from torchstone.checkpoint.export import export_model
from torchstone.checkpoint.load import resolve_model_folder, restore_optimizer, restore_random
from torchstone.checkpoint.save import best_step, mark_best, remove_old, save_checkpoint
from torchstone.config.schema import OptimConfig, TrainingConfig
from torchstone.data.collate import collate
from torchstone.data.encode import Counts, Encoded
from torchstone.data.loader import RunData, StepBatch
from torchstone.data.packing import Batching
from torchstone.data.sampler import InfiniteSampler, MixedSampler
from torchstone.data.tokenize import Tokenizer
from torchstone.errors import CheckpointError, DataError, NumbersError, UsageError
from torchstone.loss.cross_entropy import token_loss_sum
from torchstone.models.model import Model
from torchstone.models.opening import load_model
from torchstone.observe.metrics import MetricsFile, memory_bytes, read_metrics
from torchstone.optim.build import NATIVE_ROLES, build_optimizer, kind_of
from torchstone.optim.clip import clip_gradients, squared_norm
from torchstone.optim.schedule import learning_rate, schedule_notes
from torchstone.parallel.mesh import ALONE
from torchstone.parallel.running import Runner
from torchstone.training.guard import check_numbers
from torchstone.training.length import crossed, run_length
from torchstone.training.state import Progress
from torchstone.training.step import backward, mean_loss, train_step

CPU = torch.device("cpu")


@pytest.fixture
def model(llama_dir: Path) -> Model:
    return load_model(llama_dir, CPU)


def sequences(count: int, seed: int = 0) -> list[Encoded]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        ids = rng.integers(0, 448, int(rng.integers(3, 20)))
        found.append(Encoded(ids, np.where(rng.random(len(ids)) < 0.6, ids, -100)))
    return found


def batch_of(groups: list[list[list[Encoded]]]) -> StepBatch:
    micro_batches = [collate(rows, pad_id=0) for rows in groups]
    count = sum(int((m.labels != -100).sum()) for m in micro_batches)
    return StepBatch(micro_batches, samples=8, tokens=100, loss_tokens=count, padding=0, first_sample=0)


def gradients_of(model: Model, batch: StepBatch, packed: bool) -> tuple[float, torch.Tensor]:
    model.module.zero_grad()
    done = backward(Runner(model, CPU, packed), batch, 1)
    gradients = torch.cat([p.grad.flatten() for p in model.module.parameters()])
    assert done.grad_norm == pytest.approx(gradients.double().norm().item(), rel=1e-6)
    return done.loss, gradients


class TestLoss:
    def test_it_is_the_sum_over_labelled_tokens(self) -> None:
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
    def test_how_a_batch_is_cut_changes_neither_loss_nor_gradients(self, model: Model) -> None:
        eight = sequences(8)
        one_row = gradients_of(model, batch_of([[eight]]), packed=True)
        padded = gradients_of(model, batch_of([[[s] for s in eight]]), packed=False)
        one_by_one = gradients_of(model, batch_of([[[s]] for s in eight]), packed=False)
        uneven = gradients_of(model, batch_of([[eight[:1]], [eight[1:3], eight[3:4]], [eight[4:]]]), packed=True)
        for loss, gradients in (padded, one_by_one, uneven):
            assert loss == pytest.approx(one_row[0], rel=1e-6)
            assert ((gradients - one_row[1]).norm() / one_row[1].norm()).item() < 2e-6

    @settings_of(
        deadline=None,
        max_examples=25,
        derandomize=True,
        # The model is not changed by taking gradients of it.
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(
        lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
        masked=st.sampled_from([0.0, 0.5, 0.9]),
        seed=st.integers(0, 1000),
    )
    def test_for_any_batch_packed_is_padded_is_one_by_one(
        self, model: Model, lengths: list[int], masked: float, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        found = []
        for length in lengths:
            ids = rng.integers(0, 448, length)
            found.append(Encoded(ids, np.where(rng.random(length) < masked, -100, ids)))
        found.append(Encoded(np.array([5, 6]), np.array([5, 6])))
        one_row = gradients_of(model, batch_of([[found]]), packed=True)
        padded = gradients_of(model, batch_of([[[s] for s in found]]), packed=False)
        one_by_one = gradients_of(model, batch_of([[[s]] for s in found]), packed=False)
        with_an_idle_rank = gradients_of(model, batch_of([[found], []]), packed=True)
        for loss, gradients in (padded, one_by_one, with_an_idle_rank):
            assert loss == pytest.approx(one_row[0], rel=1e-6)
            assert ((gradients - one_row[1]).norm() / one_row[1].norm()).item() < 2e-6

    def test_a_micro_batch_without_labels_contributes_nothing(self, model: Model) -> None:
        some, silent = sequences(4), sequences(2, seed=9)
        for sequence in silent:
            sequence.labels[:] = -100
        without = gradients_of(model, batch_of([[[s] for s in some]]), packed=False)
        with_silent = gradients_of(model, batch_of([[[s] for s in some], [[s] for s in silent]]), packed=False)
        assert without[0] == with_silent[0]
        assert torch.equal(without[1], with_silent[1])

    def test_a_step_without_any_label_names_itself(self, model: Model) -> None:
        silent = sequences(2)
        for sequence in silent:
            sequence.labels[:] = -100
        with pytest.raises(DataError, match="step 7 has no token to learn from"):
            backward(Runner(model, CPU, False), batch_of([[[s] for s in silent]]), 7)

    def test_only_the_first_label_of_a_sequence_is_never_a_target(self, model: Model) -> None:
        only_first = Encoded(np.array([5, 6, 7]), np.array([5, -100, -100]))
        assert batch_of([[[only_first]]]).loss_tokens == 0

    def test_clipping_scales_to_the_limit_and_reports_the_norm_before(self) -> None:
        parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
        parameters[0].grad = torch.tensor([3.0, 0.0, 0.0])
        parameters[1].grad = torch.tensor([[0.0, 4.0], [0.0, 0.0]])
        squares = squared_norm([p.grad for p in parameters])
        assert squares.dtype == torch.float64
        assert squares.item() == pytest.approx(25.0)
        clip_gradients(parameters, squares.item() ** 0.5, 1.0)
        assert torch.cat([p.grad.flatten() for p in parameters]).norm().item() == pytest.approx(1.0, rel=1e-5)

    @pytest.mark.parametrize("limit", [0.0, 100.0])
    def test_gradients_within_the_limit_stay_bit_for_bit(self, limit: float) -> None:
        parameter = nn.Parameter(torch.zeros(4))
        parameter.grad = torch.tensor([1.1, -2.2, 3.3, 0.1])
        before = parameter.grad.clone()
        clip_gradients([parameter], squared_norm([parameter.grad]).item() ** 0.5, limit)
        assert torch.equal(parameter.grad, before)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_bad_numbers_stop_before_the_weights_change(self, model: Model, bad: float) -> None:
        optimizer = build_optimizer(model.module.named_parameters(), OptimConfig())
        before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
        model.module.layers["1"].mlp.up.weight.register_hook(lambda gradient: gradient * bad)
        with pytest.raises(
            NumbersError, match=r"1 gradients are not finite, the first layers\.1\.mlp\.up\.weight"
        ) as caught:
            train_step(Runner(model, CPU, False), optimizer, batch_of([[[s] for s in sequences(2)]]), 3, 1e-3, 1.0)
        assert caught.value.exit_code == 5
        for name, parameter in model.module.named_parameters():
            assert torch.equal(parameter, before[name]), name

    def test_finite_numbers_pass_the_guard(self, model: Model) -> None:
        check_numbers(1, 2.5, 0.0, Runner(model, CPU, False))

    def test_mean_loss_is_the_per_token_mean_and_keeps_the_mode(self, model: Model) -> None:
        batch = batch_of([[[s] for s in sequences(4)], [[s] for s in sequences(3, seed=1)]])
        model.module.train()
        loss, tokens = mean_loss(Runner(model, CPU, False), [batch, batch])
        assert loss == pytest.approx(gradients_of(model, batch, False)[0], rel=1e-6)
        assert tokens == 2 * batch.loss_tokens
        assert model.module.training

    def test_mean_loss_measures_without_gradients_and_leaves_evaluation_mode(self, model: Model) -> None:
        seen = []
        model.module.register_forward_hook(lambda *_: seen.append((torch.is_grad_enabled(), model.module.training)))
        model.module.eval()
        mean_loss(Runner(model, CPU, False), [batch_of([[[s] for s in sequences(2)]])])
        assert seen == [(False, False)]
        assert not model.module.training

    def test_validation_without_a_label_is_an_error(self, model: Model) -> None:
        silent = sequences(2)
        for sequence in silent:
            sequence.labels[:] = -100
        with pytest.raises(DataError, match="no token with a label"):
            mean_loss(Runner(model, CPU, False), [batch_of([[[s] for s in silent]])])


class TestOptimizerGroups:
    @pytest.mark.parametrize(
        ("name", "shape", "kind"),
        [
            ("layers.0.attention.wq.bias", (4,), "bias"),
            ("layers.0.attention_norm.weight", (4,), "norm"),
            ("tok_embed.weight", (4, 4), "embed"),
            ("head.weight", (4, 4), "head"),
            ("layers.0.mlp.up.weight", (4, 4), "matrix"),
        ],
    )
    def test_what_kind_a_parameter_is(self, name: str, shape: tuple[int, ...], kind: str) -> None:
        assert kind_of(name, nn.Parameter(torch.zeros(shape)), NATIVE_ROLES) == kind

    def test_norms_biases_and_embeddings_do_not_decay_by_default(self, tmp_path: Path) -> None:
        decoder = load_model(make_llama(tmp_path, attention_bias=True), CPU).module
        optimizer = build_optimizer(decoder.named_parameters(), OptimConfig(weight_decay=0.3))
        decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
        names = {name: decay[id(p)] for name, p in decoder.named_parameters()}
        assert {name for name, value in names.items() if value == 0.3} == {
            name for name in names if re.search(r"(wq|wk|wv|wo|gate|up|down|head)\.weight$", name)
        }
        assert len(decay) == len(names)

    def test_the_kinds_without_decay_can_be_chosen(self, model: Model) -> None:
        optimizer = build_optimizer(model.module.named_parameters(), OptimConfig(no_decay=("matrix", "head")))
        kept = {id(p) for group in optimizer.param_groups if group["weight_decay"] == 0 for p in group["params"]}
        for name, parameter in model.module.named_parameters():
            assert (id(parameter) in kept) == (kind_of(name, parameter, NATIVE_ROLES) in ("matrix", "head")), name

    def test_the_settings_reach_the_optimizer(self, model: Model) -> None:
        optim = OptimConfig(learning_rate=0.123, betas=(0.7, 0.8), eps=1e-5)
        for group in build_optimizer(model.module.named_parameters(), optim).param_groups:
            assert (group["lr"], group["betas"], group["eps"]) == (0.123, (0.7, 0.8), 1e-5)


class TestSchedule:
    @pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
    def test_warmup_ends_at_the_peak(self, schedule: str) -> None:
        optim = OptimConfig(learning_rate=1.0, warmup_steps=10, schedule=schedule)
        rates = [learning_rate(step, 100, optim) for step in range(100)]
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
    def test_the_middle_and_the_end_of_a_hundred_steps(self, schedule: str, middle: float, last: float) -> None:
        optim = OptimConfig(learning_rate=1.0, schedule=schedule, min_lr_ratio=0.1)
        assert learning_rate(50, 100, optim) == pytest.approx(middle)
        assert learning_rate(99, 100, optim) == pytest.approx(last)

    def test_cosine_equals_transformers_after_warmup(self) -> None:
        from transformers import get_cosine_schedule_with_warmup

        parameter = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.AdamW([parameter], lr=3e-4)
        theirs = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=40)
        optim = OptimConfig(learning_rate=3e-4, warmup_steps=5, schedule="cosine")
        for step in range(40):
            if step >= 5:
                assert learning_rate(step, 40, optim) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
            optimizer.step()
            theirs.step()

    def test_a_run_that_ends_before_its_schedule_says_so(self) -> None:
        assert "ends within optim.warmup_steps 6" in schedule_notes(5, OptimConfig(warmup_steps=6))[0]
        short = OptimConfig(learning_rate=1.0, warmup_steps=6, schedule="wsd", decay_steps=6)
        assert "right after warm-up" in schedule_notes(10, short)[0]
        assert [learning_rate(step, 10, short) for step in (5, 6, 8)] == pytest.approx([1.0, 1.0, 0.5])
        assert schedule_notes(100, short) == schedule_notes(None, OptimConfig(schedule="constant")) == []


class FixedSamples:
    def __init__(self, lengths: list[int]) -> None:
        self.lengths = np.array(lengths)
        self.loss_tokens = self.lengths - 1

    def __len__(self) -> int:
        return len(self.lengths)

    def get(self, index: int) -> list[Encoded]:
        raise NotImplementedError


def fixed_data(
    lengths: list[int], batching: Batching, sizes: list[int] | None = None, weights: list[float] | None = None
) -> RunData:
    return RunData(
        FixedSamples(lengths),
        None,
        batching,
        ["a"],
        ["text"],
        sizes or [len(lengths)],
        weights or [],
        False,
        "",
        0,
        Counts(),
    )


class TestRunLength:
    @pytest.mark.parametrize(
        ("given", "steps", "samples"),
        [
            ({"max_steps": 7}, 7, None),
            ({"max_epochs": 1}, 4, 10),
            ({"max_epochs": 2.5}, 9, 25),
            ({"max_epochs": 0.29}, 1, 3),
            ({"max_epochs": 0.01}, 1, 1),
            ({}, 4, 10),
            ({"max_tokens": 100}, 4, 12),
            ({"max_tokens": 101}, 4, 12),
            ({"max_tokens": 91}, 4, 12),
            ({"max_tokens": 90}, 3, 9),
            ({"max_tokens": 30}, 1, 3),
            ({"max_tokens": 31}, 2, 6),
            ({"max_steps": 2, "max_epochs": 5}, 2, 50),
            ({"mode": "infinite"}, None, None),
        ],
    )
    def test_every_limit_as_steps(self, given: dict, steps: int | None, samples: int | None) -> None:
        data = fixed_data([10] * 10, Batching(3, 3, None))
        length = run_length(TrainingConfig(**given), data, True, Progress())
        assert (length.steps, length.samples) == (steps, samples)

    def test_tokens_are_counted_in_the_order_they_will_come(self) -> None:
        data = fixed_data([1, 100, 1, 100], Batching(1, 1, None))
        assert run_length(TrainingConfig(max_tokens=102), data, False, Progress()).steps == 3
        assert run_length(TrainingConfig(max_tokens=203), data, False, Progress()).steps == 5

    @pytest.mark.parametrize("seed", [0, 1, 2])
    @pytest.mark.parametrize("tokens", [5, 40, 70, 101, 130])
    def test_tokens_are_counted_in_the_sampler_s_own_order(self, seed: int, tokens: int) -> None:
        data = fixed_data([1, 2, 3, 5, 8, 13, 21], Batching(1, 1, None))
        seen = np.cumsum(data.train.lengths[InfiniteSampler(7, seed).take(28)])
        length = run_length(TrainingConfig(max_tokens=tokens, seed=seed), data, True, Progress())
        assert length.steps == 1 + int(np.argmax(seen >= tokens))

    @pytest.mark.parametrize("tokens", [5, 40, 101, 130])
    def test_tokens_of_a_mixture_are_counted_as_they_are_drawn(self, tokens: int) -> None:
        data = fixed_data([1, 2, 3, 5, 8, 13, 21], Batching(1, 1, None), sizes=[3, 4], weights=[3, 1])
        seen = np.cumsum(data.train.lengths[MixedSampler([3, 4], [3, 1], 5).take(100)])
        length = run_length(TrainingConfig(max_tokens=tokens, seed=5), data, True, Progress())
        assert length.steps == 1 + int(np.argmax(seen >= tokens))

    @pytest.mark.parametrize(
        ("before", "after", "every", "expected"),
        [(9, 10, 10, True), (10, 11, 10, False), (8, 21, 10, True), (0, 5, None, False), (0.96, 1.04, 0.5, True)],
    )
    def test_a_multiple_is_crossed_once(self, before: float, after: float, every: float | None, expected: bool) -> None:
        assert crossed(before, after, every) == expected


class TestMetrics:
    def test_lines_after_the_resumed_step_are_cut_and_half_lines_too(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text("".join(json.dumps({"step": n}) + "\n" for n in (1, 2, 3, "x")) + '{"step": 5, "lo')
        metrics = MetricsFile(path, resumed_step=2)
        metrics.write({"step": 3, "loss": 0.1 + 0.2})
        metrics.close()
        assert metrics.removed == 3
        assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3, "loss": 0.30000000000000004}]

    def test_a_last_line_without_its_end_is_not_glued_to_the_next(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1}\n{"step": 2}')
        metrics = MetricsFile(path, resumed_step=2)
        metrics.write({"step": 3})
        metrics.close()
        assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]

    def test_memory_is_what_the_process_holds(self) -> None:
        before = memory_bytes(CPU)
        # Pages asked of the system itself: an allocator may answer from what it already holds.
        with mmap.mmap(-1, 50_000_000) as held:
            held.write(b"x" * len(held))
            assert memory_bytes(CPU) - before > 0.8 * len(held)


class TestCheckpointing:
    def stepped(self, model: Model) -> torch.optim.Optimizer:
        optimizer = build_optimizer(model.module.named_parameters(), OptimConfig())
        train_step(Runner(model, CPU, False), optimizer, batch_of([[[s] for s in sequences(4)]]), 1, 1e-2, 1.0)
        return optimizer

    def test_weights_moments_and_randomness_come_back_bit_for_bit(
        self, model: Model, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        optimizer = self.stepped(model)
        torch.manual_seed(123)
        folder = save_checkpoint(tmp_path, 1, model, tokenizer, optimizer, {"step": 1})
        drawn = torch.randn(5)
        manifest.verify(folder)
        other = load_model(folder, CPU)
        again = build_optimizer(other.module.named_parameters(), OptimConfig())
        restore_optimizer(folder, again, other)
        restore_random(folder, ALONE, 0, pytest.fail)
        assert torch.equal(torch.randn(5), drawn)
        for (name, a), (_, b) in zip(model.module.named_parameters(), other.module.named_parameters(), strict=True):
            assert torch.equal(a, b), name
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(optimizer.state[a][key], again.state[b][key]), (name, key)

    def test_transformers_loads_a_checkpoint_as_it_is(self, model: Model, tokenizer: Tokenizer, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = save_checkpoint(tmp_path, 1, model, tokenizer, self.stepped(model), {"step": 1})
        theirs = AutoModelForCausalLM.from_pretrained(str(folder))
        ids = torch.tensor([AutoTokenizer.from_pretrained(str(folder))("KATO read backwards is OTAK.").input_ids])
        with torch.no_grad():
            ours = model.module(ids, torch.arange(ids.shape[1])[None])
            assert (theirs(ids).logits - ours).abs().max().item() <= 1e-5

    def test_no_pickle_is_written(self, model: Model, tokenizer: Tokenizer, tmp_path: Path) -> None:
        folder = save_checkpoint(tmp_path, 1, model, tokenizer, self.stepped(model), {"step": 1})
        assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors", ".jinja"}

    @pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json"])
    def test_one_flipped_bit_anywhere_is_noticed(
        self, model: Model, tokenizer: Tokenizer, tmp_path: Path, name: str
    ) -> None:
        folder = save_checkpoint(tmp_path, 1, model, tokenizer, self.stepped(model), {"step": 1})
        path = folder / name
        content = bytearray(path.read_bytes())
        content[-len(content) // 3] ^= 4
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{name}: damaged"):
            manifest.verify(folder)

    @pytest.mark.parametrize(
        "content",
        ['{"format": 1, "fi|es": {}}', '{"format": 1, "files": 3}', '{"format": 1, "files": {}}', "[]", "", "{"],
    )
    def test_a_damaged_manifest_is_noticed(self, tmp_path: Path, content: str) -> None:
        with manifest.committed(tmp_path / "step-00000001") as folder:
            (folder / "file").write_text("x")
        (tmp_path / "step-00000001/manifest.json").write_text(content)
        with pytest.raises(CheckpointError, match="damaged|format"):
            manifest.verify(tmp_path / "step-00000001")

    def test_an_error_while_writing_leaves_nothing_listed(self, tmp_path: Path) -> None:
        def fail(folder: Path) -> None:
            (folder / "file").write_text("half")
            raise RuntimeError("disk full")

        with pytest.raises(RuntimeError, match="disk full"), manifest.committed(tmp_path / "step-00000001") as folder:
            fail(folder)
        assert manifest.list_checkpoints(tmp_path) == []
        assert list(tmp_path.iterdir()) == []

    def test_replacing_a_checkpoint_never_leaves_none(self, tmp_path: Path) -> None:
        final = tmp_path / "step-00000001"
        for content in ("one", "two"):
            with manifest.committed(final) as folder:
                (folder / "file").write_text(content)
        assert (final / "file").read_text() == "two"
        # As if killed between the two renames: the old one is still there under its hidden name.
        final.rename(tmp_path / ".step-00000001.replaced")
        (tmp_path / ".step-00000002.partial").mkdir()
        manifest.tidy(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        manifest.verify(final)

    def test_old_checkpoints_go_and_the_best_stays(self, tmp_path: Path) -> None:
        for step in range(1, 6):
            with manifest.committed(tmp_path / manifest.folder_name(step)) as folder:
                (folder / "file").write_text(str(step))
        mark_best(tmp_path, 2, 0.5)
        assert remove_old(tmp_path, keep_last=2) == [1, 3]
        assert [step for step, _ in manifest.list_checkpoints(tmp_path)] == [2, 4, 5]
        assert best_step(tmp_path) == 2

    def test_a_run_means_its_best_checkpoint_else_its_newest(
        self, model: Model, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        root = tmp_path / "checkpoints"
        optimizer = self.stepped(model)
        for step in (1, 2):
            save_checkpoint(root, step, model, tokenizer, optimizer, {"step": step})
        assert resolve_model_folder(str(tmp_path)) == root / "step-00000002"
        mark_best(root, 1, 0.5)
        assert resolve_model_folder(str(tmp_path)) == root / "step-00000001"
        with pytest.raises(UsageError, match="does not exist"):
            resolve_model_folder(str(tmp_path / "other"))


class TestExport:
    def test_an_untrained_model_is_exported_byte_for_byte(self, llama_dir: Path, tmp_path: Path) -> None:
        found = export_model(str(llama_dir), tmp_path / "out")
        assert (tmp_path / "out/model.safetensors").read_bytes() == (llama_dir / "model.safetensors").read_bytes()
        assert found["max_logit_difference"] <= 1e-5

    def test_bf16_halves_the_file_and_still_agrees(self, llama_dir: Path, tmp_path: Path) -> None:
        found = export_model(str(llama_dir), tmp_path / "out", dtype="bfloat16")
        assert found["max_logit_difference"] <= 1e-5
        assert found["bytes"] < 0.6 * (llama_dir / "model.safetensors").stat().st_size
        assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"

    def test_transformers_stops_where_a_turn_ends(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        """A model without a generation config gets one that names the end of a turn beside the end of a text."""
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

    def test_what_came_with_the_model_goes_with_it(self, llama_dir: Path, tmp_path: Path) -> None:
        name = "generation_config.json"
        assert (llama_dir / name).is_file()
        export_model(str(llama_dir), tmp_path / "out")
        assert (tmp_path / "out" / name).read_bytes() == (llama_dir / name).read_bytes()

    def test_a_folder_with_something_in_it_is_not_overwritten(self, llama_dir: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out/precious").write_text("x")
        with pytest.raises(UsageError, match="not empty"):
            export_model(str(llama_dir), tmp_path / "out")
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]

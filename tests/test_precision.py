"""Mixed precision is FSDP2's policy: compute in bf16; sum over micro-batches and ranks, and keep, in fp32.

The dtype of a gradient does not tell the dtype of its sum: FSDP2 returns fp32 after a sum in bf16 too. So sums are
compared with the fp64 sum of each micro-batch's gradients, and the same check must fail when the sum is in bf16.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from parity import distance, relative
from precision import (
    BF16_SUM_ERROR,
    LEARNING_RATE,
    MOMENTS,
    Parallel,
    Tensors,
    distances,
    full_copy,
    full_gradients,
    make_batches,
    make_optimizer,
    open_runner,
    random_sequences,
    rank_batch,
    single_process_runner,
    sum_of_micro_batches,
    take_gradients,
    train_losses,
    train_steps,
)
from steps import step_batch, train_step
from tiny_families import VOCABULARY, make_model
from torchstone.checkpoint.load import restore_optimizer
from torchstone.checkpoint.model_folder import load_model
from torchstone.checkpoint.save import save_checkpoint
from torchstone.data.collate import collate
from torchstone.data.tokenize import Tokenizer
from torchstone.parallel.fsdp import mixed_precision_policy
from torchstone.parallel.runner import Runner
from torchstone.testing import launch_procs
from torchstone.training.step import compute_gradients

CPU = torch.device("cpu")
# Of a step, and on each of two data-parallel ranks.
MICRO_BATCHES, PER_RANK = 8, 4
SUM_LIMIT = 1e-6
DP_LAYOUTS: dict[str, Parallel] = {
    "zero 1": {"dp_shard": 2, "zero": 1},
    "zero 2": {"dp_shard": 2, "zero": 2},
    "zero 3": {"dp_shard": 2, "zero": 3},
    "dp_replicate 2": {"dp_replicate": 2},
}
LAYOUTS = DP_LAYOUTS | {"tp 2": {"tp": 2}, "pp 2": {"pp": 2}}
random_batches = partial(make_batches, count=MICRO_BATCHES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", "grouped")


class TestOneProcess:
    @pytest.mark.parametrize(
        ("family", "variant", "execution"),
        [
            ("llama", "grouped", {}),
            ("llama", "tied", {"fused": ("qkv", "gate_up")}),
            ("gemma2", "caps", {"recompute": "full"}),
            ("gpt2", "untied", {}),
            ("qwen3", "biases", {"implementation": "fallback"}),
        ],
    )
    def test_it_computes_what_fsdp2_computes_to_the_last_bit(
        self, tmp_path: Path, family: str, variant: str, execution: dict[str, Any]
    ) -> None:
        folder = make_model(tmp_path, family, variant)
        ours = train_three_steps(single_process_runner(folder, CPU, "bf16", **execution))
        with open_runner(folder, CPU, "bf16", {}, **execution) as runner:
            expected = train_three_steps(runner)
        assert ours.keys() == expected.keys()
        for name, values in expected.items():
            assert torch.equal(ours[name], values), name
            assert values.dtype == torch.float32, name

    def test_a_checkpoint_moves_to_fsdp2_and_back_to_the_last_bit(
        self, folder: Path, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        """Master weights, moments and step counts, in six steps of several micro-batches."""

        def train(source: Path, steps: range, on_mesh: bool) -> tuple[list[float], Tensors]:
            with open_runner(source, CPU, "bf16", {}) if on_mesh else nullcontext() as runner:
                runner = runner or single_process_runner(source, CPU, "bf16")
                optimizer = make_optimizer(runner)
                if steps.start:
                    restore_optimizer(source, optimizer, runner.model)
                batches = [step_batch(random_batches(step)) for step in steps]
                results = [train_step(runner, optimizer, each, 1, LEARNING_RATE, 0.5) for each in batches]
                state = {"step": steps.stop}
                save_checkpoint(tmp_path, steps.stop, runner.model, tokenizer, optimizer, state, runner.ctx)
                weights = {name: full_copy(p) for name, p in runner.model.named_parameters()}
            return [result.loss for result in results], weights

        expected_losses, expected = train(folder, range(6), on_mesh=False)
        losses = train(folder, range(2), on_mesh=False)[0]
        losses += train(tmp_path / "step-00000002", range(2, 4), on_mesh=True)[0]
        more, weights = train(tmp_path / "step-00000004", range(4, 6), on_mesh=False)
        assert losses + more == expected_losses
        assert all(torch.equal(weights[name], expected[name]) for name in expected)

    def test_frozen_parameters_get_no_gradient(self, folder: Path) -> None:
        """Frozen before the copies are made, or later."""
        early, late = "tok_embed.weight", "layers.0.mlp.down.weight"
        model = load_model(folder, CPU)
        dict(model.named_parameters())[early].requires_grad_(False)
        model.use_master_weights(torch.bfloat16)
        dict(model.named_parameters())[late].requires_grad_(False)
        compute_gradients(Runner(model, CPU, packed=True), step_batch(random_batches(0)), 1)
        frozen = {name for name, parameter in model.named_parameters() if parameter.grad is None}
        assert frozen == {early, late}

    def test_the_loss_knows_the_dtype_that_it_computes_in(self, folder: Path) -> None:
        assert single_process_runner(folder, CPU, "bf16").model.module.compute_dtype == torch.bfloat16

    def test_it_keeps_one_copy_of_each_weight_and_no_bf16_gradient(self, folder: Path) -> None:
        runner = single_process_runner(folder, CPU, "bf16")
        compute_gradients(runner, step_batch(random_batches(0)), 1)
        masters, copies = dict(runner.model.named_parameters()), dict(runner.model.module.named_parameters())
        assert masters.keys() == copies.keys()
        assert {copy.dtype for copy in copies.values()} == {torch.bfloat16}
        assert all(
            copy.grad is None and master.grad is not None
            for copy, master in zip(copies.values(), masters.values(), strict=True)
        )


def train_three_steps(runner: Runner) -> Tensors:
    return train_steps(runner, [step_batch(random_batches(step)) for step in range(3)])


class TestDtypes:
    def test_the_policy_computes_in_bf16_and_reduces_in_fp32(self) -> None:
        common = {"reduce_dtype": torch.float32, "cast_forward_inputs": False}
        for precision in ("bf16", "fp8"):
            assert mixed_precision_policy(precision) == MixedPrecisionPolicy(param_dtype=torch.bfloat16, **common)
        for precision in ("fp32", "bf16-pure", "fp8-pure"):
            assert mixed_precision_policy(precision) == MixedPrecisionPolicy(param_dtype=None, **common)

    def test_parameters_gradients_and_moments_are_fp32_in_every_layout(self, folder: Path) -> None:
        names = {name for name, _ in load_model(folder, CPU).named_parameters()}
        cases: dict[str, tuple[str, Parallel]] = {name: ("bf16", layout) for name, layout in LAYOUTS.items()}
        cases |= {"bf16-pure": ("bf16-pure", {"dp_shard": 2}), "fp32": ("fp32", {"dp_shard": 2})}
        ranks = launch_procs(dtypes_of_cases, 2, folder, cases)
        results = {case: [rank[case] for rank in ranks] for case in cases}
        results["one process"] = [dtypes_after_step(folder, "bf16", {})]
        for case, ranks in results.items():
            expected = torch.bfloat16 if case == "bf16-pure" else torch.float32
            for kind in ("parameters", "gradients", *MOMENTS):
                merged = {name: dtype for rank in ranks for name, dtype in rank[kind].items()}
                assert merged == dict.fromkeys(names, expected), (case, kind)
                assert all(len(rank[kind]) == len(names) for rank in ranks) == (case != "pp 2"), (case, kind)
            compute_dtype = torch.float32 if case == "fp32" else torch.bfloat16
            # Three blocks for each of two micro-batches; tp ranks compute all of them.
            counts = Counter(dtype for rank in ranks for dtype in rank["activations"])
            assert counts == {compute_dtype: 12 if case == "tp 2" else 6}, case


def dtypes_of_cases(folder: Path, cases: dict[str, tuple[str, Parallel]]) -> dict[str, Any]:
    return {name: dtypes_after_step(folder, precision, parallel) for name, (precision, parallel) in cases.items()}


def dtypes_after_step(folder: Path, precision: str, parallel: Parallel) -> dict[str, Any]:
    """The dtypes of this rank's parameters, gradients and moments by name, and of its blocks' outputs."""
    dtypes: dict[str, Any] = {"activations": []}
    with open_runner(folder, CPU, precision, parallel) as runner:
        parameters, optimizer = dict(runner.model.named_parameters()), make_optimizer(runner)

        def note_gradients(*_: Any) -> None:
            dtypes["gradients"] = {name: p.grad.dtype for name, p in parameters.items()}

        def note_activations(module: Any, inputs: Any, output: Tensor) -> None:
            dtypes["activations"].append(output.dtype)

        optimizer.register_step_pre_hook(note_gradients)
        for part in runner.model.model_parts:
            for block in part.layers.values():
                block.register_forward_hook(note_activations)
        train_step(runner, optimizer, rank_batch(runner, random_batches(0, count=2)), 1, LEARNING_RATE, 1.0)
        dtypes["parameters"] = {name: p.dtype for name, p in parameters.items()}
        for moment in MOMENTS:
            dtypes[moment] = {name: optimizer.state[p][moment].dtype for name, p in parameters.items()}
    return dtypes


def test_mixed_precision_computes_what_a_bf16_model_computes(folder: Path) -> None:
    """The logits are those of weights rounded to bf16, bit for bit; from fp32's they differ as bf16 does."""
    batch = random_batches(0, count=1)[0]
    inputs = (batch.ids, batch.positions, batch.doc_ids)
    with torch.no_grad():
        exact = load_model(folder, CPU).module(*inputs)
        rounded = load_model(folder, CPU, torch.bfloat16).module(*inputs)
        with open_runner(folder, CPU, "bf16", {}) as runner:
            mixed = runner.model.module(*inputs)
    assert mixed.dtype == torch.bfloat16
    assert torch.equal(mixed, rounded)
    assert 1e-3 < distance(mixed.float(), exact) < 2e-2


class TestReduction:
    """A step's gradients must be the fp64 sum of each micro-batch's gradients, in every layout."""

    def test_gradients_are_summed_in_fp32_and_a_sum_in_bf16_is_noticed(self, folder: Path) -> None:
        with open_runner(folder, CPU, "bf16", {}) as runner:
            expected = sum_of_micro_batches(runner, random_batches(0))
            ours = full_gradients(runner, rank_batch(runner, random_batches(0)))
            assert max(distances(ours, expected)) <= SUM_LIMIT
        with open_runner(folder, CPU, "bf16", {}, reduce_dtype=torch.bfloat16) as runner:
            ours = full_gradients(runner, rank_batch(runner, random_batches(0)))
            assert min(distances(ours, expected)) > BF16_SUM_ERROR
        for rank in launch_procs(gradients_of_layouts, 2, folder, "bf16", DP_LAYOUTS):
            for case in DP_LAYOUTS:
                assert max(distances(rank[case, torch.float32], expected)) <= SUM_LIMIT, case
                # With the fault every gradient is off, not only the worst.
                assert min(distances(rank[case, torch.bfloat16], expected)) > BF16_SUM_ERROR, case

    def test_pure_bf16_is_summed_in_fp32_and_rounded_once(self, folder: Path) -> None:
        """bf16 gradients are as far from the sum as rounding it once makes them."""
        with open_runner(folder, CPU, "bf16-pure", {}) as runner:
            expected = sum_of_micro_batches(runner, random_batches(0))
        layouts = {f"zero {zero}": {"dp_shard": 2, "zero": zero, "reduce": "once"} for zero in (1, 2, 3)}
        for rank in launch_procs(gradients_of_layouts, 2, folder, "bf16-pure", layouts):
            for case in layouts:
                right, wrong = rank[case, torch.float32], rank[case, torch.bfloat16]
                for name, total in expected.items():
                    rounding = distance(total.bfloat16().double(), total)
                    assert distance(right[name].double(), total) <= 1.001 * rounding, (case, name)
                    assert distance(wrong[name].double(), total) > 1.1 * rounding, (case, name)


def gradients_of_layouts(folder: Path, precision: str, layouts: dict[str, Parallel]) -> dict[Any, Tensors]:
    gradients = {}
    for name, parallel in layouts.items():
        for reduce_dtype in (torch.float32, torch.bfloat16):
            with open_runner(folder, CPU, precision, parallel, reduce_dtype) as runner:
                batch = rank_batch(runner, random_batches(0))
                assert len(batch.micro_batches) == PER_RANK
                gradients[name, reduce_dtype] = full_gradients(runner, batch)
    return gradients


# How much six losses may differ from those of one process. Measured: 0, 0, 6.7e-4 and 3.5e-4. With tp, or rows padded
# to another length, other sums are rounded to bf16.
LOSS_LIMITS: dict[str, tuple[Parallel, float]] = {
    "dp_shard 2": ({"dp_shard": 2}, 1e-4),
    "dp_replicate 2": ({"dp_replicate": 2}, 1e-4),
    "tp 2": ({"tp": 2}, 3e-3),
    "pp 2": ({"pp": 2}, 1.7e-3),
}


def test_losses_of_two_ranks_equal_those_of_one_within_bf16(folder: Path) -> None:
    single, exact = losses_of_six_steps(folder, "bf16", {}), losses_of_six_steps(folder, "fp32", {})
    # Measured: 6e-4.
    assert 1e-5 < max(map(relative, single, exact)) < 3e-3
    # Steps 1 and 5 have the same rows.
    assert single[4] < 0.8 * single[0]
    for rank in launch_procs(losses_of_layouts, 2, folder):
        for case, (_, limit) in LOSS_LIMITS.items():
            assert max(map(relative, rank[case], single)) < limit, case


def losses_of_layouts(folder: Path) -> dict[str, list[float]]:
    return {name: losses_of_six_steps(folder, "bf16", parallel) for name, (parallel, _) in LOSS_LIMITS.items()}


def losses_of_six_steps(folder: Path, precision: str, parallel: Parallel) -> list[float]:
    """They have the same two batches in turn."""
    with open_runner(folder, CPU, precision, parallel) as runner:
        batches = [rank_batch(runner, random_batches(step % 2, count=2)) for step in range(1, 7)]
        return train_losses(runner, batches)


def test_accumulation_equals_one_large_micro_batch(folder: Path) -> None:
    expected_loss, expected = accumulate(folder, {}, rows_per_micro_batch=8)
    results = [accumulate(folder, {}, rows_per_micro_batch=1)]
    for rank in launch_procs(accumulate_in_layouts, 2, folder):
        results += rank
    assert len(results) == 1 + 2 * 2 * len(DP_LAYOUTS)
    for loss, gradients in results:
        assert relative(loss, expected_loss) <= SUM_LIMIT
        assert max(distances(gradients, expected)) <= SUM_LIMIT


def accumulate_in_layouts(folder: Path) -> list[tuple[float, Tensors]]:
    return [accumulate(folder, parallel, rows) for parallel in DP_LAYOUTS.values() for rows in (1, 4)]


def accumulate(folder: Path, parallel: Parallel, rows_per_micro_batch: int) -> tuple[float, Tensors]:
    """Loss and gradients of eight rows in fp32, which the ranks share."""
    rows = [[sequence] for sequence in random_sequences(np.random.default_rng(5), 8, 16, VOCABULARY)]
    with open_runner(folder, CPU, "fp32", parallel) as runner:
        own = rows[runner.ctx.dp_rank :: runner.ctx.dims.dp]
        starts = range(0, len(own), rows_per_micro_batch)
        batches = [collate(own[start : start + rows_per_micro_batch], pad_id=0) for start in starts]
        batch = step_batch(batches, [collate(rows, pad_id=0)])
        return compute_gradients(runner, batch, 1).loss, take_gradients(runner)

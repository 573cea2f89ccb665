"""FP8 on a GPU: the kernels against the emulation that the CPU tests use, compiled against eager, and against bf16.

How far FP8 is from bf16 is measured by the emulation, which multiplies the same FP8 values in fp32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parity import relative
from precision import (
    Tensors,
    distances,
    full_gradients,
    open_runner,
    random_sequences,
    single_process_runner,
    train_losses,
)
from steps import step_batch
from tiny import TINY_LLAMA, make_llama
from torchstone.data.collate import BatchShapes, collate
from torchstone.data.loader import StepBatch
from torchstone.errors import UsageError
from torchstone.models.fp8 import Fp8Options, check_fp8
from torchstone.parallel.runner import Runner
from torchstone.training.step import validation_loss

CUDA = torch.device("cuda")
# Heads of 64, which every attention kernel supports.
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
RECIPES = ("tensorwise", "rowwise")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        check_fp8(Fp8Options(), CUDA)
    except UsageError as error:
        pytest.skip(error.message)
    return make_llama(tmp_path_factory.mktemp("llama"), **SIZES)


def random_batch(seed: int = 0, rows: int = 8) -> StepBatch:
    sequences = random_sequences(np.random.default_rng(seed), 4 * rows, 64, TINY_LLAMA["vocab_size"])
    return step_batch([collate([sequences[4 * n : 4 * n + 4] for n in range(rows)], 0, BatchShapes(multiple=16))])


def gradients(folder: Path, recipe: Any, emulate: bool = False, **execution: Any) -> Tensors:
    """With eager attention, which adds in the same order every time."""
    options = Fp8Options(recipe, emulate)
    runner = single_process_runner(folder, CUDA, "fp8", fp8=options, attention="eager", **execution)
    return full_gradients(runner, random_batch())


def losses_of_steps(runner: Runner) -> list[float]:
    """Twenty steps, which have the same two batches in turn."""
    return train_losses(runner, [random_batch(n % 2) for n in range(1, 21)])


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_kernels_compute_what_the_emulation_computes(folder: Path, recipe: Any) -> None:
    bf16 = full_gradients(single_process_runner(folder, CUDA, "bf16", attention="eager"), random_batch())
    kernels, emulated = gradients(folder, recipe), gradients(folder, recipe, emulate=True)
    rounding = max(distances(emulated, bf16))
    assert 0.01 < rounding < 0.5
    # Other orders of addition move a few numbers to the next FP8 value.
    assert max(distances(kernels, emulated)) < rounding
    assert max(distances(kernels, bf16)) < 1.5 * rounding


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("recompute", ["none", "elementwise", "selective", "full"])
def test_compiled_blocks_are_as_far_from_bf16_as_eager_ones(folder: Path, recipe: Any, recompute: Any) -> None:
    torch._dynamo.reset()
    bf16 = full_gradients(single_process_runner(folder, CUDA, "bf16", attention="eager"), random_batch())
    eager = gradients(folder, recipe)
    compiled = gradients(folder, recipe, compile="block", recompute=recompute)
    rounding = max(distances(eager, bf16))
    assert max(distances(compiled, bf16)) < 1.5 * rounding
    assert max(distances(compiled, eager)) < 1.5 * rounding


@pytest.mark.parametrize("precision", ["fp8", "fp8-pure"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_follow_those_of_bf16(folder: Path, precision: Any, recipe: Any) -> None:
    expected = losses_of_steps(single_process_runner(folder, CUDA, precision.replace("fp8", "bf16"), compile="block"))
    runner = single_process_runner(folder, CUDA, precision, compile="block", fp8=Fp8Options(recipe))
    losses = losses_of_steps(runner)
    assert losses[-1] < 0.7 * losses[0]
    assert sum(losses) == pytest.approx(sum(expected), rel=0.05)
    assert relative(losses[0], expected[0]) < 5e-3


def test_validation_is_in_bf16(folder: Path) -> None:
    fp8, bf16 = (
        single_process_runner(folder, CUDA, precision, attention="eager", fp8=options)  # type: ignore[arg-type]
        for precision, options in (("fp8", Fp8Options()), ("bf16", None))
    )
    assert validation_loss(fp8, [random_batch()]) == validation_loss(bf16, [random_batch()])


def test_fsdp2_on_a_mesh_of_one(folder: Path) -> None:
    expected = gradients(folder, "tensorwise")
    with open_runner(folder, CUDA, "fp8", {}, attention="eager", fp8=Fp8Options()) as runner:
        assert max(distances(full_gradients(runner, random_batch()), expected)) < 1e-3
    with open_runner(folder, CUDA, "fp8", {}, compile="block", fp8=Fp8Options()) as runner:
        losses = losses_of_steps(runner)
        assert losses[-1] < 0.7 * losses[0]


def test_a_number_of_tokens_that_is_no_multiple_of_16_is_an_error_of_the_kernel(folder: Path) -> None:
    """Why the data loader pads rows to a multiple of 16. If this fails, it need not."""
    sequences = random_sequences(np.random.default_rng(0), 2, 9, TINY_LLAMA["vocab_size"])
    batch = step_batch([collate([sequences], 0, BatchShapes(multiple=1))])
    assert batch.micro_batches[0].ids.numel() % 16
    runner = single_process_runner(folder, CUDA, "fp8", fp8=Fp8Options())
    with pytest.raises(RuntimeError, match="divisible by 16|multiple of 16"):
        full_gradients(runner, batch)

"""On a GPU: the Triton kernel of the chunked loss computes what its reference in plain torch does, without waiting."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from loss_cases import full_loss, loss_and_gradients
from parity import distance, relative
from torchstone.checkpoint.model_folder import load_model
from torchstone.loss.chunked import Head, chunked_loss_sum, write_gradient, write_statistics
from torchstone.loss.cross_entropy import IGNORE_INDEX
from torchstone.models.execution import ExecutionOptions
from torchstone.parallel.runner import micro_batch_loss

DEVICE = torch.device("cuda")


def make_inputs(vocab_size: int, dtype: torch.dtype, tokens: int = 300) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    draw = partial(torch.randn, generator=generator, device=DEVICE)
    hidden, weight = draw(2, tokens // 2, 64), draw(vocab_size, 64) / 4
    labels = torch.randint(vocab_size, (2, tokens // 2), generator=generator, device=DEVICE)
    labels[0, ::3] = IGNORE_INDEX
    return hidden.to(dtype), weight.to(dtype), labels


@pytest.mark.parametrize("vocab_size", [5, 97, 50257, 128256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("divisor", [1.0, 2.5])
@pytest.mark.parametrize("vocab_start", [0, 64])
def test_the_kernel_writes_what_its_reference_writes(
    vocab_size: int, dtype: torch.dtype, softcap: float | None, divisor: float, vocab_start: int
) -> None:
    from torchstone.loss.kernel import launch

    generator = torch.Generator(DEVICE).manual_seed(0)
    logits = (torch.randn(33, vocab_size, generator=generator, device=DEVICE) * 8).to(dtype)
    # Some are on another rank, some have no label, one is in no vocabulary.
    labels = torch.randint(vocab_size + vocab_start, (33,), generator=generator, device=DEVICE)
    labels[::5], labels[1] = IGNORE_INDEX, vocab_size + vocab_start
    head = Head(softcap, divisor, vocab_size + vocab_start, vocab_start, grad_scale=0.3)
    statistics, expected_statistics, apart_statistics = torch.empty(3, 3, 40, device=DEVICE)[:, :, 3:36]
    expected, together, apart = logits.clone(), logits.clone(), logits.clone()
    write_statistics(expected, labels, expected_statistics, head)
    write_gradient(expected, labels, expected_statistics, head)
    launch(together, labels, statistics, head, statistics=True, gradient=True)
    has_label = labels != IGNORE_INDEX
    torch.testing.assert_close(
        statistics[:, has_label], expected_statistics[:, has_label], rtol=1e-5, atol=1e-5, equal_nan=True
    )
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-6}
    torch.testing.assert_close(together, expected, **tolerance)
    launch(apart, labels, apart_statistics, head, statistics=True, gradient=False)
    assert torch.equal(apart, logits)
    launch(apart, labels, apart_statistics, head, statistics=False, gradient=True)
    assert torch.equal(apart, together)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("divisor", [1.0, 2.5])
@pytest.mark.parametrize("chunk_tokens", [64, 300])
@pytest.mark.parametrize("is_count_known", [True, False])
def test_loss_and_gradients_are_those_of_the_full_loss(
    softcap: float | None, divisor: float, chunk_tokens: int, is_count_known: bool
) -> None:
    settings: dict[str, Any] = {"softcap": softcap, "divisor": divisor}
    inputs = make_inputs(1003, torch.float32)
    loss_tokens = int((inputs[2] != IGNORE_INDEX).sum()) if is_count_known else None
    chunked = partial(chunked_loss_sum, chunk_tokens=chunk_tokens, loss_tokens=loss_tokens, **settings)
    expected = loss_and_gradients(partial(full_loss, **settings), *inputs)
    loss, *gradients = loss_and_gradients(chunked, *inputs)
    assert relative(loss.item(), expected[0].item()) <= 1e-6
    for gradient, expected_gradient in zip(gradients, expected[1:], strict=True):
        assert distance(gradient, expected_gradient) <= 2e-6


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("vocab_size", [1003, 50257])
def test_bf16_is_as_close_to_fp64_as_the_full_loss(softcap: float | None, vocab_size: int) -> None:
    hidden, weight, labels = make_inputs(vocab_size, torch.bfloat16, tokens=1200)
    settings: dict[str, Any] = {"softcap": softcap, "divisor": 1.0}
    exact = loss_and_gradients(partial(full_loss, **settings), hidden.double(), weight.double(), labels)
    full = loss_and_gradients(partial(full_loss, **settings), hidden, weight, labels)
    chunked = partial(chunked_loss_sum, chunk_tokens=256, grad_scale=1 / 17, **settings)
    ours = loss_and_gradients(chunked, hidden, weight, labels)
    assert relative(ours[0].item(), exact[0].item()) <= relative(full[0].item(), exact[0].item()) + 1e-6
    for gradient, expected, reference in zip(ours[1:], full[1:], exact[1:], strict=True):
        assert gradient.dtype == torch.bfloat16
        assert distance(gradient.double(), reference) <= 1.05 * distance(expected.double(), reference)


@pytest.mark.usefixtures("sync_mode")
def test_nothing_waits_for_the_device_and_memory_is_that_of_a_chunk() -> None:
    tokens, vocab_size, chunk_tokens = 8192, 50257, 512
    hidden, weight, labels = make_inputs(vocab_size, torch.bfloat16, tokens)
    loss_tokens = int((labels != IGNORE_INDEX).sum())
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    chunked_loss_sum(hidden, weight, labels, chunk_tokens, loss_tokens=loss_tokens).backward()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    chunked_loss_sum(hidden, weight, labels, chunk_tokens, loss_tokens=loss_tokens).backward()
    torch.cuda.set_sync_debug_mode("default")
    gradients = 4 * weight.numel() + 2 * weight.numel() + 2 * hidden.numel()
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * (2 * chunk_tokens * vocab_size + gradients) + 2**22


def test_two_runs_are_bit_identical() -> None:
    inputs = make_inputs(50257, torch.bfloat16, tokens=2048)
    count = int((inputs[2] != IGNORE_INDEX).sum())
    chunked = partial(chunked_loss_sum, chunk_tokens=256, loss_tokens=count)
    first, second = (loss_and_gradients(chunked, *inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_auto_is_chunked_and_a_model_has_the_same_gradients(folder_of: Callable[[tuple[str, str]], Path]) -> None:
    folder = folder_of(("gemma2", "caps"))
    full, chunked = (
        load_model(folder, DEVICE, execution=ExecutionOptions(attention="eager", loss=loss))
        for loss in ("full", "auto")
    )
    assert str(chunked.choices["model.loss"]) == "chunked (on a GPU, 4096 tokens at a time)"
    ids = torch.randint(96, (4, 24), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    positions = torch.arange(24, device=DEVICE).expand(4, 24)
    losses = [micro_batch_loss(model.module, ids, positions, None, ids.roll(-1, 1)) for model in (full, chunked)]
    assert relative(losses[1].item(), losses[0].item()) <= 1e-6
    for loss in losses:
        (loss / 17).backward()
    for (name, p), expected in zip(chunked.module.named_parameters(), full.module.parameters(), strict=True):
        assert distance(p.grad, expected.grad) <= 1e-4, name

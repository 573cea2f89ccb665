"""Head and loss for one chunk of tokens at a time: the result of `token_loss_sum` without all logits in memory.

A chunk's logits are computed in the dtype of the model, its losses in fp32. Then the logits are overwritten with their
gradient, from which follow the gradients of the hidden states and of the head; the latter is summed over the chunks in
fp32. So the forward pass computes all gradients, and the backward pass only scales them, by one if the caller told the
forward pass what the loss will be multiplied by (`grad_scale`): then every gradient is rounded once. Without gradients
(validation) none are computed. Nothing waits for the device.

The largest tensors are one chunk of logits and the head's fp32 gradient. The cost is one pass over that gradient for
each chunk, so chunks should not be small.

On CUDA one Triton kernel (kernel.py) reads the logits and writes their gradient; `write_statistics` and
`write_gradient` are the same in plain torch: its reference, and what runs elsewhere. A vocabulary-parallel head has a
part of the vocabulary on each rank, which exchange three numbers for each token: the largest logit, the sum of
exponentials and the target's logit.

Shapes: B rows, T tokens of a row, N tokens, D width, V vocabulary, or this rank's part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate

from torchstone.loss.cross_entropy import IGNORE_INDEX
from torchstone.triton_support import triton_error

# On an H200, half as many tokens at a time are 8 % slower, and twice as many are no faster.
MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS = 4096, 256
# A chunk's logits take at most this share of the memory.
MEMORY_SHARE = 1 / 32
# On a CPU, where larger chunks leave the caches.
CPU_CHUNK_TOKENS = 512
ALIGNMENT = 16
# Tokens without a label are left out if they are at least this share; fewer are not worth a copy of the others.
MIN_IGNORED_SHARE = 1 / 16


@dataclass(frozen=True)
class Head:
    """How logits follow from hidden @ weight.T, and the part of the vocabulary that this rank has."""

    softcap: float | None
    divisor: float
    vocab_size: int
    vocab_start: int = 0
    group: dist.ProcessGroup | None = None
    # Multiplies all gradients.
    grad_scale: float = 1.0


def choose_chunk_tokens(vocab_size: int, itemsize: int, memory: int) -> int:
    """Tokens whose logits take a small share of `memory` bytes: a power of two."""
    most = int(memory * MEMORY_SHARE) // (vocab_size * itemsize)
    return max(MIN_CHUNK_TOKENS, min(MAX_CHUNK_TOKENS, 1 << max(most, 1).bit_length() - 1))


def chunked_loss_sum(
    hidden_BTD: Tensor,
    head_weight: Tensor,
    labels_BT: Tensor,
    chunk_tokens: int,
    softcap: float | None = None,
    divisor: float = 1.0,
    loss_tokens: int | None = None,
    grad_scale: float = 1.0,
) -> Tensor:
    """The sum of the token losses of logits = hidden @ head.T / divisor, soft-capped if `softcap` is set; in fp32.

    `loss_tokens`: how many labels are not -100, if the caller knows it: counting them on a GPU would wait for it.
    `grad_scale`: what the loss will be multiplied by. With another factor the gradients are right too, but rounded
    twice. A label outside the vocabulary makes the loss NaN.
    """
    vocab_size, vocab_start, group = len(head_weight), 0, None
    if isinstance(head_weight, DTensor):
        assert isinstance(hidden_BTD, DTensor)
        mesh = head_weight.device_mesh
        group, vocab_start = mesh.get_group(), -(-vocab_size // mesh.size()) * mesh.get_local_rank()
        head_weight = head_weight.to_local()
        # The gradient of a rank's part of the vocabulary is a partial sum.
        hidden_BTD = hidden_BTD.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    head = Head(softcap, divisor, vocab_size, vocab_start, group, grad_scale)
    hidden_ND, labels_N = _select_loss_tokens(hidden_BTD.flatten(0, 1), labels_BT.flatten(), loss_tokens)
    if torch.is_grad_enabled() and (hidden_ND.requires_grad or head_weight.requires_grad):
        return _ChunkedLoss.apply(hidden_ND, head_weight, labels_N, chunk_tokens, head)
    return _loss_sum(hidden_ND, head_weight, labels_N, chunk_tokens, head)


def _select_loss_tokens(hidden_ND: Tensor, labels_N: Tensor, loss_tokens: int | None) -> tuple[Tensor, Tensor]:
    has_label_N = labels_N != IGNORE_INDEX
    if loss_tokens is not None:
        torch._assert_async(has_label_N.sum() == loss_tokens, "loss_tokens is not the number of labels")
    if loss_tokens is None or loss_tokens > len(labels_N) * (1 - MIN_IGNORED_SHARE):
        return hidden_ND, labels_N
    indices = torch.nonzero_static(has_label_N, size=loss_tokens).flatten()
    return hidden_ND.index_select(0, indices), labels_N.index_select(0, indices)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, chunk_tokens: int, head: Head
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        hidden_grad = torch.empty_like(hidden_ND) if needs_hidden else None
        weight_grad = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        loss = _loss_sum(hidden_ND, weight_VD, labels_N, chunk_tokens, head, hidden_grad, weight_grad)
        ctx.save_for_backward(hidden_grad, None if weight_grad is None else weight_grad.to(weight_VD.dtype))
        ctx.grad_scale = head.grad_scale
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        # In fp32: a factor without dimensions would be rounded to the dtype of the gradient first.
        factor = (grad_loss.float() / ctx.grad_scale).view(1, 1)
        grads = [
            None if grad is None else torch.mul(grad, factor, out=torch.empty_like(grad)) for grad in ctx.saved_tensors
        ]
        return *grads, None, None, None


def _loss_sum(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    chunk_tokens: int,
    head: Head,
    hidden_grad: Tensor | None = None,
    weight_grad: Tensor | None = None,
) -> Tensor:
    """Returns the loss sum; overwrites `hidden_grad` and adds to `weight_grad` where they are given."""
    statistics_3N = torch.empty(3, len(labels_N), dtype=torch.float32, device=labels_N.device)
    # Aligned, which kernels prefer, whatever the vocabulary.
    stride = -(-len(weight_VD) // ALIGNMENT) * ALIGNMENT
    padded_buffer = hidden_ND.new_empty(min(chunk_tokens, len(labels_N)), stride)
    # oneDNN multiplies what is between two rows by zero (bf16, on a CPU with AMX), and NaN times zero is NaN.
    padded_buffer[:, len(weight_VD) :] = 0
    logits_buffer = padded_buffer[:, : len(weight_VD)]
    has_gradient = hidden_grad is not None or weight_grad is not None
    for start in range(0, len(labels_N), chunk_tokens):
        tokens = slice(start, start + chunk_tokens)
        chunk_ND = hidden_ND[tokens]
        logits_NV = torch.mm(chunk_ND, weight_VD.t(), out=logits_buffer[: len(chunk_ND)])
        _overwrite_logits(logits_NV, labels_N[tokens], statistics_3N[:, tokens], head, has_gradient)
        if hidden_grad is not None:
            torch.mm(logits_NV, weight_VD, out=hidden_grad[tokens])
        if weight_grad is not None:
            _add_product(weight_grad, logits_NV.t(), chunk_ND)
    largest_N, sum_N, target_N = statistics_3N
    loss_N = sum_N.log() - (target_N - largest_N)
    # In one sum over all tokens, so that the size of the chunks does not matter.
    return loss_N.masked_fill_(labels_N == IGNORE_INDEX, 0.0).sum()


def _overwrite_logits(logits_NV: Tensor, labels_N: Tensor, statistics_3N: Tensor, head: Head, gradient: bool) -> None:
    """Writes the statistics of a chunk's logits and, with `gradient`, replaces the logits by their gradient."""
    if logits_NV.is_cuda and triton_error() is None:
        from torchstone.loss.kernel import launch

        launch(logits_NV, labels_N, statistics_3N, head, statistics=True, gradient=gradient and head.group is None)
        if head.group is not None:
            reduce_statistics(statistics_3N, head.group)
            if gradient:
                launch(logits_NV, labels_N, statistics_3N, head, statistics=False, gradient=True)
        return
    write_statistics(logits_NV, labels_N, statistics_3N, head)
    if head.group is not None:
        reduce_statistics(statistics_3N, head.group)
    if gradient:
        write_gradient(logits_NV, labels_N, statistics_3N, head)


def write_statistics(logits_NV: Tensor, labels_N: Tensor, statistics_3N: Tensor, head: Head) -> None:
    """Writes of each token the largest logit, the sum of exp(logit - largest) and the target's logit.

    The target's logit is 0 if another rank has it, and NaN if the vocabulary does not. The statistics of a token
    without a label are not used.
    """
    largest_N, sum_N, target_N = statistics_3N
    x_NV = _scaled_logits(logits_NV, head)
    largest_N.copy_(x_NV.amax(dim=-1))
    sum_N.copy_((x_NV - largest_N[:, None]).exp_().sum(dim=-1))
    index_N, is_here_N = _local_targets(labels_N, head.vocab_start, logits_NV.shape[1])
    target_N.copy_(torch.where(is_here_N, x_NV.gather(1, index_N[:, None])[:, 0], 0.0))
    target_N.masked_fill_((labels_N < 0) | (labels_N >= head.vocab_size), torch.nan)


def reduce_statistics(statistics_3N: Tensor, group: dist.ProcessGroup) -> None:
    """Makes the statistics of the ranks' parts of the vocabulary those of the whole."""
    local_3N = statistics_3N.contiguous()
    largest_N = local_3N[0].clone()
    dist.all_reduce(largest_N, dist.ReduceOp.MAX, group)
    # Only one rank has the target, which is relative to the largest logit, like the sum.
    local_3N[1] *= (local_3N[0] - largest_N).exp_()
    dist.all_reduce(local_3N[1:], dist.ReduceOp.SUM, group)
    local_3N[0] = largest_N
    statistics_3N.copy_(local_3N)


def write_gradient(logits_NV: Tensor, labels_N: Tensor, statistics_3N: Tensor, head: Head) -> None:
    """Overwrites a chunk's hidden @ weight.T with the gradient of the loss sum, times `head.grad_scale`."""
    largest_N, sum_N, _ = statistics_3N
    x_NV = _scaled_logits(logits_NV, head)
    slope_NV = None if head.softcap is None else 1.0 - (x_NV / head.softcap).square_()
    # In place: in fp32 this is the tensor of the logits.
    gradient_NV = x_NV.sub_(largest_N[:, None]).exp_().div_(sum_N[:, None] / head.grad_scale)
    index_N, is_here_N = _local_targets(labels_N, head.vocab_start, logits_NV.shape[1])
    gradient_NV.scatter_add_(1, index_N[:, None], -head.grad_scale * is_here_N.float()[:, None])
    if slope_NV is not None:
        gradient_NV.mul_(slope_NV)
    gradient_NV.masked_fill_((labels_N == IGNORE_INDEX)[:, None], 0.0)
    logits_NV.copy_(gradient_NV if head.divisor == 1.0 else gradient_NV.div_(head.divisor))


def _scaled_logits(logits_NV: Tensor, head: Head) -> Tensor:
    """The logits of the loss, in fp32."""
    x_NV = logits_NV.float()
    if head.divisor != 1.0:
        x_NV = x_NV / head.divisor
    return x_NV if head.softcap is None else torch.tanh(x_NV / head.softcap) * head.softcap


def _local_targets(labels_N: Tensor, vocab_start: int, size: int) -> tuple[Tensor, Tensor]:
    """The index of each target in this rank's part of the vocabulary, and whether it is there."""
    index_N = labels_N - vocab_start
    is_here_N = (index_N >= 0) & (index_N < size)
    return index_N.clamp(0, size - 1), is_here_N


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b, where `out` is fp32."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif a.is_cuda and torch.version.hip is None:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out += a @ b

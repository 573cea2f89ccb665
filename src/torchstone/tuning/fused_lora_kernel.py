"""The Triton kernels of fused_lora.py, which has the reference of each. Imported only where they run.

All are bound by memory. What counts is how often a tensor of all tokens and all columns of an MLP passes through it:

| kernel | reads | writes |
|---|---|---|
| `activation_kernel` | gate, up | act |
| `activation_backward_kernel` | gate, up, grad_act | grad_gate (over grad_act), grad_up |

What is a sum over all columns (act @ A.T) or over all tokens (the gradients of the factors) is summed in registers,
over the columns or the tokens of one program. The sums of the programs are then added without atomics: the same input
gives the same bits.

Large tensors are read and written through tensor descriptors, which need no registers for addresses and masks: what is
outside of a tensor is read as zero and not written. Their rows must be a multiple of 16 bytes.

Shapes: T tokens, F columns of the MLP, R a rank, S programs that share a sum. In the kernels, `R` is the largest rank,
padded to a power of two of at least 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Columns and tokens of a program: few enough to keep all multiprocessors busy to the end, enough for few partial sums.
SPLIT_COLUMNS, SPLIT_TOKENS = 1024, 1024
MIN_PADDED_RANK = 16
# Registers of a thread in the backward pass, so that three programs share a multiprocessor; larger ranks need more.
MAX_REGISTERS = 168


def launch_activation(
    gate_TF: Tensor, up_TF: Tensor, hidden_TR: Tensor, gate_B: Tensor, up_B: Tensor, down_A: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """Returns act [T, F] and act @ down_A.T [T, R]."""
    _check_contiguous(gate_TF, up_TF, hidden_TR, gate_B, up_B, down_A)
    tokens, width = gate_TF.shape
    block_T, block_F = _block_sizes(gate_TF.dtype)
    splits = triton.cdiv(width, SPLIT_COLUMNS)
    act_TF = torch.empty_like(gate_TF)
    partial_STR = gate_TF.new_empty(splits, tokens, len(down_A), dtype=torch.float32)
    gate, up, act = (TensorDescriptor.from_tensor(x, [block_T, block_F]) for x in (gate_TF, up_TF, act_TF))
    activation_kernel[(triton.cdiv(tokens, block_T), splits)](
        gate, up, hidden_TR, gate_B, up_B, down_A, act, partial_STR, tokens, WIDTH=width,
        SPLIT=SPLIT_COLUMNS, **_ranks(gate_B, up_B, down_A), ACTIVATION=activation, BLOCK_T=block_T, BLOCK_F=block_F,
        STAGES=3, num_warps=4,
    )  # fmt: skip
    return act_TF, partial_STR.sum(0).to(gate_TF.dtype)


def launch_activation_backward(
    grad_act_TF: Tensor, grad_down_hidden_TR: Tensor, gate_TF: Tensor, up_TF: Tensor, hidden_TR: Tensor,
    gate_B: Tensor, up_B: Tensor, down_A: Tensor, activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Overwrites `grad_act` with the gradient of gate; returns those of up, gate_B, up_B and down_A."""
    _check_contiguous(grad_act_TF, grad_down_hidden_TR, gate_TF, up_TF, hidden_TR, gate_B, up_B, down_A)
    (tokens, width), dtype = gate_TF.shape, gate_TF.dtype
    block_T, block_F = _block_sizes(dtype)
    splits, ranks = triton.cdiv(tokens, SPLIT_TOKENS), _ranks(gate_B, up_B, down_A)
    grad_up_TF = torch.empty_like(up_TF)
    partials = [x.new_empty(splits, *x.shape, dtype=torch.float32) for x in (gate_B, up_B, down_A)]
    grad_act, gate, up, grad_up = (
        TensorDescriptor.from_tensor(x, [block_T, block_F]) for x in (grad_act_TF, gate_TF, up_TF, grad_up_TF)
    )
    activation_backward_kernel[(triton.cdiv(width, block_F), splits)](
        grad_act, grad_down_hidden_TR, gate, up, hidden_TR, gate_B, up_B, down_A, grad_up, *partials, tokens,
        WIDTH=width, SPLIT=SPLIT_TOKENS, **ranks, ACTIVATION=activation, BLOCK_T=block_T, BLOCK_F=block_F, STAGES=2,
        num_warps=4, maxnreg=MAX_REGISTERS if ranks["R"] == MIN_PADDED_RANK else None,
    )  # fmt: skip
    grad_gate_B, grad_up_B, grad_down_A = (partial.sum(0).to(dtype) for partial in partials)
    return grad_up_TF, grad_gate_B, grad_up_B, grad_down_A


def _check_contiguous(*tensors: Tensor) -> None:
    assert all(tensor.is_contiguous() for tensor in tensors), [tensor.stride() for tensor in tensors]


def _block_sizes(dtype: torch.dtype) -> tuple[int, int]:
    """In fp32 only tests run the kernels: products in fp32 do not run on tensor cores, and need more registers."""
    return (64, 64) if dtype.itemsize == 2 else (32, 32)


def _padded_rank(*ranks: int) -> int:
    return max(MIN_PADDED_RANK, triton.next_power_of_2(max(ranks)))


def _ranks(gate_B: Tensor, up_B: Tensor, down_A: Tensor) -> dict[str, int]:
    ranks = {"GATE_RANK": gate_B.shape[1], "UP_RANK": up_B.shape[1], "DOWN_RANK": len(down_A)}
    return ranks | {"R": _padded_rank(*ranks.values())}


@triton.jit
def _sigmoid_argument(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """v(x) and its derivative, where the activation is x * sigmoid(v(x))."""
    if ACTIVATION == "silu":
        v = x
        slope = tl.full(x.shape, 1.0, tl.float32)
    else:
        # gelu_tanh: 0.5 * (1 + tanh(u)) is sigmoid(2 * u), and 2 * sqrt(2 / pi) is the first constant.
        square = x * x
        v = 1.5957691216057308 * x * (1.0 + 0.044715 * square)
        slope = 1.5957691216057308 * (1.0 + 3.0 * 0.044715 * square)
    return v, slope


@triton.jit
def _load_rows(ptr, rows, ranks, tokens, STRIDE: tl.constexpr, RANK: tl.constexpr):  # type: ignore[no-untyped-def]
    """[tokens, R]: zero where there is no token or no rank."""
    mask = (rows < tokens)[:, None] & (ranks < RANK)[None, :]
    return tl.load(ptr + rows[:, None] * STRIDE + ranks[None, :], mask, other=0.0)


@triton.jit
def _load_factor(  # type: ignore[no-untyped-def]
    ptr, ranks, columns, RANK_STRIDE: tl.constexpr, STRIDE: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """[R, columns]: zero where there is no column or no rank."""
    mask = (ranks < RANK)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(ptr + ranks[:, None] * RANK_STRIDE + columns[None, :] * STRIDE, mask, other=0.0)


# The number of tokens changes from step to step.
@triton.jit(do_not_specialize=["tokens"])
def activation_kernel(  # type: ignore[no-untyped-def]
    gate, up, hidden, gate_B, up_B, down_A, act, partial, tokens, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
    GATE_RANK: tl.constexpr, UP_RANK: tl.constexpr, DOWN_RANK: tl.constexpr, R: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A block of tokens, and some of the columns."""
    row, split = tl.program_id(0) * BLOCK_T, tl.program_id(1)
    rows, ranks = row + tl.arange(0, BLOCK_T), tl.arange(0, R)
    gate_hidden = _load_rows(hidden, rows, ranks, tokens, GATE_RANK + UP_RANK, GATE_RANK)
    up_hidden = _load_rows(hidden + GATE_RANK, rows, ranks, tokens, GATE_RANK + UP_RANK, UP_RANK)
    down_hidden = tl.zeros([BLOCK_T, R], dtype=tl.float32)
    # With num_stages the loads of the next blocks are under way, also those that no tl.dot reads.
    for start in tl.range(0, SPLIT, BLOCK_F, num_stages=STAGES):
        column = split * SPLIT + start
        columns = column + tl.arange(0, BLOCK_F)
        x = gate.load([row, column]).to(tl.float32)
        y = up.load([row, column]).to(tl.float32)
        b = _load_factor(gate_B, ranks, columns, 1, GATE_RANK, GATE_RANK, WIDTH)
        x = tl.dot(gate_hidden, b, x, input_precision="ieee")
        b = _load_factor(up_B, ranks, columns, 1, UP_RANK, UP_RANK, WIDTH)
        y = tl.dot(up_hidden, b, y, input_precision="ieee")
        v, _ = _sigmoid_argument(x, ACTIVATION)
        value = (x * tl.sigmoid(v) * y).to(act.dtype)
        act.store([row, column], value)
        a = _load_factor(down_A, ranks, columns, WIDTH, 1, DOWN_RANK, WIDTH)
        down_hidden = tl.dot(value, tl.trans(a), down_hidden, input_precision="ieee")
    partial += split.to(tl.int64) * tokens * DOWN_RANK
    mask = (rows < tokens)[:, None] & (ranks < DOWN_RANK)[None, :]
    tl.store(partial + rows.to(tl.int64)[:, None] * DOWN_RANK + ranks[None, :], down_hidden, mask)


@triton.jit(do_not_specialize=["tokens"])
def activation_backward_kernel(  # type: ignore[no-untyped-def]
    grad_act, grad_down_hidden, gate, up, hidden, gate_B, up_B, down_A, grad_up, grad_gate_B, grad_up_B, grad_down_A,
    tokens, WIDTH: tl.constexpr, SPLIT: tl.constexpr, GATE_RANK: tl.constexpr, UP_RANK: tl.constexpr,
    DOWN_RANK: tl.constexpr, R: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A block of columns, and some of the tokens."""
    column, split = tl.program_id(0) * BLOCK_F, tl.program_id(1)
    columns, ranks = column + tl.arange(0, BLOCK_F), tl.arange(0, R)
    b_gate = _load_factor(gate_B, ranks, columns, 1, GATE_RANK, GATE_RANK, WIDTH)
    b_up = _load_factor(up_B, ranks, columns, 1, UP_RANK, UP_RANK, WIDTH)
    a_down = _load_factor(down_A, ranks, columns, WIDTH, 1, DOWN_RANK, WIDTH)
    sum_gate_B = tl.zeros([BLOCK_F, R], dtype=tl.float32)
    sum_up_B = tl.zeros([BLOCK_F, R], dtype=tl.float32)
    sum_down_A = tl.zeros([BLOCK_F, R], dtype=tl.float32)
    for start in tl.range(0, SPLIT, BLOCK_T, num_stages=STAGES):
        row = split * SPLIT + start
        rows = row + tl.arange(0, BLOCK_T)
        gate_hidden = _load_rows(hidden, rows, ranks, tokens, GATE_RANK + UP_RANK, GATE_RANK)
        up_hidden = _load_rows(hidden + GATE_RANK, rows, ranks, tokens, GATE_RANK + UP_RANK, UP_RANK)
        down_hidden = _load_rows(grad_down_hidden, rows, ranks, tokens, DOWN_RANK, DOWN_RANK)
        x = tl.dot(gate_hidden, b_gate, gate.load([row, column]).to(tl.float32), input_precision="ieee")
        y = tl.dot(up_hidden, b_up, up.load([row, column]).to(tl.float32), input_precision="ieee")
        d = tl.dot(down_hidden, a_down, grad_act.load([row, column]).to(tl.float32), input_precision="ieee")
        v, slope = _sigmoid_argument(x, ACTIVATION)
        sigmoid = tl.sigmoid(v)
        value = x * sigmoid
        grad_x = (d * y * (sigmoid + value * (1.0 - sigmoid) * slope)).to(grad_up.dtype)
        grad_y = (d * value).to(grad_up.dtype)
        act = (value * y).to(grad_up.dtype)
        grad_act.store([row, column], grad_x)
        grad_up.store([row, column], grad_y)
        sum_gate_B = tl.dot(tl.trans(grad_x), gate_hidden, sum_gate_B, input_precision="ieee")
        sum_up_B = tl.dot(tl.trans(grad_y), up_hidden, sum_up_B, input_precision="ieee")
        sum_down_A = tl.dot(tl.trans(act), down_hidden, sum_down_A, input_precision="ieee")
    is_column, ranks = (columns < WIDTH)[:, None], ranks[None, :]
    columns, split = columns[:, None], split.to(tl.int64)
    grad_gate_B += split * WIDTH * GATE_RANK
    grad_up_B += split * WIDTH * UP_RANK
    grad_down_A += split * WIDTH * DOWN_RANK
    tl.store(grad_gate_B + columns * GATE_RANK + ranks, sum_gate_B, is_column & (ranks < GATE_RANK))
    tl.store(grad_up_B + columns * UP_RANK + ranks, sum_up_B, is_column & (ranks < UP_RANK))
    tl.store(grad_down_A + columns + ranks * WIDTH, sum_down_A, is_column & (ranks < DOWN_RANK))

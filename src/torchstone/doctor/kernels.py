"""The checks of what computes: dtypes, attention kernels and the compiler, by their results.

Each runs once, forward and backward, on a device, and is compared with the same function in fp64 on the CPU. The error
is the largest absolute difference of an output or gradient, divided by the largest value. So one wrong element counts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from torchstone.doctor.check import CheckResult, Finding, failed, ok, run_check, skipped, warning
from torchstone.errors import UsageError
from torchstone.loss.chunked import chunked_loss_sum
from torchstone.models.attention import (
    BACKENDS,
    AttentionBackend,
    AttentionSpec,
    attend,
    build_masks,
    choose_backend,
    load_kernel,
)
from torchstone.models.execution import check_compiler
from torchstone.models.fp8 import Fp8Options, check_fp8
from torchstone.models.tensors import dtype_name
from torchstone.triton_support import triton_error

# Roundings of inputs do not count. fp32 has room for TF32, which a variable can turn on.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
FP8_LIMIT = 0.2
TENSORWISE = Fp8Options()
MATRIX_SIZE = 512
# Rows with one document and with two, and two key/value heads.
LENGTH, HEADS, KV_HEADS, HEAD_DIM = 128, 4, 2, 64
VOCABULARY = 512
NO_FP8 = "torchstone train --training.precision bf16"
NO_KERNEL = "torchstone train --model.attention eager    # then update torch and the NVIDIA driver"
NOT_COMPILED = "torchstone train --model.compile none"
BAD_DEVICE = "dcgmi diag -r 3    # tests the memory of NVIDIA GPUs; memtester that of the host. Do not train on it"

Function = Callable[..., Tensor]


def check_kernels(device: torch.device) -> Iterator[CheckResult]:
    for dtype in LIMITS:
        yield run_check(f"matmul {dtype_name(dtype)}", check_matmul, device, dtype)
    yield run_check("matmul float8", check_fp8_linear, device, on_error=partial(warning, fix=NO_FP8))
    yield from check_attention(device)
    yield run_check("loss", check_loss, device)
    # On a CPU nothing is compiled by default.
    on_error = partial(failed if device.type == "cuda" else warning, fix=NOT_COMPILED)
    yield run_check("torch.compile", check_compile, device, on_error=on_error)


def dtype_of(device: torch.device) -> torch.dtype:
    """The dtype that training.precision auto chooses."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def check_matmul(device: torch.device, dtype: torch.dtype) -> Finding:
    inputs = random_tensors((MATRIX_SIZE, MATRIX_SIZE), (MATRIX_SIZE, MATRIX_SIZE))
    return judge(error_of(torch.mm, torch.mm, inputs, device, dtype), LIMITS[dtype], BAD_DEVICE)


def check_fp8_linear(device: torch.device, options: Fp8Options = TENSORWISE) -> Finding:
    """A linear as training.precision fp8 computes it."""
    try:
        check_fp8(options, device)
    except UsageError as unsupported:
        return skipped(unsupported.message)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(options.recipe), emulate=options.emulate)
    linear = nn.Linear(MATRIX_SIZE, MATRIX_SIZE, bias=False, device=device, dtype=torch.bfloat16)
    module = convert_to_float8_training(nn.Sequential(linear), config=config)

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        return functional_call(module, {"0.weight": weight}, x)

    inputs = random_tensors((MATRIX_SIZE, MATRIX_SIZE), (MATRIX_SIZE, MATRIX_SIZE))
    error = error_of(multiply, F.linear, inputs, device, torch.bfloat16)
    return judge(error, FP8_LIMIT, NO_FP8)


def check_attention(device: torch.device) -> Iterator[CheckResult]:
    """What `auto` chooses, each kernel that runs here, and the reasons of the others."""
    dtype = dtype_of(device)
    auto = run_check("attention auto", choose_attention, device, dtype)
    yield auto
    reasons: dict[str, list[str]] = {}
    for backend in BACKENDS:
        # A broken kernel that nobody asks for does not prevent training.
        on_error = partial(failed if backend in auto.values.values() else warning, fix=NO_KERNEL)
        check = run_check(f"attention {backend}", check_attention_kernel, backend, device, dtype, on_error=on_error)
        if check.status == "skip":
            reasons.setdefault(check.found, []).append(backend)
        else:
            yield check
    for reason, backends in reasons.items():
        text = f"{', '.join(backends)}: {'each ' * (len(backends) > 1)}{reason}"
        yield run_check("attention kernels", partial(skipped, text, backends=backends))


def check_attention_kernel(backend: AttentionBackend, device: torch.device, dtype: torch.dtype) -> Finding:
    try:
        choose_backend(backend, True, None, None, HEAD_DIM, device, dtype)
    except UsageError as unsupported:
        return skipped(unsupported.message.removeprefix(f"model.attention {backend} "))
    inputs = random_tensors((2, HEADS, LENGTH, HEAD_DIM), *[(2, KV_HEADS, LENGTH, HEAD_DIM)] * 2)
    error = error_of(partial(attend_packed, backend), partial(attend_packed, "eager"), inputs, device, dtype)
    return judge(error, LIMITS[dtype], BAD_DEVICE if backend == "eager" else NO_KERNEL)


def attend_packed(backend: AttentionBackend, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
    """Attention in a row with two documents and a row with one."""
    positions_BT = torch.zeros(2, LENGTH, dtype=torch.long, device=q_BHTE.device)
    doc_ids_BT = torch.zeros_like(positions_BT)
    doc_ids_BT[0, LENGTH // 3 :] = 1
    mask = build_masks({(backend, None)}, doc_ids_BT, positions_BT, None)[backend, None]
    spec = AttentionSpec(backend, HEAD_DIM**-0.5, kernel=load_kernel(backend))
    return attend(q_BHTE, k_BKSE, v_BKSE, mask, spec)


def choose_attention(device: torch.device, dtype: torch.dtype) -> Finding:
    packed = choose_backend("auto", True, None, None, HEAD_DIM, device, dtype).value
    single = choose_backend("auto", False, None, None, HEAD_DIM, device, dtype).value
    return ok(f"packed rows: {packed}; one document per row: {single}", packed=packed, single=single)


def check_loss(device: torch.device) -> Finding:
    """Head and loss in chunks: on CUDA a Triton kernel of this package."""
    labels = torch.arange(2 * LENGTH).remainder(VOCABULARY).view(2, LENGTH)

    def chunked(hidden: Tensor, head: Tensor) -> Tensor:
        return chunked_loss_sum(hidden, head, labels.to(device), LENGTH)

    def exact(hidden: Tensor, head: Tensor) -> Tensor:
        return F.cross_entropy((hidden @ head.T).flatten(0, 1), labels.flatten(), reduction="sum")

    hidden, head = random_tensors((2, LENGTH, HEAD_DIM), (VOCABULARY, HEAD_DIM))
    dtype = dtype_of(device)
    error = error_of(chunked, exact, [hidden, head / HEAD_DIM**0.5], device, dtype)
    return judge(error, LIMITS[dtype], "torchstone train --model.loss full")


def check_compile(device: torch.device) -> Finding:
    """A function of two lines, which no run before has compiled: what is cached needs no compiler."""
    if device.type == "cuda" and (reason := triton_error()) is not None:
        return warning(
            f"{reason}: nothing is compiled", "apt-get install gcc    # and the headers of Python: python3-dev"
        )
    try:
        check_compiler(device)
    except UsageError as missing:
        return warning(missing.message, "apt-get install g++")
    factor = random.uniform(0.5, 1.5)

    def gated(x: Tensor, y: Tensor) -> Tensor:
        z = factor * x + y
        return F.silu(z) * z

    inputs = random_tensors((64, 64), (64, 64))
    error = error_of(torch.compile(gated, fullgraph=True), gated, inputs, device, torch.float32)
    return judge(error, LIMITS[torch.float32], NOT_COMPILED)


def random_tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def error_of(
    function: Function, exact: Function, inputs: list[Tensor], device: torch.device, dtype: torch.dtype
) -> float:
    """How far `function` on `device` is from `exact` on the CPU in fp64, for inputs that `dtype` can hold."""
    rounded = [tensor.to(dtype) for tensor in inputs]
    ours = output_and_gradients(function, [tensor.to(device) for tensor in rounded])
    expected = output_and_gradients(exact, [tensor.double() for tensor in rounded])
    errors = [(a - b).abs().max() / b.abs().max() for a, b in zip(ours, expected, strict=True)]
    # A NaN is the largest.
    return torch.stack(errors).max().item()


def output_and_gradients(function: Function, inputs: list[Tensor]) -> list[Tensor]:
    args = [tensor.detach().requires_grad_() for tensor in inputs]
    output = function(*args)
    (weights,) = random_tensors(tuple(output.shape))
    # bf16 holds all of them exactly.
    weights = weights.bfloat16().to(output)
    gradients = torch.autograd.grad(output, args, weights)
    return [tensor.detach().double().cpu() for tensor in (output, *gradients)]


def judge(error: float, limit: float, fix: str) -> Finding:
    if not error <= limit:
        # JSON has no NaN.
        value = error if math.isfinite(error) else None
        return failed(f"wrong values: error {error:.1e}, limit {limit:g}", fix, error=value, limit=limit)
    return ok(f"error {error:.1e}", error=error, limit=limit)

"""Do the fast ways to compute give what the plain ones give: bf16, compiled code, fused losses, attention kernels?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from torchstone.data.formats import IGNORE_INDEX
from torchstone.diagnosis.check import Finding, SkipCheck, Status
from torchstone.diagnosis.gradients import (
    EXACT_GRADIENT_LIMIT,
    compute_step,
    gradient_errors,
    largest_difference,
    take_gradients,
)
from torchstone.diagnosis.hypotheses import document_weights
from torchstone.diagnosis.loss_checks import EXACT_LIMIT, agreement
from torchstone.diagnosis.reference import relative
from torchstone.diagnosis.restore import randomized_adapters
from torchstone.diagnosis.session import Diagnosis
from torchstone.loss.chunked import chunked_loss_sum
from torchstone.loss.fused import fused_loss_sum
from torchstone.models.decoder import Block
from torchstone.models.model import FallbackModel, NativeModel
from torchstone.training.run import Run

# Limit of the loss's relative error. bf16 has 8 bits, FP8 four; the errors of tokens average out.
PRECISION_LIMITS = {"fp32": 1e-4, "bf16": 1e-2, "bf16-pure": 1e-2, "fp8": 5e-2, "fp8-pure": 5e-2}
# Limit for all gradients together. Beyond it they point elsewhere.
PRECISION_GRADIENT_LIMITS = {"fp32": 1e-2, "bf16": 0.3, "bf16-pure": 0.3, "fp8": 0.7, "fp8-pure": 0.7}
# Limit for a fused loss: ours sums in another order, Liger's kernel approximates.
LIGER_LIMIT = 1e-2
# Not a divisor of anything, so that the last chunk is a partial one.
CHUNK_TOKENS = 37
# Limits for a kernel against eager attention: loss and gradients, in the dtype of the run.
KERNEL_LIMITS = {"fp32": (EXACT_LIMIT, EXACT_GRADIENT_LIMIT)}
BF16_KERNEL_LIMITS = (1e-2, 0.1)
# Except in fp32, a kernel that is off by up to this multiple of its limits gives only a warning.
FAILS_AT = 3.0
# (hidden states, head weight, labels) -> loss sum.
LossSum = Callable[..., Tensor]


def check_mixed_precision(diagnosis: Diagnosis) -> Finding:
    run, precision = diagnosis.run, diagnosis.config.training.precision
    if diagnosis.is_fp32:
        raise SkipCheck("the run computes in fp32 and uncompiled: loss and gradients compare it")
    diagnosis.require("batch", "loss", "gradients")
    right = diagnosis.loss_sums.loss
    weights = document_weights(diagnosis.contents, diagnosis.loss_sums)
    expected = diagnosis.reference.gradients(diagnosis.documents, weights)
    with randomized_adapters(run):
        loss = compute_step(diagnosis, run).loss
        errors = gradient_errors(run, expected)
    # One error for all tensors together: bf16 may lose small ones.
    sizes = {name: tensor.double().norm().item() for name, tensor in expected.items()}
    differences = [each.error * sizes[each.name] for each in errors]
    distance, error = math.hypot(*differences) / max(math.hypot(*sizes.values()), 1e-30), relative(loss, right)
    limit, gradient_limit = PRECISION_LIMITS[precision], PRECISION_GRADIENT_LIMITS[precision]
    values = {"loss": loss, "expected": right, "error": error, "gradient_error": distance, "limit": limit}
    text = f"in {precision} the loss is off by {error:.1e}, the gradient by {distance:.1%}"
    finding = Finding("pass", text, f"{limit:g}, gradient {gradient_limit:.0%}", values=values)
    if error <= limit and distance <= gradient_limit:
        return finding
    status: Status = "fail" if not (error <= 10 * limit and distance <= 1) else "warn"
    culprit, keys, change = str(precision), "training.precision", "--training.precision fp32"
    if run.model.choices["model.compile"].value != "none":
        culprit, keys = f"{culprit} or the compiled code", f"{keys}, model.compile"
        change += " and --model.compile none, one at a time"
    cause = f"in fp32 the same layout is exact (see loss), so it is {culprit}"
    return finding.with_cause(cause, keys, f"try {change}", status)


def check_fused_loss(diagnosis: Diagnosis) -> Finding:
    model = diagnosis.reference_run.model
    if not isinstance(model, NativeModel):
        raise SkipCheck("the Transformers fallback computes all logits")
    hidden_BTD, labels_BT = _hidden_states(diagnosis)
    config, weight = model.module.config, model.module.head.weight
    settings: dict[str, Any] = {"softcap": config.logit_softcap, "divisor": config.logit_divisor}
    losses: dict[str, tuple[LossSum, float]] = {
        "chunked": (partial(chunked_loss_sum, chunk_tokens=CHUNK_TOKENS, **settings), EXACT_LIMIT)
    }
    if diagnosis.run.model.choices["model.loss"].value == "liger":
        losses["liger"] = (partial(fused_loss_sum, **settings), LIGER_LIMIT)

    def plain(hidden: Tensor, _: Tensor, labels: Tensor) -> Tensor:
        logits_NV = model.module.compute_logits(hidden).flatten(0, 1).float()
        return F.cross_entropy(logits_NV, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")

    right, right_gradients = _with_gradients(plain, hidden_BTD, weight, labels_BT)
    values, texts, failed = dict[str, float](), list[str](), list[str]()
    for name, (function, limit) in losses.items():
        loss, gradients = _with_gradients(function, hidden_BTD, weight, labels_BT)
        error = relative(loss, right)
        distance = max(_distance(a, b) for a, b in zip(gradients, right_gradients, strict=True))
        values |= {f"{name}_error": error, f"{name}_gradient_error": distance}
        is_right = error <= limit and distance <= max(limit, EXACT_GRADIENT_LIMIT)
        texts.append(f"{name} and plain loss {agreement(is_right, error)}, gradients {agreement(is_right, distance)}")
        failed += [] if is_right else [name]
    limits = ", ".join(f"{name} {limit:g}" for name, (_, limit) in losses.items())
    finding = Finding("pass", "; ".join(texts), limits, values=values)
    if not failed:
        return finding
    is_ours = failed[0] == "chunked"
    return finding.with_cause(
        f"the {failed[0]} loss does not compute the cross-entropy of the logits",
        "loss/chunked.py" if is_ours else "loss/fused.py, the package liger-kernel",
        "use --model.loss full" if is_ours else "leave out model.liger loss",
    )


def _distance(gradient: Tensor, expected: Tensor) -> float:
    return ((gradient - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def _hidden_states(diagnosis: Diagnosis) -> tuple[Tensor, Tensor]:
    """The input of the head for a document with labels, and the labels; computed by `reference_run`."""
    document = next(each for each in diagnosis.documents if (each.shifted(1) >= 0).any())
    module, device = diagnosis.reference_run.model.module, diagnosis.device
    ids_BT = torch.from_numpy(document.ids.astype(np.int64))[None].to(device)
    positions_BT = torch.arange(ids_BT.shape[1], device=device)[None]
    with torch.no_grad():
        hidden_BTD = module(ids_BT, positions_BT, loss_fn=lambda hidden, _: hidden)
    return hidden_BTD, torch.from_numpy(document.shifted(1))[None].to(device)


def _with_gradients(
    function: LossSum, hidden_BTD: Tensor, weight: Tensor, labels_BT: Tensor
) -> tuple[float, list[Tensor]]:
    """The loss, and its gradients by the hidden states and, if it is trained, the head."""
    hidden_BTD = hidden_BTD.detach().requires_grad_()
    inputs = [hidden_BTD, *([weight] if weight.requires_grad else [])]
    loss = function(hidden_BTD, weight, labels_BT)
    return loss.item(), list(torch.autograd.grad(loss, inputs))


def check_attention_kernel(diagnosis: Diagnosis) -> Finding:
    run, precision = diagnosis.run, diagnosis.config.training.precision
    kernel = run.model.choices["model.attention"].value
    if kernel == "eager":
        raise SkipCheck("the run uses eager attention")
    if diagnosis.is_loss_explained:
        diagnosis.require("loss")
    losses, gradients = [], []
    with randomized_adapters(run):
        for context in (nullcontext(), eager_attention(run)):
            with context:
                losses.append(compute_step(diagnosis, run).loss)
                gradients.append(take_gradients(run))
    worst, error = largest_difference(run, *gradients), relative(losses[0], losses[1])
    limit, gradient_limit = KERNEL_LIMITS.get(precision, BF16_KERNEL_LIMITS)
    values = {"loss": losses[0], "eager_loss": losses[1], "error": error, "gradient_error": worst.error}
    is_right = error <= limit and worst.error <= gradient_limit
    text = f"losses with {kernel} and eager {agreement(is_right, error)}, gradients {agreement(is_right, worst.error)}"
    finding = Finding("pass", text, f"{limit:g}, gradients {gradient_limit:g}", values=values)
    if is_right:
        return finding
    # In bf16 large attention scores alone may be off by more than the limit.
    is_close = precision != "fp32" and max(error / limit, worst.error / gradient_limit) <= FAILS_AT
    return finding.with_cause(
        f"the attention kernel {kernel} computes something else than eager attention: {worst.name} is off most",
        "model.attention; models/attention.py",
        "use --model.attention eager or sdpa, and report the versions",
        status="warn" if is_close else "fail",
    )


@contextmanager
def eager_attention(run: Run) -> Iterator[None]:
    """The model computes attention by plain matrix products."""
    with ExitStack() as stack:
        if isinstance(run.model, FallbackModel):
            stack.enter_context(_eager_fallback(run.model.module.hf))
        else:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for block in blocks(run):
                stack.callback(setattr, block.attention, "spec", block.attention.spec)
                block.attention.spec = replace(block.attention.spec, backend="eager", kernel=None)
        yield


@contextmanager
def _eager_fallback(hf: Any) -> Iterator[None]:
    before = hf.config._attn_implementation
    try:
        hf.set_attn_implementation("eager")
    except (ValueError, AttributeError) as error:
        raise SkipCheck(f"{type(hf).__name__} cannot change its attention: {error}") from None
    try:
        yield
    finally:
        hf.set_attn_implementation(before)


def blocks(run: Run) -> list[Block]:
    """The layers of a native model that this process holds."""
    return [module for part in run.model.model_parts for module in part.modules() if isinstance(module, Block)]

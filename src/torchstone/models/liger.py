"""Liger's Triton kernels, where installed and useful.

| kernel | computes in one kernel | saves | not for |
|---|---|---|---|
| norm | RMSNorm | its fp32 copies | layer norms |
| rope | rotary of queries and keys | three of five passes over them | partial rotary; models without RoPE |
| mlp | activation(gate) * up | the activation, recomputed in the backward pass | ungated MLPs, other activations |
| loss | head and cross-entropy (loss/fused.py) | the logits and their copies | `auto`: model.loss chunked is faster |

torch.compile fuses all but the loss by itself, and Liger's kernels would break its graphs, so with model.compile only
the loss is used. All kernels need a CUDA device. A kernel computes the same as decoder.py up to bf16 rounding; kernels
that do not are not used.

Liger works in place where it can, which is not always right: a norm would overwrite a gradient that the residual
stream still needs, and rope would rotate queries that selective activation checkpointing keeps. Neither happens here.

Nothing global changes. A decoder gets its kernels as attributes of its modules. Liger's own patch of a Transformers
model also replaces classes in Transformers for all later models; that is undone, and the patch of the model itself is
kept only if every patched module computes what the original computes.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchstone.errors import UsageError
from torchstone.loss.fused import fused_loss_sum
from torchstone.models.decoder import MLP, Attention, Decoder, DecoderConfig, RMSNorm
from torchstone.models.execution import Loss
from torchstone.models.fallback.module import eval_mode
from torchstone.models.rope import CosSin

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KERNELS = ("norm", "rope", "mlp", "loss")
# The first version that supports Transformers 5 and sums the head's gradient in fp32.
MIN_VERSION = (0, 7)
# The kernel holds all features of a token in one block.
MAX_MLP_WIDTH = 65536
# The offset of the weight, and whether it multiplies before rounding ("gemma") or after ("llama").
NORMS = {"rms": (0.0, "llama"), "rms_fp32": (0.0, "gemma"), "rms_plus_one": (1.0, "gemma")}
# The names of these kernels in Liger's patch functions for Transformers models.
PATCHES = {"norm": ("rms_norm",), "mlp": ("swiglu", "geglu")}
# The tolerated difference of a patched module: norm of the difference / norm of the original output.
PATCH_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
PROBE_TOKENS = 16


@dataclass(frozen=True)
class LigerChoice:
    """The kernels to use, and the reason; an empty reason if none were requested."""

    kernels: tuple[str, ...] = ()
    reason: str = ""

    @property
    def notes(self) -> list[str]:
        return [f"liger: {', '.join(self.kernels) or 'none'} ({self.reason})"] if self.reason else []


def choose_liger(
    requested: Sequence[str],
    config: DecoderConfig,
    compile: str,
    device: torch.device,
    tp: int = 1,
    loss: Loss = "auto",
) -> LigerChoice:
    """Returns the kernels for a decoder on a device, and the reason; raises if one requested by name cannot run."""
    if not requested:
        return LigerChoice()
    unavailable = _unavailable(device)
    unsupported_reasons = {kernel: unavailable or _unsupported_reason(kernel, config, compile) for kernel in KERNELS}
    if tp > 1:
        # These kernels read a parameter, which is then a DTensor.
        sharded = "with parallel.tp its weights are DTensors, which the kernel does not support"
        unsupported_reasons |= {kernel: unsupported_reasons[kernel] or sharded for kernel in ("norm", "loss")}
    if loss != "auto":
        unsupported_reasons["loss"] = unsupported_reasons["loss"] or f"model.loss is {loss}"
    _check_requested(requested, unsupported_reasons)
    if "loss" not in requested and unsupported_reasons["loss"] is None:
        unsupported_reasons["loss"] = "model.loss chunked is faster"
    return _choose(requested, unsupported_reasons)


def apply_liger(decoder: Decoder, kernels: Sequence[str]) -> None:
    """Sets the kernels of this decoder, in place; other decoders do not change."""
    config = decoder.config
    for module in decoder.modules():
        if "norm" in kernels and isinstance(module, RMSNorm):
            module.kernel = _norm_kernel(module)
        elif "rope" in kernels and isinstance(module, Attention):
            module.rotary_kernel = _rotary
        elif "mlp" in kernels and isinstance(module, MLP):
            module.kernel = _gated_kernel(config.activation)
    if "loss" in kernels:
        decoder.fused_loss = partial(fused_loss_sum, softcap=config.logit_softcap, divisor=config.logit_divisor)


def apply_liger_to_fallback(hf: PreTrainedModel, requested: Sequence[str]) -> LigerChoice:
    """Applies Liger's patch to this one Transformers model, if the patched modules compute the same results."""
    if not requested:
        return LigerChoice()
    unavailable = _unavailable(hf.device)
    unsupported_reasons: dict[str, str | None] = {
        "norm": unavailable,
        "rope": unavailable or "Liger can replace it only for all Transformers models at once",
        "mlp": unavailable,
        "loss": unavailable or "the Transformers fallback computes all logits",
    }
    for kernel in PATCHES:
        if unsupported_reasons[kernel] is None and ("auto" in requested or kernel in requested):
            unsupported_reasons[kernel] = _patch(hf, kernel)
    _check_requested(requested, unsupported_reasons)
    return _choose(requested, unsupported_reasons)


def _check_requested(requested: Sequence[str], unsupported_reasons: dict[str, str | None]) -> None:
    for kernel in KERNELS:
        if kernel in requested and unsupported_reasons[kernel] is not None:
            usable = [name for name, reason in unsupported_reasons.items() if reason is None]
            hint = f"available here: auto, {', '.join(usable)}" if usable else "leave out model.liger"
            raise UsageError(f"model.liger {kernel}: {unsupported_reasons[kernel]}", hint)


def _choose(requested: Sequence[str], unsupported_reasons: dict[str, str | None]) -> LigerChoice:
    if "auto" not in requested:
        return LigerChoice(tuple(kernel for kernel in KERNELS if kernel in requested), "as requested")
    kernels = tuple(kernel for kernel in KERNELS if unsupported_reasons[kernel] is None)
    by_reason: dict[str, list[str]] = {}
    for kernel in KERNELS:
        reason = unsupported_reasons[kernel]
        if reason is not None:
            by_reason.setdefault(reason, []).append(kernel)
    if not kernels and len(by_reason) == 1:
        return LigerChoice((), next(iter(by_reason)))
    reasons = [f"not {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    return LigerChoice(kernels, "; ".join(reasons) or "all kernels")


def _unavailable(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"its kernels run on CUDA devices, not on {device.type}"
    for module, package in (("liger_kernel", "liger-kernel"), ("triton", "triton")):
        if find_spec(module) is None:
            return f"the package {package} is not installed"
    # A nightly build has a different package name, and is recent enough.
    with suppress(PackageNotFoundError):
        installed = version("liger-kernel")
        if tuple(int(part) for part in installed.split(".")[:2]) < MIN_VERSION:
            return f"liger-kernel {installed} is too old: {'.'.join(map(str, MIN_VERSION))} or later is needed"
    return None


def _unsupported_reason(kernel: str, config: DecoderConfig, compile: str) -> str | None:
    """Why a kernel cannot compute its part of this model; None if it can."""
    if kernel == "loss":
        return None
    if kernel == "norm":
        reason = None if config.norm in NORMS else "the model has layer norms"
    elif kernel == "mlp":
        reason = _mlp_obstacle(config)
    else:
        reason = _rope_obstacle(config)
    if reason is None and compile != "none":
        return "model.compile fuses it by itself, and the kernel would break its graph"
    return reason


def _mlp_obstacle(config: DecoderConfig) -> str | None:
    if not config.is_gated:
        return "the model's MLP is not gated"
    if config.activation not in ("silu", "gelu_tanh"):
        return f"the kernel has silu and gelu_tanh; the model's MLP uses {config.activation}"
    if config.mlp_width > MAX_MLP_WIDTH:
        return f"the kernel supports an mlp_width of at most {MAX_MLP_WIDTH}, not {config.mlp_width}"
    return None


def _rope_obstacle(config: DecoderConfig) -> str | None:
    dims = {layer.rope.rotary_dim(config.head_dim) for layer in config.layers if layer.rope is not None}
    if not dims:
        return "the model has no RoPE"
    return None if dims == {config.head_dim} else "only part of each head rotates"


def _norm_kernel(module: RMSNorm) -> Callable[[Tensor, Tensor], Tensor]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    offset, casting = NORMS[module.kind]
    eps, in_place = module.eps, False
    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, eps, offset, casting, in_place)


def _gated_kernel(activation: str) -> Callable[[Tensor, Tensor], Tensor]:
    if activation == "silu":
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        return LigerSiLUMulFunction.apply
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return LigerGELUMulFunction.apply


def _rotary(q_BHTE: Tensor, k_BKTE: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
    """Computes in the dtype of cos and sin; returns the dtype of the queries. Packed documents keep their positions."""
    from liger_kernel.ops.rope import LigerRopeFunction

    cos_BTE, sin_BTE = cos_sin[0].squeeze(1), cos_sin[1].squeeze(1)
    return LigerRopeFunction.apply(_copy_token_major(q_BHTE), _copy_token_major(k_BKTE), cos_BTE, sin_BTE)


def _copy_token_major(x_BHTE: Tensor) -> Tensor:
    """A copy with the memory layout [B, T, H, E], for the kernel to work on in place."""
    return x_BHTE.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _patch(hf: PreTrainedModel, kernel: str) -> str | None:
    """Patches the model with one kernel, or leaves it as it was and returns the reason."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    model_type = hf.config.model_type
    patch = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    if patch is None:
        return f"Liger has no patch for model_type {model_type}"
    switches = [name for name, value in inspect.signature(patch).parameters.items() if isinstance(value.default, bool)]
    settings = {name: name in PATCHES[kernel] for name in switches}
    if not any(settings.values()):
        return f"Liger has no such kernel for {model_type}"
    before = {module: dict(vars(module)) for module in hf.modules()}
    try:
        with _isolate_modeling_code():
            patch(model=hf, **settings)
    except Exception as error:
        _restore(before)
        return f"Liger's patch for {model_type} does not fit this model: {type(error).__name__}: {error}"
    patched = [module for module, old in before.items() if vars(module).get("forward") is not old.get("forward")]
    if not patched:
        _restore(before)
        return f"Liger has no such kernel for {model_type}"
    for module in patched:
        if hasattr(module, "in_place"):
            module.in_place = False
    return _compare_patched(hf, {module: before[module] for module in patched})


@torch.no_grad()
def _compare_patched(hf: PreTrainedModel, originals: dict[nn.Module, dict[str, Any]]) -> str | None:
    """Compares every patched module with its original on the inputs of a forward pass over a few random tokens.

    Liger chooses patches by model_type, whatever activation the config has, and its experts multiply fp32 in TF32. The
    model stays patched if all modules agree; otherwise it is restored and the reason returned.
    """
    patched = {module: dict(vars(module)) for module in originals}
    names = {module: name for name, module in hf.named_modules()}
    calls: dict[nn.Module, tuple[Any, Any, Any]] = {}

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls[module] = (_clone(args), _clone(kwargs), _clone(output))

    _restore(originals)
    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in originals]
    try:
        vocab_size = hf.get_input_embeddings().weight.shape[0]
        ids = torch.randint(vocab_size, (1, PROBE_TOKENS), generator=torch.Generator().manual_seed(0))
        with eval_mode(hf):
            hf(input_ids=ids.to(hf.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    _restore(patched)
    for module, (args, kwargs, expected) in calls.items():
        try:
            output = module.forward(*args, **kwargs)
        except Exception as error:
            _restore(originals)
            return f"Liger's {names[module]} fails: {type(error).__name__}: {error}"
        if not isinstance(expected, Tensor):
            output, expected = output[0], expected[0]
        distance = ((output.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)).item()
        if not distance <= PATCH_TOLERANCE.get(expected.dtype, 0.0):
            _restore(originals)
            return f"Liger's {names[module]} differs from the original by {distance:.1e}"
    return None


def _clone(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _clone(item) for key, item in value.items()}
    return tuple(_clone(item) for item in value) if isinstance(value, tuple) else value


def _restore(attributes: dict[nn.Module, dict[str, Any]]) -> None:
    for module, values in attributes.items():
        vars(module).clear()
        vars(module).update(values)


@contextmanager
def _isolate_modeling_code() -> Iterator[None]:
    """Undoes all changes to Transformers' modeling files on exit, so that other models are not affected."""
    files = [module for name, module in sys.modules.items() if name.startswith("transformers.models.")]
    before = [(file, dict(vars(file))) for file in files]
    try:
        yield
    finally:
        for file, names in before:
            for name, value in names.items():
                if vars(file).get(name) is not value:
                    setattr(file, name, value)

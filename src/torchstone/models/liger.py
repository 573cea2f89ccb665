"""Liger's Triton kernels, where installed and useful: parts of a model that run as one kernel instead of several.

| kernel | what runs as one | what it saves | where not |
|---|---|---|---|
| norm | an RMS norm | its fp32 copies; keeps its input and one number a token | layer norms |
| rope | turning queries and keys | three of five passes over them | heads that turn in part; no rotary positions |
| mlp | act(gate) * up | the activation, computed again from gate in the backward pass | not gated; other activations |
| loss | head and cross-entropy (loss/fused.py) | the logits and their copies | a vocabulary no larger than the width |

All but the loss are what torch.compile does by itself, and would break its graphs: with model.compile only the loss is
left. None of it runs without a CUDA device. What a kernel computes is what decoder.py computes, roundings in bf16 but
for the last digit included; nothing is taken that is not.

Liger works in place where it can, which is not always right: a norm would overwrite a gradient that the residual stream
still needs, and rope would turn queries that selective recomputation keeps and turns again. Both work on copies here.

Nothing global is changed. A decoder gets its kernels by attributes of its parts. Liger's own patch of a Transformers
model also exchanges classes in Transformers for all models to come; that is undone, and what it did to the model itself
is kept only where each exchanged part gives what the original gives.
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
from torchstone.models.decoder import MLP, Attention, Decoder, DecoderConfig, RMSNorm, Tables
from torchstone.models.execution import Compile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KERNELS = ("norm", "rope", "mlp", "loss")
# The first that knows Transformers 5 and sums the head's gradient in fp32.
OLDEST = (0, 7)
# A kernel holds a whole row in one block.
WIDEST = 65536
# What is added to the weight, and whether it is multiplied before rounding ("gemma") or after ("llama").
NORMS = {"rms": (0.0, "llama"), "rms_wide": (0.0, "gemma"), "rms_plus_one": (1.0, "gemma")}
# Names of the same kernels in Liger's patches of Transformers models.
PATCHES = {"norm": ("rms_norm",), "mlp": ("swiglu", "geglu")}
# How far an exchanged part may be from the original, by norm of the difference over norm.
SAME = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
PROBE_TOKENS = 16


@dataclass(frozen=True)
class LigerChoice:
    """Kernels to use; why those, empty where nobody asked."""

    kernels: tuple[str, ...] = ()
    reason: str = ""

    @property
    def notes(self) -> list[str]:
        return [f"liger: {', '.join(self.kernels) or 'none'} ({self.reason})"] if self.reason else []


def choose_liger(
    wanted: Sequence[str], config: DecoderConfig, compile: Compile, device: torch.device, tp: int = 1
) -> LigerChoice:
    """The kernels for a decoder on a device, and why; one that was asked for by name and cannot be is refused."""
    if not wanted:
        return LigerChoice()
    here = _why_not_here(device)
    why_not = {kernel: here or _why_not(kernel, config, compile) for kernel in KERNELS}
    if tp > 1:
        # They read a parameter that is then no plain tensor.
        shared = "with parallel.tp its weights are shared out over ranks, which the kernel knows nothing of"
        why_not |= {kernel: why_not[kernel] or shared for kernel in ("norm", "loss")}
    _refuse_named(wanted, why_not)
    if "loss" not in wanted and why_not["loss"] is None and config.vocab_size <= config.width:
        why_not["loss"] = "the vocabulary is no larger than the width"
    return _chosen(wanted, why_not)


def apply_liger(decoder: Decoder, kernels: Sequence[str]) -> None:
    """In place, and for this decoder alone."""
    config = decoder.config
    for part in decoder.modules():
        if "norm" in kernels and isinstance(part, RMSNorm):
            part.kernel = _norm(part)
        elif "rope" in kernels and isinstance(part, Attention):
            part.turn_kernel = _turn
        elif "mlp" in kernels and isinstance(part, MLP):
            part.kernel = _gated(config.activation)
    if "loss" in kernels:
        decoder.fused_loss = partial(fused_loss_sum, softcap=config.logit_softcap, divisor=config.logit_divisor)


def apply_liger_to_fallback(hf: PreTrainedModel, wanted: Sequence[str]) -> LigerChoice:
    """Liger's patch of this one Transformers model, as far as it is a patch of one model and computes the same."""
    if not wanted:
        return LigerChoice()
    here = _why_not_here(hf.device)
    why_not: dict[str, str | None] = {
        "norm": here,
        "rope": here or "Liger exchanges it for all models of Transformers, not for one",
        "mlp": here,
        "loss": here or "a model that runs in Transformers gives its logits",
    }
    for kernel in PATCHES:
        if why_not[kernel] is None and ("auto" in wanted or kernel in wanted):
            why_not[kernel] = _patched(hf, kernel)
    _refuse_named(wanted, why_not)
    return _chosen(wanted, why_not)


def _refuse_named(wanted: Sequence[str], why_not: dict[str, str | None]) -> None:
    for kernel in KERNELS:
        if kernel in wanted and why_not[kernel] is not None:
            able = [name for name, reason in why_not.items() if reason is None]
            hint = f"what works here: auto, {', '.join(able)}" if able else "leave model.liger out"
            raise UsageError(f"model.liger {kernel}: {why_not[kernel]}", hint)


def _chosen(wanted: Sequence[str], why_not: dict[str, str | None]) -> LigerChoice:
    if "auto" not in wanted:
        return LigerChoice(tuple(kernel for kernel in KERNELS if kernel in wanted), "as asked for")
    kernels = tuple(kernel for kernel in KERNELS if why_not[kernel] is None)
    left_out: dict[str, list[str]] = {}
    for kernel in KERNELS:
        reason = why_not[kernel]
        if reason is not None:
            left_out.setdefault(reason, []).append(kernel)
    if not kernels and len(left_out) == 1:
        return LigerChoice((), next(iter(left_out)))
    said = [f"not {', '.join(names)}: {reason}" for reason, names in left_out.items()]
    return LigerChoice(kernels, "; ".join(said) or "all that there are")


def _why_not_here(device: torch.device) -> str | None:
    for module, package in (("liger_kernel", "liger-kernel"), ("triton", "triton")):
        if find_spec(module) is None:
            return f"the package {package} is not installed"
    # A nightly build goes by another name, and is newer than any that is too old.
    with suppress(PackageNotFoundError):
        found = version("liger-kernel")
        if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
            return f"liger-kernel {found} is too old: {'.'.join(map(str, OLDEST))} or later is needed"
    return None if device.type == "cuda" else f"its kernels run on CUDA devices, not on {device.type}"


def _why_not(kernel: str, config: DecoderConfig, compile: Compile) -> str | None:
    """What keeps a kernel from computing its part of this model."""
    if kernel == "loss":
        return None
    if kernel == "norm":
        reason = None if config.norm in NORMS else "this model's norms are layer norms"
    elif kernel == "mlp":
        reason = _why_not_mlp(config)
    else:
        reason = _why_not_rope(config)
    if reason is None and compile != "none":
        return "model.compile fuses it by itself, and a kernel would break its graph"
    return reason


def _why_not_mlp(config: DecoderConfig) -> str | None:
    if not config.gated:
        return "this model's MLP is not gated"
    if config.activation not in ("silu", "gelu_tanh"):
        return f"it knows silu and gelu_tanh, and this model's MLP has {config.activation}"
    return None if config.mlp_width <= WIDEST else f"its rows are at most {WIDEST} wide, not {config.mlp_width}"


def _why_not_rope(config: DecoderConfig) -> str | None:
    turning = {layer.rope.turning(config.head_size) for layer in config.layers if layer.rope is not None}
    if not turning:
        return "this model has no rotary positions"
    return None if turning == {config.head_size} else "only a part of each head turns"


def _norm(part: RMSNorm) -> Callable[[Tensor, Tensor], Tensor]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    offset, casting = NORMS[part.kind]
    eps, in_place = part.eps, False
    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, eps, offset, casting, in_place)


def _gated(activation: str) -> Callable[[Tensor, Tensor], Tensor]:
    if activation == "silu":
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        return LigerSiLUMulFunction.apply
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return LigerGELUMulFunction.apply


def _turn(q_BHTE: Tensor, k_BKTE: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """Each token by its own row of the tables, so documents that share a row keep their own positions; computed in the
    tables' numbers, and given back in the queries'."""
    from liger_kernel.ops.rope import LigerRopeFunction

    cos_BTE, sin_BTE = (table.squeeze(1) for table in tables)
    return LigerRopeFunction.apply(_token_by_token(q_BHTE), _token_by_token(k_BKTE), cos_BTE, sin_BTE)


def _token_by_token(x_BHTE: Tensor) -> Tensor:
    """A copy that lies in memory as [B, T, H, E]: the kernel then works on it, and not on what others may keep."""
    return x_BHTE.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _patched(hf: PreTrainedModel, kernel: str) -> str | None:
    """Patches the model with one kernel; or leaves it as it was, and says why."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    model_type = hf.config.model_type
    patch = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    if patch is None:
        return f"Liger does not know the model type {model_type}"
    switches = [name for name, value in inspect.signature(patch).parameters.items() if isinstance(value.default, bool)]
    settings = {name: name in PATCHES[kernel] for name in switches}
    if not any(settings.values()):
        return f"Liger has no such kernel for {model_type}"
    before = {part: dict(vars(part)) for part in hf.modules()}
    try:
        with _modelling_code_kept():
            patch(model=hf, **settings)
    except Exception as error:
        _put_back(before)
        return f"Liger's patch for {model_type} does not fit this model: {type(error).__name__}: {error}"
    exchanged = [part for part, old in before.items() if vars(part).get("forward") is not old.get("forward")]
    if not exchanged:
        _put_back(before)
        return f"Liger has no such kernel for {model_type}"
    for part in exchanged:
        if hasattr(part, "in_place"):
            part.in_place = False
    return _why_not_the_same(hf, {part: before[part] for part in exchanged})


@torch.no_grad()
def _why_not_the_same(hf: PreTrainedModel, originals: dict[nn.Module, dict[str, Any]]) -> str | None:
    """Runs the original on a few made-up tokens, and each exchanged part on what its original was given there.

    Liger's patches go by the name of the model, whatever its config says of activations, and its experts multiply fp32
    numbers rounded to TF32. The model is left patched
    where all parts are the same, else as it was.
    """
    exchanged = {part: dict(vars(part)) for part in originals}
    names = {part: name for name, part in hf.named_modules()}
    seen: dict[nn.Module, tuple[Any, Any, Any]] = {}

    def see(part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen[part] = (_copied(args), _copied(kwargs), _copied(output))

    modes = {part: part.training for part in hf.modules()}
    _put_back(originals)
    hooks = [part.register_forward_hook(see, with_kwargs=True) for part in originals]
    try:
        hf.eval()
        rows = hf.get_input_embeddings().weight.shape[0]
        ids = torch.randint(rows, (1, PROBE_TOKENS), generator=torch.Generator().manual_seed(0))
        hf(input_ids=ids.to(hf.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
        for part, training in modes.items():
            part.training = training
    _put_back(exchanged)
    for part, (args, kwargs, wanted) in seen.items():
        try:
            got = part.forward(*args, **kwargs)
        except Exception as error:
            _put_back(originals)
            return f"Liger's part for {names[part]} fails: {type(error).__name__}: {error}"
        if not isinstance(wanted, Tensor):
            got, wanted = got[0], wanted[0]
        apart = ((got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)).item()
        if not apart <= SAME.get(wanted.dtype, 0.0):
            _put_back(originals)
            return f"Liger's part for {names[part]} gives something else than the original ({apart:.1e} apart)"
    return None


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return tuple(_copied(item) for item in value) if isinstance(value, tuple) else value


def _put_back(attributes: dict[nn.Module, dict[str, Any]]) -> None:
    for part, values in attributes.items():
        vars(part).clear()
        vars(part).update(values)


@contextmanager
def _modelling_code_kept() -> Iterator[None]:
    """Whatever is exchanged in Transformers' modelling files meanwhile is put back: other models are not concerned."""
    files = [module for name, module in sys.modules.items() if name.startswith("transformers.models.")]
    before = [(file, dict(vars(file))) for file in files]
    try:
        yield
    finally:
        for file, names in before:
            for name, value in names.items():
                if vars(file).get(name) is not value:
                    setattr(file, name, value)

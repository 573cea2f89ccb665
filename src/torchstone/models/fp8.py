"""FP8 training (`training.precision fp8` and `fp8-pure`), by torchao: the linears of the blocks multiply in FP8.

Inputs, weights and gradients of such a linear are cast to FP8, each scaled by its largest absolute value: one scale for
a tensor (recipe `tensorwise`), or one for each of its rows (`rowwise`: more exact, slower). Products are summed in fp32
and returned in bf16. Embedding, head, norms, attention and the loss compute in bf16, and parameters, gradients, moments
and checkpoints are those of bf16. In evaluation mode the linears compute in bf16 too.

Casts are separate kernels unless they are compiled: without model.compile FP8 is slower than bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchstone.errors import UsageError
from torchstone.models.decoder import Decoder

Fp8Recipe = Literal["tensorwise", "rowwise"]
# FP8 kernels need sizes that are a multiple of this; the data loader pads rows to it.
SIZE_MULTIPLE = 16
MIN_CAPABILITY = (8, 9)
# The first version for torch 2.11.
MIN_VERSION = (0, 17)
INSTEAD = "use --training.precision bf16 or bf16-pure"


@dataclass(frozen=True)
class Fp8Options:
    recipe: Fp8Recipe = "tensorwise"
    # Multiplies the same FP8 values in fp32, on any device: for tests.
    emulate: bool = False

    @property
    def compile_options(self) -> dict[str, bool] | None:
        """Options of torch.compile. Without them, compiled RMSNorms and `rowwise` lead to NaN (pytorch#150859)."""
        return {"emulate_precision_casts": True} if self.recipe == "rowwise" else None


def check_fp8(options: Fp8Options, device: torch.device) -> None:
    """Raises UsageError if this device, or the installed torchao, cannot train in FP8."""
    if not options.emulate:
        needed = f"FP8 needs a GPU of compute capability {_dotted(MIN_CAPABILITY)} or higher (Ada, Hopper, Blackwell)"
        if device.type != "cuda":
            raise UsageError(f"{needed}, but the device is {device}", "leave out training.precision")
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            raise UsageError(f"{needed}, but {torch.cuda.get_device_name(device)} has {_dotted(capability)}", INSTEAD)
    try:
        installed = version("torchao")
    except PackageNotFoundError:
        raise UsageError(
            "FP8 needs the package torchao, which is not installed",
            f"pip install 'torchstone[torchao]', or {INSTEAD}",
        ) from None
    if tuple(int(part) for part in installed.split(".")[:2]) < MIN_VERSION:
        raise UsageError(
            f"torchao {installed} is too old for FP8: {_dotted(MIN_VERSION)} or later is needed",
            f"pip install -U 'torchstone[torchao]', or {INSTEAD}",
        )
    try:
        import torchao.float8  # noqa: F401
    except Exception as error:
        # Built for another torch, it raises all kinds of errors.
        raise UsageError(
            f"torchao {installed} does not work with torch {torch.__version__}: {type(error).__name__}: {error}",
            f"pip install -U 'torchstone[torchao]', or {INSTEAD}",
        ) from None


def apply_fp8(decoder: Decoder, options: Fp8Options, device: torch.device) -> str:
    """Makes the blocks' linears compute in FP8 on `device`; returns a note. Parameters and their names stay the same.

    It replaces modules: call it before anything refers to them, such as FSDP2.
    """
    check_fp8(options, device)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(options.recipe), emulate=options.emulate)
    convert_to_float8_training(decoder.layers, module_filter_fn=lambda module, _: _is_supported(module), config=config)
    for block in decoder.layers.values():
        for _, linear in _linears(block):
            if _is_supported(linear):
                # A class, not a method of each instance: torch.compile reuses a graph for blocks of the same classes.
                linear.__class__ = _linear_class()
    return _note(decoder, options)


@cache
def _linear_class() -> type[nn.Linear]:
    from torchao.float8.float8_linear import Float8Linear

    class TrainingFloat8Linear(Float8Linear):
        """In evaluation mode it computes as nn.Linear does."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.training else F.linear(x, self.weight, self.bias)

    return TrainingFloat8Linear


def _linears(block: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    return ((name, module) for name, module in block.named_modules() if isinstance(module, nn.Linear))


def _is_supported(linear: nn.Linear) -> bool:
    return linear.in_features % SIZE_MULTIPLE == 0 and linear.out_features % SIZE_MULTIPLE == 0


def _note(decoder: Decoder, options: Fp8Options) -> str:
    """All blocks have linears of the same sizes, so one of them stands for the whole model."""
    linears = list(_linears(next(iter(decoder.layers.values()))))
    left_out = [(name, linear) for name, linear in linears if not _is_supported(linear)]
    depth = decoder.config.depth
    used, total = depth * (len(linears) - len(left_out)), depth * len(linears)
    note = f"fp8: {options.recipe}, {used} of the blocks' {total} linears; the head stays in bf16"
    if left_out:
        sizes = ", ".join(f"{name} ({linear.in_features} to {linear.out_features})" for name, linear in left_out)
        note += f"; left out, because FP8 needs multiples of {SIZE_MULTIPLE}: {sizes}"
    return note


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))

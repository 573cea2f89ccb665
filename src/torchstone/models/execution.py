"""How a decoder runs: what it keeps for the backward pass, and what is compiled. Neither changes its numbers' meaning.

Activation checkpointing, per block:
- full keeps a block's input alone and computes the block again: about a third more work, least memory;
- selective keeps the results of attention and of every second matrix product, which are what is dear to compute again,
  and recomputes the rest: norms, rotations, activations, the other products.

Compiling, always without a graph break (torch refuses one):
- block compiles one block and uses it for all of its kind: seconds to compile, whatever the depth;
- whole compiles from embedding to logits: the compiler sees more, and takes longer with every layer.

A compiled graph is kept for the first shape it meets; the second makes one that takes any. So a run meets at most a few
compilations for each kind of layer, with and without gradients, and not one a shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torchstone.errors import UsageError
from torchstone.models.decoder import Decoder, Fusion

Recompute = Literal["none", "selective", "full"]
Compile = Literal["none", "block", "whole"]
Implementation = Literal["auto", "native", "fallback"]
# Kinds of layers x (first shape, any shape) x (training, validation), with room to spare.
GRAPHS_PER_BLOCK = 32


@dataclass(frozen=True)
class Execution:
    """How a model is to be run; nothing here changes what it computes."""

    implementation: Implementation = "auto"
    attention: str = "auto"
    # Whether rows hold several documents: some kernels are better at that than others.
    packed: bool = False
    fused: tuple[Fusion, ...] = ()
    recompute: Recompute = "none"
    compile: Compile = "none"
    liger: tuple[str, ...] = ()
    trust_remote_code: bool = False
    # Ranks that share every matrix, and stages of layers.
    tp: int = 1
    pp: int = 1


AS_IT_COMES = Execution()


def check_fallback_execution(execution: Execution) -> None:
    """Refuses what models that run in Transformers cannot do."""
    asked = {
        "recompute selective": execution.recompute == "selective",
        "compile": execution.compile != "none",
        "fused": bool(execution.fused),
    }
    names = [f"model.{key}" for key, given in asked.items() if given]
    if execution.tp > 1 or execution.pp > 1:
        raise UsageError(
            "parallel.tp and parallel.pp are for the native decoder, and this model runs in Transformers",
            "leave them out: parallel.dp_shard and dp_replicate work for both",
        )
    if names:
        verb = "are" if len(names) > 1 else "is"
        raise UsageError(
            f"{', '.join(names)} {verb} for the native decoder, and this model runs in Transformers",
            "leave it out; model.recompute full works in both",
        )


def recompute_activations(decoder: Decoder, how: Recompute) -> None:
    for block in decoder.layers.values():
        if how == "none":
            block.recompute = None
        elif how == "full":
            block.recompute = partial(checkpoint, use_reentrant=False)
        else:
            block.recompute = partial(checkpoint, use_reentrant=False, context_fn=_selective)


def check_compiler(device: torch.device) -> None:
    """On a CPU, torch.compile needs a C++ compiler."""
    if device.type != "cpu":
        return
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        raise UsageError(
            "model.compile needs a C++ compiler on a CPU (g++ or clang++), and there is none",
            "install one, or leave out model.compile",
        ) from None


def compile_model(decoder: Decoder, how: Compile, backend: Any = "inductor") -> None:
    """In place: names of parameters stay as they are."""
    if how == "none":
        return
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS_PER_BLOCK)
    # Floats are a model's constants, never inputs.
    torch._dynamo.config.specialize_float = True
    if how == "whole":
        decoder.run = torch.compile(decoder.run, fullgraph=True, backend=backend)  # type: ignore[method-assign]
        decoder.features = torch.compile(decoder.features, fullgraph=True, backend=backend)  # type: ignore[method-assign]
        return
    for block in decoder.layers.values():
        # The forward alone: what FSDP2 does before and after it is no part of a graph.
        block.forward = torch.compile(block.forward, fullgraph=True, backend=backend)


def _selective() -> Any:
    """A policy for one pass over a block; forward and recomputation each count their own products."""
    counts = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in PRODUCTS:
            counts[context.is_recompute] += 1
            keep = counts[context.is_recompute] % 2 == 1
        else:
            keep = operation in ATTENTION
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _operations(*names: str) -> set[Any]:
    """Those of the named operations that this build of torch has."""
    found: set[Any] = set()
    for name in names:
        space, _, operation = name.partition("::")
        packet = getattr(getattr(torch.ops, space), operation, None)
        if packet is not None:
            found.update(getattr(packet, overload) for overload in packet.overloads())
    return found


PRODUCTS = _operations("aten::mm", "aten::addmm", "aten::bmm")
ATTENTION = _operations(
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "torch_attn::_varlen_attn",
    "flash_attn::_flash_attn_varlen_forward",
) | {torch.ops.higher_order.flex_attention}

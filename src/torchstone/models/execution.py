"""How a decoder runs: activation checkpointing and torch.compile. Neither changes what it computes.

Activation checkpointing (`model.recompute`), per block:
- full saves a block's input and recomputes the block: about a third more work, least memory;
- elementwise recomputes norms and gated activations: a quarter less memory, and almost no time if it is compiled;
- selective saves the outputs of attention and of every second matmul, which are expensive to recompute, and recomputes
  the rest: norms, rotary, activations, the other matmuls.

Compilation (`model.compile`), always with fullgraph=True, so that a graph break is an error:
- block compiles one block and reuses it for all blocks of its kind, and the last norm: seconds at any depth;
- whole compiles from the embedding to the last norm, and the head: takes longer with every layer.

A graph is for rows of any length, from the first step on, unless all rows have one length; so a run compiles one graph
for each kind of layer and one for the last norm, with and without gradients, and none after its first step or
validation. What else could differ between batches does not: the number of rows has at most two values (data/collate.py
pads to them), and kernels get the run's bound on the length of a document.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torchstone.errors import UsageError
from torchstone.loss.chunked import CPU_CHUNK_TOKENS, choose_chunk_tokens, chunked_loss_sum
from torchstone.models.attention import KVCache, choose_backend, mark_dynamic, specialize_floats
from torchstone.models.choice import AS_REQUESTED, Choice
from torchstone.models.decoder import Block, Decoder, DecoderConfig, Fusion, LayerInputs
from torchstone.models.fp8 import Fp8Options
from torchstone.triton_support import triton_error

Recompute = Literal["auto", "none", "elementwise", "selective", "full"]
Compile = Literal["auto", "none", "block", "whole"]
Loss = Literal["auto", "full", "chunked"]
Implementation = Literal["auto", "native", "fallback"]
# Kinds of layers x numbers of rows x (training, validation), and some to spare.
GRAPHS_PER_BLOCK = 32
# A run with fewer FLOPs takes two or three seconds on a current GPU. Compiling takes longer, but its result is cached,
# and many judge the speed by a short run.
MIN_FLOPS_TO_COMPILE = 5e14
LONGER = "the first steps take longer"


@dataclass(frozen=True)
class ExecutionOptions:
    """How a model is run. Nothing here but `fp8` changes what it computes; `optimizer` is only checked."""

    implementation: Implementation = "auto"
    attention: str = "auto"
    # Whether rows hold several documents: some attention kernels are better at that than others.
    packed: bool = False
    # Whether all rows have one length: compiling for it alone is faster than compiling for any.
    has_fixed_length: bool = False
    fused: tuple[Fusion, ...] = ()
    recompute: Recompute = "none"
    recompute_reason: str = AS_REQUESTED
    compile: Compile = "none"
    loss: Loss = "auto"
    liger: tuple[str, ...] = ()
    # The memory of the smallest GPU of the run, which decides the chunks of the loss. None: the model's device has it.
    gpu_memory: int | None = None
    # The FLOPs of one device in the whole run, which decide whether to compile. None: unlimited.
    run_flops: float | None = None
    trust_remote_code: bool = False
    tp: int = 1
    pp: int = 1
    optimizer: str = "adamw"
    # Training in FP8.
    fp8: Fp8Options | None = None
    # A plan for another machine: what is installed here does not matter.
    is_elsewhere: bool = False


DEFAULT_EXECUTION = ExecutionOptions()


def choose_compile(execution: ExecutionOptions, device: torch.device) -> Choice:
    if execution.compile != "auto":
        return Choice(execution.compile, AS_REQUESTED, "" if execution.compile == "none" else LONGER)
    if device.type != "cuda":
        return Choice("none", "on a CPU")
    if execution.tp > 1:
        return Choice("none", "torch.compile computes wrong gradients with parallel.tp")
    if kernels := {"norm", "rope", "mlp"}.intersection(execution.liger):
        return Choice("none", f"model.liger {min(kernels)} would break its graphs")
    if not execution.is_elsewhere and (error := triton_error()):
        return Choice("none", error)
    if execution.run_flops is not None and execution.run_flops < MIN_FLOPS_TO_COMPILE:
        return Choice("none", f"the run is too short: {execution.run_flops / 1e15:.2g} PFLOP per device")
    return Choice("block", LONGER)


def choose_recompute(execution: ExecutionOptions, compile: str) -> Choice:
    """`compile`: what `choose_compile` has chosen."""
    if execution.recompute != "auto":
        return Choice(execution.recompute, execution.recompute_reason)
    if compile == "none":
        return Choice("none", "nothing is compiled")
    return Choice("elementwise", "almost free in compiled blocks")


def choose_fused(execution: ExecutionOptions) -> Choice:
    if execution.fused:
        return Choice(",".join(execution.fused), AS_REQUESTED)
    return Choice("none", "no gain")


def choose_attention(
    config: DecoderConfig, execution: ExecutionOptions, device: torch.device, dtype: torch.dtype
) -> Choice:
    return choose_backend(
        execution.attention,
        execution.packed,
        config.min_window,
        config.attention_softcap,
        config.head_dim,
        device,
        dtype,
    )


def get_gpu_memory(device: torch.device) -> int | None:
    """The bytes of a GPU; None on a CPU. Not the free ones: a resumed run must compute the same chunks."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def choose_loss(
    config: DecoderConfig, execution: ExecutionOptions, device: torch.device, dtype: torch.dtype
) -> tuple[Choice, int | None]:
    """Also returns the tokens of a chunk; None: all logits at once.

    Ranks that share a vocabulary must compute the same chunks, so they need the same `execution.gpu_memory`.
    """
    gpu_memory = execution.gpu_memory or get_gpu_memory(device)
    reason = AS_REQUESTED if execution.loss != "auto" else f"on {'a CPU' if device.type == 'cpu' else 'a GPU'}"
    if execution.loss == "full" or (execution.loss == "auto" and device.type != "cuda"):
        return Choice("full", reason), None
    chunk_tokens = CPU_CHUNK_TOKENS
    if gpu_memory is not None:
        chunk_tokens = choose_chunk_tokens(-(-config.vocab_size // execution.tp), dtype.itemsize, gpu_memory)
    return Choice("chunked", reason, f"{chunk_tokens} tokens at a time"), chunk_tokens


def apply_chunked_loss(decoder: Decoder, chunk_tokens: int) -> None:
    decoder.fused_loss = partial(
        chunked_loss_sum,
        chunk_tokens=chunk_tokens,
        softcap=decoder.config.logit_softcap,
        divisor=decoder.config.logit_divisor,
    )


def check_fallback_execution(execution: ExecutionOptions) -> None:
    """Raises UsageError for options that the Transformers fallback does not support."""
    if execution.tp > 1 or execution.pp > 1:
        raise UsageError(
            "parallel.tp and parallel.pp need the native decoder, but this model runs in the Transformers fallback",
            "leave them out; parallel.dp_shard and parallel.dp_replicate work",
        )
    if execution.optimizer == "muon":
        raise UsageError(
            "optim.name muon needs the native decoder, but this model runs in the Transformers fallback: its fused "
            "projections and experts cannot be told from single matrices",
            "use --optim.name adamw",
        )
    if execution.fp8 is not None:
        raise UsageError(
            "training.precision fp8 needs the native decoder, but this model runs in the Transformers fallback",
            "use --training.precision bf16 or bf16-pure",
        )
    options = {
        f"model.recompute {execution.recompute}": execution.recompute in ("elementwise", "selective"),
        "model.compile": execution.compile in ("block", "whole"),
        "model.fused": bool(execution.fused),
        # What a model does between its head and its logits (scales, soft caps, biases) is not known outside of it.
        "model.loss chunked": execution.loss == "chunked",
    }
    unsupported = ", ".join(name for name, is_set in options.items() if is_set)
    if unsupported:
        raise UsageError(
            f"{unsupported}: only for the native decoder, but this model runs in the Transformers fallback",
            "leave it out" + ("; model.recompute full works" if "model.recompute" in unsupported else ""),
        )


def apply_activation_checkpointing(decoder: Decoder, mode: str) -> None:
    """Wraps every block in place; call it before `compile_decoder`."""
    if mode == "none":
        return
    if mode == "elementwise":
        for block in decoder.layers.values():
            _recompute_elementwise(block)
        return
    context: dict[str, Any] = {"context_fn": _selective_context} if mode == "selective" else {}
    for block in decoder.layers.values():
        block.forward = _wrap_with_checkpoint(block.forward, partial(checkpoint, use_reentrant=False, **context))


def _recompute_elementwise(block: Block) -> None:
    for name in ("attention_norm", "mlp_norm", "attention_norm_after", "mlp_norm_after"):
        norm = getattr(block, name, None)
        if norm is not None:
            norm.forward = _recompute(norm.forward)
    if block.mlp.kernel is not None:
        block.mlp.kernel = _recompute(block.mlp.kernel)
    elif block.mlp.is_gated:
        block.mlp.gate_activation = _recompute(block.mlp.gate_activation)  # type: ignore[method-assign]


def _recompute(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Tensor) -> Tensor:
        return checkpoint(function, *args, use_reentrant=False)

    # Not a partial: Dynamo would compile one graph for each of them, and so for each block.
    return run


def _wrap_with_checkpoint(forward: Callable[..., Tensor], run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(forward)
    def checkpointed(x_BTD: Tensor, inputs: LayerInputs, kv_cache: KVCache | None = None) -> Tensor:
        if torch.is_grad_enabled() and kv_cache is None:
            return run(forward, x_BTD, inputs)
        return forward(x_BTD, inputs, kv_cache)

    return checkpointed


def check_compiler(device: torch.device) -> None:
    """Raises UsageError if torch.compile lacks the C++ compiler that it needs on a CPU."""
    if device.type != "cpu":
        return
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        raise UsageError(
            "model.compile needs a C++ compiler on a CPU, and there is none", "install g++ or leave out model.compile"
        ) from None


def compile_decoder(
    decoder: Decoder,
    mode: str,
    backend: Any = "inductor",
    has_fixed_length: bool = False,
    options: dict[str, bool] | None = None,
) -> None:
    """Compiles in place: parameter names stay as they are. `options` are those of the backend."""
    if mode == "none":
        return
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS_PER_BLOCK)
    specialize_floats()

    def compile_(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        compiled = torch.compile(function, fullgraph=True, backend=backend, options=options)
        return compiled if has_fixed_length else _mark_lengths(compiled)

    if mode == "whole":
        decoder.compute_hidden_states = compile_(decoder.compute_hidden_states)  # type: ignore[method-assign]
        decoder.compute_logits = compile_(decoder.compute_logits)  # type: ignore[method-assign]
        return
    for block in decoder.layers.values():
        # Only forward: FSDP2's hooks before and after it are not part of the graph.
        block.forward = compile_(block.forward)
    if decoder.has_head:
        # Without it, the norm's operations on all tokens in fp32 take 1 % of a step.
        decoder.norm.forward = compile_(decoder.norm.forward)


def _mark_lengths(compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Outside of compiled code, because every block gets a new tensor from the one before it."""

    @wraps(compiled)
    def run(*args: Any) -> Tensor:
        for arg in args:
            _mark_length(arg)
        return compiled(*args)

    return run


def _mark_length(value: Any) -> None:
    if isinstance(value, LayerInputs):
        for cos_or_sin_B1TE in value.cos_sin or ():
            mark_dynamic(cos_or_sin_B1TE, 2)
        if value.mask.attn_mask is not None:
            mark_dynamic(value.mask.attn_mask, 2, 3)
    elif isinstance(value, list):
        for each in value:
            _mark_length(each)
    elif isinstance(value, Tensor):
        # ids, positions or hidden states.
        mark_dynamic(value, 1)


def _selective_context() -> Any:
    """A policy for one pass over a block. Forward and recomputation count their matmuls separately."""
    counts, matmuls, attention = {False: 0, True: 0}, _ops(*MATMULS), _attention_ops()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in matmuls:
            counts[context.is_recompute] += 1
            save = counts[context.is_recompute] % 2 == 1
        else:
            save = op in attention or op in FP8_SCALES
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@cache
def _ops(*names: str) -> set[Any]:
    """All overloads of the named ops, as far as they are registered: a kernel's package registers its own."""
    ops: set[Any] = set()
    for name in names:
        namespace, _, op = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), op, None)
        if packet is not None:
            ops.update(getattr(packet, overload) for overload in packet.overloads())
    return ops


MATMULS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_scaled_mm",
    "torchstone::osft_linear",
)
# The largest absolute value of a tensor: one number, for which all of them are read.
FP8_SCALES = {torch.ops.aten.max.default}
ATTENTION_OPS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "torch_attn::_varlen_attn",
    "flash_attn::_flash_attn_varlen_forward",
    "torchstone::flash_attention_4",
)


def _attention_ops() -> set[Any]:
    return _ops(*ATTENTION_OPS) | {torch.ops.higher_order.flex_attention}

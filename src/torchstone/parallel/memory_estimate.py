"""The memory model: what an optimizer step needs on one rank, by component, from sizes alone.

The hint of an out-of-memory error and `torchstone plan` use it; there is no other. It follows a step in time, because
not everything exists at once, and takes the largest of three moments:

- loss: activations of all layers, a chunk of logits (or all), the head's gradient in fp32;
- backward, at the last block: activations of all layers, the gradient of the head, one block being computed. Gradients
  of a first micro-batch do not exist yet, or, at the first block: all gradients, activations of one layer;
- update: all gradients and what the optimizer needs besides.

Weights, gradients and moments come from the caller and are exact. Activations are counted from what the code of a block
saves for its backward pass (`kept_per_token`). The one rule of thumb is what a block needs while its backward pass is
computed (`_block_workspace`); docs/plan.md compares all of it with measured peaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchstone.models.decoder import DecoderConfig

Moment = Literal["loss", "backward", "update"]


@dataclass(frozen=True)
class StepSizes:
    """What decides the memory of a step on one rank."""

    config: DecoderConfig
    # Layers, and bytes of weights, gradients and moments, of this rank.
    layers: int
    state_bytes: int
    # More bytes of gradients if a step has several micro-batches, and whether it has.
    accumulation_bytes: int
    accumulates: bool
    # A micro-batch has `rows` rows of `row_tokens` tokens. If documents share rows, a row is one context length.
    row_tokens: int
    rows: int
    itemsize: int
    recompute: str
    is_compiled: bool
    # None: all logits.
    chunk_tokens: int | None
    # How much of `state_bytes` are gradients and moments. A backward pass makes the gradients, unless there are some.
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    # Bytes the optimizer needs beside its moments during the update.
    update_bytes: int = 0
    # Gathered parameters of FSDP2, and buffers of tensor parallelism and of pipelines.
    communication_bytes: int = 0
    # Bytes FSDP2 needs to reduce the gradients of a block: the gradients and, in fp32, what is reduced.
    reduced_bytes: int = 0
    # The part of `gradient_bytes` that belongs to one block.
    block_gradient_bytes: int = 0
    attention: str = "flash"
    # Whether attention gets a mask [T, T] (sdpa and eager).
    has_mask: bool = False
    has_head: bool = True
    trains_head: bool = True
    # One operator computes the MLP with its adapters, and keeps no activation (tuning/fused_lora.py).
    has_fused_lora: bool = False
    tp: int = 1
    sequence: bool = True
    # Micro-batches whose activations a pipeline stage keeps.
    in_flight: float = 1

    @property
    def tokens(self) -> int:
        return self.rows * self.row_tokens


COMPONENTS = ("parameters", "gradients", "optimizer", "activations", "logits", "workspace", "communication")


@dataclass(frozen=True)
class StepMemory:
    """Bytes at the moment of the peak."""

    moment: Moment
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    workspace: int
    communication: int

    @property
    def components(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in COMPONENTS}

    @property
    def total(self) -> int:
        return sum(self.components.values())


def estimate_step_bytes(sizes: StepSizes) -> int:
    return estimate_step(sizes).total


def estimate_step(sizes: StepSizes) -> StepMemory:
    """The memory at the peak."""
    config, tokens = sizes.config, sizes.tokens
    parameters = sizes.state_bytes - sizes.gradient_bytes - sizes.optimizer_bytes
    gradients = sizes.gradient_bytes + (sizes.accumulation_bytes if sizes.accumulates else 0)
    existing = gradients if sizes.accumulates or sizes.in_flight > 1 else 0
    hidden = int(tokens * sizes.itemsize * config.width)
    kept = tokens * kept_per_token(sizes, sizes.recompute)
    # Besides the blocks, the input of the last norm, and its output, which the head reads.
    activations = int(sizes.layers * sizes.in_flight * kept) + (hidden if sizes.has_head else 0)
    workspace = tokens * _block_workspace(sizes)
    if sizes.recompute in ("full", "selective"):
        workspace += tokens * (kept_per_token(sizes, "none") - kept_per_token(sizes, sizes.recompute))
    loss, head_gradient = _loss_bytes(sizes) if sizes.has_head else (0, 0)
    # If it is not known how much are gradients, they all exist from the start.
    head_gradient = head_gradient if sizes.gradient_bytes else 0

    def at(moment: Moment, *others: float, communication: int = 0) -> StepMemory:
        grads, kept, logits, workspace = map(int, others)
        optimizer = sizes.optimizer_bytes + (sizes.update_bytes if moment == "update" else 0)
        return StepMemory(moment, parameters, grads, optimizer, kept, logits, workspace, communication)

    # A block's gradients are reduced while the next block is computed, when its activations are gone.
    share = sizes.itemsize / (sizes.itemsize + 4)
    reduced = int(max(share * sizes.reduced_bytes, sizes.reduced_bytes - kept))
    buffers, hidden_gradient = sizes.communication_bytes + reduced, hidden if sizes.has_head else 0
    earlier = gradients - (0 if existing else sizes.block_gradient_bytes)
    moments = [
        at("backward", existing + head_gradient, activations, hidden_gradient, workspace, communication=buffers),
        at("backward", earlier, kept, 0, workspace, communication=buffers),
        at("update", gradients, 0, 0, 0),
    ]
    if sizes.has_head:
        moments.insert(0, at("loss", existing, activations + hidden, loss, 0, communication=sizes.communication_bytes))
    return max(moments, key=lambda memory: memory.total)


def kept_per_token(sizes: StepSizes, recompute: str) -> float:
    """Bytes that one block keeps of one token for its backward pass."""
    config, itemsize = sizes.config, sizes.itemsize
    residual, queries, keys, mlp = _widths(sizes)
    projections = 2 * queries + 2 * keys
    if recompute == "full":
        return itemsize * residual
    if recompute == "selective":
        # The input, attention's output, and every second matmul: q, v, and gate and down, or up.
        return itemsize * (residual + 2 * queries + keys + mlp + (config.width if config.is_gated else 0))
    extra = _attention_extra(sizes)
    # What several norms and linears read or write: norms of queries and keys, norms after attention and MLP.
    norms = [residual] * 2 * (config.has_pre_norm + config.has_post_norm)
    norms += [queries, keys] if config.qk_norm != "none" else []
    linear_inputs = 2 * config.width
    activation = 0 if sizes.has_fused_lora else mlp
    if not sizes.is_compiled and recompute == "none":
        # The operations of a norm, and of a gated activation, keep what each of them reads.
        extra += (_norm_itemsize(sizes) - itemsize) * sum(norms)
        extra += itemsize * mlp if config.is_gated and not sizes.has_fused_lora else 0
        extra += itemsize * 3 * mlp if config.activation == "gelu_new" else 0
    elif sizes.is_compiled and recompute == "elementwise":
        linear_inputs = 0 if config.has_pre_norm else linear_inputs
        activation = 0 if config.is_gated else activation
    gate_and_up = (2 if config.is_gated else 1) * mlp
    return extra + itemsize * (sum(norms) + linear_inputs + projections + gate_and_up + activation)


def _widths(sizes: StepSizes) -> tuple[float, float, float, float]:
    """This rank's widths: of the residual stream, the queries, the keys (or values) and the MLP."""
    config, tp = sizes.config, sizes.tp
    queries, keys, _ = config.qkv_features
    residual = config.width / (tp if sizes.sequence else 1)
    return residual, queries / tp, keys / tp if config.kv_heads % tp == 0 else keys, config.mlp_width / tp


def _norm_itemsize(sizes: StepSizes) -> int:
    """Bytes per element that an uncompiled norm keeps, without its output: its input in fp32, and before scaling."""
    return {"layer": sizes.itemsize, "rms": 4 + sizes.itemsize}.get(sizes.config.norm, 8)


def _attention_extra(sizes: StepSizes) -> float:
    """Scores and masks of one token, of kernels that have them."""
    heads = sizes.config.heads / sizes.tp
    if sizes.attention == "eager":
        wide = 4 if sizes.itemsize == 4 else 4 + sizes.itemsize
        return sizes.row_tokens * (heads * wide + 1)
    # The kernel keeps the mask as floats.
    return sizes.row_tokens * sizes.itemsize if sizes.has_mask and sizes.attention == "sdpa" else 0


def _block_workspace(sizes: StepSizes) -> float:
    """Bytes per token of what the backward pass of a block allocates, beyond what it frees meanwhile.

    Compiled: the gradients of the activation, gate and up (two share a tensor in fused LoRA), and four tensors of the
    model's width: gradients of the residual stream, a norm's output, its input, and that output computed again.
    Uncompiled: two tensors of the width of the MLP (one if it has no gate) and the gradient of the residual stream.
    """
    mlp, width, scores = sizes.config.mlp_width / sizes.tp, sizes.config.width, 0.0
    if sizes.attention == "eager":
        scores = 8 * sizes.row_tokens * sizes.config.heads / sizes.tp
    if not sizes.is_compiled:
        return scores + sizes.itemsize * ((2 if sizes.config.is_gated else 1) * mlp + width)
    return scores + sizes.itemsize * ((2 if sizes.has_fused_lora else 3) * mlp + 4 * width)


def _loss_bytes(sizes: StepSizes) -> tuple[int, int]:
    """What the loss needs, and the head's gradient, which outlives it."""
    vocabulary, width, itemsize = -(-sizes.config.vocab_size // sizes.tp), sizes.config.width, sizes.itemsize
    weights = vocabulary * width if sizes.trains_head else 0
    if sizes.chunk_tokens is None:
        # The logarithms of the probabilities and two gradients in fp32; softcapped logits are kept, too.
        softcap = 0 if sizes.config.logit_softcap is None else itemsize
        return sizes.tokens * vocabulary * (12 + softcap), itemsize * weights
    chunk = vocabulary * min(sizes.chunk_tokens, sizes.tokens) * itemsize
    # A chunk of logits, the head's gradient in fp32, which is then cast, and the gradient of the hidden states.
    return max(chunk, itemsize * weights) + 4 * weights + itemsize * sizes.tokens * width, itemsize * weights

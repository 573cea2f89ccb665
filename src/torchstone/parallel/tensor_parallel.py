"""Tensor parallelism: a table of how every matrix of the decoder is sharded over the mesh dimension `tp`.

The arithmetic and the communication are torch's (DTensor and its parallel styles). This module adds the table of styles
(`tp_plan`), and these points:

- Heads are not split. A rank has heads / tp query heads and the key/value heads they read. Where tp does not divide the
  key/value heads, every rank computes all of them and selects its own; their gradients are then partial sums.
- Each rank's shard of a fused matrix is its shards of q, k and v (or of gate and up), stacked. Files do not have that
  order (local_shards.py).
- With `parallel.sequence` the residual stream is sharded along the sequence (sequence parallelism): norms work on a
  part of each row, and their weights' gradients are partial sums too. Row lengths must be a multiple of tp.

Partial sums are DTensors with placement `Partial`; FSDP2 all-reduces them over tp before it reduces over data ranks.

Embedding and head are sharded by vocabulary, which tp need not divide: the last rank has fewer embeddings, and token
ids stay global. Logits are never gathered: the loss is vocabulary-parallel (loss/cross_entropy.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from torchstone.errors import UsageError
from torchstone.models.decoder import Attention, Decoder, DecoderConfig
from torchstone.optim.clip import to_local
from torchstone.tuning.lora import LoraLinear
from torchstone.tuning.osft import OsftLinear

HEADS_DIM, FEATURES_DIM, SEQUENCE_DIM = 1, -1, 1


class ReplicatedParams(ParallelStyle):
    """Parameters replicated on every rank (or placed as `params`); input and output have `placement`."""

    def __init__(self, placement: Placement, use_local_output: bool = True, params: Placement | None = None) -> None:
        super().__init__()
        self.placement, self.use_local_output, self.params = placement, use_local_output, params or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            self._distribute_params,
            partial(_prepare_input, self.placement),
            partial(_prepare_output, self.placement, self.use_local_output),
        )

    def _distribute_params(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for param_name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(param_name, nn.Parameter(distribute_tensor(parameter, mesh, [self.params])))


def apply_tensor_parallel(decoder: Decoder, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Shards the decoder's parameters over the tp mesh, in place."""
    residual = Shard(SEQUENCE_DIM) if sequence_parallel else Replicate()
    # torch's styles would shard all parameters of a linear in the same way.
    linears = [module for module in decoder.modules() if isinstance(module, LoraLinear | OsftLinear)]
    adapters = [linear.adapters for linear in linears]
    for linear in linears:
        del linear.adapters
    parallelize_module(decoder, mesh, tp_plan(decoder, mesh.size(), residual))
    for linear, factors in zip(linears, adapters, strict=True):
        linear.adapters = factors
        _shard_adapters(linear, mesh)
    decoder.tie_weights()
    for block in decoder.layers.values():
        _shard_heads(block.attention, decoder.config, mesh)
    if decoder.has_embedding:
        _use_global_padding_idx(decoder, mesh, sequence_parallel)


def tp_plan(decoder: Decoder, tp: int, residual: Placement) -> dict[str, ParallelStyle]:
    """The parallel style of every module; `residual` is the placement of the residual stream."""
    config = decoder.config
    rowwise = RowwiseParallel(output_layouts=residual)
    colwise = ColwiseParallel()
    has_full_qk_norm = config.qk_norm == "all"
    colwise_qk = ColwiseParallel(use_local_output=not has_full_qk_norm)
    # All key/value heads on every rank; select_kv_heads takes this rank's.
    replicated_kv = ReplicatedParams(Replicate(), use_local_output=False)
    is_kv_sharded = shards_kv_heads(config, tp)
    per_head_norm = ReplicatedParams(Shard(HEADS_DIM))
    full_norm = ReplicatedParams(Shard(FEATURES_DIM), params=Shard(0))
    block_plan: dict[str, ParallelStyle] = {
        "attention_norm": ReplicatedParams(residual, use_local_output=False),
        "mlp_norm": ReplicatedParams(residual, use_local_output=False),
        "attention_norm_after": ReplicatedParams(residual),
        "mlp_norm_after": ReplicatedParams(residual),
        # x, then the LayerInputs and the cache, which are not tensors.
        "attention": PrepareModuleInput(
            input_layouts=(residual, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attention.wq": colwise_qk,
        "attention.wk": colwise_qk if is_kv_sharded else replicated_kv,
        "attention.wv": colwise if is_kv_sharded else replicated_kv,
        "attention.wqkv": colwise,
        "attention.q_norm": full_norm if has_full_qk_norm else per_head_norm,
        "attention.k_norm": (full_norm if has_full_qk_norm else per_head_norm) if is_kv_sharded else replicated_kv,
        "attention.wo": rowwise,
        "mlp": PrepareModuleInput(input_layouts=residual, desired_input_layouts=Replicate()),
        "mlp.gate": colwise,
        "mlp.up": colwise,
        "mlp.gate_up": colwise,
        "mlp.down": rowwise,
    }
    plan: dict[str, ParallelStyle] = {
        "tok_embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=residual),
        "pos_embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=residual),
        "norm": ReplicatedParams(residual, use_local_output=False),
        "head": ColwiseParallel(input_layouts=residual, use_local_output=False),
    }
    plan |= {f"layers.{n}.{name}": style for n in decoder.layers for name, style in block_plan.items()}
    modules = dict(decoder.named_modules())
    return {name: style for name, style in plan.items() if name in modules}


def tp_shard_dims(decoder: Decoder, tp: int) -> dict[str, int | None]:
    """The dimension in which `apply_tensor_parallel` shards each parameter; None if it is replicated."""
    plan, dims = tp_plan(decoder, tp, Replicate()), dict[str, int | None]()
    for name, module in decoder.named_modules():
        for kind, _ in module.named_parameters(recurse=False):
            dims[f"{name}.{kind}"] = _shard_dim(plan.get(name), isinstance(module, nn.Embedding), kind)
    for name, module in decoder.named_modules():
        for adapter, factors in module.adapters.items() if isinstance(module, LoraLinear | OsftLinear) else ():
            for kind, _ in factors.named_parameters():
                dim, weight_dim = factors.sharded_dims[kind]
                is_sharded = dims.get(f"{name}.weight") == weight_dim
                dims[f"{name}.adapters.{adapter}.{kind}"] = dim if is_sharded else None
    return dims


def _shard_dim(style: ParallelStyle | None, is_embedding: bool, kind: str) -> int | None:
    if isinstance(style, ColwiseParallel):
        return 0
    if isinstance(style, RowwiseParallel):
        return 0 if is_embedding else 1 if kind == "weight" else None
    return style.params.dim if isinstance(style, ReplicatedParams) and isinstance(style.params, Shard) else None


def _shard_adapters(linear: LoraLinear | OsftLinear, mesh: DeviceMesh) -> None:
    """The factor that has the sharded dimension of the weight is sharded like it. The other is replicated, and its
    gradient is a partial sum."""
    assert isinstance(linear.weight, DTensor)
    for factors in linear.adapters.values():
        for kind, parameter in list(factors.named_parameters()):
            dim, weight_dim = factors.sharded_dims[kind]
            placement = Shard(dim) if linear.weight.placements[0].is_shard(weight_dim) else Replicate()
            factors.register_parameter(kind, nn.Parameter(distribute_tensor(parameter, mesh, [placement])))


def shards_kv_heads(config: DecoderConfig, tp: int) -> bool:
    """Whether key/value heads are sharded over the ranks; otherwise every rank has all of them."""
    return config.kv_heads % tp == 0


def kv_head_indices(config: DecoderConfig, tp: int, tp_rank: int) -> list[int]:
    """The key/value head that each query head of a rank reads."""
    heads = config.heads // tp
    return [head // (config.heads // config.kv_heads) for head in range(tp_rank * heads, (tp_rank + 1) * heads)]


def check_tp(config: DecoderConfig, tp: int) -> None:
    """Raises UsageError if tp does not divide the query heads and the MLP."""
    for name, size in (("attention heads", config.heads), ("MLP features", config.mlp_width)):
        if size % tp:
            choices = [n for n in range(1, size + 1) if config.heads % n == 0 and config.mlp_width % n == 0]
            raise UsageError(
                f"parallel.tp {tp} does not divide the model's {size} {name}",
                f"use --parallel.tp {' or '.join(map(str, choices))}",
            )


def _shard_heads(attention: Attention, config: DecoderConfig, mesh: DeviceMesh) -> None:
    tp = mesh.size()
    if shards_kv_heads(config, tp):
        attention.qkv_features = [features // tp for features in attention.qkv_features]
        return
    indices = kv_head_indices(config, tp, mesh.get_local_rank())
    # One head if all queries of this rank read the same, otherwise one per query head.
    attention.select_kv_heads = partial(_select_heads, torch.tensor(indices if len(set(indices)) > 1 else indices[:1]))


def _select_heads(indices: Tensor, heads_BKTE: Tensor) -> Tensor:
    """Selects from heads that every rank has. Their gradient on this rank is a partial sum."""
    if isinstance(heads_BKTE, DTensor):
        heads_BKTE = heads_BKTE.to_local(grad_placements=[Partial()])
    return heads_BKTE.index_select(1, indices.to(heads_BKTE.device))


def _use_global_padding_idx(decoder: Decoder, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Keeps the padding embedding without gradient: torch would use padding_idx as an index into the local shard."""
    embed = decoder.tok_embed
    embed.global_padding_idx, embed.padding_idx = embed.padding_idx, None

    def detach_padding(module: nn.Module, inputs: tuple[Tensor, ...], output_BTD: Tensor) -> Tensor:
        if module.global_padding_idx is None:
            return output_BTD
        ids_BT = to_local(inputs[0])
        if sequence_parallel:
            ids_BT = ids_BT.chunk(mesh.size(), dim=SEQUENCE_DIM)[mesh.get_local_rank()]
        return torch.where((ids_BT == module.global_padding_idx)[..., None], output_BTD.detach(), output_BTD)

    embed.register_forward_hook(detach_padding)


def _prepare_input(placement: Placement, _: Any, inputs: tuple[Tensor], mesh: DeviceMesh) -> DTensor:
    """The input as a DTensor with `placement`; a plain tensor has it already."""
    (x,) = inputs
    if not isinstance(x, DTensor):
        return DTensor.from_local(x, mesh, [placement], run_check=False)
    return x if x.placements == (placement,) else x.redistribute(placements=[placement])


def _prepare_output(placement: Placement, use_local_output: bool, _: Any, output: DTensor, mesh: DeviceMesh) -> Tensor:
    if output.placements != (placement,):
        output = output.redistribute(placements=[placement])
    return output.to_local() if use_local_output else output

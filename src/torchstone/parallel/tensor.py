"""Tensor parallelism: every matrix of the decoder shared out over the ranks of axis `tp`, as a table.

The arithmetic and the communication are torch's (DTensor and its parallel styles); what is ours is the table of which
module is laid out how, and these three points:

- Heads stay whole. A rank has heads / tp query heads, and the key/value heads they read. Where there are fewer
  key/value heads than ranks (or they do not divide) every rank keeps all of them, computes them all and picks its own;
  their gradients are then a part on each rank, and summed.
- Matrices that run fused lie in the order of the ranks, each rank's queries, keys and values together, so that a shard
  of the whole is a shard of each. Files never see that order (slices.py).
- With `sequence` the residual stream between the matrices is shared out along the sequence: norms work on a part of
  each row, and their weights' gradients are parts to be summed as well. Rows must be a multiple of tp long.

Embedding and head are shared out by the vocabulary, which need not divide: the last rank has fewer rows, and indices
stay global. Logits are never gathered: the loss is computed where they lie (loss/cross_entropy.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from torchstone.errors import UsageError
from torchstone.models.decoder import Attention, Decoder, DecoderConfig

HEADS_DIM, FEATURES_DIM, SEQUENCE_DIM = 1, -1, 1


class Whole(ParallelStyle):
    """Parameters whole on every rank; input and output are laid out as `layout`."""

    def __init__(self, layout: Placement, local: bool = True, parameters: Placement | None = None) -> None:
        super().__init__()
        self.layout, self.local, self.parameters = layout, local, parameters or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            self._distribute,
            partial(_laid_out, self.layout, self.layout),
            partial(_given, self.layout, self.local),
        )

    def _distribute(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for own, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(own, nn.Parameter(distribute_tensor(parameter, mesh, [self.parameters])))


class Sees(ParallelStyle):
    """A module without parameters of its own whose first input comes as `given` and is needed as `wanted`."""

    def __init__(self, given: Placement, wanted: Placement) -> None:
        super().__init__()
        self.given, self.wanted = given, wanted

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(
            lambda _, inputs: _laid_out(self.given, self.wanted, None, inputs, device_mesh)
        )
        return module


def share_matrices(decoder: Decoder, mesh: DeviceMesh, sequence: bool) -> None:
    """Lays the decoder's parameters out over the mesh of axis tp, and has it compute so."""
    stream = Shard(SEQUENCE_DIM) if sequence else Replicate()
    parallelize_module(decoder, mesh, table(decoder, mesh.size(), stream))
    decoder.tie()
    for block in decoder.layers.values():
        _share_heads(block.attention, decoder.config, mesh)
    if decoder.is_first:
        _keep_padding_row(decoder, mesh, sequence)


def table(decoder: Decoder, tp: int, stream: Placement) -> dict[str, ParallelStyle]:
    """Which module is laid out how; names that a decoder does not have are left out."""
    config = decoder.config
    down = RowwiseParallel(output_layouts=stream)
    columns = ColwiseParallel()
    normed_all = config.qk_norm == "all"
    heads = ColwiseParallel(use_local_output=not normed_all)
    # All of them on every rank, as whole tensors of which each rank will pick its part.
    all_heads = Whole(Replicate(), local=False)
    shared = shares_key_values(config, tp)
    by_head, by_feature = Whole(Shard(HEADS_DIM)), Whole(Shard(FEATURES_DIM), parameters=Shard(0))
    block: dict[str, ParallelStyle] = {
        "attention_norm": Whole(stream, local=False),
        "mlp_norm": Whole(stream, local=False),
        "attention_norm_after": Whole(stream),
        "mlp_norm_after": Whole(stream),
        "attention": Sees(stream, Replicate()),
        "attention.wq": heads,
        "attention.wk": heads if shared else all_heads,
        "attention.wv": columns if shared else all_heads,
        "attention.wqkv": columns,
        "attention.q_norm": by_feature if normed_all else by_head,
        "attention.k_norm": (by_feature if normed_all else by_head) if shared else all_heads,
        "attention.wo": down,
        "mlp": Sees(stream, Replicate()),
        "mlp.gate": columns,
        "mlp.up": columns,
        "mlp.gate_up": columns,
        "mlp.down": down,
    }
    whole: dict[str, ParallelStyle] = {
        "tok_embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "pos_embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "norm": Whole(stream, local=False),
        "head": ColwiseParallel(input_layouts=stream, use_local_output=False),
    }
    whole |= {f"layers.{n}.{name}": style for n in decoder.layers for name, style in block.items()}
    modules = dict(decoder.named_modules())
    return {name: style for name, style in whole.items() if name in modules}


def shares_key_values(config: DecoderConfig, tp: int) -> bool:
    """Whether key/value heads are shared out over the ranks, or whole on each."""
    return config.kv_heads % tp == 0


def heads_read(config: DecoderConfig, tp: int, rank: int) -> list[int]:
    """The key/value head that each query head of a rank reads."""
    mine = config.heads // tp
    return [head // (config.heads // config.kv_heads) for head in range(rank * mine, (rank + 1) * mine)]


def check_tensor(config: DecoderConfig, tp: int) -> None:
    """Refuses sizes that cannot be shared out, with those that can."""
    for what, size in (("attention heads", config.heads), ("MLP features", config.mlp_width)):
        if size % tp:
            fitting = [n for n in range(1, size + 1) if config.heads % n == 0 and config.mlp_width % n == 0]
            raise UsageError(
                f"parallel.tp {tp} does not divide the model's {size} {what}",
                f"parallel.tp could be {', '.join(map(str, fitting))}",
            )


def _share_heads(attention: Attention, config: DecoderConfig, mesh: DeviceMesh) -> None:
    tp = mesh.size()
    if shares_key_values(config, tp):
        attention.rows = [rows // tp for rows in attention.rows]
        return
    read = heads_read(config, tp, mesh.get_local_rank())
    # One for all queries of this rank where that is so, and one for each otherwise.
    wanted = torch.tensor(read if len(set(read)) > 1 else read[:1])
    attention.pick = partial(_picked, wanted)


def _picked(wanted: Tensor, heads_BKTE: Tensor) -> Tensor:
    """Some of the heads that every rank has; what flows back is this rank's part of their gradient."""
    if isinstance(heads_BKTE, DTensor):
        heads_BKTE = heads_BKTE.to_local(grad_placements=[Partial()])
    return heads_BKTE.index_select(1, wanted.to(heads_BKTE.device))


def _keep_padding_row(decoder: Decoder, mesh: DeviceMesh, sequence: bool) -> None:
    """The row of padding gets no gradient from its lookups. Torch would take its number for each rank's own rows."""
    embed = decoder.tok_embed
    embed.frozen_row, embed.padding_idx = embed.padding_idx, None

    def looked_up(module: nn.Module, inputs: tuple[Tensor, ...], output_BTD: Tensor) -> Tensor:
        if module.frozen_row is None:
            return output_BTD
        ids_BT = _local(inputs[0])
        if sequence:
            ids_BT = ids_BT.chunk(mesh.size(), dim=SEQUENCE_DIM)[mesh.get_local_rank()]
        return torch.where((ids_BT == module.frozen_row)[..., None], output_BTD.detach(), output_BTD)

    embed.register_forward_hook(looked_up)


def _laid_out(given: Placement, wanted: Placement, _: Any, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
    """The inputs of a module, the first as a DTensor that lies as wanted; a plain tensor lies as given."""
    first, *rest = inputs
    if not isinstance(first, DTensor):
        first = DTensor.from_local(first, mesh, [given], run_check=False)
    if first.placements != (wanted,):
        first = first.redistribute(placements=[wanted])
    return (first, *rest)


def _given(layout: Placement, local: bool, _: Any, output: DTensor, mesh: DeviceMesh) -> Tensor:
    if output.placements != (layout,):
        output = output.redistribute(placements=[layout])
    return output.to_local() if local else output


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

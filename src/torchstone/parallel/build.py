"""A model shared out over the ranks of a layout: stages, then matrices, then FSDP2, and only then memory.

Everything is laid out without memory first; each rank then makes room for its own part, and fills it with its slices of
the files. So no rank ever holds, or reads, more than it keeps. Models that run in Transformers are the exception: every
rank loads them whole and then shards them, by their own layers.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

from torchstone.config.schema import ParallelConfig, stages_per_rank
from torchstone.models.attention import Backend
from torchstone.models.decoder import Decoder, DecoderConfig, Fusion
from torchstone.models.execution import Execution, check_fallback_execution
from torchstone.models.fallback import Fallback
from torchstone.models.model import Model
from torchstone.models.opening import Builder
from torchstone.parallel.mesh import Layout, Place
from torchstone.parallel.pipeline import Pipeline, Stage, split_layers, stages_of
from torchstone.parallel.running import Runner, micro_loss
from torchstone.parallel.shard import COMPUTED_IN, KEPT_IN, Precision, policy, shard_module
from torchstone.parallel.tensor import check_tensor, share_matrices, shares_key_values


class SharedBuilder(Builder):
    """Builds what belongs on this rank. `roots` are then FSDP2's root modules, `stages` those of the pipeline."""

    def __init__(self, place: Place, parallel: ParallelConfig, precision: Precision, device: torch.device) -> None:
        super().__init__(device, KEPT_IN[precision])
        self.place, self.parallel, self.precision = place, parallel, precision
        self.roots: list[nn.Module] = []
        self.stages: dict[int, Stage] = {}

    def decoders(self, config: DecoderConfig, backend: Backend, fused: tuple[Fusion, ...]) -> list[Decoder]:
        layout = self.place.layout
        ranges = check_shape(config, layout, self.parallel)
        total = len(ranges)
        fused = self._possible(config, fused)
        self._tell(ranges)
        found = []
        for index in stages_of(self.place.on("pp"), layout.pp, total):
            with torch.device("meta"):
                decoder = Decoder(config, backend, fused, ranges[index]).to(self.dtype)
            if layout.pp > 1:
                self.stages[index] = Stage(decoder, micro_loss)
            self._lay_out(decoder, self.stages.get(index, decoder))
            found.append(decoder)
        return found

    def fallback(self, module: Fallback) -> None:
        check_fallback_execution(Execution(tp=self.place.layout.tp, pp=self.place.layout.pp))
        # Many a model's logits are a view, of which FSDP2 warns; nothing here changes them in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        names = set(module.hf._no_split_modules or ())
        blocks = [part for part in module.modules() if type(part).__name__ in names]
        shard_module(module, blocks, self.place.data_mesh, self.parallel.zero, policy(self.precision))
        self.roots.append(module)
        self.notes.append(f"FSDP2 over {len(blocks)} blocks ({', '.join(sorted(names)) or 'all in one'})")

    def _lay_out(self, decoder: Decoder, root: nn.Module) -> None:
        assert self.place.mesh is not None
        if self.place.layout.tp > 1:
            share_matrices(decoder, self.place.mesh["tp"], self.parallel.sequence)
        mixed = policy(self.precision)
        shard_module(root, decoder.layers.values(), self.place.data_mesh, self.parallel.zero, mixed)
        decoder.computes_in = COMPUTED_IN[self.precision]
        root.to_empty(device=self.device)
        decoder.tie()
        self.roots.append(root)

    def _possible(self, config: DecoderConfig, fused: tuple[Fusion, ...]) -> tuple[Fusion, ...]:
        tp = self.place.layout.tp
        if "qkv" not in fused or shares_key_values(config, tp):
            return fused
        self.notes.append(
            f"model.fused qkv does not run with parallel.tp {tp} and {config.kv_heads} key/value heads, which every "
            "rank then has whole: queries, keys and values run apart"
        )
        return tuple(name for name in fused if name != "qkv")

    def _tell(self, ranges: list[range]) -> None:
        if len(ranges) > 1:
            sizes = ", ".join(str(len(layers)) for layers in ranges)
            self.notes.append(f"pipeline: {self.parallel.schedule}, {len(ranges)} stages of {sizes} layers")


def check_shape(config: DecoderConfig, layout: Layout, parallel: ParallelConfig) -> list[range]:
    """Refuses a layout that a model's sizes do not allow; the layers of each stage."""
    check_tensor(config, layout.tp)
    return split_layers(config, layout.pp * stages_per_rank(parallel), parallel.stage_layers)


def runner_of(model: Model, builder: Builder, packed: bool) -> Runner:
    """What runs a model that `builder` has built."""
    if not isinstance(builder, SharedBuilder):
        return Runner(model, builder.device, packed)
    place, parallel, pipeline = builder.place, builder.parallel, None
    if builder.stages:
        total = place.layout.pp * stages_per_rank(parallel)
        shares = place.layout.tp if parallel.sequence else 1
        interleaved = parallel.schedule == "interleaved"
        pipeline = Pipeline(builder.stages, total, interleaved, place, builder.device, shares)
    return Runner(model, builder.device, packed, place, parallel, builder.roots, pipeline)

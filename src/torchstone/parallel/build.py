"""Builds a model in its parallel layout: pipeline stages, tensor parallelism, FSDP2, then allocation.

Everything is built on the meta device first. Each rank then allocates its own shards and fills them from a
`TensorSource`: files, another layout's checkpoint, or a seed. So no rank reads or keeps more than its own shards. The
Transformers fallback is the exception: every rank loads the whole model and then shards it by its own blocks.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchstone.config.schema import ParallelConfig, resolve_stages_per_rank
from torchstone.models.attention import AttentionBackend
from torchstone.models.decoder import Decoder, DecoderConfig, Fusion, init_tensor
from torchstone.models.execution import DEFAULT_EXECUTION, ExecutionOptions, check_fallback_execution, choose_attention
from torchstone.models.fallback.module import FallbackModule
from torchstone.models.families import FAMILIES
from torchstone.models.fp8 import apply_fp8
from torchstone.models.model import Model, NativeModel
from torchstone.models.tensors import TensorSource, slice_at
from torchstone.parallel.fsdp import COMPUTE_DTYPE, PARAM_DTYPE, apply_fsdp, mixed_precision_policy
from torchstone.parallel.local_shards import local_shards
from torchstone.parallel.mesh import ParallelContext, ParallelDims
from torchstone.parallel.pipeline import Pipeline, StageModule, split_layers, stage_indices
from torchstone.parallel.runner import Runner, micro_batch_loss
from torchstone.parallel.tensor_parallel import apply_tensor_parallel, check_tp, shards_kv_heads
from torchstone.tuning.plan import TuningPlan
from torchstone.tuning.quantize import QuantizedLinear

# Each holds one tensor while it draws it.
MAX_THREADS = 8


class ModelBuilder:
    """Allocates a model's parameters: unsharded, on one device. It computes in `compute_dtype`, if that differs."""

    def __init__(self, device: torch.device, dtype: torch.dtype, compute_dtype: torch.dtype | None = None) -> None:
        self.device, self.dtype, self.compute_dtype = device, dtype, compute_dtype or dtype
        self.notes: list[str] = []

    def build_decoders(
        self,
        config: DecoderConfig,
        backend: AttentionBackend,
        execution: ExecutionOptions = DEFAULT_EXECUTION,
        tuning: TuningPlan | None = None,
    ) -> list[Decoder]:
        """The decoders of this process, with uninitialized parameters."""
        decoder = self._build_on_meta(config, backend, execution, tuning)
        if tuning is not None:
            tuning.freeze(decoder)
        if self.compute_dtype != self.dtype:
            decoder.compute_dtype = self.compute_dtype
        decoder.to_empty(device=self.device)
        decoder.tie_weights()
        return [decoder]

    def _build_on_meta(
        self,
        config: DecoderConfig,
        backend: AttentionBackend,
        execution: ExecutionOptions,
        tuning: TuningPlan | None,
        layers: range | None = None,
    ) -> Decoder:
        with torch.device("meta"):
            decoder = Decoder(config, backend, execution.fused, layers).to(self.dtype)
        if execution.fp8 is not None:
            note = apply_fp8(decoder, execution.fp8, self.device)
            # Every pipeline stage of this process has the same.
            self.notes += [] if note in self.notes else [note]
        if tuning is not None:
            tuning.prepare_decoder(decoder, self.compute_dtype, execution.tp)
        return decoder

    def shard_fallback(self, module: FallbackModule) -> None:
        """Shards a loaded Transformers model, in place."""


class ShardedModelBuilder(ModelBuilder):
    """Builds this rank's part of a model. Afterwards `fsdp_roots` and `stage_modules` hold its modules."""

    def __init__(self, ctx: ParallelContext, parallel: ParallelConfig, precision: str, device: torch.device) -> None:
        super().__init__(device, PARAM_DTYPE[precision], COMPUTE_DTYPE[precision])
        self.ctx, self.parallel, self.precision = ctx, parallel, precision
        self.fsdp_roots: list[nn.Module] = []
        self.stage_modules: dict[int, StageModule] = {}

    def build_decoders(
        self,
        config: DecoderConfig,
        backend: AttentionBackend,
        execution: ExecutionOptions = DEFAULT_EXECUTION,
        tuning: TuningPlan | None = None,
    ) -> list[Decoder]:
        dims = self.ctx.dims
        layer_ranges = stage_layer_ranges(config, dims, self.parallel)
        execution = replace(execution, fused=self._supported_fusions(config, execution.fused), tp=dims.tp)
        if len(layer_ranges) > 1:
            sizes = ", ".join(str(len(layers)) for layers in layer_ranges)
            self.notes.append(f"pipeline: {self.parallel.schedule}, {len(layer_ranges)} stages of {sizes} layers")
        decoders = []
        for index in stage_indices(self.ctx.pp_rank, dims.pp, len(layer_ranges)):
            decoder = self._build_on_meta(config, backend, execution, tuning, layer_ranges[index])
            if dims.pp > 1:
                self.stage_modules[index] = StageModule(decoder, micro_batch_loss)
            self._parallelize(decoder, self.stage_modules.get(index, decoder), tuning)
            decoders.append(decoder)
        return decoders

    def shard_fallback(self, module: FallbackModule) -> None:
        check_fallback_execution(ExecutionOptions(tp=self.ctx.dims.tp, pp=self.ctx.dims.pp))
        # Many models return a view as logits, about which FSDP2 warns; nothing here changes them in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        names = set(module.hf._no_split_modules or ())
        blocks = [submodule for submodule in module.modules() if type(submodule).__name__ in names]
        policy = mixed_precision_policy(self.precision)
        apply_fsdp(module, blocks, self.ctx.dp_mesh, self.parallel.zero, policy)
        self.fsdp_roots.append(module)
        self.notes.append(f"FSDP2 over {len(blocks)} blocks ({', '.join(sorted(names)) or 'one unit'})")

    def _parallelize(self, decoder: Decoder, root: nn.Module, tuning: TuningPlan | None) -> None:
        assert self.ctx.mesh is not None
        if self.ctx.dims.tp > 1:
            apply_tensor_parallel(decoder, self.ctx.mesh["tp"], self.parallel.sequence)
        if tuning is not None:
            tuning.freeze(decoder)
        policy = mixed_precision_policy(self.precision)
        apply_fsdp(root, decoder.layers.values(), self.ctx.dp_mesh, self.parallel.zero, policy)
        decoder.compute_dtype = COMPUTE_DTYPE[self.precision]
        root.to_empty(device=self.device)
        decoder.tie_weights()
        self.fsdp_roots.append(root)

    def _supported_fusions(self, config: DecoderConfig, fused: tuple[Fusion, ...]) -> tuple[Fusion, ...]:
        tp = self.ctx.dims.tp
        if "qkv" not in fused or shards_kv_heads(config, tp):
            return fused
        self.notes.append(
            f"model.fused qkv is off: parallel.tp {tp} does not divide {config.kv_heads} key/value heads, so every "
            "rank computes all of them"
        )
        return tuple(name for name in fused if name != "qkv")


def stage_layer_ranges(config: DecoderConfig, dims: ParallelDims, parallel: ParallelConfig) -> list[range]:
    """The layers of each pipeline stage. Raises UsageError if the model's sizes do not allow the layout."""
    check_tp(config, dims.tp)
    return split_layers(config, dims.pp * resolve_stages_per_rank(parallel), parallel.stage_layers)


@torch.no_grad()
def fill_parameters(decoders: Sequence[Decoder], source: TensorSource, threads: int = 1) -> None:
    """Reads this rank's slices of every parameter, and nothing else, from `source`."""
    shards = [
        shard
        for decoder in decoders
        for name, parameter in decoder.named_parameters()
        for shard in local_shards(decoder.config, name, parameter.detach())
    ]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda shard: source.read_into(shard.name, shard.tensor, shard.offset), shards))
    for decoder in decoders:
        for name, linear in decoder.named_modules():
            if isinstance(linear, QuantizedLinear):
                weight = torch.empty(linear.shape, dtype=linear.dtype, device=linear.parts[0].device)
                source.read_into(f"{name}.weight", weight, (0, 0))
                linear.load(weight)


class InitialTensors:
    """A `TensorSource` of initial values. It draws complete tensors, so that they are the same in any layout."""

    def __init__(self, config: DecoderConfig, std: float, seed: int) -> None:
        self.config, self.std, self.seed = config, std, seed
        with torch.device("meta"):
            self.shapes = {name: p.shape for name, p in Decoder(config).unfused_parameters().items()}

    def read_into(self, name: str, target: Tensor, offset: Sequence[int]) -> None:
        tensor = init_tensor(self.config, name, self.shapes[name], self.std, self.seed)
        target.copy_(tensor[slice_at(offset, target.shape)])


def build_new_model(
    hf_config: dict[str, Any],
    std: float,
    seed: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    execution: ExecutionOptions = DEFAULT_EXECUTION,
    builder: ModelBuilder | None = None,
) -> NativeModel:
    """A model of the family and sizes that `hf_config` describes, initialized from `seed`."""
    family = FAMILIES[hf_config["model_type"]]
    # Padding is never trained on, so no embedding of a new model needs to be frozen.
    config = replace(family.decoder_config(hf_config), padding_idx=None)
    choice = choose_attention(config, execution, device, dtype)
    builder = builder or ModelBuilder(device, dtype)
    decoders = builder.build_decoders(config, choice.value, execution)
    # Drawing a tensor takes one core.
    fill_parameters(decoders, InitialTensors(config, std, seed), min(MAX_THREADS, torch.get_num_threads()))
    model = NativeModel(decoders[0], hf_config, notes=list(builder.notes), family=family, decoders=decoders)
    model.apply_execution(execution)
    return model


def build_runner(model: Model, builder: ModelBuilder, packed: bool, longest_document: int = 0) -> Runner:
    """The runner of a model that `builder` has built."""
    if not isinstance(builder, ShardedModelBuilder):
        if builder.compute_dtype != builder.dtype:
            model.use_master_weights(builder.compute_dtype)
        return Runner(model, builder.device, packed, longest_document=longest_document)
    ctx, parallel, pipeline = builder.ctx, builder.parallel, None
    if builder.stage_modules:
        num_stages = ctx.dims.pp * resolve_stages_per_rank(parallel)
        sequence_shards = ctx.dims.tp if parallel.sequence else 1
        is_interleaved = parallel.schedule == "interleaved"
        pipeline = Pipeline(builder.stage_modules, num_stages, is_interleaved, ctx, builder.device, sequence_shards)
    return Runner(model, builder.device, packed, ctx, parallel, builder.fsdp_roots, pipeline, longest_document)

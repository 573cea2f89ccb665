"""The model of a run on the meta device: its parameters with adapters, frozen, and in the dtypes that a run gives them.

config.json and the tokenizer's size are all that is read. The values of adapters, singular vectors and fingerprints are
missing, so nothing here can be trained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchstone import hub
from torchstone.checkpoint.adapter_folder import open_adapter
from torchstone.checkpoint.load import CHECKPOINTS, base_folder, resolve_model_folder
from torchstone.checkpoint.manifest import list_checkpoints
from torchstone.checkpoint.model_folder import (
    BaseModelInfo,
    block_linears,
    decoder_shapes,
    fallback_reason,
    read_model_config,
)
from torchstone.checkpoint.transformers_folder import empty_fallback, has_tied_head, read_hf_config
from torchstone.checkpoint.weight_names import FALLBACK_NAMES, WEIGHT_NAMES, WeightNames
from torchstone.config.schema import Config
from torchstone.errors import UsageError
from torchstone.models.decoder import Decoder, DecoderConfig, LayerSpec
from torchstone.models.execution import ExecutionOptions
from torchstone.models.families import family_of
from torchstone.models.model import padded_vocab_size
from torchstone.models.sizing import build_sized_hf_config
from torchstone.models.tensors import TensorSource
from torchstone.parallel.fsdp import COMPUTE_DTYPE, PARAM_DTYPE
from torchstone.training.tuning import ADAPTER_NAME, new_adapter, osft_ranks, saved_parameters, with_tied_head
from torchstone.tuning.plan import LoraPlan, OsftPlan, TuningPlan
from torchstone.tuning.quantize import BaseQuantization

# The keys of a config.json that the rough estimate of a model in the fallback needs.
SIZE_KEYS = ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers")


@dataclass(frozen=True)
class MetaModel:
    """`config`: of the fallback, only the sizes, for a rough estimate of the activations."""

    module: nn.Module
    config: DecoderConfig
    tuning: TuningPlan | None
    parameter_count: int
    # Why it runs in the fallback.
    fallback: str | None = None


class _NoValues(TensorSource):
    def read(self, linear: str) -> torch.Tensor:
        raise NotImplementedError

    def read_into(self, name: str, target: torch.Tensor, offset: Any) -> None:
        raise NotImplementedError


def build_meta_model(config: Config, execution: ExecutionOptions, tokenizer_size: int) -> MetaModel:
    """`tokenizer_size`: 0 if it is not known; then the embedding of a model from a folder keeps its size."""
    if config.model.path is None:
        hf_config = build_sized_hf_config(config.model, padded_vocab_size(tokenizer_size), config.data.context_length)
        return _native(config, execution, hf_config["model_type"], family_of(hf_config).decoder_config(hf_config))
    folder = base_folder(find_model_folder(config.model.path))
    reason = fallback_reason(folder, execution)
    if reason is not None:
        return _fallback(config, folder, reason)
    hf_config, _, decoder_config = read_model_config(folder)
    if tokenizer_size > decoder_config.vocab_size:
        decoder_config = replace(decoder_config, vocab_size=padded_vocab_size(tokenizer_size))
    return _native(config, execution, hf_config["model_type"], decoder_config)


def find_model_folder(path: str) -> Path:
    """The folder of model.path, from the hub without weights; of a run, its newest checkpoint, not verified."""
    if hub.parse_model(path) is not None:
        return resolve_model_folder(path, weights=False)
    checkpoints = list_checkpoints(Path(path).expanduser() / CHECKPOINTS)
    return checkpoints[-1][1] if checkpoints else Path(path).expanduser()


def _native(config: Config, execution: ExecutionOptions, model_type: str, decoder_config: DecoderConfig) -> MetaModel:
    shapes, precision = decoder_shapes(decoder_config), config.training.precision
    names = WEIGHT_NAMES[model_type]
    tuning = _plan_tuning(config, names, shapes, block_linears(shapes), decoder_config.tied)
    with torch.device("meta"):
        decoder = Decoder(decoder_config, fused=execution.fused).to(PARAM_DTYPE[precision])
        count = sum(parameter.numel() for parameter in decoder.parameters())
        if tuning is not None:
            tuning.prepare_decoder(decoder, COMPUTE_DTYPE[precision], execution.tp)
            tuning.freeze(decoder)
    return MetaModel(decoder, decoder_config, tuning, count)


def _fallback(config: Config, folder: Path, reason: str) -> MetaModel:
    hf, precision = empty_fallback(folder, config.model.trust_remote_code), config.training.precision
    head, is_tied = hf.get_output_embeddings(), has_tied_head(hf)
    module = nn.ModuleDict({"hf": hf}).to(PARAM_DTYPE[precision])
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    linears = [name for name, each in module.named_modules() if isinstance(each, nn.Linear) and each is not head]
    tuning = _plan_tuning(config, FALLBACK_NAMES, shapes, linears, is_tied)
    if tuning is not None:
        tuning.add_to(module)
        for name, parameter in module.named_parameters():
            if not tuning.is_saved(name):
                parameter.data = parameter.data.to(COMPUTE_DTYPE[precision])
        tuning.freeze(module)
    count = sum(parameter.numel() for name, parameter in module.named_parameters() if name in shapes)
    return MetaModel(module, _rough_config(folder, is_tied), tuning, count, reason)


def _rough_config(folder: Path, is_tied: bool) -> DecoderConfig:
    """The sizes of a config.json, as if it were a decoder with a gated MLP."""
    values = read_hf_config(folder)
    values = values.get("text_config", values)
    missing = [key for key in SIZE_KEYS if not isinstance(values.get(key), int)]
    if missing:
        raise UsageError(
            f"{folder / 'config.json'} has no {', '.join(missing)}: activations of this model cannot be estimated",
            "torchstone train finds out what fits",
        )
    vocabulary, width, heads, depth = (values[key] for key in SIZE_KEYS)
    mlp_width = values.get("intermediate_size") or 4 * width
    kv_heads, head_dim = values.get("num_key_value_heads") or heads, values.get("head_dim") or width // heads
    return DecoderConfig(vocabulary, width, heads, kv_heads, head_dim, mlp_width, (LayerSpec(),) * depth, tied=is_tied)


def _plan_tuning(
    config: Config, names: WeightNames, shapes: dict[str, tuple[int, ...]], linears: list[str], is_tied: bool
) -> TuningPlan | None:
    """What `plan_tuning` returns for a new run, without values."""
    tuning, source = config.tuning, _NoValues()
    if tuning.method == "full":
        return None
    model = BaseModelInfo(names, shapes, linears, is_tied, "", source)
    base = ("", "")
    if tuning.method == "osft":
        ranks, trained = osft_ranks(tuning, model)
        return OsftPlan(trained, None, *base, ranks, tuning.unfreeze_rank_ratio, source)
    if tuning.adapter is None:
        saved = saved_parameters(tuning, model)
        adapter = new_adapter(tuning, model, saved)
    else:
        continued = resolve_model_folder(tuning.adapter, kind="adapter")
        tensors = open_adapter(continued, names, shapes, linears, ADAPTER_NAME)
        adapter, saved = tensors.adapter, frozenset(tensors.saved)
    frozen = tuple(
        open_adapter(resolve_model_folder(path), names, shapes, linears, name)
        for name, path in (tuning.frozen_adapters or {}).items()
    )
    quantization: BaseQuantization | None = None
    quantized = frozenset[str]()
    if tuning.quantize_base != "none":
        quantization = BaseQuantization(tuning.quantize_base, COMPUTE_DTYPE[config.training.precision], "cuda")
        quantized = frozenset(linear for linear in linears if f"{linear}.weight" not in saved)
    return LoraPlan(
        with_tied_head(saved, model), None, *base, adapter, frozen, quantized=quantized, base_quantization=quantization
    )

"""Opens the model of a Hugging Face folder or a checkpoint, natively or in the Transformers fallback.

`check_model_folder` finds errors in a folder or in the requested settings without reading weights, so that they show
before data is tokenized. `load_model` reads the weights into what a `ModelBuilder` allocates.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchstone.atomic import read_json_or_empty
from torchstone.checkpoint.adapter_folder import (
    check_base,
    fingerprint,
    is_adapter_folder,
    open_adapter,
)
from torchstone.checkpoint.load import base_folder, files_folder, tuned_model_folder
from torchstone.checkpoint.osft_folder import SingularVectors, is_osft_folder, open_osft, read_osft_config
from torchstone.checkpoint.shard_files import WEIGHTS, ShardedFiles, shard_files
from torchstone.checkpoint.tensor_files import read_shapes
from torchstone.checkpoint.transformers_folder import (
    check_fallback_folder,
    empty_fallback,
    has_tied_head,
    load_fallback,
    read_hf_config,
)
from torchstone.checkpoint.weight_files import InMemoryTensors, Shapes, WeightFiles, open_tensors, weight_file_paths
from torchstone.checkpoint.weight_names import FALLBACK_NAMES, WEIGHT_NAMES, WeightNames
from torchstone.errors import CheckpointError, UsageError, is_out_of_memory
from torchstone.models.choice import Choice
from torchstone.models.decoder import EMBEDDING, HEAD, Decoder, DecoderConfig
from torchstone.models.execution import (
    DEFAULT_EXECUTION,
    ExecutionOptions,
    Implementation,
    check_compiler,
    check_fallback_execution,
    choose_attention,
)
from torchstone.models.fallback.module import FallbackModule
from torchstone.models.fallback.probing import PACKING_METHODS
from torchstone.models.families import FAMILIES, Family, dropout_warning, family_of
from torchstone.models.fp8 import check_fp8
from torchstone.models.model import (
    GENERATION_CONFIG,
    MEAN_CHUNK,
    FallbackModel,
    Model,
    NativeModel,
    choose_execution,
    choose_fallback_execution,
    mean_embedding,
    padded_vocab_size,
    resize_warning,
)
from torchstone.models.tensors import TensorSource
from torchstone.parallel.build import ModelBuilder, fill_parameters
from torchstone.parallel.local_shards import local_shards
from torchstone.tuning.lora import AdapterTensors, MergedTensors, is_adapter_parameter
from torchstone.tuning.osft import MergedOsft
from torchstone.tuning.plan import LoraPlan, OsftPlan, TuningPlan
from torchstone.tuning.quantize import DequantizedTensors, quantize_loaded

# Keys of older files that are still read, and keys that tools leave behind.
LEGACY_KEYS = ("rope_scaling", "rope_theta", "torch_dtype", "dtype", "partial_rotary_factor", "transformers_version")
ROPE_KEYS = ("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor",
             "beta_fast", "beta_slow", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "mscale",
             "mscale_all_dim", "truncate", "partial_rotary_factor")  # fmt: skip


class NotNativeError(UsageError):
    """A valid model that the native decoder does not support."""


def read_model_config(folder: Path) -> tuple[dict[str, Any], Family, DecoderConfig]:
    """config.json, its family and decoder config. Raises NotNativeError if the decoder does not support it."""
    folder = files_folder(folder, "config.json")
    hf_config = read_hf_config(folder)
    path = folder / "config.json"
    try:
        family = family_of(hf_config)
        return hf_config, family, family.decoder_config(hf_config)
    except KeyError as error:
        key = str(error.args[0])
        # Transformers puts whole sentences into a KeyError.
        raise UsageError(f"{path}: {f'the key {key!r} is missing' if key.isidentifier() else key}") from None
    except UsageError as error:
        raise NotNativeError(f"{path}: {error.message}", error.hint) from None
    except Exception as error:
        # Transformers raises all kinds of errors for wrong values.
        if is_out_of_memory(error):
            raise
        raise UsageError(f"{path}: does not describe a model: {error}") from None


def load_model(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    execution: ExecutionOptions = DEFAULT_EXECUTION,
    builder: ModelBuilder | None = None,
    tokenizer_size: int = 0,
    tuning: TuningPlan | None = None,
) -> Model:
    """Loads the model of a folder, with the adapters of `tuning`. A missing or unknown weight is an error.

    Embeddings smaller than `tokenizer_size` are resized. New ones start as the mean of the old, so a new token gets an
    average logit; with random values it could get the largest of all.
    """
    builder = builder or ModelBuilder(device, dtype)
    reason = fallback_reason(folder, execution)
    if reason is None:
        model: Model = _load_native(folder, device, dtype, execution, builder, tokenizer_size, tuning)
        model.apply_execution(execution)
        return model
    base = base_folder(folder)
    # What is trained as a whole must start with the values of the files.
    load_dtype = builder.dtype if tuning is None or tuning.trained_parameters else builder.compute_dtype
    module = load_fallback(base, execution.attention, device, load_dtype, execution.trust_remote_code)
    notes = [f"runs in the Transformers fallback ({reason})"]
    if module.packing_method is not None:
        notes.append(f"packed documents are separated by {PACKING_METHODS[module.packing_method]} (tested at load)")
    hf_config, warnings, old_size = read_hf_config(base), module.warnings, module.vocab_size
    merge_errors = {} if base == folder else _merge_into_fallback(folder, base, module, execution)
    if tuning is not None:
        _add_adapters(module, tuning, builder.dtype, builder.compute_dtype)
    if tokenizer_size > old_size:
        _check_resizable(tokenizer_size, old_size, tuning)
        module.resize_embeddings(padded_vocab_size(tokenizer_size))
        hf_config["vocab_size"] = module.vocab_size
        warnings.append(resize_warning(tokenizer_size, old_size, module.vocab_size))
    model = FallbackModel(module, hf_config, module.generation_config, notes=notes, warnings=warnings, tuning=tuning)
    model.merge_errors = merge_errors
    # Also discards a damaged generation_config.json.
    model.align_special_tokens({})
    model.apply_execution(execution)
    builder.shard_fallback(module)
    model.notes += builder.notes
    return model


@torch.no_grad()
def load_unmerged(folder: Path, execution: ExecutionOptions = DEFAULT_EXECUTION) -> Model:
    """The model that was trained, in fp32 on the CPU: the base model with an adapter or the factors of OSFT beside its
    weights. `load_model` merges them."""
    is_native = fallback_reason(folder, execution) is None
    execution = replace(execution, implementation="native" if is_native else "fallback")
    if is_osft_folder(folder):
        osft, values = read_osft_config(folder), open_osft(folder)
        base = tuned_model_folder(folder)
        info = read_base_model_info(base, execution)
        trained = frozenset(name for name in values.names if not is_adapter_parameter(name))
        vectors = SingularVectors(info.source, info.shapes, info.fingerprint)
        osft_plan = OsftPlan(
            trained, values, str(base), info.fingerprint, osft.ranks, osft.unfreeze_rank_ratio, vectors
        )
        return load_model(base, torch.device("cpu"), execution=execution, tuning=osft_plan)
    base = base_folder(folder)
    info = read_base_model_info(base, execution)
    tensors = open_adapter(folder, info.names, info.shapes, info.linears)
    saved = frozenset(tensors.saved)
    plan = LoraPlan(saved, tensors, str(base), info.fingerprint, tensors.adapter, tensors.frozen)
    model = load_model(base, torch.device("cpu"), execution=execution, tuning=plan)
    parameters = dict(model.named_parameters())
    source = as_trained(InMemoryTensors(parameters), tensors, info.shapes, info.linears)
    for name in {f"{linear}.weight" for linear in info.linears} - saved:
        source.read_into(name, parameters[name], (0, 0))
    return model


@torch.no_grad()
def _merge_into_fallback(
    folder: Path, base: Path, module: FallbackModule, execution: ExecutionOptions
) -> dict[str, float]:
    """Returns what rounding has lost, by name (`rounding_error`)."""
    info = read_base_model_info(base, replace(execution, implementation="fallback"))
    parameters = dict(module.named_parameters())
    values = InMemoryTensors(parameters)
    source: MergedTensors | MergedOsft
    if is_osft_folder(folder):
        osft, tensors = read_osft_config(folder), open_osft(folder)
        check_base(osft.base_fingerprint, info.fingerprint, folder, base)
        source, linears = MergedOsft(values, tensors, osft.ranks, info.shapes), list(osft.ranks)
        saved = [name for name in tensors.names if not is_adapter_parameter(name)]
    else:
        adapter = open_adapter(folder, info.names, info.shapes, info.linears)
        check_base(adapter.base_fingerprint, info.fingerprint, folder, base)
        source = MergedTensors(
            as_trained(values, adapter, info.shapes, info.linears), adapter, adapter.adapters, info.shapes
        )
        linears, saved = info.linears, list(adapter.saved)
    for name in [*(f"{linear}.weight" for linear in linears), *saved]:
        source.read_into(name, parameters[name], (0,) * parameters[name].dim())
    return source.errors


@torch.no_grad()
def _add_adapters(module: FallbackModule, tuning: TuningPlan, dtype: torch.dtype, frozen_dtype: torch.dtype) -> None:
    """Adds the adapters of `tuning` to a loaded model. What is trained has `dtype`."""

    def set_dtype(name: str, parameter: nn.Parameter) -> None:
        parameter.data = parameter.data.to(dtype if tuning.is_saved(name) else frozen_dtype)

    for name, parameter in module.named_parameters():
        set_dtype(name, parameter)
    base = {name: parameter.detach() for name, parameter in module.named_parameters()}
    tuning.add_to(module)
    source = tuning.tensors(InMemoryTensors(base), {name: tuple(tensor.shape) for name, tensor in base.items()})
    for name, parameter in module.named_parameters():
        if name not in base:
            set_dtype(name, parameter)
        if tuning.is_saved(name) or name not in base:
            source.read_into(name, parameter.data, (0,) * parameter.dim())
    if isinstance(tuning, LoraPlan) and tuning.base_quantization is not None:
        quantize_loaded(module, tuning.quantized, tuning.base_quantization)
    tuning.freeze(module)


def fallback_reason(folder: Path, execution: ExecutionOptions) -> str | None:
    """Why a folder's model runs in the Transformers fallback; None if it runs natively."""
    hf_config = read_hf_config(files_folder(folder, "config.json"))
    implementation = execution.implementation
    if implementation == "fallback":
        return "as requested"
    if implementation == "auto" and execution.trust_remote_code and _remote_code_class(hf_config):
        return f"{_remote_code_class(hf_config)} of its folder, which is trusted"
    if implementation == "auto" and stored_implementation(folder) == "fallback":
        return "as in the run that saved it"
    try:
        read_model_config(folder)
    except NotNativeError as error:
        if implementation == "native":
            raise
        return error.message
    return None


def stored_implementation(folder: Path) -> Implementation:
    """The implementation of the run that saved a checkpoint; auto for any other folder."""
    return "fallback" if read_json_or_empty(folder / "state.json").get("implementation") == "fallback" else "auto"


def stored_parameter_count(folder: Path) -> int:
    """The number of parameters in a folder's weight files, from their headers: files may be larger than memory."""
    folder = base_folder(folder)
    files = shard_files(folder, WEIGHTS) or weight_file_paths(folder)
    return sum(math.prod(shape) for path in files for shape in read_shapes(path).values())


def check_model_folder(
    folder: Path, device: torch.device, dtype: torch.dtype, execution: ExecutionOptions = DEFAULT_EXECUTION
) -> dict[str, Choice]:
    """Raises unless the folder has a complete model that can run as requested. Reads no weights.

    Returns what the settings that may be `auto` are; of the fallback, without its attention.
    """
    if fallback_reason(folder, execution) is not None:
        check_fallback_folder(folder, execution.trust_remote_code)
        check_fallback_execution(execution)
        return choose_fallback_execution(execution)
    hf_config, _, config = read_model_config(folder)
    open_weights(folder, hf_config["model_type"], config)
    return _check_native_execution(config, device, dtype, execution)


def check_new_model(
    hf_config: dict[str, Any], device: torch.device, dtype: torch.dtype, execution: ExecutionOptions
) -> dict[str, Choice]:
    """What is chosen for a new model with this config. Raises if it cannot run as requested."""
    try:
        config = FAMILIES[hf_config["model_type"]].decoder_config(hf_config)
    except ValueError as error:
        raise UsageError(f"the sizes of the new model do not fit together: {error}") from None
    return _check_native_execution(config, device, dtype, execution)


@dataclass(frozen=True)
class BaseModelInfo:
    """What an adapter must know of a model: the names and shapes of its parameters, and its linears except the head."""

    names: WeightNames
    shapes: dict[str, tuple[int, ...]]
    linears: list[str]
    is_tied: bool
    fingerprint: str
    source: TensorSource
    # Linears that OSFT cannot tune, and why.
    not_for_osft: Mapping[str, str] = field(default_factory=dict)


def read_base_model_info(folder: Path, execution: ExecutionOptions = DEFAULT_EXECUTION) -> BaseModelInfo:
    """`folder`: of a model, not of an adapter. Reads a few values of every weight."""
    if fallback_reason(folder, execution) is None:
        hf_config, _, config = read_model_config(folder)
        shapes = decoder_shapes(config)
        linears = block_linears(shapes)
        source: TensorSource = open_weights(folder, hf_config["model_type"], config)
        values = fingerprint(source, shapes)
        return BaseModelInfo(WEIGHT_NAMES[hf_config["model_type"]], shapes, linears, config.tied, values, source)
    hf = empty_fallback(folder, execution.trust_remote_code)
    head = hf.get_output_embeddings()
    modules = {f"hf.{name}": m for name, m in hf.named_modules() if isinstance(m, nn.Linear) and m is not head}
    shapes = {f"hf.{name}": tuple(parameter.shape) for name, parameter in hf.named_parameters()}
    stored = {name: file.tensors[name] for name, file in open_tensors(folder).items()}
    values = fingerprint(InMemoryTensors(stored), {name: tuple(tensor.shape) for name, tensor in stored.items()})
    tensors = {f"hf.{name}": tensor for name, tensor in stored.items()}
    # Names in files may lack the prefix of the model without its head. Transformers reads them, too.
    prefix = f"hf.{hf.base_model_prefix}."
    tensors |= {name: tensors[short] for name in shapes if (short := name.replace(prefix, "hf.", 1)) in tensors}
    not_for_osft = {
        name: "no file has a tensor of its name"
        if f"{name}.weight" not in tensors
        else f"{type(module).__name__} has a forward pass of its own"
        for name, module in modules.items()
        if type(module) is not nn.Linear or f"{name}.weight" not in tensors
    }
    return BaseModelInfo(
        FALLBACK_NAMES, shapes, list(modules), has_tied_head(hf), values, InMemoryTensors(tensors), not_for_osft
    )


def open_weights(
    folder: Path, model_type: str, config: DecoderConfig
) -> WeightFiles | ShardedFiles | MergedTensors | MergedOsft:
    """A folder's weights, checked by name and shape. A checkpoint of several ranks has sharded files.

    Those of an adapter, or of a checkpoint of OSFT, are the weights of the base model with the updates merged.
    """
    if is_osft_folder(folder):
        osft, shapes = read_osft_config(folder), decoder_shapes(config)
        base = tuned_model_folder(folder)
        files = open_weights(base, model_type, config)
        check_base(osft.base_fingerprint, fingerprint(files, shapes), folder, base)
        return MergedOsft(files, open_osft(folder), osft.ranks, shapes)
    if is_adapter_folder(folder):
        return _open_merged(folder, model_type, config)
    paths = shard_files(folder, WEIGHTS)
    if not paths:
        with torch.device("meta"):
            return WeightFiles(folder, WEIGHT_NAMES[model_type], Decoder(config))
    files, expected = ShardedFiles(paths), decoder_shapes(config)
    shapes = {name: tuple(files.shape(name)) for name in files.names}
    wrong = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
    if wrong:
        raise CheckpointError(f"{folder}: the weights do not match config.json", f"see {', '.join(wrong[:8])}")
    return files


def _open_merged(folder: Path, model_type: str, config: DecoderConfig) -> MergedTensors:
    shapes = decoder_shapes(config)
    linears = block_linears(shapes)
    tensors, base = open_adapter(folder, WEIGHT_NAMES[model_type], shapes, linears), base_folder(folder)
    files = open_weights(base, model_type, config)
    check_base(tensors.base_fingerprint, fingerprint(files, shapes), folder, base)
    source = as_trained(files, tensors, shapes, linears)
    return MergedTensors(source, tensors, tensors.adapters, shapes)


def as_trained(base: TensorSource, tensors: AdapterTensors, shapes: Shapes, linears: Collection[str]) -> TensorSource:
    """The weights that an adapter was trained on: those of `base`, with `linears` quantized and dequantized if they
    were."""
    if tensors.base_quantization is None:
        return base
    return DequantizedTensors(base, linears, shapes, tensors.base_quantization)


def block_linears(shapes: Shapes) -> list[str]:
    """The linears of a native model, except the head."""
    weights = (name for name, shape in shapes.items() if name.startswith("layers.") and len(shape) == 2)
    return [name.removesuffix(".weight") for name in weights]


def decoder_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of a decoder's parameters, unfused."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Decoder(config).unfused_parameters().items()}


class ResizedEmbeddings:
    """A `TensorSource` with more embeddings (and head outputs) than its files: the new ones are the mean of the old."""

    def __init__(self, source: TensorSource, old_size: int) -> None:
        self.source, self.old_size = source, old_size
        self._means: dict[tuple[str, torch.dtype], Tensor] = {}

    def read_into(self, name: str, target: Tensor, offset: Sequence[int]) -> None:
        if name not in (EMBEDDING, HEAD):
            self.source.read_into(name, target, offset)
            return
        old = min(max(0, self.old_size - offset[0]), len(target))
        if old:
            self.source.read_into(name, target[:old], offset)
        if old < len(target):
            target[old:] = self._mean(name, target).to(target)

    def _mean(self, name: str, like: Tensor) -> Tensor:
        if (name, like.dtype) not in self._means:
            starts = range(0, self.old_size, MEAN_CHUNK)
            self._means[name, like.dtype] = mean_embedding(self._chunk(name, start, like) for start in starts)
        return self._means[name, like.dtype]

    def _chunk(self, name: str, start: int, like: Tensor) -> Tensor:
        chunk = like.new_empty((min(MEAN_CHUNK, self.old_size - start), like.shape[1]), device="cpu")
        self.source.read_into(name, chunk, (start, 0))
        return chunk


def _load_native(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    execution: ExecutionOptions,
    builder: ModelBuilder,
    tokenizer_size: int,
    tuning: TuningPlan | None,
) -> NativeModel:
    hf_config, family, config = read_model_config(folder)
    choice = choose_attention(config, execution, device, dtype)
    files = open_weights(folder, hf_config["model_type"], config)
    source: TensorSource = files
    warning = dropout_warning(hf_config)
    warnings = [] if warning is None else [warning]
    if tokenizer_size > config.vocab_size:
        _check_resizable(tokenizer_size, config.vocab_size, tuning)
        source, new_size = ResizedEmbeddings(source, config.vocab_size), padded_vocab_size(tokenizer_size)
        warnings.append(resize_warning(tokenizer_size, config.vocab_size, new_size))
        config, hf_config["vocab_size"] = replace(config, vocab_size=new_size), new_size
    decoders = builder.build_decoders(config, choice.value, execution, tuning)
    if tuning is not None:
        source = tuning.tensors(source, decoder_shapes(config))
    fill_parameters(decoders, source)
    if isinstance(files, WeightFiles) and (tuning is None or not tuning.has_value(EMBEDDING)):
        _check_head_copies(files, decoders)
    if _remote_code_class(hf_config):
        warnings.append(f"config.json names its own code ({_remote_code_class(hf_config)}), which is not run")
    generation_config = folder / GENERATION_CONFIG
    return NativeModel(
        decoders[0],
        hf_config,
        generation_config.read_bytes() if generation_config.is_file() else None,
        notes=list(builder.notes),
        warnings=warnings + _misspelled_keys(hf_config),
        family=family,
        decoders=decoders,
        tuning=tuning,
    )


def _check_resizable(tokenizer_size: int, old_size: int, tuning: TuningPlan | None) -> None:
    if tuning is not None:
        raise UsageError(
            f"the tokenizer has {tokenizer_size} tokens, but the model has {old_size} embeddings, and with adapters "
            "they cannot be resized: an adapter belongs to a model as it is",
            "use the tokenizer of the model, or resize the model first, with --tuning.method full",
        )


def _check_head_copies(files: WeightFiles, decoders: Sequence[Decoder]) -> None:
    """Each rank compares its part of the embedding, without the embeddings that resizing added."""
    for decoder in decoders:
        if decoder.has_embedding and decoder.config.tied:
            for shard in local_shards(decoder.config, EMBEDDING, decoder.tok_embed.weight.detach()):
                old = max(0, files.shape(EMBEDDING)[0] - shard.offset[0])
                files.check_head_copies(shard.tensor[:old], shard.offset)


def _check_native_execution(
    config: DecoderConfig, device: torch.device, dtype: torch.dtype, execution: ExecutionOptions
) -> dict[str, Choice]:
    choices = choose_execution(config, execution, device, dtype).choices
    if choices["model.compile"].value != "none":
        check_compiler(device)
    if execution.fp8 is not None:
        check_fp8(execution.fp8, device)
    return choices


def _remote_code_class(hf_config: dict[str, Any]) -> str | None:
    """The causal model class in a folder's own code, or None."""
    auto_map = hf_config.get("auto_map")
    return auto_map.get("AutoModelForCausalLM") if isinstance(auto_map, dict) else None


def _misspelled_keys(hf_config: dict[str, Any]) -> list[str]:
    """A warning for every unknown key that is close to a known one: a typo would silently change the model."""
    from transformers import AutoConfig

    own = AutoConfig.for_model(hf_config["model_type"]).to_dict()
    known = {*(key for key in own if not key.startswith("_")), *LEGACY_KEYS}
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling")
    keys = [(key, known) for key in hf_config]
    if isinstance(rope, dict):
        keys += [(key, set(ROPE_KEYS)) for key, value in rope.items() if not isinstance(value, dict)]
    warnings = []
    for key, names in keys:
        similar = difflib.get_close_matches(key, names, 1, cutoff=0.88) if key not in names else []
        if similar:
            warnings.append(f"config.json: unknown key {key} has no effect (did you mean {similar[0]}?)")
    return warnings

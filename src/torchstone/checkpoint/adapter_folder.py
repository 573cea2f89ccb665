"""Reads and writes LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

An adapter of ours has an A for each of the decoder's projections. Some families store several of them as one linear
(Phi-3's qkv_proj, GPT-2's c_attn), for which PEFT has one A and one B. Reading gives every projection that A and its
own rows of B. Writing stacks the A and puts the B on a diagonal, so that nothing is lost; the rank of that linear is
then the sum of the ranks, which rank_pattern says. `average` writes the mean of the A instead, for tools that need one
rank.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchstone import hub
from torchstone.atomic import read_json_or_empty
from torchstone.checkpoint.shard_files import WEIGHTS, ShardedFiles, shard_files
from torchstone.checkpoint.tensor_files import open_tensor_file, write_tensors
from torchstone.checkpoint.weight_files import Shapes, hf_tensors, list_names
from torchstone.checkpoint.weight_names import WeightNames
from torchstone.errors import CheckpointError, UsageError
from torchstone.models.decoder import EMBEDDING, HEAD
from torchstone.models.tensors import TensorSource
from torchstone.tuning.lora import (
    LORA_A,
    LORA_B,
    MAGNITUDE,
    AdapterTensors,
    LoraAdapter,
    LoraSpec,
    is_adapter_parameter,
    parameter_name,
    split_parameter_name,
)
from torchstone.tuning.quantize import BaseQuantization
from torchstone.wording import list_first

CONFIG_FILE, WEIGHTS_FILE, STATE_FILE = "adapter_config.json", "adapter_model.safetensors", "state.json"
PREFIX = "base_model.model."
# Kinds of factors, by the ends of their names in PEFT.
PEFT_KINDS = {"lora_A.weight": LORA_A, "lora_B.weight": LORA_B, "lora_magnitude_vector": MAGNITUDE}
# Settings of PEFT that change what an adapter computes, and the values that are supported here.
SUPPORTED = {
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "bias": ("none",),
    "kasa_config": (None,),
    "layer_replication": (None,),
    "lora_bias": (False,),
    "monteclora_config": (None,),
    "target_parameters": (None,),
    "trainable_token_indices": (None,),
    "use_bdlora": (None, False),
    "use_qalora": (False,),
    "velora_config": (None,),
}
# Initializations that change the base model, so that the adapter alone does not describe the result.
CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
# Keys of the file's metadata. STACKED: the ranks of projections whose factors are stacked in one linear. BASE: the
# fingerprint of the base model. QUANTIZATION: how its linears were quantized. FROZEN: the names of the frozen adapters,
# each of which is in a folder of its name, where PEFT expects it.
STACKED, BASE, QUANTIZATION = "torchstone_stacked", "torchstone_base", "torchstone_base_quantization"
FROZEN = "torchstone_frozen_adapters"
# How many values of a row a fingerprint reads.
FINGERPRINT_COLUMNS = 64
# The factors of one linear, by kind: LORA_A, LORA_B and, with DoRA, MAGNITUDE.
Factors = dict[str, Tensor]


def is_adapter_folder(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file()


def fingerprint(source: TensorSource, shapes: Shapes) -> str:
    """Tells models apart by a few values of each parameter, whatever files and dtypes hold them: the first ones of its
    first, middle and last row. It does not see a change elsewhere."""
    digest = hashlib.sha256()
    for name in sorted(shapes):
        *leading, columns = shapes[name]
        digest.update(f"{name} {shapes[name]}\n".encode())
        for row in (0, leading[0] // 2, leading[0] - 1) if leading else (0,):
            target = torch.empty([1] * len(leading) + [min(FINGERPRINT_COLUMNS, columns)])
            source.read_into(name, target, (row, *[0] * len(leading)) if leading else (0,))
            digest.update(target.numpy().tobytes())
    return digest.hexdigest()


def check_base(expected: str | None, actual: str, folder: Path, base: Path) -> None:
    """Raises if what `folder` has was trained on other weights than those in `base`, by their fingerprints.

    PEFT does not record one.
    """
    if expected not in (None, actual):
        raise CheckpointError(
            f"{folder} was trained on other weights than those in {base}",
            "has the base model been overwritten? What was trained works with these weights, and no others",
        )


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json. Raises UsageError for an adapter that is not LoRA, or has parts that are not supported."""
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"{folder} is not a PEFT adapter (no {CONFIG_FILE})") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a readable JSON file: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise UsageError(f"{path}: peft_type is {kind}; only LORA can be read")
    for key, values in SUPPORTED.items():
        if config.get(key, values[0]) not in values:
            raise UsageError(f"{path}: {key} {config[key]!r} is not supported")
    initialization = str(config.get("init_lora_weights"))
    if initialization.startswith(CHANGES_BASE):
        raise UsageError(
            f"{path}: init_lora_weights {initialization} has changed the weights of the base model",
            "save it in PEFT with path_initial_model_for_weight_conversion, which converts it to plain LoRA",
        )
    return config


def recorded_quantization(folder: Path) -> BaseQuantization | None:
    """How the linears were quantized that the adapter of a folder was trained on."""
    if shard_files(folder, WEIGHTS):
        return BaseQuantization.parse(read_json_or_empty(folder / STATE_FILE).get("base_quantization"))
    return BaseQuantization.parse(open_tensor_file(folder / WEIGHTS_FILE).metadata.get(QUANTIZATION))


def base_name(config: dict[str, Any]) -> str | None:
    """The base model of an adapter_config.json: a folder, or a name on the hub with its revision."""
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    return f"{name}@{revision}" if name and revision and hub.parse_model(name) is not None else name


def open_adapter(
    folder: Path, names: WeightNames, shapes: Shapes, linears: Collection[str], adapter_name: str = "default"
) -> AdapterTensors:
    """The adapter of a folder of PEFT's, or of a checkpoint of any layout.

    `shapes`: of the model's parameters. `linears`: those that can have factors.
    """
    if shard_files(folder, WEIGHTS):
        tensors, frozen = _read_sharded(folder, names, adapter_name)
    else:
        tensors, frozen = _read_adapter(folder, names, shapes, linears, adapter_name)
    both = sorted(linear for linear in tensors.adapter.linears if f"{linear}.weight" in tensors.saved)
    if both:
        raise CheckpointError(
            f"{folder}: the adapter has factors and the whole weight of {list_first(both)}",
            "train it again without them in tuning.lora_targets or without them in tuning.modules_to_save",
        )
    others = (_read_adapter(folder / name, names, shapes, linears, name)[0] for name in frozen)
    return replace(tensors, frozen=tuple(others))


def _read_sharded(folder: Path, names: WeightNames, adapter_name: str) -> tuple[AdapterTensors, list[str]]:
    """A checkpoint of several ranks has adapter_config.json and their shards of the factors.

    Also returns the names of the frozen adapters."""
    config, files = read_adapter_config(folder), ShardedFiles(shard_files(folder, WEIGHTS))
    tensors: dict[str, Tensor] = {}
    for name in files.names:
        tensors[name] = torch.empty(files.shape(name), dtype=files.dtype(name))
        files.read_into(name, tensors[name], (0,) * tensors[name].dim())
    factors = {name: tensor for name, tensor in tensors.items() if is_adapter_parameter(name)}
    ranks = {split_parameter_name(name)[0]: len(factors[name]) for name in factors if name.endswith(LORA_A)}
    linears: dict[str, LoraSpec] = {}
    for hf_name, spec in names.stored_tensors(f"{linear}.weight" for linear in ranks).items():
        parts = [name.removesuffix(".weight") for name in spec.parameter_names]
        scale = _scale(config, hf_name.removesuffix(".weight"), sum(ranks[part] for part in parts))
        linears |= {part: LoraSpec(ranks[part], scale) for part in parts}
    saved = {name: tensor for name, tensor in tensors.items() if name not in factors}
    state = read_json_or_empty(folder / STATE_FILE)
    recorded = (state.get("base_fingerprint"), recorded_quantization(folder))
    adapter = AdapterTensors(_adapter_of(config, adapter_name, linears), factors, saved, base_name(config), *recorded)
    return adapter, state.get("frozen_adapters") or []


def _adapter_of(config: dict[str, Any], name: str, linears: Mapping[str, LoraSpec]) -> LoraAdapter:
    dropout, use_dora, use_rslora = (config.get(key, 0) for key in ("lora_dropout", "use_dora", "use_rslora"))
    return LoraAdapter(name, linears, float(dropout), bool(use_dora), bool(use_rslora))


def _read_adapter(
    folder: Path, names: WeightNames, shapes: Shapes, trainable: Collection[str], adapter_name: str
) -> tuple[AdapterTensors, list[str]]:
    """A folder of PEFT's. Unknown tensors are an error. Also returns the names of the frozen adapters.

    `trainable`: the linears that can have factors.
    """
    config = read_adapter_config(folder)
    if not (folder / WEIGHTS_FILE).is_file():
        raise CheckpointError(f"{folder}: no {WEIGHTS_FILE}", "pickles (adapter_model.bin) are never read")
    file = open_tensor_file(folder / WEIGHTS_FILE)
    stacked_ranks = json.loads(file.metadata.get(STACKED, "{}"))
    linears: dict[str, LoraSpec] = {}
    factors: dict[str, Tensor] = {}
    saved: dict[str, Tensor] = {}
    modules: dict[str, Factors] = {}
    unknown: list[str] = []
    for key, tensor in file.tensors.items():
        hf_name = key.removeprefix(PREFIX)
        ending = next((ending for ending in PEFT_KINDS if hf_name.endswith(f".{ending}")), None)
        module = hf_name.removesuffix(f".{ending}")
        stored = names.stored_tensor(hf_name if ending is None else f"{module}.weight")
        is_known = stored is not None and (shapes.keys() | {HEAD}) >= set(stored.parameter_names)
        if stored is None or not is_known or not key.startswith(PREFIX):
            unknown.append(key)
        elif ending is not None:
            modules.setdefault(module, {})[PEFT_KINDS[ending]] = tensor
        else:
            whole = tensor.T if stored.is_transposed else tensor
            parts = whole.split([shapes.get(name, whole.shape)[0] for name in stored.parameter_names])
            saved |= dict(zip(stored.parameter_names, parts, strict=True))
    _check_targets(folder, file.tensors, names, trainable)
    for module, whole in modules.items():
        stored = names.stored_tensor(f"{module}.weight")
        assert stored is not None
        sizes = [shapes[name][0] for name in stored.parameter_names]
        _check_factors(folder, module, whole, sum(sizes), shapes[stored.parameter_names[0]][1], config)
        scale = _scale(config, module, len(whole[LORA_A]))
        for name, part in zip(
            stored.parameter_names, split_factors(whole, sizes, stacked_ranks.get(module)), strict=True
        ):
            linear = name.removesuffix(".weight")
            linears[linear] = LoraSpec(len(part[LORA_A]), scale)
            factors |= {parameter_name(linear, adapter_name, kind): tensor for kind, tensor in part.items()}
    if HEAD not in shapes and saved.keys() & {EMBEDDING, HEAD}:
        _check_tied_head(folder, saved, bool(config.get("ensure_weight_tying")))
    wrong = [name for name, tensor in saved.items() if tuple(tensor.shape) != shapes[name]]
    damaged = [key for key, tensor in file.tensors.items() if not tensor.isfinite().all()]
    if damaged:
        raise CheckpointError(f"{folder}: {len(damaged)} tensors have NaN or infinite values", list_first(damaged))
    if unknown or wrong or not factors:
        problem = "has no factors" if not factors else "does not fit the model"
        raise CheckpointError(f"{folder}: the adapter {problem}", list_names(unknown=unknown, shape=wrong) or None)
    recorded = (file.metadata.get(BASE), recorded_quantization(folder))
    adapter = AdapterTensors(_adapter_of(config, adapter_name, linears), factors, saved, base_name(config), *recorded)
    return adapter, json.loads(file.metadata.get(FROZEN, "[]"))


def _check_targets(folder: Path, keys: Iterable[str], names: WeightNames, trainable: Collection[str]) -> None:
    """Raises if a module that is not in `trainable`, such as the head or the embedding, has factors."""
    others = dict[str, None]()
    for module, _, factor in (key.removeprefix(PREFIX).partition(".lora_") for key in keys):
        stored = names.stored_tensor(f"{module}.weight") if factor else None
        if stored is not None and not all(name.removesuffix(".weight") in trainable for name in stored.parameter_names):
            others[module] = None
    if others:
        raise UsageError(
            f"{folder}: the adapter has factors of {list_first(list(others))}, but the blocks of this model have no "
            "such linears",
            "use the model that it was trained on; if it has factors of the embedding or the head, merge it in PEFT "
            "first (merge_and_unload), or train these with --tuning.modules_to_save",
        )


def _check_tied_head(folder: Path, saved: dict[str, Tensor], is_tied: bool) -> None:
    """Makes `saved` the one parameter of a model whose head is tied. `is_tied`: whether PEFT has trained it as one.

    Otherwise PEFT has a copy of each module that it trains, and the other one is not trained.
    """
    head, embedding = saved.pop(HEAD, None), saved.get(EMBEDDING)
    if is_tied:
        weight = head if embedding is None else embedding
        assert weight is not None
        saved[EMBEDDING] = weight
    elif head is None or embedding is None or not torch.equal(head, embedding):
        raise CheckpointError(
            f"{folder}: embedding and head of the adapter differ, but config.json of the model ties them",
            'untie the model first ("tie_word_embeddings": false in config.json, and a head in its files)',
        )


def write_adapter(
    folder: Path, tensors: AdapterTensors, names: WeightNames, is_tied: bool, average: bool = False
) -> list[str]:
    """Writes a folder that PEFT loads; returns warnings.

    `is_tied`: the head of the model is its embedding. `average`: projections that the family stores as one linear get
    the mean of their A, which is not what was trained.
    """
    stored, stacked_ranks, warnings = dict[str, Tensor](), dict[str, list[int]](), list[str]()
    for module, linears in stored_linears(tensors.adapter, names).items():
        parts = [tensors.factors_of(linear) for linear in linears]
        whole = stack_factors(parts)
        if len(parts) > 1 and average:
            mean = average_factors(parts)
            exact, changed = (each[LORA_B] @ each[LORA_A] for each in (whole, mean))
            error = ((changed - exact).norm() / exact.norm()).item() if exact.any() else 0.0
            warnings.append(
                f"{module}: the mean of the A of {len(parts)} projections changes the update by {error:.1%}"
            )
            whole = mean
        elif len(parts) > 1:
            stacked_ranks[module] = [len(part[LORA_A]) for part in parts]
        stored |= {f"{PREFIX}{module}.{ending}": whole[kind] for ending, kind in PEFT_KINDS.items() if kind in whole}
    saved = dict(tensors.saved)
    if is_tied and EMBEDDING in saved:
        # PEFT has a copy of both modules, and does not tie the copies.
        saved[HEAD] = saved[EMBEDDING]
    stored |= {f"{PREFIX}{name}": tensor for name, tensor in hf_tensors(saved, names).items()}
    metadata = {"format": "pt"}
    if stacked_ranks:
        metadata[STACKED] = json.dumps(stacked_ranks)
    if tensors.base_fingerprint is not None:
        metadata[BASE] = tensors.base_fingerprint
    if tensors.base_quantization is not None:
        metadata[QUANTIZATION] = str(tensors.base_quantization)
    if tensors.frozen:
        metadata[FROZEN] = json.dumps([each.adapter.name for each in tensors.frozen])
        warnings += write_frozen_adapters(folder, tensors.frozen, names, is_tied, average)
    write_tensors(folder / WEIGHTS_FILE, {name: tensor.contiguous() for name, tensor in stored.items()}, metadata)
    write_adapter_config(folder, tensors.adapter, names, saved, tensors.base, average)
    return warnings


def write_frozen_adapters(
    folder: Path, adapters: Iterable[AdapterTensors], names: WeightNames, is_tied: bool, average: bool = False
) -> list[str]:
    """Writes each into a folder of its name; returns warnings."""
    warnings = []
    for tensors in adapters:
        (folder / tensors.adapter.name).mkdir()
        warnings += write_adapter(folder / tensors.adapter.name, tensors, names, is_tied, average)
    return warnings


def stored_linears(adapter: LoraAdapter, names: WeightNames) -> dict[str, list[str]]:
    """The linears of an adapter by the Hugging Face module that holds them."""
    weights = names.stored_tensors(f"{linear}.weight" for linear in adapter.linears)
    return {
        hf_name.removesuffix(".weight"): [name.removesuffix(".weight") for name in spec.parameter_names]
        for hf_name, spec in weights.items()
    }


def write_adapter_config(
    folder: Path,
    adapter: LoraAdapter,
    names: WeightNames,
    saved: Iterable[str],
    base: str | None,
    average: bool = False,
) -> None:
    """`saved`: the names of parameters that are saved with the adapter."""
    ranks, alphas = dict[str, int](), dict[str, float]()
    for module, linears in stored_linears(adapter, names).items():
        specs = [adapter.linears[linear] for linear in linears]
        ranks[module] = specs[0].rank if average else sum(spec.rank for spec in specs)
        alphas[module] = specs[0].scale * (math.sqrt(ranks[module]) if adapter.use_rslora else ranks[module])
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    # PEFT takes all modules whose names end like this, so these are whole names.
    saved_modules = {name.rpartition(".")[0] for name in names.stored_tensors(saved)}
    is_transposed = [
        spec.is_transposed for spec in names.stored_tensors(f"{name}.weight" for name in adapter.linears).values()
    ]
    hub_name = None if base is None else hub.parse_model(base)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base if hub_name is None else hub_name.repo,
        "revision": None if hub_name is None else hub_name.revision,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _whole_number(alpha),
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.use_rslora,
        "use_dora": adapter.use_dora,
        "bias": "none",
        "fan_in_fan_out": any(is_transposed),
        "target_modules": sorted(ranks),
        "modules_to_save": sorted(saved_modules) or None,
        "rank_pattern": {re.escape(module): value for module, value in ranks.items() if value != rank},
        "alpha_pattern": {re.escape(module): _whole_number(v) for module, v in alphas.items() if v != alpha},
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def split_factors(whole: Factors, sizes: Sequence[int], ranks: Sequence[int] | None) -> list[Factors]:
    """The factors of each of several projections that are stored as one linear, with `sizes` rows each.

    `ranks`: those of the projections, if `stack_factors` has stacked them.
    """
    starts = [0] * len(sizes) if ranks is None else [sum(ranks[:index]) for index in range(len(ranks))]
    parts = []
    for index, (rows, start) in enumerate(zip(whole[LORA_B].split(list(sizes)), starts, strict=True)):
        columns = slice(start, None if ranks is None else start + ranks[index])
        parts.append({LORA_A: whole[LORA_A][columns], LORA_B: rows[:, columns]})
        if MAGNITUDE in whole:
            parts[-1][MAGNITUDE] = whole[MAGNITUDE].split(list(sizes))[index]
    return parts


def stack_factors(parts: Sequence[Factors]) -> Factors:
    """One A and one B with the updates of all projections below each other."""
    whole = {LORA_A: torch.cat([part[LORA_A] for part in parts])}
    whole[LORA_B] = torch.block_diag(*(part[LORA_B] for part in parts))
    return whole | _stack_magnitudes(parts)


def average_factors(parts: Sequence[Factors]) -> Factors:
    """One A, the mean of all; B is stacked. Its update differs from those of the projections."""
    whole = {LORA_A: torch.stack([part[LORA_A] for part in parts]).mean(dim=0)}
    whole[LORA_B] = torch.cat([part[LORA_B] for part in parts])
    return whole | _stack_magnitudes(parts)


def _stack_magnitudes(parts: Sequence[Factors]) -> Factors:
    return {MAGNITUDE: torch.cat([part[MAGNITUDE] for part in parts])} if MAGNITUDE in parts[0] else {}


def _check_factors(folder: Path, module: str, whole: Factors, rows: int, columns: int, config: dict[str, Any]) -> None:
    a, b, magnitude = (whole.get(kind) for kind in (LORA_A, LORA_B, MAGNITUDE))
    if a is None or b is None or (magnitude is None) == bool(config.get("use_dora")):
        raise CheckpointError(f"{folder}: {module} lacks a factor, or has one too many", f"it has {', '.join(whole)}")
    expected = {LORA_A: (len(a), columns), LORA_B: (rows, len(a)), MAGNITUDE: (rows,)}
    wrong = [kind for kind, tensor in whole.items() if tuple(tensor.shape) != expected[kind]]
    if wrong:
        raise CheckpointError(
            f"{folder}: {module}: {wrong[0]} has shape {list(whole[wrong[0]].shape)}, but the model needs "
            f"{list(expected[wrong[0]])}"
        )


def _scale(config: dict[str, Any], module: str, rank: int) -> float:
    alpha = _pattern_value(config.get("alpha_pattern") or {}, module, config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pattern_value(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """PEFT's rule: the first pattern that is the end of the module's name."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _whole_number(value: float) -> float:
    return round(value) if math.isclose(value, round(value)) else value

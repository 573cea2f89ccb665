"""From the settings of `tuning` to a `TuningPlan`: which linears are tuned, and where the values come from."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import nn

from torchstone import hub
from torchstone.checkpoint.adapter_folder import check_base, is_adapter_folder, open_adapter
from torchstone.checkpoint.load import is_tuned_folder, recorded_base, resolve_model_folder
from torchstone.checkpoint.model_folder import BaseModelInfo, fallback_reason, read_base_model_info
from torchstone.checkpoint.osft_folder import UNUSED_DAYS, SingularVectors, open_osft, read_osft_config
from torchstone.config.schema import Config, TuningConfig
from torchstone.errors import UsageError
from torchstone.models.decoder import EMBEDDING, HEAD
from torchstone.models.execution import ExecutionOptions
from torchstone.models.model import Model
from torchstone.observe.console import Console, count_text
from torchstone.parallel.fsdp import COMPUTE_DTYPE
from torchstone.parallel.local_shards import local_shards
from torchstone.parallel.mesh import ParallelContext, local_rank
from torchstone.tuning.lora import AdapterTensors, LoraAdapter, LoraSpec, parameter_name, split_parameter_name
from torchstone.tuning.osft import (
    OSFT_ADAPTER,
    OSFT_P,
    OSFT_Z,
    FrozenBasis,
    SubspaceProjection,
    frozen_basis,
    frozen_rank,
    split_bf16,
    with_low_vectors,
)
from torchstone.tuning.plan import LoraPlan, OsftPlan, TuningPlan
from torchstone.tuning.quantize import BaseQuantization, check_quantization
from torchstone.tuning.targets import match_modules

ADAPTER_NAME = "default"
MAX_ADAPTER_NAME = 100


def plan_tuning(
    config: Config, base: Path, checkpoint: Path | None, execution: ExecutionOptions, device: torch.device
) -> TuningPlan | None:
    """What a run trains; None for everything. `base`: the folder of model.path; `checkpoint`: what the run resumes."""
    if config.tuning.method == "full":
        return None
    if config.tuning.method == "lora":
        return _plan_lora(config, base, checkpoint, execution, device)
    return _plan_osft(config, base, checkpoint, execution)


def tuning_notes(config: Config, base: Path) -> list[str]:
    """What a new run says about earlier tuning: of its model, and of the adapter that it continues."""
    notes = []
    if is_tuned_folder(base):
        notes.append(f"{base} has only what was tuned of {recorded_base(base)}: both are merged")
    if config.tuning.adapter is not None:
        notes.append(f"continuing the adapter {config.tuning.adapter}, with its own rank, alpha, dropout and targets")
    return notes


def _plan_lora(
    config: Config, base: Path, checkpoint: Path | None, execution: ExecutionOptions, device: torch.device
) -> LoraPlan:
    tuning = config.tuning
    if is_adapter_folder(base):
        raise UsageError(
            f"model.path {base} is an adapter itself",
            f"to train it further: --tuning.adapter {base} and the model that it adapts as --model.path; or merge it "
            "first with torchstone export",
        )
    if is_tuned_folder(base):
        raise UsageError(
            f"model.path {base} is a checkpoint of OSFT, and an adapter needs a whole model",
            f"write one first: torchstone export {base} FOLDER, then --model.path FOLDER",
        )
    model, tensors = read_base_model_info(base, execution), None
    continued = checkpoint
    if checkpoint is None and tuning.adapter is not None:
        continued = resolve_model_folder(tuning.adapter, kind="adapter")
    if continued is None:
        saved = saved_parameters(tuning, model)
        adapter = new_adapter(tuning, model, saved)
    else:
        tensors = open_adapter(continued, model.names, model.shapes, model.linears, ADAPTER_NAME)
        check_base(tensors.base_fingerprint, model.fingerprint, continued, base)
        adapter, saved = tensors.adapter, frozenset(tensors.saved)
    quantization: BaseQuantization | None = None
    quantized = frozenset[str]()
    if tuning.quantize_base != "none":
        check_quantization()
        quantization = BaseQuantization(tuning.quantize_base, COMPUTE_DTYPE[config.training.precision], device.type)
        quantized = frozenset(linear for linear in model.linears if f"{linear}.weight" not in saved)
    frozen = () if tensors is None else tensors.frozen
    if checkpoint is None:
        frozen += _open_frozen_adapters(tuning, model, base)
    given = (*(() if tensors is None else (tensors,)), *frozen)
    warnings = _check_quantization(given, quantization)
    _check_frozen_adapters(adapter, frozen)
    return LoraPlan(
        with_tied_head(saved, model), tensors, _base_name(config, base), model.fingerprint, adapter, frozen,
        config.training.seed, quantized, quantization, warnings,
    )  # fmt: skip


def _check_quantization(adapters: Sequence[AdapterTensors], quantization: BaseQuantization | None) -> tuple[str, ...]:
    """Raises if an adapter was trained with other quantized weights. PEFT does not record how; returns warnings."""
    now = None if quantization is None else quantization.name
    for each in adapters:
        before = None if each.base_quantization is None else each.base_quantization.name
        if each.base_fingerprint is not None and before != now:
            raise UsageError(
                f"the linears of the adapter's model were quantized as {before}, now {now}",
                "use the same --tuning.quantize_base and --training.precision",
            )
    if quantization is None or all(each.base_fingerprint is not None for each in adapters):
        return ()
    return (f"PEFT does not record whether an adapter was trained on quantized weights; here they are {now}",)


def _open_frozen_adapters(tuning: TuningConfig, model: BaseModelInfo, base: Path) -> tuple[AdapterTensors, ...]:
    opened = []
    for name, path in (tuning.frozen_adapters or {}).items():
        # It is the name of a submodule, and of a folder.
        if "." in name or name == ADAPTER_NAME or hasattr(nn.ModuleDict(), name) or len(name) > MAX_ADAPTER_NAME:
            raise UsageError(
                f"tuning.frozen_adapters: an adapter cannot be called {name!r}",
                f"use another name, of at most {MAX_ADAPTER_NAME} characters",
            )
        folder = resolve_model_folder(path)
        tensors = open_adapter(folder, model.names, model.shapes, model.linears, name)
        check_base(tensors.base_fingerprint, model.fingerprint, folder, base)
        if tensors.frozen or tensors.saved:
            kind = "frozen adapters" if tensors.frozen else "modules of the model (modules_to_save)"
            raise UsageError(
                f"tuning.frozen_adapters: {folder} has {kind} besides its factors",
                f"merge it first (torchstone export {path} FOLDER --merge), and use the result as --model.path",
            )
        opened.append(tensors)
    return tuple(opened)


def _check_frozen_adapters(adapter: LoraAdapter, frozen: Sequence[AdapterTensors]) -> None:
    names = [each.adapter.name for each in frozen]
    if len(set(names)) < len(names):
        raise UsageError("tuning.frozen_adapters and the continued adapter have a name in common", "use another name")
    if frozen and any(each.use_dora for each in (adapter, *(each.adapter for each in frozen))):
        raise UsageError(
            "an adapter with DoRA cannot be active with others: it scales all of a weight",
            "leave out tuning.frozen_adapters, or merge one of them first with torchstone export --merge",
        )


def _plan_osft(config: Config, base: Path, checkpoint: Path | None, execution: ExecutionOptions) -> OsftPlan:
    tuning, ratio = config.tuning, config.tuning.unfreeze_rank_ratio
    if is_tuned_folder(base) and fallback_reason(base, execution) is not None:
        raise UsageError(
            f"model.path {base} has only what was trained of a model", "merge it first with torchstone export"
        )
    model = read_base_model_info(base, execution)
    ranks, trained = osft_ranks(tuning, model)
    if checkpoint is not None:
        check_base(read_osft_config(checkpoint).base_fingerprint, model.fingerprint, checkpoint, base)
    values = None if checkpoint is None else open_osft(checkpoint)
    vectors = SingularVectors(model.source, model.shapes, model.fingerprint)
    return OsftPlan(trained, values, _base_name(config, base), model.fingerprint, ranks, ratio, vectors)


def osft_ranks(tuning: TuningConfig, model: BaseModelInfo) -> tuple[dict[str, int], frozenset[str]]:
    """r of the linears that are partly trained, and the parameters that are trained as a whole."""
    ratio = tuning.unfreeze_rank_ratio
    targets = tuned_linears("tuning.osft_targets", tuning.osft_targets, model)
    for name in targets:
        if name in model.not_for_osft:
            raise UsageError(
                f"OSFT cannot tune {name.removeprefix('hf.')}: {model.not_for_osft[name]}",
                "leave it out of --tuning.osft_targets, or use --tuning.method lora",
            )
    ranks = {name: min(shape) - frozen_rank(shape, ratio) for name, shape in _weight_shapes(targets, model).items()}
    whole = {f"{name}.weight" for name, rank in ranks.items() if rank == min(model.shapes[f"{name}.weight"])}
    rest = set(model.shapes) - {f"{name}.weight" for name in targets} if tuning.osft_train_rest else set()
    trained = with_tied_head(frozenset(whole | rest), model)
    ranks = {name: rank for name, rank in ranks.items() if rank and f"{name}.weight" not in whole}
    if not ranks and not trained:
        raise UsageError(
            f"tuning.unfreeze_rank_ratio {ratio:g} trains nothing of the targets, and nothing else is trained",
            "use a larger --tuning.unfreeze_rank_ratio, or --tuning.osft_train_rest true",
        )
    return ranks, trained


def decompose(plan: OsftPlan, device: torch.device, ctx: ParallelContext, console: Console) -> None:
    """Computes the singular vectors of the targets that no earlier run has computed."""
    assert isinstance(plan.vectors, SingularVectors)
    linears = list(plan.ranks)
    with console.progress("singular vectors", len(linears), count_text) as update:
        computed, replaced = plan.vectors.compute(linears, device, ctx, update)
    source = f"{computed} computed" if computed else "all from the cache"
    source += f", {replaced} replaced by those of the first machine" if replaced else ""
    console.info(f"singular vectors of {len(plan.ranks)} linears: {source}, in {plan.vectors.folder}")
    if local_rank() == 0:
        for folder in plan.vectors.remove_unused():
            console.info(f"removed {folder}: no run has used these singular vectors for {UNUSED_DAYS} days")


@torch.no_grad()
def build_projection(
    plan: OsftPlan, model: Model, device: torch.device, has_decay: bool, use_split_bf16: bool = False
) -> SubspaceProjection:
    """The frozen directions of every Z of this rank. `has_decay`: weights decay."""
    assert isinstance(plan.vectors, SingularVectors)
    factors = {
        split_parameter_name(name)[0]: (name, parameter)
        for name, parameter in model.trained_parameters()
        if name.endswith(f".{OSFT_Z}")
    }
    bases = []
    for linear, weight, vectors in plan.vectors.read_weights(list(factors), device):
        assert vectors is not None, f"the singular vectors of {linear} are gone"
        name, parameter = factors[linear]
        shards = local_shards(model.decoder_config, name, parameter.detach())
        rows = slice(0, 0)
        if shards:
            (shard,) = shards
            rows = slice(shard.offset[0], shard.offset[0] + len(shard.tensor))
        rank, p_name = plan.ranks[linear], parameter_name(linear, OSFT_ADAPTER, OSFT_P)
        if plan.values is not None and plan.has_value(p_name):
            p = torch.empty(rank, len(vectors))
            plan.values.read_into(p_name, p, (0, 0))
            vectors = with_low_vectors(vectors, p.to(device))
        basis, initial = frozen_basis(weight, vectors, len(vectors) - rank)[rows].clone(), None
        if has_decay:
            tall = weight if weight.shape[0] >= weight.shape[1] else weight.t()
            initial = (tall.double() @ vectors[:, -rank:].double()).float()[rows].clone()
        if use_split_bf16:
            basis, initial = split_bf16(basis), None if initial is None else initial.bfloat16()
        bases.append(FrozenBasis(parameter, basis, initial))
    return SubspaceProjection(bases)


def new_adapter(tuning: TuningConfig, model: BaseModelInfo, saved: Collection[str]) -> LoraAdapter:
    """An adapter for the linears that tuning.lora_targets selects, except those that are trained as they are (`saved`),
    as in PEFT."""
    rank = tuning.lora_rank
    alpha = 2 * rank if tuning.lora_alpha is None else tuning.lora_alpha
    spec = LoraSpec(rank, alpha / (math.sqrt(rank) if tuning.lora_rslora else rank))
    targets = tuned_linears("tuning.lora_targets", tuning.lora_targets, model)
    linears = {name: spec for name in targets if f"{name}.weight" not in saved}
    if not linears:
        raise UsageError(
            "tuning.modules_to_save trains all of tuning.lora_targets as they are, so that none gets an adapter",
            "leave them out of one of the two",
        )
    return LoraAdapter(ADAPTER_NAME, linears, tuning.lora_dropout, tuning.lora_dora, tuning.lora_rslora)


def tuned_linears(key: str, targets: tuple[str, ...], model: BaseModelInfo) -> list[str]:
    """The linears that the setting `key` selects by the names of Hugging Face modules."""
    if not model.linears:
        raise UsageError(f"{key}: the model has no nn.Linear in its blocks", "use --tuning.method full")
    weights = model.names.stored_tensors(f"{linear}.weight" for linear in model.linears)
    stored = {name.removesuffix(".weight"): spec for name, spec in weights.items()}
    modules = match_modules(key, targets, stored)
    return [name.removesuffix(".weight") for module in modules for name in stored[module].parameter_names]


def saved_parameters(tuning: TuningConfig, model: BaseModelInfo) -> frozenset[str]:
    """The model's parameters that tuning.modules_to_save selects."""
    if not tuning.modules_to_save:
        return frozenset()
    is_native = EMBEDDING in model.shapes
    stored = model.names.stored_tensors(dict.fromkeys([*model.shapes, *([HEAD] if is_native else [])]))
    modules = dict.fromkeys(name.rpartition(".")[0] for name in stored)
    selected = set(match_modules("tuning.modules_to_save", tuning.modules_to_save, modules))
    if model.is_tied and not is_native and any("embed" in name or "head" in name for name in selected):
        raise UsageError(
            "tuning.modules_to_save: the head of this model is tied to its embedding, which cannot be saved with an "
            "adapter in the Transformers fallback",
            "leave them out, or use --tuning.method full",
        )
    return frozenset(
        parameter
        for name, spec in stored.items()
        if name.rpartition(".")[0] in selected
        for parameter in spec.parameter_names
    )


def with_tied_head(parameters: frozenset[str], model: BaseModelInfo) -> frozenset[str]:
    """A tied head is one parameter with the embedding, or two with the same values at both ends of a pipeline."""
    is_native = EMBEDDING in model.shapes
    tied = {EMBEDDING, HEAD} if model.is_tied and is_native and parameters & {EMBEDDING, HEAD} else set()
    return parameters | tied


def _weight_shapes(linears: list[str], model: BaseModelInfo) -> dict[str, tuple[int, ...]]:
    return {name: model.shapes[f"{name}.weight"] for name in linears}


def _base_name(config: Config, base: Path) -> str:
    assert config.model.path is not None
    return config.model.path if hub.parse_model(config.model.path) else str(base.resolve())

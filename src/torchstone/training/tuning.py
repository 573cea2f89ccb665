"""From the settings of `tuning` to a `TuningPlan`: which linears get adapters, and where their values come from."""

from __future__ import annotations

import math
from pathlib import Path

from torchstone import hub
from torchstone.checkpoint.adapter_folder import check_base, is_adapter_folder, open_adapter
from torchstone.checkpoint.load import resolve_model_folder
from torchstone.checkpoint.model_folder import BaseModelInfo, read_base_model_info
from torchstone.config.schema import Config, TuningConfig
from torchstone.errors import UsageError
from torchstone.models.decoder import EMBEDDING, HEAD
from torchstone.models.execution import ExecutionOptions
from torchstone.tuning.lora import LoraAdapter, LoraSpec
from torchstone.tuning.plan import TuningPlan
from torchstone.tuning.targets import match_modules

ADAPTER_NAME = "default"


def plan_tuning(config: Config, base: Path, checkpoint: Path | None, execution: ExecutionOptions) -> TuningPlan | None:
    """What a run trains; None for everything. `base`: the folder of model.path; `checkpoint`: what the run resumes."""
    tuning = config.tuning
    if tuning.method == "full":
        return None
    if is_adapter_folder(base):
        raise UsageError(
            f"model.path {base} is an adapter itself",
            f"to train it further: --tuning.adapter {base} and the model that it adapts as --model.path; or merge it "
            "first with torchstone export",
        )
    model, tensors = read_base_model_info(base, execution), None
    continued = checkpoint
    if checkpoint is None and tuning.adapter is not None:
        continued = resolve_model_folder(tuning.adapter)
    if continued is None:
        adapter, saved = new_adapter(tuning, model), saved_parameters(tuning, model)
    else:
        tensors = open_adapter(continued, model.names, model.shapes, ADAPTER_NAME)
        check_base(tensors, base, model.fingerprint)
        adapter, saved = tensors.adapter, frozenset(tensors.saved)
    if model.is_tied and saved & {EMBEDDING, HEAD}:
        # One parameter, or two with the same values at both ends of a pipeline.
        saved |= {EMBEDDING, HEAD}
    assert config.model.path is not None
    name = config.model.path if hub.parse_model(config.model.path) else str(base.resolve())
    return TuningPlan((adapter,), ADAPTER_NAME, saved, tensors, config.training.seed, name, model.fingerprint)


def new_adapter(tuning: TuningConfig, model: BaseModelInfo) -> LoraAdapter:
    """An adapter for the linears that tuning.lora_targets selects."""
    stored = {name.removesuffix(".weight"): spec for name, spec in model.names.stored_tensors(model.linears).items()}
    rank = tuning.lora_rank
    alpha = 2 * rank if tuning.lora_alpha is None else tuning.lora_alpha
    spec = LoraSpec(rank, alpha / (math.sqrt(rank) if tuning.lora_rslora else rank))
    linears = {
        name.removesuffix(".weight"): spec
        for module in match_modules("tuning.lora_targets", tuning.lora_targets, stored)
        for name in stored[module].parameter_names
    }
    return LoraAdapter(ADAPTER_NAME, linears, tuning.lora_dropout, tuning.lora_dora, tuning.lora_rslora)


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

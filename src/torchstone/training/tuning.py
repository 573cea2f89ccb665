"""From the settings of `tuning` to a `TuningPlan`: which linears get adapters, and where their values come from."""

from __future__ import annotations

import math
from pathlib import Path

from torchstone import hub
from torchstone.checkpoint.adapter_folder import CONFIG_FILE, check_base, fingerprint, open_adapter
from torchstone.checkpoint.load import resolve_model_folder
from torchstone.checkpoint.model_folder import decoder_shapes, open_weights, read_model_config
from torchstone.checkpoint.weight_files import Shapes
from torchstone.checkpoint.weight_names import WEIGHT_NAMES, WeightNames
from torchstone.config.schema import Config, TuningConfig
from torchstone.errors import UsageError
from torchstone.models.decoder import EMBEDDING, HEAD
from torchstone.tuning.lora import LoraAdapter, LoraSpec
from torchstone.tuning.plan import TuningPlan
from torchstone.tuning.targets import match_modules

ADAPTER_NAME = "default"


def plan_tuning(config: Config, base: Path, checkpoint: Path | None) -> TuningPlan | None:
    """What a run trains; None for everything. `base`: the folder of model.path; `checkpoint`: what the run resumes."""
    tuning = config.tuning
    if tuning.method == "full":
        return None
    if (base / CONFIG_FILE).is_file():
        raise UsageError(
            f"model.path {base} is an adapter itself",
            f"to train it further: --tuning.adapter {base} and the model that it adapts as --model.path; or merge it "
            "first with torchstone export",
        )
    hf_config, _, decoder_config = read_model_config(base)
    names, shapes = WEIGHT_NAMES[hf_config["model_type"]], decoder_shapes(decoder_config)
    base_fingerprint = fingerprint(open_weights(base, hf_config["model_type"], decoder_config), shapes)
    continued, tensors = checkpoint, None
    if checkpoint is None and tuning.adapter is not None:
        continued = resolve_model_folder(tuning.adapter)
    if continued is None:
        adapter, saved = new_adapter(tuning, names, shapes), saved_parameters(tuning, names, shapes)
    else:
        tensors = open_adapter(continued, names, shapes, ADAPTER_NAME)
        check_base(tensors, base, base_fingerprint)
        adapter, saved = tensors.adapter, frozenset(tensors.saved)
    if decoder_config.tied and saved & {EMBEDDING, HEAD}:
        # One parameter, or two with the same values at both ends of a pipeline.
        saved |= {EMBEDDING, HEAD}
    assert config.model.path is not None
    name = config.model.path if hub.parse_model(config.model.path) else str(base.resolve())
    return TuningPlan((adapter,), ADAPTER_NAME, saved, tensors, config.training.seed, name, base_fingerprint)


def new_adapter(tuning: TuningConfig, names: WeightNames, shapes: Shapes) -> LoraAdapter:
    """An adapter for the linears of the blocks that tuning.lora_targets selects."""
    weights = [name for name, shape in shapes.items() if name.startswith("layers.") and len(shape) == 2]
    stored = {name.removesuffix(".weight"): spec for name, spec in names.stored_tensors(weights).items()}
    rank = tuning.lora_rank
    alpha = 2 * rank if tuning.lora_alpha is None else tuning.lora_alpha
    spec = LoraSpec(rank, alpha / (math.sqrt(rank) if tuning.lora_rslora else rank))
    linears = {
        name.removesuffix(".weight"): spec
        for module in match_modules("tuning.lora_targets", tuning.lora_targets, stored)
        for name in stored[module].parameter_names
    }
    return LoraAdapter(ADAPTER_NAME, linears, tuning.lora_dropout, tuning.lora_dora, tuning.lora_rslora)


def saved_parameters(tuning: TuningConfig, names: WeightNames, shapes: Shapes) -> frozenset[str]:
    """The model's parameters that tuning.modules_to_save selects."""
    if not tuning.modules_to_save:
        return frozenset()
    stored = names.stored_tensors(dict.fromkeys([*shapes, HEAD]))
    modules = dict.fromkeys(name.rpartition(".")[0] for name in stored)
    selected = set(match_modules("tuning.modules_to_save", tuning.modules_to_save, modules))
    return frozenset(
        parameter
        for name, spec in stored.items()
        if name.rpartition(".")[0] in selected
        for parameter in spec.parameter_names
    )

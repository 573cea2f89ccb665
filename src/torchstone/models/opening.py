"""From a folder, or from a config.json that was just made, to a model that is ready to run.

What is wrong with a folder, or cannot be run here as asked for, is found before its weights are read (`check_folder`),
so that nobody waits for data to be tokenized first. Which implementation opens it, and why, is in the notes.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torchstone.models.attention import Choice, choose
from torchstone.models.decoder import Decoder, DecoderConfig
from torchstone.models.execution import AS_IT_COMES, Execution, check_compiler, check_fallback_execution
from torchstone.models.fallback import check_fallback, load_fallback
from torchstone.models.families import FAMILIES, dropout_note
from torchstone.models.liger import choose_liger
from torchstone.models.model import GENERATION_FILE, Model, Native, Transformers
from torchstone.models.probing import WAYS
from torchstone.models.weights import Files, NotNative, read_config, read_shape, tensors_of

# Spellings of older files that are still read, and what tools leave behind.
OLD_KEYS = ("rope_scaling", "rope_theta", "torch_dtype", "dtype", "partial_rotary_factor", "transformers_version")
ROPE_KEYS = ("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor",
             "beta_fast", "beta_slow", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "mscale",
             "mscale_all_dim", "truncate", "partial_rotary_factor")  # fmt: skip


def new_model(
    hf_config: dict[str, Any],
    std: float,
    seed: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    execution: Execution = AS_IT_COMES,
) -> Native:
    """A model of the family and shape that `hf_config` describes, its weights drawn from `seed`."""
    family = FAMILIES[hf_config["model_type"]]
    # Padding is never trained on here, so that every row of a new model may learn.
    config = replace(family.read(hf_config), padding_row=None)
    choice = _choice(config, execution, device, dtype)
    with device:
        decoder = Decoder(config, choice.backend, execution.fused)
    decoder.initialise(std, seed)
    model = Native(decoder.to(dtype), hf_config, notes=[_said(choice)], family=family)
    model.execute(execution)
    return model


def load_model(
    folder: Path, device: torch.device, dtype: torch.dtype = torch.float32, execution: Execution = AS_IT_COMES
) -> Model:
    """The model of a Hugging Face folder, complete: every weight read, none left over."""
    why_not = why_not_native(folder, execution)
    if why_not is not None:
        module = load_fallback(folder, execution.attention, device, dtype, execution.trust_remote_code)
        notes = [f"it runs in Transformers ({why_not})", f"attention: {module.hf.config._attn_implementation}"]
        if module.packs is not None:
            notes.append(f"packed documents are kept apart by {WAYS[module.packs]}, as was measured")
        model: Model = Transformers(
            module, read_config(folder), module.generation_config_file, notes=notes, warnings=module.notes
        )
    else:
        model = _load_native(folder, device, dtype, execution)
    model.execute(execution)
    return model


def why_not_native(folder: Path, execution: Execution) -> str | None:
    """Why a folder's model is not to be computed by the decoder here; a folder that is no model's is refused."""
    implementation, hf_config = execution.implementation, read_config(folder)
    if implementation == "fallback":
        return "as asked for"
    if implementation == "auto" and execution.trust_remote_code and _own_code(hf_config):
        return f"{_own_code(hf_config)} of its folder, which is trusted"
    if implementation == "auto" and _trained_by(folder) == "fallback":
        return "as the run that saved it"
    try:
        read_shape(folder)
    except NotNative as error:
        if implementation == "native":
            raise
        return error.message
    return None


def check_folder(folder: Path, device: torch.device, dtype: torch.dtype, execution: Execution = AS_IT_COMES) -> None:
    """Refuses a folder that does not hold a model, whole and to be run so, before weights or data are read."""
    if why_not_native(folder, execution) is not None:
        check_fallback(folder, execution.trust_remote_code)
        check_fallback_execution(execution)
    else:
        _, _, config = read_shape(folder)
        tensors_of(folder)
        _check_native_execution(config, device, dtype, execution)


def check_new(hf_config: dict[str, Any], device: torch.device, dtype: torch.dtype, execution: Execution) -> None:
    """The same for a model that is yet to be made."""
    config = FAMILIES[hf_config["model_type"]].read(hf_config)
    _check_native_execution(config, device, dtype, execution)


def _own_code(hf_config: dict[str, Any]) -> str | None:
    """The class that a folder brings along for a causal model."""
    named = hf_config.get("auto_map")
    return named.get("AutoModelForCausalLM") if isinstance(named, dict) else None


def _trained_by(folder: Path) -> str | None:
    """The implementation by which a checkpoint's run computed; None for other folders."""
    try:
        return json.loads((folder / "state.json").read_text()).get("implementation")
    except (OSError, ValueError, AttributeError):
        return None


def _check_native_execution(
    config: DecoderConfig, device: torch.device, dtype: torch.dtype, execution: Execution
) -> None:
    _choice(config, execution, device, dtype)
    choose_liger(execution.liger, config, execution.compile, device)
    if execution.compile != "none":
        check_compiler(device)


def _misspelt(hf_config: dict[str, Any]) -> list[str]:
    """Keys that Transformers does not know, but nearly: a typing error there changes a model without a word."""
    from transformers import AutoConfig

    own = AutoConfig.for_model(hf_config["model_type"]).to_dict()
    known = {*(key for key in own if not key.startswith("_")), *OLD_KEYS}
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling")
    pairs = [(key, known) for key in hf_config]
    if isinstance(rope, dict):
        pairs += [(key, set(ROPE_KEYS)) for key, value in rope.items() if not isinstance(value, dict)]
    found = []
    for key, names in pairs:
        near = difflib.get_close_matches(key, names, 1, cutoff=0.88) if key not in names else []
        if near:
            found.append(f"config.json: {key} is no key of this model, and has no effect (did you mean {near[0]}?)")
    return found


def _load_native(folder: Path, device: torch.device, dtype: torch.dtype, execution: Execution) -> Native:
    hf_config, family, config = read_shape(folder)
    choice = _choice(config, execution, device, dtype)
    with torch.device("meta"):
        decoder = Decoder(config, choice.backend, execution.fused).to(dtype)
    files = Files(folder, family, decoder)
    decoder.to_empty(device=device)
    decoder.tie()
    files.load(decoder)
    generation = (folder / GENERATION_FILE).read_bytes() if (folder / GENERATION_FILE).is_file() else None
    note = dropout_note(hf_config)
    warnings = [] if note is None else [note]
    if _own_code(hf_config):
        warnings.append(f"config.json names code of its own ({_own_code(hf_config)}), which is not run")
    return Native(
        decoder,
        hf_config,
        generation,
        notes=[_said(choice)],
        warnings=warnings + _misspelt(hf_config),
        family=family,
    )


def _said(choice: Choice) -> str:
    return f"attention: {choice.backend} ({choice.reason})"


def _choice(config: DecoderConfig, execution: Execution, device: torch.device, dtype: torch.dtype) -> Choice:
    return choose(
        execution.attention, execution.packed, config.window, config.attention_softcap, config.head_size, device, dtype
    )

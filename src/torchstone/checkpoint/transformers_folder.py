"""Loads and saves models of the Transformers fallback.

Transformers is lenient where a trainer must not be: it initializes weights that a file lacks, ignores those it does not
know, and mentions both in a log. Here both are errors that name the folder and the weights, as are pickles, quantized
weights, adapters and untrusted code; most are found before a weight is read. What only changes how a model trains
(dropout, a router's auxiliary loss) becomes a warning.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchstone.checkpoint.weight_files import list_names, open_tensors
from torchstone.errors import CheckpointError, UsageError, first_line
from torchstone.models.fallback.module import (
    FallbackModule,
    default_generation_config,
    eval_mode,
    hf_loss_function,
)
from torchstone.models.fallback.probing import (
    TOLERANCES,
    check_causal,
    find_packing_method,
    get_tolerances,
    is_positive,
    make_probe_batch,
)
from torchstone.models.families import check_sizes
from torchstone.rng import fork_rng

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_SHARD_SIZE = "5GB"
AUXILIARY_LOSS_KEYS = ("router_aux_loss_coef", "aux_loss_alpha", "aux_loss_coef", "router_z_loss_coef")
DROPOUT_KEY = re.compile(r"^(?!classifier|summary).*(dropout|pdrop|layerdrop|dropout_prob|dropout_rate)$")


def read_hf_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder."""
    path = folder / "config.json"
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        problem = "is not a Hugging Face folder (no config.json)" if folder.is_dir() else "does not exist"
        raise UsageError(f"model folder {folder} {problem}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a readable JSON file: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path}: not a JSON object")
    try:
        check_sizes(value)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: does not describe a model: {error}") from None
    return value


def load_fallback(
    folder: Path, attention: str, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False
) -> FallbackModule:
    """Loads and probes the model of a folder, and sets training mode. The RNG state is preserved.

    `attention` is auto, sdpa or eager.
    """
    device = torch.device(device)
    if attention not in ("auto", "sdpa", "eager"):
        raise UsageError(
            f"model.attention {attention}: the Transformers fallback supports only sdpa and eager",
            "use --model.attention auto",
        )
    if dtype not in TOLERANCES:
        raise UsageError(
            f"the Transformers fallback does not support {dtype}", f"use one of {', '.join(map(str, TOLERANCES))}"
        )
    config = _read_transformers_config(folder, trust_remote_code)
    _check_weight_files(folder)
    with fork_rng(device), capture_warnings() as captured:
        hf = _load_complete(folder, config, attention, dtype, trust_remote_code).to(device)
        module = FallbackModule(hf, None)
        with torch.no_grad(), eval_mode(module):
            check_causal(module, folder)
            module.packing_method, module.packing_error = find_packing_method(module)
            module.warnings = [*_config_warnings(config), *_loss_warnings(module)]
            _keep_generation_config(module, folder)
    module.warnings += [f"Transformers warns: {line}" for line in dict.fromkeys(captured)]
    module.train()
    return module


def check_fallback_folder(folder: Path, trust_remote_code: bool = False) -> None:
    """Raises the errors of `load_fallback` that can be found without reading the weights."""
    _read_transformers_config(folder, trust_remote_code)
    _check_weight_files(folder)


def empty_fallback(folder: Path, trust_remote_code: bool = False) -> PreTrainedModel:
    """The modules of a folder's model, without values."""
    from transformers import AutoModelForCausalLM

    config = _read_transformers_config(folder, trust_remote_code)
    with torch.device("meta"), capture_warnings():
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def has_tied_head(hf: PreTrainedModel) -> bool:
    head = hf.get_output_embeddings()
    return head is not None and head.weight is hf.get_input_embeddings().weight


def save_fallback(module: FallbackModule, generation_config: bytes | None, folder: Path, rank: int = 0) -> None:
    """Saves a folder that Transformers loads back bit for bit, with the model's own code, if any.

    Rank 0 gathers and writes a sharded model, so all ranks must call this.
    """
    state = full_state_dict(module.hf, rank)
    if rank > 0:
        return
    with capture_warnings():
        if generation_config is None:
            module.hf.save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE, state_dict=state)
            return
        with default_generation_config(module.hf):
            module.hf.save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE, state_dict=state)
    (folder / "generation_config.json").write_bytes(generation_config)


def full_state_dict(hf: PreTrainedModel, rank: int = 0) -> dict[str, Tensor] | None:
    """The unsharded state dict of a sharded model on rank 0's CPU; None on other ranks, or if it is not sharded."""
    if not any(isinstance(parameter, DTensor) for parameter in hf.parameters()):
        return None
    state: dict[str, Tensor] = {}
    gathered: dict[int, Tensor] = {}
    for name, tensor in hf.state_dict(keep_vars=True).items():
        if id(tensor) not in gathered:
            # One tensor at a time; a tied one once, so that it stays tied.
            full = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
            gathered[id(tensor)] = full.cpu() if rank == 0 else full.new_empty(0)
        state[name] = gathered[id(tensor)]
    return state if rank == 0 else None


@contextmanager
def capture_warnings() -> Iterator[list[str]]:
    """Collects what Transformers would log, and turns its progress bars off."""
    from transformers.utils import logging as transformers_logging

    captured: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: captured.append(first_line(record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    handlers, level, has_bars = logger.handlers, logger.level, transformers_logging.is_progress_bar_enabled()
    logger.handlers = [handler]
    logger.setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield captured
    finally:
        logger.handlers = handlers
        logger.setLevel(level)
        if has_bars:
            transformers_logging.enable_progress_bar()


def _read_transformers_config(folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    path = folder / "config.json"
    _check_supported(folder, read_hf_config(folder), trust_remote_code)
    try:
        with capture_warnings():
            config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise UsageError(f"{path}: does not describe a model: {type(error).__name__}: {first_line(error)}") from error
    if config.is_encoder_decoder:
        raise UsageError(f"{path}: an encoder-decoder is not a causal decoder and cannot be trained here")
    return config


def _check_weight_files(folder: Path) -> None:
    for name, file in open_tensors(folder).items():
        dtype = file.tensors[name].dtype
        if name.endswith(".weight") and not dtype.is_floating_point:
            raise CheckpointError(f"{file.path}: {name} has dtype {dtype}, which cannot be trained")


def _check_supported(folder: Path, hf_config: dict[str, Any], trust_remote_code: bool) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    path = folder / "config.json"
    model_type = hf_config.get("model_type")
    is_known = isinstance(model_type, str) and model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if hf_config.get("quantization_config") is not None:
        raise UsageError(f"{path}: the weights are quantized and cannot be trained", "use the unquantized model")
    if hf_config.get("auto_map") and not trust_remote_code:
        hint = "read the folder's code, then allow it with --model.trust_remote_code true (export: --trust-remote-code)"
        if is_known:
            hint += f'; or remove "auto_map" from config.json to use {model_type} of Transformers'
        raise UsageError(f"{path}: the model has its own code (auto_map), which is not run without permission", hint)
    if hf_config.get("is_encoder_decoder"):
        raise UsageError(
            f"{path}: {model_type} is an encoder-decoder, not a causal decoder, and cannot be trained here"
        )
    if not is_known and not hf_config.get("auto_map"):
        raise UsageError(
            f"{path}: model_type {model_type!r} is not a causal language model of Transformers",
            "use a model that AutoModelForCausalLM loads, or a trusted folder with its own code (auto_map)",
        )


def _load_complete(
    folder: Path, config: Any, attention: str, dtype: torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    """The model with every weight from its files; anything missing or left over is an error."""
    from transformers import AutoModelForCausalLM

    try:
        hf, info = AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=config,
            attn_implementation=_attn_implementation(config, attention),
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            # Not to ignore mismatches, but to get their names in the loading info.
            ignore_mismatched_sizes=True,
        )
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: the weights cannot be loaded: {first_line(error)}") from error
    except Exception as error:
        raise UsageError(
            f"{folder}: Transformers cannot build the model: {type(error).__name__}: {first_line(error)}"
        ) from error
    _check_loading_info(folder, info)
    if hf.config._attn_implementation not in ("sdpa", "eager"):
        raise UsageError(
            f"{folder}: Transformers chose attention {hf.config._attn_implementation!r}", "use --model.attention eager"
        )
    return hf


def _attn_implementation(config: Any, attention: str) -> str | None:
    """None lets Transformers choose: sdpa if the model has it, otherwise eager."""
    has_softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    if has_softcap and attention == "sdpa":
        raise UsageError("the model has a soft cap on attention scores, which sdpa lacks", "use --model.attention auto")
    if has_softcap or attention == "eager":
        return "eager"
    return "sdpa" if attention == "sdpa" else None


def _check_loading_info(folder: Path, info: dict[str, Any]) -> None:
    mismatched = [f"{name} (file {list(has)}, model {list(wants)})" for name, has, wants in info["mismatched_keys"]]
    names = {
        "missing": list(info["missing_keys"]),
        "unknown": list(info["unexpected_keys"]),
        "wrong shape": mismatched,
        "failed": list(info.get("error_msgs") or []),
    }
    if any(names.values()):
        raise CheckpointError(f"{folder}: the weights do not match config.json", list_names(**names))


def _config_warnings(config: Any) -> list[str]:
    settings = config.get_text_config().to_dict()
    warnings = [
        f"the router's auxiliary loss ({key} {settings[key]}) is not part of the loss here"
        for key in AUXILIARY_LOSS_KEYS
        if is_positive(settings.get(key))
    ]
    dropouts = [
        f"{key} {value}" for key, value in sorted(settings.items()) if DROPOUT_KEY.match(key) and is_positive(value)
    ]
    if dropouts:
        warnings.append(f"training applies the dropout of config.json ({', '.join(dropouts)})")
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
        warnings.append(
            f"rope_type {rope['rope_type']}: in Transformers the longest sequence of a micro-batch sets the frequencies"
            " of all, so one beyond the original length changes the others"
        )
    return warnings


def _keep_generation_config(module: FallbackModule, folder: Path) -> None:
    """Keeps generation_config.json as it is; without one, drops settings that Transformers will refuse to write."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        module.generation_config = (folder / "generation_config.json").read_bytes()
        return
    try:
        if module.hf.can_generate():
            module.hf.generation_config.validate(strict=True)
    except ValueError as error:
        module.hf.generation_config = GenerationConfig()
        module.warnings.append(f"the sampling settings of config.json will not be saved: {first_line(error)}")


def _loss_warnings(module: FallbackModule) -> list[str]:
    """A warning if `hf(..., labels=...)` does not use our loss function: some classes compute the loss in forward."""
    batch = make_probe_batch([[9]], module)
    expected = hf_loss_function(module(batch.ids, batch.positions), batch.ids)
    name = type(module.hf).__name__
    try:
        loss = module.hf(input_ids=batch.ids, labels=batch.ids).loss
    except Exception as error:
        return [f"{name} has no loss of its own ({type(error).__name__}); training here does not need it"]
    if loss is None or not torch.allclose(loss.float(), expected, rtol=get_tolerances(module).rounding):
        return [f"{name} called with labels computes its own loss, not the sum of token losses used here"]
    return []

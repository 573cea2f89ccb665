"""Hugging Face folders that hold a causal model which only Transformers knows: read, checked, loaded whole.

Transformers is lenient where a trainer must not be: it initialises anew what a file lacks, leaves unread what it does
not know, and mentions both in a log. Here each is an error that names the folder and what is wrong, as are pickles,
quantized weights, adapters and code that was not trusted; most are found before a weight is read. What only changes how
a model trains (dropout, a router's auxiliary loss) becomes a note.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchstone.errors import CheckpointError, UsageError
from torchstone.models.weights import read_config as read_json
from torchstone.models.weights import tensors_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LISTED = 8
AUXILIARY_LOSSES = ("router_aux_loss_coef", "aux_loss_alpha", "aux_loss_coef", "router_z_loss_coef")
DROPOUT = re.compile(r"^(?!classifier|summary).*(dropout|pdrop|layerdrop|dropout_prob|dropout_rate)$")


def read_config(folder: Path, trust_remote_code: bool) -> Any:
    """Transformers' config of the folder, once it is clear that the folder is one this module can take."""
    from transformers import AutoConfig

    place = folder / "config.json"
    raw = read_json(folder)
    _check_supported(folder, raw, trust_remote_code)
    try:
        with quiet():
            config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise UsageError(f"{place}: does not describe a model: {type(error).__name__}: {first_line(error)}") from error
    if config.is_encoder_decoder:
        raise UsageError(f"{place}: an encoder-decoder is not a causal decoder and cannot be trained here")
    return config


def check_files(folder: Path) -> None:
    """Every file of weights is there once, is safetensors, has its full length and holds numbers to train."""
    for name, file in tensors_of(folder).items():
        if name.endswith(".weight") and not file.dtype(name).is_floating_point:
            raise CheckpointError(
                f"{file.path}: {name} has whole numbers ({file.dtype(name)}), which cannot be trained"
            )


def load_complete(
    folder: Path, config: Any, attention: str, dtype: torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    """The complete model, or an error: what Transformers would initialise anew or leave unread is listed."""
    from transformers import AutoModelForCausalLM

    try:
        hf, found = AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=config,
            attn_implementation=_implementation(config, attention),
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            # Not to ignore them: a mismatch is then reported with the rest instead of ending without a name.
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
    _check_complete(folder, found)
    if hf.config._attn_implementation not in ("sdpa", "eager"):
        raise UsageError(f"{folder}: Transformers chose attention {hf.config._attn_implementation!r}", "ask for eager")
    return hf


def notes_on(config: Any) -> list[str]:
    settings = config.get_text_config().to_dict()
    notes = [
        f"the router's auxiliary loss ({key} {settings[key]}) is not part of the loss here"
        for key in AUXILIARY_LOSSES
        if positive(settings.get(key))
    ]
    drops = [f"{key} {value}" for key, value in sorted(settings.items()) if DROPOUT.match(key) and positive(value)]
    if drops:
        notes.append(f"training applies the dropout of config.json as Transformers does ({', '.join(drops)})")
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
        notes.append(
            f"rope_type {rope['rope_type']}: Transformers turns all sequences of a micro-batch by the longest of them, "
            "so a sequence beyond the original length changes its neighbours"
        )
    return notes


@contextmanager
def quiet() -> Iterator[list[str]]:
    """Progress bars off; what Transformers would print is collected for the notes instead."""
    from transformers.utils import logging as transformers_logging

    said: list[str] = []
    collector = logging.Handler(logging.WARNING)
    collector.emit = lambda record: said.append(first_line(record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    handlers, level, bars = logger.handlers, logger.level, transformers_logging.is_progress_bar_enabled()
    logger.handlers = [collector]
    logger.setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield said
    finally:
        logger.handlers = handlers
        logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()


def first_line(message: object) -> str:
    lines = str(message).strip().splitlines()
    return lines[0] if lines else type(message).__name__


def positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _check_supported(folder: Path, raw: dict[str, Any], trust_remote_code: bool) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    place = folder / "config.json"
    kind = raw.get("model_type")
    known = isinstance(kind, str) and kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if (folder / "adapter_config.json").exists():
        raise UsageError(f"{folder}: holds an adapter (adapter_config.json)", "merge it into its model first")
    if raw.get("quantization_config") is not None:
        raise UsageError(f"{place}: the weights are quantized and cannot be trained", "start from the unquantized ones")
    if raw.get("auto_map") and not trust_remote_code:
        hint = (
            "--model.trust_remote_code true (--trust-remote-code, where nothing is trained) runs the code that lies in "
            "the folder: read it first"
        )
        if known:
            hint += f'; or remove "auto_map" from config.json to use the {kind} that Transformers has'
        raise UsageError(f"{place}: the model comes with its own code (auto_map), which is not run unasked", hint)
    if raw.get("is_encoder_decoder"):
        raise UsageError(f"{place}: an encoder-decoder ({kind}) is not a causal decoder and cannot be trained here")
    if not known and not raw.get("auto_map"):
        raise UsageError(
            f"{place}: model_type {kind!r} is not a causal language model that Transformers knows",
            "what AutoModelForCausalLM loads is supported, and folders with code of their own (auto_map) when trusted",
        )


def _implementation(config: Any, attention: str) -> str | None:
    """None lets Transformers take sdpa where the model has it, else eager."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    if capped and attention == "sdpa":
        raise UsageError("the model caps its attention scores, which sdpa cannot compute", "use --model.attention auto")
    if capped or attention == "eager":
        return "eager"
    return "sdpa" if attention == "sdpa" else None


def _check_complete(folder: Path, found: dict[str, Any]) -> None:
    mismatched = [f"{name} (file {list(has)}, model {list(wants)})" for name, has, wants in found["mismatched_keys"]]
    lists = {
        "missing": sorted(found["missing_keys"]),
        "unknown": sorted(found["unexpected_keys"]),
        "of another shape": sorted(mismatched),
        "failed": sorted(found.get("error_msgs") or []),
    }
    if any(lists.values()):
        raise CheckpointError(
            f"{folder}: the weights do not fit config.json",
            "; ".join(f"{what}: {_listed(names)}" for what, names in lists.items() if names),
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more

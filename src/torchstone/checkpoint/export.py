"""Exports a checkpoint of any layout to a Hugging Face folder, and verifies it by loading it in Transformers.

Native weights are copied from file to file, so a model need not fit in memory to be written; verifying loads it. The
verification is Transformers' own: the folder is loaded with AutoModelForCausalLM, every tensor is compared bit for bit
with the source, and the logits of a fixed text are compared with ours.
"""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchstone.atomic import check_utf8, new_folder
from torchstone.checkpoint.load import read_state, resolve_model_folder
from torchstone.checkpoint.manifest import read_json
from torchstone.checkpoint.model_folder import fallback_reason, load_model, open_weights, read_model_config
from torchstone.checkpoint.save import STATE_FILE, hf_state_dict, save_model, save_tokenizer, write_hf_config
from torchstone.checkpoint.shard_files import WEIGHTS, shard_files
from torchstone.checkpoint.tensor_files import open_tensor_file
from torchstone.checkpoint.transformers_folder import read_hf_config
from torchstone.checkpoint.weight_files import weight_file_paths, write_weights
from torchstone.checkpoint.weight_names import LLAMA, WEIGHT_NAMES
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.errors import CheckpointError, UsageError
from torchstone.models.decoder import Decoder
from torchstone.models.execution import ExecutionOptions
from torchstone.models.model import GENERATION_CONFIG, Model, NativeModel

CPU = torch.device("cpu")
# Relative to the largest logit, or to 1 if all are smaller.
LOGITS_TOLERANCE = 1e-5


def export_model(
    source: str, target: Path, dtype: str = "auto", verify: bool = True, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Writes `source` (a run, a checkpoint or a folder) to `target`; returns what was written and measured."""
    folder = resolve_model_folder(source, trust_remote_code=trust_remote_code)
    check_utf8(target)
    # The new folder is renamed to the target: a link would be replaced.
    target = target.resolve()
    if target.is_file():
        raise UsageError(f"{target} is a file", "export into a new folder")
    if target.exists() and any(target.iterdir()):
        raise UsageError(f"{target} exists and is not empty", "export into a new folder")
    execution = ExecutionOptions(trust_remote_code=trust_remote_code)
    target_dtype, dtype_reason = resolve_dtype(folder, dtype)
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    is_native = fallback_reason(folder, execution) is None
    with new_folder(target) as work:
        if is_native:
            _copy_native(folder, target_dtype, work)
        else:
            save_model(load_model(folder, CPU, target_dtype, execution), work)
        save_tokenizer(tokenizer, work)
        parameters = sum(tensor.numel() for tensor in _stored_tensors(weight_file_paths(work)))
        difference = None
        if verify:
            model = load_model(folder, CPU, target_dtype, execution)
            difference = verify_folder(work, model, tokenizer, trust_remote_code)
    return {
        "source": str(folder),
        "folder": str(target),
        "parameters": parameters,
        "dtype": dtype_name(target_dtype),
        "dtype_reason": dtype_reason,
        "bytes": sum(file.stat().st_size for file in weight_file_paths(target)),
        "verified": verify,
        "max_logit_difference": difference,
    }


def _copy_native(folder: Path, dtype: torch.dtype, target: Path) -> None:
    """Writes the Hugging Face files of a native model from any files, one tensor at a time."""
    hf_config, family, config = read_model_config(folder)
    model_type = hf_config["model_type"]
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in Decoder(config).unfused_parameters().items()}
    write_weights(open_weights(folder, model_type, config), WEIGHT_NAMES[model_type], shapes, dtype, target)
    write_hf_config(hf_config, family, dtype, target)
    if (folder / GENERATION_CONFIG).is_file():
        read_json(folder / GENERATION_CONFIG)  # Transformers could not load a damaged one.
        (target / GENERATION_CONFIG).write_bytes((folder / GENERATION_CONFIG).read_bytes())


def resolve_dtype(folder: Path, requested: str) -> tuple[torch.dtype, str]:
    """The dtype of an export, and why. By default it is the one of the model that the run started from."""
    if requested != "auto":
        return getattr(torch, requested), "as requested"
    source = source_dtype(folder) if (folder / STATE_FILE).is_file() else None
    if source is not None:
        return getattr(torch, source), "as in the model that the run started from"
    dtypes = _stored_dtypes(folder)
    reason = "as in the source"
    if len(dtypes) > 1:
        reason = f"the narrowest dtype that holds the source's {', '.join(sorted(map(dtype_name, dtypes)))}"
    return stored_dtype(folder), reason


def source_dtype(folder: Path) -> str | None:
    """The dtype in which runs that start from a folder are exported, for their checkpoints; None: as they are stored.

    A Hugging Face folder has its own. A checkpoint has the one of the model that its run started from: training in
    fp32 does not mean that the export should be fp32. A new model has none, nor has a checkpoint of version 0.1.
    """
    if not (folder / STATE_FILE).is_file():
        return dtype_name(stored_dtype(folder))
    dtype = read_state(folder).get("source_dtype")
    return dtype if isinstance(dtype, str) and isinstance(getattr(torch, dtype, None), torch.dtype) else None


def stored_dtype(folder: Path) -> torch.dtype:
    """The narrowest dtype that holds every tensor of a folder exactly; at least fp32 for 8-bit floats."""
    dtypes = _stored_dtypes(folder)
    if any(dtype.itemsize == 1 for dtype in dtypes):
        # torch does not promote 8-bit floats.
        dtypes = {torch.float32, *(dtype for dtype in dtypes if dtype.itemsize > 1)}
    return reduce(torch.promote_types, dtypes) if dtypes else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _stored_dtypes(folder: Path) -> set[torch.dtype]:
    """The floating-point dtypes of a folder's parameters. Old files also have fp32 RoPE frequencies, for example."""
    names = WEIGHT_NAMES.get(str(read_hf_config(folder).get("model_type")), LLAMA)
    files = map(open_tensor_file, shard_files(folder, WEIGHTS) or weight_file_paths(folder))
    tensors = [tensor for file in files for name, tensor in file.tensors.items() if not names.is_ignored(name)]
    return {tensor.dtype for tensor in tensors if tensor.is_floating_point()}


def _stored_tensors(paths: list[Path]) -> list[Tensor]:
    return [tensor for path in paths for tensor in open_tensor_file(path).tensors.values()]


@torch.no_grad()
def verify_folder(folder: Path, model: Model, tokenizer: Tokenizer, trust_remote_code: bool = False) -> float:
    """Loads `folder` in Transformers; returns the largest logit difference in fp32 (fp64 if the weights are)."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    # Transformers' other attention kernels ignore soft caps.
    attention = {"attn_implementation": "eager"} if model.hf_config.get("attn_logit_softcapping") else {}
    tensors = hf_state_dict(model)
    wide = reduce(torch.promote_types, {tensor.dtype for tensor in tensors.values()}, torch.float32)
    # Transformers rounds some constants (Gemma's embedding scale) to the dtype it loads in. The decoder does not, so it
    # is compared with a model loaded in the wide dtype; widening is exact.
    is_native = isinstance(model, NativeModel)
    reference = AutoModelForCausalLM.from_pretrained(
        str(folder),
        local_files_only=True,
        dtype=wide if is_native else "auto",
        trust_remote_code=trust_remote_code and not is_native,
        **attention,
    ).eval()
    state = reference.state_dict()
    for name, tensor in tensors.items():
        if not torch.equal(state[name], tensor.to(state[name].dtype)):
            if tensor.isnan().any():
                raise CheckpointError(f"{name} has NaN values and cannot be compared")
            raise CheckpointError(f"{folder}: Transformers loads a different {name} than was written")
    # A folder's tokenizer may have more tokens than the model has embeddings.
    encoded = tokenizer.encode("The quick brown fox jumps over the lazy dog.")[:64]
    ids = torch.tensor([[min(token, model.vocab_size - 1) for token in encoded]])
    positions = torch.arange(ids.shape[1])[None]
    logits = model.module.eval().to(wide)(ids, positions)
    expected = reference.to(wide)(ids).logits
    difference = (expected - logits).abs().max().item()
    if not difference <= LOGITS_TOLERANCE * max(1.0, expected.abs().max().item()):
        raise CheckpointError(f"{folder}: Transformers' logits differ from ours by {difference:.2e}")
    return difference

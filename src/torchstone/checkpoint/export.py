"""Exports a checkpoint of any layout to a Hugging Face folder, and verifies it by loading it in Transformers.

Native weights are copied from file to file, so a model need not fit in memory to be written; verifying loads it. The
verification is Transformers' own: the folder is loaded with AutoModelForCausalLM, every tensor is compared bit for bit
with the source, and the logits of a fixed text are compared with ours. If weights were merged, the logits are also
compared with those of the model that was trained, with its updates beside its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from torchstone import hub
from torchstone.atomic import check_utf8, new_folder
from torchstone.checkpoint.adapter_folder import CONFIG_FILE as ADAPTER_CONFIG
from torchstone.checkpoint.adapter_folder import (
    WEIGHTS_FILE,
    is_adapter_folder,
    open_adapter,
    recorded_quantization,
    write_adapter,
)
from torchstone.checkpoint.load import base_folder, is_tuned_folder, read_state, resolve_model_folder, tokenizer_files
from torchstone.checkpoint.manifest import MANIFEST, read_json, write_json
from torchstone.checkpoint.model_folder import (
    BaseModelInfo,
    as_trained,
    decoder_shapes,
    fallback_reason,
    load_model,
    load_unmerged,
    open_weights,
    read_base_model_info,
    read_model_config,
    stored_implementation,
)
from torchstone.checkpoint.osft_folder import CONFIG_FILE as OSFT_CONFIG
from torchstone.checkpoint.save import STATE_FILE, hf_state_dict, save_model, save_tokenizer, write_hf_config
from torchstone.checkpoint.shard_files import WEIGHTS, shard_files
from torchstone.checkpoint.tensor_files import open_tensor_file
from torchstone.checkpoint.transformers_folder import read_hf_config
from torchstone.checkpoint.weight_files import hf_tensors, weight_file_paths, write_weights
from torchstone.checkpoint.weight_names import LLAMA, WEIGHT_NAMES
from torchstone.data.tokenize import Tokenizer, load_tokenizer, tokenizer_warnings
from torchstone.errors import CheckpointError, TorchstoneError, UsageError
from torchstone.models.execution import ExecutionOptions
from torchstone.models.model import GENERATION_CONFIG, FallbackModel, Model, NativeModel
from torchstone.models.tensors import dtype_name
from torchstone.tuning.lora import AdapterTensors, MergedTensors
from torchstone.tuning.osft import MergedOsft

CPU = torch.device("cpu")
# They name the model that was tuned.
CONFIG_FILES = (ADAPTER_CONFIG, OSFT_CONFIG)
# Relative to the largest logit, or to 1 if all are smaller.
LOGITS_TOLERANCE = 1e-5
# Of the row whose logits are compared.
PROBE_TOKENS = 64
NO_WEIGHTS: Mapping[str, Tensor] = MappingProxyType({})


def export_model(
    source: str,
    target: Path,
    dtype: str = "auto",
    verify: bool = True,
    trust_remote_code: bool = False,
    merge: bool = False,
    average_lora_a: bool = False,
    base: str | None = None,
) -> dict[str, Any]:
    """Writes `source` (a run, a checkpoint or a folder) to `target`; returns what was written and measured.

    An adapter is written as an adapter, for PEFT, or with `merge` as a model. `base`: where the model is now that an
    adapter, or a checkpoint of OSFT, was trained on.
    """
    if base is not None:
        folder = resolve_model_folder(source, trust_remote_code=trust_remote_code)
        with _with_base(folder, base) as copy:
            result = export_model(str(copy), target, dtype, verify, trust_remote_code, merge, average_lora_a)
        return result | {"source": str(folder)}
    folder = resolve_model_folder(source, trust_remote_code=trust_remote_code)
    if merge and not is_adapter_folder(folder):
        raise UsageError(f"{folder} has no adapter to merge", "leave out --merge")
    if average_lora_a and (merge or not is_adapter_folder(folder)):
        raise UsageError("--average-lora-a is for adapters that are written as such", "leave it out")
    check_utf8(target)
    # The new folder is renamed to the target: a link would be replaced.
    target = target.resolve()
    if target.is_file():
        raise UsageError(f"{target} is a file", "export into a new folder")
    if target.exists() and any(target.iterdir()):
        raise UsageError(f"{target} exists and is not empty", "export into a new folder")
    if is_adapter_folder(folder) and not merge:
        if dtype != "auto":
            raise UsageError("an adapter keeps its dtype", "leave out --dtype, or write a model with --merge")
        return _export_adapter(folder, target, verify, average_lora_a, trust_remote_code)
    execution = ExecutionOptions(trust_remote_code=trust_remote_code)
    target_dtype, dtype_reason = resolve_dtype(folder, dtype)
    tokenizer = load_tokenizer(tokenizer_files(folder), trust_remote_code=trust_remote_code)
    is_native = fallback_reason(folder, execution) is None
    merge_errors: dict[str, float] = {}
    with new_folder(target) as work:
        if is_native:
            merge_errors = _copy_native(folder, target_dtype, work)
        else:
            model = load_model(folder, CPU, target_dtype, execution)
            save_model(model, work)
            merge_errors = model.merge_errors if isinstance(model, FallbackModel) else {}
        save_tokenizer(tokenizer, work)
        parameters = sum(tensor.numel() for tensor in _stored_tensors(weight_file_paths(work)))
        difference = None
        if verify:
            if is_tuned_folder(folder):
                verify_merge(folder, tokenizer, execution)
            model = load_model(folder, CPU, target_dtype, execution)
            difference = verify_folder(work, model, tokenizer, trust_remote_code)
    model_type = read_json(target / "config.json")["model_type"]
    return {
        "source": str(folder),
        "folder": str(target),
        "parameters": parameters,
        "dtype": dtype_name(target_dtype),
        "dtype_reason": dtype_reason,
        "bytes": sum(file.stat().st_size for file in weight_file_paths(target)),
        "verified": verify,
        "max_logit_difference": difference,
        "warnings": [*_quantization_warnings(folder), *tokenizer_warnings(tokenizer, model_type)],
    } | _merge_report(merge_errors)


@contextmanager
def _with_base(folder: Path, base: str) -> Iterator[Path]:
    """A temporary folder with the files of `folder`, but with another name of the model that was tuned."""
    if not is_tuned_folder(folder):
        raise UsageError(f"{folder} has a whole model, which needs no --base", "leave it out")
    name = base if hub.parse_model(base) is not None else str(resolve_model_folder(base).resolve())
    with TemporaryDirectory() as temporary:
        copy = Path(temporary) / folder.name
        copy.mkdir()
        for file in folder.iterdir():
            if file.name in CONFIG_FILES:
                changed: dict[str, str | None] = {"base_model_name_or_path": name}
                # PEFT's `revision` belongs to a name on the hub.
                changed |= {"revision": None} if file.name == ADAPTER_CONFIG else {}
                write_json(copy / file.name, read_json(file) | changed)
            elif file.name != MANIFEST:
                (copy / file.name).symlink_to(file.resolve())
        try:
            yield copy
        except TorchstoneError as error:
            error.message = error.message.replace(str(copy), str(folder))
            raise


def _merge_report(errors: dict[str, float]) -> dict[str, Any]:
    """What rounding has lost of the adapters' updates, relative to them, in the weight that lost most."""
    if not errors:
        return {}
    worst = max(errors, key=errors.__getitem__)
    return {"merge_error": errors[worst], "merge_error_in": worst.removeprefix("hf.")}


def _quantization_warnings(folder: Path) -> list[str]:
    """If this machine cannot quantize as the run did whose adapter was merged."""
    quantization = recorded_quantization(folder) if is_adapter_folder(folder) else None
    if quantization is None or quantization.is_reproducible():
        return []
    return [
        f"the adapter was trained on weights in {quantization.kind} that a GPU had rounded; a CPU, as here, rounds a "
        "few of them otherwise: merge it on a machine with a GPU to get exactly the model that was trained"
    ]


def _export_adapter(folder: Path, target: Path, verify: bool, average: bool, trust_remote_code: bool) -> dict[str, Any]:
    base, implementation = base_folder(folder), stored_implementation(folder)
    execution = ExecutionOptions(implementation=implementation, trust_remote_code=trust_remote_code)
    model = read_base_model_info(base, execution)
    tensors = open_adapter(folder, model.names, model.shapes, model.linears)
    tokenizer = load_tokenizer(tokenizer_files(folder), trust_remote_code=trust_remote_code)
    with new_folder(target) as work:
        warnings = write_adapter(work, tensors, model.names, model.is_tied, average)
        save_tokenizer(tokenizer, work)
        difference = None
        if verify and find_spec("peft") is None:
            warnings.append("not verified: PEFT is not installed")
        elif verify:
            merged = load_model(folder, CPU, execution=execution)
            weights = _dequantized_weights(model, tensors)
            frozen = [each.adapter.name for each in tensors.frozen]
            difference = verify_adapter(work, base, merged, tokenizer, average, trust_remote_code, weights, frozen)
    file = target / WEIGHTS_FILE
    return {
        "source": str(folder),
        "folder": str(target),
        "base": tensors.base,
        "parameters": sum(tensor.numel() for tensor in _stored_tensors([file])),
        "bytes": file.stat().st_size,
        "verified": difference is not None and not average,
        "max_logit_difference": difference,
        "warnings": warnings,
    }


def _dequantized_weights(model: BaseModelInfo, tensors: AdapterTensors) -> dict[str, Tensor]:
    """The quantized weights that an adapter was trained on, by Hugging Face name: PEFT would read the files."""
    if tensors.base_quantization is None:
        return {}
    source, weights = as_trained(model.source, tensors, model.shapes, model.linears), dict[str, Tensor]()
    for name in (f"{linear}.weight" for linear in model.linears):
        weights[name] = torch.empty(model.shapes[name])
        source.read_into(name, weights[name], (0, 0))
    return hf_tensors(weights, model.names)


@torch.no_grad()
def verify_adapter(
    folder: Path,
    base: Path,
    model: Model,
    tokenizer: Tokenizer,
    is_changed: bool = False,
    trust_remote_code: bool = False,
    weights: Mapping[str, Tensor] = NO_WEIGHTS,
    frozen: Sequence[str] = (),
) -> float | None:
    """Loads the adapter with PEFT; returns the largest difference to the logits of our merged `model`, in fp32.

    `is_changed`: its A are means, so that the logits differ. `weights`: those of the base that are not the ones of its
    files. `frozen`: adapters that are active too. None if `base` is not a folder that Transformers loads.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    if shard_files(base, WEIGHTS):
        return None
    attention = {"attn_implementation": "eager"} if model.hf_config.get("attn_logit_softcapping") else {}
    reference = AutoModelForCausalLM.from_pretrained(
        str(base), local_files_only=True, dtype=torch.float32, trust_remote_code=trust_remote_code, **attention
    )
    for name, weight in weights.items():
        reference.get_parameter(name).copy_(weight)
    reference = PeftModel.from_pretrained(reference, str(folder))
    for name in frozen:
        reference.load_adapter(str(folder / name), name)
    reference.base_model.set_adapter(["default", *frozen])
    reference.eval()
    ids, logits = _probe_ids(model, tokenizer), _probe_logits(model, tokenizer)
    difference = (reference(ids).logits - logits).abs().max().item()
    if not is_changed and not difference <= LOGITS_TOLERANCE * max(1.0, logits.abs().max().item()):
        raise CheckpointError(f"{folder}: PEFT's logits differ from ours by {difference:.2e}")
    return difference


def _probe_ids(model: Model, tokenizer: Tokenizer) -> Tensor:
    """A row of random tokens."""
    # A folder's tokenizer may have more tokens than the model has embeddings.
    vocabulary, length = min(tokenizer.size, model.vocab_size), PROBE_TOKENS
    if isinstance(model, NativeModel):
        length = min(length, model.decoder_config.max_positions)
    return torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def verify_merge(folder: Path, tokenizer: Tokenizer, execution: ExecutionOptions) -> None:
    """Raises if merging changes what the model computes: compares its logits with those of the base model with the
    updates beside its weights, as it was trained. Both are in fp32, and in memory one after the other."""
    unmerged = _probe_logits(load_unmerged(folder, execution), tokenizer)
    merged = _probe_logits(load_model(folder, CPU, execution=execution), tokenizer)
    difference = (merged - unmerged).abs().max().item()
    if not difference <= LOGITS_TOLERANCE * max(1.0, unmerged.abs().max().item()):
        raise CheckpointError(
            f"{folder}: the logits of the merged model differ from those of the model that was trained by "
            f"{difference:.2e}"
        )


def _probe_logits(model: Model, tokenizer: Tokenizer) -> Tensor:
    ids = _probe_ids(model, tokenizer)
    return model.module.eval()(ids, torch.arange(ids.shape[1])[None])


def _copy_native(folder: Path, dtype: torch.dtype, target: Path) -> dict[str, float]:
    """Writes the Hugging Face files of a native model from any files, one tensor at a time.

    Returns what rounding has lost of the updates, by Hugging Face name, if an adapter was merged.
    """
    hf_config, family, config = read_model_config(folder)
    model_type = hf_config["model_type"]
    weights = open_weights(folder, model_type, config)
    names = WEIGHT_NAMES[model_type]
    write_weights(weights, names, decoder_shapes(config), dtype, target)
    write_hf_config(hf_config, family, dtype, target)
    if (folder / GENERATION_CONFIG).is_file():
        read_json(folder / GENERATION_CONFIG)  # Transformers could not load a damaged one.
        (target / GENERATION_CONFIG).write_bytes((folder / GENERATION_CONFIG).read_bytes())
    errors = weights.errors if isinstance(weights, MergedTensors | MergedOsft) else {}
    # A tensor may hold several parameters: the largest error comes last.
    by_size = sorted(errors.items(), key=lambda item: item[1])
    return {next(iter(names.stored_tensors([name]))): error for name, error in by_size}


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


def _stored_dtypes(folder: Path) -> set[torch.dtype]:
    """The floating-point dtypes of a folder's parameters. Old files also have fp32 RoPE frequencies, for example."""
    folder = base_folder(folder)
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
    model.module.to(wide)
    ids, logits = _probe_ids(model, tokenizer), _probe_logits(model, tokenizer)
    expected = reference.to(wide)(ids).logits
    difference = (expected - logits).abs().max().item()
    if not difference <= LOGITS_TOLERANCE * max(1.0, expected.abs().max().item()):
        raise CheckpointError(f"{folder}: Transformers' logits differ from ours by {difference:.2e}")
    return difference

"""Saves a checkpoint: a Hugging Face folder with what training needs to resume.

Transformers loads the folder of a single process as it is (config.json, model.safetensors, the tokenizer). It also
holds the optimizer's moments by parameter name, the RNG states and the counters, as safetensors and JSON.

Several ranks write in parallel: each writes its shards of the weights (weights-00003.safetensors) and of the moments
(optimizer-00003.safetensors). Such a folder loads into any layout; `torchstone export` makes a Hugging Face folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchstone.checkpoint import manifest
from torchstone.checkpoint.adapter_folder import write_adapter, write_adapter_config, write_frozen_adapters
from torchstone.checkpoint.osft_folder import OsftConfig, write_osft_config
from torchstone.checkpoint.shard_files import OPTIMIZER, RNG, WEIGHTS, shard_file, write_shards
from torchstone.checkpoint.tensor_files import write_tensors
from torchstone.checkpoint.transformers_folder import full_state_dict, save_fallback
from torchstone.checkpoint.weight_files import hf_tensors, save_weights
from torchstone.checkpoint.weight_names import FALLBACK_NAMES, WEIGHT_NAMES, WeightNames
from torchstone.data.tokenize import Tokenizer
from torchstone.errors import CheckpointError
from torchstone.models.families import Family
from torchstone.models.model import GENERATION_CONFIG, FallbackModel, Model, NativeModel
from torchstone.models.tensors import dtype_name
from torchstone.observe.console import Console
from torchstone.parallel.local_shards import TensorShard, is_owner, local_shards
from torchstone.parallel.mesh import SINGLE_PROCESS, ParallelContext
from torchstone.rng import get_rng_states
from torchstone.tuning.lora import AdapterTensors, is_adapter_parameter, split_parameter_name
from torchstone.tuning.plan import LoraPlan, OsftPlan

OPTIMIZER_FILE = "optimizer.safetensors"
RNG_FILE = "random.safetensors"
STATE_FILE = "state.json"
BEST_FILE = "best.json"


def save_checkpoint(
    root: Path,
    step: int,
    model: Model,
    tokenizer: Tokenizer,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    ctx: ParallelContext = SINGLE_PROCESS,
) -> Path:
    """Saves a checkpoint and returns its folder. All ranks must call it."""
    final, is_single_process = root / manifest.checkpoint_name(step), ctx.world_size == 1
    with manifest.commit_folder(final, ctx) as folder:
        save_model(model, folder, ctx)
        optimizer_file = folder / OPTIMIZER_FILE if is_single_process else shard_file(folder, OPTIMIZER, ctx.rank)
        write_shards(optimizer_file, optimizer_shards(optimizer, model))
        rng_file = folder / RNG_FILE if is_single_process else shard_file(folder, RNG, ctx.rank)
        write_tensors(rng_file, get_rng_states(model.device))
        if ctx.is_main:
            save_tokenizer(tokenizer, folder)
            manifest.write_json(folder / STATE_FILE, state | {"layout": str(ctx.dims)})
    return final


def save_model(model: Model, folder: Path, ctx: ParallelContext = SINGLE_PROCESS) -> None:
    """Writes config.json, the weights and generation_config.json. All ranks must call it; each writes its shards."""
    tuning = model.tuning
    has_shards = isinstance(tuning, OsftPlan) or (isinstance(model, NativeModel) and ctx.world_size > 1)
    if has_shards:
        write_shards(shard_file(folder, WEIGHTS, ctx.rank), _own_shards(model))
    if isinstance(model, FallbackModel):
        _save_fallback(model, folder, ctx)
        return
    assert isinstance(model, NativeModel)
    if not ctx.is_main:
        return
    names = WEIGHT_NAMES[model.hf_config["model_type"]]
    write_hf_config(model.hf_config, model.family, model.dtype, folder)
    if isinstance(tuning, OsftPlan):
        save_osft_config(tuning, folder)
    elif isinstance(tuning, LoraPlan) and has_shards:
        write_adapter_config(folder, tuning.adapter, names, tuning.trained_parameters, tuning.base)
        write_frozen_adapters(folder, tuning.frozen, names, model.decoder_config.tied)
    elif isinstance(tuning, LoraPlan):
        trained = {name: parameter.detach() for name, parameter in model.trained_parameters()}
        save_adapter(trained, tuning, names, model.decoder_config.tied, folder)
    elif not has_shards:
        save_weights(full_unfused_parameters(model), names, folder)
    if model.generation_config is not None:
        (folder / GENERATION_CONFIG).write_bytes(model.generation_config)


def _save_fallback(model: FallbackModel, folder: Path, ctx: ParallelContext) -> None:
    tuning = model.tuning
    if tuning is None:
        with nullcontext() if model.master_weights is None else model.master_weights.installed():
            save_fallback(model.module, model.generation_config, folder, ctx.rank)
        return
    tensors = {}
    if isinstance(tuning, LoraPlan):
        tensors = {name: _full_tensor(parameter) for name, parameter in model.trained_parameters()}
    if ctx.is_main:
        model.module.hf.config.save_pretrained(folder)
        if isinstance(tuning, OsftPlan):
            save_osft_config(tuning, folder)
        elif isinstance(tuning, LoraPlan):
            save_adapter(tensors, tuning, FALLBACK_NAMES, False, folder)


def _own_shards(model: Model) -> list[TensorShard]:
    """What this rank owns of the parameters that checkpoints have."""
    config, tuning = model.decoder_config, model.tuning
    return [
        shard
        for name, parameter in model.named_parameters()
        if (tuning is None or tuning.is_saved(name)) and is_owner(config, name, parameter)
        for shard in local_shards(config, name, parameter.detach())
    ]


def save_osft_config(tuning: OsftPlan, folder: Path) -> None:
    ranks, ratio = dict(tuning.ranks), tuning.unfreeze_rank_ratio
    write_osft_config(folder, OsftConfig(tuning.base, tuning.base_fingerprint, ratio, ranks))


def save_adapter(trained: dict[str, Tensor], tuning: LoraPlan, names: WeightNames, is_tied: bool, folder: Path) -> None:
    """Writes the trained adapter for PEFT. `trained`: all trained tensors."""
    factors = {name: tensor for name, tensor in trained.items() if is_adapter_parameter(name)}
    saved = {name: tensor for name, tensor in trained.items() if name not in factors}
    recorded = (tuning.base, tuning.base_fingerprint, tuning.base_quantization)
    tensors = AdapterTensors(tuning.adapter, factors, saved, *recorded, tuning.frozen)
    write_adapter(folder, tensors, names, is_tied)


def _full_tensor(tensor: Tensor) -> Tensor:
    """All of a sharded tensor; all ranks must call it."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def full_unfused_parameters(model: NativeModel) -> dict[str, Tensor]:
    """The unfused parameters of a model that a single process holds."""
    return {
        shard.name: shard.tensor
        for name, parameter in model.named_parameters()
        for shard in local_shards(model.decoder_config, name, parameter.detach())
    }


def hf_state_dict(model: Model) -> dict[str, Tensor]:
    """The weights of a model that a single process holds, by their Hugging Face names."""
    if isinstance(model, NativeModel):
        return hf_tensors(full_unfused_parameters(model), WEIGHT_NAMES[model.hf_config["model_type"]])
    assert isinstance(model, FallbackModel)
    return full_state_dict(model.module.hf) or model.module.hf.state_dict()


def hf_name(model: Model, name: str) -> str:
    """The Hugging Face name of the tensor that holds an unfused parameter."""
    if is_adapter_parameter(name):
        linear, _, kind = split_parameter_name(name)
        return f"{hf_name(model, f'{linear}.weight').removesuffix('.weight')}.{kind}"
    if isinstance(model, NativeModel):
        return next(iter(WEIGHT_NAMES[model.hf_config["model_type"]].stored_tensors([name])))
    return name.removeprefix("hf.")


def write_hf_config(hf_config: dict[str, Any], family: Family, dtype: torch.dtype, folder: Path) -> None:
    """Writes config.json of a native model."""
    # The code that auto_map names did not run here, and is not in this folder.
    config = {key: value for key, value in hf_config.items() if key not in ("torch_dtype", "auto_map")}
    config |= {"dtype": dtype_name(dtype), "architectures": [family.architecture]}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the tokenizer, and generation_config.json if there is none: generate() reads its stop tokens from it."""
    tokenizer.save(folder)
    if not (folder / GENERATION_CONFIG).is_file():
        stop_ids = tokenizer.stop_ids
        settings: dict[str, Any] = {"pad_token_id": tokenizer.pad_id}
        settings |= {"eos_token_id": stop_ids[0] if len(stop_ids) == 1 else stop_ids} if stop_ids else {}
        manifest.write_json(folder / GENERATION_CONFIG, settings)


def optimizer_shards(optimizer: torch.optim.Optimizer, model: Model) -> list[TensorShard]:
    """The optimizer's state, such as `layers.0.mlp.up.weight/exp_avg`, for every parameter that this rank owns.

    The state of fused matrices is split, so that a run may resume with a different fusion or layout.
    """
    config, shards = model.decoder_config, list[TensorShard]()
    for name, parameter in model.named_parameters():
        if not is_owner(config, name, parameter):
            continue
        names = [shard.name for shard in local_shards(config, name, parameter.detach())]
        for key, value in optimizer.state.get(parameter, {}).items():
            tensor = torch.as_tensor(value).detach()
            if tensor.dim() == 0:
                # Every unfused parameter gets the step count.
                shards += [TensorShard(f"{unfused_name}/{key}", (), (), tensor) for unfused_name in names]
            else:
                shards += [
                    TensorShard(f"{shard.name}/{key}", shard.shape, shard.offset, shard.tensor)
                    for shard in local_shards(config, name, tensor)
                ]
    return shards


def mark_best(root: Path, step: int, loss: float) -> None:
    manifest.write_json(root / BEST_FILE, {"step": step, "val_loss": loss})


def best_step(root: Path, warn: Callable[[str], None] | None = None) -> int | None:
    """The step of the checkpoint with the best validation loss, if one is marked. A damaged file only warns."""
    path = root / BEST_FILE
    if not path.exists():
        return None
    try:
        step = manifest.read_json(path).get("step")
        if isinstance(step, int):
            return step
        problem = f"{path}: damaged: it has no step"
    except CheckpointError as error:
        problem = error.message
    (warn or Console("quiet").warn)(f"{problem}; no checkpoint counts as the best one")
    return None


def prune_checkpoints(
    root: Path,
    keep_last: int | None,
    protected: Collection[Path | None] = (),
    warn: Callable[[str], None] | None = None,
) -> list[int]:
    """Removes all but the newest `keep_last` checkpoints, the best one and `protected`; returns the removed steps."""
    if keep_last is None:
        return []
    best = best_step(root, warn)
    kept = {folder.resolve() for folder in protected if folder is not None}
    removed = []
    for step, folder in manifest.list_checkpoints(root)[:-keep_last]:
        if step != best and folder.resolve() not in kept:
            manifest.remove_checkpoint(folder)
            removed.append(step)
    return removed

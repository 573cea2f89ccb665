"""Finds a complete checkpoint and restores its state, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchstone import atomic, hub
from torchstone.checkpoint import manifest
from torchstone.checkpoint.adapter_folder import CONFIG_FILE, base_name, is_adapter_folder, read_adapter_config
from torchstone.checkpoint.osft_folder import is_osft_folder, read_osft_config
from torchstone.checkpoint.save import OPTIMIZER_FILE, RNG_FILE, STATE_FILE, best_step
from torchstone.checkpoint.shard_files import OPTIMIZER, RNG, ShardedFiles, shard_file, shard_files
from torchstone.checkpoint.tensor_files import name_damaged_file, open_tensor_file
from torchstone.checkpoint.weight_files import INDEX_FILE, SINGLE_FILE
from torchstone.errors import CheckpointError, UsageError
from torchstone.models.model import Model
from torchstone.optim.build import ADAMW_STATE, MUON_STATE, OptimizerState, state_of
from torchstone.parallel.local_shards import local_shards, unfused_names
from torchstone.parallel.mesh import SINGLE_PROCESS, ParallelContext
from torchstone.rng import set_rng_states

CHECKPOINTS = "checkpoints"


def find_resume_checkpoint(
    output_dir: Path, resume: str, warn: Callable[[str], None], ctx: ParallelContext = SINGLE_PROCESS
) -> Path | None:
    """Returns the verified checkpoint that `checkpoint.resume` selects, or None to start from scratch."""
    root = output_dir / CHECKPOINTS
    if ctx.is_main:
        atomic.clean_up(root, "step-*")
    ctx.barrier()
    checkpoints = manifest.list_checkpoints(root)
    if resume == "never":
        if checkpoints:
            raise UsageError(
                f"{output_dir} already has a run (step {checkpoints[-1][0]}), and checkpoint.resume is never",
                "choose another --output-dir, or resume it with --checkpoint.resume auto",
            )
        return None
    if resume != "auto":
        path = named_checkpoint_folder(resume)
        if not checkpoints or path.resolve().parent == root.resolve():
            return _named_checkpoint(path, checkpoints, ctx)
        warn(f"{output_dir} has checkpoints of its own: resuming from them, not from {resume}")
    damaged: list[Path] = []
    for _, folder in reversed(checkpoints):
        try:
            manifest.verify_checkpoint(folder, ctx)
        except (manifest.UnlistedFilesError, manifest.UnreadableError):
            # This one may be good, and an older one would lose steps.
            raise
        except CheckpointError as error:
            warn(f"{error.message}; trying the previous checkpoint")
            damaged.append(folder)
        else:
            _set_aside(damaged, warn, ctx)
            return folder
    if checkpoints:
        # They keep their names, so that the next start is refused as well.
        raise CheckpointError(f"no checkpoint in {root} is complete", "choose another --output-dir to start again")
    return None


def named_checkpoint_folder(resume: str) -> Path:
    """The folder that `checkpoint.resume` names: of a run, its newest checkpoint."""
    checkpoints = manifest.list_checkpoints(Path(resume) / CHECKPOINTS)
    return checkpoints[-1][1] if checkpoints else Path(resume)


def is_model_folder(folder: Path) -> bool:
    """Whether it is a Hugging Face folder, an adapter or a checkpoint. A run has a config.json of a different kind."""
    is_model = (folder / "config.json").is_file() or is_adapter_folder(folder) or is_osft_folder(folder)
    return is_model and not (folder / CHECKPOINTS).is_dir()


def resolve_model_folder(
    path: str,
    ctx: ParallelContext = SINGLE_PROCESS,
    warn: Callable[[str], None] | None = None,
    weights: bool = True,
    trust_remote_code: bool = False,
    kind: str = "model",
) -> Path:
    """Returns `path` if it is a Hugging Face folder or a checkpoint; for a run, its best or else newest checkpoint.

    A model on the hub is downloaded, unless it is in the cache; without `weights`, only its config and tokenizer.
    Errors call it a folder of that `kind`.
    """
    path = os.path.expanduser(path)
    name = hub.parse_model(path)
    folder = Path(path) if name is None else hub.download_model(name, None, weights, trust_remote_code).folder
    root = folder / CHECKPOINTS
    if (folder / "metrics.jsonl").is_file() and not manifest.list_checkpoints(root):
        raise UsageError(f"{folder} is a run without a checkpoint")
    if is_model_folder(folder):
        if (folder / manifest.MANIFEST).is_file():
            manifest.verify_checkpoint(folder, ctx)
        return folder
    checkpoints = dict(manifest.list_checkpoints(root))
    if checkpoints:
        best = best_step(root, warn)
        checkpoint = checkpoints[best if best in checkpoints else max(checkpoints)]
        manifest.verify_checkpoint(checkpoint, ctx)
        return checkpoint
    if not folder.is_dir():
        raise UsageError(
            f"{kind} folder {folder} {'is a file' if folder.exists() else 'does not exist'}",
            "name a Hugging Face folder, a checkpoint or a run, or a model on the hub as org/name",
        )
    if (folder / "tokenizer.json").is_file() and not any(folder.glob("*.safetensors")):
        raise UsageError(
            f"{folder} has a tokenizer, but no model (no config.json)",
            "name the folder of a model; a new model has --model.depth instead, and this folder as --model.tokenizer",
        )
    raise UsageError(f"{folder} is neither a Hugging Face folder nor a run with a checkpoint")


def is_tuned_folder(folder: Path) -> bool:
    """Whether a folder has only what was trained of a model: an adapter, or a checkpoint of OSFT."""
    return is_adapter_folder(folder) or is_osft_folder(folder)


def recorded_base(folder: Path) -> str | None:
    """The name of the model that an adapter, or a checkpoint of OSFT, was trained on."""
    if is_osft_folder(folder):
        return read_osft_config(folder).base_model_name_or_path
    return base_name(read_adapter_config(folder))


def has_moved_base(folder: Path) -> bool:
    """Whether the model that an adapter, or a checkpoint of OSFT, was trained on is not where it was."""
    name = recorded_base(folder) if is_tuned_folder(folder) else None
    return name is not None and hub.parse_model(name) is None and not Path(name).expanduser().exists()


def tuned_model_folder(folder: Path) -> Path:
    """The folder of the model that an adapter or OSFT checkpoint was trained on."""
    name = recorded_base(folder)
    if not name:
        raise UsageError(f"{folder / CONFIG_FILE}: base_model_name_or_path is not set", "name the model there")
    if has_moved_base(folder):
        raise UsageError(
            f"{folder} was trained on the model {name}, which does not exist",
            "if it has moved, say where it is: --model.path FOLDER to resume the run, or torchstone export "
            f"{folder} NEW --base FOLDER",
        )
    return resolve_model_folder(name)


def base_folder(folder: Path) -> Path:
    """The folder of the whole model that was tuned; `folder` itself if it has a whole model."""
    if is_osft_folder(folder):
        return base_folder(tuned_model_folder(folder))
    if not is_adapter_folder(folder):
        return folder
    if any((folder / file).is_file() for file in (SINGLE_FILE, INDEX_FILE)):
        raise UsageError(
            f"{folder} has a model and a PEFT adapter ({CONFIG_FILE})", "move one of them to another folder"
        )
    base = tuned_model_folder(folder)
    if is_tuned_folder(base):
        kind = "a checkpoint of OSFT" if is_osft_folder(base) else "an adapter itself"
        raise UsageError(f"{folder / CONFIG_FILE}: the base model {base} is {kind}")
    return base


def files_folder(folder: Path, name: str) -> Path:
    """Where to look for the file `name` of a model: an adapter that does not have it takes that of its base model."""
    return folder if (folder / name).is_file() else base_folder(folder)


def tokenizer_files(folder: Path) -> Path:
    """The folder of a model's tokenizer."""
    return files_folder(folder, "tokenizer_config.json")


def read_state(folder: Path) -> dict[str, Any]:
    state = manifest.read_json(folder / STATE_FILE)
    if type(state.get("step")) is not int:
        raise CheckpointError(f"{folder / STATE_FILE}: damaged: it has no step")
    return state


def restore_optimizer(folder: Path, optimizer: torch.optim.Optimizer, model: Model) -> None:
    """Reads this rank's slices of every parameter's optimizer state; the optimizers do not check their tensors."""
    files = ShardedFiles(shard_files(folder, OPTIMIZER) or [folder / OPTIMIZER_FILE])
    keys_of: dict[str, set[str]] = {}
    for full_name in files.names:
        parameter_name, _, key = full_name.rpartition("/")
        keys_of.setdefault(parameter_name, set()).add(key)
    parameters = [(name, unfused_names(model.decoder_config, name, p), p) for name, p in model.trained_parameters()]
    if parameters and not any(part in keys_of for _, unfused, _ in parameters for part in unfused):
        raise CheckpointError(f"{folder}: has optimizer state, but none for the parameters of this model")
    for name, unfused, parameter in parameters:
        if keys_of.keys().isdisjoint(unfused):
            # It has never had a gradient.
            continue
        expected = state_of(optimizer, parameter)
        for part in unfused:
            _check_state(folder, files, part, keys_of.get(part, set()), expected)
        # Fused AdamW keeps its step count on the parameter's device.
        state = {key: torch.zeros((), dtype=torch.float32, device=parameter.device) for key in expected.scalars}
        for key, scalar in state.items():
            files.read_into(f"{unfused[0]}/{key}", scalar, ())
        for key in expected.moments:
            state[key] = torch.zeros_like(parameter.detach())
            for shard in local_shards(model.decoder_config, name, state[key]):
                full_name = f"{shard.name}/{key}"
                if files.shape(full_name) != shard.shape:
                    shapes = f"{list(files.shape(full_name))}, not {list(shard.shape)}"
                    raise CheckpointError(f"{folder}: the optimizer state {full_name} has shape {shapes}")
                files.read_into(full_name, shard.tensor, shard.offset)
        optimizer.state[parameter] = state


def _check_state(folder: Path, files: ShardedFiles, name: str, keys: set[str], expected: OptimizerState) -> None:
    """Raises unless parameter `name` has the expected state; a checkpoint of the other optimizer gets a hint."""
    is_complete = keys == {*expected.scalars, *expected.moments}
    if is_complete and all(files.shape(f"{name}/{key}") == () for key in expected.scalars):
        return
    other = ADAMW_STATE if expected is MUON_STATE else MUON_STATE
    if keys == {*other.scalars, *other.moments}:
        raise CheckpointError(
            f"{folder}: the run used optim.name {other.name.lower()}, not {expected.name.lower()}",
            f"add --optim.name {other.name.lower()}, or start a new run from its weights: --model.path {folder} "
            "--output-dir NEW",
        )
    keys_text = ", ".join((*expected.scalars, *expected.moments))
    raise CheckpointError(f"{folder}: the optimizer state of {name} does not have {expected.name}'s {keys_text}")


def restore_rng_states(
    folder: Path, device: torch.device, ctx: ParallelContext, seed: int, log: Callable[[str], None]
) -> None:
    """Restores this rank's RNG states; with a different number of processes they are reseeded."""
    path = folder / RNG_FILE if ctx.world_size == 1 else shard_file(folder, RNG, ctx.rank)
    saved_size = len(shard_files(folder, RNG)) or 1
    if saved_size != ctx.world_size:
        log(f"processes: {saved_size} saved it, {ctx.world_size} resume it; RNG states (dropout) are reseeded")
        torch.manual_seed(seed + read_state(folder)["step"])
        return
    states = open_tensor_file(path).tensors
    with name_damaged_file(path, "damaged: not the states of random number generators"):
        set_rng_states(states, device)


def _set_aside(damaged: list[Path], warn: Callable[[str], None], ctx: ParallelContext) -> None:
    """Rank 0 renames the checkpoints that resuming passes over: they would count as the newest ones of the run."""
    lines, error = [], None
    if ctx.is_main:
        try:
            lines = [f"{folder.name} is damaged: renamed to {manifest.set_aside(folder)}" for folder in damaged]
        except OSError as failure:
            error = CheckpointError(f"a damaged checkpoint could not be renamed: {failure}")
    ctx.raise_on_all_ranks(error)
    for line in lines:
        warn(line)


def _named_checkpoint(path: Path, checkpoints: list[tuple[int, Path]], ctx: ParallelContext) -> Path:
    if not (path / manifest.MANIFEST).is_file():
        raise CheckpointError(
            f"{path} is not a complete checkpoint (no {manifest.MANIFEST})",
            "checkpoint.resume is auto (resumes the run in output_dir), never, or the path of a checkpoint or a run",
        )
    manifest.verify_checkpoint(path, ctx)
    step = read_state(path)["step"]
    newer = [folder.name for number, folder in checkpoints if number > step]
    if newer:
        raise CheckpointError(
            f"output_dir has checkpoints newer than {path.name}: {', '.join(newer[:4])}",
            "they would no longer belong to the run: move them away, or choose another --output-dir",
        )
    return path

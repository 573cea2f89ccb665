"""Finds a checkpoint that is whole and puts its state back, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from torchstone.checkpoint import manifest
from torchstone.checkpoint.save import OPTIMIZER_FILE, RANDOM, RANDOM_FILE, STATE_FILE, best_step
from torchstone.errors import CheckpointError, UsageError
from torchstone.models.model import Model
from torchstone.models.sliced_files import SlicedFiles
from torchstone.models.slices import OPTIMIZER, slice_file, slice_files
from torchstone.parallel.mesh import ALONE, Place

CHECKPOINTS = "checkpoints"


def find_resume(output_dir: Path, resume: str, warn: Callable[[str], None], place: Place = ALONE) -> Path | None:
    """The verified checkpoint that `checkpoint.resume` means, or None to start anew."""
    root = output_dir / CHECKPOINTS
    if place.is_main:
        manifest.tidy(root)
    place.wait()
    found = manifest.list_checkpoints(root)
    if resume == "never":
        if found:
            raise UsageError(
                f"{output_dir} already holds a run (step {found[-1][0]}), and checkpoint.resume is never",
                "choose another --output-dir, or let --checkpoint.resume auto go on with it",
            )
        return None
    if resume != "auto":
        named = Path(resume)
        if not found or named.resolve().parent == root.resolve():
            return _named(named, found, place)
        warn(f"{output_dir} has checkpoints of its own: going on from them, not from {resume}")
    for _, folder in reversed(found):
        try:
            manifest.verify(folder, place)
            return folder
        except CheckpointError as error:
            warn(f"{error.message}; going back to the checkpoint before it")
    if found:
        raise CheckpointError(f"no checkpoint in {root} is whole", "choose another --output-dir to start anew")
    return None


def is_model_folder(folder: Path) -> bool:
    """A Hugging Face folder or a checkpoint; the config.json of a run is another thing."""
    return (folder / "config.json").is_file() and not (folder / CHECKPOINTS).is_dir()


def resolve_model_folder(path: str, place: Place = ALONE) -> Path:
    """What a model path means: a Hugging Face folder, a checkpoint, or a run (its best checkpoint, else its newest)."""
    folder = Path(path)
    root = folder / CHECKPOINTS
    if (folder / "metrics.jsonl").is_file() and not manifest.list_checkpoints(root):
        raise UsageError(f"{folder} is a run without a checkpoint")
    if is_model_folder(folder):
        if (folder / manifest.MANIFEST).is_file():
            manifest.verify(folder, place)
        return folder
    found = dict(manifest.list_checkpoints(root))
    if found:
        best = best_step(root)
        chosen = found[best if best in found else max(found)]
        manifest.verify(chosen, place)
        return chosen
    if not folder.is_dir():
        raise UsageError(f"model folder {folder} does not exist", "name a Hugging Face folder, a checkpoint or a run")
    if (folder / "adapter_config.json").is_file():
        raise UsageError(
            f"{folder} holds an adapter (adapter_config.json), not a model", "merge it into its model first"
        )
    raise UsageError(f"{folder} is neither a Hugging Face folder nor a run with a checkpoint")


def read_state(folder: Path) -> dict[str, Any]:
    return manifest.read_json(folder / STATE_FILE)


def restore_optimizer(folder: Path, optimizer: torch.optim.Optimizer, model: Model) -> None:
    """Every parameter's moments, of which this process reads what it holds of the parameter."""
    files = SlicedFiles(slice_files(folder, OPTIMIZER) or [folder / OPTIMIZER_FILE])
    there = set(files.names)
    kinds: dict[str, list[str]] = {}
    for key in files.names:
        name, _, kind = key.rpartition("/")
        kinds.setdefault(name, []).append(kind)
    for whole, parameter in model.named_parameters():
        names = model.piece_names(whole, parameter)
        state: dict[str, Tensor] = {}
        for kind in kinds.get(names[0], []):
            if files.shape(f"{names[0]}/{kind}") == ():
                # AdamW counts its steps beside the parameter when fused.
                state[kind] = torch.zeros((), dtype=files.dtype(f"{names[0]}/{kind}"), device=parameter.device)
                files.read_into(f"{names[0]}/{kind}", state[kind], ())
                continue
            state[kind] = torch.zeros_like(parameter.detach())
            for box in model.slices_of(whole, state[kind]):
                key = f"{box.name}/{kind}"
                if key not in there or files.shape(key) != box.shape:
                    raise CheckpointError(
                        f"{folder}: the moments of {box.name} are missing, or have another shape than the model"
                    )
                files.read_into(key, box.tensor, box.offset)
        if state:
            optimizer.state[parameter] = state


def restore_random(folder: Path, place: Place, seed: int, warn: Callable[[str], None]) -> None:
    """The random states of this rank; in another layout than the one that saved, they begin anew."""
    alone = place.layout.world_size == 1
    path = folder / RANDOM_FILE if alone else slice_file(folder, RANDOM, place.rank)
    saved = len(slice_files(folder, RANDOM)) or 1
    if saved != place.layout.world_size:
        warn(f"saved by {saved} processes, going on with {place.layout.world_size}: random states (dropout) begin anew")
        torch.manual_seed(seed + read_state(folder)["step"])
        return
    try:
        states = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: damaged or missing: {error}") from None
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _named(path: Path, newer_than: list[tuple[int, Path]], place: Place) -> Path:
    if not (path / manifest.MANIFEST).is_file():
        raise CheckpointError(f"{path} is not a whole checkpoint (it has no {manifest.MANIFEST})")
    manifest.verify(path, place)
    step = read_state(path)["step"]
    ahead = [folder.name for number, folder in newer_than if number > step]
    if ahead:
        raise CheckpointError(
            f"output_dir holds checkpoints newer than {path.name}: {', '.join(ahead[:4])}",
            "they belong to another course of the run: move them away, or choose another --output-dir",
        )
    return path

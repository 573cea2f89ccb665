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
from torchstone.checkpoint.save import OPTIMIZER_FILE, RANDOM_FILE, STATE_FILE, best_step
from torchstone.errors import CheckpointError, UsageError
from torchstone.models.model import Model

CHECKPOINTS = "checkpoints"


def find_resume(output_dir: Path, resume: str, warn: Callable[[str], None]) -> Path | None:
    """The verified checkpoint that `checkpoint.resume` means, or None to start anew."""
    root = output_dir / CHECKPOINTS
    manifest.tidy(root)
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
            return _named(named, found)
        warn(f"{output_dir} has checkpoints of its own: going on from them, not from {resume}")
    for _, folder in reversed(found):
        try:
            manifest.verify(folder)
            return folder
        except CheckpointError as error:
            warn(f"{error.message}; going back to the checkpoint before it")
    if found:
        raise CheckpointError(f"no checkpoint in {root} is whole", "choose another --output-dir to start anew")
    return None


def resolve_model_folder(path: str) -> Path:
    """What a model path means: a Hugging Face folder, a checkpoint, or a run (its best checkpoint, else its newest)."""
    folder = Path(path)
    root = folder / CHECKPOINTS
    if (folder / "metrics.jsonl").is_file() and not manifest.list_checkpoints(root):
        raise UsageError(f"{folder} is a run without a checkpoint")
    if (folder / "config.json").is_file() and not root.is_dir():
        if (folder / manifest.MANIFEST).is_file():
            manifest.verify(folder)
        return folder
    found = dict(manifest.list_checkpoints(root))
    if found:
        best = best_step(root)
        chosen = found[best if best in found else max(found)]
        manifest.verify(chosen)
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
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in _load(folder / OPTIMIZER_FILE).items():
        name, _, kind = key.rpartition("/")
        by_name.setdefault(name, {})[kind] = value
    for whole, parameter in model.module.named_parameters():
        pieces = [by_name.get(name, {}) for name, _ in model.pieces_of(whole, parameter)]
        state = {
            kind: pieces[0][kind] if pieces[0][kind].dim() == 0 else torch.cat([piece[kind] for piece in pieces])
            for kind in pieces[0]
        }
        if state and state["exp_avg"].shape != parameter.shape:
            raise CheckpointError(
                f"{folder / OPTIMIZER_FILE}: the moments of {whole} have another shape than the model"
            )
        # AdamW counts its steps beside the parameter when fused, and the moments are as wide as the parameter.
        optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in state.items()}


def restore_random(folder: Path) -> None:
    states = _load(folder / RANDOM_FILE)
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _named(path: Path, newer_than: list[tuple[int, Path]]) -> Path:
    if not (path / manifest.MANIFEST).is_file():
        raise CheckpointError(f"{path} is not a whole checkpoint (it has no {manifest.MANIFEST})")
    manifest.verify(path)
    step = read_state(path)["step"]
    ahead = [folder.name for number, folder in newer_than if number > step]
    if ahead:
        raise CheckpointError(
            f"output_dir holds checkpoints newer than {path.name}: {', '.join(ahead[:4])}",
            "they belong to another course of the run: move them away, or choose another --output-dir",
        )
    return path


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: damaged or missing: {error}") from None

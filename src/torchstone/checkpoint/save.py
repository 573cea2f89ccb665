"""Writes a checkpoint: a Hugging Face folder that also holds what training needs to go on.

Transformers loads the folder as it is (config.json, model.safetensors, the tokenizer). Beside them lie the optimizer's
moments under the names of their parameters, the random states, and the counters; safetensors and JSON, no pickle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from torchstone.checkpoint import manifest
from torchstone.data.tokenize import Tokenizer
from torchstone.errors import CheckpointError
from torchstone.models.model import GENERATION_FILE, Model

OPTIMIZER_FILE = "optimizer.safetensors"
RANDOM_FILE = "random.safetensors"
STATE_FILE = "state.json"
BEST_FILE = "best.json"


def save_checkpoint(
    root: Path, step: int, model: Model, tokenizer: Tokenizer, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> Path:
    final = root / manifest.folder_name(step)
    with manifest.committed(final) as folder:
        write_model_folder(model, tokenizer, folder)
        save_file(optimizer_tensors(optimizer, model), folder / OPTIMIZER_FILE)
        save_file(random_states(), folder / RANDOM_FILE)
        manifest.write_json(folder / STATE_FILE, state)
    return final


def write_model_folder(model: Model, tokenizer: Tokenizer, folder: Path) -> None:
    """What Transformers needs to load the model and its tokenizer."""
    model.save(folder)
    tokenizer.save(folder)
    if model.generation is None:
        # Without it Transformers' generate would not stop where a turn ends.
        stops = tokenizer.stop_ids
        settings: dict[str, Any] = {"pad_token_id": tokenizer.pad_id}
        settings |= {"eos_token_id": stops[0] if len(stops) == 1 else stops} if stops else {}
        manifest.write_json(folder / GENERATION_FILE, settings)


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: Model) -> dict[str, Tensor]:
    """`layers.0.mlp.up.weight/exp_avg` -> tensor, for every parameter that has been stepped; moments of matrices that
    run fused lie apart, so that a run may go on in another layout."""
    found: dict[str, Tensor] = {}
    for whole, parameter in model.module.named_parameters():
        names = [name for name, _ in model.pieces_of(whole, parameter)]
        for key, value in optimizer.state.get(parameter, {}).items():
            tensor = torch.as_tensor(value).detach().cpu()
            # The count of steps is one number for the whole parameter, and so each piece's.
            scalar = tensor.dim() == 0
            pieces = [tensor.clone() for _ in names] if scalar else [p for _, p in model.pieces_of(whole, tensor)]
            found |= {f"{name}/{key}": piece.contiguous() for name, piece in zip(names, pieces, strict=True)}
    return found


def random_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def mark_best(root: Path, step: int, loss: float) -> None:
    manifest.write_json(root / BEST_FILE, {"step": step, "val_loss": loss})


def best_step(root: Path) -> int | None:
    """The step that is marked as the best."""
    if not (root / BEST_FILE).is_file():
        return None
    step = manifest.read_json(root / BEST_FILE).get("step")
    if not isinstance(step, int):
        raise CheckpointError(f"{root / BEST_FILE}: damaged: it names no step", "remove the file to use the newest")
    return step


def remove_old(root: Path, keep_last: int | None) -> list[int]:
    """Removes all but the newest `keep_last` checkpoints and the best one; returns the steps that went."""
    if keep_last is None:
        return []
    best = best_step(root)
    gone = []
    for step, folder in manifest.list_checkpoints(root)[:-keep_last]:
        if step != best:
            manifest.remove(folder)
            gone.append(step)
    return gone

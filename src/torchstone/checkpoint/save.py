"""Writes a checkpoint: a Hugging Face folder that also holds what training needs to go on.

Transformers loads the folder as it is (config.json, model.safetensors, the tokenizer). Beside them lie the optimizer's
moments under the names of their parameters, the random states, and the counters; safetensors and JSON, no pickle.

Several ranks write side by side: each the boxes it holds of the weights (weights-00003.safetensors) and of the moments
(optimizer-00003.safetensors), so that none has to hold, or wait for, what another has. Which box of what each is stands
in the files. Such a folder loads into any layout; `torchstone export` makes the Hugging Face folder of it.
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
from torchstone.models.sliced_files import Slice, write_slices
from torchstone.models.slices import OPTIMIZER, slice_file
from torchstone.parallel.mesh import ALONE, Place

OPTIMIZER_FILE = "optimizer.safetensors"
RANDOM, RANDOM_FILE = "random", "random.safetensors"
STATE_FILE = "state.json"
BEST_FILE = "best.json"


def save_checkpoint(
    root: Path,
    step: int,
    model: Model,
    tokenizer: Tokenizer,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    place: Place = ALONE,
) -> Path:
    final, rank, ranks = root / manifest.folder_name(step), place.rank, place.layout.world_size
    with manifest.committed(final, place) as folder:
        model.save(folder, rank, ranks)
        alone = ranks == 1
        write_slices(
            folder / OPTIMIZER_FILE if alone else slice_file(folder, OPTIMIZER, rank), moments(optimizer, model)
        )
        save_file(random_states(), folder / RANDOM_FILE if alone else slice_file(folder, RANDOM, rank))
        if place.is_main:
            write_beside(tokenizer, folder)
            manifest.write_json(folder / STATE_FILE, state | {"layout": str(place.layout)})
    return final


def write_beside(tokenizer: Tokenizer, folder: Path) -> None:
    """What Transformers needs beside the model: its tokenizer, and where to stop."""
    tokenizer.save(folder)
    if not (folder / GENERATION_FILE).is_file():
        # Without it Transformers' generate would not stop where a turn ends.
        stops = tokenizer.stop_ids
        settings: dict[str, Any] = {"pad_token_id": tokenizer.pad_id}
        settings |= {"eos_token_id": stops[0] if len(stops) == 1 else stops} if stops else {}
        manifest.write_json(folder / GENERATION_FILE, settings)


def moments(optimizer: torch.optim.Optimizer, model: Model) -> list[Slice]:
    """`layers.0.mlp.up.weight/exp_avg` and the like, for every parameter that has been stepped and counts here; moments
    of matrices that run fused lie apart, so that a run may go on in another layout."""
    found: list[Slice] = []
    for whole, parameter in model.named_parameters():
        if not model.counts(whole, parameter):
            continue
        names = [box.name for box in model.slices_of(whole, parameter.detach())]
        for key, value in optimizer.state.get(parameter, {}).items():
            tensor = torch.as_tensor(value).detach()
            if tensor.dim() == 0:
                # The count of steps is one number for the whole parameter, and so each piece's.
                found += [Slice(f"{name}/{key}", (), (), tensor) for name in names]
            else:
                boxes = model.slices_of(whole, tensor)
                found += [Slice(f"{box.name}/{key}", box.shape, box.offset, box.tensor) for box in boxes]
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

"""Hugging Face folders in and out: config.json, safetensors (one file or shards), names on disk <-> names here.

The map of names is a table (families.py) and one to one, so writing is reading backwards and load(save(x)) == x bit for
bit. Tensors are read one at a time into a model built without memory; a missing or unknown tensor is an error that
lists them, before any weight is used. Nothing here reads a pickle.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from torchstone.errors import CheckpointError, UsageError
from torchstone.models.decoder import Decoder, DecoderConfig
from torchstone.models.families import FAMILIES, Family, family_of

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
COMPANIONS = ("generation_config.json",)
SHARD_BYTES = 5 * 10**9
# Buffers that old exports stored; they hold nothing that was trained.
NOT_WEIGHTS = ("rotary_emb.inv_freq",)


@dataclass
class Model:
    """A decoder together with what its folder says of it."""

    decoder: Decoder
    hf_config: dict[str, Any]
    family: Family
    # Files that came with the model and go with it, such as how it likes to be sampled.
    companions: dict[str, bytes] = field(default_factory=dict)


def new_model(family: str, config: DecoderConfig, attention: str, device: torch.device) -> Model:
    with device:
        decoder = Decoder(config, attention)
    entry = FAMILIES[family]
    return Model(decoder, entry.write(config), entry)


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        what = "is not a Hugging Face folder (it has no config.json)" if folder.is_dir() else "does not exist"
        raise UsageError(f"model folder {folder} {what}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a readable JSON file: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path}: not an object")
    return value


def read_shape(folder: Path) -> tuple[dict[str, Any], Family, DecoderConfig]:
    """What config.json says the model is; a family or a shape that cannot be built is refused before anything else."""
    hf_config = read_config(folder)
    place = folder / "config.json"
    family = family_of(hf_config, str(place))
    try:
        return hf_config, family, family.read(hf_config)
    except KeyError as error:
        raise UsageError(f"{place}: the key {error} is missing") from None
    except UsageError as error:
        raise UsageError(f"{place}: {error.message}", error.hint) from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise UsageError(f"{place}: does not describe a model: {error}") from None


def load_model(folder: Path, attention: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Model:
    hf_config, family, config = read_shape(folder)
    with torch.device("meta"):
        decoder = Decoder(config, attention).to(dtype)
    decoder.to_empty(device=device)
    if config.tied:
        # to_empty gives each name its own memory; tied weights are one tensor again.
        decoder.head.weight = decoder.tok_embed.weight
    load_weights(decoder, family, folder)
    companions = {name: (folder / name).read_bytes() for name in COMPANIONS if (folder / name).is_file()}
    return Model(decoder, hf_config, family, companions)


@torch.no_grad()
def load_weights(decoder: Decoder, family: Family, folder: Path) -> None:
    """Fills `decoder` from the folder's safetensors, every parameter exactly once."""
    wanted = dict(decoder.named_parameters())
    files = weight_files(folder)
    names = {name: file for file in files for name in _names_in(file)}
    places = {name: family.ours(name) for name in names if not name.endswith(NOT_WEIGHTS)}
    copies = [name for name, ours in places.items() if ours == "head.weight" and decoder.config.tied]
    unknown = sorted(name for name, ours in places.items() if ours not in wanted and name not in copies)
    missing = sorted(family.theirs(name) for name in set(wanted) - set(places.values()))
    if unknown or missing:
        raise CheckpointError(
            f"{folder}: the weights do not fit config.json",
            "; ".join(
                f"{what}: {', '.join(found[:8])}{f' and {len(found) - 8} more' if len(found) > 8 else ''}"
                for what, found in (("missing", missing), ("unknown", unknown))
                if found
            ),
        )
    for file in files:
        for name, tensor in _tensors_in(file, [n for n in places if names[n] == file and n not in copies]):
            _copy(tensor, wanted[places[name]], name, file)
    for name in copies:
        for _, tensor in _tensors_in(names[name], [name]):
            _check_tied_copy(tensor, decoder, names[name])


def save_weights(decoder: Decoder, family: Family, folder: Path, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Writes the parameters under their names on disk; more than `shard_bytes` become several files with an index."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, parameter in decoder.named_parameters():
        tensor = parameter.detach().cpu().contiguous()
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][family.theirs(name)] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE_FILE, metadata={"format": "pt"})
        return [folder / SINGLE_FILE]
    written, where = [], {}
    for number, shard in enumerate(shards, start=1):
        path = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        written.append(path)
        where.update(dict.fromkeys(shard, path.name))
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return [*written, folder / INDEX_FILE]


def write_config(model: Model, folder: Path) -> None:
    """config.json as it was loaded or made, with the numbers' type that the weights now have, and what came with it."""
    for name, content in model.companions.items():
        (folder / name).write_bytes(content)
    dtype = str(model.decoder.tok_embed.weight.dtype).removeprefix("torch.")
    config = {key: value for key, value in model.hf_config.items() if key != "torch_dtype"} | {"dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index}: not a readable index: {error}") from None
        files = [folder / name for name in sorted(set(weight_map.values()))]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise CheckpointError(f"{folder}: shards named in {INDEX_FILE} are not there: {', '.join(absent)}")
        return files
    if not (folder / SINGLE_FILE).is_file():
        others = sorted(path.name for path in folder.glob("*.bin"))
        hint = f"{others[0]} is a pickle, which is never read; convert it to safetensors first" if others else None
        raise CheckpointError(f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE}", hint)
    return [folder / SINGLE_FILE]


def _names_in(file: Path) -> list[str]:
    with _opened(file) as handle:
        return list(handle.keys())


def _tensors_in(file: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    with _opened(file) as handle:
        for name in names:
            yield name, handle.get_tensor(name)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: damaged or not a safetensors file: {error}") from None


def _copy(tensor: Tensor, parameter: Tensor, name: str, file: Path) -> None:
    if tensor.shape != parameter.shape:
        raise CheckpointError(
            f"{file}: {name} has shape {list(tensor.shape)}, but config.json asks for {list(parameter.shape)}"
        )
    parameter.copy_(tensor)


def _check_tied_copy(tensor: Tensor, decoder: Decoder, file: Path) -> None:
    embedding = decoder.tok_embed.weight
    if tensor.shape != embedding.shape or not torch.equal(tensor.to(embedding), embedding):
        raise CheckpointError(
            f"{file}: config.json ties the output head to the embedding, but the file holds a different lm_head.weight",
            'set "tie_word_embeddings": false in config.json to keep both',
        )

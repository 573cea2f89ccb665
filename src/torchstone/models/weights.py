"""Hugging Face folders in and out: config.json, safetensors (one file or shards), names on disk <-> names here.

Both sides of the map are made of the same pieces. A tensor on disk is one piece, or several one below the other (as
Phi-3's qkv_proj), perhaps on its side (GPT-2); a parameter here is one piece, or several where the model runs fused. So
one table (families.py) serves both ways and every layout, load(save(x)) == x bit for bit, and how a model runs never
shows in a file. Tensors are read row by row into the place where they stay; a missing or unknown tensor is an error
that lists them, before any weight is read. Nothing here reads a pickle.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from torchstone.errors import CheckpointError, UsageError
from torchstone.models.decoder import Decoder, DecoderConfig
from torchstone.models.families import Family, Stored, family_of
from torchstone.models.tensor_files import TensorFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9


class NotNative(UsageError):
    """A model that is sound, but not one that the decoder here computes."""


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
    """What config.json says the model is. `NotNative` where the decoder does not compute it."""
    from huggingface_hub.errors import StrictDataclassError

    hf_config = read_config(folder)
    place = folder / "config.json"
    if (folder / "adapter_config.json").exists():
        raise UsageError(f"{folder}: holds an adapter (adapter_config.json)", "merge it into its model first")
    try:
        family = family_of(hf_config)
        return hf_config, family, family.read(hf_config)
    except KeyError as error:
        key = str(error.args[0])
        # Transformers puts whole sentences in them.
        raise UsageError(f"{place}: {f'the key {key!r} is missing' if key.isidentifier() else key}") from None
    except UsageError as error:
        raise NotNative(f"{place}: {error.message}", error.hint) from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError, StrictDataclassError) as error:
        raise UsageError(f"{place}: does not describe a model: {error}") from None


class Files:
    """The tensors of a folder, checked against a model by name and shape before any of them is read."""

    def __init__(self, folder: Path, family: Family, decoder: Decoder) -> None:
        self.file_of = tensors_of(folder)
        wanted = decoder.pieces()
        self.stored: dict[str, Stored] = {}
        self.head_copies, unknown = [], []
        # A file of the body alone has no head, and does not name the body either.
        bare = not any(name.startswith(family.prefix) for name in self.file_of)
        for name in self.file_of:
            stored = family.stored(name) or (family.stored(family.prefix + name) if bare else None)
            if name.endswith(family.not_weights):
                continue
            if stored is not None and all(part in wanted for part in stored.parts):
                self.stored[name] = stored
            elif stored is not None and stored.parts == ("head.weight",) and decoder.config.tied:
                self.head_copies.append(name)
            else:
                unknown.append(name)
        there = {part for stored in self.stored.values() for part in stored.parts}
        missing = list(family.on_disk({name: None for name in wanted if name not in there}))
        if unknown or missing:
            raise CheckpointError(
                f"{folder}: the weights do not fit config.json", _listed(missing=missing, unknown=unknown)
            )
        for name, stored in self.stored.items():
            self._check_shape(name, stored, wanted)

    def _check_shape(self, name: str, stored: Stored, wanted: dict[str, Tensor]) -> None:
        first = wanted[stored.parts[0]].shape
        shape = [sum(wanted[part].shape[0] for part in stored.parts), *first[1:]]
        shape = shape[::-1] if stored.transposed else shape
        file = self.file_of[name]
        if not file.dtype(name).is_floating_point:
            numbers = str(file.dtype(name)).removeprefix("torch.")
            raise CheckpointError(f"{file.path}: {name} holds {numbers}, which are no weights to train")
        if list(file.shape(name)) != shape:
            raise CheckpointError(
                f"{file.path}: {name} has shape {list(file.shape(name))}, but config.json asks for {shape}"
            )

    @torch.no_grad()
    def load(self, decoder: Decoder) -> None:
        """Fills `decoder`, every piece exactly once."""
        places = decoder.pieces()
        for name, stored in self.stored.items():
            file = self.file_of[name]
            if stored.transposed:
                rows = file.read(name).T.split([len(places[part]) for part in stored.parts])
                for part, piece in zip(stored.parts, rows, strict=True):
                    places[part].copy_(piece)
                continue
            start = 0
            for part in stored.parts:
                file.read_into(name, places[part], start)
                start += len(places[part])
        for name in self.head_copies:
            self._check_head(name, decoder.tok_embed.weight)

    def _check_head(self, name: str, embedding: Tensor) -> None:
        file = self.file_of[name]
        same = file.shape(name) == tuple(embedding.shape)
        for at in range(0, len(embedding) if same else 0, 1024):
            rows = embedding[at : at + 1024]
            same = same and torch.equal(file.read(name, at, at + len(rows)).to(rows), rows)
        if not same:
            raise CheckpointError(
                f"{file.path}: config.json ties the output head to the embedding, but the file has a different {name}",
                'set "tie_word_embeddings": false in config.json to keep both',
            )


def disk_tensors(pieces: dict[str, Tensor], family: Family) -> dict[str, Tensor]:
    """The tensors on disk that `pieces` (parameters, or moments shaped like them) make."""
    return {name: _joined(pieces, stored) for name, stored in family.on_disk(pieces).items()}


def save_weights(decoder: Decoder, family: Family, folder: Path, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Writes the parameters under their names on disk; more than `shard_bytes` become several files with an index."""
    pieces = {name: piece.detach() for name, piece in decoder.pieces().items()}
    shards: list[dict[str, Stored]] = [{}]
    size = 0
    for name, stored in family.on_disk(pieces).items():
        added = sum(pieces[part].nbytes for part in stored.parts)
        if shards[-1] and size + added > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = stored
        size += added
    if len(shards) == 1:
        _write(shards[0], pieces, folder / SINGLE_FILE)
        return [folder / SINGLE_FILE]
    written, where = [], {}
    for number, shard in enumerate(shards, start=1):
        path = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(shard, pieces, path)
        written.append(path)
        where.update(dict.fromkeys(shard, path.name))
    total = sum(piece.nbytes for piece in pieces.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return [*written, folder / INDEX_FILE]


def tensors_of(folder: Path) -> dict[str, TensorFile]:
    """Every tensor of a folder, and the file that has it; no file is read beyond its header."""
    found: dict[str, TensorFile] = {}
    for file in map(TensorFile, weight_files(folder)):
        for name in file.names:
            if name in found:
                raise CheckpointError(f"{folder}: {name} is in {found[name].path.name} and in {file.path.name}")
            found[name] = file
    return found


def weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            files = [folder / name for name in sorted(set(weight_map.values()))]
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: not a readable index: {error}") from None
        outside = [file for file in files if file.parent != folder]
        if outside:
            named = outside[0].relative_to(folder) if outside[0].is_relative_to(folder) else outside[0]
            raise CheckpointError(f"{index}: names {named}, which is not in the folder")
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise CheckpointError(f"{folder}: shards named in {INDEX_FILE} are not there: {', '.join(absent)}")
        if (folder / SINGLE_FILE).is_file() and folder / SINGLE_FILE not in files:
            raise CheckpointError(
                f"{folder}: both {SINGLE_FILE} and {INDEX_FILE} with shards are there; Transformers reads the first",
                "remove the stale one",
            )
        return files
    if not (folder / SINGLE_FILE).is_file():
        others = sorted(path.name for path in folder.glob("*.bin"))
        hint = f"{others[0]} is a pickle, which is never read; convert it to safetensors first" if others else None
        raise CheckpointError(f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE}", hint)
    return [folder / SINGLE_FILE]


def _listed(**found: list[str]) -> str:
    return "; ".join(
        f"{what}: {', '.join(sorted(names)[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
        for what, names in found.items()
        if names
    )


def _joined(pieces: dict[str, Tensor], stored: Stored) -> Tensor:
    parts = [pieces[part].cpu() for part in stored.parts]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (whole.T if stored.transposed else whole).contiguous()


def _write(shard: dict[str, Stored], pieces: dict[str, Tensor], path: Path) -> None:
    save_file({name: _joined(pieces, stored) for name, stored in shard.items()}, path, metadata={"format": "pt"})

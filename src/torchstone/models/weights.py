"""Hugging Face folders in and out: config.json, safetensors (one file or shards), names on disk <-> names here.

Both sides of the map are made of the same pieces. A tensor on disk is one piece, or several one below the other (as
Phi-3's qkv_proj), perhaps on its side (GPT-2); a parameter here is one piece, or several where the model runs fused. So
one table (families.py) serves both ways and every layout, load(save(x)) == x bit for bit, and how a model runs never
shows in a file. Tensors are read row by row into the place where they stay, and of any piece any box alone; a missing
or unknown tensor is an error that lists them, before any weight is read. Written is one tensor at a time, from whatever
has the pieces. Nothing here reads a pickle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from torchstone.errors import CheckpointError, UsageError
from torchstone.models.decoder import Decoder, DecoderConfig
from torchstone.models.families import Family, Stored, family_of
from torchstone.models.tensor_files import TensorFile, TensorWriter

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
        self.shapes = {name: tuple(piece.shape) for name, piece in wanted.items()}
        # The tensor on disk that has a piece, and the row of it where the piece begins.
        self._places: dict[str, tuple[str, int]] = {}
        for name, stored in self.stored.items():
            self._check_shape(name, stored)
            row = 0
            for part in stored.parts:
                self._places[part] = name, row
                row += self.shapes[part][0]

    @property
    def bytes_read(self) -> int:
        """Of tensors, so far; headers are not among them."""
        return sum(file.bytes_read for file in {id(file): file for file in self.file_of.values()}.values())

    def shape(self, piece: str) -> tuple[int, ...]:
        return self.shapes[piece]

    def read_into(self, piece: str, target: Tensor, offset: Sequence[int]) -> None:
        """Overwrites `target` with the box of a piece that has its shape and begins at `offset`, wherever that lies on
        disk, in its own dtype and on its own device. No other bytes are read."""
        name, row = self._places[piece]
        shape, size = self.shapes[piece], tuple(target.shape)
        # Beyond the piece's own rows the file goes on with another piece's.
        if not len(offset) == len(size) == len(shape) or offset[0] < 0 or offset[0] + size[0] > shape[0]:
            raise CheckpointError(
                f"{self.file_of[name].path}: {piece} has shape {list(shape)}, "
                f"but {list(size)} from {list(offset)} on are asked of it"
            )
        transposed = self.stored[name].transposed
        self.file_of[name].read_box_into(name, target, (row + offset[0], *offset[1:]), transposed)

    def _check_shape(self, name: str, stored: Stored) -> None:
        shape = list(_joined_shape(self.shapes, stored))
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
        for stored in self.stored.values():
            for part in stored.parts:
                self.read_into(part, places[part], (0,) * places[part].dim())
        self.check_head_copies(decoder.tok_embed.weight)

    def check_head_copies(self, embedding: Tensor, offset: Sequence[int] = (0, 0)) -> None:
        """Where the head is tied, a file may have it all the same: it has to be the embedding, of which `embedding` is
        the box that begins at `offset`."""
        for name in self.head_copies:
            file = self.file_of[name]
            same = file.shape(name) == self.shapes["tok_embed.weight"]
            for at in range(0, len(embedding) if same else 0, 1024):
                rows = embedding[at : at + 1024]
                read = torch.empty_like(rows)
                file.read_box_into(name, read, (offset[0] + at, offset[1]))
                same = same and torch.equal(read, rows)
            if not same:
                raise CheckpointError(
                    f"{file.path}: config.json ties the output head to the embedding, "
                    f"but the file has a different {name}",
                    'set "tie_word_embeddings": false in config.json to keep both',
                )


class Source(Protocol):
    """Whatever has pieces: a model, a folder, files of many ranks."""

    def read_into(self, piece: str, target: Tensor, offset: Sequence[int]) -> None: ...


def disk_tensors(pieces: dict[str, Tensor], family: Family) -> dict[str, Tensor]:
    """The tensors on disk that `pieces` (parameters, or moments shaped like them) make."""
    return {name: _joined(pieces, stored) for name, stored in family.on_disk(pieces).items()}


def save_weights(pieces: dict[str, Tensor], family: Family, folder: Path, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Writes parameters under their names on disk; more than `shard_bytes` become several files with an index."""
    shapes = {name: tuple(piece.shape) for name, piece in pieces.items()}
    dtype = reduce(torch.promote_types, {piece.dtype for piece in pieces.values()})
    return stream_weights(_Held(pieces), family, shapes, dtype, folder, shard_bytes)


def stream_weights(
    source: Source,
    family: Family,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    folder: Path,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Writes the pieces of `shapes` under their names on disk, as `dtype`. In memory is one tensor at a time."""
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    shards: list[dict[str, Stored]] = [{}]
    size = 0
    for name, stored in family.on_disk(dict(shapes)).items():
        added = sum(sizes[part] for part in stored.parts)
        if shards[-1] and size + added > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = stored
        size += added
    if len(shards) == 1:
        _write(shards[0], source, shapes, dtype, folder / SINGLE_FILE)
        return [folder / SINGLE_FILE]
    written, where = [], {}
    for number, shard in enumerate(shards, start=1):
        path = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(shard, source, shapes, dtype, path)
        written.append(path)
        where.update(dict.fromkeys(shard, path.name))
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(where.items()))}
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


class _Held:
    """Pieces that are in memory."""

    def __init__(self, pieces: dict[str, Tensor]) -> None:
        self.pieces = pieces

    def read_into(self, piece: str, target: Tensor, offset: Sequence[int]) -> None:
        box = tuple(slice(begin, begin + size) for begin, size in zip(offset, target.shape, strict=True))
        target.copy_(self.pieces[piece][box])


def _write(
    shard: dict[str, Stored],
    source: Source,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    path: Path,
) -> None:
    """By name, as the format's own writer has them."""
    stored = {name: (shard[name], _joined_shape(shapes, shard[name])) for name in sorted(shard)}
    entries = [(name, dtype, shape[::-1] if each.transposed else shape) for name, (each, shape) in stored.items()]
    with TensorWriter(path, entries, {"format": "pt"}) as writer:
        for (name, _, on_disk), (each, _) in zip(entries, stored.values(), strict=True):
            tensor = torch.empty(on_disk, dtype=dtype, device="cpu")
            rows = (tensor.T if each.transposed else tensor).split([shapes[part][0] for part in each.parts])
            for part, place in zip(each.parts, rows, strict=True):
                source.read_into(part, place, (0,) * place.dim())
            writer.write(name, tensor)


def _joined_shape(shapes: Mapping[str, tuple[int, ...]], stored: Stored) -> tuple[int, ...]:
    return (sum(shapes[part][0] for part in stored.parts), *shapes[stored.parts[0]][1:])

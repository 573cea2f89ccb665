"""The weights of a Hugging Face folder: safetensors files (one, or shards with an index), read and written by slices.

A missing or unknown tensor is an error that lists it, before any weight is read. Any slice of any parameter can be read
alone, directly into its target tensor. Writing takes any `TensorSource` and has one tensor in memory at a time.
load(save(x)) == x, bit for bit. Nothing here reads a pickle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from torchstone.checkpoint.tensor_files import DTYPE_NAMES, TensorFile, open_tensor_file, read_slice_into, write_tensors
from torchstone.checkpoint.weight_names import StoredTensorSpec, WeightNames
from torchstone.errors import CheckpointError
from torchstone.models.decoder import EMBEDDING, HEAD, Decoder
from torchstone.models.tensors import TensorSource, dtype_name
from torchstone.wording import list_first

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
MAX_LISTED = 8
Shapes = Mapping[str, tuple[int, ...]]


class WeightFiles:
    """The tensors of a folder, checked by name and shape against a decoder. A `TensorSource`."""

    def __init__(self, folder: Path, names: WeightNames, decoder: Decoder) -> None:
        self.files = open_tensors(folder)
        parameters = decoder.unfused_parameters()
        self.stored: dict[str, StoredTensorSpec] = {}
        self.head_copies, unknown = [], []
        # The file of a headless model leaves out the prefix.
        is_headless = not any(name.startswith(names.prefix) for name in self.files)
        for name in self.files:
            stored = names.stored_tensor(name) or (names.stored_tensor(names.prefix + name) if is_headless else None)
            if names.is_ignored(name):
                continue
            if stored is not None and all(parameter in parameters for parameter in stored.parameter_names):
                self.stored[name] = stored
            elif stored is not None and stored.parameter_names == (HEAD,) and decoder.config.tied:
                self.head_copies.append(name)
            else:
                unknown.append(name)
        present = {parameter for stored in self.stored.values() for parameter in stored.parameter_names}
        missing = list(names.stored_tensors(name for name in parameters if name not in present))
        if unknown or missing:
            raise CheckpointError(
                f"{folder}: the weights do not match config.json", list_names(missing=missing, unknown=unknown)
            )
        self.shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        # Bytes of tensor data read so far.
        self.bytes_read = 0
        # Every parameter, as a view of the tensor in a file that holds it.
        self._parameters: dict[str, Tensor] = {}
        for name, stored in self.stored.items():
            self._check_tensor(name, stored)
            self._parameters |= _split(self.files[name].tensors[name], stored, self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def read_into(self, name: str, target: Tensor, offset: Sequence[int]) -> None:
        """Overwrites `target`, in its dtype and on its device, with a slice of parameter `name`."""
        self.bytes_read += read_slice_into(self._parameters[name], target, offset)

    def check_head_copies(self, embedding: Tensor, offset: Sequence[int] = (0, 0)) -> None:
        """A tied head that is also in a file must equal the embedding. `embedding` is the slice of it at `offset`."""
        for name in self.head_copies:
            head = self.files[name].tensors[name]
            is_equal = tuple(head.shape) == self.shapes[EMBEDDING]
            for start in range(0, len(embedding) if is_equal else 0, 1024):
                chunk = embedding[start : start + 1024]
                copy = torch.empty_like(chunk)
                self.bytes_read += read_slice_into(head, copy, (offset[0] + start, offset[1]))
                is_equal = is_equal and torch.equal(copy, chunk)
            if not is_equal:
                raise CheckpointError(
                    f"{self.files[name].path}: config.json ties the head to the embedding, but {name} differs from it",
                    'set "tie_word_embeddings": false in config.json to keep both',
                )

    def _check_tensor(self, name: str, stored: StoredTensorSpec) -> None:
        shape = list(_stacked_shape(self.shapes, stored))
        shape = shape[::-1] if stored.is_transposed else shape
        path, tensor = self.files[name].path, self.files[name].tensors[name]
        if not tensor.is_floating_point() or tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{path}: {name} has dtype {dtype_name(tensor.dtype)}, which cannot be trained")
        if list(tensor.shape) != shape:
            raise CheckpointError(f"{path}: {name} has shape {list(tensor.shape)}, but config.json asks for {shape}")


def hf_tensors(parameters: dict[str, Tensor], names: WeightNames) -> dict[str, Tensor]:
    """Unfused parameters, or tensors shaped like them, by their Hugging Face names."""
    return {name: _stack(parameters, stored) for name, stored in names.stored_tensors(parameters).items()}


def save_weights(
    parameters: dict[str, Tensor], names: WeightNames, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES
) -> list[Path]:
    """Writes unfused parameters under their Hugging Face names."""
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    dtype = reduce(torch.promote_types, {parameter.dtype for parameter in parameters.values()})
    return write_weights(InMemoryTensors(parameters), names, shapes, dtype, folder, max_shard_bytes)


def write_weights(
    source: TensorSource,
    names: WeightNames,
    shapes: Shapes,
    dtype: torch.dtype,
    folder: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[Path]:
    """Writes the parameters of `shapes` as `dtype`; more than `max_shard_bytes` become several files with an index."""
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    shards: list[dict[str, StoredTensorSpec]] = [{}]
    size = 0
    for name, stored in names.stored_tensors(shapes).items():
        tensor_size = sum(sizes[parameter] for parameter in stored.parameter_names)
        if shards[-1] and size + tensor_size > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = stored
        size += tensor_size
    if len(shards) == 1:
        _write_file(shards[0], source, shapes, dtype, folder / SINGLE_FILE)
        return [folder / SINGLE_FILE]
    paths, weight_map = [], {}
    for number, shard in enumerate(shards, start=1):
        path = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(shard, source, shapes, dtype, path)
        paths.append(path)
        weight_map.update(dict.fromkeys(shard, path.name))
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return [*paths, folder / INDEX_FILE]


def open_tensors(folder: Path) -> dict[str, TensorFile]:
    """Every tensor of a folder, and the file that has it. Reads headers only."""
    tensors: dict[str, TensorFile] = {}
    for file in map(open_tensor_file, weight_file_paths(folder)):
        for name in file.tensors:
            if name in tensors:
                raise CheckpointError(f"{folder}: {name} is in {tensors[name].path.name} and in {file.path.name}")
            tensors[name] = file
    return tensors


def weight_file_paths(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        return _indexed_files(folder, index)
    if not (folder / SINGLE_FILE).is_file():
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        hint = f"{pickles[0]} is a pickle, which is never read; convert it to safetensors" if pickles else None
        raise CheckpointError(f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE}", hint)
    return [folder / SINGLE_FILE]


def list_names(**names: list[str]) -> str:
    """`missing: a, b and 3 more; unknown: c`"""
    return "; ".join(f"{kind}: {list_first(sorted(some), MAX_LISTED)}" for kind, some in names.items() if some)


def _indexed_files(folder: Path, index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files = [folder / name for name in sorted(set(weight_map.values()))]
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not a readable index: {error}") from None
    outside = [file for file in files if file.parent != folder]
    if outside:
        name = outside[0].relative_to(folder) if outside[0].is_relative_to(folder) else outside[0]
        raise CheckpointError(f"{index}: {name} is not in the folder")
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(f"{folder}: shards in {INDEX_FILE} are missing: {', '.join(absent)}")
    if (folder / SINGLE_FILE).is_file() and folder / SINGLE_FILE not in files:
        raise CheckpointError(
            f"{folder}: has both {SINGLE_FILE} and {INDEX_FILE}; Transformers reads the first", "remove the stale one"
        )
    return files


def _stack(parameters: dict[str, Tensor], stored: StoredTensorSpec) -> Tensor:
    parts = [parameters[name].cpu() for name in stored.parameter_names]
    tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (tensor.T if stored.is_transposed else tensor).contiguous()


class InMemoryTensors:
    """A `TensorSource` of tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def read_into(self, name: str, target: Tensor, offset: Sequence[int]) -> None:
        read_slice_into(self.tensors[name], target, offset)


def _write_file(
    shard: dict[str, StoredTensorSpec], source: TensorSource, shapes: Shapes, dtype: torch.dtype, path: Path
) -> None:
    """Writes one file, with one tensor in memory at a time."""

    def empty(stored: StoredTensorSpec, device: str) -> Tensor:
        shape = _stacked_shape(shapes, stored)
        return torch.empty(shape[::-1] if stored.is_transposed else shape, dtype=dtype, device=device)

    def load(name: str) -> Tensor:
        tensor = empty(shard[name], "cpu")
        for parameter, view in _split(tensor, shard[name], shapes).items():
            source.read_into(parameter, view, (0,) * view.dim())
        return tensor

    write_tensors(path, {name: empty(stored, "meta") for name, stored in shard.items()}, {"format": "pt"}, load)


def _split(tensor: Tensor, stored: StoredTensorSpec, shapes: Shapes) -> dict[str, Tensor]:
    """The parameters that a stored tensor holds, as views of it."""
    stacked = tensor.T if stored.is_transposed else tensor
    parts = stacked.split([shapes[name][0] for name in stored.parameter_names])
    return dict(zip(stored.parameter_names, parts, strict=True))


def _stacked_shape(shapes: Shapes, stored: StoredTensorSpec) -> tuple[int, ...]:
    return (sum(shapes[name][0] for name in stored.parameter_names), *shapes[stored.parameter_names[0]][1:])

"""The files of OSFT: checkpoints of what was trained, and a cache of singular vectors for later runs.

A checkpoint names its base model in osft_config.json and has its tensors as shards, also if a single process saved it:
Z and P of every target and, if they are trained, all other parameters. Every command opens it as the merged model.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchstone import atomic
from torchstone.checkpoint.manifest import read_json, write_json
from torchstone.checkpoint.shard_files import WEIGHTS, ShardedFiles, shard_files
from torchstone.checkpoint.tensor_files import open_tensor_file, write_tensors
from torchstone.errors import CheckpointError, UsageError
from torchstone.models.tensors import TensorSource
from torchstone.parallel.mesh import SINGLE_PROCESS, ParallelContext, local_rank, local_world_size
from torchstone.tuning.osft import is_decomposition, singular_vectors
from torchstone.user_cache import user_cache

CONFIG_FILE = "osft_config.json"
VECTORS = "singular_vectors"
# How long those of a model are kept after the last start of a run. They take 11 GB for a model of 8B parameters.
UNUSED_DAYS = 30
Digest = tuple[int, int]


@dataclass(frozen=True)
class OsftConfig:
    """osft_config.json: the model that was tuned, and r, the number of trained directions, of its linears."""

    base_model_name_or_path: str
    base_fingerprint: str
    unfreeze_rank_ratio: float
    ranks: Mapping[str, int]


def is_osft_folder(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file()


def write_osft_config(folder: Path, config: OsftConfig) -> None:
    write_json(folder / CONFIG_FILE, asdict(config))


def read_osft_config(folder: Path) -> OsftConfig:
    path = folder / CONFIG_FILE
    try:
        return OsftConfig(**read_json(path))
    except TypeError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None


def open_osft(folder: Path) -> ShardedFiles:
    """The tensors of a checkpoint."""
    return ShardedFiles(shard_files(folder, WEIGHTS))


class SingularVectors:
    """Singular vectors of linears (tuning/osft.py) in files, one for each linear, in a folder of their model.

    Vectors in the folder are checked against the weight before they are used.
    """

    def __init__(self, base: TensorSource, shapes: Mapping[str, tuple[int, ...]], fingerprint: str) -> None:
        """`base`: has the weights, of these `shapes`."""
        self.base, self.shapes, self.folder = base, shapes, user_cache() / "osft" / fingerprint[:32]

    def compute(
        self,
        linears: Sequence[str],
        device: torch.device,
        ctx: ParallelContext = SINGLE_PROCESS,
        on_progress: Callable[[int, str], None] = lambda done, linear: None,
    ) -> tuple[int, int]:
        """Writes the vectors that are missing or wrong. The ranks of a machine share the work.

        Returns how many were computed, and how many were replaced because the first machine has others. All ranks must
        call it.
        """
        error, computed, digests = None, 0, dict[str, Digest]()
        try:
            computed, digests = self._compute_own(linears, device, on_progress)
        except OSError as failure:
            error = self._error(failure)
        ctx.raise_on_all_ranks(error)
        replaced = self._replace_other_vectors(digests, ctx)
        computed, replaced = ctx.all_reduce_sum(torch.tensor([computed, replaced])).tolist()
        return computed, replaced

    def _compute_own(
        self, linears: Sequence[str], device: torch.device, on_progress: Callable[[int, str], None]
    ) -> tuple[int, dict[str, Digest]]:
        """Returns how many were computed, and a digest of each of this rank's share."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # For `remove_unused`. A cache that can only be read will do.
        with suppress(PermissionError):
            os.utime(self.folder)
        own = linears[local_rank() :: local_world_size()]
        computed, digests = 0, dict[str, Digest]()
        with ThreadPoolExecutor(1) as writer:
            written: Future[None] | None = None
            for index, (linear, weight, vectors) in enumerate(self.read_weights(own, device)):
                on_progress(index * local_world_size(), linear)
                if vectors is not None and is_decomposition(weight, vectors):
                    digests[linear] = _digest(vectors)
                    continue
                vectors, computed = singular_vectors(weight), computed + 1
                digests[linear] = _digest(vectors)
                if written is not None:
                    written.result()
                written = writer.submit(self._write, linear, vectors.cpu())
            if written is not None:
                written.result()
        return computed, digests

    def remove_unused(self) -> list[Path]:
        """Removes the vectors of models that no run has started with for UNUSED_DAYS; returns their folders."""
        start, removed = time.time() - UNUSED_DAYS * 86400, list[Path]()
        # Another process may do the same, and the folder may be another user's.
        with suppress(OSError):
            for folder in self.folder.parent.iterdir():
                if folder.is_dir() and folder.stat().st_mtime < start:
                    shutil.rmtree(folder)
                    removed.append(folder)
        return removed

    def _replace_other_vectors(self, digests: Mapping[str, Digest], ctx: ParallelContext) -> int:
        """Where machines have different vectors, each takes those of the first one; returns how many this rank did.

        Ranks hold slices of the same P, so they must have the same vectors. Equal singular values, other hardware or
        another version of torch give others.
        """
        of_ranks, error, replaced = ctx.all_gather_object(digests), None, 0
        for linear in dict.fromkeys(name for each in of_ranks for name in each):
            first = next(rank for rank, each in enumerate(of_ranks) if linear in each)
            expected = of_ranks[first][linear]
            if all(each.get(linear, expected) == expected for each in of_ranks):
                continue
            size = min(self.shapes[f"{linear}.weight"])
            vectors = self.read(linear).contiguous() if ctx.rank == first else torch.empty(size, size)
            ctx.broadcast(vectors, first)
            if digests.get(linear, expected) != expected:
                replaced += 1
                try:
                    self._write(linear, vectors)
                except OSError as failure:
                    error = self._error(failure)
        ctx.raise_on_all_ranks(error)
        return replaced

    def _error(self, failure: OSError) -> UsageError:
        return UsageError(
            f"the singular vectors cannot be written to {self.folder}: {failure}",
            "set TORCHSTONE_CACHE to a folder with space, on every machine",
        )

    def read(self, linear: str) -> Tensor:
        vectors = self._read(linear)
        assert vectors is not None, f"{self._path(linear)} is gone"
        return vectors

    def read_weights(self, linears: Sequence[str], device: torch.device) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Yields linears with their weight and, if there are any, singular vectors, on `device` in fp32.

        A thread reads the next ones meanwhile.
        """

        # Page-locked, because other memory takes several times as long to copy to a GPU.
        pin_memory = device.type == "cuda"

        def read(linear: str) -> tuple[Tensor, Tensor | None]:
            name = f"{linear}.weight"
            weight = torch.empty(self.shapes[name], dtype=torch.float32, pin_memory=pin_memory)
            self.base.read_into(name, weight, (0, 0))
            vectors = self._read(linear)
            return weight, None if vectors is None else torch.empty_like(vectors, pin_memory=pin_memory).copy_(vectors)

        with ThreadPoolExecutor(1) as reader:
            following = [reader.submit(read, linear) for linear in linears[:1]]
            for index, linear in enumerate(linears):
                weight, vectors = following.pop().result()
                following += [reader.submit(read, name) for name in linears[index + 1 : index + 2]]
                if vectors is not None:
                    vectors = vectors.to(device, non_blocking=True)
                yield linear, weight.to(device, non_blocking=True), vectors

    def _write(self, linear: str, vectors: Tensor) -> None:
        path = atomic.temporary_path(self._path(linear), f"partial-{os.getpid()}")
        # One vector after the other: a run reads the last ones.
        write_tensors(path, {VECTORS: vectors.t().contiguous()})
        path.replace(self._path(linear))

    def _read(self, linear: str) -> Tensor | None:
        try:
            return open_tensor_file(self._path(linear)).tensors[VECTORS].t()
        except (CheckpointError, OSError, KeyError):
            return None

    def _path(self, linear: str) -> Path:
        return self.folder / f"{linear}.safetensors"


def _digest(vectors: Tensor) -> Digest:
    """Tells decompositions apart by their bits: integer sums, which are the same on all devices and cost little."""
    bits = vectors.view(torch.int32)
    numbers = torch.arange(1, len(bits) + 1, device=bits.device)
    rows, columns = ((bits.sum(dim, dtype=torch.int64) * numbers).sum() for dim in (1, 0))
    return int(rows), int(columns)

"""The device mesh: the sizes of its dimensions, this process's rank in each, and the collectives between ranks.

Four mesh dimensions, outermost first: `pp` (pipeline stages), `dp_replicate` (replicas of the model), `dp_shard` (FSDP2
shards of one replica), `tp` (tensor-parallel shards of every matrix). Ranks in the innermost dimension communicate
most, so `tp` takes neighboring ranks. The two data-parallel dimensions split the batch; ranks that differ only in pp
or tp see the same rows.

A single process has no mesh.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchstone import heartbeat
from torchstone.config.schema import ParallelConfig
from torchstone.errors import UsageError, WorkerError
from torchstone.launch.rendezvous import LOOPBACK, interface_variables
from torchstone.wording import list_ranks

MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "tp")
# How long a collective may take: one rank may still read a large model from a slow disk.
TIMEOUT = timedelta(minutes=30)
# How long to wait for all ranks at the start: their hosts may have data to prepare.
JOIN_TIMEOUT = timedelta(hours=1)
POLL_SECONDS = 0.05
# The sizes of parallel.tp that an error proposes stay within one machine.
MAX_PROPOSED_TP = 8
# What gloo's errors contain if another rank is gone or does not answer; other backends have exception types for it.
CONNECTION_LOST = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")


@dataclass(frozen=True)
class ParallelDims:
    """The sizes of the mesh dimensions."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        sizes = [f"{dim} {getattr(self, dim)}" for dim in MESH_DIMS if getattr(self, dim) > 1]
        return " x ".join(sizes) or "one process"


def resolve_dims(parallel: ParallelConfig, world_size: int) -> ParallelDims:
    """Returns the sizes for `world_size` processes. By default `dp_shard` takes all ranks that the other sizes leave.

    `dp_replicate` stays 1 unless it is set: sharding costs a little traffic and saves memory.
    """
    sizes = {dim: getattr(parallel, dim) for dim in MESH_DIMS}
    product = math.prod(size for size in sizes.values() if size is not None)
    text = " x ".join(f"{dim} {size}" for dim, size in sizes.items() if size is not None and size > 1) or "1"
    if world_size % product or (sizes["dp_shard"] is not None and product != world_size):
        raise UsageError(
            f"the parallel sizes do not fit {world_size} process{'es' if world_size > 1 else ''}: {text} = {product}",
            _suggest_sizes(sizes, product, world_size),
        )
    sizes["dp_shard"] = sizes["dp_shard"] or world_size // product
    return ParallelDims(**sizes)


@dataclass(frozen=True)
class ParallelContext:
    """This process's ranks in the mesh, and collectives over all ranks. `mesh` may be None in a single process."""

    dims: ParallelDims = ParallelDims()
    rank: int = 0
    mesh: DeviceMesh | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def world_size(self) -> int:
        return self.dims.world_size

    @property
    def tp_rank(self) -> int:
        return self._rank_in("tp")

    @property
    def pp_rank(self) -> int:
        return self._rank_in("pp")

    @property
    def dp_rank(self) -> int:
        """This process's index among the `dims.dp` data-parallel ranks."""
        return self._rank_in("dp_replicate") * self.dims.dp_shard + self._rank_in("dp_shard")

    @cached_property
    def dp_mesh(self) -> DeviceMesh:
        """The mesh of FSDP2: shards, or replicas x shards."""
        assert self.mesh is not None
        return self.mesh["dp_shard"] if self.dims.dp_replicate == 1 else self.mesh["dp_replicate", "dp_shard"]

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sums in place over all ranks; the result is bit-identical on all of them."""
        if self.mesh is not None:
            with heartbeat.waiting_for_ranks():
                dist.all_reduce(values)
        return values

    def all_reduce_max(self, value: int) -> int:
        return self.all_reduce_max_each([value])[0]

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank."""
        return bool(self.all_reduce_max(int(flag)))

    def all_reduce_max_each(self, values: list[int]) -> list[int]:
        """The largest of every value over all ranks, in one all-reduce."""
        if self.mesh is None:
            return values
        # On the CPU, so that no rank waits for its device.
        tensor = torch.tensor(values)
        with heartbeat.waiting_for_ranks():
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return [int(value) for value in tensor.tolist()]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value in rank order. Values are pickled, so keep them small."""
        if self.mesh is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        with heartbeat.waiting_for_ranks():
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrites `tensor`, which is on the CPU, with that of the rank `source`."""
        if self.mesh is not None:
            with heartbeat.waiting_for_ranks():
                dist.broadcast(tensor, source)

    def barrier(self) -> None:
        self.all_reduce_max(0)

    def raise_on_all_ranks(self, error: Exception | None) -> None:
        """Raises the error of the lowest failed rank on all ranks, so that none waits for a rank that gave up."""
        errors = [other for other in self.all_gather_object(error) if other is not None]
        if errors:
            raise errors[0]

    def _rank_in(self, dim: str) -> int:
        return 0 if self.mesh is None else self.mesh[dim].get_local_rank()


SINGLE_PROCESS = ParallelContext()


@contextmanager
def init_distributed(
    parallel: ParallelConfig,
    device: torch.device,
    timeout: timedelta = TIMEOUT,
    join_timeout: timedelta = JOIN_TIMEOUT,
    mesh_of_one: bool = False,
) -> Iterator[ParallelContext]:
    """Joins the process group that RANK, WORLD_SIZE, ... describe, and builds the mesh.

    A collective may take `timeout`; all ranks must join within `join_timeout`. A single process has no group, unless
    `mesh_of_one`.
    """
    world_size = heartbeat.read_int_variable("WORLD_SIZE", 1)
    dims = resolve_dims(parallel, world_size)
    if world_size == 1 and not mesh_of_one:
        yield SINGLE_PROCESS
        return
    is_new_group = not dist.is_initialized()
    # A group of one talks to nobody, but gloo opens a port at the address of the machine's name.
    loopback = interface_variables(LOOPBACK, "GLOO_SOCKET_IFNAME") if world_size == 1 else {}
    os.environ |= loopback
    try:
        if is_new_group:
            _init_process_group(world_size, device, timeout, join_timeout)
        sizes = tuple(getattr(dims, dim) for dim in MESH_DIMS)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=MESH_DIMS)
        yield ParallelContext(dims, dist.get_rank(), mesh)
    finally:
        # A group of several ranks stays open for the next run in these processes: a new group would need a new port.
        if is_new_group and world_size == 1 and dist.is_initialized():
            dist.destroy_process_group()
        for name in loopback:
            del os.environ[name]
    if is_new_group and world_size > 1:
        atexit.register(dist.destroy_process_group)


@contextmanager
def translate_comm_errors() -> Iterator[None]:
    """Turns a lost connection to another rank into a WorkerError: the cause is in another rank's log."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not isinstance(error, dist.DistError) and not any(fragment in text for fragment in CONNECTION_LOST):
            raise
        reason = text.strip().splitlines()[0].split(". ")[0] if text.strip() else type(error).__name__
        raise WorkerError(
            f"lost the connection to the other ranks: {reason}",
            "another rank failed (see its log), does not answer, or the network is down",
        ) from error


def is_distributed() -> bool:
    """Whether this process was started as one of several ranks."""
    return heartbeat.read_int_variable("WORLD_SIZE", 1) > 1


def local_rank() -> int:
    return heartbeat.read_int_variable("LOCAL_RANK", 0)


def local_world_size() -> int:
    return heartbeat.read_int_variable("LOCAL_WORLD_SIZE", 1)


def _init_process_group(world_size: int, device: torch.device, timeout: timedelta, join_timeout: timedelta) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    rank, store = 0, dist.HashStore()
    if world_size > 1:
        rank, store = int(os.environ["RANK"]), _open_store(join_timeout)
        store = dist.PrefixStore(_agree_on_prefix(store, rank, world_size, join_timeout), store)
        store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _open_store(timeout: timedelta) -> dist.Store:
    """Our launcher's file store on one node, which needs no open port; otherwise torchrun's store."""
    # A launch that this process starts must not use the same file.
    path = os.environ.pop(heartbeat.STORE_VARIABLE, None)
    if path:
        return dist.FileStore(path)
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    return store


def _agree_on_prefix(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Waits for all ranks and returns a key prefix for this attempt; an error names the missing ranks.

    torchrun keeps its store when it restarts workers, with the addresses of processes that are gone. Its restart count
    does not identify an attempt, because nodes may count differently. So every rank writes a new nonce, rank 0
    publishes a prefix with the nonces it has read, and a rank accepts a prefix published with its nonce.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    nonce = secrets.token_hex(8)
    store.set(f"nonce/{rank}", nonce)
    prefix, ranks = "", range(world_size)
    while time.monotonic() < deadline:
        if rank == 0:
            nonces = [_read(store, f"nonce/{other}") for other in ranks]
            if None not in nonces and (not prefix or json.loads(_read(store, "start") or "{}").get("nonces") != nonces):
                prefix = secrets.token_hex(8)
                store.set("start", json.dumps({"prefix": prefix, "nonces": nonces}))
            if prefix and all(store.check([f"{prefix}/{other}"]) for other in ranks[1:]):
                store.set(f"{prefix}/go", "")
                return prefix
        else:
            start = json.loads(_read(store, "start") or "{}")
            if start and start["nonces"][rank] == nonce:
                store.set(f"{start['prefix']}/{rank}", "")
                if store.check([f"{start['prefix']}/go"]):
                    return str(start["prefix"])
        time.sleep(POLL_SECONDS)
    missing = [other for other in ranks if other != rank and not store.check([f"nonce/{other}"])]
    names = list_ranks(missing) if missing else "some rank"
    raise WorkerError(
        f"{names} of {world_size} did not join within {timeout.total_seconds():g} s",
        "check that all ranks were started and can reach this machine; --system.join_timeout sets the limit",
    )


def _read(store: dist.Store, key: str) -> str | None:
    return bytes(store.get(key)).decode() if store.check([key]) else None


def _suggest_sizes(sizes: dict[str, int | None], product: int, world_size: int) -> str:
    processes = f"start {product} processes (--nproc {product})"
    dims = [dim for dim, size in sizes.items() if size is not None and size > 1]
    for dim in reversed(dims):
        others = product // (sizes[dim] or 1)
        if world_size % others == 0 and dim != "dp_shard":
            available = world_size // others
            choices = [available]
            if sizes["dp_shard"] is None:
                largest = min(world_size, MAX_PROPOSED_TP) if dim == "tp" else world_size
                choices = [size for size in range(1, largest + 1) if available % size == 0]
            return f"use --parallel.{dim} {' or '.join(map(str, choices))}, or {processes}"
    if sizes["dp_shard"] is not None:
        return f"leave out parallel.dp_shard, which is derived from the others, or {processes}"
    return f"start a multiple of {product} processes, such as --nproc {product}"

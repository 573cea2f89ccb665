"""How the processes of a run share the work: the sizes of the axes, and where this process stands on them.

Four axes, outermost first: `pp` (stages of the layers), `dp_replicate` (copies of the model), `dp_shard` (pieces of one
copy, gathered when needed), `tp` (pieces of every matrix). Neighbours on the innermost axis talk most, so `tp` takes
ranks that lie together. Batches are shared out over the two data axes; ranks that differ in pp or tp alone see the same
rows.

A run of one process that computes in fp32 or pure bf16 needs none of this, and has no mesh. Mixed precision has one
path, FSDP2's, on a mesh of one as well.
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

from torchstone import post
from torchstone.config.schema import ParallelConfig
from torchstone.errors import UsageError, WorkerError

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
# A rank may wait this long for another: as long as reading a large model from a slow disk takes.
TIMEOUT = timedelta(minutes=30)
# And this long for all to be there: their hosts may have data to prepare.
JOIN_TIMEOUT = timedelta(hours=1)
# Seconds between two looks at who is there.
LOOK = 0.05
# What gloo says when another rank is gone, or does not answer; other backends have types of their own.
GONE = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")


@dataclass(frozen=True)
class Layout:
    """The sizes of the axes."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def data_ranks(self) -> int:
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        named = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return " x ".join(named) or "one process"


def layout_of(parallel: ParallelConfig, world_size: int) -> Layout:
    """The axes' sizes for so many processes: those given, and `dp_shard` from what is left of them.

    Copies are made only where they are asked for: to shard costs a little traffic and saves the memory.
    """
    given = {axis: getattr(parallel, axis) for axis in AXES}
    fixed = math.prod(size for size in given.values() if size is not None)
    words = " x ".join(f"{axis} {size}" for axis, size in given.items() if size is not None and size > 1) or "1"
    if world_size % fixed or (given["dp_shard"] is not None and fixed != world_size):
        raise UsageError(
            f"the parallel sizes do not fit {world_size} process{'es' if world_size > 1 else ''}: {words} = {fixed}",
            _sizes_that_fit(given, fixed, world_size),
        )
    given["dp_shard"] = given["dp_shard"] or world_size // fixed
    return Layout(**given)


@dataclass(frozen=True)
class Place:
    """Where this process stands. Without a mesh it is alone."""

    layout: Layout = Layout()
    rank: int = 0
    mesh: DeviceMesh | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def data_ranks(self) -> int:
        return self.layout.data_ranks

    @property
    def data_rank(self) -> int:
        return self.on("dp_replicate") * self.layout.dp_shard + self.on("dp_shard")

    def on(self, axis: str) -> int:
        """This process's number on an axis."""
        return 0 if self.mesh is None else self.mesh[axis].get_local_rank()

    @cached_property
    def data_mesh(self) -> DeviceMesh:
        """Of FSDP2: copies by pieces, or pieces alone."""
        assert self.mesh is not None
        return self.mesh["dp_shard"] if self.layout.dp_replicate == 1 else self.mesh["dp_replicate", "dp_shard"]

    def sum(self, values: Tensor) -> Tensor:
        """The sum of each rank's `values`, the same bits on all."""
        if self.mesh is not None:
            with post.HERE.waiting():
                dist.all_reduce(values)
        return values

    def agree(self, value: int) -> int:
        """The largest of the ranks' numbers."""
        if self.mesh is None:
            return value
        # On the CPU: a device need not be waited for.
        number = torch.tensor([value])
        with post.HERE.waiting():
            dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number.item())

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in their order; small things, pickled."""
        if self.mesh is None:
            return [value]
        found: list[Any] = [None] * self.layout.world_size
        with post.HERE.waiting():
            dist.all_gather_object(found, value)
        return found

    def wait(self) -> None:
        self.agree(0)

    def together(self, error: Exception | None) -> None:
        """An error on one rank becomes one on all, so that none waits for a rank that has given up."""
        errors = [(rank, found) for rank, found in enumerate(self.gather(error)) if found is not None]
        if errors:
            raise errors[0][1]


ALONE = Place()


@contextmanager
def opened(
    parallel: ParallelConfig,
    device: torch.device,
    mixed: bool,
    timeout: timedelta = TIMEOUT,
    join_timeout: timedelta = JOIN_TIMEOUT,
) -> Iterator[Place]:
    """This process's place among those that a launcher has started. An answer may take `timeout`, the start of the
    others `join_timeout`."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    layout = layout_of(parallel, world_size)
    if world_size == 1 and not mixed:
        yield ALONE
        return
    begun = not dist.is_initialized()
    if begun:
        _begin(world_size, device, timeout, join_timeout)
    sizes = tuple(getattr(layout, axis) for axis in AXES)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    try:
        yield Place(layout, dist.get_rank(), mesh)
    finally:
        # Among several it stays, for the next run of these processes: to meet again they would need another port.
        if begun and world_size == 1:
            dist.destroy_process_group()
    if begun and world_size > 1:
        atexit.register(dist.destroy_process_group)


@contextmanager
def contact() -> Iterator[None]:
    """A rank that is gone, or a network, becomes an error for people: what failed is to be looked for elsewhere."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not isinstance(error, dist.DistError) and not any(mark in text for mark in GONE):
            raise
        said = text.strip().splitlines()[0].split(". ")[0] if text.strip() else type(error).__name__
        raise WorkerError(
            f"lost contact with the other ranks: {said}",
            "another rank has failed (its own log says why), does not answer, or the network is gone",
        ) from error


def is_worker() -> bool:
    """Whether somebody has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def local_rank() -> int:
    """This process's number on its machine, and so which of its devices is meant."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _begin(world_size: int, device: torch.device, timeout: timedelta, join_timeout: timedelta) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    rank, store = 0, dist.HashStore()
    if world_size > 1:
        store, rank, _ = next(dist.rendezvous("env://", timeout=join_timeout))
        store = dist.PrefixStore(_meet(store, rank, world_size, join_timeout), store)
        store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _meet(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """The name of this start of the group, once all ranks are there; or an error that says who is not.

    An agent that starts workers again may keep its store, and in it the addresses of those that are gone; how often it
    did so is its own count, which other nodes need not share. So ranks greet with a number that is new each time,
    rank 0 names a start for those that it has seen, and each takes part in one that has seen it.
    """
    until = time.monotonic() + timeout.total_seconds()
    greeting = secrets.token_hex(8)
    store.set(f"greeting/{rank}", greeting)
    start, ranks = "", range(world_size)
    while time.monotonic() < until:
        if rank == 0:
            seen = [_word(store, f"greeting/{number}") for number in ranks]
            if None not in seen and (not start or json.loads(_word(store, "start") or "{}").get("seen") != seen):
                start = secrets.token_hex(8)
                store.set("start", json.dumps({"name": start, "seen": seen}))
            if start and all(store.check([f"{start}/{number}"]) for number in ranks[1:]):
                store.set(f"{start}/go", "")
                return start
        else:
            named = json.loads(_word(store, "start") or "{}")
            if named and named["seen"][rank] == greeting:
                store.set(f"{named['name']}/{rank}", "")
                if store.check([f"{named['name']}/go"]):
                    return str(named["name"])
        time.sleep(LOOK)
    missing = [number for number in ranks if number != rank and not store.check([f"greeting/{number}"])]
    who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}" if missing else "some rank"
    raise WorkerError(
        f"{who} of {world_size} did not come within {timeout.total_seconds():g} s",
        "were they started, and do they reach this machine? --system.join_timeout says how long to wait",
    )


def _word(store: dist.Store, key: str) -> str | None:
    return bytes(store.get(key)).decode() if store.check([key]) else None


def _sizes_that_fit(given: dict[str, int | None], fixed: int, world_size: int) -> str:
    """What could be asked for instead."""
    told = [axis for axis, size in given.items() if size is not None and size > 1]
    for axis in reversed(told):
        others = fixed // (given[axis] or 1)
        if world_size % others == 0 and axis != "dp_shard":
            room = world_size // others if given["dp_shard"] is None else None
            fitting = [size for size in range(1, world_size + 1) if room is not None and room % size == 0]
            if fitting:
                return f"parallel.{axis} could be {', '.join(map(str, fitting))}; or start {fixed} processes"
            return f"parallel.{axis} could be {world_size // others}; or start {fixed} processes"
    if given["dp_shard"] is not None:
        return f"leave out parallel.dp_shard, which follows from the others; or start {fixed} processes"
    return f"start a multiple of {fixed} processes"

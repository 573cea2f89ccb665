"""Checks the collectives between all ranks: are the values right, how fast are they, which ranks do not answer?

A second thread runs each check while the main thread waits for `limit` seconds, because a call can hang forever: NCCL
sets up its connections without a time limit. When a check does not end or fails, all ranks that still run send each
other a message over gloo, and each reports the ranks that sent none (docs/decisions/027-a-short-doctor.md).

It takes a few seconds and six buffers of the largest size. After an error the thread may still hang in a collective,
so the process must end with os._exit, as the `doctor` command does.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from multiprocessing.pool import ThreadPool
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchstone.errors import NumericalError, OutOfMemoryError, TorchstoneError, WorkerError, first_line
from torchstone.wording import plural

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send_recv")
# Bus bandwidth = algorithm bandwidth x factor x (n - 1) / n, as in nccl-tests; for the others they are equal.
BUS_FACTORS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
LATENCY_BYTES = 8
SIZES = {"cpu": (2**16, 2**20, 2**24, 2**26), "cuda": (2**16, 2**20, 2**24, 2**28)}
LIMIT = 60.0
# The time and the calls to measure per size. If one call takes longer, larger sizes are skipped.
MAX_SECONDS, MAX_CALLS = 0.1, 100
# How much later than the first rank, in seconds, the last rank may reach the limit.
GRACE = 3.0
VALUES_HINT = "avoid this rank; test its memory; on GPUs try NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1, NCCL_SHM_DISABLE=1"
NETWORK_HINT = (
    "check the ranks that do not answer; set GLOO_SOCKET_IFNAME (on GPUs also NCCL_SOCKET_IFNAME) to the interface "
    "that connects the machines (ip addr lists them); open all TCP ports in the firewall; or raise --limit"
)


@dataclass(frozen=True)
class Measurement:
    """One collective at one size: the bytes of all ranks' shards, the median seconds of a call on the slowest rank, and
    the bandwidth in bytes per second, which is None where latency is measured."""

    collective: str
    bytes: int
    calls: int
    seconds: float
    algorithm_bandwidth: float | None = None
    bus_bandwidth: float | None = None


@dataclass(frozen=True)
class Report:
    """The result of a check, equal on all ranks. `wrong` has a line for each wrong value."""

    ok: bool
    backend: str
    device: str
    ranks: int
    hosts: list[str]
    wrong: list[str]
    measured: list[Measurement]


def measure(
    device: torch.device,
    limit: float = LIMIT,
    log: Callable[[str], None] = lambda line: None,
    sizes: Sequence[int] | None = None,
) -> Report:
    """Checks and times the collectives; all ranks of the default process group call this together.

    Raises WorkerError if one collective at one size takes longer than `limit` seconds; the timeout of the process group
    must be longer. Wrong values are in the report, and `failure` turns them into an error. `sizes` are ascending bytes.
    """
    n = dist.get_world_size()
    # A single rank sends nothing, so it has no bandwidth.
    sizes = SIZES[device.type] if sizes is None and n > 1 else sizes or ()
    measured: list[Measurement] = []
    hosts, wrong = [""] * n, [[""]] * n
    with ThreadPool(1) as thread:
        check = CollectiveCheck(device, limit, thread)
        if device.type == "cuda":
            # A new thread starts on the first GPU.
            check.run_check("torch.cuda.set_device", torch.cuda.set_device, device)
        check.run_check("the exchange of host names", dist.all_gather_object, hosts, socket.gethostname())
        check.names = [f"rank {rank} on {host}" for rank, host in enumerate(hosts)]
        for name in COLLECTIVES if n > 1 else COLLECTIVES[:-1]:
            log(f"checking {name}")
            rows = list(check.measure_collective(name, sizes))
            measured += rows
            if len(rows) <= len(sizes):
                log(f"skipped {name} above {format_bytes(rows[-1].bytes)} to stay within the time budget")
        measured.append(Measurement("barrier", 0, *check.run_check("barrier", check.check_barrier)))
        check.run_check("the exchange of results", dist.all_gather_object, wrong, check.wrong)
    backend = dict(pair.split(":") for pair in str(dist.get_backend_config()).split(","))[device.type]
    return Report(not any(wrong), backend, device.type, n, hosts, [*dict.fromkeys(chain(*wrong))], measured)


class CollectiveCheck:
    """The checks of one rank. `wrong` has a line for each that gave this rank wrong values."""

    def __init__(self, device: torch.device, limit: float, thread: ThreadPool) -> None:
        self.device, self.limit, self.thread = device, limit, thread
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.names = [f"rank {rank}" for rank in range(self.world_size)]
        self.wrong: list[str] = []

    def run_check(self, title: str, function: Callable[..., Any], *args: Any) -> Any:
        """Returns `function(*args)`, or raises an error that names the silent ranks."""
        deadline = time.monotonic() + self.limit
        try:
            return self.thread.apply_async(function, args).get(self.limit)
        except multiprocessing.TimeoutError:
            reason = f"did not end within {self.limit:g} s"
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(f"{self.names[self.rank]} has no memory for {title}") from error
        except RuntimeError as error:
            reason = f"failed: {first_line(error, '')}"
        # Another rank may be stuck in the check until its own limit, and answers only then.
        silent = find_silent_ranks(max(0.0, deadline - time.monotonic()) + GRACE)
        names = ", ".join(self.names[rank] for rank in silent)
        who = f"no answer from {names}" if silent else f"all {self.world_size} ranks answer over gloo"
        raise WorkerError(f"{title} {reason}; {who}", NETWORK_HINT)

    def measure_collective(self, name: str, sizes: Sequence[int]) -> Iterator[Measurement]:
        n = self.world_size
        bus_factor = BUS_FACTORS[name] * (n - 1) / n if name in BUS_FACTORS else 1.0
        for min_bytes in (LATENCY_BYTES, *sizes):
            # fp32 elements that divide into equal shards.
            numel = -(-min_bytes // (4 * n)) * n
            title = f"{name} of {format_bytes(4 * numel)}"
            calls, seconds = self.run_check(title, self.check_and_time, title, name, numel)
            bandwidth = None if min_bytes == LATENCY_BYTES else 4 * numel / seconds
            yield Measurement(name, 4 * numel, calls, seconds, bandwidth, bandwidth and bandwidth * bus_factor)
            # All ranks have the same figures, so they leave out the same sizes.
            if seconds > MAX_SECONDS:
                return

    def check_and_time(self, title: str, name: str, numel: int) -> tuple[int, float]:
        """Two rounds: the first one warms up, and determines how many calls the second one times."""
        calls, seconds = 1, MAX_SECONDS
        for _ in range(2):
            call, output, expected = self.build_call(name, numel)
            call()
            if not torch.equal(output, expected):
                places = (output != expected).nonzero().flatten()
                first = int(places[0])
                self.wrong.append(
                    f"{title}, {self.names[self.rank]}: {len(places)} of {len(expected)} elements are wrong, "
                    f"the first at {first}: {float(output[first]):g} instead of {float(expected[first]):g}"
                )
            calls = max(1, min(MAX_CALLS, int(MAX_SECONDS / seconds)))
            seconds = self.time_calls(call, calls)
        return calls, seconds

    def build_call(self, name: str, numel: int) -> tuple[Callable[[], object], Tensor, Tensor]:
        """The call, the tensor that it fills, and the values that this tensor must then have.

        Rank r sends `pattern` times r + 1. The period of the pattern is 7, so that a misplaced shard is detected.
        """
        n, shard = self.world_size, numel // self.world_size
        left, right = (self.rank - 1) % n, (self.rank + 1) % n
        pattern = torch.arange(1.0, 8.0, device=self.device).repeat(numel // 7 + 1)[:numel]
        tensor, output = pattern * (self.rank + 1), torch.full_like(pattern, -1.0)
        total = pattern * (n * (n + 1) // 2)
        gathered = torch.cat([pattern[:shard] * (rank + 1) for rank in range(n)])
        # Torch 2.13 deprecates the second name of each.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return {
            "all_reduce": (partial(dist.all_reduce, tensor), tensor, total),
            "all_gather": (partial(all_gather, output, tensor[:shard]), output, gathered),
            "reduce_scatter": (
                partial(reduce_scatter, output[:shard], tensor),
                output[:shard],
                total.chunk(n)[self.rank],
            ),
            "broadcast": (partial(dist.broadcast, tensor, 0), tensor, pattern),
            "send_recv": (partial(exchange, tensor, output, right, left), output, pattern * (left + 1)),
        }[name]

    def check_barrier(self) -> tuple[int, float]:
        """No rank may leave a barrier before all ranks have entered it; the store counts those that have."""
        n, store = self.world_size, dist.group.WORLD.get_group_store()
        barrier = partial(dist.barrier, device_ids=[self.device.index] if self.device.type == "cuda" else None)
        store.add("entered", 1)
        barrier()
        # After an earlier check the count is a multiple of the world size.
        if entered := store.add("entered", 0) % n:
            self.wrong.append(f"barrier, {self.names[self.rank]}: left when {entered} of {n} ranks had entered")
        return MAX_CALLS, self.time_calls(barrier, MAX_CALLS)

    def time_calls(self, call: Callable[[], object], calls: int) -> float:
        """The median seconds of a call on the slowest rank."""
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            call()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            times.append(time.perf_counter() - start)
        seconds = torch.tensor(statistics.median(times), dtype=torch.float64)
        # On the CPU, over gloo. All ranks get the same figure, and start the next calls together.
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()


def find_silent_ranks(timeout: float) -> list[int]:
    """The ranks with which this rank cannot exchange a message over gloo within `timeout` seconds.

    All ranks that still run call this. It ends at once if all answer. The first timeout closes all connections of gloo,
    so several silent ranks take no longer than one.
    """
    silent, works = [], {}
    peers = set(range(dist.get_world_size())) - {dist.get_rank()}
    for peer in peers:
        # A dead peer raises an error. The tag separates these messages from those of the check.
        with suppress(RuntimeError):
            works[peer] = [send(torch.zeros(1), peer, tag=1) for send in (dist.isend, dist.irecv)]
    for peer in peers:
        try:
            for work in works[peer]:
                work.wait(timedelta(seconds=timeout))
        except (KeyError, RuntimeError):
            silent.append(peer)
    return sorted(silent)


def failure(report: Report) -> TorchstoneError | None:
    """The error for wrong values, if there are any."""
    more = f", and {len(report.wrong) - 1} more" if len(report.wrong) > 1 else ""
    return None if report.ok else NumericalError(f"wrong values: {report.wrong[0]}{more}", VALUES_HINT)


def as_text(report: Report) -> str:
    """Returns a table, and below it whether all values are right."""
    lines = [f"{'collective':<16}{'size':>10}{'ms':>12}{'GB/s':>10}{'bus GB/s':>10}"]
    for row in report.measured:
        bandwidths = [f"{x / 1e9:10.3f}" for x in (row.algorithm_bandwidth, row.bus_bandwidth) if x is not None]
        lines.append(f"{row.collective:<16}{format_bytes(row.bytes):>10}{row.seconds * 1e3:12.3f}{''.join(bandwidths)}")
    lines += ["", *(f"wrong: {line}" for line in report.wrong)]
    ranks = f"{plural(report.ranks, 'rank')} over {report.backend}"
    hosts = f" on {len(set(report.hosts))} machines" if len(set(report.hosts)) > 1 else ""
    return "\n".join([*lines, f"collectives: {'ok' if report.ok else 'failed'}, {ranks}{hosts}"]) + "\n"


def exchange(tensor: Tensor, output: Tensor, dst: int, src: int) -> None:
    # In one batch: on NCCL a lone send waits for a receive that the peer issues after its own send.
    send, receive = dist.P2POp(dist.isend, tensor, dst), dist.P2POp(dist.irecv, output, src)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def format_bytes(size: int) -> str:
    unit, name = (2**20, "MiB") if size >= 2**20 else (2**10, "KiB") if size >= 2**10 else (1, "B")
    return f"{size / unit:.4g} {name}"

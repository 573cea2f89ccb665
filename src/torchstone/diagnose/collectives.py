"""The collectives of training, tried between all ranks: are the values right, how fast are they, and who is silent.

A hang has to end with a name. Torch's own limits give none: gloo says that it timed out and not because of whom, NCCL
aborts the process, and the set-up of NCCL's connections has no limit at all. So a second thread makes the calls while
the first looks at the clock, and before each collective a rank writes into the group's store where it stands. When time
is up, every rank that still lives says so there; the silent ones are those to look at. The store also carries results
and agreements, because a collective under test is nothing to build on.

It costs about three seconds and four buffers of the largest size. After an error the second thread may hang in a call
for good and the group is lost: a process that has seen one ends itself with os._exit.
"""

from __future__ import annotations

import itertools
import json
import queue
import re
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from torchstone.errors import NumbersError, OutOfMemoryError, TorchstoneError, WorkerError

KIB, MIB = 2**10, 2**20
SMALL = 8
SIZES = {"cpu": (64 * KIB, MIB, 16 * MIB, 64 * MIB), "cuda": (64 * KIB, MIB, 16 * MIB, 256 * MIB)}
LIMIT = 60.0
# Seconds for all timed calls together. A size of which one call would take SKIP times its share is left out.
BUDGET = 3.0
SKIP = 5.0
WARM_UP = 3
MOST_CALLS = 100
PINGS, LARGE_PINGS = 10, 3
# A link of the ring is worth a line when it takes this many times what is usual.
SLOW = 3.0
# Seconds for the others to notice, too, that time is up. Launchers give not many more before they end everybody.
GRACE = 1.0
LOOK = 0.05
# Fill values have this period: no power of two, so that a block in the wrong place does not look right.
PERIOD = 7
NAMED_RANKS = 8
MOST_WORDS = 500
UNSUPPORTED = re.compile(r"does not (yet )?support|not (yet )?supported|not implemented|no backend type", re.IGNORECASE)

_runs = itertools.count()


@dataclass(frozen=True)
class Case:
    """A collective's buffers at one size, on one rank. What rank r sends is r + 1 times the pattern."""

    rank: int
    ranks: int
    pattern: Tensor
    sent: Tensor
    received: Tensor

    @property
    def part(self) -> int:
        """Elements of one rank's share."""
        return self.pattern.numel() // self.ranks

    @property
    def total(self) -> int:
        return self.ranks * (self.ranks + 1) // 2

    @property
    def left(self) -> int:
        return (self.rank - 1) % self.ranks

    @property
    def right(self) -> int:
        return (self.rank + 1) % self.ranks

    def fill(self) -> None:
        """Own numbers into what is sent; into what is received, what nobody sends, so that doing nothing is wrong."""
        self.received.fill_(-1.0)
        own = self.sent if self.sent.numel() else self.received
        own.copy_(self.pattern[: own.numel()]).mul_(self.rank + 1)


Share = Literal["whole", "part", "nothing"]


@dataclass(frozen=True)
class Collective:
    """A collective as a row of a table. One that sends nothing works in place, on what is received."""

    name: str
    bus_factor: Callable[[int], float]
    """Of n ranks: what the busiest link has to carry at best, over the size of the data. As nccl-tests has it."""
    sends: Share
    receives: Share
    call: Callable[[Case], None]
    expected: Callable[[Case], Tensor]
    least_ranks: int = 1


def _all_reduce(case: Case) -> None:
    dist.all_reduce(case.received)


def _all_gather(case: Case) -> None:
    # From torch 2.13 on the former name is deprecated.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(case.received, case.sent)


def _gathered(case: Case) -> Tensor:
    numbers = torch.arange(1.0, case.ranks + 1, device=case.pattern.device)
    return torch.outer(numbers, case.pattern[: case.part]).flatten()


def _reduce_scatter(case: Case) -> None:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(case.received, case.sent)


def _broadcast(case: Case) -> None:
    dist.broadcast(case.received, 0)


def _send_recv(case: Case) -> None:
    # As a batch: one after the other, every rank's send would wait on NCCL for a receive that is queued behind a send.
    _exchange([dist.P2POp(dist.isend, case.sent, case.right), dist.P2POp(dist.irecv, case.received, case.left)])


def _exchange(operations: list[Any]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()


COLLECTIVES = (
    Collective("all_reduce", lambda n: 2 * (n - 1) / n, "nothing", "whole", _all_reduce, lambda c: c.pattern * c.total),
    Collective("all_gather", lambda n: (n - 1) / n, "part", "whole", _all_gather, _gathered),
    Collective(
        "reduce_scatter", lambda n: (n - 1) / n, "whole", "part", _reduce_scatter,
        lambda c: c.pattern[c.rank * c.part :][: c.part] * c.total,
    ),
    Collective("broadcast", lambda n: 1.0, "nothing", "whole", _broadcast, lambda c: c.pattern),
    Collective("send_recv", lambda n: 1.0, "whole", "whole", _send_recv, lambda c: c.pattern * (c.left + 1), 2),
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One collective at one size; `bytes` is the whole of the data, with all ranks' shares."""

    collective: str
    bytes: int
    calls: int = 0
    seconds: float | None = None
    """Of one call on the slowest rank: the median where single calls are timed (latency), otherwise the mean."""
    worst: float | None = None
    """The longest single call on any rank; of latencies alone."""
    bus_factor: float = 0.0
    wrong: list[str] = field(default_factory=list)
    """What each rank that got a wrong value found."""
    missing: str | None = None
    """Why the collective cannot be had at all."""
    left_out: str | None = None
    """Why it was not tried at this size."""

    @property
    def is_latency(self) -> bool:
        return self.worst is not None

    @property
    def algorithm_bandwidth(self) -> float | None:
        """Bytes per second."""
        return None if self.seconds is None or self.is_latency else self.bytes / self.seconds

    @property
    def bus_bandwidth(self) -> float | None:
        """Bytes per second that the busiest link had to carry."""
        return None if self.algorithm_bandwidth is None else self.algorithm_bandwidth * self.bus_factor


@dataclass(frozen=True)
class Link:
    """Two neighbours of the ring by themselves: one way of a ping, and one way of a MiB."""

    ranks: tuple[int, int]
    hosts: tuple[str, str]
    seconds: float
    seconds_of_large: float

    @property
    def between_hosts(self) -> bool:
        return self.hosts[0] != self.hosts[1]


@dataclass(frozen=True)
class Report:
    """What the ranks found together; the same on each."""

    backend: str
    device: str
    ranks: int
    hosts: list[str]
    measured: list[Measured]
    links: list[Link]

    @property
    def wrong(self) -> list[str]:
        """A line for every wrong value: which collective, which size, which rank."""
        return [
            f"{row.collective}{f' of {_size(row.bytes)}' if row.bytes else ''}, {line}"
            for row in self.measured
            for line in row.wrong
        ]


def measure(
    device: torch.device,
    limit: float = LIMIT,
    say: Callable[[str], None] = lambda line: None,
    sizes: Sequence[int] | None = None,
    budget: float = BUDGET,
    collectives: Sequence[Collective] = COLLECTIVES,
) -> Report:
    """Tries the collectives on all ranks of the default group, which call this together.

    Raises WorkerError where a collective does not end within `limit` seconds, with the ranks that do not answer. The
    group's own timeout should be longer than that: NCCL ends the process at it, before anybody can be named. Wrong
    values do not raise: the report has them, and `failure` makes an error of them. `say` is told what is tried, on
    every rank and in another thread. `sizes` are bytes, ascending; `budget` is about what the timed calls take.
    """
    shared = dist.PrefixStore(f"torchstone/collectives/{next(_runs)}", dist.distributed_c10d._get_default_store())
    # Connections of its own for each thread: one that waits for a key keeps all others of its connection waiting.
    where = Where(dist.get_rank(), dist.get_world_size(), shared.clone())
    if sizes is None:
        # One rank sends nothing anywhere: its gigabytes per second would be those of nothing.
        sizes = SIZES.get(device.type, SIZES["cpu"]) if where.ranks > 1 else ()
    trial = Trial(device, where, say, sizes, budget, collectives)
    outcome: queue.SimpleQueue[Report | BaseException] = queue.SimpleQueue()
    threading.Thread(target=_deliver, args=(trial.run, outcome), name="collectives", daemon=True).start()
    while True:
        try:
            found = outcome.get(timeout=min(LOOK, limit / 10))
        except queue.Empty:
            if time.monotonic() - where.since > limit:
                raise _lost(where, shared.clone, device, f"did not end within {limit:g} s") from None
            continue
        if isinstance(found, Report):
            return found
        raise _translated(found, where, shared.clone, device) from found


def _deliver(run: Callable[[], Report], outcome: queue.SimpleQueue[Report | BaseException]) -> None:
    try:
        outcome.put(run())
    except BaseException as error:
        outcome.put(error)


class Where:
    """Where this rank stands: for its own clock, and in the store for the others."""

    def __init__(self, rank: int, ranks: int, store: dist.Store) -> None:
        self.rank, self.ranks, self.store = rank, ranks, store
        self.host = socket.gethostname()
        self.stage, self.what, self.since = 0, "", time.monotonic()

    def go(self, what: str) -> None:
        self.stage += 1
        self.what = what
        self.beat()
        self.store.set(f"at/{self.rank}", json.dumps([self.stage, what, self.host]))

    def beat(self) -> None:
        """From now on the clock runs anew."""
        self.since = time.monotonic()

    def meet(self, what: str) -> None:
        """All ranks, through the store alone: the seconds by which processes start apart are over after it."""
        self.go(what)
        if self.store.add(f"met/{self.stage}", 1) == self.ranks:
            self.store.set(f"all/{self.stage}", "")
        self.store.get(f"all/{self.stage}")

    def agree(self, value: int) -> int:
        """Rank 0's number, once for each place."""
        if self.rank == 0:
            self.store.set(f"agreed/{self.stage}", str(value))
            return value
        return int(self.store.get(f"agreed/{self.stage}"))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value on rank 0, on the others none."""
        self.store.set(f"value/{self.stage}/{self.rank}", json.dumps(value))
        if self.rank != 0:
            return []
        return [json.loads(self.store.get(f"value/{self.stage}/{rank}")) for rank in range(self.ranks)]


class Trial:
    """What the second thread does on a rank."""

    def __init__(
        self,
        device: torch.device,
        where: Where,
        say: Callable[[str], None],
        sizes: Sequence[int],
        budget: float,
        collectives: Sequence[Collective],
    ) -> None:
        self.device, self.where, self.say, self.sizes, self.collectives = device, where, say, sizes, collectives
        self.rank, self.ranks = where.rank, where.ranks
        # The barrier is one more collective, with latencies only.
        self.share = budget / (len(collectives) * (len(sizes) + 1) + 1)
        self.pattern = torch.empty(0)

    def run(self) -> Report:
        if self.device.type == "cuda":
            # A thread begins on the first GPU, whatever the others chose.
            torch.cuda.set_device(self.device)
        self.where.meet("the meeting before the first collective")
        values = torch.arange(1.0, PERIOD + 1, device=self.device)
        count = self._count(max(SMALL, *self.sizes, MIB))
        self.pattern = values.repeat(-(-count // PERIOD))[:count]
        rows = [row for collective in self.collectives for row in self._collective(collective)]
        rows += self._barrier()
        pairwise = not any(row.missing for row in rows if row.collective == "send_recv")
        return self._together(rows, list(self._links()) if pairwise else [])

    def _collective(self, collective: Collective) -> Iterator[Measured]:
        self.say(f"trying {collective.name}")
        if self.ranks < collective.least_ranks:
            yield Measured(collective.name, 0, missing=f"it needs {collective.least_ranks} ranks")
            return
        before = self._latency(collective)
        yield before
        for size in self.sizes if before.missing is None else ():
            row = self._bandwidth(collective, size, before)
            yield row
            before = row if row.left_out is None else before

    def _latency(self, collective: Collective) -> Measured:
        case = self._case(collective, SMALL)
        size = case.pattern.nbytes
        self.where.go(f"{collective.name} of {_size(size)}")
        try:
            wrong = self._checked(collective, case)
        except (RuntimeError, NotImplementedError) as error:
            if UNSUPPORTED.search(str(error)) is None:
                raise
            return Measured(collective.name, size, missing=_words(error))
        times = self._single_times(lambda: collective.call(case))
        again = self._checked(collective, case)
        return Measured(
            collective.name, size, len(times), statistics.median(times), max(times),
            collective.bus_factor(self.ranks), self._signed(wrong or again),
        )  # fmt: skip

    def _bandwidth(self, collective: Collective, size: int, before: Measured) -> Measured:
        """Values first, which also warms up, and once more after the timed calls, when buffers have been hot."""
        assert before.seconds is not None
        actual = self._count(size) * self.pattern.element_size()
        self.where.go(f"{collective.name} of {_size(actual)}")
        # A small message takes its latency at any size: only between larger ones does the time grow with the bytes.
        seconds = before.seconds * (1.0 if before.is_latency else actual / before.bytes)
        calls = self.where.agree(0 if seconds > SKIP * self.share else self._calls(seconds))
        if calls == 0:
            return Measured(collective.name, actual, left_out=f"one call would take about {_time(seconds)}")
        case = self._case(collective, size)
        wrong = self._checked(collective, case)
        seconds = self._timed(lambda: collective.call(case), calls)
        again = self._checked(collective, case)
        factor = collective.bus_factor(self.ranks)
        return Measured(collective.name, actual, calls, seconds, None, factor, self._signed(wrong or again))

    def _barrier(self) -> list[Measured]:
        """A barrier has no values, but nobody may leave it before everybody has come."""
        self.say("trying barrier")
        self.where.go("barrier")
        devices = [self.device.index] if self.device.type == "cuda" else None
        self.where.store.add("at the barrier", 1)
        dist.barrier(device_ids=devices)
        came = self.where.store.add("at the barrier", 0)
        wrong = None if came == self.ranks else f"it was passed when {came} of {self.ranks} ranks had come"
        times = self._single_times(lambda: dist.barrier(device_ids=devices))
        return [Measured("barrier", 0, len(times), statistics.median(times), max(times), 0.0, self._signed(wrong))]

    def _links(self) -> Iterator[tuple[int, int, float, float]]:
        """Neighbours by themselves, measured by the first of the two; in a round a rank has one partner at most.

        Every rank has as many links as the others, so all of them have counted as many stages afterwards.
        """
        self.say("trying neighbours")
        small, large = (self.pattern[: size // self.pattern.element_size()].clone() for size in (SMALL, MIB))
        for number, pairs in enumerate(ring_rounds(self.ranks)):
            for pair in [pair for pair in pairs if self.rank in pair]:
                self.where.go(f"pings between ranks {pair[0]} and {pair[1]} (round {number + 1})")
                ping, way_of_large = self._pings(pair, small, PINGS), self._pings(pair, large, LARGE_PINGS)
                if self.rank == pair[0]:
                    yield *pair, ping, way_of_large

    def _pings(self, pair: tuple[int, int], message: Tensor, calls: int) -> float:
        """Seconds of one way: half of the median time there and back. The first time is for warming up."""
        other = pair[1] if self.rank == pair[0] else pair[0]
        ways = [dist.isend, dist.irecv] if self.rank == pair[0] else [dist.irecv, dist.isend]

        def there_and_back() -> None:
            for way in ways:
                _exchange([dist.P2POp(way, message, other)])

        times = [self._timed(there_and_back, 1) for _ in range(calls + 1)]
        return statistics.median(times[1:]) / 2

    def _together(self, rows: list[Measured], links: list[tuple[int, int, float, float]]) -> Report:
        self.where.go("collecting the results")
        mine = {"host": self.where.host, "rows": [asdict(row) for row in rows], "links": links}
        found = self.where.gather(mine)
        if self.rank == 0:
            self.where.store.set("report", json.dumps(found))
        found = json.loads(self.where.store.get("report"))
        hosts = [rank["host"] for rank in found]
        pairs = sorted(tuple(link) for rank in found for link in rank["links"])
        # Rank 0 may serve the store: it stays until all have read.
        self.where.go("reading the results")
        self.where.gather(None)
        return Report(
            backend=_backend(self.device),
            device=self.device.type,
            ranks=self.ranks,
            hosts=hosts,
            measured=[
                _slowest([Measured(**row) for row in same])
                for same in zip(*(rank["rows"] for rank in found), strict=True)
            ],
            links=[Link((a, b), (hosts[a], hosts[b]), small, large) for a, b, small, large in pairs],
        )

    def _checked(self, collective: Collective, case: Case) -> str | None:
        """One call on fresh numbers, and what is wrong with the values."""
        case.fill()
        self.where.beat()
        collective.call(case)
        wanted = collective.expected(case)
        if torch.equal(case.received, wanted):
            return None
        places = (case.received != wanted).nonzero().flatten()
        first = int(places[0])
        return (
            f"{len(places)} of {wanted.numel()} elements are wrong, the first at {first}: "
            f"{float(case.received[first]):g} instead of {float(wanted[first]):g}"
        )

    def _single_times(self, call: Callable[[], None]) -> list[float]:
        warm = statistics.median([self._timed(call, 1) for _ in range(WARM_UP)])
        return [self._timed(call, 1) for _ in range(self.where.agree(self._calls(warm)))]

    def _timed(self, call: Callable[[], None], calls: int) -> float:
        """Mean seconds of a call."""
        self._synchronize()
        begun = time.perf_counter()
        for _ in range(calls):
            self.where.beat()
            call()
        self._synchronize()
        return (time.perf_counter() - begun) / calls

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _calls(self, seconds: float) -> int:
        return max(1, min(MOST_CALLS, int(self.share / seconds)))

    def _count(self, size: int) -> int:
        """Elements of at least `size` bytes that can be shared out equally."""
        return -(-size // (4 * self.ranks)) * self.ranks

    def _case(self, collective: Collective, size: int) -> Case:
        count = self._count(size)
        numbers = {"whole": count, "part": count // self.ranks, "nothing": 0}
        sent, received = (
            torch.empty(numbers[share], device=self.device) for share in (collective.sends, collective.receives)
        )
        return Case(self.rank, self.ranks, self.pattern[:count], sent, received)

    def _signed(self, wrong: str | None) -> list[str]:
        return [] if wrong is None else [f"rank {self.rank} on {self.where.host}: {wrong}"]


def ring_rounds(ranks: int) -> list[list[tuple[int, int]]]:
    """The links of a ring in two rounds, or three where their number is odd, so that none has two links in a round."""
    pairs = [(rank, (rank + 1) % ranks) for rank in range(ranks)] if ranks > 2 else [(0, 1)] * (ranks - 1)
    last = [pairs.pop()] if len(pairs) % 2 and len(pairs) > 1 else []
    return [round_ for round_ in (pairs[::2], pairs[1::2], last) if round_]


def failure(report: Report) -> TorchstoneError | None:
    """The error to end with where values were wrong."""
    if not report.wrong:
        return None
    more = f", and {len(report.wrong) - 1} more" if len(report.wrong) > 1 else ""
    return NumbersError(f"a collective gave wrong values: {report.wrong[0]}{more}", wrong_hint(report.device))


def wrong_hint(device: str) -> str:
    """What to do about wrong values."""
    if device == "cuda":
        return (
            "do not train on this: NCCL_DEBUG=INFO names the transport; try again with NCCL_P2P_DISABLE=1, "
            "NCCL_IB_DISABLE=1 or NCCL_SHM_DISABLE=1 to find the one at fault; nvidia-smi -q -d ECC lists memory errors"
        )
    return "do not train on this: the memory or the network of that rank's machine changes data; test its memory first"


def network_hint(device: str) -> str:
    """What to look at where ranks do not reach each other."""
    settings = ["GLOO_SOCKET_IFNAME"] + (["NCCL_SOCKET_IFNAME"] if device == "cuda" else [])
    verbose = "NCCL_DEBUG=INFO shows what NCCL chose" if device == "cuda" else "TORCH_CPP_LOG_LEVEL=INFO shows more"
    return (
        f"set {' and '.join(settings)} to the network interface that connects the machines (ip addr lists them), let "
        f"a firewall pass all TCP ports between them; {verbose}"
    )


def verdict(report: Report) -> list[str]:
    """A line that says whether all is well, what else is worth saying, and a fix for what is not."""
    who = f"{_counted(report.ranks, 'rank')} over {report.backend}"
    hosts = len(set(report.hosts))
    who += f" on {hosts} machines" if hosts > 1 else ""
    lines = [f"collectives: {'failed' if report.wrong else 'ok'}, {who}{_headline(report)}"]
    lines += [f"wrong: {line}" for line in report.wrong[:NAMED_RANKS]]
    if len(report.wrong) > NAMED_RANKS:
        lines.append(f"wrong: {len(report.wrong) - NAMED_RANKS} more")
    lines += [f"missing: {row.collective}: {row.missing}" for row in report.measured if row.missing is not None]
    lines += [f"slow: {line}" for line in slow_links(report.links)]
    if report.wrong:
        lines.append(f"fix: {wrong_hint(report.device)}")
    return lines


def slow_links(links: Sequence[Link]) -> list[str]:
    """The slowest link, where it takes several times the usual; within machines and between them each by itself."""
    found = []
    for between in (False, True):
        same = [link for link in links if link.between_hosts == between]
        for what, seconds in (("a ping", _ping), ("1 MiB", _large)):
            if not same:
                continue
            # The lower of two middle ones: of two links, the one is compared with the other.
            usual, slowest = statistics.median_low(map(seconds, same)), max(same, key=seconds)
            times = seconds(slowest) / usual
            if times > SLOW:
                ends = " and ".join(f"{r} ({h})" for r, h in zip(slowest.ranks, slowest.hosts, strict=True))
                found.append(
                    f"{what} between ranks {ends} takes {_time(seconds(slowest))}, {times:.1f} times the usual "
                    f"{_time(usual)} {'between' if between else 'within'} machines"
                )
    return found


def as_text(report: Report) -> str:
    """A table for people, and the verdict below it."""
    lines = [f"{'collective':<15}{'latency':>10}{'worst':>10}{'size':>11}{'time':>10}{'GB/s':>9}{'bus GB/s':>10}"]
    for name, rows in itertools.groupby(report.measured, key=lambda row: row.collective):
        lines += _lines_of_collective(name, list(rows))
    if report.links:
        pings, large = sorted(map(_ping, report.links)), sorted(map(_large, report.links))
        lines.append(
            f"{'neighbours':<15}{_time(statistics.median(pings)):>10}{_time(pings[-1]):>10}"
            f"{_size(MIB):>11}{_time(statistics.median(large)):>10}{_rate(MIB / statistics.median(large)):>9}"
        )
    return "\n".join([*lines, "", *verdict(report)]) + "\n"


def as_dict(report: Report) -> dict[str, Any]:
    """For machines: seconds and bytes per second, unrounded."""
    rows = [
        asdict(row) | {"algorithm_bandwidth": row.algorithm_bandwidth, "bus_bandwidth": row.bus_bandwidth}
        for row in report.measured
    ]
    return asdict(report) | {
        "ok": not report.wrong,
        "measured": rows,
        "links": [asdict(link) | {"bytes_of_large": MIB} for link in report.links],
        "verdict": verdict(report),
    }


def _lines_of_collective(name: str, rows: list[Measured]) -> list[str]:
    latency, *sized = rows
    if latency.seconds is None or latency.worst is None:
        return [f"{name:<15}missing: {latency.missing}"]
    head = f"{name:<15}{_time(latency.seconds):>10}{_time(latency.worst):>10}"
    tails = [
        f"{_size(row.bytes):>11}  left out: {row.left_out}"
        if row.seconds is None
        else f"{_size(row.bytes):>11}{_time(row.seconds):>10}"
        f"{_rate(row.algorithm_bandwidth):>9}{_rate(row.bus_bandwidth):>10}"
        for row in sized
    ]
    return [(head if number == 0 else " " * len(head)) + tail for number, tail in enumerate(tails or [""])]


def _headline(report: Report) -> str:
    """Latency and the best bandwidth of the all-reduce, which data-parallel training lives on."""
    rows = [row for row in report.measured if row.collective == "all_reduce" and row.seconds is not None]
    latency = [row.seconds for row in rows if row.is_latency and row.seconds is not None]
    best = max((row.algorithm_bandwidth or 0.0 for row in rows), default=0.0)
    words = f", latency {_time(latency[0])}" if latency else ""
    return words + (f", all-reduce {_rate(best)} GB/s" if best else "")


def _slowest(same: Sequence[Measured]) -> Measured:
    """What the ranks measured of the same thing, as one: it is done when the last has it."""
    first = same[0]
    seconds = [row.seconds for row in same if row.seconds is not None]
    worst = [row.worst for row in same if row.worst is not None]
    return Measured(
        first.collective, first.bytes, first.calls, max(seconds, default=None), max(worst, default=None),
        first.bus_factor, [line for row in same for line in row.wrong], first.missing, first.left_out,
    )  # fmt: skip


def _ping(link: Link) -> float:
    return link.seconds


def _large(link: Link) -> float:
    return link.seconds_of_large


# From here on: when it did not come to an end.


def _translated(
    error: BaseException, where: Where, connect: Callable[[], dist.Store], device: torch.device
) -> BaseException:
    """What the second thread met, as an error for people; a fault of ours stays what it is. The others are told."""
    if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError | NotImplementedError):
        return _lost(where, connect, device, f"failed: {_words(error)}", waits=False)
    if isinstance(error, torch.OutOfMemoryError):
        message = f"rank {where.rank} on {where.host} has no memory for {where.what}"
        error = OutOfMemoryError(message, "end what else runs on its GPU")
    with suppress(RuntimeError):
        where.store.set(f"noticed/{where.rank}", f"rank {where.rank} gave up: {_words(error)}")
    return error


def _lost(
    where: Where, connect: Callable[[], dist.Store], device: torch.device, how: str, waits: bool = True
) -> WorkerError:
    """Who is silent, as far as the store knows. The store may be silent as well, so a thread asks it."""
    answers: queue.SimpleQueue[list[Seen]] = queue.SimpleQueue()

    def ask() -> None:
        # Where its process has ended, asking is an error; no answer says as much.
        with suppress(RuntimeError):
            answers.put(_look_around(where, connect()))

    threading.Thread(target=ask, daemon=True).start()
    hint = network_hint(device.type)
    try:
        blamed = [one for one in answers.get(timeout=2.5 * GRACE) if one.noticed != ""]
    except queue.Empty:
        who = "the group's store does not answer either; it is served by the launcher or by rank 0"
        return WorkerError(f"{where.what} {how}; {who}", hint)
    if not blamed:
        who = "wait for each other, but nothing gets through" if waits else "answer"
        return WorkerError(f"{where.what} {how}; all {where.ranks} ranks are there and {who}", hint)
    words = [one.described(where.stage) for one in blamed[:NAMED_RANKS]]
    words += [f"and {len(blamed) - NAMED_RANKS} more"] if len(blamed) > NAMED_RANKS else []
    machine = "those processes and their machines" if len(blamed) > 1 else "that process and its machine"
    return WorkerError(f"{where.what} {how}; {', '.join(words)}", f"look at {machine}; or {hint}")


@dataclass(frozen=True)
class Seen:
    """A rank as the store has it. `noticed` is None of a silent one, empty of one that waits, or why it gave up."""

    rank: int
    stage: int
    what: str
    host: str
    noticed: str | None

    def described(self, stage: int) -> str:
        if self.noticed:
            return self.noticed
        if self.stage == 0:
            return f"rank {self.rank} never began"
        name = f"rank {self.rank} on {self.host}"
        if self.stage == stage:
            return f"{name} came to it and stopped answering"
        return f"{name} did not arrive, last seen at {self.what}"


def _look_around(where: Where, store: dist.Store) -> list[Seen]:
    """Says that this rank has noticed, and gives the others the time to say so."""
    store.set(f"noticed/{where.rank}", "")
    until = time.monotonic() + GRACE
    noticed: dict[int, str] = {}
    while len(noticed) < where.ranks and time.monotonic() < until:
        for rank in set(range(where.ranks)) - set(noticed):
            if store.check([f"noticed/{rank}"]):
                noticed[rank] = store.get(f"noticed/{rank}").decode()
        time.sleep(LOOK)
    seen = []
    for rank in range(where.ranks):
        stage, what, host = json.loads(store.get(f"at/{rank}")) if store.check([f"at/{rank}"]) else (0, "", "")
        seen.append(Seen(rank, stage, what, host, noticed.get(rank)))
    if where.rank == 0:
        # It may serve the store: the others are to read it first.
        time.sleep(GRACE / 2)
    return seen


def _backend(device: torch.device) -> str:
    """`gloo` of `cpu:gloo,cuda:nccl`, where the device is a CPU."""
    by_device = dict(pair.split(":", 1) for pair in str(dist.get_backend_config()).split(","))
    return by_device[device.type]


def _words(error: BaseException) -> str:
    """The message on one line; what torch may add of its own stack is left out."""
    words = str(error).partition("Exception raised from")[0]
    return " ".join(words.split())[:MOST_WORDS] or type(error).__name__


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' if number != 1 else ''}"


def _size(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.0f} us"


def _rate(bandwidth: float | None) -> str:
    if bandwidth is None:
        return ""
    return f"{bandwidth / 1e9:.3g}" if bandwidth < 1e12 else f"{bandwidth / 1e9:.0f}"

"""The collective test of `torchstone doctor`, on real processes: values, figures, and the names of the silent."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchstone.diagnose import collectives
from torchstone.diagnose.collectives import (
    COLLECTIVES,
    Case,
    Collective,
    Link,
    Measured,
    Report,
    as_dict,
    as_text,
    failure,
    measure,
    network_hint,
    ring_rounds,
    slow_links,
    verdict,
)
from torchstone.errors import NumbersError, WorkerError
from torchstone.testing import RankFailure, launch_procs

CPU = torch.device("cpu")
SIZES = (4096, 65536)
ALL_REDUCE = COLLECTIVES[0]
# Seconds: of a collective, and what a busy machine may need on top to look around and to end.
LIMIT, ROOM = 1.0, 8.0
# Seconds with which no size is left out, however busy the machine.
ENOUGH = 2.0


def with_call(changed: Collective) -> tuple[Collective, ...]:
    return tuple(changed if one.name == changed.name else one for one in COLLECTIVES)


def measure_small() -> tuple[Report, list[str]]:
    said: list[str] = []
    return measure(CPU, 60.0, said.append, SIZES, budget=0.3), said


def one_element_wrong_on_rank_1(case: Case) -> None:
    dist.all_reduce(case.received)
    if case.rank == 1 and case.received.numel() == 1024:
        case.received[5] += 1


def do_nothing(case: Case) -> None:
    pass


def refuse(case: Case) -> None:
    raise RuntimeError("Backend gloo does not support _reduce_scatter_base")


def measure_wrong() -> Report:
    wrong = dataclasses.replace(ALL_REDUCE, call=one_element_wrong_on_rank_1)
    lazy = [dataclasses.replace(one, call=do_nothing) for one in COLLECTIVES[1:]]
    return measure(CPU, 60.0, sizes=SIZES, budget=ENOUGH, collectives=[wrong, *lazy])


def measure_without_reduce_scatter() -> Report:
    missing = dataclasses.replace(COLLECTIVES[2], call=refuse)
    # No more than a moment for every size, so that the larger one is left out.
    return measure(CPU, 60.0, sizes=(65536, 2**26), budget=0.01, collectives=with_call(missing))


def twice_and_alone() -> list[str]:
    return [row.collective for _ in range(2) for row in measure(CPU, 60.0, budget=0.1).measured]


def caught(folder: Path, **options: object) -> None:
    """What the error says, and after how long, in a file: the rank that is silent would make the launch fail."""
    begun = time.monotonic()
    try:
        measure(CPU, LIMIT, sizes=SIZES, budget=ENOUGH, **options)  # type: ignore[arg-type]
    except WorkerError as error:
        said = {"said": error.message, "hint": error.hint, "code": error.exit_code, "s": time.monotonic() - begun}
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(said))
        # The last to speak, rank 0, ends those for whom the harness would wait.
        for silent in folder.glob("*.silent") if dist.get_rank() == 0 else ():
            os.kill(int(silent.stem), signal.SIGKILL)
        raise


def sleep_instead(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        (folder / f"{os.getpid()}.silent").touch()
        time.sleep(60)
    caught(folder)


def stop_at_64_kib(folder: Path) -> None:
    def call(case: Case) -> None:
        if case.rank == 2 and case.received.nbytes == SIZES[1]:
            (folder / f"{os.getpid()}.silent").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(case.received)

    caught(folder, collectives=with_call(dataclasses.replace(ALL_REDUCE, call=call)))


def die_in_broadcast(folder: Path) -> None:
    def call(case: Case) -> None:
        if case.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.broadcast(case.received, 0)

    caught(folder, collectives=with_call(dataclasses.replace(COLLECTIVES[3], call=call)))


def nothing_gets_through(folder: Path) -> None:
    def call(case: Case) -> None:
        # Every rank waits for a message that nobody sends.
        dist.recv(case.received, case.left)

    caught(folder, collectives=with_call(dataclasses.replace(ALL_REDUCE, call=call)))


def give_up_on_rank_1(folder: Path) -> None:
    def call(case: Case) -> None:
        if case.rank == 1:
            raise torch.OutOfMemoryError("planted")
        dist.all_reduce(case.received)

    caught(folder, collectives=with_call(dataclasses.replace(ALL_REDUCE, call=call)))


def errors_of(function: Callable[[Path], None], ranks: int, folder: Path) -> dict[int, dict[str, object]]:
    with pytest.raises(RankFailure):
        launch_procs(function, ranks, folder, timeout=30.0)
    return {int(path.stem): json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_collective_is_right_and_every_rank_has_the_same_report(ranks: int) -> None:
    found = launch_procs(measure_small, ranks)
    report, said = found[0]
    assert all(other == report for other, _ in found)
    assert (report.backend, report.device, report.ranks, len(report.hosts)) == ("gloo", "cpu", ranks, ranks)
    assert report.wrong == []
    assert failure(report) is None
    names = [one.name for one in COLLECTIVES]
    smallest = 4 * max(2, ranks)
    expected = [(name, size) for name in names for size in (smallest, *SIZES)] + [("barrier", 0)]
    assert [(row.collective, row.bytes) for row in report.measured] == expected
    for row in report.measured:
        assert row.missing is None
        if row.left_out is not None:
            # A machine this busy is slow, not wrong.
            continue
        assert row.seconds is not None
        assert 0 < row.seconds < 60
        assert 1 <= row.calls <= collectives.MOST_CALLS
        if row.is_latency:
            assert row.worst is not None
            assert row.worst >= row.seconds
        else:
            assert row.bus_bandwidth == row.bytes / row.seconds * row.bus_factor
    pairs = [(0, 1)] if ranks == 2 else [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert [link.ranks for link in report.links] == pairs
    assert all(0 < link.seconds < 60 and 0 < link.seconds_of_large < 60 for link in report.links)
    assert said == [f"trying {name}" for name in (*names, "barrier", "neighbours")]
    assert json.loads(json.dumps(as_dict(report)))["measured"][1]["bytes"] == SIZES[0]


def test_a_wrong_value_is_named_with_its_collective_size_and_rank() -> None:
    report, _ = launch_procs(measure_wrong, 2)
    wrong = report.wrong
    found = "1 of 1024 elements are wrong, the first at 5: 19 instead of 18"
    assert [line for line in wrong if line.startswith("all_reduce")] == [
        f"all_reduce of 4 KiB, rank 1 on {report.hosts[1]}: {found}"
    ]
    # Nothing received is wrong as well; but rank 0 has what it broadcasts.
    for name, ranks in (("all_gather", "01"), ("reduce_scatter", "01"), ("broadcast", "1"), ("send_recv", "01")):
        for rank in ranks:
            assert any(line.startswith(f"{name} of 64 KiB, rank {rank} on") for line in wrong), name
    assert not any(line.startswith("broadcast") and "rank 0" in line for line in wrong)
    error = failure(report)
    assert isinstance(error, NumbersError)
    assert "all_reduce of 4 KiB, rank 1" in error.message
    assert verdict(report)[0].startswith("collectives: failed, 2 ranks over gloo")
    assert verdict(report)[-1].startswith("fix: do not train on this")


def test_what_the_backend_lacks_is_missing_and_what_takes_too_long_is_left_out() -> None:
    report, _ = launch_procs(measure_without_reduce_scatter, 2)
    (row,) = [row for row in report.measured if row.collective == "reduce_scatter"]
    assert row.missing == "Backend gloo does not support _reduce_scatter_base"
    assert failure(report) is None
    assert f"missing: reduce_scatter: {row.missing}" in verdict(report)
    large = [row for row in report.measured if row.bytes == 2**26]
    assert [row.collective for row in large] == ["all_reduce", "all_gather", "broadcast", "send_recv"]
    assert all("one call would take about" in (row.left_out or "") and row.seconds is None for row in large)
    assert as_text(report).count("left out: one call would take about") >= 4


def test_one_rank_has_no_neighbours_and_a_second_test_is_as_good_as_the_first() -> None:
    (names,) = launch_procs(twice_and_alone, 1)
    assert names == [*(one.name for one in COLLECTIVES), "barrier"] * 2


def test_a_rank_that_does_not_come_is_named_within_the_limit(tmp_path: Path) -> None:
    found = errors_of(sleep_instead, 3, tmp_path)
    assert sorted(found) == [0, 2]
    for error in found.values():
        assert error["said"] == "the meeting before the first collective did not end within 1 s; rank 1 never began"
        assert error["code"] == 7
        assert LIMIT <= float(str(error["s"])) < LIMIT + ROOM
        assert "GLOO_SOCKET_IFNAME" in str(error["hint"])


def test_a_stopped_rank_is_named_with_the_collective_and_the_size(tmp_path: Path) -> None:
    found = errors_of(stop_at_64_kib, 4, tmp_path)
    assert sorted(found) == [0, 1, 3]
    for error in found.values():
        said = str(error["said"])
        assert said.startswith("all_reduce of 64 KiB did not end within 1 s; rank 2 on ")
        assert said.endswith(" came to it and stopped answering")
        assert float(str(error["s"])) < LIMIT + ROOM


def test_a_rank_that_dies_is_named_without_waiting_for_the_limit(tmp_path: Path) -> None:
    (error,) = errors_of(die_in_broadcast, 2, tmp_path).values()
    said = str(error["said"])
    assert said.startswith("broadcast of 8 B failed: ")
    assert "; rank 1 on " in said
    assert said.endswith(" came to it and stopped answering")


def test_ranks_that_all_wait_blame_the_network_and_a_rank_that_gave_up_says_why(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    waiting = errors_of(nothing_gets_through, 2, tmp_path / "all")
    assert sorted(waiting) == [0, 1]
    for error in waiting.values():
        assert error["said"] == (
            "all_reduce of 8 B did not end within 1 s; "
            "all 2 ranks are there and wait for each other, but nothing gets through"
        )
    (tmp_path / "one").mkdir()
    ((rank, error),) = errors_of(give_up_on_rank_1, 2, tmp_path / "one").items()
    assert rank == 0
    assert "rank 1 gave up: rank 1 on " in str(error["said"])
    assert "has no memory for all_reduce of 8 B" in str(error["said"])


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        ("all_reduce", {1: 0.0, 2: 1.0, 4: 1.5, 8: 1.75}),
        ("all_gather", {1: 0.0, 2: 0.5, 4: 0.75, 8: 0.875}),
        ("reduce_scatter", {1: 0.0, 2: 0.5, 4: 0.75, 8: 0.875}),
        ("broadcast", {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}),
        ("send_recv", {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(name: str, factors: dict[int, float]) -> None:
    (collective,) = [one for one in COLLECTIVES if one.name == name]
    assert {ranks: collective.bus_factor(ranks) for ranks in factors} == factors
    for factor in factors.values():
        row = Measured(name, 8_000_000, 1, 0.004, None, factor)
        assert (row.algorithm_bandwidth, row.bus_bandwidth) == (2e9, 2e9 * factor)


def test_every_link_of_the_ring_is_in_one_round_and_no_rank_twice_in_a_round() -> None:
    assert ring_rounds(1) == []
    assert ring_rounds(2) == [[(0, 1)]]
    for ranks in range(3, 12):
        rounds = ring_rounds(ranks)
        assert len(rounds) == 2 + ranks % 2
        links = [pair for one in rounds for pair in one]
        assert sorted(links) == [(rank, (rank + 1) % ranks) for rank in range(ranks)]
        for one in rounds:
            ends = [rank for pair in one for rank in pair]
            assert len(set(ends)) == len(ends)


def test_a_slow_link_is_compared_with_its_like() -> None:
    def link(a: int, b: int, seconds: float, hosts: str, large: float = 1e-3) -> Link:
        return Link((a, b), (hosts[0], hosts[1]), seconds, large)

    # Between machines it always takes longer; that is no fault of a link.
    usual = [link(0, 1, 1e-5, "aa"), link(1, 2, 2e-4, "ab"), link(2, 3, 1.2e-5, "bb"), link(3, 0, 3e-4, "ba")]
    assert slow_links(usual) == []
    assert slow_links([]) == []
    (line,) = slow_links([*usual[:3], link(3, 0, 8.2e-4, "ba")])
    assert line == "a ping between ranks 3 (b) and 0 (a) takes 0.82 ms, 4.1 times the usual 0.20 ms between machines"
    (line,) = slow_links([*usual[1:], link(0, 1, 1e-5, "aa", large=4e-3), link(4, 5, 1e-5, "aa")])
    assert line.startswith("1 MiB between ranks 0 (a) and 1 (a) takes 4.00 ms, 4.0 times the usual 1.00 ms within")


def test_the_text_has_the_figures_and_the_verdict() -> None:
    rows = [
        Measured("all_reduce", 8, 50, 1e-4, 5e-4, 1.0),
        Measured("all_reduce", 2**20, 10, 1e-3, None, 1.0),
        Measured("all_reduce", 2**26, left_out="one call would take about 9.00 s"),
        Measured("all_gather", 8, missing="Backend x does not support it"),
        Measured("barrier", 0, 50, 2e-5, 3e-4),
    ]
    report = Report("nccl", "cuda", 2, ["a", "b"], rows, [Link((0, 1), ("a", "b"), 3e-4, 2e-3)])
    text = as_text(report)
    lines = text.splitlines()
    assert lines[0].split() == ["collective", "latency", "worst", "size", "time", "GB/s", "bus", "GB/s"]
    assert " ".join(lines[1].split()) == "all_reduce 0.10 ms 0.50 ms 1 MiB 1.00 ms 1.05 1.05"
    assert " ".join(lines[2].split()) == "64 MiB left out: one call would take about 9.00 s"
    assert " ".join(lines[3].split()) == "all_gather missing: Backend x does not support it"
    assert " ".join(lines[4].split()) == "barrier 20 us 0.30 ms"
    assert " ".join(lines[5].split()) == "neighbours 0.30 ms 0.30 ms 1 MiB 2.00 ms 0.524"
    assert lines[7] == "collectives: ok, 2 ranks over nccl on 2 machines, latency 0.10 ms, all-reduce 1.05 GB/s"
    assert lines[8] == "missing: all_gather: Backend x does not support it"
    assert as_dict(report)["measured"][1]["algorithm_bandwidth"] == 2**20 / 1e-3
    assert as_dict(report)["ok"] is True
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG=INFO", "firewall"):
        assert name in network_hint("cuda")
    assert "NCCL" not in network_hint("cpu")

"""The collectives of `torchstone doctor` on real processes: right and wrong values, and ranks that do not answer.

The checks of the machine are in test_machine.py."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from torchstone import cli
from torchstone.doctor import collectives
from torchstone.doctor.collectives import COLLECTIVES, GRACE, Measurement, Report, as_text, measure
from torchstone.testing import RankFailure, launch_procs

CPU = torch.device("cpu")
SIZES = (4096, 65536)
HOST = socket.gethostname()
LIMIT = 2.0
# Seconds that a busy machine needs to start, to look around and to end.
MARGIN = 60.0


def check_small_sizes() -> tuple[Report, list[str]]:
    lines: list[str] = []
    return measure(CPU, 60.0, lines.append, SIZES), lines


def run_doctor(*args: str, limit: float = LIMIT) -> None:
    """The command as a launcher runs it on each rank, at small sizes."""
    collectives.SIZES["cpu"] = SIZES
    cli.main(["doctor", "--only", "collectives", "--device", "cpu", "--limit", str(limit), *args])


def intercept(name: str, action: Callable[[Tensor], None], *, before: bool = True) -> None:
    """Replaces `torch.distributed.<name>` on this rank; `action` gets its first argument."""
    original = getattr(dist, name)

    def intercepted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if before:
            action(tensor)
        result = original(tensor, *args, **kwargs)
        if not before:
            action(tensor)
        return result

    setattr(dist, name, intercepted)


def is_rank(rank: int) -> bool:
    return os.environ["RANK"] == str(rank)


def change_values(is_read: Path) -> None:
    def add_one(tensor: Tensor) -> None:
        if tensor.numel() == 1024:
            tensor[5] += 1

    def wait_for_the_other_rank(store: Any) -> Any:
        while not is_read.exists():
            time.sleep(0.01)
        return get_store(store)

    def barrier(*args: Any, **kwargs: Any) -> None:
        """Does nothing. Rank 0 calls it once, reads the count of ranks, and calls it again to measure."""
        if is_rank(0) and barriers.pop(0):
            is_read.touch()

    get_store = dist.ProcessGroup.get_group_store
    if is_rank(1):
        intercept("all_reduce", add_one, before=False)
        dist.ProcessGroup.get_group_store = wait_for_the_other_rank  # type: ignore[method-assign]
    for name in ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor"):
        setattr(dist, name, lambda *args: None)
    barriers = [False, *[True] * 1000]
    dist.broadcast, dist.barrier = lambda *args, **kwargs: None, barrier  # type: ignore[assignment]
    dist.batch_isend_irecv = lambda operations: []  # type: ignore[assignment]
    run_doctor(limit=60.0)


def slow_down() -> tuple[Report, list[str]]:
    intercept("broadcast", lambda tensor: time.sleep(0.2 * (tensor.nbytes > 8)))
    return check_small_sizes()


def stop_at_64_kib(fault: Path) -> None:
    def stop(tensor: Tensor) -> None:
        if is_rank(2) and tensor.nbytes == 65536:
            fault.touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    intercept("all_reduce", stop)
    run_doctor()


def die_in_broadcast(fault: Path) -> None:
    def die(tensor: Tensor) -> None:
        if is_rank(1):
            fault.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    intercept("broadcast", die)
    run_doctor()


def never_arrive(fault: Path) -> None:
    if is_rank(0):
        # In the place of the check, after this rank has joined the others.
        collectives.measure = lambda *args: (fault.touch(), time.sleep(100))  # type: ignore[assignment]
    run_doctor()


def wait_for_nothing(fault: Path) -> None:
    def receive(tensor: Tensor) -> None:
        if tensor.nbytes == 4096:
            fault.touch()
            dist.recv(tensor, 1 - dist.get_rank())

    intercept("all_reduce", receive)
    run_doctor()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_ranks_report_the_same_right_values_and_figures(ranks: int) -> None:
    results = launch_procs(check_small_sizes, ranks)
    report, lines = results[0]
    assert all(other == report for other, _ in results)
    assert (report.ok, report.wrong, report.ranks, report.hosts) == (True, [], ranks, [HOST] * ranks)
    assert (report.backend, report.device) == ("gloo", "cpu")
    names = COLLECTIVES if ranks > 1 else COLLECTIVES[:-1]
    sizes = (4 * max(2, ranks), *SIZES)
    assert lines[: len(names)] == [f"checking {name}" for name in names]
    expected = [(name, size) for name in names for size in sizes]
    assert [(row.collective, row.bytes) for row in report.measured] == [*expected, ("barrier", 0)]
    bus_factors = {
        "all_reduce": {1: 0.0, 2: 1.0, 4: 1.5},
        "all_gather": {1: 0.0, 2: 0.5, 4: 0.75},
        "reduce_scatter": {1: 0.0, 2: 0.5, 4: 0.75},
    }
    for row in report.measured:
        assert 0 < row.seconds < 60
        if row.bytes in (0, sizes[0]):
            assert row.algorithm_bandwidth is row.bus_bandwidth is None
        else:
            assert row.algorithm_bandwidth == row.bytes / row.seconds
            factor = bus_factors[row.collective][ranks] if row.collective in bus_factors else 1.0
            assert row.bus_bandwidth == pytest.approx(row.algorithm_bandwidth * factor)
    assert json.loads(json.dumps(asdict(report)))["measured"][1]["bytes"] == SIZES[0]


def test_wrong_values_are_named_with_collective_size_rank_and_host(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(RankFailure, match="ended with exit code 5"):
        launch_procs(change_values, 2, tmp_path / "is_read", backend=None)
    output = capsys.readouterr().out
    for wrong in (
        f"all_reduce of 4 KiB, rank 1 on {HOST}: 1 of 1024 elements are wrong, the first at 5: 19 instead of 18",
        f"all_gather of 64 KiB, rank 0 on {HOST}: 16384 of 16384 elements are wrong, the first at 0: -1 instead of 1",
        f"reduce_scatter of 64 KiB, rank 1 on {HOST}: 8192 of 8192 elements are wrong, the first at 0: -1 instead of 9",
        f"broadcast of 64 KiB, rank 1 on {HOST}: 16384 of 16384 elements are wrong, the first at 0: 2 instead of 1",
        f"send_recv of 64 KiB, rank 0 on {HOST}: 16384 of 16384 elements are wrong, the first at 0: -1 instead of 2",
        f"barrier, rank 0 on {HOST}: left when 1 of 2 ranks had entered",
    ):
        assert output.count(f"wrong: {wrong}\n") == 1
    # Rank 0 has the values that it broadcasts.
    assert "wrong: broadcast of 64 KiB, rank 0" not in output
    assert "collectives: failed, 2 ranks over gloo\n" in output
    assert f"error: wrong values: all_gather of 8 B, rank 0 on {HOST}: " in output


def test_sizes_that_would_take_too_long_are_left_out() -> None:
    report, lines = launch_procs(slow_down, 2)[0]
    assert [row.bytes for row in report.measured if row.collective == "broadcast"] == [8, 4096]
    assert [line for line in lines if "skipped" in line and "broadcast" in line] == [
        "skipped broadcast above 4 KiB to stay within the time budget"
    ]


@pytest.mark.parametrize(
    ("fault", "ranks", "errors", "message"),
    [
        (stop_at_64_kib, 4, 3, f"all_reduce of 64 KiB did not end within 2 s; no answer from rank 2 on {HOST}\n"),
        (die_in_broadcast, 3, 2, f"no answer from rank 1 on {HOST}\n"),
        (never_arrive, 3, 2, "the exchange of host names did not end within 2 s; no answer from rank 0\n"),
        (wait_for_nothing, 2, 2, "all_reduce of 4 KiB did not end within 2 s; all 2 ranks answer over gloo\n"),
    ],
)
def test_all_other_ranks_name_the_silent_rank_within_the_limit(
    fault: Callable[[Path], None], ranks: int, errors: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(RankFailure) as failure:
        launch_procs(fault, ranks, tmp_path / "fault", backend=None)
    assert time.time() - (tmp_path / "fault").stat().st_mtime < LIMIT + GRACE + MARGIN
    text = str(failure.value)
    assert text.count(message) == errors
    assert text.count("ended with exit code 7") == errors
    assert text.count("set GLOO_SOCKET_IFNAME") == errors


def test_the_text_is_a_table_with_a_verdict() -> None:
    rows = [
        Measurement("all_reduce", 8, 50, 1e-4),
        Measurement("all_reduce", 2**20, 10, 1e-3, 2**20 / 1e-3, 1.5 * 2**20 / 1e-3),
        Measurement("barrier", 0, 50, 2e-5),
    ]
    lines = as_text(Report(True, "nccl", "cuda", 4, ["a", "a", "b", "b"], [], rows)).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "collective size ms GB/s bus GB/s",
        "all_reduce 8 B 0.100",
        "all_reduce 1 MiB 1.000 1.049 1.573",
        "barrier 0 B 0.020",
        "",
        "collectives: ok, 4 ranks over nccl on 2 machines",
    ]

"""The machine checks of `torchstone doctor`: once per host, and for each GPU on its own rank.

They try instead of asking: a kernel computes, a disk is written, a package imported. check.py says what a check is;
host.py, gpu.py, kernels.py and environment.py have them.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch

from torchstone.doctor import host
from torchstone.doctor.check import CheckResult, Status, run_check
from torchstone.doctor.environment import EXTRAS, check_extra
from torchstone.doctor.gpu import check_driver, check_gpu_memory, check_gpu_speed
from torchstone.doctor.kernels import check_kernels
from torchstone.parallel.mesh import ParallelContext, local_rank
from torchstone.user_cache import user_cache
from torchstone.wording import plural

# How long the checks of a machine may take: a GPU compiles kernels, and a broken one may hang.
SECONDS = 900.0


@dataclass
class Machine:
    """The checks of a host: for each rank that made some, in the order in which they are printed."""

    host: str
    checks: dict[int, list[CheckResult]] = field(default_factory=dict)

    def rows(self) -> list[tuple[str, CheckResult]]:
        """All checks with their titles: their names and, if it is not the first, the rank."""
        titles = {rank: "" if rank == min(self.checks) else f", rank {rank}" for rank in self.checks}
        return [(f"{check.name}{titles[rank]}", check) for rank, checks in self.checks.items() for check in checks]

    def count(self, status: Status) -> int:
        return sum(check.status == status for _, check in self.rows())

    def to_dict(self) -> dict[str, Any]:
        checks = [{"rank": rank, **asdict(check)} for rank, checks in self.checks.items() for check in checks]
        return {"host": self.host, "ok": self.count("fail") == 0, "checks": checks}


def check_machines(
    ctx: ParallelContext, device: torch.device, wants_gpu: bool, output_dir: Path, log: Callable[[str], None]
) -> list[Machine]:
    """All ranks call this together; the result is the same on all of them. See `check_rank`."""
    own = (socket.gethostname(), list(check_rank(device, wants_gpu, output_dir, log)))
    machines: dict[str, Machine] = {}
    for rank, (name, checks) in enumerate(ctx.all_gather_object(own)):
        if checks:
            machines.setdefault(name, Machine(name)).checks[rank] = checks
    if ctx.world_size > 1:
        ctx.barrier()
        times = ctx.all_gather_object(time.time())
        next(iter(machines.values())).checks[0].append(run_check("clocks of ranks", host.check_clocks_of_ranks, times))
    return list(machines.values())


def check_rank(
    device: torch.device, wants_gpu: bool, output_dir: Path, log: Callable[[str], None]
) -> Iterator[CheckResult]:
    """The first rank of a host checks the host, and each rank its GPU."""
    is_first = local_rank() == 0
    clocks = time.time(), time.monotonic()
    if is_first:
        log("checking the host")
        yield run_check("versions", host.check_versions)
        yield run_check("driver", check_driver, device, wants_gpu)
        yield run_check("memory", host.check_memory)
        yield run_check(
            "disk", host.check_disk, output_dir, "torchstone doctor --output-dir FOLDER    # of another disk"
        )
        yield run_check("cache", host.check_disk, user_cache(), "export TORCHSTONE_CACHE=FOLDER    # of another disk")
        yield run_check("shared memory", host.check_shared_memory)
        yield run_check("open files", host.check_open_files)
        yield run_check("locked memory", host.check_locked_memory)
        yield run_check("address space", host.check_address_space)
        yield run_check("threads", host.check_threads)
    if device.type == "cuda":
        log("checking the GPU")
        yield run_check("GPU memory", check_gpu_memory, device)
        yield run_check("GPU speed", check_gpu_speed, device)
    if is_first or device.type == "cuda":
        log("checking kernels and the compiler")
        yield from check_kernels(device)
    if is_first:
        log("checking optional packages")
        for extra in EXTRAS:
            yield run_check(f"package {extra}", check_extra, extra)
        yield run_check("clock", host.check_clock, *clocks)


def failures(machines: Sequence[Machine]) -> list[str]:
    """A line for each check that failed."""
    return [
        f"{title}{where(machine, machines)}: {check.found}"
        for machine in machines
        for title, check in machine.rows()
        if check.status == "fail"
    ]


def where(machine: Machine, machines: Sequence[Machine]) -> str:
    return f" on {machine.host}" if len(machines) > 1 else ""


def as_text(machines: Sequence[Machine]) -> str:
    """A table for each host: a line for each check of its first rank, and for what other ranks found to be wrong."""
    return "\n".join(machine_text(machine, where(machine, machines)) for machine in machines)


def machine_text(machine: Machine, where: str) -> str:
    lines = [f"{machine.host}:"] if where else []
    rows = [(title, check) for title, check in machine.rows() if title == check.name or check.fix is not None]
    width = max(len(title) for title, _ in rows)
    for title, check in rows:
        lines.append(f"{check.status.upper():<5} {title:<{width}}  {check.found}")
        lines += [f"{'':<5} fix: {check.fix}"] if check.fix is not None else []
    counts = {status: machine.count(status) for status in get_args(Status)}
    numbers = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    verdict = "failed" if counts["fail"] else "ok"
    return "\n".join([*lines, "", f"machine{where}: {verdict} ({numbers})"]) + "\n"


def verdict(machines: Sequence[Machine], errors: Sequence[str]) -> str:
    warnings = sum(machine.count("warn") for machine in machines)
    counts = [plural(n, name) for n, name in ((len(errors), "error"), (warnings, "warning")) if n]
    return ", ".join([f"\ndoctor: {'failed' if errors else 'ok'}", *counts]) + "\n"

"""The checks of a host: versions, memory, disks, limits, threads and its clock.

The disk checks write, sync and read a file: a mount may be read-only, a quota used up, a network disk slow.
"""

from __future__ import annotations

import errno
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch

from torchstone import __version__
from torchstone.cpu_cores import usable_cores
from torchstone.doctor.check import Finding, failed, gib, ok, skipped, warning
from torchstone.parallel.mesh import local_world_size
from torchstone.training.checks import free_memory, process_memory

# The versions of torch that are tested.
MIN_TORCH, MAX_TORCH = (2, 11), (2, 13)
MIN_FREE_MEMORY, MIN_FREE_DISK, MIN_SHARED_MEMORY = 2 * 2**30, 10 * 2**30, 2**30
DISK_BYTES, SHARED_MEMORY_BYTES = 64 * 2**20, 16 * 2**20
MIN_DISK_SPEED = 50e6
MIN_OPEN_FILES = 1024
SHARED_MEMORY, INFINIBAND, CPU_QUOTA = Path("/dev/shm"), Path("/sys/class/infiniband"), Path("/sys/fs/cgroup/cpu.max")
# Seconds by which the wall clock may advance more or less than the monotonic one, and clocks of ranks may differ.
MAX_CLOCK_STEP, MAX_CLOCK_SPREAD = 0.1, 1.0
SYNC_CLOCK = "chronyc makestep    # or: timedatectl set-ntp true"


def check_versions() -> Finding:
    found = f"torchstone {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    values = {"torchstone": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    low, high = (f"{major}.{minor}" for major, minor in (MIN_TORCH, MAX_TORCH))
    number = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not MIN_TORCH <= number <= MAX_TORCH:
        return warning(f"{found}; tested with torch {low} to {high}", f"pip install 'torch=={high}.*'", **values)
    return ok(found, **values)


def check_memory() -> Finding:
    free, total, processes = free_memory(), process_memory(), local_world_size()
    found = f"{gib(free)} of {gib(total)} free" + (f" for each of {processes} processes" if processes > 1 else "")
    if free < MIN_FREE_MEMORY:
        fix = "ps aux --sort=-rss | head    # end what is not needed, or raise the container's limit"
        return warning(found, fix, free_bytes=free, total_bytes=total)
    return ok(found, free_bytes=free, total_bytes=total)


def check_disk(folder: Path, fix: str) -> Finding:
    """Space, and the speed of a file that is written, synced and read. `fix`: how to choose another folder."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    try:
        write_speed, read_speed = write_and_read(existing, DISK_BYTES)
    except OSError as error:
        return failed(f"cannot use {existing}: {error.strerror} ({gib(free)} free)", fix, free_bytes=free)
    values = {"free_bytes": free, "write_bytes_per_second": write_speed, "read_bytes_per_second": read_speed}
    found = f"{existing}: {gib(free)} free, writes {write_speed / 1e6:.0f} MB/s, reads {read_speed / 1e6:.0f} MB/s"
    if free < MIN_FREE_DISK:
        return warning(f"{found}; a checkpoint has 12 to 16 bytes per parameter", fix, **values)
    if write_speed < MIN_DISK_SPEED:
        return warning(f"{found}: checkpoints will take long", fix, **values)
    return ok(found, **values)


def write_and_read(folder: Path, size: int) -> tuple[float, float]:
    """Bytes per second of writing a file to the disk and of reading it from there. Nothing is left."""
    data = os.urandom(size)
    with tempfile.TemporaryFile(dir=folder, prefix="torchstone-") as file:
        start = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter()
        if hasattr(os, "posix_fadvise"):
            # Otherwise it would be read from the page cache.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start_reading = time.perf_counter()
        content = file.read()
        seconds = time.perf_counter() - start_reading
    if content != data:
        raise OSError(errno.EIO, "a file had other content than was written")
    return size / (written - start), size / seconds


def check_shared_memory() -> Finding:
    """NCCL and data loaders of PyTorch exchange data there."""
    if sys.platform != "linux":
        return skipped("Linux only")
    fix = "docker run --shm-size 8g    # or --ipc host; without a container: mount -o remount,size=8g /dev/shm"
    if not SHARED_MEMORY.is_dir():
        return failed(f"there is no {SHARED_MEMORY}", fix)
    usage = shutil.disk_usage(SHARED_MEMORY)
    values = {"free_bytes": usage.free, "total_bytes": usage.total}
    found = f"{gib(usage.free)} of {gib(usage.total)} free in {SHARED_MEMORY}"
    try:
        write_and_read(SHARED_MEMORY, SHARED_MEMORY_BYTES)
    except OSError as error:
        return failed(f"cannot use {SHARED_MEMORY}: {error.strerror} ({found})", fix, **values)
    return warning(found, fix, **values) if usage.free < MIN_SHARED_MEMORY else ok(found, **values)


def check_open_files() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and limit < MIN_OPEN_FILES:
        return warning(f"limit {limit}: too few for many ranks or data files", "ulimit -n 65536", limit=limit)
    return ok(limit_text(limit), limit=limit_value(limit))


def check_locked_memory() -> Finding:
    """InfiniBand needs locked memory for what it sends."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    has_infiniband = INFINIBAND.is_dir() and any(INFINIBAND.iterdir())
    if has_infiniband and limit != resource.RLIM_INFINITY:
        fix = "ulimit -l unlimited    # in a container: docker run --ulimit memlock=-1"
        return warning(f"limit {gib(limit)}: NCCL cannot use InfiniBand", fix, limit_bytes=limit)
    return ok(limit_text(limit), limit_bytes=limit_value(limit))


def check_address_space() -> Finding:
    """CUDA reserves far more addresses than memory."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        return warning(f"limit {gib(limit)}: allocations may fail", "ulimit -v unlimited", limit_bytes=limit)
    return ok(limit_text(limit), limit_bytes=None)


def limit_text(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"limit {limit:,}"


def limit_value(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def check_threads() -> Finding:
    """More threads than cores wait for each other."""
    cores = usable_cores()
    quota, threads, processes = cpu_quota(), torch.get_num_threads(), local_world_size()
    usable = max(1, int(min(cores, quota or cores)))
    found = f"threads of torch: {threads}" + (f" in each of {processes} processes" if processes > 1 else "")
    found += f", cores: {cores}" + (f", of which the container may use {quota:g}" if usable < cores else "")
    values = {"threads": threads, "processes": processes, "cores": cores, "cpu_quota": quota}
    if threads > 1 and threads * processes > usable:
        return warning(found, f"torchstone train --system.threads {max(1, usable // processes)}", **values)
    return ok(found, **values)


def cpu_quota() -> float | None:
    """The cores that the container may use together, in version 2 of the kernel's control groups."""
    with suppress(OSError, ValueError):
        quota, period = CPU_QUOTA.read_text().split()
        return float(quota) / float(period)
    return None


def check_clock(wall: float, monotonic: float) -> Finding:
    """Whether the wall clock was changed since both clocks were read: then logs and ETAs are wrong."""
    elapsed = time.monotonic() - monotonic
    step = time.time() - wall - elapsed
    if abs(step) > MAX_CLOCK_STEP:
        return warning(f"set by {step:+.1f} s while the checks ran", SYNC_CLOCK, step_seconds=step)
    return ok(f"advanced {elapsed:.1f} s, as the monotonic clock did", step_seconds=step)


def check_clocks_of_ranks(times: list[float]) -> Finding:
    """`times`: of the wall clocks of all ranks, at almost the same moment."""
    spread = max(times) - min(times)
    if spread > MAX_CLOCK_SPREAD:
        first, last = times.index(min(times)), times.index(max(times))
        found = f"rank {last} is {spread:.1f} s ahead of rank {first}"
        return warning(f"{found}: logs of ranks cannot be compared", SYNC_CLOCK, spread_seconds=spread)
    return ok(f"within {spread:.3f} s", spread_seconds=spread)

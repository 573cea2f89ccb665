"""Keeps the memory that a step frees for the next one, on a CPU.

glibc's malloc gives blocks of more than 32 MiB back to the system as soon as they are freed, and smaller ones when they
are at the end of its heap. A step allocates the same tensors again, and the system clears every page of them anew. That
took 8 % of a step of 100M parameters, and 9 % of a tiny one. On CUDA torch has an allocator that keeps what is freed.

It costs memory: malloc reuses an aligned block only once seven of its size are free. A run needed 2.7 times as much, so
the memory must be there.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from torchstone.heartbeat import read_int_variable
from torchstone.training.checks import process_memory

# Larger blocks come from the system, as always: memory must not grow by seven of them.
MAX_BLOCK = 128 * 2**20
# A process must be allowed this many times the memory that it has needed so far.
MIN_ROOM = 4
# From malloc.h. The defaults are those that malloc itself goes up to.
M_TRIM_THRESHOLD, DEFAULT_TRIM_THRESHOLD, NEVER = -1, 64 * 2**20, -1
M_MMAP_THRESHOLD, DEFAULT_MMAP_THRESHOLD = -3, 32 * 2**20


@contextmanager
def keep_freed_memory(device: torch.device) -> Iterator[None]:
    """Until it ends, malloc keeps freed blocks of up to MAX_BLOCK bytes; then it gives back what is free.

    Call it after a step, whose memory is then known. Without room for four times that, and with an allocator that is
    not glibc's, nothing changes.
    """
    libc = ctypes.CDLL(None)
    if device.type != "cpu" or not _has_room() or not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        yield
        return
    libc.mallopt(M_MMAP_THRESHOLD, MAX_BLOCK)
    libc.mallopt(M_TRIM_THRESHOLD, NEVER)
    try:
        yield
    finally:
        libc.mallopt(M_MMAP_THRESHOLD, DEFAULT_MMAP_THRESHOLD)
        libc.mallopt(M_TRIM_THRESHOLD, DEFAULT_TRIM_THRESHOLD)
        return_freed_memory()


def return_freed_memory() -> None:
    """Gives what malloc has kept back to the system, as after a step that ran out of memory."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _has_room() -> bool:
    used = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    more = (MIN_ROOM - 1) * used
    # What is available now is for all ranks of this machine.
    ranks = max(1, read_int_variable("LOCAL_WORLD_SIZE", 1))
    return used + more <= process_memory() and ranks * more <= psutil.virtual_memory().available

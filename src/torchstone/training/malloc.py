"""Keeps the memory that a step frees for the next one, on a CPU.

glibc's malloc gives blocks of more than 32 MiB back to the system as soon as they are freed, and smaller ones when they
are at the end of its heap. A step allocates the same tensors again, and the system clears every page of them anew. That
took 5 % of a step of 100M parameters, and 7 % of a tiny one. On CUDA torch has an allocator that keeps what is freed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Larger blocks come from the system, as always. malloc may reuse aligned blocks only once seven of a size are free, and
# memory must not grow by seven large ones.
MAX_BLOCK = 128 * 2**20
# From malloc.h. The defaults are those that malloc itself goes up to.
M_TRIM_THRESHOLD, DEFAULT_TRIM_THRESHOLD, NEVER = -1, 64 * 2**20, -1
M_MMAP_THRESHOLD, DEFAULT_MMAP_THRESHOLD = -3, 32 * 2**20


@contextmanager
def keep_freed_memory(device: torch.device) -> Iterator[None]:
    """Until it ends, malloc keeps freed blocks of up to MAX_BLOCK bytes; then it gives back what is free. Allocators
    other than glibc's stay as they are."""
    libc = ctypes.CDLL(None)
    if device.type != "cpu" or not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        yield
        return
    libc.mallopt(M_MMAP_THRESHOLD, MAX_BLOCK)
    libc.mallopt(M_TRIM_THRESHOLD, NEVER)
    try:
        yield
    finally:
        libc.mallopt(M_MMAP_THRESHOLD, DEFAULT_MMAP_THRESHOLD)
        libc.mallopt(M_TRIM_THRESHOLD, DEFAULT_TRIM_THRESHOLD)
        libc.malloc_trim(0)

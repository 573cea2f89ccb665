"""Memory that a step frees is there for the next one, and is given back after training."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import torch

from hooks import on
from torchstone import api
from torchstone.testing import launch_procs
from torchstone.training import loop, malloc
from torchstone.training.checks import process_memory
from torchstone.training.malloc import MAX_BLOCK, keep_freed_memory

CPU = torch.device("cpu")


def allocate(size: int) -> float:
    """Allocates, writes and frees a block; returns the share of it that the system had to provide."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(size, dtype=torch.uint8)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) * resource.getpagesize() / size


def resident() -> int:
    return psutil.Process().memory_info().rss


def keep_and_give_back() -> None:
    size = MAX_BLOCK // 2
    with keep_freed_memory(CPU):
        for _ in range(8):
            allocate(size)
        assert max(allocate(size) for _ in range(4)) < 0.1
        kept = resident()
    assert resident() < kept - size / 2
    assert allocate(size) > 0.5


class TestKeepFreedMemory:
    def test_without_room_nothing_changes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(malloc, "process_memory", lambda: 3 * resident())
        with keep_freed_memory(CPU):
            assert min(allocate(MAX_BLOCK // 2) for _ in range(3)) > 0.5

    def test_memory_that_others_use_is_no_room(self, monkeypatch: pytest.MonkeyPatch) -> None:
        available = psutil.virtual_memory()._replace(available=2 * resident())
        monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
        with keep_freed_memory(CPU):
            assert min(allocate(MAX_BLOCK // 2) for _ in range(3)) > 0.5

    def test_a_run_keeps_it_after_its_first_step(
        self, settings: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps: list[int] = []

        @contextmanager
        def record(device: torch.device) -> Iterator[None]:
            entered = list(steps)
            yield
            assert (entered, steps) == ([1], [1, 2, 3])
            steps.append(0)

        monkeypatch.setattr(loop, "keep_freed_memory", record)
        note = on(step=lambda run, metrics: steps.append(metrics["step"]))
        api.train(None, settings(training__max_steps=3), callbacks=[note])
        assert steps == [1, 2, 3, 0]

    def test_freed_blocks_are_used_again_and_given_back_at_the_end(self) -> None:
        """In a new process: where many libraries are mapped, the heap may not be able to grow."""
        launch_procs(keep_and_give_back, 1, backend=None)

    def test_blocks_that_are_too_large_are_not_kept(self) -> None:
        with keep_freed_memory(CPU):
            assert min(allocate(2 * MAX_BLOCK) for _ in range(3)) > 0.5

    def test_with_another_device_nothing_changes(self) -> None:
        with keep_freed_memory(torch.device("cuda")):
            assert min(allocate(MAX_BLOCK // 2) for _ in range(3)) > 0.5


def limit_address_space() -> None:
    assert process_memory() > 2**30
    resource.setrlimit(resource.RLIMIT_AS, (2**30, resource.RLIM_INFINITY))
    assert process_memory() == 2**30


def test_the_memory_of_a_process_is_limited_by_its_address_space() -> None:
    launch_procs(limit_address_space, 1, backend=None)

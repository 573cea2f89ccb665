"""Automatic batch size on a GPU: what is found is the largest that fits, out of memory is told, and nothing is left."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from exact_runs import assert_same_run
from torchstone import api
from torchstone.batchsize.probe import RunProbe
from torchstone.batchsize.search import find_largest
from torchstone.config.load import load_config
from torchstone.observe.console import Console
from torchstone.training.run import Run
from torchstone.training.setup import build_run, select_device

Settings = Callable[..., dict[str, Any]]
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHSTONE_CACHE", str(tmp_path / "cache"))
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture
def make(settings: Settings) -> Callable[..., dict[str, Any]]:
    """Settings of a model whose rows take some tens of MiB."""

    def make(**changes: Any) -> dict[str, Any]:
        sizes = {"model__depth": 4, "model__width": 512, "model__heads": 8, "data__context_length": 512}
        return settings(**sizes | {"training__global_batch_size": 48, "system__device": "cuda"} | changes)

    return make


def build(values: dict[str, Any]) -> Run:
    config = load_config(overrides=values)
    # It sets the allocator up: otherwise blocks have more than one size.
    return build_run(config, Console("none"), select_device(config.system))


@pytest.mark.parametrize("compile", ["none", "block"])
def test_the_largest_size_is_that_of_brute_force(make: Callable[..., dict[str, Any]], compile: str) -> None:
    run = build(make(model__compile=compile))
    probe = RunProbe(run)
    with probe.without_trace():
        used = {size: probe.measure(size)[0] or 0 for size in range(1, 17)}
        assert list(used.values()) == sorted(used.values())
        for limit in (3, 8, 15):
            probe.budget.margin, probe.budget.limit = 1.0, used[limit]
            result = find_largest(lambda size: probe.measure(size)[1], 16)
            assert result.largest == limit
    assert probe.oom_count == 0


def test_a_gpu_that_is_out_of_memory(make: Callable[..., dict[str, Any]]) -> None:
    """Sizes that do not fit are tried here: the search is told to. Then everything is free again."""
    run = build(make(model__compile="none"))
    with RunProbe(run).without_trace():
        # cuBLAS keeps what it has allocated in the first step.
        RunProbe(run).measure(1)
    before = torch.cuda.memory_allocated(GPU)
    share = (torch.cuda.memory_reserved(GPU) + 2**30) / torch.cuda.mem_get_info(GPU)[1]
    torch.cuda.set_per_process_memory_fraction(share)
    probe = RunProbe(run)
    probe.budget.margin = 1.0
    with probe.without_trace():
        result = find_largest(lambda size: probe.measure(size)[1], 512, max_load=math.inf)
        assert 1 <= result.largest < 512
        assert probe.measure(4 * result.largest)[0] is None
        assert probe.oom_count >= 1
        assert probe.measure(max(1, result.largest // 2))[1].fits
    assert torch.cuda.memory_allocated(GPU) == before


def test_the_run_is_that_of_the_same_size_set_by_hand(make: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    limits = {"auto_batch.memory_limit": "1500MiB", "training.batch_size": "auto"}
    for compile in ("none", "block"):
        folder = tmp_path / compile
        checkpoint = api.train(
            overrides=make(model__compile=compile, training__max_steps=4) | limits | {"output_dir": str(folder)}
        ).checkpoint
        assert checkpoint is not None
        size = json.loads((checkpoint / "state.json").read_text())["auto_batch"]["size"]
        manual = make(model__compile=compile, training__max_steps=4, training__batch_size=size)
        api.train(overrides=manual | {"output_dir": f"{folder}-by-hand"})
        assert_same_run(folder, f"{folder}-by-hand", 4)

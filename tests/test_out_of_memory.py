"""A step that runs out of memory: it is computed again in smaller micro-batches, or it says what would help."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from exact_runs import StopAt, assert_same_run
from tiny import write_rows
from torchstone import api
from torchstone.data.collate import BatchShapes, MicroBatch, collate
from torchstone.data.encode import TokenSequence
from torchstone.data.split import num_documents, split_micro_batch, split_to_limit
from torchstone.errors import OutOfMemoryError
from torchstone.models.decoder import Block
from torchstone.observe.metrics import read_metrics
from torchstone.training.run import Callback, Run

Settings = Callable[..., dict[str, Any]]
# As torch says it on a CPU.
NO_MEMORY = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"


class Memory(Callback):
    """A device with room for micro-batches of `tokens` tokens: a larger one fails in the second layer, in the forward
    or the backward pass, from step `first` on. `failures` has the steps that failed, `sizes` all micro-batches."""

    def __init__(self, tokens: int, first: int = 1, where: str = "forward", error: Exception | None = None) -> None:
        self.tokens, self.first, self.where = tokens, first, where
        self.error = error or RuntimeError(NO_MEMORY)
        self.step, self.failures, self.left = 0, list[int](), list[weakref.ref[Tensor]]()
        self.sizes: dict[int, list[int]] = {}

    def on_start(self, run: Run) -> None:
        blocks = [module for module in run.model.module.modules() if isinstance(module, Block)]
        assert len(blocks) == 2
        blocks[1].register_forward_hook(self._check)

    def on_step_begin(self, run: Run, step: int) -> None:
        self.step = step

    def _check(self, module: Any, args: Any, output: Tensor) -> None:
        self.sizes.setdefault(self.step, []).append(output.shape[0] * output.shape[1])
        # Nothing of a failed attempt is left when the next one begins.
        alive = [reference() for reference in self.left if reference() is not None]
        if alive:
            import types
            for r in gc.get_referrers(alive[0]):
                print(type(r), (r.f_code if isinstance(r, types.FrameType) else str(r)[:300]))
                for q in gc.get_referrers(r): print("    ", type(q), q.f_code if isinstance(q, types.FrameType) else str(q)[:200])
        assert not alive
        if self.step < self.first or output.shape[0] * output.shape[1] <= self.tokens:
            return
        self.left.append(weakref.ref(output))
        if self.where == "forward":
            self._fail()
        output.register_hook(lambda gradient: self._fail())

    def _fail(self) -> None:
        self.failures.append(self.step)
        raise self.error


def train(values: dict[str, Any], *callbacks: Callback) -> tuple[dict[str, Tensor], list[dict[str, Any]], str]:
    """The weights at the end, the metrics and the log."""
    result = api.train(overrides=values, callbacks=callbacks)
    assert result.checkpoint is not None
    folder = Path(values["output_dir"])
    (file,) = result.checkpoint.glob("*model.safetensors")
    return load_file(file), read_metrics(folder / "metrics.jsonl"), (folder / "logs/rank-0.log").read_text()


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


def test_probe(settings: Settings, tmp_path: Path) -> None:
    values = settings(training__global_batch_size=8, training__batch_size=4)
    w0, m0, _ = train(values | {"output_dir": str(tmp_path / "a")})
    mem = Memory(64, 3)
    w1, m1, log = train(values | {"output_dir": str(tmp_path / "b")}, mem)
    print(largest_difference(w0, w1), mem.failures, mem.sizes)
    print([l["oom_splits"] for l in m1], [l["micro_batches"] for l in m1])
    print(log)
    assert 0

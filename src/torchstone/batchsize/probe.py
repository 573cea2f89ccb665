"""Measures real steps: their peak of memory and their time, for micro-batches of a size. They leave no trace.

A step is the one that the run will take: forward and backward pass, collectives, clipping, the update with its moments,
on the longest rows that the data can have. Its learning rate is 0, so that no weight changes; what else it touches is
put back. Validation needs less memory, since it keeps no activations, and a save less than a step has freed by then.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from torchstone.batchsize.search import Measurement
from torchstone.checkpoint.load import restore_optimizer
from torchstone.config.schema import AutoBatchConfig, parse_memory
from torchstone.data.collate import collate
from torchstone.data.encode import TokenSequence
from torchstone.data.loader import StepBatch
from torchstone.errors import OutOfMemoryError, UsageError
from torchstone.heartbeat import report_phase
from torchstone.loss.cross_entropy import token_loss_sum
from torchstone.models.model import FallbackModel
from torchstone.observe.allocator import allocated_bytes, peak_bytes
from torchstone.rng import fork_rng
from torchstone.training.checks import (
    free_device_memory,
    free_memory,
    is_repairable,
    out_of_memory_reason,
    ran_out_of_memory,
)
from torchstone.training.memory import FINDING_BATCH_SIZE, available_memory
from torchstone.training.run import Run
from torchstone.training.step import compute_gradients, optimizer_step
from torchstone.tuning.quantize import QuantizedLinear

# A step that is expected to need more than this share of the memory is not tried.
SAFE_SHARE = 0.97
# Tokens of a row that takes next to no memory.
SHORT_ROW = 64
# Short steps are repeated, and the fastest one counts.
MAX_REPEATS, REPEAT_SECONDS, OUTLIER = 3, 1.0, 1.3


class MemoryBudget:
    """The bytes that this rank may have: those of `auto_batch.memory_limit`, or what is free here, times the margin."""

    def __init__(self, config: AutoBatchConfig, device: torch.device, resident: int) -> None:
        """`resident`: the bytes that this process has allocated already. On a CPU, what is free is read once."""
        self.margin, self.device = config.margin, device
        self.limit = parse_memory(config.memory_limit) if config.memory_limit is not None else None
        self._free = 0 if device.type == "cuda" else resident + free_memory()

    @property
    def memory(self) -> int:
        # On a GPU, what libraries have taken by now is not available.
        memory = available_memory(self.device) if self.device.type == "cuda" else self._free
        return memory if self.limit is None else min(memory, self.limit)

    def load(self, used: int) -> float:
        return used / (self.margin * self.memory)

    @property
    def max_load(self) -> float:
        """The load of a step that takes nearly all of the memory, instead of the margin."""
        return max(1.0, SAFE_SHARE / self.margin)


class Ranks(Protocol):
    """The ranks that measure together: what is used of `ParallelContext`."""

    @property
    def is_main(self) -> bool: ...

    @property
    def world_size(self) -> int: ...

    def all_reduce_max_each(self, values: list[int]) -> list[int]: ...

    def all_gather_object(self, value: Any) -> list[Any]: ...


class Probe(ABC):
    """Measures steps with micro-batches of a size, the same on all ranks."""

    def __init__(self, device: torch.device, ranks: Ranks, budget: MemoryBudget) -> None:
        self.device, self.ranks, self.budget = device, ranks, budget
        self.step_count = self.oom_count = 0
        self._is_warm = False
        # The nanoseconds of a size of 1 in the fastest step so far.
        self._cost = math.inf

    def micro_batches(self, size: int) -> int:
        """How many a step has."""
        return 1

    @abstractmethod
    def step(self, size: int, max_length: int | None = None) -> float:
        """Runs a step, and returns the seconds of a micro-step, without the update. `max_length`: of its rows."""

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """What this rank has between two steps."""

    @abstractmethod
    def clear(self) -> None:
        """Frees the gradients."""

    def measure(self, size: int) -> tuple[int | None, Measurement]:
        """The bytes of the step's peak (None: out of memory), and the measurement."""
        report_phase(FINDING_BATCH_SIZE)
        # Buffers of other sizes.
        self.clear()
        seconds = math.inf

        def step() -> None:
            nonlocal seconds
            seconds = min(seconds, self.step(size))

        def measure() -> int:
            self._warm_up()
            # Until two sizes were compiled, the first step is no measure of a later one.
            if self.device.type == "cuda" and self.step_count < 2:
                self.step(size)
            used = peak_bytes(self.device, step, self.tensors)
            for _ in range(self._repeats(size, seconds)):
                step()
            return used

        used = self._attempt(measure)
        self.step_count += 1
        return self._reduce_over_ranks(used, seconds)

    def measure_base(self) -> tuple[int | None, Measurement]:
        """Measures one short row, uncompiled: about what a step needs besides activations."""

        def step() -> None:
            self.step(1, SHORT_ROW)

        def measure() -> int:
            self._warm_up()
            with torch.compiler.set_stance("force_eager"):
                return peak_bytes(self.device, step, self.tensors)

        return self._reduce_over_ranks(self._attempt(measure), 1.0)

    def _warm_up(self) -> None:
        """Moments, and what libraries allocate once, exist from the first step on."""
        if not self._is_warm:
            with torch.compiler.set_stance("force_eager"):
                self.step(1, SHORT_ROW)
            self._is_warm = True

    def _attempt(self, measure: Callable[[], int]) -> int | None:
        """What it returns; None if it ran out of memory, which is then free again."""
        try:
            return measure()
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
            if self.ranks.world_size > 1 or not is_repairable(error):
                # The other ranks wait for this one, or the device cannot go on.
                raise OutOfMemoryError(
                    f"out of memory on {self.device} while {FINDING_BATCH_SIZE}: {out_of_memory_reason(error)}",
                    "start again: with a cache, this size is not tried twice; or set the size of micro-batches by hand",
                ) from None
        # Not in the handler, whose error holds the tensors of the step.
        self.oom_count += 1
        self.free()
        return None

    def _repeats(self, size: int, seconds: float) -> int:
        """How often to repeat a step for its time, the same on all ranks. On a CPU a profiler has measured it, and on a
        GPU the allocator has grown. If it took much longer than a smaller size, something was compiled, too."""
        cost = max(1, *self.ranks.all_reduce_max_each([round(seconds * 1e9)])) / size
        is_outlier, self._cost = cost > OUTLIER * self._cost, min(cost, self._cost)
        return max(int(is_outlier), min(MAX_REPEATS, int(REPEAT_SECONDS * 1e9 / (cost * size))))

    def from_cache(self, used: int | None, seconds: float | None) -> Measurement:
        """The measurement of a step that was measured before, with the memory of now."""
        return self._reduce_over_ranks(used, seconds or math.inf)[1]

    def _reduce_over_ranks(self, used: int | None, seconds: float) -> tuple[int | None, Measurement]:
        """The most of every rank."""
        # Integers: exactly equal on all ranks, and more than 10^9 only if the load is more than 1.
        parts = [1, 0, 0, 0]
        if used is not None:
            parts = [0, used, math.ceil(self.budget.load(used) * 1e9), math.ceil(seconds * 1e9)]
        failed, used, billionths, nanoseconds = self.ranks.all_reduce_max_each(parts)
        if failed:
            return None, Measurement(math.inf, math.inf)
        return used, Measurement(billionths / 1e9, max(1, nanoseconds) / 1e9)

    def free(self) -> None:
        self.clear()
        free_device_memory(self.device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def keep_state(self, buffers: Iterable[Tensor]) -> Iterator[None]:
        """Puts back the RNG and these buffers, and frees what steps have left."""
        copies = [(buffer, buffer.clone()) for buffer in buffers]
        try:
            with fork_rng(self.device):
                yield
        finally:
            for buffer, value in copies:
                buffer.copy_(value)
            self.free()
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)


class RunProbe(Probe):
    """Steps of a run. A size is a number of rows; if conversations share rows, of context lengths."""

    def __init__(self, run: Run) -> None:
        self.run, data, context_length = run, run.data, run.config.data.context_length
        is_shared = data.batch_sizes.micro_batch_tokens is not None
        longest = max(int(each.lengths.max(initial=1)) for each in (data.train, *data.validation.values()))
        # What a size of 1 is in the setting, and in tokens.
        self.unit = context_length if is_shared else 1
        self.row_tokens = context_length if is_shared else min(context_length, longest)
        budget = MemoryBudget(run.config.auto_batch, run.device, allocated_bytes(run.device, self.tensors()))
        super().__init__(run.device, run.ctx, budget)

    @property
    def limit(self) -> int:
        """The size with which a step has one micro-batch: a larger one changes nothing."""
        sizes, dp = self.run.data.batch_sizes, self.run.ctx.dims.dp
        samples = -(-sizes.global_batch_size // dp)
        if sizes.micro_batch_tokens is None:
            return samples
        return max(1, math.ceil(samples * int(self.run.data.train.lengths.max()) / self.unit))

    def padded_tokens(self, size: int) -> int:
        """Of a micro-batch of `size`, on full rows."""
        data = replace(self.run.data)
        data.set_micro_batch(size * self.unit, self.run.ctx.dims.dp)
        shares_rows = data.batch_sizes.micro_batch_tokens is not None
        rows, length = (1, size * self.unit) if shares_rows else (size, self.row_tokens)
        return data.shapes.pad_rows(rows) * data.shapes.pad_length(length)

    def micro_batches(self, size: int) -> int:
        """Two stand for any number, except in a pipeline, which has buffers for all of them."""
        count, pp = -(-self.limit // size), self.run.ctx.dims.pp
        return min(count, 2) if pp == 1 else max(pp, count)

    def step(self, size: int, max_length: int | None = None) -> float:
        run, batch = self.run, self._batch(size, max_length)
        self.synchronize()
        start = time.perf_counter()
        result = compute_gradients(run.runner, batch, run.progress.step)
        self.synchronize()
        seconds = time.perf_counter() - start
        optimizer_step(run.runner, run.optimizer, result, run.progress.step, 0.0, run.config.optim.max_grad_norm)
        self.synchronize()
        return seconds / len(batch.micro_batches)

    def tensors(self) -> Iterator[Tensor]:
        run = self.run
        for part in run.model.model_parts:
            yield from part.parameters()
            yield from part.buffers()
        yield from (parameter for _, parameter in run.model.named_parameters())
        for state in run.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        for _, basis, initial in () if run.runner.projection is None else run.runner.projection.bases:
            yield from (tensor for tensor in (basis, initial) if tensor is not None)

    def clear(self) -> None:
        if self.run.runner.pipeline is not None:
            self.run.runner.pipeline.forget_schedules()
        self.run.model.clear_gradients()

    @contextmanager
    def without_trace(self) -> Iterator[None]:
        """Puts back what steps change: micro-batch size, moments, gradients, RNG, buffers, compiled code, peaks."""
        run = self.run
        sizes, shapes, was_training = run.data.batch_sizes, run.data.shapes, run.model.module.training
        run.optimizer.reset_state()
        run.model.train()
        try:
            with self.keep_state(_changing_buffers(run)):
                yield
        finally:
            run.data.batch_sizes, run.data.shapes = sizes, shapes
            run.model.train(was_training)
            run.optimizer.reset_state()
            if run.model.choices["model.compile"].value != "none":
                # Code for other sizes: what the run compiles must not depend on it.
                torch.compiler.reset()
            self.free()
            if run.resumed_from is not None:
                restore_optimizer(run.resumed_from, run.optimizer, run.model)

    def _batch(self, size: int, max_length: int | None) -> StepBatch:
        """Micro-batches of `size`, in the shapes that the data loader makes of them, of random tokens."""
        data, dp = self.run.data, self.run.ctx.dims.dp
        data.set_micro_batch(size * self.unit, dp)
        tokens, vocabulary = np.random.default_rng(0), min(self.run.tokenizer.size, self.run.model.vocab_size)
        length = self.row_tokens if max_length is None else min(self.row_tokens, max_length)
        ids = [tokens.integers(vocabulary, size=length) for _ in range(size)]
        sequences = [TokenSequence(each, each) for each in ids]
        rows = [[each] for each in sequences] if data.batch_sizes.micro_batch_tokens is None else [sequences]
        micro_batch = collate(rows, data.pad_id, data.shapes)
        if self.device.type == "cuda":
            micro_batch = micro_batch.pin_memory()
        count = self.micro_batches(size)
        loss_tokens = micro_batch.get_counts().loss_tokens * count * dp
        return StepBatch([micro_batch] * count, size * count, 0, loss_tokens, 0, 0)


class ModuleProbe(Probe):
    """Steps of AdamW on a module that maps ids [B, T] to logits, or to an output of Transformers that has them."""

    def __init__(self, module: nn.Module, max_seq_len: int, ranks: Ranks, budget: MemoryBudget) -> None:
        device = next(module.parameters()).device
        super().__init__(device, ranks, budget)
        self.module, self.max_seq_len = module, max_seq_len
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        embeddings = [each for each in module.modules() if isinstance(each, nn.Embedding)]
        if not self.parameters or not embeddings:
            raise UsageError("the model has no trainable parameters, or no nn.Embedding that tells its vocabulary")
        self.vocabulary = embeddings[0].num_embeddings
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, weight_decay=0.0, fused=True)

    def step(self, size: int, max_length: int | None = None) -> float:
        length = self.max_seq_len if max_length is None else min(self.max_seq_len, max_length)
        tokens = np.random.default_rng(0).integers(self.vocabulary, size=(size, length))
        ids_BT = torch.from_numpy(tokens).to(self.device)
        self.synchronize()
        start = time.perf_counter()
        output = self.module(ids_BT)
        logits_BTV = output if isinstance(output, Tensor) else output.logits
        (token_loss_sum(logits_BTV[:, :-1], ids_BT[:, 1:]) / ids_BT.numel()).backward()
        self.synchronize()
        seconds = time.perf_counter() - start
        # The weights stay as they are, also if a gradient is not finite.
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.synchronize()
        return seconds

    def tensors(self) -> Iterator[Tensor]:
        yield from self.module.parameters()
        yield from self.module.buffers()
        for state in self.optimizer.state.values():
            yield from state.values()

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def without_trace(self) -> Iterator[None]:
        gradients = [parameter.grad for parameter in self.parameters]
        modes = {module: module.training for module in self.module.modules()}
        self.clear()
        if not self.module.training:
            # As Transformers loads models. Parts of a module in training mode may be in evaluation mode on purpose.
            self.module.train()
        try:
            with self.keep_state(self.module.buffers()):
                yield
        finally:
            for module, mode in modes.items():
                module.training = mode
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient


def _changing_buffers(run: Run) -> list[Tensor]:
    """Transformers' models may change theirs in a forward pass. Ours have none."""
    if not isinstance(run.model, FallbackModel):
        return []
    modules = [module for module in run.model.module.modules() if not isinstance(module, QuantizedLinear)]
    return [buffer for module in modules for buffer in module.buffers(recurse=False)]

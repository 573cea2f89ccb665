"""The estimate of a step's memory against what was measured on a GPU, and the hint when a step does not fit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from precision import single_process_runner
from steps import step_batch, train_step
from torchstone.batchsize.probe import RunProbe
from torchstone.config.load import load_config
from torchstone.config.schema import OptimConfig, TrainingConfig
from torchstone.data.batch_sizes import BatchSizes, resolve_batch_sizes
from torchstone.data.collate import collate
from torchstone.data.encode import TokenSequence
from torchstone.models.choice import Choice
from torchstone.models.decoder import DecoderConfig, LayerSpec
from torchstone.observe.console import Console
from torchstone.optim.build import build_optimizer
from torchstone.parallel.mesh import ParallelContext, ParallelDims
from torchstone.parallel.projections import ShardedProjections
from torchstone.training import memory
from torchstone.training.memory import (
    Change,
    StepSizes,
    accumulation_bytes,
    describe_fit,
    estimate_step_bytes,
    frozen_bytes,
    gradient_bytes,
    hint_to_fit,
    rank_changes,
    size_flags,
    smaller_states,
    state_bytes,
)
from torchstone.training.run import Run
from torchstone.training.setup import build_run
from torchstone.training.step import compute_gradients

GIB = 2**30
CPU = torch.device("cpu")
SIZE_KEYS = ("model.depth", "model.width", "model.heads", "model.tokenizer")
LLAMA_1B = DecoderConfig(128256, 2048, 32, 8, 64, 8192, (LayerSpec(),) * 16, tied=True)
PARAMETERS = 1_235_814_400
# 8 x 4096 tokens in bf16: fp32 weights and moments, bf16 copies and gradients, whose sums are fp32.
SIZES = StepSizes(
    LLAMA_1B, 16, 16 * PARAMETERS, 2 * PARAMETERS, False, 4096, 8, 2, "elementwise", True, 2048,
    gradient_bytes=2 * PARAMETERS,
)  # fmt: skip


class TestEstimate:
    @pytest.mark.parametrize(
        ("recompute", "is_compiled", "chunk_tokens", "measured"),
        [
            ("elementwise", True, 2048, 43.9),
            ("full", True, 2048, 23.1),
            ("none", True, None, 98.9),
            ("none", False, None, 114.9),
        ],
    )
    def test_it_is_within_five_percent_of_the_peak_on_an_h200(
        self, recompute: str, is_compiled: bool, chunk_tokens: int | None, measured: float
    ) -> None:
        sizes = replace(SIZES, recompute=recompute, is_compiled=is_compiled, chunk_tokens=chunk_tokens)
        assert estimate_step_bytes(sizes) / GIB == pytest.approx(measured, rel=0.05)

    def test_more_recomputation_and_fewer_rows_need_less(self) -> None:
        modes = [replace(SIZES, recompute=mode) for mode in ("full", "selective", "elementwise", "none")]
        needed = [estimate_step_bytes(sizes) for sizes in modes]
        assert needed == sorted(needed)
        assert estimate_step_bytes(replace(SIZES, rows=7)) < estimate_step_bytes(SIZES)

    def test_sums_of_gradients_need_more(self) -> None:
        """The sum of earlier gradients exists while the activations of a micro-batch do, its own gradients do not."""
        more = estimate_step_bytes(replace(SIZES, accumulates=True)) - estimate_step_bytes(SIZES)
        assert more == 4 * PARAMETERS

    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    @pytest.mark.parametrize("name", ["adamw", "muon"])
    def test_the_state_is_counted_exactly(self, name: Any, precision: str, llama_dir: Path) -> None:
        """In the second step of two micro-batches."""
        runner = single_process_runner(llama_dir, CPU, precision)
        model = runner.model
        copies = None if model.master_weights is None else model.master_weights.copies
        optimizer = build_optimizer(
            model.named_parameters(), OptimConfig(name=name), model.parameter_kinds(), ShardedProjections(model), copies
        )
        ids = np.arange(8)
        batch = step_batch([collate([[TokenSequence(ids, ids)]], pad_id=0)] * 2)
        train_step(runner, optimizer, batch, 1, 1e-3, 1.0)
        compute_gradients(runner, batch, 2)
        tensors = [p for _, p in model.named_parameters()]
        tensors += [p.grad for p in tensors if p.grad is not None] + list((copies or {}).values())
        tensors += [m for state in optimizer.state.values() for key, m in state.items() if key != "step"]
        assert state_bytes(model, optimizer) + accumulation_bytes(model) == sum(tensor.nbytes for tensor in tensors)
        assert accumulation_bytes(model) == (2 * model.parameter_count if precision == "bf16" else 0)

    @pytest.mark.parametrize("method", ["lora", "osft"])
    def test_what_is_frozen_is_counted_too(self, method: str, base_run: Path, settings: Any) -> None:
        """Quantized weights, and the frozen directions of OSFT."""
        values = settings(
            model__path=str(base_run), tuning__method=method, training__precision="bf16", optim__weight_decay=0.1
        )
        for key in ("model.depth", "model.width", "model.heads", "model.tokenizer"):
            del values[key]
        if method == "lora":
            pytest.importorskip("bitsandbytes")
            values["tuning.quantize_base"] = "nf4"
        run = build_run(load_config(overrides=values), Console("quiet"), CPU)
        model, projection = run.model, run.runner.projection
        assert model.master_weights is not None
        copies = model.master_weights.copies
        # In bf16, what is trained has fp32 values and moments, bf16 copies and gradients.
        expected = sum(
            16 * p.numel() if p.requires_grad else copies.get(p, p).nbytes for _, p in model.named_parameters()
        )
        tensors = [buffer for name, buffer in model.module.named_buffers() if ".part_" in name]
        if projection is not None:
            tensors = [tensor for _, basis, initial in projection.bases for tensor in (basis, initial)]
        assert len(tensors) == (28 if method == "osft" else 5 * 14)
        assert state_bytes(model, run.optimizer, projection) == expected + sum(tensor.nbytes for tensor in tensors)

    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_what_smaller_states_need_is_predicted(self, precision: str, base_run: Path, settings: Any) -> None:
        def build(**changes: Any) -> Run:
            values = settings(model__path=str(base_run), optim__weight_decay=0.0, **changes)
            values = {key: value for key, value in values.items() if key not in SIZE_KEYS}
            return build_run(load_config(overrides=values), Console("quiet"), CPU)

        def predictions(run: Run) -> dict[str, int]:
            """Of weights, gradients and moments together; those of the gradients are checked here."""
            itemsize = 4 if precision == "fp32" else 2
            state, gradients = state_bytes(run.model, run.optimizer), gradient_bytes(run.model)
            sizes = replace(SIZES, state_bytes=state, gradient_bytes=gradients, itemsize=itemsize)
            smaller = dict(smaller_states(run.config, run.model, sizes, None))
            assert smaller["--training.precision bf16-pure"].gradient_bytes == gradients * 2 // itemsize
            return {text: changed.state_bytes for text, changed in smaller.items()}

        def actual(**changes: Any) -> int:
            run = build(**changes)
            return state_bytes(run.model, run.optimizer)

        full = predictions(build(training__precision=precision))
        lora = {"tuning__method": "lora", "tuning__lora_rank": 1}
        of_lora = predictions(build(training__precision=precision, **lora))
        pure = {"training__precision": "bf16-pure"}
        assert list(full) == ["--training.precision bf16-pure", "--tuning.method lora"]
        assert full["--training.precision bf16-pure"] == actual(**pure)
        assert full["--tuning.method lora"] == frozen_bytes(build(training__precision=precision, **lora).model)
        assert list(of_lora) == ["--training.precision bf16-pure", "--tuning.quantize_base nf4"]
        assert of_lora["--training.precision bf16-pure"] == actual(**pure, **lora)
        pytest.importorskip("bitsandbytes")
        quantized = actual(training__precision=precision, tuning__quantize_base="nf4", **lora)
        # Scales have a fixed size, which counts in so small a model.
        assert 0 < quantized - of_lora["--tuning.quantize_base nf4"] < 16 * 2048


def size_flags_of(rows: int) -> str:
    return f"--training.batch_size {rows} --training.global_batch_size 8"


class TestHint:
    @pytest.mark.parametrize(
        ("memory", "recompute", "hint"),
        [
            (40, "elementwise", "use --model.recompute full, which needs about 23 of 40 GiB"),
            (
                25,
                "full",
                "use --training.batch_size 2 --training.global_batch_size 8, which needs about 23 of 25 GiB; the "
                "global batch stays the same",
            ),
            (
                23.5,
                "none",
                "even one row with --model.recompute full needs about 22 of 24 GiB: use a shorter "
                "--data.context_length, such as 1024, in a new run",
            ),
            (
                22,
                "none",
                "even one short row with --model.recompute full needs about 22 of 22 GiB, most of it for weights, "
                "gradients and moments: use --training.precision bf16-pure in a new run, or more GPUs "
                "(--parallel.dp_shard shards them)",
            ),
        ],
    )
    def test_it_names_the_first_change_that_fits(self, memory: float, recompute: str, hint: str) -> None:
        sizes = replace(SIZES, recompute=recompute)
        assert hint_to_fit(sizes, int(memory * GIB), size_flags_of, "bf16-pure") == hint

    def test_recomputation_comes_before_fewer_rows(self) -> None:
        """Where the state is small: fewer rows of a 1B model save less than the sum of its gradients takes."""
        sizes = replace(SIZES, state_bytes=GIB, accumulation_bytes=0, gradient_bytes=0)
        assert hint_to_fit(sizes, 4 * GIB, size_flags_of, None) == (
            "use --model.recompute full and --training.batch_size 2 --training.global_batch_size 8, which needs about "
            "3 of 4 GiB; the global batch stays the same"
        )

    def test_three_changes_are_ranked_by_what_they_save(self) -> None:
        recomputed, half = replace(SIZES, recompute="full"), replace(SIZES, rows=4, accumulates=True)
        changes = [
            Change("larger", replace(SIZES, rows=16)),
            Change("half the rows", half),
            Change("no state", replace(SIZES, state_bytes=0)),
            Change("recompute", recomputed),
            Change("nearly the same", replace(SIZES, row_tokens=4095)),
        ]
        assert rank_changes(SIZES, changes, int(24.5 * GIB)) == (
            "a step needs about 43.9 GiB; these changes save most: 1. recompute (20.8 GiB less, which "
            "fits), 2. no state (18.4 GiB less), 3. half the rows (9.0 GiB less)"
        )
        assert ", which fits" not in rank_changes(SIZES, changes, None)
        saved = estimate_step_bytes(SIZES) - estimate_step_bytes(half)
        assert rank_changes(SIZES, changes[:2], None).endswith(
            f"save most: 1. half the rows ({saved / GIB:.1f} GiB less)"
        )

    def test_weights_that_are_bf16_get_no_smaller(self) -> None:
        hint = hint_to_fit(SIZES, 16 * GIB, size_flags_of, None)
        assert hint.endswith("moments: use more GPUs (--parallel.dp_shard shards them)")

    @pytest.mark.parametrize("dp", [1, 2])
    @pytest.mark.parametrize("rows", [2, 3])
    @pytest.mark.parametrize(
        "training",
        [
            TrainingConfig(),
            TrainingConfig(batch_size=5),
            TrainingConfig(max_tokens_per_gpu=4096),
            TrainingConfig(batch_size=8, grad_accum_steps=3),
            TrainingConfig(batch_size=5, grad_accum_steps=1),
            TrainingConfig(global_batch_size=6, grad_accum_steps=1),
            TrainingConfig(global_batch_size=22, grad_accum_steps=2),
        ],
    )
    def test_the_flags_keep_the_size_of_a_step_and_can_be_followed(
        self, training: TrainingConfig, rows: int, dp: int
    ) -> None:
        batch = resolve_batch_sizes(training, False, 512, 8, dp)
        flags = size_flags(batch, training, 512, rows).replace("--training.", "").split()
        values: dict[str, Any] = {
            key: None if value == "null" else int(value) for key, value in zip(flags[::2], flags[1::2], strict=True)
        }
        followed = resolve_batch_sizes(replace(training, **values), False, 512, 8, dp)
        assert followed == BatchSizes(batch.global_batch_size, rows, None)

    @pytest.mark.parametrize("world_size", [1, 2])
    @pytest.mark.parametrize("is_packed", [False, True])
    def test_only_a_single_gpu_has_an_estimate(
        self, world_size: int, is_packed: bool, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runner = single_process_runner(llama_dir, CPU, "bf16")
        model = runner.model
        model.choices["model.attention"] = Choice("flash", "as on a GPU")
        monkeypatch.setattr(memory, "available_memory", lambda device: 8 * 2**20)
        monkeypatch.setattr(memory, "current_phase", lambda: "computing step 3")
        size = {"training.max_tokens_per_gpu": 65536} if is_packed else {"training.batch_size": 64}
        values = {"model.path": str(llama_dir), "data.path": "x", "data.context_length": 1024} | size
        config = load_config(overrides=values | {"training.global_batch_size": 128})
        lengths = np.full(10, 1024)
        run: Any = SimpleNamespace(
            model=model,
            runner=runner,
            optimizer=build_optimizer(model.named_parameters(), OptimConfig(), model.parameter_kinds()),
            device=torch.device("cuda"),
            config=config,
            ctx=ParallelContext(ParallelDims(dp_shard=world_size)),
            data=SimpleNamespace(
                batch_sizes=resolve_batch_sizes(config.training, is_packed, 1024, 8, world_size),
                packed=is_packed,
                train=SimpleNamespace(lengths=lengths),
            ),
        )
        hint = describe_fit(run)
        if world_size == 2:
            # It does not know the buffers of collectives, nor what fits.
            assert re.match(r"these changes save most: 1\. (.*?) \(.* less\), 2\. (.*?) \(.*\), 3\. ", hint), hint
            assert "about" not in hint
            assert "fits" not in hint
        else:
            flags = "--training.max_tokens_per_gpu 1024" if is_packed else "--training.batch_size 1"
            assert hint.startswith(f"use --model.recompute full and {flags} --training.global_batch_size 128, which")
            ranked = re.search(
                r"these changes save most: 1\. (.*?) \(.* less.*\), 2\. (.*?) \(.*\), 3\. (.*?) \(.*\)$", hint
            )
            assert ranked is not None, hint
            half = f"--training.max_tokens_per_gpu {32 * 1024}" if is_packed else "--training.batch_size 32"
            assert [ranked[1], ranked[2].partition(" (")[0]] == [
                "--model.loss chunked", f"{half} --training.global_batch_size 128"
            ]  # fmt: skip

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_it_counts_what_attention_keeps(
        self, attention: str, settings: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Masks, and all scores of eager attention, against the peak of a real step."""
        monkeypatch.setattr(memory, "current_phase", lambda: "computing step 1")
        changes = {"data.context_length": 512, "data.text_packing": "best-fit", "model.attention": attention}
        values = settings(training__batch_size=4, training__global_batch_size=4) | changes
        run = build_run(load_config(overrides=values), Console("none"), CPU)
        probe = RunProbe(run)
        with probe.without_trace():
            used, _ = probe.measure(4)
        assert used is not None
        needed = re.search(r"a step needs about ([\d.]+) MiB", describe_fit(run, (4, probe.row_tokens)))
        assert needed is not None
        assert float(needed[1]) == pytest.approx(used / 2**20, rel=0.1)

    def test_the_flags_of_packed_conversations(self) -> None:
        batch = BatchSizes(50, None, 4096)
        flags = "--training.max_tokens_per_gpu 1024 --training.global_batch_size 50"
        assert size_flags(batch, TrainingConfig(), 512, 2) == flags

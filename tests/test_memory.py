"""The estimate of a step's memory against what was measured on a GPU, and the hint when a step does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchstone.checkpoint.model_folder import load_model
from torchstone.config.schema import OptimConfig, TrainingConfig
from torchstone.data.batch_sizes import BatchSizes, resolve_batch_sizes
from torchstone.models.decoder import DecoderConfig, LayerSpec
from torchstone.optim.build import build_optimizer
from torchstone.training.memory import StepSizes, estimate_step_bytes, hint_to_fit, size_flags, state_bytes

GIB = 2**30
CPU = torch.device("cpu")
LLAMA_1B = DecoderConfig(128256, 2048, 32, 8, 64, 8192, (LayerSpec(),) * 16, tied=True)
# 8 x 4096 tokens in bf16: fp32 weights and moments, bf16 copies and gradients.
SIZES = StepSizes(LLAMA_1B, 16, 16 * 1_235_814_400, 4096, 8, 2, "elementwise", True, 2048)


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

    def test_the_state_is_counted_exactly(self, llama_dir: Path) -> None:
        model = load_model(llama_dir, CPU)
        optimizer = build_optimizer(model.named_parameters(), OptimConfig(), model.parameter_kinds())
        assert state_bytes(model, optimizer) == 4 * 4 * model.parameter_count
        model.use_master_weights(torch.bfloat16)
        assert state_bytes(model, optimizer) == (3 * 4 + 2 * 2) * model.parameter_count


def size_flags_of(rows: int) -> str:
    return f"--training.batch_size {rows} --training.global_batch_size 8"


class TestHint:
    @pytest.mark.parametrize(
        ("memory", "recompute", "hint"),
        [
            (40, "elementwise", "use --model.recompute full, which needs about 23 of 40 GiB"),
            (
                23,
                "elementwise",
                "use --model.recompute full and --training.batch_size 4 --training.global_batch_size 8, which needs "
                "about 21 of 23 GiB; the global batch stays the same",
            ),
            (
                23,
                "full",
                "use --training.batch_size 4 --training.global_batch_size 8, which needs about 21 of 23 GiB; the "
                "global batch stays the same",
            ),
            (
                21,
                "none",
                "even one row with --model.recompute full needs about 20 of 21 GiB: use a shorter "
                "--data.context_length",
            ),
            (
                16,
                "none",
                "weights, gradients and moments alone need 18 of 16 GiB: use --training.precision bf16-pure, or more "
                "GPUs (--parallel.dp_shard shards them)",
            ),
        ],
    )
    def test_it_names_the_first_change_that_fits(self, memory: int, recompute: str, hint: str) -> None:
        sizes = replace(SIZES, recompute=recompute)
        assert hint_to_fit(sizes, memory * GIB, size_flags_of, "bf16-pure") == hint

    def test_weights_that_are_bf16_get_no_smaller(self) -> None:
        hint = hint_to_fit(SIZES, 16 * GIB, size_flags_of, None)
        assert hint.endswith("GiB: use more GPUs (--parallel.dp_shard shards them)")

    @pytest.mark.parametrize(
        ("batch", "training", "flags"),
        [
            (BatchSizes(8, 8, None), TrainingConfig(), "--training.batch_size 2 --training.global_batch_size 8"),
            (
                BatchSizes(50, None, 4096),
                TrainingConfig(),
                "--training.max_tokens_per_gpu 1024 --training.global_batch_size 50",
            ),
            (
                BatchSizes(8, 8, None),
                TrainingConfig(max_tokens_per_gpu=4096),
                "--training.max_tokens_per_gpu 1024 --training.global_batch_size 8",
            ),
            (
                BatchSizes(24, 8, None),
                TrainingConfig(batch_size=8, grad_accum_steps=3),
                "--training.batch_size 2 --training.grad_accum_steps 12",
            ),
        ],
    )
    def test_the_flags_keep_the_size_of_a_step_and_can_be_followed(
        self, batch: BatchSizes, training: TrainingConfig, flags: str
    ) -> None:
        assert size_flags(batch, training, rows=8, context_length=512, fewer_rows=2) == flags
        names = flags.replace("--training.", "").split()
        values = dict(zip(names[::2], map(int, names[1::2]), strict=True))
        shares_rows = batch.micro_batch_tokens is not None
        followed = resolve_batch_sizes(replace(training, **values), shares_rows, 512, 8)
        assert followed.global_batch_size == batch.global_batch_size

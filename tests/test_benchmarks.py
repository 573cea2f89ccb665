"""The harness that compares `torchstone train` with other trainers, on a CPU with a tiny model."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from selection import the_rest

Command = Callable[..., tuple[int, str, str]]
HARNESS = Path(__file__).parents[1] / "benchmarks/train.py"
STEP = {"tokens": 100, "seconds": 0.5, "loss": 2.0, "grad_norm": 1.0}


def run_harness(*arguments: str) -> tuple[list[dict[str, Any]], str]:
    """The JSON lines and the table."""
    command = [sys.executable, str(HARNESS), *arguments, "--device", "cpu", "--repeats", "1"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")], "\n".join(
        line for line in lines if line.startswith("|")
    )


def test_our_arm_and_the_peers_train_on_the_same_tokens() -> None:
    arms = ["--arm", "torchstone", "--arm", "transformers", "--arm", "torchtitan"]
    lines, table = run_harness("tiny", "--steps", "3", *arms)
    ours, transformers, torchtitan = lines
    assert [line["arm"] for line in lines] == ["torchstone", "transformers", "torchtitan"]
    for line in (ours, transformers):
        assert (line["steps"], line["tokens"]) == (3, 3 * 8 * 64)
        assert line["min_grad_norm"] > 0
        assert line["start_s"] > line["first_step_s"] > 0
    assert f"{ours['tok_s'] / transformers['tok_s']:.3f}x" in table
    if find_spec("torchtitan") is None:
        assert torchtitan["not_installed"] == "torchtitan"
        assert "| torchtitan | torchtitan is not installed |" in table


@the_rest
def test_packed_fine_tuning_from_one_folder_has_the_losses_of_transformers() -> None:
    ours, transformers = run_harness("tiny-sft", "--steps", "4")[0]
    assert ours["tokens"] == transformers["tokens"]
    assert ours["first_loss"] == pytest.approx(transformers["first_loss"], rel=1e-6)
    assert ours["last_loss"] == pytest.approx(transformers["last_loss"], rel=1e-5)


def test_losses_of_fp8_are_compared_as_means_of_steps() -> None:
    compare = runpy.run_path(str(HARNESS.parent / "models/fp8_loss.py"))["compare"]
    reference = [4.0] * 100
    losses = [4.0] * 20 + [4.4] * 20 + [4.0] * 20 + [4.02] * 40
    comparison = compare(losses, reference)
    assert comparison["last_50"] == pytest.approx(0.02 * 40 / 50 / 4)
    assert comparison["worst_20"] == pytest.approx(0.1)
    assert compare(reference, reference)["worst_20"] == 0


@the_rest
def test_fp8_is_emulated_on_a_cpu() -> None:
    sizes = "--depth 1 --width 64 --heads 2 --rows 2 --length 64 --vocabulary 1024 --text-bytes 1000000 --steps 20"
    command = [
        sys.executable,
        str(HARNESS.parent / "models/fp8_loss.py"),
        "--emulate",
        "--device",
        "cpu",
        *sizes.split(),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    bf16, fp8 = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert (bf16["worst_20"], bf16["arm"], fp8["arm"]) == (0, "bf16", "fp8")
    assert 0 < abs(fp8["worst_20"]) < 0.01


@the_rest
def test_the_default_run_beside_a_size_set_by_hand() -> None:
    """The same tokens and losses."""
    command = [sys.executable, str(HARNESS.parent / "default_run.py"), "--shape", "tiny", "--device", "cpu"]
    command += ["--rows", "96", "--arm", "4096 tokens"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    defaults, by_hand = map(json.loads, result.stdout.splitlines())
    assert (defaults["arm"], by_hand["steps"], by_hand["tokens"]) == ("defaults", 3, defaults["tokens"])
    assert by_hand["last_loss"] == pytest.approx(defaults["last_loss"], rel=1e-5)
    assert "attention: sdpa" in defaults["said"][0]


def test_a_block_with_plain_and_fused_adapters(run_main: Command) -> None:
    sizes = "--rows 2 --length 24 --width 64 --mlp-width 96 --heads 4 --kv-heads 2 --rounds 1 --compile none"
    program = HARNESS.parent / "models/lora.py"
    code, output, _ = run_main(runpy.run_path(str(program))["main"], program, "--device", "cpu", *sizes.split())
    plain, fused = map(json.loads, output.splitlines())
    assert code == 0
    assert (plain["variant"], plain["error"], fused["variant"]) == ("plain", 0, "fused")
    # Rounding: both compute the same, in another way.
    assert 0 < fused["error"] < 0.01


class TestSummary:
    harness = runpy.run_path(str(HARNESS))

    def test_the_speed_is_the_mean_after_the_second_step(self) -> None:
        steps = [STEP | {"seconds": 9.0}, STEP | {"seconds": 9.0}, STEP, STEP, STEP | {"seconds": 1.5}]
        line = self.harness["summarize"]({"steps": steps, "peak_bytes": 2**31, "start_s": 12.0})
        assert (line["tok_s"], line["tok_s_median"]) == (300 / 2.5, 200)
        assert (line["peak_gib"], line["first_step_s"], line["start_s"], line["tokens"]) == (2, 9.0, 12.0, 500)

    @pytest.mark.parametrize("change", [{"grad_norm": 0.0}, {"grad_norm": float("nan")}, {"loss": float("inf")}])
    def test_a_run_that_trains_nothing_is_an_error(self, change: dict[str, float]) -> None:
        line = self.harness["summarize"]({"steps": [STEP, STEP, STEP | change], "peak_bytes": None})
        assert line["error"].startswith("a gradient norm is not positive or a loss is not finite")

    def test_our_arm_has_no_performance_flags(self, tmp_path: Path) -> None:
        job = vars(self.harness["SHAPES"]["1b"]) | {
            "steps": 3, "device": "cuda", "recompute": False, "tokenizer": "t", "data": "d", "cache": "c",
            "model": None,
        }  # fmt: skip
        command = self.harness["torchstone_command"](job, tmp_path, [])
        keys = {word for word in command if word.startswith("--")}
        performance = ("precision", "compile", "attention", "fused", "recompute", "liger", "num_workers", "threads")
        assert not [key for key in keys if key.endswith(performance)]
        assert self.harness["torchstone_command"](job, tmp_path, ["--x", "y"]) == [*command, "--x", "y"]

    def test_documents_have_long_tailed_lengths_that_fit_a_step(self) -> None:
        import numpy as np

        shape = self.harness["SHAPES"]["sft"]
        steps = [self.harness["document_lengths"](shape, np.random.default_rng(seed)) for seed in range(20)]
        assert all(0.88 * 32768 <= sum(step) <= 32768 and len(step) == 50 for step in steps)
        lengths = sorted(length for step in steps for length in step)
        assert 350 < lengths[500] < 450
        assert lengths[-20] > 2000
        assert len({sum(step) for step in steps}) > 15, "steps differ in size"

"""The GPU suite is complete and can be chosen by name: what run_gpu_tests.py selects. No test runs here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIAGNOSTICS = {
    "test_overfitting.py::TestSingleSampleOverfitting::test_single_sample_overfitting_loss_decreases",
    "test_overfitting.py::TestSingleSampleOverfitting::test_compare_loss_computation_methods",
    "test_overfitting.py::TestSingleSampleOverfitting::test_loss_scaling_with_world_size",
    "test_overfitting.py::TestBatchOverfitting::test_training_pipeline_with_small_batch",
    "test_single_gpu_training.py::TestSingleGPUTraining::test_single_gpu_training_loop",
    "test_single_gpu_training.py::TestSingleGPUTraining::test_gradient_accumulation",
    "test_single_gpu_training.py::TestSingleGPUTraining::test_loss_with_liger_kernels",
    "test_multi_gpu_training.py::TestMultiGPUTraining::test_two_gpu_training",
    "test_multi_gpu_training.py::TestMultiGPUTraining::test_gradient_synchronization",
    "test_multi_gpu_training.py::TestMultiGPUTraining::test_loss_consistency_across_ranks",
}


def select(*args: str) -> tuple[int, set[str]]:
    """The exit code of run_gpu_tests.py, and the tests that it selects."""
    command = [sys.executable, str(ROOT / "run_gpu_tests.py"), *args, "--collect-only", "-q"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    return process.returncode, set(re.findall(r"^tests/gpu_tests/(\S+::\S+)$", process.stdout, re.MULTILINE))


def test_the_diagnostics_are_chosen_by_their_marker() -> None:
    assert select("--all", "-k", "diagnostic") == (0, DIAGNOSTICS)


def test_a_flag_chooses_a_file_and_the_rest_goes_to_pytest() -> None:
    name = "test_single_sample_overfitting"
    assert select("--overfitting", "-k", name) == (0, {test for test in DIAGNOSTICS if name in test})
    # pytest's exit code if it finds no test.
    assert select("--multi", "-k", name) == (5, set())

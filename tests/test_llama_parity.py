"""A whole run of a tiny Llama equals a plain loop with Transformers and torch.optim, and planted errors are found.

training/test_custom_modeling.py compares gradients, losses and weights of all families.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import parity
from sides import MAX_NORM, WEIGHT_DECAY, OurSide, both_sides, make_batch
from tiny import TINY_LLAMA, make_llama, write_rows
from torchstone import api
from torchstone.checkpoint.model_folder import load_model
from torchstone.config import load_config
from torchstone.observe.metrics import read_metrics
from torchstone.parallel import runner

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_a_whole_run_from_a_file_equals_the_plain_loop(
    llama_dir: Path, settings: Callable[..., dict[str, Any]], tmp_path: Path, packing: bool
) -> None:
    """Covers all between a file and the weights: cache, sampler, packing, accumulation, schedule, checkpoint."""
    from transformers import AutoModelForCausalLM

    batches = parity.random_batches(6, 440, seed=4)
    # Eight rows are one step, whatever the micro-batches are.
    rows = [sequence for step in batches for micro_batch in step for sequence in micro_batch][:40]
    write_rows(tmp_path / "rows.jsonl", [{"input_ids": i, "labels": x, "len": len(i)} for i, x in rows])
    overrides = {key: value for key, value in settings().items() if not key.startswith("model.")} | {
        "model.path": str(llama_dir), "data.path": str(tmp_path / "rows.jsonl"), "data.shuffle": False,
        "data.packing": packing, "training.max_steps": 5, "training.global_batch_size": 8,
        "optim.learning_rate": 3e-3, "optim.eps": 1e-4, "optim.schedule": "linear", "optim.max_grad_norm": MAX_NORM,
        "optim.weight_decay": WEIGHT_DECAY, "optim.warmup_ratio": 0,
    }  # fmt: skip
    overrides |= {"training.max_tokens_per_gpu": 48} if packing else {"training.batch_size": 2}
    result = api.train(load_config(overrides=overrides))

    model = AutoModelForCausalLM.from_pretrained(str(llama_dir), dtype=torch.float32)
    optimizer = parity.reference_adamw(model, WEIGHT_DECAY, lr=3e-3, betas=(0.9, 0.95), eps=1e-4)
    reference = parity.Reference(model, optimizer, MAX_NORM, learning_rates=[3e-3 * (1 - n / 5) for n in range(5)])
    lines = read_metrics(Path(overrides["output_dir"]) / "metrics.jsonl")
    assert all(line["micro_batches"] > 1 for line in lines)
    steps = [[[row] for row in rows[8 * n : 8 * n + 8]] for n in range(5)]
    differences = parity.Differences()
    for line, micro_batches in zip(lines, steps, strict=True):
        expected = reference.step(micro_batches)
        differences.see("loss", parity.relative(line["loss"], expected.loss))
        differences.see("norm", parity.relative(line["grad_norm"], expected.grad_norm))
    differences.see_weights(load_file(result.checkpoint / "model.safetensors"), reference.weights())
    differences.check(parity.FREE_LIMITS, lambda: parity.measure_rounding(reference, steps, locked=False))


def test_bf16_logits_equal_transformers_bit_for_bit(folder: Path) -> None:
    """Rounding happens in the same places, also at positions beyond 256, which bf16 cannot represent."""
    from transformers import AutoModelForCausalLM

    ids = torch.randint(0, TINY_LLAMA["vocab_size"], (1, 400), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16)(ids).logits
        logits = load_model(folder, CPU, torch.bfloat16).module(ids, torch.arange(400)[None])
    assert torch.equal(logits, expected)


class TestProtocol:
    """Planted errors must fail the protocol."""

    STEPS = parity.random_batches(1, TINY_LLAMA["vocab_size"], seed=1)

    def assert_fails(self, reference: parity.Reference, ours: OurSide, step: parity.OurStep | None = None) -> None:
        with pytest.raises(AssertionError, match="exceeds"):
            parity.assert_step_locked(reference, step or ours.step, ours.lock, self.STEPS)

    def test_a_mean_per_micro_batch_fails(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every micro-batch's mean has the same weight, at the right scale of the loss."""
        reference, ours = both_sides(folder, False, parity.FREE_RUNNING)
        token_loss_sum, total = runner.token_loss_sum, make_batch(self.STEPS[0]).loss_tokens

        def mean_of_means(logits: Tensor, labels: Tensor) -> Tensor:
            count = int((labels != -100).sum())
            return token_loss_sum(logits, labels) * (total / 3 / count if count else 1)

        monkeypatch.setattr(runner, "token_loss_sum", mean_of_means)
        self.assert_fails(reference, ours)

    @pytest.mark.parametrize("field", ["loss", "grad_norm", "gradients"])
    def test_a_nan_fails(self, folder: Path, field: str) -> None:
        reference, ours = both_sides(folder, False, parity.FREE_RUNNING)

        def step_with_nan(micro_batches: parity.MicroBatches) -> parity.StepValues:
            values = ours.step(micro_batches)
            if field == "gradients":
                values.gradients["model.norm.weight"][0] = float("nan")
            else:
                setattr(values, field, float("nan"))
            return values

        self.assert_fails(reference, ours, step_with_nan)

    def test_packing_without_document_boundaries_fails(self, folder: Path) -> None:
        reference, ours = both_sides(folder, True, parity.FREE_RUNNING)
        forward = ours.model.module.forward
        ours.model.module.forward = lambda ids, positions, doc_ids: forward(ids, positions, None)  # type: ignore[method-assign]
        self.assert_fails(reference, ours)

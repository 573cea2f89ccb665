"""A tiny Llama trained here and by Transformers with torch.optim: the same losses, gradients and weights.

Run as a script it prints the largest differences seen, one JSON line a shape: `python tests/test_llama_parity.py`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import parity
from sides import MAX_NORM, WEIGHT_DECAY, both_sides
from tiny import TINY_LLAMA, make_llama, write_rows
from torchstone import api
from torchstone.config import load_config
from torchstone.models.execution import Execution
from torchstone.models.opening import load_model
from torchstone.observe.metrics import read_metrics
from torchstone.parallel import running

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama3": {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


@pytest.fixture(params=SHAPES, scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp(request.param), **SHAPES[request.param])


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_every_gradient_equals_transformers_step_locked(folder: Path, packed: bool) -> None:
    step_locked(folder, packed)


def step_locked(folder: Path, packed: bool) -> parity.Worst:
    reference, ours = both_sides(folder, packed, parity.FREE_RUNNING)
    steps = parity.random_batches(5, TINY_LLAMA["vocab_size"], seed=1)
    return parity.assert_step_locked(reference, ours.step, ours.lock, steps)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_weights_and_losses_equal_transformers_free_running(folder: Path, packed: bool) -> None:
    free_running(folder, packed)


def free_running(folder: Path, packed: bool) -> parity.Worst:
    reference, ours = both_sides(folder, packed, parity.FREE_RUNNING)
    steps = parity.random_batches(parity.FREE_RUNNING["steps"], TINY_LLAMA["vocab_size"], seed=2)
    return parity.assert_free_running(reference, ours.step, ours.weights, steps)


def test_fifty_steps_with_the_usual_eps_keep_the_losses(folder: Path) -> None:
    long_running(folder)


def long_running(folder: Path) -> parity.Worst:
    reference, ours = both_sides(folder, True, parity.LONG_RUNNING)
    steps = parity.random_batches(parity.LONG_RUNNING["steps"], TINY_LLAMA["vocab_size"], seed=3)
    return parity.assert_long_running(reference, ours.step, steps)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_a_whole_run_from_a_file_equals_the_plain_loop(
    llama_dir: Path, settings: Callable[..., dict[str, Any]], tmp_path: Path, packing: bool
) -> None:
    """Rows, cache, sampler, packer, accumulation, schedule, checkpoint: everything between a file and the weights."""
    from transformers import AutoModelForCausalLM

    batches = parity.random_batches(6, 440, seed=4)
    # The file has rows, not micro-batches: eight rows are one step, whatever the micro-batches are.
    rows = [sequence for step in batches for micro_batch in step for sequence in micro_batch][:40]
    write_rows(tmp_path / "rows.jsonl", [{"input_ids": i, "labels": x, "len": len(i)} for i, x in rows])
    plan = {"training__max_tokens_per_gpu": 48} if packing else {"training__batch_size": 2}
    overrides = {key: value for key, value in settings().items() if not key.startswith("model.")} | {
        "model.path": str(llama_dir), "data.path": str(tmp_path / "rows.jsonl"), "data.shuffle": False,
        "data.packing": packing, "training.max_steps": 5, "training.global_batch_size": 8,
        "optim.learning_rate": 3e-3, "optim.eps": 1e-4, "optim.schedule": "linear", "optim.max_grad_norm": MAX_NORM,
        "optim.weight_decay": WEIGHT_DECAY,
    } | {key.replace("__", "."): value for key, value in plan.items()}  # fmt: skip
    outcome = api.train(load_config(overrides=overrides))

    model = AutoModelForCausalLM.from_pretrained(str(llama_dir), dtype=torch.float32)
    optimizer = parity.reference_adamw(model, WEIGHT_DECAY, lr=3e-3, betas=(0.9, 0.95), eps=1e-4)
    reference = parity.Reference(model, optimizer, MAX_NORM)
    lines = read_metrics(Path(overrides["output_dir"]) / "metrics.jsonl")
    assert all(line["micro_batches"] > 1 for line in lines)
    for step, line in enumerate(lines):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / 5)
        wanted = reference.step([[row] for row in rows[8 * step : 8 * step + 8]])
        assert parity.relative(line["loss"], wanted.loss) <= parity.FREE_LOSS_LIMIT
        assert parity.relative(line["grad_norm"], wanted.grad_norm) <= parity.FREE_LOSS_LIMIT
    saved = load_file(outcome.checkpoint / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert (saved[name] - parameter).abs().max().item() <= parity.FREE_WEIGHT_LIMIT, name


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_logits_equal_transformers_beyond_the_original_length(folder: Path, backend: str) -> None:
    from transformers import AutoModelForCausalLM

    ids = torch.randint(0, TINY_LLAMA["vocab_size"], (2, 200), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(200).expand(2, 200)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)(ids).logits
        ours = load_model(folder, torch.device("cpu"), execution=Execution(attention=backend)).module(ids, positions)
    assert (theirs - ours).abs().max().item() <= 1e-5


def test_bf16_logits_equal_transformers_in_bf16(folder: Path) -> None:
    """The same roundings in the same places, at positions that bf16 itself could not count."""
    from transformers import AutoModelForCausalLM

    ids = torch.randint(0, TINY_LLAMA["vocab_size"], (1, 400), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(400)[None]
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16)(ids).logits
        ours = load_model(folder, torch.device("cpu"), torch.bfloat16).module(ids, positions)
    assert torch.equal(theirs, ours)


def test_the_protocol_notices_a_mean_per_micro_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The classic fault, planted with the scale of the loss kept: each micro-batch's mean, weighed alike."""
    reference, ours = both_sides(folder, False, parity.FREE_RUNNING)
    honest = running.token_loss_sum
    batches = parity.random_batches(1, TINY_LLAMA["vocab_size"], seed=1)
    total = ours.batch(batches[0]).loss_tokens

    def mean_of_means(logits: Tensor, labels: Tensor) -> Tensor:
        count = int((labels != -100).sum())
        return honest(logits, labels) / count * total / 3 if count else honest(logits, labels)

    monkeypatch.setattr(running, "token_loss_sum", mean_of_means)
    with pytest.raises(AssertionError):
        parity.assert_step_locked(reference, ours.step, ours.lock, batches)


@pytest.mark.parametrize("place", ["loss", "grad_norm", "gradients"])
def test_the_protocol_notices_what_is_not_a_number(folder: Path, place: str) -> None:
    reference, ours = both_sides(folder, False, parity.FREE_RUNNING)

    def broken(batches: parity.MicroBatches) -> parity.StepNumbers:
        numbers = ours.step(batches)
        if place == "gradients":
            numbers.gradients["model.norm.weight"][0] = float("nan")
        else:
            setattr(numbers, place, float("nan"))
        return numbers

    steps = parity.random_batches(1, TINY_LLAMA["vocab_size"], seed=1)
    with pytest.raises(AssertionError):
        parity.assert_step_locked(reference, broken, ours.lock, steps)


def test_the_protocol_notices_packing_without_boundaries(folder: Path) -> None:
    """Documents of a packed row that see each other must not pass."""
    reference, ours = both_sides(folder, True, parity.FREE_RUNNING)
    forward = ours.model.module.forward
    ours.model.module.forward = lambda ids, positions, doc_ids: forward(ids, positions, None)  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        parity.assert_step_locked(
            reference, ours.step, ours.lock, parity.random_batches(1, TINY_LLAMA["vocab_size"], seed=1)
        )


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        for name, changes in SHAPES.items():
            folder = make_llama(Path(place) / name, **changes)
            for packed in (False, True):
                locked, free, long = step_locked(folder, packed), free_running(folder, packed), long_running(folder)
                figures = {
                    "shape": name,
                    "rows": "packed" if packed else "padded",
                    "loss": locked.loss,
                    "norm": locked.norm,
                    "gradient": locked.gradient,
                    "free_loss": free.loss,
                    "free_weight": free.weight,
                    "loss_after_50_steps": long.loss,
                }
                print(json.dumps(figures))


if __name__ == "__main__":
    main()

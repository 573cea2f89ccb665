"""A tiny Llama trained here and by Transformers with torch.optim: the same losses, gradients and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import parity
from tiny import TINY_LLAMA, make_llama
from torchstone.config.schema import OptimConfig
from torchstone.data.collate import collate
from torchstone.data.loader import StepBatch
from torchstone.data.tokenize import Encoded
from torchstone.models.weights import Model, load_model
from torchstone.optim.build import build_optimizer
from torchstone.training import step as training_step

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama3": {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
}
MAX_NORM = 0.5
WEIGHT_DECAY = 0.1


class OurSide:
    """The package's own step, fed with the protocol's micro-batches, packed into one row each or padded."""

    def __init__(self, folder: Path, packed: bool, lr: float, betas: tuple[float, float], eps: float) -> None:
        self.model: Model = load_model(folder, "sdpa", torch.device("cpu"))
        self.packed, self.lr = packed, lr
        optim = OptimConfig(learning_rate=lr, betas=betas, eps=eps, weight_decay=WEIGHT_DECAY)
        self.optimizer = build_optimizer(self.model.decoder.named_parameters(), optim)
        self.gradients: dict[str, Tensor] = {}

    def step(self, micro_batches: parity.MicroBatches) -> parity.StepNumbers:
        module = self.model.decoder
        loss = training_step.backward(module, self.batch(micro_batches), 1, self.packed, torch.device("cpu"))
        gradients = {self.name(n): p.grad.clone() for n, p in module.named_parameters()}
        norm = training_step.gradient_norm(module.parameters())
        training_step.clip_gradients(module.parameters(), norm, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return parity.StepNumbers(loss, norm.item(), gradients)

    def batch(self, micro_batches: parity.MicroBatches) -> StepBatch:
        tensors = []
        for sequences in micro_batches:
            encoded = [Encoded(np.array(ids), np.array(labels)) for ids, labels in sequences]
            tensors.append(collate([encoded] if self.packed else [[one] for one in encoded], pad_id=0))
        count = sum(int((t.labels != -100).sum()) for t in tensors)
        return StepBatch(tensors, samples=0, tokens=0, loss_tokens=count, padding=0, first_sample=0)

    def name(self, ours: str) -> str:
        return self.model.family.theirs(ours)

    def weights(self) -> dict[str, Tensor]:
        return {self.name(n): p.detach() for n, p in self.model.decoder.named_parameters()}

    def lock(self, reference: parity.Reference) -> None:
        theirs = dict(reference.model.named_parameters())
        for name, parameter in self.model.decoder.named_parameters():
            other = theirs[self.name(name)]
            with torch.no_grad():
                parameter.copy_(other)
            state = reference.optimizer.state.get(other, {})
            self.optimizer.state[parameter] = {key: value.clone() for key, value in state.items()}


def both_sides(folder: Path, packed: bool, settings: dict[str, Any]) -> tuple[parity.Reference, OurSide]:
    from transformers import AutoModelForCausalLM

    chosen = {key: settings[key] for key in ("lr", "betas", "eps")}
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    optimizer = parity.reference_adamw(model, WEIGHT_DECAY, **chosen)
    return parity.Reference(model, optimizer, MAX_NORM), OurSide(folder, packed, **chosen)


@pytest.fixture(params=SHAPES, scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp(request.param), **SHAPES[request.param])


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_every_gradient_equals_transformers_step_locked(folder: Path, packed: bool) -> None:
    reference, ours = both_sides(folder, packed, parity.FREE_RUNNING)
    steps = parity.random_batches(5, TINY_LLAMA["vocab_size"], seed=1)
    parity.assert_step_locked(reference, ours.step, ours.lock, steps)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_weights_and_losses_equal_transformers_free_running(folder: Path, packed: bool) -> None:
    reference, ours = both_sides(folder, packed, parity.FREE_RUNNING)
    steps = parity.random_batches(parity.FREE_RUNNING["steps"], TINY_LLAMA["vocab_size"], seed=2)
    parity.assert_free_running(reference, ours.step, ours.weights, steps)


def test_fifty_steps_with_the_usual_eps_keep_the_losses(folder: Path) -> None:
    reference, ours = both_sides(folder, True, parity.LONG_RUNNING)
    steps = parity.random_batches(parity.LONG_RUNNING["steps"], TINY_LLAMA["vocab_size"], seed=3)
    parity.assert_long_running(reference, ours.step, steps)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_logits_equal_transformers_beyond_the_original_length(folder: Path, backend: str) -> None:
    from transformers import AutoModelForCausalLM

    ids = torch.randint(0, TINY_LLAMA["vocab_size"], (2, 200), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(200).expand(2, 200)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)(ids).logits
        ours = load_model(folder, backend, torch.device("cpu")).decoder(ids, positions)
    assert (theirs - ours).abs().max().item() <= 1e-5


def test_the_protocol_notices_a_mean_per_micro_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The classic fault, planted: dividing by each micro-batch's own count must not pass."""
    reference, ours = both_sides(folder, False, parity.FREE_RUNNING)
    honest = training_step.token_loss_sum

    def mean_of_means(logits: Tensor, labels: Tensor) -> Tensor:
        count = max(1, int((labels != -100).sum()))
        return honest(logits, labels) / count * 10

    monkeypatch.setattr(training_step, "token_loss_sum", mean_of_means)
    with pytest.raises(AssertionError):
        parity.assert_step_locked(
            reference, ours.step, ours.lock, parity.random_batches(1, TINY_LLAMA["vocab_size"], seed=1)
        )


def test_the_protocol_notices_packing_without_boundaries(folder: Path) -> None:
    """Documents of a packed row that see each other must not pass."""
    reference, ours = both_sides(folder, True, parity.FREE_RUNNING)
    forward = ours.model.decoder.forward
    ours.model.decoder.forward = lambda ids, positions, doc_ids: forward(ids, positions, None)  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        parity.assert_step_locked(
            reference, ours.step, ours.lock, parity.random_batches(1, TINY_LLAMA["vocab_size"], seed=1)
        )

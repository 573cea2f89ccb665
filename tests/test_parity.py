"""The parity protocol itself: rounding of the reference passes, an error of twice the limit fails."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import parity
from parity import Differences, MicroBatches, Reference, StepValues

VOCABULARY = 16
STEPS = parity.random_batches(3, VOCABULARY, seed=0)
TENSOR = "embed.weight"


class Bigram(nn.Module):
    """Logits from the last token alone. A large `offset` is added and subtracted again, which costs fp32 its digits."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.offset = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), offset

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.embed(input_ids)) + self.offset - self.offset)


def make_side(offset: float) -> Reference:
    model = Bigram(offset)
    settings = {key: parity.FREE_RUNNING[key] for key in ("lr", "betas", "eps")}
    return Reference(model, parity.reference_adamw(model, 0.1, **settings), max_norm=0.5)


def lock_to(ours: Reference) -> Callable[[Reference], None]:
    def lock(reference: Reference) -> None:
        twin = reference.copy()
        ours.model.load_state_dict(twin.model.state_dict())
        ours.optimizer.load_state_dict(twin.optimizer.state_dict())

    return lock


# The reference rounds more than the fixed limits allow with the second offset, and far less with the first.
OFFSETS = pytest.mark.parametrize("offset", [0.0, 30000.0], ids=["accurate", "rounding"])


def effective_limit(reference: Reference, kind: str, name: str, locked: bool) -> float:
    fixed = (parity.LOCKED_LIMITS if locked else parity.FREE_LIMITS)[kind]
    return max(fixed, 3 * parity.measure_rounding(reference, STEPS, locked).largest[kind, name])


def test_rounding_of_the_reference_passes_step_locked() -> None:
    ours = make_side(0.0)
    differences = parity.assert_step_locked(make_side(30000.0), ours.step, lock_to(ours), STEPS)
    assert differences.worst("gradient") > parity.GRADIENT_LIMIT, "the fixed limit would have been enough"


def test_rounding_of_the_reference_passes_free_running() -> None:
    ours = make_side(0.0)
    differences = parity.assert_free_running(make_side(30000.0), ours.step, ours.weights, STEPS)
    assert differences.worst("weight") > parity.FREE_WEIGHT_LIMIT, "the fixed limit would have been enough"


@OFFSETS
@pytest.mark.parametrize("kind", ["loss", "norm", "gradient"])
def test_an_error_of_twice_the_limit_fails_step_locked(kind: str, offset: float) -> None:
    reference, ours = make_side(offset), make_side(offset)
    name = TENSOR if kind == "gradient" else ""
    factor = 1 + 2 * effective_limit(reference, kind, name, locked=True)

    def wrong_step(batches: MicroBatches) -> StepValues:
        values = ours.step(batches)
        values.loss *= factor if kind == "loss" else 1
        values.grad_norm *= factor if kind == "norm" else 1
        values.gradients[TENSOR] *= factor if kind == "gradient" else 1
        return values

    with pytest.raises(AssertionError, match=rf"^{kind} {name}: .* exceeds"):
        parity.assert_step_locked(reference, wrong_step, lock_to(ours), STEPS)


@OFFSETS
@pytest.mark.parametrize("kind", ["loss", "weight"])
def test_an_error_of_twice_the_limit_fails_free_running(kind: str, offset: float) -> None:
    reference, ours = make_side(offset), make_side(offset)
    name = TENSOR if kind == "weight" else ""
    error = 2 * effective_limit(reference, kind, name, locked=False)

    def wrong_step(batches: MicroBatches) -> StepValues:
        values = ours.step(batches)
        values.loss *= 1 + error if kind == "loss" else 1
        return values

    def wrong_weights() -> dict[str, Tensor]:
        weights = ours.weights()
        weights[TENSOR][0, 0] += error if kind == "weight" else 0
        return weights

    with pytest.raises(AssertionError, match=rf"^{kind} {name}: .* exceeds"):
        parity.assert_free_running(reference, wrong_step, wrong_weights, STEPS)


def test_one_tensors_rounding_does_not_excuse_another() -> None:
    rounding, differences = Differences(), Differences()
    rounding.see("gradient", 1e-3, "a")
    differences.see("gradient", 2e-3, "a")
    rounding.see("gradient", 1e-7, "b")
    differences.check(parity.LOCKED_LIMITS, lambda: rounding)
    differences.see("gradient", 2e-3, "b")
    with pytest.raises(AssertionError, match=r"^gradient b: 2.00e-03 exceeds 1.00e-05"):
        differences.check(parity.LOCKED_LIMITS, lambda: rounding)


@pytest.mark.parametrize("difference", [2e-6, float("nan")])
def test_a_reference_without_a_finite_result_excuses_nothing(difference: float) -> None:
    rounding, differences = Differences(), Differences()
    rounding.see("loss", float("nan"))
    differences.see("loss", difference)
    with pytest.raises(AssertionError, match=r"loss : .* exceeds 1.00e-06"):
        differences.check(parity.LOCKED_LIMITS, lambda: rounding)


def test_fp64_is_not_computed_within_the_fixed_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, ours = make_side(0.0), make_side(0.0)
    monkeypatch.setattr(parity, "measure_rounding", None)
    differences = parity.assert_free_running(reference, ours.step, ours.weights, STEPS)
    assert differences.worst("loss") == differences.worst("weight") == 0.0


def test_a_restarted_reference_repeats_its_run_bit_for_bit() -> None:
    reference = make_side(0.0)
    losses = [reference.step(batches).loss for batches in STEPS]
    again = reference.restart()
    assert [again.step(batches).loss for batches in STEPS] == losses
    weights = again.weights()
    assert all(torch.equal(weights[name], weight) for name, weight in reference.weights().items())

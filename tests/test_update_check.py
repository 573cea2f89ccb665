"""`torchstone diagnose --only update`: mistakes in what an optimizer does with right gradients are found and named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tiny import make_llama, write_rows
from torchstone import api
from torchstone.data.tokenize import Tokenizer
from torchstone.demo.corpus import chat_rows
from torchstone.diagnosis.update_check import MAX_NORM
from torchstone.optim import build
from torchstone.optim.adamw import AdamW
from torchstone.testing import launch_procs
from torchstone.training import step

Report = dict[str, Any]
Bug = Callable[[], Any]


@contextmanager
def changed_group(**changes: Callable[[Any], Any]) -> Iterator[None]:
    """The optimizer takes a step with other settings than its groups have."""
    original = AdamW.clip_and_step

    def clip_and_step(self: AdamW, coefficient: Tensor) -> None:
        before = [{key: group[key] for key in changes} for group in self.param_groups]
        for group in self.param_groups:
            group.update({key: change(group[key]) for key, change in changes.items()})
        original(self, coefficient)
        for group, values in zip(self.param_groups, before, strict=True):
            group.update(values)

    with patch.object(AdamW, "clip_and_step", clip_and_step):
        yield


@contextmanager
def coupled_decay() -> Iterator[None]:
    original = AdamW.step

    def with_decay(self: AdamW, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach(), alpha=group["weight_decay"])
        with changed_group_of(self, "weight_decay", 0.0):
            original(self)

    with patch.object(AdamW, "step", with_decay):
        yield


@contextmanager
def changed_group_of(optimizer: AdamW, key: str, value: Any) -> Iterator[None]:
    before = [group[key] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group[key] = value
    yield
    for group, each in zip(optimizer.param_groups, before, strict=True):
        group[key] = each


def clipped_apart(clip: Callable[[Tensor], Tensor]) -> Any:
    """Every gradient by itself."""
    original = AdamW.clip_and_step

    def clip_and_step(self: AdamW, coefficient: Tensor) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = clip(parameter.grad)
        original(self, torch.ones_like(coefficient))

    return patch.object(AdamW, "clip_and_step", clip_and_step)


@contextmanager
def no_bias_correction() -> Iterator[None]:
    def without(self: AdamW, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
                state["exp_avg"].lerp_(p.grad, 1 - group["betas"][0])
                state["exp_avg_sq"].lerp_(p.grad.square(), 1 - group["betas"][1])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"]))

    with patch.object(AdamW, "step", torch.no_grad()(without)):
        yield


@contextmanager
def tensors_that_are_not_in_the_optimizer() -> Iterator[None]:
    def without_last(*args: Any) -> list[dict[str, Any]]:
        groups = original(*args)
        return [group | {"params": group["params"][:-1]} for group in groups]

    original = build._decay_groups
    with patch.object(build, "_decay_groups", without_last):
        yield


def clipped_by(coefficient: Callable[[Tensor, float], Tensor]) -> Any:
    return patch.object(step, "clip_coefficient", coefficient)


BUGS: dict[str, tuple[Bug, str]] = {
    "no clipping": (lambda: clipped_by(lambda squared, _: torch.ones_like(squared)), "gradients are not clipped"),
    "squared norm": (lambda: clipped_by(lambda squared, norm: norm / squared), "by the square of their norm"),
    "half the norm": (lambda: clipped_by(lambda squared, norm: norm / 2 / squared.sqrt()), "no known mistake"),
    "betas": (lambda: changed_group(betas=lambda betas: betas[::-1]), "the betas are swapped"),
    "eps": (lambda: changed_group(eps=lambda eps: 3 * eps), "no known mistake"),
    "learning rate": (lambda: changed_group(lr=lambda rate: 3 * rate), "3 times what they should be"),
    "decay twice": (lambda: changed_group(weight_decay=lambda decay: 2 * decay), "weight decay is applied twice"),
    "no decay": (lambda: changed_group(weight_decay=lambda decay: 0.0), "weights do not decay"),
    "coupled decay": (coupled_decay, "weight decay is added to the gradient"),
    "bias correction": (no_bias_correction, "the moments are not corrected for their bias"),
    "each tensor is clipped by itself": (
        lambda: clipped_apart(lambda grad: grad * (MAX_NORM / grad.norm()).clamp(max=1.0)),
        "each tensor is clipped by its own norm",
    ),
    "by value": (
        lambda: clipped_apart(lambda grad: grad.clamp(-MAX_NORM, MAX_NORM)),
        "are clipped by value, not by norm",
    ),
    "uphill": (lambda: changed_group(lr=lambda rate: -rate), "updates go uphill"),
    "not zeroed": (lambda: patch.object(AdamW, "zero_grad", lambda *_, **__: None), "they are never zeroed"),
    "forgotten": (tensors_that_are_not_in_the_optimizer, "does not move at all: the optimizer does not have it"),
}


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("update")
    return {
        "model.path": str(make_llama(root / "llama", tokenizer)), "data.context_length": 64,
        "data.path": str(write_rows(root / "chat.jsonl", chat_rows(60))), "data.cache_dir": str(root / "datasets"),
        "training.max_steps": 40, "training.global_batch_size": 8, "optim.learning_rate": 1e-3,
        "optim.weight_decay": 0.1, "system.device": "cpu", "observe.console": "quiet", "output_dir": str(root / "run"),
    }  # fmt: skip


def check_update(values: dict[str, Any], bug: Bug = nullcontext) -> Report:
    with bug():
        (check,) = api.diagnose(overrides=values, only=["update"])["checks"]
        return check


@pytest.mark.parametrize("name", BUGS)
def test_a_wrong_update_is_found_and_named(name: str, values: dict[str, Any]) -> None:
    bug, cause = BUGS[name]
    check = check_update(values, bug)
    assert check["status"] == "fail"
    assert cause in check["cause"]


@pytest.mark.parametrize(
    "changes",
    [
        {"training.precision": "bf16"},
        {"training.precision": "bf16-pure"},
        {"tuning.method": "lora", "tuning.lora_plus_ratio": 16.0, "tuning.lora_dropout": 0.1},
        {"tuning.method": "osft"},
        {"tuning.method": "osft", "tuning.osft_train_rest": True},
        {"optim.name": "muon"},
        {"optim.max_grad_norm": 0.0, "optim.eps": 1e-5, "optim.betas": [0.8, 0.99]},
    ],
)
def test_a_right_update_passes(changes: dict[str, Any], values: dict[str, Any]) -> None:
    check = check_update(values | changes)
    assert check["status"] == "pass", check["cause"]
    assert check["values"]["tensors"] > 0


def test_on_two_ranks(values: dict[str, Any]) -> None:
    for layout in ("parallel.dp_shard", "parallel.tp"):
        for check in launch_procs(check_update, 2, values | {layout: 2}, backend=None):
            assert check["status"] == "pass", check["cause"]

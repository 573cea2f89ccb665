"""How Torchstone is compared with Transformers and torch.optim, and the limits.

Adam turns rounding noise on near-zero gradients into full-size steps, so "weights equal after N steps" says little by
itself. There are two forms:

- step-locked: before each step both sides get the reference's weights and moments. Loss, gradient norm and every
  gradient of that one step are compared;
- free-running: both sides train on their own from the same start, with an eps that keeps Adam from amplifying noise.

The reference is plain torch: Transformers' model, one padded batch per micro-batch, the loss as a sum over the global
count, `clip_grad_norm_`, `torch.optim.AdamW`. It uses nothing of the package.

Rounding differs between CPUs, so a fixed limit alone cannot tell our errors from rounding. A quantity (the loss, the
norm, one gradient, one weight) that exceeds its fixed limit may still differ by `ROUNDING_FACTOR` times the reference's
own rounding, which is the distance of its fp32 result from its fp64 result. See `measure_rounding`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOGITS_LIMIT = 1e-5
LOSS_LIMIT = 1e-6
NORM_LIMIT = 1e-6
GRADIENT_LIMIT = 1e-5
ZERO_LIMIT = 1e-8
FREE_LOSS_LIMIT = 2e-6
FREE_WEIGHT_LIMIT = 5e-6
# Muon orthogonalizes in bf16: a gradient that differs in its last bit may move a weight by a few percent of its update,
# which is up to 2e-3 here. Orthogonalizing shards or fused matrices moves weights by half of it.
MUON_WEIGHT_LIMIT = 2e-4
# Soft caps differ more than the rest, between Transformers' own backends too.
CAPPED_LOSS_LIMIT = 2e-5
CAPPED_WEIGHT_LIMIT = 1e-4
LONG_LOSS_LIMIT = 1e-5
ROUNDING_FACTOR = 3

# Fixed limits by the kind of quantity.
Limits = dict[str, float]
LOCKED_LIMITS: Limits = {
    "logits": LOGITS_LIMIT, "loss": LOSS_LIMIT, "norm": NORM_LIMIT, "gradient": GRADIENT_LIMIT,
    "zero gradient": ZERO_LIMIT, "weight": FREE_WEIGHT_LIMIT,
}  # fmt: skip
FREE_LIMITS: Limits = {"loss": FREE_LOSS_LIMIT, "norm": FREE_LOSS_LIMIT, "weight": FREE_WEIGHT_LIMIT}
CAPPED_LIMITS: Limits = {"loss": CAPPED_LOSS_LIMIT, "norm": CAPPED_LOSS_LIMIT, "weight": CAPPED_WEIGHT_LIMIT}
LONG_LIMITS: Limits = {"loss": LONG_LOSS_LIMIT}

FREE_RUNNING = {"steps": 5, "lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-4}
LONG_RUNNING = {"steps": 50, "lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8}

# A sequence: its ids and its labels in Transformers' convention.
Sample = tuple[list[int], list[int]]
MicroBatches = list[list[Sample]]


@dataclass
class StepValues:
    """Loss, norm before clipping, and the clipped gradients by Transformers' names."""

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]


# One optimizer step of the side under test.
OurStep = Callable[[MicroBatches], StepValues]


def random_batches(
    count: int, vocabulary: int, seed: int, accumulation: int = 4, longest: int = 24
) -> list[MicroBatches]:
    """Steps of `accumulation` micro-batches with uneven sizes, lengths and loss tokens; one micro-batch has none."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(count):
        micro_batches = []
        for number in range(accumulation):
            sequences = []
            for _ in range(int(rng.integers(1, 4))):
                ids = rng.integers(0, vocabulary, int(rng.integers(2, longest))).tolist()
                keep = rng.random(len(ids)) < (0.0 if number == 2 else rng.uniform(0.2, 1.0))
                sequences.append((ids, [i if k else -100 for i, k in zip(ids, keep, strict=True)]))
            micro_batches.append(sequences)
        steps.append(micro_batches)
    return steps


class Reference:
    """Transformers and torch.optim in a plain loop."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | ReferenceMuon,
        max_norm: float,
        one_by_one: bool = False,
        learning_rates: Sequence[float] = (),
    ) -> None:
        """`one_by_one` makes every sequence a batch of its own, for models in which a row depends on the length of its
        neighbors. `learning_rates` are those of the steps, where they are not the optimizer's."""
        self.model, self.optimizer, self.max_norm = model, optimizer, max_norm
        self.one_by_one, self.learning_rates, self.steps_done = one_by_one, learning_rates, 0
        self.initial_weights = self.weights()

    def step(self, micro_batches: MicroBatches) -> StepValues:
        if self.one_by_one:
            micro_batches = [[sequence] for batch in micro_batches for sequence in batch]
        if self.learning_rates:
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rates[self.steps_done]
        count = sum(label != -100 for batch in micro_batches for _, labels in batch for label in labels[1:])
        self.optimizer.zero_grad()
        total = 0.0
        for sequences in micro_batches:
            longest = max(len(ids) for ids, _ in sequences)
            ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in sequences])
            labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in sequences])
            mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in sequences])
            logits = self.model(input_ids=ids, attention_mask=mask).logits
            losses = F.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="none"
            )
            loss = losses.sum() / count
            loss.backward()
            total += loss.item()
        self.before_clipping()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer.step()
        self.after_update()
        self.steps_done += 1
        return StepValues(total, norm.item(), gradients)

    def before_clipping(self) -> None:
        """For a reference that changes gradients."""

    def after_update(self) -> None:
        """For a reference that changes weights."""

    def weights(self) -> dict[str, Tensor]:
        """Those that are trained."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad}

    def copy(self, dtype: torch.dtype = torch.float32, one_by_one: bool = False) -> Reference:
        """The same weights and moments, in `dtype`."""
        twin = copy.deepcopy(self)
        _cast(twin.model, dtype)
        for state in twin.optimizer.state.values():
            state.update({key: value.to(dtype) for key, value in state.items() if value.dim()})
        twin.one_by_one = self.one_by_one or one_by_one
        return twin

    def restart(self) -> Reference:
        """A copy with the weights of the start and no moments."""
        twin = self.copy()
        twin.optimizer.state.clear()
        twin.steps_done = 0
        with torch.no_grad():
            parameters = dict(twin.model.named_parameters())
            for name, weight in self.initial_weights.items():
                parameters[name].copy_(weight)
        return twin


def fp64_copy(model: nn.Module) -> nn.Module:
    return _cast(copy.deepcopy(model), torch.float64)


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        # torch's grouped matrix product has no fp64.
        model.set_experts_implementation("eager")
    return model.to(dtype)


def load_transformers(folder: Path, attention: str = "eager", dtype: torch.dtype = torch.float32) -> nn.Module:
    """Transformers' model. Its eager kernel is the only one that computes every family, soft caps included."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, attn_implementation=attention).eval()
    reset_dynamic_rope(model)
    return model


def reset_dynamic_rope(model: nn.Module) -> None:
    """Transformers' dynamic RoPE depends on the longest row it has seen; this makes every batch the first."""

    def reset(module: nn.Module, _: Any) -> None:
        # A hook of the module, so that it holds for copies of the model too.
        module.max_seq_len_cached = module.original_max_seq_len
        module.inv_freq = module.original_inv_freq

    rotary = getattr(getattr(model, "model", None), "rotary_emb", None)
    if getattr(rotary, "rope_type", None) == "dynamic":
        rotary.register_forward_pre_hook(reset)


def reference_adamw(model: nn.Module, weight_decay: float, **settings: Any) -> torch.optim.AdamW:
    """AdamW without weight decay for embeddings and for parameters of one dimension, as the package has it."""
    embeddings = ("embed_tokens", "transformer.wte", "transformer.wpe")
    undecayed = [p for n, p in model.named_parameters() if p.dim() == 1 or any(word in n for word in embeddings)]
    decayed = [p for p in model.parameters() if all(p is not other for other in undecayed)]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **settings)


class ReferenceMuon:
    """torch.optim.Muon for the matrices of the blocks, `reference_adamw` for the rest."""

    def __init__(self, model: nn.Module, weight_decay: float, lr: float, **settings: Any) -> None:
        matrices = [p for n, p in model.named_parameters() if ".layers." in n and p.dim() == 2]
        self.muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self.adamw = reference_adamw(model, weight_decay, lr=lr, **settings)
        for group in self.adamw.param_groups:
            group["params"] = [p for p in group["params"] if all(p is not matrix for matrix in matrices)]
        self.state = self.adamw.state = self.muon.state
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()

    def zero_grad(self) -> None:
        self.muon.zero_grad()
        self.adamw.zero_grad()


class Differences:
    """The largest difference of each quantity over the steps.

    A quantity is a kind (`loss`, `norm`, `gradient`, ...) and, for a tensor, its name.
    """

    def __init__(self) -> None:
        self.largest: dict[tuple[str, str], float] = {}

    def see(self, kind: str, difference: float, name: str = "") -> None:
        """A difference that is not finite counts as infinite."""
        difference = difference if math.isfinite(difference) else math.inf
        self.largest[kind, name] = max(self.largest.get((kind, name), 0.0), difference)

    def see_step(self, ours: StepValues, expected: StepValues, zeros: Collection[str] = ()) -> None:
        """Gradients named in `zeros` are zero by mathematics. They hold rounding only, on both sides, and must be next
        to nothing beside the norm of all gradients."""
        self.see("loss", relative(ours.loss, expected.loss))
        self.see("norm", relative(ours.grad_norm, expected.grad_norm))
        assert ours.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            if name in zeros:
                largest = max(ours.gradients[name].norm().item(), gradient.norm().item())
                self.see("zero gradient", largest / expected.grad_norm, name)
            else:
                self.see("gradient", distance(ours.gradients[name], gradient), name)

    def see_weights(self, ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        assert ours.keys() >= expected.keys()
        for name, weight in expected.items():
            self.see("weight", (ours[name] - weight).abs().max().item(), name)

    def worst(self, kind: str) -> float:
        return max((value for (each, _), value in self.largest.items() if each == kind), default=0.0)

    def check(self, limits: Limits, rounding: Callable[[], Differences], label: str = "") -> None:
        """Fails if a quantity exceeds both its fixed limit and `ROUNDING_FACTOR` times the reference's own rounding.

        `rounding` is called only if a fixed limit is exceeded: the verdict is the same, and it costs several runs.
        """
        if all(value <= limits[kind] for (kind, _), value in self.largest.items()):
            return
        own, failures = rounding(), []
        for (kind, name), value in self.largest.items():
            own_value = own.largest[kind, name]
            limit = max(limits[kind], ROUNDING_FACTOR * own_value if math.isfinite(own_value) else 0.0)
            if value > limit:
                failures.append(
                    f"{kind} {name}: {value:.2e} exceeds {limit:.2e}, the larger of {limits[kind]:.0e} "
                    f"and {ROUNDING_FACTOR} x the reference's own rounding {own_value:.2e}"
                )
        assert not failures, "\n".join(filter(None, (label, *failures)))


def measure_rounding(
    reference: Reference,
    steps: list[MicroBatches],
    locked: bool,
    zeros: Collection[str] = (),
    rename: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> Differences:
    """The largest distance, by quantity, of the reference's fp32 results from its fp64 results over the steps.

    With `locked`, every fp64 step starts from the fp32 weights and moments before that step; otherwise it is a run of
    its own from the same start. One fp32 result is one draw of the rounding noise, and a lucky draw would make the
    limit too small. So there are two: the batches as the reference runs them, and one sequence at a time, which is the
    same sum in another order. For OLMo 2 with biases, 30 seeds on each of three CPU instruction sets, our difference
    was at most 2.1 times this measure, and up to 3.3 times the distance of the first result alone.

    Some Transformers modules cast to float32 inside (RMSNorm, rotary embeddings, softmax), so their "fp64" is partly
    fp32. It matters little: the distance is within a tenth of that to a model whose casts were patched away. The fp64
    side takes one sequence at a time, because a mask's fp64 minimum is -inf in such a softmax and a row of padding NaN.

    `rename` turns tensors by Hugging Face name into those that are compared.
    """
    largest, plain = Differences(), reference.restart()
    for number, batches in enumerate(steps):
        if locked or number == 0:
            exact, reordered = plain.copy(torch.float64, one_by_one=True), plain.copy(one_by_one=True)
        expected = exact.step(batches)
        expected.gradients = rename(expected.gradients)
        for side in (plain, reordered):
            values = side.step(batches)
            values.gradients = rename(values.gradients)
            largest.see_step(values, expected, zeros)
            if locked or number == len(steps) - 1:
                largest.see_weights(rename(side.weights()), rename(exact.weights()))
    return largest


def assert_step_locked(
    reference: Reference,
    ours: OurStep,
    lock: Callable[[Reference], None],
    steps: list[MicroBatches],
    zeros: Collection[str] = (),
) -> Differences:
    """`lock` gives our side the reference's weights and moments. `zeros`: see `Differences.see_step`."""
    differences = Differences()
    for batches in steps:
        lock(reference)
        differences.see_step(ours(copy.deepcopy(batches)), reference.step(batches), zeros)
    differences.check(LOCKED_LIMITS, lambda: measure_rounding(reference, steps, True, zeros))
    return differences


def assert_free_running(
    reference: Reference,
    ours: OurStep,
    our_weights: Callable[[], dict[str, Tensor]],
    steps: list[MicroBatches],
    limits: Limits = FREE_LIMITS,
) -> Differences:
    differences = _compare_losses(reference, ours, steps)
    differences.see_weights(our_weights(), reference.weights())
    differences.check(limits, lambda: measure_rounding(reference, steps, False))
    return differences


def assert_long_running(reference: Reference, ours: OurStep, steps: list[MicroBatches]) -> Differences:
    differences = _compare_losses(reference, ours, steps)
    differences.check(LONG_LIMITS, lambda: measure_rounding(reference, steps, False))
    return differences


def _compare_losses(reference: Reference, ours: OurStep, steps: list[MicroBatches]) -> Differences:
    differences = Differences()
    for batches in steps:
        loss = ours(copy.deepcopy(batches)).loss
        differences.see("loss", relative(loss, reference.step(batches).loss))
    return differences


@torch.no_grad()
def assert_same_logits(ours: Tensor, model: nn.Module, ids: Tensor) -> float:
    """The largest difference from the logits of the Transformers model, within the limit."""
    expected = model(ids).logits
    differences = Differences()
    differences.see("logits", (ours - expected).abs().max().item())
    differences.check(LOCKED_LIMITS, lambda: logits_rounding(model, ids))
    return differences.worst("logits")


@torch.no_grad()
def logits_rounding(model: nn.Module, ids: Tensor) -> Differences:
    """As `measure_rounding`, for the logits of one batch."""
    largest, fp64_model = Differences(), fp64_copy(model)
    exact, reordered = (torch.cat([each(row[None]).logits for row in ids]) for each in (fp64_model, model))
    for logits in (model(ids).logits, reordered):
        largest.see("logits", (logits - exact).abs().max().item())
    return largest


def relative(ours: float, expected: float) -> float:
    return abs(ours - expected) / abs(expected) if expected != 0 else abs(ours)


def distance(ours: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm; an expected zero tensor must be met exactly."""
    difference, norm = (ours - expected).norm().item(), expected.norm().item()
    return difference / norm if norm != 0 else (math.inf if difference != 0 else 0.0)

"""Does the optimizer update what it should, in the dtypes that were promised, by the learning rate of the schedule?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchstone.config.schema import OptimConfig
from torchstone.diagnosis.check import Finding, SkipCheck
from torchstone.diagnosis.kernel_checks import blocks
from torchstone.diagnosis.restore import randomized_adapters, restore_after
from torchstone.diagnosis.session import Diagnosis, end_after
from torchstone.models.model import FallbackModel
from torchstone.models.tensors import dtype_name
from torchstone.optim.clip import to_local
from torchstone.optim.schedule import lr_at_step
from torchstone.training.loop import train_loop
from torchstone.training.run import Callback, Run
from torchstone.training.step import compute_gradients

STATES = ("parameter", "gradient", "moment")
# What training.precision promises for them, and for the computation.
STATE_DTYPES = {
    "fp32": torch.float32, "bf16": torch.float32, "fp8": torch.float32, "bf16-pure": torch.bfloat16,
    "fp8-pure": torch.bfloat16,
}  # fmt: skip
COMPUTE_DTYPES = dict.fromkeys(STATE_DTYPES, torch.bfloat16) | {"fp32": torch.float32}
# Below it even fp32 rounds updates away.
MIN_LEARNING_RATE = 1e-6
# The learning rate of a step that changes weights in bf16, too.
LEARNING_RATE = 1e-2
# The share of a weight that one step of the weight-decay check takes.
DECAY, DECAY_LIMIT = 0.5, 0.02
SCHEDULE_LIMIT = 1e-6
# Steps that are really trained at each point of the schedule.
SCHEDULE_STEPS, ENDLESS_STEPS = 2, 40
MAX_ASKED = 10_000
# Shares of the weights with a gradient that do not change: a warning above the first, a failure above the second.
SWALLOWED_LIMITS, MOST_SWALLOWED = {torch.float32: 0.01, torch.bfloat16: 0.5}, 0.99


def check_dtypes(diagnosis: Diagnosis) -> Finding:
    precision = diagnosis.config.training.precision
    promised = {"computation": COMPUTE_DTYPES[precision]} | dict.fromkeys(STATES, STATE_DTYPES[precision])
    dtypes, stale = _inspect_step(diagnosis)
    allowed = {kind: {dtype} for kind, dtype in promised.items()}
    # A gradient may have more bits than its parameter. In one process on CUDA that of a single micro-batch has fewer:
    # nothing is added to it.
    allowed["gradient"].add(torch.float32)
    if diagnosis.ctx.mesh is None and diagnosis.contents.micro_steps == 1:
        allowed["gradient"].add(promised["computation"])
    wrong = {
        kind: {name: dtype for name, dtype in own.items() if dtype not in allowed[kind]} for kind, own in dtypes.items()
    }
    values = {f"wrong_{kind}s": float(len(names)) for kind, names in wrong.items()} | {"stale": float(len(stale))}
    limit = f"{dtype_name(promised[STATES[0]])}, computed in {dtype_name(promised['computation'])}"
    if stale:
        return Finding(
            "fail", f"after an update {len(stale)} weights are computed with as they were before it", limit,
            f"the {dtype_name(promised['computation'])} copy of {stale[0]} is not refreshed from its master weight",
            "models/master_weights.py, optim/adamw.py: update_copies", "refresh all copies after each update", values,
        )  # fmt: skip
    if not any(wrong.values()):
        counts = ", ".join(f"{len(dtypes[kind])} {kind}s" for kind in STATES)
        return Finding("pass", f"{counts}, as training.precision {precision} promises", limit, values=values)
    kind = next(kind for kind, names in wrong.items() if names)
    name, dtype = next(iter(wrong[kind].items()))
    texts = [f"{len(names)} of {len(dtypes[each])} {each}s" for each, names in wrong.items() if names]
    return Finding(
        "fail", f"{', '.join(texts)} have another dtype than training.precision {precision} promises", limit,
        f"the {kind} of {name} is in {dtype_name(dtype)} instead of {dtype_name(promised[kind])}",
        "training.precision; parallel/fsdp.py: PARAM_DTYPE and mixed_precision_policy, optim/adamw.py",
        f"find where {name} becomes {dtype_name(dtype)}", values,
    )  # fmt: skip


def _inspect_step(diagnosis: Diagnosis) -> tuple[dict[str, dict[str, torch.dtype]], list[str]]:
    """Dtypes by kind and name, of this rank: what blocks return, parameters, gradients, and moments after an update;
    and the master weights whose copies are then other values."""
    run, outputs = diagnosis.run, dict[str, torch.dtype]()
    modules = {f"layers.{block.attention.layer_idx}": block for block in blocks(run)}
    if isinstance(run.model, FallbackModel):
        modules = {"the embedding": run.model.module.hf.get_input_embeddings()}
    with ExitStack() as stack:
        for name, module in modules.items():
            hook = module.register_forward_hook(lambda _, __, output, name=name: outputs.update({name: output.dtype}))
            stack.callback(hook.remove)
        stack.enter_context(restore_after(run))
        run.model.train()
        run.optimizer.reset_state()
        result = compute_gradients(run.runner, diagnosis.batch(run), 1)
        parameters = dict(run.model.trained_parameters())
        gradients = {name: p.grad.dtype for name, p in parameters.items() if p.grad is not None}
        for group in run.optimizer.param_groups:
            group["lr"] = LEARNING_RATE
        run.optimizer.clip_and_step(torch.ones_like(result.sums[1]))
        copies = {} if run.model.master_weights is None else run.model.master_weights.copies
        stale = [n for n, p in parameters.items() if p in copies and not torch.equal(p.to(copies[p].dtype), copies[p])]
        states = [
            {name: parameter.dtype for name, parameter in parameters.items()},
            gradients,
            {name: tensor.dtype for name, tensor in _moments(run)},
        ]
    return {"computation": outputs} | dict(zip(STATES, states, strict=True)), stale


def _moments(run: Run) -> Iterator[tuple[str, Tensor]]:
    """What the optimizer keeps of the size of a parameter."""
    for name, parameter in run.model.trained_parameters():
        for key, value in run.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.dim() == parameter.dim() > 0:
                yield f"{name} ({key})", value


def check_weight_decay(diagnosis: Diagnosis) -> Finding:
    """A step with zero gradients changes what decays, and nothing else."""
    run, optim = diagnosis.run, diagnosis.config.optim
    if optim.weight_decay == 0:
        decaying = sum(group["weight_decay"] != 0 for group in run.optimizer.param_groups)
        text = f"{decaying} groups of parameters have another weight decay than 0"
        if not decaying:
            return Finding("pass", text, "0", values={"groups": 0.0})
        return Finding("fail", text, "0", "weights decay, and should not", "optim/build.py", "see optim.weight_decay")
    kinds, kept = parameter_kinds(run), _decay_once(run, optim)
    expected = {name: 1.0 if kinds[name] in optim.no_decay else 1 - DECAY for name in kept}
    decays = {name: ratio < 1 - DECAY / 2 for name, ratio in kept.items()}
    own = {name: kinds[name] for name, ratio in kept.items() if abs(ratio - expected[name]) > DECAY_LIMIT}
    wrong = {name: kind for ranks in run.ctx.all_gather_object(own) for name, kind in ranks.items()}
    values = {"tensors": float(len(kept)), "decaying": float(sum(decays.values())), "wrong": float(len(wrong))}
    limit = f"all but {', '.join(optim.no_decay) or 'none'}"
    if not wrong:
        return Finding("pass", f"{sum(decays.values())} of {len(kept)} tensors decay", limit, values=values)
    name, kind = next(iter(wrong.items()))
    verb = "do not decay, and should" if kind not in optim.no_decay else "decay, and should not"
    same_kind = sum(other == kind for other in wrong.values())
    return Finding(
        "fail", f"{len(wrong)} of {len(kept)} tensors decay and should not, or the reverse", limit,
        f"{same_kind} tensors of the kind {kind}, such as {name}, {verb}",
        "optim.no_decay; optim/build.py: parameter_kind", "compare the kinds of parameters with optim.no_decay", values,
    )  # fmt: skip


@torch.no_grad()
def _decay_once(run: Run, optim: OptimConfig) -> dict[str, float]:
    """What is left of the norm of every tensor after a step without gradients; tensors of zeros are left out."""
    with restore_after(run):
        run.optimizer.reset_state()
        parameters = dict(run.model.trained_parameters())
        before = {name: to_local(parameter).double().norm().item() for name, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        for group in run.optimizer.param_groups:
            group["lr"] = DECAY / optim.weight_decay
        run.optimizer.clip_and_step(torch.ones((), dtype=torch.float64, device=run.device))
        return {
            name: to_local(parameter).double().norm().item() / before[name]
            for name, parameter in parameters.items()
            if before[name] > 0
        }


def parameter_kinds(run: Run) -> dict[str, str]:
    """norm, bias, embed, head or matrix, by what the modules are."""
    kinds: dict[str, str] = {}
    for part in run.model.model_parts:
        for module_name, module in part.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                full = f"{module_name}.{name}".lstrip(".")
                if name == "bias" or name.endswith("_bias"):
                    kind = "bias"
                elif parameter.dim() == 1:
                    kind = "norm"
                else:
                    kind = "embed" if isinstance(module, nn.Embedding) else "matrix"
                kinds.setdefault(full, kind)
    head = next((name for name in kinds if name.endswith(("head.weight", "embed_out.weight"))), None)
    tied = run.model.decoder_config is not None and run.model.decoder_config.tied
    return kinds if head is None else kinds | {head: "embed" if tied else "head"}


def check_schedule(diagnosis: Diagnosis) -> Finding:
    """Trains steps at several points of the schedule, and compares the optimizer's learning rates with the formula."""
    run, optim, total = diagnosis.run, diagnosis.config.optim, diagnosis.run.schedule.total_steps
    # Its steps have several micro-steps.
    data = replace(diagnosis.step.data, validation={})
    size = data.batch_sizes.global_batch_size
    end = total or ENDLESS_STEPS
    points = {0, warmup_steps(optim, total), end // 2, end - SCHEDULE_STEPS}
    seen, micro_steps = list[tuple[int, float]](), 1
    for point in sorted(point for point in points if 0 <= point < end):
        recorder = RateRecorder(point + SCHEDULE_STEPS)
        with diagnosis.trial(run, data, end_after(total)) as trial:
            if total is None:
                trial.schedule = run.schedule
            trial.progress.step, trial.progress.samples = point, point * size
            train_loop(trial, [recorder])
        seen += recorder.rates
        micro_steps = max(micro_steps, recorder.micro_steps)
    trained = len({step for step, _ in seen})
    # The others are only asked for.
    others = np.unique(np.linspace(0, end - 1, MAX_ASKED, dtype=np.int64)).tolist()
    seen += [(step, lr_at_step(step, total, optim)) for step in others]
    expected = {step: learning_rate(optim, step, total) for step, _ in seen}
    wrong = {step: rate for step, rate in seen if abs(rate - expected[step]) > SCHEDULE_LIMIT * optim.learning_rate}
    steps = f"{len(expected)} steps of {total or 'an endless run'}"
    text = f"{steps} have the learning rates of {optim.schedule}, {trained} of them in the training loop"
    values = {"steps": float(len(expected)), "wrong": float(len(wrong)), "micro_steps": float(micro_steps)}
    if not wrong:
        return Finding("pass", text, f"{SCHEDULE_LIMIT:g}", values=values)
    step, rate = next(iter(wrong.items()))
    text = f"step {step + 1} has learning rate {rate:.3e}, by the formula {expected[step]:.3e}"
    return Finding(
        "fail", text, f"{SCHEDULE_LIMIT:g}", _why_rate(optim, total, wrong, micro_steps),
        "optim.schedule; training/loop.py: _start_step, optim/schedule.py",
        "advance the schedule once for each optimizer step", values,
    )  # fmt: skip


def _why_rate(optim: OptimConfig, total: int | None, wrong: dict[int, float], micro_steps: int) -> str:
    def agrees(step_of: Any) -> bool:
        return all(
            abs(rate - learning_rate(optim, step_of(step), total)) <= SCHEDULE_LIMIT * optim.learning_rate
            for step, rate in wrong.items()
        )

    if any(agrees(lambda step, k=k: step * micro_steps + k) for k in range(micro_steps)):
        return f"the schedule advances with every micro-step: {micro_steps} times for each step"
    for shift in (1, -1):
        if agrees(lambda step, shift=shift: step + shift):
            return f"the schedule is one step {'ahead' if shift > 0 else 'behind'}"
    if all(abs(rate - optim.learning_rate) <= SCHEDULE_LIMIT * optim.learning_rate for rate in wrong.values()):
        return "the learning rate is always the peak: the schedule is not used"
    return "the learning rates are those of another schedule"


def warmup_steps(optim: OptimConfig, total: int | None) -> int:
    return optim.warmup_steps or math.ceil(optim.warmup_ratio * (total or 0))


def learning_rate(optim: OptimConfig, step: int, total: int | None) -> float:
    """The formula of docs/training.md, written out: the learning rate of a step, counted from 0."""
    peak, lowest, warmup = optim.learning_rate, optim.learning_rate * optim.min_lr_ratio, warmup_steps(optim, total)
    if step < warmup:
        return peak * (step + 1) / warmup
    if optim.schedule == "constant" or total is None:
        return peak
    decay_starts = warmup
    if optim.schedule == "wsd":
        decay_starts = max(warmup, total - (optim.decay_steps or max(1, total // 5)))
    done = min(1.0, max(0.0, (step - decay_starts) / max(1, total - decay_starts)))
    left = 1.0 - done if optim.schedule != "cosine" else (1.0 + math.cos(math.pi * done)) / 2.0
    return lowest + (peak - lowest) * left


class RateRecorder(Callback):
    """The learning rates of the optimizer's groups in every step, without the groups' own factors."""

    def __init__(self, last_step: int) -> None:
        self.last_step, self.rates, self.micro_steps = last_step, list[tuple[int, float]](), 1

    def on_step(self, run: Run, metrics: dict[str, Any]) -> None:
        for group in run.optimizer.param_groups:
            if group["params"]:
                self.rates.append((metrics["step"] - 1, group["lr"] / group.get("lr_scale", 1.0)))
        self.micro_steps = max(self.micro_steps, metrics["micro_batches"])
        if metrics["step"] >= self.last_step:
            run.stop("enough")


def check_swallowed_updates(diagnosis: Diagnosis) -> Finding:
    """A step at the peak learning rate: which weights with a gradient did not change?"""
    run, optim = diagnosis.run, diagnosis.config.optim
    if optim.learning_rate == 0:
        raise SkipCheck("optim.learning_rate is 0")
    counts = torch.zeros(2, dtype=torch.float64)
    with randomized_adapters(run):
        run.model.train(False)
        run.optimizer.reset_state()
        result = compute_gradients(run.runner, diagnosis.batch(run), 1)
        with_gradient = [parameter for _, parameter in run.model.trained_parameters() if parameter.grad is not None]
        before = [to_local(parameter.detach()).clone() for parameter in with_gradient]
        has_gradient = [to_local(parameter.grad) != 0 for parameter in with_gradient]
        for group in run.optimizer.param_groups:
            group["lr"] = optim.learning_rate * group.get("lr_scale", 1.0)
        run.optimizer.clip_and_step(torch.ones_like(result.sums[1]))
        for parameter, value, mask in zip(with_gradient, before, has_gradient, strict=True):
            same = (to_local(parameter.detach()) == value) & mask
            counts += torch.tensor([same.sum().item(), mask.sum().item()])
        dtype = run.model.dtype
    swallowed, total = run.ctx.all_reduce_sum(counts).tolist()
    share, limit = swallowed / max(1.0, total), SWALLOWED_LIMITS.get(dtype, 0.5)
    values = {"share": share, "limit": limit}
    text = f"{share:.1%} of the updates at learning rate {optim.learning_rate:g} do not change their weight"
    finding = Finding("pass", text, f"{limit:.0%}", values=values)
    if share <= limit:
        return finding
    if share == 1.0 and dtype == torch.float32 and optim.learning_rate > MIN_LEARNING_RATE:
        return finding.with_cause(
            "no weight changes at all: the optimizer's update is not applied",
            "optim/adamw.py, training/step.py: optimizer_step",
            "see whether the optimizer has the model's parameters",
        )
    return finding.with_cause(
        f"the updates are smaller than half the distance of neighboring {dtype_name(dtype)} numbers, and rounded away",
        "training.precision, optim.learning_rate",
        "use --training.precision bf16, which keeps fp32 master weights"
        if dtype == torch.bfloat16
        else "use a larger --optim.learning_rate",
        status="fail" if share > MOST_SWALLOWED else "warn",
    )

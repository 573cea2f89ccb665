"""Are the gradients those of the loss, of all that should be trained, and summed in fp32?"""

from __future__ import annotations

import numpy as np

from torchstone.diagnosis.check import Finding, MissingCheck, SkipCheck, Status
from torchstone.diagnosis.gradients import (
    EXACT_GRADIENT_LIMIT,
    GradientError,
    compute_step,
    gradient_errors,
    gradient_shards,
    largest,
    run_micro_batches,
    total_norm,
)
from torchstone.diagnosis.hypotheses import Hypothesis, document_weights, list_hypotheses
from torchstone.diagnosis.reference import relative
from torchstone.diagnosis.restore import randomized_adapters
from torchstone.diagnosis.session import Diagnosis
from torchstone.models.model import FallbackModel
from torchstone.training.checks import merge_names
from torchstone.training.run import Run
from torchstone.wording import plural

# Limit for the norm; the sum of squares of a large tensor rounds with the root of its size.
NORM_LIMIT, NORM_ROUNDING = 1e-4, 2e-7
# The share of values that are exact in bf16: of a sum in fp32 it is small, of one in bf16 it is 1.
BF16_SHARE_LIMIT = 0.95
MAX_SHOWN = 3
# A cause, where it comes from, and what to do.
IN_BF16 = (
    "gradients are summed or reduced in bf16: small parts of a sum are lost",
    "parallel/fsdp.py: mixed_precision_policy (reduce_dtype), models/master_weights.py",
    "sum gradients in fp32, whatever they are computed in; only training.precision bf16-pure sums in bf16",
)
# Tensors with fewer values say little.
MIN_VALUES = 64


def check_gradients(diagnosis: Diagnosis) -> Finding:
    # Gradients of a wrong loss or of other documents cannot be right.
    diagnosis.require("batch", "loss")
    weights = document_weights(diagnosis.contents, diagnosis.loss_sums)
    expected = diagnosis.reference.gradients(diagnosis.documents, weights)
    exact = diagnosis.fp32_run
    grad_norm = compute_step(diagnosis, exact).grad_norm
    errors = gradient_errors(exact, expected)
    worst, norm_error = largest(errors), relative(grad_norm, total_norm(expected.values()))
    values = {"error": worst.error, "limit": EXACT_GRADIENT_LIMIT, "grad_norm": grad_norm, "norm_error": norm_error}
    norm_limit = max(NORM_LIMIT, NORM_ROUNDING * max(tensor.numel() for tensor in expected.values()) ** 0.5)
    text = f"{len(errors)} tensors agree to {worst.error:.1e} with the definition, their norm to {norm_error:.1e}"
    limits = f"{EXACT_GRADIENT_LIMIT:g}, norm {norm_limit:.0e}"
    if worst.error <= EXACT_GRADIENT_LIMIT and norm_error <= norm_limit:
        exact.model.clear_gradients()
        return Finding("pass", text, limits, values=values)
    try:
        cause, source, next_step = _explain(diagnosis, errors)
    except MissingCheck as reason:
        cause, source, next_step = "known mistakes could not be compared", "memory", str(reason)
    exact.model.clear_gradients()
    off = sum(each.error > EXACT_GRADIENT_LIMIT for each in errors)
    text = f"{off} of {len(errors)} tensors are off, {worst.name} by {worst.error:.1%}"
    text = text if off else f"the norm of all gradients is off by {norm_error:.1%}"
    return Finding("fail", text, limits, cause, source, next_step, values)


def _explain(diagnosis: Diagnosis, errors: list[GradientError]) -> tuple[str, str, str]:
    """The cause of wrong gradients, which are still in `fp32_run`; where it comes from, and what to do."""
    contents, sums, exact = diagnosis.contents, diagnosis.loss_sums, diagnosis.fp32_run
    if largest(errors).error <= EXACT_GRADIENT_LIMIT:
        return (
            "every gradient is right, but not the norm that clips them: some shards are counted twice or not at all",
            "parallel/local_shards.py: is_owner, training/step.py: compute_gradients",
            "compare the norm with that of one process",
        )
    hypotheses = [each for each in list_hypotheses(contents, sums) if not np.allclose(each.weights, 0)]
    # Several may have the same weights.
    for each in {(each.weights.tobytes(), each.variant): each for each in reversed(hypotheses)}.values():
        if _explains(diagnosis, each):
            return each.cause, each.source, each.next_step
    if contents.ranks > 1 and _is_own_part(diagnosis):
        return (
            "each rank has the gradient of its own rows only: they are not reduced over the data-parallel ranks",
            "parallel/fsdp.py: set_fsdp_sync, apply_fsdp",
            "all-reduce (or reduce-scatter) the gradients before the update",
        )
    if max(measure_bf16_shares(diagnosis, exact)) > BF16_SHARE_LIMIT:
        return IN_BF16
    off = [each for each in errors if each.error > EXACT_GRADIENT_LIMIT]
    ranks = sorted({each.rank for each in off})
    where = f" (worst on rank {', '.join(map(str, ranks))})" if exact.ctx.world_size > 1 else ""
    what = f"only {off[0].name} is off{where}"
    if len(off) > 1:
        what = (
            f"gradients from {off[0].name} to {off[-1].name} are wrong{where}; look at the last one first, because "
            "errors of a backward pass spread from the loss to the embedding"
        )
    return (
        f"no known mistake explains it; {what}",
        f"the module of {off[-1].name}",
        "compare this module's backward pass with autograd's on the plain formula",
    )


def _explains(diagnosis: Diagnosis, hypothesis: Hypothesis) -> bool:
    expected = diagnosis.reference.gradients(diagnosis.documents, hypothesis.weights, hypothesis.variant)
    return largest(gradient_errors(diagnosis.fp32_run, expected)).error <= EXACT_GRADIENT_LIMIT


def _is_own_part(diagnosis: Diagnosis) -> bool:
    """Whether each data-parallel rank has only the gradient of its own documents."""
    contents, exact = diagnosis.contents, diagnosis.fp32_run
    weights = document_weights(contents, diagnosis.loss_sums)
    own = np.array([-1 if place is None else place.rank for place in contents.places])
    parts = [diagnosis.reference.gradients(diagnosis.documents, weights * (own == r)) for r in range(contents.ranks)]
    errors = gradient_errors(exact, parts[exact.ctx.dp_rank])
    return largest(errors).error <= EXACT_GRADIENT_LIMIT


def check_frozen(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    if run.model.tuning is None:
        off = [name for name, parameter in run.model.named_parameters() if not parameter.requires_grad]
    else:
        off = [n for n, p in run.model.named_parameters() if run.model.tuning.is_trained(n) and not p.requires_grad]
    with randomized_adapters(run):
        compute_step(diagnosis, run)
        own = dict[str, bool]()
        for shard in gradient_shards(run):
            own[shard.name] = own.get(shard.name, False) or bool((shard.tensor != 0).any())
        run.model.clear_gradients()
    reached: dict[str, bool] = {}
    for flags in run.ctx.all_gather_object(own):
        for name, flag in flags.items():
            reached[name] = reached.get(name, False) or flag
    off = merge_names(run.ctx, off)
    without = [name for name, flag in reached.items() if not flag]
    values = {"trained": float(len(reached)), "frozen": float(len(off)), "without_gradient": float(len(without))}
    text = f"{len(reached) - len(without)} of {len(reached) + len(off)} trained tensors get a gradient"
    finding = Finding("pass", text, "all", values=values)
    if not off and not without:
        return finding
    names = ", ".join((off or without)[:MAX_SHOWN])
    if off:
        cause = f"requires_grad is off: {names}"
        source = "the code that builds or freezes the model (tuning/plan.py: freeze)"
    elif len(without) == len(reached):
        cause = "no gradient is there at the end of a step"
        source = "parallel/fsdp.py: set_fsdp_sync, the backward pass"
    else:
        cause = f"the loss does not depend on {names}: something between them and the loss is detached or unused"
        source = f"the module of {without[0]}"
    # A model of Transformers may have parameters that a text does not use, such as those of an expert or of images.
    status: Status = "warn" if isinstance(run.model, FallbackModel) and not off else "fail"
    return finding.with_cause(cause, source, "let it train, or freeze it on purpose with tuning.method", status)


def check_reduction(diagnosis: Diagnosis) -> Finding:
    run, precision = diagnosis.run, diagnosis.config.training.precision
    if precision.endswith("-pure"):
        raise SkipCheck(f"training.precision {precision} keeps gradients in bf16")
    diagnosis.require("dtypes")
    contents = diagnosis.contents
    if contents.ranks == contents.micro_steps == 1:
        raise SkipCheck("one micro-batch on one rank: nothing is summed")
    with randomized_adapters(run):
        share = max(measure_bf16_shares(diagnosis, run))
    parts = f"{contents.micro_steps} micro-steps on {plural(contents.ranks, 'rank')}"
    text = f"{share:.1%} of a tensor's values, summed over {parts}, are exact in bf16"
    values = {"share": share, "limit": BF16_SHARE_LIMIT}
    finding = Finding("pass", text, f"{BF16_SHARE_LIMIT:.0%}", values=values)
    return finding if share <= BF16_SHARE_LIMIT else finding.with_cause(*IN_BF16)


def measure_bf16_shares(diagnosis: Diagnosis, run: Run) -> list[float]:
    """The share of values that bf16 holds exactly, in the tensor where it is smallest: after one micro-step, where
    several ranks are summed, and after all. All ranks must call it."""
    shares, contents, batch = [], diagnosis.contents, diagnosis.batch(run)
    run.model.clear_gradients()
    if contents.ranks > 1:
        run_micro_batches(run, batch.micro_batches[:1], batch.loss_tokens)
        shares.append(_bf16_share(run))
    if contents.micro_steps > 1:
        run_micro_batches(run, batch.micro_batches, batch.loss_tokens)
        shares.append(_bf16_share(run))
    return shares or [0.0]


def _bf16_share(run: Run) -> float:
    """Clears the gradients."""
    counts: dict[str, tuple[int, int]] = {}
    for shard in gradient_shards(run):
        values = shard.tensor[shard.tensor != 0].float()
        exact, total = counts.get(shard.name, (0, 0))
        counts[shard.name] = exact + int((values.bfloat16().float() == values).sum()), total + values.numel()
    run.model.clear_gradients()
    shares = [
        exact / total
        for own in run.ctx.all_gather_object(counts)
        for exact, total in own.values()
        if total >= MIN_VALUES
    ]
    return min(shares, default=0.0)

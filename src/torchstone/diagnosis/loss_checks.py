"""Is the loss of a step the sum of its token losses divided by its loss tokens, however the step is computed?"""

from __future__ import annotations

from collections.abc import Sequence

from torchstone.data.loader import StepBatch
from torchstone.diagnosis.check import Finding
from torchstone.diagnosis.hypotheses import find_causes, list_hypotheses
from torchstone.diagnosis.isolation import MASKS, find_leak
from torchstone.diagnosis.reference import relative
from torchstone.diagnosis.session import Diagnosis
from torchstone.training.run import Run
from torchstone.training.step import compute_gradients
from torchstone.wording import plural

# Relative. In fp32 only the order of additions differs.
EXACT_LIMIT = 1e-5


def check_batch(diagnosis: Diagnosis) -> Finding:
    contents = diagnosis.contents
    number, ranks = len(contents.expected), plural(contents.ranks, "rank")
    measured = f"{len(contents.found)} of {number} documents, {contents.micro_steps} micro-steps on {ranks}"
    values = {"documents": float(number), "found": float(len(contents.found)), "extra": float(len(contents.extra))}
    finding = Finding("pass", measured, "each once, labels shifted once", values=values)
    if contents.problem is None:
        return finding
    return finding.with_cause(
        contents.problem,
        "data/loader.py: RunData.step_batch, data/collate.py",
        "print the micro-batches of each rank (RunData.batches), and compare them with the sampler's rows",
    )


def check_loss(diagnosis: Diagnosis) -> Finding:
    # The loss of other documents cannot be right.
    diagnosis.require("batch")
    right = diagnosis.loss_sums.loss
    losses = [measure_loss(diagnosis, diagnosis.fp32_run) for _ in range(2)]
    measured = losses[0]
    error = relative(measured, right)
    values = {"loss": measured, "expected": right, "error": error, "limit": EXACT_LIMIT}
    text = f"loss {measured:.6f}, expected {right:.6f}, relative error {error:.1e}"
    if error <= EXACT_LIMIT:
        return Finding("pass", text, f"{EXACT_LIMIT:g}", values=values)
    text = f"loss {measured:.6f}, expected {right:.6f}: off by {error:.1%}"
    explanation = explain_loss(diagnosis, losses)
    values["is_explained"] = float(explanation is not None)
    cause, source, next_step = explanation or _most_deviating_part(diagnosis)
    return Finding("fail", text, f"{EXACT_LIMIT:g}", cause, source, next_step, values)


def measure_loss(diagnosis: Diagnosis, run: Run) -> float:
    """The loss of the checked step as a step computes it, without dropout; on the rank where it is most wrong."""
    run.model.train(False)
    loss = compute_gradients(run.runner, diagnosis.batch(run), 1).loss
    run.model.clear_gradients()
    return worst_of_ranks(diagnosis, loss, diagnosis.loss_sums.loss)


def worst_of_ranks(diagnosis: Diagnosis, value: float, expected: float) -> float:
    """The value of the rank that is furthest from what is expected: all ranks must judge alike."""
    return float(max(diagnosis.ctx.all_gather_object(value), key=lambda each: relative(each, expected)))


def explain_loss(diagnosis: Diagnosis, losses: list[float]) -> tuple[str, str, str] | None:
    """The known mistake that explains a wrong loss, where it comes from, and what to do."""
    contents, sums = diagnosis.contents, diagnosis.loss_sums
    divisors = wrong_divisors(diagnosis, [diagnosis.batch(diagnosis.fp32_run)], contents.ranks)
    if divisors is not None:
        return divisors, "data/loader.py: StepBatch.loss_tokens", "divide by the loss tokens of the whole step"
    if relative(losses[0], losses[1]) > EXACT_LIMIT:
        return (
            f"the loss of the same batch differs from call to call ({losses[0]:.6f}, {losses[1]:.6f}): something "
            "random, such as dropout, is on in evaluation mode",
            "the modules of the model that do not follow model.train(False)",
            "find the module whose `training` is True after model.train(False)",
        )
    causes = find_causes(list_hypotheses(contents, sums), losses[0], sums, EXACT_LIMIT)
    if 0 < len(causes) <= 2:
        return " or: ".join(each.cause for each in causes), causes[0].source, causes[0].next_step
    leak = find_leak(diagnosis)
    return None if leak is None else (leak, MASKS, "see the check documents")


def wrong_divisors(diagnosis: Diagnosis, batches: Sequence[StepBatch], ranks: int) -> str | None:
    """What is wrong with the loss tokens by which the shares of `ranks` ranks are divided; None if nothing is.

    `batches`: the shares of this rank. All ranks must call it."""
    own = [(batch.loss_tokens, sum(each.get_counts().loss_tokens for each in batch.micro_batches)) for batch in batches]
    # Ranks that differ only in tp or pp report the same.
    shares = dict(diagnosis.ctx.all_gather_object((diagnosis.ctx.dp_rank, own)))
    counts = [pair for rank in sorted(shares) for pair in shares[rank]]
    right = int(diagnosis.loss_sums.counts["right"].sum())
    if all(divisor == right for divisor, _ in counts):
        return None
    divisors = ", ".join(str(divisor) for divisor, _ in counts)
    if ranks > 1 and any(all(divisor == max(1, count * k) for divisor, count in counts) for k in (1, ranks)):
        return (
            "every rank averages over its own loss tokens instead of those of all ranks: with uneven masks, some "
            f"tokens count more than others (ranks divide by {divisors}, and the step has {right})"
        )
    return f"the loss is divided by {divisors} loss tokens, but the step has {right}"


def agreement(is_right: bool, error: float) -> str:
    return f"{'agree to' if is_right else 'differ by'} {error:.1e}"


def _most_deviating_part(diagnosis: Diagnosis) -> tuple[str, str, str]:
    """Which micro-batch of which rank is off most, by its own loss sum."""
    contents, exact = diagnosis.contents, diagnosis.fp32_run
    expected: dict[tuple[int, int], float] = {}
    for place, value in zip(contents.places, diagnosis.loss_sums.sums["right"], strict=True):
        if place is not None:
            expected[place.rank, place.micro_step] = expected.get((place.rank, place.micro_step), 0.0) + value
    errors = {}
    for micro_step, batch in enumerate(diagnosis.batch(exact).micro_batches):
        own = exact.runner.forward([batch]).item()
        for rank, total in enumerate(_sums_by_dp_rank(diagnosis, own)):
            errors[rank, micro_step] = abs(total - expected.get((rank, micro_step), 0.0))
    exact.runner.reshard()
    rank, micro_step = max(errors, key=errors.__getitem__)
    rows = [
        document.origin
        for document, place in zip(contents.expected, contents.places, strict=True)
        if place is not None and (place.rank, place.micro_step) == (rank, micro_step)
    ]
    where = f"micro-step {micro_step}" + (f" of rank {rank}" if contents.ranks > 1 else "")
    return (
        f"no known mistake explains it; {where} is off most, by {errors[rank, micro_step]:.3g} of its loss sum",
        ", ".join(dict.fromkeys(rows[:4])) or "padding",
        "look at attention_kernel, documents and fused_loss; if they pass, compare the logits of this micro-batch",
    )


def _sums_by_dp_rank(diagnosis: Diagnosis, own: float) -> list[float]:
    totals = [0.0] * diagnosis.ctx.dims.dp
    for dp_rank, value in diagnosis.ctx.all_gather_object((diagnosis.ctx.dp_rank, own)):
        totals[dp_rank] += value
    return totals

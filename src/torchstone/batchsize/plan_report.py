"""A plan as text: the essentials, memory by component with bars, length, hours and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from torchstone.batchsize.gpus import GIB
from torchstone.batchsize.layouts import describe_layouts
from torchstone.batchsize.plan import Plan
from torchstone.training.memory import size_text
from torchstone.wording import plural

BAR_WIDTH, MIB = 40, 2**20
MOMENTS = {
    "loss": "while the loss is computed",
    "backward": "in the backward pass",
    "update": "while the optimizer updates",
}


def report_lines(plan: Plan, block: str = "#") -> Iterator[str]:
    """`block`: of the bars."""
    yield from _essentials(plan)
    yield ""
    yield from _memory_table(plan, block)
    yield ""
    yield from _length(plan)
    if plan.search is not None:
        yield ""
        yield "layouts, best first:"
        yield f"{'tokens/s':>12} {'GiB':>7}"
        yield from describe_layouts(plan.search, plan.job)
        yield plan.search.limit
    for note in plan.notes:
        yield f"note: {note}"


def _essentials(plan: Plan) -> Iterator[str]:
    job, layout, sizes = plan.job, plan.layout, plan.length.batch_sizes
    trained = sum(parameter.numel() for parameter in job.state.trained.values())
    share = (
        "" if job.config.tuning.method == "full" else f", {trained / 1e6:,.2f}M trained ({job.config.tuning.method})"
    )
    yield f"model       {job.model.parameter_count / 1e6:,.2f}M parameters{share}"
    yield f"layout      {layout.dims.world_size} x {job.gpu.name}: {layout.dims}, zero {layout.parallel.zero}"
    yield "resolved    " + "; ".join(f"{key.partition('.')[2]} {choice.value}" for key, choice in plan.choices.items())
    rows = f"{plural(layout.rows, 'row', ',')} of {job.row_tokens:,} tokens"
    chosen = " (chosen by this plan)" if plan.has_chosen_rows and plan.recommended_rows else ""
    steps = plural(layout.micro_steps(job), "micro-step", ",")
    yield f"batch       {sizes.global_batch_size:,} samples a step: {steps} of {rows} per device{chosen}"
    if plan.largest_rows:
        is_all = plan.largest_rows * layout.dims.dp >= job.step_rows
        rows = "all rows of a step" if is_all else f"up to {plural(plan.largest_rows, 'row', ',')}"
        recommended = "" if plan.time is None or chosen else f"; recommended: {plan.recommended_rows}"
        yield f"            {rows} would fit in a micro-batch{recommended}"


def _memory_table(plan: Plan, block: str) -> Iterator[str]:
    memory, limit = plan.memory, plan.job.gpu.memory
    unit, size_of_unit = ("GiB", GIB) if memory.total >= GIB else ("MiB", MIB)
    # A small plan has bars, too.
    scale, done = max(memory.total, min(limit, 4 * memory.total)), 0
    yield f"memory of the fullest rank in {unit}, at its peak {MOMENTS[memory.moment]}"
    for name, size in memory.components.items():
        # Each bar starts where the one before ends.
        start, end = (round(BAR_WIDTH * value / scale) for value in (done, done + size))
        yield f"  {name:<14}{size / size_of_unit:>9.2f}  {' ' * start}{block * (end - start)}".rstrip()
        done += size
    yield f"  {'total':<14}{memory.total / size_of_unit:>9.2f}  {block * round(BAR_WIDTH * memory.total / scale)}"
    verdict = "fits" if plan.fits else "does not fit"
    usable, share = size_text(plan.job.usable), plan.job.usable_share
    yield f"  {verdict}: {usable} can be used on {plan.job.gpu.name} ({share:.0%} of {size_text(plan.job.memory)})"


def _length(plan: Plan) -> Iterator[str]:
    length, state = plan.length, plan.job.state
    if length.steps is None:
        is_endless = plan.job.config.training.mode == "infinite"
        yield f"steps       {'endless' if is_endless else 'unknown: there is no --data.path'}"
    else:
        tokens = "an unknown number of" if length.tokens is None else f"{length.tokens:,}"
        yield f"steps       {length.steps:,}, {tokens} tokens ({length.source})"
    if plan.time is not None and plan.fits:
        time = plan.time
        hours = "" if plan.hours is None else f", {_duration(plan.hours)} for all steps"
        yield f"speed       {time.tokens_per_second:,.0f} tokens/s, {time.seconds:.3f} s a step{hours} (predicted)"
    sizes = state.checkpoint_bytes(plan.layout.dims.world_size)
    unit, size_of_unit = ("GiB", GIB) if sum(sizes.values()) >= GIB else ("MiB", MIB)
    yield (
        f"checkpoint  {sum(sizes.values()) / size_of_unit:.2f} {unit}: weights {sizes['weights'] / size_of_unit:.2f}, "
        f"optimizer {sizes['optimizer'] / size_of_unit:.2f}"
    )


def _duration(hours: float) -> str:
    if hours >= 1:
        return f"{hours:,.1f} hours"
    return f"{60 * hours:.1f} minutes" if hours >= 1 / 60 else f"{3600 * hours:.1f} seconds"

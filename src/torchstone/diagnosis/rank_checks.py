"""Do ranks draw the random numbers that they should?"""

from __future__ import annotations

from torchstone.diagnosis.check import Finding, SkipCheck
from torchstone.diagnosis.session import Diagnosis


def check_random_numbers(diagnosis: Diagnosis) -> Finding:
    """Ranks with different rows draw different dropout masks, ranks with the same rows the same."""
    ctx = diagnosis.ctx
    if ctx.world_size == 1:
        raise SkipCheck("one process")
    samples = ctx.all_gather_object((ctx.dp_rank, diagnosis.rng_sample))
    by_rows: dict[int, set[tuple[int, ...]]] = {}
    for dp_rank, sample in samples:
        by_rows.setdefault(dp_rank, set()).add(sample)
    differing = sorted(rank for rank, own in by_rows.items() if len(own) > 1)
    different = len(set().union(*by_rows.values()))
    values = {"data_parallel_ranks": float(len(by_rows)), "different_masks": float(different)}
    text = f"{different} different dropout masks on {len(by_rows)} data-parallel ranks"
    finding = Finding("pass", text, "one for each", values=values)
    if differing:
        return finding.with_cause(
            f"ranks with the same rows (data-parallel rank {differing[0]}) draw different random numbers: their shards "
            "of one model get different dropout masks",
            "training/setup.py: build_run",
            "seed ranks by their data-parallel rank alone",
        )
    if different < len(by_rows):
        return finding.with_cause(
            "data-parallel ranks draw the same random numbers, and so the same dropout masks: they share a seed",
            "training.seed; training/setup.py: build_run",
            "add the data-parallel rank to the seed",
        )
    return finding

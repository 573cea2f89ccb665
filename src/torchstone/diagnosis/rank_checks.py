"""Do ranks with the same shard agree, and do ranks draw the random numbers that they should?"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch

from torchstone.diagnosis.check import Finding, SkipCheck
from torchstone.diagnosis.gradients import gradient_shards
from torchstone.diagnosis.loss_checks import agreement
from torchstone.diagnosis.restore import randomized_adapters
from torchstone.diagnosis.session import Diagnosis
from torchstone.parallel.local_shards import TensorShard, local_shards
from torchstone.training.run import Run
from torchstone.training.step import compute_gradients

# Ranks that hold the same shard must agree to this, relative to the norm.
REPLICA_LIMIT = 1e-6


def check_replicas(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    if run.ctx.world_size == 1:
        raise SkipCheck("one process")
    with randomized_adapters(run):
        run.model.train(False)
        run.optimizer.reset_state()
        result = compute_gradients(run.runner, diagnosis.batch(run), 1)
        gradients = _largest_gap(run, gradient_shards(run))
        run.optimizer.clip_and_step(torch.ones_like(result.sums[1]))
        config = run.model.decoder_config
        shards = (local_shards(config, name, p.detach()) for name, p in run.model.named_parameters())
        weights = _largest_gap(run, chain.from_iterable(shards))
    values = {"gradients": gradients[0], "weights": weights[0], "limit": REPLICA_LIMIT}
    is_right = max(gradients[0], weights[0]) <= REPLICA_LIMIT
    text = f"gradients of ranks with the same shard {agreement(is_right, gradients[0])}, weights after a step "
    text += agreement(is_right, weights[0])
    finding = Finding("pass", text, f"{REPLICA_LIMIT:g}", values=values)
    if is_right:
        return finding
    what, (_, name, ranks) = ("gradient", gradients) if gradients[0] > REPLICA_LIMIT else ("weight", weights)
    return finding.with_cause(
        f"ranks {ranks} hold the same shard of {name}, but not the same {what}: it is not reduced over them, so they "
        "train different models",
        "parallel/fsdp.py: set_fsdp_sync (data-parallel ranks), parallel/tensor_parallel.py (tp ranks)",
        f"all-reduce the gradient of {name} over these ranks",
    )


def _largest_gap(run: Run, shards: Iterable[TensorShard]) -> tuple[float, str, str]:
    """The largest difference between ranks with the same shard, in its norm or its product with a fixed vector; the
    tensor and the ranks."""
    own = {}
    for shard in shards:
        values = shard.tensor.detach().cpu().double().flatten()
        probe = torch.linspace(-1, 1, len(values), dtype=torch.float64).sin() + 0.5
        own[shard.name, shard.offset, tuple(shard.tensor.shape)] = (values.norm().item(), values.dot(probe).item())
    seen: dict[Any, list[tuple[int, tuple[float, float]]]] = {}
    for rank, numbers in enumerate(run.ctx.all_gather_object(own)):
        for key, pair in numbers.items():
            seen.setdefault(key, []).append((rank, pair))
    worst = (0.0, "nothing", "")
    for key, ((first, (norm, product)), *others) in seen.items():
        for rank, pair in others:
            gap = max(abs(pair[0] - norm), abs(pair[1] - product)) / max(norm, 1e-12)
            worst = max(worst, (gap, key[0], f"{first} and {rank}"))
    return worst


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

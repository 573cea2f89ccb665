"""Predicted seconds of an optimizer step: FLOPs and bytes of each kind of work, divided by what a GPU reaches.

The shares of the published peaks are those of one H200 (docs/performance.md has the times of each kind of work, and
docs/plan.md the errors of these predictions). They are assumed for other GPUs, where nothing was measured; nor was
communication between GPUs. What is added up:

- matmuls: 2 FLOPs per parameter and token, forward; twice that backward, half of it for frozen weights;
- attention: 7 x heads x head_dim x length FLOPs, at a share that grows with the length of documents;
- everything that passes through memory: norms, activations, RoPE, the logits, casts of FP8, the optimizer;
- FSDP2's collectives, as far as they take longer than the computation that hides them; those of tensor parallelism,
  which nothing hides; the bubble of a pipeline.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from torchstone.batchsize.layout import Job, Layout, stage_ranks
from torchstone.optim.muon import NS_STEPS
from torchstone.parallel.fsdp import reduces_once_per_step
from torchstone.tuning.plan import OsftPlan

# Shares of the published peaks, from the kernel times of `1b`, `8b` and `124m`.
MATMUL, MEMORY, STREAM, NEWTON_SCHULZ = 0.73, 0.6, 0.8, 0.42
# Share of the peak for attention, by head_dim, for long documents, and the length that reaches half of it.
ATTENTION, WIDE_ATTENTION, HALF_LENGTH = 0.48, 0.58, 780.0
# Share of a link's bandwidth; assumed.
LINK = 0.7
# Seconds of a micro-step in which the GPU waits, and copies.
IDLE = 0.005


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step, and the tokens that all ranks train on in it."""

    matmul: float
    attention: float
    memory: float
    loss: float
    optimizer: float
    communication: float
    bubble: float
    idle: float
    tokens: float

    @property
    def seconds(self) -> float:
        return sum(value for key, value in asdict(self).items() if key != "tokens")

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def predict_step(job: Job, layout: Layout) -> StepTime | None:
    """None for a device whose speed is not known."""
    config, dims, gpu, precision = job.model.config, layout.dims, job.gpu, job.config.training.precision
    peak_tflops = job.config.observe.peak_tflops
    peak = gpu.flops if peak_tflops is None else 1e12 * peak_tflops
    if peak is None:
        return None
    bandwidth = gpu.memory_bandwidth or math.inf
    micro_steps = layout.micro_steps(job)
    tokens = job.step_tokens * layout.busiest_share(job)
    linear, head = _block_parameters(job), config.vocab_size * config.width
    passes, head_passes = _passes(job, layout.recompute)
    fp8 = 2 if precision.startswith("fp8") and peak_tflops is None else 1
    block_flops, head_flops = linear * passes / fp8, head * head_passes
    ranks = [(sum(map(len, stages)), stages[-1].stop == config.depth) for _, stages in stage_ranks(job, layout)]
    layers, has_head = max(ranks, key=lambda rank: rank[0] * block_flops + rank[1] * head_flops)
    matmul_flops = tokens * (layers * block_flops + has_head * head_flops) / dims.tp
    matmul_flops += micro_steps * layers * _osft_flops(job) / dims.tp
    attention_flops = tokens * layers * _attention_flops(job, layout.recompute) / dims.tp
    share = (ATTENTION if config.head_dim <= 64 else WIDE_ATTENTION) * job.mean_length / (job.mean_length + HALF_LENGTH)
    memory_bytes = tokens * layers * _memory_bytes(job, layout.recompute) / dims.tp
    memory_bytes += layers * _osft_bytes(job, micro_steps) / dims.tp
    loss_bytes = tokens * 3 * job.itemsize * config.vocab_size * has_head / dims.tp
    matmul, attention = matmul_flops / (MATMUL * peak), attention_flops / (share * peak)
    memory, loss = memory_bytes / (MEMORY * bandwidth), loss_bytes / (MEMORY * bandwidth)
    compute = matmul + attention + memory + loss
    stages = layout.stages_per_rank
    return StepTime(
        matmul, attention, memory, loss,
        _optimizer_seconds(job, layout, micro_steps, peak, bandwidth),
        _exposed_communication(job, layout, layers, micro_steps, compute),
        compute * (dims.pp - 1) / (stages * micro_steps), IDLE * micro_steps, job.step_tokens,
    )  # fmt: skip


def _block_parameters(job: Job) -> int:
    """Parameters of the linears in a block."""
    config = job.model.config
    queries, keys, values = config.qkv_features
    return config.width * (2 * queries + keys + values + (3 if config.is_gated else 2) * config.mlp_width)


def _passes(job: Job, recompute: str) -> tuple[float, float]:
    """FLOPs per parameter of a block, and of the head: two each for output and gradients of input and weight."""
    tuning = job.model.tuning
    again = {"full": 2.0, "selective": 1.0}.get(recompute, 0.0)
    weight_gradient = 2.0
    if tuning is not None:
        # OSFT multiplies with P first: r / m of the output features, then of the input features.
        weight_gradient = 4 / 3 * tuning.trained_share
    trains_head = tuning is None or tuning.is_trained("head.weight")
    return 4 + weight_gradient + again, 6.0 if trains_head else 4.0


def _osft_flops(job: Job) -> float:
    """FLOPs per block and micro-batch: W is merged in both passes, and gradients and updates are projected."""
    if not isinstance(job.model.tuning, OsftPlan):
        return 0.0
    ratio, narrow = job.model.tuning.unfreeze_rank_ratio, min(job.model.config.width, job.model.config.mlp_width)
    return _block_parameters(job) * narrow * (4 * ratio + 24 * ratio * (1 - ratio))


def _osft_bytes(job: Job, micro_steps: int) -> float:
    """Bytes per block and step: W0 is read and W written in both passes, four products read the frozen directions, and
    what surrounds them passes over Z fourteen times."""
    if not isinstance(job.model.tuning, OsftPlan):
        return 0.0
    ratio = job.model.tuning.unfreeze_rank_ratio
    return _block_parameters(job) * (8 * micro_steps + 16 * (1 - ratio) + 56 * ratio)


def _attention_flops(job: Job, recompute: str) -> float:
    """Attention FLOPs of one token in one layer, with the causal mask."""
    config = job.model.config
    windows = [job.mean_length if spec.window is None else min(spec.window, job.mean_length) for spec in config.layers]
    passes = 9 if recompute == "full" else 7
    return passes * config.heads * config.head_dim * sum(windows) / len(windows)


def _memory_bytes(job: Job, recompute: str) -> float:
    """Bytes that a layer's norms, activations and RoPE read and write per token, forward and backward."""
    config = job.model.config
    (queries, keys, values), width, mlp = config.qkv_features, config.width, config.mlp_width
    elements = 9 * mlp + 18 * width + 4 * (queries + keys)
    elements += 3 * mlp + 6 * width if recompute == "full" else 0
    total = float(job.itemsize * elements) * (1 if job.compile != "none" else 2)
    if job.config.training.precision.startswith("fp8"):
        # A cast reads twice and writes one byte. Inputs are cast again for the gradient of the weight.
        inputs, outputs = 2 * width + queries + mlp, queries + keys + values + 2 * mlp + 2 * width
        total += 5 * (inputs * (2 if job.model.tuning is None else 1) + outputs)
    return total


def _optimizer_seconds(job: Job, layout: Layout, micro_steps: int, peak: float, bandwidth: float) -> float:
    """Gradients are summed and read twice, weights and moments read and written, a copy is written."""
    precision, elements = job.config.training.precision, job.state.num_trained
    sharded = layout.dims.dp_shard * layout.dims.tp * layout.dims.pp
    itemsize = 2 if precision.endswith("-pure") else 4
    sums = micro_steps * (2 * itemsize + job.itemsize) if micro_steps > 1 else 0
    seconds = elements * (sums + 6 * itemsize + 3 * job.itemsize) / sharded / (STREAM * bandwidth)
    if job.config.optim.name == "muon":
        config = job.model.config
        flops = sum(_muon_flops(*shape) for shape in _matrix_shapes(job)) * config.depth
        seconds += flops / (layout.dims.world_size * NEWTON_SCHULZ * peak)
    return seconds


def _matrix_shapes(job: Job) -> list[tuple[int, int]]:
    config = job.model.config
    queries, keys, values = config.qkv_features
    up = [(config.width, config.mlp_width)] * (3 if config.is_gated else 2)
    return [(config.width, features) for features in (queries, keys, values, queries)] + up


def _muon_flops(rows: int, columns: int) -> float:
    m, n = sorted((rows, columns))
    return NS_STEPS * (4.0 * m * m * n + 2.0 * m**3)


def _exposed_communication(job: Job, layout: Layout, layers: int, micro_steps: int, compute: float) -> float:
    """Seconds of a step in which a rank waits for others."""
    dims, config, gpu = layout.dims, job.model.config, job.gpu
    if dims.world_size == 1 or not gpu.link:
        return 0.0
    tp_link = _group_bandwidth(job, dims.tp, 1)
    # Two gathers and two reductions of hidden states, forward and backward.
    moved = job.step_tokens / dims.dp * config.width * job.itemsize * (dims.tp - 1) / dims.tp
    tp_seconds = 8 * layers * moved / tp_link
    elements = job.state.num_parameters / dims.pp / dims.tp
    trained = job.state.num_trained / dims.pp / dims.tp
    shard_link = _group_bandwidth(job, dims.dp_shard, dims.tp)
    gathers = 2 * micro_steps if layout.parallel.zero == 3 else 1
    reductions = 1 if reduces_once_per_step(layout.parallel, dims.dp_shard) else micro_steps
    ring = (dims.dp_shard - 1) / dims.dp_shard
    fsdp = ring * (gathers * job.itemsize * elements + reductions * 4 * trained) / shard_link
    replicate_link = _group_bandwidth(job, dims.dp_replicate, dims.tp * dims.dp_shard)
    fsdp += 2 * (dims.dp_replicate - 1) / dims.dp_replicate * 4 * trained / dims.dp_shard / replicate_link
    return tp_seconds + max(0.0, fsdp - compute)


def _group_bandwidth(job: Job, ranks: int, inner: int) -> float:
    """Bytes per second of a ring over `ranks` ranks that are `inner` ranks apart. Within a machine it is that of the
    link; between machines all ranks of the group on one machine use their network cards."""
    gpu = job.gpu
    if ranks * inner <= gpu.node_size:
        return LINK * gpu.link
    per_node = max(1, gpu.node_size // inner)
    return LINK * min(gpu.link, per_node * gpu.network)

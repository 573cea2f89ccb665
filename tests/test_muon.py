"""Muon: torch.optim.Muon's arithmetic to the last bit, in every parallel layout, over checkpoints, and what it refuses.

The iteration runs in bf16: gradients that differ in their last bit may give updates that differ by a percent. So the
layouts get the same gradients here, and must have the same weights and momentum, bit for bit. That they also agree with
Transformers and torch.optim.Muon on real gradients is in training/test_layouts.py.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import parity
from exact_runs import assert_same_run, exact_metrics
from layouts import CPU, Shard, assert_shards_in
from sides import collated
from tiny import flags
from tiny_families import make_model
from torchstone import api
from torchstone.checkpoint.load import restore_optimizer
from torchstone.checkpoint.model_folder import load_model
from torchstone.checkpoint.save import save_checkpoint
from torchstone.config import load_config
from torchstone.config.schema import OptimConfig, ParallelConfig
from torchstone.data.loader import StepBatch
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.errors import CheckpointError, UsageError
from torchstone.models.decoder import Fusion
from torchstone.models.execution import ExecutionOptions
from torchstone.models.model import Model
from torchstone.observe.metrics import read_metrics
from torchstone.optim.build import build_optimizer
from torchstone.parallel.build import ModelBuilder, ShardedModelBuilder
from torchstone.parallel.local_shards import local_shards
from torchstone.parallel.mesh import SINGLE_PROCESS, ParallelContext, init_distributed
from torchstone.parallel.projections import ShardedProjections
from torchstone.parallel.runner import Runner
from torchstone.testing import launch_procs
from torchstone.training.step import compute_gradients, optimizer_step

Settings = Callable[..., dict[str, Any]]
Command = Callable[..., tuple[int, str, str]]
FUSED: tuple[Fusion, ...] = ("qkv", "gate_up")
LEARNING_RATE, MAX_NORM = 3e-3, 0.5
OPTIM = OptimConfig(name="muon", learning_rate=LEARNING_RATE, weight_decay=0.1)
# By number of processes. With three, no matrix can be divided evenly; with tp 4, ranks share key/value heads.
LAYOUTS: dict[int, list[tuple[dict[str, Any], tuple[Fusion, ...]]]] = {
    2: [({"zero": 3}, ()), ({"zero": 1}, FUSED), ({"dp_replicate": 2}, FUSED), ({"tp": 2}, FUSED), ({"pp": 2}, FUSED)],
    3: [({"zero": 3}, FUSED)],
    4: [
        ({"dp_replicate": 2, "dp_shard": 2}, FUSED),
        ({"dp_shard": 2, "tp": 2}, FUSED),
        ({"tp": 4}, ()),
        ({"tp": 2, "pp": 2}, FUSED),
        ({"dp_replicate": 2, "pp": 2, "schedule": "interleaved"}, ()),
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("muon") / "llama"
    sizes = {"num_hidden_layers": 4, "num_key_value_heads": 2, "vocab_size": tokenizer.size}
    make_model(folder, "llama", "tied", **sizes)
    tokenizer.save(folder)
    return folder


def build_muon(model: Model, optim: OptimConfig = OPTIM, ctx: ParallelContext = SINGLE_PROCESS) -> torch.optim.Optimizer:
    exchange = ShardedProjections(model, ctx)
    return build_optimizer(model.named_parameters(), optim, model.parameter_kinds(), exchange)


class TorchOptimizers:
    """torch.optim.Muon for the matrices of the blocks and torch.optim.AdamW for the rest, as a user would set them."""

    def __init__(self, model: Model, muon_learning_rate: float, adjust_lr_fn: str) -> None:
        parameters = dict(model.named_parameters())
        matrices = [p for name, p in parameters.items() if name.startswith("layers") and p.dim() == 2]
        rest = [p for name, p in parameters.items() if all(p is not each for each in matrices)]
        self.muon_learning_rate = muon_learning_rate
        self.muon = torch.optim.Muon(matrices, lr=0.0, weight_decay=0.1, adjust_lr_fn=adjust_lr_fn)
        decayed = [p for name, p in parameters.items() if name == "head.weight"]
        others = [p for p in rest if all(p is not each for each in decayed)]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=True)

    def step(self, learning_rate: float) -> None:
        for optimizer, peak in ((self.muon, self.muon_learning_rate), (self.adamw, LEARNING_RATE)):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * (peak / LEARNING_RATE)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("adjust_lr_fn", "muon_learning_rate"), [("match_rms_adamw", None), ("original", 0.02)])
def test_five_steps_equal_torchs_muon_and_adamw(
    adjust_lr_fn: Any, muon_learning_rate: float | None, dtype: torch.dtype, folder_of: Any
) -> None:
    folder = folder_of(("llama", "grouped"))
    ours, reference = (load_model(folder, CPU, dtype, builder=ModelBuilder(CPU, dtype)) for _ in range(2))
    optim = OptimConfig(
        name="muon", learning_rate=LEARNING_RATE, weight_decay=0.1, muon_learning_rate=muon_learning_rate,
        muon_adjust_lr_fn=adjust_lr_fn,
    )  # fmt: skip
    optimizer = build_muon(ours, optim)
    expected = TorchOptimizers(reference, muon_learning_rate or LEARNING_RATE, adjust_lr_fn)
    for number, batches in enumerate(parity.random_batches(5, 96, seed=0)):
        learning_rate = LEARNING_RATE * (number + 1) / 5
        tensors = collated(batches, packed=True)
        count = sum(int((each.labels != -100).sum()) for each in tensors)
        batch = StepBatch(tensors, samples=0, tokens=0, loss_tokens=count, padding=0, first_sample=0)
        result = compute_gradients(Runner(ours, CPU, True), batch, 1)
        optimizer_step(Runner(ours, CPU, True), optimizer, result, 1, learning_rate, MAX_NORM)
        compute_gradients(Runner(reference, CPU, True), batch, 1)
        torch.nn.utils.get_total_norm([p.grad for _, p in reference.named_parameters()])
        scale = min(1.0, MAX_NORM / (result.grad_norm + 1e-6))
        for _, parameter in reference.named_parameters():
            parameter.grad.mul_(scale)
        expected.step(learning_rate)
    start = dict(load_model(folder, CPU, dtype, builder=ModelBuilder(CPU, dtype)).named_parameters())
    for (name, a), (_, b) in zip(ours.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        assert not torch.equal(a, start[name]), name

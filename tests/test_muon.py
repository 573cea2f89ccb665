"""Muon: torch.optim.Muon's arithmetic to the last bit, in every parallel layout, over checkpoints, and what it refuses.

The iteration runs in bf16: gradients that differ in their last bit may give updates that differ by a percent. So the
layouts get the same gradients here, and must have the same weights and momentum, bit for bit. That they also agree with
Transformers and torch.optim.Muon on real gradients is in training/test_layouts.py.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import parity
from exact_runs import StopAt, assert_same_run
from layouts import CPU, Shard, assert_shards_in
from sides import make_batch
from tiny import flags
from tiny_families import make_model
from torchstone import api
from torchstone.checkpoint.load import restore_optimizer
from torchstone.checkpoint.model_folder import load_model
from torchstone.checkpoint.save import save_checkpoint
from torchstone.config import load_config
from torchstone.config.schema import OptimConfig, ParallelConfig
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.errors import CheckpointError, UsageError
from torchstone.models.decoder import Fusion
from torchstone.models.execution import ExecutionOptions
from torchstone.models.model import Model
from torchstone.observe.metrics import read_metrics
from torchstone.optim.build import build_optimizer
from torchstone.optim.clip import clip_coefficient, scale_gradients
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


def build_muon(
    model: Model, optim: OptimConfig = OPTIM, ctx: ParallelContext = SINGLE_PROCESS
) -> torch.optim.Optimizer:
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
        batch = make_batch(batches)
        result = compute_gradients(Runner(ours, CPU, True), batch, 1)
        optimizer_step(Runner(ours, CPU, True), optimizer, result, 1, learning_rate, MAX_NORM)
        compute_gradients(Runner(reference, CPU, True), batch, 1)
        coefficient = clip_coefficient(result.sums[1], MAX_NORM)
        scale_gradients((p for _, p in reference.named_parameters()), coefficient)
        expected.step(learning_rate)
    start = dict(load_model(folder, CPU, dtype, builder=ModelBuilder(CPU, dtype)).named_parameters())
    for (name, a), (_, b) in zip(ours.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        assert not is_matrix(name) or not torch.equal(a, start[name]), name


def set_gradients(model: Model, step: int) -> None:
    """The same random gradients in every layout."""
    for name, parameter in model.named_parameters():
        parameter.grad = torch.zeros_like(parameter)
        for shard in local_shards(model.decoder_config, name, parameter.grad):
            seed = zlib.crc32(f"{step}/{shard.name}".encode())
            full = torch.randn(shard.shape, generator=torch.Generator().manual_seed(seed))
            index = tuple(slice(at, at + size) for at, size in zip(shard.offset, shard.tensor.shape, strict=True))
            shard.tensor.copy_(full[index])


def take_steps(model: Model, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def held_shards(model: Model, optimizer: torch.optim.Optimizer) -> list[Shard]:
    """What this rank holds of the matrices and their momentum."""
    shards = list[Shard]()
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        assert state.keys() == ({"momentum_buffer"} if is_matrix(name) else {"step", "exp_avg", "exp_avg_sq"}), name
        tensors = {"": parameter.detach(), "/momentum_buffer": state["momentum_buffer"]} if is_matrix(name) else {}
        for key, tensor in tensors.items():
            for shard in local_shards(model.decoder_config, name, tensor):
                shards.append((f"{shard.name}{key}", shard.offset, shard.tensor.clone()))
    return shards


def is_matrix(name: str) -> bool:
    return name.startswith("layers") and "norm" not in name


def train_layout(
    source: Path,
    parallel: dict[str, Any],
    fused: tuple[Fusion, ...],
    steps: range,
    save_to: Path | None = None,
    is_resumed: bool = False,
) -> list[Shard]:
    """Trains the model in `source`, or resumes the checkpoint."""
    with init_distributed(ParallelConfig(**parallel), CPU, mesh_of_one=True) as ctx:
        builder = ShardedModelBuilder(ctx, ParallelConfig(**parallel), "fp32", CPU)
        model = load_model(source, CPU, execution=ExecutionOptions(fused=fused), builder=builder)
        optimizer = build_muon(model, OPTIM, ctx)
        if is_resumed:
            restore_optimizer(source, optimizer, model)
        take_steps(model, optimizer, steps)
        if save_to is not None:
            save_checkpoint(save_to, steps.stop, model, load_tokenizer(source), optimizer, {"step": steps.stop}, ctx)
        return held_shards(model, optimizer)


def train_layouts(folder: Path, layouts: list[tuple[dict[str, Any], tuple[Fusion, ...]]]) -> list[list[Shard]]:
    return [train_layout(folder, parallel, fused, range(3)) for parallel, fused in layouts]


def train_one_process(folder: Path, steps: range, fused: tuple[Fusion, ...] = ()) -> dict[str, Tensor]:
    model = load_model(folder, CPU, execution=ExecutionOptions(fused=fused))
    optimizer = build_muon(model)
    take_steps(model, optimizer, steps)
    return {name: tensor for name, _, tensor in held_shards(model, optimizer)}


def test_fused_matrices_are_orthogonalized_by_projection(folder: Path) -> None:
    expected, fused = train_one_process(folder, range(3)), train_one_process(folder, range(3), FUSED)
    assert expected.keys() == fused.keys()
    assert "layers.0.attention.wk.weight/momentum_buffer" in fused
    for name, tensor in expected.items():
        assert torch.equal(fused[name], tensor), name


@pytest.mark.parametrize("processes", LAYOUTS)
def test_every_layout_equals_one_process_to_the_last_bit(processes: int, folder: Path) -> None:
    """Matrices and momentum, after three steps with the same gradients."""
    expected = train_one_process(folder, range(3))
    ranks = launch_procs(train_layouts, processes, folder, LAYOUTS[processes], timeout=200)
    for (parallel, fused), shards in zip(LAYOUTS[processes], zip(*ranks, strict=True), strict=True):
        held = [shard for rank in shards for shard in rank]
        assert {name for name, _, _ in held} == expected.keys()
        assert_shards_in(held, expected, f"{parallel} {fused}")


def test_a_checkpoint_resumes_in_other_layouts_to_the_last_bit(folder: Path, tmp_path: Path) -> None:
    """dp_shard 2 x tp 2, fused -> pp 2 -> one process: the same as six steps of one process."""
    expected = train_one_process(folder, range(6))
    dp_tp = {"dp_shard": 2, "tp": 2}
    launch_procs(train_layout, 4, folder, dp_tp, FUSED, range(2), tmp_path / "a", timeout=200)
    source = tmp_path / "a/step-00000002"
    launch_procs(train_layout, 2, source, {"pp": 2}, (), range(2, 4), tmp_path / "b", True, timeout=200)
    source = tmp_path / "b/step-00000004"
    model = load_model(source, CPU)
    optimizer = build_muon(model)
    restore_optimizer(source, optimizer, model)
    take_steps(model, optimizer, range(4, 6))
    assert_shards_in(held_shards(model, optimizer), expected, "resumed")


class TestRuns:
    def test_a_resumed_run_is_the_same_bit_for_bit(self, settings: Settings, tmp_path: Path) -> None:
        muon = {"optim__name": "muon", "checkpoint__every_steps": 2}
        whole, resumed = (str(tmp_path / name) for name in ("whole", "resumed"))
        api.train(overrides=settings(output_dir=whole, **muon))
        api.train(overrides=settings(output_dir=resumed, **muon), callbacks=[StopAt(4)])
        api.train(overrides=settings(output_dir=resumed, **muon))
        assert_same_run(whole, resumed, 6)
        lines = read_metrics(tmp_path / "whole/metrics.jsonl")
        assert lines[-1]["loss"] < lines[0]["loss"]
        state = load_file(tmp_path / "whole/checkpoints/step-00000006/optimizer.safetensors")
        assert "layers.0.attention.wq.weight/momentum_buffer" in state
        assert "layers.0.attention.wq.weight/exp_avg" not in state
        assert "tok_embed.weight/exp_avg" in state

    @pytest.mark.parametrize(("first", "second"), [("adamw", "muon"), ("muon", "adamw")])
    def test_the_other_optimizers_checkpoint_is_refused(
        self, first: str, second: str, settings: Settings, tmp_path: Path
    ) -> None:
        api.train(overrides=settings(training__max_steps=1, optim__name=first))
        with pytest.raises(CheckpointError, match=f"the run used optim.name {first}, not {second}") as caught:
            api.train(overrides=settings(training__max_steps=2, optim__name=second))
        folder = tmp_path / "run/checkpoints/step-00000001"
        assert caught.value.hint == (
            f"add --optim.name {first}, or start a new run from its weights: --model.path {folder} --output-dir NEW"
        )

    def test_the_start_line_names_the_optimizer(self, torchstone: Command, settings: Settings) -> None:
        values = settings(training__max_steps=1, optim__name="muon", optim__muon_learning_rate=0.02)
        code, _, err = torchstone("train", *flags(values | {"observe.console": "lines"}))
        assert code == 0, err
        assert "; Muon (learning rate 0.02) and AdamW with learning rate 0.001 (cosine, 0 steps of warm-up)" in err

    def test_the_fallback_is_refused_before_data_is_prepared(
        self, torchstone: Command, llama_dir: Path, tmp_path: Path
    ) -> None:
        values = {"model.path": llama_dir, "data.path": tmp_path / "absent.jsonl", "output_dir": tmp_path / "run"}
        values |= {"model.implementation": "fallback", "optim.name": "muon", "system.device": "cpu"}
        code, _, err = torchstone("train", *flags(values))
        assert code == 2
        assert "optim.name muon needs the native decoder" in err
        assert "use --optim.name adamw" in err

    def test_one_moment_less_needs_less_memory(self, torchstone: Command, settings: Settings) -> None:
        values = settings(model__depth=200, model__width=32768, model__heads=256, optim__name="muon")
        code, _, err = torchstone("train", *flags(values))
        assert code == 4
        billions, gib = re.findall(r"(\S+)B parameters need at least (\S+) GiB", err)[0]
        assert float(gib.replace(",", "")) == pytest.approx(12 * float(billions) * 1e9 / 2**30, rel=1e-3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"optim__muon_momentum": 0.9}, "optim.muon_momentum is for Muon, but optim.name is adamw"),
        ({"optim__muon_learning_rate": 0.02}, "optim.muon_learning_rate is for Muon"),
        ({"optim__muon_adjust_lr_fn": "original"}, "optim.muon_adjust_lr_fn is for Muon"),
        (
            {"optim__name": "muon", "optim__muon_learning_rate": 0.02, "optim__learning_rate": 0.0},
            "follows the schedule of optim.learning_rate, which is 0",
        ),
        ({"optim__name": "lion"}, "optim.name"),
    ],
)
def test_settings_without_effect_are_refused(overrides: dict[str, Any], message: str, settings: Settings) -> None:
    with pytest.raises(UsageError, match=message):
        load_config(overrides=settings(**overrides))


def test_no_decay_applies_to_matrices_as_well(folder: Path) -> None:
    """With gradients of zero only the weight decay is left."""
    for no_decay, factor in ((("norm", "bias", "embed"), 1 - LEARNING_RATE * 0.1), (("matrix",), 1.0)):
        model = load_model(folder, CPU)
        weight = dict(model.named_parameters())["layers.1.mlp.up.weight"]
        before = weight.detach().clone()
        optimizer = build_muon(model, replace(OPTIM, no_decay=no_decay))
        for _, parameter in model.named_parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert torch.equal(weight, before * factor)

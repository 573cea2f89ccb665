"""OSFT: its mathematics, training against a plain loop with Transformers and torch.linalg.svd, every layout, runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

import parity
from exact_runs import StopAt, assert_same_run
from layouts import CPU
from selection import the_rest
from sides import MAX_NORM, WEIGHT_DECAY, make_batch
from steps import train_step
from tiny_families import make_model
from torchstone import api
from torchstone.checkpoint.model_folder import load_model
from torchstone.checkpoint.save import full_unfused_parameters
from torchstone.checkpoint.weight_names import WEIGHT_NAMES
from torchstone.config.load import load_config
from torchstone.config.schema import OptimConfig, ParallelConfig
from torchstone.errors import CheckpointError, NumericalError, UsageError
from torchstone.models.decoder import Decoder, DecoderConfig, LayerSpec
from torchstone.models.execution import ExecutionOptions, apply_activation_checkpointing, compile_decoder
from torchstone.models.model import Model
from torchstone.observe.console import Console
from torchstone.observe.metrics import read_metrics
from torchstone.optim.build import build_optimizer
from torchstone.parallel.build import ModelBuilder, ShardedModelBuilder, build_runner
from torchstone.parallel.local_shards import TensorShard, local_shards
from torchstone.parallel.mesh import SINGLE_PROCESS, ParallelContext, init_distributed
from torchstone.parallel.runner import Runner
from torchstone.testing import launch_procs
from torchstone.training.run import Callback, Run
from torchstone.training.step import compute_gradients
from torchstone.training.tuning import build_projection, decompose, plan_tuning
from torchstone.tuning.osft import (
    OsftLinear,
    add_osft,
    frozen_basis,
    frozen_rank,
    is_decomposition,
    merge,
    singular_vectors,
    with_low_vectors,
)
from torchstone.tuning.plan import OsftPlan
from tuned import LAYOUTS, PROCESSES, assert_same_steps, make_fallback, run_steps, train_on_rank

Command = Callable[..., tuple[int, str, str]]
Settings = Callable[..., dict[str, Any]]
SHAPES = {"tall": (24, 10), "wide": (10, 24), "square": (12, 12)}
SIZES = {"width": 24, "heads": 4, "kv_heads": 2, "head_dim": 6, "mlp_width": 40}
FAMILIES = {"llama": "tied", "qwen3": "head size", "granite": "multipliers"}


def random_weight(shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
class TestSubspaces:
    def test_both_parts_make_the_weight(self, shape: tuple[int, int]) -> None:
        weight, frozen = random_weight(shape), 7
        vectors = singular_vectors(weight).double()
        basis = frozen_basis(weight, vectors, frozen).double()
        tall = weight.t() if shape[0] < shape[1] else weight
        p = vectors[:, frozen:].t()
        high, low = basis @ (basis.t() @ tall), tall @ p.t() @ p
        assert (high + low - tall).norm() <= 1e-6 * tall.norm()
        values = torch.linalg.svdvals(weight)
        assert torch.linalg.svdvals(high)[:frozen] == pytest.approx(values[:frozen], rel=1e-6)
        assert torch.linalg.svdvals(low)[: len(p)] == pytest.approx(values[frozen:], rel=1e-5)
        assert (basis.t() @ low).abs().max() <= 1e-6
        assert (p @ p.t() - torch.eye(len(p))).abs().max() <= 1e-6

    def test_vectors_of_another_weight_are_noticed(self, shape: tuple[int, int]) -> None:
        weight = random_weight(shape)
        vectors = singular_vectors(weight)
        assert is_decomposition(weight, vectors)
        changed = weight.clone()
        changed[3, 3] += 0.01
        assert not is_decomposition(changed, vectors)
        assert not is_decomposition(weight, vectors * 1.001)

    def test_their_signs_are_decided(self, shape: tuple[int, int]) -> None:
        vectors = singular_vectors(random_weight(shape))
        assert (vectors.amax(0) == vectors.abs().amax(0)).all()

    def test_p_decides_what_is_frozen(self, shape: tuple[int, int]) -> None:
        """Among equal singular values any basis is one of singular vectors."""
        u, _, vh = torch.linalg.svd(random_weight(shape), full_matrices=False)
        weight, size = u @ vh, min(shape)
        rotation = torch.linalg.qr(random_weight((size, size))).Q
        vectors = singular_vectors(weight)
        others = (vectors.double() @ rotation).float()
        assert is_decomposition(weight, vectors)
        assert is_decomposition(weight, others)
        p = vectors[:, 7:].t()
        bases = [frozen_basis(weight, each, 7) for each in (vectors, others, with_low_vectors(others, p))]
        expected, other, actual = (basis @ basis.t() for basis in bases)
        assert (other - expected).norm() > 0.5
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)

    def test_gradients_are_those_of_the_dense_weight(self, shape: tuple[int, int]) -> None:
        linear = nn.Linear(shape[1], shape[0], dtype=torch.float64)
        add_osft(linear_in := nn.Sequential(linear), {"0": 4})
        (factors,) = linear.adapters.values()
        for parameter in factors.parameters():
            nn.init.normal_(parameter)
        linear.weight.requires_grad_(False)
        x = torch.randn(2, 5, shape[1], dtype=torch.float64, requires_grad=True)
        target = torch.randn(2, 5, shape[0], dtype=torch.float64)
        inputs = (x, factors.osft_Z, linear.bias)
        assert isinstance(linear, OsftLinear)
        assert linear.weight.shape == shape
        dense = merge(linear.weight, factors.osft_Z, factors.osft_P, factors.is_wide)
        expected = torch.autograd.grad((nn.functional.linear(x, dense, linear.bias) * target).sum(), inputs)
        actual = torch.autograd.grad((linear_in(x) * target).sum(), inputs)
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_what_is_trained_is_counted(tmp_path: Path) -> None:
    """For the line at the start of a run."""
    folder = make_model(tmp_path / "llama", "llama", "grouped")
    plan = plan_for(folder, 0.25)
    model = load_tuned(folder, plan)
    factors, others = 0, 0
    for name, parameter in model.trained_parameters():
        factors, others = factors + parameter.numel() * (".adapters." in name), others + parameter.numel()
    text = f"OSFT of 0.25 of the ranks of {7 * 3} linears"
    counts = plan.count_parameters({name: tuple(p.shape) for name, p in model.named_parameters()})
    assert counts == {text: factors, "other parameters": others - factors}


def test_how_many_directions_are_frozen() -> None:
    assert [frozen_rank((24, 10), ratio) for ratio in (0.0, 0.25, 0.99, 1.0)] == [10, 7, 0, 0]
    # In floating point, 2560 * (1 - 0.9) is less than 256.
    assert [frozen_rank((2560, 9728), ratio) for ratio in (0.9, 0.3, 1e-9, 0.999999)] == [256, 1792, 2559, 0]


@pytest.mark.parametrize("backend", [None, "aot_eager_decomp_partition"], ids=["eager", "compiled"])
def test_full_recomputation_keeps_nothing_but_the_input_of_a_block(backend: str | None) -> None:
    """A compiled autograd.Function kept its output."""
    torch._dynamo.reset()
    decoder = Decoder(DecoderConfig(vocab_size=50, layers=(LayerSpec(),), **SIZES))
    add_osft(decoder, {name: 4 for name, module in decoder.layers.named_modules(prefix="layers") if is_linear(module)})
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(name.endswith("osft_Z"))
    apply_activation_checkpointing(decoder, "full")
    if backend is not None:
        compile_decoder(decoder, "block", backend, has_fixed_length=True)
    block, x = decoder.layers["0"], torch.randn(2, 32, 24, requires_grad=True)
    inputs = decoder.build_layer_inputs(torch.arange(32).expand(2, 32), None)[0]
    known = {tensor.untyped_storage().data_ptr() for tensor in (x, *block.parameters(), *inputs.cos_sin)}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = block(x, inputs)
    assert out.requires_grad
    # What else there may be is the state of the random generator, as integers.
    floats = [tensor for tensor in kept if tensor.is_floating_point() and tensor.numel()]
    assert not [tensor.shape for tensor in floats if tensor.untyped_storage().data_ptr() not in known]


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def plan_for(folder: Path, ratio: float = 0.25, **settings: Any) -> OsftPlan:
    """The rest is trained as well."""
    values = {"model.path": str(folder), "tuning.method": "osft", "tuning.unfreeze_rank_ratio": ratio}
    values |= {"tuning.osft_train_rest": True}
    config = load_config(overrides=values | {"data.path": "x", "output_dir": "x"} | settings)
    plan = plan_tuning(config, folder, None, ExecutionOptions(), torch.device("cpu"))
    assert isinstance(plan, OsftPlan)
    return plan


def load_tuned(folder: Path, plan: OsftPlan, ctx: ParallelContext = SINGLE_PROCESS, **options: Any) -> Model:
    decompose(plan, CPU, ctx, Console("quiet"))
    return load_model(folder, CPU, tuning=plan, **options)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_it_starts_from_the_model_to_the_last_bit(family: str, tmp_path: Path) -> None:
    """In bf16, with biases."""
    folder = make_model(tmp_path / family, family)
    builder = ModelBuilder(CPU, torch.float32, torch.bfloat16)
    model = load_tuned(folder, plan_for(folder), builder=builder)
    build_runner(model, builder, packed=True)
    ids = torch.randint(3, 40, (2, 12), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(12).expand_as(ids)
    expected = load_model(folder, CPU, torch.bfloat16).module(ids, positions)
    assert torch.equal(model.module(ids, positions), expected)


class OsftReference(parity.Reference):
    """Transformers whose linears are W_high + Z V_low^T (or U_low Z^T), by torch.linalg.svd; Z has all of W_low.

    Gradients are projected before they are clipped, and Z after the step.
    """

    def __init__(self, folder: Path, ratio: float) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.frozen: list[tuple[nn.Parameter, Tensor]] = []
        for name, linear in list(model.named_modules()):
            if isinstance(linear, nn.Linear) and ".layers." in name:
                part = _LowPart(linear.weight.detach(), ratio)
                parametrize.register_parametrization(linear, "weight", part)
                self.frozen.append((linear.parametrizations.weight.original, part.frozen))
        settings = {key: parity.FREE_RUNNING[key] for key in ("lr", "betas", "eps")}
        super().__init__(model, parity.reference_adamw(model, WEIGHT_DECAY, **settings), MAX_NORM)

    @torch.no_grad()
    def before_clipping(self) -> None:
        for parameter, frozen in self.frozen:
            parameter.grad -= frozen @ (frozen.t() @ parameter.grad)

    @torch.no_grad()
    def after_update(self) -> None:
        for parameter, frozen in self.frozen:
            parameter -= frozen @ (frozen.t() @ parameter)

    def weights(self) -> dict[str, Tensor]:
        names = [name for name, _ in self.model.named_parameters()]
        weights = {name.replace("parametrizations.weight.original", "weight") for name in names}
        return {name: self._get(name).detach().clone() for name in weights}

    def _get(self, name: str) -> Tensor:
        module, _, attribute = name.rpartition(".")
        return getattr(self.model.get_submodule(module), attribute)


class _LowPart(nn.Module):
    def __init__(self, weight: Tensor, ratio: float) -> None:
        super().__init__()
        u, s, vh = torch.linalg.svd(weight.double(), full_matrices=False)
        k = int(len(s) * (1 - ratio))
        self.high = (u[:, :k] @ s[:k].diag() @ vh[:k]).float()
        self.is_wide = weight.shape[0] < weight.shape[1]
        # Below, `p` and `frozen` are V_low and U_high, or U_low and V_high.
        self.p, self.frozen = (u[:, k:], vh[:k].t()) if self.is_wide else (vh[k:].t(), u[:, :k])
        self.p, self.frozen = self.p.float(), self.frozen.float()

    def right_inverse(self, weight: Tensor) -> Tensor:
        return (weight.t() if self.is_wide else weight) @ self.p

    def forward(self, z: Tensor) -> Tensor:
        low = z @ self.p.t()
        return self.high + (low.t() if self.is_wide else low)


class OsftSide:
    """Our step on the protocol's micro-batches."""

    def __init__(self, folder: Path, ratio: float) -> None:
        plan = plan_for(folder, ratio)
        self.model, settings = load_tuned(folder, plan), parity.FREE_RUNNING
        self.lr = settings["lr"]
        optim = OptimConfig(
            learning_rate=self.lr, betas=settings["betas"], eps=settings["eps"], weight_decay=WEIGHT_DECAY
        )
        self.optimizer = build_optimizer(self.model.trained_parameters(), optim, self.model.parameter_kinds())
        self.runner = Runner(self.model, CPU, True)
        self.runner.projection = build_projection(plan, self.model, CPU, has_decay=True)

    def step(self, micro_batches: parity.MicroBatches) -> parity.StepValues:
        result = train_step(self.runner, self.optimizer, make_batch(micro_batches), 1, self.lr, MAX_NORM)
        return parity.StepValues(result.loss, result.grad_norm, {})

    def weights(self) -> dict[str, Tensor]:
        return dense_weights(self.model)


@torch.no_grad()
def dense_weights(model: Model) -> dict[str, Tensor]:
    """By Hugging Face name, in fp64 where something is merged."""
    tensors = {name: p.detach() for name, p in model.named_parameters() if ".adapters." not in name}
    for name, linear in model.module.named_modules():
        if isinstance(linear, OsftLinear):
            (factors,) = linear.adapters.values()
            values = [p.double() for p in (linear.weight, factors.osft_Z, factors.osft_P)]
            tensors[f"{name}.weight"] = merge(*values, factors.is_wide)
    names = WEIGHT_NAMES[model.hf_config["model_type"]]
    return {next(iter(names.stored_tensors([name]))): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_a_plain_loop(family: str, tmp_path: Path) -> None:
    """Losses, norms and dense weights, with weight decay and clipping."""
    folder = make_model(tmp_path / family, family, FAMILIES[family])
    reference, ours = OsftReference(folder, 0.25), OsftSide(folder, 0.25)
    steps = parity.random_batches(10, reference.model.config.vocab_size, seed=0)
    norms = []
    for batches in steps:
        expected, actual = reference.step(batches), ours.step(batches)
        assert actual.loss == pytest.approx(expected.loss, rel=2e-6)
        assert actual.grad_norm == pytest.approx(expected.grad_norm, rel=5e-6)
        norms.append(actual.grad_norm)
    assert max(norms) > MAX_NORM, "nothing is clipped"
    weights = ours.weights()
    for name, weight in reference.weights().items():
        assert (weights[name] - weight).norm() <= 5e-6 * weight.norm(), name


class TestFrozenDirections:
    @pytest.mark.parametrize(
        ("precision", "split_bf16"),
        [("fp32", False), ("bf16", True), pytest.param("bf16", False, marks=the_rest)],
    )
    def test_stay_as_they_are_for_200_steps(self, precision: str, split_bf16: bool, tmp_path: Path) -> None:
        folder = make_model(tmp_path / "llama", "llama", "tied")
        file = folder / "model.safetensors"
        # Frozen weights have the dtype that is computed in.
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
        plan = plan_for(folder, 0.25)
        decompose(plan, CPU, SINGLE_PROCESS, Console("quiet"))
        builder = ModelBuilder(CPU, torch.float32, dtype)
        model = load_model(folder, CPU, tuning=plan, builder=builder)
        runner = build_runner(model, builder, packed=True)
        # As on a GPU.
        runner.projection = build_projection(plan, model, CPU, True, split_bf16)
        optim = OptimConfig(learning_rate=3e-3, weight_decay=0.1)
        copies = None if model.master_weights is None else model.master_weights.copies
        optimizer = build_optimizer(model.trained_parameters(), optim, model.parameter_kinds(), copies=copies)
        before, moved = self._weights(model), 0.0
        (batches,) = parity.random_batches(1, 40, seed=0)
        for step in range(1, 201):
            train_step(runner, optimizer, make_batch(batches), step, 3e-3, MAX_NORM)
        after = self._weights(model)
        for name, weight in before.items():
            u, s, vh = torch.linalg.svd(weight, full_matrices=False)
            k = frozen_rank(weight.shape, 0.25)
            u, vh, change = u[:, :k], vh[:k], after[name] - weight
            moved = max(moved, (change.norm() / weight.norm()).item())
            assert (u.t() @ change @ vh.t()).norm() <= 1e-6 * s[:k].norm(), name
            # One of both comes from the projection, the other from P.
            assert (u.t() @ change).norm() <= 1e-4 * change.norm(), name
            assert (change @ vh.t()).norm() <= 1e-4 * change.norm(), name
        assert moved > 0.1, "the rest is trained"
        errors = [runner.projection.measure(index).item() for index in range(len(runner.projection.bases))]
        assert 0 < max(errors) < (2e-5 if split_bf16 else 1e-6)

    def _weights(self, model: Model) -> dict[str, Tensor]:
        parameters = {name: p.detach().double() for name, p in model.named_parameters()}
        result = {}
        for name, z in parameters.items():
            if name.endswith("osft_Z"):
                linear = name.partition(".adapters.")[0]
                weight = parameters[f"{linear}.weight"]
                p = parameters[name.replace("osft_Z", "osft_P")]
                result[linear] = merge(weight, z, p, weight.shape[0] < weight.shape[1])
        return result

    def test_projected_gradients_are_orthogonal(self, tmp_path: Path) -> None:
        folder = make_model(tmp_path / "llama", "llama", "tied")
        ours = OsftSide(folder, 0.25)
        (batches,) = parity.random_batches(1, 40, seed=0)
        projection = ours.runner.projection
        assert projection is not None
        ours.runner.projection = None
        compute_gradients(ours.runner, make_batch(batches), 1)

        def share_inside() -> float:
            shares = [((b.t() @ z.grad).norm() / z.grad.norm()).item() for z, b, _ in projection.bases]
            return max(shares)

        assert share_inside() > 0.3
        projection.project_gradients()
        assert share_inside() < 1e-4


def train_in_layouts(layouts: list[dict[str, Any]], folder: str, steps: Any) -> list[dict[str, Any]]:
    results = []
    for parallel in layouts:
        config = ParallelConfig(**parallel)
        with init_distributed(config, CPU, mesh_of_one=True) as ctx:
            builder, plan = ShardedModelBuilder(ctx, config, "fp32", CPU), plan_for(Path(folder))
            execution = ExecutionOptions(tp=ctx.dims.tp)
            model = load_tuned(Path(folder), plan, ctx, execution=execution, builder=builder)
            runner = build_runner(model, builder, packed=True)
            runner.projection = build_projection(plan, model, CPU, has_decay=True)
            results.append(run_steps(runner, steps))
    return results


@pytest.mark.parametrize("processes", PROCESSES)
def test_every_layout_computes_the_same(processes: int, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "llama", "llama", "tied", num_hidden_layers=4)
    steps, plan = parity.random_batches(2, 40, seed=0), plan_for(folder)
    model = load_tuned(folder, plan)
    runner = Runner(model, CPU, True)
    runner.projection = build_projection(plan, model, CPU, has_decay=True)
    expected = run_steps(runner, steps)
    ranks = launch_procs(train_in_layouts, processes, LAYOUTS[processes], str(folder), steps, timeout=300)
    assert_same_steps(ranks, expected, LAYOUTS[processes])


@pytest.fixture
def osft_settings(base_run: Path, settings: Settings) -> Settings:
    def make(**changes: Any) -> dict[str, Any]:
        osft = {"tuning__method": "osft", "tuning__osft_train_rest": True, "optim__learning_rate": 1e-2}
        values = settings(**(osft | changes))
        for key in ("model.depth", "model.width", "model.heads", "model.tokenizer"):
            del values[key]
        return {"model.path": str(base_run)} | values

    return make


def flip_signs(cache: Path) -> None:
    """Of every second singular vector."""
    for file in cache.rglob("*.safetensors"):
        ((name, vectors),) = load_file(file).items()
        vectors[::2] *= -1
        save_file({name: vectors}, file)


def train_on_machine(values: dict[str, Any], caches: list[Path]) -> None:
    """A run, and the same one in two parts. Each rank is a machine with its own cache."""
    cache = str(caches[int(os.environ["RANK"])])
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHSTONE_CACHE": cache}
    api.train(overrides=values | {"output_dir": f"{values['output_dir']}-whole"})
    parts = values | {"output_dir": f"{values['output_dir']}-parts"}
    api.train(overrides=parts, callbacks=[StopAt(3)])
    api.train(overrides=parts)


def train_and_return_shards(values: dict[str, Any]) -> list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]:
    """What this rank holds of that which is saved, at the end of a run."""
    held: list[TensorShard] = []

    class KeepShards(Callback):
        def on_end(self, run: Run) -> None:
            assert run.model.tuning is not None
            for name, parameter in run.model.named_parameters():
                if run.model.tuning.is_saved(name):
                    held.extend(local_shards(run.model.decoder_config, name, parameter.detach().clone()))

    api.train(overrides=values, callbacks=[KeepShards()])
    return [(shard.name, shard.shape, shard.offset, shard.tensor) for shard in held]


def assemble(shards: Iterable[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]) -> dict[str, Tensor]:
    """Whole tensors. Ranks that hold the same slice must have the same values."""
    tensors: dict[str, Tensor] = {}
    for name, shape, offset, values in shards:
        whole = tensors.setdefault(name, torch.full(shape, torch.nan))
        part = whole[tuple(slice(at, at + size) for at, size in zip(offset, values.shape, strict=True))]
        assert torch.equal(torch.where(part.isnan(), values, part), values), name
        part.copy_(values)
    assert not [name for name, tensor in tensors.items() if tensor.isnan().any()]
    return tensors


def losses_of(run: str | Path) -> list[float]:
    return [line["loss"] for line in read_metrics(Path(run) / "metrics.jsonl")]


class TestRuns:
    def test_it_starts_from_the_model_and_keeps_the_base(
        self, osft_settings: Settings, base_run: Path, tmp_path: Path
    ) -> None:
        before = (base_run / "model.safetensors").read_bytes()
        ids = torch.arange(12)[None]
        expected = load_model(base_run, CPU).module(ids, ids)
        first: list[Tensor] = []

        class KeepLogits(Callback):
            def on_start(self, run: Run) -> None:
                with torch.no_grad():
                    first.append(run.model.module(ids, ids))

        values = osft_settings(optim__weight_decay=0.1)
        checkpoint = api.train(overrides=values, callbacks=[KeepLogits()]).checkpoint
        assert checkpoint is not None
        assert torch.equal(first[0], expected)
        assert (base_run / "model.safetensors").read_bytes() == before
        lines = read_metrics(Path(values["output_dir"]) / "metrics.jsonl")
        assert all(0 < line["osft_error"] < 1e-6 for line in lines)
        exported = api.export(checkpoint, tmp_path / "model")
        assert exported["verified"]
        assert 0 < exported["merge_error"] < 1e-5
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        logits = load_model(checkpoint, CPU).module(ids, ids)
        torch.testing.assert_close(theirs(ids).logits, logits, rtol=0, atol=1e-5)
        assert (logits - expected).abs().max() > 0.1, "it is trained"

    def test_resume_is_exact(self, osft_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also with singular vectors of other signs, as another machine may compute them."""
        monkeypatch.setenv("TORCHSTONE_CACHE", str(tmp_path / "cache"))
        values = osft_settings(optim__weight_decay=0.1)
        whole, parts = ({**values, "output_dir": str(tmp_path / name)} for name in ("whole", "parts"))
        api.train(overrides=whole)
        api.train(overrides=parts, callbacks=[StopAt(3)])
        flip_signs(tmp_path / "cache")
        api.train(overrides=parts)
        assert_same_run(tmp_path / "whole", tmp_path / "parts", 6)

    def test_two_machines_with_other_vectors(
        self, osft_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All ranks take those of the first machine; and a run of two processes resumes exactly."""
        one, two = tmp_path / "one", tmp_path / "two"
        values = osft_settings(optim__weight_decay=0.1, observe__console="lines")
        monkeypatch.setenv("TORCHSTONE_CACHE", str(one))
        api.train(overrides=values)
        shutil.copytree(one, two)
        flip_signs(two)
        launch_procs(train_on_machine, 2, values | {"parallel.tp": 2}, [one, two], timeout=120)
        expected, whole, parts = (Path(values["output_dir"] + end) for end in ("", "-whole", "-parts"))
        assert (
            "all from the cache, 14 replaced by those of the first machine" in (whole / "logs/rank-0.log").read_text()
        )
        assert_same_run(whole, parts, 6)
        assert losses_of(whole) == pytest.approx(losses_of(expected), rel=1e-5)
        assert all(0 < line["osft_error"] < 1e-6 for line in read_metrics(whole / "metrics.jsonl"))

    @pytest.mark.parametrize("processes", [4, pytest.param(8, marks=the_rest)])
    def test_a_run_goes_on_in_another_layout(
        self,
        processes: int,
        osft_settings: Settings,
        base_run: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The ranks share the work of the decomposition, and the export has what they hold, bit for bit."""
        values = osft_settings(observe__console="lines")
        api.train(overrides=values | {"output_dir": str(tmp_path / "one")})
        many = values | {"output_dir": str(tmp_path / "many"), "training.batch_size": 4 // (processes // 4)}
        api.train(overrides=many | {"training.batch_size": 4}, callbacks=[StopAt(3)])
        monkeypatch.setenv("TORCHSTONE_CACHE", str(tmp_path / "cache"))
        layout = {"parallel.tp": 2, "parallel.pp": 2}
        ranks = launch_procs(train_and_return_shards, processes, many | layout, timeout=240)
        log = (tmp_path / "many/logs/rank-0.log").read_text()
        assert "singular vectors of 14 linears: 14 computed" in log
        assert losses_of(tmp_path / "many") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-5)
        assert api.export(tmp_path / "many", tmp_path / "model")["verified"]
        base, exported = (full_unfused_parameters(load_model(folder, CPU)) for folder in (base_run, tmp_path / "model"))
        held = assemble(shard for shards in ranks for shard in shards)
        trained = sum(tensor.numel() for name, tensor in held.items() if name.endswith("osft_Z"))
        assert f"OSFT of 0.25 of the ranks of 14 linears {trained / 1e6:.2f}M" in log
        for name, weight in base.items():
            linear = name.removesuffix(".weight")
            expected = held.get(name)
            if expected is None:
                z, p = (held.pop(f"{linear}.adapters.osft.osft_{kind}").double() for kind in "ZP")
                expected = merge(weight.double(), z, p, weight.shape[0] < weight.shape[1]).float()
            assert torch.equal(exported[name], expected), name
        assert held.keys() <= base.keys()

    def test_the_fallback_in_one_and_two_processes(self, settings: Settings, tmp_path: Path) -> None:
        folder = make_fallback(tmp_path / "neox")
        values = settings(
            tuning__method="osft", tuning__osft_train_rest=True, optim__learning_rate=1e-2, model__path=str(folder)
        )
        for key in ("model.depth", "model.width", "model.heads"):
            del values[key]
        api.train(overrides=values)
        runs = [values["output_dir"], str(tmp_path / "shards"), str(tmp_path / "replicas")]
        layouts = [{"output_dir": runs[1]}, {"output_dir": runs[2], "parallel.dp_replicate": 2}]
        two = [values | {"training.batch_size": 2} | layout for layout in layouts]
        launch_procs(train_on_rank, 2, *two, timeout=120)
        results = [api.export(run, tmp_path / f"model-{number}") for number, run in enumerate(runs)]
        assert all(result["verified"] for result in results)
        weights = [load_file(tmp_path / f"model-{number}/model.safetensors") for number in range(3)]
        base = load_file(folder / "model.safetensors")
        for run in runs[1:]:
            assert losses_of(run) == pytest.approx(losses_of(runs[0]), rel=1e-5)
        for name, weight in base.items():
            for other in weights[1:]:
                torch.testing.assert_close(weights[0][name], other[name], rtol=0, atol=2e-5)
            k = frozen_rank(weight.shape, 0.25) if weight.dim() == 2 else 0
            if ".layers." in name and k:
                u = torch.linalg.svd(weight.double()).U[:, :k]
                change = (weights[0][name] - weight).double()
                assert change.norm() > 0
                assert (u.t() @ change).norm() <= 1e-4 * change.norm(), name

    def test_a_change_of_frozen_directions_ends_the_run(self, osft_settings: Settings) -> None:
        class ChangeFrozen(Callback):
            def on_step(self, run: Run, metrics: dict[str, Any]) -> None:
                assert run.runner.projection is not None
                for parameter, basis, _ in run.runner.projection.bases:
                    parameter.data += 1e-2 * parameter.norm() * basis[:, :1]

        with pytest.raises(NumericalError, match=r"step 2: osft_error is .*: frozen directions have changed"):
            api.train(overrides=osft_settings(), callbacks=[ChangeFrozen()])

    def test_one_trains_everything(self, osft_settings: Settings) -> None:
        values = osft_settings(optim__weight_decay=0.1)
        full = {key: value for key, value in values.items() if not key.startswith("tuning.")}
        api.train(overrides=full)
        half = values | {"tuning.unfreeze_rank_ratio": 1.0, "output_dir": f"{values['output_dir']}-osft"}
        api.train(overrides=half)
        assert losses_of(half["output_dir"]) == losses_of(full["output_dir"])
        models = [load_model(Path(v["output_dir"]) / "checkpoints/step-00000006", CPU) for v in (full, half)]
        expected, weights = (full_unfused_parameters(model) for model in models)
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())

    def test_zero_trains_nothing_of_the_targets(self, osft_settings: Settings, base_run: Path) -> None:
        values = osft_settings(tuning__unfreeze_rank_ratio=0.0)
        result = api.train(overrides=values)
        assert result.checkpoint is not None
        models = [load_model(folder, CPU) for folder in (base_run, result.checkpoint)]
        before, after = (full_unfused_parameters(model) for model in models)
        changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
        targets = {name for name, tensor in before.items() if name.startswith("layers.") and tensor.dim() == 2}
        assert changed == before.keys() - targets
        with pytest.raises(UsageError, match=r"unfreeze_rank_ratio 0 trains nothing of the targets"):
            api.train(overrides=values | {"tuning.osft_train_rest": False, "output_dir": values["output_dir"] + "-2"})

    def test_targets_are_chosen_by_name(self, osft_settings: Settings, base_run: Path) -> None:
        values = osft_settings(tuning__osft_targets=["q_proj", "down_proj"], tuning__osft_train_rest=False)
        checkpoint = api.train(overrides=values).checkpoint
        assert checkpoint is not None
        models = [load_model(folder, CPU) for folder in (base_run, checkpoint)]
        before, after = (full_unfused_parameters(model) for model in models)
        changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
        assert changed == {f"layers.{n}.{name}.weight" for n in (0, 1) for name in ("attention.wq", "mlp.down")}
        moments = {name.partition("/")[0] for name in load_file(checkpoint / "optimizer.safetensors")}
        assert len(moments) == 4, "moments only for what is trained"

    def test_one_task_after_the_other(self, osft_settings: Settings, tmp_path: Path) -> None:
        """The frozen directions of the second are those of the result of the first."""
        first = osft_settings()
        api.train(overrides=first)
        second = first | {"model.path": first["output_dir"], "output_dir": str(tmp_path / "second")}
        api.train(overrides=second, callbacks=[StopAt(3)])
        checkpoint = api.train(overrides=second).checkpoint
        assert checkpoint is not None
        models = [load_model(f, CPU) for f in (Path(first["output_dir"]) / "checkpoints/step-00000006", checkpoint)]
        before, after = (full_unfused_parameters(model) for model in models)
        for name, weight in before.items():
            if name.startswith("layers.") and weight.dim() == 2:
                change, k = (after[name] - weight).double(), frozen_rank(weight.shape, 0.25)
                u = torch.linalg.svd(weight.double(), full_matrices=False).U[:, :k]
                assert (u.t() @ change).norm() <= 1e-4 * change.norm(), name
        assert api.export(checkpoint, tmp_path / "model")["verified"]


def fallback_settings(settings: Settings, folder: Path, **changes: Any) -> dict[str, Any]:
    values = settings(**({"tuning__method": "osft", "model__path": str(folder)} | changes))
    for key in ("model.depth", "model.width", "model.heads"):
        del values[key]
    return values


class TestFallback:
    @pytest.mark.parametrize(
        "changes",
        [{"tuning__osft_train_rest": True}, {"tuning__method": "lora", "tuning__modules_to_save": ["embed_in"]}],
        ids=["osft", "lora"],
    )
    def test_training_starts_with_the_values_of_the_files(
        self, changes: dict[str, Any], settings: Settings, tmp_path: Path
    ) -> None:
        """Not with those rounded to the dtype that is computed in."""
        folder = make_fallback(tmp_path / "neox")
        changes = changes | {"training__precision": "bf16", "training__max_steps": 1, "optim__learning_rate": 0.0}
        api.train(overrides=fallback_settings(settings, folder, **changes))
        api.export(tmp_path / "run", tmp_path / "model", merge=changes.get("tuning__method") == "lora")
        before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "model"))
        assert not [name for name, weight in before.items() if not torch.equal(weight, after[name])]

    def test_files_without_the_prefix_of_the_model(self, settings: Settings, tmp_path: Path) -> None:
        folder = make_fallback(tmp_path / "bloom", "bloom", n_layer=2, n_head=4)
        weights = load_file(folder / "model.safetensors")
        short = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
        assert short.keys() != weights.keys()
        save_file(short, folder / "model.safetensors", {"format": "pt"})
        values = fallback_settings(settings, folder, data__packing=False, training__max_steps=2)
        api.train(overrides=values)
        assert api.export(values["output_dir"], tmp_path / "model")["verified"]
        after = load_file(tmp_path / "model/model.safetensors")
        changed = [name for name, weight in weights.items() if not torch.equal(weight, after[name])]
        assert changed == [name for name in weights if ".h." in name and weights[name].dim() == 2]

    def test_linears_that_are_computed_otherwise_are_refused(self, settings: Settings, tmp_path: Path) -> None:
        folder = make_fallback(tmp_path / "falcon", "falcon", num_hidden_layers=2, num_attention_heads=4)
        with pytest.raises(UsageError, match=r"OSFT cannot tune transformer.*: FalconLinear has a forward pass of its"):
            api.train(overrides=fallback_settings(settings, folder, data__packing=False))


class TestBaseModels:
    @pytest.mark.parametrize("method", ["osft", "lora"])
    def test_a_run_resumes_on_the_checkpoint_that_it_began_with(
        self, method: str, osft_settings: Settings, settings: Settings, tmp_path: Path
    ) -> None:
        """Its base run has a newer one by then."""
        base = settings(output_dir=str(tmp_path / "base"), training__max_steps=1)
        api.train(overrides=base)
        values = osft_settings(tuning__method=method, tuning__osft_train_rest=False)
        values["model.path"] = base["output_dir"]
        api.train(overrides=values, callbacks=[StopAt(3)])
        api.train(overrides=base | {"training.max_steps": 2})
        assert api.train(overrides=values).step == 6

    @pytest.mark.parametrize("method", ["osft", "lora"])
    def test_a_base_that_has_moved_is_named(
        self, method: str, osft_settings: Settings, base_run: Path, tmp_path: Path, torchstone: Command
    ) -> None:
        shutil.copytree(base_run, tmp_path / "base", ignore=shutil.ignore_patterns("manifest.json"))
        values = osft_settings(tuning__method=method, tuning__osft_train_rest=False, training__max_steps=2)
        api.train(overrides=values | {"model.path": str(tmp_path / "base")})
        (tmp_path / "base").rename(tmp_path / "moved")
        source, target = values["output_dir"], tmp_path / "model"
        with pytest.raises(UsageError, match=r"which does not exist\n.*torchstone export .* NEW --base FOLDER"):
            api.export(source, target)
        more = values | {"model.path": str(tmp_path / "moved"), "training.max_steps": 3}
        assert api.train(overrides=more | {"output_dir": shutil.copytree(source, tmp_path / "copy")}).step == 3
        merge = ["--merge"] if method == "lora" else []
        code, text, error = torchstone("export", source, target, "--base", tmp_path / "moved", "--json", *merge)
        assert code == 0, error
        assert json.loads(text)["verified"]
        with pytest.raises(CheckpointError, match=rf"^{re.escape(source)}.* was trained on other weights"):
            api.export(source, tmp_path / "other", base=target)
        with pytest.raises(UsageError, match="has a whole model, which needs no --base"):
            api.export(target, tmp_path / "other", base=target)
        if method == "lora":
            api.export(source, tmp_path / "adapter", base=tmp_path / "moved")
            config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
            assert config["base_model_name_or_path"] == str(tmp_path / "moved")

    def test_an_adapter_of_a_checkpoint_is_refused(self, osft_settings: Settings, tmp_path: Path) -> None:
        """No command could open it."""
        checkpoint = api.train(overrides=osft_settings(training__max_steps=1)).checkpoint
        values = osft_settings(tuning__method="lora", tuning__osft_train_rest=False) | {"model.path": str(checkpoint)}
        with pytest.raises(UsageError, match=r"is a checkpoint of OSFT, and an adapter needs .*\n.*torchstone export"):
            api.train(overrides=values | {"output_dir": str(tmp_path / "lora")})


class TestSingularVectors:
    def test_a_cache_that_cannot_be_written_is_named(
        self, osft_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("TORCHSTONE_CACHE", str(tmp_path / "file"))
        with pytest.raises(UsageError, match=r"singular vectors cannot be written to .*\n  set TORCHSTONE_CACHE"):
            api.train(overrides=osft_settings())

    def test_a_second_run_reads_them(
        self, osft_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TORCHSTONE_CACHE", str(tmp_path / "cache"))

        def train(name: str) -> str:
            values = osft_settings() | {"output_dir": str(tmp_path / name), "observe.console": "lines"}
            api.train(overrides=values)
            return (tmp_path / name / "logs/rank-0.log").read_text()

        assert "singular vectors of 14 linears: 14 computed" in train("first")
        (used,) = (tmp_path / "cache/osft").iterdir()
        unused, recent = (used.parent / name for name in ("unused", "recent"))
        for folder, days in ((used, 40), (unused, 40), (recent, 20)):
            folder.mkdir(exist_ok=True)
            os.utime(folder, (0, time.time() - days * 86400))
        log = train("second")
        assert "singular vectors of 14 linears: all from the cache" in log
        assert f"removed {unused}: no run has used these singular vectors for 30 days" in log
        assert {*used.parent.iterdir()} == {used, recent}
        assert losses_of(tmp_path / "first") == losses_of(tmp_path / "second")
        damaged, foreign, *_ = sorted((tmp_path / "cache/osft").glob("*/*.safetensors"))
        damaged.write_bytes(damaged.read_bytes()[:100])
        vectors = load_file(foreign)
        save_file({name: tensor.roll(1, dims=1) for name, tensor in vectors.items()}, foreign)
        assert "singular vectors of 14 linears: 2 computed" in train("third")
        assert losses_of(tmp_path / "first") == losses_of(tmp_path / "third")

    def test_a_base_that_has_changed_is_refused(self, osft_settings: Settings, base_run: Path, tmp_path: Path) -> None:
        base = tmp_path / "base"
        shutil.copytree(base_run, base, ignore=shutil.ignore_patterns("manifest.json"))
        values = osft_settings() | {"model.path": str(base)}
        api.train(overrides=values, callbacks=[StopAt(3)])
        weights = load_file(base / "model.safetensors")
        weights["model.norm.weight"][0] += 1
        save_file(weights, base / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match="was trained on other weights than those in"):
            api.train(overrides=values)
        with pytest.raises(CheckpointError, match="was trained on other weights than those in"):
            api.export(values["output_dir"], tmp_path / "model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tuning.osft_targets": ["w_proj"]}, "w_proj selects nothing"),
        ({"tuning.unfreeze_rank_ratio": 1.5}, "unfreeze_rank_ratio"),
        (
            {"tuning.method": "lora", "tuning.osft_train_rest": False, "tuning.unfreeze_rank_ratio": 0.5},
            "tuning.unfreeze_rank_ratio is for OSFT",
        ),
        ({"training.precision": "bf16-pure"}, "in bf16 nothing stays orthogonal"),
        ({"optim.name": "muon"}, "optim.name muon does not work with tuning.method osft"),
        (
            {"model.path": None, "model.tokenizer": "demo:tokenizer", "model.depth": 2},
            "tuning.method osft tunes an existing model",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str, osft_settings: Settings) -> None:
    with pytest.raises(UsageError, match=message):
        api.train(overrides=osft_settings() | changes)


def test_a_checkpoint_names_its_base(osft_settings: Settings, base_run: Path) -> None:
    checkpoint = api.train(overrides=osft_settings(training__max_steps=1)).checkpoint
    assert checkpoint is not None
    config = json.loads((checkpoint / "osft_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base_run)
    assert config["ranks"]["layers.0.attention.wq"] == 8

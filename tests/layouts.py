"""Both sides of a parity test in which our side runs on several processes.

The reference (Transformers and AdamW, one process) runs once, in the process of the test. It writes its weights and
moments before every step and its gradients and weights after it, as Hugging Face files. Each rank reads its own shards
of them: weights and moments to start a step from, gradients and weights to compare with. A rank returns sums of
squares, every shard counted on one rank; the sums over the ranks are the distances of parity.py.

Two more checks run on the way: a rank reads no byte that is not its own, and the files that the ranks save together
hold the same shards.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

import parity
import sides
from sides import MAX_NORM, WEIGHT_DECAY, batch_of_rank
from steps import train_step
from torchstone.checkpoint.model_folder import load_model, read_model_config
from torchstone.checkpoint.save import save_model
from torchstone.checkpoint.shard_files import WEIGHTS, ShardedFiles, shard_files
from torchstone.checkpoint.weight_files import WeightFiles, hf_tensors
from torchstone.checkpoint.weight_names import WEIGHT_NAMES
from torchstone.config.schema import OptimConfig, ParallelConfig
from torchstone.models.decoder import Decoder, Fusion
from torchstone.models.execution import ExecutionOptions
from torchstone.optim.build import build_optimizer, state_of
from torchstone.optim.muon import MOMENTUM
from torchstone.parallel.build import ShardedModelBuilder, build_runner, fill_parameters
from torchstone.parallel.local_shards import TensorShard, is_owner, local_shards
from torchstone.parallel.mesh import ParallelContext, init_distributed
from torchstone.parallel.projections import ShardedProjections
from torchstone.testing import launch_procs
from torchstone.training.step import StepResult

# The first step has no moments, so a second is locked as well. The last of the three micro-batches has no loss token:
# two data ranks get uneven work, and with four ranks one gets none.
LOCKED_STEPS, ACCUMULATION = 2, 3
# One length of rows: DTensor plans an operation anew for every shape.
WIDTH = 96
MOMENTS = ("exp_avg", "exp_avg_sq")
CPU = torch.device("cpu")

# What a rank holds of a tensor: its name, where the shard starts, and the values.
Shard = tuple[str, tuple[int, ...], Tensor]


@dataclass(frozen=True)
class Case:
    """A model and the parallel dimensions and switches to train it with."""

    name: str
    folder: str
    parallel: dict[str, Any] = field(default_factory=dict)
    fused: tuple[Fusion, ...] = ()
    packed: bool = True
    free_running: bool = True
    optimizer: Literal["adamw", "muon"] = "adamw"
    # Of the chunked loss; None for the loss of all logits.
    chunk_tokens: int | None = None


def load_reference(folder: Path, optimizer: str = "adamw") -> parity.Reference:
    # Not all attention kernels of Transformers implement soft caps.
    capped = json.loads((folder / "config.json").read_text()).get("attn_logit_softcapping")
    kernel = {"attn_implementation": "eager"} if capped else {}
    make_optimizer = parity.reference_adamw if optimizer == "adamw" else parity.ReferenceMuon
    return sides.load_reference(folder, make_optimizer=make_optimizer, **kernel)


def write_reference(folder: Path, target: Path, seed: int = 0, optimizer: str = "adamw") -> Path:
    """Runs the reference on the model in `folder` and writes its values before and after every step to `target`."""
    reference = load_reference(folder, optimizer)
    model, vocabulary = reference.model, reference.model.config.vocab_size
    steps = parity.random_batches(parity.FREE_RUNNING["steps"], vocabulary, seed, ACCUMULATION)
    results = []
    ids = torch.randint(vocabulary, (1, WIDTH), generator=torch.Generator().manual_seed(seed))
    target.mkdir()
    save_file({"ids": ids, "logits": model(ids).logits.detach()}, target / "logits.safetensors")
    for number, batches in enumerate(steps):
        step_folder = target / f"step-{number}"
        parameters = dict(model.named_parameters())
        _write({name: p.detach() for name, p in parameters.items()}, step_folder / "weights")
        for moment in (*MOMENTS, MOMENTUM) if number else ():
            # Zeros where a parameter has no such moment.
            states = {name: reference.optimizer.state[p].get(moment) for name, p in parameters.items()}
            moments = {name: torch.zeros_like(parameters[name]) if s is None else s for name, s in states.items()}
            _write(moments, step_folder / moment)
        result = reference.step(batches)
        _write(result.gradients, step_folder / "gradients")
        results.append({"loss": result.loss, "grad_norm": result.grad_norm})
    _write({name: p.detach() for name, p in model.named_parameters()}, target / "end")
    (target / "reference.json").write_text(json.dumps({"steps": steps, "results": results}))
    return target


def _write(tensors: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


class ShardedSide:
    """Our side on one rank."""

    def __init__(self, case: Case, reference: Path, ctx: ParallelContext) -> None:
        self.case, self.reference, self.ctx = case, reference, ctx
        record = json.loads((reference / "reference.json").read_text())
        self.steps, self.results, self.settings = record["steps"], record["results"], parity.FREE_RUNNING
        parallel = ParallelConfig(**case.parallel)
        self.builder = ShardedModelBuilder(ctx, parallel, "fp32", CPU)
        loss = "full" if case.chunk_tokens is None else "chunked"
        execution = ExecutionOptions(packed=case.packed, fused=case.fused, loss=loss)
        self.model = load_model(Path(case.folder), CPU, execution=execution, builder=self.builder)
        for part in self.model.model_parts if case.chunk_tokens is not None else ():
            part.fused_loss = partial(part.fused_loss, chunk_tokens=case.chunk_tokens)
        self.runner = build_runner(self.model, self.builder, case.packed)
        optim = OptimConfig(
            learning_rate=self.settings["lr"], betas=self.settings["betas"], eps=self.settings["eps"],
            weight_decay=WEIGHT_DECAY, name=case.optimizer,
        )  # fmt: skip
        exchange = ShardedProjections(self.model, ctx) if case.optimizer == "muon" else None
        self.optimizer = build_optimizer(self.model.named_parameters(), optim, self.model.parameter_kinds(), exchange)
        self.gradients: dict[str, Tensor] = {}
        self.optimizer.register_step_pre_hook(lambda *_: self._keep_gradients())

    def check(self, saved: Path) -> dict[str, Any]:
        """This rank's part of the differences; `assert_parity` adds up the ranks."""
        if self.ctx.is_main:
            (saved / "untrained").mkdir(parents=True)
            (saved / "trained").mkdir()
        self.ctx.barrier()
        save_model(self.model, saved / "untrained", self.ctx)
        result = {
            "logits": self._logits_difference(),
            "locked": [self._locked_step(number) for number in range(LOCKED_STEPS)],
            "free": self.free_run() if self.case.free_running else {"loss": 0.0, "weights": {}},
        }
        save_model(self.model, saved / "trained", self.ctx)
        result["shards"] = [(shard.name, shard.offset, shard.tensor.clone()) for shard in self._shards()]
        return result

    def step(self, number: int) -> StepResult:
        batch = batch_of_rank(self.steps[number], self.ctx, self.case.packed, math.lcm(WIDTH, self.ctx.dims.tp))
        return train_step(self.runner, self.optimizer, batch, 1, self.settings["lr"], MAX_NORM)

    def _locked_step(self, number: int) -> dict[str, Any]:
        step_folder = self.reference / f"step-{number}"
        files = self._files(step_folder / "weights")
        fill_parameters(self.model.model_parts, files)
        assert files.bytes_read == sum(shard.tensor.nbytes for shard in self._shards()), "not the bytes of its shards"
        self.optimizer.state.clear()
        if number:
            self._set_moments(step_folder, number)
        result, expected = self.step(number), self.results[number]
        return {
            "loss": parity.relative(result.loss, expected["loss"]),
            "weights": self._weight_differences(self.reference / f"step-{number + 1}" / "weights"),
            "norm": parity.relative(result.grad_norm, expected["grad_norm"]),
            "gradients": self._squares(self.gradients, self._files(step_folder / "gradients")),
        }

    def free_run(self) -> dict[str, Any]:
        fill_parameters(self.model.model_parts, self._files(self.reference / "step-0" / "weights"))
        self.optimizer.state.clear()
        losses = [
            parity.relative(self.step(number).loss, self.results[number]["loss"]) for number in range(len(self.steps))
        ]
        return {"loss": max(losses), "weights": self._weight_differences(self.reference / "end")}

    def _weight_differences(self, folder: Path) -> dict[str, float]:
        expected, largest = self._files(folder), parity.Differences()
        for shard in self._shards():
            largest.see("weight", (shard.tensor - _read_like(expected, shard)).abs().max().item(), shard.name)
        return {name: value for (_, name), value in largest.largest.items()}

    def _logits_difference(self) -> float:
        try:
            return self._logits()
        finally:
            self.runner.reshard()

    @torch.no_grad()
    def _logits(self) -> float:
        """The difference of the untrained model's logits, computed stage by stage; zero on ranks without logits."""
        saved = load_file(self.reference / "logits.safetensors")
        x, positions = saved["ids"], torch.arange(saved["ids"].shape[1]).expand_as(saved["ids"])
        if not self.builder.stage_modules:
            return _relative_difference(self.model.module(x, positions), saved["logits"])
        mesh, total = self.ctx.mesh["pp"], self.runner.pipeline.num_stages
        worst = 0.0
        for index in range(total):
            stage = self.builder.stage_modules.get(index)
            if stage is not None:
                loss, stage.micro_batch_loss = (
                    stage.micro_batch_loss,
                    lambda module, x, positions, *_, **__: module(x, positions),
                )
                x = stage(x, positions, positions)
                stage.micro_batch_loss = loss
                if index == total - 1:
                    worst = _relative_difference(x[0], saved["logits"])
            if index < total - 1:
                rows, width = saved["ids"].shape
                width //= self.runner.pipeline.sequence_shards
                x = x if stage is not None else torch.empty(rows, width, self.model.module.config.width)
                dist.broadcast(x, group=mesh.get_group(), group_src=index % mesh.size())
        return worst

    def _set_moments(self, step_folder: Path, number: int) -> None:
        files = {moment: self._files(step_folder / moment) for moment in (*MOMENTS, MOMENTUM)}
        for name, parameter in self.model.named_parameters():
            keys = state_of(self.optimizer, parameter)
            state: dict[str, Tensor] = {key: torch.tensor(float(number)) for key in keys.scalars}
            for moment in keys.moments:
                state[moment] = torch.zeros_like(parameter)
                for shard in local_shards(self.model.decoder_config, name, state[moment]):
                    files[moment].read_into(shard.name, shard.tensor, shard.offset)
            self.optimizer.state[parameter] = state

    def _keep_gradients(self) -> None:
        self.gradients = {name: p.grad.detach().clone() for name, p in self.model.named_parameters()}

    def _squares(self, tensors: dict[str, Tensor], expected: WeightFiles) -> dict[str, tuple[float, float]]:
        """By name of the unfused parameter, where this rank is the owner: the sums of squares of the difference and of
        the expected gradient."""
        squares: dict[str, tuple[float, float]] = {}
        config = self.model.decoder_config
        for name, tensor in tensors.items():
            if not is_owner(config, name, tensor):
                continue
            for shard in local_shards(config, name, tensor):
                values = _read_like(expected, shard)
                difference, size = squares.get(shard.name, (0.0, 0.0))
                difference += (shard.tensor - values).double().square().sum().item()
                squares[shard.name] = difference, size + values.double().square().sum().item()
        return squares

    def _shards(self) -> list[TensorShard]:
        config = self.model.decoder_config
        return [shard for name, p in self.model.named_parameters() for shard in local_shards(config, name, p.detach())]

    def _files(self, folder: Path) -> WeightFiles:
        return _open_files(folder, Path(self.case.folder))


def _open_files(folder: Path, model: Path) -> WeightFiles:
    """Tensors by Hugging Face name, to be read by the names of the unfused parameters of `model`."""
    hf_config, _, config = read_model_config(model)
    with torch.device("meta"):
        return WeightFiles(folder, WEIGHT_NAMES[hf_config["model_type"]], Decoder(config))


def check_layouts(cases: Sequence[Case], world_size: int, root: Path) -> dict[str, dict[str, float]]:
    """Checks the cases in one launch. Returns the largest difference of each kind, by case."""
    references = {(case.folder, case.optimizer): str(reference_of(Path(case.folder), case.optimizer)) for case in cases}
    saved = Path(tempfile.mkdtemp(dir=root))
    ranks = launch_procs(check_cases, world_size, cases, references, str(saved), timeout=300)
    return {
        case.name: assert_parity(case, list(results), saved / case.name, Path(references[case.folder, case.optimizer]))
        for case, results in zip(cases, zip(*ranks, strict=True), strict=True)
    }


def reference_of(folder: Path, optimizer: str = "adamw") -> Path:
    """The reference's values for a model, written at first use beside the model."""
    target = folder.with_name(f"{folder.name}-reference-{optimizer}")
    return target if target.exists() else write_reference(folder, target, optimizer=optimizer)


def check_cases(cases: Sequence[Case], references: dict[tuple[str, str], str], saved: str) -> list[dict[str, Any]]:
    """One rank's results. Every case has its own mesh, on the same processes."""
    results = []
    for case in cases:
        with init_distributed(ParallelConfig(**case.parallel), CPU, mesh_of_one=True) as ctx:
            side = ShardedSide(case, Path(references[case.folder, case.optimizer]), ctx)
            results.append(side.check(Path(saved) / case.name))
    return results


def assert_parity(case: Case, results: list[dict[str, Any]], saved: Path, reference: Path) -> dict[str, float]:
    """Adds up all ranks' results for a case and checks them. Returns the largest difference of each kind."""
    locked, free = parity.Differences(), parity.Differences()
    for rank in results:
        locked.see("logits", rank["logits"])
        for step in rank["locked"]:
            locked.see("loss", step["loss"])
            locked.see("norm", step["norm"])
            _see_weights(locked, step["weights"])
        free.see("loss", rank["free"]["loss"])
        _see_weights(free, rank["free"]["weights"])
    for number in range(LOCKED_STEPS):
        _see_gradients(locked, [rank["locked"][number]["gradients"] for rank in results])
    folder, zeros = Path(case.folder), [name for kind, name in locked.largest if kind == "zero gradient"]
    limits = parity.LOCKED_LIMITS
    if case.optimizer == "muon":
        limits = limits | {"weight": parity.MUON_WEIGHT_LIMIT}
    locked.check(limits, lambda: _locked_rounding(case, reference, zeros), case.name)
    free.check(parity.FREE_LIMITS, lambda: free_rounding(folder, reference), case.name)
    _assert_files(case, results, saved)
    worst = {kind: locked.worst(kind) for kind in ("loss", "norm", "gradient")}
    return worst | {"weight": max(locked.worst("weight"), free.worst("weight"))}


def _see_weights(differences: parity.Differences, weights: dict[str, float]) -> None:
    for name, value in weights.items():
        differences.see("weight", value, name)


def _see_gradients(differences: parity.Differences, ranks: list[dict[str, tuple[float, float]]]) -> None:
    """One step's gradients. Those next to nothing beside the norm of all are zero by mathematics and hold rounding
    only, on both sides."""
    total: dict[str, tuple[float, float]] = {}
    for squares in ranks:
        for name, (difference, size) in squares.items():
            before = total.get(name, (0.0, 0.0))
            total[name] = before[0] + difference, before[1] + size
    all_squares = sum(size for _, size in total.values())
    for name, (difference, size) in total.items():
        if size <= parity.ZERO_LIMIT**2 * all_squares:
            # Half of it: both sides may have rounding of that size.
            differences.see("zero gradient", math.sqrt(difference / all_squares) / 2, name)
        else:
            differences.see("gradient", math.sqrt(difference / size), name)


def _locked_rounding(case: Case, reference: Path, zeros: list[str]) -> parity.Differences:
    folder = Path(case.folder)
    plain = load_reference(folder, case.optimizer)
    largest = parity.measure_rounding(plain, _steps(reference)[:LOCKED_STEPS], True, zeros, partial(_unfused, folder))
    logits = load_file(reference / "logits.safetensors")
    own = parity.logits_rounding(plain.model, logits["ids"]).worst("logits")
    largest.see("logits", own / max(1.0, logits["logits"].abs().max().item()))
    return largest


def free_rounding(folder: Path, reference: Path) -> parity.Differences:
    """The reference's own rounding in the free-running form, by the names of our unfused parameters."""
    plain = load_reference(folder)
    return parity.measure_rounding(plain, _steps(reference), False, rename=partial(_unfused, folder))


def _unfused(model: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by Hugging Face name as our unfused parameters: writes a file and reads it."""
    with tempfile.TemporaryDirectory() as folder:
        _write(tensors, Path(folder) / "tensors")
        files = _open_files(Path(folder) / "tensors", model)
        dtype = next(iter(tensors.values())).dtype
        parameters = {name: torch.empty(shape, dtype=dtype) for name, shape in files.shapes.items()}
        for name, parameter in parameters.items():
            files.read_into(name, parameter, (0,) * parameter.dim())
    return parameters


def _steps(reference: Path) -> list[parity.MicroBatches]:
    return json.loads((reference / "reference.json").read_text())["steps"]


def _assert_files(case: Case, results: list[dict[str, Any]], saved: Path) -> None:
    """The ranks' files together hold what the ranks held, and for the untrained model the file it came from."""
    hf_config, _, config = read_model_config(Path(case.folder))
    original = load_file(Path(case.folder) / "model.safetensors")
    untrained = hf_tensors(read_tensors(saved / "untrained"), WEIGHT_NAMES[hf_config["model_type"]])
    assert untrained.keys() == original.keys()
    assert all(torch.equal(untrained[name], original[name]) for name in original), case.name
    trained = read_tensors(saved / "trained")
    assert_shards_in([shard for rank in results for shard in rank["shards"]], trained, case.name)
    with torch.device("meta"):
        assert trained.keys() == Decoder(config).unfused_parameters().keys()


def assert_shards_in(shards: list[Shard], tensors: dict[str, Tensor], label: str) -> None:
    for name, offset, shard in shards:
        index = tuple(slice(at, at + size) for at, size in zip(offset, shard.shape, strict=True))
        assert torch.equal(tensors[name][index], shard), (label, name)


def read_tensors(folder: Path, kind: str = WEIGHTS) -> dict[str, Tensor]:
    """The tensors that the ranks' files of a checkpoint hold together."""
    files = ShardedFiles(shard_files(folder, kind))
    tensors = {name: torch.full(files.shape(name), math.nan, dtype=files.dtype(name)) for name in files.names}
    for name, tensor in tensors.items():
        files.read_into(name, tensor, (0,) * tensor.dim())
    return tensors


def _read_like(files: WeightFiles, shard: TensorShard) -> Tensor:
    values = torch.empty_like(shard.tensor)
    files.read_into(shard.name, values, shard.offset)
    return values


def _relative_difference(logits: Tensor, expected: Tensor) -> float:
    full = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return (full - expected).abs().max().item() / max(1.0, expected.abs().max().item())

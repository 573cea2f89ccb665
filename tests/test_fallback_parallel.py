"""The Transformers fallback on several processes: parity with one process, and checkpoints that load in any layout.

parity.py has the protocol and the limits. Every rank runs the reference by itself, takes its own shards of the
reference's weights and moments before every step, and compares full gradients and weights. Our names are Transformers'
names with the prefix `hf.`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

import parity
from selection import the_rest
from sides import MAX_NORM, WEIGHT_DECAY, batch_of_rank, load_reference
from steps import train_step
from tiny import write_rows
from tiny_families import SIZES, make_model
from torchstone import api
from torchstone.checkpoint.load import restore_optimizer
from torchstone.checkpoint.model_folder import load_model
from torchstone.checkpoint.save import save_checkpoint
from torchstone.config import load_config
from torchstone.config.schema import OptimConfig, ParallelConfig
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.demo.corpus import corpus_rows
from torchstone.errors import UsageError
from torchstone.models.execution import ExecutionOptions
from torchstone.models.model import Model
from torchstone.observe.metrics import read_metrics
from torchstone.optim.build import build_optimizer
from torchstone.parallel.build import ModelBuilder, ShardedModelBuilder, build_runner
from torchstone.parallel.local_shards import local_shards
from torchstone.parallel.mesh import ParallelContext, init_distributed
from torchstone.parallel.runner import Runner
from torchstone.testing import launch_procs
from torchstone.training.run import Callback, Run
from torchstone.training.step import StepResult

CPU = torch.device("cpu")
SETTINGS = {key: value for key, value in parity.FREE_RUNNING.items() if key != "steps"}
# Phi has biases, also on its head; Mixtral has experts in one tensor; Llama runs natively unless told otherwise.
DEPTH: dict[str, Any] = {"num_hidden_layers": 2}
PHI: dict[str, Any] = DEPTH | {"num_key_value_heads": 4}
MIXTRAL: dict[str, Any] = DEPTH | {"num_local_experts": 4, "num_experts_per_tok": 2}
ZEROS: list[dict[str, Any]] = [{"dp_shard": 2, "zero": zero} for zero in (1, 2, 3)]
HSDP = {"dp_replicate": 2, "dp_shard": 2}
LOCKED_STEPS = 2
MOMENTS = ("exp_avg", "exp_avg_sq")
PRELOADED = [f"transformers.models.{name}.modeling_{name}" for name in ("phi", "llama", "mixtral")]


@dataclass(frozen=True)
class Case:
    folder: str
    parallel: dict[str, Any] = field(default_factory=dict)
    packed: bool = True


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "phi": make_model(root / "phi", "phi", **PHI),
        "llama": make_model(root / "llama", "llama", "tied", **DEPTH),
        "mixtral": make_model(root / "mixtral", "mixtral", **MIXTRAL),
    }


def load_fallback(folder: Path, builder: ShardedModelBuilder, packed: bool) -> Model:
    model = load_model(folder, CPU, execution=ExecutionOptions("fallback", packed=packed), builder=builder)
    assert model.implementation == "fallback"
    return model


def make_optimizer(model: Model) -> torch.optim.Optimizer:
    optim = OptimConfig(
        learning_rate=SETTINGS["lr"], betas=SETTINGS["betas"], eps=SETTINGS["eps"], weight_decay=WEIGHT_DECAY
    )
    return build_optimizer(model.named_parameters(), optim, model.parameter_kinds())


def train_on(runner: Runner, optimizer: torch.optim.Optimizer, batches: parity.MicroBatches) -> StepResult:
    batch = batch_of_rank(batches, runner.ctx, runner.packed)
    return train_step(runner, optimizer, batch, 1, SETTINGS["lr"], MAX_NORM)


class FallbackSide:
    """Our side on one rank. It returns full gradients and weights by Transformers' names."""

    def __init__(self, case: Case, ctx: ParallelContext) -> None:
        builder = ShardedModelBuilder(ctx, ParallelConfig(**case.parallel), "fp32", CPU)
        self.model = load_fallback(Path(case.folder), builder, case.packed)
        self.runner, self.optimizer = build_runner(self.model, builder, case.packed), make_optimizer(self.model)
        self.gradients: dict[str, Tensor] = {}
        self.optimizer.register_step_pre_hook(lambda *_: self._keep_gradients())

    def step(self, batches: parity.MicroBatches) -> parity.StepValues:
        result = train_on(self.runner, self.optimizer, batches)
        return parity.StepValues(result.loss, result.grad_norm, self.gradients)

    def weights(self) -> dict[str, Tensor]:
        return {hf_name(name): full_tensor(parameter) for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def lock(self, reference: parity.Reference) -> None:
        """Copies our shards of the reference's weights and moments."""
        theirs = dict(reference.model.named_parameters())
        self.optimizer.state.clear()
        for name, parameter in self.model.named_parameters():
            their_parameter = theirs[hf_name(name)]
            self._take(name, parameter.detach(), their_parameter)
            state = reference.optimizer.state.get(their_parameter)
            if state:
                moments = {kind: torch.zeros_like(parameter) for kind in MOMENTS}
                for kind, moment in moments.items():
                    self._take(name, moment, state[kind])
                self.optimizer.state[parameter] = {"step": state["step"].clone(), **moments}

    def _take(self, name: str, tensor: Tensor, theirs: Tensor) -> None:
        for shard in local_shards(None, name, tensor):
            index = tuple(slice(at, at + size) for at, size in zip(shard.offset, shard.tensor.shape, strict=True))
            shard.tensor.copy_(theirs[index])

    def _keep_gradients(self) -> None:
        self.gradients = {hf_name(name): full_tensor(p.grad) for name, p in self.model.named_parameters()}


def hf_name(name: str) -> str:
    return name.removeprefix("hf.")


def check_cases(cases: list[Case]) -> None:
    for case in cases:
        reference = load_reference(Path(case.folder))
        steps = parity.random_batches(parity.FREE_RUNNING["steps"], reference.model.config.vocab_size, seed=0)
        with init_distributed(ParallelConfig(**case.parallel), CPU, mesh_of_one=True) as ctx:
            side = FallbackSide(case, ctx)
            parity.assert_step_locked(reference, side.step, side.lock, steps[:LOCKED_STEPS])
            reference = reference.restart()
            side.lock(reference)
            parity.assert_free_running(reference, side.step, side.weights, steps)


def check_parity(cases: list[Case], world_size: int) -> None:
    launch_procs(check_cases, world_size, cases, preload=PRELOADED)


class TestParity:
    """Step-locked and free-running, against Transformers in one process."""

    def test_two_ranks_equal_transformers(self, folders: dict[str, Path]) -> None:
        phi, llama, mixtral = map(str, folders.values())
        cases = [Case(phi, ZEROS[0]), Case(llama, ZEROS[1]), Case(llama, ZEROS[2], packed=False)]
        check_parity([*cases, Case(phi, {"dp_replicate": 2}, packed=False), Case(mixtral, ZEROS[2])], 2)

    @the_rest
    def test_two_ranks_equal_transformers_in_the_other_layouts(self, folders: dict[str, Path]) -> None:
        phi, llama, _ = map(str, folders.values())
        cases = [Case(llama, ZEROS[0], packed=False), Case(phi, ZEROS[1], packed=False)]
        check_parity([*cases, Case(phi, ZEROS[2]), Case(llama, {"dp_replicate": 2})], 2)

    @the_rest
    def test_two_replicas_of_two_shards_equal_transformers(self, folders: dict[str, Path]) -> None:
        check_parity([Case(str(folders["phi"]), HSDP), Case(str(folders["llama"]), HSDP, packed=False)], 4)


def test_tp_and_pp_are_refused_on_every_rank(folders: dict[str, Path]) -> None:
    message = "parallel.tp and parallel.pp need the native decoder, but this model runs in the Transformers fallback"
    assert launch_procs(refused_layouts, 2, folders["phi"], preload=PRELOADED) == [[message] * 2] * 2


def refused_layouts(folder: Path) -> list[str]:
    messages = []
    for dim in ("tp", "pp"):
        parallel = ParallelConfig(**{dim: 2})
        with init_distributed(parallel, CPU) as ctx, pytest.raises(UsageError) as error:
            load_fallback(folder, ShardedModelBuilder(ctx, parallel, "fp32", CPU), packed=False)
        messages.append(error.value.message)
    return messages


def test_a_checkpoint_of_two_ranks_loads_in_other_layouts_and_in_transformers(
    folders: dict[str, Path], tokenizer_dir: Path, tmp_path: Path
) -> None:
    models = [folders["phi"], folders["llama"]]
    saved, same = launch_procs(save_all, 2, models, tokenizer_dir, tmp_path, preload=PRELOADED)
    checkpoints = [tmp_path / folder.name / "step-00000002" for folder in models]
    loaded = [[resume(checkpoint, {}) for checkpoint in checkpoints]]
    loaded += launch_procs(resume_all, 4, checkpoints, HSDP, preload=PRELOADED)
    for number, checkpoint in enumerate(checkpoints):
        assert_same_state(same[number], saved[number])
        assert_transformers_loads(checkpoint, saved[number]["weights"], tied=models[number] == folders["llama"])
        for states in loaded:
            assert_same_state(states[number], saved[number])
            assert parity.relative(states[number]["next loss"], saved[number]["next loss"]) <= parity.LOSS_LIMIT


def assert_transformers_loads(checkpoint: Path, weights: dict[str, Tensor], tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(checkpoint))
    loaded = {f"hf.{name}": p.detach() for name, p in model.named_parameters()}
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied


def assert_same_state(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    for kind in ("weights", *MOMENTS, "step"):
        assert ours[kind].keys() == expected[kind].keys()
        for name, tensor in expected[kind].items():
            assert torch.equal(ours[kind][name], tensor), (kind, name)


def three_steps() -> list[parity.MicroBatches]:
    return parity.random_batches(3, SIZES["vocab_size"], seed=7)


def save_all(folders: list[Path], tokenizer_dir: Path, root: Path) -> list[dict[str, Any]]:
    return [train_and_save(folder, tokenizer_dir, root / folder.name) for folder in folders]


def resume_all(folders: list[Path], parallel: dict[str, Any]) -> list[dict[str, Any]]:
    return [resume(folder, parallel) for folder in folders]


def train_and_save(folder: Path, tokenizer_dir: Path, root: Path) -> dict[str, Any]:
    """Two steps on two ranks, a checkpoint, and one more step. Returns the saved state and the last loss."""
    parallel = ParallelConfig(dp_shard=2)
    with init_distributed(parallel, CPU) as ctx:
        builder = ShardedModelBuilder(ctx, parallel, "fp32", CPU)
        model = load_fallback(folder, builder, packed=True)
        runner, optimizer = build_runner(model, builder, packed=True), make_optimizer(model)
        *first, last = three_steps()
        for batches in first:
            train_on(runner, optimizer, batches)
        info = {"step": 2, "implementation": model.implementation}
        save_checkpoint(root, 2, model, load_tokenizer(tokenizer_dir), optimizer, info, ctx)
        return full_state(model, optimizer) | {"next loss": train_on(runner, optimizer, last).loss}


def resume(folder: Path, parallel: dict[str, Any]) -> dict[str, Any]:
    """The same of a checkpoint, which says that its model runs in the fallback."""
    config = ParallelConfig(**parallel)
    with init_distributed(config, CPU) as ctx:
        is_single = ctx.mesh is None
        builder = ModelBuilder(CPU, torch.float32) if is_single else ShardedModelBuilder(ctx, config, "fp32", CPU)
        model = load_model(folder, CPU, execution=ExecutionOptions(packed=True), builder=builder)
        runner, optimizer = build_runner(model, builder, packed=True), make_optimizer(model)
        restore_optimizer(folder, optimizer, model)
        return full_state(model, optimizer) | {"next loss": train_on(runner, optimizer, three_steps()[-1]).loss}


def full_state(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights, moments and step counts by name, unsharded."""
    parameters = dict(model.named_parameters())
    state = {"weights": {name: full_tensor(p) for name, p in parameters.items()}}
    for kind in (*MOMENTS, "step"):
        state[kind] = {name: full_tensor(optimizer.state[p][kind]) for name, p in parameters.items()}
    return state


def full_tensor(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class TestDropout:
    def test_ranks_drop_differently_and_a_resumed_run_drops_the_same(
        self, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        dropout = dict.fromkeys(("attention_dropout", "embd_pdrop", "resid_pdrop"), 0.2)
        folder = make_model(tmp_path / "phi", "phi", **PHI, **dropout, vocab_size=448)
        tokenizer.save(folder)
        overrides = {
            "model.path": str(folder), "data.path": str(write_rows(tmp_path / "text.jsonl", corpus_rows(40))),
            "data.context_length": 32, "data.cache_dir": str(tmp_path / "cache"), "training.max_steps": 4,
            "training.global_batch_size": 4, "optim.learning_rate": 1e-3, "observe.console": "quiet",
            "system.device": "cpu", "parallel.dp_shard": 2,
        }  # fmt: skip
        first, second = launch_procs(train_twice, 2, overrides, tmp_path, preload=PRELOADED)
        for dropped in (first, second):
            assert len(dropped["whole"]) == 4
            assert all(map(torch.equal, dropped["resumed"], dropped["whole"]))
        for here, there in zip(first["whole"], second["whole"], strict=True):
            # Each rank drops a fifth, and exactly one of two drops 2 x 0.2 x 0.8.
            assert here.float().mean() == pytest.approx(0.2, abs=0.05)
            assert (here != there).float().mean() == pytest.approx(0.32, abs=0.06)
        lines = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "resumed")]
        for one, other in zip(*lines, strict=True):
            assert (one["loss"], one["grad_norm"]) == (other["loss"], other["grad_norm"])
        end = "checkpoints/step-00000004"
        files = sorted(path.name for path in (tmp_path / "whole" / end).glob("*.safetensors"))
        kinds = ("optimizer", "random")
        assert files == sorted(
            ["model.safetensors", *(f"{kind}-{n:05d}.safetensors" for kind in kinds for n in (0, 1))]
        )
        for name in files:
            ours, expected = (load_file(tmp_path / run / end / name) for run in ("resumed", "whole"))
            assert ours.keys() == expected.keys()
            assert all(torch.equal(ours[key], expected[key]) for key in expected), name


class NoteDropout(Callback):
    """Notes which values the first dropout of every step drops. Stops the run after step `last`."""

    def __init__(self, last: int | None = None) -> None:
        self.last = last
        self.dropped: list[Tensor] = []
        self.is_new_step = True

    def on_start(self, run: Run) -> None:
        first = next(part for part in run.model.module.modules() if isinstance(part, torch.nn.Dropout) and part.p > 0)
        first.register_forward_hook(self._note)

    def on_step(self, run: Run, values: dict[str, Any]) -> None:
        self.is_new_step = True
        if values["step"] == self.last:
            run.stop("enough")

    def _note(self, module: Any, inputs: Any, output: Tensor) -> None:
        if self.is_new_step:
            self.dropped.append((output == 0).flatten()[:1024])
        self.is_new_step = False


def train_twice(overrides: dict[str, Any], root: Path) -> dict[str, list[Tensor]]:
    """One run without interruption, and one that is stopped and resumed."""
    whole, begin, end = NoteDropout(), NoteDropout(last=2), NoteDropout()
    for name, callback in (("whole", whole), ("resumed", begin), ("resumed", end)):
        api.train(load_config(overrides=overrides | {"output_dir": str(root / name)}), callbacks=[callback])
    assert len(begin.dropped) == len(end.dropped) == 2
    return {"whole": whole.dropped, "resumed": begin.dropped + end.dropped}

"""Models that run in Transformers, over several processes: the numbers of one, and checkpoints that load anywhere.

The protocol and its limits are parity.py's. The reference runs once, in the process of the test; the ranks get what it
had before every step, of which each takes its own rows, and give back whole gradients and weights to compare with it.
Names are Transformers' own on that side, and the same after `hf.` on ours.
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
from sides import MAX_NORM, WEIGHT_DECAY, collated
from tiny import write_rows
from tiny_families import SIZES, make_model
from torchstone import api
from torchstone.checkpoint.load import restore_optimizer
from torchstone.checkpoint.save import save_checkpoint
from torchstone.config import load_config
from torchstone.config.schema import OptimConfig, ParallelConfig
from torchstone.data.loader import StepBatch
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.demo.corpus import corpus_rows
from torchstone.errors import UsageError
from torchstone.models.execution import Execution
from torchstone.models.model import Model
from torchstone.models.opening import load_model
from torchstone.observe.metrics import read_metrics
from torchstone.optim.build import build_optimizer
from torchstone.parallel.build import SharedBuilder, runner_of
from torchstone.parallel.mesh import Place, opened
from torchstone.parallel.running import Runner
from torchstone.testing import launch_procs
from torchstone.training.loop import Callback, Run
from torchstone.training.step import StepResult, train_step

CPU = torch.device("cpu")
SETTINGS = {key: value for key, value in parity.FREE_RUNNING.items() if key != "steps"}
# Phi has biases, also on its head; Mixtral experts in one tensor; a Llama is native unless told otherwise.
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


def opened_model(folder: Path, builder: SharedBuilder | None, packed: bool) -> Model:
    model = load_model(folder, CPU, execution=Execution("fallback", packed=packed), builder=builder)
    assert model.implementation == "fallback"
    return model


def optimizer_of(model: Model) -> torch.optim.Optimizer:
    optim = OptimConfig(
        learning_rate=SETTINGS["lr"], betas=SETTINGS["betas"], eps=SETTINGS["eps"], weight_decay=WEIGHT_DECAY
    )
    return build_optimizer(model.named_parameters(), optim, model.roles())


def one_step(runner: Runner, optimizer: torch.optim.Optimizer, batches: parity.MicroBatches) -> StepResult:
    """Micro-batches are dealt out to the ranks in turn; all take the same number, of which some are empty."""
    place = runner.place
    mine = batches[place.data_rank :: place.data_ranks]
    mine += [[]] * (-(-len(batches) // place.data_ranks) - len(mine))
    count = sum(label != -100 for batch in batches for _, labels in batch for label in labels[1:])
    batch = StepBatch(collated(mine, runner.packed), 0, 0, loss_tokens=count, padding=0, first_sample=0)
    return train_step(runner, optimizer, batch, 1, SETTINGS["lr"], MAX_NORM)


@dataclass(frozen=True)
class Course:
    """What the reference had: before each step (weights, moments) and after it (loss, norm, gradients); and the end."""

    steps: list[parity.MicroBatches]
    before: list[dict[str, dict[str, Tensor]]]
    after: list[parity.StepNumbers]
    end: dict[str, Tensor]


def reference_course(folder: Path) -> Course:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    reference = parity.Reference(model, parity.reference_adamw(model, WEIGHT_DECAY, **SETTINGS), MAX_NORM)
    steps = parity.random_batches(parity.FREE_RUNNING["steps"], model.config.vocab_size, seed=0)
    named, state = dict(model.named_parameters()), reference.optimizer.state
    before, after = [], []
    for batches in steps:
        moments = {kind: {n: state[p][kind].clone() for n, p in named.items()} for kind in MOMENTS if state}
        before.append({"weights": {name: p.detach().clone() for name, p in named.items()}} | moments)
        after.append(reference.step(batches))
    return Course(steps, before, after, {name: p.detach() for name, p in named.items()})


class FallbackSide:
    """Our side on one rank."""

    def __init__(self, case: Case, course: Course, place: Place) -> None:
        self.course = course
        builder = SharedBuilder(place, ParallelConfig(**case.parallel), "fp32", CPU)
        self.model = opened_model(Path(case.folder), builder, case.packed)
        self.runner, self.optimizer = runner_of(self.model, builder, case.packed), optimizer_of(self.model)
        self.gradients: dict[str, Tensor] = {}
        self.optimizer.register_step_pre_hook(lambda *_: self._keep_gradients())

    def check(self) -> dict[str, Any]:
        locked = [self._locked_step(number) for number in range(LOCKED_STEPS)]
        self._lock(0)
        losses = [one_step(self.runner, self.optimizer, batches).loss for batches in self.course.steps]
        return {"locked": locked, "losses": losses, "end": self._whole(dict(self.model.named_parameters()))}

    def _locked_step(self, number: int) -> parity.StepNumbers:
        self._lock(number)
        done = one_step(self.runner, self.optimizer, self.course.steps[number])
        return parity.StepNumbers(done.loss, done.grad_norm, self.gradients)

    @torch.no_grad()
    def _lock(self, number: int) -> None:
        """Our rows of the reference's weights and moments."""
        kinds = self.course.before[number]
        self.optimizer.state.clear()
        for name, parameter in self.model.named_parameters():
            self._take(name, parameter.detach(), kinds["weights"])
            if number:
                moments = {kind: torch.zeros_like(parameter) for kind in MOMENTS}
                for kind, moment in moments.items():
                    self._take(name, moment, kinds[kind])
                self.optimizer.state[parameter] = {"step": torch.tensor(float(number)), **moments}

    def _take(self, name: str, tensor: Tensor, theirs: dict[str, Tensor]) -> None:
        for box in self.model.slices_of(name, tensor):
            there = tuple(slice(at, at + size) for at, size in zip(box.offset, box.tensor.shape, strict=True))
            box.tensor.copy_(theirs[box.name.removeprefix("hf.")][there])

    def _keep_gradients(self) -> None:
        self.gradients = self._whole({name: p.grad for name, p in self.model.named_parameters()})

    @staticmethod
    def _whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.removeprefix("hf."): whole(tensor) for name, tensor in tensors.items()}


def check_cases(cases: list[Case], courses: dict[str, Course]) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        with opened(ParallelConfig(**case.parallel), CPU, mixed=True) as place:
            found.append(FallbackSide(case, courses[case.folder], place).check())
    return found


def hold_to_the_protocol(cases: list[Case], world_size: int) -> None:
    courses = {folder: reference_course(Path(folder)) for folder in dict.fromkeys(case.folder for case in cases)}
    ranks = launch_procs(check_cases, world_size, cases, courses, preload=PRELOADED)
    for case, found in zip(cases, zip(*ranks, strict=True), strict=True):
        for rank in found:
            judge(case, rank, courses[case.folder])


def judge(case: Case, found: dict[str, Any], course: Course) -> None:
    """What one rank found, which has everything whole, at the limits of the protocol."""
    worst, free = parity.Worst(), parity.Worst()
    for got, wanted in zip(found["locked"], course.after, strict=False):
        worst.see(loss=parity.relative(got.loss, wanted.loss), norm=parity.relative(got.grad_norm, wanted.grad_norm))
        assert got.gradients.keys() == wanted.gradients.keys()
        for name, gradient in wanted.gradients.items():
            worst.see(gradient=parity.distance(got.gradients[name], gradient))
    assert worst.loss <= parity.LOSS_LIMIT, (case, worst)
    assert worst.norm <= parity.NORM_LIMIT, (case, worst)
    assert worst.gradient <= parity.GRADIENT_LIMIT, (case, worst)
    for loss, numbers in zip(found["losses"], course.after, strict=True):
        free.see(loss=parity.relative(loss, numbers.loss))
    assert found["end"].keys() == course.end.keys()
    for name, weight in course.end.items():
        free.see(weight=(found["end"][name] - weight).abs().max().item())
    assert free.loss <= parity.FREE_LOSS_LIMIT, (case, free)
    assert free.weight <= parity.FREE_WEIGHT_LIMIT, (case, free)


class TestParity:
    def test_two_ranks_equal_transformers_step_locked_and_free_running(self, folders: dict[str, Path]) -> None:
        layouts = [*ZEROS, {"dp_replicate": 2}]
        phi, llama, mixtral = map(str, folders.values())
        # Each layout packed and unpacked, once on either model.
        cases = [Case(phi, layout, packed=number % 2 == 0) for number, layout in enumerate(layouts)]
        cases += [Case(llama, layout, packed=number % 2 == 1) for number, layout in enumerate(layouts)]
        hold_to_the_protocol([*cases, Case(mixtral, ZEROS[2])], 2)

    def test_two_copies_in_two_shards_equal_transformers(self, folders: dict[str, Path]) -> None:
        hold_to_the_protocol([Case(str(folders["phi"]), HSDP), Case(str(folders["llama"]), HSDP, packed=False)], 4)


def test_stages_and_shared_matrices_are_refused_on_every_rank(folders: dict[str, Path]) -> None:
    found = launch_procs(refusals, 2, [folders["phi"], folders["llama"]], preload=PRELOADED)
    words = "parallel.tp and parallel.pp are for the native decoder, and this model runs in Transformers"
    assert found == [[words] * 4] * 2


def refusals(folders: list[Path]) -> list[str]:
    found = []
    for folder in folders:
        for axis in ("tp", "pp"):
            parallel = ParallelConfig(**{axis: 2})
            with opened(parallel, CPU, mixed=False) as place, pytest.raises(UsageError) as error:
                opened_model(folder, SharedBuilder(place, parallel, "fp32", CPU), packed=False)
            found.append(error.value.message)
    return found


def test_what_two_ranks_saved_is_what_others_and_transformers_load(
    folders: dict[str, Path], tokenizer_dir: Path, tmp_path: Path
) -> None:
    models = [folders["phi"], folders["llama"]]
    saved, same = launch_procs(save_and_go_on_with_all, 2, models, tokenizer_dir, tmp_path, preload=PRELOADED)
    checkpoints = [tmp_path / folder.name / "step-00000002" for folder in models]
    alone = [load_and_go_on(checkpoint, {}) for checkpoint in checkpoints]
    on_four = launch_procs(load_and_go_on_with_all, 4, checkpoints, HSDP, preload=PRELOADED)
    for number, checkpoint in enumerate(checkpoints):
        assert_same_state(same[number], saved[number])
        assert_transformers_has(checkpoint, saved[number]["weights"], tied=models[number] == folders["llama"])
        for other in (alone[number], *(rank[number] for rank in on_four)):
            assert_same_state(other, saved[number])
            assert parity.relative(other["next loss"], saved[number]["next loss"]) <= parity.LOSS_LIMIT


def assert_transformers_has(checkpoint: Path, weights: dict[str, Tensor], tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(str(checkpoint))
    found = {f"hf.{name}": p.detach() for name, p in theirs.named_parameters()}
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    assert (theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight) == tied


def assert_same_state(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    for kind in ("weights", *MOMENTS, "step"):
        assert got[kind].keys() == wanted[kind].keys()
        for name, tensor in wanted[kind].items():
            assert torch.equal(got[kind][name], tensor), (kind, name)


def some_steps() -> list[parity.MicroBatches]:
    return parity.random_batches(3, SIZES["vocab_size"], seed=7)


def save_and_go_on_with_all(folders: list[Path], tokenizer_dir: Path, root: Path) -> list[dict[str, Any]]:
    return [save_and_go_on(folder, tokenizer_dir, root / folder.name) for folder in folders]


def load_and_go_on_with_all(folders: list[Path], parallel: dict[str, Any]) -> list[dict[str, Any]]:
    return [load_and_go_on(folder, parallel) for folder in folders]


def save_and_go_on(folder: Path, tokenizer_dir: Path, root: Path) -> dict[str, Any]:
    """Two steps on two ranks, a checkpoint, and a step more; what was held when it was saved."""
    parallel = ParallelConfig(dp_shard=2)
    with opened(parallel, CPU, mixed=False) as place:
        builder = SharedBuilder(place, parallel, "fp32", CPU)
        model = opened_model(folder, builder, packed=True)
        runner, optimizer = runner_of(model, builder, packed=True), optimizer_of(model)
        *first, last = some_steps()
        for batches in first:
            one_step(runner, optimizer, batches)
        state = {"step": 2, "implementation": model.implementation}
        save_checkpoint(root, 2, model, load_tokenizer(tokenizer_dir), optimizer, state, place)
        return state_of(model, optimizer) | {"next loss": one_step(runner, optimizer, last).loss}


def load_and_go_on(folder: Path, parallel: dict[str, Any]) -> dict[str, Any]:
    """That it runs in Transformers is known from the checkpoint. Alone, it is a model without a mesh."""
    config = ParallelConfig(**parallel)
    with opened(config, CPU, mixed=False) as place:
        builder = None if place.mesh is None else SharedBuilder(place, config, "fp32", CPU)
        model = load_model(folder, CPU, execution=Execution(packed=True), builder=builder)
        runner = Runner(model, CPU, packed=True) if builder is None else runner_of(model, builder, packed=True)
        optimizer = optimizer_of(model)
        restore_optimizer(folder, optimizer, model)
        return state_of(model, optimizer) | {"next loss": one_step(runner, optimizer, some_steps()[-1]).loss}


def state_of(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights and moments by name, whole."""
    named = list(model.named_parameters())
    kinds = {kind: {name: whole(optimizer.state[p][kind]) for name, p in named} for kind in (*MOMENTS, "step")}
    return {"weights": {name: whole(p) for name, p in named}} | kinds


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class TestDropout:
    def test_ranks_drop_differently_and_a_resumed_run_is_the_run(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        dropout = dict.fromkeys(("attention_dropout", "embd_pdrop", "resid_pdrop"), 0.2)
        folder = make_model(tmp_path / "phi", "phi", **PHI, **dropout, vocab_size=448)
        tokenizer.save(folder)
        overrides = {
            "model.path": str(folder), "data.path": str(write_rows(tmp_path / "text.jsonl", corpus_rows(40))),
            "data.context_length": 32, "data.cache_dir": str(tmp_path / "cache"), "training.max_steps": 4,
            "training.global_batch_size": 4, "optim.learning_rate": 1e-3, "observe.console": "quiet",
            "system.device": "cpu", "parallel.dp_shard": 2,
        }  # fmt: skip
        first, second = launch_procs(train_whole_and_in_parts, 2, overrides, tmp_path, preload=PRELOADED)
        for drops in (first, second):
            assert len(drops["whole"]) == 4
            assert all(map(torch.equal, drops["parts"], drops["whole"]))
        for here, there in zip(first["whole"], second["whole"], strict=True):
            # A fifth is dropped on either rank, and one of them alone drops a third: 2 x 0.2 x 0.8.
            assert here.float().mean() == pytest.approx(0.2, abs=0.05)
            assert (here != there).float().mean() == pytest.approx(0.32, abs=0.06)
        lines = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts")]
        for one, other in zip(*lines, strict=True):
            assert (one["loss"], one["grad_norm"]) == (other["loss"], other["grad_norm"])
        end = "checkpoints/step-00000004"
        files = sorted(path.name for path in (tmp_path / "whole" / end).glob("*.safetensors"))
        kinds = ("optimizer", "random")
        assert files == sorted(
            ["model.safetensors", *(f"{kind}-{n:05d}.safetensors" for kind in kinds for n in (0, 1))]
        )
        for name in files:
            got, wanted = (load_file(tmp_path / run / end / name) for run in ("parts", "whole"))
            assert got.keys() == wanted.keys()
            assert all(torch.equal(got[key], wanted[key]) for key in wanted), name


class WatchDropout(Callback):
    """What the first dropout of every step leaves out; ends the run after `last` steps."""

    def __init__(self, last: int | None = None) -> None:
        self.last = last
        self.dropped: list[Tensor] = []
        self.fresh = True

    def on_start(self, run: Run) -> None:
        first = next(part for part in run.model.module.modules() if isinstance(part, torch.nn.Dropout) and part.p > 0)
        first.register_forward_hook(self._see)

    def on_step(self, run: Run, values: dict[str, Any]) -> None:
        self.fresh = True
        if values["step"] == self.last:
            run.stop("enough")

    def _see(self, module: Any, inputs: Any, output: Tensor) -> None:
        if self.fresh:
            self.dropped.append((output == 0).flatten()[:1024])
        self.fresh = False


def train_whole_and_in_parts(overrides: dict[str, Any], root: Path) -> dict[str, list[Tensor]]:
    whole, begin, end = WatchDropout(), WatchDropout(last=2), WatchDropout()
    for name, callback in (("whole", whole), ("parts", begin), ("parts", end)):
        api.train(load_config(overrides=overrides | {"output_dir": str(root / name)}), callbacks=[callback])
    assert len(begin.dropped) == len(end.dropped) == 2
    return {"whole": whole.dropped, "parts": begin.dropped + end.dropped}

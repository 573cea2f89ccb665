"""Both sides of a parity test in which ours is shared out over processes.

The reference (Transformers and AdamW, one process) runs once, in the process of the test, and leaves on disk what it
had before and after every step, as Hugging Face files. Each rank then reads its own boxes of that: weights and moments
before a step, so as to start from where the reference was, and gradients and weights after it, to compare with. What a
rank finds are sums of squares, every box counted on one rank; put together they are the distances of parity.py.

On the way every layout shows that it reads no byte that is not its own, and what it saves is put together again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

import parity
from sides import MAX_NORM, WEIGHT_DECAY, collated
from torchstone.config.schema import OptimConfig, ParallelConfig
from torchstone.data.loader import StepBatch
from torchstone.models.decoder import Decoder, Fusion
from torchstone.models.execution import Execution
from torchstone.models.opening import fill, load_model
from torchstone.models.sliced_files import Slice, SlicedFiles
from torchstone.models.slices import WEIGHTS, slice_files
from torchstone.models.weights import Files, disk_tensors, read_shape
from torchstone.optim.build import build_optimizer
from torchstone.parallel.build import SharedBuilder, runner_of
from torchstone.parallel.mesh import opened
from torchstone.training.step import StepResult, train_step

# The reference starts without moments at the first step, so the second is locked as well. Of three micro-batches the
# last has no token to learn from: for two data ranks they are uneven, and for four one has none at all.
LOCKED_STEPS, ACCUMULATION = 2, 3
LOGITS_LIMIT = 1e-5
# Few widths: torch works out how to lay out an operation anew for every shape that it meets.
WIDTH = 96
MOMENTS = ("exp_avg", "exp_avg_sq")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A layout to be tried on a model: the sizes of its axes and the switches, how rows are, how the model runs."""

    name: str
    folder: str
    parallel: dict[str, Any] = field(default_factory=dict)
    fused: tuple[Fusion, ...] = ()
    packed: bool = True
    free_running: bool = True


def write_reference(folder: Path, target: Path, seed: int = 0) -> Path:
    """Runs the reference on the model in `folder`, and leaves what it had in `target`."""
    from transformers import AutoModelForCausalLM

    # Not all of Transformers' kernels know soft caps.
    capped = json.loads((folder / "config.json").read_text()).get("attn_logit_softcapping")
    kernel = {"attn_implementation": "eager"} if capped else {}
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, **kernel)
    vocabulary = model.config.vocab_size
    reference = parity.Reference(model, parity.reference_adamw(model, WEIGHT_DECAY, **_settings()), MAX_NORM)
    steps = parity.random_batches(parity.FREE_RUNNING["steps"], vocabulary, seed, ACCUMULATION)
    numbers = []
    ids = torch.randint(vocabulary, (1, WIDTH), generator=torch.Generator().manual_seed(seed))
    target.mkdir()
    save_file({"ids": ids, "logits": model(ids).logits.detach()}, target / "logits.safetensors")
    for number, batches in enumerate(steps):
        place = target / f"step-{number}"
        named = dict(model.named_parameters())
        _write({name: p.detach() for name, p in named.items()}, place / "weights")
        for moment in MOMENTS if number else ():
            _write({name: reference.optimizer.state[p][moment] for name, p in named.items()}, place / moment)
        done = reference.step(batches)
        _write(done.gradients, place / "gradients")
        numbers.append({"loss": done.loss, "grad_norm": done.grad_norm})
    _write({name: p.detach() for name, p in model.named_parameters()}, target / "end")
    (target / "reference.json").write_text(json.dumps({"steps": steps, "numbers": numbers}))
    return target


def _settings() -> dict[str, Any]:
    return {key: value for key, value in parity.FREE_RUNNING.items() if key != "steps"}


def _write(tensors: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


class SharedSide:
    """Our side on one rank."""

    def __init__(self, case: Case, reference: Path, place: Any) -> None:
        self.case, self.reference, self.place = case, reference, place
        found = json.loads((reference / "reference.json").read_text())
        self.steps, self.numbers, self.settings = found["steps"], found["numbers"], _settings()
        parallel = ParallelConfig(**case.parallel)
        self.builder = SharedBuilder(place, parallel, "fp32", CPU)
        execution = Execution(packed=case.packed, fused=case.fused)
        self.model = load_model(Path(case.folder), CPU, execution=execution, builder=self.builder)
        self.runner = runner_of(self.model, self.builder, case.packed)
        optim = OptimConfig(
            learning_rate=self.settings["lr"], betas=self.settings["betas"], eps=self.settings["eps"],
            weight_decay=WEIGHT_DECAY,
        )  # fmt: skip
        self.optimizer = build_optimizer(self.model.named_parameters(), optim, self.model.roles())
        self.gradients: dict[str, Tensor] = {}
        self.optimizer.register_step_pre_hook(lambda *_: self._keep_gradients())

    def check(self, saved: Path) -> dict[str, Any]:
        """Distances by name, to be put together over the ranks by `judge`."""
        rank, ranks = self.place.rank, self.place.layout.world_size
        if self.place.is_main:
            (saved / "untrained").mkdir(parents=True)
            (saved / "trained").mkdir()
        self.place.wait()
        self.model.save(saved / "untrained", rank, ranks)
        found = {
            "names": [name for name, _ in self.model.named_parameters()],
            "logits": self._logits_apart(),
            "locked": [self._locked_step(number) for number in range(LOCKED_STEPS)],
            "free": self.free_run() if self.case.free_running else {"loss": 0.0, "weight": 0.0},
        }
        self.model.save(saved / "trained", rank, ranks)
        found["held"] = [(box.name, box.offset, box.tensor.clone()) for box in self._boxes()]
        return found

    def step(self, number: int) -> StepResult:
        """Micro-batches are dealt out to the data ranks in turn; all take the same number, of which some are empty."""
        mine = self.steps[number][self.place.data_rank :: self.place.data_ranks]
        rounds = -(-len(self.steps[number]) // self.place.data_ranks)
        mine += [[]] * (rounds - len(mine))
        count = sum(label != -100 for batch in self.steps[number] for _, labels in batch for label in labels[1:])
        batch = StepBatch(
            collated(mine, self.case.packed, math.lcm(WIDTH, self.place.layout.tp)),
            0,
            0,
            loss_tokens=count,
            padding=0,
            first_sample=0,
        )
        return train_step(self.runner, self.optimizer, batch, 1, self.settings["lr"], MAX_NORM)

    def _locked_step(self, number: int) -> dict[str, Any]:
        place = self.reference / f"step-{number}"
        files = self._files(place / "weights")
        fill(self.model.parts, files)
        assert files.bytes_read == sum(box.tensor.nbytes for box in self._boxes()), "not the bytes of its own boxes"
        self.optimizer.state.clear()
        if number:
            self._set_moments(place, number)
        done = self.step(number)
        return {
            "loss": parity.relative(done.loss, self.numbers[number]["loss"]),
            "weight": self._weights_apart(self.reference / f"step-{number + 1}" / "weights"),
            "norm": parity.relative(done.grad_norm, self.numbers[number]["grad_norm"]),
            "gradients": self._squares(self.gradients, self._files(place / "gradients")),
        }

    def free_run(self) -> dict[str, Any]:
        fill(self.model.parts, self._files(self.reference / "step-0" / "weights"))
        self.optimizer.state.clear()
        losses = [
            parity.relative(self.step(number).loss, self.numbers[number]["loss"]) for number in range(len(self.steps))
        ]
        return {"loss": max(losses), "weight": self._weights_apart(self.reference / "end")}

    def _weights_apart(self, folder: Path) -> float:
        wanted = self._files(folder)
        return max(((box.tensor - _box(wanted, box)).abs().max().item() for box in self._boxes()), default=0.0)

    def _logits_apart(self) -> float:
        try:
            return self._logits()
        finally:
            self.runner.rest()

    @torch.no_grad()
    def _logits(self) -> float:
        """How far the logits of the untrained model are apart, stage after stage; zero on ranks without them."""
        saved = load_file(self.reference / "logits.safetensors")
        x, positions = saved["ids"], torch.arange(saved["ids"].shape[1]).expand_as(saved["ids"])
        if not self.builder.stages:
            return _apart(self.model.module(x, positions), saved["logits"])
        mesh, total = self.place.mesh["pp"], self.runner.pipeline.total
        worst = 0.0
        for index in range(total):
            stage = self.builder.stages.get(index)
            if stage is not None:
                loss, stage.micro_loss = stage.micro_loss, lambda module, x, positions, docs, _: module(x, positions)
                x = stage(x, positions, positions)
                stage.micro_loss = loss
                if index == total - 1:
                    worst = _apart(x[0], saved["logits"])
            if index < total - 1:
                rows, width = saved["ids"].shape
                shares = self.runner.pipeline.shares
                x = x if stage is not None else torch.empty(rows, width // shares, self.model.module.config.width)
                dist.broadcast(x, group=mesh.get_group(), group_src=index % mesh.size())
        return worst

    def _set_moments(self, place: Path, number: int) -> None:
        files = {moment: self._files(place / moment) for moment in MOMENTS}
        for name, parameter in self.model.named_parameters():
            state: dict[str, Tensor] = {"step": torch.tensor(float(number))}
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(parameter)
                for box in self.model.slices_of(name, state[moment]):
                    files[moment].read_into(box.name, box.tensor, box.offset)
            self.optimizer.state[parameter] = state

    def _keep_gradients(self) -> None:
        self.gradients = {name: p.grad.detach().clone() for name, p in self.model.named_parameters()}

    def _squares(self, tensors: dict[str, Tensor], wanted: Files) -> dict[str, tuple[float, float]]:
        """By name of the piece: the squares of the difference and of what was wanted, where they count here."""
        found: dict[str, tuple[float, float]] = {}
        for name, tensor in tensors.items():
            if not self.model.counts(name, tensor):
                continue
            for box in self.model.slices_of(name, tensor):
                right = _box(wanted, box)
                difference, size = found.get(box.name, (0.0, 0.0))
                difference += (box.tensor - right).double().square().sum().item()
                found[box.name] = difference, size + right.double().square().sum().item()
        return found

    def _boxes(self) -> list[Slice]:
        named = self.model.named_parameters()
        return [box for name, parameter in named for box in self.model.slices_of(name, parameter.detach())]

    def _files(self, folder: Path) -> Files:
        _, family, config = read_shape(Path(self.case.folder))
        with torch.device("meta"):
            return Files(folder, family, Decoder(config))


def check_cases(cases: Sequence[Case], references: dict[str, str], saved: str) -> list[dict[str, Any]]:
    """What one rank finds; every case has a mesh of its own, on the same processes."""
    found = []
    for case in cases:
        with opened(ParallelConfig(**case.parallel), CPU, mixed=True) as place:
            side = SharedSide(case, Path(references[case.folder]), place)
            found.append(side.check(Path(saved) / case.name))
    return found


def judge(case: Case, found: list[dict[str, Any]], saved: Path) -> parity.Worst:
    """One case's findings of all ranks, put together and held to the protocol's limits."""
    worst, free = parity.Worst(), parity.Worst()
    assert max(rank["logits"] for rank in found) <= LOGITS_LIMIT, case.name
    for number in range(LOCKED_STEPS):
        total: dict[str, tuple[float, float]] = {}
        for rank in found:
            locked = rank["locked"][number]
            worst.see(loss=locked["loss"], norm=locked["norm"], weight=locked["weight"])
            for name, (difference, size) in locked["gradients"].items():
                before = total.get(name, (0.0, 0.0))
                total[name] = before[0] + difference, before[1] + size
        all_squares = sum(size for _, size in total.values())
        for name, (difference, size) in total.items():
            if size <= parity.ZERO_LIMIT**2 * all_squares:
                # Zero by mathematics: rounding alone is left of it on both sides.
                assert difference <= (2 * parity.ZERO_LIMIT) ** 2 * all_squares, name
                continue
            worst.see(gradient=math.sqrt(difference / size))
            assert worst.gradient <= parity.GRADIENT_LIMIT, (case.name, name, worst)
    for rank in found:
        free.see(loss=rank["free"]["loss"], weight=rank["free"]["weight"])
    assert worst.loss <= parity.LOSS_LIMIT, (case.name, worst)
    assert worst.norm <= parity.NORM_LIMIT, (case.name, worst)
    assert worst.weight <= parity.FREE_WEIGHT_LIMIT, (case.name, worst)
    assert free.loss <= parity.FREE_LOSS_LIMIT, (case.name, free)
    assert free.weight <= parity.FREE_WEIGHT_LIMIT, (case.name, free)
    _judge_files(case, found, saved)
    worst.see(weight=free.weight)
    return worst


def _judge_files(case: Case, found: list[dict[str, Any]], saved: Path) -> None:
    """Put together, the ranks' files are what they held, and for the untrained model the file it came from."""
    _, family, config = read_shape(Path(case.folder))
    original = load_file(Path(case.folder) / "model.safetensors")
    again = disk_tensors(_whole(saved / "untrained"), family)
    assert again.keys() == original.keys()
    assert all(torch.equal(again[name], original[name]) for name in original), case.name
    trained = _whole(saved / "trained")
    for rank in found:
        for name, offset, box in rank["held"]:
            there = tuple(slice(at, at + size) for at, size in zip(offset, box.shape, strict=True))
            assert torch.equal(trained[name][there], box), (case.name, name)
    with torch.device("meta"):
        assert trained.keys() == Decoder(config).pieces().keys()


def _whole(folder: Path) -> dict[str, Tensor]:
    files = SlicedFiles(slice_files(folder, WEIGHTS))
    found = {name: torch.empty(files.shape(name), dtype=files.dtype(name)) for name in files.names}
    for name, tensor in found.items():
        files.read_into(name, tensor, (0,) * tensor.dim())
    return found


def _box(files: Files, box: Slice) -> Tensor:
    right = torch.empty_like(box.tensor)
    files.read_into(box.name, right, box.offset)
    return right


def _apart(logits: Tensor, wanted: Tensor) -> float:
    whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return (whole - wanted).abs().max().item() / max(1.0, wanted.abs().max().item())

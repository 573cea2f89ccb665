"""Both sides of a parity test: Transformers in a plain loop, and the package's own step fed with the same rows."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import parity
from torchstone.config.schema import OptimConfig
from torchstone.data.collate import BUCKET, MicroBatch, collate
from torchstone.data.encode import Encoded
from torchstone.data.loader import StepBatch
from torchstone.models.execution import AS_IT_COMES, Execution
from torchstone.models.opening import load_model
from torchstone.models.weights import Files, disk_tensors
from torchstone.optim.build import build_optimizer
from torchstone.parallel.running import Runner
from torchstone.training import step as training_step

MAX_NORM = 0.5
WEIGHT_DECAY = 0.1


class OurSide:
    """The package's own step, fed with the protocol's micro-batches, packed into one row each or padded."""

    def __init__(
        self,
        folder: Path,
        packed: bool,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        execution: Execution = AS_IT_COMES,
    ) -> None:
        self.model = load_model(folder, torch.device("cpu"), execution=execution)
        self.packed, self.lr = packed, lr
        optim = OptimConfig(learning_rate=lr, betas=betas, eps=eps, weight_decay=WEIGHT_DECAY)
        self.optimizer = build_optimizer(self.model.module.named_parameters(), optim)
        self.gradients: dict[str, Tensor] = {}
        self.optimizer.register_step_pre_hook(lambda *_: self.keep_gradients())

    def keep_gradients(self) -> None:
        self.gradients = self.on_disk({n: p.grad.clone() for n, p in self.model.module.named_parameters()})

    def step(self, micro_batches: parity.MicroBatches) -> parity.StepNumbers:
        batch = self.batch(micro_batches)
        runner = Runner(self.model, torch.device("cpu"), self.packed)
        done = training_step.train_step(runner, self.optimizer, batch, 1, self.lr, MAX_NORM)
        return parity.StepNumbers(done.loss, done.grad_norm, self.gradients)

    def batch(self, micro_batches: parity.MicroBatches) -> StepBatch:
        tensors = collated(micro_batches, self.packed)
        count = sum(int((t.labels != -100).sum()) for t in tensors)
        return StepBatch(tensors, samples=0, tokens=0, loss_tokens=count, padding=0, first_sample=0)

    def on_disk(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors shaped like our parameters, by Transformers' names and in its shapes."""
        pieces = {box.name: box.tensor for n, t in tensors.items() for box in self.model.slices_of(n, t)}
        return disk_tensors(pieces, self.model.family)

    def weights(self) -> dict[str, Tensor]:
        return self.on_disk({n: p.detach().clone() for n, p in self.model.module.named_parameters()})

    def lock(self, reference: parity.Reference) -> None:
        """Our side gets the reference's weights and moments."""
        theirs = dict(reference.model.named_parameters())
        states = {name: reference.optimizer.state.get(p, {}) for name, p in theirs.items()}
        weights = self.from_disk({name: p.detach() for name, p in theirs.items()})
        moments = {
            kind: self.from_disk({name: state[kind] for name, state in states.items()})
            for kind in ("exp_avg", "exp_avg_sq")
            if all(state for state in states.values())
        }
        for name, parameter in self.model.module.named_parameters():
            with torch.no_grad():
                parameter.copy_(weights[name])
            state = {kind: tensors[name].clone() for kind, tensors in moments.items()}
            if state:
                state["step"] = next(iter(states.values()))["step"].clone()
            self.optimizer.state[parameter] = state

    def from_disk(self, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The other way: written as a file would be, and loaded."""
        from safetensors.torch import save_file

        twin = copy.deepcopy(self.model.module)
        with tempfile.TemporaryDirectory() as place:
            save_file({name: tensor.contiguous() for name, tensor in theirs.items()}, Path(place) / "model.safetensors")
            Files(Path(place), self.model.family, twin).load(twin)
        return {name: parameter.detach() for name, parameter in twin.named_parameters()}


def collated(micro_batches: parity.MicroBatches, packed: bool, multiple: int = BUCKET) -> list[MicroBatch]:
    """The protocol's micro-batches as ours, each packed into one row or padded."""
    encoded = [[Encoded(np.array(ids), np.array(labels)) for ids, labels in sequences] for sequences in micro_batches]
    return [collate([each] if packed else [[one] for one in each], 0, multiple) for each in encoded]


def both_sides(
    folder: Path, packed: bool, settings: dict[str, Any], execution: Execution = AS_IT_COMES, **theirs: Any
) -> tuple[parity.Reference, OurSide]:
    """Transformers in a plain loop, loaded with `theirs`, and the package's own step."""
    from transformers import AutoModelForCausalLM

    chosen = {key: settings[key] for key in ("lr", "betas", "eps")}
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, **theirs)
    optimizer = parity.reference_adamw(model, WEIGHT_DECAY, **chosen)
    return parity.Reference(model, optimizer, MAX_NORM), OurSide(folder, packed, **chosen, execution=execution)

"""Both sides of a parity test: Transformers in a plain loop, and the package's own step on the same batches."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import parity
from steps import step_batch, train_step
from torchstone.checkpoint.model_folder import load_model
from torchstone.checkpoint.weight_files import WeightFiles, hf_tensors
from torchstone.checkpoint.weight_names import WEIGHT_NAMES
from torchstone.config.schema import OptimConfig
from torchstone.data.collate import LENGTH_MULTIPLE, BatchShapes, MicroBatch, collate
from torchstone.data.encode import TokenSequence
from torchstone.data.loader import StepBatch
from torchstone.models.execution import DEFAULT_EXECUTION, ExecutionOptions
from torchstone.optim.build import build_optimizer
from torchstone.parallel.build import fill_parameters
from torchstone.parallel.local_shards import local_shards
from torchstone.parallel.mesh import ParallelContext
from torchstone.parallel.runner import Runner

MAX_NORM = 0.5
WEIGHT_DECAY = 0.1


class OurSide:
    """The package's own step on the protocol's micro-batches, each packed into one row or padded."""

    def __init__(
        self,
        folder: Path,
        packed: bool,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        execution: ExecutionOptions = DEFAULT_EXECUTION,
    ) -> None:
        self.model = load_model(folder, torch.device("cpu"), execution=execution)
        self.packed, self.lr = packed, lr
        optim = OptimConfig(learning_rate=lr, betas=betas, eps=eps, weight_decay=WEIGHT_DECAY)
        self.optimizer = build_optimizer(self.model.module.named_parameters(), optim, self.model.parameter_kinds())
        self.weight_names = WEIGHT_NAMES[self.model.hf_config["model_type"]]
        self.gradients: dict[str, Tensor] = {}
        self.optimizer.register_step_pre_hook(lambda *_: self.keep_gradients())

    def keep_gradients(self) -> None:
        self.gradients = self.to_hf({n: p.grad.clone() for n, p in self.model.module.named_parameters()})

    def step(self, micro_batches: parity.MicroBatches) -> parity.StepValues:
        runner = Runner(self.model, torch.device("cpu"), self.packed)
        result = train_step(runner, self.optimizer, make_batch(micro_batches, self.packed), 1, self.lr, MAX_NORM)
        return parity.StepValues(result.loss, result.grad_norm, self.gradients)

    def to_hf(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors shaped like our parameters, by Hugging Face name and in its shapes."""
        config = self.model.decoder_config
        unfused = {shard.name: shard.tensor for n, t in tensors.items() for shard in local_shards(config, n, t)}
        return hf_tensors(unfused, self.weight_names)

    def weights(self) -> dict[str, Tensor]:
        return self.to_hf({n: p.detach().clone() for n, p in self.model.module.named_parameters()})

    def lock(self, reference: parity.Reference) -> None:
        """Copies the reference's weights and moments to our side."""
        parameters = dict(reference.model.named_parameters())
        states = {name: reference.optimizer.state.get(p, {}) for name, p in parameters.items()}
        weights = self.from_hf({name: p.detach() for name, p in parameters.items()})
        moments = {
            kind: self.from_hf({name: state[kind] for name, state in states.items()})
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

    def from_hf(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `to_hf`: writes a file and loads it."""
        from safetensors.torch import save_file

        twin = copy.deepcopy(self.model.module)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.safetensors"
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
            fill_parameters([twin], WeightFiles(Path(folder), self.weight_names, twin))
        return {name: parameter.detach() for name, parameter in twin.named_parameters()}


def collated(micro_batches: parity.MicroBatches, packed: bool, multiple: int = LENGTH_MULTIPLE) -> list[MicroBatch]:
    """The protocol's micro-batches in the package's form, each packed into one row or padded."""
    return [
        collate([sequences] if packed else [[sequence] for sequence in sequences], 0, BatchShapes(multiple))
        for sequences in (
            [TokenSequence(np.array(ids), np.array(labels)) for ids, labels in batch] for batch in micro_batches
        )
    ]


def make_batch(micro_batches: parity.MicroBatches, packed: bool = True) -> StepBatch:
    """A step on the protocol's micro-batches."""
    return step_batch(collated(micro_batches, packed))


def batch_of_rank(
    micro_batches: parity.MicroBatches, ctx: ParallelContext, packed: bool = True, multiple: int = LENGTH_MULTIPLE
) -> StepBatch:
    """Data ranks take micro-batches in turn. All take the same number, so some are empty."""
    own = micro_batches[ctx.dp_rank :: ctx.dims.dp]
    own += [[]] * (-(-len(micro_batches) // ctx.dims.dp) - len(own))
    return step_batch(collated(own, packed, multiple), collated(micro_batches, packed))


def load_reference(
    folder: Path,
    settings: dict[str, Any] = parity.FREE_RUNNING,
    make_optimizer: Callable[..., Any] = parity.reference_adamw,
    **load_args: Any,
) -> parity.Reference:
    """Transformers' model, loaded with `load_args`, and an optimizer of torch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, **load_args)
    optim = {key: settings[key] for key in ("lr", "betas", "eps")}
    return parity.Reference(model, make_optimizer(model, WEIGHT_DECAY, **optim), MAX_NORM)


def both_sides(
    folder: Path,
    packed: bool,
    settings: dict[str, Any],
    execution: ExecutionOptions = DEFAULT_EXECUTION,
    **load_args: Any,
) -> tuple[parity.Reference, OurSide]:
    """The reference, loaded by Transformers with `load_args`, and our side."""
    optim = {key: settings[key] for key in ("lr", "betas", "eps")}
    return load_reference(folder, settings, **load_args), OurSide(folder, packed, **optim, execution=execution)

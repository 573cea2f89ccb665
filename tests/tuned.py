"""Steps of LoRA and OSFT in several layouts, against one process; and models to tune.

What runs on ranks is here and not in a test file that imports PEFT, which takes each rank a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import parity
from exact_runs import StopAt
from layouts import CPU, WIDTH, Shard
from selection import the_rest
from sides import MAX_NORM, WEIGHT_DECAY, batch_of_rank
from steps import train_step
from torchstone import api
from torchstone.checkpoint.adapter_folder import open_adapter
from torchstone.checkpoint.model_folder import load_model, read_base_model_info
from torchstone.checkpoint.save import save_model
from torchstone.config.schema import OptimConfig, ParallelConfig
from torchstone.models.execution import ExecutionOptions
from torchstone.models.model import Model
from torchstone.optim.build import build_optimizer
from torchstone.parallel.build import ShardedModelBuilder, build_runner
from torchstone.parallel.local_shards import local_shards
from torchstone.parallel.mesh import init_distributed
from torchstone.parallel.runner import Runner
from torchstone.tuning.lora import AdapterTensors
from torchstone.tuning.plan import LoraPlan

LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{"dp_replicate": 2}, {"zero": 3}, {"tp": 2, "sequence": False}, {"tp": 2}, {"pp": 2}],
    4: [{"tp": 4}, {"tp": 2, "pp": 2}],
    8: [{"tp": 2, "pp": 2}],
}
PROCESSES = [2, 4, pytest.param(8, marks=the_rest)]


NEOX_SIZES = {
    "max_position_embeddings": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64
}  # fmt: skip


def make_fallback(folder: Path, family: str = "gpt_neox", **sizes: int) -> Path:
    """A model that the native decoder does not know."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=448, hidden_size=32, **(sizes or NEOX_SIZES))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def open_peft_adapter(folder: Path, adapter: Path) -> AdapterTensors:
    model = read_base_model_info(folder)
    return open_adapter(adapter, model.names, model.shapes, model.linears)


def load_ours(folder: Path, adapter: Path, **options: Any) -> Model:
    """The model with PEFT's adapter, which is trained."""
    tensors = open_peft_adapter(folder, adapter)
    plan = LoraPlan(frozenset(tensors.saved), tensors, str(folder), "", tensors.adapter, tensors.frozen)
    return load_model(folder, CPU, tuning=plan, **options)


def run_steps(runner: Runner, steps: list[parity.MicroBatches]) -> dict[str, Any]:
    """Losses, norms, this rank's shards of the gradients of all steps and of the weights after them."""
    model = runner.model
    optim = OptimConfig(learning_rate=3e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=WEIGHT_DECAY)
    optimizer = build_optimizer(model.trained_parameters(), optim, model.parameter_kinds())
    gradients: list[Shard] = []

    def shards(tensors: dict[str, Tensor]) -> list[Shard]:
        config = model.decoder_config
        return [(s.name, s.offset, s.tensor.clone()) for n, t in tensors.items() for s in local_shards(config, n, t)]

    optimizer.register_step_pre_hook(
        lambda *_: gradients.extend(shards({n: p.grad for n, p in model.trained_parameters()}))
    )
    values = []
    for number, batches in enumerate(steps):
        batch = batch_of_rank(batches, runner.ctx, multiple=WIDTH)
        result = train_step(runner, optimizer, batch, number + 1, 3e-3, MAX_NORM)
        values += [result.loss, result.grad_norm]
    weights = shards({n: p.detach() for n, p in model.trained_parameters()})
    return {"values": values, "gradients": gradients, "weights": weights}


def assert_same_steps(ranks: list[list[dict[str, Any]]], expected: dict[str, Any], layouts: list[Any]) -> None:
    """What each rank returned for each layout, against one process: losses, norms, the gradients of each step on every
    rank, replicated ones too, and weights."""
    weights = {name: tensor for name, _, tensor in expected["weights"]}
    count = len(weights)
    whole = [{name: tensor for name, _, tensor in expected["gradients"][start : start + count]} for start in (0, count)]
    for number, layout in enumerate(layouts):
        seen = set()
        for results in ranks:
            result = results[number]
            torch.testing.assert_close(result["values"], expected["values"], rtol=2e-6, atol=0)
            half = len(result["gradients"]) // 2
            for index, shard in enumerate(result["gradients"]):
                _assert_shard(whole[index >= half], shard, layout)
                seen.add(shard[0])
            for shard in result["weights"]:
                _assert_shard(weights, shard, layout)
        assert seen == weights.keys()


def _assert_shard(tensors: dict[str, Tensor], shard: Shard, layout: Any) -> None:
    name, offset, values = shard
    if values.numel():
        expected = tensors[name][tuple(slice(at, at + size) for at, size in zip(offset, values.shape, strict=True))]
        assert (values - expected).norm() <= 1e-5 * tensors[name].norm(), (layout, name)


def gradients_of_rank(layouts: list[dict[str, Any]], folder: str, adapter: str, steps: Any) -> list[dict[str, Any]]:
    """Also saves the adapter of each layout after the steps, in a folder beside `adapter`."""
    results = []
    for number, parallel in enumerate(layouts):
        config = ParallelConfig(**parallel)
        with init_distributed(config, CPU, mesh_of_one=True) as ctx:
            builder = ShardedModelBuilder(ctx, config, "fp32", CPU)
            model = load_ours(Path(folder), Path(adapter), execution=ExecutionOptions(tp=ctx.dims.tp), builder=builder)
            runner = build_runner(model, builder, packed=True)
            results.append(run_steps(runner, steps))
            saved = Path(adapter).with_name(str(number))
            saved.mkdir(exist_ok=True)
            save_model(model, saved, ctx)
            ctx.barrier()
    return results


def train_on_rank(*runs: dict[str, Any]) -> None:
    for values in runs:
        api.train(overrides=values)


def train_and_resume(values: dict[str, Any]) -> None:
    """Two runs: one as a whole, one that stops after three steps and is resumed."""
    for name, callbacks in {"whole": [[]], "parts": [[StopAt(3)], []]}.items():
        for each in callbacks:
            api.train(overrides=values | {"output_dir": f"{values['output_dir']}-{name}"}, callbacks=each)

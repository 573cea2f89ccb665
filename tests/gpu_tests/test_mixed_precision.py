"""Mixed precision on one GPU, as every run has it: FSDP2 on a mesh of one, by NCCL.

Dtypes are looked at by name; but a gradient that was summed in bf16 is fp32 afterwards too, so the sum over the
micro-batches of a step is held to its terms, and the same check is shown to fail where the sum is made in bf16. What
bf16 may cost a loss is measured, not chosen: so far is the run from the same one in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from parity import distance, relative
from tiny import TINY_LLAMA, make_llama
from torchstone import api
from torchstone.config import load_config
from torchstone.config.schema import OptimConfig, ParallelConfig
from torchstone.data.collate import MicroBatch, collate
from torchstone.data.encode import Encoded
from torchstone.data.loader import StepBatch
from torchstone.models.execution import Execution
from torchstone.models.opening import load_model
from torchstone.observe.metrics import read_metrics
from torchstone.optim.build import build_optimizer
from torchstone.parallel import build
from torchstone.parallel.build import SharedBuilder, runner_of
from torchstone.parallel.mesh import opened
from torchstone.parallel.running import Runner
from torchstone.parallel.shard import COMPUTED_IN, Precision, policy
from torchstone.training.loop import Callback, Run
from torchstone.training.step import backward, train_step

Settings = Callable[..., dict[str, Any]]
CUDA = torch.device("cuda")
LEARNING_RATE = 3e-3
MOMENTS = ("exp_avg", "exp_avg_sq")
# Heads of 64, which every attention kernel takes.
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
SUM_LIMIT = 1e-5
SEEN_LIMIT = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), **SHAPE)


def some_batches(seed: int, count: int = 8) -> list[MicroBatch]:
    """Each of two rows with three documents, of each of which a part is trained."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        documents = []
        for size in rng.integers(5, 25, 6):
            ids = rng.integers(0, TINY_LLAMA["vocab_size"], size)
            documents.append(Encoded(ids, np.where(rng.random(size) < 0.8, ids, -100)))
        found.append(collate([documents[:3], documents[3:]], pad_id=0))
    return found


def step_of(batches: Sequence[MicroBatch], everything: Sequence[MicroBatch]) -> StepBatch:
    """Some of a step's micro-batches, divided by the loss tokens of them all."""
    count = sum(int((batch.labels != -100).sum()) for batch in everything)
    return StepBatch(list(batches), samples=0, tokens=0, loss_tokens=count, padding=0, first_sample=0)


@contextmanager
def running(
    folder: Path, precision: Precision, reduced_in: torch.dtype = torch.float32, **execution: Any
) -> Iterator[Runner]:
    """The model on a mesh of one. `reduced_in` plants a fault."""
    config = ParallelConfig()
    with pytest.MonkeyPatch.context() as patch, opened(config, CUDA, mixed=True) as place:
        patch.setattr(build, "policy", partial(policy, reduce_dtype=reduced_in))
        builder = SharedBuilder(place, config, precision, CUDA)
        model = load_model(folder, CUDA, COMPUTED_IN[precision], Execution(packed=True, **execution), builder)
        yield runner_of(model, builder, packed=True)


def optimizer_of(runner: Runner) -> torch.optim.Optimizer:
    optim = OptimConfig(learning_rate=LEARNING_RATE, weight_decay=0.1)
    return build_optimizer(runner.model.named_parameters(), optim, runner.model.roles())


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients_of(runner: Runner, batch: StepBatch) -> dict[str, Tensor]:
    backward(runner, batch, 1)
    found = {name: whole(p.grad) for name, p in runner.model.named_parameters()}
    for _, parameter in runner.model.named_parameters():
        parameter.grad = None
    assert all(bool(gradient.isfinite().all()) for gradient in found.values())
    return found


def apart(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, float]:
    """The distance of the nearest gradient and that of the farthest."""
    assert got.keys() == wanted.keys()
    found = [distance(got[name].double(), wanted[name].double()) for name in wanted]
    return min(found), max(found)


def losses(folder: Path, precision: Precision, steps: int = 10, **execution: Any) -> list[float]:
    with running(folder, precision, **execution) as runner:
        optimizer, found = optimizer_of(runner), []
        for step in range(1, steps + 1):
            # Two steps' rows over and over, so that there is something to learn.
            batches = some_batches(step % 2, count=2)
            found.append(train_step(runner, optimizer, step_of(batches, batches), step, LEARNING_RATE, 1.0).loss)
    return found


class TestMixedPrecisionDtypes:
    def test_fsdp2_mixed_precision_dtypes(self, folder: Path) -> None:
        wanted = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )  # fmt: skip
        assert policy("bf16") == wanted
        seen: dict[str, Any] = {"activations": []}
        with running(folder, "bf16") as runner:
            model, named = runner.model, dict(runner.model.named_parameters())
            assert 100_000 < sum(p.numel() for p in named.values()) < 1_000_000
            assert isinstance(model.module, FSDPModule)
            optimizer = optimizer_of(runner)

            def see_gradients(*_: Any) -> None:
                seen["gradients"] = {name: p.grad.dtype for name, p in named.items()}
                seen["finite"] = all(bool(whole(p.grad).isfinite().all()) for p in named.values())

            optimizer.register_step_pre_hook(see_gradients)
            for block in model.module.layers.values():
                assert isinstance(block, FSDPModule)
                block.register_forward_hook(lambda *given: seen["activations"].append(given[-1].dtype))
            for step in (1, 2, 3):
                batches = some_batches(step, count=4)
                train_step(runner, optimizer, step_of(batches, batches), step, LEARNING_RATE, 1.0)
            kept = dict.fromkeys(named, torch.float32)
            assert {name: p.dtype for name, p in named.items()} == kept
            assert seen["gradients"] == kept
            assert seen["finite"]
            for moment in MOMENTS:
                assert {name: optimizer.state[p][moment].dtype for name, p in named.items()} == kept
            assert seen["activations"] == [torch.bfloat16] * 3 * 4 * TINY_LLAMA["num_hidden_layers"]

    def test_a_sum_in_bf16_would_be_seen(self, folder: Path) -> None:
        """Plain attention: kernels that add in any order would round the terms otherwise each time."""
        batches = some_batches(0)
        with running(folder, "bf16", attention="eager") as runner:
            terms = [gradients_of(runner, step_of([batch], batches)) for batch in batches]
            wanted = {name: torch.stack([term[name].double() for term in terms]).sum(0) for name in terms[0]}
            assert apart(gradients_of(runner, step_of(batches, batches)), wanted)[1] <= SUM_LIMIT
        with running(folder, "bf16", reduced_in=torch.bfloat16, attention="eager") as runner:
            assert apart(gradients_of(runner, step_of(batches, batches)), wanted)[0] > SEEN_LIMIT

    def test_pure_bf16_keeps_everything_in_bf16(self, folder: Path) -> None:
        batches = some_batches(0, count=2)
        with running(folder, "bf16-pure") as runner:
            named, optimizer = dict(runner.model.named_parameters()), optimizer_of(runner)
            train_step(runner, optimizer, step_of(batches, batches), 1, LEARNING_RATE, 1.0)
            kept = dict.fromkeys(named, torch.bfloat16)
            assert {name: p.dtype for name, p in named.items()} == kept
            for moment in MOMENTS:
                assert {name: optimizer.state[p][moment].dtype for name, p in named.items()} == kept


class TestMixedPrecisionNumbers:
    def test_every_loss_is_within_two_percent_of_fp32(self, folder: Path) -> None:
        mixed, exact = losses(folder, "bf16"), losses(folder, "fp32", attention="eager")
        assert mixed == pytest.approx(exact, rel=0.02)
        assert mixed != exact
        assert mixed[-1] < 0.9 * mixed[0]

    @pytest.mark.parametrize(
        "execution", [{"compile": "block"}, {"recompute": "full"}, {"recompute": "selective"}, {"attention": "eager"}],
        ids=str,
    )  # fmt: skip
    def test_how_it_runs_changes_losses_by_no_more_than_bf16_does(
        self, folder: Path, execution: dict[str, Any]
    ) -> None:
        exact = losses(folder, "fp32", attention="eager")
        plain, other = losses(folder, "bf16"), losses(folder, "bf16", **execution)
        spread = max(map(relative, plain, exact))
        assert max(map(relative, other, plain)) <= 2 * spread + 1e-3

    def test_recomputed_activations_give_the_same_gradients(self, folder: Path) -> None:
        batches, found = some_batches(0, count=2), []
        for recompute in ("none", "full"):
            with running(folder, "bf16", attention="eager", recompute=recompute) as runner:
                found.append(gradients_of(runner, step_of(batches, batches)))
        assert apart(found[1], found[0])[1] <= SUM_LIMIT


class TestMixedPrecisionRun:
    def test_the_checkpoint_of_a_run_loads_in_transformers(self, settings: Settings, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        kept = KeepWeights()
        given = {"training__precision": "bf16", "model__attention": "auto", "system__device": "cuda"}
        api.train(load_config(overrides=settings(**given)), callbacks=[kept])
        lines = read_metrics(tmp_path / "run/metrics.jsonl")
        assert len(lines) == 6
        assert lines[-1]["loss"] < lines[0]["loss"]
        # One process writes a Hugging Face folder; its weights are the fp32 ones.
        model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "run/checkpoints/step-00000006"))
        theirs = dict(model.named_parameters())
        assert theirs.keys() == kept.weights.keys()
        for name, tensor in kept.weights.items():
            assert theirs[name].dtype == torch.float32, name
            assert torch.equal(theirs[name], tensor), name


class KeepWeights(Callback):
    """What the model held when the run ended, by the names on disk."""

    def on_end(self, run: Run) -> None:
        self.weights = {name: tensor.detach().cpu().clone() for name, tensor in run.model.disk_tensors().items()}

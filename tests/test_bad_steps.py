"""Steps with NaN, Inf or a loss spike: what is found, what is written, and how a run goes on."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from exact_runs import StopAt, exact_metrics, saved_tensors
from test_defaults import DelayedLog
from test_out_of_memory import Memory
from torchstone import api
from torchstone.checkpoint.save import hf_name
from torchstone.config.schema import DebugConfig
from torchstone.data.collate import MicroBatch
from torchstone.errors import NumericalError, StoppedBySignal, UsageError
from torchstone.loss.cross_entropy import token_loss_sum
from torchstone.models.decoder import MLP, Attention
from torchstone.observe.metrics import read_metrics
from torchstone.optim.clip import to_local
from torchstone.parallel import runner as runner_module
from torchstone.parallel.runner import Runner
from torchstone.testing import RankFailure, launch_procs
from torchstone.training import loop, nan_report, step, step_log
from torchstone.training.bad_steps import MIN_LOSSES, loss_limit
from torchstone.training.nan_dump import read_dump
from torchstone.training.run import Callback, Run

Settings = Callable[..., dict[str, Any]]
Torchstone = Callable[..., tuple[int, str, str]]
DOWN, LAYERNORM = "model.layers.1.mlp.down_proj", "model.layers.0.input_layernorm.weight"


class Plant(Callback):
    """Makes `where` of the second layer bad in given attempts to compute a step, and when they are repeated."""

    def __init__(self, where: str, *steps: int, value: float = math.nan) -> None:
        self.where, self.steps, self.value = where, steps, value
        self.attempts, self.handles = 0, list[Any]()
        self.first: MicroBatch | None = None
        self.weights: dict[int, dict[str, Tensor]] = {}

    def on_step_begin(self, run: Run, number: int) -> None:
        self.attempts += 1
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.runner, self.first = run.runner, None
        self.weights[self.attempts] = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        if self.attempts in self.steps:
            self.handles = [self._plant(run.model.module)]

    def _plant(self, module: Any) -> Any:
        mlp: MLP = module.layers["1"].mlp
        if self.where == "adapter":
            factor = next(p for name, p in mlp.named_parameters() if name.endswith("lora_B"))
            return factor.register_hook(lambda gradient: torch.full_like(gradient, self.value))
        attention: Attention = module.layers["1"].attention
        if self.where == "weight":
            return mlp.down.weight.register_hook(lambda gradient: torch.full_like(gradient, self.value))
        if self.where == "backward":

            def hook(_: Any, args: Any, output: Tensor) -> None:
                output.register_hook(lambda gradient: gradient * self.value)

            return attention.register_forward_hook(hook)
        if self.where == "logits":
            return module.norm.register_forward_hook(lambda _, args, output: output * self.value)
        return mlp.down.register_forward_hook(lambda _, args, output: output * self._in_second_micro_batch())

    def again(self) -> Plant:
        return Plant(self.where, *self.steps, value=self.value)

    def _in_second_micro_batch(self) -> float:
        running = self.runner.running
        self.first = self.first or running
        return 1.0 if running is self.first else self.value


class BadRows(Callback):
    """NaN in the second layer whenever the micro-batches of one step are computed, also later."""

    def __init__(self, bad_step: int) -> None:
        self.bad_step, self.step, self.bad = bad_step, 0, list[MicroBatch]()
        self.before: dict[str, Tensor] = {}

    def on_start(self, run: Run) -> None:
        self.run = run
        run.model.module.layers["1"].mlp.down.register_forward_hook(self._hook)

    def on_step_begin(self, run: Run, step: int) -> None:
        self.step = step
        if step == self.bad_step:
            self.before = self.state()

    def state(self) -> dict[str, Tensor]:
        tensors = {name: p.detach().clone() for name, p in self.run.model.named_parameters()}
        for name, parameter in self.run.model.named_parameters():
            moments = self.run.optimizer.state.get(parameter, {}).items()
            tensors |= {f"{name} {key}": value.clone() for key, value in moments if key != "step"}
        return tensors

    def _hook(self, module: Any, args: Any, output: Tensor) -> Tensor | None:
        running = self.run.runner.running
        if self.step == self.bad_step and running is not None:
            self.bad.append(running)
        return output * math.nan if any(running is each for each in self.bad) else None


def rows(path: Path, numbers: Any) -> str:
    """A file in which every row fills a sample."""
    lines = [json.dumps({"text": f"{number:02d} " + "abcdefgh " * 12}) + "\n" for number in numbers]
    path.write_text("".join(lines))
    return str(path)


def plain(settings: Settings, folder: Path, numbers: Any, **changes: Any) -> dict[str, Any]:
    """A run over rows in their order, two a step."""
    values = settings(training__global_batch_size=2, training__batch_size=2, data__shuffle=False, **changes)
    values |= {"data.path": rows(folder / f"{len(numbers)}.jsonl", numbers), "data.text_packing": "best-fit"}
    return values | {"output_dir": str(folder / "run"), "data.context_length": 128, "checkpoint.every_steps": 2}


@pytest.mark.parametrize(
    ("where", "value", "expected", "title"),
    [
        ("forward", math.nan, f"{DOWN}: its output (rank 0, micro-batch 2)", "NaN GRADIENT"),
        ("backward", math.inf, "model.layers.1.self_attn.o_proj: the gradient of its input", "NaN GRADIENT"),
        ("weight", math.inf, f"{DOWN}: the gradient of its weight", "INF GRADIENT"),
    ],
)
def test_the_report_names_the_first_bad_module(
    where: str, value: float, expected: str, title: str, settings: Settings, tmp_path: Path
) -> None:
    plant = Plant(where, 3, value=value)
    values = plain(settings, tmp_path, range(12), model__recompute="full") | {"training.batch_size": 1}
    with pytest.raises(NumericalError, match=r"^step 3: loss") as caught:
        api.train(None, values, callbacks=[plant])
    assert expected in str(caught.value)
    log = (tmp_path / "run/logs/rank-0.log").read_text()
    assert f"{title} DETECTED [rank 0]\n" in log
    # Of many bad gradients five are listed: the first bad module says more.
    bad = int(re.findall(rf"Total layers with {title[:3]} gradients: (\d+)", log)[0])
    assert log.count("(shape: torch.Size(") == min(5, bad)
    assert (f"  • and {bad - 5} more\n" in log) == (bad > 5)
    names = re.findall(r"Affected layers: \[(.*)\]", log)[0].split(", ")
    assert (len(names), names[-1] == "...") == (min(6, bad), bad > 5)
    assert f"First bad module: {expected}" in log
    assert re.search(r"Largest weight: [0-2]\.?\d* \(model\.", log)
    assert "blew up" not in log
    # The rows of the micro-batch, if it is known, else of the step.
    bad_rows = {"forward": [6], "backward": [5], "weight": [5, 6]}[where]
    (line,) = [line for line in log.splitlines() if "Rows: " in line]
    assert [row for row in range(1, 13) if f"12.jsonl:{row} " in line] == bad_rows


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_and_moments_are_those_before_the_step_also_if_the_next_one_has_started(
    precision: str, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA: the numbers of step 3 are read when step 4 was computed, whose numbers are fine."""
    monkeypatch.setattr(loop, "StepLog", DelayedLog)
    monkeypatch.setattr(step, "check_finite", lambda *_: None)
    bad = BadRows(3)
    with pytest.raises(NumericalError, match=f"step 3: loss nan(.|\n)*first bad module: {DOWN}: its output"):
        api.train(None, plain(settings, tmp_path, range(12), training__precision=precision), callbacks=[bad])
    assert bad.step == 4
    for name, value in bad.state().items():
        assert torch.equal(value, bad.before[name]), name
    assert [line["step"] for line in read_metrics(tmp_path / "run/metrics.jsonl")] == [1, 2]


def two_folders(folder: Path) -> tuple[Path, Path]:
    for name in ("a", "b"):
        (folder / name).mkdir()
    return folder / "a", folder / "b"


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """But for `epoch`, which counts what is drawn."""
    return [{key: value for key, value in line.items() if key != "epoch"} for line in exact_metrics(folder / "run")]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_skipped_batch_is_as_if_it_were_not_in_the_data(
    method: str, settings: Settings, tmp_path: Path, base_run: Path
) -> None:
    """Bit for bit; also for LoRA with dropout, and for what happens every n samples."""
    a, b = two_folders(tmp_path)
    changes: dict[str, Any] = {"data__validation_path": rows(tmp_path / "v.jsonl", range(4))}
    changes |= {"training__validate_every_samples": 4, "training__validate_at_end": False}

    def values(folder: Path, numbers: Any, **more: Any) -> dict[str, Any]:
        made = plain(settings, folder, numbers, **changes, **more)
        if method == "lora":
            made = {key: value for key, value in made.items() if not key.startswith("model.")}
            made |= {"model.path": str(base_run), "tuning.method": "lora", "tuning.lora_dropout": 0.2}
        return made

    skipped = values(a, range(16), debug__on_nan="skip")
    plant = Plant("weight", 3, 4) if method == "full" else Plant("adapter", 3, 4)
    api.train(None, skipped, callbacks=[plant])
    api.train(None, values(b, [number for number in range(16) if number not in (4, 5, 6, 7)]))
    assert saved_tensors(a / "run", 6) == saved_tensors(b / "run", 6)
    assert metrics_of(a) == metrics_of(b)
    assert [line["skipped_steps"] for line in read_metrics(a / "run/metrics.jsonl")] == [0, 0, 2, 2, 2, 2]
    # Both skips are of step 3, and each has its files.
    assert len(list((a / "run").glob("nan_grad_step_3*.pt"))) == 2
    # Resumed after the skip, bit for bit.
    part = skipped | {"output_dir": str(tmp_path / "part")}
    api.train(None, part, callbacks=[plant.again(), StopAt(3)])
    api.train(None, part)
    assert saved_tensors(tmp_path / "part", 6) == saved_tensors(a / "run", 6)
    assert exact_metrics(tmp_path / "part") == exact_metrics(a / "run")


@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize("mode", ["epochs", "tokens"])
def test_a_run_with_skipped_batches_is_as_long_and_has_the_same_learning_rates(
    mode: str, policy: str, settings: Settings, tmp_path: Path
) -> None:
    a, b = two_folders(tmp_path)
    changes: dict[str, Any] = {"training__max_steps": None, "checkpoint__every_steps": 100}
    changes["training__max_epochs" if mode == "epochs" else "training__max_tokens"] = 1 if mode == "epochs" else 1000
    # The last step, too, is skipped. A rollback goes to the start, without the four rows since then.
    plant = Plant("weight", 2, 6) if policy == "skip" else Plant("weight", 2)
    result = api.train(None, plain(settings, a, range(10), debug__on_nan=policy, **changes), callbacks=[plant])
    other = api.train(None, plain(settings, b, range(10), **changes))
    assert result.step == other.step == 5
    assert result.checkpoint is not None
    lines, others = read_metrics(a / "run/metrics.jsonl"), read_metrics(b / "run/metrics.jsonl")
    assert [line["lr"] for line in lines] == [line["lr"] for line in others]
    assert lines[-1]["total_tokens"] == others[-1]["total_tokens"] == 1000
    assert lines[-1]["epoch"] == pytest.approx(1.4)


def test_too_many_bad_batches_in_a_row_end_the_run(settings: Settings, tmp_path: Path) -> None:
    values = plain(settings, tmp_path, range(20), debug__on_nan="skip", debug__max_bad_steps=2)
    plant = Plant("weight", 2, 4, 6, 7, 8)
    with pytest.raises(NumericalError, match=r"more than 2 bad batches in a row \(debug.max_bad_steps\)") as caught:
        api.train(None, values, callbacks=[plant])
    assert plant.attempts == 8
    # Three steps are looked into.
    assert "not repeated to find the cause, as 3 steps were" in str(caught.value)
    assert len(list((tmp_path / "run").glob("nan_grad_step_*.pt"))) == 3


@pytest.mark.parametrize("method", ["full", "lora"])
def test_weights_that_are_loaded_with_nan_end_the_run_whatever_the_policy_is(
    method: str, settings: Settings, tmp_path: Path, base_run: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base_run / name, folder)
    tensors = load_file(base_run / "model.safetensors")
    tensors[LAYERNORM][3] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = {key: value for key, value in plain(settings, tmp_path, range(8)).items() if not key.startswith("model.")}
    values |= {"model.path": str(folder), "tuning.method": method, "debug.on_nan": "skip"}
    with pytest.raises(NumericalError, match="step 1: loss nan(.|\n)*its weights are not finite") as caught:
        api.train(None, values)
    assert caught.value.hint == (
        f"the weights in {folder} have NaN or infinite values: {LAYERNORM}; training cannot repair them: use another "
        "copy of the model"
    )


def test_a_rollback_leaves_out_the_data_since_the_checkpoint(settings: Settings, tmp_path: Path) -> None:
    a, b = two_folders(tmp_path)
    # Steps 3 and 4 come after the checkpoint of step 2; the rows of both are left out.
    api.train(None, plain(settings, a, range(16), debug__on_nan="rollback"), callbacks=[Plant("weight", 4)])
    api.train(None, plain(settings, b, [number for number in range(16) if number not in (4, 5, 6, 7)]))
    assert saved_tensors(a / "run", 6) == saved_tensors(b / "run", 6)
    lines = read_metrics(a / "run/metrics.jsonl")
    assert [(line["step"], line["rollbacks"]) for line in lines] == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 1)]
    log = (a / "run/logs/rank-0.log").read_text()
    assert "continuing from sample 8; the data in between is skipped" in log
    assert "changed since" not in log, "no setting has changed"


def test_a_rollback_keeps_the_limit_of_micro_batches(settings: Settings, tmp_path: Path) -> None:
    """Memory runs out in step 3, after the checkpoint that step 4 goes back to: not once more."""
    memory = Memory(112, first=3)
    values = plain(settings, tmp_path, range(16), debug__on_nan="rollback")
    api.train(None, values, callbacks=[memory, Plant("weight", 4)])
    lines = read_metrics(tmp_path / "run/metrics.jsonl")
    assert memory.failures == [3]
    assert [(line["rollbacks"], line["oom_splits"]) for line in lines][-1] == (1, 1)


def test_a_signal_before_a_rollback_is_not_lost(settings: Settings, tmp_path: Path) -> None:
    class Signal(Plant):
        def on_step_begin(self, run: Run, number: int) -> None:
            super().on_step_begin(run, number)
            if self.attempts == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    values = plain(settings, tmp_path, range(16), debug__on_nan="rollback")
    with pytest.raises(StoppedBySignal, match="stopped by SIGTERM after step 2, saved in"):
        api.train(None, values, callbacks=[Signal("weight", 4)])


def test_rollbacks_to_several_checkpoints_are_counted_once_each(settings: Settings, tmp_path: Path) -> None:
    """To the start, to step 2, and to the checkpoint of another run that this one resumed."""
    values = plain(settings, tmp_path, range(40), debug__on_nan="rollback")
    result = api.train(None, values, callbacks=[Plant("weight", 2, 5, 8)])
    lines = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [line["rollbacks"] for line in lines] == [1, 1, 2, 2, 3, 3]
    other = values | {"output_dir": str(tmp_path / "other"), "checkpoint.resume": str(result.checkpoint)}
    api.train(None, other | {"training.max_steps": 8}, callbacks=[Plant("weight", 1)])
    assert [(line["step"], line["rollbacks"]) for line in read_metrics(tmp_path / "other/metrics.jsonl")] == [
        (7, 4),
        (8, 4),
    ]


def test_a_run_that_only_goes_back_ends(settings: Settings, tmp_path: Path) -> None:
    values = plain(settings, tmp_path, range(40), debug__on_nan="rollback", debug__max_bad_steps=2)
    with pytest.raises(NumericalError, match="going back to the same checkpoint 2 times has not helped"):
        api.train(None, values, callbacks=[Plant("weight", 4, 6, 7, 8, 9, 10)])


class ZeroedWeights(Callback):
    """What is left of weights that a step has overshot."""

    def on_step_begin(self, run: Run, step: int) -> None:
        if step == 3:
            for _, parameter in run.model.named_parameters():
                parameter.data.zero_()


class TestDamage:
    """Numbers that are finite, of weights that are of no use."""

    @pytest.mark.parametrize(
        ("rate", "callbacks", "text"),
        [
            (1e-3, [], ""),
            (10.0, [], "and guessing any token gives"),
            (1e-3, [ZeroedWeights()], "all gradients are exactly 0"),
        ],
    )
    def test_a_run_that_destroys_its_model_warns_once(
        self, rate: float, callbacks: list[Callback], text: str, settings: Settings, tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        values = plain(settings, tmp_path, range(60), training__max_steps=12, observe__console="lines")
        values |= {"optim.learning_rate": rate, "optim.schedule": "constant", "optim.warmup_steps": 0}
        api.train(None, values, callbacks=callbacks)
        warnings = [line for line in capsys.readouterr().err.splitlines() if "a learning rate that is too high" in line]
        assert len(warnings) == bool(text)
        assert all(text in line for line in warnings)


class TestSpikes:
    def test_the_limit_is_robust(self) -> None:
        debug, losses = DebugConfig(), [3 + 0.01 * (-1) ** i for i in range(40)]
        assert loss_limit(losses[: MIN_LOSSES - 1], debug) == math.inf
        assert loss_limit(losses, debug) == pytest.approx(3 + 10 * 0.03, abs=0.02)
        # Ten outliers of forty do not move it.
        assert loss_limit([*losses[:30], *[1e6] * 10], debug) < 3.5
        assert loss_limit(losses, DebugConfig(on_spike="off")) == math.inf

    def test_a_loss_that_falls_fast_is_no_spike(self) -> None:
        losses = [11 * math.exp(-i / 10) + 1 for i in range(64)]
        assert all(losses[i] <= loss_limit(losses[max(0, i - 64) : i], DebugConfig()) for i in range(1, 64))

    @pytest.mark.parametrize("policy", ["warn", "skip", "rollback", "stop"])
    def test_what_happens_at_a_spike(self, policy: str, settings: Settings, tmp_path: Path) -> None:
        values = plain(settings, tmp_path, range(60), debug__on_spike=policy, training__max_steps=22)
        values |= {"optim.schedule": "constant", "checkpoint.every_steps": 100}
        plant = Plant("logits", 20, value=1000.0)
        if policy == "stop":
            with pytest.raises(
                NumericalError, match=r"step 20: loss .* is a spike, more than .*; its rows: .*60\.jsonl:39 "
            ):
                api.train(None, values, callbacks=[plant])
            return
        api.train(None, values, callbacks=[plant])
        last = read_metrics(tmp_path / "run/metrics.jsonl")[-1]
        counts = {"warn": (1, 0, 0), "skip": (0, 1, 0), "rollback": (0, 0, 1)}[policy]
        assert (last["loss_spikes"], last["skipped_steps"], last["rollbacks"]) == counts
        moved = [not torch.equal(w, plant.weights[21][name]) for name, w in plant.weights[20].items()]
        assert not any(moved) if policy == "skip" else all(moved)
        assert not list((tmp_path / "run").glob("nan_*")), "a spike has no dump"

    def test_the_device_leaves_out_the_update_of_a_spike(
        self, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(loop, "StepLog", DelayedLog)
        values = plain(settings, tmp_path, range(60), debug__on_spike="stop", training__max_steps=22)
        values |= {"checkpoint.every_steps": 100}
        plant = Plant("logits", 20, value=1000.0)
        with pytest.raises(NumericalError, match="step 20: loss .* is a spike"):
            api.train(None, values, callbacks=[plant])
        assert plant.attempts == 21
        for name, parameter in plant.runner.model.named_parameters():
            assert torch.equal(parameter, plant.weights[20][name]), name

    def test_what_a_spike_is_compared_with(
        self, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not skipped losses, and not the one just before; also after a resume, and if numbers are read later."""
        seen: list[list[float]] = []

        def record(losses: list[float], debug: DebugConfig) -> float:
            seen.append(list(losses))
            return math.inf

        monkeypatch.setattr(step_log, "loss_limit", record)
        values = plain(settings, tmp_path, range(20), debug__on_nan="skip")
        api.train(None, values, callbacks=[Plant("logits", 3), StopAt(4)])
        api.train(None, values)
        losses = [line["loss"] for line in read_metrics(tmp_path / "run/metrics.jsonl")]
        assert seen == [losses[:n] for n in (0, 0, 1, 1, 2, 3, 4)]
        monkeypatch.setattr(loop, "StepLog", DelayedLog)
        seen.clear()
        api.train(None, values | {"debug.on_nan": "stop", "output_dir": str(tmp_path / "delayed")})
        assert [len(each) for each in seen] == [0, 0, 1, 2, 3, 4]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, short_run: dict[str, Any]) -> Path:
    folder = tmp_path_factory.mktemp("dump")
    values = short_run | {
        "data.path": rows(folder / "12.jsonl", range(12)), "data.text_packing": "best-fit",
        "data.context_length": 128, "training.global_batch_size": 2, "training.max_steps": 3,
        "output_dir": str(folder / "run"),
    }  # fmt: skip
    with pytest.raises(NumericalError):
        api.train(None, values, callbacks=[Plant("weight", 2)])
    return folder / "run"


class TestDumps:
    def test_the_snippet_of_the_document_reads_it(
        self, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(run.parent)
        os.symlink("run", ".checkpoints")
        with open(".checkpoints/debug/nan_debug_step_2.pkl", "rb") as f:
            debug_data = pickle.load(f)
        for name, param in debug_data["parameters"].items():
            if np.isnan(param).any():
                print(f"{name} has NaN values")
        for name, grad in debug_data["gradients"].items():
            if np.isnan(grad).any():
                nan_ratio = np.isnan(grad).sum() / grad.size
                print(f"{name}: {nan_ratio * 100:.1f}% NaN")
        assert capsys.readouterr().out == f"{DOWN}.weight: 100.0% NaN\n"

    def test_the_other_file_repeats_the_step(self, run: Path) -> None:
        dump = torch.load(run / "nan_grad_step_2.pt", weights_only=True)
        (batch,) = dump["batch"]
        assert batch["ids"].shape == batch["labels"].shape
        assert int((batch["labels"] != -100).sum()) == dump["loss_tokens"]
        assert len(dump["rows"]) == 2
        assert all(weight.isfinite().all() for weight in dump["model"].values())
        assert dump["config"]["training"]["global_batch_size"] == 2

    @pytest.mark.parametrize("name", ["nan_grad_step_2.pt", "debug/nan_debug_step_2.pkl"])
    def test_the_command_shows_it(self, name: str, run: Path, torchstone: Torchstone) -> None:
        code, out, err = torchstone("debug", "show", str(run / name))
        assert code == 0, err
        assert f"first bad module: {DOWN}: the gradient of its weight" in out
        # Of the others only how large they are, unless all are finite, as the weights are.
        lines, tensors = out.splitlines(), len(read_dump(run / name)["model" if name.endswith(".pt") else "gradients"])
        if name.endswith(".pt"):
            assert sum("mean |x|" in line for line in lines) == tensors
        else:
            assert [line.split()[0] for line in lines if " NaN, " in line] == [f"{DOWN}.weight"]
            assert sum(re.match(rf"  {tensors - 1} finite: \|x\| up to \d", line) is not None for line in lines) == 1
            assert not [line for line in lines if "mean |x|" in line]
        out = torchstone("debug", "show", str(run / name), "--json")[1]
        # JSON has no NaN.
        summary = json.loads(out, parse_constant=pytest.fail)
        assert summary["grad_norm"] == "nan"
        assert summary["bad_gradients"] == [f"{DOWN}.weight"]
        (kind,) = {"model", "gradients"} & summary["tensors"].keys()
        bad = {each["name"]: each["nan"] for each in summary["tensors"][kind] if each["nan"]}
        assert bad == ({} if kind == "model" else {f"{DOWN}.weight": 128 * 32})

    @pytest.mark.parametrize("what", ["code", "pointers", "weights", "text"])
    def test_another_file_is_refused_and_not_executed(self, what: str, run: Path, tmp_path: Path) -> None:
        class Call:
            def __init__(self, function: Any, *args: Any) -> None:
                self.reduced = function, args

            def __reduce__(self) -> Any:
                return self.reduced

        path = tmp_path / ("nan_debug_step_1.pkl" if what != "weights" else "nan_grad_step_1.pt")
        dump = pickle.loads((run / "debug/nan_debug_step_2.pkl").read_bytes())
        if what == "code":
            path.write_bytes(pickle.dumps(dump | {"parameters": Call(os.mkdir, str(tmp_path / "executed"))}))
        elif what == "pointers":
            objects = Call(np.ndarray, (1,), np.dtype("O"), b"A" * 8)
            path.write_bytes(pickle.dumps(dump | {"gradients": {"x": objects}}, protocol=4))
        elif what == "weights":
            torch.save({"weight": torch.ones(2)}, path)
        else:
            path.write_text("text")
        with pytest.raises(UsageError, match="is not a dump: "):
            read_dump(path)
        assert not (tmp_path / "executed").exists()

    def test_a_disk_that_refuses_the_files_does_not_hide_the_report(self, settings: Settings, tmp_path: Path) -> None:
        values = plain(settings, tmp_path, range(12))
        (tmp_path / "run").mkdir()
        (tmp_path / "run/debug").write_text("a file where the folder should be")
        with pytest.raises(NumericalError, match=f"first bad module: {DOWN}.*The tensors could not be written: "):
            api.train(None, values, callbacks=[Plant("weight", 1)])
        assert "NaN GRADIENT DETECTED" in (tmp_path / "run/logs/rank-0.log").read_text()

    @pytest.mark.parametrize("limit", ["100KB", "0"])
    def test_its_size_is_limited(self, limit: str, settings: Settings, tmp_path: Path) -> None:
        values = plain(settings, tmp_path, range(12), debug__dump_limit=limit)
        with pytest.raises(NumericalError):
            api.train(None, values, callbacks=[Plant("weight", 1)])
        files = [*(tmp_path / "run").glob("nan_*"), *(tmp_path / "run").glob("debug/*")]
        if limit == "0":
            assert not files
            return
        # The bad gradient and its weight come first. The batch is besides: 200 tokens of four tensors.
        assert sum(file.stat().st_size for file in files) < 100_000 + 200 * 4 * 8 + 25_000
        dump = read_dump(tmp_path / "run/debug/nan_debug_step_1.pkl")
        assert f"{DOWN}.weight" in dump["gradients"]
        assert dump["omitted"]["parameters"]


def first_bad_module(values: dict[str, Any], rank: int, module: str, where: str) -> str:
    """On every rank: trains until a module of `rank` has a bad output, or makes a bad gradient; returns the error."""

    class Hook(Callback):
        def on_start(self, run: Run) -> None:
            named = {name: each for part in run.model.model_parts for name, each in part.named_modules()}
            if run.ctx.rank != rank or module not in named:
                return

            def hook(_: Any, args: Any, output: Tensor) -> Tensor | None:
                if where == "output":
                    return output * math.nan
                output.register_hook(lambda gradient: gradient * math.nan)
                return None

            named[module].register_forward_hook(hook)

    with pytest.raises(NumericalError) as caught:
        api.train(None, values, callbacks=[Hook()])
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "rank", "module", "where", "expected"),
    [
        # All ranks see the NaN later, but it begins on rank 1.
        ("tp", 1, "layers.0.attention", "output", "model.layers.0.self_attn: its output (rank 1"),
        ("tp", 1, "layers.1.mlp.down", "output", "model.layers.1.mlp.down_proj: its output (rank 1"),
        ("dp_shard", 1, "layers.0.mlp.up", "output", "model.layers.0.mlp.up_proj: its output (rank 1"),
        ("pp", 0, "layers.0.mlp", "output", "model.layers.0.mlp: its output (rank 0)"),
        ("pp", 1, "layers.1.mlp.down", "output", "model.layers.1.mlp.down_proj: its output (rank 1)"),
        # The first stage gets a gradient that is bad already.
        ("pp", 1, "layers.1.attention", "gradient", "model.layers.1.self_attn.o_proj: the gradient of its input"),
        ("pp", 1, "head", "gradient", "the head or the loss: its gradient (rank 1"),
    ],
)
def test_the_first_bad_module_of_several_ranks(
    layout: str, rank: int, module: str, where: str, expected: str, settings: Settings, tmp_path: Path
) -> None:
    values = settings() | {f"parallel.{layout}": 2}
    errors = launch_procs(first_bad_module, 2, values, rank, module, where, timeout=120)
    assert all(f"first bad module: {expected}" in error for error in errors), errors
    # What two ranks hold is counted once.
    counts = re.findall(r"NaN count: (\d+)/(\d+)", (tmp_path / "run/logs/rank-0.log").read_text())
    assert counts
    assert all(0 < int(bad) <= int(size) for bad, size in counts)


@pytest.mark.parametrize("method", ["full", "lora", "osft"])
def test_a_bad_gradient_of_the_loss_is_not_blamed_on_a_module(
    method: str, settings: Settings, base_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bad_gradient(logits: Tensor, labels: Tensor) -> Tensor:
        logits = logits.view_as(logits)
        logits.register_hook(lambda gradient: gradient * math.nan)
        return token_loss_sum(logits, labels)

    monkeypatch.setattr(runner_module, "token_loss_sum", bad_gradient)
    values = settings()
    if method != "full":
        values = {key: value for key, value in values.items() if not key.startswith("model.")}
        values |= {"model.path": str(base_run), "tuning.method": method}
    assert "first bad module: the head or the loss: its gradient" in first_bad_module(values, 0, "none", "gradient")


def test_a_loss_that_overflows_is_the_loss(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "token_loss_sum", lambda *args: token_loss_sum(*args) * 1e30 * 1e30)
    error = first_bad_module(settings(), 0, "none", "output")
    assert "first bad module: the head or the loss: its gradient" in error


def test_a_replay_has_the_random_numbers_of_the_step(settings: Settings, tmp_path: Path, base_run: Path) -> None:
    values = {key: value for key, value in plain(settings, tmp_path, range(8)).items() if not key.startswith("model.")}
    values |= {"model.path": str(base_run), "tuning.method": "lora", "tuning.lora_dropout": 0.5}
    outputs: list[Tensor] = []

    class Keep(Plant):
        def on_step_begin(self, run: Run, number: int) -> None:
            super().on_step_begin(run, number)
            outputs.clear()
            norm = run.model.module.norm
            self.handles.append(norm.register_forward_hook(lambda _, args, output: outputs.append(output.detach())))

    with pytest.raises(NumericalError):
        api.train(None, values, callbacks=[Keep("adapter", 2)])
    first, again = outputs
    assert torch.equal(first, again)


def test_a_replay_that_fails_on_one_rank_does_not_hide_the_nan(settings: Settings, tmp_path: Path) -> None:
    # It cannot go on, whatever the policy is.
    values = settings(debug__on_nan="skip") | {"parallel.dp_shard": 2}
    with pytest.raises(RankFailure) as caught:
        launch_procs(train_with_a_failing_replay, 2, values, timeout=120)
    assert "NumericalError: step 1: loss nan" in str(caught.value)
    assert "the step could not be repeated (out of memory)" in str(caught.value)
    assert (tmp_path / "run/nan_grad_step_1_rank1.pt").is_file()


def train_with_a_failing_replay(values: dict[str, Any]) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("out of memory")

    if os.environ["RANK"] == "1":
        nan_report.find_origin = fail  # type: ignore[assignment]
    api.train(None, values, callbacks=[Plant("logits", 1)])


def train_with_a_planted_nan(values: dict[str, Any], bad_rank: int, bad_step: int) -> dict[str, Any]:
    """On every rank: NaN in one element of one gradient of `bad_rank`, after all reductions."""
    calls, states, names = [0], dict[int, Any](), list[str]()
    forward_backward = Runner.forward_backward

    def planted(self: Runner, batches: list[MicroBatch], loss_tokens: int) -> Tensor:
        result = forward_backward(self, batches, loss_tokens)
        calls[0] += 1
        if calls[0] == bad_step and self.ctx.rank == bad_rank:
            shards = {name: to_local(p.grad) for name, p in self.model.named_parameters() if "norm" in name}
            name, gradient = next((name, shard) for name, shard in shards.items() if shard.numel())
            gradient.view(-1)[0] = math.nan
            names.append(hf_name(self.model, name))
        return result

    class Keep(Callback):
        def on_step_begin(self, run: Run, number: int) -> None:
            tensors = {name: to_local(p).detach().clone() for name, p in run.model.named_parameters()}
            for parameter, state in run.optimizer.state.items():
                for key, value in state.items():
                    tensors[f"{id(parameter)} {key}"] = to_local(value).clone()
            states[len(states)] = tensors

    Runner.forward_backward = planted  # type: ignore[method-assign]
    try:
        result = api.train(None, values, callbacks=[Keep()])
    finally:
        Runner.forward_backward = forward_backward  # type: ignore[method-assign]
    before, after = states[bad_step - 1], states[bad_step]
    is_same = before.keys() == after.keys() and all(torch.equal(after[name], value) for name, value in before.items())
    return {"step": result.step, "loss": result.loss, "is_same": is_same, "planted": names, "attempts": len(states)}


@pytest.mark.parametrize("layout", ["dp_replicate", "dp_shard", "tp", "pp"])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_all_ranks_act_alike_at_a_nan_in_one_gradient_of_one_rank(
    layout: str, bad_rank: int, settings: Settings, tmp_path: Path
) -> None:
    values = settings(debug__on_nan="skip", training__max_steps=4) | {f"parallel.{layout}": 2}
    ranks = launch_procs(train_with_a_planted_nan, 2, values, bad_rank, 3, timeout=120)
    ((planted,),) = [rank.pop("planted") for rank in ranks if rank["planted"]]
    ranks[1 - bad_rank].pop("planted", None)
    assert ranks[0] == ranks[1]
    assert ranks[0]["is_same"]
    assert (ranks[0]["step"], ranks[0]["attempts"]) == (4, 5)
    assert [line["skipped_steps"] for line in read_metrics(tmp_path / "run/metrics.jsonl")] == [0, 0, 1, 1]
    log = (tmp_path / "run/logs/rank-0.log").read_text()
    assert f"Affected layers: ['{planted}']" in log
    assert f"first bad module: {planted.removesuffix('.weight')}" in log
    suffix = "_rank1" if bad_rank else ""
    gradients = read_dump(tmp_path / f"run/debug/nan_debug_step_3{suffix}.pkl")["gradients"]
    assert [name for name, gradient in gradients.items() if np.isnan(gradient).any()] == [planted]

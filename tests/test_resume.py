"""Killed at any step and started again: the same losses and the same weights, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import processes
from torchstone import api
from torchstone.config import load_config
from torchstone.errors import CheckpointError, UsageError
from torchstone.observe.metrics import read_metrics
from torchstone.training.loop import Callback, Run

Settings = Callable[..., dict[str, Any]]
# Fields of a metrics line that are the run's and not the clock's.
EXACT = ("step", "loss", "lr", "grad_norm", "tokens", "loss_tokens", "samples", "epoch", "total_tokens", "val_loss")
STEPS = 9


def trace(folder: str | Path) -> list[dict[str, Any]]:
    return [{key: line.get(key) for key in EXACT} for line in read_metrics(Path(folder) / "metrics.jsonl")]


def weights(folder: str | Path, step: int = STEPS) -> bytes:
    return (Path(folder) / f"checkpoints/step-{step:08d}/model.safetensors").read_bytes()


def moments(folder: str | Path, step: int = STEPS) -> bytes:
    return (Path(folder) / f"checkpoints/step-{step:08d}/optimizer.safetensors").read_bytes()


def small(settings: Settings, chat_file: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """30 conversations in batches of 7: the epoch's edge lies inside step 5; a checkpoint every second step."""
    given = {
        "data__path": str(chat_file), "data__context_length": 64, "training__max_steps": STEPS,
        "training__global_batch_size": 7, "checkpoint__every_steps": 2, "output_dir": str(output),
    }  # fmt: skip
    return settings(**(given | changes))


@pytest.fixture(params=["packed", "padded", "text"])
def overrides(request: pytest.FixtureRequest, settings: Settings, chat_file: Path, tmp_path: Path) -> dict[str, Any]:
    if request.param == "text":
        return settings(
            training__max_steps=STEPS, training__global_batch_size=20, training__batch_size=8,
            checkpoint__every_steps=2, output_dir=str(tmp_path / "whole"),
        )  # fmt: skip
    changes: dict[str, Any] = {} if request.param == "packed" else {"data__packing": False, "training__batch_size": 3}
    return small(settings, chat_file, tmp_path / "whole", **changes)


def assert_same_run(a: str | Path, b: str | Path) -> None:
    assert trace(a) == trace(b)
    assert weights(a) == weights(b)
    assert moments(a) == moments(b)


def test_killed_at_every_step_ends_as_if_never_killed(overrides: dict[str, Any], tmp_path: Path) -> None:
    assert processes.run(processes.train, overrides) == 0
    whole = overrides["output_dir"]
    assert [line["step"] for line in trace(whole)] == list(range(1, STEPS + 1))
    assert trace(whole)[-1]["epoch"] > 1, "the run must cross an epoch's edge"

    killed = overrides | {"output_dir": str(tmp_path / "killed")}
    for step in range(1, STEPS + 1):
        assert processes.run(processes.train, killed, (processes.KillAt(step, "step"),)) == -signal.SIGKILL
    assert processes.run(processes.train, killed) == 0
    assert_same_run(whole, killed["output_dir"])


@pytest.mark.parametrize("when", ["checkpoint", "saving"])
def test_killed_around_a_save_ends_as_if_never_killed(
    settings: Settings, chat_file: Path, tmp_path: Path, when: str
) -> None:
    overrides = small(settings, chat_file, tmp_path / "whole")
    assert processes.run(processes.train, overrides) == 0
    killed = overrides | {"output_dir": str(tmp_path / "killed")}
    for step in (2, 4, 6):
        callback = processes.KillAt(step, "checkpoint") if when == "checkpoint" else processes.KillWhileSaving(step)
        assert processes.run(processes.train, killed, (callback,)) == -signal.SIGKILL
        listed = sorted(path.name for path in (tmp_path / "killed/checkpoints").glob("step-*"))
        assert (f"step-{step:08d}" in listed) == (when == "checkpoint")
        if when == "saving":
            # The half-written folder stays under its hidden name until the next start removes it.
            assert processes.run(processes.train, killed, (processes.KillAt(step, "checkpoint"),)) == -signal.SIGKILL
    assert processes.run(processes.train, killed) == 0
    assert not list((tmp_path / "killed/checkpoints").glob(".step-*"))
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_kill_minus_nine_from_outside_on_the_command_line(settings: Settings, chat_file: Path, tmp_path: Path) -> None:
    overrides = small(settings, chat_file, tmp_path / "whole", training__max_steps=60, checkpoint__every_steps=5)
    overrides["system.threads"] = 1
    assert processes.run(processes.train, overrides) == 0
    killed = overrides | {"output_dir": str(tmp_path / "killed")}
    config = tmp_path / "run.json"
    config.write_text(json.dumps(killed))
    command = [sys.executable, "-m", "torchstone.cli", "train", str(config)]
    process = subprocess.Popen(command)
    metrics = tmp_path / "killed/metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") >= 13):
        assert process.poll() is None, "ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert len(trace(tmp_path / "killed")) < 60
    assert subprocess.run(command, check=False).returncode == 0
    assert trace(tmp_path / "whole") == trace(tmp_path / "killed")
    assert weights(tmp_path / "whole", 60) == weights(tmp_path / "killed", 60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_with_75_and_the_same_command_goes_on(
    settings: Settings, chat_file: Path, tmp_path: Path, number: signal.Signals
) -> None:
    overrides = small(settings, chat_file, tmp_path / "whole")
    assert processes.run(processes.train, overrides) == 0
    stopped = overrides | {"output_dir": str(tmp_path / "stopped")}
    assert processes.run(train_and_signal, stopped, 3, number) == 75
    assert [p.name for p in sorted((tmp_path / "stopped/checkpoints").iterdir())] == ["step-00000002", "step-00000003"]
    assert processes.run(processes.train, stopped) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.parametrize("where", ["on_step", "on_validation"])
def test_a_signal_around_a_validation_loses_nothing(
    settings: Settings, chat_file: Path, tmp_path: Path, where: str
) -> None:
    """Stopped at every validation, also the last: the same losses, the same best checkpoint."""
    changes = {
        "data__validation_path": str(chat_file), "training__validate_every_steps": 2, "checkpoint__save_best": True,
        "checkpoint__keep_last": 1, "training__max_steps": 6,
    }  # fmt: skip
    overrides = small(settings, chat_file, tmp_path / "whole", **changes)
    assert processes.run(processes.train, overrides) == 0
    stopped = overrides | {"output_dir": str(tmp_path / "stopped")}
    for step in (2, 4, 6):
        assert processes.run(train_and_signal, stopped, step, signal.SIGTERM, where) == 75
    assert processes.run(processes.train, stopped) == 0
    assert trace(tmp_path / "stopped") == trace(tmp_path / "whole")
    assert sum(line["val_loss"] is not None for line in trace(tmp_path / "whole")) == 3
    best = [(tmp_path / name / "checkpoints/best.json").read_text() for name in ("stopped", "whole")]
    assert best[0] == best[1]
    assert weights(tmp_path / "stopped", 6) == weights(tmp_path / "whole", 6)


def test_killed_before_the_best_is_marked_keeps_the_best(settings: Settings, chat_file: Path, tmp_path: Path) -> None:
    """The checkpoint is committed, best.json still names the one before."""
    overrides = small(
        settings, chat_file, tmp_path / "run", data__validation_path=str(chat_file), training__validate_every_steps=2,
        checkpoint__save_best=True, checkpoint__keep_last=1, training__max_steps=4,
    )  # fmt: skip
    assert processes.run(train_and_die_marking, overrides, 4) == -signal.SIGKILL
    root = tmp_path / "run/checkpoints"
    assert json.loads((root / "best.json").read_text())["step"] == 2
    assert json.loads((root / "step-00000004/state.json").read_text())["best_step"] == 4
    worse = {"training.max_steps": 5, "optim.learning_rate": 1.0, "optim.schedule": "constant"}
    assert processes.run(processes.train, overrides | worse) == 0
    assert json.loads((root / "best.json").read_text())["step"] == 4
    assert (root / "step-00000004").is_dir()


def train_and_die_marking(overrides: dict[str, Any], step: int) -> None:
    from torchstone.training import loop

    honest = loop.mark_best

    def mark(root: Path, number: int, loss: float) -> None:
        if number == step:
            os.kill(os.getpid(), signal.SIGKILL)
        honest(root, number, loss)

    loop.mark_best = mark
    processes.train(overrides)


class SignalAt(Callback):
    def __init__(self, step: int, number: signal.Signals, where: str) -> None:
        self.step, self.number, self.where = step, number, where

    def on_step(self, run: Run, values: dict[str, Any]) -> None:
        self.send("on_step", values["step"])

    def on_validation(self, run: Run, loss: float) -> None:
        self.send("on_validation", run.progress.step)

    def send(self, where: str, step: int) -> None:
        if (where, step) == (self.where, self.step):
            os.kill(os.getpid(), self.number)


def train_and_signal(overrides: dict[str, Any], step: int, number: signal.Signals, where: str = "on_step") -> None:
    processes.train(overrides, (SignalAt(step, number, where),))


class TestAnotherBatchSize:
    @pytest.mark.parametrize(("first", "then"), [(4, 8), (8, 4), (3, 7)])
    def test_an_epoch_is_still_every_sample_once(
        self, settings: Settings, chat_file: Path, tmp_path: Path, first: int, then: int
    ) -> None:
        given = {"training__max_steps": None, "training__max_epochs": 1}
        start = small(settings, chat_file, tmp_path / "run", training__global_batch_size=first, **given)
        api.train(load_config(overrides=start), callbacks=[StopAt(2)])
        api.train(load_config(overrides=start | {"training.global_batch_size": then}))
        lines = trace(tmp_path / "run")
        assert sum(line["samples"] for line in lines) == 30
        assert len(lines) == 2 + -(-(30 - 2 * first) // then)
        assert all(line["lr"] > 0 for line in lines)

    @pytest.mark.parametrize(("first", "then"), [(4, 8), (8, 4)])
    def test_steps_are_still_steps(
        self, settings: Settings, chat_file: Path, tmp_path: Path, first: int, then: int
    ) -> None:
        start = small(settings, chat_file, tmp_path / "run", training__global_batch_size=first, training__max_steps=6)
        api.train(load_config(overrides=start), callbacks=[StopAt(3)])
        api.train(load_config(overrides=start | {"training.global_batch_size": then}))
        assert [line["samples"] for line in trace(tmp_path / "run")] == [first] * 3 + [then] * 3

    def test_more_epochs_go_on_after_a_smaller_last_step(
        self, settings: Settings, chat_file: Path, tmp_path: Path
    ) -> None:
        start = small(settings, chat_file, tmp_path / "run", training__max_steps=None, training__max_epochs=1)
        api.train(load_config(overrides=start))
        api.train(load_config(overrides=start | {"training.max_epochs": 2}))
        lines = trace(tmp_path / "run")
        assert [line["samples"] for line in lines] == [7, 7, 7, 7, 2] * 2
        assert all(line["lr"] > 0 for line in lines)


class TestWhatResumeRefuses:
    @pytest.mark.parametrize(
        "change",
        [
            {"model.path": "elsewhere", "model.depth": None, "model.width": None, "model.heads": None},
            {"model.init_std": 0.5},
            {"training.precision": "bf16-pure"},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_a_setting_that_would_not_be_applied_is_refused(
        self, settings: Settings, chat_file: Path, tmp_path: Path, change: dict[str, Any]
    ) -> None:
        overrides = small(settings, chat_file, tmp_path / "run", training__max_steps=2)
        api.train(load_config(overrides=overrides))
        with pytest.raises(CheckpointError, match=f"another model, data or order of samples: .*{next(iter(change))}"):
            api.train(load_config(overrides=overrides | {"training.max_steps": 4} | change))

    def test_a_run_from_a_named_checkpoint_goes_on_by_the_same_command(
        self, settings: Settings, chat_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        overrides = small(settings, chat_file, tmp_path / "run")
        api.train(load_config(overrides=overrides))
        older = str(tmp_path / "run/checkpoints/step-00000002")
        named = overrides | {"checkpoint.resume": older, "output_dir": str(tmp_path / "b")}
        api.train(load_config(overrides=named), callbacks=[StopAt(5)])
        api.train(load_config(overrides=named))
        assert "going on from them" in capsys.readouterr().err
        assert trace(tmp_path / "b") == trace(tmp_path / "run")[2:]
        assert weights(tmp_path / "b") == weights(tmp_path / "run")

    def test_other_data_is_refused(self, settings: Settings, chat_file: Path, tmp_path: Path) -> None:
        overrides = small(settings, chat_file, tmp_path / "run", training__max_steps=2)
        api.train(load_config(overrides=overrides))
        for change in ({"training.seed": 1}, {"data.shuffle": False}, {"data.validation_split": 0.2}):
            with pytest.raises(CheckpointError, match=f"order of samples: .*{next(iter(change))}"):
                api.train(load_config(overrides=overrides | {"training.max_steps": 4} | change))

    def test_another_model_is_refused(self, settings: Settings, chat_file: Path, tmp_path: Path) -> None:
        overrides = small(settings, chat_file, tmp_path / "run", training__max_steps=2)
        api.train(load_config(overrides=overrides))
        with pytest.raises(CheckpointError, match="holds another model"):
            api.train(load_config(overrides=overrides | {"model.depth": 3}))

    def test_never_refuses_a_used_folder(self, settings: Settings, chat_file: Path, tmp_path: Path) -> None:
        overrides = small(settings, chat_file, tmp_path / "run", training__max_steps=2)
        api.train(load_config(overrides=overrides))
        with pytest.raises(UsageError, match="already holds a run"):
            api.train(load_config(overrides=overrides | {"checkpoint.resume": "never"}))

    def test_a_damaged_newest_checkpoint_is_passed_over_aloud(
        self, settings: Settings, chat_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        overrides = small(settings, chat_file, tmp_path / "whole")
        api.train(load_config(overrides=overrides))
        damaged = overrides | {"output_dir": str(tmp_path / "damaged")}
        api.train(load_config(overrides=damaged | {"training.max_steps": STEPS}), callbacks=[StopAt(4)])
        path = tmp_path / "damaged/checkpoints/step-00000004/optimizer.safetensors"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        api.train(load_config(overrides=damaged))
        assert "optimizer.safetensors: damaged" in capsys.readouterr().err
        assert_same_run(tmp_path / "whole", tmp_path / "damaged")

    def test_no_whole_checkpoint_left_is_an_error_not_a_fresh_start(
        self, settings: Settings, chat_file: Path, tmp_path: Path
    ) -> None:
        overrides = small(settings, chat_file, tmp_path / "run", training__max_steps=2)
        api.train(load_config(overrides=overrides))
        (tmp_path / "run/checkpoints/step-00000002/model.safetensors").write_bytes(b"")
        with pytest.raises(CheckpointError, match="no checkpoint in .* is whole"):
            api.train(load_config(overrides=overrides | {"training.max_steps": 4}))

    def test_an_older_checkpoint_beside_newer_ones_is_refused(
        self, settings: Settings, chat_file: Path, tmp_path: Path
    ) -> None:
        overrides = small(settings, chat_file, tmp_path / "run", training__max_steps=4)
        api.train(load_config(overrides=overrides))
        older = str(tmp_path / "run/checkpoints/step-00000002")
        with pytest.raises(CheckpointError, match="newer than step-00000002: step-00000004"):
            api.train(load_config(overrides=overrides | {"checkpoint.resume": older}))

    def test_a_named_checkpoint_continues_in_another_folder(
        self, settings: Settings, chat_file: Path, tmp_path: Path
    ) -> None:
        overrides = small(settings, chat_file, tmp_path / "run")
        api.train(load_config(overrides=overrides))
        older = str(tmp_path / "run/checkpoints/step-00000004")
        other = overrides | {"checkpoint.resume": older, "output_dir": str(tmp_path / "other")}
        api.train(load_config(overrides=other))
        assert trace(tmp_path / "other") == trace(tmp_path / "run")[4:]
        assert weights(tmp_path / "other") == weights(tmp_path / "run")


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: Run, values: dict[str, Any]) -> None:
        if values["step"] == self.step:
            run.stop("the test says so")

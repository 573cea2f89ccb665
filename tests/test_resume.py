"""A run that is killed or stopped at any step and resumed has the same losses and weights, bit for bit."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import processes
from exact_runs import StopAt, assert_same_run, exact_metrics, saved_tensors
from selection import the_rest
from torchstone import api
from torchstone.checkpoint import manifest
from torchstone.config import load_config
from torchstone.data.loader import StepBatch
from torchstone.errors import CheckpointError, StoppedBySignal, UsageError
from torchstone.observe.metrics import read_metrics
from torchstone.training.run import Callback, Run

Settings = Callable[..., dict[str, Any]]
STEPS = 9


class SignalAt(Callback):
    """Sends a signal to this process, in the callback `where` of a step."""

    def __init__(self, step: int, number: signal.Signals, where: str = "on_step") -> None:
        self.step, self.number, self.where = step, number, where

    def on_step(self, run: Run, metrics: dict[str, Any]) -> None:
        self.send("on_step", metrics["step"])

    def on_validation(self, run: Run, loss: float) -> None:
        self.send("on_validation", run.progress.step)

    def send(self, where: str, step: int) -> None:
        if (where, step) == (self.where, self.step):
            os.kill(os.getpid(), self.number)


def train_and_signal(overrides: dict[str, Any], step: int, number: signal.Signals, where: str = "on_step") -> None:
    # A background job of a shell ignores SIGINT.
    signal.signal(number, signal.SIG_DFL)
    processes.train(overrides, (SignalAt(step, number, where),))


def train_and_die_before_marking(overrides: dict[str, Any], step: int) -> None:
    from torchstone.training import loop

    mark_best = loop.mark_best

    def mark_or_die(root: Path, number: int, loss: float) -> None:
        if number == step:
            os.kill(os.getpid(), signal.SIGKILL)
        mark_best(root, number, loss)

    loop.mark_best = mark_or_die
    processes.train(overrides)


def chat_run(settings: Settings, chat_file: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """30 conversations in steps of 7: the first epoch ends within step 5. A checkpoint every second step, all kept."""
    base = {
        "data__path": str(chat_file), "data__context_length": 64, "training__max_steps": STEPS,
        "training__global_batch_size": 7, "checkpoint__every_steps": 2, "checkpoint__keep_last": None,
        "output_dir": str(output),
    }  # fmt: skip
    return settings(**(base | changes))


@pytest.mark.parametrize("rows", ["packed", *(pytest.param(rows, marks=the_rest) for rows in ("padded", "text"))])
def test_killed_at_every_step(settings: Settings, chat_file: Path, tmp_path: Path, rows: str) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    changes: dict[str, Any] = {} if rows == "packed" else {"data__packing": False, "training__batch_size": 3}
    overrides = chat_run(settings, chat_file, whole, **changes)
    if rows == "text":
        overrides = settings(
            training__max_steps=STEPS, training__global_batch_size=20, training__batch_size=8,
            checkpoint__every_steps=2, output_dir=str(whole),
        )  # fmt: skip
    assert processes.run(processes.train, overrides) == 0
    assert [line["step"] for line in exact_metrics(whole)] == list(range(1, STEPS + 1))
    assert exact_metrics(whole)[-1]["epoch"] > 1, "the run must cross the end of an epoch"

    overrides["output_dir"] = str(killed)
    for step in range(1, STEPS + 1):
        assert processes.run(processes.train, overrides, (processes.KillAt(step, "step"),)) == -signal.SIGKILL
    assert processes.run(processes.train, overrides) == 0
    assert_same_run(whole, killed, STEPS)


def test_killed_while_and_after_saving(settings: Settings, chat_file: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert processes.run(processes.train, chat_run(settings, chat_file, whole)) == 0
    overrides = chat_run(settings, chat_file, killed)
    for step in (2, 4, 6):
        folder = killed / f"checkpoints/step-{step:08d}"
        assert processes.run(processes.train, overrides, (processes.KillWhileSaving(step),)) == -signal.SIGKILL
        assert not folder.exists()
        assert list(folder.parent.glob(".step-*")), "the half-written folder has a hidden name"
        assert processes.run(processes.train, overrides, (processes.KillAt(step, "checkpoint"),)) == -signal.SIGKILL
        assert folder.exists()
    assert processes.run(processes.train, overrides) == 0
    assert not list((killed / "checkpoints").glob(".step-*"))
    assert_same_run(whole, killed, STEPS)


@the_rest
def test_the_command_killed_from_outside(settings: Settings, chat_file: Path, tmp_path: Path) -> None:
    """At a time that nobody chose: the run has no end until it is killed."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    changes = {"training__max_steps": 10**6, "checkpoint__every_steps": 5, "optim__schedule": "constant"}
    overrides = chat_run(settings, chat_file, killed, **changes) | {"system.threads": 1}
    config = tmp_path / "run.json"
    config.write_text(json.dumps(overrides))
    command = [sys.executable, "-m", "torchstone", "train", str(config)]
    process = subprocess.Popen(command)
    metrics = killed / "metrics.jsonl"
    deadline = time.monotonic() + processes.TIMEOUT
    while not (metrics.exists() and metrics.read_text().count("\n") >= 13):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    steps = manifest.list_checkpoints(killed / "checkpoints")[-1][0] + 7
    assert subprocess.run([*command, "--training.max_steps", str(steps)], check=False).returncode == 0
    assert processes.run(processes.train, overrides | {"training.max_steps": steps, "output_dir": str(whole)}) == 0
    assert_same_run(whole, killed, steps)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=the_rest)])
def test_a_signal_saves_and_exits_with_75(
    settings: Settings, chat_file: Path, tmp_path: Path, number: signal.Signals
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert processes.run(processes.train, chat_run(settings, chat_file, whole)) == 0
    overrides = chat_run(settings, chat_file, stopped)
    assert processes.run(train_and_signal, overrides, 3, number) == 75
    assert [step for step, _ in manifest.list_checkpoints(stopped / "checkpoints")] == [2, 3]
    assert processes.run(processes.train, overrides) == 0
    assert_same_run(whole, stopped, STEPS)


VALIDATION = {"training__validate_every_steps": 2, "checkpoint__save_best": True, "checkpoint__keep_last": 1}


def test_a_signal_around_a_validation(settings: Settings, chat_file: Path, tmp_path: Path) -> None:
    """Stopped at every validation, before, after, and at the last one: the same losses and best checkpoint."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    changes = VALIDATION | {"data__validation_path": str(chat_file), "training__max_steps": 6}
    assert processes.run(processes.train, chat_run(settings, chat_file, whole, **changes)) == 0
    overrides = chat_run(settings, chat_file, stopped, **changes)
    for step, where in ((2, "on_step"), (4, "on_validation"), (6, "on_step")):
        assert processes.run(train_and_signal, overrides, step, signal.SIGTERM, where) == 75
    assert processes.run(processes.train, overrides) == 0
    assert sum(line["val_loss"] is not None for line in exact_metrics(whole)) == 3
    best = [(folder / "checkpoints/best.json").read_text() for folder in (stopped, whole)]
    assert best[0] == best[1]
    assert_same_run(whole, stopped, 6)


class SignalInSet(Callback):
    """Sends SIGTERM when the validation of a set begins, after a step."""

    def __init__(self, step: int, name: str) -> None:
        self.step, self.name = step, name

    def on_start(self, run: Run) -> None:
        batches = run.data.validation_batches

        def signal_and_yield(name: str, *ranks: int) -> Iterator[StepBatch]:
            if (run.progress.step, name) == (self.step, self.name):
                os.kill(os.getpid(), signal.SIGTERM)
            yield from batches(name, *ranks)

        run.data.validation_batches = signal_and_yield  # type: ignore[method-assign]


def test_a_signal_between_two_validation_sets(
    settings: Settings, chat_file: Path, text_file: Path, tmp_path: Path
) -> None:
    """The validation of all sets is repeated. Another order of the sets is a change, because the first one decides."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    sets = {"new": str(chat_file), "old": str(text_file)}
    changes = VALIDATION | {"data__validation_path": sets, "training__max_steps": 4}
    api.train(load_config(overrides=chat_run(settings, chat_file, whole, **changes)))
    overrides = chat_run(settings, chat_file, stopped, **changes)
    with pytest.raises(StoppedBySignal):
        api.train(load_config(overrides=overrides), callbacks=[SignalInSet(2, "old")])
    state = manifest.read_json(stopped / "checkpoints/step-00000002/state.json")
    assert (state["best_loss"], "val_loss" in state["pending_metrics"]) == (None, False)
    api.train(load_config(overrides=overrides))
    assert [line["step"] for line in exact_metrics(whole) if line["val_loss/old"] is not None] == [2, 4]
    best = [(folder / "checkpoints/best.json").read_text() for folder in (stopped, whole)]
    assert best[0] == best[1]
    assert_same_run(whole, stopped, 4)

    log = stopped / "logs/rank-0.log"
    assert "changed since" not in log.read_text()
    reverse = {"data.validation_path": dict(reversed(sets.items())), "training.max_steps": 5}
    api.train(load_config(overrides=overrides | reverse))
    assert f"data.validation_path {{'new': ['{chat_file}'], 'old': ['{text_file}']}} is now {{'old'" in log.read_text()


def test_a_checkpoint_of_version_0_1_resumes_an_interrupted_validation(
    settings: Settings, chat_file: Path, tmp_path: Path
) -> None:
    """Its state.json has `owed` instead of `pending_metrics`."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    changes = VALIDATION | {"data__validation_path": str(chat_file), "training__max_steps": 4}
    api.train(load_config(overrides=chat_run(settings, chat_file, whole, **changes)))
    overrides = chat_run(settings, chat_file, stopped, **changes)
    with pytest.raises(StoppedBySignal):
        api.train(load_config(overrides=overrides), callbacks=[SignalAt(2, signal.SIGTERM)])
    checkpoint = stopped / "checkpoints/step-00000002"
    state = manifest.read_json(checkpoint / "state.json")
    before = state | {"step": 1, "samples": 7}
    state["owed"] = {"values": state.pop("pending_metrics"), "before": before}
    with manifest.commit_folder(checkpoint) as folder:
        shutil.copytree(checkpoint, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
        manifest.write_json(folder / "state.json", state)
    api.train(load_config(overrides=overrides))
    assert_same_run(whole, stopped, 4)


def test_killed_before_the_best_checkpoint_is_marked(settings: Settings, chat_file: Path, tmp_path: Path) -> None:
    """The checkpoint is committed, but best.json still names the one before."""
    changes = VALIDATION | {"data__validation_path": str(chat_file), "training__max_steps": 4}
    overrides = chat_run(settings, chat_file, tmp_path / "run", **changes)
    assert processes.run(train_and_die_before_marking, overrides, 4) == -signal.SIGKILL
    root = tmp_path / "run/checkpoints"
    assert manifest.read_json(root / "best.json")["step"] == 2
    assert manifest.read_json(root / "step-00000004/state.json")["best_step"] == 4
    worse = {"training.max_steps": 5, "optim.learning_rate": 1.0, "optim.schedule": "constant"}
    assert processes.run(processes.train, overrides | worse) == 0
    assert manifest.read_json(root / "best.json")["step"] == 4
    assert (root / "step-00000004").is_dir()


class TestPatience:
    """A learning rate that is far too high: the validation loss rises from some step on."""

    CHANGES: dict[str, Any] = VALIDATION | {
        "training__max_steps": 14, "training__validate_every_steps": 1, "checkpoint__every_steps": 2,
        "checkpoint__save_best": False, "optim__learning_rate": 1.0, "optim__schedule": "constant",
        "optim__warmup_steps": 10,
    }  # fmt: skip

    def test_a_run_stops_after_n_validations_without_improvement_also_when_it_is_resumed(
        self, settings: Settings, chat_file: Path, tmp_path: Path
    ) -> None:
        changes = self.CHANGES | {"data__validation_path": str(chat_file)}
        whole, run = tmp_path / "whole", tmp_path / "run"
        api.train(load_config(overrides=chat_run(settings, chat_file, whole, **changes)))
        lines = exact_metrics(whole)
        losses = [line["val_loss"] for line in lines]
        is_stale = [loss >= min(losses[:n], default=float("inf")) for n, loss in enumerate(losses)]
        last = next(step for step in range(3, 14) if all(is_stale[step - 3 : step]))
        best = min(losses[:last])
        assert last < 13, "this test needs a run that gets worse"

        overrides = chat_run(settings, chat_file, run, training__patience=3, **changes)
        for step in (last - 2, last - 1):
            assert api.train(load_config(overrides=overrides), callbacks=[StopAt(step)]).stopped == "test"
        result = api.train(load_config(overrides=overrides))
        assert (result.step, result.checkpoint) == (last, run / f"checkpoints/step-{last:08d}")
        assert f"in 3 validations (training.patience 3): the best is {best:.4f}, after step" in str(result.stopped)
        assert exact_metrics(run) == lines[:last]
        assert read_metrics(run / "metrics.jsonl")[-1]["stopped"] == result.stopped
        assert f"stopping early: {result.stopped}" in (run / "logs/rank-0.log").read_text()

        again = api.train(load_config(overrides=overrides))
        assert (again.step, again.stopped) == (last, result.stopped), "the same command does not train on"
        assert api.train(load_config(overrides=overrides | {"training.patience": None})).stopped is None
        assert_same_run(whole, run, 14)


class TestAnotherBatchSize:
    @pytest.mark.parametrize(("first", "second"), [(8, 4), (3, 7)])
    def test_an_epoch_still_has_every_sample_once(
        self, settings: Settings, chat_file: Path, tmp_path: Path, first: int, second: int
    ) -> None:
        limits = {"training__max_steps": None, "training__max_epochs": 1}
        overrides = chat_run(settings, chat_file, tmp_path / "run", training__global_batch_size=first, **limits)
        api.train(load_config(overrides=overrides), callbacks=[StopAt(2)])
        api.train(load_config(overrides=overrides | {"training.global_batch_size": second}))
        lines = exact_metrics(tmp_path / "run")
        assert sum(line["samples"] for line in lines) == 30
        assert len(lines) == 2 + -(-(30 - 2 * first) // second)
        assert all(line["lr"] > 0 for line in lines)

    def test_max_steps_still_counts_steps(self, settings: Settings, chat_file: Path, tmp_path: Path) -> None:
        changes = {"training__global_batch_size": 4, "training__max_steps": 6}
        overrides = chat_run(settings, chat_file, tmp_path / "run", **changes)
        api.train(load_config(overrides=overrides), callbacks=[StopAt(3)])
        api.train(load_config(overrides=overrides | {"training.global_batch_size": 8}))
        assert [line["samples"] for line in exact_metrics(tmp_path / "run")] == [4] * 3 + [8] * 3

    def test_more_epochs_continue_after_a_smaller_last_step(
        self, settings: Settings, chat_file: Path, tmp_path: Path
    ) -> None:
        limits = {"training__max_steps": None, "training__max_epochs": 1}
        overrides = chat_run(settings, chat_file, tmp_path / "run", **limits)
        api.train(load_config(overrides=overrides))
        api.train(load_config(overrides=overrides | {"training.max_epochs": 2}))
        lines = exact_metrics(tmp_path / "run")
        assert [line["samples"] for line in lines] == [7, 7, 7, 7, 2] * 2
        assert all(line["lr"] > 0 for line in lines)


class TestWhatResumeRefuses:
    def test_another_model_data_or_sample_order(self, settings: Settings, chat_file: Path, tmp_path: Path) -> None:
        overrides = chat_run(settings, chat_file, tmp_path / "run", training__max_steps=2)
        api.train(load_config(overrides=overrides))
        changes: list[dict[str, Any]] = [
            {"model.path": "elsewhere", "model.depth": None, "model.width": None, "model.heads": None},
            {"model.init_std": 0.5},
            {"training.precision": "bf16-pure"},
            {"training.seed": 1},
            {"data.shuffle": False},
            {"data.validation_split": 0.2},
        ]
        for change in changes:
            message = f"other settings: .*{next(iter(change))}"
            with pytest.raises(CheckpointError, match=message):
                api.train(load_config(overrides=overrides | {"training.max_steps": 4} | change))
        with pytest.raises(CheckpointError, match="differs from the config"):
            api.train(load_config(overrides=overrides | {"model.depth": 3}))

    def test_a_used_folder_if_resume_is_never(self, settings: Settings, chat_file: Path, tmp_path: Path) -> None:
        overrides = chat_run(settings, chat_file, tmp_path / "run", training__max_steps=2)
        api.train(load_config(overrides=overrides))
        with pytest.raises(UsageError, match="already has a run"):
            api.train(load_config(overrides=overrides | {"checkpoint.resume": "never"}))

    def test_a_folder_without_a_complete_checkpoint(self, settings: Settings, chat_file: Path, tmp_path: Path) -> None:
        overrides = chat_run(settings, chat_file, tmp_path / "run", training__max_steps=2)
        api.train(load_config(overrides=overrides))
        (tmp_path / "run/checkpoints/step-00000002/model.safetensors").write_bytes(b"")
        with pytest.raises(CheckpointError, match="no checkpoint in .* is complete"):
            api.train(load_config(overrides=overrides | {"training.max_steps": 4}))

    def test_files_that_the_newest_checkpoint_was_not_saved_with(
        self, settings: Settings, chat_file: Path, tmp_path: Path
    ) -> None:
        """They would be loaded instead of model.safetensors. The checkpoint is intact: resuming does not go back."""
        overrides = chat_run(settings, chat_file, tmp_path / "run", training__max_steps=4)
        api.train(load_config(overrides=overrides))
        stray = tmp_path / "run/checkpoints/step-00000004/weights-00000.safetensors"
        shutil.copy(stray.with_name("model.safetensors"), stray)
        with pytest.raises(CheckpointError, match="does not list: weights-00000.safetensors"):
            api.train(load_config(overrides=overrides | {"training.max_steps": 5}))
        stray.unlink()
        assert api.train(load_config(overrides=overrides | {"training.max_steps": 5})).step == 5

    def test_a_named_checkpoint_beside_newer_ones(self, settings: Settings, chat_file: Path, tmp_path: Path) -> None:
        overrides = chat_run(settings, chat_file, tmp_path / "run", training__max_steps=4)
        api.train(load_config(overrides=overrides))
        older = str(tmp_path / "run/checkpoints/step-00000002")
        with pytest.raises(CheckpointError, match="newer than step-00000002: step-00000004"):
            api.train(load_config(overrides=overrides | {"checkpoint.resume": older}))
        other = overrides | {"output_dir": str(tmp_path / "other")}
        with pytest.raises(CheckpointError) as caught:
            api.train(load_config(overrides=other | {"checkpoint.resume": "true"}))
        assert "the path of a checkpoint or a run" in caught.value.hint


class TestWhichCheckpoint:
    def test_a_named_one_starts_a_run_that_resumes_its_own(
        self, settings: Settings, chat_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run, other = tmp_path / "run", tmp_path / "other"
        api.train(load_config(overrides=chat_run(settings, chat_file, run)))
        overrides = chat_run(settings, chat_file, other, checkpoint__resume=str(run / "checkpoints/step-00000002"))
        api.train(load_config(overrides=overrides), callbacks=[StopAt(5)])
        api.train(load_config(overrides=overrides))
        warnings = capsys.readouterr().err
        assert "has checkpoints of its own: resuming from them" in warnings
        assert "metrics.jsonl lacks" not in warnings, "its metrics begin after step 2"
        assert exact_metrics(other) == exact_metrics(run)[2:]
        assert saved_tensors(other, STEPS)["model.safetensors"] == saved_tensors(run, STEPS)["model.safetensors"]

    def test_a_run_stands_for_its_newest(self, settings: Settings, chat_file: Path, tmp_path: Path) -> None:
        run, other = tmp_path / "run", tmp_path / "other"
        result = api.train(load_config(overrides=chat_run(settings, chat_file, run)))
        overrides = chat_run(
            settings, chat_file, other, checkpoint__resume=str(run), training__max_steps=result.step + 1
        )
        assert api.train(load_config(overrides=overrides)).step == result.step + 1
        assert len(exact_metrics(other)) == 1

    def test_a_damaged_one_is_skipped_and_renamed_with_a_warning(
        self, settings: Settings, chat_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        whole, damaged = tmp_path / "whole", tmp_path / "damaged"
        api.train(load_config(overrides=chat_run(settings, chat_file, whole)))
        overrides = chat_run(settings, chat_file, damaged)
        api.train(load_config(overrides=overrides), callbacks=[StopAt(4)])
        flip_a_bit(damaged / "checkpoints/step-00000004/optimizer.safetensors")
        api.train(load_config(overrides=overrides))
        warnings = capsys.readouterr().err
        assert "optimizer.safetensors: damaged" in warnings
        assert f"step-00000004 is damaged: renamed to {damaged}/checkpoints/damaged-step-00000004" in warnings
        assert_same_run(whole, damaged, STEPS)

    def test_one_that_cannot_be_read_is_not_taken_for_damaged(
        self, settings: Settings, chat_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A network disk that fails for a moment must not cost steps."""
        overrides = chat_run(settings, chat_file, tmp_path / "run")
        api.train(load_config(overrides=overrides), callbacks=[StopAt(4)])

        def fail(path: Path) -> str:
            raise OSError(errno.EIO, "Input/output error", str(path))

        with monkeypatch.context() as patches:
            patches.setattr(manifest, "file_hash", fail)
            with pytest.raises(CheckpointError, match=r"step-00000004: cannot be read: .*Input/output error"):
                api.train(load_config(overrides=overrides))
        assert [step for step, _ in manifest.list_checkpoints(tmp_path / "run/checkpoints")] == [2, 4]

    def test_the_one_just_saved_stays_beside_one_of_a_higher_step(
        self, settings: Settings, chat_file: Path, tmp_path: Path
    ) -> None:
        class CopyAsStep9(Callback):
            def on_checkpoint(self, run: Run, folder: Path) -> None:
                if run.progress.step == 2:
                    shutil.copytree(folder, folder.with_name("step-00000009"))

        overrides = chat_run(settings, chat_file, tmp_path / "run", checkpoint__keep_last=1)
        api.train(load_config(overrides=overrides), callbacks=[CopyAsStep9(), StopAt(3)])
        assert [step for step, _ in manifest.list_checkpoints(tmp_path / "run/checkpoints")] == [3, 9]

    def test_a_damaged_one_does_not_count_as_one_to_keep(
        self, settings: Settings, chat_file: Path, tmp_path: Path
    ) -> None:
        """A run that resumes from step 2 and is stopped at step 3 must be able to resume, though step 4 was saved."""
        changes = {"checkpoint__keep_last": 1, "checkpoint__every_steps": 100}
        overrides = chat_run(settings, chat_file, tmp_path / "run", **changes)
        for step in (2, 4):
            api.train(load_config(overrides=overrides | {"checkpoint.keep_last": None}), callbacks=[StopAt(step)])
        root = tmp_path / "run/checkpoints"
        (root / "damaged-step-00000004").mkdir()
        flip_a_bit(root / "step-00000004/model.safetensors")
        api.train(load_config(overrides=overrides), callbacks=[StopAt(3)])
        names = sorted(path.name for path in root.iterdir())
        assert names == ["damaged-step-00000004", "damaged-step-00000004-2", "step-00000002", "step-00000003"]
        api.train(load_config(overrides=overrides))
        assert [step for step, _ in manifest.list_checkpoints(root)] == [3, STEPS], "step 3 was resumed from"


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

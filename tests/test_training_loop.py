"""Short runs from start to end: modes, batches, validation, checkpoints, callbacks, errors, signals."""

from __future__ import annotations

import gc
import inspect
import json
import os
import re
import shutil
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import torchstone
from exact_runs import StopAt
from hooks import on
from tiny import make_llama, write_rows
from torchstone import api
from torchstone.checkpoint.manifest import commit_folder, list_checkpoints
from torchstone.config import load_config
from torchstone.config.schema import Config, DataConfig, ModelConfig, TrainingConfig
from torchstone.data.tokenize import Tokenizer
from torchstone.demo.corpus import chat_rows
from torchstone.errors import DataError, NumericalError, OutOfMemoryError, StoppedBySignal, UsageError, is_out_of_memory
from torchstone.observe.metrics import read_metrics
from torchstone.training.run import Callback, Run, TrainResult
from torchstone.training.stop import handle_stop_signals

Settings = Callable[..., dict[str, Any]]


def train(overrides: dict[str, Any], *callbacks: Callback) -> tuple[TrainResult, list[dict[str, Any]], Path]:
    """The result of a run, its metrics and its folder."""
    result = api.train(load_config(overrides=overrides), callbacks=callbacks)
    folder = Path(overrides["output_dir"])
    return result, read_metrics(folder / "metrics.jsonl"), folder


def checkpoint_steps(folder: Path) -> list[int]:
    return [step for step, _ in list_checkpoints(folder / "checkpoints")]


def etas(folder: Path) -> list[str]:
    return re.findall(r"Step \[.*ETA: (\S+)", (folder / "logs/rank-0.log").read_text())


class Recorder(Callback):
    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def on_start(self, run: Run) -> None:
        self.events.append(("start", run.progress.step))

    def on_step(self, run: Run, metrics: dict[str, Any]) -> None:
        self.events.append(("step", metrics["step"]))

    def on_validation(self, run: Run, loss: float) -> None:
        self.events.append(("validation", run.progress.step))

    def on_checkpoint(self, run: Run, folder: Path) -> None:
        self.events.append(("checkpoint", folder.name))

    def on_end(self, run: Run) -> None:
        self.events.append(("end", run.progress.step))


def test_the_attention_kernel_is_at_most_ten_frames_below_train_loop(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader can follow a step from the loop to the kernel."""
    package, attention = str(Path(torchstone.__file__).parent), F.scaled_dot_product_attention
    stacks: list[list[str]] = []

    def record(*args: Any, **kwargs: Any) -> torch.Tensor:
        frames = [frame.f_code for frame, _ in traceback.walk_stack(inspect.currentframe())]
        names = [code.co_name for code in reversed(frames) if code.co_filename.startswith(package)]
        stacks.append(names[names.index("train_loop") :])
        return attention(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    train(settings(training__max_steps=2))
    assert len(stacks) >= 2 * settings()["model.depth"]
    assert max(map(len, stacks)) <= 10, max(stacks, key=len)


def test_the_eta_is_unknown_after_the_first_step_and_zero_after_the_last(settings: Settings) -> None:
    _, _, folder = train(settings(data__validation_split=0.2, training__validate_every_steps=2))
    first, *others, last = etas(folder)
    assert (first, len(others), last) == ("-", 4, "0:00")
    assert all(re.fullmatch(r"(\d+:)+\d\d", eta) for eta in others)


class TestModes:
    def test_an_epoch_has_every_sample_once(self, settings: Settings, chat_file: Path) -> None:
        overrides = settings(
            data__path=str(chat_file), data__context_length=64, training__mode="epoch", training__max_epochs=2,
            training__max_steps=None, training__global_batch_size=7,
        )  # fmt: skip
        _, lines, _ = train(overrides)
        assert [line["samples"] for line in lines] == [7] * 8 + [4]
        assert lines[-1]["epoch"] == 2
        per_epoch = api.prepare(load_config(overrides=overrides))["tokens"]
        assert lines[-1]["total_tokens"] == 2 * per_epoch

    def test_max_tokens_ends_with_the_step_that_reaches_it(self, settings: Settings) -> None:
        result, lines, _ = train(settings(training__max_tokens=400, training__max_steps=None))
        assert lines[-1]["total_tokens"] >= 400 > lines[-2]["total_tokens"]
        assert result.step == 4

    def test_an_infinite_run_ends_when_a_callback_stops_it(self, settings: Settings) -> None:
        class StopAfterEpoch(Callback):
            def on_step(self, run: Run, metrics: dict[str, Any]) -> None:
                if metrics["epoch"] > 1.2:
                    run.stop("enough")

        overrides = settings(training__mode="infinite", training__max_steps=None, optim__schedule="constant")
        result, lines, folder = train(overrides | {"training.global_batch_size": 30}, StopAfterEpoch())
        assert result.stopped == "enough"
        assert lines[-2]["epoch"] <= 1.2 < lines[-1]["epoch"]
        assert result.checkpoint == folder / f"checkpoints/step-{result.step:08d}"
        assert etas(folder) == ["-"] * result.step

    def test_steps_and_more_steps_after_a_finished_run(
        self, settings: Settings, capsys: pytest.CaptureFixture[str]
    ) -> None:
        overrides = settings(training__mode="step", training__max_steps=2, observe__console="lines")
        first, lines, folder = train(overrides)
        assert (first.step, [line["step"] for line in lines], checkpoint_steps(folder)) == (2, [1, 2], [2])
        capsys.readouterr()
        again, lines_again, _ = train(overrides)
        assert "is complete: step 2 of 2; to continue it, set a later end: --training.max_steps 4\n" in (
            capsys.readouterr().err
        )
        assert (again.step, lines_again) == (2, lines)
        limits = {"training.max_steps": 9, "training.max_epochs": 0.01, "training.max_tokens": 100}
        train(overrides | limits | {"training.mode": "epoch"})
        # Two steps had 8 samples of 32 tokens: twice the last two limits would be no later end.
        end = "--training.max_steps 18 --training.max_epochs 2 --training.max_tokens 512"
        assert f"set a later end: {end}\n" in capsys.readouterr().err
        _, longer, _ = train(overrides | {"training.max_steps": 4})
        assert ([line["step"] for line in longer], longer[:2]) == ([1, 2, 3, 4], lines)

    def test_a_complete_run_writes_nothing(self, settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
        validation = {"data__validation_split": 0.2, "checkpoint__save_best": True}
        overrides = settings(training__max_steps=2, observe__console="lines", **validation)
        _, _, folder = train(overrides)

        def entries() -> dict[Path, tuple[int, int]]:
            stats = {path: path.lstat() for path in (folder, *folder.rglob("*"))}
            return {path: (stat.st_mtime_ns, stat.st_size) for path, stat in stats.items()}

        before = entries()
        assert train(overrides | {"optim.learning_rate": 0.5})[0].step == 2
        assert entries() == before
        assert "optim.learning_rate 0.001 is now 0.5" in capsys.readouterr().err
        train(overrides | {"training.max_steps": 3})
        log = (folder / "logs/rank-0.log").read_text()
        assert log.count("| started ") == 2, "with the line from before the log was opened"
        assert log.count("resuming from") == 1


class TestLearning:
    def test_one_sample_overfits(self, settings: Settings, chat_file: Path, tmp_path: Path) -> None:
        one = tmp_path / "one.jsonl"
        one.write_text(chat_file.read_text().splitlines()[0] + "\n")
        overrides = settings(
            data__path=str(one), data__context_length=64, training__max_steps=60, training__global_batch_size=1,
            optim__learning_rate=1e-2,
        )  # fmt: skip
        _, lines, _ = train(overrides)
        assert lines[-1]["loss"] < 0.1
        assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]


class TestMinibatches:
    SPLITS: dict[str, list[dict[str, Any]]] = {
        "text": [{"training__batch_size": size} for size in (12, 5, 1)],
        "chat": [
            {"training__max_tokens_per_gpu": 512},
            {"training__max_tokens_per_gpu": 64},
            {"data__packing": False, "training__batch_size": 5},
        ],
    }

    @pytest.mark.parametrize("rows", SPLITS)
    def test_the_size_of_micro_batches_does_not_change_the_run(
        self, settings: Settings, chat_file: Path, text_file: Path, tmp_path: Path, rows: str
    ) -> None:
        runs = []
        for number, split in enumerate(self.SPLITS[rows]):
            overrides = settings(
                data__path=str(text_file if rows == "text" else chat_file), data__context_length=64,
                training__global_batch_size=12, optim__eps=1e-4, output_dir=str(tmp_path / str(number)), **split,
            )  # fmt: skip
            runs.append(train(overrides)[1])
        for run in runs[1:]:
            assert [line["loss_tokens"] for line in run] == [line["loss_tokens"] for line in runs[0]]
            assert [line["loss"] for line in run] == pytest.approx([line["loss"] for line in runs[0]], rel=2e-6)
        assert len({tuple(line["micro_batches"] for line in run) for run in runs}) == 3

    def test_threads_that_build_batches_do_not_change_them(self, settings: Settings, tmp_path: Path) -> None:
        losses = []
        for workers in (0, 1, 3):
            overrides = settings(data__num_workers=workers, output_dir=str(tmp_path / str(workers)))
            losses.append([line["loss"] for line in train(overrides)[1]])
        assert losses[1] == losses[2] == losses[0]

    def test_metrics_account_for_every_token(self, settings: Settings, chat_file: Path) -> None:
        overrides = settings(data__path=str(chat_file), data__context_length=64, data__packing=False)
        _, lines, folder = train(overrides)
        for line in lines:
            assert 0 < line["loss_tokens"] < line["tokens"]
            assert (line["tokens"] + line["padding"]) % 8 == 0
            assert line["tok_s"] == pytest.approx(line["tokens"] / line["step_s"])
            assert line["memory"] > 50e6, "the resident size of a process with torch"
            assert (line["dropped_rows"], line["truncated_rows"]) == (0, 0)
        assert lines[-1]["total_tokens"] == sum(line["tokens"] for line in lines)
        state = json.loads((folder / "checkpoints/step-00000006/state.json").read_text())
        assert state["loss_tokens"] == sum(line["loss_tokens"] for line in lines)

    def test_a_step_without_loss_tokens_is_found_before_the_first_step(
        self, settings: Settings, tmp_path: Path
    ) -> None:
        rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3] if n == 0 else [-100] * 3} for n in range(4)]
        path = write_rows(tmp_path / "masked.jsonl", rows)
        overrides = settings(data__path=str(path), data__shuffle=False, training__global_batch_size=2)
        expected = f"step 2 has no loss tokens: all labels of its 2 samples are masked .{path}:3, {path}:4.\n.* larger"
        with pytest.raises(DataError, match=expected):
            train(overrides)
        assert not (Path(overrides["output_dir"]) / "metrics.jsonl").exists()
        # A run that ends before that step trains.
        assert len(train(overrides | {"training.max_steps": 1})[1]) == 1


class TestIntervals:
    @pytest.mark.parametrize(
        ("interval", "at_end", "steps"),
        [
            ({"steps": 3}, True, [3, 6, 8]),
            ({"samples": 20}, False, [3, 5, 8]),
            ({"epochs": 0.5}, False, [2, 4, 6, 8]),
            ({"epochs": 1, "steps": 7}, False, [4, 7, 8]),
            ({}, True, [8]),
            ({}, False, []),
        ],
        ids=str,
    )
    def test_validation_and_checkpoints_happen_at(
        self, settings: Settings, chat_file: Path, interval: dict[str, float], at_end: bool, steps: list[int]
    ) -> None:
        """Two epochs of 30 samples in steps of 8: the epochs end in steps 4 and 8."""
        overrides = settings(
            data__path=str(chat_file), data__context_length=64, data__validation_path=str(chat_file),
            training__global_batch_size=8, training__max_steps=None, training__max_epochs=2,
            training__validate_at_end=at_end, checkpoint__at_end=at_end, checkpoint__keep_last=None,
        )  # fmt: skip
        for unit, every in interval.items():
            overrides |= {f"training.validate_every_{unit}": every, f"checkpoint.every_{unit}": every}
        result, lines, folder = train(overrides)
        assert [line["step"] for line in lines if "val_loss" in line] == steps
        assert checkpoint_steps(folder) == steps
        assert result.checkpoint == (folder / f"checkpoints/step-{steps[-1]:08d}" if steps else None)


class TestSavingByTheClock:
    @pytest.mark.parametrize(
        ("setting", "minutes", "steps"),
        [
            ({}, 30.01, [3, 6]),
            ({}, 29.9, [6]),
            ({"every_samples": 20}, 1e6, [5, 6]),
            ({"every_samples": 20, "every_minutes": 30, "keep_last": 3}, 31, [3, 5, 6]),
        ],
        ids=str,
    )
    def test_a_run_saves_after_the_step_in_which_it_is_due(
        self, settings: Settings, setting: dict[str, Any], minutes: float, steps: list[int]
    ) -> None:
        """Of six steps of four samples, the third takes `minutes`."""
        overrides = settings(training__max_steps=6, **{f"checkpoint__{key}": value for key, value in setting.items()})
        _, _, folder = train(overrides, LetTimePass(3, minutes))
        assert checkpoint_steps(folder) == steps

    def test_saving_does_not_change_training(self, settings: Settings, tmp_path: Path) -> None:
        often = settings(checkpoint__every_minutes=1e-9, output_dir=str(tmp_path / "often"))
        assert [line["loss"] for line in train(often)[1]] == [line["loss"] for line in train(settings())[1]]

    def test_the_start_says_when_the_run_saves(self, settings: Settings) -> None:
        _, _, folder = train(settings(training__max_steps=1))
        assert (
            f"saves every 30 minutes and at the end, keeping 2, in {folder}/checkpoints\n"
            in (folder / "logs/rank-0.log").read_text()
        )


class LetTimePass(Callback):
    """As if `minutes` had passed since the last checkpoint, after a step."""

    def __init__(self, step: int, minutes: float) -> None:
        self.step, self.minutes = step, minutes

    def on_step(self, run: Run, metrics: dict[str, Any]) -> None:
        if metrics["step"] == self.step:
            run.saved_at -= 60 * self.minutes


class TestValidation:
    def test_the_loss_over_a_file_is_that_of_evaluate(self, settings: Settings, chat_file: Path) -> None:
        overrides = settings(data__validation_path=str(chat_file), data__context_length=64)
        _, lines, folder = train(overrides)
        results = api.evaluate(
            str(folder), str(chat_file), questions=0, cache_dir=overrides["data.cache_dir"], quiet=True
        )
        assert results["loss"] == pytest.approx(lines[-1]["val_loss"], rel=1e-6)
        assert not (folder / "checkpoints/best.json").exists(), "without checkpoint.save_best none is marked"

    def test_save_best_keeps_and_marks_the_best_checkpoint(self, settings: Settings) -> None:
        overrides = settings(
            data__validation_split=0.2, training__validate_every_steps=1, training__max_steps=12,
            checkpoint__save_best=True, checkpoint__keep_last=1, optim__learning_rate=1.0, optim__schedule="constant",
            optim__warmup_steps=10,
        )  # fmt: skip
        _, lines, folder = train(overrides)
        best = min(lines, key=lambda line: line["val_loss"])
        assert best["step"] < 12, "this test needs a run that gets worse"
        marked = json.loads((folder / "checkpoints/best.json").read_text())
        assert marked == {"step": best["step"], "val_loss": best["val_loss"]}
        assert checkpoint_steps(folder) == [best["step"], 12]

    def test_save_best_saves_every_improvement_and_nothing_else(self, settings: Settings) -> None:
        overrides = settings(
            data__validation_split=0.2, training__validate_every_steps=1, training__max_steps=8,
            checkpoint__save_best=True, checkpoint__at_end=False, checkpoint__keep_last=None,
            optim__learning_rate=0.3, optim__schedule="constant",
        )  # fmt: skip
        result, lines, folder = train(overrides)
        losses = [line["val_loss"] for line in lines]
        improvements = [n + 1 for n, loss in enumerate(losses) if loss < min(losses[:n], default=float("inf"))]
        assert checkpoint_steps(folder) == improvements
        assert result.val_loss == losses[-1]

    def test_a_named_set_has_the_loss_of_a_run_with_that_set_alone(
        self, settings: Settings, chat_file: Path, text_file: Path, tmp_path: Path
    ) -> None:
        class Losses(Callback):
            def on_validation(self, run: Run, loss: float) -> None:
                assert next(iter(run.val_losses.values())) == loss
                self.last = dict(run.val_losses)

        more = write_rows(tmp_path / "more.jsonl", chat_rows(5, seed=9))
        sets = {"new": [str(chat_file), str(more)], "old": str(text_file)}
        common = {"data__context_length": 64, "training__validate_every_steps": 2, "training__max_steps": 5}
        overrides, losses = settings(data__validation_path=sets, **common), Losses()
        result, lines, folder = train(overrides, losses)
        keys = {"val_loss", "val_loss/new", "val_loss/old"}
        assert [line.keys() & keys for line in lines] == [set(), keys, set(), keys, keys]
        for name, paths in sets.items():
            alone = settings(data__validation_path=paths, output_dir=str(tmp_path / name), **common)
            lines_alone = train(alone)[1]
            assert not any("val_loss/" in key for line in lines_alone for key in line)
            expected = [line.get("val_loss") for line in lines_alone]
            assert [line.get(f"val_loss/{name}") for line in lines] == expected
            if name == "new":
                assert [line.get("val_loss") for line in lines] == expected, "that of the first set"
        assert losses.last == {name: lines[-1][f"val_loss/{name}"] for name in sets}
        assert result.val_loss == lines[-1]["val_loss/new"]
        log = (folder / "logs/rank-0.log").read_text()
        assert re.search(r"35 of new \(val_loss\), \d+ of old held out", log)
        text = f"Validation loss: new {losses.last['new']:.4f}, old {losses.last['old']:.4f}\n"
        assert log.count(text) == 1
        assert api.prepare(load_config(overrides=overrides))["validation_samples"] == sum(
            int(number) for number in re.findall(r"(\d+) of (?:new|old)", log)
        )

    def test_the_first_named_set_decides_the_best_checkpoint_and_patience(
        self, settings: Settings, chat_file: Path, text_file: Path, tmp_path: Path
    ) -> None:
        """Training on texts: the loss of conversations rises after a few steps, that of texts falls."""
        common = {
            "data__context_length": 64, "training__max_steps": 8, "training__validate_every_steps": 1,
            "training__patience": 2, "checkpoint__save_best": True, "checkpoint__keep_last": 1,
            "optim__learning_rate": 0.03, "optim__schedule": "constant",
        }  # fmt: skip
        sets = {"new": str(text_file), "old": str(chat_file)}
        result, lines, folder = train(settings(data__validation_path=sets, **common))
        assert (result.step, result.stopped) == (8, None)
        assert json.loads((folder / "checkpoints/best.json").read_text())["step"] == 8
        old = [line["val_loss/old"] for line in lines]
        best = old.index(min(old)) + 1
        assert best < 6, "this test needs a set that gets worse"

        reverse = dict(reversed(sets.items()))
        run = settings(data__validation_path=reverse, output_dir=str(tmp_path / "reverse"), **common)
        result, lines, folder = train(run)
        assert [line["val_loss"] for line in lines] == old[: best + 2], "the same training, which ends earlier"
        assert str(result.stopped).endswith(f"the best is {min(old):.4f}, after step {best}")
        marked = json.loads((folder / "checkpoints/best.json").read_text())
        assert marked == {"step": best, "val_loss": min(old)}

    def test_validation_rows_are_not_trained_on(self, settings: Settings) -> None:
        runs: list[Run] = []
        train(settings(data__validation_split=0.25), on(start=runs.append))
        rows, held_out = runs[0].data.train.indices.tolist(), runs[0].data.validation[""].indices.tolist()
        assert sorted(rows + held_out) == list(range(60))
        assert len(held_out) == 15

    def test_a_loss_that_is_not_finite_ends_the_run(self, settings: Settings) -> None:
        overrides = settings(
            data__validation_split=0.2, training__max_steps=1, optim__learning_rate=1e38, checkpoint__save_best=True
        )
        with pytest.raises(NumericalError, match="the validation loss after step 1 is nan"):
            train(overrides)
        assert not (Path(overrides["output_dir"]) / "checkpoints").exists()

    def test_weights_that_the_last_update_made_infinite_are_not_saved(self, settings: Settings) -> None:
        """Loss and gradients of that step were finite."""
        train(settings(training__max_steps=2))
        with pytest.raises(NumericalError, match="step 3 made .* weights or moments infinite or NaN") as caught:
            train(settings(training__max_steps=3, optim__learning_rate=1e39, optim__schedule="constant"))
        folder = Path(settings()["output_dir"])
        assert checkpoint_steps(folder) == [2]
        assert str(folder / "checkpoints/step-00000002") in str(caught.value)
        assert caught.value.exit_code == 5

    def test_validation_does_not_change_training(self, settings: Settings, tmp_path: Path) -> None:
        _, plain, folder = train(settings(data__validation_split=0.2, training__validate_at_end=False))
        often = settings(
            data__validation_split=0.2, training__validate_every_steps=1, output_dir=str(tmp_path / "often")
        )
        _, lines, other = train(often)
        assert [line["loss"] for line in lines] == [line["loss"] for line in plain]
        logs = [(run / "logs/rank-0.log").read_text() for run in (folder, other)]
        assert ["held out and never used" in log for log in logs] == [True, False]


class TestCheckpoints:
    def test_the_saved_config_repeats_the_run(self, settings: Settings, tmp_path: Path) -> None:
        overrides = settings()
        _, lines, folder = train(overrides)
        again = load_config(folder / "config.json", overrides={"output_dir": str(tmp_path / "again")})
        api.train(again)
        assert [x["loss"] for x in read_metrics(tmp_path / "again/metrics.jsonl")] == [x["loss"] for x in lines]

    def test_fine_tuning_starts_from_a_run(self, settings: Settings, chat_file: Path, tmp_path: Path) -> None:
        _, _, folder = train(settings())
        tuned = {
            key: value for key, value in settings(output_dir=str(tmp_path / "tuned")).items() if "model." not in key
        } | {"model.path": str(folder), "data.path": str(chat_file), "data.context_length": 64}
        train(tuned | {"optim.learning_rate": 0, "training.max_steps": 1})
        weights = [next((f / "checkpoints").glob("step-*")) / "model.safetensors" for f in (folder, tmp_path / "tuned")]
        assert weights[0].read_bytes() == weights[1].read_bytes(), "a learning rate of zero changes nothing"


class TestExportedDtype:
    """Weights train in fp32. An export has the dtype of the model that the run started from."""

    def fine_tune(self, settings: Settings, source: Path, output: Path, steps: int = 1) -> None:
        overrides = settings(output_dir=str(output), training__max_steps=steps)
        train({key: value for key, value in overrides.items() if "model." not in key} | {"model.path": str(source)})

    def source(self, folder: Path, tokenizer: Tokenizer, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
        """A Llama in bf16 with `change` applied to its tensors."""
        make_llama(folder, tokenizer)
        tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    def test_it_is_the_sources_through_a_chain_of_runs(
        self, settings: Settings, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        source = self.source(tmp_path / "source", tokenizer, lambda tensors: None)
        self.fine_tune(settings, source, tmp_path / "first")
        for steps in (1, 2):
            self.fine_tune(settings, tmp_path / "first", tmp_path / "second", steps)
        for name, step in (("first", 1), ("second", 2)):
            report = api.export(str(tmp_path / name), tmp_path / f"{name}-hf")
            assert report["dtype"] == "bfloat16"
            assert report["dtype_reason"] == "as in the model that the run started from"
            trained = load_file(tmp_path / name / f"checkpoints/step-{step:08d}/model.safetensors")
            exported = load_file(tmp_path / f"{name}-hf/model.safetensors")
            assert {tensor.dtype for tensor in trained.values()} == {torch.float32}
            for key, tensor in trained.items():
                assert torch.equal(exported[key], tensor.bfloat16()), key
        report = api.export(str(tmp_path / "second"), tmp_path / "wide", "float32")
        assert (report["dtype"], report["dtype_reason"]) == ("float32", "as requested")

    def test_an_old_checkpoint_does_not_know_its_source(
        self, settings: Settings, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        source = self.source(tmp_path / "source", tokenizer, lambda tensors: None)
        self.fine_tune(settings, source, tmp_path / "run")
        checkpoint = tmp_path / "run/checkpoints/step-00000001"
        with commit_folder(checkpoint) as folder:
            shutil.copytree(checkpoint, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
            state = json.loads((folder / "state.json").read_text())
            assert state.pop("source_dtype") == "bfloat16"
            (folder / "state.json").write_text(json.dumps(state))
        self.fine_tune(settings, source, tmp_path / "run", steps=2)
        report = api.export(str(tmp_path / "run"), tmp_path / "out", verify=False)
        assert (report["dtype"], report["dtype_reason"]) == ("float32", "as in the source")

    def test_a_new_model_keeps_what_is_stored(self, settings: Settings, tmp_path: Path) -> None:
        for precision, dtype in (("fp32", "float32"), ("bf16-pure", "bfloat16")):
            run = tmp_path / precision
            train(settings(output_dir=str(run), training__max_steps=1, training__precision=precision))
            report = api.export(str(run), tmp_path / f"{precision}-hf", verify=False)
            assert (report["dtype"], report["dtype_reason"]) == (dtype, "as in the source")

    @pytest.mark.parametrize(
        ("name", "dtype"),
        [("model.norm.weight", "float32"), ("model.layers.0.self_attn.rotary_emb.inv_freq", "bfloat16")],
    )
    def test_a_source_of_several_dtypes_is_not_rounded(
        self, settings: Settings, tokenizer: Tokenizer, tmp_path: Path, name: str, dtype: str
    ) -> None:
        """The fp32 frequencies in old files are not parameters."""
        source = self.source(tmp_path / "source", tokenizer, lambda tensors: tensors.update({name: torch.ones(32)}))
        report = api.export(str(source), tmp_path / "copy", verify=False)
        expected = (
            "the narrowest dtype that holds the source's bfloat16, float32"
            if dtype == "float32"
            else "as in the source"
        )
        assert (report["dtype"], report["dtype_reason"]) == (dtype, expected)
        self.fine_tune(settings, source, tmp_path / "run")
        assert api.export(str(tmp_path / "run"), tmp_path / "out", verify=False)["dtype"] == dtype


class TestCallbacks:
    def test_they_are_called_in_order(self, settings: Settings) -> None:
        recorder = Recorder()
        overrides = settings(
            training__max_steps=2, data__validation_split=0.2, training__validate_every_steps=1,
            checkpoint__every_steps=2,
        )  # fmt: skip
        train(overrides, recorder)
        assert recorder.events == [
            ("start", 0),
            ("step", 1), ("validation", 1),
            ("step", 2), ("validation", 2), ("checkpoint", "step-00000002"),
            ("end", 2),
        ]  # fmt: skip

    def test_a_callback_can_stop_after_validation(self, settings: Settings) -> None:
        overrides = settings(data__validation_split=0.2, training__validate_every_steps=2)
        early_stop = on(validation=lambda run, loss: run.stop(f"validation loss {loss:.2f}"))
        result, lines, folder = train(overrides, early_stop)
        assert (result.step, len(lines)) == (2, 2)
        assert result.stopped.startswith("validation loss")
        assert result.checkpoint == folder / "checkpoints/step-00000002"


class TestMemory:
    @pytest.mark.parametrize(
        ("function", "activity", "error"),
        [
            (
                "torchstone.training.loop.compute_gradients",
                "computing step 1",
                torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
            ),
            (
                "torchstone.training.setup.build_new_model",
                "loading the model",
                RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 3145728 bytes. Error"),
            ),
        ],
        ids=["step on cuda", "model on cpu"],
    )
    def test_out_of_memory_is_exit_code_4(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch, function: str, activity: str, error: Exception
    ) -> None:
        def fail(*args: Any) -> None:
            raise error

        monkeypatch.setattr(function, fail)
        with pytest.raises(OutOfMemoryError, match=f"out of memory on cpu while {activity}: ") as caught:
            train(settings())
        assert caught.value.exit_code == 4
        assert caught.value.message.endswith(
            "Tried to allocate 2.00 GiB." if "CUDA" in str(error) else ": 3 MiB more cannot be allocated"
        )

    @pytest.mark.parametrize(
        "text",
        [
            "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
            "CUDA driver error: out of memory",
            "Triton Error [CUDA]: out of memory",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        ],
    )
    def test_libraries_run_out_of_memory_too(self, text: str) -> None:
        assert is_out_of_memory(RuntimeError(text))
        assert not is_out_of_memory(ValueError(text))

    @pytest.mark.parametrize(
        ("changes", "hint"),
        [
            (
                {"training__batch_size": 5, "training__global_batch_size": 10},
                "use --training.batch_size 2 --training.global_batch_size 10 (the global batch stays the same), or "
                "--model.recompute full, or --model.loss chunked, or a shorter --data.context_length in a new run, or "
                "a smaller model",
            ),
            (
                {"training__batch_size": 1, "model__recompute": "full", "model__loss": "chunked"},
                "use a shorter --data.context_length in a new run, or a smaller model",
            ),
        ],
    )
    def test_the_hint_leaves_out_what_is_set(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], hint: str
    ) -> None:
        def fail(*args: Any) -> None:
            raise MemoryError

        # There is no estimate for a validation.
        monkeypatch.setattr("torchstone.training.loop.validation_loss", fail)
        with pytest.raises(OutOfMemoryError) as caught:
            train(settings(data__validation_split=0.2, training__validate_every_steps=1, **changes))
        assert caught.value.hint == hint

    def test_other_errors_pass_unchanged(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: Any) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr("torchstone.training.loop.compute_gradients", fail)
        with pytest.raises(RuntimeError, match="^a bug$"):
            train(settings())

    def test_a_step_leaves_no_objects_behind(self, settings: Settings) -> None:
        first, last = 5, 35

        class CountObjects(Callback):
            def __init__(self) -> None:
                self.tensors: dict[int, int] = {}
                self.objects: dict[int, int] = {}

            def on_step(self, run: Run, metrics: dict[str, Any]) -> None:
                if metrics["step"] in (first, last):
                    gc.collect()
                    types = [type(each) for each in gc.get_objects()]
                    self.objects[metrics["step"]] = len(types)
                    self.tensors[metrics["step"]] = sum(issubclass(each, torch.Tensor) for each in types)

        count = CountObjects()
        # Threads that build batches ahead hold some.
        train(settings(training__max_steps=last, data__num_workers=0, checkpoint__at_end=False), count)
        assert count.tensors[last] == count.tensors[first]
        assert count.objects[last] - count.objects[first] < last - first


class TestConfigInPython:
    def test_a_config_object_is_validated_like_a_file(self) -> None:
        model, data = ModelConfig(depth=2, tokenizer="demo:tokenizer"), DataConfig(path="demo:corpus")
        wrong = Config(model=model, data=data, training=TrainingConfig(precision="fp16"))  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="training.precision cannot be 'fp16'"):
            api.train(wrong)
        with pytest.raises(UsageError, match="data.path is not set"):
            api.train(Config(model=model))


class TestFolder:
    @pytest.mark.parametrize("method", ["full", "lora"])
    def test_a_disk_that_is_too_small_for_the_checkpoints_is_noticed_at_the_start(
        self, settings: Settings, base_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str], method: str,
    ) -> None:  # fmt: skip
        changes = {"model__path": str(base_run), "tuning__method": method, "training__max_steps": 1}
        values = settings(**changes)
        for key in ("depth", "width", "heads"):
            del values[f"model.{key}"]

        def warning(free: int, folder: str, **changes: Any) -> str:
            usage = shutil.disk_usage(base_run)._replace(free=free)
            monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
            capsys.readouterr()
            api.train(None, values | {"observe.console": "lines", "output_dir": str(tmp_path / folder)} | changes)
            return "".join(re.findall(r"WARNING \| (a checkpoint takes .*)", capsys.readouterr().err))

        text = warning(0, "a")
        needed = re.match(r"a checkpoint takes about ([\d.]+) MiB, but output_dir .* has only 0.00 MiB free", text)
        assert needed is not None
        files = (tmp_path / "a/checkpoints/step-00000001").glob("*.safetensors")
        size = sum(file.stat().st_size for file in files if file.name != "random.safetensors")
        assert float(needed[1]) == pytest.approx(size / 2**20, rel=0.1)
        assert warning(int(1.2 * size), "b") == ""
        # Two are kept while the third one is written.
        three = {"training.max_steps": 3, "checkpoint.every_steps": 1}
        assert "MiB, and 3 of them have to fit, but" in warning(int(2.5 * size), "c", **three)
        assert warning(int(3.5 * size), "d", **three) == ""

    def test_two_runs_cannot_share_a_folder(self, settings: Settings) -> None:
        overrides = settings()

        class SecondRun(Callback):
            def on_step(self, run: Run, metrics: dict[str, Any]) -> None:
                with pytest.raises(UsageError, match="another process is training in"):
                    api.train(load_config(overrides=overrides))

        train(overrides, SecondRun())

    def test_damaged_informational_files_only_warn_and_are_rewritten(
        self, settings: Settings, capsys: pytest.CaptureFixture[str]
    ) -> None:
        validation = {"data__validation_split": 0.2, "training__validate_every_steps": 1}
        train(settings(training__max_steps=2, checkpoint__save_best=True, **validation))
        folder = Path(settings()["output_dir"])
        best = (folder / "checkpoints/best.json").read_text()
        for name in ("config.json", "checkpoints/best.json"):
            (folder / name).write_text("{")
        capsys.readouterr()
        train(settings(training__max_steps=3, **validation))
        warnings = capsys.readouterr().err
        assert f"{folder}/config.json: damaged" in warnings
        assert f"{folder}/checkpoints/best.json: damaged" in warnings
        assert json.loads((folder / "config.json").read_text())["training"]["max_steps"] == 3
        assert (folder / "checkpoints/best.json").read_text() == best

    def test_metrics_are_on_the_disk_before_the_checkpoint_of_their_step(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """When the checkpoint's folder is synced, which is before its rename, the file is as long as it is then."""
        overrides = settings(training__max_steps=4, checkpoint__every_steps=2)
        metrics, fsync = Path(overrides["output_dir"]) / "metrics.jsonl", os.fsync
        synced_bytes, when_committed = 0, []

        def record(handle: int) -> None:
            nonlocal synced_bytes
            path = Path(f"/proc/self/fd/{handle}").readlink()
            fsync(handle)
            if path == metrics:
                synced_bytes = metrics.stat().st_size
            elif path.name.endswith(".partial") and path.parent.name == "checkpoints":
                when_committed.append((synced_bytes, metrics.stat().st_size))

        monkeypatch.setattr(os, "fsync", record)
        train(overrides)
        assert all(synced == size > 0 for synced, size in when_committed)
        assert len(set(when_committed)) == 2, "two checkpoints"

    def test_a_resumed_run_names_the_steps_that_metrics_jsonl_lacks(
        self, settings: Settings, capsys: pytest.CaptureFixture[str]
    ) -> None:
        _, _, folder = train(settings(training__max_steps=4))
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text(lines[0] + lines[2])
        train(settings(training__max_steps=5))
        assert "metrics.jsonl lacks 2 of the steps up to 4, after which the run resumes" in capsys.readouterr().err
        assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == [1, 3, 5]

    def test_a_run_that_starts_again_keeps_the_old_metrics(self, settings: Settings) -> None:
        overrides = settings(training__max_steps=2, checkpoint__at_end=False)
        _, lines, folder = train(overrides)
        train(overrides)
        assert read_metrics(folder / "metrics-old.jsonl") == lines
        assert (
            f"metrics.jsonl of an earlier attempt is now {folder}/metrics-old.jsonl"
            in (folder / "logs/rank-0.log").read_text()
        )

    def test_a_resumed_run_warns_about_changed_settings(
        self, settings: Settings, capsys: pytest.CaptureFixture[str]
    ) -> None:
        train(settings(training__max_steps=2))
        capsys.readouterr()
        train(settings(training__max_steps=4, optim__learning_rate=5e-4))
        warnings = capsys.readouterr().err
        assert "optim.learning_rate 0.001 is now 0.0005" in warnings
        assert "training.max_steps 2 is now 4" in warnings


class TestSignals:
    def test_ctrl_c_says_at_once_what_happens_next(self, settings: Settings, capfd: pytest.CaptureFixture[str]) -> None:
        class Interrupt(Callback):
            def on_step(self, run: Run, metrics: dict[str, Any]) -> None:
                if metrics["step"] == 3:
                    capfd.readouterr()
                    os.kill(os.getpid(), signal.SIGINT)
                    printed.append(capfd.readouterr().err)

        printed: list[str] = []
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(StoppedBySignal, match="stopped by SIGINT after step 3, saved in"):
                train(settings(), Interrupt())
        finally:
            signal.signal(signal.SIGINT, previous)
        assert printed == ["finishing step 3, then saving; press Ctrl-C again to quit without saving\n"]

    def test_a_run_that_has_not_begun_ends_at_once_and_saves_nothing(self, settings: Settings) -> None:
        with pytest.raises(StoppedBySignal, match="stopped by SIGTERM while loading the model"):
            train(settings(), on(start=lambda run: os.kill(os.getpid(), signal.SIGTERM)))
        assert not list(Path(settings()["output_dir"]).glob("checkpoints/step-*"))

    @pytest.mark.parametrize("error", [None, ImportError("numpy")])
    def test_a_signal_that_an_import_swallowed_still_stops_the_run(self, error: Exception | None) -> None:
        def import_library() -> None:
            with handle_stop_signals() as raise_if_stopped:
                with suppress(StoppedBySignal):
                    os.kill(os.getpid(), signal.SIGTERM)
                if error is not None:
                    raise error
                raise_if_stopped()

        with pytest.raises(StoppedBySignal, match="stopped by SIGTERM"):
            import_library()

    def test_a_second_interrupt_ends_at_once_and_the_handlers_are_restored(
        self, settings: Settings, capfd: pytest.CaptureFixture[str]
    ) -> None:
        class InterruptTwice(Callback):
            def on_step(self, run: Run, metrics: dict[str, Any]) -> None:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

        # A background job of a shell ignores it.
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
            with pytest.raises(KeyboardInterrupt):
                train(settings(), InterruptTwice())
            assert "quitting without saving\n" in capfd.readouterr().err
            assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
        finally:
            signal.signal(signal.SIGINT, previous)

    def test_a_run_in_a_thread_sets_no_handlers(self, settings: Settings) -> None:
        steps = []
        thread = threading.Thread(target=lambda: steps.append(train(settings())[0].step))
        thread.start()
        thread.join()
        assert steps == [6]


class TestPrecision:
    def test_bf16_pure_keeps_everything_in_bf16(self, settings: Settings) -> None:
        class CheckDtypes(Callback):
            def on_end(self, run: Run) -> None:
                dtypes = {p.dtype for p in run.model.module.parameters()}
                dtypes |= {run.optimizer.state[p]["exp_avg"].dtype for p in run.model.module.parameters()}
                assert dtypes == {torch.bfloat16}

        _, lines, _ = train(settings(training__precision="bf16-pure"), CheckDtypes())
        exact = train(settings(output_dir=settings()["output_dir"] + "-fp32"))[1]
        assert [x["loss"] for x in lines] == pytest.approx([x["loss"] for x in exact], rel=0.02)


def test_a_callback_with_a_hook_that_is_never_called_is_an_error(settings: Settings) -> None:
    with pytest.raises(TypeError, match="Misspelled.on_step_end would never be called: the hooks are on_start, "):
        type("Misspelled", (Callback,), {"on_step_end": lambda self: None})
    # No hook: a constant, and what another base class wants to know.
    type("Mixed", (Callback,), {"on_gpu": True})
    with pytest.raises(UsageError, match="callbacks has <class"):
        api.train(overrides=settings(), callbacks=[Callback])


def test_the_reason_of_a_callback_is_shown(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    # An iterator is read once.
    callbacks = iter([StopAt(2, "enough")])
    result = api.train(overrides=settings(observe__console="lines"), callbacks=callbacks)  # type: ignore[arg-type]
    assert (result.step, result.stopped) == (2, "enough")
    assert "stopped after step 2: enough" in capsys.readouterr().err

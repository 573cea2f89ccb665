"""Whole runs, small: modes, batches, validation, checkpoints, callbacks, and what the command line makes of them."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchstone import api
from torchstone.checkpoint.manifest import list_checkpoints
from torchstone.config import load_config
from torchstone.config.schema import Config, DataConfig, ModelConfig, TrainingConfig
from torchstone.errors import DataError, NumbersError, OutOfMemoryError, UsageError
from torchstone.observe.metrics import read_metrics
from torchstone.training.loop import Callback, Outcome, Run

Settings = Callable[..., dict[str, Any]]


def trained(overrides: dict[str, Any], *callbacks: Callback) -> tuple[Outcome, list[dict[str, Any]], Path]:
    outcome = api.train(load_config(overrides=overrides), callbacks=callbacks)
    folder = Path(overrides["output_dir"])
    return outcome, read_metrics(folder / "metrics.jsonl"), folder


class Recorder(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.samples: list[int] = []

    def on_start(self, run: Run) -> None:
        self.seen.append(("start", run.progress.step))

    def on_step(self, run: Run, values: dict[str, Any]) -> None:
        self.seen.append(("step", values["step"]))

    def on_validation(self, run: Run, loss: float) -> None:
        self.seen.append(("validation", run.progress.step))

    def on_checkpoint(self, run: Run, folder: Path) -> None:
        self.seen.append(("checkpoint", folder.name))

    def on_end(self, run: Run) -> None:
        self.seen.append(("end", run.progress.step))


class TestModes:
    def test_steps(self, settings: Settings) -> None:
        outcome, lines, folder = trained(settings(training__mode="step", training__max_steps=5))
        assert outcome.step == 5
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
        assert [step for step, _ in list_checkpoints(folder / "checkpoints")] == [5]

    def test_epochs_see_every_sample_once_each(self, settings: Settings, chat_file: Path) -> None:
        overrides = settings(
            data__path=str(chat_file), data__context_length=64, training__mode="epoch", training__max_epochs=2,
            training__max_steps=None, training__global_batch_size=7,
        )  # fmt: skip
        _, lines, _ = trained(overrides)
        assert [line["samples"] for line in lines] == [7] * 8 + [4]
        assert lines[-1]["epoch"] == 2
        per_epoch = api.prepare(load_config(overrides=overrides))["tokens"]
        assert lines[-1]["total_tokens"] == 2 * per_epoch

    def test_tokens_end_with_the_step_that_reaches_them(self, settings: Settings) -> None:
        outcome, lines, _ = trained(settings(training__max_tokens=400, training__max_steps=None))
        assert lines[-1]["total_tokens"] >= 400 > lines[-2]["total_tokens"]
        assert outcome.step == 4

    def test_infinite_goes_on_until_it_is_stopped(self, settings: Settings) -> None:
        class Enough(Callback):
            def on_step(self, run: Run, values: dict[str, Any]) -> None:
                if values["epoch"] > 1.2:
                    run.stop("enough")

        overrides = settings(training__mode="infinite", training__max_steps=None, optim__schedule="constant")
        outcome, lines, folder = trained(overrides | {"training.global_batch_size": 30}, Enough())
        assert outcome.stopped == "enough"
        assert lines[-2]["epoch"] <= 1.2 < lines[-1]["epoch"]
        assert outcome.checkpoint == folder / f"checkpoints/step-{outcome.step:08d}"

    def test_a_finished_run_says_so_and_does_nothing(
        self, settings: Settings, capsys: pytest.CaptureFixture[str]
    ) -> None:
        overrides = settings(training__max_steps=2, observe__console="lines")
        trained(overrides)
        capsys.readouterr()
        outcome, lines, _ = trained(overrides)
        assert "is complete: step 2 of 2" in capsys.readouterr().err
        assert (outcome.step, len(lines)) == (2, 2)

    def test_a_longer_run_goes_on_from_a_finished_one(self, settings: Settings) -> None:
        trained(settings(training__max_steps=2, optim__schedule="constant"))
        _, lines, _ = trained(settings(training__max_steps=4, optim__schedule="constant"))
        assert [line["step"] for line in lines] == [1, 2, 3, 4]


class TestLearning:
    def test_one_sample_is_learned_by_heart(self, settings: Settings, chat_file: Path, tmp_path: Path) -> None:
        one = tmp_path / "one.jsonl"
        one.write_text(chat_file.read_text().splitlines()[0] + "\n")
        overrides = settings(
            data__path=str(one), data__context_length=64, training__max_steps=60, training__global_batch_size=1,
            optim__learning_rate=1e-2,
        )  # fmt: skip
        _, lines, _ = trained(overrides)
        assert lines[-1]["loss"] < 0.1
        assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]

    def test_a_small_batch_falls_under_three_tenths(self, settings: Settings, chat_file: Path) -> None:
        overrides = settings(
            data__path=str(chat_file), data__context_length=64, training__max_steps=80,
            training__global_batch_size=30, training__max_tokens_per_gpu=256, optim__learning_rate=1e-2,
        )  # fmt: skip
        _, lines, _ = trained(overrides)
        assert lines[-1]["loss"] < 0.3 * lines[0]["loss"]


class TestMinibatches:
    @pytest.mark.parametrize("shape", ["text", "chat"])
    def test_how_a_global_batch_is_cut_does_not_change_the_run(
        self, settings: Settings, chat_file: Path, text_file: Path, tmp_path: Path, shape: str
    ) -> None:
        runs = []
        cuts: list[dict[str, Any]]
        if shape == "text":
            cuts = [{"training__batch_size": size} for size in (12, 5, 1)]
        else:
            cuts = [
                {"training__max_tokens_per_gpu": 512},
                {"training__max_tokens_per_gpu": 64},
                {"data__packing": False, "training__batch_size": 5},
            ]
        for number, cut in enumerate(cuts):
            overrides = settings(
                data__path=str(text_file if shape == "text" else chat_file), data__context_length=64,
                training__global_batch_size=12, optim__eps=1e-4, output_dir=str(tmp_path / str(number)), **cut,
            )  # fmt: skip
            runs.append(trained(overrides)[1])
        for run in runs[1:]:
            assert [line["loss_tokens"] for line in run] == [line["loss_tokens"] for line in runs[0]]
            assert [line["loss"] for line in run] == pytest.approx([line["loss"] for line in runs[0]], rel=2e-6)
        assert len({tuple(line["micro_batches"] for line in run) for run in runs}) == 3

    @pytest.mark.parametrize("workers", [0, 1, 3])
    def test_batches_built_ahead_are_the_same_batches(self, settings: Settings, workers: int, tmp_path: Path) -> None:
        losses = {}
        for count in {0, workers}:
            overrides = settings(data__num_workers=count, output_dir=str(tmp_path / str(count)))
            losses[count] = [line["loss"] for line in trained(overrides)[1]]
        assert losses[workers] == losses[0]

    def test_metrics_account_for_every_token(self, settings: Settings, chat_file: Path) -> None:
        overrides = settings(data__path=str(chat_file), data__context_length=64, data__packing=False)
        _, lines, _ = trained(overrides)
        for line in lines:
            assert 0 < line["loss_tokens"] < line["tokens"]
            assert (line["tokens"] + line["padding"]) % 8 == 0
            assert line["tok_s"] == pytest.approx(line["tokens"] / line["step_s"])
            assert line["memory"] > 50e6
            assert (line["dropped_rows"], line["truncated_rows"]) == (0, 0)
        assert lines[-1]["total_tokens"] == sum(line["tokens"] for line in lines)

    def test_a_step_without_labels_is_an_error_that_names_it(self, settings: Settings, tmp_path: Path) -> None:
        rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3] if n == 0 else [-100] * 3} for n in range(4)]
        path = tmp_path / "masked.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        overrides = settings(data__path=str(path), data__shuffle=False, training__global_batch_size=2)
        with pytest.raises(DataError, match="step 2 has no token to learn from"):
            trained(overrides)


class TestValidation:
    def test_by_steps_and_at_the_end(self, settings: Settings) -> None:
        overrides = settings(data__validation_split=0.2, training__validate_every_steps=4)
        _, lines, _ = trained(overrides)
        assert [line["step"] for line in lines if "val_loss" in line] == [4, 6]

    def test_by_samples(self, settings: Settings) -> None:
        overrides = settings(
            data__validation_split=0.2, training__validate_every_samples=10, training__validate_at_end=False
        )
        _, lines, _ = trained(overrides)
        assert [line["step"] for line in lines if "val_loss" in line] == [3, 5]

    def test_by_epochs_at_the_step_that_completes_one(self, settings: Settings, chat_file: Path) -> None:
        overrides = settings(
            data__path=str(chat_file), data__context_length=64, data__validation_path=str(chat_file),
            training__global_batch_size=8, training__max_steps=None, training__max_epochs=2,
            training__validate_every_epochs=1,
        )  # fmt: skip
        _, lines, _ = trained(overrides)
        assert [line["step"] for line in lines if "val_loss" in line] == [4, 8]

    def test_a_file_is_validated_whole_and_equals_evaluate(
        self, settings: Settings, chat_file: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        overrides = settings(data__validation_path=str(chat_file), data__context_length=64)
        _, lines, folder = trained(overrides)
        found = api.evaluate(
            str(folder), str(chat_file), questions=0, cache_dir=overrides["data.cache_dir"], quiet=True
        )
        assert found["loss"] == pytest.approx(lines[-1]["val_loss"], rel=1e-6)

    def test_the_best_checkpoint_is_kept_and_marked(self, settings: Settings) -> None:
        overrides = settings(
            data__validation_split=0.2, training__validate_every_steps=1, training__max_steps=12,
            checkpoint__save_best=True, checkpoint__keep_last=1, optim__learning_rate=1.0, optim__schedule="constant",
            optim__warmup_steps=10,
        )  # fmt: skip
        _, lines, folder = trained(overrides)
        best = min(lines, key=lambda line: line["val_loss"])
        assert best["step"] < 12, "the test needs a run that gets worse"
        marked = json.loads((folder / "checkpoints/best.json").read_text())
        assert marked == {"step": best["step"], "val_loss": best["val_loss"]}
        assert [step for step, _ in list_checkpoints(folder / "checkpoints")] == [best["step"], 12]

    def test_only_improvements_are_saved_as_the_best(self, settings: Settings) -> None:
        overrides = settings(
            data__validation_split=0.2, training__validate_every_steps=1, training__max_steps=8,
            checkpoint__save_best=True, checkpoint__at_end=False, optim__learning_rate=0.3, optim__schedule="constant",
        )  # fmt: skip
        outcome, lines, folder = trained(overrides)
        losses = [line["val_loss"] for line in lines]
        improved = [n + 1 for n, loss in enumerate(losses) if loss < min(losses[:n], default=float("inf"))]
        assert [step for step, _ in list_checkpoints(folder / "checkpoints")] == improved
        assert outcome.val_loss == losses[-1]

    def test_without_save_best_nothing_is_marked(self, settings: Settings) -> None:
        _, lines, folder = trained(settings(data__validation_split=0.2))
        assert not (folder / "checkpoints/best.json").exists()
        state = json.loads((folder / "checkpoints/step-00000006/state.json").read_text())
        assert state["loss_tokens"] == sum(line["loss_tokens"] for line in lines)

    def test_what_is_held_out_is_not_trained_on(self, settings: Settings, text_file: Path) -> None:
        class Look(Callback):
            def on_start(self, run: Run) -> None:
                train, held_out = run.data.train, run.data.validation
                self.members = set(train.members.tolist()), set(held_out.members.tolist())

        look = Look()
        trained(settings(data__validation_split=0.25), look)
        assert look.members[0] | look.members[1] == set(range(60))
        assert not look.members[0] & look.members[1]
        assert len(look.members[1]) == 15

    def test_a_loss_that_is_no_number_ends_the_run(self, settings: Settings) -> None:
        overrides = settings(
            data__validation_split=0.2, training__max_steps=1, optim__learning_rate=1e38, checkpoint__save_best=True
        )
        with pytest.raises(NumbersError, match="validation after step 1"):
            trained(overrides)
        assert not (Path(overrides["output_dir"]) / "checkpoints").exists()

    def test_validation_does_not_disturb_training(self, settings: Settings, tmp_path: Path) -> None:
        plain = trained(settings(data__validation_split=0.2, training__validate_at_end=False))[1]
        often = settings(
            data__validation_split=0.2, training__validate_every_steps=1, output_dir=str(tmp_path / "often")
        )
        assert [line["loss"] for line in trained(often)[1]] == [line["loss"] for line in plain]


class TestCheckpoints:
    def test_by_samples(self, settings: Settings) -> None:
        _, _, folder = trained(settings(checkpoint__every_samples=10, checkpoint__at_end=False))
        assert [step for step, _ in list_checkpoints(folder / "checkpoints")] == [3, 5]

    def test_by_epochs(self, settings: Settings, chat_file: Path) -> None:
        overrides = settings(
            data__path=str(chat_file), data__context_length=64, training__global_batch_size=8,
            training__max_steps=None, training__max_epochs=2, checkpoint__every_epochs=0.5,
        )  # fmt: skip
        _, _, folder = trained(overrides)
        assert [step for step, _ in list_checkpoints(folder / "checkpoints")] == [2, 4, 6, 8]

    def test_none_when_none_is_asked_for(self, settings: Settings) -> None:
        outcome, _, folder = trained(settings(checkpoint__at_end=False))
        assert outcome.checkpoint is None
        assert not (folder / "checkpoints").exists()

    def test_only_the_newest_are_kept(self, settings: Settings) -> None:
        _, _, folder = trained(settings(checkpoint__every_steps=1, checkpoint__keep_last=2))
        assert [step for step, _ in list_checkpoints(folder / "checkpoints")] == [5, 6]

    def test_the_config_that_ran_is_kept_and_runs_again(self, settings: Settings, tmp_path: Path) -> None:
        overrides = settings()
        _, lines, folder = trained(overrides)
        again = load_config(folder / "config.json", overrides={"output_dir": str(tmp_path / "again")})
        api.train(again)
        assert [x["loss"] for x in read_metrics(tmp_path / "again/metrics.jsonl")] == [x["loss"] for x in lines]

    def test_fine_tuning_starts_from_a_run(self, settings: Settings, chat_file: Path, tmp_path: Path) -> None:
        _, _, folder = trained(settings())
        tuned = {
            key: value for key, value in settings(output_dir=str(tmp_path / "tuned")).items() if "model." not in key
        } | {"model.path": str(folder), "data.path": str(chat_file), "data.context_length": 64}
        trained(tuned | {"optim.learning_rate": 0, "training.max_steps": 1})
        found = api.evaluate(str(folder), str(chat_file), cache_dir=tuned["data.cache_dir"], quiet=True)
        assert found["questions"] == 30
        assert 0 < found["loss"] < 20
        weights = [next((f / "checkpoints").glob("step-*")) / "model.safetensors" for f in (folder, tmp_path / "tuned")]
        assert weights[0].read_bytes() == weights[1].read_bytes(), "a learning rate of zero changes nothing"


class TestCallbacks:
    def test_they_see_everything_in_order(self, settings: Settings) -> None:
        recorder = Recorder()
        overrides = settings(
            training__max_steps=2, data__validation_split=0.2, training__validate_every_steps=1,
            checkpoint__every_steps=2,
        )  # fmt: skip
        trained(overrides, recorder)
        assert recorder.seen == [
            ("start", 0),
            ("step", 1), ("validation", 1),
            ("step", 2), ("validation", 2), ("checkpoint", "step-00000002"),
            ("end", 2),
        ]  # fmt: skip

    def test_a_callback_can_stop_after_validation(self, settings: Settings) -> None:
        class EarlyStop(Callback):
            def on_validation(self, run: Run, loss: float) -> None:
                run.stop(f"validation loss {loss:.2f}")

        overrides = settings(data__validation_split=0.2, training__validate_every_steps=2)
        outcome, lines, folder = trained(overrides, EarlyStop())
        assert (outcome.step, len(lines)) == (2, 2)
        assert outcome.stopped.startswith("validation loss")
        assert outcome.checkpoint == folder / "checkpoints/step-00000002"


class TestMemory:
    PLACES = {
        "step 1 or later": "torchstone.training.loop.train_step",
        "the model": "torchstone.training.assemble.new_model",
    }

    @pytest.mark.parametrize("what", PLACES)
    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        ],
        ids=["cuda", "cpu"],
    )
    def test_running_out_of_it_is_exit_code_four(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch, what: str, error: Exception
    ) -> None:
        def no_room(*arguments: Any) -> None:
            raise error

        monkeypatch.setattr(self.PLACES[what], no_room)
        with pytest.raises(OutOfMemoryError, match=f"{what} does not fit on cpu") as caught:
            trained(settings())
        assert caught.value.exit_code == 4

    def test_other_errors_stay_what_they_are(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        def wrong(*arguments: Any) -> None:
            raise RuntimeError("a fault of ours")

        monkeypatch.setattr("torchstone.training.loop.train_step", wrong)
        with pytest.raises(RuntimeError, match="a fault of ours"):
            trained(settings())

    def test_a_thousand_steps_hold_no_more_than_the_first_hundred(self, settings: Settings) -> None:
        overrides = settings(
            model__depth=1, training__max_steps=1000, training__global_batch_size=1, data__context_length=16,
            checkpoint__at_end=False,
        )  # fmt: skip
        _, lines, _ = trained(overrides)
        held = np.array([line["memory"] for line in lines])
        assert held[-100:].max() < held[:100].max() + 20e6


class TestConfigByHand:
    def test_it_is_checked_like_any_other(self) -> None:
        model, data = ModelConfig(depth=2, tokenizer="demo:tokenizer"), DataConfig(path="demo:corpus")
        wrong = Config(model=model, data=data, training=TrainingConfig(precision="fp16"))  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="training.precision cannot be 'fp16'"):
            api.train(wrong)
        with pytest.raises(UsageError, match="data.path is not set"):
            api.train(Config(model=model))


class TestFolder:
    def test_two_runs_cannot_share_a_folder(self, settings: Settings) -> None:
        overrides = settings()

        class Intruder(Callback):
            def on_step(self, run: Run, values: dict[str, Any]) -> None:
                with pytest.raises(UsageError, match="another process is training into"):
                    api.train(load_config(overrides=overrides))

        trained(overrides, Intruder())

    def test_a_changed_setting_is_said_when_going_on(
        self, settings: Settings, capsys: pytest.CaptureFixture[str]
    ) -> None:
        trained(settings(training__max_steps=2))
        capsys.readouterr()
        trained(settings(training__max_steps=4, optim__learning_rate=5e-4))
        said = capsys.readouterr().err
        assert "optim.learning_rate 0.001, and goes on with 0.0005" in said
        assert "training.max_steps 2, and goes on with 4" in said


class TestSignals:
    def test_a_second_interrupt_ends_at_once_and_handlers_are_put_back(self, settings: Settings) -> None:
        class Twice(Callback):
            def on_step(self, run: Run, values: dict[str, Any]) -> None:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

        before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            trained(settings(), Twice())
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before

    def test_a_run_in_another_thread_needs_no_handlers(self, settings: Settings) -> None:
        done = []
        thread = threading.Thread(target=lambda: done.append(trained(settings())[0].step))
        thread.start()
        thread.join()
        assert done == [6]


class TestPrecision:
    def test_bf16_pure_keeps_everything_in_bf16(self, settings: Settings) -> None:
        class Dtypes(Callback):
            def on_end(self, run: Run) -> None:
                found = {p.dtype for p in run.model.module.parameters()}
                found |= {run.optimizer.state[p]["exp_avg"].dtype for p in run.model.module.parameters()}
                assert found == {torch.bfloat16}

        _, lines, _ = trained(settings(training__precision="bf16-pure"), Dtypes())
        exact = trained(settings(output_dir=settings()["output_dir"] + "-fp32"))[1]
        assert [x["loss"] for x in lines] == pytest.approx([x["loss"] for x in exact], rel=0.02)

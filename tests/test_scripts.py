"""scripts/base_train, mid_train and chat_sft: their flags become those of `torchstone train`, and each run goes on from
the weights of the one before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from torchstone import stages
from torchstone.config.load import fields, load_config
from torchstone.data import loader
from torchstone.errors import UsageError

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import base_train
import chat_sft
import mid_train

ROOT = Path(__file__).parents[1]
SCRIPTS = {"base_train": base_train, "mid_train": mid_train, "chat_sft": chat_sft}
Called = Callable[..., tuple[int, str, str]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Called:
    """Exit code, stdout and stderr of a script, in this process and an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(name: str, *words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        code = 0
        try:
            stages.run(SCRIPTS[name].STAGE)
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def shown(script: Called) -> Callable[..., dict[str, Any]]:
    """The config that a script would run, by dotted keys."""

    def call(name: str, *words: object) -> dict[str, Any]:
        code, out, err = script(name, *words, "--print-config")
        assert code == 0, err
        return {
            f"{section}.{key}" if key else section: value
            for section, values in json.loads(out).items()
            for key, value in (values.items() if isinstance(values, dict) else [("", values)])
        }

    return call


def pretend_run(name: str, at: int, batch_size: int | None = None) -> None:
    """As much of a run as the choice of one looks at: a committed checkpoint of a certain time, and the config."""
    manifest = Path("runs", name, "checkpoints/step-00000001/manifest.json")
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    os.utime(manifest, (at, at))
    Path("runs", name, "config.json").write_text(json.dumps({"training": {"batch_size": batch_size}}))


class TestFlags:
    @pytest.mark.parametrize(
        ("words", "key", "value"),
        [
            (["--depth", "4"], "model.depth", 4),
            (["--depth=4"], "model.depth", 4),
            (["--depth", "4"], "output_dir", "runs/base-d4"),
            (["--depth", "4", "--run", "first"], "output_dir", "runs/first"),
            (["--depth", "4", "--output-dir", "there"], "output_dir", "there"),
            (["--depth", "4", "--device-batch-size", "2"], "training.batch_size", 2),
            (["--depth", "4", "--device_batch_size=2"], "training.batch_size", 2),
            (["--depth", "4"], "training.batch_size", None),
            (["--depth", "4", "--max_seq_len", "64"], "data.context_length", 64),
            (["--depth", "4", "--num-iterations", "7"], "training.max_steps", 7),
            (["--depth", "4", "--max-steps", "7"], "training.max_steps", 7),
            (["--depth", "4"], "data.path", ["demo:corpus"]),
            (["--depth", "4"], "model.tokenizer", "demo:tokenizer"),
            (["--depth", "4", "--data", "a,b", "--tokenizer", "t"], "data.path", ["a", "b"]),
            (["--depth", "4", "--data", "a,b", "--tokenizer", "t"], "model.tokenizer", "t"),
            (["--depth", "4", "--total-batch-size", "4096"], "training.global_batch_size", 4),
            (["--depth", "4", "--total_batch_size=4096", "--max-seq-len=64"], "training.global_batch_size", 64),
            (
                ["--depth", "4", "--total-batch-size", "4096", "--data.context-length", "128"],
                "training.global_batch_size",
                32,
            ),
            (["--depth", "4", "--total-batch-size", "256", "--preset", "debug"], "training.global_batch_size", 2),
            (["--depth", "4"], "optim.schedule", "wsd"),
            (["--depth", "4", "--optim.schedule", "cosine"], "optim.schedule", "cosine"),
            (["--depth", "4", "--preset", "debug"], "model.depth", 4),
            (["--preset", "debug"], "output_dir", "runs/debug"),
            (["--debug"], "data.context_length", 128),
            (["--preset", "production"], "optim.schedule", "cosine"),
        ],
    )
    def test_they_set_the_keys_of_train(
        self, shown: Callable[..., dict[str, Any]], words: list[str], key: str, value: object
    ) -> None:
        assert shown("base_train", *words)[key] == value

    def test_a_config_file_wins_over_the_defaults_and_the_flags_over_the_file(
        self, shown: Callable[..., dict[str, Any]], tmp_path: Path
    ) -> None:
        (tmp_path / "run.yaml").write_text("model: {depth: 3}\noptim: {schedule: linear}\ntraining: {use_amp: false}\n")
        found = shown("base_train", "run.yaml", "--num-iterations", 5)
        assert found["model.depth"] == 3
        assert found["optim.schedule"] == "linear"
        assert found["output_dir"] == "runs/base-d3"
        assert shown("base_train", "--depth=2", "run.yaml")["output_dir"] == "runs/base-d2"

    def test_what_print_config_shows_can_be_run(self, script: Called, tmp_path: Path) -> None:
        _, out, _ = script("base_train", "--depth", 2, "--optim.schedule", "cosine", "--print-config")
        (tmp_path / "shown.json").write_text(out)
        assert script("base_train", "shown.json", "--print-config")[1] == out

    def test_a_default_fills_what_is_unsaid_or_null_and_gives_way_to_anything_else(
        self, shown: Callable[..., dict[str, Any]], tmp_path: Path
    ) -> None:
        (tmp_path / "null.yaml").write_text("model: {depth: 2, tokenizer: null}\noptim: {schedule: null}\n")
        assert shown("base_train", "null.yaml")["model.tokenizer"] == "demo:tokenizer"
        assert shown("base_train", "null.yaml")["optim.schedule"] == "wsd"
        (tmp_path / "said.yaml").write_text("optim: {eps: 3e-8}\n")
        defaults = {"optim.eps": 1, "optim.weight_decay": 0.5, "optim.learning_rate": 7, "training.seed": 5}
        config = load_config(tmp_path / "said.yaml", "debug", {"training.seed": 6}, defaults=defaults)
        assert (config.optim.eps, config.optim.weight_decay) == (3e-8, 0.5)
        assert (config.optim.learning_rate, config.training.seed) == (1e-4, 6)

    def test_a_default_that_cannot_be_is_said_to_be_one(self, script: Called) -> None:
        code, _, err = script("base_train", "--depth", 2, "--training.mode", "infinite")
        assert code == 2
        assert err.startswith("error: the defaults of base_train: training.mode infinite has no end for optim.schedule")
        with pytest.raises(UsageError, match=r"^the defaults: unknown key 'optim\.epps'\n  did you mean 'optim\.eps'"):
            load_config(preset="debug", defaults={"optim.epps": 1})

    def test_they_and_the_defaults_name_keys_that_exist(self) -> None:
        assert {key for key, _ in stages.FLAGS.values()} <= set(fields())
        for module in SCRIPTS.values():
            assert set(module.STAGE.defaults | module.STAGE.without_data) <= set(fields())


class TestWrongUsage:
    @pytest.mark.parametrize(
        ("name", "words", "expected"),
        [
            ("base_train", [], "give --depth N"),
            ("base_train", ["--depth"], "--depth needs a value"),
            ("base_train", ["--depth="], "--depth needs a value"),
            ("base_train", ["--depth", "two"], "model.depth must be a whole number from 1 on, not 'two'"),
            ("base_train", ["--depth", "2", "--model.depth", "3"], "--depth and model.depth are one setting"),
            ("base_train", ["--depth", "2", "--max-steps", "3", "--num-iterations", "3"], "training.max_steps are one"),
            ("base_train", ["--depth", "2", "--run", "a", "--output-dir", "b"], "--run and output_dir are one setting"),
            ("base_train", ["--depth", "2", "--model.path", "x"], "makes a new model, but model.path names one"),
            ("base_train", ["--depth", "2", "--data", "x.jsonl"], "no tokenizer"),
            ("base_train", ["--depth", "2", "--total-batch-size", "5000"], "4096 and 5120 are"),
            ("base_train", ["--depth", "2", "--total-batch-size", "5"], "1024 is"),
            ("base_train", ["--depth", "2", "--total-batch-size", "many"], "--total-batch-size must be a whole number"),
            ("base_train", ["--depth", "2", "--auto_batch_size=True"], "give --device-batch-size N"),
            ("mid_train", ["--auto-batch-size"], "automatic batch size is not in this version"),
            ("chat_sft", ["--batch_size_margin", "0.85"], "automatic batch size is not in this version"),
            ("chat_sft", ["--batch-size-cache=False"], "automatic batch size is not in this version"),
            ("base_train", ["--depth", "2", "--learning-rate", "1"], "did you mean --optim.learning_rate?"),
            ("base_train", ["--depth", "2", "--optim.learning_rat", "1"], "did you mean 'optim.learning_rate'?"),
            ("base_train", ["--depth", "2", "none.yaml"], "none.yaml: no such config file"),
            ("base_train", ["--depth", "2", "--preset", "debgu"], "did you mean 'debug'?"),
            ("mid_train", [], "there is no runs/base-dN with a checkpoint"),
            ("mid_train", ["--depth", "4"], "there is no runs/base-d4 with a checkpoint"),
            ("chat_sft", [], "there is no runs/mid-dN or runs/base-dN with a checkpoint"),
            ("chat_sft", ["--depth", "x"], "--depth must be a whole number"),
            ("mid_train", ["--depth", "2", "--model.path", "x"], "--depth and model.path are one setting"),
            ("mid_train", ["--model.depth", "2"], "--depth N takes the run of that depth"),
            ("mid_train", ["--model.path", "x", "--total-batch-size", "64"], "--training.global_batch_size N"),
        ],
    )
    def test_it_ends_with_two_and_says_what_to_type(
        self, script: Called, name: str, words: list[str], expected: str
    ) -> None:
        code, out, err = script(name, *words)
        assert (code, out) == (2, ""), err
        assert expected in err
        assert not Path("runs").exists()


class TestWhichRunIsGoneOnFrom:
    def test_the_newest_by_its_checkpoint_and_mid_before_base(
        self, script: Called, shown: Callable[..., dict[str, Any]], tmp_path: Path
    ) -> None:
        for name, at in (("base-d4", 100), ("base-d12", 300), ("base-d20", 200), ("base-dense", 900)):
            pretend_run(name, at)
        (tmp_path / "runs/base-d32/checkpoints").mkdir(parents=True)
        found = shown("mid_train")
        assert (found["model.path"], found["output_dir"]) == ("runs/base-d12", "runs/mid-d12")
        assert shown("chat_sft")["model.path"] == "runs/base-d12"
        assert "mid_train: starting from runs/base-d12, the newest base run\n" in script("mid_train", "--print-config")
        pretend_run("mid-d4", 50)
        found = shown("chat_sft")
        assert (found["model.path"], found["output_dir"]) == ("runs/mid-d4", "runs/sft-d4")

    def test_depth_takes_the_run_of_that_depth(
        self, script: Called, shown: Callable[..., dict[str, Any]], tmp_path: Path
    ) -> None:
        for name, at in (("base-d4", 100), ("base-d12", 300), ("mid-d12", 400)):
            pretend_run(name, at)
        found = shown("mid_train", "--depth", 4)
        assert (found["model.path"], found["model.depth"], found["output_dir"]) == ("runs/base-d4", None, "runs/mid-d4")
        _, out, err = script("chat_sft", "--depth=4", "--print-config")
        assert json.loads(out)["model"]["path"] == "runs/base-d4"
        assert err == "chat_sft: starting from runs/base-d4, the base run of depth 4\n"
        assert shown("chat_sft", "--depth", 12)["model.path"] == "runs/mid-d12"

    def test_a_model_that_is_named_wins(self, script: Called, shown: Callable[..., dict[str, Any]]) -> None:
        pretend_run("base-d4", 100)
        _, out, err = script("mid_train", "--model.path", "my-llama", "--print-config")
        assert err == ""
        assert json.loads(out)["model"]["path"] == "my-llama"
        assert json.loads(out)["output_dir"] == "runs/mid"
        assert shown("chat_sft", "--preset", "demo-chat")["model.path"] == "runs/demo/pretrain"
        assert shown("chat_sft", "--preset", "demo")["model.path"] == "runs/base-d4"

    def test_the_defaults_of_the_stages(self, shown: Callable[..., dict[str, Any]]) -> None:
        pretend_run("base-d4", 100)
        mid, sft = shown("mid_train"), shown("chat_sft")
        assert (mid["data.path"], mid["data.train_on"], mid["optim.schedule"]) == (["demo:corpus"], "all", "linear")
        assert (sft["data.path"], sft["data.train_on"], sft["data.packing"]) == (["demo:chat"], "assistant", False)
        assert shown("chat_sft", "--data.packing", "true")["data.packing"] is True
        assert mid["training.batch_size"] is sft["training.batch_size"] is mid["model.tokenizer"] is None

    @pytest.mark.parametrize(
        ("before", "words", "warned"),
        [
            (None, ["--device-batch-size", "9"], "--device-batch-size 9 is more than the 8 rows"),
            (None, ["--device-batch-size", "8"], ""),
            (None, [], ""),
            (16, ["--training.batch_size", "16"], ""),
            (16, ["--training.batch_size", "17"], "--device-batch-size 17 is more than the 16 rows"),
            (4, [], "8 rows of text per device, the default, are more than the 4 rows"),
            (4, ["--training.batch_size", "none"], "8 rows of text per device"),
            (4, ["--device-batch-size", "4"], ""),
        ],
    )
    def test_mid_train_warns_of_more_rows_than_pretraining_had(
        self, script: Called, before: int | None, words: list[str], warned: str
    ) -> None:
        pretend_run("base-d4", 100, before)
        code, _, err = script("mid_train", *words, "--print-config")
        assert code == 0
        assert (warned in err) if warned else ("warning" not in err), err

    def test_the_default_it_compares_with_is_that_of_the_package(self) -> None:
        assert stages.ROWS_OF_TEXT == loader.ROWS_OF_TEXT


class TestHelp:
    @pytest.mark.parametrize("name", SCRIPTS)
    def test_it_lists_the_flags_and_imports_no_torch(self, name: str, tmp_path: Path) -> None:
        """By module name from the clone, by path from anywhere."""
        command = [sys.executable, "-X", "importtime"]
        by_path = subprocess.run(
            [*command, ROOT / f"scripts/{name}.py", "--help"], cwd=tmp_path, capture_output=True, text=True
        )
        by_name = subprocess.run(
            [*command, "-m", f"scripts.{name}", "--help"], cwd=ROOT, capture_output=True, text=True
        )
        for done in (by_path, by_name):
            assert done.returncode == 0, done.stderr
            assert "--device-batch-size" in done.stdout
            assert "torchstone train --help-keys" in done.stdout
            imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
            assert not {"torch", "transformers", "cyclopts"} & set(imported)
        assert by_path.stdout == by_name.stdout

    def test_what_is_not_training_is_answered_as_by_train(self, script: Called) -> None:
        assert "--optim.learning_rate\n" in script("mid_train", "--help-keys")[1]


class TestTheChain:
    def test_each_stage_starts_with_the_weights_of_the_one_before_and_goes_on_after_a_stop(
        self, script: Called, tmp_path: Path, text_file: Path, chat_file: Path, tokenizer_dir: Path
    ) -> None:
        """With learning rate 0 a run ends with the very weights it began with. Only first starts are worth a process
        of their own, most of which is importing torch.
        """
        always = ["--max-seq-len=64", "--observe.console=lines", "--system.device=cpu", "--system.threads=1"]

        def run(name: str, *words: object) -> str:
            command = [sys.executable, ROOT / f"scripts/{name}.py", *always, *map(str, words)]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
            assert (done.returncode, done.stdout) == (0, ""), done.stderr
            return done.stderr

        def run_again(name: str, *words: object) -> str:
            code, _, err = script(name, *always, *words)
            assert code == 0, err
            return err

        def weights(name: str, step: int) -> dict[str, torch.Tensor]:
            return load_file(tmp_path / f"runs/{name}/checkpoints/step-{step:08d}/model.safetensors")

        def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
            return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)

        base = ["--depth=1", "--data", text_file, "--tokenizer", tokenizer_dir, "--num-iterations=2"]
        base += ["--total-batch-size=256"]
        assert "of 4 samples, micro-batches of 4 rows" in run("base_train", *base)
        assert "the run in runs/base-d1 is complete: step 2 of 2" in run_again("base_train", *base)

        mid = ["--data", text_file, "--device-batch-size=9"]
        said = run("mid_train", *mid, "--num-iterations=1", "--optim.learning_rate=0")
        assert "mid_train: starting from runs/base-d1, the newest base run" in said
        assert "warning: --device-batch-size 9 is more than the 8 rows" in said
        assert equal(weights("mid-d1", 1), weights("base-d1", 2))
        said = run_again("mid_train", *mid, "--num-iterations=2")
        assert "going on from runs/mid-d1/checkpoints/step-00000001" in said
        assert not equal(weights("mid-d1", 2), weights("base-d1", 2))

        said = run("chat_sft", "--data", chat_file, "--max-steps=1", "--optim.learning_rate=0", "--depth=1")
        assert "chat_sft: starting from runs/mid-d1, the mid run of depth 1" in said
        assert "of 4 samples, micro-batches of 4 rows" in said
        assert equal(weights("sft-d1", 1), weights("mid-d1", 2))

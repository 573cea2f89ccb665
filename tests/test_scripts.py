"""scripts/base_train, mid_train and chat_sft: their flags become those of `torchstone train`, and each continues from
the weights of the run before.
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

from torchstone.config.load import field_types, read_config_layers, resolve
from torchstone.errors import UsageError
from torchstone.scripts import nanochat

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import base_train
import chat_sft
import mid_train

ROOT = Path(__file__).parents[1]
SCRIPTS = {"base_train": base_train, "mid_train": mid_train, "chat_sft": chat_sft}
RunScript = Callable[..., tuple[int, str, str]]
ShowConfig = Callable[..., dict[str, Any]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, run_main: RunScript, tmp_path: Path) -> RunScript:
    """Exit code, stdout and stderr of a script, in this process and an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda name, *args: run_main(lambda: nanochat.run_script(SCRIPTS[name].SCRIPT), name, *args)


@pytest.fixture
def show_config(script: RunScript) -> ShowConfig:
    """The config that a script would run, by dotted keys."""

    def show(name: str, *args: object) -> dict[str, Any]:
        code, out, err = script(name, *args, "--print-config")
        assert code == 0, err
        return {
            f"{section}.{key}" if key else section: value
            for section, values in json.loads(out).items()
            for key, value in (values.items() if isinstance(values, dict) else [("", values)])
        }

    return show


def make_run(name: str, saved_at: int, batch_size: int | None = None) -> None:
    """What the scripts look at in a run: the time of its checkpoint, and its config."""
    manifest = Path("runs", name, "checkpoints/step-00000001/manifest.json")
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    os.utime(manifest, (saved_at, saved_at))
    Path("runs", name, "config.json").write_text(json.dumps({"training": {"batch_size": batch_size}}))


class TestFlags:
    @pytest.mark.parametrize(
        ("args", "key", "value"),
        [
            ("--depth 4", "model.depth", 4),
            ("--depth=4", "model.depth", 4),
            ("--depth 4", "output_dir", "runs/base-d4"),
            ("--depth 4 --run first", "output_dir", "runs/first"),
            ("--depth 4 --output-dir there", "output_dir", "there"),
            ("--depth 4 --run=~/there", "output_dir", str(Path.home() / "there")),
            ("--depth 4 --device-batch-size 2", "training.batch_size", 2),
            ("--depth 4 --device_batch_size=2", "training.batch_size", 2),
            ("--depth 4", "training.batch_size", None),
            ("--depth 4 --max_seq_len 64", "data.context_length", 64),
            ("--depth 4 --num-iterations 7", "training.max_steps", 7),
            ("--depth 4 --max-steps 7", "training.max_steps", 7),
            ("--depth 4", "data.path", ["demo:corpus"]),
            ("--depth 4", "model.tokenizer", "demo:tokenizer"),
            ("--depth 4 --data a,b --tokenizer t", "data.path", ["a", "b"]),
            ("--depth 4 --data a,b --tokenizer t", "model.tokenizer", "t"),
            ("--depth 4 --total-batch-size 4096", "training.global_batch_size", 4),
            ("--depth 4 --total_batch_size=4096 --max-seq-len=64", "training.global_batch_size", 64),
            ("--depth 4 --total-batch-size 4096 --data.context-length 128", "training.global_batch_size", 32),
            ("--depth 4 --total-batch-size 256 --preset debug", "training.global_batch_size", 2),
            ("--depth 4", "optim.schedule", "wsd"),
            ("--depth 4 --optim.schedule cosine", "optim.schedule", "cosine"),
            ("--depth 4 --preset debug", "model.depth", 4),
            ("--preset debug", "output_dir", "runs/debug"),
            ("--debug", "data.context_length", 128),
            ("--preset production", "optim.schedule", "cosine"),
        ],
    )
    def test_they_set_config_keys(self, show_config: ShowConfig, args: str, key: str, value: object) -> None:
        assert show_config("base_train", *args.split())[key] == value

    def test_flags_win_over_a_file_and_a_file_over_the_defaults(self, show_config: ShowConfig, tmp_path: Path) -> None:
        (tmp_path / "run.yaml").write_text("model: {depth: 3}\noptim: {schedule: linear}\ntraining: {use_amp: false}\n")
        config = show_config("base_train", "run.yaml", "--num-iterations", 5)
        assert (config["model.depth"], config["optim.schedule"]) == (3, "linear")
        assert config["output_dir"] == "runs/base-d3"
        assert show_config("base_train", "--depth=2", "run.yaml")["output_dir"] == "runs/base-d2"

    def test_the_output_of_print_config_can_be_run(self, script: RunScript, tmp_path: Path) -> None:
        _, out, _ = script("base_train", "--depth", 2, "--optim.schedule", "cosine", "--print-config")
        (tmp_path / "shown.json").write_text(out)
        assert script("base_train", "shown.json", "--print-config")[1] == out

    def test_a_default_applies_to_keys_that_are_unset_or_null(self, show_config: ShowConfig, tmp_path: Path) -> None:
        (tmp_path / "null.yaml").write_text("model: {depth: 2, tokenizer: null}\noptim: {schedule: null}\n")
        assert show_config("base_train", "null.yaml")["model.tokenizer"] == "demo:tokenizer"
        assert show_config("base_train", "null.yaml")["optim.schedule"] == "wsd"
        (tmp_path / "settings.yaml").write_text("optim: {eps: 3e-8}\n")
        defaults = {"optim.eps": 1, "optim.weight_decay": 0.5, "optim.learning_rate": 7, "training.seed": 5}
        config = resolve(
            read_config_layers(tmp_path / "settings.yaml", "debug", {"training.seed": 6}), defaults=defaults
        )
        assert (config.optim.eps, config.optim.weight_decay) == (3e-8, 0.5)
        assert (config.optim.learning_rate, config.training.seed) == (1e-4, 6)

    def test_an_error_in_a_default_names_the_defaults(self, script: RunScript) -> None:
        code, _, err = script("base_train", "--depth", 2, "--training.mode", "infinite")
        assert code == 2
        assert err.startswith("error: the defaults of base_train: training.mode infinite has no end, so optim.schedule")
        with pytest.raises(UsageError, match=r"^the defaults: unknown key 'optim\.epps'\n  did you mean 'optim\.eps'"):
            resolve(read_config_layers(None, "debug", {}), defaults={"optim.epps": 1})

    def test_flags_and_defaults_are_config_keys(self) -> None:
        assert {key for key, _ in nanochat.FLAGS.values()} <= set(field_types())
        for module in SCRIPTS.values():
            assert set(module.SCRIPT.defaults | module.SCRIPT.data_defaults) <= set(field_types())


class TestWrongUsage:
    @pytest.mark.parametrize(
        ("name", "args", "expected"),
        [
            ("base_train", "", "add --depth N"),
            ("base_train", "--depth", "--depth needs a value"),
            ("base_train", "--depth=", "--depth needs a value"),
            ("base_train", "--depth two", "model.depth must be a positive integer, not 'two'"),
            ("base_train", "--depth 2 --depth 3", "--depth is given twice"),
            ("base_train", "--depth 2 --model.depth 3", "--depth and --model.depth are the same setting"),
            ("base_train", "--depth 2 --num_iteration 3", "did you mean --num-iterations?"),
            ("base_train", "--depth 2 --max-steps 3 --num-iterations 3", "training.max_steps are the same setting"),
            ("base_train", "--depth 2 --run a --output-dir b", "--run and --output_dir are the same setting"),
            ("base_train", "--depth 2 --model.path x", "makes a new model, but model.path is set"),
            ("base_train", "--depth 2 --data x.jsonl", "no tokenizer"),
            ("base_train", "--depth 2 --total-batch-size 5000", "use 4096 or 5120"),
            ("base_train", "--depth 2 --total-batch-size 5", "use 1024"),
            ("base_train", "--depth 2 --total-batch-size many", "--total-batch-size must be a positive integer"),
            ("base_train", "--depth 2 --auto_batch_size=maybe", "auto_batch.enabled must be true or false"),
            ("base_train", "--depth 2 --batch_size_margin 1.5", "auto_batch.margin must be more than 0 and at most 1"),
            ("base_train", "--depth 2 --learning-rate 1", "in Torchstone this is --optim.learning_rate"),
            ("base_train", "--depth 2 --eval-every 1", "in Torchstone this is --training.validate_every_steps"),
            ("base_train", "--depth 2 --optim.learning_rat 1", "did you mean 'optim.learning_rate'?"),
            ("base_train", "--depth 2 none.yaml", "config file none.yaml does not exist"),
            ("base_train", "--depth 2 --preset debgu", "did you mean 'debug'?"),
            ("mid_train", "", "there is no runs/base-dN with a checkpoint"),
            ("mid_train", "--depth 4", "there is no runs/base-d4 with a checkpoint"),
            ("chat_sft", "", "there is no runs/mid-dN or runs/base-dN with a checkpoint"),
            ("chat_sft", "--depth x", "--depth must be a positive integer"),
            ("mid_train", "--depth 2 --model.path x", "--depth and --model.path are the same setting"),
            ("mid_train", "--model.depth 2", "--depth N uses the run of that depth"),
            ("mid_train", "--model.path x --total-batch-size 64", "--training.global_batch_size N"),
        ],
    )
    def test_it_exits_with_2_and_says_what_to_type(
        self, script: RunScript, name: str, args: str, expected: str
    ) -> None:
        code, out, err = script(name, *args.split())
        assert (code, out) == (2, ""), err
        assert expected in err
        assert not Path("runs").exists()


class TestPreviousRun:
    def test_it_is_the_one_with_the_newest_checkpoint_and_mid_before_base(
        self, script: RunScript, show_config: ShowConfig, tmp_path: Path
    ) -> None:
        for name, saved_at in (("base-d4", 100), ("base-d12", 300), ("base-d20", 200), ("base-dense", 900)):
            make_run(name, saved_at)
        (tmp_path / "runs/base-d32/checkpoints").mkdir(parents=True)
        config = show_config("mid_train")
        assert (config["model.path"], config["output_dir"]) == ("runs/base-d12", "runs/mid-d12")
        assert show_config("chat_sft")["model.path"] == "runs/base-d12"
        assert (
            "mid_train: starting from runs/base-d12, the newest base run\n" in script("mid_train", "--print-config")[2]
        )
        make_run("mid-d4", 50)
        config = show_config("chat_sft")
        assert (config["model.path"], config["output_dir"]) == ("runs/mid-d4", "runs/sft-d4")

    def test_depth_selects_the_run_of_that_depth(
        self, script: RunScript, show_config: ShowConfig, tmp_path: Path
    ) -> None:
        for name, saved_at in (("base-d4", 100), ("base-d12", 300), ("mid-d12", 400)):
            make_run(name, saved_at)
        config = show_config("mid_train", "--depth", 4)
        assert (config["model.path"], config["model.depth"], config["output_dir"]) == (
            "runs/base-d4",
            None,
            "runs/mid-d4",
        )
        _, out, err = script("chat_sft", "--depth=4", "--print-config")
        assert json.loads(out)["model"]["path"] == "runs/base-d4"
        assert err.startswith("chat_sft: starting from runs/base-d4, the base run of depth 4\n")
        assert show_config("chat_sft", "--depth", 12)["model.path"] == "runs/mid-d12"

    def test_model_path_replaces_it(self, script: RunScript, show_config: ShowConfig) -> None:
        make_run("base-d4", 100)
        _, out, err = script("mid_train", "--model.path", "my-llama", "--print-config")
        assert err == "what auto means is decided when the run starts: my-llama is not a model folder here\n"
        assert json.loads(out)["model"]["path"] == "my-llama"
        assert json.loads(out)["output_dir"] == "runs/mid"
        assert show_config("chat_sft", "--preset", "demo-chat")["model.path"] == "runs/demo/pretrain"
        assert show_config("chat_sft", "--preset", "demo")["model.path"] == "runs/base-d4"

    def test_the_defaults_of_mid_train_and_chat_sft(self, show_config: ShowConfig) -> None:
        make_run("base-d4", 100)
        mid, sft = show_config("mid_train"), show_config("chat_sft")
        assert (mid["data.path"], mid["data.train_on"], mid["optim.schedule"]) == (["demo:corpus"], "all", "linear")
        assert (sft["data.path"], sft["data.train_on"], sft["data.packing"]) == (["demo:chat"], "assistant", False)
        assert show_config("chat_sft", "--data.packing", "true")["data.packing"] is True
        assert mid["training.batch_size"] is sft["training.batch_size"] is mid["model.tokenizer"] is None

    @pytest.mark.parametrize(
        ("pretrained", "args", "warning"),
        [
            (None, "--device-batch-size 9", "--device-batch-size 9 is more than the 8 rows"),
            (None, "--device-batch-size 8", ""),
            (None, "", ""),
            (16, "--training.batch_size 16", ""),
            (16, "--training.batch_size 17", "--device-batch-size 17 is more than the 16 rows"),
            (4, "", "the default of 8 rows per device is more than the 4 rows"),
            (4, "--training.batch_size none", "the default of 8 rows per device"),
            (4, "--device-batch-size 4", ""),
        ],
    )
    def test_mid_train_warns_about_more_rows_than_in_pretraining(
        self, script: RunScript, pretrained: int | None, args: str, warning: str
    ) -> None:
        make_run("base-d4", 100, pretrained)
        code, _, err = script("mid_train", *args.split(), "--print-config")
        assert code == 0
        assert (warning in err) if warning else ("warning" not in err), err

    def test_mid_train_knows_the_rows_that_a_run_found(self, script: RunScript) -> None:
        """Not its tokens, if conversations shared rows; and a size that is set wins over a search."""
        make_run("base-d4", 100, None)
        state = Path("runs/base-d4/checkpoints/step-00000001/state.json")
        for unit, warning in (("device_batch_size", "than the 32 rows"), ("max_tokens_per_gpu", "than the 8 rows")):
            state.write_text(json.dumps({"auto_batch": {"size": 32, "unit": unit}}))
            assert warning in script("mid_train", "--device-batch-size", "33", "--print-config")[2]
            _, _, err = script("mid_train", "--device-batch-size", "33", "--auto_batch_size", "--print-config")
            assert warning in err
        assert "warning" not in script("mid_train", "--auto_batch_size", "--print-config")[2]

    def test_mid_train_starts_from_a_run_with_a_damaged_config(self, script: RunScript) -> None:
        make_run("base-d4", 100, 8)
        Path("runs/base-d4/config.json").write_text("{")
        code, _, err = script("mid_train", "--print-config")
        assert code == 0
        assert "warning: runs/base-d4/config.json" in err


class TestHelp:
    @pytest.mark.parametrize("name", SCRIPTS)
    def test_it_lists_the_flags(self, script: RunScript, name: str) -> None:
        code, out, _ = script(name, "--help")
        assert code == 0
        assert "--device-batch-size" in out
        assert "torchstone train --help-keys" in out

    def test_it_works_from_anywhere_and_imports_no_torch(self, tmp_path: Path) -> None:
        """By path from any folder, by module name from the root of the repository."""
        command = [sys.executable, "-X", "importtime"]
        for args, cwd in (([ROOT / "scripts/mid_train.py"], tmp_path), (["-m", "scripts.mid_train"], ROOT)):
            process = subprocess.run([*command, *args, "--help"], cwd=cwd, capture_output=True, text=True)
            assert process.returncode == 0, process.stderr
            assert process.stdout == nanochat.help_text(mid_train.SCRIPT)
            imports = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines()}
            assert "torchstone.scripts.nanochat" in imports
            assert not {"torch", "transformers", "cyclopts"} & imports

    def test_help_keys_is_that_of_train(self, script: RunScript) -> None:
        assert "--optim.learning_rate\n" in script("mid_train", "--help-keys")[1]


class TestTheChain:
    def test_each_stage_starts_from_the_weights_of_the_one_before_and_resumes(
        self, script: RunScript, tmp_path: Path, text_file: Path, chat_file: Path, tokenizer_dir: Path
    ) -> None:
        """With learning rate 0 a run ends with the weights it started from."""
        always = ["--max-seq-len=64", "--observe.console=lines", "--system.device=cpu", "--system.threads=1"]

        def run(name: str, *args: object) -> str:
            code, out, err = script(name, *always, *args)
            assert (code, out) == (0, ""), err
            return err

        def weights(name: str, step: int) -> bytes:
            return (tmp_path / f"runs/{name}/checkpoints/step-{step:08d}/model.safetensors").read_bytes()

        # One process of its own shows that a script is an entry point; most of its time is importing torch.
        base = ["--depth=1", "--data", text_file, "--tokenizer", tokenizer_dir, "--num-iterations=2"]
        base += ["--total-batch-size=256"]
        command = [sys.executable, ROOT / "scripts/base_train.py", *always, *map(str, base)]
        process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert (process.returncode, process.stdout) == (0, ""), process.stderr
        assert "of 4 samples, micro-batches of 4 rows" in process.stderr
        assert "the run in runs/base-d1 is complete: step 2 of 2" in run("base_train", *base)

        mid = ["--data", text_file, "--device-batch-size=9"]
        log = run("mid_train", *mid, "--num-iterations=1", "--optim.learning_rate=0")
        assert "mid_train: starting from runs/base-d1, the newest base run" in log
        assert "warning: --device-batch-size 9 is more than the 8 rows" in log
        assert weights("mid-d1", 1) == weights("base-d1", 2)
        log = run("mid_train", *mid, "--num-iterations=2")
        assert "resuming from runs/mid-d1/checkpoints/step-00000001" in log
        assert weights("mid-d1", 2) != weights("base-d1", 2)

        log = run("chat_sft", "--data", chat_file, "--max-steps=1", "--optim.learning_rate=0", "--depth=1")
        assert "chat_sft: starting from runs/mid-d1, the mid run of depth 1" in log
        assert "of 32 samples, micro-batches of 4 rows" in log
        assert weights("sft-d1", 1) == weights("mid-d1", 2)

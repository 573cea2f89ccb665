"""The command line: fast help, exit codes, and errors that say what to type instead."""

from __future__ import annotations

import io
import json
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import flags, write_rows
from torchstone import __version__, api
from torchstone.atomic import lock_run_folder
from torchstone.config import load_config
from torchstone.config.output_dir import check_output_dir
from torchstone.errors import UsageError

Settings = Callable[..., dict[str, Any]]
Command = Callable[..., tuple[int, str, str]]


class TestHelp:
    def test_help_imports_nothing_slow(self) -> None:
        """That is what makes it answer at once."""
        command = [sys.executable, "-X", "importtime", "-m", "torchstone", "--help"]
        process = subprocess.run(command, capture_output=True, text=True)
        assert process.returncode == 0
        assert "train" in process.stdout
        imports = {line.rpartition("|")[2].strip().partition(".")[0] for line in process.stderr.splitlines()}
        assert "cyclopts" in imports
        assert not {"torch", "transformers", "numpy", "tokenizers", "pyarrow"} & imports

    @pytest.mark.parametrize("command", ["train", "prepare", "evaluate", "export", "chat", "generate"])
    def test_every_flag_has_help(self, torchstone: Command, command: str) -> None:
        code, out, _ = torchstone(command, "--help")
        assert code == 0
        for line in out.splitlines():
            if line.startswith("│ --") and "--help" not in line:
                assert len(line.strip("│ ").split("  ")) > 1, line

    def test_help_keys_lists_the_keys(self, torchstone: Command) -> None:
        code, out, _ = torchstone("train", "--help-keys")
        assert code == 0
        sentence = "Peak learning rate of AdamW; by default 2e-5 with model.path, and 2e-4 with LoRA. [default: 0.0003]"
        assert f"--optim.learning_rate\n      {sentence}" in out
        assert "--data.path" in out

    def test_help_keys_of_a_section(self, torchstone: Command) -> None:
        _, out, _ = torchstone("train", "--help-keys", "optim")
        flags = [line.strip() for line in out.splitlines() if line.startswith("  --")]
        assert len(flags) > 5
        assert all(flag.startswith("--optim.") for flag in flags)

    def test_version(self, torchstone: Command) -> None:
        assert torchstone("--version")[1].strip() == __version__


class TestWrongUsage:
    @pytest.mark.parametrize(
        ("args", "expected"),
        [
            ("train --preset debug --optim.learning_rat 1", "did you mean 'optim.learning_rate'?"),
            ("train --preset debug --training.max_steps none-at-all", "must be an integer"),
            ("train --preset debug --training.max_steps -3", "must be at least 1, not -3"),
            ("train --preset debug --data.path no.jsonl", "data file no.jsonl does not exist"),
            ("train --preset debug --model.path no-model", "no-model does not exist"),
            ("train --preset debug --model.tokenizer no-tok", "tokenizer folder no-tok does not exist"),
            ("train --preset debug --system.device cpu --data.path demo:corpse", "demo:corpus"),
            ("train missing.yaml", "config file missing.yaml does not exist"),
            ("diagnose no-folder", "no-folder does not exist\n"),
            ("launch run.yaml", "write torchstone launch slurm CONFIG or torchstone launch kubernetes CONFIG"),
            ("train --preset debug --system.device gpu", "did you mean 'cuda'?"),
            ("train --preset debug --tuning.method qlora", "--tuning.method lora --tuning.quantize_base nf4\n"),
            ("train --preset debug --training.max_tokens_per_gpu auto", "write --training.batch_size auto\n"),
            ("train --per_device_train_batch_size 4", "for packed conversations --training.max_tokens_per_gpu N"),
            ("train --preset debgu", "did you mean 'debug'?"),
            ("train --preset demo --debug", "--debug means --preset debug"),
            ("train", "--model.path FOLDER starts from a Hugging Face model"),
            ("tarin", 'did you mean "train"?'),
            ("train --max-step 3", "did you mean --max-steps?"),
            ("evaluate x --data y --optim.eps 1", "Unknown option: --optim.eps"),
            ("evaluate x --data y --questions -1", "Must be >= 0"),
            ("doctor --limit inf", "Must be <= 100000000.0"),
            ("generate x y --seed 99999999999999999999", "must be at least 0 and less than 2^63"),
            ("tokenizer train x --data y --min-frequency 99999999999999999999", "Must be < 9223372036854775808"),
            ("train --preset debug --learning-rate 1", "in Torchstone this is --optim.learning_rate\n"),
            ("train --lr 1", "in Torchstone this is --optim.learning_rate\n"),
            ("train --model X", "in Torchstone this is --model.path\n"),
            ("train --epochs 3", "in Torchstone this is --training.max_epochs\n"),
            ("train --gradient_checkpointing true", "in Torchstone this is --model.recompute full\n"),
            ("train --gradient_checkpointing=False", "in Torchstone this is --model.recompute none\n"),
            ("train --train_on_inputs false", "in Torchstone this is --data.train_on assistant\n"),
            ("train --batch-size 8", "--training.global_batch_size N is samples per step, --training.batch_size N is"),
            ("inspect-data --quux 2", "see: torchstone inspect-data --help"),
            ("plan --preset demo --debug", "--debug means --preset debug"),
            ("train --report_to wandb", "metrics.jsonl in the run's folder has every step"),
            ("train --training.num_train_epochs 3", "in Torchstone this is --training.max_epochs\n"),
            (
                "train --optim.learning-rate 1 --lr 2",
                "leave it out: in Torchstone this is --optim.learning_rate, which",
            ),
            ("train --nnodes 1 --nnodez 2", "Unknown option: --nnodez.\n  see: torchstone train --help"),
            ("sft rows.jsonl", "export, ...\n  see: torchstone --help"),
            ("tokenizer train", "FOLDER requires an argument.\n  see: torchstone tokenizer train --help"),
            ("train --help-keys optimizer", "the sections are model, data,"),
            ("train --preset debug --data.path", "--data.path needs a value"),
            ("train --preset debug --output-dir=", "output_dir is empty"),
            ("train --preset debug --model.path=", "model.path is empty"),
            ("train --preset debug --max-steps 3 --training.max_steps 4", "are the same setting"),
            ("train --preset debug --optim.lr 1 --optim.learning_rate 2", "are the same setting"),
            ("train --preset debug --optim.eps 1 --optim.eps=1", "--optim.eps is given twice"),
            ("train --preset debug --optim.max-grad-norm 1 --optim.max_grad_norm 2", "is given twice"),
            ("train --preset debug --data.shuffle --no-data.shuffle", "--data.shuffle is given twice"),
            (
                "inspect-data --data.path a --data.path b",
                "--data.path is given twice\n  leave out one; a list has commas",
            ),
            ("chat x --model.attention sdpa --model.attention eager", "--model.attention is given twice"),
            ("train --preset debug --training.seed 99999999999999999999", "must be less than 2^63, not 9999999999"),
            ("evaluate nowhere --data demo:heldout", "nowhere does not exist"),
            ("export nowhere there", "nowhere does not exist"),
            ("export nowhere there --dtype int8", 'Choose from: "auto", "float32"'),
            ("chat nowhere", "nowhere does not exist"),
            ("train --preset debug --output-dir a-file", "output_dir a-file is a file\n  choose another --output-dir"),
            ("train --preset debug --output-dir /proc/a/b", "output_dir /proc/a/b cannot be created: No such file"),
            ("train --preset debug --model.path a-file", "model folder a-file is a file"),
            ("evaluate tok --data demo:heldout", "tok has a tokenizer, but no model (no config.json)"),
            ("train --preset debug --data.cache_dir a-file", "a-file"),
        ],
    )
    def test_it_exits_with_2_and_says_what_to_type(
        self, torchstone: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: str, expected: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "a-file").write_text("")
        (tmp_path / "tok").mkdir()
        (tmp_path / "tok/tokenizer.json").write_text("{}")
        code, out, err = torchstone(*args.split())
        assert code == 2, err
        assert expected in err
        assert "Traceback" not in err
        assert out == ""

    def test_a_damaged_model_exits_with_6(self, torchstone: Command, llama_dir: Path, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        shutil.copytree(llama_dir, folder)
        (folder / "model.safetensors").write_bytes(b"not weights")
        code, _, err = torchstone("export", folder, tmp_path / "out")
        assert code == 6
        assert "model.safetensors: damaged" in err

    def test_a_full_disk_exits_with_6(
        self, torchstone: Command, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*args: Any, **options: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("torchstone.checkpoint.save.write_tensors", fail)
        overrides = settings()
        code, _, err = torchstone("train", *flags(overrides))
        assert code == 6
        assert "No space left on device" in err
        assert list((Path(overrides["output_dir"]) / "checkpoints").iterdir()) == []

    def test_a_gradient_that_is_not_finite_exits_with_5(self, torchstone: Command, settings: Settings) -> None:
        overrides = settings(optim__learning_rate=1e30, optim__max_grad_norm=0, training__max_steps=30)
        code, _, err = torchstone("train", *flags(overrides))
        assert code == 5
        assert "its update was not applied" in err
        assert "the last updates blew up the weights: lower --optim.learning_rate" in err
        assert not any(useless in err for useless in ("debug.on_nan", "training.precision"))


class TestCommands:
    def test_print_config_prints_the_config_and_runs_nothing(self, torchstone: Command, settings: Settings) -> None:
        overrides = settings()
        del overrides["training.max_steps"]
        code, out, _ = torchstone("train", *flags(overrides), "--max-steps", "3e0", "--print-config")
        config = json.loads(out)
        assert code == 0
        assert config["training"]["max_steps"] == 3
        assert config["optim"]["betas"] == [0.9, 0.95]
        assert "preset_batch_keys" not in config
        assert not Path(overrides["output_dir"]).exists()

    @pytest.mark.parametrize("command", ["plan", "prepare", "inspect-data", "diagnose"])
    def test_commands_for_the_config_of_a_run_take_its_flags(
        self, torchstone: Command, settings: Settings, command: str
    ) -> None:
        overrides = {key: value for key, value in settings().items() if key != "training.max_steps"}
        given = ["--debug", "--max-steps", "7", "--no-auto-batch-size", "--json"]
        given += ["--only", "finite"] if command == "diagnose" else []
        code, out, err = torchstone(command, *flags(overrides), *given)
        assert code == 0, err
        assert command != "plan" or json.loads(out)["length"]["steps"] == 7
        assert not Path(overrides["output_dir"]).exists()

    @pytest.mark.parametrize("preset", [(), ("--preset", "production")])
    def test_the_output_of_print_config_can_be_run(
        self, torchstone: Command, settings: Settings, tmp_path: Path, preset: tuple[str, ...]
    ) -> None:
        _, out, _ = torchstone("train", *preset, *flags(settings()), "--print-config")
        (tmp_path / "printed.json").write_text(out)
        assert torchstone("train", tmp_path / "printed.json", "--print-config")[1] == out

    def test_train_evaluate_export_chat(
        self, torchstone: Command, settings: Settings, chat_file: Path, tmp_path: Path
    ) -> None:
        overrides = settings(data__path=chat_file, data__context_length=64)
        run, cache = overrides["output_dir"], overrides["data.cache_dir"]
        code, out, err = torchstone("train", *flags(overrides))
        assert (code, out) == (0, "")
        assert "done: step 6" in err

        code, out, err = torchstone("evaluate", run, "--data", chat_file, "--cache-dir", cache, "--json")
        assert err == ""
        results = json.loads(out)
        assert code == 0
        assert 0 < results["loss"] < 20
        assert (results["questions"], results["dropped_rows"]) == (30, 0)
        short = ["--context-length", 16]
        code, out, err = torchstone("evaluate", run, "--data", chat_file, "--cache-dir", cache, "--json", *short)
        assert 0 < json.loads(out)["dropped_rows"] == 30 - json.loads(out)["samples"]
        assert "rows are longer than data.context_length and dropped" in err

        code, out, _ = torchstone("export", run, tmp_path / "hf", "--json")
        assert code == 0
        assert json.loads(out)["max_logit_difference"] <= 1e-5

        code, out, _ = torchstone("chat", tmp_path / "hf", "--prompt", "Reverse KATO.", "--max-new-tokens", 4)
        assert code == 0
        assert out.endswith("\n")
        assert torchstone("chat", tmp_path / "hf", "--prompt", "--what.is this", "--max-new-tokens", 2)[0] == 0

    def test_chat_reads_lines_until_an_empty_one(
        self, torchstone: Command, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("Reverse KATO.\n/new\nHow long is KATO?\n\nnever read\n"))
        code, out, err = torchstone("chat", llama_dir, "--max-new-tokens", 3)
        assert code == 0
        assert out.count("\n") == 2
        assert "> " not in err

    def test_train_reports_what_a_setting_does_or_does_not_do(
        self, torchstone: Command, settings: Settings, chat_file: Path, text_file: Path
    ) -> None:
        text = settings(data__on_long_row="drop", training__max_steps=1, observe__console="lines")
        _, _, err = torchstone("train", *flags(text))
        assert "data.on_long_row drop has no effect on packed text" in err
        mixed = settings(
            data__path=f"{chat_file},{text_file}", data__weights="3,1", data__chat_template="chatml",
            data__context_length=128, training__max_steps=2, observe__console="lines",
        )  # fmt: skip
        code, _, err = torchstone("train", *flags(mixed | {"output_dir": mixed["output_dir"] + "-mixed"}))
        assert code == 0
        assert "the chat template writes <|im_start|>, which is not a single token of" in err
        assert "chat.jsonl: 75.0 % of the samples, each seen 0.20 times" in err

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ('{"text": "a"}\n{"text": \n', "rows.jsonl:2: not JSON"),
            ('{"input_ids": [1, 2], "labels": [-100, -100]}\n', "none of its 1 rows has a token to train on"),
            ("", "rows.jsonl: the data is empty"),
        ],
    )
    def test_bad_data_exits_with_3_and_can_be_inspected(
        self, torchstone: Command, settings: Settings, tmp_path: Path, content: str, message: str
    ) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_text(content)
        code, _, err = torchstone("train", *flags(settings(data__path=str(path))))
        assert (code, message in err) == (3, True), err
        tokenizer = settings()["model.tokenizer"]
        code, out, _ = torchstone("inspect-data", "--model.tokenizer", tokenizer, "--data.path", str(path), "--json")
        assert code == (0 if content else 3)
        if content:
            (source,) = json.loads(out)["sources"]
            assert source["rows"] >= 1
            assert (source["refused"] is not None) == ("none of its" in message)

    def test_skipped_rows_are_counted_and_listed(self, torchstone: Command, settings: Settings, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_text('{"text": "some words to learn, and more of them"}\n{"text": \n' * 8)
        overrides = settings(
            data__path=str(path), data__on_bad_row="skip", training__max_steps=1, observe__console="lines"
        )
        code, _, err = torchstone("train", *flags(overrides))
        assert code == 0
        assert "8 of 16 rows are bad" in err
        (line,) = (Path(overrides["output_dir"]) / "metrics.jsonl").read_text().splitlines()
        assert (json.loads(line)["bad_rows"], json.loads(line)["dropped_rows"]) == (8, 8)

    def test_characters_that_the_terminal_cannot_encode_are_escaped(
        self, torchstone: Command, chat_file: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", stdout)
        args = ["--model.tokenizer", tokenizer_dir, "--data.path", chat_file, "--rows", 1]
        code, _, err = torchstone("inspect-data", *args)
        assert code == 0, err
        stdout.flush()
        assert b"\\u27e6" in stdout.buffer.getvalue()

    def test_prepare_builds_the_cache_that_train_uses(
        self, torchstone: Command, settings: Settings, tmp_path: Path
    ) -> None:
        overrides = settings(data__cache_dir=tmp_path / "cache", observe__console="lines")
        code, out, err = torchstone("prepare", *flags(overrides)[:-1], "--json")
        assert code == 0
        assert "tokenizing" in err
        assert json.loads(out)["formats"] == ["text"]
        code, _, err = torchstone("train", *flags(overrides))
        assert code == 0
        assert "using the token cache" in err
        assert "tokenizing" not in err


def snapshot(folder: Path) -> dict[str, Any]:
    """The contents and times of everything in a folder."""
    paths = [folder, *folder.rglob("*")]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None) for path in paths}


def test_a_launch_into_the_folder_of_another_one_is_refused_before_anything_is_written(
    torchstone: Command, settings: Settings
) -> None:
    overrides = settings()
    folder = Path(overrides["output_dir"])
    (folder / "logs").mkdir(parents=True)
    with lock_run_folder(folder):
        before = snapshot(folder)
        code, _, err = torchstone("train", *flags(overrides), "--nproc", 2)
        assert (code, snapshot(folder) == before) == (2, True), err
        assert err == f"error: another process is training in {folder}\n  choose another --output-dir\n"


class TestOutputDirOfSomethingElse:
    @pytest.mark.parametrize("launch_flags", [[], ["--nproc", 2]])
    def test_the_model_folder_of_the_run_is_refused(
        self, torchstone: Command, settings: Settings, llama_dir: Path, tmp_path: Path, launch_flags: list[Any]
    ) -> None:
        folder = shutil.copytree(llama_dir, tmp_path / "model")
        overrides = settings(model__path=folder, output_dir=folder)
        for key in ("depth", "width", "heads"):
            del overrides[f"model.{key}"]
        before = snapshot(folder)
        code, _, err = torchstone("train", *flags(overrides), *launch_flags)
        assert (code, snapshot(folder) == before) == (2, True), err
        assert err == (
            f"error: output_dir {folder} is the folder of model.path: a run would write its files there\n"
            "  choose another folder, such as --output-dir runs/model\n"
        )

    @pytest.mark.parametrize("file", ["config.json", "metrics.jsonl"])
    def test_a_folder_with_such_a_file_of_another_project_is_refused(
        self, torchstone: Command, settings: Settings, tmp_path: Path, file: str
    ) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / file).write_text('{"model": {}, "training": {"lr": 1}}\n')
        code, _, err = torchstone("train", *flags(settings()))
        assert (code, [path.name for path in (tmp_path / "run").iterdir()]) == (2, [file])
        assert f"has a {file} that is not from a run: training would overwrite it" in err

    def test_the_folders_of_tokenizer_and_data_are_refused_and_those_of_runs_are_not(
        self, settings: Settings, tokenizer_dir: Path, text_file: Path, base_run: Path, tmp_path: Path
    ) -> None:
        data = text_file.parent
        keys: dict[str, dict[str, Any]] = {
            "model.tokenizer": {"output_dir": tokenizer_dir},
            "data.path": {"output_dir": data, "data__path": data},
            "data.validation_path": {"output_dir": data, "data__validation_path": f"a=demo:heldout,b={data}"},
        }
        for key, changes in keys.items():
            with pytest.raises(UsageError, match=f"is the folder of {key}:"):
                check_output_dir(load_config(overrides=settings(**changes)))
        (tmp_path / "run").mkdir()
        (tmp_path / "run/slurm-17.out").write_text("")
        check_output_dir(load_config(overrides=settings()))
        check_output_dir(load_config(overrides=settings(output_dir=base_run.parent.parent)))


def test_workers_import_nothing_from_the_current_folder(tmp_path: Path) -> None:
    """It may be a stranger's."""
    (tmp_path / "yaml.py").write_text("open('executed', 'w')")
    command = [sys.executable, "-P", "-m", "torchstone", "train", "--preset", "debug", "--data.path", "no.jsonl"]
    result = subprocess.run(
        [*command, "--system.device", "cpu", "--nproc", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, "data file no.jsonl does not exist" in result.stderr) == (2, True), result.stderr
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "args",
    [
        ("launch", "slurm", "run.yaml", "--output", "run.yaml"),
        ("prepare", "run.yaml", "--pin", "run.yaml"),
        ("inspect-data", "run.yaml", "--html", "rows.jsonl"),
        ("prepare", "run.yaml", "--data.validation_path", "a=demo:heldout,b=more.jsonl", "--pin", "more.jsonl"),
    ],
)
def test_a_command_does_not_overwrite_its_input(
    torchstone: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("data: {path: rows.jsonl}\nmodel: {depth: 2, tokenizer: 'demo:tokenizer'}\n")
    for name in ("rows.jsonl", "more.jsonl"):
        write_rows(tmp_path / name, [{"text": "a b c d e f"}])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    code, _, err = torchstone(*args)
    assert (code, "is an input of this command" in err) == (2, True), err
    assert {path: path.read_bytes() for path in before} == before


def test_a_tilde_is_the_home_folder_in_a_path(
    torchstone: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.yaml").write_text("data: {path: rows.jsonl}\nmodel: {depth: 2, tokenizer: 'demo:tokenizer'}\n")
    code, _, err = torchstone("launch", "slurm", "~/run.yaml", "--output=~/job.sbatch")
    assert (code, (tmp_path / "job.sbatch").is_file()) == (0, True), err
    for command in (("evaluate", "~/m", "--data", "d"), ("export", "~/m", "out"), ("chat", "~/m"), ("generate", "~/m")):
        _, _, err = torchstone(*command)
        assert f"model folder {tmp_path}/m does not exist" in err
    with pytest.raises(UsageError, match=f"data file {tmp_path}/d.jsonl does not exist"):
        api.train_tokenizer("~/d.jsonl", tmp_path / "tokenizer")


def test_spaces_after_commas_are_no_part_of_names(torchstone: Command, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "a b c d e f"}])
    args = ("--data", f"{rows}, {rows}", "--special", "<s>, <x>", "--vocab-size", "300", "--json")
    code, out, err = torchstone("tokenizer", "train", tmp_path / "tokenizer", *args)
    assert code == 0, err
    assert {"<s>", "<x>"} < json.loads(out)["measured"]["special_tokens"].keys()


@pytest.mark.parametrize("args", [("evaluate", "m", "--data", "d", "--questions", "2.7"), ("doctor", "--nproc", "1.5")])
def test_a_fraction_is_no_integer(torchstone: Command, args: tuple[str, ...]) -> None:
    code, _, err = torchstone(*args)
    assert (code, "is not an integer" in err) == (2, True), err


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_RANK"])
def test_a_variable_that_is_no_number_is_named(
    torchstone: Command, settings: Settings, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "")
    code, _, err = torchstone("train", *flags(settings(system__device="auto")))
    assert (code, f"{name} is '', not a number" in err) == (2, True), err


@pytest.mark.parametrize(
    ("closed", "command", "code"),
    [
        (">&-", "-m torchstone train --help", 0),
        ("2>&-", "-m torchstone train --preset demo --optim.nothing 1", 2),
        ("<&- >&- 2>&-", "scripts/base_train.py --help", 0),
    ],
)
def test_streams_that_were_never_open_do_not_change_the_exit_code(closed: str, command: str, code: int) -> None:
    command = f"{sys.executable} {command} {closed}"
    root = Path(__file__).parents[1]
    result = subprocess.run(["sh", "-c", command], cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, "Traceback" in result.stderr) == (code, False), result.stderr


def raise_os_error() -> object:
    return mmap.mmap(-1, 1 << 60)


def raise_memory_error() -> object:
    return bytearray(1 << 62)


def raise_runtime_error() -> object:
    return torch.empty(1 << 60)


@pytest.mark.parametrize("allocate", [raise_os_error, raise_memory_error, raise_runtime_error])
def test_memory_that_the_machine_does_not_have_is_exit_code_4(
    torchstone: Command, settings: Settings, monkeypatch: pytest.MonkeyPatch, allocate: Callable[[], object]
) -> None:
    monkeypatch.setattr(api, "prepare_with_config", lambda config: allocate())
    code, _, err = torchstone("prepare", *flags(settings())[:-1])
    assert code == 4
    assert err.startswith("error: the machine is out of memory: ")
    assert "data.prepare_workers" in err


@pytest.mark.parametrize(
    ("command", "stream", "code"),
    [
        ("-m torchstone train --optim.nothing 1", "stderr", 2),
        ("scripts/base_train.py --depth", "stderr", 2),
        ("-m torchstone train --preset demo --print-config", "stdout", 141),
        ("-m torchstone train --help", "stdout", 141),
    ],
    ids=["command", "script", "output", "help"],
)
def test_a_closed_pipe_does_not_change_the_exit_code(command: str, stream: str, code: int) -> None:
    """Otherwise Python tries to write its buffer again when it exits, and exits with 120."""
    read, write = os.pipe()
    os.close(read)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    root = Path(__file__).parents[1]
    process = subprocess.Popen([sys.executable, *command.split()], cwd=root, env=buffered, **{stream: write})
    os.close(write)
    assert process.wait(60) == code

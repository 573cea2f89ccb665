"""The command line as a newcomer meets it: fast help, exit codes, messages that say what to type instead."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchstone import __version__, cli

Settings = Callable[..., dict[str, Any]]


def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `torchstone WORDS`, in this process."""
    monkeypatch.setattr(sys, "argv", ["torchstone", *(str(word) for word in words)])
    code = 0
    try:
        cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def torchstone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    return lambda *words: called(monkeypatch, capsys, *words)


def flags(overrides: dict[str, Any]) -> list[str]:
    return [f"--{key}={value}" for key, value in overrides.items() if key != "output_dir"] + [
        "--output-dir", overrides["output_dir"],
    ]  # fmt: skip


class TestHelp:
    def test_help_answers_in_under_half_a_second(self) -> None:
        """In seconds of the processor, which other work on the machine does not change; the first start compiles."""
        seconds = []
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run([sys.executable, "-m", "torchstone.cli", "--help"], capture_output=True, text=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            assert done.returncode == 0
            assert "train" in done.stdout
        assert min(seconds) < 0.5, seconds

    def test_help_does_not_import_torch(self) -> None:
        code = "import sys, torchstone.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0

    @pytest.mark.parametrize("command", ["train", "prepare", "evaluate", "export", "chat"])
    def test_every_command_has_help_for_every_flag(self, torchstone: Callable, command: str) -> None:
        code, out, _ = torchstone(command, "--help")
        assert code == 0
        for line in out.splitlines():
            if line.startswith("│ --") and "--help" not in line:
                assert len(line.strip("│ ").split("  ")) > 1, line

    def test_every_key_is_listed(self, torchstone: Callable) -> None:
        code, out, _ = torchstone("train", "--help-keys")
        assert code == 0
        assert "--optim.learning_rate\n      Peak learning rate of AdamW. [default: 0.0003]" in out

    def test_version(self, torchstone: Callable) -> None:
        assert torchstone("--version")[1].strip() == __version__


class TestWrongUsage:
    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (["train", "--preset", "debug", "--optim.learning_rat", "1"], "did you mean 'optim.learning_rate'?"),
            (["train", "--preset", "debug", "--training.max_steps", "none-at-all"], "must be a whole number"),
            (["train", "--preset", "debug", "--training.max_steps", "-3"], "must be at least 1, not -3"),
            (["train", "--preset", "debug", "--data.path", "no.jsonl"], "data file no.jsonl does not exist"),
            (["train", "--preset", "debug", "--model.path", "no-model"], "no-model does not exist"),
            (["train", "--preset", "debug", "--model.tokenizer", "no-tok"], "tokenizer folder no-tok does not exist"),
            (["train", "--preset", "debug", "--system.device", "cpu", "--data.path", "demo:corpse"], "demo:corpus"),
            (["train", "missing.yaml"], "missing.yaml: no such config file"),
            (["train", "--preset", "debgu"], "did you mean 'debug'?"),
            (["train", "--preset", "demo", "--debug"], "--debug is --preset debug"),
            (["train"], "--model.path FOLDER starts from a Hugging Face model"),
            (["tarin"], 'Did you mean "train"?'),
            (["train", "--max-step", "3"], "Did you mean --max-steps?"),
            (["evaluate", "x", "--data", "y", "--optim.eps", "1"], "Unknown option: --optim.eps"),
            (["evaluate", "x", "--data", "y", "--questions", "-1"], "Must be >= 0"),
            (["train", "--preset", "debug", "--learning-rate", "1"], "did you mean --optim.learning_rate?"),
            (["train", "--preset", "debug", "--data.path"], "--data.path needs a value"),
            (["train", "--preset", "debug", "--output-dir", ""], "output_dir is empty"),
            (["train", "--preset", "debug", "--max-steps", "3", "--training.max_steps", "4"], "are one setting"),
            (["train", "--preset", "debug", "--training.seed", "99999999999999999999"], "less than 9.22"),
            (["evaluate", "nowhere", "--data", "demo:heldout"], "nowhere does not exist"),
            (["export", "nowhere", "there"], "nowhere does not exist"),
            (["export", "nowhere", "there", "--dtype", "int8"], 'Choose from: "auto", "float32"'),
            (["chat", "nowhere"], "nowhere does not exist"),
            (["train", "--preset", "debug", "--output-dir", "a-file"], "a-file: File exists"),
            (["train", "--preset", "debug", "--data.cache_dir", "a-file"], "a-file"),
            (["export", "nowhere", "a-file"], "does not exist"),
        ],
    )
    def test_it_ends_with_two_and_says_what_to_type(
        self, torchstone: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], expected: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "a-file").write_text("")
        code, out, err = torchstone(*words)
        assert code == 2, err
        assert expected in err
        assert "Traceback" not in err
        assert out == ""

    def test_bad_data_ends_with_three(self, torchstone: Callable, settings: Settings, tmp_path: Path) -> None:
        path = tmp_path / "bad.jsonl"
        path.write_text('{"text": "fine"}\n{"text": broken}\n')
        code, _, err = torchstone("train", *flags(settings(data__path=path)))
        assert code == 3
        assert f"{path}:2: not JSON" in err

    def test_a_damaged_model_ends_with_six(self, torchstone: Callable, llama_dir: Path, tmp_path: Path) -> None:
        import shutil

        folder = tmp_path / "model"
        shutil.copytree(llama_dir, folder)
        (folder / "model.safetensors").write_bytes(b"not weights")
        code, _, err = torchstone("export", folder, tmp_path / "out")
        assert code == 6
        assert "model.safetensors: damaged" in err

    def test_a_full_disk_ends_with_six(
        self, torchstone: Callable, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*arguments: Any, **more: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("torchstone.checkpoint.save.save_file", full)
        overrides = settings()
        code, _, err = torchstone("train", *flags(overrides))
        assert code == 6
        assert "No space left on device" in err
        assert list((Path(overrides["output_dir"]) / "checkpoints").iterdir()) == []

    def test_numbers_that_go_wrong_end_with_five(self, torchstone: Callable, settings: Settings) -> None:
        overrides = settings(optim__learning_rate=1e30, optim__max_grad_norm=0, training__max_steps=30)
        code, _, err = torchstone("train", *flags(overrides))
        assert code == 5
        assert "stopped before they reached the weights" in err


class TestCommands:
    def test_print_config_shows_what_would_run_and_runs_nothing(self, torchstone: Callable, settings: Settings) -> None:
        overrides = settings()
        del overrides["training.max_steps"]
        code, out, _ = torchstone("train", *flags(overrides), "--max-steps", "3e0", "--print-config")
        shown = json.loads(out)
        assert code == 0
        assert shown["training"]["max_steps"] == 3
        assert shown["optim"]["betas"] == [0.9, 0.95]
        assert not Path(overrides["output_dir"]).exists()

    def test_what_print_config_shows_can_be_run(self, torchstone: Callable, settings: Settings, tmp_path: Path) -> None:
        _, out, _ = torchstone("train", *flags(settings()), "--print-config")
        (tmp_path / "shown.json").write_text(out)
        _, again, _ = torchstone("train", tmp_path / "shown.json", "--print-config")
        assert again == out

    def test_train_evaluate_export_chat(
        self, torchstone: Callable, settings: Settings, chat_file: Path, tmp_path: Path
    ) -> None:
        overrides = settings(data__path=chat_file, data__context_length=64)
        run, cache = overrides["output_dir"], overrides["data.cache_dir"]
        code, out, err = torchstone("train", *flags(overrides))
        assert (code, out) == (0, "")
        assert "done: step 6" in err

        code, out, err = torchstone("evaluate", run, "--data", chat_file, "--cache-dir", cache, "--json")
        assert err == ""
        found = json.loads(out)
        assert code == 0
        assert found["questions"] == 30
        assert found["loss"] > 0
        assert found["dropped_rows"] == 0
        short = ["--context-length", 16]
        code, out, err = torchstone("evaluate", run, "--data", chat_file, "--cache-dir", cache, "--json", *short)
        assert 0 < json.loads(out)["dropped_rows"] == 30 - json.loads(out)["samples"]
        assert "rows dropped, being longer than data.context_length" in err

        code, out, _ = torchstone("export", run, tmp_path / "hf", "--json")
        assert code == 0
        assert json.loads(out)["max_logit_difference"] <= 1e-5

        code, out, _ = torchstone("chat", tmp_path / "hf", "--prompt", "Reverse KATO.", "--max-new-tokens", 4)
        assert code == 0
        assert out.endswith("\n")
        assert torchstone("chat", tmp_path / "hf", "--prompt", "--what.is this", "--max-new-tokens", 2)[0] == 0

    def test_chat_reads_lines_until_an_empty_one(
        self, torchstone: Callable, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import io

        monkeypatch.setattr(sys, "stdin", io.StringIO("Reverse KATO.\n/new\nHow long is KATO?\n\nnever read\n"))
        code, out, err = torchstone("chat", llama_dir, "--max-new-tokens", 3)
        assert code == 0
        assert out.count("\n") == 2
        assert "> " not in err

    def test_what_a_setting_does_not_do_is_said(
        self, torchstone: Callable, settings: Settings, chat_file: Path, text_file: Path
    ) -> None:
        given = settings(data__on_long_row="drop", training__max_steps=1, observe__console="lines")
        _, _, err = torchstone("train", *flags(given))
        assert "data.on_long_row drop does not apply to it: packed text is one stream" in err
        mixed = settings(
            data__path=f"{chat_file},{text_file}", data__weights="3,1", data__chat_template="chatml",
            data__context_length=128, training__max_steps=2, observe__console="lines",
        )  # fmt: skip
        code, _, err = torchstone("train", *flags(mixed | {"output_dir": mixed["output_dir"] + "-mixed"}))
        assert code == 0
        assert "the chat template writes <|im_start|>, which is not one token of" in err
        assert "chat.jsonl: 75.0 % of the samples, each seen 0.20 times" in err

    @pytest.mark.parametrize(
        ("content", "code", "message"),
        [
            ('{"text": "a"}\n{"text": \n', 3, "rows.jsonl:2: not JSON"),
            ('{"input_ids": [1, 2], "labels": [-100, -100]}\n', 3, "none of its 1 rows has a token to train on"),
            ("", 3, "rows.jsonl: no rows"),
        ],
    )
    def test_bad_data_is_exit_code_3_and_can_be_looked_at(
        self, torchstone: Callable, settings: Settings, tmp_path: Path, content: str, code: int, message: str
    ) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_text(content)
        found, _, err = torchstone("train", *flags(settings(data__path=str(path))))
        assert (found, message in err) == (code, True)
        tokenizer = settings()["model.tokenizer"]
        looked, out, _ = torchstone("inspect-data", "--model.tokenizer", tokenizer, "--data.path", str(path), "--json")
        assert looked == (0 if content else 3)
        if content:
            (source,) = json.loads(out)["sources"]
            assert source["rows"] >= 1
            refused = [note for note in source["notes"] if "a run refuses this source" in note["why"]]
            assert bool(refused) == ("none of its" in message)

    def test_skipped_rows_are_counted_and_their_place_is_said(
        self, torchstone: Callable, settings: Settings, tmp_path: Path
    ) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_text('{"text": "some words to learn, and more of them"}\n{"text": \n' * 8)
        given = settings(data__path=str(path), data__on_bad_row="skip", training__max_steps=1, observe__console="lines")
        code, _, err = torchstone("train", *flags(given))
        assert code == 0
        assert "8 of 16 rows were bad and left out; they are in" in err
        (line,) = (Path(given["output_dir"]) / "metrics.jsonl").read_text().splitlines()
        assert (json.loads(line)["bad_rows"], json.loads(line)["dropped_rows"]) == (8, 8)

    def test_a_terminal_that_cannot_show_a_character_gets_its_number(self, tmp_path: Path) -> None:
        environment = os.environ | {"PYTHONIOENCODING": "ascii"}
        command = [sys.executable, "-m", "torchstone.cli", "inspect-data", "--model.tokenizer", "demo:tokenizer"]
        command += ["--data.path", "demo:heldout", "--rows", "1"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "\\u27e6" in done.stdout

    def test_prepare_builds_the_cache_that_train_uses(
        self, torchstone: Callable, settings: Settings, tmp_path: Path
    ) -> None:
        overrides = settings(data__cache_dir=tmp_path / "cache", observe__console="lines")
        words = [word for word in flags(overrides) if not word.startswith("--output-dir")][:-1]
        code, out, err = torchstone("prepare", *words, "--json")
        assert code == 0
        assert "tokenizing" in err
        assert json.loads(out)["shapes"] == ["text"]
        code, _, err = torchstone("train", *flags(overrides))
        assert code == 0
        assert "using the tokenized" in err
        assert "tokenizing" not in err

"""Untrusted text never controls a terminal: escapes, faked lines, and what a pipe gets."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tiny import flags, make_scripted_llama, write_rows
from torchstone import heartbeat
from torchstone.data.tokenize import Tokenizer
from torchstone.observe.console import Console
from torchstone.terminal import escape_controls, escape_message

Settings = Callable[..., dict[str, Any]]
Command = Callable[..., tuple[int, str, str]]
CLEAR, TITLE, RTL, C1 = "\x1b[2J", "\x1b]0;evil\x07", "\u202e", "\x9b2J"
ATTACK = f"{CLEAR}{TITLE}{RTL}{C1}\r\x7f"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def is_safe(text: str) -> bool:
    return not any(character in text for character in "\x1b\x07\x9b\u202e\r\x7f")


def test_controls_are_escaped_and_other_text_is_not() -> None:
    assert escape_controls(ATTACK) == r"\x1b[2J\x1b]0;evil\x07\u202e\x9b2J\r\x7f"
    assert escape_controls("\u2028\u2066") == r"\u2028\u2066"
    # An emoji joined by U+200D, Persian with U+200C, accents, tabs, newlines.
    text = "👩\u200d🚀 می\u200cخواهم é 日本\tx\ny"
    assert escape_controls(text) == text


def test_a_newline_in_a_name_cannot_fake_a_line() -> None:
    assert escape_message("error: a\nStep [9/9]\n  hint\n") == "error: a\n  Step [9/9]\n  hint\n"
    assert escape_message("a\n [12:00] x\n\ty\n\nz") == "a\n   [12:00] x\n  \ty\n\n  z"


def test_the_console_escapes_what_it_prints_and_logs() -> None:
    terminal, log = io.StringIO(), io.StringIO()
    console = Console("lines", terminal=terminal, log_opener=lambda: log, label=0)
    console.open_log()
    console.info(f"tokenizing {ATTACK}.jsonl\nGPU0:INFO | saved")
    console.warn(ATTACK)
    for text in (terminal.getvalue(), log.getvalue()):
        assert is_safe(text)
        assert text.splitlines()[1] == "GPU0:INFO |   GPU0:INFO | saved"


def test_the_progress_bar_escapes_its_texts_and_takes_braces_and_brackets_as_they_are() -> None:
    terminal = io.StringIO()
    title = f"{{x}} [red] {ATTACK}"
    with Console("bar", terminal=terminal).progress(title, 100) as update:
        update(50, f"[bold] {ATTACK}")
    text = terminal.getvalue()
    assert r"{x} [red] \x1b[2J" in text
    assert "[bold] \\x1b[2J" in text
    assert is_safe(text)


def test_lines_for_the_user_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    heartbeat.print_line(f"error: rank 1 failed first: {ATTACK}\nnot a line")
    assert capsys.readouterr().err == (
        r"error: rank 1 failed first: \x1b[2J\x1b]0;evil\x07\u202e\x9b2J\r\x7f" + "\n  not a line\n"
    )


class TestCommands:
    @pytest.mark.parametrize(
        "row",
        [
            {f"te{ATTACK}xt": "a"},
            {"messages": [{"role": f"as{ATTACK}", "content": "a"}]},
            {"conversations": [{"from": ATTACK, "value": "x"}]},
            f'{{"text": "{ATTACK}',
        ],
    )
    def test_a_row_cannot_control_the_terminal(
        self, torchstone: Command, settings: Settings, tmp_path: Path, row: dict[str, Any] | str
    ) -> None:
        """Nor can the name of its file."""
        path = tmp_path / f"rows{ATTACK}\nGPU0:INFO.jsonl"
        path.write_text((row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + "\n")
        overrides = settings(data__path=str(path), observe__console="lines")
        code, out, err = torchstone("train", *flags(overrides))
        log = (Path(overrides["output_dir"]) / "logs/rank-0.log").read_text()
        assert code == 3, err
        for text in (out, err, log):
            assert is_safe(text)
        assert "\nGPU0:INFO.jsonl" not in err + log
        assert r"rows\x1b[2J" in err

    def test_a_template_error_cannot_control_the_terminal(
        self, torchstone: Command, settings: Settings, chat_file: Path, tmp_path: Path
    ) -> None:
        template = tmp_path / "evil.jinja"
        template.write_text(f"{{{{ raise_exception('{ATTACK}') }}}}")
        code, _, err = torchstone("train", *flags(settings(data__path=chat_file, data__chat_template=str(template))))
        assert code in (2, 3)
        assert is_safe(err)
        assert r"\x1b[2J" in err

    def test_a_tensor_name_cannot_control_the_terminal(
        self, torchstone: Command, llama_dir: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "model"
        shutil.copytree(llama_dir, folder)
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {f"evil{ATTACK}": tensors["model.norm.weight"].clone()}, folder / "model.safetensors")
        code, out, err = torchstone("export", folder, tmp_path / "out")
        assert code != 0
        assert is_safe(out + err)
        assert r"evil\x1b[2J" in err

    def test_an_answer_is_escaped_on_a_terminal_and_exact_in_a_pipe(
        self, torchstone: Command, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answer = f"{CLEAR}ok\x9b"
        chain = [*tokenizer.encode("<|assistant|>"), *tokenizer.encode(answer), tokenizer.hf.eos_token_id]
        folder = make_scripted_llama(tmp_path / "model", tokenizer, chain)
        assert torchstone("chat", folder, "--prompt", "hi")[1] == f"{answer}\n"
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        torchstone("chat", folder, "--prompt", "hi")
        assert terminal.getvalue() == r"\x1b[2Jok\x9b" + "\n"

    def test_examples_of_evaluate_are_escaped(self, torchstone: Command, llama_dir: Path, tmp_path: Path) -> None:
        messages = [{"role": "user", "content": f"{ATTACK}\nfake"}, {"role": "assistant", "content": ATTACK}]
        data = write_rows(tmp_path / "rows.jsonl", [{"messages": messages}])
        code, out, err = torchstone("evaluate", llama_dir, "--data", data, "--cache-dir", tmp_path)
        assert code == 0, err
        assert is_safe(out + err)
        assert "\nfake" not in out
        assert r"\x1b[2J" in out

"""What people see of a run: lines and their prefix, the progress bar, the log of a rank, the ETA."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import pytest

from torchstone.observe import console as console_module
from torchstone.observe.console import Console, bar_text, format_time, step_line
from torchstone.observe.eta import EtaEstimator

METRICS = {"step": 3, "loss": 12.234, "lr": 1e-5, "grad_norm": 2.75649, "tok_s": 17023.6, "epoch": 0.25,
           "memory": 3 << 29}  # fmt: skip
LINE = "Step [3/100] | Loss: 12.2340 | LR: 1.00e-05 | Grad Norm: 2.7565 | ETA: 5:30 | Tok/s: 17,024 | Memory: 1.5 GiB"


def open_console(style: str, terminal: TextIO | None, log: TextIO, **options: Any) -> Console:
    """A console whose log is open."""
    console = Console(style, terminal=terminal, log_opener=lambda: log, **options)
    console.open_log()
    return console


def output_of(use: Callable[[Console], object], style: str = "lines", **options: Any) -> tuple[str, str]:
    """What `use` writes to a terminal that is a file, and to the log."""
    terminal, log = io.StringIO(), io.StringIO()
    use(open_console(style, terminal, log, **options))
    return terminal.getvalue(), log.getvalue()


def ten_steps(console: Console) -> None:
    console.begin(10, 0)
    for step in range(1, 11):
        console.step(METRICS | {"step": step}, 10.0 - step)
    console.end()


class TestText:
    def test_a_step_is_one_line(self) -> None:
        assert step_line(METRICS, 100, "5:30") == LINE
        assert step_line(METRICS | {"val_loss": 5.82432}, 100, "5:30") == f"{LINE} | Validation loss: 5.8243"
        sets = {"val_loss": 5.82432, "val_loss/new": 5.82432, "val_loss/old": 6.1582}
        expected = f"{LINE} | Validation loss: new 5.8243, old 6.1582"
        assert step_line(METRICS | sets, 100, "5:30") == expected
        with_mfu = LINE.replace("17,024", "17,024 | MFU: 41.3 %")
        assert step_line(METRICS | {"mfu": 0.41256}, 100, "5:30") == with_mfu

    def test_the_bar_has_a_short_form(self) -> None:
        first = "3/100  loss 12.2340  norm 2.76  17,024 tok/s  ETA 5:30"
        second = "epoch 0.25  lr 1.00e-05  1.5 GiB"
        assert bar_text(METRICS, 100, "5:30", None) == f"{first}\n{second}"
        assert bar_text(METRICS, 100, "5:30", "5.8243") == f"{first}\n{second}  val loss 5.8243"
        names = "new 5.8243, old 6.1582"
        assert bar_text(METRICS, 100, "5:30", names) == f"{first}\n{second}\nval loss {names}"
        assert bar_text(METRICS | {"mfu": 0.41256}, 100, "5:30", None) == f"{first}\n{second}  MFU 41.3 %"

    @pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (65, "1:05"), (3725, "1:02:05")])
    def test_format_time(self, seconds: float, text: str) -> None:
        assert format_time(seconds) == text


class TestPrefix:
    def test_every_line_has_the_prefix_of_its_rank(self) -> None:
        def use(console: Console) -> None:
            console.info("two\nlines\n")
            console.warn("careful\n  of this")
            console.begin(100, 0)
            console.step(METRICS, 330.0)

        terminal, log = output_of(use, label=2)
        assert terminal == log
        assert terminal.splitlines() == [
            "GPU2:INFO | two",
            "GPU2:INFO |   lines",
            "GPU2:WARNING | careful",
            "GPU2:WARNING |   of this",
            f"GPU2:INFO | [GPU 2] {LINE}",
        ]

    def test_without_a_gpu_the_label_is_the_rank(self) -> None:
        def use(console: Console) -> None:
            console.warn("careful")
            console.begin(100, 0)
            console.step(METRICS, 330.0)

        terminal, log = output_of(use, label=2, label_name="rank")
        assert terminal == log
        assert terminal.splitlines() == ["rank2:WARNING | careful", f"rank2:INFO | [rank 2] {LINE}"]

    def test_without_a_label_there_is_no_prefix(self) -> None:
        def use(console: Console) -> None:
            console.info("two\nlines")
            console.warn("careful")
            console.begin(None, 0)
            console.step(METRICS)

        expected = LINE.replace("/100", "/-").replace("5:30", "-")
        assert output_of(use)[0].splitlines() == ["two", "  lines", "warning: careful", expected]

    def test_a_message_is_one_write_so_that_ranks_do_not_mix(self) -> None:
        class Terminal(io.StringIO):
            def write(self, text: str) -> int:
                writes.append(text)
                return len(text)

        writes: list[str] = []
        Console("lines", label=0, terminal=Terminal()).info("a\nb")
        assert writes == ["GPU0:INFO | a\nGPU0:INFO |   b\n"]

    def test_rich_is_imported_only_for_a_bar(self) -> None:
        code = (
            "import sys; from torchstone.observe.console import Console; Console('lines').info('x'); "
            "print('rich' in sys.modules)"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert (result.stdout, result.stderr) == ("False\n", "x\n")


class TestStyles:
    def test_lines_go_to_stderr_every_log_every_steps(self, capsys: pytest.CaptureFixture[str]) -> None:
        console = Console("lines", log_every=4)
        ten_steps(console)
        captured = capsys.readouterr()
        assert re.findall(r"Step \[(\d+)/10\]", captured.err) == ["1", "4", "8", "10"]
        assert captured.out == ""

    def test_a_step_with_validation_is_always_printed(self) -> None:
        terminal, _ = output_of(lambda console: console.step(METRICS | {"val_loss": 1.5}), log_every=10)
        assert terminal.endswith("| Validation loss: 1.5000\n")

    @pytest.mark.parametrize(("style", "printed"), [("quiet", "GPU1:WARNING | careful\n"), ("none", "")])
    def test_the_log_has_what_the_terminal_has_not(self, style: str, printed: str) -> None:
        def use(console: Console) -> None:
            console.info("hello")
            ten_steps(console)
            console.warn("careful")

        terminal, log = output_of(use, style, label=1, log_every=5)
        assert terminal == printed
        lines = log.splitlines()
        assert (lines[0], lines[-1], len(lines)) == ("GPU1:INFO | hello", "GPU1:WARNING | careful", 12)
        assert [f"[GPU 1] Step [{step}/10]" in lines[step] for step in range(1, 11)] == [True] * 10

    def test_long_work_prints_a_line_every_ten_seconds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def use(console: Console) -> None:
            now = iter([0.0, 4.0, 10.0, 12.0, 20.0])
            monkeypatch.setattr(console_module.time, "monotonic", lambda: next(now))
            with console.progress("tokenizing", 200_000_000) as update:
                for size in (40_000_000, 100_000_000, 120_000_000, 200_000_000):
                    update(size, "7 rows")

        expected = [
            "GPU0:INFO | tokenizing: 50 % of 200 MB, 10.0 MB/s, ETA 0:10, 7 rows",
            "GPU0:INFO | tokenizing: 100 % of 200 MB, 10.0 MB/s, ETA 0:00, 7 rows",
        ]
        assert [text.splitlines() for text in output_of(use, label=0)] == [expected, expected]
        assert [text.splitlines() for text in output_of(use, "quiet", label=0)] == [[], expected]


class TestTerminal:
    @pytest.fixture
    def tty(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TextIO, Callable[[], str]]]:
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "200")
        ours, theirs = pty.openpty()

        def read() -> str:
            """Everything that was written. Reading after the end of a terminal fails."""
            stream.close()
            content = b""
            with suppress(OSError):
                while chunk := os.read(ours, 1 << 16):
                    content += chunk
            return content.decode()

        with os.fdopen(theirs, "w") as stream:
            yield stream, read
        os.close(ours)

    def test_a_terminal_gets_a_bar_and_messages_above_it(self, tty: tuple[TextIO, Callable[[], str]]) -> None:
        stream, read = tty
        log = io.StringIO()
        console = open_console("auto", stream, log, label=0)
        assert console.style == "bar"
        console.warn("before")
        console.begin(3, 0)
        console.info("a [bold] word")
        console.step(METRICS | {"val_loss": 1.5, "val_loss/new": 1.5, "val_loss/old": 2.5}, 330.0)
        console.step(METRICS, 330.0)
        console.end()
        screen = read()
        losses = "new 1.5000, old 2.5000"
        assert screen.rindex(f"val loss {losses}") > screen.index(f"Validation loss: {losses}")
        assert "\x1b[33mwarning: before\x1b[0m" in screen
        assert "a [bold] word" in screen
        assert "3/3  loss 12.2340  norm 2.76  17,024 tok/s  ETA 5:30" in screen
        assert "Step [3/3]" in screen
        assert "GPU" not in screen
        assert [line.split(" | ")[0] for line in log.getvalue().splitlines()] == [
            "GPU0:WARNING", "GPU0:INFO", "GPU0:INFO", "GPU0:INFO",
        ]  # fmt: skip

    def test_a_signal_is_acknowledged_on_a_line_of_its_own_while_a_bar_is_drawn(self) -> None:
        """The handler must not take a lock of the bar: the thread that draws it may hold it, and wait for the handler.

        Every line that a thread prints draws the bar, and signals arrive all the time.
        """
        code = """
import os, signal, sys, threading
from torchstone.observe.console import Console
from torchstone.training.stop import StopRequest, handle_stop_signals
console = Console("bar")
console.begin(100, 0)
is_done = threading.Event()
def draw():
    while not is_done.is_set():
        console.info("from a thread")
threading.Thread(target=draw, daemon=True).start()
for step in range(1, 201):
    request = StopRequest()
    request.step = step
    with handle_stop_signals(request):
        os.kill(os.getpid(), signal.SIGTERM)
        console.info(f"line {step}")
is_done.set()
console.end()
"""
        ours, theirs = pty.openpty()
        process = subprocess.Popen([sys.executable, "-c", code], stderr=theirs, env=os.environ | {"TERM": "xterm"})
        os.close(theirs)
        screen = b""
        with suppress(OSError):
            while chunk := os.read(ours, 1 << 16):
                screen += chunk
        os.close(ours)
        assert process.wait(60) == 0
        for step in range(1, 201):
            message = f"SIGTERM: finishing step {step}, then saving; press Ctrl-C to quit without saving"
            assert f"\r\x1b[2K{message}\r\n".encode() in screen

    def test_a_file_gets_lines_without_color(self) -> None:
        terminal = io.StringIO()
        console = Console(terminal=terminal)
        console.warn("careful")
        assert (console.style, terminal.getvalue()) == ("lines", "warning: careful\n")

    def test_a_closed_pipe_does_not_end_training(self) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        log = io.StringIO()
        # `with` closes the terminal, which fails if its buffer still cannot be written.
        with os.fdopen(writing, "w") as terminal:
            console = open_console("lines", terminal, log, label=0)
            ten_steps(console)
        lines = log.getvalue().splitlines()
        assert len(lines) == 11
        assert re.match(r"GPU0:WARNING \| cannot write to the terminal \(.*Broken pipe\)", lines[1])


class TestLog:
    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    def test_a_full_disk_is_reported_once_and_does_not_end_training(self) -> None:
        terminal = io.StringIO()
        with open("/dev/full", "w", buffering=1) as log:
            console = open_console("lines", terminal, log, label=3)
            console.info("hello")
            console.info("again")
        warning, *lines = terminal.getvalue().splitlines()
        assert re.match(r"GPU3:WARNING \| cannot write to /dev/full \(.*No space left", warning)
        assert lines == ["GPU3:INFO | hello", "GPU3:INFO | again"]

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    def test_a_full_disk_does_not_end_training_when_the_log_is_opened_late(self) -> None:
        terminal = io.StringIO()
        with open("/dev/full", "w", buffering=1) as log:
            console = Console("lines", terminal=terminal, log_opener=lambda: log)
            console.info("hello")
            console.open_log()
            console.info("again")
        assert re.match(r"hello\n.*cannot write to /dev/full .*\nagain\n", terminal.getvalue())

    def test_log_writes_to_the_file_only(self) -> None:
        assert output_of(lambda console: console.log("started"), label=0) == ("", "GPU0:INFO | started\n")

    def test_characters_that_cannot_be_encoded_are_escaped(self, tmp_path: Path) -> None:
        with (tmp_path / "rank-0.log").open("w", buffering=1, encoding="utf-8") as log:
            console = open_console("none", None, log, label=0)
            console.info("no such file: a\udc80b")
            assert (tmp_path / "rank-0.log").read_text() == "GPU0:INFO | no such file: a\\udc80b\n"


class TestEta:
    def test_it_is_none_until_two_steps_are_measured(self) -> None:
        eta = EtaEstimator()
        assert eta.seconds_left(1000, 0, 0) is None
        # The first step may compile.
        eta.add_step(60.0, 40)
        assert eta.seconds_left(1000, 0, 0) is None
        eta.add_step(1.0, 40)
        assert eta.seconds_left(1000, 0, 0) == pytest.approx(25.0)

    def test_it_is_the_tokens_left_over_the_recent_speed(self) -> None:
        eta = EtaEstimator()
        for seconds, tokens in [(9.0, 1), (1.0, 10), (3.0, 30), (8.0, 40)]:
            eta.add_step(seconds, tokens)
        assert eta.seconds_left(200, 0, 0) == pytest.approx(200 * 12 / 80)
        for _ in range(50):
            eta.add_step(1.0, 20)
        assert eta.seconds_left(200, 0, 0) == pytest.approx(10.0)

    def test_validations_and_saves_count_with_their_recent_mean(self) -> None:
        eta = EtaEstimator()
        for _ in range(2):
            eta.add_step(1.0, 40)
        assert eta.seconds_left(400, validations=5, saves=5) == pytest.approx(10.0), "nothing is measured yet"
        eta.add_validation(60.0)
        for seconds in (4.0, 5.0, 6.0):
            eta.add_validation(seconds)
        eta.add_save(3.0)
        assert eta.seconds_left(400, validations=2, saves=3) == pytest.approx(10 + 2 * 5 + 3 * 3)
        assert eta.seconds_left(0, validations=0, saves=0) == 0.0

"""What people see of a run: lines and their prefix, the bar, the log of a rank, and a time left that comes true."""

from __future__ import annotations

import io
import os
import pty
import random
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchstone.config.load import from_dict
from torchstone.config.schema import Config
from torchstone.data.encode import Counts, Encoded
from torchstone.data.loader import RunData
from torchstone.data.packing import Batching
from torchstone.observe import console as console_module
from torchstone.observe.console import Console, bar_text, clock, step_line
from torchstone.observe.eta import Eta
from torchstone.training.length import Every, Length, Outlook, crossed, due_steps, run_length
from torchstone.training.state import Progress

VALUES = {"step": 3, "loss": 12.234, "lr": 1e-5, "grad_norm": 2.75649, "tok_s": 17023.6}
LINE = "Step [3/100] | Loss: 12.2340 | LR: 1.00e-05 | Grad Norm: 2.7565 | ETA: 5:30 | Tok/s: 17,024"


def seen_by(speak: Callable[[Console], object], style: str = "lines", **more: Any) -> tuple[str, str]:
    """What `speak` puts on a terminal that is none, and into the log."""
    terminal, log = io.StringIO(), io.StringIO()
    speak(Console(style, terminal=terminal, log=log, **more))
    return terminal.getvalue(), log.getvalue()


def ten_steps(console: Console) -> None:
    console.begin(10, 0)
    for step in range(1, 11):
        console.step(VALUES | {"step": step}, 10.0 - step)
    console.end()


class TestText:
    def test_a_step_is_one_line_in_the_order_of_the_document(self) -> None:
        assert step_line(VALUES, 100, "5:30") == LINE
        assert step_line(VALUES | {"val_loss": 5.82432}, 100, "5:30") == f"{LINE} | Validation loss: 5.8243"

    def test_the_bar_has_the_same_in_short(self) -> None:
        assert bar_text(VALUES, 100, "5:30") == "3/100  loss 12.2340  norm 2.76  17,024 tok/s  ETA 5:30"

    @pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (65, "1:05"), (3725, "1:02:05")])
    def test_clock(self, seconds: float, text: str) -> None:
        assert clock(seconds) == text


class TestPrefix:
    def test_every_line_of_a_rank_says_whose_it_is(self) -> None:
        def speak(console: Console) -> None:
            console.say("two\nlines\n")
            console.warn("careful\n  of this")
            console.begin(100, 0)
            console.step(VALUES, 330.0)

        terminal, log = seen_by(speak, label=2)
        assert terminal == log
        assert terminal.splitlines() == [
            "GPU2:INFO | two",
            "GPU2:INFO | lines",
            "GPU2:WARNING | careful",
            "GPU2:WARNING |   of this",
            f"GPU2:INFO | [GPU 2] {LINE}",
        ]

    def test_one_process_alone_has_no_prefix(self) -> None:
        def speak(console: Console) -> None:
            console.say("two\nlines")
            console.warn("careful")
            console.begin(None, 0)
            console.step(VALUES)

        expected = LINE.replace("/100", "/-").replace("5:30", "-")
        assert seen_by(speak)[0].splitlines() == ["two", "lines", "warning: careful", expected]

    def test_a_text_is_one_write_so_that_ranks_do_not_mix(self) -> None:
        class Writes(io.StringIO):
            def write(self, text: str) -> int:
                written.append(text)
                return len(text)

        written: list[str] = []
        Console("lines", label=0, terminal=Writes()).say("a\nb")
        assert written == ["GPU0:INFO | a\nGPU0:INFO | b\n"]

    def test_rich_is_imported_for_a_bar_alone(self) -> None:
        code = (
            "import sys; from torchstone.observe.console import Console; Console('lines').say('x'); "
            "print('rich' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert (done.stdout, done.stderr) == ("False\n", "x\n")


class TestStyles:
    def test_lines_go_to_stderr_at_their_interval(self, capsys: pytest.CaptureFixture[str]) -> None:
        console = Console("lines", log_every=4)
        ten_steps(console)
        captured = capsys.readouterr()
        assert re.findall(r"Step \[(\d+)/10\]", captured.err) == ["1", "4", "8", "10"]
        assert captured.out == ""

    def test_a_step_with_a_validation_is_always_shown(self) -> None:
        terminal, _ = seen_by(lambda console: console.step(VALUES | {"val_loss": 1.5}), log_every=10)
        assert terminal.endswith("| Validation loss: 1.5000\n")

    @pytest.mark.parametrize(("style", "shown"), [("quiet", "GPU1:WARNING | careful\n"), ("none", "")])
    def test_what_is_not_shown_is_in_the_log(self, style: str, shown: str) -> None:
        def speak(console: Console) -> None:
            console.say("hello")
            ten_steps(console)
            console.warn("careful")

        terminal, log = seen_by(speak, style, label=1, log_every=5)
        assert terminal == shown
        lines = log.splitlines()
        assert (lines[0], lines[-1], len(lines)) == ("GPU1:INFO | hello", "GPU1:WARNING | careful", 12)
        assert [f"[GPU 1] Step [{step}/10]" in lines[step] for step in range(1, 11)] == [True] * 10

    def test_long_work_is_a_line_now_and_then(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def speak(console: Console) -> None:
            now = iter([0.0, 4.0, 10.0, 12.0, 20.0])
            monkeypatch.setattr(console_module.time, "monotonic", lambda: next(now))
            with console.progress("tokenizing", 200_000_000) as report:
                for done in (40_000_000, 100_000_000, 120_000_000, 200_000_000):
                    report(done, "7 rows")

        expected = [
            "GPU0:INFO | tokenizing: 50 % of 200 MB, 10.0 MB/s, ETA 0:10, 7 rows",
            "GPU0:INFO | tokenizing: 100 % of 200 MB, 10.0 MB/s, ETA 0:00, 7 rows",
        ]
        assert [text.splitlines() for text in seen_by(speak, label=0)] == [expected, expected]
        assert [text.splitlines() for text in seen_by(speak, "quiet", label=0)] == [[], expected]


class TestTerminal:
    @pytest.fixture
    def tty(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "200")
        ours, theirs = pty.openpty()

        def read() -> str:
            """All that was written; what reads after the end of a terminal fails."""
            stream.close()
            found = b""
            with suppress(OSError):
                while chunk := os.read(ours, 1 << 16):
                    found += chunk
            return found.decode()

        with os.fdopen(theirs, "w") as stream:
            yield stream, read
        os.close(ours)

    def test_a_terminal_gets_a_bar_and_texts_above_it(self, tty: tuple[TextIO, Callable[[], str]]) -> None:
        stream, read = tty
        log = io.StringIO()
        console = Console(label=0, terminal=stream, log=log)
        assert console.style == "bar"
        console.warn("before")
        console.begin(3, 0)
        console.say("a [bold] word")
        console.step(VALUES | {"val_loss": 1.5}, 330.0)
        console.end()
        shown = read()
        assert "\x1b[33mwarning: before\x1b[0m" in shown
        assert "a [bold] word" in shown
        assert "3/3  loss 12.2340  norm 2.76  17,024 tok/s  ETA 5:30" in shown
        assert "Step [3/3]" in shown
        assert "GPU" not in shown
        assert [line.split(" | ")[0] for line in log.getvalue().splitlines()] == [
            "GPU0:WARNING", "GPU0:INFO", "GPU0:INFO",
        ]  # fmt: skip

    def test_what_is_no_terminal_gets_lines_without_colour(self) -> None:
        terminal = io.StringIO()
        console = Console(terminal=terminal)
        console.warn("careful")
        assert (console.style, terminal.getvalue()) == ("lines", "warning: careful\n")

    def test_a_reader_that_left_does_not_end_training(self) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        log = io.StringIO()
        # Unbuffered, so that nothing is left to be written when it is closed.
        with io.TextIOWrapper(os.fdopen(writing, "wb", buffering=0), write_through=True) as terminal:
            console = Console("lines", label=0, terminal=terminal, log=log)
            ten_steps(console)
        lines = log.getvalue().splitlines()
        assert len(lines) == 11
        assert re.match(r"GPU0:WARNING \| the terminal cannot be written to any more \(.*Broken pipe\)", lines[1])


class TestLog:
    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full is needed")
    def test_a_full_disk_is_said_once_and_does_not_end_training(self) -> None:
        terminal = io.StringIO()
        with open("/dev/full", "w", buffering=1) as log:
            console = Console("lines", label=3, terminal=terminal, log=log)
            console.say("hello")
            console.say("again")
        said = terminal.getvalue().splitlines()
        assert [said[0].split("(")[0], *said[1:]] == [
            "GPU3:WARNING | /dev/full cannot be written to any more ",
            "GPU3:INFO | hello",
            "GPU3:INFO | again",
        ]
        assert "No space left" in said[0]

    def test_what_is_recorded_is_not_shown(self) -> None:
        assert seen_by(lambda console: console.record("started"), label=0) == ("", "GPU0:INFO | started\n")

    def test_a_name_that_is_no_text_is_logged_all_the_same(self, tmp_path: Path) -> None:
        with (tmp_path / "rank-0.log").open("w", buffering=1, encoding="utf-8") as log:
            console = Console("none", label=0, log=log)
            console.say("no such file: a\udc80b")
            assert (tmp_path / "rank-0.log").read_text() == "GPU0:INFO | no such file: a\\udc80b\n"


class FixedSamples:
    def __init__(self, lengths: list[int]) -> None:
        self.lengths = np.array(lengths)
        self.loss_tokens = self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def get(self, index: int) -> list[Encoded]:
        raise NotImplementedError


def data_of(train: list[int], validation: list[int] | None, per_step: int, weights: list[float]) -> RunData:
    held_out = None if validation is None else FixedSamples(validation)
    numbers, sizes = Batching(per_step, per_step, None), [len(train) // 2, len(train) - len(train) // 2]
    return RunData(
        FixedSamples(train), held_out, numbers, ["a"], ["text"], sizes, weights, False, "", 0, Counts()
    )  # fmt: skip


@dataclass
class Simulated:
    """A run by the clock of its own: 400 steps of four samples of ten tokens, forty tokens a second, unless told.

    `pace` is what a step takes, times its share of the usual tokens.
    """

    keys: dict[str, Any] = field(default_factory=dict)
    train: list[int] = field(default_factory=lambda: [10] * 1600)
    validation: list[int] | None = None
    pace: Callable[[int], float] = lambda step: 1.0
    validation_seconds: float = 5.0
    save_seconds: float = 0.0
    improves: Callable[[int], bool] = lambda step: True
    weights: list[float] = field(default_factory=list)
    start: Progress = field(default_factory=Progress)

    @property
    def config(self) -> Config:
        keys = {"data.path": "x", "model.depth": 2, "model.tokenizer": "x", "training.max_steps": 400} | self.keys
        keys |= {} if self.validation is None else {"data.validation_path": "x"}
        sections: dict[str, dict[str, Any]] = {}
        for key, value in keys.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        return from_dict(sections)

    def lines(self) -> list[tuple[float, float | None]]:
        """When each line was printed, and the time left it gave; the last is the end of the run."""
        config, progress, now = self.config, replace(self.start), 0.0
        data = data_of(self.train, self.validation, 4, self.weights)
        length = run_length(config.training, data, config.data.shuffle, progress)
        outlook = Outlook(config, data, length, progress)
        sampler = data.sampler(config.training.seed, config.data.shuffle, progress.samples)
        train, kept, found = config.training, config.checkpoint, []
        while progress.step != length.steps:
            before = progress.samples
            last = length.samples or before + 4
            drawn = sampler.take(min(4, last - before))
            tokens = int(data.train.lengths[drawn].sum())
            progress.step, progress.samples = progress.step + 1, before + len(drawn)
            progress.tokens += tokens
            seconds = self.pace(progress.step) * tokens / 40
            now += seconds
            outlook.eta.step(seconds, tokens)

            def due(steps: int | None, samples: int | None, epochs: float | None, before: int = before) -> bool:
                size = len(self.train)
                return (
                    crossed(progress.step - 1, progress.step, steps)
                    or crossed(before, progress.samples, samples)
                    or crossed(before / size, progress.samples / size, epochs)
                    or progress.step == length.steps
                )

            improved = False
            every = train.validate_every_steps, train.validate_every_samples, train.validate_every_epochs
            if self.validation is not None and due(*every):
                now += self.validation_seconds
                improved = self.improves(progress.step)
                progress.best_step = progress.step if improved else progress.best_step
                outlook.validated(self.validation_seconds, improved)
            found.append((now, outlook.seconds_left(progress)))
            if due(kept.every_steps, kept.every_samples, kept.every_epochs) or (kept.save_best and improved):
                now += self.save_seconds
                outlook.eta.save(self.save_seconds)
        return [*found, (now, 0.0)]

    def errors(self, *shares: float) -> dict[float, float]:
        """How wrong the time left is, as a share of the right one, when so much of the run's time is over."""
        lines = self.lines()
        end, found = lines[-1][0], {}
        for share in shares:
            now, left = next(line for line in lines if line[0] >= share * end)
            assert left is not None
            found[share] = left / (end - now) - 1
        return found


SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9)
TENTH = {"training.validate_every_steps": 40}
# As many tokens as fifteen steps, forward only: five.
HELD_OUT = [10] * 60


def uneven(seed: int, spread: float) -> Callable[[int], float]:
    source = random.Random(seed)
    return lambda step: 1 + source.uniform(-spread, spread)


class TestEta:
    @pytest.mark.parametrize(
        "run",
        [
            pytest.param(Simulated(), id="steady"),
            pytest.param(Simulated(pace=lambda step: 15.0 if step == 1 else 1.0), id="slow first step"),
            pytest.param(Simulated(pace=lambda step: 3.0 if step <= 4 else 1.0), id="slow first steps"),
            pytest.param(Simulated(pace=lambda step: 20.0 if step in (1, 3, 14) else 1.0), id="shapes compiled late"),
            pytest.param(Simulated(pace=lambda step: 4.0 if step % 10 == 0 else 1.0), id="every tenth step slow"),
            pytest.param(Simulated(TENTH, validation=HELD_OUT), id="validation every tenth"),
            pytest.param(
                Simulated(TENTH, validation=HELD_OUT, validation_seconds=3.75), id="forward a quarter of a step"
            ),
            pytest.param(
                Simulated({"training.validate_every_epochs": 0.1}, validation=HELD_OUT), id="validation by epochs"
            ),
            pytest.param(
                Simulated({"training.validate_every_samples": 150}, validation=HELD_OUT), id="validation by samples"
            ),
            pytest.param(Simulated({"checkpoint.every_steps": 40}, save_seconds=3.0), id="saves"),
            pytest.param(
                Simulated(
                    TENTH | {"checkpoint.save_best": True}, validation=HELD_OUT, save_seconds=3.0,
                    improves=lambda step: step % 80 == 0,
                ),
                id="every second validation is the best",
            ),
            pytest.param(
                Simulated(TENTH | {"checkpoint.save_best": True, "checkpoint.every_steps": 100}, validation=HELD_OUT,
                          save_seconds=3.0),
                id="all of it",
            ),
            pytest.param(
                Simulated(
                    TENTH, validation=HELD_OUT, pace=lambda step: 9.0 if step == 201 else 1.0,
                    start=Progress(200, 800, 8000),
                ),
                id="resumed",
            ),
            pytest.param(
                Simulated({"training.max_steps": None, "training.max_epochs": 1, "data.shuffle": False},
                          train=sorted(random.Random(0).choices(range(2, 40), k=1601))),
                id="lengths that rise",
            ),
            pytest.param(
                Simulated({"training.max_steps": None, "training.max_epochs": 2.5},
                          train=[int(20 * random.Random(i).lognormvariate(0, 1)) + 1 for i in range(1000)]),
                id="lengths with a long tail",
            ),
            pytest.param(
                Simulated({"data.path": ["x", "y"], "data.weights": [0.9, 0.1]}, train=[20] * 800 + [60] * 800,
                          weights=[0.9, 0.1]),
                id="a mixture",
            ),
        ],
    )  # fmt: skip
    def test_it_is_right_within_a_tenth_from_a_twentieth_of_the_run_on(self, run: Simulated) -> None:
        errors = run.errors(*SHARES)
        assert {share: error for share, error in errors.items() if abs(error) > 0.1} == {}

    @pytest.mark.parametrize("seed", range(20))
    def test_noise_of_a_third_is_averaged_out(self, seed: int) -> None:
        keys = TENTH | {"training.max_steps": 800, "training.validate_every_steps": 80}
        errors = Simulated(keys, validation=HELD_OUT, pace=uneven(seed, 0.3)).errors(*SHARES)
        assert max(map(abs, errors.values())) <= 0.1

    @pytest.mark.parametrize("change", [0.25, -0.2])
    def test_a_drift_costs_what_cannot_be_foreseen_and_no_more(self, change: float) -> None:
        """Nobody knows at the first step that the last will take a quarter longer: what counts is the present pace."""
        lines = Simulated(pace=lambda step: 1 + change * step / 400).lines()
        end = lines[-1][0]
        for step in range(20, 390):
            now, left = lines[step - 1]
            present, rest = 1 + change * step / 400, 1 + change * (step + 401) / 800
            assert left is not None
            assert abs(left / (end - now) - present / rest) < 0.03

    def test_half_the_speed_from_the_middle_on_is_believed_soon(self) -> None:
        errors = Simulated(pace=lambda step: 1.0 if step <= 200 else 2.0).errors(0.55, 0.75, 0.9)
        assert max(abs(errors[share]) for share in (0.75, 0.9)) <= 0.01

    def test_nothing_is_said_before_there_is_a_pace(self) -> None:
        lines = Simulated().lines()
        assert [left for _, left in lines[:3]] == [None, pytest.approx(398), pytest.approx(397)]

    def test_a_run_without_an_end_has_no_time_left(self) -> None:
        run = Simulated({"training.mode": "infinite", "training.max_steps": None, "optim.schedule": "constant"})
        data = data_of(run.train, None, 4, [])
        outlook = Outlook(run.config, data, Length(None, None), Progress())
        for _ in range(10):
            outlook.eta.step(1.0, 40)
        assert outlook.seconds_left(Progress(10, 40, 400)) is None

    def test_the_last_line_still_owes_the_last_save(self) -> None:
        lines = Simulated({"checkpoint.every_steps": 300}, save_seconds=7.0).lines()
        assert lines[-2][1] == pytest.approx(7.0)

    def test_a_first_validation_that_compiles_counts_until_the_next(self) -> None:
        eta = Eta()
        eta.validation(60.0)
        assert eta.left(0, validations=2) == 120.0
        eta.validation(4.0)
        assert eta.left(0, validations=2) == 8.0


@given(
    steps=st.none() | st.integers(1, 30),
    samples=st.none() | st.integers(1, 90),
    epochs=st.none() | st.sampled_from([0.05, 0.1, 0.3, 1 / 3, 0.5, 1.0, 1.1, 2.0]),
    at_end=st.booleans(),
    per_step=st.integers(1, 12),
    size=st.integers(1, 60),
    before=st.integers(0, 40),
    to_come=st.integers(0, 80),
    cut=st.integers(0, 11),
)
def test_the_steps_that_are_due_are_those_that_the_loop_finds(
    steps: int | None, samples: int | None, epochs: float | None, at_end: bool, per_step: int, size: int, before: int,
    to_come: int, cut: int,
) -> None:  # fmt: skip
    start = Progress(before, 3 * before)
    end = start.samples + max(to_come * per_step - min(cut, per_step - 1), 0)
    found, seen = [], start.samples
    for step in range(before + 1, before + to_come + 1):
        after = min(seen + per_step, end)
        if (
            crossed(step - 1, step, steps) or crossed(seen, after, samples)
            or crossed(seen / size, after / size, epochs) or (at_end and step == before + to_come)
        ):  # fmt: skip
            found.append(step)
        seen = after
    length = Length(before + to_come, end)
    assert due_steps(Every(steps, samples, epochs, at_end), start, length, per_step, size).tolist() == found

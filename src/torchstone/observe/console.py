"""The console: a line per step or a progress bar on stderr, and a log file that gets everything.

Every line of a run has a prefix such as `GPU2:INFO | ...` (`rank2:INFO | ...` without GPUs), so that grep finds the
lines of a rank. A line is one write, so that lines of several ranks do not mix. rich is imported only for the progress
bar. Neither a closed terminal nor a full disk under the log ends training.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from typing import TYPE_CHECKING, Any, Literal, TextIO

from torchstone import heartbeat
from torchstone.terminal import escape_message, is_terminal

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Level = Literal["INFO", "WARNING"]

# Without a progress bar, long work logs a line this often.
PROGRESS_SECONDS = 10.0
YELLOW, RESET = "\x1b[33m", "\x1b[0m"


def format_time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def step_line(metrics: dict[str, Any], total: int | None, eta: str) -> str:
    line = (
        f"Step [{metrics['step']}/{total or '-'}] | Loss: {metrics['loss']:.4f} | LR: {metrics['lr']:.2e} | "
        f"Grad Norm: {metrics['grad_norm']:.4f} | ETA: {eta} | Tok/s: {metrics['tok_s']:,.0f}"
    )
    if metrics.get("mfu") is not None:
        line += f" | MFU: {100 * metrics['mfu']:.1f} %"
    line += f" | Memory: {metrics['memory'] / 2**30:.1f} GiB"
    return line if "val_loss" not in metrics else f"{line} | Validation loss: {validation_text(metrics)}"


def validation_text(metrics: dict[str, Any]) -> str:
    """`5.8243`, or with the names of several sets `task_b 5.8243, task_a 6.1582`."""
    losses = {key.removeprefix("val_loss/"): loss for key, loss in metrics.items() if key.startswith("val_loss/")}
    return ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items()) or f"{metrics['val_loss']:.4f}"


def bar_text(metrics: dict[str, Any], total: int | None, eta: str, val_loss: str | None) -> str:
    """The text beside the progress bar: two lines, short enough for 80 columns, and a third for named validation sets.

    `val_loss` is the `validation_text` of the last validation.
    """
    separator = "\n" if val_loss is not None and " " in val_loss else "  "
    validation = "" if val_loss is None else f"{separator}val loss {val_loss}"
    mfu = "" if metrics.get("mfu") is None else f"  MFU {100 * metrics['mfu']:.1f} %"
    return (
        f"{metrics['step']}/{total or '-'}  loss {metrics['loss']:.4f}  norm {metrics['grad_norm']:.2f}  "
        f"{metrics['tok_s']:,.0f} tok/s  ETA {eta}\n"
        f"epoch {metrics['epoch']:.2f}  lr {metrics['lr']:.2e}  {metrics['memory'] / 2**30:.1f} GiB{mfu}{validation}"
    )


def progress_text(done: int, total: int, seconds: float) -> str:
    speed = done / max(seconds, 1e-9)
    eta = format_time((total - done) / speed) if done else "-"
    return f"{100 * done / max(1, total):.0f} % of {total / 1e6:,.0f} MB, {speed / 1e6:,.1f} MB/s, ETA {eta}"


def count_text(done: int, total: int, seconds: float) -> str:
    speed = done / max(seconds, 1e-9)
    return f"{done:,} of {total:,}, {speed:,.1f}/s, ETA {format_time((total - done) / speed) if done else '-'}"


def add_prefix(text: str, level: Level, label: str | None) -> str:
    """`text` as it is printed: escaped, and with the prefix of its rank on every line, if there is a label such as
    `GPU2`."""
    text = escape_message(text)
    if label is None:
        return f"warning: {text}\n" if level == "WARNING" else f"{text}\n"
    return "".join(f"{label}:{level} | {line}\n" for line in text.rstrip("\n").split("\n"))


class Console:
    """Prints to `terminal` (by default stderr) in a style: `bar`, `lines`, `quiet` (warnings only) or `none`.

    `label` is the number in the prefix of lines, and `label_name` what it counts. `log_opener` opens the log, which
    gets every line, whatever the style: lines are kept in memory until `open_log` calls it.
    """

    def __init__(
        self,
        style: str = "auto",
        log_every: int = 1,
        *,
        label: int | None = None,
        label_name: Literal["GPU", "rank"] = "GPU",
        terminal: TextIO | None = None,
        log_opener: Callable[[], TextIO] | None = None,
    ) -> None:
        self._terminal, self._log_opener = terminal, log_opener
        self._log_file: TextIO | None = None
        self._kept_lines: list[str] = []
        if terminal is None and sys.stderr is None:
            # It was closed when the process started.
            style = "none"
        self.style = ("bar" if is_terminal(self.terminal) else "lines") if style == "auto" else style
        self.log_every = log_every
        # In the prefix of every line, and in the lines of steps.
        self.label = None if label is None else f"{label_name}{label}"
        # What a person calls this process.
        self.process = f"{label_name} {label or 0}"
        self._step_label = "" if label is None else f"[{self.process}] "
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        # The last step.
        self.total: int | None = None
        self._val_loss: str | None = None

    @property
    def terminal(self) -> TextIO:
        return self._terminal or sys.stderr

    def log_only(self) -> Console:
        """The same console without its terminal."""
        console = copy(self)
        console.style = "none"
        return console

    def info(self, text: str) -> None:
        self.log(text, "INFO")
        if self.style not in ("quiet", "none"):
            self._print(text, "INFO")

    def warn(self, text: str) -> None:
        self.log(text, "WARNING")
        if self.style != "none":
            self._print(text, "WARNING")

    def log(self, text: str, level: Level = "INFO") -> None:
        """Writes to the log file only."""
        if self._log_opener is not None:
            self._kept_lines.append(add_prefix(text, level, self.label))
        self._write_log(add_prefix(text, level, self.label))

    def _write_log(self, text: str) -> None:
        if self._log_file is None:
            return
        try:
            _write(self._log_file, text)
        except (OSError, ValueError) as error:
            file, self._log_file = self._log_file, None
            # Its buffer would raise again when it is closed later.
            with suppress(OSError, ValueError):
                file.close()
            name = getattr(file, "name", "the log file")
            self.warn(f"cannot write to {name} ({error}); training continues without it")

    def open_log(self) -> None:
        """Opens the log and writes the lines that were kept in memory. Does nothing if it is open."""
        if self._log_opener is not None:
            self._log_file, self._log_opener = self._log_opener(), None
            self._write_log("".join(self._kept_lines))
            self._kept_lines.clear()

    def begin(self, total: int | None, done: int) -> None:
        self.total = total
        if self.style == "bar":
            self._bar = self._new_bar()
            self._bar.start()
            self._task = self._bar.add_task("", total=total, completed=done, state=f"computing step {done + 1}")

    @contextmanager
    def progress(
        self, title: str, total: int, describe: Callable[[int, int, float], str] = progress_text
    ) -> Iterator[Callable[[int, str], None]]:
        """For work of `total` bytes (or of what `describe` counts): yields update(done, note). Shows a bar, or a line
        every few seconds."""
        started = last_line = time.monotonic()

        def state(done: int, note: str, now: float) -> str:
            return ", ".join(filter(None, (describe(done, total, now - started), note)))

        def print_progress(done: int, note: str) -> None:
            nonlocal last_line
            now = time.monotonic()
            if now - last_line >= PROGRESS_SECONDS:
                last_line = now
                text = f"{title}: {state(done, note, now)}"
                self.log(text, "INFO")
                if self.style == "lines":
                    self._print(text, "INFO")

        if self.style != "bar":
            yield print_progress
            return
        with self._new_bar(title) as bar:
            task = bar.add_task("", total=total, state="")

            def update_bar(done: int, note: str) -> None:
                bar.update(task, completed=done, state=escape_message(state(done, note, time.monotonic())))
                print_progress(done, note)

            yield update_bar

    def step(self, metrics: dict[str, Any], seconds_left: float | None = None) -> None:
        eta = "-" if seconds_left is None else format_time(seconds_left)
        text = step_line(metrics, self.total, eta)
        labeled = f"{self._step_label}{text}"
        self.log(labeled, "INFO")
        if self._bar is not None and self._task is not None:
            self._val_loss = validation_text(metrics) if "val_loss" in metrics else self._val_loss
            state = bar_text(metrics, self.total, eta, self._val_loss)
            self._bar.update(self._task, completed=metrics["step"], state=state)
            if "val_loss" in metrics:
                self._print(text, "INFO")
        elif self.style == "lines" and self._is_printed(metrics):
            self._print(labeled, "INFO")

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _is_printed(self, metrics: dict[str, Any]) -> bool:
        step = metrics["step"]
        return step == 1 or step % self.log_every == 0 or step == self.total or "val_loss" in metrics

    def _print(self, text: str, level: Level) -> None:
        text = add_prefix(text, level, None if self.style == "bar" else self.label).removesuffix("\n")
        try:
            if self._bar is not None:
                # Only rich can print above its bar.
                self._bar.console.print(text, markup=False, style="yellow" if level == "WARNING" else None)
            elif level == "WARNING" and _has_colors(self.terminal):
                _write(self.terminal, f"{YELLOW}{text}{RESET}\n")
            else:
                _write(self.terminal, f"{text}\n")
        except (OSError, ValueError) as error:
            self.style = "none"
            heartbeat.discard_output(self.terminal)
            with suppress(OSError, ValueError):
                self.end()
            self.log(f"cannot write to the terminal ({error}); only this log continues", "WARNING")

    def _new_bar(self, title: str = "") -> Progress:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        screen = RichConsole(file=self._terminal, stderr=True, highlight=False, soft_wrap=True)
        # The elapsed time ticks, so that a long first step does not look like a hang.
        columns = [TimeElapsedColumn(), BarColumn(bar_width=12), TextColumn("{task.fields[state]}", markup=False)]
        # A column formats its text with str.format.
        title = escape_message(title).replace("{", "{{").replace("}", "}}")
        return Progress(*([TextColumn(title, markup=False)] if title else []), *columns, console=screen)


def _write(stream: TextIO, text: str) -> None:
    """Writes `text` in one call. Characters that the stream cannot encode are escaped."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def _has_colors(stream: TextIO) -> bool:
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

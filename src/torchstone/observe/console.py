"""What a person sees: a line a step, or a progress bar on a terminal; on stderr. And a log that keeps all of it.

Where several processes speak, every line says which one: `GPU2:INFO | ...`, so that grep finds a rank's. Lines are
plain writes, each whole in one, so that those of several ranks do not mix within a line; rich draws the bar alone, and
is imported for it alone. Neither a terminal that went away nor a full disk under the log ends training.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Level = Literal["INFO", "WARNING"]

# Where there is no bar, work that takes long says so this often.
LINE_SECONDS = 10.0
YELLOW, PLAIN = "\x1b[33m", "\x1b[0m"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def step_line(values: dict[str, Any], total: int | None, eta: str) -> str:
    line = (
        f"Step [{values['step']}/{total or '-'}] | Loss: {values['loss']:.4f} | LR: {values['lr']:.2e} | "
        f"Grad Norm: {values['grad_norm']:.4f} | ETA: {eta} | Tok/s: {values['tok_s']:,.0f}"
    )
    return line if "val_loss" not in values else f"{line} | Validation loss: {values['val_loss']:.4f}"


def bar_text(values: dict[str, Any], total: int | None, eta: str) -> str:
    """The same beside a bar, short enough for a terminal of 80 columns."""
    return (
        f"{values['step']}/{total or '-'}  loss {values['loss']:.4f}  norm {values['grad_norm']:.2f}  "
        f"{values['tok_s']:,.0f} tok/s  ETA {eta}"
    )


def progress_text(done: int, total: int, seconds: float) -> str:
    speed = done / max(seconds, 1e-9)
    left = clock((total - done) / speed) if done else "-"
    return f"{100 * done / max(1, total):.0f} % of {total / 1e6:,.0f} MB, {speed / 1e6:,.1f} MB/s, ETA {left}"


def as_lines(text: str, level: Level, label: int | None) -> str:
    """`text` as it is printed: with the prefix of its rank on every line, where there is one."""
    if label is None:
        return f"warning: {text}\n" if level == "WARNING" else f"{text}\n"
    return "".join(f"GPU{label}:{level} | {line}\n" for line in text.rstrip("\n").split("\n"))


class Console:
    """`say` is for things that happen once; `step` for every step. Style `none` is for ranks that others speak for.

    `label` is the number that lines are prefixed with. People look at `terminal`, by default the stderr of the moment;
    `log`, an open file, gets everything as lines, whatever the style and the interval.
    """

    def __init__(
        self,
        style: str = "auto",
        log_every: int = 1,
        *,
        label: int | None = None,
        terminal: TextIO | None = None,
        log: TextIO | None = None,
    ) -> None:
        self._given, self._log = terminal, log
        self.style = ("bar" if _is_terminal(self.terminal) else "lines") if style == "auto" else style
        self.log_every, self.label = log_every, label
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._total: int | None = None

    @property
    def terminal(self) -> TextIO:
        return self._given or sys.stderr

    def say(self, text: str) -> None:
        self.record(text, "INFO")
        if self.style not in ("quiet", "none"):
            self._show(text, "INFO")

    def warn(self, text: str) -> None:
        self.record(text, "WARNING")
        if self.style != "none":
            self._show(text, "WARNING")

    def record(self, text: str, level: Level = "INFO") -> None:
        """Into the log alone."""
        if self._log is None:
            return
        try:
            _write(self._log, as_lines(text, level, self.label))
        except (OSError, ValueError) as error:
            log, self._log = self._log, None
            # What it still holds would raise again wherever it is closed.
            with suppress(OSError, ValueError):
                log.close()
            name = getattr(log, "name", "the log")
            self.warn(f"{name} cannot be written to any more ({error}): training goes on without it")

    def begin(self, total: int | None, done: int) -> None:
        self._total = total
        if self.style == "bar":
            self._bar = self._new_bar()
            self._bar.start()
            self._task = self._bar.add_task("", total=total, completed=done, state="")

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[int, str], None]]:
        """For work of `total` bytes: a function to call with those done and a note. A bar, or a line now and then."""
        began = last = time.monotonic()

        def line(done: int, note: str) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= LINE_SECONDS:
                last = now
                text = f"{title}: {progress_text(done, total, now - began)}, {note}"
                self.record(text, "INFO")
                if self.style == "lines":
                    self._show(text, "INFO")

        if self.style != "bar":
            yield line
            return
        with self._new_bar(title) as bar:
            task = bar.add_task("", total=total, state="")

            def draw(done: int, note: str) -> None:
                state = f"{progress_text(done, total, time.monotonic() - began)}, {note}"
                bar.update(task, completed=done, state=state)
                line(done, note)

            yield draw

    def step(self, values: dict[str, Any], seconds_left: float | None = None) -> None:
        eta = "-" if seconds_left is None else clock(seconds_left)
        text = step_line(values, self._total, eta)
        tagged = text if self.label is None else f"[GPU {self.label}] {text}"
        self.record(tagged, "INFO")
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=values["step"], state=bar_text(values, self._total, eta))
            if "val_loss" in values:
                self._show(text, "INFO")
        elif self.style == "lines" and self._due(values):
            self._show(tagged, "INFO")

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _due(self, values: dict[str, Any]) -> bool:
        step = values["step"]
        return step == 1 or step % self.log_every == 0 or step == self._total or "val_loss" in values

    def _show(self, text: str, level: Level) -> None:
        printed = as_lines(text, level, None if self.style == "bar" else self.label).removesuffix("\n")
        try:
            if self._bar is not None:
                # Above the bar, which only the one that draws it can do.
                self._bar.console.print(printed, markup=False, style="yellow" if level == "WARNING" else None)
            elif level == "WARNING" and _is_coloured(self.terminal):
                _write(self.terminal, f"{YELLOW}{printed}{PLAIN}\n")
            else:
                _write(self.terminal, f"{printed}\n")
        except (OSError, ValueError) as error:
            self.style = "none"
            with suppress(OSError, ValueError):
                self.end()
            self.record(f"the terminal cannot be written to any more ({error}): only this log goes on", "WARNING")

    def _new_bar(self, title: str = "") -> Progress:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, TextColumn

        screen = RichConsole(file=self._given, stderr=True, highlight=False, soft_wrap=True)
        columns = [BarColumn(bar_width=16), TextColumn("{task.fields[state]}", markup=False)]
        return Progress(*([TextColumn(title, markup=False)] if title else []), *columns, console=screen)


def _write(stream: TextIO, text: str) -> None:
    """One write a text. Names of files may have bytes that no encoding can show."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:
        return False


def _is_coloured(stream: TextIO) -> bool:
    return _is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

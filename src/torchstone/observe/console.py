"""What a person sees: a line a step, or a progress bar on a terminal; always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn

# Where there is no bar, work that takes long says so this often.
LINE_SECONDS = 10.0


class Eta:
    """Time left, from the pace of the steps so far (the first is left out: it warms up kernels and caches)."""

    def __init__(self, total: int | None) -> None:
        self.total = total
        self._first: tuple[int, float] | None = None

    def after(self, step: int) -> str:
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        first, since = self._first
        if self.total is None or step == first:
            return "-" if self.total != step else clock(0)
        return clock((now - since) / (step - first) * (self.total - step))


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def step_line(values: dict[str, Any], total: int | None, eta: str) -> str:
    line = (
        f"Step [{values['step']}/{total or '-'}] | Loss: {values['loss']:.4f} | LR: {values['lr']:.2e} | "
        f"Grad Norm: {values['grad_norm']:.4f} | Tok/s: {values['tok_s']:,.0f} | ETA: {eta}"
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


class Console:
    """`say` is for things that happen once; `step` for every step. Style `none` is for ranks that others speak for."""

    def __init__(self, style: str = "auto", log_every: int = 1) -> None:
        self._rich = RichConsole(stderr=True, highlight=False, soft_wrap=True)
        self.style = ("bar" if sys.stderr.isatty() else "lines") if style == "auto" else style
        self.log_every = log_every
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._eta = Eta(None)
        self._total: int | None = None

    def say(self, text: str) -> None:
        if self.style not in ("quiet", "none"):
            self._rich.print(text, markup=False)

    def warn(self, text: str) -> None:
        if self.style != "none":
            self._rich.print(f"warning: {text}", markup=False, style="yellow")

    def begin(self, total: int | None, done: int) -> None:
        self._eta, self._total = Eta(total), total
        if self.style == "bar":
            self._progress = Progress(
                BarColumn(bar_width=16), TextColumn("{task.fields[state]}", markup=False), console=self._rich
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=total, completed=done, state="")

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[int, str], None]]:
        """For work of `total` bytes: a function to call with those done and a note. A bar, or a line now and then."""
        began = last = time.monotonic()

        def line(done: int, note: str) -> None:
            nonlocal last
            now = time.monotonic()
            if self.style == "lines" and now - last >= LINE_SECONDS:
                last = now
                self.say(f"{title}: {progress_text(done, total, now - began)}, {note}")

        if self.style != "bar":
            yield line
            return
        with Progress(
            TextColumn(title, markup=False), BarColumn(bar_width=16), TextColumn("{task.fields[state]}", markup=False),
            console=self._rich,
        ) as bar:  # fmt: skip
            task = bar.add_task("", total=total, state="")

            def draw(done: int, note: str) -> None:
                bar.update(
                    task, completed=done, state=f"{progress_text(done, total, time.monotonic() - began)}, {note}"
                )

            yield draw

    def step(self, values: dict[str, Any]) -> None:
        eta = self._eta.after(values["step"])
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=values["step"], state=bar_text(values, self._total, eta))
            if "val_loss" in values:
                self._rich.print(step_line(values, self._total, eta), markup=False)
        elif self.style == "lines" and self._due(values):
            self._rich.print(step_line(values, self._total, eta), markup=False)

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _due(self, values: dict[str, Any]) -> bool:
        step = values["step"]
        return step == 1 or step % self.log_every == 0 or step == self._total or "val_loss" in values

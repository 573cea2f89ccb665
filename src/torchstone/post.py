"""A worker's post: what its launcher sees of it while it runs, and where its words go.

A launcher cannot ask a worker that hangs what it is doing, so a worker says it beforehand: a small file, mapped into
it, holds its phase, its step, when it last moved on and when it last lived. Two times, because a rank that waits for
a stopped one stands still as well, but lives: a thread beats for it twice a second. It costs nothing that was measured.

A worker's own output, tracebacks and the last words of a library included, goes to its log; what is for people goes to
the terminal that the launcher was started in. A process that nobody launched has both in one place.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

# The folder of the launch, in a worker's environment; beside it stand torchrun's variables.
POST = "TORCHSTONE_POST"
# Where torchrun, and our launcher, look for a worker's last words.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
STACK_SIGNAL = signal.SIGQUIT
BEAT = 0.5

# When it last lived and last moved, the step that was begun (0: none), whether it waits for the other ranks, and the
# length of the phase's name.
_HEAD = struct.Struct("<ddq?i")
_WAITS = struct.calcsize("<ddq")
_SIZE = 512


@dataclass(frozen=True)
class Pulse:
    """What a launcher reads. The times are of the machine's monotonic clock, which its processes share."""

    lived: float
    moved: float
    step: int
    waits: bool
    phase: str


class Post:
    """Of this process: the phase it is in, and where it tells it."""

    def __init__(self) -> None:
        self.phase = "starting"
        self.step = 0
        self.terminal: TextIO | None = None
        self.error_file: str | None = None
        self._pulse: mmap.mmap | None = None

    @property
    def launched(self) -> bool:
        """Whether a launcher of ours watches this process."""
        return self._pulse is not None

    def enter(self, phase: str, step: int = 0) -> None:
        """This process begins something else. A step counts as begun once it is named here."""
        self.phase, self.step = phase, step or self.step
        if self._pulse is not None:
            text = phase.encode()[: _SIZE - _HEAD.size]
            now = time.monotonic()
            # In one copy: packing into the map would first fill it with zeros, for the launcher to see.
            data = _HEAD.pack(now, now, self.step, False, len(text)) + text
            self._pulse[: len(data)] = data

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While this process waits for the other ranks: if one hangs, it is not this one."""
        if self._pulse is None:
            yield
            return
        self._pulse[_WAITS] = 1
        try:
            yield
        finally:
            self._pulse[_WAITS] = 0

    def take(self) -> None:
        """Takes the post that a launcher has prepared for this process, if one has. What it starts itself has none."""
        folder, rank = os.environ.pop(POST, None), os.environ.get("RANK")
        if folder is None or rank is None or not pulse_file(Path(folder), int(rank)).is_file():
            return
        with pulse_file(Path(folder), int(rank)).open("r+b") as file:
            self._pulse = mmap.mmap(file.fileno(), _SIZE)
        self.error_file = os.environ.pop(ERROR_FILE, None)
        self.enter(self.phase)
        threading.Thread(target=self._beat, args=(os.getppid(),), daemon=True, name="pulse").start()

    def keep_log(self, path: Path) -> TextIO:
        """All that this process writes goes to `path` from now on; the terminal stays for what is for people."""
        path.parent.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        self.terminal = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
        with path.open("ab", buffering=0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        # The stacks of a worker that stands still, for the launcher to ask for; and of one that crashes.
        faulthandler.enable(sys.__stderr__ or 2)
        faulthandler.register(STACK_SIGNAL, sys.__stderr__ or 2, chain=False)
        return sys.stderr

    def _beat(self, parent: int) -> None:
        assert self._pulse is not None
        orphaned = False
        while True:
            self._pulse[:8] = struct.pack("<d", time.monotonic())
            if not orphaned and os.getppid() != parent:
                # The launcher is gone, killed most likely. Nobody would end this process: it saves, and ends itself.
                orphaned = True
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(BEAT)


HERE = Post()


def tell(text: str) -> None:
    """A line for people. If nobody is there to read it any more, nothing else depends on it."""
    with suppress(OSError, ValueError):
        stream = HERE.terminal or sys.stderr
        stream.write(f"{text}\n")
        stream.flush()


def log_file(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.log"


def enter(phase: str, step: int = 0) -> None:
    HERE.enter(phase, step)


def pulse_file(folder: Path, rank: int) -> Path:
    return folder / f"pulse-{rank}"


def prepare_pulse(folder: Path, rank: int) -> None:
    """The file of a worker that is about to start, as if it had just moved."""
    now = time.monotonic()
    head = _HEAD.pack(now, now, 0, False, len(b"starting")) + b"starting"
    pulse_file(folder, rank).write_bytes(head.ljust(_SIZE, b"\0"))


def read_pulse(folder: Path, rank: int) -> Pulse | None:
    """None where somebody has removed the file."""
    try:
        data = pulse_file(folder, rank).read_bytes()
    except OSError:
        return None
    lived, moved, step, waits, length = _HEAD.unpack_from(data)
    phase = data[_HEAD.size : _HEAD.size + length].decode(errors="replace")
    return Pulse(lived, moved, step, waits, phase)


def write_error(error: BaseException, message: str, exit_code: int) -> None:
    """A worker's last words, in the form that torchrun reads as well."""
    path = HERE.error_file or os.environ.get(ERROR_FILE)
    if not path:
        return
    words = {
        "message": message,
        "errorCode": exit_code,
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(error)),
            "timestamp": str(int(time.time())),
        },
    }
    # A disk that is full must not change how this process ends.
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": words}))


def read_error(path: Path) -> str | None:
    """What a worker said last, if it could."""
    try:
        return str(json.loads(path.read_text())["message"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return None

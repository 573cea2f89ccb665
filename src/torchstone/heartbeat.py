"""The heartbeat of a worker, and where its output goes.

A launcher cannot ask a worker that hangs what it is doing. So each worker maps a small file and writes into it its
phase, its step, and two times: when it last made progress and when it was last alive. A thread updates the second one
twice a second. Both are needed: a rank that waits for a stopped rank makes no progress either, but it is alive. A
heartbeat costs too little to measure.

The output of a launched worker, including tracebacks and what libraries write, goes to its own log. Lines for the user
go to the terminal of the launcher. A process without a launcher writes both to its terminal.

A worker whose launcher is gone gets SIGTERM, which makes it save and exit. If it does not, because it waits for a rank
that has exited, it is killed.
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

import psutil

from torchstone.errors import UsageError
from torchstone.parent_process import is_descendant_of, request_death_signal
from torchstone.terminal import escape_message

# What a launcher sets besides torchrun's variables: the folder of the heartbeats, and the file of the process group's
# store (parallel/mesh.py), which replaces MASTER_ADDR and MASTER_PORT on a single node.
FOLDER_VARIABLE = "TORCHSTONE_HEARTBEATS"
STORE_VARIABLE = "TORCHSTONE_STORE"
# "PID SECONDS": the launcher's process id, and the time to save when it is gone.
LAUNCHER_VARIABLE = "TORCHSTONE_LAUNCHER"
# The descriptor of the open file that locks the run's folder.
LOCK_VARIABLE = "TORCHSTONE_LOCK"
# torchrun's variable: where a worker writes the error that ends it.
ERROR_VARIABLE = "TORCHELASTIC_ERROR_FILE"
# Makes a worker write its Python stacks to its log.
STACK_SIGNAL = signal.SIGQUIT
INTERVAL = 0.5
# The exit code of Python and of shells after Ctrl-C.
EXIT_INTERRUPTED = 130
# Seconds to exit without a launcher before the first step, when there is nothing to save.
ORPHAN_GRACE = 5.0

# alive_at, progress_at, step, is_waiting, length of the phase; the phase follows.
_HEADER = struct.Struct("<ddq?i")
_IS_WAITING_OFFSET = struct.calcsize("<ddq")
_SIZE = 512


@dataclass(frozen=True)
class Heartbeat:
    """What a launcher reads. Times are from the monotonic clock, which all processes of a machine share.

    `step` is the last step that began, 0 before the first. `is_waiting`: the worker waits for other ranks.
    """

    alive_at: float
    progress_at: float
    step: int
    is_waiting: bool
    phase: str


class _WorkerState:
    """What this process reports, and where."""

    def __init__(self) -> None:
        self.phase = "starting"
        self.step = 0
        # Seconds in each phase of a start-up, and when the current phase began; None: nothing starts.
        self.startup_seconds: dict[str, float] = {}
        self.phase_began: float | None = None
        self.terminal: TextIO | None = None
        self.error_file: str | None = None
        self.file: mmap.mmap | None = None
        self.has_lock = False


_state = _WorkerState()


def attach() -> None:
    """Starts the heartbeat if a launcher has prepared one for this process. Child processes get none.

    A process that a launcher started ends when the launcher is gone, with or without a heartbeat.
    """
    launcher, _state.has_lock = os.environ.pop(LAUNCHER_VARIABLE, None), bool(os.environ.pop(LOCK_VARIABLE, None))
    if launcher is not None:
        _follow_launcher(*launcher.split())
    folder, rank = os.environ.pop(FOLDER_VARIABLE, None), os.environ.get("RANK")
    if folder is None or rank is None or not _heartbeat_file(Path(folder), int(rank)).is_file():
        return
    with _heartbeat_file(Path(folder), int(rank)).open("r+b") as file:
        _state.file = mmap.mmap(file.fileno(), _SIZE)
    _state.error_file = os.environ.pop(ERROR_VARIABLE, None)
    report_phase(_state.phase)
    threading.Thread(target=_beat, args=(_state.file,), daemon=True, name="heartbeat").start()


def read_int_variable(name: str, default: int) -> int:
    """An environment variable of torchrun, SLURM or our launcher."""
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise UsageError(f"{name} is {value!r}, not a number", f"unset {name}, or start the processes with torchrun")
    return int(value)


def has_launcher() -> bool:
    """Whether a launcher of this package watches this process."""
    return _state.file is not None


def has_launcher_lock() -> bool:
    """Whether the launcher of this process has locked the run's folder. The lock lasts as long as one of them lives."""
    return _state.has_lock


def current_phase() -> str:
    return _state.phase


def begin_startup(of_process: bool = False) -> None:
    """Times phases from now on, or from the start of this process, until `end_startup`."""
    _state.startup_seconds, _state.phase = {}, "starting"
    _state.phase_began = psutil.Process().create_time() if of_process else time.time()


def end_startup() -> dict[str, float]:
    """The seconds of each phase since `begin_startup`."""
    _add_startup_seconds()
    seconds, _state.startup_seconds, _state.phase_began = _state.startup_seconds, {}, None
    return seconds


def _add_startup_seconds() -> None:
    if _state.phase_began is not None:
        now, seconds = time.time(), _state.startup_seconds
        seconds[_state.phase] = seconds.get(_state.phase, 0.0) + now - _state.phase_began
        _state.phase_began = now


def report_phase(phase: str, step: int = 0) -> None:
    """Records what this process does from now on. A nonzero `step` becomes the current step."""
    _add_startup_seconds()
    _state.phase, _state.step = phase, step or _state.step
    if _state.file is not None:
        text = phase.encode()[: _SIZE - _HEADER.size]
        now = time.monotonic()
        # One copy: pack_into would first fill the map with zeros, which the launcher could read.
        data = _HEADER.pack(now, now, _state.step, False, len(text)) + text
        _state.file[: len(data)] = data


@contextmanager
def waiting_for_ranks() -> Iterator[None]:
    """Marks this process as waiting for other ranks, so that the launcher does not blame it for a hang."""
    if _state.file is None:
        yield
        return
    _state.file[_IS_WAITING_OFFSET] = 1
    try:
        yield
    finally:
        _state.file[_IS_WAITING_OFFSET] = 0


def open_standard_streams() -> None:
    """Opens /dev/null in place of stdin, stdout and stderr that are closed (`>&-`).

    Otherwise the next file that is opened gets the number of a closed one, and output of libraries is written into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def redirect_output(path: Path) -> None:
    """Sends stdout and stderr of this process to `path`. `terminal()` and `print_line` keep the old stderr."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    _state.terminal = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    with path.open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # Stacks go to the log: after a crash, and when the launcher asks for them.
    faulthandler.enable(sys.__stderr__ or 2)
    faulthandler.register(STACK_SIGNAL, sys.__stderr__ or 2, chain=False)


def terminal() -> TextIO | None:
    """The launcher's terminal; None if the output of this process is not redirected."""
    return _state.terminal


def print_line(text: str) -> None:
    """Writes a line for the user. A closed terminal is not an error."""
    stream = _state.terminal or sys.stderr
    if stream is not None:
        write_to_terminal(stream, f"{text}\n")


def print_at_once(text: str) -> None:
    """Writes a line for the user from a signal handler: one system call, without the locks of streams or of rich.

    On a terminal the line replaces a progress bar, which is drawn again below it.
    """
    stream = _state.terminal or sys.stderr
    if stream is None:
        return
    with suppress(OSError, ValueError):
        descriptor = stream.fileno()
        clear = "\r\x1b[2K" if os.isatty(descriptor) else ""
        os.write(descriptor, f"{clear}{text}\n".encode())


def stop_message(number: signal.Signals, step: int) -> str:
    """What to print when a signal stops a run in `step`, 0 if none has begun."""
    if step == 0:
        return "stopping: no step has begun, so there is nothing new to save"
    name, again = ("", " again") if number == signal.SIGINT else (f"{number.name}: ", "")
    return f"{name}finishing step {step}, then saving; press Ctrl-C{again} to quit without saving"


def write_to_terminal(stream: TextIO, text: str) -> None:
    """Writes one message, escaped, and flushes. If that fails (a closed terminal, a full disk), this text and all later
    output are lost."""
    try:
        stream.write(escape_message(text))
        stream.flush()
    except (OSError, ValueError):
        discard_output(stream)


def discard_output(stream: TextIO) -> None:
    """Sends what is in the buffer of a closed terminal, and all later output, to /dev/null.

    Otherwise Python would fail to write the buffer when it exits, and change the exit code to 120.
    """
    with suppress(OSError, ValueError), Path(os.devnull).open("wb") as devnull:
        os.dup2(devnull.fileno(), stream.fileno())


def write_error(error: BaseException, message: str, exit_code: int) -> None:
    """Writes the error to a file for the launcher, in torchrun's format."""
    path = _state.error_file or os.environ.get(ERROR_VARIABLE)
    if not path:
        return
    details = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
    content = {"message": {"message": message, "errorCode": exit_code, "extraInfo": details}}
    # A full disk must not change how this process ends.
    with suppress(OSError):
        Path(path).write_text(json.dumps(content))


def create_heartbeat(folder: Path, rank: int) -> None:
    """Creates the heartbeat file of a worker that is about to start, and removes the previous error file."""
    now = time.monotonic()
    header = _HEADER.pack(now, now, 0, False, len(b"starting")) + b"starting"
    _heartbeat_file(folder, rank).write_bytes(header.ljust(_SIZE, b"\0"))
    error_file(folder, rank).unlink(missing_ok=True)


def read_heartbeat(folder: Path, rank: int) -> Heartbeat | None:
    """Returns None if the file was removed."""
    try:
        data = _heartbeat_file(folder, rank).read_bytes()
    except OSError:
        return None
    alive_at, progress_at, step, is_waiting, length = _HEADER.unpack_from(data)
    phase = data[_HEADER.size : _HEADER.size + length].decode(errors="replace")
    return Heartbeat(alive_at, progress_at, step, is_waiting, phase)


def read_error(folder: Path, rank: int) -> str | None:
    """Returns the message that a worker wrote with `write_error`, or None."""
    try:
        return str(json.loads(error_file(folder, rank).read_text())["message"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def error_file(folder: Path, rank: int) -> Path:
    return folder / f"error-{rank}.json"


def log_file(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.log"


def _heartbeat_file(folder: Path, rank: int) -> Path:
    return folder / f"heartbeat-{rank}"


def _beat(file: mmap.mmap) -> None:
    while True:
        file[:8] = struct.pack("<d", time.monotonic())
        time.sleep(INTERVAL)


def _follow_launcher(pid: str, save_grace: str) -> None:
    is_signaled_by_kernel = request_death_signal(signal.SIGTERM)
    if not is_descendant_of(int(pid)):
        # It died before the request.
        os.kill(os.getpid(), signal.SIGTERM)
    args = (int(pid), float(save_grace), is_signaled_by_kernel)
    threading.Thread(target=_end_without_launcher, args=args, daemon=True, name="launcher").start()


def _end_without_launcher(pid: int, save_grace: float, is_signaled_by_kernel: bool) -> None:
    while is_descendant_of(pid):
        time.sleep(INTERVAL)
    if not is_signaled_by_kernel:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(save_grace if _state.step else ORPHAN_GRACE)
    # A worker leads a process group: what it started ends with it.
    os.killpg(os.getpgrp(), signal.SIGKILL)

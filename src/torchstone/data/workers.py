"""Chunks encoded in processes of their own, handed back in order.

The processes are plain interpreters that talk over a pipe: nothing of the parent is imported again or copied (a script
without a main guard works, threads and CUDA do not matter), and each holds a tokenizer and little else. When the parent
ends, however it ends, their pipe closes and they end too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from torchstone import errors
from torchstone.data.encode import Encoder, Part, Recipe
from torchstone.data.sources import Chunk

START = "import sys; from torchstone.data.workers import serve; serve(int(sys.argv[1]))"
OUT_OF_MEMORY = "out of memory is the usual reason: fewer processes take less (--data.prepare_workers 1); "
# Parts that may wait for an earlier one, for each process.
AHEAD = 4


class Workers:
    def __init__(self, recipe: Recipe, count: int) -> None:
        self._processes: dict[Connection, subprocess.Popen[bytes]] = {}
        # The same modules as here: the path of this process, and (-P) not the folder it happens to be in.
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }
        for _ in range(count):
            here, there = Pipe()
            command = [sys.executable, "-P", "-c", START, str(there.fileno())]
            process = subprocess.Popen(
                command, pass_fds=[there.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
            there.close()
            self._processes[here] = process
        self._recipe = recipe

    def encode(self, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, Part]]:
        """Every chunk, without its payload, and what it became; in order."""
        for connection in self._processes:
            self._send(connection, self._recipe)
        idle, busy = list(self._processes), dict[Connection, int]()
        sent: dict[int, Chunk] = {}
        parts: dict[int, Part] = {}
        first, last = 0, -1
        coming = next(chunks, None)
        while coming is not None or busy:
            while coming is not None and idle and len(sent) < AHEAD * len(self._processes):
                last += 1
                connection = idle.pop()
                self._send(connection, coming)
                busy[connection], sent[last] = last, coming._replace(payload=b"")
                coming = next(chunks, None)
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                parts[busy.pop(ready)] = self._receive(ready)
                idle.append(ready)
            while first in parts:
                yield sent.pop(first), parts.pop(first)
                first += 1

    def close(self) -> None:
        for connection in self._processes:
            connection.close()
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _send(self, connection: Connection, what: Recipe | Chunk) -> None:
        try:
            connection.send(what)
        except (BrokenPipeError, ConnectionResetError):
            raise self._died(connection) from None

    def _receive(self, connection: Connection) -> Part:
        try:
            reply = connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._died(connection) from None
        if isinstance(reply, Part):
            return reply
        kind, message, hint = reply
        raise getattr(errors, kind)(message, hint) if kind else RuntimeError(f"in a tokenizing process:\n{message}")

    def _died(self, connection: Connection) -> errors.WorkerError:
        code = self._processes[connection].wait()
        return errors.WorkerError(
            f"a tokenizing process died {f'of signal {-code}' if code < 0 else f'with exit code {code}'}",
            f"{OUT_OF_MEMORY if code == -signal.SIGKILL else ''}what was done so far is kept",
        )


def serve(descriptor: int) -> None:
    """The life of a process: a recipe first, then chunks until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(descriptor)
    try:
        encoder = Encoder(connection.recv())
        while True:
            connection.send(_reply(encoder, connection.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _reply(encoder: Encoder, chunk: Chunk) -> Any:
    try:
        return encoder.chunk(chunk)
    except errors.TorchstoneError as error:
        return type(error).__name__, error.message, error.hint
    except Exception:
        return None, traceback.format_exc(), None

"""Processes that encode chunks, and return the results in order.

The processes are plain interpreters that talk over a pipe. Nothing of the parent is imported again or copied: a script
without a main guard works, threads and CUDA do not matter, and each process holds a tokenizer and little else. When the
parent ends, however it ends, the processes end too: on Linux at once, elsewhere when they find the pipe closed.
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
from torchstone.data.encode import EncodedChunk, Encoder, EncodingConfig
from torchstone.data.sources import Chunk
from torchstone.parent_process import end_with_parent

MAIN = "import sys; from torchstone.data.tokenizer_pool import serve; serve(*map(int, sys.argv[1:]))"
HINTS = {
    signal.SIGKILL: "out of memory is the usual reason: use fewer processes (--data.prepare_workers 1); ",
    signal.SIGPROF: "the chat template does not end for some row; ",
}
# Results per process that may wait for an earlier one.
MAX_AHEAD = 4


class TokenizerPool:
    def __init__(self, config: EncodingConfig, num_processes: int, stop_on_bad_row: bool = False) -> None:
        self._processes: dict[Connection, subprocess.Popen[bytes]] = {}
        # The children import the same modules: they get this process's sys.path and, with -P, not the current folder.
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }
        for _ in range(num_processes):
            own_end, child_end = Pipe()
            command = [sys.executable, "-P", "-c", MAIN, str(child_end.fileno()), str(os.getpid())]
            process = subprocess.Popen(
                command,
                pass_fds=[child_end.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            child_end.close()
            self._processes[own_end] = process
        self._encoder_arguments = config, stop_on_bad_row

    def encode(self, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, EncodedChunk]]:
        """Yields every chunk, without its payload, and its result, in order."""
        for connection in self._processes:
            self._send(connection, self._encoder_arguments)
        idle, busy = list(self._processes), dict[Connection, int]()
        pending: dict[int, Chunk] = {}
        results: dict[int, EncodedChunk] = {}
        next_out, last_in = 0, -1
        chunk = next(chunks, None)
        while chunk is not None or busy:
            while chunk is not None and idle and len(pending) < MAX_AHEAD * len(self._processes):
                last_in += 1
                connection = idle.pop()
                self._send(connection, chunk)
                busy[connection], pending[last_in] = last_in, chunk._replace(payload=b"")
                chunk = next(chunks, None)
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                results[busy.pop(ready)] = self._receive(ready)
                idle.append(ready)
            while next_out in results:
                yield pending.pop(next_out), results.pop(next_out)
                next_out += 1

    def close(self) -> None:
        for connection in self._processes:
            connection.close()
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _send(self, connection: Connection, message: tuple[EncodingConfig, bool] | Chunk) -> None:
        try:
            connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise self._death_error(connection) from None

    def _receive(self, connection: Connection) -> EncodedChunk:
        try:
            reply = connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._death_error(connection) from None
        if isinstance(reply, EncodedChunk):
            return reply
        kind, message, hint = reply
        raise getattr(errors, kind)(message, hint) if kind else RuntimeError(f"in a tokenizing process:\n{message}")

    def _death_error(self, connection: Connection) -> errors.WorkerError:
        code = self._processes[connection].wait()
        return errors.WorkerError(
            f"a tokenizing process died {f'of signal {-code}' if code < 0 else f'with exit code {code}'}",
            f"{next((hint for number, hint in HINTS.items() if code == -number), '')}what was done so far is kept",
        )


def serve(descriptor: int, parent: int) -> None:
    """The main function of a process: receives a config, then chunks until the pipe closes."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(descriptor)
    try:
        encoder = Encoder(*connection.recv())
        while True:
            connection.send(_reply(encoder, connection.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _reply(encoder: Encoder, chunk: Chunk) -> Any:
    try:
        return encoder.encode_chunk(chunk)
    except errors.TorchstoneError as error:
        kind = next(kind for kind in type(error).__mro__ if hasattr(errors, kind.__name__))
        return kind.__name__, error.message, error.hint
    except MemoryError as error:
        return (
            "OutOfMemoryError",
            f"a tokenizing process is out of memory: {error}",
            "use fewer: --data.prepare_workers 1",
        )
    except Exception:
        return None, traceback.format_exc(), None

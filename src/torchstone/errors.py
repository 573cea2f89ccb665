"""Errors that a user can act on, each with its exit code and a hint.

Any other exception that escapes a command is a bug in Torchstone and keeps its traceback.
"""

import errno

# How torch and the C library say that memory is used up; for the CPU torch has no exception type.
OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator",
    "Cannot allocate memory",
    "can't allocate memory",
    "CUDA out of memory",
    # CUDA itself, Triton when it loads a kernel, and cuBLAS.
    "CUDA error: out of memory",
    # When expandable segments grow.
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


class TorchstoneError(Exception):
    """`hint` says what to do; the process exits with `exit_code`."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class UsageError(TorchstoneError):
    """A wrong command line, configuration or model folder."""

    exit_code = 2


class DataError(TorchstoneError):
    """A row, file or split that cannot be trained on."""

    exit_code = 3


class OutOfMemoryError(TorchstoneError):
    """The model or a step does not fit on the device."""

    exit_code = 4


class NumericalError(TorchstoneError):
    """A loss, gradient or collective with a wrong value, such as NaN."""

    exit_code = 5


class CheckpointError(TorchstoneError):
    """A checkpoint that is damaged, or does not fit this run."""

    exit_code = 6


class WorkerError(TorchstoneError):
    """Another process of the run died, or cannot be reached."""

    exit_code = 7


class MachineError(TorchstoneError):
    """A machine that cannot train, or not as it should."""

    exit_code = 8


class StoppedBySignal(TorchstoneError):
    """A signal stopped the run; its state is saved, and the same command resumes it."""

    exit_code = 75


def first_line(message: object, default: str | None = None) -> str:
    """The first line of an error's text. Without one: `default`, or the name of its type."""
    lines = str(message).strip().splitlines()
    if lines:
        return lines[0]
    return type(message).__name__ if default is None else default


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is an out-of-memory error of Python, the system or torch."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    is_torch = isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)
    return isinstance(error, MemoryError) or is_torch

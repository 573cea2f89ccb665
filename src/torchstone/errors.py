"""The errors a person may meet, each with its exit code and a hint.

Anything else that escapes a command is a fault of Torchstone and keeps its traceback.
"""


class TorchstoneError(Exception):
    """Something the user can act on. `hint` says what to do; `exit_code` is what the process ends with."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class UsageError(TorchstoneError):
    """Wrong command line, configuration, or a model folder that is not one."""

    exit_code = 2


class DataError(TorchstoneError):
    """A row, file or split that cannot be trained on."""

    exit_code = 3


class OutOfMemoryError(TorchstoneError):
    """The step did not fit on the device."""

    exit_code = 4


class NumbersError(TorchstoneError):
    """A loss or gradient that is NaN or infinite."""

    exit_code = 5


class CheckpointError(TorchstoneError):
    """A checkpoint that is damaged, foreign, or does not fit this run."""

    exit_code = 6


class WorkerError(TorchstoneError):
    """A process that worked for this one died."""

    exit_code = 7


class StoppedBySignal(TorchstoneError):
    """A signal asked the run to end; the state is saved and the same command goes on from it."""

    exit_code = 75

"""The code of the entry points in scripts/."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torchstone import heartbeat
from torchstone.config.load import extract_flags
from torchstone.errors import TorchstoneError, UsageError


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Prints an error and exits with its code, as `torchstone` does."""
    try:
        yield
    except TorchstoneError as error:
        heartbeat.print_line(f"error: {error}")
        sys.exit(error.exit_code)


def extract_script_flags(
    args: list[str], names: Collection[str], switches: Collection[str] = ()
) -> tuple[list[tuple[str, str]], list[str]]:
    """Takes a script's own flags out of a command line; returns them, with underscores, and the remaining arguments."""
    flags, remaining = extract_flags(
        args, lambda name: name in names or name in switches, lambda name: name in switches
    )
    for arg in remaining:
        name = arg.partition("=")[0].removeprefix("--").replace("-", "_") if arg.startswith("--") else ""
        # --no-auto-batch-size is a flag of train.
        similar = difflib.get_close_matches(name, [] if name.startswith("no_") else [*names, *switches], 1, cutoff=0.8)
        if similar:
            raise UsageError(
                f"unknown option {arg.partition('=')[0]}", f"did you mean --{similar[0].replace('_', '-')}?"
            )
    for name, value in flags:
        if not value:
            raise UsageError(f"--{name} needs a value", f"write --{name} VALUE or --{name}=VALUE")
    return [(name.replace("-", "_"), value) for name, value in flags], remaining

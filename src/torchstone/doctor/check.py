"""One check of `torchstone doctor`, and what it finds.

A check is a function that tries something and returns a `Finding`: a line for people, the same as figures, and, if
something is wrong, a line to type. An error that it did not expect fails that check, and the others still run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torchstone import heartbeat
from torchstone.errors import TorchstoneError, first_line

# A warning does not prevent training. What is skipped cannot run here, and need not.
Status = Literal["pass", "skip", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    status: Status
    text: str
    fix: str | None = None
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckResult:
    """What a check found, on one rank. `values` are bytes, seconds and other plain figures, not rounded."""

    name: str
    status: Status
    found: str
    fix: str | None
    values: dict[str, Any]


def ok(text: str, **values: Any) -> Finding:
    return Finding("pass", text, None, values)


def skipped(text: str, **values: Any) -> Finding:
    return Finding("skip", text, None, values)


def warning(text: str, fix: str, **values: Any) -> Finding:
    return Finding("warn", text, fix, values)


def failed(text: str, fix: str, **values: Any) -> Finding:
    return Finding("fail", text, fix, values)


def report_bug(text: str) -> Finding:
    return failed(text, "torchstone env    # report this error with what it prints")


def run_check(
    name: str, function: Callable[..., Finding], *args: Any, on_error: Callable[[str], Finding] = report_bug
) -> CheckResult:
    """`on_error` makes a finding of an error that the check did not expect."""
    heartbeat.report_phase(f"checking {name}")
    try:
        finding = function(*args)
    except TorchstoneError as error:
        finding = on_error(error.message) if error.hint is None else failed(error.message, error.hint)
    except Exception as error:
        # Drivers, compilers and packages raise all kinds of errors.
        finding = on_error(f"{type(error).__name__}: {first_line(error, 'no message')}")
    return CheckResult(name, finding.status, finding.text, finding.fix, finding.values)


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"

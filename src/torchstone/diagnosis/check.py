"""A check of `torchstone diagnose`: what it measures, what it found, and what to do about it.

A check is a function of the `Diagnosis` (session.py) that returns a `Finding`. It measures against something that does
not share the code in question: the definition written out in a few lines, Transformers, or the raw rows of the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torchstone.diagnosis.session import Diagnosis

Status = Literal["pass", "warn", "fail", "skip"]
# critical: what is trained is not what was asked for. major: it trains, but worse or on less. minor: worth a look.
Severity = Literal["critical", "major", "minor"]
Group = Literal["data", "step", "backward", "optimizer", "ranks", "model", "learning"]


@dataclass(frozen=True)
class Finding:
    """What a check found.

    `measured` and `limit` are for people, `values` has the unrounded numbers behind them. Unless it passed, `cause`
    says what is wrong, `source` the config key, file:line or module that it comes from, `next_step` what to do.
    """

    status: Status
    measured: str
    limit: str = ""
    cause: str | None = None
    source: str | None = None
    next_step: str | None = None
    values: dict[str, float] = field(default_factory=dict)
    # Set for a check that applies but was skipped for lack of memory.
    is_missing: bool = False

    def with_cause(self, cause: str, source: str, next_step: str, status: Status = "fail") -> Finding:
        """The same measurement, but not passed."""
        return replace(self, status=status, cause=cause, source=source, next_step=next_step)


@dataclass(frozen=True)
class Check:
    """`title` says what must hold; `meaning` what it means for training if it does not."""

    name: str
    group: Group
    severity: Severity
    title: str
    meaning: str
    function: Callable[[Diagnosis], Finding]


class SkipCheck(Exception):
    """A check that does not apply to this run, and why."""


class MissingCheck(SkipCheck):
    """A check that applies, but that cannot be run for lack of memory."""

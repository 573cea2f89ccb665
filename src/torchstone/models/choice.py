"""The value of a setting in a run, and the reason for it."""

from __future__ import annotations

from typing import Any, NamedTuple

AS_REQUESTED = "as requested"


class Choice(NamedTuple):
    value: Any
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.value} ({self.reason}{', ' if self.detail else ''}{self.detail})"

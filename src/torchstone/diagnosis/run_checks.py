"""Runs the checks one after the other, on all ranks together.

A check must not end the diagnosis: an exception becomes a failure that says so. A check that runs out of memory counts
as missing in the verdict. Every rank has a finding of its own; the worst one counts. An error of one rank alone while
ranks exchange tensors does end it: the others wait for that rank until the timeout of the process group.
"""

from __future__ import annotations

import difflib
import math
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torchstone import heartbeat
from torchstone.diagnosis.check import Check, Finding, MissingCheck, SkipCheck, Status
from torchstone.diagnosis.session import Diagnosis
from torchstone.errors import StoppedBySignal, UsageError, WorkerError, first_line
from torchstone.training.checks import free_device_memory, out_of_memory_reason, ran_out_of_memory

# The worst one counts. A check that a rank skipped has no result.
ORDER: tuple[Status, ...] = ("fail", "warn", "skip", "pass")


@dataclass(frozen=True)
class CheckResult:
    """`rank`: the one that found it, if not all ranks did."""

    check: Check
    finding: Finding
    seconds: float
    rank: int | None = None

    def to_dict(self) -> dict[str, Any]:
        check, finding = self.check, self.finding
        return {
            "name": check.name,
            "group": check.group,
            "severity": check.severity,
            "status": finding.status,
            "is_missing": finding.is_missing,
            "title": check.title,
            "meaning": check.meaning,
            "measured": finding.measured,
            "limit": finding.limit,
            "cause": finding.cause,
            "source": finding.source,
            "next_step": finding.next_step,
            # JSON has neither NaN nor infinity.
            "values": {name: value if math.isfinite(value) else None for name, value in finding.values.items()},
            "rank": self.rank,
            "seconds": self.seconds,
        }


def select_checks(checks: Sequence[Check], only: Collection[str]) -> list[Check]:
    """The checks named in `only`, by their own name or that of their group; all if it is empty."""
    known = [*(check.name for check in checks), *dict.fromkeys(check.group for check in checks)]
    for name in only:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            suggestion = f"did you mean {close[0]}? " if close else ""
            raise UsageError(f"there is no check {name!r}", f"{suggestion}torchstone diagnose --list has their names")
    return [check for check in checks if not only or {check.name, check.group} & {*only}]


def run_checks(
    diagnosis: Diagnosis, checks: Sequence[Check], on_result: Callable[[CheckResult], None] = lambda result: None
) -> list[CheckResult]:
    """Runs the checks in order. All ranks must call it; all get the same results but for the seconds."""
    results = []
    for check in checks:
        heartbeat.report_phase(f"checking {check.name}")
        start = time.perf_counter()
        finding = run_check(diagnosis, check)
        findings = diagnosis.ctx.all_gather_object(finding)
        worst = min(findings, key=lambda each: ORDER.index(each.status))
        rank = findings.index(worst) if any(each.status != worst.status for each in findings) else None
        if worst.status == "fail":
            diagnosis.failed[check.name] = worst
        results.append(CheckResult(check, worst, time.perf_counter() - start, rank))
        on_result(results[-1])
        diagnosis.run.model.clear_gradients()
        if diagnosis.device.type == "cuda":
            free_device_memory(diagnosis.device)
    return results


def run_check(diagnosis: Diagnosis, check: Check) -> Finding:
    """The finding of this rank."""
    try:
        if check.group != "data":
            diagnosis.require("finite")
        return check.function(diagnosis)
    except SkipCheck as reason:
        return Finding("skip", str(reason), is_missing=isinstance(reason, MissingCheck))
    except StoppedBySignal:
        # The loop that trained for the check says how its run is resumed.
        message = f"stopped by a signal while checking {check.name}"
        raise StoppedBySignal(message, "nothing is left of it; the same command starts again") from None
    except WorkerError:
        raise
    except Exception as error:
        if ran_out_of_memory(error):
            return Finding("skip", f"out of memory: {out_of_memory_reason(error)}", is_missing=True)
        return _could_not_run(check, error)


def _could_not_run(check: Check, error: Exception) -> Finding:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return Finding(
        "fail",
        "the check could not run",
        cause=f"{type(error).__name__}: {first_line(error, '')}",
        source=f"{place.filename}:{place.lineno}",
        next_step="training itself may fail there: run torchstone train for a step; otherwise please report it",
    )

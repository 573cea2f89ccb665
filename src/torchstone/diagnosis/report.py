"""The result of a diagnosis: as lines of text, as JSON, and as a verdict that says what to look at next."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchstone import __version__
from torchstone.diagnosis.check import Group, Severity
from torchstone.diagnosis.run_checks import CheckResult
from torchstone.errors import CheckpointError, DataError, NumericalError, TorchstoneError

SEVERITIES: tuple[Severity, ...] = ("critical", "major", "minor")
ERRORS: dict[Group, type[TorchstoneError]] = {"data": DataError, "model": CheckpointError}
# What a failed group means, and where to look first.
WHERE_TO_LOOK: dict[Group, str] = {
    "data": "the data is not what you want to train on: look at it with torchstone inspect-data",
    "ranks": "the ranks do not divide the work as they should: check parallel.* and the data loader first",
    "step": "the loss is not what it should be: repair it first, because everything that is trained follows from it",
    "backward": "the loss is right but the update is not: look at the backward pass and at the reduction over ranks",
    "optimizer": "the gradients are not applied as configured: look at optim.* and training.precision",
    "model": "what is computed or saved is not the model that you named: look at model.* and the checkpoint",
    "learning": "the model does not learn: check optim.learning_rate, what is trained (tuning.*), then the optimizer",
}  # fmt: skip
WHAT_REMAINS = (
    "no check has found a mistake in data, loss, gradients, update or saved model. If results still disappoint, look "
    "at the hyperparameters (learning rate, batch size), at the data and its loss mask (torchstone inspect-data), and "
    "at how the model starts"
)
HOW_TO_COMPLETE = (
    "run the missing checks with more memory: on more or larger GPUs, or with a smaller model of the same kind "
    "(--model.depth 2 without model.path)"
)
COMPARE = "if other code trains on the same data and settings, compare its losses step by step (metrics.jsonl)"
LABEL_WIDTH, NAME_WIDTH = 6, 20


@dataclass(frozen=True)
class DiagnosisReport:
    """`ranks`: of the run that was checked. `left_out`: names of checks that were not asked for."""

    results: Sequence[CheckResult]
    ranks: int
    left_out: Sequence[str] = ()

    def with_status(self, status: str) -> list[CheckResult]:
        """The worst first, and of equal ones the earliest."""
        results = [result for result in self.results if result.finding.status == status]
        return sorted(results, key=lambda result: SEVERITIES.index(result.check.severity))

    @property
    def missing(self) -> list[str]:
        """Checks that apply to this run, but for which there was no memory."""
        return [result.check.name for result in self.results if result.finding.is_missing]

    @property
    def verdict(self) -> str:
        if self.missing and not self.with_status("fail"):
            return "incomplete"
        return next((status for status in ("fail", "warn", "pass") if self.with_status(status)), "skip")

    @property
    def error(self) -> TorchstoneError | None:
        """The error of the worst failed check, whose exit code is that of the command."""
        failed = self.with_status("fail")
        if not failed:
            return None
        kind = ERRORS.get(failed[0].check.group, NumericalError)
        return kind(self.summary, f"begin with {failed[0].check.name}: {failed[0].finding.cause}")

    @property
    def summary(self) -> str:
        failed, warned = self.with_status("fail"), self.with_status("warn")
        names = ", ".join(result.check.name for result in failed or warned)
        ran = len([result for result in self.results if result.finding.status != "skip"])
        missing = f"; {len(self.missing)} could not run: {', '.join(self.missing)}" if self.missing else ""
        if failed:
            return f"{len(failed)} of {ran} checks failed: {names}{missing}"
        if not ran:
            return f"nothing was checked: every check was skipped{missing}"
        warnings = f", {len(warned)} with a warning: {names}" if warned else ""
        return f"{ran} of {ran} checks passed{warnings}{missing}"

    @property
    def next_steps(self) -> list[str]:
        failed, warned = self.with_status("fail"), self.with_status("warn")
        if not failed:
            steps = [f"{each.check.name}: {each.finding.next_step}" for each in warned]
            if self.missing:
                return [*steps, HOW_TO_COMPLETE]
            if self.left_out:
                return [*steps, f"these are only some of the checks: {len(self.left_out)} were not run"]
            is_critical = any(each.check.severity == "critical" for each in warned)
            return steps if is_critical else [*steps, WHAT_REMAINS]
        groups = dict.fromkeys(result.check.group for result in failed)
        return [*(WHERE_TO_LOOK[group] for group in groups), *([COMPARE] if "learning" in groups else [])]

    def to_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "summary": self.summary,
            "next_steps": self.next_steps,
            "exit_code": 0 if self.error is None else self.error.exit_code,
            "version": __version__,
            "ranks": self.ranks,
            "left_out": list(self.left_out),
            "checks": [result.to_dict() for result in self.results],
        }


def result_lines(result: CheckResult) -> Iterator[str]:
    """A line for a check, and the details below it unless it passed; nothing for one that was skipped."""
    finding, check = result.finding, result.check
    if finding.status == "skip":
        return
    limit = f" (limit {finding.limit})" if finding.limit and finding.status != "pass" else ""
    rank = f" on rank {result.rank}" if result.rank is not None else ""
    yield from _wrap(
        f"{finding.status.upper():<{LABEL_WIDTH}}{check.name:<{NAME_WIDTH}}{finding.measured}{limit}{rank}"
    )
    if finding.status == "pass":
        return
    details = {
        "severity": f"{check.severity}: {check.meaning}",
        "cause": finding.cause,
        "where": finding.source,
        "next": finding.next_step,
    }
    for name, text in details.items():
        if text:
            yield from _wrap(f"{'':<{LABEL_WIDTH}}{name:<{NAME_WIDTH}}{text}")


def verdict_lines(report: DiagnosisReport) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for result in report.with_status("skip"):
        reasons.setdefault(result.finding.measured, []).append(result.check.name)
    for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        yield from _wrap(f"{'SKIP':<{LABEL_WIDTH}}{', '.join(names)}: {reason}")
    yield ""
    yield from _wrap(f"{'verdict':<{LABEL_WIDTH + NAME_WIDTH}}{report.verdict.upper()}: {report.summary}")
    for number, step in enumerate(report.next_steps):
        yield from _wrap(f"{'' if number else 'next':<{LABEL_WIDTH + NAME_WIDTH}}{step}")


def _wrap(text: str) -> list[str]:
    width = max(80, min(140, shutil.get_terminal_size((120, 24)).columns))
    indent = " " * (LABEL_WIDTH + NAME_WIDTH)
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)

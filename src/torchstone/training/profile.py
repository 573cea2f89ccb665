"""Profiles steps of a run (`observe.profile`) with torch.profiler: a Chrome trace and a table of kernel time by kind.

Only rank 0 profiles. The profiler records what runs and changes nothing of it; the profiled steps take a little longer.
Validations and saves between two profiled steps are profiled too, and the table says so.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from torchstone.atomic import write_text
from torchstone.config.schema import parse_steps
from torchstone.observe.kernel_times import kernel_table, read_trace
from torchstone.training.run import Callback, Run
from torchstone.wording import plural

# Steps that compile and warm up.
SKIPPED_STEPS = 2


class StepProfiler(Callback):
    """Profiles the steps of `observe.profile`. `close` ends it, also after an error."""

    def __init__(self, run: Run) -> None:
        steps = parse_steps(run.config.observe.profile or "")
        assert steps is not None, "checked with the config"
        first, last = steps
        if first is None:
            first = run.progress.step + 1 + SKIPPED_STEPS
            last = first + last - 1
        self.run, self.first, self.last = run, first, last
        self._profiler: profile | None = None
        self._started, self._is_done = 0.0, False
        self._extra: Counter[str] = Counter()
        total = run.schedule.total_steps
        if last <= run.progress.step or (total is not None and first > total):
            self._is_done = True
            run.console.warn(
                f"steps {first} to {last} are not profiled: this run goes from step {run.progress.step + 1} to "
                f"{total or 'any'}"
            )

    def on_step_begin(self, run: Run, step: int) -> None:
        if self._is_done:
            return
        if step > self.last:
            self.close()
        elif step >= self.first and self._profiler is None:
            # A resumed run may begin after the first step to profile.
            self.first = step
            self._start()

    def on_validation(self, run: Run, loss: float) -> None:
        self._extra["validation"] += self._is_profiling

    def on_checkpoint(self, run: Run, folder: Path) -> None:
        self._extra["save"] += self._is_profiling

    @property
    def _is_profiling(self) -> bool:
        return self._profiler is not None and not self._is_done

    def close(self) -> None:
        """Writes what has been profiled. The run may have ended before the last step to profile."""
        if self._is_done:
            return
        self._is_done = True
        if self._profiler is not None:
            self._synchronize()
            seconds = time.perf_counter() - self._started
            self._profiler.stop()
            if self.run.progress.step >= self.first:
                try:
                    self._write(self._profiler, min(self.run.progress.step, self.last), seconds)
                except (OSError, ValueError, LookupError) as error:
                    self.run.console.warn(f"the profile could not be written: {error}")
                return
        self.run.console.warn(f"steps {self.first} to {self.last} were not profiled: the run ended before them")

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.run.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        else:
            # Otherwise kineto, the profiler's library, complains on every CPU that there is no GPU.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profiler = profile(activities=activities)
        self._profiler.start()
        self._synchronize()
        self._started = time.perf_counter()

    def _synchronize(self) -> None:
        if self.run.device.type == "cuda":
            torch.cuda.synchronize(self.run.device)

    def _write(self, profiler: profile, last: int, seconds: float) -> None:
        first, folder = self.first, self.run.output_dir / "profile"
        folder.mkdir(exist_ok=True)
        trace = folder / f"steps-{first}-{last}.json.gz"
        profiler.export_chrome_trace(str(trace))
        extras = [plural(count, what) for what, count in self._extra.items() if count]
        extra = f", with {' and '.join(extras)}" if extras else ""
        table = kernel_table(read_trace(trace), first, last, seconds, extra)
        write_text(trace.with_name(f"steps-{first}-{last}.txt"), f"{table}\n")
        self.run.console.info(table)
        if last < self.last:
            self.run.console.warn(f"steps {last + 1} to {self.last} were not profiled: the run ended before them")
        self.run.console.info(f"trace for https://ui.perfetto.dev or chrome://tracing: {trace}")

"""What was measured on this machine, for the next run of the same kind: one file per kind of run.

The key has everything that changes the memory or the time of a step. What is free on the device is no part of it: the
bytes are kept, and compared with what is free in each run. A file that is damaged, or of another key, is a miss.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchstone.atomic import read_json_or_empty, write_text
from torchstone.batchsize.probe import Probe
from torchstone.batchsize.search import Measurement
from torchstone.errors import OutOfMemoryError
from torchstone.user_cache import user_cache

# Free memory varies a little.
MUCH_MORE = 1.05
# The size of a step with one short row.
NO_SIZE = 0


class Entry(NamedTuple):
    """A step with `micro_batches` micro-batches of a size: its bytes (None: it ran out of memory), the seconds of one
    of them, and the memory that was there."""

    size: int
    micro_batches: int
    used: int | None
    seconds: float | None
    memory: int


class CachedProbe:
    """A probe whose measurements are kept in a file, unless `is_enabled` is false. All ranks make one together."""

    def __init__(self, probe: Probe, key: Mapping[str, Any], is_enabled: bool, log: Callable[[str], None]) -> None:
        self.probe, self.key, self.is_enabled, self.log = probe, key, is_enabled, log
        # Rank 0 reads for all of them, so that they agree.
        entries = read_entries(key, log) if is_enabled and probe.ranks.is_main else []
        self.entries: list[Entry] = probe.ranks.all_gather_object(entries)[0]

    def measure(self, size: int) -> Measurement:
        return self._measure(size, lambda: self.probe.measure(size))

    def base_load(self) -> float:
        """The load of a step with one short row."""
        return self._measure(NO_SIZE, self.probe.measure_base).load

    def _measure(self, size: int, measure: Callable[[], tuple[int | None, Measurement]]) -> Measurement:
        # What ran out of memory in a smaller size does in this one.
        failed = (each for each in self.entries if each.used is None and NO_SIZE < each.size <= size)
        entry = min(failed, default=self.entry(size))
        if entry is not None and not self._is_outdated(entry):
            return self.probe.from_cache(entry.used, entry.seconds)
        try:
            used, measurement = measure()
        except OutOfMemoryError:
            # One of several ranks, which ends here: the next start does not try it again.
            self._add(size, None, None)
            if self.is_enabled:
                write_entries(self.key, self.entries, self.log)
            raise
        self._add(size, used, None if used is None else measurement.seconds)
        return measurement

    def entry(self, size: int) -> Entry | None:
        count = self._micro_batches(size)
        return next((each for each in self.entries if (each.size, each.micro_batches) == (size, count)), None)

    def _micro_batches(self, size: int) -> int:
        return self.probe.micro_batches(max(1, size))

    def _is_outdated(self, entry: Entry) -> bool:
        """Whether it ran out of memory, and there is clearly more now, on any rank."""
        has_more = int(self.probe.budget.memory > MUCH_MORE * entry.memory)
        return entry.used is None and bool(self.probe.ranks.all_reduce_max_each([has_more])[0])

    def _add(self, size: int, used: int | None, seconds: float | None) -> None:
        count = self._micro_batches(size)
        self.entries = [each for each in self.entries if (each.size, each.micro_batches) != (size, count)]
        self.entries.append(Entry(size, count, used, seconds, self.probe.budget.memory))

    def save(self) -> None:
        if self.is_enabled and self.probe.step_count and self.probe.ranks.is_main:
            write_entries(self.key, self.entries, self.log)

    def add_out_of_memory(self, largest: int) -> None:
        """Sizes above `largest` have run out of memory in a step, whatever was measured. The smallest size is tried
        again: smaller micro-batches are parts of it."""
        largest = max(1, largest)
        for size in sorted({largest + 1} | {each.size for each in self.entries if each.size > largest}):
            self._add(size, None, None)
        if self.probe.ranks.is_main:
            write_entries(self.key, self.entries, self.log)

    def describe(self, seconds: float) -> str:
        """How the measurements were made, in words."""
        if not self.probe.step_count:
            return f"in {seconds:.1f} s, all from the cache ({cache_file(self.key)})"
        steps = f"{self.probe.step_count} steps, {self.probe.oom_count} out of memory, in {seconds:.1f} s"
        return f"{steps}, {f'cached in {cache_file(self.key)}' if self.is_enabled else 'not cached'}"


def cache_file(key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(_text(key).encode()).hexdigest()
    return user_cache() / "auto_batch_cache" / f"{digest[:32]}.json"


def read_entries(key: Mapping[str, Any], warn: Callable[[str], None]) -> list[Entry]:
    file = cache_file(key)
    if not file.is_file():
        return []
    content = read_json_or_empty(file)
    try:
        entries = [Entry(*map(each.__getitem__, Entry._fields)) for each in content["measured"]]
        is_ours = _text(content["key"]) == _text(key)
        if is_ours and all(_is_valid(entry) for entry in entries):
            return entries
    except (AttributeError, KeyError, TypeError, ValueError):
        is_ours = True
    warn(f"{file} is {'damaged' if is_ours else 'of another run'}: measuring again")
    return []


def write_entries(key: Mapping[str, Any], entries: list[Entry], warn: Callable[[str], None]) -> None:
    file = cache_file(key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps({"key": key, "measured": [entry._asdict() for entry in entries]}, indent=2) + "\n")
    except OSError as error:
        warn(f"{file} could not be written: {error.strerror}")


def _is_valid(entry: Entry) -> bool:
    """Raises TypeError for an entry that has no numbers."""
    counts = [entry.size + 1, entry.micro_batches, entry.memory, 1 if entry.used is None else entry.used]
    seconds = 1.0 if entry.used is None else entry.seconds
    is_time = isinstance(seconds, int | float) and 0 < seconds < math.inf
    return is_time and all(type(count) is int and count > 0 for count in counts)


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True, default=str)

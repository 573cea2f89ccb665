"""Selects modules by PEFT's rules: `all-linear`, a pattern for the whole name, or the ends of names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torchstone.errors import UsageError

ALL_LINEAR = "all-linear"
PATTERN_CHARACTERS = frozenset("*+?[](){}|^$\\")


def match_modules(key: str, targets: Sequence[str], modules: Iterable[str]) -> list[str]:
    """The `modules` that `targets` selects. A target that selects none is an error of the setting `key`."""
    modules = list(modules)
    if list(targets) == [ALL_LINEAR]:
        return modules
    selected, unknown = set[str](), list[str]()
    for target in targets:
        matches = {module for module in modules if _matches(key, target, module)}
        unknown += [] if matches else [target]
        selected |= matches
    if unknown:
        ends = dict.fromkeys(module.rpartition(".")[2] for module in modules)
        raise UsageError(f"{key}: {', '.join(unknown)} selects nothing", f"it can select {', '.join(ends)}")
    return [module for module in modules if module in selected]


def _matches(key: str, target: str, module: str) -> bool:
    if PATTERN_CHARACTERS.isdisjoint(target):
        return module == target or module.endswith(f".{target}")
    try:
        return re.fullmatch(target, module) is not None
    except re.error as error:
        raise UsageError(f"{key}: {target!r} is not a regular expression: {error}") from None

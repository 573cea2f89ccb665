"""Callbacks of one function."""

from __future__ import annotations

from collections.abc import Callable

from torchstone.training.run import Callback


def on(**hooks: Callable[..., object]) -> Callback:
    """`on(step=function)` is a callback with `function` as its `on_step`; the other hooks likewise."""
    methods = {f"on_{name}": staticmethod(function) for name, function in hooks.items()}
    # A run looks for hooks in the class.
    return type("Hooks", (Callback,), methods)()

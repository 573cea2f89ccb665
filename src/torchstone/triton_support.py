"""Whether Triton works here. Compiled blocks and the kernels of ours need it; each has another way without it."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torchstone.errors import first_line


@cache
def triton_error() -> str | None:
    """Why Triton's kernels cannot run on the GPU; None if they can."""
    if find_spec("triton") is None:
        return "triton is not installed"
    try:
        from triton.runtime import driver

        # Builds what launches kernels, for which it needs a C compiler and the headers of Python.
        driver.active.get_current_device()
    except Exception as error:
        # What it runs (compilers, drivers) raises all kinds of errors.
        return f"triton does not work here: {first_line(error)}"
    return None

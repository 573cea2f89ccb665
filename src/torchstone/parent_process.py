"""How a child process notices that the process that started it is gone.

A process that is killed cannot tell its children. On Linux the kernel sends them a signal instead. Before a child asks
for it, its parent may be dead already, so it must compare its parent with the one that it was told.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# From linux/prctl.h.
PR_SET_PDEATHSIG = 1


def request_death_signal(number: signal.Signals) -> bool:
    """Makes the kernel send this process `number` when its parent dies. Returns whether the kernel can (Linux)."""
    return sys.platform == "linux" and ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) == 0


def is_descendant_of(pid: int) -> bool:
    """Whether this process is a child of a living process, directly or with a shell in between.

    A dead process has no children, even while it is a zombie.
    """
    if os.getppid() == pid:
        return True
    import psutil

    return any(parent.pid == pid for parent in psutil.Process().parents())


def end_with_parent(pid: int) -> None:
    """Kills this process when its parent `pid` dies, or at once if it is dead. Only Linux notices a later death."""
    request_death_signal(signal.SIGKILL)
    if os.getppid() != pid:
        os.kill(os.getpid(), signal.SIGKILL)

"""Read by Python when it starts, in every process of a run whose PYTHONPATH names this folder: plants a fault.

PLANTED is a JSON list of [rank, phase, kind, starts]: when that rank enters a phase whose name begins so, in one of the
first `starts` starts of its workers, it raises, exits, kills or stops itself, or signals the launcher; the moment is
written to PLANTED_AT. Nothing of the package is replaced but the function by which a worker says where it is.
"""

import json
import os
import signal
import time


def plant(faults: list[tuple[int, str, str, int]]) -> None:
    from torchstone import post

    def enter(self: post.Post, phase: str, step: int = 0) -> None:
        say(self, phase, step)
        for rank, where, kind, starts in faults:
            again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
            if os.environ.get("RANK") == str(rank) and phase.startswith(where) and again < starts:
                commit(kind)

    say, post.Post.enter = post.Post.enter, enter  # type: ignore[method-assign]


def commit(kind: str) -> None:
    if "PLANTED_AT" in os.environ:
        with open(os.environ["PLANTED_AT"], "w") as file:
            file.write(str(time.monotonic()))
    if kind == "exception":
        raise ValueError("planted")
    if kind == "exit 37":
        os._exit(37)
    if kind in ("SIGKILL", "SIGSTOP", "SIGABRT"):
        os.kill(os.getpid(), getattr(signal, kind))
    if kind == "loop":
        while True:
            time.sleep(0.01)
    if kind == "kill the launcher":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1.5)
    if kind.startswith("launcher "):
        os.kill(os.getppid(), getattr(signal, kind.removeprefix("launcher ")))
        # It has arrived when what it is passed on to hears it, in the phase that was asked for.
        time.sleep(0.5)


if "PLANTED" in os.environ and "RANK" in os.environ:
    plant(json.loads(os.environ["PLANTED"]))

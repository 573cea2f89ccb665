"""Injects faults. Python runs this file at the start of every process whose PYTHONPATH contains this folder.

INJECT_FAULTS is a JSON list of [rank, phase, kind, attempts]. When that rank reports a phase that begins with `phase`,
in one of the first `attempts` attempts of its launch, it raises, exits, kills or stops itself, or signals the launcher.
The time goes to the file INJECT_TIME. Only the function by which a worker reports its phase is replaced.
"""

import json
import mmap
import os
import signal
import subprocess
import sys
import time


def inject(faults: list[tuple[int, str, str, int]]) -> None:
    from torchstone import heartbeat

    def report_phase(phase: str, step: int = 0) -> None:
        original(phase, step)
        for rank, where, kind, attempts in faults:
            attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
            if os.environ.get("RANK") == str(rank) and phase.startswith(where) and attempt < attempts:
                fail(kind)

    original, heartbeat.report_phase = heartbeat.report_phase, report_phase


def limit_micro_batches(tokens: int) -> None:
    """From now on larger ones run out of memory in this process, after their forward pass."""
    import torch

    from torchstone.parallel import runner

    def micro_batch_loss(module, x, *args, **kwargs):
        loss = original(module, x, *args, **kwargs)
        if x.numel() > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss

    original, runner.micro_batch_loss = runner.micro_batch_loss, micro_batch_loss


def fail(kind: str) -> None:
    if "INJECT_TIME" in os.environ:
        with open(os.environ["INJECT_TIME"], "w") as file:
            file.write(str(time.monotonic()))
    if kind == "exception":
        raise ValueError("injected")
    if kind.startswith("room for "):
        limit_micro_batches(int(kind.removeprefix("room for ")))
    if kind == "out of memory":
        # The kernel refuses it.
        mmap.mmap(-1, 1 << 60)
    if kind.startswith("second launch "):
        # Of the same command, with another learning rate, as a user would type it in another terminal.
        command, file = json.loads(kind.removeprefix("second launch "))
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "INJECT_FAULTS")
        environment = {name: value for name, value in os.environ.items() if name not in names}
        result = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
        with open(file, "w") as output:
            output.write(f"{result.returncode} {result.stderr}")
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
        # The launcher passes it on, and it arrives during this phase.
        time.sleep(0.5)


if "INJECT_FAULTS" in os.environ and "RANK" in os.environ:
    inject(json.loads(os.environ["INJECT_FAULTS"]))

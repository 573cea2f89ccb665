"""Which GPUs there are, how busy they are, and which of them to take.

NVIDIA's management library answers without torch and without a CUDA context, which would take seconds and some hundred
megabytes of every GPU looked at: asking costs a tenth of a second. It counts GPUs as nvidia-smi does, by their place
on the bus, and so do we; CUDA by itself puts the fastest first, so whoever passes a number on has to pass the order on
with it (`worker_environment`). A machine without the library or the driver has no GPUs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchstone.errors import UsageError


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi numbers it; utilisation in percent, memory in bytes."""

    number: int
    utilisation: int
    memory_used: int
    memory_total: int
    name: str
    uuid: str


def found() -> list[Gpu]:
    """The GPUs of this machine that CUDA_VISIBLE_DEVICES allows, in its order."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    # Nothing is asked where nothing may be seen: a broken driver is no obstacle to training on the CPU.
    return visible(of_machine(), allowed) if allowed is None or allowed.strip() not in ("", "-1") else []


def of_machine() -> list[Gpu]:
    """All GPUs, whatever the environment says."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return []
    except pynvml.NVMLError as error:
        raise _no_answer(error) from None
    try:
        return [_look_at(pynvml, number) for number in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        raise _no_answer(error) from None
    finally:
        pynvml.nvmlShutdown()


def visible(devices: Sequence[Gpu], allowed: str | None) -> list[Gpu]:
    """Those that a CUDA_VISIBLE_DEVICES of `allowed` leaves, by CUDA's rules.

    An entry is a number or the beginning of one UUID; the first that names no GPU ends the list, and a GPU named twice
    leaves none. Numbers are read as nvidia-smi counts, which is CUDA's order too where all GPUs are alike or
    CUDA_DEVICE_ORDER is PCI_BUS_ID. Slices of a GPU (MIG) have neither number nor load of their own: refused.
    """
    if allowed is None:
        return list(devices)
    left: list[Gpu] = []
    for entry in allowed.split(","):
        named = _named(entry.strip(), devices)
        if named is None:
            break
        if named in left:
            return []
        left.append(named)
    return left


def choose(spec: str, devices: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that `--gpus` asks for: `all`, numbers (`0,3`), or as many of the least loaded (`auto`, `auto:2`).

    Load is utilisation, then memory used, then the number; the least loaded come sorted by number, others as given.
    """
    spec = spec.strip()
    if not devices:
        raise UsageError(
            f"--gpus {spec}: there are no GPUs to use",
            "nvidia-smi lists those of the machine, CUDA_VISIBLE_DEVICES may hide them; --nproc N trains on the CPU",
        )
    if spec == "all":
        return list(devices)
    if spec == "auto" or spec.startswith("auto:"):
        by_load = sorted(devices, key=lambda gpu: (gpu.utilisation, gpu.memory_used, gpu.number))
        return sorted(by_load[: _how_many(spec, devices)], key=lambda gpu: gpu.number)
    return _numbered(spec, devices)


def worker_environment(gpu: Gpu) -> dict[str, str]:
    """What makes one GPU the only one of a process, and names it in its lines.

    The order goes with the number, whatever order the user has set: the number counts in this one, and a process that
    sees one GPU has no other use for it.
    """
    return {
        "CUDA_VISIBLE_DEVICES": str(gpu.number),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "GPU_RANK": str(gpu.number),
    }


def listed(devices: Sequence[Gpu]) -> str:
    """Their numbers, for a message: `GPU 0`, `GPUs 0, 1, 3`."""
    numbers = ", ".join(str(number) for number in sorted(gpu.number for gpu in devices))
    return f"GPUs {numbers}" if len(devices) > 1 else f"GPU {numbers}"


def _look_at(pynvml: Any, number: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    try:
        utilisation = int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except pynvml.NVMLError_NotSupported:
        # One that does not tell is taken for busy; where none tells, memory decides.
        utilisation = 100
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        used, total = int(memory.used), int(memory.total)
    except pynvml.NVMLError_NotSupported:
        # Some share the memory of the machine.
        used, total = 0, 0
    return Gpu(number, utilisation, used, total, pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle))


def _no_answer(error: Exception) -> UsageError:
    return UsageError(
        f"the NVIDIA driver does not answer: {error}",
        "nvidia-smi should list the GPUs; CUDA_VISIBLE_DEVICES= (empty) trains without them",
    )


def _named(entry: str, devices: Sequence[Gpu]) -> Gpu | None:
    if entry.startswith("MIG-"):
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES names {entry}, a slice of a GPU, and slices cannot be chosen among",
            "train on it in one process: pretrain_main.py, or torchstone train --system.device_id 0",
        )
    if entry.startswith("GPU-"):
        matching = [gpu for gpu in devices if gpu.uuid.startswith(entry)]
    else:
        # As CUDA reads numbers: what follows the digits does not count.
        digits = re.match(r"[+-]?\d+", entry)
        matching = [gpu for gpu in devices if digits and gpu.number == int(digits.group())]
    return matching[0] if len(matching) == 1 else None


def _how_many(spec: str, devices: Sequence[Gpu]) -> int:
    count = spec.removeprefix("auto").removeprefix(":") if spec != "auto" else "1"
    if not (count.isdecimal() and int(count) > 0):
        raise UsageError(f"--gpus {spec}: {count!r} is not a number of GPUs", "auto takes one, auto:2 takes two")
    if int(count) > len(devices):
        raise UsageError(
            f"--gpus {spec}: more than there are: {listed(devices)}", f"auto:{len(devices)} takes them all"
        )
    return int(count)


def _numbered(spec: str, devices: Sequence[Gpu]) -> list[Gpu]:
    by_number = {gpu.number: gpu for gpu in devices}
    chosen: list[Gpu] = []
    for entry in spec.split(","):
        if not entry.strip().isdecimal():
            raise UsageError(f"--gpus {spec}: {entry!r} is no GPU", "write all, auto, auto:2, or numbers as in 0,3")
        gpu = by_number.get(int(entry))
        if gpu is None:
            raise UsageError(
                f"--gpus {spec}: there is no GPU {int(entry)}, only {listed(devices)}",
                "the numbers are those of nvidia-smi, without what CUDA_VISIBLE_DEVICES hides",
            )
        if gpu in chosen:
            raise UsageError(f"--gpus {spec}: GPU {gpu.number} is named twice")
        chosen.append(gpu)
    return chosen

"""Which GPUs the machine has, how busy they are, and which of them to use.

NVIDIA's management library answers in a tenth of a second, without torch and without a CUDA context, which costs
seconds and hundreds of megabytes on every GPU. It numbers GPUs as nvidia-smi does, by their position on the bus. CUDA
puts the fastest first, so `worker_environment` sets the order together with the number. A machine without the library
or the driver has no GPUs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torchstone.errors import UsageError


@dataclass(frozen=True)
class Gpu:
    """A GPU, with the index of nvidia-smi; utilization in percent, memory in bytes."""

    index: int
    utilization: int
    memory_used: int
    memory_total: int
    name: str
    uuid: str


def visible_gpus() -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES allows, in its order."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None and allowed.strip() in ("", "-1"):
        # Does not query the driver: a broken driver must not prevent training on the CPU.
        return []
    return filter_visible(list_gpus(), allowed)


def list_gpus() -> list[Gpu]:
    """All GPUs of the machine."""
    import pynvml

    try:
        with nvml() as library:
            return [_read_gpu(library, index) for index in range(library.nvmlDeviceGetCount())]
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return []
    except pynvml.NVMLError as error:
        raise _driver_error(error) from None


@contextmanager
def nvml() -> Iterator[Any]:
    """NVIDIA's management library."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def filter_visible(gpus: Sequence[Gpu], allowed: str | None) -> list[Gpu]:
    """The GPUs that are visible with CUDA_VISIBLE_DEVICES=`allowed`, by CUDA's rules.

    An entry is a number or the beginning of exactly one UUID. The first entry that names no GPU ends the list; a GPU
    that is named twice makes the list empty. Numbers are as in nvidia-smi; CUDA has the same if all GPUs are equal or
    CUDA_DEVICE_ORDER is PCI_BUS_ID. MIG slices are refused: they have no number and no load of their own.
    """
    if allowed is None:
        return list(gpus)
    visible: list[Gpu] = []
    for entry in allowed.split(","):
        gpu = _find_gpu(entry.strip(), gpus)
        if gpu is None:
            break
        if gpu in visible:
            return []
        visible.append(gpu)
    return visible


def choose(spec: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that `--gpus` asks for: `all`, numbers (`0,3`), or the least loaded (`auto`, `auto:2`).

    Load is utilization, then memory in use, then the index. The least loaded GPUs are sorted by index.
    """
    spec = spec.strip()
    if not gpus:
        raise UsageError(
            f"--gpus {spec}: there are no GPUs to use",
            "check nvidia-smi and CUDA_VISIBLE_DEVICES; --nproc N trains on the CPU",
        )
    if spec == "all":
        return list(gpus)
    if spec == "auto" or spec.startswith("auto:"):
        by_load = sorted(gpus, key=lambda gpu: (gpu.utilization, gpu.memory_used, gpu.index))
        return sorted(by_load[: _auto_count(spec, gpus)], key=lambda gpu: gpu.index)
    return _choose_indices(spec, gpus)


def worker_environment(gpu: Gpu) -> dict[str, str]:
    """Returns variables that make this the only GPU of a process, and its index the label of the log lines.

    CUDA_DEVICE_ORDER is overwritten, because the index is only right in the order of nvidia-smi.
    """
    return {
        "CUDA_VISIBLE_DEVICES": str(gpu.index),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "GPU_RANK": str(gpu.index),
    }


def format_gpus(gpus: Sequence[Gpu]) -> str:
    """The GPUs in a message: `GPU 0`, `GPUs 0, 1, 3`."""
    numbers = ", ".join(str(number) for number in sorted(gpu.index for gpu in gpus))
    return f"GPUs {numbers}" if len(gpus) > 1 else f"GPU {numbers}"


def _read_gpu(pynvml: Any, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    try:
        utilization = int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except pynvml.NVMLError_NotSupported:
        # A GPU of unknown load counts as busy. If all are unknown, memory decides.
        utilization = 100
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        used, total = int(memory.used), int(memory.total)
    except pynvml.NVMLError_NotSupported:
        # Some GPUs share the memory of the machine.
        used, total = 0, 0
    return Gpu(index, utilization, used, total, pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle))


def _driver_error(error: Exception) -> UsageError:
    return UsageError(
        f"the NVIDIA driver does not answer: {error}",
        "check that nvidia-smi lists the GPUs, or train on the CPU with CUDA_VISIBLE_DEVICES= (empty)",
    )


def _find_gpu(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    if entry.startswith("MIG-"):
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES names {entry}, a MIG slice, and only whole GPUs can be chosen",
            "train on the slice in one process: pretrain_main.py, or torchstone train --system.device_id 0",
        )
    if entry.startswith("GPU-"):
        matching = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
    else:
        # CUDA ignores what follows the digits.
        digits = re.match(r"[+-]?\d+", entry)
        matching = [gpu for gpu in gpus if digits and gpu.index == int(digits.group())]
    return matching[0] if len(matching) == 1 else None


def _auto_count(spec: str, gpus: Sequence[Gpu]) -> int:
    count = spec.removeprefix("auto").removeprefix(":") if spec != "auto" else "1"
    if not (count.isdecimal() and int(count) > 0):
        raise UsageError(f"--gpus {spec}: {count!r} is not a number of GPUs", "use auto for one GPU, auto:2 for two")
    if int(count) > len(gpus):
        raise UsageError(
            f"--gpus {spec}: there are only {len(gpus)}: {format_gpus(gpus)}", f"use auto:{len(gpus)} for all of them"
        )
    return int(count)


def _choose_indices(spec: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    by_index = {gpu.index: gpu for gpu in gpus}
    chosen: list[Gpu] = []
    for entry in spec.split(","):
        if not entry.strip().isdecimal():
            raise UsageError(f"--gpus {spec}: {entry!r} is not a GPU", "use all, auto, auto:2, or numbers such as 0,3")
        gpu = by_index.get(int(entry))
        if gpu is None:
            raise UsageError(
                f"--gpus {spec}: there is no GPU {int(entry)}, only {format_gpus(gpus)}",
                "the numbers are those of nvidia-smi, without the GPUs that CUDA_VISIBLE_DEVICES hides",
            )
        if gpu in chosen:
            raise UsageError(f"--gpus {spec}: GPU {gpu.index} is named twice")
        chosen.append(gpu)
    return chosen

"""The checks of a GPU: does its driver fit torch, who else uses its memory, how fast is it, and what slows it down?

NVIDIA's management library answers for the driver; other GPUs are known to torch only. Clocks are read after half a
second of matrix products, because an idle GPU lowers them.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from torchstone.doctor.check import Finding, failed, gib, ok, skipped, warning
from torchstone.errors import first_line
from torchstone.launch.gpus import list_gpus, nvml
from torchstone.observe.mfu import peak_flops

# Share of the memory; the context of one process takes less.
BUSY_SHARE = 0.1
LOAD_SECONDS, LOAD_SIZE = 0.5, 4096
# Share of the highest SM clock. The power limit alone keeps a GPU above it.
MIN_CLOCK_SHARE = 0.5


def check_driver(device: torch.device, wants_gpu: bool) -> Finding:
    """Whether torch can use the GPUs of this machine. `wants_gpu`: the CPU was not asked for."""
    if not wants_gpu:
        return skipped("the CPU was asked for")
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return skipped("CUDA_VISIBLE_DEVICES hides all GPUs")
    gpus = list_gpus()
    if not gpus:
        return ok(torch.cuda.get_device_name(device) if device.type == "cuda" else "no NVIDIA GPU", gpus=[])
    driver, newest = driver_versions()
    names = [gpu.name for gpu in gpus]
    found = f"{len(gpus)} x {', '.join(sorted(set(names)))}, driver {driver} for CUDA {newest}"
    values = {"gpus": names, "driver": driver, "driver_cuda": newest, "torch_cuda": torch.version.cuda}
    if device.type == "cuda":
        return ok(f"{found}, torch for CUDA {torch.version.cuda}", **values)
    try:
        torch.cuda.init()
        reason = f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES')!r}"
    except (AssertionError, RuntimeError) as error:
        reason = first_line(error, "no message")
    return failed(f"{found}, but torch {torch.__version__} cannot use them: {reason}", driver_fix(newest), **values)


def driver_fix(newest: str) -> str:
    built = torch.version.cuda
    if built is None:
        return "pip install --force-reinstall torch    # a build for CUDA; this one is for CPUs"
    if int(built.partition(".")[0]) > int(newest.partition(".")[0]):
        return f"install torch for CUDA {newest}: https://pytorch.org/get-started/locally, or update the NVIDIA driver"
    return "nvidia-smi    # must list them; in a container: docker run --gpus all; unset CUDA_VISIBLE_DEVICES"


def driver_versions() -> tuple[str, str]:
    """The version of the driver, and of the newest CUDA that it supports."""
    with nvml() as library:
        number = library.nvmlSystemGetCudaDriverVersion()
        return str(library.nvmlSystemGetDriverVersion()), f"{number // 1000}.{number % 1000 // 10}"


def check_gpu_memory(device: torch.device) -> Finding:
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    found, values = f"{gib(free)} of {gib(total)} free", {"free_bytes": free, "total_bytes": total}
    if others > BUSY_SHARE * total:
        fix = "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv    # end those not needed"
        return warning(f"{found}: other processes use {gib(others)}", fix, **values)
    return ok(found, **values)


def check_gpu_speed(device: torch.device) -> Finding:
    """FLOP/s of bf16 matrix products, and the clocks under this load."""
    name, flops = torch.cuda.get_device_name(device), measure_flops(device)
    peak, clocks = peak_flops(name), read_clocks(device)
    found = f"{flops / 1e12:.0f} TFLOP/s in bf16" + (f" ({flops / peak:.0%} of its peak)" if peak else "")
    values: dict[str, Any] = {"name": name, "flops": flops, "peak_flops": peak, **clocks}
    if not clocks:
        return ok(found, **values)
    found += f", SM {clocks['sm_mhz']} of {clocks['max_sm_mhz']} MHz"
    found += f", memory {clocks['memory_mhz']} of {clocks['max_memory_mhz']} MHz"
    if clocks["slowed_by"]:
        fix = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER    # check cooling and power supply"
        return warning(f"{found}; slowed down by {' and '.join(clocks['slowed_by'])}", fix, **values)
    if clocks["sm_mhz"] < MIN_CLOCK_SHARE * clocks["max_sm_mhz"]:
        fix = "nvidia-smi --reset-gpu-clocks    # or a higher power limit: nvidia-smi --power-limit WATTS"
        return warning(f"{found}: a low clock under load", fix, **values)
    return ok(found, **values)


def measure_flops(device: torch.device) -> float:
    a = torch.randn(LOAD_SIZE, LOAD_SIZE, device=device, dtype=torch.bfloat16)
    # Loads the kernel.
    a @ a
    torch.cuda.synchronize(device)
    start, products = time.perf_counter(), 0
    while time.perf_counter() - start < LOAD_SECONDS:
        for _ in range(10):
            a @ a
        torch.cuda.synchronize(device)
        products += 10
    return products * 2 * LOAD_SIZE**3 / (time.perf_counter() - start)


def read_clocks(device: torch.device) -> dict[str, Any]:
    """Clocks in MHz and what slows them down; empty for a GPU that NVML does not report."""
    from pynvml import NVMLError

    try:
        with nvml() as library:
            handle = library.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            reasons = library.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            heat = library.nvmlClocksThrottleReasonHwThermalSlowdown | library.nvmlClocksThrottleReasonSwThermalSlowdown
            kinds = {"heat": heat, "the power supply": library.nvmlClocksThrottleReasonHwPowerBrakeSlowdown}
            sm, memory = library.NVML_CLOCK_SM, library.NVML_CLOCK_MEM
            return {
                "sm_mhz": library.nvmlDeviceGetClockInfo(handle, sm),
                "max_sm_mhz": library.nvmlDeviceGetMaxClockInfo(handle, sm),
                "memory_mhz": library.nvmlDeviceGetClockInfo(handle, memory),
                "max_memory_mhz": library.nvmlDeviceGetMaxClockInfo(handle, memory),
                "slowed_by": [name for name, mask in kinds.items() if reasons & mask],
            }
    except NVMLError:
        # MIG slices, virtual GPUs and old drivers.
        return {}

"""What a plan has to know of a GPU. The figures are published ones; of an own GPU, memory is what torch says.

Memory is what torch sees of it, in GiB, rounded down: less than the name of a GPU says. A machine has `node_size` GPUs,
which exchange data at `link` GB/s in each direction (NVLink, or PCIe), and `network` GB/s for each GPU to others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from torchstone.config.schema import parse_memory
from torchstone.errors import UsageError
from torchstone.observe.mfu import peak_flops
from torchstone.training.checks import process_memory

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A kind of device: memory in bytes, bandwidths in bytes per second. Without a `tflops_name` it has no speed."""

    name: str
    memory: int
    # The name in observe/mfu.py.
    tflops_name: str | None = None
    memory_bandwidth: float = 0.0
    link: float = 0.0
    network: float = 0.0
    node_size: int = 8
    has_fp8: bool = True

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    @property
    def flops(self) -> float | None:
        """The peak in bf16."""
        return None if self.tflops_name is None else peak_flops(self.tflops_name)


def _gpu(name: str, memory: float, tflops_name: str, *gigabytes: float, has_fp8: bool = True) -> Gpu:
    bandwidth, link, network = (1e9 * value for value in gigabytes)
    return Gpu(name, int(memory * GIB), tflops_name, bandwidth, link, network, has_fp8=has_fp8)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("b200", 178.3, "B200", 7700, 900, 50),
        _gpu("h200", 139.7, "H200", 4800, 450, 50),
        _gpu("h100-80gb", 79.1, "H100", 3350, 450, 50),
        _gpu("h100-pcie", 79.1, "H100 PCIe", 2000, 64, 25),
        _gpu("a100-80gb", 79.1, "A100", 2039, 300, 25, has_fp8=False),
        _gpu("a100-40gb", 39.3, "A100", 1555, 300, 25, has_fp8=False),
        _gpu("l40s", 44.3, "L40S", 864, 32, 25),
        _gpu("a10", 22.0, "A10", 600, 32, 12.5, has_fp8=False),
        _gpu("l4", 21.9, "L4", 300, 32, 12.5),
        _gpu("rtx-5090", 31.3, "RTX 5090", 1792, 64, 12.5),
        _gpu("rtx-4090", 23.5, "RTX 4090", 1008, 32, 12.5),
        _gpu("rtx-3090", 23.5, "RTX 3090", 936, 32, 12.5, has_fp8=False),
    )
}


def find_gpu(text: str) -> Gpu:
    """The GPU with this name (H100-80GB, a100_40gb), or of any kind with this memory (40GiB), without a speed."""
    name = text.strip().lower().replace("_", "-").replace(" ", "-")
    if name in GPUS:
        return GPUS[name]
    # A number alone would be bytes.
    if (memory := parse_memory(text)) and not text.strip().isdecimal():
        return Gpu(f"a GPU of {text.strip()}", memory)
    similar = [known for known in GPUS if name and known.startswith(name)]
    meant = f"did you mean {' or '.join(similar)}? " if similar else ""
    raise UsageError(f"--gpu {text} is not known", f"{meant}use one of {', '.join(GPUS)}, or its memory, such as 40GiB")


def own_gpu(device: torch.device) -> Gpu:
    """This machine's device, with the speed of the GPU in the table that has its name."""
    if device.type != "cuda":
        return Gpu("cpu", process_memory(), node_size=1)
    name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    peak = peak_flops(name)
    same = [gpu for gpu in GPUS.values() if peak is not None and gpu.flops == peak]
    # The same chip may have more or less memory, and another bandwidth.
    similar = min(same, key=lambda gpu: abs(gpu.memory - memory), default=Gpu(name, memory))
    return replace(similar, name=name, memory=memory)

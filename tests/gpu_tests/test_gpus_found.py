"""The GPUs that NVIDIA's library finds are those that torch sees."""

from __future__ import annotations

import torch

from torchstone.launch.gpus import choose, visible_gpus


def test_what_is_found_is_what_torch_sees() -> None:
    devices = visible_gpus()
    assert len(devices) == torch.cuda.device_count()
    assert [gpu.name for gpu in devices] == [torch.cuda.get_device_name(number) for number in range(len(devices))]
    for number, gpu in enumerate(devices):
        assert gpu.uuid == f"GPU-{torch.cuda.get_device_properties(number).uuid}"
        assert 0 <= gpu.utilization <= 100
        # The driver keeps some of it to itself.
        assert gpu.memory_used <= gpu.memory_total
        assert 0.9 < torch.cuda.get_device_properties(number).total_memory / gpu.memory_total <= 1


def test_the_least_loaded_is_one_of_them() -> None:
    (gpu,) = choose("auto", visible_gpus())
    assert gpu.uuid in [other.uuid for other in visible_gpus()]

"""Errors that end a run: a loss, gradient, weight or moment that is not finite, and out of memory."""

from __future__ import annotations

import gc
import re
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch import Tensor

from torchstone.checkpoint.save import hf_name
from torchstone.errors import NumericalError, OutOfMemoryError, first_line, is_out_of_memory
from torchstone.heartbeat import current_phase, read_int_variable
from torchstone.parallel.local_shards import local_shards
from torchstone.parallel.mesh import ParallelContext
from torchstone.parallel.runner import Runner

# With bf16 weights and moments.
SMALLER_PRECISION = {"auto": "bf16-pure", "fp32": "bf16-pure", "bf16": "bf16-pure", "fp8": "fp8-pure"}
# The control groups of this process, and where their files are: limit and usage, in version 2 and 1 of the kernel's.
OWN_CGROUPS, CGROUP_FOLDER = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
CGROUP_FILES = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
DEVICE_ERRORS = ("CUDA error: out of memory", "Triton Error [CUDA]: out of memory")
WHAT_TO_TRY = (
    "try a lower --optim.learning_rate or a longer --optim.warmup_steps or, if it is not in fp32, a new run with "
    "--training.precision fp32"
)


def check_saved_state(step: int, runner: Runner, optimizer: torch.optim.Optimizer, previous: Path | None) -> None:
    """Raises on all ranks if a parameter or moment of any rank is not finite: the last update may have overflowed.

    Reads the state once: 2 to 6 % of the time of a save on a CPU (110M parameters, one thread).
    """
    tensors = [(name, parameter.detach(), "") for name, parameter in runner.model.trained_parameters()]
    for name, parameter in runner.model.trained_parameters():
        moments = optimizer.state.get(parameter, {}).items()
        tensors += [(name, moment, f" ({key})") for key, moment in moments if key != "step"]
    names = non_finite_names(runner, tensors)
    if names:
        resume = f"{previous} is kept: resume from it" if previous else "no checkpoint was saved before: start again"
        raise NumericalError(
            f"step {step} made {len(names)} weights or moments infinite or NaN, such as {', '.join(names[:3])}; "
            "they are not saved",
            f"{resume}, and {WHAT_TO_TRY}",
        )


def non_finite_names(runner: Runner, tensors: Iterable[tuple[str, Tensor, str]]) -> list[str]:
    """The Hugging Face names of tensors that are not finite on some rank. All ranks must call it.

    `tensors` are this rank's: the name of the parameter that a tensor is shaped and sharded like, the tensor, and a
    suffix for its name.
    """
    model, flags, names = runner.model, list[Tensor](), list[str]()
    for name, tensor, label in tensors:
        for shard in local_shards(model.decoder_config, name, tensor):
            if shard.tensor.numel():
                # NaN propagates. isfinite would need memory for temporary tensors, and 30 times as long on a CPU.
                flags.append(torch.stack(shard.tensor.aminmax()).isfinite().all())
                names.append(f"{hf_name(model, shard.name)}{label}")
    # One transfer from the device.
    is_finite = torch.stack(flags).tolist() if flags else []
    return merge_names(runner.ctx, [name for name, finite in zip(names, is_finite, strict=True) if not finite])


def merge_names(ctx: ParallelContext, own: list[str]) -> list[str]:
    """The names of all ranks, each once. All ranks must call it."""
    return list(dict.fromkeys(name for names in ctx.all_gather_object(own) for name in names))


def check_memory(needed: int, parameters: int, device: torch.device, hint: str) -> None:
    """Raises if this rank's device has less memory than `needed` bytes, the least for `parameters` parameters."""
    memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else process_memory()
    if needed > memory:
        raise OutOfMemoryError(
            f"{parameters / 1e9:.2f}B parameters need at least {needed / 2**30:,.1f} GiB per process, "
            f"without activations, but {device} has {memory / 2**30:,.1f} GiB",
            hint,
        )


def process_memory() -> int:
    """What a process may have of the memory and swap of this machine, or of its container; its ranks share them."""
    total = psutil.virtual_memory().total + psutil.swap_memory().total
    limits = [limit for file, _ in cgroup_files() if (limit := read_cgroup(file)) is not None]
    total = min([total, *limits])
    total //= max(1, read_int_variable("LOCAL_WORLD_SIZE", 1))
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    return total if address_space == resource.RLIM_INFINITY else min(total, address_space)


def free_memory() -> int:
    """What a process may still take of the memory of this machine, or of its container; its ranks share it."""
    free = psutil.virtual_memory().available
    for limit_file, usage_file in cgroup_files():
        limit, usage = read_cgroup(limit_file), read_cgroup(usage_file)
        if limit is not None and usage is not None:
            # The kernel gives back files that were read once before a process gets no memory.
            stat = _read_text(limit_file.with_name("memory.stat"))
            cached = re.search(r"^(?:total_)?inactive_file (\d+)", stat, re.MULTILINE)
            free = min(free, limit - usage + (int(cached[1]) if cached else 0))
    return min(max(0, free) // max(1, read_int_variable("LOCAL_WORLD_SIZE", 1)), process_memory())


def cgroup_files() -> Iterator[tuple[Path, Path]]:
    """Limit and usage of the control groups of this process (of a container, or of a job of SLURM) and of those that
    they are in."""
    for line in _read_text(OWN_CGROUPS).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder, (limit, usage) = CGROUP_FOLDER / controllers, CGROUP_FILES[bool(controllers)]
        own = Path(name.lstrip("/"))
        for group in (own, *own.parents):
            yield folder / group / limit, folder / group / usage


def read_cgroup(path: Path) -> int | None:
    """The number in a file of the cgroup; None without a limit, or without a cgroup."""
    text = _read_text(path).strip()
    return int(text) if text.isdecimal() else None


def _read_text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def free_device_memory(device: torch.device) -> None:
    """Frees the memory of unreachable objects."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def ran_out_of_memory(error: BaseException) -> bool:
    """`is_out_of_memory`, also for errors of torch's own type."""
    return isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(error)


def is_repairable(error: BaseException) -> bool:
    """Whether the process can go on after it: an allocation was refused. A kernel that ran out of memory leaves the
    device in an unknown state."""
    return ran_out_of_memory(error) and not any(text in str(error) for text in DEVICE_ERRORS)


@contextmanager
def translate_out_of_memory(activity: str | None, device: torch.device, hint: Callable[[], str]) -> Iterator[None]:
    """Turns out-of-memory errors during `activity`, by default the phase of the run, into ours, with `hint()`."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not ran_out_of_memory(error):
            raise
        activity = activity or current_phase()
        message = f"out of memory on {device} while {activity}: {out_of_memory_reason(error)}"
        raise OutOfMemoryError(message, hint()) from None


def out_of_memory_reason(error: BaseException) -> str:
    """The first line of an out-of-memory error, with bytes as MiB."""
    reason = first_line(error, "out of memory")
    if allocated := re.search(r"tried to allocate (\d+) bytes", reason):
        return f"{int(allocated[1]) / 2**20:,.0f} MiB more cannot be allocated"
    return reason

"""What a bug report needs: versions, hardware, variables and packages, without secrets and names of people or hosts."""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from torchstone import __version__
from torchstone.doctor.check import Finding, gib, ok, skipped, warning
from torchstone.doctor.gpu import driver_versions
from torchstone.errors import UsageError
from torchstone.launch.gpus import list_gpus
from torchstone.training.checks import process_memory

PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "pyarrow", "cyclopts",
    "nvidia-ml-py", "datasets", "peft", "torchao", "bitsandbytes", "liger-kernel", "flash-attn", "flash-attn-3",
    "flash-attn-4", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
# By extra: the package, a module of it that is imported to try it, and what it is for.
EXTRAS = {
    "datasets": ("datasets", "datasets", "data.path: folders that the datasets library has saved"),
    "liger": ("liger-kernel", "liger_kernel", "model.liger: Triton kernels for norms, RoPE, MLP and loss"),
    "torchao": ("torchao", "torchao.float8", "training.precision fp8, on Ada, Hopper and Blackwell"),
    "bitsandbytes": ("bitsandbytes", "bitsandbytes", "tuning.quantize_base: LoRA on weights in 4 or 8 bits"),
    "flash-attn-4": ("flash-attn-4", "flash_attn.cute", "model.attention fa4, the fastest on Hopper and Blackwell"),
}
# Variables that change what torch, its libraries or this package do.
PREFIXES = (
    "CUDA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "KMP_", "TRITON_", "NVIDIA_", "HF_",
    "TRANSFORMERS_", "TOKENIZERS_", "TORCHSTONE_", "ATEN_", "GPU_RANK", "RANK", "WORLD_SIZE", "LOCAL_", "LD_PRELOAD",
    "LD_LIBRARY_PATH", "XDG_CACHE_HOME",
)  # fmt: skip
SECRET_NAMES = re.compile("TOKEN(?!IZER)|SECRET|KEY|PASS|CREDENTIAL|AUTH|COOKIE")
# user:password@ in an address, and tokens of Hugging Face, OpenAI, GitHub, GitLab and AWS.
SECRET_VALUES = re.compile(r"(?<=://)[^/@\s]+(?=@)|\b(?:hf_|sk-|gh[a-z]_|github_pat_|glpat-|AKIA)[\w-]{8,}")
HIDDEN = "(hidden)"
IMPORT_SECONDS = 120


def environment() -> dict[str, Any]:
    """Plain values for JSON; `as_text` prints them."""
    return {
        "torchstone": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "threads": torch.get_num_threads(),
        "memory_bytes": process_memory(),
        **gpu_versions(),
        "packages": {name: found for name in PACKAGES if (found := version_of(name)) is not None},
        "variables": variables(),
    }


def as_text(values: dict[str, Any]) -> str:
    lines = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines += [f"{name}:", *(f"  {key} {each}" for key, each in value.items())]
        elif name == "memory_bytes":
            lines.append(f"memory: {gib(value)}")
        else:
            text = ", ".join(value) if isinstance(value, list) else value
            lines.append(f"{name.replace('_', ' ')}: {'none' if text in (None, '') else text}")
    return "\n".join(lines) + "\n"


def cpu_name() -> str:
    """The model of the processor, which Python does not know on Linux."""
    with suppress(OSError):
        if name := re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return name[1]
    return platform.processor() or platform.machine()


def gpu_versions() -> dict[str, Any]:
    try:
        gpus, error = list_gpus(), None
        driver, driver_cuda = driver_versions() if gpus else (None, None)
    except UsageError as broken:
        gpus, error, driver, driver_cuda = [], broken.message, None, None
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() and dist.is_nccl_available() else None
    return {
        "gpus": [f"{gpu.name}, {gpu.memory_total / 2**30:.0f} GiB" for gpu in gpus] + ([error] if error else []),
        "driver": driver,
        "driver_cuda": driver_cuda,
        "torch_cuda": torch.version.cuda or torch.version.hip,
        "torch_sees_gpus": torch.cuda.device_count(),
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
    }


def version_of(package: str) -> str | None:
    if package == "torch":
        # With its build, which the package's own metadata may leave out: 2.11.0+cu130.
        return torch.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def variables() -> dict[str, str]:
    """The variables that change behavior, without secrets, home folders, users and hosts."""
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}
    return {name: HIDDEN if SECRET_NAMES.search(name) else anonymous(value) for name, value in found.items()}


def anonymous(text: str) -> str:
    text = SECRET_VALUES.sub(HIDDEN, text)
    host = socket.gethostname()
    names = {str(Path.home()): "~", host: "HOST", host.partition(".")[0]: "HOST"}
    with suppress(KeyError, OSError):
        names[getpass.getuser()] = "USER"
    for name, replacement in names.items():
        # Every machine has these, and / is the home folder of some containers.
        if len(name) > 1 and name not in ("root", "localhost"):
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", replacement, text)
    return text


def check_extra(extra: str) -> Finding:
    """The version of an optional package, or what it would give. It is imported by another process: some packages
    print, and one that is built for another torch may crash."""
    package, module, purpose = EXTRAS[extra]
    install, installed = f"pip install 'torchstone[{extra}]'", version_of(package)
    if installed is None:
        return skipped(f"not installed; for {purpose}: {install}", version=None)
    # Not from the current folder, which may have a folder of that name.
    command = [sys.executable, "-P", "-c", f"import {module}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        fix = f"{install} --upgrade --force-reinstall --no-deps"
        return warning(f"{package} {installed} cannot be imported: {reason}", fix, version=installed)
    return ok(f"{package} {installed}, for {purpose}", version=installed)

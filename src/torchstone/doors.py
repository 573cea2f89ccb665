"""The doors to GPUs in scripts/: pretrain_main (one), run_training (all), train_auto_gpu (the idlest), prepare_dataset.

Each is `torchstone train` or `prepare` with habits of its own: the preset is production unless another is named, a file
is named by --config, and the run is in .checkpoints. A process on one GPU must not see the others, so which one it is
gets decided here, from the environment and the config, before torch looks; that costs a tenth of a second.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torchstone.config.load import Layers, read_layers, resolve, split_flags
from torchstone.config.schema import Config, Job
from torchstone.errors import TorchstoneError, UsageError
from torchstone.launch import gpus

OUTPUT_DIR = ".checkpoints"
# A flag that takes a value, and what it means here: our own, or a key.
VALUES = {"config": None, "preset": None, "max_steps": "training.max_steps", "output_dir": "output_dir"}
# What starts processes.
STARTING = ("--nproc", "--gpus", "--nnodes")
HELP = """Usage: {door} [--debug | --preset NAME] [--config FILE] [--max-steps N] [--section.key VALUE]...

{does}

  --preset NAME       What lies below the file and the flags; production unless told.
  --debug             The same as --preset debug: two layers, ten steps.
  --config FILE       JSON (comments allowed), YAML or TOML.
  --max-steps N       Optimizer steps after which the run ends.
  --output-dir FOLDER Folder of the run; .checkpoints unless told.

Everything else is as in `torchstone {command}`; `torchstone train --help-keys` lists the keys.
"""


@dataclass(frozen=True)
class Words:
    """A command line of ours: the file and the preset, our flags as keys, and what is left for `torchstone`."""

    file: str | None
    preset: str
    keys: dict[str, str]
    rest: list[str]

    def line(self, command: str) -> list[str]:
        return [command, *([self.file] if self.file is not None else []), "--preset", self.preset, *self.rest]

    def asks(self, *flags: str) -> str | None:
        """The first of these flags that is there."""
        return next((flag for flag in flags for word in self.rest if word.partition("=")[0] == flag), None)


def pretrain() -> None:
    """scripts/pretrain_main.py: one process on one GPU."""
    with _ends_as_torchstone():
        words = _words("pretrain_main.py", "Train on one GPU, in one process.", "train")
        many = words.asks(*STARTING) or ("torchrun" if os.environ.get("WORLD_SIZE") not in (None, "", "1") else None)
        if many is not None:
            raise UsageError(
                f"pretrain_main.py is one process, and {many} starts several", "use run_training.sh or torchstone train"
            )
    from torchstone import cli

    cli.main(words.line("train"), lambda layers, job: alone(settings(words, layers, job)))


def prepare() -> None:
    """scripts/prepare_dataset.py: the data of the same config into the cache, and no training."""
    with _ends_as_torchstone():
        words = _words("prepare_dataset.py", "Tokenize the data into the cache, and stop.", "prepare")
    from torchstone import cli

    cli.main(words.line("prepare"), lambda layers, job: settings(words, layers, job))


def run_training() -> None:
    """scripts/run_training.sh: all GPUs, a process each, whose lines are all shown; the CPU where there are none."""
    with _ends_as_torchstone():
        words = _words("run_training.sh", "Train on all GPUs, and show the lines of each.", "train")
        how = [] if words.asks(*STARTING) else everything(words)
    # It would be the number of every worker.
    os.environ.pop("GPU_RANK", None)
    from torchstone import cli

    cli.main(
        [*words.line("train"), *how],
        lambda layers, job: together(settings(words, layers, job, {"observe.ranks": "all"})),
    )


def least_loaded() -> None:
    """scripts/train_auto_gpu.sh: prints the number of the GPU to take, or nothing where there is none."""
    with _ends_as_torchstone():
        devices = gpus.found()
        sys.stdout.write(f"{gpus.choose('auto', devices)[0].number if devices else ''}\n")


def read_words(words: list[str]) -> Words:
    own: dict[str, str] = {}
    rest: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        flag = name[2:].replace("-", "_") if name.startswith("--") else ""
        if flag not in VALUES and word != "--debug":
            rest.append(word)
            continue
        if flag in own:
            raise UsageError(f"{name} is given twice")
        if flag in VALUES and not equals and remaining and not remaining[0].startswith("--"):
            value = remaining.pop(0)
        if flag in VALUES and not value:
            raise UsageError(f"{name} needs a value", f"write {name} VALUE or {name}=VALUE")
        own[flag] = value
    if "debug" in own and own.get("preset", "debug") != "debug":
        raise UsageError(f"--debug is --preset debug, but --preset {own['preset']} is given too")
    keys = {key: own[flag] for flag, key in VALUES.items() if key is not None and flag in own}
    return Words(own.get("config"), "debug" if "debug" in own else own.get("preset", "production"), keys, rest)


def settings(words: Words, layers: Layers, job: Job, defaults: Mapping[str, str] | None = None) -> Config:
    """The config of a run. Its folder is ours unless a file or a flag names one: that of a preset is not meant."""
    for flag, key in VALUES.items():
        if key in words.keys and key in layers.overrides:
            raise UsageError(f"--{flag.replace('_', '-')} and --{key} are one setting", "give one of them")
    layers = layers.plus(words.keys)
    if "output_dir" not in layers.said(with_preset=False):
        layers = layers.plus({"output_dir": OUTPUT_DIR})
    return resolve(layers, job, defaults or {})


def alone(config: Config) -> Config:
    """The config for a process that sees one GPU alone, which it does from now on."""
    if config.system.device == "cpu":
        return config
    values, lines = one_gpu(os.environ, config.system.device_id)
    os.environ.update(values)
    for line in lines:
        sys.stderr.write(f"{line}\n")
    # It sees no other, so nothing need be said of it; but a slice of a GPU is not found unless it is asked for.
    sliced = os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")
    return replace(config, system=replace(config.system, device_id=0 if sliced else None))


def together(config: Config) -> Config:
    """The config for processes that take a GPU each: what a file for one GPU says of it does not hold."""
    if config.system.device_id is None:
        return config
    sys.stderr.write(f"warning: system.device_id {config.system.device_id} is for one process, and is left out here\n")
    return replace(config, system=replace(config.system, device_id=None))


def one_gpu(environ: Mapping[str, str], device_id: int | None) -> tuple[dict[str, str], list[str]]:
    """The environment in which a process has one GPU, and what there is to say about the choice.

    CUDA_VISIBLE_DEVICES decides where it is set (system.device_id counts in it), otherwise GPU_RANK, otherwise
    system.device_id, otherwise it is GPU 0. GPU_RANK is the number that the lines of a run give, and follows from the
    choice unless it is set. Numbers are nvidia-smi's, unless CUDA_DEVICE_ORDER says otherwise.
    """
    rank = environ.get("GPU_RANK") or None
    if rank is not None and not rank.isdecimal():
        raise UsageError(f"GPU_RANK is the number of a GPU, not {rank!r}")
    entry, lines = _entry(environ.get("CUDA_VISIBLE_DEVICES"), rank, device_id)
    if entry is None:
        return {}, lines
    machine = gpus.of_machine()
    seen = [] if entry.startswith("MIG-") else gpus.visible(machine, entry)
    if machine and not seen and not entry.startswith("MIG-"):
        raise UsageError(
            f"there is no GPU {entry} here, only {gpus.listed(machine)}", "nvidia-smi lists them with their load"
        )
    number = str(seen[0].number) if seen else entry
    if rank is not None and number.isdecimal() and int(number) != int(rank):
        lines.append(f"warning: trains on GPU {number}, as CUDA_VISIBLE_DEVICES says; GPU_RANK {rank} is but its name")
    values = {"CUDA_VISIBLE_DEVICES": entry, "CUDA_DEVICE_ORDER": environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}
    if rank is None and number.isdecimal():
        values["GPU_RANK"] = number
    return values, lines


def everything(words: Words) -> list[str]:
    """All GPUs; without any, or where the CPU is asked for, NPROC processes."""
    device = read_layers(words.file, words.preset, split_flags(words.rest)[1]).said().get("system.device")
    nproc = os.environ.get("NPROC") or None
    devices = gpus.found() if device != "cpu" else []
    if not devices:
        return ["--nproc", nproc or "1"]
    if nproc is not None:
        sys.stderr.write(f"warning: NPROC is for machines without GPUs; a process on each of the {len(devices)} here\n")
    return ["--gpus", "all"]


def _entry(allowed: str | None, rank: str | None, device_id: int | None) -> tuple[str | None, list[str]]:
    """What CUDA_VISIBLE_DEVICES should be, None where no GPU may be seen, and a line where something is left out."""
    if allowed is None:
        chosen = device_id or 0 if rank is None else int(rank)
        # 0 may also be the first of those that are visible, which this one will be.
        odd = rank is not None and device_id not in (None, 0, chosen)
        return str(chosen), [f"warning: trains on GPU {rank}, as GPU_RANK says, not {device_id}"] if odd else []
    entries = [entry.strip() for entry in allowed.split(",")]
    # What CUDA would not see beyond.
    ends = [place for place, entry in enumerate(entries) if not entry or entry.startswith("-")]
    entries = entries[: ends[0]] if ends else entries
    if not entries:
        return None, []
    place = device_id or 0
    if place >= len(entries):
        raise UsageError(
            f"system.device_id {place} counts in CUDA_VISIBLE_DEVICES={allowed}, which shows {len(entries)}",
            "they are counted from 0 on",
        )
    more = len(entries) > 1 and device_id is None
    said = f"CUDA_VISIBLE_DEVICES shows {len(entries)} GPUs; one process trains on the first, {entries[place]}"
    return entries[place], [said] if more else []


def _words(door: str, does: str, command: str) -> Words:
    """The words of this process, unless they ask for help."""
    if "--help" in sys.argv[1:] or "-h" in sys.argv[1:]:
        sys.stdout.write(HELP.format(door=door, does=does, command=command))
        sys.exit(0)
    return read_words(sys.argv[1:])


@contextmanager
def _ends_as_torchstone() -> Iterator[None]:
    try:
        yield
    except TorchstoneError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)

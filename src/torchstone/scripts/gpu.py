"""The GPU scripts: pretrain_main (one GPU), run_training (all), train_auto_gpu (the least loaded), prepare_dataset.

Each is `torchstone train` or `prepare` with its own defaults: preset production, --config for the file, and the run in
.checkpoints. A process on one GPU must not see the others, so the GPU is chosen here, from the environment and the
config, before torch is imported; that costs a tenth of a second.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torchstone import heartbeat
from torchstone.config.load import ConfigLayers, extract_config_flags, read_config_layers, resolve
from torchstone.config.schema import Config, Purpose
from torchstone.errors import UsageError
from torchstone.heartbeat import print_line
from torchstone.launch import gpus
from torchstone.scripts import exit_on_error, extract_script_flags

OUTPUT_DIR = ".checkpoints"
# The scripts' own flags, and the config keys that two of them set.
FLAGS = {"config": None, "preset": None, "max_steps": "training.max_steps", "output_dir": "output_dir"}
LAUNCH_FLAGS = ("--nproc", "--gpus", "--nnodes")
HELP = """Usage: {script} [--debug | --preset NAME] [--config FILE] [--max-steps N] [--section.key VALUE]...

{description}

  --preset NAME       Preset that the file and the flags override; by default production.
  --debug             The same as --preset debug: two layers, ten steps.
  --config FILE       JSON (comments allowed), YAML or TOML.
  --max-steps N       Number of optimizer steps.
  --output-dir FOLDER Folder of the run; by default .checkpoints.

All other arguments go to `torchstone {command}`; `torchstone train --help-keys` lists the keys.
"""


@dataclass(frozen=True)
class ScriptArgs:
    """The file and the preset, the script's flags as config keys, and the remaining arguments for `torchstone`."""

    file: str | None
    preset: str
    keys: dict[str, str]
    remaining: list[str]

    def command(self, name: str) -> list[str]:
        return [name, *([self.file] if self.file is not None else []), "--preset", self.preset, *self.remaining]

    def first_of(self, *flags: str) -> str | None:
        """The first of these flags that is present."""
        return next((flag for flag in flags for arg in self.remaining if arg.partition("=")[0] == flag), None)


def pretrain_main() -> None:
    """scripts/pretrain_main.py: one process on one GPU."""
    with exit_on_error():
        args = _own_args("pretrain_main.py", "Train on one GPU, in one process.", "train")
        launcher = args.first_of(*LAUNCH_FLAGS)
        if os.environ.get("WORLD_SIZE") not in (None, "", "1"):
            launcher = launcher or "torchrun"
        if launcher is not None:
            raise UsageError(
                f"pretrain_main.py is a single process, but {launcher} starts several",
                "use run_training.sh or torchstone train",
            )
    _run(args, "train", select_one_gpu)


def prepare_dataset() -> None:
    """scripts/prepare_dataset.py: fills the token cache for the same config, and stops."""
    with exit_on_error():
        args = _own_args("prepare_dataset.py", "Tokenize the data into the cache, and stop.", "prepare")
    _run(args, "prepare")


def run_training() -> None:
    """scripts/run_training.sh: all GPUs, one process each, and the lines of every rank; the CPU if there are none."""
    with exit_on_error():
        args = _own_args("run_training.sh", "Train on all GPUs, and show the lines of each.", "train")
        launch_args = [] if args.first_of(*LAUNCH_FLAGS) else _launch_args(args)
    # The launcher sets it for every worker.
    os.environ.pop("GPU_RANK", None)
    args = replace(args, remaining=[*args.remaining, *launch_args])
    _run(args, "train", ignore_device_id, {"observe.ranks": "all"})


def print_least_loaded_gpu() -> None:
    """scripts/train_auto_gpu.sh: prints the number of the GPU to use, or nothing if there is none."""
    with exit_on_error():
        devices = gpus.visible_gpus()
        sys.stdout.write(f"{gpus.choose('auto', devices)[0].index if devices else ''}\n")


def parse_args(argv: list[str]) -> ScriptArgs:
    flags, remaining = extract_script_flags(argv, FLAGS, ["debug"])
    values = dict(flags)
    is_debug = values.pop("debug", None) is not None
    if is_debug and values.get("preset", "debug") != "debug":
        raise UsageError(f"--debug means --preset debug, but --preset {values['preset']} is given too")
    keys = {key: values[flag] for flag, key in FLAGS.items() if key is not None and flag in values}
    preset = "debug" if is_debug else values.get("preset", "production")
    return ScriptArgs(values.get("config"), preset, keys, remaining)


def resolve_config(
    args: ScriptArgs, layers: ConfigLayers, purpose: Purpose, defaults: Mapping[str, str] | None = None
) -> Config:
    """The config of a run. Its folder is .checkpoints unless a file or a flag sets it; the preset's is ignored."""
    for flag, key in FLAGS.items():
        if key in args.keys and key in layers.overrides:
            raise UsageError(f"--{flag.replace('_', '-')} and --{key} are the same setting", "leave out one of them")
    layers = layers.with_overrides(args.keys)
    if "output_dir" not in layers.values(with_preset=False):
        layers = layers.with_overrides({"output_dir": OUTPUT_DIR})
    return resolve(layers, purpose, defaults or {})


def select_one_gpu(config: Config) -> Config:
    """Makes one GPU the only visible one in this process, and returns the config for it."""
    if config.system.device == "cpu":
        return config
    variables, lines = one_gpu_environment(os.environ, config.system.device_id)
    os.environ.update(variables)
    for line in lines:
        print_line(line)
    # The only visible GPU needs no index; but a MIG slice is not found without one.
    is_slice = os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")
    return replace(config, system=replace(config.system, device_id=0 if is_slice else None))


def ignore_device_id(config: Config) -> Config:
    """Removes system.device_id, with a warning: it has no meaning for one process per GPU."""
    if config.system.device_id is None:
        return config
    print_line(f"warning: ignoring system.device_id {config.system.device_id}, which is for a single process")
    return replace(config, system=replace(config.system, device_id=None))


def one_gpu_environment(environ: Mapping[str, str], device_id: int | None) -> tuple[dict[str, str], list[str]]:
    """The environment variables of a process with one GPU, and lines to print about the choice.

    CUDA_VISIBLE_DEVICES decides if it is set (system.device_id is an index into it), otherwise GPU_RANK, otherwise
    system.device_id, otherwise it is GPU 0. GPU_RANK labels the log lines. Numbers are nvidia-smi's, unless
    CUDA_DEVICE_ORDER is set.
    """
    gpu_rank = environ.get("GPU_RANK") or None
    if gpu_rank is not None and not gpu_rank.isdecimal():
        raise UsageError(f"GPU_RANK must be the number of a GPU, not {gpu_rank!r}")
    entry, lines = _visible_entry(environ.get("CUDA_VISIBLE_DEVICES"), gpu_rank, device_id)
    if entry is None:
        return {}, lines
    devices, is_slice = gpus.list_gpus(), entry.startswith("MIG-")
    visible = [] if is_slice else gpus.filter_visible(devices, entry)
    if devices and not visible and not is_slice:
        raise UsageError(f"there is no GPU {entry}, only {gpus.format_gpus(devices)}", "nvidia-smi lists the GPUs")
    number = str(visible[0].index) if visible else entry
    if gpu_rank is not None and number.isdecimal() and int(number) != int(gpu_rank):
        lines.append(
            f"warning: training on GPU {number} (CUDA_VISIBLE_DEVICES); GPU_RANK {gpu_rank} only labels the log lines"
        )
    variables = {"CUDA_VISIBLE_DEVICES": entry, "CUDA_DEVICE_ORDER": environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}
    if gpu_rank is None and number.isdecimal():
        variables["GPU_RANK"] = number
    return variables, lines


def _launch_args(args: ScriptArgs) -> list[str]:
    """Returns the flags for all GPUs; without GPUs, or with system.device cpu, those for NPROC processes."""
    layers = read_config_layers(args.file, args.preset, extract_config_flags(args.remaining)[0])
    nproc = os.environ.get("NPROC") or None
    if nproc is not None and not nproc.isdecimal():
        raise UsageError(f"NPROC must be a number of processes, not {nproc!r}")
    devices = gpus.visible_gpus() if layers.values().get("system.device") != "cpu" else []
    if not devices:
        return ["--nproc", nproc or "1"]
    if nproc is not None:
        print_line(f"warning: ignoring NPROC, which is for machines without GPUs; using {len(devices)} GPUs")
    return ["--gpus", "all"]


def _visible_entry(
    visible_devices: str | None, gpu_rank: str | None, device_id: int | None
) -> tuple[str | None, list[str]]:
    """The value for CUDA_VISIBLE_DEVICES (None if no GPU may be used), and lines to print."""
    if visible_devices is None:
        number = device_id or 0 if gpu_rank is None else int(gpu_rank)
        # device_id 0 may also be the index of the only visible GPU.
        is_conflict = gpu_rank is not None and device_id not in (None, 0, number)
        lines = [f"warning: training on GPU {gpu_rank} (GPU_RANK), not on system.device_id {device_id}"]
        return str(number), lines if is_conflict else []
    entries = [entry.strip() for entry in visible_devices.split(",")]
    # CUDA ignores everything after an invalid entry.
    invalid = [index for index, entry in enumerate(entries) if not entry or entry.startswith("-")]
    entries = entries[: invalid[0]] if invalid else entries
    if not entries:
        return None, []
    index = device_id or 0
    if index >= len(entries):
        raise UsageError(
            f"system.device_id {index} is out of range for CUDA_VISIBLE_DEVICES={visible_devices}, which has "
            f"{len(entries)} entries",
            "indices start at 0",
        )
    is_ambiguous = len(entries) > 1 and device_id is None
    line = f"CUDA_VISIBLE_DEVICES has {len(entries)} GPUs; a single process uses the first, {entries[index]}"
    return entries[index], [line] if is_ambiguous else []


def _run(
    args: ScriptArgs,
    command: str,
    adapt: Callable[[Config], Config] = lambda config: config,
    defaults: Mapping[str, str] | None = None,
) -> None:
    from torchstone import cli

    cli.main(args.command(command), lambda layers, purpose: adapt(resolve_config(args, layers, purpose, defaults)))


def _own_args(script: str, description: str, command: str) -> ScriptArgs:
    """The arguments of this process; prints the help and exits if they ask for it."""
    heartbeat.open_standard_streams()
    if "--help" in sys.argv[1:] or "-h" in sys.argv[1:]:
        sys.stdout.write(HELP.format(script=script, description=description, command=command))
        sys.exit(0)
    return parse_args(sys.argv[1:])

"""The training stages of nanochat (base, mid, chat), each a table of defaults for `torchstone train`.

A script in scripts/ is a `TrainingScript` and `run_script(SCRIPT)`. Its own flags become config keys, everything else
is passed to `train`, and preset, file and flags override its defaults. Some defaults depend on other settings (a run is
named after its model's depth), so they are computed after everything is read and before it is validated.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchstone import heartbeat
from torchstone.atomic import read_json_or_empty
from torchstone.config.files import read_config_file
from torchstone.config.load import ConfigLayers, resolve
from torchstone.config.schema import DEFAULT_TEXT_ROWS, Config, DataConfig
from torchstone.errors import UsageError
from torchstone.heartbeat import print_line
from torchstone.scripts import exit_on_error, extract_script_flags

RUNS = Path("runs")

# A flag, the key it sets, and its help.
FLAGS = {
    "depth": ("model.depth", "Layers of the new model, which determine width and heads."),
    "data": ("data.path", "Training data: a file, folder or glob, or several separated by commas."),
    "tokenizer": ("model.tokenizer", "Folder of the tokenizer."),
    "device_batch_size": ("training.batch_size", "Rows per device and micro-step."),
    "max_seq_len": ("data.context_length", "Maximum sequence length in tokens."),
    "total_batch_size": ("training.global_batch_size", "Tokens of text per step, a multiple of --max-seq-len."),
    "num_iterations": ("training.max_steps", "Number of optimizer steps."),
    "run": ("output_dir", "Name of the run: its folder is runs/NAME."),
    "auto_batch_size": ("auto_batch.enabled", "Find the fastest --device-batch-size that fits, unless it is set."),
    "batch_size_margin": ("auto_batch.margin", "Share of the memory that a step may then take; 0.85 by default."),
    "batch_size_cache": ("auto_batch.cache", "Keep what was measured for the next run; true by default."),
}
SWITCHES = ("auto_batch_size", "batch_size_cache")
# Unlike `torchstone train`, scripts have fixed sizes on a GPU as well.
FIXED_SIZES = {"auto_batch.enabled": "false"}


@dataclass(frozen=True)
class TrainingScript:
    """Continues a run of the first of `previous_prefixes` that has one; without prefixes it makes a new model.

    Its own runs are named `run_prefix`-dN. `data_defaults` apply if no data is set, `defaults` always. `check` may
    return a warning about the config.
    """

    run_prefix: str
    name: str
    description: str
    data_defaults: dict[str, str]
    defaults: dict[str, str]
    previous_prefixes: tuple[str, ...] = ()
    check: Callable[[Config], str | None] = lambda config: None


def run_script(script: TrainingScript) -> None:
    """Runs the command line of this process, and exits as `torchstone` does."""
    args = sys.argv[1:]
    heartbeat.open_standard_streams()
    if "--help" in args or "-h" in args:
        sys.stdout.write(help_text(script))
        return
    with exit_on_error():
        flags, remaining = _split_args(args)
    from torchstone import cli

    cli.main(["train", *remaining], lambda layers, job: resolve_script(script, flags, layers))


def help_text(script: TrainingScript) -> str:
    lines = [f"Usage: python scripts/{script.name}.py [CONFIG] [FLAGS]", "", script.description, ""]
    for flag, (key, sentence) in FLAGS.items():
        if flag == "depth" and script.previous_prefixes:
            runs = ", else ".join(f"runs/{prefix}-dN" for prefix in script.previous_prefixes)
            key, sentence = "model.path", f"Continue from {runs}; without it, from the newest such run."
        if flag != "total_batch_size" or not script.previous_prefixes:
            lines.append(f"  --{flag.replace('_', '-'):<20}{sentence} [{key}]")
    lines += ["", "Defaults:"]
    lines += [f"  --{key} {value}" for key, value in (script.data_defaults | script.defaults).items()]
    lines += [f"  --output-dir runs/{script.run_prefix}-dN", "", "All other arguments go to `torchstone train`;"]
    lines += ["`torchstone train --help-keys` lists the keys: --section.key VALUE, --preset, --max-steps, ..."]
    return "\n".join(lines) + "\n"


def resolve_script(script: TrainingScript, flags: dict[str, str], layers: ConfigLayers) -> Config:
    """The config of a run: the script's own flags on top of the layers, its defaults below."""
    layers = layers.with_overrides(_flag_keys(script, flags, layers))
    if script.previous_prefixes:
        layers = layers.with_overrides(_previous_model(script, flags, layers))
        depth = re.search(r"-d\d+$", Path(str(layers.values()["model.path"])).name)
        name = script.run_prefix + (depth.group() if depth else "")
    else:
        name = f"{script.run_prefix}-d{_new_model_depth(script, layers)}"
    is_auto = layers.values().get("training.batch_size") == "auto"
    defaults = script.defaults | ({} if is_auto else FIXED_SIZES)
    defaults |= {} if "data.path" in layers.values() else script.data_defaults
    defaults["output_dir"] = str(RUNS / name)
    config = resolve(layers, "train", defaults, f"the defaults of {script.name}")
    warning = script.check(config)
    if warning:
        print_line(f"warning: {warning}")
    return config


def check_rows_per_device(config: Config) -> str | None:
    """A warning if a device gets more rows than in pretraining: only that number is known to fit."""
    if not config.training.micro_batch_rows and (config.auto_batch.enabled or config.training.batch_size == "auto"):
        # What is found is measured. A size that is set is not searched for.
        return None
    path = Path(str(config.model.path)) / "config.json"
    try:
        training = read_config_file(path).values.get("training") if path.is_file() else None
    except UsageError as error:
        return f"{error.message}: how many rows fit in memory is unknown"
    if not isinstance(training, dict):
        # A model that is not a run does not say how it was trained.
        return None
    rows, previous = config.training.micro_batch_rows, training.get("batch_size")
    previous = previous if isinstance(previous, int) else _found_rows(path.parent) or DEFAULT_TEXT_ROWS
    if (rows or DEFAULT_TEXT_ROWS) <= previous:
        return None
    source = f"--device-batch-size {rows}" if rows else f"the default of {DEFAULT_TEXT_ROWS} rows per device"
    return f"{source} is more than the {previous} rows that {path.parent} was pretrained with: it may not fit in memory"


def _found_rows(run: Path) -> int | None:
    """The rows that a run has found (`training.batch_size auto`)."""
    from torchstone.checkpoint.manifest import list_checkpoints

    checkpoints = list_checkpoints(run / "checkpoints")
    state = read_json_or_empty(checkpoints[-1][1] / "state.json") if checkpoints else {}
    found = state.get("auto_batch") or {}
    return found.get("size") if found.get("unit") == "device_batch_size" else None


def _split_args(args: list[str]) -> tuple[dict[str, str], list[str]]:
    pairs, remaining = extract_script_flags(args, [name for name in FLAGS if name not in SWITCHES], SWITCHES)
    return dict(pairs), remaining


def _flag_keys(script: TrainingScript, flags: dict[str, str], layers: ConfigLayers) -> dict[str, str]:
    """The script's flags as config keys. A flag whose key is set as well is refused."""
    keys = {flag: key for flag, (key, _) in FLAGS.items()} | (
        {"depth": "model.path"} if script.previous_prefixes else {}
    )
    for flag in flags:
        if keys[flag] in layers.overrides:
            raise UsageError(
                f"--{flag.replace('_', '-')} and --{keys[flag]} are the same setting", "leave out one of them"
            )
    values = {keys[flag]: value for flag, value in flags.items()}
    if "run" in flags:
        values["output_dir"] = str(RUNS / os.path.expanduser(flags["run"]))
    # --depth is not a folder: `_previous_model` finds the run of that depth.
    values.pop("model.path", None)
    if "total_batch_size" in flags:
        length = (layers.values() | values).get("data.context_length", DataConfig.context_length)
        values["training.global_batch_size"] = _samples_per_step(script, flags["total_batch_size"], length)
    return values


def _samples_per_step(script: TrainingScript, total: str, context_length: object) -> str:
    """Samples per step from tokens per step: rows of packed text all have the context length."""
    if script.previous_prefixes:
        raise UsageError(
            f"--total-batch-size needs rows of equal length, which {script.name} may not have",
            "use --training.global_batch_size N, in samples",
        )
    tokens, length = _positive_int("--total-batch-size", total), _positive_int("data.context_length", context_length)
    lower = tokens // length * length
    if lower != tokens:
        choices = f"{lower} or {lower + length}" if lower else str(length)
        raise UsageError(
            f"--total-batch-size {tokens} is not a multiple of the {length} tokens of a row", f"use {choices}"
        )
    return str(tokens // length)


def _new_model_depth(script: TrainingScript, layers: ConfigLayers) -> int:
    if "model.path" in layers.values(with_preset=False):
        raise UsageError(
            f"{script.name} makes a new model, but model.path is set", "use mid_train.py to continue from a model"
        )
    if "model.depth" not in layers.values():
        raise UsageError(f"{script.name} needs the depth of the new model", "add --depth N, such as --depth 4")
    return _positive_int("model.depth", layers.values()["model.depth"])


def _previous_model(script: TrainingScript, flags: dict[str, str], layers: ConfigLayers) -> dict[str, str]:
    """The run to continue from, unless model.path is set. It replaces the new model of a preset."""
    values = layers.values()
    if "depth" not in flags and "model.path" in values:
        return {}
    if "model.depth" in layers.values(with_preset=False):
        raise UsageError(
            f"{script.name} continues from a model, but model.depth makes a new one",
            "leave it out; --depth N uses the run of that depth, --model.path FOLDER any model",
        )
    folder, reason = _previous_run(script, _positive_int("--depth", flags["depth"]) if "depth" in flags else None)
    if values.get("observe.console") != "quiet":
        print_line(f"{script.name}: starting from {folder}, {reason}")
    return {"model.path": str(folder)}


def _previous_run(script: TrainingScript, depth: int | None) -> tuple[Path, str]:
    """The run of the first prefix that has any with a checkpoint, and why it was chosen."""
    from torchstone.checkpoint.manifest import MANIFEST, list_checkpoints

    for prefix in script.previous_prefixes:
        runs = [
            ((checkpoints[-1][1] / MANIFEST).stat().st_mtime_ns, folder)
            for folder in RUNS.glob(f"{prefix}-d*")
            if re.fullmatch(rf"{prefix}-d{depth or '[0-9]+'}", folder.name)
            and (checkpoints := list_checkpoints(folder / "checkpoints"))
        ]
        if runs:
            return max(runs)[1], f"the {prefix} run of depth {depth}" if depth else f"the newest {prefix} run"
    names = " or ".join(str(RUNS / f"{prefix}-d{depth or 'N'}") for prefix in script.previous_prefixes)
    raise UsageError(
        f"nothing to continue from: there is no {names} with a checkpoint",
        f"run base_train.py --depth {depth or 'N'} first, or use --model.path FOLDER",
    )


def _positive_int(name: str, value: object) -> int:
    """Parses a positive integer; 1e6 is accepted too."""
    try:
        number = float(str(value))
        if number >= 1 and number == int(number):
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise UsageError(f"{name} must be a positive integer, not {value!r}")

"""The stages of nanochat (base, mid, chat) as tables over `torchstone train`: what the doors in scripts/ share.

A script is a `Stage` and `run(STAGE)`. Its own flags become keys of the config, all else goes to `train` as it is, and
its defaults lie below preset, file and flags. Some defaults depend on what those say (a run is named by the depth of
its model), so they are made once everything is read, and before it is checked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchstone.config.files import read_tree
from torchstone.config.load import Layers, resolve
from torchstone.config.schema import ROWS_OF_TEXT, Config, DataConfig
from torchstone.errors import UsageError

RUNS = Path("runs")

# A flag, the key it sets, and its help.
FLAGS = {
    "depth": ("model.depth", "Layers of the new model; its width and heads follow."),
    "data": ("data.path", "What to train on: a file, folder or glob, or several with commas."),
    "tokenizer": ("model.tokenizer", "Folder of the tokenizer."),
    "device_batch_size": ("training.batch_size", "Rows per device and micro-step."),
    "max_seq_len": ("data.context_length", "Longest row in tokens."),
    "total_batch_size": ("training.global_batch_size", "Tokens of text per step, a multiple of --max-seq-len."),
    "num_iterations": ("training.max_steps", "Optimizer steps after which the run ends."),
    "run": ("output_dir", "Name of the run: its folder is runs/NAME."),
}
NOT_YET = ("auto_batch_size", "batch_size_margin", "batch_size_cache")


@dataclass(frozen=True)
class Stage:
    """One script: `name` begins its run folders, `follows` those it goes on from, the first found being taken.

    A stage that follows none makes a new model. `without_data` is used where no data is named, `defaults` always.
    `remark` looks at the config and may return a warning.
    """

    name: str
    script: str
    does: str
    without_data: dict[str, str]
    defaults: dict[str, str]
    follows: tuple[str, ...] = ()
    remark: Callable[[Config], str | None] = lambda config: None


def run(stage: Stage) -> None:
    """Runs the command line of this process as a stage, and ends as `torchstone` does."""
    words = sys.argv[1:]
    if "--help" in words or "-h" in words:
        sys.stdout.write(help_text(stage))
        return
    from torchstone import cli

    own, rest = take_flags(words)
    cli.main(["train", *rest], lambda layers, job: settings(stage, own, layers))


def help_text(stage: Stage) -> str:
    lines = [f"Usage: python scripts/{stage.script}.py [CONFIG] [FLAGS]", "", stage.does, ""]
    for flag, (key, sentence) in FLAGS.items():
        if flag == "depth" and stage.follows:
            runs = ", else ".join(f"runs/{name}-dN" for name in stage.follows)
            key, sentence = "model.path", f"Go on from {runs}; without it from the newest of them."
        if flag != "total_batch_size" or not stage.follows:
            lines.append(f"  --{flag.replace('_', '-'):<20}{sentence} [{key}]")
    lines += ["", "Unless said otherwise:"]
    lines += [f"  --{key} {value}" for key, value in (stage.without_data | stage.defaults).items()]
    lines += [f"  --output-dir runs/{stage.name}-dN", "", "Everything else is as in `torchstone train`, whose keys"]
    lines += ["`torchstone train --help-keys` lists: --section.key VALUE, --preset, --max-steps, --print-config …"]
    return "\n".join(lines) + "\n"


def take_flags(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Takes the flags above out of a command line, an empty text where one has no value; the rest stays in order."""
    own: dict[str, str] = {}
    rest: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        flag = name[2:].replace("-", "_") if name.startswith("--") else ""
        if flag not in (*FLAGS, *NOT_YET):
            rest.append(word)
            continue
        if not equals and remaining and not remaining[0].startswith("--"):
            value = remaining.pop(0)
        own[flag] = value
    return own, rest


def settings(stage: Stage, own: dict[str, str], layers: Layers) -> Config:
    """The config of a run: the stage's own flags on top of what was said, its defaults below."""
    layers = layers.plus(_keys(stage, own, layers))
    if stage.follows:
        layers = layers.plus(_former_model(stage, own, layers))
        depth = re.search(r"-d\d+$", Path(str(layers.said()["model.path"])).name)
        name = stage.name + (depth.group() if depth else "")
    else:
        name = f"{stage.name}-d{_depth_of_new_model(stage, layers)}"
    defaults = stage.defaults | ({} if "data.path" in layers.said() else stage.without_data)
    defaults["output_dir"] = str(RUNS / name)
    config = resolve(layers, "train", defaults, f"the defaults of {stage.script}")
    warning = stage.remark(config)
    if warning:
        sys.stderr.write(f"warning: {warning}\n")
    return config


def more_rows_than_before(config: Config) -> str | None:
    """A warning where a device gets more rows than in pretraining, which is all that is known to fit."""
    former = Path(str(config.model.path)) / "config.json"
    training = read_tree(former).values.get("training") if former.is_file() else None
    if not isinstance(training, dict):
        # A model that is no run does not say how it was trained.
        return None
    given, before = config.training.batch_size, training.get("batch_size") or ROWS_OF_TEXT
    if (given or ROWS_OF_TEXT) <= before:
        return None
    taken = f"--device-batch-size {given} is" if given else f"{ROWS_OF_TEXT} rows of text per device, the default, are"
    return f"{taken} more than the {before} rows that {former.parent} was pretrained with: memory may not suffice"


def _keys(stage: Stage, own: dict[str, str], layers: Layers) -> dict[str, str]:
    """Our flags as keys. One that is given by its key as well would be lost, or lose, without a word: refused."""
    keys = {flag: key for flag, (key, _) in FLAGS.items()} | ({"depth": "model.path"} if stage.follows else {})
    for flag, value in own.items():
        name = f"--{flag.replace('_', '-')}"
        if flag in NOT_YET:
            raise UsageError(f"{name}: automatic batch size is not in this version", "give --device-batch-size N")
        if not value:
            raise UsageError(f"{name} needs a value", f"write {name} VALUE or {name}=VALUE")
        if keys[flag] in layers.overrides:
            raise UsageError(f"{name} and {keys[flag]} are one setting here", "give one of them")
    found = {keys[flag]: str(RUNS / value) if flag == "run" else value for flag, value in own.items()}
    # Not a folder yet, but the depth of one.
    found.pop("model.path", None)
    if "total_batch_size" in own:
        length = (layers.said() | found).get("data.context_length", DataConfig.context_length)
        found["training.global_batch_size"] = _samples(stage, own["total_batch_size"], length)
    return found


def _samples(stage: Stage, text: str, context_length: object) -> str:
    """Samples per step from tokens per step: rows of text are all as long as the context."""
    if stage.follows:
        raise UsageError(
            f"--total-batch-size counts the tokens of equal rows, which {stage.script} need not have",
            "give --training.global_batch_size N, in samples",
        )
    tokens, length = _whole("--total-batch-size", text), _whole("data.context_length", context_length)
    below = tokens // length * length
    if below != tokens:
        near = f"{below} and {below + length} are" if below else f"{length} is"
        raise UsageError(f"--total-batch-size {tokens} is not a multiple of the {length} tokens of a row", near)
    return str(tokens // length)


def _depth_of_new_model(stage: Stage, layers: Layers) -> int:
    if "model.path" in layers.said(with_preset=False):
        raise UsageError(f"{stage.script} makes a new model, but model.path names one", "mid_train goes on from it")
    if "model.depth" not in layers.said():
        raise UsageError(f"{stage.script} makes a new model: how deep?", "give --depth N, such as --depth 4")
    return _whole("model.depth", layers.said()["model.depth"])


def _former_model(stage: Stage, own: dict[str, str], layers: Layers) -> dict[str, str]:
    """The run to go on from, unless a model is named. The new model of a preset gives way to it."""
    said = layers.said()
    if "depth" not in own and "model.path" in said:
        return {}
    if "model.depth" in layers.said(with_preset=False):
        raise UsageError(
            f"{stage.script} goes on from a model, but model.depth makes a new one",
            "leave it out; --depth N takes the run of that depth, --model.path FOLDER any model",
        )
    folder, why = _former_run(stage, _whole("--depth", own["depth"]) if "depth" in own else None)
    if said.get("observe.console") != "quiet":
        sys.stderr.write(f"{stage.script}: starting from {folder}, {why}\n")
    return {"model.path": str(folder)}


def _former_run(stage: Stage, depth: int | None) -> tuple[Path, str]:
    """The newest run of the first stage that has any, and in words why this one. Only committed checkpoints count."""
    from torchstone.checkpoint.manifest import MANIFEST, list_checkpoints

    for name in stage.follows:
        saved = [
            ((checkpoints[-1][1] / MANIFEST).stat().st_mtime_ns, folder)
            for folder in RUNS.glob(f"{name}-d*")
            if re.fullmatch(rf"{name}-d{depth or '[0-9]+'}", folder.name)
            and (checkpoints := list_checkpoints(folder / "checkpoints"))
        ]
        if saved:
            return max(saved)[1], f"the {name} run of depth {depth}" if depth else f"the newest {name} run"
    wanted = " or ".join(str(RUNS / f"{name}-d{depth or 'N'}") for name in stage.follows)
    raise UsageError(
        f"nothing to go on from: there is no {wanted} with a checkpoint",
        f"base_train --depth {depth or 'N'} makes one; --model.path FOLDER goes on from any other",
    )


def _whole(name: str, value: object) -> int:
    """A count as people write it, 1e6 included."""
    try:
        number = float(str(value))
        if number >= 1 and number == int(number):
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise UsageError(f"{name} must be a whole number from 1 on, not {value!r}")

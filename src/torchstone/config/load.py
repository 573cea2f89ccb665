"""From presets, a file and overrides to one checked `Config`; later wins, and defaults fill what all leave open.

Every value keeps its origin (`run.yaml:12`, `--optim.eps`), so that a wrong one is reported where it was written, with
the nearest right name. One spelling everywhere: hyphens and underscores are the same letter.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from torchstone.config.files import read_tree
from torchstone.config.schema import NEW_MODEL_KEYS, SECTION_HELP, Config, Impossible, Job, Range, check
from torchstone.errors import UsageError

PRESET_DIR = Path(__file__).parent / "presets"

# Other names that configurations in the field use, and what they are here.
ALIASES = {
    "training.grad_accum_nums": "training.grad_accum_steps",
    "training.num_workers": "data.num_workers",
    "training.learning_rate": "optim.learning_rate",
    "training.max_grad_norm": "optim.max_grad_norm",
    "training.context_length": "data.context_length",
    "training.use_amp": "training.precision",
    "optim.lr": "optim.learning_rate",
    "max_steps": "training.max_steps",
}
BATCH = ("training.global_batch_size", "training.grad_accum_steps")
# How a flag says that a setting has no value.
NOTHING = ("none", "null")
NO_DEFAULTS: Mapping[str, Any] = types.MappingProxyType({})


@dataclass(frozen=True)
class Setting:
    """A value as it was written, and where."""

    value: Any
    origin: str | None
    spelled: str

    @property
    def is_nothing(self) -> bool:
        return str(self.value).lower() in NOTHING


@dataclass(frozen=True)
class Layers:
    """What a preset, a file and overrides say, each by itself: read, but neither merged nor checked."""

    preset: dict[str, Setting]
    file: dict[str, Setting]
    overrides: dict[str, Setting]

    def merged(self) -> dict[str, Setting]:
        return _later_wins(_later_wins(self.preset, self.file), self.overrides)

    def plus(self, overrides: Mapping[str, Any]) -> Layers:
        """With more overrides, in dotted keys."""
        return dataclasses.replace(self, overrides=self.overrides | _collect_pairs(overrides))

    def said(self, with_preset: bool = True) -> dict[str, Any]:
        """The values by key, as they were written. A key that is null, as in what --print-config shows, says nothing.

        Without the preset, a model.path and a model.depth that contradict each other are both there.
        """
        found = self.merged() if with_preset else self.file | self.overrides
        return {key: setting.value for key, setting in found.items() if not setting.is_nothing}


def load_config(
    path: str | Path | None = None,
    preset: str | None = None,
    overrides: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
    job: Job = "train",
    defaults: Mapping[str, Any] = NO_DEFAULTS,
) -> Config:
    """Reads preset, then file, then overrides (dotted keys or nested dictionaries), and checks the whole.

    `defaults` (dotted keys) lie below them all.
    """
    return resolve(read_layers(path, preset, overrides), job, defaults)


def read_layers(
    path: str | Path | None, preset: str | None, overrides: Mapping[str, Any] | Iterable[tuple[str, Any]]
) -> Layers:
    return Layers(
        preset={} if preset is None else _from_file(preset_path(preset), origin=f"preset {preset}"),
        file={} if path is None else _from_file(Path(path)),
        overrides=_collect_pairs(overrides),
    )


def resolve(
    layers: Layers, job: Job = "train", defaults: Mapping[str, Any] = NO_DEFAULTS, origin: str = "the defaults"
) -> Config:
    """The checked config. A default is used where a key is not said, or said to be nothing; `origin` is its place."""
    settings = layers.merged()
    for key, default in _collect_pairs(defaults, origin).items():
        if key not in settings or settings[key].is_nothing:
            settings[key] = default
    config = _build(settings)
    try:
        check(config, job)
    except Impossible as error:
        raise UsageError(_located(error.message, settings.get(error.key)), error.hint) from None
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """The config as plain nested dictionaries, every key present: what `--print-config` shows and a run keeps."""
    return dataclasses.asdict(config, dict_factory=_plain_dict)


def from_dict(values: Mapping[str, Any], job: Job = "train") -> Config:
    """The inverse of `to_dict`, for a run's config.json."""
    return load_config(overrides={key: value for key, value in values.items() if value is not None}, job=job)


def preset_path(name: str) -> Path:
    found = sorted(path.stem for path in PRESET_DIR.glob("*.yaml"))
    if name not in found:
        raise UsageError(f"no preset {name!r}", f"{_did_you_mean(name, found)}the presets are {', '.join(found)}")
    return PRESET_DIR / f"{name}.yaml"


@cache
def fields() -> dict[str, Any]:
    """Every key with its type: `optim.learning_rate` -> Annotated[float, ...]."""
    found: dict[str, Any] = {}
    for name, annotation in typing.get_type_hints(Config, include_extras=True).items():
        if dataclasses.is_dataclass(annotation):
            hints = typing.get_type_hints(annotation, include_extras=True)
            found.update({f"{name}.{key}": hint for key, hint in hints.items()})
        else:
            found[name] = annotation
    return found


def split_flags(tokens: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Takes `--section.key VALUE` and `--section.key=VALUE` out of a command line; the rest stays in order.

    A key that is true or false is a switch without a value: `--data.shuffle` is true.
    """
    rest: list[str] = []
    pairs: list[tuple[str, str]] = []
    remaining = list(tokens)
    while remaining:
        token = remaining.pop(0)
        name, equals, value = token.partition("=")
        if not (name.startswith("--") and "." in name):
            rest.append(token)
            continue
        if not equals and remaining and not remaining[0].startswith("--"):
            value = remaining.pop(0)
        elif not equals:
            key = name[2:].replace("-", "_")
            if fields().get(ALIASES.get(key, key), bool) is not bool:
                raise UsageError(f"{name} needs a value", f"write {name} VALUE or {name}=VALUE")
            value = "true"
        pairs.append((name[2:], value))
    return rest, pairs


def _plain_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in pairs}


def _from_file(path: Path, origin: str | None = None) -> dict[str, Setting]:
    tree = read_tree(path)
    flat = [pair for key, value in tree.values.items() for pair in _flatten(str(key), value)]
    return _collect([(key, value, origin or _place(path, key, tree.lines)) for key, value in flat])


def _collect_pairs(
    values: Mapping[str, Any] | Iterable[tuple[str, Any]], origin: str | None = None
) -> dict[str, Setting]:
    pairs = values.items() if isinstance(values, Mapping) else values
    return _collect([(key, value, origin) for pair in pairs for key, value in _flatten(*pair)])


def _place(path: Path, key: str, lines: dict[str, int]) -> str:
    """The line of the key, or of the nearest thing around it that has one."""
    while key and key not in lines:
        key = key.rpartition(".")[0]
    return f"{path}:{lines[key]}" if key else str(path)


def _flatten(key: str, value: Any) -> list[tuple[str, Any]]:
    if value is None and key in SECTION_HELP:
        # A section whose keys are all commented out.
        return []
    if isinstance(value, Mapping) and (value or key in SECTION_HELP):
        return [pair for sub, inner in value.items() for pair in _flatten(f"{key}.{sub}", inner)]
    return [(key, value)]


def _collect(found: Sequence[tuple[str, Any, str | None]]) -> dict[str, Setting]:
    """The settings of one source. Two names of one setting in it would let their order decide: refused."""
    settings: dict[str, Setting] = {}
    for spelled, value, origin in found:
        name = spelled.replace("-", "_")
        key = ALIASES.get(name, name)
        if key not in fields():
            raise UsageError(f"{_where(origin)}unknown key {spelled!r}", _suggest(key))
        if key in settings and settings[key].spelled != spelled:
            raise UsageError(
                f"{_where(origin)}{spelled!r} and {settings[key].spelled!r} are one setting", "give one of them"
            )
        if name == "training.use_amp":
            value = "bf16" if _convert(value, bool, name) else "fp32"
        settings[key] = Setting(value, origin, spelled)
    return settings


def _later_wins(earlier: dict[str, Setting], later: dict[str, Setting]) -> dict[str, Setting]:
    """A model is either loaded or new, so a later source that says the one takes back the other with its shape. So it
    is with the global batch and the micro-steps, each of which follows from the other.
    """
    if "model.path" in later:
        loaded = "model.path" in earlier
        dropped = [key for key in NEW_MODEL_KEYS if not (loaded and key == "model.tokenizer")]
        earlier = {key: setting for key, setting in earlier.items() if key not in dropped}
    elif "model.depth" in later:
        earlier = {key: setting for key, setting in earlier.items() if key != "model.path"}
    for said, follows in (BATCH, BATCH[::-1]):
        if said in later and not later[said].is_nothing:
            earlier = {key: setting for key, setting in earlier.items() if key != follows}
    return earlier | later


def _suggest(key: str) -> str:
    sections = {name.split(".")[0] for name in fields() if "." in name}
    section, _, leaf = key.partition(".")
    named = key_named(leaf or section)
    if named is not None:
        return f"did you mean {named!r}?"
    near = difflib.get_close_matches(key, [*fields(), *ALIASES], n=1, cutoff=0.6)
    if near:
        return f"did you mean {ALIASES.get(near[0], near[0])!r}?"
    if section in sections:
        leaves = [name.split(".")[1] for name in fields() if name.startswith(f"{section}.")]
        return f"{_did_you_mean(leaf, leaves)}the keys of {section!r} are {', '.join(leaves)}"
    return f"{_did_you_mean(section, sorted(sections))}the sections are {', '.join(sorted(sections))}"


def key_named(leaf: str) -> str | None:
    """The key whose last word, or another name of it, is `leaf`."""
    leaf = leaf.replace("-", "_")
    found = [name for name in (*fields(), *ALIASES) if name.rsplit(".", 1)[-1] == leaf]
    return ALIASES.get(found[0], found[0]) if found else None


def _did_you_mean(name: str, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}? " if near else ""


def _where(origin: str | None) -> str:
    return f"{origin}: " if origin else ""


def _located(message: str, setting: Setting | None) -> str:
    return f"{_where(setting.origin)}{message}" if setting else message


def _build(settings: dict[str, Setting]) -> Config:
    converted: dict[str, Any] = {}
    for key, setting in settings.items():
        try:
            converted[key] = _convert(setting.value, fields()[key], key)
        except UsageError as error:
            raise UsageError(_located(error.message, setting), error.hint) from None
    sections: dict[str, Any] = {}
    for name, annotation in typing.get_type_hints(Config).items():
        if dataclasses.is_dataclass(annotation):
            values = {key.split(".")[1]: value for key, value in converted.items() if key.startswith(f"{name}.")}
            sections[name] = typing.cast(type, annotation)(**values)
        elif name in converted:
            sections[name] = converted[name]
    return Config(**sections)


def _convert(value: Any, annotation: Any, key: str) -> Any:
    """`value`, from a file or a command line, as the type of the field; a message for people where it is not one."""
    origin = get_origin(annotation)
    if origin is Annotated:
        base, *marks = get_args(annotation)
        result = _convert(value, base, key)
        for mark in marks:
            if isinstance(mark, Range) and not mark.holds(result):
                raise UsageError(f"{key} must be {mark}, not {value}")
        return result
    if origin in (Union, types.UnionType):
        return _convert_optional(value, annotation, key)
    if origin is Literal:
        choices = [str(choice) for choice in get_args(annotation)]
        if str(value) not in choices:
            raise UsageError(f"{key} cannot be {value!r}", f"{_did_you_mean(str(value), choices)}{_one_of(choices)}")
        return str(value)
    if origin is tuple:
        return _convert_tuple(value, annotation, key)
    return _convert_plain(value, annotation, key)


def _one_of(choices: list[str]) -> str:
    return f"it is one of {', '.join(choices)}"


def _convert_optional(value: Any, annotation: Any, key: str) -> Any:
    if value is None or (isinstance(value, str) and value.lower() in NOTHING):
        return None
    (inner,) = [choice for choice in get_args(annotation) if choice is not type(None)]
    return _convert(value, inner, key)


def _convert_tuple(value: Any, annotation: Any, key: str) -> tuple[Any, ...]:
    if isinstance(value, str):
        text = "" if value.lower() in NOTHING else value.strip().strip("[]()")
        value = [part.strip() for part in text.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise UsageError(f"{key} is a list, not {value!r}", "write it as 0.9,0.95 or [0.9, 0.95]")
    kinds = get_args(annotation)
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise UsageError(f"{key} takes {len(kinds)} values, not {len(value)}")
    return tuple(_convert(part, kind, key) for part, kind in zip(value, kinds, strict=True))


def _convert_plain(value: Any, kind: type, key: str) -> Any:
    wrong = UsageError(f"{key} must be {_NAMES[kind]}, not {str(value)[:60]!r}")
    if value is None:
        raise wrong
    if kind is str:
        if isinstance(value, bool | list | dict):
            raise wrong
        return str(value)
    if kind is bool:
        if isinstance(value, bool):
            return value
        word = value.lower() if isinstance(value, str) else None
        if word in ("true", "yes", "on", "1"):
            return True
        if word in ("false", "no", "off", "0"):
            return False
        raise wrong
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise wrong
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise wrong from None
    if number != number or number in (float("inf"), float("-inf")):
        raise wrong
    if kind is float:
        return number
    if number != int(number):
        raise wrong
    # Through float only when written as one (1e6): a large whole number keeps every digit.
    return int(value) if isinstance(value, int) or str(value).lstrip("+-").isdigit() else int(number)


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}

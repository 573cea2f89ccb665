"""Builds one validated `Config` from a preset, a file and overrides. Later layers win; defaults fill the rest.

Every value keeps its origin (`run.yaml:12`, `--optim.eps`), so that errors can name it; they also suggest the closest
valid key. Hyphens and underscores are interchangeable.
"""

from __future__ import annotations

import dataclasses
import difflib
import glob
import json
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from torchstone.config.files import read_config_file, read_yaml
from torchstone.config.other_names import EXPLANATIONS, OTHER_NAMES, OTHER_SETTINGS, OTHER_VALUES, TRUE_VALUES
from torchstone.config.schema import (
    FINE_TUNING_DEFAULTS,
    LORA_LEARNING_RATE,
    NEW_MODEL_KEYS,
    PRESET_BATCH_KEYS,
    SECTION_HELP,
    Config,
    InvalidConfigError,
    MemoryText,
    PathText,
    Purpose,
    Range,
    SetName,
    StepsText,
    validate,
)
from torchstone.errors import UsageError

PRESET_DIR = Path(__file__).parent / "presets"

# Key names that other tools use, and our keys for them.
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
# Keys whose value may be a mapping, with an example.
MAPPINGS = {
    "data.columns": "prompt=question,completion=answer",
    "data.validation_path": "task_b=b.jsonl,task_a=a.jsonl",
    "tuning.frozen_adapters": "style=runs/style,math=runs/math",
}
BATCH_KEYS = ("training.global_batch_size", "training.grad_accum_steps")
# Values that set a key to None.
NULL_WORDS = ("none", "null")
OFF_WORDS = ("false", "no", "off", "0", *NULL_WORDS)
EMPTY_HINT = "write a value, or leave it out; is a shell variable unset?"
NO_DEFAULTS: Mapping[str, Any] = types.MappingProxyType({})


@dataclass(frozen=True)
class Setting:
    """A value as it was written, its origin, and the name it was set by."""

    value: Any
    origin: str | None
    name: str

    @property
    def is_null(self) -> bool:
        return str(self.value).lower() in NULL_WORDS


@dataclass(frozen=True)
class ConfigLayers:
    """The settings of a preset, a file and overrides: read, but neither merged nor validated."""

    preset: dict[str, Setting]
    file: dict[str, Setting]
    overrides: dict[str, Setting]

    def merge(self) -> dict[str, Setting]:
        return _merge(_merge(self.preset, self.file), self.overrides)

    def with_overrides(self, overrides: Mapping[str, Any]) -> ConfigLayers:
        """Returns a copy with more overrides (dotted keys)."""
        return dataclasses.replace(self, overrides=self.overrides | _collect_overrides(overrides))

    def values(self, with_preset: bool = True) -> dict[str, Any]:
        """The values by key, as they were written; keys set to null are left out.

        Without the preset nothing is merged: model.path and model.depth may both be present.
        """
        settings = self.merge() if with_preset else self.file | self.overrides
        return {key: setting.value for key, setting in settings.items() if not setting.is_null}


def load_config(
    path: str | Path | None = None,
    preset: str | None = None,
    overrides: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
    purpose: Purpose = "train",
) -> Config:
    """The validated config of a preset, a file and overrides (dotted keys or nested dictionaries)."""
    return resolve(read_config_layers(path, preset, overrides), purpose)


def read_config_layers(
    path: str | Path | None, preset: str | None, overrides: Mapping[str, Any] | Iterable[tuple[str, Any]]
) -> ConfigLayers:
    return ConfigLayers(
        preset={} if preset is None else _read_settings(preset_path(preset), origin=f"preset {preset}"),
        file={} if path is None else _read_settings(Path(path)),
        overrides=_collect_overrides(overrides),
    )


def resolve(
    layers: ConfigLayers,
    purpose: Purpose = "train",
    defaults: Mapping[str, Any] = NO_DEFAULTS,
    origin: str = "the defaults",
) -> Config:
    """Returns the validated config. A default applies to a key that is unset or null; errors call it `origin`.

    With model.path, the defaults of fine-tuning apply to what is then still unset.
    """
    settings = layers.merge()
    _apply_defaults(settings, _collect_overrides(defaults, origin))
    _apply_defaults(settings, _fine_tuning_defaults(settings))
    preset_keys = [key for key in PRESET_BATCH_KEYS if key in layers.preset and settings.get(key) is layers.preset[key]]
    if preset_keys:
        settings["preset_batch_keys"] = Setting(preset_keys, None, "preset_batch_keys")
    config = _build(settings)
    try:
        validate(config, purpose)
    except InvalidConfigError as error:
        raise UsageError(_with_origin(error.message, settings.get(error.key)), error.hint) from None
    return config


def _apply_defaults(settings: dict[str, Setting], defaults: Mapping[str, Setting]) -> None:
    for key, default in defaults.items():
        if key not in settings or settings[key].is_null:
            settings[key] = default


def _fine_tuning_defaults(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """The defaults of a run that starts from a model; none for a new model."""

    def is_set(key: str) -> bool:
        return key in settings and not settings[key].is_null

    if not is_set("model.path"):
        return {}
    defaults = dict(FINE_TUNING_DEFAULTS)
    if is_set("tuning.method") and settings["tuning.method"].value == "lora":
        defaults["optim.learning_rate"] = LORA_LEARNING_RATE
    if is_set("optim.warmup_steps") or (is_set("training.mode") and settings["training.mode"].value == "infinite"):
        # The number of steps is set, or the run has no end to take a share of.
        del defaults["optim.warmup_ratio"]
    return _collect_overrides(defaults, "the defaults with model.path")


def convert_value(key: str, value: Any) -> Any:
    """A value for `key`, as from a file or a command line, in the type of its field."""
    return _convert(value, field_types()[key], key)


def to_dict(config: Config) -> dict[str, Any]:
    """Nested dictionaries with every key, as in `--print-config` and in a run's config.json."""
    values = dataclasses.asdict(config, dict_factory=_plain_dict)
    if not config.preset_batch_keys:
        # Users do not set it; it is there only if reading the dictionary back needs it.
        del values["preset_batch_keys"]
    return values


def from_dict(values: Mapping[str, Any], purpose: Purpose = "train") -> Config:
    """The inverse of `to_dict`, with validation."""
    return load_config(overrides={key: value for key, value in values.items() if value is not None}, purpose=purpose)


def preset_path(name: str) -> Path:
    presets = sorted(path.stem for path in PRESET_DIR.glob("*.yaml"))
    if name not in presets:
        raise UsageError(f"unknown preset {name!r}", f"{_did_you_mean(name, presets)}presets: {', '.join(presets)}")
    return PRESET_DIR / f"{name}.yaml"


@cache
def field_types() -> dict[str, Any]:
    """Every key with its type: `optim.learning_rate` -> Annotated[float, ...]."""
    types_by_key: dict[str, Any] = {}
    for name, annotation in typing.get_type_hints(Config, include_extras=True).items():
        if dataclasses.is_dataclass(annotation):
            hints = typing.get_type_hints(annotation, include_extras=True)
            types_by_key.update({f"{name}.{key}": hint for key, hint in hints.items()})
        else:
            types_by_key[name] = annotation
    return types_by_key


def extract_flags(
    args: Sequence[str], is_wanted: Callable[[str], bool], is_switch: Callable[[str], bool] = lambda name: False
) -> tuple[list[tuple[str, str]], list[str]]:
    """Takes `--name VALUE` and `--name=VALUE` out of a command line; returns the flags and the remaining arguments.

    `is_wanted` and `is_switch` get the name with underscores; it is returned as typed. A switch alone is "true".
    """
    flags: list[tuple[str, str]] = []
    remaining: list[str] = []
    queue = list(args)
    while queue:
        arg = queue.pop(0)
        flag, equals, value = arg.partition("=")
        name = flag[2:].replace("-", "_") if flag.startswith("--") else ""
        if not name or not is_wanted(name):
            remaining.append(arg)
            continue
        if not equals and queue and not queue[0].startswith("--"):
            value = queue.pop(0)
        elif not equals:
            if not is_switch(name):
                raise UsageError(f"{flag} needs a value", f"write {flag} VALUE or {flag}=VALUE")
            value = "true"
        if name in [known.replace("-", "_") for known, _ in flags]:
            raise UsageError(f"{flag} is given twice", "leave out one; a list has commas: a,b")
        flags.append((flag[2:], value))
    return flags, remaining


def extract_config_flags(
    args: Sequence[str], keys: Sequence[str] | None = None
) -> tuple[list[tuple[str, str]], list[str]]:
    """Takes `--section.key VALUE` out of a command line; with `keys`, only these.

    A boolean key is a switch: `--data.shuffle` is true, `--no-data.shuffle` is false.
    """

    def is_switch(name: str) -> bool:
        return field_types().get(ALIASES.get(name, name), bool) is bool

    def expand_no_flag(arg: str) -> str:
        key = arg.removeprefix("--no-").replace("-", "_")
        return f"--{key}=false" if arg.startswith("--no-") and field_types().get(key) is bool else arg

    def is_wanted(name: str) -> bool:
        return "." in name if keys is None else name in keys

    return extract_flags([expand_no_flag(arg) for arg in args], is_wanted, is_switch)


def explain_name(name: str, value: Any = None, given: Collection[str] = ()) -> str | None:
    """What to write instead of `name`, a setting's name in another trainer or without its section; None if unknown.

    `value` is what it was set to. `given` are the keys that are set already: suggesting one of them would not help.
    """
    name = name.replace("-", "_")
    section, _, leaf = name.rpartition(".")
    is_off = str(value).lower() in OFF_WORDS
    # tuning.lora_rnak is a misspelled key, not the LoRA of another trainer.
    prefix = leaf.partition("_")[0]
    is_ours = any(key.startswith(f"{section}.{prefix}_") for key in field_types())
    names = (leaf, "" if is_ours else prefix, "" if section in SECTION_HELP else section)
    explanation = next((EXPLANATIONS[known] for known in names if known in EXPLANATIONS), None)
    if explanation is not None and leaf not in OTHER_NAMES:
        return f"leave it out: {explanation}" if is_off else explanation
    key, _, values = (OTHER_NAMES.get(name) or _key_with_leaf(leaf) or OTHER_NAMES.get(leaf, "")).partition(" ")
    if key in ("", name):
        return None
    if key in given:
        return f"leave it out: in Torchstone this is --{key}, which is given too"
    on, _, off = values.partition("|")
    return f"in Torchstone this is --{key} {off if off and is_off else on}".rstrip()


def _key_with_leaf(leaf: str) -> str | None:
    """Returns the key that ends in `leaf`, or has an alias that does."""
    keys = [key for key in (*field_types(), *ALIASES) if key.rsplit(".", 1)[-1] == leaf]
    return ALIASES.get(keys[0], keys[0]) if keys else None


def _plain_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: _plain_value(value) for key, value in pairs}


def _plain_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain_value(inner) for name, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _read_settings(path: Path, origin: str | None = None) -> dict[str, Setting]:
    file = read_config_file(path)
    pairs = [pair for key, value in file.values.items() for pair in _flatten(str(key), value)]
    return _collect([(key, value, origin or _origin_in_file(path, key, file.lines)) for key, value in pairs])


def _collect_overrides(
    values: Mapping[str, Any] | Iterable[tuple[str, Any]], origin: str | None = None
) -> dict[str, Setting]:
    pairs = values.items() if isinstance(values, Mapping) else values
    return _collect([(key, value, origin) for pair in pairs for key, value in _flatten(*pair)])


def _origin_in_file(path: Path, key: str, lines: dict[str, int]) -> str:
    """The line of the key, or of the innermost section around it that has one."""
    while key and key not in lines:
        key = key.rpartition(".")[0]
    return f"{path}:{lines[key]}" if key else str(path)


def _flatten(key: str, value: Any) -> list[tuple[str, Any]]:
    if value is None and key in SECTION_HELP:
        # A section whose keys are all commented out.
        return []
    is_mapping = key.replace("-", "_") in MAPPINGS
    if isinstance(value, Mapping) and not is_mapping and (value or key in SECTION_HELP):
        return [pair for sub_key, inner in value.items() for pair in _flatten(f"{key}.{sub_key}", inner)]
    return [(key, value)]


def _collect(values: Sequence[tuple[str, Any, str | None]]) -> dict[str, Setting]:
    """The settings of one layer. Two names for one key are an error: otherwise their order would decide."""
    settings: dict[str, Setting] = {}
    for name, value, origin in values:
        normalized = name.replace("-", "_")
        key = ALIASES.get(normalized, normalized)
        if key not in field_types():
            raise UsageError(f"{_prefix(origin)}unknown key {name!r}", _suggest(key, value))
        if key in settings and settings[key].name != name:
            raise UsageError(
                f"{_prefix(origin)}{name!r} and {settings[key].name!r} are the same setting", "leave out one of them"
            )
        if normalized == "training.use_amp":
            value = "bf16" if _convert(value, bool, normalized) else "fp32"
        settings[key] = Setting(value, origin, name)
    return settings


def _merge(earlier: dict[str, Setting], later: dict[str, Setting]) -> dict[str, Setting]:
    """`later` wins. model.path removes the keys of a new model and vice versa. Global batch size and accumulation also
    replace each other, because each is derived from the other."""
    if "model.path" in later:
        is_loaded = "model.path" in earlier
        dropped = [key for key in NEW_MODEL_KEYS if not (is_loaded and key == "model.tokenizer")]
        earlier = {key: setting for key, setting in earlier.items() if key not in dropped}
    elif "model.depth" in later:
        earlier = {key: setting for key, setting in earlier.items() if key != "model.path"}
    for key, other in (BATCH_KEYS, BATCH_KEYS[::-1]):
        if key in later and not later[key].is_null:
            earlier = {name: setting for name, setting in earlier.items() if name != other}
    return earlier | later


def _suggest(key: str, value: Any) -> str:
    sections = {name.split(".")[0] for name in field_types() if "." in name}
    section, _, leaf = key.partition(".")
    same_leaf = _key_with_leaf(leaf or section)
    if same_leaf is not None and key not in OTHER_NAMES and (leaf or section) not in EXPLANATIONS:
        return f"did you mean {same_leaf!r}?"
    explanation = explain_name(key, value)
    if explanation is not None:
        return explanation
    # preset_batch_keys is for the files that a launcher writes.
    names = [name for name in (*field_types(), *ALIASES) if name != "preset_batch_keys"]
    similar = [] if key in sections else difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    if similar:
        return f"did you mean {ALIASES.get(similar[0], similar[0])!r}?"
    if section in sections:
        leaves = [name.split(".")[1] for name in field_types() if name.startswith(f"{section}.")]
        return f"{_did_you_mean(leaf, leaves)}the keys of {section!r} are {', '.join(leaves)}"
    return f"{_did_you_mean(section, sorted(sections), cutoff=0.6)}the sections are {', '.join(sorted(sections))}"


def _similar_value(key: str, value: Any, choices: Sequence[str]) -> str:
    if value is None or value is False:
        return "did you mean 'none'? " if "none" in choices else ""
    name = str(value).lower()
    meant = TRUE_VALUES.get(key) if name == "true" else OTHER_VALUES.get(name)
    return f"did you mean {meant!r}? " if meant in choices else _did_you_mean(name, choices, cutoff=0.6)


def _did_you_mean(name: str, choices: Iterable[str], cutoff: float = 0.5) -> str:
    similar = difflib.get_close_matches(name, list(choices), n=1, cutoff=cutoff)
    return f"did you mean {similar[0]!r}? " if similar else ""


def _prefix(origin: str | None) -> str:
    return f"{origin}: " if origin else ""


def _with_origin(message: str, setting: Setting | None) -> str:
    return f"{_prefix(setting.origin)}{message}" if setting else message


def _build(settings: dict[str, Setting]) -> Config:
    values: dict[str, Any] = {}
    for key, setting in settings.items():
        try:
            values[key] = _convert(setting.value, field_types()[key], key)
        except UsageError as error:
            instead = OTHER_SETTINGS.get((key, str(setting.value).lower()))
            hint = error.hint if instead is None else f"write {instead}"
            raise UsageError(_with_origin(error.message, setting), hint) from None
    sections: dict[str, Any] = {}
    for name, annotation in typing.get_type_hints(Config).items():
        if dataclasses.is_dataclass(annotation):
            section = {key.split(".")[1]: value for key, value in values.items() if key.startswith(f"{name}.")}
            sections[name] = typing.cast(type, annotation)(**section)
        elif name in values:
            sections[name] = values[name]
    return Config(**sections)


def _convert(value: Any, annotation: Any, key: str) -> Any:
    """Converts `value`, from a file or a command line, to the type of the field; raises UsageError if it cannot."""
    origin = get_origin(annotation)
    if annotation in (StepsText, MemoryText) and isinstance(value, int | float):
        return str(value)
    if annotation == PathText:
        if not (name := _convert_plain(value, str, key)).strip():
            raise UsageError(f"{key} is empty", EMPTY_HINT)
        return os.path.expanduser(name)
    if annotation == SetName:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name := _convert_plain(value, str, key)):
            raise UsageError(
                f"{key}: {name!r} cannot be a name",
                f"use letters, digits, _, - and dots, as in {MAPPINGS[key]}; if it is a part of a path, begin with ./",
            )
        return name
    if origin is Annotated:
        base, *annotations = get_args(annotation)
        result = _convert(value, base, key)
        for limit in annotations:
            if isinstance(limit, Range) and not limit.contains(result):
                raise UsageError(f"{key} must be {limit}, not {value}")
        if isinstance(result, int) and result >= 2**63:
            raise UsageError(f"{key} must be less than 2^63, not {value}")
        return result
    if origin in (Union, types.UnionType):
        return _convert_optional(value, annotation, key)
    if origin is Literal:
        choices = [str(choice) for choice in get_args(annotation)]
        if str(value) not in choices:
            # In the words of YAML and JSON: true, null.
            text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
            raise UsageError(
                f"{key} cannot be {text}", f"{_similar_value(key, value, choices)}use one of {', '.join(choices)}"
            )
        return str(value)
    if origin is tuple:
        return _convert_tuple(value, annotation, key)
    if origin is dict:
        return _convert_mapping(value, annotation, key)
    return _convert_plain(value, annotation, key)


def _convert_optional(value: Any, annotation: Any, key: str) -> Any:
    if value is None or (isinstance(value, str) and value.lower() in NULL_WORDS):
        return None
    inner, *mappings = [choice for choice in get_args(annotation) if choice is not type(None)]
    words = [word for choice in mappings if get_origin(choice) is Literal for word in get_args(choice)]
    if words:
        try:
            return value if value in words else _convert(value, inner, key)
        except UsageError as error:
            message = error.message if str(value).isdecimal() else f"{key} cannot be {value!r}"
            raise UsageError(message, error.hint or f"use a number, or {', '.join(words)}") from None
    if get_origin(inner) is dict:
        mappings = [inner]
    if mappings and isinstance(value, str):
        value = _read_named_paths(value, key)
    if mappings and isinstance(value, Mapping):
        if not value:
            raise UsageError(f"{key} is empty", EMPTY_HINT)
        return _convert(dict(value), mappings[0], key)
    return _convert(value, inner, key)


def _convert_mapping(value: Any, annotation: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{key} must be a mapping, not {value!r}", f"write it as --{key} {MAPPINGS[key]}")
    name_type, type_ = get_args(annotation)
    choices = get_args(name_type) if get_origin(name_type) is Literal else ()
    for name, inner in value.items():
        if name not in choices and inner in choices:
            hint = f"did you mean {inner}={name}? The name in the row format comes first, then that of your column"
            raise UsageError(f"{key} cannot be {name!r}", hint)
    return {_convert(name, name_type, key): _convert(inner, type_, f"{key}.{name}") for name, inner in value.items()}


def _read_mappings(text: str, key: str) -> list[Any]:
    """The mappings in `prompt=question,completion=answer`, or in YAML: `{prompt: question}` or a list of these."""
    if text.lower() in NULL_WORDS:
        return []
    if text.strip().startswith(("{", "[")):
        value = read_yaml(text, f"--{key}").values
        return value if isinstance(value, list) else [value]
    pairs = _read_pairs([part for part in text.split(",") if part.strip()])
    if not all(name and value for name, value in pairs):
        raise UsageError(f"{key} must be a mapping, not {text!r}", f"write it as --{key} {MAPPINGS[key]}")
    if len({name for name, _ in pairs}) < len(pairs):
        raise UsageError(f"{key} {text!r} has two columns for one name", "keep one of them")
    return [dict(pairs)] if pairs else []


def _read_pairs(parts: Iterable[str]) -> list[tuple[str, str]]:
    return [(name.strip(), value.strip()) for name, _, value in (part.partition("=") for part in parts)]


def _read_named_paths(text: str, key: str) -> Any:
    """The mapping in `task_b=b.jsonl,task_a=a.jsonl`, or in YAML: `{task_b: [b1.jsonl, b2.jsonl]}`. Text without names
    is returned as it is."""
    text = text.strip()
    if text.startswith("{") and text.endswith("}"):
        return read_yaml(text, f"--{key}").values
    parts = [part.strip() for part in text.split(",")]
    unnamed = [part for part in parts if not _has_name(part, key)]
    if len(unnamed) == len(parts) or "" in parts or text.startswith("["):
        return text
    pairs = _read_pairs(parts)
    several = f"--{key} '{{{pairs[0][0]}: [a.jsonl, b.jsonl]}}'"
    if unnamed:
        hint = f"write it as --{key} {MAPPINGS[key]}; several paths of one set as {several}"
        raise UsageError(f"{key}: {unnamed[0]!r} has no name, but other paths have one", hint)
    if len({name for name, _ in pairs}) < len(pairs):
        raise UsageError(f"{key} {text!r} has a name twice", f"several paths of one set are {several}")
    return dict(pairs)


def _has_name(part: str, key: str) -> bool:
    """Whether `part` is NAME=PATH. If a file has this name, as in year=2025/a.jsonl, it is the path of that file."""
    name, equals, path = part.partition("=")
    if not equals or "/" in name or ":" in name:
        return False
    if not _path_exists(part):
        return True
    if _path_exists(path):
        raise UsageError(
            f"{key}: {part!r} is a file, but also {path!r} with the name {name!r}",
            f"write ./{part} for the file, or '{{{name}: {path}}}' for the name",
        )
    return False


def _path_exists(path: str) -> bool:
    """Whether a file, a folder or a match of a glob exists."""
    # A NUL is refused later.
    with suppress(ValueError):
        path = os.path.expanduser(path)
        return os.path.exists(path) or any(glob.iglob(path, recursive=True))
    return False


def _convert_tuple(value: Any, annotation: Any, key: str) -> tuple[Any, ...]:
    if get_origin(get_args(annotation)[0]) is dict:
        value = _read_mappings(value, key) if isinstance(value, str) else [value] if isinstance(value, dict) else value
    if isinstance(value, str) and value.lstrip().startswith('["'):
        # The strings of a JSON list may have commas.
        with suppress(ValueError):
            value = json.loads(value)
    types_ = get_args(annotation)
    is_path, is_text = types_[0] == PathText, isinstance(value, str)
    value = [value] if isinstance(value, os.PathLike) else value
    if is_text:
        text = "" if value.lower() in NULL_WORDS else value.strip()
        # Brackets around the whole list are not part of it. A path may be called (new).
        if len(text) > 1 and text[0] + text[-1] in (("[]",) if is_path else ("[]", "()")):
            text = text[1:-1].strip()
        value = [part.strip() for part in text.split(",")] if text else []
    if not isinstance(value, list | tuple):
        example = "a.jsonl,b.jsonl" if is_path else "0.9,0.95 or [0.9, 0.95]"
        raise UsageError(f"{key} must be a list, not {value!r}", f"write it as {example}")
    if (is_path and not value) or ((is_path or is_text) and "" in value):
        raise UsageError(f"{key} {'has an empty part' if any(value) else 'is empty'}", EMPTY_HINT)
    if types_[-1] is Ellipsis:
        types_ = (types_[0],) * len(value)
    if len(types_) != len(value):
        raise UsageError(f"{key} takes {len(types_)} values, not {len(value)}")
    return tuple(_convert(part, type_, key) for part, type_ in zip(value, types_, strict=True))


def _convert_plain(value: Any, type_: type, key: str) -> Any:
    error = UsageError(f"{key} must be {_TYPE_NAMES[type_]}, not {str(value)[:60]!r}")
    if value is None:
        raise error
    if type_ is str:
        if not isinstance(value, str | os.PathLike):
            raise UsageError(error.message, "write it in quotes")
        with suppress(UnicodeEncodeError):
            if b"\0" not in os.fsencode(value):
                return os.fspath(value)
        raise UsageError(f"{key} {ascii(str(value))[:60]} has a NUL or a lone surrogate")
    if type_ is bool:
        if isinstance(value, bool):
            return value
        word = value.lower() if isinstance(value, str) else None
        if word in ("true", "yes", "on", "1"):
            return True
        if word in ("false", "no", "off", "0"):
            return False
        raise error
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise error
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise error from None
    if number != number or number in (float("inf"), float("-inf")):
        raise error
    if type_ is float:
        return number
    if number != int(number):
        raise error
    # Via float only if it is written as one (1e6), so that a large integer keeps every digit.
    return int(value) if isinstance(value, int) or str(value).lstrip("+-").isdigit() else int(number)


_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}

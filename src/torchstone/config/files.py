"""Reads JSON (with comments), YAML and TOML config files, with the line of every key.

The line makes a wrong key a one-second fix. A duplicate key is an error in all three formats: the JSON and YAML
libraries would silently use the last one. A small file cannot become a large config: YAML aliases have a limit.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from torchstone.errors import UsageError

# No setting has so many decimal or hexadecimal digits, and Python refuses to convert thousands of them.
LONG_NUMBER = re.compile(r"[\da-fA-F][\da-fA-F_]{400,}")
MAX_BYTES = 16 << 20
# How many values aliases may add to a YAML file.
MAX_YAML_NODES = 10_000


@dataclass(frozen=True)
class ConfigFile:
    """Nested dictionaries, and the line of each dotted key."""

    values: dict[str, Any]
    lines: dict[str, int]


def read_config_file(path: Path) -> ConfigFile:
    """A folder with a config.json stands for it: that of a run."""
    path = path / "config.json" if (path / "config.json").is_file() else path
    readers = {".json": _read_json, ".jsonc": _read_json, ".yaml": read_yaml, ".yml": read_yaml, ".toml": _read_toml}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        hint = f"for data: --data.path {path}" if path.suffix else None
        if not path.exists() and not path.suffix:
            raise UsageError(f"{path} does not exist", "name a config file, or the folder of a run")
        raise UsageError(f"{path}: a config file must end in .json, .yaml or .toml", hint)
    try:
        if path.exists() and not (path.is_file() and path.stat().st_size <= MAX_BYTES):
            raise UsageError(f"{path}: a config must be a file of at most {MAX_BYTES >> 20} MiB")
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"config file {path} does not exist", _list_siblings(path)) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot read the file: {error}") from None
    if match := LONG_NUMBER.search(text):
        line = text.count("\n", 0, match.start()) + 1
        raise UsageError(f"{path}:{line}: a number has {len(match[0])} digits", "write a smaller number")
    try:
        file = reader(text, path)
    except RecursionError:
        raise UsageError(f"{path}: nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    if not isinstance(file.values, dict):
        raise UsageError(f"{path}: a config file must be a mapping of sections, not {type(file.values).__name__}")
    if "model_type" in file.values:
        raise UsageError(f"{path} describes a model, not a run", f"to use the model: --model.path {path.parent}")
    _check_unique(file, path)
    return file


def _check_unique(file: ConfigFile, path: Path) -> None:
    """Raises UsageError if a key is written twice in different ways: `optim.eps`, and `eps` within `optim`."""
    names: set[str] = set()

    def visit(prefix: str, values: dict[Any, Any]) -> None:
        for key, value in values.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict):
                visit(f"{name}.", value)
            elif name in names:
                raise _duplicate_key(path, file.lines.get(name, 1), name)
            names.add(name)

    visit("", file.values)


def _duplicate_key(path: Path | str, line: int, name: str) -> UsageError:
    return UsageError(f"{path}:{line}: duplicate key {name}", "keep one of them")


def _list_siblings(path: Path) -> str | None:
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist either"
    names = sorted(p.name for p in path.parent.iterdir() if p.suffix in (".json", ".yaml", ".yml", ".toml"))
    return f"config files in {path.parent}: {', '.join(names[:8])}" if names else None


_JSON_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/|[{}\[\]:,]|\n|[^\s"{}\[\]:,/]+|[^\S\n]+|.', re.DOTALL)


def _read_json(text: str, path: Path) -> ConfigFile:
    clean = _strip_comments(text)
    try:
        values = json.loads(clean)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}: not JSON: {error.msg}", _quote_line(text, error.lineno)) from None
    return ConfigFile(values, _json_lines(clean, path))


def _strip_comments(text: str) -> str:
    """Replaces comments and trailing commas with spaces, so that line numbers stay the same."""
    tokens = [_blank(token) if token.startswith(("//", "/*")) else token for token in _JSON_TOKEN.findall(text)]
    visible = [index for index, token in enumerate(tokens) if not token.isspace()]
    for index, following in pairwise(visible):
        if tokens[index] == "," and tokens[following] in ("}", "]"):
            tokens[index] = " "
    return "".join(tokens)


def _blank(token: str) -> str:
    return re.sub(r"[^\n]", " ", token)


def _json_lines(text: str, path: Path) -> dict[str, int]:
    """Returns the line of each dotted key. A string before a colon is a key of the innermost open object."""
    lines: dict[str, int] = {}
    open_objects: list[str] = []
    keys: list[set[str]] = []
    line, last_string, key, lists = 1, "", "", 0
    for token in _JSON_TOKEN.findall(text):
        if token.startswith('"'):
            last_string = token
        elif token == ":":
            key = json.loads(last_string)
            name = ".".join([*open_objects[1:], key])
            if key in keys[-1]:
                raise _duplicate_key(path, line, name)
            keys[-1].add(key)
            if lists == 0:
                lines[name] = line
        elif token == "{":
            open_objects.append(key)
            keys.append(set())
        elif token == "}":
            open_objects.pop()
            keys.pop()
        elif token in ("[", "]"):
            lists += 1 if token == "[" else -1
        line += token.count("\n")
    return lines


# In YAML 1.1, which PyYAML reads, 010 is 8, 12:30 is 750, and 2026-01-31 is a date.
_YAML_1_1_VALUE = re.compile(r"[-+]?(?:0[\d_]+|\d[\d_]*(?::[\d.]+)+|\d{4}-\d.*)")


class _Loader(yaml.SafeLoader):
    """Reads 2e-5 as a number, as YAML 1.2 does, and values that only YAML 1.1 has as text."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        is_text = kind is yaml.ScalarNode and implicit[0] and _YAML_1_1_VALUE.fullmatch(value)
        return super().resolve(kind, value, (False, True) if is_text else implicit)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)$"),
    list("-+.0123456789"),
)


def read_yaml(text: str, path: Path | str) -> ConfigFile:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return ConfigFile({}, {})
        lines: dict[str, int] = {}
        _count_yaml_nodes(node, {}, path)
        _yaml_lines(node, (), lines, path)
        return ConfigFile(loader.construct_document(node), lines)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UsageError(f"{path}:{line}: not YAML: {error.problem}", _quote_line(text, line)) from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not YAML: {error}") from None


def _count_yaml_nodes(node: yaml.Node, counts: dict[yaml.Node, int], path: Path | str) -> int:
    """The number of nodes in `node`, with every alias counted as what it stands for. A count of 0 is unfinished."""
    line = node.start_mark.line + 1
    if node not in counts:
        counts[node] = 0
        children = node.value if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        counts[node] = 1 + sum(_count_yaml_nodes(child, counts, path) for child in children)
    if counts[node] == 0:
        raise UsageError(f"{path}:{line}: contains an alias for itself", "write it out")
    # Without aliases a count is at most the number of nodes.
    if counts[node] > MAX_YAML_NODES + len(counts):
        raise UsageError(f"{path}:{line}: aliases make more than {MAX_YAML_NODES} values", "write a smaller config")
    return counts[node]


def _yaml_lines(node: yaml.Node, prefix: tuple[str, ...], lines: dict[str, int], path: Path | str) -> None:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _yaml_lines(item, (*prefix, str(index)), lines, path)
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        key = (*prefix, str(key_node.value))
        line = key_node.start_mark.line + 1
        if ".".join(key) in lines:
            raise _duplicate_key(path, line, ".".join(key))
        lines[".".join(key)] = line
        _yaml_lines(value_node, key, lines, path)


def _read_toml(text: str, path: Path) -> ConfigFile:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"at line (\d+)", str(error))
        line = int(match.group(1)) if match else 1
        raise UsageError(f"{path}:{line}: not TOML: {error}", _quote_line(text, line)) from None
    return ConfigFile(values, _toml_lines(text))


def _toml_lines(text: str) -> dict[str, int]:
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([\w.\-\s\"]+)\]", line):
            section = re.sub(r"[\s\"]", "", header.group(1))
            lines[section] = number
        elif pair := re.match(r"\s*([\w.\-\"]+)\s*=", line):
            key = pair.group(1).replace('"', "")
            lines[f"{section}.{key}" if section else key] = number
    return lines


def _quote_line(text: str, number: int) -> str:
    lines = text.splitlines()
    return f"line {number} is: {lines[number - 1].strip()[:120]}" if 0 < number <= len(lines) else "the file ends early"

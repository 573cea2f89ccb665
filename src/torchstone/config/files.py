"""Reads JSON (comments allowed), YAML and TOML into one tree, remembering the line of every key.

The line is what makes a wrong key a one-second fix. A key given twice is an error in all three formats: their own
readers would let the last one win without a word.
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


@dataclass(frozen=True)
class Tree:
    """What a file says: nested dictionaries, and for each dotted key its line."""

    values: dict[str, Any]
    lines: dict[str, int]


def read_tree(path: Path) -> Tree:
    readers = {".json": _read_json, ".jsonc": _read_json, ".yaml": _read_yaml, ".yml": _read_yaml, ".toml": _read_toml}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UsageError(f"{path}: a config file ends in .json, .yaml or .toml, not {path.suffix or 'nothing'}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such config file", _similar_files(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    try:
        tree = reader(text, path)
    except RecursionError:
        raise UsageError(f"{path}: nested too deeply to be a config") from None
    if not isinstance(tree.values, dict):
        raise UsageError(f"{path}: the top of a config file is a mapping of sections, not {type(tree.values).__name__}")
    return tree


def _similar_files(path: Path) -> str | None:
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist either"
    found = sorted(p.name for p in path.parent.iterdir() if p.suffix in (".json", ".yaml", ".yml", ".toml"))
    return f"config files in {path.parent}: {', '.join(found[:8])}" if found else None


# JSON

_JSON_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/|[{}\[\]:,]|\n|[^\s"{}\[\]:,/]+|[^\S\n]+|.', re.DOTALL)


def _read_json(text: str, path: Path) -> Tree:
    clean = _without_comments(text)
    try:
        values = json.loads(clean, object_pairs_hook=lambda pairs: _unique(pairs, path))
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}: not JSON: {error.msg}", _line_of(text, error.lineno)) from None
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}") from None
    return Tree(values, _json_lines(clean))


def _without_comments(text: str) -> str:
    """Comments and trailing commas become blanks, so that every line keeps its number."""
    tokens = [_blank(token) if token.startswith(("//", "/*")) else token for token in _JSON_TOKEN.findall(text)]
    marks = [number for number, token in enumerate(tokens) if not token.isspace()]
    for this, following in pairwise(marks):
        if tokens[this] == "," and tokens[following] in ("}", "]"):
            tokens[this] = " "
    return "".join(tokens)


def _blank(token: str) -> str:
    return re.sub(r"[^\n]", " ", token)


def _unique(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise UsageError(f"{path}: the key {key!r} is given twice in one object", "keep one of them")
        found[key] = value
    return found


def _json_lines(text: str) -> dict[str, int]:
    """Walks the tokens with the path of open objects: a string followed by a colon is a key of the innermost one."""
    lines: dict[str, int] = {}
    open_objects: list[str] = []
    line, last_string, key, lists = 1, "", "", 0
    for token in _JSON_TOKEN.findall(text):
        if token.startswith('"'):
            last_string = token
        elif token == ":" and lists == 0:
            key = json.loads(last_string)
            lines[".".join([*open_objects[1:], key])] = line
        elif token == "{":
            open_objects.append(key)
        elif token == "}":
            open_objects.pop()
        elif token in ("[", "]"):
            lists += 1 if token == "[" else -1
        line += token.count("\n")
    return lines


# YAML


class _Loader(yaml.SafeLoader):
    """YAML as people write it: PyYAML reads 2e-5 as a string, since YAML 1.1 wants 2.0e-5."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)$"),
    list("-+.0123456789"),
)


def _read_yaml(text: str, path: Path) -> Tree:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return Tree({}, {})
        lines: dict[str, int] = {}
        _yaml_lines(node, (), lines, path)
        return Tree(loader.construct_document(node), lines)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UsageError(f"{path}:{line}: not YAML: {error.problem}", _line_of(text, line)) from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not YAML: {error}") from None


def _yaml_lines(node: yaml.Node, prefix: tuple[str, ...], lines: dict[str, int], path: Path) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        key = (*prefix, str(key_node.value))
        line = key_node.start_mark.line + 1
        if ".".join(key) in lines:
            raise UsageError(f"{path}:{line}: the key {'.'.join(key)} is given twice", "keep one of them")
        lines[".".join(key)] = line
        _yaml_lines(value_node, key, lines, path)


# TOML


def _read_toml(text: str, path: Path) -> Tree:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        line = int(found.group(1)) if found else 1
        raise UsageError(f"{path}:{line}: not TOML: {error}", _line_of(text, line)) from None
    return Tree(values, _toml_lines(text))


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


def _line_of(text: str, number: int) -> str:
    lines = text.splitlines()
    return f"line {number} is: {lines[number - 1].strip()[:120]}" if 0 < number <= len(lines) else "the file ends early"

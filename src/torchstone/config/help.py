"""The help of every config key, from the sentence under its field in schema.py.

Python discards string literals in a class body, so they are read from the source.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from functools import cache
from typing import Literal, get_args, get_origin

from torchstone.config import schema
from torchstone.config.load import field_types
from torchstone.errors import UsageError


@cache
def field_help() -> dict[str, str]:
    """Returns the help sentence of every config key."""
    module = ast.parse(inspect.getsource(schema))
    sentences: dict[str, dict[str, str]] = {}
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            sentences[node.name] = _field_docs(node)
    top = sentences["Config"]
    section_of = {f.name: str(f.type) for f in dataclasses.fields(schema.Config)}
    help_by_key = {}
    for key in field_types():
        section, _, leaf = key.partition(".")
        help_by_key[key] = sentences[section_of[section]][leaf] if leaf else top[section]
    return help_by_key


def config_table(only: str | None = None) -> str:
    """The keys of one section, or of all, with their defaults, as plain text."""
    if only is not None and only not in schema.SECTION_HELP:
        raise UsageError(f"unknown section {only!r}", f"the sections are {', '.join(schema.SECTION_HELP)}")
    lines = []
    for section, title in schema.SECTION_HELP.items():
        if section != (only or section):
            continue
        lines.append(f"\n{section}: {title}")
        for key, default, sentence in _keys_of(section):
            choices = f" [one of: {_choices(key)}]" if _choices(key) else ""
            lines.append(f"  --{key}\n      {sentence}{choices}" + (f" [default: {default}]" if default else ""))
    return "\n".join(lines)


def _keys_of(section: str) -> list[tuple[str, str, str]]:
    """Key, default as text (empty if there is none) and help."""
    default = getattr(schema.Config(), section)
    return [
        (key, _format_default(getattr(default, key.split(".")[1])), sentence)
        for key, sentence in field_help().items()
        if key.startswith(f"{section}.")
    ]


def _choices(key: str) -> str:
    """The choices of a Literal key, empty for other keys. The help sentence of a list names its choices."""
    types = [field_types()[key], *(type_ for type_ in get_args(field_types()[key]) if type_ is not type(None))]
    if len(types) > 2 and get_origin(types[0]) is not Literal:
        # A number, or a word that the help sentence explains.
        return ""
    return ", ".join(value for type_ in types if get_origin(type_) is Literal for value in get_args(type_))


def _format_default(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(str(part) for part in value)
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _field_docs(node: ast.ClassDef) -> dict[str, str]:
    docs = {}
    for statement, following in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


def markdown_table() -> str:
    """All keys as a page of the documentation."""
    lines = [
        "# Config keys",
        "",
        "Generated from the schema: `python -m torchstone.config.help > docs/config-keys.md`.",
    ]
    for section, title in schema.SECTION_HELP.items():
        lines += ["", f"## {section}: {title}", "", "| key | default | meaning |", "|---|---|---|"]
        for key, default, sentence in _keys_of(section):
            choices = f" One of: {_choices(key)}." if _choices(key) else ""
            lines.append(f"| `{key}` | {f'`{default}`' if default else ''} | {sentence}{choices} |")
    lines += ["", "## Outside the sections", "", "| key | default | meaning |", "|---|---|---|"]
    lines.append(f"| `output_dir` | `{schema.Config().output_dir}` | {field_help()['output_dir']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown_table())

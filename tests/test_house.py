"""The house in order: imports point downwards, the linter and the type checker are content, names are kept."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/torchstone"

# Lower floors never import higher ones. Rooms on one floor may know each other, but for those named below.
FLOORS = [
    {"errors", "atomic", "post", "signals", "__init__"},
    {"config", "launch", "demo.corpus", "demo.builtin"},
    {"data", "models", "loss", "optim", "observe"},
    {"parallel", "tuning"},
    {"checkpoint"},
    {"training"},
    {"batchsize", "diagnose"},
    {"api", "testing"},
    {"cli", "stages", "doors", "demo.__main__"},
]
# `import torchstone` hands out the api's names when they are first used.
LAZY = {("__init__", "api")}
STRANGERS = {("models", "data"), ("loss", "data"), ("loss", "models"), ("optim", "data"), ("optim", "models")}


def room(module: str) -> str:
    parts = module.removeprefix("torchstone").lstrip(".").split(".")
    return ".".join(parts[:2]) if parts[0] == "demo" else parts[0] or "__init__"


def floor(name: str) -> int:
    found = [number for number, rooms in enumerate(FLOORS) if name in rooms]
    assert found, f"{name} has no floor: add it to FLOORS where it belongs"
    return found[0]


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "torchstone":
            found += [
                f"torchstone.{alias.name}" if alias.name != "__version__" else "torchstone" for alias in node.names
            ]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return [name for name in found if name.split(".")[0] == "torchstone"]


def own_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return room(".".join(("torchstone", *parts)).removesuffix(".__init__") if parts != ("__init__",) else "torchstone")


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downwards(path: Path) -> None:
    here = own_name(path) if path.parent.name != "demo" or path.stem != "__init__" else "demo.corpus"
    for imported in imports(path):
        there = room(imported)
        if there == here or (here, there) in LAZY:
            continue
        assert floor(there) <= floor(here), f"{path.name}: {here} imports {there}, which lies above it"
        assert (here, there) not in STRANGERS, f"{path.name}: {here} must not know {there}"


def test_every_module_says_what_it_is_for() -> None:
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert not text.strip() or ast.get_docstring(ast.parse(text)), path


def test_no_drawer_for_everything() -> None:
    names = {path.stem for path in SOURCE.rglob("*.py")}
    assert not names & {"utils", "util", "helpers", "common", "misc", "manager"}


@pytest.mark.skipif(find_spec("ruff") is None, reason="ruff is not installed here")
def test_the_linter_is_content() -> None:
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, str(ROOT)], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed here")
def test_the_type_checker_is_content() -> None:
    done = subprocess.run([sys.executable, "-m", "mypy"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr

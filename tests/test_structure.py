"""The structure of the package: imports point down, functions fit a screen, line counts are true, lint passes."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from line_counts import ROOT, counts_table, published_table

SOURCE = ROOT / "src/torchstone"
MAX_FUNCTION_LINES = 60

# A module imports only from its own layer and the ones above it in this list.
LAYERS = [
    {
        "errors", "atomic", "cpu_cores", "terminal", "heartbeat", "parent_process", "rng", "signals",
        "triton_support", "user_cache", "wording", "__init__",
    },
    {"config", "launch", "demo.corpus", "demo.builtin"},
    {"data", "models", "loss", "optim", "observe", "hub", "tuning"},
    {"parallel"},
    {"checkpoint"},
    {"training"},
    {"batchsize", "diagnosis", "doctor"},
    {"api", "testing"},
    {"cli", "__main__", "scripts", "demo.__main__"},
]  # fmt: skip
PRIVATE_TORCH_NAMES = {
    ("torch._C._accelerator_setAllocatorSettings", "training/setup.py"),
    ("torch._assert_async", "loss/chunked.py"),
    ("torch._dynamo.config.recompile_limit", "models/execution.py"),
    ("torch._dynamo.config.specialize_float", "models/attention.py"),
    ("torch._dynamo.maybe_mark_dynamic", "models/attention.py"),
    ("torch._foreach_add_", "optim/adamw.py"),
    ("torch._foreach_copy_", "optim/adamw.py"),
    ("torch._foreach_mul_", "optim/clip.py"),
    ("torch._foreach_norm", "optim/clip.py"),
    ("torch._inductor.cpp_builder", "models/execution.py"),
    ("torch._inductor.exc", "models/execution.py"),
    ("torch.utils._pytree.tree_leaves", "training/replay.py"),
    ("torch.utils._pytree.tree_map_only", "training/replay.py"),
}
# `import torchstone` imports the names of api on first use.
LAZY = {("__init__", "api")}
FORBIDDEN = {("models", "data"), ("loss", "data"), ("loss", "models"), ("optim", "data"), ("optim", "models")}


def package_of(module: str) -> str:
    parts = module.removeprefix("torchstone").lstrip(".").split(".")
    return ".".join(parts[:2]) if parts[0] == "demo" else parts[0] or "__init__"


def layer_of(package: str) -> int:
    layers = [number for number, packages in enumerate(LAYERS) if package in packages]
    assert layers, f"{package} is in no layer: add it to LAYERS"
    return layers[0]


def imported_modules(path: Path) -> list[str]:
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "torchstone":
            modules += [
                "torchstone" if alias.name == "__version__" else f"torchstone.{alias.name}" for alias in node.names
            ]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.append(node.module)
    return [name for name in modules if name.split(".")[0] == "torchstone"]


def own_package(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    if parts == ("demo", "__init__"):
        return "demo.corpus"
    return package_of("torchstone" if parts == ("__init__",) else ".".join(("torchstone", *parts)))


def test_imports_point_downwards() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        own = own_package(path)
        for module in imported_modules(path):
            other = package_of(module)
            if other == own or (own, other) in LAZY:
                continue
            assert layer_of(other) <= layer_of(own), f"{path}: {own} imports {other}, which is in a higher layer"
            assert (own, other) not in FORBIDDEN, f"{path}: {own} must not import {other}"


def test_every_module_has_a_docstring() -> None:
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert not text.strip() or ast.get_docstring(ast.parse(text)), path


def test_no_module_is_a_drawer() -> None:
    names = {path.stem for path in SOURCE.rglob("*.py")}
    assert not names & {"utils", "util", "helpers", "common", "misc", "manager"}


def test_functions_fit_a_screen() -> None:
    """Without their docstrings, which become the help of the commands."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                start = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0].lineno
                lines = node.end_lineno - start + 1
                assert lines <= MAX_FUNCTION_LINES, f"{path}: {node.name} has {lines} lines"


def private_torch_names(path: Path) -> set[str]:
    """Names of torch with a part that starts with one underscore, such as `torch._dynamo.config`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    names = {name for name in names if re.fullmatch(r"torch(\.\w+)*\._([a-z]\w*|C)(\.\w+)*", name)}
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def test_private_names_of_torch_are_few_each_in_one_place_and_exist() -> None:
    used = {
        (name, path.relative_to(SOURCE).as_posix())
        for path in SOURCE.rglob("*.py")
        for name in private_torch_names(path)
    }
    assert used == PRIVATE_TORCH_NAMES
    for name, _ in PRIVATE_TORCH_NAMES:
        assert pkgutil.resolve_name(name) is not None, f"this version of torch has no {name}"
    # What is used of these modules.
    assert callable(pkgutil.resolve_name("torch._inductor.cpp_builder.get_cpp_compiler"))
    assert issubclass(pkgutil.resolve_name("torch._inductor.exc.InvalidCxxCompiler"), Exception)


def test_the_published_line_counts_are_right() -> None:
    assert published_table() == counts_table(), "run: python tests/line_counts.py"


@pytest.mark.skipif(find_spec("ruff") is None, reason="ruff is not installed")
def test_ruff_passes() -> None:
    for command in (["check"], ["format", "--check"]):
        result = subprocess.run(
            [sys.executable, "-m", "ruff", *command, str(ROOT)], capture_output=True, text=True, cwd=ROOT
        )
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed")
def test_mypy_passes() -> None:
    result = subprocess.run([sys.executable, "-m", "mypy"], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr

"""Runs the documentation: every bash and Python block of every page, in order, each page in its own folder.

`# exit N` after a command is the exit code it must have, and `# exit N: TEXT` also what it must print. A `torchstone`
command runs in this process, which saves the seconds that importing torch takes.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from selection import documentation
from torchstone import cli
from torchstone.checkpoint import weight_names
from torchstone.config.help import markdown_table
from torchstone.models import families

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# The package is installed already, or this test would not run; the demo runs in its short form.
REPLACEMENTS = {
    "pip install -c constraints.txt -e .": None,
    "make demo": f"{sys.executable} -m torchstone.demo --quick",
}


def blocks(page: Path) -> list[tuple[str, str]]:
    return re.findall(r"^```(bash|python)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[str]:
    """The commands of a bash block: one per line, except for continuations and here-documents."""
    commands: list[str] = []
    lines = iter(block.replace("\\\n", " ").splitlines())
    for line in lines:
        if not line.strip():
            continue
        here = re.search(r"<<'(\w+)'", line)
        if here:
            for inner in lines:
                line += "\n" + inner
                if inner == here.group(1):
                    break
        commands.append(line)
    return commands


def run_command(command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    argv = shlex.split(command, comments=True) if "<<" not in command else []
    if argv[:1] == ["torchstone"]:
        monkeypatch.setattr(sys, "argv", argv)
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    else:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        script = f'torchstone() {{ {sys.executable} -m torchstone "$@"; }}\n{command}'
        code = subprocess.run(["bash", "-c", script], env=os.environ | {"PATH": path}, check=False).returncode
    output = capfd.readouterr()
    return code, output.out + output.err


@pytest.fixture(scope="module")
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The token cache of all pages: tokenizing the demo corpus for each of them takes seconds."""
    return tmp_path_factory.mktemp("cache")


@documentation
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_the_commands_of_a_page_work(
    page: Path, token_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").symlink_to(token_cache)
    # Two pages may run at once on two cores.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for language, block in blocks(page):
        if language == "python":
            # docs/families.md adds a family; other tests in this process must not see it.
            with patch.dict(families.FAMILIES), patch.dict(weight_names.WEIGHT_NAMES):
                exec(compile(block, f"{page.name}", "exec"), {"__name__": "__main__"})
            continue
        for command in commands(block):
            replacement = REPLACEMENTS.get(command, command)
            if replacement is None:
                continue
            expected = re.search(r"# exit (\d+)(?:: (.*))?$", command)
            code, output = run_command(replacement, monkeypatch, capfd)
            assert code == (int(expected.group(1)) if expected else 0), f"{command}\n{output}"
            if expected and expected.group(2):
                assert expected.group(2) in output, f"{command}\n{output}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_links_point_to_files_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_items_of_lists_are_on_lines_of_their_own(page: Path) -> None:
    assert not re.search(r"\S +(\d+\.|-) \*\*", page.read_text())


def test_every_page_has_a_block_that_runs() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "config-keys.md" or blocks(page), page.name


def test_the_table_of_keys_is_up_to_date() -> None:
    page = (ROOT / "docs/config-keys.md").read_text()
    assert page == markdown_table(), "run: python -m torchstone.config.help > docs/config-keys.md"


def test_the_config_in_the_readme_is_valid(tmp_path: Path) -> None:
    from torchstone.config import load_config

    (text,) = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "run.yaml").write_text(text)
    assert load_config(tmp_path / "run.yaml").checkpoint.save_best


def test_the_tour_names_every_module() -> None:
    tour = (ROOT / "CONTRIBUTING.md").read_text()
    for path in (ROOT / "src/torchstone").rglob("*.py"):
        if path.name not in ("__init__.py", "__main__.py"):
            assert f"`{path.stem}`" in tour or f"{path.stem}.py" in tour, path

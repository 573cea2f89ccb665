"""The documentation is run: every bash and Python block of every page, in order, in a folder of its own.

`# exit N` behind a command is the exit code it must have, and `# exit N: TEXT` what it must say. A `torchstone` command
runs in this process, which saves the seconds that importing torch takes.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from torchstone import cli
from torchstone.config.help import markdown_table
from torchstone.models import families

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# The installation is what makes this test run at all; the demo is run in its shortened form.
INSTEAD = {"pip install -c constraints.txt -e .": None, "make demo": f"{sys.executable} -m torchstone.demo --quick"}


def blocks(page: Path) -> list[tuple[str, str]]:
    found = re.findall(r"^```(bash|python)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [(language, text) for language, text in found]


def commands(block: str) -> list[str]:
    """The commands of a bash block: one a line, but for continuations and here-documents."""
    found: list[str] = []
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
        found.append(line)
    return found


def run_command(command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    words = shlex.split(command, comments=True) if "<<" not in command else []
    if words[:1] == ["torchstone"]:
        monkeypatch.setattr(sys, "argv", words)
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    else:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        code = subprocess.run(["bash", "-c", command], env=os.environ | {"PATH": path}, check=False).returncode
    said = capfd.readouterr()
    return code, said.out + said.err


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_the_commands_of_a_page_work(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # A page adds a family; other tests in this process do not know it.
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))
    for language, block in blocks(page):
        if language == "python":
            exec(compile(block, f"{page.name}", "exec"), {"__name__": "__main__"})
            continue
        for command in commands(block):
            instead = INSTEAD.get(command, command)
            if instead is None:
                continue
            wanted = re.search(r"# exit (\d+)(?:: (.*))?$", command)
            code, said = run_command(instead, monkeypatch, capfd)
            assert code == (int(wanted.group(1)) if wanted else 0), f"{command}\n{said}"
            if wanted and wanted.group(2):
                assert wanted.group(2) in said, f"{command}\n{said}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_every_page_has_a_command_that_runs() -> None:
    without = {"config-keys.md"}
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name in without or blocks(page), page.name


def test_the_table_of_keys_is_the_schemas() -> None:
    page = (ROOT / "docs/config-keys.md").read_text()
    assert page == markdown_table(), "run: python -m torchstone.config.help > docs/config-keys.md"


def test_the_readmes_config_is_valid(tmp_path: Path) -> None:
    from torchstone.config import load_config

    (text,) = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "run.yaml").write_text(text)
    assert load_config(tmp_path / "run.yaml").checkpoint.save_best


def test_the_tour_names_every_room() -> None:
    tour = (ROOT / "CONTRIBUTING.md").read_text()
    for path in (ROOT / "src/torchstone").rglob("*.py"):
        name = path.name if path.parent.name != "torchstone" or path.stem != "__init__" else "api.py"
        room = path.parent.name
        assert name in tour or name == "__init__.py" or room in ("loss", "optim", "observe") or name == "help.py", path

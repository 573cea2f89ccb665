"""The lines of code by package, as CONTRIBUTING.md publishes them. `python tests/line_counts.py` updates the table."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
TABLE = re.compile(r"^\| package \| lines \|\n(?:\|.*\n)+", re.MULTILINE)


def count(*paths: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def counts_table() -> str:
    source = ROOT / "src/torchstone"
    rows = {f"`{path.name}/`": count(*path.rglob("*.py")) for path in sorted(source.iterdir()) if path.is_dir()}
    rows = {name: lines for name, lines in rows.items() if lines}
    rows["top level"] = count(*source.glob("*.py"))
    rows["`src/` in total"] = sum(rows.values())
    rows["`tests/`"] = count(*(ROOT / "tests").rglob("*.py"))
    lines = ["| package | lines |", "|---|---|", *(f"| {name} | {number:,} |" for name, number in rows.items())]
    return "\n".join(lines) + "\n"


def published_table() -> str:
    match = TABLE.search(PAGE.read_text())
    return match[0] if match else ""


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(counts_table(), PAGE.read_text()))

"""Every layout against Transformers in one process: logits, gradients, norms, weights, losses, files.

What is compared, and how, is in tests/layouts.py; the limits are parity.py's. Cases that need the same number of
processes share a launch. `python tests/training/test_layouts.py` prints the largest differences, a JSON line a case.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from layouts import Case, check_cases, judge, write_reference
from parity import Worst
from selection import the_rest
from tiny_families import make_model
from torchstone.testing import launch_procs

FAMILIES = {"llama": "tied", "qwen3": "head size", "granite": "multipliers"}
FUSED = ("qkv", "gate_up")
TP4: dict[str, Any] = {"tp": 4}
# By the number of processes: a name, the sizes and switches, and whether rows hold several documents.
LAYOUTS: dict[int, list[tuple[str, dict[str, Any], bool]]] = {
    2: [
        ("dp_replicate 2", {"dp_replicate": 2}, True),
        ("zero 1", {"zero": 1}, False),
        ("zero 2", {"zero": 2}, True),
        ("zero 3", {"zero": 3}, True),
        ("tp 2", {"tp": 2, "sequence": False}, False),
        ("tp 2 + sequence", {"tp": 2}, True),
        ("pp 2", {"pp": 2}, True),
        ("pp 2 interleaved", {"pp": 2, "schedule": "interleaved"}, False),
    ],
    4: [
        ("hsdp 2x2", {"dp_replicate": 2, "dp_shard": 2}, True),
        ("tp 4, 2 KV heads", TP4, True),
        ("dp 2 x tp 2", {"tp": 2}, True),
        ("tp 2 x pp 2", {"tp": 2, "pp": 2}, True),
    ],
    8: [("dp 2 x tp 2 x pp 2", {"tp": 2, "pp": 2}, True)],
    32: [("dp 4 x tp 2 x pp 4", {"tp": 2, "pp": 4}, True)],
}


# Llama runs fused in all of them, the others where matrices are cut in a way of their own.
FUSED_IN_ALL = ("zero 3", "tp 2 + sequence", "pp 2", "dp 2 x tp 2", "tp 2 x pp 2", "dp 2 x tp 2 x pp 2")


def model_of(root: Path, family: str, layers: int) -> Path:
    """A tiny model with two key/value heads, and beside it the reference's course on it."""
    folder = root / f"{family}-{layers}"
    if not folder.exists():
        make_model(folder, family, FAMILIES[family], num_hidden_layers=layers, num_key_value_heads=2)
        write_reference(folder, reference_of(folder))
    return folder


def reference_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-reference")


def cases_of(root: Path, family: str, processes: int) -> list[Case]:
    """Regular ones step-locked and free-running; fused ones, and 32 processes on few cores, step-locked alone. A layer
    for each stage, and two where there is but one."""
    found = []
    for name, sizes, packed in LAYOUTS[processes]:
        stages = sizes.get("pp", 1) * (2 if sizes.get("schedule") == "interleaved" else 1)
        folder = str(model_of(root, family, max(2, stages)))
        # Rows of many shapes make tensor parallelism slow: one family is enough for them.
        packed = packed or (family != "llama" and "tp" in sizes)
        found.append(Case(name, folder, sizes, (), packed, free_running=processes < 32))
        if processes < 32 and (family == "llama" or name in FUSED_IN_ALL):
            found.append(Case(f"{name}, fused", folder, sizes, FUSED, packed, free_running=False))
    return found


def compared(root: Path, family: str, processes: int) -> dict[str, Worst]:
    saved = root / f"saved-{family}-{processes}"
    cases = cases_of(root, family, processes)
    references = {case.folder: str(reference_of(Path(case.folder))) for case in cases}
    found = launch_procs(check_cases, processes, cases, references, str(saved), timeout=300)
    return {
        case.name: judge(case, [rank[number] for rank in found], saved / case.name) for number, case in enumerate(cases)
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.mark.parametrize(
    ("family", "processes"),
    [
        # From half a minute on for each family: one has them all.
        pytest.param(family, processes, marks=the_rest if processes > 4 and family != "llama" else ())
        for family in FAMILIES
        for processes in LAYOUTS
    ],
)
def test_custom_modeling_matches_original(family: str, processes: int, root: Path) -> None:
    assert compared(root, family, processes).keys() >= {name for name, _, _ in LAYOUTS[processes]}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        for family in FAMILIES:
            for processes in LAYOUTS:
                began = time.time()
                for name, worst in compared(Path(place), family, processes).items():
                    print(json.dumps({"family": family, "processes": processes, "layout": name, **vars(worst)}))
                print(
                    json.dumps({"family": family, "processes": processes, "seconds": time.time() - began}), flush=True
                )

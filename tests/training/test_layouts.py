"""Every parallel layout against Transformers in one process: logits, gradients, norms, weights, losses, files.

tests/layouts.py has the comparison, parity.py the limits. Layouts with the same number of processes share a launch.
`python tests/training/test_layouts.py` prints the largest differences, one JSON line per layout.
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

from layouts import Case, check_layouts
from selection import RUNS_ALL, the_rest
from tiny_families import make_model

FAMILIES = {"llama": "tied", "qwen3": "head size", "granite": "multipliers"}
# By number of processes: the layouts, and whether rows hold several documents.
LAYOUTS: dict[int, dict[str, tuple[dict[str, Any], bool]]] = {
    2: {
        "dp_replicate 2": ({"dp_replicate": 2}, True),
        "zero 1": ({"zero": 1}, False),
        "zero 2": ({"zero": 2}, True),
        "zero 3": ({"zero": 3}, True),
        "tp 2": ({"tp": 2, "sequence": False}, False),
        "tp 2 + sequence": ({"tp": 2}, True),
        "pp 2": ({"pp": 2}, True),
        "pp 2 interleaved": ({"pp": 2, "schedule": "interleaved"}, False),
    },
    4: {
        "hsdp 2x2": ({"dp_replicate": 2, "dp_shard": 2}, True),
        "tp 4, 2 KV heads": ({"tp": 4}, True),
        "dp 2 x tp 2": ({"tp": 2}, True),
        "tp 2 x pp 2": ({"tp": 2, "pp": 2}, True),
    },
    8: {"dp 2 x tp 2 x pp 2": ({"tp": 2, "pp": 2}, True), "tp 2 x pp 4": ({"tp": 2, "pp": 4}, True)},
    32: {"dp 4 x tp 2 x pp 4": ({"tp": 2, "pp": 4}, True)},
}
# Also with fused matrices, which tp shards in an order of their own.
FUSED = ("tp 2 + sequence", "pp 2")
# Also with Muon, step-locked only: over several steps the rounding of its bf16 iteration adds up.
MUON = ("zero 3", "pp 2", "hsdp 2x2", "dp 2 x tp 2")
# By default Llama runs in all layouts but this one, the other families in those below.
LARGEST = "dp 4 x tp 2 x pp 4"
REPRESENTATIVE = ("pp 2", "tp 4, 2 KV heads")


def make_cases(root: Path, family: str, processes: int, names: list[str], free_running: bool = RUNS_ALL) -> list[Case]:
    """Step-locked and free-running. Only step-locked if fused or if 32 processes share a few cores; and where more than
    two processes combine what two do, unless `free_running`."""
    cases, free_running = [], processes == 2 or (free_running and processes < 32)
    for name in names:
        parallel, packed = LAYOUTS[processes][name]
        folder = str(model_folder(root, family, parallel))
        # DTensor plans every operation anew for every shape, so padded rows are slow with tp: one family has them.
        packed = packed or (family != "llama" and "tp" in parallel)
        cases.append(Case(name, folder, parallel, (), packed, free_running=free_running))
        if name in FUSED:
            cases.append(Case(f"{name}, fused", folder, parallel, ("qkv", "gate_up"), packed, free_running=False))
        if name in MUON and family == "llama":
            muon = Case(f"{name}, muon", folder, parallel, ("qkv", "gate_up"), packed, False, "muon")
            cases.append(muon)
    return cases


def model_folder(root: Path, family: str, parallel: dict[str, Any]) -> Path:
    """A tiny model with two key/value heads and one layer per stage, but at least two."""
    stages = parallel.get("pp", 1) * (2 if parallel.get("schedule") == "interleaved" else 1)
    layers = max(2, stages)
    folder = root / f"{family}-{layers}"
    if not folder.exists():
        make_model(folder, family, FAMILIES[family], num_hidden_layers=layers, num_key_value_heads=2)
    return folder


def parameters() -> list[Any]:
    parameters = []
    for family in FAMILIES:
        for processes, layouts in LAYOUTS.items():
            default = [name for name in layouts if name in REPRESENTATIVE or (family == "llama" and name != LARGEST)]
            rest = [name for name in layouts if name not in default]
            if default:
                parameters.append(pytest.param(family, processes, default, id=f"{family}-{processes}"))
            if rest:
                parameters.append(
                    pytest.param(family, processes, rest, id=f"{family}-{processes}-rest", marks=the_rest)
                )
    return parameters


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.mark.parametrize(("family", "processes", "names"), parameters())
def test_custom_modeling_matches_original(family: str, processes: int, names: list[str], root: Path) -> None:
    cases = make_cases(root, family, processes, names)
    assert check_layouts(cases, processes, root).keys() >= set(names)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            for processes, layouts in LAYOUTS.items():
                start = time.time()
                cases = make_cases(Path(folder), family, processes, list(layouts), free_running=True)
                for name, worst in check_layouts(cases, processes, Path(folder)).items():
                    print(json.dumps({"family": family, "processes": processes, "layout": name, **worst}))
                seconds = time.time() - start
                print(json.dumps({"family": family, "processes": processes, "seconds": seconds}), flush=True)

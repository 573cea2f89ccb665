"""A NaN on CUDA, where the numbers of a step are read when the next one has been started."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exact_runs import exact_metrics
from test_bad_steps import DOWN, BadRows, Plant, plain
from torchstone import api
from torchstone.errors import NumericalError
from torchstone.observe.metrics import read_metrics
from torchstone.training.nan_dump import read_dump

pytestmark = pytest.mark.gpu
Settings = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_and_moments_are_those_before_the_step(precision: str, settings: Settings, tmp_path: Path) -> None:
    bad = BadRows(3)
    values = plain(settings, tmp_path, range(16)) | {"system.device": "cuda", "training.precision": precision}
    with pytest.raises(NumericalError, match=f"step 3: loss nan(.|\n)*first bad module: {DOWN}: its output"):
        api.train(None, values, callbacks=[bad])
    assert bad.step == 4, "step 4 had been started"
    for name, value in bad.state().items():
        assert torch.equal(value, bad.before[name]), name
    dump = read_dump(tmp_path / "run/debug/nan_debug_step_3.pkl")
    assert any(math.isnan(gradient.flat[0]) for gradient in dump["gradients"].values())


def test_a_skipped_batch_is_as_if_it_were_not_in_the_data(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    cuda = {"system.device": "cuda"}
    api.train(
        None, plain(settings, tmp_path / "a", range(16), debug__on_nan="skip") | cuda, callbacks=[Plant("weight", 3)]
    )
    rest = [number for number in range(16) if number not in (4, 5)]
    api.train(None, plain(settings, tmp_path / "b", rest) | cuda)
    a, b = exact_metrics(tmp_path / "a/run"), exact_metrics(tmp_path / "b/run")
    assert [line["lr"] for line in a] == [line["lr"] for line in b]
    assert [line["loss"] for line in a] == pytest.approx([line["loss"] for line in b], rel=1e-4)
    assert [line["skipped_steps"] for line in read_metrics(tmp_path / "a/run/metrics.jsonl")] == [0, 0, 1, 1, 1, 1]

"""Two ranks save together: by the clock of rank 0, and only if the state of both is finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from torchstone import api
from torchstone.checkpoint.manifest import list_checkpoints
from torchstone.config import load_config
from torchstone.errors import NumericalError
from torchstone.testing import launch_procs
from torchstone.training.run import Callback, Run

NAME = "layers.1.mlp.down.weight"


class ClocksAndOverflow(Callback):
    """An hour passes on rank 1 in step 2 and on rank 0 in step 3; rank 1's shard of a matrix overflows in step 5."""

    def on_step(self, run: Run, metrics: dict[str, Any]) -> None:
        event = (run.ctx.rank, metrics["step"])
        if event in ((1, 2), (0, 3)):
            run.saved_at -= 3600
        if event == (1, 5):
            parameter = dict(run.model.named_parameters())[NAME].detach()
            assert isinstance(parameter, DTensor)
            parameter.to_local()[-1, -1] = torch.inf


def train(overrides: dict[str, Any]) -> str:
    with pytest.raises(NumericalError) as caught:
        api.train(load_config(overrides=overrides), callbacks=[ClocksAndOverflow()])
    return str(caught.value)


def test_ranks_agree_on_when_to_save_and_on_what_is_not_finite(settings: Callable[..., dict[str, Any]]) -> None:
    overrides = settings(training__max_steps=5, parallel__dp_shard=2)
    messages = launch_procs(train, 2, overrides)
    root = Path(overrides["output_dir"]) / "checkpoints"
    assert [step for step, _ in list_checkpoints(root)] == [3]
    assert messages[0] == messages[1]
    assert (
        "step 5 made 1 weights or moments infinite or NaN, such as model.layers.1.mlp.down_proj.weight" in messages[0]
    )
    assert "step-00000003 is kept" in messages[0]

"""The defaults on a GPU: what `auto` chooses, that no step waits for the device, and what out of memory proposes."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import flags, write_rows
from tiny_families import make_model
from torchstone import api
from torchstone.errors import OutOfMemoryError
from torchstone.training.run import Callback, Run

Settings = Callable[..., dict[str, Any]]
Command = Callable[..., tuple[int, str, str]]
FAMILIES = [("llama", "yarn"), ("gemma3_text", "alternating"), ("phi3", "longrope, never beyond")]


def test_the_start_line_says_what_was_chosen(torchstone: Command, settings: Settings) -> None:
    values = settings(training__max_steps=2, observe__console="lines", system__device="cuda")
    code, _, err = torchstone("train", *flags(values))
    assert code == 0, err
    assert "precision: bf16 (fp32 master weights); attention: " in err
    assert "; loss: chunked (on a GPU, 4096 tokens at a time); " in err
    assert "; compile: none (the run is too short: " in err
    code, _, err = torchstone("train", *flags(values | {"output_dir": f"{values['output_dir']}-new"}), "--print-config")
    assert err.startswith("auto on cuda:0: training.precision bf16 (fp32 master weights); ")
    assert "; model.loss chunked (on a GPU); model.recompute elementwise (almost free in compiled blocks); " in err
    assert "model.compile block (the first steps take longer, but none (like model.recompute) in a run of less " in err


class ForbidSync(Callback):
    """From the third step on, an operation that waits for the device is an error."""

    def on_step_begin(self, run: Run, step: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")


@pytest.mark.usefixtures("sync_mode")
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("compile", ["none", "block"])
@pytest.mark.parametrize("case", FAMILIES, ids="-".join)
def test_no_step_waits_for_the_device(
    case: tuple[str, str], compile: str, packing: bool, settings: Settings, tmp_path: Path, chat_file: Path
) -> None:
    values = settings(training__max_steps=6, system__device="cuda", checkpoint__at_end=False, model__compile=compile)
    for key in ("model.depth", "model.width", "model.heads"):
        del values[key]
    values |= {"model.path": str(make_model(tmp_path / "model", *case)), "data.path": str(chat_file)}
    values |= {"data.packing": packing, "training.global_batch_size": 8, "data.context_length": 64}
    values |= {"training.max_tokens_per_gpu": 128} if packing else {"training.batch_size": 4}
    api.train(overrides=values, callbacks=[ForbidSync()])
    lines = (Path(values["output_dir"]) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


def out_of_memory_hint(values: dict[str, Any]) -> str:
    with pytest.raises(OutOfMemoryError) as caught:
        api.train(overrides=values)
    hint = caught.value.hint or ""
    # Its traceback holds the model.
    del caught
    gc.collect()
    torch.cuda.empty_cache()
    return hint


@pytest.fixture
def limit_memory() -> Iterator[Callable[[int], None]]:
    """Limits what this process may have to so many GiB."""
    total = torch.cuda.get_device_properties(0).total_memory
    yield lambda size: torch.cuda.set_per_process_memory_fraction(size * 2**30 / total)
    torch.cuda.set_per_process_memory_fraction(1.0)


LARGE = {
    "system.device": "cuda", "model.depth": 16, "model.width": 512, "training.max_steps": 3, "checkpoint.at_end": False,
    "model.compile": "block",
}  # fmt: skip


def test_out_of_memory_names_the_change_that_fits(
    settings: Settings, tmp_path: Path, limit_memory: Callable[[int], None]
) -> None:
    """A row of one document cannot be split."""
    text = write_rows(tmp_path / "long.jsonl", [{"text": "a b c d e f g h " * 20_000}])
    values = settings() | LARGE | {"data.path": str(text), "data.context_length": 65536}
    values |= {"training.batch_size": 1, "training.global_batch_size": 1}
    limit_memory(7)
    hint = out_of_memory_hint(values)
    assert hint.startswith("use --model.recompute full, which needs about ")
    assert re.search(r"these changes save most: 1\. .*--model\.recompute full \([^)]*, which fits\)", hint), hint
    assert api.train(overrides=values | {"model.recompute": "full"}).step == 3


def test_a_step_that_is_out_of_memory_is_repeated(settings: Settings, limit_memory: Callable[[int], None]) -> None:
    sizes = {"data.context_length": 1024, "training.batch_size": 64, "training.global_batch_size": 64}
    values = settings() | LARGE | sizes
    losses = []
    for name, size in (("all", None), ("little", 7)):
        if size is not None:
            limit_memory(size)
        values["output_dir"] = f"{settings()['output_dir']}-{name}"
        api.train(overrides=values)
        lines = [json.loads(line) for line in (Path(values["output_dir"]) / "metrics.jsonl").read_text().splitlines()]
        assert [line["oom_splits"] > 0 for line in lines] == [size is not None] * 3
        losses.append([line["loss"] for line in lines])
        gc.collect()
        torch.cuda.empty_cache()
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)

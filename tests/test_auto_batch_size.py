"""Automatic batch size: the search, what a probe measures and leaves behind, the cache, and runs that use it."""

from __future__ import annotations

import gc
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial, partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from exact_runs import StopAt, assert_same_run, exact_metrics
from test_out_of_memory import Memory
from tiny import flags, write_rows
from torchstone import api, discover_batch_size
from torchstone.batchsize import probe
from torchstone.batchsize.auto import choose_micro_batch, remember_out_of_memory
from torchstone.batchsize.cache import Entry, read_entries, write_entries
from torchstone.batchsize.probe import ModuleProbe, RunProbe
from torchstone.batchsize.run_discovery import Discovery, cache_key, is_wanted
from torchstone.batchsize.search import (
    Measurement,
    expected_load,
    fastest_size,
    find_largest,
    is_saturated,
    micro_step_seconds,
)
from torchstone.config.load import load_config
from torchstone.config.schema import ParallelConfig, parse_memory
from torchstone.data.loader import StepBatch
from torchstone.errors import OutOfMemoryError, UsageError
from torchstone.launch.memory_limit import MemoryLimit, read_limit, write_limit
from torchstone.observe.console import Console
from torchstone.parallel.mesh import SINGLE_PROCESS, ParallelContext, init_distributed
from torchstone.testing import launch_procs
from torchstone.training import checks
from torchstone.training.run import Run
from torchstone.training.setup import build_run

Settings = Callable[..., dict[str, Any]]
Command = Callable[..., tuple[int, str, str]]
CPU = torch.device("cpu")
KINDS = [
    "text",
    "padded, bf16, Muon",
    "packed conversations",
    "LoRA, recomputed",
    "OSFT, eager, chunked",
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHSTONE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/auto_batch_cache"


class Loads:
    """Measures sizes by a formula, and keeps which."""

    def __init__(self, load: Callable[[int], float], memory: float = math.inf) -> None:
        self.load, self.memory, self.sizes = load, memory, list[int]()

    def __call__(self, size: int) -> Measurement:
        self.sizes.append(size)
        load = self.load(size)
        return Measurement(load if load <= self.memory else math.inf, 1.0 + size)


class TestSearch:
    def test_exponential_search_doubles_while_sizes_fit(self) -> None:
        loads = Loads(lambda size: 0.001 * size)
        result = find_largest(loads, limit=64)
        assert loads.sizes == [1, 2, 4, 8, 16, 32, 64]
        assert (result.largest, result.is_exact) == (64, True)

    def test_a_straight_line_is_followed_to_its_end(self) -> None:
        loads = Loads(lambda size: 0.1 + 0.009 * size)
        result = find_largest(loads, limit=1000, base_load=0.1)
        assert loads.sizes == [1, 2, 4, 8, 16, 32, 64, 100, 101]
        assert (result.largest, result.is_exact) == (100, True)

    def test_bisection_finds_a_limit_that_no_expectation_has(self) -> None:
        loads = Loads(lambda size: 0.1 if size < 77 else math.inf)
        result = find_largest(loads, limit=1000)
        assert (result.largest, result.is_exact) == (76, True)
        assert len(loads.sizes) <= 14

    @pytest.mark.parametrize("seed", range(40))
    def test_it_is_exact_for_any_load_that_grows(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        base, slope, bend, jump = (torch.rand(4, generator=random, dtype=torch.float64) ** 3).tolist()
        limit = int(torch.randint(1, 300, (), generator=random))

        def load(size: int) -> float:
            return 0.8 * base + 0.3 * slope * size + 0.01 * bend * size**2 + 0.1 * jump * (size // 7)

        loads = Loads(load, memory=1.2)
        result = find_largest(loads, limit)
        fitting = [size for size in range(1, limit + 1) if load(size) <= 1]
        assert (result.largest, result.is_exact) == (max(fitting, default=0), True)
        assert len(loads.sizes) == len(set(loads.sizes)) <= 16

    def test_sizes_that_would_run_out_of_memory_are_not_tried(self) -> None:
        """In all of these a parabola, or a step without tokens, tells it before."""
        for base, slope, bend in [(0.7, 0.2, 0), (0.5, 0.4, 0), (0.1, 0.01, 0.002), (0, 0.05, 0.01), (0.9, 0.08, 0)]:
            loads = Loads(lambda size, a=base, b=slope, c=bend: a + b * size + c * size**2)  # type: ignore[misc]
            result = find_largest(loads, 1000, base, max_load=1.15)
            assert max(map(loads.load, loads.sizes)) <= 1.15
            assert result.largest == max(size for size in range(1, 100) if loads.load(size) <= 1)

    def test_an_expectation_is_no_measurement(self) -> None:
        """Size 2 would fit, but what a step of few tokens takes says that it may not."""
        result = find_largest(Loads(lambda size: 0.6 + 0.03 * size), 100, base_load=0.05, max_load=1.15)
        assert (result.largest, result.is_exact) == (1, False)

    def test_nothing_fits(self) -> None:
        loads = Loads(lambda size: 2.0)
        assert find_largest(loads, 8).largest == 0
        assert loads.sizes == [1]

    def test_it_ends_when_larger_sizes_are_no_faster(self) -> None:
        seconds = {1: 1.0, 2: 1.6, 4: 3.0, 8: 5.99, 16: 11.98}
        measured = {size: Measurement(0.1, value) for size, value in seconds.items()}
        assert is_saturated(measured)
        assert not is_saturated({size: each for size, each in measured.items() if size < 16})
        assert not is_saturated(measured | {16: Measurement(0.1, 11.0)})
        result = find_largest(lambda size: measured[size], 10**6, should_stop=is_saturated)
        assert (result.largest, result.is_exact) == (16, False)

    def test_of_sizes_that_are_equally_fast_it_takes_the_smallest(self) -> None:
        seconds = {1: 2.0, 2: 1.5, 4: 1.009, 8: 1.0, 16: 1.005}
        assert fastest_size(seconds, seconds.__getitem__) == 4
        seconds[8] = 0.99
        assert fastest_size(seconds, seconds.__getitem__) == 8

    def test_fewer_tokens_than_were_measured_take_less(self) -> None:
        assert micro_step_seconds({100: 1.0, 200: 1.5}, 50) == 0.75
        assert micro_step_seconds({100: 1.0, 200: 1.5, 400: 3.5}, 300) == 2.5
        # Never less than their share, whatever noise says.
        assert micro_step_seconds({100: 1.0, 200: 3.0}, 50) == 0.5
        assert micro_step_seconds({100: 1.0, 200: 0.9}, 50) == 1.0
        assert micro_step_seconds({100: 1.0}, 25) == 0.25

    def test_expectations(self) -> None:
        points = {1: 0.3, 2: 0.4, 4: 0.6}
        line = {size: Measurement(load, 1) for size, load in points.items()}
        assert expected_load(line, 10) == pytest.approx(1.2)
        assert expected_load({1: line[1]}, 3, base_load=0.1) == pytest.approx(0.7)
        square = {size: Measurement(0.1 + 0.02 * size**2, 1) for size in (1, 2, 5)}
        assert expected_load(square, 9) == pytest.approx(0.1 + 0.02 * 81)


def make_run(settings: dict[str, Any], ctx: ParallelContext = SINGLE_PROCESS) -> Run:
    return build_run(load_config(overrides=settings), Console("none"), CPU, ctx)


def tuned(values: dict[str, Any], base: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run that tunes `base`."""
    new_model = ("model.depth", "model.width", "model.heads", "model.tokenizer")
    values = {key: value for key, value in values.items() if key not in new_model}
    return values | {"model.path": str(base)} | {key.replace("__", "."): value for key, value in changes.items()}


@pytest.fixture
def kinds(settings: Settings, chat_file: Path, base_run: Path) -> dict[str, dict[str, Any]]:
    """Settings of runs that need memory in different ways."""
    chat = {"data.path": str(chat_file)}
    return {
        "text": settings(training__global_batch_size=12),
        "padded, bf16, Muon": settings(
            training__global_batch_size=9, data__packing=False, training__precision="bf16", optim__name="muon"
        ),
        "packed conversations": settings(training__global_batch_size=10) | chat,
        "LoRA, recomputed": tuned(
            settings(training__global_batch_size=7), base_run, tuning__method="lora", model__recompute="full"
        ),
        "OSFT, eager, chunked": tuned(
            settings(training__global_batch_size=11, model__attention="eager", model__loss="chunked"),
            base_run,
            tuning__method="osft",
        ),
    }


class TestProbe:
    @pytest.mark.parametrize("kind", KINDS)
    def test_the_largest_size_is_that_of_brute_force(
        self, kinds: dict[str, dict[str, Any]], kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The time does not matter here.
        monkeypatch.setattr(probe, "MAX_REPEATS", 0)
        run = make_run(kinds[kind])
        measure = RunProbe(run)
        with measure.without_trace():
            used = {size: measure.measure(size)[0] or 0 for size in range(1, measure.limit + 1)}
            assert measure.limit >= 6
            assert sorted(used.values()) == list(used.values())
            for limit in (1, 5, measure.limit - 1):
                # As much as this size needs: it fits, and the next one does not.
                measure.budget.margin, measure.budget.limit = 1.0, used[limit]
                base_load = measure.measure_base()[1].load
                result = find_largest(lambda size: measure.measure(size)[1], measure.limit, base_load, 1.15)
                assert result.largest == max(size for size in used if used[size] <= used[limit])

    def test_the_peak_is_that_of_a_real_step(self, settings: Settings) -> None:
        """Weights, gradients and moments, and at least the logits and their gradient."""
        run = make_run(settings(training__global_batch_size=4))
        measure = RunProbe(run)
        with measure.without_trace():
            base, _ = measure.measure_base()
            used, measurement = measure.measure(4)
        assert used is not None
        assert base is not None
        parameters = 4 * run.model.parameter_count
        logits = 4 * 32 * run.model.vocab_size * 4
        assert 4 * parameters + 2 * logits < used < 4 * parameters + 2 * logits + 3e6
        # One row of 32 tokens instead of four.
        assert 4 * parameters < base < used - logits
        assert 0 < measurement.seconds < 5

    @pytest.mark.parametrize("kind", ["text", "padded, bf16, Muon", "OSFT, eager, chunked"])
    def test_it_leaves_no_trace(self, kinds: dict[str, dict[str, Any]], kind: str) -> None:
        run = make_run(kinds[kind])
        run.model.train(False)
        before = snapshot(run)
        measure = RunProbe(run)
        with measure.without_trace():
            assert measure.measure(2)[1].fits
        assert snapshot(run) == before

    def test_what_is_not_out_of_memory_is_raised_as_it_is(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = make_run(settings())
        measure = RunProbe(run)

        def fail(*args: object) -> None:
            raise RuntimeError("shapes cannot be multiplied")

        monkeypatch.setattr(probe, "compute_gradients", fail)
        before = snapshot(run)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), measure.without_trace():
            measure.measure(1)
        assert snapshot(run) == before


def snapshot(run: Run) -> dict[str, Any]:
    """All that a run is made of, besides its files."""
    return {
        "weights": {name: p.detach().float().numpy().tobytes() for name, p in run.model.named_parameters()},
        "copies": [p.detach().float().numpy().tobytes() for p in run.model.module.parameters()],
        "gradients": [name for name, p in run.model.named_parameters() if p.grad is not None],
        "optimizer": len(run.optimizer.state),
        "rng": torch.get_rng_state().tolist(),
        "sizes": run.data.batch_sizes,
        "shapes": run.data.shapes,
        "training": run.model.module.training,
        "progress": run.progress.to_dict(),
    }


class TestDefault:
    """Which runs search. CUDA is a name here: nothing is computed on it."""

    @pytest.mark.parametrize(
        ("changes", "on_gpu", "on_cpu"),
        [
            ({}, True, False),
            ({"training.batch_size": "auto"}, True, True),
            ({"auto_batch.enabled": True}, True, True),
            ({"auto_batch.enabled": False}, False, False),
            ({"training.batch_size": 4}, False, False),
            ({"training.batch_size": 4, "auto_batch.enabled": True}, False, False),
            ({"training.max_tokens_per_gpu": 4096}, False, False),
            ({"training.grad_accum_steps": 4}, False, False),
            ({"training.global_batch_size": 4}, True, False),
        ],
    )
    def test_a_gpu_searches_unless_a_size_is_set(self, changes: dict[str, Any], on_gpu: bool, on_cpu: bool) -> None:
        config = load_config(overrides={"model.depth": 2, "data.path": "x", "model.tokenizer": "x"} | changes)
        for device, expected in (("cuda", on_gpu), ("cpu", on_cpu)):
            assert is_wanted(config, False, torch.device(device), None, lambda line: None) == expected

    def test_a_short_run_does_not_unless_it_is_told_to(self) -> None:
        config, lines = load_config(preset="debug"), list[str]()
        assert not is_wanted(config, False, torch.device("cuda"), 1e12, lines.append)
        assert is_wanted(config, False, torch.device("cuda"), 1e18, lines.append)
        assert lines == ["Auto-discovery skipped: the run is too short; --training.batch_size auto searches anyway"]
        requested = load_config(preset="debug", overrides={"training.batch_size": "auto"})
        assert is_wanted(requested, False, torch.device("cuda"), 1e12, lines.append)

    def test_the_size_of_a_preset_that_does_not_apply_is_not_one(self) -> None:
        """As of preset production, for packed conversations."""
        config = load_config(preset="production")
        assert is_wanted(config, True, torch.device("cuda"), None, lambda line: None)
        assert not is_wanted(config, False, torch.device("cuda"), None, lambda line: None)


class TestRuns:
    def test_the_run_is_that_of_the_same_size_set_by_hand(self, settings: Settings, tmp_path: Path) -> None:
        """Bit for bit; also when it is stopped and resumed, which keeps the size."""
        auto = {"training.batch_size": "auto", "auto_batch.memory_limit": "3MiB", "training.global_batch_size": 12}
        size = discovered(settings(**named(auto), output_dir=str(tmp_path / "a")), tmp_path / "a")
        assert 1 <= size < 12
        manual = settings(training__batch_size=size, training__global_batch_size=12, output_dir=str(tmp_path / "b"))
        api.train(overrides=manual)
        assert_same_run(tmp_path / "a", tmp_path / "b", 6)
        stopped = settings(**named(auto), output_dir=str(tmp_path / "c"), checkpoint__every_steps=2)
        api.train(overrides=stopped, callbacks=[StopAt(4)])
        api.train(overrides=stopped)
        assert_same_run(tmp_path / "a", tmp_path / "c", 6)

    def test_lines_and_state(self, torchstone: Command, settings: Settings, tmp_path: Path, own_cache: Path) -> None:
        values = settings(
            training__batch_size="auto", training__max_steps=2, observe__console="lines", training__global_batch_size=12
        )
        code, _, err = torchstone("train", *flags(values | {"auto_batch.memory_limit": "3MiB"}))
        assert code == 0, err
        state = json.loads((tmp_path / "run/checkpoints/step-00000002/state.json").read_text())["auto_batch"]
        size = state["size"]
        assert f"Auto-discovery found device_batch_size={size}: " in err
        assert f"micro-batches of {size} rows" in err
        assert f"cached in {next(own_cache.iterdir())}" in err
        # With another limit it is found again.
        code, _, err = torchstone(
            "train", *flags(values | {"training.max_steps": 3, "auto_batch.memory_limit": "2500KiB"})
        )
        assert code == 0, err
        assert f"the run had device_batch_size={size}, found with memory_limit 3MiB, now 2500KiB: " in err
        # With another kernel, too.
        eager = {"training.max_steps": 4, "auto_batch.memory_limit": "2500KiB", "model.attention": "eager"}
        code, _, err = torchstone("train", *flags(values | eager))
        assert (code, "found with model.attention sdpa, now eager: it is found again" in err) == (0, True), err
        code, _, err = torchstone("train", *flags(values | {"training.max_steps": 5, "training.batch_size": 2}))
        assert (code, "Auto-discovery" in err) == (0, False)

    def test_a_resumed_run_that_searches_again_keeps_its_moments(self, settings: Settings, tmp_path: Path) -> None:
        values = settings(training__max_steps=4, training__global_batch_size=12, optim__weight_decay=0.1)
        auto = {"training.batch_size": "auto", "auto_batch.memory_limit": "3MiB"}
        api.train(overrides=values | auto, callbacks=[StopAt(2)])
        shutil.copytree(tmp_path / "run", tmp_path / "by-hand")
        api.train(overrides=values | auto | {"auto_batch.memory_limit": "2500KiB"})
        by_hand = {"training.batch_size": state_of(values)["size"], "output_dir": str(tmp_path / "by-hand")}
        api.train(overrides=values | by_hand)
        assert_same_run(tmp_path / "run", tmp_path / "by-hand", 4)

    def test_padding_counts(self, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of rows of very different lengths that are not packed, where a token takes the same time in all sizes."""
        texts = ["a " * (60 if number % 5 == 0 else 3) for number in range(80)]
        file = write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
        monkeypatch.setattr(RunProbe, "measure", lambda self, size: (size << 20, Measurement(size / 100, size)))
        changes = {"data.path": str(file), "data.packing": False, "data.context_length": 128}
        run = make_run(settings(training__batch_size="auto", training__global_batch_size=16) | changes)
        discovery = Discovery(run)
        assert discovery.find() == 1
        seconds = [discovery.step_seconds(size) for size in (1, 2, 4)]
        assert seconds == sorted(seconds)
        assert seconds[-1] > 1.8 * seconds[0]

    def test_a_limit_of_an_earlier_start_is_kept_until_the_run_recomputes(
        self, torchstone: Command, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A rank that ran out of memory has left it; the run is built without recomputation first."""
        values = settings(training__batch_size="auto", training__max_steps=1, observe__console="lines")
        kept = {"device": "cpu", "layout": "one process", "training.precision": "fp32", "model.attention": "sdpa"}
        kept |= {"model.loss": "full", "model.recompute": "full", "model.compile": "none", "model.fused": "none"}
        (tmp_path / "run").mkdir()
        write_limit(tmp_path / "run", MemoryLimit(64, 1, 1, kept))

        def measure(probe: RunProbe, size: int) -> tuple[int, Measurement]:
            recomputes = probe.run.model.choices["model.recompute"].value != "none"
            return size << 20, Measurement(size / 100 if recomputes else 9.0, 1 + size / 100)

        monkeypatch.setattr(RunProbe, "measure", measure)
        code, _, err = torchstone("train", *flags(values))
        assert (code, "micro-batches have at most 64 tokens: with more, this run was out of memory" in err) == (0, True)
        # Four rows would be the fastest.
        assert state_of(values)["size"] == 2
        assert read_limit(tmp_path / "run") is None

    def test_a_size_that_is_set_wins(self, torchstone: Command, settings: Settings) -> None:
        values = settings(training__max_steps=1, training__batch_size=2, observe__console="lines")
        code, _, err = torchstone("train", *flags(values), "--auto_batch_size=True")
        assert (code, "Auto-discovery skipped: training.batch_size 2 is set" in err) == (0, True), err

    def test_packed_conversations_get_a_number_of_tokens(
        self, torchstone: Command, kinds: dict[str, dict[str, Any]]
    ) -> None:
        values = kinds["packed conversations"] | {"training.max_steps": 1, "observe.console": "lines"}
        code, _, err = torchstone("train", *flags(values), "--auto-batch-size")
        assert code == 0, err
        assert any(f"Auto-discovery found max_tokens_per_gpu={32 * n}: " in err for n in range(1, 11)), err

    def test_if_nothing_fits_it_recomputes_or_ends_with_exit_code_4(
        self, torchstone: Command, settings: Settings, tmp_path: Path
    ) -> None:
        values = settings(
            training__batch_size="auto", training__max_steps=2, observe__console="lines", data__context_length=256,
            model__depth=8, training__global_batch_size=1,
        )  # fmt: skip
        used = {}
        for recompute in ("none", "selective", "full"):
            measure = RunProbe(make_run(values | {"model.recompute": recompute}))
            with measure.without_trace():
                used[recompute] = measure.measure(1)[0] or 0
        assert used["full"] < 0.9 * used["selective"] < 0.9 * used["none"]
        limit = {"auto_batch.memory_limit": (used["selective"] + used["full"]) // 2, "auto_batch.margin": 1}
        code, _, err = torchstone("train", *flags(values | limit))
        assert code == 0, err
        assert "not even one row fits: a step with micro-batches of 256 tokens needs" in err
        assert "and may take 100% of the " in err
        assert "recompute: full (none does not fit)" in err
        # The run goes on in the same way.
        code, _, err = torchstone("train", *flags(values | limit | {"training.max_steps": 3}))
        assert (code, "recompute: full (as in the checkpoint)" in err) == (0, True), err
        _, _, printed = torchstone("train", *flags(values | limit | {"training.max_steps": 4}), "--print-config")
        assert "model.recompute full (as in the checkpoint)" in printed
        assert "Auto-discovery found device_batch_size=1 in " in err
        assert "WARNING" not in err.replace("training.max_steps 2 is now 3", "").replace("WARNING | changed since", "")
        # More than the margin is the last resort, too, as in a plan.
        margin = {"auto_batch.memory_limit": int(used["none"] / (0.85 * 1.07)), "auto_batch.margin": 0.85}
        margin |= {"output_dir": str(tmp_path / "margin")}
        code, _, err = torchstone("train", *flags(values | margin))
        assert (code, "recompute: none" in err) == (0, True), err
        assert "recompute: selective (none does not fit)" in err
        tiny = {"auto_batch.memory_limit": used["full"] // 2, "output_dir": str(tmp_path / "other")}
        code, _, err = torchstone("train", *flags(values | tiny))
        assert (code, "(auto_batch.memory_limit)" in err, "a shorter --data.context_length" in err) == (4, True, True)
        assert "use a larger --auto_batch.memory_limit; " in err
        # The error has the measured size.
        assert "a step needs about" not in err

    @pytest.mark.parametrize("is_faster", [True, False])
    def test_more_recomputation_is_measured_where_memory_is_what_limits(
        self, is_faster: bool, torchstone: Command, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(RunProbe, "measure", partialmethod(measure_two_or_eight_rows, is_faster))
        # A plan expects the same of a device that is so fast that all micro-steps take as long.
        values = settings(
            training__batch_size="auto", training__global_batch_size=16, training__max_steps=2, auto_batch__margin=1,
            auto_batch__memory_limit=row_memory(settings), observe__peak_tflops=1e6, observe__console="lines",
        )  # fmt: skip
        code, _, err = torchstone("train", *flags(values))
        assert code == 0, err
        assert "device_batch_size=2: " in err
        assert "; larger ones are not expected to fit; " in err
        assert "larger micro-batches do not fit: model.recompute full may be faster" in err
        share = 38 / 104 if is_faster else 342 / 104
        assert f"with model.recompute full a step takes {share:.2f} of the time with none" in err
        recompute, size = ("full", 8) if is_faster else ("none", 2)
        assert (state_of(values)["identity"]["model.recompute"], state_of(values)["size"]) == (recompute, size)
        by_hand = {"training.batch_size": size, "model.recompute": recompute, "output_dir": str(tmp_path / "by-hand")}
        unset = [key for key in values if key.startswith("auto_batch")]
        api.train(overrides={key: value for key, value in (values | by_hand).items() if key not in unset})
        assert_same_run(values["output_dir"], tmp_path / "by-hand", 2)
        # A resumed run measures nothing.
        code, _, err = torchstone("train", *flags(values | {"training.max_steps": 3}))
        assert (code, f"Auto-discovery found device_batch_size={size} in " in err, "of the time" in err) == (
            0,
            True,
            False,
        )
        assert state_of(values)["identity"]["model.recompute"] == recompute

    def test_rows_that_run_out_of_memory_are_split(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        """If even one row does, and not because of a limit: also after recomputation was tried."""
        values = settings(training__batch_size="auto", training__max_steps=1, data__text_packing="best-fit")
        values |= {"data.context_length": 128}
        recomputed = []

        def fail(runner: Any, batch: StepBatch, step: int) -> None:
            recomputed.append(values_of(runner))
            raise MemoryError

        def values_of(runner: Any) -> str:
            return str(runner.model.choices["model.recompute"].value)

        monkeypatch.setattr(probe, "compute_gradients", fail)
        result = api.train(overrides=values, callbacks=[Memory(tokens=112)])
        assert result.checkpoint is not None
        state = json.loads((result.checkpoint / "state.json").read_text())
        assert (state["auto_batch"]["size"], state["auto_batch"]["identity"]["model.recompute"]) == (1, "full")
        assert state["oom_splits"] >= 1
        assert list(dict.fromkeys(recomputed)) == ["none", "full"]

    def test_the_fastest_size_is_that_of_the_steps_of_the_run(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Six rows a step: 3 + 3 take 5.4 s, 4 + 2 take 5.6 s, though rows in micro-batches of four take the least."""
        seconds = {1: 1.2, 2: 2.1, 3: 2.7, 4: 3.5, 5: 5.0, 6: 6.0}
        monkeypatch.setattr(
            RunProbe, "measure", lambda self, size: (size << 20, Measurement(size / 100, seconds[size]))
        )
        run = make_run(settings(training__batch_size=6, training__global_batch_size=6))
        assert Discovery(run).find() == 3

    def test_a_setting_without_effect_is_said(self, torchstone: Command, settings: Settings) -> None:
        values = settings(training__max_steps=1, auto_batch__margin=0.5, observe__console="lines")
        code, _, err = torchstone("train", *flags(values))
        assert (code, "auto_batch.margin has no effect: the size of micro-batches is not searched" in err) == (0, True)

    def test_the_margin_never_makes_it_zero(self, settings: Settings, tmp_path: Path) -> None:
        values = settings(training__batch_size="auto", training__max_steps=1)
        measure = RunProbe(make_run(values))
        with measure.without_trace():
            used = measure.measure(1)[0] or 0
        limits = {"auto_batch.memory_limit": int(1.1 * used), "auto_batch.margin": 0.5}
        assert discovered(values | limits, tmp_path / "run") == 1

    def test_the_search_ends_in_time(self, torchstone: Command, settings: Settings) -> None:
        values = settings(
            training__batch_size="auto", training__max_steps=1, observe__console="lines", auto_batch__time_limit=1e-3
        )
        code, _, err = torchstone("train", *flags(values))
        assert (code, "Auto-discovery ends after auto_batch.time_limit 0.001 s" in err) == (0, True), err
        assert "Auto-discovery found device_batch_size=1: " in err

    def test_a_size_that_runs_out_of_memory_later_is_not_found_again(self, settings: Settings, tmp_path: Path) -> None:
        """Rows have 32 tokens; in a step there is room for two of them."""
        values = settings(training__batch_size="auto", training__max_steps=1, training__global_batch_size=16)
        entries = [Entry(size, 2 if size < 16 else 1, 10**6, size**0.5 + 1, 1) for size in (0, 1, 2, 4, 8, 16)]
        run = make_run(values)
        key = cache_key(run, RunProbe(run))
        write_entries(key, entries, pytest.fail)
        result = api.train(overrides=values, callbacks=[Memory(tokens=64)])
        assert result.checkpoint is not None
        state = json.loads((result.checkpoint / "state.json").read_text())
        assert (state["auto_batch"]["size"], state["micro_batch_limit"], state["oom_splits"]) == (16, 64, 3)
        assert [each.size for each in read_entries(key, pytest.fail) if each.used is None] == [3, 4, 8, 16]
        assert discovered(values | {"output_dir": str(tmp_path / "next")}, tmp_path / "next") == 2
        # A limit of less than a row: its parts fit, so a run with rows may begin.
        run.progress.micro_batch_limit, run.checkpoint_info["auto_batch"] = 16, {}
        remember_out_of_memory(run)
        assert [each.size for each in read_entries(key, pytest.fail) if each.used is not None] == [0, 1]

    @pytest.mark.parametrize(
        ("own", "folder", "limit", "usage"),
        [
            ("0::/", "", "memory.max", "memory.current"),
            ("0::/slurm/job_7/step_0/task_1", "slurm/job_7", "memory.max", "memory.current"),
            ("5:cpu:/x\n4:memory:/x/y\n0::/", "memory/x", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ],
    )
    def test_free_memory_is_that_of_the_container_or_job(
        self, own: str, folder: str, limit: str, usage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "own").write_text(f"{own}\n")
        group = tmp_path / "cgroup" / folder
        group.mkdir(parents=True)
        (group / limit).write_text("3000000000\n")
        (group / usage).write_text("1000000000\n")
        (group / "memory.stat").write_text("anon 5\ninactive_file 200000000\n")
        monkeypatch.setattr(checks, "OWN_CGROUPS", tmp_path / "own")
        monkeypatch.setattr(checks, "CGROUP_FOLDER", tmp_path / "cgroup")
        available = psutil.virtual_memory()._replace(available=10**13)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
        assert checks.free_memory() == 2_200_000_000
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert checks.free_memory() == 550_000_000
        (group / limit).write_text("max\n")
        assert checks.free_memory() == min(10**13 // 4, checks.process_memory())


def named(values: dict[str, Any]) -> dict[str, Any]:
    return {key.replace(".", "__"): value for key, value in values.items()}


def discovered(values: dict[str, Any], folder: Path) -> int:
    """The size that a run has found."""
    checkpoint = api.train(overrides=values).checkpoint
    assert checkpoint is not None
    assert checkpoint.parent.parent == folder
    return int(json.loads((checkpoint / "state.json").read_text())["auto_batch"]["size"])


def measure_two_or_eight_rows(probe: RunProbe, is_faster: bool, size: int) -> tuple[int, Measurement]:
    """Two rows fit without recomputation, eight with it. A micro-step takes 11 ms, and 1 ms for each row, or 20 ms
    where rows are recomputed: 8 x 13 ms against 2 x 19 ms or 2 x 171 ms."""
    recomputes = probe.run.model.choices["model.recompute"].value != "none"
    milliseconds = 11 + size * (1 if is_faster or not recomputes else 20)
    return size << 20, Measurement(size / (8 if recomputes else 2), milliseconds / 1000)


def row_memory(settings: Settings) -> int:
    """That of two rows by the estimate of the plan, in which more fit if they are recomputed."""
    plan = api.plan(overrides=settings(training__batch_size=2, training__global_batch_size=16))
    total: int = plan["memory"]["total"]
    return total


def state_of(values: dict[str, Any]) -> dict[str, Any]:
    """What the newest checkpoint of a run has of the search."""
    newest = max(Path(values["output_dir"], "checkpoints").glob("step-*"))
    state: dict[str, Any] = json.loads((newest / "state.json").read_text())["auto_batch"]
    return state


class TestCache:
    @pytest.fixture
    def find(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, int]]:
        """The size, and the number of steps that it took to find it."""
        steps = 0
        step = RunProbe.step

        def counted(self: RunProbe, size: int, max_length: int | None = None) -> float:
            nonlocal steps
            steps += 1
            return step(self, size, max_length)

        monkeypatch.setattr(RunProbe, "step", counted)

        def find(**changes: Any) -> tuple[int, int]:
            nonlocal steps
            steps = 0
            run = make_run(settings(**{"training__batch_size": "auto", "auto_batch__memory_limit": "3MiB"} | changes))
            choose_micro_batch(run)
            return run.checkpoint_info["auto_batch"]["size"], steps

        return find

    def test_a_hit_takes_no_step_and_less_than_a_second(self, settings: Settings, find: Any, own_cache: Path) -> None:
        size, steps = find()
        assert steps >= 2
        run = make_run(settings(training__batch_size="auto", auto_batch__memory_limit="3MiB"))
        # What other tests have left is not collected in this second.
        gc.freeze()
        start = time.process_time()
        choose_micro_batch(run)
        assert time.process_time() - start < 1
        gc.unfreeze()
        assert find() == (size, 0)
        # What is kept are bytes: with less memory they do not fit.
        size, _ = find(auto_batch__memory_limit="2200KiB")
        entries = json.loads(next(own_cache.iterdir()).read_text())["measured"]
        used = max(entry["used"] for entry in entries if entry["size"] <= size)
        assert 0 < used <= 0.85 * 2200 * 1024

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"key": {}}', '{"key": {}, "measured": []}', "deleted"])
    def test_a_damaged_deleted_or_foreign_file_is_a_miss(self, find: Any, own_cache: Path, content: str) -> None:
        first = find()
        (file,) = own_cache.iterdir()
        good = file.read_text()
        if content == "deleted":
            file.unlink()
        else:
            file.write_text(content)
        size, steps = find()
        assert (size > 0, steps) == (True, first[1])
        assert json.loads(file.read_text())["key"] == json.loads(good)["key"]

    def test_measurements_that_cannot_be_are_a_miss(self, find: Any, own_cache: Path) -> None:
        find()
        (file,) = own_cache.iterdir()
        content = json.loads(file.read_text())
        first, *rest = content["measured"]
        changes = [
            {"size": -1}, {"size": 1.5}, {"used": "much"}, {"seconds": None}, {"seconds": math.inf},
            {"micro_batches": None},
        ]  # fmt: skip
        for wrong in (*(first | change for change in changes), 1, None):
            file.write_text(json.dumps(content | {"measured": [wrong, *rest]}))
            assert find()[1] >= 2

    def test_a_step_of_another_number_of_micro_batches_is_another_one(self, find: Any, own_cache: Path) -> None:
        """Gradients are summed if there are several."""
        for samples, expected in ((2, {(2, 1)}), (8, {(2, 1), (2, 2)})):
            find(training__global_batch_size=samples)
            entries = json.loads(next(own_cache.iterdir()).read_text())["measured"]
            assert {(entry["size"], entry["micro_batches"]) for entry in entries if entry["size"] == 2} == expected

    def test_the_key_has_what_changes_the_memory(self, settings: Settings, base_run: Path) -> None:
        changes: list[dict[str, Any]] = [
            {},
            {"model__width": 64},
            {"data__context_length": 16},
            {"training__precision": "bf16"},
            {"optim__name": "muon"},
            {"optim__weight_decay": 0.0},
            {"model__recompute": "full"},
            {"model__loss": "chunked"},
            {"model__attention": "eager"},
            {"data__packing": False},
            {"parallel__zero": 2},
        ]
        runs = [make_run(settings(**each)) for each in changes]
        runs += [make_run(tuned(settings(), base_run, tuning__method=method)) for method in ("full", "lora", "osft")]
        keys = [json.dumps(cache_key(run, RunProbe(run)), default=str) for run in runs]
        assert len(set(keys)) == len(keys)
        # Neither the free memory nor the length of the run.
        other = make_run(settings(auto_batch__memory_limit="9GiB", training__max_steps=9))
        assert json.dumps(cache_key(other, RunProbe(other)), default=str) == keys[0]

    def test_out_of_memory_counts_as_long_as_there_is_no_more(self, find: Any, own_cache: Path) -> None:
        find()
        (file,) = own_cache.iterdir()
        content = json.loads(file.read_text())
        for memory, is_tried in ((10**13, False), (2**20, True)):
            failed = [each | {"used": None, "seconds": None, "memory": memory} for each in content["measured"][2:]]
            file.write_text(json.dumps(content | {"measured": content["measured"][:2] + failed}))
            assert (find()[1] > 0) == is_tried

    def test_it_can_be_turned_off(self, find: Any, own_cache: Path) -> None:
        for _ in range(2):
            assert find(auto_batch__cache=False)[1] >= 2
        assert not own_cache.exists()

    def test_a_folder_that_cannot_be_written_is_no_error(self, find: Any, own_cache: Path) -> None:
        own_cache.parent.mkdir()
        own_cache.write_text("")
        assert find()[1] >= 2


class Bigrams(nn.Module):
    """The logits of a token follow from the one before it. With more than `rows` rows it is out of memory."""

    def __init__(self, rows: int, error: Exception, vocabulary: int = 50) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary)
        self.rows, self.error = rows, error
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        if len(ids) > self.rows:
            raise self.error
        return self.head(self.embedding(ids))


class TestDiscoverBatchSize:
    def test_a_module_of_ones_own(self) -> None:
        """Out of memory is told from other errors, and nothing of the module changes."""
        model = Bigrams(37, torch.OutOfMemoryError("CUDA out of memory")).eval()
        model.head.weight.grad = torch.ones_like(model.head.weight)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        rng = torch.get_rng_state()
        size = discover_batch_size(model, 16, "cpu", use_cache=False, max_batch_size=64)
        assert 1 <= size <= 37
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), rng)
        assert (model.training, model.head.weight.grad.sum().item(), model.head.bias.grad) == (False, 400.0, None)
        with pytest.raises(ValueError, match="not this one"):
            discover_batch_size(Bigrams(3, ValueError("not this one")), 16, CPU, use_cache=False)
        for wrong in ({"safety_margin": 0.0}, {"safety_margin": 85}, {"memory_limit": "8 gigs"}, {"max_batch_size": 0}):
            with pytest.raises(UsageError):
                discover_batch_size(model, 16, CPU, **wrong)
        with pytest.raises(OutOfMemoryError, match="not even one row of 16 tokens fits"):
            discover_batch_size(Bigrams(0, MemoryError()), 16, CPU, use_cache=False)

    def test_weights_stay_finite_if_gradients_do_not(self) -> None:
        class Root(Bigrams):
            def forward(self, ids: Tensor) -> Tensor:
                return super().forward(ids) * self.head.bias.sub(self.head.bias.detach()).sqrt().sum().exp()

        model = Root(4, MemoryError())
        discover_batch_size(model, 16, CPU, use_cache=False)
        assert all(parameter.isfinite().all() for parameter in model.parameters())

    def test_parts_in_evaluation_mode_stay_in_it(self) -> None:
        model = Bigrams(9, MemoryError())
        modes = []
        model.head.register_forward_hook(lambda module, *_: modes.append(module.training))
        model.head.eval()
        discover_batch_size(model, 16, CPU, use_cache=False, max_batch_size=4)
        assert (model.training, model.head.training, set(modes)) == (True, False, {False})
        # Transformers loads models in evaluation mode: as a whole they are measured in training mode.
        model.eval()
        modes.clear()
        discover_batch_size(model, 16, CPU, use_cache=False, max_batch_size=4)
        assert (model.training, model.head.training, set(modes)) == (False, False, {True})

    def test_margin_speed_and_time_limit_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def measure(probe: ModuleProbe, size: int) -> tuple[int, Measurement]:
            sizes.append(size)
            used = size << 20
            # The fastest one is 4: a row then takes the least.
            return used, Measurement(probe.budget.load(used), abs(math.log2(size) - 2) * size + size)

        sizes: list[int] = []
        monkeypatch.setattr(ModuleProbe, "measure", measure)
        discover = partial(discover_batch_size, Bigrams(99, MemoryError()), 16, CPU, use_cache=False)
        assert discover(memory_limit="32MiB") == 4
        assert max(sizes) > 8
        assert discover(safety_margin=0.1, memory_limit="32MiB") == 3
        sizes.clear()
        assert discover(memory_limit="32MiB", time_limit=0.0) == 1
        assert sizes == [1]

    def test_the_device_is_that_of_the_model(self) -> None:
        for device in ("meta", "cuda"):
            with pytest.raises(UsageError, match="device is"):
                discover_batch_size(Bigrams(9, MemoryError()), 16, device)

    def test_the_cache_and_its_key(self, own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
        model, discover = Bigrams(9, MemoryError()), partial(discover_batch_size, memory_limit="1GiB")
        size = discover(model, 16, CPU, cache_key_components={"gpu": "a"})
        assert f"Auto-discovery found device_batch_size={size}: " in capsys.readouterr().err
        assert discover(model, 16, CPU, cache_key_components={"gpu": "a"}) == size
        assert "all from the cache" in capsys.readouterr().err
        discover(model, 16, CPU, cache_key_components={"gpu": "b"})
        discover(model, 8, CPU, cache_key_components={"gpu": "a"})
        assert len(list(own_cache.iterdir())) == 3
        # What Transformers' gradient_checkpointing_enable() changes.
        model.is_gradient_checkpointing = True
        discover(model, 16, CPU, cache_key_components={"gpu": "a"})
        assert len(list(own_cache.iterdir())) == 4

    def test_all_ranks_get_the_size_that_fits_on_all(self) -> None:
        sizes = launch_procs(discover_on_rank, 2)
        assert sizes[0] == sizes[1] <= 5


def discover_on_rank() -> int:
    """Rank 1 may have less: a row has 64 KB of logits, and a step several tensors of that size."""
    rank, limits = dist.get_rank(), ["1GiB", "1200KiB"]
    model = Bigrams(1000, MemoryError(), vocabulary=1000)
    return discover_batch_size(model, 16, CPU, 1.0, rank, 2, use_cache=False, memory_limit=limits[rank])


class TestRanks:
    def test_every_layout_trains_as_with_the_same_size_set_by_hand(self, settings: Settings, tmp_path: Path) -> None:
        layouts = [{"dp_shard": 2}, {"dp_replicate": 2}, {"tp": 2}, {"pp": 2}]
        runs = [
            settings(training__max_steps=2, training__global_batch_size=8, output_dir=str(tmp_path / str(number)))
            | {f"parallel.{dim}": size for dim, size in layout.items()}
            for number, layout in enumerate(layouts)
        ]
        launch_procs(train_twice, 2, runs)
        for number in range(len(layouts)):
            assert exact_metrics(tmp_path / f"{number}") == exact_metrics(tmp_path / f"{number}-by-hand")
            assert len(exact_metrics(tmp_path / f"{number}")) == 2

    def test_ranks_with_different_budgets_agree(self, settings: Settings, tmp_path: Path) -> None:
        values = settings(training__global_batch_size=24, data__context_length=64)
        sizes = launch_procs(choose_on_rank, 2, values, ["1GiB", "6MiB"])
        assert sizes[0] == sizes[1]
        alone = launch_procs(choose_on_rank, 2, values, ["6MiB", "6MiB"])
        assert alone[0][1] == sizes[0][1] < 12
        # One rank's time is up after the first size.
        late = launch_procs(choose_on_rank, 2, values, ["1GiB", "1GiB"], [120.0, 1e-9])
        assert late[0][0] == late[1][0] == 1

    def test_they_recompute_together(self, settings: Settings) -> None:
        values = settings(
            training__batch_size="auto", training__global_batch_size=32, training__max_steps=2, auto_batch__margin=1,
            auto_batch__memory_limit=row_memory(settings), observe__peak_tflops=1e6, parallel__dp_replicate=2,
        )  # fmt: skip
        launch_procs(train_with_synthetic_sizes, 2, values)
        assert (state_of(values)["identity"]["model.recompute"], state_of(values)["size"]) == ("selective", 8)

    def test_they_do_not_try_a_row_that_is_not_expected_to_fit(self, settings: Settings) -> None:
        """The rank that runs out of memory would leave the others waiting."""
        values = settings(
            training__batch_size=1, training__global_batch_size=4, training__max_steps=1, model__depth=8,
            data__context_length=256, parallel__dp_replicate=2,
        )  # fmt: skip
        needed = {
            recompute: api.plan(overrides=values | {"model.recompute": recompute})["memory"]["total"]
            for recompute in ("none", "full")
        }
        limit = int(1.1 * needed["full"])
        assert 0.97 * limit < needed["none"]
        values |= {"training.batch_size": "auto", "auto_batch.memory_limit": str(limit), "auto_batch.margin": 1}
        launch_procs(train_unless_a_row_is_tried, 2, values)
        assert state_of(values)["identity"]["model.recompute"] != "none"


def train_unless_a_row_is_tried(values: dict[str, Any]) -> None:
    def measure(probe: RunProbe, size: int) -> tuple[int, Measurement]:
        assert probe.run.model.choices["model.recompute"].value != "none"
        return size << 20, Measurement(size / 2, size)

    with patch.object(RunProbe, "measure", measure):
        api.train(overrides=values)


def train_with_synthetic_sizes(values: dict[str, Any]) -> None:
    with patch.object(RunProbe, "measure", partialmethod(measure_two_or_eight_rows, True)):
        api.train(overrides=values)


def train_twice(runs: list[dict[str, Any]]) -> None:
    """With the size that is found, and with the same size set by hand."""
    for values in runs:
        checkpoint = api.train(overrides=values | {"training.batch_size": "auto"}).checkpoint
        assert checkpoint is not None
        size = json.loads((checkpoint / "state.json").read_text())["auto_batch"]["size"]
        folder = f"{values['output_dir']}-by-hand"
        api.train(overrides=values | {"training.batch_size": size, "output_dir": folder})


def choose_on_rank(values: dict[str, Any], limits: list[str], times: Sequence[float] = (120, 120)) -> tuple[int, int]:
    """The size that was chosen, and the largest that fits."""
    with init_distributed(ParallelConfig(), CPU) as ctx:
        own = {"auto_batch.memory_limit": limits[ctx.rank], "auto_batch.time_limit": times[ctx.rank]}
        run = make_run(values | {"training.batch_size": "auto", "auto_batch.cache": False} | own, ctx)
        measure = RunProbe(run)
        with measure.without_trace():
            result = find_largest(lambda size: measure.measure(size)[1], measure.limit)
        choose_micro_batch(run)
        assert run.data.batch_sizes.global_batch_size == 24
        return run.checkpoint_info["auto_batch"]["size"], result.largest


def test_memory_with_units() -> None:
    texts = {"6GiB": 6 * 2**30, "512 MiB": 2**29, "8GB": 8 * 10**9, "1.5g": 1_500_000_000, "123": 123, "12kib": 12288}
    assert {text: parse_memory(text) for text in texts} == texts
    assert [parse_memory(text) for text in ("", "GiB", "3i", "1e9", "-1", "8 rows")] == [None] * 6

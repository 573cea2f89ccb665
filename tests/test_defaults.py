"""What `auto` chooses, for which reason, and where it is shown. CUDA is a stand-in: nothing is computed on it."""

from __future__ import annotations

import gc
import json
import math
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hooks import on
from tiny import flags
from torchstone import api, triton_support
from torchstone.config.load import load_config
from torchstone.config.schema import Config
from torchstone.errors import NumericalError, WorkerError
from torchstone.models import execution as execution_module
from torchstone.models.choice import Choice
from torchstone.models.execution import MIN_FLOPS_TO_COMPILE, ExecutionOptions, choose_compile, choose_recompute
from torchstone.observe.metrics import read_metrics
from torchstone.parallel.mesh import SINGLE_PROCESS, ParallelContext, ParallelDims
from torchstone.training import loop, step
from torchstone.training.defaults import choose_precision, run_flops, slow_choices
from torchstone.training.run import Callback, Run
from torchstone.training.state import Progress
from torchstone.training.step import StepResult, compute_gradients
from torchstone.training.step_log import StepLog
from torchstone.triton_support import triton_error

Settings = Callable[..., dict[str, Any]]
Command = Callable[..., tuple[int, str, str]]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
AUTO = ExecutionOptions(compile="auto", recompute="auto")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(execution_module, "triton_error", lambda: None)


def make_config(**values: Any) -> Config:
    return load_config(overrides={"model.depth": 2, "data.path": "x", "model.tokenizer": "x"} | values)


class TestPrecision:
    @pytest.mark.usefixtures("gpu")
    def test_auto_is_bf16_on_a_gpu_and_fp32_on_a_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = make_config()
        assert config.training.precision == "auto"
        assert choose_precision(config, CUDA, SINGLE_PROCESS, {}) == Choice("bf16", "fp32 master weights")
        assert choose_precision(config, CPU, SINGLE_PROCESS, {}) == Choice("fp32", "on a CPU")
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
        assert choose_precision(config, CUDA, SINGLE_PROCESS, {}) == Choice("fp32", "the GPU does not have bf16")

    @pytest.mark.usefixtures("gpu")
    def test_a_resumed_run_keeps_its_precision_unless_another_one_is_requested(self) -> None:
        saved = {"training.precision": "bf16-pure"}
        assert choose_precision(make_config(), CUDA, SINGLE_PROCESS, saved) == Choice(
            "bf16-pure", "as in the checkpoint"
        )
        config = make_config(**{"training.precision": "fp32"})
        assert choose_precision(config, CUDA, SINGLE_PROCESS, saved) == Choice("fp32", "as requested")

    def test_a_run_resumes_in_the_precision_of_its_checkpoint(self, torchstone: Command, settings: Settings) -> None:
        values = settings(training__max_steps=2, observe__console="lines")
        assert torchstone("train", *flags(values | {"training.precision": "bf16"}))[0] == 0
        code, _, err = torchstone("train", *flags(values | {"training.max_steps": 3}))
        assert code == 0, err
        assert "precision: bf16 (as in the checkpoint); " in err
        assert "parameters in fp32, computed in bf16; " in err
        code, _, err = torchstone("train", *flags(values | {"training.max_steps": 4, "training.precision": "fp32"}))
        assert (code, "training.precision bf16 is now fp32" in err) == (6, True)


@pytest.mark.usefixtures("gpu")
class TestCompile:
    def test_blocks_are_compiled_on_a_gpu_only(self) -> None:
        assert choose_compile(AUTO, CUDA).value == "block"
        assert choose_compile(AUTO, CPU) == Choice("none", "on a CPU")
        assert choose_recompute(AUTO, "block").value == "elementwise"
        assert choose_recompute(AUTO, "none").value == "none"

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"tp": 2}, "torch.compile computes wrong gradients with parallel.tp"),
            ({"run_flops": 0.4 * MIN_FLOPS_TO_COMPILE}, "the run is too short: 0.2 PFLOP per device"),
            ({"liger": ("mlp", "norm")}, "model.liger mlp would break its graphs"),
        ],
    )
    def test_it_is_left_out_with_the_reason(self, changes: dict[str, Any], reason: str) -> None:
        assert choose_compile(replace(AUTO, **changes), CUDA) == Choice("none", reason)

    @pytest.mark.parametrize(
        ("package", "reason"),
        [
            (None, "triton is not installed"),
            (
                "raise RuntimeError('Failed to find C compiler.\\nMore')",
                "triton does not work here: Failed to find C compiler.",
            ),
            ("class driver:\n    class active:\n        get_current_device = lambda: 0", None),
        ],
    )
    def test_it_needs_a_triton_that_works(
        self, package: str | None, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(execution_module, "triton_error", triton_error)
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
            monkeypatch.delitem(sys.modules, name)
        if package is None:
            monkeypatch.setattr(triton_support, "find_spec", lambda name: None)
        else:
            (tmp_path / "triton").mkdir()
            (tmp_path / "triton/__init__.py").touch()
            (tmp_path / "triton/runtime.py").write_text(package)
            monkeypatch.syspath_prepend(tmp_path)
        triton_error.cache_clear()
        try:
            expected = Choice("block", "the first steps take longer") if reason is None else Choice("none", reason)
            assert choose_compile(AUTO, CUDA) == expected
        finally:
            triton_error.cache_clear()
            for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
                del sys.modules[name]

    @pytest.mark.parametrize("changes", [{"run_flops": MIN_FLOPS_TO_COMPILE}, {"liger": ("loss",)}, {"pp": 2}])
    def test_it_is_not_left_out_without_a_reason(self, changes: dict[str, Any]) -> None:
        assert choose_compile(replace(AUTO, **changes), CUDA).value == "block"

    def test_a_request_is_a_request(self) -> None:
        requested = replace(AUTO, compile="whole", recompute="full", run_flops=1.0)
        assert choose_compile(requested, CPU) == Choice("whole", "as requested", "the first steps take longer")
        assert choose_recompute(requested, "none") == Choice("full", "as requested")


class TestSlowChoices:
    @pytest.mark.usefixtures("gpu")
    @pytest.mark.parametrize(
        ("key", "value", "name"),
        [
            ("training.precision", "fp32", "training.precision fp32 (auto: bf16)"),
            ("model.compile", "none", "model.compile none (auto: block)"),
            ("model.loss", "full", "model.loss full (auto: chunked)"),
            ("model.attention", "eager", "model.attention eager (auto: a fused kernel)"),
            ("model.attention", "sdpa", "model.attention sdpa (auto: a fused kernel)"),
        ],
    )
    def test_each_is_named_on_a_gpu(self, key: str, value: str, name: str) -> None:
        config, execution = self.options(**{key: value})
        assert slow_choices(config, execution, CUDA, is_native=True) == [
            f"{name}: the run is much slower or larger than with the defaults"
        ]
        assert slow_choices(config, execution, CPU, is_native=True) == []

    @pytest.mark.usefixtures("gpu")
    def test_several_are_one_warning_and_others_are_none(self) -> None:
        config, execution = self.options(**{"model.compile": "none", "model.loss": "full"})
        assert len(slow_choices(config, execution, CUDA, is_native=True)) == 1
        assert slow_choices(config, execution, CUDA, is_native=False) == [], "the fallback has nothing else"
        assert slow_choices(config, replace(execution, run_flops=1.0, loss="auto"), CUDA, is_native=True) == []
        fast = {"training.precision": "bf16-pure", "model.recompute": "full", "model.compile": "whole"}
        assert slow_choices(*self.options(**fast), CUDA, is_native=True) == []

    @staticmethod
    def options(**values: Any) -> tuple[Config, ExecutionOptions]:
        config = make_config(**values)
        model = config.model
        return config, replace(
            AUTO, compile=model.compile, loss=model.loss, attention=model.attention, packed=config.data.packing
        )


class TestWhereItIsShown:
    def test_one_line_at_the_start_says_what_and_why(self, torchstone: Command, settings: Settings) -> None:
        _, _, err = torchstone("train", *flags(settings(training__max_steps=1, observe__console="lines")))
        line = next(line for line in err.splitlines() if "precision: " in line)
        assert line.partition(" | ")[2] == (
            "precision: fp32 (on a CPU); attention: sdpa (on a CPU); loss: full (on a CPU); "
            "recompute: none (nothing is compiled); compile: none (on a CPU)"
        )

    def test_print_config_shows_it_and_keeps_auto(
        self, torchstone: Command, settings: Settings, llama_dir: Path
    ) -> None:
        code, out, err = torchstone("train", *flags(settings()), "--print-config")
        assert code == 0
        assert err.startswith("auto on cpu: training.precision fp32 (on a CPU); model.attention sdpa (on a CPU); ")
        assert json.loads(out)["training"]["precision"] == "auto"
        values = settings() | {"model.path": str(llama_dir), "model.compile": "block"}
        del values["model.depth"], values["model.width"], values["model.heads"]
        _, _, err = torchstone("train", *flags(values), "--print-config")
        assert "model.recompute elementwise (almost free in compiled blocks)" in err
        assert "model.compile" not in err

    def test_print_config_of_the_fallback(self, torchstone: Command, settings: Settings, llama_dir: Path) -> None:
        values = {key: value for key, value in settings().items() if not key.startswith("model.")}
        values |= {"model.path": str(llama_dir), "model.implementation": "fallback"}
        assert torchstone("train", *flags(values), "--print-config")[2].strip() == (
            "auto on cpu: training.precision fp32 (on a CPU); model.loss full (the Transformers fallback computes all "
            "logits); model.recompute none (in the Transformers fallback); model.compile none (in the Transformers "
            "fallback)"
        )

    def test_print_config_knows_the_checkpoint(self, torchstone: Command, settings: Settings) -> None:
        api.train(None, settings(training__max_steps=1, training__precision="bf16"))
        code, _, err = torchstone("train", *flags(settings(training__max_steps=2)), "--print-config")
        assert code == 0
        assert "training.precision bf16 (as in the checkpoint)" in err
        other = settings(training__max_steps=2, training__precision="fp32", training__seed=9)
        code, _, err = torchstone("train", *flags(other), "--print-config")
        assert code == 0
        assert err.startswith("on cpu this run would be refused: ")
        assert "training.precision bf16 is now fp32; training.seed 0 is now 9" in err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--training.precision", "fp8"), "FP8 needs a GPU of compute capability 8.9 or higher"),
            (("--model.liger", "loss"), "model.liger loss: its kernels run on CUDA devices, not on cpu"),
            (("--model.depth", "400", "--model.width", "65536"), "B parameters need at least "),
            (("--nproc", "2", "--model.compile", "whole"), "model.compile whole does not work with FSDP2"),
        ],
    )
    def test_print_config_says_that_a_run_would_be_refused(
        self, arguments: tuple[str, ...], message: str, torchstone: Command, settings: Settings
    ) -> None:
        given = {name.removeprefix("--") for name in arguments}
        values = {key: value for key, value in settings(model__heads=None).items() if key not in given and value}
        code, out, err = torchstone("train", *flags(values), *arguments, "--print-config")
        assert code == 0, err
        assert json.loads(out)["model"]["compile"]
        assert re.search(f"this run would be refused: .*{re.escape(message)}", err), err

    def test_print_config_of_a_worker_and_of_several_nodes(
        self, torchstone: Command, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They know, or nobody knows yet, how many processes there are."""
        arguments = (*flags(settings()), "--parallel.tp", "2", "--print-config")
        assert "do not fit 1 process" in torchstone("train", *arguments)[2]
        nodes = ("--nnodes", "2", "--nproc", "1", "--node-rank", "0", "--rdzv-endpoint", "localhost:29500")
        assert torchstone("train", *arguments, *nodes)[2].startswith("auto on cpu: ")
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost"}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_PORT", "29512")
        assert torchstone("train", *arguments)[2].startswith("auto on cpu: ")

    def test_print_config_of_a_new_run_from_an_older_one(
        self, torchstone: Command, settings: Settings, tmp_path: Path
    ) -> None:
        api.train(None, settings(training__max_steps=1))
        values = {key: value for key, value in settings().items() if not key.startswith("model.")}
        values |= {"model.path": str(tmp_path / "run"), "output_dir": str(tmp_path / "next")}
        assert torchstone("train", *flags(values), "--print-config")[2].startswith("auto on cpu: training.precision")

    def test_print_config_passes_over_a_damaged_checkpoint(self, torchstone: Command, settings: Settings) -> None:
        values = settings(training__max_steps=2, training__precision="bf16", checkpoint__every_steps=1)
        api.train(None, values)
        (Path(values["output_dir"]) / "checkpoints/step-00000002/state.json").write_text("{")
        _, _, err = torchstone("train", *flags(settings()), "--print-config")
        assert "training.precision bf16 (as in the checkpoint)" in err

    def test_print_config_of_a_folder_without_weights(
        self, torchstone: Command, settings: Settings, llama_dir: Path, tmp_path: Path
    ) -> None:
        """An error without a hint."""
        shutil.copytree(llama_dir, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
        values = {key: value for key, value in settings().items() if not key.startswith("model.")}
        _, _, err = torchstone("train", *flags(values | {"model.path": str(tmp_path / "model")}), "--print-config")
        assert re.search(r"this run would be refused: .*no model.safetensors", err)
        assert "None" not in err

    def test_what_auto_means_is_saved_and_compared(
        self, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lines = {"observe__console": "lines"}
        api.train(None, settings(training__max_steps=1, training__precision="bf16", **lines))
        state = json.loads((tmp_path / "run/checkpoints/step-00000001/state.json").read_text())
        assert state["resolved"] == {
            "training.precision": "bf16",
            "model.attention": "sdpa",
            "model.loss": "full",
            "model.recompute": "none",
            "model.compile": "none",
            "model.fused": "none",
        }
        capsys.readouterr()
        api.train(None, settings(training__max_steps=2, **lines))
        assert "training.precision" not in capsys.readouterr().err, "it is still bf16"
        changes = {"model__recompute": "full", "model__attention": "eager", "checkpoint__every_steps": 50}
        api.train(None, settings(training__max_steps=3, **changes, **lines))
        warnings = re.findall(r"changed since .* was last started: ((?:model|checkpoint).*)", capsys.readouterr().err)
        assert warnings == [
            "checkpoint.every_steps none is now 50",
            "model.attention sdpa is now eager",
            "model.recompute none is now full",
        ]
        # The first start of a run from the checkpoint of another one.
        checkpoint = tmp_path / "run/checkpoints/step-00000003"
        values = settings(training__max_steps=4, model__recompute="full", **lines)
        api.train(None, values | {"output_dir": str(tmp_path / "other"), "checkpoint.resume": str(checkpoint)})
        assert f"changed since {checkpoint} was saved: model.attention eager is now sdpa" in capsys.readouterr().err

    def test_fused_projections_are_named(self, settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
        api.train(None, settings(training__max_steps=1, model__fused="qkv,gate_up", observe__console="lines"))
        assert "; fused: qkv,gate_up (as requested)" in capsys.readouterr().err

    def test_a_flag_overrides_it(self, torchstone: Command, settings: Settings) -> None:
        values = settings(training__max_steps=1, observe__console="lines", model__recompute="full")
        _, _, err = torchstone("train", *flags(values | {"model.loss": "chunked"}))
        assert "; loss: chunked (as requested, 512 tokens at a time); " in err
        assert "; recompute: full (as requested); " in err


class TestDelayedReading:
    """On a GPU the numbers of a step are read when the next one has been started."""

    @pytest.mark.parametrize("stop_after", [None, 3])
    def test_metrics_and_checkpoints_do_not_change(
        self, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_after: int | None
    ) -> None:
        values = settings(
            training__max_steps=5,
            data__validation_split=0.2,
            training__validate_every_steps=2,
            checkpoint__every_steps=4,
        )
        lines = {}
        for name in ("plain", "delayed"):
            if name == "delayed":
                monkeypatch.setattr(loop, "StepLog", DelayedLog)
            values["output_dir"] = str(tmp_path / name)
            if stop_after is not None:
                api.train(None, values | {"training.max_steps": stop_after})
            api.train(None, values)
            text = (tmp_path / name / "metrics.jsonl").read_text()
            lines[name] = [
                {key: value for key, value in json.loads(line).items() if key not in ("tok_s", "step_s", "memory")}
                for line in text.splitlines()
            ]
            assert (tmp_path / name / "checkpoints/step-00000004").is_dir()
        assert [line["step"] for line in lines["delayed"]] == [1, 2, 3, 4, 5]
        assert lines["delayed"] == lines["plain"]

    @pytest.mark.parametrize("is_delayed", [False, True])
    def test_an_error_does_not_lose_the_step_before(
        self, is_delayed: bool, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Fail(Callback):
            def on_step_begin(self, run: Run, number: int) -> None:
                if number == 4:
                    raise ValueError("of step 4")

        if is_delayed:
            monkeypatch.setattr(loop, "StepLog", DelayedLog)
        values = settings(training__max_steps=5)
        with pytest.raises(ValueError, match="of step 4"):
            api.train(None, values, callbacks=[Fail()])
        assert [line["step"] for line in read_metrics(Path(values["output_dir"]) / "metrics.jsonl")] == [1, 2, 3]

    @pytest.mark.parametrize("is_done", [False, True])
    def test_nobody_waits_for_a_device_that_waits_for_a_lost_rank(self, is_done: bool) -> None:
        read = []

        class Event:
            def query(self) -> bool:
                return is_done

        class Log(StepLog):
            def finish(self) -> None:
                read.append(self._unread)

        ctx = SimpleNamespace(world_size=2, any_rank=bool)
        run = SimpleNamespace(device=CPU, ctx=ctx, config=Config(), progress=Progress())
        log = Log(run, [], None)  # type: ignore[arg-type]
        log._unread = SimpleNamespace(end=Event())  # type: ignore[assignment]
        with pytest.raises(WorkerError), log.finished_on_error():
            raise WorkerError("connection closed by peer")
        assert len(read) == is_done

    @pytest.mark.parametrize("is_delayed", [False, True])
    def test_the_time_of_a_step_has_no_validation_in_it(
        self, is_delayed: bool, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if is_delayed:
            monkeypatch.setattr(loop, "StepLog", DelayedLog)
        values = settings(training__max_steps=4, data__validation_split=0.2, training__validate_every_steps=2)
        api.train(None, values, callbacks=[on(validation=lambda run, loss: time.sleep(1.0))])
        lines = read_metrics(Path(values["output_dir"]) / "metrics.jsonl")
        assert len([line for line in lines if "val_loss" in line]) == 2
        assert max(line["step_s"] for line in lines) < 1.0

    def test_a_loss_that_is_not_finite_still_ends_the_run(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(loop, "StepLog", DelayedLog)
        # On a GPU only the log checks.
        monkeypatch.setattr(step, "check_finite", lambda *_: None)
        with pytest.raises(Exception, match="step 2: loss") as caught:
            api.train(None, settings(training__max_steps=4, optim__learning_rate=1e30, optim__max_grad_norm=0.0))
        assert caught.value.exit_code == 5  # type: ignore[attr-defined]
        # The gradients are gone by then, but not their norms.
        assert re.search(r"\d+ gradients are not finite, such as (model|lm_head)\.", str(caught.value))

    def test_an_update_is_not_applied_if_only_the_loss_is_not_finite(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The gradients may be finite: a label outside the vocabulary makes only the loss NaN."""
        weights = []

        def keep_weights(run: Run, number: int) -> None:
            weights.append([p.detach().clone() for _, p in run.model.named_parameters()])

        def without_loss(*args: Any) -> StepResult:
            result = compute_gradients(*args)
            if len(weights) == 2:
                result.sums[0] = math.nan
            return result

        monkeypatch.setattr(loop, "StepLog", DelayedLog)
        monkeypatch.setattr(step, "check_finite", lambda *_: None)
        monkeypatch.setattr(loop, "compute_gradients", without_loss)
        # The numbers of step 2 are read when step 3 has been started.
        with pytest.raises(NumericalError, match="step 2: loss nan"):
            api.train(None, settings(training__max_steps=4), callbacks=[on(step_begin=keep_weights)])
        _, before, after = weights
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_the_garbage_collector_runs_between_steps_only(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    enabled, collected = [], []

    class Look(Callback):
        def on_step(self, run: Run, metrics: dict[str, Any]) -> None:
            enabled.append(gc.isenabled())
            collected.append(len(collections))

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            collections.append(info["generation"])

    collections: list[int] = []
    monkeypatch.setattr(loop, "COLLECT_EVERY", 2)
    gc.callbacks.append(note)
    try:
        api.train(None, settings(training__max_steps=6), callbacks=[Look()])
    finally:
        gc.callbacks.remove(note)
    assert enabled == [False] * 6
    # After steps 2 and 4.
    assert [count - collected[0] for count in collected] == [0, 0, 1, 1, 2, 2]
    assert collections[collected[0] : collected[-1]] == [1, 1]
    assert gc.isenabled()


def test_the_work_of_a_run_counts_from_its_first_step() -> None:
    """So that a resumed run compiles what it compiled before."""
    schedule = SimpleNamespace(total_steps=10, end=lambda progress: (10, 80))
    data = SimpleNamespace(train=SimpleNamespace(lengths=np.array([100, 300])))
    ctx = ParallelContext(ParallelDims(dp_shard=4))
    arguments: Any = (1_000, data, schedule, Progress(samples=16), ctx)
    assert run_flops(*arguments) == 6 * 1_000 * 80 * 200 / 4
    schedule.total_steps = None
    assert run_flops(*arguments) is None


def test_an_error_in_on_start_leaves_the_garbage_collector_on(settings: Settings) -> None:
    class Fail(Callback):
        def on_start(self, run: Run) -> None:
            raise ValueError("on_start")

    with pytest.raises(ValueError, match="on_start"):
        api.train(None, settings(), callbacks=[Fail()])
    assert gc.isenabled()


class DelayedLog(StepLog):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_delayed = True

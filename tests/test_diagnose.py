"""`torchstone diagnose`: planted bugs are found and named, and healthy runs raise no alarm.

A default test runs a planted bug against the checks that must find it and those that build on them; `make test-all`
runs every bug against all checks, and every family as full fine-tuning, LoRA and OSFT.
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import planted_bugs
from planted_bugs import Bug
from selection import the_rest
from tiny import make_llama, write_rows
from tiny_families import SHAPES, make_model
from torchstone import api
from torchstone.config import load_config
from torchstone.data.tokenize import Tokenizer
from torchstone.demo.corpus import chat_rows
from torchstone.diagnosis import reference
from torchstone.diagnosis.check import Check, Finding, SkipCheck
from torchstone.diagnosis.checks import CHECKS
from torchstone.diagnosis.report import DiagnosisReport, result_lines
from torchstone.diagnosis.run_checks import run_checks
from torchstone.diagnosis.session import Diagnosis, open_diagnosis
from torchstone.models.decoder import MLP
from torchstone.observe.console import Console
from torchstone.parallel.mesh import SINGLE_PROCESS
from torchstone.testing import launch_procs
from torchstone.training.run import Run

Settings = Callable[..., dict[str, Any]]
Command = Callable[..., tuple[int, str, str]]
Report = dict[str, Any]
CPU = torch.device("cpu")
# Those that later checks rely on, and one of these.
BASICS = ("batch", "loss", "gradients", "accumulation")
TWICE, OWN_COUNT = "labels are shifted twice", "every rank averages over its own loss tokens"
EACH_MEAN = "every micro-batch's loss is averaged by itself, and then the averages"
SEE_EACH_OTHER = "documents of a packed row see each other"
NOT_CAUSAL = "tokens see later tokens of their own document"
IN_BF16 = "gradients are summed or reduced in bf16"
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Plant:
    """A planted bug, the run it is planted in, and all checks that must fail, with a part of the cause of each."""

    bug: Bug | None
    failed: Mapping[str, str]
    kind: str = "chat"
    changes: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1


def everywhere(cause: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, cause)


PLANTS: dict[str, Plant] = {
    "mean per micro-batch": Plant(
        planted_bugs.mean_per_micro_batch, everywhere(EACH_MEAN, "loss")
    ),
    "mean per micro-batch of text": Plant(
        planted_bugs.mean_per_micro_batch, everywhere(EACH_MEAN, "loss"), "text"
    ),
    "last step dropped": Plant(
        planted_bugs.last_step_dropped, {"last_step": "the last, partial step of an epoch is dropped: 3 samples"}
    ),
    "last step divided by a full one": Plant(
        planted_bugs.last_step_divided_by_a_full_one,
        {
            "last_step": "the last, partial step is divided by the 3 micro-steps of a full one, not by its own 1",
            "world_size": "the loss is divided by",
        },
        changes={"data.packing": False},
    ),
    "mean per rank, on one rank": Plant(planted_bugs.mean_per_rank, {"world_size": OWN_COUNT}),
    "mean per rank": Plant(planted_bugs.mean_per_rank, everywhere(OWN_COUNT, "loss"), ranks=2),
    "labels shifted twice": Plant(
        planted_bugs.labels_shifted_twice,
        {"batch": TWICE},
    ),
    "labels shifted twice in the loss": Plant(
        planted_bugs.labels_shifted_twice_in_the_loss, everywhere(TWICE, "loss")
    ),
    "labels on padding": Plant(
        planted_bugs.labels_on_padding,
        {"batch": "positions of padding have a label"},
    ),
    "pad id left out of the loss": Plant(
        planted_bugs.pad_id_left_out_of_the_loss,
        everywhere("targets with the id of the pad token are left out", "loss"),
        "chat with pad as end",
    ),
    "documents see each other": Plant(
        planted_bugs.documents_see_each_other, everywhere(SEE_EACH_OTHER, "loss", "documents"), "text"
    ),
    "later tokens are seen": Plant(
        planted_bugs.later_tokens_are_seen, everywhere(NOT_CAUSAL, "loss", "documents")
    ),
    "head lost on save": Plant(planted_bugs.head_lost_on_save, {"saved_model": "the head is not tied"}),
    "rope scaling forgotten": Plant(
        planted_bugs.rope_scaling_forgotten, {"transformers": "RoPE scaling is not applied"}, "scaled rope"
    ),
    "same data on all ranks": Plant(
        planted_bugs.same_data_on_all_ranks,
        {"batch": "computed more than once, on ranks 0, 1"},
        ranks=2,
    ),
    "samples dropped above rank 0": Plant(
        planted_bugs.samples_dropped_above_rank_0,
        {"batch": "2 of the 9 documents of the step are in no micro-batch"},
        changes={"data.packing": False},
        ranks=2,
    ),
    "schedule advances per micro-step": Plant(
        planted_bugs.schedule_advances_per_micro_step, {"schedule": "the schedule advances with every micro-step"}
    ),
    "weight decay on norms": Plant(
        planted_bugs.weight_decay_on_norms,
        {
            "weight_decay": "5 tensors of the kind norm, such as layers.0.attention_norm.weight, decay",
            "update": "tensors decay that should not, or the reverse",
        },
        changes={"optim.weight_decay": 0.1},
    ),
    "bf16 reduction over micro-steps": Plant(
        planted_bugs.bf16_reduction, everywhere(IN_BF16, "gradients", "reduction"),
        changes={"training.precision": "bf16"},
    ),
    "bf16 reduction over ranks": Plant(
        planted_bugs.bf16_reduction, everywhere(IN_BF16, "gradients", "reduction"), ranks=2
    ),
    "same seed on all ranks": Plant(
        planted_bugs.same_seed_on_all_ranks,
        {"random_numbers": "data-parallel ranks draw the same random numbers"},
        ranks=2,
    ),
    "gradients not reduced": Plant(
        planted_bugs.gradients_not_reduced,
        {"gradients": "each rank has the gradient of its own rows", "replicas": "ranks 0 and 1 hold the same shard"},
        changes={"parallel.dp_replicate": 2},
        ranks=2,
    ),
    "norm not reduced over tp": Plant(
        planted_bugs.norm_not_reduced_over_tp,
        {
            "gradients": "only layers.0.attention_norm.weight is off (worst on rank 1)",
            "replicas": "ranks 0 and 1 hold the same shard of layers.0.attention_norm.weight",
        },
        changes={"parallel.tp": 2},
        ranks=2,
    ),
    "frozen layer": Plant(
        planted_bugs.frozen_layer, {"frozen": "requires_grad is off: layers.1.attention.wq.weight"}
    ),
    "detached layer": Plant(
        planted_bugs.detached_layer,
        {
            "frozen": "the loss does not depend on layers.1.attention.wq.weight",
            "transformers": "the logits are right, but not the backward pass",
        },
    ),
    "detached residual": Plant(
        planted_bugs.detached_residual, {"transformers": "the logits are right, but not the backward pass"}
    ),
    "only the first batch is validated": Plant(
        planted_bugs.only_the_first_batch_is_validated, {"evaluation": "is not the sum over all validation rows"}
    ),
    "the same samples in every step": Plant(
        planted_bugs.the_same_samples_in_every_step, {"last_step": "step 2 has the samples of an earlier step"}
    ),
    "adapters scaled by a quarter": Plant(
        planted_bugs.adapters_scaled_by_a_quarter, {"adapters": "is not 2 x B A x"}, changes={"tuning.method": "lora"}
    ),
    "dropout never drops": Plant(
        planted_bugs.dropout_never_drops,
        {"adapters": "tuning.lora_dropout drops nothing in training"},
        changes={"tuning.method": "lora", "tuning.lora_dropout": 0.3},
    ),
    "copies of norms are never refreshed": Plant(
        planted_bugs.copies_of_norms_are_never_refreshed,
        {"dtypes": "copy of layers.0.attention_norm.weight is not refreshed"},
        changes={"training.precision": "bf16"},
    ),
    "dropout in evaluation": Plant(
        planted_bugs.dropout_in_evaluation,
        everywhere("dropout, is on in evaluation mode", "loss")
        | {"evaluation": "dropout stays on while the model is evaluated"},
        changes={"tuning.method": "lora", "tuning.lora_dropout": 0.3},
    ),
    "no master weights": Plant(
        planted_bugs.no_master_weights, {"dtypes": "is in bfloat16"}, changes={"training.precision": "bf16"}
    ),
    "wrong chunked loss": Plant(
        planted_bugs.wrong_chunked_loss, {"fused_loss": "the chunked loss does not compute"}, "text"
    ),
    "update never applied": Plant(
        planted_bugs.update_never_applied,
        {"update": "no tensor moves", "swallowed_updates": "the optimizer's update is not applied"},
    ),
    "loss mask inverted": Plant(
        planted_bugs.loss_mask_inverted, {"loss_mask": "the mask is inverted"}, "chat encoded anew"
    ),
    "end of turn masked": Plant(
        planted_bugs.end_of_turn_masked, {"end_of_turn": "<|end|> (id 2) ends 60 rows, but is masked"},
        "chat encoded anew",
    ),
    "learning rate 1000 times too large": Plant(
        None, {"learning_rate": "times the one at which the loss diverges"}, changes={"optim.learning_rate": 1.0}
    ),
}  # fmt: skip
ON_ONE_RANK = [name for name, plant in PLANTS.items() if plant.ranks == 1]
ON_RANKS = [name for name, plant in PLANTS.items() if plant.ranks > 1]
# Tensor parallelism takes seconds for every new shape.
SLOW = ("norm not reduced over tp",)
FAMILIES = {family: next(iter(shapes)) for family, shapes in SHAPES.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, text_file: Path) -> Settings:
    """Overrides of a run by its kind."""
    root = tmp_path_factory.mktemp("runs")
    chat = {"data.path": str(write_rows(root / "chat.jsonl", chat_rows(60)))}
    kinds = {
        "chat": {"model.path": str(make_llama(root / "llama", tokenizer))} | chat,
        "scaled rope": {"model.path": str(make_llama(root / "rope", tokenizer, rope_parameters=LLAMA3))} | chat,
        "chat with pad as end": {"model.path": str(make_llama(root / "pad", tokenizer))} | chat,
        "text": {
            "model.depth": 2, "model.width": 32, "model.heads": 4, "model.tokenizer": str(tokenizer.path),
            "data.path": str(text_file),
        },
    }  # fmt: skip
    tokenizer_config = root / "pad/tokenizer_config.json"
    tokenizer_config.write_text(json.dumps(json.loads(tokenizer_config.read_text()) | {"pad_token": "<|end|>"}))

    def make(kind: str, **changes: Any) -> dict[str, Any]:
        common = {
            "data.context_length": 64, "data.cache_dir": str(root / "datasets"), "training.max_steps": 40,
            "training.global_batch_size": 8, "optim.learning_rate": 1e-3, "system.device": "cpu",
            "observe.console": "quiet", "output_dir": str(root / "run"),
        }  # fmt: skip
        if kind == "chat encoded anew":
            # A bug in what makes the tokens must not get into the token cache.
            common["data.cache_dir"] = str(tmp_path_factory.mktemp("datasets"))
        return common | kinds[kind.removesuffix(" encoded anew")] | changes

    return make


def key_flags(overrides: dict[str, Any]) -> list[str]:
    return [f"--{key}={value}" for key, value in overrides.items() if key != "output_dir"]


def diagnose(overrides: dict[str, Any], bug: Bug | None = None, only: Sequence[str] = ()) -> Report:
    with nullcontext() if bug is None else bug():
        return api.diagnose(overrides=overrides, only=only)


def diagnose_each(cases: list[tuple[dict[str, Any], Bug | None, Sequence[str]]]) -> list[Report]:
    return [diagnose(*case) for case in cases]


def causes(report: Report) -> dict[str, str]:
    """Of the checks that failed."""
    return {check["name"]: check["cause"] for check in report["checks"] if check["status"] == "fail"}


def assert_caught(plant: Plant, report: Report) -> None:
    """Exactly the checks fail that must, and each names the cause, where it is, and what to do."""
    found = causes(report)
    assert found.keys() == plant.failed.keys(), found
    for name, cause in plant.failed.items():
        assert cause in found[name]
    assert report["verdict"] == "fail"
    for check in report["checks"]:
        if check["status"] == "fail":
            assert check["source"]
            assert check["next_step"]
            assert check["values"]


def assert_healthy(report: Report, *skipped: str) -> None:
    """All checks pass, but for those that do not apply."""
    alarms = [check for check in report["checks"] if check["status"] in ("fail", "warn")]
    assert not alarms, alarms
    names = [check["name"] for check in report["checks"] if check["status"] == "skip" and check["group"] != "data"]
    assert set(names) == set(skipped)
    assert (report["verdict"], report["exit_code"]) == ("pass", 0)


class TestPlantedBugs:
    @pytest.mark.parametrize("name", ON_ONE_RANK)
    def test_a_bug_is_caught_and_named(self, runs: Settings, name: str) -> None:
        plant = PLANTS[name]
        only = (*BASICS, *plant.failed)
        assert_caught(plant, diagnose(runs(plant.kind, **plant.changes), plant.bug, only))

    def test_a_bug_on_several_ranks_is_caught_and_named(self, runs: Settings) -> None:
        names = [name for name in ON_RANKS if name not in SLOW]
        self.check_on_ranks(runs, names, lambda plant: (*BASICS, *plant.failed))

    @the_rest
    @pytest.mark.parametrize("name", ON_ONE_RANK)
    def test_no_other_check_fails(self, runs: Settings, name: str) -> None:
        plant = PLANTS[name]
        assert_caught(plant, diagnose(runs(plant.kind, **plant.changes), plant.bug))

    @the_rest
    def test_no_other_check_fails_on_several_ranks(self, runs: Settings) -> None:
        self.check_on_ranks(runs, ON_RANKS, lambda plant: ())

    def check_on_ranks(self, runs: Settings, names: list[str], only: Callable[[Plant], Sequence[str]]) -> None:
        plants = [PLANTS[name] for name in names]
        cases = [(runs(plant.kind, **plant.changes), plant.bug, only(plant)) for plant in plants]
        ranks = launch_procs(diagnose_each, 2, cases, backend=None, timeout=400.0)
        for name, plant, reports in zip(names, plants, zip(*ranks, strict=True), strict=True):
            assert causes(reports[0]) == causes(reports[1]), name
            assert_caught(plant, reports[0])


class TestHealthyRuns:
    def test_a_chat_model(self, runs: Settings) -> None:
        assert_healthy(diagnose(runs("chat")), "replicas", "random_numbers", "mixed_precision", "adapters")

    def test_pretraining_on_text_in_bf16(self, runs: Settings) -> None:
        report = diagnose(runs("text", **{"training.precision": "bf16", "optim.weight_decay": 0.1}))
        assert_healthy(report, "replicas", "random_numbers", "adapters")

    def test_lora(self, runs: Settings) -> None:
        report = diagnose(runs("chat", **{"tuning.method": "lora", "tuning.lora_dropout": 0.1}))
        assert_healthy(report, "replicas", "random_numbers", "mixed_precision")

    def test_a_loss_that_diverges_at_no_rate_is_no_alarm(self, runs: Settings) -> None:
        """A small alpha, and a frozen head."""
        changes = {"tuning.method": "lora", "tuning.lora_alpha": 2.0}
        for rate, status in ((1e-3, "pass"), (1e-8, "warn")):
            report = diagnose(runs("chat", **changes, **{"optim.learning_rate": rate}), only=("learning_rate",))
            assert report["checks"][-1]["status"] == status
            assert report["checks"][-1]["values"]["diverges_at"] is None
        assert "inf" not in report["checks"][-1]["next_step"]

    @pytest.mark.parametrize("length", [2, 7, 20])
    def test_short_rows(self, runs: Settings, length: int) -> None:
        only = ("documents", "packing", "last_step", "update")
        report = diagnose(runs("text", **{"data.context_length": length}), only=only)
        assert {check["status"] for check in report["checks"]} <= {"pass", "skip"}
        assert report["checks"][-1]["status"] == "pass"

    def test_dynamic_rope(self, runs: Settings, tmp_path: Path, tokenizer: Tokenizer) -> None:
        """Transformers keeps the frequencies of the longest document so far."""
        folder = make_model(tmp_path / "model", "llama", "dynamic", vocab_size=448)
        tokenizer.save(folder)
        changes = {"model.path": str(folder), "data.packing": False, "data.context_length": 48}
        assert_healthy(diagnose(runs("chat", **changes), only=("transformers",)))

    def test_documents_of_packed_text_that_begin_alike_can_be_learned(self, runs: Settings, tmp_path: Path) -> None:
        rows = [{"text": f"{word}{number}"} for number in range(40) for word in ("a", "b", "c")]
        changes = {"data.path": str(write_rows(tmp_path / "rows.jsonl", rows)), "data.context_length": 64}
        assert diagnose(runs("text", **changes), only=("one_sample",))["verdict"] == "pass"

    def test_samples_without_labels(self, runs: Settings, tmp_path: Path) -> None:
        rows = [
            {"input_ids": [5, 6, 7, 8] * 3, "labels": [-100] * 12 if n % 3 else [5, 6, 7, 8] * 3} for n in range(60)
        ]
        changes = {"data.path": str(write_rows(tmp_path / "rows.jsonl", rows)), "training.global_batch_size": 20}
        report = diagnose(runs("text", **changes), only=("last_step", "update", "evaluation"))
        assert [check["status"] for check in report["checks"]] == ["pass"] * 3

    def test_two_ranks(self, runs: Settings) -> None:
        reports = launch_procs(diagnose, 2, runs("chat"), backend=None)
        assert_healthy(reports[0], "mixed_precision", "adapters")
        assert [check["status"] for check in reports[0]["checks"]] == [each["status"] for each in reports[1]["checks"]]

    @the_rest
    def test_two_ranks_by_the_command(self, runs: Settings, tmp_path: Path) -> None:
        rows = write_rows(tmp_path / "rows.jsonl", [*chat_rows(60), {"messages": []}])
        for overrides, bad in ((runs("chat"), []), (runs("chat", **{"data.path": str(rows)}), ["bad_rows"])):
            flags = [*key_flags(overrides), "--nproc", "2", "--json"]
            command = [sys.executable, "-m", "torchstone", "diagnose", *flags]
            process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
            assert process.returncode == (3 if bad else 0), process.stderr
            report = json.loads(process.stdout)
            assert [check["name"] for check in report["checks"] if check["status"] == "fail"] == bad
            assert report["ranks"] == 2
        assert list(tmp_path.iterdir()) == [rows]

    @the_rest
    @pytest.mark.parametrize("method", ["full", "lora", "osft"])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_family(self, runs: Settings, tmp_path: Path, tokenizer: Tokenizer, family: str, method: str) -> None:
        folder = make_model(tmp_path / family, family, FAMILIES[family], vocab_size=448)
        tokenizer.save(folder)
        changes = {"model.path": str(folder), "tuning.method": method, "data.context_length": 48}
        # Gemma 2 has soft caps, which only eager attention has on a CPU.
        skipped = ["attention_kernel"] if family == "gemma2" else []
        skipped += ["adapters"] if method != "lora" else []
        assert_healthy(diagnose(runs("chat", **changes)), "replicas", "random_numbers", "mixed_precision", *skipped)

    @the_rest
    @pytest.mark.parametrize("layout", [{"parallel.tp": 2}, {"parallel.pp": 2}, {"parallel.dp_replicate": 2}])
    def test_every_kind_of_layout(self, runs: Settings, layout: dict[str, Any]) -> None:
        reports = launch_procs(diagnose, 2, runs("text", **layout), backend=None, timeout=400.0)
        assert_healthy(reports[0], "mixed_precision", "adapters")


@pytest.mark.parametrize("window", [60, 600])
def test_windows_are_seen_by_a_document_that_is_longer(
    runs: Settings, tmp_path: Path, tokenizer: Tokenizer, window: int
) -> None:
    """Longer than all documents of the data."""
    folder = make_model(tmp_path / "model", "mistral", "window", vocab_size=448, sliding_window=window)
    tokenizer.save(folder)
    overrides = runs("chat", **{"model.path": str(folder), "data.context_length": 48})
    assert diagnose(overrides, only=("transformers",))["verdict"] == "pass"
    found = causes(diagnose(overrides, planted_bugs.sliding_windows_ignored, only=("transformers",)))
    assert "sliding windows are not applied" in found["transformers"]


class TestTheCommand:
    def test_a_failure_is_explained_and_decides_the_exit_code(
        self, torchstone: Command, runs: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with planted_bugs.head_lost_on_save():
            code, out, err = torchstone("diagnose", *key_flags(runs("chat")), "--only", "saved_model,dtypes")
        assert code == 6
        assert re.findall("^([A-Z]+) +([a-z_]+)", out, re.MULTILINE) == [("PASS", "dtypes"), ("FAIL", "saved_model")]
        for name, text in {"severity": "critical:", "cause": "the head is", "where": "checkpoint/save.py"}.items():
            assert f"\n      {name:<20}{text}" in out
        assert "verdict                   FAIL: 1 of 2 checks failed: saved_model\n" in out
        assert "error: 1 of 2 checks failed: saved_model\n  begin with saved_model: the head is" in err
        assert not list(tmp_path.iterdir())

    def test_all_bad_rows_are_reported_and_other_checks_go_on(
        self, torchstone: Command, runs: Settings, tmp_path: Path
    ) -> None:
        rows = list(chat_rows(60))
        for number in (7, 9):
            rows[number] = {"messages": []}
        overrides = runs("chat", **{"data.path": str(write_rows(tmp_path / "rows.jsonl", rows))})
        command = ["diagnose", *key_flags(overrides), "--only", "bad_rows,loss", "--json"]
        code, out, _ = torchstone(*command)
        assert code == 3
        bad, loss = json.loads(out)["checks"]
        assert (bad["status"], loss["status"]) == ("fail", "pass")
        assert re.findall(r"rows.jsonl:(\d+)", bad["cause"]) == ["8", "10"]
        code, out, _ = torchstone(*command, "--data.on_bad_row", "skip")
        assert (code, json.loads(out)["verdict"]) == (0, "pass")

    def test_list_and_unknown_names(self, torchstone: Command, runs: Settings) -> None:
        code, out, _ = torchstone("diagnose", "--list")
        assert code == 0
        assert [line.split()[0] for line in out.splitlines()] == [check.name for check in CHECKS]
        code, out, _ = torchstone("diagnose", "--list", "--json")
        assert [check["group"] for check in json.loads(out)["checks"]] == [check.group for check in CHECKS]
        code, _, err = torchstone("diagnose", *key_flags(runs("chat")), "--only", "los")
        assert code == 2
        assert "there is no check 'los'\n  did you mean loss? " in err
        code, out, _ = torchstone("diagnose", *key_flags(runs("chat")), "--only", "backward,dtypes", "--json")
        names = [check["name"] for check in json.loads(out)["checks"]]
        assert (code, names) == (0, ["dtypes", "gradients", "frozen", "reduction"])

    def test_a_run_that_exists_is_left_alone(self, runs: Settings, tmp_path: Path) -> None:
        overrides = runs("chat", **{"output_dir": str(tmp_path / "run"), "training.max_steps": 2})
        api.train(overrides=overrides)
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
        assert diagnose(overrides, only=("loss", "one_sample", "last_step"))["verdict"] == "pass"
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


class TestTheLoopOverChecks:
    def results(self, runs: Settings, *functions: Callable[[Any], Finding]) -> DiagnosisReport:
        checks = [Check(f"check {n}", "step", "critical", "", "", f) for n, f in enumerate(functions)]
        config = load_config(overrides=runs("chat", **{"training.precision": "bf16"}))
        with open_diagnosis(config, Console("none"), CPU, SINGLE_PROCESS) as diagnosis:
            model = diagnosis.run.model
            # The master weights, and the copies that are computed with.
            parameters = [*model.named_parameters(), *model.module.named_parameters()]
            weights = [parameter.detach().clone() for _, parameter in parameters]
            results = run_checks(diagnosis, checks)
            for (name, parameter), weight in zip(parameters, weights, strict=True):
                assert torch.equal(parameter, weight), name
        return DiagnosisReport(results, 1)

    def test_an_error_in_a_check_is_a_failure_and_no_memory_a_skipped_check(self, runs: Settings) -> None:
        def fail(_: Any) -> Finding:
            raise ZeroDivisionError("by zero")

        def run_out(_: Any) -> Finding:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

        def skip(_: Any) -> Finding:
            raise SkipCheck("not here")

        report = self.results(runs, fail, run_out, skip, lambda _: Finding("pass", "fine", values={"x": 0.1}))
        assert [result.finding.status for result in report.results] == ["fail", "skip", "skip", "pass"]
        first = report.results[0].finding
        assert first.cause == "ZeroDivisionError: by zero"
        assert str(first.source).startswith(__file__)
        assert report.to_dict()["checks"][3]["values"] == {"x": 0.1}
        assert report.summary == "1 of 2 checks failed: check 0; 1 could not run: check 1"

    def test_trials_leave_the_model_as_it_was(self, runs: Settings) -> None:
        by_name = {check.name: check.function for check in CHECKS}
        names = ("attention_kernel", "saved_model", "swallowed_updates", "weight_decay", "learning_rate", "small_batch")
        report = self.results(runs, *(by_name[name] for name in names))
        assert report.verdict == "pass"

    def test_a_learning_rate_that_moves_nothing_is_a_warning(self, runs: Settings) -> None:
        (check,) = diagnose(runs("chat", **{"optim.learning_rate": 1e-8}), only=["learning_rate"])["checks"]
        assert check["status"] == "warn"
        assert check["values"]["diverges_at"] > 1e-3
        assert "weights hardly move" in check["cause"]

    def test_warnings_do_not_change_the_exit_code(self, runs: Settings) -> None:
        report = self.results(runs, lambda _: Finding("warn", "odd", "0", "because", "here", "do this"))
        assert (report.verdict, report.error) == ("warn", None)
        assert report.to_dict()["exit_code"] == 0
        text = "\n".join(result_lines(report.results[0]))
        assert report.next_steps == ["check 0: do this"]
        assert text.startswith("WARN  check 0             odd (limit 0)\n")
        assert "next                do this" in text


class TestMemory:
    """Models in fp32 beside that of the run: where there is no room for two of them, or for one."""

    @pytest.fixture(autouse=True)
    def collect_own_garbage_only(self) -> Iterator[None]:
        gc.freeze()
        yield
        gc.unfreeze()

    @pytest.mark.parametrize("changes", [{"training.precision": "bf16"}, {"tuning.method": "lora"}])
    def test_with_room_for_one_nothing_is_missing(
        self, runs: Settings, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
    ) -> None:
        self.limit(monkeypatch, 1)
        report = diagnose(runs("chat", **changes), only=("model", "step", "backward", "optimizer", "one_sample"))
        assert [check["name"] for check in report["checks"] if check["is_missing"]] == []
        assert report["verdict"] == "pass"

    def test_without_room_the_verdict_says_what_is_missing(
        self, runs: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.limit(monkeypatch, 0)
        report = diagnose(runs("chat", **{"training.precision": "bf16"}), planted_bugs.mean_per_micro_batch)
        missing = [check["name"] for check in report["checks"] if check["is_missing"]]
        assert {"loss", "gradients", "transformers"} <= set(missing)
        assert not {"learning_rate", "one_sample", "small_batch", "schedule"} & set(missing)
        assert (report["verdict"], report["exit_code"]) == ("incomplete", 0)
        assert f"{len(missing)} could not run: " in report["summary"]
        assert "run the missing checks with more memory" in report["next_steps"][0]

    def limit(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        alive, build = weakref.WeakSet[Any](), Diagnosis._try_to_build

        def try_to_build(self: Diagnosis, *args: Any) -> tuple[Run | None, str | None]:
            gc.collect()
            if len(alive) >= room:
                return None, "no room"
            run, reason = build(self, *args)
            assert run is not None
            alive.add(run.model.module)
            return run, reason

        monkeypatch.setattr(Diagnosis, "_try_to_build", try_to_build)

    def test_a_rank_alone_that_is_out_of_memory(self, runs: Settings) -> None:
        reports = launch_procs(diagnose_without_memory, 2, runs("chat"), backend=None, timeout=60.0)
        for report in reports:
            assert [check["is_missing"] for check in report["checks"]] == [False, True, True]
            assert report["verdict"] == "incomplete"


def diagnose_without_memory(overrides: dict[str, Any]) -> Report:
    def compute_logits(*args: Any) -> Tensor:
        if os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return original(*args)

    original, reference.compute_logits = reference.compute_logits, compute_logits
    return diagnose(overrides, only=["batch", "loss", "gradients"])


class TestFinite:
    def test_weights_that_are_not_finite_are_named_and_nothing_else_is_blamed(
        self, runs: Settings, tmp_path: Path, tokenizer: Tokenizer
    ) -> None:
        folder = make_llama(tmp_path / "llama", tokenizer)
        weights = load_file(folder / "model.safetensors")
        name = "model.layers.1.mlp.down_proj.weight"
        weights[name][3, 5] = math.nan
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        report = diagnose(runs("chat", **{"model.path": str(folder)}))
        assert causes(report) == {"finite": f"the weights that are loaded are not finite: {name}"}
        statuses = {check["status"] for check in report["checks"] if check["group"] not in ("data", "model")}
        assert statuses == {"skip"}
        json.dumps(report, allow_nan=False)

    def test_the_first_bad_module_is_named(self, runs: Settings) -> None:
        def overflow(mlp: MLP, hidden: Tensor) -> Tensor:
            return mlp.down(mlp.up(hidden)) * math.inf

        report = diagnose(runs("chat"), lambda: patch.object(MLP, "forward", overflow))
        assert causes(report).keys() == {"finite"}
        assert "the first module that is not finite is model.layers.0.mlp: its output" in causes(report)["finite"]

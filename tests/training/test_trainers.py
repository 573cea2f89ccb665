"""`torchstone.train` on several processes: steps, files, what it trains, how it stops and resumes.

Many runs share a launch, and the tests below look at their results; the workers of pytest-xdist share them too. The
model is a tiny Llama whose padding token also occurs in the text. As in parity.py, a large eps keeps Adam from turning
rounding noise into full-size steps, because layouts are compared over several steps.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import parity
import torchstone
from exact_runs import EXACT
from layouts import MOMENTS, read_tensors
from selection import the_rest
from tiny import make_llama, write_rows
from torchstone import cli
from torchstone.checkpoint.shard_files import OPTIMIZER, WEIGHTS, ShardedFiles, shard_files
from torchstone.data.tokenize import Tokenizer
from torchstone.demo.corpus import chat_rows, corpus_rows
from torchstone.errors import StoppedBySignal, UsageError
from torchstone.observe.metrics import read_metrics
from torchstone.parallel.local_shards import local_shards
from torchstone.testing import launch_procs
from torchstone.training.run import Callback, Run

STEPS, SAMPLES = 6, 5
VALIDATION_LIMIT = 1e-6
VALIDATION_KEYS = ("val_loss", "val_loss/new", "val_loss/old")
DP2, TP2, PP2 = {"parallel.dp_shard": 2}, {"parallel.tp": 2}, {"parallel.pp": 2}
HSDP = {"parallel.dp_replicate": 2, "parallel.dp_shard": 2}
# A new model whose heads tp 2 does not divide.
THREE_HEADS = {
    "model.path": None, "model.depth": 1, "model.width": 48, "model.heads": 3, "model.mlp_width": 96,
    "model.tokenizer": "demo:tokenizer",
}  # fmt: skip
# Samples of the uneven data: a prime number.
UNEVEN = 11
# Overrides, and the samples of each step of an epoch.
UNEVEN_CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "packed": ({"data.packing": True}, [4, 4, 3]),
    "padded": ({"data.packing": False, "training.batch_size": 1}, [4, 4, 3]),
    "fewer samples than ranks": ({"data.packing": True, "training.global_batch_size": 2}, [2, 2, 2, 2, 2, 1]),
}

Overrides = dict[str, Any]
Factory = pytest.TempPathFactory


@dataclass(frozen=True)
class Job:
    """A run, or a part of one: rank 1 alone asks for a stop after `stop_at`, or gets a signal after `signal_at`."""

    overrides: Overrides
    is_refused: bool = False
    stop_at: int | None = None
    signal_at: int | None = None


@dataclass
class RankResult:
    """What one rank saw of a job. `values_compared`: see `compare_with_checkpoint`."""

    step: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    checkpoint: Path | None = None
    stopped: str | None = None
    error: Exception | None = None
    values_compared: int = 0
    events: list[tuple[Any, ...]] = field(default_factory=list)


class Recorder(Callback):
    """Records its calls, compares a resumed run with its checkpoint, and ends the run as the job asks."""

    def __init__(self, job: Job, result: RankResult) -> None:
        self.job, self.result = job, result

    def on_start(self, run: Run) -> None:
        self.result.events.append(("start", run.progress.step, run.ctx.rank))
        if run.checkpoint is not None and shard_files(run.checkpoint, WEIGHTS):
            self.result.values_compared = compare_with_checkpoint(run)

    def on_step(self, run: Run, values: dict[str, Any]) -> None:
        self.result.events.append(("step", values["step"], values["loss"]))
        if run.ctx.rank == 1 and values["step"] == self.job.stop_at:
            run.stop("rank 1 asks for it")
        if run.ctx.rank == 1 and values["step"] == self.job.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_validation(self, run: Run, loss: float) -> None:
        self.result.events.append(("validation", run.progress.step, loss))

    def on_checkpoint(self, run: Run, folder: Path) -> None:
        self.result.events.append(("checkpoint", run.progress.step, folder.name))

    def on_end(self, run: Run) -> None:
        self.result.events.append(("end", run.progress.step))


def compare_with_checkpoint(run: Run) -> int:
    """Compares this rank's weights and moments with the files they were loaded from. Returns the number of values."""
    assert run.checkpoint is not None
    weights = ShardedFiles(shard_files(run.checkpoint, WEIGHTS))
    moments = ShardedFiles(shard_files(run.checkpoint, OPTIMIZER))
    count = 0
    for name, parameter in run.model.named_parameters():
        tensors = [("", weights, parameter.detach())]
        tensors += [(f"/{kind}", moments, run.optimizer.state[parameter][kind]) for kind in MOMENTS]
        for kind, files, tensor in tensors:
            for shard in local_shards(run.model.decoder_config, name, tensor):
                saved = torch.full_like(shard.tensor, float("nan"))
                files.read_into(shard.name + kind, saved, shard.offset)
                assert torch.equal(shard.tensor, saved), f"{shard.name}{kind} at {shard.offset}"
                count += saved.numel()
    return count


def train_job(job: Job) -> RankResult:
    result = RankResult()
    try:
        end = torchstone.train(overrides=job.overrides, callbacks=[Recorder(job, result)])
    except (StoppedBySignal, UsageError) as error:
        if job.signal_at is None and not job.is_refused:
            raise
        result.error = error
        return result
    result.step, result.loss, result.val_loss = end.step, end.loss, end.val_loss
    result.checkpoint, result.stopped = end.checkpoint, end.stopped
    return result


def train_jobs(jobs: list[Job]) -> list[RankResult]:
    return [train_job(job) for job in jobs]


def train_with_own_group(job: Job) -> tuple[bool, RankResult, bool]:
    """With whether there is a process group before and after."""
    return dist.is_initialized(), train_job(job), dist.is_initialized()


def launch(jobs: dict[str, Job], world_size: int) -> dict[str, list[RankResult]]:
    """Every rank's result of each job."""
    ranks = launch_procs(train_jobs, world_size, list(jobs.values()))
    return {name: list(results) for name, results in zip(jobs, zip(*ranks, strict=True), strict=True)}


def once(factory: Factory, name: str, make: Callable[[], Any]) -> Any:
    """What `make` returns; the first pytest-xdist worker that asks makes it, and the others wait."""
    root = factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    path = root / f"trainers {name}.pickle"
    with (root / f"trainers {name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(pickle.dumps(make()))
    return pickle.loads(path.read_bytes())


@dataclass
class Workspace:
    """Data, a model with `padding_idx`, and the folders of the runs."""

    folder: Path
    model: Path
    padding_idx: int
    base: Overrides

    def overrides(self, name: str, *changes: Overrides) -> Overrides:
        merged = self.base | {"output_dir": str(self.folder / name)}
        for change in changes:
            merged |= change
        return merged

    def metrics(self, name: str) -> list[dict[str, Any]]:
        return read_metrics(self.folder / name / "metrics.jsonl")

    def checkpoint(self, name: str, step: int) -> Path:
        return self.folder / name / f"checkpoints/step-{step:08d}"

    def loss_difference(self, name: str, other: str) -> float:
        lines = zip(self.metrics(name), self.metrics(other), strict=True)
        return max(parity.relative(ours["loss"], theirs["loss"]) for ours, theirs in lines)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: Factory, tokenizer: Tokenizer) -> Workspace:
    return once(tmp_path_factory, "workspace", lambda: make_workspace(tmp_path_factory.mktemp("trainers"), tokenizer))


def make_workspace(folder: Path, tokenizer: Tokenizer) -> Workspace:
    texts = list(corpus_rows(40))
    data = write_rows(folder / "text.jsonl", texts)
    sets = {"new": corpus_rows(7, seed=5), "old": corpus_rows(2, seed=6)}
    validation = {name: str(write_rows(folder / f"{name}.jsonl", rows)) for name, rows in sets.items()}
    (most_common, _), *_ = Counter(i for row in texts for i in tokenizer.encode(row["text"])).most_common(1)
    model = make_llama(folder / "llama", tokenizer, pad_token_id=most_common)
    base = {
        "model.path": str(model), "data.path": str(data), "data.validation_path": validation,
        "data.context_length": 32, "data.cache_dir": str(folder / "datasets"), "training.max_steps": STEPS,
        "training.global_batch_size": SAMPLES, "training.batch_size": 2, "training.validate_every_steps": 3,
        "checkpoint.every_steps": 3, "optim.learning_rate": 3e-3, "optim.eps": parity.FREE_RUNNING["eps"],
        "observe.console": "quiet", "system.device": "cpu", "system.threads": 1,
    }  # fmt: skip
    return Workspace(folder, model, most_common, base)


@pytest.fixture(scope="module")
def single(workspace: Workspace, tmp_path_factory: Factory) -> RankResult:
    """The run of one process."""
    return once(tmp_path_factory, "single", lambda: train_job(Job(workspace.overrides("single"))))


@pytest.fixture(scope="module")
def double(workspace: Workspace, single: RankResult, tmp_path_factory: Factory) -> list[tuple[bool, RankResult, bool]]:
    """The run of two ranks, by a train() that creates the process group."""
    job = Job(workspace.overrides("double", DP2))
    return once(tmp_path_factory, "double", lambda: launch_procs(train_with_own_group, 2, job, backend=None))


@pytest.fixture(scope="module")
def interrupted(workspace: Workspace, double: Any, tmp_path_factory: Factory) -> dict[str, list[RankResult]]:
    """Runs that two ranks begin and do not finish."""
    jobs = {
        "signal": Job(workspace.overrides("signal", DP2), signal_at=2),
        "tp to pp": Job(workspace.overrides("tp to pp", TP2), stop_at=3),
        "2 to 4 to 1": Job(workspace.overrides("2 to 4 to 1", DP2), stop_at=2),
        "three heads": Job(workspace.overrides("three heads", TP2, THREE_HEADS), is_refused=True),
    }
    return once(tmp_path_factory, "interrupted", lambda: launch(jobs, 2))


@pytest.fixture(scope="module")
def resumed(workspace: Workspace, interrupted: Any, tmp_path_factory: Factory) -> dict[str, list[RankResult]]:
    """The same runs, resumed by other processes."""

    def resume() -> dict[str, list[RankResult]]:
        results = launch({"on 4": Job(workspace.overrides("2 to 4 to 1", HSDP), stop_at=4)}, 4)
        layouts = {"signal": DP2, "tp to pp": PP2}
        results |= launch({name: Job(workspace.overrides(name, layout)) for name, layout in layouts.items()}, 2)
        return results | {"on 1": [train_job(Job(workspace.overrides("2 to 4 to 1")))]}

    return once(tmp_path_factory, "resumed", resume)


@pytest.fixture(scope="module")
def uneven(workspace: Workspace, tmp_path_factory: Factory) -> dict[str, list[RankResult]]:
    return once(tmp_path_factory, "uneven", lambda: train_uneven(workspace))


def train_uneven(workspace: Workspace) -> dict[str, list[RankResult]]:
    """One epoch on three data-parallel ranks, and the same in one process."""
    data = write_rows(workspace.folder / "uneven.jsonl", chat_rows(UNEVEN))
    common = {
        "data.path": str(data), "data.validation_path": None, "data.context_length": 64, "training.max_steps": None,
        "training.max_epochs": 1, "training.batch_size": None, "training.validate_every_steps": None,
        "training.global_batch_size": 4, "checkpoint.every_steps": None, "checkpoint.at_end": False,
    }  # fmt: skip
    jobs = {name: Job(workspace.overrides(name, common, changes)) for name, (changes, _) in UNEVEN_CASES.items()}
    for name, job in jobs.items():
        train_job(Job(job.overrides | {"output_dir": str(workspace.folder / f"{name}, single")}))
    return launch(jobs, 3)


class TestTrain:
    def test_all_ranks_make_all_steps_and_return_the_same_result(
        self, workspace: Workspace, double: list[tuple[bool, RankResult, bool]]
    ) -> None:
        # The first run creates the group, and it stays for later runs of the same processes.
        assert [(before, after) for before, _, after in double] == [(False, True)] * 2
        lines = workspace.metrics("double")
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        assert [line["samples"] for line in lines] == [SAMPLES] * STEPS
        for _, result, _ in double:
            assert (result.step, result.stopped, result.error) == (STEPS, None, None)
            assert result.checkpoint == workspace.checkpoint("double", STEPS)
            assert (result.loss, result.val_loss) == (lines[-1]["loss"], lines[-1]["val_loss"])
        # Five rows, two per micro-batch: three micro-steps on one rank, two on two.
        assert [workspace.metrics(name)[0]["micro_batches"] for name in ("single", "double")] == [3, 2]

    def test_losses_and_validation_equal_those_of_one_process(
        self, workspace: Workspace, single: RankResult, double: Any
    ) -> None:
        assert workspace.loss_difference("double", "single") <= parity.FREE_LOSS_LIMIT
        for one, two in zip(workspace.metrics("single"), workspace.metrics("double"), strict=True):
            for key in ("lr", "tokens", "loss_tokens"):
                assert two[key] == one[key]
            for key in VALIDATION_KEYS:
                assert (key in two) == (key in one) == (one["step"] % 3 == 0)
                if key in one:
                    assert parity.relative(two[key], one[key]) <= VALIDATION_LIMIT
        assert single.val_loss == workspace.metrics("single")[-1]["val_loss"]

    def test_callbacks_run_on_every_rank(
        self, workspace: Workspace, double: list[tuple[bool, RankResult, bool]]
    ) -> None:
        lines, common = workspace.metrics("double"), list[tuple[Any, ...]]()
        for line in lines:
            step = line["step"]
            common.append(("step", step, line["loss"]))
            if step % 3 == 0:
                common += [("validation", step, line["val_loss"]), ("checkpoint", step, f"step-{step:08d}")]
        for rank, (_, result, _) in enumerate(double):
            assert result.events == [("start", 0, rank), *common, ("end", 6)]

    def test_each_rank_writes_its_own_files(self, workspace: Workspace, double: Any) -> None:
        kinds = ("weights", "optimizer", "random")
        files_of_ranks = {f"{kind}-{rank:05d}.safetensors" for kind in kinds for rank in range(2)}
        files_of_one = {"model.safetensors", "optimizer.safetensors", "random.safetensors"}
        for name in ("single", "double"):
            files = {path.name for path in (workspace.folder / name).iterdir()}
            assert files == {".lock", "config.json", "metrics.jsonl", "checkpoints", "logs"}
            checkpoints = {path.name for path in (workspace.folder / name / "checkpoints").iterdir()}
            assert checkpoints == {"step-00000003", "step-00000006"}
        for step in (3, 6):
            one, two = ({p.name for p in workspace.checkpoint(name, step).iterdir()} for name in ("single", "double"))
            assert two - one == files_of_ranks
            assert one - two == files_of_one
            assert {"config.json", "manifest.json", "state.json", "tokenizer.json"} <= two & one
            manifest = json.loads((workspace.checkpoint("double", step) / "manifest.json").read_text())
            assert set(manifest["files"]) == two - {"manifest.json"}
        state = json.loads((workspace.checkpoint("double", 6) / "state.json").read_text())
        assert state["layout"] == "dp_shard 2"

    def test_every_weight_changes_except_the_padding_embedding(
        self, workspace: Workspace, double: Any, tmp_path: Path
    ) -> None:
        torchstone.export(str(workspace.folder / "double"), tmp_path / "after", verify=False)
        before = load_file(workspace.model / "model.safetensors")
        after = load_file(tmp_path / "after/model.safetensors")
        assert before.keys() == after.keys()
        assert [name for name in before if torch.equal(before[name], after[name])] == []
        changed = (before["model.embed_tokens.weight"] != after["model.embed_tokens.weight"]).any(dim=1)
        assert not changed[workspace.padding_idx]
        assert changed.sum() > 60, "most tokens occur in the text"
        # The head trains the padding token too.
        assert (before["lm_head.weight"] != after["lm_head.weight"])[workspace.padding_idx].any()

    def test_the_padding_embedding_stays_in_every_layout_and_after_resuming(
        self, workspace: Workspace, resumed: Any
    ) -> None:
        """A checkpoint's config.json has the tokenizer's pad_token_id, but the run keeps the model's."""
        before = load_file(workspace.model / "model.safetensors")["model.embed_tokens.weight"]
        for name, step in (("tp to pp", 3), ("tp to pp", 6), ("signal", 6), ("2 to 4 to 1", 4)):
            changed = (read_tensors(workspace.checkpoint(name, step))["tok_embed.weight"] != before).any(dim=1)
            assert not changed[workspace.padding_idx], name
            assert changed.sum() > 60, name


class TestStopping:
    def test_if_one_rank_asks_for_a_stop_all_ranks_stop_after_the_same_step(
        self, workspace: Workspace, interrupted: dict[str, list[RankResult]]
    ) -> None:
        for name, step in (("tp to pp", 3), ("2 to 4 to 1", 2)):
            reasons = [result.stopped for result in interrupted[name]]
            assert reasons == ["another rank's callback asked for it", "rank 1 asks for it"], name
            for result in interrupted[name]:
                assert result.step == step, name
                assert result.checkpoint == workspace.checkpoint(name, step)
                assert result.events[-2:] == [("checkpoint", step, f"step-{step:08d}"), ("end", step)]
                assert [event[1] for event in result.events if event[0] == "step"] == list(range(1, step + 1))

    def test_a_signal_to_one_rank_saves_and_stops_all(
        self, workspace: Workspace, interrupted: dict[str, list[RankResult]]
    ) -> None:
        for result in interrupted["signal"]:
            assert isinstance(result.error, StoppedBySignal)
            assert "stopped by SIGTERM after step 2" in str(result.error)
            assert result.events[-1] == ("checkpoint", 2, "step-00000002")
        assert len(shard_files(workspace.checkpoint("signal", 2), WEIGHTS)) == 2

    def test_every_rank_refuses_a_tp_that_does_not_divide_the_heads(
        self, interrupted: dict[str, list[RankResult]]
    ) -> None:
        for result in interrupted["three heads"]:
            assert isinstance(result.error, UsageError)
            assert "parallel.tp 2 does not divide the model's 3 attention heads" in str(result.error)
            assert result.error.hint == "use --parallel.tp 1 or 3"


class TestResume:
    def test_in_the_same_layout_it_equals_the_uninterrupted_run_bit_for_bit(
        self, workspace: Workspace, resumed: dict[str, list[RankResult]]
    ) -> None:
        assert [result.step for result in resumed["signal"]] == [STEPS, STEPS]
        for ours, expected in zip(workspace.metrics("signal"), workspace.metrics("double"), strict=True):
            assert {key: ours.get(key) for key in EXACT} == {key: expected.get(key) for key in EXACT}
        for kind, count in ((WEIGHTS, 21), (OPTIMIZER, 63)):
            tensors, expected = (read_tensors(workspace.checkpoint(run, STEPS), kind) for run in ("signal", "double"))
            assert len(expected) == count
            assert tensors.keys() == expected.keys()
            assert [name for name in expected if not torch.equal(tensors[name], expected[name])] == []

    @pytest.mark.parametrize("name", ["2 to 4 to 1", "tp to pp"])
    def test_in_another_layout_it_equals_the_run_of_one_process(
        self, workspace: Workspace, resumed: Any, name: str
    ) -> None:
        lines = workspace.metrics(name)
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        assert workspace.loss_difference(name, "single") <= parity.FREE_LOSS_LIMIT
        for key in VALIDATION_KEYS:
            expected = workspace.metrics("single")[-1][key]
            assert parity.relative(lines[-1][key], expected) <= parity.FREE_LOSS_LIMIT

    def test_every_loaded_value_equals_the_saved_one(
        self, workspace: Workspace, resumed: dict[str, list[RankResult]]
    ) -> None:
        """The callback compared them when the runs resumed; this checks that it compared all."""
        count = sum(tensor.numel() for tensor in load_file(workspace.model / "model.safetensors").values())
        # Replicas, and the step to resume from.
        for name, (replicas, step) in {"on 4": (2, 2), "signal": (1, 2), "tp to pp": (1, 3), "on 1": (1, 4)}.items():
            assert sum(result.values_compared for result in resumed[name]) == 3 * count * replicas, name
            assert [result.events[0][:2] for result in resumed[name]] == [("start", step)] * len(resumed[name]), name


class TestUnevenData:
    """Eleven conversations on three data-parallel ranks."""

    @pytest.mark.parametrize("name", UNEVEN_CASES)
    def test_an_epoch_has_every_sample_once(
        self, workspace: Workspace, uneven: dict[str, list[RankResult]], name: str
    ) -> None:
        samples = UNEVEN_CASES[name][1]
        assert sum(samples) == UNEVEN
        assert [result.step for result in uneven[name]] == [len(samples)] * 3
        lines, expected = workspace.metrics(name), workspace.metrics(f"{name}, single")
        assert [line["samples"] for line in lines] == samples
        assert lines[-1]["epoch"] == 1.0
        assert [line["loss_tokens"] for line in lines] == [line["loss_tokens"] for line in expected]
        assert workspace.loss_difference(name, f"{name}, single") <= parity.FREE_LOSS_LIMIT


class TestCommandLine:
    @the_rest
    def test_nproc_starts_the_ranks_and_has_the_losses_of_one_process(
        self, workspace: Workspace, single: RankResult
    ) -> None:
        config = workspace.folder / "run.json"
        config.write_text(json.dumps(workspace.overrides("command line", {"checkpoint.every_steps": None})))
        command = [sys.executable, "-m", "torchstone", "train", str(config), "--nproc", "2"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert result.returncode == 0, result.stderr
        assert result.stderr.count("done: step 6") == 1, "only one rank prints"
        assert workspace.loss_difference("command line", "single") <= parity.FREE_LOSS_LIMIT
        assert len(shard_files(workspace.checkpoint("command line", STEPS), WEIGHTS)) == 2

    def test_a_layout_that_does_not_fit_is_refused_before_ranks_start(
        self, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        config = workspace.folder / "refused.json"
        config.write_text(json.dumps(workspace.overrides("refused")))
        flags = ["--nproc", "2", "--parallel.pp", "2", "--parallel.tp", "2"]
        monkeypatch.setattr(sys, "argv", ["torchstone", "train", str(config), *flags])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        error = capfd.readouterr().err
        assert "do not fit 2 processes: pp 2 x tp 2 = 4" in error
        assert "use --parallel.tp 1, or start 4 processes" in error
        assert [path.name for path in (workspace.folder / "refused").iterdir()] == [".lock"]

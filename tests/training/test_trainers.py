"""`torchstone.train` on several processes: how far it goes, what it leaves, what it changes, and how it goes on.

Runs are launched together, many to a launch, and looked at by the tests below; the workers of pytest-xdist share them.
The model is a tiny Llama one of whose
tokens is its padding and occurs in the text as well. Steps use an eps that keeps Adam from making steps of full size of
rounding noise, as in parity.py: what is compared here is layouts, over several steps.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

import parity
import torchstone
from tiny import make_llama, write_rows
from torchstone import cli
from torchstone.data.tokenize import Tokenizer
from torchstone.demo.corpus import chat_rows, corpus_rows
from torchstone.errors import StoppedBySignal, UsageError
from torchstone.models.sliced_files import SlicedFiles
from torchstone.models.slices import OPTIMIZER, WEIGHTS, slice_files
from torchstone.observe.metrics import read_metrics
from torchstone.testing import launch_procs
from torchstone.training.loop import Callback, Run

STEPS, SAMPLES = 6, 5
# Fields of a metrics line that are the run's and not the clock's.
EXACT = ("step", "loss", "lr", "grad_norm", "tokens", "loss_tokens", "samples", "epoch", "total_tokens", "val_loss")
VALIDATION_LIMIT = 1e-6
EMBEDDING = "tok_embed.weight"
# What ranks import before they train: half a second each that is not there when the forkserver has it.
PRELOADED = ("transformers.models.auto.tokenization_auto", "transformers.tokenization_utils_tokenizers")
DP2, TP2, PP2 = {"parallel.dp_shard": 2}, {"parallel.tp": 2}, {"parallel.pp": 2}
COPIES = {"parallel.dp_replicate": 2, "parallel.dp_shard": 2}
# A new model: three heads, and MLP features that three ranks could share.
THREE_HEADS = {
    "model.path": None,
    "model.depth": 1,
    "model.width": 48,
    "model.heads": 3,
    "model.mlp_width": 96,
    "model.tokenizer": "demo:tokenizer",
}
# Rows of the uneven data: divides by nothing that is asked of it.
UNEVEN = 11
# Settings, and the samples of each step of an epoch.
UNEVEN_CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "packed": ({"data.packing": True}, [4, 4, 3]),
    "padded": ({"data.packing": False, "training.batch_size": 1}, [4, 4, 3]),
    "fewer than ranks": ({"data.packing": True, "training.global_batch_size": 2}, [2, 2, 2, 2, 2, 1]),
    "fewer than ranks, padded": ({"data.packing": False, "training.global_batch_size": 1}, [1] * UNEVEN),
}

Overrides = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A run, or a part of one: until `stop_at` or `signal_at`, which rank 1 alone calls for, or not at all."""

    overrides: Overrides
    refused: bool = False
    stop_at: int | None = None
    signal_at: int | None = None


@dataclass
class Done:
    """What one rank saw of a job."""

    step: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    checkpoint: Path | None = None
    stopped: str | None = None
    error: Exception | None = None
    # Numbers that were compared with those of the checkpoint when the run went on from it.
    compared: int = 0
    events: list[tuple[Any, ...]] = field(default_factory=list)


class Watch(Callback):
    """Notes what it is called for, compares what was loaded with what was saved, and ends the run where asked to."""

    def __init__(self, job: Job, done: Done) -> None:
        self.job, self.done = job, done

    def on_start(self, run: Run) -> None:
        self.done.events.append(("start", run.progress.step, run.place.rank))
        if run.checkpoint is not None and slice_files(run.checkpoint, WEIGHTS):
            self.done.compared = compare_loaded(run)

    def on_step(self, run: Run, values: dict[str, Any]) -> None:
        self.done.events.append(("step", values["step"], values["loss"]))
        if run.place.rank == 1 and values["step"] == self.job.stop_at:
            run.stop("rank 1 has seen enough")
        if run.place.rank == 1 and values["step"] == self.job.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_validation(self, run: Run, loss: float) -> None:
        self.done.events.append(("validation", run.progress.step, loss))

    def on_checkpoint(self, run: Run, folder: Path) -> None:
        self.done.events.append(("checkpoint", run.progress.step, folder.name))

    def on_end(self, run: Run) -> None:
        self.done.events.append(("end", run.progress.step))


def compare_loaded(run: Run) -> int:
    """Every box of weights and moments that this rank holds, against the files it was loaded from; how many numbers."""
    assert run.checkpoint is not None
    weights = SlicedFiles(slice_files(run.checkpoint, WEIGHTS))
    moments = SlicedFiles(slice_files(run.checkpoint, OPTIMIZER))
    count = 0
    for name, parameter in run.model.named_parameters():
        held = [("", weights, parameter.detach())]
        held += [(f"/{kind}", moments, run.optimizer.state[parameter][kind]) for kind in ("exp_avg", "exp_avg_sq")]
        for kind, files, tensor in held:
            for box in run.model.slices_of(name, tensor):
                saved = torch.full_like(box.tensor, float("nan"))
                files.read_into(box.name + kind, saved, box.offset)
                assert torch.equal(box.tensor, saved), f"{box.name}{kind} from {box.offset} on"
                count += saved.numel()
    return count


def train_jobs(jobs: Sequence[Job]) -> list[Done]:
    return [train_job(job) for job in jobs]


def train_job(job: Job) -> Done:
    done = Done()
    try:
        outcome = torchstone.train(overrides=job.overrides, callbacks=[Watch(job, done)])
    except (StoppedBySignal, UsageError) as error:
        if job.signal_at is None and not job.refused:
            raise
        done.error = error
        return done
    done.step, done.loss, done.val_loss = outcome.step, outcome.loss, outcome.val_loss
    done.checkpoint, done.stopped = outcome.checkpoint, outcome.stopped
    return done


def train_with_own_group(job: Job) -> tuple[bool, Done, bool]:
    """Whether there was a process group before and after."""
    return dist.is_initialized(), train_job(job), dist.is_initialized()


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    """What `make` returns, made by the first worker of pytest-xdist that asks for it, while the others wait."""
    root = factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    kept = root / f"trainers {name}.pickle"
    with (root / f"trainers {name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            # Under its name only when it is whole: a launch that fails leaves nothing, and fails again elsewhere.
            kept.with_suffix(".part").write_bytes(pickle.dumps(make()))
            kept.with_suffix(".part").rename(kept)
    return pickle.loads(kept.read_bytes())


def launch(jobs: dict[str, Job], world_size: int) -> dict[str, list[Done]]:
    """What every rank saw of each job."""
    found = launch_procs(train_jobs, world_size, list(jobs.values()), preload=PRELOADED)
    return {name: [rank[number] for rank in found] for number, name in enumerate(jobs)}


@dataclass
class Setting:
    """Data, a model, and the runs' folders."""

    folder: Path
    model: Path
    frozen: int
    base: Overrides

    def overrides(self, name: str, *changes: Overrides) -> Overrides:
        merged = self.base | {"output_dir": str(self.folder / name)}
        for change in changes:
            merged |= change
        return merged

    def lines(self, name: str) -> list[dict[str, Any]]:
        return read_metrics(self.folder / name / "metrics.jsonl")

    def exact(self, name: str) -> list[dict[str, Any]]:
        return [{key: line.get(key) for key in EXACT} for line in self.lines(name)]

    def checkpoint(self, name: str, step: int) -> Path:
        return self.folder / name / f"checkpoints/step-{step:08d}"


Factory = pytest.TempPathFactory


@pytest.fixture(scope="module")
def setting(tmp_path_factory: Factory, tokenizer: Tokenizer) -> Setting:
    return once(tmp_path_factory, "setting", lambda: make_setting(tmp_path_factory.mktemp("trainers"), tokenizer))


def make_setting(folder: Path, tokenizer: Tokenizer) -> Setting:
    texts = list(corpus_rows(40))
    data = write_rows(folder / "text.jsonl", texts)
    held_out = write_rows(folder / "held out.jsonl", corpus_rows(7, seed=5))
    (frozen, _), *_ = Counter(i for row in texts for i in tokenizer.encode(row["text"])).most_common(1)
    model = make_llama(folder / "llama", tokenizer, pad_token_id=frozen)
    base = {
        "model.path": str(model), "data.path": str(data), "data.validation_path": str(held_out),
        "data.context_length": 32, "data.cache_dir": str(folder / "datasets"), "training.max_steps": STEPS,
        "training.global_batch_size": SAMPLES, "training.batch_size": 2, "training.validate_every_steps": 3,
        "checkpoint.every_steps": 3, "optim.learning_rate": 3e-3, "optim.eps": parity.FREE_RUNNING["eps"],
        "observe.console": "quiet", "system.device": "cpu", "system.threads": 1,
    }  # fmt: skip
    return Setting(folder, model, frozen, base)


@pytest.fixture(scope="module")
def alone(setting: Setting, tmp_path_factory: Factory) -> Done:
    return once(tmp_path_factory, "alone", lambda: train_job(Job(setting.overrides("alone"))))


@pytest.fixture(scope="module")
def whole(setting: Setting, alone: Done, tmp_path_factory: Factory) -> list[tuple[bool, Done, bool]]:
    """Two ranks without interruption, by a train() that begins and ends the process group itself."""
    job = Job(setting.overrides("whole", DP2))
    return once(
        tmp_path_factory,
        "whole",
        lambda: launch_procs(train_with_own_group, 2, job, backend=None, preload=PRELOADED),
    )


@pytest.fixture(scope="module")
def begun(setting: Setting, whole: Any, tmp_path_factory: Factory) -> dict[str, list[Done]]:
    """What two ranks begin and do not finish."""
    jobs = {
        "parts": Job(setting.overrides("parts", DP2), stop_at=3),
        "signal": Job(setting.overrides("signal", DP2), signal_at=2),
        "tp to pp": Job(setting.overrides("tp to pp", TP2), stop_at=3),
        "chain": Job(setting.overrides("chain", DP2), stop_at=2),
        "does not divide": Job(setting.overrides("does not divide", TP2, THREE_HEADS), refused=True),
    }
    return once(tmp_path_factory, "begun", lambda: launch(jobs, 2))


@pytest.fixture(scope="module")
def gone_on(setting: Setting, begun: Any, tmp_path_factory: Factory) -> dict[str, list[Done]]:
    """The same runs, in other processes."""

    def go_on() -> dict[str, list[Done]]:
        found = launch({"chain of 4": Job(setting.overrides("chain", COPIES), stop_at=4)}, 4)
        layouts = {"parts": DP2, "signal": DP2, "tp to pp": PP2}
        found |= launch({name: Job(setting.overrides(name, layout)) for name, layout in layouts.items()}, 2)
        return found | {"chain of 1": [train_job(Job(setting.overrides("chain")))]}

    return once(tmp_path_factory, "gone on", go_on)


@pytest.fixture(scope="module")
def uneven(setting: Setting, tmp_path_factory: Factory) -> dict[str, list[Done]]:
    return once(tmp_path_factory, "uneven", lambda: train_uneven(setting))


def train_uneven(setting: Setting) -> dict[str, list[Done]]:
    """One epoch on three data ranks, and in one process beside it."""
    data = write_rows(setting.folder / "uneven.jsonl", chat_rows(UNEVEN))
    common = {
        "data.path": str(data), "data.validation_path": None, "data.context_length": 64, "training.max_steps": None,
        "training.max_epochs": 1, "training.batch_size": None, "training.validate_every_steps": None,
        "training.global_batch_size": 4, "checkpoint.every_steps": None, "checkpoint.at_end": False,
    }  # fmt: skip
    jobs = {
        name: Job(setting.overrides(f"uneven {name}", common, changes)) for name, (changes, _) in UNEVEN_CASES.items()
    }
    for name, job in jobs.items():
        train_job(Job(job.overrides | {"output_dir": str(setting.folder / f"uneven {name}, alone")}))
    return launch(jobs, 3)


class TestTrain:
    def test_all_ranks_make_all_steps_and_give_the_same_outcome(
        self, setting: Setting, alone: Done, whole: list[tuple[bool, Done, bool]]
    ) -> None:
        # The group is made by the first run, and stays for others of the same processes.
        assert [(before, after) for before, _, after in whole] == [(False, True)] * 2
        for _, done, _ in whole:
            assert (done.step, done.stopped, done.error) == (STEPS, None, None)
            assert done.checkpoint == setting.checkpoint("whole", STEPS)
            assert (done.loss, done.val_loss) == (whole[0][1].loss, whole[0][1].val_loss)
        lines = setting.lines("whole")
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        assert [line["samples"] for line in lines] == [SAMPLES] * STEPS
        assert lines[-1]["loss"] == whole[0][1].loss
        # Five rows, two a micro-batch: three on one rank, two on each of two.
        assert [name["micro_batches"] for name in (setting.lines("alone")[0], lines[0])] == [3, 2]

    def test_losses_and_validation_are_those_of_one_process(
        self, setting: Setting, alone: Done, whole: list[tuple[bool, Done, bool]]
    ) -> None:
        for one, two in zip(setting.lines("alone"), setting.lines("whole"), strict=True):
            assert parity.relative(two["loss"], one["loss"]) <= parity.FREE_LOSS_LIMIT
            assert [two[key] for key in ("lr", "tokens", "loss_tokens")] == [
                one[key] for key in ("lr", "tokens", "loss_tokens")
            ]
            assert ("val_loss" in two) == ("val_loss" in one) == (one["step"] % 3 == 0)
            if "val_loss" in one:
                assert parity.relative(two["val_loss"], one["val_loss"]) <= VALIDATION_LIMIT
        assert alone.val_loss == setting.lines("alone")[-1]["val_loss"]

    def test_callbacks_run_on_every_rank(self, setting: Setting, whole: list[tuple[bool, Done, bool]]) -> None:
        lines = setting.lines("whole")
        after_third = [("validation", 3, lines[2]["val_loss"]), ("checkpoint", 3, "step-00000003")]
        after_sixth = [("validation", 6, lines[5]["val_loss"]), ("checkpoint", 6, "step-00000006")]
        steps = [("step", line["step"], line["loss"]) for line in lines]
        for rank, (_, done, _) in enumerate(whole):
            wanted = [("start", 0, rank), *steps[:3], *after_third, *steps[3:], *after_sixth, ("end", 6)]
            assert done.events == wanted

    def test_each_rank_leaves_its_own_files(self, setting: Setting, alone: Done, whole: Any) -> None:
        kinds = ("weights", "optimizer", "random")
        of_ranks = {f"{kind}-{rank:05d}.safetensors" for kind in kinds for rank in range(2)}
        of_one = {"model.safetensors", "optimizer.safetensors", "random.safetensors"}
        for name in ("alone", "whole"):
            run = setting.folder / name
            assert {path.name for path in run.iterdir()} == {
                ".lock",
                "config.json",
                "metrics.jsonl",
                "checkpoints",
                "logs",
            }
            assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-00000003", "step-00000006"}
        for step in (3, 6):
            one, two = ({p.name for p in setting.checkpoint(name, step).iterdir()} for name in ("alone", "whole"))
            assert two - one == of_ranks
            assert one - two == of_one
            assert {"config.json", "manifest.json", "state.json", "tokenizer.json"} <= two & one
            listed = json.loads((setting.checkpoint("whole", step) / "manifest.json").read_text())["files"]
            assert set(listed) == two - {"manifest.json"}
        assert json.loads((setting.checkpoint("whole", 6) / "state.json").read_text())["layout"] == "dp_shard 2"

    def test_every_weight_changed_but_the_row_of_padding(self, setting: Setting, whole: Any, tmp_path: Path) -> None:
        torchstone.export(str(setting.folder / "whole"), tmp_path / "after", verify=False)
        before = load_file(setting.model / "model.safetensors")
        after = load_file(tmp_path / "after/model.safetensors")
        assert before.keys() == after.keys()
        assert [name for name in before if torch.equal(before[name], after[name])] == []
        changed = (before["model.embed_tokens.weight"] != after["model.embed_tokens.weight"]).any(dim=1)
        assert not changed[setting.frozen]
        # Most tokens occur in the text, and what occurs is trained.
        assert changed.sum() > 60
        # The head has no such row.
        assert not torch.equal(before["lm_head.weight"][setting.frozen], after["lm_head.weight"][setting.frozen])

    def test_the_row_of_padding_stays_in_every_layout_and_after_going_on(self, setting: Setting, gone_on: Any) -> None:
        """config.json has the tokenizer's padding by then; the run keeps the one it began with."""
        began_as = load_file(setting.model / "model.safetensors")["model.embed_tokens.weight"]
        for name, step in (("tp to pp", 3), ("tp to pp", 6), ("parts", 6), ("chain", 4)):
            now = tensors(setting.checkpoint(name, step), WEIGHTS)[EMBEDDING]
            assert torch.equal(now[setting.frozen], began_as[setting.frozen]), name
            assert (now != began_as).any(dim=1).sum() > 60, name


class TestStopping:
    def test_a_stop_that_one_rank_asks_for_ends_all_after_the_same_step(
        self, setting: Setting, begun: dict[str, list[Done]]
    ) -> None:
        for name, step in (("parts", 3), ("tp to pp", 3), ("chain", 2)):
            assert [done.step for done in begun[name]] == [step, step], name
            first, second = (done.stopped for done in begun[name])
            assert second == "rank 1 has seen enough", name
            assert first == "another rank's callback asked for it", name
            for done in begun[name]:
                assert done.checkpoint == setting.checkpoint(name, step)
                assert done.events[-2:] == [("checkpoint", step, f"step-{step:08d}"), ("end", step)]
                assert [event[1] for event in done.events if event[0] == "step"] == list(range(1, step + 1))

    def test_a_signal_to_one_rank_saves_and_stops_all(self, setting: Setting, begun: dict[str, list[Done]]) -> None:
        for done in begun["signal"]:
            assert isinstance(done.error, StoppedBySignal)
            assert "stopped by SIGTERM after step 2" in str(done.error)
            assert done.events[-1] == ("checkpoint", 2, "step-00000002")
        assert len(slice_files(setting.checkpoint("signal", 2), WEIGHTS)) == 2

    def test_a_layout_that_the_model_does_not_fit_is_refused_with_those_that_it_does(
        self, begun: dict[str, list[Done]]
    ) -> None:
        for done in begun["does not divide"]:
            assert isinstance(done.error, UsageError)
            assert "parallel.tp 2 does not divide the model's 3 attention heads" in str(done.error)
            assert "parallel.tp could be 1, 3" in done.error.hint


class TestResume:
    @pytest.mark.parametrize("name", ["parts", "signal"])
    def test_in_the_same_layout_it_is_the_uninterrupted_run_bit_for_bit(
        self, setting: Setting, gone_on: dict[str, list[Done]], name: str
    ) -> None:
        assert [done.step for done in gone_on[name]] == [STEPS, STEPS]
        assert setting.exact(name) == setting.exact("whole")
        for kind in (WEIGHTS, OPTIMIZER):
            wanted = tensors(setting.checkpoint("whole", STEPS), kind)
            found = tensors(setting.checkpoint(name, STEPS), kind)
            assert len(wanted) == {WEIGHTS: 21, OPTIMIZER: 63}[kind]
            assert found.keys() == wanted.keys()
            assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []

    @pytest.mark.parametrize("name", ["chain", "tp to pp"])
    def test_in_another_layout_it_is_the_run_of_one_process(
        self, setting: Setting, alone: Done, gone_on: dict[str, list[Done]], name: str
    ) -> None:
        """2 processes, then 4, then 1; shares of matrices, then stages of layers."""
        found = setting.lines(name)
        assert [line["step"] for line in found] == list(range(1, STEPS + 1))
        off = [
            parity.relative(line["loss"], wanted["loss"])
            for line, wanted in zip(found, setting.lines("alone"), strict=True)
        ]
        print(f"{name}: {max(off):.1e}")
        assert max(off) <= parity.FREE_LOSS_LIMIT
        assert parity.relative(found[-1]["val_loss"], setting.lines("alone")[-1]["val_loss"]) <= parity.FREE_LOSS_LIMIT

    def test_what_was_loaded_is_what_was_saved_bit_for_bit(
        self, setting: Setting, gone_on: dict[str, list[Done]]
    ) -> None:
        """The comparison is the callback's, as a run begins; here, that it was of every number on some rank."""
        numbers = sum(tensor.numel() for tensor in load_file(setting.model / "model.safetensors").values())
        copies = {"chain of 4": 2, "parts": 1, "signal": 1, "tp to pp": 1, "chain of 1": 1}
        for name, times in copies.items():
            assert sum(done.compared for done in gone_on[name]) == 3 * numbers * times, name
            starts = [done.events[0][:2] for done in gone_on[name]]
            begins = {"chain of 4": 2, "signal": 2, "chain of 1": 4}.get(name, 3)
            assert starts == [("start", begins)] * len(starts), name


def tensors(folder: Path, kind: str) -> dict[str, Tensor]:
    """Everything that the ranks' files of a checkpoint hold together."""
    files = SlicedFiles(slice_files(folder, kind))
    found = {}
    for name in files.names:
        found[name] = torch.full(files.shape(name), float("nan"), dtype=files.dtype(name))
        files.read_into(name, found[name], (0,) * len(files.shape(name)))
    return found


class TestUnevenData:
    """Eleven conversations on three data ranks: no size divides by another."""

    @pytest.mark.parametrize("name", UNEVEN_CASES)
    def test_an_epoch_is_every_sample_once_on_every_rank_alike(
        self, setting: Setting, uneven: dict[str, list[Done]], name: str
    ) -> None:
        samples = UNEVEN_CASES[name][1]
        assert sum(samples) == UNEVEN
        assert [done.step for done in uneven[name]] == [len(samples)] * 3
        found, wanted = setting.lines(f"uneven {name}"), setting.lines(f"uneven {name}, alone")
        assert [line["samples"] for line in found] == samples
        assert found[-1]["epoch"] == 1.0
        for line, one in zip(found, wanted, strict=True):
            assert line["loss_tokens"] == one["loss_tokens"]
            assert parity.relative(line["loss"], one["loss"]) <= parity.FREE_LOSS_LIMIT


class TestCommandLine:
    def test_nproc_starts_the_ranks_and_gives_the_losses_of_one_process(self, setting: Setting, alone: Done) -> None:
        given = setting.overrides("command line", {"checkpoint.every_steps": None})
        config = setting.folder / "run.json"
        config.write_text(json.dumps(given))
        command = [sys.executable, "-m", "torchstone.cli", "train", str(config), "--nproc", "2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        # Every rank's words would be there twice.
        assert done.stderr.count("done: step 6") == 1
        off = [
            parity.relative(line["loss"], wanted["loss"])
            for line, wanted in zip(setting.lines("command line"), setting.lines("alone"), strict=True)
        ]
        assert max(off) <= parity.FREE_LOSS_LIMIT
        assert len(slice_files(setting.checkpoint("command line", STEPS), WEIGHTS)) == 2

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--parallel.tp", "3"], ["do not fit 2 processes: tp 3 = 3", "parallel.tp could be 1, 2"]),
            (["--parallel.dp_shard", "4"], ["dp_shard 4 = 4", "leave out parallel.dp_shard", "start 4 processes"]),
            (["--parallel.pp", "2", "--parallel.tp", "2"], ["pp 2 x tp 2 = 4", "parallel.tp could be 1"]),
        ],
    )
    def test_a_layout_that_does_not_fit_is_refused_with_sizes_that_do(
        self, setting: Setting, flags: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        """By what prepares the data: no worker is started."""
        config = setting.folder / "refused.json"
        config.write_text(json.dumps(setting.overrides("refused")))
        monkeypatch.setattr(sys, "argv", ["torchstone", "train", str(config), "--nproc", "2", *flags])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        said = capfd.readouterr().err
        assert [word for word in words if word not in said] == [], said
        assert not (setting.folder / "refused").exists()

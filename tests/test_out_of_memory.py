"""A step that runs out of memory: it is computed again in smaller micro-batches, or it says what would help."""

from __future__ import annotations

import json
import re
import resource
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import processes
from exact_runs import StopAt, assert_same_run
from tiny import write_rows
from torchstone import api
from torchstone.data.collate import BatchShapes, MicroBatch, collate
from torchstone.data.encode import TokenSequence
from torchstone.data.split import num_documents, split_micro_batch, split_to_limit
from torchstone.data.tokenize import Tokenizer
from torchstone.errors import OutOfMemoryError
from torchstone.launch.memory_limit import MemoryLimit, read_limit, write_limit
from torchstone.models.decoder import Block
from torchstone.observe.console import Console
from torchstone.observe.metrics import read_metrics
from torchstone.optim.adamw import AdamW
from torchstone.parallel.mesh import SINGLE_PROCESS
from torchstone.testing import launch_procs
from torchstone.training.out_of_memory import restore_limit
from torchstone.training.run import Callback, Run
from torchstone.training.state import Progress

Settings = Callable[..., dict[str, Any]]
# As torch says it on a CPU.
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 67108864 bytes. Error code 12"


class Memory(Callback):
    """A device with room for micro-batches of `tokens` tokens. From step `first` on, larger ones fail in the second
    layer, in the forward or the backward pass, or only in a validation."""

    def __init__(
        self, tokens: int, first: int = 1, where: str = "forward", error: Callable[[], Exception] | None = None
    ) -> None:
        self.tokens, self.first, self.where, self.error = (
            tokens,
            first,
            where,
            error or (lambda: RuntimeError(NO_MEMORY)),
        )
        # The steps that failed, the sizes of their micro-batches and of all others, and what a failed attempt held.
        self.failures: list[int] = []
        self.sizes: dict[int, list[int]] = {}
        self.left: list[weakref.ref[Tensor]] = []
        self.errors: list[Exception] = []
        self.step = 0

    def on_start(self, run: Run) -> None:
        last = [module for module in run.model.module.modules() if isinstance(module, Block)][-1]
        last.register_forward_hook(self._check)

    def on_step_begin(self, run: Run, step: int) -> None:
        self.step = step

    def _check(self, module: Any, args: Any, output: Tensor) -> None:
        assert [reference() for reference in self.left] == [None] * len(self.left), "a failed attempt is still there"
        size = output.shape[0] * output.shape[1]
        self.sizes.setdefault(self.step, []).append(size)
        if self.step < self.first or size <= self.tokens or module.training == (self.where == "validation"):
            return
        self.left.append(weakref.ref(output))
        # Only the garbage collector frees it.
        cycle: list[Any] = [output]
        cycle.append(cycle)
        if self.where == "backward":
            output.register_hook(self._fail)
        else:
            self._fail()

    def _fail(self, gradient: Tensor | None = None) -> None:
        self.failures.append(self.step)
        # Whoever keeps the error must not keep the tensors of the calls that it ended.
        self.errors.append(self.error())
        raise self.errors[-1]


def train(values: dict[str, Any], *callbacks: Callback) -> tuple[dict[str, Tensor], list[dict[str, Any]], str]:
    """The weights at the end, the metrics and the log."""
    result = api.train(overrides=values, callbacks=callbacks)
    assert result.checkpoint is not None
    folder = Path(values["output_dir"])
    (file,) = result.checkpoint.glob("*model.safetensors")
    return load_file(file), read_metrics(folder / "metrics.jsonl"), (folder / "logs/rank-0.log").read_text()


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


ROWS = {"training.global_batch_size": 8, "training.batch_size": 4}
PACKED_TEXT = {"data.context_length": 128, "training.batch_size": 1, "data.text_packing": "best-fit"}
CHAT = {"data.context_length": 64, "training.global_batch_size": 12, "training.max_tokens_per_gpu": 192}
LORA = {"tuning.method": "lora", "tuning.lora_rank": 4, "optim.weight_decay": 0.0}


@pytest.fixture
def values_of(
    settings: Settings, tmp_path: Path, chat_file: Path, base_run: Path
) -> Callable[[dict[str, Any], str], dict[str, Any]]:
    """The overrides of a run, in a folder of this name. With max_tokens_per_gpu it trains on conversations."""

    def make(changes: dict[str, Any], name: str) -> dict[str, Any]:
        values = settings() | changes | {"output_dir": str(tmp_path / name)}
        if "training.max_tokens_per_gpu" in changes:
            values["data.path"] = str(chat_file)
        if "tuning.method" in changes:
            values = {key: value for key, value in values.items() if not key.startswith("model.")}
            values["model.path"] = str(base_run)
        return values

    return make


class TestRepeatedStep:
    @pytest.mark.parametrize(
        ("changes", "tokens", "where", "failures"),
        [
            (ROWS, 64, "forward", [3]),
            (ROWS | {"data.packing": False}, 32, "backward", [3, 3]),
            (PACKED_TEXT, 112, "backward", [3]),
            (CHAT, 104, "forward", [3]),
            (ROWS | LORA, 64, "backward", [3]),
        ],
        ids=["rows", "unpacked rows", "packed text", "packed conversations", "lora"],
    )
    def test_it_has_the_same_result(
        self, changes: dict[str, Any], tokens: int, where: str, failures: list[int], values_of: Any
    ) -> None:
        expected, expected_lines, _ = train(values_of(changes, "expected"))
        memory = Memory(tokens, 3, where)
        weights, lines, log = train(values_of(changes, "run"), memory)
        assert largest_difference(weights, expected) <= 1e-6
        for line, other in zip(lines, expected_lines, strict=True):
            for key in ("loss", "grad_norm"):
                assert line[key] == pytest.approx(other[key], abs=1e-5)
            assert [line[key] for key in ("tokens", "loss_tokens", "samples")] == [
                other[key] for key in ("tokens", "loss_tokens", "samples")
            ]
            assert line["oom_splits"] == (len(failures) if line["step"] >= 3 else 0)
            # What is computed is counted.
            sizes = memory.sizes[line["step"]]
            if line["step"] != 3:
                assert (line["micro_batches"], line["tokens"] + line["padding"]) == (len(sizes), sum(sizes))
        assert memory.failures == failures
        assert all(max(memory.sizes[step]) <= tokens < max(memory.sizes[2]) for step in (4, 5, 6))
        assert len(re.findall(r"WARNING \| out of memory while computing step 3 \(64 MiB more", log)) == len(failures)

    @pytest.mark.parametrize(
        "changes",
        [{"training.precision": "bf16"}, LORA | {"tuning.lora_dropout": 0.5}, {"optim.name": "muon"}],
        ids=["bf16", "dropout", "muon"],
    )
    def test_it_equals_a_run_with_such_micro_batches_bit_for_bit(self, changes: dict[str, Any], values_of: Any) -> None:
        """Also the random numbers: the failed attempt has drawn some."""
        train(values_of(ROWS | changes, "split"), Memory(64, 1, "backward"))
        train(values_of(ROWS | changes | {"training.batch_size": 2}, "small"))
        root = Path(values_of({}, "")["output_dir"])
        assert_same_run(root / "split", root / "small", 6)

    def test_a_resumed_run_remembers_the_limit_bit_for_bit(self, values_of: Any, tmp_path: Path) -> None:
        values = values_of(CHAT, "whole")
        train(values, Memory(104, 3))
        stopped = values | {"output_dir": str(tmp_path / "resumed")}
        train(stopped, Memory(104, 3), StopAt(5))
        memory = Memory(104)
        _, lines, log = train(stopped, memory)
        assert memory.failures == []
        assert [line["oom_splits"] for line in lines] == [0, 0, 1, 1, 1, 1]
        assert re.search(r"at most (96|104) tokens: with more, this run was out of memory \(oom_splits 1\)", log)
        assert_same_run(tmp_path / "whole", tmp_path / "resumed", 6)

    def test_with_other_settings_the_limit_is_forgotten(self, values_of: Any) -> None:
        values = values_of(ROWS, "run")
        train(values | {"training.max_steps": 2}, Memory(64))
        memory = Memory(128)
        _, lines, log = train(values | {"model.recompute": "full"}, memory)
        assert "micro-batches are not limited to 64 tokens any more" in log
        assert memory.sizes[3] == [128, 128]
        assert [line["oom_splits"] for line in lines] == [1] * 6

    def test_a_validation_is_repeated_too(self, values_of: Any) -> None:
        changes = ROWS | {"data.validation_split": 0.2, "training.validate_every_steps": 3}
        expected, expected_lines, _ = train(values_of(changes, "expected"))
        memory = Memory(64, where="validation")
        weights, lines, log = train(values_of(changes, "run"), memory)
        assert memory.failures == [3]
        assert "out of memory while validating after step 3" in log
        assert [line["oom_splits"] for line in lines] == [0, 0, 0, 1, 1, 1]
        assert [line.get("val_loss") for line in lines] == pytest.approx(
            [line.get("val_loss") for line in expected_lines], abs=1e-5
        )
        assert largest_difference(weights, expected) <= 1e-6


class LimitMemory(Callback):
    """The system refuses more than this many bytes from the first step on."""

    def __init__(self, size: int) -> None:
        self.size = size

    def on_step_begin(self, run: Run, step: int) -> None:
        if step == 1:
            # It starts autograd's threads, whose stacks would count.
            torch.ones(1, requires_grad=True).sum().backward()
            limit = psutil.Process().memory_info().vms + self.size
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def test_memory_that_the_system_refuses(values_of: Any) -> None:
    """A real error. The logits of 64 rows alone are 29 MB."""
    changes = {"data.context_length": 256, "training.global_batch_size": 64, "training.batch_size": 64}
    changes |= {"training.max_steps": 2, "data.text_packing": "best-fit"}
    values, small = values_of(changes, "run"), values_of(changes | {"training.batch_size": 1}, "small")
    assert processes.run(processes.train, values, (LimitMemory(96 * 2**20),)) == 0
    assert processes.run(processes.train, small) == 0
    lines = read_metrics(Path(values["output_dir"]) / "metrics.jsonl")
    assert [line["oom_splits"] > 0 for line in lines] == [True, True]
    assert lines[1]["micro_batches"] >= 2
    files = [Path(each["output_dir"]) / "checkpoints/step-00000002/model.safetensors" for each in (values, small)]
    assert largest_difference(load_file(files[0]), load_file(files[1])) <= 1e-6


def test_ranks_with_different_numbers_of_parts_take_part_in_all_of_them(values_of: Any, tmp_path: Path) -> None:
    """Each step has one long conversation, which stays whole, and many short ones, which the other rank splits."""
    answers = ["a b c d e f g h i j k l m n o p q r s t u v w x y z" if n == 0 else "a b" for n in range(12)]
    rows = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}] for answer in answers]
    chats = write_rows(tmp_path / "chats.jsonl", [{"messages": messages} for messages in rows])
    values = values_of(CHAT | {"training.max_steps": 3, "training.max_epochs": 3}, "expected")
    values |= {"data.path": str(chats)}
    _, expected, _ = train(values)
    folder = tmp_path / "run"
    folder.mkdir()
    settings = {"device": "cpu", "layout": "dp_shard 2", "training.precision": "fp32", "model.attention": "sdpa"}
    settings |= {"model.loss": "full"} | dict.fromkeys(("model.recompute", "model.compile", "model.fused"), "none")
    write_limit(folder, MemoryLimit(24, 1, 2, settings))
    launch_procs(processes.train, 2, values | {"output_dir": str(folder)})
    lines = read_metrics(folder / "metrics.jsonl")
    # The other rank has two parts, and two rows of padding, 8 tokens each.
    assert [(line["micro_batches"], line["padding"], line["oom_splits"]) for line in lines] == [(4, 19, 2)] * 3
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in lines] == pytest.approx([line[key] for line in expected], abs=1e-5)
    # The checkpoint has it.
    assert read_limit(folder) is None


def test_the_smallest_limit_counts(tmp_path: Path) -> None:
    """Of several ranks that failed, and of the checkpoint."""
    settings = {"device": "cpu", "layout": "one process"}
    for tokens in (32, 24, 48):
        write_limit(tmp_path, MemoryLimit(tokens, 7, 1, settings))
    assert read_limit(tmp_path) == MemoryLimit(24, 7, 1, settings)
    for saved, expected in ((16, 16), (40, 24), (None, 24)):
        run: Any = SimpleNamespace(
            progress=Progress(micro_batch_limit=saved), checkpoint_info={"limit_settings": settings},
            ctx=SINGLE_PROCESS, output_dir=tmp_path, console=Console("none"),
        )  # fmt: skip
        restore_limit(run, settings)
        assert run.progress.micro_batch_limit == expected


class TestErrors:
    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            (ValueError("a bug"), ValueError),
            (RuntimeError("a bug"), RuntimeError),
            # The device may have been left in any state.
            (RuntimeError("CUDA error: out of memory\nmore"), OutOfMemoryError),
        ],
    )
    def test_what_is_not_repaired_is_raised_at_once(self, error: Exception, kind: type, values_of: Any) -> None:
        memory = Memory(64, 3, error=lambda: error)
        with pytest.raises(kind, match="a bug|CUDA error: out of memory") as caught:
            train(values_of(ROWS, "run"), memory)
        assert type(caught.value) is kind
        assert memory.failures == [3]

    def test_an_update_that_does_not_fit_is_named_with_what_makes_the_state_smaller(
        self, values_of: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Micro-batches have nothing to do with it."""

        def fail(*args: object) -> None:
            raise RuntimeError(NO_MEMORY)

        monkeypatch.setattr(AdamW, "clip_and_step", fail)
        with pytest.raises(OutOfMemoryError) as caught:
            train(values_of(ROWS, "run"))
        assert caught.value.message.startswith("out of memory on cpu while updating the weights in step 1: ")
        assert re.fullmatch(
            r"a step needs about \d\.\d\d MiB; these changes save most: 1\. --training\.precision bf16-pure in a new "
            r"run \(\d\.\d\d MiB less\)",
            caught.value.hint or "",
        ), caught.value.hint

    def test_a_row_that_does_not_fit_is_named_with_what_would_help(
        self, values_of: Any, chat_file: Path, tokenizer: Tokenizer
    ) -> None:
        failed: list[MicroBatch] = []

        class KeepFailed(Memory):
            def on_start(self, run: Run) -> None:
                super().on_start(run)
                self.run = run

            def _fail(self, gradient: Tensor | None = None) -> None:
                assert self.run.runner.running is not None
                failed.append(self.run.runner.running)
                super()._fail(gradient)

        unpacked = {"data.path": str(chat_file), "data.packing": False, "data.context_length": 256}
        values = values_of(ROWS | unpacked, "run")
        with pytest.raises(OutOfMemoryError) as caught:
            train(values, KeepFailed(16, 3, "backward"))
        shapes = [tuple(batch.ids.shape) for batch in failed]
        assert [rows for rows, _ in shapes] == [4, 2, 1]
        match = re.fullmatch(
            rf"out of memory on cpu while computing step 3, in a micro-batch of 1 x {shapes[-1][1]} tokens: "
            rf"64 MiB more cannot be allocated\n  its rows: {re.escape(str(chat_file))}:(\d+) \((\d+) tokens\)",
            caught.value.message,
        )
        assert match is not None, caught.value.message
        line, length = int(match[1]), int(match[2])
        assert length == int((failed[-1].doc_ids[0] == 0).sum())
        text = tokenizer.hf.decode(failed[-1].ids[0, :length])
        messages = json.loads(chat_file.read_text().splitlines()[line - 1])["messages"]
        assert all(message["content"] in text for message in messages)
        size = r"\(\d+\.\d\d MiB less\)"
        assert re.fullmatch(
            r"a step needs about \d\.\d\d MiB; these changes save most: "
            rf"1\. --training\.precision bf16-pure in a new run {size}, 2\. --model\.recompute full {size}, "
            rf"3\. --model\.loss chunked {size}",
            caught.value.hint or "",
        )

    def test_of_many_rows_the_longest_are_named(self, values_of: Any) -> None:
        error = RuntimeError("CUDA error: out of memory")
        with pytest.raises(OutOfMemoryError) as caught:
            train(values_of(CHAT, "run"), Memory(64, 1, error=lambda: error))
        _, rows = caught.value.message.split("\n  its rows: ")
        lengths = [int(length) for length in re.findall(r"chat\.jsonl:\d+ \((\d+) tokens\)", rows)]
        assert len(lengths) == 5
        assert lengths == sorted(lengths, reverse=True)
        assert re.search(r" and \d+ more$", rows)


def sequence(length: int, start: int = 1) -> TokenSequence:
    ids = np.arange(start, start + length)
    return TokenSequence(ids, ids)


def contents(batches: list[MicroBatch]) -> list[list[tuple[int, int, int]]]:
    """The tokens of every document, each with its label and position."""
    documents = []
    for batch in batches:
        for ids, labels, positions, doc_ids in zip(*(tensor.tolist() for tensor in batch.tensors), strict=True):
            for document in sorted(set(doc_ids) - {-1}):
                own = [i for i, each in enumerate(doc_ids) if each == document]
                documents.append([(ids[i], labels[i], positions[i]) for i in own])
    return documents


class TestSplit:
    ROWS_OF_LENGTHS = ([[9], [30], [3], [5], [17]], [[30, 1, 2, 25]], [[5, 6], [20], [1, 1, 1, 40]])

    @pytest.mark.parametrize("lengths", ROWS_OF_LENGTHS)
    @pytest.mark.parametrize("max_tokens", [1, 16, 40, 64, 1000])
    @pytest.mark.parametrize("shapes", [BatchShapes(), BatchShapes(8, 64, True, (3, 8))], ids=["cpu", "gpu"])
    def test_documents_stay_whole_and_in_order(
        self, lengths: list[list[int]], max_tokens: int, shapes: BatchShapes
    ) -> None:
        rows = [[sequence(length, 10 * number) for number, length in enumerate(row, 1)] for row in lengths]
        batch = collate(rows, 7, shapes)
        parts = split_to_limit(batch, max_tokens, 7, shapes)
        assert contents(parts) == contents([batch])
        for part in parts:
            assert part.get_counts() == part._replace(counts=None).get_counts()
            assert part.ids.shape[1] % 8 == 0
            padding = part.doc_ids == -1
            assert set(part.ids[padding].tolist()) <= {7}
            assert set(part.labels[padding].tolist()) <= {-100}
            # What is larger would not be smaller in parts.
            halves = split_micro_batch(part, 7, shapes)
            assert part.ids.numel() <= max_tokens or max(half.ids.numel() for half in halves) == part.ids.numel()
        assert sum(map(num_documents, parts)) == sum(map(len, lengths))

    def test_rows_are_halved_and_documents_cut_in_the_middle(self) -> None:
        halves = split_micro_batch(collate([[sequence(n)] for n in (9, 30, 3, 5, 17)], 0), 0)
        assert [tuple(half.ids.shape) for half in halves] == [(3, 32), (2, 24)]
        halves = split_micro_batch(collate([[sequence(n) for n in (30, 1, 2, 25)]], 0), 0)
        assert [half.get_counts().documents - 1 for half in halves] == [1, 3]
        one = collate([[sequence(30)]], 0)
        assert split_micro_batch(one, 0)[0] is one

    def test_rows_of_padding_are_left_out(self) -> None:
        shapes = BatchShapes(8, 64, True, (8,))
        parts = [split_micro_batch(collate(rows, 0, shapes), 0, shapes) for rows in ([[sequence(30)]], [])]
        assert [[tuple(part.ids.shape) for part in each] for each in parts] == [[(1, 32)], [(1, 16)]]

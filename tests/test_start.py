"""What a run says and refuses before its first step: the start line, batch sizes, memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import torchstone as package
from tiny import flags
from torchstone import api
from torchstone.data.tokenize import Tokenizer
from torchstone.errors import OutOfMemoryError
from torchstone.testing import launch_procs

Settings = Callable[..., dict[str, Any]]
Command = Callable[..., tuple[int, str, str]]


def start_lines(torchstone: Command, values: dict[str, Any], *args: str) -> str:
    code, _, err = torchstone("train", *args, *flags(values | {"observe.console": "lines"}))
    assert code == 0, err
    return err


@pytest.mark.parametrize("value", [None, "7"])
def test_threads_that_wait_do_not_spin_for_long(value: str | None) -> None:
    """It must be set before libgomp is loaded, by the import of torch, and a user's own value counts."""
    code = "import os, sys, torchstone; assert 'torch' not in sys.modules; print(os.environ['GOMP_SPINCOUNT'])"
    environment = {key: each for key, each in os.environ.items() if key != "GOMP_SPINCOUNT"}
    environment |= {} if value is None else {"GOMP_SPINCOUNT": value}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == (value or "10000")


class TestStartLine:
    def test_fine_tuning_says_its_defaults(
        self, torchstone: Command, llama_dir: Path, chat_file: Path, tmp_path: Path
    ) -> None:
        values = {
            "model.path": llama_dir,
            "data.path": chat_file,
            "data.context_length": 64,
            "data.validation_split": 0.1,
            "data.cache_dir": tmp_path / "cache",
            "output_dir": tmp_path / "run",
            "system.device": "cpu",
        }
        err = start_lines(torchstone, values)
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(llama_dir).parameters())
        held_out = round(0.1 * 30)
        assert "1 step (1.00 epochs) of 32 samples, micro-batches of up to 64 tokens, on cpu; " in err
        assert f"; all {parameters / 1e6:.2f}M parameters in fp32; " in err
        assert f"; {30 - held_out} samples to train on, {held_out} held out; " in err
        assert "; AdamW with learning rate 2e-05 (cosine, 1 step of warm-up), weight decay 0\n" in err
        assert f"training.global_batch_size 32 is larger than the data ({30 - held_out} samples)" in err

    def test_pretraining_keeps_its_defaults(self, torchstone: Command, settings: Settings) -> None:
        values = settings(training__max_steps=1)
        del values["optim.learning_rate"]
        err = start_lines(torchstone, values)
        assert "; AdamW with learning rate 0.0003 (cosine, 0 steps of warm-up), weight decay 0.1\n" in err
        assert "none held out" in err
        assert "is larger than the data" not in err
        assert "data.validation_path" not in err

    def test_validation_on_the_training_data_is_said_once(
        self, torchstone: Command, settings: Settings, chat_file: Path
    ) -> None:
        values = settings(training__max_steps=1, data__path=chat_file, data__context_length=64)
        err = start_lines(torchstone, values | {"data.validation_path": f"{chat_file.parent}/./{chat_file.name}"})
        assert err.count("is both data.path and data.validation_path: its rows are trained on") == 1


class TestBatchSizesOfAPreset:
    def test_one_that_does_not_apply_to_the_data_is_dropped_and_said(
        self, torchstone: Command, settings: Settings, chat_file: Path
    ) -> None:
        values = settings(data__path=chat_file, data__context_length=64, training__max_steps=1)
        err = start_lines(torchstone, values, "--preset", "demo")
        assert "training.batch_size of the preset is not used: it does not apply to packed conversations" in err
        assert "of 4 samples, micro-batches of up to 64 tokens" in err

    def test_one_that_applies_is_kept(
        self, torchstone: Command, settings: Settings, chat_file: Path, tmp_path: Path
    ) -> None:
        values = settings(training__max_steps=1)
        assert "micro-batches of 32 rows" in start_lines(torchstone, values, "--preset", "demo")
        unpacked = settings(data__path=chat_file, data__context_length=64, output_dir=tmp_path / "run-2")
        unpacked["training.max_steps"] = 1
        args = ("--preset", "demo", "--no-data.packing")
        assert "micro-batches of 32 rows" in start_lines(torchstone, unpacked, *args)

    def test_a_typed_one_is_refused(self, torchstone: Command, settings: Settings, chat_file: Path) -> None:
        values = settings(data__path=chat_file, data__context_length=64, training__batch_size=32)
        code, _, err = torchstone("train", "--preset", "demo", *flags(values))
        assert code == 2
        assert "training.batch_size does not apply to packed conversations" in err
        assert "use --training.max_tokens_per_gpu 2048 (32 x data.context_length)" in err


class TestMemory:
    """The weights are never read: these models exist on paper, or as a file with holes."""

    def test_a_new_model_far_larger_than_memory_is_refused_at_once(
        self, torchstone: Command, settings: Settings
    ) -> None:
        values = settings(model__depth=200, model__width=32768, model__heads=256)
        started = time.monotonic()
        code, _, err = torchstone("train", *flags(values))
        assert code == 4
        assert "need at least" in err
        assert "without activations, but cpu has" in err
        assert time.monotonic() - started < 60

    def test_a_loaded_model_is_counted_from_its_headers(
        self, torchstone: Command, tokenizer: Tokenizer, text_file: Path, tmp_path: Path
    ) -> None:
        folder, layers, width = tmp_path / "large", 40, 8192
        parameters = make_sparse_llama(folder, tokenizer, layers, width)
        values = {"model.path": folder, "data.path": text_file, "data.cache_dir": tmp_path}
        values |= {"system.device": "cpu", "output_dir": tmp_path / "run"}
        code, _, err = torchstone("train", *flags(values))
        assert code == 4
        assert f"{parameters / 1e9:.2f}B parameters need at least {16 * parameters / 2**30:,.1f} GiB per process" in err
        code, _, err = torchstone("train", *flags(values), "--training.precision", "bf16-pure")
        assert f"need at least {8 * parameters / 2**30:,.1f} GiB" in err
        for args in (("generate", folder, "a"), ("chat", folder), ("evaluate", folder, "--data", text_file)):
            code, _, err = torchstone(*args, "--device", "cpu")
            assert code == 4
            assert f"need at least {4 * parameters / 2**30:,.1f} GiB" in err
            assert "--training" not in err, "these commands have no such flag"

    def test_ranks_need_the_memory_of_their_shards(self, settings: Settings) -> None:
        large = settings(model__depth=200, model__width=32768, model__heads=256)
        launch_procs(needed_memory, 2, large, backend=None)


def needed_memory(overrides: dict[str, Any]) -> None:
    """16 bytes per parameter in fp32: the weights, the gradients and two moments."""
    with pytest.raises(OutOfMemoryError) as error:
        api.train(overrides=overrides | {"parallel.dp_shard": 2})
    billions, gib = re.findall(r"(\S+)B parameters need at least (\S+) GiB", error.value.message)[0]
    assert float(gib.replace(",", "")) == pytest.approx(16 * float(billions) * 1e9 / 2**30 / 2, rel=1e-3)


def make_sparse_llama(folder: Path, tokenizer: Tokenizer, layers: int, width: int) -> int:
    """A Hugging Face folder whose weights are a hole in a file; returns the number of parameters."""
    folder.mkdir()
    config = LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=64, num_key_value_heads=64,
        intermediate_size=3 * width, vocab_size=tokenizer.size, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    header, end = {}, 0
    for name, tensor in state.items():
        begin, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    tokenizer.hf.save_pretrained(folder)
    return end // 2


def test_dir_lists_the_public_names() -> None:
    assert dir(package) == sorted(package.__all__)
    assert package.train is api.train


class TestStartUp:
    LINE = re.compile(r"(\d+\.\d) s from the start to the end of step (\d+): (.*)")

    def test_the_log_says_what_it_took_once_per_run(self, torchstone: Command, settings: Settings) -> None:
        values = settings(training__max_steps=3)
        total, step, phases = self.only_match(start_lines(torchstone, values))
        assert step == "1"
        seconds = [float(phase.rpartition(" ")[2]) for phase in phases.split(", ")]
        assert sum(seconds) == pytest.approx(float(total), abs=0.05 * (len(seconds) + 8))
        assert phases.startswith("starting ")
        _, step, _ = self.only_match(start_lines(torchstone, values | {"training.max_steps": 5}))
        assert step == "4"

    def test_a_run_in_python_begins_when_it_is_called(
        self, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for number in range(2):
            began = time.time()
            output_dir = str(tmp_path / str(number))
            values = settings(training__max_steps=1, observe__console="lines", output_dir=output_dir)
            package.train(overrides=values)
            total, _, _ = self.only_match(capsys.readouterr().err)
            assert float(total) <= time.time() - began + 0.1

    def only_match(self, text: str) -> tuple[str, str, str]:
        (match,) = self.LINE.finditer(text)
        return match[1], match[2], match[3]

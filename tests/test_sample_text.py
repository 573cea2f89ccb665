"""Samples of text during training: what they are, where they go, and that training does not notice them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import flags, make_llama
from torchstone import api
from torchstone.checkpoint.model_folder import load_model
from torchstone.checkpoint.save import OPTIMIZER_FILE, RNG_FILE
from torchstone.data.tokenize import Tokenizer
from torchstone.errors import UsageError
from torchstone.models.decoder import Decoder
from torchstone.observe.metrics import read_metrics
from torchstone.testing import launch_procs

Settings = Callable[..., dict[str, Any]]
Command = Callable[..., tuple[int, str, str]]
TIMES = ("tok_s", "step_s", "mfu", "memory")


def samples_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in TIMES} for line in read_metrics(folder / "metrics.jsonl")]


def train(overrides: dict[str, Any]) -> Path:
    api.train(overrides=overrides)
    return Path(overrides["output_dir"])


def train_all(runs: list[dict[str, Any]]) -> None:
    for overrides in runs:
        api.train(overrides=overrides)


@pytest.mark.parametrize("implementation", ["native", "fallback"])
def test_training_is_the_same_to_the_last_bit(
    settings: Settings, tokenizer: Tokenizer, tmp_path: Path, implementation: str
) -> None:
    """Also where dropout draws random numbers: weights, moments, RNG states and metrics."""
    model = make_llama(tmp_path / "model", tokenizer, attention_dropout=0.1 if implementation == "fallback" else 0.0)
    overrides = settings(
        model__path=str(model), model__implementation=implementation, data__validation_split=0.1,
        training__validate_every_steps=2, observe__sample_every_steps=1, observe__sample_tokens=8,
    )  # fmt: skip
    for key in ("model.depth", "model.width", "model.heads", "model.tokenizer"):
        del overrides[key]
    folder = train(overrides)
    plain = {key: value for key, value in overrides.items() if "sample" not in key}
    other = train(plain | {"output_dir": str(tmp_path / "plain")})
    assert losses(folder) == losses(other)
    for name in ("model.safetensors", OPTIMIZER_FILE, RNG_FILE):
        file = Path("checkpoints/step-00000006") / name
        assert (folder / file).read_bytes() == (other / file).read_bytes(), name
    assert [sample["step"] for sample in samples_of(folder)] == [n for n in range(1, 7) for _ in range(3)]
    assert not (other / "samples.jsonl").exists()


class TestPrompts:
    def test_a_prompt_of_the_config_is_continued_as_generate_does(
        self, torchstone: Command, settings: Settings, tokenizer: Tokenizer
    ) -> None:
        prompts = ["Once, long ago", "The"]
        overrides = settings(observe__sample_every_steps=3, observe__sample_tokens=12, observe__console="lines")
        code, _, err = torchstone("train", *flags(overrides), "--observe.sample_prompts", json.dumps(prompts))
        assert code == 0, err
        folder = Path(overrides["output_dir"])
        samples = samples_of(folder)
        assert [(sample["step"], sample["prompt"]) for sample in samples] == [(n, p) for n in (3, 6) for p in prompts]
        model = load_model(folder / "checkpoints/step-00000006", torch.device("cpu"))
        expected = model.generate([tokenizer.encode(text) for text in prompts], 12, tokenizer.stop_ids)
        texts = [tokenizer.hf.decode(ids, skip_special_tokens=False) for ids in expected]
        assert [sample["text"] for sample in samples[2:]] == texts
        for text in (err, (folder / "logs/rank-0.log").read_text()):
            assert f"rank0:INFO | sample after step 6: {prompts[0]!r} -> {texts[0]!r}" in text

    def test_a_prompt_is_a_question_if_the_data_has_conversations(
        self, settings: Settings, chat_file: Path, tokenizer: Tokenizer
    ) -> None:
        overrides = settings(
            data__path=str(chat_file), data__context_length=64, training__max_steps=2, observe__sample_every_steps=2,
            observe__sample_prompts=["How long is SOL?"], observe__sample_tokens=6,
        )  # fmt: skip
        folder = train(overrides)
        (sample,) = samples_of(folder)
        assert sample["prompt"] == "How long is SOL?"
        ids = tokenizer.encode("<|user|>How long is SOL?<|end|><|assistant|>")
        model = load_model(folder / "checkpoints/step-00000002", torch.device("cpu"))
        (expected,) = model.generate([ids], 6, tokenizer.stop_ids)
        assert sample["text"] == tokenizer.hf.decode(expected, skip_special_tokens=False)

    def test_by_default_they_are_the_first_ones_of_the_validation_data_or_else_of_the_training_data(
        self, settings: Settings, chat_file: Path, text_file: Path
    ) -> None:
        chat = settings(
            data__path=str(chat_file), data__context_length=64, training__max_steps=1, observe__sample_every_steps=1,
            observe__sample_tokens=4,
        )  # fmt: skip
        rows = [json.loads(line) for line in chat_file.read_text().splitlines()]
        questions = [f"<|user|>{row['messages'][0]['content']}<|end|><|assistant|>" for row in rows]
        assert [sample["prompt"] for sample in samples_of(train(chat))] == questions[:3]
        text = chat | {"data.path": str(text_file), "output_dir": chat["output_dir"] + "-text"}
        texts = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
        prompts = [sample["prompt"] for sample in samples_of(train(text))]
        assert len(prompts) == 3
        assert all(document.startswith(prompt) for document, prompt in zip(texts, prompts, strict=False))
        validated = text | {"data.validation_path": str(chat_file), "output_dir": chat["output_dir"] + "-both"}
        assert [sample["prompt"] for sample in samples_of(train(validated))] == questions[:3]

    def test_without_room_for_a_sample_the_run_does_not_start(self, settings: Settings) -> None:
        with pytest.raises(UsageError, match=r"no prompt of the data leaves room for observe.sample_tokens 32"):
            train(settings(observe__sample_every_steps=1, observe__sample_tokens=32))


def test_logits_of_a_long_row_are_never_all_in_memory(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = set()
    compute_logits = Decoder.compute_logits

    def record(self: Decoder, x_BTD: torch.Tensor) -> torch.Tensor:
        shapes.add(tuple(x_BTD.shape[:2]))
        return compute_logits(self, x_BTD)

    run = settings(training__max_steps=1, observe__sample_every_steps=1, observe__sample_tokens=4)
    run["observe.sample_prompts"] = ["The river", "Once, long ago,"]
    monkeypatch.setattr(Decoder, "compute_logits", record)
    train(run)
    assert (2, 1) in shapes
    assert len(shapes) == 2, "the other ones are those of training"


def test_a_run_that_starts_again_moves_old_samples_aside(settings: Settings) -> None:
    run = settings(training__max_steps=4, checkpoint__at_end=False, observe__sample_tokens=4)
    folder = train(run | {"observe.sample_every_steps": 1})
    train(run | {"observe.sample_every_steps": 3})
    assert {sample["step"] for sample in samples_of(folder)} == {3}
    assert len((folder / "samples-old.jsonl").read_text().splitlines()) == 12


def test_a_run_that_was_killed_leaves_no_sample_twice(settings: Settings) -> None:
    overrides = settings(observe__sample_every_steps=2, observe__sample_tokens=4, checkpoint__every_steps=3)
    folder = train(overrides)
    samples = samples_of(folder)
    shutil.rmtree(folder / "checkpoints/step-00000006")
    train(overrides)
    assert samples_of(folder) == samples


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel.pp": 2, "observe.sample_every_steps": 1}, "does not work with pipelines"),
        ({"observe.sample_prompts": "a"}, "observe.sample_prompts has no effect"),
        ({"observe.sample_tokens": 3}, "observe.sample_tokens has no effect"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Settings, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        train(settings() | changes)


def test_samples_are_the_same_in_every_layout(settings: Settings, tmp_path: Path) -> None:
    """Zero 3, and a vocabulary that is sharded over the ranks."""
    base = settings(
        training__max_steps=2, optim__learning_rate=1e-2, observe__sample_every_steps=1, observe__sample_tokens=5
    )
    expected = samples_of(train(base))
    layouts = {
        "fsdp": {"parallel.dp_shard": 2},
        "tp": {"parallel.tp": 2},
        "no-sequence": {"parallel.tp": 2, "parallel.sequence": False},
    }
    runs = [base | layout | {"output_dir": str(tmp_path / name)} for name, layout in layouts.items()]
    launch_procs(train_all, 2, runs, backend=None, timeout=120)
    for name in layouts:
        assert samples_of(tmp_path / name) == expected, name

"""Whole runs of every family: train, resume, export, evaluate, chat; against Transformers or bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from exact_runs import exact_metrics
from parity import load_transformers
from selection import the_rest
from tiny import flags, write_rows
from tiny_families import SHAPES, make_model
from torchstone import api
from torchstone.checkpoint.load import CHECKPOINTS
from torchstone.checkpoint.model_folder import load_model
from torchstone.data.tokenize import Tokenizer
from torchstone.errors import UsageError

CPU = torch.device("cpu")
Settings = Callable[..., dict[str, Any]]
Command = Callable[..., tuple[int, str, str]]
VOCABULARY = 448
# One shape of each family.
FAMILIES = {family: next(iter(shapes)) for family, shapes in SHAPES.items()}
WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
FUSED = "qkv,gate_up"
# Plain; soft caps and windows; stacked matrices in the file; transposed ones and learned positions.
VARIED = ("llama", "gemma2", "phi3", "gpt2")


class Runs:
    """Folders of every family with the demo tokenizer, and runs from them. Each is made once."""

    def __init__(self, root: Path, tokenizer: Tokenizer, chat_file: Path, text_file: Path) -> None:
        self.root, self.tokenizer = root, tokenizer
        self.files = {"chat": chat_file, "text": text_file}

    def folder(self, family: str, shape: str | None = None) -> Path:
        folder = self.root / f"{family}-{shape or FAMILIES[family]}"
        if not folder.exists():
            make_model(folder, family, shape or FAMILIES[family], vocab_size=VOCABULARY)
            self.tokenizer.save(folder)
        return folder

    def settings(self, family: str, output: Path, data: str = "chat", **changes: Any) -> dict[str, Any]:
        base = {
            "model.path": str(self.folder(family)),
            "data.path": str(self.files[data]),
            "data.context_length": 48,
            "data.cache_dir": str(self.root / "cache"),
            "training.max_steps": 6,
            "training.global_batch_size": 3,
            "optim.learning_rate": 3e-3,
            "optim.schedule": "constant",
            "checkpoint.every_steps": 3,
            "observe.console": "quiet",
            "system.device": "cpu",
            "output_dir": str(output),
        }
        return base | {key.replace("__", "."): value for key, value in changes.items()}

    def run(self, family: str, name: str, **changes: Any) -> Path:
        output = self.root / f"{family}-run-{name}"
        if not output.exists():
            api.train(overrides=self.settings(family, output, **changes))
        return output

    def resume(self, run: Path, family: str, name: str, **changes: Any) -> Path:
        """Resumes a copy of `run` from step 3."""
        output = Path(shutil.copytree(run, self.root / f"{family}-run-{name}"))
        shutil.rmtree(checkpoint(output, 6))
        api.train(overrides=self.settings(family, output, **changes))
        return output


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, chat_file: Path, text_file: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), tokenizer, chat_file, text_file)


def checkpoint(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"step-{step:08d}"


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in exact_metrics(run)]


def random_ids(rows: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


def greedy(model: Any, prompt: list[int], max_new_tokens: int, stop_ids: list[int] | None = None) -> list[int]:
    """New tokens by Transformers' own generation."""
    options = {"do_sample": False, "eos_token_id": stop_ids, "pad_token_id": 0}
    return model.generate(torch.tensor([prompt]), max_new_tokens=max_new_tokens, **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "family", [family if family in VARIED else pytest.param(family, marks=the_rest) for family in FAMILIES]
)
class TestEveryFamily:
    def test_a_trained_model_is_exported_to_transformers(self, runs: Runs, family: str, tmp_path: Path) -> None:
        run = runs.run(family, "plain")
        last = checkpoint(run, 6)
        assert [line["step"] for line in exact_metrics(run)] == [1, 2, 3, 4, 5, 6]
        report = api.export(str(run), tmp_path / "out")
        assert (tmp_path / "out" / WEIGHTS).read_bytes() == (last / WEIGHTS).read_bytes()
        exported, before = load_file(tmp_path / "out" / WEIGHTS), load_file(runs.folder(family) / WEIGHTS)
        assert before.keys() == exported.keys()
        assert not [name for name in before if torch.equal(before[name], exported[name])], "a weight was not trained"
        reference = load_transformers(tmp_path / "out")
        state = reference.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in exported.items())
        ids = random_ids(2, 40)
        with torch.no_grad():
            expected = reference(ids).logits
            logits = load_model(last, CPU).module.eval()(ids, torch.arange(40).expand(2, 40))
        limit = 1e-5 * max(1.0, expected.abs().max().item())
        assert (logits - expected).abs().max().item() <= limit
        assert report["max_logit_difference"] <= limit

    def test_an_untrained_folder_is_exported_byte_for_byte(self, runs: Runs, family: str, tmp_path: Path) -> None:
        folder = runs.folder(family)
        assert api.export(str(folder), tmp_path / "out")["dtype"] == "float32"
        assert (tmp_path / "out" / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()

        bf16 = tmp_path / "bf16"
        load_transformers(folder).to(torch.bfloat16).save_pretrained(bf16)
        runs.tokenizer.save(bf16)
        assert api.export(str(bf16), tmp_path / "out-bf16")["dtype"] == "bfloat16"
        assert (tmp_path / "out-bf16" / WEIGHTS).read_bytes() == (bf16 / WEIGHTS).read_bytes()

        sharded = tmp_path / "sharded"
        load_transformers(folder).save_pretrained(sharded, max_shard_size="40KB")
        runs.tokenizer.save(sharded)
        assert not (sharded / WEIGHTS).exists()
        api.export(str(sharded), tmp_path / "out-sharded")
        assert (tmp_path / "out-sharded" / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()

    def test_evaluate_gives_the_loss_of_transformers(self, runs: Runs, family: str, tmp_path: Path) -> None:
        rows = [random_ids(1, 40)[0, -length:].tolist() for length in (40, 7, 23, 2, 31)]
        labels = [[-100 if position % 5 == 3 else token for position, token in enumerate(row)] for row in rows]
        data = write_rows(
            tmp_path / "rows.jsonl",
            [{"input_ids": i, "labels": n, "len": len(i)} for i, n in zip(rows, labels, strict=True)],
        )
        result = api.evaluate(
            str(runs.folder(family)), str(data), context_length=48, device="cpu", cache_dir=str(tmp_path), quiet=True
        )
        reference, total, count = load_transformers(runs.folder(family)), 0.0, 0
        for ids, row_labels in zip(rows, labels, strict=True):
            with torch.no_grad():
                logits = reference(torch.tensor([ids])).logits[0, :-1]
            targets = torch.tensor(row_labels[1:])
            total += F.cross_entropy(logits.double(), targets, ignore_index=-100, reduction="sum").item()
            count += int((targets != -100).sum())
        assert result["tokens"] == count
        assert result["loss"] == pytest.approx(total / count, rel=1e-6)

    def test_greedy_generation_equals_transformers(self, runs: Runs, family: str) -> None:
        """One batch of prompts of different lengths, shorter and longer than the windows, continued beyond them."""
        prompts = [random_ids(1, 20)[0, -length:].tolist() for length in (3, 1, 20, 9)]
        reference = load_transformers(runs.folder(family))
        expected = [greedy(reference, prompt, 24) for prompt in prompts]
        assert [len(row) for row in expected] == [24] * 4
        assert load_model(runs.folder(family), CPU).generate(prompts, 24) == expected

    def test_a_chat_equals_transformers(self, runs: Runs, family: str) -> None:
        run, question, tokenizer = runs.run(family, "plain"), "What is 2 + 2?", runs.tokenizer
        prompt = tokenizer.encode(tokenizer.template.render_prompt([{"role": "user", "content": question}]))
        tokens = greedy(load_transformers(checkpoint(run, 6)), prompt, 12, tokenizer.stop_ids)
        end = next((index for index, token in enumerate(tokens) if token in tokenizer.stop_ids), len(tokens))
        assert api.Chat(str(run), max_new_tokens=12, device="cpu").ask(question) == tokenizer.decode(tokens[:end])

    def test_a_fused_run_resumes_bit_for_bit(self, runs: Runs, family: str) -> None:
        run = runs.run(family, "fused", model__fused=FUSED)
        resumed = runs.resume(run, family, "fused-resumed", model__fused=FUSED)
        assert exact_metrics(resumed) == exact_metrics(run)
        for file in (WEIGHTS, OPTIMIZER):
            assert (checkpoint(resumed, 6) / file).read_bytes() == (checkpoint(run, 6) / file).read_bytes()

    def test_an_unfused_run_resumes_fused(self, runs: Runs, family: str) -> None:
        run = runs.run(family, "plain")
        fused = runs.resume(run, family, "resumed-fused", model__fused=FUSED)
        assert losses(fused)[:3] == losses(run)[:3]
        assert losses(fused) == pytest.approx(losses(run), rel=1e-6)
        moments, expected = load_file(checkpoint(fused, 6) / OPTIMIZER), load_file(checkpoint(run, 6) / OPTIMIZER)
        assert {name: tensor.shape for name, tensor in moments.items()} == {n: t.shape for n, t in expected.items()}
        assert moments["layers.0.attention.wk.weight/step"].item() == 6
        for name, tensor in expected.items():
            # Without positions, the gradient of the key bias is zero up to rounding.
            limit = 1e-5 * tensor.abs().max().item() + 1e-9
            assert torch.allclose(moments[name], tensor, rtol=1e-3, atol=limit), name

    @pytest.mark.parametrize("mode", ["selective", pytest.param("full", marks=the_rest)])
    def test_activation_checkpointing_changes_no_loss(self, runs: Runs, family: str, mode: str) -> None:
        plain = runs.run(family, "plain")
        run = runs.run(family, mode, model__recompute=mode, training__max_steps=3)
        assert exact_metrics(run) == exact_metrics(plain)[:3]
        assert (checkpoint(run, 3) / WEIGHTS).read_bytes() == (checkpoint(plain, 3) / WEIGHTS).read_bytes()


class TestRowsThatAreTooLong:
    def test_packing_is_refused_where_rope_depends_on_the_row_length(
        self, torchstone: Command, runs: Runs, tmp_path: Path
    ) -> None:
        changes = {"model__path": str(runs.folder("phi3", "longrope")), "training__max_steps": 1}
        overrides = runs.settings("phi3", tmp_path / "run", "text", **changes)
        code, _, err = torchstone("train", *flags(overrides))
        assert code == 2
        assert "depends on the row's length beyond 12 tokens" in err
        assert "use --data.packing false" in err
        assert not (tmp_path / "run/checkpoints").exists()
        for name, option in (("padded", {"data.packing": False}), ("short", {"data.context_length": 12})):
            code, _, err = torchstone("train", *flags(overrides | option | {"output_dir": str(tmp_path / name)}))
            assert code == 0, err
            assert len(losses(tmp_path / name)) == 1

    def test_rows_longer_than_the_learned_positions_are_refused(
        self, torchstone: Command, runs: Runs, tmp_path: Path
    ) -> None:
        message = "rows of 65 tokens are too long: the model has 64 positions"
        overrides = runs.settings("gpt2", tmp_path / "run", "text", training__max_steps=1, data__context_length=65)
        code, _, err = torchstone("train", *flags(overrides))
        assert (code, message in err) == (2, True)
        code, _, err = torchstone("train", *flags(overrides | {"data.context_length": 64}))
        assert code == 0, err

        args = ["evaluate", runs.folder("gpt2"), "--data", runs.files["text"], "--cache-dir", tmp_path, "--json"]
        code, out, err = torchstone(*args, "--context-length", 65)
        assert (code, out, message in err) == (2, "", True)
        # The default is what the model has.
        code, out, err = torchstone(*args)
        assert code == 0, err
        assert json.loads(out)["loss"] > 0


def test_generation_ends_with_the_learned_positions(runs: Runs) -> None:
    model = load_model(runs.folder("gpt2"), CPU)
    both = model.generate([[1, 2, 3], [4]], max_new_tokens=80)
    assert [len(new) for new in both] == [61, 63]
    # A row's neighbors change nothing.
    assert both == [model.generate([prompt], max_new_tokens=80)[0] for prompt in ([1, 2, 3], [4])]
    with pytest.raises(UsageError, match="a prompt fills all of the model's 64 positions"):
        model.generate([[1] * 64], max_new_tokens=1)


def test_mixed_dtypes_are_exported_without_rounding(runs: Runs, tmp_path: Path) -> None:
    """bf16 matrices with fp32 norms, as many folders have them: fp32 holds both exactly."""
    folder = Path(shutil.copytree(runs.folder("llama"), tmp_path / "mixed"))
    tensors = load_file(folder / WEIGHTS)
    mixed = {name: t if t.dim() == 1 else t.to(torch.bfloat16) for name, t in tensors.items()}
    save_file(mixed, folder / WEIGHTS, metadata={"format": "pt"})
    assert api.export(str(folder), tmp_path / "out")["dtype"] == "float32"
    exported = load_file(tmp_path / "out" / WEIGHTS)
    assert all(torch.equal(exported[name], tensor.float()) for name, tensor in mixed.items())


@pytest.mark.parametrize("prompts", [[[3, 4, 5]], [[3, 4, 5], [6] * 9, [7] * 14]], ids=["one", "several"])
def test_generation_beyond_the_original_length_of_longrope_equals_transformers(
    prompts: list[list[int]], tmp_path: Path
) -> None:
    """Beyond twelve tokens every key has another angle, so cached keys cannot be used."""
    folder = make_model(tmp_path, "phi3", "longrope", max_position_embeddings=64)
    reference = load_transformers(folder)
    tokens = load_model(folder, CPU).generate(prompts, max_new_tokens=20)
    for prompt, row in zip(prompts, tokens, strict=True):
        text = list(prompt)
        for _ in range(20):
            with torch.no_grad():
                text.append(int(reference(torch.tensor([text])).logits[0, -1].argmax()))
        assert row == text[len(prompt) :]

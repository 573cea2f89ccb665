"""Whole runs of every family: train, stop, go on, export, evaluate, talk; against Transformers, or bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from test_cli import flags, torchstone  # noqa: F401
from tiny import write_rows
from tiny_families import SHAPES, make_model
from torchstone import api
from torchstone.checkpoint.load import CHECKPOINTS
from torchstone.data.tokenize import Tokenizer
from torchstone.errors import UsageError
from torchstone.models.decoder import Decoder
from torchstone.models.opening import load_model
from torchstone.models.weights import save_weights
from torchstone.observe.metrics import read_metrics

CPU = torch.device("cpu")
Settings = Callable[..., dict[str, Any]]
Command = Callable[..., tuple[int, str, str]]
VOCABULARY = 448
# One shape of each family.
FAMILIES = {family: next(iter(shapes)) for family, shapes in SHAPES.items()}
WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
FUSED = "qkv,gate_up"
EXACT = ("step", "loss", "lr", "grad_norm", "tokens", "loss_tokens", "samples", "total_tokens")


class Runs:
    """Folders of every family with the demo's tokenizer, and runs from them, each made once."""

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

    def run(self, family: str, name: str, data: str = "chat", **changes: Any) -> Path:
        output = self.root / f"{family}-run-{name}"
        if not output.exists():
            api.train(overrides=self.settings(family, output, data, **changes))
        return output

    def goes_on(self, family: str, begun: str, name: str, **changes: Any) -> Path:
        """The run `begun` as it was after step 3, continued elsewhere."""
        output = self.root / f"{family}-run-{name}"
        shutil.copytree(self.root / f"{family}-run-{begun}", output)
        shutil.rmtree(step(output, 6))
        api.train(overrides=self.settings(family, output, **changes))
        return output


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, chat_file: Path, text_file: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), tokenizer, chat_file, text_file)


def step(run: Path, number: int) -> Path:
    return run / CHECKPOINTS / f"step-{number:08d}"


def trace(run: Path) -> list[dict[str, Any]]:
    return [{key: line[key] for key in EXACT} for line in read_metrics(run / "metrics.jsonl")]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in trace(run)]


def theirs(folder: Path) -> nn.Module:
    """Transformers' own. Eager is the one of its kernels that computes every family, soft caps included."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager", dtype=torch.float32).eval()


def random_ids(rows: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


def same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("family", FAMILIES)
class TestEveryFamily:
    @pytest.mark.parametrize("data", ["chat", "text"])
    def test_a_trained_model_is_exported_to_transformers(
        self, runs: Runs, family: str, data: str, tmp_path: Path
    ) -> None:
        run = runs.run(family, "plain") if data == "chat" else runs.run(family, "text", data, training__max_steps=2)
        last = step(run, 6 if data == "chat" else 2)
        assert [line["step"] for line in trace(run)] == list(range(1, 7 if data == "chat" else 3))
        found = api.export(str(run), tmp_path / "out")
        exported = load_file(tmp_path / "out" / WEIGHTS)
        assert (tmp_path / "out" / WEIGHTS).read_bytes() == (last / WEIGHTS).read_bytes()
        before = load_file(runs.folder(family) / WEIGHTS)
        assert before.keys() == exported.keys()
        # Embeddings of tokens that never came may stay; everything else has moved.
        assert not [name for name in before if torch.equal(before[name], exported[name])]
        model = theirs(tmp_path / "out")
        state = model.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in exported.items())
        ids = random_ids(2, 40)
        ours = load_model(last, CPU).module.eval()
        with torch.no_grad():
            wanted = model(ids).logits
            difference = (ours(ids, torch.arange(40).expand(2, 40)) - wanted).abs().max().item()
        assert difference <= 1e-5 * max(1.0, wanted.abs().max().item())
        assert found["max_logit_difference"] <= 1e-5 * max(1.0, wanted.abs().max().item())

    def test_an_untrained_folder_is_exported_byte_for_byte(self, runs: Runs, family: str, tmp_path: Path) -> None:
        folder = runs.folder(family)
        assert api.export(str(folder), tmp_path / "out")["dtype"] == "float32"
        assert (tmp_path / "out" / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()

        narrow = tmp_path / "bf16"
        theirs(folder).to(torch.bfloat16).save_pretrained(narrow)
        runs.tokenizer.save(narrow)
        assert api.export(str(narrow), tmp_path / "narrow")["dtype"] == "bfloat16"
        assert (tmp_path / "narrow" / WEIGHTS).read_bytes() == (narrow / WEIGHTS).read_bytes()

        cut = tmp_path / "cut"
        theirs(folder).save_pretrained(cut, max_shard_size="40KB")
        runs.tokenizer.save(cut)
        assert not (cut / WEIGHTS).exists()
        api.export(str(cut), tmp_path / "whole")
        assert same_tensors(load_file(tmp_path / "whole" / WEIGHTS), load_file(folder / WEIGHTS))

    def test_the_loss_of_evaluate_is_transformers(self, runs: Runs, family: str, tmp_path: Path) -> None:
        lengths = [40, 7, 23, 2, 31]
        rows = [random_ids(1, 40)[0, -length:].tolist() for length in lengths]
        labels = [[-100 if place % 5 == 3 else token for place, token in enumerate(row)] for row in rows]
        data = write_rows(
            tmp_path / "rows.jsonl",
            [{"input_ids": i, "labels": n, "len": len(i)} for i, n in zip(rows, labels, strict=True)],
        )
        found = api.evaluate(
            str(runs.folder(family)), str(data), context_length=48, device="cpu", cache_dir=str(tmp_path), quiet=True
        )
        model, total, count = theirs(runs.folder(family)), 0.0, 0
        for ids, wanted in zip(rows, labels, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, :-1]
            targets = torch.tensor(wanted[1:])
            total += F.cross_entropy(logits.double(), targets, ignore_index=-100, reduction="sum").item()
            count += int((targets != -100).sum())
        assert found["tokens"] == count
        assert found["loss"] == pytest.approx(total / count, rel=1e-6)

    def test_greedy_text_is_transformers(self, runs: Runs, family: str) -> None:
        """Prompts of different lengths at once, shorter and longer than the windows, and on beyond them."""
        prompts = [random_ids(1, 20)[0, -length:].tolist() for length in (3, 1, 20, 9)]
        model = theirs(runs.folder(family))
        wanted = [
            model.generate(
                torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0, len(prompt) :].tolist()
            for prompt in prompts
        ]
        assert [len(row) for row in wanted] == [24] * 4
        assert load_model(runs.folder(family), CPU).generate(prompts, 24) == wanted

    def test_a_chat_is_transformers(self, runs: Runs, family: str) -> None:
        run, question = runs.run(family, "plain"), "What is 2 + 2?"
        tokenizer = runs.tokenizer
        prompt = tokenizer.encode(tokenizer.template.prompt([{"role": "user", "content": question}]))
        row = (
            theirs(step(run, 6))
            .generate(
                torch.tensor([prompt]),
                max_new_tokens=12,
                do_sample=False,
                eos_token_id=tokenizer.stop_ids,
                pad_token_id=0,
            )[0, len(prompt) :]
            .tolist()
        )
        end = next((place for place, token in enumerate(row) if token in tokenizer.stop_ids), len(row))
        assert api.Chat(str(run), max_new_tokens=12, device="cpu").ask(question) == tokenizer.decode(row[:end])

    def test_a_run_goes_on_bit_for_bit_also_fused(self, runs: Runs, family: str) -> None:
        whole = runs.run(family, "fused", model__fused=FUSED)
        again = runs.goes_on(family, "fused", "fused again", model__fused=FUSED)
        assert trace(again) == trace(whole)
        for file in (WEIGHTS, OPTIMIZER):
            assert (step(again, 6) / file).read_bytes() == (step(whole, 6) / file).read_bytes()

    def test_a_run_that_began_separate_goes_on_fused(self, runs: Runs, family: str) -> None:
        separate = runs.run(family, "plain")
        fused = runs.goes_on(family, "plain", "now fused", model__fused=FUSED)
        assert losses(fused)[:3] == losses(separate)[:3]
        assert losses(fused) == pytest.approx(losses(separate), rel=1e-6)
        moments, wanted = load_file(step(fused, 6) / OPTIMIZER), load_file(step(separate, 6) / OPTIMIZER)
        assert {name: tensor.shape for name, tensor in moments.items()} == {n: t.shape for n, t in wanted.items()}
        assert moments["layers.0.attention.wk.weight/step"].item() == 6
        for name, tensor in wanted.items():
            # Without positions, what is added to all keys alike has no gradient but rounding.
            limit = 1e-5 * tensor.abs().max().item() + 1e-9
            assert torch.allclose(moments[name], tensor, rtol=1e-3, atol=limit), name

    @pytest.mark.parametrize("how", ["selective", "full"])
    def test_recomputing_changes_no_loss(self, runs: Runs, family: str, how: str) -> None:
        again = runs.run(family, how, model__recompute=how, training__max_steps=3)
        assert trace(again) == trace(runs.run(family, "plain"))[:3]
        assert (step(again, 3) / WEIGHTS).read_bytes() == (step(runs.run(family, "plain"), 3) / WEIGHTS).read_bytes()


class TestRowsThatAModelCannotTake:
    @pytest.mark.parametrize(("family", "shape"), [("llama", "dynamic"), ("phi3", "longrope")])
    def test_packing_beyond_the_length_is_refused_and_padding_is_not(
        self,
        torchstone: Command,  # noqa: F811
        runs: Runs,
        tmp_path: Path,
        family: str,
        shape: str,
    ) -> None:
        changes = {"model__path": str(runs.folder(family, shape)), "training__max_steps": 1}
        given = runs.settings(family, tmp_path / "run", "text", **changes)
        code, _, err = torchstone("train", *flags(given))
        assert code == 2
        assert "depend on the length of the row beyond 12 tokens" in err
        assert "use --data.packing false" in err
        assert not (tmp_path / "run/checkpoints").exists()
        code, _, err = torchstone("train", *flags(given), "--data.packing", "false")
        assert code == 0, err
        code, _, _ = torchstone(
            "train", *flags(given | {"output_dir": str(tmp_path / "s")}), "--data.context_length", 12
        )
        assert code == 0
        assert len(losses(tmp_path / "run")) == len(losses(tmp_path / "s")) == 1

    def test_gpt2_has_no_positions_beyond_its_table(
        self,
        torchstone: Command,  # noqa: F811
        runs: Runs,
        tmp_path: Path,
    ) -> None:
        given = runs.settings("gpt2", tmp_path / "run", "text", training__max_steps=1, data__context_length=65)
        code, _, err = torchstone("train", *flags(given))
        assert code == 2
        assert "rows of 65 tokens are too long: the model has 64 positions" in err
        code, _, err = torchstone("train", *flags(given | {"data.context_length": 64}))
        assert code == 0, err

    def test_evaluate_refuses_them_too(
        self,
        torchstone: Command,  # noqa: F811
        runs: Runs,
        tmp_path: Path,
    ) -> None:
        words = ["evaluate", runs.folder("gpt2"), "--data", runs.files["text"], "--cache-dir", tmp_path, "--json"]
        code, out, err = torchstone(*words, "--context-length", 65)
        assert (code, out) == (2, "")
        assert "rows of 65 tokens are too long: the model has 64 positions" in err
        # Without being told, as many as the model has.
        code, out, err = torchstone(*words)
        assert code == 0, err
        assert json.loads(out)["loss"] > 0


def test_an_answer_ends_where_learned_positions_end(runs: Runs) -> None:
    model = load_model(runs.folder("gpt2"), torch.device("cpu"))
    assert [len(new) for new in model.generate([[1, 2, 3], [4]], max_new_tokens=80)] == [61, 61]
    with pytest.raises(UsageError, match="a prompt fills all of the model's 64 positions"):
        model.generate([[1] * 64], max_new_tokens=1)


def test_numbers_of_several_widths_are_exported_without_rounding(runs: Runs, tmp_path: Path) -> None:
    """bf16 matrices with fp32 norms, as many a folder has them: what holds both exactly is fp32."""
    from safetensors.torch import save_file

    folder = Path(shutil.copytree(runs.folder("llama"), tmp_path / "mixed"))
    tensors = load_file(folder / WEIGHTS)
    mixed = {name: t if t.dim() == 1 else t.to(torch.bfloat16) for name, t in tensors.items()}
    save_file(mixed, folder / WEIGHTS, metadata={"format": "pt"})
    assert api.export(str(folder), tmp_path / "out")["dtype"] == "float32"
    exported = load_file(tmp_path / "out" / WEIGHTS)
    assert all(torch.equal(exported[name], tensor.float()) for name, tensor in mixed.items())


def test_a_run_from_shards_is_the_run_from_one_file(runs: Runs, tmp_path: Path) -> None:
    folder = runs.folder("phi3")
    model = load_model(folder, CPU)
    assert isinstance(model.module, Decoder)
    shards = Path(shutil.copytree(folder, tmp_path / "shards"))
    (shards / WEIGHTS).unlink()
    assert len(save_weights(model.pieces(), model.family, shards, shard_bytes=40_000)) > 3  # type: ignore[attr-defined]
    given = runs.settings("phi3", tmp_path / "run", model__path=str(shards), training__max_steps=3)
    api.train(overrides=given)
    plain = runs.run("phi3", "plain")
    assert trace(tmp_path / "run") == trace(plain)[:3]
    assert (step(tmp_path / "run", 3) / WEIGHTS).read_bytes() == (step(plain, 3) / WEIGHTS).read_bytes()


@pytest.mark.parametrize("prompts", [[[3, 4, 5]], [[3, 4, 5], [6] * 9, [7] * 14]], ids=["one", "several"])
def test_text_that_outgrows_longrope_is_read_again(prompts: list[list[int]], tmp_path: Path) -> None:
    """Beyond twelve tokens every key turns by other angles: what was cached before is of no use, as in Transformers."""
    from transformers import AutoModelForCausalLM

    folder = make_model(tmp_path, "phi3", "longrope", max_position_embeddings=64)
    theirs = AutoModelForCausalLM.from_pretrained(str(folder)).eval()
    got = load_model(folder, torch.device("cpu")).generate(prompts, max_new_tokens=20)
    for prompt, new in zip(prompts, got, strict=True):
        text = list(prompt)
        for _ in range(20):
            with torch.no_grad():
                text.append(int(theirs(torch.tensor([text])).logits[0, -1].argmax()))
        assert new == text[len(prompt) :]

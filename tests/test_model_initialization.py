"""A model made ready to train: fitted to its tokenizer or drawn anew, its optimizer and schedule, what is said."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from test_cli import flags, torchstone  # noqa: F401
from tiny import make_llama
from tiny_families import make_model
from torchstone import api
from torchstone.config.load import load_config
from torchstone.config.schema import FamilyName
from torchstone.data.tokenize import Tokenizer
from torchstone.errors import UsageError
from torchstone.models.decoder import Decoder
from torchstone.models.execution import Execution
from torchstone.models.families import FAMILIES
from torchstone.models.model import Model
from torchstone.models.opening import check_folder, load_model
from torchstone.observe.console import Console
from torchstone.observe.metrics import read_metrics
from torchstone.training.assemble import assemble
from torchstone.training.loop import Run

CPU = torch.device("cpu")
Settings = Callable[..., dict[str, Any]]
Command = Callable[..., tuple[int, str, str]]
IMPLEMENTATIONS = ("native", "fallback")
FEW_ROWS = 401
ROWS, WIDTH = 32000, 8
WIDE_VOCABULARY = {
    "vocab_size": ROWS, "hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
WEIGHTS, GENERATION = "model.safetensors", "generation_config.json"
NEW = ("model.depth", "model.width", "model.heads", "model.tokenizer")


def from_folder(settings: Settings, folder: Path, **changes: Any) -> dict[str, Any]:
    """Overrides for a run that starts from `folder`, with its own tokenizer."""
    given = settings(model__path=str(folder), **changes)
    return {key: value for key, value in given.items() if key not in NEW}


def assembled(overrides: dict[str, Any]) -> Run:
    Path(overrides["output_dir"]).mkdir(exist_ok=True)
    return assemble(load_config(None, None, overrides), Console("quiet"), CPU)


def ends(model: Model) -> dict[str, nn.Parameter]:
    """Embedding and head."""
    if isinstance(model.module, Decoder):
        return {"embedding": model.module.tok_embed.weight, "head": model.module.head.weight}
    hf = model.module.hf
    return {"embedding": hf.get_input_embeddings().weight, "head": hf.get_output_embeddings().weight}


class TestModelTokenizerAlignment:
    @pytest.fixture(scope="class")
    @classmethod
    def wide(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
        """Models of 32000 rows, by whether the head is the embedding."""
        return {
            tied: make_llama(tmp_path_factory.mktemp("wide"), tie_word_embeddings=tied, **WIDE_VOCABULARY)
            for tied in (False, True)
        }

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize(
        ("tokens", "rows"), [(32005, 32008), (32001, 32008), (32008, 32008), (32009, 32016), (40000, 40000)]
    )
    def test_more_tokens_than_rows_make_a_multiple_of_eight(
        self, wide: dict[bool, Path], implementation: Any, tokens: int, rows: int
    ) -> None:
        model = load_model(wide[False], CPU, execution=Execution(implementation=implementation))
        (said,) = model.align(tokens, {})
        assert said.startswith(f"the tokenizer has {tokens} tokens, the model 32000 rows: now {rows}")
        assert model.vocab_size == model.hf_config["vocab_size"] == rows
        assert {name: len(matrix) for name, matrix in ends(model).items()} == {"embedding": rows, "head": rows}
        with torch.no_grad():
            assert model.module(torch.tensor([[tokens - 1, 1]]), torch.arange(2)[None]).shape == (1, 2, rows)

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize("tokens", [32000, 31999, 31000, 8])
    def test_fewer_tokens_leave_the_model_alone(self, wide: dict[bool, Path], implementation: Any, tokens: int) -> None:
        model = load_model(wide[True], CPU, execution=Execution(implementation=implementation))
        before = {name: tensor.clone() for name, tensor in model.disk_tensors().items()}
        places = {name: matrix.data_ptr() for name, matrix in ends(model).items()}
        assert model.align(tokens, {}) == []
        assert model.vocab_size == ROWS
        assert {name: matrix.data_ptr() for name, matrix in ends(model).items()} == places
        assert all(torch.equal(before[name], tensor) for name, tensor in model.disk_tensors().items())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_old_rows_stay_and_new_ones_are_their_mean_in_fp32(
        self, wide: dict[bool, Path], implementation: Any, tied: bool, dtype: torch.dtype
    ) -> None:
        model = load_model(wide[tied], CPU, dtype, Execution(implementation=implementation))
        before = {name: matrix.detach().clone() for name, matrix in ends(model).items()}
        names = [name for name, _ in model.module.named_parameters()]
        model.align(32005, {})
        after = ends(model)
        assert (after["head"] is after["embedding"]) == tied
        assert [name for name, _ in model.module.named_parameters()] == names
        for name, matrix in after.items():
            assert (matrix.dtype, matrix.requires_grad) == (dtype, True)
            assert torch.equal(matrix[:ROWS], before[name])
            mean = before[name].double().mean(dim=0)
            step = 2.0**-24 if dtype == torch.float32 else 2.0**-9
            assert ((matrix[ROWS:].double() - mean).abs() <= 2 * step * mean.abs() + 1e-8).all()
            assert matrix.shape == (32008, WIDTH)
        if not tied:
            assert not torch.equal(after["head"][ROWS:], after["embedding"][ROWS:])

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_special_tokens_are_the_tokenizer_s(self, tmp_path: Path, implementation: Any) -> None:
        folder = make_model(tmp_path, "llama", "grouped", pad_token_id=1, bos_token_id=2, eos_token_id=[5, 7])
        model = load_model(folder, CPU, execution=Execution(implementation=implementation))
        said = model.align(90, {"pad_token_id": 4, "bos_token_id": 2, "eos_token_id": 7})
        assert said == [
            "pad_token_id: the model had 1, the tokenizer has 4; the model now has that",
            "generation_config.json: pad_token_id was 1, is 4",
        ]
        model.save(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        assert [config[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")] == [4, 2, [5, 7]]
        (again, *_) = model.align(90, {"pad_token_id": 4, "bos_token_id": None, "eos_token_id": 8})
        assert "eos_token_id: the model had [5, 7], the tokenizer has 8" in again
        assert model.hf_config["bos_token_id"] == 2, "a tokenizer without such a token has no say"

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize(("eos", "kept"), [(7, True), ([3, 7], True), (9, False)])
    def test_generation_settings_are_kept_byte_for_byte_unless_ids_changed(
        self, tmp_path: Path, implementation: Any, eos: Any, kept: bool, tokenizer: Tokenizer
    ) -> None:
        from torchstone.checkpoint.save import write_beside

        folder = make_model(tmp_path / "in", "llama", "grouped", eos_token_id=eos)
        settings = b'{\n  "eos_token_id": 7,\n "temperature":0.25, "do_sample": true, "top_p": 0.5}\n'
        (folder / GENERATION).write_bytes(settings)
        model = load_model(folder, CPU, execution=Execution(implementation=implementation))
        model.align(90, {"eos_token_id": 7}, stops=[7] if kept else [7, 11])
        (tmp_path / "out").mkdir()
        model.save(tmp_path / "out")
        write_beside(tokenizer, tmp_path / "out")
        written = (tmp_path / "out" / GENERATION).read_bytes()
        assert (written == settings) == kept
        if not kept:
            assert json.loads(written) == json.loads(settings) | {"eos_token_id": [7, 11]}, "only the ids are changed"

    @pytest.fixture(scope="class")
    @classmethod
    def few(cls, tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
        """Fewer rows than the demo's tokenizer has tokens, and other special ids."""
        assert tokenizer.size > FEW_ROWS
        marks = {"bos_token_id": 3, "eos_token_id": 17, "pad_token_id": 9}
        return make_llama(tmp_path_factory.mktemp("few"), tokenizer, vocab_size=FEW_ROWS, **marks)

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_a_run_says_what_it_changed_and_its_export_has_it(
        self, few: Path, settings: Settings, tokenizer: Tokenizer, implementation: str, tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        from transformers import AutoModelForCausalLM, AutoTokenizer

        rows = 8 * math.ceil(tokenizer.size / 8)
        given = from_folder(
            settings, few, training__max_steps=2, observe__console="lines", model__implementation=implementation
        )
        outcome = api.train(overrides=given)
        err = capsys.readouterr().err
        line = f"GPU0:WARNING | the tokenizer has {tokenizer.size} tokens, the model {FEW_ROWS} rows: now {rows}"
        assert err.count(line) == 1
        eos = tokenizer.hf.eos_token_id
        assert f"eos_token_id: the model had 17, the tokenizer has {eos}; the model now has that" in err
        api.export(str(outcome.checkpoint), tmp_path / "out")
        model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"))
        loaded = AutoTokenizer.from_pretrained(str(tmp_path / "out"))
        assert model.config.vocab_size == rows == model.get_input_embeddings().weight.shape[0]
        for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
            ours = getattr(loaded, key)
            assert ours is None or getattr(model.config, key) == ours, key
        assert model.generation_config.eos_token_id in (tokenizer.stop_ids, tokenizer.stop_ids[0])
        last = tokenizer.size - 1
        assert torch.isfinite(model(torch.tensor([[last, 0]])).logits).all()

    def test_a_folder_with_too_few_rows_is_exported_as_it_is(self, few: Path, tmp_path: Path) -> None:
        api.export(str(few), tmp_path / "out")
        assert (tmp_path / "out" / WEIGHTS).read_bytes() == (few / WEIGHTS).read_bytes()

    @pytest.mark.parametrize("command", ["evaluate", "chat"])
    def test_too_few_rows_are_refused_where_nothing_is_trained(
        self,
        torchstone: Command,  # noqa: F811
        few: Path,
        chat_file: Path,
        tmp_path: Path,
        command: str,
    ) -> None:
        words = {"evaluate": ["--data", chat_file, "--cache-dir", tmp_path], "chat": ["--prompt", "What is 2 + 2?"]}
        code, _, err = torchstone(command, few, *words[command])
        assert code in (2, 6)
        assert str(FEW_ROWS) in err

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_a_run_that_resized_goes_on_bit_for_bit(
        self, few: Path, settings: Settings, implementation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        whole = from_folder(
            settings, few, training__max_steps=4, checkpoint__every_steps=2, model__implementation=implementation,
            output_dir=str(tmp_path / "whole"),
        )  # fmt: skip
        api.train(overrides=whole)
        again = tmp_path / "again"
        shutil.copytree(tmp_path / "whole", again)
        shutil.rmtree(again / "checkpoints/step-00000004")
        capsys.readouterr()
        api.train(overrides=whole | {"output_dir": str(again)})
        assert "rows: now" not in capsys.readouterr().err, "the checkpoint has its rows already"
        lines = [[(line["loss"], line["grad_norm"]) for line in read_metrics(tmp_path / run / "metrics.jsonl")]
                 for run in ("whole", "again")]  # fmt: skip
        assert lines[0] == lines[1]
        for file in (WEIGHTS, "optimizer.safetensors"):
            paths = [tmp_path / run / "checkpoints/step-00000004" / file for run in ("whole", "again")]
            assert paths[0].read_bytes() == paths[1].read_bytes()

    def test_both_implementations_resize_to_the_same_run(self, few: Path, settings: Settings, tmp_path: Path) -> None:
        losses = {}
        for implementation in IMPLEMENTATIONS:
            folder = str(tmp_path / implementation)
            api.train(overrides=from_folder(settings, few, output_dir=folder, model__implementation=implementation))
            losses[implementation] = [line["loss"] for line in read_metrics(Path(folder) / "metrics.jsonl")]
        assert losses["native"] == pytest.approx(losses["fallback"], rel=1e-5)


@pytest.mark.parametrize("family", get_args(FamilyName))
class TestNewModel:
    SIZES: dict[str, Any] = {"model__width": 128, "model__heads": 4, "model__init_std": 0.05}

    def new(self, settings: Settings, family: str, **changes: Any) -> Model:
        return assembled(settings(model__family=family, **(self.SIZES | changes))).model

    @pytest.mark.parametrize("tied", [True, False])
    def test_it_is_the_model_that_transformers_builds_from_its_config(
        self, settings: Settings, family: str, tied: bool, tmp_path: Path
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        model = self.new(settings, family, model__tied=tied)
        model.save(tmp_path)
        config = AutoConfig.from_pretrained(str(tmp_path))
        assert (config.model_type, config.architectures) == (family, [FAMILIES[family].architecture])
        with torch.device("meta"):
            theirs = AutoModelForCausalLM.from_config(config)
        shapes = {name: parameter.shape for name, parameter in theirs.named_parameters()}
        assert {name: tensor.shape for name, tensor in load_file(tmp_path / WEIGHTS).items()} == shapes
        count = sum(parameter.numel() for parameter in theirs.parameters())
        assert sum(parameter.numel() for parameter in model.module.parameters()) == count
        assert ("lm_head.weight" in shapes) == (not tied)
        ids = torch.arange(30)[None]
        theirs = AutoModelForCausalLM.from_pretrained(str(tmp_path), attn_implementation="eager").eval()
        with torch.no_grad():
            assert (theirs(ids).logits - model.module(ids, ids)).abs().max().item() <= 1e-5

    def test_matrices_have_the_spread_and_norms_are_neutral(self, settings: Settings, family: str) -> None:
        model = self.new(settings, family)
        neutral = 0.0 if family.startswith("gemma") else 1.0
        seen = set()
        for name, piece in model.module.pieces().items():
            if piece.dim() == 1:
                assert (piece == (0.0 if name.endswith("bias") else neutral)).all(), name
                continue
            writes = name.endswith(("attention.wo.weight", "mlp.down.weight"))
            seen.add(writes)
            # Two layers, each writing twice.
            assert piece.std().item() == pytest.approx(0.05 / 2 if writes else 0.05, rel=0.03), name
            assert abs(piece.mean().item()) < 0.05 * 5 / math.sqrt(piece.numel()), name
        assert seen == {True, False}

    def test_a_seed_gives_the_same_weights_in_every_layout(self, settings: Settings, family: str) -> None:
        def weights(**changes: Any) -> dict[str, Tensor]:
            return self.new(settings, family, **changes).disk_tensors()

        plain = weights()
        for fused in ("qkv", "gate_up", "qkv,gate_up"):
            other = weights(model__fused=fused)
            assert other.keys() == plain.keys()
            assert all(torch.equal(other[name], plain[name]) for name in plain), fused
        matrices = [name for name, tensor in plain.items() if tensor.dim() > 1]
        another = weights(training__seed=1)
        assert not [name for name in matrices if torch.equal(another[name], plain[name])]

    def test_depth_is_enough(self, settings: Settings, family: str) -> None:
        given = settings(model__family=family, model__depth=1)
        run = assembled({key: value for key, value in given.items() if key not in ("model.width", "model.heads")})
        config = run.model.module.config
        assert (config.depth, config.width, config.heads, config.head_size) == (1, 64, 1, 64)
        assert config.mlp_width == (256 if family == "gpt2" else 192)
        assert run.model.hf_config["eos_token_id"] == run.tokenizer.hf.eos_token_id
        matrix = run.model.module.layers["0"].attention.wq.weight
        assert matrix.std().item() == pytest.approx(math.sqrt(2 / (5 * 64)), rel=0.05)


class TestNewModelRefusals:
    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"model__width": 100, "model__heads": 3}, "heads that do: 1, 2, 5, 10, 25, 50"),
            ({"model__heads": 4, "model__kv_heads": 3}, "values that do: 1, 2, 4"),
            ({"model__family": "gpt2", "model__kv_heads": 2}, "gpt2 has as many key/value heads as heads"),
            ({"model__family": "gpt3"}, "gpt2"),
            ({"model__family": "gpt2", "model__rope_theta": 500.0}, "model.rope_theta"),
            ({"model__family": "gemma3_text", "model__rope_theta": 500.0}, "model.rope_theta"),
            ({"model__implementation": "fallback"}, "a new model is native"),
        ],
        ids=str,
    )
    def test_sizes_that_cannot_be_are_answered_with_those_that_can(
        self,
        torchstone: Command,  # noqa: F811
        settings: Settings,
        changes: dict[str, Any],
        said: str,
    ) -> None:
        code, _, err = torchstone("train", *flags(settings(**changes)))
        assert code == 2, err
        assert said in err


class TestOptimizerSetup:
    def decayed(self, run: Run) -> set[str]:
        decay = {id(p): group["weight_decay"] for group in run.optimizer.param_groups for p in group["params"]}
        named = dict(run.model.module.named_parameters())
        assert len(decay) == len(named)
        assert set(decay.values()) == {0.25, 0.0}
        return {name for name, parameter in named.items() if decay[id(parameter)] == 0.25}

    @pytest.mark.parametrize("family", get_args(FamilyName))
    def test_matrices_of_layers_and_an_untied_head_decay(self, settings: Settings, family: str) -> None:
        run = assembled(settings(model__family=family, model__tied=False, optim__weight_decay=0.25))
        names = [name for name, _ in run.model.module.named_parameters()]
        wanted = {name for name in names if re.search(r"\.(wq|wk|wv|wo|gate|up|down)\.weight$|^head\.weight$", name)}
        assert self.decayed(run) == wanted
        assert len(wanted) == 1 + 2 * (6 if family == "gpt2" else 7)
        assert ("pos_embed.weight" in names) == (family == "gpt2")

    def test_fused_matrices_decay_as_their_parts_do(self, settings: Settings) -> None:
        run = assembled(settings(model__family="qwen2", model__fused="qkv,gate_up", optim__weight_decay=0.25))
        assert self.decayed(run) == {
            f"layers.{n}.{name}.weight" for n in (0, 1) for name in ("attention.wqkv", "attention.wo", "mlp.gate_up",
                                                                    "mlp.down")
        }  # fmt: skip

    @pytest.mark.parametrize("tied", [True, False])
    def test_models_of_transformers_decay_by_the_same_rule(
        self, settings: Settings, tmp_path: Path, tokenizer: Tokenizer, tied: bool
    ) -> None:
        folder = make_llama(tmp_path / "model", tokenizer, tie_word_embeddings=tied, attention_bias=True)
        given = from_folder(settings, folder, optim__weight_decay=0.25, model__implementation="fallback")
        found = {name.removeprefix("hf.") for name in self.decayed(assembled(given))}
        assert found == {
            name for name in load_file(folder / WEIGHTS) if re.search(r"_proj\.weight$|^lm_head\.weight$", name)
        }
        assert ("lm_head.weight" in found) == (not tied)

    def test_learned_positions_decay_nowhere(self, settings: Settings, tmp_path: Path, tokenizer: Tokenizer) -> None:
        folder = make_model(tmp_path / "model", "gpt2", "plain", vocab_size=448)
        tokenizer.save(folder)
        given = from_folder(settings, folder, optim__weight_decay=0.25)
        native = self.decayed(assembled(given))
        assert "pos_embed.weight" not in native
        fallback = self.decayed(assembled(given | {"model.implementation": "fallback"}))
        assert {name.removeprefix("hf.") for name in fallback} == {
            f"transformer.h.{n}.{name}.weight" for n in range(3)
            for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        }  # fmt: skip

    def test_the_schedule_of_a_run_from_its_first_step_to_its_last(self, settings: Settings) -> None:
        given = settings(
            training__max_steps=8, optim__warmup_steps=3, optim__schedule="cosine", optim__min_lr_ratio=0.1,
            optim__learning_rate=0.006, optim__betas="0.8,0.9", optim__eps=1e-5,
        )  # fmt: skip
        run = assembled(given)
        for group in run.optimizer.param_groups:
            assert (group["betas"], group["eps"]) == ((0.8, 0.9), 1e-5)
        api.train(overrides=given)
        rates = [line["lr"] for line in read_metrics(Path(given["output_dir"]) / "metrics.jsonl")]
        assert rates[:4] == pytest.approx([0.002, 0.004, 0.006, 0.006], rel=1e-12)
        decay = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * n / 5)) for n in range(5)]
        assert rates[3:] == pytest.approx([0.006 * share for share in decay], rel=1e-12)

    def test_a_rate_of_zero_at_the_first_step_moves_nothing(self, settings: Settings, tmp_path: Path) -> None:
        """Decay too goes with the rate, so a run at rate zero ends with the weights it began with."""
        given = settings(optim__learning_rate=0.0, training__max_steps=2, optim__weight_decay=0.5)
        before = assembled(given | {"output_dir": str(tmp_path / "other")}).model.disk_tensors()
        outcome = api.train(overrides=given)
        assert outcome.checkpoint is not None
        after = load_file(outcome.checkpoint / WEIGHTS)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


class TestNotes:
    def said(self, capsys: pytest.CaptureFixture[str], overrides: dict[str, Any]) -> list[str]:
        capsys.readouterr()
        api.train(overrides=overrides | {"observe.console": "lines", "training.max_steps": 1})
        return capsys.readouterr().err.splitlines()

    @pytest.mark.parametrize(
        ("changes", "line"),
        [
            ({}, "attention: sdpa (on a CPU)"),
            ({"model__attention": "eager"}, "attention: eager (as asked for)"),
            ({"model__family": "gemma2"}, "attention: eager (sdpa has no soft cap)"),
            (
                {"model__family": "gemma2", "model__attention": "sdpa"},
                "attention: eager (sdpa was asked for, but has no soft cap, which this model needs)",
            ),
        ],
        ids=str,
    )
    def test_the_kernel_of_attention_and_why(
        self, settings: Settings, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], line: str
    ) -> None:
        lines = self.said(capsys, settings(**changes))
        assert [found for found in lines if " | attention: " in found] == [f"GPU0:INFO | {line}"]

    def test_dropout_that_is_not_computed(
        self, settings: Settings, tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = make_llama(tmp_path / "model", tokenizer, attention_dropout=0.1)
        lines = self.said(capsys, from_folder(settings, folder))
        wanted = (
            "GPU0:WARNING | config.json asks for dropout (attention_dropout 0.1): the native decoder trains without"
        )
        assert lines.count(wanted) == 1

    def test_a_model_that_runs_in_transformers_says_so_and_why(
        self, settings: Settings, tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = make_llama(tmp_path / "model", tokenizer, hidden_act="relu")
        lines = self.said(capsys, from_folder(settings, folder))
        told = [line for line in lines if "runs in Transformers" in line]
        assert len(told) == 1
        assert "config.json: the activation 'relu' is not computed by the native decoder" in told[0]
        given = from_folder(settings, folder, model__implementation="fallback", output_dir=str(tmp_path / "asked"))
        assert [line for line in self.said(capsys, given) if "runs in Transformers (as asked for)" in line]

    @pytest.mark.parametrize("attention", ["flash", "flex", "flash-attn", "fa3"])
    @pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without CUDA refuses")
    def test_kernels_that_cannot_run_here_are_refused_with_those_that_can(
        self,
        torchstone: Command,  # noqa: F811
        settings: Settings,
        attention: str,
    ) -> None:
        code, _, err = torchstone("train", *flags(settings(model__attention=attention)))
        assert code == 2
        assert f"model.attention {attention}: " in err
        assert "what works here: auto, sdpa, eager" in err

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"model__implementation": "native"}, "model_type 'stablelm' is not a family of the native decoder"),
            ({"model__family": "qwen3"}, "model.family shapes a new model, but model.path loads one"),
            ({"model__recompute": "selective"}, "model.recompute selective is for the native decoder"),
            ({"model__fused": "qkv"}, "model.fused is for the native decoder"),
            ({"model__compile": "block"}, "model.compile is for the native decoder"),
            ({"model__attention": "flex"}, "take sdpa and eager"),
        ],
        ids=str,
    )
    def test_what_a_model_of_transformers_does_not_take(
        self,
        torchstone: Command,  # noqa: F811
        settings: Settings,
        tmp_path: Path,
        tokenizer: Tokenizer,
        changes: dict[str, Any],
        said: str,
    ) -> None:
        from test_model_folders import save_model

        folder = save_model(tmp_path / "model", "stablelm", vocab_size=448, num_key_value_heads=2)
        tokenizer.save(folder)
        code, _, err = torchstone("train", *flags(from_folder(settings, folder, **changes)))
        assert code == 2, err
        assert said in err


class TestPaddingRow:
    """Transformers leaves the row of pad_token_id out of the embedding's gradient; so do both implementations here."""

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_it_is_the_folder_s_and_stays_so_when_a_run_goes_on(
        self,
        settings: Settings,
        tmp_path: Path,
        tokenizer: Tokenizer,
        implementation: Any,
        chat_file: Path,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        """The folder has no pad_token_id, the tokenizer's is in every text: the row is trained, before and after."""
        folder = make_llama(tmp_path / "model", tokenizer, pad_token_id=None)
        pad = tokenizer.hf.pad_token_id
        given = {key: value for key, value in settings().items() if not key.startswith("model.")} | {
            "model.path": str(folder), "model.implementation": implementation, "data.path": str(chat_file),
            "training.max_steps": 4,
        }  # fmt: skip
        whole = api.train(load_config(overrides=given | {"output_dir": str(tmp_path / "whole")}))
        halves = given | {"output_dir": str(tmp_path / "halves"), "optim.schedule": "constant"}
        api.train(load_config(overrides=halves | {"training.max_steps": 2}))
        again = api.train(load_config(overrides=halves))
        straight = api.train(load_config(overrides=halves | {"output_dir": str(tmp_path / "straight")}))
        assert (again.checkpoint / WEIGHTS).read_bytes() == (straight.checkpoint / WEIGHTS).read_bytes()
        assert json.loads((whole.checkpoint / "config.json").read_text())["pad_token_id"] == pad
        assert json.loads((whole.checkpoint / "state.json").read_text())["padding_row"] is None
        assert "occurs in text and is the model's pad_token_id" not in capfd.readouterr().err

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_it_gets_no_gradient_through_the_input(self, tmp_path: Path, implementation: Any) -> None:
        folder = make_model(tmp_path, "llama", "pad in text")
        model = load_model(folder, CPU, execution=Execution(implementation=implementation))
        assert model.padding_row == 3
        model.module(torch.tensor([[3, 4, 3, 5]]), torch.arange(4)[None]).square().sum().backward()
        roles = model.roles()
        (gradient,) = [p.grad for name, p in model.module.named_parameters() if roles.get(name) == "embed"]
        assert not gradient[3].any()
        assert gradient[4].any()

    def test_a_padding_that_occurs_in_text_is_said(
        self, settings: Settings, tmp_path: Path, tokenizer: Tokenizer, capfd: pytest.CaptureFixture[str]
    ) -> None:
        folder = make_llama(tmp_path / "model", tokenizer, pad_token_id=tokenizer.eos_id)
        given = {key: value for key, value in settings().items() if not key.startswith("model.")}
        api.train(load_config(overrides=given | {"model.path": str(folder), "training.max_steps": 1}))
        assert f"token {tokenizer.eos_id} occurs in text and is the model's pad_token_id" in capfd.readouterr().err


class TestCodeInTheFolder:
    """A folder of a known family that brings code along (auto_map), as published Phi-3 folders do."""

    @pytest.fixture
    def folder(self, tmp_path: Path, tokenizer: Tokenizer) -> Path:
        folder = make_llama(tmp_path / "model", tokenizer)
        config = json.loads((folder / "config.json").read_text())
        config["auto_map"] = {"AutoModelForCausalLM": "mine.Mine"}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "mine.py").write_text(
            "from transformers import LlamaForCausalLM\n"
            "class Mine(LlamaForCausalLM):\n"
            "    def forward(self, *args, **kwargs):\n"
            "        out = super().forward(*args, **kwargs)\n"
            "        out.logits = out.logits * 10\n"
            "        return out\n"
        )
        return folder

    def test_untrusted_it_is_not_run_and_that_is_said(self, folder: Path, tmp_path: Path) -> None:
        model = load_model(folder, CPU)
        assert model.implementation == "native"
        assert "config.json names code of its own (mine.Mine), which is not run" in model.warnings
        (tmp_path / "out").mkdir()
        model.save(tmp_path / "out")
        assert "auto_map" not in json.loads((tmp_path / "out/config.json").read_text())

    def test_trusted_it_is_what_is_trained_and_exported(
        self, folder: Path, settings: Settings, tmp_path: Path, torchstone: Command  # noqa: F811
    ) -> None:  # fmt: skip
        given = {key: value for key, value in settings().items() if not key.startswith("model.")}
        given |= {"model.path": str(folder), "model.trust_remote_code": True, "training.max_steps": 1}
        outcome = api.train(load_config(overrides=given))
        plain = api.train(
            load_config(overrides=given | {"model.trust_remote_code": False, "output_dir": str(tmp_path / "p")})
        )
        assert outcome.loss != plain.loss
        code, _, err = torchstone("evaluate", given["output_dir"], "--data", given["data.path"])
        assert (code, "which is not run unasked" in err) == (2, True)
        found = api.export(given["output_dir"], tmp_path / "out", trust_remote_code=True)
        assert (found["verified"], (tmp_path / "out/mine.py").is_file()) == (True, True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"rms_norm_epz": 1e-3},
            "rms_norm_epz is no key of this model, and has no effect (did you mean rms_norm_eps?)",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "rope_tetha": 5.0}},
            "did you mean rope_theta?",
        ),
        ({"my_own_key": 1}, None),
    ],
    ids=["a key", "a key of rope", "another tool's key"],
)
def test_a_misspelt_key_of_config_json_is_said(tmp_path: Path, change: dict[str, Any], said: str | None) -> None:
    folder = make_llama(tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    warnings = load_model(folder, CPU).warnings
    assert (len(warnings) == 1 and said in warnings[0]) if said else not warnings


def test_compiling_without_a_compiler_is_refused_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", (None, str(tmp_path / "no-such-compiler")))
    with pytest.raises(UsageError, match=r"model\.compile needs a C\+\+ compiler on a CPU"):
        check_folder(make_llama(tmp_path / "model"), CPU, torch.float32, Execution(compile="block"))

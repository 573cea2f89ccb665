"""A model ready to train: aligned with its tokenizer or initialized, its optimizer and schedule, and what is logged."""

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

from test_model_folders import make_hf_folder, set_config, without_new_model
from tiny import flags, make_llama
from tiny_families import make_model
from torchstone import api
from torchstone.checkpoint.model_folder import check_model_folder, load_model
from torchstone.checkpoint.save import hf_state_dict, save_model, save_tokenizer
from torchstone.config.load import load_config
from torchstone.config.schema import FamilyName
from torchstone.data.tokenize import Tokenizer
from torchstone.errors import UsageError
from torchstone.models.decoder import Decoder
from torchstone.models.execution import ExecutionOptions
from torchstone.models.families import FAMILIES
from torchstone.models.model import Model
from torchstone.observe.console import Console
from torchstone.observe.metrics import read_metrics
from torchstone.training.run import Run
from torchstone.training.setup import build_run

CPU = torch.device("cpu")
Settings = Callable[..., dict[str, Any]]
Command = Callable[..., tuple[int, str, str]]
IMPLEMENTATIONS = ("native", "fallback")
# Fewer embeddings than the demo tokenizer has tokens.
SMALL_VOCABULARY = 401
VOCABULARY, WIDTH = 32000, 8
WIDE_VOCABULARY = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
WEIGHTS, GENERATION_CONFIG = "model.safetensors", "generation_config.json"


def from_folder(settings: Settings, folder: Path, **changes: Any) -> dict[str, Any]:
    """Overrides for a run that starts from `folder`, with its tokenizer."""
    return without_new_model(settings(model__path=str(folder), **changes))


def make_run(overrides: dict[str, Any]) -> Run:
    Path(overrides["output_dir"]).mkdir(exist_ok=True)
    return build_run(load_config(None, None, overrides), Console("quiet"), CPU)


def embedding_and_head(model: Model) -> dict[str, nn.Parameter]:
    if isinstance(model.module, Decoder):
        return {"embedding": model.module.tok_embed.weight, "head": model.module.head.weight}
    hf = model.module.hf
    return {"embedding": hf.get_input_embeddings().weight, "head": hf.get_output_embeddings().weight}


class TestModelTokenizerAlignment:
    @pytest.fixture(scope="class")
    @classmethod
    def wide(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
        """Models with 32000 embeddings, by whether the head is tied."""
        return {
            tied: make_llama(tmp_path_factory.mktemp("wide"), tie_word_embeddings=tied, **WIDE_VOCABULARY)
            for tied in (False, True)
        }

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize(("tokens", "size"), [(32005, 32008), (32008, 32008), (32009, 32016)])
    def test_embeddings_grow_to_a_multiple_of_eight(
        self, wide: dict[bool, Path], implementation: Any, tokens: int, size: int
    ) -> None:
        options = ExecutionOptions(implementation=implementation)
        model = load_model(wide[False], CPU, execution=options, tokenizer_size=tokens)
        (warning,) = model.warnings
        assert warning.startswith(
            f"the tokenizer has {tokens} tokens, the model has 32000 embeddings: resized to {size}"
        )
        assert model.vocab_size == model.hf_config["vocab_size"] == size
        assert {name: len(weight) for name, weight in embedding_and_head(model).items()} == {
            "embedding": size, "head": size,
        }  # fmt: skip
        with torch.no_grad():
            assert model.module(torch.tensor([[tokens - 1, 1]]), torch.arange(2)[None]).shape == (1, 2, size)

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize("tokens", [32000, 8])
    def test_a_smaller_tokenizer_changes_nothing(
        self, wide: dict[bool, Path], implementation: Any, tokens: int
    ) -> None:
        options = ExecutionOptions(implementation=implementation)
        before = hf_state_dict(load_model(wide[True], CPU, execution=options))
        model = load_model(wide[True], CPU, execution=options, tokenizer_size=tokens)
        assert (model.warnings, model.vocab_size) == ([], VOCABULARY)
        assert all(torch.equal(before[name], tensor) for name, tensor in hf_state_dict(model).items())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_old_embeddings_stay_and_new_ones_are_their_mean_in_fp32(
        self, wide: dict[bool, Path], implementation: Any, tied: bool, dtype: torch.dtype
    ) -> None:
        options = ExecutionOptions(implementation=implementation)
        model = load_model(wide[tied], CPU, dtype, options)
        before, names = embedding_and_head(model), [name for name, _ in model.module.named_parameters()]
        model = load_model(wide[tied], CPU, dtype, options, tokenizer_size=32005)
        after = embedding_and_head(model)
        assert (after["head"] is after["embedding"]) == tied
        assert [name for name, _ in model.module.named_parameters()] == names
        for name, weight in after.items():
            assert (weight.dtype, weight.requires_grad) == (dtype, True)
            assert torch.equal(weight[:VOCABULARY], before[name])
            mean = before[name].double().mean(dim=0)
            epsilon = 2.0**-24 if dtype == torch.float32 else 2.0**-9
            assert ((weight[VOCABULARY:].double() - mean).abs() <= 2 * epsilon * mean.abs() + 1e-8).all()
            assert weight.shape == (32008, WIDTH)
        if not tied:
            assert not torch.equal(after["head"][VOCABULARY:], after["embedding"][VOCABULARY:])

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_special_tokens_become_the_tokenizers(self, tmp_path: Path, implementation: Any) -> None:
        folder = make_model(tmp_path, "llama", "grouped", pad_token_id=1, bos_token_id=2, eos_token_id=[5, 7])
        model = load_model(folder, CPU, execution=ExecutionOptions(implementation=implementation))
        assert model.align_special_tokens({"pad_token_id": 4, "bos_token_id": 2, "eos_token_id": 7}) == [
            "pad_token_id: 1 in the model is now 4, as in the tokenizer",
            "generation_config.json: pad_token_id 1 is now 4",
        ]
        save_model(model, tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        assert [config[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")] == [4, 2, [5, 7]]
        (note, *_) = model.align_special_tokens({"pad_token_id": 4, "bos_token_id": None, "eos_token_id": 8})
        assert note == "eos_token_id: [5, 7] in the model is now 8, as in the tokenizer"
        assert model.hf_config["bos_token_id"] == 2, "the tokenizer has no bos token: the model keeps its own"

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize(("eos", "is_kept"), [(7, True), ([3, 7], True), (9, False)])
    def test_generation_config_is_kept_byte_for_byte_unless_ids_change(
        self, tmp_path: Path, implementation: Any, eos: Any, is_kept: bool, tokenizer: Tokenizer
    ) -> None:
        folder = make_model(tmp_path / "in", "llama", "grouped", eos_token_id=eos)
        content = b'{\n  "eos_token_id": 7,\n "temperature":0.25, "do_sample": true, "top_p": 0.5}\n'
        (folder / GENERATION_CONFIG).write_bytes(content)
        model = load_model(folder, CPU, execution=ExecutionOptions(implementation=implementation))
        model.align_special_tokens({"eos_token_id": 7}, stop_ids=[7] if is_kept else [7, 11])
        (tmp_path / "out").mkdir()
        save_model(model, tmp_path / "out")
        save_tokenizer(tokenizer, tmp_path / "out")
        saved = (tmp_path / "out" / GENERATION_CONFIG).read_bytes()
        assert (saved == content) == is_kept
        if not is_kept:
            assert json.loads(saved) == json.loads(content) | {"eos_token_id": [7, 11]}

    def test_bos_of_another_tokenizer_does_not_become_a_stop_token(self, tmp_path: Path) -> None:
        """Id 2 ended an answer in the model's own tokenizer, and begins every text in the new one."""
        folder = make_model(tmp_path, "llama", "grouped", eos_token_id=0, bos_token_id=None)
        (folder / GENERATION_CONFIG).write_text('{"eos_token_id": [0, 2, 6]}')
        model = load_model(folder, CPU)
        model.align_special_tokens({"bos_token_id": 2, "eos_token_id": 0}, stop_ids=[0, 4])
        assert json.loads(model.generation_config or b"")["eos_token_id"] == [0, 6, 4]

    def test_a_tokenizer_that_is_not_the_models_is_noticed(
        self, settings: Settings, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = make_llama(tmp_path / "model", tokenizer)
        shutil.copytree(tokenizer.path, tmp_path / "other")
        content = json.loads((tmp_path / "other/tokenizer.json").read_text())
        vocabulary = content["model"]["vocab"]
        vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
        (tmp_path / "other/tokenizer.json").write_text(json.dumps(content))
        overrides = from_folder(settings, folder, training__max_steps=1, observe__console="lines")
        api.train(overrides=overrides)
        api.train(
            overrides=overrides | {"model.tokenizer": str(tmp_path / "other"), "output_dir": str(tmp_path / "r2")}
        )
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "is not the tokenizer of the model" in line]
        assert f"{tmp_path}/other is not the tokenizer of the model: 2 of the model's " in line

    @pytest.fixture(scope="class")
    @classmethod
    def small(cls, tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
        """A model with fewer embeddings than its tokenizer has tokens, and other special ids."""
        assert tokenizer.size > SMALL_VOCABULARY
        special_ids = {"bos_token_id": 3, "eos_token_id": 17, "pad_token_id": 9}
        return make_llama(tmp_path_factory.mktemp("small"), tokenizer, vocab_size=SMALL_VOCABULARY, **special_ids)

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_a_run_logs_what_it_changed_and_its_export_has_it(
        self, small: Path, settings: Settings, tokenizer: Tokenizer, implementation: str, tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        from transformers import AutoModelForCausalLM, AutoTokenizer

        size = 8 * math.ceil(tokenizer.size / 8)
        overrides = from_folder(
            settings, small, training__max_steps=2, observe__console="lines", model__implementation=implementation
        )
        result = api.train(overrides=overrides)
        err = capsys.readouterr().err
        note = (
            f"the tokenizer has {tokenizer.size} tokens, the model has {SMALL_VOCABULARY} embeddings: resized to {size}"
        )
        assert err.count(f"rank0:WARNING | {note}") == 1
        change = f"eos_token_id: 17 in the model is now {tokenizer.hf.eos_token_id}, as in the tokenizer"
        # Nobody has to do anything about it.
        assert f"rank0:INFO | {change}" in err
        api.export(str(result.checkpoint), tmp_path / "out")
        model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"))
        exported = AutoTokenizer.from_pretrained(str(tmp_path / "out"))
        assert model.config.vocab_size == size == model.get_input_embeddings().weight.shape[0]
        for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
            idx = getattr(exported, key)
            assert idx is None or getattr(model.config, key) == idx, key
        assert model.generation_config.eos_token_id in (tokenizer.stop_ids, tokenizer.stop_ids[0])
        assert torch.isfinite(model(torch.tensor([[tokenizer.size - 1, 0]])).logits).all()

    def test_export_does_not_resize(self, small: Path, tmp_path: Path) -> None:
        api.export(str(small), tmp_path / "out")
        assert (tmp_path / "out" / WEIGHTS).read_bytes() == (small / WEIGHTS).read_bytes()

    @pytest.mark.parametrize("command", ["evaluate", "chat"])
    def test_commands_that_do_not_train_refuse_a_tokenizer_that_is_too_large(
        self, torchstone: Command, small: Path, chat_file: Path, tmp_path: Path, command: str
    ) -> None:
        args = {"evaluate": ["--data", chat_file, "--cache-dir", tmp_path], "chat": ["--prompt", "What is 2 + 2?"]}
        code, _, err = torchstone(command, small, *args[command])
        assert code == 2
        assert f"the model has only {SMALL_VOCABULARY} embeddings" in err

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_a_resized_run_resumes_bit_for_bit(
        self, small: Path, settings: Settings, implementation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        overrides = from_folder(
            settings, small, training__max_steps=4, checkpoint__every_steps=2, model__implementation=implementation,
            output_dir=str(tmp_path / "uninterrupted"),
        )  # fmt: skip
        api.train(overrides=overrides)
        resumed = Path(shutil.copytree(tmp_path / "uninterrupted", tmp_path / "resumed"))
        shutil.rmtree(resumed / "checkpoints/step-00000004")
        capsys.readouterr()
        api.train(overrides=overrides | {"output_dir": str(resumed)})
        assert "embeddings: resized" not in capsys.readouterr().err, "the checkpoint is resized already"
        runs = (tmp_path / "uninterrupted", resumed)
        one, two = ([(line["loss"], line["grad_norm"]) for line in read_metrics(r / "metrics.jsonl")] for r in runs)
        assert one == two
        for file in (WEIGHTS, "optimizer.safetensors"):
            one, two = ((run / "checkpoints/step-00000004" / file).read_bytes() for run in runs)
            assert one == two

    def test_both_implementations_resize_to_the_same_run(self, small: Path, settings: Settings, tmp_path: Path) -> None:
        losses = {}
        for implementation in IMPLEMENTATIONS:
            folder = str(tmp_path / implementation)
            api.train(overrides=from_folder(settings, small, output_dir=folder, model__implementation=implementation))
            losses[implementation] = [line["loss"] for line in read_metrics(Path(folder) / "metrics.jsonl")]
        assert losses["native"] == pytest.approx(losses["fallback"], rel=1e-5)


@pytest.mark.parametrize("family", get_args(FamilyName))
class TestNewModel:
    SIZES: dict[str, Any] = {"model__width": 128, "model__heads": 4, "model__init_std": 0.05}

    def make(self, settings: Settings, family: str, **changes: Any) -> Model:
        return make_run(settings(model__family=family, **(self.SIZES | changes))).model

    @pytest.mark.parametrize("tied", [True, False])
    def test_it_is_the_model_that_transformers_builds_from_its_config(
        self, settings: Settings, family: str, tied: bool, tmp_path: Path
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        model = self.make(settings, family, model__tied=tied)
        save_model(model, tmp_path)
        config = AutoConfig.from_pretrained(str(tmp_path))
        assert (config.model_type, config.architectures) == (family, [FAMILIES[family].architecture])
        with torch.device("meta"):
            reference = AutoModelForCausalLM.from_config(config)
        shapes = {name: parameter.shape for name, parameter in reference.named_parameters()}
        assert {name: tensor.shape for name, tensor in load_file(tmp_path / WEIGHTS).items()} == shapes
        count = sum(parameter.numel() for parameter in reference.parameters())
        assert sum(parameter.numel() for parameter in model.module.parameters()) == count
        assert ("lm_head.weight" in shapes) == (not tied)
        ids = torch.arange(30)[None]
        reference = AutoModelForCausalLM.from_pretrained(str(tmp_path), attn_implementation="eager").eval()
        with torch.no_grad():
            assert (reference(ids).logits - model.module(ids, ids)).abs().max().item() <= 1e-5

    def test_matrices_have_the_std_and_norms_are_neutral(self, settings: Settings, family: str) -> None:
        neutral = 0.0 if family.startswith("gemma") else 1.0
        stds = set()
        for name, parameter in self.make(settings, family).module.unfused_parameters().items():
            if parameter.dim() == 1:
                assert (parameter == (0.0 if name.endswith("bias") else neutral)).all(), name
                continue
            # Two layers with two residual projections each: 0.05 / sqrt(4).
            std = 0.05 / 2 if name.endswith(("attention.wo.weight", "mlp.down.weight")) else 0.05
            stds.add(std)
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(parameter.mean().item()) < 0.05 * 5 / math.sqrt(parameter.numel()), name
        assert stds == {0.05, 0.025}

    def test_weights_depend_on_the_seed_and_not_on_fusion(self, settings: Settings, family: str) -> None:
        def weights(**changes: Any) -> dict[str, Tensor]:
            return hf_state_dict(self.make(settings, family, **changes))

        plain = weights()
        for fused in ("qkv", "gate_up", "qkv,gate_up"):
            other = weights(model__fused=fused)
            assert other.keys() == plain.keys()
            assert all(torch.equal(other[name], plain[name]) for name in plain), fused
        matrices = [tensor for tensor in plain.values() if tensor.dim() > 1]
        other_seed = [tensor for tensor in weights(training__seed=1).values() if tensor.dim() > 1]
        assert len({tensor.flatten()[0].item() for tensor in matrices + other_seed}) == 2 * len(matrices)

    def test_depth_alone_sets_the_sizes(self, settings: Settings, family: str) -> None:
        overrides = settings(model__family=family, model__depth=1)
        run = make_run({key: value for key, value in overrides.items() if key not in ("model.width", "model.heads")})
        config = run.model.module.config
        assert (config.depth, config.width, config.heads, config.head_dim) == (1, 64, 1, 64)
        assert config.mlp_width == (256 if family == "gpt2" else 192)
        assert run.model.hf_config["eos_token_id"] == run.tokenizer.hf.eos_token_id
        weight = run.model.module.layers["0"].attention.wq.weight
        assert weight.std().item() == pytest.approx(math.sqrt(2 / (5 * 64)), rel=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__width": 100, "model__heads": 3}, "use --model.heads 1, 2, 5, 10, 25, 50"),
        ({"model__heads": 4, "model__kv_heads": 3}, "use --model.kv_heads 1, 2, 4"),
        ({"model__family": "gpt2", "model__kv_heads": 2}, "family gpt2 has no grouped key/value heads"),
        ({"model__family": "gpt3"}, "gpt2"),
        ({"model__width": 10**8, "model__heads": 7}, "use --model.heads 1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 40"),
        ({"model__width": 2**26, "model__heads": 2**25, "model__kv_heads": 3}, "use --model.kv_heads 1, 2, 4, 8, 16"),
        ({"model__family": "gpt2", "model__rope_theta": 500.0}, "model.rope_theta does not apply to family gpt2"),
        ({"model__family": "gemma3_text", "model__rope_theta": 500.0}, "model.rope_theta does not apply"),
        ({"model__implementation": "fallback"}, "a new model is native"),
        ({"system__device_id": 3}, "system.device_id is 3, but the device is the CPU"),
    ],
    ids=str,
)
def test_an_impossible_new_model_is_refused_with_what_is_possible(
    torchstone: Command, settings: Settings, changes: dict[str, Any], message: str
) -> None:
    code, _, err = torchstone("train", *flags(settings(**changes)))
    assert code == 2, err
    assert message in err


class TestOptimizerSetup:
    def decayed(self, run: Run) -> set[str]:
        """The parameters with weight decay, which must be 0.25; all others must have none."""
        decay = {id(p): group["weight_decay"] for group in run.optimizer.param_groups for p in group["params"]}
        parameters = dict(run.model.module.named_parameters())
        assert len(decay) == len(parameters)
        assert set(decay.values()) == {0.25, 0.0}
        return {name for name, parameter in parameters.items() if decay[id(parameter)] == 0.25}

    @pytest.mark.parametrize("family", get_args(FamilyName))
    def test_layer_matrices_and_an_untied_head_decay(self, settings: Settings, family: str) -> None:
        run = make_run(settings(model__family=family, model__tied=False, optim__weight_decay=0.25))
        names = [name for name, _ in run.model.module.named_parameters()]
        expected = {name for name in names if re.search(r"\.(wq|wk|wv|wo|gate|up|down)\.weight$|^head\.weight$", name)}
        assert self.decayed(run) == expected
        assert len(expected) == 1 + 2 * (6 if family == "gpt2" else 7)
        assert ("pos_embed.weight" in names) == (family == "gpt2")

    def test_fused_matrices_decay(self, settings: Settings) -> None:
        run = make_run(settings(model__family="qwen2", model__fused="qkv,gate_up", optim__weight_decay=0.25))
        matrices = ("attention.wqkv", "attention.wo", "mlp.gate_up", "mlp.down")
        assert self.decayed(run) == {f"layers.{n}.{name}.weight" for n in (0, 1) for name in matrices}

    @pytest.mark.parametrize("tied", [True, False])
    def test_the_fallback_decays_the_same_weights(
        self, settings: Settings, tmp_path: Path, tokenizer: Tokenizer, tied: bool
    ) -> None:
        folder = make_llama(tmp_path / "model", tokenizer, tie_word_embeddings=tied, attention_bias=True)
        overrides = from_folder(settings, folder, optim__weight_decay=0.25, model__implementation="fallback")
        names = {name.removeprefix("hf.") for name in self.decayed(make_run(overrides))}
        assert names == {
            name for name in load_file(folder / WEIGHTS) if re.search(r"_proj\.weight$|^lm_head\.weight$", name)
        }
        assert ("lm_head.weight" in names) == (not tied)

    def test_learned_positions_do_not_decay(self, settings: Settings, tmp_path: Path, tokenizer: Tokenizer) -> None:
        folder = make_model(tmp_path / "model", "gpt2", "plain", vocab_size=448)
        tokenizer.save(folder)
        overrides = from_folder(settings, folder, optim__weight_decay=0.25)
        assert "pos_embed.weight" not in self.decayed(make_run(overrides))
        names = self.decayed(make_run(overrides | {"model.implementation": "fallback"}))
        matrices = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        assert names == {f"hf.transformer.h.{n}.{name}.weight" for n in range(3) for name in matrices}

    def test_the_learning_rate_of_every_step(self, settings: Settings) -> None:
        overrides = settings(
            training__max_steps=8, optim__warmup_steps=3, optim__schedule="cosine", optim__min_lr_ratio=0.1,
            optim__learning_rate=0.006, optim__betas="0.8,0.9", optim__eps=1e-5,
        )  # fmt: skip
        for group in make_run(overrides).optimizer.param_groups:
            assert (group["betas"], group["eps"]) == ((0.8, 0.9), 1e-5)
        api.train(overrides=overrides)
        rates = [line["lr"] for line in read_metrics(Path(overrides["output_dir"]) / "metrics.jsonl")]
        assert rates[:4] == pytest.approx([0.002, 0.004, 0.006, 0.006], rel=1e-12)
        decay = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * n / 5)) for n in range(5)]
        assert rates[3:] == pytest.approx([0.006 * factor for factor in decay], rel=1e-12)

    def test_a_learning_rate_of_zero_changes_no_weight(self, settings: Settings, tmp_path: Path) -> None:
        """Weight decay is scaled by the learning rate, too."""
        overrides = settings(optim__learning_rate=0.0, training__max_steps=2, optim__weight_decay=0.5)
        before = hf_state_dict(make_run(overrides | {"output_dir": str(tmp_path / "other")}).model)
        result = api.train(overrides=overrides)
        assert result.checkpoint is not None
        after = load_file(result.checkpoint / WEIGHTS)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


class TestNotes:
    def logged(self, capsys: pytest.CaptureFixture[str], overrides: dict[str, Any]) -> list[str]:
        capsys.readouterr()
        api.train(overrides=overrides | {"observe.console": "lines", "training.max_steps": 1})
        return capsys.readouterr().err.splitlines()

    @pytest.mark.parametrize(
        ("changes", "note"),
        [
            ({}, "; attention: sdpa (on a CPU); "),
            ({"model__attention": "eager"}, "; attention: eager (as requested); "),
            ({"model__family": "gemma2"}, "; attention: eager (sdpa has no soft cap); "),
            (
                {"model__family": "gemma2", "model__attention": "sdpa"},
                "; attention: eager (sdpa was requested, but it has no soft cap, which this model needs); ",
            ),
        ],
        ids=str,
    )
    def test_the_attention_backend_and_the_reason(
        self, settings: Settings, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], note: str
    ) -> None:
        lines = self.logged(capsys, settings(**changes))
        assert [note in line for line in lines if "; attention: " in line] == [True]

    def test_dropout_that_is_not_applied(
        self, settings: Settings, tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = make_llama(tmp_path / "model", tokenizer, attention_dropout=0.1)
        warning = "config.json asks for dropout (attention_dropout 0.1); the native decoder trains without it"
        assert self.logged(capsys, from_folder(settings, folder)).count(f"rank0:WARNING | {warning}") == 1

    def test_the_fallback_and_the_reason(
        self, settings: Settings, tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = make_llama(tmp_path / "model", tokenizer, hidden_act="relu")
        lines = self.logged(capsys, from_folder(settings, folder))
        (line,) = [line for line in lines if "runs in the Transformers fallback" in line]
        assert "config.json: the native decoder does not support the activation 'relu'" in line
        overrides = from_folder(
            settings, folder, model__implementation="fallback", output_dir=str(tmp_path / "requested")
        )
        lines = self.logged(capsys, overrides)
        assert [line for line in lines if "runs in the Transformers fallback (as requested)" in line]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="flash attention runs on this machine")
    def test_an_attention_backend_that_cannot_run_is_refused(self, torchstone: Command, settings: Settings) -> None:
        code, _, err = torchstone("train", *flags(settings(model__attention="flash")))
        assert code == 2
        assert "model.attention flash runs on CUDA devices, not on cpu" in err
        assert "available here: auto, sdpa, eager" in err

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"model__implementation": "native"}, "model_type 'stablelm' is not a native family"),
            ({"model__family": "qwen3"}, "model.family is for a new model, but model.path loads an existing one"),
            ({"model__recompute": "selective"}, "model.recompute selective: only for the native decoder"),
            ({"model__fused": "qkv"}, "model.fused: only for the native decoder"),
            ({"model__compile": "block"}, "model.compile: only for the native decoder"),
            ({"model__attention": "flex"}, "the Transformers fallback supports only sdpa and eager"),
        ],
        ids=str,
    )
    def test_options_that_the_fallback_does_not_have_are_refused(
        self,
        torchstone: Command,
        settings: Settings,
        tmp_path: Path,
        tokenizer: Tokenizer,
        changes: dict[str, Any],
        message: str,
    ) -> None:
        folder = make_hf_folder(tmp_path / "model", "stablelm", vocab_size=448, num_key_value_heads=2)
        tokenizer.save(folder)
        code, _, err = torchstone("train", *flags(from_folder(settings, folder, **changes)))
        assert code == 2, err
        assert message in err


class TestPaddingIdx:
    """The embedding of the folder's pad_token_id gets no gradient, as in Transformers."""

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_a_resumed_run_keeps_the_padding_idx_of_its_folder(
        self, settings: Settings, tmp_path: Path, tokenizer: Tokenizer, implementation: Any, chat_file: Path,
        capfd: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        """The folder has no pad_token_id, and the tokenizer's occurs in the data: its embedding is always trained."""
        folder = make_llama(tmp_path / "model", tokenizer, pad_token_id=None)
        overrides = from_folder(
            settings, folder, model__implementation=implementation, data__path=str(chat_file),
            training__max_steps=4, optim__schedule="constant", output_dir=str(tmp_path / "resumed"),
        )  # fmt: skip
        api.train(overrides=overrides | {"training.max_steps": 2})
        resumed = api.train(overrides=overrides)
        uninterrupted = api.train(overrides=overrides | {"output_dir": str(tmp_path / "uninterrupted")})
        assert (resumed.checkpoint / WEIGHTS).read_bytes() == (uninterrupted.checkpoint / WEIGHTS).read_bytes()
        config = json.loads((resumed.checkpoint / "config.json").read_text())
        assert config["pad_token_id"] == tokenizer.hf.pad_token_id
        assert json.loads((resumed.checkpoint / "state.json").read_text())["padding_row"] is None
        assert "also occurs in text" not in capfd.readouterr().err

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_its_embedding_gets_no_gradient(self, tmp_path: Path, implementation: Any) -> None:
        folder = make_model(tmp_path, "llama", "pad in text")
        model = load_model(folder, CPU, execution=ExecutionOptions(implementation=implementation))
        assert model.padding_idx == 3
        model.module(torch.tensor([[3, 4, 3, 5]]), torch.arange(4)[None]).square().sum().backward()
        roles = model.parameter_kinds()
        (gradient,) = [p.grad for name, p in model.module.named_parameters() if roles.get(name) == "embed"]
        assert not gradient[3].any()
        assert gradient[4].any()

    def test_a_pad_token_that_occurs_in_text_is_warned_about(
        self, settings: Settings, tmp_path: Path, tokenizer: Tokenizer, capfd: pytest.CaptureFixture[str]
    ) -> None:
        folder = make_llama(tmp_path / "model", tokenizer, pad_token_id=tokenizer.eos_id)
        api.train(overrides=from_folder(settings, folder, training__max_steps=1))
        assert f"token {tokenizer.eos_id} is the model's pad_token_id but also occurs in text" in capfd.readouterr().err


class TestRemoteCode:
    """A folder of a native family that has its own code (auto_map), as published Phi-3 folders have."""

    @pytest.fixture
    def folder(self, tmp_path: Path, tokenizer: Tokenizer) -> Path:
        folder = make_llama(tmp_path / "model", tokenizer)
        set_config(auto_map={"AutoModelForCausalLM": "mine.Mine"})(folder)
        (folder / "mine.py").write_text(
            "from transformers import LlamaForCausalLM\n"
            "class Mine(LlamaForCausalLM):\n"
            "    def forward(self, *args, **kwargs):\n"
            "        out = super().forward(*args, **kwargs)\n"
            "        out.logits = out.logits * 10\n"
            "        return out\n"
        )
        return folder

    def test_untrusted_code_is_not_run_with_a_warning(self, folder: Path, tmp_path: Path) -> None:
        model = load_model(folder, CPU)
        assert model.implementation == "native"
        assert "config.json names its own code (mine.Mine), which is not run" in model.warnings
        save_model(model, tmp_path)
        assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())

    def test_trusted_code_is_trained_and_exported(
        self, folder: Path, settings: Settings, tmp_path: Path, torchstone: Command
    ) -> None:
        overrides = from_folder(settings, folder, training__max_steps=1)
        trusted = api.train(overrides=overrides | {"model.trust_remote_code": True})
        untrusted = api.train(overrides=overrides | {"output_dir": str(tmp_path / "untrusted")})
        assert trusted.loss != untrusted.loss
        code, _, err = torchstone("evaluate", overrides["output_dir"], "--data", overrides["data.path"])
        assert (code, "which is not run without permission" in err) == (2, True)
        report = api.export(overrides["output_dir"], tmp_path / "out", trust_remote_code=True)
        assert (report["verified"], (tmp_path / "out/mine.py").is_file()) == (True, True)


@pytest.mark.parametrize(
    ("changes", "warnings"),
    [
        ({"rms_norm_epz": 1e-3}, ["unknown key rms_norm_epz has no effect (did you mean rms_norm_eps?)"]),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "rope_tetha": 5.0}},
            ["unknown key rope_tetha has no effect (did you mean rope_theta?)"],
        ),
        ({"my_own_key": 1}, []),
    ],
    ids=["a key", "a key of rope_parameters", "a key of another tool"],
)
def test_a_misspelled_config_key_is_warned_about(tmp_path: Path, changes: dict[str, Any], warnings: list[str]) -> None:
    folder = make_llama(tmp_path)
    set_config(**changes)(folder)
    assert load_model(folder, CPU).warnings == [f"config.json: {warning}" for warning in warnings]


def test_compile_without_a_compiler_is_refused(tmp_path: Path) -> None:
    from torch._inductor import config

    folder, execution = make_llama(tmp_path / "model"), ExecutionOptions(compile="block")
    # monkeypatch would remove the key at the end.
    with (
        config.patch({"cpp.cxx": (None, str(tmp_path / "no-such-compiler"))}),
        pytest.raises(UsageError, match=r"model\.compile needs a C\+\+ compiler on a CPU"),
    ):
        check_model_folder(folder, CPU, torch.float32, execution)


class TestOrthogonalSubspace:
    """OSFT (tests/test_osft.py has the training)."""

    def test_an_initialized_model_is_the_base_model(self, settings: Settings, base_run: Path) -> None:
        run = self._build(settings, base_run)
        ids = torch.arange(16)[None]
        assert torch.equal(run.model.module(ids, ids), load_model(base_run, CPU).module(ids, ids))

    def test_a_quarter_of_every_linear_is_trained_and_nothing_else(self, settings: Settings, base_run: Path) -> None:
        run = self._build(settings, base_run)
        shapes = {name: tuple(p.shape) for name, p in run.model.named_parameters()}
        trained = {name for name, _ in run.model.trained_parameters()}
        assert trained == {name for name in shapes if name.endswith("osft_Z")}
        assert len(trained) == 2 * 7
        for name in trained:
            weight = shapes[f"{name.partition('.adapters.')[0]}.weight"]
            assert shapes[name] == (max(weight), min(weight) // 4)

    def test_the_optimizer_and_the_projection_have_the_trained_factors(
        self, settings: Settings, base_run: Path
    ) -> None:
        run = self._build(settings, base_run)
        trained = [parameter for _, parameter in run.model.trained_parameters()]
        assert {id(p) for group in run.optimizer.param_groups for p in group["params"]} == set(map(id, trained))
        assert run.runner.projection is not None
        bases = {id(each.parameter): each.basis for each in run.runner.projection.bases}
        assert bases.keys() == set(map(id, trained))
        for parameter in trained:
            basis = bases[id(parameter)]
            assert basis.shape == (len(parameter), 3 * parameter.shape[1])
            assert (basis.t() @ basis - torch.eye(basis.shape[1])).abs().max() < 1e-6

    def _build(self, settings: Settings, base_run: Path) -> Run:
        values = settings(tuning__method="osft", tuning__unfreeze_rank_ratio=0.25, model__path=str(base_run))
        for key in ("model.depth", "model.width", "model.heads", "model.tokenizer"):
            del values[key]
        return build_run(load_config(overrides=values), Console("quiet"), CPU)

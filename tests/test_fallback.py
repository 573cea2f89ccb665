"""Models in the Transformers fallback: trained as Transformers trains them, packed only where that is proven.

`python tests/test_fallback.py` prints how each tiny model packs, one JSON line each.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import parity
import tiny_families
from selection import the_rest
from sides import MAX_NORM, WEIGHT_DECAY, load_reference, make_batch
from steps import train_step
from tiny import edit_config
from torchstone.checkpoint.transformers_folder import load_fallback, save_fallback
from torchstone.errors import CheckpointError, UsageError
from torchstone.models.attention import build_attn_mask
from torchstone.models.fallback import module as fallback_module
from torchstone.models.fallback import probing
from torchstone.models.fallback.module import FallbackModule
from torchstone.models.model import FallbackModel
from torchstone.optim.adamw import AdamW
from torchstone.parallel.runner import Runner

CPU = torch.device("cpu")
VOCABULARY = 160
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 256, "initializer_range": 0.1,
}  # fmt: skip
GROUPED = SHAPE | {"num_key_value_heads": 2}
GPT2_KEYS = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.1,
}
MIXED_LAYERS = ["sliding_attention", "full_attention"]
OPT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48,
    "max_position_embeddings": 256, "word_embed_proj_dim": 32, "init_std": 0.1, "dropout": 0.0,
}  # fmt: skip
FALCON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.1,
}

# name -> model_type, config, expected packing method.
MODELS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "gpt_neox": ("gpt_neox", SHAPE, "mask"),
    "opt": ("opt", OPT, "mask"),
    "falcon": ("falcon", FALCON, "mask"),
    "stablelm": ("stablelm", GROUPED, "mask"),
    "cohere": ("cohere", GROUPED, "mask"),
    "phi": ("phi", SHAPE, "mask"),
    "mixtral": ("mixtral", GROUPED | {"num_local_experts": 4, "router_aux_loss_coef": 0.02}, "mask"),
    "mixtral with a window": ("mixtral", GROUPED | {"num_local_experts": 4, "sliding_window": 8}, "window mask"),
    "cohere2 with a window": (
        "cohere2", GROUPED | {"sliding_window": 8, "layer_types": MIXED_LAYERS}, "layer masks"
    ),
    "qwen2_moe": (
        "qwen2_moe",
        GROUPED | {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
                   "num_experts_per_tok": 2},
        "layer masks",
    ),
    "gemma2 with caps": (
        "gemma2",
        GROUPED | {"head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "sliding_window": 8},
        "layer masks",
    ),
    "gpt_neo with a window": (
        "gpt_neo",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 8,
         "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 256, "initializer_range": 0.1,
         "embed_dropout": 0.0, "attention_dropout": 0.0, "resid_dropout": 0.0},
        "mask",
    ),
    "gptj": ("gptj", GPT2_KEYS | {"rotary_dim": 4, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}, "mask"),
    "mpt": (
        "mpt",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256,
         "initializer_range": 0.1},
        "mask",
    ),
    "bloom": (
        "bloom",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.1,
         "hidden_dropout": 0.0, "attention_dropout": 0.0},
        None,
    ),
    "falcon with alibi": ("falcon", FALCON | {"alibi": True}, None),
    "mamba": (
        "mamba",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4,
         "initializer_range": 0.1},
        None,
    ),
    "jamba": (
        "jamba",
        GROUPED | {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4,
                   "use_mamba_kernels": False},
        None,
    ),
}  # fmt: skip
PACKABLE = [name for name, (_, _, method) in MODELS.items() if method is not None]
# One of each packing method, two without one, and a mixture of experts.
VARIED = ("gpt_neox", "mixtral", "mixtral with a window", "gemma2 with caps", "bloom", "mamba")


def make(folder: Path, name: str, **changes: Any) -> Path:
    model_type, config, _ = MODELS[name]
    return make_model(folder, model_type, **(config | changes))


def make_model(folder: Path, model_type: str, **config: Any) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config)).save_pretrained(folder)
    return folder


def load(folder: Path, attention: str = "auto", dtype: torch.dtype = torch.float32, **options: Any) -> FallbackModule:
    return load_fallback(folder, attention, CPU, dtype, **options)


def save(module: FallbackModule, folder: Path) -> None:
    save_fallback(module, module.generation_config, folder)


def all_equal(tensors: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of a tiny random model. Tests must not change it."""
    return cache(lambda name: make(tmp_path_factory.mktemp("model"), name))


@pytest.fixture
def neox(folder_of: Folders, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(folder_of("gpt_neox"), tmp_path / "neox"))


def random_ids(*shape: int) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(3))


class OurSide:
    """The package's step over a `FallbackModule`; a micro-batch is packed into one row or padded."""

    def __init__(self, folder: Path, packed: bool, **settings: Any) -> None:
        self.module, self.packed, self.lr = load(folder), packed, settings["lr"]
        groups = parity.reference_adamw(self.module.hf, WEIGHT_DECAY, **settings).param_groups
        self.optimizer = AdamW(
            [{key: group[key] for key in ("params", "weight_decay")} for group in groups], **settings
        )
        self.gradients: dict[str, Tensor] = {}
        self.optimizer.register_step_pre_hook(lambda *_: self.keep_gradients())

    def keep_gradients(self) -> None:
        self.gradients = {name: p.grad.clone() for name, p in self.module.hf.named_parameters()}

    def step(self, micro_batches: parity.MicroBatches) -> parity.StepValues:
        runner = Runner(FallbackModel(self.module, {}), CPU, self.packed)
        result = train_step(runner, self.optimizer, make_batch(micro_batches, self.packed), 1, self.lr, MAX_NORM)
        return parity.StepValues(result.loss, result.grad_norm, self.gradients)

    def lock(self, reference: parity.Reference) -> None:
        parameters = dict(reference.model.named_parameters())
        for name, parameter in self.module.hf.named_parameters():
            with torch.no_grad():
                parameter.copy_(parameters[name])
            state = reference.optimizer.state.get(parameters[name], {})
            self.optimizer.state[parameter] = {key: value.clone() for key, value in state.items()}


def both_sides(folder: Path, packed: bool) -> tuple[parity.Reference, OurSide]:
    ours = OurSide(folder, packed, **{key: parity.FREE_RUNNING[key] for key in ("lr", "betas", "eps")})
    # By default, Transformers 5.17 computes a model with a soft cap by sdpa, without the cap.
    attention = ours.module.hf.config._attn_implementation
    return load_reference(folder, attn_implementation=attention), ours


def with_the_rest(cases: list[Any], by_default: list[Any]) -> list[Any]:
    """`cases`, of which only some run by default."""
    return [case if case in by_default else pytest.param(*case, marks=the_rest) for case in cases]


CASES = [(name, False) for name in MODELS] + [(name, True) for name in PACKABLE]


@pytest.mark.parametrize(("name", "packed"), with_the_rest(CASES, [(name, name in PACKABLE) for name in VARIED]))
def test_every_gradient_equals_transformers_step_locked(folder_of: Folders, name: str, packed: bool) -> None:
    reference, ours = both_sides(folder_of(name), packed)
    steps = parity.random_batches(3, VOCABULARY, seed=1)
    # Without RoPE, a bias on the keys shifts all scores alike: its gradient is zero.
    zeros = [key for key in reference.initial_weights if name == "opt" and key.endswith("k_proj.bias")]
    parity.assert_step_locked(reference, ours.step, ours.lock, steps, zeros)


@pytest.mark.parametrize("name", ["gpt_neox", "mixtral with a window"])
def test_packed_weights_and_losses_equal_transformers_free_running(folder_of: Folders, name: str) -> None:
    reference, ours = both_sides(folder_of(name), True)
    steps = parity.random_batches(5, VOCABULARY, seed=2)
    weights = lambda: {n: p.detach() for n, p in ours.module.hf.named_parameters()}  # noqa: E731
    parity.assert_free_running(reference, ours.step, weights, steps)


@pytest.mark.parametrize("name", MODELS)
def test_each_model_packs_by_the_method_that_the_probe_found(folder_of: Folders, name: str) -> None:
    module, expected = load(folder_of(name)), MODELS[name][2]
    assert module.packing_method == expected, module.packing_error
    assert (module.packing_error is None) == (expected is not None)
    ids, positions = random_ids(1, 10), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    doc_ids = torch.tensor([[0] * 4 + [1] * 6])
    if expected is None:
        with pytest.raises(ValueError, match="one document per row: .* does not separate packed documents"):
            module(ids, positions, doc_ids)
        return
    packed = module.eval()(ids, positions, doc_ids)
    alone = torch.cat((module(ids[:, :4], positions[:, :4]), module(ids[:, 4:], positions[:, 4:])), dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


def test_the_probe_leaves_the_window_as_it_was(tmp_path: Path) -> None:
    """The probe shrinks a window of 64 for a moment. Documents longer than 64 must get Transformers' logits."""
    from transformers import AutoModelForCausalLM

    folder = make(tmp_path, "mixtral with a window", sliding_window=64)
    module, ids = load(folder).eval(), random_ids(1, 200)
    assert module.packing_method == "window mask"
    assert module.hf.config.sliding_window == 64
    positions = torch.cat((torch.arange(90), torch.arange(110)))[None]
    doc_ids = (torch.arange(200) >= 90).long()[None]
    reference = AutoModelForCausalLM.from_pretrained(str(folder))
    with torch.no_grad():
        packed = module(ids, positions, doc_ids)
        torch.testing.assert_close(packed[:, :90], reference(ids[:, :90]).logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(packed[:, 90:], reference(ids[:, 90:]).logits, rtol=1e-5, atol=1e-5)


def test_positions_separate_documents_if_masks_are_not_available(
    folder_of: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "PACKING_METHODS", {"positions": "positions"})
    module = load(folder_of("gpt_neox"))
    assert module.packing_method == "positions"
    with pytest.raises(ValueError, match="positions must restart"):
        module(random_ids(1, 8), torch.arange(8)[None], torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]]))


@pytest.mark.parametrize("name", ["gpt_neox", "mixtral with a window", "gemma2 with caps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_probe_refuses_a_mask_without_document_boundaries(
    folder_of: Folders, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    """The planted fault is a plain causal mask. Without masks only positions remain, and without them nothing."""
    causal = lambda ids, key_ids, window: build_attn_mask(torch.zeros_like(ids), torch.zeros_like(ids), window)  # noqa: E731
    monkeypatch.setattr(fallback_module, "build_attn_mask", causal)
    assert load(folder_of(name), dtype=dtype).packing_method == "positions"
    masks = {method: text for method, text in probing.PACKING_METHODS.items() if method != "positions"}
    monkeypatch.setattr(probing, "PACKING_METHODS", masks)
    module = load(folder_of(name), dtype=dtype)
    assert module.packing_method is None
    assert "a document sees another one" in (module.packing_error or "")


def test_the_probe_refuses_a_mask_without_the_window(folder_of: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "PACKING_METHODS", {"mask": "one block mask"})
    module = load(folder_of("mixtral with a window"))
    assert module.packing_method is None
    assert "a document's logits differ from its logits alone" in (module.packing_error or "")


@pytest.mark.parametrize("name", ["gpt_neox", "gemma2 with caps", "qwen2_moe", "jamba"])
def test_bf16_packs_like_fp32_and_keeps_inv_freq_in_fp32(folder_of: Folders, name: str) -> None:
    module = load(folder_of(name), dtype=torch.bfloat16)
    assert module.packing_method == MODELS[name][2]
    ids = random_ids(2, 9)
    assert module(ids, torch.arange(9).expand(2, 9)).dtype == torch.bfloat16
    for buffer_name, buffer in module.named_buffers():
        if "inv_freq" in buffer_name:
            assert buffer.dtype == torch.float32, buffer_name


def test_loading_preserves_the_random_state_and_prints_nothing(
    folder_of: Folders, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of("mamba")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    module = load(folder)
    assert torch.equal(torch.get_rng_state(), before)
    assert module.training
    assert all(part.training for part in module.modules())
    assert capfd.readouterr() == ("", "")


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "encoder", "bert", **SHAPE)
    with pytest.raises(UsageError, match="is not causal: a token sees later tokens"):
        load(folder)
    edit_config(folder, is_decoder=True)
    assert load(folder).packing_method == "mask"


def test_a_model_whose_rows_see_each_other_is_refused(folder_of: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    correct = FallbackModule._logits

    def mixed_rows(self: FallbackModule, ids: Tensor, mask: Any, positions: Tensor) -> Tensor:
        logits = correct(self, ids, mask, positions)
        return logits + 1e-3 * logits.mean(dim=0, keepdim=True)

    monkeypatch.setattr(FallbackModule, "_logits", mixed_rows)
    with pytest.raises(UsageError, match="mixes the rows of a batch"):
        load(folder_of("gpt_neox"))


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    from transformers import BartConfig, T5Config

    T5Config().save_pretrained(tmp_path / "t5")
    BartConfig(d_model=32).save_pretrained(tmp_path / "bart")
    for name in ("t5", "bart"):
        with pytest.raises(UsageError, match=r"config.json: .*an encoder-decoder"):
            load(tmp_path / name)


def test_a_soft_cap_is_computed_by_eager_and_never_by_sdpa(folder_of: Folders) -> None:
    assert load(folder_of("gemma2 with caps")).hf.config._attn_implementation == "eager"
    with pytest.raises(UsageError, match="soft cap on attention scores, which sdpa lacks"):
        load(folder_of("gemma2 with caps"), "sdpa")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_is_the_requested_one(folder_of: Folders, attention: str) -> None:
    assert load(folder_of("gpt_neox"), attention).hf.config._attn_implementation == attention


def test_other_attention_is_refused(folder_of: Folders) -> None:
    with pytest.raises(
        UsageError, match="model.attention flex: the Transformers fallback supports only sdpa and eager"
    ):
        load(folder_of("gpt_neox"), "flex")
    with pytest.raises(UsageError, match="Transformers cannot build the model"):
        load(folder_of("mpt"), "sdpa")


def test_adapters_and_quantized_weights_are_refused(neox: Path) -> None:
    edit_config(neox, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UsageError, match="quantized"):
        load(neox)
    edit_config(neox, quantization_config=None)
    (neox / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="adapter"):
        load(neox)


def test_missing_unknown_and_misshapen_tensors_are_all_listed(neox: Path) -> None:
    file = neox / "model.safetensors"
    tensors = load_file(file)
    del tensors["gpt_neox.final_layer_norm.weight"]
    tensors["gpt_neox.layers.0.mlp.dense_h_to_4h.bias"] = torch.zeros(7)
    tensors |= {f"extra.{number}": torch.zeros(1) for number in range(11)}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="do not match config.json") as caught:
        load(neox)
    message = str(caught.value)
    assert "missing: gpt_neox.final_layer_norm.weight" in message
    assert "gpt_neox.layers.0.mlp.dense_h_to_4h.bias (file [7], model [48])" in message
    assert "extra.0" in message
    assert "and 3 more" in message


@pytest.mark.parametrize(
    ("name", "dtype"),
    with_the_rest(
        [(name, dtype) for name in MODELS for dtype in (torch.float32, torch.bfloat16)],
        [(name, torch.float32) for name in VARIED] + [("gpt_neox", torch.bfloat16)],
    ),
)
def test_a_saved_model_loads_bit_for_bit(folder_of: Folders, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    module, ids = load(folder_of(name), dtype=dtype).eval(), random_ids(2, 9)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.01)
        save(module, tmp_path)
        loaded = load(tmp_path, dtype=dtype)
        assert module.state_dict().keys() == loaded.state_dict().keys()
        assert all_equal(module.state_dict().values(), loaded.state_dict().values())
        attention = module.hf.config._attn_implementation
        reference = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype="auto", attn_implementation=attention)
        positions = torch.arange(9).expand(2, 9)
        logits = module(ids, positions)
        assert torch.equal(loaded.eval()(ids, positions), logits)
        assert loaded.hf.dtype == dtype
        torch.testing.assert_close(reference(ids).logits, logits, rtol=1e-5, atol=1e-5)
    assert {*load_file(folder_of(name) / "model.safetensors")} == {*load_file(tmp_path / "model.safetensors")}


def test_generation_config_is_kept_and_not_used(neox: Path, tmp_path: Path) -> None:
    """The file has settings that Transformers refuses to save, and some that would change what is generated."""
    prompts = [[1, 2, 3], [5, 6, 7, 8, 9, 10], [4]]
    expected = load(neox).generate(prompts, 12)
    edit_config(neox, temperature=0.1)
    (neox / "generation_config.json").unlink()
    without_file = load(neox)
    assert any("will not be saved" in note for note in without_file.warnings)
    save(without_file, tmp_path / "without file")
    content = '{"temperature": 0.1, "repetition_penalty": 9.0, "max_length": 4, "eos_token_id": %d, "top_k": 2}'
    (neox / "generation_config.json").write_text(content % expected[0][3])
    module = load(neox)
    assert module.generate(prompts, 12) == expected
    save(module, tmp_path / "saved")
    assert (tmp_path / "saved" / "generation_config.json").read_text() == content % expected[0][3]


@pytest.mark.parametrize("name", ["gpt_neox", "mamba", "gemma2 with caps", "opt"])
def test_greedy_generation_equals_transformers_with_and_without_a_cache(
    folder_of: Folders, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, prompts = load(folder_of(name)), [[1, 2, 3], [9, 8, 7, 6, 5, 4], [11]]
    tokens = module.generate(prompts, 10)
    assert module.training
    for prompt, row in zip(prompts, tokens, strict=True):
        reference = module.eval().hf.generate(
            torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert row == reference[0, len(prompt) :].tolist()
    stop = tokens[0][4]
    stopped = [row[: row.index(stop)] if stop in row else row for row in tokens]
    assert module.generate(prompts, 10, stop_ids=[stop]) == stopped
    monkeypatch.setattr(type(module.hf), "can_generate", lambda *_: False)
    assert module.generate(prompts, 10) == tokens
    assert module.generate(prompts, 10, stop_ids=[stop]) == stopped


def test_sampling_draws_from_the_softmax_with_a_generator(folder_of: Folders) -> None:
    module = load(folder_of("gpt_neox"))

    def sample(seed: int) -> list[int]:
        return module.generate([[1, 2, 3]], 8, (), 0.7, torch.Generator().manual_seed(seed))[0]

    assert sample(0) == sample(0)
    assert len({tuple(sample(seed)) for seed in range(5)}) > 1
    with torch.no_grad():
        logits = module.eval()(torch.tensor([[1, 2, 3]]), torch.arange(3)[None])[:, -1]
    first = torch.multinomial((logits / 0.7).softmax(-1), 1, generator=torch.Generator().manual_seed(0)).item()
    assert sample(0)[0] == first
    assert module.generate([[1], [2]], 0) == [[], []]
    with pytest.raises(ValueError, match="a prompt is empty"):
        module.generate([[]], 3)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("gpt_neox", {}), ("gpt_neox", {"tie_word_embeddings": True}), ("phi", {}), ("opt", {})],
    ids=["untied", "tied", "head with bias", "tied opt"],
)
def test_new_embeddings_are_the_mean_of_the_old_ones(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    module = load(make(tmp_path / "model", name, **changes), dtype=torch.bfloat16)
    embedding, head = module.hf.get_input_embeddings(), module.hf.get_output_embeddings()
    tied = head.weight is embedding.weight
    old, old_head = embedding.weight.detach().clone(), head.weight.detach().clone()
    old_bias = None if head.bias is None else head.bias.detach().normal_().clone()
    rng_state = torch.get_rng_state()
    module.resize_embeddings(VOCABULARY + 9)
    assert torch.equal(torch.get_rng_state(), rng_state)
    embedding, head = module.hf.get_input_embeddings(), module.hf.get_output_embeddings()
    assert module.vocab_size == module.hf.config.vocab_size == VOCABULARY + 9
    assert (head.weight is embedding.weight) == tied
    pairs = [(old, embedding.weight), (old_head, head.weight)] + ([] if old_bias is None else [(old_bias, head.bias)])
    for before, after in pairs:
        assert torch.equal(after[:VOCABULARY], before)
        assert torch.equal(after[VOCABULARY:], before.float().mean(0).to(after.dtype).expand_as(after[VOCABULARY:]))
    save(module, tmp_path / "saved")
    assert all_equal(module.parameters(), load(tmp_path / "saved", dtype=torch.bfloat16).parameters())
    with pytest.raises(ValueError, match="cannot shrink"):
        module.resize_embeddings(VOCABULARY)


def test_the_loss_is_a_sum_for_this_model_only(folder_of: Folders) -> None:
    from transformers import AutoModelForCausalLM

    module, ids = load(folder_of("gpt_neox")).eval(), random_ids(2, 9)
    reference = AutoModelForCausalLM.from_pretrained(str(folder_of("gpt_neox")))
    labels = ids.clone()
    labels[0, :5] = -100
    count = int((labels[:, 1:] != -100).sum())
    with torch.no_grad():
        loss_sum, mean = module.hf(input_ids=ids, labels=labels).loss, reference(input_ids=ids, labels=labels).loss
    torch.testing.assert_close(loss_sum, mean * count)
    assert "_loss_function" not in vars(type(module.hf))


def test_warnings_say_what_training_changes(tmp_path: Path, folder_of: Folders) -> None:
    assert (
        "the router's auxiliary loss (router_aux_loss_coef 0.02) is not part of the loss here"
        in load(folder_of("mixtral")).warnings
    )
    with_dropout = load(make(tmp_path, "gpt_neox", hidden_dropout=0.25))
    assert any("hidden_dropout 0.25" in note for note in with_dropout.warnings)
    ids, positions = random_ids(1, 9), torch.arange(9)[None]
    assert not torch.equal(with_dropout(ids, positions), with_dropout(ids, positions))
    assert load(folder_of("gpt_neox")).warnings == []


def test_activation_checkpointing_gives_the_same_gradients(folder_of: Folders) -> None:
    ids, positions = random_ids(1, 8), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    gradients = []
    for is_checkpointed in (False, True):
        module = load(folder_of("gpt_neox"))
        if is_checkpointed:
            module.enable_activation_checkpointing()
        module(ids, positions, torch.tensor([[0] * 3 + [1] * 5])).square().sum().backward()
        gradients.append([p.grad for p in module.parameters()])
    assert all_equal(*gradients)
    module.hf.supports_gradient_checkpointing = False
    with pytest.raises(UsageError, match="has no activation checkpointing"):
        module.enable_activation_checkpointing()


def test_vocab_size_and_max_positions(folder_of: Folders) -> None:
    assert (load(folder_of("gpt_neox")).vocab_size, load(folder_of("gpt_neox")).max_positions) == (VOCABULARY, 256)
    assert load(folder_of("mpt")).max_positions == 256
    assert load(folder_of("mamba")).max_positions is None


def test_padding_may_exceed_the_position_embeddings(tmp_path: Path) -> None:
    """Rows are padded to a multiple of 8, here 24 tokens for a model with 20 positions."""
    module = load(make(tmp_path, "opt", max_position_embeddings=20)).eval()
    ids = random_ids(1, 24)
    positions = torch.cat((torch.arange(20), torch.zeros(4, dtype=torch.long)))[None]
    torch.testing.assert_close(module(ids, positions)[:, :20], module(ids[:, :20], positions[:, :20]))


CUSTOM_CODE = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class RunningMeanConfig(PreTrainedConfig):
    model_type = "running_mean"

    def __init__(self, vocab_size=160, hidden_size=16, **kwargs):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        super().__init__(**kwargs)


class RunningMeanForCausalLM(PreTrainedModel):
    config_class = RunningMeanConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids):
        x = self.embed(input_ids)
        count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return CausalLMOutput(logits=self.head(x.cumsum(1) / count))
"""


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with its own code, and a cache of its own for Transformers' copy of that code."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "custom"
    folder.mkdir()
    (folder / "modeling_running.py").write_text(CUSTOM_CODE)
    names = {"AutoConfig": "modeling_running.RunningMeanConfig",
             "AutoModelForCausalLM": "modeling_running.RunningMeanForCausalLM"}  # fmt: skip
    config = {"model_type": "running_mean", "vocab_size": VOCABULARY, "hidden_size": 16, "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed.weight": (VOCABULARY, 16), "head.weight": (VOCABULARY, 16), "head.bias": (VOCABULARY,)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_remote_code_is_not_run_without_permission(custom: Path, neox: Path, tmp_path: Path) -> None:
    (custom / "modeling_running.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + CUSTOM_CODE)
    with pytest.raises(UsageError, match="--model.trust_remote_code true"):
        load(custom)
    assert not (tmp_path / "ran").exists()
    edit_config(neox, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    with pytest.raises(UsageError, match='remove "auto_map" from config.json to use gpt_neox'):
        load(neox)


def test_trusted_remote_code_trains_generates_and_is_saved(custom: Path, tmp_path: Path) -> None:
    module = load(custom, trust_remote_code=True)
    assert module.packing_method is None
    assert any("has no loss of its own" in note for note in module.warnings)
    ids, labels = random_ids(1, 9), random_ids(1, 9)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    losses = []
    for _ in range(5):
        logits = module(ids, torch.arange(9)[None])
        losses.append(torch.nn.functional.cross_entropy(logits[0], labels[0]))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.7 * losses[0]
    save(module, tmp_path / "saved")
    assert (tmp_path / "saved" / "modeling_running.py").is_file()
    loaded = load(tmp_path / "saved", trust_remote_code=True)
    assert all_equal(module.parameters(), loaded.parameters())
    assert module.generate([[1, 2]], 4) == loaded.generate([[1, 2]], 4)
    assert len(module.generate([[1, 2]], 4)[0]) == 4


def test_rows_that_transformers_cannot_compute_alone_are_refused(folder_of: Folders, tmp_path: Path) -> None:
    """Learned positions end. Beyond its original length, longrope depends on the longest row of a batch."""
    opt = load(folder_of("opt"))
    assert opt.length_error(256) is None
    assert "embeddings for 256 positions" in opt.length_error(257)
    phi = load(tiny_families.make_model(tmp_path, "phi3", "longrope"))
    assert phi.length_error(12) is None
    assert "beyond 12 tokens its RoPE depends on the longest row" in phi.length_error(13)
    assert load(folder_of("gpt_neox")).length_error(10**6) is None


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        for name in MODELS:
            folder = make(Path(root) / name.replace(" ", "-"), name)
            for dtype in (torch.float32, torch.bfloat16):
                module = load(folder, dtype=dtype)
                figures = {
                    "model": name,
                    "dtype": str(dtype),
                    "attention": module.hf.config._attn_implementation,
                    "packing_method": module.packing_method,
                    "packing_error": module.packing_error,
                }
                print(json.dumps(figures))


if __name__ == "__main__":
    main()

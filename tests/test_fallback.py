"""Models that only Transformers knows: trained as Transformers trains them, packed only where that is proven.

Run as a script it prints how each tiny model packs, one JSON line each: `python tests/test_fallback.py`.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import parity
import tiny_families
from torchstone.data.collate import collate
from torchstone.data.encode import Encoded
from torchstone.data.loader import StepBatch
from torchstone.errors import CheckpointError, UsageError
from torchstone.models import fallback, probing
from torchstone.models.fallback import Fallback, load_fallback, save_fallback
from torchstone.models.model import Transformers
from torchstone.parallel.running import Runner
from torchstone.training.step import train_step

CPU = torch.device("cpu")
VOCABULARY = 160
MAX_NORM = 0.5
WEIGHT_DECAY = 0.1
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 256, "initializer_range": 0.1,
}  # fmt: skip
GROUPED = SHAPE | {"num_key_value_heads": 2}
OLD = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.1}
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

# name -> model_type, config, how it is expected to pack.
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
    "gptj": ("gptj", OLD | {"rotary_dim": 4, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}, "mask"),
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
PACKING = [name for name, (_, _, packs) in MODELS.items() if packs is not None]


def make(folder: Path, name: str, **changes: Any) -> Path:
    kind, config, _ = MODELS[name]
    return make_model(folder, kind, **(config | changes))


def make_model(folder: Path, kind: str, **config: Any) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).save_pretrained(folder)
    return folder


def load(folder: Path, attention: str = "auto", dtype: torch.dtype = torch.float32, **more: Any) -> Fallback:
    return load_fallback(folder, attention, CPU, dtype, **more)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny random model; read only."""
    folders: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in folders:
            folders[name] = make(tmp_path_factory.mktemp("model"), name)
        return folders[name]

    return get


@pytest.fixture
def neox(made: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(made("gpt_neox"), tmp_path / "neox"))


def random_ids(*shape: int) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(3))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class OurSide:
    """The package's step over a Fallback, packed into one row a micro-batch or padded."""

    def __init__(self, folder: Path, packed: bool, **settings: Any) -> None:
        self.module, self.packed, self.lr = load(folder), packed, settings["lr"]
        self.optimizer = parity.reference_adamw(self.module.hf, WEIGHT_DECAY, **settings)
        self.gradients: dict[str, Tensor] = {}
        self.optimizer.register_step_pre_hook(lambda *_: self.keep_gradients())

    def keep_gradients(self) -> None:
        self.gradients = {name: p.grad.clone() for name, p in self.module.hf.named_parameters()}

    def step(self, micro_batches: parity.MicroBatches) -> parity.StepNumbers:
        tensors = []
        for sequences in micro_batches:
            encoded = [Encoded(np.array(ids), np.array(labels)) for ids, labels in sequences]
            tensors.append(collate([encoded] if self.packed else [[one] for one in encoded], pad_id=0))
        count = sum(int((t.labels != -100).sum()) for t in tensors)
        batch = StepBatch(tensors, samples=0, tokens=0, loss_tokens=count, padding=0, first_sample=0)
        runner = Runner(Transformers(self.module, {}), CPU, self.packed)
        done = train_step(runner, self.optimizer, batch, 1, self.lr, MAX_NORM)
        return parity.StepNumbers(done.loss, done.grad_norm, without_noise(self.gradients))

    def lock(self, reference: parity.Reference) -> None:
        theirs = dict(reference.model.named_parameters())
        for name, parameter in self.module.hf.named_parameters():
            with torch.no_grad():
                parameter.copy_(theirs[name])
            state = reference.optimizer.state.get(theirs[name], {})
            self.optimizer.state[parameter] = {key: value.clone() for key, value in state.items()}


class Reference(parity.Reference):
    def step(self, micro_batches: parity.MicroBatches) -> parity.StepNumbers:
        numbers = super().step(micro_batches)
        numbers.gradients = without_noise(numbers.gradients)
        return numbers


def without_noise(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without rotary positions a bias on the keys shifts all scores alike: its gradient is zero but for roundings."""
    noise = [name for name in gradients if name.endswith("k_proj.bias") and gradients[name].norm() < 1e-7]
    return {name: gradient for name, gradient in gradients.items() if name not in noise}


def both_sides(folder: Path, packed: bool) -> tuple[parity.Reference, OurSide]:
    from transformers import AutoModelForCausalLM

    chosen = {key: parity.FREE_RUNNING[key] for key in ("lr", "betas", "eps")}
    ours = OurSide(folder, packed, **chosen)
    # Left to itself, Transformers 5.17 computes a capped model by sdpa, without its cap.
    attention = ours.module.hf.config._attn_implementation
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, attn_implementation=attention)
    reference = Reference(model, parity.reference_adamw(model, WEIGHT_DECAY, **chosen), MAX_NORM)
    return reference, ours


@pytest.mark.parametrize(
    ("name", "packed"), [(name, False) for name in MODELS] + [(name, True) for name in PACKING]
)  # fmt: skip
def test_every_gradient_equals_transformers_step_locked(made: Callable[[str], Path], name: str, packed: bool) -> None:
    reference, ours = both_sides(made(name), packed)
    steps = parity.random_batches(3, VOCABULARY, seed=1)
    parity.assert_step_locked(reference, ours.step, ours.lock, steps)


@pytest.mark.parametrize("name", ["gpt_neox", "mixtral with a window"])
def test_packed_weights_and_losses_equal_transformers_free_running(made: Callable[[str], Path], name: str) -> None:
    reference, ours = both_sides(made(name), True)
    steps = parity.random_batches(5, VOCABULARY, seed=2)
    weights = lambda: {n: p.detach() for n, p in ours.module.hf.named_parameters()}  # noqa: E731
    parity.assert_free_running(reference, ours.step, weights, steps)


@pytest.mark.parametrize("name", MODELS)
def test_each_model_packs_by_the_way_that_the_probe_proved(made: Callable[[str], Path], name: str) -> None:
    module, expected = load(made(name)), MODELS[name][2]
    assert module.packs == expected, module.why_not_packed
    assert (module.why_not_packed is None) == (expected is not None)
    ids, positions = random_ids(1, 10), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    docs = torch.tensor([[0] * 4 + [1] * 6])
    if expected is None:
        with pytest.raises(ValueError, match="one document in a row: .* does not keep packed documents apart"):
            module(ids, positions, docs)
        return
    packed = module.eval()(ids, positions, docs)
    alone = torch.cat((module(ids[:, :4], positions[:, :4]), module(ids[:, 4:], positions[:, 4:])), dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


def test_documents_longer_than_a_published_window_keep_it(tmp_path: Path) -> None:
    """The probe shrinks a window of 64; rows that meet the real one must give what Transformers gives."""
    from transformers import AutoModelForCausalLM

    folder = make(tmp_path, "mixtral with a window", sliding_window=64)
    module, ids = load(folder).eval(), random_ids(1, 200)
    assert module.packs == "window mask"
    assert module.hf.config.sliding_window == 64
    positions = torch.cat((torch.arange(90), torch.arange(110)))[None]
    docs = (torch.arange(200) >= 90).long()[None]
    plain = AutoModelForCausalLM.from_pretrained(str(folder))
    with torch.no_grad():
        packed = module(ids, positions, docs)
        torch.testing.assert_close(packed[:, :90], plain(ids[:, :90]).logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(packed[:, 90:], plain(ids[:, 90:]).logits, rtol=1e-5, atol=1e-5)


def test_positions_alone_pack_where_masks_are_taken_away(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "WAYS", {"positions": probing.WAYS["positions"]})
    module = load(made("gpt_neox"))
    assert module.packs == "positions"
    with pytest.raises(ValueError, match="positions must start again"):
        module(random_ids(1, 8), torch.arange(8)[None], torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]]))


@pytest.mark.parametrize("name", ["gpt_neox", "mixtral with a window", "gemma2 with caps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_probe_refuses_a_mask_without_boundaries(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    """The fault, planted: a plain causal mask. Only positions are left as a way then, and nothing where they go too."""
    plain = lambda docs: torch.ones(*docs.shape, docs.shape[1], dtype=torch.bool).tril()  # noqa: E731
    monkeypatch.setattr(fallback, "same_document", plain)
    assert load(made(name), dtype=dtype).packs == "positions"
    masks = {way: said for way, said in probing.WAYS.items() if way != "positions"}
    monkeypatch.setattr(probing, "WAYS", masks)
    module = load(made(name), dtype=dtype)
    assert module.packs is None
    assert "a document sees another one" in (module.why_not_packed or "")


def test_the_probe_refuses_a_mask_that_loses_the_window(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "WAYS", {"mask": probing.WAYS["mask"]})
    module = load(made("mixtral with a window"))
    assert module.packs is None
    assert "other logits than alone" in (module.why_not_packed or "")


@pytest.mark.parametrize("name", ["gpt_neox", "gemma2 with caps", "qwen2_moe", "jamba"])
def test_bf16_packs_as_fp32_does_and_keeps_its_rotary_table_in_fp32(made: Callable[[str], Path], name: str) -> None:
    module = load(made(name), dtype=torch.bfloat16)
    assert module.packs == MODELS[name][2]
    ids = random_ids(2, 9)
    assert module(ids, torch.arange(9).expand(2, 9)).dtype == torch.bfloat16
    for buffer_name, buffer in module.named_buffers():
        if "inv_freq" in buffer_name:
            assert buffer.dtype == torch.float32, buffer_name


def test_loading_leaves_the_random_state_and_the_console_alone(
    made: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = made("mamba")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    module = load(folder)
    assert torch.equal(torch.get_rng_state(), before)
    assert module.training
    assert all(part.training for part in module.modules())
    assert capfd.readouterr() == ("", "")


def test_an_encoder_is_refused_as_not_causal(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "encoder", "bert", **SHAPE)
    with pytest.raises(UsageError, match="is not causal: a token sees what comes after it"):
        load(folder)
    edit_config(folder, is_decoder=True)
    assert load(folder).packs == "mask"


def test_a_model_whose_rows_see_each_other_is_refused(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Fallback._logits

    def mixed(self: Fallback, ids: Tensor, mask: Any, positions: Tensor) -> Tensor:
        logits = honest(self, ids, mask, positions)
        return logits + 1e-3 * logits.mean(dim=0, keepdim=True)

    monkeypatch.setattr(Fallback, "_logits", mixed)
    with pytest.raises(UsageError, match="mixes the rows of a batch"):
        load(made("gpt_neox"))


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    from transformers import BartConfig, T5Config

    T5Config().save_pretrained(tmp_path / "t5")
    BartConfig(d_model=32).save_pretrained(tmp_path / "bart")
    for name in ("t5", "bart"):
        with pytest.raises(UsageError, match=r"config.json: an encoder-decoder"):
            load(tmp_path / name)


def test_the_capped_model_is_computed_eagerly_and_never_by_sdpa(made: Callable[[str], Path]) -> None:
    assert load(made("gemma2 with caps")).hf.config._attn_implementation == "eager"
    with pytest.raises(UsageError, match="caps its attention scores"):
        load(made("gemma2 with caps"), "sdpa")


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_attention_is_the_one_asked_for(made: Callable[[str], Path], backend: str) -> None:
    assert load(made("gpt_neox"), backend).hf.config._attn_implementation == backend


@pytest.mark.parametrize("backend", ["flash", "flex", "nonsense"])
def test_other_attention_is_a_usage_error(made: Callable[[str], Path], backend: str) -> None:
    with pytest.raises(UsageError, match="sdpa and eager"):
        load(made("gpt_neox"), backend)


def test_sdpa_for_a_model_without_it_is_a_usage_error(made: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match="cannot build the model"):
        load(made("mpt"), "sdpa")


def test_a_folder_that_is_not_there_or_says_nonsense_is_a_usage_error(neox: Path) -> None:
    with pytest.raises(UsageError, match="nowhere does not exist"):
        load(neox / "nowhere")
    for text, reason in (("{", "not a readable JSON"), ("[]", "not an object"), ("{}", "model_type None")):
        (neox / "config.json").write_text(text)
        with pytest.raises(UsageError, match=rf"config.json: {reason}"):
            load(neox)
    (neox / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not a readable JSON"):
        load(neox)


def test_an_unknown_kind_and_impossible_numbers_are_usage_errors(neox: Path) -> None:
    edit_config(neox, model_type="vit")
    with pytest.raises(UsageError, match="'vit' is not a causal language model .*\n.*AutoModelForCausalLM"):
        load(neox)
    edit_config(neox, model_type="gpt_neox", hidden_size="wide")
    with pytest.raises(UsageError, match=r"config.json: does not describe a model"):
        load(neox)


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
    tensors |= {f"stranger.{number}": torch.zeros(1) for number in range(11)}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="do not fit config.json") as caught:
        load(neox)
    said = str(caught.value)
    assert "missing: gpt_neox.final_layer_norm.weight" in said
    assert "gpt_neox.layers.0.mlp.dense_h_to_4h.bias (file [7], model [48])" in said
    assert "stranger.0" in said
    assert "and 3 more" in said


def test_a_truncated_or_foreign_file_is_a_checkpoint_error(neox: Path) -> None:
    file = neox / "model.safetensors"
    whole = file.read_bytes()
    for content in (whole[:-1], whole[: len(whole) // 2], b"", b"not safetensors at all"):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model.safetensors: damaged"):
            load(neox)


def test_a_pickle_is_never_read(neox: Path) -> None:
    torch.save(load_file(neox / "model.safetensors"), neox / "pytorch_model.bin")
    (neox / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="pytorch_model.bin is a pickle, which is never read"):
        load(neox)


def test_shards_load_and_a_missing_one_is_named(neox: Path) -> None:
    module = load(neox)
    (neox / "model.safetensors").unlink()
    module.hf.save_pretrained(neox, max_shard_size="20KB")
    shards = sorted(neox.glob("model-*.safetensors"))
    assert len(shards) > 1
    again = load(neox)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"are not there: {shards[1].name}"):
        load(neox)
    (neox / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(CheckpointError, match="not a readable index"):
        load(neox)


def test_weights_that_are_not_numbers_are_a_checkpoint_error(neox: Path) -> None:
    tensors = load_file(neox / "model.safetensors")
    tensors["gpt_neox.final_layer_norm.weight"][0] = float("nan")
    save_file(tensors, neox / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="not finite"):
        load(neox)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_saved_and_loaded_is_the_same_bit_for_bit(
    made: Callable[[str], Path], tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    from transformers import AutoModelForCausalLM

    module, ids = load(made(name), dtype=dtype).eval(), random_ids(2, 9)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.01)
        save_fallback(module, tmp_path)
        again = load(tmp_path, dtype=dtype)
        state, loaded = module.state_dict(), again.state_dict()
        assert state.keys() == loaded.keys()
        assert all(torch.equal(state[key], loaded[key]) for key in state)
        attention = module.hf.config._attn_implementation
        plain = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype="auto", attn_implementation=attention)
        theirs = plain(ids).logits
        positions = torch.arange(9).expand(2, 9)
        assert torch.equal(again.eval()(ids, positions), module(ids, positions))
        assert again.hf.dtype == dtype
        torch.testing.assert_close(theirs, module(ids, positions), rtol=1e-5, atol=1e-5)
    if dtype == torch.float32 and name == "mixtral":
        assert {*load_file(made(name) / "model.safetensors")} == {*load_file(tmp_path / "model.safetensors")}


def test_how_the_model_likes_to_be_sampled_is_kept_and_has_no_say(neox: Path, tmp_path: Path) -> None:
    """The file holds what Transformers itself refuses to save, and settings that would change what is generated."""
    prompts = [[1, 2, 3], [5, 6, 7, 8, 9, 10], [4]]
    plain = load(neox)
    wanted = plain.generate(prompts, 12)
    edit_config(neox, temperature=0.1)
    (neox / "generation_config.json").unlink()
    untidy = load(neox)
    assert any("will not be saved" in note for note in untidy.notes)
    save_fallback(untidy, tmp_path / "tidy")
    content = '{"temperature": 0.1, "repetition_penalty": 9.0, "max_length": 4, "eos_token_id": %d, "top_k": 2}'
    (neox / "generation_config.json").write_text(content % wanted[0][3])
    module = load(neox)
    assert module.generate(prompts, 12) == wanted
    save_fallback(module, tmp_path / "saved")
    assert (tmp_path / "saved" / "generation_config.json").read_text() == content % wanted[0][3]


@pytest.mark.parametrize("name", ["gpt_neox", "mamba", "gemma2 with caps", "opt"])
def test_greedy_text_equals_transformers_and_reading_all_again(made: Callable[[str], Path], name: str) -> None:
    module, prompts = load(made(name)), [[1, 2, 3], [9, 8, 7, 6, 5, 4], [11]]
    got = module.generate(prompts, 10)
    assert module.training
    module.eval()
    choose = fallback._Choose(0.0, None)
    for prompt, new in zip(prompts, got, strict=True):
        assert new == module._continue_anew(prompt, 10, [], choose)
        theirs = module.hf.generate(
            torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert new == theirs[0, len(prompt) :].tolist()
    stop = got[0][4]
    stopped = module.generate(prompts, 10, stop_ids=[stop])
    assert stopped == [row[: row.index(stop)] if stop in row else row for row in got]


def test_sampling_draws_from_the_softmax_with_the_given_generator(made: Callable[[str], Path]) -> None:
    module = load(made("gpt_neox"))
    draw = lambda seed: module.generate([[1, 2, 3]], 8, (), 0.7, torch.Generator().manual_seed(seed))  # noqa: E731
    assert draw(0) == draw(0)
    assert len({tuple(draw(seed)[0]) for seed in range(5)}) > 1
    with torch.no_grad():
        logits = module.eval()(torch.tensor([[1, 2, 3]]), torch.arange(3)[None])[:, -1]
    first = torch.multinomial((logits / 0.7).softmax(-1), 1, generator=torch.Generator().manual_seed(0)).item()
    assert draw(0)[0][0] == first
    assert module.generate([[1], [2]], 0) == [[], []]
    with pytest.raises(ValueError, match="empty prompt"):
        module.generate([[]], 3)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("gpt_neox", {}), ("gpt_neox", {"tie_word_embeddings": True}), ("phi", {}), ("opt", {})],
    ids=["own head", "tied", "head with bias", "tied opt"],
)
def test_resizing_keeps_old_rows_and_fills_with_their_mean(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    module = load(make(tmp_path / "model", name, **changes), dtype=torch.bfloat16)
    embedding, head = module.hf.get_input_embeddings(), module.hf.get_output_embeddings()
    tied = head.weight is embedding.weight
    old, old_head = embedding.weight.detach().clone(), head.weight.detach().clone()
    old_bias = None if head.bias is None else head.bias.detach().normal_().clone()
    before = torch.get_rng_state()
    module.resize(VOCABULARY + 9)
    assert torch.equal(torch.get_rng_state(), before)
    embedding, head = module.hf.get_input_embeddings(), module.hf.get_output_embeddings()
    assert module.vocab_size == module.hf.config.vocab_size == VOCABULARY + 9
    assert (head.weight is embedding.weight) == tied
    pairs = [(old, embedding.weight), (old_head, head.weight)] + ([] if old_bias is None else [(old_bias, head.bias)])
    for was, now in pairs:
        assert torch.equal(now[:VOCABULARY], was)
        assert torch.equal(now[VOCABULARY:], was.float().mean(0).to(now.dtype).expand_as(now[VOCABULARY:]))
    save_fallback(module, tmp_path / "saved")
    again = load(tmp_path / "saved", dtype=torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))
    with pytest.raises(ValueError, match="fewer"):
        module.resize(VOCABULARY)


def test_labels_give_the_sum_for_this_model_and_the_mean_for_all_others(made: Callable[[str], Path]) -> None:
    from transformers import AutoModelForCausalLM

    module, ids = load(made("gpt_neox")).eval(), random_ids(2, 9)
    other = AutoModelForCausalLM.from_pretrained(str(made("gpt_neox")))
    labels = ids.clone()
    labels[0, :5] = -100
    count = int((labels[:, 1:] != -100).sum())
    with torch.no_grad():
        ours, theirs = module.hf(input_ids=ids, labels=labels).loss, other(input_ids=ids, labels=labels).loss
    torch.testing.assert_close(ours, theirs * count)
    assert ours > 2 * theirs
    assert "_loss_function" not in vars(type(module.hf))


def test_what_training_does_differently_is_said(tmp_path: Path, made: Callable[[str], Path]) -> None:
    assert (
        "the router's auxiliary loss (router_aux_loss_coef 0.02) is not part of the loss here"
        in load(made("mixtral")).notes
    )
    dropping = load(make(tmp_path, "gpt_neox", hidden_dropout=0.25))
    assert any("hidden_dropout 0.25" in note for note in dropping.notes)
    ids, positions = random_ids(1, 9), torch.arange(9)[None]
    assert not torch.equal(dropping(ids, positions), dropping(ids, positions))
    assert load(made("gpt_neox")).notes == []


def test_recomputed_activations_give_the_same_gradients(made: Callable[[str], Path]) -> None:
    ids, positions, docs = random_ids(1, 8), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]), torch.tensor([[0] * 3 + [1] * 5])
    gradients = []
    for recompute in (False, True):
        module = load(made("gpt_neox"))
        if recompute:
            module.checkpoint_activations()
        module(ids, positions, docs).square().sum().backward()
        gradients.append([p.grad for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    module.hf.supports_gradient_checkpointing = False
    with pytest.raises(UsageError, match="cannot recompute"):
        module.checkpoint_activations()


def test_sizes_are_those_of_the_model(made: Callable[[str], Path]) -> None:
    assert (load(made("gpt_neox")).vocab_size, load(made("gpt_neox")).max_positions) == (VOCABULARY, 256)
    assert load(made("mpt")).max_positions == 256
    assert load(made("mamba")).max_positions is None


def test_padding_may_run_past_a_table_of_positions(tmp_path: Path) -> None:
    """Rows end at a multiple of 8; a table of 20 positions must not be asked for the 24th."""
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
    """A folder with code of its own, which Transformers copies into a cache; that one is the test's too."""
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


def test_code_in_the_folder_is_not_run_unasked(custom: Path, neox: Path, tmp_path: Path) -> None:
    (custom / "modeling_running.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + CUSTOM_CODE)
    with pytest.raises(UsageError, match="--model.trust_remote_code true .* runs the code"):
        load(custom)
    assert not (tmp_path / "ran").exists()
    edit_config(neox, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    with pytest.raises(UsageError, match='remove "auto_map" from config.json to use the gpt_neox'):
        load(neox)


def test_trusted_code_loads_trains_generates_and_is_saved_along(custom: Path, tmp_path: Path) -> None:
    module = load(custom, trust_remote_code=True)
    assert module.packs is None
    assert any("computes no loss of its own" in note for note in module.notes)
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
    save_fallback(module, tmp_path / "saved")
    assert (tmp_path / "saved" / "modeling_running.py").is_file()
    again = load(tmp_path / "saved", trust_remote_code=True)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))
    assert module.generate([[1, 2]], 4) == again.generate([[1, 2]], 4)
    assert len(module.generate([[1, 2]], 4)[0]) == 4


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        for name in MODELS:
            folder = make(Path(place) / name.replace(" ", "-"), name)
            for dtype in (torch.float32, torch.bfloat16):
                module = load(folder, dtype=dtype)
                figures = {
                    "model": name,
                    "dtype": str(dtype),
                    "attention": module.hf.config._attn_implementation,
                    "packs": module.packs,
                    "why_not_packed": module.why_not_packed,
                }
                print(json.dumps(figures))


if __name__ == "__main__":
    main()


def test_rows_beyond_what_transformers_computes_alone_are_refused(made: Callable[[str], Path], tmp_path: Path) -> None:
    """A table of positions has an end; longrope goes by the longest row of a batch beyond its original length."""
    opt = load(made("opt"))
    assert opt.why_not_rows(opt.max_positions) is None
    assert f"a table of {opt.max_positions} positions" in opt.why_not_rows(opt.max_positions + 1)
    phi = load(tiny_families.make_model(tmp_path, "phi3", "longrope"))
    assert phi.why_not_rows(12) is None
    assert "beyond 12 tokens its rotary positions depend on the longest row" in phi.why_not_rows(13)
    neox = load(made("gpt_neox"))
    assert neox.why_not_rows(10**6) is None

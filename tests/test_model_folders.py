"""Model folders that are damaged, half there, or of something else: refused with the file named, never half loaded.

And those that only look strange (old names, copies of tied heads, shards, other numbers): read bit for bit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from test_cli import flags, torchstone  # noqa: F401
from tiny import make_llama
from tiny_families import make_model
from torchstone import api
from torchstone.data.tokenize import Tokenizer
from torchstone.errors import CheckpointError, TorchstoneError, UsageError
from torchstone.models.decoder import Decoder
from torchstone.models.execution import Execution
from torchstone.models.model import Model
from torchstone.models.opening import load_model
from torchstone.models.weights import save_weights

Settings = Callable[..., dict[str, Any]]
Command = Callable[..., tuple[int, str, str]]
Change = Callable[[Path], object]

CPU = torch.device("cpu")
LAYERS = 3
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# A family of the native decoder, and one that runs in Transformers.
KINDS = ("native", "fallback")
QUERY, EMBEDDING = "model.layers.1.self_attn.q_proj.weight", "model.embed_tokens.weight"
LFS_POINTER = (
    "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24\n"
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> dict[str, Path]:
    sizes = {"vocab_size": 448, "num_hidden_layers": LAYERS, "max_position_embeddings": 256}
    native = make_llama(tmp_path_factory.mktemp("native"), tokenizer, **sizes)
    fallback = tmp_path_factory.mktemp("fallback")
    save_model(fallback, "stablelm", num_key_value_heads=2, **sizes)
    tokenizer.save(fallback)
    return {"native": native, "fallback": fallback}


def save_model(folder: Path, model_type: str, auto_class: str = "AutoModelForCausalLM", **sizes: Any) -> Path:
    import transformers

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **(shape | sizes))
    getattr(transformers, auto_class).from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(sources: dict[str, Path], kind: str, tmp_path: Path) -> Path:
    """A sound folder of one kind, to be damaged."""
    return Path(shutil.copytree(sources[kind], tmp_path / "model"))


@pytest.fixture
def refused(torchstone: Command, settings: Settings, tmp_path: Path) -> Callable[..., str]:  # noqa: F811
    """What `torchstone train` says of a folder that it refuses; the run has saved nothing."""

    def run(folder: Path, codes: tuple[int, ...] = (2, 6), **changes: Any) -> str:
        given = settings(model__path=str(folder), training__max_steps=1, data__packing=False, **changes)
        new = ("model.depth", "model.width", "model.heads", "model.tokenizer")
        code, _, err = torchstone("train", *flags({key: value for key, value in given.items() if key not in new}))
        assert code in codes, f"exit code {code}: {err}"
        assert "Traceback" not in err
        assert "error: " in err
        assert not (tmp_path / "run/checkpoints").exists()
        return err

    return run


def config_with(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def config_without(*keys: str) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in keys}))

    return change


def config_of(content: bytes) -> Change:
    return lambda folder: (folder / "config.json").write_bytes(content)


def weights_of(content: bytes) -> Change:
    return lambda folder: (folder / WEIGHTS).write_bytes(content)


def tensors_with(change: Callable[[dict[str, Tensor]], object]) -> Change:
    def changed(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})

    return changed


def replaced(name: str, make: Callable[[Tensor], Tensor]) -> Change:
    return tensors_with(lambda tensors: tensors.update({name: make(tensors[name])}))


def sharded(folder: Path, pieces: int = 3) -> dict[str, Any]:
    """The folder's one file becomes shards; returns the index, as it was written."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    where = {}
    for number in range(pieces):
        file = f"model-{number + 1:05d}-of-{pieces:05d}.safetensors"
        part = names[number::pieces]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    (folder / WEIGHTS).unlink()
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index))
    return index


def index_with(change: Callable[[dict[str, str]], object]) -> Change:
    def changed(folder: Path) -> None:
        index = sharded(folder)
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return changed


def index_of(content: str) -> Change:
    def changed(folder: Path) -> None:
        sharded(folder)
        (folder / INDEX).write_text(content)

    return changed


def a_directory_in_its_place(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def only_a_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")


def moved_outside(folder: Path) -> None:
    index = sharded(folder)
    first = index["weight_map"][EMBEDDING]
    (folder / first).rename(folder.parent / "outside.safetensors")
    index["weight_map"] = {k: "../outside.safetensors" if v == first else v for k, v in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))


def lost_from_its_shard(folder: Path) -> None:
    shard = folder / sharded(folder)["weight_map"][QUERY]
    tensors = load_file(shard)
    del tensors[QUERY]
    save_file(tensors, shard, metadata={"format": "pt"})


def stale_beside_shards(folder: Path) -> None:
    single = (folder / WEIGHTS).read_bytes()
    sharded(folder)
    (folder / WEIGHTS).write_bytes(single)


def twice(folder: Path) -> None:
    """One tensor in two shards, and not the same."""
    where = sharded(folder)["weight_map"]
    other = folder / next(file for file in where.values() if file != where[QUERY])
    tensors = load_file(other) | {QUERY: load_file(folder / where[QUERY])[QUERY] + 1}
    save_file(tensors, other, metadata={"format": "pt"})


CONFIGS: dict[str, tuple[Change, str]] = {
    "missing": (lambda folder: (folder / "config.json").unlink(), "neither a Hugging Face folder nor a run"),
    "empty": (config_of(b""), "config.json: not a readable JSON file"),
    "not JSON": (config_of(b"{model_type: llama}"), "config.json: not a readable JSON file"),
    "deeply nested": (config_of(b'{"a":' * 100_000), "config.json: not a readable JSON file"),
    "a list": (config_of(b"[1, 2]"), "config.json: not an object"),
    "not UTF-8": (config_of(b'{"model_type": "\xff\xfe"}'), "config.json: not a readable JSON file"),
    "no model_type": (config_without("model_type"), "config.json: model_type None"),
    "a model_type nobody knows": (config_with(model_type="starling9"), "config.json: model_type 'starling9'"),
    "a model_type that is a list": (config_with(model_type=["llama"]), "config.json: "),
    "a width in words": (config_with(hidden_size="thirty-two"), "config.json: does not describe a model"),
    "no vocabulary": (config_with(vocab_size=None), "config.json: does not describe a model"),
    "half a layer": (config_with(num_hidden_layers=2.5), "config.json: does not describe a model"),
    "rope in words": (config_with(rope_parameters="llama3"), "config.json: "),
}
WEIGHT_FILES: dict[str, tuple[Change, str]] = {
    "missing": (lambda folder: (folder / WEIGHTS).unlink(), f"no {WEIGHTS} and no {INDEX}"),
    "of no length": (weights_of(b""), f"{WEIGHTS}: damaged or not a safetensors file"),
    "a directory": (a_directory_in_its_place, f"no {WEIGHTS} and no {INDEX}"),
    "a text": (weights_of(b"The weights are in the other folder.\n" * 9), f"{WEIGHTS}: damaged or not a safetensors"),
    "a pointer of git-lfs": (weights_of(LFS_POINTER.encode()), f"{WEIGHTS}: damaged or not a safetensors file"),
    "a header of garbage": (weights_of(b"\x40" + b"\x00" * 7 + b"garbage!" * 8), f"{WEIGHTS}: damaged or not a safe"),
    "a header without end": (weights_of(b"\xff" * 64), f"{WEIGHTS}: damaged or not a safetensors file"),
    "a pickle alone": (only_a_pickle, "pytorch_model.bin is a pickle, which is never read"),
}
TENSORS: dict[str, tuple[Change, str]] = {
    "one missing": (tensors_with(lambda t: t.pop(QUERY)), f"missing: {QUERY}"),
    "one too many": (tensors_with(lambda t: t.update({"model.extra.weight": torch.ones(3)})), "model.extra.weight"),
    "of a layer that is not there": (
        tensors_with(lambda t: t.update({QUERY.replace(".1.", ".17."): t[QUERY].clone()})),
        QUERY.replace(".1.", ".17."),
    ),
    "of another shape": (replaced(QUERY, lambda t: t[:-1]), QUERY),
    "a row too many": (replaced(QUERY, lambda t: torch.cat((t, t[:1]))), QUERY),
    "on their side": (replaced("model.layers.0.mlp.up_proj.weight", lambda t: t.T), "model.layers.0.mlp.up_proj"),
    "flat": (replaced(QUERY, lambda t: t.flatten()), QUERY),
}
INDEXES: dict[str, tuple[Change, str]] = {
    "empty": (index_of(""), f"{INDEX}: not a readable index"),
    "a list": (index_of("[]"), f"{INDEX}: not a readable index"),
    "without a map": (index_of("{}"), f"{INDEX}: not a readable index"),
    "naming a shard that is not there": (
        index_with(lambda where: where.update({QUERY: "model-00009-of-00009.safetensors"})),
        "model-00009-of-00009.safetensors",
    ),
    "naming a tensor that no shard has": (lost_from_its_shard, f"missing: {QUERY}"),
}


def cases(table: dict[str, tuple[Change, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("change", "said"), list(table.values()), ids=list(table))


@pytest.mark.parametrize("kind", KINDS)
class TestDamaged:
    @cases(CONFIGS)
    def test_configs(self, refused: Callable[..., str], folder: Path, change: Change, said: str) -> None:
        change(folder)
        err = refused(folder, codes=(2,))
        assert said in err
        assert str(folder) in err

    @cases(WEIGHT_FILES | {f"index {name}": case for name, case in INDEXES.items()})
    def test_files_of_weights(self, refused: Callable[..., str], folder: Path, change: Change, said: str) -> None:
        change(folder)
        err = refused(folder, codes=(6,))
        assert said in err
        assert str(folder) in err

    @cases(TENSORS)
    def test_tensors(self, refused: Callable[..., str], folder: Path, change: Change, said: str) -> None:
        change(folder)
        err = refused(folder, codes=(6,))
        assert said in err
        assert str(folder) in err

    def test_a_file_that_ends_early_anywhere(self, folder: Path, kind: str) -> None:
        """At every power of two, at the last bytes, and with a byte too many."""
        path = folder / WEIGHTS
        whole = path.read_bytes()
        cuts = sorted({2**n for n in range(len(whole).bit_length())} | {len(whole) - n for n in (1, 2, 4, 8, 100)})
        for cut in cuts:
            path.write_bytes(whole[:cut])
            with pytest.raises(CheckpointError, match=f"{WEIGHTS}: damaged or not a safetensors file"):
                load_model(folder, CPU, execution=Execution(implementation=kind))  # type: ignore[arg-type]
        path.write_bytes(whole + b"\0")
        with pytest.raises(CheckpointError, match=f"{WEIGHTS}: damaged or not a safetensors file"):
            load_model(folder, CPU, execution=Execution(implementation=kind))  # type: ignore[arg-type]

    def test_export_and_evaluate_refuse_as_well(
        self,
        torchstone: Command,  # noqa: F811
        folder: Path,
        tmp_path: Path,
        text_file: Path,
    ) -> None:
        path = folder / WEIGHTS
        path.write_bytes(path.read_bytes()[:-4])
        for words in (
            ("export", folder, tmp_path / "out"),
            ("evaluate", folder, "--data", text_file, "--cache-dir", tmp_path / "cache"),
            ("chat", folder, "--prompt", "Hello"),
        ):
            code, out, err = torchstone(*words)
            assert (code, out) == (6, "")
            assert f"{path}: damaged" in err
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("size", ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"])
    @pytest.mark.parametrize("value", [10**12, 10**19])
    def test_a_size_that_nothing_could_hold(
        self, refused: Callable[..., str], folder: Path, size: str, value: int
    ) -> None:
        config_with(**{size: value})(folder)
        assert str(folder) in refused(folder)


class TestDamagedNative:
    """What the native reader alone looks for, or says better."""

    @pytest.fixture
    def kind(self) -> str:
        return "native"

    @pytest.mark.parametrize("value", [10**6, 10**12, 10**19])
    def test_more_layers_than_anything_could_hold(self, refused: Callable[..., str], folder: Path, value: int) -> None:
        config_with(num_hidden_layers=value)(folder)
        assert "config.json: does not describe a model" in refused(folder, codes=(2,))

    def test_layer_types_are_not_made_for_layers_that_cannot_be(self, tmp_path: Path) -> None:
        folder = make_model(tmp_path / "qwen", "qwen2", "plain")
        config_without("layer_types")(folder)
        config_with(num_hidden_layers=10**12)(folder)
        with pytest.raises(UsageError, match="config.json: does not describe a model"):
            load_model(folder, CPU)

    def test_a_shard_outside_the_folder_is_not_read(self, refused: Callable[..., str], folder: Path) -> None:
        moved_outside(folder)
        err = refused(folder, codes=(6,))
        assert f"{INDEX}: names ../outside.safetensors, which is not in the folder" in err

    def test_a_tensor_in_two_shards_is_refused(self, refused: Callable[..., str], folder: Path) -> None:
        twice(folder)
        err = refused(folder, codes=(6,))
        assert f"{QUERY} is in model-0000" in err
        assert " and in model-0000" in err

    def test_an_index_beside_a_file_of_its_own_is_refused(self, refused: Callable[..., str], folder: Path) -> None:
        """Transformers reads the single file, others the shards: which of them is stale, nobody can tell."""
        stale_beside_shards(folder)
        err = refused(folder, codes=(6,))
        assert f"both {WEIGHTS} and {INDEX}" in err

    def test_an_index_of_the_single_file_is_read(self, sources: dict[str, Path], folder: Path) -> None:
        names = load_file(folder / WEIGHTS)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, WEIGHTS)}))
        assert same(load_model(folder, CPU), load_model(sources["native"], CPU))

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool])
    def test_whole_numbers_are_no_weights(self, refused: Callable[..., str], folder: Path, dtype: torch.dtype) -> None:
        replaced(QUERY, lambda tensor: (tensor * 10).to(dtype))(folder)
        err = refused(folder, codes=(6,))
        assert f"{folder / WEIGHTS}: {QUERY} holds {str(dtype).removeprefix('torch.')}" in err

    def test_a_byte_changed_in_the_header_is_refused_or_changes_nothing(self, folder: Path) -> None:
        path, sound = folder / WEIGHTS, load_model(folder, CPU)
        whole = path.read_bytes()
        length = int.from_bytes(whole[:8], "little")
        kept = 0
        for place in [*range(8), *range(8, 8 + length, 37)]:
            damaged = bytearray(whole)
            damaged[place] ^= 0x01
            path.write_bytes(damaged)
            try:
                model = load_model(folder, CPU)
            except CheckpointError:
                continue
            kept += 1
            assert same(model, sound), place
        assert kept <= 2, "only the note on the format may change"

    def test_a_tied_model_with_another_head_is_refused(self, refused: Callable[..., str], folder: Path) -> None:
        config_with(tie_word_embeddings=True)(folder)
        err = refused(folder, codes=(6,))
        assert f"{folder / WEIGHTS}: config.json ties the output head to the embedding" in err
        assert "lm_head.weight" in err

    @pytest.mark.parametrize("shape", ["a row more", "a row less", "on its side"])
    def test_a_tied_head_of_another_shape_is_refused(
        self, refused: Callable[..., str], folder: Path, shape: str
    ) -> None:
        def head(tensors: dict[str, Tensor]) -> None:
            matrix = tensors[EMBEDDING]
            made = {"a row more": torch.cat((matrix, matrix[:1])), "a row less": matrix[:-1], "on its side": matrix.T}
            tensors["lm_head.weight"] = made[shape].clone()

        config_with(tie_word_embeddings=True)(folder)
        tensors_with(head)(folder)
        assert "ties the output head to the embedding" in refused(folder, codes=(6,))

    @pytest.mark.parametrize("name", [QUERY, EMBEDDING, "lm_head.weight", "model.norm.weight"])
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_weights_that_are_no_numbers_stop_the_first_step(
        self, refused: Callable[..., str], folder: Path, name: str, value: float
    ) -> None:
        replaced(name, lambda tensor: torch.full_like(tensor, value))(folder)
        err = refused(folder, codes=(5, 6))
        assert "step 1: loss nan" in err
        assert "stopped before they reached the weights" in err

    def test_nan_is_named_when_it_is_exported(self, folder: Path, tmp_path: Path) -> None:
        replaced(QUERY, lambda tensor: torch.full_like(tensor, float("nan")))(folder)
        with pytest.raises(CheckpointError, match=rf"{QUERY} holds numbers that are none \(NaN\)"):
            api.export(str(folder), tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_evaluate_does_not_report_nan_as_a_result(
        self,
        torchstone: Command,  # noqa: F811
        folder: Path,
        text_file: Path,
        tmp_path: Path,
    ) -> None:
        replaced("model.norm.weight", lambda tensor: torch.full_like(tensor, float("nan")))(folder)
        code, out, _ = torchstone("evaluate", folder, "--data", text_file, "--cache-dir", tmp_path / "cache", "--json")
        assert (code, out) == (5, "")

    def test_an_adapter_beside_a_model_is_not_passed_over(self, refused: Callable[..., str], folder: Path) -> None:
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
        assert "holds an adapter (adapter_config.json)" in refused(folder, codes=(2,))


class TestDamagedFallback:
    """The same faults in models that run in Transformers, which does not look for them itself."""

    @pytest.fixture
    def kind(self) -> str:
        return "fallback"

    @pytest.mark.parametrize(
        "change",
        [moved_outside, twice, stale_beside_shards, replaced(QUERY, lambda tensor: (tensor * 10).to(torch.int64))],
        ids=["a shard outside", "a tensor twice", "a stale single file", "whole numbers"],
    )
    def test_it_is_refused_as_in_a_native_folder(
        self, refused: Callable[..., str], folder: Path, change: Change
    ) -> None:
        change(folder)
        assert str(folder) in refused(folder, codes=(6,))


class TestForeign:
    def test_nan_in_a_model_of_transformers(
        self, refused: Callable[..., str], sources: dict[str, Path], tmp_path: Path
    ) -> None:
        folder = Path(shutil.copytree(sources["fallback"], tmp_path / "model"))
        replaced(QUERY, lambda tensor: torch.full_like(tensor, float("nan")))(folder)
        err = refused(folder, codes=(5, 6))
        assert "step 1: loss nan" in err or "gives logits that are not finite" in err

    def test_an_adapter_alone(self, refused: Callable[..., str], tmp_path: Path) -> None:
        folder = tmp_path / "adapter"
        folder.mkdir()
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        save_file({"base_model.model.lora_A.weight": torch.ones(2, 2)}, folder / "adapter_model.safetensors")
        assert str(folder) in refused(folder, codes=(2,))

    @pytest.mark.parametrize(
        ("model_type", "auto_class", "sizes", "said"),
        [
            ("bert", "AutoModelForMaskedLM", {"vocab_size": 448}, "a token sees what comes after it"),
            ("bert", "AutoModel", {"vocab_size": 448}, "the weights do not fit config.json"),
            ("vit", "AutoModel", {"image_size": 8, "patch_size": 4}, "model_type 'vit' is not a causal language model"),
            ("t5", "AutoModelForSeq2SeqLM", {"vocab_size": 448, "d_model": 32}, "an encoder-decoder (t5)"),
        ],
    )
    def test_a_model_that_does_not_continue_texts(
        self, refused: Callable[..., str], tmp_path: Path, tokenizer: Tokenizer, model_type: str, auto_class: str,
        sizes: dict[str, Any], said: str,
    ) -> None:  # fmt: skip
        folder = save_model(tmp_path / model_type, model_type, auto_class, **sizes)
        tokenizer.save(folder)
        err = refused(folder)
        assert said in err
        assert str(folder) in err

    def test_a_family_of_decoders_may_hold_an_encoder(self, tmp_path: Path) -> None:
        """`is_causal: false` makes a Llama an encoder in Transformers; here it must not become a decoder."""
        folder = make_model(tmp_path / "encoder", "llama", "grouped")
        config_with(is_causal=False)(folder)
        with pytest.raises(UsageError, match="is_causal False is not computed by the native decoder"):
            load_model(folder, CPU, execution=Execution(implementation="native"))
        with pytest.raises(UsageError, match="a token sees what comes after it"):
            load_model(folder, CPU)

    def test_a_folder_that_is_a_file(self, refused: Callable[..., str], tmp_path: Path) -> None:
        (tmp_path / "file").write_text("{}")
        assert str(tmp_path / "file") in refused(tmp_path / "file", codes=(2,))


class TestStrangeButSound:
    def test_old_gpt2_files_without_a_prefix_and_with_masks(self, tmp_path: Path) -> None:
        new = make_model(tmp_path / "new", "gpt2", "plain")
        old = Path(shutil.copytree(new, tmp_path / "old"))

        def as_it_was(tensors: dict[str, Tensor]) -> None:
            for name in list(tensors):
                tensors[name.removeprefix("transformer.")] = tensors.pop(name)
            for layer in range(3):
                tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
                tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

        tensors_with(as_it_was)(old)
        model = load_model(old, CPU)
        assert same(model, load_model(new, CPU))
        (tmp_path / "out").mkdir()
        model.save(tmp_path / "out")
        assert (tmp_path / "out" / WEIGHTS).read_bytes() == (new / WEIGHTS).read_bytes()

    @pytest.mark.parametrize(("family", "shape"), [("llama", "tied"), ("qwen3", "biases"), ("gemma2", "caps")])
    def test_files_of_the_body_alone(self, tmp_path: Path, family: str, shape: str) -> None:
        whole = make_model(tmp_path / "whole", family, shape)
        body = Path(shutil.copytree(whole, tmp_path / "body"))
        tensors_with(lambda t: [t.update({name.removeprefix("model."): t.pop(name)}) for name in list(t)])(body)
        assert same(load_model(body, CPU), load_model(whole, CPU))

    def test_a_body_alone_has_no_untied_head(self, tmp_path: Path) -> None:
        folder = make_model(tmp_path / "body", "llama", "grouped")
        tensors_with(lambda t: t.pop("lm_head.weight"))(folder)
        with pytest.raises(CheckpointError, match="missing: lm_head.weight"):
            load_model(folder, CPU)

    def test_a_copy_of_the_tied_head_is_read_and_not_written_again(self, tmp_path: Path) -> None:
        folder = make_model(tmp_path / "tied", "llama", "tied")
        before = (folder / WEIGHTS).read_bytes()
        tensors_with(lambda t: t.update({"lm_head.weight": t[EMBEDDING].clone()}))(folder)
        model = load_model(folder, CPU)
        assert isinstance(model.module, Decoder)
        assert model.module.head.weight is model.module.tok_embed.weight
        model.save(folder)
        assert (folder / WEIGHTS).read_bytes() == before

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize("kind", KINDS)
    def test_other_numbers_become_fp32_as_torch_makes_them(self, folder: Path, dtype: torch.dtype) -> None:
        original = load_file(folder / WEIGHTS)
        # Of fp64, digits that fp32 does not have.
        tensors = {name: (t.double() / 3).to(dtype) for name, t in original.items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        got = load_model(folder, CPU).disk_tensors()
        for name, tensor in tensors.items():
            assert got[name].dtype == torch.float32
            assert torch.equal(got[name], tensor.float()), name
            if dtype != torch.float64:
                assert torch.equal(got[name].to(dtype), tensor), name

    @pytest.mark.parametrize("kind", KINDS)
    def test_shards_hold_what_one_file_holds(self, sources: dict[str, Path], folder: Path, kind: str) -> None:
        sharded(folder, pieces=5)
        assert same(load_model(folder, CPU), load_model(sources[kind], CPU))

    def test_a_tensor_in_another_shard_than_the_index_says_is_found(
        self, sources: dict[str, Path], tmp_path: Path
    ) -> None:
        folder = Path(shutil.copytree(sources["native"], tmp_path / "model"))
        index_with(lambda where: where.update({QUERY: where[EMBEDDING], EMBEDDING: where[QUERY]}))(folder)
        assert same(load_model(folder, CPU), load_model(sources["native"], CPU))

    @pytest.mark.parametrize(
        ("family", "leftover"),
        [
            ("llama", {"hidden_activation": "gelu"}),
            ("llama", {"activation_function": "gelu"}),
            ("qwen3", {"hidden_activation": "gelu"}),
            ("gpt2", {"hidden_act": "silu"}),
            ("gpt2", {"head_dim": 16}),
            ("gpt2", {"num_key_value_heads": 2}),
            ("gemma2", {"hidden_act": "silu"}),
            ("mistral", {"layer_types": ["full_attention"] * 3}),
            ("llama", {"layer_types": ["full_attention"] * 3, "sliding_window": 3}),
        ],
        ids=str,
    )
    def test_leftovers_mean_what_they_mean_to_transformers(
        self, tmp_path: Path, family: str, leftover: dict[str, Any]
    ) -> None:
        from transformers import AutoModelForCausalLM

        shape = {"gemma2": "caps", "gpt2": "plain", "mistral": "window", "qwen3": "head size", "llama": "grouped"}
        folder = make_model(tmp_path / "model", family, shape[family])
        config_with(**leftover)(folder)
        theirs = AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager").eval()
        ids = torch.randint(0, 96, (2, 30), generator=torch.Generator().manual_seed(0))
        model = load_model(folder, CPU)
        with torch.no_grad():
            got = model.module.eval()(ids, torch.arange(30).expand(2, 30))
            assert (got - theirs(ids).logits).abs().max().item() <= 1e-5

    def test_what_is_written_in_shards_is_read_by_the_index_it_wrote(
        self, sources: dict[str, Path], tmp_path: Path
    ) -> None:
        model = load_model(sources["native"], CPU)
        assert isinstance(model.module, Decoder)
        shutil.copy(sources["native"] / "config.json", tmp_path)
        written = save_weights(model.pieces(), model.family, tmp_path, shard_bytes=40_000)  # type: ignore[attr-defined]
        assert len(written) > 3
        assert same(load_model(tmp_path, CPU), model)


def test_the_api_raises_what_the_command_says(sources: dict[str, Path], tmp_path: Path, settings: Settings) -> None:
    folder = Path(shutil.copytree(sources["native"], tmp_path / "model"))
    TENSORS["of another shape"][0](folder)
    given = settings(model__path=str(folder))
    for key in ("model.depth", "model.width", "model.heads", "model.tokenizer"):
        del given[key]
    with pytest.raises(TorchstoneError, match=rf"{QUERY} has shape \[31, 32\], but config.json asks for \[32, 32\]"):
        api.train(overrides=given)


def same(one: Model, other: Model) -> bool:
    a, b = one.disk_tensors(), other.disk_tensors()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_damaged_file_is_found_before_any_data_is_read(
    torchstone: Command,  # noqa: F811
    tmp_path: Path,
    tokenizer: Tokenizer,
) -> None:
    weights = make_llama(tmp_path / "model", tokenizer) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    given = ["--model.path", weights.parent, "--data.path", tmp_path / "not-there.jsonl"]
    # A run of its own: one in runs/train would go on from its checkpoint, which is whole.
    code, _, err = torchstone("train", *given, "--output-dir", tmp_path / "run")
    assert (code, "model.safetensors: damaged" in err) == (6, True), err

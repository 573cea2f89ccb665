"""Model folders: damaged or foreign ones are refused with the file named; unusual but valid ones load bit for bit."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiny import edit_config, flags, make_llama
from tiny_families import make_model
from torchstone import api
from torchstone.checkpoint.model_folder import load_model
from torchstone.checkpoint.save import full_unfused_parameters, hf_state_dict, save_model
from torchstone.checkpoint.weight_files import save_weights
from torchstone.checkpoint.weight_names import WEIGHT_NAMES
from torchstone.data.tokenize import Tokenizer
from torchstone.errors import CheckpointError, TorchstoneError, UsageError
from torchstone.models.execution import ExecutionOptions
from torchstone.models.model import Model, NativeModel

Settings = Callable[..., dict[str, Any]]
Command = Callable[..., tuple[int, str, str]]
Damage = Callable[[Path], object]
TrainError = Callable[..., str]

CPU = torch.device("cpu")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# A family of the native decoder, and one that runs in the Transformers fallback.
IMPLEMENTATIONS = ("native", "fallback")
QUERY, EMBEDDING = "model.layers.1.self_attn.q_proj.weight", "model.embed_tokens.weight"
LFS_POINTER = (
    "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24\n"
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> dict[str, Path]:
    """Undamaged folders by implementation."""
    sizes = {"vocab_size": 448, "num_hidden_layers": 3, "max_position_embeddings": 256}
    native = make_llama(tmp_path_factory.mktemp("native"), tokenizer, **sizes)
    fallback = make_hf_folder(tmp_path_factory.mktemp("fallback"), "stablelm", num_key_value_heads=2, **sizes)
    tokenizer.save(fallback)
    return {"native": native, "fallback": fallback}


def make_hf_folder(folder: Path, model_type: str, auto_class: str = "AutoModelForCausalLM", **sizes: Any) -> Path:
    import transformers

    defaults = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **(defaults | sizes))
    getattr(transformers, auto_class).from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(sources: dict[str, Path], implementation: str, tmp_path: Path) -> Path:
    """A copy of a folder, to be damaged."""
    return Path(shutil.copytree(sources[implementation], tmp_path / "model"))


@pytest.fixture
def train_error(torchstone: Command, settings: Settings, tmp_path: Path) -> TrainError:
    """Runs `torchstone train` on a folder that it must refuse; returns its stderr. No checkpoint may be saved."""

    def run(folder: Path, codes: tuple[int, ...] = (2, 6)) -> str:
        overrides = settings(model__path=str(folder), training__max_steps=1, data__packing=False)
        code, _, err = torchstone("train", *flags(without_new_model(overrides)))
        assert code in codes, f"exit code {code}: {err}"
        assert "Traceback" not in err
        assert "error: " in err
        assert not (tmp_path / "run/checkpoints").exists()
        return err

    return run


def without_new_model(overrides: dict[str, Any]) -> dict[str, Any]:
    """Overrides for a run that starts from model.path, with the tokenizer of that folder."""
    new_model = ("model.depth", "model.width", "model.heads", "model.tokenizer")
    return {key: value for key, value in overrides.items() if key not in new_model}


def same_weights(one: Model, other: Model) -> bool:
    a, b = hf_state_dict(one), hf_state_dict(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def set_config(**changes: Any) -> Damage:
    return lambda folder: edit_config(folder, **changes)


def drop_from_config(*keys: str) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in keys}))

    return damage


def write_config(content: bytes) -> Damage:
    return lambda folder: (folder / "config.json").write_bytes(content)


def write_weights(content: bytes) -> Damage:
    return lambda folder: (folder / WEIGHTS).write_bytes(content)


def edit_tensors(edit: Callable[[dict[str, Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        edit(tensors)
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def edit_tensor(name: str, edit: Callable[[Tensor], Tensor]) -> Damage:
    return edit_tensors(lambda tensors: tensors.update({name: edit(tensors[name])}))


def shard(folder: Path, count: int = 3) -> dict[str, Any]:
    """Replaces the folder's one file by shards; returns their index as it was written."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    weight_map = {}
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        part = names[number::count]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / WEIGHTS).unlink()
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    return index


def edit_index(edit: Callable[[dict[str, str]], object]) -> Damage:
    def damage(folder: Path) -> None:
        index = shard(folder)
        edit(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def write_index(content: str) -> Damage:
    def damage(folder: Path) -> None:
        shard(folder)
        (folder / INDEX).write_text(content)

    return damage


def make_weights_a_directory(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def replace_weights_by_a_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")


def move_a_shard_outside(folder: Path) -> None:
    index = shard(folder)
    first = index["weight_map"][EMBEDDING]
    (folder / first).rename(folder.parent / "outside.safetensors")
    index["weight_map"] = {k: "../outside.safetensors" if v == first else v for k, v in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))


def drop_from_its_shard(folder: Path) -> None:
    path = folder / shard(folder)["weight_map"][QUERY]
    tensors = load_file(path)
    del tensors[QUERY]
    save_file(tensors, path, metadata={"format": "pt"})


def keep_the_file_beside_its_shards(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    shard(folder)
    (folder / WEIGHTS).write_bytes(content)


def put_a_tensor_into_two_shards(folder: Path) -> None:
    weight_map = shard(folder)["weight_map"]
    other = folder / next(file for file in weight_map.values() if file != weight_map[QUERY])
    tensors = load_file(other) | {QUERY: load_file(folder / weight_map[QUERY])[QUERY] + 1}
    save_file(tensors, other, metadata={"format": "pt"})


DAMAGED = "damaged or not a safetensors file"
# What is done to the folder, the exit code, and what stderr must say besides the folder.
DAMAGES: dict[str, tuple[Damage, int, str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), 2, "neither a Hugging Face folder nor a run"),
    "empty config": (write_config(b""), 2, "config.json: not a readable JSON file"),
    "config not JSON": (write_config(b"{model_type: llama}"), 2, "config.json: not a readable JSON file"),
    "config deeply nested": (write_config(b'{"a":' * 100_000), 2, "config.json: not a readable JSON file"),
    "config a list": (write_config(b"[1, 2]"), 2, "config.json: not a JSON object"),
    "config not UTF-8": (write_config(b'{"model_type": "\xff\xfe"}'), 2, "config.json: not a readable JSON file"),
    "no model_type": (drop_from_config("model_type"), 2, "config.json: model_type None"),
    "unknown model_type": (set_config(model_type="starling9"), 2, "config.json: model_type 'starling9'"),
    "model_type a list": (set_config(model_type=["llama"]), 2, "config.json: "),
    "width not a number": (set_config(hidden_size="thirty-two"), 2, "config.json: does not describe a model"),
    "no vocabulary": (set_config(vocab_size=None), 2, "config.json: does not describe a model"),
    "half a layer": (set_config(num_hidden_layers=2.5), 2, "config.json: does not describe a model"),
    "rope_parameters a string": (set_config(rope_parameters="llama3"), 2, "config.json: "),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), 6, f"no {WEIGHTS} and no {INDEX}"),
    "empty weights": (write_weights(b""), 6, f"{WEIGHTS}: {DAMAGED}"),
    "weights a directory": (make_weights_a_directory, 6, f"no {WEIGHTS} and no {INDEX}"),
    "weights a text": (write_weights(b"The weights are in the other folder.\n" * 9), 6, f"{WEIGHTS}: {DAMAGED}"),
    "weights a git-lfs pointer": (write_weights(LFS_POINTER.encode()), 6, f"{WEIGHTS}: {DAMAGED}"),
    "header not JSON": (write_weights(b"\x40" + b"\x00" * 7 + b"garbage!" * 8), 6, f"{WEIGHTS}: {DAMAGED}"),
    "header too long": (write_weights(b"\xff" * 64), 6, f"{WEIGHTS}: {DAMAGED}"),
    "only a pickle": (replace_weights_by_a_pickle, 6, "pytorch_model.bin is a pickle, which is never read"),
    "empty index": (write_index(""), 6, f"{INDEX}: not a readable index"),
    "index a list": (write_index("[]"), 6, f"{INDEX}: not a readable index"),
    "index without weight_map": (write_index("{}"), 6, f"{INDEX}: not a readable index"),
    "index with a missing shard": (
        edit_index(lambda weight_map: weight_map.update({QUERY: "model-00009-of-00009.safetensors"})),
        6,
        "model-00009-of-00009.safetensors",
    ),
    "index with a tensor of no shard": (drop_from_its_shard, 6, f"missing: {QUERY}"),
    "missing tensor": (edit_tensors(lambda t: t.pop(QUERY)), 6, f"missing: {QUERY}"),
    "unknown tensor": (edit_tensors(lambda t: t.update({"model.extra.weight": torch.ones(3)})), 6, "model.extra"),
    "tensor of a missing layer": (
        edit_tensors(lambda t: t.update({QUERY.replace(".1.", ".17."): t[QUERY].clone()})),
        6,
        QUERY.replace(".1.", ".17."),
    ),
    "tensor too short": (edit_tensor(QUERY, lambda t: t[:-1]), 6, QUERY),
    "tensor too long": (edit_tensor(QUERY, lambda t: torch.cat((t, t[:1]))), 6, QUERY),
    "tensor transposed": (
        edit_tensor("model.layers.0.mlp.up_proj.weight", lambda t: t.T), 6, "model.layers.0.mlp.up_proj"
    ),
    "tensor flattened": (edit_tensor(QUERY, lambda t: t.flatten()), 6, QUERY),
}  # fmt: skip


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestDamaged:
    @pytest.mark.parametrize(("damage", "code", "message"), list(DAMAGES.values()), ids=list(DAMAGES))
    def test_a_damaged_folder_is_refused_and_named(
        self, train_error: TrainError, folder: Path, damage: Damage, code: int, message: str
    ) -> None:
        damage(folder)
        err = train_error(folder, codes=(code,))
        assert message in err
        assert str(folder) in err

    def test_a_file_of_another_length_is_refused(self, folder: Path, implementation: Any) -> None:
        """Cut at every power of two and near the end, and one byte too long."""
        path = folder / WEIGHTS
        content = path.read_bytes()
        cuts = {2**n for n in range(len(content).bit_length())} | {len(content) - n for n in (1, 2, 4, 8, 100)}
        for damaged in (*(content[:cut] for cut in sorted(cuts)), content + b"\0"):
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=f"{WEIGHTS}: {DAMAGED}"):
                load_model(folder, CPU, execution=ExecutionOptions(implementation=implementation))

    def test_export_evaluate_and_chat_refuse_it_too(
        self, torchstone: Command, folder: Path, tmp_path: Path, text_file: Path
    ) -> None:
        path = folder / WEIGHTS
        path.write_bytes(path.read_bytes()[:-4])
        for args in (
            ("export", folder, tmp_path / "out"),
            ("evaluate", folder, "--data", text_file, "--cache-dir", tmp_path / "cache"),
            ("chat", folder, "--prompt", "Hello"),
        ):
            code, out, err = torchstone(*args)
            assert (code, out) == (6, "")
            assert f"{path}: damaged" in err
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("size", ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"])
    def test_a_size_beyond_int64_is_refused(self, train_error: TrainError, folder: Path, size: str) -> None:
        set_config(**{size: 10**19})(folder)
        assert str(folder) in train_error(folder)

    @pytest.mark.parametrize(
        ("changes", "problem"),
        [
            ({"num_labels": 10**9}, f"num_labels is {10**9}, more than 2048"),
            ({"num_hidden_layers": 10**9}, f"num_hidden_layers is {10**9}, more than 2048"),
            ({"n_layer": 2049}, "n_layer is 2049, more than 2048"),
            ({"text_config": {"num_local_experts": [10**9]}}, f"num_local_experts is {10**9}, more than 2048"),
            ({"vision_config": {"patch_size": 10**10}}, f"patch_size is {10**10}, more than {2**30}"),
        ],
    )
    def test_an_absurd_size_anywhere_is_refused(
        self, folder: Path, implementation: Any, changes: dict[str, Any], problem: str
    ) -> None:
        """Before Transformers makes a Python object for every layer and label, which takes all memory."""
        set_config(**changes)(folder)
        with pytest.raises(UsageError, match=f"config.json: does not describe a model: {problem}"):
            load_model(folder, CPU, execution=ExecutionOptions(implementation=implementation))

    def test_numbers_that_build_nothing_may_be_large(self, folder: Path) -> None:
        set_config(num_parameters=7 * 10**9, training_tokens=15 * 10**12, model_max_length=10**30)(folder)
        assert load_model(folder, CPU).parameter_count > 0

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (move_a_shard_outside, f"{INDEX}: ../outside.safetensors is not in the folder"),
            (put_a_tensor_into_two_shards, f"{QUERY} is in model-0000"),
            # Transformers reads the single file, other tools the shards; one of them is stale.
            (keep_the_file_beside_its_shards, f"has both {WEIGHTS} and {INDEX}"),
            (edit_tensor(QUERY, lambda t: (t * 10).to(torch.int64)), f"{WEIGHTS}: {QUERY} has dtype"),
        ],
        ids=["shard outside", "tensor in two shards", "file beside shards", "integer weights"],
    )
    def test_ambiguous_weights_are_refused(
        self, train_error: TrainError, folder: Path, damage: Damage, message: str
    ) -> None:
        """Transformers does not look for these."""
        damage(folder)
        err = train_error(folder, codes=(6,))
        assert message in err
        assert str(folder) in err

    def test_nan_weights_stop_the_run(self, train_error: TrainError, folder: Path) -> None:
        edit_tensor(QUERY, lambda tensor: torch.full_like(tensor, float("nan")))(folder)
        err = train_error(folder, codes=(5, 6))
        assert "step 1: loss nan" in err or "returns logits that are not finite" in err


class TestDamagedNative:
    """What only the native reader looks for."""

    @pytest.fixture
    def implementation(self) -> str:
        return "native"

    @pytest.mark.parametrize("size", ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"])
    def test_a_size_that_no_memory_holds_is_refused(self, train_error: TrainError, folder: Path, size: str) -> None:
        set_config(**{size: 10**12})(folder)
        assert f"config.json: does not describe a model: {size} is {10**12}" in train_error(folder, codes=(2,))

    @pytest.mark.parametrize("value", [10**6, 10**19])
    def test_too_many_layers_are_refused(self, train_error: TrainError, folder: Path, value: int) -> None:
        set_config(num_hidden_layers=value)(folder)
        assert "config.json: does not describe a model" in train_error(folder, codes=(2,))

    def test_too_many_layers_are_refused_before_layer_types_are_built(self, tmp_path: Path) -> None:
        folder = make_model(tmp_path / "qwen", "qwen2", "plain")
        drop_from_config("layer_types")(folder)
        set_config(num_hidden_layers=10**12)(folder)
        with pytest.raises(UsageError, match="config.json: does not describe a model"):
            load_model(folder, CPU)

    def test_deeply_nested_json_beside_the_model_counts_as_absent(self, folder: Path) -> None:
        for name in ("state.json", "generation_config.json"):
            (folder / name).write_text("[" * 100_000)
        model = load_model(folder, CPU)
        assert model.align_special_tokens({}) == []
        assert model.warnings == ["generation_config.json is not a JSON object; it will be rewritten"]
        assert (model.implementation, model.generation_config) == ("native", None)

    def test_a_folder_whose_name_is_not_utf8_is_refused_at_the_start(
        self, torchstone: Command, settings: Settings, folder: Path, tmp_path: Path
    ) -> None:
        """The tokenizer could not be saved there, after the training."""
        for args in (
            ("train", *flags(settings(training__max_steps=1, output_dir=f"{tmp_path}/run-\udcff"))),
            ("export", folder, f"{tmp_path}/out-\udcff"),
        ):
            code, _, err = torchstone(*args)
            assert (code, "is not UTF-8" in err) == (2, True), err

    @pytest.mark.parametrize("content", ["[" * 100_000, "[]", "{"], ids=len)
    def test_a_damaged_generation_config_is_not_exported(self, folder: Path, tmp_path: Path, content: str) -> None:
        (folder / "generation_config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"generation_config\.json: damaged"):
            api.export(str(folder), tmp_path / "out")

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_a_large_integer_that_is_no_size_is_allowed(self, folder: Path, implementation: Any) -> None:
        rope = {"rope_type": "default", "rope_theta": 45 * 10**9}
        set_config(rope_parameters=rope, model_max_length=10**30)(folder)
        load_model(folder, CPU, execution=ExecutionOptions(implementation=implementation))

    def test_the_layers_of_gpt2_have_two_names(self, tmp_path: Path) -> None:
        folder = make_model(tmp_path / "gpt2", "gpt2", "untied")
        drop_from_config("n_layer")(folder)
        set_config(num_hidden_layers=10**9)(folder)
        with pytest.raises(UsageError, match=f"num_hidden_layers is {10**9}, more than 2048"):
            load_model(folder, CPU)

    def test_a_new_model_of_absurd_depth_is_refused(self, torchstone: Command, settings: Settings) -> None:
        code, _, err = torchstone("train", *flags(settings(model__depth=2049)))
        assert (code, "model.depth must be at least 1 and at most 2048, not 2049" in err) == (2, True), err

    def test_an_odd_width_is_refused(self, torchstone: Command, settings: Settings) -> None:
        code, _, err = torchstone("train", *flags(settings(model__width=33, model__heads=3)))
        assert (code, "use an even --model.width" in err) == (2, True), err

    def test_sizes_whose_product_overflows_are_refused(self, train_error: TrainError, folder: Path) -> None:
        """Each of them is allowed."""
        heads = {"num_attention_heads": 2**30, "num_key_value_heads": 2**30, "head_dim": 2**30}
        set_config(hidden_size=2**30, **heads)(folder)
        assert "config.json: does not describe a model: a matrix" in train_error(folder, codes=(2,))

    @pytest.mark.parametrize("theta", ["x", 10**400, 0, -1.0, math.nan, True, None, [1.0]], ids=lambda v: str(v)[:9])
    def test_a_rope_theta_that_is_no_positive_number_is_refused(self, folder: Path, theta: object) -> None:
        set_config(rope_parameters={"rope_type": "default", "rope_theta": theta})(folder)
        with pytest.raises(UsageError, match="config.json: does not describe a model"):
            load_model(folder, CPU)

    def test_a_changed_header_byte_is_refused_or_changes_nothing(self, folder: Path) -> None:
        path, original = folder / WEIGHTS, load_model(folder, CPU)
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        loaded = 0
        for position in [*range(8), *range(8, 8 + length, 37)]:
            damaged = bytearray(content)
            damaged[position] ^= 0x01
            path.write_bytes(damaged)
            try:
                model = load_model(folder, CPU)
            except CheckpointError:
                continue
            loaded += 1
            assert same_weights(model, original), position
        assert loaded <= 2, "only the format entry of the metadata may change"

    @pytest.mark.parametrize(
        "edit",
        [lambda t: t, lambda t: torch.cat((t, t[:1])), lambda t: t[:-1], lambda t: t.T],
        ids=["other values", "a row more", "a row less", "transposed"],
    )
    def test_a_tied_model_with_another_head_is_refused(
        self, train_error: TrainError, folder: Path, edit: Callable[[Tensor], Tensor]
    ) -> None:
        set_config(tie_word_embeddings=True)(folder)
        edit_tensor("lm_head.weight", edit)(folder)
        err = train_error(folder, codes=(6,))
        assert f"{folder / WEIGHTS}: config.json ties the head to the embedding, but lm_head.weight differs" in err

    @pytest.mark.parametrize("name", [EMBEDDING, "lm_head.weight", "model.norm.weight"])
    def test_infinite_weights_stop_the_first_step(self, train_error: TrainError, folder: Path, name: str) -> None:
        edit_tensor(name, lambda tensor: torch.full_like(tensor, float("inf")))(folder)
        err = train_error(folder, codes=(5,))
        assert "step 1: loss nan" in err
        assert "its update was not applied" in err
        assert f"the weights in {folder} have NaN or infinite values: {name};" in err

    def test_export_names_a_tensor_with_nan(self, folder: Path, tmp_path: Path) -> None:
        edit_tensor(QUERY, lambda tensor: torch.full_like(tensor, float("nan")))(folder)
        with pytest.raises(CheckpointError, match=f"{QUERY} has NaN values"):
            api.export(str(folder), tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_evaluate_does_not_report_a_nan_loss(
        self, torchstone: Command, folder: Path, text_file: Path, tmp_path: Path
    ) -> None:
        edit_tensor("model.norm.weight", lambda tensor: torch.full_like(tensor, float("nan")))(folder)
        code, out, _ = torchstone("evaluate", folder, "--data", text_file, "--cache-dir", tmp_path / "cache", "--json")
        assert (code, out) == (5, "")

    def test_a_float_dtype_that_torchstone_cannot_save_is_refused(self, train_error: TrainError, folder: Path) -> None:
        edit_tensor(QUERY, lambda tensor: tensor.to(torch.float8_e4m3fnuz))(folder)
        err = train_error(folder, codes=(6,))
        assert f"{WEIGHTS}: {QUERY} has dtype float8_e4m3fnuz, which cannot be trained" in err

    def test_the_api_raises_the_same_error(self, folder: Path, settings: Settings) -> None:
        DAMAGES["tensor too short"][0](folder)
        message = rf"{QUERY} has shape \[31, 32\], but config.json asks for \[32, 32\]"
        with pytest.raises(TorchstoneError, match=message):
            api.train(overrides=without_new_model(settings(model__path=str(folder))))

    def test_damaged_weights_are_found_before_any_data_is_read(
        self, torchstone: Command, folder: Path, tmp_path: Path
    ) -> None:
        path = folder / WEIGHTS
        path.write_bytes(path.read_bytes()[:-50])
        args = ["--model.path", folder, "--data.path", tmp_path / "missing.jsonl", "--output-dir", tmp_path / "run"]
        code, _, err = torchstone("train", *args)
        assert (code, f"{WEIGHTS}: damaged" in err) == (6, True), err


class TestForeign:
    def test_an_adapter_alone_is_refused(self, train_error: TrainError, tmp_path: Path) -> None:
        folder = tmp_path / "adapter"
        folder.mkdir()
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        save_file({"base_model.model.lora_A.weight": torch.ones(2, 2)}, folder / "adapter_model.safetensors")
        assert str(folder) in train_error(folder, codes=(2,))

    @pytest.mark.parametrize("implementation", ["native"])
    def test_an_adapter_beside_a_model_is_refused(self, train_error: TrainError, folder: Path) -> None:
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
        assert "has a model and a PEFT adapter (adapter_config.json)" in train_error(folder, codes=(2,))

    @pytest.mark.parametrize(
        ("model_type", "auto_class", "sizes", "message"),
        [
            ("bert", "AutoModelForMaskedLM", {"vocab_size": 448}, "is not causal: a token sees later tokens"),
            ("bert", "AutoModel", {"vocab_size": 448}, "the weights do not match config.json"),
            ("vit", "AutoModel", {"image_size": 8, "patch_size": 4}, "model_type 'vit' is not a causal language model"),
            ("t5", "AutoModelForSeq2SeqLM", {"vocab_size": 448, "d_model": 32}, "t5 is an encoder-decoder"),
        ],
    )
    def test_a_model_that_is_not_a_causal_lm_is_refused(
        self, train_error: TrainError, tmp_path: Path, tokenizer: Tokenizer, model_type: str, auto_class: str,
        sizes: dict[str, Any], message: str,
    ) -> None:  # fmt: skip
        folder = make_hf_folder(tmp_path / model_type, model_type, auto_class, **sizes)
        tokenizer.save(folder)
        err = train_error(folder)
        assert message in err
        assert str(folder) in err

    def test_an_encoder_of_a_native_family_is_refused(self, tmp_path: Path) -> None:
        """`is_causal: false` makes a Llama an encoder in Transformers."""
        folder = make_model(tmp_path / "encoder", "llama", "grouped")
        set_config(is_causal=False)(folder)
        with pytest.raises(UsageError, match="the native decoder does not support is_causal False"):
            load_model(folder, CPU, execution=ExecutionOptions(implementation="native"))
        with pytest.raises(UsageError, match="a token sees later tokens"):
            load_model(folder, CPU)

    def test_a_file_instead_of_a_folder_is_refused(self, train_error: TrainError, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("{}")
        assert str(tmp_path / "file") in train_error(tmp_path / "file", codes=(2,))


class TestUnusualButValid:
    def test_old_gpt2_files_have_no_prefix_and_have_masks(self, tmp_path: Path) -> None:
        new = make_model(tmp_path / "new", "gpt2", "plain")
        old = Path(shutil.copytree(new, tmp_path / "old"))

        def make_old(tensors: dict[str, Tensor]) -> None:
            for name in list(tensors):
                tensors[name.removeprefix("transformer.")] = tensors.pop(name)
            for layer in range(3):
                tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
                tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

        edit_tensors(make_old)(old)
        model = load_model(old, CPU)
        assert same_weights(model, load_model(new, CPU))
        save_model(model, tmp_path)
        assert (tmp_path / WEIGHTS).read_bytes() == (new / WEIGHTS).read_bytes()

    @pytest.mark.parametrize(("family", "shape"), [("llama", "tied"), ("qwen3", "biases"), ("gemma2", "caps")])
    def test_files_of_a_headless_model(self, tmp_path: Path, family: str, shape: str) -> None:
        full = make_model(tmp_path / "full", family, shape)
        headless = Path(shutil.copytree(full, tmp_path / "headless"))
        edit_tensors(lambda t: [t.update({name.removeprefix("model."): t.pop(name)}) for name in list(t)])(headless)
        assert same_weights(load_model(headless, CPU), load_model(full, CPU))

    def test_a_headless_file_lacks_an_untied_head(self, tmp_path: Path) -> None:
        folder = make_model(tmp_path / "headless", "llama", "grouped")
        edit_tensors(lambda t: t.pop("lm_head.weight"))(folder)
        with pytest.raises(CheckpointError, match="missing: lm_head.weight"):
            load_model(folder, CPU)

    def test_a_copy_of_the_tied_head_is_read_and_not_written(self, tmp_path: Path) -> None:
        folder = make_model(tmp_path / "tied", "llama", "tied")
        before = (folder / WEIGHTS).read_bytes()
        edit_tensors(lambda t: t.update({"lm_head.weight": t[EMBEDDING].clone()}))(folder)
        save_model(load_model(folder, CPU), folder)
        assert (folder / WEIGHTS).read_bytes() == before

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_other_dtypes_become_fp32_as_torch_converts_them(self, folder: Path, dtype: torch.dtype) -> None:
        # In fp64, a third has digits that fp32 lacks.
        tensors = {name: (t.double() / 3).to(dtype) for name, t in load_file(folder / WEIGHTS).items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        loaded = hf_state_dict(load_model(folder, CPU))
        for name, tensor in tensors.items():
            assert loaded[name].dtype == torch.float32
            assert torch.equal(loaded[name], tensor.float()), name
            if dtype != torch.float64:
                assert torch.equal(loaded[name].to(dtype), tensor), name

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_shards_load_like_one_file(self, sources: dict[str, Path], folder: Path, implementation: str) -> None:
        shard(folder, count=5)
        assert same_weights(load_model(folder, CPU), load_model(sources[implementation], CPU))

    @pytest.mark.parametrize("implementation", ["native"])
    def test_an_index_that_names_other_shards_is_tolerated(self, sources: dict[str, Path], folder: Path) -> None:
        edit_index(lambda files: files.update({QUERY: files[EMBEDDING], EMBEDDING: files[QUERY]}))(folder)
        assert same_weights(load_model(folder, CPU), load_model(sources["native"], CPU))

    @pytest.mark.parametrize("implementation", ["native"])
    def test_an_index_may_name_the_single_file(self, sources: dict[str, Path], folder: Path) -> None:
        names = load_file(folder / WEIGHTS)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, WEIGHTS)}))
        assert same_weights(load_model(folder, CPU), load_model(sources["native"], CPU))

    @pytest.mark.parametrize(
        ("family", "shape", "leftover"),
        [
            ("llama", "grouped", {"hidden_activation": "gelu"}),
            ("llama", "grouped", {"activation_function": "gelu"}),
            ("llama", "grouped", {"layer_types": ["full_attention"] * 3, "sliding_window": 3}),
            ("qwen3", "head size", {"hidden_activation": "gelu"}),
            ("gpt2", "plain", {"hidden_act": "silu"}),
            ("gpt2", "plain", {"head_dim": 16}),
            ("gpt2", "plain", {"num_key_value_heads": 2}),
            ("gemma2", "caps", {"hidden_act": "silu"}),
            ("mistral", "window", {"layer_types": ["full_attention"] * 3}),
        ],
        ids=str,
    )
    def test_leftover_config_keys_are_ignored_where_transformers_ignores_them(
        self, tmp_path: Path, family: str, shape: str, leftover: dict[str, Any]
    ) -> None:
        from transformers import AutoModelForCausalLM

        folder = make_model(tmp_path / "model", family, shape)
        set_config(**leftover)(folder)
        reference = AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager").eval()
        ids = torch.randint(0, 96, (2, 30), generator=torch.Generator().manual_seed(0))
        model = load_model(folder, CPU)
        with torch.no_grad():
            logits = model.module.eval()(ids, torch.arange(30).expand(2, 30))
            assert (logits - reference(ids).logits).abs().max().item() <= 1e-5

    @pytest.mark.parametrize("family", ["llama", "phi3"])
    def test_written_shards_are_read_back_by_us_and_by_transformers(self, tmp_path: Path, family: str) -> None:
        from transformers import AutoModelForCausalLM

        folder = make_model(tmp_path / "model", family)
        model = load_model(folder, CPU)
        assert isinstance(model, NativeModel)
        tensors = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        files = save_weights(full_unfused_parameters(model), WEIGHT_NAMES[family], folder, max_shard_bytes=20_000)
        assert len(files) > 3
        assert same_weights(load_model(folder, CPU), model)
        state = AutoModelForCausalLM.from_pretrained(str(folder)).state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())

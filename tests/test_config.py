"""Config files, presets, flags and Python give one checked config; every mistake is named with its correction."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from torchstone.config import files, load_config, to_dict
from torchstone.config.help import config_table, field_help
from torchstone.config.load import ALIASES, PRESET_DIR, extract_config_flags, field_types, from_dict
from torchstone.config.other_names import OTHER_NAMES
from torchstone.config.schema import SECTION_HELP, Config
from torchstone.errors import UsageError
from torchstone.launch.plan import LaunchOptions

MINIMAL = {"model.depth": 2, "model.tokenizer": "demo:tokenizer", "data.path": "demo:corpus"}
TUNED = {"model.path": "somewhere", "data.path": "demo:chat"}

JSON_FILE = """{
    // a comment with "quotes" and // slashes
    "model": {"depth": 2, "tokenizer": "http://not-a-comment"},
    "data": {"path": "x.jsonl"}, /* two
    lines */
    "optim": {
        "learning_rate": 2e-5,   // a number
        "betas": [0.9, 0.99],
    },
}
"""
YAML_FILE = """# a comment
model: {depth: 2, tokenizer: "http://not-a-comment"}
data:
  path: x.jsonl
optim:
  learning_rate: 2e-5
  betas: [0.9, 0.99]
"""
TOML_FILE = """# a comment
[model]
depth = 2
tokenizer = "http://not-a-comment"
[data]
path = "x.jsonl"
[optim]
learning_rate = 2e-5
betas = [0.9, 0.99]
"""
FILES = {"run.json": JSON_FILE, "run.yaml": YAML_FILE, "run.toml": TOML_FILE}


def error_text(**overrides: object) -> str:
    with pytest.raises(UsageError) as caught:
        load_config(overrides=MINIMAL | {key.replace("__", "."): value for key, value in overrides.items()})
    assert caught.value.exit_code == 2
    return str(caught.value)


class TestFormats:
    def test_files_flags_and_python_give_the_same_config(self, tmp_path: Path) -> None:
        configs = []
        for name, text in FILES.items():
            (tmp_path / name).write_text(text)
            configs.append(load_config(tmp_path / name))
        args = "--model.depth 2 --model.tokenizer http://not-a-comment --data.path x.jsonl --optim.learning-rate 2e-5"
        pairs, _ = extract_config_flags([*args.split(), "--optim.betas=0.9,0.99"])
        configs.append(load_config(overrides=pairs))
        sections = {
            "model": {"depth": 2, "tokenizer": "http://not-a-comment"},
            "data.path": "x.jsonl",
            "optim": {"learning_rate": 2e-5, "betas": (0.9, 0.99)},
        }
        configs.append(load_config(overrides=sections))
        assert all(config == configs[0] for config in configs)
        assert configs[0].optim.learning_rate == 2e-5
        assert configs[0].optim.betas == (0.9, 0.99)

    @pytest.mark.parametrize("name", FILES)
    def test_an_unknown_key_gets_file_line_and_the_nearest_name(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        path.write_text(FILES[name].replace("betas", "beta_s"))
        line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "beta_s" in text)
        with pytest.raises(UsageError) as caught:
            load_config(path)
        assert f"{path}:{line}: unknown key 'optim.beta_s'" in str(caught.value)
        assert "did you mean 'optim.betas'?" in str(caught.value)

    @pytest.mark.parametrize("name", FILES)
    def test_a_wrong_value_gets_file_and_line(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        path.write_text(FILES[name].replace("2e-5", "-1"))
        line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "-1" in text)
        with pytest.raises(UsageError, match=f":{line}: optim.learning_rate must be at least 0, not -1"):
            load_config(path)

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("a.json", '{"optim": {\n"eps": 1e-6,\n"eps": 1e-7}}'),
            ("a.yaml", "optim:\n  eps: 1e-6\n  eps: 1e-7\n"),
            ("a.toml", "[optim]\neps = 1e-6\neps = 1e-7\n"),
            ("dotted.json", '{"optim.eps": 1e-6,\n "optim": {\n"eps": 1e-7}}'),
            ("dotted.yaml", "optim.eps: 1e-6\noptim:\n  eps: 1e-7\n"),
            ("dotted.toml", '"optim.eps" = 1e-6\n[optim]\neps = 1e-7\n'),
            ("list.json", '{"data": {"path": [{"a": 1,\n"b": 2,\n"a": 2}]}}'),
            ("list.yaml", "data:\n  path:\n    - {a: 1, a: 2}\n"),
        ],
    )
    def test_a_repeated_key_is_refused_with_its_line(self, tmp_path: Path, name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match=rf"{name}:3: (duplicate key|.*overwrite)"):
            load_config(tmp_path / name)

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("a.json", '{"training": {\n"max_steps": NUMBER}}'),
            ("a.yaml", "training:\n  max_steps: NUMBER\n"),
            ("a.toml", "[training]\nmax_steps = NUMBER\n"),
        ],
    )
    @pytest.mark.parametrize("number", ["9" * 5000, "0x" + "f" * 5000])
    def test_a_number_of_thousands_of_digits_is_refused(
        self, tmp_path: Path, name: str, text: str, number: str
    ) -> None:
        (tmp_path / name).write_text(text.replace("NUMBER", number))
        with pytest.raises(UsageError, match=f"{name}:2: a number has 5000 digits"):
            load_config(tmp_path / name)

    @pytest.mark.parametrize("item", ["[{0}, {0}, {0}]", "{{p: {0}, q: {0}, r: {0}}}", "{{<<: [{0}, {0}, {0}]}}"])
    def test_aliases_cannot_make_a_small_file_large(self, tmp_path: Path, item: str) -> None:
        lines = ["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {item.format(f'*a{n - 1}')}" for n in range(1, 30))]
        (tmp_path / "a.yaml").write_text("\n".join(lines))
        with pytest.raises(UsageError, match=r"a.yaml:\d+: aliases make more than 10000 values"):
            load_config(tmp_path / "a.yaml")

    def test_a_large_file_needs_no_aliases(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "MAX_YAML_NODES", 10)
        (tmp_path / "a.yaml").write_text("data: {path: [" + ", ".join(f"f{n}.jsonl" for n in range(50)) + "]}")
        assert len(load_config(tmp_path / "a.yaml", "debug").data.path or ()) == 50

    def test_aliases_of_reasonable_size_work(self, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        path.write_text("data:\n  path: &p [a, b]\n  validation_path: *p\n  validation_split: 0\n")
        assert load_config(path, "debug").data.validation_path == ("a", "b")
        path.write_text("optim: &a {b: *a}\n")
        with pytest.raises(UsageError, match="a.yaml:1: contains an alias for itself"):
            load_config(path)

    @pytest.mark.parametrize(
        ("name", "text"), [("a.json", '{"optim": {"eps" 1}}'), ("a.yaml", "optim: [1\n"), ("a.toml", "[optim\n")]
    )
    def test_a_syntax_error_gets_file_and_line(self, tmp_path: Path, name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match=rf"{name}:\d+: not (JSON|YAML|TOML)"):
            load_config(tmp_path / name)

    @pytest.mark.parametrize(
        "value", ["1.10", "2024", "1e5", "0x10", "!!binary aGVsbG8=", "!!set {a, b}", "[a]", "yes", "!!int '7'"]
    )
    def test_text_is_never_made_from_a_number(self, tmp_path: Path, value: str) -> None:
        (tmp_path / "a.yaml").write_text(f"output_dir: {value}\n")
        with pytest.raises(UsageError, match=r"a.yaml:1: output_dir must be text, not .*\n  write it in quotes"):
            load_config(tmp_path / "a.yaml", "debug")

    @pytest.mark.parametrize("text", ["007", "1:30", "12:30:00", "12:30.5", "2026-1-31", "1.2.3", "+"])
    def test_what_is_no_number_in_yaml_stays_as_written(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "a.yaml").write_text(f"output_dir: {text}\ndata: {{path: [{text}]}}\n")
        config = load_config(tmp_path / "a.yaml", "debug")
        assert (config.output_dir, config.data.path) == (text, (text,))

    @pytest.mark.parametrize(
        ("text", "number"),
        [
            ("010", 10), ("089", 89), ("1_000", 1000), ("0x10", 16), ("0b11", 3), ("+5", 5), ("1e3", 1000),
            ("1.5e3", 1500), ("2.", 2), ("'7'", 7),
        ],
    )  # fmt: skip
    def test_integers_in_yaml_are_decimal(self, tmp_path: Path, text: str, number: int) -> None:
        (tmp_path / "a.yaml").write_text(f"training: {{max_steps: {text}}}\n")
        assert load_config(tmp_path / "a.yaml", "debug").training.max_steps == number

    @pytest.mark.parametrize("text", [".5", "0.5", "+.5", "5e-1", "5.e-1", "50_0e-3"])
    def test_numbers_in_yaml_have_a_point_or_an_exponent(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "a.yaml").write_text(f"optim: {{learning_rate: {text}}}\n")
        assert load_config(tmp_path / "a.yaml", "debug").optim.learning_rate == 0.5

    @pytest.mark.parametrize("text", ["a\\u0000b", "a\\ud800"])
    def test_text_has_no_characters_that_no_file_name_has(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "a.json").write_text(f'{{"output_dir": "{text}"}}')
        with pytest.raises(UsageError, match=r"a.json:1: output_dir 'a.* has a NUL or a lone surrogate"):
            load_config(tmp_path / "a.json", "debug")

    def test_a_config_is_a_file_of_limited_size(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "MAX_BYTES", 3 << 20)
        os.mkfifo(tmp_path / "fifo.yaml")
        (tmp_path / "zero.yaml").symlink_to("/dev/zero")
        (tmp_path / "folder.yaml").mkdir()
        (tmp_path / "large.yaml").write_text("#" * (3 << 20) + "\n")
        for name in ("fifo", "zero", "folder", "large"):
            with pytest.raises(UsageError, match=f"{name}.yaml: a config must be a file of at most 3 MiB"):
                load_config(tmp_path / f"{name}.yaml")

    def test_the_folder_of_a_run_stands_for_its_config_and_that_of_a_model_does_not(self, tmp_path: Path) -> None:
        config = load_config(None, "debug", {"optim.learning_rate": 7e-4})
        (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))
        assert load_config(tmp_path) == config
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        with pytest.raises(UsageError, match=f"describes a model, not a run\n.*--model.path {tmp_path}"):
            load_config(tmp_path)

    def test_data_in_the_place_of_a_config_is_told_where_to_go(self) -> None:
        with pytest.raises(UsageError, match=r"must end in .json, .yaml or .toml\n  for data: --data.path rows.jsonl"):
            load_config("rows.jsonl")

    def test_a_missing_file_lists_the_files_beside_it(self, tmp_path: Path) -> None:
        (tmp_path / "run.yaml").write_text("")
        with pytest.raises(UsageError, match="config files in .*run.yaml"):
            load_config(tmp_path / "rum.yaml")

    def test_commas_inside_strings_stay(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        path.write_text('{"output_dir": "runs/a,]b, }", "training": {"max_steps": 3,},}')
        config = load_config(path, "debug")
        assert (config.output_dir, config.training.max_steps) == ("runs/a,]b, }", 3)

    def test_a_section_may_be_empty_if_it_exists(self, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        path.write_text("optim:\n#  eps: 1e-6\ndata: {}\n")
        assert load_config(path, "debug").optim.eps == 1e-8
        path.write_text("trainnig: {}\n")
        with pytest.raises(UsageError, match="a.yaml:1: unknown key 'trainnig'"):
            load_config(path, "debug")

    def test_a_key_in_an_inline_table_has_a_line(self, tmp_path: Path) -> None:
        path = tmp_path / "a.toml"
        path.write_text('output_dir = "x"\noptim = {esp = 1e-6}\n')
        with pytest.raises(UsageError, match="a.toml:2: unknown key 'optim.esp'"):
            load_config(path, "debug")

    def test_a_config_survives_json(self) -> None:
        config = load_config(overrides=MINIMAL | {"optim.betas": "0.8,0.9", "optim.no_decay": "norm"})
        assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


class TestPrecedence:
    def test_later_wins(self, tmp_path: Path) -> None:
        path = tmp_path / "run.yaml"
        path.write_text("training: {max_steps: 77, seed: 5}")
        config = load_config(path, "debug", {"training.seed": 9})
        assert (config.model.depth, config.training.max_steps, config.training.seed) == (2, 77, 9)

    def test_a_model_path_replaces_the_new_model_of_a_preset(self) -> None:
        config = load_config(preset="debug", overrides={"model.path": "somewhere"})
        assert (config.model.path, config.model.depth, config.model.tokenizer) == ("somewhere", None, None)

    def test_another_model_path_keeps_an_explicit_tokenizer(self, tmp_path: Path) -> None:
        path = tmp_path / "run.yaml"
        path.write_text("model: {path: one, tokenizer: mine}\ndata: {path: x.jsonl}\n")
        config = load_config(path, overrides={"model.path": "two"})
        assert (config.model.path, config.model.tokenizer) == ("two", "mine")

    def test_a_depth_replaces_the_model_path_of_a_preset(self) -> None:
        config = load_config(preset="demo-chat", overrides={"model.depth": 3, "model.tokenizer": "demo:tokenizer"})
        assert (config.model.path, config.model.depth) == (None, 3)

    @pytest.mark.parametrize(
        ("file", "flags", "expected"),
        [
            ("grad_accum_nums: 4", {}, (None, 4)),
            ("grad_accum_steps: null", {}, (8, None)),
            ("{grad_accum_steps: 4, global_batch_size: 32}", {}, (32, 4)),
            ("grad_accum_steps: 4", {"training.global_batch_size": 16}, (16, None)),
            ("global_batch_size: 64", {"training.grad_accum_steps": 2}, (None, 2)),
            ("grad_accum_steps: 4", {"training.global_batch_size": None}, (None, 4)),
            ("batch_size: 2", {}, (8, None)),
        ],
    )
    def test_grad_accum_steps_and_global_batch_size_replace_each_other_in_later_sources(
        self, tmp_path: Path, file: str, flags: dict[str, object], expected: tuple[int | None, int | None]
    ) -> None:
        path = tmp_path / "run.yaml"
        path.write_text(f"training:\n  {file}\n")
        training = load_config(path, "debug", flags).training
        assert (training.global_batch_size, training.grad_accum_steps) == expected

    def test_path_and_depth_in_one_source_are_refused(self) -> None:
        assert "model.depth is for a new model" in error_text(model__path="x")

    @pytest.mark.parametrize("name", sorted(path.stem for path in PRESET_DIR.glob("*.yaml")))
    def test_every_preset_is_valid(self, name: str) -> None:
        assert isinstance(load_config(preset=name), Config)

    def test_an_unknown_preset_gets_the_nearest_name(self) -> None:
        with pytest.raises(UsageError, match="did you mean 'production'"):
            load_config(preset="prodution")


class TestAliases:
    def test_the_names_of_other_trainers_work(self) -> None:
        aliases = {
            "training.grad_accum_nums": 3, "training.num_workers": 8, "training.learning_rate": 0.5,
            "training.max_grad_norm": 2, "training.context_length": 99, "training.use_amp": False,
        }  # fmt: skip
        config = load_config(overrides=MINIMAL | aliases)
        assert config.training.grad_accum_steps == 3
        assert config.data.num_workers == 8
        assert config.optim.learning_rate == 0.5
        assert config.optim.max_grad_norm == 2
        assert config.data.context_length == 99
        assert config.training.precision == "fp32"
        assert load_config(overrides=MINIMAL | {"training.use_amp": True}).training.precision == "bf16"

    def test_two_spellings_of_one_key_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        path.write_text("training:\n  max_steps: 3\n  max-steps: 4\n")
        with pytest.raises(UsageError, match="are the same setting"):
            load_config(path, "debug")

    def test_every_alias_names_a_key(self) -> None:
        assert set(ALIASES.values()) <= set(field_types())
        assert not set(ALIASES) & set(field_types())

    def test_two_names_of_one_setting_are_refused(self) -> None:
        text = error_text(training__learning_rate=1e-3, optim__learning_rate=2e-3)
        assert "are the same setting" in text


@pytest.mark.parametrize(
    ("key", "value", "message", "hint"),
    [
        ("model__compile", False, "model.compile cannot be false", "did you mean 'none'? use one of auto, none, block"),
        ("model__compile", None, "model.compile cannot be null", "did you mean 'none'? use one of auto, none, block"),
        ("model__compile", True, "model.compile cannot be true", "did you mean 'block'? use one of "),
        ("model__recompute", "true", "model.recompute cannot be 'true'", "did you mean 'full'? use one of "),
        ("training__precision", "bf16-mixed", "training.precision cannot be 'bf16-mixed'", "did you mean 'bf16'? "),
        ("training__precision", "FP8", "training.precision cannot be 'FP8'", "did you mean 'fp8'? use one of "),
        ("optim__name", "lion", "optim.name cannot be 'lion'", "use one of adamw, muon"),
        ("model__compile", "blok", "model.compile cannot be 'blok'", "did you mean 'block'? use one of auto, none"),
        ("optim__schedule", False, "optim.schedule cannot be false", "use one of "),
    ],
)
def test_a_wrong_value_is_named_as_in_the_file(key: str, value: Any, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_config(overrides=MINIMAL | {key.replace("__", "."): value})
    assert caught.value.message == message
    assert (caught.value.hint or "").startswith(hint)


class TestOtherNames:
    def test_every_name_stands_for_a_setting_here(self) -> None:
        launch_flags = {option.name for option in fields(LaunchOptions)}
        for name, setting in OTHER_NAMES.items():
            assert not any(known.endswith(f".{name}") for known in field_types()), name
            key, _, values = setting.partition(" ")
            if key not in launch_flags:
                assert key in field_types(), setting
                needed = MINIMAL | {"data.validation_split": 0.1}
                if key == "tuning.quantize_base":
                    needed = TUNED | {"tuning.method": "lora"}
                for value in values.split("|") if values else ():
                    load_config(overrides=needed | {key: value})

    @pytest.mark.parametrize(
        ("name", "value", "expected"),
        [
            ("train_on_inputs", False, "in Torchstone this is --data.train_on assistant"),
            ("train_on_inputs", True, "in Torchstone this is --data.train_on all"),
            ("completion_only_loss", "false", "in Torchstone this is --data.train_on all"),
            ("gradient_checkpointing", False, "in Torchstone this is --model.recompute none"),
            ("compile.enable", True, "in Torchstone this is --model.compile block"),
            ("profiling.enable_profiling", False, "in Torchstone this is --observe.profile none"),
            ("activation_checkpoint.mode", "full", "in Torchstone this is --model.recompute"),
            ("parallelism.tensor_parallel_degree", 2, "in Torchstone this is --parallel.tp"),
            ("bf16", "auto", "in Torchstone this is --training.precision bf16"),
            ("bf16", "no", "in Torchstone this is --training.precision fp32"),
            ("fp16", True, "fp16 is not in this version; --training.precision bf16"),
            ("fp16", False, "leave it out: fp16 is not in this version"),
            ("torch_compile", 0, "in Torchstone this is --model.compile none"),
            ("load_in_8bit", False, "in Torchstone this is --tuning.quantize_base none"),
            ("tuning.load_in_4bit", True, "in Torchstone this is --tuning.quantize_base nf4"),
            ("tuning.r", 8, "in Torchstone this is --tuning.lora_rank"),
            ("adam_beta1", 0, "in Torchstone this is --optim.betas 0.9,0.95"),
            ("eval_strategy", "no", "leave it out: --training.validate_every_steps N or"),
            ("per_device_batch_size", 4, "--training.batch_size N is rows per device; for packed conversations"),
            ("batch_size", 4, "--training.global_batch_size N is samples per step, --training.batch_size N is rows"),
            ("optim.batch_size", 4, "--training.global_batch_size N is samples per step"),
            ("lora_r", 8, "in Torchstone this is --tuning.lora_rank"),
            ("lora.rank", 8, "--tuning.method lora trains adapters"),
            ("use_peft", True, "--tuning.method lora trains adapters"),
            ("preset_batch_kyes", 8, "the sections are"),
            ("training", 5, "the keys of 'training' are mode, max_steps"),
            ("n_layer", 5, "in Torchstone this is --model.depth"),
        ],
    )
    def test_the_answer_depends_on_the_value(self, name: str, value: object, expected: str) -> None:
        text = error_text(**{name.replace(".", "__"): value})
        assert f"\n  {expected}" in text
        assert "did you mean" not in text


@pytest.mark.parametrize("name", ["lora_rnak", "lora_dropuot", "lora_alphas", "lora_rslra"])
def test_a_misspelled_key_of_lora_is_answered_with_the_closest_one(name: str) -> None:
    assert f"did you mean 'tuning.{name[:6]}" in error_text(**{f"tuning__{name}": 1})


class TestFineTuningDefaults:
    def test_a_model_path_changes_the_defaults(self) -> None:
        new = load_config(overrides=MINIMAL).optim
        tuned = load_config(overrides=TUNED).optim
        assert (new.learning_rate, new.weight_decay, new.warmup_ratio) == (3e-4, 0.1, 0.0)
        assert (tuned.learning_rate, tuned.weight_decay, tuned.warmup_ratio) == (2e-5, 0.0, 0.03)

    def test_every_layer_overrides_them(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text("optim: {learning_rate: 3e-4, warmup_steps: 0}")
        optim = load_config(tmp_path / "a.yaml", overrides=TUNED | {"optim.weight_decay": 0.1}).optim
        assert (optim.learning_rate, optim.weight_decay, optim.warmup_ratio) == (3e-4, 0.1, 0.0)

    def test_the_resolved_config_is_complete(self) -> None:
        config = load_config(overrides=TUNED)
        assert from_dict(to_dict(config)) == config

    def test_a_run_without_an_end_has_no_share_of_warm_up(self) -> None:
        endless = {"training.mode": "infinite", "optim.schedule": "constant"}
        assert load_config(overrides=TUNED | endless).optim.warmup_ratio == 0
        assert "use --optim.warmup_steps N" in error_text(
            training__mode="infinite", optim__schedule="constant", optim__warmup_ratio=0.1
        )

    def test_steps_and_share_of_warm_up_exclude_each_other(self) -> None:
        assert "leave out one of them" in error_text(optim__warmup_steps=3, optim__warmup_ratio=0.1)


class TestWrongValues:
    @pytest.mark.parametrize(
        ("key", "value", "expected"),
        [
            ("training.max_steps", "0", "must be at least 1, not 0"),
            ("training.max_steps", "ten", "must be an integer, not 'ten'"),
            ("training.max_steps", "1.5", "must be an integer"),
            ("training.max_steps", True, "must be an integer"),
            ("optim.learning_rate", "nan", "must be a number"),
            ("optim.learning_rate", [1], "must be a number"),
            ("optim.betas", "0.9", "takes 2 values, not 1"),
            ("optim.betas", "0.9,1.0", "must be at least 0 and less than 1, not 1.0"),
            ("optim.schedule", "cosin", "did you mean 'cosine'?"),
            ("optim.no_decay", "norm,biases", "the kinds are norm, bias, embed, head, matrix"),
            ("data.columns", "question=prompt,answer=completion", "did you mean prompt=question? The name in the row"),
            ("data.columns", {"body": "text"}, "did you mean text=body?"),
            ("data.columns", "promt=question", "did you mean 'prompt'?"),
            ("data.shuffle", "maybe", "must be true or false"),
            ("data.validation_split", "1.5", "at most 1"),
            ("data.validation_split", 1, "leaves no training data"),
            ("training.mode", "token", "add --training.max_tokens N"),
            ("training.validate_every_steps", 5, "there is no validation data"),
            ("checkpoint.save_best", True, "there is no validation data"),
            ("training.patience", 3, "there is no validation data"),
            ("checkpoint.every_minutes", -1, "must be at least 0"),
            ("model.depth", 20000, "must be at least 1 and at most 2048, not 20000"),
            ("model.width", 10**9, "at most 1e+08"),
            ("model.mlp_width", "1e30", "at most 1e+08"),
            ("data.context_length", 2 * 10**9, "at most 1e+08"),
            ("data.weights", "1e-320", "at least 1e-09"),
            ("training.max_steps", "1e30", "must be less than 2^63, not 1e30"),
            ("training.max_epochs", "1e308", "at most 1e+09"),
            ("training.max_tokens", "1e30", "at most 1e+16"),
            ("training.global_batch_size", "1e30", "at most 1e+08"),
            ("training.grad_accum_steps", "9e18", "at most 1e+08"),
            ("training.validate_every_epochs", "1e-320", "at least 1e-09"),
            ("checkpoint.every_epochs", "1e-320", "at least 1e-09"),
            ("system.hang_timeout", "1e15", "at most 1e+08"),
            ("system.join_timeout", "1e15", "at most 1e+08"),
            ("optim.decay_steps", 5, "is for schedule wsd, not cosine"),
        ],
    )
    def test_an_impossible_value_is_explained(self, key: str, value: object, expected: str) -> None:
        assert expected in error_text(**{key.replace(".", "__"): value})

    @pytest.mark.parametrize(
        ("key", "nearest"),
        [
            ("optim.learning_rat", "optim.learning_rate"),
            ("training.lr", "optim.learning_rate"),
            ("optmi.learning_rate", "optim.learning_rate"),
            ("data.ctx_length", "data.context_length"),
            ("learning_rate", "optim.learning_rate"),
        ],
    )
    def test_a_misspelled_key_gets_the_nearest_name(self, key: str, nearest: str) -> None:
        assert f"did you mean '{nearest}'?" in error_text(**{key.replace(".", "__"): 1})

    def test_an_infinite_run_needs_a_constant_schedule(self) -> None:
        assert "use --optim.schedule constant" in error_text(training__mode="infinite")

    def test_patience_needs_more_than_one_validation(self) -> None:
        text = error_text(training__patience=2, data__validation_split=0.1)
        assert "the only one is at the end of the run" in text
        values = MINIMAL | {"training.patience": 2, "data.validation_split": 0.1, "training.validate_every_epochs": 0.5}
        assert load_config(overrides=values).training.patience == 2

    def test_save_best_needs_a_validation(self) -> None:
        changes = {"data.validation_split": 0.1, "checkpoint.save_best": True, "training.validate_at_end": False}
        assert "the run never validates" in error_text(**{k.replace(".", "__"): v for k, v in changes.items()})
        config = load_config(overrides=MINIMAL | changes | {"training.validate_every_steps": 2})
        assert config.checkpoint.save_best

    @pytest.mark.parametrize(
        ("key", "value", "expected"),
        [
            ("model.tokenizer", "", "model.tokenizer is empty"),
            ("model.path", " ", "model.path is empty"),
            ("checkpoint.resume", "", "checkpoint.resume is empty"),
            ("data.chat_template", "", "data.chat_template is empty"),
            ("data.cache_dir", "", "data.cache_dir is empty"),
            ("output_dir", "", "output_dir is empty"),
            ("data.path", "", "data.path is empty"),
            ("data.path", ",c.jsonl", "data.path has an empty part"),
            ("data.path", ["c.jsonl", ""], "data.path has an empty part"),
            ("data.validation_path", "", "data.validation_path is empty"),
            ("data.validation_path", [], "data.validation_path is empty"),
            ("optim.no_decay", "norm,,bias", "optim.no_decay has an empty part"),
        ],
    )
    def test_an_empty_name_is_refused(self, key: str, value: object, expected: str) -> None:
        assert f"{expected}\n  write a value, or leave it out" in error_text(**{key.replace(".", "__"): value})

    @pytest.mark.parametrize(
        ("text", "paths"),
        [
            ("[ab].jsonl", ("[ab].jsonl",)),
            ("(new) x.jsonl,d[1]", ("(new) x.jsonl", "d[1]")),
            ("(new)", ("(new)",)),
            ("[a.jsonl, b.jsonl]", ("a.jsonl", "b.jsonl")),
            (Path("a,b.jsonl"), ("a,b.jsonl",)),
            ("~/a.jsonl,b~", ("/home/me/a.jsonl", "b~")),
        ],
    )
    def test_a_path_is_what_is_written(
        self, monkeypatch: pytest.MonkeyPatch, text: str | Path, paths: tuple[str, ...]
    ) -> None:
        monkeypatch.setenv("HOME", "/home/me")
        assert load_config(overrides=MINIMAL | {"data.path": text}).data.path == paths

    def test_brackets_come_in_pairs(self) -> None:
        assert load_config(overrides=MINIMAL | {"optim.betas": "(0.9, 0.95)"}).optim.betas == (0.9, 0.95)
        assert "must be a number, not '[0.9'" in error_text(optim__betas="[0.9,0.95")

    def test_a_tilde_is_the_home_folder_in_every_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/me")
        config = load_config(
            overrides=MINIMAL
            | {"output_dir": "~/run", "data.cache_dir": "~/c", "model.tokenizer": "~", "data.path": "x~"}
        )
        assert (config.output_dir, config.data.cache_dir) == ("/home/me/run", "/home/me/c")
        assert (config.model.tokenizer, config.data.path) == ("/home/me", ("x~",))

    def test_none_is_an_empty_list(self) -> None:
        assert load_config(overrides=MINIMAL | {"optim.no_decay": "none"}).optim.no_decay == ()

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("a.json", '{"training": {"max_steps": ' + "9" * 5000 + "}}"),
            ("a.json", '{"training": {"max_steps": ' + "9" * 401 + "}}"),
            ("a.json", "[" * 100_000),
            ("a.yaml", "a: &a\n  b: *a\n"),
        ],
        ids=["5000 digits", "401 digits", "deep", "recursive"],
    )
    def test_absurd_files_are_usage_errors(self, tmp_path: Path, name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError):
            load_config(tmp_path / name, "debug")

    def test_large_integers_keep_every_digit(self) -> None:
        config = load_config(overrides=MINIMAL | {"training.max_tokens": "9007199254740993"})
        assert config.training.max_tokens == 9007199254740993
        assert load_config(overrides=MINIMAL | {"training.max_tokens": "1e9"}).training.max_tokens == 10**9


class TestHelp:
    def test_every_field_has_a_sentence(self) -> None:
        assert field_help().keys() == field_types().keys()
        assert all(len(text) > 15 and text.endswith(".") for text in field_help().values())

    def test_every_section_is_described(self) -> None:
        assert {key.split(".")[0] for key in field_types() if "." in key} == set(SECTION_HELP)
        assert all(f"--{key}" in config_table() for key in field_types() if "." in key)


class TestFlags:
    def test_no_turns_a_boolean_key_off(self) -> None:
        args = ["--no-data.packing", "run.yaml", "--no-parallel.sequence", "--no-such.key", "--data.shuffle"]
        assert extract_config_flags(args) == (
            [
                ("data.packing", "false"),
                ("parallel.sequence", "false"),
                ("no-such.key", "true"),
                ("data.shuffle", "true"),
            ],
            ["run.yaml"],
        )

    def test_config_flags_are_extracted_and_other_arguments_stay_in_order(self) -> None:
        args = ["train", "a.yaml", "--data.shuffle", "--optim.eps=1e-9", "--debug", "--model.depth", "3"]
        pairs, remaining = extract_config_flags(args)
        assert remaining == ["train", "a.yaml", "--debug"]
        assert pairs == [("data.shuffle", "true"), ("optim.eps", "1e-9"), ("model.depth", "3")]

    def test_a_switch_can_be_false(self) -> None:
        pairs, _ = extract_config_flags(["--data.shuffle", "false"])
        assert load_config(overrides=[*MINIMAL.items(), *pairs]).data.shuffle is False


class TestValidationSets:
    """data.validation_path with names: one spelling everywhere, and a path with `=` in it is never taken for a name."""

    SETS = {"task_b": ("b.jsonl",), "task-a.1": ("a.jsonl",)}

    @pytest.mark.parametrize(
        "value",
        [
            {"task_b": "b.jsonl", "task-a.1": ["a.jsonl"]}, {"task_b": Path("b.jsonl"), "task-a.1": ("a.jsonl",)},
            "task_b=b.jsonl,task-a.1=a.jsonl", " task_b = b.jsonl, task-a.1 = a.jsonl",
            "{task_b: b.jsonl, task-a.1: [a.jsonl]}", "{'task_b': 'b.jsonl', 'task-a.1': 'a.jsonl'}",
        ],
    )  # fmt: skip
    def test_every_spelling_is_the_same_mapping_in_the_same_order(self, value: Any) -> None:
        config = load_config(overrides=MINIMAL | {"data.validation_path": value})
        assert config.data.validation_path == self.SETS
        assert list(config.data.validation_sets) == ["task_b", "task-a.1"], "the first set decides"
        assert list(from_dict(to_dict(config)).data.validation_sets.items()) == list(self.SETS.items())
        assert json.loads(json.dumps(to_dict(config))) == to_dict(config)

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("a.yaml", "data:\n  validation-path: {task_b: b.jsonl, task-a.1: a.jsonl}\n"),
            ("a.toml", '[data.validation_path]\ntask_b = "b.jsonl"\n"task-a.1" = ["a.jsonl"]\n'),
            ("a.json", '{"data": {"validation_path": {"task_b": ["b.jsonl"], "task-a.1": "a.jsonl"}}}'),
        ],
    )
    def test_files_have_a_mapping_which_a_flag_replaces(self, tmp_path: Path, name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        assert load_config(tmp_path / name, overrides=MINIMAL).data.validation_path == self.SETS
        flags, _ = extract_config_flags(["--data.validation-path=c=c.jsonl"])
        config = load_config(tmp_path / name, overrides=[*MINIMAL.items(), *flags])
        assert config.data.validation_path == {"c": ("c.jsonl",)}

    def test_a_set_has_several_paths(self) -> None:
        for value in ("{b: [b1.jsonl, b2.jsonl]}", {"b": "b1.jsonl,b2.jsonl"}):
            config = load_config(overrides=MINIMAL | {"data.validation_path": value})
            assert config.data.validation_sets == {"b": ("b1.jsonl", "b2.jsonl")}
            assert config.data.validation_paths == ("b1.jsonl", "b2.jsonl")

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ({}, "data.validation_path is empty\n  write a value, or leave it out"),
            ("{}", "data.validation_path is empty"),
            ("b=,a=a.jsonl", "data.validation_path.b is empty\n  write a value, or leave it out"),
            ({"b": []}, "data.validation_path.b is empty"),
            ({"b": None}, "data.validation_path.b must be a list, not None\n  write it as a.jsonl,b.jsonl"),
            ("b=b.jsonl,", "data.validation_path has an empty part"),
            ("b=b.jsonl,b=c.jsonl", "has a name twice\n  several paths of one set are --data.validation_path '{b: ["),
            ("{b: b.jsonl, b: c.jsonl}", "--data.validation_path:1: duplicate key b"),
            (
                "b=b.jsonl,c.jsonl",
                "'c.jsonl' has no name, but other paths have one\n  write it as --data.val",
            ),
            ("my task=b.jsonl", "'my task' cannot be a name\n  use letters, digits, _, - and dots, as in task_b="),
            ({"a/b": "b.jsonl"}, "data.validation_path: 'a/b' cannot be a name"),
            ({"": "b.jsonl"}, "data.validation_path: '' cannot be a name"),
            ({3: "b.jsonl"}, "data.validation_path must be text, not '3'\n  write it in quotes"),
        ],
    )
    def test_a_wrong_mapping_is_explained(self, value: Any, expected: str) -> None:
        assert expected in error_text(data__validation_path=value)

    def test_other_keys_count_named_sets_as_they_count_paths(self) -> None:
        sets = {"b": ["b1.jsonl", "b2.jsonl"], "a": "a.jsonl"}
        text = error_text(data__validation_path=sets, data__validation_split=0.1)
        assert "both data.validation_path and data.validation_split are set" in text
        mappings = [{"text": "a"}, {"text": "b"}]
        text = error_text(data__path="c.jsonl,d.jsonl", data__validation_path=sets, data__columns=mappings)
        assert "does not have one mapping for each path of data.path and data.validation_path" in text

    def test_a_file_with_an_equals_sign_is_a_path_if_it_exists(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)

        def read(value: Any) -> Any:
            return load_config(overrides=MINIMAL | {"data.validation_path": value}).data.validation_path

        assert read("year=2025/a.jsonl") == {"year": ("2025/a.jsonl",)}
        (tmp_path / "year=2025").mkdir()
        (tmp_path / "year=2025/a.jsonl").write_text("")
        for path in ("year=2025/a.jsonl", "year=2025/*.jsonl", "year=2025", "data/year=2026/a.jsonl", "hub:a/b/c=d"):
            assert read(path) == (path,)
            assert read(f"c.jsonl,{path}") == ("c.jsonl", path), "a list without names is what it was"
            assert read([path]) == read(f"[{path}]") == (path,)
        assert read("new=year=2025/a.jsonl") == {"new": ("year=2025/a.jsonl",)}

        # Both exist: it must be said which one.
        (tmp_path / "2025").mkdir()
        (tmp_path / "2025/a.jsonl").write_text("")
        text = error_text(data__validation_path="year=2025/a.jsonl")
        assert "'year=2025/a.jsonl' is a file, but also '2025/a.jsonl' with the name 'year'" in text
        assert "write ./year=2025/a.jsonl for the file, or '{year: 2025/a.jsonl}' for the name" in text
        assert read("./year=2025/a.jsonl") == ("./year=2025/a.jsonl",)
        assert read("{year: 2025/a.jsonl}") == {"year": ("2025/a.jsonl",)}

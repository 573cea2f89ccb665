"""Settings: one spelling in every format, later wins, and a wrong word is answered with the right one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchstone.config import load_config, to_dict
from torchstone.config.help import config_table, field_help
from torchstone.config.load import ALIASES, PRESET_DIR, fields, from_dict, split_flags
from torchstone.config.schema import SECTION_HELP, Config
from torchstone.errors import UsageError

MINIMAL = {"model.depth": 2, "model.tokenizer": "demo:tokenizer", "data.path": "demo:corpus"}

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


def message(path: Path | None = None, preset: str | None = None, **overrides: object) -> str:
    with pytest.raises(UsageError) as caught:
        load_config(path, preset, MINIMAL | {key.replace("__", "."): value for key, value in overrides.items()})
    assert caught.value.exit_code == 2
    return str(caught.value)


class TestFormats:
    def test_every_format_and_the_command_line_give_the_same_config(self, tmp_path: Path) -> None:
        configs = []
        for name, text in FILES.items():
            (tmp_path / name).write_text(text)
            configs.append(load_config(tmp_path / name))
        _, pairs = split_flags(
            [
                "--model.depth",
                "2",
                "--model.tokenizer",
                "http://not-a-comment",
                "--data.path",
                "x.jsonl",
                "--optim.learning-rate",
                "2e-5",
                "--optim.betas=0.9,0.99",
            ]
        )
        configs.append(load_config(overrides=pairs))
        configs.append(
            load_config(
                overrides={
                    "model": {"depth": 2, "tokenizer": "http://not-a-comment"},
                    "data.path": "x.jsonl",
                    "optim": {"learning_rate": 2e-5, "betas": (0.9, 0.99)},
                }
            )
        )
        assert all(config == configs[0] for config in configs)
        assert configs[0].optim.learning_rate == 2e-5
        assert configs[0].optim.betas == (0.9, 0.99)

    @pytest.mark.parametrize("name", FILES)
    def test_an_unknown_key_is_named_with_file_line_and_the_nearest_name(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        path.write_text(FILES[name].replace("betas", "beta_s"))
        line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "beta_s" in text)
        with pytest.raises(UsageError) as caught:
            load_config(path)
        assert f"{path}:{line}: unknown key 'optim.beta_s'" in str(caught.value)
        assert "did you mean 'optim.betas'?" in str(caught.value)

    @pytest.mark.parametrize("name", FILES)
    def test_a_wrong_value_is_named_with_file_and_line(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        path.write_text(FILES[name].replace("2e-5", "-1"))
        line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "-1" in text)
        with pytest.raises(UsageError, match=f":{line}: optim.learning_rate must be at least 0, not -1"):
            load_config(path)

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("a.json", '{"optim": {"eps": 1e-6, "eps": 1e-7}}'),
            ("a.yaml", "optim:\n  eps: 1e-6\n  eps: 1e-7\n"),
            ("a.toml", "[optim]\neps = 1e-6\neps = 1e-7\n"),
        ],
    )
    def test_a_key_given_twice_is_refused(self, tmp_path: Path, name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match="twice|overwrite"):
            load_config(tmp_path / name)

    @pytest.mark.parametrize(
        ("name", "text"), [("a.json", '{"optim": {"eps" 1}}'), ("a.yaml", "optim: [1\n"), ("a.toml", "[optim\n")]
    )
    def test_a_broken_file_is_named_with_its_line(self, tmp_path: Path, name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match=rf"{name}:\d+: not (JSON|YAML|TOML)"):
            load_config(tmp_path / name)

    def test_a_missing_file_says_which_ones_are_there(self, tmp_path: Path) -> None:
        (tmp_path / "run.yaml").write_text("")
        with pytest.raises(UsageError, match="config files in .*run.yaml"):
            load_config(tmp_path / "rum.yaml")

    def test_commas_inside_text_are_left_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        path.write_text('{"output_dir": "runs/a,]b, }", "training": {"max_steps": 3,},}')
        config = load_config(path, "debug")
        assert (config.output_dir, config.training.max_steps) == ("runs/a,]b, }", 3)

    def test_an_empty_section_is_nothing_and_an_empty_unknown_one_is_wrong(self, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        path.write_text("optim:\n#  eps: 1e-6\ndata: {}\n")
        assert load_config(path, "debug").optim.eps == 1e-8
        path.write_text("trainnig: {}\n")
        with pytest.raises(UsageError, match="a.yaml:1: unknown key 'trainnig'"):
            load_config(path, "debug")

    def test_a_key_inside_an_inline_table_has_a_line_too(self, tmp_path: Path) -> None:
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

    def test_a_model_path_takes_back_the_shape_of_a_preset(self) -> None:
        config = load_config(preset="debug", overrides={"model.path": "somewhere"})
        assert (config.model.path, config.model.depth, config.model.tokenizer) == ("somewhere", None, None)

    def test_another_model_path_keeps_the_tokenizer_that_was_chosen(self, tmp_path: Path) -> None:
        path = tmp_path / "run.yaml"
        path.write_text("model: {path: one, tokenizer: mine}\ndata: {path: x.jsonl}\n")
        config = load_config(path, overrides={"model.path": "two"})
        assert (config.model.path, config.model.tokenizer) == ("two", "mine")

    def test_a_depth_takes_back_the_model_path_of_a_preset(self) -> None:
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
    def test_the_micro_steps_take_back_the_global_batch_of_an_earlier_source_and_the_other_way_round(
        self, tmp_path: Path, file: str, flags: dict[str, object], expected: tuple[int | None, int | None]
    ) -> None:
        path = tmp_path / "run.yaml"
        path.write_text(f"training:\n  {file}\n")
        training = load_config(path, "debug", flags).training
        assert (training.global_batch_size, training.grad_accum_steps) == expected

    def test_path_and_depth_in_one_place_are_refused(self) -> None:
        assert "model.depth shapes a new model" in message(model__path="x")

    @pytest.mark.parametrize("name", sorted(path.stem for path in PRESET_DIR.glob("*.yaml")))
    def test_every_preset_is_valid(self, name: str) -> None:
        assert isinstance(load_config(preset=name), Config)

    def test_an_unknown_preset_lists_them(self) -> None:
        with pytest.raises(UsageError, match="did you mean 'production'"):
            load_config(preset="prodution")


class TestAliases:
    def test_the_names_of_other_trainers_work(self) -> None:
        config = load_config(
            overrides=MINIMAL
            | {
                "training.grad_accum_nums": 3,
                "training.num_workers": 8,
                "training.learning_rate": 0.5,
                "training.max_grad_norm": 2,
                "training.context_length": 99,
                "training.use_amp": False,
            }
        )
        assert config.training.grad_accum_steps == 3
        assert config.data.num_workers == 8
        assert config.optim.learning_rate == 0.5
        assert config.optim.max_grad_norm == 2
        assert config.data.context_length == 99
        assert config.training.precision == "fp32"

    def test_mixed_precision_may_be_asked_for_by_the_name_of_others(self) -> None:
        assert load_config(overrides=MINIMAL | {"training.use_amp": True}).training.precision == "bf16"

    def test_two_spellings_of_one_key_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        path.write_text("training:\n  max_steps: 3\n  max-steps: 4\n")
        with pytest.raises(UsageError, match="are one setting"):
            load_config(path, "debug")

    def test_every_alias_means_a_key(self) -> None:
        assert set(ALIASES.values()) <= set(fields())
        assert not set(ALIASES) & set(fields())

    def test_two_names_of_one_setting_are_refused(self) -> None:
        text = message(training__learning_rate=1e-3, optim__learning_rate=2e-3)
        assert "are one setting" in text


class TestWrongValues:
    @pytest.mark.parametrize(
        ("key", "value", "expected"),
        [
            ("training.max_steps", "0", "must be at least 1, not 0"),
            ("training.max_steps", "ten", "must be a whole number, not 'ten'"),
            ("training.max_steps", "1.5", "must be a whole number"),
            ("training.max_steps", True, "must be a whole number"),
            ("optim.learning_rate", "nan", "must be a number"),
            ("optim.learning_rate", [1], "must be a number"),
            ("optim.betas", "0.9", "takes 2 values, not 1"),
            ("optim.betas", "0.9,1.0", "must be at least 0 and less than 1, not 1.0"),
            ("optim.schedule", "cosin", "did you mean 'cosine'?"),
            ("optim.no_decay", "norm,biases", "the kinds are norm, bias, embed, head, matrix"),
            ("data.shuffle", "maybe", "must be true or false"),
            ("data.validation_split", "1.5", "at most 1"),
            ("data.validation_split", 1, "leaves nothing to train on"),
            ("training.mode", "token", "add --training.max_tokens N"),
            ("training.validate_every_steps", 5, "nothing to validate on"),
            ("checkpoint.save_best", True, "nothing to validate on"),
            ("optim.decay_steps", 5, "is for schedule wsd, not cosine"),
        ],
    )
    def test_an_impossible_value_says_what_would_do(self, key: str, value: object, expected: str) -> None:
        assert expected in message(**{key.replace(".", "__"): value})

    @pytest.mark.parametrize(
        ("key", "meant"),
        [
            ("optim.learning_rat", "optim.learning_rate"),
            ("training.lr", "optim.learning_rate"),
            ("optmi.learning_rate", "optim.learning_rate"),
            ("data.ctx_length", "data.context_length"),
            ("learning_rate", "optim.learning_rate"),
        ],
    )
    def test_a_misspelt_key_gets_the_right_one(self, key: str, meant: str) -> None:
        assert f"did you mean '{meant}'?" in message(**{key.replace(".", "__"): 1})

    def test_infinite_needs_a_schedule_without_end(self) -> None:
        assert "use --optim.schedule constant" in message(training__mode="infinite")

    def test_nothing_is_a_list_too(self) -> None:
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
    def test_absurd_files_are_answered_too(self, tmp_path: Path, name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError):
            load_config(tmp_path / name, "debug")

    def test_large_whole_numbers_keep_every_digit(self) -> None:
        config = load_config(overrides=MINIMAL | {"training.max_tokens": "9007199254740993"})
        assert config.training.max_tokens == 9007199254740993
        assert load_config(overrides=MINIMAL | {"training.max_tokens": "1e9"}).training.max_tokens == 10**9


class TestHelp:
    def test_every_field_has_a_sentence(self) -> None:
        assert field_help().keys() == fields().keys()
        assert all(len(text) > 15 and text.endswith(".") for text in field_help().values())

    def test_every_section_is_described(self) -> None:
        assert {key.split(".")[0] for key in fields() if "." in key} == set(SECTION_HELP)
        assert all(f"--{key}" in config_table() for key in fields() if "." in key)


class TestFlags:
    def test_flags_are_taken_out_and_the_rest_stays_in_order(self) -> None:
        rest, pairs = split_flags(
            ["train", "a.yaml", "--data.shuffle", "--optim.eps=1e-9", "--debug", "--model.depth", "3"]
        )
        assert rest == ["train", "a.yaml", "--debug"]
        assert pairs == [("data.shuffle", "true"), ("optim.eps", "1e-9"), ("model.depth", "3")]

    def test_a_false_is_a_value(self) -> None:
        _, pairs = split_flags(["--data.shuffle", "false"])
        assert load_config(overrides=[*MINIMAL.items(), *pairs]).data.shuffle is False

"""Tokenizers that others wrote: what they do to a text is what Transformers does, or an error that says why."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from caches import cache_rows
from tiny import chat_row, flags, write_rows
from torchstone import api
from torchstone.api import prepare
from torchstone.atomic import translate_os_errors
from torchstone.data import render_limits
from torchstone.data.template import ChatTemplate
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.data.train_tokenizer import save_tokenizer, train_tokenizer
from torchstone.errors import DataError, UsageError
from torchstone.observe.metrics import read_metrics

LETTERS = {"<s>": 0, "</s>": 1, "A": 2, "C": 3, "G": 4, "T": 5}
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
CHAT = chat_row("a", "b")


def begin_with(token: str, number: int) -> dict[str, Any]:
    """A post-processor that puts a token before a text."""
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


@pytest.fixture
def edited(tokenizer_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """The folder of the demo's tokenizer with other parts of tokenizer.json, and the chat template `template`."""

    def edit(template: str | None = None, **parts: Any) -> Path:
        folder = tmp_path / "tokenizer"
        shutil.copytree(tokenizer_dir, folder)
        settings = json.loads((folder / "tokenizer.json").read_text())
        model = settings["model"] | parts.pop("model", {})
        (folder / "tokenizer.json").write_text(json.dumps(settings | {"model": model} | parts))
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return folder

    return edit


@pytest.fixture
def letters(edited: Callable[..., Path]) -> Callable[..., Tokenizer]:
    """A tokenizer that knows four letters."""

    def make(**parts: Any) -> Tokenizer:
        added = [
            {"id": i, "content": token, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for token, i in (("<s>", 0), ("</s>", 1))
        ]
        none = dict.fromkeys(("normalizer", "pre_tokenizer", "decoder", "post_processor"))
        model = {"vocab": LETTERS, "merges": []} | parts.pop("model", {})
        folder = edited(model=model, added_tokens=added, **none | parts)
        names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(names))
        return load_tokenizer(folder)

    return make


@pytest.mark.parametrize("number", [500_000, 65_541])
def test_a_token_outside_the_vocabulary_is_refused(edited: Callable[..., Path], number: int) -> None:
    """It would be stored modulo 65,536: the model would learn another token."""
    with pytest.raises(UsageError, match=f"adds the token {number} to every text, but its vocabulary has"):
        load_tokenizer(edited(post_processor=begin_with("<|x|>", number)))


def test_texts_begin_as_in_transformers_whatever_letters_there_are(
    letters: Callable[..., Tokenizer], tmp_path: Path
) -> None:
    tokenizer = letters(post_processor=begin_with("<s>", 0))
    cache = cache_rows([{"text": "ACGT"}], tokenizer, tmp_path)
    assert cache.ids.tolist() == [*tokenizer.hf("ACGT").input_ids, 1] == [0, 2, 3, 4, 5, 1]
    assert tokenizer.text_prefix == [0]


def test_characters_without_a_token_are_counted(letters: Callable[..., Tokenizer], tmp_path: Path) -> None:
    cache = cache_rows([{"text": "hello AC lost"}, {"text": "A C"}], letters(), tmp_path)
    assert cache.ids.tolist() == [2, 3, 1] * 2
    assert cache.counts.lost_characters == 12


def test_a_suffix_of_words_is_no_character(letters: Callable[..., Tokenizer], tmp_path: Path) -> None:
    vocab = LETTERS | {"T</w>": 6}
    model = {"vocab": vocab, "end_of_word_suffix": "</w>"}
    tokenizer = letters(model=model, normalizer={"type": "Replace", "pattern": {"String": "-"}, "content": ""})
    cache = cache_rows([{"text": "AC-T"}, {"text": "AxT"}], tokenizer, tmp_path)
    assert cache.ids.tolist() == [2, 3, 6, 1, 2, 6, 1]
    assert cache.counts.lost_characters == 1


@pytest.mark.parametrize(
    ("parts", "text", "lost"),
    [
        (
            {
                "pre_tokenizer": {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": True,
                }
            },
            "A\n\néC",
            4,
        ),
        ({"pre_tokenizer": {"type": "CharDelimiterSplit", "delimiter": "-"}}, "A-xC", 1),
        ({"model": {"continuing_subword_prefix": "##", "vocab": LETTERS | {"##C": 6}}}, "ACG", 1),
        ({}, "<s>A</s>x", 1),
    ],
    ids=["bytes", "delimiter", "prefix", "special"],
)
def test_lost_characters_are_those_that_the_model_does_not_know(
    letters: Callable[..., Tokenizer], tmp_path: Path, parts: dict[str, Any], text: str, lost: int
) -> None:
    assert cache_rows([{"text": text}], letters(**parts), tmp_path).counts.lost_characters == lost


def test_a_prompt_with_a_character_without_a_token_is_a_bad_row(
    letters: Callable[..., Tokenizer], tmp_path: Path
) -> None:
    """The tokenizer counts the offsets of later tokens without it, so the loss mask would move."""
    rows = [{"prompt": "Ax", "completion": "CG"}, {"prompt": "A", "completion": "CG"}]
    tokenizer = letters()
    with pytest.raises(DataError, match="rows.jsonl:1: the tokenizer has no token for 'x'"):
        cache_rows(rows, tokenizer, tmp_path)
    cache = cache_rows(rows, tokenizer, tmp_path, stop_on_bad_row=False)
    assert (cache.counts.bad_rows, cache.labels.tolist()) == (1, [-100, 3, 4, 1])


def test_texts_are_encoded_without_a_post_processor(letters: Callable[..., Tokenizer], tmp_path: Path) -> None:
    assert cache_rows([{"text": "ACGT"}], letters(), tmp_path).ids.tolist() == [2, 3, 4, 5, 1]


def test_dropout_is_turned_off_and_named(edited: Callable[..., Path], tokenizer: Tokenizer) -> None:
    dropped = load_tokenizer(edited(model={"dropout": 0.9}))
    text = "The same text gives the same tokens."
    assert dropped.encode(text) == tokenizer.encode(text)
    assert any("dropout" in warning for warning in dropped.warnings)


def test_each_warning_is_printed_once(
    edited: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = edited("{{ raise_exception('no') }}", model={"dropout": 0.9})
    names = [str(write_rows(tmp_path / f"{name}.jsonl", [{"text": f"text {name}"}] * 3)) for name in "abc"]
    options = {"model.tokenizer": str(folder), "data.path": names[:2], "data.validation_path": names[2:]}
    prepare(overrides=options | {"data.cache_dir": str(tmp_path / "cache"), "data.context_length": 8})
    output = capsys.readouterr().err
    assert [output.count(text) for text in ("dropout of the tokenizer", "only the eos token ends")] == [1, 1]


@pytest.mark.parametrize("source", ["{{ ['!', '?'] | random }}", "{{ lipsum() }}"])
def test_a_template_has_no_random_text(source: str) -> None:
    with pytest.raises((UsageError, DataError), match="random|lipsum"):
        ChatTemplate(source, {}).render_text(CHAT["messages"])


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "cannot read the tokenizer"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "cannot encode a text"),
    ],
)
def test_a_tokenizer_that_panics_is_refused(edited: Callable[..., Path], parts: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        load_tokenizer(edited(**parts))


def test_a_text_that_cannot_be_encoded_is_a_usage_error(edited: Callable[..., Path]) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, "<|endoftext|>": 1}, "unk_token": "?"}
    tokenizer = load_tokenizer(edited(model=model, added_tokens=[]))
    with pytest.raises(UsageError, match="the tokenizer cannot encode a text"):
        tokenizer.encode("b")


@pytest.mark.parametrize(
    ("end", "has_end", "has_warning"),
    [
        ("{% if add_generation_prompt %}<|assistant|><think>{% endif %}", True, False),
        ("{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}", False, True),
    ],
)
def test_a_template_need_not_be_stable_to_generate(
    edited: Callable[..., Path], end: str, has_end: bool, has_warning: bool
) -> None:
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + end
    tokenizer = load_tokenizer(edited(source))
    ends = [tokenizer.hf.eos_token_id, *([tokenizer.hf.convert_tokens_to_ids("<|end|>")] if has_end else [])]
    assert tokenizer.stop_ids == sorted(ends)
    assert bool(tokenizer.warnings) == has_warning


def test_several_templates_give_the_eos_token_only(edited: Callable[..., Path]) -> None:
    hf = load_tokenizer(edited()).hf
    hf.chat_template = {"default": "a", "tool_use": "b"}
    tokenizer = Tokenizer(hf, "here")
    assert tokenizer.stop_ids == [tokenizer.hf.eos_token_id]
    assert "several chat templates" in tokenizer.warnings[0]


class TestLoopingTemplates:
    @pytest.fixture(autouse=True)
    def short_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(render_limits, "TIME_LIMIT", 0.02)

    def test_the_first_bad_row_stops_its_chunk(
        self, edited: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With MAX_TIMEOUTS 2 a second row would be another error."""
        monkeypatch.setattr(render_limits, "MAX_TIMEOUTS", 2)
        with pytest.raises(DataError, match=r"rows.jsonl:1: the chat template took more than"):
            cache_rows([CHAT] * 5, load_tokenizer(edited(LOOP)), tmp_path)

    def test_bad_rows_are_not_skipped_for_ever(self, edited: Callable[..., Path], tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="10 conversations in a row"):
            cache_rows([CHAT] * 20, load_tokenizer(edited(LOOP)), tmp_path, stop_on_bad_row=False)

    def test_a_trained_tokenizer_names_a_template_that_renders_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "loop.jinja").write_text(LOOP)
        data = write_rows(tmp_path / "a.jsonl", [{"text": "some text"}])
        _, report = train_tokenizer([str(data)], 300, chat_template=str(tmp_path / "loop.jinja"))
        assert "the chat template renders no conversation" in report["notes"][0]


def test_out_of_memory_is_not_the_fault_of_a_row(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        model = None

        def encode_batch_fast(self, *args: Any, **options: Any) -> Any:
            raise RuntimeError("Onig: fail to memory allocation")

    monkeypatch.setattr("torchstone.data.encode.Encoder.tokenizer", Full())
    monkeypatch.setattr("torchstone.data.encode.Encoder._word_encoder", None)
    with pytest.raises(MemoryError, match="Onig"):
        cache_rows([{"text": "a"}], tokenizer, tmp_path)


class TestSaving:
    def test_a_full_disk_is_an_os_error(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        full = tmp_path / "full"
        full.mkdir()
        (full / "tokenizer.json").symlink_to("/dev/full")
        with pytest.raises(OSError, match="No space left on device") as caught:
            tokenizer.save(full)
        assert (caught.value.errno, caught.value.filename) == (28, str(full))

    def test_other_errors_stay_as_they_are(self, tmp_path: Path) -> None:
        for error in (ValueError("no"), OSError(13, "denied")):
            with pytest.raises(type(error)) as caught, translate_os_errors(tmp_path):
                raise error
            assert caught.value is error

    def test_a_new_tokenizer_on_a_full_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Full:
            def save_pretrained(self, folder: Path) -> None:
                raise Exception(f"{os.strerror(28)} (os error 28)")

        with pytest.raises(OSError, match="No space left on device"):
            save_tokenizer(Full(), tmp_path / "new")
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("name", ["../../x", "a\0b", "\ud800", "x" * 300], ids=["outside", "NUL", "half", "long"])
    def test_a_template_whose_name_cannot_be_a_file_is_refused_at_the_start(
        self, edited: Callable[..., Path], name: str
    ) -> None:
        folder = edited()
        path = folder / "tokenizer_config.json"
        templates = [{"name": "default", "template": "x"}, {"name": name, "template": "y"}]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": templates}))
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        with pytest.raises(UsageError, match="cannot be saved in a file of that name"):
            load_tokenizer(folder)
        assert load_tokenizer(folder, "chatml").template.source


def test_a_run_keeps_a_tokenizer_that_transformers_replaces(
    torchstone: Callable[..., tuple[int, str, str]], settings: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Beside a Qwen2 model, AutoTokenizer splits numbers into digits, whatever tokenizer.json says."""
    rows = [{"text": " ".join(f"the sum is {n * k}" for k in range(1, 12))} for n in range(7000, 7060)]
    train, valid = (write_rows(tmp_path / name, part) for name, part in (("a", rows[:50]), ("b", rows[50:])))
    shutil.rmtree(tmp_path / "tokenizer", ignore_errors=True)
    assert torchstone("tokenizer", "train", tmp_path / "tokenizer", "--data", train, "--vocab-size", "400")[0] == 0
    values = settings(
        model__family="qwen2", model__tokenizer=str(tmp_path / "tokenizer"), data__path=str(train),
        data__validation_path=str(valid), data__packing=False, data__context_length=128, training__max_steps=2,
        observe__console="lines",
    )  # fmt: skip
    code, _, err = torchstone("train", *flags(values))
    assert (code, "AutoTokenizer splits texts as the first qwen2 models did" in err) == (0, True), err
    checkpoint = tmp_path / "run/checkpoints/step-00000002"
    _, output, _ = torchstone("evaluate", tmp_path / "run", "--data", valid, "--data.context_length", "128", "--json")
    expected = read_metrics(tmp_path / "run/metrics.jsonl")[-1]["val_loss"]
    assert json.loads(output)["loss"] == pytest.approx(expected, rel=1e-6)
    # A resumed run has the same samples.
    code, _, err = torchstone("train", *flags(values | {"training.max_steps": 3}))
    assert (code, "resuming from" in err) == (0, True), err
    code, output, _ = torchstone("export", checkpoint, tmp_path / "hf", "--json")
    assert code == 0
    assert "PreTrainedTokenizerFast.from_pretrained(FOLDER)" in json.loads(output)["warnings"][0]
    text = rows[0]["text"]
    ids = load_tokenizer(tmp_path / "tokenizer").encode(text)
    assert load_tokenizer(tmp_path / "hf").encode(text) == ids
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "hf").encode(text, add_special_tokens=False) == ids
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").encode(text, add_special_tokens=False) != ids


def test_a_run_with_a_tokenizer_without_words_can_be_exported(
    letters: Callable[..., Tokenizer], settings: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    folder = letters(model={"vocab": {"<s>": 0, "</s>": 1, "0": 2, "1": 3}}).path
    data = write_rows(tmp_path / "bits.jsonl", [{"text": "0110101" * 9}] * 20)
    api.train(overrides=settings(model__tokenizer=folder, data__path=str(data), training__max_steps=1))
    result = api.export(str(tmp_path / "run"), tmp_path / "hf")
    assert result["verified"]
    assert result["max_logit_difference"] < 1e-5

"""`generate` and `chat`: the tokens and distributions of Transformers, streamed text, stops, refusals."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils import logging

import torchstone as ts
from tiny import flags, make_llama, make_scripted_llama
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.errors import UsageError
from torchstone.models.generate import next_token_probabilities, sample_token

Settings = Callable[..., dict[str, Any]]
Command = Callable[..., tuple[int, str, str]]
SAMPLINGS = [(1.0, 1.0, 0), (0.7, 0.9, 0), (1.5, 0.4, 0), (0.3, 1.0, 7), (1.2, 0.8, 20)]


@pytest.fixture(params=["native", "fallback"])
def implementation(request: pytest.FixtureRequest) -> dict[str, str]:
    return {"model.implementation": request.param}


def reference_tokens(folder: Path, tokenizer: Tokenizer, prompt: str, count: int, **options: Any) -> list[int]:
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(str(folder))
    ids = tokenizer.hf(prompt, return_tensors="pt").input_ids
    tokens = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, eos_token_id=tokenizer.stop_ids,
        pad_token_id=0, **options,
    )  # fmt: skip
    return tokens[0, ids.shape[1] :].tolist()


class TestSampling:
    @pytest.mark.parametrize(("temperature", "top_p", "top_k"), SAMPLINGS)
    def test_the_distribution_is_that_of_transformers(self, temperature: float, top_p: float, top_k: int) -> None:
        logits = 3 * torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
        warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        warpers += [TopKLogitsWarper(top_k)] if top_k else []
        warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        expected = warpers(torch.zeros(4, 1, dtype=torch.long), logits).softmax(-1)
        assert torch.equal(next_token_probabilities(logits, temperature, top_p, top_k), expected)

    def test_the_distribution_by_hand(self) -> None:
        logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
        for options, expected in (
            ({"top_p": 0.75}, [0.625, 0.375, 0.0, 0.0]),
            ({"top_k": 3}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
            ({"top_p": 0.1}, [1.0, 0.0, 0.0, 0.0]),
        ):
            probabilities = next_token_probabilities(logits, 1.0, **options)
            torch.testing.assert_close(probabilities, torch.tensor([expected]))
        generator = torch.Generator().manual_seed(0)
        tokens = sample_token(logits.expand(20000, 4), 1.0, generator, top_p=0.75)
        assert (tokens == 0).float().mean().item() == pytest.approx(0.625, abs=0.02)
        assert set(tokens.tolist()) == {0, 1}

    @pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(0.0, 1.0, 0), (0.9, 0.8, 0), (1.3, 0.95, 30)])
    def test_text_equals_transformers_token_for_token(
        self, llama_dir: Path, tokenizer: Tokenizer, implementation: dict[str, str], temperature: float, top_p: float,
        top_k: int,
    ) -> None:  # fmt: skip
        options: dict[str, Any] = {"do_sample": False}
        if temperature:
            options = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        # Transformers draws from the global generator, which has the same stream.
        torch.manual_seed(5)
        tokens = reference_tokens(llama_dir, tokenizer, "The river", 24, **options)
        end = next((index for index, token in enumerate(tokens) if token in tokenizer.stop_ids), len(tokens))
        text = ts.generate(
            str(llama_dir), "The river", 24, temperature, top_p, top_k, seed=5, device="cpu", overrides=implementation
        )
        assert text == tokenizer.decode(tokens[:end])

    @pytest.mark.parametrize(
        "flag", ["--temperature=-1", "--temperature=nan", "--temperature=1e-40", "--top-p=0", "--top-p=2", "--top-k=-1"]
    )
    def test_impossible_values_are_refused(self, torchstone: Command, llama_dir: Path, flag: str) -> None:
        code, out, err = torchstone("generate", llama_dir, "a", flag)
        assert (code, out) == (2, "")
        assert f"error: {flag.partition('=')[0]}" in err

    @pytest.mark.parametrize("args", [("chat", "--top-p", 0.9), ("generate", "--temperature", 0, "--top-k", 5)])
    def test_options_without_an_effect_are_refused(self, torchstone: Command, llama_dir: Path, args: Any) -> None:
        command, *options = args
        code, out, err = torchstone(command, llama_dir, *options)
        assert (code, out) == (2, "")
        assert "have no effect at temperature 0" in err

    def test_the_seed_decides_the_text(self, torchstone: Command, llama_dir: Path) -> None:
        texts = [torchstone("generate", llama_dir, "a", "--max-tokens", 8, "--seed", seed)[1] for seed in (1, 1, 2)]
        assert texts[0] == texts[1] != texts[2]


class TestStreaming:
    @pytest.fixture
    def scripted(self, tokenizer: Tokenizer, tmp_path: Path) -> Callable[..., Path]:
        def make(text: str, start: str = "<|assistant|>", **changes: Any) -> Path:
            chain = [*tokenizer.encode(start), *tokenizer.encode(text), tokenizer.hf.eos_token_id]
            return make_scripted_llama(tmp_path / "model", tokenizer, chain, **changes)

        return make

    def test_text_comes_in_complete_characters(
        self, scripted: Callable[..., Path], implementation: dict[str, str]
    ) -> None:
        text, pieces = "é🎉日x", list[str]()
        chat = ts.Chat(str(scripted(text)), device="cpu", overrides=implementation)
        assert chat.ask("hi", pieces.append) == text
        assert pieces == list(text)
        assert chat.last is not None
        assert chat.last.ended_by == "stop"

    def test_a_character_without_its_last_byte_is_not_lost(
        self, scripted: Callable[..., Path], implementation: dict[str, str]
    ) -> None:
        pieces = list[str]()
        chat = ts.Chat(str(scripted("x🎉")), max_new_tokens=3, device="cpu", overrides=implementation)
        assert chat.ask("hi", pieces.append) == "x\ufffd" == "".join(pieces)
        assert chat.last is not None
        assert chat.last.ended_by == "max_tokens"

    def test_the_end_of_a_turn_ends_the_answer(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        ids = tokenizer.encode("<|assistant|>yes<|end|>no")
        folder = make_scripted_llama(tmp_path / "model", tokenizer, ids)
        assert ts.Chat(str(folder), device="cpu").ask("hi") == "yes"

    def test_the_end_of_the_context_is_said(
        self, torchstone: Command, scripted: Callable[..., Path], implementation: dict[str, str]
    ) -> None:
        folder = scripted("abcdefghijkl", start="x", max_position_embeddings=8)
        key, value = next(iter(implementation.items()))
        code, out, err = torchstone("generate", folder, "zzzx", "--temperature", 0, f"--{key}={value}")
        assert (code, out) == (0, "abcd\n")
        assert "the context of the model is full" in err
        code, out, err = torchstone("generate", folder, "zzzzzzzx", f"--{key}", value)
        assert (code, out) == (2, "")
        assert "the prompt has 8 tokens, and the model's context is 8 tokens" in err

    def test_the_limit_of_tokens_is_said(self, torchstone: Command, scripted: Callable[..., Path]) -> None:
        code, out, err = torchstone("generate", scripted("abcdef", "x"), "x", "--temperature", 0, "--max-tokens", 3)
        assert (code, out, err) == (0, "abc\n", "[stopped at --max-tokens 3]\n")

    def test_a_prompt_is_read_from_stdin(
        self, torchstone: Command, scripted: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = scripted("ok", "é")
        (tmp_path / "prompt").write_text("caf é\n", encoding="utf-8")
        with (tmp_path / "prompt").open(encoding="utf-8") as file:
            monkeypatch.setattr(sys, "stdin", file)
            assert torchstone("generate", folder, "-", "--temperature", 0) == (0, "ok\n", "")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
        code, _, err = torchstone("generate", folder, "-")
        assert (code, "the input is not UTF-8" in err) == (2, True)

    def test_input_that_is_not_read_is_named(
        self, torchstone: Command, scripted: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "prompt").write_text("a text")
        warnings = []
        for name in (tmp_path / "prompt", "/dev/null"):
            with open(name, encoding="utf-8") as file:
                monkeypatch.setattr(sys, "stdin", file)
                code, _, err = torchstone("generate", scripted("ok", "x"), "--max-tokens", 1)
                warnings.append((code, "write - as the prompt" in err))
                # A shell's loop may go on to read it.
                assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 0
        assert warnings == [(0, True), (0, False)]

    def test_a_prompt_may_begin_with_a_hyphen(self, torchstone: Command, scripted: Callable[..., Path]) -> None:
        folder = scripted("ok", "x")
        assert torchstone("generate", folder, "--what.is x", "--temperature", 0) == (0, "ok\n", "")


def test_logits_that_are_nan_are_an_error(torchstone: Command, tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "model", tokenizer)
    edit_json(folder / "config.json", rms_norm_eps=float("nan"))
    for args in (("generate", folder, "a"), ("chat", folder, "--prompt", "a", "--chat-template", "chatml")):
        code, _, err = torchstone(*args)
        assert (code, "logits are NaN" in err) == (5, True), err


def test_a_misspelled_option_is_not_taken_for_the_prompt(torchstone: Command, llama_dir: Path) -> None:
    code, _, err = torchstone("generate", llama_dir, "--max-token=5")
    assert (code, "unknown option --max-token=5" in err) == (2, True)


class TestNoPrompt:
    def test_a_text_starts_from_eos_and_from_bos_if_there_is_one(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        end, pad = tokenizer.hf.eos_token_id, tokenizer.hf.pad_token_id
        folder = make_scripted_llama(tmp_path / "eos", tokenizer, [end, *tokenizer.encode("from eos"), pad])
        assert ts.generate(str(folder), max_tokens=6, temperature=0.0, device="cpu").startswith("from")
        folder = make_scripted_llama(tmp_path / "bos", tokenizer, [pad, *tokenizer.encode("from bos"), end])
        edit_json(folder / "tokenizer_config.json", bos_token="<|pad|>")
        assert ts.generate(str(folder), max_tokens=20, temperature=0.0, device="cpu") == "from bos"

    def test_without_either_a_prompt_is_needed(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        folder = make_llama(tmp_path / "model", tokenizer)
        edit_json(folder / "tokenizer_config.json", eos_token=None)
        with pytest.raises(UsageError, match=r"neither a BOS nor an EOS token(?s:.)*give a prompt"):
            ts.generate(str(folder), device="cpu")


class TestChat:
    def test_the_system_message_starts_every_conversation(self, llama_dir: Path) -> None:
        chat = ts.Chat(str(llama_dir), max_new_tokens=2, device="cpu", system="Be brief.")
        chat.ask("hi")
        assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]
        chat.reset()
        assert chat.messages == [{"role": "system", "content": "Be brief."}]

    def test_the_template_decides_the_prompt(self, torchstone: Command, tokenizer: Tokenizer, tmp_path: Path) -> None:
        chain = [*tokenizer.encode("x"), *tokenizer.encode("y"), tokenizer.hf.eos_token_id]
        folder = make_scripted_llama(tmp_path / "model", tokenizer, chain)
        template = tmp_path / "x.jinja"
        template.write_text(
            "{% for m in messages %}{% if m.role == 'assistant' %}x{% endif %}{{ m.content }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}x{% endif %}"
        )
        for flag in ("--chat-template", "--data.chat_template"):
            assert torchstone("chat", folder, "--prompt", "hi", flag, template) == (0, "y\n", "")

    def test_a_tokenizer_without_a_template_is_refused(
        self, torchstone: Command, llama_dir: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "model"
        shutil.copytree(llama_dir, folder)
        (folder / "chat_template.jinja").unlink()
        code, out, err = torchstone("chat", folder, "--prompt", "hi")
        assert (code, out) == (2, "")
        assert "cannot chat: its tokenizer has no chat template" in err
        assert f"torchstone generate {folder}" in err
        assert "--chat-template chatml" in err
        assert torchstone("chat", folder, "--prompt", "hi", "--chat-template", "chatml", "--max-tokens", 2)[0] == 0
        assert torchstone("generate", folder, "hi", "--max-tokens", 2)[0] == 0

    def test_a_run_that_was_trained_on_text_only_is_refused(self, torchstone: Command, settings: Settings) -> None:
        """Its tokenizer has a template, but the model has never seen one."""
        overrides = settings(training__max_steps=1)
        assert torchstone("train", *flags(overrides))[0] == 0
        code, _, err = torchstone("chat", overrides["output_dir"], "--prompt", "hi")
        assert code == 2
        assert "it was trained on text only, without a chat template" in err
        assert torchstone("generate", overrides["output_dir"], "The", "--max-tokens", 2)[0] == 0

    def test_a_chat_model_that_was_trained_further_on_text_can_chat(
        self, torchstone: Command, settings: Settings, llama_dir: Path
    ) -> None:
        overrides = settings(training__max_steps=1, model__path=llama_dir)
        for key in ("model.depth", "model.width", "model.heads", "model.tokenizer"):
            del overrides[key]
        assert torchstone("train", *flags(overrides))[0] == 0
        assert torchstone("chat", overrides["output_dir"], "--prompt", "hi", "--max-tokens", 2)[0] == 0


@pytest.mark.parametrize("command", ["chat", "generate", "evaluate"])
def test_commands_accept_the_config_keys_that_errors_name(
    torchstone: Command, llama_dir: Path, chat_file: Path, tmp_path: Path, command: str
) -> None:
    args = {"chat": ["--prompt", "hi"], "generate": ["hi"], "evaluate": ["--data", chat_file, "--data.max_samples", 2]}
    keys = ["--model.implementation=fallback", "--model.attention", "eager", "--data.chat-template", "chatml"]
    keys += ["--model.trust_remote_code", "--system.device", "cpu"]
    keys += ["--data.on_bad_row", "skip", "--data.cache_dir", tmp_path] if command == "evaluate" else []
    code, _, err = torchstone(command, llama_dir, *args[command], "--max-tokens", 2, *keys)
    assert code == 0, err
    code, _, err = torchstone(command, llama_dir, *args[command], "--model.attention", "flash")
    assert (code, "model.attention" in err) == (2, True)


@pytest.mark.parametrize(
    ("flag", "key"),
    [("--device=cpu", "--system.device=cpu"), ("--chat-template=chatml", "--data.chat-template=chatml")],
)
def test_a_flag_and_its_config_key_are_refused_together(
    torchstone: Command, llama_dir: Path, flag: str, key: str
) -> None:
    code, _, err = torchstone("chat", llama_dir, "--prompt", "hi", flag, key)
    assert (code, "are the same setting" in err) == (2, True)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_trained_template_is_found_again(settings: Settings, chat_file: Path) -> None:
    """A run on conversations can chat, and so can its tokenizer alone."""
    overrides = settings(data__path=str(chat_file), data__context_length=64, training__max_steps=1)
    ts.train(overrides=overrides)
    chat = ts.Chat(overrides["output_dir"], max_new_tokens=2, device="cpu")
    assert chat.tokenizer.hf.chat_template == load_tokenizer(Path(overrides["model.tokenizer"])).hf.chat_template
    chat.ask("hi")

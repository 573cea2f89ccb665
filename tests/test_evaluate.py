"""`evaluate`: bits per byte, extracted answers, how many questions, batched answers, progress."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, normalizers
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import torchstone as ts
from tiny import chat_row, make_scripted_llama, write_rows
from torchstone import api
from torchstone.data.tokenize import Tokenizer
from torchstone.errors import OutOfMemoryError, UsageError
from torchstone.observe import console as console_module
from torchstone.training import evaluate as evaluate_module

Command = Callable[..., tuple[int, str, str]]
Evaluate = Callable[..., dict[str, Any]]


@pytest.fixture
def evaluate(tmp_path: Path) -> Evaluate:
    def run(folder: Path, data: Path, *args: Any, **options: Any) -> dict[str, Any]:
        defaults = {"device": "cpu", "cache_dir": str(tmp_path / "cache"), "quiet": True}
        return ts.evaluate(str(folder), str(data), *args, **(defaults | options))

    return run


class TestBitsPerByte:
    TEXTS = ("The river é is 日本 long 🎉.", "plain text, and no more", "x")

    def reference_nats(self, folder: Path, ids: list[int], first: int) -> float:
        """The loss sum of the tokens from `first` on, by Transformers."""
        model = AutoModelForCausalLM.from_pretrained(str(folder))
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1].double()
        return F.cross_entropy(logits[first - 1 :], torch.tensor(ids[first:]), reduction="sum").item()

    def test_it_is_that_of_transformers_over_the_bytes_of_the_text(
        self, evaluate: Evaluate, llama_dir: Path, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        """The first token of a text has no loss, so its bytes do not count; EOS has no bytes."""
        data = write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in self.TEXTS])
        result = evaluate(llama_dir, data)
        nats = size = 0.0
        for text in self.TEXTS:
            ids = [*tokenizer.encode(text), tokenizer.hf.eos_token_id]
            nats += self.reference_nats(llama_dir, ids, 1)
            size += len(text.encode()) - len(tokenizer.decode(ids[:1]).encode())
        assert result["bytes"] == size
        assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-6)
        assert result["perplexity"] == pytest.approx(math.exp(nats / result["tokens"]), rel=1e-5)

    def test_of_a_conversation_only_the_answers_count(
        self, evaluate: Evaluate, llama_dir: Path, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        answer = "It is é🎉."
        data = write_rows(tmp_path / "chat.jsonl", [chat_row("What is it?", answer)])
        result = evaluate(llama_dir, data, 0)
        prompt = tokenizer.encode("<|user|>What is it?<|end|><|assistant|>")
        nats = self.reference_nats(llama_dir, [*prompt, *tokenizer.encode(f"{answer}<|end|>")], len(prompt))
        assert result["bytes"] == len(answer.encode())
        assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(answer.encode()), rel=1e-6)
        assert "questions" not in result

    def test_tokenizers_without_byte_level_tokens_count_bytes_too(self) -> None:
        """With spaces as ▁ and bytes as <0xE2>, as in Llama 2."""
        vocab = {"<unk>": 0, "</s>": 1, "▁": 2, "a": 3, "▁é": 4, "日": 5, "<0xE2>": 6, "▁the": 7}
        backend = BackendTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
        assert Tokenizer(hf, "tiny").token_bytes.tolist() == [0, 0, 1, 1, 3, 3, 1, 4]


def test_the_loss_of_texts_does_not_depend_on_the_row_length(
    evaluate: Evaluate, llama_dir: Path, text_file: Path
) -> None:
    """No text is cut if it fits into a row."""
    losses = [evaluate(llama_dir, text_file, context_length=length)["loss"] for length in (128, 200, 1024)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


class TestAnswers:
    def scripted(self, tokenizer: Tokenizer, folder: Path, answer: str) -> Path:
        chain = [*tokenizer.encode("<|assistant|>"), *tokenizer.encode(answer), tokenizer.hf.eos_token_id]
        return make_scripted_llama(folder, tokenizer, chain)

    def test_a_pattern_extracts_what_is_compared(
        self, torchstone: Command, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        folder = self.scripted(tokenizer, tmp_path / "model", "so#=42")
        rows = [chat_row("a", "40 plus 2\n#=42 "), chat_row("b", "#= 43"), chat_row("c", "no number")]
        data = write_rows(tmp_path / "rows.jsonl", rows)
        args = ["evaluate", folder, "--data", data, "--cache-dir", tmp_path]
        code, out, err = torchstone(*args, "--json", "--extract", "#=(.+)", "--max-tokens", 20)
        assert code == 0, err
        result = json.loads(out)
        assert result["exact_match"] == pytest.approx(1 / 3)
        assert (result["answers_without_match"], result["expected_without_match"]) == (0, 1)
        assert [(e["question"], e["right"], e["extracted"]) for e in result["examples"]] == [
            ("a", True, "42"), ("b", False, "42"), ("c", False, "42"),
        ]  # fmt: skip
        result = json.loads(torchstone(*args, "--json", "--extract", "#= .+", "--max-tokens", 20)[1])
        assert (result["exact_match"], result["answers_without_match"]) == (0, 3)
        assert json.loads(torchstone(*args, "--json")[1])["exact_match"] == 0
        for pattern, message in (("(", "is not a regular expression"), ("nowhere", "matches none of the 3 expected")):
            code, _, err = torchstone(*args, "--extract", pattern)
            assert (code, message in err) == (2, True), err

    def test_a_pattern_that_finds_nothing_or_the_same_everywhere_is_noticed(
        self, torchstone: Command, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        folder = self.scripted(tokenizer, tmp_path / "model", "y")
        data = write_rows(tmp_path / "rows.jsonl", [chat_row("a", "#1"), chat_row("b", "#2")])
        args = ["evaluate", folder, "--data", data, "--cache-dir", tmp_path]
        for pattern in ("", "x*"):
            code, _, err = torchstone(*args, "--extract", pattern)
            assert (code, "matches none of the 2 expected answers" in err) == (2, True), err
        code, _, err = torchstone(*args, "--extract", "#")
        assert (code, "--extract '#' finds the same in all expected answers: '#'" in err) == (0, True), err

    def test_prompts_and_completions_are_answered_without_a_template(
        self, evaluate: Evaluate, llama_dir: Path, tmp_path: Path
    ) -> None:
        prompt = "The river"
        completion = ts.generate(str(llama_dir), prompt, 6, temperature=0.0, device="cpu")
        rows = [{"prompt": prompt, "completion": completion}, {"prompt": prompt, "completion": f"{completion}!"}]
        result = evaluate(llama_dir, write_rows(tmp_path / "rows.jsonl", rows), max_tokens=6)
        assert (result["exact_match"], result["questions"]) == (0.5, 2)
        assert [(e["question"], e["right"]) for e in result["examples"]] == [(prompt, True), (prompt, False)]

    def test_rows_that_cannot_be_asked_are_left_out(
        self, torchstone: Command, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        """Those that the loss skips, and a conversation without a question. One that is too long is wrong."""
        folder = self.scripted(tokenizer, tmp_path / "model", "y")
        bad = [{"messages": []}, {"messages": [{"role": [], "content": "x"}]}, {"messages": 5}]
        first = {"messages": [{"role": "assistant", "content": "y"}]}
        rows = [chat_row("a", "y"), *bad, first, chat_row("b", "long " * 100), chat_row("c", "y")]
        args = ["evaluate", folder, "--data", write_rows(tmp_path / "rows.jsonl", rows), "--cache-dir", tmp_path]
        args += ["--context-length", 64, "--data.on_bad_row", "skip", "--json"]
        code, out, err = torchstone(*args)
        assert code == 0, err
        result = json.loads(out)
        assert (result["questions"], result["exact_match"], result["dropped_rows"]) == (3, 2 / 3, 4)

    def test_options_for_answers_are_refused_for_texts(
        self, torchstone: Command, llama_dir: Path, text_file: Path
    ) -> None:
        code, _, err = torchstone(
            "evaluate", llama_dir, "--data", text_file, "--extract", "a", "--cache-dir", text_file.parent
        )
        assert (code, "have no effect on text rows" in err) == (2, True)

    def test_both_right_and_wrong_examples_are_shown(
        self, torchstone: Command, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        folder = self.scripted(tokenizer, tmp_path / "model", "yes")
        rows = [chat_row(f"wrong {n}", "no") for n in range(6)] + [chat_row(f"right {n}", "yes") for n in range(3)]
        args = ["evaluate", folder, "--data", write_rows(tmp_path / "rows.jsonl", rows), "--cache-dir", tmp_path]
        _, out, _ = torchstone(*args)
        assert "  right 0  ->  yes  (right)\n" in out
        assert "  wrong 0  ->  yes  (wrong: expected 'no')\n" in out
        examples = json.loads(torchstone(*args, "--json")[1])["examples"]
        assert [e["question"].split()[0] for e in examples] == ["right"] * 3 + ["wrong"] * 4

    @pytest.mark.parametrize(("flag", "count"), [((), 200), (("--questions", 7), 7), (("--questions", "all"), 230)])
    def test_two_hundred_questions_are_the_default(
        self, torchstone: Command, tokenizer: Tokenizer, tmp_path: Path, flag: tuple[Any, ...], count: int
    ) -> None:
        folder = self.scripted(tokenizer, tmp_path / "model", "y")
        data = write_rows(tmp_path / "rows.jsonl", [chat_row(f"{n}", "y") for n in range(230)])
        code, out, err = torchstone("evaluate", folder, "--data", data, "--cache-dir", tmp_path, "--json", *flag)
        assert code == 0, err
        assert (json.loads(out)["questions"], json.loads(out)["exact_match"]) == (count, 1.0)

    def test_batched_answers_equal_single_ones(
        self, evaluate: Evaluate, llama_dir: Path, chat_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(evaluate_module, "MAX_EXAMPLES", 10)
        batched = evaluate(llama_dir, chat_file, 10)
        assert len(batched["examples"]) == 10
        monkeypatch.setattr(evaluate_module, "GENERATION_BATCH", 1)
        assert evaluate(llama_dir, chat_file, 10) == batched
        fallback = evaluate(llama_dir, chat_file, 10, overrides={"model.implementation": "fallback"})
        assert fallback["examples"] == batched["examples"]

    def test_bad_rows_can_be_skipped(self, evaluate: Evaluate, llama_dir: Path, tmp_path: Path) -> None:
        data = tmp_path / "rows.jsonl"
        good = json.dumps(chat_row("a", "b"))
        data.write_text(f'{good}\nnot json\n{{"messages": 3}}\n{good}\n')
        result = evaluate(llama_dir, data, overrides={"data.on_bad_row": "skip"})
        assert (result["questions"], result["dropped_rows"]) == (2, 2)

    def test_a_question_that_fills_the_context_is_wrong_and_does_not_end_the_evaluation(
        self, evaluate: Evaluate, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """This GPT-2 has embeddings for 64 positions."""
        folder = tmp_path / "gpt2"
        GPT2LMHeadModel(GPT2Config(vocab_size=448, n_embd=32, n_layer=1, n_head=2, n_positions=64)).save_pretrained(
            folder
        )
        tokenizer.save(folder)
        data = write_rows(tmp_path / "rows.jsonl", [chat_row("a", "b"), chat_row("z" * 80, "b")])
        for implementation in ("native", "fallback"):
            overrides = {"data.context_length": 64, "model.implementation": implementation}
            result = evaluate(folder, data, overrides=overrides)
            assert (result["questions"], result["samples"]) == (2, 1)
            assert "1 of 2 questions fill the model's context" in capsys.readouterr().err


def test_long_work_shows_its_progress(
    torchstone: Command, llama_dir: Path, chat_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_module, "PROGRESS_SECONDS", 0.0)
    args = ["evaluate", llama_dir, "--data", chat_file, "--cache-dir", tmp_path]
    code, _, err = torchstone(*args)
    assert code == 0
    assert "computing the loss: 30 of 30, " in err
    assert "answering questions: 0 of 30, 0.0/s, ETA -, token 1\n" in err
    assert "answering questions: 30 of 30, " in err


def test_an_impossible_pattern_is_found_before_the_model_is_loaded() -> None:
    with pytest.raises(UsageError, match="is not a regular expression"):
        ts.evaluate("nowhere", "nothing.jsonl", extract="[")


def test_out_of_memory_proposes_what_the_command_can_do(
    evaluate: Evaluate, llama_dir: Path, chat_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(api, "evaluate_file", fail)
    with pytest.raises(OutOfMemoryError) as caught:
        evaluate(llama_dir, chat_file)
    assert (caught.value.hint or "").startswith("use a shorter --context-length; or use a smaller model")

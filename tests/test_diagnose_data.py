"""Checks of the data: healthy data of every kind passes all of them, a planted fault fails its own and no other."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

from tiny import make_llama, write_rows
from torchstone.config.load import load_config
from torchstone.config.schema import Config
from torchstone.data import encode, loader, sources
from torchstone.data import samples as data_samples
from torchstone.data.collate import collate
from torchstone.data.encode import Encoder, TokenSequence
from torchstone.data.formats import Conversation
from torchstone.data.loader import RunData
from torchstone.data.sampler import InfiniteSampler, MixedSampler, Sampler
from torchstone.data.template import TEMPLATES, ChatTemplate, RenderedConversation
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.data.train_tokenizer import train_tokenizer
from torchstone.demo.corpus import chat_rows, corpus_rows
from torchstone.diagnosis.check import Finding
from torchstone.diagnosis.checks import CHECKS, DATA_CHECKS
from torchstone.diagnosis.order_checks import check_data_order
from torchstone.diagnosis.run_checks import run_check, run_checks
from torchstone.diagnosis.sampled_rows import sample_rows
from torchstone.diagnosis.session import Diagnosis
from torchstone.observe.console import Console
from torchstone.training.run import Run
from torchstone.training.setup import build_run

Row = dict[str, Any]
Findings = dict[str, Finding]
NUM_ROWS = 24
# End tokens of the demo's template.
END = "<|end|>"
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
GENERATION = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


REASONING = (
    "{% for m in messages %}<start>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n"
    "{{ m.reasoning_content if loop.index0 > 4 else '-' }}</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL</call>{% endfor %}<turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n<think>\n{% endif %}"
)
CHAT_TEMPLATES = {
    # The question has all of the prompt.
    "inst": "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}",
    "model": "{{ bos_token }}{% for m in messages %}<start>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<turn>\n{% endfor %}{% if add_generation_prompt %}<start>model\n{% endif %}",
    "two ends": "{% for m in messages %}<start>{{ m.role }}: {{ m.content }}<turn></s>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant:{% endif %}",
    # Reasoning of the last answer alone, and calls that are not JSON, or dropped.
    "reasoning": REASONING.replace(
        "CALL",
        "<call={{ c.function.name }}>{% for k, v in c.function.arguments | items %}<{{ k }}>{{ v }}{% endfor %}",
    ),
    "reasoning without calls": REASONING.replace("CALL", "<call>"),
}


def conversations(count: int = NUM_ROWS) -> list[Row]:
    """Two questions each, every third with a system message."""
    rows = [row["messages"] for row in chat_rows(2 * count)]
    for _, answer in rows:
        answer["content"] = f"It is {answer['content']}."
    system = {"role": "system", "content": "Be brief, please."}
    return [
        {"messages": [*([system] if number % 3 == 0 else []), *rows[2 * number], *rows[2 * number + 1]]}
        for number in range(count)
    ]


def calls_and_reasoning() -> list[Row]:
    """Two questions each: an answer with its reasoning, and a call, its result and an answer with reasoning."""
    rows = []
    for number, row in enumerate(conversations()):
        *earlier, question, answer = row["messages"]
        if number % 2:
            earlier[-1]["content"] = f"<think>\nThat one is easy: {number}.\n</think>\n\n{earlier[-1]['content']}"
        else:
            earlier[-1]["reasoning_content"] = f"That one is easy: {number}."
        arguments = {"word": question["content"], "form": 'a "short"\ttext', "most": 3}
        call = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        }
        answer |= {"reasoning_content": f"The call found {number}."}
        rows.append({"messages": [*earlier, question, call, {"role": "tool", "content": f"{number}"}, answer]})
    return rows


def token_rows(tokenizer: Tokenizer, mask: bool, count: int = NUM_ROWS) -> list[Row]:
    rows = []
    for row in conversations(count):
        ids, labels = list[int](), list[int]()
        for message in row["messages"]:
            header, text = tokenizer.encode(f"<|{message['role']}|>"), tokenizer.encode(message["content"] + END)
            ids += header + text
            is_masked = mask and message["role"] != "assistant"
            labels += [-100] * len(header) + ([-100] * len(text) if is_masked else text)
        rows.append({"input_ids": ids, "labels": labels} if mask else {"input_ids": ids})
    return rows


@pytest.fixture
def build(tmp_path: Path, settings: Callable[..., dict[str, Any]]) -> Callable[..., Run]:
    """A run on these rows, or on the rows of a path. Its token cache is its own: tests change what makes the tokens."""

    def make(rows: list[Row] | Path, **changes: Any) -> Run:
        path = write_rows(tmp_path / "rows.jsonl", rows) if isinstance(rows, list) else rows
        base = {"data__path": str(path), "data__context_length": 128, "data__cache_dir": str(tmp_path / "cache")}
        overrides = {k: v for k, v in settings(**(base | changes)).items() if v is not None}
        return build_run(load_config(None, overrides=overrides), Console("quiet"), torch.device("cpu"))

    return make


@pytest.fixture
def chatml_dir(tmp_path: Path) -> Path:
    """A tokenizer with the template chatml."""
    texts = [str(write_rows(tmp_path / "texts.jsonl", conversations()))]
    train_tokenizer(texts, 400, chat_template="chatml")[0].save_pretrained(tmp_path / "chatml")
    return tmp_path / "chatml"


def diagnose(run: Run) -> Findings:
    """What the checks find that apply."""
    findings = {result.check.name: result.finding for result in run_checks(Diagnosis(run), DATA_CHECKS)}
    assert all(finding.measured for finding in findings.values())
    return {name: finding for name, finding in findings.items() if finding.status != "skip"}


def assert_healthy(run: Run, *names: str) -> None:
    """All checks pass, and those of `names` are among them."""
    findings = diagnose(run)
    assert {name: finding for name, finding in findings.items() if finding.status != "pass"} == {}
    assert {
        "loss_tokens",
        "data_order",
        "id_range",
        "long_rows",
        *names,
    } <= findings.keys()


def assert_fault(run: Run, name: str, status: str, *causes: str, source: str = "") -> Finding:
    """One check alone finds the fault, and says what it is and where it comes from."""
    findings = diagnose(run)
    assert {name: finding.status for name, finding in findings.items() if finding.status != "pass"} == {name: status}
    finding = findings[name]
    for cause in causes:
        assert cause in str(finding.cause)
    assert source in str(finding.source)
    assert finding.source
    assert finding.next_step
    assert finding.values
    return finding


ANSWER_CHECKS = (
    "round_trip",
    "loss_mask",
    "end_of_turn",
    "stop_tokens",
    "prompt_boundary",
    "control_tokens",
    "round_trip",
)


class TestHealthyData:
    def formats(self, tokenizer: Tokenizer) -> dict[str, list[Row]]:
        chats = conversations()
        names = {"system": "system", "user": "human", "assistant": "gpt"}
        pairs = [row["messages"][-2:] for row in chats]
        return {
            "messages": chats,
            "sharegpt": [
                {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in row["messages"]]}
                for row in chats
            ],
            "alpaca": [
                {
                    "instruction": q["content"],
                    "input": f"Word {n}.",
                    "output": a["content"],
                    "system": "Be brief.",
                    "history": [["A?", "B"]],
                }
                for n, (q, a) in enumerate(pairs)
            ],
            # An eos at the end is not added again.
            "prompt": [{"prompt": q["content"] + "\n", "completion": a["content"] + "<|endoftext|>"} for q, a in pairs],
            "prompt of messages": [
                {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in chats
            ],
            "tokens": token_rows(tokenizer, mask=False),
            "tokens with labels": token_rows(tokenizer, mask=True),
            "text": list(corpus_rows(NUM_ROWS)),
            "document": [{"document": row["text"]} for row in corpus_rows(NUM_ROWS)],
        }

    def test_every_row_format_passes(self, build: Callable[..., Run], tokenizer: Tokenizer) -> None:
        for name, rows in self.formats(tokenizer).items():
            is_answer = name not in ("tokens", "tokens with labels", "text", "document")
            for packing in (True, False):
                assert_healthy(build(rows, data__packing=packing), *(ANSWER_CHECKS if is_answer else ("end_of_turn",)))
                if "tokens" in name:
                    assert_healthy(build(rows, data__packing=packing), "label_shift", "padding")

    def test_lines_csv_and_several_sources_pass(
        self, build: Callable[..., Run], tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        lines = tmp_path / "lines.txt"
        lines.write_text("\n".join(row["text"] for row in corpus_rows(NUM_ROWS)))
        assert_healthy(build(lines, data__format="lines", data__text_packing="best-fit"), "end_of_turn", "duplicates")
        table = tmp_path / "table.csv"
        table.write_text("q,a\n" + "".join(f"How many is {n}?,It is {n}.\n" for n in range(NUM_ROWS)))
        assert_healthy(build(table, data__columns="instruction=q,output=a"), *ANSWER_CHECKS)
        mixed = write_rows(tmp_path / "tokens.jsonl", token_rows(tokenizer, mask=True)[:9])
        chat = write_rows(tmp_path / "chat.jsonl", conversations()[9:])
        texts = write_rows(tmp_path / "texts.jsonl", corpus_rows(NUM_ROWS))
        run = build(texts, data__path=f"{texts},{mixed},{chat}", data__weights="2,1,1", data__validation_split=0.2)
        assert_healthy(run, "validation_leak", "pretokenized", *ANSWER_CHECKS)

    @pytest.mark.parametrize("train_on", ["last", "all", "flag", "user,assistant", "user"])
    def test_what_the_user_chose_to_train_passes(self, build: Callable[..., Run], train_on: str) -> None:
        rows = conversations()
        for number, row in enumerate(rows):
            row["messages"][-1]["weight"] = 1
            row["messages"][-2] |= {"train": number % 2 == 0} if train_on == "flag" else {}
            row["messages"][-3] |= {"weight": 0} if number % 2 else {}
            row["unmask"] = number % 5 == 0
        assert_healthy(build(rows, data__train_on=train_on), "loss_mask")

    @pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
    def test_built_in_templates_pass_with_their_tokenizer(
        self, build: Callable[..., Run], tmp_path: Path, name: str
    ) -> None:
        texts = [str(write_rows(tmp_path / "texts.jsonl", corpus_rows(200)))]
        hf, _ = train_tokenizer(texts, 500, chat_template=name)
        hf.save_pretrained(tmp_path / "tokenizer")
        run = build(conversations(), model__tokenizer=str(tmp_path / "tokenizer"))
        assert_healthy(run, "template_tokens", "generation_prompt", "double_bos", *ANSWER_CHECKS)

    @pytest.mark.parametrize("name", sorted(CHAT_TEMPLATES))
    def test_templates_of_other_styles_pass(
        self, build: Callable[..., Run], tokenizer_dir: Path, tmp_path: Path, name: str
    ) -> None:
        hf = load_tokenizer(tokenizer_dir).hf
        tokens = {"eos_token": "</s>", "bos_token": "<s>", "additional_special_tokens": ["<start>", "<turn>"]}
        hf.add_special_tokens(tokens, replace_extra_special_tokens=False)
        hf.chat_template = CHAT_TEMPLATES[name]
        hf.save_pretrained(tmp_path / "tokenizer")
        chats = conversations()
        for row in chats:
            # Templates of these styles have no system messages. A short text may be anywhere.
            row["messages"] = [message for message in row["messages"] if message["role"] != "system"]
            row["messages"][-1]["content"] = row["messages"][-1]["content"].strip("It is.")
        for train_on in ("assistant", "all", "user,assistant"):
            rows = calls_and_reasoning() if "reasoning" in name else chats
            run = build(
                rows, model__tokenizer=str(tmp_path / "tokenizer"), data__train_on=train_on, data__context_length=256
            )
            assert_healthy(run, "loss_mask")

    @pytest.mark.parametrize("train_on", ["assistant", "all", "tool,assistant"])
    def test_calls_and_reasoning_pass(self, build: Callable[..., Run], chatml_dir: Path, train_on: str) -> None:
        rows = calls_and_reasoning()
        for row in rows[::2]:
            row["messages"][-1]["weight"] = 0
        run = build(rows, model__tokenizer=str(chatml_dir), data__context_length=384, data__train_on=train_on)
        assert_healthy(run, "thinking", "loss_mask", "end_of_turn", "stop_tokens")

    def test_a_pretrained_model_passes_with_every_way_of_tuning(
        self, build: Callable[..., Run], llama_dir: Path
    ) -> None:
        for method in ("full", "lora", "osft"):
            model = {"model__path": str(llama_dir), "model__depth": None, "model__width": None, "model__heads": None}
            run = build(conversations(), tuning__method=method, **model)
            assert_healthy(run, "token_embeddings", "model_tokenizer", "unused_tokens")


OTHER = "texts are not in the tokens of their rows: '"
OTHER_SPACES = "texts have other spaces or line breaks in their rows' tokens: '"


class TestTexts:
    """What a row says is in its tokens, and nothing else."""

    @pytest.mark.parametrize(
        ("change", "status", "cause"),
        [
            (lambda texts: [text[: len(text) // 2] for text in texts], "fail", OTHER),
            (lambda texts: [text.lower() for text in texts], "fail", OTHER),
            (lambda texts: texts[::-1], "fail", OTHER),
            (lambda texts: ["Read this.", *texts[1:]], "warn", OTHER),
            (lambda texts: [" ".join(text.split()) for text in texts], "warn", OTHER_SPACES),
        ],
        ids=["half", "lower case", "other rows", "one row", "line breaks"],
    )
    @pytest.mark.parametrize("packing", [True, False])
    def test_a_text_that_is_changed_is_found(
        self, build: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, change: Any, status: str, cause: str,
        packing: bool,
    ) -> None:  # fmt: skip
        rows = [{"text": f"{row['text']}\n\n  {n}."} for n, row in enumerate(corpus_rows(NUM_ROWS))]
        encode_texts = Encoder._encode_texts
        monkeypatch.setattr(Encoder, "_encode_texts", lambda self, rows, texts: encode_texts(self, rows, change(texts)))
        assert_fault(build(rows, data__packing=packing), "round_trip", status, cause, source="data/encode.py (")

    @pytest.mark.parametrize(
        ("change", "status", "cause"),
        [
            (
                lambda messages: [m | {"content": " ".join(m["content"].split())} for m in messages],
                "warn", OTHER_SPACES,
            ),
            (lambda messages: messages[-2:], "fail", OTHER),
            (lambda messages: [{"role": "system", "content": "You are a bot."}, *messages], "fail", OTHER),
        ],
        ids=["line breaks", "last turns", "system"],
    )  # fmt: skip
    @pytest.mark.parametrize("row_format", ["messages", "sharegpt"])
    def test_messages_that_are_changed_are_found(
        self, build: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, row_format: str, change: Any, status: str,
        cause: str,
    ) -> None:  # fmt: skip
        rows = [{"messages": row["messages"][-4:]} for row in conversations()]
        for row in rows:
            row["messages"][-1]["content"] += "\n\n- Yes."
        if row_format == "sharegpt":
            rows = [{"conversations": row["messages"]} for row in rows]
        read = encode.read_conversation

        def changed(*arguments: Any) -> Conversation:
            conversation = read(*arguments)
            return replace(conversation, messages=change(conversation.messages))

        monkeypatch.setattr(encode, "read_conversation", changed)
        assert_fault(build(rows), "round_trip", status, cause, source="rows.jsonl:")

    def test_messages_with_calls_are_looked_for_one_by_one(
        self, build: Callable[..., Run], chatml_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read = encode.read_conversation

        def without_first(*arguments: Any) -> Conversation:
            conversation = read(*arguments)
            return replace(conversation, messages=conversation.messages[-4:])

        monkeypatch.setattr(encode, "read_conversation", without_first)
        run = build(calls_and_reasoning(), model__tokenizer=str(chatml_dir), data__context_length=384)
        assert_fault(run, "round_trip", "fail", OTHER)

    @pytest.mark.parametrize("kind", ["bert", "nfkc"])
    def test_rows_of_tokenizers_that_normalize_texts_have_their_text(
        self, build: Callable[..., Run], tmp_path: Path, kind: str
    ) -> None:
        texts = [f"{row['text']} Déjà vu: ﬁn Ⅳ, {n}." for n, row in enumerate(corpus_rows(NUM_ROWS))]
        bert = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
        bert.normalizer = tokenizers.normalizers.BertNormalizer() if kind == "bert" else tokenizers.normalizers.NFKC()
        bert.pre_tokenizer, bert.decoder = tokenizers.pre_tokenizers.BertPreTokenizer(), tokenizers.decoders.WordPiece()
        special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]"]
        bert.train_from_iterator(texts, tokenizers.trainers.WordPieceTrainer(vocab_size=600, special_tokens=special))
        bert.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        hf = PreTrainedTokenizerFast(
            tokenizer_object=bert, unk_token="[UNK]", pad_token="[PAD]", bos_token="[CLS]", eos_token="[SEP]",
            chat_template=TEMPLATE.replace(END, "[SEP]") + GENERATION,
        )  # fmt: skip
        hf.save_pretrained(tmp_path / "bert")
        for rows in ([{"text": text} for text in texts], conversations()):
            finding = diagnose(build(rows, model__tokenizer=str(tmp_path / "bert")))["round_trip"]
            # What the tokenizer does to spaces and accents is another finding.
            assert "their rows" not in finding.measured


def patch_collate(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, int], Any]) -> None:
    """`change` gets each micro-batch and the pad id."""
    monkeypatch.setattr(loader, "collate", lambda rows, pad_id, shapes: change(collate(rows, pad_id, shapes), pad_id))


class TestBatches:
    def test_labels_that_are_shifted_in_the_file_are_named_with_their_line(
        self, build: Callable[..., Run], tokenizer: Tokenizer
    ) -> None:
        rows = token_rows(tokenizer, mask=False)
        for row in rows[5:]:
            row["labels"] = [*row["input_ids"][1:], -100]
        finding = assert_fault(build(rows), "label_shift", "fail", "t+2 instead of t+1 in 19 of 24 rows")
        assert "labels of " in str(finding.source)
        assert int(str(finding.source).rpartition(":")[2]) > 5

    def test_a_mask_that_is_not_minus_100_is_named(self, build: Callable[..., Run], tokenizer: Tokenizer) -> None:
        rows = token_rows(tokenizer, mask=True)
        for row in rows:
            row["labels"] = [1 if label == -100 else label for label in row["labels"]]
        assert_fault(
            build(rows), "label_shift", "fail", "<|pad|> (id 1); to mask a token, use -100", source="labels of "
        )

    def test_own_labels_are_no_fault(self, build: Callable[..., Run], tokenizer: Tokenizer) -> None:
        rows = token_rows(tokenizer, mask=True)
        rng = np.random.default_rng(0)
        for row in rows:
            row["labels"] = [i if i == -100 or rng.random() < 0.5 else int(rng.integers(6, 400)) for i in row["labels"]]
        finding = diagnose(build(rows))["label_shift"]
        assert finding.status == "pass"
        assert finding.values["others"] > 50

    def test_labels_across_documents_are_found(
        self, build: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = build(list(corpus_rows(NUM_ROWS)))

        def crossing(batch: Any, _: int) -> Any:
            following = torch.roll(batch.ids, -1, dims=1)
            is_followed = torch.roll(batch.doc_ids, -1, dims=1) != -1
            is_followed[:, -1] = False
            return batch._replace(labels=torch.where(is_followed, following, -100))

        patch_collate(monkeypatch, crossing)
        assert_healthy(run)
        batch = run_check(Diagnosis(run), next(check for check in CHECKS if check.name == "batch"))
        assert batch.status == "fail"
        assert "documents have other labels than their rows" in str(batch.cause)

    def test_padding_in_rows_is_found(self, build: Callable[..., Run], tokenizer: Tokenizer) -> None:
        rows = token_rows(tokenizer, mask=False)
        for row in rows:
            row["input_ids"] += [tokenizer.pad_id] * (80 - len(row["input_ids"]))
        assert_fault(build(rows), "padding", "fail", "learns to write padding", source="rows.jsonl:1")

    def test_an_all_zero_mask_is_found(self, build: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
        run = build(conversations())
        patch_collate(monkeypatch, lambda batch, _: batch._replace(labels=torch.full_like(batch.labels, -100)))
        assert_fault(
            run, "loss_tokens", "fail", "all labels of the next step (24 samples) are -100", source="rows.jsonl:"
        )

    @pytest.mark.parametrize(("masked", "status"), [(4, "warn"), (20, "fail")])
    def test_rows_without_a_label_are_found(
        self, build: Callable[..., Run], tokenizer: Tokenizer, masked: int, status: str
    ) -> None:
        rows = token_rows(tokenizer, mask=True)
        for row in rows[3 : 3 + masked]:
            row["labels"] = [-100] * len(row["labels"])
        run = build(rows, training__global_batch_size=24)
        assert_fault(run, "loss_tokens", status, "nothing is learned from them", source="rows.jsonl:4")


def part_from_start(samples: data_samples.StreamSamples, sequence: TokenSequence) -> TokenSequence:
    """As if the offset in the document were forgotten."""
    documents = (samples.cache.sequence(number) for number in range(len(samples.cache)))
    whole = next(each for each in documents if sequence.ids.tobytes() in each.ids.tobytes())
    return whole.part(0, len(sequence.ids))


def join(sequences: Sequence[TokenSequence]) -> TokenSequence:
    return TokenSequence(*(np.concatenate([getattr(each, name) for each in sequences]) for name in ("ids", "labels")))


class TestOrder:
    @pytest.mark.parametrize(
        ("change", "cause"),
        [
            (lambda self, at, size: self.at(at % size), "every epoch has the same order"),
            (
                lambda self, at, size: np.random.default_rng(0).integers(0, size, 9999)[at],
                "an epoch draws samples again: only ",
            ),
            (lambda self, at, size: self.at(at) // 2, "12 of 24 samples are never drawn"),
            (lambda self, at, size: self.at(at) + (at > 20), "sample 24 is drawn, but there are 24"),
        ],
        ids=["same order", "replacement", "half", "outside"],
    )
    def test_an_epoch_that_is_no_new_permutation_is_found(
        self, build: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, change: Any, cause: str
    ) -> None:
        run, sampler = build(conversations()), RunData.sampler

        def changed(data: RunData, *arguments: Any) -> Sampler:
            original = sampler(data, *arguments)
            wrong = InfiniteSampler(original.size, consumed_samples=original.consumed_samples)
            monkeypatch.setattr(wrong, "at", lambda at: change(original, at, original.size))
            return wrong

        monkeypatch.setattr(RunData, "sampler", changed)
        finding = check_data_order(Diagnosis(run))
        assert finding.status == "fail"
        assert cause in str(finding.cause)

    @pytest.mark.parametrize(("offset", "cause"), [(8, "leaves out 8 samples"), (-1, "repeats 1 samples")])
    @pytest.mark.parametrize("size", [300, 1_000_000])
    def test_a_resumed_run_that_goes_on_elsewhere_is_found(
        self, build: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, offset: int, cause: str, size: int
    ) -> None:
        run = build(conversations())

        def sampler(data: RunData, config: Config, consumed: int = 0) -> Sampler:
            return InfiniteSampler(size, consumed_samples=consumed + offset * (consumed > 0))

        monkeypatch.setattr(RunData, "sampler", sampler)
        monkeypatch.setattr(run.data, "train", range(size))
        finding = check_data_order(Diagnosis(run))
        assert finding.status == "fail"
        assert cause in str(finding.cause)

    def test_weights_that_are_not_used_are_found(
        self, build: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        paths = [write_rows(tmp_path / f"{n}.jsonl", conversations(2 * NUM_ROWS)[n::2]) for n in range(2)]
        run = build(paths[0], data__path=",".join(map(str, paths)), data__weights="3,1")
        assert_healthy(run, "data_order")
        monkeypatch.setattr(
            RunData,
            "sampler",
            lambda data, config, consumed=0: MixedSampler([24, 24], [1, 1], consumed_samples=consumed),
        )
        assert_fault(run, "data_order", "fail", "source 1 has 50.0% of the samples, but its share", "is 75.0%")

    @pytest.mark.parametrize(
        ("name", "packing", "change"),
        [
            ("StreamSamples", "stream", lambda self, first, *others: [part_from_start(self, first), *others]),
            ("StreamSamples", "stream", lambda self, *sequences: sequences[1:] or sequences),
            ("StreamSamples", "stream", lambda self, *sequences: [join(sequences)]),
            ("BestFitSamples", "best-fit", lambda self, *sequences: [*sequences[:-1], sequences[-1].part(0, 9)]),
            ("BestFitSamples", "best-fit", lambda self, *sequences: [sequences[0]] * len(sequences)),
            ("BestFitSamples", "best-fit", lambda self, *sequences: [join(sequences)]),
        ],
        ids=["offset", "first lost", "joined", "cut", "repeated", "best-fit joined"],
    )
    def test_samples_that_are_not_their_documents_are_found(
        self, build: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, packing: str,
        change: Any,
    ) -> None:  # fmt: skip
        chat, texts = (write_rows(tmp_path / f"{n}.jsonl", rows) for n, rows in
                       enumerate((conversations(), corpus_rows(60))))  # fmt: skip
        run = build(chat, data__path=f"{chat},{texts}", data__text_packing=packing, data__validation_split=0.2)
        assert_healthy(run, "data_order")
        samples = getattr(data_samples, name)
        get = samples.get
        monkeypatch.setattr(samples, "get", lambda self, index: list(change(self, *get(self, index))))
        finding = check_data_order(Diagnosis(run))
        assert finding.status == "fail"
        assert "1.jsonl does not have the tokens of its documents" in str(finding.cause)

    @pytest.mark.parametrize("packing", ["stream", "best-fit"])
    @pytest.mark.parametrize(
        ("change", "cause"), [(lambda n: n[:-3], "3 documents of "), (lambda n: [*n, 5, 5], "2 d")]
    )
    def test_documents_that_are_lost_or_repeated_are_found(
        self, build: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, packing: str, change: Any, cause: str
    ) -> None:
        make = loader._make_samples
        monkeypatch.setattr(
            loader, "_make_samples", lambda data, cache, indices: make(data, cache, np.array(change(indices)))
        )
        finding = check_data_order(Diagnosis(build(list(corpus_rows(NUM_ROWS)), data__text_packing=packing)))
        assert finding.status == "fail"
        assert cause in str(finding.cause)

    def test_data_that_are_not_shuffled_pass(self, build: Callable[..., Run]) -> None:
        assert_healthy(build(conversations(), data__shuffle=False), "data_order")


class TestMasks:
    def test_an_inverted_mask_is_named(self, build: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
        mask = Encoder._loss_mask
        monkeypatch.setattr(Encoder, "_loss_mask", lambda *arguments: ~mask(*arguments))
        run = build(conversations())
        assert_fault(run, "loss_mask", "fail", "the mask is inverted", source="rows.jsonl:1 (data.train_on assistant)")

    @pytest.mark.parametrize(
        ("change", "cause"),
        [
            (lambda spans, text: [(0, spans[-1][1])], "100% of the texts that should be masked are trained"),
            (lambda spans, text: [(0, text.index("<|user|>")), *spans], "those of system"),
            (lambda spans, text: spans[-1:], "leaves out a part of 50%"),
            (lambda spans, text: [(start + 1, end) for start, end in spans], "the mask begins one token late"),
        ],
        ids=["all", "system", "last", "without the first letter"],
    )  # fmt: skip
    def test_a_mask_at_the_wrong_place_is_named(
        self, build: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, change: Any, cause: str
    ) -> None:
        render = ChatTemplate.render_conversation

        def rendered(*arguments: Any) -> RenderedConversation:
            right = render(*arguments)
            spans = [span for span in change(right.train_spans, right.text) if span[0] < span[1]]
            return replace(right, train_spans=spans)

        monkeypatch.setattr(ChatTemplate, "render_conversation", rendered)
        system = {"role": "system", "content": "Be brief, please."}
        rows = [{"messages": [system, *row["messages"][-4:]]} for row in conversations()]
        assert_fault(build(rows), "loss_mask", "fail", cause)

    def test_a_masked_end_of_turn_is_found(self, build: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
        span = ChatTemplate._span

        def without_end(*arguments: Any) -> tuple[int, int]:
            start, end = span(*arguments)
            return start, end - len(END)

        monkeypatch.setattr(ChatTemplate, "_span", without_end)
        assert_fault(build(conversations()), "end_of_turn", "fail", "<|end|> (id 2) ends 24 rows, but is masked")

    @pytest.mark.parametrize(
        ("change", "check", "cause"),
        [
            (
                lambda span, text, _: (text.rindex("<|im_start|>", 0, span[0]), span[1]),
                "loss_mask", "the mask trains on what the chat template writes before an answer, such as '<|im_start|>",
            ),
            (
                lambda span, text, is_last: (span[0], span[1] if is_last else text.rindex("<|im_end|>", 0, span[1])),
                "end_of_turn", "<|im_end|> (id 4) is masked (label -100) after all answers but the last one",
            ),
            (
                lambda span, text, _: (max(span[0], text.find("</think>", *span)), span[1]),
                "loss_mask", "67% of the texts of assistant, or all of them, such as 'That one is easy: 0.' (reason",
            ),
            (
                lambda span, text, _: (span[0], text.find('"arguments"', *span) % span[1]),
                "loss_mask", "leaves out a part of 33% of the texts of assistant, or all of them, such as 'word' (call",
            ),
        ],
        ids=["header", "end of earlier answers", "reasoning", "arguments"],
    )  # fmt: skip
    def test_a_part_of_an_answer_that_is_left_out_is_named(
        self, build: Callable[..., Run], chatml_dir: Path, monkeypatch: pytest.MonkeyPatch, change: Any, check: str,
        cause: str,
    ) -> None:  # fmt: skip
        span = ChatTemplate._span

        def changed(self: ChatTemplate, messages: Any, index: int, tools: Any, text: str) -> tuple[int, int]:
            return change(span(self, messages, index, tools, text), text, index + 1 == len(messages))

        monkeypatch.setattr(ChatTemplate, "_span", changed)
        run = build(calls_and_reasoning(), model__tokenizer=str(chatml_dir), data__context_length=384)
        assert_fault(run, check, "fail", cause)

    @pytest.mark.parametrize(("shift", "words"), [(1, "late"), (-1, "early")])
    def test_a_mask_that_is_shifted_by_a_token_is_named(
        self, build: Callable[..., Run], chatml_dir: Path, monkeypatch: pytest.MonkeyPatch, shift: int, words: str
    ) -> None:
        mask = Encoder._loss_mask
        monkeypatch.setattr(Encoder, "_loss_mask", lambda *arguments: np.roll(mask(*arguments), shift))
        cause = f"the mask begins and ends one token {words}"
        assert_fault(build(conversations()), "loss_mask", "fail", cause)
        # After the end token of this template, a line break may be trained or not.
        run = build(conversations(), model__tokenizer=str(chatml_dir), data__context_length=256)
        assert_fault(run, "loss_mask", "fail", cause if shift > 0 else "the mask begins one token early")
        prompts = [{"prompt": f"{q['content']}\n", "completion": a["content"]} for *_, q, a in
                   (row["messages"] for row in conversations())]  # fmt: skip
        assert_fault(build(prompts), "loss_mask", "fail", "the mask begins one token late" if shift > 0 else cause)

    @pytest.mark.parametrize(
        "template",
        [
            # The end token is a part of the message after it.
            "{% for m in messages %}{{ '' if loop.first else '<|end|>' }}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<|end|><|assistant|>{% endif %}",
            TEMPLATE.replace(END, "\n\n") + GENERATION,
        ],
        ids=["late", "none"],
    )
    def test_a_template_without_an_end_token_is_found(
        self, build: Callable[..., Run], tmp_path: Path, template: str
    ) -> None:
        (tmp_path / "t.jinja").write_text(template)
        run = build(conversations(), data__chat_template=str(tmp_path / "t.jinja"))
        assert_fault(run, "end_of_turn", "fail", "no end token follows the answers", source="data.chat_template")

    @pytest.mark.parametrize("after", ["", "\n"])
    @pytest.mark.parametrize(("pad", "status"), [(END, "fail"), ("<|pad|>", "warn")])
    def test_an_end_token_that_is_masked_as_padding_is_found(
        self, build: Callable[..., Run], tokenizer_dir: Path, tmp_path: Path, pad: str, status: str, after: str
    ) -> None:
        tokenizer = load_tokenizer(tokenizer_dir)
        tokenizer.hf.pad_token = pad
        tokenizer.save(tmp_path / "tokenizer")
        rows = token_rows(tokenizer, mask=True)
        for row in rows:
            row["labels"] = [-100 if label == 2 else label for label in row["labels"]] + tokenizer.encode(after)
            row["input_ids"] += tokenizer.encode(after)
        run = build(rows, model__tokenizer=str(tmp_path / "tokenizer"))
        finding = assert_fault(run, "end_of_turn", status, "<|end|> (id 2) ends 24 rows, but is masked")
        assert ("also the pad token" in str(finding.cause)) == (pad == END)

    def test_an_end_token_at_which_generation_does_not_stop_is_found(
        self, build: Callable[..., Run], tokenizer_dir: Path, tmp_path: Path
    ) -> None:
        """An added token that is not special, as from add_tokens()."""
        hf = load_tokenizer(tokenizer_dir).hf
        hf.add_tokens(["<end>"])
        hf.chat_template = TEMPLATE.replace(END, "<end>") + GENERATION
        hf.save_pretrained(tmp_path / "tokenizer")
        run = build(conversations(), model__tokenizer=str(tmp_path / "tokenizer"))
        finding = assert_fault(run, "stop_tokens", "fail", "does not stop at <end> (id 446)", "an ordinary token")
        assert "generation stops at <|endoftext|> (id 0)" in finding.measured

    def test_an_end_token_that_has_no_name_is_no_ordinary_token(
        self, build: Callable[..., Run], tokenizer_dir: Path, tmp_path: Path
    ) -> None:
        load_tokenizer(tokenizer_dir).save(tmp_path / "tokenizer")
        file = tmp_path / "tokenizer" / "tokenizer_config.json"
        names = {"additional_special_tokens", "extra_special_tokens"}
        file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k not in names}))
        run = build(conversations(), model__tokenizer=str(tmp_path / "tokenizer"))
        finding = assert_fault(run, "stop_tokens", "fail", "special token, but tokenizer_config.json does not name it")
        assert "additional_special_tokens" in str(finding.next_step)
        file.write_text(json.dumps(json.loads(file.read_text()) | {"additional_special_tokens": [END]}))
        assert_healthy(build(conversations(), model__tokenizer=str(tmp_path / "tokenizer")), "stop_tokens")

    def test_empty_reasoning_is_found(self, build: Callable[..., Run], tmp_path: Path) -> None:
        think = "{{ '<think>\n\n</think>\n' if m.role == 'assistant' }}{{ m.content }}"
        (tmp_path / "t.jinja").write_text(TEMPLATE.replace("{{ m.content }}", think) + GENERATION)
        run = build(conversations(), data__chat_template=str(tmp_path / "t.jinja"))
        assert_fault(run, "thinking", "warn", "the chat template writes an empty block", source="rows.jsonl:1")

    @pytest.mark.parametrize(("how", "status"), [("truncate", "fail"), ("split", "warn")])
    def test_cut_answers_are_found(self, build: Callable[..., Run], how: str, status: str) -> None:
        run = build(conversations(), data__on_long_row=how, data__context_length=24)
        findings = diagnose(run)
        assert findings["long_rows"].status == status
        assert "a cut answer has no end" in str(findings["long_rows"].cause)
        assert f"data.on_long_row {how}, such as" in str(findings["long_rows"].source)


class TestTokenizers:
    def bos_tokenizer(self, tokenizer_dir: Path, folder: Path, copies: int, template: str = "") -> str:
        from tokenizers import processors

        hf = load_tokenizer(tokenizer_dir).hf
        hf.add_special_tokens({"bos_token": "<bos>"})
        number = hf.bos_token_id
        hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{'<bos> ' * copies}$A", special_tokens=[("<bos>", number)]
        )
        hf.chat_template = f"{template}{TEMPLATE}{GENERATION}"
        hf.save_pretrained(folder)
        return str(folder)

    def test_a_double_bos_is_found_and_its_writer_named(
        self, build: Callable[..., Run], tokenizer_dir: Path, tmp_path: Path
    ) -> None:
        one = self.bos_tokenizer(tokenizer_dir, tmp_path / "one", 1, "{{ bos_token }}")
        two = self.bos_tokenizer(tokenizer_dir, tmp_path / "two", 2, "{{ bos_token * 2 }}")
        texts, chats = list(corpus_rows(NUM_ROWS)), conversations()
        begun = [{"text": f"<bos>{row['text']}"} for row in texts]
        ids = [{"input_ids": [446, 446, *row["input_ids"]]} for row in token_rows(load_tokenizer(tokenizer_dir), False)]
        assert_healthy(build(texts, model__tokenizer=one), "double_bos")
        assert_healthy(build(chats, model__tokenizer=one), "double_bos")
        assert_fault(build(texts, model__tokenizer=two), "double_bos", "fail", "<bos> (id 446)", "by the tokenizer")
        assert_fault(build(chats, model__tokenizer=two), "double_bos", "fail", "by the chat template")
        assert_fault(build(begun, model__tokenizer=one), "double_bos", "fail", "the tokenizer", "and the text")
        assert_fault(build(ids, model__tokenizer=one), "double_bos", "fail", "by input_ids", source="rows.jsonl:1")

    def test_template_tokens_that_are_text_are_found(self, build: Callable[..., Run]) -> None:
        run = build(conversations(), data__chat_template="chatml", data__context_length=256)
        assert_fault(run, "template_tokens", "fail", "<|im_start|>, <|im_end|> is written as text")

    def test_a_template_without_a_generation_prompt_is_found(self, build: Callable[..., Run], tmp_path: Path) -> None:
        (tmp_path / "t.jinja").write_text("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}")
        run = build(conversations(), data__chat_template=str(tmp_path / "t.jinja"))
        assert_fault(run, "generation_prompt", "fail", "'<|assistant|>' is trained with every answer")

    def test_ids_without_an_embedding_are_found(self, build: Callable[..., Run]) -> None:
        run = build(list(corpus_rows(NUM_ROWS)))
        run.model.module.config = replace(run.model.module.config, vocab_size=300)
        assert_fault(run, "id_range", "fail", "id 445 has no embedding", source="data.path")

    def test_ids_of_another_tokenizer_are_found(
        self, build: Callable[..., Run], tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        texts = [str(write_rows(tmp_path / "t.jsonl", corpus_rows(200)))]
        train_tokenizer(texts, 500, pattern="gpt2")[0].save_pretrained(tmp_path / "other")
        run = build(token_rows(tokenizer, mask=False), model__tokenizer=str(tmp_path / "other"))
        assert_fault(run, "pretokenized", "warn", "the tokenizer of another model", source="input_ids of ")

    def test_the_tokenizer_of_another_model_is_found(
        self, build: Callable[..., Run], llama_dir: Path, tmp_path: Path
    ) -> None:
        texts = [str(write_rows(tmp_path / "t.jsonl", corpus_rows(200)))]
        train_tokenizer(texts, 440)[0].save_pretrained(tmp_path / "other")
        model = {"model__path": str(llama_dir), "model__depth": None, "model__width": None, "model__heads": None}
        run = build(list(corpus_rows(NUM_ROWS)), model__tokenizer=str(tmp_path / "other"), **model)
        assert_fault(run, "model_tokenizer", "fail", "the tokenizer of another model", source="model.tokenizer")

    @pytest.mark.parametrize(
        ("normalizer", "status", "cause"),
        [
            ({"type": "Replace", "pattern": {"Regex": "[aeiou]"}, "content": ""}, "fail", "texts lose characters: '"),
            ({"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": " "}, "warn", "texts change spaces: '"),
            ({"type": "Lowercase"}, "pass", ""),
            ({"type": "NFKC"}, "pass", ""),
        ],
        ids=["vowels", "line breaks", "case", "NFKC"],
    )
    def test_a_tokenizer_that_changes_texts_is_found(
        self, build: Callable[..., Run], tokenizer_dir: Path, tmp_path: Path, normalizer: Row, status: str, cause: str
    ) -> None:
        load_tokenizer(tokenizer_dir).save(tmp_path / "tokenizer")
        file = tmp_path / "tokenizer" / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": normalizer}))
        rows = [{"text": row["text"].replace(". ", ".\n\n    ") + "ﬁ"} for row in corpus_rows(NUM_ROWS)]
        run = build(rows, model__tokenizer=str(tmp_path / "tokenizer"))
        if status == "pass":
            assert_healthy(run, "round_trip")
        else:
            assert_fault(run, "round_trip", status, cause, source="model.tokenizer")

    def test_tokens_that_were_added_and_never_occur_are_found(
        self, build: Callable[..., Run], llama_dir: Path, tokenizer_dir: Path, tmp_path: Path
    ) -> None:
        hf = load_tokenizer(tokenizer_dir).hf
        hf.add_special_tokens({"additional_special_tokens": [f"<new{n}>" for n in range(4)]}, False)
        hf.save_pretrained(tmp_path / "tokenizer")
        rows = [{"text": f"<new0><new1><new3>{row['text']}"} for row in corpus_rows(NUM_ROWS)]
        model = {"model__path": str(llama_dir), "model__depth": None, "model__width": None, "model__heads": None}
        run = build(rows, model__tokenizer=str(tmp_path / "tokenizer"), **model)
        finding = assert_fault(run, "unused_tokens", "warn", "<new2> never occurs")
        # The embedding had 448 rows.
        assert finding.values["added"] == 2

    def test_special_tokens_without_an_embedding_are_found(
        self, build: Callable[..., Run], tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        from safetensors.torch import load_file, save_file

        file = make_llama(tmp_path / "model", tokenizer) / "model.safetensors"
        tensors = load_file(file)
        tensors["model.embed_tokens.weight"][[2, 5]] = 0.25
        save_file(tensors, file, metadata={"format": "pt"})
        model = {"model__path": str(file.parent), "model__depth": None, "model__width": None, "model__heads": None}
        model["model__tokenizer"] = None
        run = build(conversations(), tuning__method="lora", **model)
        finding = assert_fault(
            run, "token_embeddings", "fail", "<|end|> (id 2), <|assistant|> (id 5)", "does not train"
        )
        assert "--tuning.modules_to_save embed_tokens,lm_head" in str(finding.next_step)
        assert_healthy(build(conversations(), **model), "token_embeddings")


class TestRows:
    def test_copies_are_found(self, build: Callable[..., Run]) -> None:
        rows = conversations()
        assert_fault(build(rows[:1] * NUM_ROWS), "duplicates", "fail", "all rows are the same")
        some = [*rows, *rows[:6]]
        assert_fault(build(some), "duplicates", "warn", "learned by heart", source="rows.jsonl:25 is ")

    def test_pieces_of_one_row_are_no_copies_of_it(self, build: Callable[..., Run]) -> None:
        text = {"text": "The same words come again and again. " * 400}
        run = build([text], data__packing=False, data__context_length=111)
        assert len(run.data.train) > 40
        assert diagnose(run)["duplicates"].values["distinct"] < 30
        assert_healthy(run, "duplicates")

    def test_roles_that_are_swapped_are_found(self, build: Callable[..., Run]) -> None:
        swapped = {"user": "assistant", "assistant": "user"}
        rows = conversations()
        for row in rows:
            row["messages"] = [m | {"role": swapped.get(m["role"], m["role"])} for m in row["messages"]]
        finding = diagnose(build(rows))["roles"]
        assert (finding.status, finding.values["begin"]) == ("fail", finding.values["rows"])
        assert "user and assistant are swapped" in str(finding.cause)

    @pytest.mark.parametrize(("leaked", "status"), [(1, "warn"), (12, "fail")])
    def test_validation_rows_in_the_training_data_are_found(
        self, build: Callable[..., Run], tmp_path: Path, leaked: int, status: str
    ) -> None:
        rows = conversations(48)
        path = write_rows(tmp_path / "validation.jsonl", [*rows[:24], *rows[30 : 30 + leaked]])
        run = build(rows[24:], data__validation_path=str(path))
        finding = assert_fault(run, "validation_leak", status, "learned by heart", source="validation.jsonl:25 is ")
        assert finding.values["leaked"] == leaked

    def test_rows_that_are_left_out_are_found(self, build: Callable[..., Run]) -> None:
        rows = conversations()
        long = [
            {"messages": [*row["messages"][:-1], {"role": "assistant", "content": "A" * 300}]} for row in rows[4:18]
        ]
        run = build([*long, *rows[18:]])
        assert_fault(run, "long_rows", "fail", "of one kind", source="data.on_long_row")

    @pytest.mark.parametrize("row_format", ["messages", "lines"])
    def test_rows_that_are_lost_are_found(
        self, build: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, row_format: str
    ) -> None:
        path = tmp_path / "lines.txt"
        path.write_text("\ufeff\n" + "\n\n".join(row["text"] for row in corpus_rows(NUM_ROWS)))
        rows = [*conversations(), {"messages": []}] if row_format == "messages" else path
        changes = {"data__on_bad_row": "skip", "data__max_samples": 20, "data__format": row_format}
        finding = diagnose(build(rows, **changes))["bad_rows"]
        assert (finding.status, finding.values["rows"]) == ("pass", 20)
        parse = sources._parse_rows
        monkeypatch.setattr(sources, "_parse_rows", lambda *arguments: islice(parse(*arguments), 12))
        lines = len(conversations()) + (row_format == "messages")
        run = build(rows, **changes | {"data__max_samples": None})
        assert_fault(run, "bad_rows", "fail", f"of {lines} lines 12 are used, or counted as bad or left out")

    def test_bad_rows_are_found(self, build: Callable[..., Run]) -> None:
        rows = conversations()
        for row in rows[2:6]:
            row["messages"][-1]["content"] = ""
        run = build(rows, data__on_bad_row="skip")
        assert_fault(run, "bad_rows", "warn", "of one kind: ", "rows.jsonl:3: ", source="data.on_bad_row skip")

    def test_control_tokens_in_messages_are_found_and_the_command_shows_the_row(
        self, build: Callable[..., Run], torchstone: Callable[..., tuple[int, str, str]]
    ) -> None:
        rows = conversations()
        rows[6]["messages"][-1]["content"] += END
        finding = assert_fault(build(rows), "control_tokens", "warn", "<|end|> in a message", source="rows.jsonl:7")
        command = shlex.split(str(finding.next_step).partition("; ")[2])
        code, shown, _ = torchstone(*command[1:], "--json")
        assert code == 0
        assert command[0] == "torchstone"
        assert json.loads(shown)["sources"][0]["examples"][-1]["origin"] == finding.source

    def test_a_template_that_is_applied_twice_is_found(self, build: Callable[..., Run], tokenizer: Tokenizer) -> None:
        rows = [
            {"prompt": [{"role": "user", "content": tokenizer.template.render_prompt(row["messages"][:-1])}],
             "completion": row["messages"][-1:]}
            for row in conversations()
        ]  # fmt: skip
        chats = [{"messages": row["prompt"] + row["completion"]} for row in rows]
        assert_fault(build(chats), "control_tokens", "fail", "is applied again", source="rows.jsonl:1")

    def test_control_tokens_in_all_messages_are_no_template(self, build: Callable[..., Run]) -> None:
        """As <s> in text about HTML."""
        rows = conversations()
        for row in rows:
            row["messages"][-1]["content"] += f" Write {END}."
        assert_fault(build(rows), "control_tokens", "warn", "<|end|> in a message becomes a token")

    def test_text_of_a_wrong_decoding_is_found(self, build: Callable[..., Run]) -> None:
        texts = [f"{row['text']} Très bien, à bientôt." for row in corpus_rows(NUM_ROWS)]
        assert_healthy(build([{"text": text} for text in texts]), "garbled_text")
        latin = [{"text": text.encode().decode("latin-1")} for text in texts]
        assert_fault(build(latin), "garbled_text", "fail", "wrong encoding", "TrÃ¨s", source="rows.jsonl:1")
        replaced = [{"text": text.encode("latin-1").decode("utf-8", "replace")} for text in texts[:3]]
        assert_fault(build([*replaced, *({"text": text} for text in texts[3:])]), "garbled_text", "warn", "\ufffd")

    def test_text_that_was_escaped_twice_is_found(self, build: Callable[..., Run]) -> None:
        rows = conversations()
        for row in rows:
            row["messages"][-1]["content"] = "One.\nTwo.\n- Three.\n" + row["messages"][-1]["content"]
        assert_healthy(build(rows), "garbled_text")
        for row in rows:
            row["messages"][-1]["content"] = row["messages"][-1]["content"].replace("\n", "\\n")
        assert_fault(build(rows), "garbled_text", "warn", "escaped twice", source="rows.jsonl:1")


def test_rows_are_sampled_from_all_files_and_each_has_its_own_tokens(
    build: Callable[..., Run], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    rows = conversations(600)
    for number in range(3):
        write_rows(folder / f"{number}.jsonl", rows[200 * number : 200 * (number + 1)])
    run = build(folder, data__validation_split=0.3)
    sampled = sample_rows(run, ("messages",))
    assert [sum(row.row.path.name == f"{n}.jsonl" for row in sampled) for n in range(3)] == [22, 22, 22]
    assert max(row.row.line for row in sampled) > 150
    for row in sampled:
        text = tokenizer.template.render_text(row.row.value["messages"])
        assert row.documents[0].ids.tolist() == tokenizer.encode(text)
    held_out = {run.data.validation[""].origin(n) for n in range(len(run.data.validation[""]))}
    assert held_out.isdisjoint(row.origin for row in sampled)


@pytest.mark.parametrize(
    ("fault", "cause"), [("inverted", "in 24 rows tokens before"), ("shifted", "may be inverted or")]
)
def test_masks_of_pretokenized_rows_that_leave_out_the_answers(
    fault: str, cause: str, build: Callable[..., Run], tokenizer: Tokenizer
) -> None:
    """Labels of one's own are no fault, so it is a warning. Nothing else can see it."""
    rows = token_rows(tokenizer, mask=True)
    for row in rows:
        ids, labels = row["input_ids"], row["labels"]
        if fault == "inverted":
            row["labels"] = [-100 if label >= 0 else each for each, label in zip(ids, labels, strict=True)]
        else:
            # The first token of each answer is masked.
            begins = [0, *(i for i in range(1, len(ids)) if labels[i] >= 0 and labels[i - 1] < 0)]
            row["labels"] = [-100 if i in begins else label for i, label in enumerate(labels)]
    finding = DATA_CHECKS[[check.name for check in DATA_CHECKS].index("pretokenized_mask")].function(
        Diagnosis(build(rows))
    )
    assert (finding.status, finding.values["masked"]) == ("warn", 24)
    assert cause in str(finding.cause)
    assert "rows.jsonl:" in str(finding.source)
    assert "inspect-data" in str(finding.next_step)

"""Checks of the tokenizer: is it the model's, does it keep texts, and has every token an embedding of its own?"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from operator import contains, eq
from pathlib import Path
from typing import TYPE_CHECKING
from unicodedata import normalize

import numpy as np
import tokenizers
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchstone.checkpoint.load import is_model_folder, resolve_model_folder, tokenizer_files
from torchstone.checkpoint.transformers_folder import read_hf_config
from torchstone.data.formats import CHAT_FORMATS, ROW_FORMATS, TEXT_FORMATS, RowFormat
from torchstone.diagnosis.check import Finding, SkipCheck
from torchstone.diagnosis.expected_mask import remove_spaces
from torchstone.diagnosis.mask_checks import ANSWER_FORMATS, generation_prompt, template_name
from torchstone.diagnosis.sampled_rows import (
    MAX_TOKENS,
    MAX_WRONG,
    SampledRow,
    decode,
    inspect_command,
    is_cut,
    look_for_change,
    name_token,
    sample_rows,
    sample_sequences,
    train_parts,
)
from torchstone.diagnosis.turns import CALL_KEYS, REASONING_KEYS, read_messages
from torchstone.errors import TorchstoneError
from torchstone.models.model import NativeModel
from torchstone.training.run import Run

if TYPE_CHECKING:
    from torchstone.diagnosis.session import Diagnosis

# A long text is compared in some pieces of this many characters.
PIECE, MAX_PIECES = 4000, 8
# The texts of rows are compared with their tokens until there are so many characters: a second.
MAX_CHARACTERS = 1 << 20
# Of a row of ids: those that do not come back when its text is tokenized again. Some rows were joined from parts.
MAX_LOST_IDS, MAX_LOST_SHARE = 2, 0.02
# Of the model's tokens. A reserved one may have been renamed.
MAX_MOVED = 0.01
MAX_NAMES = 5


def check_double_bos(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    bos = run.tokenizer.hf.bos_token_id
    if bos is None:
        raise SkipCheck(f"{run.tokenizer.path} has no BOS token")
    rows, single, double = 0, 0, list[tuple[RowFormat, str]]()
    for cache, origin, ids, _ in sample_sequences(run, ROW_FORMATS, 512):
        rows += 1
        single += int(ids[0]) == bos
        if len(ids) > 1 and ids[0] == ids[1] == bos:
            double.append((cache.row_format, origin))
    finding = Finding(
        "pass",
        f"{len(double)} of {rows} rows begin with two BOS tokens, {single - len(double)} with one",
        limit="none",
        values={"rows": rows, "double": len(double), "single": single},
    )
    if not double:
        return finding
    source, advice = _find_bos_source(run, *double[0])
    return replace(
        finding,
        status="fail" if len(double) > MAX_WRONG * rows else "warn",
        cause=f"{name_token(run, bos)} is written twice, by {source}",
        source=f"{source} ({double[0][1]})",
        next_step=f"{advice}; {inspect_command(run, double[0][1])}",
    )


def _find_bos_source(run: Run, row_format: RowFormat, origin: str) -> tuple[str, str]:
    bos, path = run.tokenizer.hf.bos_token_id, run.tokenizer.path
    if row_format == "tokens":
        return "input_ids", "leave one out: ids are used as they are"
    if row_format in CHAT_FORMATS:
        if run.tokenizer.encode(generation_prompt(run))[:2] == [bos, bos]:
            return "the chat template", f"write bos_token once, in {template_name(run)}"
        return "the chat template and a message", "remove it from the messages"
    if run.tokenizer.text_prefix[:2] == [bos, bos]:
        return f"the tokenizer {path}", "remove one from the post_processor of tokenizer.json"
    return f"the tokenizer {path} and the text", "remove it from the text: the tokenizer adds it"


def check_template_tokens(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    if not set(run.data.formats) & set(CHAT_FORMATS):
        raise SkipCheck("no conversations, so there is no chat template")
    unknown = run.tokenizer.unknown_template_tokens
    finding = Finding(
        "pass",
        f"{len(unknown)} special tokens of the chat template are several tokens of the tokenizer",
        limit="none",
        values={"unknown": len(unknown)},
    )
    if not unknown:
        return finding
    return replace(
        finding,
        status="fail",
        cause=f"{', '.join(unknown)} is written as text: no token begins a turn, or ends an answer",
        source=f"{template_name(run)}, {run.tokenizer.path}",
        next_step="use the chat template of this tokenizer (leave out data.chat_template), or a tokenizer with these "
        "tokens",
    )


def check_id_range(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    size, rows = run.tokenizer.size, run.model.vocab_size
    occurs = _count_ids(run)
    highest = len(occurs) - 1
    finding = Finding(
        "pass",
        f"ids go up to {highest} in {occurs.sum():,} tokens of the data, up to {size - 1} in the tokenizer; the "
        f"embedding has {rows} rows",
        limit="ids below the rows of the embedding",
        values={"highest": highest, "tokenizer": size, "embeddings": rows},
    )
    largest = max(highest, size - 1, run.data.pad_id)
    if largest < rows:
        return finding
    return replace(
        finding,
        status="fail",
        cause=f"id {largest} has no embedding",
        source="data.path" if highest >= rows else f"model.tokenizer {run.tokenizer.path}",
        next_step="use the tokenizer of the model (leave out model.tokenizer), also to tokenize the data",
    )


def check_round_trip(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    changes: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    texts, unknown = 0, run.tokenizer.hf.unk_token_id
    for row in sample_rows(run, (*TEXT_FORMATS, *ANSWER_FORMATS)):
        for text in (piece for turn in row.turns for piece in _cut_pieces(turn.text)):
            texts += 1
            ids = run.tokenizer.encode(text)
            back = decode(run, ids)
            change = "lose characters" if unknown in ids else _find_change(text, back)
            changes[change].append((row.origin, text, back))
    others = [f"{len(cases)} {change}" for change, cases in changes.items() if change]
    finding = Finding(
        "pass",
        f"{len(changes[''])} of {texts} texts come back exactly from their tokens{''.join(f'; {o}' for o in others)}",
        limit=f"{1 - MAX_WRONG:.0%} keep all characters and spaces",
        values={"texts": texts, "exact": len(changes[""]), "lost": len(changes["lose characters"])},
    )
    for change in ("lose characters", "change spaces"):
        if len(changes[change]) > MAX_WRONG * texts:
            origin, text, back = changes[change][0]
            return replace(
                finding,
                status="fail" if change == "lose characters" else "warn",
                cause=f"texts {change}: {_describe_change(text, back)}",
                source=f"model.tokenizer {run.tokenizer.path} ({origin})",
                next_step="what is lost can be neither read nor written: use a tokenizer that has all bytes, such as "
                "one of torchstone tokenizer train",
            )
    return finding


def check_row_text(diagnosis: Diagnosis) -> Finding:
    """The row's own text is tokenized and decoded as well, so what a tokenizer does to texts makes no difference."""
    run = diagnosis.run
    rows, characters = 0, 0
    others, spaces = list[tuple[str, str, str]](), list[tuple[str, str, str]]()
    for row in sample_rows(run, (*TEXT_FORMATS, *ANSWER_FORMATS)):
        is_long_text = row.row_format in TEXT_FORMATS and run.config.data.on_long_row != "truncate"
        texts, is_whole = _expected_texts(run, row)
        if not texts or characters > MAX_CHARACTERS or (is_cut(run, row) and not is_long_text):
            continue
        rows, characters = rows + 1, characters + sum(map(len, texts))
        # A template writes special tokens itself. To other texts they are added.
        read = partial(decode, run) if row.row_format in CHAT_FORMATS else run.tokenizer.decode
        found = read(np.concatenate([document.ids for document in row.documents]).tolist())
        for text in texts:
            expected, is_in = read(run.tokenizer.encode(text)), eq if is_whole else contains
            if not is_in(remove_spaces(found), remove_spaces(expected)):
                others.append((row.origin, expected, found))
                break
            if not is_in(found.strip(" "), expected.strip(" ")):
                spaces.append((row.origin, expected, found))
                break
    if not rows:
        raise SkipCheck("no row can be compared: all are cut, or refused by the chat template")
    finding = Finding(
        "pass",
        f"{rows - len(others) - len(spaces)} of {rows} rows have their own text in their tokens, {len(spaces)} with "
        "other spaces",
        limit="all",
        values={"rows": rows, "others": len(others), "spaces": len(spaces)},
    )
    if not others and not spaces:
        return finding
    origin, expected, found = (others or spaces)[0]
    what = f"another text in {len(others)}" if others else f"other spaces or line breaks in {len(spaces)}"
    return replace(
        finding,
        status="fail" if len(others) > MAX_WRONG * rows else "warn",
        cause=f"tokens have {what} of {rows} rows: {_describe_change(expected, found)}",
        source=f"{origin}; data/encode.py",
        next_step=f"{look_for_change('data/encode.py')}; {inspect_command(run, origin)}",
    )


def _expected_texts(run: Run, row: SampledRow) -> tuple[list[str], bool]:
    """The texts that the tokens of a row should have, and whether they should have no others.

    With tools, calls or reasoning, these are the texts of the messages that the chat template keeps as they are."""
    value, turns = row.row.value, row.turns
    if row.row_format in TEXT_FORMATS or isinstance(value.get("prompt"), str):
        return ["".join(turn.text for turn in turns)], True
    messages = read_messages(row.row_format, value)
    is_plain = not value.get("tools") and all(
        isinstance(m.get("content"), str) and not any(m.get(key) for key in (*CALL_KEYS, *REASONING_KEYS))
        for m in messages
    )
    try:
        template = run.tokenizer.template
        if is_plain:
            return [template.render_text(messages)], True
        rendered = template.render_text([{"role": turn.role, "content": turn.text} for turn in turns])
    except TorchstoneError:
        return [], False
    return [text for turn in turns if (text := turn.text.strip()) and text in rendered], False


def _cut_pieces(text: str) -> list[str]:
    """Some pieces of a text, evenly spread."""
    starts = range(0, len(text), PIECE)
    return [text[start : start + PIECE] for start in starts[:: max(1, len(starts) // MAX_PIECES)]]


def _find_change(text: str, back: str) -> str:
    """What a tokenizer does to a text. Many add or drop a space at its start."""
    if text.strip(" ") == back.strip(" "):
        return ""
    text, back = normalize("NFKC", text), normalize("NFKC", back)
    if text.strip() == back.strip():
        return "come back in another Unicode form"
    text, back = text.lower(), back.lower()
    if text.strip() == back.strip():
        return "come back in small letters"
    return "change spaces" if remove_spaces(text) == remove_spaces(back) else "lose characters"


def _describe_change(text: str, back: str) -> str:
    pairs = enumerate(zip(text, back, strict=False))
    at = max(0, next((i for i, (a, b) in pairs if a != b), min(len(text), len(back))) - 10)
    return f"{text[at : at + 30]!r} becomes {back[at : at + 30]!r}"


def check_pretokenized(diagnosis: Diagnosis) -> Finding:
    """With another tokenizer the text of ids is something else, and becomes other ids."""
    run = diagnosis.run
    rows, other = 0, list[str]()
    for _, origin, ids, _ in sample_sequences(run, ("tokens",), 64):
        rows, ids = rows + 1, ids[:PIECE]
        lost = Counter(ids.tolist()) - Counter(run.tokenizer.encode(decode(run, ids)))
        if lost.total() > max(MAX_LOST_IDS, MAX_LOST_SHARE * len(ids)):
            other.append(origin)
    if not rows:
        raise SkipCheck("no rows of token ids")
    finding = Finding(
        "pass",
        f"the text of {rows - len(other)} of {rows} rows of ids is tokenized into the same ids again",
        limit="half of the rows",
        values={"rows": rows, "other": len(other)},
    )
    if 2 * len(other) <= rows:
        return finding
    return replace(
        finding,
        status="warn",
        cause=f"{run.tokenizer.path} does not write such ids: the rows may be from the tokenizer of another model",
        source=f"model.tokenizer, input_ids of {other[0]}",
        next_step=f"see whether their text makes sense: {inspect_command(run, other[0])}",
    )


def check_model_tokenizer(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    config = run.config.model
    if config.path is None or config.tokenizer is None:
        raise SkipCheck("the model is new" if config.path is None else "the tokenizer is the model's own")
    file = tokenizer_files(_base_folder(run)) / "tokenizer.json"
    if not file.is_file():
        raise SkipCheck(f"the model has no tokenizer.json to compare with ({file.parent})")
    old = tokenizers.Tokenizer.from_file(str(file)).get_vocab()
    new = run.tokenizer.hf.get_vocab()
    moved = [token for token, number in old.items() if new.get(token) != number]
    finding = Finding(
        "pass",
        f"{len(moved):,} of the model's {len(old):,} tokens have another id, or none",
        limit=f"{MAX_MOVED:.0%}",
        values={"moved": len(moved), "tokens": len(old)},
    )
    if len(moved) <= MAX_MOVED * len(old):
        return finding
    return replace(
        finding,
        status="fail",
        cause=f"it is the tokenizer of another model: {moved[0]!r} would get the embedding of another token",
        source=f"model.tokenizer {config.tokenizer}",
        next_step="leave out model.tokenizer, or train a new model (model.depth)",
    )


def check_unused_tokens(diagnosis: Diagnosis) -> Finding:
    """Data seldom has all tokens of a vocabulary. It should have those that were added for it."""
    run = diagnosis.run
    occurs, vocab = _count_ids(run), run.tokenizer.hf.get_vocab()
    unused = {token for token, number in vocab.items() if number >= len(occurs) or not occurs[number]}
    added = _find_added_tokens(run)
    missing = [token for token in added if token in unused]
    finding = Finding(
        "pass",
        f"{len(unused):,} of {len(vocab):,} tokens never occur in {occurs.sum():,} tokens of training data"
        + (f", nor do {len(missing)} of {len(added)} that were added to the model" if added else ""),
        limit="added tokens occur",
        values={"unused": len(unused), "added": len(added), "added_unused": len(missing)},
    )
    if not missing:
        return finding
    return replace(
        finding,
        status="warn",
        cause=f"{', '.join(missing[:MAX_NAMES])} never occurs, so its embedding stays as it was added: the mean of all",
        source=f"model.tokenizer {run.tokenizer.path}",
        next_step="compare its spelling with the rows and the chat template, or remove it from the tokenizer",
    )


def check_token_embeddings(diagnosis: Diagnosis) -> Finding:
    """Base models often have special tokens that were never trained: with embeddings of zeros, or all the same."""
    run = diagnosis.run
    if run.config.model.path is None:
        raise SkipCheck("the model is new")
    weight, occurs, kinds = _get_embedding(run), _count_ids(run), run.model.parameter_kinds()
    special = [
        i for i in sorted(run.tokenizer.hf.added_tokens_decoder) if i < min(len(weight), len(occurs)) and occurs[i]
    ]
    unknown = _find_untrained(weight, special)
    is_trained = any(kinds.get(name) == "embed" for name, _ in run.model.trained_parameters())
    finding = Finding(
        "pass",
        f"{len(unknown)} of {len(special)} special tokens in the data have an embedding of zeros, or that of another "
        f"token; embeddings are {'trained' if is_trained else 'frozen'}",
        limit="none, if embeddings are frozen",
        values={"special": len(special), "untrained": len(unknown)},
    )
    if not unknown or is_trained:
        return finding
    method = run.config.tuning.method
    how = "--tuning.modules_to_save embed_tokens,lm_head" if method == "lora" else "--tuning.osft_train_rest true"
    return replace(
        finding,
        status="fail",
        cause=f"the model was never trained on {', '.join(name_token(run, i) for i in unknown[:MAX_NAMES])}, and "
        f"tuning.method {method} does not train embeddings",
        source=f"tuning.method {method}, {template_name(run)}",
        next_step=f"use a chat template with tokens that the model knows, or {how}",
    )


def _count_ids(run: Run) -> np.ndarray:
    """How often each id occurs, up to the highest one, in the first tokens of each source."""
    parts = [part for _, part in train_parts(run.data.train)]
    counts = [np.bincount(part.cache.ids[: MAX_TOKENS // len(parts)]) for part in parts]
    total: np.ndarray = np.zeros(max(map(len, counts)), dtype=np.int64)
    for count in counts:
        total[: len(count)] += count
    return total


def _get_embedding(run: Run) -> Tensor:
    if isinstance(run.model, NativeModel):
        weight = getattr(getattr(run.model.module, "tok_embed", None), "weight", None)
    else:
        weight = run.model.module.hf.get_input_embeddings().weight
    if weight is None or isinstance(weight, DTensor):
        raise SkipCheck("the embedding is sharded; run with --nproc 1")
    return weight.detach()


def _find_untrained(weight: Tensor, numbers: list[int]) -> list[int]:
    """Those whose embedding is zero, or equal to another one."""
    norms = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)
    untrained = []
    for number in numbers:
        # Equal rows have equal norms.
        similar = weight[norms == norms[number]]
        if norms[number] == 0 or int((similar == weight[number]).all(dim=1).sum()) > 1:
            untrained.append(number)
    return untrained


def _find_added_tokens(run: Run) -> list[str]:
    """The tokens for which the embedding of the base model was resized, without words, and names such as pad_token."""
    if run.config.model.path is None or run.checkpoint is not None:
        return []
    size, hf = read_hf_config(_base_folder(run)).get("vocab_size"), run.tokenizer.hf
    added = {number: token.content for number, token in hf.added_tokens_decoder.items()}
    named = {token for token in hf.special_tokens_map.values() if isinstance(token, str)}
    return [added[i] for i in sorted(added) if isinstance(size, int) and i >= size and added[i] not in named]


def _base_folder(run: Run) -> Path:
    path = run.config.model.path
    assert path is not None
    # Resolving a checkpoint reads all of it, to verify it.
    return Path(path) if is_model_folder(Path(path)) else resolve_model_folder(path)

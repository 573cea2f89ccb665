"""Checks of the tokenizer: is it the model's, does it keep texts, and has every token an embedding of its own?"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
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
    search_sequences,
    train_parts,
)
from torchstone.diagnosis.turns import CALL_KEYS, REASONING_KEYS, read_messages
from torchstone.errors import TorchstoneError
from torchstone.models.model import NativeModel
from torchstone.training.run import Run

if TYPE_CHECKING:
    from torchstone.diagnosis.session import Diagnosis

# Texts are compared until they have this many characters together, which takes a second.
MAX_CHARACTERS = 1 << 20
# What must not happen to texts: on their way from the rows, and in the tokenizer.
OTHER, OTHER_SPACES = "are not in the tokens of their rows", "have other spaces or line breaks in their rows' tokens"
LOST, SPACES = "lose characters", "change spaces"
# How many ids of a row are looked at.
MAX_IDS = 4000
# Limits for the ids of a row that do not come back when its text is tokenized again. Some rows were joined from parts.
MAX_LOST_IDS, MAX_LOST_SHARE = 2, 0.02
# Limit for the share of the model's tokens with another id. A reserved one may have been renamed.
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
    return finding.with_cause(
        f"{name_token(run, bos)} is written twice, by {source}",
        f"{source} ({double[0][1]})",
        f"{advice}; {inspect_command(run, double[0][1])}",
        status="fail" if len(double) > MAX_WRONG * rows else "warn",
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


def check_generation_prompt(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    if not set(run.data.formats) & set(CHAT_FORMATS) or run.config.data.train_on == "all":
        raise SkipCheck("no answers of conversations are trained")
    header = run.tokenizer.template.trained_header()
    text = f"{len(header)} characters before an answer are trained because they are in no generation prompt"
    finding = Finding("pass", text, limit="0", values={"characters": len(header)})
    if not header:
        return finding
    return finding.with_cause(
        f"the chat template ignores add_generation_prompt, so {header!r} is trained with every answer",
        template_name(run),
        "end the template with {% if add_generation_prompt %} and this header, or use another one",
    )


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
    return finding.with_cause(
        f"{', '.join(unknown)} is written as text: no token begins a turn, or ends an answer",
        f"{template_name(run)}, {run.tokenizer.path}",
        "use the chat template of this tokenizer (leave out data.chat_template), or a tokenizer with these tokens",
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
    return finding.with_cause(
        f"id {largest} has no embedding",
        "data.path" if highest >= rows else f"model.tokenizer {run.tokenizer.path}",
        "use the tokenizer of the model (leave out model.tokenizer), also to tokenize the data",
    )


def check_round_trip(diagnosis: Diagnosis) -> Finding:
    """Tokens must give the text back that they were made from, and those of a row must have the text of the row."""
    run = diagnosis.run
    cases, rows, texts, characters = defaultdict[str, list[tuple[str, str, str]]](list), 0, 0, 0
    for row in sample_rows(run, (*TEXT_FORMATS, *ANSWER_FORMATS)):
        if characters < MAX_CHARACTERS:
            characters += sum(len(turn.text) for turn in row.turns)
            rows, texts = rows + 1, texts + len(row.turns)
            changes = [_find_change(run, turn.text) for turn in row.turns] + _find_change_in_row(run, row)
            for change, text, found in changes:
                cases[change].append((row.origin, text, found))
    others = "".join(f"; {len(each)} {change}" for change, each in cases.items() if change)
    finding = Finding(
        "pass",
        f"{len(cases[''])} of {texts} texts in {rows} rows come back from their tokens{others}",
        limit=f"{1 - MAX_WRONG:.0%} keep all characters and spaces; all are in the tokens of their rows",
        values={"texts": texts, "lost": len(cases[LOST]), "other": len(cases[OTHER])},
    )
    for change, allowed in ((OTHER, 0.0), (OTHER_SPACES, 0.0), (LOST, MAX_WRONG * texts), (SPACES, MAX_WRONG * texts)):
        if len(cases[change]) > allowed:
            origin, text, found = cases[change][0]
            is_failure = change == LOST or (change == OTHER and len(cases[change]) > MAX_WRONG * rows)
            source, next_step = "data/encode.py", f"{look_for_change('data/encode.py')}; {inspect_command(run, origin)}"
            if change in (LOST, SPACES):
                source = f"model.tokenizer {run.tokenizer.path}"
                next_step = "use a tokenizer that has all bytes, such as one of torchstone tokenizer train"
            return finding.with_cause(
                f"texts {change}: {_describe_change(text, found)}",
                f"{source} ({origin})",
                next_step,
                status="fail" if is_failure else "warn",
            )
    return finding


def _find_change_in_row(run: Run, row: SampledRow) -> list[tuple[str, str, str]]:
    """OTHER or OTHER_SPACES for each text that is not in the tokens of its row, the text, and what the row has.

    Tokens of the row are compared with those of the text, so what the tokenizer does to texts makes no difference."""
    has_all_pieces = row.row_format in TEXT_FORMATS and run.config.data.on_long_row != "truncate"
    if is_cut(run, row) and not has_all_pieces:
        return []
    # A template writes special tokens itself. To other texts they are added.
    read = partial(decode, run) if row.row_format in CHAT_FORMATS else run.tokenizer.decode
    found = read(np.concatenate([document.ids for document in row.documents]).tolist())
    texts, has = _expected_texts(run, row)
    changes = list[tuple[str, str, str]]()
    for text in (read(run.tokenizer.encode(text)) for text in texts):
        if not has(remove_spaces(found), remove_spaces(text)):
            changes.append((OTHER, text, found))
        elif not has(found.strip(" "), text.strip(" ")):
            changes.append((OTHER_SPACES, text, found))
    return changes


def _expected_texts(run: Run, row: SampledRow) -> tuple[list[str], Callable[[str, str], bool]]:
    """The texts that a row should have, and how: as all of its text (eq), or among others (contains).

    With tools, calls or reasoning, these are the texts of the messages that the chat template keeps as they are."""
    value, turns = row.row.value, row.turns
    if row.row_format in TEXT_FORMATS or isinstance(value.get("prompt"), str):
        return ["".join(turn.text for turn in turns)], eq
    messages = read_messages(row.row_format, value)
    keys = {key for message in messages for key in (*CALL_KEYS, *REASONING_KEYS) if message.get(key)}
    try:
        if not keys and not value.get("tools") and all(isinstance(m.get("content"), str) for m in messages):
            return [run.tokenizer.template.render_text(messages)], eq
        rendered = run.tokenizer.template.render_text([{"role": t.role, "content": t.text} for t in turns])
    except TorchstoneError:
        return [], eq
    return [text for turn in turns if (text := turn.text.strip()) and text in rendered], contains


def _find_change(run: Run, text: str) -> tuple[str, str, str]:
    """What the tokenizer does to a text, the text, and what it becomes. Spaces at its ends, small letters and other
    Unicode forms are no change."""
    ids, unknown = run.tokenizer.encode(text), run.tokenizer.hf.unk_token_id
    back = decode(run, ids)
    own, other = (normalize("NFKC", each).lower().strip() for each in (text, back))
    is_lost = unknown in ids or remove_spaces(own) != remove_spaces(other)
    return LOST if is_lost else SPACES if own != other else "", text, back


def _describe_change(text: str, back: str) -> str:
    pairs = enumerate(zip(text, back, strict=False))
    at = max(0, next((i for i, (a, b) in pairs if a != b), min(len(text), len(back))) - 10)
    return f"{text[at : at + 30]!r} becomes {back[at : at + 30]!r}"


def check_pretokenized(diagnosis: Diagnosis) -> Finding:
    """With another tokenizer the text of ids is something else, and becomes other ids."""
    run = diagnosis.run

    def is_other(ids: np.ndarray, _: np.ndarray) -> bool:
        lost = Counter(ids[:MAX_IDS].tolist()) - Counter(run.tokenizer.encode(decode(run, ids[:MAX_IDS])))
        return lost.total() > max(MAX_LOST_IDS, MAX_LOST_SHARE * len(ids[:MAX_IDS]))

    rows, other = search_sequences(run, ("tokens",), 64, is_other)
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
    return finding.with_cause(
        f"{run.tokenizer.path} does not write such ids: the rows may be from the tokenizer of another model",
        f"model.tokenizer, input_ids of {other[0]}",
        f"see whether their text makes sense: {inspect_command(run, other[0])}",
        status="warn",
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
    return finding.with_cause(
        f"it is the tokenizer of another model: {moved[0]!r} would get the embedding of another token",
        f"model.tokenizer {config.tokenizer}",
        "leave out model.tokenizer, or train a new model (model.depth)",
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
    return finding.with_cause(
        f"{', '.join(missing[:MAX_NAMES])} never occurs, so its embedding stays as it was added: the mean of all",
        f"model.tokenizer {run.tokenizer.path}",
        "compare its spelling with the rows and the chat template, or remove it from the tokenizer",
        status="warn",
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
    return finding.with_cause(
        f"the model was never trained on {', '.join(name_token(run, i) for i in unknown[:MAX_NAMES])}, and "
        f"tuning.method {method} does not train embeddings",
        f"tuning.method {method}, {template_name(run)}",
        f"use a chat template with tokens that the model knows, or {how}",
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
    """The tokens among `numbers` whose embedding is zero, or equal to another one."""
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

"""Checks of the rows themselves: copies, validation rows, rows that are bad, lost or too long, broken text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from torchstone.data.cache import TokenCache
from torchstone.data.formats import CHAT_FORMATS, TEXT_FORMATS
from torchstone.data.json_array import starts_with_array
from torchstone.data.samples import Samples
from torchstone.data.sources import BOM, size_on_disk
from torchstone.diagnosis.check import Finding, SkipCheck
from torchstone.diagnosis.expected_mask import read_template, remove_spaces
from torchstone.diagnosis.mask_checks import ANSWER_FORMATS, generation_prompt
from torchstone.diagnosis.sampled_rows import (
    MAX_TOKENS,
    SampledRow,
    inspect_command,
    look_for_change,
    sample_rows,
    sequence_numbers,
    train_parts,
)
from torchstone.training.run import Run

if TYPE_CHECKING:
    from torchstone.diagnosis.session import Diagnosis

# Shares of the tokens, validation rows and rows: a warning above the first, a failure above the second.
MAX_COPIES, MANY_COPIES = 0.1, 0.5
MAX_LEAKED, MANY_LEAKED = 0.01, 0.1
MAX_DROPPED, MANY_DROPPED = 0.05, 0.5
MAX_GARBLED, MANY_GARBLED = 0.05, 0.25
MAX_ESCAPED = MAX_SWAPPED = 0.5
SHOWN_BAD_ROWS = 3
# Files with a row per line, if they are not arrays. Counting the lines of that many bytes takes a second.
LINE_TYPES, MAX_COUNTED_BYTES = (".jsonl", ".ndjson", ".json"), 1 << 28
# Short texts, such as lines, occur again by accident, and so does anything among few rows.
MIN_TEXT_TOKENS, MIN_ROWS = 32, 8
# Sequences that are compared, of all sources.
MAX_SEQUENCES = 200_000
# In characters, as <s>.
MIN_CONTROL_TOKEN = 3
# UTF-8 that was read as Latin-1, and what stands for bytes that could not be decoded.
GARBLED = re.compile("\ufffd|Ã[\u0080-\u00bf]|â€|Â[\u00a0-\u00bf]|ï»¿")
# A line break that was escaped once too often, but not a command of LaTeX.
ESCAPED, MIN_ESCAPED = re.compile(r"\\n(?![a-z])"), 3


def check_duplicates(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    first, copies = dict[int, str](), list[tuple[str, str]]()
    rows, tokens, copied = 0, 0, 0
    for origin, ids in _sequences(run.data.train):
        rows, tokens, key = rows + 1, tokens + len(ids), hash(ids.tobytes())
        # Pieces of one row may be the same.
        if first.setdefault(key, origin) != origin:
            copied += len(ids)
            copies.append((origin, first[key]))
    if rows < MIN_ROWS:
        raise SkipCheck(f"{rows} rows are too few to compare, without texts below {MIN_TEXT_TOKENS} tokens")
    share = copied / tokens
    finding = Finding(
        "pass",
        f"{share:.1%} of the tokens are copies of other rows ({len(first):,} of {rows:,} rows differ)",
        limit=f"{MAX_COPIES:.0%}",
        values={"share": share, "rows": rows, "distinct": len(first)},
    )
    if share <= MAX_COPIES:
        return finding
    return finding.with_cause(
        "all rows are the same" if len(first) == 1 else "an epoch repeats rows, so they are learned by heart",
        f"data.path: {copies[0][0]} is {copies[0][1]}",
        "remove the copies; to see some rows more often, use data.weights",
        status="fail" if share > MANY_COPIES else "warn",
    )


def check_roles(diagnosis: Diagnosis) -> Finding:
    """Conversations that begin with an answer and end with a question come from columns or names that are swapped."""
    run = diagnosis.run
    if "user" in run.config.data.train_on:
        raise SkipCheck("data.train_on trains the texts of the user")
    rows = [(row.origin, [t.role for t in row.turns if t.role != "system"]) for row in sample_rows(run, CHAT_FORMATS)]
    begins = [origin for origin, roles in rows if roles[:1] == ["assistant"]]
    ends = [origin for origin, roles in rows if roles[-1:] == ["user"]]
    finding = Finding(
        "pass",
        f"{len(begins)} of {len(rows)} conversations begin with the assistant, {len(ends)} end with the user",
        limit=f"{MAX_SWAPPED:.0%}",
        values={"rows": len(rows), "begin": len(begins), "end": len(ends)},
    )
    if max(len(begins), len(ends)) <= MAX_SWAPPED * len(rows):
        return finding
    is_swapped = min(len(begins), len(ends)) > MAX_SWAPPED * len(rows)
    if is_swapped:
        cause = "user and assistant are swapped: questions are trained, and answers are masked"
    elif begins:
        cause = "most conversations begin with an answer to nothing"
    else:
        cause = "most conversations end with a question, which is never answered"
    origin = (begins or ends)[0]
    return finding.with_cause(
        cause, f"{origin}; data.columns", inspect_command(run, origin), status="fail" if is_swapped else "warn"
    )


def check_validation_leak(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    if not run.data.validation:
        raise SkipCheck("no validation data")
    train = {hash(ids.tobytes()): origin for origin, ids in _sequences(run.data.train)}
    rows, leaked = 0, list[tuple[str, str]]()
    for origin, ids in (sequence for samples in run.data.validation.values() for sequence in _sequences(samples)):
        rows += 1
        if (other := train.get(hash(ids.tobytes()))) is not None:
            leaked.append((origin, other))
    if not rows:
        raise SkipCheck(f"no validation text has {MIN_TEXT_TOKENS} tokens: shorter ones occur again by accident")
    share = len(leaked) / max(1, rows)
    finding = Finding(
        "pass",
        f"{len(leaked):,} of {rows:,} validation rows are also training rows",
        limit=f"{MAX_LEAKED:.0%}",
        values={"share": share, "rows": rows, "leaked": len(leaked)},
    )
    if share <= MAX_LEAKED:
        return finding
    is_path = run.config.data.validation_path is not None
    return finding.with_cause(
        "the validation loss measures what was learned by heart, and chooses the wrong checkpoint",
        f"{'data.validation_path' if is_path else 'data.validation_split'}: {leaked[0][0]} is {leaked[0][1]}",
        "remove these rows from one of the two"
        if is_path
        else "remove copies from data.path: the split keeps lines apart, but not copies of them",
        status="fail" if share > MANY_LEAKED else "warn",
    )


def check_bad_rows(diagnosis: Diagnosis) -> Finding:
    """Whatever data.on_bad_row says, a diagnosis leaves bad rows out and goes on, so that all of them are seen."""
    data, stops = diagnosis.run.data, diagnosis.stops_at_bad_rows
    parts = [part for samples in (data.train, *data.validation.values()) for _, part in train_parts(samples)]
    caches = list({part.cache.folder: part.cache for part in parts}.values())
    rows, number = sum(cache.counts.rows for cache in caches), sum(cache.counts.bad_rows for cache in caches)
    share = number / max(1, rows)
    finding = Finding(
        "pass",
        f"{number:,} of {rows:,} rows are bad",
        limit="none" if stops else f"{MAX_DROPPED:.0%}",
        values={"share": share, "rows": rows, "bad": number},
    )
    for cache in (part.cache for _, part in train_parts(data.train)):
        lines = _count_lines(diagnosis.run, cache)
        found = cache.counts.dropped + int(np.count_nonzero(np.diff(cache.origins, prepend=-1)))
        if lines not in (None, found):
            cause = f"of {lines:,} lines {found:,} are used, or counted as bad or left out"
            where, change = f"{cache.source.name}; data/sources.py", look_for_change("data/sources.py")
            return finding.with_cause(cause, where, change)
    if share <= (0 if stops else MAX_DROPPED):
        return finding
    bad = [cache for cache in caches if cache.counts.bad_rows]
    shown = "; ".join(row.message for cache in bad for row in islice(cache.bad_rows(), SHOWN_BAD_ROWS))
    return finding.with_cause(
        f"training stops there: {shown}" if stops else f"what is left out is often of one kind: {shown}",
        f"data.on_bad_row {'stop' if stops else 'skip'}; all bad rows are in {bad[0].bad_rows_path}",
        "correct the rows" + (", or leave them out: --data.on_bad_row skip" if stops else ""),
        status="fail" if stops or share > MANY_DROPPED else "warn",
    )


def check_long_rows(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    counts, data = run.data.counts, run.config.data
    rows, dropped = max(1, counts.rows - counts.bad_rows), counts.dropped - counts.bad_rows
    # Text that is cut goes on in the next row.
    is_text = bool(set(run.data.formats) & set(TEXT_FORMATS))
    cut = 0 if is_text else counts.truncated_long + counts.split_long
    lost = dropped + (0 if is_text else counts.truncated_long)
    finding = Finding(
        "pass",
        f"of {rows:,} good rows {counts.dropped_long:,} are left out as longer than data.context_length "
        f"{data.context_length}, {counts.dropped_untrained:,} for lack of a trained token within it; {cut:,} are cut",
        limit=f"{MAX_DROPPED:.0%}",
        values={"rows": rows, "dropped": dropped, "cut": cut},
    )
    if dropped + cut <= MAX_DROPPED * rows:
        return finding
    return finding.with_cause(
        "a cut answer has no end, so the model learns to stop anywhere, or not at all"
        if cut > dropped
        else "what is left out is often of one kind, such as all long answers",
        f"data.on_long_row {data.on_long_row}, such as {', '.join(counts.examples[:3])}",
        "raise data.context_length (torchstone inspect-data shows how long rows are)"
        + (", or use --data.on_long_row drop" if cut > dropped else ""),
        status="fail" if lost > MANY_DROPPED * rows else "warn",
    )


def check_control_tokens(diagnosis: Diagnosis) -> Finding:
    """A message that has the text of a token such as <|im_end|> is tokenized as if a turn ended there."""
    run = diagnosis.run
    tokens, rows = _find_control_tokens(run), sample_rows(run, ANSWER_FORMATS)
    wrong = [(row, token) for row in rows for token in tokens if _has_token(run, row, token)]
    count = len({row.origin for row, _ in wrong})
    finding = Finding(
        "pass",
        f"{count} of {len(rows)} rows have a control token in the text of a message",
        limit="none",
        values={"rows": len(rows), "wrong": count},
    )
    if not wrong:
        return finding
    row, token = wrong[0]
    # Text about HTML may have <s> in every row.
    template = read_template(run)
    headers = [text for text in map(remove_spaces, (template.before_question, template.header)) if text]
    rendered = [row for row in rows if any(header in remove_spaces(t.text) for t in row.turns for header in headers)]
    is_rendered = min(count, len(rendered)) > len(rows) / 2 and row.row_format in CHAT_FORMATS
    return finding.with_cause(
        f"{token} is in most rows: the chat template was applied before, and is applied again"
        if is_rendered
        else f"{token} in a message becomes a token: a turn begins or ends there",
        row.origin,
        f"remove it from the messages; {inspect_command(run, row.origin)}",
        status="fail" if is_rendered else "warn",
    )


def check_garbled_text(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    rows = sample_rows(run, (*TEXT_FORMATS, *ANSWER_FORMATS))
    texts = [(row, "\n".join(turn.text for turn in row.turns)) for row in rows]
    garbled = [(row, match) for row, text in texts if (match := GARBLED.search(text))]
    escaped = [row for row in rows if any(_is_escaped(turn.text) for turn in row.turns)]
    finding = Finding(
        "pass",
        f"{len(garbled)} of {len(rows)} rows have characters of a wrong decoding, {len(escaped)} escaped line breaks",
        limit=f"{MAX_GARBLED:.0%}; {MAX_ESCAPED:.0%}",
        values={"rows": len(rows), "garbled": len(garbled), "escaped": len(escaped)},
    )
    if len(garbled) > MAX_GARBLED * len(rows):
        row, match = garbled[0]
        return finding.with_cause(
            "the text was decoded with the wrong encoding, or with errors='replace', before it was written: "
            f"{match.string[max(0, match.start() - 15) : match.end() + 15]!r}",
            row.origin,
            "write the file again from its source, decoded as UTF-8",
            status="fail" if len(garbled) > MANY_GARBLED * len(rows) else "warn",
        )
    if len(escaped) > MAX_ESCAPED * len(rows):
        return finding.with_cause(
            "line breaks are written as a backslash and an n: the texts were escaped twice",
            escaped[0].origin,
            f"write the file again, escaped once; {inspect_command(run, escaped[0].origin)}",
            status="warn",
        )
    return finding


def _is_escaped(text: str) -> bool:
    """Whether it has no line breaks, but escaped ones. JSON in one line is right."""
    return "\n" not in text and text[:1] not in ("{", "[") and len(ESCAPED.findall(text)) >= MIN_ESCAPED


def _sequences(samples: Samples) -> Iterator[tuple[str, np.ndarray]]:
    """file:line and ids of the first sequences of each source, without short texts."""
    parts = train_parts(samples)
    for _, part in parts:
        cache, numbers = part.cache, sequence_numbers(part)[: MAX_SEQUENCES // len(parts)]
        if cache.row_format in TEXT_FORMATS:
            numbers = numbers[cache.lengths[numbers] >= MIN_TEXT_TOKENS]
        tokens = MAX_TOKENS // len(parts)
        for number in numbers.tolist():
            sequence = cache.sequence(number)
            tokens -= len(sequence.ids)
            if tokens < 0:
                break
            yield cache.origin(number), sequence.ids


def _count_lines(run: Run, cache: TokenCache) -> int | None:
    """How many rows its files should have; None if that takes long, or if not every line is a row."""
    files, kinds = cache.source.files, LINE_TYPES + ((".txt",) if cache.row_format == "lines" else ())
    if any(path.suffix not in kinds for path in files) or sum(map(size_on_disk, files)) > MAX_COUNTED_BYTES:
        return None
    lines = 0
    for path in files:
        with path.open("rb") as file:
            if starts_with_array(file.read(1 << 12)):
                return None
            file.seek(0)
            lines += sum(1 for line in file if line.removeprefix(BOM).strip())
    return min(lines, run.config.data.max_samples or lines)


def _find_control_tokens(run: Run) -> list[str]:
    """The tokens that begin or end texts and turns, by their text."""
    hf = run.tokenizer.hf
    written = set(run.tokenizer.encode(generation_prompt(run))) & set(hf.all_special_ids)
    ids = {hf.bos_token_id, hf.eos_token_id, hf.pad_token_id, *run.tokenizer.stop_ids, *written} - {None}
    tokens = [hf.convert_ids_to_tokens(number) for number in sorted(ids)]
    # A pad token may be an ordinary one.
    return [token for token in tokens if len(token) >= MIN_CONTROL_TOKEN]


def _has_token(run: Run, row: SampledRow, token: str) -> bool:
    texts = [turn.text for turn in row.turns]
    if row.row_format == "prompt":
        # An eos at the end of a completion is not added again.
        texts[-1] = texts[-1].removesuffix(run.tokenizer.hf.eos_token or "")
    return any(token in text for text in texts)

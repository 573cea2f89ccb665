"""Shows what a run would learn from its data: examples with the text to train on marked, counts, lengths.

The counts come from the token cache; ids are read for the examples only, and only the beginning and the end of a long
example are decoded. `inspect_sources` returns data for programs, unrounded and unescaped; the console and the HTML page
show the same to users, with control characters escaped: data must not control a terminal or a browser.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby, islice, pairwise
from typing import Any

import numpy as np
import regex

from torchstone.data.cache import TokenCache
from torchstone.data.encode import RowCounts
from torchstone.data.formats import IGNORE_INDEX, TEXT_FORMATS
from torchstone.data.tokenize import Tokenizer
from torchstone.wording import plural

MAX_TOKENS_SHOWN = 400
MAX_BAD_ROWS_SHOWN = 3
MAX_BINS = 12
# The histogram has a linear scale unless the maximum is this many times the median.
LOG_SCALE_RATIO = 20
# The smallest choice in the table of context lengths, unless all rows are shorter.
MIN_CHOICE = 512
# What a decoder writes for bytes that are not a complete character.
REPLACEMENT = "\ufffd"
# No character of valid text has more tokens than this; random ids may never complete one.
MAX_GROUP = 32
# Omitted tokens that are decoded as context for the first token after the gap.
CONTEXT_TOKENS = 8
BAR_WIDTH = 30
TRAINED_STYLE, CONTEXT_STYLE = "1;32", "2"
# Control and format characters, except those that join emoji, bytes of file names that are not UTF-8 (lone surrogates),
# and the marks of the console itself.
UNSAFE = regex.compile(r"[[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}⟦⟧]--[\u200c\u200d]]", regex.VERSION1)


def inspect_sources(
    caches: Sequence[TokenCache],
    tokenizer: Tokenizer,
    context_length: int,
    rows: int,
    max_tokens: int | None = MAX_TOKENS_SHOWN,
) -> dict[str, Any]:
    """Returns a report on each source, with `rows` examples. Decodes at most `max_tokens` tokens of each."""
    total = RowCounts()
    for cache in caches:
        total.add(cache.counts)
    return {
        "tokenizer": tokenizer.path,
        "context_length": context_length,
        "sources": [_source_report(cache, tokenizer, context_length, rows, max_tokens) for cache in caches],
        "total": _figures(total),
    }


def print_report(report: dict[str, Any], write: Callable[[str], Any], use_color: bool) -> None:
    """Text to train on is green and bold, or between ⟦ and ⟧ without colors."""
    for source in report["sources"]:
        write(f"{escape(source['name'])}: {source['format']}, {plural(source['files'], 'file', ',')}\n\n")
        for number, example in enumerate(source["examples"], start=1):
            counts = f"{plural(example['tokens'], 'token', ',')}, {example['trained']:,} trained"
            write(f"example {number}, {escape(example['origin'])}: {counts}\n")
            write(_marked_text(example["runs"], use_color) + "\n")
        for line in _summary(source, report["context_length"]):
            write(f"{line}\n")
        write("\n")
    if len(report["sources"]) > 1:
        write(f"all {len(report['sources'])} sources\n")
        for line in _table(_count_table(report["total"])):
            write(f"{line}\n")


def html_page(report: dict[str, Any]) -> str:
    """A self-contained page: no scripts, no other files, nothing from the network."""
    sources = "".join(_html_source(source, report["context_length"]) for source in report["sources"])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>torchstone inspect-data</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        "<h1>What a run would train on</h1>\n"
        f"<p>Tokenizer {_html_escape(report['tokenizer'])}, context length {report['context_length']:,}. "
        f"<mark>Marked text</mark> is trained on, the rest is context. Hover over a token to see its id.</p>\n"
        f"{_html_total(report)}{sources}</body>\n</html>\n"
    )


def escape(text: str) -> str:
    """Makes newlines and tabs visible, and escapes everything else that would control a terminal."""
    return UNSAFE.sub(lambda match: _escape_character(match[0]), text)


def _source_report(
    cache: TokenCache, tokenizer: Tokenizer, context_length: int, rows: int, max_tokens: int | None
) -> dict[str, Any]:
    bad_rows = _first_bad_rows(cache)
    count = min(rows, len(cache))
    indices = [number * (len(cache) - 1) // max(1, count - 1) for number in range(count)]
    lengths: np.ndarray = np.sort(cache.row_lengths).astype(np.int64)
    # Text is not dropped or cut, unless data.on_long_row says so.
    is_split = cache.row_format in TEXT_FORMATS and not (cache.counts.dropped_long or cache.counts.truncated_long)
    return {
        "name": cache.source.name,
        "format": cache.row_format,
        "files": len(cache.source.files),
        **_figures(cache.counts),
        "refused": f"none of its {cache.counts.rows:,} rows has a loss token"
        if not cache.counts.trained_tokens
        else None,
        "lengths": _length_statistics(lengths),
        "histogram": _histogram(lengths, context_length),
        "context_lengths": [] if is_split else _context_length_table(lengths, context_length),
        "is_split": is_split,
        "dropped": _dropped(cache, context_length, bad_rows),
        "notes": _notes(cache.counts, context_length),
        "first_bad_rows": bad_rows,
        "quarantine": str(cache.bad_rows_path),
        "examples": [_example(cache, index, tokenizer, max_tokens) for index in indices],
    }


def _figures(counts: RowCounts) -> dict[str, Any]:
    figures = {name: value for name, value in asdict(counts).items() if name != "examples"}
    return figures | {"trained_share": counts.trained_tokens / max(1, counts.tokens)}


def _length_statistics(lengths: np.ndarray) -> dict[str, float]:
    if not len(lengths):
        return {}
    median, p90, p99 = (float(value) for value in np.quantile(lengths, [0.5, 0.9, 0.99]))
    low, high = int(lengths.min()), int(lengths.max())
    statistics = {"min": low, "mean": float(lengths.mean()), "median": median, "p90": p90, "p99": p99, "max": high}
    return statistics | {"context_length_needed": _power_of_two(lengths)}


def _histogram(lengths: np.ndarray, context_length: int) -> list[dict[str, int]]:
    """The number of rows with a length from `low` to `high`, both included. A bin ends at the context length."""
    if not len(lengths):
        return []
    longest = int(lengths.max())
    if longest <= LOG_SCALE_RATIO * np.median(lengths):
        step = next(edge for edge in _round_numbers() if edge * MAX_BINS >= longest)
        edges = list(range(0, longest + step, step))
    else:
        first = float(np.quantile(lengths, 0.01))
        above = (edge for edge in _round_numbers() if edge >= first)
        edges = [0, next(above)]
        while edges[-1] < longest:
            edges.append(next(above))
    if context_length < longest:
        edges = sorted({*edges, context_length})
    # Bins include their upper edge: 1 to 100, 101 to 200.
    counts, _ = np.histogram(lengths, bins=np.array(edges) + 0.5)
    return [
        {"low": low + 1, "high": high, "count": int(count)}
        for (low, high), count in zip(pairwise(edges), counts, strict=True)
    ]


def _context_length_table(lengths: np.ndarray, context_length: int) -> list[dict[str, Any]]:
    """What other context lengths would lose: the rows that are longer, and their tokens if they are dropped or cut.

    `lengths` are sorted. The choices are the powers of two from 512 (less if all rows are shorter) to the first that
    keeps everything.
    """
    if not len(lengths):
        return []
    power = _power_of_two(lengths)
    choices = [power // 4, power // 2, power] if power < MIN_CHOICE else [MIN_CHOICE]
    while choices[-1] < power:
        choices.append(2 * choices[-1])
    total, tokens_before = int(lengths.sum()), np.concatenate(([0], np.cumsum(lengths)))
    table = []
    for choice in sorted({*choices, context_length}):
        kept = int(np.searchsorted(lengths, choice, side="right"))
        rows, dropped = len(lengths) - kept, total - int(tokens_before[kept])
        truncated = dropped - rows * choice
        shares = {
            "rows_share": rows / len(lengths),
            "dropped_share": dropped / total,
            "truncated_share": truncated / total,
        }
        table.append(
            {"context_length": choice, "rows": rows, "dropped_tokens": dropped, "truncated_tokens": truncated} | shares
        )
    return table


def _power_of_two(lengths: np.ndarray) -> int:
    """The smallest power of two that holds the longest row, but at least 16."""
    return 1 << max(4, (int(lengths[-1]) - 1).bit_length())


def _round_numbers() -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, ..."""
    power = 1
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


def _first_bad_rows(cache: TokenCache) -> list[dict[str, Any]]:
    with cache.bad_rows_path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in islice(file, MAX_BAD_ROWS_SHOWN)]
    return [{"file": row["file"], "line": row["line"], "reason": row["reason"]} for row in rows]


def _dropped(cache: TokenCache, context_length: int, bad_rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a run would not see, why, and how to keep it."""
    counts = cache.counts
    has_cut_rows = counts.truncated_long or counts.split_long
    return _nonzero(
        (
            counts.bad_rows,
            "rows that cannot be read or trained on; a run stops at the first, or skips them with data.on_bad_row "
            f"skip. All of them are in {cache.bad_rows_path}",
            [f"{row['file']}:{row['line']}: {row['reason']}" for row in bad_rows],
        ),
        (
            counts.dropped_long,
            f"rows longer than data.context_length {context_length}. To keep them, increase it, or use "
            "data.on_long_row truncate or split",
            counts.examples,
        ),
        (
            counts.dropped_untrained,
            f"rows without a loss token within {context_length} tokens. To keep them, increase data.context_length",
            [] if has_cut_rows else counts.examples,
        ),
        (counts.dropped_pieces, "pieces of split rows without a loss token", []),
    )


def _notes(counts: RowCounts, context_length: int) -> list[dict[str, Any]]:
    """What is kept, but may be unintended."""
    return _nonzero(
        (
            counts.truncated_long,
            f"rows cut to data.context_length {context_length}, which loses {counts.cropped_tokens} tokens",
            counts.examples,
        ),
        (counts.split_long, f"rows split at data.context_length {context_length}", counts.examples),
        (counts.untrained, "sequences without a loss token: nothing is learned from them", []),
        (counts.lost_characters, "characters without a token in the vocabulary: they are left out of the text", []),
        (counts.straddling_tokens, "tokens that span a prompt and its answer: they are trained on", []),
    )


def _nonzero(*entries: tuple[int, str, list[str]]) -> list[dict[str, Any]]:
    return [{"why": why, "count": count, "examples": examples} for count, why, examples in entries if count]


def _example(cache: TokenCache, index: int, tokenizer: Tokenizer, max_tokens: int | None) -> dict[str, Any]:
    sequence = cache.sequence(index)
    size = len(sequence.ids)
    is_trained: np.ndarray = sequence.labels != IGNORE_INDEX
    # Nothing predicts the first token.
    is_trained[:1] = False
    head = tail = size
    if max_tokens is not None and size > max_tokens:
        head, tail = max_tokens - max_tokens // 2, size - max_tokens // 2
    changes = np.flatnonzero(is_trained[1:] != is_trained[:-1]) + 1
    edges = sorted({0, head, tail, size, *changes.tolist()})
    runs: list[dict[str, Any]] = []
    before: list[int] = []
    for start, end in pairwise(edges):
        is_omitted = head <= start < tail
        ids = sequence.ids[start:end].tolist()
        pieces = [] if is_omitted else _decode_pieces(ids, before, tokenizer)
        before = sequence.ids[max(0, end - CONTEXT_TOKENS) : end].tolist() if is_omitted else pieces[-1]["ids"]
        text = "".join(piece["text"] for piece in pieces)
        run = {"text": text, "trained": bool(is_trained[start]), "tokens": end - start, "left_out": is_omitted}
        runs.append(run | {"pieces": pieces})
    return {"origin": cache.origin(index), "tokens": size, "trained": sequence.loss_tokens, "runs": runs}


def _decode_pieces(ids: list[int], before: list[int], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The text of each token; tokens that only together make a character are one piece.

    Each is decoded after the piece before it, because some tokenizers drop a space at the start of a text.
    """
    pieces: list[dict[str, Any]] = []
    group: list[int] = []
    for number, token in enumerate(ids, start=1):
        group.append(token)
        text = _decode_after(before, group, tokenizer)
        if text.endswith(REPLACEMENT) and number < len(ids) and len(group) < MAX_GROUP:
            continue
        pieces.append({"ids": group, "text": text or _token_names(group, tokenizer)})
        before, group = group, []
    return pieces


def _decode_after(before: list[int], ids: list[int], tokenizer: Tokenizer) -> str:
    prefix, both = _decode(before, tokenizer), _decode([*before, *ids], tokenizer)
    if not prefix or prefix.endswith(REPLACEMENT) or not both.startswith(prefix):
        return _decode(ids, tokenizer)
    return both.removeprefix(prefix)


def _decode(ids: list[int], tokenizer: Tokenizer) -> str:
    if not ids:
        return ""
    return tokenizer.hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _token_names(ids: list[int], tokenizer: Tokenizer) -> str:
    """Shows ids that decode to no text."""
    names = tokenizer.hf.convert_ids_to_tokens(ids)
    return "".join(name or f"<id {number}>" for name, number in zip(names, ids, strict=True))


def _marked_text(runs: list[dict[str, Any]], use_color: bool) -> str:
    parts = []
    for is_omitted, group in groupby(runs, key=lambda run: run["left_out"]):
        if is_omitted:
            parts.append(f"\n[… {_describe_omitted(list(group))} …]\n")
        else:
            parts += [_mark(escape(run["text"]), run["trained"], use_color) for run in group]
    text = "".join(parts)
    return text if text.endswith("\n") else f"{text}\n"


def _describe_omitted(runs: list[dict[str, Any]]) -> str:
    trained = sum(run["tokens"] for run in runs if run["trained"])
    return f"{plural(sum(run['tokens'] for run in runs), 'token', ',')} omitted, {trained:,} of them trained"


def _mark(text: str, is_trained: bool, use_color: bool) -> str:
    """The mark ends before a final newline. Colors are set on every line, as pagers need it."""
    text, end = (text[:-1], "\n") if text.endswith("\n") else (text, "")
    if use_color:
        style = TRAINED_STYLE if is_trained else CONTEXT_STYLE
        text = "\n".join(f"\x1b[{style}m{line}\x1b[0m" for line in text.split("\n"))
    elif is_trained:
        text = f"⟦{text}⟧"
    return text + end


def _escape_character(character: str) -> str:
    if character in "\n\t":
        return "↵\n" if character == "\n" else "→\t"
    if character < " ":
        return chr(0x2400 + ord(character))
    return "␡" if character == "\x7f" else character.encode("unicode_escape").decode()


def _summary(source: dict[str, Any], context_length: int) -> Iterator[str]:
    yield from _table(_count_table(source))
    if source["lengths"]:
        yield f"length of the rows in tokens: {_describe_lengths(source['lengths'])}"
        yield _describe_longest(source, context_length)
    yield from _bars(source["histogram"], context_length)
    yield from _context_length_lines(source["context_lengths"], context_length)
    if source["refused"]:
        yield f"a run refuses this source: {source['refused']}"
    for title, entries in (("dropped", source["dropped"]), ("kept", source["notes"])):
        for entry in entries:
            yield f"{title} {entry['count']:,}: {escape(entry['why'])}"
            yield from (f"    such as {escape(example)}" for example in entry["examples"])


def _count_table(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values of the counts to show; most only if they are not zero."""
    trained = f"{figures['trained_tokens']:,}  ({100 * figures['trained_share']:.1f} %)"
    always = [
        ("rows", f"{figures['rows']:,}"),
        ("sequences", f"{figures['sequences']:,}"),
        ("tokens", f"{figures['tokens']:,}"),
        ("trained tokens", trained),
    ]
    optional = (
        "bad_rows", "dropped_long", "truncated_long", "split_long", "cropped_tokens", "dropped_untrained", "untrained",
        "straddling_tokens",
    )  # fmt: skip
    return always + [(name.replace("_", " "), f"{figures[name]:,}") for name in optional if figures[name]]


def _table(rows: list[tuple[str, str]]) -> list[str]:
    name_width = max(len(name) for name, _ in rows)
    number_width = max(len(value.partition(" ")[0]) for _, value in rows)
    lines = []
    for name, value in rows:
        number, space, rest = value.partition(" ")
        lines.append(f"  {name:<{name_width}}  {number:>{number_width}}{space}{rest}")
    return lines


def _describe_lengths(lengths: dict[str, float]) -> str:
    return (
        f"{lengths['min']:,} shortest, {lengths['median']:,.6g} median, {lengths['mean']:,.1f} mean, "
        f"{lengths['p90']:,.6g} at 90 %, {lengths['p99']:,.6g} at 99 %, {lengths['max']:,} longest"
    )


def _describe_longest(source: dict[str, Any], context_length: int) -> str:
    lengths = source["lengths"]
    if source["is_split"]:
        longest = f"the longest row has {lengths['max']:,} tokens"
        return f"{longest}: text continues in the next row of data.context_length {context_length:,}, and loses nothing"
    needed = lengths["context_length_needed"]
    now = "which is set" if needed == context_length else f"now {context_length:,}"
    return f"the longest row has {lengths['max']:,} tokens: data.context_length {needed:,} ({now}) holds all"


def _bars(histogram: list[dict[str, int]], context_length: int) -> list[str]:
    if not histogram:
        return []
    largest = max(entry["count"] for entry in histogram)
    spans = [f"{entry['low']:,}-{entry['high']:,}" for entry in histogram]
    span_width, count_width = max(map(len, spans)), len(f"{largest:,}")
    lines = []
    for span, entry in zip(spans, histogram, strict=True):
        if entry["low"] == context_length + 1:
            lines.append(f"  ── data.context_length {context_length:,}: the rows below are longer ──")
        # A bin that is not empty has at least a thin bar.
        bar = "█" * round(BAR_WIDTH * entry["count"] / largest) or ("▏" if entry["count"] else "")
        lines.append(f"  {span:>{span_width}}  {entry['count']:>{count_width},}  {bar}".rstrip())
    return lines


CONTEXT_LENGTH_TITLES = ("context_length", "longer rows", "tokens lost if dropped", "if truncated")


def _context_length_rows(table: list[dict[str, Any]], context_length: int) -> list[tuple[str, ...]]:
    """The table of context lengths as text; empty if every choice keeps everything."""
    if not table or not table[0]["rows"]:
        return []
    return [
        (
            f"{entry['context_length']:,}" + (" (now)" if entry["context_length"] == context_length else ""),
            f"{entry['rows']:,} ({100 * entry['rows_share']:.1f} %)",
            f"{entry['dropped_tokens']:,} ({100 * entry['dropped_share']:.1f} %)",
            f"{entry['truncated_tokens']:,} ({100 * entry['truncated_share']:.1f} %)",
        )
        for entry in table
    ]


def _context_length_lines(table: list[dict[str, Any]], context_length: int) -> list[str]:
    rows = _context_length_rows(table, context_length)
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(CONTEXT_LENGTH_TITLES, *rows, strict=True)]
    return [
        "  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in [CONTEXT_LENGTH_TITLES, *rows]
    ]


STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1b1b; --faint: #5c5c5c; --line: #d5d5d5;
  --mark: #c9efc9; --marked: #0b3d0b; --bar: #3d8b3d; }
@media (prefers-color-scheme: dark) { :root { --back: #161616; --text: #e8e8e8; --faint: #a5a5a5; --line: #3c3c3c;
  --mark: #1d4a24; --marked: #d8ffd8; --bar: #6cc36c; } }
body { background: var(--back); color: var(--text); font: 16px/1.5 system-ui, sans-serif; max-width: 70rem;
  margin: 2rem auto; padding: 0 1rem; }
pre { color: var(--faint); border: 1px solid var(--line); border-radius: 4px; padding: .8rem; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 14px/1.6 ui-monospace, monospace; }
mark { background: var(--mark); color: var(--marked); font-weight: 600; }
span:hover { outline: 1px solid var(--bar); }
table { border-collapse: collapse; margin: .8rem 0; }
td { padding: .1rem 1rem .1rem 0; } td.number { text-align: right; }
td.wide { width: 20rem; } .bar { background: var(--bar); height: .8rem; min-width: 1px; }
.where, .cut { color: var(--faint); font-style: italic; }
"""


def _html_total(report: dict[str, Any]) -> str:
    if len(report["sources"]) < 2:
        return ""
    return f"<h2>All {len(report['sources'])} sources</h2>\n{_html_table(_count_table(report['total']))}"


def _html_source(source: dict[str, Any], context_length: int) -> str:
    lengths = (
        f"<p>Length of the rows in tokens: {_describe_lengths(source['lengths'])}; "
        f"{_describe_longest(source, context_length)}</p>\n"
        if source["lengths"]
        else ""
    )
    refused = f"<p><b>A run refuses this source:</b> {source['refused']}</p>\n" if source["refused"] else ""
    losses = _context_length_rows(source["context_lengths"], context_length)
    return (
        f"<h2>{_html_escape(source['name'])}</h2>\n"
        f"<p>{_html_escape(source['format'])}, {plural(source['files'], 'file', ',')}</p>\n"
        f"{_html_table(_count_table(source))}{lengths}{_html_bars(source['histogram'], context_length)}"
        f"{_html_table([CONTEXT_LENGTH_TITLES, *losses]) if losses else ''}{refused}"
        f"{_html_reasons('Dropped', source['dropped'])}{_html_reasons('Kept', source['notes'])}"
        + "".join(map(_html_example, source["examples"]))
    )


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    cells = (f"<td>{name}</td>" + "".join(f'<td class="number">{value}</td>' for value in rest) for name, *rest in rows)
    return "<table>\n" + "".join(f"<tr>{row}</tr>\n" for row in cells) + "</table>\n"


def _html_bars(histogram: list[dict[str, int]], context_length: int) -> str:
    largest = max((entry["count"] for entry in histogram), default=1)
    rows = ""
    for entry in histogram:
        width = 100 * entry["count"] / largest
        bar = f'<div class="bar" style="width:{width:.2f}%"></div>' if entry["count"] else ""
        if entry["low"] == context_length + 1:
            rows += f'<tr><td></td><td></td><td class="cut">data.context_length {context_length:,}</td></tr>\n'
        rows += (
            f'<tr><td class="number">{entry["low"]:,}-{entry["high"]:,}</td><td class="number">{entry["count"]:,}</td>'
            f'<td class="wide">{bar}</td></tr>\n'
        )
    return f"<table>\n{rows}</table>\n"


def _html_reasons(title: str, entries: list[dict[str, Any]]) -> str:
    text = ""
    for entry in entries:
        examples = "".join(f"<li>{_html_escape(example)}</li>" for example in entry["examples"])
        text += f"<p><b>{title} {entry['count']:,}:</b> {_html_escape(entry['why'])}</p>\n"
        text += f"<ul>{examples}</ul>\n" if examples else ""
    return text


def _html_example(example: dict[str, Any]) -> str:
    parts = []
    for is_omitted, group in groupby(example["runs"], key=lambda run: run["left_out"]):
        if is_omitted:
            parts.append(f'\n<span class="cut">[… {_describe_omitted(list(group))} …]</span>\n')
        else:
            parts += [_html_run(run) for run in group]
    return (
        f'<p class="where">{_html_escape(example["origin"])}: {plural(example["tokens"], "token", ",")}, '
        f"{example['trained']:,} trained</p>\n<pre>{''.join(parts)}</pre>\n"
    )


def _html_run(run: dict[str, Any]) -> str:
    text = ""
    for piece in run["pieces"]:
        ids = f"id{'s' if len(piece['ids']) > 1 else ''} {' '.join(map(str, piece['ids']))}"
        text += f'<span title="{ids}: {_html_escape(repr(piece["text"]))}">{_html_escape(piece["text"])}</span>'
    return f"<mark>{text}</mark>" if run["trained"] else text


def _html_escape(text: str) -> str:
    return html.escape(escape(text))

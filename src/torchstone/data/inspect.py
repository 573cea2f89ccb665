"""What a run would learn from its data, before it does: examples with the trained text marked, counts, lengths.

Figures come from what the cache counted when it was built; ids are read for the examples only, and of a long example
only the beginning and the end become text. `inspect_sources` is for programs (nothing rounded, nothing escaped); the
console and the page show the same to people. Data is not to be trusted with a terminal or a browser: in both,
characters that would steer it are written out.
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
from torchstone.data.encode import Counts
from torchstone.data.formats import IGNORED
from torchstone.data.tokenize import Tokenizer

TOKENS_SHOWN = 400
BAD_ROWS_SHOWN = 3
MOST_BINS = 12
# Lengths are told apart on a linear scale unless the longest lies this many medians away.
FAR = 20
# What a decoder writes for bytes that do not make a character.
BROKEN = "\ufffd"
# More tokens than the broken characters of sound text are ever made of; those of other ids may have no end.
GROUP = 32
# Tokens left out that the first one after them is read after.
CONTEXT = 8
BAR = 30
LEARNED, READ = "1;32", "2"
# Control and format characters, but for those that hold emoji together, and the marks of the console itself.
UNSAFE = regex.compile(r"[[\p{Cc}\p{Cf}\p{Zl}\p{Zp}⟦⟧]--[\u200c\u200d]]", regex.VERSION1)


def inspect_sources(
    caches: Sequence[TokenCache],
    tokenizer: Tokenizer,
    context_length: int,
    rows: int,
    limit: int | None = TOKENS_SHOWN,
) -> dict[str, Any]:
    """Everything there is to say of each source, with `rows` examples of which at most `limit` tokens become text."""
    total = Counts()
    for cache in caches:
        total.add(cache.counts)
    return {
        "tokenizer": tokenizer.source,
        "context_length": context_length,
        "sources": [_source(cache, tokenizer, context_length, rows, limit) for cache in caches],
        "total": _figures(total),
    }


def show_console(found: dict[str, Any], write: Callable[[str], Any], colour: bool) -> None:
    """`found` for a person: what is trained is green and bold, or stands between ⟦ and ⟧ where there are no colours."""
    for source in found["sources"]:
        write(f"{printable(source['name'])}: {source['shape']}, {_several(source['files'], 'file')}\n\n")
        for number, example in enumerate(source["examples"], start=1):
            counted = f"{_several(example['tokens'], 'token')}, {example['trained']:,} trained"
            write(f"example {number}, {printable(example['origin'])}: {counted}\n")
            write(_marked_text(example["runs"], colour) + "\n")
        for line in _summary(source):
            write(f"{line}\n")
        write("\n")
    if len(found["sources"]) > 1:
        write(f"all {len(found['sources'])} sources\n")
        for line in _table(_counted(found["total"])):
            write(f"{line}\n")


def html_page(found: dict[str, Any]) -> str:
    """`found` as one page that needs nothing else: no scripts, no other files, nothing from the network."""
    sources = "".join(map(_html_source, found["sources"]))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>torchstone inspect-data</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        "<h1>What would be trained</h1>\n"
        f"<p>Tokenizer {_safe(found['tokenizer'])}, context length {found['context_length']:,}. "
        f"<mark>Marked text</mark> is trained, the rest is only read; a token under the pointer says its id.</p>\n"
        f"{_html_total(found)}{sources}</body>\n</html>\n"
    )


def printable(text: str) -> str:
    """Text that only prints: newlines and tabs can be seen, whatever else would steer a terminal is written out."""
    return UNSAFE.sub(lambda found: _written_out(found[0]), text)


def _source(
    cache: TokenCache, tokenizer: Tokenizer, context_length: int, rows: int, limit: int | None
) -> dict[str, Any]:
    bad = _first_bad_rows(cache)
    count = min(rows, len(cache))
    chosen = [number * (len(cache) - 1) // max(1, count - 1) for number in range(count)]
    lengths: np.ndarray = np.asarray(cache.lengths)
    return {
        "name": cache.source.name,
        "shape": cache.shape,
        "files": len(cache.source.files),
        **_figures(cache.counts),
        "lengths": _lengths(lengths),
        "histogram": _histogram(lengths),
        "dropped": _dropped(cache, context_length, bad),
        "notes": _notes(cache.counts, context_length),
        "first_bad_rows": bad,
        "quarantine": str(cache.quarantine),
        "examples": [_example(cache, index, tokenizer, limit) for index in chosen],
    }


def _figures(counts: Counts) -> dict[str, Any]:
    figures = {name: value for name, value in asdict(counts).items() if name != "examples"}
    return figures | {"trained_share": counts.trained_tokens / max(1, counts.tokens)}


def _lengths(lengths: np.ndarray) -> dict[str, float]:
    if not len(lengths):
        return {}
    median, p90, p99 = (float(value) for value in np.quantile(lengths, [0.5, 0.9, 0.99]))
    low, high = int(lengths.min()), int(lengths.max())
    return {"min": low, "mean": float(lengths.mean()), "median": median, "p90": p90, "p99": p99, "max": high}


def _histogram(lengths: np.ndarray) -> list[dict[str, int]]:
    """How many sequences have a length from `low` to `high`, both included."""
    if not len(lengths):
        return []
    longest = int(lengths.max())
    if longest <= FAR * np.median(lengths):
        step = next(edge for edge in _round_numbers() if edge * MOST_BINS >= longest)
        edges = list(range(0, longest + step, step))
    else:
        first = float(np.quantile(lengths, 0.01))
        above = (edge for edge in _round_numbers() if edge >= first)
        edges = [0, next(above)]
        while edges[-1] < longest:
            edges.append(next(above))
    # Bins that include their upper edge: 1 to 100, 101 to 200.
    counts, _ = np.histogram(lengths, bins=np.array(edges) + 0.5)
    return [
        {"low": low + 1, "high": high, "count": int(count)}
        for (low, high), count in zip(pairwise(edges), counts, strict=True)
    ]


def _round_numbers() -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, ..."""
    power = 1
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


def _first_bad_rows(cache: TokenCache) -> list[dict[str, Any]]:
    with cache.quarantine.open(encoding="utf-8") as file:
        found = [json.loads(line) for line in islice(file, BAD_ROWS_SHOWN)]
    return [{"file": row["file"], "line": row["line"], "reason": row["reason"]} for row in found]


def _dropped(cache: TokenCache, context_length: int, bad: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a run would not see, why, and how to keep it."""
    counts = cache.counts
    cut = counts.truncated_long or counts.split_long
    return _with_any(
        (
            counts.bad_rows,
            "rows that cannot be read or trained on; a run stops at the first, or leaves them out with data.on_bad_row "
            f"skip. To keep them, correct them: all are in {cache.quarantine}",
            [f"{row['file']}:{row['line']}: {row['reason']}" for row in bad],
        ),
        (
            counts.dropped_long,
            f"rows longer than data.context_length {context_length}. To keep them, make it larger; data.on_long_row "
            "truncate or split keeps a part or the pieces",
            counts.examples,
        ),
        (
            counts.dropped_untrained,
            f"rows with nothing to train on within {context_length} tokens, after cutting. To keep them, make "
            "data.context_length larger",
            [] if cut else counts.examples,
        ),
        (counts.dropped_pieces, "pieces of split rows with nothing to train on", []),
    )


def _notes(counts: Counts, context_length: int) -> list[dict[str, Any]]:
    """What is kept and yet may not be what was meant."""
    return _with_any(
        (
            0 if counts.trained_tokens else counts.rows,
            "rows in which nothing is trained: a run refuses this source",
            [],
        ),
        (
            counts.truncated_long,
            f"rows cut to data.context_length {context_length}, which loses {counts.cropped_tokens} tokens",
            counts.examples,
        ),
        (counts.split_long, f"rows cut into pieces of data.context_length {context_length}", counts.examples),
        (counts.untrained, "sequences without a label to learn: they are kept and teach nothing", []),
        (counts.straddling_tokens, "tokens that lie across a prompt and its answer: they are trained", []),
    )


def _with_any(*found: tuple[int, str, list[str]]) -> list[dict[str, Any]]:
    return [{"why": why, "count": count, "examples": examples} for count, why, examples in found if count]


def _example(cache: TokenCache, index: int, tokenizer: Tokenizer, limit: int | None) -> dict[str, Any]:
    sequence = cache.sequence(index)
    size = len(sequence.ids)
    trained: np.ndarray = sequence.labels != IGNORED
    # The first token has nothing before it that could predict it.
    trained[:1] = False
    head, tail = (size, size) if limit is None or size <= limit else (limit - limit // 2, size - limit // 2)
    changes = np.flatnonzero(trained[1:] != trained[:-1]) + 1
    edges = sorted({0, head, tail, size, *changes.tolist()})
    runs: list[dict[str, Any]] = []
    before: list[int] = []
    for start, end in pairwise(edges):
        left_out = head <= start < tail
        ids = sequence.ids[start:end].tolist()
        pieces = [] if left_out else _pieces(ids, before, tokenizer)
        before = sequence.ids[max(0, end - CONTEXT) : end].tolist() if left_out else pieces[-1]["ids"]
        text = "".join(piece["text"] for piece in pieces)
        run = {"text": text, "trained": bool(trained[start]), "tokens": end - start, "left_out": left_out}
        runs.append(run | {"pieces": pieces})
    return {"origin": cache.origin(index), "tokens": size, "trained": sequence.loss_tokens, "runs": runs}


def _pieces(ids: list[int], before: list[int], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The text that every token adds, tokens that only together make a character being one piece.

    Each is read after the piece before it: some tokenizers drop the space that a text would begin with.
    """
    pieces: list[dict[str, Any]] = []
    group: list[int] = []
    for number, token in enumerate(ids, start=1):
        group.append(token)
        text = _text_after(before, group, tokenizer)
        if text.endswith(BROKEN) and number < len(ids) and len(group) < GROUP:
            continue
        pieces.append({"ids": group, "text": text or _name(group, tokenizer)})
        before, group = group, []
    return pieces


def _text_after(before: list[int], ids: list[int], tokenizer: Tokenizer) -> str:
    already, both = _decoded(before, tokenizer), _decoded([*before, *ids], tokenizer)
    if not already or already.endswith(BROKEN) or not both.startswith(already):
        return _decoded(ids, tokenizer)
    return both.removeprefix(already)


def _decoded(ids: list[int], tokenizer: Tokenizer) -> str:
    if not ids:
        return ""
    return tokenizer.hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _name(ids: list[int], tokenizer: Tokenizer) -> str:
    """For ids that no text comes of, so that they are seen all the same."""
    names = tokenizer.hf.convert_ids_to_tokens(ids)
    return "".join(name or f"<id {number}>" for name, number in zip(names, ids, strict=True))


def _marked_text(runs: list[dict[str, Any]], colour: bool) -> str:
    shown = []
    for left_out, members in groupby(runs, key=lambda run: run["left_out"]):
        if left_out:
            shown.append(f"\n[… {_left_out(list(members))} …]\n")
        else:
            shown += [_marked(printable(run["text"]), run["trained"], colour) for run in members]
    text = "".join(shown)
    return text if text.endswith("\n") else f"{text}\n"


def _left_out(runs: list[dict[str, Any]]) -> str:
    trained = sum(run["tokens"] for run in runs if run["trained"])
    return f"{_several(sum(run['tokens'] for run in runs), 'token')} left out, {trained:,} of them trained"


def _marked(text: str, trained: bool, colour: bool) -> str:
    """The mark ends before a last line break; colours are set for every line anew, as pagers want it."""
    text, ends = (text[:-1], "\n") if text.endswith("\n") else (text, "")
    if colour:
        text = "\n".join(f"\x1b[{LEARNED if trained else READ}m{line}\x1b[0m" for line in text.split("\n"))
    elif trained:
        text = f"⟦{text}⟧"
    return text + ends


def _written_out(character: str) -> str:
    if character in "\n\t":
        return "↵\n" if character == "\n" else "→\t"
    if character < " ":
        return chr(0x2400 + ord(character))
    return "␡" if character == "\x7f" else character.encode("unicode_escape").decode()


def _several(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _summary(source: dict[str, Any]) -> Iterator[str]:
    yield from _table(_counted(source))
    if source["lengths"]:
        yield f"length in tokens: {_lengths_line(source['lengths'])}"
    yield from _bars(source["histogram"])
    for title, entries in (("dropped", source["dropped"]), ("kept", source["notes"])):
        for entry in entries:
            yield f"{title} {entry['count']:,}: {printable(entry['why'])}"
            yield from (f"    such as {printable(example)}" for example in entry["examples"])


def _counted(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """The counts that are worth a line, by their names for people."""
    trained = f"{figures['trained_tokens']:,}  ({100 * figures['trained_share']:.1f} %)"
    counted = [
        ("rows", f"{figures['rows']:,}"),
        ("sequences", f"{figures['sequences']:,}"),
        ("tokens", f"{figures['tokens']:,}"),
        ("trained tokens", trained),
    ]
    rest = (
        "bad_rows", "dropped_long", "truncated_long", "split_long", "cropped_tokens", "dropped_untrained", "untrained",
        "straddling_tokens",
    )  # fmt: skip
    return counted + [(name.replace("_", " "), f"{figures[name]:,}") for name in rest if figures[name]]


def _table(counted: list[tuple[str, str]]) -> list[str]:
    names = max(len(name) for name, _ in counted)
    numbers = max(len(value.partition(" ")[0]) for _, value in counted)
    lines = []
    for name, value in counted:
        number, space, more = value.partition(" ")
        lines.append(f"  {name:<{names}}  {number:>{numbers}}{space}{more}")
    return lines


def _lengths_line(lengths: dict[str, float]) -> str:
    return (
        f"{lengths['min']:,} shortest, {lengths['median']:,.6g} median, {lengths['mean']:,.1f} mean, "
        f"{lengths['p90']:,.6g} at 90 %, {lengths['p99']:,.6g} at 99 %, {lengths['max']:,} longest"
    )


def _bars(histogram: list[dict[str, int]]) -> list[str]:
    if not histogram:
        return []
    most = max(entry["count"] for entry in histogram)
    spans = [f"{entry['low']:,}-{entry['high']:,}" for entry in histogram]
    wide, wide_count = max(map(len, spans)), len(f"{most:,}")
    lines = []
    for span, entry in zip(spans, histogram, strict=True):
        # A bin that is not empty is not drawn as if it were.
        bar = "█" * round(BAR * entry["count"] / most) or ("▏" if entry["count"] else "")
        lines.append(f"  {span:>{wide}}  {entry['count']:>{wide_count},}  {bar}".rstrip())
    return lines


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


def _html_total(found: dict[str, Any]) -> str:
    if len(found["sources"]) < 2:
        return ""
    return f"<h2>All {len(found['sources'])} sources</h2>\n{_html_table(_counted(found['total']))}"


def _html_source(source: dict[str, Any]) -> str:
    lengths = f"<p>Length in tokens: {_lengths_line(source['lengths'])}</p>\n" if source["lengths"] else ""
    return (
        f"<h2>{_safe(source['name'])}</h2>\n<p>{_safe(source['shape'])}, {_several(source['files'], 'file')}</p>\n"
        f"{_html_table(_counted(source))}{lengths}{_html_bars(source['histogram'])}"
        f"{_html_reasons('Dropped', source['dropped'])}{_html_reasons('Kept', source['notes'])}"
        + "".join(map(_html_example, source["examples"]))
    )


def _html_table(counted: list[tuple[str, str]]) -> str:
    rows = "".join(f'<tr><td>{name}</td><td class="number">{value}</td></tr>\n' for name, value in counted)
    return f"<table>\n{rows}</table>\n"


def _html_bars(histogram: list[dict[str, int]]) -> str:
    most = max((entry["count"] for entry in histogram), default=1)
    rows = ""
    for entry in histogram:
        width = 100 * entry["count"] / most
        bar = f'<div class="bar" style="width:{width:.2f}%"></div>' if entry["count"] else ""
        rows += (
            f'<tr><td class="number">{entry["low"]:,}-{entry["high"]:,}</td><td class="number">{entry["count"]:,}</td>'
            f'<td class="wide">{bar}</td></tr>\n'
        )
    return f"<table>\n{rows}</table>\n"


def _html_reasons(title: str, entries: list[dict[str, Any]]) -> str:
    shown = ""
    for entry in entries:
        examples = "".join(f"<li>{_safe(example)}</li>" for example in entry["examples"])
        shown += f"<p><b>{title} {entry['count']:,}:</b> {_safe(entry['why'])}</p>\n"
        shown += f"<ul>{examples}</ul>\n" if examples else ""
    return shown


def _html_example(example: dict[str, Any]) -> str:
    shown = []
    for left_out, members in groupby(example["runs"], key=lambda run: run["left_out"]):
        if left_out:
            shown.append(f'\n<span class="cut">[… {_left_out(list(members))} …]</span>\n')
        else:
            shown += [_html_run(run) for run in members]
    return (
        f'<p class="where">{_safe(example["origin"])}: {_several(example["tokens"], "token")}, '
        f"{example['trained']:,} trained</p>\n<pre>{''.join(shown)}</pre>\n"
    )


def _html_run(run: dict[str, Any]) -> str:
    text = ""
    for piece in run["pieces"]:
        ids = f"id{'s' if len(piece['ids']) > 1 else ''} {' '.join(map(str, piece['ids']))}"
        text += f'<span title="{ids}: {_safe(repr(piece["text"]))}">{_safe(piece["text"])}</span>'
    return f"<mark>{text}</mark>" if run["trained"] else text


def _safe(text: str) -> str:
    return html.escape(printable(text))

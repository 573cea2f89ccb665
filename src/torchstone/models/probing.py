"""Whether a model is causal, and how packed documents can be kept apart in it: found by running it, not by its name.

Hundreds of classes read masks and positions each in its own way, and one that ignores a mask trains on without a sign.
So a model that is loaded is run on a few made-up tokens. A token must not see what comes after it, a row must not see
another row, and documents packed into one row must give the logits that each gives alone. A comparison counts only
where it can fail: faults are put in on purpose (no boundaries, no window), and the limit must tell them from rounding.

It costs some eight forward passes over at most 600 tokens at every load.

Shapes: B rows, T tokens, N compared positions, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchstone.errors import CheckpointError, UsageError
from torchstone.models.attention import PADDING
from torchstone.models.transformers_folder import first_line, positive

if TYPE_CHECKING:
    from torchstone.models.fallback import Fallback

# How packed documents can be kept apart, in the order in which they are tried.
WAYS = {
    "layer masks": "a block mask for each kind of layer",
    "mask": "one block mask for all layers",
    "window mask": "one block mask with the sliding window in it",
    "positions": "positions that start again with every document",
}
WINDOW = re.compile(r"(^|_)window(_size)?$|^attention_chunk_size$")


@dataclass(frozen=True)
class Limits:
    """How far two computations of the same logits may be apart, relative to the logits' spread.

    `same`: in other shapes, so with other roundings. `unseen`: in the same shapes, where only the experts of a mixture
    get other batches. In 16 bits a router may send a token elsewhere for a rounding, so there `same` is asked of the
    middle position and not of the worst.
    """

    same: float
    unseen: float
    unseen_by_experts: float
    middle: bool


LIMITS = {
    torch.float64: Limits(1e-9, 1e-12, 1e-12, False),
    torch.float32: Limits(5e-5, 2e-6, 2e-6, False),
    torch.float16: Limits(1e-2, 0.0, 2e-3, True),
    torch.bfloat16: Limits(5e-2, 0.0, 1e-2, True),
}
# A fault that was put in on purpose must differ by this much more than the computation that is to be trusted.
TOLD_APART = 10
DOCUMENTS = [[7, 13, 5], [11, 4, 9]]
# Far into a row, absolute numbers of columns (as ALiBi uses) lose digits that a document alone keeps.
FAR = 512
FILLER = 32
SMALL_WINDOW = 4
LONGEST_REAL_WINDOW = 512


def check_causal(module: Fallback, folder: Path) -> None:
    """A token sees nothing after it, and a row nothing of another row."""
    name = type(module.hf).__name__
    rows, limits, cut = rows_of([[12], [12]], module), limits_of(module), 7
    other = (rows.ids + 1 + module.vocab_size // 2) % module.vocab_size
    later, neighbour = rows.ids.clone(), rows.ids.clone()
    later[0, cut:], neighbour[1] = other[0, cut:], other[1]
    try:
        plain, with_later, with_neighbour = (module(ids, rows.positions) for ids in (rows.ids, later, neighbour))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UsageError(
            f"{folder}: {name} does not run on token ids alone: {type(error).__name__}: {first_line(error)}"
        ) from error
    if plain.shape[:2] != rows.ids.shape:
        raise UsageError(f"{folder}: {name} gives logits of shape {list(plain.shape)} for ids {list(rows.ids.shape)}")
    if not bool(plain.isfinite().all()):
        raise CheckpointError(f"{folder}: {name} gives logits that are not finite: the weights hold NaN or overflow")
    if not _difference(with_later[0, :cut], plain[0, :cut]) <= limits.unseen:
        raise UsageError(
            f"{folder}: {name} is not causal: a token sees what comes after it",
            "an encoder cannot be trained as a decoder",
        )
    if not _difference(with_neighbour[0], plain[0]) <= limits.unseen:
        raise UsageError(f"{folder}: {name} mixes the rows of a batch: the batch size would change its results")


def find_packing(module: Fallback) -> tuple[str | None, str | None]:
    """The first of WAYS by which packed documents give what each gives alone; else the reason why none does."""
    config = module.hf.config.get_text_config()
    windows = windows_of(config)
    effect = _effect_of_small_windows(module, config, windows)
    shrinkable = effect > TOLD_APART * limits_of(module).unseen_by_experts
    longest = max(windows.values(), default=0)
    if windows and not shrinkable and longest > LONGEST_REAL_WINDOW:
        return None, f"its window of {longest} tokens is not the one in config.json, and too long to be probed"
    reasons = []
    # Windows of thousands of tokens become a few, so that rows of a few tokens meet them.
    with _replaced(config, _small(windows) if shrinkable else {}):
        probes = _probes(module, 0 if shrinkable else longest, effect if shrinkable else float("inf"))
        for way in _ways_for(config, windows):
            reason = next((why for probe in probes if (why := _why_not(module, way, probe))), None)
            if reason is None:
                return way, None
            reasons.append(f"with {WAYS[way]}, {reason}")
    return None, f"{type(module.hf).__name__} does not keep packed documents apart: {'; '.join(reasons)}"


def limits_of(module: Fallback) -> Limits:
    limits = LIMITS[module.hf.get_input_embeddings().weight.dtype]
    settings = module.hf.config.get_text_config().to_dict()
    experts = any("expert" in key and positive(value) for key, value in settings.items())
    return replace(limits, unseen=limits.unseen_by_experts) if experts else limits


@dataclass(frozen=True)
class Rows:
    ids: Tensor
    positions: Tensor
    docs: Tensor


def rows_of(lengths: list[list[int]], module: Fallback, seed: int = 0) -> Rows:
    """Rows of documents with these lengths, padded on the right; a document's tokens depend on its place alone."""
    width = max(sum(row) for row in lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    positions, docs = torch.zeros_like(ids), torch.full_like(ids, PADDING)
    generator = torch.Generator().manual_seed(seed)
    for row, sizes in enumerate(lengths):
        start = 0
        for document, size in enumerate(sizes):
            here = slice(start, start + size)
            ids[row, here] = torch.randint(0, module.vocab_size, (size,), generator=generator)
            positions[row, here] = torch.arange(size)
            docs[row, here] = document
            start += size
    return Rows(*(tensor.to(module.device) for tensor in (ids, positions, docs)))


def windows_of(config: Any) -> dict[str, int]:
    """The keys of config.json that limit how far back a token sees."""
    if getattr(config, "use_sliding_window", None) is False:
        return {}
    settings = config.to_dict()
    return {key: value for key, value in settings.items() if WINDOW.search(key) and type(value) is int and value > 0}


def _difference(got: Tensor, wanted: Tensor, middle: bool = False) -> float:
    """Of logits [N, V]: at the worst position, or at the middle one; infinite where a number is none."""
    got, wanted = got.double(), wanted.double()
    spread = (wanted - wanted.mean(dim=-1, keepdim=True)).norm(dim=-1)
    per_position = (got - wanted).norm(dim=-1) / spread.clamp_min(1e-30)
    value = (per_position.median() if middle else per_position.max()).item()
    return value if value == value else float("inf")


def _effect_of_small_windows(module: Fallback, config: Any, windows: dict[str, int]) -> float:
    """How much the logits of a document change. Not at all where the model keeps its window elsewhere."""
    if not windows:
        return 0.0
    # Against a window that the document does not meet: the config's own may be small already.
    rows = rows_of([[max(DOCUMENTS[0])]], module)
    wide = dict.fromkeys(windows, 2 * rows.ids.shape[1])
    with _replaced(config, wide):
        wanted = module(rows.ids, rows.positions)
    with _replaced(config, _small(windows)):
        got = module(rows.ids, rows.positions)
    return _difference(got[0], wanted[0])


def _small(windows: dict[str, int]) -> dict[str, int]:
    return {key: min(value, SMALL_WINDOW) for key, value in windows.items()}


@contextmanager
def _replaced(config: Any, values: dict[str, int]) -> Iterator[None]:
    own = {key: getattr(config, key) for key in values}
    for key, value in values.items():
        setattr(config, key, value)
    try:
        yield
    finally:
        for key, value in own.items():
            setattr(config, key, value)


@dataclass(frozen=True)
class _Probe:
    """Packed rows, which of their tokens are compared, what these give alone, and what a fault would give."""

    rows: Rows
    checked_BT: Tensor
    changed_BT: Tensor
    alone_NV: Tensor
    fault: float


def _probes(module: Fallback, longest_window: int, window_fault: float) -> list[_Probe]:
    few, far, fillers = rows_of(DOCUMENTS, module), *_far_row(module)
    last = far.docs >= fillers
    probes = [
        _probe(module, few, few.docs != PADDING, few.docs == 0, window_fault),
        _probe(module, far, last, ~last, float("inf")),
    ]
    if longest_window > 0:
        long = rows_of([[longest_window + 9, 5], [5, longest_window + 9]], module)
        probes.append(_probe(module, long, long.docs != PADDING, long.docs == 0, float("inf")))
    return probes


def _far_row(module: Fallback) -> tuple[Rows, int]:
    """Documents at the end of a long row, and how many fill the row before them."""
    room = FAR if module.max_positions is None else min(FAR, module.max_positions - sum(DOCUMENTS[0]))
    fillers = max(1, room // FILLER)
    return rows_of([[FILLER] * fillers + DOCUMENTS[0]], module), fillers


def _probe(module: Fallback, rows: Rows, checked_BT: Tensor, changed_BT: Tensor, fault: float) -> _Probe:
    alone_NV = _alone(module, rows, checked_BT)
    width = rows.ids.shape[1]
    if module.max_positions is None or width <= module.max_positions:
        # One fault is put in on purpose: no boundaries at all.
        unbounded = module(rows.ids, torch.arange(width, device=rows.ids.device).expand_as(rows.ids))
        fault = min(fault, _difference(unbounded[checked_BT], alone_NV, limits_of(module).middle))
    return _Probe(rows, checked_BT, changed_BT, alone_NV, fault)


def _alone(module: Fallback, rows: Rows, checked_BT: Tensor) -> Tensor:
    """The logits of the checked documents, each in a row of its own."""
    documents = [
        rows.ids[row][checked_BT[row] & (rows.docs[row] == document)]
        for row in range(rows.ids.shape[0])
        for document in rows.docs[row][checked_BT[row]].unique().tolist()
    ]
    ids = nn.utils.rnn.pad_sequence(documents, batch_first=True)
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    logits = module(ids, positions)
    return torch.cat([logits[row, : len(document)] for row, document in enumerate(documents)])


def _ways_for(config: Any, windows: dict[str, int]) -> list[str]:
    kinds = set(getattr(config, "layer_types", None) or ())
    by_layer = bool(kinds) and kinds <= {"full_attention", "sliding_attention", "chunked_attention"}
    possible = {"layer masks": by_layer, "mask": True, "window mask": len(windows) == 1, "positions": True}
    return [way for way in WAYS if possible[way]]


def _why_not(module: Fallback, way: str, probe: _Probe) -> str | None:
    """What is wrong with a way of packing, or None."""
    rows, limits = probe.rows, limits_of(module)
    other = (rows.ids + 1 + module.vocab_size // 2) % module.vocab_size
    changed = torch.where(probe.changed_BT, other, rows.ids)

    def packed(ids: Tensor) -> Tensor:
        return module.packed(way, ids, rows.positions, rows.docs)

    try:
        logits, after_change = packed(rows.ids), packed(changed)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"it does not run ({type(error).__name__})"
    untouched = probe.checked_BT & ~probe.changed_BT
    seen = _difference(after_change[untouched], logits[untouched])
    if not seen <= limits.unseen:
        return f"a document sees another one (its logits change by {seen:.1e} of their spread)"
    apart = _difference(logits[probe.checked_BT], probe.alone_NV, limits.middle)
    if not apart <= limits.same:
        return f"a document gives other logits than alone ({apart:.1e} of their spread)"
    if apart * TOLD_APART > probe.fault:
        return f"right and wrong cannot be told apart in {module.hf.dtype} ({apart:.1e} against {probe.fault:.1e})"
    return None

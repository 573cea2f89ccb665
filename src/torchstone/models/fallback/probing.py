"""Runs a model to find out whether it is causal and which method separates its packed documents.

Hundreds of Transformers classes read masks and positions each in its own way, and one that ignores a mask trains
without any error. So a loaded model is run on a few random tokens. A token must not see later tokens, a row must not
see another row, and documents packed into one row must get the same logits as alone. A comparison counts only
if it can fail: faults are planted (no boundaries, no window), and the limit must distinguish them from rounding.

It costs about eight forward passes over at most 600 tokens at every load.

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

from torchstone.errors import CheckpointError, UsageError, first_line
from torchstone.models.attention import PADDING_DOC_ID

if TYPE_CHECKING:
    from torchstone.models.fallback.module import FallbackModule

# Methods to separate packed documents, in the order in which they are tried.
PACKING_METHODS = {
    "layer masks": "a block-diagonal mask per layer type",
    "mask": "one block-diagonal mask for all layers",
    "window mask": "one block-diagonal mask that includes the sliding window",
    "positions": "positions that restart with every document",
}
WINDOW_KEY = re.compile(r"(^|_)window(_size)?$|^attention_chunk_size$")


@dataclass(frozen=True)
class Tolerances:
    """How far two computations of the same logits may differ, relative to the logits' spread.

    `rounding` is for computations in different shapes, which round differently. `leak` is for inputs that a token must
    not see: the shapes are the same, and only the experts of an MoE get different batches. In 16 bits rounding may make
    a router choose a different expert, so there `rounding` applies to the median position and not to the worst.
    """

    rounding: float
    leak: float
    leak_with_experts: float
    use_median: bool


TOLERANCES = {
    torch.float64: Tolerances(1e-9, 1e-12, 1e-12, False),
    torch.float32: Tolerances(5e-5, 2e-6, 2e-6, False),
    torch.float16: Tolerances(1e-2, 0.0, 2e-3, True),
    torch.bfloat16: Tolerances(5e-2, 0.0, 1e-2, True),
}
# A planted fault must change the logits by this factor more than the method under test.
FAULT_MARGIN = 10
DOCUMENT_LENGTHS = [[7, 13, 5], [11, 4, 9]]
# Far into a row, absolute column indices (as ALiBi uses) lose precision that they have in a document alone.
FAR_TOKENS = 512
FILLER_LENGTH = 32
SMALL_WINDOW = 4
MAX_PROBED_WINDOW = 512


def check_causal(module: FallbackModule, folder: Path) -> None:
    """Raises if a token sees later tokens, or a row sees another row."""
    name = type(module.hf).__name__
    batch, tolerances, cut = make_probe_batch([[12], [12]], module), get_tolerances(module), 7
    other = (batch.ids + 1 + module.vocab_size // 2) % module.vocab_size
    later, neighbor = batch.ids.clone(), batch.ids.clone()
    later[0, cut:], neighbor[1] = other[0, cut:], other[1]
    try:
        plain, with_later, with_neighbor = (module(ids, batch.positions) for ids in (batch.ids, later, neighbor))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UsageError(
            f"{folder}: {name} does not run on token ids alone: {type(error).__name__}: {first_line(error)}"
        ) from error
    if plain.shape[:2] != batch.ids.shape:
        raise UsageError(
            f"{folder}: {name} returns logits of shape {list(plain.shape)} for ids of shape {list(batch.ids.shape)}"
        )
    if not bool(plain.isfinite().all()):
        raise CheckpointError(f"{folder}: {name} returns logits that are not finite: the weights have NaN or overflow")
    if not _difference(with_later[0, :cut], plain[0, :cut]) <= tolerances.leak:
        raise UsageError(
            f"{folder}: {name} is not causal: a token sees later tokens", "an encoder cannot be trained as a decoder"
        )
    if not _difference(with_neighbor[0], plain[0]) <= tolerances.leak:
        raise UsageError(f"{folder}: {name} mixes the rows of a batch: the batch size would change its results")


def find_packing_method(module: FallbackModule) -> tuple[str | None, str | None]:
    """The first of PACKING_METHODS that gives packed documents the same logits as alone; else None and the reason."""
    config = module.hf.config.get_text_config()
    windows = windows_of(config)
    effect = _small_window_effect(module, config, windows)
    can_shrink = effect > FAULT_MARGIN * get_tolerances(module).leak_with_experts
    max_window = max(windows.values(), default=0)
    if windows and not can_shrink and max_window > MAX_PROBED_WINDOW:
        return None, f"its window of {max_window} tokens is not read from config.json and is too long to probe"
    reasons = []
    # Windows of thousands of tokens are shrunk to a few, so that short rows exceed them.
    with _override_config(config, _shrink(windows) if can_shrink else {}):
        probes = _make_probes(module, 0 if can_shrink else max_window, effect if can_shrink else float("inf"))
        for method in _candidates(config, windows):
            reason = next((error for probe in probes if (error := _packing_error(module, method, probe))), None)
            if reason is None:
                return method, None
            reasons.append(f"with {PACKING_METHODS[method]}, {reason}")
    return None, f"{type(module.hf).__name__} does not separate packed documents: {'; '.join(reasons)}"


def get_tolerances(module: FallbackModule) -> Tolerances:
    tolerances = TOLERANCES[module.hf.get_input_embeddings().weight.dtype]
    settings = module.hf.config.get_text_config().to_dict()
    has_experts = any("expert" in key and is_positive(value) for key, value in settings.items())
    return replace(tolerances, leak=tolerances.leak_with_experts) if has_experts else tolerances


@dataclass(frozen=True)
class ProbeBatch:
    ids: Tensor
    positions: Tensor
    doc_ids: Tensor


def make_probe_batch(lengths: list[list[int]], module: FallbackModule) -> ProbeBatch:
    """Rows of random documents with these lengths, padded on the right."""
    width = max(sum(row) for row in lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    positions, doc_ids = torch.zeros_like(ids), torch.full_like(ids, PADDING_DOC_ID)
    generator = torch.Generator().manual_seed(0)
    for row, sizes in enumerate(lengths):
        start = 0
        for document, size in enumerate(sizes):
            columns = slice(start, start + size)
            ids[row, columns] = torch.randint(0, module.vocab_size, (size,), generator=generator)
            positions[row, columns] = torch.arange(size)
            doc_ids[row, columns] = document
            start += size
    return ProbeBatch(*(tensor.to(module.device) for tensor in (ids, positions, doc_ids)))


def windows_of(config: Any) -> dict[str, int]:
    """The config keys that limit how far back a token sees, with their values."""
    if getattr(config, "use_sliding_window", None) is False:
        return {}
    settings = config.to_dict()
    return {
        key: value for key, value in settings.items() if WINDOW_KEY.search(key) and type(value) is int and value > 0
    }


def is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _difference(logits: Tensor, expected: Tensor, use_median: bool = False) -> float:
    """Relative difference of logits [N, V] at the worst position or at the median one; infinite for NaN."""
    logits, expected = logits.double(), expected.double()
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    per_position = (logits - expected).norm(dim=-1) / spread.clamp_min(1e-30)
    value = (per_position.median() if use_median else per_position.max()).item()
    return value if value == value else float("inf")


def _small_window_effect(module: FallbackModule, config: Any, windows: dict[str, int]) -> float:
    """By how much a smaller window changes a document's logits. Zero if the model does not read it from the config."""
    if not windows:
        return 0.0
    # Compared with a window that the document does not reach: the config's own may be small already.
    batch = make_probe_batch([[max(DOCUMENT_LENGTHS[0])]], module)
    wide = dict.fromkeys(windows, 2 * batch.ids.shape[1])
    with _override_config(config, wide):
        expected = module(batch.ids, batch.positions)
    with _override_config(config, _shrink(windows)):
        logits = module(batch.ids, batch.positions)
    return _difference(logits[0], expected[0])


def _shrink(windows: dict[str, int]) -> dict[str, int]:
    return {key: min(value, SMALL_WINDOW) for key, value in windows.items()}


@contextmanager
def _override_config(config: Any, values: dict[str, int]) -> Iterator[None]:
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
    """Packed rows, which tokens are compared, their logits without packing, and the effect of a planted fault."""

    batch: ProbeBatch
    is_compared_BT: Tensor
    is_changed_BT: Tensor
    unpacked_logits_NV: Tensor
    fault_effect: float


def _make_probes(module: FallbackModule, max_window: int, window_fault: float) -> list[_Probe]:
    short, far, fillers = make_probe_batch(DOCUMENT_LENGTHS, module), *_far_row(module)
    is_last = far.doc_ids >= fillers
    probes = [
        _make_probe(module, short, short.doc_ids != PADDING_DOC_ID, short.doc_ids == 0, window_fault),
        _make_probe(module, far, is_last, ~is_last, float("inf")),
    ]
    if max_window > 0:
        long = make_probe_batch([[max_window + 9, 5], [5, max_window + 9]], module)
        probes.append(_make_probe(module, long, long.doc_ids != PADDING_DOC_ID, long.doc_ids == 0, float("inf")))
    return probes


def _far_row(module: FallbackModule) -> tuple[ProbeBatch, int]:
    """Documents at the end of a long row, and the number of documents before them."""
    tokens = FAR_TOKENS
    if module.max_positions is not None:
        tokens = min(tokens, module.max_positions - sum(DOCUMENT_LENGTHS[0]))
    fillers = max(1, tokens // FILLER_LENGTH)
    return make_probe_batch([[FILLER_LENGTH] * fillers + DOCUMENT_LENGTHS[0]], module), fillers


def _make_probe(
    module: FallbackModule, batch: ProbeBatch, is_compared_BT: Tensor, is_changed_BT: Tensor, fault_effect: float
) -> _Probe:
    unpacked_logits_NV = _unpacked_logits(module, batch, is_compared_BT)
    width = batch.ids.shape[1]
    if module.max_positions is None or width <= module.max_positions:
        # One planted fault: no boundaries at all.
        unbounded = module(batch.ids, torch.arange(width, device=batch.ids.device).expand_as(batch.ids))
        fault_effect = min(
            fault_effect, _difference(unbounded[is_compared_BT], unpacked_logits_NV, get_tolerances(module).use_median)
        )
    return _Probe(batch, is_compared_BT, is_changed_BT, unpacked_logits_NV, fault_effect)


def _unpacked_logits(module: FallbackModule, batch: ProbeBatch, is_compared_BT: Tensor) -> Tensor:
    """The logits of the compared documents, each in a row of its own."""
    documents = [
        batch.ids[row][is_compared_BT[row] & (batch.doc_ids[row] == document)]
        for row in range(batch.ids.shape[0])
        for document in batch.doc_ids[row][is_compared_BT[row]].unique().tolist()
    ]
    ids = nn.utils.rnn.pad_sequence(documents, batch_first=True)
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    logits = module(ids, positions)
    return torch.cat([logits[row, : len(document)] for row, document in enumerate(documents)])


def _candidates(config: Any, windows: dict[str, int]) -> list[str]:
    types = set(getattr(config, "layer_types", None) or ())
    by_layer = bool(types) and types <= {"full_attention", "sliding_attention", "chunked_attention"}
    is_possible = {"layer masks": by_layer, "mask": True, "window mask": len(windows) == 1, "positions": True}
    return [method for method in PACKING_METHODS if is_possible[method]]


def _packing_error(module: FallbackModule, method: str, probe: _Probe) -> str | None:
    """What is wrong with a packing method, or None."""
    batch, tolerances = probe.batch, get_tolerances(module)
    other = (batch.ids + 1 + module.vocab_size // 2) % module.vocab_size
    changed_ids = torch.where(probe.is_changed_BT, other, batch.ids)

    def run_packed(ids: Tensor) -> Tensor:
        return module.forward_packed(method, ids, batch.positions, batch.doc_ids)

    try:
        logits, after_change = run_packed(batch.ids), run_packed(changed_ids)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"it does not run ({type(error).__name__})"
    unchanged = probe.is_compared_BT & ~probe.is_changed_BT
    leak = _difference(after_change[unchanged], logits[unchanged])
    if not leak <= tolerances.leak:
        return f"a document sees another one (its logits change by {leak:.1e} of their spread)"
    error_ = _difference(logits[probe.is_compared_BT], probe.unpacked_logits_NV, tolerances.use_median)
    if not error_ <= tolerances.rounding:
        return f"a document's logits differ from its logits alone ({error_:.1e} of their spread)"
    if error_ * FAULT_MARGIN > probe.fault_effect:
        values = f"{error_:.1e} against {probe.fault_effect:.1e}"
        return f"right and wrong are indistinguishable in {module.hf.dtype} ({values})"
    return None

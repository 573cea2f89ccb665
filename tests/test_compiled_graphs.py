"""Compiled code is compiled in the first step, and never again: fifty random batches, and what comes at the end."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from attention_stand_ins import fa4_backward, fa4_forward
from selection import the_rest
from tiny_families import VOCABULARY
from torchstone.data.collate import BatchShapes, MicroBatch, collate
from torchstone.data.encode import TokenSequence
from torchstone.models.attention import AttentionBackend
from torchstone.models.decoder import Decoder, DecoderConfig, LayerSpec, init_tensor
from torchstone.models.execution import apply_activation_checkpointing, compile_decoder
from torchstone.models.model import NativeModel
from torchstone.models.rope import Rope
from torchstone.parallel.runner import Runner, document_limits, micro_batch_loss

# Of a document, of a row of packed documents, and of a micro-batch in rows.
CONTEXT_LENGTH, MAX_TOKENS, ROWS = 100, 1000, 4
WINDOW = 40
LLAMA = (LayerSpec(), LayerSpec())
MISTRAL = (LayerSpec(window=WINDOW), LayerSpec(window=WINDOW))
# Layers with a window have a RoPE of their own.
GEMMA3 = (LayerSpec(window=WINDOW, rope=Rope(rope_theta=500.0)), LayerSpec())
SMOLLM3 = (LayerSpec(window=WINDOW), LayerSpec(rope=None))


@pytest.fixture(autouse=True)
def reset_dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    interface = ModuleType("interface")
    interface.__dict__.update(_flash_attn_fwd=fa4_forward, _flash_attn_bwd=fa4_backward)
    monkeypatch.setattr("torchstone.models.flash_attention_4._interface", lambda: interface)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Data(NamedTuple):
    """Batches in the shapes of a GPU."""

    packed: bool
    shapes: BatchShapes

    def batch(self, documents: list[list[int]], seed: int = 0) -> MicroBatch:
        """`documents`: the lengths in each row."""
        rng = np.random.default_rng(seed)
        rows = [[rng.integers(0, VOCABULARY, length) for length in row] for row in documents]
        return collate([[TokenSequence(ids, ids) for ids in row] for row in rows], 0, self.shapes)

    def random_batches(self, count: int) -> list[MicroBatch]:
        rng = np.random.default_rng(1)
        batches = []
        for seed in range(count):
            sizes = [int(size) for size in rng.integers(2, CONTEXT_LENGTH + 1, rng.integers(1, 11))]
            rows = [sizes] if self.packed else [[size] for size in sizes[:ROWS]]
            batches.append(self.batch(rows, seed))
        return batches


PACKED = Data(True, BatchShapes(max_length=MAX_TOKENS))
IN_ROWS = Data(False, BatchShapes(max_length=CONTEXT_LENGTH, row_counts=(ROWS,)))


def make_decoder(layers: tuple[LayerSpec, ...] = LLAMA, backend: AttentionBackend = "sdpa") -> Decoder:
    sizes: dict[str, Any] = {"width": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "mlp_width": 24}
    decoder = Decoder(DecoderConfig(vocab_size=VOCABULARY, layers=layers, **sizes), backend)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(init_tensor(decoder.config, name, parameter.shape, std=0.1, seed=0))
    return decoder


class Pair:
    """A decoder, and the same one compiled. `graphs` counts its graphs."""

    def __init__(
        self, data: Data, layers: tuple[LayerSpec, ...] = LLAMA, attention: AttentionBackend = "sdpa",
        recompute: Any = "none", mode: Any = "block", compiler: str = "eager", has_fixed_length: bool = False,
    ) -> None:  # fmt: skip
        self.data, self.plain, self.compiled = data, make_decoder(layers, attention), make_decoder(layers, attention)
        self._counter = CompileCounterWithBackend(compiler)
        apply_activation_checkpointing(self.compiled, recompute)
        compile_decoder(self.compiled, mode, self._counter, has_fixed_length)

    @property
    def graphs(self) -> int:
        return self._counter.frame_count

    def train(self, batch: MicroBatch, compare: bool = True) -> None:
        """Forward and backward; with `compare`, the gradients are those of the plain decoder."""
        gradients = torch.autograd.grad(self._loss(self.compiled, batch), list(self.compiled.parameters()))
        if compare:
            expected = torch.autograd.grad(self._loss(self.plain, batch), list(self.plain.parameters()))
            for tensor, value in zip(gradients, expected, strict=True):
                assert (tensor - value).norm() <= 1e-6 * value.norm()

    @torch.no_grad()
    def validate(self, batch: MicroBatch) -> None:
        assert self._loss(self.compiled, batch).item() == pytest.approx(self._loss(self.plain, batch).item(), rel=1e-6)

    def _loss(self, decoder: Decoder, batch: MicroBatch) -> Tensor:
        longest = self.data.shapes.longest_document(CONTEXT_LENGTH)
        decoder.document_limits = document_limits([batch], self.data.packed, longest)
        doc_ids = batch.doc_ids if self.data.packed else None
        return micro_batch_loss(decoder, batch.ids, batch.positions, doc_ids, batch.labels)


def test_these_batches_have_many_shapes() -> None:
    for data in (PACKED, IN_ROWS):
        batches = data.random_batches(50)
        assert len({batch.ids.shape[1] for batch in batches}) >= 5
    assert len({batch.get_counts().documents for batch in PACKED.random_batches(50)}) >= 5
    assert {len(batch.ids) for batch in IN_ROWS.random_batches(50)} == {ROWS}


# The data, the layers, how they run, and the number of graphs: one is for the last norm.
CASES: dict[str, tuple[Data, tuple[Any, ...], int]] = {
    "packed": (PACKED, (LLAMA, "sdpa", "none", "block", "aot_eager"), 2),
    "packed, windows": (PACKED, (GEMMA3, "sdpa", "elementwise"), 2),
    "packed, a layer without positions": (PACKED, (SMOLLM3, "sdpa", "selective"), 3),
    "packed, fa4": (PACKED, (LLAMA, "fa4", "full", "block", "aot_eager"), 2),
    # The window is a constant of the graph.
    "packed, fa4, windows": (PACKED, (GEMMA3, "fa4"), 3),
    "packed, whole model and head": (PACKED, (GEMMA3, "sdpa", "none", "whole"), 2),
    "rows": (IN_ROWS, (LLAMA, "sdpa", "full", "block", "aot_eager"), 2),
    # A layer with a window has a mask, also for rows that are shorter.
    "rows, windows": (IN_ROWS, (MISTRAL, "sdpa"), 2),
    "rows, some windows": (IN_ROWS, (GEMMA3, "sdpa"), 3),
    "rows, fa4": (IN_ROWS, (LLAMA, "fa4", "elementwise"), 2),
}


FIRST = ("packed", "packed, windows", "packed, fa4", "rows", "rows, windows")


@pytest.mark.parametrize("name", [name if name in FIRST else pytest.param(name, marks=the_rest) for name in CASES])
def test_fifty_batches_compile_one_graph_for_each_kind_of_layer_and_so_does_validation(name: str) -> None:
    data, how, graphs = CASES[name]
    pair = Pair(data, *how)
    for number, batch in enumerate(data.random_batches(50)):
        pair.train(batch, compare=number in (0, 1, 49))
        assert pair.graphs == graphs, f"batch {number}"
    for batch in data.random_batches(5):
        pair.validate(batch)
        assert pair.graphs == 2 * graphs


def test_the_last_batch_of_a_run_has_the_rows_of_the_others() -> None:
    """Also a rank without samples. A graph for one row would be another one."""
    pair = Pair(IN_ROWS)
    pair.train(IN_ROWS.batch([[30], [60], [5], [90]]))
    for documents in ([[70]], [[20], [3]], []):
        pair.train(IN_ROWS.batch(documents), compare=bool(documents))
    assert pair.graphs == 2


def test_rows_of_one_length_compile_for_that_length() -> None:
    shapes = BatchShapes(max_length=CONTEXT_LENGTH, has_fixed_length=True, row_counts=(ROWS,))
    data = Data(False, shapes)
    pair = Pair(data, has_fixed_length=True)
    for documents in ([[100], [99], [100], [98]], [[31]], [[100], [7], [100], [100]], []):
        batch = data.batch(documents)
        assert batch.ids.shape == (ROWS, 104)
        pair.train(batch, compare=bool(documents))
    assert pair.graphs == 2


def test_a_step_may_have_micro_batches_of_two_numbers_of_rows() -> None:
    """Nine rows in micro-batches of at most eight: eight and one, in every step but the last."""
    data = Data(False, BatchShapes(max_length=CONTEXT_LENGTH, row_counts=(1, 8)))
    pair = Pair(data)
    first_step = [data.batch([[size] for size in range(11, 19)]), data.batch([[50]])]
    for batch in first_step:
        pair.train(batch)
    graphs = pair.graphs
    assert graphs == 4
    for number in (5, 8, 1, 3):
        pair.train(data.batch([[10 * n + 10] for n in range(number)]))
    assert pair.graphs == graphs


def test_the_limits_of_a_batch_do_not_outlive_it() -> None:
    """A later call with more documents would merge those beyond the limit."""
    decoder = make_decoder((LayerSpec(),))
    runner = Runner(NativeModel(decoder, {}), torch.device("cuda"), packed=True)
    batch = collate([[TokenSequence(np.arange(4), np.arange(4))] * 3], 0)
    with runner._document_limits([batch]):
        limits = decoder.document_limits
    assert limits is not None
    assert limits.documents >= 3
    assert decoder.document_limits is None

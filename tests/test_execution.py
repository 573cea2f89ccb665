"""How a decoder runs: activation checkpointing and torch.compile change no result, and compile few graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from selection import the_rest
from tiny_families import SHAPES, VOCABULARY, make_model
from torchstone.checkpoint.model_folder import load_model
from torchstone.data.collate import MicroBatch
from torchstone.models.attention import DocumentLimits, build_masks
from torchstone.models.decoder import MLP, Decoder, DecoderConfig, LayerSpec, init_tensor
from torchstone.models.execution import ExecutionOptions, apply_activation_checkpointing, compile_decoder
from torchstone.models.generate import generate

CPU = torch.device("cpu")
LAYERS = (LayerSpec(), LayerSpec(window=5), LayerSpec(rope=None), LayerSpec())
# Families that differ most from one another: soft caps and windows, layer norms and learned positions.
VARIED = ("gemma2", "gpt2")
Inputs = tuple[Tensor, Tensor, Tensor | None]
pytestmark = pytest.mark.usefixtures("reset_dynamo")


def make_decoder(layers: tuple[LayerSpec, ...] = LAYERS) -> Decoder:
    config = DecoderConfig(
        vocab_size=VOCABULARY, width=32, heads=4, kv_heads=2, head_dim=8, mlp_width=48, layers=layers
    )
    decoder = Decoder(config)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(init_tensor(config, name, parameter.shape, std=0.1, seed=0))
    return decoder


def make_inputs(length: int, packed: bool = True, rows: int = 2) -> Inputs:
    """ids, positions and doc_ids; packed rows hold two documents."""
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(length))
    if not packed:
        return ids, torch.arange(length).expand(rows, length), None
    first = length // 3
    positions = torch.cat((torch.arange(first), torch.arange(length - first))).expand(rows, length)
    return ids, positions, (torch.arange(length) >= first).long().expand(rows, length)


def logits_and_gradients(decoder: Decoder, inputs: Inputs) -> list[Tensor]:
    logits = decoder(*inputs)
    return [logits, *torch.autograd.grad(logits.square().mean(), list(decoder.parameters()))]


def assert_close(tensors: list[Tensor], expected: list[Tensor]) -> None:
    for tensor, value in zip(tensors, expected, strict=True):
        assert (tensor - value).norm() <= 1e-6 * value.norm()


class OpCounter(TorchDispatchMode):
    """Counts matmuls and attention calls."""

    def __init__(self) -> None:
        super().__init__()
        self.matmuls = self.attentions = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        self.matmuls += name in ("aten.mm.default", "aten.addmm.default")
        self.attentions += "scaled_dot_product" in name and "backward" not in name
        return function(*args, **(kwargs or {}))


class TestActivationCheckpointing:
    @pytest.mark.parametrize("mode", ["elementwise", "selective", "full"])
    def test_results_are_the_same_bit_for_bit(self, mode: Any) -> None:
        decoder = make_decoder()
        apply_activation_checkpointing(decoder, mode)
        tensors, expected = (logits_and_gradients(each, make_inputs(24)) for each in (decoder, make_decoder()))
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))

    def test_full_recomputes_every_block_and_selective_half_of_the_matmuls(self) -> None:
        counts = {}
        for mode in ("none", "selective", "full"):
            decoder = make_decoder()
            apply_activation_checkpointing(decoder, mode)  # type: ignore[arg-type]
            loss = decoder(*make_inputs(24)).square().mean()
            with OpCounter() as counter:
                loss.backward()
            counts[mode] = (counter.matmuls, counter.attentions)
        depth, matmuls = len(LAYERS), 7
        none = counts["none"][0]
        # Recomputation stops before the last matmul of a block, which the backward pass does not need.
        assert counts["full"] == (none + depth * (matmuls - 1), depth)
        assert counts["none"][1] == counts["selective"][1] == 0
        assert none + depth * (matmuls - 1) // 2 >= counts["selective"][0] >= none + depth * (matmuls // 2 - 1)

    def test_elementwise_saves_neither_norms_nor_gated_activations(self) -> None:
        """In rows of the width: two norms, and an activation of twice the width in each block."""
        saved = {mode: saved_elements(mode) for mode in ("none", "elementwise")}
        rows, width = 3 * 24, make_decoder().config.width
        mlp_width = make_decoder().config.mlp_width
        assert saved["none"] - saved["elementwise"] >= len(LAYERS) * rows * (2 * width + mlp_width)

    def test_without_gradients_nothing_changes(self) -> None:
        decoder, plain = make_decoder(), make_decoder()
        apply_activation_checkpointing(decoder, "full")
        assert generate(decoder, [[1, 2, 3], [4]], 6) == generate(plain, [[1, 2, 3], [4]], 6)
        with torch.no_grad():
            assert torch.equal(decoder(*make_inputs(16)), plain(*make_inputs(16)))


def saved_elements(mode: Any) -> int:
    """The number of elements that the backward pass keeps, without parameters."""
    decoder, storages = make_decoder(), dict[int, int]()
    apply_activation_checkpointing(decoder, mode)
    parameters = {p.untyped_storage().data_ptr() for p in decoder.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = decoder(*make_inputs(24, packed=False, rows=3))
    assert output.requires_grad
    return sum(size for pointer, size in storages.items() if pointer not in parameters)


class TestCompile:
    @pytest.mark.parametrize("mode", ["block", pytest.param("whole", marks=the_rest)])
    def test_many_shapes_compile_few_graphs_without_a_break(self, mode: Any) -> None:
        plain, compiled = make_decoder(LAYERS[1:3]), make_decoder(LAYERS[1:3])
        counter = CompileCounterWithBackend("aot_eager")
        compile_decoder(compiled, mode, counter)
        for length in (16, 24, 8):
            for inputs in (make_inputs(length), make_inputs(length, packed=False, rows=3)):
                assert_close(logits_and_gradients(compiled, inputs), logits_and_gradients(plain, inputs))
        # Two kinds of blocks and the last norm, or the hidden states and the head.
        kinds = 3 if mode == "block" else 2
        # Six batches, and at most four graphs per kind: packed or not, for the first shape and for all others.
        assert kinds <= counter.frame_count <= 4 * kinds
        assert not torch._dynamo.utils.counters["graph_break"]

    @pytest.mark.parametrize("mode", ["block", "whole"])
    def test_a_graph_break_is_an_error(self, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        forward = MLP.forward

        def breaking_forward(self: MLP, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return forward(self, x)

        monkeypatch.setattr(MLP, "forward", breaking_forward)
        decoder = make_decoder()
        compile_decoder(decoder, mode, "eager")
        with pytest.raises(torch._dynamo.exc.Unsupported):
            decoder(*make_inputs(16))

    @pytest.mark.parametrize(
        "family", [family if family in VARIED else pytest.param(family, marks=the_rest) for family in SHAPES]
    )
    def test_every_family_compiles_without_a_break(self, family: str, tmp_path: Path) -> None:
        folder = make_model(tmp_path, family, next(iter(SHAPES[family])))
        execution = ExecutionOptions(fused=("qkv", "gate_up"))
        plain, compiled = (load_model(folder, CPU, execution=execution).module for _ in range(2))
        compile_decoder(compiled, "block", "eager")
        for length in (16, 24):
            assert torch.equal(compiled(*make_inputs(length)), plain(*make_inputs(length)))

    @pytest.mark.parametrize("mode", ["elementwise", "selective", pytest.param("full", marks=the_rest)])
    def test_activation_checkpointing_compiles(self, mode: Any) -> None:
        plain, compiled = make_decoder(LAYERS[:2]), make_decoder(LAYERS[:2])
        apply_activation_checkpointing(compiled, mode)
        compile_decoder(compiled, "block", "aot_eager")
        assert_close(logits_and_gradients(compiled, make_inputs(16)), logits_and_gradients(plain, make_inputs(16)))

    @pytest.mark.parametrize("mode", ["elementwise", pytest.param("selective", marks=the_rest), "full"])
    def test_blocks_of_one_kind_share_a_graph(self, mode: Any) -> None:
        decoder, counter = make_decoder((LayerSpec(),) * 3), CompileCounterWithBackend("eager")
        apply_activation_checkpointing(decoder, mode)
        compile_decoder(decoder, "block", counter)
        logits_and_gradients(decoder, make_inputs(16))
        assert counter.frame_count == 2, "of the blocks, and of the last norm"

    def test_generation_compiles_nothing(self) -> None:
        counter = CompileCounterWithBackend("eager")
        plain, compiled = make_decoder(LAYERS[:2]), make_decoder(LAYERS[:2])
        compile_decoder(compiled, "block", counter)
        assert generate(compiled, [[1, 2, 3], [4]], 5) == generate(plain, [[1, 2, 3], [4]], 5)
        assert counter.frame_count == 0

    def test_parameter_names_stay(self) -> None:
        plain, compiled = make_decoder(), make_decoder()
        compile_decoder(compiled, "block", "eager")
        assert list(dict(compiled.named_parameters())) == list(dict(plain.named_parameters()))


def test_limits_decide_whether_there_is_a_mask_and_max_seqlen_for_rows_of_any_length() -> None:
    """But not for rows that are longer: samples of text may be."""
    kinds, limits = {("sdpa", 8), ("flash", 8)}, DocumentLimits(2, 16)
    for length, max_seqlen in ((6, 16), (12, 16), (24, 24)):
        masks = build_masks(kinds, None, torch.zeros(2, length, dtype=torch.long), None, limits)
        assert masks["sdpa", 8].attn_mask is not None
        assert masks["flash", 8].max_seqlen == max_seqlen
    assert build_masks(kinds, None, torch.zeros(2, 6, dtype=torch.long), None)["sdpa", 8].attn_mask is None


def test_limits_of_documents_give_the_same_documents() -> None:
    """Those that are missing are empty, at the end."""
    doc_ids = torch.tensor([[0, 0, 1, 1, 1, -1], [0, 1, 2, 2, -1, -1]])
    positions = torch.zeros_like(doc_ids)
    kinds = {("flash", None)}
    exact = build_masks(kinds, doc_ids, positions, None)["flash", None]
    bounded = build_masks(kinds, doc_ids, positions, None, DocumentLimits(8, 4))["flash", None]
    assert exact.cu_seqlens.tolist() == [0, 2, 5, 6, 7, 8, 10, 12]
    assert bounded.cu_seqlens.tolist() == [0, 2, 5, 6, 7, 8, 10, 12, 12]
    assert (exact.max_seqlen, bounded.max_seqlen) == (4, 4)
    assert MicroBatch(doc_ids, doc_ids, positions, doc_ids).get_counts()[1:] == (7, 3)

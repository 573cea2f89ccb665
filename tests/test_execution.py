"""How a decoder runs: recomputing and compiling change no number, keep what they say, and compile a bounded number of
times without a graph break."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from tiny_families import SHAPES, VOCABULARY, make_model
from torchstone.errors import UsageError
from torchstone.models.decoder import MLP, Decoder, DecoderConfig, LayerKind
from torchstone.models.execution import Execution, compile_model, recompute_activations
from torchstone.models.generate import generate
from torchstone.models.opening import load_model

CPU = torch.device("cpu")
KINDS = (LayerKind(), LayerKind(window=5), LayerKind(rope=None), LayerKind())


@pytest.fixture(autouse=True)
def anew() -> None:
    torch._dynamo.reset()


def decoder(layers: tuple[LayerKind, ...] = KINDS) -> Decoder:
    config = DecoderConfig(
        vocab_size=VOCABULARY, width=32, heads=4, kv_heads=2, head_size=8, mlp_width=48, layers=layers
    )
    made = Decoder(config)
    made.initialise(0.1, seed=0)
    return made


def rows(length: int, packed: bool = True, count: int = 2) -> tuple[Tensor, Tensor, Tensor | None]:
    ids = torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(length))
    cut = length // 3
    positions = torch.cat((torch.arange(cut), torch.arange(length - cut))).expand(count, length)
    docs = (torch.arange(length) >= cut).long().expand(count, length)
    return (ids, positions, docs) if packed else (ids, torch.arange(length).expand(count, length), None)


def gradients(module: Decoder, batch: tuple[Tensor, Tensor, Tensor | None]) -> list[Tensor]:
    logits = module(*batch)
    return [logits, *torch.autograd.grad(logits.square().mean(), list(module.parameters()))]


class Products(TorchDispatchMode):
    """Counts matrix products and attention calls."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.attentions = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        self.products += name in ("aten.mm.default", "aten.addmm.default")
        self.attentions += "scaled_dot_product" in name and "backward" not in name
        return function(*args, **(kwargs or {}))


class TestRecompute:
    @pytest.mark.parametrize("how", ["selective", "full"])
    def test_the_numbers_are_the_same_bit_for_bit(self, how: Any) -> None:
        plain, other = decoder(), decoder()
        recompute_activations(other, how)
        for got, wanted in zip(gradients(other, rows(24)), gradients(plain, rows(24)), strict=True):
            assert torch.equal(got, wanted)

    def test_full_computes_every_block_again_and_selective_half_of_its_products(self) -> None:
        counts = {}
        for how in ("none", "selective", "full"):
            module = decoder()
            recompute_activations(module, how)  # type: ignore[arg-type]
            loss = module(*rows(24)).square().mean()
            with Products() as seen:
                loss.backward()
            counts[how] = (seen.products, seen.attentions)
        depth, products = len(KINDS), 7
        none = counts["none"][0]
        # The last product of a block is not needed to go backward, so recomputing stops before it.
        assert counts["full"] == (none + depth * (products - 1), depth)
        assert counts["none"][1] == counts["selective"][1] == 0
        assert none + depth * (products - 1) // 2 >= counts["selective"][0] >= none + depth * (products // 2 - 1)

    def test_nothing_is_recomputed_without_gradients_and_while_generating(self) -> None:
        module = decoder()
        recompute_activations(module, "full")
        prompts = [[1, 2, 3], [4]]
        wanted = generate(decoder(), prompts, 6)
        assert generate(module, prompts, 6) == wanted
        with torch.no_grad():
            assert torch.equal(module(*rows(16)), decoder()(*rows(16)))


class TestCompile:
    @pytest.mark.parametrize("how", ["block", "whole"])
    def test_no_graph_breaks_and_few_graphs_over_many_shapes(self, how: Any) -> None:
        """Compiled with fullgraph, a break would be an error; graphs are counted over shapes, packed and not."""
        plain, compiled = decoder(KINDS[:3]), decoder(KINDS[:3])
        counter = CompileCounterWithBackend("aot_eager")
        compile_model(compiled, how, counter)
        for length in (16, 24, 40, 8, 64):
            for batch in (rows(length), rows(length, packed=False, count=3)):
                for got, wanted in zip(gradients(compiled, batch), gradients(plain, batch), strict=True):
                    assert (got - wanted).norm() <= 1e-6 * wanted.norm()
        kinds = 3 if how == "block" else 1
        # Packed and not, for the first shape and for any: ten batches, and no more than these.
        assert kinds <= counter.frame_count <= 4 * kinds
        assert not torch._dynamo.utils.counters["graph_break"]

    @pytest.mark.parametrize("how", ["block", "whole"])
    def test_a_graph_break_is_an_error(self, how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        forward = MLP.forward

        def breaking(self: MLP, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return forward(self, x)

        monkeypatch.setattr(MLP, "forward", breaking)
        module = decoder()
        compile_model(module, how, "eager")
        with pytest.raises(torch._dynamo.exc.Unsupported):
            module(*rows(16))

    @pytest.mark.parametrize("family", SHAPES)
    def test_every_family_compiles_without_a_break(self, family: str, tmp_path: Path) -> None:
        shape = next(iter(SHAPES[family]))
        folder = make_model(tmp_path, family, shape)
        plain = load_model(folder, CPU, execution=Execution(fused=("qkv", "gate_up")))
        compiled = load_model(folder, CPU, execution=Execution(fused=("qkv", "gate_up")))
        compile_model(compiled.module, "block", "eager")
        for length in (16, 24):
            assert torch.equal(compiled.module(*rows(length)), plain.module(*rows(length)))

    @pytest.mark.parametrize("recompute", ["selective", "full"])
    def test_recomputing_compiles_too(self, recompute: Any) -> None:
        plain, compiled = decoder(KINDS[:2]), decoder(KINDS[:2])
        recompute_activations(compiled, recompute)
        compile_model(compiled, "block", "aot_eager")
        for got, wanted in zip(gradients(compiled, rows(16)), gradients(plain, rows(16)), strict=True):
            assert (got - wanted).norm() <= 1e-6 * wanted.norm()

    def test_generation_compiles_nothing(self) -> None:
        counter = CompileCounterWithBackend("eager")
        module = decoder(KINDS[:2])
        compile_model(module, "block", counter)
        assert generate(module, [[1, 2, 3], [4]], 5) == generate(decoder(KINDS[:2]), [[1, 2, 3], [4]], 5)
        assert counter.frame_count == 0

    def test_names_of_parameters_stay(self) -> None:
        plain, compiled = decoder(), decoder()
        compile_model(compiled, "block", "eager")
        assert list(dict(compiled.named_parameters())) == list(dict(plain.named_parameters()))


@pytest.mark.parametrize(
    ("execution", "expected"),
    [
        (Execution(implementation="fallback", compile="block"), "model.compile is for the native decoder"),
        (Execution(implementation="fallback", recompute="selective"), "model.recompute selective"),
        (Execution(implementation="fallback", fused=("qkv",)), "model.fused is for the native decoder"),
    ],
)
def test_what_transformers_models_cannot_do_is_refused(execution: Execution, expected: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=expected):
        load_model(make_model(tmp_path, "llama"), CPU, execution=execution)

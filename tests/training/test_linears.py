"""Matrices that several ranks share against the same matrices in one piece: outputs, and every gradient.

The styles are those of `table` in parallel/tensor.py, taken from it by name and put on a bare nn.Linear, RMSNorm or
nn.Embedding. Each rank computes its share; the shares are put together and compared with the plain module on the whole
input. Forward passes alone would not do: a gradient that is a part on each rank, and never summed, shows in none.

In fp32 both may differ by 1e-6 of their norm. In bf16 the shared module may be no further from the fp32 result, for the
same rounded weights and inputs, than twice the plain module in bf16 is: its sums are rounded once more on their way.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, loss_parallel, parallelize_module

from torchstone.loss.cross_entropy import IGNORED, token_loss_sum
from torchstone.models.decoder import Decoder, DecoderConfig, LayerKind, RMSNorm
from torchstone.parallel.shard import shard_module
from torchstone.parallel.tensor import SEQUENCE_DIM, Sees, table
from torchstone.testing import DistributedTest

FP32_LIMIT = 1e-6
# Of the plain module's own distance.
BF16_LIMIT = 2.0
ROWS, TOKENS, WIDTH, FEATURES, HEADS, HEAD_SIZE = 4, 8, 24, 32, 4, 6
# The second does not divide by two or four: the last rank has fewer rows.
VOCABULARIES = (96, 259)
STREAMS = (Shard(SEQUENCE_DIM), Replicate())
DTYPES = (torch.float32, torch.bfloat16)


class Around(nn.Module):
    """What a matrix is in: the place at which the stream is put together, where it lies in shares."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@dataclass
class Numbers:
    """What a module gives for an input and a gradient of its output: all of it, from all ranks."""

    output: Tensor
    input_gradient: Tensor
    gradients: dict[str, Tensor]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        yield "output", self.output
        yield "input's gradient", self.input_gradient
        yield from self.gradients.items()


def styles(tp: int, stream: Placement, vocabulary: int = 96, **changes: Any) -> dict[str, ParallelStyle]:
    """The table's, by their names, for a decoder of one layer."""
    sizes: dict[str, Any] = {
        "width": WIDTH, "heads": HEADS, "kv_heads": HEADS, "head_size": HEAD_SIZE, "mlp_width": FEATURES,
    }  # fmt: skip
    config = DecoderConfig(vocab_size=vocabulary, layers=(LayerKind(),), **(sizes | changes))
    with torch.device("meta"):
        found = table(Decoder(config), tp, stream)
    return {name.removeprefix("layers.0."): style for name, style in found.items()}


def shared(module: nn.Module, mesh: DeviceMesh, style: ParallelStyle, around: ParallelStyle | None = None) -> Around:
    module = Around(copy.deepcopy(module))
    parallelize_module(module.inner, mesh, style)
    return parallelize_module(module, mesh, around) if around is not None else module


def plainly(module: nn.Module, x: Tensor, gradient: Tensor, dtype: torch.dtype) -> Numbers:
    module, x = copy.deepcopy(module).to(dtype), x.to(dtype, copy=True).requires_grad_()
    output = module(x)
    output.backward(gradient.to(dtype))
    return Numbers(output.detach(), x.grad, {name: p.grad for name, p in module.named_parameters()})


def on_ranks(
    module: Around, mesh: DeviceMesh, x: Tensor, given: Placement, gradient: Tensor, taken: Placement
) -> Numbers:
    """As `plainly`, with an input that lies as `given` and an output that lies as `taken`."""
    mine = share(x, mesh, given).requires_grad_()
    output = module(mine)
    local = output.to_local() if isinstance(output, DTensor) else output
    local.backward(share(gradient, mesh, taken))
    gradients = {name.removeprefix("inner."): p.grad.full_tensor() for name, p in module.named_parameters()}
    return Numbers(whole(local.detach(), mesh, taken), whole(mine.grad, mesh, given), gradients)


def share(tensor: Tensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    return distribute_tensor(tensor.detach(), mesh, [placement]).to_local().clone()


def whole(local: Tensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    return DTensor.from_local(local, mesh, [placement], run_check=False).full_tensor()


def distance(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def check(found: Numbers, module: nn.Module, x: Tensor, gradient: Tensor, dtype: torch.dtype, case: str) -> None:
    """Every number against the plain module's, within the limit of its type."""
    exact = dict(plainly(module, x, gradient, torch.float32).named())
    plain = dict(plainly(module, x, gradient, dtype).named())
    names = [name for name, _ in found.named()]
    assert names == list(plain), case
    for name, tensor in found.named():
        assert exact[name].norm() > 0.1, f"{case}: {name} says nothing"
        off, limit = distance(tensor, exact[name]), FP32_LIMIT
        if dtype == torch.bfloat16:
            limit = BF16_LIMIT * distance(plain[name], exact[name])
            assert limit > 1e-4, f"{case}: the plain {name} is not rounded"
        assert off <= limit, f"{case}: {name} is {off:.2e} off, the limit is {limit:.2e}"


def drawn(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Numbers that `dtype` holds exactly, the same on all ranks."""
    generator = torch.Generator().manual_seed(sum(shapes[0]))
    return [torch.randn(shape, generator=generator).to(dtype).float() for shape in shapes]


def linear(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    module = nn.Linear(inputs, outputs, bias)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(drawn(dtype, tuple(parameter.shape))[0] / inputs**0.5).copy_(parameter.to(dtype))
    return module


def cases() -> Iterator[tuple[Placement, bool, torch.dtype, str]]:
    for stream, bias, dtype in itertools.product(STREAMS, (False, True), DTYPES):
        yield stream, bias, dtype, f"stream {stream}, bias {bias}, {dtype}"


class TestParallelLinears(DistributedTest):
    """tp is all ranks."""

    world_size = (2, 4)

    def mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (self.size,), mesh_dim_names=("tp",))

    def test_column_parallel_linear_equals_nn_linear_forward_and_backward(self) -> None:
        mesh = self.mesh()
        for stream, bias, dtype, case in cases():
            module, by = linear(WIDTH, FEATURES, bias, dtype), styles(self.size, stream)
            x, gradient = drawn(dtype, (ROWS, TOKENS, WIDTH), (ROWS, TOKENS, FEATURES))
            columns = shared(module.to(dtype), mesh, by["mlp.gate"], around=by["mlp"])
            assert columns.inner.weight.to_local().shape == (FEATURES // self.size, WIDTH)
            found = on_ranks(columns, mesh, x.to(dtype), stream, gradient.to(dtype), Shard(-1))
            check(found, module.float(), x, gradient, dtype, case)

    def test_row_parallel_linear_equals_nn_linear_forward_and_backward(self) -> None:
        mesh = self.mesh()
        for stream, bias, dtype, case in cases():
            module, by = linear(FEATURES, WIDTH, bias, dtype), styles(self.size, stream)
            x, gradient = drawn(dtype, (ROWS, TOKENS, FEATURES), (ROWS, TOKENS, WIDTH))
            rows = shared(module.to(dtype), mesh, by["mlp.down"])
            assert rows.inner.weight.to_local().shape == (WIDTH, FEATURES // self.size)
            found = on_ranks(rows, mesh, x.to(dtype), Shard(-1), gradient.to(dtype), stream)
            check(found, module.float(), x, gradient, dtype, case)

    def test_a_linear_that_every_rank_has_whole_sums_the_ranks_parts_of_its_gradient(self) -> None:
        """One key/value head for all ranks: each uses it in its own way, here for features of its own."""
        mesh = self.mesh()
        for stream, bias, dtype, case in cases():
            module, by = linear(WIDTH, HEAD_SIZE, bias, dtype), styles(self.size, stream, kv_heads=1)
            x, gradient = drawn(dtype, (ROWS, TOKENS, WIDTH), (ROWS, TOKENS, HEAD_SIZE))
            heads = shared(module.to(dtype), mesh, by["attention.wk"], around=by["attention"])
            assert heads.inner.weight.to_local().shape == (HEAD_SIZE, WIDTH)
            mine = share(x.to(dtype), mesh, stream).requires_grad_()
            output = heads(mine)
            part = torch.zeros_like(gradient)
            part[..., self.rank :: self.size] = gradient[..., self.rank :: self.size]
            output.to_local(grad_placements=[Partial()]).backward(part.to(dtype))
            gradients = {name.removeprefix("inner."): p.grad.full_tensor() for name, p in heads.named_parameters()}
            found = Numbers(output.full_tensor().detach(), whole(mine.grad, mesh, stream), gradients)
            check(found, module.float(), x, gradient, dtype, case)

    def test_norms_of_the_stream_of_heads_and_over_all_heads_equal_the_plain_norm(self) -> None:
        mesh = self.mesh()
        per_head, over_all = (styles(self.size, STREAMS[0], qk_norm=kind) for kind in ("head", "all"))
        whole_stream = styles(self.size, STREAMS[1])
        for style, shape, lies in (
            (per_head["attention_norm"], (ROWS, TOKENS, WIDTH), STREAMS[0]),
            (whole_stream["attention_norm"], (ROWS, TOKENS, WIDTH), STREAMS[1]),
            (per_head["attention.q_norm"], (ROWS, HEADS, TOKENS, HEAD_SIZE), Shard(1)),
            (over_all["attention.q_norm"], (ROWS, TOKENS, HEADS * HEAD_SIZE), Shard(-1)),
        ):
            module = RMSNorm(shape[-1], 1e-5, "rms")
            x, gradient, weight = drawn(torch.float32, shape, shape, shape[-1:])
            module.weight.data.copy_(weight)
            found = on_ranks(shared(module, mesh, style), mesh, x, lies, gradient, lies)
            check(found, module, x, gradient, torch.float32, f"{shape} that lie as {lies}")

    def test_vocabulary_parallel_embedding_equals_nn_embedding(self) -> None:
        mesh = self.mesh()
        for vocabulary, stream in itertools.product(VOCABULARIES, STREAMS):
            module = nn.Embedding(vocabulary, WIDTH)
            weight, gradient = drawn(torch.float32, (vocabulary, WIDTH), (ROWS, TOKENS, WIDTH))
            module.weight.data.copy_(weight)
            ids = ids_with_both_ends(vocabulary)
            wanted = module(ids)
            wanted.backward(gradient)
            rows = shared(module, mesh, styles(self.size, stream, vocabulary)["tok_embed"]).inner
            rows.weight.grad = None
            assert rows.weight.to_local().shape[0] == len(torch.arange(vocabulary).chunk(self.size)[self.rank])
            output = rows(ids)
            output.backward(share(gradient, mesh, stream))
            # Nothing is added up in a lookup, and what is added in its gradient is so in the same order.
            assert torch.equal(whole(output.detach(), mesh, stream), wanted)
            assert torch.equal(rows.weight.grad.full_tensor(), module.weight.grad)

    def test_vocabulary_parallel_head_and_loss_equal_nn_linear_and_cross_entropy(self) -> None:
        """Labels at both ends of the vocabulary, labels that are not counted, and none that is."""
        mesh = self.mesh()
        for vocabulary, stream, masked in itertools.product(VOCABULARIES, STREAMS, (0.3, 1.0)):
            case = f"vocabulary {vocabulary}, stream {stream}, {masked:.0%} masked"
            module, (x,) = linear(WIDTH, vocabulary, False, torch.float32), drawn(torch.float32, (ROWS, TOKENS, WIDTH))
            labels = ids_with_both_ends(vocabulary)
            labels.view(-1)[: round(masked * labels.numel())] = IGNORED
            plain_x = x.clone().requires_grad_()
            logits = module(plain_x)
            wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
            wanted.backward()
            head = shared(module, mesh, styles(self.size, stream, vocabulary)["head"]).inner
            head.weight.grad = None
            mine = share(x, mesh, stream).requires_grad_()
            with loss_parallel():
                shared_logits = head(mine)
                found = token_loss_sum(shared_logits, labels)
                found.backward()
            assert shared_logits.placements == (Shard(2),), case
            assert shared_logits.to_local().shape[-1] == head.weight.to_local().shape[0] < vocabulary, case
            assert not isinstance(found, DTensor), case
            gradients = whole(mine.grad, mesh, stream), head.weight.grad.full_tensor()
            if masked == 1.0:
                assert [found.item(), *(tensor.abs().max().item() for tensor in gradients)] == [0.0, 0.0, 0.0], case
                continue
            assert distance(found, wanted) <= FP32_LIMIT, case
            assert distance(gradients[0], plain_x.grad) <= FP32_LIMIT, case
            assert distance(gradients[1], module.weight.grad) <= FP32_LIMIT, case

    def test_a_module_that_sees_the_stream_gets_all_of_it_and_gives_back_shares(self) -> None:
        mesh, (x, gradient) = self.mesh(), drawn(torch.float32, (ROWS, TOKENS, WIDTH), (ROWS, TOKENS, WIDTH))
        seen = parallelize_module(Around(nn.Identity()), mesh, Sees(Shard(SEQUENCE_DIM), Replicate()))
        mine = share(x, mesh, Shard(SEQUENCE_DIM)).requires_grad_()
        output = seen(mine)
        assert output.placements == (Replicate(),)
        assert torch.equal(output.to_local(), x)
        # Each rank's own use of the stream, of which a share's gradient is the sum.
        output.to_local(grad_placements=[Partial()]).backward((self.rank + 1) * gradient)
        times = sum(range(1, self.size + 1))
        assert distance(whole(mine.grad, mesh, Shard(SEQUENCE_DIM)), times * gradient) <= FP32_LIMIT


class TestMixedPrecisionLinears(DistributedTest):
    """bf16 weights with fp32 inputs, as FSDP2's MixedPrecisionPolicy makes them: parameters that are kept in fp32 are
    gathered as bf16, and with `cast_forward_inputs` the fp32 input is rounded on its way in. So what it has to equal is
    nn.Linear in bf16 on the rounded input. The policy of parallel/shard.py is this one but for the inputs, which the
    decoder casts by itself; the master weights and gradients are fp32 in both."""

    world_size = (2, 4)

    def test_bf16_weights_with_fp32_inputs_equal_nn_linear_in_bf16_on_the_rounded_input(self) -> None:
        for shards in (1, 2) if self.size == 4 else (1,):
            mesh = init_device_mesh("cpu", (shards, self.size // shards), mesh_dim_names=("dp_shard", "tp"))
            for stream, bias in itertools.product(STREAMS, (False, True)):
                case = f"dp_shard {shards}, tp {self.size // shards}, stream {stream}, bias {bias}"
                by = styles(self.size // shards, stream)
                self.compare(mesh, linear(WIDTH, FEATURES, bias, torch.bfloat16), by["mlp.gate"], by["mlp"],
                             stream, Shard(-1), f"column, {case}")  # fmt: skip
                self.compare(mesh, linear(FEATURES, WIDTH, bias, torch.bfloat16), by["mlp.down"], None,
                             Shard(-1), stream, f"row, {case}")  # fmt: skip

    def compare(
        self, mesh: DeviceMesh, module: nn.Linear, style: ParallelStyle, around: ParallelStyle | None,
        given: Placement, taken: Placement, case: str,
    ) -> None:  # fmt: skip
        tp, data = mesh["tp"], mesh["dp_shard"]
        (x,) = drawn(torch.float32, (ROWS, TOKENS, module.in_features))
        (gradient,) = drawn(torch.bfloat16, (ROWS, TOKENS, module.out_features))
        rounded = x.bfloat16().float()
        assert distance(x, rounded) > 1e-3
        matrix = shared(module, tp, style, around)
        mixed = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
        shard_module(matrix, [], data, 3, mixed)
        seen: list[torch.dtype] = []
        matrix.inner.register_forward_pre_hook(lambda inner, inputs: seen.extend([inner.weight.dtype, inputs[0].dtype]))
        mine = share(share(x, data, Shard(0)), tp, given).requires_grad_()
        output = matrix(mine)
        assert (output.dtype, seen) == (torch.bfloat16, [torch.bfloat16] * 2), case
        output.backward(share(share(gradient, data, Shard(0)), tp, taken).bfloat16())
        for parameter in matrix.parameters():
            assert parameter.dtype == parameter.grad.dtype == mine.grad.dtype == torch.float32, case
            assert parameter.grad.placements == parameter.placements, case
        found = Numbers(
            whole(whole(output.detach(), tp, taken), data, Shard(0)),
            whole(whole(mine.grad, tp, given), data, Shard(0)),
            {name.removeprefix("inner."): p.grad.full_tensor() for name, p in matrix.named_parameters()},
        )
        check(found, module, rounded, gradient, torch.bfloat16, case)


def ids_with_both_ends(vocabulary: int) -> Tensor:
    """Ids from all of the vocabulary, the first and the last of every rank's rows among them."""
    ids = torch.randint(0, vocabulary, (ROWS, TOKENS), generator=torch.Generator().manual_seed(3))
    edges = [chunk[at] for chunk in torch.arange(vocabulary).chunk(dist.get_world_size()) for at in (0, -1)]
    ids.view(-1)[-len(edges) :] = torch.stack(edges)
    return ids

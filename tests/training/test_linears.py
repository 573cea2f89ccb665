"""Sharded modules against the same modules in one process: outputs and every gradient.

The parallel styles come from `tp_plan` in parallel/tensor_parallel.py, and are applied to a bare nn.Linear, RMSNorm or
nn.Embedding. The ranks' shards are gathered and compared with the plain module on the full input. Gradients matter
most: a partial gradient that is never summed does not show in a forward pass.

In fp32 both may differ by 1e-6 of their norm. In bf16 the sharded module may be twice as far from the fp32 result, for
the same rounded weights and inputs, as the plain module in bf16: its sums are rounded once more.
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

from selection import the_rest
from torchstone.loss.cross_entropy import IGNORE_INDEX, token_loss_sum
from torchstone.models.decoder import Decoder, DecoderConfig, LayerSpec, RMSNorm
from torchstone.parallel.fsdp import apply_fsdp
from torchstone.parallel.tensor_parallel import SEQUENCE_DIM, tp_plan
from torchstone.testing import DistributedTest

FP32_LIMIT = 1e-6
# Relative to the plain module's own distance.
BF16_LIMIT = 2.0
ROWS, TOKENS, WIDTH, FEATURES, HEADS, HEAD_DIM = 4, 8, 24, 32, 4, 6
# Neither two nor four divides the second: the last rank has fewer embeddings.
VOCABULARIES = (96, 259)
# Placements of the residual stream: with and without sequence parallelism.
RESIDUALS = (Shard(SEQUENCE_DIM), Replicate())
DTYPES = (torch.float32, torch.bfloat16)


class Block(nn.Module):
    """A module around the sharded one, whose input is redistributed as that of `mlp` or `attention` is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@dataclass
class Results:
    """The output of a module and its gradients for one output gradient; all unsharded."""

    output: Tensor
    input_gradient: Tensor
    gradients: dict[str, Tensor]

    def named(self) -> dict[str, Tensor]:
        return {"output": self.output, "input gradient": self.input_gradient} | self.gradients


def styles(tp: int, residual: Placement, vocabulary: int = 96, **changes: Any) -> dict[str, ParallelStyle]:
    """The tp plan of a decoder with one layer."""
    sizes: dict[str, Any] = {
        "width": WIDTH, "heads": HEADS, "kv_heads": HEADS, "head_dim": HEAD_DIM, "mlp_width": FEATURES,
    }  # fmt: skip
    config = DecoderConfig(vocab_size=vocabulary, layers=(LayerSpec(),), **(sizes | changes))
    with torch.device("meta"):
        plan = tp_plan(Decoder(config), tp, residual)
    return {name.removeprefix("layers.0."): style for name, style in plan.items()}


def parallelize(
    module: nn.Module, mesh: DeviceMesh, style: ParallelStyle, block_style: ParallelStyle | None = None
) -> Block:
    block = Block(copy.deepcopy(module))
    parallelize_module(block.inner, mesh, style)
    return parallelize_module(block, mesh, block_style) if block_style is not None else block


def run_plain(module: nn.Module, x: Tensor, gradient: Tensor, dtype: torch.dtype) -> Results:
    module, x = copy.deepcopy(module).to(dtype), x.to(dtype, copy=True).requires_grad_()
    output = module(x)
    output.backward(gradient.to(dtype))
    return Results(output.detach(), x.grad, {name: p.grad for name, p in module.named_parameters()})


def run_sharded(
    block: Block, mesh: DeviceMesh, x: Tensor, x_placement: Placement, gradient: Tensor, placement: Placement
) -> Results:
    """As `run_plain`, with an input of placement `x_placement` and an output of `placement`."""
    local_x = shard(x, mesh, x_placement).requires_grad_()
    output = block(local_x)
    output = output.to_local() if isinstance(output, DTensor) else output
    output.backward(shard(gradient, mesh, placement))
    input_gradient = gather(local_x.grad, mesh, x_placement)
    return Results(gather(output.detach(), mesh, placement), input_gradient, full_gradients(block))


def full_gradients(block: Block) -> dict[str, Tensor]:
    return {name.removeprefix("inner."): p.grad.full_tensor() for name, p in block.named_parameters()}


def shard(tensor: Tensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    return distribute_tensor(tensor.detach(), mesh, [placement]).to_local().clone()


def gather(local: Tensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    return DTensor.from_local(local, mesh, [placement], run_check=False).full_tensor()


def distance(ours: Tensor, expected: Tensor) -> float:
    return ((ours.double() - expected.double()).norm() / expected.double().norm()).item()


def check(results: Results, module: nn.Module, x: Tensor, gradient: Tensor, dtype: torch.dtype, case: str) -> None:
    """Compares every tensor with the plain module's, within the limit of its dtype."""
    exact = run_plain(module, x, gradient, torch.float32).named()
    plain = run_plain(module, x, gradient, dtype).named()
    assert results.named().keys() == plain.keys(), case
    for name, tensor in results.named().items():
        assert exact[name].norm() > 0.1, f"{case}: {name} is almost zero"
        limit = FP32_LIMIT
        if dtype == torch.bfloat16:
            limit = BF16_LIMIT * distance(plain[name], exact[name])
            assert limit > 1e-4, f"{case}: the plain {name} is not rounded"
        assert distance(tensor, exact[name]) <= limit, f"{case}: {name}"


def random_tensors(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    """fp32 values that `dtype` holds exactly, the same on all ranks."""
    generator = torch.Generator().manual_seed(sum(shapes[0]))
    return [torch.randn(shape, generator=generator).to(dtype).float() for shape in shapes]


def random_linear(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    module = nn.Linear(inputs, outputs, bias)
    with torch.no_grad():
        for parameter in module.parameters():
            values = random_tensors(dtype, tuple(parameter.shape))[0] / inputs**0.5
            parameter.copy_(values.to(dtype))
    return module


def random_ids(vocabulary: int) -> Tensor:
    """Ids of the whole vocabulary, with the first and the last of every rank's shard."""
    ids = torch.randint(0, vocabulary, (ROWS, TOKENS), generator=torch.Generator().manual_seed(3))
    edges = [chunk[at] for chunk in torch.arange(vocabulary).chunk(dist.get_world_size()) for at in (0, -1)]
    ids.view(-1)[-len(edges) :] = torch.stack(edges)
    return ids


def cases() -> Iterator[tuple[Placement, bool, torch.dtype, str]]:
    for residual, bias, dtype in itertools.product(RESIDUALS, (False, True), DTYPES):
        yield residual, bias, dtype, f"residual {residual}, bias {bias}, {dtype}"


class TestParallelLinears(DistributedTest):
    """All ranks are tp ranks."""

    world_size = 2

    def mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (self.size,), mesh_dim_names=("tp",))

    def test_column_parallel_linear_equals_nn_linear_forward_and_backward(self) -> None:
        mesh = self.mesh()
        for residual, bias, dtype, case in cases():
            module, plan = random_linear(WIDTH, FEATURES, bias, dtype), styles(self.size, residual)
            x, gradient = random_tensors(dtype, (ROWS, TOKENS, WIDTH), (ROWS, TOKENS, FEATURES))
            block = parallelize(module.to(dtype), mesh, plan["mlp.gate"], plan["mlp"])
            assert block.inner.weight.to_local().shape == (FEATURES // self.size, WIDTH)
            results = run_sharded(block, mesh, x.to(dtype), residual, gradient.to(dtype), Shard(-1))
            check(results, module.float(), x, gradient, dtype, case)

    def test_row_parallel_linear_equals_nn_linear_forward_and_backward(self) -> None:
        mesh = self.mesh()
        for residual, bias, dtype, case in cases():
            module, plan = random_linear(FEATURES, WIDTH, bias, dtype), styles(self.size, residual)
            x, gradient = random_tensors(dtype, (ROWS, TOKENS, FEATURES), (ROWS, TOKENS, WIDTH))
            block = parallelize(module.to(dtype), mesh, plan["mlp.down"])
            assert block.inner.weight.to_local().shape == (WIDTH, FEATURES // self.size)
            results = run_sharded(block, mesh, x.to(dtype), Shard(-1), gradient.to(dtype), residual)
            check(results, module.float(), x, gradient, dtype, case)

    def test_a_replicated_linear_sums_the_partial_gradients_of_the_ranks(self) -> None:
        """One key/value head for all ranks: here each rank uses other features of it."""
        mesh = self.mesh()
        for residual, bias, dtype, case in cases():
            module, plan = random_linear(WIDTH, HEAD_DIM, bias, dtype), styles(self.size, residual, kv_heads=1)
            x, gradient = random_tensors(dtype, (ROWS, TOKENS, WIDTH), (ROWS, TOKENS, HEAD_DIM))
            block = parallelize(module.to(dtype), mesh, plan["attention.wk"], plan["mlp"])
            assert block.inner.weight.to_local().shape == (HEAD_DIM, WIDTH)
            local_x = shard(x.to(dtype), mesh, residual).requires_grad_()
            output = block(local_x)
            partial_gradient = torch.zeros_like(gradient)
            partial_gradient[..., self.rank :: self.size] = gradient[..., self.rank :: self.size]
            output.to_local(grad_placements=[Partial()]).backward(partial_gradient.to(dtype))
            input_gradient = gather(local_x.grad, mesh, residual)
            results = Results(output.full_tensor().detach(), input_gradient, full_gradients(block))
            check(results, module.float(), x, gradient, dtype, case)

    def test_norms_equal_the_plain_norm(self) -> None:
        """Of the residual stream, of every head, and over all heads."""
        mesh = self.mesh()
        per_head, over_all = (styles(self.size, RESIDUALS[0], qk_norm=kind) for kind in ("head", "all"))
        for style, shape, placement in (
            (per_head["attention_norm"], (ROWS, TOKENS, WIDTH), RESIDUALS[0]),
            (styles(self.size, RESIDUALS[1])["attention_norm"], (ROWS, TOKENS, WIDTH), RESIDUALS[1]),
            (per_head["attention.q_norm"], (ROWS, HEADS, TOKENS, HEAD_DIM), Shard(1)),
            (over_all["attention.q_norm"], (ROWS, TOKENS, HEADS * HEAD_DIM), Shard(-1)),
        ):
            module = RMSNorm(shape[-1], 1e-5, "rms")
            x, gradient, weight = random_tensors(torch.float32, shape, shape, shape[-1:])
            module.weight.data.copy_(weight)
            results = run_sharded(parallelize(module, mesh, style), mesh, x, placement, gradient, placement)
            check(results, module, x, gradient, torch.float32, f"{shape}, {placement}")

    def test_vocabulary_parallel_embedding_equals_nn_embedding(self) -> None:
        mesh = self.mesh()
        for vocabulary, residual in itertools.product(VOCABULARIES, RESIDUALS):
            module = nn.Embedding(vocabulary, WIDTH)
            weight, gradient = random_tensors(torch.float32, (vocabulary, WIDTH), (ROWS, TOKENS, WIDTH))
            module.weight.data.copy_(weight)
            ids = random_ids(vocabulary)
            expected = module(ids)
            expected.backward(gradient)
            embed = parallelize(module, mesh, styles(self.size, residual, vocabulary)["tok_embed"]).inner
            embed.weight.grad = None
            assert embed.weight.to_local().shape[0] == len(torch.arange(vocabulary).chunk(self.size)[self.rank])
            output = embed(ids)
            output.backward(shard(gradient, mesh, residual))
            # A lookup adds nothing up, and its gradient is added up in the same order.
            assert torch.equal(gather(output.detach(), mesh, residual), expected)
            assert torch.equal(embed.weight.grad.full_tensor(), module.weight.grad)

    def test_vocabulary_parallel_head_and_loss_equal_nn_linear_and_cross_entropy(self) -> None:
        """With labels at both ends of every shard, with some labels ignored, and with all labels ignored."""
        mesh = self.mesh()
        for vocabulary, residual, ignored in itertools.product(VOCABULARIES, RESIDUALS, (0.3, 1.0)):
            case = f"vocabulary {vocabulary}, residual {residual}, {ignored:.0%} ignored"
            module = random_linear(WIDTH, vocabulary, False, torch.float32)
            (x,) = random_tensors(torch.float32, (ROWS, TOKENS, WIDTH))
            labels = random_ids(vocabulary)
            labels.view(-1)[: round(ignored * labels.numel())] = IGNORE_INDEX
            plain_x = x.clone().requires_grad_()
            logits = module(plain_x).flatten(0, 1)
            expected = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
            expected.backward()
            head = parallelize(module, mesh, styles(self.size, residual, vocabulary)["head"]).inner
            head.weight.grad = None
            local_x = shard(x, mesh, residual).requires_grad_()
            with loss_parallel():
                sharded_logits = head(local_x)
                loss = token_loss_sum(sharded_logits, labels)
                loss.backward()
            assert sharded_logits.placements == (Shard(2),), case
            assert sharded_logits.to_local().shape[-1] == head.weight.to_local().shape[0] < vocabulary, case
            assert not isinstance(loss, DTensor), case
            gradients = gather(local_x.grad, mesh, residual), head.weight.grad.full_tensor()
            if ignored == 1.0:
                assert [loss.item(), *(tensor.abs().max().item() for tensor in gradients)] == [0.0, 0.0, 0.0], case
                continue
            assert distance(loss, expected) <= FP32_LIMIT, case
            assert distance(gradients[0], plain_x.grad) <= FP32_LIMIT, case
            assert distance(gradients[1], module.weight.grad) <= FP32_LIMIT, case


@the_rest
class TestParallelLinearsOnFourRanks(TestParallelLinears):
    world_size = 4


class TestMixedPrecisionLinears(DistributedTest):
    """bf16 weights with fp32 inputs, by FSDP2's MixedPrecisionPolicy: fp32 parameters are gathered as bf16, and
    `cast_forward_inputs` rounds the input. The result must equal nn.Linear in bf16 on the rounded input. The policy of
    parallel/fsdp.py differs only in the inputs, which the decoder casts."""

    world_size = 4

    def test_bf16_weights_with_fp32_inputs_equal_nn_linear_in_bf16_on_the_rounded_input(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        for residual, bias in itertools.product(RESIDUALS, (False, True)):
            case, plan = f"residual {residual}, bias {bias}", styles(2, residual)
            module = random_linear(WIDTH, FEATURES, bias, torch.bfloat16)
            block = parallelize(module, mesh["tp"], plan["mlp.gate"], plan["mlp"])
            self.compare(mesh, module, block, residual, Shard(-1), f"column, {case}")
            module = random_linear(FEATURES, WIDTH, bias, torch.bfloat16)
            block = parallelize(module, mesh["tp"], plan["mlp.down"])
            self.compare(mesh, module, block, Shard(-1), residual, f"row, {case}")

    def compare(
        self, mesh: DeviceMesh, module: nn.Linear, block: Block, x_placement: Placement, placement: Placement, case: str
    ) -> None:
        tp, dp = mesh["tp"], mesh["dp_shard"]
        (x,) = random_tensors(torch.float32, (ROWS, TOKENS, module.in_features))
        (gradient,) = random_tensors(torch.bfloat16, (ROWS, TOKENS, module.out_features))
        rounded = x.bfloat16().float()
        assert distance(x, rounded) > 1e-3
        mixed = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
        apply_fsdp(block, [], dp, 3, mixed)
        dtypes: list[torch.dtype] = []
        block.inner.register_forward_pre_hook(
            lambda inner, inputs: dtypes.extend([inner.weight.dtype, inputs[0].dtype])
        )
        local_x = shard(shard(x, dp, Shard(0)), tp, x_placement).requires_grad_()
        output = block(local_x)
        assert [output.dtype, *dtypes] == [torch.bfloat16] * 3, case
        output.backward(shard(shard(gradient, dp, Shard(0)), tp, placement).bfloat16())
        for parameter in block.parameters():
            assert parameter.dtype == parameter.grad.dtype == local_x.grad.dtype == torch.float32, case
            assert parameter.grad.placements == parameter.placements, case
        results = Results(
            gather(gather(output.detach(), tp, placement), dp, Shard(0)),
            gather(gather(local_x.grad, tp, x_placement), dp, Shard(0)),
            full_gradients(block),
        )
        check(results, module, rounded, gradient, torch.bfloat16, case)

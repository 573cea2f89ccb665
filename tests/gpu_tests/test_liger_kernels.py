"""On a GPU: Liger's kernels change neither logits nor losses nor gradients."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

# Autotuning the kernel of a mixture of experts takes minutes. Liger reads this when it is imported.
os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")
pytest.importorskip("triton")
pytest.importorskip("liger_kernel")

from parity import ZERO_LIMIT, distance
from steps import step_batch, train_step
from tiny_families import CASES, SHAPES, make_model
from torchstone.checkpoint.model_folder import load_model
from torchstone.data.collate import MicroBatch, collate
from torchstone.data.encode import TokenSequence
from torchstone.loss.cross_entropy import token_loss_sum
from torchstone.models.decoder import RMSNorm
from torchstone.models.execution import ExecutionOptions
from torchstone.optim.adamw import AdamW
from torchstone.parallel.runner import Runner, micro_batch_loss

Case = tuple[str, str]
FolderOf = Callable[[Case], Path]
DEVICE = torch.device("cuda")
FAMILIES = [(family, next(iter(shapes))) for family, shapes in SHAPES.items()]
LOGITS_LIMIT, GRADIENT_LIMIT, LOSS_LIMIT = 1e-5, 1e-4, 1e-6


def load(folder: Path, *liger: str, dtype: torch.dtype = torch.float32, **execution: Any) -> Any:
    """Attention is eager on both sides: it does not use tensor cores, which round fp32. Without Liger: all logits."""
    settings = {"implementation": "native", "attention": "eager", "loss": "auto" if liger else "full"} | execution
    return load_model(folder, DEVICE, dtype, ExecutionOptions(liger=liger, **settings))


def make_batch(packed: bool, seed: int = 0, loss_share: float = 0.7) -> MicroBatch:
    rng = np.random.default_rng(seed)
    sequences = []
    for size in (9, 4, 17, 6, 11, 8):
        ids = rng.integers(0, 96, size)
        sequences.append(TokenSequence(ids, np.where(rng.random(size) < loss_share, ids, -100)))
    rows = [sequences[:3], sequences[3:]] if packed else [[sequence] for sequence in sequences]
    return collate(rows, pad_id=0).to(DEVICE)


def logits_of(model: Any, batch: MicroBatch, packed: bool) -> Tensor:
    with torch.no_grad():
        return model.module(batch.ids, batch.positions, batch.doc_ids if packed else None).float()


def loss_of(model: Any, batch: MicroBatch, packed: bool) -> Tensor:
    docs = batch.doc_ids if packed else None
    return micro_batch_loss(model.module, batch.ids, batch.positions, docs, batch.labels)


def gradients_of(model: Any, batch: MicroBatch, packed: bool) -> tuple[float, dict[str, Tensor]]:
    model.module.zero_grad(set_to_none=True)
    loss = loss_of(model, batch, packed)
    (loss / max(1, int((batch.labels != -100).sum()))).backward()
    return loss.item(), {name: p.grad.detach().float().clone() for name, p in model.module.named_parameters()}


def assert_same_gradients(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        # Without RoPE, the gradient of a key bias is zero up to rounding.
        assert (gradients[name] - gradient).norm() <= GRADIENT_LIMIT * gradient.norm() + 10 * ZERO_LIMIT, name


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_logits_loss_and_gradients_are_equal_in_fp32(case: Case, packed: bool, folder_of: FolderOf) -> None:
    plain, fast = load(folder_of(case)), load(folder_of(case), "auto")
    batch = make_batch(packed)
    assert distance(logits_of(fast, batch, packed), logits_of(plain, batch, packed)) <= LOGITS_LIMIT
    expected_loss, expected = gradients_of(plain, batch, packed)
    loss, gradients = gradients_of(fast, batch, packed)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_same_gradients(gradients, expected)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("case", FAMILIES, ids="-".join)
def test_bf16_kernels_differ_by_no_more_than_bf16_from_fp32(case: Case, packed: bool, folder_of: FolderOf) -> None:
    exact = load(folder_of(case))
    plain, fast = load(folder_of(case), dtype=torch.bfloat16), load(folder_of(case), "auto", dtype=torch.bfloat16)
    batch = make_batch(packed)
    logits = [logits_of(model, batch, packed) for model in (exact, plain, fast)]
    assert (logits[2] - logits[1]).norm() <= 2 * (logits[1] - logits[0]).norm()
    (_, in_fp32), (_, expected), (_, gradients) = (gradients_of(model, batch, packed) for model in (exact, plain, fast))
    total_norm = torch.cat([gradient.flatten() for gradient in in_fp32.values()]).norm()
    for name, gradient in in_fp32.items():
        rounding = (expected[name] - gradient).norm()
        limit = 2 * rounding + 0.02 * gradient.norm() + 1e-3 * total_norm
        assert (gradients[name] - expected[name]).norm() <= limit, name


def test_auto_uses_every_kernel_but_the_loss_for_a_llama(folder_of: FolderOf) -> None:
    model = load(folder_of(("llama", "grouped")), "auto")
    assert model.notes[-1] == "liger: norm, rope, mlp (not loss: model.loss chunked is faster)"


@pytest.mark.parametrize("case", FAMILIES, ids="-".join)
def test_the_fused_loss_is_the_sum_of_the_token_losses(case: Case, folder_of: FolderOf) -> None:
    plain, fused = load(folder_of(case)), load(folder_of(case), "loss")
    batch = make_batch(packed=True)
    with torch.no_grad():
        expected = token_loss_sum(plain.module(batch.ids, batch.positions, batch.doc_ids), batch.labels)
        assert loss_of(fused, batch, True).item() == pytest.approx(expected.item(), rel=LOSS_LIMIT)
    loss, gradients = gradients_of(fused, batch, True)
    assert loss == pytest.approx(expected.item(), rel=LOSS_LIMIT)
    assert_same_gradients(gradients, gradients_of(plain, batch, True)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_loss_token_loss_and_gradients_are_zero(dtype: torch.dtype, folder_of: FolderOf) -> None:
    model = load(folder_of(("llama", "tied")), "auto", dtype=dtype)
    loss, gradients = gradients_of(model, make_batch(packed=True, loss_share=0.0), True)
    assert loss == 0.0
    assert all(not gradient.any() for gradient in gradients.values())


def test_a_head_on_frozen_layers_gets_its_gradient(folder_of: FolderOf) -> None:
    gradients = []
    for liger in ((), ("auto",)):
        model = load(folder_of(("llama", "grouped")), *liger)
        model.module.requires_grad_(False)
        model.module.head.requires_grad_(True)
        (loss_of(model, make_batch(True), True) / 7).backward()
        gradients.append(model.module.head.weight.grad)
    assert distance(gradients[1], gradients[0]) <= GRADIENT_LIMIT


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("case", [("llama", "grouped"), ("qwen3", "head size"), ("olmo2", "grouped")], ids="-".join)
def test_activation_checkpointing_gives_the_same_gradients(case: Case, recompute: str, folder_of: FolderOf) -> None:
    """Saved queries must not be rotated in place: they would be rotated twice."""
    batch = make_batch(packed=True)
    expected = gradients_of(load(folder_of(case)), batch, True)[1]
    assert_same_gradients(gradients_of(load(folder_of(case), "auto", recompute=recompute), batch, True)[1], expected)


@pytest.mark.parametrize("case", [("llama", "biases"), ("gemma3_text", "two ropes"), ("phi3", "window")], ids="-".join)
def test_fused_matrices_give_the_same_gradients(case: Case, folder_of: FolderOf) -> None:
    batch, fused = make_batch(packed=True), ("qkv", "gate_up")
    expected = gradients_of(load(folder_of(case), fused=fused), batch, True)[1]
    assert_same_gradients(gradients_of(load(folder_of(case), "auto", fused=fused), batch, True)[1], expected)


@pytest.mark.parametrize("compile", ["block", "whole"])
def test_a_compiled_model_keeps_the_fused_loss(compile: str, folder_of: FolderOf) -> None:
    batch = make_batch(packed=True)
    expected_loss, expected = gradients_of(load(folder_of(("llama", "grouped"))), batch, True)
    model = load(folder_of(("llama", "grouped")), "loss", compile=compile)
    assert any(note.startswith("liger: loss (") for note in model.notes)
    loss, gradients = gradients_of(model, batch, True)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_same_gradients(gradients, expected)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("case", FAMILIES, ids="-".join)
def test_five_steps_of_training_have_the_same_losses(case: Case, packed: bool, folder_of: FolderOf) -> None:
    expected, losses = (train(load(folder_of(case), *liger), packed) for liger in ((), ("auto",)))
    assert losses == pytest.approx(expected, rel=1e-4)
    assert expected[-1] != expected[0]


def train(model: Any, packed: bool) -> list[float]:
    optimizer = AdamW([{"params": list(model.module.parameters())}], lr=3e-3, betas=(0.9, 0.95), eps=1e-4)
    runner = Runner(model, DEVICE, packed)
    losses = []
    for step in range(1, 6):
        # The second micro-batch of every step has no loss token.
        batches = [make_batch(packed, step, loss_share) for loss_share in (0.7, 0.0, 0.4)]
        batch = step_batch([batch.to(torch.device("cpu")) for batch in batches])
        losses.append(train_step(runner, optimizer, batch, step, 3e-3, 1.0).loss)
    return losses


def test_the_next_decoder_has_no_kernels(folder_of: FolderOf) -> None:
    load(folder_of(("llama", "grouped")), "auto")
    model = load(folder_of(("llama", "grouped")))
    assert all(part.kernel is None for part in model.module.modules() if isinstance(part, RMSNorm))
    assert not hasattr(model.module, "fused_loss")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("mixtral"), "mixtral", num_local_experts=4, num_experts_per_tok=2)


class TestFallback:
    @pytest.mark.parametrize("family", ["mixtral", "phi3"])
    def test_logits_and_gradients_are_equal_in_fp32(self, family: str, folder_of: FolderOf, mixtral: Path) -> None:
        """Mixtral's experts stay unpatched: Liger multiplies them in TF32."""
        folder = mixtral if family == "mixtral" else folder_of(("phi3", "plain"))
        plain, fast = (load(folder, *liger, implementation="fallback") for liger in ((), ("auto",)))
        kernels = "norm" if family == "mixtral" else "norm, mlp"
        assert fast.notes[-1].startswith(f"liger: {kernels} (")
        batch = make_batch(packed=False)
        assert distance(logits_of(fast, batch, False), logits_of(plain, batch, False)) <= LOGITS_LIMIT
        expected = gradients_of(plain, batch, False)[1]
        assert_same_gradients(gradients_of(fast, batch, False)[1], expected)

    @pytest.mark.parametrize("family", ["mixtral", "phi3"])
    def test_bf16_kernels_differ_by_no_more_than_bf16_from_fp32(
        self, family: str, folder_of: FolderOf, mixtral: Path
    ) -> None:
        folder = mixtral if family == "mixtral" else folder_of(("phi3", "plain"))
        batch = make_batch(packed=False)
        exact = load(folder, implementation="fallback")
        plain, fast = (
            load(folder, *liger, dtype=torch.bfloat16, implementation="fallback") for liger in ((), ("auto",))
        )
        assert fast.notes[-1].startswith("liger: norm, mlp (")
        in_fp32, expected, logits = (logits_of(model, batch, False) for model in (exact, plain, fast))
        # The median token, not the worst: rounding may make a router choose another expert.
        rounding, change = ((a - b).norm(dim=-1).median() for a, b in ((expected, in_fp32), (logits, expected)))
        assert change <= 2 * rounding

    @pytest.mark.parametrize("family", ["mixtral", "phi3"])
    def test_the_next_model_of_the_same_class_is_not_patched(
        self, family: str, folder_of: FolderOf, mixtral: Path
    ) -> None:
        from importlib import import_module

        folder = mixtral if family == "mixtral" else folder_of(("phi3", "plain"))
        modeling = import_module(f"transformers.models.{family}.modeling_{family}")
        before, cross_entropy = dict(vars(modeling)), torch.nn.functional.cross_entropy
        patched = load(folder, "auto", implementation="fallback")
        assert any("Liger" in part._get_name() for part in patched.module.hf.modules())
        assert dict(vars(modeling)) == before
        assert torch.nn.functional.cross_entropy is cross_entropy
        after = load(folder, implementation="fallback")
        assert not any("Liger" in part._get_name() or "forward" in vars(part) for part in after.module.hf.modules())

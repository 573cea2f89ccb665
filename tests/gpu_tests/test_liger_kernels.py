"""On a GPU: a model with Liger's kernels gives the logits, losses and gradients that it gives without."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

# Trying out every block size for the experts of a mixture takes minutes; read when Liger is imported.
os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")
pytest.importorskip("triton")
pytest.importorskip("liger_kernel")

from parity import ZERO_LIMIT
from tiny_families import CASES, SHAPES, make_model
from torchstone.data.collate import MicroBatch, collate
from torchstone.data.encode import Encoded
from torchstone.data.loader import StepBatch
from torchstone.loss.cross_entropy import token_loss_sum
from torchstone.models.decoder import RMSNorm
from torchstone.models.execution import Execution
from torchstone.models.opening import load_model
from torchstone.parallel.running import Runner, micro_loss
from torchstone.training.step import train_step

DEVICE = torch.device("cuda")
FAMILIES = [(family, next(iter(shapes))) for family, shapes in SHAPES.items()]
LOGITS_LIMIT, GRADIENT_LIMIT, LOSS_LIMIT = 1e-5, 1e-4, 1e-6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[Any, Path] = {}

    def folder(case: tuple[str, str]) -> Path:
        if case not in made:
            made[case] = make_model(tmp_path_factory.mktemp("model"), *case)
        return made[case]

    return folder


def load(folder: Path, *liger: str, dtype: torch.dtype = torch.float32, **execution: Any) -> Any:
    """Plain attention on both sides: it has no tensor cores to round fp32 by."""
    settings = {"implementation": "native", "attention": "eager"} | execution
    return load_model(folder, DEVICE, dtype, Execution(liger=liger, **settings))


def some_rows(packed: bool, seed: int = 0, counted: float = 0.7) -> MicroBatch:
    rng = np.random.default_rng(seed)
    sequences = []
    for size in (9, 4, 17, 6, 11, 8):
        ids = rng.integers(0, 96, size)
        sequences.append(Encoded(ids, np.where(rng.random(size) < counted, ids, -100)))
    rows = [sequences[:3], sequences[3:]] if packed else [[sequence] for sequence in sequences]
    return collate(rows, pad_id=0).to(DEVICE)


def logits_of(model: Any, batch: MicroBatch, packed: bool) -> Tensor:
    with torch.no_grad():
        return model.module(batch.ids, batch.positions, batch.doc_ids if packed else None).float()


def loss_of(model: Any, batch: MicroBatch, packed: bool) -> Tensor:
    docs = batch.doc_ids if packed else None
    return micro_loss(model.module, batch.ids, batch.positions, docs, batch.labels)


def gradients_of(model: Any, batch: MicroBatch, packed: bool) -> tuple[float, dict[str, Tensor]]:
    model.module.zero_grad(set_to_none=True)
    loss = loss_of(model, batch, packed)
    (loss / max(1, int((batch.labels != -100).sum()))).backward()
    return loss.item(), {name: p.grad.detach().float().clone() for name, p in model.module.named_parameters()}


def apart(got: Tensor, wanted: Tensor) -> float:
    return ((got - wanted).norm() / wanted.norm()).item()


def assert_same_gradients(got: dict[str, Tensor], wanted: dict[str, Tensor], limit: float = GRADIENT_LIMIT) -> None:
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        # Some are zero but for rounding: a bias of keys that do not turn.
        assert (got[name] - gradient).norm() <= limit * gradient.norm() + 10 * ZERO_LIMIT, name


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_in_fp32_logits_loss_and_gradients_are_the_same(case: tuple[str, str], packed: bool, folders: Any) -> None:
    plain, fast = load(folders(case)), load(folders(case), "auto")
    batch = some_rows(packed)
    assert apart(logits_of(fast, batch, packed), logits_of(plain, batch, packed)) <= LOGITS_LIMIT
    wanted_loss, wanted = gradients_of(plain, batch, packed)
    loss, gradients = gradients_of(fast, batch, packed)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert_same_gradients(gradients, wanted)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("case", FAMILIES, ids="-".join)
def test_in_bf16_the_kernels_change_no_more_than_bf16_does(case: tuple[str, str], packed: bool, folders: Any) -> None:
    exact = load(folders(case))
    plain, fast = load(folders(case), dtype=torch.bfloat16), load(folders(case), "auto", dtype=torch.bfloat16)
    batch = some_rows(packed)
    logits = [logits_of(model, batch, packed) for model in (exact, plain, fast)]
    assert (logits[2] - logits[1]).norm() <= 2 * (logits[1] - logits[0]).norm()
    (_, truth), (_, wanted), (_, got) = (gradients_of(model, batch, packed) for model in (exact, plain, fast))
    whole = torch.cat([gradient.flatten() for gradient in truth.values()]).norm()
    for name in truth:
        rounding = (wanted[name] - truth[name]).norm()
        room = 2 * rounding + 0.02 * truth[name].norm() + 1e-3 * whole
        assert (got[name] - wanted[name]).norm() <= room, name


def test_auto_takes_every_kernel_for_a_llama_and_says_so(folders: Any) -> None:
    model = load(folders(("llama", "grouped")), "auto")
    assert model.notes[-1] == "liger: norm, rope, mlp, loss (all that there are)"


@pytest.mark.parametrize("case", FAMILIES, ids="-".join)
def test_the_fused_loss_is_the_sum_of_the_token_losses(case: tuple[str, str], folders: Any) -> None:
    plain, fused = load(folders(case)), load(folders(case), "loss")
    batch = some_rows(packed=True)
    with torch.no_grad():
        wanted = token_loss_sum(plain.module(batch.ids, batch.positions, batch.doc_ids), batch.labels)
        assert loss_of(fused, batch, True).item() == pytest.approx(wanted.item(), rel=LOSS_LIMIT)
    loss, gradients = gradients_of(fused, batch, True)
    assert loss == pytest.approx(wanted.item(), rel=LOSS_LIMIT)
    assert_same_gradients(gradients, gradients_of(plain, batch, True)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_micro_batch_without_a_loss_token_is_exactly_zero(dtype: torch.dtype, folders: Any) -> None:
    model = load(folders(("llama", "tied")), "auto", dtype=dtype)
    loss, gradients = gradients_of(model, some_rows(packed=True, counted=0.0), True)
    assert loss == 0.0
    assert all(not gradient.any() for gradient in gradients.values())


def test_a_head_on_a_frozen_body_still_learns(folders: Any) -> None:
    found = []
    for liger in ((), ("auto",)):
        model = load(folders(("llama", "grouped")), *liger)
        model.module.requires_grad_(False)
        model.module.head.requires_grad_(True)
        (loss_of(model, some_rows(True), True) / 7).backward()
        found.append(model.module.head.weight.grad)
    assert apart(found[1], found[0]) <= GRADIENT_LIMIT


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("case", [("llama", "grouped"), ("qwen3", "head size"), ("olmo2", "grouped")], ids="-".join)
def test_recomputed_activations_give_the_same_gradients(case: tuple[str, str], recompute: str, folders: Any) -> None:
    """Queries that are kept must not have been turned in place: they would be turned twice."""
    batch = some_rows(packed=True)
    wanted = gradients_of(load(folders(case)), batch, True)[1]
    assert_same_gradients(gradients_of(load(folders(case), "auto", recompute=recompute), batch, True)[1], wanted)


@pytest.mark.parametrize("case", [("llama", "biases"), ("gemma3_text", "two ropes"), ("phi3", "window")], ids="-".join)
def test_fused_matrices_give_the_same_gradients(case: tuple[str, str], folders: Any) -> None:
    batch, fused = some_rows(packed=True), ("qkv", "gate_up")
    wanted = gradients_of(load(folders(case), fused=fused), batch, True)[1]
    assert_same_gradients(gradients_of(load(folders(case), "auto", fused=fused), batch, True)[1], wanted)


@pytest.mark.parametrize("compile", ["block", "whole"])
def test_a_compiled_model_keeps_the_fused_loss(compile: str, folders: Any) -> None:
    batch = some_rows(packed=True)
    wanted_loss, wanted = gradients_of(load(folders(("llama", "grouped"))), batch, True)
    model = load(folders(("llama", "grouped")), "auto", compile=compile)
    assert any(note.startswith("liger: loss (") for note in model.notes)
    loss, gradients = gradients_of(model, batch, True)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert_same_gradients(gradients, wanted)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("case", FAMILIES, ids="-".join)
def test_five_steps_of_training_have_the_same_losses(case: tuple[str, str], packed: bool, folders: Any) -> None:
    losses = [
        trained(load(folders(case), *liger), packed) for liger in ((), ("auto",))
    ]  # fmt: skip
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] != losses[0][0]


def trained(model: Any, packed: bool) -> list[float]:
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-4)
    runner = Runner(model, DEVICE, packed)
    losses = []
    for step in range(1, 6):
        # The second micro-batch of every step has nothing to learn from.
        batches = [some_rows(packed, step, counted) for counted in (0.7, 0.0, 0.4)]
        batches = [MicroBatch(*(tensor.cpu() for tensor in batch)) for batch in batches]
        count = sum(int((batch.labels != -100).sum()) for batch in batches)
        batch = StepBatch(batches, samples=18, tokens=0, loss_tokens=count, padding=0, first_sample=0)
        losses.append(train_step(runner, optimizer, batch, step, 3e-3, 1.0).loss)
    return losses


def test_the_next_decoder_has_no_kernels(folders: Any) -> None:
    load(folders(("llama", "grouped")), "auto")
    model = load(folders(("llama", "grouped")))
    assert all(part.kernel is None for part in model.module.modules() if isinstance(part, RMSNorm))
    assert not hasattr(model.module, "fused_loss")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("mixtral"), "mixtral", num_local_experts=4, num_experts_per_tok=2)


class TestFallback:
    @pytest.mark.parametrize("family", ["mixtral", "phi3"])
    def test_in_fp32_logits_and_gradients_are_the_same(self, family: str, folders: Any, mixtral: Path) -> None:
        """Mixtral's experts are left out: Liger multiplies them in TF32."""
        folder = mixtral if family == "mixtral" else folders(("phi3", "plain"))
        plain, fast = (load(folder, *liger, implementation="fallback") for liger in ((), ("auto",)))
        taken = "norm" if family == "mixtral" else "norm, mlp"
        assert fast.notes[-1].startswith(f"liger: {taken} (")
        batch = some_rows(packed=False)
        assert apart(logits_of(fast, batch, False), logits_of(plain, batch, False)) <= LOGITS_LIMIT
        wanted = gradients_of(plain, batch, False)[1]
        assert_same_gradients(gradients_of(fast, batch, False)[1], wanted)

    @pytest.mark.parametrize("family", ["mixtral", "phi3"])
    def test_in_bf16_the_kernels_change_no_more_than_bf16_does(self, family: str, folders: Any, mixtral: Path) -> None:
        folder = mixtral if family == "mixtral" else folders(("phi3", "plain"))
        batch = some_rows(packed=False)
        exact = load(folder, implementation="fallback")
        plain, fast = (
            load(folder, *liger, dtype=torch.bfloat16, implementation="fallback") for liger in ((), ("auto",))
        )
        assert fast.notes[-1].startswith("liger: norm, mlp (")
        # A router may send a token elsewhere for a rounding: the middle token, not the worst.
        rounding, change = (
            (a - b).norm(dim=-1).median() for a, b in zip(
                (logits_of(plain, batch, False), logits_of(fast, batch, False)),
                (logits_of(exact, batch, False), logits_of(plain, batch, False)), strict=True,
            )
        )  # fmt: skip
        assert change <= 2 * rounding

    @pytest.mark.parametrize("family", ["mixtral", "phi3"])
    def test_the_next_model_of_the_same_class_is_not_patched(self, family: str, folders: Any, mixtral: Path) -> None:
        from importlib import import_module

        folder = mixtral if family == "mixtral" else folders(("phi3", "plain"))
        modelling = import_module(f"transformers.models.{family}.modeling_{family}")
        before, cross_entropy = dict(vars(modelling)), torch.nn.functional.cross_entropy
        patched = load(folder, "auto", implementation="fallback")
        assert any("Liger" in part._get_name() for part in patched.module.hf.modules())
        assert dict(vars(modelling)) == before
        assert torch.nn.functional.cross_entropy is cross_entropy
        after = load(folder, implementation="fallback")
        assert not any("Liger" in part._get_name() or "forward" in vars(part) for part in after.module.hf.modules())

"""The chunked head and loss: the loss and gradients of `token_loss_sum`, without a tensor of all logits.

Its Triton kernel needs a GPU: tests/gpu_tests/test_chunked_loss_kernel.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from layouts import Case, check_layouts
from loss_cases import full_loss, loss_and_gradients
from parity import ZERO_LIMIT, distance, relative
from precision import random_sequences
from tiny_families import make_model
from torchstone import api
from torchstone.checkpoint.model_folder import check_model_folder, load_model
from torchstone.config import load_config
from torchstone.data.collate import collate
from torchstone.errors import UsageError
from torchstone.loss.chunked import choose_chunk_tokens, chunked_loss_sum
from torchstone.loss.cross_entropy import token_loss_sum
from torchstone.models.decoder import Decoder
from torchstone.models.execution import ExecutionOptions
from torchstone.parallel.runner import Runner, micro_batch_loss

CPU = torch.device("cpu")
TOKENS, WIDTH, VOCABULARY = 44, 64, 97


def make_inputs(ignored: float = 0.4, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(4, TOKENS // 4, WIDTH, generator=generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator) / 4
    labels = torch.randint(VOCABULARY, (4, TOKENS // 4), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < ignored] = -100
    return hidden.to(dtype), weight.to(dtype), labels


class Largest(TorchDispatchMode):
    """Counts matmuls, and the elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.matmuls = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        self.matmuls += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return result


class TestParity:
    @pytest.mark.parametrize("softcap", [None, 3.0])
    @pytest.mark.parametrize("divisor", [1.0, 2.5])
    @pytest.mark.parametrize("chunk_tokens", [1, 5, 11, 1024])
    @pytest.mark.parametrize(("is_count_known", "grad_scale"), [(True, 1 / 17), (False, 1.0)])
    def test_fp32(
        self, softcap: float | None, divisor: float, chunk_tokens: int, is_count_known: bool, grad_scale: float
    ) -> None:
        inputs = make_inputs()
        loss_tokens = int((inputs[2] != -100).sum()) if is_count_known else None
        expected = loss_and_gradients(partial(full_loss, softcap=softcap, divisor=divisor), *inputs)
        chunked = partial(
            chunked_loss_sum, chunk_tokens=chunk_tokens, softcap=softcap, divisor=divisor, loss_tokens=loss_tokens,
            grad_scale=grad_scale,
        )  # fmt: skip
        loss, *gradients = loss_and_gradients(chunked, *inputs)
        assert relative(loss.item(), expected[0].item()) <= 1e-6
        for gradient, expected_gradient in zip(gradients, expected[1:], strict=True):
            assert distance(gradient, expected_gradient) <= 1e-6

    @pytest.mark.parametrize("softcap", [None, 3.0])
    @pytest.mark.parametrize("divisor", [1.0, 2.5])
    def test_bf16_is_as_close_to_fp64_as_the_full_loss(self, softcap: float | None, divisor: float) -> None:
        hidden, weight, labels = make_inputs(dtype=torch.bfloat16)
        settings = {"softcap": softcap, "divisor": divisor}
        exact = loss_and_gradients(partial(full_loss, **settings), hidden.double(), weight.double(), labels)
        full = loss_and_gradients(partial(full_loss, **settings), hidden, weight, labels)
        for chunk_tokens in (5, 64):
            chunked = partial(chunked_loss_sum, chunk_tokens=chunk_tokens, grad_scale=1 / 17, **settings)
            results = loss_and_gradients(chunked, hidden, weight, labels)
            assert relative(results[0].item(), exact[0].item()) <= relative(full[0].item(), exact[0].item()) + 1e-6
            # A CPU rounds the head's gradient of each chunk before it is added.
            for ours, theirs, expected, limit in zip(results[1:], full[1:], exact[1:], (1.01, 1.2), strict=True):
                assert ours.dtype == torch.bfloat16
                assert distance(ours.double(), expected) <= limit * distance(theirs.double(), expected)

    def test_nothing_that_is_not_initialized_is_read(self) -> None:
        """In deterministic mode torch fills new tensors with NaN. A CPU with AMX read the space between two rows."""
        inputs = make_inputs(dtype=torch.bfloat16)
        chunked = partial(chunked_loss_sum, chunk_tokens=64, grad_scale=1 / 17)
        expected = loss_and_gradients(chunked, *inputs)
        torch.use_deterministic_algorithms(True)
        try:
            results = loss_and_gradients(chunked, *inputs)
        finally:
            torch.use_deterministic_algorithms(False)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))

    @pytest.mark.parametrize("loss_tokens", [0, None])
    def test_without_a_label_loss_and_gradients_are_zero(self, loss_tokens: int | None) -> None:
        inputs = make_inputs(ignored=1.0)
        chunked = partial(chunked_loss_sum, chunk_tokens=5, loss_tokens=loss_tokens)
        loss, *gradients = loss_and_gradients(chunked, *inputs)
        assert loss.item() == 0.0
        assert all(not gradient.any() for gradient in gradients)

    def test_a_confident_token_has_an_exact_loss(self) -> None:
        """log(1 + e^-12) = 6.1e-6 would vanish in the rounding of a log-sum-exp of 112."""
        hidden, weight = torch.eye(2)[None], torch.tensor([[112.0, 0.0], [100.0, 0.0]])
        labels = torch.tensor([[0, -100]])
        loss = chunked_loss_sum(hidden, weight, labels, 8).item()
        assert loss == token_loss_sum(hidden @ weight.T, labels).item() == pytest.approx(6.144e-06, rel=0.02)

    def test_a_label_outside_the_vocabulary_is_not_ignored(self) -> None:
        hidden, weight, labels = make_inputs()
        for label in (VOCABULARY, -1):
            labels[0, 0] = label
            assert chunked_loss_sum(hidden, weight, labels, 5).isnan()

    def test_the_loss_does_not_depend_on_the_size_of_the_chunks(self) -> None:
        inputs = make_inputs()
        losses = {chunked_loss_sum(*inputs, chunk_tokens).item() for chunk_tokens in (4, 11, 22, 44)}
        assert max(losses) - min(losses) <= 1e-6 * max(losses)


class TestCost:
    def test_no_tensor_has_all_logits(self) -> None:
        hidden, weight, labels = make_inputs(ignored=0.0)
        width = 16
        hidden, weight = hidden[..., :width].clone().requires_grad_(), weight[:, :width].clone().requires_grad_()
        with Largest() as full:
            full_loss(hidden, weight, labels, None, 1.0).backward()
        assert full.elements == TOKENS * VOCABULARY
        with Largest() as chunked:
            chunked_loss_sum(hidden, weight, labels, 5).backward()
        # The head and its gradient; a chunk has only 5 x 112 logits.
        assert chunked.elements == VOCABULARY * width
        with torch.no_grad(), Largest() as validation:
            chunked_loss_sum(hidden, weight, labels, 5)
        assert validation.elements == VOCABULARY * width

    def test_only_gradients_that_are_needed_are_computed(self) -> None:
        hidden, weight, labels = make_inputs(ignored=0.0)

        def count(loss_sum: Callable[[], Tensor], backward: bool) -> int:
            with Largest() as mode:
                loss = loss_sum()
                if backward:
                    loss.backward()
            return mode.matmuls

        chunks = -(-TOKENS // 5)
        loss_sum = partial(chunked_loss_sum, labels_BT=labels, chunk_tokens=5)
        trained = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        assert count(partial(loss_sum, *trained), backward=True) == 3 * chunks
        assert count(partial(loss_sum, trained[0], weight), backward=True) == 2 * chunks
        assert count(partial(loss_sum, hidden, trained[1]), backward=True) == 2 * chunks
        with torch.no_grad():
            assert count(partial(loss_sum, *trained), backward=False) == chunks

    def test_tokens_without_a_label_cost_nothing_if_their_number_is_known(self) -> None:
        hidden, weight, labels = make_inputs(ignored=0.5)
        loss_tokens = int((labels != -100).sum())
        with Largest() as mode:
            chunked_loss_sum(hidden, weight, labels, 5, loss_tokens=loss_tokens)
        assert mode.matmuls == -(-loss_tokens // 5) < -(-TOKENS // 5)

    @pytest.mark.parametrize(
        ("vocab_size", "itemsize", "free_gib", "expected"),
        [
            (128256, 2, 139.0, 4096),
            (128256, 2, 24.0, 2048),
            (128256, 4, 24.0, 1024),
            (64128, 2, 12.0, 2048),
            (262144, 2, 8.0, 512),
            (262144, 2, 0.0, 256),
            (8, 4, 0.5, 4096),
        ],
    )
    def test_the_chunk_size_follows_from_vocabulary_and_free_memory(
        self, vocab_size: int, itemsize: int, free_gib: float, expected: int
    ) -> None:
        assert choose_chunk_tokens(vocab_size, itemsize, int(free_gib * 2**30)) == expected


@pytest.mark.parametrize("loss_tokens", [3, 5, 12])
def test_a_wrong_number_of_labels_is_an_error(loss_tokens: int) -> None:
    """Otherwise labels would be dropped, or the head computed for tokens without a label."""
    labels = torch.tensor([[1, -100, 2, -100, 3, -100, -100, 0, -100, -100, -100, -100]])
    with pytest.raises(RuntimeError, match="loss_tokens is not the number of labels"):
        chunked_loss_sum(torch.randn(1, 12, 8), torch.randn(9, 8), labels, 5, loss_tokens=loss_tokens)
    assert chunked_loss_sum(torch.randn(1, 12, 8), torch.randn(9, 8), labels, 5, loss_tokens=4) > 0


def test_a_step_tells_the_loss_what_it_needs(folder_of: Callable[[tuple[str, str]], Path]) -> None:
    """How many labels there are, and what the sum is divided by: without them the head is computed for all tokens, and
    gradients in bf16 are rounded twice."""
    model = load_model(folder_of(("llama", "tied")), CPU, execution=ExecutionOptions(loss="chunked"))
    module, calls = model.module, []

    def record(*args: Tensor, **options: Any) -> Tensor:
        calls.append((options["loss_tokens"], options["grad_scale"]))
        return chunked_loss_sum(*args, chunk_tokens=8, **options)

    module.fused_loss = record
    sequences = random_sequences(np.random.default_rng(0), 6, 16, vocabulary=50)
    batches = [collate([sequences[n : n + 3]], pad_id=0) for n in (0, 3)]
    counts = [int((batch.labels != -100).sum()) for batch in batches]
    Runner(model, CPU, packed=True).forward_backward(batches, 1000)
    assert calls == [(count, 1 / 1000) for count in counts]


class TestModels:
    @pytest.mark.parametrize(
        "case",
        [("llama", "tied"), ("llama", "grouped"), ("granite", "multipliers"), ("gemma2", "caps"), ("gpt2", "plain")],
        ids="-".join,
    )
    @pytest.mark.parametrize("packed", [True, False])
    def test_a_step_has_the_same_loss_and_gradients_and_never_logits(
        self, case: tuple[str, str], packed: bool, folder_of: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full, chunked = (
            load_model(folder_of(case), CPU, execution=ExecutionOptions(loss=loss)).module
            for loss in ("full", "chunked")
        )
        chunked.fused_loss = partial(chunked.fused_loss, chunk_tokens=5)
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(96, (2, 12), generator=generator)
        labels = torch.where(torch.rand(2, 12, generator=generator) < 0.6, ids.roll(-1, 1), -100)
        positions = torch.arange(12).expand(2, 12)
        doc_ids = torch.tensor([[0] * 12, [0] * 9 + [1] * 3]) if packed else None
        expected = micro_batch_loss(full, ids, positions, doc_ids, labels)
        monkeypatch.setattr(Decoder, "compute_logits", None)
        loss = micro_batch_loss(chunked, ids, positions, doc_ids, labels)
        assert relative(loss.item(), expected.item()) <= 1e-6
        for each in (loss, expected):
            (each / 9).backward()
        for (name, parameter), reference in zip(chunked.named_parameters(), full.parameters(), strict=True):
            difference = (parameter.grad - reference.grad).norm()
            assert difference <= 1e-6 * reference.grad.norm() + ZERO_LIMIT, name

    def test_on_a_cpu_auto_is_full_and_the_notes_say_so(self, folder_of: Any) -> None:
        folder = folder_of(("llama", "grouped"))
        model = load_model(folder, CPU)
        assert str(model.choices["model.loss"]) == "full (on a CPU)"
        assert not hasattr(model.module, "fused_loss")
        model = load_model(folder, CPU, execution=ExecutionOptions(loss="chunked"))
        assert str(model.choices["model.loss"]) == "chunked (as requested, 512 tokens at a time)"

    def test_the_fallback_refuses_it(self, folder_of: Any) -> None:
        folder = folder_of(("llama", "grouped"))
        model = load_model(folder, CPU, execution=ExecutionOptions("fallback"))
        assert str(model.choices["model.loss"]) == "full (the Transformers fallback computes all logits)"
        assert str(model.choices["model.compile"]) == "none (in the Transformers fallback)"
        with pytest.raises(UsageError, match="model.loss chunked: only for the native decoder"):
            load_model(folder, CPU, execution=ExecutionOptions("fallback", loss="chunked"))

    def test_two_losses_contradict_each_other(self, folder_of: Any) -> None:
        execution = ExecutionOptions(loss="chunked", liger=("loss",))
        with pytest.raises(UsageError, match="model.liger loss"):
            check_model_folder(folder_of(("llama", "grouped")), CPU, torch.float32, execution)

    @pytest.mark.parametrize(("precision", "limit"), [("fp32", 1e-6), ("bf16", 1e-3)])
    def test_a_run_has_the_same_losses(self, precision: str, limit: float, settings: Any, tmp_path: Path) -> None:
        """bf16 runs in FSDP2, which gathers the head."""
        losses = {}
        for loss in ("auto", "full", "chunked"):
            overrides = settings(
                model__loss=loss,
                training__precision=precision,
                training__max_steps=3,
                data__validation_split=0.2,
                training__validate_every_steps=3,
                output_dir=str(tmp_path / loss),
            )
            api.train(load_config(overrides=overrides))
            lines = [json.loads(line) for line in (tmp_path / loss / "metrics.jsonl").read_text().splitlines()]
            losses[loss] = [line[key] for line in lines for key in ("loss", "val_loss") if key in line]
        assert len(losses["full"]) == 4
        assert losses["auto"] == losses["full"]
        assert losses["chunked"] == pytest.approx(losses["full"], rel=limit)


def test_layouts_train_as_transformers_does(tmp_path: Path) -> None:
    """FSDP2, tp and pp, with a vocabulary that tp does not divide, tied and untied, with a soft cap and a divisor."""
    sizes = {"vocab_size": 97, "num_hidden_layers": 2}
    tied = make_model(tmp_path / "tied", "llama", "tied", **sizes)
    capped = make_model(tmp_path / "capped", "gemma2", "caps", **sizes)
    divided = make_model(tmp_path / "divided", "granite", "multipliers", **sizes)
    layouts: list[tuple[Path, dict[str, Any]]] = [
        (tied, {"tp": 4}),
        (tied, {"dp_shard": 2, "pp": 2}),
        (capped, {"tp": 2, "pp": 2}),
        (divided, {"dp_shard": 2, "tp": 2, "sequence": False}),
    ]
    cases = [
        Case(f"{n}", str(folder), layout, free_running=False, chunk_tokens=40)
        for n, (folder, layout) in enumerate(layouts)
    ]
    check_layouts(cases, 4, tmp_path)

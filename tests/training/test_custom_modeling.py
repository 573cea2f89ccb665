"""The native decoder against Transformers: logits, gradients and weights after steps of every family, and resizing.

Every family has several tiny random shapes (tests/tiny_families.py). `python tests/training/test_custom_modeling.py`
prints the largest differences, one JSON line per shape. On several processes: test_layouts.py, ../test_parallel.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import parity
from parity import load_transformers
from selection import the_rest
from sides import OurSide, both_sides
from tiny_families import CAPPED, CASES, LENGTH_DEPENDENT, SHAPES, VOCABULARY, make_model
from torchstone.checkpoint.model_folder import load_model
from torchstone.checkpoint.save import hf_state_dict, save_model
from torchstone.models.execution import ExecutionOptions

CPU = torch.device("cpu")
Case = tuple[str, str]
FolderOf = Callable[[Case], Path]
FUSIONS: dict[str, Any] = {"unfused": (), "fused qkv": ("qkv",), "fused both": ("qkv", "gate_up")}
# Without RoPE, a bias on the keys shifts all scores alike and changes no softmax.
NO_GRADIENT = {("smollm3", "biases"): ("model.layers.0.self_attn.k_proj.bias",)}
# One shape of each family.
FAMILIES = [(family, next(iter(shapes))) for family, shapes in SHAPES.items()]


def with_the_rest(cases: list[Any], by_default: list[Any]) -> list[Any]:
    """`cases` with an id each; only those in `by_default` run without TESTS=all."""
    return [pytest.param(case, id="-".join(case), marks=() if case in by_default else the_rest) for case in cases]


def ids_and_positions(length: int = 40) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(0))
    return ids, torch.arange(length).expand(2, length)


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=the_rest)])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_custom_modeling_matches_original(case: Case, attention: str, folder_of: FolderOf) -> None:
    ids, positions = ids_and_positions()
    model = load_model(folder_of(case), CPU, execution=ExecutionOptions(implementation="native", attention=attention))
    with torch.no_grad():
        logits = model.module(ids, positions)
    parity.assert_same_logits(logits, load_transformers(folder_of(case)), ids)


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("case", FAMILIES, ids="-".join)
def test_fusion_changes_neither_logits_nor_files(case: Case, fusion: str, folder_of: FolderOf, tmp_path: Path) -> None:
    ids, positions = ids_and_positions()
    model = load_model(folder_of(case), CPU, execution=ExecutionOptions(fused=FUSIONS[fusion]))
    names = {name for name, _ in model.module.named_parameters()}
    assert ("layers.0.attention.wqkv.weight" in names) == ("qkv" in FUSIONS[fusion])
    with torch.no_grad():
        logits = model.module(ids, positions)
    parity.assert_same_logits(logits, load_transformers(folder_of(case)), ids)
    save_model(model, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (folder_of(case) / "model.safetensors").read_bytes()


def sides(
    case: Case, folder: Path, packed: bool, settings: dict[str, Any], fusion: str = "unfused"
) -> tuple[parity.Reference, OurSide]:
    execution = ExecutionOptions(implementation="native", fused=FUSIONS[fusion])
    attention = "eager" if case[0] == "gemma2" else "sdpa"
    reference, ours = both_sides(folder, packed, settings, execution, attn_implementation=attention)
    reference.one_by_one = case in LENGTH_DEPENDENT
    parity.reset_dynamic_rope(reference.model)
    return reference, ours


def step_locked(case: Case, folder: Path, packed: bool, fusion: str = "unfused") -> parity.Differences:
    reference, ours = sides(case, folder, packed, parity.FREE_RUNNING, fusion)
    steps = parity.random_batches(3, VOCABULARY, seed=1)
    return parity.assert_step_locked(reference, ours.step, ours.lock, steps, NO_GRADIENT.get(case, ()))


def free_running(case: Case, folder: Path, packed: bool) -> parity.Differences:
    reference, ours = sides(case, folder, packed, parity.FREE_RUNNING)
    steps = parity.random_batches(parity.FREE_RUNNING["steps"], VOCABULARY, seed=2)
    limits = parity.CAPPED_LIMITS if case in CAPPED else parity.FREE_LIMITS
    return parity.assert_free_running(reference, ours.step, ours.weights, steps, limits)


def long_running(case: Case, folder: Path, packed: bool) -> parity.Differences:
    reference, ours = sides(case, folder, packed, parity.LONG_RUNNING)
    steps = parity.random_batches(parity.LONG_RUNNING["steps"], VOCABULARY, seed=3)
    return parity.assert_long_running(reference, ours.step, steps)


# Every shape packed, one shape of each family padded too; where documents cannot be packed, padded.
PACKED = [(case, case not in LENGTH_DEPENDENT) for case in CASES]
PADDED = [(case, False) for case in CASES if case not in LENGTH_DEPENDENT]


def packed_and_padded(by_default: list[Any]) -> list[Any]:
    return [
        pytest.param(
            case, packed, id=f"{'-'.join(case)}-{'packed' if packed else 'padded'}",
            marks=() if (case, packed) in by_default else the_rest,
        )
        for case, packed in PACKED + PADDED
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "packed"), packed_and_padded(by_default=PACKED + [(case, False) for case in FAMILIES])
)
def test_every_gradient_equals_transformers_step_locked(case: Case, packed: bool, folder_of: FolderOf) -> None:
    step_locked(case, folder_of(case), packed)


@pytest.mark.parametrize(("case", "packed"), packed_and_padded(by_default=[(case, True) for case in FAMILIES]))
def test_weights_and_losses_equal_transformers_free_running(case: Case, packed: bool, folder_of: FolderOf) -> None:
    free_running(case, folder_of(case), packed)


@pytest.mark.parametrize("case", with_the_rest(FAMILIES, by_default=[("llama", "grouped"), ("gemma2", "caps")]))
def test_losses_equal_transformers_over_fifty_steps_with_the_usual_eps(case: Case, folder_of: FolderOf) -> None:
    long_running(case, folder_of(case), packed=True)


@pytest.mark.parametrize("fusion", [pytest.param("fused qkv", marks=the_rest), "fused both"])
@pytest.mark.parametrize("case", FAMILIES, ids="-".join)
def test_fused_gradients_equal_transformers_step_locked(case: Case, fusion: str, folder_of: FolderOf) -> None:
    step_locked(case, folder_of(case), packed=True, fusion=fusion)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_packed_documents_equal_separate_rows(case: Case, folder_of: FolderOf) -> None:
    model = load_model(folder_of(case), CPU, execution=ExecutionOptions(implementation="native"))
    lengths = [11, 3, 17, 1, 8] if case not in LENGTH_DEPENDENT else [11, 3, 12, 1, 8]
    ids = torch.randint(0, VOCABULARY, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    doc_ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        packed = model.module(ids, positions, doc_ids).split(lengths, dim=1)
        for logits, document in zip(packed, ids.split(lengths, dim=1), strict=True):
            alone = model.module(document, torch.arange(document.shape[1])[None])
            assert (logits - alone).abs().max().item() <= parity.LOGITS_LIMIT


@pytest.mark.parametrize("case", LENGTH_DEPENDENT, ids="-".join)
def test_packing_is_refused_where_rope_depends_on_the_row_length(case: Case, folder_of: FolderOf) -> None:
    model = load_model(folder_of(case), CPU)
    assert model.packing_error(12) is None
    assert "depends on the row's length beyond 12 tokens" in model.packing_error(13)


@pytest.mark.parametrize("case", LENGTH_DEPENDENT, ids="-".join)
def test_a_short_row_does_not_depend_on_a_long_one_in_its_batch(case: Case, folder_of: FolderOf) -> None:
    model = load_model(folder_of(case), CPU).module
    ids, positions = ids_and_positions(24)
    positions = positions.clone()
    positions[1, 8:] = 0
    with torch.no_grad():
        in_batch, alone = model(ids, positions)[1, :8], model(ids[1:, :8], positions[1:, :8])[0]
    assert (in_batch - alone).abs().max().item() <= parity.LOGITS_LIMIT


@pytest.mark.parametrize("case", with_the_rest(CASES, by_default=FAMILIES))
def test_bf16_is_as_close_to_transformers_as_its_own_backends(case: Case, folder_of: FolderOf) -> None:
    ids, positions = ids_and_positions()
    folder = folder_of(case)
    model = load_model(folder, CPU, torch.bfloat16, ExecutionOptions(implementation="native", attention="eager"))
    with torch.no_grad():
        logits = model.module(ids, positions).float()
        eager = load_transformers(folder, "eager", torch.bfloat16)(ids).logits.float()
        # Gemma 2's soft caps have no second backend: there the distance is that between bf16 and fp32.
        sdpa = load_transformers(folder, "sdpa", torch.bfloat16) if case[0] != "gemma2" else load_transformers(folder)
        other = sdpa(ids).logits.float()
    assert (logits - eager).norm().item() <= (eager - other).norm().item()


@pytest.mark.parametrize("case", [*FAMILIES, ("llama", "tied"), ("gpt2", "untied")], ids="-".join)
def test_custom_model_resize_embedding(case: Case, folder_of: FolderOf, tmp_path: Path) -> None:
    """Old embeddings stay, bit for bit; new ones are their mean; Transformers reads the resized folder."""
    before = hf_state_dict(load_model(folder_of(case), CPU))
    model = load_model(folder_of(case), CPU, tokenizer_size=101)
    assert any("101 tokens, the model has 96 embeddings: resized to 104" in warning for warning in model.warnings)
    model.align_special_tokens({"pad_token_id": 3, "eos_token_id": 100})
    after = hf_state_dict(model)
    assert after.keys() == before.keys()
    new_names = [name for name in before if after[name].shape != before[name].shape]
    assert len(new_names) == (1 if model.module.config.tied else 2)
    for name, old in before.items():
        assert torch.equal(after[name][: len(old)], old)
    for name in new_names:
        assert after[name].shape[0] == 104
        assert torch.allclose(after[name][96:], before[name].mean(dim=0).expand(8, -1), atol=1e-7)
    save_model(model, tmp_path)
    ids, positions = torch.tensor([[5, 97, 3, 100]]), torch.arange(4)[None]
    with torch.no_grad():
        logits = model.module(ids, positions)
    reference = load_transformers(tmp_path)
    parity.assert_same_logits(logits, reference, ids)
    assert (reference.config.vocab_size, reference.config.pad_token_id, reference.config.eos_token_id) == (104, 3, 100)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        for case in CASES:
            folder = make_model(Path(root) / "-".join(case), *case)
            ids, positions = ids_and_positions()
            with torch.no_grad():
                logits = load_model(folder, CPU).module(ids, positions)
            packed = case not in LENGTH_DEPENDENT
            locked, free = step_locked(case, folder, packed), free_running(case, folder, packed)
            figures = {
                "family": case[0],
                "shape": case[1],
                "rows": "packed" if packed else "padded",
                "logits": parity.assert_same_logits(logits, load_transformers(folder), ids),
            }
            figures |= {kind: locked.worst(kind) for kind in ("loss", "norm", "gradient")}
            print(json.dumps(figures | {"free_loss": free.worst("loss"), "free_weight": free.worst("weight")}))


if __name__ == "__main__":
    main()

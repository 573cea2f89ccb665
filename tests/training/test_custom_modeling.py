"""The native decoder against Transformers, family by family: logits, gradients, weights after steps, resized rows.

Every family has several tiny random shapes (tests/tiny_families.py). Run as a script it prints the largest differences
seen, one JSON line a shape: `python tests/training/test_custom_modeling.py`. Shared out over processes the same is in
test_layouts.py; resized embeddings and the tables of heads there, in tests/test_parallel.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import parity
from sides import OurSide, both_sides
from tiny_families import BY_LENGTH, CAPPED, CASES, SHAPES, VOCABULARY, make_model
from torchstone.models.execution import Execution
from torchstone.models.opening import load_model

CPU = torch.device("cpu")
LOGITS_LIMIT = 1e-5
LAYOUTS = {"separate": (), "fused qkv": ("qkv",), "fused both": ("qkv", "gate_up")}
# Without positions, what is added to all keys alike changes no softmax.
NO_GRADIENT = {("smollm3", "biases"): ("model.layers.0.self_attn.k_proj.bias",)}
# One shape of each family, for what is asked of a family rather than of a setting.
FAMILIES = [(family, next(iter(shapes))) for family, shapes in SHAPES.items()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[tuple[str, str], Path] = {}

    def folder(case: tuple[str, str]) -> Path:
        if case not in made:
            made[case] = make_model(tmp_path_factory.mktemp(case[0]), *case)
        return made[case]

    return folder


def name(case: Any) -> str:
    return "-".join(case) if isinstance(case, tuple) else str(case)


def theirs(folder: Path, attention: str = "eager", dtype: torch.dtype = torch.float32) -> nn.Module:
    """Transformers' own model. Eager is the one of its kernels that computes every family, soft caps included."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, attn_implementation=attention).eval()
    _without_memory(model)
    return model


def _without_memory(model: nn.Module) -> None:
    """Transformers' dynamic RoPE goes on with the longest row it has met; here every row is the first."""
    rotary = getattr(getattr(model, "model", None), "rotary_emb", None)
    if getattr(rotary, "rope_type", None) == "dynamic":

        def forget(*_: Any) -> None:
            rotary.max_seq_len_cached = rotary.original_max_seq_len
            rotary.inv_freq = rotary.original_inv_freq

        model.register_forward_pre_hook(forget)


def logits_of(case: tuple[str, str], folder: Path, length: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(length).expand(2, length)
    with torch.no_grad():
        return ids, positions, theirs(folder)(ids).logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("case", CASES, ids=name)
def test_custom_modeling_matches_original(case: tuple[str, str], attention: str, folders: Any) -> None:
    ids, positions, wanted = logits_of(case, folders(case))
    with torch.no_grad():
        model = load_model(folders(case), CPU, execution=Execution(implementation="native", attention=attention))
        got = model.module(ids, positions)
    assert (got - wanted).abs().max().item() <= LOGITS_LIMIT


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", FAMILIES, ids=name)
def test_a_fused_layout_changes_neither_logits_nor_files(
    case: tuple[str, str], layout: str, folders: Any, tmp_path: Path
) -> None:
    ids, positions, wanted = logits_of(case, folders(case))
    model = load_model(folders(case), CPU, execution=Execution(fused=LAYOUTS[layout]))
    names = {parameter for parameter, _ in model.module.named_parameters()}
    assert ("layers.0.attention.wqkv.weight" in names) == ("qkv" in LAYOUTS[layout])
    with torch.no_grad():
        assert (model.module(ids, positions) - wanted).abs().max().item() <= LOGITS_LIMIT
    model.save(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (folders(case) / "model.safetensors").read_bytes()


def sides(
    case: tuple[str, str], folder: Path, packed: bool, settings: dict[str, Any], layout: str = "separate"
) -> tuple[parity.Reference, OurSide]:
    execution = Execution(implementation="native", fused=LAYOUTS[layout])
    attention = "eager" if case[0] == "gemma2" else "sdpa"
    reference, ours = both_sides(folder, packed, settings, execution, attn_implementation=attention)
    reference.alone = case in BY_LENGTH
    _without_memory(reference.model)
    return reference, ours


def step_locked(case: tuple[str, str], folder: Path, packed: bool, layout: str = "separate") -> parity.Worst:
    reference, ours = sides(case, folder, packed, parity.FREE_RUNNING, layout)
    steps = parity.random_batches(3, VOCABULARY, seed=1)
    return parity.assert_step_locked(reference, ours.step, ours.lock, steps, NO_GRADIENT.get(case, ()))


def free_running(case: tuple[str, str], folder: Path, packed: bool) -> parity.Worst:
    reference, ours = sides(case, folder, packed, parity.FREE_RUNNING)
    steps = parity.random_batches(parity.FREE_RUNNING["steps"], VOCABULARY, seed=2)
    limits = (parity.CAPPED_LOSS_LIMIT, parity.CAPPED_WEIGHT_LIMIT) if case in CAPPED else ()
    return parity.assert_free_running(reference, ours.step, ours.weights, steps, *limits)


def long_running(case: tuple[str, str], folder: Path, packed: bool) -> parity.Worst:
    reference, ours = sides(case, folder, packed, parity.LONG_RUNNING)
    steps = parity.random_batches(parity.LONG_RUNNING["steps"], VOCABULARY, seed=3)
    return parity.assert_long_running(reference, ours.step, steps)


PADDED_AND_PACKED = [(case, packed) for case in CASES for packed in (False, True) if not (packed and case in BY_LENGTH)]
ROWS = {False: "padded", True: "packed"}


def name_of_rows(value: Any) -> str:
    return ROWS[value] if isinstance(value, bool) else name(value)


@pytest.mark.parametrize(("case", "packed"), PADDED_AND_PACKED, ids=name_of_rows)
def test_every_gradient_equals_transformers_step_locked(case: tuple[str, str], packed: bool, folders: Any) -> None:
    step_locked(case, folders(case), packed)


@pytest.mark.parametrize(("case", "packed"), PADDED_AND_PACKED, ids=name_of_rows)
def test_weights_and_losses_equal_transformers_free_running(case: tuple[str, str], packed: bool, folders: Any) -> None:
    free_running(case, folders(case), packed)


@pytest.mark.parametrize("case", FAMILIES, ids=name)
def test_fifty_steps_with_the_usual_eps_keep_the_losses(case: tuple[str, str], folders: Any) -> None:
    long_running(case, folders(case), packed=True)


@pytest.mark.parametrize("layout", ["fused qkv", "fused both"])
@pytest.mark.parametrize("case", FAMILIES, ids=name)
def test_fused_gradients_equal_transformers_step_locked(case: tuple[str, str], layout: str, folders: Any) -> None:
    step_locked(case, folders(case), packed=True, layout=layout)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_packed_rows_equal_separate_ones(case: tuple[str, str], folders: Any) -> None:
    model = load_model(folders(case), CPU, execution=Execution(implementation="native"))
    lengths = [11, 3, 17, 1, 8] if case not in BY_LENGTH else [11, 3, 12, 1, 8]
    ids = torch.randint(0, VOCABULARY, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    docs = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        packed = model.module(ids, positions, docs)
        start = 0
        for length in lengths:
            here = slice(start, start + length)
            alone = model.module(ids[:, here], torch.arange(length)[None])
            assert (packed[:, here] - alone).abs().max().item() <= LOGITS_LIMIT
            start += length


@pytest.mark.parametrize("case", BY_LENGTH, ids=name)
def test_packing_is_refused_where_rope_depends_on_the_length_of_the_row(case: tuple[str, str], folders: Any) -> None:
    model = load_model(folders(case), CPU)
    assert model.why_not_packed(12) is None
    assert "depend on the length of the row beyond 12 tokens" in model.why_not_packed(13)


@pytest.mark.parametrize("case", BY_LENGTH, ids=name)
def test_a_short_row_does_not_turn_otherwise_beside_a_long_one(case: tuple[str, str], folders: Any) -> None:
    model = load_model(folders(case), CPU).module
    ids = torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(24).expand(2, 24).clone()
    positions[1, 8:] = 0
    with torch.no_grad():
        together, alone = model(ids, positions)[1, :8], model(ids[1:, :8], positions[1:, :8])[0]
    assert (together - alone).abs().max().item() <= LOGITS_LIMIT


@pytest.mark.parametrize("case", CASES, ids=name)
def test_bf16_stays_within_the_spread_of_transformers_own_backends(case: tuple[str, str], folders: Any) -> None:
    ids = torch.randint(0, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(40).expand(2, 40)
    model = load_model(folders(case), CPU, torch.bfloat16, Execution(implementation="native", attention="eager"))
    with torch.no_grad():
        eager, exact = theirs(folders(case), "eager", torch.bfloat16)(ids).logits, theirs(folders(case))(ids).logits
        got = model.module(ids, positions)
        # Where sdpa is not there or leaves out the caps, the spread is that between bf16 and fp32.
        other = exact if case[0] == "gemma2" else theirs(folders(case), "sdpa", torch.bfloat16)(ids).logits.float()
    assert (got.float() - eager.float()).norm().item() <= (eager.float() - other).norm().item()


@pytest.mark.parametrize("case", [*FAMILIES, ("llama", "tied"), ("gpt2", "untied")], ids=name)
def test_custom_model_resize_embedding(case: tuple[str, str], folders: Any, tmp_path: Path) -> None:
    """Old rows stay at their places, bit for bit; new ones are the mean; Transformers reads the resized folder."""
    model = load_model(folders(case), CPU)
    before = {key: tensor.clone() for key, tensor in model.disk_tensors().items()}
    said = model.align(tokens=101, marks={"pad_token_id": 3, "eos_token_id": 100})
    assert "101 tokens, the model 96 rows: now 104" in said[0]
    after = model.disk_tensors()
    assert after.keys() == before.keys()
    grown = [key for key in before if after[key].shape != before[key].shape]
    assert len(grown) == (1 if model.module.config.tied else 2)
    for key, old in before.items():
        assert torch.equal(after[key][: len(old)], old)
    for key in grown:
        mean = before[key].mean(dim=0)
        assert after[key].shape[0] == 104
        assert torch.allclose(after[key][96:], mean.expand(8, -1), atol=1e-7)
    model.save(tmp_path)
    ids, positions = torch.tensor([[5, 97, 3, 100]]), torch.arange(4)[None]
    with torch.no_grad():
        wanted = theirs(tmp_path)
        assert (wanted(ids).logits - model.module(ids, positions)).abs().max().item() <= LOGITS_LIMIT
    assert (wanted.config.vocab_size, wanted.config.pad_token_id, wanted.config.eos_token_id) == (104, 3, 100)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        for case in CASES:
            folder = make_model(Path(place) / "-".join(case), *case)
            ids, positions, wanted = logits_of(case, folder)
            with torch.no_grad():
                got = load_model(folder, CPU).module(ids, positions)
            packed = case not in BY_LENGTH
            locked, free = step_locked(case, folder, packed), free_running(case, folder, packed)
            figures = {
                "family": case[0],
                "shape": case[1],
                "rows": ROWS[packed],
                "logits": (got - wanted).abs().max().item(),
            }
            figures |= {"loss": locked.loss, "norm": locked.norm, "gradient": locked.gradient}
            print(json.dumps(figures | {"free_loss": free.loss, "free_weight": free.weight}))


if __name__ == "__main__":
    main()

"""Our AdamW kernel against torch.optim.AdamW, and one process with master weights against FSDP2, on a GPU."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from precision import open_runner, random_sequences, single_process_runner, train_steps
from steps import step_batch
from tiny_families import VOCABULARY, make_model
from torchstone.data.collate import collate
from torchstone.optim.adamw import AdamW

DEVICE = torch.device("cuda", 0)
OPTIONS = {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def make_pair(shape: tuple[int, ...], dtype: torch.dtype, copy_dtype: torch.dtype | None) -> tuple[AdamW, nn.Parameter]:
    parameter = nn.Parameter(torch.randn(shape, device=DEVICE).to(dtype))
    copies = None if copy_dtype is None else {parameter: nn.Parameter(parameter.detach().to(copy_dtype))}
    return AdamW([{"params": [parameter]}], copies, **OPTIONS), parameter


@pytest.mark.parametrize("shape", [(7,), (4096,), (33, 129), (513, 1024)], ids=str)
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("coefficient", [1.0, 0.37])
def test_it_updates_as_torch_does(shape: tuple[int, ...], gradient_dtype: torch.dtype, coefficient: float) -> None:
    torch.manual_seed(0)
    ours, parameter = make_pair(shape, torch.float32, torch.bfloat16)
    parameter.grad_dtype = None
    fused, exact = nn.Parameter(parameter.detach().clone()), nn.Parameter(parameter.detach().double())
    references = [torch.optim.AdamW([fused], fused=True, **OPTIONS), torch.optim.AdamW([exact], **OPTIONS)]
    for _ in range(5):
        gradient = torch.randn(shape, device=DEVICE).to(gradient_dtype)
        parameter.grad, fused.grad = gradient.clone(), gradient.float() * coefficient
        exact.grad = gradient.double() * coefficient
        ours.clip_and_step(torch.tensor(coefficient, dtype=torch.float64, device=DEVICE))
        for reference in references:
            reference.step()
    tensors = [(parameter, fused, exact)]
    states = ours.state[parameter], references[0].state[fused], references[1].state[exact]
    tensors += [tuple(state[key] for state in states) for key in ("exp_avg", "exp_avg_sq")]
    for own, of_torch, expected in tensors:
        # As far from AdamW in fp64 as torch's own fp32 kernel is.
        limit = 2 * (of_torch - expected).abs().max() + 2**-23 * expected.abs().max()
        assert (own - expected).abs().max() <= limit
    assert ours.state[parameter]["step"].item() == 5
    assert torch.equal(ours.copies[parameter], parameter.bfloat16())


def test_without_triton_it_is_the_one_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr("torchstone.optim.adamw.triton_error", lambda: "triton is not installed")
    ours, parameter = make_pair((33, 129), torch.float32, torch.bfloat16)
    parameter.grad_dtype = None
    expected = nn.Parameter(parameter.detach().clone())
    reference = torch.optim.AdamW([expected], fused=True, **OPTIONS)
    for coefficient in (0.5, torch.nan, 1.0):
        parameter.grad = torch.randn_like(parameter).bfloat16()
        expected.grad = parameter.grad.float() * coefficient
        ours.clip_and_step(torch.tensor(coefficient, dtype=torch.float64, device=DEVICE))
        if coefficient > 0:
            reference.step()
    assert torch.equal(parameter, expected)
    assert torch.equal(ours.copies[parameter], expected.bfloat16())


def test_a_coefficient_that_is_not_a_number_changes_nothing() -> None:
    ours, parameter = make_pair((100,), torch.float32, torch.bfloat16)
    parameter.grad = torch.randn_like(parameter)
    ours.clip_and_step(torch.ones((), dtype=torch.float64, device=DEVICE))
    before = [parameter.detach().clone(), *(ours.state[parameter][key].clone() for key in ("exp_avg", "exp_avg_sq"))]
    parameter.grad = torch.full_like(parameter, torch.inf)
    ours.clip_and_step(torch.full((), torch.nan, dtype=torch.float64, device=DEVICE))
    after = [parameter, *(ours.state[parameter][key] for key in ("exp_avg", "exp_avg_sq"))]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_it_goes_on_after_a_checkpoint() -> None:
    """The number of steps decides the bias correction."""
    results: list[Tensor] = []
    for is_resumed in (False, True):
        torch.manual_seed(0)
        optimizer, parameter = make_pair((50,), torch.float32, None)
        for number in range(4):
            if is_resumed and number == 2:
                state, weights = deepcopy(optimizer.state_dict()), parameter.detach().clone()
                # One step too far, and back.
                optimizer.clip_and_step(torch.ones((), dtype=torch.float64, device=DEVICE))
                optimizer.load_state_dict(state)
                parameter.data.copy_(weights)
            parameter.grad = torch.randn_like(parameter)
            optimizer.clip_and_step(torch.ones((), dtype=torch.float64, device=DEVICE))
        results.append(parameter.detach().clone())
    assert torch.equal(*results)


@pytest.mark.parametrize("case", [("llama", "grouped"), ("llama", "tied"), ("gpt2", "untied")], ids="-".join)
def test_one_process_trains_as_fsdp2_does(tmp_path: Path, case: tuple[str, str]) -> None:
    folder = make_model(tmp_path, *case)
    sequences = random_sequences(np.random.default_rng(0), 12, 30, VOCABULARY)
    # The second step has two micro-batches: its gradients are summed in fp32.
    batches = [collate([sequences[n : n + 3]], 0) for n in range(0, 12, 3)]
    steps = [step_batch(batches[:1]), step_batch(batches[1:3]), step_batch(batches[3:])]
    ours = train_steps(single_process_runner(folder, DEVICE, "bf16", attention="eager"), steps)
    with open_runner(folder, DEVICE, "bf16", {}, attention="eager") as runner:
        expected = train_steps(runner, steps)
    assert ours.keys() == expected.keys()
    for name, values in expected.items():
        # Gradients of a single micro-batch stay in bf16 here, which is what they were computed in.
        torch.testing.assert_close(ours[name].float(), values, rtol=1e-5, atol=1e-6)

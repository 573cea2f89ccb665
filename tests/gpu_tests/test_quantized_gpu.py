"""Frozen weights in 4 and 8 bits on a GPU: the values of bitsandbytes, the logits of PEFT, runs that are merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

pytest.importorskip("bitsandbytes")

from test_quantized_base import dequantized, load_quantized, make_peft
from tiny_families import make_model
from torchstone import api
from torchstone.observe.metrics import read_metrics
from torchstone.tuning.quantize import BaseQuantization, Quantization, dequantize, quantize

Settings = Callable[..., dict[str, Any]]
KINDS = get_args(Quantization)
GPU = torch.device("cuda", 0)
# 4-bit linears of Transformers need sizes of whole blocks.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 448}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48, 96), (2048, 2048), (7, 33)])
def test_values_are_those_of_bitsandbytes(kind: Any, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    ours = dequantize(kind, quantize(kind, weight.to(GPU)), shape, dtype)
    tolerance = {torch.float32: 2e-3, torch.bfloat16: 8e-3}[dtype] if kind == "int8" else 0
    torch.testing.assert_close(ours, dequantized(kind, weight.to(GPU)), rtol=tolerance, atol=0)
    # What an export of such a run merges into, to the last bit.
    assert torch.equal(BaseQuantization(kind, dtype, "cuda").round_trip(weight), ours.cpu())
    on_cpu = BaseQuantization(kind, dtype, "cpu").round_trip(weight)
    changed = ((ours.cpu() - on_cpu).abs() > 1e-2 * on_cpu.abs()).float().mean().item()
    print(f"{kind} {dtype} {shape}: {changed:.1e} of the values are others on a CPU")
    assert changed < 1e-3


@torch.no_grad()
def logits_of(module: Any, *inputs: Tensor) -> Tensor:
    output = module.eval()(*inputs)
    return getattr(output, "logits", output)


def test_logits_are_those_of_peft_on_a_model_loaded_in_4_bits(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "llama", "llama", "tied", **SIZES)
    make_peft(folder, tmp_path / "adapter")
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    options: dict[str, Any] = {"dtype": torch.float32, "device_map": {"": 0}}
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, **options)
    ids = torch.randint(3, 40, (2, 12), generator=torch.Generator().manual_seed(1)).to(GPU)
    expected = logits_of(PeftModel.from_pretrained(base, tmp_path / "adapter"), ids)
    unquantized = AutoModelForCausalLM.from_pretrained(folder, **options)
    other = logits_of(PeftModel.from_pretrained(unquantized, tmp_path / "adapter"), ids)
    assert (expected - other).abs().max() > 0.01, "nothing is quantized"
    ours = load_quantized(folder, tmp_path / "adapter", "nf4", GPU).module
    logits = logits_of(ours, ids, torch.arange(12, device=GPU).expand_as(ids))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compile", ["none", "block"])
def test_a_run_learns_and_is_merged(
    kind: str, compile: str, settings: Settings, chat_file: Path, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model", "llama", "grouped", **SIZES)
    values = settings(
        training__max_steps=20, system__device="cuda", training__precision="bf16", model__compile=compile,
        tuning__method="lora", tuning__lora_rank=4, tuning__quantize_base=kind, optim__learning_rate=1e-2,
    )  # fmt: skip
    for key in ("model.depth", "model.width", "model.heads"):
        del values[key]
    values |= {"model.path": str(folder), "data.path": str(chat_file), "data.context_length": 64}
    checkpoint = api.train(overrides=values).checkpoint
    assert checkpoint is not None
    losses = [line["loss"] for line in read_metrics(Path(values["output_dir"]) / "metrics.jsonl")]
    assert losses[-1] < 0.9 * losses[0]
    # It compares the merged model with base plus updates.
    assert api.export(checkpoint, tmp_path / "merged", merge=True)["verified"]

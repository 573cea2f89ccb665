"""Published config.json files with their old spellings, leftover keys, windows and padding; only the sizes are small.

The native decoder must give Transformers' logits and gradients, and save the same file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from torchstone.checkpoint.model_folder import load_model
from torchstone.checkpoint.save import save_model
from torchstone.checkpoint.weight_files import hf_tensors
from torchstone.checkpoint.weight_names import WEIGHT_NAMES
from torchstone.models.execution import ExecutionOptions

CPU = torch.device("cpu")
CONFIGS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())
# Expected warnings: the native decoder applies no dropout and runs no code of a folder.
WARNINGS = ("config.json asks for dropout", "config.json names its own code")


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    text = json.dumps(CONFIGS[request.param])
    (tmp_path / "config.json").write_text(text)
    config = AutoConfig.from_pretrained(str(tmp_path), trust_remote_code=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        is_scale = parameter.dim() == 1 and not name.endswith("bias") and "gemma" not in config.model_type
        nn.init.normal_(parameter, 1.0 if is_scale else 0.0, 0.15)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(text)
    return tmp_path


@pytest.mark.parametrize("folder", CONFIGS, indirect=True)
def test_logits_gradients_and_file_equal_transformers(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    from transformers import AutoModelForCausalLM

    model = load_model(folder, CPU, execution=ExecutionOptions(implementation="native"))
    assert all(warning.startswith(WARNINGS) for warning in model.warnings), model.warnings
    decoder, names = model.module, WEIGHT_NAMES[model.hf_config["model_type"]]
    has_softcap = decoder.config.attention_softcap is not None
    reference = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation="eager" if has_softcap else "sdpa"
    ).eval()
    # In the longer row some RoPE scalings change the frequencies, and windows are shorter than the row.
    for length in (20, 90):
        ids = torch.randint(0, 97, (1, length), generator=torch.Generator().manual_seed(length))
        logits = decoder(ids, torch.arange(length)[None])
        result = {"logits": logits.detach()} | hf_tensors(gradients_of(decoder, logits, ids), names)
        expected = reference_result(reference, ids)
        compare(result, expected).check(parity.LOCKED_LIMITS, lambda: rounding(reference, ids, expected))  # noqa: B023
    out = tmp_path_factory.mktemp("out")
    save_model(model, out)
    assert (out / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def gradients_of(module: nn.Module, logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").backward()
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


def reference_result(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    logits = model(ids, use_cache=False).logits
    return {"logits": logits.detach()} | gradients_of(model, logits, ids)


def compare(result: dict[str, Tensor], expected: dict[str, Tensor]) -> parity.Differences:
    differences = parity.Differences()
    for name, tensor in expected.items():
        if name == "logits":
            differences.see("logits", ((result[name] - tensor).abs().max() / tensor.abs().max()).item())
        else:
            differences.see("gradient", parity.distance(result[name], tensor), name)
    return differences


def rounding(model: nn.Module, ids: Tensor, result: dict[str, Tensor]) -> parity.Differences:
    return compare(result, reference_result(parity.fp64_copy(model), ids))

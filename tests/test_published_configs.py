"""config.json as it is published: old spellings, leftovers, windows and padding as they are; only the sizes are small.

What such files say must mean here what it means to Transformers: logits, every gradient, and the file that is written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parity
from torchstone.models.execution import Execution
from torchstone.models.opening import load_model
from torchstone.models.weights import disk_tensors

CPU = torch.device("cpu")
CONFIGS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())
# What a decoder that computes no dropout, and runs no code of a folder, has to say.
EXPECTED = ("config.json asks for dropout", "config.json names code of its own")


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
        plain = name.endswith("bias") or "gemma" in config.model_type or parameter.dim() > 1
        nn.init.normal_(parameter, 0.0 if plain else 1.0, 0.15)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(text)
    return tmp_path


@pytest.mark.parametrize("folder", CONFIGS, indirect=True)
def test_it_means_what_it_means_to_transformers(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    from transformers import AutoModelForCausalLM

    ours = load_model(folder, CPU, execution=Execution(implementation="native"))
    assert all(warning.startswith(EXPECTED) for warning in ours.warnings), ours.warnings
    capped = ours.module.config.attention_softcap is not None
    theirs = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation="eager" if capped else "sdpa"
    ).eval()
    # Some rotary positions turn otherwise in the longer row, and windows are shorter than it.
    for length in (20, 90):
        ids = torch.randint(0, 97, (1, length), generator=torch.Generator().manual_seed(length))
        theirs.zero_grad()
        ours.module.zero_grad()
        wanted, got = theirs(ids, use_cache=False).logits, ours.module(ids, torch.arange(length)[None])
        assert ((got - wanted).abs().max() / wanted.abs().max()).item() <= 1e-5
        for logits in (wanted, got):
            F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").backward()
        gradients = {n: p.grad for n, p in ours.module.named_parameters()}
        pieces = {box.name: box.tensor for n, g in gradients.items() for box in ours.slices_of(n, g)}
        on_disk = disk_tensors(pieces, ours.family)
        for name, parameter in theirs.named_parameters():
            assert parity.distance(on_disk[name], parameter.grad) <= parity.GRADIENT_LIMIT, name
    out = tmp_path_factory.mktemp("out")
    ours.save(out)
    assert (out / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()

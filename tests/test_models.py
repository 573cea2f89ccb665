"""The native decoder: which configs it refuses, its sizes from a depth, and generation.

Its parity with Transformers is in tests/training/test_custom_modeling.py, its files in tests/test_model_folders.py.
"""

from __future__ import annotations

import gc
import json
import shutil
import tracemalloc
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tiny import edit_config, make_llama
from tiny_families import make_model
from torchstone.checkpoint.model_folder import load_model
from torchstone.config.schema import ModelConfig
from torchstone.errors import UsageError
from torchstone.models.execution import ExecutionOptions
from torchstone.models.generate import generate
from torchstone.models.sizing import build_sized_decoder_config, parameter_count

CPU = torch.device("cpu")
PROMPTS = ([5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_llama(tmp_path / "model")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "bert"}, "config.json: model_type 'bert' is not a native family"),
        ({"hidden_act": "relu"}, "config.json: the native decoder does not support the activation 'relu'"),
        ({"rope_parameters": {"rope_type": "twisted", "rope_theta": 1e4}}, "RoPE scaling 'twisted'"),
        ({"quantization_config": {"bits": 4}}, "config.json: its weights are quantized"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"vocab_size": "448"}, "config.json: does not describe a model"),
        ({"num_attention_heads": 0, "head_dim": None}, "config.json: does not describe a model"),
        ({"num_key_value_heads": 3}, "kv_heads 3 does not divide heads 4"),
        ({"head_dim": 15}, "config.json: does not describe a model"),
        ({"rope_parameters": "llama3"}, "config.json: does not describe a model"),
    ],
    ids=str,
)
def test_a_config_that_the_decoder_does_not_support_is_refused(
    folder: Path, changes: dict[str, Any], expected: str
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(UsageError, match=expected):
        load_model(folder, CPU, execution=ExecutionOptions(implementation="native"))


def test_windows_on_which_transformers_disagrees_run_in_the_fallback(tmp_path: Path) -> None:
    """Its eager and sdpa attention apply SmolLM3's layer_types, its flash attention wants use_sliding_window."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    folder = make_model(tmp_path / "smollm3", "smollm3", "windows", layer_types=kinds)
    assert load_model(folder, CPU).implementation == "native"
    edit_config(folder, use_sliding_window=False)
    with pytest.raises(UsageError, match="windows without use_sliding_window"):
        load_model(folder, CPU, execution=ExecutionOptions(implementation="native"))
    assert load_model(folder, CPU).implementation == "fallback"


@pytest.mark.parametrize(
    ("depth", "width", "heads", "mlp_width"), [(1, 64, 1, 192), (12, 768, 12, 2048), (20, 1280, 10, 3456)]
)
def test_depth_alone_sets_all_sizes(depth: int, width: int, heads: int, mlp_width: int) -> None:
    config = build_sized_decoder_config(ModelConfig(depth=depth), vocab_size=512, context_length=128)
    assert (config.depth, config.width, config.heads, config.mlp_width) == (depth, width, heads, mlp_width)
    # Embedding, last norm, and per layer: four attention and three mlp matrices, two norms.
    expected = 512 * width + width + depth * (4 * width**2 + 3 * width * mlp_width + 2 * width)
    assert parameter_count(config) == expected


def test_a_stop_token_ends_only_its_own_row(folder: Path) -> None:
    decoder = load_model(folder, CPU).module
    unstopped = generate(decoder, PROMPTS, 12)
    stop = unstopped[0][3]
    stopped = generate(decoder, PROMPTS, 12, stop_ids=[stop])
    assert stopped == [row[: row.index(stop)] if stop in row else row for row in unstopped]


def test_sampling_is_reproducible_with_a_generator(folder: Path) -> None:
    decoder = load_model(folder, CPU).module
    one, two, other = (
        generate(decoder, PROMPTS, 8, temperature=1.0, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert one == two != other


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_loading_allocates_nothing_but_the_model(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Counts what torch and Python allocate; what the process holds depends on the allocator. The file is bf16.

    The profiler counts the mapped file as well, though it needs no memory of its own (tests/test_tensor_files.py).
    """
    folder = make_bf16_folder(tmp_path / "model", family)
    gc.collect()
    tracemalloc.start()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        module = load_model(folder, CPU, dtype).module
    python_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    size = sum(parameter.nbytes for parameter in module.parameters())
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    allocated = peak_bytes(tmp_path / "trace.json") + python_peak - (folder / "model.safetensors").stat().st_size
    assert size <= allocated <= size + 2**21
    shutil.rmtree(tmp_path)


def make_bf16_folder(folder: Path, family: str) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 30000, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12,
             "num_key_value_heads": 12, "num_hidden_layers": 4, "pad_token_id": 0}  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    model.save_pretrained(folder)
    return folder


def peak_bytes(trace: Path) -> int:
    """The most bytes that torch held at once during a profile, beyond those it held at the start."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    return max(accumulate(event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])))

"""Compare a training step with Transformers: the same sizes and tokens, in turn; one JSON line per implementation.

    python benchmarks/step.py [--depth 4] [--width 128] [--rows 32] [--length 128] [--rounds 10] [--device cpu]

Both use fp32, SDPA, one micro-batch of full rows, the mean loss over all targets, clipping and fused AdamW. Look at the
ratio of the medians: timings on shared machines vary, and steps that take turns vary together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from torchstone.config.schema import ModelConfig, OptimConfig
from torchstone.data.collate import collate
from torchstone.data.encode import TokenSequence
from torchstone.data.loader import StepBatch
from torchstone.models.sizing import build_sized_hf_config
from torchstone.optim.build import build_optimizer
from torchstone.parallel.build import build_new_model
from torchstone.parallel.runner import Runner
from torchstone.training.step import compute_gradients, optimizer_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("depth", 4), ("width", 128), ("rows", 32), ("length", 128), ("rounds", 10), ("vocab", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    hf_config = build_sized_hf_config(
        ModelConfig(depth=options.depth, width=options.width), vocab_size=options.vocab, context_length=options.length
    )
    ids = np.random.default_rng(0).integers(0, options.vocab, (options.rows, options.length))
    steps = {
        "torchstone": torchstone_step(hf_config, ids, device),
        "transformers": transformers_step(hf_config, ids, device),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options.rounds + 2):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            if number >= 2:
                seconds[name].append(time.perf_counter() - started)
    for name, values in seconds.items():
        median = statistics.median(values)
        memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        print(json.dumps({"arm": name, "model": hf_config, "device": str(device), "step_s": median,
                          "tok_s": ids.size / median, "rounds": len(values), "both_arms_memory": memory}))  # fmt: skip
    ratio = statistics.median(seconds["transformers"]) / statistics.median(seconds["torchstone"])
    print(json.dumps({"torchstone_over_transformers": ratio}))


def torchstone_step(hf_config: dict[str, Any], ids: np.ndarray, device: torch.device) -> Callable[[], None]:
    model = build_new_model(hf_config, 0.02, 0, device)
    runner = Runner(model, device, packed=False)
    optimizer = build_optimizer(model.named_parameters(), OptimConfig(), model.parameter_kinds())
    micro_batch = collate([[TokenSequence(row, row)] for row in ids], pad_id=0)
    batch = StepBatch([micro_batch], len(ids), ids.size, int((micro_batch.labels != -100).sum()), 0, 0)

    def step() -> None:
        result = compute_gradients(runner, batch, 1)
        optimizer_step(runner, optimizer, result, 1, 1e-4, 1.0)

    return step


def transformers_step(hf_config: dict[str, Any], ids: np.ndarray, device: torch.device) -> Callable[[], None]:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in hf_config.items() if k != "model_type"})).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.tensor(ids, device=device)

    def step() -> None:
        logits = model(input_ids=tokens).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()

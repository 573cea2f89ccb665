"""One training step here and in Transformers, the same shape and tokens, the arms in turn; a JSON line an arm.

    python benchmarks/step.py [--depth 4] [--width 128] [--rows 32] [--length 128] [--rounds 10] [--device cpu]

Both arms: fp32, SDPA, one micro-batch of full rows, loss as a mean over all targets, clipping, fused AdamW. The ratio
of the medians is what to look at: timings on shared machines wander, and taking turns lets both arms wander together.
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
from torchstone.data.encode import Encoded
from torchstone.data.loader import StepBatch
from torchstone.models.opening import new_model
from torchstone.models.sizing import new_hf_config
from torchstone.optim.build import build_optimizer
from torchstone.parallel.running import Runner
from torchstone.training.step import train_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("depth", 4), ("width", 128), ("rows", 32), ("length", 128), ("rounds", 10), ("vocab", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    shape = new_hf_config(
        ModelConfig(depth=options.depth, width=options.width), vocab_size=options.vocab, context_length=options.length
    )
    rng = np.random.default_rng(0)
    ids = rng.integers(0, options.vocab, (options.rows, options.length))
    arms = {"torchstone": torchstone_arm(shape, ids, device), "transformers": transformers_arm(shape, ids, device)}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(options.rounds + 2):
        for name, step in arms.items():
            began = time.perf_counter()
            step()
            if number >= 2:
                seconds[name].append(time.perf_counter() - began)
    for name, values in seconds.items():
        middle = statistics.median(values)
        memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        print(json.dumps({"arm": name, "model": shape, "device": str(device), "step_s": middle,
                          "tok_s": ids.size / middle, "rounds": len(values), "both_arms_memory": memory}))  # fmt: skip
    ratio = statistics.median(seconds["transformers"]) / statistics.median(seconds["torchstone"])
    print(json.dumps({"torchstone_over_transformers": ratio}))


def torchstone_arm(shape: dict[str, Any], ids: np.ndarray, device: torch.device) -> Callable[[], None]:
    model = new_model(shape, 0.02, 0, device)
    runner = Runner(model, device, packed=False)
    optimizer = build_optimizer(model.named_parameters(), OptimConfig())
    batch = collate([[Encoded(row, row)] for row in ids], pad_id=0)
    step_batch = StepBatch([batch], len(ids), ids.size, int((batch.labels != -100).sum()), 0, 0)
    return lambda: train_step(runner, optimizer, step_batch, 1, 1e-4, 1.0) and None


def transformers_arm(shape: dict[str, Any], ids: np.ndarray, device: torch.device) -> Callable[[], None]:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in shape.items() if k != "model_type"})).to(device)
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

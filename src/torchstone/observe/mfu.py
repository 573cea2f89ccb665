"""Model FLOPs utilization (MFU): the FLOPs that a step needs, divided by what the GPUs could have computed in its time.

The convention of PaLM, nanoGPT and torchtitan: a token needs 6 FLOPs per parameter that multiplies it (two forward,
four backward) and 12 x heads x head_dim x length in the attention of each layer; the causal mask does not halve that.
`length` is the real length of the token's document, not of its row, or the layer's window if that is shorter. Neither
recomputation nor padding counts. Frozen parameters need no gradient: 4 FLOPs each. Their adapters, which are small
beside them, do not count. With OSFT, a part of the parameters needs one.
"""

from __future__ import annotations

import re
from functools import cache

import torch

from torchstone.models.decoder import DecoderConfig
from torchstone.models.sizing import parameter_count

# Dense bf16 TFLOP/s with fp32 accumulation, by a pattern in the GPU's name; the first match counts. Only GPUs whose
# published figures agree, such as torchtitan's and nanochat's tables: a wrong peak is worse than none.
PEAK_TFLOPS = {
    "B200": 2250.0, "GH200": 989.0, "H200 NVL": 836.0, "H200": 989.0, "H100 NVL": 835.0, "H100 PCIe": 756.0,
    "H100": 989.0, "H20": 148.0, "A100": 312.0, "A800": 312.0, "A40": 149.7, "A30": 165.0, "A10": 125.0, "L40S": 362.0,
    "L40": 181.0, "L4": 121.0, "RTX 5090$": 209.5, "RTX 4090$": 165.2, "RTX 3090$": 71.0,
    "MI355X": 2500.0, "MI325X": 1307.4, "MI300X": 1307.4,
}  # fmt: skip


def peak_flops(gpu_name: str, precision: str = "bf16") -> float | None:
    """FLOP/s of one GPU with dense bf16 matrices (for fp8 twice that); None if the GPU is not in the table."""
    for pattern, tflops in PEAK_TFLOPS.items():
        if re.search(rf"\b{pattern}(?!\w)", gpu_name):
            return tflops * 1e12 * (2 if precision.startswith("fp8") else 1)
    return None


def device_peak_flops(device: torch.device, precision: str, peak_tflops: float | None) -> float | None:
    """FLOP/s of one device: `observe.peak_tflops` if set, else that of its name; None for a CPU."""
    if peak_tflops is not None:
        return peak_tflops * 1e12
    return peak_flops(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None


@cache
def matmul_parameters(config: DecoderConfig) -> int:
    """Parameters that multiply every token: all but the input embeddings, which are looked up. A tied head counts."""
    lookups = 0 if config.tied else config.vocab_size * config.width
    if config.has_learned_positions:
        lookups += config.max_positions * config.width
    return parameter_count(config) - lookups


def flops_per_token(config: DecoderConfig, mean_length: float, trained_share: float = 1.0) -> float:
    """FLOPs of a token, forward and backward, in documents of `mean_length` tokens (weighted by their tokens).

    `trained_share`: of the parameters.
    """
    lengths = [mean_length if layer.window is None else min(mean_length, layer.window) for layer in config.layers]
    return (4 + 2 * trained_share) * matmul_parameters(config) + 12 * config.heads * config.head_dim * sum(lengths)

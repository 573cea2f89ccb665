"""Measure one block with LoRA, forward and backward, with plain and fused adapters. One JSON line per variant.

    python benchmarks/models/lora.py [--rows 4] [--length 4096] [--rank 16] [--recompute elementwise] [--kernels]

The block has the sizes of Llama 3 8B and is frozen in bf16, with adapters on all linears. The variants alternate; the
time is the median of their rounds, and the ratio is to the plain path. `peak_gib` is what a variant allocates beyond
the weights, `error` the distance of its output from the plain one. With `--kernels`, also the kernels alone, and the
matmuls that they replace or that add to their results: `tb_s` counts what each has to read and write, once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from torchstone.models.attention import choose_backend
from torchstone.models.decoder import Block, Decoder, DecoderConfig, LayerInputs, LayerSpec
from torchstone.models.execution import apply_activation_checkpointing, compile_decoder
from torchstone.models.rope import Rope
from torchstone.tuning.fused_lora import fuse_lora
from torchstone.tuning.lora import LoraAdapter, LoraSpec, add_adapter, is_adapter_parameter

VARIANTS: dict[str, tuple[str, ...]] = {"plain": (), "fused": ("cuda", "cpu")}
SIZES = {
    "rows": 4, "length": 4096, "width": 4096, "mlp-width": 14336, "heads": 32, "kv-heads": 8, "rank": 16, "rounds": 20,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recompute", default="elementwise", choices=["none", "elementwise", "selective", "full"])
    parser.add_argument("--compile", default="block", choices=["block", "none"])
    parser.add_argument("--kernels", action="store_true", help="on a GPU: the kernels alone, too")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    shape = options.rows, options.length, options.width
    x, gradient = torch.randn(2, *shape, device=device, dtype=torch.bfloat16)
    steps = {}
    for name, devices in VARIANTS.items():
        block, inputs = build_block(options, devices, device)
        steps[name] = Step(block, inputs, x.detach().requires_grad_(), gradient)
    for name, result in run_in_turn(steps, options.rounds, device).items():
        print(json.dumps({"variant": name} | result), flush=True)
    if options.kernels:
        for name, result in measure_kernels(options, device).items():
            print(json.dumps({"kernel": name} | result), flush=True)


def build_block(
    options: argparse.Namespace, devices: tuple[str, ...], device: torch.device
) -> tuple[Block, LayerInputs]:
    """The same values for all variants."""
    head_dim = options.width // options.heads
    backend = choose_backend("auto", False, None, None, head_dim, device, torch.bfloat16).value
    config = DecoderConfig(
        vocab_size=16, width=options.width, heads=options.heads, kv_heads=options.kv_heads, head_dim=head_dim,
        mlp_width=options.mlp_width, layers=(LayerSpec(rope=Rope(rope_theta=500000.0)),),
    )  # fmt: skip
    with torch.device("meta"):
        decoder = Decoder(config, backend)
    block = decoder.layers["0"]
    linears = [name for name, module in decoder.named_modules() if isinstance(module, torch.nn.Linear) and "." in name]
    add_adapter(decoder, LoraAdapter("default", dict.fromkeys(linears, LoraSpec(options.rank, 2.0))))
    decoder = decoder.to(torch.bfloat16).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in decoder.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.02, generator)
        parameter.requires_grad_(is_adapter_parameter(name))
    fuse_lora(decoder, devices)
    apply_activation_checkpointing(decoder, options.recompute)
    compile_decoder(decoder, options.compile, has_fixed_length=True)
    positions = torch.arange(options.length, device=device).expand(options.rows, -1)
    decoder.compute_dtype = torch.bfloat16
    return block, decoder.build_layer_inputs(positions, None)[0]


class Step:
    """Forward and backward of one block."""

    def __init__(self, block: Block, inputs: LayerInputs, x: Tensor, gradient: Tensor) -> None:
        self.block, self.inputs, self.x, self.gradient = block, inputs, x, gradient
        self.trained = [x, *(p for p in block.parameters() if p.requires_grad)]

    def __call__(self) -> Tensor:
        out = self.block(self.x, self.inputs)
        torch.autograd.grad(out, self.trained, self.gradient)
        return out.detach()


def run_in_turn(steps: dict[str, Step], rounds: int, device: torch.device) -> dict[str, dict[str, object]]:
    outputs = {name: step().double() for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    peaks: dict[str, float] = {}
    for _ in range(rounds + 2):
        for name, step in steps.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
            times[name].append(measure(step, device))
            if device.type == "cuda":
                peaks[name] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
    medians = {name: statistics.median(seconds[2:]) for name, seconds in times.items()}
    plain = outputs["plain"]
    return {
        name: {
            "ms": round(1e3 * median, 3),
            "ratio": round(median / medians["plain"], 4),
            "peak_gib": peaks.get(name),
            "error": float(f"{((outputs[name] - plain).norm() / plain.norm()).item():.1e}"),
        }
        for name, median in medians.items()
    }


def measure(function: Callable[[], object], device: torch.device) -> float:
    """Seconds."""
    started = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure_kernels(options: argparse.Namespace, device: torch.device) -> dict[str, dict[str, float]]:
    from torchstone.tuning.fused_lora_kernel import launch_activation, launch_activation_backward

    T, D, F, R = options.rows * options.length, options.width, options.mlp_width, options.rank

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    gate, up, grad_act = draw(T, F), draw(T, F), draw(T, F)
    hidden, h = draw(T, 2 * R), draw(T, R)
    gate_B, up_B, down_A = draw(F, R), draw(F, R), draw(R, F)
    x, out, weight, lora_B = draw(T, D), draw(T, D), draw(D, F), draw(D, R)
    # What is called, and how many elements it reads and writes.
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "activation": (lambda: launch_activation(gate, up, hidden, gate_B, up_B, down_A, "silu"), 3 * T * F),
        "activation backward": (
            lambda: launch_activation_backward(grad_act, h, gate, up, hidden, gate_B, up_B, down_A, "silu"),
            5 * T * F,
        ),
        "gate @ B": (lambda: gate @ gate_B, T * F),
        "h @ B": (lambda: h @ lora_B.t(), T * D),
        "x.T @ h": (lambda: x.t() @ h, T * D),
        "gate @ W": (lambda: gate @ weight.t(), T * F + T * D + F * D),
        "gate @ W, added": (lambda: out.addmm_(gate, weight.t()), T * F + 2 * T * D + F * D),
    }
    results = {}
    for name, (call, elements) in calls.items():
        seconds = statistics.median([measure_on_gpu(call) for _ in range(options.rounds + 2)][2:])
        results[name] = {"ms": round(1e3 * seconds, 4), "tb_s": round(2 * elements / seconds / 1e12, 2)}
    return results


def measure_on_gpu(call: Callable[[], object]) -> float:
    """Seconds between two events, without the time to launch."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # So that the launches are ahead of the GPU.
    torch.cuda._sleep(1_000_000)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


if __name__ == "__main__":
    main()

"""Do adapters of LoRA add what the settings say, and drop out only in training?"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torchstone.diagnosis.check import Finding, SkipCheck
from torchstone.diagnosis.reference import relative
from torchstone.diagnosis.restore import randomized_adapters
from torchstone.diagnosis.session import Diagnosis
from torchstone.tuning.lora import LoraLinear

# Relative, in fp32.
ADAPTER_LIMIT = 1e-3
ROWS = 4
SOURCE = "tuning.lora_alpha, tuning.lora_rank, tuning.lora_rslora; tuning/lora.py"


def check_adapters(diagnosis: Diagnosis) -> Finding:
    diagnosis.require("loss")
    tuning, run = diagnosis.config.tuning, diagnosis.run
    if tuning.method != "lora":
        raise SkipCheck("no adapters are trained")
    if tuning.lora_dora or tuning.adapter is not None:
        raise SkipCheck("tuning.lora_dora and tuning.adapter: updates depend on more than these settings")
    rank, alpha = tuning.lora_rank, tuning.lora_alpha or 2 * tuning.lora_rank
    scale = alpha / (rank**0.5 if tuning.lora_rslora else rank)
    errors = {
        name: _update_error(module, scale)
        for name, module in diagnosis.reference_run.model.module.named_modules()
        if isinstance(module, LoraLinear) and len(module.factors) == 1
    }
    if not errors:
        raise SkipCheck("every linear has several adapters")
    name = max(errors, key=errors.__getitem__)
    values = {"error": errors[name], "limit": ADAPTER_LIMIT, "linears": float(len(errors))}
    text = f"updates of {len(errors)} linears differ from {scale:g} x B A x by {errors[name]:.1e}"
    limit = f"{ADAPTER_LIMIT:g}"
    if errors[name] > ADAPTER_LIMIT:
        return Finding(
            "fail", text, limit, f"the update of {name} is not {scale:g} x B A x", SOURCE,
            "compare the scale with PEFT's, which others will use for the exported adapter", values,
        )  # fmt: skip
    if tuning.lora_dropout and run.runner.pipeline is None:
        losses = _training_losses(diagnosis)
        values["dropout_change"] = relative(losses[1], losses[0])
        text += f"; dropout changes the loss by {values['dropout_change']:.1e} from call to call"
        if losses[0] == losses[1]:
            return Finding(
                "fail", text, limit, "tuning.lora_dropout drops nothing in training", "tuning.lora_dropout",
                "see whether model.train() reaches the adapters", values,
            )  # fmt: skip
    return Finding("pass", text, limit, values=values)


@torch.no_grad()
def _update_error(linear: LoraLinear, scale: float) -> float:
    (factors,) = linear.factors
    x = torch.randn(ROWS, linear.in_features, generator=torch.Generator().manual_seed(0)).to(factors.lora_A)
    expected = scale * F.linear(F.linear(x, factors.lora_A), factors.lora_B)
    update = linear(x) - linear.base_forward(x)
    return ((update - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def _training_losses(diagnosis: Diagnosis) -> list[float]:
    """The loss of the same batch, computed twice."""
    run = diagnosis.run
    with randomized_adapters(run):
        run.model.train()
        sums = [run.runner.forward(diagnosis.batch(run).micro_batches) for _ in range(2)]
        run.runner.reshard()
    return [run.ctx.all_reduce_sum(total).item() for total in sums]

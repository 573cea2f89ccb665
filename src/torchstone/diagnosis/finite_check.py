"""Are weights, loss and gradients finite? If not, no other check of the model says anything."""

from __future__ import annotations

import math

from torchstone.diagnosis.check import Finding
from torchstone.diagnosis.gradients import compute_step
from torchstone.diagnosis.session import Diagnosis
from torchstone.rng import get_rng_states
from torchstone.training.checks import WHAT_TO_TRY, non_finite_names
from torchstone.training.replay import find_origin

MAX_NAMES = 3


def check_finite(diagnosis: Diagnosis) -> Finding:
    run, limit = diagnosis.run, "all are finite"
    tensors = [(name, p.detach(), "") for name, p in run.model.named_parameters() if p.is_floating_point()]
    bad = non_finite_names(run.runner, tensors)
    values = {"bad_tensors": float(len(bad))}
    if bad:
        folder = run.config.model.path
        return Finding(
            "fail", f"{len(bad)} of {len(tensors)} tensors have NaN or Inf", limit,
            f"the weights that are loaded are not finite: {', '.join(bad[:MAX_NAMES])}",
            f"model.path {folder}" if folder is not None else "model.init_std",
            "use an earlier checkpoint, or load the model again from where it came from", values,
        )  # fmt: skip
    result = compute_step(diagnosis, run)
    values |= {"loss": result.loss, "grad_norm": result.grad_norm}
    text = f"{len(tensors)} tensors are finite, loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}"
    if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
        return Finding("pass", text, limit, values=values)
    origin = find_origin(run.runner, diagnosis.batch(run), get_rng_states(diagnosis.device))
    return Finding(
        "fail", text, limit,
        f"the first module that is not finite is {origin}" if origin is not None
        else "numbers are finite when the step is repeated without torch.compile",
        "training.precision, model.attention" if origin is not None else "model.compile",
        WHAT_TO_TRY, values,
    )  # fmt: skip

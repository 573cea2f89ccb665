"""AdamW as torch computes it, with a kernel of ours on CUDA.

The kernel reads a gradient once, in bf16 or fp32, scales it by the clipping coefficient, updates the parameter and its
moments, and writes the bf16 copy that the next step computes with. torch's fused kernel needs an fp32 gradient, and
casting, clipping and copying are passes of their own; together they take twice as long. If the coefficient is NaN,
weights and moments stay: the decision is made on the device, and the host reads the numbers later. Without Triton, and
on a CPU, it is torch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchstone.optim.clip import scale_gradients, to_local
from torchstone.triton_support import triton_error


class OptimizerState(NamedTuple):
    """The state of a parameter: keys of scalars, and of moments, which are shaped like the parameter."""

    name: str
    scalars: tuple[str, ...]
    moments: tuple[str, ...]


STEP, MOMENTS = "step", ("exp_avg", "exp_avg_sq")
ADAMW_STATE = OptimizerState("AdamW", (STEP,), MOMENTS)


class AdamW(torch.optim.AdamW):
    """`copies` maps parameters to copies of another dtype, which every update writes as well."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        copies: Mapping[nn.Parameter, nn.Parameter] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, fused=True, **options)
        self.copies = copies or {}
        # The number of updates, so that no step reads it back from the device.
        self._steps: dict[nn.Parameter, int] = {}

    @torch.no_grad()
    def clip_and_step(self, coefficient: Tensor) -> None:
        """Multiplies the gradients by `coefficient` and updates the parameters. If it is NaN, parameters and moments
        stay as they are; on CUDA the step is counted all the same."""
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        if not any(parameters for _, parameters in groups):
            return
        if all(p.is_cuda for _, parameters in groups for p in parameters) and triton_error() is None:
            for group, parameters in groups:
                self._update(group, parameters, coefficient)
            return
        if coefficient.isfinite():
            scale_gradients((p for _, parameters in groups for p in parameters), coefficient)
            self.step()
            self.update_copies()

    @torch.no_grad()
    def update_copies(self) -> None:
        if self.copies:
            torch._foreach_copy_(list(self.copies.values()), list(self.copies))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._steps.clear()

    def reset_state(self) -> None:
        """Drops moments and step counts, as before the first step."""
        self.state.clear()
        self._steps.clear()

    def _update(self, group: dict[str, Any], parameters: list[nn.Parameter], coefficient: Tensor) -> None:
        from torchstone.optim.adamw_kernel import update

        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state[STEP] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state |= {key: torch.zeros_like(parameter) for key in MOMENTS}
            if parameter not in self._steps:
                self._steps[parameter] = int(state[STEP])
            step = self._steps[parameter] = self._steps[parameter] + 1
            copy = self.copies.get(parameter, parameter)
            tensors = [to_local(t) for t in (parameter, parameter.grad, *(state[key] for key in MOMENTS), copy)]
            update(tensors, coefficient, group["lr"], group["betas"], group["eps"], group["weight_decay"], step)
        if parameters:
            torch._foreach_add_([self.state[parameter][STEP] for parameter in parameters], 1)

"""Mixed precision in one process: the module computes with bf16 weights, the optimizer updates fp32 master weights.

The arithmetic is that of FSDP2's policy (parallel/fsdp.py), to the last bit: the gradient of each micro-batch is
computed in bf16 and summed in fp32. What FSDP2 does besides (gathering, reducing, copies into buffers) is left out; the
only cost is one cast of the weights per step, by the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class MasterWeights:
    """Replaces the parameters of `module` by copies in `dtype`; `parameters` has the originals, by name.

    A parameter that has this dtype already, such as a frozen one, stays as it is. Another frozen one is only saved: its
    original moves to the CPU.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.parameters = dict(module.named_parameters())
        self.copies = {
            master: nn.Parameter(master.detach().to(dtype), master.requires_grad)
            for master in self.parameters.values()
            if master.dtype != dtype
        }
        # A tied parameter is in several places.
        self._places = [
            (submodule, name, parameter)
            for submodule in module.modules()
            for name, parameter in submodule.named_parameters(recurse=False)
            if parameter in self.copies
        ]
        for master, copy in self.copies.items():
            # On CUDA the gradient of a single micro-batch stays in bf16.
            master.grad_dtype = None
            if copy.requires_grad:
                copy.register_post_accumulate_grad_hook(_MoveGradient(master))
            else:
                master.data = master.data.cpu()
        self._install(copies=True)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The module has the master weights themselves, such as to be saved."""
        self._install(copies=False)
        try:
            yield
        finally:
            self._install(copies=True)

    def _install(self, copies: bool) -> None:
        for submodule, name, master in self._places:
            setattr(submodule, name, self.copies[master] if copies else master)


class _MoveGradient:
    """Adds the gradient of a micro-batch to that of the master weight, in fp32."""

    def __init__(self, master: nn.Parameter) -> None:
        self.master = master

    def __call__(self, copy: nn.Parameter) -> None:
        gradient, total = copy.grad, self.master.grad
        assert gradient is not None
        if not self.master.requires_grad:
            # Frozen later, by its own name.
            copy.grad = None
            return
        if total is not None:
            total = total.to(self.master.dtype)
            total += gradient
        elif gradient.is_cuda:
            # The optimizer's kernel reads bf16 as well.
            total = gradient
        else:
            total = gradient.to(self.master.dtype)
        self.master.grad, copy.grad = total, None

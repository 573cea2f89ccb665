"""Data parallelism, all of it by FSDP2: every block is one unit, the rest of the model another.

| `zero` | between steps | in a step | gradients |
|---|---|---|---|
| 3 | parameters, moments sharded | one block's parameters whole at a time | sharded as they come |
| 2 | the same | all parameters whole from first use to the end of the step | sharded as they come |
| 1 | the same | the same | whole, reduced once a step |

So 1 and 2 hold what ZeRO-1 and ZeRO-2 hold while they compute, and send what they send; but between two steps the
weights lie in shards, and no rank needs a second, whole copy of the fp32 ones. Copies (`dp_replicate`) are the same
with a shard of one.

Mixed precision is FSDP2's policy: parameters are gathered as bf16, gradients reduced in fp32 over the data axes (sums
over axis tp are part of what is computed, and in its numbers); parameters, gradients and moments stay fp32. Gradients
are summed and divided by nothing here: the loss was already divided by the global count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from torchstone.config.schema import ParallelConfig

Precision = Literal["fp32", "bf16", "bf16-pure"]
# What weights are kept in.
KEPT_IN = {"fp32": torch.float32, "bf16": torch.float32, "bf16-pure": torch.bfloat16}
# What is computed in.
COMPUTED_IN = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16-pure": torch.bfloat16}


def policy(precision: Precision, reduce_dtype: torch.dtype = torch.float32) -> MixedPrecisionPolicy:
    """Inputs are left as they are: some, like rotary tables, are wide on purpose."""
    compute = torch.bfloat16 if precision == "bf16" else None
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce_dtype, cast_forward_inputs=False)


def shard_module(
    root: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, zero: int, mixed: MixedPrecisionPolicy
) -> None:
    """Shards `blocks` one by one and then what is left of `root`."""
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=mixed, reshard_after_forward=zero == 3)
    # What the root has is used at the beginning and at the end: to gather it again between them would gain nothing.
    fully_shard(root, mesh=mesh, mp_policy=mixed, reshard_after_forward=False)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # A factor of its own would be multiplied in the reduction, which gloo cannot do.
            module.set_force_sum_reduction_for_comms(True)


def reduces_once(parallel: ParallelConfig, shards: int) -> bool:
    if parallel.reduce == "auto":
        return parallel.pp > 1 or parallel.zero == 1 or shards == 1
    return parallel.reduce == "once"


def begin_micro_step(roots: Sequence[nn.Module], last: bool, once: bool, zero: int) -> None:
    """What FSDP2 does after the next backward pass: reduces (over copies at the end alone), and frees what it may."""
    for root in roots:
        if isinstance(root, FSDPModule):
            root.set_is_last_backward(last)
            root.set_requires_gradient_sync(last or not once)
            root.set_requires_all_reduce(last)
            root.set_reshard_after_backward(last or zero == 3)


def put_back(root: nn.Module) -> None:
    """Frees what a forward pass has gathered and no backward pass will."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()

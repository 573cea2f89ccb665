"""Data parallelism by FSDP2: every block is one unit, the rest of the model is another.

| `zero` | between steps | in a step | gradients |
|---|---|---|---|
| 3 | parameters and moments sharded | one block's parameters gathered at a time | sharded as they are computed |
| 2 | the same | all parameters gathered from first use to the end of the step | sharded as they are computed |
| 1 | the same | the same | unsharded, reduced once per step |

During a step, `zero` 1 and 2 need the memory and traffic of ZeRO-1 and ZeRO-2. Between steps the weights are sharded,
so no rank needs a second, full copy of the fp32 weights. `dp_replicate` alone is FSDP2 with one shard.

Mixed precision is FSDP2's policy: parameters are gathered in bf16, gradients are reduced in fp32 over the data-parallel
dimensions (sums over tp are part of the computation and in its dtype); parameters, gradients and moments stay fp32.
Gradients are summed, not averaged: the loss is already divided by the global token count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from torchstone.config.schema import ParallelConfig

# The dtype of the parameters that the optimizer updates.
PARAM_DTYPE = {
    "fp32": torch.float32,
    "bf16": torch.float32,
    "bf16-pure": torch.bfloat16,
    "fp8": torch.float32,
    "fp8-pure": torch.bfloat16,
}
# The dtype of the computation; of FP8, that of everything but the matmuls of some linears (models/fp8.py).
COMPUTE_DTYPE = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "bf16-pure": torch.bfloat16,
    "fp8": torch.bfloat16,
    "fp8-pure": torch.bfloat16,
}


def mixed_precision_policy(precision: str) -> MixedPrecisionPolicy:
    """Returns FSDP2's policy. Inputs are not cast: some, like cos and sin, are fp32 on purpose."""
    compute_dtype = COMPUTE_DTYPE[precision]
    param_dtype = None if compute_dtype == PARAM_DTYPE[precision] else compute_dtype
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def apply_fsdp(
    root: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, zero: int, policy: MixedPrecisionPolicy
) -> None:
    """Shards `blocks` one by one, then the rest of `root`."""
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=zero == 3)
    # The root's own parameters are used at the beginning and at the end: resharding in between would gain nothing.
    fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Otherwise the factor becomes a PREMUL_SUM, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)


def reduces_once_per_step(parallel: ParallelConfig, dp_shard: int) -> bool:
    if parallel.reduce == "auto":
        return parallel.pp > 1 or parallel.zero == 1 or dp_shard == 1
    return parallel.reduce == "once"


def set_fsdp_sync(roots: Sequence[nn.Module], is_last: bool, once: bool, zero: int) -> None:
    """Sets what FSDP2 does after the next backward pass. All-reduces over replicas only after the last micro-batch."""
    for root in roots:
        if isinstance(root, FSDPModule):
            root.set_is_last_backward(is_last)
            root.set_requires_gradient_sync(is_last or not once)
            root.set_requires_all_reduce(is_last)
            root.set_reshard_after_backward(is_last or zero == 3)


def reshard(root: nn.Module) -> None:
    """Frees the parameters that a forward pass without a backward pass has left gathered."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()

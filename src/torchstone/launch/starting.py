"""Whether this process trains by itself, is a rank that somebody has started, or starts workers: from what the command
line asks for, the environment says, and the machine has.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchstone import post
from torchstone.config.schema import SystemConfig
from torchstone.errors import UsageError
from torchstone.launch import gpus
from torchstone.launch.gpus import Gpu
from torchstone.launch.local import Launch
from torchstone.launch.nodes import Nodes, idle_nodes, nodes, worker_variables


@dataclass(frozen=True)
class Wishes:
    """The flags of a launch, as they were given."""

    nproc: int | None = None
    gpus: str | None = None
    nnodes: str | None = None
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    max_restarts: int | None = None

    @property
    def given(self) -> list[str]:
        return [f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value is not None]


@dataclass(frozen=True)
class Plan:
    """Workers to start on this machine."""

    nproc: int
    nodes: Nodes = field(default_factory=Nodes)
    devices: tuple[Gpu, ...] = ()
    max_restarts: int = 0

    @property
    def world_size(self) -> int | None:
        """Of all nodes, where it is known: they need not have as many workers each."""
        return self.nproc if self.nodes.high == 1 else None

    def launch(self, command: Sequence[str], system: SystemConfig, logs: Path | None) -> Launch:
        environments = [gpus.worker_environment(gpu) for gpu in self.devices]
        if self.nodes.high > 1:
            # Every machine has a GPU 0: there the lines are named by rank.
            environments = [{k: v for k, v in each.items() if k != "GPU_RANK"} for each in environments]
        return Launch(
            command=command,
            nproc=self.nproc,
            nodes=self.nodes,
            environments=environments,
            threads=system.threads,
            max_restarts=self.max_restarts,
            save_grace=system.save_grace,
            hang_timeout=system.hang_timeout,
            join_timeout=system.join_timeout,
            logs=logs,
        )


def plan(wishes: Wishes, system: SystemConfig, environment: MutableMapping[str, str]) -> Plan | None:
    """The workers to start, or None where this process trains: alone, or as a rank, whose variables are then set."""
    variables = worker_variables(environment)
    if variables is not None:
        if wishes.given:
            raise UsageError(
                f"{', '.join(wishes.given)} would start processes, but this is one of {variables['WORLD_SIZE']} already"
            )
        environment.update(variables)
        return None
    where = nodes(environment, wishes.nnodes, wishes.node_rank, wishes.rdzv_endpoint)
    if where.high == 1 and (line := idle_nodes(environment)) is not None:
        post.tell(f"warning: {line}")
    devices = _devices(wishes, system)
    # GPUs that are named count more than those that a cluster gives; on a CPU the latter say nothing.
    told = None if wishes.gpus is not None or system.device == "cpu" else where.workers
    nproc = wishes.nproc or told or len(devices) or 1
    if devices and nproc > len(devices):
        raise UsageError(
            f"{nproc} processes need a GPU each, and there {'is' if len(devices) == 1 else 'are'} {len(devices)}",
            f"start {len(devices)} at most, or train on the CPU with --system.device cpu",
        )
    if wishes.gpus is not None and nproc < len(devices):
        raise UsageError(f"--gpus {wishes.gpus} are {len(devices)}, a process each, but --nproc is {nproc}")
    if not wishes.given and nproc == 1 and where.high == 1:
        return None
    return Plan(nproc, where, tuple(devices[:nproc]), wishes.max_restarts or 0)


def _devices(wishes: Wishes, system: SystemConfig) -> list[Gpu]:
    if system.device == "cpu":
        if wishes.gpus is not None:
            raise UsageError("--gpus and --system.device cpu contradict each other", "leave out one of them")
        return []
    if system.device_id is None:
        if wishes.gpus is None and os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
            # A slice of a GPU has no number: what sees it is one process.
            return []
        found = gpus.found()
        return gpus.choose(wishes.gpus, found) if wishes.gpus is not None else found
    for flag, value in (("--gpus", wishes.gpus), ("--nproc", wishes.nproc)):
        if value is not None and value != 1:
            raise UsageError(f"system.device_id means one process on one GPU, but {flag} {value} is given too")
    return []

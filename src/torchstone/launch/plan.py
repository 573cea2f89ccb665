"""Decides whether this process trains alone, is a worker that a launcher started, or starts workers.

The decision depends on the command line, the environment and the GPUs of the machine.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass, field

from torchstone.config.schema import SystemConfig
from torchstone.errors import UsageError
from torchstone.heartbeat import print_line
from torchstone.launch import gpus
from torchstone.launch.gpus import Gpu
from torchstone.launch.nodes import Nodes, idle_nodes_warning, read_nodes, worker_variables

# More processes than any machine has GPUs; without a limit a typo could fill the process table.
MAX_NPROC = 1024


@dataclass(frozen=True)
class LaunchOptions:
    """The flags of a launch; None for a flag that is not given.

    Args:
        nproc: Processes to start on this machine. Each one gets a GPU, if there are any.
        gpus: GPUs to use, one process each: all, numbers such as 0,3, or auto:2 for the two least loaded. Default: all.
        nnodes: Machines that run this command together; 1:4 for one to four.
        node_rank: Number of this machine, from 0.
        rdzv_endpoint: host:port of machine 0, the rendezvous of all machines.
    """

    nproc: int | None = None
    gpus: str | None = None
    nnodes: str | None = None
    node_rank: int | None = None
    rdzv_endpoint: str | None = None

    def __post_init__(self) -> None:
        if self.nproc is not None and not 1 <= self.nproc <= MAX_NPROC:
            raise UsageError(f"--nproc {self.nproc}: must be from 1 to {MAX_NPROC}")

    def flags(self) -> list[str]:
        """The flags that are given."""
        return [f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value is not None]


@dataclass(frozen=True)
class LaunchPlan:
    """The workers to start on this machine: `nproc` processes, each with one of the `devices`, if there are any."""

    nproc: int
    system: SystemConfig = field(default_factory=SystemConfig)
    nodes: Nodes = field(default_factory=Nodes)
    devices: tuple[Gpu, ...] = ()
    max_restarts: int = 0

    @property
    def world_size(self) -> int | None:
        """Known for a single node only: nodes may have different numbers of workers."""
        return self.nproc if self.nodes.max_nodes == 1 else None


def plan_launch(
    options: LaunchOptions,
    system: SystemConfig,
    environment: MutableMapping[str, str],
    max_restarts: int | None = None,
) -> LaunchPlan | None:
    """The workers to start; None if this process trains, alone or as a worker.

    For a worker it sets torchrun's variables in `environment`.
    """
    variables = worker_variables(environment)
    flags = options.flags() + ([] if max_restarts is None else ["--max-restarts"])
    if variables is not None:
        if flags:
            raise UsageError(
                f"{', '.join(flags)} would start processes, but this process is already one of "
                f"{variables['WORLD_SIZE']} workers",
                "leave out these flags",
            )
        environment.update(variables)
        return None
    nodes = read_nodes(environment, options.nnodes, options.node_rank, options.rdzv_endpoint)
    if nodes.max_nodes == 1 and (warning := idle_nodes_warning(environment)) is not None:
        print_line(f"warning: {warning}")
    devices = _choose_devices(options, system)
    # --gpus overrides the cluster's number of processes, which counts GPUs and means nothing on the CPU.
    cluster_nproc = None if options.gpus is not None or system.device == "cpu" else nodes.nproc
    nproc = options.nproc or cluster_nproc or len(devices) or 1
    if devices and nproc > len(devices):
        raise UsageError(
            f"{nproc} processes need a GPU each, but there {'is' if len(devices) == 1 else 'are'} {len(devices)}",
            f"use --nproc {len(devices)} or less, or train on the CPU with --system.device cpu",
        )
    if options.gpus is not None and nproc < len(devices):
        raise UsageError(
            f"--gpus {options.gpus} selects {len(devices)} GPUs, one for each process, but --nproc is {nproc}",
            "leave out --nproc",
        )
    if not flags and nproc == 1 and nodes.max_nodes == 1:
        return None
    return LaunchPlan(nproc, system, nodes, tuple(devices[:nproc]), max_restarts or 0)


def _choose_devices(options: LaunchOptions, system: SystemConfig) -> list[Gpu]:
    if system.device == "cpu":
        if options.gpus is not None:
            raise UsageError("--gpus and --system.device cpu contradict each other", "leave out one of them")
        return []
    if system.device_id is not None:
        for flag, value in (("--gpus", options.gpus), ("--nproc", options.nproc)):
            if value is not None and value != 1:
                raise UsageError(
                    f"system.device_id means one process on one GPU, but {flag} {value} is given too",
                    "leave out one of them",
                )
        return []
    if options.gpus is None and os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        # A MIG slice has no number: one process trains on it.
        return []
    visible = gpus.visible_gpus()
    return visible if options.gpus is None else gpus.choose(options.gpus, visible)

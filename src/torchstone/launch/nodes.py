"""Reads from the environment whether this process is one of the workers, or a node that starts workers.

torchrun, and srun with one task per GPU, start one process per rank: it joins as a worker. srun with one task per node,
Kubeflow and SkyPilot start one process per node: it becomes the launcher of that node. Any other process in a SLURM job
(the batch script, a shell of salloc or of `srun --pty`) is a single machine, however many nodes the job has: otherwise
it would wait for processes that never start.

Only variables are read; scontrol is not run and no name is looked up. Flags supply what is missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torchstone.errors import UsageError

# What torchrun sets for each worker, and a process group needs.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# torchrun's port for a rendezvous.
PORT = 29400
# Ports for SLURM jobs: above those of services, below those that the kernel hands out (from 32768).
SLURM_PORTS = range(20000, 30000)
# SLURM's step numbers from here on have a special meaning: the batch script, an interactive step, a login by ssh.
SPECIAL_SRUN_STEPS = 0xFFFFFFF0
SHELLS = ("bash", "sh", "zsh", "tcsh", "csh", "fish", "ksh", "dash")


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, from `min_nodes` to `max_nodes` of them, each with a launcher.

    Names follow torchrun. `node_rank` is None if the rendezvous assigns it; `rdzv_endpoint` (host:port) is None for a
    single node; `nproc` is the number of workers here, if the environment says so; `rdzv_id` separates runs that use
    the same endpoint.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    nproc: int | None = None
    rdzv_id: str = "torchstone"


def worker_variables(environment: Mapping[str, str]) -> dict[str, str] | None:
    """torchrun's variables for a process that was started as one rank of a job; None for any other process.

    If torchrun set them, they are returned unchanged. For a task of srun they are derived from SLURM's variables;
    MASTER_ADDR and MASTER_PORT may be set in addition. An incomplete set of torchrun's variables is an error.
    """
    present = [name for name in TORCHRUN if environment.get(name)]
    if len(present) == len(TORCHRUN):
        return {name: environment[name] for name in (*TORCHRUN, "LOCAL_WORLD_SIZE") if environment.get(name)}
    task = _read_srun_task(environment)
    # A PyTorchJob sets MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK for its pods; its RANK counts nodes.
    is_node = bool(environment.get("PET_NNODES"))
    if present and not is_node and (task is None or not {"MASTER_ADDR", "MASTER_PORT"}.issuperset(present)):
        missing = [name for name in TORCHRUN if name not in present]
        raise UsageError(
            f"the environment has {', '.join(present)} but not {', '.join(missing)}",
            f"torchrun sets all of them for a worker; to start workers here, type: unset {' '.join(present)}",
        )
    if task is None or is_node or task.num_tasks <= task.num_nodes:
        return None
    return {
        "RANK": str(task.rank),
        "WORLD_SIZE": str(task.num_tasks),
        "LOCAL_RANK": str(task.local_rank),
        "LOCAL_WORLD_SIZE": str(task.local_tasks),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or task.first_host,
        "MASTER_PORT": environment.get("MASTER_PORT") or str(task.port),
    }


def read_nodes(
    environment: Mapping[str, str], nnodes: str | None = None, node_rank: int | None = None, endpoint: str | None = None
) -> Nodes:
    """The nodes of the run, from the flags and, where these are missing, from Kubeflow, SLURM or SkyPilot."""
    nodes = _kubeflow(environment) or _slurm(environment) or _skypilot(environment) or Nodes()
    if nnodes is not None:
        low, high = _parse_range(nnodes, "--nnodes")
        rank = nodes.node_rank if nodes.node_rank is not None and nodes.node_rank < high else None
        nodes = replace(nodes, min_nodes=low, max_nodes=high, node_rank=rank)
    elif (node_rank is not None or endpoint is not None) and nodes.max_nodes == 1:
        flag = "--rdzv-endpoint" if node_rank is None else "--node-rank"
        raise UsageError(f"{flag} needs more than one node", "add --nnodes, for example --nnodes 2")
    if node_rank is not None:
        if not 0 <= node_rank < nodes.max_nodes:
            raise UsageError(
                f"--node-rank {node_rank} is not one of {nodes.max_nodes} nodes",
                f"use a number from 0 to {nodes.max_nodes - 1}",
            )
        nodes = replace(nodes, node_rank=node_rank)
    if endpoint is not None:
        nodes = replace(nodes, rdzv_endpoint=_parse_endpoint(endpoint, "--rdzv-endpoint"))
    if nodes.max_nodes > 1 and nodes.rdzv_endpoint is None:
        raise UsageError(
            f"{nodes.max_nodes} nodes need a rendezvous endpoint",
            "give all of them the same --rdzv-endpoint HOST:PORT, an address of node 0 that the others can reach",
        )
    return nodes if nodes.max_nodes > 1 else replace(nodes, rdzv_endpoint=None)


def idle_nodes_warning(environment: Mapping[str, str]) -> str | None:
    """A warning if this process uses one node of a SLURM job with several; else None."""
    count = environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES") or "1"
    if _read_srun_task(environment) is not None or not count.isdecimal() or int(count) < 2:
        return None
    return (
        f"this SLURM job has {count} nodes, but only this one is used; start with srun --ntasks-per-node=1 to use all"
    )


def first_host(hostlist: str) -> str:
    """The first host of a SLURM hostlist: gpu01 of `gpu[01-03,7],login`."""
    parts = re.split(r",(?![^\[]*\])", hostlist)
    if not all(re.fullmatch(r"(?:[^\[\],\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+", part) for part in parts):
        raise UsageError(f"{hostlist!r} is not a SLURM hostlist", "an example of one: gpu[01-03,7],login")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", parts[0])


@dataclass(frozen=True)
class _SrunTask:
    """A task of an srun step. `local_tasks` counts the tasks on its node."""

    job: int
    number: int
    rank: int
    num_tasks: int
    node: int
    num_nodes: int
    local_rank: int
    local_tasks: int
    first_host: str

    @property
    def port(self) -> int:
        """The same port for every task, and different ports for steps and jobs that may run on the same machine."""
        return SLURM_PORTS[(self.job + 997 * self.number) % len(SLURM_PORTS)]


def _read_srun_task(environment: Mapping[str, str]) -> _SrunTask | None:
    """The srun task that this process is; None outside of one.

    A batch script has SLURM_PROCID too, but no step. The step of an interactive salloc has a special number, which some
    versions write as a negative one. The shell of `srun --pty bash` is a step, but what runs in it is not a task of it.
    SLURM_PTY_PORT alone is not enough: steps that are started from that shell inherit it.
    """
    number = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID") or ""
    if not number.isdecimal() or int(number) >= SPECIAL_SRUN_STEPS or not environment.get("SLURM_PROCID"):
        return None
    is_shell = environment.get("SLURM_JOB_NAME") in SHELLS and bool(environment.get("SLURM_PTY_PORT"))
    if is_shell and int(number) == 0:
        return None
    node = _read_int(environment, "SLURM_NODEID", default=0)
    hosts = _read_text(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return _SrunTask(
        job=_read_int(environment, "SLURM_JOB_ID", "SLURM_JOBID"),
        number=int(number),
        rank=_read_int(environment, "SLURM_PROCID"),
        num_tasks=_read_int(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        node=node,
        num_nodes=_read_int(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        local_rank=_read_int(environment, "SLURM_LOCALID"),
        local_tasks=_count_tasks(node, environment),
        first_host=first_host(hosts),
    )


def _count_tasks(node: int, environment: Mapping[str, str]) -> int:
    """The tasks on a node. `2(x3),1` means: two on each of three nodes, and one on the fourth."""
    text = _read_text(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        counts += [int(match[1])] * int(match[2] or 1) if match else []
    if node >= len(counts):
        raise UsageError(f"SLURM's tasks per node are {text!r}, which does not include node {node}")
    return counts[node]


def _kubeflow(environment: Mapping[str, str]) -> Nodes | None:
    """PyTorchJob and TrainJob pass torchrun's flags as variables."""
    if not environment.get("PET_NNODES"):
        return None
    low, high = _parse_range(environment["PET_NNODES"], "PET_NNODES")
    rank = _read_int(environment, "PET_NODE_RANK") if environment.get("PET_NODE_RANK") else None
    if rank is not None and rank >= high:
        raise UsageError(f"PET_NODE_RANK is {rank}, but PET_NNODES is {environment['PET_NNODES']}")
    nproc = environment.get("PET_NPROC_PER_NODE", "auto")
    endpoint = environment.get("PET_RDZV_ENDPOINT") or environment.get("PET_MASTER_ADDR")
    if endpoint and not environment.get("PET_RDZV_ENDPOINT"):
        endpoint = _host_and_port(endpoint, _read_int(environment, "PET_MASTER_PORT", default=PORT))
    if high > 1 and not endpoint:
        raise UsageError(
            f"PET_NNODES is {high}, but PET_RDZV_ENDPOINT and PET_MASTER_ADDR are not set", "set one of them"
        )
    return Nodes(
        low,
        high,
        rank,
        _parse_endpoint(endpoint, "PET_RDZV_ENDPOINT") if endpoint else None,
        _read_int(environment, "PET_NPROC_PER_NODE") if nproc not in ("auto", "gpu", "cpu", "") else None,
        environment.get("PET_RDZV_ID") or Nodes.rdzv_id,
    )


def _slurm(environment: Mapping[str, str]) -> Nodes | None:
    """A step with one task on each of several nodes. A single task is like any other process."""
    task = _read_srun_task(environment)
    if task is None or task.num_nodes == 1 or task.num_tasks != task.num_nodes:
        return None
    host = environment.get("MASTER_ADDR") or task.first_host
    endpoint = _host_and_port(host, _read_int(environment, "MASTER_PORT", default=task.port))
    nproc = _read_int(environment, "SLURM_GPUS_ON_NODE", default=0) or None
    return Nodes(task.num_nodes, task.num_nodes, task.node, endpoint, nproc, f"slurm-{task.job}-{task.number}")


def _skypilot(environment: Mapping[str, str]) -> Nodes | None:
    addresses = environment.get("SKYPILOT_NODE_IPS", "").split()
    if not addresses or not environment.get("SKYPILOT_NODE_RANK"):
        return None
    count = _read_int(environment, "SKYPILOT_NUM_NODES", default=len(addresses))
    nproc = _read_int(environment, "SKYPILOT_NUM_GPUS_PER_NODE", default=0) or None
    rank, endpoint = _read_int(environment, "SKYPILOT_NODE_RANK"), _host_and_port(addresses[0], PORT)
    return Nodes(count, count, rank, endpoint, nproc, environment.get("SKYPILOT_TASK_ID") or Nodes.rdzv_id)


def _parse_range(text: str, name: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if match is None:
        raise UsageError(f"{name} {text} is not a number of nodes", "use 2, or 1:4 for one to four")
    low, high = int(match[1]), int(match[2] or match[1])
    if low < 1:
        raise UsageError(f"{name} {text}: at least 1 node is needed")
    if low > high:
        raise UsageError(f"{name} {text}: min nodes ({low}) is larger than max nodes ({high})", f"use {high}:{low}")
    return low, high


def _parse_endpoint(text: str, name: str) -> str:
    """`host:port`, by default with torchrun's port. An IPv6 address is in brackets."""
    match = re.fullmatch(r"(\[[\w:.%]+\]|[^\s:/\[\]]+)(?::(\d+))?", text)
    if match is None or not 0 < int(match[2] or PORT) < 65536:
        raise UsageError(f"{name} {text} is not HOST:PORT", "examples: node0:29400, or [fd00::1]:29400 for IPv6")
    return f"{match[1]}:{match[2] or PORT}"


def _host_and_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _read_text(environment: Mapping[str, str], *names: str) -> str:
    value = next((environment[name] for name in names if environment.get(name)), None)
    if value is None:
        raise UsageError(f"this is a task of srun, but its environment has no {' or '.join(names)}")
    return value


def _read_int(environment: Mapping[str, str], *names: str, default: int | None = None) -> int:
    name = next((name for name in names if environment.get(name)), None)
    if name is None and default is not None:
        return default
    text = _read_text(environment, *names)
    if not text.isdecimal():
        raise UsageError(f"the environment has {name}={text}, which is not a number")
    return int(text)

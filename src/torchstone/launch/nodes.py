"""What the environment says about this process: a rank that somebody has started, or a node whose ranks we start.

torchrun, and srun with a task per GPU, start a process per rank: it joins, under torchrun's variables. srun with a task
per node, Kubeflow and SkyPilot start one per node: it becomes that node's launcher. Whatever else runs inside a SLURM
job (the batch script, an salloc shell, the shell of `srun --pty`) is one machine like any other, however many nodes the
job has; taking it for one of several would have it wait for processes that nobody starts.

Only variables are read: no scontrol, no look-up of names. What cannot be told from them is asked for, as a flag.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

from torchstone.errors import UsageError

# What torchrun gives each of its workers, and a process group needs.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# torchrun's port for a rendezvous.
PORT = 29400
# Ports for SLURM jobs: above the services', below those that the kernel gives out (32768 on).
SLURM_PORTS = range(20000, 30000)
# From here on SLURM's step numbers are names: the batch script, an interactive step, what came in by ssh.
SPECIAL_STEPS = 0xFFFFFFF0
SHELLS = ("bash", "sh", "zsh", "tcsh", "csh", "fish", "ksh", "dash")


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, each with a launcher: from `low` to `high` of them.

    `rank` is this one's; `endpoint` (host:port) is where they meet, None where there is one node; `workers` counts the
    processes here, if that was said; `job` tells runs that meet at one place apart; `said_by` is who said all this.
    """

    low: int = 1
    high: int = 1
    rank: int | None = None
    endpoint: str | None = None
    workers: int | None = None
    job: str = "torchstone"
    said_by: str = ""


def worker_variables(environment: Mapping[str, str]) -> dict[str, str] | None:
    """torchrun's variables for a process that was started as one rank of a job; None for any other.

    Those of torchrun are taken as they are, those of an srun task follow from SLURM's; MASTER_ADDR and MASTER_PORT may
    be set beside the latter. Some of torchrun's without the others are an error.
    """
    there = [name for name in TORCHRUN if environment.get(name)]
    if len(there) == len(TORCHRUN):
        return {name: environment[name] for name in (*TORCHRUN, "LOCAL_WORLD_SIZE") if environment.get(name)}
    step = _step(environment)
    # A PyTorchJob gives its pods MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK, the latter counting nodes.
    is_node = bool(environment.get("PET_NNODES"))
    if there and not is_node and (step is None or not {"MASTER_ADDR", "MASTER_PORT"}.issuperset(there)):
        missing = [name for name in TORCHRUN if name not in there]
        raise UsageError(
            f"the environment has {', '.join(there)} but not {', '.join(missing)}",
            "a worker of torchrun has them all; to have the workers started here, unset the former",
        )
    if step is None or is_node or step.tasks <= step.nodes:
        return None
    return {
        "RANK": str(step.rank),
        "WORLD_SIZE": str(step.tasks),
        "LOCAL_RANK": str(step.local_rank),
        "LOCAL_WORLD_SIZE": str(step.here),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or step.first_host,
        "MASTER_PORT": environment.get("MASTER_PORT") or str(step.port),
    }


def nodes(
    environment: Mapping[str, str], nnodes: str | None = None, node_rank: int | None = None, endpoint: str | None = None
) -> Nodes:
    """The nodes as the flags say, and the environment where they say nothing: Kubeflow, else SLURM, else SkyPilot."""
    found = _kubeflow(environment) or _slurm(environment) or _skypilot(environment) or Nodes()
    if nnodes is not None:
        found = _as_told(found, *_range(nnodes, "--nnodes"))
    elif (node_rank is not None or endpoint is not None) and found.high == 1:
        flag = "--rdzv-endpoint" if node_rank is None else "--node-rank"
        raise UsageError(f"{flag} is for several nodes, but there is one", "give --nnodes too, such as --nnodes 2")
    if node_rank is not None:
        if not 0 <= node_rank < found.high:
            raise UsageError(
                f"--node-rank {node_rank} is not one of {found.high} nodes", f"they are 0 to {found.high - 1}"
            )
        found = replace(found, rank=node_rank)
    if endpoint is not None:
        found = replace(found, endpoint=_endpoint(endpoint, "--rdzv-endpoint"))
    if found.high > 1 and found.endpoint is None:
        raise UsageError(
            f"{found.high} nodes need a place to meet",
            "give each the same --rdzv-endpoint HOST:PORT, an address of the first node that the others reach",
        )
    return found if found.high > 1 else replace(found, endpoint=None)


def idle_nodes(environment: Mapping[str, str]) -> str | None:
    """A line about the nodes of a SLURM job that a process outside any step leaves idle; None where none are."""
    count = environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES") or "1"
    if _step(environment) is not None or not count.isdecimal() or int(count) < 2:
        return None
    return f"this SLURM job has {count} nodes, and only this one is used: srun --ntasks-per-node=1 uses them all"


def hosts(text: str) -> list[str]:
    """The hosts of a SLURM list, in its order: `gpu[01-03,7],login` has five."""
    found: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        if not re.fullmatch(r"(?:[^\[\],\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+", part):
            raise UsageError(f"{text!r} is not a list of hosts as SLURM writes them", "such as gpu[01-03,7],login")
        # Every second piece stood in brackets.
        pieces = re.split(r"\[([^\]]*)\]", part)
        choices = [_numbers(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        found += ["".join(choice) for choice in product(*choices)]
    return found


@dataclass(frozen=True)
class _Step:
    """A task of an srun step, as SLURM numbers it; `here` is the number of tasks on its node."""

    job: int
    number: int
    rank: int
    tasks: int
    node: int
    nodes: int
    local_rank: int
    here: int
    first_host: str

    @property
    def port(self) -> int:
        """The same for every task, and another for the steps and jobs that may run beside it."""
        return SLURM_PORTS[(self.job + 997 * self.number) % len(SLURM_PORTS)]


def _step(environment: Mapping[str, str]) -> _Step | None:
    """The srun task that this process is; None outside of one.

    A batch script has SLURM_PROCID too, but no step; the step of an interactive salloc has a special number, which some
    versions write as a negative one. The shell of `srun --pty bash` is a step of its own, and what runs in it is not
    its task; SLURM_PTY_PORT alone does not tell, because the steps that are started from that shell inherit it.
    """
    number = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID") or ""
    if not number.isdecimal() or int(number) >= SPECIAL_STEPS or not environment.get("SLURM_PROCID"):
        return None
    is_shell = environment.get("SLURM_JOB_NAME") in SHELLS and bool(environment.get("SLURM_PTY_PORT"))
    if is_shell and int(number) == 0:
        return None
    node = _number(environment, "SLURM_NODEID", default=0)
    return _Step(
        job=_number(environment, "SLURM_JOB_ID", "SLURM_JOBID"),
        number=int(number),
        rank=_number(environment, "SLURM_PROCID"),
        tasks=_number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        node=node,
        nodes=_number(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        local_rank=_number(environment, "SLURM_LOCALID"),
        here=_tasks_on(node, environment),
        first_host=hosts(_text(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))[0],
    )


def _tasks_on(node: int, environment: Mapping[str, str]) -> int:
    """From `2(x3),1`: two tasks on each of three nodes, and one on the fourth."""
    text = _text(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        counts += [int(found[1])] * int(found[2] or 1) if found else []
    if node >= len(counts):
        raise UsageError(f"SLURM's tasks per node are {text!r}, which says nothing of node {node}")
    return counts[node]


def _kubeflow(environment: Mapping[str, str]) -> Nodes | None:
    """torchrun's flags as variables, which is how a PyTorchJob and a TrainJob tell a pod what it is."""
    if not environment.get("PET_NNODES"):
        return None
    low, high = _range(environment["PET_NNODES"], "PET_NNODES")
    rank = _number(environment, "PET_NODE_RANK") if environment.get("PET_NODE_RANK") else None
    if rank is not None and rank >= high:
        raise UsageError(f"PET_NODE_RANK is {rank}, but PET_NNODES is {environment['PET_NNODES']}")
    workers = environment.get("PET_NPROC_PER_NODE", "auto")
    where = environment.get("PET_RDZV_ENDPOINT") or environment.get("PET_MASTER_ADDR")
    if where and not environment.get("PET_RDZV_ENDPOINT"):
        where = _host_and_port(where, _number(environment, "PET_MASTER_PORT", default=PORT))
    if high > 1 and not where:
        raise UsageError(f"PET_NNODES is {high}, but neither PET_RDZV_ENDPOINT nor PET_MASTER_ADDR says where to meet")
    return Nodes(
        low,
        high,
        rank,
        _endpoint(where, "PET_RDZV_ENDPOINT") if where else None,
        _number(environment, "PET_NPROC_PER_NODE") if workers not in ("auto", "gpu", "cpu", "") else None,
        environment.get("PET_RDZV_ID") or Nodes.job,
        "Kubeflow",
    )


def _slurm(environment: Mapping[str, str]) -> Nodes | None:
    """A step with one task on each of several nodes. Of a single task SLURM says nothing that a machine would not."""
    step = _step(environment)
    if step is None or step.nodes == 1 or step.tasks != step.nodes:
        return None
    host = environment.get("MASTER_ADDR") or step.first_host
    port = _number(environment, "MASTER_PORT", default=step.port)
    workers = _number(environment, "SLURM_GPUS_ON_NODE", default=0) or None
    where = _host_and_port(host, port)
    return Nodes(step.nodes, step.nodes, step.node, where, workers, f"slurm-{step.job}-{step.number}", "SLURM")


def _skypilot(environment: Mapping[str, str]) -> Nodes | None:
    addresses = environment.get("SKYPILOT_NODE_IPS", "").split()
    if not addresses or not environment.get("SKYPILOT_NODE_RANK"):
        return None
    count = _number(environment, "SKYPILOT_NUM_NODES", default=len(addresses))
    workers = _number(environment, "SKYPILOT_NUM_GPUS_PER_NODE", default=0) or None
    rank, where = _number(environment, "SKYPILOT_NODE_RANK"), _host_and_port(addresses[0], PORT)
    return Nodes(count, count, rank, where, workers, environment.get("SKYPILOT_TASK_ID") or Nodes.job, "SkyPilot")


def _as_told(found: Nodes, low: int, high: int) -> Nodes:
    """The user's number of nodes, with what else the environment says. A rank that is out of its range says nothing."""
    if not found.said_by or (low, high) == (found.low, found.high):
        return replace(found, low=low, high=high, said_by="--nnodes")
    said = f"--nnodes ({found.said_by} has {_written(found.low, found.high)})"
    rank = found.rank if found.rank is not None and found.rank < high else None
    return replace(found, low=low, high=high, rank=rank, said_by=said)


def _range(text: str, name: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if found is None:
        raise UsageError(f"{name} {text} is not a number of nodes", "write 2, or 1:4 for one to four")
    low, high = int(found[1]), int(found[2] or found[1])
    if not 1 <= low <= high:
        raise UsageError(f"{name} {text}: at least one node, and no more at least than at most")
    return low, high


def _written(low: int, high: int) -> str:
    return str(high) if low == high else f"{low}:{high}"


def _endpoint(text: str, name: str) -> str:
    """`host:port`, with torchrun's port where none is given; an IPv6 address stands in brackets."""
    found = re.fullmatch(r"(\[[\w:.%]+\]|[^\s:/\[\]]+)(?::(\d+))?", text)
    if found is None or not 0 < int(found[2] or PORT) < 65536:
        raise UsageError(f"{name} {text} is not HOST:PORT", "such as node0:29400, or [fd00::1]:29400 for IPv6")
    return f"{found[1]}:{found[2] or PORT}"


def _host_and_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _numbers(text: str) -> list[str]:
    """`01-03,7` as 01, 02, 03, 7: a range keeps its zeros."""
    found: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return found


def _text(environment: Mapping[str, str], *names: str) -> str:
    found = next((environment[name] for name in names if environment.get(name)), None)
    if found is None:
        raise UsageError(f"this is a task of srun, but there is no {' or '.join(names)} in its environment")
    return found


def _number(environment: Mapping[str, str], *names: str, default: int | None = None) -> int:
    name = next((name for name in names if environment.get(name)), None)
    if name is None and default is not None:
        return default
    text = _text(environment, *names)
    if not text.isdecimal():
        raise UsageError(f"the environment has {name}={text}, which is not a number")
    return int(text)

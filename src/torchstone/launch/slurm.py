"""Writes a batch script for SLURM: one launcher on each node, a signal in time to save, and a requeue after saving.

`--signal=TERM@120` signals the tasks of the step on every node, and not the batch shell. Each launcher lets its workers
save and exits with 75, which srun returns. A signal to the shell would not work: bash runs a trap only after srun
has ended, and srun kills its tasks when it gets SIGTERM. The shell gets SIGTERM from scancel, or at the time limit; it
dies, and nothing is requeued.

Only exit code 75 ("saved, safe to start again") is requeued; `incomplete` excludes jobs that were cancelled in the
meantime. Other codes are passed on. srun ends with the highest code of all nodes, so a failure with a lower code on one
node is hidden if another node saved. This is one reason for the limit on requeues.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from torchstone.errors import StoppedBySignal, UsageError

# SLURM checks its timers once a minute, so the signal may arrive a minute early.
SIGNAL_RESOLUTION = 60
MAX_SAVE_SECONDS = 65535


@dataclass(frozen=True)
class SlurmJob:
    """A config that runs on nodes of a SLURM cluster. The cluster decides what is not given.

    Args:
        config: JSON, YAML or TOML file; its path as seen from the folder in which the job is submitted.
        nodes: Number of nodes.
        gpus_per_node: GPUs of each node, one process each; 0 for none.
        cpus_per_node: Cores of each node.
        memory: Memory of each node, for example 200G; 0 for all of it.
        time: Time limit, for example 24:00:00 or 2-12:00:00.
        partition: Partition, or several separated by commas.
        account: Account to charge.
        qos: Quality of service.
        constraint: Features that the nodes must have.
        name: Name of the job.
        log: File for the output, in a folder that exists; %j is the job ID.
        save_seconds: Seconds before the time limit at which the run is told to save. SLURM may do it a minute earlier.
        requeue: Requeue the job after it has saved.
        max_requeues: How many times to requeue it.
        max_restarts: How many times to restart the workers from the last checkpoint after a failure.
        setup: A shell line to run first, for example "module load cuda"; can be repeated.
        program: How to call torchstone on the nodes.
        sbatch: A further option of sbatch, without its hyphens, for example reservation=NAME; can be repeated.
    """

    config: Path
    _: KW_ONLY
    nodes: int = 1
    gpus_per_node: int = 1
    cpus_per_node: int | None = None
    memory: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    name: str = "torchstone"
    log: str = "slurm-%j.out"
    save_seconds: int = 120
    requeue: bool = True
    max_requeues: int = 100
    max_restarts: int = 0
    setup: tuple[str, ...] = ()
    program: str = "torchstone"
    sbatch: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_minimum(1, nodes=self.nodes, cpus_per_node=self.cpus_per_node, save_seconds=self.save_seconds)
        check_minimum(0, gpus_per_node=self.gpus_per_node, max_requeues=self.max_requeues)
        check_minimum(0, max_restarts=self.max_restarts)
        for text in (str(self.config), *self.setup):
            check_one_line(text)
        split_program(self.program)
        if self.memory is not None and not re.fullmatch(r"\d+[KMGT]?", self.memory):
            raise UsageError(f"memory {self.memory!r} is not a SLURM memory size", "use 200G per node, or 0 for all")
        if wrong := [option for option in self.sbatch if not re.match(r"[a-z]", option)]:
            raise UsageError(
                f"{wrong[0]!r} is not an sbatch option; write it without the leading hyphens",
                "for example reservation=NAME",
            )
        for option in self._sbatch_options():
            _quote_for_sbatch(option)
        self._check_time()

    def render(self, args: Sequence[str] = ()) -> str:
        """The script, for `sbatch FILE`; `args` are further arguments of `torchstone train`."""
        lines = ["#!/bin/bash", "# Written by `torchstone launch slurm`."]
        lines += [f"#SBATCH {_quote_for_sbatch(option)}" for option in self._sbatch_options()]
        lines += ["", "set -e", *self.setup, ""]
        lines += ["# One launcher on each node; a node that fails ends the others."]
        lines += ["code=0", f"{self._srun(args)} || code=$?", ""]
        return "\n".join([*lines, *(self._requeue_lines() if self.requeue else []), 'exit "$code"', ""])

    def _check_time(self) -> None:
        seconds = None if self.time is None else _parse_time(self.time)
        if self.save_seconds > MAX_SAVE_SECONDS:
            raise UsageError(
                f"save_seconds {self.save_seconds} is more than SLURM allows", f"use {MAX_SAVE_SECONDS} at most"
            )
        if seconds is not None and seconds <= self.save_seconds + SIGNAL_RESOLUTION:
            raise UsageError(
                f"time {self.time} is too short: the run is told to save {self.save_seconds} s before its end",
                "SLURM may do that a minute early; use a longer time, or smaller save_seconds",
            )

    def _sbatch_options(self) -> list[str]:
        values = {
            "job-name": self.name,
            "nodes": self.nodes,
            "ntasks-per-node": 1,
            "gpus-per-node": self.gpus_per_node or None,
            "cpus-per-task": self.cpus_per_node,
            "mem": self.memory,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "output": self.log,
            # A requeued job appends to its output.
            "open-mode": "append",
            "signal": f"TERM@{self.save_seconds}",
        }
        options = [f"--{key}={value}" for key, value in values.items() if value is not None]
        return [*options, "--requeue" if self.requeue else "--no-requeue", *(f"--{option}" for option in self.sbatch)]

    def _srun(self, args: Sequence[str]) -> str:
        # --wait=0: nodes that have finished must not end the one that still writes. Not every version of srun takes
        # the number of cores from sbatch.
        srun = ["srun", "--kill-on-bad-exit=1", "--wait=0"]
        srun += [] if self.cpus_per_node is None else [f"--cpus-per-task={self.cpus_per_node}"]
        train = train_args(str(self.config), self.gpus_per_node, self.max_restarts, args)
        return f"{shlex.join(srun)} \\\n    {shlex.join([*split_program(self.program), *train])}"

    def _requeue_lines(self) -> list[str]:
        saved = StoppedBySignal.exit_code
        return [
            f"# {saved}: saved, and the same command continues. A cancelled job is not requeued.",
            f'if [ "$code" -eq {saved} ]; then',
            f'    if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {self.max_requeues} ]; then',
            f'        echo "saved, but not requeued: already requeued {self.max_requeues} times" >&2',
            '    elif scontrol requeue incomplete "$SLURM_JOB_ID"; then',
            "        exit 0",
            "    fi",
            "fi",
        ]


def submit(path: Path) -> str:
    """Submits the script with sbatch and returns the job ID."""
    # A federation of clusters answers JOB;CLUSTER.
    return run_client(["sbatch", "--parsable", str(path)], "this machine belongs to no SLURM cluster").partition(";")[0]


def run_client(command: list[str], reason: str) -> str:
    """Returns the output of a scheduler's command. Raises if it is missing (with the likely `reason`) or fails."""
    if shutil.which(command[0]) is None:
        raise UsageError(
            f"{command[0]} is not installed: {reason}", f"run this where it is installed: {shlex.join(command)}"
        )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        output = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise UsageError(f"{command[0]} refused {command[-1]}: {output}")
    return done.stdout.strip()


def split_program(program: str) -> list[str]:
    try:
        command = shlex.split(program)
    except ValueError:
        command = []
    if not command or not program.isprintable():
        raise UsageError(f"program {program!r} is not a valid command line", 'use torchstone or "python -m torchstone"')
    return command


def train_args(config: str, gpus: int, max_restarts: int, args: Sequence[str]) -> list[str]:
    """The arguments of the program: with GPUs, one worker on each GPU that the job has on its node."""
    for arg in args:
        check_one_line(arg)
    command = ["train", config, *(["--gpus", "all"] if gpus else [])]
    return [*command, *(["--max-restarts", str(max_restarts)] if max_restarts else []), *args]


def check_minimum(minimum: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < minimum:
            raise UsageError(f"{name} is {value}, but must be at least {minimum}")


def check_one_line(text: str) -> None:
    """Raises UsageError for a value that would add lines to a file."""
    if not text.isprintable():
        raise UsageError(f"{text!r} contains a line break or another character that cannot be printed")


def _quote_for_sbatch(option: str) -> str:
    """sbatch reads quotes as a shell does, but a backslash escapes even inside them."""
    check_one_line(option)
    if set(option) & set("'\"\\"):
        raise UsageError(f"{option!r} contains a quote or a backslash, which sbatch cannot read in a script")
    return shlex.quote(option)


def _parse_time(text: str) -> int:
    """Seconds of a SLURM time: 30, 30:00, 24:00:00, 2-12, 2-12:30 or 2-12:30:00; a number alone means minutes."""
    if not re.fullmatch(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}", text):
        raise UsageError(f"time {text!r} is not a SLURM time", "use 30 (minutes), 24:00:00 or 2-12:00:00")
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds

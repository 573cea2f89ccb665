"""A batch script for SLURM: one launcher on each node, a signal in time to save, and a place in the queue again.

Who gets the signal decides all. `--signal=TERM@120` reaches the tasks of the step, on every node, and not the batch
shell; each launcher has its workers save and ends with 75, which srun passes on. Through the shell it would be worse:
bash runs a trap only once srun has ended, and srun, given SIGTERM, kills its tasks. A SIGTERM that does reach the shell
is scancel's, or that of a time that is over: the shell dies of it, and nothing is requeued.

75 alone means "saved, safe to start again", and is requeued; `incomplete` keeps a job that was cancelled meanwhile from
coming back. Any other code is passed on. srun's code is the highest of all nodes', so one that failed beside others
that saved is not seen: that, too, is why requeues are counted.
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

# SLURM looks at its clocks once a minute, so a signal may come that much earlier than it was asked for.
SIGNAL_RESOLUTION = 60
LONGEST_WARNING = 65535


@dataclass(frozen=True)
class SlurmJob:
    """A config on nodes of a SLURM cluster. What is not given is left to the cluster's default.

    Args:
        config: JSON, YAML or TOML file, as it is found from the folder that the job is submitted from.
        nodes: Machines that train together.
        gpus_per_node: GPUs of each, a process each; 0 for none.
        cpus_per_node: Cores of each.
        memory: Memory of each, such as 200G; 0 for all of it.
        time: Longest time of one go, such as 24:00:00 or 2-12:00:00.
        partition: Partition, or several with commas.
        account: Account that is charged.
        qos: Quality of service.
        constraint: Features that the nodes must have.
        name: Name of the job.
        log: File for the output, in a folder that exists; %j is the number of the job.
        save_seconds: Seconds before the end at which the run is asked to save; SLURM may ask a minute earlier.
        requeue: Queue the job again once it has saved.
        max_requeues: How often, at most.
        max_restarts: How often to start the workers again, from the last checkpoint, when one fails.
        setup: A line of shell to run before, such as "module load cuda"; may be repeated.
        program: How to call torchstone there.
        sbatch: Another option of sbatch, without its hyphens, such as reservation=NAME; may be repeated.
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
        at_least(1, nodes=self.nodes, cpus_per_node=self.cpus_per_node, save_seconds=self.save_seconds)
        at_least(0, gpus_per_node=self.gpus_per_node, max_requeues=self.max_requeues, max_restarts=self.max_restarts)
        for text in (str(self.config), *self.setup):
            one_line(text)
        command(self.program)
        if self.memory is not None and not re.fullmatch(r"\d+[KMGT]?", self.memory):
            raise UsageError(
                f"memory {self.memory!r} is not one of SLURM's", "such as 200G for each node, or 0 for all"
            )
        if wrong := [option for option in self.sbatch if not re.match(r"[a-z]", option)]:
            raise UsageError(f"{wrong[0]!r} is not an option of sbatch without its hyphens", "such as reservation=NAME")
        for option in self._options():
            _quoted_for_sbatch(option)
        seconds = None if self.time is None else _seconds(self.time)
        if self.save_seconds > LONGEST_WARNING:
            raise UsageError(f"save_seconds {self.save_seconds} is more than SLURM knows", f"{LONGEST_WARNING} at most")
        if seconds is not None and seconds <= self.save_seconds + SIGNAL_RESOLUTION:
            raise UsageError(
                f"a time of {self.time} is over before it begins: the run is asked to save {self.save_seconds} s before"
                " its end, which SLURM may do a minute early",
                "give it more time, or fewer save_seconds",
            )

    def text(self, words: Sequence[str] = ()) -> str:
        """The script, for `sbatch FILE`; the words are more of those of `torchstone train`."""
        lines = ["#!/bin/bash", "# Written by `torchstone launch slurm`."]
        lines += [f"#SBATCH {_quoted_for_sbatch(option)}" for option in self._options()]
        lines += ["", "set -e", *self.setup, ""]
        lines += ["# One launcher on each node; a node that fails ends the others."]
        lines += ["code=0", f"{self._step(words)} || code=$?", ""]
        return "\n".join([*lines, *(self._requeue() if self.requeue else []), 'exit "$code"', ""])

    def _options(self) -> list[str]:
        said = {
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
            # What a requeued job writes comes after what it wrote before.
            "open-mode": "append",
            "signal": f"TERM@{self.save_seconds}",
        }
        requeue = "--requeue" if self.requeue else "--no-requeue"
        return [
            *(f"--{key}={value}" for key, value in said.items() if value is not None),
            requeue,
            *(f"--{option}" for option in self.sbatch),
        ]

    def _step(self, words: Sequence[str]) -> str:
        # --wait=0, whatever the cluster's default: nodes that are done must not end the one that still writes. Unlike
        # the rest, the number of cores is not handed on from sbatch to srun by every version.
        srun = ["srun", "--kill-on-bad-exit=1", "--wait=0"]
        srun += [] if self.cpus_per_node is None else [f"--cpus-per-task={self.cpus_per_node}"]
        train = train_words(str(self.config), self.gpus_per_node, self.max_restarts, words)
        return f"{shlex.join(srun)} \\\n    {shlex.join([*command(self.program), *train])}"

    def _requeue(self) -> list[str]:
        return [
            f"# {StoppedBySignal.exit_code}: saved, and the same command goes on. A cancelled job is not requeued.",
            f'if [ "$code" -eq {StoppedBySignal.exit_code} ]; then',
            f'    if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {self.max_requeues} ]; then',
            f'        echo "saved, but not requeued again: that was done {self.max_requeues} times" >&2',
            '    elif scontrol requeue incomplete "$SLURM_JOB_ID"; then',
            "        exit 0",
            "    fi",
            "fi",
        ]


def submit(path: Path) -> str:
    """Hands the script to sbatch and returns the number of the job."""
    # With clusters that know of each other it is JOB;CLUSTER.
    return called(["sbatch", "--parsable", str(path)], "this is not a machine of a SLURM cluster").partition(";")[0]


def called(words: list[str], without: str) -> str:
    """What a scheduler's command says; an error for people where it is not there, or refuses."""
    if shutil.which(words[0]) is None:
        raise UsageError(f"there is no {words[0]} here: {without}", f"where there is one: {shlex.join(words)}")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise UsageError(f"{words[0]} refused {words[-1]}: {said}")
    return done.stdout.strip()


def command(program: str) -> list[str]:
    try:
        found = shlex.split(program)
    except ValueError:
        found = []
    if not found or not program.isprintable():
        raise UsageError(f"{program!r} is not a program to run", 'such as torchstone or "python -m torchstone.cli"')
    return found


def train_words(config: str, gpus: int, max_restarts: int, words: Sequence[str]) -> list[str]:
    """What follows the program: every GPU that the node gives this job, and a worker each."""
    for word in words:
        one_line(word)
    found = ["train", config, *(["--gpus", "all"] if gpus else [])]
    return [*found, *(["--max-restarts", str(max_restarts)] if max_restarts else []), *words]


def at_least(least: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < least:
            raise UsageError(f"{name} is {value}, but it must be {least} at least")


def one_line(text: str) -> None:
    """Keeps a value from becoming more lines of a file than it is meant to be."""
    if not text.isprintable():
        raise UsageError(f"{text!r} has a character that does not belong in one line of text")


def _quoted_for_sbatch(option: str) -> str:
    """sbatch reads quotes as a shell does, but a backslash escapes even within them."""
    one_line(option)
    if set(option) & set("'\"\\"):
        raise UsageError(f"{option!r} has a quote or a backslash, which cannot be written in a line for sbatch")
    return shlex.quote(option)


def _seconds(text: str) -> int:
    """A time as SLURM writes it: 30, 30:00, 24:00:00, 2-12, 2-12:30 or 2-12:30:00; the shorter ones are minutes."""
    if not re.fullmatch(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}", text):
        raise UsageError(f"time {text!r} is not one of SLURM's", "such as 30 (minutes), 24:00:00 or 2-12:00:00")
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds

"""Starts the workers of this machine as plain processes, and starts them again after a failure.

Workers get torchrun's variables. On a single node they open the process group's store in a file, and their sockets stay
on the loopback interface: no port is open to the network. A launcher imports torch only for several nodes, which use
torch's rendezvous (rendezvous.py). How workers end is decided by supervise.py.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchstone import heartbeat
from torchstone.atomic import write_text
from torchstone.config.schema import SystemConfig
from torchstone.cpu_cores import usable_cores
from torchstone.errors import OutOfMemoryError, WorkerError
from torchstone.heartbeat import print_line
from torchstone.launch.gpus import worker_environment
from torchstone.launch.memory_limit import LimitWatch
from torchstone.launch.plan import LaunchPlan
from torchstone.launch.rendezvous import LOOPBACK, NodeGroup, RankAssignment, interface_variables
from torchstone.launch.supervise import EXIT_LOST, EXIT_SAVED, FORWARDED, POLL_INTERVAL, LaunchResult, Supervisor

# Seconds for a preparation to end after a signal. It keeps what it has finished.
PREPARE_GRACE = 5.0
# Exit codes after a worker ran out of memory, on this node or another.
OUT_OF_MEMORY_CODES = (OutOfMemoryError.exit_code, EXIT_LOST)


@dataclass(frozen=True)
class WorkerFiles:
    """The files of workers that train.

    `logs` is the folder of their logs. `config` is the text of their config file, the last argument of their command.
    `lock` is the open file that locks the run's folder, which the workers inherit. `secret` is the file with the secret
    of the rendezvous. `output_dir` is the run's folder, in which a worker may leave a limit on micro-batches.
    """

    logs: Path
    config: str | None = None
    lock: int | None = None
    secret: Path | None = None
    output_dir: Path | None = None


def run_workers(
    plan: LaunchPlan, command: Sequence[str], files: WorkerFiles | None = None, ignore_late_signals: bool = False
) -> int:
    """Runs `command` in every worker, prints why they failed if they did, and returns the exit code.

    It is the exit code of the worker that failed first, or 7 if a worker was killed, hung or lost the network. SIGTERM
    and Ctrl-C go to the workers, which have `save_grace` seconds to save and exit with 75; a second Ctrl-C ends them.
    `files` is None for a program without a heartbeat. `ignore_late_signals`: whether signals are ignored after this
    call.
    """
    has_other_nodes = plan.nodes.max_nodes > 1
    with tempfile.TemporaryDirectory(prefix="torchstone-", ignore_cleanup_errors=True) as name:
        supervisor = Supervisor(plan.system, Path(name), files.logs if files else None, has_other_nodes)
        launch = Launch(plan, command, Path(name), supervisor, files)
        with supervisor.handle_signals(ignore_late_signals):
            result = launch.run_on_nodes() if has_other_nodes else launch.run()
    if result.message is not None:
        print_line(result.message)
    return result.exit_code


def run_preparation(command: Sequence[str]) -> int:
    """Runs a command that must finish before the workers start, and returns its exit code; 75 after a signal."""
    supervisor = Supervisor(SystemConfig(save_grace=PREPARE_GRACE))
    with supervisor.handle_signals():
        environment = os.environ | _launcher_variable(PREPARE_GRACE)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment, start_new_session=True)
        supervisor.watch({0: process})
        while not supervisor.poll():
            time.sleep(POLL_INTERVAL)
    code = process.returncode
    stopped = (heartbeat.EXIT_INTERRUPTED, *(-number for number in FORWARDED), -signal.SIGKILL)
    if supervisor.signals and code in (0, *stopped):
        name = supervisor.signals[0].name
        print_line(f"stopped by {name} while preparing the data: finished parts are kept, no worker was started")
        return EXIT_SAVED
    if code < 0:
        print_line(f"error: the preparation of the data was killed by signal {-code}")
        return EXIT_LOST
    return code


@dataclass(frozen=True)
class Launch:
    """One call of `run_workers`; `folder` holds the heartbeats, errors and stores of its workers."""

    plan: LaunchPlan
    command: Sequence[str]
    folder: Path
    supervisor: Supervisor
    files: WorkerFiles | None = None

    def run_on_nodes(self) -> LaunchResult:
        plan, supervisor = self.plan, self.supervisor
        secret_file = self.files.secret if self.files else None
        group = NodeGroup(
            plan.nodes, plan.nproc, plan.system.join_timeout, lambda: bool(supervisor.signals), secret_file
        )
        try:
            return self.run(group)
        except WorkerError as error:
            result = supervisor.result()
            # A failure of our own workers is the better explanation.
            if result.exit_code not in (0, EXIT_SAVED) or (supervisor.signals and result.exit_code == EXIT_SAVED):
                return result
            return LaunchResult(EXIT_LOST, 0, f"error: {error}" + (f"\n  {result.message}" if result.message else ""))
        finally:
            group.leave()

    def run(self, group: NodeGroup | None = None) -> LaunchResult:
        """Starts the workers, and restarts them until they succeed or a restart makes no sense."""
        supervisor, max_restarts = self.supervisor, self.plan.max_restarts
        attempt = restarts = 0
        limits = LimitWatch(self.files.output_dir if self.files else None)
        try:
            while True:
                limits.begin_attempt()
                assignment = self._single_node(attempt) if group is None else group.join(attempt)
                if supervisor.signals or assignment is None:
                    reason = "while waiting for the other nodes" if group else "before the workers started"
                    return LaunchResult(EXIT_SAVED, 0, f"stopped by {supervisor.signals[0].name} {reason}")
                self._start(assignment)
                attempt = assignment.attempt + 1
                if not self._wait(group):
                    supervisor.stop()
                    continue
                result = supervisor.result()
                if group is not None and result.exit_code == 0:
                    group.wait_for_all()
                elif (
                    group is not None
                    and result.exit_code == EXIT_SAVED
                    and not supervisor.signals
                    and group.is_growing()
                ):
                    continue
                if not supervisor.signals and result.exit_code in OUT_OF_MEMORY_CODES and limits.is_smaller():
                    print_line(str(result.message))
                    print_line(f"restart with {limits.describe()}, from the last complete checkpoint")
                    continue
                if restarts == max_restarts or not supervisor.may_restart(result):
                    return result
                restarts += 1
                print_line(str(result.message))
                print_line(f"restart {restarts} of {max_restarts}, from the last complete checkpoint")
        finally:
            supervisor.stop()

    def _single_node(self, attempt: int) -> RankAssignment:
        environment = {
            "MASTER_ADDR": LOOPBACK,
            # Our workers do not use it; another program may.
            "MASTER_PORT": str(_free_port()),
            heartbeat.STORE_VARIABLE: str(self.folder / f"store-{attempt}"),
        }
        environment |= interface_variables(LOOPBACK, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        return RankAssignment(0, self.plan.nproc, 0, 1, attempt, environment)

    def _start(self, assignment: RankAssignment) -> None:
        self._make_folder()
        lock, command = self.files.lock if self.files else None, [*self.command]
        if self.files and self.files.config is not None:
            write_text(self.folder / "config.json", self.files.config)
            command.append(str(self.folder / "config.json"))
        processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for local_rank in range(self.plan.nproc):
                rank = assignment.first_rank + local_rank
                heartbeat.create_heartbeat(self.folder, rank)
                processes[rank] = subprocess.Popen(
                    command,
                    env=self._environment(local_rank, assignment),
                    start_new_session=True,
                    pass_fds=() if lock is None else (lock,),
                )
        finally:
            self.supervisor.watch(processes)

    def _make_folder(self) -> None:
        """A cleanup of /tmp may have removed the folder since the last attempt. Its name is known, so another user may
        have made one: they could change the config."""
        with suppress(FileExistsError):
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700)
        if self.folder.is_symlink() or self.folder.stat().st_uid != os.getuid():
            raise WorkerError(f"{self.folder} belongs to another user", "set TMPDIR to a folder of your own")

    def _environment(self, local_rank: int, assignment: RankAssignment) -> dict[str, str]:
        """The launcher's variables, torchrun's and ours. GPU_RANK is the label of the log lines."""
        rank, nproc = assignment.first_rank + local_rank, self.plan.nproc
        threads = os.environ.get("OMP_NUM_THREADS") or self.plan.system.threads or max(1, usable_cores() // nproc)
        variables = {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": assignment.world_size,
            "LOCAL_WORLD_SIZE": nproc,
            "GROUP_RANK": assignment.node_rank,
            "GROUP_WORLD_SIZE": assignment.num_nodes,
            "ROLE_NAME": "default",
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": assignment.world_size,
            "TORCHELASTIC_RESTART_COUNT": assignment.attempt,
            "TORCHELASTIC_MAX_RESTARTS": self.plan.max_restarts,
            "TORCHELASTIC_RUN_ID": self.plan.nodes.rdzv_id,
            # torchrun's default: a failed collective ends the process, so that no rank waits for it.
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "OMP_NUM_THREADS": threads,
            heartbeat.FOLDER_VARIABLE: self.folder,
            heartbeat.ERROR_VARIABLE: heartbeat.error_file(self.folder, rank),
        }
        if self.files and self.files.lock is not None:
            variables[heartbeat.LOCK_VARIABLE] = self.files.lock
        gpu = worker_environment(self.plan.devices[local_rank]) if self.plan.devices else {}
        if gpu and self.plan.nodes.max_nodes > 1:
            # Every machine has a GPU 0.
            gpu["GPU_RANK"] = str(rank)
        return {
            **{name: value for name, value in os.environ.items() if name != "GPU_RANK"},
            **{name: str(value) for name, value in variables.items()},
            **_launcher_variable(self.plan.system.save_grace),
            **assignment.environment,
            **gpu,
        }

    def _wait(self, group: NodeGroup | None) -> bool:
        """Waits until all workers have exited. Returns False as soon as another node wants to join."""
        while not self.supervisor.poll():
            if group is not None and group.has_new_nodes():
                return False
            time.sleep(POLL_INTERVAL)
        return True


def _launcher_variable(save_grace: float) -> dict[str, str]:
    return {heartbeat.LAUNCHER_VARIABLE: f"{os.getpid()} {save_grace}"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])

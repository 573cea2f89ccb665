"""Workers on one machine, as real processes: their variables, exit codes, and that no process is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import FileStore

from tiny import flags
from torchstone import heartbeat
from torchstone.config.schema import ParallelConfig, SystemConfig
from torchstone.data.cache import MIN_POOL_BYTES
from torchstone.errors import WorkerError
from torchstone.launch import local, supervise
from torchstone.launch.gpus import Gpu
from torchstone.launch.memory_limit import MemoryLimit, write_limit
from torchstone.launch.nodes import TORCHRUN
from torchstone.launch.plan import LaunchPlan
from torchstone.parallel.mesh import init_distributed

# Seconds within which anything below ends on a busy machine. The workers would run for 100 seconds.
LIMIT = 60

# The beginning of every worker.
BEGIN = """
import json, os, signal, sys, time
from pathlib import Path
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
def wait_for(is_done):
    while not is_done():
        time.sleep(0.01)
def write(name, text=""):
    (folder / f"{name}.new").write_text(text)
    (folder / f"{name}.new").rename(folder / name)
"""
# Saves and exits with 75 after a signal; says that it is ready.
SAVE_ON_SIGNAL = """
def stop(number, frame):
    time.sleep(0.5 * rank)
    write(f"saved-{rank}", signal.Signals(number).name)
    os._exit(75)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, stop)
write(f"ready-{rank}", str(os.getpid()))
"""
ALL_READY = """
wait_for((folder / "ready-0").exists)
wait_for((folder / "ready-1").exists)
"""
FIRST_SAVES = """
if rank == 0:
    wait_for((folder / "ready-1").exists)
    sys.exit(75)
"""
LAUNCHER = """
import json, sys
from torchstone.launch.local import run_workers
from torchstone.launch.plan import LaunchPlan
command, nproc, max_restarts = json.loads(sys.argv[1])
sys.exit(run_workers(LaunchPlan(nproc, max_restarts=max_restarts), command))
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def handlers() -> Iterator[dict[int, Any]]:
    """For workers that signal their parent, which is this process: it must survive if the launch does not listen."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    previous = {number: signal.signal(number, lambda *_: None) for number in numbers}
    yield {number: signal.getsignal(number) for number in numbers}
    for number, handler in previous.items():
        signal.signal(number, handler)


def run_workers(command: list[str], nproc: int, max_restarts: int = 0, logs: Path | None = None, **system: Any) -> int:
    files = None if logs is None else local.WorkerFiles(logs)
    return local.run_workers(LaunchPlan(nproc, SystemConfig(**system), max_restarts=max_restarts), command, files)


def command(script: str, folder: Path) -> list[str]:
    # -S -E: a worker that needs no packages starts in a few hundredths of a second.
    return [sys.executable, "-S", "-E", "-c", BEGIN + script, str(folder)]


def start_launcher(script: str, folder: Path) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    launcher = [sys.executable, "-c", LAUNCHER, json.dumps([command(script, folder), 2, 0])]
    return subprocess.Popen(launcher, stderr=subprocess.PIPE, text=True)


def ready_pids(folder: Path) -> list[int]:
    files = [folder / f"ready-{rank}" for rank in range(2)]
    deadline = time.monotonic() + LIMIT
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, "the workers did not start"
        time.sleep(0.02)
    return [int(file.read_text()) for file in files]


def has_ended(pid: int) -> bool:
    """A zombie has ended; its parent has not asked for it yet."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


class TestEnvironment:
    def test_a_worker_has_torchruns_variables_and_an_equal_share_of_the_cores(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(local, "usable_cores", lambda: 7)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
        script = "write(str(rank), json.dumps(dict(os.environ, argument=sys.argv[2]))); print('from', rank)"
        previous = dict(os.environ)
        assert run_workers([*command(script, tmp_path), "a $$ ${local_rank}"], 3) == 0
        assert dict(os.environ) == previous
        environments = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
        for rank, environment in enumerate(environments):
            expected = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3",
                "GROUP_RANK": "0", "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": environments[0]["MASTER_PORT"], "OMP_NUM_THREADS": "2",
                "TORCHELASTIC_RESTART_COUNT": "0", "argument": "a $$ ${local_rank}",
                "GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "lo",
            }  # fmt: skip
            assert {name: environment[name] for name in expected} == expected
        out, err = capfd.readouterr()
        assert sorted(out.splitlines()) == ["from 0", "from 1", "from 2"]
        assert err == ""

    @pytest.mark.parametrize(("threads", "users", "expected"), [(3, None, "3"), (3, "5", "5"), (None, None, "1")])
    def test_the_number_of_threads_is_the_users_then_the_configs_then_at_least_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int | None, users: str | None, expected: str
    ) -> None:
        monkeypatch.setattr(local, "usable_cores", lambda: 1)
        if users is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", users)
        script = "write(str(rank), os.environ['OMP_NUM_THREADS'])"
        assert run_workers(command(script, tmp_path), 2, threads=threads) == 0
        assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [expected, expected]

    def test_a_worker_sees_one_gpu_and_its_number_is_the_label(self, tmp_path: Path) -> None:
        script = "write(str(rank), os.environ['CUDA_VISIBLE_DEVICES'] + os.environ['GPU_RANK'])"
        devices = tuple(Gpu(number, 0, 0, 0, "H200", f"GPU-{number}") for number in (5, 2))
        assert local.run_workers(LaunchPlan(2, devices=devices), command(script, tmp_path)) == 0
        assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["55", "22"]

    def test_two_launches_on_one_machine_share_neither_store_nor_port(self, tmp_path: Path) -> None:
        script = """
write(f"where-{rank}", os.environ["MASTER_PORT"] + os.environ["TORCHSTONE_STORE"])
wait_for(lambda: len(list(folder.parent.glob("*/where-?"))) == 4)
"""
        launchers = [start_launcher(script, tmp_path / name) for name in ("first", "second")]
        for launcher in launchers:
            assert (launcher.communicate(timeout=LIMIT)[1], launcher.returncode) == ("", 0)
        texts = [(tmp_path / name / f"where-{rank}").read_text() for name in ("first", "second") for rank in range(2)]
        assert texts[0] == texts[1] != texts[2] == texts[3]

    def test_a_program_that_knows_only_torchs_variables_can_form_a_group(self, tmp_path: Path) -> None:
        script = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([rank + 1.0, 10.0 * rank])
dist.all_reduce(value)
write(str(rank), json.dumps(value.tolist()))
dist.destroy_process_group()
"""
        assert run_workers([sys.executable, "-c", BEGIN + script, str(tmp_path)], 2, threads=1) == 0
        assert [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)] == [[3.0, 10.0], [3.0, 10.0]]

    def test_on_one_node_nothing_listens_beyond_the_loopback(self, tmp_path: Path) -> None:
        script = """
import psutil, torch
from torchstone.config.schema import ParallelConfig
from torchstone.parallel.mesh import init_distributed
def listening(pid):
    connections = psutil.Process(pid).net_connections(kind="inet")
    return sorted({connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN})
with init_distributed(ParallelConfig(), torch.device("cpu")):
    assert "TORCHSTONE_STORE" not in os.environ, "a launch of this worker would use its store"
    write(str(rank), json.dumps([listening(os.getpid()), listening(os.getppid())]))
    wait_for(lambda: all((folder / name).exists() for name in "01"))
"""
        launcher = "import sys\nfrom torchstone.launch.local import run_workers\n"
        launcher += "from torchstone.launch.plan import LaunchPlan\nsys.exit(run_workers(LaunchPlan(2), sys.argv[1:]))"
        worker = [sys.executable, "-c", BEGIN + script, str(tmp_path)]
        assert subprocess.run([sys.executable, "-c", launcher, *worker], timeout=LIMIT, check=False).returncode == 0
        for rank in range(2):
            of_worker, of_launcher = json.loads((tmp_path / str(rank)).read_text())
            assert of_worker
            assert all(ip_address(address).is_loopback for address in of_worker), of_worker
            assert of_launcher == []

    def test_a_single_process_listens_on_the_loopback_although_its_machine_has_an_address(self, tmp_path: Path) -> None:
        """Mixed precision needs a process group of one. gloo looks up the machine's name."""
        addresses = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]
        address = next((a for a in addresses if a.count(".") == 3 and not a.startswith("127.")), None)
        (tmp_path / "hosts").write_text(f"{address} training-machine\n")
        namespace = ["unshare", "--mount", "--uts", "sh", "-c"]
        name = f"hostname training-machine && mount --bind {tmp_path}/hosts /etc/hosts"
        if address is None or subprocess.run([*namespace, name], capture_output=True, check=False).returncode:
            pytest.skip("needs an address other than the loopback, and `unshare`, `hostname` and `mount` as root")
        script = """
import psutil, torch
from torchstone.config.schema import ParallelConfig
from torchstone.parallel.mesh import init_distributed
with init_distributed(ParallelConfig(), torch.device("cpu"), mesh_of_one=True):
    connections = psutil.Process().net_connections(kind="inet")
    print(*{connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN})
"""
        command = [*namespace, f'{name} && exec "$@"', "sh", sys.executable, "-c", script]
        result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        assert (result.returncode, result.stdout) == (0, "127.0.0.1\n"), result.stderr

    def test_a_group_of_one_that_fails_leaves_no_variable_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: object, **options: object) -> None:
            raise RuntimeError("no mesh")

        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        monkeypatch.setattr("torchstone.parallel.mesh.init_device_mesh", fail)
        with (
            pytest.raises(RuntimeError, match="no mesh"),
            init_distributed(ParallelConfig(), torch.device("cpu"), mesh_of_one=True),
        ):
            pass
        assert ("GLOO_SOCKET_IFNAME" in os.environ, torch.distributed.is_initialized()) == (False, False)

    def test_ranks_that_do_not_come_are_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        values = {"RANK": "1", "WORLD_SIZE": "4", heartbeat.STORE_VARIABLE: str(tmp_path / "store")}
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        FileStore(str(tmp_path / "store")).set("nonce/3", "")
        with (
            pytest.raises(WorkerError, match="ranks 0, 2 of 4 did not join within 0.5 s"),
            init_distributed(ParallelConfig(), torch.device("cpu"), join_timeout=timedelta(seconds=0.5)),
        ):
            pass

    def test_a_launcher_on_one_node_does_not_import_torch(self, tmp_path: Path) -> None:
        check = LAUNCHER.replace("sys.exit(run_workers", "code = (run_workers")
        check += "sys.exit(code or 'torch' in sys.modules)"
        launcher = [sys.executable, "-c", check, json.dumps([command("", tmp_path), 1, 0])]
        assert subprocess.run(launcher, check=False).returncode == 0


class TestFailures:
    @pytest.mark.parametrize("code", [2, 37])
    def test_a_launch_ends_with_the_exit_code_of_the_worker_that_failed(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str], code: int
    ) -> None:
        script = f"""
write(f"ready-{{rank}}", str(os.getpid()))
wait_for((folder / "ready-0").exists)
sys.exit({code}) if rank == 1 else time.sleep(100)
"""
        began = time.monotonic()
        assert run_workers(command(script, tmp_path), 2) == code
        assert time.monotonic() - began < LIMIT
        assert capfd.readouterr() == ("", f"error: rank 1 failed first: ended with exit code {code}\n")
        assert all(has_ended(pid) for pid in ready_pids(tmp_path))

    def test_a_killed_worker_is_exit_code_7_and_its_children_end_with_it(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        script = """
if rank == 0:
    time.sleep(100)
import subprocess
write("child", str(subprocess.Popen(["sleep", "100"]).pid))
os.kill(os.getpid(), signal.SIGKILL)
"""
        assert run_workers(command(script, tmp_path), 2) == 7
        assert capfd.readouterr().err == "error: rank 1 failed first: was killed by SIGKILL\n"
        assert has_ended(int((tmp_path / "child").read_text()))

    def test_the_first_failure_is_the_first_in_time_and_not_the_lowest_rank(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        script = """
if rank == 1:
    write("pid", str(os.getpid()))
    os._exit(41)
wait_for((folder / "pid").exists)
wait_for(lambda: not Path("/proc", (folder / "pid").read_text()).exists())
os._exit(42)
"""
        assert run_workers(command(script, tmp_path), 2) == 41
        assert capfd.readouterr().err == "error: rank 1 failed first: ended with exit code 41\n"

    def test_a_crash_is_the_cause_although_another_rank_lost_contact_and_exited_before(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Writing a core file takes a while."""
        script = """
signal.signal(signal.SIGTERM, lambda *_: (signal.signal(signal.SIGABRT, signal.SIG_DFL), os.abort()))
write(f"ready-{rank}", "")
wait_for((folder / "ready-1").exists)
os._exit(7) if rank == 0 else time.sleep(100)
"""
        assert run_workers(command(script, tmp_path), 2) == 7
        assert capfd.readouterr().err == "error: rank 1 failed first: was killed by SIGABRT\n"

    def test_after_a_failure_the_others_get_no_time_to_save(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(supervise, "FAILURE_GRACE", 0.5)
        script = 'signal.signal(signal.SIGTERM, lambda *_: write("asked"))\nwrite(f"ready-{rank}", str(os.getpid()))\n'
        script += ALL_READY + "sys.exit(5) if rank == 1 else wait_for(lambda: False)"
        assert run_workers(command(script, tmp_path), 2) == 5
        assert (tmp_path / "asked").exists()
        assert all(has_ended(pid) for pid in ready_pids(tmp_path))
        assert capfd.readouterr().err == "error: rank 1 failed first: ended with exit code 5\n"

    def test_a_run_is_not_saved_if_a_worker_had_to_be_killed(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwrite('ready-1')\ntime.sleep(100)"
        assert run_workers(command(FIRST_SAVES + deaf, tmp_path), 2, save_grace=0.5) == 7
        assert capfd.readouterr().err == "error: rank 1 failed first: did not end in time and was killed\n"

    def test_a_program_that_does_not_exist_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="no-such-program"):
            run_workers([str(tmp_path / "no-such-program")], 2)

    def test_a_closed_terminal_changes_nothing(self, tmp_path: Path) -> None:
        """For example `tee` behind the command, which has died of the same Ctrl-C."""
        script = "sys.exit(1 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)"
        spec = json.dumps([command(script, tmp_path), 1, 1])
        read, write = os.pipe()
        os.close(read)
        # With a buffer, text that could not be written is tried again when Python exits.
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, spec], stderr=write, env=buffered)
        os.close(write)
        assert launcher.wait(LIMIT) == 0


class TestSignals:
    def test_a_worker_that_saved_by_itself_gives_the_others_time_to_save(self, tmp_path: Path) -> None:
        """Some schedulers signal every process. Those that react later must not be killed."""
        assert run_workers(command(FIRST_SAVES + SAVE_ON_SIGNAL + "time.sleep(100)", tmp_path), 2) == 75
        assert (tmp_path / "saved-1").read_text() == "SIGTERM"

    def test_sigterm_to_the_launcher_lets_all_workers_save(self, tmp_path: Path) -> None:
        launcher = start_launcher(SAVE_ON_SIGNAL + "time.sleep(100)", tmp_path)
        pids = ready_pids(tmp_path)
        launcher.terminate()
        _, err = launcher.communicate(timeout=LIMIT)
        assert (launcher.returncode, err) == (75, "")
        assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(2)] == ["SIGTERM", "SIGTERM"]
        assert all(has_ended(pid) for pid in pids)

    @pytest.mark.parametrize(
        ("number", "printed"), [("SIGINT", "stopping; press Ctrl-C again to quit at once\n"), ("SIGHUP", "")]
    )
    def test_ctrl_c_and_a_closed_terminal_let_workers_save_too(
        self, tmp_path: Path, number: str, printed: str, handlers: dict[int, Any], capfd: pytest.CaptureFixture[str]
    ) -> None:
        script = SAVE_ON_SIGNAL + ALL_READY + f"os.kill(os.getppid(), signal.{number}) if rank == 0 else None\n"
        assert run_workers(command(script + "time.sleep(100)", tmp_path), 2) == 75
        assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(2)] == [number, number]
        assert capfd.readouterr() == ("", printed)
        assert {number: signal.getsignal(number) for number in handlers} == handlers

    def test_an_ignored_hangup_stays_ignored(self, tmp_path: Path, handlers: dict[int, Any]) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        script = "os.kill(os.getppid(), signal.SIGHUP)\ntime.sleep(0.5)\nwrite(str(rank))"
        assert run_workers(command(script, tmp_path), 2) == 0
        assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "1"]

    def test_a_second_ctrl_c_does_not_wait_for_the_save(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        handlers: dict[int, Any],
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(supervise, "FAILURE_GRACE", 0.5)
        again = """
if rank == 1:
    def stop(number, frame):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        wait_for((folder / "saved-0").exists)
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(100)
    signal.signal(signal.SIGINT, stop)
"""
        script = SAVE_ON_SIGNAL.replace('write(f"ready', again + 'write(f"ready') + ALL_READY
        script += "os.kill(os.getppid(), signal.SIGINT) if rank == 0 else None\ntime.sleep(100)"
        began = time.monotonic()
        assert run_workers(command(script, tmp_path), 2) == 130
        assert time.monotonic() - began < LIMIT
        assert capfd.readouterr().err == ("stopping; press Ctrl-C again to quit at once\nquitting\ninterrupted\n")
        assert all(has_ended(pid) for pid in ready_pids(tmp_path))


class TestRestarts:
    """Workers that write a file for each of their starts."""

    START = "write(f'{rank}-{os.environ[\"TORCHELASTIC_RESTART_COUNT\"]}')\n"

    def starts(self, folder: Path) -> list[str]:
        return sorted(file.name for file in folder.iterdir())

    def test_a_failure_restarts_all_workers_up_to_the_limit(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        script = self.START + "n = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        script += "if rank == 1:\n    wait_for((folder / f'0-{n}').exists)\n    sys.exit(40 + n)\n"
        assert run_workers(command(script + "time.sleep(100)", tmp_path), 2, max_restarts=1) == 41
        assert self.starts(tmp_path) == ["0-0", "0-1", "1-0", "1-1"]
        assert capfd.readouterr().err == (
            "error: rank 1 failed first: ended with exit code 40\nrestart 1 of 1, from the last complete checkpoint\n"
            "error: rank 1 failed first: ended with exit code 41\n"
        )

    def test_a_restart_that_succeeds_is_a_success_with_a_store_of_its_own(self, tmp_path: Path) -> None:
        script = "write(Path(os.environ['TORCHSTONE_STORE']).name)\n"
        script += "sys.exit(1 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)"
        assert run_workers(command(script, tmp_path), 1, max_restarts=3) == 0
        assert self.starts(tmp_path) == ["store-0", "store-1"]

    def test_the_same_failure_at_the_same_step_is_restarted_twice(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert run_workers(command(self.START + "sys.exit(5)", tmp_path), 1, max_restarts=9) == 5
        assert self.starts(tmp_path) == ["0-0", "0-1", "0-2"]
        assert capfd.readouterr().err.splitlines()[-2:] == [
            "not restarted: it failed 3 times in the same way at step 0",
            "error: rank 0 failed first: ended with exit code 5",
        ]

    def test_smaller_micro_batches_are_no_failure_until_they_get_no_smaller(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """A worker leaves half of the limit that it finds, but at least 8. There is one of an earlier launch."""
        script = """
file, n = folder / "micro-batch-limit.json", int(os.environ["TORCHELASTIC_RESTART_COUNT"])
old = json.loads(file.read_text())
limit = {"tokens": max(8, old["tokens"] // 2), "step": n, "splits": n, "settings": {}}
if rank == 1:
    write(file.name, json.dumps(limit))
    sys.exit(4)
time.sleep(100)
"""
        write_limit(tmp_path, MemoryLimit(32, 7, 1, {}))
        files = local.WorkerFiles(tmp_path / "logs", output_dir=tmp_path)
        assert local.run_workers(LaunchPlan(2), command(script, tmp_path), files) == 4
        lines = capfd.readouterr().err.splitlines()
        assert [line for line in lines if "restart" in line] == [
            f"restart with micro-batches of at most {tokens} tokens, from the last complete checkpoint"
            for tokens in (16, 8)
        ]
        assert lines[-2].startswith("error: rank 1 failed first, while starting: ended with exit code 4")

    @pytest.mark.parametrize("code", [2, 3, 6, 75])
    def test_a_failure_that_would_repeat_itself_is_not_restarted(self, tmp_path: Path, code: int) -> None:
        assert run_workers(command(self.START + f"sys.exit({code})", tmp_path), 1, max_restarts=3) == code
        assert self.starts(tmp_path) == ["0-0"]

    def test_a_signal_is_not_restarted(self, tmp_path: Path, handlers: dict[int, Any]) -> None:
        script = self.START + SAVE_ON_SIGNAL + "os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(100)"
        assert run_workers(command(script, tmp_path), 1, max_restarts=3) == 75
        assert "0-1" not in self.starts(tmp_path)


class TestHeartbeat:
    """Workers with a heartbeat, without torch."""

    BEGIN = """
import json, os, signal, sys, time
from pathlib import Path
from torchstone import heartbeat
rank = int(os.environ["RANK"])
heartbeat.attach()
heartbeat.redirect_output(Path(sys.argv[1], f"rank-{rank}.log"))
print("from", rank, flush=True)
"""
    STEP = 'heartbeat.report_phase("computing step 7", 7)\n'

    def run(self, script: str, folder: Path, **system: Any) -> int:
        # The start of Python counts, too, and may take seconds on a busy machine.
        values = {"hang_timeout": 6, **system}
        return run_workers([sys.executable, "-c", self.BEGIN + script, str(folder)], 2, logs=folder, **values)

    def test_a_hanging_worker_is_named_with_its_phase_and_writes_its_stack(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        script = """
def hang():
    time.sleep(100)
if rank == 1:
    hang()
with heartbeat.waiting_for_ranks():
    time.sleep(100)
"""
        assert self.run(self.STEP + script, tmp_path) == 7
        err = capfd.readouterr().err
        assert err.startswith("error: rank 1 failed first, while computing step 7: made no progress for ")
        assert err.endswith(f"\n  its log: {tmp_path}/rank-1.log\n")
        log = (tmp_path / "rank-1.log").read_text()
        assert log.startswith("from 1\n")
        assert "in hang" in log
        assert "in hang" not in (tmp_path / "rank-0.log").read_text()

    def test_a_stopped_worker_is_named_although_the_others_only_wait_for_it(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        script = "if rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
        script += "with heartbeat.waiting_for_ranks():\n    time.sleep(100)\n"
        assert self.run(self.STEP + script, tmp_path) == 7
        assert capfd.readouterr().err.startswith(
            "error: rank 1 failed first, while computing step 7: sent no heartbeat for "
        )

    def test_a_worker_that_makes_progress_does_not_hang(self, tmp_path: Path) -> None:
        script = "for step in range(1, 9):\n    heartbeat.report_phase('computing', step)\n    time.sleep(1)\n"
        assert self.run(script, tmp_path) == 0

    @pytest.mark.parametrize(("seconds", "join_timeout", "code"), [(9, 60, 0), (100, 1, 7)])
    def test_before_the_first_step_the_join_timeout_counts(
        self, tmp_path: Path, seconds: int, join_timeout: float, code: int
    ) -> None:
        assert self.run(f"time.sleep({seconds})", tmp_path, join_timeout=join_timeout) == code

    def test_a_rank_that_lost_contact_is_not_the_cause(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        """Rank 0 lost contact and exits before rank 1, which still writes down what happened."""
        script = """
if rank == 0:
    while not Path(sys.argv[1], "written").exists():
        time.sleep(0.01)
    os._exit(7)
signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
heartbeat.write_error(ValueError(), "the loss is not a number", 5)
Path(sys.argv[1], "written").touch()
time.sleep(100)
"""
        assert self.run(self.STEP + script, tmp_path) == 5
        assert capfd.readouterr().err == (
            "error: rank 1 failed first, while computing step 7: the loss is not a number\n"
            f"  its log: {tmp_path}/rank-1.log\n"
        )

    def test_a_signal_after_a_failure_does_not_hide_the_failure(self, tmp_path: Path, handlers: dict[int, Any]) -> None:
        """Rank 1 fails while it starts; the signal comes while rank 0 is being stopped."""
        script = """
if rank == 1:
    os._exit(4)
signal.signal(signal.SIGTERM, lambda *_: (os.kill(os.getppid(), signal.SIGTERM), time.sleep(1), os._exit(75)))
time.sleep(100)
"""
        assert self.run(script, tmp_path, hang_timeout=60) == 4

    def test_workers_of_a_killed_launcher_get_sigterm(self, tmp_path: Path) -> None:
        # The kernel and the heartbeat send it.
        script = (
            "def stop(*_):\n    signal.signal(15, signal.SIG_IGN)\n    os.write(1, b'asked\\n')\n    os._exit(75)\n"
        )
        script += "signal.signal(15, stop)\n"
        script += "Path(sys.argv[1], f'ready-{rank}').write_text(str(os.getpid()))\ntime.sleep(100)"
        spec = [[sys.executable, "-c", self.BEGIN + script, str(tmp_path)], 2, 0]
        launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, json.dumps(spec)])
        pids = ready_pids(tmp_path)
        launcher.kill()
        launcher.wait()
        assert all(has_ended(pid) for pid in pids)
        assert (tmp_path / "rank-1.log").read_text() == "from 1\nasked\n"

    @pytest.mark.parametrize(
        ("step", "number", "message"),
        [
            (7, "SIGINT", "finishing step 7, then saving; press Ctrl-C again to quit without saving"),
            (7, "SIGHUP", "SIGHUP: finishing step 7, then saving; press Ctrl-C to quit without saving"),
            (0, "SIGINT", "stopping: no step has begun, so there is nothing new to save"),
        ],
    )
    def test_a_signal_is_acknowledged_before_the_workers_have_saved(
        self, tmp_path: Path, handlers: dict[int, Any], capfd: pytest.CaptureFixture[str], step: int, number: str,
        message: str,
    ) -> None:  # fmt: skip
        """The second rank saves only when the message has been printed, to a file that it can read."""
        script = f"""
def stop(*_):
    while {message!r} not in Path("/proc", str(os.getppid()), "fd", "2").read_text():
        time.sleep(0.01)
    os._exit(75)
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, stop)
heartbeat.report_phase("computing", {step})
Path(sys.argv[1], f"ready-{{rank}}").touch()
while rank == 0 and not Path(sys.argv[1], "ready-1").exists():
    time.sleep(0.01)
if rank == 0:
    os.kill(os.getppid(), signal.{number})
time.sleep(100)
"""
        assert self.run(script, tmp_path, hang_timeout=60) == 75
        lines = capfd.readouterr().err.splitlines()
        assert message in lines
        assert (lines[-1] == "stopped by SIGINT before the first step: there is nothing new to save") == (step == 0)

    def test_a_child_process_of_a_worker_has_no_heartbeat(self, tmp_path: Path) -> None:
        names = {"TORCHSTONE_HEARTBEATS", "TORCHSTONE_LAUNCHER", "TORCHSTONE_LOCK", "TORCHELASTIC_ERROR_FILE"}
        assert self.run(f"assert not {names} & set(os.environ)", tmp_path) == 0

    def test_a_heartbeat_is_never_read_half_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A time of zero would look like a worker that has been silent since the machine was started."""
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv(heartbeat.FOLDER_VARIABLE, str(tmp_path))
        heartbeat.create_heartbeat(tmp_path, 0)
        script = """
import time
from torchstone import heartbeat
heartbeat.attach()
deadline = time.monotonic() + 2
while time.monotonic() < deadline:
    heartbeat.report_phase("computing step 7", 7)
"""
        writer = subprocess.Popen([sys.executable, "-c", script])
        seen = []
        while writer.poll() is None:
            beat = heartbeat.read_heartbeat(tmp_path, 0)
            assert beat is not None
            seen.append((beat.alive_at > 0, beat.progress_at > 0, beat.step))
        assert set(seen) <= {(True, True, 0), (True, True, 7)}
        assert seen[-1] == (True, True, 7)


def is_tokenizing(process: psutil.Process) -> bool:
    """Whether it is a tokenizing process that waits for work: it ignores Ctrl-C from then on."""
    try:
        status = Path("/proc", str(process.pid), "status").read_text()
        ignored = int(status.partition("SigIgn:")[2].split()[0], base=16)
        return any("tokenizer_pool" in arg for arg in process.cmdline()) and bool(ignored & 1 << (signal.SIGINT - 1))
    except (psutil.Error, OSError):
        return False


def is_alive(process: psutil.Process) -> bool:
    """A zombie is not: it only waits for its new parent to notice."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


class TestOrphans:
    """A launcher that is killed cannot stop its processes: they must notice."""

    SECONDS = 20

    def killed(self, launcher: psutil.Popen, is_ready: Callable[[list[psutil.Process]], bool]) -> list[psutil.Process]:
        """Kills the launcher when its descendants are as wanted; returns those that still run some time later."""
        children: list[psutil.Process] = []
        deadline = time.monotonic() + LIMIT
        while not is_ready(children):
            assert time.monotonic() < deadline
            children = launcher.children(recursive=True)
            time.sleep(0.005)
        launcher.kill()
        launcher.wait()
        deadline = time.monotonic() + self.SECONDS
        while (orphans := [child for child in children if is_alive(child)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        for orphan in orphans:
            orphan.kill()
        return orphans

    def launcher(self, script: str, folder: Path) -> psutil.Popen:
        worker = [sys.executable, "-c", TestHeartbeat.BEGIN + script, str(folder)]
        return psutil.Popen([sys.executable, "-c", LAUNCHER, json.dumps([worker, 2, 0])])

    def test_workers_end_if_their_launcher_is_killed_right_after_it_started_them(self, tmp_path: Path) -> None:
        launcher = self.launcher("time.sleep(100)", tmp_path)
        assert self.killed(launcher, lambda children: len(children) == 2) == []
        assert list(tmp_path.iterdir()) == [], "the workers had begun before their launcher was killed"

    def test_a_worker_that_does_not_react_is_killed(self, tmp_path: Path) -> None:
        """Torch waits for other ranks in C++, where Python handles no signals."""
        script = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nheartbeat.ORPHAN_GRACE = 0.5\n"
        script += "Path(sys.argv[1], f'ready-{rank}').touch()\ntime.sleep(100)"
        launcher = self.launcher(script, tmp_path)
        assert self.killed(launcher, lambda _: len(list(tmp_path.glob("ready-*"))) == 2) == []

    def test_another_users_folder_is_not_used_for_the_config(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After a cleanup of /tmp anyone can make a folder of the same name, and change the config in it."""
        folders: list[Path] = []
        start = local.Launch._start

        def start_in_a_foreign_folder(launch: local.Launch, assignment: Any) -> None:
            folders.append(launch.folder)
            assert launch.folder.stat().st_mode & 0o777 == 0o700
            shutil.rmtree(launch.folder)
            if len(folders) == 1:
                start(launch, assignment)
                assert launch.folder.stat().st_mode & 0o777 == 0o700
            else:
                launch.folder.symlink_to(tmp_path)
                start(launch, assignment)

        monkeypatch.setattr(local.Launch, "_start", start_in_a_foreign_folder)
        with pytest.raises(WorkerError, match="belongs to another user"):
            run_workers(command("sys.exit(7)", tmp_path), 1, max_restarts=1, logs=tmp_path)
        assert len(folders) == 2

    def test_a_worker_behind_a_shell_is_no_orphan(self, tmp_path: Path) -> None:
        script = "time.sleep(1.2)\nPath(sys.argv[1], f'done-{rank}').touch()"
        worker = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", TestHeartbeat.BEGIN + script, str(tmp_path)]
        assert run_workers(worker, 2, logs=tmp_path) == 0
        assert len(list(tmp_path.glob("done-*"))) == 2

    @pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, and a kernel that signals orphans")
    def test_a_preparation_and_its_tokenizing_processes_end_with_the_launcher(
        self, tmp_path: Path, text_file: Path, settings: Callable[..., dict[str, Any]]
    ) -> None:
        """The tokenizing processes are stopped, so that they cannot end in any other way."""
        text = text_file.read_text()
        (tmp_path / "large.jsonl").write_text(text * (MIN_POOL_BYTES // len(text) + 1))
        overrides = settings(
            data__path=str(tmp_path / "large.jsonl"), data__cache_dir=str(tmp_path / "cache"), data__prepare_workers=2
        )

        def is_ready(children: list[psutil.Process]) -> bool:
            tokenizing = [child for child in children if is_tokenizing(child)]
            for child in tokenizing:
                child.suspend()
            return len(tokenizing) == 2

        command = [sys.executable, "-m", "torchstone", "train", *flags(overrides), "--nproc", "2"]
        assert self.killed(psutil.Popen(command), is_ready) == []

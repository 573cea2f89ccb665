"""Workers as real processes: what they are given, whose exit code is passed on, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from torchstone.errors import UsageError
from torchstone.launch import local
from torchstone.launch.local import TORCHRUN, joined, run_workers

# What every worker below begins with.
BEGIN = """
import json, os, signal, sys, time
from pathlib import Path
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
def wait_for(done):
    while not done():
        time.sleep(0.01)
def say(name, what=""):
    (folder / f"{name}.new").write_text(what)
    (folder / f"{name}.new").rename(folder / name)
"""
# Catches what asks it to stop, says that it is there, and waits.
WAIT = """
def stop(number, frame):
    time.sleep(0.5 * rank)
    say(f"saved-{rank}", signal.Signals(number).name)
    os._exit(75)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, stop)
say(f"ready-{rank}", str(os.getpid()))
"""
ALL_READY = """
wait_for((folder / "ready-0").exists)
wait_for((folder / "ready-1").exists)
"""
FIRST_SAVED = """
if rank == 0:
    wait_for((folder / "ready-1").exists)
    sys.exit(75)
"""
LAUNCH = """
import json, sys
from torchstone.launch.local import run_workers
sys.exit(run_workers(**json.loads(sys.argv[1])))
"""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def survive_signals() -> Iterator[dict[int, Any]]:
    """For workers that signal their parent, which is this process: it must outlive a launch that does not listen."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    yield {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        signal.signal(number, handler)


def command(script: str, folder: Path) -> list[str]:
    # -S -E: a worker that needs nothing installed starts in a few hundredths of a second.
    return [sys.executable, "-S", "-E", "-c", BEGIN + script, str(folder)]


def launched(script: str, folder: Path, **options: Any) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    words = json.dumps({"command": command(script, folder), "nproc": 2, **options})
    return subprocess.Popen([sys.executable, "-c", LAUNCH, words], stderr=subprocess.PIPE, text=True)


def ready(folder: Path, count: int = 2, limit: float = 60) -> list[int]:
    end = time.monotonic() + limit
    files = [folder / f"ready-{rank}" for rank in range(count)]
    while not all(file.exists() for file in files):
        assert time.monotonic() < end, "the workers did not start"
        time.sleep(0.02)
    return [int(file.read_text()) for file in files]


def gone(pid: int, limit: float = 5) -> bool:
    """Whether a process has ended; one that nobody has asked after is a zombie, which has."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_every_worker_has_its_rank_and_a_share_of_the_cores(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_cores", lambda: 7)
    script = "say(str(rank), json.dumps(dict(os.environ, argument=sys.argv[2]))); print('from', rank)"
    before = dict(os.environ)
    assert run_workers([*command(script, tmp_path), "a $$ ${local_rank}"], 3) == 0
    assert dict(os.environ) == before
    seen = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert [(env["RANK"], env["LOCAL_RANK"]) for env in seen] == [("0", "0"), ("1", "1"), ("2", "2")]
    assert {env["WORLD_SIZE"] for env in seen} == {env["LOCAL_WORLD_SIZE"] for env in seen} == {"3"}
    assert {env["MASTER_ADDR"] for env in seen} == {"localhost"}
    assert len({env["MASTER_PORT"] for env in seen}) == 1
    assert {env["OMP_NUM_THREADS"] for env in seen} == {"2"}
    assert {env["argument"] for env in seen} == {"a $$ ${local_rank}"}
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["from 0", "from 1", "from 2"]
    assert err == ""


@pytest.mark.parametrize(("threads", "users", "expected"), [(3, None, "3"), (3, "5", "5"), (None, None, "1")])
def test_the_threads_are_the_users_then_the_callers_then_at_least_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int | None, users: str | None, expected: str
) -> None:
    monkeypatch.setattr(local, "_cores", lambda: 1)
    if users is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", users)
    assert run_workers(command("say(str(rank), os.environ['OMP_NUM_THREADS'])", tmp_path), 2, threads) == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [expected, expected]


@pytest.mark.parametrize("code", [2, 37])
def test_the_exit_code_of_the_worker_that_failed_is_passed_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    script = f"""
say(f"ready-{{rank}}", str(os.getpid()))
wait_for((folder / "ready-0").exists)
sys.exit({code}) if rank == 1 else time.sleep(100)
"""
    began = time.monotonic()
    assert run_workers(command(script, tmp_path), 2) == code
    assert time.monotonic() - began < 25
    assert capfd.readouterr() == ("", f"error: worker 1 ended with exit code {code}\n")
    assert all(gone(pid) for pid in ready(tmp_path))


def test_a_killed_worker_is_seven_and_what_it_started_goes_with_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = """
if rank == 0:
    time.sleep(100)
import subprocess
say("child", str(subprocess.Popen(["sleep", "100"]).pid))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_workers(command(script, tmp_path), 2) == 7
    assert capfd.readouterr().err == "error: worker 1 was killed by SIGKILL\n"
    assert gone(int((tmp_path / "child").read_text()))


def test_the_first_to_fail_is_the_first_in_time_and_not_the_lowest_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = """
if rank == 1:
    say("pid", str(os.getpid()))
    os._exit(41)
wait_for((folder / "pid").exists)
wait_for(lambda: not Path("/proc", (folder / "pid").read_text()).exists())
os._exit(42)
"""
    assert run_workers(command(script, tmp_path), 2) == 41
    assert capfd.readouterr().err == "error: worker 1 ended with exit code 41\n"


def test_after_a_failure_the_others_do_not_get_the_time_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "FAILURE_GRACE", 0.5)
    script = """
signal.signal(signal.SIGTERM, lambda *_: say("asked"))
say(f"ready-{rank}", str(os.getpid()))
"""
    script += ALL_READY + "sys.exit(5) if rank == 1 else wait_for(lambda: False)"
    began = time.monotonic()
    assert run_workers(command(script, tmp_path), 2) == 5
    assert time.monotonic() - began < 25
    assert (tmp_path / "asked").exists()
    assert all(gone(pid) for pid in ready(tmp_path))
    assert capfd.readouterr().err == "error: worker 1 ended with exit code 5\n"


def test_a_worker_that_saved_of_itself_gives_the_others_time_to_save(tmp_path: Path) -> None:
    """Some schedulers send their signal to every process; the ones that come later must not be cut short."""
    assert run_workers(command(FIRST_SAVED + WAIT + "time.sleep(30)", tmp_path), 2) == 75
    assert (tmp_path / "saved-1").read_text() == "SIGTERM"


def test_where_a_worker_had_to_be_killed_the_run_is_not_called_saved(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay('ready-1')\ntime.sleep(30)"
    assert run_workers(command(FIRST_SAVED + deaf, tmp_path), 2, save_grace=0.5) == 7
    assert capfd.readouterr().err == "error: worker 1 did not end in time and was killed\n"


def test_sigterm_to_the_command_lets_all_workers_save_and_leaves_none(tmp_path: Path) -> None:
    launch = launched(WAIT + "time.sleep(60)", tmp_path)
    pids = ready(tmp_path)
    launch.terminate()
    _, err = launch.communicate(timeout=30)
    assert (launch.returncode, err) == (75, "")
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(2)] == ["SIGTERM", "SIGTERM"]
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize(("sent", "passed"), [("SIGINT", "SIGINT"), ("SIGHUP", "SIGTERM")])
def test_an_interrupt_and_a_closed_terminal_ask_to_save_too(
    tmp_path: Path, sent: str, passed: str, survive_signals: dict[int, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    script = WAIT + ALL_READY + f"os.kill(os.getppid(), signal.{sent}) if rank == 0 else None\ntime.sleep(30)"
    assert run_workers(command(script, tmp_path), 2) == 75
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(2)] == [passed, passed]
    assert capfd.readouterr() == ("", "")
    assert {number: signal.getsignal(number) for number in survive_signals} == survive_signals


def test_an_ignored_hangup_stays_ignored(tmp_path: Path, survive_signals: dict[int, Any]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert (
        run_workers(command("os.kill(os.getppid(), signal.SIGHUP)\ntime.sleep(0.5)\nsay(str(rank))", tmp_path), 2) == 0
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "1"]


def test_a_second_interrupt_does_not_wait_for_the_save(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    survive_signals: dict[int, Any],
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(local, "FAILURE_GRACE", 0.5)
    again = """
if rank == 1:
    def stop(number, frame):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        wait_for((folder / "saved-0").exists)
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(30)
    signal.signal(signal.SIGINT, stop)
"""
    script = WAIT.replace('say(f"ready', again + 'say(f"ready') + ALL_READY
    script += "os.kill(os.getppid(), signal.SIGINT) if rank == 0 else None\ntime.sleep(30)"
    began = time.monotonic()
    assert run_workers(command(script, tmp_path), 2) == 7
    assert time.monotonic() - began < 25
    assert capfd.readouterr().err == "error: worker 1 did not end in time and was killed\n"
    assert all(gone(pid) for pid in ready(tmp_path))


def test_two_launches_on_one_machine_do_not_collide(tmp_path: Path) -> None:
    script = """
say(f"port-{rank}", os.environ["MASTER_PORT"])
wait_for(lambda: len(list(folder.parent.glob("*/port-?"))) == 4)
"""
    launches = [launched(script, tmp_path / name) for name in ("first", "second")]
    assert [(launch.communicate(timeout=60)[1], launch.returncode) for launch in launches] == [("", 0), ("", 0)]
    first, second = (
        [(tmp_path / name / f"port-{rank}").read_text() for rank in range(2)] for name in ("first", "second")
    )
    assert first[0] == first[1] != second[0] == second[1]


def test_two_workers_add_over_gloo(tmp_path: Path) -> None:
    script = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([rank + 1.0, 10.0 * rank])
dist.all_reduce(value)
say(str(rank), json.dumps(value.tolist()))
dist.destroy_process_group()
"""
    assert run_workers([sys.executable, "-c", BEGIN + script, str(tmp_path)], 2, 1) == 0
    assert [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)] == [[3.0, 10.0], [3.0, 10.0]]


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        run_workers([str(tmp_path / "no-such-program")], 2)


def test_torchruns_variables_make_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not joined()
    for name in TORCHRUN:
        monkeypatch.setenv(name, "1")
    assert joined()


def test_some_of_torchruns_variables_are_an_error_that_names_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(UsageError, match="has RANK, WORLD_SIZE, MASTER_PORT but not LOCAL_RANK, MASTER_ADDR"):
        joined()


def test_importing_does_not_import_torch() -> None:
    check = "import sys, torchstone.launch.local; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0

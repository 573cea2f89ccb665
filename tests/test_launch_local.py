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

from torchstone import post
from torchstone.launch import local, supervise
from torchstone.launch.local import Launch
from torchstone.launch.nodes import TORCHRUN

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
from torchstone.launch.local import Launch, run_workers
sys.exit(run_workers(Launch(**json.loads(sys.argv[1]))))
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


def run_workers(command: list[str], nproc: int, threads: int | None = None, **options: Any) -> int:
    return local.run_workers(Launch(command, nproc, threads=threads, **options))


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
    assert capfd.readouterr() == ("", f"error: rank 1 failed first: ended with exit code {code}\n")
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
    assert capfd.readouterr().err == "error: rank 1 failed first: was killed by SIGKILL\n"
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
    assert capfd.readouterr().err == "error: rank 1 failed first: ended with exit code 41\n"


def test_after_a_failure_the_others_do_not_get_the_time_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervise, "FAILURE_GRACE", 0.5)
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
    assert capfd.readouterr().err == "error: rank 1 failed first: ended with exit code 5\n"


def test_a_worker_that_saved_of_itself_gives_the_others_time_to_save(tmp_path: Path) -> None:
    """Some schedulers send their signal to every process; the ones that come later must not be cut short."""
    assert run_workers(command(FIRST_SAVED + WAIT + "time.sleep(30)", tmp_path), 2) == 75
    assert (tmp_path / "saved-1").read_text() == "SIGTERM"


def test_where_a_worker_had_to_be_killed_the_run_is_not_called_saved(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay('ready-1')\ntime.sleep(30)"
    assert run_workers(command(FIRST_SAVED + deaf, tmp_path), 2, save_grace=0.5) == 7
    assert capfd.readouterr().err == "error: rank 1 failed first: did not end in time and was killed\n"


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
    monkeypatch.setattr(supervise, "FAILURE_GRACE", 0.5)
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
    assert capfd.readouterr().err == "error: rank 1 failed first: did not end in time and was killed\n"
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


def test_importing_does_not_import_torch() -> None:
    check = "import sys, torchstone.launch.local; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


class TestRestarts:
    """Workers that note each of their starts, and end as told."""

    NOTE = "say(f'{rank}-{os.environ[\"TORCHELASTIC_RESTART_COUNT\"]}')\n"

    def starts(self, folder: Path) -> list[str]:
        return sorted(file.name for file in folder.iterdir())

    def test_a_failure_starts_all_again_as_often_as_allowed(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        script = self.NOTE + "n = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\nif rank == 1: sys.exit(40 + n)\n"
        assert run_workers(command(script + "time.sleep(30)", tmp_path), 2, max_restarts=1) == 41
        assert self.starts(tmp_path) == ["0-0", "0-1", "1-0", "1-1"]
        assert capfd.readouterr().err == (
            "error: rank 1 failed first: ended with exit code 40\nrestart 1 of 1, from the last whole checkpoint\n"
            "error: rank 1 failed first: ended with exit code 41\n"
        )

    def test_another_start_that_ends_well_is_well(self, tmp_path: Path) -> None:
        script = self.NOTE + "sys.exit(1 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)"
        assert run_workers(command(script, tmp_path), 2, max_restarts=3) == 0
        assert {name[2:] for name in self.starts(tmp_path)} == {"0", "1"}

    def test_the_same_end_at_the_same_step_is_taken_for_bad_luck_twice(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert run_workers(command(self.NOTE + "sys.exit(5)", tmp_path), 1, max_restarts=9) == 5
        assert self.starts(tmp_path) == ["0-0", "0-1", "0-2"]
        assert capfd.readouterr().err.splitlines()[-2:] == [
            "not restarted: it has failed 3 times in the same way at step 0",
            "error: rank 0 failed first: ended with exit code 5",
        ]

    @pytest.mark.parametrize("code", [2, 3, 6, 75])
    def test_what_would_end_so_again_is_not_started_again(self, tmp_path: Path, code: int) -> None:
        assert run_workers(command(self.NOTE + f"sys.exit({code})", tmp_path), 1, max_restarts=3) == code
        assert self.starts(tmp_path) == ["0-0"]

    def test_a_signal_is_no_reason_to_start_again(self, tmp_path: Path, survive_signals: dict[int, Any]) -> None:
        script = self.NOTE + WAIT + "os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(30)"
        assert run_workers(command(script, tmp_path), 1, max_restarts=3) == 75
        assert "0-1" not in self.starts(tmp_path)


class TestPulse:
    """Workers that know of their post, without torch."""

    BEGIN = """
import json, os, signal, sys, time
from pathlib import Path
from torchstone import post
from torchstone.errors import NumbersError
rank = int(os.environ["RANK"])
post.HERE.take()
post.HERE.keep_log(Path(sys.argv[1], f"rank-{rank}.log"))
print("from", rank, flush=True)
post.enter("computing step 7", 7)
"""

    def run(self, script: str, folder: Path, **options: Any) -> int:
        words = [sys.executable, "-c", self.BEGIN + script, str(folder)]
        return run_workers(words, 2, logs=folder, hang_timeout=1.5, **options)

    def test_a_worker_that_does_not_move_is_named_with_its_phase_and_leaves_its_stack(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        script = """
def stuck():
    time.sleep(60)
if rank == 1:
    stuck()
with post.HERE.waiting():
    time.sleep(60)
"""
        assert self.run(script, tmp_path) == 7
        said = capfd.readouterr().err
        assert said.startswith("error: rank 1 failed first, while computing step 7: has not moved on for 2 s")
        assert said.endswith(f"\n  its log: {tmp_path}/rank-1.log\n")
        log = (tmp_path / "rank-1.log").read_text()
        assert log.startswith("from 1\n")
        assert "in stuck" in log
        assert "in stuck" not in (tmp_path / "rank-0.log").read_text()

    def test_a_worker_that_moves_is_left_alone(self, tmp_path: Path) -> None:
        script = "for step in range(8, 16):\n    post.enter(f'computing step {step}', step)\n    time.sleep(0.4)\n"
        assert self.run(script, tmp_path) == 0

    def test_before_the_first_step_there_is_the_time_to_join(self, tmp_path: Path) -> None:
        begin = self.BEGIN.replace('post.enter("computing step 7", 7)', "")
        for seconds, join_timeout, code in ((3, 60, 0), (30, 1.5, 7)):
            words = [sys.executable, "-c", f"{begin}time.sleep({seconds})", str(tmp_path)]
            assert run_workers(words, 2, logs=tmp_path, hang_timeout=1.5, join_timeout=join_timeout) == code

    def test_the_cause_is_told_from_those_that_lost_contact_of_it(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Rank 0 says that it lost contact, and ends before rank 1, which is still writing down what happened."""
        script = """
if rank == 0:
    while not Path(post.HERE.error_file).with_name("error-1.json").exists():
        time.sleep(0.01)
    time.sleep(0.1)
    os._exit(7)
signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
error = NumbersError("the loss is not a number")
post.write_error(error, str(error), 5)
time.sleep(5)
"""
        assert self.run(script, tmp_path) == 5
        said = capfd.readouterr().err
        assert said == (
            "error: rank 1 failed first, while computing step 7: the loss is not a number\n"
            f"  its log: {tmp_path}/rank-1.log\n"
        )

    def test_a_worker_whose_launcher_is_gone_is_asked_to_end(self, tmp_path: Path) -> None:
        script = "import signal\nsignal.signal(15, lambda *_: (print('asked', flush=True), os._exit(75)))\n"
        script += "Path(sys.argv[1], f'ready-{rank}').write_text(str(os.getpid()))\ntime.sleep(30)"
        words = {"command": [sys.executable, "-c", self.BEGIN + script, str(tmp_path)], "nproc": 2}
        launch = subprocess.Popen([sys.executable, "-c", LAUNCH, json.dumps(words)])
        pids = ready(tmp_path)
        launch.kill()
        launch.wait()
        assert all(gone(pid) for pid in pids)
        assert (tmp_path / "rank-1.log").read_text() == "from 1\nasked\n"

    def test_a_pulse_is_never_seen_half_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A time of zero would be a worker that has stood still since the machine was started."""
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv(post.POST, str(tmp_path))
        post.prepare_pulse(tmp_path, 0)
        script = """
import time
from torchstone import post
post.HERE.take()
until = time.monotonic() + 2
while time.monotonic() < until:
    post.enter("computing step 7", 7)
"""
        writer = subprocess.Popen([sys.executable, "-c", script])
        seen = []
        while writer.poll() is None:
            pulse = post.read_pulse(tmp_path, 0)
            assert pulse is not None
            seen.append((pulse.lived > 0, pulse.moved > 0, pulse.step))
        assert len(seen) > 1000
        assert set(seen) <= {(True, True, 0), (True, True, 7)}
        assert seen[-1] == (True, True, 7)

    def test_what_a_worker_starts_is_not_at_its_post(self, tmp_path: Path) -> None:
        script = "assert 'TORCHSTONE_POST' not in os.environ and 'TORCHELASTIC_ERROR_FILE' not in os.environ"
        assert self.run(script, tmp_path) == 0

    def test_a_signal_after_a_failure_does_not_make_it_a_stop(
        self, tmp_path: Path, survive_signals: dict[int, Any]
    ) -> None:
        """One that fails while it starts; a signal comes in the time that the other has to end."""
        script = """
if rank == 1:
    os._exit(4)
signal.signal(signal.SIGTERM, lambda *_: (os.kill(os.getppid(), signal.SIGTERM), time.sleep(1), os._exit(75)))
time.sleep(30)
"""
        words = [
            sys.executable,
            "-c",
            self.BEGIN.replace('post.enter("computing step 7", 7)', "") + script,
            str(tmp_path),
        ]
        assert run_workers(words, 2, logs=tmp_path) == 4


def test_nobody_to_read_what_is_said_changes_nothing(tmp_path: Path) -> None:
    """The terminal is closed, or the `tee` behind the command has died of the same Ctrl-C."""
    script = "sys.exit(1 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)"
    words = json.dumps({"command": command(script, tmp_path), "nproc": 1, "max_restarts": 1})
    read, write = os.pipe()
    os.close(read)
    launch = subprocess.Popen([sys.executable, "-c", LAUNCH, words], stderr=write)
    os.close(write)
    assert launch.wait(60) == 0


def test_a_crash_counts_as_the_cause_though_its_core_took_a_while(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 has lost contact and ended; rank 1 dies of a signal that is not ours."""
    script = """
signal.signal(signal.SIGTERM, lambda *_: (signal.signal(signal.SIGABRT, signal.SIG_DFL), os.abort()))
say(f"ready-{rank}", "")
wait_for((folder / "ready-1").exists)
os._exit(7) if rank == 0 else time.sleep(30)
"""
    assert run_workers(command(script, tmp_path), 2) == 7
    assert capfd.readouterr().err == "error: rank 1 failed first: was killed by SIGABRT\n"

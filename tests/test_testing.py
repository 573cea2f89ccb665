"""The harness for tests on several processes, with real processes: results, and every way to fail."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
import unittest
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from torchstone import testing
from torchstone.errors import UsageError
from torchstone.testing import DistributedTest, RankFailure, launch_procs

pytest_plugins = ["pytester"]

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True, scope="module")
def _forkserver() -> None:
    """The first launch imports everything; the timeouts below are for later ones."""
    assert launch_procs(os.getenv, 1, "RANK") == ["0"]


@pytest.fixture(autouse=True)
def _slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine ranks may start and be noticed late."""
    monkeypatch.setattr(testing, "GRACE_SECONDS", 60.0)
    monkeypatch.setattr(testing, "DEATH_HEAD_START", 60.0)


def hang_message(function: Callable[..., Any], world_size: int, *args: Any, expected: str) -> str:
    """The message of a launch that hangs; the timeout grows until the ranks had time to get there."""
    for timeout in (1.5, 6.0, 24.0, 96.0):
        with pytest.raises(RankFailure, match=f"still running after {timeout:g} s") as caught:
            launch_procs(function, world_size, *args, timeout=timeout)
        if expected in str(caught.value):
            break
    return str(caught.value)


def still_running(folder: Path) -> list[int]:
    """Which of the processes in the folder's pid files run after a minute. Killed ones take a moment to end."""
    pids = [int(pid) for path in folder.glob("*.pids") for pid in path.read_text().split()]
    assert pids
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    deadline = time.monotonic() + 60
    while (running := [p.pid for p in processes if is_alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return running


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def wait_for_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def environment() -> dict[str, str | int]:
    return {name: os.environ[name] for name in (*TORCHRUN_VARIABLES, "SET_BY_TEST")} | {
        "group": dist.get_rank() * 100 + dist.get_world_size(),
        "backend": dist.get_backend(),
        "threads": torch.get_num_threads(),
        "pid": os.getpid(),
    }


def scaled_sum(values: list[float], *, scale: float = 1.0) -> torch.Tensor:
    total = torch.tensor(values) * scale * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return total


def many_bytes(count: int) -> bytes:
    return bytes([dist.get_rank() + 1]) * count


def create_own_group() -> int:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)


def hang_on_rank_1(folder: Path) -> None:
    child = subprocess.Popen(["sleep", "600"])
    (folder / f"{dist.get_rank()}.pids").write_text(f"{os.getpid()} {child.pid}")
    if dist.get_rank() == 1:
        sleep_long()


def sleep_long() -> None:
    time.sleep(600)


def stop_own_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_launcher(folder: Path, launcher: int) -> None:
    (folder / f"{dist.get_rank()}.pids").write_text(str(os.getpid()))
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(launcher, signal.SIGKILL)
    sleep_long()


def fail_on_rank_1(how: str) -> None:
    if dist.get_rank() == 0:
        # Fails as well, when rank 1 is gone.
        dist.recv(torch.zeros(1), 1)
    elif how == "raise":
        raise ZeroDivisionError("on rank one")
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        os._exit(int(how))


def fail_while_rank_0_sleeps(folder: Path) -> None:
    if dist.get_rank() == 0:
        (folder / "0.pids").write_text(str(os.getpid()))
        sleep_long()
    wait_for_file(folder / "0.pids")
    raise ZeroDivisionError


def fail_on_all_ranks() -> None:
    raise ZeroDivisionError("everywhere")


def die_after_return() -> None:
    if dist.get_rank() == 0:
        Finalize(None, os._exit, (5,), exitpriority=1)


def print_and_exit(code: int) -> None:
    print("about to exit")
    os._exit(code)


def return_lambda() -> object:
    return lambda: None


def skip_by_unittest() -> None:
    raise unittest.SkipTest("not here")


def listening_addresses() -> set[str]:
    """Where this rank and the store of the launching process listen."""
    port = int(os.environ["MASTER_PORT"])
    connections = [c for c in psutil.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
    return {c.laddr.ip for c in connections if c.laddr.port == port or c.pid == os.getpid()}


def test_nothing_listens_beyond_the_loopback() -> None:
    assert launch_procs(listening_addresses, 2) == [{"127.0.0.1"}, {"127.0.0.1"}]


def test_a_rank_has_torchruns_variables_a_group_and_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BY_TEST", "yes")
    ranks = launch_procs(environment, 3)
    assert [rank["RANK"] for rank in ranks] == [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1", "2"]
    assert [rank["group"] for rank in ranks] == [3, 103, 203]
    assert len({rank["pid"] for rank in ranks} | {os.getpid()}) == 4
    assert len({rank["MASTER_PORT"] for rank in ranks}) == 1
    expected = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "backend": "gloo", "threads": 1, "SET_BY_TEST": "yes"}
    assert all(rank.items() >= expected.items() for rank in ranks)


def test_arguments_and_tensors_are_passed() -> None:
    totals = launch_procs(scaled_sum, 2, [1.0, 2.0], scale=10.0)
    assert [total.tolist() for total in totals] == [[30.0, 60.0]] * 2
    # Keywords with the names of launch_procs' own.
    assert launch_procs(functools.partial(dict, timeout=1, backend=2), 1) == [{"timeout": 1, "backend": 2}]


def test_results_larger_than_a_pipe_come_back_in_rank_order() -> None:
    results = launch_procs(many_bytes, 3, 2_000_000)
    assert [(len(data), set(data)) for data in results] == [(2_000_000, {rank}) for rank in (1, 2, 3)]


def test_without_a_backend_the_function_creates_the_group() -> None:
    assert launch_procs(create_own_group, 2, backend=None) == [2, 2]


def test_preloaded_modules_are_imported_before_the_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "preloaded.py").write_text("import os\nos.environ['PRELOADED'] = 'yes'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert launch_procs(os.getenv, 2, "PRELOADED", preload=["preloaded"]) == ["yes", "yes"]


def test_warm_launch_of_2_8_and_32_ranks() -> None:
    """Prints the seconds that docs/testing.md has."""
    for size in (2, 8, 32):
        start = time.monotonic()
        assert launch_procs(dist.get_rank, size) == list(range(size))
        print(f"{size} ranks: {time.monotonic() - start:.2f} s")


def test_a_hang_fails_with_the_stacks_and_kills_all_processes(tmp_path: Path) -> None:
    message = hang_message(hang_on_rank_1, 2, tmp_path, expected="rank 0, which has returned")
    assert message.startswith("ranks 1, 0 of 2 were still running after")
    _, stack, waiting = message.split("the stack of rank ")
    assert stack.startswith("1:\n")
    assert "in sleep_long" in stack
    assert "in hang_on_rank_1" in stack
    assert waiting.startswith("0, which has returned and waits for the others:\n")
    assert len((tmp_path / "0.pids").read_text().split()) == 2
    assert still_running(tmp_path) == []


def test_a_stopped_process_is_a_hang_without_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "STACK_SECONDS", 0.5)
    message = hang_message(stop_own_process, 1, expected="no stack")
    assert message.startswith("rank 0 of 1 was still running after")
    assert "no stack: the process did not answer the signal" in message


def test_ranks_end_when_their_launcher_was_killed(tmp_path: Path) -> None:
    code = (
        "import os; from pathlib import Path; from torchstone import testing; import test_testing\n"
        "testing.ORPHAN_SECONDS, testing.PRELOAD = 1.0, ('torchstone.testing',)\n"
        f"testing.launch_procs(test_testing.kill_launcher, 2, Path({str(tmp_path)!r}), os.getpid(), timeout=5.0)\n"
    )
    # Ranks that need longer than the timeout to start are another test.
    for _ in range(3):
        launcher = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=False)
        if launcher.returncode == -signal.SIGKILL:
            break
    assert launcher.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob("*.pids"))) == 2
    assert still_running(tmp_path) == []


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "ZeroDivisionError: on rank one"),
        ("kill", "was killed by SIGKILL"),
        ("37", "ended with exit code 37 before its function returned"),
    ],
)
def test_the_first_failure_comes_first(how: str, message: str) -> None:
    with pytest.raises(RankFailure) as caught:
        launch_procs(fail_on_rank_1, 2, how)
    first, second = str(caught.value).split("\n\n")
    assert first.startswith("rank 1 of 2 failed first:\n")
    assert message in first
    assert second.startswith("rank 0 of 2 failed:\nTraceback")
    assert "dist.recv" in second


def test_ranks_that_keep_running_after_a_failure_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "GRACE_SECONDS", 0.5)
    with pytest.raises(RankFailure) as caught:
        launch_procs(fail_while_rank_0_sleeps, 2, tmp_path)
    failure, killed = str(caught.value).split("\n\n")
    assert failure.startswith("rank 1 of 2 failed:\nTraceback")
    assert killed == "rank 0 was still running 0.5 s later and was killed"
    assert still_running(tmp_path) == []


def test_equal_failures_are_shown_once_and_without_frames_of_the_harness() -> None:
    with pytest.raises(RankFailure) as caught:
        launch_procs(fail_on_all_ranks, 3)
    message = str(caught.value)
    assert message.count("ZeroDivisionError: everywhere") == 1
    assert sorted(message.split(" of 3 failed, rank ")[0].removeprefix("ranks ").split(", ")) == ["0", "1", "2"]
    assert testing.__file__ not in message


def test_a_death_after_the_return_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="rank 0 of 2 failed:\nended with exit code 5 after its function returned"):
        launch_procs(die_after_return, 2)


def test_the_message_shows_the_last_output_of_a_dead_rank() -> None:
    # Exit code 0 is a failure too if the function has not returned.
    for code in (0, 3):
        with pytest.raises(RankFailure, match=f"exit code {code} .*\nits last output:\nabout to exit"):
            launch_procs(print_and_exit, 1, code)


def test_errors_name_what_cannot_be_launched() -> None:
    with pytest.raises(UsageError, match="scale \\(generator\\) cannot be sent to the ranks"):
        launch_procs(scaled_sum, 2, [1.0], scale=(i for i in range(2)))
    with pytest.raises(UsageError, match="<lambda> \\(function\\) cannot be sent"):
        launch_procs(lambda: None, 2)
    with pytest.raises(RankFailure, match="[Pp]ickle"):
        launch_procs(return_lambda, 1)
    with pytest.raises(UsageError, match="world_size is 0"):
        launch_procs(dist.get_rank, 0)
    with pytest.raises(UsageError, match="test_static cannot run on ranks"):

        class Static(DistributedTest):
            @staticmethod
            def test_static() -> None: ...


def test_a_skip_by_unittest_is_a_skip() -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        launch_procs(skip_by_unittest, 2)


class Mixin:
    def test_a_plain_base_class_runs_on_the_ranks(self) -> None:
        assert (self.rank, self.size) == (dist.get_rank(), dist.get_world_size())  # type: ignore[attr-defined]


class TestMethods(DistributedTest):
    dp, tp = 2, 2

    @pytest.fixture
    def offset(self) -> float:
        return 10.0

    @pytest.fixture(autouse=True)
    def _set_attribute(self) -> None:
        self.attribute = "set"

    def setup_method(self) -> None:
        self.setup_pid = os.getpid()

    def total(self, value: float) -> float:
        tensor = torch.tensor([value])
        dist.all_reduce(tensor)
        return float(tensor)

    @pytest.mark.parametrize("value", [1.0, 2.0])
    def test_parameters_fixtures_and_other_methods(self, value: float, offset: float, tmp_path: Path) -> None:
        assert self.size == dist.get_world_size() == self.dp * self.tp
        assert self.total(value * (self.rank + 1) + offset) == value * 10 + offset * 4
        assert self.attribute == "set"
        assert self.setup_pid != os.getpid()
        # All ranks have the same folder.
        (tmp_path / str(self.rank)).touch()
        dist.barrier()
        assert len(list(tmp_path.iterdir())) == 4


class TestInherited(TestMethods, Mixin):
    world_size = (3, 4)

    @pytest.fixture
    def offset(self) -> float:
        return 0.0

    def test_parameters_fixtures_and_other_methods(self, offset: float, tmp_path: Path) -> None:  # type: ignore[override]
        (tmp_path / f"{self.size}").mkdir(exist_ok=True)
        if self.size == 4:
            assert (tmp_path / "3").is_dir(), "world sizes run in order"
            super().test_parameters_fixtures_and_other_methods(1.0, offset, self.subfolder(tmp_path))

    def subfolder(self, folder: Path) -> Path:
        (folder / "inner").mkdir(exist_ok=True)
        return folder / "inner"


OUTCOMES = """
    import time
    import pytest
    import torch.distributed as dist
    from torchstone.testing import DistributedTest

    class TestOutcomes(DistributedTest):
        world_size = 2

        def test_fails_and_skips(self):
            if self.rank == 0:
                pytest.skip("rank 0 is skipped")
            time.sleep(0.5)
            values = [self.rank, 2]
            assert values == [1, 3]

        def test_skips_on_one_rank(self):
            if self.rank == 1:
                pytest.skip("a reason of rank 1")

        def test_calls_fail(self):
            print(f"I am {self.rank}")
            dist.barrier()
            pytest.fail("a message of a rank")

        def test_calls_xfail(self):
            pytest.xfail("known")

        @pytest.mark.xfail(reason="by mark", strict=True)
        def test_is_marked_xfail(self):
            assert self.rank == 7

        def test_has_an_unpicklable_fixture(self, request):
            pass

        @pytest.mark.parametrize("number", [1, 2])
        def test_passes(self, number, tmp_path):
            assert dist.get_rank() == self.rank

    class TestSizes(DistributedTest):
        world_size = (1, 2)

        def test_skips_at_two(self, tmp_path):
            (tmp_path / str(self.size)).touch()
            if self.size == 2:
                pytest.skip("two are too many")

        def test_fails_at_two(self):
            if self.size == 1:
                pytest.skip("one is not enough")
            assert self.size == 1
"""


def test_pytest_shows_the_outcomes_of_the_ranks(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "GRACE_SECONDS", 2.0)
    pytester.makepyfile(test_outcomes=OUTCOMES)
    result = pytester.runpytest_inprocess("-ra", "-p", "no:cacheprovider")
    result.assert_outcomes(failed=4, skipped=2, xfailed=2, passed=2)
    output = result.stdout.str()
    assert "rank 1 of 2 failed:" in output
    # pytest rewrites asserts on the ranks too: the message has the values.
    assert "AssertionError: assert [1, 2] == [1, 3]" in output
    assert "a reason of rank 1" in output
    assert "two are too many" in output
    assert "Failed: a message of a rank" in output
    assert "output of rank 1:\nI am 1" in output
    assert "cannot be sent to the ranks" in output
    assert "ranks 0, 1 of 2 failed" in output or "ranks 1, 0 of 2 failed" in output
    assert "assert 2 == 1" in output
    assert "hidden" not in output
    assert "During handling" not in output

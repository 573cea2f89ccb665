"""The harness for tests on several processes, by real ones: what they return, and every way in which they do not."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
import unittest
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from torchstone import testing
from torchstone.errors import UsageError
from torchstone.testing import DistributedTest, RankFailure, launch_procs

pytest_plugins = ["pytester"]

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True, scope="module")
def forkserver() -> None:
    """Started once, so that no test below measures the imports of the forkserver."""
    assert launch_procs(os.getenv, 1, "RANK") == ["0"]


def variables() -> dict[str, str | int]:
    return {name: os.environ[name] for name in (*TORCHRUN, "OF_THE_TEST")} | {
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


def own_group() -> int:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)


def hang_on_rank_1(folder: Path) -> None:
    child = subprocess.Popen(["sleep", "600"])
    (folder / f"{dist.get_rank()}.pids").write_text(f"{os.getpid()} {child.pid}")
    if dist.get_rank() == 1:
        wait_for_nobody()


def wait_for_nobody() -> None:
    time.sleep(600)


def stop_answering() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail_on_rank_1(folder: Path, how: str) -> None:
    (folder / f"{dist.get_rank()}.pids").write_text(str(os.getpid()))
    if dist.get_rank() != 1:
        # Rank 0 waits for rank 1, and learns of its end; rank 2 never asks.
        dist.recv(torch.zeros(1), 1) if dist.get_rank() == 0 else wait_for_nobody()
    elif how == "raise":
        raise ZeroDivisionError("of rank one")
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        os._exit(int(how))


def fail_alike() -> None:
    raise ZeroDivisionError("everywhere")


def leave_after_the_return() -> None:
    if dist.get_rank() == 0:
        threading.Timer(0.5, os._exit, (5,)).start()
    else:
        time.sleep(1.5)


def last_words(code: int) -> None:
    print("about to leave")
    os._exit(code)


def not_picklable() -> object:
    return lambda: None


def skip_by_unittest() -> None:
    raise unittest.SkipTest("not here")


def lasting(folder: Path, seconds: float = 10.0) -> list[int]:
    """What still runs after a while: the kernel takes a moment to end what was killed."""
    until = time.monotonic() + seconds
    while running(folder) and time.monotonic() < until:
        time.sleep(0.05)
    return running(folder)


def running(folder: Path) -> list[int]:
    pids = [int(pid) for path in folder.glob("*.pids") for pid in path.read_text().split()]
    assert pids
    alive = []
    for pid in pids:
        try:
            alive += [pid] if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else []
        except psutil.NoSuchProcess:
            continue
    return alive


def test_a_rank_has_what_torchrun_sets_a_group_and_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_TEST", "yes")
    found = launch_procs(variables, 3)
    assert [rank["RANK"] for rank in found] == [rank["LOCAL_RANK"] for rank in found] == ["0", "1", "2"]
    assert [rank["group"] for rank in found] == [3, 103, 203]
    assert len({rank["pid"] for rank in found} | {os.getpid()}) == 4
    assert len({rank["MASTER_PORT"] for rank in found}) == 1
    for rank in found:
        expected = ("3", "127.0.0.1", "gloo", 1, "yes")
        assert (
            tuple(rank[key] for key in ("WORLD_SIZE", "MASTER_ADDR", "backend", "threads", "OF_THE_TEST")) == expected
        )


def test_arguments_go_over_and_tensors_come_back() -> None:
    found = launch_procs(scaled_sum, 2, [1.0, 2.0], scale=10.0)
    assert [total.tolist() for total in found] == [[30.0, 60.0]] * 2


def test_results_larger_than_a_pipe_come_back_in_order() -> None:
    size = 20_000_000
    found = launch_procs(many_bytes, 3, size)
    assert [len(data) for data in found] == [size] * 3
    assert [set(data) for data in found] == [{1}, {2}, {3}]


def test_without_a_backend_the_group_is_the_functions_own() -> None:
    assert launch_procs(own_group, 2, backend=None) == [2, 2]


def test_a_preloaded_module_is_imported_before_the_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "said_early.py").write_text("import os\nos.environ['SAID_EARLY'] = 'yes'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert launch_procs(os.getenv, 2, "SAID_EARLY", preload=["said_early"]) == ["yes", "yes"]


def test_a_warm_launch_of_two_takes_less_than_a_second_and_of_32_a_few() -> None:
    seconds = {}
    for size in (2, 8, 32):
        start = time.monotonic()
        assert launch_procs(dist.get_rank, size) == list(range(size))
        seconds[size] = time.monotonic() - start
    print({size: round(value, 2) for size, value in seconds.items()})
    # docs/testing.md has what was measured. What is asserted leaves room for a busy machine.
    assert seconds[2] < 3
    assert seconds[32] < 20


def test_a_hang_fails_with_the_stacks_and_leaves_nothing_running(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        launch_procs(hang_on_rank_1, 2, tmp_path, timeout=4.0)
    assert 4 <= time.monotonic() - start < 20
    said = str(caught.value)
    assert said.startswith("ranks 1, 0 of 2 still ran after 4 s")
    assert "the stack of rank 0, which had returned and was waiting for the others" in said
    stack = said.split("the stack of rank 1:")[1].split("the stack of rank 0")[0]
    assert "in wait_for_nobody" in stack
    assert "in hang_on_rank_1" in stack
    assert len((tmp_path / "0.pids").read_text().split()) == 2
    assert lasting(tmp_path) == []


def test_a_stopped_process_is_a_hang_without_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "DUMP", 0.5)
    with pytest.raises(RankFailure, match="rank 0 of 1 still ran after 1 s\n\n.*\nno stack: "):
        launch_procs(stop_answering, 1, timeout=1.0)


def test_ranks_end_when_their_launcher_was_killed(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from torchstone import testing; import test_testing\n"
        "testing.ABANDONED = 1.0\n"
        f"testing.launch_procs(test_testing.hang_on_rank_1, 2, Path({str(tmp_path)!r}), timeout=4.0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent) as launcher:
        until = time.monotonic() + 60
        while len(list(tmp_path.glob("*.pids"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        launcher.kill()
    ranks = [int(path.read_text().split()[0]) for path in tmp_path.glob("*.pids")]
    assert len(ranks) == 2
    assert set(ranks) <= set(running(tmp_path))
    for child in set(running(tmp_path)) - set(ranks):
        os.kill(child, signal.SIGKILL)
    assert lasting(tmp_path, 20.0) == []


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "ZeroDivisionError: of rank one"),
        ("kill", "died of SIGKILL (exit code -9)"),
        ("37", "ended with exit code 37 before its function returned"),
    ],
)
def test_the_first_to_fail_is_named_first_and_the_ended_are_no_failures(how: str, words: str, tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        launch_procs(fail_on_rank_1, 3, tmp_path, how, timeout=60.0)
    assert testing.GRACE <= time.monotonic() - start < 20
    first, second, ended = str(caught.value).split("\n\n")
    assert first.startswith("rank 1 of 3 failed first:\n")
    assert words in first
    # Rank 0 raised of its own when its neighbour went away.
    assert second.startswith("rank 0 of 3 failed:\nTraceback")
    assert "dist.recv" in second
    assert ended == "rank 2 still ran 3 s later, and was ended"
    assert lasting(tmp_path) == []


def test_ranks_that_fail_alike_are_read_once_and_without_the_harness() -> None:
    with pytest.raises(RankFailure) as caught:
        launch_procs(fail_alike, 3)
    said = str(caught.value)
    assert said.count("ZeroDivisionError: everywhere") == 1
    assert sorted(said.split(" of 3 failed, rank ")[0].removeprefix("ranks ").split(", ")) == ["0", "1", "2"]
    assert testing.__file__ not in said


def test_a_death_after_the_return_is_a_failure() -> None:
    with pytest.raises(
        RankFailure, match="rank 0 of 2 failed:\nended with exit code 5 after its function had returned"
    ):
        launch_procs(leave_after_the_return, 2)


def test_the_last_words_of_a_dead_rank_are_in_the_message() -> None:
    # Even a good exit code is a failure when the function has not returned.
    for code in (0, 3):
        with pytest.raises(RankFailure, match=f"exit code {code} .*\nit had printed:\nabout to leave"):
            launch_procs(last_words, 1, code)


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(UsageError, match="scale \\(generator\\) cannot be sent to the ranks"):
        launch_procs(scaled_sum, 2, [1.0], scale=(i for i in range(2)))
    with pytest.raises(UsageError, match="<lambda> \\(function\\) cannot be sent"):
        launch_procs(lambda: None, 2)
    with pytest.raises(RankFailure, match="[Pp]ickle"):
        launch_procs(not_picklable, 1)
    with pytest.raises(UsageError, match="a world of 0 ranks"):
        launch_procs(dist.get_rank, 0)


def test_a_skip_by_unittest_is_a_skip() -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        launch_procs(skip_by_unittest, 2)


def test_a_function_may_have_a_parameter_named_timeout() -> None:
    assert launch_procs(functools.partial(dict, timeout=1, backend=2), 1) == [{"timeout": 1, "backend": 2}]


class Mixed:
    def test_a_mixed_in_test_is_on_the_ranks(self) -> None:
        assert (self.rank, self.size) == (dist.get_rank(), dist.get_world_size())  # type: ignore[attr-defined]


class TestMethods(DistributedTest):
    dp, tp = 2, 2

    @pytest.fixture
    def offset(self) -> float:
        return 10.0

    @pytest.fixture(autouse=True)
    def put_on_the_instance(self) -> None:
        self.put = "there"

    def setup_method(self) -> None:
        self.set_up_in = os.getpid()

    def total(self, value: float) -> float:
        mine = torch.tensor([value])
        dist.all_reduce(mine)
        return float(mine)

    @pytest.mark.parametrize("value", [1.0, 2.0])
    def test_parameters_fixtures_and_other_methods(self, value: float, offset: float, tmp_path: Path) -> None:
        assert self.size == dist.get_world_size() == self.dp * self.tp
        assert self.total(value * (self.rank + 1) + offset) == value * 10 + offset * 4
        assert self.put == "there"
        assert self.set_up_in != os.getpid()
        # One folder for all ranks.
        (tmp_path / str(self.rank)).touch()
        dist.barrier()
        assert len(list(tmp_path.iterdir())) == 4


class TestInherited(TestMethods, Mixed):
    world_size = (3, 4)

    @pytest.fixture
    def offset(self) -> float:
        return 0.0

    def total(self, value: float) -> float:
        return super().total(value)

    def test_parameters_fixtures_and_other_methods(self, offset: float, tmp_path: Path) -> None:  # type: ignore[override]
        (tmp_path / f"{self.size}").mkdir(exist_ok=True)
        if self.size == 4:
            assert (tmp_path / "3").is_dir()
            super().test_parameters_fixtures_and_other_methods(1.0, offset, self.inner(tmp_path))

    def inner(self, folder: Path) -> Path:
        (folder / "inner").mkdir(exist_ok=True)
        return folder / "inner"


def test_methods_are_wrapped_once() -> None:
    class Later(TestMethods):
        pass

    method = "test_parameters_fixtures_and_other_methods"
    assert getattr(Later, method) is getattr(TestMethods, method)
    assert not hasattr(getattr(TestMethods, method).__wrapped__, "__wrapped__")


def test_what_cannot_run_on_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="test_static cannot run on ranks"):

        class Static(DistributedTest):
            @staticmethod
            def test_static() -> None: ...


OUTCOMES = """
    import os, time
    import pytest
    import torch.distributed as dist
    from torchstone.testing import DistributedTest

    class TestOutcomes(DistributedTest):
        world_size = 2
        timeout = 20.0

        def test_fails_and_skips(self):
            if self.rank == 0:
                pytest.skip("rank 0 would rather not")
            time.sleep(0.5)
            left = [self.rank, 2]
            assert left == [1, 3]

        def test_skips_on_one(self):
            if self.rank == 1:
                pytest.skip("only rank 1 knows why")

        def test_fails_by_word(self):
            print(f"I am {self.rank}")
            pytest.fail("the word of a rank")

        def test_xfails(self):
            pytest.xfail("known")

        @pytest.mark.xfail(reason="by mark", strict=True)
        def test_marked(self):
            assert self.rank == 7

        def test_unpicklable(self, request):
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
                pytest.skip("one is none")
            assert self.size == 1
"""


@pytest.fixture
def outcomes(pytester: pytest.Pytester) -> pytest.RunResult:
    pytester.makepyfile(test_outcomes=OUTCOMES)
    return pytester.runpytest_inprocess("-ra", "-p", "no:cacheprovider")


def test_pytest_shows_the_outcomes_of_the_ranks(outcomes: pytest.RunResult) -> None:
    outcomes.assert_outcomes(failed=4, skipped=2, xfailed=2, passed=2)
    said = outcomes.stdout.str()
    assert "rank 1 of 2 failed:" in said
    # By pytest's rewriting: the values, and not the line alone.
    assert "AssertionError: assert [1, 2] == [1, 3]" in said
    assert "only rank 1 knows why" in said
    assert "two are too many" in said
    assert "Failed: the word of a rank" in said
    assert "rank 1 printed:\nI am 1" in said
    assert "cannot be sent to the ranks" in said
    assert "ranks 0, 1 of 2 failed" in said or "ranks 1, 0 of 2 failed" in said
    assert "assert 2 == 1" in said
    assert "hidden" not in said
    assert "During handling" not in said

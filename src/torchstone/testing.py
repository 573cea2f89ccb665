"""Tests on several processes that end: with the results of the ranks, or with the reason why there are none.

`launch_procs` runs a function on every rank of a process group, `DistributedTest` every test method of a class. A hang
is a failure with the stacks of the ranks, a failure of any rank beats a skip of another, and nothing stays running.

The ranks are forked from a forkserver that has imported torch, so a rank costs its fork and not its imports: on two
cores a launch of two ranks takes 0.1 s, one of eight 0.25 s, one of 32 1.3 s. The price is that functions, arguments
and results travel by pickle, and that the first launch of a process waits four to eight seconds for the forkserver.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import inspect
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from torchstone.errors import UsageError

# What tests of parallel training import. The forkserver leaves out what is not installed.
PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch._dynamo",
    "torchstone.api",
    "torchstone.testing",
    # What opening a model's folder imports, a second and a half of it.
    "huggingface_hub.errors",
    "transformers.models.auto.configuration_auto",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.modeling_utils",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
    "pytest",
)
# Seconds that the others have to fail on their own, once a rank has failed.
GRACE = 3.0
# A death is noticed later than the errors it causes in its neighbours: it counts as this many seconds earlier.
NOTICE = 1.0
# Seconds after the timeout at which a rank ends itself, should the process that launched it be gone.
ABANDONED = 60.0
# Seconds for a rank to write its stack; a stopped process never does.
DUMP = 3.0
STACK_SIGNAL = signal.SIGQUIT
HOST = "127.0.0.1"
# The store looks its own address up, for its log: five seconds where a name server drops the question, unless told.
QUICK_LOOKUP = {"RES_OPTIONS": "timeout:1 attempts:1"}
LAST_LINES = 30


class RankFailure(AssertionError):
    """What failed on which ranks, the first one first."""


def launch_procs(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    backend: str | None = "gloo",
    preload: Sequence[str] = (),
    **kwargs: Any,
) -> list[Any]:
    """`function(*args, **kwargs)` on `world_size` ranks; what they returned, in the order of the ranks.

    `backend` None leaves the process group to the function: torchrun's variables are set either way. `preload` are
    modules to import first; the forkserver does it once if this is the first launch, the ranks if it is a later one.
    Keywords of the function that have these names go in by `functools.partial`.
    """
    __tracebackhide__ = True
    return _launch(functools.partial(function, *args, **kwargs), world_size, timeout, backend, preload)


class DistributedTest:
    """Subclass it, and every `test_*` method runs on all ranks; fixtures and parameters come over by pickle.

    The instance comes too: what `setup_method` or an autouse fixture put on it is there on the ranks.
    """

    world_size: int | Sequence[int] | None = None
    """Ranks of a test, or several numbers of them to run in turn; None is dp · tp · pp."""
    dp: int = 1
    tp: int = 1
    pp: int = 1
    timeout: float = 120.0
    backend: str | None = "gloo"
    preload: Sequence[str] = ()

    # Of an instance on a rank, and there only.
    rank: int
    size: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Not vars(cls): a test of a plain class that is mixed in must run on the ranks as well.
        for name in dir(cls):
            member = inspect.getattr_static(cls, name)
            if not name.startswith("test_") or getattr(member, "runs_on_ranks", False):
                continue
            if inspect.isfunction(member) and not inspect.iscoroutinefunction(member):
                setattr(cls, name, _on_all_ranks(member))
            elif isinstance(member, (staticmethod, classmethod)) or callable(member):
                raise UsageError(f"{cls.__qualname__}.{name} cannot run on ranks", "make it a plain method")


def _on_all_ranks(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def test(self: DistributedTest, *args: Any, **fixtures: Any) -> None:
        # On a rank already: called there by the harness, or by an overriding method as super().test_...().
        if hasattr(self, "rank"):
            return method(self, *args, **fixtures)
        call = functools.partial(_call_method, type(self), vars(self), method.__name__, *args, **fixtures)
        return _run_test(call, self)

    test.runs_on_ranks = True  # type: ignore[attr-defined]
    return test


def _run_test(call: functools.partial[None], test: DistributedTest) -> None:
    """A failure at one world size is a failure; a skip at one is a skip once the others have passed."""
    import pytest

    failed = skipped = None
    for size in _world_sizes(test):
        try:
            _launch(call, size, test.timeout, test.backend, test.preload)
        except RankFailure as failure:
            failed = str(failure)
            break
        except pytest.skip.Exception as skip:
            skipped = skipped or str(skip)
    # Outside of the handlers, and without a traceback: the ranks' own are the ones to read.
    if failed is not None:
        pytest.fail(failed, pytrace=False)
    if skipped is not None:
        pytest.skip(skipped)


def _world_sizes(test: DistributedTest) -> Sequence[int]:
    if test.world_size is None:
        return [test.dp * test.tp * test.pp]
    return [test.world_size] if isinstance(test.world_size, int) else test.world_size


def _call_method(
    test_class: type[DistributedTest], state: Mapping[str, Any], name: str, /, *args: Any, **fixtures: Any
) -> None:
    test = test_class.__new__(test_class)
    vars(test).update(state)
    test.rank, test.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    getattr(test, name)(*args, **fixtures)


@dataclass(frozen=True)
class _Launch:
    """What every rank is told."""

    folder: Path
    call: bytes
    world_size: int
    port: int
    lifetime: float
    backend: str | None
    preload: tuple[str, ...]
    environment: dict[str, str]
    rewrite_asserts: bool


@dataclass(frozen=True)
class _Report:
    """What a rank leaves in a file: a pipe would fill up, and would be cut off in the middle with its rank."""

    outcome: Literal["returned", "skipped", "xfailed", "raised"]
    at: float
    pickled: bytes = b""
    text: str = ""


@dataclass
class _Rank:
    """A rank as the launching process sees it."""

    number: int
    folder: Path
    process: ForkServerProcess
    report: _Report | None = None
    exit_code: int | None = None
    ended_at: float = 0.0
    was_ended: bool = False
    stack: str = ""

    def read(self, what: str) -> str:
        path = self.folder / f"{self.number}.{what}"
        return path.read_text(errors="replace") if path.exists() else ""

    def note_end(self) -> None:
        self.process.join()
        self.exit_code, self.ended_at = self.process.exitcode, time.monotonic()

    def find_report(self) -> None:
        path = self.folder / f"{self.number}.report"
        self.report = pickle.loads(path.read_bytes()) if path.exists() else None

    @property
    def died(self) -> bool:
        """Of a rank that has ended: by itself and not as a rank does, be it after its function had returned."""
        raised = self.report is not None and self.report.outcome == "raised"
        return not self.was_ended and not raised and (self.report is None or self.exit_code != 0)

    @property
    def failed_at(self) -> float | None:
        if self.report is not None and self.report.outcome == "raised":
            return self.report.at
        return self.ended_at - NOTICE if self.died else None

    @property
    def trouble(self) -> str:
        if self.report is not None and self.report.outcome == "raised":
            return self.report.text
        assert self.exit_code is not None
        if self.exit_code < 0:
            how = f"died of {signal.Signals(-self.exit_code).name} (exit code {self.exit_code})"
        else:
            when = "before its function returned" if self.report is None else "after its function had returned"
            how = f"ended with exit code {self.exit_code} {when}"
        said = self.read("output").splitlines()[-LAST_LINES:]
        return "\n".join([how, *(["it had printed:"] if said else []), *said])


def _launch(
    call: functools.partial[Any], world_size: int, timeout: float, backend: str | None, preload: Sequence[str]
) -> list[Any]:
    __tracebackhide__ = True
    if world_size < 1:
        raise UsageError(f"a world of {world_size} ranks", "world_size must be 1 or more")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *preload])
    # Served here, so that it outlives every rank.
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="torchstone-ranks-") as name:
        launch = _Launch(
            folder=Path(name), call=_pickled(call), world_size=world_size, port=store.port,
            lifetime=timeout + ABANDONED, backend=backend, preload=tuple(preload), environment=dict(os.environ),
            rewrite_asserts=any(type(finder).__name__ == "AssertionRewritingHook" for finder in sys.meta_path),
        )  # fmt: skip
        ranks: list[_Rank] = []
        try:
            for number in range(world_size):
                process = context.Process(target=_rank_main, args=(launch, number), name=f"rank {number}")
                process.start()
                ranks.append(_Rank(number, launch.folder, process))
            hung = _watch(ranks, timeout)
        finally:
            for rank in ranks:
                _end(rank)
        _show_output(ranks)
        return _verdict(ranks, timeout if hung else None)


def _pickled(call: functools.partial[Any]) -> bytes:
    try:
        return pickle.dumps(call)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        parts = {getattr(call.func, "__qualname__", repr(call.func)): call.func}
        parts |= {f"argument {number}": value for number, value in enumerate(call.args)} | call.keywords
        found = next((f"{name} ({type(value).__name__})" for name, value in parts.items() if not _pickles(value)), "")
        raise UsageError(
            f"{found} cannot be sent to the ranks: {error}",
            "ranks get functions of importable modules, and values that pickle can write",
        ) from error


def _pickles(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError):
        return False
    return True


def _watch(ranks: Sequence[_Rank], timeout: float) -> bool:
    """Until all ranks have ended, or a failure's grace is over; whether it was a hang."""
    deadline, failing = time.monotonic() + timeout, False
    running = list(ranks)
    while running:
        wait([rank.process.sentinel for rank in running], max(0.0, deadline - time.monotonic()))
        for rank in [rank for rank in running if not rank.process.is_alive()]:
            running.remove(rank)
            rank.note_end()
            rank.find_report()
            if rank.failed_at is not None and not failing:
                failing, deadline = True, min(deadline, time.monotonic() + GRACE)
        if running and time.monotonic() >= deadline:
            if not failing:
                _dump_stacks(running)
            return not failing
    return False


def _dump_stacks(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        _send(rank, STACK_SIGNAL)
    last: list[str] = []
    until = time.monotonic() + DUMP
    while time.monotonic() < until:
        time.sleep(0.2)
        stacks = [rank.read("stack") for rank in ranks]
        # Written in pieces by a signal handler: complete when nothing more is coming.
        if all(stacks) and stacks == last:
            break
        last = stacks
    for rank in ranks:
        rank.stack = rank.read("stack") or "no stack: the process did not answer the signal\n"


def _send(rank: _Rank, number: signal.Signals) -> None:
    if rank.process.is_alive() and rank.process.pid is not None:
        # Between the two lines it may have ended.
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, number)


def _end(rank: _Rank) -> None:
    """Ends the rank if it still runs, and what it started and left behind: they are a process group of their own."""
    if rank.exit_code is None:
        rank.was_ended = True
        rank.process.kill()
        rank.note_end()
        rank.find_report()
    assert rank.process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank.process.pid, signal.SIGKILL)
    rank.process.close()


def _show_output(ranks: Iterable[_Rank]) -> None:
    for rank in ranks:
        said = rank.read("output")
        if said:
            sys.stdout.write(f"rank {rank.number} printed:\n{said.rstrip()}\n")


def _verdict(ranks: Sequence[_Rank], hung_after: float | None) -> list[Any]:
    __tracebackhide__ = True
    if hung_after is not None:
        raise RankFailure(_describe_hang(ranks, hung_after))
    if any(rank.failed_at is not None for rank in ranks):
        raise RankFailure(_describe_failures(ranks))
    reports = [rank.report for rank in ranks if rank.report is not None]
    assert len(reports) == len(ranks)
    for report in reports:
        if report.outcome == "skipped":
            _pytest_outcome("skip", report.text)
    for report in reports:
        if report.outcome == "xfailed":
            _pytest_outcome("xfail", report.text)
    return [pickle.loads(report.pickled) for report in reports]


def _pytest_outcome(name: str, reason: str) -> None:
    __tracebackhide__ = True
    if find_spec("pytest") is None:
        raise unittest.SkipTest(reason)
    getattr(import_module("pytest"), name)(reason)


def _describe_failures(ranks: Sequence[_Rank]) -> str:
    failed = sorted((rank.failed_at, rank.number) for rank in ranks if rank.failed_at is not None)
    # Thirty-two ranks that fail alike are read once, though their objects lie at different addresses.
    alike: dict[str, list[int]] = {}
    for _, number in failed:
        alike.setdefault(re.sub(r" at 0x[0-9a-f]+", "", ranks[number].trouble), []).append(number)
    parts = []
    for place, numbers in enumerate(alike.values()):
        trouble = ranks[numbers[0]].trouble.rstrip()
        first = "" if place > 0 or len(failed) == 1 else " first" if len(numbers) == 1 else f", rank {numbers[0]} first"
        parts.append(f"{_named(numbers)} of {len(ranks)} failed{first}:\n{trouble}")
    ended = [rank.number for rank in ranks if rank.was_ended and rank.failed_at is None]
    if ended:
        parts.append(f"{_named(ended)} still ran {GRACE:g} s later, and {'were' if len(ended) > 1 else 'was'} ended")
    return "\n\n".join(parts)


def _describe_hang(ranks: Sequence[_Rank], timeout: float) -> str:
    running = [rank for rank in ranks if rank.was_ended]
    # Who has returned is waiting for the others, who are the ones to look at.
    running.sort(key=lambda rank: rank.report is not None)
    parts = [f"{_named([rank.number for rank in running])} of {len(ranks)} still ran after {timeout:g} s"]
    for rank in running:
        done = f", which had {rank.report.outcome} and was waiting for the others" if rank.report else ""
        parts.append(f"the stack of rank {rank.number}{done}:\n{rank.stack.rstrip()}")
    return "\n\n".join(parts)


def _named(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


# From here on: what runs on a rank.


def _rank_main(launch: _Launch, rank: int) -> None:
    os.setpgid(0, 0)
    _redirect(launch, rank)
    try:
        store = _join(launch, rank)
        report = _Report("returned", time.monotonic(), pickle.dumps(_call(launch)))
    except BaseException as error:
        report = _report_of(error)
    _write(report, launch.folder / f"{rank}.report")
    if report.outcome == "raised":
        # At once, and without the clean-up that waits for ranks that wait for this one.
        sys.stdout.flush()
        os._exit(1)
    _leave(launch, store)


def _redirect(launch: _Launch, rank: int) -> None:
    """Output to a file, where a test's capture finds it whole; stacks to another, even out of a blocked C call."""
    output = open(launch.folder / f"{rank}.output", "a", buffering=1)  # noqa: SIM115
    sys.stdout = sys.stderr = output
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    stack = open(launch.folder / f"{rank}.stack", "w")  # noqa: SIM115
    faulthandler.enable(output)
    faulthandler.register(STACK_SIGNAL, stack)
    faulthandler.dump_traceback_later(launch.lifetime, exit=True, file=output)
    # Open as long as the process: the handler keeps the number of the file and not the file.
    _redirect.files = (output, stack)  # type: ignore[attr-defined]


def _join(launch: _Launch, rank: int) -> dist.Store:
    # The forkserver has the variables of the time it was started.
    os.environ.clear()
    os.environ.update(QUICK_LOOKUP | launch.environment | _torchrun_variables(launch, rank))
    torch.set_num_threads(1)
    # Longer than the launch may take, so that a hang is the launcher's to describe.
    patience = timedelta(seconds=launch.lifetime)
    store = dist.TCPStore(HOST, launch.port, is_master=False, timeout=patience)
    if launch.backend is not None:
        dist.init_process_group(launch.backend, store=store, rank=rank, world_size=launch.world_size, timeout=patience)
    return store


def _torchrun_variables(launch: _Launch, rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_WORLD_SIZE": str(launch.world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(launch.port),
        # The store is served already: rank 0 of an env:// group connects to it like the others.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
    }


def _call(launch: _Launch) -> Any:
    if launch.rewrite_asserts:
        _rewrite_asserts()
    for module in launch.preload:
        import_module(module)
    return pickle.loads(launch.call)()


def _rewrite_asserts() -> None:
    """The import hook that pytest gives its own process, so that a failed assert says its values on a rank too."""
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    install_importhook(get_config())


def _report_of(error: BaseException) -> _Report:
    at = time.monotonic()
    pytest = sys.modules.get("pytest")
    if isinstance(error, unittest.SkipTest) or (pytest and isinstance(error, pytest.skip.Exception)):
        return _Report("skipped", at, text=str(error))
    if pytest and isinstance(error, pytest.xfail.Exception):
        return _Report("xfailed", at, text=str(error))
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return _Report("raised", at, text="".join(traceback.format_exception(type(error), error, trace)))


def _write(report: _Report, path: Path) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(report))
    part.replace(path)


def _leave(launch: _Launch, store: dist.Store) -> None:
    """Together: a rank that goes while another still reads from it would be an error there."""
    if store.add("torchstone/done", 1) == launch.world_size:
        store.set("torchstone/leave", "")
    store.wait(["torchstone/leave"])
    if dist.is_initialized():
        dist.destroy_process_group()

"""Runs tests on several processes: `launch_procs` runs a function on every rank, `DistributedTest` a class's tests.

A launch always ends. A hang is a failure that shows the ranks' stacks, a failure of one rank beats a skip of another,
and no process is left running.

Ranks are forked from a forkserver that has already imported torch. On two cores a launch of 2 ranks takes 0.1 s, of 8
ranks 0.25 s and of 32 ranks 1.3 s; the first launch of a process waits four to eight seconds for the forkserver's
imports. The price: functions, arguments and results must be picklable.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist

from torchstone.errors import UsageError
from torchstone.launch.rendezvous import host_store, interface_variables
from torchstone.wording import list_ranks

# What tests of parallel training import. The forkserver ignores modules that are not installed.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch._dynamo",
    "torchstone.api",
    "torchstone.testing",
    # Opening a model's folder imports these, which takes a second and a half.
    "huggingface_hub.errors",
    "transformers.models.auto.configuration_auto",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.modeling_utils",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
    "pytest",
)
# After the first failure the other ranks have this long to fail by themselves.
GRACE_SECONDS = 3.0
# A death is noticed later than the errors it causes on other ranks, so it counts as this much earlier.
DEATH_HEAD_START = 1.0
# If the launching process is gone, a rank exits this long after its timeout.
ORPHAN_SECONDS = 60.0
# How long to wait for the ranks' stacks. A stopped process never writes one.
STACK_SECONDS = 3.0
STACK_SIGNAL = signal.SIGQUIT
HOST = "127.0.0.1"
# TCPStore resolves its own address for its log, which takes five seconds where a name server does not answer.
FAST_DNS = {"RES_OPTIONS": "timeout:1 attempts:1"}
MAX_OUTPUT_LINES = 30


class RankFailure(AssertionError):
    """What failed on which ranks, the first failure first."""


def launch_procs(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    backend: str | None = "gloo",
    preload: Sequence[str] = (),
    **kwargs: Any,
) -> list[Any]:
    """Runs `function(*args, **kwargs)` on `world_size` ranks and returns their results in rank order.

    The ranks have torchrun's variables and a process group; with `backend` None the function creates its own group.
    `preload` are modules to import first: by the forkserver if this is the first launch, otherwise by each rank.
    Use `functools.partial` for a function with keyword arguments of these names.
    """
    __tracebackhide__ = True
    return _launch(functools.partial(function, *args, **kwargs), world_size, timeout, backend, preload)


class DistributedTest:
    """Base class whose `test_*` methods run on all ranks. Fixtures and parameters are pickled to the ranks.

    The instance is pickled too, so attributes set by `setup_method` or an autouse fixture are available.
    """

    world_size: int | Sequence[int] | None = None
    """Number of ranks, or several numbers to run one after the other. None means dp x tp x pp."""
    dp: int = 1
    tp: int = 1
    pp: int = 1
    timeout: float = 120.0
    backend: str | None = "gloo"
    preload: Sequence[str] = ()

    # Set on the ranks only.
    rank: int
    size: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Not vars(cls): inherited tests of plain classes must run on the ranks as well.
        for name in dir(cls):
            member = inspect.getattr_static(cls, name)
            if not name.startswith("test_") or getattr(member, "runs_on_ranks", False):
                continue
            if inspect.isfunction(member) and not inspect.iscoroutinefunction(member):
                setattr(cls, name, _run_on_ranks(member))
            elif isinstance(member, (staticmethod, classmethod)) or callable(member):
                raise UsageError(f"{cls.__qualname__}.{name} cannot run on ranks", "make it a plain method")


def _run_on_ranks(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def test(self: DistributedTest, *args: Any, **fixtures: Any) -> None:
        # Already on a rank: called by the harness, or as super().test_...() by an overriding method.
        if hasattr(self, "rank"):
            return method(self, *args, **fixtures)
        call = functools.partial(_call_method, type(self), vars(self), method.__name__, *args, **fixtures)
        return _run_test(call, self)

    test.runs_on_ranks = True  # type: ignore[attr-defined]
    return test


def _run_test(call: functools.partial[None], test: DistributedTest) -> None:
    """Launches every world size. A failure at one of them fails the test; a skip at one skips it if the others pass."""
    import pytest

    failure = skip_reason = None
    for size in _world_sizes(test):
        try:
            _launch(call, size, test.timeout, test.backend, test.preload)
        except RankFailure as error:
            failure = str(error)
            break
        except pytest.skip.Exception as skip:
            skip_reason = skip_reason or str(skip)
    # Outside the handlers and without a traceback: only the ranks' own tracebacks matter.
    if failure is not None:
        pytest.fail(failure, pytrace=False)
    if skip_reason is not None:
        pytest.skip(skip_reason)


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
class _LaunchSpec:
    """What every rank gets. `call` is pickled; a rank exits by itself after `lifetime` seconds."""

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
    """How a rank's function ended. Written to a file: a pipe can fill up, and a dying rank would cut it short."""

    outcome: Literal["returned", "skipped", "xfailed", "raised"]
    time: float
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
    exit_time: float = 0.0
    was_killed: bool = False
    stack: str = ""

    def read(self, kind: str) -> str:
        path = self.folder / f"{self.number}.{kind}"
        return path.read_text(errors="replace") if path.exists() else ""

    def join(self) -> None:
        self.process.join()
        self.exit_code, self.exit_time = self.process.exitcode, time.monotonic()
        path = self.folder / f"{self.number}.report"
        self.report = pickle.loads(path.read_bytes()) if path.exists() else None

    def kill(self) -> None:
        """Kills the rank if it is running, and the processes it has started, which share its Unix process group."""
        if self.exit_code is None:
            self.was_killed = True
            self.process.kill()
            self.join()
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.close()

    @property
    def failure_time(self) -> float | None:
        if self.report is not None and self.report.outcome == "raised":
            return self.report.time
        # It exited without a report, or with an error after its report.
        has_died = not self.was_killed and (self.report is None or self.exit_code != 0)
        return self.exit_time - DEATH_HEAD_START if has_died else None

    @property
    def failure_text(self) -> str:
        if self.report is not None and self.report.outcome == "raised":
            return self.report.text.rstrip()
        assert self.exit_code is not None
        if self.exit_code < 0:
            description = f"was killed by {signal.Signals(-self.exit_code).name}"
        else:
            when = "before" if self.report is None else "after"
            description = f"ended with exit code {self.exit_code} {when} its function returned"
        lines = self.read("output").splitlines()
        # What faulthandler prints is long, and the reason stands before it.
        crash = next((n for n, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
        start = len(lines) - MAX_OUTPUT_LINES if crash is None else crash - MAX_OUTPUT_LINES // 2
        output = lines[max(0, start) :][:MAX_OUTPUT_LINES]
        return "\n".join([description, *(["its last output:"] if output else []), *output])


def _launch(
    call: functools.partial[Any], world_size: int, timeout: float, backend: str | None, preload: Sequence[str]
) -> list[Any]:
    __tracebackhide__ = True
    if world_size < 1:
        raise UsageError(f"world_size is {world_size}", "use 1 or more")
    context = forkserver_context([*PRELOAD, *preload])
    # Served by this process, so that it outlives every rank.
    store = host_store(HOST, 0)
    with tempfile.TemporaryDirectory(prefix="torchstone-ranks-") as folder:
        spec = _LaunchSpec(
            folder=Path(folder), call=_pickle_call(call), world_size=world_size, port=store.port,
            lifetime=timeout + ORPHAN_SECONDS, backend=backend, preload=tuple(preload), environment=dict(os.environ),
            rewrite_asserts=any(type(finder).__name__ == "AssertionRewritingHook" for finder in sys.meta_path),
        )  # fmt: skip
        ranks: list[_Rank] = []
        try:
            for number in range(world_size):
                process = context.Process(target=_rank_main, args=(spec, number), name=f"rank {number}")
                process.start()
                ranks.append(_Rank(number, spec.folder, process))
            has_hung = _wait_for_ranks(ranks, timeout)
        finally:
            for rank in ranks:
                rank.kill()
        for rank in ranks:
            if output := rank.read("output"):
                sys.stdout.write(f"output of rank {rank.number}:\n{output.rstrip()}\n")
        if has_hung:
            raise RankFailure(_describe_hang(ranks, timeout))
        return _results(ranks)


def forkserver_context(preload: Sequence[str]) -> ForkServerContext:
    """Starts the forkserver if there is none yet. It sees no GPU: a package that looks for one when it is imported, as
    bitsandbytes does, would break CUDA in every process that is forked later."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        forkserver.ensure_running()
    return context


def _pickle_call(call: functools.partial[Any]) -> bytes:
    try:
        return pickle.dumps(call)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        parts = {getattr(call.func, "__qualname__", repr(call.func)): call.func}
        parts |= {f"argument {number}": value for number, value in enumerate(call.args)} | call.keywords
        culprits = [f"{name} ({type(value).__name__})" for name, value in parts.items() if not _is_picklable(value)]
        raise UsageError(
            f"{', '.join(culprits)} cannot be sent to the ranks: {error}",
            "use functions of importable modules and picklable values",
        ) from error


def _is_picklable(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError):
        return False
    return True


def _wait_for_ranks(ranks: Sequence[_Rank], timeout: float) -> bool:
    """Waits until all ranks have exited, or the grace period after a failure is over. Returns whether it was a hang."""
    deadline, has_failed = time.monotonic() + timeout, False
    running = list(ranks)
    while running:
        wait([rank.process.sentinel for rank in running], max(0.0, deadline - time.monotonic()))
        for rank in [rank for rank in running if not rank.process.is_alive()]:
            running.remove(rank)
            rank.join()
            if rank.failure_time is not None and not has_failed:
                has_failed, deadline = True, min(deadline, time.monotonic() + GRACE_SECONDS)
        if running and time.monotonic() >= deadline:
            if not has_failed:
                _dump_stacks(running)
            return not has_failed
    return False


def _dump_stacks(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        # A rank may exit between the two lines.
        if rank.process.is_alive() and rank.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process.pid, STACK_SIGNAL)
    previous: list[str] = []
    deadline = time.monotonic() + STACK_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.2)
        stacks = [rank.read("stack") for rank in ranks]
        # The signal handler writes line by line: a stack is complete when it no longer grows.
        if all(stacks) and stacks == previous:
            break
        previous = stacks
    for rank in ranks:
        rank.stack = rank.read("stack") or "no stack: the process did not answer the signal\n"


def _results(ranks: Sequence[_Rank]) -> list[Any]:
    __tracebackhide__ = True
    if any(rank.failure_time is not None for rank in ranks):
        raise RankFailure(_describe_failures(ranks))
    reports = [rank.report for rank in ranks if rank.report is not None]
    assert len(reports) == len(ranks)
    for outcome, name in (("skipped", "skip"), ("xfailed", "xfail")):
        reason = next((report.text for report in reports if report.outcome == outcome), None)
        if reason is not None:
            if find_spec("pytest") is None:
                raise unittest.SkipTest(reason)
            getattr(import_module("pytest"), name)(reason)
    return [pickle.loads(report.pickled) for report in reports]


def _describe_failures(ranks: Sequence[_Rank]) -> str:
    failures = sorted((rank.failure_time, rank.number) for rank in ranks if rank.failure_time is not None)
    # Ranks that fail alike are shown once, although their objects have different addresses.
    groups: dict[str, list[int]] = {}
    for _, number in failures:
        groups.setdefault(re.sub(r" at 0x[0-9a-f]+", "", ranks[number].failure_text), []).append(number)
    parts = []
    for index, numbers in enumerate(groups.values()):
        first = ""
        if index == 0 and len(failures) > 1:
            first = " first" if len(numbers) == 1 else f", rank {numbers[0]} first"
        parts.append(f"{list_ranks(numbers)} of {len(ranks)} failed{first}:\n{ranks[numbers[0]].failure_text}")
    killed = [rank.number for rank in ranks if rank.was_killed and rank.failure_time is None]
    if killed:
        verb = "were" if len(killed) > 1 else "was"
        parts.append(f"{list_ranks(killed)} {verb} still running {GRACE_SECONDS:g} s later and {verb} killed")
    return "\n\n".join(parts)


def _describe_hang(ranks: Sequence[_Rank], timeout: float) -> str:
    running = [rank for rank in ranks if rank.was_killed]
    # Ranks that have returned wait for the others, so the others come first.
    running.sort(key=lambda rank: rank.report is not None)
    verb = "were" if len(running) > 1 else "was"
    numbers = [rank.number for rank in running]
    parts = [f"{list_ranks(numbers)} of {len(ranks)} {verb} still running after {timeout:g} s"]
    for rank in running:
        state = f", which has {rank.report.outcome} and waits for the others" if rank.report else ""
        parts.append(f"the stack of rank {rank.number}{state}:\n{rank.stack.rstrip()}")
    return "\n\n".join(parts)


# The rest runs on the ranks.


def _rank_main(spec: _LaunchSpec, rank: int) -> None:
    # What the forkserver has imported is no garbage: collecting it takes a tenth of a second.
    gc.freeze()
    os.setpgid(0, 0)
    _redirect_output(spec, rank)
    try:
        store = _join_group(spec, rank)
        report = _Report("returned", time.monotonic(), pickle.dumps(_call(spec)))
    except BaseException as error:
        report = _report_error(error)
    _write_report(report, spec.folder / f"{rank}.report")
    if report.outcome == "raised":
        # Exit at once: the usual clean-up would wait for ranks that wait for this one.
        sys.stdout.flush()
        os._exit(1)
    _exit_together(spec, store)


def _redirect_output(spec: _LaunchSpec, rank: int) -> None:
    """Output goes to one file, stacks to another. faulthandler writes stacks even during a blocked C call."""
    output = open(spec.folder / f"{rank}.output", "a", buffering=1)  # noqa: SIM115
    sys.stdout = sys.stderr = output
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    # Separate descriptors: the function under test may redirect or close the others.
    crash_fd = os.dup(output.fileno())
    stack_fd = os.open(spec.folder / f"{rank}.stack", os.O_WRONLY | os.O_CREAT, 0o600)
    faulthandler.enable(crash_fd)
    faulthandler.register(STACK_SIGNAL, stack_fd)
    faulthandler.dump_traceback_later(spec.lifetime, exit=True, file=crash_fd)


def _join_group(spec: _LaunchSpec, rank: int) -> dist.Store:
    # The forkserver has the environment of the time it was started.
    os.environ.clear()
    os.environ.update(FAST_DNS | spec.environment | _torchrun_variables(spec, rank))
    os.environ |= interface_variables(HOST, "GLOO_SOCKET_IFNAME")
    torch.set_num_threads(1)
    # Longer than the launch may take, so that the launching process reports a hang first.
    timeout = timedelta(seconds=spec.lifetime)
    store = dist.TCPStore(HOST, spec.port, is_master=False, timeout=timeout)
    if spec.backend is not None:
        dist.init_process_group(spec.backend, store=store, rank=rank, world_size=spec.world_size, timeout=timeout)
    return store


def _torchrun_variables(spec: _LaunchSpec, rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(spec.world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(spec.port),
        # The store is already served: rank 0 of an env:// group connects to it like the others.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
    }


def _call(spec: _LaunchSpec) -> Any:
    if spec.rewrite_asserts:
        _rewrite_asserts()
    for module in spec.preload:
        import_module(module)
    return pickle.loads(spec.call)()


def _rewrite_asserts() -> None:
    """Installs pytest's import hook, so that a failed assert shows its values on a rank too."""
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    install_importhook(get_config())


def _report_error(error: BaseException) -> _Report:
    now = time.monotonic()
    pytest = sys.modules.get("pytest")
    if isinstance(error, unittest.SkipTest) or (pytest and isinstance(error, pytest.skip.Exception)):
        return _Report("skipped", now, text=str(error))
    if pytest and isinstance(error, pytest.xfail.Exception):
        return _Report("xfailed", now, text=str(error))
    # Without the frames of this module.
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return _Report("raised", now, text="".join(traceback.format_exception(type(error), error, trace)))


def _write_report(report: _Report, path: Path) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(report))
    part.replace(path)


def _exit_together(spec: _LaunchSpec, store: dist.Store) -> None:
    """Waits for all ranks: one that exits while another still reads from it would cause an error there."""
    if store.add("torchstone/done", 1) == spec.world_size:
        store.set("torchstone/exit", "")
    store.wait(["torchstone/exit"])
    if dist.is_initialized():
        dist.destroy_process_group()

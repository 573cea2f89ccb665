"""One process here, a rank of somebody's, or workers: what a command line, an environment and a machine make of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchstone.config.schema import SystemConfig
from torchstone.errors import UsageError
from torchstone.launch import gpus
from torchstone.launch.gpus import Gpu
from torchstone.launch.starting import Plan, Wishes, plan

CPU, AUTO = SystemConfig(device="cpu"), SystemConfig()
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Gpu]:
    """Four GPUs, of which 1 and 2 are the idlest."""
    loads = [90, 0, 5, 40]
    found = [Gpu(number, load, 0, 80, "H200", f"GPU-{number}") for number, load in enumerate(loads)]
    monkeypatch.setattr(gpus, "found", lambda: list(found))
    return found


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "found", list)


def numbers(found: Plan | None) -> list[int]:
    assert found is not None
    return [gpu.number for gpu in found.devices]


@pytest.mark.usefixtures("bare")
class TestWithoutGpus:
    def test_one_process_trains_here(self) -> None:
        assert plan(Wishes(), AUTO, {}) is None

    @pytest.mark.parametrize("wishes", [Wishes(nproc=1), Wishes(max_restarts=2)])
    def test_what_is_asked_for_is_supervised(self, wishes: Wishes) -> None:
        found = plan(wishes, AUTO, {})
        assert found is not None
        assert (found.nproc, found.world_size, found.max_restarts) == (1, 1, wishes.max_restarts or 0)

    def test_several_processes(self) -> None:
        found = plan(Wishes(nproc=3), AUTO, {})
        assert found is not None
        assert (found.nproc, found.devices) == (3, ())
        assert found.launch(["x"], AUTO, None).environments == []

    def test_gpus_that_are_not_there_are_refused(self) -> None:
        with pytest.raises(UsageError, match="there are no GPUs to use"):
            plan(Wishes(gpus="all"), AUTO, {})


class TestWithGpus:
    def test_all_of_them_by_default_a_process_each(self, machine: list[Gpu]) -> None:
        found = plan(Wishes(), AUTO, {})
        assert numbers(found) == [0, 1, 2, 3]
        assert found is not None
        each = found.launch(["x"], AUTO, None).environments
        assert (
            [env["CUDA_VISIBLE_DEVICES"] for env in each] == [env["GPU_RANK"] for env in each] == ["0", "1", "2", "3"]
        )

    @pytest.mark.parametrize(
        ("wishes", "expected"),
        [
            (Wishes(gpus="0,3"), [0, 3]),
            (Wishes(gpus="auto:2"), [1, 2]),
            (Wishes(gpus="auto"), [1]),
            (Wishes(nproc=2), [0, 1]),
            (Wishes(gpus="2,1", nproc=2), [2, 1]),
        ],
    )
    def test_those_that_are_asked_for(self, machine: list[Gpu], wishes: Wishes, expected: list[int]) -> None:
        assert numbers(plan(wishes, AUTO, {})) == expected

    def test_one_that_is_the_only_one_is_trained_on_here(
        self, machine: list[Gpu], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gpus, "found", lambda: machine[:1])
        assert plan(Wishes(), AUTO, {}) is None

    def test_the_cpu_where_it_is_asked_for(self, machine: list[Gpu]) -> None:
        assert plan(Wishes(), CPU, {}) is None
        assert numbers(plan(Wishes(nproc=8), CPU, {})) == []

    def test_a_device_id_is_one_process(self, machine: list[Gpu]) -> None:
        assert plan(Wishes(), SystemConfig(device_id=2), {}) is None

    @pytest.mark.parametrize(
        ("wishes", "system", "words"),
        [
            (Wishes(nproc=5), AUTO, "5 processes need a GPU each, and there are 4"),
            (Wishes(gpus="0,3", nproc=1), AUTO, "--gpus 0,3 are 2, a process each, but --nproc is 1"),
            (Wishes(gpus="all"), CPU, "contradict each other"),
            (Wishes(gpus="all"), SystemConfig(device_id=1), "system.device_id means one process"),
            (Wishes(nproc=2), SystemConfig(device_id=1), "system.device_id means one process"),
        ],
    )
    def test_what_contradicts_itself_is_refused(
        self, machine: list[Gpu], wishes: Wishes, system: SystemConfig, words: str
    ) -> None:
        with pytest.raises(UsageError, match=words):
            plan(wishes, system, {})

    def test_on_several_nodes_lines_are_named_by_rank(self, machine: list[Gpu]) -> None:
        found = plan(Wishes(nnodes="2", node_rank=1, rdzv_endpoint="first:29400"), AUTO, {})
        assert found is not None
        assert (found.nproc, found.world_size, found.nodes.high, found.nodes.rank) == (4, None, 2, 1)
        assert all("GPU_RANK" not in env for env in found.launch(["x"], AUTO, None).environments)


@pytest.mark.usefixtures("bare")
class TestEnvironment:
    def test_a_worker_of_torchrun_joins(self) -> None:
        environment = dict(TORCHRUN)
        assert plan(Wishes(), AUTO, environment) is None
        assert environment == TORCHRUN

    def test_an_srun_task_joins_under_torchruns_variables(self) -> None:
        environment = {
            "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
            "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            "SLURM_STEP_NODELIST": "gpu[07-08]",
        }  # fmt: skip
        assert plan(Wishes(), AUTO, environment) is None
        found = {name: environment[name] for name in TORCHRUN}
        assert found["MASTER_ADDR"] == "gpu07"
        assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("3", "4", "1")

    def test_a_worker_starts_no_others(self) -> None:
        with pytest.raises(UsageError, match="--nproc, --max-restarts would start processes, but this is one of 4"):
            plan(Wishes(nproc=2, max_restarts=1), AUTO, dict(TORCHRUN))

    def test_a_pod_of_kubeflow_starts_as_many_as_it_is_told(self) -> None:
        told = {
            "PET_NNODES": "2",
            "PET_NODE_RANK": "1",
            "PET_NPROC_PER_NODE": "3",
            "PET_MASTER_ADDR": "pod-0",
            "PET_MASTER_PORT": "29400",
        }
        found = plan(Wishes(), AUTO, told)
        assert found is not None
        assert (found.nproc, found.nodes.rank, found.nodes.endpoint) == (3, 1, "pod-0:29400")

    def test_the_times_of_a_launch_are_the_configs(self) -> None:
        system = SystemConfig(hang_timeout=7, join_timeout=8, save_grace=9, threads=2)
        found = plan(Wishes(nproc=2, max_restarts=4), system, {})
        assert found is not None
        launch = found.launch(["x"], system, Path("logs"))
        assert (launch.hang_timeout, launch.join_timeout, launch.save_grace, launch.threads) == (7, 8, 9, 2)
        assert (launch.max_restarts, launch.logs) == (4, Path("logs"))

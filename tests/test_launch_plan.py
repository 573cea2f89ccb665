"""What a command line, an environment and a machine make of a process: alone, a worker, or a launcher of workers."""

from __future__ import annotations

import pytest

from torchstone.config.schema import SystemConfig
from torchstone.errors import UsageError
from torchstone.launch import gpus
from torchstone.launch.gpus import Gpu
from torchstone.launch.plan import LaunchOptions, LaunchPlan, plan_launch

CPU, AUTO = SystemConfig(device="cpu"), SystemConfig()
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Gpu]:
    """Four GPUs; 1 and 2 are the least loaded."""
    loads = [90, 0, 5, 40]
    devices = [Gpu(number, load, 0, 80, "H200", f"GPU-{number}") for number, load in enumerate(loads)]
    monkeypatch.setattr(gpus, "visible_gpus", lambda: list(devices))
    return devices


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", list)


def gpu_numbers(plan: LaunchPlan | None) -> list[int]:
    assert plan is not None
    return [gpu.index for gpu in plan.devices]


@pytest.mark.usefixtures("no_gpus")
class TestWithoutGpus:
    def test_by_default_this_process_trains(self) -> None:
        assert plan_launch(LaunchOptions(), AUTO, {}) is None

    @pytest.mark.parametrize(("nproc", "max_restarts"), [(1, None), (None, 2)])
    def test_any_flag_starts_a_worker_under_a_launcher(self, nproc: int | None, max_restarts: int | None) -> None:
        plan = plan_launch(LaunchOptions(nproc=nproc), AUTO, {}, max_restarts)
        assert plan is not None
        assert (plan.nproc, plan.world_size, plan.max_restarts) == (1, 1, max_restarts or 0)

    def test_several_processes(self) -> None:
        plan = plan_launch(LaunchOptions(nproc=3), AUTO, {})
        assert plan is not None
        assert (plan.nproc, plan.devices) == (3, ())

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"gpus": "all"}, "there are no GPUs to use"), ({"nproc": 0}, "must be from 1 to 1024")],
    )
    def test_impossible_flags_are_refused(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            plan_launch(LaunchOptions(**options), AUTO, {})  # type: ignore[arg-type]


class TestWithGpus:
    def test_by_default_every_gpu_gets_a_process(self, machine: list[Gpu]) -> None:
        assert gpu_numbers(plan_launch(LaunchOptions(), AUTO, {})) == [0, 1, 2, 3]

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            (LaunchOptions(gpus="0,3"), [0, 3]),
            (LaunchOptions(gpus="auto:2"), [1, 2]),
            (LaunchOptions(gpus="auto"), [1]),
            (LaunchOptions(nproc=2), [0, 1]),
            (LaunchOptions(gpus="2,1", nproc=2), [2, 1]),
        ],
    )
    def test_flags_choose_gpus(self, machine: list[Gpu], options: LaunchOptions, expected: list[int]) -> None:
        assert gpu_numbers(plan_launch(options, AUTO, {})) == expected

    def test_on_a_machine_with_one_gpu_this_process_trains(
        self, machine: list[Gpu], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gpus, "visible_gpus", lambda: machine[:1])
        assert plan_launch(LaunchOptions(), AUTO, {}) is None

    def test_system_device_cpu_uses_no_gpu(self, machine: list[Gpu]) -> None:
        assert plan_launch(LaunchOptions(), CPU, {}) is None
        assert gpu_numbers(plan_launch(LaunchOptions(nproc=8), CPU, {})) == []

    def test_system_device_id_means_one_process(self, machine: list[Gpu]) -> None:
        assert plan_launch(LaunchOptions(), SystemConfig(device_id=2), {}) is None

    @pytest.mark.parametrize(
        ("options", "system", "message"),
        [
            (LaunchOptions(nproc=5), AUTO, "5 processes need a GPU each, but there are 4"),
            (LaunchOptions(gpus="0,3", nproc=1), AUTO, "--gpus 0,3 selects 2 GPUs.*but --nproc is 1"),
            (LaunchOptions(gpus="all"), CPU, "contradict each other"),
            (LaunchOptions(gpus="all"), SystemConfig(device_id=1), "system.device_id means one process"),
            (LaunchOptions(nproc=2), SystemConfig(device_id=1), "system.device_id means one process"),
        ],
    )
    def test_contradictions_are_refused(
        self, machine: list[Gpu], options: LaunchOptions, system: SystemConfig, message: str
    ) -> None:
        with pytest.raises(UsageError, match=message):
            plan_launch(options, system, {})

    def test_on_several_nodes_the_world_size_is_not_known_yet(self, machine: list[Gpu]) -> None:
        plan = plan_launch(LaunchOptions(nnodes="2", node_rank=1, rdzv_endpoint="first:29400"), AUTO, {})
        assert plan is not None
        assert (plan.nproc, plan.world_size, plan.nodes.max_nodes, plan.nodes.node_rank) == (4, None, 2, 1)


@pytest.mark.usefixtures("no_gpus")
class TestEnvironment:
    def test_a_worker_of_torchrun_joins(self) -> None:
        environment = dict(TORCHRUN)
        assert plan_launch(LaunchOptions(), AUTO, environment) is None
        assert environment == TORCHRUN

    def test_a_task_of_srun_joins_and_gets_torchruns_variables(self) -> None:
        environment = {
            "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
            "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            "SLURM_STEP_NODELIST": "gpu[07-08]",
        }  # fmt: skip
        assert plan_launch(LaunchOptions(), AUTO, environment) is None
        assert environment["MASTER_ADDR"] == "gpu07"
        assert [environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["3", "4", "1"]

    def test_a_worker_starts_no_workers(self) -> None:
        message = "--nproc, --max-restarts would start processes, but this process is already one of 4 workers"
        with pytest.raises(UsageError, match=message):
            plan_launch(LaunchOptions(nproc=2), AUTO, dict(TORCHRUN), max_restarts=1)

    def test_a_pod_of_kubeflow_starts_as_many_workers_as_kubeflow_says(self) -> None:
        environment = {
            "PET_NNODES": "2",
            "PET_NODE_RANK": "1",
            "PET_NPROC_PER_NODE": "3",
            "PET_MASTER_ADDR": "pod-0",
            "PET_MASTER_PORT": "29400",
        }
        plan = plan_launch(LaunchOptions(), AUTO, environment)
        assert plan is not None
        assert (plan.nproc, plan.nodes.node_rank, plan.nodes.rdzv_endpoint) == (3, 1, "pod-0:29400")

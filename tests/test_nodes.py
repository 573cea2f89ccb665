"""Whether a process is a worker, a node or neither, from the complete variables that schedulers set."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from torchstone.errors import UsageError
from torchstone.launch.nodes import Nodes, first_host, idle_nodes_warning, read_nodes, worker_variables

TORCHRUN = {
    "GROUP_RANK": "1",
    "LOCAL_RANK": "2",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "43211",
    "OMP_NUM_THREADS": "1",
    "RANK": "6",
    "ROLE_NAME": "default",
    "ROLE_RANK": "6",
    "ROLE_WORLD_SIZE": "8",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "WORLD_SIZE": "8",
}
# sbatch --nodes=4 --ntasks-per-node=1 --gpus-per-node=8: the batch script.
BATCH = {
    "ENVIRONMENT": "BATCH",
    "HOSTNAME": "gpu07",
    "SLURMD_NODENAME": "gpu07",
    "SLURM_CLUSTER_NAME": "cluster",
    "SLURM_CPUS_ON_NODE": "64",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_GPUS_PER_NODE": "8",
    "SLURM_GTIDS": "0",
    "SLURM_JOBID": "81234",
    "SLURM_JOB_CPUS_PER_NODE": "64(x4)",
    "SLURM_JOB_GPUS": "0,1,2,3,4,5,6,7",
    "SLURM_JOB_ID": "81234",
    "SLURM_JOB_NAME": "torchstone",
    "SLURM_JOB_NODELIST": "gpu[07-09,12]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "4",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "gpu[07-09,12]",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_SUBMIT_DIR": "/home/user",
    "SLURM_TASKS_PER_NODE": "1(x4)",
    "SLURM_TASK_PID": "4242",
}
# srun in that script, on the third node.
NODE_TASK = BATCH | {
    "SLURM_CPU_BIND": "quiet,mask_cpu:0xFF",
    "SLURM_GTIDS": "2",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "2",
    "SLURM_SRUN_COMM_HOST": "10.0.0.7",
    "SLURM_SRUN_COMM_PORT": "39155",
    "SLURM_STEPID": "0",
    "SLURM_STEP_GPUS": "0,1,2,3,4,5,6,7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_LAUNCHER_PORT": "39155",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}
# srun --nodes=2 --ntasks=5 in the same job: the last task, one of two on the second node.
RANK_TASK = NODE_TASK | {
    "SLURM_GTIDS": "3,4",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NPROCS": "5",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "4",
    "SLURM_STEPID": "1",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_TASKS_PER_NODE": "3,2",
}
SINGLE_TASK = NODE_TASK | {
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NODELIST": "gpu07",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
# salloc --nodes=4 --ntasks-per-node=1, on the login node.
SALLOC = {
    name: value
    for name, value in BATCH.items()
    if name in ("SLURM_CLUSTER_NAME", "SLURM_JOBID", "SLURM_JOB_CPUS_PER_NODE", "SLURM_JOB_ID", "SLURM_JOB_NODELIST",
                "SLURM_JOB_NUM_NODES", "SLURM_JOB_PARTITION", "SLURM_NNODES", "SLURM_NODELIST", "SLURM_NPROCS",
                "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_SUBMIT_DIR", "SLURM_TASKS_PER_NODE")
} | {"SLURM_JOB_NAME": "interactive"}  # fmt: skip
# The same where LaunchParameters has use_interactive_step: the shell is on the first node of four.
INTERACTIVE = SALLOC | {
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_PTY_PORT": "41007",
    "SLURM_PTY_WIN_COL": "120",
    "SLURM_STEPID": "4294967290",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "gpu07",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
# srun --nodes=2 --pty bash.
SHELL = RANK_TASK | {
    "SLURM_JOB_NAME": "bash",
    "SLURM_PTY_PORT": "41007",
    "SLURM_PTY_WIN_COL": "120",
    "SLURM_PTY_WIN_ROW": "40",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
}
# Kubeflow Trainer 2, a TrainJob named llama with two nodes of eight GPUs, on the runtime torch-distributed.
TRAIN_JOB = {
    "HOSTNAME": "llama-node-0-1",
    "JOB_COMPLETION_INDEX": "1",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "PET_MASTER_ADDR": "llama-node-0-0.llama",
    "PET_MASTER_PORT": "29500",
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "8",
}
# Training Operator 1.9, a PyTorchJob with one master and three workers; WORLD_SIZE counts processes, RANK nodes.
PYTORCH_JOB = {
    "HOSTNAME": "llama-worker-1",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "MASTER_ADDR": "llama-master-0",
    "MASTER_PORT": "23456",
    "PET_MASTER_ADDR": "llama-master-0",
    "PET_MASTER_PORT": "23456",
    "PET_NNODES": "4",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PYTHONUNBUFFERED": "1",
    "RANK": "2",
    "WORLD_SIZE": "4",
}
# The same with an elasticPolicy and no master.
ELASTIC_JOB = {
    "HOSTNAME": "llama-worker-0",
    "PET_MAX_RESTARTS": "3",
    "PET_NNODES": "1:4",
    "PET_NPROC_PER_NODE": "2",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "llama-worker-0:23456",
    "PET_RDZV_ID": "llama",
    "PYTHONUNBUFFERED": "1",
}
SKYPILOT = {
    "SKYPILOT_CLUSTER_INFO": '{"cluster_name": "mine", "cloud": "GCP", "region": "us-central1", "zone": null}',
    "SKYPILOT_NODE_IPS": "10.128.0.5\n10.128.0.6",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_TASK_ID": "sky-2026-07-06-21-18-31-563597_mine_1",
}


def test_the_variables_of_torchrun_stay_as_they_are() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    # Also inside an srun step: torchrun has started this process.
    for environment in (TORCHRUN, NODE_TASK | TORCHRUN, RANK_TASK | TORCHRUN):
        assert worker_variables(environment) == {name: TORCHRUN[name] for name in names}


def test_an_incomplete_set_of_torchruns_variables_is_an_error() -> None:
    with pytest.raises(UsageError, match="has RANK, WORLD_SIZE, MASTER_PORT but not LOCAL_RANK, MASTER_ADDR"):
        worker_variables({"RANK": "1", "WORLD_SIZE": "1", "MASTER_PORT": "1"})
    with pytest.raises(UsageError, match="has MASTER_ADDR but not(.|\n)*type: unset MASTER_ADDR"):
        worker_variables(BATCH | {"MASTER_ADDR": "gpu07"})
    with pytest.raises(UsageError, match="has RANK, MASTER_ADDR but not"):
        worker_variables(RANK_TASK | {"MASTER_ADDR": "gpu07", "RANK": "0"})


def test_one_of_several_srun_tasks_on_a_node_is_a_worker() -> None:
    variables = worker_variables(RANK_TASK)
    assert variables == {
        "RANK": "4",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu08",
        "MASTER_PORT": "22231",
    }
    first = RANK_TASK | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert worker_variables(first) == variables | {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
    address = {"MASTER_ADDR": "gpu08-ib", "MASTER_PORT": "29500"}
    assert worker_variables(RANK_TASK | address) == variables | address


def test_neighboring_steps_and_jobs_use_different_ports() -> None:
    ports = set()
    for job in range(81234, 81244):
        for step in range(10):
            task = RANK_TASK | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
            ports.add(int((worker_variables(task) or {})["MASTER_PORT"]))
    assert len(ports) == 100
    assert min(ports) >= 20000
    assert max(ports) < 30000


def test_the_only_srun_task_on_its_node_is_a_node() -> None:
    assert worker_variables(NODE_TASK) is None
    assert read_nodes(NODE_TASK) == Nodes(4, 4, 2, "gpu07:21234", 8, "slurm-81234-0")
    address = NODE_TASK | {"MASTER_ADDR": "gpu07-ib", "MASTER_PORT": "29500"}
    assert worker_variables(address) is None
    assert read_nodes(address).rdzv_endpoint == "gpu07-ib:29500"
    without_gpus = {name: value for name, value in NODE_TASK.items() if "GPU" not in name}
    assert read_nodes(without_gpus).nproc is None


@pytest.mark.parametrize(
    "environment",
    [{}, BATCH, SALLOC, INTERACTIVE, INTERACTIVE | {"SLURM_STEP_ID": "-6"}, SHELL, SINGLE_TASK],
    ids=["none", "batch", "salloc", "interactive", "interactive-signed", "shell", "single"],
)
def test_any_other_process_of_a_slurm_job_is_a_single_machine(environment: Mapping[str, str]) -> None:
    assert worker_variables(environment) is None
    assert read_nodes(environment) == Nodes()


def test_srun_from_an_interactive_shell_is_an_ordinary_step() -> None:
    inner = NODE_TASK | {"SLURM_JOB_NAME": "interactive", "SLURM_PTY_PORT": "41007"}
    assert read_nodes(inner).node_rank == 2
    from_bash = RANK_TASK | {"SLURM_JOB_NAME": "bash", "SLURM_PTY_PORT": "41007"}
    assert (worker_variables(from_bash) or {})["RANK"] == "4"


def test_a_warning_reports_nodes_that_stay_idle() -> None:
    for environment in (BATCH, SALLOC, SHELL):
        assert "nodes, but only this one is used" in (idle_nodes_warning(environment) or "")
    assert [idle_nodes_warning(environment) for environment in ({}, NODE_TASK, RANK_TASK, SINGLE_TASK)] == [None] * 4
    assert idle_nodes_warning(BATCH | {"SLURM_JOB_NUM_NODES": "1"}) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("login", "login"),
        ("gpu07,gpu9.cluster", "gpu07"),
        ("gpu[01-03,7],login", "gpu01"),
        ("r[1-2]n[09-10]", "r1n09"),
        ("a[098-101]-ib,b[1,3]", "a098-ib"),
    ],
)
def test_the_first_host_of_a_hostlist(text: str, expected: str) -> None:
    assert first_host(text) == expected


@pytest.mark.parametrize("text", ["", "gpu[01-", "gpu[]", "gpu[a-b]", "gpu01,,gpu02", "gpu 1", "gpu]1["])
def test_other_text_is_not_a_hostlist(text: str) -> None:
    with pytest.raises(UsageError, match="is not a SLURM hostlist"):
        first_host(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID=x"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3"}, "does not include node 1"),
        ({"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": "", "SLURM_NODELIST": ""}, "no SLURM_STEP_NODELIST or"),
    ],
)
def test_srun_variables_without_meaning_are_an_error(changes: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        worker_variables(RANK_TASK | changes)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TRAIN_JOB, Nodes(2, 2, 1, "llama-node-0-0.llama:29500", 8, "torchstone")),
        (PYTORCH_JOB, Nodes(4, 4, 2, "llama-master-0:23456", None, "torchstone")),
        (ELASTIC_JOB, Nodes(1, 4, None, "llama-worker-0:23456", 2, "llama")),
        (SKYPILOT, Nodes(2, 2, 1, "10.128.0.5:29400", 8, "sky-2026-07-06-21-18-31-563597_mine_1")),
    ],
    ids=["TrainJob", "PyTorchJob", "elastic", "SkyPilot"],
)
def test_a_pod_and_a_machine_of_skypilot_are_nodes(environment: dict[str, str], expected: Nodes) -> None:
    assert worker_variables(environment) is None
    assert read_nodes(environment) == expected
    # The processes that the launcher starts there are workers.
    assert worker_variables(environment | TORCHRUN) == worker_variables(TORCHRUN)


def test_a_single_node_has_no_endpoint() -> None:
    assert read_nodes(TRAIN_JOB | {"PET_NNODES": "1", "PET_NODE_RANK": "0"}) == Nodes(node_rank=0, nproc=8)
    sky = SKYPILOT | {"SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1"}
    sky |= {"SKYPILOT_NUM_GPUS_PER_NODE": "0"}
    assert read_nodes(sky) == Nodes(node_rank=0, rdzv_id=SKYPILOT["SKYPILOT_TASK_ID"])


@pytest.mark.parametrize("kind", ["auto", "gpu", "cpu"])
def test_a_kind_of_device_does_not_set_the_number_of_processes(kind: str) -> None:
    assert read_nodes(TRAIN_JOB | {"PET_NPROC_PER_NODE": kind}).nproc is None


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert read_nodes(SKYPILOT | {"SKYPILOT_NODE_IPS": "fd00::5\nfd00::6"}).rdzv_endpoint == "[fd00::5]:29400"
    assert read_nodes(TRAIN_JOB | {"PET_MASTER_ADDR": "fd00::5"}).rdzv_endpoint == "[fd00::5]:29500"
    assert read_nodes({}, "2", 0, "[fd00::5]:1234").rdzv_endpoint == "[fd00::5]:1234"
    assert read_nodes({}, "2", 0, "[fd00::5]").rdzv_endpoint == "[fd00::5]:29400"


def test_flags_are_enough_without_an_environment() -> None:
    assert read_nodes({}, "2", 1, "node0:1234") == Nodes(2, 2, 1, "node0:1234")
    assert read_nodes({}, "1:4", None, "node0") == Nodes(1, 4, None, "node0:29400")
    assert read_nodes({}, "1") == Nodes()


def test_a_flag_wins_over_the_environment_and_the_rest_stays() -> None:
    nodes = read_nodes(NODE_TASK)
    assert read_nodes(NODE_TASK, "4") == nodes
    assert read_nodes(NODE_TASK, None, 0, "other:1") == Nodes(4, 4, 0, "other:1", 8, nodes.rdzv_id)
    assert read_nodes(NODE_TASK, "3:8") == Nodes(3, 8, 2, nodes.rdzv_endpoint, 8, nodes.rdzv_id)
    # Node 2 is not one of two nodes.
    assert read_nodes(NODE_TASK, "2").node_rank is None
    assert read_nodes(NODE_TASK, "1") == Nodes(1, 1, None, None, 8, nodes.rdzv_id)


@pytest.mark.parametrize(
    ("environment", "flags", "message"),
    [
        ({}, ("two", 0, "a:1"), "--nnodes two is not a number of nodes"),
        ({}, ("0", 0, "a:1"), "--nnodes 0: at least 1 node is needed"),
        ({}, ("4:2", 0, "a:1"), "--nnodes 4:2: min nodes (4) is larger than max nodes (2)"),
        ({}, ("2", 2, "a:1"), "--node-rank 2 is not one of 2 nodes"),
        ({}, ("2", -1, "a:1"), "use a number from 0 to 1"),
        ({}, ("2", 0, None), "2 nodes need a rendezvous endpoint"),
        ({}, (None, 1, None), "--node-rank needs more than one node"),
        ({}, (None, None, "a:1"), "--rdzv-endpoint needs more than one node"),
        ({}, ("2", 0, "a:70000"), "a:70000 is not HOST:PORT"),
        ({}, ("2", 0, "tcp://a:1"), "is not HOST:PORT"),
        ({}, ("2", 0, "fd00::5"), "is not HOST:PORT"),
        ({}, ("2", 0, ":1"), "is not HOST:PORT"),
        (TRAIN_JOB | {"PET_NNODES": "1:"}, (None, None, None), "PET_NNODES 1: is not"),
        (TRAIN_JOB | {"PET_NODE_RANK": "2"}, (None, None, None), "PET_NODE_RANK is 2, but PET_NNODES is 2"),
        (TRAIN_JOB | {"PET_MASTER_ADDR": ""}, (None, None, None), "PET_NNODES is 2, but PET_RDZV_ENDPOINT and"),
        (TRAIN_JOB | {"PET_NPROC_PER_NODE": "many"}, (None, None, None), "PET_NPROC_PER_NODE=many"),
    ],
)
def test_impossible_values_are_errors_that_name_them(
    environment: dict[str, str], flags: tuple[str | None, int | None, str | None], message: str
) -> None:
    with pytest.raises(UsageError) as error:
        read_nodes(environment, *flags)
    assert message in str(error.value)

"""The files for clusters: compared with golden/, run by bash with stubs for SLURM's commands, and parsed.

`python tests/test_clusters.py` rewrites the golden files; check the difference.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchstone.errors import UsageError
from torchstone.launch import kubernetes, slurm
from torchstone.launch.kubernetes import KubernetesJob
from torchstone.launch.slurm import SlurmJob

GOLDEN = Path(__file__).parent / "golden"
RUN = GOLDEN / "kubernetes-run.yaml"
SMALL = SlurmJob(Path("run.yaml"))
LARGE = SlurmJob(
    Path("my runs/it's.yaml"),
    nodes=4,
    gpus_per_node=8,
    cpus_per_node=96,
    memory="0",
    time="1-12:00:00",
    partition="gpu,long",
    account="nlp",
    qos="high",
    constraint="h100&nvlink",
    name="a name",
    log="logs/%x-%j.out",
    save_seconds=300,
    max_requeues=7,
    max_restarts=3,
    setup=("module load cuda", 'source "$HOME/venv/bin/activate"'),
    program="python -m torchstone",
    sbatch=("reservation=mine", "comment=two words"),
)
CPU_ONLY = SlurmJob(Path("run.yaml"), nodes=2, gpus_per_node=0, time="30", requeue=False)
POD = KubernetesJob(RUN, image="registry.example/torchstone:0.1")
PODS = KubernetesJob(
    RUN,
    image="registry.example/torchstone:0.1",
    name="llama-1b",
    namespace="research",
    nodes=4,
    gpus_per_node=8,
    gpu_resource="amd.com/gpu",
    cpus_per_node=96,
    memory="1500Gi",
    volume=("corpus:/data", "runs:/runs/"),
    secret=("HF_TOKEN=hugging-face/token",),
    runtime="torch-distributed-with-cache",
    save_seconds=600,
    max_restarts=3,
    program="python -m torchstone",
)
ARGS = ("--training.max_steps", "100", "--output-dir", "$(HOME) $$; rm -rf *")
TEXTS = {
    "slurm-small.sh": SMALL.render(),
    "slurm-large.sh": LARGE.render(ARGS),
    "slurm-processor.sh": CPU_ONLY.render(["--nproc", "4"]),
    "kubernetes-small.yaml": POD.render(),
    "kubernetes-large.yaml": PODS.render(ARGS),
}
SCRIPTS = [name for name in TEXTS if name.startswith("slurm")]
STUBS = {
    "torchstone": """
        printf '%s\\n' "$@" > args
        if [ "$CODE" != wait ]; then exit "$CODE"; fi
        trap 'exit 75' TERM
        echo $$ > waiting.new && mv waiting.new waiting
        for _ in {1..1000}; do sleep 0.02; done
    """,
    "srun": """
        printf '%s\\n' "$@" > srun-args
        while [[ $1 == --* ]]; do shift; done
        exec "$@"
    """,
    "scontrol": """
        echo "$*" >> requeued
        exit "${SCONTROL:-0}"
    """,
}


def write_stubs(folder: Path, programs: dict[str, str]) -> None:
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}")
        (folder / name).chmod(0o755)


def start(
    folder: Path, job: SlurmJob, code: int | str, args: Sequence[str] = (), **variables: str
) -> subprocess.Popen[str]:
    """Runs the script as slurmd does: in the folder in which it was submitted."""
    write_stubs(folder, STUBS)
    (folder / "job.sbatch").write_text(job.render(args))
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "CODE": str(code), "SLURM_JOB_ID": "81234"} | variables
    return subprocess.Popen(
        ["bash", "job.sbatch"], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code and stderr."""
    _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr


def requeues(folder: Path) -> list[str]:
    log = folder / "requeued"
    return log.read_text().splitlines() if log.exists() else []


def waiting_task(folder: Path) -> int:
    deadline = time.monotonic() + 60
    while not (folder / "waiting").exists():
        assert time.monotonic() < deadline, "the task did not start"
        time.sleep(0.01)
    return int((folder / "waiting").read_text())


@pytest.mark.parametrize("name", TEXTS)
def test_the_file_equals_the_golden_one(name: str) -> None:
    assert TEXTS[name] == (GOLDEN / name).read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_is_valid_bash(name: str) -> None:
    subprocess.run(["bash", "-n", str(GOLDEN / name)], check=True)


@pytest.mark.parametrize("code", [0, 2, 5, 7, 137])
def test_an_exit_code_is_passed_on_and_not_requeued(tmp_path: Path, code: int) -> None:
    assert wait(start(tmp_path, SMALL, code)) == (code, "")
    assert requeues(tmp_path) == []


def test_a_saved_run_is_requeued_and_the_script_succeeds(tmp_path: Path) -> None:
    assert wait(start(tmp_path, SMALL, 75)) == (0, "")
    assert requeues(tmp_path) == ["requeue incomplete 81234"]


def test_a_run_that_cannot_be_requeued_ends_with_75(tmp_path: Path) -> None:
    assert wait(start(tmp_path, SMALL, 75, SCONTROL="1"))[0] == 75
    code, stderr = wait(start(tmp_path, replace(SMALL, max_requeues=3), 75, SLURM_RESTART_COUNT="3"))
    assert code == 75
    assert "not requeued: already requeued 3 times" in stderr
    assert wait(start(tmp_path, replace(SMALL, requeue=False), 75)) == (75, "")
    assert requeues(tmp_path) == ["requeue incomplete 81234"]


def test_the_signal_before_the_time_limit_makes_the_tasks_save(tmp_path: Path) -> None:
    """SLURM signals the tasks of the step, and not the batch shell."""
    process = start(tmp_path, SMALL, "wait")
    os.kill(waiting_task(tmp_path), signal.SIGTERM)
    assert wait(process) == (0, "")
    assert requeues(tmp_path) == ["requeue incomplete 81234"]


def test_a_cancelled_job_is_not_requeued(tmp_path: Path) -> None:
    """scancel sends SIGTERM to everything, the batch shell included."""
    process = start(tmp_path, SMALL, "wait")
    waiting_task(tmp_path)
    os.killpg(process.pid, signal.SIGTERM)
    assert wait(process)[0] == -signal.SIGTERM
    assert requeues(tmp_path) == []


def test_every_argument_arrives_unchanged(tmp_path: Path) -> None:
    job = replace(LARGE, setup=(), program="torchstone")
    assert wait(start(tmp_path, job, 0, ARGS)) == (0, "")
    expected = ["train", "my runs/it's.yaml", "--gpus", "all", "--max-restarts", "3", *ARGS]
    assert (tmp_path / "args").read_text().splitlines() == expected
    step = (tmp_path / "srun-args").read_text().splitlines()
    assert step[:3] == ["--kill-on-bad-exit=1", "--wait=0", "--cpus-per-task=96"]


def test_a_setup_that_fails_ends_the_job(tmp_path: Path) -> None:
    job = replace(SMALL, setup=("source no/such/venv",))
    assert wait(start(tmp_path, job, 0))[0] == 1
    assert not (tmp_path / "args").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 0}, "nodes is 0, but must be at least 1"),
        ({"gpus_per_node": -1}, "gpus_per_node is -1"),
        ({"cpus_per_node": 0}, "cpus_per_node is 0"),
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"save_seconds": 70000}, "use 65535 at most"),
        ({"memory": "200 GB"}, "memory '200 GB'"),
        ({"time": "one day"}, "time 'one day'"),
        ({"time": "24:00:00:00"}, "is not a SLURM time"),
        ({"time": "3"}, "time 3 is too short"),
        ({"time": "0:03:00"}, "time 0:03:00 is too short"),
        ({"partition": "gpu\n#SBATCH --uid=0"}, "contains a line break"),
        ({"name": "a 'name'"}, "a quote or a backslash"),
        ({"log": "a\\b"}, "a quote or a backslash"),
        ({"config": Path("run\n.yaml")}, "contains a line break"),
        ({"setup": ("a\nb",)}, "contains a line break"),
        ({"sbatch": ("--reservation=mine",)}, "'--reservation=mine' is not an sbatch option"),
        ({"program": " "}, "program ' ' is not a valid command line"),
        ({"program": "'torchstone"}, "is not a valid command line"),
    ],
)
def test_values_that_slurm_would_misread_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        replace(SMALL, **changes)
    assert message in str(error.value)


@pytest.mark.parametrize("time", ["4", "3:01", "0:03:01", "0-1", "0-0:04", "0-00:03:01"])
def test_a_time_just_long_enough_is_accepted(time: str) -> None:
    assert f"--time={time}\n" in replace(SMALL, time=time).render()


def test_an_argument_with_a_line_break_is_refused() -> None:
    for job in (SMALL, POD):
        with pytest.raises(UsageError, match="contains a line break"):
            job.render(["--observe.note", "a\nb"])


def test_the_manifest_has_the_config_and_a_train_job() -> None:
    config, job = yaml.safe_load_all(PODS.render(ARGS))
    assert (config["apiVersion"], config["kind"]) == ("v1", "ConfigMap")
    assert config["data"] == {"run.yaml": RUN.read_text()}
    assert config["metadata"] == {"name": "llama-1b-config", "namespace": "research"}
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["metadata"] == {"name": "llama-1b", "namespace": "research"}
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed-with-cache"}
    trainer = job["spec"]["trainer"]
    assert trainer["command"] == ["python", "-m", "torchstone"]
    assert trainer["args"][:6] == ["train", "/etc/torchstone/run.yaml", "--max-restarts", "3", "--nproc", "8"]
    # Kubernetes writes a dollar as $$.
    assert trainer["args"][6:] == ["--training.max_steps", "100", "--output-dir", "$$(HOME) $$$$; rm -rf *"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (4, 8)
    assert trainer["resourcesPerNode"]["limits"] == {"cpu": 96, "memory": "1500Gi", "amd.com/gpu": 8}
    assert trainer["resourcesPerNode"]["requests"] == trainer["resourcesPerNode"]["limits"]
    token = {"secretKeyRef": {"name": "hugging-face", "key": "token"}}
    assert trainer["env"] == [{"name": "HF_TOKEN", "valueFrom": token}]


def test_the_pods_mount_the_config_and_the_volumes() -> None:
    _, job = yaml.safe_load_all(PODS.render())
    (patch,) = job["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 600
    (container,) = pod["containers"]
    assert container["name"] == "node"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert list(mounts) == [volume["name"] for volume in pod["volumes"]]
    assert sorted(mounts.values()) == ["/data", "/dev/shm", "/etc/torchstone", "/runs"]
    claims = {volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"][2:]}
    assert claims == {"corpus", "runs"}
    assert pod["volumes"][0]["configMap"] == {"name": "llama-1b-config"}


def test_a_pod_without_gpus_runs_one_process() -> None:
    _, job = yaml.safe_load_all(replace(POD, gpus_per_node=0).render())
    trainer = job["spec"]["trainer"]
    assert trainer["numProcPerNode"] == 1
    assert "resourcesPerNode" not in trainer
    assert trainer["args"] == ["train", "/etc/torchstone/run.yaml"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 0}, "nodes is 0"),
        ({"image": ""}, "the image is empty"),
        ({"image": "a\nb"}, "contains a line break"),
        ({"name": "Llama"}, "cannot be named 'Llama'"),
        ({"name": "a" * 49}, "at most 48"),
        ({"name": "a" * 48, "nodes": 11}, "at most 47"),
        ({"memory": "200 GB"}, "memory '200 GB'"),
        ({"volume": ("data",)}, "volume 'data' is not CLAIM:/PATH"),
        ({"volume": ("a:/data", "b:/data/")}, "mounted at /data"),
        ({"volume": ("a:/",)}, "mounted at /"),
        ({"volume": ("a:/etc/torchstone",)}, "mounted at /etc/torchstone"),
        ({"secret": ("HF_TOKEN=token",)}, "secret 'HF_TOKEN=token' is not"),
        ({"config": Path("run.txt")}, "run.txt is not a config file"),
        ({"program": ""}, "is not a valid command line"),
    ],
)
def test_values_that_kubernetes_would_refuse_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        replace(POD, **changes)
    assert message in str(error.value)


def test_a_config_that_does_not_fit_a_configmap_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        replace(POD, config=tmp_path / "none.yaml").render()
    (tmp_path / "large.yaml").write_text("#" * (1 << 20) + "\n")
    with pytest.raises(UsageError, match="too large for a ConfigMap"):
        replace(POD, config=tmp_path / "large.yaml").render()


def test_any_config_survives_the_manifest_unchanged(tmp_path: Path) -> None:
    for text in ("a: 1", "a: 1\n\n\n", "{\n  // one\n\t'a': \"b: c\"  \n}\n", "a: ü\r\n  - |\n"):
        (tmp_path / "run.json").write_text(text, encoding="utf-8", newline="")
        config, _ = yaml.safe_load_all(replace(POD, config=tmp_path / "run.json").render())
        assert config["data"]["run.json"] == (tmp_path / "run.json").read_text(encoding="utf-8")


def test_submit_returns_the_output_of_the_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    write_stubs(tmp_path, {"sbatch": '[ "$*" = "--parsable a b.sbatch" ] && echo "81234;north"'})
    assert slurm.submit(Path("a b.sbatch")) == "81234"
    write_stubs(tmp_path, {"kubectl": '[ "$*" = "apply -f job.yaml" ] && echo "trainjob/llama created"'})
    assert kubernetes.submit(Path("job.yaml")) == "trainjob/llama created"


def test_submit_reports_a_refusal_and_a_missing_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="sbatch is not installed(.|\n)*sbatch --parsable job"):
        slurm.submit(Path("job"))
    with pytest.raises(UsageError, match="kubectl is not installed(.|\n)*kubectl apply -f job"):
        kubernetes.submit(Path("job"))
    write_stubs(tmp_path, {"sbatch": 'echo "sbatch: error: invalid partition specified: x" >&2; exit 1'})
    with pytest.raises(UsageError, match="sbatch refused job: sbatch: error: invalid partition"):
        slurm.submit(Path("job"))


if __name__ == "__main__":
    for file, text in TEXTS.items():
        (GOLDEN / file).write_text(text)

"""Writes a manifest for Kubernetes: a TrainJob of Kubeflow Trainer 2.3 or later, and its config in a ConfigMap.

The runtime (`torch-distributed`, a part of Trainer) creates the pods, their network names and the PET_* variables that
nodes.py reads. A TrainJob can change a few things of its runtime, under `runtimePatches`: volumes, mounts, and the time
that a pod has to save when it is told to stop. A ConfigMap holds 1 MiB. Data and checkpoints belong on volumes that
every node can write to; anything else disappears with the pod.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import yaml

from torchstone.errors import UsageError
from torchstone.launch.slurm import check_minimum, check_one_line, run_client, split_program, train_args

API = "trainer.kubeflow.org/v1alpha1"
# The runtime's name for the container of a pod, and for the job that creates the pods.
NODE = "node"
CONFIG_FOLDER = "/etc/torchstone"
SUFFIXES = (".yaml", ".yml", ".json", ".toml")
MAX_CONFIG_BYTES = 1 << 20
MAX_NAME_LENGTH = 63
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True)
class KubernetesJob:
    """A config that runs on nodes of a Kubernetes cluster. The cluster decides what is not given.

    Args:
        config: JSON, YAML or TOML file, which becomes part of the manifest; paths in it are paths in the pods.
        image: Container image with torchstone.
        name: Name of the TrainJob.
        namespace: Namespace of the TrainJob.
        nodes: Number of nodes.
        gpus_per_node: GPUs of each node, one process each; 0 for none.
        gpu_resource: Resource name of the cluster's GPUs.
        cpus_per_node: Cores of each node.
        memory: Memory of each node, for example 200Gi.
        volume: A volume claim and its mount path, for example training-data:/data; can be repeated.
        secret: A variable from a secret, for example HF_TOKEN=hugging-face/token; can be repeated.
        runtime: ClusterTrainingRuntime that creates the pods.
        save_seconds: Seconds that a pod has to save when it is told to stop.
        max_restarts: How many times to restart the workers from the last checkpoint after a failure.
        program: How to call torchstone in the pods.
    """

    config: Path
    _: KW_ONLY
    image: str
    name: str = "torchstone"
    namespace: str | None = None
    nodes: int = 1
    gpus_per_node: int = 1
    gpu_resource: str = "nvidia.com/gpu"
    cpus_per_node: int | None = None
    memory: str | None = None
    volume: tuple[str, ...] = ()
    secret: tuple[str, ...] = ()
    runtime: str = "torch-distributed"
    save_seconds: int = 360
    max_restarts: int = 0
    program: str = "torchstone"

    def __post_init__(self) -> None:
        check_minimum(1, nodes=self.nodes, cpus_per_node=self.cpus_per_node, save_seconds=self.save_seconds)
        check_minimum(0, gpus_per_node=self.gpus_per_node, max_restarts=self.max_restarts)
        for text in (self.image, self.runtime, self.gpu_resource, self.namespace or ""):
            check_one_line(text)
        split_program(self.program)
        if not self.image:
            raise UsageError("the image is empty", "for example --image registry.example/torchstone:0.1")
        # The longest name that contains it is the pod's name: NAME-node-0-INDEX-abcde.
        max_length = MAX_NAME_LENGTH - len(f"-{NODE}-0-{self.nodes - 1}-abcde")
        if not LABEL.fullmatch(self.name) or len(self.name) > max_length:
            raise UsageError(
                f"a TrainJob cannot be named {self.name!r}",
                f"use at most {max_length} lower-case letters, digits and hyphens, beginning with a letter",
            )
        if self.memory is not None and not re.fullmatch(r"\d+(\.\d+)?(Ki|Mi|Gi|Ti|k|M|G|T)?", self.memory):
            raise UsageError(f"memory {self.memory!r} is not a Kubernetes memory size", "use 200Gi per node")
        if self.config.suffix not in SUFFIXES:
            raise UsageError(f"{self.config} is not a config file: its name must end in one of {', '.join(SUFFIXES)}")
        self._mounts()
        self._secret_variables()

    def render(self, args: Sequence[str] = ()) -> str:
        """The manifest, for `kubectl apply -f FILE`; `args` are further arguments of `torchstone train`."""
        documents = yaml.dump_all(
            [self._config_map(), self._train_job(args)],
            Dumper=_Dumper,
            sort_keys=False,
            width=120,
            explicit_start=True,
        )
        return f"# Written by `torchstone launch kubernetes`, for Kubeflow Trainer 2.3 or later.\n{documents}"

    def _config_map(self) -> dict[str, Any]:
        try:
            contents = self.config.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{self.config} cannot be read: {error}") from None
        if len(contents.encode()) > MAX_CONFIG_BYTES:
            raise UsageError(f"{self.config} is too large for a ConfigMap: it has more than {MAX_CONFIG_BYTES} bytes")
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self._metadata(f"{self.name}-config"),
            "data": {f"run{self.config.suffix}": contents},
        }

    def _train_job(self, args: Sequence[str]) -> dict[str, Any]:
        pod = {"terminationGracePeriodSeconds": self.save_seconds, **self._storage()}
        job = {"name": NODE, "template": {"spec": {"template": {"spec": pod}}}}
        patch = {
            "manager": "torchstone",
            "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}},
        }
        return {
            "apiVersion": API,
            "kind": "TrainJob",
            "metadata": self._metadata(self.name),
            "spec": {"runtimeRef": {"name": self.runtime}, "trainer": self._trainer(args), "runtimePatches": [patch]},
        }

    def _trainer(self, args: Sequence[str]) -> dict[str, Any]:
        gpus = self.gpus_per_node
        if not self.gpu_resource.startswith("nvidia.com/") and gpus:
            # Only NVIDIA GPUs can be found by number.
            gpus, args = 0, ["--nproc", str(gpus), *args]
        config = f"{CONFIG_FOLDER}/run{self.config.suffix}"
        amounts = {"cpu": self.cpus_per_node, "memory": self.memory, self.gpu_resource: self.gpus_per_node or None}
        # Requests equal limits: a pod that uses more than it requested is evicted first.
        amounts = {name: amount for name, amount in amounts.items() if amount is not None}
        trainer: dict[str, Any] = {
            "image": self.image,
            "command": _escape(split_program(self.program)),
            "args": _escape(train_args(config, gpus, self.max_restarts, args)),
            "numNodes": self.nodes,
            # The default for a pod without GPUs is one process per core.
            "numProcPerNode": self.gpus_per_node or 1,
        }
        trainer |= {"resourcesPerNode": {"requests": amounts, "limits": dict(amounts)}} if amounts else {}
        return trainer | ({"env": self._secret_variables()} if self.secret else {})

    def _storage(self) -> dict[str, Any]:
        """Volumes and mounts: the config, the claims, and more shared memory than 64 MiB for the processes of a pod."""
        volumes: dict[str, Any] = {
            "config": ({"configMap": {"name": f"{self.name}-config"}}, {"mountPath": CONFIG_FOLDER, "readOnly": True}),
            "shared-memory": ({"emptyDir": {"medium": "Memory"}}, {"mountPath": "/dev/shm"}),
        }
        for index, (claim, path) in enumerate(self._mounts()):
            volumes[f"volume-{index}"] = ({"persistentVolumeClaim": {"claimName": claim}}, {"mountPath": path})
        return {
            "volumes": [{"name": name, **volume} for name, (volume, _) in volumes.items()],
            "containers": [
                {"name": NODE, "volumeMounts": [{"name": name, **mount} for name, (_, mount) in volumes.items()]}
            ],
        }

    def _mounts(self) -> list[tuple[str, str]]:
        """The claim and the path of each volume."""
        mounts = []
        for text in self.volume:
            check_one_line(text)
            match = re.fullmatch(r"([a-z0-9][-.a-z0-9]*):(/[^:]*)", text)
            if match is None:
                raise UsageError(f"volume {text!r} is not CLAIM:/PATH", "for example training-data:/data")
            mounts.append((match[1], match[2].rstrip("/")))
        paths = [path for _, path in mounts] + [CONFIG_FOLDER, "/dev/shm"]
        if wrong := [path for path in paths if not path or paths.count(path) > 1]:
            raise UsageError(f"a volume cannot be mounted at {wrong[0] or '/'}: the path is in use", "use another path")
        return mounts

    def _secret_variables(self) -> list[dict[str, Any]]:
        variables = []
        for text in self.secret:
            match = re.fullmatch(r"([A-Za-z_]\w*)=([a-z0-9][-.a-z0-9]*)/([-.\w]+)", text, re.ASCII)
            if match is None:
                raise UsageError(f"secret {text!r} is not VARIABLE=SECRET/KEY", "use HF_TOKEN=hugging-face/token")
            source = {"secretKeyRef": {"name": match[2], "key": match[3]}}
            variables.append({"name": match[1], "valueFrom": source})
        return variables

    def _metadata(self, name: str) -> dict[str, str]:
        return {"name": name} if self.namespace is None else {"name": name, "namespace": self.namespace}


def submit(path: Path) -> str:
    """Applies the manifest with kubectl and returns its output."""
    return run_client(["kubectl", "apply", "-f", str(path)], "install it, and choose a cluster with kubectl config")


def _escape(args: Sequence[str]) -> list[str]:
    """Escapes $, because Kubernetes replaces $(NAME) with a variable."""
    return [arg.replace("$", "$$") for arg in args]


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, so that the config stays readable."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block)

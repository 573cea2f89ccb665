"""A manifest for Kubernetes: a TrainJob of Kubeflow Trainer 2.3 or later, and the config it runs, in one file.

The runtime (`torch-distributed`, which comes with Trainer) makes the pods, their network names and the PET_* variables
by which nodes.py knows them; here is only what it cannot know. A TrainJob may change few things of its runtime, under
`runtimePatches`: volumes, mounts and the time a pod has to save once it is told to go. The config travels in a
ConfigMap, which holds a mebibyte; data and checkpoints are on volumes that every node can write to, or go with the pod.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import yaml

from torchstone.errors import UsageError
from torchstone.launch.slurm import at_least, called, command, one_line, train_words

API = "trainer.kubeflow.org/v1alpha1"
# How the runtime names its pods' one container, and the job that they are replicas of.
NODE = "node"
CONFIG_FOLDER = "/etc/torchstone"
SUFFIXES = (".yaml", ".yml", ".json", ".toml")
LARGEST_CONFIG = 1 << 20
LONGEST_NAME = 63
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True)
class KubernetesJob:
    """A config on nodes of a Kubernetes cluster. What is not given is left to the cluster's default.

    Args:
        config: JSON, YAML or TOML file, which goes along; the paths in it are those of the pods.
        image: Image that has torchstone.
        name: Name of the TrainJob.
        namespace: Namespace of it.
        nodes: Machines that train together.
        gpus_per_node: GPUs of each, a process each; 0 for none.
        gpu_resource: What the cluster calls a GPU.
        cpus_per_node: Cores of each.
        memory: Memory of each, such as 200Gi.
        volume: A volume claim and where it is mounted, such as training-data:/data; may be repeated.
        secret: A variable from a secret, such as HF_TOKEN=hugging-face/token; may be repeated.
        runtime: ClusterTrainingRuntime that makes the pods.
        save_seconds: Seconds that a pod has to save once it is told to go.
        max_restarts: How often to start the workers again, from the last checkpoint, when one fails.
        program: How to call torchstone there.
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
        at_least(1, nodes=self.nodes, cpus_per_node=self.cpus_per_node, save_seconds=self.save_seconds)
        at_least(0, gpus_per_node=self.gpus_per_node, max_restarts=self.max_restarts)
        for text in (self.image, self.runtime, self.gpu_resource, self.namespace or ""):
            one_line(text)
        command(self.program)
        if not self.image:
            raise UsageError("a container needs an image")
        # The longest name made of it is that of a pod: NAME-node-0-INDEX-abcde.
        longest = LONGEST_NAME - len(f"-{NODE}-0-{self.nodes - 1}-abcde")
        if not LABEL.fullmatch(self.name) or len(self.name) > longest:
            raise UsageError(
                f"a TrainJob cannot be named {self.name!r}",
                f"small letters, digits and hyphens, beginning with a letter, {longest} at most",
            )
        if self.memory is not None and not re.fullmatch(r"\d+(\.\d+)?(Ki|Mi|Gi|Ti|k|M|G|T)?", self.memory):
            raise UsageError(f"memory {self.memory!r} is not one of Kubernetes'", "such as 200Gi for each node")
        if self.config.suffix not in SUFFIXES:
            raise UsageError(f"{self.config} is no config: its name ends in none of {', '.join(SUFFIXES)}")
        self._mounts()
        self._environment()

    def _train_words(self, config: str, words: Sequence[str]) -> list[str]:
        """GPUs of other makers are not found by number: they are counted, a process each."""
        if self.gpu_resource.startswith("nvidia.com/") or not self.gpus_per_node:
            return train_words(config, self.gpus_per_node, self.max_restarts, words)
        return train_words(config, 0, self.max_restarts, ["--nproc", str(self.gpus_per_node), *words])

    def text(self, words: Sequence[str] = ()) -> str:
        """The manifest, for `kubectl apply -f FILE`; the words are more of those of `torchstone train`."""
        documents = yaml.dump_all(
            [self._config_map(), self._train_job(words)],
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
        if len(contents.encode()) > LARGEST_CONFIG:
            raise UsageError(f"{self.config} is too large for a ConfigMap, which holds {LARGEST_CONFIG} bytes")
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self._metadata(f"{self.name}-config"),
            "data": {f"run{self.config.suffix}": contents},
        }

    def _train_job(self, words: Sequence[str]) -> dict[str, Any]:
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
            "spec": {"runtimeRef": {"name": self.runtime}, "trainer": self._trainer(words), "runtimePatches": [patch]},
        }

    def _trainer(self, words: Sequence[str]) -> dict[str, Any]:
        config = f"{CONFIG_FOLDER}/run{self.config.suffix}"
        amounts = {
            "cpu": self.cpus_per_node,
            "memory": self.memory,
            self.gpu_resource: self.gpus_per_node or None,
        }
        # The same as a limit and as a request: a pod that is promised less than it uses is the first to go.
        amounts = {name: amount for name, amount in amounts.items() if amount is not None}
        found: dict[str, Any] = {
            "image": self.image,
            "command": _literal(command(self.program)),
            "args": _literal(self._train_words(config, words)),
            "numNodes": self.nodes,
            # Without it a pod that has no GPU is told to run a process per core.
            "numProcPerNode": self.gpus_per_node or 1,
        }
        found |= {"resourcesPerNode": {"requests": amounts, "limits": dict(amounts)}} if amounts else {}
        return found | ({"env": self._environment()} if self.secret else {})

    def _storage(self) -> dict[str, Any]:
        """The config; shared memory beyond the usual 64 MiB, through which the processes of a pod talk; the claims."""
        kinds: dict[str, Any] = {
            "config": ({"configMap": {"name": f"{self.name}-config"}}, {"mountPath": CONFIG_FOLDER, "readOnly": True}),
            "shared-memory": ({"emptyDir": {"medium": "Memory"}}, {"mountPath": "/dev/shm"}),
        }
        for index, (claim, path) in enumerate(self._mounts()):
            kinds[f"volume-{index}"] = ({"persistentVolumeClaim": {"claimName": claim}}, {"mountPath": path})
        return {
            "volumes": [{"name": name, **volume} for name, (volume, _) in kinds.items()],
            "containers": [
                {"name": NODE, "volumeMounts": [{"name": name, **mount} for name, (_, mount) in kinds.items()]}
            ],
        }

    def _mounts(self) -> list[tuple[str, str]]:
        found = [re.fullmatch(r"([a-z0-9][-.a-z0-9]*):(/[^:]*)", one) for one in self.volume]
        for text, match in zip(self.volume, found, strict=True):
            one_line(text)
            if match is None:
                raise UsageError(f"volume {text!r} is not CLAIM:/PATH", "such as training-data:/data")
        mounts = [(match[1], match[2].rstrip("/")) for match in found if match is not None]
        paths = [path for _, path in mounts] + [CONFIG_FOLDER, "/dev/shm"]
        if wrong := [path for path in paths if not path or paths.count(path) > 1]:
            raise UsageError(f"nothing, or no more than one volume, can be mounted at {wrong[0] or '/'}")
        return mounts

    def _environment(self) -> list[dict[str, Any]]:
        found = []
        for text in self.secret:
            match = re.fullmatch(r"([A-Za-z_]\w*)=([a-z0-9][-.a-z0-9]*)/([-.\w]+)", text, re.ASCII)
            if match is None:
                raise UsageError(f"secret {text!r} is not VARIABLE=SECRET/KEY", "such as HF_TOKEN=hugging-face/token")
            source = {"secretKeyRef": {"name": match[2], "key": match[3]}}
            found.append({"name": match[1], "valueFrom": source})
        return found

    def _metadata(self, name: str) -> dict[str, str]:
        return {"name": name} if self.namespace is None else {"name": name, "namespace": self.namespace}


def submit(path: Path) -> str:
    """Hands the manifest to kubectl and returns what it says of each part."""
    return called(["kubectl", "apply", "-f", str(path)], "install it, and choose a cluster with kubectl config")


def _literal(words: Sequence[str]) -> list[str]:
    """Kubernetes puts variables for $(NAME); ours are meant as they stand."""
    return [word.replace("$", "$$") for word in words]


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, so that the config can be read in the manifest."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block)

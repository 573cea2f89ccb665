"""pretrain_main, prepare_dataset, run_training, train_gpu and train_auto_gpu: every command of docs/many-gpus.md works.

Most run with --print-config. Each uses the intended GPU.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from selection import the_rest
from torchstone import cli
from torchstone.config.files import read_config_file
from torchstone.config.load import ALIASES, load_config
from torchstone.errors import UsageError
from torchstone.launch import gpus
from torchstone.scripts import gpu as gpu_scripts

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
MAINS = {"pretrain_main.py": gpu_scripts.pretrain_main, "prepare_dataset.py": gpu_scripts.prepare_dataset}
EIGHT = [gpus.Gpu(number, 0, 0, 2**36, "H100", f"GPU-{number}{number}{number}{number}-aaaa") for number in range(8)]
VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "GPU_RANK", "NPROC", "WORLD_SIZE")

SINGLE_GPU = """{
    "system": {
        "device": "cuda",
        "device_id": 0
    },
    "training": {
        "batch_size": 4,
        "grad_accum_nums": 8
    }
}
"""
LARGER_BATCH = """{
    "training": {
        "batch_size": 8,         // Larger batch since only one GPU
        "grad_accum_nums": 4,    // Less accumulation needed
        "num_workers": 8         // More data workers for single GPU
    }
}
"""
FILES = {
    "single_gpu.json": SINGLE_GPU,
    "my_config.json": LARGER_BATCH,
    "debug_config.json": LARGER_BATCH,
    "test_config.json": LARGER_BATCH,
}
LARGER = {"batch_size": 8, "grad_accum_steps": 4, "global_batch_size": None, "max_steps": 10000}

# Commands of one process, the GPU that each uses, and settings of `training` that result.
ONE_PROCESS: list[tuple[str, str, dict[str, Any]]] = [
    ("python3 pretrain_main.py --debug", "0", {"max_steps": 10, "global_batch_size": 8}),
    ("python3 pretrain_main.py", "0", {"max_steps": 10000, "global_batch_size": 256}),
    ("python3 pretrain_main.py --preset production", "0", {"max_steps": 10000}),
    ("python3 pretrain_main.py --preset debug", "0", {"max_steps": 10}),
    ("CUDA_VISIBLE_DEVICES=0 GPU_RANK=0 python3 pretrain_main.py", "0", {"max_steps": 10000}),
    ("CUDA_VISIBLE_DEVICES=3 GPU_RANK=3 python3 pretrain_main.py", "3", {"max_steps": 10000}),
    ("CUDA_VISIBLE_DEVICES=7 GPU_RANK=7 python3 pretrain_main.py", "7", {"max_steps": 10000}),
    (
        "CUDA_VISIBLE_DEVICES=2 python3 pretrain_main.py --config single_gpu.json",
        "2",
        {"batch_size": 4, "grad_accum_steps": 8, "global_batch_size": None, "max_steps": 10000},
    ),
    ("CUDA_VISIBLE_DEVICES=5 GPU_RANK=5 python3 pretrain_main.py", "5", {"max_steps": 10000}),
    ("CUDA_VISIBLE_DEVICES=0 GPU_RANK=0 python3 pretrain_main.py --debug", "0", {"max_steps": 10}),
    ("CUDA_VISIBLE_DEVICES=1 GPU_RANK=1 python3 pretrain_main.py --config debug_config.json", "1", LARGER),
    (
        "CUDA_VISIBLE_DEVICES=0 python3 pretrain_main.py \\\n    --config test_config.json \\\n    --max-steps 10",
        "0",
        LARGER | {"max_steps": 10},
    ),
    (
        "python3 pretrain_main.py --config config_stable.json",
        "0",
        {"precision": "fp32", "batch_size": 2, "grad_accum_steps": 64, "global_batch_size": None},
    ),
]
# Shell commands; the test replaces ARGS with --print-config.
SHELL_COMMANDS: list[tuple[str, dict[str, Any]]] = [
    ("bash run_training.sh ARGS", {"max_steps": 10000, "global_batch_size": 256}),
    ("bash run_training.sh --debug ARGS", {"max_steps": 10}),
    ("bash run_training.sh --config test_config.json ARGS", LARGER),
    ("bash run_training.sh ARGS 2>&1 | tee training.log", {"max_steps": 10000}),
    ("./train_gpu.sh 0 ARGS", {"max_steps": 10000}),
    ("./train_gpu.sh 3 --debug ARGS", {"max_steps": 10}),
    ("./train_gpu.sh 5 --config my_config.json ARGS", LARGER),
    ("./train_gpu.sh --debug ARGS", {"max_steps": 10}),
    ("./train_auto_gpu.sh --debug ARGS", {"max_steps": 10}),
]
# The other scripts pass their arguments on in TestRealRuns.
FIRST_COMMAND = "./train_auto_gpu.sh --debug ARGS"
six_gpus_or_none = pytest.mark.skipif(
    0 < len(gpus.list_gpus()) < 6, reason="the commands name GPUs up to 5; this machine has fewer, but not none"
)
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, run_main: Call, tmp_path: Path) -> Call:
    """Runs a command in this process, in a folder with FILES, on a machine with eight GPUs.

    Returns its exit code, stdout and stderr.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpus, "list_gpus", lambda: EIGHT)
    for name in VARIABLES:
        # Set first, so that monkeypatch restores what a script sets.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    shutil.copy(SCRIPTS / "config_stable.json", tmp_path)

    def run(command: str, *more: object) -> tuple[int, str, str]:
        argv = shlex.split(command.replace("\\\n", " "))
        while "=" in argv[0]:
            monkeypatch.setenv(*argv.pop(0).split("=", 1))
        assert argv.pop(0) == "python3"
        return run_main(MAINS[argv[0]], *argv, *more)

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of scripts/ with FILES."""
    copy = tmp_path_factory.mktemp("copy") / "scripts"
    shutil.copytree(SCRIPTS, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in FILES.items():
        (copy / name).write_text(text)
    return copy


def shell(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in bash, with the python3 of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {"PATH": path, "OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def assert_training(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {key: config["training"][key] for key in expected} == expected
    assert config["output_dir"] == ".checkpoints"
    assert config["data"]["path"] == ["demo:corpus"]
    assert config["system"]["device_id"] is None


class TestCommands:
    @pytest.mark.parametrize(("command", "gpu", "training"), ONE_PROCESS)
    def test_a_process_has_the_intended_config_and_gpu(
        self, call: Call, command: str, gpu: str, training: dict[str, Any]
    ) -> None:
        code, out, err = call(command, "--print-config")
        # What auto means here, and nothing else. Some of the files ask for a GPU.
        assert (code, err.count("\n")) == (0, 1)
        assert err.startswith(("auto on ", "this run would be refused here: system.device is cuda, but "))
        assert_training(json.loads(out), training)
        assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["GPU_RANK"]) == (gpu, gpu)
        assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"

    @six_gpus_or_none
    @pytest.mark.parametrize(
        ("command", "training"),
        [pytest.param(*case, marks=() if case[0] == FIRST_COMMAND else the_rest) for case in SHELL_COMMANDS],
    )
    def test_shell_scripts_pass_their_arguments_on(self, folder: Path, command: str, training: dict[str, Any]) -> None:
        result = shell(command.replace("ARGS", "--print-config"), folder)
        assert result.returncode == 0, result.stderr
        first, brace, rest = result.stdout.partition("{")
        # With 2>&1 a line about auto follows.
        assert_training(json.JSONDecoder().raw_decode(brace + rest)[0], training)
        if "auto" in command and not gpus.list_gpus():
            assert first == "No GPU found: training on the CPU\n"

    def test_the_page_has_all_of_them(self) -> None:
        page = (ROOT / "docs/many-gpus.md").read_text()
        for command in [command for command, *_ in ONE_PROCESS] + [command for command, *_ in SHELL_COMMANDS]:
            assert command.replace(" ARGS", "") in page, command
        # And what writes their files.
        assert f"cat > my_config.json <<'EOF'\n{LARGER_BATCH}EOF" in page
        assert f"cat > single_gpu.json <<'EOF'\n{SINGLE_GPU}EOF" in page

    def test_prepare_dataset_fills_the_cache_of_the_same_config(
        self, call: Call, text_file: Path, tokenizer_dir: Path
    ) -> None:
        data = ["--data.path", text_file, "--model.tokenizer", tokenizer_dir]
        code, out, err = call("python3 prepare_dataset.py", *data)
        assert code == 0, err
        assert "cache dir: cache/datasets" in out
        assert "tokenizing" in err
        code, _, err = call("python3 prepare_dataset.py --max-steps 3 --output-dir other", *data)
        assert code == 0, err
        assert "tokenizing" not in err
        assert not Path(".checkpoints").exists()
        assert not Path("other").exists()
        code, out, err = call("python3 pretrain_main.py --config test_config.json --print-config", *data)
        config = json.loads(out)["data"]
        assert (config["context_length"], config["path"]) == (2048, [str(text_file)])


@pytest.mark.parametrize("preset", ["production", "debug"])
@pytest.mark.parametrize("name", [*FILES, "config_stable.json"])
def test_the_batch_of_a_file_replaces_the_batch_of_a_preset(tmp_path: Path, name: str, preset: str) -> None:
    text = FILES.get(name) or (SCRIPTS / name).read_text()
    (tmp_path / name).write_text(text)
    config = load_config(tmp_path / name, preset)
    assert config.training.global_batch_size is None
    assert None not in (config.training.batch_size, config.training.grad_accum_steps)
    assert config.model.depth == (32 if preset == "production" else 2)


def test_the_stable_config_is_more_careful_than_production() -> None:
    stable = load_config(SCRIPTS / "config_stable.json", "production")
    production = load_config(preset="production")
    assert stable.optim.learning_rate < production.optim.learning_rate / 10
    assert stable.optim.max_grad_norm < production.optim.max_grad_norm
    assert stable.optim.warmup_steps > production.optim.warmup_steps
    assert stable.model.init_std is not None
    assert stable.model.init_std < (2 / (5 * 64 * 32)) ** 0.5 / 2
    assert stable.training.precision == "fp32"
    assert stable.data.context_length < production.data.context_length
    training = read_config_file(SCRIPTS / "config_stable.json").values["training"]
    assert {f"training.{key}" for key in training} >= {key for key in ALIASES if key.startswith("training.")}


class TestOneGpu:
    @pytest.fixture(autouse=True)
    def eight(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpus, "list_gpus", lambda: EIGHT)

    @pytest.mark.parametrize(
        ("visible", "rank", "device_id", "device", "label", "line"),
        [
            (None, None, None, "0", "0", ""),
            (None, None, 4, "4", "4", ""),
            (None, "3", None, "3", "3", ""),
            (None, "3", 0, "3", "3", ""),
            (None, "3", 3, "3", "3", ""),
            (None, "3", 4, "3", "3", "warning: training on GPU 3 (GPU_RANK), not on system.device_id 4"),
            (None, "", None, "0", "0", ""),
            ("2", None, None, "2", "2", ""),
            ("2", None, 0, "2", "2", ""),
            ("2", "2", 0, "2", "2", ""),
            ("2", "3", None, "2", "3", "warning: training on GPU 2 (CUDA_VISIBLE_DEVICES); GPU_RANK 3 only"),
            ("2,5", None, None, "2", "2", "CUDA_VISIBLE_DEVICES has 2 GPUs; a single process uses the first, 2"),
            ("2,5", None, 1, "5", "5", ""),
            ("2,5", None, 0, "2", "2", ""),
            ("5,-1,2", None, None, "5", "5", ""),
            ("GPU-6666", None, None, "GPU-6666", "6", ""),
            ("GPU-6666", "1", None, "GPU-6666", "1", "warning: training on GPU 6"),
            ("MIG-c7384736", None, None, "MIG-c7384736", None, ""),
        ],
    )
    def test_the_environment_decides_then_the_config_then_it_is_the_first(
        self, visible: str | None, rank: str | None, device_id: int | None, device: str, label: str | None, line: str
    ) -> None:
        settings = {"CUDA_VISIBLE_DEVICES": visible, "GPU_RANK": rank}
        environ = {name: value for name, value in settings.items() if value is not None}
        variables, lines = gpu_scripts.one_gpu_environment(environ, device_id)
        assert variables["CUDA_VISIBLE_DEVICES"] == device
        assert (environ | variables).get("GPU_RANK") == label
        assert len(lines) == (1 if line else 0)
        assert line in "".join(lines)

    @pytest.mark.parametrize("visible", ["", "-1", " "])
    def test_a_process_without_visible_gpus_is_not_changed(self, visible: str) -> None:
        environ = {"CUDA_VISIBLE_DEVICES": visible, "GPU_RANK": "3"}
        assert gpu_scripts.one_gpu_environment(environ, 1) == ({}, [])

    def test_the_device_order_of_the_user_stays(self) -> None:
        variables, _ = gpu_scripts.one_gpu_environment({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, None)
        assert variables["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"

    @pytest.mark.parametrize(
        ("environ", "device_id", "expected"),
        [
            ({"GPU_RANK": "9"}, None, "there is no GPU 9, only GPUs 0, 1, 2, 3, 4, 5, 6, 7"),
            ({"CUDA_VISIBLE_DEVICES": "9"}, None, "there is no GPU 9, only"),
            ({"CUDA_VISIBLE_DEVICES": "GPU-dead"}, None, "there is no GPU GPU-dead, only"),
            ({}, 8, "there is no GPU 8, only"),
            ({"GPU_RANK": "two"}, None, "GPU_RANK must be the number of a GPU, not 'two'"),
            ({"CUDA_VISIBLE_DEVICES": "2"}, 1, "system.device_id 1 is out of range for CUDA_VISIBLE_DEVICES=2, which"),
        ],
    )
    def test_a_gpu_that_does_not_exist_is_an_error(
        self, environ: dict[str, str], device_id: int | None, expected: str
    ) -> None:
        with pytest.raises(UsageError) as caught:
            gpu_scripts.one_gpu_environment(environ, device_id)
        assert expected in str(caught.value)

    def test_a_mig_slice_is_device_0_of_its_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-c7384736")
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        assert gpu_scripts.select_one_gpu(load_config(preset="debug")).system.device_id == 0

    def test_a_machine_without_gpus_accepts_any_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpus, "list_gpus", list)
        variables, lines = gpu_scripts.one_gpu_environment({"CUDA_VISIBLE_DEVICES": "3", "GPU_RANK": "3"}, None)
        assert (variables["CUDA_VISIBLE_DEVICES"], lines) == ("3", [])

    def test_the_least_loaded_is_printed_for_the_shell(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,3")
        gpu_scripts.print_least_loaded_gpu()
        assert capsys.readouterr().out == "3\n"


class TestAllGpus:
    @pytest.mark.parametrize(
        ("args", "devices", "nproc", "expected"),
        [
            ([], EIGHT, None, ["--gpus", "all"]),
            (["--debug"], EIGHT, "2", ["--gpus", "all"]),
            (["--system.device", "cpu"], EIGHT, None, ["--nproc", "1"]),
            ([], [], None, ["--nproc", "1"]),
            ([], [], "2", ["--nproc", "2"]),
        ],
    )
    def test_run_training_uses_all_gpus_or_the_cpu(
        self,
        monkeypatch: pytest.MonkeyPatch,
        args: list[str],
        devices: list[gpus.Gpu],
        nproc: str | None,
        expected: list[str],
    ) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(gpus, "list_gpus", lambda: devices)
        monkeypatch.setenv("NPROC", nproc or "")
        monkeypatch.setattr(sys, "argv", ["run_training.sh", *args])
        commands: list[list[str]] = []
        monkeypatch.setattr(cli, "main", lambda argv, resolve: commands.append(argv))
        gpu_scripts.run_training()
        assert commands[0][-2:] == expected

    def test_nproc_is_named_as_it_is_set(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(gpus, "list_gpus", list)
        monkeypatch.setenv("NPROC", "two")
        monkeypatch.setattr(sys, "argv", ["run_training.sh", "--debug"])
        with pytest.raises(SystemExit, match="2"):
            gpu_scripts.run_training()
        assert "NPROC must be a number of processes, not 'two'" in capsys.readouterr().err

    def test_the_device_of_a_single_process_is_ignored_with_a_warning(self, capsys: pytest.CaptureFixture[str]) -> None:
        config = load_config(preset="debug", overrides={"system.device_id": 0})
        assert gpu_scripts.ignore_device_id(config).system.device_id is None
        assert "ignoring system.device_id 0, which is for a single process" in capsys.readouterr().err


class TestWrongUsage:
    @pytest.mark.parametrize(
        ("command", "expected"),
        [
            ("python3 pretrain_main.py --debug --preset production", "--debug means --preset debug, but --preset prod"),
            (
                "python3 prepare_dataset.py --debug --preset production",
                "--debug means --preset debug, but --preset pro",
            ),
            ("python3 pretrain_main.py --preset debgu", "did you mean 'debug'?"),
            ("python3 pretrain_main.py --confg x", "did you mean --config?"),
            ("python3 pretrain_main.py --config", "--config needs a value"),
            ("python3 pretrain_main.py --config= --debug", "--config needs a value"),
            ("python3 pretrain_main.py --config --debug", "--config needs a value"),
            ("python3 pretrain_main.py --config a.json --config b.json", "--config is given twice"),
            ("python3 pretrain_main.py --debug --debug", "--debug is given twice"),
            ("python3 pretrain_main.py --output-dir --debug x", "--output-dir needs a value"),
            ("python3 pretrain_main.py --config none.json", "config file none.json does not exist"),
            ("python3 pretrain_main.py --max-steps ten", "training.max_steps must be an integer"),
            ("python3 prepare_dataset.py --max-steps ten", "training.max_steps must be an integer"),
            ("python3 pretrain_main.py --max-steps 3 --training.max_steps 4", "are the same setting"),
            ("python3 pretrain_main.py --learning-rate 1", "in Torchstone this is --optim.learning_rate"),
            ("python3 pretrain_main.py --nproc 2", "pretrain_main.py is a single process, but --nproc starts several"),
            ("python3 pretrain_main.py --gpus=0,1", "use run_training.sh"),
            ("WORLD_SIZE=2 python3 pretrain_main.py", "pretrain_main.py is a single process, but torchrun starts"),
            ("GPU_RANK=9 python3 pretrain_main.py", "there is no GPU 9, only"),
        ],
    )
    def test_it_is_an_error_with_exit_code_2(self, call: Call, command: str, expected: str) -> None:
        code, out, err = call(command)
        assert (code, out) == (2, ""), err
        assert expected in err
        assert not Path(".checkpoints").exists()

    def test_a_file_or_flag_overrides_the_default_folder(self, call: Call, tmp_path: Path) -> None:
        (tmp_path / "own.json").write_text('{"output_dir": "from-the-file"}')
        _, out, _ = call("python3 pretrain_main.py --config=own.json --debug --preset debug --print-config")
        assert json.loads(out)["output_dir"] == "from-the-file"
        _, out, _ = call("python3 pretrain_main.py --config own.json --output-dir=from-the-flag --print-config")
        assert json.loads(out)["output_dir"] == "from-the-flag"
        _, out, _ = call("python3 pretrain_main.py own.json --print-config")
        assert json.loads(out)["output_dir"] == "from-the-file"

    @pytest.mark.parametrize("gpu_id", ["x", "0,1", "''"])
    def test_a_gpu_id_must_be_a_number(self, folder: Path, gpu_id: str) -> None:
        result = shell(f"./train_gpu.sh {gpu_id}", folder)
        assert result.returncode == 2
        assert "usage: train_gpu.sh [GPU_ID]" in result.stderr

    @pytest.mark.parametrize("name", ["pretrain_main.py", "prepare_dataset.py"])
    def test_help_lists_the_flags(self, call: Call, name: str) -> None:
        code, out, _ = call(f"python3 {name} --help")
        assert code == 0
        assert out.startswith(f"Usage: {name} [--debug | --preset NAME] [--config FILE]")


class TestRealRuns:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
    def test_a_config_for_cuda_needs_cuda(
        self, call: Call, monkeypatch: pytest.MonkeyPatch, text_file: Path, tokenizer_dir: Path
    ) -> None:
        """With --system.device cpu it runs, with the batches of the file."""
        monkeypatch.setattr(gpus, "list_gpus", list)
        data = ["--data.path", text_file, "--model.tokenizer", tokenizer_dir, "--data.context_length", 32]
        tiny = [*data, "--model.width", 32, "--model.heads", 2, "--max-steps", 1, "--observe.console", "lines"]
        command = "CUDA_VISIBLE_DEVICES=2 python3 pretrain_main.py --debug --config single_gpu.json"
        code, _, err = call(command, *tiny)
        assert code == 2, err
        assert "system.device is cuda, but torch sees no CUDA device" in err
        code, _, err = call(command, *tiny, "--system.device", "cpu")
        assert code == 0, err
        assert "of 32 samples, micro-batches of 4 rows, on cpu" in err
        assert Path(".checkpoints/checkpoints/step-00000001/manifest.json").is_file()

    @six_gpus_or_none
    def test_a_run_on_all_gpus_continues_on_one(self, folder: Path, text_file: Path, tokenizer_dir: Path) -> None:
        data = f"--data.path {text_file} --model.tokenizer {tokenizer_dir}"
        result = shell(f"bash run_training.sh --debug {data} 2>&1 | tee training.log", folder, NPROC="2", GPU_RANK="7")
        log = (folder / "training.log").read_text()
        assert (result.returncode, result.stdout) == (0, log), log
        last = [line.split(" | ")[:3] for line in log.splitlines() if "Step [10/10]" in line]
        name = "GPU" if torch.cuda.is_available() else "rank"
        assert [first for first, *_ in sorted(last)][:2] == [f"{name}0:INFO", f"{name}1:INFO"], log
        # All ranks log the same values of a step.
        assert len({line[2] for line in last}) == 1, log
        assert log.count("tokenizing") == 1
        assert (folder / ".checkpoints/checkpoints/step-00000010/manifest.json").is_file()

        result = shell(f"./train_gpu.sh 3 --debug --max-steps 11 {data}", folder)
        assert result.returncode == 0, result.stderr
        assert "GPU3:INFO | [GPU 3] Step [11/11] | Loss: " in result.stderr
        assert "tokenizing" not in result.stderr

    def test_the_script_has_the_exit_code_of_the_training(self, folder: Path) -> None:
        result = shell("bash scripts/run_training.sh --config scripts/none.json", folder.parent)
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.startswith("error: config file scripts/none.json does not exist")

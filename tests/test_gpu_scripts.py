"""pretrain_main, prepare_dataset, run_training, train_gpu and train_auto_gpu: every command that their page promises is
run as printed, most with --print-config, and the GPU that each takes is the one that was meant.
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

from torchstone import doors
from torchstone.config.files import read_tree
from torchstone.config.load import ALIASES, load_config
from torchstone.errors import UsageError
from torchstone.launch import gpus

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
DOORS = {"pretrain_main.py": doors.pretrain, "prepare_dataset.py": doors.prepare}
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

# The commands of one process, the GPU that each takes, and what becomes of `training`.
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
# Those of a shell, with --print-config in the place of WORDS.
IN_A_SHELL: list[tuple[str, dict[str, Any]]] = [
    ("bash run_training.sh WORDS", {"max_steps": 10000, "global_batch_size": 256}),
    ("bash run_training.sh --debug WORDS", {"max_steps": 10}),
    ("bash run_training.sh --config test_config.json WORDS", LARGER),
    ("bash run_training.sh WORDS 2>&1 | tee training.log", {"max_steps": 10000}),
    ("./train_gpu.sh 0 WORDS", {"max_steps": 10000}),
    ("./train_gpu.sh 3 --debug WORDS", {"max_steps": 10}),
    ("./train_gpu.sh 5 --config my_config.json WORDS", LARGER),
    ("./train_gpu.sh --debug WORDS", {"max_steps": 10}),
    ("./train_auto_gpu.sh --debug WORDS", {"max_steps": 10}),
]
ENOUGH_OR_NONE = pytest.mark.skipif(
    0 < len(gpus.of_machine()) < 6, reason="the commands name GPUs up to 5, and this machine has fewer, but some"
)
Called = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Called:
    """Exit code, stdout and stderr of a command as printed: in this process, among the files, with eight GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpus, "of_machine", lambda: EIGHT)
    for name in VARIABLES:
        # Set first, so that what a door sets is taken back afterwards.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    shutil.copy(SCRIPTS / "config_stable.json", tmp_path)

    def run(command: str, *more: object) -> tuple[int, str, str]:
        words = shlex.split(command.replace("\\\n", " "))
        while "=" in words[0]:
            monkeypatch.setenv(*words.pop(0).split("=", 1))
        assert words.pop(0) == "python3"
        monkeypatch.setattr(sys, "argv", [*words, *map(str, more)])
        code = 0
        try:
            DOORS[words[0]]()
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of scripts/ with the files, somewhere else."""
    copy = tmp_path_factory.mktemp("elsewhere") / "scripts"
    shutil.copytree(SCRIPTS, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in FILES.items():
        (copy / name).write_text(text)
    return copy


def shell(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command in bash, with the python3 of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {"PATH": path, "OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def includes(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {key: config["training"][key] for key in expected} == expected
    assert config["output_dir"] == ".checkpoints"
    assert config["data"]["path"] == ["demo:corpus"]
    assert config["system"]["device_id"] is None


class TestTheCommandsOfThePage:
    @pytest.mark.parametrize(("command", "gpu", "training"), ONE_PROCESS)
    def test_one_process_has_the_config_and_the_gpu_that_were_meant(
        self, call: Called, command: str, gpu: str, training: dict[str, Any]
    ) -> None:
        code, out, err = call(command, "--print-config")
        assert (code, err) == (0, "")
        includes(json.loads(out), training)
        assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["GPU_RANK"]) == (gpu, gpu)
        assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"

    @ENOUGH_OR_NONE
    @pytest.mark.parametrize(("command", "training"), IN_A_SHELL)
    def test_a_shell_passes_the_words_on(self, folder: Path, command: str, training: dict[str, Any]) -> None:
        done = shell(command.replace("WORDS", "--print-config"), folder)
        assert done.returncode == 0, done.stderr
        first, brace, rest = done.stdout.partition("{")
        includes(json.loads(brace + rest), training)
        if "auto" in command and not gpus.of_machine():
            assert first == "No GPU found: training on the CPU\n"

    def test_the_page_has_them_all(self) -> None:
        page = (ROOT / "docs/many-gpus.md").read_text()
        for command in [command for command, *_ in ONE_PROCESS] + [command for command, *_ in IN_A_SHELL]:
            assert command.replace(" WORDS", "") in page, command

    def test_the_data_of_the_same_words_is_prepared(self, call: Called, text_file: Path, tokenizer_dir: Path) -> None:
        data = ["--data.path", text_file, "--model.tokenizer", tokenizer_dir]
        code, out, err = call("python3 prepare_dataset.py", *data)
        assert code == 0, err
        assert "cache dir: cache/datasets" in out
        assert "tokenizing" in err
        code, _, err = call("python3 prepare_dataset.py --max-steps 3 --output-dir there", *data)
        assert code == 0, err
        assert "tokenizing" not in err
        assert not Path(".checkpoints").exists()
        assert not Path("there").exists()
        code, out, err = call("python3 pretrain_main.py --config test_config.json --print-config", *data)
        shown = json.loads(out)["data"]
        assert (shown["context_length"], shown["path"]) == (2048, [str(text_file)])


@pytest.mark.parametrize("preset", ["production", "debug"])
@pytest.mark.parametrize("name", [*FILES, "config_stable.json"])
def test_every_file_lies_over_every_preset_and_takes_its_batch_back(tmp_path: Path, name: str, preset: str) -> None:
    text = FILES.get(name) or (SCRIPTS / name).read_text()
    (tmp_path / name).write_text(text)
    config = load_config(tmp_path / name, preset)
    assert config.training.global_batch_size is None
    assert None not in (config.training.batch_size, config.training.grad_accum_steps)
    assert config.model.depth == (32 if preset == "production" else 2)


def test_the_stable_config_is_more_careful_than_production_in_every_number() -> None:
    stable = load_config(SCRIPTS / "config_stable.json", "production")
    usual = load_config(preset="production")
    assert stable.optim.learning_rate < usual.optim.learning_rate / 10
    assert stable.optim.max_grad_norm < usual.optim.max_grad_norm
    assert stable.optim.warmup_steps > usual.optim.warmup_steps
    assert stable.model.init_std is not None
    assert stable.model.init_std < (2 / (5 * 64 * 32)) ** 0.5 / 2
    assert stable.training.precision == "fp32"
    assert stable.data.context_length < usual.data.context_length
    said = read_tree(SCRIPTS / "config_stable.json").values["training"]
    assert {f"training.{key}" for key in said} >= {key for key in ALIASES if key.startswith("training.")}


class TestWhichGpu:
    @pytest.fixture(autouse=True)
    def eight(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpus, "of_machine", lambda: EIGHT)

    @pytest.mark.parametrize(
        ("visible", "rank", "device_id", "taken", "named", "said"),
        [
            (None, None, None, "0", "0", ""),
            (None, None, 4, "4", "4", ""),
            (None, "3", None, "3", "3", ""),
            (None, "3", 0, "3", "3", ""),
            (None, "3", 3, "3", "3", ""),
            (None, "3", 4, "3", "3", "warning: trains on GPU 3, as GPU_RANK says, not 4"),
            (None, "", None, "0", "0", ""),
            ("2", None, None, "2", "2", ""),
            ("2", None, 0, "2", "2", ""),
            ("2", "2", 0, "2", "2", ""),
            ("2", "3", None, "2", "3", "warning: trains on GPU 2, as CUDA_VISIBLE_DEVICES says"),
            ("2,5", None, None, "2", "2", "shows 2 GPUs; one process trains on the first, 2"),
            ("2,5", None, 1, "5", "5", ""),
            ("2,5", None, 0, "2", "2", ""),
            ("5,-1,2", None, None, "5", "5", ""),
            ("GPU-6666", None, None, "GPU-6666", "6", ""),
            ("GPU-6666", "1", None, "GPU-6666", "1", "warning: trains on GPU 6"),
            ("MIG-c7384736", None, None, "MIG-c7384736", None, ""),
        ],
    )
    def test_the_environment_then_the_config_then_the_first(
        self, visible: str | None, rank: str | None, device_id: int | None, taken: str, named: str | None, said: str
    ) -> None:
        given = {"CUDA_VISIBLE_DEVICES": visible, "GPU_RANK": rank}
        environ = {name: value for name, value in given.items() if value is not None}
        values, lines = doors.one_gpu(environ, device_id)
        assert values["CUDA_VISIBLE_DEVICES"] == taken
        assert (environ | values).get("GPU_RANK") == named
        assert len(lines) == (1 if said else 0)
        assert said in "".join(lines)

    @pytest.mark.parametrize("visible", ["", "-1", " "])
    def test_a_process_that_may_see_none_is_left_alone(self, visible: str) -> None:
        assert doors.one_gpu({"CUDA_VISIBLE_DEVICES": visible, "GPU_RANK": "3"}, 1) == ({}, [])

    def test_an_order_that_the_user_has_set_stays(self) -> None:
        values, _ = doors.one_gpu({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, None)
        assert values["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"

    @pytest.mark.parametrize(
        ("environ", "device_id", "expected"),
        [
            ({"GPU_RANK": "9"}, None, "there is no GPU 9 here, only GPUs 0, 1, 2, 3, 4, 5, 6, 7"),
            ({"CUDA_VISIBLE_DEVICES": "9"}, None, "there is no GPU 9 here"),
            ({"CUDA_VISIBLE_DEVICES": "GPU-dead"}, None, "there is no GPU GPU-dead here"),
            ({}, 8, "there is no GPU 8 here"),
            ({"GPU_RANK": "two"}, None, "GPU_RANK is the number of a GPU, not 'two'"),
            ({"CUDA_VISIBLE_DEVICES": "2"}, 1, "system.device_id 1 counts in CUDA_VISIBLE_DEVICES=2, which shows 1"),
        ],
    )
    def test_one_that_is_not_there_is_not_replaced_by_the_cpu(
        self, environ: dict[str, str], device_id: int | None, expected: str
    ) -> None:
        with pytest.raises(UsageError) as caught:
            doors.one_gpu(environ, device_id)
        assert expected in str(caught.value)

    def test_a_slice_is_the_one_device_of_its_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-c7384736")
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        assert doors.alone(load_config(preset="debug")).system.device_id == 0

    def test_a_machine_without_gpus_takes_any_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpus, "of_machine", list)
        values, lines = doors.one_gpu({"CUDA_VISIBLE_DEVICES": "3", "GPU_RANK": "3"}, None)
        assert (values["CUDA_VISIBLE_DEVICES"], lines) == ("3", [])

    def test_the_least_loaded_is_printed_for_the_shell(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,3")
        doors.least_loaded()
        assert capsys.readouterr().out == "3\n"


class TestAllGpus:
    @pytest.mark.parametrize(
        ("words", "machine", "nproc", "expected"),
        [
            ([], EIGHT, None, ["--gpus", "all"]),
            (["--debug"], EIGHT, "2", ["--gpus", "all"]),
            (["--system.device", "cpu"], EIGHT, None, ["--nproc", "1"]),
            ([], [], None, ["--nproc", "1"]),
            ([], [], "2", ["--nproc", "2"]),
        ],
    )
    def test_a_process_on_each_or_the_cpu(
        self,
        monkeypatch: pytest.MonkeyPatch,
        words: list[str],
        machine: list[gpus.Gpu],
        nproc: str | None,
        expected: list[str],
    ) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(gpus, "of_machine", lambda: machine)
        monkeypatch.setenv("NPROC", nproc or "")
        assert doors.everything(doors.read_words(words)) == expected

    def test_a_device_of_one_process_is_left_out_aloud(self, capsys: pytest.CaptureFixture[str]) -> None:
        config = load_config(preset="debug", overrides={"system.device_id": 0})
        assert doors.together(config).system.device_id is None
        assert "system.device_id 0 is for one process" in capsys.readouterr().err


class TestWrongUsage:
    @pytest.mark.parametrize(
        ("command", "expected"),
        [
            ("python3 pretrain_main.py --debug --preset production", "--debug is --preset debug, but --preset produc"),
            ("python3 prepare_dataset.py --debug --preset production", "--debug is --preset debug, but --preset prod"),
            ("python3 pretrain_main.py --preset debgu", "did you mean 'debug'?"),
            ("python3 pretrain_main.py --config", "--config needs a value"),
            ("python3 pretrain_main.py --config= --debug", "--config needs a value"),
            ("python3 pretrain_main.py --config --debug", "--config needs a value"),
            ("python3 pretrain_main.py --config a.json --config b.json", "--config is given twice"),
            ("python3 pretrain_main.py --config none.json", "none.json: no such config file"),
            ("python3 pretrain_main.py --max-steps ten", "training.max_steps must be a whole number"),
            ("python3 prepare_dataset.py --max-steps ten", "training.max_steps must be a whole number"),
            ("python3 pretrain_main.py --max-steps 3 --training.max_steps 4", "are one setting"),
            ("python3 pretrain_main.py --learning-rate 1", "did you mean --optim.learning_rate?"),
            ("python3 pretrain_main.py --nproc 2", "pretrain_main.py is one process, and --nproc starts several"),
            ("python3 pretrain_main.py --gpus=0,1", "use run_training.sh"),
            ("WORLD_SIZE=2 python3 pretrain_main.py", "pretrain_main.py is one process, and torchrun starts several"),
            ("GPU_RANK=9 python3 pretrain_main.py", "there is no GPU 9 here"),
        ],
    )
    def test_it_ends_with_two_and_says_what_to_do(self, call: Called, command: str, expected: str) -> None:
        code, out, err = call(command)
        assert (code, out) == (2, ""), err
        assert expected in err
        assert not Path(".checkpoints").exists()

    def test_what_is_given_wins_over_the_doors_own(self, call: Called, tmp_path: Path) -> None:
        (tmp_path / "there.json").write_text('{"output_dir": "from-the-file"}')
        _, out, _ = call("python3 pretrain_main.py --config=there.json --debug --preset debug --print-config")
        assert json.loads(out)["output_dir"] == "from-the-file"
        _, out, _ = call("python3 pretrain_main.py --config there.json --output-dir=from-the-flag --print-config")
        assert json.loads(out)["output_dir"] == "from-the-flag"
        _, out, _ = call("python3 pretrain_main.py there.json --print-config")
        assert json.loads(out)["output_dir"] == "from-the-file"

    @pytest.mark.parametrize("words", ["x", "0,1", "''"])
    def test_a_gpu_that_is_no_number(self, folder: Path, words: str) -> None:
        done = shell(f"./train_gpu.sh {words}", folder)
        assert done.returncode == 2
        assert "usage: train_gpu.sh [GPU_ID]" in done.stderr

    @pytest.mark.parametrize("name", ["pretrain_main.py", "prepare_dataset.py"])
    def test_help_lists_the_flags(self, call: Called, name: str) -> None:
        code, out, _ = call(f"python3 {name} --help")
        assert code == 0
        assert out.startswith(f"Usage: {name} [--debug | --preset NAME] [--config FILE]")


class TestRealRuns:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
    def test_a_file_that_asks_for_cuda_stops_where_there_is_none(
        self, call: Called, monkeypatch: pytest.MonkeyPatch, text_file: Path, tokenizer_dir: Path
    ) -> None:
        """And goes on, in its own batches, on the CPU."""
        monkeypatch.setattr(gpus, "of_machine", list)
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

    @ENOUGH_OR_NONE
    def test_debug_on_all_then_on_one(self, folder: Path, text_file: Path, tokenizer_dir: Path) -> None:
        data = f"--data.path {text_file} --model.tokenizer {tokenizer_dir}"
        done = shell(f"bash run_training.sh --debug {data} 2>&1 | tee training.log", folder, NPROC="2", GPU_RANK="7")
        said = (folder / "training.log").read_text()
        assert (done.returncode, done.stdout) == (0, said), said
        last = [line.split(" | ")[:3] for line in said.splitlines() if "Step [10/10]" in line]
        assert [first for first, *_ in sorted(last)][:2] == ["GPU0:INFO", "GPU1:INFO"], said
        # One model: what each rank says of a step is the same.
        assert len({line[2] for line in last}) == 1, said
        assert said.count("tokenizing") == 1
        assert (folder / ".checkpoints/checkpoints/step-00000010/manifest.json").is_file()

        done = shell(f"./train_gpu.sh 3 --debug --max-steps 11 {data}", folder)
        assert done.returncode == 0, done.stderr
        assert "GPU3:INFO | [GPU 3] Step [11/11] | Loss: " in done.stderr
        assert "tokenizing" not in done.stderr

    def test_the_exit_code_of_training_is_that_of_the_script(self, folder: Path) -> None:
        done = shell("bash scripts/run_training.sh --config scripts/none.json", folder.parent)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: scripts/none.json: no such config file")

"""The machine checks of `torchstone doctor`, and `torchstone env`: what they try, what they find, what they print."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchstone.doctor import environment, gpu, host, kernels
from torchstone.doctor.check import CheckResult, Finding, ok, run_check, warning
from torchstone.doctor.machine import Machine, as_text, failures, verdict
from torchstone.errors import UsageError
from torchstone.launch.gpus import Gpu
from torchstone.models import attention
from torchstone.models.fp8 import Fp8Options

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
Command = Callable[..., tuple[int, str, str]]


@contextmanager
def soft_limit(kind: int, value: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


class TestHost:
    def test_a_disk_is_written_and_read_and_nothing_is_left(self, tmp_path: Path) -> None:
        finding = host.check_disk(tmp_path / "not" / "there", "fix")
        assert finding.status in ("pass", "warn")
        assert finding.text.startswith(f"{tmp_path}: ")
        speeds = [finding.values[f"{verb}_bytes_per_second"] for verb in ("write", "read")]
        assert all(1e5 < speed < 1e12 for speed in speeds)
        assert list(tmp_path.iterdir()) == []

    def test_a_disk_on_which_the_file_does_not_fit_fails(self, tmp_path: Path) -> None:
        with soft_limit(resource.RLIMIT_FSIZE, 2**20):
            finding = host.check_disk(tmp_path, "choose another")
        assert finding.status == "fail"
        assert finding.text.startswith(f"cannot use {tmp_path}: File too large (")
        assert finding.fix == "choose another"
        assert list(tmp_path.iterdir()) == []

    def test_low_limits_are_warnings_with_the_command_that_raises_them(self) -> None:
        with soft_limit(resource.RLIMIT_NOFILE, 256):
            finding = host.check_open_files()
        assert (finding.status, finding.fix, finding.values) == ("warn", "ulimit -n 65536", {"limit": 256})
        with soft_limit(resource.RLIMIT_AS, 2**46):
            finding = host.check_address_space()
        assert (finding.status, finding.fix) == ("warn", "ulimit -v unlimited")
        assert finding.values == {"limit_bytes": 2**46}

    def test_more_threads_than_cores_are_a_warning(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """A container with a core and a half, in which two processes have as many threads as the tests."""
        (tmp_path / "cpu.max").write_text("150000 100000\n")
        monkeypatch.setattr(host, "CPU_QUOTA", tmp_path / "cpu.max")
        assert host.cpu_quota() == 1.5
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(2)
            finding = host.check_threads()
            assert (finding.status, finding.fix) == ("warn", "torchstone train --system.threads 1")
            torch.set_num_threads(1)
            assert host.check_threads().status == "pass"
        finally:
            torch.set_num_threads(threads)

    def test_clocks(self) -> None:
        assert host.check_clock(time.time(), time.monotonic()).status == "pass"
        finding = host.check_clock(time.time() - 5, time.monotonic())
        assert finding.status == "warn"
        assert finding.values["step_seconds"] == pytest.approx(5, abs=1)
        assert host.check_clocks_of_ranks([7.0, 7.25, 7.5]).values == {"spread_seconds": 0.5}
        finding = host.check_clocks_of_ranks([7.0, 4.0, 7.5])
        assert finding.text.startswith("rank 2 is 3.5 s ahead of rank 1: ")
        assert finding.fix is not None


class TestKernels:
    def test_all_that_runs_on_a_cpu_is_right(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Compiling takes seconds; the doctor's own test does it.
        monkeypatch.setattr(torch, "compile", lambda function, fullgraph: function)
        checks = {check.name: check for check in kernels.check_kernels(CPU)}
        right = ["matmul float32", "matmul bfloat16", "matmul float16", "attention sdpa", "attention eager", "loss"]
        for name in right:
            assert (checks[name].status, checks[name].fix) == ("pass", None), checks[name]
            assert 0 < checks[name].values["error"] <= checks[name].values["limit"] / 3
        # They compute in what they say.
        assert checks["matmul bfloat16"].values["error"] > 1e-3 > checks["matmul float16"].values["error"] > 1e-4
        assert checks["attention auto"].values == {"packed": "sdpa", "single": "sdpa"}
        assert checks["attention kernels"].values["backends"] == ["flash", "flex", "flash-attn", "fa3", "fa4"]
        assert checks["matmul float8"].status == "skip"

    def test_fp8_as_training_computes_it_but_on_a_cpu(self) -> None:
        pytest.importorskip("torchao.float8")
        finding = kernels.check_fp8_linear(CPU, Fp8Options(emulate=True))
        assert finding.status == "pass"
        assert 1e-2 < finding.values["error"] < 0.1

    def test_a_kernel_with_one_wrong_element_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = F.scaled_dot_product_attention

        def wrong(*args: Any, **kwargs: Any) -> Tensor:
            output = right(*args, **kwargs).clone()
            output[1, 3, 100, 7] += 0.5
            return output

        monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)
        checks = {check.name: check for check in kernels.check_attention(CPU)}
        assert checks["attention sdpa"].status == "fail"
        assert checks["attention sdpa"].found.startswith("wrong values: error ")
        assert "--model.attention eager" in str(checks["attention sdpa"].fix)
        assert checks["attention eager"].status == "pass"
        # It is more than all roundings to bf16, too.
        assert kernels.check_attention_kernel("sdpa", CPU, torch.bfloat16).status == "fail"

    @pytest.mark.parametrize("fault", [0.99, float("nan")])
    def test_a_wrong_gradient_fails(self, fault: float, monkeypatch: pytest.MonkeyPatch) -> None:
        right = torch.mm

        def wrong(a: Tensor, b: Tensor) -> Tensor:
            if a.dtype == torch.float32:
                b.register_hook(lambda gradient: gradient * fault)
            return right(a, b)

        monkeypatch.setattr(torch, "mm", wrong)
        finding = kernels.check_matmul(CPU, torch.float32)
        assert finding.status == "fail"
        assert finding.values["error"] == (pytest.approx(0.01, rel=1e-3) if fault == 0.99 else None)
        assert kernels.check_matmul(CPU, torch.bfloat16).status == "pass"

    def test_what_is_wrong_fails_and_what_breaks_fails_only_if_it_is_used(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch, "compile", lambda function, fullgraph: lambda x, y: function(x, y) * 1.01)
        assert {check.name: check.status for check in kernels.check_kernels(CPU)}["torch.compile"] == "fail"
        # On a CPU nothing is compiled by default, and sdpa is what auto chooses.
        monkeypatch.setattr(torch, "compile", lambda function, fullgraph: lambda x, y: x @ y[:3])
        monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: args[0] @ args[1])
        monkeypatch.setattr(attention, "_eager_attention", lambda *args, **kwargs: args[0] @ args[1])
        checks = {check.name: check for check in kernels.check_kernels(CPU)}
        assert checks["torch.compile"].status == checks["attention eager"].status == "warn"
        assert checks["torch.compile"].found.startswith("RuntimeError: mat1 and mat2")
        assert checks["torch.compile"].fix == "torchstone train --model.compile none"
        assert checks["attention sdpa"].status == "fail"
        assert str(checks["attention sdpa"].fix).startswith("torchstone train --model.attention eager")


class TestDriver:
    @pytest.fixture(autouse=True)
    def eight_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(gpu, "list_gpus", lambda: [Gpu(number, 0, 0, 2**36, "H100", "") for number in range(8)])
        monkeypatch.setattr(gpu, "driver_versions", lambda: ("570.1", "12.8"))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPUs of this machine")
    def test_a_build_of_torch_that_cannot_use_the_gpus_fails(self) -> None:
        check = run_check("driver", gpu.check_driver, CPU, True)
        assert check.status == "fail"
        assert check.found.startswith(f"8 x H100, driver 570.1 for CUDA 12.8, but torch {torch.__version__} cannot use")
        assert check.values["driver_cuda"] == "12.8"

    def test_gpus_that_nobody_asked_for_are_not_looked_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert gpu.check_driver(CPU, False).status == "skip"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert gpu.check_driver(CPU, True).status == "skip"

    @pytest.mark.parametrize(
        ("built", "fix"), [(None, "pip install"), ("13.0", "install torch for CUDA 12.8: "), ("12.6", "nvidia-smi ")]
    )
    def test_the_fix_fits_the_build(self, built: str | None, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", built)
        assert gpu.driver_fix("12.8").startswith(fix)


class TestPackages:
    def test_every_extra_is_checked(self) -> None:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        del extras["dev"]
        packages = {extra: re.split("[>=]", requirement)[0] for extra, (requirement,) in extras.items()}
        assert packages == {extra: package for extra, (package, _, _) in environment.EXTRAS.items()}

    def test_one_that_is_missing_and_one_that_cannot_be_imported(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "broken-1.5.dist-info").mkdir()
        (tmp_path / "broken-1.5.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.5\n")
        (tmp_path / "broken.py").write_text("print('noise')\nraise ImportError('built for another torch')\n")
        extras = {"missing": ("no-such-package", "no_such", "speed"), "broken": ("broken", "broken", "speed")}
        monkeypatch.setattr(environment, "EXTRAS", extras)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        finding = environment.check_extra("missing")
        assert finding.status == "skip"
        assert finding.text == "not installed; for speed: pip install 'torchstone[missing]'"
        finding = environment.check_extra("broken")
        assert finding.status == "warn"
        assert finding.text == "broken 1.5 cannot be imported: ImportError: built for another torch"
        assert str(finding.fix).startswith("pip install 'torchstone[broken]'")


class TestChecks:
    def test_an_unexpected_error_fails_one_check_with_its_message(self) -> None:
        def crash() -> Finding:
            raise ZeroDivisionError("of a driver\nand more")

        def refuse() -> Finding:
            raise UsageError("the driver does not answer", "restart it")

        check = run_check("kernel", crash)
        assert (check.status, check.found) == ("fail", "ZeroDivisionError: of a driver")
        assert str(check.fix).startswith("torchstone env")
        assert run_check("driver", refuse) == CheckResult(
            "driver", "fail", "the driver does not answer", "restart it", {}
        )

    def test_the_table_has_the_first_rank_of_each_host_and_what_is_wrong_on_others(self) -> None:
        slow = run_check("GPU speed", warning, "slowed down by heat", "nvidia-smi -q")
        lost = run_check("disk", lambda: Finding("fail", "read-only", "mount -o remount,rw /"))
        fine = run_check("disk", ok, "fast")
        machines = [Machine("a", {0: [fine], 1: [fine, slow]}), Machine("b", {2: [lost]})]
        assert as_text(machines).splitlines() == [
            "a:",
            "PASS  disk               fast",
            "WARN  GPU speed, rank 1  slowed down by heat",
            "      fix: nvidia-smi -q",
            "",
            "machine on a: ok (2 pass, 1 warn)",
            "",
            "b:",
            "FAIL  disk  read-only",
            "      fix: mount -o remount,rw /",
            "",
            "machine on b: failed (1 fail)",
        ]
        assert failures(machines) == ["disk on b: read-only"]
        assert verdict(machines, failures(machines)) == "\ndoctor: failed, 1 error, 1 warning\n"
        assert as_text(machines[:1]).startswith("PASS  disk   ")
        assert verdict(machines[:1], []) == "\ndoctor: ok, 1 warning\n"

    def test_the_settings_that_fixes_name_exist(self) -> None:
        sources = "".join(path.read_text() for path in (ROOT / "src/torchstone/doctor").glob("*.py"))
        keys = set(re.findall(r"--(\w+\.\w+)", sources))
        assert {"model.attention", "model.compile", "model.loss", "system.threads"} <= keys
        help_text = (ROOT / "docs/config-keys.md").read_text()
        assert [key for key in keys if f"`{key}`" not in help_text] == []


def test_the_doctor_on_two_ranks_checks_everything_although_a_disk_is_read_only() -> None:
    """All of it, on real conditions: a folder in which nobody can create a file, and a low limit on open files."""
    options = "--only machine --nproc 2 --device cpu --output-dir /proc --json"
    command = f"ulimit -Sn 256; {sys.executable} -m torchstone doctor {options}"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=300)
    assert process.returncode == 8, process.stderr
    report = json.loads(process.stdout)
    assert report.keys() == {"ok", "errors", "machines", "collectives"}
    (machine,) = report["machines"]
    assert (machine["host"], machine["ok"], report["ok"]) == (socket.gethostname(), False, False)
    checks = {check["name"]: check for check in machine["checks"]}
    assert len(checks) == len(machine["checks"]) == 27
    assert all(check.keys() == {"rank", "name", "status", "found", "fix", "values"} for check in checks.values())
    assert {check["rank"] for check in checks.values()} == {0}
    assert all((check["fix"] is None) == (check["status"] in ("pass", "skip")) for check in checks.values())
    assert [name for name, check in checks.items() if check["status"] == "fail"] == ["disk"]
    assert checks["disk"]["found"].startswith("cannot use /proc: ")
    assert report["errors"] == [f"disk: {checks['disk']['found']}"]
    assert report["errors"][0] in process.stderr
    assert checks["open files"]["status"] == "warn"
    assert checks["torch.compile"]["values"]["error"] < 1e-5
    assert checks["clocks of ranks"]["values"]["spread_seconds"] < 1
    assert report["collectives"] == []


class TestEnv:
    def test_it_has_what_a_report_needs_and_neither_secrets_nor_names(
        self, torchstone: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        secrets = {
            "HF_TOKEN": "abc-1", "TORCHSTONE_RDZV_SECRET": "abc-2", "NCCL_API_KEY": "abc-3", "TORCH_PASSWORD": "abc-4",
            "HF_ENDPOINT": "https://ann:abc-5@mirror.example/x", "CUDA_NOTE": "uses hf_abcdefgh6 here",
        }  # fmt: skip
        plain = {"NCCL_DEBUG": "INFO", "TORCH_HOME": "/home/ann/x:/data/ann2", "TOKENIZERS_PARALLELISM": "true"}
        names = {"HOME": "/home/ann", "LOGNAME": "ann", "OMP_PLACES": f"on {socket.gethostname()}", "OTHER_ABC": "1"}
        for name, value in (secrets | plain | names).items():
            monkeypatch.setenv(name, value)
        code, text, _ = torchstone("env")
        values = json.loads(torchstone("env", "--json")[1])
        assert code == 0
        variables = values["variables"]
        assert all("abc" not in value for value in variables.values())
        assert variables["HF_TOKEN"] == "(hidden)"
        assert variables["HF_ENDPOINT"] == "https://(hidden)@mirror.example/x"
        assert (variables["NCCL_DEBUG"], variables["TOKENIZERS_PARALLELISM"]) == ("INFO", "true")
        assert (variables["TORCH_HOME"], variables["OMP_PLACES"]) == ("~/x:/data/ann2", "on HOST")
        assert "OTHER_ABC" not in variables
        assert values["packages"]["torch"] == torch.__version__
        assert values["memory_bytes"] > 2**30
        assert f"  torch {torch.__version__}\n" in text
        assert "  HF_TOKEN (hidden)\n" in text
        assert "abc" not in text

"""Which GPUs a machine has, which of them CUDA_VISIBLE_DEVICES allows, and which of them `--gpus` chooses."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pynvml
import pytest

from torchstone.errors import UsageError
from torchstone.launch.gpus import Gpu, choose, filter_visible, list_gpus, visible_gpus, worker_environment

GIB = 2**30
UUIDS = ["GPU-8932f937-d72c", "GPU-8932aaaa-0001", "GPU-11112222-3333", "GPU-5f5f5f5f-7777"]


def gpu(number: int, utilization: int = 0, used: int = 0) -> Gpu:
    return Gpu(number, utilization, used, 80 * GIB, "H100", UUIDS[number])


def numbers(devices: list[Gpu]) -> list[int]:
    return [device.index for device in devices]


FOUR = [gpu(0, 90, 5), gpu(1, 0, 7), gpu(2, 0, 3), gpu(3, 40, 1)]


class TestChoose:
    @pytest.mark.parametrize(
        ("spec", "expected"),
        [
            ("all", [0, 1, 2, 3]),
            ("0", [0]),
            ("3,0", [3, 0]),
            (" 2, 1 ", [2, 1]),
            ("auto", [2]),
            ("auto:1", [2]),
            ("auto:2", [1, 2]),
            ("auto:3", [1, 2, 3]),
            ("auto:4", [0, 1, 2, 3]),
        ],
    )
    def test_a_spec_chooses_these_gpus(self, spec: str, expected: list[int]) -> None:
        assert numbers(choose(spec, FOUR)) == expected

    def test_utilization_comes_before_memory_and_memory_before_the_number(self) -> None:
        assert numbers(choose("auto", [gpu(0, 1, 0), gpu(1, 0, 70 * GIB)])) == [1]
        assert numbers(choose("auto", [gpu(0, 0, 2), gpu(1, 0, 1)])) == [1]
        assert numbers(choose("auto", [gpu(3), gpu(1), gpu(2)])) == [1]

    def test_all_keeps_the_order_of_cuda_visible_devices_and_numbers_are_those_of_the_machine(self) -> None:
        visible = filter_visible(FOUR, "3,1")
        assert numbers(choose("all", visible)) == [3, 1]
        assert numbers(choose("1,3", visible)) == [1, 3]

    @pytest.mark.parametrize(
        ("spec", "expected"),
        [
            ("5", "there is no GPU 5, only GPUs 0, 1, 2, 3"),
            ("0,0", "GPU 0 is named twice"),
            ("0,,1", "'' is not a GPU"),
            ("", "'' is not a GPU"),
            ("-1", "'-1' is not a GPU"),
            ("two", "use all, auto, auto:2, or numbers such as 0,3"),
            ("auto2", "'auto2' is not a GPU"),
            ("auto:0", "'0' is not a number of GPUs"),
            ("auto:", "'' is not a number of GPUs"),
            ("auto:x", "use auto for one GPU, auto:2 for two"),
            ("auto:5", "there are only 4: GPUs 0, 1, 2, 3\n  use auto:4 for all of them"),
        ],
    )
    def test_an_error_says_what_to_type_instead(self, spec: str, expected: str) -> None:
        with pytest.raises(UsageError) as caught:
            choose(spec, FOUR)
        assert str(caught.value).startswith(f"--gpus {spec}: ")
        assert expected in str(caught.value)

    def test_a_hidden_gpu_cannot_be_chosen(self) -> None:
        with pytest.raises(UsageError, match=r"no GPU 0, only GPU 2\n.*that CUDA_VISIBLE_DEVICES hides"):
            choose("0", filter_visible(FOUR, "2"))

    @pytest.mark.parametrize("spec", ["all", "0", "auto", "auto:2", "nonsense"])
    def test_without_gpus_every_spec_is_an_error(self, spec: str) -> None:
        with pytest.raises(UsageError, match="there are no GPUs to use"):
            choose(spec, [])


class TestVisible:
    @pytest.mark.parametrize(
        ("allowed", "expected"),
        [
            (None, [0, 1, 2, 3]),
            ("", []),
            ("-1", []),
            ("2", [2]),
            ("2,1", [2, 1]),
            (" 2 , 1", [2, 1]),
            ("0,2,-1,1", [0, 2]),
            ("0,9,1", [0]),
            ("0,x,1", [0]),
            ("1gpu,2", [1, 2]),
            ("1,1", []),
            ("GPU-1111", [2]),
            ("GPU-8932f,GPU-5", [0, 3]),
            ("GPU-8932", []),
            ("GPU-1111,GPU-dead,GPU-5", [2]),
            ("GPU-5,GPU-5f5f5f5f-7777", []),
        ],
    )
    def test_cuda_visible_devices_is_read_as_cuda_reads_it(self, allowed: str | None, expected: list[int]) -> None:
        assert numbers(filter_visible(FOUR, allowed)) == expected

    def test_a_mig_slice_is_refused_with_the_way_to_train_on_it(self) -> None:
        with pytest.raises(UsageError, match="names MIG-c7384736, a MIG slice.*\n.*pretrain_main.py"):
            filter_visible(FOUR, "MIG-c7384736")


class TestWorkerEnvironment:
    def test_a_worker_sees_one_gpu_by_its_number_in_the_order_of_nvidia_smi(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
        assert worker_environment(gpu(3)) == {
            "CUDA_VISIBLE_DEVICES": "3",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "GPU_RANK": "3",
        }


class Library(ModuleType):
    """The part of pynvml that is used, for a machine with GPUs, with the real errors."""

    NVMLError = pynvml.NVMLError
    NVMLError_LibraryNotFound = pynvml.NVMLError_LibraryNotFound
    NVMLError_DriverNotLoaded = pynvml.NVMLError_DriverNotLoaded
    NVMLError_NotSupported = pynvml.NVMLError_NotSupported

    def __init__(self, devices: list[Gpu], at_start: int | None = None, silent: tuple[int, ...] = ()) -> None:
        super().__init__("pynvml")
        self.devices, self.at_start, self.silent = devices, at_start, silent
        self.open = 0

    def nvmlInit(self) -> None:
        if self.at_start is not None:
            raise pynvml.NVMLError(self.at_start)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> Gpu:
        return self.devices[number]

    def nvmlDeviceGetName(self, handle: Gpu) -> str:
        return handle.name

    def nvmlDeviceGetUUID(self, handle: Gpu) -> str:
        return handle.uuid

    def nvmlDeviceGetUtilizationRates(self, handle: Gpu) -> SimpleNamespace:
        self._may_refuse(handle)
        return SimpleNamespace(gpu=handle.utilization, memory=0)

    def nvmlDeviceGetMemoryInfo(self, handle: Gpu) -> SimpleNamespace:
        self._may_refuse(handle)
        return SimpleNamespace(used=handle.memory_used, total=handle.memory_total)

    def _may_refuse(self, handle: Gpu) -> None:
        if handle.index in self.silent:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


class TestVisibleGpus:
    @pytest.fixture(autouse=True)
    def no_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def use(self, monkeypatch: pytest.MonkeyPatch, library: Library) -> Library:
        monkeypatch.setitem(sys.modules, "pynvml", library)
        return library

    def test_all_gpus_are_listed_with_their_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        library = self.use(monkeypatch, Library(FOUR))
        assert visible_gpus() == FOUR
        assert library.open == 0

    def test_the_variable_chooses_gpus_and_their_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.use(monkeypatch, Library(FOUR))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-1111")
        assert visible_gpus() == [FOUR[3], FOUR[2]]
        assert list_gpus() == FOUR

    @pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
    def test_without_library_or_driver_there_are_no_gpus(self, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        self.use(monkeypatch, Library(FOUR, at_start=code))
        assert visible_gpus() == []

    def test_a_broken_driver_is_an_error_unless_gpus_are_hidden(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.use(monkeypatch, Library(FOUR, at_start=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH))
        with pytest.raises(UsageError, match=r"(?i)does not answer: .*mismatch"):
            visible_gpus()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert visible_gpus() == []

    def test_a_gpu_of_unknown_load_counts_as_busy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.use(monkeypatch, Library([gpu(0, 0, 5), gpu(1, 60, 9)], silent=(0,)))
        silent, busy = visible_gpus()
        assert (silent.utilization, silent.memory_used, silent.memory_total) == (100, 0, 0)
        assert choose("auto", [silent, busy]) == [busy]

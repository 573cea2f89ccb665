"""Which GPUs there are by NVIDIA's library and CUDA_VISIBLE_DEVICES, and which of them `--gpus` takes."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pynvml
import pytest

from torchstone.errors import UsageError
from torchstone.launch.gpus import Gpu, choose, found, of_machine, visible, worker_environment

GIB = 2**30
UUIDS = ["GPU-8932f937-d72c", "GPU-8932aaaa-0001", "GPU-11112222-3333", "GPU-5f5f5f5f-7777"]


def gpu(number: int, utilisation: int = 0, used: int = 0) -> Gpu:
    return Gpu(number, utilisation, used, 80 * GIB, "H100", UUIDS[number])


def numbers(devices: list[Gpu]) -> list[int]:
    return [device.number for device in devices]


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
    def test_what_a_spec_takes(self, spec: str, expected: list[int]) -> None:
        assert numbers(choose(spec, FOUR)) == expected

    def test_utilisation_comes_before_memory_and_memory_before_the_number(self) -> None:
        assert numbers(choose("auto", [gpu(0, 1, 0), gpu(1, 0, 70 * GIB)])) == [1]
        assert numbers(choose("auto", [gpu(0, 0, 2), gpu(1, 0, 1)])) == [1]
        assert numbers(choose("auto", [gpu(3), gpu(1), gpu(2)])) == [1]

    def test_all_keeps_the_order_of_cuda_visible_devices_and_numbers_are_the_machines(self) -> None:
        seen = visible(FOUR, "3,1")
        assert numbers(choose("all", seen)) == [3, 1]
        assert numbers(choose("1,3", seen)) == [1, 3]

    @pytest.mark.parametrize(
        ("spec", "expected"),
        [
            ("5", "there is no GPU 5, only GPUs 0, 1, 2, 3"),
            ("0,0", "GPU 0 is named twice"),
            ("0,,1", "'' is no GPU"),
            ("", "'' is no GPU"),
            ("-1", "'-1' is no GPU"),
            ("two", "write all, auto, auto:2, or numbers as in 0,3"),
            ("auto2", "'auto2' is no GPU"),
            ("auto:0", "'0' is not a number of GPUs"),
            ("auto:", "'' is not a number of GPUs"),
            ("auto:x", "auto takes one, auto:2 takes two"),
            ("auto:5", "more than there are: GPUs 0, 1, 2, 3\n  auto:4 takes them all"),
        ],
    )
    def test_what_cannot_be_meant_is_answered_with_what_could(self, spec: str, expected: str) -> None:
        with pytest.raises(UsageError) as caught:
            choose(spec, FOUR)
        assert str(caught.value).startswith(f"--gpus {spec}: ")
        assert expected in str(caught.value)

    def test_one_that_is_hidden_is_not_there(self) -> None:
        with pytest.raises(UsageError, match=r"no GPU 0, only GPU 2\n.*what CUDA_VISIBLE_DEVICES hides"):
            choose("0", visible(FOUR, "2"))

    @pytest.mark.parametrize("spec", ["all", "0", "auto", "auto:2", "nonsense"])
    def test_a_machine_without_gpus_says_so(self, spec: str) -> None:
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
        assert numbers(visible(FOUR, allowed)) == expected

    def test_slices_of_a_gpu_are_refused_with_the_way_to_train_on_one(self) -> None:
        with pytest.raises(UsageError, match="names MIG-c7384736, a slice of a GPU.*\n.*pretrain_main.py"):
            visible(FOUR, "MIG-c7384736")


class TestWorkerEnvironment:
    def test_one_gpu_by_its_number_in_the_order_it_was_counted_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
        assert worker_environment(gpu(3)) == {
            "CUDA_VISIBLE_DEVICES": "3",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "GPU_RANK": "3",
        }


class Library(ModuleType):
    """As much of pynvml as is asked, for a machine with GPUs; its errors are the real ones."""

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
        return SimpleNamespace(gpu=handle.utilisation, memory=0)

    def nvmlDeviceGetMemoryInfo(self, handle: Gpu) -> SimpleNamespace:
        self._may_refuse(handle)
        return SimpleNamespace(used=handle.memory_used, total=handle.memory_total)

    def _may_refuse(self, handle: Gpu) -> None:
        if handle.number in self.silent:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


class TestFound:
    @pytest.fixture(autouse=True)
    def no_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def use(self, monkeypatch: pytest.MonkeyPatch, library: Library) -> Library:
        monkeypatch.setitem(sys.modules, "pynvml", library)
        return library

    def test_all_of_the_machine_with_their_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        library = self.use(monkeypatch, Library(FOUR))
        assert found() == FOUR
        assert library.open == 0

    def test_the_variable_says_which_and_in_which_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.use(monkeypatch, Library(FOUR))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-1111")
        assert found() == [FOUR[3], FOUR[2]]
        assert of_machine() == FOUR

    @pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
    def test_no_library_or_no_driver_is_no_gpu(self, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        self.use(monkeypatch, Library(FOUR, at_start=code))
        assert found() == []

    def test_a_driver_that_does_not_work_is_not_taken_for_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.use(monkeypatch, Library(FOUR, at_start=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH))
        with pytest.raises(UsageError, match=r"(?i)does not answer: .*mismatch"):
            found()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert found() == []

    def test_one_that_does_not_tell_its_load_is_taken_for_busy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.use(monkeypatch, Library([gpu(0, 0, 5), gpu(1, 60, 9)], silent=(0,)))
        silent, busy = found()
        assert (silent.utilisation, silent.memory_used, silent.memory_total) == (100, 0, 0)
        assert choose("auto", [silent, busy]) == [busy]

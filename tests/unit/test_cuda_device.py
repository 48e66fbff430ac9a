"""A GPU of which only the edge is simulated: what torch and the driver are asked, and when."""

import ctypes
import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvstrata.storage.mapping import HostMapping
from kvstrata.transfer import cuda_device, cuda_measure
from kvstrata.transfer.cuda_device import open_device
from kvstrata.transfer.driver import DeviceFault
from kvstrata.transfer.guarded import Copied, RankSlots, split_runs
from kvstrata.transfer.lanes import Handle

LAYERS, BLOCKS, PAGE, PER_SLOT = 3, 6, 64, 2
ROW = LAYERS * PAGE


class Gpu:
    """``torch.cuda``, and the calls that copy: at once, in plain memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.broken: str | None = None
        self.kernel_seconds = 1.0
        self.now = 0.0
        self.registered: dict[int, int] = {}
        gpu = self

        class Stream:
            def __init__(self, device: object = None, priority: int = 0) -> None:
                self.cuda_stream = 7

        class Event:
            def __init__(self, *, blocking: bool = False) -> None:
                assert blocking, "a thread that waits must not spin"

            def record(self, stream: object) -> None:
                gpu.call("record")

            def synchronize(self) -> None:
                gpu.call("synchronize")

        fakes: dict[str, Any] = {
            "Stream": Stream,
            "Event": Event,
            "set_device": lambda _: self.call("set_device"),
            "current_stream": lambda _: Stream(),
            "stream": self.stream,
            "cudart": lambda: SimpleNamespace(
                cudaHostRegister=self.register, cudaHostUnregister=self.unregister
            ),
            "is_available": lambda: True,
            "get_device_name": lambda: "a simulated GPU",
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        empty = torch.empty

        def unpinned(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            return empty(*shape, **options)

        monkeypatch.setattr(torch, "empty", unpinned)
        monkeypatch.setattr(cuda_measure, "_TOTAL_BYTES", 1 << 16)
        monkeypatch.setattr("kvstrata.transfer.cuda_measure.perf_counter", lambda: self.now)
        for module in (cuda_device, cuda_measure):
            monkeypatch.setattr(module, "find_copy_call", lambda *, is_rocm: self.dma)
            monkeypatch.setattr(module, "find_kernel", lambda: self.kernel)

    def call(self, name: str) -> None:
        self.log.append(name)
        if self.broken == name:
            raise RuntimeError("CUDA error: an illegal memory access\nmore of it")

    def stream(self, stream: object) -> AbstractContextManager[None]:
        return nullcontext()

    def register(self, address: int, length: int, flags: int) -> int:
        self.registered[address] = length
        return 1 if self.broken == "register" else 0

    def unregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    @property
    def dma(self) -> Any:
        def copy(targets: Any, sources: Any, lengths: Any, stream: int) -> None:
            assert stream == 7
            self._copy("dma", targets, sources, lengths)

        call: Any = copy
        call.name = "simulated DMA"
        return call

    def kernel(self, targets: Any, sources: Any, lengths: Any, device: object) -> None:
        self._copy("kernel", targets, sources, lengths)

    def _copy(self, way: str, targets: Any, sources: Any, lengths: Any) -> None:
        self.call(way)
        self.now += 1.0 if way == "dma" else self.kernel_seconds
        for target, source, length in zip(
            *map(np.ndarray.tolist, (targets, sources, lengths)), strict=True
        ):
            ctypes.memmove(target, source, length)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


class Bed:
    """A device with pages, and a mapping with slots."""

    def __init__(self) -> None:
        self.cache = torch.randint(0, 256, (LAYERS, BLOCKS, PAGE), dtype=torch.uint8)
        self.device = open_device([list(self.cache)])
        self.mapping = HostMapping.create(3, 4096, b"server")
        self.slots = RankSlots(self.mapping, 0, (PER_SLOT * ROW,))

    def run(self, make: Callable[..., Callable[[Handle[Copied]], Copied]], block: int) -> Copied:
        runs = split_runs([block, block + 1], [(1, 0)], per_slot=(PER_SLOT,), absent=-1)
        return make(self.slots, runs, self.device.fence())(Handle())

    def check_both_ways(self) -> None:
        before = self.cache.clone()
        assert self.run(self.device.save_job, 2) is Copied.WHOLE
        assert self.run(self.device.load_job, 4) is Copied.WHOLE
        assert torch.equal(self.cache[:, 4:6], before[:, 2:4])
        assert torch.equal(self.cache[:, :4], before[:, :4])


def test_blocks_go_to_the_host_and_back(gpu: Gpu) -> None:
    bed = Bed()
    gpu.log.clear()
    bed.check_both_ways()
    per_job = ["record", "set_device", "synchronize", "dma", "record", "synchronize"]
    assert gpu.log == per_job * 2


def test_the_kernel_copies_small_pages_once_it_reaches_them(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.kernel_seconds = 0.5
    with caplog.at_level(logging.INFO):
        bed = Bed()
    assert "loads by kernel up to 192 bytes, then simulated DMA" in caplog.text
    gpu.log.clear()
    bed.check_both_ways()
    assert "kernel" not in gpu.log
    bed.device.pin(bed.mapping, lambda: False)
    gpu.log.clear()
    bed.check_both_ways()
    assert gpu.log.count("kernel") == 2
    assert "dma" not in gpu.log
    bed.device.let_go()
    assert gpu.registered == {}


def test_without_a_gain_the_copy_engines_do_it(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        bed = Bed()
    assert "loads by simulated DMA" in caplog.text
    bed.device.pin(bed.mapping, lambda: False)
    gpu.log.clear()
    bed.check_both_ways()
    assert "kernel" not in gpu.log


@pytest.mark.parametrize("broken", ["set_device", "synchronize"])
def test_what_fails_on_the_gpu_is_a_fault(gpu: Gpu, broken: str) -> None:
    bed = Bed()
    gpu.broken = broken
    with pytest.raises(DeviceFault, match=r"an illegal memory access$"):
        bed.run(bed.device.save_job, 2)


def test_a_fence_that_cannot_be_had_is_the_fault_of_its_job(gpu: Gpu) -> None:
    bed = Bed()
    gpu.broken = "record"
    fence = bed.device.fence()
    gpu.broken = None
    with pytest.raises(DeviceFault):
        fence.wait()


def test_memory_that_the_driver_refuses_stays_as_it_is(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    bed = Bed()
    gpu.broken = "register"
    bed.device.pin(bed.mapping, lambda: False)
    assert "cudaHostRegister failed with CUDA error 1" in caplog.text
    gpu.broken = None
    bed.check_both_ways()


def test_a_gpu_that_cannot_be_measured_still_copies(
    gpu: Gpu, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object) -> None:
        raise DeviceFault("out of memory")

    monkeypatch.setattr(cuda_device, "measure", measure)
    Bed().check_both_ways()
    assert "cannot be measured: out of memory" in caplog.text


def test_a_way_that_fails_is_not_chosen(gpu: Gpu) -> None:
    gpu.broken = "kernel"
    gpu.kernel_seconds = 0.1
    measured = cuda_measure.measure(torch.device("cpu"), gpu.dma, gpu.kernel, [1 << 12])
    assert {m.by_kernel for m in measured} == {False}


def test_the_report_of_the_doctor(gpu: Gpu, capsys: pytest.CaptureFixture[str]) -> None:
    real = torch.device
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "device", lambda *_: real("cpu"))
        assert cuda_measure.main(["4096"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpu"] == "a simulated GPU"
    assert found["report"].startswith("loads by simulated DMA (")
    assert {m["piece_bytes"] for m in found["measured"]} == {4096}


def test_where_torch_has_no_gpu_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cuda_measure.main([]) == 0
    assert "problem" in json.loads(capsys.readouterr().out)

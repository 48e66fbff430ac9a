"""A GPU of which only the edge is simulated: what torch and the driver are asked, and when."""

import ctypes
import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvstrata.core.interpreter import SWITCH_SECONDS
from kvstrata.storage.mapping import HostMapping
from kvstrata.transfer import cuda_device, cuda_driver, cuda_measure, measure
from kvstrata.transfer.cuda_device import open_device
from kvstrata.transfer.cuda_ways import Ways
from kvstrata.transfer.driver import DeviceFault
from kvstrata.transfer.guarded import Copied, RankSlots, split_runs
from kvstrata.transfer.lanes import Handle, Job
from kvstrata.transfer.layered import LayerGates, Part

LAYERS, BLOCKS, PAGE, PER_SLOT = 3, 6, 64, 2
ROW = LAYERS * PAGE


class Gpu:
    """``torch.cuda``, and the calls that copy: at once, in plain memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.broken: str | None = None
        self.error: Exception = RuntimeError("CUDA error: an illegal memory access\nmore of it")
        self.kernel_seconds = 1.0
        self.now = 0.0
        self.registered: dict[int, int] = {}
        self.streams: list[tuple[object, int | None]] = []  # that were made: device, priority
        self.ways = Ways(
            self._call("single"), self._call("pinned"), self._call("dma"), self._kernel
        )
        gpu = self

        class Stream:
            priority_range = staticmethod(lambda: (3, -5))  # of this GPU: the least, the greatest

            def __init__(self, device: object = None, priority: int | None = None) -> None:
                gpu.streams.append((device, priority))
                self.cuda_stream = 7

            def wait_event(self, event: object) -> None:
                assert isinstance(event, Event)
                gpu.call("wait_event")

            def synchronize(self) -> None:
                gpu.call("idle")

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
            "cudart": self.runtime,
            "mem_get_info": lambda: self.call("mem_get_info"),
            "is_available": lambda: True,
            "get_device_name": lambda: "a simulated GPU",
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        library = SimpleNamespace(
            cuMemHostRegister_v2=self.register,
            cuMemHostUnregister=self.unregister,
            hipHostRegister=self.register,
            hipHostUnregister=self.unregister,
            hipGetLastError=lambda: self.call("drain"),
        )
        monkeypatch.setattr(cuda_driver, "driver_library", lambda *, is_rocm: library)
        empty = torch.empty

        def unpinned(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            return empty(*shape, **options)

        monkeypatch.setattr(torch, "empty", unpinned)
        monkeypatch.setattr(cuda_measure, "_TOTAL_BYTES", 1 << 16)
        monkeypatch.setattr("kvstrata.transfer.cuda_measure.perf_counter", lambda: self.now)
        for module in (cuda_device, cuda_measure):
            monkeypatch.setattr(module, "find_ways", self.find_ways)

    def call(self, name: str) -> None:
        self.log.append(name)
        if self.broken == name:
            raise self.error

    def find_ways(self, device: object) -> Ways:
        assert "set_device" in self.log, "the driver says nothing before torch has begun with it"
        return self.ways

    def stream(self, stream: object) -> AbstractContextManager[None]:
        return nullcontext()

    def runtime(self) -> None:
        raise AssertionError("it would keep a refusal, and tell it of the thread's next kernel")

    def register(self, address: ctypes.c_void_p, length: ctypes.c_size_t, flags: int) -> int:
        assert self.log[-1] == "mem_get_info", "the driver wants a thread that torch has made ready"
        assert flags == 1, "for all GPUs of this process"
        self.registered[address.value or 0] = length.value
        return 1 if self.broken == "register" else 0

    def unregister(self, address: ctypes.c_void_p) -> int:
        assert self.log[-1] == "mem_get_info"
        del self.registered[address.value or 0]
        return 0

    def _call(self, name: str) -> Any:
        def copy(targets: Any, sources: Any, lengths: Any, stream: int) -> None:
            assert stream == 7
            self._copy(name, targets, sources, lengths)

        call: Any = copy
        call.name = f"simulated {name}"
        return call

    def _kernel(self, targets: Any, sources: Any, lengths: Any, device: object) -> None:
        self._copy("kernel", targets, sources, lengths)

    def _copy(self, way: str, targets: Any, sources: Any, lengths: Any) -> None:
        self.call(way)
        self.now += self.kernel_seconds if way == "kernel" else 1.0
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
        self.slots = RankSlots(self.mapping, 0, (PER_SLOT * ROW,), (0,))

    def run(self, make: Callable[..., Job[Copied]], block: int) -> Copied | None:
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
    per_job = ["record", "set_device", "synchronize", "single", "record", "synchronize"]
    assert gpu.log == per_job * 2


def test_its_streams_have_the_lowest_priority_so_that_the_engines_kernels_go_first(
    gpu: Gpu,
) -> None:
    Bed()
    assert {priority for device, priority in gpu.streams if device is not None} == {3}


@pytest.mark.parametrize(("has_batches", "most"), [(True, None), (False, 512)])
def test_where_each_span_is_a_call_few_of_them_are_asked_for_at_a_time(
    gpu: Gpu, has_batches: bool, most: int | None
) -> None:
    if not has_batches:
        gpu.ways = gpu.ways._replace(batch=None)
    device: Any = Bed().device
    for queue in (device._loads, device._saves):
        assert queue.limits.spans_in_flight == most


def test_a_forward_and_its_load_wait_for_each_other_on_their_streams(gpu: Gpu) -> None:
    bed = Bed()
    bed.mapping.data[1, : PER_SLOT * ROW] = 7
    runs = split_runs([2, 3], [(1, 0)], per_slot=(PER_SLOT,), absent=-1)
    gates, part = LayerGates(LAYERS), Part(bed.slots, runs)
    job = bed.device.load_layers_job([part], bed.device.fence(), gates)
    gpu.log.clear()
    assert job(Handle()) is Copied.WHOLE
    of_a_layer = ["single", "record", "record"]  # of the chunk, and behind the layer
    assert gpu.log == ["set_device", "wait_event", *of_a_layer * LAYERS, *["synchronize"] * LAYERS]
    assert (bed.cache[:, 2:4] == 7).all()
    gpu.log.clear()
    for layer in range(LAYERS):
        event = gates.event(layer)
        assert event is not None
        bed.device.follow(event)
    assert gpu.log == ["wait_event"] * LAYERS


def test_the_kernel_loads_small_pages_once_it_reaches_them(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.kernel_seconds = 0.5
    with caplog.at_level(logging.INFO):
        bed = Bed()
    assert re.search(
        r"loads by kernel \(.* GiB/s\) up to 192 bytes, then simulated dma", caplog.text
    )
    gpu.log.clear()
    bed.check_both_ways()
    assert not {"kernel", "dma"} & {*gpu.log}
    bed.device.pin(bed.mapping, lambda: False)
    gpu.log.clear()
    bed.check_both_ways()
    assert (gpu.log.count("kernel"), gpu.log.count("dma")) == (1, 1)  # a load, and a save
    assert "single" not in gpu.log
    bed.device.let_go()
    assert gpu.registered == {}


def test_threads_hand_the_interpreter_over_sooner(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(sys, "getswitchinterval", lambda: 0.005)
    monkeypatch.setattr(sys, "setswitchinterval", asked.append)
    Bed()
    assert asked == [SWITCH_SECONDS]


def test_without_a_gain_the_copy_engines_do_it(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        bed = Bed()
    assert "loads by simulated dma" in caplog.text
    bed.device.pin(bed.mapping, lambda: False)
    gpu.log.clear()
    bed.check_both_ways()
    assert gpu.log.count("dma") == 2
    assert not {"kernel", "single"} & {*gpu.log}


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


@pytest.mark.parametrize(
    ("hip", "call"), [(None, "cuMemHostRegister_v2"), ("7.1", "hipHostRegister")]
)
def test_memory_that_the_driver_refuses_stays_as_it_is(
    gpu: Gpu,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    hip: str | None,
    call: str,
) -> None:
    """And nobody else is told of it: of ROCm the driver is the runtime, which keeps it."""
    bed = Bed()
    monkeypatch.setattr(torch.version, "hip", hip)
    gpu.broken = "register"
    bed.device.pin(bed.mapping, lambda: False)
    assert f"{call} failed with GPU error 1" in caplog.text
    assert ("drain" in gpu.log) == (hip is not None)
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


class OutOfResources(Exception):
    """As triton's, which are no errors at run time."""


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError("invalid device function\nmore of it"), "invalid device function"),
        (OutOfResources("at 1:2:\nshared memory"), "shared memory"),
        (subprocess.CalledProcessError(1, ["gcc"]), "Command '['gcc']' returned non-zero"),
        (ValueError(), "no message"),
    ],
)
def test_a_kernel_that_fails_is_left_out(
    gpu: Gpu, caplog: pytest.LogCaptureFixture, error: Exception, why: str
) -> None:
    gpu.kernel_seconds = 0.1
    gpu.broken, gpu.error = "kernel", error
    with caplog.at_level(logging.INFO):
        bed = Bed()
    assert f"; no kernel: the copy kernel has failed: {type(error).__name__}: {why}" in caplog.text
    assert "loads by simulated dma (" in caplog.text
    assert gpu.log[-2:] == ["kernel", "idle"]
    bed.device.pin(bed.mapping, lambda: False)
    gpu.log.clear()
    bed.check_both_ways()
    assert gpu.log.count("dma") == 2


def test_a_kernel_that_fails_later_is_a_fault(gpu: Gpu) -> None:
    gpu.kernel_seconds = 0.1
    bed = Bed()
    bed.device.pin(bed.mapping, lambda: False)
    gpu.broken, gpu.error = "kernel", OutOfResources("shared memory")
    with pytest.raises(DeviceFault, match="OutOfResources: shared memory"):
        bed.run(bed.device.load_job, 2)


def test_batches_that_are_refused_give_place_to_single_copies(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.broken, gpu.error = "dma", DeviceFault("refused with CUDA error 801")
    with caplog.at_level(logging.INFO):
        bed = Bed()
    assert "loads by simulated pinned (" in caplog.text
    assert "saves by simulated pinned (" in caplog.text
    assert "; no simulated dma: refused with CUDA error 801" in caplog.text
    assert "pinned" in gpu.log
    bed.device.pin(bed.mapping, lambda: False)
    gpu.log.clear()
    bed.check_both_ways()
    assert gpu.log.count("pinned") == 2
    assert not {"dma", "single"} & {*gpu.log}


def test_where_nothing_copies_that_is_said(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    gpu.ways = gpu.ways._replace(batch=None, kernel=None)
    gpu.broken, gpu.error = "pinned", DeviceFault("refused")
    with caplog.at_level(logging.INFO):
        Bed()
    assert "loads by simulated pinned (0.0 GiB/s)" in caplog.text
    assert "; simulated pinned fails: refused" in caplog.text


def test_scratch_memory_is_kept_until_nothing_is_under_way_in_it(gpu: Gpu) -> None:
    gpu.broken, gpu.error = "dma", DeviceFault("refused")
    cuda_measure.measure(torch.device("cpu"), gpu.ways._replace(kernel=None), [1 << 12])
    assert gpu.log[:2] == ["dma", "idle"]


def test_what_no_event_marks_is_waited_for(gpu: Gpu) -> None:
    bed = Bed()
    runs = split_runs([2, 3], [(1, 0)], per_slot=(PER_SLOT,), absent=-1)
    job = bed.device.save_job(bed.slots, runs, bed.device.fence())
    gpu.log.clear()
    gpu.broken = "record"
    with pytest.raises(DeviceFault):
        job(Handle())
    assert gpu.log == ["set_device", "synchronize", "single", "record", "idle"]


def test_the_report_of_the_doctor(gpu: Gpu, capsys: pytest.CaptureFixture[str]) -> None:
    real = torch.device
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "device", lambda *_: real("cpu"))
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        kind = SimpleNamespace(type="cuda")
        patch.setattr(torch.accelerator, "current_accelerator", lambda: kind)
        patch.setattr(cuda_measure, "numa_node", lambda *_, is_rocm: 1)
        assert measure.main(["4096"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpu"] == "a simulated GPU"
    assert found["report"].startswith("loads by simulated dma (")
    assert found["report"].endswith("; at NUMA node 1")
    assert {m["piece_bytes"] for m in found["measured"]} == {4096}

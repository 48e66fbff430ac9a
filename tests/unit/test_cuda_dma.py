"""How the driver of a GPU is asked for copies: by a driver made of Python, with C's calling rules."""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstrata.transfer.cuda_dma import BatchCopy, LoopCopy, batch_entry, driver_library, loop_entry
from kvstrata.transfer.driver import DeviceFault

STREAM = 0x1234


def address_of(function: Any) -> int:
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found


class FakeDriver:
    """Copies at once, and notes how it was asked."""

    def __init__(self, status: int = 0) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.status = status
        self.batch = ctypes.CFUNCTYPE(ctypes.c_int, *BatchCopy.ARGUMENTS)(self._batch)
        self.loop = ctypes.CFUNCTYPE(ctypes.c_int, *LoopCopy.ARGUMENTS)(self._loop)
        of_rocm = ctypes.CFUNCTYPE(ctypes.c_int, *LoopCopy.ARGUMENTS_OF_ROCM)
        self.loop_of_rocm = of_rocm(self._loop_of_rocm)

    def _batch(self, *arguments: Any) -> int:
        targets, sources, lengths, count, attributes, firsts, kinds, refused, stream = arguments
        order = attributes[0].source_access_order
        self.asked.append((count, order, firsts[0], kinds, refused[0], stream))
        columns = [(ctypes.c_uint64 * count).from_address(a) for a in (targets, sources, lengths)]
        for target, source, length in zip(*columns, strict=True):
            ctypes.memmove(target, source, length)
        return self.status

    def _loop(self, target: int, source: int, length: int, stream: int) -> int:
        self.asked.append((length, stream))
        ctypes.memmove(target, source, length)
        return self.status

    def _loop_of_rocm(self, target: int, source: int, length: int, kind: int, stream: int) -> int:
        self.asked.append((length, kind, stream))
        ctypes.memmove(target, source, length)
        return self.status


def copies() -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    source = np.random.default_rng(1).integers(0, 256, 64, np.uint8)
    target = np.zeros(64, np.uint8)
    at = np.array([40, 0, 8])
    spans = target.ctypes.data + at, source.ctypes.data + at, np.array([24, 8, 16])
    return source, target, spans


def test_one_call_takes_all_spans() -> None:
    fake = FakeDriver()
    source, target, spans = copies()
    source[24:40] = 0
    BatchCopy(address_of(fake.batch))(*spans, STREAM)
    assert np.array_equal(target, source)
    assert fake.asked == [(3, 1, 0, 1, 0, STREAM)]


def test_arrays_in_pieces_are_made_whole() -> None:
    fake = FakeDriver()
    source, target, spans = copies()
    source[24:40] = 0
    targets, sources, lengths = (np.repeat(column, 2)[::2] for column in spans)
    assert not targets.flags.c_contiguous
    BatchCopy(address_of(fake.batch))(targets, sources, lengths, STREAM)
    assert np.array_equal(target, source)


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("is_rocm", [False, True])
def test_without_it_each_span_is_a_call(is_rocm: bool, is_pinned: bool) -> None:
    fake = FakeDriver()
    source, target, spans = copies()
    source[24:40] = 0
    entry = address_of(fake.loop_of_rocm if is_rocm else fake.loop)
    LoopCopy(entry, is_rocm=is_rocm, is_pinned=is_pinned)(*spans, STREAM)
    assert np.array_equal(target, source)
    by_address = (4,) if is_rocm else ()
    assert fake.asked == [(length, *by_address, STREAM) for length in (24, 8, 16)]


def is_kept_from_others(call: Callable[[], None]) -> bool:
    """Whether no other thread gets the interpreter while *call* waits in C."""
    call_ended, other_ran = [], []
    gate = threading.Lock()
    gate.acquire()

    def other() -> None:
        with gate:
            other_ran.append(time.perf_counter())

    thread = threading.Thread(target=other)
    thread.start()
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(10.0)  # nothing takes the interpreter away
        gate.release()
        call()
        call_ended.append(time.perf_counter())
    finally:
        sys.setswitchinterval(before)
    thread.join()
    return other_ran > call_ended


@pytest.mark.parametrize("is_pinned", [False, True])
def test_calls_that_come_back_at_once_keep_the_interpreter(is_pinned: bool) -> None:
    """A busy thread that gets it at every span keeps it for 5 ms each time."""
    usleep = address_of(ctypes.CDLL(None).usleep)  # takes the target for microseconds
    copy = LoopCopy(usleep, is_rocm=False, is_pinned=is_pinned)
    columns = np.array([30_000]), np.array([0]), np.array([0])
    assert is_kept_from_others(lambda: copy(*columns, STREAM)) == is_pinned


@pytest.mark.parametrize(("spans", "is_kept"), [(16, True), (17, False)])
def test_a_call_for_few_spans_keeps_the_interpreter(spans: int, is_kept: bool) -> None:
    """To give it away and get it again takes longer, and holds up the engine's thread each time."""
    nanosleep = address_of(ctypes.CDLL(None).nanosleep)  # takes the targets for a timespec
    copy = BatchCopy(nanosleep)
    targets = np.array([0, 30_000_000, *[0] * (spans - 2)])
    assert is_kept_from_others(lambda: copy(targets, targets.copy(), targets, STREAM)) == is_kept


def test_what_the_driver_refuses_is_a_fault() -> None:
    fake = FakeDriver(status=719)
    _, _, spans = copies()
    with pytest.raises(DeviceFault, match="3 copies with CUDA error 719"):
        BatchCopy(address_of(fake.batch))(*spans, STREAM)
    with pytest.raises(DeviceFault, match="24 bytes was refused with GPU error 719"):
        LoopCopy(address_of(fake.loop), is_rocm=False, is_pinned=True)(*spans, STREAM)
    assert fake.asked[1:] == [(24, STREAM)]


def install(monkeypatch: pytest.MonkeyPatch, status: int, entry: int) -> list[tuple[Any, ...]]:
    """Make it look as if cuda-bindings were there, with a driver that answers so."""
    asked: list[tuple[Any, ...]] = []

    def find(*arguments: Any) -> tuple[int, int, int]:
        asked.append(arguments)
        return status, entry, 0

    package = ModuleType("cuda")
    bindings: Any = ModuleType("cuda.bindings")
    bindings.driver = SimpleNamespace(cuGetProcAddress=find)
    monkeypatch.setitem(sys.modules, "cuda", package)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return asked


def test_the_batch_is_looked_up_as_of_the_version_whose_arguments_it_gets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeDriver()
    asked = install(monkeypatch, 0, address_of(fake.batch))
    assert batch_entry() == address_of(fake.batch)
    assert asked == [(b"cuMemcpyBatchAsync", 12080, 0)]


@pytest.mark.parametrize(("status", "entry"), [(500, 0), (0, 0)])
def test_an_older_driver_lacks_it(monkeypatch: pytest.MonkeyPatch, status: int, entry: int) -> None:
    install(monkeypatch, status, entry)
    assert batch_entry() is None


def test_without_bindings_and_without_a_gpu_nothing_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert batch_entry() is None

    def missing(name: str, mode: int) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    for is_rocm in (False, True):
        with pytest.raises(DeviceFault, match="cannot be loaded"):
            loop_entry(is_rocm=is_rocm)


@pytest.mark.parametrize("is_rocm", [False, True])
def test_the_plain_copy_is_that_of_the_installed_library(
    monkeypatch: pytest.MonkeyPatch, is_rocm: bool
) -> None:
    fake = FakeDriver()
    library = SimpleNamespace(hipMemcpyAsync=fake.loop_of_rocm, cuMemcpyAsync=fake.loop)
    monkeypatch.setattr("ctypes.CDLL", lambda name, mode: library)
    source, target, spans = copies()
    source[24:40] = 0
    LoopCopy(loop_entry(is_rocm=is_rocm), is_rocm=is_rocm, is_pinned=True)(*spans, STREAM)
    assert np.array_equal(target, source)


@pytest.mark.parametrize(
    ("loaded", "installed", "expected"),
    [
        (["libamdhip64.so.6"], ["libamdhip64.so", "libamdhip64.so.6"], "libamdhip64.so.6"),
        ([], ["libamdhip64.so", "libamdhip64.so.7"], "libamdhip64.so"),
        (["libamdhip64.so.7"], [], "libamdhip64.so.7"),
    ],
)
def test_the_library_that_torch_has_loaded_is_taken_before_another_one(
    monkeypatch: pytest.MonkeyPatch, loaded: list[str], installed: list[str], expected: str
) -> None:
    """A second runtime would know nothing of torch's streams."""

    def load(name: str, mode: int) -> str:
        if name not in (loaded if mode == os.RTLD_NOLOAD else installed):
            raise OSError(name)
        return name

    monkeypatch.setattr("ctypes.CDLL", load)
    assert driver_library(is_rocm=True) == expected  # type: ignore[comparison-overlap]  # by its name

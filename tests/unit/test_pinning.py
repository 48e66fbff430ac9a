"""Pinning the host tier: whole or not at all, beside copies, and undone before it is unmapped."""

import itertools
import logging
import resource
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvstrata.storage.mapping import HostMapping
from kvstrata.transfer import pinning
from kvstrata.transfer.descriptors import Spans
from kvstrata.transfer.driver import DeviceFault
from kvstrata.transfer.pinning import HostPins

SLOTS, SLOT = 10, 8192
CHUNK = 3 * SLOT
PATIENCE_SECONDS = 10.0  # only a broken one takes that long


class Driver:
    """Registers memory, at most *limit* ranges of it."""

    def __init__(self, limit: int = 100) -> None:
        self.limit = limit
        self.registered: dict[int, int] = {}
        self.sticks = False

    def register(self, address: int, length: int) -> None:
        for other, long in self.registered.items():
            assert address + length <= other or address >= other + long, "registered twice"
        if len(self.registered) >= self.limit:
            raise DeviceFault("cudaHostRegister failed: out of memory")
        self.registered[address] = length

    def unregister(self, address: int) -> None:
        if self.sticks:
            raise DeviceFault("cudaHostUnregister failed")
        del self.registered[address]


def never() -> bool:
    return False


@pytest.fixture
def mapping() -> Iterator[HostMapping]:
    made = HostMapping.create(SLOTS, SLOT, b"server")
    yield made
    made.close()


def pins(driver: Driver) -> HostPins:
    return HostPins(driver.register, driver.unregister, chunk_bytes=CHUNK)


def spans(mapping: HostMapping, first: int, length: int) -> Spans:
    one = np.array([mapping.data.ctypes.data + first])
    return Spans(np.array([1]), one, np.array([length]))


def test_every_slot_is_pinned_once_in_pieces_that_begin_with_slots(mapping: HostMapping) -> None:
    driver = Driver()
    made = pins(driver)
    assert made.pin(mapping, never)
    start = mapping.data.ctypes.data
    assert driver.registered == {
        start: CHUNK,
        start + CHUNK: CHUNK,
        start + 2 * CHUNK: CHUNK,
        start + 3 * CHUNK: SLOT,
    }
    whole = SLOTS * SLOT
    assert made.reaches(spans(mapping, 0, whole))
    assert not made.reaches(spans(mapping, -1, 1))
    assert not made.reaches(spans(mapping, whole - 1, 2))
    made.let_go()
    assert driver.registered == {}
    assert not made.reaches(spans(mapping, 0, 1))
    made.let_go()


def test_what_cannot_be_pinned_whole_is_not_pinned(
    mapping: HostMapping, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64 << 10, 64 << 10))
    driver = Driver(limit=2)
    made = pins(driver)
    assert not made.pin(mapping, never)
    assert driver.registered == {}
    assert not made.reaches(spans(mapping, 0, 1))
    for part in ("48.0 KiB of 80.0 KiB", "out of memory", "64.0 KiB", "memlock=-1"):
        assert part in caplog.text


def test_no_limit_is_said_too(mapping: HostMapping, caplog: pytest.LogCaptureFixture) -> None:
    limits = resource.RLIM_INFINITY, resource.RLIM_INFINITY
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda _: limits)
        assert not pins(Driver(limit=0)).pin(mapping, never)
    assert "(ulimit -l) is not limited" in caplog.text


def test_it_ends_early_when_the_server_is_gone(mapping: HostMapping) -> None:
    driver, looks = Driver(), itertools.count()
    assert not pins(driver).pin(mapping, lambda: next(looks) == 2)
    assert driver.registered == {}


def test_progress_is_told(mapping: HostMapping, caplog: pytest.LogCaptureFixture) -> None:
    driver, seconds = Driver(), itertools.count(step=4)
    made = HostPins(driver.register, driver.unregister, chunk_bytes=CHUNK, clock=seconds.__next__)
    with caplog.at_level(logging.INFO):
        assert made.pin(mapping, never)
    assert "pinned 48.0 KiB of 80.0 KiB" in caplog.text
    assert "the host tier is pinned: 80.0 KiB" in caplog.text


def test_the_next_mapping_takes_the_place_of_the_last(mapping: HostMapping) -> None:
    driver = Driver()
    made = pins(driver)
    other = HostMapping.create(2, SLOT, b"other")
    assert made.pin(mapping, never)
    assert made.pin(other, never)
    assert driver.registered == {other.data.ctypes.data: 2 * SLOT}
    assert not made.reaches(spans(mapping, 0, 1))
    made.let_go()
    other.close()


def test_what_copies_use_is_unpinned_when_they_have_ended(mapping: HostMapping) -> None:
    driver = Driver()
    made = pins(driver)
    assert made.pin(mapping, never)
    with made.used():
        goes = threading.Thread(target=made.let_go)
        goes.start()
        goes.join(0.05)  # as long as a wrong one would need by far
        assert len(driver.registered) == 4
        assert not made.reaches(spans(mapping, 0, 1))
    goes.join(PATIENCE_SECONDS)
    assert driver.registered == {}
    with made.used():
        pass


def test_what_hangs_stays_pinned_and_nobody_waits_for_ever(
    mapping: HostMapping, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pinning, "_LET_GO_SECONDS", 0.01)
    driver = Driver()
    made = pins(driver)
    assert made.pin(mapping, never)
    with made.used():
        made.let_go()
    assert len(driver.registered) == 4
    assert "copies still run" in caplog.text


def test_a_driver_that_does_not_let_go_is_told_of(
    mapping: HostMapping, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver()
    made = pins(driver)
    assert made.pin(mapping, never)
    driver.sticks = True
    made.let_go()
    assert "stays pinned: cudaHostUnregister failed" in caplog.text

"""Several threads in one disk store: no slot is used twice, nothing is served half."""

import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event

import pytest

from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.disk import DiskStore

BLOCK_BYTES = 4096
WAIT_SECONDS = 30
NAMESPACE = b"n" * 16


def make(path: Path, slots: int) -> DiskStore:
    return DiskStore([path], block_bytes=BLOCK_BYTES, capacity_bytes=slots * 8192)


def key(number: int) -> StoreKey:
    return NAMESPACE + bytes([number]) * 32


def block(number: int) -> bytes:
    return bytes([number]) * BLOCK_BYTES


def put(store: DiskStore, number: int) -> Write:
    return store.write([key(number)], [None], [memoryview(block(number))])[0]


def get(store: DiskStore, number: int) -> bytes | None:
    buffer = memoryview(bytearray(b"\xee" * BLOCK_BYTES))
    (fate,) = store.read_into([key(number)], [buffer])
    assert fate is not Read.CORRUPT
    return bytes(buffer) if fate is Read.HIT else None


class Gate:
    """Holds the first caller of an ``os`` function until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        real: Callable[..., int] = getattr(os, name)
        self.reached, self.opened = Event(), Event()

        def gated(*args: object) -> int:
            if not self.reached.is_set():
                self.reached.set()
                assert self.opened.wait(WAIT_SECONDS)
            return real(*args)

        monkeypatch.setattr(os, name, gated)


def test_a_slot_that_is_being_read_is_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(tmp_path, 1)
    put(store, 1)
    gate = Gate(monkeypatch, "preadv")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(get, store, 1)
        assert gate.reached.wait(WAIT_SECONDS)
        assert store.remove([key(1)]) == [True]
        assert put(store, 2) is Write.FULL
        gate.opened.set()
        assert reading.result(WAIT_SECONDS) == block(1)
    assert put(store, 2) is Write.STORED
    assert [get(store, 1), get(store, 2)] == [None, block(2)]
    store.close()


def test_two_threads_that_write_one_key_leave_one_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(tmp_path, 2)
    gate = Gate(monkeypatch, "pwritev")
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(put, store, 1)
        assert gate.reached.wait(WAIT_SECONDS)
        assert put(store, 1) is Write.STORED
        gate.opened.set()
        assert writing.result(WAIT_SECONDS) is Write.EXISTS
    assert get(store, 1) == block(1)
    assert put(store, 2) is Write.STORED  # the second slot came back
    store.close()


def test_a_block_that_is_being_written_while_its_namespace_is_dropped_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(tmp_path, 1)
    gate = Gate(monkeypatch, "pwritev")
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(put, store, 1)
        assert gate.reached.wait(WAIT_SECONDS)
        assert store.drop_namespace(NAMESPACE) == 0
        gate.opened.set()
        assert writing.result(WAIT_SECONDS) is Write.STORED
    assert get(store, 1) is None
    assert put(store, 2) is Write.STORED
    store.close()


def test_a_call_that_runs_while_the_store_closes_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(tmp_path, 1)
    put(store, 1)
    gate = Gate(monkeypatch, "preadv")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(get, store, 1)
        assert gate.reached.wait(WAIT_SECONDS)
        store.close()
        with pytest.raises(TierUnavailable):
            get(store, 1)
        gate.opened.set()
        assert reading.result(WAIT_SECONDS) == block(1)
    make(tmp_path, 1).close()  # the lock is free


def test_random_operations_of_four_threads_lose_no_slot(tmp_path: Path) -> None:
    slots, numbers = 6, 10
    store = make(tmp_path, slots)
    start = Barrier(4)

    def work(seed: int) -> None:
        choose = random.Random(seed)
        start.wait(WAIT_SECONDS)
        for _ in range(150):
            number = choose.randrange(numbers)
            action = choose.random()
            if action < 0.4:
                put(store, number)
            elif action < 0.8:
                assert get(store, number) in {None, block(number)}
            elif action < 0.99:
                store.remove([key(number)])
            else:
                store.drop_namespace(NAMESPACE)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, seed) for seed in range(4)]:
            done.result(2 * WAIT_SECONDS)
    held = store.exists([key(number) for number in range(numbers)])
    store.close()

    store = make(tmp_path, slots)
    assert store.exists([key(number) for number in range(numbers)]) == held
    assert all((get(store, n) == block(n)) is held[n] for n in range(numbers))
    store.drop_namespace(NAMESPACE)
    fates = [put(store, number) for number in range(slots + 1)]
    assert fates == [Write.STORED] * slots + [Write.FULL]
    assert store.statistics().corrupt_blocks == 0
    store.close()


def test_no_more_writes_than_the_depth_are_at_the_disk_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore([tmp_path], block_bytes=BLOCK_BYTES, capacity_bytes=24 * 8192, write_depth=2)
    running: list[int] = []
    seen: list[int] = []

    def watched(real: Callable[..., int | None]) -> Callable[..., int | None]:
        def call(*args: object) -> int | None:
            running.append(1)
            seen.append(len(running))
            time.sleep(0.002)
            running.pop()
            return real(*args)

        return call

    for name in ("pwritev", "fdatasync"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(put, [store] * 24, range(1, 25))) == {Write.STORED}
    assert max(seen) == 2
    assert all(get(store, number) == block(number) for number in range(1, 25))
    store.close()

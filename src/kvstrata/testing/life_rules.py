"""The rules for the life of a store: random calls, closing, restarts, threads, faults."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import Read, Write
from kvstrata.storage.store import Store
from kvstrata.testing.machine import store_machine
from kvstrata.testing.samples import ONE, dirty, fetch, key
from kvstrata.testing.subject import StoreSubject, can_be_cut_off, can_be_damaged, only_if

_THREADS: Final = 4
_ROUNDS: Final = 40
END_SECONDS: Final = 10.0  # far more than a closed store takes to refuse a call
RANDOM_CALLS: Final = settings(
    max_examples=12,
    stateful_step_count=20,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)


class LifeRules(StoreSubject):
    """What happens in time, from other threads and from outside."""

    # Time

    def test_closing_is_final(self, store: Store) -> None:
        """``close`` may be called again; every other call raises ``TierUnavailable``."""
        self._put(store, 1)
        content = memoryview(self._value(store, 1))
        store.close()
        store.close()
        calls: list[Callable[[], object]] = [
            lambda: store.exists([key(1)]),
            lambda: store.read_into([key(1)], [dirty(len(content))]),
            lambda: store.write([key(2)], [None], [content]),
            lambda: store.remove([key(1)]),
            lambda: store.drop_namespace(ONE),
            store.statistics,
        ]
        for call in calls:
            with pytest.raises(TierUnavailable):
                call()

    @only_if(lambda suite: suite.traits.persistent)
    def test_a_persistent_store_has_its_blocks_after_a_restart(self, place: Path) -> None:
        """What was ``STORED`` is read, and what was removed stays away."""
        store = self.open_store(place)
        self._put(store, 1, 2, 3)
        store.remove([key(2)])
        store.close()
        store = self.open_store(place)
        assert store.exists([key(1), key(2), key(3)]) == [True, False, True]
        self._assert_holds(store, key(3), 3)
        assert self._put(store, 2, 3) == [Write.STORED, Write.EXISTS]
        store.close()

    def test_random_calls_agree_with_a_dict(self) -> None:
        """A Hypothesis state machine: see ``store_machine``."""

        def open_store(place: Path) -> Store:
            return self.open_store(place)

        machine = store_machine(open_store, self.traits, self.value)
        run_state_machine_as_test(machine, settings=RANDOM_CALLS)

    # Threads

    def test_threads_read_whole_values_of_their_keys(self, store: Store) -> None:
        """While others write and remove, a read is a miss or one value of that key, whole."""
        values = [[self._value(store, 10 * k + v) for v in range(2)] for k in range(4)]

        def work(seed: int) -> None:
            draw = random.Random(seed)
            for _ in range(_ROUNDS):
                numbers = [draw.randrange(4) for _ in range(draw.randint(1, 4))]
                wanted = [key(number) for number in numbers]
                buffers = [memoryview(bytearray(draw.choice(values[n]))) for n in numbers]
                store.write(wanted, [None] * len(wanted), buffers)
                self._assert_whole(store, numbers, values)
                store.remove(wanted[:1])

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(work, range(_THREADS)))

    def test_closing_ends_the_calls_of_other_threads(self, store: Store) -> None:
        """A call that meets ``close`` ends, right or as ``TierUnavailable``."""
        values = [[self._value(store, number)] for number in range(2)]
        self._put_value(store, key(0), 0)
        read_once = threading.Barrier(_THREADS + 1)

        def work(_: int) -> None:
            self._assert_whole(store, [0, 1], values)
            read_once.wait(END_SECONDS)
            with pytest.raises(TierUnavailable):
                self._use_until_it_raises(store, values)

        with ThreadPoolExecutor(_THREADS) as pool:
            running = pool.map(work, range(_THREADS), timeout=3 * END_SECONDS)
            read_once.wait(END_SECONDS)
            store.close()
            list(running)

    # Faults

    @only_if(can_be_damaged)
    def test_a_damaged_block_is_corrupt_and_then_gone(self, store: Store, place: Path) -> None:
        """Its bytes are never a hit; it is counted, forgotten, and may be written anew."""
        self._put(store, 1, 2, 3)
        self.damage(store, place, key(2))
        wanted = [key(1), key(2), key(3)]
        buffers = [dirty(store.statistics().block_bytes) for _ in wanted]
        assert store.read_into(wanted, buffers) == [Read.HIT, Read.CORRUPT, Read.HIT]
        assert buffers[0] == self._value(store, 1)
        assert buffers[2] == self._value(store, 3)
        assert store.exists(wanted) == [True, False, True]
        assert fetch(store, key(2)) is Read.MISS
        assert store.statistics().corrupt_blocks == 1
        assert self._put(store, 2) == [Write.STORED]
        self._assert_holds(store, key(2), 2)

    @only_if(can_be_cut_off)
    def test_an_unreachable_store_says_so(self, store: Store, place: Path) -> None:
        """Reads and writes raise ``TierUnavailable``: a miss would be a lie.

        ``exists`` and ``remove`` may raise too, or answer right from memory. Afterwards every
        block that was stored before is there, and a failed write has stored all or nothing.
        """
        self._put(store, 1, 2)
        content = memoryview(self._value(store, 3))
        with self.outage(store, place):
            for number in (1, 9):
                with suppress(TierUnavailable):
                    assert store.exists([key(number)]) == [number == 1]
            with pytest.raises(TierUnavailable):
                store.read_into([key(1)], [dirty(len(content))])
            with pytest.raises(TierUnavailable):
                store.write([key(3)], [None], [content])
        self._assert_holds(store, key(1), 1)
        self._assert_holds(store, key(2), 2)
        assert fetch(store, key(3)) in {bytes(content), Read.MISS}
        self._put(store, 3)
        self._assert_holds(store, key(3), 3)

    def _use_until_it_raises(self, store: Store, values: list[list[bytes]]) -> None:
        end = time.monotonic() + END_SECONDS
        while time.monotonic() < end:
            self._put_value(store, key(1), 1)
            self._assert_whole(store, [0, 1], values)

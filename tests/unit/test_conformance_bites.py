"""The conformance suite fails for wrong stores, each by the rule that it breaks."""

import inspect
import itertools
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from kvstrata.core.errors import InvariantViolated, TierUnavailable
from kvstrata.core.types import NamespaceId, Read, StoreKey, Write
from kvstrata.storage.checksum import digest
from kvstrata.storage.store import Store, StoreStatistics
from kvstrata.testing import (
    Fault,
    FlakyStore,
    LyingStore,
    MemoryStore,
    StoreConformance,
    Traits,
    life_rules,
)
from kvstrata.testing.memory import Value

BLOCK_BYTES = 512
SLOTS = 8


class Correct(MemoryStore):
    """The reference, at the size that all below have."""

    def __init__(self, *, variable: bool = False) -> None:
        super().__init__(block_bytes=BLOCK_BYTES, capacity_blocks=SLOTS, variable=variable)


class ServesOldBytesAfterARemoval(Correct):
    def __init__(self) -> None:
        super().__init__()
        self.old: dict[StoreKey, Value] = {}

    def _write_one(self, key: StoreKey, parent: StoreKey | None, buffer: memoryview) -> Write:
        fate = super()._write_one(key, parent, buffer)
        if fate is Write.STORED:
            self.values[key] = self.old.setdefault(key, self.values[key])
        return fate


class KeepsTheBufferOfAWrite(Correct):
    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[StoreKey, memoryview] = {}

    def _write_one(self, key: StoreKey, parent: StoreKey | None, buffer: memoryview) -> Write:
        self.buffers.setdefault(key, buffer)
        return super()._write_one(key, parent, buffer)

    def _read_one(self, key: StoreKey, buffer: memoryview) -> Read:
        fate = super()._read_one(key, buffer)
        if fate is Read.HIT:
            buffer[:] = self.buffers[key]
        return fate


class ServesAReadBufferAgain(Correct):
    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[StoreKey, memoryview] = {}

    def _read_one(self, key: StoreKey, buffer: memoryview) -> Read:
        if key in self.values and key in self.buffers:
            buffer[:] = self.buffers[key]
            return Read.HIT
        self.buffers[key] = buffer
        return super()._read_one(key, buffer)


class ReportsStoredAndDrops(Correct):
    def _write_one(self, key: StoreKey, parent: StoreKey | None, buffer: memoryview) -> Write:
        fate = super()._write_one(key, parent, buffer)
        if len(self.values) == 3:
            del self.values[key]
        return fate


class EvictsWhenFull(Correct):
    def _write_one(self, key: StoreKey, parent: StoreKey | None, buffer: memoryview) -> Write:
        if key not in self.values and len(self.values) == SLOTS:
            del self.values[next(iter(self.values))]
        return super()._write_one(key, parent, buffer)


class GrowsBeyondItsCapacity(Correct):
    def __init__(self) -> None:
        super().__init__()
        self._capacity_blocks = 10 * SLOTS

    def statistics(self) -> StoreStatistics:
        return super().statistics()._replace(capacity_blocks=SLOTS)


class LosesRoomWithEveryRemoval(Correct):
    def remove(self, keys: Sequence[StoreKey]) -> list[bool]:
        fates = super().remove(keys)
        self._capacity_blocks -= sum(fates)
        return fates

    def statistics(self) -> StoreStatistics:
        return super().statistics()._replace(capacity_blocks=SLOTS)


class _Renamed(Correct, ABC):
    """Knows blocks by another name than their key."""

    @abstractmethod
    def name(self, key: StoreKey) -> StoreKey:
        """What it takes *key* for."""

    def exists(self, keys: Sequence[StoreKey]) -> list[bool]:
        return super().exists([self.name(key) for key in keys])

    def remove(self, keys: Sequence[StoreKey]) -> list[bool]:
        return super().remove([self.name(key) for key in keys])

    def _read_one(self, key: StoreKey, buffer: memoryview) -> Read:
        return super()._read_one(self.name(key), buffer)

    def _write_one(self, key: StoreKey, parent: StoreKey | None, buffer: memoryview) -> Write:
        return super()._write_one(self.name(key), parent, buffer)


class MixesNamespaces(_Renamed):
    def name(self, key: StoreKey) -> StoreKey:
        return b"." * 16 + key[16:]


class DropsOneBlockOfANamespace(Correct):
    def drop_namespace(self, namespace_id: NamespaceId) -> int:
        found = [key for key in self.values if key.startswith(namespace_id)]
        return sum(self.remove(found[:1]))


class CutsKeys(_Renamed):
    def name(self, key: StoreKey) -> StoreKey:
        return key[:-1] + b"."


class TakesAnyKey(Correct):
    def write(
        self,
        keys: Sequence[StoreKey],
        parents: Sequence[StoreKey | None],
        buffers: Sequence[memoryview],
    ) -> list[Write]:
        with suppress(InvariantViolated):
            return super().write(keys, parents, buffers)
        return super().write([key.ljust(48)[:48] for key in keys], parents, buffers)


class TakesAnyLength(Correct):
    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        whole = [memoryview(bytearray(BLOCK_BYTES)) for _ in buffers]
        fates = super().read_into(keys, whole)
        for content, buffer in zip(whole, buffers, strict=True):
            length = min(BLOCK_BYTES, buffer.nbytes)
            buffer[:length] = content[:length]
        return fates

    def write(
        self,
        keys: Sequence[StoreKey],
        parents: Sequence[StoreKey | None],
        buffers: Sequence[memoryview],
    ) -> list[Write]:
        fitted = [bytes(buffer[:BLOCK_BYTES]).ljust(BLOCK_BYTES, b"\0") for buffer in buffers]
        return super().write(keys, parents, [memoryview(content) for content in fitted])


class SaysItTakesAnyLength(Correct):
    def statistics(self) -> StoreStatistics:
        return super().statistics()._replace(variable=True)


class ServesAPartOfAValue(Correct):
    def __init__(self) -> None:
        super().__init__(variable=True)

    def _read_one(self, key: StoreKey, buffer: memoryview) -> Read:
        whole = memoryview(bytearray(BLOCK_BYTES))
        fate = super()._read_one(key, whole)
        buffer[:] = whole[: len(buffer)]
        return fate


class PadsShortValues(Correct):
    def __init__(self) -> None:
        super().__init__(variable=True)

    def _write_one(self, key: StoreKey, parent: StoreKey | None, buffer: memoryview) -> Write:
        padded = bytes(buffer).ljust(BLOCK_BYTES, b"\x00")
        return super()._write_one(key, parent, memoryview(padded))


class FillsHalfTheBuffer(Correct):
    def _read_one(self, key: StoreKey, buffer: memoryview) -> Read:
        rest = bytes(buffer[BLOCK_BYTES // 2 :])
        fate = super()._read_one(key, buffer)
        buffer[BLOCK_BYTES // 2 :] = rest
        return fate


class Overwrites(Correct):
    def _write_one(self, key: StoreKey, parent: StoreKey | None, buffer: memoryview) -> Write:
        fate = Write.EXISTS if self.values.pop(key, None) else Write.STORED
        super()._write_one(key, parent, buffer)
        return fate


class ForgetsToSayExists(Correct):
    def _write_one(self, key: StoreKey, parent: StoreKey | None, buffer: memoryview) -> Write:
        fate = super()._write_one(key, parent, buffer)
        return Write.STORED if fate is Write.EXISTS else fate


class CallsAMissAHit(Correct):
    def _read_one(self, key: StoreKey, buffer: memoryview) -> Read:
        super()._read_one(key, buffer)
        return Read.HIT


class RaisesForAMiss(Correct):
    def _read_one(self, key: StoreKey, buffer: memoryview) -> Read:
        fate = super()._read_one(key, buffer)
        if fate is Read.MISS:
            raise TierUnavailable("no such block")
        return fate


class AnswersHitsFirst(Correct):
    def exists(self, keys: Sequence[StoreKey]) -> list[bool]:
        return sorted(super().exists(keys), reverse=True)


class AnswersEachKeyOnce(Correct):
    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        once = dict(zip(keys, buffers, strict=True))
        fates = dict(zip(once, super().read_into(list(once), list(once.values())), strict=True))
        return [fates[key] for key in keys]


class TakesZerosForNothing(Correct):
    def _read_one(self, key: StoreKey, buffer: memoryview) -> Read:
        fate = super()._read_one(key, buffer)
        return fate if any(buffer) else Read.MISS


class NeedsParents(Correct):
    def _write_one(self, key: StoreKey, parent: StoreKey | None, buffer: memoryview) -> Write:
        if parent is not None and parent not in self.values:
            return Write.FULL
        return super()._write_one(key, parent, buffer)


class WritesToWriteBuffers(Correct):
    def _write_one(self, key: StoreKey, parent: StoreKey | None, buffer: memoryview) -> Write:
        buffer[0] = buffer[0]
        return super()._write_one(key, parent, buffer)


class CountsWrites(Correct):
    writes = 0

    def _write_one(self, key: StoreKey, parent: StoreKey | None, buffer: memoryview) -> Write:
        self.writes += 1
        return super()._write_one(key, parent, buffer)

    def statistics(self) -> StoreStatistics:
        return super().statistics()._replace(blocks=self.writes)


class WorksAfterClosing(Correct):
    def close(self) -> None:
        pass


class ClosesOnce(Correct):
    def close(self) -> None:
        self._check_open()
        super().close()


class SaysMissAfterClosing(Correct):
    def exists(self, keys: Sequence[StoreKey]) -> list[bool]:
        return [False] * len(keys) if self._closed else super().exists(keys)


class RaisesItsOwnErrorAfterClosing(Correct):
    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("I/O operation on closed file")


class WritesInTwoSteps(Correct):
    """Not safe for threads: a block is found before all of its bytes are there."""

    def __init__(self) -> None:
        super().__init__()
        self.contents: dict[StoreKey, bytearray] = {}

    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        fates = []
        for key, buffer in zip(keys, buffers, strict=True):
            content = self.contents.get(key)
            if content is not None:
                buffer[:] = content
            fates.append(Read.MISS if content is None else Read.HIT)
        return fates

    def write(
        self,
        keys: Sequence[StoreKey],
        parents: Sequence[StoreKey | None],
        buffers: Sequence[memoryview],
    ) -> list[Write]:
        for key, buffer in zip(keys, buffers, strict=True):
            content = self.contents.setdefault(key, bytearray(BLOCK_BYTES))
            half = BLOCK_BYTES // 2
            content[:half] = buffer[:half]
            time.sleep(0.001)  # for another thread to come between
            content[half:] = buffer[half:]
        return [Write.STORED] * len(keys)


class KeepsAnsweringThreadsAfterClosing(Correct):
    """A thread that uses it in a loop never hears that it was closed."""

    def _check_open(self) -> None:
        if threading.current_thread() is threading.main_thread():
            super()._check_open()


class ServesDamagedBytes(Correct):
    def damage(self, key: StoreKey) -> None:
        super().damage(key)
        value = self.values[key]
        self.values[key] = Value(value.content, digest(value.content), value.parent)


class HasNoChecksum(LyingStore):
    def __init__(self) -> None:
        super().__init__(Correct())


class KeepsDamagedBlocks(Correct):
    def _read_one(self, key: StoreKey, buffer: memoryview) -> Read:
        value = self.values.get(key)
        fate = super()._read_one(key, buffer)
        if fate is Read.CORRUPT and value is not None:
            self.values[key] = value
        return fate


class CallsDamageAMiss(Correct):
    def _read_one(self, key: StoreKey, buffer: memoryview) -> Read:
        fate = super()._read_one(key, buffer)
        return Read.MISS if fate is Read.CORRUPT else fate


class CutOff(FlakyStore):
    def __init__(self) -> None:
        super().__init__(Correct())


class CallsAnOutageAMiss(CutOff):
    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        with suppress(TierUnavailable):
            return super().read_into(keys, buffers)
        return [Read.MISS] * len(keys)


class CallsAnOutageAHit(CutOff):
    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        with suppress(TierUnavailable):
            return super().read_into(keys, buffers)
        return [Read.HIT] * len(keys)


class DropsWritesInAnOutage(CutOff):
    def write(
        self,
        keys: Sequence[StoreKey],
        parents: Sequence[StoreKey | None],
        buffers: Sequence[memoryview],
    ) -> list[Write]:
        with suppress(TierUnavailable):
            return super().write(keys, parents, buffers)
        return [Write.STORED] * len(keys)


class ForgetsAllInAnOutage(CutOff):
    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        try:
            return super().read_into(keys, buffers)
        except TierUnavailable:
            self.plan = iter(())
            self.remove(keys)
            raise


class Bench(StoreConformance):
    """Runs single rules against the stores that *make* makes."""

    def __init__(self, make: Callable[[], Store]) -> None:
        self.make = make

    def open_store(self, place: Path) -> Store:
        return self.make()

    def damage(self, store: Store, place: Path, wanted: StoreKey) -> None:
        if isinstance(store, LyingStore):
            store.lies_about.add(wanted)
        else:
            assert isinstance(store, MemoryStore)
            store.damage(wanted)

    @contextmanager
    def outage(self, store: Store, place: Path) -> Iterator[None]:
        assert isinstance(store, FlakyStore)
        store.plan = itertools.repeat(Fault.BEFORE)
        yield
        store.plan = iter(())

    def run(self, rule: str) -> None:
        test = partial(getattr(StoreConformance, rule), self)  # also one that is not for this store
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            store = self.open_store(place)
            given = {"store": store, "place": place}
            test(**{name: given[name] for name in inspect.signature(test).parameters})
            store.close()


WHOLE = "test_a_stored_block_is_read_back_whole"
MISSING = "test_a_missing_block_is_a_miss"
ORDER = "test_answers_are_in_the_order_of_the_keys"
ZEROS = "test_keys_and_values_of_zeros_are_keys_and_values"
NAMESPACES = "test_namespaces_do_not_mix"
DROPPED = "test_a_namespace_is_dropped_whole_and_alone"
PARENTS = "test_a_parent_may_be_missing"
VARIABLE = "test_a_variable_store_keeps_the_length"
KEEPS = "test_a_key_that_is_there_keeps_its_value"
ANEW = "test_a_removed_block_is_gone_and_may_be_written_anew"
TWICE = "test_a_batch_may_hold_a_key_twice"
WRITE_BUFFER = "test_the_buffer_of_a_write_is_not_kept"
READ_BUFFER = "test_the_buffer_of_a_read_is_not_kept"
READ_ONLY = "test_a_buffer_may_be_read_only_and_lie_anywhere"
WRONG_LENGTH = "test_a_buffer_of_a_wrong_length_is_a_bug"
TOO_SHORT = "test_a_buffer_shorter_than_its_value_is_a_bug"
WRONG_KEY = "test_a_key_of_a_wrong_length_is_a_bug"
FULL = "test_a_full_store_says_so"
TRAITS = "test_the_statistics_bear_the_traits_out"
ROOM = "test_a_removed_block_makes_room_for_another"
COUNTS = "test_statistics_count_what_is_there"
FINAL = "test_closing_is_final"
RESTART = "test_a_persistent_store_has_its_blocks_after_a_restart"
RANDOM = "test_random_calls_agree_with_a_dict"
THREADS = "test_threads_read_whole_values_of_their_keys"
CLOSING = "test_closing_ends_the_calls_of_other_threads"
DAMAGED = "test_a_damaged_block_is_corrupt_and_then_gone"
OUTAGE = "test_an_unreachable_store_says_so"


WRONG: list[tuple[Callable[[], Store], list[str]]] = [
    (ServesOldBytesAfterARemoval, [ANEW, RANDOM]),
    (KeepsTheBufferOfAWrite, [WRITE_BUFFER, RANDOM]),
    (ServesAReadBufferAgain, [READ_BUFFER]),
    (ReportsStoredAndDrops, [WHOLE, COUNTS, RANDOM]),
    (EvictsWhenFull, [FULL, RANDOM]),
    (GrowsBeyondItsCapacity, [FULL, RANDOM]),
    (LosesRoomWithEveryRemoval, [ROOM, RANDOM]),
    (MixesNamespaces, [NAMESPACES, DROPPED, RANDOM]),
    (DropsOneBlockOfANamespace, [DROPPED]),
    (CutsKeys, [MISSING, RANDOM]),
    (TakesAnyKey, [WRONG_KEY]),
    (SaysItTakesAnyLength, [TRAITS]),
    (TakesAnyLength, [WRONG_LENGTH]),
    (ServesAPartOfAValue, [TOO_SHORT]),
    (PadsShortValues, [VARIABLE]),
    (FillsHalfTheBuffer, [WHOLE, READ_ONLY, RANDOM]),
    (Overwrites, [KEEPS, TWICE, RANDOM]),
    (ForgetsToSayExists, [KEEPS, TWICE, RANDOM]),
    (CallsAMissAHit, [MISSING, ORDER, RANDOM]),
    (RaisesForAMiss, [MISSING, ORDER, RANDOM]),
    (AnswersHitsFirst, [ORDER, RANDOM]),
    (AnswersEachKeyOnce, [TWICE, RANDOM]),
    (TakesZerosForNothing, [ZEROS]),
    (NeedsParents, [PARENTS, RANDOM]),
    (WritesToWriteBuffers, [READ_ONLY]),
    (CountsWrites, [COUNTS, RANDOM]),
    (WorksAfterClosing, [FINAL]),
    (ClosesOnce, [FINAL]),
    (SaysMissAfterClosing, [FINAL]),
    (RaisesItsOwnErrorAfterClosing, [FINAL, CLOSING]),
    (WritesInTwoSteps, [THREADS]),
    (KeepsAnsweringThreadsAfterClosing, [CLOSING]),
    (ServesDamagedBytes, [DAMAGED]),
    (HasNoChecksum, [DAMAGED]),
    (KeepsDamagedBlocks, [DAMAGED]),
    (CallsDamageAMiss, [DAMAGED]),
    (CallsAnOutageAMiss, [OUTAGE]),
    (CallsAnOutageAHit, [OUTAGE]),
    (DropsWritesInAnOutage, [OUTAGE]),
    (ForgetsAllInAnOutage, [OUTAGE]),
]

FIRST_FAILURE = settings(
    life_rules.RANDOM_CALLS,
    max_examples=1000,  # until the first failure
    stateful_step_count=40,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    database=None,
)


@pytest.fixture(autouse=True)
def _one_failure_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life_rules, "RANDOM_CALLS", FIRST_FAILURE)
    monkeypatch.setattr(life_rules, "END_SECONDS", 0.3)  # for a store that never ends


CASES = [(make, rule) for make, rules in WRONG for rule in rules]
FAILURES = (AssertionError, pytest.fail.Exception, TierUnavailable, TypeError, ValueError)


@pytest.mark.parametrize(("make", "rule"), CASES, ids=lambda each: getattr(each, "__name__", each))
def test_a_wrong_store_breaks_the_rule(make: Callable[[], Store], rule: str) -> None:
    with pytest.raises(FAILURES):
        Bench(make).run(rule)


class PersistentBench(Bench):
    traits = Traits(persistent=True)


@pytest.mark.parametrize("rule", [RESTART, RANDOM])
def test_a_store_that_forgets_breaks_the_rules_for_persistent_stores(rule: str) -> None:
    with pytest.raises(AssertionError):
        PersistentBench(Correct).run(rule)


def test_every_rule_is_broken_by_some_wrong_store() -> None:
    rules = {each for each in dir(StoreConformance) if each.startswith("test_")}
    assert rules - {rule for _, rule in CASES} == {"test_an_empty_batch_does_nothing", RESTART}

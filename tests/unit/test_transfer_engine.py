"""The server's I/O threads: every block of a read has one fate, the writer survives anything."""

import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from tests.caches import PATIENCE_SECONDS, eventually

from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import Read, StoreKey
from kvstrata.transfer import engine as subject
from kvstrata.transfer.engine import TransferEngine, TransferLimits

MIB = 1 << 20  # two of these are a batch of half the test's blocks


class Shelf:
    """A store that reads what it is told to."""

    def __init__(self) -> None:
        self.batches: list[list[StoreKey]] = []
        self.broken: set[StoreKey] = set()
        self.error: Exception = TierUnavailable("gone")
        self.lock = threading.Lock()
        self.reading = threading.Semaphore(0)
        self.opened = threading.Event()
        self.opened.set()

    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        self.reading.release()
        assert self.opened.wait(PATIENCE_SECONDS)
        with self.lock:
            self.batches.append(list(keys))
        if self.broken & set(keys):
            raise self.error
        return [Read.HIT if key != b"absent" else Read.MISS for key in keys]


class Fates:
    """What ``done`` was told, by block."""

    def __init__(self) -> None:
        self.of: dict[int, list[Read | None]] = {}
        self._lock = threading.Lock()

    def __call__(self, start: int, reads: Sequence[Read | None]) -> None:
        with self._lock:
            for i, read in enumerate(reads):
                self.of.setdefault(start + i, []).append(read)


class Writer:
    """``write_some``: how often it was called, and what it does."""

    def __init__(self) -> None:
        self.called = 0
        self.more = 0
        self.error: Exception | None = None

    def __call__(self) -> int:
        self.called += 1
        if self.error is not None:
            raise self.error
        if self.more:
            self.more -= 1
            return MIB
        return 0


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def writer() -> Writer:
    return Writer()


@pytest.fixture
def engine(
    shelf: Shelf, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TransferEngine]:
    monkeypatch.setattr(subject, "_READ_BATCH_BYTES", 2 * MIB)
    made = TransferEngine(shelf, writer, block_bytes=MIB)  # type: ignore[arg-type]  # reads only
    yield made
    made.close(PATIENCE_SECONDS)
    assert not any(t.name.startswith("kvstrata-write") for t in threading.enumerate())


def read(engine: TransferEngine, *keys: bytes) -> dict[int, list[Read | None]]:
    fates = Fates()
    engine.read(list(keys), [memoryview(bytearray(1)) for _ in keys], fates)
    eventually(lambda: len(fates.of) == len(keys), "some block has no fate")
    return fates.of


def test_blocks_are_read_in_batches_and_each_has_one_fate(
    engine: TransferEngine, shelf: Shelf
) -> None:
    fates = read(engine, b"a", b"b", b"absent", b"c", b"d")
    assert fates == {
        0: [Read.HIT],
        1: [Read.HIT],
        2: [Read.MISS],
        3: [Read.HIT],
        4: [Read.HIT],
    }
    assert sorted(shelf.batches) == [[b"a", b"b"], [b"absent", b"c"], [b"d"]]


def test_a_store_that_reads_side_by_side_gets_several_large_blocks_at_a_time(
    shelf: Shelf, writer: Writer
) -> None:
    limits = TransferLimits(read_blocks=3)
    engine = TransferEngine(shelf, writer, block_bytes=1 << 30, limits=limits)  # type: ignore[arg-type]  # reads only
    fates = Fates()
    keys = [b"a", b"b", b"c", b"d"]
    engine.read(keys, [memoryview(bytearray(1)) for _ in keys], fates)
    eventually(lambda: len(shelf.batches) == 2, "they are not read")
    assert sorted(shelf.batches) == [[b"a", b"b", b"c"], [b"d"]]
    engine.close(PATIENCE_SECONDS)


def test_batch_that_cannot_be_read_takes_no_other_with_it(
    engine: TransferEngine, shelf: Shelf
) -> None:
    """A fate told twice would free a slot twice."""
    shelf.broken = {b"a", b"d"}
    fates = read(engine, b"a", b"b", b"c", b"d", b"e")
    assert fates == {0: [None], 1: [None], 2: [None], 3: [None], 4: [Read.HIT]}


def test_bug_in_the_store_is_a_fate_too(engine: TransferEngine, shelf: Shelf) -> None:
    shelf.broken, shelf.error = {b"a"}, ZeroDivisionError("a bug")
    assert read(engine, b"a", b"b") == {0: [None], 1: [None]}


def test_bug_in_what_is_told_of_a_fate_is_logged_and_costs_no_other_read(
    engine: TransferEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def buggy(_start: int, _reads: Sequence[Read | None]) -> None:
        raise KeyError("a bug")

    engine.read([b"one"], [memoryview(b"")], buggy)
    eventually(lambda: "KeyError: 'a bug'" in caplog.text, "a bug is not told of")
    assert read(engine, b"two") == {0: [Read.HIT]}


def test_read_after_close_has_a_fate(shelf: Shelf, writer: Writer) -> None:
    engine = TransferEngine(shelf, writer, block_bytes=MIB)  # type: ignore[arg-type]  # reads only
    engine.close(PATIENCE_SECONDS)
    assert read(engine, b"a", b"b") == {0: [None], 1: [None]}
    assert shelf.batches == []


def test_writer_is_called_until_there_is_nothing_more(
    engine: TransferEngine, writer: Writer
) -> None:
    eventually(lambda: writer.called > 0, "the writer has not looked")
    called, writer.more = writer.called, 3
    engine.wake()
    eventually(lambda: writer.called >= called + 4, "the writer has stopped early")
    assert writer.more == 0


def test_writers_write_side_by_side_and_one_call_wakes_one(shelf: Shelf) -> None:
    together = threading.Barrier(3, timeout=PATIENCE_SECONDS)
    called = threading.Semaphore(0)
    busy = threading.Event()

    def write_some() -> int:
        called.release()
        if busy.is_set():
            together.wait()
        return 0

    engine = TransferEngine(
        shelf,  # type: ignore[arg-type]  # nothing is read
        write_some,
        block_bytes=MIB,
        limits=TransferLimits(write_threads=3),
    )
    assert called.acquire(timeout=PATIENCE_SECONDS)
    assert not called.acquire(timeout=0.05)  # the others wait to be woken
    busy.set()
    for _ in range(3):
        engine.wake()
        assert called.acquire(timeout=PATIENCE_SECONDS)
    assert not together.broken
    busy.clear()
    engine.close(PATIENCE_SECONDS)


def test_writer_survives_a_bug(engine: TransferEngine, writer: Writer) -> None:
    writer.error = ZeroDivisionError("a bug")
    engine.wake()
    eventually(lambda: writer.called > 1, "the writer has not looked")
    called, writer.error = writer.called, None
    engine.wake()
    eventually(lambda: writer.called > called, "the writer is dead")


def test_writer_looks_again_by_itself_after_a_while(
    shelf: Shelf, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "_RETRY_SECONDS", 0.001)
    engine = TransferEngine(shelf, writer, block_bytes=MIB)  # type: ignore[arg-type]  # reads only
    eventually(lambda: writer.called > 3, "the writer waits to be woken")
    engine.close(PATIENCE_SECONDS)


class TestSchedule:
    @pytest.fixture
    def shelf(self) -> Shelf:
        """A store whose reads wait until it is opened."""
        shelf = Shelf()
        shelf.opened.clear()
        return shelf

    def test_reads_beyond_the_bound_are_not_asked_for(
        self, shelf: Shelf, writer: Writer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(subject, "_READ_BATCH_BYTES", 2 * MIB)
        engine = TransferEngine(
            shelf,  # type: ignore[arg-type]  # reads only
            writer,
            block_bytes=MIB,
            limits=TransferLimits(read_threads=1, max_queued_read_bytes=5 * MIB),
        )
        fates = Fates()
        engine.read([b"a", b"b", b"c", b"d", b"e", b"f"], [memoryview(b"")] * 6, fates)
        assert fates.of == {4: [None], 5: [None]}
        shelf.opened.set()
        eventually(lambda: len(fates.of) == 6, "some block has no fate")
        assert fates.of[3] == [Read.HIT]
        assert read(engine, b"e") == {0: [Read.HIT]}  # there is room again
        engine.close(PATIENCE_SECONDS)

    def test_one_part_is_read_however_low_the_bound(self, shelf: Shelf, writer: Writer) -> None:
        shelf.opened.set()
        engine = TransferEngine(
            shelf,  # type: ignore[arg-type]  # reads only
            writer,
            block_bytes=8 * MIB,
            limits=TransferLimits(max_queued_read_bytes=1),
        )
        assert read(engine, b"a") == {0: [Read.HIT]}
        engine.close(PATIENCE_SECONDS)

    def test_nothing_is_written_while_a_read_waits(
        self, shelf: Shelf, writer: Writer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(subject, "_YIELD_SECONDS", PATIENCE_SECONDS)
        monkeypatch.setattr(subject, "_RETRY_SECONDS", PATIENCE_SECONDS)
        engine = TransferEngine(shelf, writer, block_bytes=MIB)  # type: ignore[arg-type]  # reads only
        eventually(lambda: writer.called == 1, "the writer has not looked")
        fates = Fates()
        engine.read([b"a"], [memoryview(b"")], fates)
        assert shelf.reading.acquire(timeout=PATIENCE_SECONDS)
        engine.wake()
        time.sleep(0.05)  # time to do wrong
        assert writer.called == 1
        shelf.opened.set()
        eventually(lambda: writer.called > 1, "the writer does not go on")
        engine.close(PATIENCE_SECONDS)

    def test_reads_that_never_pause_do_not_stop_the_writer(
        self, shelf: Shelf, writer: Writer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(subject, "_YIELD_SECONDS", 0.001)
        engine = TransferEngine(shelf, writer, block_bytes=MIB)  # type: ignore[arg-type]  # reads only
        engine.read([b"a"], [memoryview(b"")], Fates())
        called, writer.more = writer.called, 3
        engine.wake()
        eventually(lambda: writer.called > called + 3, "the writer waits for a read")
        shelf.opened.set()
        engine.close(PATIENCE_SECONDS)

    @pytest.mark.parametrize("threads", [1, 4])
    def test_writes_keep_to_their_rate(self, shelf: Shelf, writer: Writer, threads: int) -> None:
        writer.more = 1000
        started = time.monotonic()
        engine = TransferEngine(
            shelf,  # type: ignore[arg-type]  # reads only
            writer,
            block_bytes=MIB,
            limits=TransferLimits(write_threads=threads, write_bytes_per_second=100 * MIB),
        )
        for _ in range(threads):
            engine.wake()
        eventually(lambda: writer.called >= 24, "the writer does not write")
        assert time.monotonic() - started >= 0.18
        engine.close(PATIENCE_SECONDS)
        assert writer.called < 1000


def test_part_that_nobody_wants_any_more_is_not_read_and_not_told_of(
    engine: TransferEngine, shelf: Shelf
) -> None:
    fates, asked = Fates(), list[tuple[int, int]]()

    def begin(start: int, count: int) -> bool:
        asked.append((start, count))
        return start != 2

    keys = [b"a", b"b", b"c", b"d", b"e"]
    engine.read(keys, [memoryview(bytearray(1)) for _ in keys], fates, begin)
    eventually(lambda: len(asked) == 3 and not engine._queued_bytes, "it does not end")
    eventually(lambda: len(fates.of) == 3, "some block has no fate")
    assert sorted(asked) == [(0, 2), (2, 2), (4, 1)]
    assert fates.of == {0: [Read.HIT], 1: [Read.HIT], 4: [Read.HIT]}
    assert sorted(shelf.batches) == [[b"a", b"b"], [b"e"]]


def test_bug_in_the_question_whether_a_part_is_wanted_is_a_fate(engine: TransferEngine) -> None:
    fates = Fates()

    def begin(_start: int, _count: int) -> bool:
        raise ValueError("a bug")

    engine.read([b"a"], [memoryview(bytearray(1))], fates, begin)
    eventually(lambda: fates.of == {0: [None]}, "the block has no fate")


def test_parts_that_wait_can_be_given_up_and_have_one_fate(shelf: Shelf, writer: Writer) -> None:
    limits = TransferLimits(read_threads=1)
    engine = TransferEngine(shelf, writer, block_bytes=2 * MIB, limits=limits)  # type: ignore[arg-type]  # reads only
    shelf.opened.clear()
    fates = Fates()
    keys = [b"a", b"b", b"c", b"d", b"e"]
    engine.read(keys, [memoryview(bytearray(1)) for _ in keys], fates)
    assert shelf.reading.acquire(timeout=PATIENCE_SECONDS)
    assert engine.is_reading
    engine.give_up()
    assert fates.of == {2: [None], 3: [None], 4: [None]}
    engine.give_up()
    shelf.opened.set()
    eventually(lambda: not engine.is_reading, "it does not end")
    eventually(lambda: len(fates.of) == 5, "some block has no fate")
    engine.read([b"f"], [memoryview(bytearray(1))], fates)
    eventually(lambda: shelf.batches == [[b"a", b"b"], [b"f"]], "something else is read")
    eventually(lambda: fates.of[0] == [Read.HIT, Read.HIT], "the block has no fate")
    engine.close(PATIENCE_SECONDS)

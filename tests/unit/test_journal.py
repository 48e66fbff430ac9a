"""The journal is replayed to what was recorded, and damage costs only what it hits."""

import os
from pathlib import Path

import pytest

from kvstrata.core.errors import FormatError
from kvstrata.core.types import StoreKey
from kvstrata.storage.disk_system import FileSystem
from kvstrata.storage.disk_table import latest
from kvstrata.storage.journal import (
    HAS_PARENT,
    JOURNAL_NAME,
    RECORD_BYTES,
    Entry,
    Journal,
    Replay,
    load_journal,
    put_records,
)

STORE_ID = b"s" * 16
SYSTEM = FileSystem()
NAMESPACE = b"n" * 16
HEADER_BYTES = 128


def key(number: int, namespace: bytes = NAMESPACE) -> StoreKey:
    return namespace + number.to_bytes(32, "big")


def entry(slot: int, parent: StoreKey | None = None) -> Entry:
    return Entry(slot, 100 + slot, parent)


def make(directory: Path) -> Journal:
    return Journal(SYSTEM, directory, STORE_ID, Replay())


def blocks(replay: Replay) -> dict[StoreKey, Entry]:
    return {
        key: Entry(slot, generation, parent if flags & HAS_PARENT else None)
        for _, _, flags, _, _, slot, _, generation, key, parent in latest(replay.puts).tolist()
    }


def replayed(directory: Path) -> dict[StoreKey, Entry]:
    return blocks(load_journal(SYSTEM, directory, STORE_ID))


def flip(directory: Path, offset_bytes: int) -> None:
    path = directory / JOURNAL_NAME
    data = bytearray(path.read_bytes())
    data[offset_bytes] ^= 1
    path.write_bytes(data)


def record(number: int) -> int:
    """Where record *number* starts."""
    return HEADER_BYTES + number * RECORD_BYTES


class TestReplay:
    def test_no_journal_is_an_empty_store(self, tmp_path: Path) -> None:
        assert replayed(tmp_path) == {}

    def test_puts_removes_and_parents_come_back(self, tmp_path: Path) -> None:
        journal = make(tmp_path)
        journal.put(put_records([(key(1), entry(0)), (key(2), entry(1, parent=key(1)))]))
        journal.remove(put_records([(key(1), entry(0))]))
        journal.close()
        assert replayed(tmp_path) == {key(2): entry(1, parent=key(1))}

    def test_the_next_generation_is_above_every_one_that_was_used(self, tmp_path: Path) -> None:
        journal = make(tmp_path)
        journal.put(put_records([(key(1), Entry(0, 41, None))]))
        journal.remove(put_records([(key(1), Entry(0, 41, None))]))
        journal.close()
        replay = load_journal(SYSTEM, tmp_path, STORE_ID)
        assert replay.generation == 42
        Journal(SYSTEM, tmp_path, STORE_ID, replay).close()
        assert load_journal(SYSTEM, tmp_path, STORE_ID).generation == 42

    def test_a_drop_takes_only_what_was_put_before_it(self, tmp_path: Path) -> None:
        journal = make(tmp_path)
        journal.put(put_records([(key(1), entry(0)), (key(1, b"o" * 16), entry(1))]))
        journal.drop(NAMESPACE)
        journal.put(put_records([(key(2), entry(2))]))
        journal.close()
        assert replayed(tmp_path) == {key(1, b"o" * 16): entry(1), key(2): entry(2)}

    def test_a_slot_belongs_to_the_last_block_put_into_it(self, tmp_path: Path) -> None:
        journal = make(tmp_path)
        journal.put(put_records([(key(1), entry(0)), (key(2), entry(0))]))
        journal.close()
        assert replayed(tmp_path) == {key(2): entry(0)}

    def test_a_compacted_journal_says_the_same(self, tmp_path: Path) -> None:
        journal = make(tmp_path)
        journal.put(put_records([(key(n), entry(n)) for n in range(9)]))
        journal.remove(put_records([(key(4), entry(4))]))
        journal.drop(b"o" * 16)
        before = replayed(tmp_path)
        journal.compact(put_records(before.items()), 500)
        journal.put(put_records([(key(10), entry(4))]))
        journal.close()
        replay = load_journal(SYSTEM, tmp_path, STORE_ID)
        assert blocks(replay) == {**before, key(10): entry(4)}
        assert (replay.compact, replay.drops, replay.generation) == (True, 1, 500)
        assert (tmp_path / JOURNAL_NAME).stat().st_size == record(9)
        assert os.listdir(tmp_path) == [JOURNAL_NAME]

    def test_compaction_is_wanted_when_most_records_are_outdated(self, tmp_path: Path) -> None:
        journal = make(tmp_path)
        journal.put(put_records([(key(n), entry(0)) for n in range(65536)]))
        assert not journal.wants_compaction(live=1)
        journal.put(put_records([(key(0), entry(0))]))
        assert journal.wants_compaction(live=1)
        assert not journal.wants_compaction(live=20000)
        journal.compact(put_records([]), 1)
        assert not journal.wants_compaction(live=1)
        journal.close()


class TestDamage:
    @pytest.mark.parametrize("kept_bytes", [0, 1, RECORD_BYTES - 1])
    def test_a_torn_tail_is_cut(self, tmp_path: Path, kept_bytes: int) -> None:
        journal = make(tmp_path)
        journal.put(put_records([(key(1), entry(0)), (key(2), entry(1))]))
        journal.close()
        os.truncate(tmp_path / JOURNAL_NAME, record(1) + kept_bytes)
        replay = load_journal(SYSTEM, tmp_path, STORE_ID)
        assert blocks(replay) == {key(1): entry(0)}
        journal = Journal(SYSTEM, tmp_path, STORE_ID, replay)
        journal.put(put_records([(key(3), entry(1))]))
        journal.close()
        assert replayed(tmp_path) == {key(1): entry(0), key(3): entry(1)}

    def test_zeros_after_the_last_record_are_cut(self, tmp_path: Path) -> None:
        journal = make(tmp_path)
        journal.put(put_records([(key(1), entry(0))]))
        journal.close()
        os.truncate(tmp_path / JOURNAL_NAME, record(40))
        replay = load_journal(SYSTEM, tmp_path, STORE_ID)
        assert (blocks(replay), replay.compact) == ({key(1): entry(0)}, False)

    @pytest.mark.parametrize("offset_bytes", range(0, RECORD_BYTES, 5))
    def test_a_flipped_bit_costs_one_record(self, tmp_path: Path, offset_bytes: int) -> None:
        journal = make(tmp_path)
        journal.put(put_records([(key(n), entry(n)) for n in range(3)]))
        journal.close()
        flip(tmp_path, record(1) + offset_bytes)
        assert replayed(tmp_path) == {key(0): entry(0), key(2): entry(2)}

    def test_an_unreadable_drop_forgets_all_that_is_older(self, tmp_path: Path) -> None:
        journal = make(tmp_path)
        journal.put(put_records([(key(1), entry(0)), (key(1, b"o" * 16), entry(1))]))
        journal.drop(NAMESPACE)
        journal.put(put_records([(key(2), entry(2))]))
        journal.close()
        flip(tmp_path, record(2) + 50)
        assert replayed(tmp_path) == {key(2): entry(2)}

    def test_a_record_in_the_wrong_place_is_skipped(self, tmp_path: Path) -> None:
        journal = make(tmp_path)
        journal.put(put_records([(key(1), entry(0)), (key(2), entry(1))]))
        journal.close()
        path = tmp_path / JOURNAL_NAME
        data = path.read_bytes()
        path.write_bytes(data[: record(1)] + data[record(0) : record(1)])
        assert replayed(tmp_path) == {key(1): entry(0)}

    @pytest.mark.parametrize("offset_bytes", [0, 12, 16, 32, 40, 48, 63])
    def test_a_damaged_header_is_refused(self, tmp_path: Path, offset_bytes: int) -> None:
        make(tmp_path).close()
        flip(tmp_path, offset_bytes)
        with pytest.raises(FormatError, match=r"no journal|is damaged"):
            load_journal(SYSTEM, tmp_path, STORE_ID)

    def test_a_short_header_is_refused(self, tmp_path: Path) -> None:
        make(tmp_path).close()
        os.truncate(tmp_path / JOURNAL_NAME, HEADER_BYTES - 1)
        with pytest.raises(FormatError, match="no journal"):
            load_journal(SYSTEM, tmp_path, STORE_ID)

    def test_another_format_version_is_refused(self, tmp_path: Path) -> None:
        make(tmp_path).close()
        flip(tmp_path, 8)
        with pytest.raises(FormatError, match="has format version 3"):
            load_journal(SYSTEM, tmp_path, STORE_ID)

    def test_the_journal_of_another_store_is_refused(self, tmp_path: Path) -> None:
        make(tmp_path).close()
        with pytest.raises(FormatError, match=f"belongs to store {STORE_ID.hex()}"):
            load_journal(SYSTEM, tmp_path, b"t" * 16)


class TestFullDisk:
    def test_half_an_append_is_taken_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        journal = make(tmp_path)
        journal.put(put_records([(key(1), entry(0))]))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", _half_then_full())
            with pytest.raises(OSError, match="No space"):
                journal.put(put_records([(key(n), entry(n)) for n in range(2, 6)]))
        assert (tmp_path / JOURNAL_NAME).stat().st_size == record(1)
        journal.put(put_records([(key(9), entry(9))]))
        journal.close()
        assert replayed(tmp_path) == {key(1): entry(0), key(9): entry(9)}

    def test_a_tail_that_could_not_be_cut_is_cut_before_the_next_append(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        journal = make(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", _half_then_full())
            patch.setattr(os, "ftruncate", _fail)
            with pytest.raises(OSError, match="Input/output"):
                journal.put(put_records([(key(n), entry(n)) for n in range(4)]))
            with pytest.raises(OSError, match="Input/output"):
                journal.put(put_records([(key(8), entry(8))]))
        journal.put(put_records([(key(9), entry(9))]))
        journal.close()
        assert replayed(tmp_path) == {key(9): entry(9)}

    def test_a_failed_compaction_keeps_the_journal_and_waits_before_the_next(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        journal = make(tmp_path)
        journal.put(put_records([(key(n), entry(n)) for n in range(65537)]))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", _fail)
            with pytest.raises(OSError, match="Input/output"):
                journal.compact(put_records([]), 1)
        assert os.listdir(tmp_path) == [JOURNAL_NAME]
        assert not journal.wants_compaction(live=0)
        journal.put(put_records([(key(70000), entry(70000))]))
        journal.close()
        assert len(replayed(tmp_path)) == 65538


def _half_then_full() -> object:
    real, calls = os.pwrite, 0

    def pwrite(fd: int, data: memoryview, offset_bytes: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            return real(fd, data[: len(data) // 2], offset_bytes)
        raise OSError(28, "No space left on device")

    return pwrite


def _fail(*_: int) -> None:
    raise OSError(5, "Input/output error")

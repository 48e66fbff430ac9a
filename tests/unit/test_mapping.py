import os
import threading

import numpy as np
import pytest

from kvstrata.core.errors import ConfigError, ProtocolError
from kvstrata.storage.mapping import HostMapping, header_bytes

SERVER = b"s" * 16


@pytest.mark.parametrize(
    ("slots", "expected"), [(1, 4096), (512, 4096), (513, 8192), (1024, 8192), (1025, 12288)]
)
def test_table_is_padded_to_whole_pages(slots: int, expected: int) -> None:
    assert header_bytes(slots) == expected


def test_new_mapping_is_zero_and_has_the_documented_layout() -> None:
    mapping = HostMapping.create(3, 8192, SERVER)
    assert mapping.server_id == SERVER
    assert mapping.generations.tolist() == [0, 0, 0]
    assert mapping.data.shape == (3, 8192)
    assert not mapping.data.any()
    mapping.generations[1] = 0x0102030405060708
    mapping.data[2, 5] = 7
    raw = os.pread(mapping.fd, 4096 + 3 * 8192, 0)
    assert len(raw) == 4096 + 3 * 8192
    assert raw[8:16] == bytes([8, 7, 6, 5, 4, 3, 2, 1])
    assert raw[4096 + 2 * 8192 + 5] == 7
    mapping.close()


def test_two_mappings_of_one_descriptor_see_each_other() -> None:
    ours = HostMapping.create(2, 4096, SERVER)
    theirs = HostMapping.from_fd(os.dup(ours.fd), SERVER, 2, 4096)
    ours.data[1] = 9
    theirs.generations[0] = 4
    assert (theirs.data[1] == 9).all()
    assert ours.generations.tolist() == [4, 0]
    ours.close()
    theirs.close()


def test_views_survive_close() -> None:
    mapping = HostMapping.create(2, 4096, SERVER)
    mapping.data[0] = 5
    row = mapping.data[0]
    mapping.close()
    mapping.close()
    del mapping
    assert row.tolist() == [5] * 4096


def test_memory_cannot_be_shrunk_under_a_reader() -> None:
    mapping = HostMapping.create(1, 4096, SERVER)
    with pytest.raises(PermissionError):
        os.ftruncate(mapping.fd, 4096)
    assert os.fstat(mapping.fd).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(mapping.fd)
    mapping.close()


@pytest.mark.parametrize("slots", [1, 3])
def test_file_of_another_length_is_refused_and_left_to_the_caller(slots: int) -> None:
    mapping = HostMapping.create(2, 4096, SERVER)
    fd = os.dup(mapping.fd)
    with pytest.raises(ProtocolError, match="has 12288 bytes"):
        HostMapping.from_fd(fd, SERVER, slots, 4096)
    os.close(fd)
    mapping.close()


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 4096), (1, 0), (1, 4095), (1, 4097)])
def test_impossible_shapes_are_refused(slots: int, slot_bytes: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 4096"):
        HostMapping.create(slots, slot_bytes, SERVER)


def test_failed_mapping_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(ConfigError, match="Cannot allocate memory"):
        HostMapping.create(1, 4096, SERVER)
    assert len(os.listdir("/proc/self/fd")) <= before  # those of earlier tests may go


def _allocated_bytes(mapping: HostMapping) -> int:
    return os.fstat(mapping.fd).st_blocks * 512


@pytest.mark.parametrize("advice", [23, 9999], ids=["populate", "kernel without populate"])
def test_touch_faults_every_slot_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, advice: int
) -> None:
    monkeypatch.setattr("kvstrata.storage.mapping._MADV_POPULATE_WRITE", advice)
    mapping = HostMapping.create(3, 1 << 20, SERVER)
    mapping.data[1] = 3
    mapping.touch(threading.Event())
    assert _allocated_bytes(mapping) >= 3 << 20
    assert np.array_equal(mapping.data.max(axis=1), [0, 3, 0])
    mapping.close()


def test_touch_stops_when_told() -> None:
    mapping = HostMapping.create(3, 1 << 20, SERVER)
    stop = threading.Event()
    stop.set()
    mapping.touch(stop)
    assert _allocated_bytes(mapping) == 0
    mapping.close()

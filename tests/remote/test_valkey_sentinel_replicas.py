"""Reads from the replicas that sentinels name: they share the work and outlive their master."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tests.ports import free_port
from tests.remote.valkey_servers import Server, Watched, eventually

from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.remote.valkey import cluster
from kvstrata.storage.remote.valkey.store import ValkeyAccess, ValkeyStore
from kvstrata.testing.samples import dirty, key, random_value

BLOCK_BYTES: Final = 4096
WANTED: Final = [key(number) for number in range(20)]
ALL_HIT: Final = [Read.HIT] * 20


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path)
    yield watched
    watched.kill()


def open_on(watched: Watched, *, replicas: bool = True) -> ValkeyStore:
    """Knows the sentinel, and a place where there is none."""
    return ValkeyStore(
        f"valkey://127.0.0.1:{free_port()},127.0.0.1:{watched.sentinel.port}",
        block_bytes=BLOCK_BYTES,
        timeout_seconds=1.0,
        access=ValkeyAccess(sentinel="main", replicas=replicas),
    )


def write(store: ValkeyStore, wanted: list[StoreKey] = WANTED) -> list[Write]:
    values = [memoryview(random_value(WANTED.index(each), BLOCK_BYTES)) for each in wanted]
    return store.write(wanted, [None] * len(wanted), values)


def read(store: ValkeyStore) -> list[Read]:
    """Every hit holds the right bytes."""
    buffers = [dirty(BLOCK_BYTES) for _ in WANTED]
    fates = store.read_into(WANTED, buffers)
    for number, (fate, buffer) in enumerate(zip(fates, buffers, strict=True)):
        assert fate is not Read.HIT or buffer == random_value(number, BLOCK_BYTES)
    return fates


def filled(watched: Watched, store: ValkeyStore) -> None:
    """All is written, and has come to the replica."""
    assert write(store) == [Write.STORED] * 20
    eventually(lambda: watched.servers[1].ask("DBSIZE") == 20, "the replica does not follow")


def calls(server: Server, word: str) -> int:
    """How often a command was called there."""
    return int(server.info("commandstats").get(f"cmdstat_{word}", {}).get("calls", 0))


def test_master_and_replica_share_the_reads(watched: Watched) -> None:
    """And the replica is asked for nothing that only the master can decide."""
    master, replica = watched.servers
    store = open_on(watched)
    filled(watched, store)
    assert (calls(replica, "get"), calls(replica, "exists")) == (0, 0)
    for _ in range(16):
        assert read(store) == ALL_HIT
        assert store.exists(WANTED) == [True] * 20
    for word in ("get", "exists"):
        assert calls(replica, word) > 0
        assert calls(master, word) > 0
    assert store.remove(WANTED) == [True] * 20
    store.close()


def test_a_replica_is_not_asked_unless_it_is_wanted(watched: Watched) -> None:
    store = open_on(watched, replicas=False)
    filled(watched, store)
    for _ in range(6):
        assert read(store) == ALL_HIT
    assert calls(watched.servers[1], "get") == 0
    store.close()


def test_a_dead_master_is_read_from_its_replica_and_then_replaced_by_it(watched: Watched) -> None:
    store = open_on(watched)
    filled(watched, store)
    watched.servers[0].kill()
    fates = [read(store) for _ in range(8)]
    assert fates.count(ALL_HIT) >= 7  # one call finds out
    assert {fate for each in fates for fate in each} <= {Read.HIT, Read.FAILED}
    eventually(lambda: watched.master() == watched.servers[1].port, "nobody takes over")
    eventually(lambda: Write.FAILED not in write(store), "the new master is not written to")
    assert read(store) == ALL_HIT
    store.close()


def test_a_replica_that_dies_leaves_its_master(watched: Watched) -> None:
    store = open_on(watched)
    filled(watched, store)
    watched.servers[1].kill()
    fates = [read(store) for _ in range(8)]
    assert fates.count(ALL_HIT) >= 7  # one call finds out
    assert write(store) == [Write.EXISTS] * 20
    store.close()


def test_a_replica_that_comes_back_is_read_again(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long after the sentinel has told that it is down; and if that dies, too, reads go on."""
    monkeypatch.setattr(cluster, "_MAP_SECONDS", 0.2)
    master, replica = watched.servers
    replica.kill()
    eventually(watched.misses_replica, "the sentinel does not miss the replica")
    store = open_on(watched)
    assert write(store) == [Write.STORED] * 20
    assert [read(store) for _ in range(8)] == [ALL_HIT] * 8
    replica.restart()
    eventually(lambda: replica.ask("DBSIZE") == 20, "the replica does not follow")

    def is_read() -> bool:
        assert read(store) == ALL_HIT
        return calls(replica, "get") > 0

    eventually(is_read, "the replica is not read")
    watched.sentinel.kill()
    before = calls(replica, "get"), calls(master, "get")
    end = time.monotonic() + 1.0  # the map is asked for several times
    while time.monotonic() < end:
        assert read(store) == ALL_HIT
    assert calls(replica, "get") > before[0]
    assert calls(master, "get") > before[1]
    store.close()


def test_a_master_that_is_relieved_is_written_to_no_more(watched: Watched) -> None:
    old, new = watched.servers
    store = open_on(watched)
    filled(watched, store)
    eventually(watched.relieve, "the sentinel does not relieve the master")
    eventually(lambda: watched.master() == new.port, "nobody takes over")
    eventually(lambda: old.info("replication")["role"] == "slave", "the master does not step back")
    new.ask("FLUSHALL")
    eventually(lambda: write(store) == [Write.STORED] * 20, "the new master is not written to")
    eventually(lambda: old.ask("DBSIZE") == 20, "the old master does not follow")
    assert read(store) == ALL_HIT
    store.close()

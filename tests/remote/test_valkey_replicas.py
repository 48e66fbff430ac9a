"""Reads from the replicas of a cluster: they share the work, may lag, and outlive their master."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tests.remote.valkey_servers import ClusterOfThree, Server, eventually

from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.remote.valkey.store import ValkeyAccess, ValkeyStore
from kvstrata.testing.samples import dirty, key, random_value

BLOCK_BYTES: Final = 4096
WANTED: Final = [key(number) for number in range(60)]
# Nobody tells of a replica that its master has sent nothing, which is a ping at the latest.
QUICK: Final = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterOfThree]:
    cluster = ClusterOfThree(tmp_path, "--cluster-require-full-coverage", "no", *QUICK)
    yield cluster
    cluster.kill()


def open_on(cluster: ClusterOfThree, *, replicas: bool = True) -> ValkeyStore:
    return ValkeyStore(
        f"valkey://127.0.0.1:{cluster.servers[1].port}",
        block_bytes=BLOCK_BYTES,
        timeout_seconds=1.0,
        access=ValkeyAccess(prefix="p", cluster=True, replicas=replicas),
    )


def write(store: ValkeyStore, wanted: list[StoreKey]) -> list[Write]:
    values = [memoryview(random_value(WANTED.index(each), BLOCK_BYTES)) for each in wanted]
    return store.write(wanted, [None] * len(wanted), values)


def read(store: ValkeyStore) -> list[Read]:
    """Every hit holds the right bytes."""
    buffers = [dirty(BLOCK_BYTES) for _ in WANTED]
    fates = store.read_into(WANTED, buffers)
    for number, (fate, buffer) in enumerate(zip(fates, buffers, strict=True)):
        assert fate is not Read.HIT or buffer == random_value(number, BLOCK_BYTES)
    return fates


def calls(server: Server, word: str) -> int:
    """How often a command was called there."""
    return int(server.info("commandstats").get(f"cmdstat_{word}", {}).get("calls", 0))


def held_by(cluster: ClusterOfThree, master: Server) -> list[bool]:
    return [cluster.of(each, "p") is master for each in WANTED]


def test_master_and_replica_share_the_reads(cluster: ClusterOfThree, tmp_path: Path) -> None:
    """And the replica is asked for nothing that only the master can decide."""
    master = cluster.servers[0]
    replica = cluster.replicate(master, tmp_path / "replica", *QUICK)
    store = open_on(cluster)
    assert write(store, WANTED) == [Write.STORED] * 60
    held = held_by(cluster, master).count(True)
    eventually(lambda: replica.ask("DBSIZE") == held, "the replica does not follow")
    before = calls(replica, "exists"), calls(replica, "get")
    assert before == (0, 0)
    for _ in range(12):
        assert read(store) == [Read.HIT] * 60
        assert store.exists(WANTED) == [True] * 60
    for word in ("get", "exists"):
        assert calls(replica, word) > 0
        assert calls(master, word) > 0
    assert store.remove(WANTED) == [True] * 60
    store.close()


def test_a_replica_is_not_asked_unless_it_is_wanted(
    cluster: ClusterOfThree, tmp_path: Path
) -> None:
    replica = cluster.replicate(cluster.servers[0], tmp_path / "replica", *QUICK)
    store = open_on(cluster, replicas=False)
    write(store, WANTED)
    for _ in range(6):
        assert read(store) == [Read.HIT] * 60
    assert calls(replica, "get") == 0
    store.close()


def test_what_has_not_come_to_a_replica_is_a_miss(cluster: ClusterOfThree, tmp_path: Path) -> None:
    """And is there once it has come."""
    master = cluster.servers[0]
    replica = cluster.replicate(master, tmp_path / "replica", *QUICK)
    replica.ask("CONFIG SET", "masteruser", "nobody", "masterauth", "wrong")
    master.ask("CLIENT KILL", "TYPE", "replica")
    eventually(
        lambda: replica.info("replication")["master_link_status"] == "down", "it still follows"
    )
    store = open_on(cluster)
    assert write(store, WANTED) == [Write.STORED] * 60
    held = held_by(cluster, master)
    lagging = [Read.MISS if each else Read.HIT for each in held]
    seen = [read(store) for _ in range(20)]
    assert lagging in seen
    assert [Read.HIT] * 60 in seen
    assert all(each in (lagging, [Read.HIT] * 60) for each in seen)
    assert write(store, WANTED) == [Write.EXISTS] * 60
    replica.ask("CONFIG SET", "masteruser", "", "masterauth", "")
    eventually(lambda: replica.ask("DBSIZE") == held.count(True), "the replica does not follow")
    assert all(read(store) == [Read.HIT] * 60 for _ in range(6))
    store.close()


def test_a_replica_is_read_while_its_master_is_dead(
    cluster: ClusterOfThree, tmp_path: Path
) -> None:
    """What the master held is read, and not written."""
    master = cluster.servers[0]
    replica = cluster.replicate(
        master, tmp_path / "replica", "--cluster-replica-no-failover", "yes", *QUICK
    )
    store = open_on(cluster)
    half = WANTED[::2]
    write(store, half)
    held = held_by(cluster, master)
    eventually(lambda: replica.ask("DBSIZE") == sum(held[::2]), "the replica does not follow")
    master.kill()
    read(store)  # finds out, or has the luck to ask the replica
    write(store, half)
    assert read(store) == [Read.HIT, Read.MISS] * 30
    fates = write(store, WANTED)
    assert fates == [
        Write.FAILED if gone else there
        for gone, there in zip(held, [Write.EXISTS, Write.STORED] * 30, strict=True)
    ]
    store.close()


def test_a_replica_that_dies_leaves_its_master(cluster: ClusterOfThree, tmp_path: Path) -> None:
    replica = cluster.replicate(cluster.servers[0], tmp_path / "replica", *QUICK)
    store = open_on(cluster)
    write(store, WANTED)
    replica.kill()
    fates = [read(store) for _ in range(12)]
    assert fates.count([Read.HIT] * 60) >= 9  # a call now and then finds out
    store.close()


def test_a_replica_that_takes_over_is_written_to(cluster: ClusterOfThree, tmp_path: Path) -> None:
    for server in cluster.servers:
        server.ask("CONFIG SET", "cluster-node-timeout", 2000)
    master = cluster.servers[2]
    replica = cluster.replicate(
        master, tmp_path / "replica", "--cluster-node-timeout", "2000", *QUICK
    )
    store = open_on(cluster)
    half = WANTED[::2]
    write(store, half)
    held = held_by(cluster, master)
    eventually(lambda: replica.ask("DBSIZE") == sum(held[::2]), "the replica does not follow")
    master.kill()
    eventually(lambda: Write.FAILED not in write(store, WANTED), "nobody takes over")
    eventually(lambda: read(store) == [Read.HIT] * 60, "the new master is not asked")
    store.close()

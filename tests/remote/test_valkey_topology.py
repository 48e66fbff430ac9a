"""The store on a cluster whose slots move, and on a master that sentinels replace."""

import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import ClassVar, Final

import pytest
from tests.ports import free_port
from tests.remote.faults import folder_of
from tests.remote.valkey_servers import (
    ClusterOfThree,
    Server,
    Watched,
    eventually,
    keys_of_one_slot,
    name_of,
)
from valkey.crc import key_slot

from kvstrata.core.errors import TierUnavailable
from kvstrata.core.remote_tiers import ValkeyTier
from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.remote.open import open_remote
from kvstrata.storage.remote.valkey.store import ValkeyAccess, ValkeyStore
from kvstrata.storage.store import Store
from kvstrata.testing import StoreConformance, Traits
from kvstrata.testing.samples import ONE, dirty, fetch, key, random_value

BLOCK_BYTES: Final = 4096


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterOfThree]:
    cluster = ClusterOfThree(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.kill()


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return folder_of(tmp_path)


def open_cluster(cluster: ClusterOfThree, prefix: str) -> ValkeyStore:
    """Knows two of the three at first, and a third place where nobody is."""
    hosts = [f"127.0.0.1:{server.port}" for server in cluster.servers[:2]]
    return ValkeyStore(
        f"valkey://{','.join([*hosts, f'127.0.0.1:{free_port()}'])}",
        block_bytes=BLOCK_BYTES,
        access=ValkeyAccess(prefix=prefix, cluster=True),
    )


def value(number: int) -> bytes:
    return random_value(number, BLOCK_BYTES)


class TestConformanceOfACluster(StoreConformance):
    traits = Traits(persistent=True, bounded=False, counts=False, variable=True)
    cluster: ClassVar[ClusterOfThree]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _serve(cls, cluster: ClusterOfThree) -> None:
        cls.cluster = cluster

    def open_store(self, place: Path) -> Store:
        return open_cluster(self.cluster, folder_of(place))

    def damage(self, store: Store, place: Path, wanted: StoreKey) -> None:
        prefix = folder_of(place)
        holder, name = self.cluster.of(wanted, prefix), name_of(wanted, prefix)
        stored = bytearray(holder.ask("GET", name))
        stored[200] ^= 1
        holder.ask("SET", name, bytes(stored))


class Moving:
    """A slot on its way from one server of a cluster to another."""

    def __init__(self, cluster: ClusterOfThree, prefix: str, slot_of: StoreKey) -> None:
        self.cluster = cluster
        self.slot = key_slot(name_of(slot_of, prefix))
        self.source = cluster.of(slot_of, prefix)
        self.target = next(each for each in cluster.servers if each is not self.source)
        self._ids = [each.ask("CLUSTER MYID").decode() for each in (self.source, self.target)]
        self.target.ask("CLUSTER SETSLOT", self.slot, "IMPORTING", self._ids[0])
        self.source.ask("CLUSTER SETSLOT", self.slot, "MIGRATING", self._ids[1])

    def move_keys(self, count: int = 1000) -> None:
        names = self.source.ask("CLUSTER GETKEYSINSLOT", self.slot, count)
        for name in names:
            self.source.ask("MIGRATE", "127.0.0.1", self.target.port, name, 0, 5000)

    def end(self) -> None:
        for server in (self.target, self.source, *self.cluster.servers):
            server.ask("CLUSTER SETSLOT", self.slot, "NODE", self._ids[1])


def test_a_slot_that_moves_while_it_is_used(cluster: ClusterOfThree, prefix: str) -> None:
    """Before, during and after: what was written is read, and new blocks find their place."""
    store = open_cluster(cluster, prefix)
    wanted = keys_of_one_slot(6, prefix)
    others = [key(10_000 + number) for number in range(20)]
    assert (
        store.write(wanted[:4], [None] * 4, [memoryview(value(n)) for n in range(4)])
        == [Write.STORED] * 4
    )
    store.write(others, [None] * 20, [memoryview(value(n)) for n in range(20)])
    asked, moved = cluster.errors("ASK"), cluster.errors("MOVED")

    moving = Moving(cluster, prefix, wanted[0])
    moving.move_keys(2)
    assert store.exists(wanted) == [True] * 4 + [False] * 2
    fates = store.write(wanted[3:5], [None] * 2, [memoryview(value(9)), memoryview(value(4))])
    assert fates == [Write.EXISTS, Write.STORED]
    check(store, wanted[:5], others)
    assert store.remove([wanted[4], wanted[4]]) == [True, False]
    assert cluster.errors("ASK") > asked

    moving.move_keys()
    moving.end()
    check(store, wanted[:4], others)
    assert cluster.errors("MOVED") > moved
    moved = cluster.errors("MOVED")
    check(store, wanted[:4], others)
    assert cluster.errors("MOVED") == moved, "the map of slots was not asked for anew"
    assert store.drop_namespace(ONE) == 24
    store.close()


def check(store: Store, wanted: list[StoreKey], others: list[StoreKey]) -> None:
    """Key n of either list is read, in one mixed batch, and has value n."""
    batch = [(each, n) for group in (wanted, others) for n, each in enumerate(group)]
    random.Random(1).shuffle(batch)
    buffers = [dirty(BLOCK_BYTES) for _ in batch]
    assert store.read_into([each for each, _ in batch], buffers) == [Read.HIT] * len(batch)
    for buffer, (_, number) in zip(buffers, batch, strict=True):
        assert buffer == value(number)


def test_slots_that_move_under_readers_and_writers(cluster: ClusterOfThree, prefix: str) -> None:
    """No call fails, nothing is lost and no byte is wrong."""
    wanted = keys_of_one_slot(12, prefix)
    stores = [open_cluster(cluster, prefix) for _ in range(2)]
    stores[0].write(wanted[:6], [None] * 6, [memoryview(value(n)) for n in range(6)])
    done = threading.Event()
    failed: list[BaseException] = []

    def work(store: Store, seed: int) -> None:
        draw = random.Random(seed)
        try:
            while not done.is_set():
                check(store, wanted[:6], [])
                number = draw.randrange(6, 12)
                store.write([wanted[number]], [None], [memoryview(value(number))])
                assert fetch(store, wanted[number]) in (value(number), Read.MISS)
                store.remove([wanted[number]])
        except (AssertionError, TierUnavailable) as e:
            failed.append(e)

    threads = [
        threading.Thread(target=work, args=[store, seed]) for seed, store in enumerate(stores * 2)
    ]
    for thread in threads:
        thread.start()
    for _ in range(4):
        moving = Moving(cluster, prefix, wanted[0])
        moving.move_keys(3)
        moving.move_keys()
        moving.end()
    done.set()
    for thread in threads:
        thread.join()
    assert not failed
    for store in stores:
        store.close()


def test_a_server_of_a_cluster_that_is_not_told_so(cluster: ClusterOfThree, prefix: str) -> None:
    """The error says which setting is missing."""
    wrong = next(each for each in cluster.servers if each is not cluster.of(key(1), prefix))
    store = ValkeyStore(
        f"valkey://127.0.0.1:{wrong.port}",
        block_bytes=BLOCK_BYTES,
        access=ValkeyAccess(prefix=prefix),
    )
    with pytest.raises(TierUnavailable, match="set cluster") as caught:
        fetch(store, key(1))
    assert caught.value.cause == "refused"
    store.close()


def test_a_single_server_that_is_said_to_be_a_cluster(tmp_path: Path) -> None:
    server = Server(tmp_path)
    store = ValkeyStore(
        f"valkey://127.0.0.1:{server.port}",
        block_bytes=BLOCK_BYTES,
        access=ValkeyAccess(cluster=True),
    )
    with pytest.raises(TierUnavailable) as caught:
        fetch(store, key(1))
    server.kill()
    assert caught.value.cause == "refused"
    store.close()


@pytest.mark.parametrize(
    "slots",
    [
        b":7\r\n",
        b"*1\r\n*1\r\n:0\r\n",
        b"*1\r\n*3\r\n$1\r\na\r\n:5\r\n*2\r\n$1\r\nh\r\n:7\r\n",
        b"*1\r\n*3\r\n:0\r\n:16384\r\n*2\r\n$1\r\nh\r\n:7\r\n",
        b"*1\r\n*3\r\n:0\r\n:5\r\n*2\r\n$1\r\nh\r\n$1\r\nx\r\n",
        b"*1\r\n*3\r\n:0\r\n:5\r\n*2\r\n$1\r\n\xff\r\n:7\r\n",
    ],
)
def test_a_map_of_a_cluster_that_makes_no_sense(slots: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            client, _ = listener.accept()
            with client:
                while b"SLOTS" not in client.recv(1000):
                    client.sendall(b"+OK\r\n")
                client.sendall(slots)
                client.recv(1000)

        threading.Thread(target=answer, daemon=True).start()
        store = ValkeyStore(
            f"valkey://127.0.0.1:{listener.getsockname()[1]}",
            block_bytes=BLOCK_BYTES,
            timeout_seconds=1.0,
            access=ValkeyAccess(cluster=True),
        )
        with pytest.raises(TierUnavailable) as caught:
            fetch(store, key(1))
        assert caught.value.cause == "refused"
        store.close()


def test_slots_of_a_dead_server_that_another_takes_over(tmp_path: Path) -> None:
    """The store asks for the map anew by itself, and finds what is there."""
    cluster = ClusterOfThree(tmp_path)
    try:
        store = open_cluster(cluster, "p")
        wanted = [key(number) for number in range(60)]
        store.write(wanted, [None] * 60, [memoryview(value(0))] * 60)
        dead, *_ = (each for each in cluster.servers if each is not cluster.servers[0])
        lost = [cluster.of(each, "p") is dead for each in wanted]
        assert any(lost)
        dead.kill()
        assert Read.FAILED in store.read_into(wanted, [dirty(BLOCK_BYTES) for _ in wanted])
        cluster.take_over(dead, cluster.servers[0])
        buffers = [dirty(BLOCK_BYTES) for _ in wanted]
        found: list[Read] = []

        def is_read() -> bool:
            with suppress(TierUnavailable):  # while the servers themselves agree on it
                found[:] = store.read_into(wanted, buffers)
            return bool(found) and Read.FAILED not in found

        eventually(is_read, "the store does not find the new owner")
        assert found == [Read.MISS if each else Read.HIT for each in lost]
        store.close()
    finally:
        cluster.kill()


# Sentinels


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path)
    yield watched
    watched.kill()


def open_watched(watched: Watched, name: str = "main") -> ValkeyStore:
    """Knows the sentinel, and a place where there is none."""
    return ValkeyStore(
        f"valkey://127.0.0.1:{free_port()},127.0.0.1:{watched.sentinel.port}",
        block_bytes=BLOCK_BYTES,
        access=ValkeyAccess(sentinel=name),
    )


def until_it_works(call: Callable[[], object]) -> None:
    def works() -> bool:
        try:
            call()
        except TierUnavailable:
            return False
        return True

    eventually(works, "the store does not find the new master")


def test_a_master_that_dies_is_replaced(watched: Watched) -> None:
    store = open_watched(watched)
    assert store.write([key(1)], [None], [memoryview(value(1))]) == [Write.STORED]
    eventually(lambda: watched.servers[1].ask("DBSIZE") == 1, "the replica does not follow")
    watched.servers[0].kill()
    with pytest.raises(TierUnavailable):
        fetch(store, key(1))
    until_it_works(lambda: store.write([key(2)], [None], [memoryview(value(2))]))
    assert watched.master() == watched.servers[1].port
    assert fetch(store, key(1)) == value(1)
    assert fetch(store, key(2)) == value(2)
    store.close()


def test_a_master_that_is_relieved_lives_on_as_a_replica(watched: Watched) -> None:
    """What the store knows is out of date then: it asks the sentinel, and writes to the new one."""
    store = open_watched(watched)
    store.write([key(1)], [None], [memoryview(value(1))])
    old, new = watched.servers
    eventually(lambda: new.ask("DBSIZE") == 1, "the replica does not follow")
    eventually(watched.relieve, "the sentinel does not relieve the master")
    eventually(lambda: watched.master() == new.port, "the master is not relieved")
    old.ask("REPLICAOF", "127.0.0.1", new.port)  # as the sentinel does, some seconds later
    until_it_works(lambda: store.write([key(2)], [None], [memoryview(value(2))]))
    assert fetch(store, key(2)) == value(2)
    assert new.ask("DBSIZE") == 2
    store.close()


def test_a_master_that_no_sentinel_knows(watched: Watched) -> None:
    store = open_watched(watched, "other")
    with pytest.raises(TierUnavailable, match="no master") as caught:
        fetch(store, key(1))
    assert caught.value.cause == "refused"
    store.close()


def open_guarded(watched: Watched, folder: Path, username: str | None, password: str) -> Store:
    """Logs in to the sentinel, and to no server."""
    file = folder / "password"
    file.write_text(f"{password}\n")
    tier = ValkeyTier(
        url=f"valkey://127.0.0.1:{watched.sentinel.port}",
        sentinel="main",
        sentinel_username=username,
        sentinel_password_file=file if password else None,
    )
    return open_remote(tier, block_bytes=BLOCK_BYTES, memory=None)


def test_a_sentinel_that_asks_for_a_login(watched: Watched, tmp_path: Path) -> None:
    """Its servers do not."""
    watched.sentinel.ask("ACL SETUSER", "kv", "on", ">s3same", "+sentinel")
    watched.sentinel.ask("ACL SETUSER", "default", "resetpass", ">of-all")
    for username, password in (("kv", "s3same"), (None, "of-all")):
        with closing(open_guarded(watched, tmp_path, username, password)) as store:
            store.write([key(1)], [None], [memoryview(value(1))])
            assert fetch(store, key(1)) == value(1)
    for username, password in (("kv", "wr0ng"), ("nobody", "s3same"), (None, "")):
        with closing(open_guarded(watched, tmp_path, username, password)) as store:
            with pytest.raises(TierUnavailable, match="let us in") as caught:
                fetch(store, key(1))
            assert caught.value.cause == "credentials"
            assert "check user, password" in (caught.value.hint or "")
            assert "wr0ng" not in str(caught.value)


def test_a_server_that_writes_nothing_is_asked_for_no_more(watched: Watched) -> None:
    """A replica by itself refuses to write: the next call connects anew."""
    store = ValkeyStore(f"valkey://127.0.0.1:{watched.servers[1].port}", block_bytes=BLOCK_BYTES)
    with pytest.raises(TierUnavailable, match="READONLY") as caught:
        store.write([key(1)], [None], [memoryview(value(1))])
    assert caught.value.cause == "refused"
    assert store.exists([key(1)]) == [False]
    store.close()

"""A cluster of which one server is dead, hangs or refuses: the others go on, and it is spared."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from tests.caches import ALICE, keys
from tests.remote.faults import BLOCK_BYTES as NODE_BLOCK_BYTES
from tests.remote.faults import Node
from tests.remote.valkey_servers import ClusterOfThree, Server, eventually

from kvstrata.core.errors import FaultCause, TierUnavailable
from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.remote.valkey.store import ValkeyAccess, ValkeyStore
from kvstrata.testing.samples import ONE, dirty, key, random_value

BLOCK_BYTES: Final = 4096
WANTED: Final = [key(number) for number in range(60)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterOfThree]:
    cluster = ClusterOfThree(tmp_path, "--cluster-require-full-coverage", "no")
    yield cluster
    cluster.kill()


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.storage.remote.valkey.cluster._PAUSE_SECONDS", 0.2)


def open_on(cluster: ClusterOfThree, *, block_bytes: int = BLOCK_BYTES) -> ValkeyStore:
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in cluster.servers)
    return ValkeyStore(
        f"valkey://{hosts}",
        block_bytes=block_bytes,
        timeout_seconds=1.0,
        access=ValkeyAccess(prefix="p", cluster=True),
    )


def value(number: int) -> bytes:
    return random_value(number, BLOCK_BYTES)


def write(store: ValkeyStore, wanted: list[StoreKey]) -> list[Write]:
    values = [memoryview(value(WANTED.index(each))) for each in wanted]
    return store.write(wanted, [None] * len(wanted), values)


def read(store: ValkeyStore, wanted: list[StoreKey]) -> list[Read]:
    """Every hit holds the right bytes."""
    buffers = [dirty(BLOCK_BYTES) for _ in wanted]
    fates = store.read_into(wanted, buffers)
    for each, fate, buffer in zip(wanted, fates, buffers, strict=True):
        assert fate is not Read.HIT or buffer == value(WANTED.index(each))
    return fates


def kill(server: Server) -> None:
    server.kill()


def hang(server: Server) -> None:
    os.kill(server.process.pid, signal.SIGSTOP)


def refuse(server: Server) -> None:
    """It lets nobody in any more."""
    with server.client() as client:
        client.execute_command("CONFIG SET", "requirepass", "changed")
        client.execute_command("CLIENT KILL", "TYPE", "normal", "SKIPME", "yes")


@pytest.mark.parametrize(
    ("harm", "cause"), [(kill, "unreachable"), (hang, "timeout"), (refuse, "credentials")]
)
def test_blocks_of_the_others_are_served(
    cluster: ClusterOfThree, harm: Callable[[Server], None], cause: FaultCause
) -> None:
    """In the same call, and what the one has is missed and counted, by its cause."""
    store = open_on(cluster)
    half = WANTED[::2]
    write(store, half)
    harmed = cluster.of(WANTED[0], "p")
    lost = [cluster.of(each, "p") is harmed for each in WANTED]
    harm(harmed)
    found = [Read.HIT, Read.MISS] * 30
    assert read(store, WANTED) == [
        Read.FAILED if gone else fate for gone, fate in zip(lost, found, strict=True)
    ]
    assert dict(store.statistics().failed_blocks) == {cause: sum(lost)}
    assert store.exists(WANTED) == [
        None if gone else fate is Read.HIT for gone, fate in zip(lost, found, strict=True)
    ]
    written = [Write.EXISTS, Write.STORED] * 30
    assert write(store, WANTED) == [
        Write.FAILED if gone else fate for gone, fate in zip(lost, written, strict=True)
    ]
    assert read(store, WANTED) == [Read.FAILED if gone else Read.HIT for gone in lost]
    assert read(store, WANTED[:1]) == [Read.FAILED]
    with pytest.raises(TierUnavailable) as caught:
        store.remove(WANTED)
    assert caught.value.cause == cause
    store.close()


def test_a_server_that_hangs_is_left_alone(cluster: ClusterOfThree) -> None:
    """However many calls come from however many threads, few connections are made to it."""
    store = open_on(cluster)
    harmed = cluster.of(WANTED[0], "p")
    write(store, WANTED)
    before = harmed.info("stats")["total_connections_received"]
    with stopped(harmed):

        def ask() -> None:
            for _ in range(50):
                assert read(store, WANTED).count(Read.HIT) > 0

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert harmed.info("stats")["total_connections_received"] - before < 12
    store.close()


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    hang(server)
    yield
    os.kill(server.process.pid, signal.SIGCONT)


def test_a_server_that_comes_back_is_asked_again(
    cluster: ClusterOfThree, short_pauses: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    store = open_on(cluster)
    harmed = cluster.of(WANTED[0], "p")
    lost = [cluster.of(each, "p") is harmed for each in WANTED]
    write(store, WANTED)
    harmed.kill()
    for _ in range(3):
        assert read(store, WANTED).count(Read.FAILED) == sum(lost)
    said = [
        each.message
        for each in caplog.records
        if f"without 127.0.0.1:{harmed.port}" in each.message
    ]
    assert len(said) == 1
    harmed.restart()
    empty = [Read.MISS if gone else Read.HIT for gone in lost]
    eventually(lambda: read(store, WANTED) == empty, "the server is not asked again")
    assert f"127.0.0.1:{harmed.port} answers again" in caplog.text
    eventually(lambda: write(store, WANTED).count(Write.STORED) == 0, "it is not written to")
    assert read(store, WANTED) == [Read.HIT] * 60
    assert store.drop_namespace(ONE) == 60
    store.close()


def test_a_cluster_that_is_dead_as_a_whole(cluster: ClusterOfThree, short_pauses: None) -> None:
    """That is the tier's fault, for its breaker to see, and it heals."""
    store = open_on(cluster)
    write(store, WANTED)
    for server in cluster.servers:
        server.kill()
    for _ in range(3):
        for call in (lambda: read(store, WANTED), lambda: write(store, WANTED)):
            with pytest.raises(TierUnavailable) as caught:
                call()
            assert caught.value.cause == "unreachable"
    for server in cluster.servers:
        server.restart()

    def is_empty() -> bool:
        try:
            return read(store, WANTED) == [Read.MISS] * 60
        except TierUnavailable:
            return False

    eventually(is_empty, "the store does not find the cluster again")
    store.close()


def test_slots_that_nobody_holds(cluster: ClusterOfThree) -> None:
    store = open_on(cluster)
    write(store, WANTED)
    left = cluster.of(WANTED[0], "p")
    lost = [cluster.of(each, "p") is left for each in WANTED]
    own = left.ask("CLUSTER MYID")
    left.kill()
    for server in cluster.servers:
        if server is not left:
            server.ask("CLUSTER FORGET", own)
    expected = [Read.FAILED if gone else Read.HIT for gone in lost]
    assert read(store, WANTED) == expected
    assert read(store, WANTED) == expected
    assert store.statistics().failed_blocks["refused"] == sum(lost)
    store.close()


def test_a_node_goes_on_with_the_servers_that_are_left(cluster: ClusterOfThree) -> None:
    """The breaker stays closed, however many blocks of the dead one are asked for."""
    old = [keys(number) for number in range(30)]
    new = [keys(number) for number in range(100, 112)]
    writer = Node(open_on(cluster, block_bytes=NODE_BLOCK_BYTES))
    for prompt in old:
        writer.save(prompt)
    assert writer.manager._lower["remote"].drain(15)
    writer.close()
    dead = cluster.of(ALICE + old[0][0], "p")
    lives = {prompt[0]: cluster.of(ALICE + prompt[0], "p") is not dead for prompt in old + new}
    dead.kill()
    reader = Node(open_on(cluster, block_bytes=NODE_BLOCK_BYTES))
    for prompt in old:
        if lives[prompt[0]]:
            eventually(partial(reader.load, prompt), "a living server is not asked")
        else:
            assert reader.load(prompt) == 0
        assert not reader.is_off()
    assert set(reader.faults()) == {"unreachable"}
    for prompt in new:
        reader.save(prompt)
    assert reader.manager._lower["remote"].drain(15)
    assert not reader.is_off()
    reader.close()
    store = open_on(cluster, block_bytes=NODE_BLOCK_BYTES)
    assert store.exists([ALICE + prompt[0] for prompt in new]) == [
        True if lives[prompt[0]] else None for prompt in new
    ]
    store.close()

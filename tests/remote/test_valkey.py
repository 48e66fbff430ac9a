"""The store on Valkey or Redis, against real servers: its contract, and what only it can suffer."""

import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from typing import ClassVar, Final

import pytest
from tests.remote.faults import folder_of
from tests.remote.proxy import Fault, Proxy
from tests.remote.valkey_servers import Server, eventually, name_of, valkey_server

from kvstrata.core.errors import InvariantViolated, TierUnavailable
from kvstrata.core.types import Read, StoreKey, Write
from kvstrata.storage.remote.valkey.address import Login
from kvstrata.storage.remote.valkey.store import ValkeyAccess, ValkeyStore
from kvstrata.storage.remote.value import header_of
from kvstrata.storage.store import Store
from kvstrata.testing import StoreConformance, Traits
from kvstrata.testing.samples import ONE, OTHER, dirty, fetch, key, random_value

BLOCK_BYTES: Final = 4096
LARGE_BYTES: Final = 1 << 20
TRAITS: Final = Traits(persistent=True, bounded=False, counts=False, variable=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("valkey")
    server = Server(folder, "--unixsocket", str(folder / "socket"))
    yield server
    server.kill()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    proxy = Proxy(server.address)
    yield proxy
    proxy.close()


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return folder_of(tmp_path)


def open_at(port: int, prefix: str, **how: object) -> ValkeyStore:
    settings: dict[str, object] = {"block_bytes": BLOCK_BYTES, **how}
    return ValkeyStore(f"valkey://127.0.0.1:{port}", access=ValkeyAccess(prefix=prefix), **settings)  # type: ignore[arg-type]  # passed on


def put(store: Store, *numbers: int, length: int = BLOCK_BYTES) -> list[Write]:
    values = [memoryview(random_value(number, length)) for number in numbers]
    return store.write([key(number) for number in numbers], [None] * len(numbers), values)


class TestConformance(StoreConformance):
    """Over TCP, through a proxy that can be cut."""

    traits = TRAITS
    server: ClassVar[Server]
    proxy: ClassVar[Proxy]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _serve(cls, server: Server) -> Iterator[None]:
        cls.server, cls.proxy = server, Proxy(server.address)
        yield
        cls.proxy.close()

    def open_store(self, place: Path) -> Store:
        return open_at(self.proxy.port, folder_of(place))

    def damage(self, store: Store, place: Path, wanted: StoreKey) -> None:
        name = name_of(wanted, folder_of(place))
        stored = bytearray(self.server.ask("GET", name))
        stored[-1] ^= 1
        self.server.ask("SET", name, bytes(stored))

    def outage(self, store: Store, place: Path) -> AbstractContextManager[object]:
        return self.proxy.failing(Fault.REFUSE)


class TestConformanceOnValkey(TestConformance):
    """On a server of Valkey's own."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _serve(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        server = Server(tmp_path_factory.mktemp("valkey"), program=valkey_server())
        cls.server, cls.proxy = server, Proxy(server.address)
        assert server.info("server")["server_name"] == "valkey"
        yield
        cls.proxy.close()
        server.kill()


class TestConformanceOverAUnixSocket(StoreConformance):
    traits = TRAITS
    server: ClassVar[Server]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _serve(cls, server: Server) -> None:
        cls.server = server

    def open_store(self, place: Path) -> Store:
        return ValkeyStore(
            f"unix://{self.server.folder}/socket?db=3",
            block_bytes=BLOCK_BYTES,
            ttl_seconds=600,
            access=ValkeyAccess(prefix=folder_of(place)),
        )


# What is stored


def test_a_large_batch_is_read_back_in_turns(server: Server, prefix: str) -> None:
    """More than is under way at once, in values of several pieces, with misses between."""
    store = open_at(server.port, prefix, block_bytes=LARGE_BYTES)
    stored = range(0, 30, 2)
    assert set(put(store, *stored, length=LARGE_BYTES)) == {Write.STORED}
    wanted = [key(number) for number in range(30)]
    buffers = [dirty(LARGE_BYTES) for _ in wanted]
    assert store.read_into(wanted, buffers) == [Read.HIT, Read.MISS] * 15
    assert all(buffers[number] == random_value(number, LARGE_BYTES) for number in stored)
    store.close()


def test_a_search_of_thousands_of_keys(server: Server, prefix: str) -> None:
    store = open_at(server.port, prefix)
    put(store, 17, 4000)
    found = store.exists([key(number) for number in range(5000)])
    assert [number for number, there in enumerate(found) if there] == [17, 4000]
    store.close()


def test_a_namespace_is_dropped_in_steps_and_leaves_what_is_not_a_block(
    server: Server, prefix: str
) -> None:
    store = open_at(server.port, prefix)
    put(store, *range(2500), length=8)
    store.write([key(1, OTHER)], [None], [dirty(8)])
    beside = f"{prefix}:{ONE.hex()}:a-list".encode()
    server.ask("RPUSH", beside, b"theirs")
    assert store.drop_namespace(ONE) == 2500
    assert store.exists([key(1), key(1, OTHER)]) == [False, True]
    assert server.ask("EXISTS", beside) == 1
    store.close()


@pytest.mark.parametrize("kept", [0, 1, 5, 100, 160, BLOCK_BYTES, BLOCK_BYTES + 100])
def test_a_value_cut_short_is_corrupt_and_removed(server: Server, prefix: str, kept: int) -> None:
    store = open_at(server.port, prefix)
    put(store, 1, 2, 3)
    name = name_of(key(2), prefix)
    server.ask("SET", name, server.ask("GET", name)[:kept])
    buffers = [dirty(BLOCK_BYTES) for _ in range(4)]
    asked = [key(1), key(2), key(2), key(3)]
    fates = store.read_into(asked, buffers)
    assert fates == [Read.HIT, Read.CORRUPT, Read.CORRUPT, Read.HIT]
    assert store.statistics().corrupt_blocks == 1
    assert server.ask("EXISTS", name) == 0
    assert buffers[3] == random_value(3, BLOCK_BYTES)
    store.close()


@pytest.mark.parametrize("length", [3, 100, BLOCK_BYTES, 9 * BLOCK_BYTES + 11])
def test_what_is_not_ours_is_foreign_and_stays(server: Server, prefix: str, length: int) -> None:
    store = open_at(server.port, prefix)
    put(store, 1, 3)
    name, listed = name_of(key(2), prefix), name_of(key(4), prefix)
    server.ask("SET", name, b"x" * length)
    server.ask("RPUSH", listed, b"theirs")
    buffers = [dirty(BLOCK_BYTES) for _ in range(4)]
    fates = store.read_into([key(1), key(2), key(4), key(3)], buffers)
    assert fates == [Read.HIT, Read.FOREIGN, Read.FOREIGN, Read.HIT]
    assert buffers[3] == random_value(3, BLOCK_BYTES)
    assert put(store, 2, 4) == [Write.EXISTS] * 2
    assert server.ask("STRLEN", name) == length
    assert store.statistics().corrupt_blocks == 0
    store.close()


def test_a_block_of_another_size_under_our_key_is_a_bug(server: Server, prefix: str) -> None:
    """The value is whole and longer than any block of this store; the next call is right."""
    store = open_at(server.port, prefix)
    put(store, 1)
    longer = random_value(2, 2 * BLOCK_BYTES)
    server.ask("SET", name_of(key(2), prefix), header_of(key(2), None, memoryview(longer)) + longer)
    with pytest.raises(InvariantViolated):
        store.read_into([key(2), key(1)], [dirty(BLOCK_BYTES)] * 2)
    assert fetch(store, key(1)) == random_value(1, BLOCK_BYTES)
    store.close()


def test_two_writers_of_one_key(server: Server, prefix: str) -> None:
    """The first wins, also when both have found the key missing."""
    stores = [open_at(server.port, prefix) for _ in range(4)]
    start = threading.Barrier(len(stores))
    fates: list[Write] = []

    def write(store: Store) -> None:
        for number in range(50):
            start.wait()
            fates.extend(put(store, number))

    threads = [threading.Thread(target=write, args=[store]) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fates.count(Write.STORED) == 50
    for store in stores:
        store.close()


# Time to live, eviction, room


def test_a_block_goes_when_it_was_not_used_for_its_time(server: Server, prefix: str) -> None:
    """A read renews it, a search does not."""
    store = open_at(server.port, prefix, ttl_seconds=0.6)
    put(store, 1, 2)
    server.ask("PEXPIRE", name_of(key(1), prefix), 60)
    assert fetch(store, key(1)) == random_value(1, BLOCK_BYTES)
    assert server.ask("PTTL", name_of(key(1), prefix)) > 200
    server.ask("PEXPIRE", name_of(key(2), prefix), 200)
    assert store.exists([key(2)]) == [True]
    eventually(lambda: not store.exists([key(2)])[0], "the block stays")
    assert fetch(store, key(2)) is Read.MISS
    assert put(store, 2) == [Write.STORED]
    store.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Server]:
    """A server with room for some 16 large blocks."""
    server = Server(tmp_path, "--maxmemory", str(20 << 20), "--maxmemory-policy", "allkeys-lru")
    yield server
    server.kill()


def test_what_the_server_evicts_is_a_miss(small: Server, prefix: str) -> None:
    """Nothing fails while it evicts under writers and readers, and no byte is wrong."""
    store = open_at(small.port, prefix, block_bytes=LARGE_BYTES)
    values = {number: random_value(number, LARGE_BYTES) for number in range(40)}

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(8):
            numbers = [draw.randrange(40) for _ in range(6)]
            asked = [key(number) for number in numbers]
            store.write(asked, [None] * 6, [memoryview(values[number]) for number in numbers])
            buffers = [dirty(LARGE_BYTES) for _ in numbers]
            for number, fate, buffer in zip(
                numbers, store.read_into(asked, buffers), buffers, strict=True
            ):
                assert fate is Read.MISS or (fate is Read.HIT and buffer == values[number])

    threads = [threading.Thread(target=work, args=[seed]) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert small.info("stats")["evicted_keys"] > 0
    assert False in store.exists([key(number) for number in range(40)])
    store.close()


def test_a_full_server_that_may_not_evict(small: Server, prefix: str) -> None:
    """What finds no room is ``FULL``; what is there is read, and removing makes room."""
    small.ask("CONFIG SET", "maxmemory-policy", "noeviction")
    store = open_at(small.port, prefix, block_bytes=LARGE_BYTES, ttl_seconds=600)
    fates = put(store, *range(40), length=LARGE_BYTES)
    stored = fates.count(Write.STORED)
    assert fates == [Write.STORED] * stored + [Write.FULL] * (40 - stored)
    assert 4 < stored < 20
    assert store.statistics().blocks == stored
    buffer = dirty(LARGE_BYTES)
    assert store.read_into([key(0)], [buffer]) == [Read.HIT]
    assert put(store, 0, 39, length=LARGE_BYTES) == [Write.EXISTS, Write.FULL]
    assert store.remove([key(number) for number in range(4)]) == [True] * 4
    eventually(lambda: put(store, 39, length=LARGE_BYTES) == [Write.STORED], "no room is made")
    store.close()


# Letting in


def test_a_user_of_an_access_list_needs_no_more_than_is_said(server: Server, prefix: str) -> None:
    server.ask(
        "ACL SETUSER", "kv", "on", ">s3same/?", f"~{prefix}:*", "resetchannels", "-@all",
        *("+" + name for name in ("get", "getex", "set", "exists", "unlink", "scan", "select")),
    )  # fmt: skip
    for ttl_seconds in (None, 60):
        store = ValkeyStore(
            f"redis://kv:s3same%2F%3F@127.0.0.1:{server.port}/2",
            block_bytes=BLOCK_BYTES,
            ttl_seconds=ttl_seconds,
            access=ValkeyAccess(prefix=prefix),
        )
        assert put(store, 1, 2) == [Write.STORED] * 2
        assert fetch(store, key(1)) == random_value(1, BLOCK_BYTES)
        assert store.exists([key(1)]) == store.remove([key(1)]) == [True]
        assert store.drop_namespace(ONE) == 1
        store.close()
    other = ValkeyStore(
        f"redis://kv:s3same%2F%3F@127.0.0.1:{server.port}",
        block_bytes=BLOCK_BYTES,
        access=ValkeyAccess(prefix="not-theirs"),
    )
    for call in (lambda: put(other, 1), lambda: fetch(other, key(1))):
        with pytest.raises(TierUnavailable) as caught:
            call()
        assert caught.value.cause == "credentials"
    other.close()


@pytest.mark.parametrize("login", [Login("kv2", "wr0ng"), Login("nobody", "wr0ng"), Login()])
def test_who_is_not_let_in_is_told_so_without_secrets(
    server: Server, login: Login, caplog: pytest.LogCaptureFixture
) -> None:
    """By every call, and a user who is let in later is let in then."""
    server.ask("ACL SETUSER", "kv2", "on", ">right", "~*", "+@all")
    server.ask("ACL SETUSER", "default", "off")
    store = ValkeyStore(
        f"valkey://127.0.0.1:{server.port}",
        block_bytes=BLOCK_BYTES,
        access=ValkeyAccess(login=login),
    )
    try:
        for call in (lambda: put(store, 1), lambda: fetch(store, key(1))):
            with pytest.raises(TierUnavailable) as caught:
                call()
            assert caught.value.cause == "credentials"
            assert "wr0ng" not in f"{caught.value} {store!r} {vars(store)}"
        assert "wr0ng" not in caplog.text
    finally:
        with server.client(username="kv2", password="right") as client:
            client.execute_command("ACL SETUSER", "default", "on")
    if login == Login():
        assert store.exists([key(1)]) == [False]
    store.close()


def test_a_server_that_echoes_the_password_is_not_repeated(tmp_path: Path) -> None:
    """One without AUTH quotes what it does not understand."""
    server = Server(tmp_path, "--rename-command", "AUTH", "")
    store = ValkeyStore(f"valkey://kv:s3same@127.0.0.1:{server.port}", block_bytes=BLOCK_BYTES)
    with pytest.raises(TierUnavailable) as caught:
        store.exists([key(1)])
    server.kill()
    assert caught.value.cause == "credentials"
    assert "s3same" not in str(caught.value)


# Faults


def test_a_value_that_trickles_ends_at_the_deadline(proxy: Proxy, prefix: str) -> None:
    """Each piece comes in time, the whole does not; so it is for what is written."""
    store = open_at(proxy.port, prefix, block_bytes=LARGE_BYTES, timeout_seconds=0.5)
    put(store, 1, length=LARGE_BYTES)
    assert store.exists([key(1)]) == [True]
    for call in (
        lambda: store.read_into([key(1)], [dirty(LARGE_BYTES)]),
        lambda: put(store, 2, length=LARGE_BYTES),
    ):
        # Without a deadline it would take 8 s, and be right.
        with proxy.failing(Fault.SLOW), pytest.raises(TierUnavailable) as caught:
            call()
        assert caught.value.cause == "timeout"
    assert fetch(store, key(1)) == random_value(1, LARGE_BYTES)
    store.close()


@pytest.mark.parametrize("after_bytes", [0, 1, 5, 60, 3000, 5000, 12_700])
@pytest.mark.parametrize("fault", [Fault.CUT, Fault.RESET])
def test_a_connection_that_breaks_in_an_answer(
    proxy: Proxy, prefix: str, fault: Fault, after_bytes: int
) -> None:
    """Nothing of the answer is taken for another's: the next call begins anew."""
    store = open_at(proxy.port, prefix)
    put(store, 1, 2, 3)
    wanted = [key(1), key(2), key(3)]
    with proxy.failing(fault, after_bytes=after_bytes):
        with pytest.raises(TierUnavailable) as caught:
            store.read_into(wanted, [dirty(BLOCK_BYTES) for _ in wanted])
        assert caught.value.cause == "unreachable"
    buffers = [dirty(BLOCK_BYTES) for _ in wanted]
    assert store.read_into(wanted[::-1], buffers) == [Read.HIT] * 3
    assert buffers[0] == random_value(3, BLOCK_BYTES)
    store.close()


def test_connections_that_the_server_has_closed_cost_no_call(server: Server, prefix: str) -> None:
    """An idle one is looked at before it is used."""
    store = open_at(server.port, prefix)
    put(store, 1)
    for _ in range(3):
        server.ask("CLIENT KILL", "TYPE", "normal")
        assert fetch(store, key(1)) == random_value(1, BLOCK_BYTES)
    store.close()


def test_connections_are_as_many_as_threads_that_call(server: Server, prefix: str) -> None:
    before = server.info("clients")["connected_clients"]
    store = open_at(server.port, prefix)
    start = threading.Barrier(4)

    def read() -> None:
        start.wait()
        for _ in range(100):
            store.read_into([key(1)] * 3, [dirty(BLOCK_BYTES)] * 3)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.info("clients")["connected_clients"] <= before + 4
    store.close()
    eventually(
        lambda: server.info("clients")["connected_clients"] <= before,
        "connections are left",
    )


def test_closing_ends_a_call_that_waits(proxy: Proxy, prefix: str) -> None:
    store = open_at(proxy.port, prefix, timeout_seconds=60.0)
    put(store, 1)
    ended: list[TierUnavailable] = []

    def read() -> None:
        with pytest.raises(TierUnavailable) as caught:
            store.read_into([key(1)], [dirty(BLOCK_BYTES)])
        ended.append(caught.value)

    with proxy.failing(Fault.SILENCE):
        reading = threading.Thread(target=read)
        reading.start()
        time.sleep(0.2)  # or it meets a store that is closed: right as well
        store.close()
        reading.join(10)
    assert [fault.cause for fault in ended] == ["closed"]


def test_a_server_that_refuses_for_a_while(server: Server, prefix: str) -> None:
    """Here for want of replicas; the next call is right."""
    store = open_at(server.port, prefix)
    server.ask("CONFIG SET", "min-replicas-to-write", 1)
    try:
        with pytest.raises(TierUnavailable, match="NOREPLICAS") as caught:
            put(store, 1)
    finally:
        server.ask("CONFIG SET", "min-replicas-to-write", 0)
    assert caught.value.cause == "refused"
    assert put(store, 1) == [Write.STORED]
    store.close()


def test_a_name_that_nobody_knows() -> None:
    store = ValkeyStore("valkey://no-such-host.invalid", block_bytes=BLOCK_BYTES)
    with pytest.raises(TierUnavailable) as caught:
        store.exists([key(1)])
    assert caught.value.cause == "name"
    assert "no-such-host.invalid:6379" in str(caught.value)
    store.close()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Server]:
    """A server with a unix socket in its folder."""
    server = Server(tmp_path, "--unixsocket", str(tmp_path / "socket"))
    yield server
    server.kill()


def open_local(local: Server, prefix: str) -> ValkeyStore:
    access = ValkeyAccess(prefix=prefix)
    return ValkeyStore(
        f"unix://{local.folder}/socket", block_bytes=BLOCK_BYTES, timeout_seconds=1, access=access
    )


def test_a_server_at_a_unix_socket_that_is_stopped(local: Server, prefix: str) -> None:
    """It ends a call on a connection that there is, and one that connects."""
    with closing(open_local(local, prefix)) as store:
        put(store, 1)
        begun = time.monotonic()
        local.process.send_signal(signal.SIGSTOP)
        try:
            for _ in range(2):
                with pytest.raises(TierUnavailable) as caught:
                    fetch(store, key(1))
                assert caught.value.cause == "timeout"
        finally:
            local.process.send_signal(signal.SIGCONT)
        assert time.monotonic() - begun < 20  # only a call without an end takes so long
        assert fetch(store, key(1)) == random_value(1, BLOCK_BYTES)


def test_a_server_at_a_unix_socket_that_is_killed(local: Server, prefix: str) -> None:
    """Its socket stays behind, and nobody listens there."""
    with closing(open_local(local, prefix)) as store:
        put(store, 1)
        local.kill()
        for _ in range(2):
            with pytest.raises(TierUnavailable) as caught:
                fetch(store, key(1))
            assert caught.value.cause == "unreachable"
        local.restart()

        def is_back() -> bool:
            with suppress(TierUnavailable):  # it listens at its port first
                return put(store, 1) == [Write.STORED]
            return False

        eventually(is_back, "the store does not find the server again")
        assert fetch(store, key(1)) == random_value(1, BLOCK_BYTES)


@pytest.mark.parametrize("line", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"x" * 5000, b"*1\r\n"])
def test_a_peer_that_speaks_another_language(tmp_path: Path, line: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for _ in range(2):
                client, _ = listener.accept()
                with client:
                    client.recv(1000)
                    client.sendall(line)

        threading.Thread(target=answer, daemon=True).start()
        store = open_at(listener.getsockname()[1], "p", timeout_seconds=1.0)
        with pytest.raises(TierUnavailable) as caught:
            store.read_into([key(1)], [dirty(BLOCK_BYTES)])
        assert caught.value.cause == "refused"
        with pytest.raises(TierUnavailable):
            store.exists([key(1)])
        store.close()

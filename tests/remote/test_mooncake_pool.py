"""What only a Mooncake tier can suffer: the process of its library, nodes, slots of the host tier."""

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.caches import eventually
from tests.remote.mooncake_engine import MooncakeEngine
from tests.remote.proxy import Fault, Proxy

from kvstrata.core.errors import ConfigError, TierUnavailable
from kvstrata.core.types import Read, Write
from kvstrata.storage.mapping import HostMapping
from kvstrata.storage.remote.mooncake.store import MooncakeStore
from kvstrata.storage.store import MOST_CALLS
from kvstrata.testing.samples import ONE, OTHER, dirty, fetch, key, random_value

BLOCK_BYTES = 256 << 10
SLOTS = 48


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeEngine]:
    engine = MooncakeEngine()
    engine.start(tmp_path_factory.mktemp("mooncake"))
    yield engine
    engine.stop()


@pytest.fixture
def store(engine: MooncakeEngine) -> Iterator[MooncakeStore]:
    """With an empty pool, and without a host tier."""
    store = engine.open(block_bytes=BLOCK_BYTES, timeout_seconds=20.0)
    for namespace in (ONE, OTHER):
        store.drop_namespace(namespace)
    yield store
    store.close()


@pytest.fixture
def host() -> Iterator[HostMapping]:
    host = HostMapping.create(SLOTS, BLOCK_BYTES, bytes(16))
    yield host
    host.close()


@pytest.fixture
def proxy(engine: MooncakeEngine) -> Iterator[Proxy]:
    proxy = Proxy(engine.address())
    yield proxy
    proxy.close()


def slot(host: HostMapping, number: int) -> memoryview:
    return memoryview(host.data[number])


def slots(host: HostMapping, count: int) -> list[memoryview]:
    return [slot(host, number) for number in range(count)]


def value(number: int) -> bytes:
    return random_value(number, BLOCK_BYTES)


def write(store: MooncakeStore, *numbers: int) -> list[Write]:
    values = [memoryview(value(number)) for number in numbers]
    return store.write([key(n) for n in numbers], [None] * len(numbers), values)


class TestHostSlots:
    def test_bytes_go_straight_between_slots_and_the_pool(
        self, engine: MooncakeEngine, store: MooncakeStore, host: HostMapping
    ) -> None:
        """The buffers of the store stay as they are, also where slots and others are mixed."""
        keys = [key(number) for number in range(8)]
        with closing(engine.open_near(host, block_bytes=BLOCK_BYTES)) as near:
            for number in range(8):
                slot(host, number)[:] = value(number)
            assert near.write(keys, [None] * 8, slots(host, 8)) == [Write.STORED] * 8
            host.data[:] = 0xEE
            elsewhere = dirty(BLOCK_BYTES)
            buffers = [*slots(host, 7), elsewhere]
            assert near.read_into(keys, buffers) == [Read.HIT] * 8
            assert [bytes(buffer) for buffer in buffers] == [value(n) for n in range(8)]
            rooms = [np.frombuffer(lane.room, np.uint8) for lane in near._library._free]
            used = sum(int(np.count_nonzero(room.reshape(-1, 4096).any(axis=1))) for room in rooms)
            assert used == BLOCK_BYTES // 4096  # the one that is elsewhere
        assert [fetch(store, wanted) for wanted in keys] == [value(n) for n in range(8)]

    @pytest.mark.parametrize("fault", [Fault.SLOW, Fault.SILENCE])
    def test_nothing_is_written_into_slots_after_a_read_has_failed(
        self,
        engine: MooncakeEngine,
        store: MooncakeStore,
        host: HostMapping,
        proxy: Proxy,
        fault: Fault,
    ) -> None:
        """Left alone, the library goes on filling them for as long as the link needs."""
        numbers = list(range(32))
        write(store, *numbers)
        with closing(engine.open_near(host, block_bytes=BLOCK_BYTES, proxy=proxy)) as near:
            eventually(lambda: _has_joined(near), "it does not join the pool")
            started_at = time.monotonic()
            with proxy.failing(fault, bytes_per_second=10_000):
                with pytest.raises(TierUnavailable) as raised:
                    near.read_into([key(n) for n in numbers], slots(host, 32))
                assert raised.value.cause == "timeout"
                assert time.monotonic() - started_at < 10.0  # all of it needs 50 s
                host.data[:] = 0x55  # they have other blocks now
                time.sleep(0.5)
            time.sleep(1.0)
            assert (host.data == 0x55).all()
            eventually(lambda: _hits(near, host, numbers) == 32, "the tier does not heal")

    def test_a_node_that_stops_during_a_read_and_goes_on_later_writes_nothing(
        self, engine: MooncakeEngine, store: MooncakeStore, host: HostMapping, proxy: Proxy
    ) -> None:
        numbers = list(range(32))
        write(store, *numbers)
        with closing(engine.open_near(host, block_bytes=BLOCK_BYTES, proxy=proxy)) as near:
            eventually(lambda: _has_joined(near), "it does not join the pool")
            with proxy.failing(Fault.SLOW, bytes_per_second=4_000_000):
                before = proxy.answered_bytes
                stopping = threading.Thread(
                    target=_stop_after,
                    args=[engine, lambda: proxy.answered_bytes > before + (1 << 20)],
                )
                stopping.start()
                with pytest.raises(TierUnavailable):
                    near.read_into([key(n) for n in numbers], slots(host, 32))
                stopping.join()
            assert (host.data[:32] != 0).any(), "it stopped before the first byte"
            host.data[:] = 0x55
            engine.signal_node(signal.SIGCONT)
            time.sleep(1.5)
            assert (host.data == 0x55).all()
            eventually(lambda: _hits(near, host, numbers) == 32, "its blocks do not come back")


def _stop_after(engine: MooncakeEngine, reached: Callable[[], bool]) -> None:
    eventually(reached, "no byte comes")
    engine.signal_node(signal.SIGSTOP)


def _has_joined(store: MooncakeStore) -> bool:
    """Whether a call comes through: a busy machine may need longer than one has."""
    try:
        store.exists([key(0)])
    except TierUnavailable:
        return False
    return True


def _hits(store: MooncakeStore, host: HostMapping, numbers: Sequence[int]) -> int:
    try:
        fates = store.read_into([key(n) for n in numbers], slots(host, len(numbers)))
    except TierUnavailable:
        return 0
    return fates.count(Read.HIT)


class TestTheProcessOfTheLibrary:
    def test_its_death_is_an_outage_of_one_call(self, store: MooncakeStore) -> None:
        write(store, 1)
        os.kill(_pid_of(store), signal.SIGKILL)
        with pytest.raises(TierUnavailable) as raised:
            fetch(store, key(1))
        assert raised.value.cause == "unreachable"
        assert fetch(store, key(1)) == value(1)

    def test_it_ends_with_the_store_and_leaves_no_descriptor(self, engine: MooncakeEngine) -> None:
        before = _memories()
        store = engine.open(block_bytes=BLOCK_BYTES)
        assert len(_memories()) > len(before)
        _has_joined(store)
        pid = _pid_of(store)
        store.close()
        assert not Path(f"/proc/{pid}").exists()
        assert len(_memories()) <= len(before)

    def test_it_ends_when_the_server_dies(self, engine: MooncakeEngine) -> None:
        """Nobody is left to close anything then: the kernel closes its lifeline."""
        store = engine.open(block_bytes=BLOCK_BYTES)
        pid = _pid_of(store)
        store._library._process._life.close()
        eventually(lambda: _is_zombie(pid), "it goes on")
        store.close()

    def test_its_memory_and_its_lanes_have_a_bound(self, store: MooncakeStore) -> None:
        """However many threads call, and however large the batch."""
        numbers = list(range(40))  # more than a lane has room for
        assert write(store, *numbers) == [Write.STORED] * 40

        def read(numbers: Sequence[int]) -> None:
            buffers = [dirty(BLOCK_BYTES) for _ in numbers]
            fates = store.read_into([key(n) for n in numbers], buffers)
            assert fates == [Read.HIT] * len(numbers)
            assert [bytes(b) for b in buffers] == [value(n) for n in numbers]

        read(numbers)
        tasks = Path(f"/proc/{_pid_of(store)}/task")
        with ThreadPoolExecutor(20) as pool:
            list(pool.map(read, [[n, n + 1] for n in range(20)]))
            threads = len(list(tasks.iterdir()))
            list(pool.map(read, [[n, n + 1] for n in range(20)]))
        assert len(list(tasks.iterdir())) <= threads + MOST_CALLS

    def test_a_library_that_cannot_be_loaded_is_a_wrong_configuration(
        self, engine: MooncakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "mooncake").mkdir()
        (tmp_path / "mooncake" / "__init__.py").touch()
        (tmp_path / "mooncake" / "store.py").write_text("raise ImportError('libibverbs.so.1')")
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
        with pytest.raises(ConfigError, match=r"libibverbs.so.1[\s\S]*kvstrata\[mooncake\]"):
            engine.open(block_bytes=BLOCK_BYTES)


class TestNodes:
    def test_blocks_of_a_node_that_died_fail_and_others_are_read(
        self, engine: MooncakeEngine, store: MooncakeStore
    ) -> None:
        """They are said to exist until the master misses the node."""
        keys = [key(number) for number in range(24)]
        with engine.another_node() as node:
            assert write(store, *range(24)) == [Write.STORED] * 24
            node.kill()
            node.wait()
            buffers = [dirty(BLOCK_BYTES) for _ in keys]
            fates = store.read_into(keys, buffers)
            assert set(fates) == {Read.HIT, Read.FAILED}
            for number, fate in enumerate(fates):
                assert fate is Read.FAILED or bytes(buffers[number]) == value(number)
            assert _counted(store) == fates.count(Read.FAILED)
            assert store.exists(keys) == [True] * 24
            lost = [key(n) for n, fate in enumerate(fates) if fate is Read.FAILED][:1]
            with pytest.raises(TierUnavailable) as raised:
                store.read_into(lost, [dirty(BLOCK_BYTES)])
            assert raised.value.cause in {"unreachable", "timeout"}
            twice = write(store, *range(100, 124), *range(100, 124))
            fresh, again = twice[:24], twice[24:]
            assert set(fresh) == {Write.STORED, Write.FAILED}
            assert again == [Write.EXISTS if f is Write.STORED else f for f in fresh]
            stored = [fate is Write.STORED for fate in fresh]
            assert store.exists([key(number) for number in range(100, 124)]) == stored
            assert _counted(store) == fates.count(Read.FAILED) + fresh.count(Write.FAILED)

    def test_what_a_writer_began_and_did_not_end_is_full_for_a_while(
        self, engine: MooncakeEngine, store: MooncakeStore, proxy: Proxy
    ) -> None:
        """The master takes its keys for taken; to say that they are stored would be a lie."""
        numbers = list(range(16))
        with closing(engine.open(block_bytes=BLOCK_BYTES, proxy=proxy)) as slow:
            eventually(lambda: _has_joined(slow), "it does not join the pool")
            with (
                proxy.failing(Fault.SLOW, bytes_per_second=10_000),
                pytest.raises(TierUnavailable),
            ):
                write(slow, *numbers)
        fates = write(store, *numbers)
        assert Write.FULL in fates
        there = [fate is Write.STORED for fate in fates]
        assert store.exists([key(number) for number in numbers]) == there
        eventually(lambda: Write.FULL not in write(store, *numbers), "they stay taken")
        assert [fetch(store, key(number)) for number in numbers] == [value(n) for n in numbers]

    def test_memory_of_this_node_is_part_of_the_pool_until_it_leaves(
        self, engine: MooncakeEngine, store: MooncakeStore
    ) -> None:
        """A call that has to be ended takes none of its blocks away."""
        node = engine.open_as(block_bytes=BLOCK_BYTES, segment_bytes=32 << 20)
        with closing(node):
            eventually(lambda: len(engine.segments()) == 2, "it does not join the pool")
            assert write(store, *range(24)) == [Write.STORED] * 24
            os.kill(_pid_of(node), signal.SIGKILL)
            with pytest.raises(TierUnavailable):
                node.exists([key(1)])
            assert [fetch(node, key(number)) for number in range(24)] == [
                value(n) for n in range(24)
            ]
        assert len(engine.segments()) == 1
        there = store.exists([key(number) for number in range(24)])
        assert True in there
        assert False in there
        fates = [fetch(store, key(number)) for number in range(24)]
        assert fates == [value(n) if there[n] else Read.MISS for n in range(24)]

    def test_rdma_without_a_device_goes_over_tcp_and_is_warned_of(
        self,
        engine: MooncakeEngine,
        store: MooncakeStore,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr("kvstrata.storage.remote.mooncake.node._RDMA_DEVICES", tmp_path)
        with closing(engine.open_as(block_bytes=BLOCK_BYTES, protocol="rdma")) as node:
            assert write(node, 1) == [Write.STORED]
            assert fetch(node, key(1)) == value(1)
        assert fetch(store, key(1)) == value(1)
        assert caplog.text.count("blocks go over TCP") == 1

    def test_a_segment_whose_process_dies_comes_back(
        self, engine: MooncakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvstrata.storage.remote.mooncake.segment._REVIVE_SECONDS", 0.0)
        node = engine.open_as(block_bytes=BLOCK_BYTES, segment_bytes=32 << 20)
        with closing(node):
            eventually(lambda: len(engine.segments()) == 2, "it does not join the pool")
            first = _segment_pid(node)
            os.kill(first, signal.SIGKILL)
            eventually(lambda: _segment_pid_after_a_call(node) != first, "it stays dead")
            eventually(lambda: len(engine.segments()) == 3, "it does not join again")
        engine.kill()
        engine.restart()  # the master counts the dead one for a minute

    def test_a_namespace_is_dropped_under_any_prefix(self, engine: MooncakeEngine) -> None:
        """Of prefixes that are alike as patterns only that one."""
        dotted = engine.open_as(block_bytes=BLOCK_BYTES, prefix="a.b-c_d")
        other = engine.open_as(block_bytes=BLOCK_BYTES, prefix="axb-c_d")
        with closing(dotted), closing(other):
            assert write(dotted, 1, 2) == write(other, 1, 2) == [Write.STORED] * 2
            assert dotted.drop_namespace(OTHER) == 0
            assert dotted.drop_namespace(ONE) == 2
            assert dotted.exists([key(1), key(2)]) == [False] * 2
            assert other.exists([key(1), key(2)]) == [True] * 2
            other.drop_namespace(ONE)

    def test_what_listens_and_never_answers_is_late(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            store = MooncakeStore(
                f"mooncake://127.0.0.1:{listener.getsockname()[1]}", block_bytes=BLOCK_BYTES
            )
            with closing(store), pytest.raises(TierUnavailable) as raised:
                store.exists([key(1)])
        assert raised.value.cause == "timeout"

    def test_nothing_goes_to_the_network_before_the_first_call(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"mooncake://127.0.0.1:{listener.getsockname()[1]}"
            with closing(MooncakeStore(url, block_bytes=BLOCK_BYTES)) as store:
                assert store.exists([]) == []
                listener.settimeout(0.5)
                with pytest.raises(TimeoutError):
                    listener.accept()


def _counted(store: MooncakeStore) -> int:
    """Blocks that have failed in calls that did not, each because nobody answers."""
    failed = store.statistics().failed_blocks
    assert failed.keys() <= {"unreachable", "timeout"}
    return sum(failed.values())


def _segment_pid(store: MooncakeStore) -> int:
    assert store._segment is not None
    return store._segment._process.pid


def _segment_pid_after_a_call(store: MooncakeStore) -> int:
    store.exists([])
    return _segment_pid(store)


def _pid_of(store: MooncakeStore) -> int:
    return store._library._process._process.pid


def _memories() -> list[str]:
    """Descriptors of shared memory that this process has open."""
    gc.collect()  # a fault keeps what it has met
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [link for link in links if "kvstrata-mooncake" in link]


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"

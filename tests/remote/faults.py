"""The faults of a remote engine, in the middle of batches: the same for every engine.

Whatever happens no request fails or waits longer than a call may take, no byte is wrong, the
breaker opens and heals, nothing is left behind, and a counter names the cause.
"""

import hashlib
import itertools
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest
from tests.caches import ALICE, PATIENCE_SECONDS, eventually, keys, reads_running
from tests.remote.proxy import RELAY, Fault, Proxy
from tests.remote.subject import BoundedEngine, RemoteEngine

from kvstrata.core.config import Config
from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import BlockKey
from kvstrata.manager.manager import KVManager
from kvstrata.manager.tasks import TaskState
from kvstrata.storage.call_time import call_within
from kvstrata.storage.remote.value import HEADER_BYTES, header_of
from kvstrata.storage.store import Store
from kvstrata.storage.wrap import BreakerStore

BLOCK_BYTES = 256 << 10
PROMPT = keys(*[0] * 16)  # one call reads it
LONG_PROMPT = keys(3, *[0] * 47)  # more than any engine is asked for at once
IN_A_VALUE = 3 * BLOCK_BYTES // 2  # bytes after which a value is half there
CALL_SECONDS = 2.0  # as in service
LOAD_SECONDS = CALL_SECONDS + Config().remote_lookup_seconds + 1.0  # the last for a busy machine
DRAIN_SECONDS = 15.0  # for a few calls; only a broken cache waits so long
OUTAGE_SECONDS = 3.0
_unknown = itertools.count(100_000)


def content(block: BlockKey) -> bytes:
    return hashlib.sha256(ALICE + block).digest() * (BLOCK_BYTES // 32)


class Node:
    """A cache of its own whose lowest tier is *store*."""

    def __init__(self, store: Store, *, slots: int = 64) -> None:
        tiers = f"host:{slots * BLOCK_BYTES}B"
        config = Config.model_validate(
            {"tiers": tiers, "prefault": False, "drain_timeout_seconds": 0.2, "recompute": "never"}
        )
        self.manager = KVManager(config, block_bytes=BLOCK_BYTES, remote=store)

    def save(self, asked: Sequence[BlockKey]) -> None:
        task = self.manager.put_match(ALICE, asked)
        if task.task_id:
            self.manager.launch([task.task_id])
            for slot, i in zip(task.slots, task.missing, strict=True):
                self.manager.view(slot)[:] = content(asked[i])
            self.manager.complete([task.task_id])

    def load(self, asked: Sequence[BlockKey] = PROMPT) -> int:
        """How many leading blocks are given back in time; all of them are right."""
        task = self.manager.get_match(ALICE, asked)
        if not task.task_id:
            return 0
        task = self.manager.wait([task.task_id], LOAD_SECONDS)[task.task_id]
        assert task.state is TaskState.READY, "a load takes longer than a call may"
        self.manager.launch([task.task_id])
        for slot, block in zip(task.slots, asked, strict=False):
            assert self.manager.view(slot) == content(block), "a wrong byte"
        self.manager.complete([task.task_id])
        return len(task.slots)

    def drain(self, seconds: float = DRAIN_SECONDS) -> bool:
        """Whether all that was saved has been given to the store in time."""
        return self.manager._lower["remote"].drain(seconds)

    def is_off(self) -> bool:
        return next(t for t in self.manager.stats().tiers if t.tier == "remote").switched_off

    def faults(self) -> dict[str, int]:
        """By cause."""
        prefix = "kvstrata_remote_faults_total{cause="
        counted = self.manager.counters.snapshot()
        return {
            name.removeprefix(prefix).rstrip("}"): number
            for name, number in counted.items()
            if name.startswith(prefix) and number
        }

    def close(self) -> None:
        eventually(lambda: not reads_running(self.manager), "a read has no end")
        self.manager.check()
        self.manager.close()


class ProtocolFaults:
    """Those that each way to speak to an engine meets differently.

    Inherit it in a class whose name begins with ``Test`` and say which ``engine``.
    """

    engine: ClassVar[type[RemoteEngine]]

    @pytest.fixture(autouse=True)
    def _breakers_that_heal_soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        quick = partial(BreakerStore, retry_seconds=0.3)
        monkeypatch.setattr("kvstrata.manager.cascade.BreakerStore", quick)

    @pytest.fixture(scope="class")
    @classmethod
    def running(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteEngine]:
        running = cls.engine()
        running.start(tmp_path_factory.mktemp("engine"))
        yield running
        running.stop()

    @pytest.fixture
    def proxy(self, running: RemoteEngine) -> Iterator[Proxy]:
        proxy = Proxy(running.address())
        yield proxy
        proxy.close()

    @pytest.fixture
    def node(self, running: RemoteEngine, proxy: Proxy) -> Iterator[Node]:
        """One that finds the prompt, which another node has written."""
        self.write(running)
        node = Node(self.open(running, proxy=proxy))
        node.load(keys(next(_unknown)))  # connects it
        yield node
        node.close()

    def open(self, running: RemoteEngine, **how: object) -> Store:
        return running.open(block_bytes=BLOCK_BYTES, timeout_seconds=CALL_SECONDS, **how)  # type: ignore[arg-type]  # passed on

    def write(self, running: RemoteEngine, prompt: Sequence[BlockKey] = PROMPT) -> None:
        other = Node(self.open(running))
        other.save(prompt)
        assert other.drain()
        other.close()

    def heals(self, node: Node, found: int = len(PROMPT)) -> None:
        """Once the fault is over the tier is switched on, and has what it had."""
        eventually(lambda: node.load() == found and not node.is_off(), "the tier does not heal")

    def opens(self, node: Node) -> None:
        """While it lasts the breaker opens: the engine is asked no more."""

        def load_in_vain() -> bool:
            node.load()
            node.load(keys(next(_unknown), 0, 0))
            return node.is_off()

        eventually(load_in_vain, "the breaker stays closed")

    def breaks(self, proxy: Proxy, node: Node, fault: Fault) -> None:
        with proxy.failing(fault, after_bytes=IN_A_VALUE):
            self.opens(node)
        assert "unreachable" in node.faults()
        self.heals(node)

    def nothing_grows(self, node: Node) -> None:
        """Neither threads nor descriptors, memory nor tasks, however many requests come."""
        before = _Used.now()
        end = time.monotonic() + OUTAGE_SECONDS
        while time.monotonic() < end:
            asked = keys(next(_unknown), 0, 0, 0)
            node.load(asked)
            node.save(asked)
        report = node.manager.stats()
        assert (report.running_gets, report.running_puts) == (0, 0)
        after = _Used.now()
        assert after.threads <= before.threads + 8
        assert after.descriptors <= before.descriptors + 48  # 32 connections to an object store
        assert after.memory_bytes <= before.memory_bytes + (64 << 20)  # 16 MiB are the host tier's

    def meets(self, running: RemoteEngine, node: Node, what: str) -> None:
        """One block of the prompt is not what was written."""
        key = ALICE + PROMPT[5]
        stored = running.raw(key)
        assert stored is not None
        other = header_of(ALICE + PROMPT[6], None, memoryview(content(PROMPT[6])))
        damaged = {
            "half": stored[: len(stored) // 2],
            "header": stored[: HEADER_BYTES // 2],
            "nothing": b"",
            "longer": stored + b"more",
            "flipped": stored[:-1] + bytes([stored[-1] ^ 1]),
            "another": other + content(PROMPT[6]),
            "foreign": b"{}" * 700,
        }[what]
        running.put_raw(key, damaged)
        before = Counter(node.faults())
        assert node.load() == 5
        met = Counter(node.faults()) - before
        if what == "foreign":
            assert met == {"foreign": 1}
            assert running.raw(key) == damaged
            running.put_raw(key, stored)
        else:
            assert met == {"corrupt": 1}
            assert running.raw(key) is None
            self.write(running)
        self.heals(node)

    def test_a_server_that_is_stopped(self, running: RemoteEngine, node: Node) -> None:
        with paused(running):
            self.opens(node)
        assert node.faults().keys() & {"timeout", "unreachable"}
        self.heals(node)

    def test_a_server_that_is_killed_in_a_batch_and_comes_back_empty(
        self, running: RemoteEngine, proxy: Proxy, node: Node
    ) -> None:
        with proxy.failing(Fault.SILENCE, after_bytes=IN_A_VALUE), ThreadPoolExecutor(1) as other:
            loading = other.submit(node.load)
            eventually(lambda: not proxy.after_bytes, "no value comes")
            running.kill()
            kept = loading.result()
        assert kept < len(PROMPT)
        assert node.faults()
        assert node.faults().keys() <= {"unreachable", "timeout"}
        self.opens(node)
        running.restart()
        self.heals(node, found=kept)
        self.write(running)
        self.heals(node)

    @pytest.mark.parametrize("what", ["stopped", "killed"])
    def test_a_server_that_is_stopped_or_killed_in_a_batch_of_writes(
        self, running: RemoteEngine, proxy: Proxy, node: Node, what: str
    ) -> None:
        """What is saved is there for requests all the while, and is written in the end."""
        saved = keys(next(_unknown), *[0] * 47)
        with proxy.failing(Fault.SLOW, bytes_per_second=8_000_000):
            sent = proxy.asked_bytes
            node.save(saved)
            eventually(lambda: proxy.asked_bytes > sent + IN_A_VALUE, "no value goes there")
            (running.pause if what == "stopped" else running.kill)()
        try:
            assert node.load(saved) == len(saved)
            self.opens(node)
            self.nothing_grows(node)
        finally:
            (running.resume if what == "stopped" else running.revive)()
        assert node.faults().keys() & {"timeout", "unreachable"}
        causes = set(node.faults())  # a pool whose nodes are gone is full
        assert causes <= {"timeout", "unreachable", "refused", "full"}, causes
        self.is_written(running, node, saved)

    def is_written(self, running: RemoteEngine, node: Node, saved: Sequence[BlockKey]) -> None:
        """Once the fault is over *saved* is there for all; nothing that was cut short is served."""
        assert node.drain()
        reader = Node(self.open(running))

        def write_and_read() -> bool:
            self.write(running, saved)
            return reader.load(saved) == len(saved)

        eventually(write_and_read, "what was saved does not come back")
        reader.close()

    def test_connections_that_are_reset(self, proxy: Proxy, node: Node) -> None:
        self.breaks(proxy, node, Fault.RESET)

    @pytest.mark.parametrize("fault", [Fault.SLOW, Fault.SILENCE])
    def test_a_link_of_a_megabit_and_one_that_carries_nothing(
        self, proxy: Proxy, node: Node, fault: Fault
    ) -> None:
        """The second from the middle of a value on."""
        with proxy.failing(fault, after_bytes=IN_A_VALUE):
            self.opens(node)
        assert "timeout" in node.faults()
        self.heals(node)

    def test_a_name_that_nobody_knows(self, running: RemoteEngine) -> None:
        node = Node(self.open(running, host="no-such-host.invalid"))
        self.opens(node)
        assert "name" in node.faults()
        node.close()

    def test_a_try_has_what_its_call_has_left(self, running: RemoteEngine, proxy: Proxy) -> None:
        store = running.open(block_bytes=BLOCK_BYTES, proxy=proxy, timeout_seconds=60.0)
        asked = [ALICE + block for block in keys(next(_unknown))]
        assert store.exists(asked) == [False]  # connected

        def ask() -> None:
            with call_within(0.5), pytest.raises(TierUnavailable) as caught:
                store.exists(asked)
            assert caught.value.cause == "timeout"

        with proxy.failing(Fault.SILENCE), ThreadPoolExecutor(1) as other:
            other.submit(ask).result(PATIENCE_SECONDS)
        store.close()

    @pytest.mark.parametrize("what", ["half", "foreign"])
    def test_a_value_that_was_cut_short_and_one_of_somebody_else(
        self, running: RemoteEngine, node: Node, what: str
    ) -> None:
        self.meets(running, node, what)


class CredentialFaults(ProtocolFaults):
    """Also those of engines that look at credentials."""

    def test_wrong_credentials(self, running: RemoteEngine) -> None:
        node = Node(self.open(running, wrong_credentials=True))
        self.opens(node)
        node.save(PROMPT)
        assert node.load() == len(PROMPT)  # from host memory
        assert "credentials" in node.faults()
        node.close()


class RemoteFaults(ProtocolFaults):
    """All that every engine meets."""

    def test_a_server_that_stops_during_a_read(
        self, running: RemoteEngine, proxy: Proxy, node: Node
    ) -> None:
        self.write(running, LONG_PROMPT)
        before = proxy.answered_bytes
        with (
            proxy.failing(Fault.SLOW, bytes_per_second=8_000_000),
            ThreadPoolExecutor(1) as other,
        ):
            loading = other.submit(node.load, LONG_PROMPT)
            eventually(lambda: proxy.answered_bytes > before + BLOCK_BYTES, "no value comes")
            with paused(running):
                assert loading.result() < len(LONG_PROMPT)
        assert "timeout" in node.faults()
        self.heals(node)

    @pytest.mark.parametrize("fault", [Fault.CUT, Fault.REFUSE])
    def test_connections_that_are_closed_and_refused(
        self, proxy: Proxy, node: Node, fault: Fault
    ) -> None:
        self.breaks(proxy, node, fault)

    def test_saves_go_on_while_nobody_takes_them(
        self, running: RemoteEngine, proxy: Proxy, node: Node
    ) -> None:
        """They stay in host memory as long as there is room, and are written afterwards."""
        other = keys(7, *[0] * 15)
        with proxy.failing(Fault.SILENCE):
            self.opens(node)
            node.save(other)
            assert node.load(other) == len(other)
            for number in range(6):  # more than there is room for
                node.save(keys(100 + number, *[0] * 15))
        assert node.drain()
        last = keys(105, *[0] * 15)
        reader = Node(self.open(running))
        assert reader.load(last) == len(last)
        reader.close()

    @pytest.mark.parametrize("what", ["header", "nothing", "longer", "flipped", "another"])
    def test_a_value_that_is_not_what_was_written(
        self, running: RemoteEngine, node: Node, what: str
    ) -> None:
        self.meets(running, node, what)

    @pytest.mark.parametrize("fault", [Fault.RESET, Fault.SILENCE])
    def test_nothing_grows_in_an_outage(self, proxy: Proxy, node: Node, fault: Fault) -> None:
        node.load()
        with proxy.failing(fault):
            self.opens(node)
            self.nothing_grows(node)
        assert sum(node.faults().values()) < 100  # the breaker has kept them away


class BoundedFaults(RemoteFaults):
    """Also those of engines that hold their values in memory."""

    @pytest.fixture
    def bounded(self, running: BoundedEngine) -> Iterator[BoundedEngine]:
        """As large as ever afterwards, and empty."""
        yield running
        running.kill()
        running.restart()

    def test_what_an_engine_has_evicted_is_a_miss(self, bounded: BoundedEngine) -> None:
        bounded.let_evict()
        writer = Node(self.open(bounded), slots=16)
        written: list[Sequence[BlockKey]] = []

        def writes(prompt: Sequence[BlockKey], count: int) -> bool:
            """Whether there are *count* that the engine has taken, this one too if it takes it."""
            refused = writer.faults()
            writer.save(prompt)
            assert writer.drain()
            if writer.faults() == refused:
                written.append(prompt)
            return len(written) == count

        eventually(lambda: writes(keys(next(_unknown), *[0] * 15), 20), "no room is made")  # 80 MiB
        eventually(lambda: writes(keys(next(_unknown)), 21), "no room is made")  # nothing after it
        assert writer.faults().keys() <= {"full"}
        writer.close()
        gone = [prompt for prompt in written if bounded.raw(ALICE + prompt[0]) is None]
        assert gone
        reader = Node(self.open(bounded))
        assert [reader.load(prompt) for prompt in gone] == [0] * len(gone)
        assert not reader.faults()
        eventually(lambda: reader.load(written[-1]) == 1, "nothing is left")
        assert not reader.faults()
        reader.close()

    def test_an_engine_that_is_full_and_does_not_evict(self, bounded: BoundedEngine) -> None:
        node, reader = Node(self.open(bounded)), Node(self.open(bounded))
        for each in (node, reader):
            each.load()  # connected, while there is room
        bounded.fill()
        last = save_in_vain(node)
        assert reader.load(last) == 0
        assert not reader.faults()
        for each in (node, reader):
            each.close()


def save_in_vain(node: Node) -> Sequence[BlockKey]:
    """Save prompts to an engine that has no room for the last one, which is returned.

    What it does not take is counted, and a request has what host memory holds.
    """
    for number in range(6):  # 24 MiB
        prompt = keys(2000 + number, *[0] * 15)
        node.save(prompt)
        assert node.load(prompt) == len(prompt)
        assert node.drain()
    assert node.faults().keys() == {"full"}
    assert not node.is_off()
    return prompt


class _Used(NamedTuple):
    """What this process has, without what proxies have."""

    threads: int
    descriptors: int
    memory_bytes: int

    @classmethod
    def now(cls) -> "_Used":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        descriptors = len(os.listdir("/proc/self/fd"))
        threads = [thread.name for thread in threading.enumerate()]
        relays = threads.count(RELAY)
        return cls(len(threads) - relays, descriptors - 2 * relays, pages * resource.getpagesize())


@contextmanager
def paused(running: RemoteEngine) -> Iterator[None]:
    running.pause()
    try:
        yield
    finally:
        running.resume()


def folder_of(place: Path) -> str:
    """A prefix of keys for a store that lives at *place*."""
    return hashlib.sha256(bytes(place)).hexdigest()[:16]

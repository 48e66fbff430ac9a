"""The faults of a remote engine, in the middle of batches: the same for every engine.

Whatever happens no request fails or waits without end, no byte is wrong, the breaker opens and
heals, nothing is left behind, and a counter names the cause.
"""

import hashlib
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
from tests.caches import ALICE, eventually, keys, reads_running
from tests.remote.proxy import Fault, Proxy
from tests.remote.subject import RemoteEngine

from kvstrata.core.config import Config
from kvstrata.core.types import BlockKey
from kvstrata.manager.manager import KVManager
from kvstrata.manager.tasks import TaskState
from kvstrata.storage.remote.value import HEADER_BYTES, header_of
from kvstrata.storage.store import Store
from kvstrata.storage.wrap import BreakerStore

BLOCK_BYTES = 256 << 10
PROMPT = keys(*[0] * 16)  # in two batches of the write, four of the read
CALL_SECONDS = 1.0
_unknown = itertools.count(100_000)
BUDGET_SECONDS = 15.0  # for what may take a few calls; only a broken cache waits so long


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
        task = self.manager.wait([task.task_id], BUDGET_SECONDS)[task.task_id]
        assert task.state is TaskState.READY, "a load has no end"
        self.manager.launch([task.task_id])
        for slot, block in zip(task.slots, asked, strict=False):
            assert self.manager.view(slot) == content(block), "a wrong byte"
        self.manager.complete([task.task_id])
        return len(task.slots)

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


class RemoteFaults:
    """Inherit it in a class whose name begins with ``Test`` and say which ``engine``."""

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
        yield node
        node.close()

    def open(self, running: RemoteEngine, **how: object) -> Store:
        return running.open(block_bytes=BLOCK_BYTES, timeout_seconds=CALL_SECONDS, **how)  # type: ignore[arg-type]  # passed on

    def write(self, running: RemoteEngine) -> None:
        other = Node(self.open(running))
        other.save(PROMPT)
        assert other.manager._lower["remote"].drain(BUDGET_SECONDS)
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

    def test_a_server_that_is_stopped(self, running: RemoteEngine, node: Node) -> None:
        with paused(running):
            self.opens(node)
        assert node.faults().keys() & {"timeout", "unreachable"}
        self.heals(node)

    def test_a_server_that_stops_during_a_read(
        self, running: RemoteEngine, proxy: Proxy, node: Node
    ) -> None:
        with proxy.failing(Fault.SLOW, bytes_per_second=2_000_000):
            loading = threading.Timer(0.2, running.pause)
            loading.start()
            try:
                node.load()
            finally:
                loading.join()
                running.resume()
        self.heals(node)

    def test_a_server_that_is_killed_and_comes_back_empty(
        self, running: RemoteEngine, node: Node
    ) -> None:
        running.kill()
        self.opens(node)
        assert "unreachable" in node.faults() or "timeout" in node.faults()
        running.restart()
        self.heals(node, found=0)
        self.write(running)
        self.heals(node)

    @pytest.mark.parametrize("fault", [Fault.RESET, Fault.CUT, Fault.REFUSE])
    def test_connections_that_break(self, proxy: Proxy, node: Node, fault: Fault) -> None:
        with proxy.failing(fault, after_bytes=3 * BLOCK_BYTES // 2):
            self.opens(node)
        assert "unreachable" in node.faults()
        self.heals(node)

    @pytest.mark.parametrize("fault", [Fault.SLOW, Fault.SILENCE])
    def test_a_link_of_a_megabit_and_one_that_carries_nothing(
        self, proxy: Proxy, node: Node, fault: Fault
    ) -> None:
        with proxy.failing(fault):
            self.opens(node)
        assert "timeout" in node.faults()
        self.heals(node)

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
        assert node.manager._lower["remote"].drain(BUDGET_SECONDS)
        last = keys(105, *[0] * 15)
        reader = Node(self.open(running))
        assert reader.load(last) == len(last)
        reader.close()

    def test_wrong_credentials(self, running: RemoteEngine) -> None:
        if not running.has_credentials:
            return
        node = Node(self.open(running, wrong_credentials=True))
        self.opens(node)
        node.save(PROMPT)
        assert node.load() == len(PROMPT)  # from host memory
        assert "credentials" in node.faults()
        node.close()

    def test_a_name_that_nobody_knows(self, running: RemoteEngine) -> None:
        node = Node(self.open(running, host="no-such-host.invalid"))
        self.opens(node)
        assert "name" in node.faults()
        node.close()

    def test_an_engine_that_is_full_or_evicts(self, running: RemoteEngine) -> None:
        """What is asked for back is right or a miss, and the engine may say that it is full."""
        running.fill()
        node = Node(self.open(running), slots=16)
        prompts = [keys(1000 + number, *[0] * 15) for number in range(12)]
        for prompt in prompts:
            node.save(prompt)
            node.manager._lower["remote"].drain(0.5)
        for prompt in prompts:
            node.load(prompt)
        if not running.can_evict:
            assert "full" in node.faults()
        node.close()
        running.kill()
        running.restart()

    @pytest.mark.parametrize(
        "what", ["half", "header", "nothing", "longer", "flipped", "another", "foreign"]
    )
    def test_a_value_that_is_not_what_was_written(
        self, running: RemoteEngine, node: Node, what: str
    ) -> None:
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
        assert node.load() == 5
        if what == "foreign":
            assert node.faults() == {"foreign": 1}
            assert running.raw(key) == damaged
            running.put_raw(key, stored)
        else:
            assert node.faults() == {"corrupt": 1}
            assert running.raw(key) is None
            self.write(running)
        self.heals(node)

    def test_nothing_grows_in_an_outage(self, proxy: Proxy, node: Node) -> None:
        """Neither threads nor descriptors nor tasks, however many requests come."""
        node.load()
        with proxy.failing(Fault.RESET):
            self.opens(node)
            before = threading.active_count(), len(os.listdir("/proc/self/fd"))
            for number in range(40):
                node.load(keys(50 + number, *[0] * 3))
                node.save(keys(50 + number, *[0] * 3))
            report = node.manager.stats()
            assert (report.running_gets, report.running_puts) == (0, 0)
            after = threading.active_count(), len(os.listdir("/proc/self/fd"))
        assert after[0] <= before[0] + 8
        assert after[1] <= before[1] + 32
        assert sum(node.faults().values()) < 100  # the breaker has kept them away


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

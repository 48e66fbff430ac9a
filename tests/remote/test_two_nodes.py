"""Two nodes with a server each, in networks of their own, that share blocks through an engine."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pytest
from tests.caches import ALICE, BLOCK_BYTES, PATIENCE_SECONDS, content, eventually, keys
from tests.remote.networks import Network
from tests.remote.nodes import Start, cache_server, mooncake, objects, valkey
from tests.server.harness import engine, worker_hello

from kvstrata.core.types import BlockKey
from kvstrata.manager.report import CacheReport, TierReport
from kvstrata.manager.tasks import TaskState
from kvstrata.server import protocol as p
from kvstrata.server.client import ManagerClient
from kvstrata.storage.mapping import HostMapping

PROMPT = keys(*[0] * 12)
_SIZES = ("--host-size", "1MiB", "--block-bytes", str(BLOCK_BYTES))


class Node:
    """An engine with one worker at the server that listens at *socket*."""

    def __init__(self, socket: Path) -> None:
        self._worker = ManagerClient(socket, worker_hello())
        welcome = self._worker.wait_welcome(PATIENCE_SECONDS)
        descriptor = self._worker.take_descriptor()
        assert descriptor is not None
        self._mapping = HostMapping.from_fd(
            descriptor, welcome.server_id, welcome.slots, welcome.slot_bytes
        )
        self._worker._ask(p.Mapped(0), p.Number)
        self.engine = engine(socket)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self._worker.close()
        self._mapping.close()

    def save(self, asked: Sequence[BlockKey]) -> None:
        task = self.engine.put_match(ALICE, asked)
        assert len(task.missing) == len(asked)
        self.engine.launch([task.task_id])
        for slot, i in zip(task.slots, task.missing, strict=True):
            self._mapping.data[slot][:BLOCK_BYTES] = memoryview(content(ALICE, asked[i]))
        self.engine.complete([task.task_id])
        eventually(lambda: not self.tier().waiting_blocks, "blocks do not reach the engine")

    def load(self, asked: Sequence[BlockKey]) -> list[bytes]:
        task = self.engine.get_match(ALICE, asked)
        if not task.task_id:
            return []
        task = self.engine.wait([task.task_id], PATIENCE_SECONDS)[task.task_id]
        assert task.state is TaskState.READY
        self.engine.launch([task.task_id])
        found = [self._mapping.data[slot][:BLOCK_BYTES].tobytes() for slot in task.slots]
        self.engine.complete([task.task_id])
        return found

    def report(self) -> CacheReport:
        report = self.engine.stats()
        assert report is not None
        return report

    def tier(self) -> TierReport:
        return next(tier for tier in self.report().tiers if tier.tier == "remote")

    def counted(self, name: str) -> int:
        return self.report().counters[f"kvstrata_{name}"]


@pytest.mark.parametrize("start", [valkey, objects, mooncake])
def test_what_one_node_has_computed_is_a_hit_of_the_other(start: Start, tmp_path: Path) -> None:
    with ExitStack() as stack:
        network = stack.enter_context(Network("a", "b"))
        tier = stack.enter_context(start(network, tmp_path))
        one, other = (
            stack.enter_context(Node(stack.enter_context(cache_server(*place, *_SIZES))))
            for place in (
                (network, "a", tier, tmp_path / "a.log"),
                (network, "b", tier, tmp_path / "b.log"),
            )
        )
        assert other.load(PROMPT[:1]) == []  # and remembers for a moment that it is missing
        one.save(PROMPT)
        eventually(
            lambda: other.load(PROMPT) == [content(ALICE, block) for block in PROMPT],
            f"the other node does not find them: {(tmp_path / 'b.log').read_text()}",
        )
        assert other.counted("promoted_blocks_total{tier=remote}") == len(PROMPT)
        assert one.counted("cascaded_blocks_total{tier=remote}") == len(PROMPT)
        assert one.engine.reset(ALICE) == len(PROMPT)
        assert one.load(PROMPT) == []

"""What loads have spared engines, by the metrics of the catalogue."""

import time
from collections.abc import Mapping
from typing import Final

from kvstrata.core.types import NamespaceId
from kvstrata.manager.tasks import GetTask
from kvstrata.observe import metrics

_MOST_DIGITS: Final = 9  # of a number that an engine has told as text


class Gains:
    """Counts loads that have succeeded. Needs the manager's lock."""

    def __init__(
        self,
        counters: metrics.Counters,
        namespaces: Mapping[NamespaceId, Mapping[str, str]],
        *,
        block_bytes: int,
    ) -> None:
        """*namespaces* are what engines have said of theirs."""
        self._counters = counters
        self._namespaces = namespaces
        self._block_bytes = block_bytes

    def loaded(self, task: GetTask, blocks: int, blocks_per_second: float | None) -> None:
        """*blocks* of *task* are on the device of an engine that computes so many a second.

        Seconds are counted only for an engine that has told its rate, tokens only for one that has
        told how many a block has.
        """
        remote = min(blocks, task.remote_blocks)
        disk = min(blocks - remote, task.disk_blocks)
        by_tier = {"host": blocks - disk - remote, "disk": disk, "remote": remote}
        for tier, count in by_tier.items():
            self._counters.add(metrics.LOADED_BYTES, count * self._block_bytes, tier)
        self._counters.add(metrics.LOADED_BLOCKS, blocks)
        self._counters.durations.observe(metrics.LOAD_SECONDS, time.monotonic() - task.began_at)
        self._counters.add(metrics.SPARED_TOKENS, blocks * self._tokens_of(task.namespace))
        if blocks_per_second:
            self._counters.spared_seconds += blocks / blocks_per_second

    def _tokens_of(self, namespace: NamespaceId) -> int:
        told = self._namespaces.get(namespace, {}).get("tokens_per_block", "")
        is_number = told.isascii() and told.isdigit() and len(told) <= _MOST_DIGITS
        return int(told) if is_number else 0

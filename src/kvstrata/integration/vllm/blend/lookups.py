"""Asking the server for the blocks that runs of known tokens lie in."""

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstrata.blend.runs import Runs
from kvstrata.core.config import Config
from kvstrata.core.keys import KeyArray
from kvstrata.core.types import BlockKey, NamespaceId
from kvstrata.integration.vllm.ahead import Ahead
from kvstrata.integration.vllm.link import CacheLink
from kvstrata.manager.tasks import UNSETTLED, TaskState
from kvstrata.server import protocol as p
from kvstrata.server.client import Pending

__all__ = ["RunLookup", "RunSlots"]

# Of the blocks that were not found: it is still looking, or could not look.
_KNOWS_NOTHING: Final = (TaskState.SEARCHING, TaskState.FAILED)


@dataclass(frozen=True, slots=True, eq=False)
class RunSlots:
    """The runs that can be reused, as far as their blocks are in host memory, and leased."""

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    delta: NDArray[np.int64]
    first_row: NDArray[np.int64]  # of each run, in tokens of the slots laid end to end
    slots: NDArray[np.int64]
    generations: NDArray[np.int64]
    task_ids: list[int]
    missing: KeyArray  # blocks that the server does not have


class RunLookup:
    """One lookup of the blocks of *runs*: a task for each run, whose leases it holds."""

    def __init__(
        self,
        link: CacheLink,
        ahead: Ahead,
        namespace: NamespaceId,
        runs: Runs,
        request_id: str,
        saving: Collection[BlockKey] = (),
    ) -> None:
        """*saving*: blocks that the server may only have in a moment, and does not find before."""
        self._link = link
        self._ahead = ahead
        self._runs = runs
        self._saving = saving
        self.sent_at = time.monotonic()
        self.connection = link.number
        self._pending: list[Pending | None] = [
            link.submit(p.GetMatch(0, namespace, keys.tobytes(), request_id[-256:]))
            for keys in _keys_of_runs(runs)
        ]
        for pending, keys in zip(self._pending, _keys_of_runs(runs), strict=True):
            if pending is not None:
                ahead.take(pending, len(keys))

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self.sent_at

    @property
    def is_answered(self) -> bool:
        """Whether the server has said something of every run."""
        return all(each is None or each.reply is not None for each in self._pending)

    @property
    def is_silent(self) -> bool:
        """Whether the server has said nothing at all of what it was asked."""
        asked = [each for each in self._pending if each is not None]
        return bool(asked) and all(each.reply is None for each in asked)

    def is_settled(self, config: Config) -> bool:
        """Whether there is an answer for every run, or none is worth waiting for any more."""
        age = self.age_seconds
        if not self.is_answered:
            return age > config.lookup_timeout_seconds
        patience_seconds = 0.0
        for each in self._pending:
            if each is not None and each.status is not None and each.status.state in UNSETTLED:
                searching = each.status.state is TaskState.SEARCHING
                wait = config.remote_lookup_seconds if searching else config.load_timeout_seconds
                patience_seconds = max(patience_seconds, wait)
        return age > patience_seconds

    def found(self) -> RunSlots:
        """What of each run is there: its leading blocks in host memory."""
        runs, tokens = self._runs, self._runs.tokens_per_block
        chosen, length, first_row, task_ids = [], [], [], []
        slots: list[int] = []
        generations: list[int] = []
        missing = [runs.keys[:0]]
        for i, (pending, keys) in enumerate(zip(self._pending, _keys_of_runs(runs), strict=True)):
            status = None if pending is None else pending.status
            if status is None or self.connection != self._link.number:
                continue
            if status.state not in _KNOWS_NOTHING:
                first = status.matched_blocks + status.declined_blocks + status.untold_blocks
                missing.append(keys[first:])
            covered = len(status.slots) * tokens - int(runs.skip[i])
            if covered < 1:
                continue
            chosen.append(i)
            length.append(min(int(runs.length[i]), covered))
            first_row.append(len(slots) * tokens + int(runs.skip[i]))
            task_ids.append(status.task_id)
            slots += status.slots
            generations += status.generations
        not_found = np.concatenate(missing)
        are_lost = [key.tobytes() not in self._saving for key in not_found]
        return RunSlots(
            start=runs.start[chosen],
            length=np.array(length, np.int64),
            delta=runs.delta[chosen],
            first_row=np.array(first_row, np.int64),
            slots=np.array(slots, np.int64),
            generations=np.array(generations, np.int64),
            task_ids=task_ids,
            missing=not_found[np.array(are_lost, np.bool_)],
        )

    def abandon(self, but: Collection[int] = ()) -> None:
        """Give the leases back, and those that come late, of all tasks *but* these."""
        for pending in self._pending:
            if pending is None:
                continue
            self._ahead.give_back(pending)
            task_id = pending.status.task_id if pending.status else None
            if task_id not in but:
                self._link.abandon(pending, self.connection)


def _keys_of_runs(runs: Runs) -> Iterator[KeyArray]:
    for first, end in zip(runs.key_offsets[:-1], runs.key_offsets[1:], strict=True):
        yield runs.keys[first:end]

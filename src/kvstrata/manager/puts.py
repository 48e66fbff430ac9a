"""Put tasks: slots for blocks that are nowhere yet, until their bytes are in them."""

import time
from collections.abc import Mapping
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.keys import ABSENT, KeyArray, as_key_array
from kvstrata.core.types import BLOCK_KEY_BYTES, BlockKey, NamespaceId
from kvstrata.index.places import ARRIVING, DISK, HOST, WRITING
from kvstrata.manager.decisions import Decision
from kvstrata.manager.desk import Desk
from kvstrata.manager.residency import Residency
from kvstrata.manager.tasks import Offer, PutTask, TaskState, TaskStatus
from kvstrata.manager.writes import LowerTier
from kvstrata.observe import metrics

_HERE: Final = HOST | ARRIVING
_IN_HOST: Final = np.uint8(_HERE | WRITING)


class Lower(Protocol):
    """A tier below host memory, as saves see it: a ``Cascade``."""

    def is_off(self) -> bool: ...


class Puts:
    """The put tasks of one manager. Needs its lock."""

    def __init__(self, cache: Residency, lower: Mapping[LowerTier, Lower], desk: Desk) -> None:
        self.tasks: dict[int, PutTask] = {}
        self._cache = cache
        self._lower = lower
        self._desk = desk

    def match(self, offer: Offer, owner: int) -> TaskStatus:
        """``KVManager.put_match``."""
        index, cache, namespace, keys = self._cache.index, self._cache, offer.namespace, offer.keys
        found = index.find(namespace, keys)
        saved_in = self._saved_in()
        is_known = (found != ABSENT) & cache.has(found, saved_in | WRITING)
        known = found[is_known]
        where = index.where.take(known)
        saved = int(np.count_nonzero(where & np.uint8(saved_in)))
        missing = np.flatnonzero(~is_known)
        above = self._parent(namespace, offer.parent)
        held = known
        if above != ABSENT and not (known == above).any():
            held = np.append(known, np.int32(above))
        cache.lease(held)  # room is not made at the cost of what this continues
        before = 0 if above == ABSENT else int(index.depth[above]) + 1
        whole = max(offer.prompt_blocks, before + len(keys))
        is_cut_off = above == ABSENT and offer.parent is not None
        slots = cache.take_slots(
            namespace, len(missing), whole=whole, above=whole if is_cut_off else before
        )
        end = int(missing[len(slots)]) if len(slots) < len(missing) else len(keys)
        ids = index.insert(namespace, keys[:end], above)
        new = ids[missing[missing < len(ids)]]
        cache.release_slots(slots[len(new) :])
        slots = slots[: len(new)]
        cache.reserve(new, slots, WRITING)
        cache.unlease(held)
        cache.touch(known)
        task = PutTask(self._desk.new_id(), owner, new, slots, missing[: len(new)].tolist())
        shed = len(missing) - len(new)
        cache.counters.add(metrics.SHED_BLOCKS, shed)
        last = keys[len(ids) - 1].tobytes() if len(ids) else b""
        self._explain(task, namespace, offer.request, asked=len(keys), where=where, last=last)
        if not len(new):
            return TaskStatus(0, TaskState.DONE if saved == len(keys) else TaskState.FAILED)
        self.tasks[task.task_id] = task
        return self.status(task)

    def publish(self, task: PutTask, state: TaskState, blocks: int) -> list[int]:
        """The bytes of the first *blocks* of *task* are in their slots, the others do not come.

        Those can be found, unless a reset forbids it. Returns the slots of the others, still taken.
        """
        written, lacking = task.ids[:blocks], task.ids[blocks:]
        kept = written[~self._cache.index.is_retired(written)]
        self._cache.fill(written, WRITING)
        self._cache.counters.add(metrics.SAVED_BLOCKS, len(kept))
        seconds = time.monotonic() - task.began_at
        self._cache.counters.durations.observe(metrics.SAVE_SECONDS, seconds)
        self._cache.abandon(lacking)
        self._end(task, state)
        slots: list[int] = task.slots[blocks:].tolist()
        return slots

    def abandon(self, task: PutTask, state: TaskState) -> list[int]:
        """End *task* without publishing; its slots, still taken."""
        self._cache.abandon(task.ids)
        self._end(task, state)
        slots: list[int] = task.slots.tolist()
        return slots

    def status(self, task: PutTask) -> TaskStatus:
        """What a client sees of *task*."""
        generations = self._desk.memory.generations(task.slots).tolist()
        return TaskStatus(task.task_id, task.state, task.slots.tolist(), generations, task.missing)

    def _saved_in(self) -> int:
        """Places where a block need not be saved again: not on a disk that is switched off."""
        disk = self._lower.get("disk")
        return _HERE if disk is None or disk.is_off() else _HERE | DISK

    def _parent(self, namespace: NamespaceId, parent: BlockKey | None) -> int:
        """The block that a prompt goes on from; ``ABSENT`` if it is not known here."""
        if parent is None:
            return ABSENT
        return int(self._cache.index.find(namespace, as_key_array([parent]))[0])

    def _end(self, task: PutTask, state: TaskState) -> None:
        task.state = state
        del self.tasks[task.task_id]
        self._desk.remember(task.task_id, state)

    def _explain(
        self,
        task: PutTask,
        namespace: NamespaceId,
        request: str,
        *,
        asked: int,
        where: NDArray[np.uint8],
        last: BlockKey,
    ) -> None:
        """*where* as of the index, of the blocks that were known."""
        wanted = asked - len(where)
        in_host = int(np.count_nonzero(where & _IN_HOST))
        self._desk.decisions.add(
            Decision(
                time.time(),
                "put",
                request,
                namespace.hex(),
                task.task_id if len(task.ids) else 0,
                asked,
                host_blocks=in_host,
                disk_blocks=len(where) - in_host,
                taken_blocks=len(task.ids),
                reason="all" if len(task.ids) == wanted else "no_room",
                last_block=last.hex(),
            )
        )


def distinct(keys: KeyArray) -> KeyArray:
    """*keys* up to the first that comes twice, which no prompt has."""
    if len(keys) < 2:
        return keys
    beginnings = np.sort(np.ascontiguousarray(keys[:, :8]).view(np.uint64).ravel())
    if not (beginnings[1:] == beginnings[:-1]).any():
        return keys
    _, first = np.unique(keys.view(f"V{BLOCK_KEY_BYTES}"), return_index=True)
    if len(first) == len(keys):
        return keys
    repeated = np.ones(len(keys), np.bool_)
    repeated[first] = False
    return keys[: int(repeated.argmax())]

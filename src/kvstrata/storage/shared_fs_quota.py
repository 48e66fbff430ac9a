"""The quota of a shared store: every node counts what it adds, and one of them evicts.

Each node tells in a file of its own how much it has added since it opened the store. The owner
counts all files now and then, and between two counts adds what the nodes have told since. It removes
the file of a node that tells nothing for a day; should that one come back, it begins a new file.
"""

import contextlib
import os
import secrets
import struct
from collections.abc import Mapping
from threading import Lock
from typing import Final, NamedTuple

from kvstrata.storage.shared_fs_census import (
    NOTHING,
    BlockFile,
    Held,
    take_census,
    unlink,
)
from kvstrata.storage.shared_fs_directory import Names
from kvstrata.storage.shared_fs_file import NOT_THERE
from kvstrata.storage.shared_fs_lease import TEMPORARY_SUFFIX, Election, tell, told

_EVICT_ABOVE: Final = 0.95  # of the capacity
_EVICT_DOWN_TO: Final = 0.9
_MAGIC: Final = b"KVSADDED"
_COUNTER: Final = struct.Struct("<8sqq")
_SECOND_NS: Final = 10**9
_DEAD_NODE_NS: Final = 86_400 * _SECOND_NS


class Times(NamedTuple):
    """How often a shared store does what costs metadata operations."""

    touch_seconds: float = 600.0  # a read renews a block's last use when that is older
    lease_seconds: float = 60.0  # without a sign of life for so long the owner is replaced
    census_seconds: float = 600.0  # the owner counts all files again
    abandoned_seconds: float = 3600.0  # a temporary file of this age has no writer any more


class _Count(NamedTuple):
    """A count of all files, and what the nodes had told when it began."""

    held: Held
    told: Mapping[str, Held]
    taken_ns: int


class Quota:
    """What the directory holds, as far as this node knows, and its share in keeping it small.

    Between two sweeps a node knows what it has added itself, not what others have. ``reserve``
    and ``release`` may be called from several threads; a second ``sweep`` waits for the first.
    """

    def __init__(self, names: Names, node: str, capacity_bytes: int | None, times: Times) -> None:
        self._names = names
        self._node = node
        self._capacity_bytes = capacity_bytes
        self._times = times
        self._election = Election(names.owner, node, times.lease_seconds)

        self._lock = Lock()  # guards the two below
        self._added = NOTHING  # by this node, since it opened the store or began a new counter
        self._others = NOTHING  # all else, as of the last sweep

        self._sweeping = Lock()  # guards everything below
        self._counter = node  # the name of a file
        self._has_told = False  # in that file
        self._told = NOTHING  # of what this node has added
        self._count: _Count | None = None  # the last one by this node
        self._coldest: list[BlockFile] = []  # of that count, coldest last
        lease = self._election.lease()
        if lease is not None:
            self._others = lease.held

    @property
    def held(self) -> Held:
        with self._lock:
            return self._others.plus(self._added)

    def reserve(self, file_bytes: int) -> bool:
        """Count one more block if it fits into the capacity; whether it does."""
        with self._lock:
            held_bytes = self._others.file_bytes + self._added.file_bytes
            if self._capacity_bytes is not None and held_bytes + file_bytes > self._capacity_bytes:
                return False
            self._added = self._added.plus(Held(1, file_bytes))
            return True

    def release(self, held: Held) -> None:
        """Count blocks that are gone, or that were reserved and not written."""
        with self._lock:
            self._added = self._added.minus(held)

    def sweep(self) -> int:
        """Tell and learn what was added; if this node is the owner, count and evict.

        Returns the number of blocks evicted. Raises ``OSError``.
        """
        with self._sweeping:
            now_ns = self._tell_added()
            lease = self._election.lease()
            if lease is not None and not self._election.is_ours_to_take(lease):
                self._know(lease.held)
                return 0
            self._election.renew(self.held)
            self._learn(now_ns)
            evicted = self._evict()
            if self._is_above(_EVICT_ABOVE):  # of the last count nothing cold is left
                self._count = None
                self._learn(self._tell_added())
                evicted += self._evict()
            self._election.renew(self.held)
            return evicted

    def _tell_added(self) -> int:
        """Tell what this node has added; the time in ns by the clock of the file system."""
        if self._has_told and self._told_in(self._counter) is None:
            self._begin_counter()
        with self._lock:
            self._told = self._added
        path = f"{self._names.nodes}/{self._counter}"
        tell(path, self._node, _COUNTER.pack(_MAGIC, *self._told))
        try:
            now_ns = os.stat(path).st_mtime_ns
        except FileNotFoundError:  # the file system is full; then nothing is old enough
            return os.stat(self._names.marker).st_mtime_ns
        self._has_told = True
        return now_ns

    def _begin_counter(self) -> None:
        """This node was taken for dead: what it has told is in the count of all files.

        Under a new name, so that an owner that still knows the old counter takes nothing off.
        """
        with self._lock:
            self._others = self._others.plus(self._told)
            self._added = self._added.minus(self._told)
        self._counter = secrets.token_hex(8)
        self._has_told = False

    def _know(self, held: Held) -> None:
        """Take over that the directory held *held* when this node told what it had added."""
        with self._lock:
            self._others = held.minus(self._told)

    def _learn(self, now_ns: int) -> None:
        """Know what the directory holds: the last count, and what was told since."""
        count = self._count
        if count is None or now_ns - count.taken_ns > self._times.census_seconds * _SECOND_NS:
            count = self._count = self._take_census(now_ns)
        held = count.held
        for node, added in self._told_by_nodes().items():
            held = held.plus(added).minus(count.told.get(node, NOTHING))
        self._know(held)

    def _take_census(self, now_ns: int) -> _Count:
        self._forget_dead_nodes(now_ns - _DEAD_NODE_NS)
        told_before = self._told_by_nodes()
        abandoned_before_ns = now_ns - int(self._times.abandoned_seconds * _SECOND_NS)
        census = take_census(
            self._names, abandoned_before_ns, lambda: self._election.keep(self.held)
        )
        self._coldest = census.coldest[::-1]
        return _Count(census.held, told_before, now_ns)

    def _told_by_nodes(self) -> dict[str, Held]:
        found = {self._counter: self._told}
        for name in os.listdir(self._names.nodes):
            if name == self._counter or name.endswith(TEMPORARY_SUFFIX):
                continue
            added = self._told_in(name)
            if added is not None:
                found[name] = added
        return found

    def _told_in(self, counter: str) -> Held | None:
        body = told(f"{self._names.nodes}/{counter}")
        if body is None or len(body) != _COUNTER.size:
            return None
        magic, blocks, file_bytes = _COUNTER.unpack(body)
        return Held(blocks, file_bytes) if magic == _MAGIC else None

    def _forget_dead_nodes(self, last_told_ns: int) -> None:
        for name in os.listdir(self._names.nodes):
            path = f"{self._names.nodes}/{name}"
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_mtime_ns < last_told_ns:
                    os.unlink(path)

    def _evict(self) -> int:
        """Remove the coldest blocks until there is room; how many."""
        if not self._is_above(_EVICT_ABOVE):
            return 0
        evicted = 0
        while self._coldest and self._is_above(_EVICT_DOWN_TO):
            victim = self._coldest.pop()
            if not _is_unused(victim) or not unlink(victim.path):
                continue
            self.release(Held(1, victim.file_bytes))
            evicted += 1
            self._election.keep(self.held)
        return evicted

    def _is_above(self, share: float) -> bool:
        if self._capacity_bytes is None:
            return False
        return self.held.file_bytes > share * self._capacity_bytes


def _is_unused(victim: BlockFile) -> bool:
    """Whether nobody has used the block since it was counted."""
    try:
        return os.stat(victim.path).st_mtime_ns == victim.used_ns
    except OSError as e:
        if e.errno in NOT_THERE:
            return False
        raise

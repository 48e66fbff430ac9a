"""What happens to blocks, for those who follow it: `observe/block_changes.py` says how it is told.

The index tells its changes, so nothing that enters or leaves a tier is missed. They are kept in one
log for all followers, of bounded length; each follower has a place in it. One that has fallen
behind is told that all it knows is void, and then what there is.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.keys import BlockIds
from kvstrata.core.types import NAMESPACE_ID_BYTES, NamespaceId
from kvstrata.index.places import DISK, HOST, REMOTE
from kvstrata.index.tree import PrefixIndex
from kvstrata.observe.block_changes import Change, ChangedTier

_TIERS: Final[tuple[tuple[np.uint8, ChangedTier], ...]] = (
    (np.uint8(HOST), "host"),
    (np.uint8(DISK), "disk"),
    (np.uint8(REMOTE), "remote"),
)
_TOLD: Final = np.uint8(HOST | DISK | REMOTE)
_MOST_BLOCKS: Final = 1 << 18  # in the log: 8 MiB of keys
_MOST_CHANGES: Final = 1 << 15  # in the log
_MOST_NAMESPACES: Final = 4096  # each reset of an engine registers one
CHANGE_BLOCKS: Final = 1024
"""Most blocks of one change."""

Places = NDArray[np.uint8]


class Named(NamedTuple):
    """A namespace that an engine has registered."""

    model: str
    since: int  # number of the next change then


class Feed:
    """The log of one manager, and a way in for its followers. Thread-safe.

    Without followers there is no log, and a change costs the index one comparison. What the remote
    tier holds is told as far as it is known here: that others removed a block is not, before somebody
    looks for it.
    """

    def __init__(self, lock: threading.Condition, index: PrefixIndex) -> None:
        """*lock* guards *index*."""
        self.lock = lock
        self.index = index
        self.names: dict[NamespaceId, Named] = {}
        self.first = 0  # number of the oldest change in the log
        self.end = 0  # number of the next one
        self._log: dict[int, Change] = {}
        self._blocks = 0  # of the log
        self._followers: list[Follower] = []

    def follow(self, namespace: NamespaceId | None, wake: Callable[[], None]) -> "Follower":
        """Hear what becomes of *namespace*, or of all that are registered, from now on.

        And first what there is. *wake* is called when there is news for one who has found none; it
        must not wait, and needs no lock.
        """
        with self.lock:
            follower = Follower(self, namespace, wake)
            self._followers.append(follower)
            self.index.watcher = self
            return follower

    def leave(self, follower: "Follower") -> None:
        """*follower* hears no more; idempotent."""
        with self.lock:
            if follower not in self._followers:
                return
            self._followers.remove(follower)
            if not self._followers:
                self.index.watcher = None
                self._log.clear()
                self.first, self._blocks = self.end, 0

    def model(self, namespace: NamespaceId) -> str | None:
        """The model that *namespace* was registered with."""
        with self.lock:
            named = self.names.get(namespace)
            return None if named is None else named.model

    def registered(self) -> list[NamespaceId]:
        """The namespaces that engines have registered."""
        with self.lock:
            return list(self.names)

    def change(self, number: int) -> Change:
        """That of the log with this number. Needs the lock."""
        return self._log[number]

    # -- what happens; all of it needs the lock ------------------------------------------------

    def moved(self, ids: BlockIds, before: Places, after: Places) -> None:
        """The places of *ids*, all different, were *before* and are *after* now."""
        different = (before ^ after) & _TOLD
        if not different.any():
            return
        for bit, tier in _TIERS:
            changed = (different & bit) != 0
            if changed.any():
                came = (after & bit) != 0
                self._append(_stored(self.index, ids[changed & came], tier))
                self._append(_removed(self.index, ids[changed & ~came], tier))

    def retired(self, namespace: NamespaceId) -> None:
        """Nobody finds a block of *namespace* any more."""
        self._append([Change("cleared", namespace)])

    def named(self, namespace: NamespaceId, model: str) -> None:
        """An engine has registered *namespace*."""
        if namespace in self.names:
            return
        if len(self.names) == _MOST_NAMESPACES:
            empty = (n for n in self.names if not self.index.counts(n).blocks)
            del self.names[next(empty, next(iter(self.names)))]
        self.names[namespace] = Named(model, self.end)
        for follower in self._followers:
            if follower.namespace is None:
                follower.tell(namespace)

    def _append(self, changes: list[Change]) -> None:
        if not changes:
            return
        for change in changes:
            self._log[self.end] = change
            self.end += 1
            self._blocks += change.blocks
        while self._blocks > _MOST_BLOCKS or self.end - self.first > _MOST_CHANGES:
            self._blocks -= self._log.pop(self.first).blocks
            self.first += 1
        namespaces = {change.namespace for change in changes}
        for follower in self._followers:
            follower.ring(namespaces)


class Follower:
    """One who follows. ``take`` and ``close`` are for one thread, whichever that is.

    Who applies what ``take`` returns knows, once it returns nothing, exactly what host memory and the
    disk hold of what it follows.
    """

    def __init__(self, feed: Feed, namespace: NamespaceId | None, wake: Callable[[], None]) -> None:
        """For ``Feed.follow``, which has the lock."""
        self.namespace = namespace
        self._feed = feed
        self._wake = wake
        self._is_waiting = False  # has found nothing, and not been woken since
        self._next = feed.end
        self._untold: deque[NamespaceId] = deque()  # what they hold has still to be told
        self._pieces: Iterator[BlockIds] | None = None  # of the first of these
        self._piece: deque[Change] = deque()  # of what was there when the log had come to _next
        self._tell_all()

    def take(self, most_blocks: int) -> list[Change]:
        """What is next, in order, at most *most_blocks* blocks, but ``CHANGE_BLOCKS`` at least.

        When it is nothing *wake* is called as soon as there is something.
        """
        with self._feed.lock:
            taken: list[Change] = []
            if self._next < self._feed.first:
                taken.append(Change("cleared", self.namespace))
                self._next = self._feed.end
                self._tell_all()
            self._take_some(taken, max(CHANGE_BLOCKS, most_blocks))
            self._is_waiting = not taken
            return taken

    def tell(self, namespace: NamespaceId) -> None:
        """Tell again what there is of *namespace*. Any thread."""
        with self._feed.lock:
            if namespace not in self._untold and self._feed.index.counts(namespace).blocks:
                self._untold.append(namespace)
                self.ring({namespace})

    def ring(self, namespaces: AbstractSet[NamespaceId | None]) -> None:
        """There is news of *namespaces*. Needs the lock."""
        if not self._is_waiting:
            return
        if self.namespace is None or self.namespace in namespaces:
            self._is_waiting = False
            self._wake()
        else:  # who has found nothing and misses nothing does not fall behind
            self._next = self._feed.end

    def close(self) -> None:
        """Hear no more; idempotent."""
        self._feed.leave(self)

    def _tell_all(self) -> None:
        self._untold.clear()
        self._pieces = None
        self._piece.clear()
        for namespace in self._feed.names if self.namespace is None else [self.namespace]:
            self.tell(namespace)

    def _take_some(self, taken: list[Change], most_blocks: int) -> None:
        """Add to *taken*: from the log, and when that is at its end of what is there.

        A piece of what is there is as of the end of the log, and is told before the log goes on.
        """
        room = most_blocks
        if not self._piece:
            room -= self._take_log(taken, most_blocks)
        while room > 0 and self._next_piece():
            change = self._piece[0]
            if self._is_for_me(change, self._next):
                if taken and change.blocks > room:
                    return
                taken.append(change)
                room -= max(1, change.blocks)
            self._piece.popleft()

    def _take_log(self, taken: list[Change], most_blocks: int) -> int:
        """Add to *taken* from the log; how many blocks."""
        feed, blocks = self._feed, 0
        while self._next < feed.end:
            change = feed.change(self._next)
            if self._is_for_me(change, self._next) and not self._will_be_told(change):
                if taken and blocks + change.blocks > most_blocks:
                    break
                taken.append(change)
                blocks += max(1, change.blocks)
            self._next += 1
        return blocks

    def _next_piece(self) -> bool:
        """Whether there is something in ``_piece``, now or by looking for it."""
        while not self._piece and self._untold and self._next == self._feed.end:
            if self._pieces is None:
                self._pieces = self._feed.index.ids(self._untold[0])
            ids = next(self._pieces, None)
            if ids is None:
                self._untold.popleft()
                self._pieces = None
            else:
                self._piece.extend(_there(self._feed.index, ids))
        return bool(self._piece)

    def _will_be_told(self, change: Change) -> bool:
        """Whether *change* is of the log and a piece of what is there will say the same."""
        has_begun = self._pieces is not None and change.namespace == self._untold[0]
        return change.kind == "stored" and change.namespace in self._untold and not has_begun

    def _is_for_me(self, change: Change, number: int) -> bool:
        if self.namespace is not None:
            return change.namespace == self.namespace
        # Nobody can load what no engine has registered, such as blocks of an earlier life. What
        # there was when one did is told then.
        named = None if change.namespace is None else self._feed.names.get(change.namespace)
        return named is not None and number >= named.since


def _there(index: PrefixIndex, ids: BlockIds) -> Iterator[Change]:
    """*ids* in each tier that has them."""
    where = index.where.take(ids)
    for bit, tier in _TIERS:
        yield from _stored(index, ids[(where & bit) != 0], tier)


def _stored(index: PrefixIndex, ids: BlockIds, tier: ChangedTier) -> list[Change]:
    changes = []
    for namespace, theirs in index.by_namespace(ids):
        keys = index.keys(theirs)
        parents = index.parent.take(theirs)
        ends = [*(np.flatnonzero(parents[1:] != theirs[:-1]) + 1).tolist(), len(theirs)]
        starts = [s for a, b in pairwise([0, *ends]) for s in range(a, b, CHANGE_BLOCKS)]
        above = index.parent_keys(theirs[starts])
        for (start, end), parent in zip(pairwise([*starts, len(theirs)]), above, strict=True):
            before = parent[NAMESPACE_ID_BYTES:] if parent is not None else None
            changes.append(Change("stored", namespace, tier, keys[start:end].tobytes(), before))
    return changes


def _removed(index: PrefixIndex, ids: BlockIds, tier: ChangedTier) -> list[Change]:
    return [
        Change("removed", namespace, tier, keys[start : start + CHANGE_BLOCKS].tobytes())
        for namespace, theirs in index.by_namespace(ids)
        for keys in (index.keys(theirs),)
        for start in range(0, len(theirs), CHANGE_BLOCKS)
    ]

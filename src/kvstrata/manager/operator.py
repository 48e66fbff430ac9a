"""What people who run the cache ask of it, and no engine does."""

from collections.abc import Callable, Mapping
from typing import Final, Literal

from kvstrata.core.keys import KeyArray, Keys, as_key_array
from kvstrata.core.types import BlockKey, NamespaceId
from kvstrata.index.places import HOST, LOCAL
from kvstrata.manager.cascade import Cascade
from kvstrata.manager.clearing import Clearing
from kvstrata.manager.desk import Desk
from kvstrata.manager.prompts import hottest, path_to
from kvstrata.manager.puts import Puts
from kvstrata.manager.report import ClearReport, RunReport
from kvstrata.manager.residency import Residency, leading
from kvstrata.manager.writes import LowerTier

__all__ = ["DrainState", "Operator"]

_MOST_PROMPT_BLOCKS: Final = 65_536

DrainState = Literal["off", "draining", "drained"]


class Operator:
    """Takes the manager's lock itself. ``clear`` and ``drain`` may take long, the others do not."""

    def __init__(
        self,
        cache: Residency,
        lower: Mapping[LowerTier, Cascade],
        desk: Desk,
        puts: Puts,
        forget: Callable[[NamespaceId], int],
    ) -> None:
        """*forget* makes every block of a namespace unknown at once, in all tiers."""
        self._cache = cache
        self._lower = lower
        self._desk = desk
        self._puts = puts
        self._clearing = Clearing(cache, lower, desk, forget)
        self.is_draining = False

    def clear(
        self, namespace: NamespaceId | None, tier: str | None, *, dry_run: bool = False
    ) -> ClearReport:
        """Give up the blocks of *namespace* in *tier*; None stands for all. What went, or would.

        In one tier, blocks that somebody reads or writes at this moment stay, pinned ones too. In
        all tiers nothing is found any more, at once, and pins end; the same keys can be saved anew.
        A tier that nodes share loses the blocks for all of them. A tier that there is not is a
        ``ConfigError``. On ``TierUnavailable`` nothing is found either, but could be after a restart.
        """
        return self._clearing.clear(namespace, tier, dry_run=dry_run)

    def drain(self, wanted: bool) -> None:
        """Refuse saves, and write what no tier below has; or accept them again.

        ``stats`` tells how far it is. What is there can be loaded all the while.
        """
        self.is_draining = wanted
        if not wanted:
            return
        pieces = self._cache.index.ids()
        while True:
            with self._desk.lock:
                ids = next(pieces, None)
                if ids is None:
                    break
                self._cache.writes.leaving(ids[self._cache.has(ids, HOST)])
        for lower in self._lower.values():
            lower.wake()

    def drain_state(self) -> DrainState:
        """``drained``: whoever stops the server now loses nothing that a tier below could keep.

        Nor will the next one find a namespace that this one was told to forget. Needs the lock.
        """
        if not self.is_draining:
            return "off"
        is_done = all(lower.is_done() for lower in self._lower.values())
        return "drained" if is_done and not self._puts.tasks else "draining"

    def locate(self, namespace: NamespaceId, keys: Keys) -> tuple[int, int]:
        """How many of the leading *keys* are in host memory, and how many there or on disk.

        Changes nothing.
        """
        with self._desk.lock:
            ids = self._cache.index.longest_prefix(namespace, as_key_array(keys))
            return leading(self._cache.has(ids, HOST)), leading(self._cache.has(ids, LOCAL))

    def prompt(self, namespace: NamespaceId, last: BlockKey) -> KeyArray:
        """The keys of the prompt that *last* is the last block of; none if it is unknown.

        Of a prompt of more than 65,536 blocks only the last ones.
        """
        with self._desk.lock:
            index = self._cache.index
            return index.keys(path_to(index, namespace, last, _MOST_PROMPT_BLOCKS))

    def hottest(self, runs: int) -> list[RunReport]:
        """The *runs* of blocks that the latest lookups found most often: see ``prompts.hottest``."""
        with self._desk.lock:
            return hottest(self._cache.index, self._desk.decisions.all(), runs)

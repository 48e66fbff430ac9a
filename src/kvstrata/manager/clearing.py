"""Empties tiers at an operator's word."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from kvstrata.core.errors import ConfigError, TierUnavailable
from kvstrata.core.keys import BlockIds
from kvstrata.core.types import NamespaceId, StoreKey
from kvstrata.index.places import ARRIVING, DISK, HOST, REMOTE, WRITING
from kvstrata.manager.cascade import Cascade
from kvstrata.manager.desk import Desk
from kvstrata.manager.report import ClearReport
from kvstrata.manager.residency import Bools, Residency
from kvstrata.manager.writes import LowerTier

__all__ = ["Clearing"]

_BITS: Final = {"host": HOST, "disk": DISK, "remote": REMOTE}
_MOVING: Final = ARRIVING | WRITING
_PIECE_BLOCKS: Final = 4096  # looked at with the lock held


class Clearing:
    """Looks at the index a piece at a time and lets go of the lock in between; may wait for disks."""

    def __init__(
        self,
        cache: Residency,
        lower: Mapping[LowerTier, Cascade],
        desk: Desk,
        forget: Callable[[NamespaceId], int],
    ) -> None:
        """*forget* makes every block of a namespace unknown at once, in all tiers."""
        self._cache = cache
        self._lower = lower
        self._lock = desk.lock
        self._forget = forget

    def clear(
        self, namespace: NamespaceId | None, tier: str | None, *, dry_run: bool
    ) -> ClearReport:
        """``KVManager.clear``."""
        tiers: list[str] = ["host", *self._lower]
        if tier is not None and tier not in tiers:
            raise ConfigError(
                f"this server has no tier {tier!r}", hint=f"it has {', '.join(tiers)}"
            )
        with self._lock:
            owed = {each for lower in self._lower.values() for each in lower.owed_drops}
            known = list(owed.union(self._cache.index.namespaces))
        namespaces = known if namespace is None else [namespace]
        report = ClearReport(dict.fromkeys([tier] if tier else tiers, 0))
        refused: TierUnavailable | None = None
        for each in namespaces:
            try:
                self._clear(each, tier, report, dry_run=dry_run)
            except TierUnavailable as e:  # the other namespaces need not suffer for it
                refused = e
        if refused is None or not (owing := self._owing(namespaces, tier)):
            return report
        raise TierUnavailable(
            f"{refused.args[0]}; {_what_is_done(report, owing)}",
            hint=refused.hint,
            cause=refused.cause,
        ) from refused

    def _owing(self, namespaces: Sequence[NamespaceId], tier: str | None) -> list[str]:
        """The tiers that did not answer; none if they have done so meanwhile."""
        with self._lock:
            return [
                name
                for name, lower in self._lower.items()
                if tier in {None, name}
                and (any(map(lower.owes_drop, namespaces)) or lower.owes_removals)
            ]

    def _clear(
        self, namespace: NamespaceId, tier: str | None, report: ClearReport, *, dry_run: bool
    ) -> None:
        if tier is None:
            for ids in self._pieces(namespace):
                self._count(ids, report, list(report.blocks))
            if not dry_run:
                self._forget(namespace)
        elif dry_run:
            for ids in self._pieces(namespace):
                self._count(self._idle(ids, tier, report), report, [tier])
        elif tier == "host":
            for ids in self._pieces(namespace):
                idle = self._idle(ids, tier, report)
                self._count(idle, report, [tier])
                self._cache.drop_from_host(idle)
        elif tier == "disk":
            self._clear_disk(namespace, report)
        else:
            self._clear_remote(namespace, report)

    def _clear_remote(self, namespace: NamespaceId, report: ClearReport) -> None:
        """The tier forgets the namespace, with what is read from it at this moment."""
        for ids in self._pieces(namespace):
            self._count(ids, report, ["remote"])
            known = ids[self._cache.has(ids, REMOTE)]
            self._cache.index.clear_where(known, REMOTE)
            self._cache.index.settle(known)
        with self._lock:
            self._lower["remote"].owe_drop(namespace)
        self._lower["remote"].pay_drops()

    def _clear_disk(self, namespace: NamespaceId, report: ClearReport) -> None:
        pieces = self._unlocked_pieces(namespace)

        def leave() -> list[StoreKey] | None:
            ids = next(pieces, None)
            if ids is None:
                return None
            idle = self._idle(ids, "disk", report)
            self._count(idle, report, ["disk"])
            keys: list[StoreKey] = self._cache.index.store_keys(idle)
            self._cache.drop_from_disk(idle)
            return keys

        self._lower["disk"].remove_all(leave)

    def _pieces(self, namespace: NamespaceId) -> Iterator[BlockIds]:
        """The blocks of *namespace*; the lock is held while one piece is used."""
        pieces = self._unlocked_pieces(namespace)
        while True:
            with self._lock:
                ids = next(pieces, None)
                if ids is None:
                    return
                yield ids

    def _unlocked_pieces(self, namespace: NamespaceId) -> Iterator[BlockIds]:
        """The same; each ``next`` needs the lock."""
        index = self._cache.index
        for piece in index.ids(namespace):
            for start in range(0, len(piece), _PIECE_BLOCKS):
                ids = piece[start : start + _PIECE_BLOCKS]
                yield ids[index.are_of(ids, namespace)]  # some may be others' by now

    def _idle(self, ids: BlockIds, tier: str, report: ClearReport) -> BlockIds:
        """Those of *ids* that are in *tier*, and that nobody uses at this moment."""
        here = ids[self._cache.has(ids, _BITS[tier])]
        busy: Bools = self._cache.has(here, _MOVING) | (self._cache.index.leases[here] > 0)
        report.in_use_blocks += int(np.count_nonzero(busy))
        return here[~busy]

    def _count(self, ids: BlockIds, report: ClearReport, tiers: Sequence[str]) -> None:
        bits = 0
        for tier in tiers:
            report.blocks[tier] += int(np.count_nonzero(self._cache.has(ids, _BITS[tier])))
            bits |= _BITS[tier]
        others = (HOST | DISK | REMOTE) & ~bits
        lost = self._cache.has(ids, bits) & ~self._cache.has(ids, others)
        report.lost_blocks += int(np.count_nonzero(lost))


def _what_is_done(report: ClearReport, owing: Sequence[str]) -> str:
    done = {tier: blocks for tier, blocks in report.blocks.items() if tier not in owing}
    cleared = ", ".join(f"{blocks:,} blocks of {tier}" for tier, blocks in done.items())
    later = [
        f"{tier} is cleared as soon as it answers: what was to go is not found any more, but a "
        "restart before that can find it again"
        for tier in owing
    ]
    return "; ".join([f"cleared: {cleared}", *later] if done else later)

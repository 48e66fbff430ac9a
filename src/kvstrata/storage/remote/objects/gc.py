"""Deletes blocks from an object store by age, or the oldest beyond a size.

Any number of nodes may read and write meanwhile, and other collections run. An object is looked at
again right before it is deleted, and stays if it has been written since it was listed; what is
deleted in the moment between is a block less, never a wrong byte: its reader has a miss.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import NAMESPACE_ID_BYTES, NamespaceId, Write
from kvstrata.storage.remote.objects.access import ObjectAccess, Place
from kvstrata.storage.remote.objects.snapshot import Snapshot, seed_of
from kvstrata.storage.remote.objects.store import open_library
from kvstrata.storage.remote.objects.values import Deadline, Found, Given, Names

__all__ = ["SPARED_SECONDS", "GcReport", "GcRule", "collect"]

SPARED_SECONDS: Final = 3600.0
_REQUEST_SECONDS: Final = 10.0
_RETRIES: Final = 4
_STEP_SECONDS: Final = 60.0  # with all retries: a page of a listing, or what is deleted together
_TOGETHER: Final = 100  # objects between whose last look and deletion only moments pass
_BUCKET_SECONDS: Final = 600.0  # of the ages that are told apart: 53,000 in a year
_CLOCK_SECONDS: Final = 1.0  # listings and objects give the same time to the second


@dataclass(frozen=True, slots=True, kw_only=True)
class GcRule:
    """Which blocks are to go."""

    older_than_seconds: float | None = None  # whatever else
    keep_bytes: int | None = None  # then the oldest, until no more than this is left
    spared_seconds: float = SPARED_SECONDS  # *keep_bytes* takes none that is younger
    namespace: NamespaceId | None = None  # nothing outside it is looked at, or counted
    snapshot: bool = False  # write what is left of each namespace, for nodes that trust it
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GcReport:
    """What a collection has found and done; with ``dry_run``, what it would have done."""

    blocks: int = 0  # found
    found_bytes: int = 0
    old_blocks: int = 0  # deleted for their age
    old_bytes: int = 0
    excess_blocks: int = 0  # deleted to keep to the size
    excess_bytes: int = 0
    renewed_blocks: int = 0  # were to be deleted, and have been written anew meanwhile
    other_objects: int = 0  # not ours by their names: not touched
    snapshots: int = 0  # written

    @property
    def left_bytes(self) -> int:
        return self.found_bytes - self.old_bytes - self.excess_bytes


def collect(
    url: str,
    rule: GcRule,
    *,
    access: ObjectAccess,
    progress: Callable[[GcReport], None] = lambda _: None,
) -> GcReport:
    """Delete the blocks below *url* that *rule* says.

    Memory does not grow with their number, but by 8 bytes a block for snapshots. Tells *progress*
    now and then. Raises ``ConfigError``, or ``TierUnavailable`` if the engine
    cannot be reached for long: what is deleted by then stays deleted, and another run does the
    rest.
    """
    return _Collection(url, rule, access, progress).run()


class _Collection:
    def __init__(
        self,
        url: str,
        rule: GcRule,
        access: ObjectAccess,
        progress: Callable[[GcReport], None],
    ) -> None:
        self._place = Place.of_url(url)
        self._names = Names(self._place.prefix)
        self._rule = rule
        self._progress = progress
        self._library = open_library(
            self._place,
            access,
            block_bytes=1,  # none is read
            timeout_seconds=_REQUEST_SECONDS,
            retries=_RETRIES,
        )
        self._now_seconds = time.time()
        self._excess: Counter[int] = Counter()  # bytes to be deleted, by age
        self._left: dict[NamespaceId, bytearray] = {}  # seeds of the blocks of each
        self._done = GcReport()

    def run(self) -> GcReport:
        from kvstrata.storage.remote.objects.faults import FAULTS, as_unavailable

        try:
            if self._rule.keep_bytes is not None:
                self._excess = self._find_excess(self._rule.keep_bytes)
            for page in self._pages():
                self._collect(page)
                self._progress(self._done)
            if self._rule.snapshot and not self._rule.dry_run:
                self._write_snapshots()
        except TierUnavailable:
            raise
        except FAULTS as e:
            raise as_unavailable(f"object store {self._place}", "cleaned up", e) from None
        finally:
            self._library.close()
        return self._done

    def _pages(self) -> Iterator[Sequence[Found]]:
        namespace = self._rule.namespace
        below = self._place.prefix if namespace is None else self._names.namespace(namespace)
        return self._library.pages(below, _STEP_SECONDS)

    def _find_excess(self, keep_bytes: int) -> Counter[int]:
        """Bytes to be deleted of each age so that *keep_bytes* are left, from the oldest on."""
        kept: Counter[int] = Counter()  # by age, without what is old enough to go in any case
        spared_bytes = 0
        for page in self._pages():
            for found in page:
                if not self._names.is_block(found.name) or self._is_old(found):
                    continue
                if self._age_seconds(found) < self._rule.spared_seconds:
                    spared_bytes += found.stored_bytes
                else:
                    kept[self._age_bucket(found)] += found.stored_bytes
        excess_bytes = spared_bytes + kept.total() - keep_bytes
        excess: Counter[int] = Counter()
        for bucket in sorted(kept, reverse=True):
            if excess_bytes <= 0:
                break
            excess[bucket] = min(excess_bytes, kept[bucket])
            excess_bytes -= kept[bucket]
        return excess

    def _collect(self, page: Sequence[Found]) -> None:
        """Delete what is to go of *page*, and take down what is left."""
        old: list[Found] = []
        excess: list[Found] = []
        left: list[Found] = []
        for found in page:
            if self._names.is_snapshot(found.name):
                self._left.setdefault(self._names.namespace_of(found.name), bytearray())
            elif not self._names.is_block(found.name):
                self._count(other_objects=1)
            else:
                self._count(blocks=1, found_bytes=found.stored_bytes)
                is_excess = not self._is_old(found) and self._is_excess(found)
                fate = old if self._is_old(found) else excess if is_excess else left
                fate.append(found)
        for gone in self._delete_some(old, left):
            self._count(old_blocks=len(gone), old_bytes=sum(one.stored_bytes for one in gone))
        for gone in self._delete_some(excess, left):
            gone_bytes = sum(one.stored_bytes for one in gone)
            self._count(excess_blocks=len(gone), excess_bytes=gone_bytes)
        if self._rule.snapshot:
            for found in left:
                key = self._names.key_of(found.name)
                self._left.setdefault(key[:NAMESPACE_ID_BYTES], bytearray()).extend(seed_of(key))

    def _write_snapshots(self) -> None:
        """Write one for each namespace that has blocks, or has one already."""
        for namespace, seeds in self._left.items():
            header, value = Snapshot.of(self._now_seconds, seeds).to_object(namespace)
            name = self._names.snapshot(namespace)
            given = Given(name, header, memoryview(value), replaces=True)
            if self._library.write([given], Deadline(_STEP_SECONDS)) != [Write.STORED]:
                raise TierUnavailable(
                    f"{self._place} has no room for {name}",
                    hint="delete blocks with --older-than or --keep, or raise its quota",
                    cause="full",
                )
            self._count(snapshots=1)

    def _delete_some(self, found: list[Found], left: list[Found]) -> Iterator[Sequence[Found]]:
        """Yield those that were deleted, some at a time; the others go to *left*."""
        for start in range(0, len(found), _TOGETHER):
            some = found[start : start + _TOGETHER]
            deleted = self._delete(some)
            left += [one for one in some if one not in deleted]
            yield deleted

    def _delete(self, some: Sequence[Found]) -> Sequence[Found]:
        """Delete those that are as they were when they were listed, and return them."""
        if self._rule.dry_run:
            return some
        deadline = Deadline(_STEP_SECONDS)
        now = self._library.find([one.name for one in some], deadline)
        same = [
            before
            for before, after in zip(some, now, strict=True)
            if after is not None
            and after.modified_seconds <= before.modified_seconds + _CLOCK_SECONDS
        ]
        self._library.delete([one.name for one in same], deadline)
        there = sum(after is not None for after in now)
        self._count(renewed_blocks=there - len(same))
        return same

    def _is_old(self, found: Found) -> bool:
        limit = self._rule.older_than_seconds
        return limit is not None and self._age_seconds(found) > limit

    def _is_excess(self, found: Found) -> bool:
        """Whether *found* is one of those that exceed the size. Counts it as gone if so."""
        bucket = self._age_bucket(found)
        if self._age_seconds(found) < self._rule.spared_seconds or self._excess[bucket] <= 0:
            return False
        self._excess[bucket] -= found.stored_bytes
        return True

    def _age_seconds(self, found: Found) -> float:
        return self._now_seconds - found.modified_seconds

    def _age_bucket(self, found: Found) -> int:
        return int(self._age_seconds(found) // _BUCKET_SECONDS)

    def _count(self, **more: int) -> None:
        done = self._done
        self._done = replace(done, **{name: getattr(done, name) + n for name, n in more.items()})

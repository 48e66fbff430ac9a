"""A store on an object store: Amazon S3 and what is compatible with it, Google's, Azure's."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import compress, repeat
from typing import TYPE_CHECKING, Final

from kvstrata.core.errors import ConfigError, InvariantViolated, TierUnavailable
from kvstrata.core.types import NAMESPACE_ID_BYTES, NamespaceId, Read, StoreKey, Write
from kvstrata.storage.batch import check_keys, check_lengths
from kvstrata.storage.remote.ledger import Ledger
from kvstrata.storage.remote.objects.access import ObjectAccess, Place, open_client, signs_urls
from kvstrata.storage.remote.objects.snapshot import Snapshots
from kvstrata.storage.remote.objects.values import Deadline, Found, Given, Names, Wanted
from kvstrata.storage.remote.value import header_of
from kvstrata.storage.store import StoreStatistics

if TYPE_CHECKING:
    from kvstrata.storage.remote.objects.library import Library

__all__ = ["ObjectAccess", "ObjectStore"]

_log = logging.getLogger(__name__)

_DEFAULT_ACCESS: Final = ObjectAccess()


def open_library(
    place: Place,
    access: ObjectAccess,
    *,
    block_bytes: int,
    timeout_seconds: float,
    retries: int = 0,
) -> "Library":
    """The calls that suit *place*; with *retries* through obstore alone, which repeats them.

    Raises ``ConfigError``; no network I/O.
    """
    try:
        from kvstrata.storage.remote.objects.library import Library
        from kvstrata.storage.remote.objects.signed import SignedLibrary
    except ModuleNotFoundError as e:
        raise ConfigError(
            f"{place} needs the package {e.name}", hint="pip install 'kvstrata[objects]'"
        ) from e
    client = open_client(place, access, timeout_seconds, retries)
    kind = SignedLibrary if signs_urls(place, access) and not retries else Library
    return kind(client, place, block_bytes=block_bytes, parallel=access.parallel)


class ObjectStore:
    """A persistent, *variable* ``Store``: one object a block, shared by all who use the prefix.

    * Objects are named ``PREFIX/<namespace hex>/<block key hex>``, so that a block is found by its
      key alone, without a directory of what is where that every node would have to agree on.
    * Every read is proved by key, length and checksum. What fails is ``Read.CORRUPT``, counted,
      and removed unless it has been written anew meanwhile; what no store of ours has written is
      ``Read.FOREIGN`` and stays.
    * A block is written only if there is none, as far as the engine knows how to; where it does
      not, of two writers at the same moment the last wins. They write the same.
    * With *ttl_seconds* a block that was written longer ago is a miss, and is written anew.
    * With *snapshot_seconds* the snapshot of a namespace, up to that age, tells which blocks are not
      there; ``exists`` does not ask for those.
    * A whole call has *timeout_seconds*, but for ``drop_namespace``, of which each step has.
    """

    def __init__(
        self,
        url: str,
        *,
        block_bytes: int,
        ttl_seconds: float | None = None,
        snapshot_seconds: float | None = None,
        timeout_seconds: float = 2.0,
        access: ObjectAccess = _DEFAULT_ACCESS,
    ) -> None:
        """Raise ``ConfigError`` for what cannot be right anywhere; no network I/O.

        *url* is ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``.
        """
        place = Place.of_url(url)
        self._names = Names(place.prefix)
        self._block_bytes = block_bytes
        self._ttl_seconds = ttl_seconds
        self._timeout_seconds = timeout_seconds
        at = f" at {access.endpoint.partition('://')[2]}" if access.endpoint else ""
        self._ledger = Ledger(
            f"object store {place}{at}", block_bytes=block_bytes, search_width=access.parallel
        )
        self._library = open_library(
            place, access, block_bytes=block_bytes, timeout_seconds=timeout_seconds
        )
        self._snapshots = (
            Snapshots(self._library, self._names, trusted_seconds=snapshot_seconds)
            if snapshot_seconds is not None
            else None
        )

    def exists(self, keys: Sequence[StoreKey]) -> list[bool]:
        """Look at each object that may be there, side by side: one request a key, no listing."""
        check_keys(keys)
        with self._call("looked up") as deadline:
            names = [self._names.of(key) for key in keys]
            may = self._snapshots.may_have(keys) if self._snapshots else repeat(True)
            found = self._look(list(compress(names, may)), deadline)
            return [name in found and self._is_fresh(found[name]) for name in names]

    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        check_keys(keys)
        check_lengths(buffers, self._block_bytes, variable=True)
        with self._call("read") as deadline:
            fresh_since = self._fresh_since_seconds()
            wanted = [
                Wanted(self._names.of(key), key, buffer, fresh_since)
                for key, buffer in zip(keys, buffers, strict=True)
            ]
            self._library.read(wanted, deadline)
        self._remove_corrupt(wanted)
        return [one.fate for one in wanted]

    def write(
        self,
        keys: Sequence[StoreKey],
        parents: Sequence[StoreKey | None],
        buffers: Sequence[memoryview],
    ) -> list[Write]:
        check_keys(keys)
        check_lengths(buffers, self._block_bytes, variable=True)
        check_keys(parents)
        names = [self._names.of(key) for key in keys]
        with self._call("written") as deadline:
            known = self._look(names, deadline)
            given: dict[str, Given] = {}
            for name, key, parent, buffer in zip(names, keys, parents, buffers, strict=True):
                if name not in given and (name not in known or not self._is_fresh(known[name])):
                    header = header_of(key, parent, buffer)
                    given[name] = Given(name, header, buffer, replaces=name in known)
            fates = dict(
                zip(given, self._library.write(list(given.values()), deadline), strict=True)
            )
        self._ledger.wrote(sum(fate is Write.STORED for fate in fates.values()))
        if self._snapshots:
            self._snapshots.wrote(keys)
        return list(_in_turn(names, fates))

    def remove(self, keys: Sequence[StoreKey]) -> list[bool]:
        check_keys(keys)
        names = [self._names.of(key) for key in keys]
        with self._call("changed") as deadline:
            found = self._look(names, deadline)
            self._library.delete(list(found), deadline)
        self._ledger.removed(len(found))
        fresh = {name for name, one in found.items() if self._is_fresh(one)}
        return [_take(fresh, name) for name in names]

    def drop_namespace(self, namespace_id: NamespaceId) -> int:
        """Delete every object of *namespace_id* as the engine lists them, and return how many.

        A block that is being written meanwhile is deleted too, or comes after.
        """
        if len(namespace_id) != NAMESPACE_ID_BYTES:
            raise InvariantViolated(f"a namespace id of {len(namespace_id)} bytes")
        dropped = 0
        with self._call("changed"):
            for page in self._library.pages(
                self._names.namespace(namespace_id), self._timeout_seconds
            ):
                self._ledger.check_open()
                blocks = [found.name for found in page if self._names.is_block(found.name)]
                others = [found.name for found in page if self._names.is_snapshot(found.name)]
                self._library.delete(blocks + others, Deadline(self._timeout_seconds))
                dropped += len(blocks)
        self._ledger.removed(dropped)
        return dropped

    def statistics(self) -> StoreStatistics:
        return self._ledger.statistics()

    def close(self) -> None:
        """Refuse later calls; those of other threads end by their deadlines."""
        if self._ledger.close():
            self._library.close()

    def _look(self, names: Sequence[str], deadline: Deadline) -> dict[str, Found]:
        """What is there of *names*."""
        found = self._library.find(list(dict.fromkeys(names)), deadline)
        return {one.name: one for one in found if one is not None}

    def _is_fresh(self, found: Found) -> bool:
        return found.modified_seconds >= self._fresh_since_seconds()

    def _fresh_since_seconds(self) -> float:
        return 0.0 if self._ttl_seconds is None else time.time() - self._ttl_seconds

    def _remove_corrupt(self, wanted: Sequence[Wanted]) -> None:
        """Count what was found damaged, and remove it unless it has been written anew."""
        damaged = {one.name: one for one in wanted if one.fate is Read.CORRUPT}
        if not damaged:
            return
        self._ledger.found_corrupt(len(damaged))
        _log.warning("%s: damaged and removed: %s", self._ledger.name, ", ".join(damaged))
        try:
            with self._call("changed") as deadline:
                found = self._look(list(damaged), deadline)
                same = [name for name, one in found.items() if one.e_tag == damaged[name].e_tag]
                self._library.delete(same, deadline)
        except TierUnavailable as e:  # the next reader finds them again
            _log.warning("%s", e)

    @contextmanager
    def _call(self, done: str) -> Iterator[Deadline]:
        """One call: its deadline, and what goes wrong as ``TierUnavailable``."""
        from kvstrata.storage.remote.objects.faults import FAULTS, as_unavailable

        self._ledger.check_open()
        try:
            yield Deadline(self._timeout_seconds)
        except TierUnavailable:
            raise
        except FAULTS as e:
            # Without its cause: obstore's texts quote requests, and those have signatures.
            raise as_unavailable(self._ledger.name, done, e) from None


def _in_turn(names: Sequence[str], fates: dict[str, Write]) -> Iterator[Write]:
    """The fate of each write: of several under one name only the first has stored it."""
    for name in names:
        fate = fates.get(name, Write.EXISTS)
        if fate is Write.STORED:
            fates[name] = Write.EXISTS
        yield fate


def _take(names: set[str], name: str) -> bool:
    """Take *name* out; whether it was in."""
    was_in = name in names
    names.discard(name)
    return was_in

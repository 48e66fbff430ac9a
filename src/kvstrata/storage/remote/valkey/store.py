"""A store on Valkey or Redis: one server, the master that sentinels name, or a cluster.

A block is a string under ``prefix:namespace:key``, the latter two in hex. What the server's user
must be allowed: SET, GET (GETEX with a time to live), EXISTS, UNLINK, SCAN; SELECT for a database,
ROLE with sentinels, CLUSTER SLOTS and ASKING in a cluster, READONLY to read
from its replicas.
"""

import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

from kvstrata.core.errors import ConfigError, InvariantViolated, TierUnavailable
from kvstrata.core.types import NAMESPACE_ID_BYTES, NamespaceId, Read, StoreKey, Write
from kvstrata.storage.batch import check_keys, check_lengths
from kvstrata.storage.remote.ledger import Ledger
from kvstrata.storage.remote.valkey.address import ValkeyAccess, open_target
from kvstrata.storage.remote.valkey.batch import Question, ask_all
from kvstrata.storage.remote.valkey.questions import Fetch, Flag, Keep
from kvstrata.storage.remote.valkey.resp import NotRespError
from kvstrata.storage.remote.value import HEADER_BYTES
from kvstrata.storage.store import StoreStatistics

if TYPE_CHECKING:
    from kvstrata.storage.remote.valkey.links import Session

__all__ = ["ValkeyAccess", "ValkeyStore"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_DEFAULT_ACCESS: Final = ValkeyAccess()
_LONGEST_BYTES: Final = 512 << 20  # of a string, by the servers' default
_SEARCH_WIDTH: Final = 64  # keys asked for in about the time that the way there and back takes
_SCANNED: Final = 1000  # keys looked at by one SCAN
_KEY_HEX: Final = 64
_BLOCK: Final = re.compile(rb":[0-9a-f]{%d}\Z" % _KEY_HEX)  # what names of blocks end with
_SCANS: Final = 3  # of the whole server at most, for what moves while it is read


class ValkeyStore:
    """A *variable* ``Store`` on a Valkey or Redis, shared by all who have its address.

    * Every read is proved by key, length and checksum. What fails is ``Read.CORRUPT``, removed
      and counted; what no store of ours has written is ``Read.FOREIGN`` and stays. What the
      server has evicted, or what has outlived its time, is a miss.
    * Each call ends by *timeout_seconds*, however slowly bytes trickle and host names are found.
      ``drop_namespace`` ends each of its steps so.
    * A key is never written over: of two writers the first wins. No room is ``Write.FULL``.
    * What one server of a cluster fails to do costs its blocks alone: nobody knows whether they
      are there, they are ``Read.FAILED`` and ``Write.FAILED``, while the others are served. Only ``remove`` and
      ``drop_namespace`` need all servers that they are about.
    * With *replicas* some reads go to servers that follow, and what has not come there yet is a
      miss.
    * Whether blocks outlive the server is the server's matter, and so is eviction.
    * Connections are made when they are needed: as many as threads call, to each server that is
      asked. After a fault the next call connects anew, and asks anew who the master is.
    """

    def __init__(
        self,
        url: str,
        *,
        block_bytes: int,
        ttl_seconds: float | None = None,
        timeout_seconds: float = 2.0,
        access: ValkeyAccess = _DEFAULT_ACCESS,
    ) -> None:
        """No I/O on the network: only a wrong setting or a missing package is a ``ConfigError``.

        *url*: ``valkey://user:password@host:port/database``; ``valkeys://`` and ``rediss://`` with
        TLS; ``unix:///path?db=0``; several hosts for a cluster or for sentinels. With
        *ttl_seconds* a block goes when it was neither written nor read for so long.
        """
        if not 1 <= block_bytes <= _LONGEST_BYTES - HEADER_BYTES:
            raise ConfigError(
                f"blocks of {block_bytes} bytes in a valkey tier",
                hint=f"a value there has at most {_LONGEST_BYTES - HEADER_BYTES} bytes",
            )
        if timeout_seconds <= 0 or (ttl_seconds is not None and ttl_seconds < 0.001):
            raise ConfigError(
                f"a valkey tier with a timeout of {timeout_seconds} s and a time to live of "
                f"{ttl_seconds} s",
                hint="both must be positive; leave the time to live out for none",
            )
        if access.replicas and ttl_seconds is not None:
            raise ConfigError(
                "reads from replicas of a valkey tier with a time to live",
                hint="a read renews the time, which no replica can: take one of the two away",
            )
        target = open_target(url, access)
        try:
            from kvstrata.storage.remote.valkey.routes import open_routes
        except ModuleNotFoundError as e:
            raise ConfigError(
                f"a valkey tier needs the package {e.name}",
                hint="pip install 'kvstrata[valkey]'",
            ) from e
        self._links, self._routes = open_routes(target)
        self._ledger = Ledger(target.name, block_bytes=block_bytes, search_width=_SEARCH_WIDTH)
        self._block_bytes = block_bytes
        self._ttl = None if ttl_seconds is None else round(ttl_seconds * 1000)
        self._timeout_seconds = timeout_seconds
        self._prefix = access.prefix.encode()

    def exists(self, keys: Sequence[StoreKey]) -> list[bool | None]:
        check_keys(keys)
        with self._call() as session:
            names = [self._name(key) for key in keys]
            return self._ask(session, names, Flag(b"EXISTS", names, may_lag=True))

    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        check_keys(keys)
        check_lengths(buffers, self._block_bytes, variable=True)
        views = [_bytes(buffer) for buffer in buffers]
        names = [self._name(key) for key in keys]
        question = Fetch(names, keys, views, self._block_bytes, self._ttl)
        with self._call() as session:
            found = self._ask(session, names, question)
        fates = [Read.FAILED if fate is None else fate for fate in found]
        self._remove_corrupt(
            {name for name, fate in zip(names, fates, strict=True) if fate is Read.CORRUPT}
        )
        return fates

    def write(
        self,
        keys: Sequence[StoreKey],
        parents: Sequence[StoreKey | None],
        buffers: Sequence[memoryview],
    ) -> list[Write]:
        check_keys(keys)
        check_lengths(buffers, self._block_bytes, variable=True)
        check_keys(parents)
        names = [self._name(key) for key in keys]
        values = list(zip(keys, parents, [_bytes(buffer) for buffer in buffers], strict=True))
        fates = [Write.EXISTS] * len(names)
        with self._call() as session:
            there = self._ask(session, names, Flag(b"EXISTS", names))
            missing = [position for position, known in enumerate(there) if not known]
            asked = [position for position in missing if there[position] is not None]
            new = [names[position] for position in asked]
            question = Keep(new, [values[each] for each in asked], self._block_bytes, self._ttl)
            kept = dict(zip(asked, self._ask(session, new, question), strict=True))
        for position in missing:
            fates[position] = kept.get(position) or Write.FAILED
        self._ledger.wrote(fates.count(Write.STORED))
        return fates

    def remove(self, keys: Sequence[StoreKey]) -> list[bool]:
        check_keys(keys)
        with self._call() as session:
            return self._unlink(session, [self._name(key) for key in keys])

    def drop_namespace(self, namespace_id: NamespaceId) -> int:
        """Forget every block of *namespace_id*; how many this call has deleted.

        Looks at every key that the servers hold. What is written meanwhile may stay, and what
        moves within a cluster meanwhile is looked for once more.
        """
        if len(namespace_id) != NAMESPACE_ID_BYTES:
            raise InvariantViolated(f"a namespace id of {len(namespace_id)} bytes")
        # As long as the name of a block: a pattern has no repetition.
        pattern = b"%b:%b:%b" % (self._prefix, namespace_id.hex().encode(), b"?" * _KEY_HEX)
        deleted = 0
        for _ in range(_SCANS):
            found = self._drop(pattern)
            deleted += found
            if not found:
                break
        return deleted

    def statistics(self) -> StoreStatistics:
        """As this store has seen it; no I/O."""
        return self._ledger.statistics()

    def close(self) -> None:
        """Close the connections; calls of other threads end."""
        if self._ledger.close():
            self._links.close()

    def _drop(self, pattern: bytes) -> int:
        deleted = 0
        with self._call() as session:
            masters = self._routes.masters(session)
        for master in masters:
            cursor = b"0"
            while True:
                with self._call() as session:
                    answer = session.link(master).command(
                        "SCAN", cursor, "MATCH", pattern, "COUNT", _SCANNED, "TYPE", "string"
                    )
                    match answer:
                        case [bytes() as cursor, list() as names]:
                            ours = [name for name in names if _BLOCK.search(name)]
                            deleted += sum(self._unlink(session, ours))
                        case _:
                            raise NotRespError(f"a scan that gives {type(answer)}")
                if cursor == b"0":
                    break
        return deleted

    def _ask(
        self, session: "Session", names: Sequence[bytes], question: Question[T]
    ) -> list[T | None]:
        """The answers; ``None``, and counted, for what a server of a cluster has failed to do."""
        asked = ask_all(session, self._routes, names, question)
        for fault in asked.faults.values():
            self._ledger.failed(self._links.fault_of(fault).cause)
        return asked.answers

    def _unlink(self, session: "Session", names: Sequence[bytes]) -> list[bool]:
        asked = ask_all(session, self._routes, names, Flag(b"UNLINK", names))
        self._ledger.removed(asked.answers.count(True))
        for fault in asked.faults.values():
            raise fault
        return [removed is True for removed in asked.answers]

    def _remove_corrupt(self, names: set[bytes]) -> None:
        if not names:
            return
        self._ledger.found_corrupt(len(names))
        _log.warning("%s: %d blocks are damaged", self._ledger.name, len(names))
        with suppress(TierUnavailable), self._call() as session:  # or else found damaged again
            self._unlink(session, sorted(names))

    def _name(self, key: StoreKey) -> bytes:
        return b"%b:%b:%b" % (
            self._prefix,
            key[:NAMESPACE_ID_BYTES].hex().encode(),
            key[NAMESPACE_ID_BYTES:].hex().encode(),
        )

    def _call(self) -> "Session":
        self._ledger.check_open()
        return self._links.session(self._timeout_seconds)


def _bytes(buffer: memoryview) -> memoryview:
    return buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")

"""Blocks in a Mooncake Store pool: memory of many nodes behind one master.

The library's batch calls move bytes between the pool and the slots of the host tier, past this
process: it runs in another one (``mooncake_agent``), which has the host tier mapped, and which can
be ended if a call takes too long.

**Mooncake has neither authentication nor encryption**, and its ports listen on all addresses.
Whoever reaches them can read, alter and remove what is in the pool. The headers of blocks catch
accidents, not attackers: keep the master and the nodes in a network of their own.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.types import NAMESPACE_ID_BYTES, NamespaceId, Read, StoreKey, Write
from kvstrata.storage.batch import check_keys, check_lengths
from kvstrata.storage.call_time import end_within
from kvstrata.storage.mapping import HostMapping
from kvstrata.storage.remote.ledger import Ledger
from kvstrata.storage.remote.mooncake.calls import Calls
from kvstrata.storage.remote.mooncake.codes import NOT_FOUND, has_failed
from kvstrata.storage.remote.mooncake.library import MooncakeLibrary
from kvstrata.storage.remote.mooncake.node import (
    MasterAddress,
    MooncakeNode,
    check_devices,
    orders_of,
    stalled_seconds,
)
from kvstrata.storage.remote.mooncake.rounds import Place, rounds
from kvstrata.storage.remote.mooncake.segment import PoolSegment
from kvstrata.storage.remote.value import HEADER_BYTES, header_of, judge_header, judge_value
from kvstrata.storage.store import MOST_CALLS, StoreStatistics

__all__ = ["MooncakeNode", "MooncakeStore"]

_DEFAULT_NODE: Final = MooncakeNode()
_LOOKS: Final = 3  # at a block that seems damaged: its memory may just have got another one
_ALMOST: Final = 0.9  # the library's clock is not ours
_NOT_THERE: Final = frozenset({Write.FULL, Write.FAILED})


class MooncakeStore:
    """A variable store in a Mooncake pool. Mooncake makes room itself: blocks may leave any time."""

    def __init__(
        self,
        url: str,
        *,
        block_bytes: int,
        timeout_seconds: float = 2.0,
        memory: HostMapping | None = None,
        node: MooncakeNode = _DEFAULT_NODE,
    ) -> None:
        """*url*: ``mooncake://HOST:PORT`` of the master. *memory*: the host tier; blocks in its
        slots are not copied here.

        No word goes to the network before the first call, but for a segment of this node, which
        joins the pool by itself. Raises ``ConfigError`` for a wrong URL, and if the library is
        not installed. *timeout_seconds* below 2 leave the library no time to give a node up by
        itself: its process is then ended instead.
        """
        address = MasterAddress.parse(url)
        self._ledger = Ledger(f"mooncake://{address}", block_bytes=block_bytes)
        self._timeout_seconds = timeout_seconds
        self._prefix = node.prefix
        self._silence_seconds = _ALMOST * stalled_seconds(timeout_seconds)
        check_devices(node, self._ledger.name)
        orders = orders_of(address, node, timeout_seconds)
        self._library = MooncakeLibrary(
            self._ledger.name,
            orders,
            room_bytes=max(block_bytes, node.buffer_bytes // MOST_CALLS),
            memory=memory,
        )
        self._segment = None
        if node.segment_bytes:
            given = msgspec.structs.replace(orders, segment_bytes=node.segment_bytes)
            self._segment = PoolSegment(self._ledger.name, given)

    def exists(self, keys: Sequence[StoreKey]) -> list[bool | None]:
        """See ``Store``. Blocks of a node that died are there until the master misses the node."""
        check_keys(keys)
        with self._calls() as calls:
            return calls.exist(keys)

    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        """See ``Store``. Blocks of nodes that do not answer are ``FAILED``."""
        check_keys(keys)
        check_lengths(buffers, self._ledger.block_bytes, variable=True)
        fates = dict.fromkeys(range(len(keys)), Read.CORRUPT)
        with self._calls() as calls:
            for _ in range(_LOOKS):
                doubtful = _damaged(fates)
                for places in rounds(self._library, calls.lane, keys, buffers, doubtful):
                    fates.update(_read(calls, places, keys, buffers))
            if fates and set(fates.values()) == {Read.FAILED}:
                raise calls.fault()
            damaged = dict.fromkeys(keys[index] for index in _damaged(fates))
            if damaged:
                self._ledger.found_corrupt(len(damaged))
                self._ledger.removed(len(calls.remove(list(damaged))))
            self._count_failed(calls)
        return list(fates.values())

    def write(
        self,
        keys: Sequence[StoreKey],
        parents: Sequence[StoreKey | None],
        buffers: Sequence[memoryview],
    ) -> list[Write]:
        """See ``Store``. Blocks whose node does not answer are ``FAILED``. ``FULL`` is also a block
        that another writer has begun to write and not ended: it is not there.
        """
        check_keys(keys)
        check_keys(parents)
        check_lengths(buffers, self._ledger.block_bytes, variable=True)
        fates = [Write.EXISTS] * len(keys)
        with self._calls() as calls:
            there = calls.exist(keys)
            first = {key: index for index, key in reversed(list(enumerate(keys)))}
            missing = sorted(index for index in first.values() if not there[index])
            for places in rounds(self._library, calls.lane, keys, buffers, missing):
                for number, (block, _, room) in enumerate(places):
                    header = header_of(keys[block], parents[block], buffers[block])
                    calls.lane.headers[number][:] = header
                    if room is not None:
                        room[:] = buffers[block].cast("B")
                codes = calls.put([keys[place.block] for place in places], places)
                for place, code in zip(places, codes, strict=True):
                    fates[place.block] = _written(code)
            if missing and calls.failures == len(missing):
                raise calls.fault()
            self._count_failed(calls)
        self._ledger.wrote(fates.count(Write.STORED))
        return [
            fates[first[key]] if fates[first[key]] in _NOT_THERE else fate
            for key, fate in zip(keys, fates, strict=True)
        ]

    def remove(self, keys: Sequence[StoreKey]) -> list[bool]:
        """See ``Store``. A block that is just being written is not there yet."""
        check_keys(keys)
        with self._calls() as calls:
            gone = calls.remove(list(dict.fromkeys(keys)))
        self._ledger.removed(len(gone))
        return [_take(gone, key) for key in keys]

    def drop_namespace(self, namespace_id: NamespaceId) -> int:
        """See ``Store``. One call, for which the master looks at every key it has.

        If it needs longer than ``timeout_seconds``, ``TierUnavailable`` is raised and the master
        goes on: to call again tells whether anything is left.
        """
        if len(namespace_id) != NAMESPACE_ID_BYTES:
            raise InvariantViolated(
                f"a namespace of {len(namespace_id)} bytes, expected {NAMESPACE_ID_BYTES}"
            )
        with self._calls() as calls:
            dropped = calls.drop(namespace_id)
        self._ledger.removed(dropped)
        return dropped

    def statistics(self) -> StoreStatistics:
        return self._ledger.statistics()

    def close(self) -> None:
        """See ``Store``. A segment of this node leaves the pool, with the blocks in it."""
        if self._ledger.close():
            self._library.close()
            if self._segment is not None:
                self._segment.close()

    def _count_failed(self, calls: Calls) -> None:
        for cause in calls.causes():
            self._ledger.failed(cause)

    @contextmanager
    def _calls(self) -> Iterator[Calls]:
        """For one call of the store, whose time begins now."""
        self._ledger.check_open()
        if self._segment is not None:
            self._segment.keep()
        deadline = end_within(self._timeout_seconds)
        with self._library.lane(deadline) as lane:
            yield Calls(lane, deadline, prefix=self._prefix, silence_seconds=self._silence_seconds)


def _read(
    calls: Calls,
    places: Sequence[Place],
    keys: Sequence[StoreKey],
    buffers: Sequence[memoryview],
) -> Iterator[tuple[int, Read]]:
    """Read what belongs to *places*; the fate of each, by its index in the batch."""
    codes = calls.get([keys[place.block] for place in places], places)
    for number, (place, stored_bytes) in enumerate(zip(places, codes, strict=True)):
        wanted, buffer = keys[place.block], buffers[place.block].cast("B")
        if stored_bytes < 0:
            yield place.block, Read.MISS if stored_bytes in NOT_FOUND else Read.FAILED
            continue
        header = calls.lane.headers[number]
        fate = judge_header(header[:stored_bytes], wanted, stored_bytes, buffer.nbytes)
        if fate is Read.HIT:
            value = buffer[: stored_bytes - HEADER_BYTES]
            if place.room is not None:
                value[:] = place.room[: value.nbytes]
            fate = judge_value(header, value)
        yield place.block, fate


def _written(code: int) -> Write:
    if not code:
        return Write.STORED
    return Write.FAILED if has_failed(code) else Write.FULL


def _damaged(fates: Mapping[int, Read]) -> list[int]:
    return [index for index, fate in fates.items() if fate is Read.CORRUPT]


def _take(keys: set[StoreKey], wanted: StoreKey) -> bool:
    """Whether *wanted* is in *keys*, which it no longer is then."""
    if wanted in keys:
        keys.remove(wanted)
        return True
    return False

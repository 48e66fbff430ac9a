"""KV events as vLLM 0.32 publishes them: the same messages, without vLLM.

``vllm.distributed.kv_events`` reads what is encoded here, and tests hold the two side by side.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from kvstrata.core.types import BLOCK_KEY_BYTES
from kvstrata.observe.block_changes import Change, keys_of

__all__ = [
    "PLACES",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "KVEventBatch",
    "Place",
    "event_of",
]

EventHash = int | bytes
"""The last 64 bits of a key, or all of it."""


class Place(NamedTuple):
    """How an event names a tier."""

    medium: str
    locality: str | None = None
    ownership: str | None = None


PLACES: Final[Mapping[str, Place]] = {
    "host": Place("CPU"),
    "disk": Place("STORAGE", "LOCAL", "disk"),
    "remote": Place("STORAGE", "REMOTE", "remote"),
}
"""The words for tiers: those of vLLM's tiered offloading."""


class _Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(_Event, omit_defaults=True, gc=False, tag=True):
    """Blocks that follow each other in a prompt can be had from *medium*."""

    block_hashes: list[EventHash]
    parent_block_hash: EventHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(_Event, omit_defaults=True, gc=False, tag=True):
    """Blocks cannot be had from *medium* any more."""

    block_hashes: list[EventHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(_Event, omit_defaults=True, gc=False, tag=True):
    """Whatever was published before is void."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What is in one message."""

    ts: float  # seconds since the epoch
    events: list[Event]
    data_parallel_rank: int | None = None


def event_of(change: Change, *, as_numbers: bool) -> Event:
    """*change* for those who know no tokens: as vLLM's own offloading says it then."""
    if change.kind == "cleared":
        return AllBlocksCleared()
    hashes = _hashes(change.keys, as_numbers=as_numbers)
    place = PLACES[change.tier]
    if change.kind == "removed":
        return BlockRemoved(hashes, place.medium, 0, place.locality, place.ownership)
    parent = _hashes(change.parent or b"", as_numbers=as_numbers)
    return BlockStored(
        hashes,
        parent[0] if parent else None,
        [],
        0,
        None,
        place.medium,
        None,
        group_idx=0,
        locality=place.locality,
        ownership=place.ownership,
    )


def _hashes(keys: bytes, *, as_numbers: bool) -> list[EventHash]:
    if not as_numbers:
        return list(keys_of(keys))
    words = np.frombuffer(keys, ">u8").reshape(-1, BLOCK_KEY_BYTES // 8)
    numbers: list[EventHash] = words[:, -1].tolist()
    return numbers

"""What routers are told of the blocks that this engine can load: vLLM's own KV events."""

import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

from vllm.config import VllmConfig
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.request import Request

from kvstrata.core.types import BLOCK_KEY_BYTES, BlockKey, NamespaceId
from kvstrata.integration.vllm.blocks import BlockMath
from kvstrata.integration.vllm.compat import to_event_extra_keys
from kvstrata.integration.vllm.link import CacheLink
from kvstrata.observe.block_changes import keys_of
from kvstrata.observe.kv_events import PLACES
from kvstrata.server import protocol as p

_log = logging.getLogger(__name__)

_DESCRIBED_BLOCKS: Final = 16_384  # whose tokens are kept: 1M tokens in blocks of 64
_PATIENCE_SECONDS: Final = 0.1  # for news of a save: the server is asked for nothing that waits


class _Described(NamedTuple):
    """What a request says of one of its blocks."""

    parent: BlockKey | None
    tokens: "array[int]"
    lora_id: int | None
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None


def kv_events(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, math: BlockMath, link: CacheLink
) -> "KVEvents | None":
    """The events of this engine; None where vLLM publishes none, or could not name our blocks."""
    wanted = vllm_config.kv_events_config
    if wanted is None or not wanted.enable_kv_cache_events:
        return None
    if math.recurrent:
        _log.warning("no KV events of KVStrata's tiers: they have no words for recurrent state")
        return None
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if len(get_hash_fn_by_name(algorithm)(b"")) != BLOCK_KEY_BYTES:
        _log.warning(
            "no KV events of KVStrata's tiers: hashes of %r are too short to be its keys; use "
            "--prefix-caching-hash-algo sha256",
            algorithm,
        )
        return None
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return KVEvents(
        math,
        link,
        [
            {
                "kv_cache_spec_kind": get_kv_cache_spec_kind(spec).value,
                "kv_cache_spec_sliding_window": get_kv_cache_spec_sliding_window(spec),
            }
            for spec in specs
        ],
    )


class KVEvents:
    """Turns what the server tells of the engine's namespace into events of vLLM.

    A block has one event hash: the hash that vLLM gives the prompt up to the block's end. What is
    saved by a request of this engine, not long ago, is told with tokens, adapter and parent; of
    other blocks only the hashes are known, and the events are those that vLLM's own offloading
    publishes then: no tokens, a block size of 0. As vLLM does, each is told for every KV cache
    group; a block of ours always has all of them.
    """

    def __init__(self, math: BlockMath, link: CacheLink, specs: Sequence[dict[str, Any]]) -> None:
        """*specs*: for each group the fields of ``BlockStored`` that say what kind of cache it is."""
        self._math = math
        self._link = link
        self._specs = specs
        self._namespace: NamespaceId | None = None
        self._described: OrderedDict[BlockKey, _Described] = OrderedDict()
        self._expected: dict[BlockKey, float] = {}  # saves whose end is no news yet: until when
        self._connection = 0
        self._has_told = False  # of blocks that a router may still count on
        self._is_void = False  # what was told, and no router knows yet

    @property
    def busy(self) -> bool:
        """Whether news will come at once: with no more steps nobody would hear them."""
        if self._expected:
            now = time.monotonic()
            is_up = self._link.connected
            self._expected = {k: t for k, t in self._expected.items() if is_up and t > now}
        return bool(self._expected)

    def follow(self, namespace: NamespaceId) -> None:
        """Blocks of *namespace* are what the engine can load from now on, and no others."""
        self._namespace = namespace
        self._void()
        self._link.follow(namespace)

    def describe(self, request: Request, first: int, end: int) -> None:
        """Blocks *first* to *end* of *request* are being saved, or have been."""
        math, lora = self._math, request.lora_request
        for block in range(first, end):
            start, stop = block * math.tokens, (block + 1) * math.tokens
            extra, _ = generate_block_hash_extra_keys(request, start, stop, 0)
            key = math.key(request, block)
            self._described[key] = _Described(
                math.key(request, block - 1) if block else None,
                array("q", request.all_token_ids[start:stop]),
                lora.adapter_id if lora is not None else None,
                lora.name if lora is not None else None,
                extra,
            )
            self._described.move_to_end(key)
        while len(self._described) > _DESCRIBED_BLOCKS:
            self._described.popitem(last=False)

    def expect(self, keys: Iterable[BlockKey]) -> None:
        """The server was told that these are saved."""
        until = time.monotonic() + _PATIENCE_SECONDS
        self._expected.update(dict.fromkeys(keys, until))

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call, in order."""
        self._link.poll(0.0)
        if self._connection != self._link.number or not self._link.connected:
            self._connection = self._link.number
            self._void()
        events: list[KVCacheEvent] = []
        if self._is_void:
            events.append(AllBlocksCleared())
            self._is_void = False
        for changed in self._link.take_changed():
            if changed.namespace == self._namespace:
                for change in changed.changes:
                    events.extend(self._events(change))
        return events

    def _void(self) -> None:
        """Nothing that was told counts any more."""
        self._is_void |= self._has_told
        self._has_told = False
        self._expected.clear()

    def _events(self, change: p.BlockChange) -> Iterator[KVCacheEvent]:
        if change.kind == "cleared":
            if self._has_told:
                self._has_told = False
                yield AllBlocksCleared()
        elif change.kind == "removed":
            place = PLACES[change.tier]
            hashes = [_event_hash(key) for key in keys_of(change.keys)]
            for group in range(len(self._specs)):
                yield BlockRemoved(block_hashes=hashes, group_idx=group, **place._asdict())
        else:
            self._has_told = True
            yield from self._stored(change)

    def _stored(self, change: p.BlockChange) -> Iterator[BlockStored]:
        """Runs of blocks that are described, and of those that are not."""
        keys = keys_of(change.keys)
        for key in keys:
            self._expected.pop(key, None)
        parent = change.parent or None
        for is_described, run in groupby(keys, self._described.__contains__):
            members = list(run)
            for group in range(len(self._specs)):
                if is_described:
                    yield self._whole(members, change.tier, group)
                else:
                    yield _placeholder(members, parent, change.tier, group)
            parent = members[-1]

    def _whole(self, keys: list[BlockKey], tier: str, group: int) -> BlockStored:
        blocks = [self._described[key] for key in keys]
        first = blocks[0]
        return BlockStored(
            block_hashes=[_event_hash(key) for key in keys],
            parent_block_hash=_event_hash(first.parent) if first.parent is not None else None,
            token_ids=[token for block in blocks for token in block.tokens],
            block_size=self._math.tokens,
            lora_id=first.lora_id,
            lora_name=first.lora_name,
            extra_keys=to_event_extra_keys([block.extra_keys for block in blocks]),
            group_idx=group,
            **self._specs[group],
            **PLACES[tier]._asdict(),
        )


def _placeholder(
    keys: list[BlockKey], parent: BlockKey | None, tier: str, group: int
) -> BlockStored:
    return BlockStored(
        block_hashes=[_event_hash(key) for key in keys],
        parent_block_hash=_event_hash(parent) if parent is not None else None,
        token_ids=[],
        block_size=0,
        lora_id=None,
        lora_name=None,
        group_idx=group,
        **PLACES[tier]._asdict(),
    )


def _event_hash(key: BlockKey) -> Any:
    """As bytes or as a number, as vLLM is told by its environment."""
    return maybe_convert_block_hash(BlockHash(key))

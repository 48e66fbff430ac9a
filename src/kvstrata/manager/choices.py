"""What a configuration chooses: the eviction policy of a tier, and how each tier is used."""

import math
from collections.abc import Callable, Mapping
from typing import Final, Literal

from kvstrata.core.config import Config
from kvstrata.core.remote_tiers import ObjectTier, RemoteTier
from kvstrata.core.tier_fields import Eviction
from kvstrata.core.tiers import DiskTier, Tier
from kvstrata.index.policies import LRU, S3FIFO, CostAware, EvictionPolicy, PrefillCost
from kvstrata.index.tree import PrefixIndex
from kvstrata.manager.cascade import SearchLimits
from kvstrata.transfer.engine import TransferLimits

__all__ = [
    "call_seconds_of",
    "disk_limits_of",
    "hung_seconds_of",
    "make_policy",
    "policy_of",
    "remote_limits_of",
    "retry_seconds_of",
    "search_limits_of",
]

# For a model of 8 billion parameters attention costs as much as all else at 30 k tokens.
_DOUBLING_BLOCKS: Final = 512

# Side by side in each read thread: answers come late, and each at its own pace.
_FAR_READ_BLOCKS: Final = 4
_HUNG_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 2.0


def make_policy(
    name: Eviction,
    index: PrefixIndex,
    tier_blocks: int,
    *,
    doubling_blocks: int = _DOUBLING_BLOCKS,
) -> EvictionPolicy:
    """The policy *name* for a tier of *tier_blocks* blocks of *index*.

    Behind *doubling_blocks* others a block takes twice as long to compute as the first of a prompt.
    """
    return _MAKERS[name](index, tier_blocks, doubling_blocks)


_MAKERS: Final[Mapping[str, Callable[[PrefixIndex, int, int], EvictionPolicy]]] = {
    "lru": lambda index, _, __: LRU(index.capacity),
    "s3fifo": lambda index, blocks, _: S3FIFO(index.capacity, blocks, index.fingerprints),
    "cost": lambda index, _, doubling: CostAware(
        index.capacity, PrefillCost(index.depth, doubling)
    ),
}


def policy_of(
    config: Config, tier: Literal["host", "disk"], index: PrefixIndex, blocks: int
) -> EvictionPolicy:
    chosen = config.host_tier if tier == "host" else config.disk_tier
    return make_policy(chosen.eviction if chosen else "lru", index, blocks)


def disk_limits_of(tier: DiskTier | None) -> TransferLimits:
    if tier is None:
        return TransferLimits()
    return TransferLimits(
        read_threads=tier.read_threads,
        max_queued_read_bytes=tier.max_queued_read_bytes,
        write_threads=2 * tier.write_depth,
        write_bytes_per_second=tier.write_bytes_per_second,
    )


def remote_limits_of(config: Config) -> TransferLimits:
    is_far = isinstance(config.lowest_tier, ObjectTier)
    return TransferLimits(read_blocks=_FAR_READ_BLOCKS if is_far else 1)


def hung_seconds_of(tier: Tier | None) -> float:
    """After which a call to *tier* has certainly gone wrong: far beyond its limit."""
    return max(_HUNG_SECONDS, 2 * tier.timeout_seconds if isinstance(tier, RemoteTier) else 0.0)


def call_seconds_of(tier: Tier | None) -> float:
    """How long a call to *tier* may take with all its repetitions."""
    return tier.timeout_seconds if isinstance(tier, RemoteTier) else math.inf


def retry_seconds_of(tier: Tier | None) -> float:
    """Within which a call to *tier* is repeated."""
    return min(_RETRY_SECONDS, call_seconds_of(tier))


def search_limits_of(config: Config) -> SearchLimits:
    lowest = config.lowest_tier
    missing_seconds = lowest.missing_seconds if isinstance(lowest, RemoteTier) else 0.0
    return SearchLimits(config.remote_lookup_seconds, missing_seconds)

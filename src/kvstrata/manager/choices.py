"""The eviction policies that a configuration can choose."""

from collections.abc import Callable, Mapping
from typing import Final

from kvstrata.core.tier_fields import Eviction
from kvstrata.index.policies import LRU, S3FIFO, CostAware, EvictionPolicy, PrefillCost
from kvstrata.index.tree import PrefixIndex

__all__ = ["make_policy"]

# For a model of 8 billion parameters attention costs as much as all else at 30 k tokens.
_DOUBLING_BLOCKS: Final = 512


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

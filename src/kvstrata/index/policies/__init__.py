"""Which blocks leave a full tier first: interchangeable objects, one for each tier."""

from kvstrata.index.policies.base import EvictionPolicy, MayLeave
from kvstrata.index.policies.lru import LRU

__all__ = ["LRU", "EvictionPolicy", "MayLeave"]

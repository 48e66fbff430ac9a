"""Which blocks leave a full tier first: interchangeable objects, one for each tier."""

from kvstrata.index.policies.base import EvictionPolicy, MayLeave
from kvstrata.index.policies.cost import CostAware, PrefillCost
from kvstrata.index.policies.lru import LRU
from kvstrata.index.policies.s3fifo import S3FIFO

__all__ = ["LRU", "S3FIFO", "CostAware", "EvictionPolicy", "MayLeave", "PrefillCost"]

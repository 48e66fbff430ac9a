"""Stores around stores, one concern each."""

from kvstrata.storage.wrap.apart import ApartStore
from kvstrata.storage.wrap.breaker import BreakerStore
from kvstrata.storage.wrap.counted import CountedStore
from kvstrata.storage.wrap.forward import WrappedStore
from kvstrata.storage.wrap.leading import LeadingStore
from kvstrata.storage.wrap.limited import LimitedStore
from kvstrata.storage.wrap.retry import RetryStore
from kvstrata.storage.wrap.timed import Operation, TimedStore

__all__ = [
    "ApartStore",
    "BreakerStore",
    "CountedStore",
    "LeadingStore",
    "LimitedStore",
    "Operation",
    "RetryStore",
    "TimedStore",
    "WrappedStore",
]

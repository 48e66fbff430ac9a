"""A conformance suite for stores, and stores that fail on purpose. Needs ``kvstrata[testing]``.

A store that passes ``StoreConformance`` can be a tier::

    from kvstrata.testing import StoreConformance

    class TestMyStore(StoreConformance):
        def open_store(self, place):
            return MyStore(place, block_bytes=4096, capacity_blocks=8)
"""

import pytest

for _module in ("machine", "subject", "value_rules", "life_rules"):
    pytest.register_assert_rewrite(f"{__name__}.{_module}")

# After the lines above: what is imported before it fails without showing the values.
from kvstrata.testing.conformance import StoreConformance
from kvstrata.testing.doubles import Fault, FlakyStore, LyingStore, SlowStore
from kvstrata.testing.faulty_files import FaultyFiles, PowerFailure
from kvstrata.testing.machine import Traits, store_machine
from kvstrata.testing.memory import MemoryStore

__all__ = [
    "Fault",
    "FaultyFiles",
    "FlakyStore",
    "LyingStore",
    "MemoryStore",
    "PowerFailure",
    "SlowStore",
    "StoreConformance",
    "Traits",
    "store_machine",
]

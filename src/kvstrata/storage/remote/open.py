"""Makes the store of a remote tier."""

from kvstrata.core.errors import ConfigError
from kvstrata.core.remote_tiers import RemoteTier
from kvstrata.storage.store import Store

__all__ = ["open_remote"]


def open_remote(tier: RemoteTier, *, block_bytes: int, memory: memoryview | None) -> Store:
    """A store of values of up to *block_bytes* on the engine that *tier* names; no I/O.

    *memory* is the host tier, between which and the engine bytes move. Raises ``ConfigError`` if
    a package is missing or a setting is wrong.
    """
    raise ConfigError(f"the {tier.kind} tier is not available in this version of KVStrata")

"""What goes wrong with a Mooncake pool, as ``TierUnavailable`` with its cause."""

from typing import Final

from kvstrata.core.errors import FaultCause, TierUnavailable

__all__ = ["unavailable"]

_HINTS: Final[dict[FaultCause, str]] = {
    "unreachable": "check that mooncake_master and the nodes of the pool run, and that this host "
    "may reach them",
    "timeout": "check the master, the nodes and the network, or set a longer timeout_seconds",
    "name": "check the host name of the master and the resolver",
    "refused": "check the log of mooncake_master; MC_LOG_LEVEL=INFO in the environment shows what "
    "the library says",
}


def unavailable(
    name: str, reason: str, cause: FaultCause, *, hint: str | None = None
) -> TierUnavailable:
    """The store *name* cannot be used; without *hint* the remedy is that of *cause*."""
    return TierUnavailable(f"{name}: {reason}", hint=hint or _HINTS.get(cause), cause=cause)

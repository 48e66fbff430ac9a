"""Every exception that KVStrata raises on purpose, grouped by what its handler does.

A miss is a value, a fault is one of these, a bug is ``InvariantViolated``. ``code`` is stable and
append-only: it labels metrics and log lines.
"""

from typing import ClassVar, Literal

FaultCause = Literal[
    "unreachable", "timeout", "name", "credentials", "refused", "full", "closed", "io"
]
"""Why a tier could not do what it was asked, as the metrics name it."""


class KVStrataError(Exception):
    """Root of the tree. ``hint`` says what to do about it."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n  hint: {self.hint}" if self.hint else message


class ConfigError(KVStrataError, ValueError):
    """A setting is unknown, contradictory or impossible here: stop and show it."""

    code = "config"


class FormatError(ConfigError):
    """A directory holds another format version or geometry, or a damaged superblock."""

    code = "format"


class TierUnavailable(KVStrataError, ConnectionError):
    """A tier cannot be reached: treat its blocks as misses and probe it later.

    ``cause``: nobody answers there (``unreachable``), or not in time (``timeout``), its name is
    not known (``name``), it does not let us in (``credentials``), it refuses or has no room
    (``refused``, ``full``), we have closed it (``closed``), or a disk or mount fails (``io``).
    """

    code = "tier_unavailable"

    def __init__(self, message: str, *, hint: str | None = None, cause: FaultCause = "io") -> None:
        super().__init__(message, hint=hint)
        self.cause = cause


class ServerUnavailable(KVStrataError, ConnectionError):
    """The cache server is gone, refuses us or does not answer in time."""

    code = "server_unavailable"


class NoTiers(KVStrataError):
    """No engine has told the server the size of a block yet: it holds nothing, and can act on nothing."""

    code = "no_tiers"


class LimitExceeded(KVStrataError):
    """One client asks for more than its share: a lookup is a miss, a save is not made."""

    code = "limit"


class ProtocolError(KVStrataError, ValueError):
    """The peer sent a frame that the schema or its limits forbid: close the connection."""

    code = "protocol"


class InvariantViolated(KVStrataError, AssertionError):
    """A bug of ours."""

    code = "invariant"

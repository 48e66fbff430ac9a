"""How this node takes part in a Mooncake pool: the master's address, settings, limits in time."""

import ipaddress
import logging
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple
from urllib.parse import SplitResult, urlsplit

from kvstrata.core.errors import ConfigError
from kvstrata.storage.remote.mooncake.wire import Orders

__all__ = ["MasterAddress", "MooncakeNode", "check_devices", "orders_of", "stalled_seconds"]

_log = logging.getLogger(__name__)

_DEFAULT_PORT: Final = 50051  # mooncake_master's own
_PREFIX: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_RDMA_DEVICES: Final = Path("/sys/class/infiniband")
_SLICE_BYTES: Final = 256 << 10  # of one connection: a block goes over several at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeNode:
    """What a Mooncake pool must know of this node. The defaults give it no memory of ours."""

    local_host: str | None = None  # what others reach us by; None: the address towards the master
    segment_bytes: int = 0  # memory of this node that becomes part of the pool
    buffer_bytes: int = 64 << 20  # through which blocks pass that are not in host slots
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""  # RDMA devices, comma-separated; "" lets the library choose
    metadata: str = "P2PHANDSHAKE"  # or the URL of a metadata server
    prefix: str = "kvstrata"  # of every key, so that others may share the pool

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.prefix):
            raise ConfigError(
                f"the prefix {self.prefix!r} of a Mooncake tier",
                hint="use 1 to 64 letters, digits and any of . _ -",
            )
        if self.protocol not in {"tcp", "rdma"}:
            raise ConfigError(
                f"the protocol {self.protocol!r} of a Mooncake tier", hint="set tcp or rdma"
            )
        if self.segment_bytes < 0 or self.buffer_bytes < 1:
            raise ConfigError(
                f"segment_bytes {self.segment_bytes} and buffer_bytes {self.buffer_bytes} of a "
                "Mooncake tier",
                hint="give a segment_bytes of 0 or more, and a buffer_bytes of 1 or more",
            )


def check_devices(node: MooncakeNode, name: str) -> None:
    """Warn where there is to be RDMA and is none: the library goes over TCP, and says nothing.

    If *node* names devices the library cannot join the pool. *name* is that of the store.
    """
    if node.protocol == "rdma" and not (_RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())):
        _log.warning(
            "%s: protocol is rdma, and there is no device in %s: %s. Load the driver, give a "
            "container its devices, or set protocol=tcp",
            name,
            _RDMA_DEVICES,
            "it cannot be used" if node.devices else "blocks go over TCP",
        )


class MasterAddress(NamedTuple):
    """Where a ``mooncake_master`` listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, url: str) -> "MasterAddress":
        """Of ``mooncake://host:port``; raises ``ConfigError`` for anything else."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:  # a port that is no number, or half a pair of brackets
            parts, port = urlsplit("mooncake:"), -1
        if not _is_plain(parts) or not parts.hostname or port in {-1, 0}:
            raise ConfigError(
                f"a Mooncake tier at {parts.scheme}://{parts.hostname or ''}: not an address",
                hint="write mooncake://HOST:PORT, where mooncake_master listens; it takes no "
                "user, password, path or options",
            )
        return cls(parts.hostname, _DEFAULT_PORT if port is None else port)

    def __str__(self) -> str:
        """As the library takes it."""
        return f"[{self.host}]:{self.port}" if _is_ipv6(self.host) else f"{self.host}:{self.port}"


def stalled_seconds(timeout_seconds: float) -> int:
    """How long a node may be silent before the library gives it up: it takes whole seconds."""
    return max(1, math.floor(timeout_seconds / 2))


def orders_of(address: MasterAddress, node: MooncakeNode, timeout_seconds: float) -> Orders:
    """For a process that moves blocks; it has no segment, and no memories yet."""
    return Orders(
        host=address.host,
        port=address.port,
        master=str(address),
        local_host=node.local_host,
        segment_bytes=0,
        protocol=node.protocol,
        devices=node.devices,
        metadata=node.metadata,
        environment=_limits(timeout_seconds),
        connect_seconds=timeout_seconds / 2,
        memories=[],
    )


def _limits(timeout_seconds: float) -> dict[str, str]:
    """Environment of the library with which its own waits mostly end within *timeout_seconds*.

    It waits longer without: 30 s for a node that is stopped. An operator's own values hold.
    """
    rpc_ms = max(1, int(timeout_seconds * 750))
    stalled = str(stalled_seconds(timeout_seconds))
    return {
        "MC_RPC_TIMEOUT_MS": str(rpc_ms),
        "MC_RPC_CONNECT_TIMEOUT_MS": str(max(1, rpc_ms // 2)),
        "MC_HANDSHAKE_CONNECT_TIMEOUT": stalled,
        "MC_TCP_STATUS_TIMEOUT_SEC": stalled,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": stalled,
        "MC_TCP_SLICE_SIZE": str(_SLICE_BYTES),
        "MC_TCP_LANES_PER_PEER": "16",  # as many transfers a second fail with a broken node
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    }


def _is_plain(parts: SplitResult) -> bool:
    beyond = (parts.path.strip("/"), parts.query, parts.fragment, parts.username, parts.password)
    return parts.scheme == "mooncake" and not any(beyond)


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False

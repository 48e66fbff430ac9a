"""Values of the settings of KV events, checked."""

import re
import string
from typing import Final

from kvstrata.core.errors import ConfigError

__all__ = ["topic", "zmq_address"]

_PLACES: Final = frozenset({"model", "namespace"})
_TCP: Final = re.compile(r"tcp://(\[[0-9A-Fa-f:.%\w]+\]|[^:/\s\[\]]+):(\d{1,5})")


def zmq_address(address: str) -> str:
    """Return *address* if it is one of ZMQ that others can reach; else a ConfigError."""
    if address.startswith("ipc:///") and len(address) > len("ipc:///"):
        return address
    found = _TCP.fullmatch(address)
    if found is None or not 0 < int(found[2]) < 65536:
        raise ConfigError(
            f"{address!r} is no address to publish at",
            hint="write it as tcp://127.0.0.1:5557 or ipc:///run/kvstrata/events",
        )
    return address


def topic(text: str) -> str:
    """Return *text* if nothing in braces is in it but what a topic can have; else a ConfigError."""
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
    except ValueError:
        names = {text}
    if not names <= _PLACES or "{{" in text or "}}" in text:
        raise ConfigError(
            f"{text!r} is no topic: only {{model}} and {{namespace}} can stand in braces",
            hint="write it as kv@node-7@{model}",
        )
    return text

"""Ports for the servers that tests start."""

import random
import socket
from contextlib import suppress
from itertools import chain

# Below those that the kernel takes for clients; another process of tests begins elsewhere.
_FIRST, _LAST = 10_000, 32_000
_BEGIN = random.SystemRandom().randint(_FIRST, _LAST)
_PORTS = chain(range(_BEGIN, _LAST), range(_FIRST, _BEGIN))


def free_port() -> int:
    """Never the same twice, and none that the kernel would give to a client meanwhile."""
    for port in _PORTS:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")

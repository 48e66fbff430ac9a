"""A resolver of host names that does not answer."""

import json
import socket
import sys
import threading
from pathlib import Path
from typing import Final

import pytest
from tests.caches import PATIENCE_SECONDS
from tests.remote.networks import Network

from kvstrata.core.errors import TierUnavailable
from kvstrata.storage.remote.resolver import Resolver
from kvstrata.storage.remote.valkey.store import ValkeyStore
from kvstrata.testing.samples import key

BEYOND_MEMORY_BYTES: Final = 1 << 47  # the stack of a thread that cannot be had


@pytest.mark.parametrize("engine", ["valkey", "objects"])
def test_a_resolver_that_is_silent(tmp_path: Path, engine: str) -> None:
    """Calls end while its question is still under way, one for all of them; once a name was found
    its address is used."""
    log = tmp_path / "log"
    with Network("node") as network:
        network.set_resolver("node", "nameserver 127.0.0.1\noptions timeout:2 attempts:5\n")
        command = [sys.executable, "-m", "tests.remote.name_server", engine]
        node = network.start("node", command, log)
        try:
            assert node.wait(100) == 0, log.read_text()
        finally:
            node.kill()
            node.wait()
    assert json.loads(log.read_text().splitlines()[-1]) == {
        "silent": ["name"] * 4,
        "waiting": 1,
        "written": "stored",
        "again": [True] * 4,
        "still_waiting": 1,
    }


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70])
def test_a_name_that_nobody_has(host: str) -> None:
    store = ValkeyStore(f"valkey://{host}", block_bytes=1)
    for _ in range(2):
        with pytest.raises(TierUnavailable) as caught:
            store.exists([key(1)])
        assert caught.value.cause == "name"
    store.close()


def test_a_name_that_no_thread_was_to_be_had_for_is_asked_for_by_the_next_call() -> None:
    resolver = Resolver()
    usual = threading.stack_size(BEYOND_MEMORY_BYTES)
    try:
        with pytest.raises(socket.gaierror) as caught:
            resolver.places("localhost", 80, PATIENCE_SECONDS)
    finally:
        threading.stack_size(usual)
    assert caught.value.errno == socket.EAI_AGAIN
    assert resolver.places("localhost", 80, PATIENCE_SECONDS)

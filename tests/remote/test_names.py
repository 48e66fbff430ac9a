"""A resolver of host names that does not answer."""

import json
import sys
from pathlib import Path

import pytest
from tests.remote.networks import Network

from kvstrata.core.errors import TierUnavailable
from kvstrata.storage.remote.valkey.store import ValkeyStore
from kvstrata.testing.samples import key


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

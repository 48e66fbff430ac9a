"""A server whose disk does not answer stops when it is told to."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

from tests.caches import ALICE, BLOCK_BYTES, PATIENCE_SECONDS, config, eventually, keys, save
from tests.server.harness import engine, worker

from kvstrata.core.errors import ServerUnavailable
from kvstrata.manager.manager import KVManager
from kvstrata.server.client import observe

_CODE = """
import sys, time
from pathlib import Path
from tests.caches import BLOCK_BYTES, config
from kvstrata.server.main import run_server
from kvstrata.storage.disk import DiskStore

DiskStore.read_into = lambda *_: time.sleep(1e6)
here = Path(sys.argv[1])
settings = config(4, here / "disk", drain_timeout_seconds=0.05)
run_server(settings, here / "s", block_bytes=BLOCK_BYTES)
"""


def answers(path: Path) -> bool:
    with contextlib.suppress(ServerUnavailable), contextlib.closing(observe(path)) as client:
        client.ping()
        return True
    return False


def test_read_that_never_ends_does_not_hold_the_process(tmp_path: Path) -> None:
    asked = keys(1, 2)
    made = KVManager(config(4, tmp_path / "disk"), block_bytes=BLOCK_BYTES)
    save(made, ALICE, asked)
    made.close()
    server = subprocess.Popen([sys.executable, "-c", _CODE, str(tmp_path)])
    try:
        eventually(lambda: answers(tmp_path / "s"), "it does not serve")
        half, client = worker(tmp_path / "s"), engine(tmp_path / "s")
        assert client.get_match(ALICE, asked).disk_blocks == 2
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_SECONDS) == 0
        assert not (tmp_path / "s").exists()
        half.close()
        client.close()
    finally:
        server.kill()
        server.wait()

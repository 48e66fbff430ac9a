"""A server whose log nobody reads serves on, and stops when it is told to."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.caches import PATIENCE_SECONDS, eventually

from kvstrata.core.errors import ServerUnavailable
from kvstrata.server.client import observe
from kvstrata.server.log_thread import logging_on_a_thread


def test_lines_are_written_in_order_and_all_by_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        with logging_on_a_thread():
            for n in range(500):
                logging.getLogger("kvstrata.test").info("line %d", n)
        logging.getLogger("kvstrata.test").info("after")
    assert [record.getMessage() for record in caplog.records] == [
        *(f"line {n}" for n in range(500)),
        "after",
    ]


def test_line_that_is_none_stops_neither_who_writes_it_nor_the_thread(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)  # else it tells stderr
    with logging_on_a_thread():
        logging.getLogger("kvstrata.test").warning("line %d", "x")
        logging.getLogger("kvstrata.test").warning("after")
    assert [record.getMessage() for record in caplog.records] == ["after"]


def answers(path: Path) -> bool:
    with contextlib.suppress(ServerUnavailable), contextlib.closing(observe(path)) as client:
        client.ping()
        return True
    return False


def test_server_whose_log_is_stuck_serves_and_stops_when_it_is_told_to(tmp_path: Path) -> None:
    path = tmp_path / "s"
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    with contextlib.suppress(BlockingIOError):
        os.write(writing, b"x")
    os.set_blocking(writing, True)
    command = [sys.executable, "-m", "kvstrata", "server", "--socket", str(path)]
    server = subprocess.Popen([*command, "--host-size", "1MiB"], stderr=writing)
    try:
        eventually(lambda: answers(path), "it does not serve")
        server.send_signal(signal.SIGTERM)
        eventually(lambda: not path.exists(), "it does not stop")
        assert server.wait(PATIENCE_SECONDS) == 0
    finally:
        server.kill()
        server.wait()
        os.close(reading)
        os.close(writing)

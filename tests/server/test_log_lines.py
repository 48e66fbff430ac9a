"""What an operator reads of the server: one line an event, none of those who only look."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.caches import ALICE, BLOCK_BYTES, PATIENCE_SECONDS, config, eventually, keys
from tests.server.harness import engine, serving, worker

from kvstrata.core.errors import ConfigError
from kvstrata.server import protocol as p
from kvstrata.server.client import ManagerClient, observe
from kvstrata.server.client_log import ClientLog
from kvstrata.server.server import Server


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO):
        yield caplog


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(config(4), tmp_path / "s") as made:
        yield made


def lines(log: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    ours = [record for record in log.records if record.name.startswith("kvstrata.server")]
    return [(record.levelname, record.getMessage()) for record in ours]


def test_engines_that_join_and_leave_are_told(
    server: Server, log: pytest.LogCaptureFixture
) -> None:
    half = worker(server.path, "llama", rank=1)
    scheduler = engine(server.path, "llama", world_size=2)
    joined = [
        ("INFO", "rank 1 of engine 'llama' has joined"),
        ("INFO", "engine 'llama' has joined; workers here: 1 of 2"),
    ]
    assert lines(log) == joined
    scheduler.close()
    eventually(lambda: len(lines(log)) == 3, "nothing is told")
    half.close()
    eventually(lambda: len(lines(log)) == 4, "nothing is told")
    assert lines(log) == [
        *joined,
        ("INFO", "engine 'llama' has left"),
        ("INFO", "rank 1 of engine 'llama' has left"),
    ]


def test_those_who_only_look_are_not_told(server: Server, log: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(observe(server.path)) as client:
        client.stats()
        client.explain("x")
    eventually(lambda: server.clients == 0, "it stays")
    with pytest.raises(ConfigError):
        refused(server.path, p.Hello(0, 999, "observer"))
    assert lines(log) == []


def refused(path: Path, hello: p.Hello) -> None:
    with contextlib.closing(ManagerClient(path, hello)) as client:
        client.wait_welcome(PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("role", "name"), [("engine", "engine 'e\\n'"), ("worker", "rank 0 of engine 'e\\n'")]
)
def test_engine_that_is_refused_is_told_once_however_often_it_tries(
    server: Server, log: pytest.LogCaptureFixture, role: str, name: str
) -> None:
    for _ in range(30):
        with pytest.raises(ConfigError):
            refused(server.path, p.Hello(0, p.PROTOCOL_VERSION, role, "e\n", 2 * BLOCK_BYTES))
    ((level, text),) = lines(log)
    assert level == "WARNING"
    assert text.startswith(f"{name} is refused: blocks of 8192 bytes do not fit this server")


def test_version_that_is_refused_is_told(server: Server, log: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError):
        refused(server.path, p.Hello(0, 999, "engine", "e", BLOCK_BYTES))
    ((level, text),) = lines(log)
    assert (level, text.partition(":")[0]) == ("WARNING", "engine 'e' is refused")
    assert "protocol 999" in text


def test_reset_and_shutdown_are_told_and_requests_are_not(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s"
    with contextlib.ExitStack() as later, serving(config(4), path):
        half = worker(path)
        later.callback(half.close)
        with contextlib.closing(engine(path)) as client:
            log.clear()
            task = client.put_match(ALICE, keys(1, 2))
            client.launch([task.task_id])
            client.complete([task.task_id])
            client.get_match(ALICE, keys(3))
            client.ping()
            assert lines(log) == []
            assert client.reset(ALICE) == 2
            assert lines(log) == [("INFO", f"namespace {ALICE.hex()} is reset; blocks dropped: 2")]
        eventually(lambda: len(lines(log)) == 2, "the engine does not leave")
        log.clear()
    assert lines(log) == [
        ("INFO", "shutting down; connections: 1, blocks to be written: 0"),
        ("INFO", "rank 0 of engine 'e' has left"),
    ]


def test_news_are_bounded_and_take_no_room_from_warnings(log: pytest.LogCaptureFixture) -> None:
    client_log = ClientLog()
    for n in range(1000):
        client_log.tell("news %d", n)
    client_log.warn("a warning")
    assert lines(log) == [*(("INFO", f"news {n}") for n in range(20)), ("WARNING", "a warning")]


def test_texts_that_are_remembered_are_bounded(log: pytest.LogCaptureFixture) -> None:
    client_log = ClientLog()
    for n in range(1000):
        client_log.warn_once(f"text {n} {'x' * 9000}")
    assert len(client_log._texts) == 64
    assert max(map(len, client_log._texts)) == 500
    assert len(lines(log)) == 20

"""The server as a child: it ends with its parent, however that ends, and comes back when it dies."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.caches import ALICE, BLOCK_BYTES, PATIENCE_SECONDS, config, content, eventually, keys
from tests.disks import listed_keys
from tests.server.harness import engine, worker

from kvstrata.bench.processes import is_alive
from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError, ServerUnavailable
from kvstrata.server.client import observe
from kvstrata.server.embedded import EmbeddedServer
from kvstrata.server.sockets import runtime_directory
from kvstrata.storage.disk import DiskStore


def shared_memory_names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "kvstrata" in name.lower()}


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the child listens; at the end no file of it is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = runtime_directory()
    yield folder / "e.sock"
    assert list(folder.iterdir()) == []
    assert shared_memory_names() == set()


@contextlib.contextmanager
def child(config: Config, path: Path, *, shares_session: bool = False) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(config, path, block_bytes=BLOCK_BYTES, shares_session=shares_session)
    with closed(server):
        yield server


@contextlib.contextmanager
def closed(server: EmbeddedServer) -> Iterator[None]:
    """At the end of the context, and it has ended."""
    try:
        yield
    finally:
        server.close()
        pid = pid_of(server)
        eventually(lambda: not Path(f"/proc/{pid}").exists(), "the child outlives its lifeline")


def pid_of(server: EmbeddedServer) -> int:
    assert server.pid is not None
    return server.pid


def save_through(path: Path, count: int) -> None:
    with contextlib.closing(engine(path)) as scheduler, contextlib.closing(worker(path)) as half:
        descriptor = half.take_descriptor()
        assert descriptor is not None
        blocks = keys(*range(count))
        task = scheduler.put_match(ALICE, blocks)
        assert task.missing == list(range(count))
        scheduler.launch([task.task_id])
        for slot, block in zip(task.slots, blocks, strict=True):
            os.pwrite(descriptor, content(ALICE, block), 4096 + slot * 4096)
        scheduler.complete([task.task_id])
        scheduler.ping()
        os.close(descriptor)


def blocks_on_disk(path: Path) -> int:
    store = DiskStore([path], block_bytes=BLOCK_BYTES, capacity_bytes=1 << 19)
    with contextlib.closing(store):
        stored = set(listed_keys(store))
        buffer = memoryview(bytearray(BLOCK_BYTES))
        for i, block in enumerate(keys(*range(len(stored)))):
            store.read_into([ALICE + block], [buffer])
            assert bytes(buffer) == content(ALICE, block), i
    return len(stored)


def test_child_serves_when_it_is_made_and_drains_to_disk_when_it_is_closed(
    tmp_path: Path, path: Path
) -> None:
    with child(config(64, tmp_path / "disk"), path):
        save_through(path, 60)
    assert blocks_on_disk(tmp_path / "disk") == 60


def test_child_ends_when_its_parent_is_killed(tmp_path: Path, path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from kvstrata.core.config import Config;"
        "from kvstrata.server.embedded import EmbeddedServer;"
        f"server = EmbeddedServer(Config(tiers='host:256KiB | disk:{tmp_path}/disk:512KiB', "
        f"prefault=False), Path(sys.argv[1]), block_bytes={BLOCK_BYTES});"
        "print(server.pid, flush=True); time.sleep(1000)"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        save_through(path, 20)
        parent.send_signal(signal.SIGKILL)
        assert parent.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    eventually(lambda: not is_alive(pid), "the child outlives its parent")
    assert blocks_on_disk(tmp_path / "disk") == 20


@pytest.mark.parametrize("shares_session", [False, True])
def test_child_does_not_hear_the_terminals_interrupt(path: Path, shares_session: bool) -> None:
    with child(config(4), path, shares_session=shares_session) as server:
        os.kill(pid_of(server), signal.SIGINT)
        observe(path).close()
        assert os.getpgid(pid_of(server)) != os.getpgid(0)


@pytest.mark.parametrize("shares_session", [False, True])
def test_child_is_scheduled_with_an_engine_whose_workers_spin(
    path: Path, shares_session: bool
) -> None:
    with child(config(4), path, shares_session=shares_session) as server:
        assert (os.getsid(pid_of(server)) == os.getsid(0)) is shares_session


def test_child_logs_to_a_terminal_that_stops_what_writes_from_behind(path: Path) -> None:
    with child(config(4), path) as server:
        os.kill(pid_of(server), signal.SIGTTOU)
        observe(path).close()


def test_child_ends_in_order_on_sigterm(path: Path) -> None:
    with child(config(4), path) as server:
        os.kill(pid_of(server), signal.SIGTERM)
        eventually(lambda: not is_alive(pid_of(server)), "the child goes on")
        assert not path.exists()


def test_bad_disk_reaches_the_parent_as_a_config_error(tmp_path: Path, path: Path) -> None:
    (tmp_path / "disk").write_text("a file")
    with pytest.raises(ConfigError, match="disk") as caught:
        EmbeddedServer(config(4, tmp_path / "disk"), path, block_bytes=BLOCK_BYTES)
    assert type(caught.value) is ConfigError
    assert not path.exists()


def test_host_memory_larger_than_the_machine_reaches_the_parent(path: Path) -> None:
    huge = config(4).model_validate({"tiers": "host:1000TiB"})
    with pytest.raises(ConfigError, match="of memory is available") as caught:
        EmbeddedServer(huge, path, block_bytes=BLOCK_BYTES)
    assert caught.value.hint is not None
    assert "lower the capacity of the host tier" in caught.value.hint


def test_socket_in_use_reaches_the_parent(path: Path) -> None:
    with child(config(4), path):
        with pytest.raises(ConfigError, match="a server is running"):
            EmbeddedServer(config(4), path, block_bytes=BLOCK_BYTES)
        observe(path).close()


def test_child_that_takes_long_is_not_waited_for_and_serves_later(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with child(config(4, start_timeout_seconds=0.001), path) as server:
        assert "not ready within 0.001 s" in caplog.text
        assert server.pid is None
        eventually(lambda: revived(server, path), "it never serves")
        server.revive()
        save_through(path, 4)


def test_child_that_is_closed_before_it_serves_leaves_nothing(path: Path) -> None:
    EmbeddedServer(config(4, start_timeout_seconds=0.001), path, block_bytes=BLOCK_BYTES).close()
    eventually(lambda: not list(path.parent.iterdir()), "its socket stays")


def test_child_that_dies_at_its_start_is_started_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", _python_that("raise SystemExit"))
        server = EmbeddedServer(config(4, reconnect_seconds=0.001), path, block_bytes=BLOCK_BYTES)
    assert "died at its start" in caplog.text
    with closed(server):
        eventually(lambda: revived(server, path), "it is not started again")
        server.revive()


def test_killed_child_is_revived_and_finds_the_socket_of_the_dead_one_replaced(
    path: Path,
) -> None:
    with child(config(4, reconnect_seconds=0.01), path) as server:
        first = pid_of(server)
        server.revive()
        assert pid_of(server) == first
        os.kill(first, signal.SIGKILL)
        eventually(lambda: not is_alive(first), "it does not die")
        assert path.exists()

        def answers() -> bool:
            server.revive()
            try:
                observe(path, timeout_seconds=PATIENCE_SECONDS).close()
            except ServerUnavailable:
                return False
            return True

        eventually(answers, "it is not revived")
        server.revive()
        assert pid_of(server) != first


def test_child_that_dies_at_once_is_not_revived_more_often_than_configured(path: Path) -> None:
    with child(config(4, reconnect_seconds=1000), path) as server:
        first = pid_of(server)
        os.kill(first, signal.SIGKILL)
        eventually(lambda: not is_alive(first), "it does not die")
        server.revive()
        assert pid_of(server) == first
        path.unlink()


def kill(server: EmbeddedServer) -> None:
    os.kill(pid_of(server), signal.SIGKILL)
    eventually(lambda: not is_alive(pid_of(server)), "it does not die")


def revived(server: EmbeddedServer, path: Path) -> bool:
    server.revive()
    try:
        observe(path, timeout_seconds=PATIENCE_SECONDS).close()
    except ServerUnavailable:
        return False
    return True


def test_why_a_dead_child_does_not_come_back_is_told(
    tmp_path: Path, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tmp_path / "disk"
    with child(config(4, disk, reconnect_seconds=0.01), path) as server:
        kill(server)
        disk.rename(tmp_path / "mislaid")
        disk.write_text("a file")

        def told() -> bool:
            server.revive()
            return "is not a directory" in caplog.text

        with caplog.at_level(logging.WARNING):
            eventually(told, "nothing is said")
        disk.unlink()
        (tmp_path / "mislaid").rename(disk)
        eventually(lambda: revived(server, path), "it is not revived")
        server.revive()


def test_child_that_cannot_be_launched_is_tried_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise OSError("no more processes")

    with child(config(4, reconnect_seconds=0.001), path) as server:
        kill(server)
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", refuses)
            for _ in range(3):
                with pytest.raises(OSError, match="no more processes"):
                    eventually(lambda: bool(server.revive()), "it is not tried")  # type: ignore[func-returns-value]  # until it raises
        eventually(lambda: revived(server, path), "it is not revived")
        server.revive()


def test_what_a_child_says_that_is_no_server_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(subprocess, "Popen", _python_that("print('hello')"))
    EmbeddedServer(config(4), path, block_bytes=BLOCK_BYTES).close()
    assert "hello" in caplog.text


def _python_that(code: str) -> Any:
    real = subprocess.Popen

    def launch(_: list[str], **options: Any) -> Any:
        return real([sys.executable, "-c", code], **options)

    return launch

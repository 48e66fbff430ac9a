"""How a worker maps the host tier of a server, and of the next one."""

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.caches import ALICE, config, content, eventually, generation_of, key, keys
from tests.server.harness import engine, memfds, serving, worker_hello

from kvstrata.core.errors import ServerUnavailable
from kvstrata.manager.tasks import TaskState
from kvstrata.server import attach, sockets
from kvstrata.server import protocol as p
from kvstrata.server.attach import Attachment, Patience
from kvstrata.storage import mapping as mapping_module
from kvstrata.storage.mapping import HostMapping


class Worker:
    def __init__(
        self,
        path: Path,
        *,
        patience: Patience = Patience(60.0),  # noqa: B008 - immutable
        prefault: bool = True,
        pin: Callable[[HostMapping, Callable[[], bool]], bool] | None = None,
    ) -> None:
        self.mappings: list[HostMapping] = []
        self.current: HostMapping | None = None
        self.attachment = Attachment(
            path,
            worker_hello(),
            self._take,
            patience=patience,
            prefault=prefault,
            pin=pin,
        )

    def _take(self, mapping: HostMapping | None) -> None:
        self.current = mapping
        if mapping is not None:
            self.mappings.append(mapping)

    def close(self) -> None:
        self.attachment.close()
        assert not any(t.name == "kvstrata-attach" for t in threading.enumerate())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture(autouse=True)
def _no_memory_is_left() -> Iterator[None]:
    before = memfds()
    yield
    eventually(lambda: memfds() <= before, "host memory is kept")


@pytest.mark.parametrize("prefault", [True, False])
def test_worker_sees_the_servers_memory_and_then_counts(path: Path, prefault: bool) -> None:
    with serving(config(4), path) as server, contextlib.closing(engine(path)) as scheduler:
        manager = server.manager
        assert manager is not None
        with contextlib.closing(Worker(path, prefault=prefault)) as worker:
            eventually(
                lambda: scheduler.put_match(ALICE, keys(1)).task_id != 0, "the worker never counts"
            )
            (mapping,) = worker.mappings
            assert mapping.server_id == manager.server_id
            assert mapping.data.shape == (4, 4096)
            mapping.data[0] = list(content(ALICE, key(1)))
            assert bytes(manager.view(0)) == content(ALICE, key(1))
            assert list(mapping.generations) == [generation_of(manager, s) for s in range(4)]
        eventually(
            lambda: scheduler.put_match(ALICE, keys(9)).state is TaskState.FAILED,
            "a worker that has gone still counts",
        )


def test_worker_may_come_before_the_server_and_outlive_it(path: Path) -> None:
    with contextlib.closing(Worker(path)) as worker:
        lives = []
        for life in range(3):
            with serving(config(4 + life), path) as server:
                assert server.manager is not None
                lives.append(server.manager.server_id)
                eventually(lambda: len(worker.mappings) == len(lives), "no mapping arrives")
        assert [m.server_id for m in worker.mappings] == lives
        assert [m.slots for m in worker.mappings] == [4, 5, 6]
        assert len(set(lives)) == 3


def test_memory_of_a_server_that_is_gone_is_let_go_with_its_last_array(path: Path) -> None:
    """A worker that kept a descriptor would keep a whole host tier for each restart."""
    before = memfds()
    with contextlib.closing(Worker(path)) as worker:
        for life in (1, 2, 3):
            with serving(config(4), path):
                eventually(lambda: len(worker.mappings) == life, "no mapping arrives")  # noqa: B023 - called at once
        kept = worker.mappings[0].data
        kept[:] = 7
        worker.mappings.clear()
        eventually(lambda: len(memfds() - before) <= 1, "old memory is kept")
        assert kept[3, 4095] == 7
        del kept
        eventually(lambda: memfds() <= before, "old memory is kept")


def test_memory_of_a_server_that_is_gone_is_not_kept_until_the_next_one(path: Path) -> None:
    """The next one may need it: what is mapped counts as used when it looks for memory."""
    with contextlib.closing(Worker(path)) as worker:
        with serving(config(4), path):
            eventually(lambda: worker.current is not None, "no mapping arrives")
        eventually(lambda: worker.current is None, "old memory is kept")
        with serving(config(4), path):
            eventually(lambda: worker.current is not None, "no mapping arrives")
            assert worker.current is worker.mappings[1]


def test_memory_that_cannot_be_prefaulted_is_used_all_the_same_and_told_of_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    pinned = list[HostMapping]()

    def pin(mapping: HostMapping, is_over: Callable[[], bool]) -> bool:
        pinned.append(mapping)
        return True

    monkeypatch.setattr(mapping_module, "_fault_in", refused)
    with (
        caplog.at_level(logging.WARNING),
        serving(config(4), path),
        contextlib.closing(engine(path)) as scheduler,
        contextlib.closing(Worker(path, pin=pin)) as worker,
    ):
        eventually(lambda: pinned != [], "it does not come to be pinned")
        eventually(
            lambda: scheduler.put_match(ALICE, keys(1)).task_id != 0, "the worker never counts"
        )
        assert pinned == worker.mappings == [worker.current]
    told = [r.message for r in caplog.records if "prefault" in r.message]
    assert told == ["this worker could not prefault host memory: Cannot allocate memory"]


def test_memory_that_is_not_to_be_pinned_yet_is_pinned_later(path: Path) -> None:
    asked: list[bytes] = []

    def pin(mapping: HostMapping, is_over: Callable[[], bool]) -> bool:
        assert not is_over()
        asked.append(mapping.server_id)
        return len(asked) == 3

    with contextlib.closing(Worker(path, pin=pin)) as worker, serving(config(4), path) as server:
        eventually(lambda: len(asked) == 3, "it is not tried again")
        assert server.manager is not None
        assert {*asked} == {server.manager.server_id}
        assert len(worker.mappings) == 1


def test_a_server_that_goes_before_its_memory_is_pinned_is_noticed(path: Path) -> None:
    """An engine that nobody asks anything takes no step, for as long as that is."""
    with contextlib.closing(Worker(path, pin=lambda mapping, is_over: False)) as worker:
        with serving(config(4), path):
            eventually(lambda: worker.current is not None, "no mapping arrives")
        eventually(lambda: worker.current is None, "old memory is kept")
        with serving(config(4), path):
            eventually(lambda: worker.current is not None, "no mapping arrives")


class LyingServer:
    """Says that its memory is larger than it is."""

    def __init__(self, path: Path, *, descriptor: bool) -> None:
        self.seen = 0
        self._descriptor = descriptor
        self._listener = sockets.listen(path)
        self._listener.settimeout(0.1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        import socket

        mapping = HostMapping.create(4, 4096, b"s" * 16)
        frame = p.encode(p.Welcome(0, b"s" * 16, 5, 4096))
        while not self._stop.is_set():
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            with sock, contextlib.suppress(OSError):
                if self._descriptor:
                    socket.send_fds(sock, [frame], [mapping.fd])
                else:
                    sock.sendall(frame)
                sock.settimeout(1.0)
                while sock.recv(4096):
                    pass
            self.seen += 1
        mapping.close()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._listener.close()


@pytest.mark.parametrize("descriptor", [True, False])
def test_server_that_lies_is_tried_again_and_told_of_once(
    path: Path, descriptor: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        contextlib.closing(LyingServer(path, descriptor=descriptor)) as server,
        contextlib.closing(Worker(path, patience=Patience(0.0))) as worker,
    ):
        before = memfds()
        eventually(lambda: server.seen > 3, "it is not tried again")
        assert worker.mappings == []
        assert len(memfds() - before) <= 2  # the one being offered, at both ends
    told = [r.message for r in caplog.records if "no cache server" in r.message]
    assert len(told) == 1


def test_worker_that_ends_does_not_complain_of_a_server_that_has_not_answered(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(sockets.listen(path)) as listener, caplog.at_level(logging.WARNING):
        worker = Worker(path, patience=Patience(0.0))
        sock, _ = listener.accept()
        with sock:
            assert sock.recv(4096)  # the hello
            worker.close()
    assert caplog.text == ""


def test_absent_server_is_told_of_after_a_while_and_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        contextlib.closing(Worker(path, patience=Patience(0.05))),
    ):
        eventually(lambda: "no cache server" in caplog.text, "nothing is said")
        eventually(
            lambda: len([r for r in caplog.records if "no cache server" in r.message]) == 1,
            "it is said twice",
        )


def test_server_that_starts_behind_its_workers_is_not_missed_before_the_engine_runs(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    looked: list[bool] = []

    def awaits_engine() -> bool:
        looked.append(len(looked) < 3)
        return looked[-1]

    with (
        caplog.at_level(logging.WARNING),
        contextlib.closing(Worker(path, patience=Patience(0.05, awaits_engine))),
    ):
        eventually(lambda: "no cache server" in caplog.text, "nothing is said")
    assert looked[:3] == [True] * 3
    assert not looked[3]


def test_a_server_that_stays_away_is_asked_for_less_and_less(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time takes a core from an engine that computes on all of them."""
    asked: list[float] = []

    def absent(*_: object) -> None:
        asked.append(time.monotonic())
        raise ServerUnavailable("nobody answers")

    monkeypatch.setattr(attach, "ManagerClient", absent)
    worker = Worker(path)
    time.sleep(2.5)  # how often it is asked in that time is the question
    worker.close()
    assert 1 < len(asked) <= 25

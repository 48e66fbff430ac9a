"""The scheduler half's line to servers that are wrong, silent or away."""

import contextlib
import gc
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.caches import ALICE, BLOCK_BYTES, PATIENCE_SECONDS, config, eventually
from tests.server.harness import serving, worker

from kvstrata.core.errors import ConfigError, KVStrataError, ProtocolError, ServerUnavailable
from kvstrata.integration.vllm.link import CacheLink
from kvstrata.server import protocol as p
from kvstrata.server import sockets


def hello() -> p.Hello:
    return p.Hello(0, p.PROTOCOL_VERSION, "engine", "e", BLOCK_BYTES)


@contextlib.contextmanager
def linked(path: Path, **settings: Any) -> Iterator[CacheLink]:
    """A line of an engine that does nothing; it tries often unless *settings* say otherwise."""
    link = CacheLink(config(4, **({"reconnect_seconds": 0.01} | settings)), path, hello(), None)
    with contextlib.suppress(ServerUnavailable):
        link.connect(PATIENCE_SECONDS)
    try:
        yield link
    finally:
        link.close()
        assert redials() == []


def redials() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvstrata-redial"]


class Impostor:
    """Listens at a socket, and gives every hello the same answer."""

    def __init__(self, path: Path, answer: p.Reply) -> None:
        self.hellos = 0
        self._answer = answer
        self._listener = sockets.listen(path)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                with sock:
                    sock.recv(1 << 16)
                    self.hellos += 1
                    sock.sendall(p.encode(self._answer))
                    while sock.recv(1 << 16):
                        pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


OBJECTIONS = pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (p.Number(0, 0), ProtocolError),
        (p.Refused(0, ConfigError.code, "another model", None), ConfigError),
    ],
    ids=["nonsense", "refusal"],
)


@OBJECTIONS
def test_engine_that_is_refused_when_it_starts_leaves_no_thread(
    tmp_path: Path, answer: p.Reply, kind: type[KVStrataError]
) -> None:
    with contextlib.closing(Impostor(tmp_path / "s", answer)):
        link = CacheLink(config(4), tmp_path / "s", hello(), None)
        with pytest.raises(kind):
            link.connect(PATIENCE_SECONDS)
        assert redials() == []
        link.close()


@OBJECTIONS
def test_another_answer_than_welcome_is_no_line_and_no_exception(
    tmp_path: Path, answer: p.Reply, kind: type[KVStrataError], caplog: pytest.LogCaptureFixture
) -> None:
    """An exception here would end vLLM's engine."""
    path = tmp_path / "s"
    with linked(path) as link, contextlib.closing(Impostor(path, answer)) as impostor:
        eventually(lambda: impostor.hellos >= 3, "nobody asks again")
        link.tick()
        assert not link.ready
        assert link.number == 0
        told = [r for r in caplog.records if r.getMessage().startswith("going on without")]
        assert len(told) <= 2  # that there is no server, and then what this one says


def test_server_that_accepts_nobody_holds_no_step(tmp_path: Path) -> None:
    """Its queue of connections is full: a connect that waits would wait for an hour here."""
    path = tmp_path / "s"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(sockets.listen(path))
        listener.listen(0)
        while True:
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            if waiting.connect_ex(str(path)):
                break
        link = stack.enter_context(linked(path, lookup_timeout_seconds=3600.0))
        link.tick()
        link._redial.look()
        assert not link.ready


# -- an engine that does nothing -----------------------------------------------------------------


def has_called(link: CacheLink, server_id: bytes) -> bool:
    """Whether a line to that server waits for the next step."""
    welcomed = link._redial._welcomed
    reply = welcomed.client.welcome.reply if welcomed is not None else None
    return isinstance(reply, p.Welcome) and reply.server_id == server_id


def test_idle_engine_comes_back_by_itself_and_its_next_step_finds_the_line(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with contextlib.ExitStack() as stack:
        with serving(config(4), path), contextlib.closing(worker(path)):
            link = stack.enter_context(linked(path))
            assert link.ready
            first = link.server_id
        for life in (2, 3):  # the second is not noticed by any step
            with serving(config(4), path) as server:
                assert server.manager is not None
                server_id = server.manager.server_id
                eventually(partial(has_called, link, server_id), "it does not come back")
                assert [each["session"] for each in server.manager.stats().engines] == ["e"]
                assert link.number == 1
                assert link.server_id == first
                if life == 3:
                    link.tick()
                    assert link.ready
                    assert link.number == 2
                    assert link.server_id == server_id


def test_server_is_called_once_in_a_pause(tmp_path: Path) -> None:
    path = tmp_path / "s"
    link = CacheLink(config(4, reconnect_seconds=3600), path, hello(), None)
    with serving(config(4), path), contextlib.closing(worker(path)):
        link.connect(PATIENCE_SECONDS)
    refuses = Impostor(path, p.Refused(0, ConfigError.code, "no", None))
    link._redial._next_try = 0.0  # an hour later
    for _ in range(100):
        link._redial.look()
        link.tick()
    assert refuses.hellos <= 1
    eventually(lambda: refuses.hellos == 1, "nobody calls")
    refuses.close()
    link.close()


def test_thread_ends_with_a_line_that_nobody_has_any_more(tmp_path: Path) -> None:
    """vLLM does not always call shutdown; the lifeline of an embedded server hangs on this."""
    link = CacheLink(config(4, reconnect_seconds=0.01), tmp_path / "s", hello(), None)
    with pytest.raises(ServerUnavailable):
        link.connect(0.1)
    assert len(redials()) == 1
    del link
    gc.collect()
    eventually(lambda: redials() == [], "the thread stays")


def test_no_write_begins_once_the_next_server_may_have_been_told_which_run(tmp_path: Path) -> None:
    """It may be the same server: it would give the slots to somebody else."""
    path = tmp_path / "s"
    with serving(config(4), path) as server, contextlib.closing(worker(path)), linked(path) as link:
        assert link.write_begins(1)
        assert link._client is not None
        link._client.shutdown()
        eventually(lambda: link._redial._welcomed is not None, "the line is not made anew")
        assert link._redial._welcomed is not None
        assert link._redial._welcomed.running == [1]
        assert not link.write_begins(2)
        link.write_ended(1)
        link.tick()
        assert link.write_begins(3)
        assert server.manager is not None
        link._client.shutdown()
        eventually(lambda: link._redial._welcomed is not None, "the line is not made anew")
        assert link._redial._welcomed.running == [3]


def namespace(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_drops_owed_to_a_server_that_is_away_are_bounded_and_the_first_is_kept(
    tmp_path: Path,
) -> None:
    """Of the first namespace there may be blocks from before; the others nobody can name again."""
    path = tmp_path / "s"
    link = CacheLink(config(4, reconnect_seconds=0.01), path, hello(), None)
    with pytest.raises(ServerUnavailable):
        link.connect(0.0)
    link.register(namespace(0), {})
    for number in range(1000):
        for _ in range(2):
            link.reset(namespace(number))
        link.register(namespace(number + 1), {})
    assert list(link._resets) == [namespace(n) for n in (0, *range(937, 1000))]
    with serving(config(4), path) as server:
        assert server.manager is not None
        dropped = list[bytes]()
        forget = server.manager.forget

        def noted(namespace: bytes) -> int:
            dropped.append(namespace)
            return forget(namespace)

        server.manager.forget = noted  # type: ignore[method-assign]  # notes and does

        def paid() -> bool:
            link.tick()
            return not link._resets

        eventually(paid, "drops stay owed")
        assert dropped == [namespace(n) for n in (0, *range(937, 1000))]
        link.close()


def test_request_that_is_too_long_for_a_frame_is_not_sent_and_the_line_stays(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    with serving(config(4), path), contextlib.closing(worker(path)):
        link = CacheLink(config(4), path, hello(), None)
        link.connect(PATIENCE_SECONDS)
        assert link.submit(p.GetMatch(0, ALICE, bytes(9 << 20))) is None
        assert link.ready
        pending = link.submit(p.GetMatch(0, ALICE, bytes(131_073 * 32)))
        assert pending is not None

        def is_answered() -> bool:
            link.poll(0.01)
            return pending.reply is not None

        eventually(is_answered, "no answer")
        assert isinstance(pending.reply, p.Refused)
        assert pending.reply.code == "limit"
        assert link.ready
        assert link.number == 1
        link.close()

"""The scheduler half's line to servers that are wrong, silent or away."""

import contextlib
import socket
import threading
from pathlib import Path

from tests.caches import ALICE, BLOCK_BYTES, PATIENCE_SECONDS, config, eventually
from tests.server.harness import serving, worker

from kvstrata.integration.vllm.link import CacheLink
from kvstrata.server import protocol as p
from kvstrata.server import sockets


def test_another_answer_to_hello_is_no_welcome_and_no_exception(tmp_path: Path) -> None:
    """An exception here would end vLLM's engine."""
    path = tmp_path / "s"

    def answer() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(p.encode(p.Number(0, 0)))
            with contextlib.suppress(OSError):
                while sock.recv(1 << 16):
                    pass

    with sockets.listen(path) as listener:
        server = threading.Thread(target=answer)
        server.start()
        link = CacheLink(config(4), path, hello(), None)

        def given_up() -> bool:
            link.tick()
            return link.number == 1 and link._client is None

        eventually(given_up, "it is believed")
        assert not link.ready
        link.close()
        server.join()


def hello() -> p.Hello:
    return p.Hello(0, p.PROTOCOL_VERSION, "engine", "e", BLOCK_BYTES)


def test_server_that_accepts_nobody_holds_no_step(tmp_path: Path) -> None:
    """Its queue of connections is full: a connect that waits would wait for an hour here."""
    path = tmp_path / "s"
    patient = config(4, lookup_timeout_seconds=3600.0)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(sockets.listen(path))
        listener.listen(0)
        while True:
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            if waiting.connect_ex(str(path)):
                break
        link = CacheLink(patient, path, hello(), None)
        link.tick()
        assert link._client is None
        assert not link.ready
        link.close()


def namespace(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_drops_owed_to_a_server_that_is_away_are_bounded_and_the_first_is_kept(
    tmp_path: Path,
) -> None:
    """Of the first namespace there may be blocks from before; the others nobody can name again."""
    path = tmp_path / "s"
    link = CacheLink(config(4, reconnect_seconds=0.001), path, hello(), None)
    link.register(namespace(0), {})
    for number in range(1000):
        for _ in range(2):
            link.reset(namespace(number))
        link.register(namespace(number + 1), {})
    assert list(link._resets) == [namespace(n) for n in (0, *range(937, 1000))]
    with serving(config(4), path) as server:
        assert server.manager is not None
        dropped = list[bytes]()
        reset = server.manager.reset

        def noted(namespace: bytes) -> int:
            dropped.append(namespace)
            return reset(namespace)

        server.manager.reset = noted  # type: ignore[method-assign]  # notes and does

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

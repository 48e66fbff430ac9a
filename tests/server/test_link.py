"""What the scheduler half makes of a server that it does not understand."""

import contextlib
import threading
from pathlib import Path

from tests.caches import BLOCK_BYTES, config, eventually

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
        hello = p.Hello(0, p.PROTOCOL_VERSION, "engine", "e", BLOCK_BYTES)
        link = CacheLink(config(4), path, hello, None)

        def given_up() -> bool:
            link.tick()
            return link.number == 1 and link._client is None

        eventually(given_up, "it is believed")
        assert not link.ready
        link.close()
        server.join()

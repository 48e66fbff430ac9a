"""Files of prompts that a page of the program's own is sent: who sends, or reads, goes away."""

import http.client
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from tests.cli.processes import environment, running, until
from tests.page.model import MODEL, PARTS
from tests.page.pages import TOKEN, Shown, shown
from tests.ports import free_port

from kvstrata.server.page.guard import FILES

TARGET = f"/api/warm-file?namespace={MODEL.hex()}&name=x"


def headers(length: int) -> dict[str, str]:
    return {
        "Authorization": f"Bearer {TOKEN}",
        "Content-Type": FILES.media_type,
        "Content-Length": str(length),
    }


def address(page: Shown) -> tuple[str, int]:
    host, _, port = page.url.removeprefix("http://").removesuffix("/").partition(":")
    return host, int(port)


def post(page: Shown, content: bytes) -> tuple[int, str]:
    with closing(http.client.HTTPConnection(*address(page), timeout=60)) as connection:
        connection.request("POST", TARGET, content, headers(len(content)))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def children(process: int) -> set[int]:
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return {int(child) for task in tasks for child in task.read_text().split()}


def readers(process: int) -> set[int]:
    """Processes that read a file for it."""
    return {child for child in children(process) if b"spawn_main" in command(child)}


def command(process: int) -> bytes:
    """None of a process that has ended, though nobody may have taken note."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def arguments(place: Path) -> tuple[str, ...]:
    token = place / "token"
    token.write_text(TOKEN)
    return ("--admin", "--token-file", str(token))


def test_half_a_file_leaves_nothing_and_a_file_too_long_is_refused(tmp_path: Path) -> None:
    with shown(tmp_path, *arguments(tmp_path)) as page:
        for reset in (False, True):
            with closing(socket.create_connection(address(page))) as half:
                host = "{}:{}".format(*address(page))
                said = {"Host": host} | headers(1000)
                lines = [f"POST {TARGET} HTTP/1.1", *(f"{k}: {v}" for k, v in said.items())]
                half.sendall("\r\n".join([*lines, "", "[1, 2"]).encode())
                if reset:
                    linger = (1).to_bytes(4, "little") + bytes(4)
                    half.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        until(lambda: post(page, b"[1")[0] == 400, 30, page.log)
        status, said_back = post(page, b" " * (FILES.most_bytes + 1))
        assert (status, "16,777,216" in said_back) == (413, True)
        assert not readers(page.process.pid)
        assert "Traceback" not in page.log.read_text()


def test_a_page_of_a_server_that_is_not_there_says_what_to_start_and_waits_for_it(
    tmp_path: Path,
) -> None:
    log, nowhere = tmp_path / "page.log", tmp_path / "none"
    listen = f"127.0.0.1:{free_port()}"
    with running("page", "--socket", str(nowhere), "--listen", listen, log=log) as page:
        until(lambda: "is shown at" in log.read_text() or page.poll() is not None, 30, log)
        assert page.poll() is None
    assert f"warning: no server answers at {nowhere}: " in log.read_text()
    assert f"hint: start one with 'kvstrata server --socket {nowhere}'" in log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_page_that_is_told_to_end_ends_with_0(tmp_path: Path, sent: int) -> None:
    with shown(tmp_path) as page:
        page.process.send_signal(sent)
        assert page.process.wait(30) == 0
        assert "Traceback" not in page.log.read_text()


_SIGNALLED_EARLY = """
import asyncio, os, sys
SENT = int(sys.argv.pop())
made = asyncio.BaseEventLoop.__init__
def signalled(loop):
    os.kill(os.getpid(), SENT)
    made(loop)
asyncio.BaseEventLoop.__init__ = signalled
from kvstrata.cli.main import app
app()
"""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_page_that_is_told_to_end_while_it_begins_ends_with_0(tmp_path: Path, sent: int) -> None:
    where = ("--socket", f"{tmp_path}/none", "--listen", f"127.0.0.1:{free_port()}")
    done = subprocess.run(
        [sys.executable, "-c", _SIGNALLED_EARLY, "page", *where, str(int(sent))],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment(),
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_page_that_ends_while_it_reads_leaves_no_process(tmp_path: Path, sent: int) -> None:
    with shown(tmp_path, *arguments(tmp_path)) as page:
        page.engine.register_namespace(MODEL, PARTS)
        line = str([1] * 100_000).encode() + b"\n"
        told: list[object] = []

        def ask() -> None:
            try:
                told.append(post(page, line * 50))
            except (OSError, http.client.HTTPException) as e:
                told.append(e)

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: bool(readers(page.process.pid)), 30, page.log)
        (reader,) = readers(page.process.pid)
        page.process.send_signal(sent)
        page.process.wait(30)
        asking.join(30)
        assert "200" not in str(told)
        until(lambda: not command(reader), 10, page.log)

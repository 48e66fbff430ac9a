"""The page as a process of its own, before a server of the program's own."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from playwright.sync_api import Browser, Page
from tests.cli.processes import running, until
from tests.cli.traffic import engine, find, prompt, save, serving
from tests.ports import free_port

from kvstrata.server.client import ManagerClient

TOKEN = "0123456789abcdef0123"
HOSTILE = "<img src=x onerror=\"document.title='stolen'\"><script>1</script>"


class Shown(NamedTuple):
    url: str
    socket: Path
    engine: ManagerClient
    log: Path
    process: subprocess.Popen[bytes]


@contextmanager
def shown(place: Path, *arguments: str) -> Iterator[Shown]:
    """A server with a disk and 12 blocks of two prompts, and the page of it."""
    address = f"127.0.0.1:{free_port()}"
    disk = f"{place / 'disk'}:64MiB"
    log = place / "page.log"
    with (
        serving(place, "--host-size", "4MiB", "--disk", disk) as path,
        engine(path, HOSTILE[:256], model=HOSTILE) as client,
    ):
        save(client, prompt("a", 8))
        save(client, [*prompt("a", 4), *prompt("b", 4)])
        for _ in range(3):
            find(client, prompt("a", 8))
        find(client, [*prompt("a", 4), *prompt("b", 4)])
        with running(
            "page", "--socket", str(path), "--listen", address, *arguments, log=log
        ) as process:
            until(lambda: "is shown at" in log.read_text() or process.poll() is not None, 30, log)
            assert process.poll() is None, log.read_text()
            yield Shown(f"http://{address}/", path, client, log, process)
        assert TOKEN not in log.read_text()


@contextmanager
def opened(
    browser: Browser, url: str, *, width: int = 1280, refused: Sequence[int] = (401,)
) -> Iterator[Page]:
    """The page; fails if the browser complains about anything but answers of status *refused*."""
    context = browser.new_context(viewport={"width": width, "height": 900})
    context.set_default_timeout(20_000)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda m: complaints.append(m.text) if m.type != "info" else None)
    page.on("pageerror", lambda e: complaints.append(str(e)))
    ours = url.partition("#")[0]
    page.on("request", lambda r: complaints.append(r.url) if not r.url.startswith(ours) else None)
    page.goto(url)
    yield page
    context.close()
    known = tuple(f"status of {status}" for status in refused)
    assert [each for each in complaints if not any(one in each for one in known)] == []

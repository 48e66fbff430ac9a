"""Take the pictures of the page that the docs show, of a real server under real traffic.

    python scripts/screenshot.py docs/images

Starts `kvstrata server` with host memory and a disk, plays a synthetic trace of `kvstrata make-trace`
to it as an engine would, and opens `kvstrata page` in Chromium. Needs Debian's chromium and
playwright.
"""

import hashlib
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from playwright.sync_api import sync_playwright

from kvstrata.core.errors import ServerUnavailable
from kvstrata.manager.tasks import UNSETTLED
from kvstrata.replay.generate import generate
from kvstrata.server import protocol as p
from kvstrata.server.client import ManagerClient, observe

BLOCK_BYTES = 64 << 10
REQUESTS = 20_000
SECONDS = 75.0
MODELS = {b"\x5a" * 16: "synthetic-chat-8b", b"\xc3" * 16: "synthetic-agent-70b"}
SIZES = {
    "page.png": (1280, 1400, "light"),
    "page-dark.png": (1280, 1400, "dark"),
}


@contextmanager
def running(*arguments: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-m", "kvstrata", *arguments])
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def engine(path: Path) -> Iterator[ManagerClient]:
    """An engine of one worker that copies nothing: the bytes do not matter here."""
    with ExitStack() as stack:
        hello = p.Hello(0, p.PROTOCOL_VERSION, "engine", "engine-1", BLOCK_BYTES)
        client = stack.enter_context(closing(ManagerClient(path, hello)))
        client.wait_welcome(10)
        hello = p.Hello(0, p.PROTOCOL_VERSION, "worker", "engine-1", BLOCK_BYTES)
        worker = stack.enter_context(closing(ManagerClient(path, hello)))
        worker.wait_welcome(10)
        mapped = worker.submit(p.Mapped(0))
        while mapped.reply is None:
            worker.poll(1)
        for namespace, model in MODELS.items():
            parts = {"engine": "trace", "model": model, "tokens_per_block": "512"}
            client.register_namespace(namespace, parts)
        yield client


def keys_of(hash_ids: Sequence[int]) -> list[bytes]:
    key, keys = b"", []
    for number in hash_ids:
        key = hashlib.sha256(key + number.to_bytes(8, "big")).digest()
        keys.append(key)
    return keys


def serve(client: ManagerClient, namespace: bytes, keys: list[bytes], name: str) -> None:
    """One request: load what is there, save the rest."""
    found = client.get_match(namespace, keys, request=name)
    if found.task_id:
        for _ in range(20):
            found = client.try_wait([found.task_id]).get(found.task_id, found)
            if found.state not in UNSETTLED:
                break
            client.poll(0.005)
        client.launch([found.task_id])
        client.complete([found.task_id])
    saved = client.put_match(namespace, keys, request=name)
    if saved.task_id:
        client.launch([saved.task_id])
        client.complete([saved.task_id])


def drive(path: Path, stop: threading.Event) -> None:
    """Play the trace, faster and slower, until *stop*."""
    with engine(path) as client:
        names = list(MODELS)
        for number, request in enumerate(generate(REQUESTS, seconds=3600.0, seed=3, mix=None)):
            if stop.is_set():
                return
            serve(client, names[number % 3 == 0], keys_of(request.hash_ids), f"cmpl-{number}")
            stop.wait(0.02 + 0.03 * (number // 400 % 2))


def wait_for(path: Path) -> None:
    for _ in range(200):
        try:
            observe(path).close()
        except ServerUnavailable:
            time.sleep(0.1)  # it starts
        else:
            return
    raise SystemExit("the server does not start")


def main(folder: Path) -> None:
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = place / "kvstrata.sock"
        tiers = ("--host-size", "192MiB", "--disk", f"{place / 'disk'}:2GiB")
        size = ("--block-bytes", str(BLOCK_BYTES))
        stack.enter_context(running("server", "--socket", str(path), *tiers, *size))
        wait_for(path)
        stop = threading.Event()
        traffic = threading.Thread(target=drive, args=[path, stop])
        traffic.start()
        stack.callback(traffic.join)
        stack.callback(stop.set)
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            port = free.getsockname()[1]
        stack.enter_context(running("page", "--socket", str(path), "--listen", f"127.0.0.1:{port}"))
        time.sleep(SECONDS)  # charts need some history
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        stack.callback(browser.close)
        for name, (width, height, scheme) in SIZES.items():
            context = browser.new_context(
                viewport={"width": width, "height": height},
                color_scheme="dark" if scheme == "dark" else "light",
            )
            view = context.new_page()
            view.goto(f"http://127.0.0.1:{port}/")
            view.wait_for_selector(".tree li")
            time.sleep(3)  # the prompts are asked for every other second
            view.screenshot(path=folder / name)
            print(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Run a server in this process: until a signal, or until the engine that started it is gone."""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import IO, Final

import msgspec

from kvstrata.core.config import Config, config_from_json
from kvstrata.core.errors import KVStrataError
from kvstrata.core.interpreter import hand_over_sooner
from kvstrata.core.types import EXACT
from kvstrata.manager.manager import OnPrefault
from kvstrata.server.log_thread import logging_on_a_thread
from kvstrata.server.server import Server

_log = logging.getLogger(__name__)

_LAST_SECONDS: Final = 1.0  # for threads that have been told to end
_LOG_FORMAT: Final = "%(levelname)s %(asctime)s [%(name)s] %(message)s"


class ChildOrders(msgspec.Struct):
    """What an engine tells the server that it starts, on its standard input."""

    config_json: str
    socket: str
    block_bytes: int
    block_format: str = EXACT


class ChildReady(msgspec.Struct):
    """What the child answers, one line on its standard output: it serves, or why not."""

    pid: int
    error: str = ""  # code of the error; empty when it serves
    message: str = ""
    hint: str | None = None


def run_server(
    config: Config,
    path: Path,
    *,
    block_bytes: int | None = None,
    on_prefault: OnPrefault | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT."""
    hand_over_sooner()
    server = Server(config, path, block_bytes=block_bytes, on_prefault=on_prefault)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    with logging_on_a_thread() as log:
        _log.info("ready at %s", path)
        server.serve()
    if log.is_stuck or _is_held():
        os._exit(0)


def run_child(orders_from: IO[bytes], ready_to: IO[bytes]) -> int:
    """Serve until the engine at the other end of *orders_from* closes it or dies."""
    hand_over_sooner()
    orders = msgspec.json.decode(orders_from.readline(), type=ChildOrders)
    try:
        config = config_from_json(orders.config_json)
        server = Server(
            config,
            Path(orders.socket),
            block_bytes=orders.block_bytes,
            block_format=orders.block_format,
        )
    except KVStrataError as e:
        message = str(e.args[0]) if e.args else str(e)
        _answer(ready_to, ChildReady(os.getpid(), e.code, message, e.hint))
        return 1

    def stop_with_engine() -> None:
        orders_from.read()
        server.stop()

    threading.Thread(target=stop_with_engine, name="kvstrata-lifeline", daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine decides when it ends
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # its terminal may stop what logs from behind
    _answer(ready_to, ChildReady(os.getpid()))
    with logging_on_a_thread():
        server.serve()
    return 0


def _is_held() -> bool:
    """Whether threads of ours are left, in a call of a disk that does not answer.

    Python then waits for them when it exits, for ever.
    """
    give_up = time.monotonic() + _LAST_SECONDS
    ours = [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("kvstrata-") and not thread.daemon
    ]
    for thread in ours:
        thread.join(max(0.0, give_up - time.monotonic()))
    return any(thread.is_alive() for thread in ours)


def _answer(ready_to: IO[bytes], ready: ChildReady) -> None:
    with contextlib.suppress(BrokenPipeError):
        ready_to.write(msgspec.json.encode(ready) + b"\n")
        ready_to.flush()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT, stream=sys.stderr)
    # The server becomes nobody's child: vLLM kills all processes below it when it shuts down, and
    # the server has yet to write to disk what is only in host memory.
    if os.fork():
        os._exit(0)
    code = run_child(sys.stdin.buffer, sys.stdout.buffer)
    os._exit(code)  # threads in a read of a hung disk must not hold the process

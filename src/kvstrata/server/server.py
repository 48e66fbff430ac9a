"""The cache server: a ``KVManager`` behind a unix socket.

One thread answers all clients and waits for none of them, nor for a disk: what a client does not
take is kept for it, up to a limit, and what waits for disks is done on a thread of its own.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError, KVStrataError
from kvstrata.core.types import EXACT, BlockFormat
from kvstrata.manager.manager import KVManager, OnPrefault
from kvstrata.observe.event_log import check_event_log
from kvstrata.server import sockets
from kvstrata.server.announcer import Announcer
from kvstrata.server.client_log import ClientLog
from kvstrata.server.exposition import exposition
from kvstrata.server.limits import Limits
from kvstrata.server.metrics_port import MetricsPort
from kvstrata.server.slow_lane import SlowLane
from kvstrata.server.switchboard import Switchboard
from kvstrata.storage.disk_directory import Reservation
from kvstrata.storage.engine import check_directories_of, reserve_directories_of

T = TypeVar("T")

_log = logging.getLogger(__name__)

_LAST_EVENTS_SECONDS: Final = 1.0  # for routers to hear what happened last


class Server:
    """Serves until ``stop``.

    The block size decides the geometry of all tiers. It is given, or told by the first engine;
    an engine with another one is refused.

    Directories of tiers that no engine could use are a ``ConfigError`` at once. So is a disk tier
    that another process has and does not let go of in a few seconds; from then on it is this server's, whether or not an engine has joined.
    """

    def __init__(
        self,
        config: Config,
        path: Path,
        *,
        block_bytes: int | None = None,
        block_format: BlockFormat = EXACT,
        on_prefault: OnPrefault | None = None,
        limits: Limits = Limits(),  # noqa: B008 - immutable
    ) -> None:
        self.config = config
        self.path = path
        self.limits = limits
        self.client_log = ClientLog()
        self._on_prefault = on_prefault
        self._manager: KVManager | None = None
        self._stopping = threading.Event()
        if block_bytes is None:
            check_directories_of(config.tiers)
        if config.event_log is not None:
            check_event_log(config.event_log)
        self._announcer = Announcer(config.kv_events, config) if config.kv_events else None
        try:
            self._listener = sockets.listen(path)
            self._metrics_port = self._open_metrics_port()
        except KVStrataError:
            self._end_events()
            raise
        self._listener.setblocking(False)
        self._switchboard = Switchboard(self, self._listener)
        self._slow_lane = SlowLane(self.post)
        self._reservation: Reservation | None = None
        try:
            if block_bytes is not None:
                self.open(block_bytes, block_format)
            else:
                self._reservation = reserve_directories_of(config.tiers)
        except KVStrataError:
            self._close()
            raise

    @property
    def manager(self) -> KVManager | None:
        return self._manager

    @property
    def clients(self) -> int:
        """How many are connected."""
        return len(self._switchboard)

    def open(self, block_bytes: int, block_format: BlockFormat) -> KVManager:
        """The manager; raises ``ConfigError`` if it was opened for other blocks.

        The first call waits until the tiers are open. It is made before ``serve``, or on the slow
        lane.
        """
        wanted = self.config.block_format
        if block_format.partition(" ")[0] != wanted:
            raise ConfigError(
                f"the engine wants blocks kept as {block_format!r}, this server keeps {wanted!r}",
                hint="set block_format alike for the server and its engines",
            )
        manager = self._manager
        if manager is None:
            manager = self._manager = KVManager(
                self.config,
                block_bytes=block_bytes,
                block_format=block_format,
                on_prefault=self._on_prefault,
                reservation=self._reservation,
            )
            if self._announcer is not None:
                self._announcer.follow(manager.feed)
        if manager.block_format != block_format:
            raise ConfigError(
                f"this server keeps blocks as {manager.block_format!r}, not as {block_format!r}",
                hint="start one server for each type of elements, each with its own socket",
            )
        if manager.block_bytes != block_bytes:
            raise ConfigError(
                f"blocks of {block_bytes} bytes do not fit this server, whose blocks take "
                f"{manager.block_bytes}: it serves another model or tokens_per_block",
                hint="start one server for each block size, each with its own socket",
            )
        return manager

    def post(self, call: Callable[[], None]) -> None:
        """Have *call* made on the thread that serves. Thread-safe."""
        self._switchboard.post(call)

    def submit(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Have *work* done where it may wait, and *done* be posted with what came of it."""
        self._slow_lane.submit(work, done)

    def serve(self) -> None:
        """Answer clients until ``stop`` is called from another thread or a signal handler."""
        while not self._stopping.is_set():
            self._switchboard.turn()
        _log.info("shutting down; connections: %d, blocks to be written: %d", *self._unfinished())
        self._close()

    def stop(self) -> None:
        """End ``serve``; blocks not yet on disk are written first, within the drain timeout."""
        self._stopping.set()
        self.post(lambda: None)

    def _open_metrics_port(self) -> MetricsPort | None:
        if self.config.metrics is None:
            return None
        try:
            return MetricsPort(self.config.metrics, self._exposition)
        except KVStrataError:
            self.path.unlink(missing_ok=True)
            self._listener.close()
            raise

    def _exposition(self) -> bytes:
        manager = self._manager
        return exposition({str(self.path): manager.stats()} if manager is not None else {})

    def _end_events(self) -> None:
        if self._announcer is not None:
            self._announcer.close(_LAST_EVENTS_SECONDS)

    def _unfinished(self) -> tuple[int, int]:
        """Connections, and blocks that wait for a lower tier."""
        tiers = self._manager.stats().tiers if self._manager is not None else []
        return self.clients, sum(tier.waiting_blocks for tier in tiers)

    def _close(self) -> None:
        self.path.unlink(missing_ok=True)
        self._listener.close()
        self._switchboard.close()
        if self._metrics_port is not None:
            self._metrics_port.close()
        self._end_events()
        self._slow_lane.close(self.config.drain_timeout_seconds)
        if self._manager:
            self._manager.close()
        if self._reservation is not None:
            self._reservation.close()
        self._switchboard.close_poller()

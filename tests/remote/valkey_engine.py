"""Valkey or Redis as the fault suite sees it: one server with a password."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.remote.proxy import Proxy
from tests.remote.subject import BoundedEngine
from tests.remote.valkey_servers import Server, name_of

from kvstrata.core.types import StoreKey
from kvstrata.storage.remote.valkey.address import Login
from kvstrata.storage.remote.valkey.store import ValkeyAccess, ValkeyStore
from kvstrata.storage.store import Store

_PASSWORD: Final = "sesame"
_PREFIX: Final = "fault"
_ROOM_BYTES: Final = 8 << 20


class ValkeyEngine(BoundedEngine):
    def start(self, folder: Path) -> None:
        self._server = Server(folder, "--requirepass", _PASSWORD)

    def address(self) -> tuple[str, int]:
        return self._server.address

    def open(
        self,
        *,
        block_bytes: int,
        proxy: Proxy | None = None,
        host: str | None = None,
        wrong_credentials: bool = False,
        ttl_seconds: float | None = None,
        timeout_seconds: float = 1.0,
    ) -> Store:
        port = self._server.port if proxy is None else proxy.port
        return ValkeyStore(
            f"valkey://{host or '127.0.0.1'}:{port}",
            block_bytes=block_bytes,
            ttl_seconds=ttl_seconds,
            timeout_seconds=timeout_seconds,
            access=ValkeyAccess(
                login=Login(password="guess" if wrong_credentials else _PASSWORD), prefix=_PREFIX
            ),
        )

    def pids(self) -> Sequence[int]:
        return [self._server.process.pid]

    def kill(self) -> None:
        self._server.kill()

    def restart(self) -> None:
        self._server.restart()

    def stop(self) -> None:
        self._server.kill()

    def raw(self, key: StoreKey) -> bytes | None:
        with self._server.client(password=_PASSWORD) as client:
            found: bytes | None = client.execute_command("GET", name_of(key, _PREFIX))
            return found

    def put_raw(self, key: StoreKey, value: bytes) -> None:
        with self._server.client(password=_PASSWORD) as client:
            client.execute_command("SET", name_of(key, _PREFIX), value)

    def fill(self) -> None:
        self._limit("noeviction")

    def let_evict(self) -> None:
        self._limit("allkeys-lru")

    def _limit(self, policy: str) -> None:
        """Until it starts again."""
        used = self._server.info("memory", password=_PASSWORD)["used_memory"]
        with self._server.client(password=_PASSWORD) as client:
            client.config_set("maxmemory-policy", policy)
            client.config_set("maxmemory", used + _ROOM_BYTES)

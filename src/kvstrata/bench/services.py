"""Servers that contenders need beside the engine: they outlive it."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvstrata.bench.contenders import Deployment, Service
from kvstrata.core.errors import ConfigError, KVStrataError

__all__ = ["ServiceFailed", "find_valkey", "free_port", "start_service"]

_START_SECONDS: Final = 120.0  # LMCache imports torch
_POLL_SECONDS: Final = 0.1


class ServiceFailed(KVStrataError):
    """A server that a contender needs does not come up."""

    code = "bench_service"


def find_valkey() -> str | None:
    """A Valkey or Redis server that can be started."""
    return shutil.which("valkey-server") or shutil.which("redis-server")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_service(
    service: Service, deployment: Deployment, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start it and return when it listens; ``ServiceFailed`` with the end of its log if it does not."""
    folder = Path(deployment.folder)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{service}.log"
    with log.open("wb") as messages:
        process = subprocess.Popen(
            _COMMANDS[service](deployment),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=messages,
            stderr=messages,
            cwd=folder,
            start_new_session=True,
        )
    give_up = time.monotonic() + _START_SECONDS
    while not _listens(service, deployment):
        if process.poll() is not None or time.monotonic() > give_up:
            process.kill()
            process.wait()
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise ServiceFailed(f"{service} has not started; its messages end:\n{tail}")
        time.sleep(_POLL_SECONDS)  # until the deadline above
    return process


def _lmcache(deployment: Deployment) -> list[str]:
    gib = deployment.host_bytes / (1 << 30)
    return [
        *(sys.executable, "-m", "lmcache.cli.main", "server"),
        *("--host", "127.0.0.1", "--port", str(deployment.port)),
        *("--http-host", "127.0.0.1", "--http-port", str(free_port())),
        *("--shm-name", deployment.engine_id, "--l1-size-gb", str(gib)),
        *("--chunk-size", "256", "--eviction-policy", "LRU"),
        *("--supported-transfer-mode", "auto"),
    ]


def _valkey(deployment: Deployment) -> list[str]:
    program = find_valkey()
    if program is None:
        raise ConfigError(
            "neither valkey-server nor redis-server is installed",
            hint="install one, or leave out the contender kvstrata-remote",
        )
    return [
        *(program, "--port", str(deployment.port), "--bind", "127.0.0.1"),
        *("--save", "", "--appendonly", "no", "--dir", deployment.folder),
        *("--maxmemory", str(deployment.disk_bytes), "--maxmemory-policy", "allkeys-lru"),
    ]


def _kvstrata(deployment: Deployment) -> list[str]:
    return [
        *(sys.executable, "-m", "kvstrata", "server"),
        *("--socket", f"{deployment.folder}/server.sock"),
        *("--host-size", str(deployment.host_bytes)),
    ]


_COMMANDS: Final[dict[Service, Callable[[Deployment], list[str]]]] = {
    "lmcache": _lmcache,
    "valkey": _valkey,
    "kvstrata": _kvstrata,
}


def _listens(service: Service, deployment: Deployment) -> bool:
    if service == "kvstrata":
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            return probe.connect_ex(f"{deployment.folder}/server.sock") == 0
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", deployment.port)) == 0

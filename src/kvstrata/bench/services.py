"""Servers that contenders need beside the engine: they outlive it."""

import contextlib
import ctypes
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Container
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

from kvstrata.bench.contenders import Deployment, Service
from kvstrata.core.errors import ConfigError, KVStrataError

__all__ = ["ServiceFailed", "find_valkey", "free_ports", "start_service", "versions"]

_START_SECONDS: Final = 120.0  # LMCache imports torch
_POLL_SECONDS: Final = 0.1
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


class ServiceFailed(KVStrataError):
    """A server that a contender needs does not come up."""

    code = "bench_service"


def find_valkey() -> str | None:
    """A Valkey or Redis server that can be started."""
    return shutil.which("valkey-server") or shutil.which("redis-server")


def versions(services: Container[Service], lmcache: Path | None) -> dict[str, str]:
    """Of those of *services* that are not KVStrata's. Redis takes the place of Valkey."""
    found: dict[str, str] = {}
    if "lmcache" in services and lmcache is not None:
        found |= {d.name: d.version for d in distributions(name="lmcache", path=[str(lmcache)])}
    program = find_valkey() if "valkey" in services else None
    if program is not None:
        command = [program, "--version"]
        said = subprocess.check_output(command, text=True, timeout=10)  # it prints a line
        found[Path(program).name] = said.partition(" v=")[2].partition(" ")[0]
    return found


def free_ports(count: int) -> list[int]:
    """So many that nobody listens at, each another one."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def start_service(
    service: Service, deployment: Deployment, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start it and return when it listens; ``ServiceFailed`` with the end of its log if it does not."""
    folder = Path(deployment.folder)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{service}.log"
    libc = ctypes.CDLL(None)
    with log.open("wb") as messages:
        process = subprocess.Popen(
            _COMMANDS[service](deployment),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=messages,
            stderr=messages,
            cwd=folder,
            start_new_session=True,
            # Killed with this process, also where that is killed.
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509 - one system call
        )
    give_up = time.monotonic() + _START_SECONDS
    while not _listens(service, deployment):
        if process.poll() is not None or time.monotonic() > give_up:
            process.kill()
            process.wait()
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise ServiceFailed(
                f"{service} has not started; its messages end:\n{tail}",
                hint="name the contenders that can run, with --contender and another --output",
            )
        time.sleep(_POLL_SECONDS)  # until the deadline above
    return process


def _lmcache(deployment: Deployment) -> list[str]:
    below = _BELOW_LMCACHE.get(deployment.contender)
    memory = _LMCACHE_MORE * deployment.small_host_bytes if below else deployment.host_bytes
    return [
        *(sys.executable, "-m", "lmcache.cli.main", "server"),
        *("--host", "127.0.0.1", "--port", str(deployment.port)),
        *("--http-host", "127.0.0.1", "--http-port", str(free_ports(1)[0])),
        *("--shm-name", deployment.engine_id, "--l1-size-gb", str(memory / (1 << 30))),
        *("--chunk-size", "256", "--eviction-policy", "LRU"),
        *("--supported-transfer-mode", "auto"),
        *(("--l2-adapter", json.dumps(below(deployment)), *_ROOM) if below else ()),
    ]


def _valkey(deployment: Deployment) -> list[str]:
    program = find_valkey()
    if program is None:
        raise ConfigError(
            "neither valkey-server nor redis-server is installed",
            hint=f"install one, or leave out the contender {deployment.contender}",
        )
    return [
        *(program, "--port", str(deployment.store_port), "--bind", "127.0.0.1"),
        *("--save", "", "--appendonly", "no", "--dir", deployment.folder),
        *("--maxmemory", str(deployment.disk_bytes), "--maxmemory-policy", "allkeys-lru"),
    ]


def _kvstrata(deployment: Deployment) -> list[str]:
    return [
        *(sys.executable, "-m", "kvstrata", "server"),
        *("--socket", f"{deployment.folder}/server.sock"),
        *("--host-size", str(deployment.host_bytes)),
    ]


# It loads and stores only what has room at once, and makes none in memory that is less than 80 % full: in
# that of the others a long prompt would be neither stored nor loaded. Half of this is always free soon.
_LMCACHE_MORE: Final = 2.5
_ROOM: Final = ("--eviction-trigger-watermark", "0.5")
# Its native adapters, which are its own C++.
_BELOW_LMCACHE: Final[dict[str, Callable[[Deployment], dict[str, object]]]] = {
    "lmcache-disk": lambda d: {"type": "fs_native", "base_path": f"{d.folder}/disk"},
    "lmcache-remote": lambda d: {"type": "resp", "host": "127.0.0.1", "port": d.store_port},
}
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
        port = deployment.store_port if service == "valkey" else deployment.port
        return probe.connect_ex(("127.0.0.1", port)) == 0

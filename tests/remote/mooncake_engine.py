"""A Mooncake pool of one master and one node, in a network of its own."""

import base64
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from tests.ports import free_port
from tests.remote.mooncake_metadata import Metadata
from tests.remote.own_network import own_network
from tests.remote.proxy import Fault, Proxy
from tests.remote.subject import START_SECONDS, BoundedEngine, answers, wait_until

from kvstrata.core.types import NAMESPACE_ID_BYTES, StoreKey
from kvstrata.storage.mapping import HostMapping
from kvstrata.storage.remote.mooncake.store import MooncakeNode, MooncakeStore
from kvstrata.storage.remote.value import MAGIC

_PREFIX: Final = MooncakeNode().prefix
_NODE: Final = {  # its environment
    "MC_LOG_LEVEL": "ERROR",
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
}


class _AlsoFaulty(Proxy):
    """A proxy that does what *leader* does: both stand for the same network."""

    def __init__(self, leader: Proxy, target: tuple[str, int]) -> None:
        self._leader = leader
        super().__init__(target)

    @property
    def fault(self) -> Fault:
        return self._leader.fault

    @fault.setter
    def fault(self, fault: Fault) -> None:
        self._leader.fault = fault

    @property
    def after_bytes(self) -> int:
        return self._leader.after_bytes

    @after_bytes.setter
    def after_bytes(self, count: int) -> None:
        self._leader.after_bytes = count

    @property
    def bytes_per_second(self) -> int:
        return self._leader.bytes_per_second

    @bytes_per_second.setter
    def bytes_per_second(self, number: int) -> None:
        self._leader.bytes_per_second = number


class MooncakeEngine(BoundedEngine):
    """Its servers listen on every address, hence the network: ``start`` enters, ``stop`` leaves."""

    def __init__(self, *, handshake: bool = False, segment_bytes: int = 64 << 20) -> None:
        """*handshake*: nodes ask each other, as by default, and not a metadata server. A proxy
        can only be told of with one. *segment_bytes*: what the pool holds.
        """
        self._handshake = handshake
        self._segment_bytes = segment_bytes

    def start(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._stack.enter_context(own_network())
        self._proxies: list[Proxy] = []
        self._metadata = Metadata()
        self._stack.callback(self._metadata.close)
        self._stack.callback(self._end)
        self._processes: list[subprocess.Popen[bytes]] = []
        self.port = free_port()
        self._metrics_port = free_port()
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self._metadata.data_port(self._segment)

    def open(
        self,
        *,
        block_bytes: int,
        proxy: Proxy | None = None,
        host: str | None = None,
        wrong_credentials: bool = False,  # it knows none
        ttl_seconds: float | None = None,  # nor this
        timeout_seconds: float = 1.0,
    ) -> MooncakeStore:
        port = self.port
        if proxy is not None:
            self._proxies.append(proxy)
            to_master = _AlsoFaulty(proxy, ("127.0.0.1", self.port))
            self._stack.callback(to_master.close)
            port = to_master.port
        return MooncakeStore(
            f"mooncake://{host or '127.0.0.1'}:{port}",
            block_bytes=block_bytes,
            timeout_seconds=timeout_seconds,
            node=MooncakeNode(metadata=self.metadata(proxy)),
        )

    def open_near(
        self, host: HostMapping, *, block_bytes: int, proxy: Proxy | None = None
    ) -> MooncakeStore:
        """A store whose host tier is *host*, with a second for a call."""
        if proxy is not None:
            self._proxies.append(proxy)
        return MooncakeStore(
            f"mooncake://127.0.0.1:{self.port}",
            block_bytes=block_bytes,
            timeout_seconds=1.0,
            memory=host,
            node=MooncakeNode(metadata=self.metadata(proxy)),
        )

    def open_as(self, *, block_bytes: int, **settings: Any) -> MooncakeStore:
        """A store on a node with *settings*."""
        return MooncakeStore(
            f"mooncake://127.0.0.1:{self.port}",
            block_bytes=block_bytes,
            timeout_seconds=20.0,
            node=MooncakeNode(metadata=self.metadata(), **settings),
        )

    def metadata(self, proxy: Proxy | None = None) -> str:
        """What a member of the pool needs to find the others."""
        return "P2PHANDSHAKE" if self._handshake else self._metadata.url(proxy.port if proxy else 0)

    def pids(self) -> Sequence[int]:
        return [process.pid for process in self._processes]

    def kill(self) -> None:
        self._end()

    def restart(self) -> None:
        self._metadata.forget()
        self._start()
        for proxy in self._proxies:
            proxy.target = self.address()

    def stop(self) -> None:
        self._stack.close()

    def raw(self, key: StoreKey) -> bytes | None:
        return self.get(_name(key))

    def put_raw(self, key: StoreKey, value: bytes) -> None:
        self.put(_name(key), value or MAGIC[:1])  # a pool holds no empty object

    def fill(self) -> None:
        """With what is pinned."""
        self._command("fill", "")

    def let_evict(self) -> None:
        """It does so by itself."""

    def get(self, name: str) -> bytes | None:
        value = self._command("get", name)
        return None if value is None else base64.b64decode(str(value))

    def put(self, name: str, value: bytes) -> None:
        """Replace the object *name*."""
        code = self._command("put", name, value)
        assert code == 0, f"the pool does not take {len(value)} bytes: {code}"

    def _command(self, command: str, name: str, value: bytes = b"") -> Any:
        """Let the node do something: it is in the pool as any other."""
        line = json.dumps([command, name, base64.b64encode(value).decode()])
        assert self._node.stdin is not None
        self._node.stdin.write(line.encode() + b"\n")
        self._node.stdin.flush()
        return self._answer(self._node)

    def _start(self) -> None:
        self._start_master()
        self._node = self._start_node()
        self._processes.append(self._node)
        code, self._segment = self._answer(self._node)
        assert code == 0, f"the node does not join ({code}): see {self._folder}/node.log"

    def _start_node(self) -> "subprocess.Popen[bytes]":
        program = Path(__file__).with_name("mooncake_pool_node.py")
        arguments = [f"127.0.0.1:{self.port}", self.metadata(), str(self._segment_bytes)]
        with (self._folder / "node.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, program, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | _NODE,
            )

    def _start_master(self) -> None:
        program = Path(sys.executable).with_name("mooncake_master")
        assert program.exists(), "pip install mooncake-transfer-engine-non-cuda"
        arguments = [
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self._metrics_port}",
            "--client_ttl=60",  # else a node that was paused is forgotten
            "--put_start_discard_timeout_sec=1",  # what a writer that was ended leaves behind
            "--eviction_high_watermark_ratio=0.8",
            "--default_kv_lease_ttl=2s",  # what was written or asked for is not evicted so long
        ]
        with (self._folder / "master.log").open("ab") as log:
            master = subprocess.Popen([program, *arguments], stdout=log, stderr=log)
        self._processes.append(master)
        wait_until(lambda: answers("127.0.0.1", self.port), master, "mooncake_master")

    def _end(self) -> None:
        for process in self._processes:
            _kill(process)
        self._processes.clear()

    def _answer(self, node: "subprocess.Popen[bytes]") -> Any:
        assert node.stdout is not None
        line = node.stdout.readline()
        assert line, (
            f"the node has ended: see {self._folder}/node.log, and "
            "apt-get install libibverbs1 libnuma1 libcurl4"
        )
        return json.loads(line)

    @contextmanager
    def another_node(self) -> Iterator["subprocess.Popen[bytes]"]:
        """A second one; afterwards the pool is a new one, since it misses a node after a minute."""
        node = self._start_node()
        try:
            code, _ = self._answer(node)
            assert code == 0, f"the node does not join ({code}): see {self._folder}/node.log"
            yield node
        finally:
            _kill(node)
            self.kill()
            self.restart()

    def segments(self) -> list[str]:
        """Names of those that are in the pool."""
        url = f"http://127.0.0.1:{self._metrics_port}/get_all_segments"
        with urllib.request.urlopen(url, timeout=START_SECONDS) as answer:
            text: str = answer.read().decode()
        return text.split()

    def signal_node(self, number: signal.Signals) -> None:
        """To the node alone: the master goes on."""
        os.kill(self._node.pid, number)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


def _name(key: StoreKey) -> str:
    return f"{_PREFIX}/{key[:NAMESPACE_ID_BYTES].hex()}/{key[NAMESPACE_ID_BYTES:].hex()}"

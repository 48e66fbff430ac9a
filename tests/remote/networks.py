"""Nodes on one machine: network namespaces on a bridge of their own, which reach nobody else."""

import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Self

_SUBNET: Final = "10.231.77"


class Network:
    """A *hub*, where engines run, and *nodes*; ``host`` tells the address of each."""

    def __init__(self, *nodes: str) -> None:
        assert os.geteuid() == 0, "network namespaces need root"
        self._tag = secrets.token_hex(3)
        self._addresses = {name: f"{_SUBNET}.{i}" for i, name in enumerate(("hub", *nodes), 1)}
        self._made: list[str] = []
        self._resolvers: list[Path] = []
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def host(self, name: str) -> str:
        return self._addresses[name]

    def command(self, name: str) -> list[str]:
        """What precedes the command line of a process that runs at *name*; it keeps the pid."""
        return ["ip", "netns", "exec", self._namespace(name)]

    def start(
        self,
        name: str,
        command: Sequence[str | Path],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> "subprocess.Popen[bytes]":
        """Run *command* at *name*; what it prints goes to *log*."""
        output: IO[Any]
        with log.open("ab") as output:
            return subprocess.Popen(
                [*self.command(name), *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | (environment or {}),
            )

    def set_resolver(self, name: str, lines: str) -> None:
        """What /etc/resolv.conf is for processes that start at *name* from now on."""
        folder = Path("/etc/netns") / self._namespace(name)
        folder.mkdir(parents=True)
        self._resolvers.append(folder)
        (folder / "resolv.conf").write_text(lines)

    def close(self) -> None:
        for folder in self._resolvers:
            shutil.rmtree(folder)
        self._resolvers.clear()
        for name in reversed(self._made):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        self._made.clear()

    def _make(self) -> None:
        hub = self._namespace("hub")
        for name in self._addresses:
            _ip("netns", "add", self._namespace(name))
            self._made.append(self._namespace(name))
            _ip("-n", self._namespace(name), "link", "set", "lo", "up")
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "addr", "add", f"{self.host('hub')}/24", "dev", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        for name in list(self._addresses)[1:]:
            node = self._namespace(name)
            _ip(
                "-n",
                hub,
                "link",
                "add",
                "name",
                name,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                node,
            )
            _ip("-n", hub, "link", "set", "dev", name, "master", "bridge", "up")
            _ip("-n", node, "addr", "add", f"{self.host(name)}/24", "dev", "eth0")
            _ip("-n", node, "link", "set", "eth0", "up")

    def _namespace(self, name: str) -> str:
        return f"kvs-{self._tag}-{name}"


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"

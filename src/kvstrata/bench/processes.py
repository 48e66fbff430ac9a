"""What processes have used, read from /proc: CPU time, memory, bytes of files; and by what role."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

__all__ = ["ROLES", "Role", "Usage", "cpu_seconds_of", "is_alive", "usage_of"]

Role = Literal["client", "engine", "worker", "server"]
ROLES: Final[tuple[Role, ...]] = ("client", "engine", "worker", "server")
_WORKER_NAME: Final = "VLLM::Worker"  # vllm.v1.executor.multiproc_executor
_TICKS: Final = 100  # USER_HZ: of /proc, the same on every Linux; man 5 proc
_KIB: Final = 1024


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one role's processes. What has ended is not in it."""

    cpu_seconds: float = 0.0
    memory_bytes: int = 0  # proportional set size: what is shared counts in parts
    read_bytes: int = 0  # from disks
    written_bytes: int = 0  # to disks, later ones of the page cache included

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.cpu_seconds + other.cpu_seconds,
            self.memory_bytes + other.memory_bytes,
            self.read_bytes + other.read_bytes,
            self.written_bytes + other.written_bytes,
        )


def usage_of(client_pid: int, server_pids: Iterable[int]) -> dict[Role, Usage]:
    """Of the process that asks (*client*), of vLLM's workers and all else that descends from it
    (*engine*: the core, and its worker where that has no process), and of servers.

    Servers and what descends from them count as servers wherever they were started.
    """
    servers = {pid for server in server_pids for pid in _family(server)}
    others = [pid for pid in _family(client_pid) if pid not in servers and pid != client_pid]
    workers = {pid for pid in others if _name(pid).startswith(_WORKER_NAME)}
    members: dict[Role, Iterable[int]] = {
        "client": [client_pid],
        "engine": [pid for pid in others if pid not in workers],
        "worker": workers,
        "server": servers,
    }
    return {role: sum(map(_usage, pids), Usage()) for role, pids in members.items()}


def cpu_seconds_of(pids: Iterable[int]) -> float:
    """Of *pids* and their descendants together. Cheap: it does not look at their memory."""
    members = {member for pid in pids for member in _family(pid)}
    return sum(map(_cpu_seconds, members))


def is_alive(pid: int) -> bool:
    """Whether *pid* runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def _family(pid: int) -> list[int]:
    """*pid* and all its descendants that live."""
    try:
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:  # it has ended
        return []
    return [pid, *(member for child in children for member in _family(child))]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:  # it has ended
        return ""


def _usage(pid: int) -> Usage:
    process = Path(f"/proc/{pid}")
    try:
        memory = _numbers(process / "smaps_rollup").get("Pss", 0)
        io = _numbers(process / "io")
    except OSError:  # it has ended
        return Usage()
    return Usage(
        _cpu_seconds(pid), memory * _KIB, io.get("read_bytes", 0), io.get("write_bytes", 0)
    )


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS  # utime and stime


def _numbers(path: Path) -> dict[str, int]:
    """The number of each line ``Name: number ...``."""
    found = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        first, *_ = [*rest.split(), ""]
        if first.isdigit():
            found[name] = int(first)
    return found

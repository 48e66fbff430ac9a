"""Whose control group pays for host memory: the server's, or that of an engine that attaches.

    python bench/charge.py                                     # root; seconds

Server and engine each get a memory control group, as a container has. Printed is what of a host tier of
512 MiB is charged to each, with an engine that touches all of it at its start, and with one that does not
(``KVSTRATA_PREFAULT=false``).
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from kvstrata.server import protocol as p
from kvstrata.server.attach import Attachment, Patience
from kvstrata.server.client import ManagerClient

BLOCK_BYTES: Final = 1 << 16
HOST_MIB: Final = 512
CGROUPS: Final = Path("/sys/fs/cgroup")
PATIENCE_SECONDS: Final = 30.0
REST_SECONDS: Final = 3.0  # in which all of it has been touched
STATISTICS: Final = {True: "shmem", False: "cache"}  # of version 2, and of version 1


def is_version_2() -> bool:
    return (CGROUPS / "cgroup.controllers").exists()


@contextmanager
def group(name: str) -> Iterator[Path]:
    """A memory control group, for a process that joins it by itself."""
    made = (CGROUPS if is_version_2() else CGROUPS / "memory") / f"kvstrata-{name}-{os.getpid()}"
    made.mkdir()
    try:
        yield made
    finally:
        time.sleep(0.2)  # its processes have ended, and are yet to be counted out
        made.rmdir()


def charged_mib(where: Path) -> int:
    lines = (where / "memory.stat").read_text().splitlines()
    found = dict(line.split() for line in lines)
    return int(found[STATISTICS[is_version_2()]]) >> 20


def within(where: Path, *command: str) -> subprocess.Popen[str]:
    join = f'echo $$ > {where}/cgroup.procs && exec "$@"'
    return subprocess.Popen(
        ["sh", "-c", join, "sh", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def attach(path: Path, groups: list[Path], *, prefault: bool) -> None:
    """As an engine does; print what is charged to each of *groups* then."""
    mapped = threading.Event()
    hello = p.Hello(0, p.PROTOCOL_VERSION, "engine", "charge", BLOCK_BYTES)
    with closing(ManagerClient(path, hello)):
        hello = p.Hello(0, p.PROTOCOL_VERSION, "worker", "charge", BLOCK_BYTES)
        worker = Attachment(
            path,
            hello,
            lambda mapping: mapped.set() if mapping else None,
            patience=Patience(PATIENCE_SECONDS),
            prefault=prefault,
        )
        with closing(worker):
            assert mapped.wait(PATIENCE_SECONDS)
            time.sleep(REST_SECONDS)
            print(json.dumps([charged_mib(each) for each in groups]))


def measure(*, prefault: bool) -> list[int]:
    """MiB that are charged to the server's group and to the engine's."""
    with tempfile.TemporaryDirectory() as folder, group("server") as a, group("engine") as b:
        path = Path(folder) / "kv.sock"
        command = ["kvstrata", "server", f"--socket={path}", f"--host-size={HOST_MIB}MiB"]
        server = within(a, sys.executable, "-m", *command)
        try:
            while not path.exists():
                if server.poll() is not None:
                    sys.exit(f"error: the server has ended with {server.returncode}")
                time.sleep(0.05)
            told = [str(path), str(a), str(b), "touch" if prefault else "leave"]
            engine = within(b, sys.executable, str(Path(__file__).resolve()), *told)
            found: list[int] = json.loads(engine.communicate(timeout=60)[0])
        finally:
            server.terminate()
            server.wait()
    return found


def main() -> None:
    print(f"{'MiB charged to':38} {'server':>7} {'engine':>7}")
    for prefault in (True, False):
        server, engine = measure(prefault=prefault)
        who = "touches all of it" if prefault else "leaves it to the server"
        print(f"{f'an engine that {who}':38} {server:7} {engine:7}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        attach(
            Path(sys.argv[1]),
            [Path(sys.argv[2]), Path(sys.argv[3])],
            prefault=sys.argv[4] == "touch",
        )
    else:
        main()

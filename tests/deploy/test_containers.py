"""Server and engines in namespaces of their own, as in containers: the socket and the memory reach.

A directory is all that they share; each is alone in its IPC, PID, network and host name, and has
no capability.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cli.processes import environment, until
from tests.deploy.files import ROOT, dockerfile, run, tool

NO_CAPABILITY = "setpriv --bounding-set=-all --no-new-privs"
READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"'
WRITABLE = 'test -d "$0"'


def contained(folder: Path, mounting: str, *program: str) -> list[str]:
    """How to run Python's *program* in a container, as it were, that sees *folder*."""
    alone = ["unshare", "--mount", "--pid", "--ipc", "--net", "--uts", "--fork", "--kill-child"]
    script = f'{mounting} && exec {NO_CAPABILITY} "$@"'
    return [*alone, "sh", "-c", script, str(folder), sys.executable, "-m", *program]


@contextmanager
def server(folder: Path) -> Iterator[Path]:
    path, log = folder / "kv.sock", folder.parent / "log"
    command = contained(
        folder, WRITABLE, "kvstrata", "server", f"--socket={path}", "--host-size=8MiB"
    )
    with log.open("wb") as messages:
        process = subprocess.Popen(
            command, stdout=messages, stderr=subprocess.STDOUT, env=environment(), cwd=ROOT
        )
    try:
        until(lambda: b"ready" in log.read_bytes() or process.poll() is not None, 30, log)
        assert process.poll() is None, log.read_text()
        yield path
        (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)  # process 1 of the container, as `docker stop` does
        assert process.wait(30) == 0, log.read_text()
        assert not path.exists()
    finally:
        process.kill()  # and with it, by --kill-child, the server
        process.wait()


def engine(path: Path, what: str) -> str:
    command = contained(path.parent, READ_ONLY, "tests.deploy.engine_program", str(path), what)
    paths = f"{ROOT / 'src'}:{ROOT}"
    done = run(*command, environment=environment(PYTHONPATH=paths))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a volume, or a directory of the node, is to containers."""
    made = tmp_path / "run"
    made.mkdir(mode=0o700)
    return made


def test_an_engine_loads_what_an_engine_of_another_container_has_saved(folder: Path) -> None:
    tool("unshare")
    with server(folder) as path:
        assert engine(path, "save") == "[1, 2, 3]"
        assert engine(path, "load") == "[1, 2, 3]"


def test_the_health_check_tells_a_server_that_answers_from_none(folder: Path) -> None:
    (line,) = (rest for word, rest in dockerfile() if word == "HEALTHCHECK" and "stats" in rest)
    assert '"kvstrata", "stats", "--socket"' in line
    look = contained(folder, READ_ONLY, "kvstrata", "stats", "--socket", str(folder / "kv.sock"))
    with server(folder):
        done = run(*look, environment=environment())
        assert (done.returncode, done.stderr) == (0, "")
    assert run(*look, environment=environment()).returncode == 1

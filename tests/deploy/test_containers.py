"""Server and engines in namespaces of their own, as in containers: the socket and the memory reach.

A directory is all that they share; each is alone in its IPC, PID, network and host name, and has
no capability. The server can write to nothing else.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.caches import eventually
from tests.cli.processes import environment, until
from tests.deploy.files import ROOT, dockerfile, run

NO_CAPABILITY = "setpriv --bounding-set=-all --no-new-privs"
READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"'
# Nothing else can be written to, but a little memory, as with `read_only` and `tmpfs`.
WRITABLE = 'mount --bind "$0" "$0" && mount -o remount,bind,ro / && mount -t tmpfs -o size=64m tmpfs /var/tmp'


def contained(folder: Path, mounting: str, *program: str) -> list[str]:
    """How to run Python's *program* in a container, as it were, that sees *folder*."""
    alone = ["unshare", "--mount", "--mount-proc", "--pid", "--ipc", "--net", "--uts"]
    alone += ["--fork", "--kill-child"]
    script = f'{mounting} && ip link set lo up && exec {NO_CAPABILITY} "$@"'
    return [*alone, "sh", "-c", script, str(folder), sys.executable, "-m", *program]


@contextmanager
def server(folder: Path) -> Iterator[Path]:
    path, log = folder / "kv.sock", folder.parent / "log"
    arguments = [f"--socket={path}", "--host-size=8MiB", f"--disk={folder}/disk:16MiB"]
    arguments += ["--metrics=0.0.0.0:9464", "--log-format=json"]
    command = contained(folder, WRITABLE, "kvstrata", "server", *arguments)
    with log.open("wb") as messages:
        process = subprocess.Popen(
            command, stdout=messages, stderr=subprocess.STDOUT, env=environment(), cwd=ROOT
        )
    try:
        until(lambda: b"ready" in log.read_bytes() or process.poll() is not None, 30, log)
        assert process.poll() is None, log.read_text()
        yield path
        os.kill(first_process(process), signal.SIGTERM)  # as `docker stop` does
        assert process.wait(30) == 0, log.read_text()
        assert not path.exists()
    finally:
        process.kill()  # and with it, by --kill-child, the server
        process.wait()


def first_process(container: subprocess.Popen[bytes]) -> int:
    """Process 1 of *container*, by its number here; 0 where there is none yet."""
    children = Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text().split()
    return int(children[0]) if children else 0


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
    with server(folder) as path:
        assert engine(path, "save") == "[1, 2, 3]"
        assert engine(path, "load") == "[1, 2, 3]"
    with server(folder) as path:  # from disk
        assert engine(path, "load") == "[1, 2, 3]"


def test_the_health_check_tells_a_server_that_answers_from_none(folder: Path) -> None:
    (line,) = (rest for word, rest in dockerfile() if word == "HEALTHCHECK" and "stats" in rest)
    assert '"kvstrata", "stats", "--socket"' in line
    look = contained(folder, READ_ONLY, "kvstrata", "stats", "--socket", str(folder / "kv.sock"))
    with server(folder):
        done = run(*look, environment=environment())
        assert (done.returncode, done.stderr) == (0, "")
    assert run(*look, environment=environment()).returncode == 1


# --- vLLM ------------------------------------------------------------------------------------

ASK = """
import json, sys, urllib.request
body = {"model": "tiny", "prompt": list(range(1, 514)), "max_tokens": 4, "temperature": 0,
        "return_token_ids": True}
request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(),
                                 {"Content-Type": "application/json"})
print(json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["token_ids"])
"""
FORGET = """
import urllib.request
urllib.request.urlopen("http://127.0.0.1:8000/reset_prefix_cache", data=b"", timeout=60)
"""
HEALTH = "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"


def inside(container: subprocess.Popen[bytes], program: str) -> subprocess.CompletedProcess[str]:
    """Python's *program* in the network of *container*."""
    network = f"--net=/proc/{first_process(container)}/ns/net"
    return run("nsenter", network, sys.executable, "-c", program)


@contextmanager
def vllm(path: Path, model: Path) -> Iterator[subprocess.Popen[bytes]]:
    arguments = [str(model), f"--attach={path}", "--host=127.0.0.1", "--port=8000"]
    arguments += ["--served-model-name=tiny", "--skip-tokenizer-init", "--enforce-eager"]
    arguments += ["--dtype=float32", "--block-size=32", "--max-model-len=1024"]
    arguments += ["--num-gpu-blocks-override=40"]
    command = contained(path.parent, READ_ONLY, "kvstrata", "serve", *arguments)
    log = path.parent.parent / "vllm.log"
    with log.open("wb") as messages:
        process = subprocess.Popen(
            command,
            stdout=messages,
            stderr=subprocess.STDOUT,
            env=environment(KVSTRATA_PREFAULT="false", VLLM_SERVER_DEV_MODE="1"),
            cwd=ROOT,
        )
    try:
        until(lambda: process.poll() is not None or first_process(process) > 0, 10, log)
        until(
            lambda: process.poll() is not None or inside(process, HEALTH).returncode == 0, 300, log
        )
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        yield process
    finally:
        process.kill()
        process.wait()


def counted(path: Path, name: str) -> int:
    look = ("stats", "--socket", str(path), "--json")
    done = run(sys.executable, "-m", "kvstrata", *look, environment=environment())
    (found,) = json.loads(done.stdout)["servers"]
    return int(found["report"]["counters"].get(name, 0))


@pytest.mark.vllm
def test_an_engine_saves_to_the_server_of_another_container_and_loads_from_it(
    folder: Path, tiny_llama: Path
) -> None:
    with server(folder) as path, vllm(path, tiny_llama) as container:
        computed = inside(container, ASK)
        assert computed.returncode == 0, computed.stderr
        assert len(json.loads(computed.stdout)) == 4
        eventually(lambda: counted(path, "kvstrata_saved_blocks_total") == 8, "not saved")
        assert inside(container, FORGET).returncode == 0
        assert inside(container, ASK).stdout == computed.stdout
        assert counted(path, "kvstrata_loaded_blocks_total") == 8

"""Servers beside the engines of the bench."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.caches import eventually
from tests.cli.processes import environment

from kvstrata.bench import fleet, services
from kvstrata.bench.fleet import Member, remove_leftovers
from kvstrata.bench.fleet import environment as bench_environment
from kvstrata.bench.models import Model
from kvstrata.bench.services import ServiceFailed
from kvstrata.bench.session import deployment

MODEL = Model("", "float32", 1024, 6144, 8448, 32, "a model")

PROGRAM = """
import os, signal, sys
from pathlib import Path
from kvstrata.bench.models import Model
from kvstrata.bench.services import start_service
from kvstrata.bench.session import deployment
model = Model("", "float32", 1024, 6144, 8448, 32, "a model")
process = start_service("valkey", deployment("kvstrata-remote", model, Path(sys.argv[1]), 64, 1), dict(os.environ))
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_of_which_one_thread_is_left_to_end_is_none() -> None:
    """As one that was killed may be for a while: a zombie without an exit status."""
    text = "import ctypes, threading; threading.Thread(target=input).start(); "
    text += "ctypes.CDLL(None).pthread_exit(None)"
    member = Member.__new__(Member)  # without an engine
    with subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE) as process:
        member._services, member._server_pids = [process], [1]
        try:
            assert member.server_pids == {1, process.pid}
            eventually(lambda: member.server_pids == {1}, "it is still a server")
            assert process.poll() is None
        finally:
            process.kill()


def stands_in(service: str, *_: object) -> "subprocess.Popen[bytes]":
    """A process that does nothing, which its arguments name."""
    code = "import time; time.sleep(60)"
    return subprocess.Popen([sys.executable, "-c", code, service], start_new_session=True)


def an_engine(_: Member) -> "subprocess.Popen[bytes]":
    """What ends when its standard input does."""
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True)


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Member]:
    """LMCache above Valkey, without an engine."""
    monkeypatch.setattr(fleet, "start_service", stands_in)
    monkeypatch.setattr(Member, "_start", an_engine)
    monkeypatch.setattr(Member, "wait_ready", lambda _: None)
    plan = deployment("lmcache-remote", MODEL, tmp_path, 2050, 1)
    member = Member("lmcache-remote", plan, {})
    yield member
    member.close()


def names(member: Member) -> list[str]:
    return [str(list(service.args)[-1]) for service in member._services]  # type: ignore[arg-type]  # a list


def test_a_server_is_started_before_the_one_that_uses_it(member: Member) -> None:
    assert names(member) == ["valkey", "lmcache"]
    assert member.server_pids == {service.pid for service in member._services}


@pytest.mark.parametrize(("killed", "kept"), [(0, 0), (1, 1)])
def test_of_servers_the_one_that_has_ended_starts_again_and_those_that_use_it(
    member: Member, killed: int, kept: int
) -> None:
    before = list(member._services)
    before[killed].kill()
    before[killed].wait()
    member.restart()
    assert names(member) == ["valkey", "lmcache"]
    assert member._services[:kept] == before[:kept]
    assert not set(member._services[kept:]) & set(before)
    assert all(service.poll() is not None for service in before[kept:])


def test_a_server_that_does_not_start_leaves_none_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = []

    def start(service: str, *given: object) -> "subprocess.Popen[bytes]":
        if service == "lmcache":
            raise ServiceFailed("it has not started")
        started.append(stands_in(service, *given))
        return started[-1]

    monkeypatch.setattr(fleet, "start_service", start)
    with pytest.raises(ServiceFailed):
        Member("lmcache-remote", deployment("lmcache-remote", MODEL, tmp_path, 2050, 1), {})
    (valkey,) = started
    assert valkey.poll() is not None


def test_lmcache_above_a_tier_has_room_for_three_prompts(tmp_path: Path) -> None:
    def asked(name: str) -> dict[str, str]:
        words = services._lmcache(deployment(name, MODEL, tmp_path, 2050, 1))[4:]
        return dict(zip(words[::2], words[1::2], strict=True))

    plain, files, remote = map(asked, ("lmcache", "lmcache-disk", "lmcache-remote"))
    assert "--l2-adapter" not in plain
    assert float(files["--l1-size-gb"]) * (1 << 30) == pytest.approx(3 * 2050 * 6144, rel=0.001)
    assert json.loads(files["--l2-adapter"])["base_path"] == f"{tmp_path}/lmcache-disk/disk"
    assert json.loads(remote["--l2-adapter"])["port"] != int(remote["--port"])


def test_a_server_beside_the_engines_does_not_outlive_a_bench_that_is_killed(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int(done.stdout)
    eventually(lambda: not runs(pid), "the server is still there")


def test_memory_that_vllms_tiering_has_left_is_removed() -> None:
    left = Path(f"/dev/shm/vllm_offload_bench-{os.getpid()}-native.mmap")
    left.touch()
    remove_leftovers(f"bench-{os.getpid()}-native")
    assert not left.exists()
    remove_leftovers(f"bench-{os.getpid()}-none")


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


@pytest.mark.parametrize("found", ["libtcmalloc_minimal.so.4", None])
def test_engines_start_with_tcmalloc_where_there_is_one_and_nobody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, found: str | None
) -> None:
    monkeypatch.setattr("kvstrata.bench.fleet.find_library", lambda _: found)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert bench_environment(None).get("LD_PRELOAD") == found
    monkeypatch.setenv("LD_PRELOAD", "another.so")
    assert bench_environment(None)["LD_PRELOAD"] == "another.so"


def test_an_engine_takes_memory_from_the_kernel_once() -> None:
    program = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = (ctypes.c_void_p,)
libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory = libc.malloc(40 << 20)
    libc.memset(memory, 1, 40 << 20)
    libc.free(memory)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=bench_environment(None),
        capture_output=True,
        text=True,
        check=True,
    )
    first, *later = map(int, done.stdout.split())
    assert first > 10  # pages of some size
    assert max(later) < 10

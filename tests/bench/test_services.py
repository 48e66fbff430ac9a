"""Servers beside the engines of the bench."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.caches import eventually
from tests.cli.processes import environment

from kvstrata.bench.fleet import Member, remove_leftovers
from kvstrata.bench.fleet import environment as bench_environment

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

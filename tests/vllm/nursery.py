"""Where engines are born: a process that has imported vLLM forks them.

An import takes most of the time in which a small engine starts. This file run as a program is the
process that forks; it ends with the socket over which it is asked.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Self

_MOST_BYTES: Final = 1 << 17
# What an engine imports at its start. None of it starts a thread, but for numpy's, which know forks.
_IMPORTED: Final = (
    "vllm.entrypoints.llm",
    "vllm.lora.request",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.engine.core_client",
    "vllm.v1.executor.multiproc_executor",
)
_OF_A_CPU: Final = "vllm.v1.worker.cpu_worker"  # takes the place of what a GPU's memory is asked by


class Nursery:
    """Of one process of tests; made when the first engine is."""

    _made: "Nursery | None" = None

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )

    @classmethod
    def here(cls) -> Self:
        if cls._made is None:
            cls._made = cls()
        assert isinstance(cls._made, cls)
        return cls._made

    def engine(self, log: IO[bytes], env: Mapping[str, str]) -> "Forked":
        """A process that runs ``engine.run_child``, in a session of its own."""
        message = json.dumps({"env": dict(env), "cwd": str(Path.cwd())}).encode()
        assert len(message) < _MOST_BYTES
        stdin, commands = os.pipe()
        answers, stdout = os.pipe()
        socket.send_fds(self._socket, [message], [stdin, stdout, log.fileno()])
        os.close(stdin)
        os.close(stdout)
        pid = self._socket.recv(_MOST_BYTES)
        assert pid, "the process that forks engines has ended"
        return Forked(int(pid), os.fdopen(commands, "wb"), os.fdopen(answers, "rb"))


@dataclass
class Forked:
    """As much of ``Popen`` as an engine needs, of a process that is no child of this one."""

    pid: int
    stdin: IO[bytes]
    stdout: IO[bytes]

    def __post_init__(self) -> None:
        self._handle = os.pidfd_open(self.pid)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def wait(self) -> None:
        select.select([self._handle], [], [])


def await_birth(asked: socket.socket) -> bool:
    """Fork for whoever asks. True in each child, False when nobody can ask any more."""
    while True:
        message, files, _, _ = socket.recv_fds(asked, _MOST_BYTES, 3)
        if not message:
            return False
        pid = os.fork()
        if pid:
            for file in files:
                os.close(file)
            asked.send(str(pid).encode())
            continue
        asked.close()
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor, file in enumerate(files):
            os.dup2(file, descriptor)
            os.close(file)
        order = json.loads(message)
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["env"])
        return True


def _main() -> None:
    from tests.vllm.engine import run_child
    from vllm.platforms import current_platform

    for name in (*_IMPORTED, *([_OF_A_CPU] if current_platform.is_cpu() else [])):
        importlib.import_module(name)
    gc.freeze()  # what all share is not copied for a walk over it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what is forked here
    if await_birth(socket.socket(fileno=int(sys.argv[1]))):
        run_child()
    else:
        os._exit(0)  # no remarks of libraries on what they leave


if __name__ == "__main__":
    _main()

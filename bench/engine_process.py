"""The asking side of ``engines.py``: a vLLM engine as a child process."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["Engine", "environment"]


class Engine:
    """A child process that runs ``engines.py``."""

    def __init__(self, name: str, order: dict[str, Any], environment: dict[str, str]) -> None:
        self.name = name
        self._log = Path(order["folder"], "log.txt")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("engines.py")), json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                start_new_session=True,  # so that it can be ended with its own children
            )
        self._processes = [self._process.pid]  # these and their descendants are the engine

    def wait_ready(self, timeout_seconds: float) -> None:
        self._processes += self._receive(timeout_seconds)["helpers"]

    def ask(self, tokens: Sequence[int], *, blend: bool = False) -> tuple[float, int]:
        """Seconds to the first token, and how many tokens were cached."""
        reply = self._call({"blend" if blend else "ask": list(tokens)})
        return reply["seconds"], reply["cached_tokens"]

    def batch(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[float, int]:
        """Seconds to the last token of all *prompts*, and how many tokens were cached."""
        reply = self._call({"batch": {"prompts": list(prompts), "new_tokens": new_tokens}})
        return reply["seconds"], reply["cached_tokens"]

    def reset(self) -> None:
        """Empty the prefix cache; saves may hold blocks for a moment."""
        give_up = time.monotonic() + 10
        while not self._call({"reset": True})["reset"]:
            if time.monotonic() > give_up:
                raise RuntimeError(f"{self.name}: the prefix cache cannot be reset")
            time.sleep(0.02)  # the engine goes on stepping until its saves have ended

    def promoted_blocks(self) -> int:
        counters = self._call({"counters": True})["counters"]
        return int(counters.get("kvstrata_promoted_blocks_total{tier=disk}", 0))

    def settle(self) -> None:
        """Wait until the engine does nothing: a tenth of a second without CPU time."""
        give_up = time.monotonic() + 5
        before = sum(map(_cpu_ticks, self._processes))
        while time.monotonic() < give_up:
            time.sleep(0.1)  # ten ticks of the kernel's clock
            now = sum(map(_cpu_ticks, self._processes))
            if now - before <= 1:
                return
            before = now

    def close(self) -> None:
        """End the child; its engine and server end with it."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._receive(120)

    def _receive(self, timeout_seconds: float) -> dict[str, Any]:
        assert self._process.stdout
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_seconds)
        line = self._process.stdout.readline() if readable else ""
        if not line:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])
            raise RuntimeError(f"the engine {self.name!r} does not answer; its log ends:\n{tail}")
        reply: dict[str, Any] = json.loads(line)
        return reply


def _cpu_ticks(pid: int) -> int:
    """CPU time used so far by *pid* and all its descendants."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:  # it has ended meanwhile
        return 0
    return int(fields[11]) + int(fields[12]) + sum(_cpu_ticks(child) for child in children)


def environment(lmcache: Path | None = None) -> dict[str, str]:
    """Of the engines. The binding is the same for all: vLLM's own choice is not.

    So is the path: where LMCache is installed, all of them could import it.
    """
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:2])
    path = [os.environ.get("PYTHONPATH", ""), *([str(lmcache)] if lmcache else [])]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in path if p),
    }

"""What can go wrong around an engine without a model, switched on and off by a test.

Each fault counts in a ``seen`` how often it has happened to somebody.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.vllm.driven import Engine
from tests.vllm.plans import copiers

from kvstrata.manager.manager import KVManager
from kvstrata.server import protocol as p
from kvstrata.server.client import ManagerClient

LONGEST_SECONDS = 5.0  # that anything is held, if a test forgets to let it go


class Copies:
    """A worker's copies: held, or failing before or after a part of the bytes."""

    def __init__(self, engine: Engine, rank: int = 0, seen: Counter[str] | None = None) -> None:
        self.engine = engine
        self.rank = rank
        self.seen = Counter() if seen is None else seen
        self.failing_loads = 0
        self.failing_saves = 0
        self.is_partial = False
        self._go = threading.Event()
        self._go.set()
        self._thread = threading.current_thread()
        copier: Any = copiers(engine.runner.ranks[rank].half)[0]
        self._to_device, self._to_host = copier.copy_to_device, copier.copy_to_host
        copier.copy_to_device, copier.copy_to_host = self._load, self._save

    def hold(self) -> None:
        self._go.clear()

    def go(self) -> None:
        self._go.set()

    def heal(self) -> None:
        self.failing_loads = self.failing_saves = 0
        self.go()

    def _load(self, device_blocks: Any, rows: Any, layer: int | None = None) -> None:
        self._wait()
        if self.failing_loads:
            self.failing_loads -= 1
            self.seen[f"failed loads of rank {self.rank}"] += 1
            self._break(self._to_device, device_blocks, rows, layer)
        self._to_device(device_blocks, rows, layer)

    def _save(self, device_blocks: Any, rows: Any, layer: int | None = None) -> None:
        self._wait()
        if self.failing_saves:
            self.failing_saves -= 1
            self.seen[f"failed saves of rank {self.rank}"] += 1
            self._break(self._to_host, device_blocks, rows, layer)
        self._to_host(device_blocks, rows, layer)

    def _wait(self) -> None:
        if threading.current_thread() is self._thread:  # which has to let go
            return
        self.seen["held copies"] += not self._go.is_set()
        self._go.wait(LONGEST_SECONDS)

    def _break(
        self, copy: Callable[..., None], device_blocks: Any, rows: Any, layer: int | None
    ) -> None:
        if self.is_partial and len(device_blocks) > 1:
            half = len(device_blocks) // 2
            copy(device_blocks[:half], rows[:half], layer)
        raise OSError("no")


class Stall:
    """A server that answers no question while it is on."""

    def __init__(self, manager: KVManager, seen: Counter[str]) -> None:
        self._seen = seen
        self._go = threading.Event()
        self._go.set()
        for name in ("get_match", "put_match"):
            setattr(manager, name, self._held(getattr(manager, name)))

    def _held(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def held(*args: Any, **kwargs: Any) -> Any:
            self._seen["slow answers"] += not self._go.is_set()
            self._go.wait(LONGEST_SECONDS)
            return real(*args, **kwargs)

        return held

    def hold(self) -> None:
        self._go.clear()

    def go(self) -> None:
        self._go.set()


def lose_an_answer(client: ManagerClient, seen: Counter[str]) -> None:
    """The next one to a lookup or an offer on this line, which goes on."""
    take: Callable[[p.Reply], None] = client._take
    left = [1]

    def lossy(reply: p.Reply) -> None:
        if left and isinstance(reply, p.Task):
            left.clear()
            seen["lost answers"] += 1
        else:
            take(reply)

    client._take = lossy  # type: ignore[method-assign]  # a fault


class Again:
    """vLLM's hooks, each called twice while it is on."""

    HOOKS = (
        "on_new_request",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "update_connector_output",
        "request_finished_all_groups",
    )

    def __init__(self, connector: Any, seen: Counter[str] | None = None) -> None:
        self.seen = Counter() if seen is None else seen
        self.on = False
        for name in self.HOOKS:
            setattr(connector, name, self._twice(getattr(connector, name)))

    def _twice(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def twice(*args: Any) -> Any:
            if self.on:
                self.seen["hooks called twice"] += 1
                hook(*args)
            return hook(*args)

        return twice


class Clock:
    """Time as the workers see it, which can jump."""

    def __init__(self) -> None:
        self._jumped_seconds = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._jumped_seconds

    def jump(self, seconds: float) -> None:
        self._jumped_seconds += seconds

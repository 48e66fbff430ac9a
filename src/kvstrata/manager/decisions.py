"""The latest decisions, for ``kvstrata inspect --explain``."""

import itertools
import re
from collections import deque
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

_KEPT: Final = 4096
# Nothing; what makes a name unique (``InputProcessor.assign_request_id``); the number of a prompt of
# several, and that.
_ADDED: Final = ("", "-[0-9a-f]{8}", "-[0-9]+-[0-9a-f]{8}")


class Decision(msgspec.Struct, frozen=True):
    """What was decided for one lookup or one save, and why."""

    at_seconds: float  # Unix time
    kind: Literal["get", "put"]
    request: str  # the engine's name for it
    namespace: str  # hex
    task_id: int
    asked_blocks: int
    host_blocks: int = 0  # get: found there; put: there already, on the way there or being written
    disk_blocks: int = 0  # get: found only there; put: known already, and only there
    remote_blocks: int = 0  # get: found only there
    taken_blocks: int = 0  # get: to be loaded; put: to be saved
    reason: str = ""  # why no more
    load_seconds: float = 0.0  # get: expected until all is in host memory
    recompute_seconds: float | None = None  # get: expected for the engine to compute it
    last_block: str = ""  # hex key of the last block found; put: of the last one saved or known


class Decisions:
    """The last 4096, oldest first. Not thread-safe."""

    def __init__(self) -> None:
        self._kept: deque[Decision] = deque(maxlen=_KEPT)

    def add(self, decision: Decision) -> None:
        self._kept.append(decision)

    def of(self, request: str) -> list[Decision]:
        """Those for *request*, oldest first.

        vLLM adds to the name that its client knows: see ``_ADDED``.
        """
        if not request:
            return []
        alike = [decision for decision in self._kept if decision.request.startswith(request)]
        for added in _ADDED:
            name = re.compile(re.escape(request) + added)
            named = [decision for decision in alike if name.fullmatch(decision.request)]
            if named:
                return named
        return []

    def all(self) -> Iterable[Decision]:
        """All of them, oldest first."""
        return self._kept

    def latest(self, count: int) -> list[Decision]:
        start = max(0, len(self._kept) - count)
        return list(itertools.islice(self._kept, start, None))

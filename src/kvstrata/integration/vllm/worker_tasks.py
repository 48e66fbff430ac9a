"""Loads and saves that a worker has begun and not reported."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kvstrata.transfer.guarded import Copied
from kvstrata.transfer.lanes import Handle, Outcome
from kvstrata.transfer.layered import Part

__all__ = ["Parts", "WorkerTask", "is_doubt", "note_doubts", "problem_of"]

_STOPPED: Final = Copied.STOPPED.value
_REFUSED: Final = "too many copies are waiting"
_NO_DOUBTS: Final = (_STOPPED, _REFUSED)


@dataclass(slots=True)
class WorkerTask:
    """A load or save in flight: one job, or for a large save several."""

    task_id: int
    request_id: str | None  # None for a save
    deadline: float  # of the clock; only loads have one
    device_blocks: list[int]
    jobs: list[Handle[Copied]] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # of each job
    pending: int = 0  # jobs that have not ended
    failed: bool = False
    in_doubt: bool = False  # it failed, and not for want of time or room alone
    at_once: bool = False  # a load whose request runs in this very step
    is_shared: bool = False  # its jobs copy other tasks too, and note their doubts here
    doubt: object = None

    @property
    def is_save(self) -> bool:
        return self.request_id is None

    @property
    def whole_blocks(self) -> int:
        """The leading blocks whose copies have ended as they should.

        Of a save layer by layer none: some layer is missing in all of them.
        """
        if self.is_shared:
            return 0
        whole = 0
        for handle, blocks in zip(self.jobs, self.blocks, strict=True):
            if problem_of(handle) is not None:
                break
            whole += blocks
        return whole


Parts = list[tuple[WorkerTask, Part]]
"""What tasks that share a job copy, one by one."""


def note_doubts(parts: Iterable[tuple[WorkerTask, Part]]) -> None:
    for task, part in parts:
        if task.doubt is None:
            task.doubt = part.doubt


def problem_of(handle: Handle[Copied]) -> object | None:
    """Why the job's copy must not be believed; None if it is whole."""
    if handle.error is not None:
        return handle.error
    if handle.outcome is Outcome.REFUSED:
        return _REFUSED
    if handle.result is Copied.WHOLE:
        return None
    return Copied.STALE.value if handle.result is Copied.STALE else _STOPPED


def is_doubt(problem: object) -> bool:
    """Whether *problem* is one of the bytes, and not of a copy that lacked time or room."""
    return problem not in _NO_DOUBTS

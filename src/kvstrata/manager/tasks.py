"""One request's load (get) or save (put): its states and what moves it between them."""

import enum
import time
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec
import numpy as np

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.keys import BlockIds, KeyArray
from kvstrata.core.types import BlockKey, NamespaceId
from kvstrata.manager.residency import Slots


class TaskState(enum.Enum):
    SEARCHING = "searching"  # get: the remote tier is being asked for blocks unknown here
    PROMOTING = "promoting"  # get: some blocks are still on their way into host memory
    READY = "ready"  # get: every block is in host memory; put: every slot is reserved
    RUNNING = "running"  # the workers copy
    STOPPING = "stopping"  # they still do, and it was cancelled: what they copy does not count
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TaskEvent(enum.Enum):
    FOUND = "found"  # or not found: the search is over
    PROMOTE = "promote"  # nothing is on its way any more
    RELEASE = "release"  # a prefetch needs its leases no longer
    LAUNCH = "launch"
    COMPLETE = "complete"
    FAIL = "fail"
    CANCEL = "cancel"


_S, _E = TaskState, TaskEvent
_NEXT: Final[dict[TaskState, dict[TaskEvent, TaskState]]] = {
    _S.SEARCHING: {
        _E.FOUND: _S.PROMOTING,
        _E.LAUNCH: _S.RUNNING,
        _E.CANCEL: _S.CANCELLED,
        _E.FAIL: _S.FAILED,
    },
    _S.PROMOTING: {
        _E.PROMOTE: _S.READY,
        # A request that waited long enough takes the blocks that have arrived.
        _E.LAUNCH: _S.RUNNING,
        _E.CANCEL: _S.CANCELLED,
        _E.FAIL: _S.FAILED,
    },
    _S.READY: {
        _E.RELEASE: _S.DONE,
        _E.LAUNCH: _S.RUNNING,
        _E.CANCEL: _S.CANCELLED,
        _E.FAIL: _S.FAILED,
    },
    # A running copy is not stopped by telling: its slots stay until the workers have ended it.
    _S.RUNNING: {_E.COMPLETE: _S.DONE, _E.FAIL: _S.FAILED, _E.CANCEL: _S.STOPPING},
    _S.STOPPING: {_E.COMPLETE: _S.CANCELLED, _E.FAIL: _S.CANCELLED},
    _S.DONE: {},
    _S.FAILED: {},
    _S.CANCELLED: {},
}
_ALL: Final = frozenset(TaskEvent)
# What comes late, or twice, and changes nothing.
_VOID: Final[dict[TaskState, frozenset[TaskEvent]]] = {
    _S.SEARCHING: frozenset({_E.PROMOTE}),  # there may be more to promote
    _S.PROMOTING: frozenset({_E.FOUND}),  # a reset has ended the search before
    _S.READY: frozenset({_E.FOUND, _E.PROMOTE}),
    _S.RUNNING: frozenset({_E.FOUND, _E.PROMOTE, _E.RELEASE, _E.LAUNCH}),
    _S.STOPPING: _ALL - {_E.COMPLETE, _E.FAIL},
    _S.DONE: _ALL,
    _S.FAILED: _ALL,
    _S.CANCELLED: _ALL,
}
FINAL: Final = frozenset({_S.DONE, _S.FAILED, _S.CANCELLED})
UNSETTLED: Final = frozenset({_S.SEARCHING, _S.PROMOTING})  # there may be more blocks in a moment


def step(state: TaskState, event: TaskEvent) -> TaskState:
    """The state after *event*: *state* itself where the event means nothing any more.

    Raises ``InvariantViolated`` for what cannot have happened yet: a copy that nobody has begun
    cannot be complete, and a prefetch cannot have ended while its blocks are on their way.
    """
    if event in _VOID[state]:
        return state
    try:
        return _NEXT[state][event]
    except KeyError:
        raise InvariantViolated(f"a task cannot {event.value} while {state.value}") from None


class TaskStatus(msgspec.Struct, frozen=True):
    """What a client sees of a task.

    For a get ``slots[i]`` holds block ``i`` of the keys asked for: a prefix, the part of it that
    is in host memory; where states were asked for, as many slots as a state has follow. For a put
    ``slots[i]`` waits for the bytes of block ``missing[i]``.
    """

    task_id: int
    state: TaskState
    slots: list[int] = []
    generations: list[int] = []  # of the slots, to be checked before and after a copy
    missing: list[int] = []  # put only: indices into the keys asked for
    matched_blocks: int = 0  # get only: leading blocks found in any tier, and taken
    disk_blocks: int = 0  # get only: how many of them had to come from disk
    remote_blocks: int = 0  # get only: and how many from the remote tier
    declined_blocks: int = 0  # get only: found behind the matched ones and not worth loading
    untold_blocks: int = 0  # get only: behind these, and nobody can say now where they are


@dataclass(slots=True, eq=False)
class Lookup:
    """What one get asks for."""

    namespace: NamespaceId
    keys: KeyArray
    request: str = ""  # the engine's name for it, for ``inspect --explain``
    blocks_per_second: float | None = None  # that the engine computes; None: not measured yet
    is_traffic: bool = True  # a request of an engine, which metrics and decisions tell of
    states: int = 0  # recurrent groups: a prefix ends where a state of each is; 0: anywhere


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """What one put could save."""

    namespace: NamespaceId
    keys: KeyArray
    parent: BlockKey | None = None  # of the first key; None: it begins the prompt
    request: str = ""
    prompt_blocks: int = 0  # of the whole prompt, as far as that is known


class End(NamedTuple):
    """Where a prefix can end: behind *blocks* blocks, with the states *ids*, one a group."""

    blocks: int
    ids: BlockIds


@dataclass(slots=True, eq=False)
class Aim:
    """Where a get with states is to end, until its blocks and states are in host memory."""

    lookup: Lookup
    ends: list[End] = field(default_factory=list)  # leased: what comes, behind what is nearer
    tried: int = 0  # blocks of the last end that was aimed at
    counted: int = 0  # blocks whose tier has been counted


@dataclass(slots=True, eq=False)
class GetTask:
    """Leases on a prefix of blocks, and on the states at its end."""

    task_id: int
    owner: int
    namespace: NamespaceId
    deadline: float  # monotonic seconds; an unlaunched task is cancelled then
    is_traffic: bool = True
    ids: BlockIds = field(default_factory=lambda: np.empty(0, np.int32))
    states: int = 0  # so many of *ids*, the last, are states
    aim: Aim | None = None  # then *ids* are blocks alone
    state: TaskState = TaskState.READY
    disk_blocks: int = 0
    remote_blocks: int = 0
    declined_blocks: int = 0
    untold_blocks: int = 0
    launched_blocks: int = 0  # in host memory when the copies began: no more can be loaded
    began_at: float = field(default_factory=time.monotonic)  # then: when the copies began

    @property
    def blocks(self) -> int:
        """How many blocks it has, or is to have; without states."""
        if self.aim is not None:
            return self.aim.ends[-1].blocks if self.aim.ends else 0
        return len(self.ids) - self.states

    @property
    def held(self) -> BlockIds:
        """All that it leases."""
        if self.aim is None:
            return self.ids
        return np.concatenate([self.ids, *(end.ids for end in self.aim.ends)])

    @property
    def goal(self) -> BlockIds:
        """Of all that it leases what it waits for: not what it would fall back on."""
        if self.aim is None:
            return self.ids
        states = [end.ids for end in self.aim.ends if end.blocks == self.aim.tried]
        return np.concatenate([self.ids[: self.aim.tried], *states])

    @property
    def lowest_tier(self) -> str:
        """Of those that had some of its blocks; ``none`` without any."""
        if self.remote_blocks:
            return "remote"
        if self.disk_blocks:
            return "disk"
        return "host" if len(self.ids) else "none"


@dataclass(slots=True, eq=False)
class PutTask:
    """Reserved slots for blocks that have to be saved: ``slots[i]`` is for block ``ids[i]``."""

    task_id: int
    owner: int
    ids: BlockIds
    slots: Slots
    missing: list[int]
    state: TaskState = TaskState.READY
    began_at: float = field(default_factory=time.monotonic)

    @property
    def held(self) -> BlockIds:
        """All that it has slots for."""
        return self.ids

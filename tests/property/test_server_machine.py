"""Several engines at one server, over real sockets: none sees what it must not, nothing stays.

Requests are sent without waiting for their answers, on connections that the server serves in any
order, and engines and workers die with answers outstanding. What an answer may say is bounded from
both sides: by what was certainly there when it was asked (its ``Complete`` has been taken in) and by
what may be there (its ``Complete`` has been sent, and no reset since has been answered).
"""

import math
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.caches import (
    ALICE,
    BLOCK_BYTES,
    BOB,
    PATIENCE_SECONDS,
    config,
    content,
    contents,
    eventually,
    keys,
)
from tests.machines import machine_settings
from tests.server.harness import engine, worker

from kvstrata.core.errors import ServerUnavailable
from kvstrata.core.types import BlockKey, NamespaceId
from kvstrata.manager.tasks import FINAL, UNSETTLED, TaskState, TaskStatus
from kvstrata.server import protocol as p
from kvstrata.server.client import ManagerClient, Pending
from kvstrata.server.server import Server

namespaces = st.sampled_from([ALICE, ALICE, BOB])
prompts = [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 1, 1), (1, 0, 0, 0), (1, 1, 0)]
paths = st.builds(lambda prompt, end: prompt[:end], st.sampled_from(prompts), st.integers(1, 4))
picks = st.integers(0, 11)
events = st.sampled_from(["launch", "complete", "complete", "complete", "fail", "cancel"])
Path_ = tuple[int, ...]
Block = tuple[NamespaceId, BlockKey]
T = TypeVar("T")


def pick(some: Sequence[T], number: int) -> T:
    return some[number % len(some)]


@dataclass
class Task:
    """A request for a task, and what has become of it as far as its engine knows."""

    pending: Pending
    namespace: NamespaceId
    keys: list[BlockKey]
    is_put: bool
    asked_at: int
    sure: int  # get: leading blocks that were certainly there
    is_clean: bool  # put: no reset was on its way
    is_seen: bool = False
    seen_at: int = 0
    is_running: bool = False
    is_stopping: bool = False  # running, and cancelled: it does not count

    @property
    def status(self) -> TaskStatus:
        assert self.pending.status is not None
        return self.pending.status

    @property
    def holds(self) -> bool:
        """Whether its slots are its own until its end is sent."""
        return self.is_seen and self.status.task_id != 0


@dataclass
class Saved:
    """A put whose ``Complete`` was sent before a ping."""

    ping: Pending
    task: Task


@dataclass
class Engine:
    session: str
    scheduler: ManagerClient
    worker: ManagerClient
    tasks: list[Task] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    resets: list[tuple[Pending, NamespaceId, int]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    writing: list[Task] = field(default_factory=list)  # puts of connections that broke


@dataclass
class Orphans:
    """Slots of a scheduler that is gone, whose worker may still write to them."""

    slots: list[int]
    worker: ManagerClient


class ServerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.is_up = False
        self.engines: list[Engine] = []
        self.orphans: list[Orphans] = []
        self.sessions = 0
        self.clock = 0
        self.sure: set[Block] = set()
        self.completed: dict[Block, int] = {}  # when the latest Complete of it was sent
        self.gone: dict[Block, float] = {}  # when it was certainly there no more
        self.reset_at = {ALICE: 0, BOB: 0}  # when the latest reset was sent
        self.reset_since = {ALICE: 0, BOB: 0}  # when the latest one that was answered was sent
        self.resetting = {ALICE: 0, BOB: 0}  # resets on their way
        self.ended: list[int] = []  # of engines that are gone

    @initialize(roomy=st.booleans(), disk=st.booleans())
    def start(self, roomy: bool, disk: bool) -> None:
        self.roomy = roomy
        folder = self.root / "disk" if disk else None
        tiers = config(64 if roomy else 6, folder, 64 if roomy else 8)
        self.server = Server(tiers, self.root / "s", block_bytes=BLOCK_BYTES)
        assert self.server.manager is not None
        self.manager = self.server.manager
        self.manager.memory.mapping.data[:] = 0xEE
        self.thread = threading.Thread(target=self.server.serve)
        self.thread.start()
        self.is_up = True
        self.connect()
        self.connect()

    def now(self) -> int:
        self.clock += 1
        return self.clock

    # -- engines come and go -----------------------------------------------------------------

    def connect(self) -> None:
        if len(self.engines) < 3:
            self.sessions += 1
            session = f"e{self.sessions}"
            scheduler = engine(self.server.path, session, life=session)
            assert scheduler.get_match(ALICE, keys(0)) == TaskStatus(0, TaskState.FAILED)
            self.engines.append(Engine(session, scheduler, worker(self.server.path, session)))

    @rule(
        who=picks,
        namespace=namespaces,
        path=paths,
        what=st.sampled_from(
            [
                *("connects", "dies", "dies", "offends", "changes worker", "resets"),
                *("prefetches", "loses its line", "loses its line"),
            ]
        ),
    )
    def upheaval(self, who: int, namespace: NamespaceId, path: Path_, what: str) -> None:
        by = pick(self.engines, who)
        if what == "connects":
            self.connect()
        elif what in {"dies", "offends"}:
            self.leaves(by, worker_stays=path[0] == 0, offends=what == "offends")
        elif what == "changes worker":
            self.worker_dies_and_another_comes(by)
        elif what == "resets":
            self.reset(by, namespace)
        elif what == "loses its line":
            self.loses_its_line(by, all_run=path[0] == 0)
        elif what == "prefetches":
            by.scheduler.submit(p.Prefetch(0, namespace, b"".join(keys(*path))))

    def leaves(self, gone: Engine, *, worker_stays: bool, offends: bool) -> None:
        """With requests and answers on their way."""
        self.engines.remove(gone)
        if offends:
            gone.scheduler.submit(p.Hello(0, p.PROTOCOL_VERSION, "engine", "x", BLOCK_BYTES))
            with pytest.raises(ServerUnavailable):
                gone.scheduler.ping()
        gone.scheduler.close()
        self.ended += gone.ended + [t.status.task_id for t in gone.tasks if t.holds]
        for _, namespace, _ in gone.resets:
            self.resetting[namespace] += 1_000  # nobody will tell when it is made
        puts = [t for t in gone.tasks if t.is_put and t.holds] + gone.writing
        slots = [s for t in puts for s in t.status.slots]
        if worker_stays:
            self.orphans.append(Orphans(slots, gone.worker))
        else:
            gone.worker.close()
        if not self.engines:
            self.connect()

    def loses_its_line(self, by: Engine, *, all_run: bool) -> None:
        """And comes back, while its worker stays and may be writing for some of its puts."""
        puts = [task for task in by.tasks if task.is_put and task.holds]
        by.writing += puts if all_run else puts[::2]
        ended = [t.status.task_id for t in by.tasks if t.holds and t not in by.writing]
        by.scheduler.close()
        for _, namespace, _ in by.resets:
            self.resetting[namespace] += 1_000  # nobody will tell when it is made
        running = [task.status.task_id for task in by.writing]
        by.scheduler = engine(self.server.path, by.session, life=by.session, running=running)
        by.ended += ended
        by.tasks, by.saved, by.resets = [], [], []

    @rule(who=picks, which=picks, event=st.sampled_from(["fail", "complete"]))
    def worker_ends_what_a_broken_line_has_left(self, who: int, which: int, event: str) -> None:
        by = pick(self.engines, who)
        if not by.writing:
            return
        task = by.writing.pop(which % len(by.writing))
        for slot in task.status.slots:
            self.manager.view(slot)[:] = b"\xdd" * BLOCK_BYTES
        getattr(by.scheduler, event)([task.status.task_id])
        by.ended.append(task.status.task_id)

    @rule(which=picks)
    def late_worker_writes_and_goes(self, which: int) -> None:
        if self.orphans:
            orphans = self.orphans.pop(which % len(self.orphans))
            for slot in orphans.slots:
                self.manager.view(slot)[:] = b"\xdd" * BLOCK_BYTES
            self.bytes_are_right()
            orphans.worker.close()

    def worker_dies_and_another_comes(self, hurt: Engine) -> None:
        hurt.worker.close()
        hurt.writing.clear()
        hurt.worker = worker(self.server.path, hurt.session)
        for task in hurt.tasks:
            task.sure = 0  # it may have been asked in between

    # -- requests ----------------------------------------------------------------------------

    @rule(
        who=picks,
        namespace=namespaces,
        path=paths,
        is_put=st.booleans(),
        then=st.sampled_from(["wait", "wait", "again", "go on"]),
    )
    def ask(self, who: int, namespace: NamespaceId, path: Path_, is_put: bool, then: str) -> None:
        by, asked = pick(self.engines, who), keys(*path)
        for _ in range(2 if then == "again" else 1):
            sure = 0
            while sure < len(asked) and (namespace, asked[sure]) in self.sure:
                sure += 1
            request: p.Request = p.GetMatch(0, namespace, b"".join(asked))
            if is_put:
                request = p.PutMatch(0, namespace, b"".join(asked), b"")
            is_clean = self.resetting[namespace] == 0
            asked_at, pending = self.now(), by.scheduler.submit(request)
            by.tasks.append(Task(pending, namespace, asked, is_put, asked_at, sure, is_clean))
        if then == "wait":
            self.wait(by)

    def reset(self, by: Engine, namespace: NamespaceId) -> None:
        self.reset_at[namespace] = self.now()
        self.resetting[namespace] += 1
        self.sure = {block for block in self.sure if block[0] != namespace}
        for task in (task for each in self.engines for task in each.tasks):
            task.sure = 0
        by.resets.append((by.scheduler.submit(p.Reset(0, namespace)), namespace, self.clock))

    # -- answers -----------------------------------------------------------------------------

    @rule(who=picks, to_all=st.booleans())
    def listen(self, who: int, to_all: bool) -> None:
        by = pick(self.engines, who)
        if to_all:
            self.wait(by)
        else:
            by.scheduler.poll(0.0)
            self.take_answers(by)

    def wait(self, by: Engine) -> None:
        """What was sent before is answered, and has been carried out."""
        by.scheduler.ping()
        self.take_answers(by)
        assert all(task.is_seen for task in by.tasks)

    def take_answers(self, by: Engine) -> None:
        for task in by.tasks:
            if task.pending.reply is not None and not task.is_seen:
                task.is_seen, task.seen_at = True, self.now()
                assert isinstance(task.pending.reply, p.Task)
                (self.check_put if task.is_put else self.check_get)(task)
        for saved in [s for s in by.saved if s.ping.reply is not None]:
            by.saved.remove(saved)
            task = saved.task
            if self.roomy and task.is_clean and self.reset_at[task.namespace] < task.asked_at:
                self.sure |= {(task.namespace, task.keys[i]) for i in task.status.missing}
        for pending, namespace, sent_at in [r for r in by.resets if r[0].reply is not None]:
            by.resets.remove((pending, namespace, sent_at))
            assert isinstance(pending.reply, p.Number)
            self.resetting[namespace] -= 1
            self.reset_since[namespace] = max(self.reset_since[namespace], sent_at)
            for block, completed_at in self.completed.items():
                if block[0] == namespace and completed_at < sent_at:
                    self.gone[block] = min(self.gone[block], self.now())
        by.tasks[:] = [t for t in by.tasks if not t.is_seen or t.status.task_id]

    def check_get(self, task: Task) -> None:
        status = task.status
        assert status.missing == []
        if status.state is TaskState.FAILED:
            assert (status.task_id, task.sure) == (0, 0)
        assert task.sure <= status.matched_blocks <= len(task.keys)
        for block in task.keys[: status.matched_blocks]:
            assert self.gone.get((task.namespace, block), 0) > task.asked_at, (
                "never saved, or reset"
            )

    def check_put(self, task: Task) -> None:
        status = task.status
        assert len(status.slots) == len(status.missing) == len(status.generations)
        assert (status.task_id == 0) == (status.slots == [])
        for slot in status.slots:
            self.manager.view(slot)[:] = b"\xcc" * BLOCK_BYTES  # dirty until it is written

    # -- tasks move --------------------------------------------------------------------------

    @rule(who=picks, which=picks, event=events, times=st.integers(1, 2), early=st.booleans())
    def move(self, who: int, which: int, event: str, times: int, early: bool) -> None:
        """News of a task, once or twice, and some that it cannot take."""
        by = pick(self.engines, who)
        held = [task for task in by.tasks if task.holds]
        if not held:
            return
        task = pick(held, which)
        if not early:
            eventually(lambda: self.has_settled(by, task), "promotions do not end")
        self.check_bytes(task)
        counts = task.is_put and task.is_running and not task.is_stopping
        if event == "complete" and counts:
            self.write(task)
        for _ in range(times):
            getattr(by.scheduler, event)([task.status.task_id])
        self.note(by, task, event)
        if event == "fail" and not task.is_put:
            self.sure -= {(task.namespace, block) for block in task.keys}
            for other in (t for e in self.engines for t in e.tasks):
                other.sure = 0
        if event == "complete" and counts:
            by.saved.append(Saved(by.scheduler.submit(p.Ping(0)), task))

    def note(self, by: Engine, task: Task, event: str) -> None:
        if event == "launch":
            task.is_running = True
        elif event == "cancel" and task.is_running:
            task.is_stopping = True
        elif event == "fail" or (event == "complete") == task.is_running:
            by.tasks.remove(task)
            by.ended.append(task.status.task_id)

    def has_settled(self, by: Engine, task: Task) -> bool:
        by.scheduler.poll(0.001)
        return task.is_running or task.status.state not in UNSETTLED

    def write(self, task: Task) -> None:
        """The blocks may be found from now on, but for those reserved before a reset."""
        for slot, i in zip(task.status.slots, task.status.missing, strict=True):
            self.manager.view(slot)[:] = content(task.namespace, task.keys[i])
            if self.reset_since[task.namespace] > task.seen_at:
                continue
            block = (task.namespace, task.keys[i])
            self.completed[block] = self.now()
            self.gone[block] = math.inf

    @rule(who=picks, event=events)
    def meddle(self, who: int, event: str) -> None:
        """With tasks of others, of the dead, and with those that have ended."""
        by = pick(self.engines, who)
        others = [t for e in self.engines if e is not by for t in e.tasks if t.holds]
        ids = [task.status.task_id for task in others] + by.ended[-3:] + self.ended[-3:]
        getattr(by.scheduler, event)([*ids, 0, 2**63 - 1])
        by.scheduler.ping()
        for each in self.engines:
            self.tasks_are_as_far_as_their_engine_has_moved_them(each)

    def tasks_are_as_far_as_their_engine_has_moved_them(self, by: Engine) -> None:
        held = [task for task in by.tasks if task.holds]
        found = by.scheduler.try_wait([task.status.task_id for task in held])
        for task in held:
            state = found[task.status.task_id].state
            assert state not in FINAL
            assert (state is TaskState.STOPPING) == task.is_stopping
            assert (state in {TaskState.RUNNING, TaskState.STOPPING}) == task.is_running

    # -- what always holds -------------------------------------------------------------------

    @invariant()
    def slots_are_accounted_for(self) -> None:
        if self.is_up:
            assert self.thread.is_alive()
            self.manager.check()

    @invariant()
    def nobody_else_has_the_slots_of_a_put(self) -> None:
        held = [t for e in self.engines for t in e.tasks if t.holds]
        taken = [s for t in held if t.is_put for s in t.status.slots]
        taken += [s for orphans in self.orphans for s in orphans.slots]
        taken += [s for e in self.engines for t in e.writing for s in t.status.slots]
        assert len(set(taken)) == len(taken)
        assert not {s for t in held if not t.is_put for s in t.status.slots} & set(taken)

    @invariant()
    def bytes_are_right(self) -> None:
        for task in (t for e in self.engines for t in e.tasks):
            self.check_bytes(task)

    def check_bytes(self, task: Task) -> None:
        """What was promised to a get stays until it ends it."""
        if task.holds and not task.is_put:
            slots = task.status.slots
            found = [bytes(self.manager.view(slot)) for slot in slots]
            assert found == contents(task.namespace, task.keys[: len(slots)])
            generations = self.manager.memory.generations(np.array(slots, np.int32))
            assert list(generations) == task.status.generations

    # -- the end -----------------------------------------------------------------------------

    def teardown(self) -> None:
        if self.is_up:
            for each in self.engines:
                each.scheduler.close()
                each.worker.close()
            for orphans in self.orphans:
                orphans.worker.close()
            try:
                eventually(lambda: not self.server.clients, "a connection is kept")
                eventually(self.all_is_returned, "something is kept")
                self.manager.check()
            finally:  # its thread would keep the process
                self.server.stop()
                self.thread.join(PATIENCE_SECONDS)
            assert not self.thread.is_alive()
        shutil.rmtree(self.root)

    def all_is_returned(self) -> bool:
        report = self.manager.stats()
        assert (report.running_gets, report.running_puts, report.engines) == (0, 0, [])
        in_host = sum(namespace.host_blocks for namespace in report.namespaces)
        return report.tiers[0].used_blocks == in_host  # but for blocks on their way up


@pytest.fixture(autouse=True)
def _fast_disk() -> Iterator[None]:
    """No power fails here: syncing would only be slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda _: None)
        patch.setattr(os, "fsync", lambda _: None)
        yield


TestServerMachine = ServerMachine.TestCase
TestServerMachine.settings = machine_settings(examples=50, steps=40)

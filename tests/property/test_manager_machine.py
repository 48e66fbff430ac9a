"""Random use of a cache by several engines: no byte is wrong, no slot is lost or used twice.

The bytes of a block are a function of its key, so what a lease must hold is known without a model
of the tiers. Which blocks are found is known exactly where nothing has to leave (*roomy*); where
eviction is constant it is bounded: nothing is found that was not saved.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

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
    generation_of,
    host_slot,
    keys,
    known,
    reads_running,
    save,
    write,
)
from tests.machines import machine_settings

from kvstrata.core.errors import LimitExceeded
from kvstrata.core.types import BlockKey, NamespaceId, StoreKey
from kvstrata.manager.manager import KVManager
from kvstrata.manager.tasks import FINAL, UNSETTLED, TaskState, TaskStatus
from kvstrata.testing.memory import MemoryStore, Value

namespaces = st.sampled_from([ALICE, ALICE, BOB])
goes_on = st.sampled_from(
    ["complete", "complete", "complete", "stay", "launch", "fail", "cancel", "part"]
)
prompts = [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 1, 1), (1, 0, 0, 0), (1, 1, 0)]
paths = st.builds(lambda prompt, end: prompt[:end], st.sampled_from(prompts), st.integers(1, 4))
# What is there to be chosen from depends on how far the disk has come, so numbers are drawn.
picks = st.integers(0, 11)
Path_ = tuple[int, ...]
T = TypeVar("T")


def pick(some: Sequence[T], number: int) -> T:
    return some[number % len(some)]


@dataclass
class Engine:
    owner: int
    worker: int
    session: str
    writing: list["Held"] = field(default_factory=list)  # puts of connections that broke


@dataclass
class Held:
    """A task that runs, as its client sees it."""

    status: TaskStatus
    owner: int
    namespace: NamespaceId
    keys: list[BlockKey]
    findable: int = 0  # get: leading blocks that were there when it was asked
    launched: bool = False
    stale: bool = False  # put: its namespace was reset
    stopping: bool = False  # launched, and cancelled

    @property
    def task_id(self) -> int:
        return self.status.task_id


@dataclass
class Quarantine:
    """Slots whose engine has died: its workers may still write there."""

    slots: list[int]
    writers: set[int] = field(default_factory=set)


class RemoteStore(MemoryStore):
    """What other nodes write to as well; here it is asked slowly, so that much happens meanwhile."""

    def exists(self, keys: Sequence[StoreKey]) -> list[bool]:
        time.sleep(0.001)
        return super().exists(keys)


class ManagerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.saved: set[tuple[NamespaceId, BlockKey]] = set()
        self.alive = False

    @initialize(
        roomy=st.booleans(),
        disk_slots=st.sampled_from([0, 2, 4, 8]),
        remote_slots=st.sampled_from([0, 0, 2, 1000]),
        eviction=st.sampled_from(["lru", "s3fifo", "cost"]),
        written=st.sampled_from(["saved", "evicted"]),
    )
    def start(
        self, roomy: bool, disk_slots: int, remote_slots: int, eviction: str, written: str
    ) -> None:
        self.roomy = roomy
        self.eviction = eviction
        self.written = written
        self.remote: dict[StoreKey, Value] | None = {} if remote_slots else None
        self.remote_slots = 1000 if roomy else remote_slots
        self.slots = 64 if roomy else 5
        self.disk_slots = (64 if disk_slots else 0) if roomy else disk_slots
        self.sessions = 0
        self.open()

    def open(self) -> None:
        settings = config(
            self.slots,
            self.root / "disk" if self.disk_slots else None,
            self.disk_slots,
            shared=None if self.remote is None else self.root / "shared",
            eviction=self.eviction,
            write=self.written,
        )
        store = None
        if self.remote is not None:
            store = RemoteStore(
                block_bytes=BLOCK_BYTES, capacity_blocks=self.remote_slots, values=self.remote
            )
        self.manager = KVManager(settings, block_bytes=BLOCK_BYTES, remote=store)
        self.manager.memory.mapping.data[:] = 0xEE
        self.alive = True
        self.engines: list[Engine] = []
        self.gets: list[Held] = []
        self.puts: list[Held] = []
        self.ended: list[tuple[int, int]] = []  # task, owner
        self.quarantines: list[Quarantine] = []
        self.pins: list[tuple[int, NamespaceId]] = []
        self.generations: dict[int, int] = {}  # of each slot, when it was last reserved
        self.connect()
        self.connect()

    # -- engines -----------------------------------------------------------------------------

    def connect(self) -> None:
        if len(self.engines) == 3:
            return
        self.sessions += 1
        session = f"e{self.sessions}"
        engine = self.manager.connect_engine(session, 1, life=session)
        assert self.manager.get_match(ALICE, keys(0), owner=engine) == TaskStatus(
            0, TaskState.FAILED
        )
        self.engines.append(Engine(engine, self.manager.connect_worker(session, 0), session))

    @rule(
        who=picks,
        worker_first=st.booleans(),
        namespace=namespaces,
        what=st.sampled_from(
            ["nothing"] * 5
            + ["connect", "dies", "dies", "line breaks", "reset", "clear", "restart"]
        ),
    )
    def upheaval(self, who: int, worker_first: bool, namespace: NamespaceId, what: str) -> None:
        if what == "connect":
            self.connect()
        elif what == "dies":
            self.engine_dies(pick(self.engines, who), worker_first)
        elif what == "line breaks":
            self.line_breaks(pick(self.engines, who), all_run=worker_first)
        elif what == "reset":
            self.reset(namespace)
        elif what == "clear":
            self.clear(namespace, who)
        elif what == "restart":
            self.restart()

    def engine_dies(self, engine: Engine, worker_first: bool) -> None:
        self.engines.remove(engine)
        if worker_first:
            self.manager.disconnect(engine.worker)
        self.manager.disconnect(engine.owner)
        puts = [put for put in self.puts if put.owner == engine.owner] + engine.writing
        slots = [s for put in puts for s in put.status.slots]
        for held in (self.gets, self.puts):
            self.ended += [(h.task_id, h.owner) for h in held if h.owner == engine.owner]
            held[:] = [h for h in held if h.owner != engine.owner]
        if not worker_first:
            self.quarantines.append(Quarantine(slots, {engine.worker}))
        if not self.engines:
            self.connect()

    def line_breaks(self, engine: Engine, *, all_run: bool) -> None:
        """The scheduler comes back, sooner than the server knows that it was away."""
        puts = [put for put in self.puts if put.owner == engine.owner]
        engine.writing += puts if all_run else puts[::2]
        for held in (self.gets, self.puts):
            self.ended += [(h.task_id, h.owner) for h in held if h.owner == engine.owner]
            held[:] = [h for h in held if h.owner != engine.owner]
        running = [put.task_id for put in engine.writing]
        old = engine.owner
        engine.owner = self.manager.connect_engine(
            engine.session, 1, life=engine.session, running=running
        )
        self.manager.disconnect(old)

    @rule(who=picks, which=picks, how=st.sampled_from(["complete", "fail"]))
    def worker_ends_what_a_broken_line_has_left(self, who: int, which: int, how: str) -> None:
        engine = pick(self.engines, who)
        if engine.writing:
            put = engine.writing.pop(which % len(engine.writing))
            for slot in put.status.slots:
                self.manager.view(slot)[:] = b"\xdd" * BLOCK_BYTES
            getattr(self.manager, how)([put.task_id], owner=engine.owner)

    @rule(which=picks)
    def late_worker_writes_and_goes(self, which: int) -> None:
        """Until it has gone nobody else may have its slots, so its bytes hurt nobody."""
        if not self.quarantines:
            return
        quarantine = pick(self.quarantines, which)
        for slot in quarantine.slots:
            self.manager.view(slot)[:] = b"\xdd" * BLOCK_BYTES
        self.bytes_are_right()
        self.quarantines.remove(quarantine)
        for worker in quarantine.writers:
            self.manager.disconnect(worker)

    # -- gets --------------------------------------------------------------------------------

    @rule(whole=st.lists(st.tuples(st.booleans(), namespaces, paths), min_size=1, max_size=6))
    def traffic(self, whole: list[tuple[bool, NamespaceId, Path_]]) -> None:
        """Prompts that are looked up or saved, and done with at once: what keeps tiers turning."""
        for is_put, namespace, path in whole:
            if is_put:
                self.put_match(self.engines[0], namespace, keys(*path), None, "complete")
            else:
                self.get_match(self.engines[0], namespace, keys(*path), "complete")

    @rule(who=picks, namespace=namespaces, path=paths, then=goes_on)
    def get(self, who: int, namespace: NamespaceId, path: Path_, then: str) -> None:
        self.get_match(pick(self.engines, who), namespace, keys(*path), then)

    def get_match(
        self, engine: Engine, namespace: NamespaceId, asked: list[BlockKey], then: str
    ) -> None:
        status = self.manager.get_match(namespace, asked, owner=engine.owner)
        expected = self.findable(namespace, asked)
        assert status.matched_blocks <= expected
        if self.roomy and self.remote is None:
            assert status.matched_blocks == expected
        if not status.task_id:
            declined, untold = status.declined_blocks, status.untold_blocks
            assert declined + untold <= len(asked)
            assert status == TaskStatus(
                0, TaskState.DONE, declined_blocks=declined, untold_blocks=untold
            )
            return
        held = Held(status, engine.owner, namespace, asked, expected)
        self.gets.append(held)
        if status.state is TaskState.SEARCHING:
            assert self.remote is not None
        else:
            assert (status.state is TaskState.READY) == (len(status.slots) == status.matched_blocks)
        self.get_step(held, then)

    def arrive(self, held: Held) -> None:
        found = self.manager.wait([held.task_id], PATIENCE_SECONDS)[held.task_id]
        assert found.state in {TaskState.READY, TaskState.RUNNING, TaskState.STOPPING}
        assert len(held.status.slots) <= len(found.slots) <= found.matched_blocks
        if not held.launched and not held.stale and self.roomy:
            if self.is_being_saved(held.namespace, held.keys):
                assert len(found.slots) <= held.findable
            else:
                assert len(found.slots) == max(held.findable, held.status.matched_blocks)
        held.status = found

    @rule(which=picks, then=goes_on)
    def get_goes_on(self, which: int, then: str) -> None:
        if self.gets:
            self.get_step(pick(self.gets, which), then)

    def get_step(self, held: Held, how: str) -> None:
        if how == "stay":
            return
        self.arrive(held)
        if self.tell(held, how):
            self.gets.remove(held)
            self.ended.append((held.task_id, held.owner))
        if how in {"fail", "part"}:
            self.doubt(held, 1 if how == "part" else 0)

    def tell(self, held: Held, how: str) -> bool:
        """Say that *held* goes on as *how*, everything twice; whether it has ended."""
        task, owner = [held.task_id], held.owner
        for _ in range(2):
            if how in {"launch", "complete", "part"} and not held.launched:
                self.manager.launch(task, owner=owner)
            if how == "complete":
                self.manager.complete(task, owner=owner)
            elif how == "part":
                self.manager.complete_part(held.task_id, 1, owner=owner)
            elif how == "fail":
                self.manager.fail(task, owner=owner)
            elif how == "cancel":
                self.manager.cancel(task, owner=owner)
        held.stopping = held.stopping or (held.launched and how == "cancel")
        held.launched = held.launched or how in {"launch", "complete", "part"}
        found = self.manager.try_wait(task)[held.task_id].state
        if how == "launch" or (how == "cancel" and held.launched):
            assert found is (TaskState.STOPPING if held.stopping else TaskState.RUNNING)
            return False
        cancelled = held.stopping or how == "cancel"
        expected = TaskState.FAILED if how == "fail" else TaskState.DONE
        assert found is (TaskState.CANCELLED if cancelled else expected)
        return True

    def doubt(self, held: Held, loaded: int) -> None:
        """A failed load drops its blocks from host memory: found again only from disk."""
        if not self.disk_slots and self.remote is None:
            leased = {(g.namespace, k) for g in self.gets if g is not held for k in g.keys}
            for block in held.keys[loaded : held.status.matched_blocks]:
                if (held.namespace, block) not in leased:
                    self.saved.discard((held.namespace, block))
        self.roomy = False  # what is still found now depends on the disk's progress

    @rule(who=picks, namespace=namespaces, path=paths, cancelled=st.booleans())
    def prefetch(self, who: int, namespace: NamespaceId, path: Path_, cancelled: bool) -> None:
        engine = pick(self.engines, who)
        task = self.manager.prefetch(namespace, keys(*path), owner=engine.owner)
        if cancelled:
            self.manager.cancel([task], owner=engine.owner)

        def has_ended() -> bool:
            return task == 0 or self.manager.try_wait([task])[task].state in FINAL

        eventually(has_ended, "a prefetch does not end")
        ends = {TaskState.DONE} | ({TaskState.CANCELLED} if cancelled else set())
        assert task == 0 or self.manager.try_wait([task])[task].state in ends

    # -- puts --------------------------------------------------------------------------------

    @rule(who=picks, skip=picks, namespace=namespaces, path=paths, then=goes_on)
    def put(self, who: int, skip: int, namespace: NamespaceId, path: Path_, then: str) -> None:
        whole = keys(*path)
        start = skip % len(whole)
        parent = whole[start - 1] if start else None
        self.put_match(pick(self.engines, who), namespace, whole[start:], parent, then)

    def put_match(
        self,
        engine: Engine,
        namespace: NamespaceId,
        asked: list[BlockKey],
        parent: BlockKey | None,
        then: str,
    ) -> None:
        status = self.manager.put_match(namespace, asked, parent=parent, owner=engine.owner)
        if not status.task_id:
            assert status.state in {TaskState.DONE, TaskState.FAILED}
            if self.roomy:
                there = all((namespace, k) in self.saved for k in asked)
                # What only the remote tier has may be on its way here once more.
                is_done = there and not self.is_being_saved(namespace, asked)
                assert (status.state is TaskState.DONE) == is_done
            return
        assert len(status.slots) == len(status.missing) == len(status.generations) > 0
        for slot, generation in zip(status.slots, status.generations, strict=True):
            assert generation > self.generations.get(slot, -1), "a slot kept its generation"
            self.generations[slot] = generation
            self.manager.view(slot)[:] = b"\xcc" * BLOCK_BYTES  # dirty until it is written
        if self.roomy:
            saving = {
                (p.namespace, p.keys[i]) for p in self.puts for i in p.status.missing if not p.stale
            } | self.saved
            new = [i for i, k in enumerate(asked) if (namespace, k) not in saving]
            # What only the remote tier has may be saved again: the index does not know it.
            assert status.missing == new or (self.remote and set(new) < set(status.missing))
        self.puts.append(Held(status, engine.owner, namespace, asked))
        self.put_step(self.puts[-1], then)

    @rule(which=picks, then=goes_on)
    def put_goes_on(self, which: int, then: str) -> None:
        if self.puts:
            self.put_step(pick(self.puts, which), then)

    def put_step(self, held: Held, how: str) -> None:
        if how == "stay":
            return
        if how in {"complete", "part"}:
            write(self.manager, held.status, held.namespace, held.keys)
        if not self.tell(held, how):
            return
        self.puts.remove(held)
        self.ended.append((held.task_id, held.owner))
        if how in {"complete", "part"} and not held.stale and not held.stopping:
            kept = held.status.missing if how == "complete" else held.status.missing[:1]
            self.saved |= {(held.namespace, held.keys[i]) for i in kept}
            self.found_at_once(held, kept)

    def found_at_once(self, held: Held, kept: list[int]) -> None:
        """A put that was completed is found, unless a get that is under way takes its slot."""
        gets = self.manager.try_wait([get.task_id for get in self.gets])
        if any(status.state in UNSETTLED for status in gets.values()):
            return
        for i in kept:
            status = self.manager.get_match(held.namespace, [held.keys[i]])
            assert (status.state, status.matched_blocks) == (TaskState.READY, 1)
            assert bytes(self.manager.view(status.slots[0])) == content(
                held.namespace, held.keys[i]
            )
            self.manager.cancel([status.task_id])

    # -- pins --------------------------------------------------------------------------------

    @rule(namespace=namespaces, path=paths)
    def pin(self, namespace: NamespaceId, path: Path_) -> None:
        try:
            number, blocks = self.manager.pin(namespace, keys(*path), 3600.0)
        except LimitExceeded:
            assert self.pins
            return
        assert bool(number) == bool(blocks)
        assert blocks <= self.findable(namespace, keys(*path))
        if number:
            self.pins.append((number, namespace))

    @rule(which=picks)
    def unpin(self, which: int) -> None:
        if self.pins:
            number, _ = self.pins.pop(which % len(self.pins))
            assert self.manager.unpin(number)
            assert not self.manager.unpin(number)

    # -- what must mean nothing --------------------------------------------------------------

    @rule(which=picks, how=st.sampled_from(["launch", "complete", "fail", "cancel"]))
    def late_news(self, which: int, how: str) -> None:
        """Of ended tasks, and of tasks of others."""
        known = self.ended[-4:] + [(h.task_id, -1) for h in self.gets + self.puts]
        if not known:
            return
        task, owner = pick(known, which)
        before = self.manager.stats()
        getattr(self.manager, how)([task, 999_999_999], owner=owner)
        after = self.manager.stats()
        assert (before.running_gets, before.running_puts) == (
            after.running_gets,
            after.running_puts,
        )

    # -- the whole cache ---------------------------------------------------------------------

    def reset(self, namespace: NamespaceId) -> None:
        self.manager.reset(namespace)
        self.saved = {(n, k) for n, k in self.saved if n != namespace}
        self.pins = [(pin, n) for pin, n in self.pins if n != namespace]
        for held in self.gets + self.puts:
            held.stale = held.stale or held.namespace == namespace
        for prompt in prompts:
            for block in keys(*prompt):
                task = self.manager.get_match(namespace, [block]).task_id
                if task:
                    assert self.manager.wait([task], PATIENCE_SECONDS)[task].slots == []
                    self.manager.cancel([task])

    def clear(self, namespace: NamespaceId, which: int) -> None:
        """What a tier gives up may be found in another one."""
        tier = pick([tier.tier for tier in self.manager.stats().tiers], which)
        report = self.manager.operator.clear(namespace, tier)
        assert report.blocks.keys() == {tier}
        self.roomy = False

    def restart(self) -> None:
        self.manager.close()
        if not self.disk_slots and self.remote is None:
            self.saved.clear()
        self.open()

    # -- what always holds -------------------------------------------------------------------

    @invariant()
    def slots_are_accounted_for(self) -> None:
        if not self.alive:
            return
        self.manager.check()
        quarantined = [slot for q in self.quarantines for slot in q.slots]
        quarantined += [s for e in self.engines for put in e.writing for s in put.status.slots]
        reserved = [slot for put in self.puts for slot in put.status.slots]
        leased = {slot for get in self.gets for slot in get.status.slots}
        assert len(set(quarantined + reserved)) == len(quarantined + reserved)
        assert not leased & set(quarantined + reserved)

    @invariant()
    def bytes_are_right(self) -> None:
        if not self.alive:
            return
        for get in self.gets:
            slots = get.status.slots
            found = [bytes(self.manager.view(slot)) for slot in slots]
            assert found == contents(get.namespace, get.keys[: len(slots)])
            generations = [generation_of(self.manager, slot) for slot in slots]
            assert generations == get.status.generations
        for put in self.puts:
            generations = [generation_of(self.manager, slot) for slot in put.status.slots]
            assert generations == put.status.generations

    def is_being_saved(self, namespace: NamespaceId, asked: Sequence[BlockKey]) -> bool:
        """Whether one of *asked* is being written to host memory: it is not asked for elsewhere."""
        saving = {
            (p.namespace, p.keys[i]) for p in self.puts if not p.stale for i in p.status.missing
        }
        return any((namespace, key) in saving for key in asked)

    def findable(self, namespace: NamespaceId, asked: Sequence[BlockKey]) -> int:
        count = 0
        while count < len(asked) and (namespace, asked[count]) in self.saved:
            count += 1
        return count

    def teardown(self) -> None:
        if self.alive:
            self.all_is_returned()
            self.all_may_leave()
            self.manager.close()
        shutil.rmtree(self.root)

    def all_is_returned(self) -> None:
        for engine in self.engines:
            self.manager.disconnect(engine.owner)
            self.manager.disconnect(engine.worker)
        for quarantine in self.quarantines:
            for worker in quarantine.writers:
                self.manager.disconnect(worker)
        report = self.manager.stats()
        assert (report.running_gets, report.running_puts) == (0, 0)
        assert [pin.number for pin in report.pins] == [number for number, _ in self.pins]
        for number, _ in self.pins:
            assert self.manager.unpin(number)
        for lower in self.manager._lower.values():
            assert lower.drain(PATIENCE_SECONDS)
        self.manager.check()
        eventually(lambda: not reads_running(self.manager), "a promotion does not end")
        blocks = known(self.manager)
        assert set(blocks.values()) <= {0}
        in_host = sum(host_slot(self.manager, block) >= 0 for block in blocks)
        assert self.manager._cache.host_used == in_host
        assert self.manager._cache.index.retired_blocks == 0

    def all_may_leave(self) -> None:
        """Nobody uses a block any more: what is saved now finds room, once others are written."""
        for prompt in range(2, self.slots):
            eventually(partial(self.is_kept, keys(prompt, 0)), "nothing can be saved any more")

    def is_kept(self, asked: list[BlockKey]) -> bool:
        """In parts, as chunked prefill saves: the first was used before what continues from it."""
        save(self.manager, ALICE, asked[:1])
        save(self.manager, ALICE, asked[1:], parent=asked[0])
        return host_slot(self.manager, ALICE + asked[1]) >= 0


@pytest.fixture(autouse=True)
def _fast_disk() -> Iterator[None]:
    """No power fails here: syncing would only be slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda _: None)
        patch.setattr(os, "fsync", lambda _: None)
        yield


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = machine_settings(examples=60, steps=40)

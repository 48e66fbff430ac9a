"""Jobs on a device that does everything as late, as early and as badly as it may.

The engine writes blocks at some time; saves and loads are made and run in any order; copies fail,
are refused, and the device is lost. A save that ends whole has the bytes that the engine had been
told to write, a load that ends whole has arrived, and a job that has ended leaves nothing running.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from tests.simulated_device import SimulatedDevice, SimulatedPins, SimulatedStream

from kvstrata.storage.mapping import HostMapping
from kvstrata.transfer.descriptors import PagePlace, PagePlaces
from kvstrata.transfer.device import Bytes
from kvstrata.transfer.devices import NOW, PagedDevice
from kvstrata.transfer.driver import DeviceFault, Event
from kvstrata.transfer.guarded import Copied, RankSlots, split_runs
from kvstrata.transfer.lanes import Handle
from kvstrata.transfer.layered import LayerGates, Part
from kvstrata.transfer.streamed import StreamedDevice
from kvstrata.transfer.streams import CopyLimits, CopyQueue, Flight

LAYERS, PAGE, BLOCKS, SLOTS, PER_SLOT = 3, 8, 8, 3, 2
ROW = LAYERS * PAGE
LIMITS = CopyLimits(chunk_bytes=2 * PAGE, chunk_spans=3, chunks_in_flight=2, patience_seconds=0.0)


class Job(NamedTuple):
    """A job that is made, and when it is whole, what has to be where."""

    run: Callable[[Handle[Copied]], Copied | None]
    slot: int
    blocks: list[int]
    is_save: bool
    bytes: Bytes  # (PER_SLOT, ROW)


class Forward(LayerGates):
    """The engine's thread, which launches each layer as soon as it may."""

    def __init__(self, driver: SimulatedDevice, launch: Callable[[int], None]) -> None:
        super().__init__(LAYERS)
        self._driver = driver
        self._launch = launch
        self._launched = 0

    def open(self, event: Event | None = None) -> None:
        super().open(event)
        assert event is not None
        self._driver.follow(event)
        self._launch(self._launched)
        self._launched += 1


class Jobs(RuleBasedStateMachine):
    """One worker's device."""

    waits_for_engine: ClassVar = True

    @initialize(blocks_outermost=st.booleans(), seed=st.integers(0, 1000))
    def begin(self, blocks_outermost: bool, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        favourite = ["engine", "loads", "saves"][seed % 3]
        self.driver = SimulatedDevice(lambda names: self._next(names, favourite))
        shape = (BLOCKS, LAYERS, PAGE) if blocks_outermost else (LAYERS, BLOCKS, PAGE)
        cache = self.random.integers(0, 256, shape, np.uint8)
        self.cache = cache if blocks_outermost else cache.transpose(1, 0, 2)
        self.expected = self.cache.copy()  # once the engine's work is done
        address, (block, layer, _) = self.cache.ctypes.data, self.cache.strides
        places = PagePlaces([PagePlace(address + i * layer, block, PAGE) for i in range(LAYERS)], 8)
        self.mapping = HostMapping.create(SLOTS, 4096, b"server")
        self.mapping.data[:] = self.random.integers(0, 256, self.mapping.data.shape, np.uint8)
        self.slots = RankSlots(self.mapping, 64, (PER_SLOT * ROW,), (0,))
        streams = self.driver.loads, self.driver.saves
        self.device: PagedDevice = StreamedDevice(
            self.driver, [places], streams, SimulatedPins(), LIMITS
        )
        self.pending: list[Job] = []

    def _next(self, names: Any, favourite: str) -> str:
        if favourite in names and self.random.random() < 0.9:
            return favourite
        return str(self.random.choice(names))

    @property
    def _busy(self) -> set[int]:
        """Blocks and slots of jobs: nobody else touches them."""
        return {block for job in self.pending for block in job.blocks}

    def _free_slots(self) -> list[int]:
        return [s for s in range(SLOTS) if all(job.slot != s for job in self.pending)]

    def _rows(self, slot: int) -> Bytes:
        region = self.mapping.data[slot, 64 : 64 + PER_SLOT * ROW]
        return region.reshape(PER_SLOT, ROW)

    @rule(blocks=st.sets(st.integers(0, BLOCKS - 1), min_size=1))
    def the_engine_writes(self, blocks: set[int]) -> None:
        for block in sorted(blocks - self._busy):
            value = self.random.integers(0, 256, (LAYERS, PAGE), np.uint8)
            self.expected[block] = value
            self.driver.launch(partial(self.cache.__setitem__, block, value))

    @rule()
    def a_step_begins(self) -> None:
        """From now on a save has one chunk under way, not two."""
        self.device.step_begins()

    @rule(steps=st.integers(1, 5))
    def time_passes(self, steps: int) -> None:
        for _ in range(steps):
            self.driver.step()

    @precondition(lambda self: self._free_slots())
    @rule(is_save=st.booleans(), data=st.data())
    def a_job_is_made(self, is_save: bool, data: st.DataObject) -> None:
        free = [b for b in range(BLOCKS) if b not in self._busy]
        if len(free) < PER_SLOT:
            return
        blocks = data.draw(st.permutations(free))[:PER_SLOT]
        slot = data.draw(st.sampled_from(self._free_slots()))
        numbered = [(slot, int(self.mapping.generations[slot]))]
        runs = split_runs(blocks, numbered, per_slot=(PER_SLOT,), absent=-1)
        make = self.device.save_job if is_save else self.device.load_job
        source = self.expected[blocks].reshape(PER_SLOT, ROW) if is_save else self._rows(slot)
        fence = self.device.fence() if self.waits_for_engine else NOW
        job = make(self.slots, runs, fence)
        if not is_save:  # nobody may know what is there before it is whole
            self.expected[blocks] = source.reshape(PER_SLOT, LAYERS, PAGE)
        self.pending.append(Job(job, slot, blocks, is_save, source.copy()))

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def a_job_runs(self, data: st.DataObject) -> None:
        job = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        may_fail = self._can_fail
        try:
            copied = job.run(Handle())
        except DeviceFault:
            assert may_fail or self.driver.fault is not None
            self._forget(job)
            return
        finally:
            left = self.driver.saves if job.is_save else self.driver.loads
            assert not left.queue
        assert copied is Copied.WHOLE
        found = self._rows(job.slot) if job.is_save else self.cache[job.blocks]
        assert np.array_equal(found.reshape(PER_SLOT, ROW), job.bytes)

    def _forget(self, job: Job) -> None:
        """It is unknown what a failed job has left; a new engine would begin afresh."""
        self.driver.fault = None
        self.driver.run_all()
        self.expected[job.blocks] = self.cache[job.blocks]

    @rule(slot=st.integers(0, SLOTS - 1), after=st.integers(0, 3), is_save=st.booleans())
    @precondition(lambda self: len(self._busy) <= BLOCKS - PER_SLOT and not self.driver.is_lost)
    def a_slot_changes_hands_while_it_is_copied(self, slot: int, after: int, is_save: bool) -> None:
        """Whenever that happens, the job knows."""
        if slot not in self._free_slots() or self.driver.fails_at is not None:
            return
        blocks = [b for b in range(BLOCKS) if b not in self._busy][:PER_SLOT]
        numbered = [(slot, int(self.mapping.generations[slot]))]
        runs = split_runs(blocks, numbered, per_slot=(PER_SLOT,), absent=-1)
        make = self.device.save_job if is_save else self.device.load_job
        left = [after]

        def maybe() -> None:
            left[0] -= 1
            if left[0] == 0:
                self.mapping.generations[slot] += 1

        self.driver.refuses_after = self.driver.records_left = None
        self.driver.during_copy = maybe
        if after == 0:
            self.mapping.generations[slot] += 1
        copied = make(self.slots, runs, self.device.fence())(Handle())
        self.driver.during_copy = lambda: None
        assert (copied is Copied.STALE) == (left[0] <= 0)
        self.driver.run_all()
        self.expected[blocks] = self.cache[blocks]

    @rule(layer=st.integers(0, LAYERS - 1))
    @precondition(lambda self: len(self._busy) <= BLOCKS - PER_SLOT and not self.driver.is_lost)
    def one_layer_is_saved(self, layer: int) -> None:
        if not (slots := self._free_slots()) or self.driver.fails_at is not None:
            return
        blocks = [b for b in range(BLOCKS) if b not in self._busy][:PER_SLOT]
        numbered = [(slots[0], int(self.mapping.generations[slots[0]]))]
        runs = split_runs(blocks, numbered, per_slot=(PER_SLOT,), absent=-1)
        self.driver.refuses_after = self.driver.records_left = None
        rows = self._rows(slots[0]).reshape(PER_SLOT, LAYERS, PAGE)
        expected = rows.copy()
        expected[:, layer] = self.expected[blocks, layer]
        job = self.device.save_layer_job(Part(self.slots, runs), self.device.fence(), layer)
        assert job(Handle()) is Copied.WHOLE
        assert np.array_equal(rows, expected)

    @rule(in_doubt=st.sampled_from([None, 0, 1]))
    @precondition(lambda self: len(self._busy) <= BLOCKS - 2 * PER_SLOT)
    def a_forward_runs_into_its_load(self, in_doubt: int | None) -> None:
        """Each layer reads what was loaded, or the load is reported as failed."""
        if len(slots := self._free_slots()[:2]) < 2:
            return
        free = [b for b in range(BLOCKS) if b not in self._busy][: 2 * PER_SLOT]
        blocks = [free[:PER_SLOT], free[PER_SLOT:]]
        for block in free:  # the engine zeroes what it gives to a request
            zero = np.zeros((LAYERS, PAGE), np.uint8)
            self.driver.launch(partial(self.cache.__setitem__, block, zero))
        parts = []
        for number, (slot, own) in enumerate(zip(slots, blocks, strict=True)):
            generation = int(self.mapping.generations[slot]) + (number == in_doubt)
            runs = split_runs(own, [(slot, generation)], per_slot=(PER_SLOT,), absent=-1)
            parts.append(Part(self.slots, runs))
        seen: list[Bytes] = []  # by layer, the blocks that its attention read

        def launch(layer: int) -> None:
            self.driver.launch(lambda: seen.append(self.cache[free, layer].copy()))

        may_fail = self._can_fail
        try:
            fence, forward = self.device.fence(), Forward(self.driver, launch)
            copied = self.device.load_layers_job(parts, fence, forward)(Handle())
        except DeviceFault:
            assert may_fail
        else:
            assert copied is Copied.WHOLE
            assert [part.doubt is not None for part in parts] == [i == in_doubt for i in (0, 1)]
            self.driver.run_all()  # nothing waits for ever
            rows = [self._rows(slot).reshape(PER_SLOT, LAYERS, PAGE) for slot in slots]
            for number in {0, 1} - {in_doubt}:
                first, end = number * PER_SLOT, (number + 1) * PER_SLOT
                assert np.array_equal(np.stack(seen, axis=1)[first:end], rows[number])
                assert np.array_equal(self.cache[free[first:end]], rows[number])
        assert not self.driver.loads.queue
        self.driver.fault = None
        self.driver.run_all()
        self.expected[free] = self.cache[free]

    @property
    def _can_fail(self) -> bool:
        driver = self.driver
        told = (driver.fault, driver.fails_at, driver.refuses_after, driver.records_left)
        return driver.is_lost or any(each is not None for each in told)

    @rule(number=st.integers(0, 8))
    def a_copy_will_fail(self, number: int) -> None:
        self.driver.fails_at = number

    @rule(number=st.integers(0, 2))
    def a_copy_will_be_refused(self, number: int) -> None:
        self.driver.refuses_after = number

    @rule(number=st.integers(0, 4))
    def an_event_will_be_refused(self, number: int) -> None:
        self.driver.records_left = number

    @precondition(lambda self: len(self.pending) > 1)
    @rule()
    def the_device_is_lost(self) -> None:
        self.driver.lose()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        if not self.driver.is_lost:
            self.driver.run_all()
            untouched = [b for b in range(BLOCKS) if b not in self._busy]
            assert np.array_equal(self.cache[untouched], self.expected[untouched])
        self.mapping.close()


TestJobs = Jobs.TestCase
TestJobs.settings = settings(stateful_step_count=30)


class _WithoutFence(Jobs):
    waits_for_engine = False


# A fault that a job has not told of is met by one that has to succeed.
_FOUND = (AssertionError, DeviceFault)
_FINDING = settings(
    max_examples=2000,
    phases=[Phase.generate],
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def test_a_job_that_does_not_wait_for_the_engine_is_found() -> None:
    with pytest.raises(_FOUND):
        run_machine(_WithoutFence, settings=_FINDING)


def test_a_forward_that_does_not_wait_for_its_load_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SimulatedDevice, "follow", lambda self, event: None)
    with pytest.raises(_FOUND):
        run_machine(Jobs, settings=_FINDING)


def test_a_layered_load_that_overwrites_what_is_not_yet_free_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CopyQueue, "follow", lambda self, event: None)
    with pytest.raises(_FOUND):
        run_machine(Jobs, settings=_FINDING)


def test_a_job_that_ends_before_a_copy_that_no_event_marks_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SimulatedStream, "wait_idle", lambda self: None)
    with pytest.raises(_FOUND):
        run_machine(Jobs, settings=_FINDING)


def test_a_job_that_ends_before_its_copies_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flight, "wait", lambda self, but=0: None)
    with pytest.raises(_FOUND):
        run_machine(Jobs, settings=_FINDING)

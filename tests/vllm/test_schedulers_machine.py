"""vLLM's schedulers under any traffic and any fault: right tokens from right pages, nothing kept.

The oracle is the fake forward (``fake_runner``): it knows what every page has to hold, looks before
it reads, and gives each request the tokens that follow. What is written here says when a request
ends, what the server may hold, and that at the end nobody holds anything.
"""

import contextlib
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from tests.caches import eventually
from tests.machines import is_nightly, machine_settings
from tests.vllm.bench import MODES, Bench, prompt, serve, start
from tests.vllm.driven import Engine, context_of
from tests.vllm.fake_runner import LAYERS, TOKENS, continuation
from tests.vllm.faults import Again, Clock, Copies, Stall, lose_an_answer
from tests.vllm.plans import full, group, model_folder, recurrent
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.utils import check_sequence_repetition
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from kvstrata.integration.vllm.at_once import AtOnce
from kvstrata.server.client import ManagerClient

STEMS = [prompt(i, 64) for i in range(3)]
REPETITION = RepetitionDetectionParams(max_pattern_size=2, min_count=2)
EMBEDDINGS = 10_000  # more than all images together need
LATE_SECONDS = 0.1  # of lookups and saves
BLOCKS_AT_ONCE = 8  # of a step: some requests run in the step that loads them, others wait

prompts = st.builds(
    lambda stem, shared, seed, own: (STEMS[stem][:shared] + prompt(seed, own)) or STEMS[stem][:1],
    st.integers(0, 2),
    st.sampled_from([0, 1, 8, 31, 32, 33, 64, 64]),
    st.integers(100, 103),
    st.sampled_from([0, 0, 1, 7, 20, 30]),
)


class Arrival(NamedTuple):
    tokens: list[int]
    most_given: int
    end: str
    kind: str
    waits: bool


arrivals = st.builds(
    Arrival,
    prompts,
    st.integers(1, 30),
    st.sampled_from(["length", "length", "stop", "repetition"]),
    st.sampled_from(["plain"] * 5 + ["salt", "adapter", "an image", "another image", "unread"]),
    st.sampled_from([False] * 8 + [True]),
)
# Of which there is something to load when they come again.
saved_arrivals = arrivals.filter(lambda each: len(each.tokens) > 16 and each.kind != "unread")
# More blocks than the smaller devices have.
CROWD = [Arrival(prompt(200 + i, 88), 4, "length", "plain", False) for i in range(6)]


def fields(kind: str, tokens: list[int]) -> dict[str, Any]:
    """Of ``Request``."""
    if kind == "salt":
        return {"cache_salt": "of a tenant"}
    if kind == "adapter":
        return {"lora_request": LoRARequest("adapter", 1, "/nowhere")}
    if kind.endswith("image") and len(tokens) > 12:
        place = PlaceholderRange(offset=3, length=9)
        return {"mm_features": [MultiModalFeatureSpec(None, "image", kind, place)]}
    return {}


def until_the_end(tokens: list[int], sampling: dict[str, Any]) -> list[int]:
    """Of *tokens* those that vLLM gives before it stops."""
    for end in range(1, len(tokens)):
        if tokens[end - 1] in sampling.get("stop_token_ids", ()):
            return tokens[:end]
        repeats = "repetition_detection" in sampling
        if repeats and check_sequence_repetition(tokens[:end], REPETITION):
            return tokens[:end]
    return tokens


def add(engine: Engine, asked: Arrival) -> list[int]:
    """*engine* is asked; the tokens that it must give."""
    others = fields(asked.kind, asked.tokens)
    given = continuation(asked.tokens, asked.most_given, context_of(others))
    sampling: dict[str, Any] = {}
    if asked.end == "stop":
        sampling["stop_token_ids"] = [given[asked.most_given // 2]]
    elif asked.end == "repetition":
        sampling["repetition_detection"] = REPETITION
    if asked.kind == "unread":
        sampling["skip_reading_prefix_cache"] = True
    transfer = {"kvstrata_wait_seconds": 0.02} if asked.waits else None
    name = f"r{len(engine.requests)}"
    engine.add(name, asked.tokens, asked.most_given, transfer, sampling=sampling, **others)
    return until_the_end(given, sampling)


def allow_images(engine: Engine) -> None:
    """As many as are asked for: what an encoder gives is no matter here."""
    scheduler: Any = engine.scheduler
    scheduler.max_num_encoder_input_tokens = EMBEDDINGS
    scheduler.encoder_cache_manager = EncoderCacheManager(EMBEDDINGS)


def count_admissions(engine: Engine, seen: Counter[str]) -> None:
    """What vLLM hears of requests in line, and when it has no room for what was found."""
    connector, blocks = engine.connector, engine.scheduler.kv_cache_manager
    ask, allocate = connector.get_num_new_matched_tokens, blocks.allocate_slots

    def asked(request: Request, computed: int) -> Any:
        tokens, waits = ask(request, computed)
        seen["None answers"] += tokens is None
        return tokens, waits

    def allocated(*args: Any, num_external_computed_tokens: int = 0, **others: Any) -> Any:
        found = num_external_computed_tokens
        given = allocate(*args, num_external_computed_tokens=found, **others)
        seen["no room for a match"] += given is None and found > 0
        return given

    connector.get_num_new_matched_tokens = asked
    blocks.allocate_slots = allocated


class SchedulerMachine(RuleBasedStateMachine):
    """One engine, and one server at a time."""

    asynchronous: ClassVar[bool]
    drafts: ClassVar[int]
    load_mode: ClassVar[str]
    groups: ClassVar[list[KVCacheGroupSpec]] = []
    stages: ClassVar[int] = 1
    seen: ClassVar[Counter[str]]
    failures: ClassVar[list[str]]

    @initialize(
        blocks=st.sampled_from([40, 60, 200]),
        slots=st.sampled_from([6, 20, 60, 200]),
        policy=st.sampled_from(["recompute", "recompute", "fail"]),
        ranks=st.sampled_from([1, 1, 2]),
        has_lower_tier=st.booleans(),
    )
    def begin(self, blocks: int, slots: int, policy: str, ranks: int, has_lower_tier: bool) -> None:
        self.wanted: dict[str, list[int]] = {}  # of requests that are not aborted
        # Models with states have no more than one; a pipeline has one for each stage.
        ranks = 1 if self.groups or self.stages > 1 else ranks
        self.slots, self.policy, self.workers = slots, policy, ranks * self.stages
        self.may_fail = False  # a load, by now
        self.lossy: ManagerClient | None = None  # the line that an answer was lost on
        self.stack, self.server = contextlib.ExitStack(), contextlib.ExitStack()
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.folder = model_folder(folder, num_hidden_layers=self.stages * LAYERS)
        self.shared = self.folder / "shared" if has_lower_tier else None
        self.stack.callback(self.server.close)
        self.clock = Clock()
        self.start_server([])
        self.engine = self.bench.engine(
            asynchronous=self.asynchronous,
            drafts=self.drafts,
            num_blocks=blocks,
            ranks=ranks,
            stages=self.stages,
            policy=policy,
            load_mode=self.load_mode,
            groups=self.groups,
            lookup_wait_seconds=0.0005,
            lookup_timeout_seconds=LATE_SECONDS,
            save_timeout_seconds=LATE_SECONDS,
        )
        self.stack.callback(self.engine.close)
        for rank in self.engine.runner.ranks:
            rank.half._clock = self.clock
        if self.load_mode == "auto":
            self.engine.half._loads._at_once = AtOnce(BLOCKS_AT_ONCE)
        allow_images(self.engine)
        self.copies = [Copies(self.engine, rank, self.seen) for rank in range(self.workers)]
        self.again = Again(self.engine.connector, self.seen)
        count_admissions(self.engine, self.seen)

    def start_server(self, engines: list[Engine]) -> None:
        served = serve(self.folder, self.slots, shared=self.shared, ranks=self.workers)
        self.bench: Bench = self.server.enter_context(served)
        self.bench.engines += engines
        self.stall = Stall(self.bench.manager, self.seen)

    # -- requests --------------------------------------------------------------------------------

    @rule(asked=st.lists(arrivals, min_size=1, max_size=5), steps=st.integers(0, 12))
    def arrive(self, asked: list[Arrival], steps: int) -> None:
        for each in asked:
            name = f"r{len(self.engine.requests)}"
            self.wanted[name] = add(self.engine, each)
        self.step(steps)

    @rule(steps=st.sampled_from([1, 1, 2, 4, 8, 16]))
    def step(self, steps: int) -> None:
        self.seen["steps of the engine"] += steps
        for _ in range(steps):
            self.engine.step()

    @rule(which=st.integers(0, 30), end=st.sampled_from(["ABORTED", "ABORTED", "ERROR"]))
    def end_from_outside(self, which: int, end: str) -> None:
        self.end_one(self.unfinished(), which, end)

    def unfinished(self) -> list[Request]:
        return [request for request in self.engine.requests.values() if not request.is_finished()]

    def end_one(self, requests: list[Request], which: int, end: str) -> None:
        if requests:
            request = requests[which % len(requests)]
            self.seen[f"{end} while {request.status.name}"] += 1
            del self.wanted[request.request_id]
            status = RequestStatus[f"FINISHED_{end}"]
            self.engine.scheduler.finish_requests([request.request_id], status)

    @rule(steps=st.integers(1, 12))
    def find_more_than_there_is_room_for(self, steps: int) -> None:
        """By themselves few requests for which something is found have no room."""
        self.arrive(CROWD, 0)
        self.come_to_rest()
        self.forget_device(running=False)
        self.arrive(CROWD, steps)

    @rule(running=st.booleans())
    def reset(self, running: bool) -> None:
        try:
            self.engine.scheduler.reset_prefix_cache(running, reset_connector=True)
            self.seen["resets of running requests" if running else "resets"] += 1
        except RuntimeError:  # blocks are held for copies; all requests are preempted by then
            self.seen["refused resets"] += 1

    @rule(running=st.booleans())
    def forget_device(self, running: bool) -> None:
        with contextlib.suppress(RuntimeError):  # as above
            is_forgotten = self.engine.try_to_forget_device(running=running)
            self.seen["forgotten devices"] += is_forgotten
            self.seen["soiled devices"] += is_forgotten and not self.engine.in_flight

    # -- faults ----------------------------------------------------------------------------------

    @rule(
        rank=st.integers(0, 1),
        loads=st.integers(0, 3),
        saves=st.integers(0, 3),
        is_partial=st.booleans(),
    )
    def fail_copies(self, rank: int, loads: int, saves: int, is_partial: bool) -> None:
        """Of one rank: the others' reports say that all is well."""
        self.may_fail = True
        copies = self.copies[rank % self.workers]
        copies.failing_loads, copies.failing_saves = loads, saves
        copies.is_partial = is_partial

    @rule(rank=st.integers(0, 1), is_partial=st.booleans(), asked=saved_arrivals)
    def fail_a_load(self, rank: int, is_partial: bool, asked: Arrival) -> None:
        """Few of the copies above are loads: here is something to load."""
        self.arrive([asked], 0)
        self.come_to_rest()
        self.forget_device(running=False)
        self.fail_copies(rank, 1, 0, is_partial)
        self.arrive([asked], 8)

    @rule(
        what=st.sampled_from(["copies", "server", "late copies", "late server"]),
        rank=st.integers(0, 1),
        asked=st.lists(arrivals, max_size=4),
        steps=st.integers(1, 12),
        aborted=st.none() | st.integers(0, 3),
    )
    def hold(
        self, what: str, rank: int, asked: list[Arrival], steps: int, aborted: int | None
    ) -> None:
        # Layerwise a step ends with its loads, so there is nobody to let held copies go.
        can_hold_copies = self.load_mode != "layerwise"
        is_copies = what.endswith("copies") and can_hold_copies
        held = self.copies[rank % self.workers] if is_copies else self.stall
        held.hold()
        self.arrive(asked, steps)
        if aborted is not None:
            waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
            loading = [each for each in self.unfinished() if each.status is waiting]
            self.end_one(loading, aborted, "ABORTED")
        if what.startswith("late"):
            self.seen["late copies" if is_copies else "late servers"] += 1
            self.may_fail = True
            self.clock.jump(1000.0)
            time.sleep(LATE_SECONDS)  # lookups and saves go by the real clock
            self.step(2)
        held.go()

    @rule(steps=st.integers(0, 6), is_server=st.booleans())
    def break_line(self, steps: int, is_server: bool) -> None:
        """Or the server dies, and the next one comes after some steps."""
        self.may_fail = True
        client = self.engine.half._link._client
        if is_server:
            self.seen["dead servers"] += 1
            engines = self.bench.engines
            self.server.close()
            self.step(steps)
            self.start_server(engines)
        elif client is not None:
            self.seen["broken lines"] += 1
            client.shutdown()
            self.step(steps)

    @rule(asked=st.lists(arrivals, min_size=1, max_size=4), steps=st.integers(0, 6))
    def lose_an_answer(self, asked: list[Arrival], steps: int) -> None:
        """Of a line that goes on: who waits for it gives it up, and asks on."""
        client = self.engine.half._link._client
        if client is None or self.lossy is client:
            return
        self.seen["answers to be lost"] += 1
        self.lossy = client
        lose_an_answer(client, self.seen)
        self.arrive(asked, steps)
        time.sleep(LATE_SECONDS)
        self.step(2)

    @rule()
    def go_on_as_before(self) -> None:
        self.engine.ready(self.bench.manager)

    @rule(on=st.booleans())
    def call_hooks_twice(self, on: bool) -> None:
        self.again.on = on

    # -- what must hold --------------------------------------------------------------------------

    @invariant()
    def held_blocks_are_those_of_saves(self) -> None:
        self.seen["rules"] += 1
        saves = self.engine.half._saves
        tasks: list[Any] = [*saves._offers, *saves._running.values()]
        held = [block for task in tasks for block in task.blocks]
        assert saves._held.count == len(held)
        assert all(block.ref_cnt > 0 for block in held)

    @invariant()
    def blocks_of_lookups_are_counted(self) -> None:
        loads = self.engine.half._loads
        ahead, number = loads.ahead, loads._link.number
        if ahead._connection == number:
            lookups = [each for each in loads._lookups.values() if each.connection == number]
            assert set(ahead._blocks) == {each.pending for each in lookups}
        assert ahead._total == sum(ahead._blocks.values())

    @rule()
    def come_to_rest(self) -> None:
        if self.lossy is not None:
            # What the server has leased for nobody goes with the line, or much later by itself.
            self.may_fail = True
            self.lossy.shutdown()
            self.lossy = None
        self.engine.ready(self.bench.manager)
        self.engine.run()
        for name, tokens in self.wanted.items():
            self.check_answer(name, tokens)
        self.wanted.clear()

        def remembers_nothing() -> bool:
            self.engine.step()
            self.engine.run()
            return not self.engine.leftovers()

        try:
            eventually(remembers_nothing, "something of requests that have ended is kept")
        except AssertionError:
            pytest.fail(f"of requests that have ended is kept: {self.engine.leftovers()}")
        self.bench.check_nothing_is_held()
        named = self.bench.named_values(self.engine)
        eventually(lambda: self.bench.saved_keys() <= named, "blocks of no request are saved")
        self.seen["saved blocks looked at"] += self.bench.check_saved_bytes(self.engine)
        self.seen["saved states looked at"] += len(self.bench.check_saved_states(self.engine))

    def check_answer(self, name: str, tokens: list[int]) -> None:
        request = self.engine.requests[name]
        self.seen[f"ended by {request.get_finished_reason()}"] += 1
        self.seen["preemptions"] += request.num_preemptions
        given = list(request.output_token_ids)
        if request.status is RequestStatus.FINISHED_ERROR:
            assert self.policy == "fail", f"{name} failed"
            assert self.may_fail, f"{name} failed"
            assert given == tokens[: len(given)]
        else:
            assert given == tokens, f"{name} was answered wrongly"

    def teardown(self) -> None:
        if not hasattr(self, "copies"):
            return
        for copies in self.copies:
            copies.heal()
        self.again.on = False
        if isinstance(sys.exception(), Exception):
            self.failures.append(traceback.format_exc())
        try:
            if sys.exception() is None:
                self.come_to_rest()
                eventually(self.caches_again, "nothing is cached any more")
            counted = self.bench.manager.counters.snapshot()
            for name in ("saved", "loaded"):
                self.seen[f"{name} blocks"] += counted[f"kvstrata_{name}_blocks_total"]
            self.seen["promoted blocks"] += sum(
                count for name, count in counted.items() if "promoted_blocks_total" in name
            )
        except Exception:
            self.failures.append(traceback.format_exc())
            raise
        finally:
            self.stack.close()

    def caches_again(self) -> bool:
        number = len(self.engine.requests)
        self.engine.serve(f"r{number}", prompt(1000 + number, 24), 2)
        self.engine.forget_device()
        return self.engine.serve(f"r{number + 1}", prompt(1000 + number, 24), 2) > 0


VARIANTS = {name: (*mode, "blockwise") for name, mode in MODES.items()} | {
    "sync-layerwise": (False, 0, "layerwise"),
    "sync-drafts-layerwise": (False, 3, "layerwise"),
    "sync-at-once": (False, 0, "auto"),
    "sync-drafts-at-once": (False, 3, "auto"),
}


class Floor(NamedTuple):
    """How often each variant sees something, at least."""

    short: int
    night: int


# Those of a night are about a tenth of what short runs promise.
FLOORS = {
    "rules": Floor(100, 20_000),
    "steps of the engine": Floor(100, 40_000),
    "loaded blocks": Floor(20, 1000),
    "promoted blocks": Floor(0, 50),
    "saved blocks looked at": Floor(20, 10_000),
    "preemptions": Floor(1, 300),
    "None answers": Floor(1, 5000),
    "no room for a match": Floor(1, 100),
    "ended by stop": Floor(1, 1000),
    "ended by length": Floor(1, 2000),
    "ended by repetition": Floor(0, 200),
    "ended by error": Floor(0, 30),
    "ABORTED while WAITING": Floor(0, 50),
    "ABORTED while RUNNING": Floor(0, 50),
    "ABORTED while PREEMPTED": Floor(0, 3),
    "ABORTED while WAITING_FOR_REMOTE_KVS": Floor(0, 1),
    "ERROR while RUNNING": Floor(0, 30),
    "resets": Floor(1, 200),
    "resets of running requests": Floor(1, 100),
    "refused resets": Floor(0, 50),
    "forgotten devices": Floor(1, 300),
    "soiled devices": Floor(1, 100),
    "failed loads of rank 0": Floor(1, 200),
    "failed loads of rank 1": Floor(0, 50),
    "failed saves of rank 0": Floor(1, 100),
    "failed saves of rank 1": Floor(0, 20),
    "held copies": Floor(1, 100),
    "late copies": Floor(1, 100),
    "slow answers": Floor(1, 200),
    "late servers": Floor(1, 100),
    "lost answers": Floor(1, 100),
    "broken lines": Floor(1, 100),
    "dead servers": Floor(1, 100),
    "hooks called twice": Floor(1, 2000),
}
OF_STATES = {"saved states looked at": Floor(10, 1000)}
# Where no request waits for its load, and none can be held.
NOT_LAYERWISE = {"ABORTED while WAITING_FOR_REMOTE_KVS", "held copies", "late copies"}
RUNS = 12
ROUNDS = 1 if is_nightly() else 10  # of so many runs, until all has been seen that is to be


def below_floor(machine: type[SchedulerMachine]) -> list[str]:
    """What *machine* has seen too seldom."""
    left_out = NOT_LAYERWISE if machine.load_mode == "layerwise" else set()
    wanted = FLOORS
    if machine.groups:
        left_out = left_out | {what for what in FLOORS if "rank 1" in what}
        wanted = FLOORS | OF_STATES
    floors = {
        what: floor.night if is_nightly() else floor.short
        for what, floor in wanted.items()
        if what not in left_out
    }
    seen = machine.seen
    return [f"{seen[what]} {what}, not {n}" for what, n in floors.items() if seen[what] < n]


@pytest.mark.parametrize(
    ("asynchronous", "drafts", "load_mode"), VARIANTS.values(), ids=list(VARIANTS)
)
def test_any_traffic_and_any_fault(asynchronous: bool, drafts: int, load_mode: str) -> None:
    run_machine(asynchronous, drafts, load_mode, [])


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_any_traffic_and_any_fault_with_states(asynchronous: bool) -> None:
    small = {"block_size": TOKENS}
    states = [group(recurrent(**small), first=first) for first in (4, 8)]
    run_machine(asynchronous, 0, "blockwise", [group(full(**small)), *states])


def test_any_traffic_and_any_fault_with_two_pipeline_stages() -> None:
    run_machine(False, 0, "blockwise", [], stages=2)


def run_machine(
    asynchronous: bool,
    drafts: int,
    load_mode: str,
    groups: list[KVCacheGroupSpec],
    *,
    stages: int = 1,
) -> None:
    class Machine(SchedulerMachine):
        seen: ClassVar[Counter[str]] = Counter()
        failures: ClassVar[list[str]] = []

    Machine.asynchronous, Machine.drafts, Machine.load_mode = asynchronous, drafts, load_mode
    Machine.groups, Machine.stages = groups, stages
    try:
        for _ in range(ROUNDS):
            run_state_machine_as_test(Machine, settings=machine_settings(examples=RUNS, steps=40))
            if not below_floor(Machine):
                break
    finally:
        for what, count in sorted(Machine.seen.items()):
            print(f"{count:8} {what}")  # noqa: T201 - for pytest -rP
        # Of a failure that does not come again, Hypothesis says only that it did not.
        print("\n".join(Machine.failures[:1]))  # noqa: T201
    assert below_floor(Machine) == []


@settings(max_examples=max(5, settings().max_examples // 200), deadline=None)
@given(
    asked=st.lists(arrivals.filter(lambda each: not each.waits), min_size=1, max_size=8),
    steps=st.lists(st.integers(0, 10), min_size=8, max_size=8),
)
def test_all_schedulers_save_the_same_blocks(asked: list[Arrival], steps: list[int]) -> None:
    """Also of prompts that share, stop and are preempted, and however many drafts are right."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for asynchronous, drafts in MODES.values():
            with start(model_folder(Path(folder)), 400) as bench:
                engine = bench.engine(asynchronous=asynchronous, drafts=drafts, num_blocks=60)
                allow_images(engine)
                for each, count in zip(asked, steps, strict=False):
                    add(engine, each)
                    for _ in range(count):
                        engine.step()
                engine.run()
                found.append(bench.saved_keys())
                assert bench.check_saved_bytes(engine) == len(found[-1])
    assert found[1:] == [found[0]] * 3

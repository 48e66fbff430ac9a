"""What blending makes of blocks that only a tier shared with other nodes may have."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.caches import PATIENCE_SECONDS, eventually
from tests.vllm.bench import Bench, prompt, start
from tests.vllm.driven import Engine
from tests.vllm.fake_runner import TOKENS
from tests.vllm.test_blend_scheduler import WORTH_IT, asking

from kvstrata.blend.runs import Runs
from kvstrata.core.errors import TierUnavailable
from kvstrata.core.keys import as_key_array
from kvstrata.integration.vllm.blend.connector import BlendConnector
from kvstrata.integration.vllm.blend.lookups import RunLookup
from kvstrata.storage.shared_fs import SharedFsStore

RUNS = 120  # more than are searched for and wait at a time


@pytest.fixture
def shared(folder: Path) -> Iterator[Bench]:
    with start(folder, 40, shared=folder / "shared", recompute="never") as bench:
        yield bench


def fill(bench: Bench, engine: Engine) -> None:
    """Of nine prompts, each in ten blocks, the first are in the shared tier alone."""
    for seed in range(9):
        engine.serve(f"said-{seed}", prompt(seed, 10 * TOKENS), 2)
        bench.hears()
        assert bench.manager._lower["remote"].drain(PATIENCE_SECONDS)


def answered(engine: Engine, lookup: RunLookup) -> RunLookup:
    def is_settled() -> bool:
        engine.half._link.poll(0.01)
        return lookup.is_settled(engine.half._config)

    eventually(is_settled, "no answer")
    return lookup


def held_searches(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """They go on when it is set."""
    go = threading.Event()
    exists = SharedFsStore.exists

    def held(store: SharedFsStore, keys: Any) -> list[bool]:
        assert go.wait(PATIENCE_SECONDS)
        return exists(store, keys)

    monkeypatch.setattr(SharedFsStore, "exists", held)
    return go


def many_runs(engine: Engine) -> RunLookup:
    """Of blocks that nobody has."""
    runs = Runs(
        start=np.arange(RUNS) * TOKENS,
        length=np.full(RUNS, TOKENS),
        delta=np.zeros(RUNS, np.int64),
        generation=np.zeros(RUNS, np.int8),
        skip=np.zeros(RUNS, np.int64),
        key_offsets=np.arange(RUNS + 1),
        keys=as_key_array([number.to_bytes(32, "big") for number in range(RUNS)]),
        tokens_per_block=TOKENS,
    )
    half = engine.half
    return RunLookup(half._link, half._loads.ahead, half._namespace, runs, "many")


def test_what_a_tier_has_that_is_away_is_not_taken_for_lost(
    shared: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = shared.engine(connector=BlendConnector, **WORTH_IT)
    half: Any = engine.half
    remote = shared.manager._lower["remote"]
    fill(shared, engine)

    def away(*_: object) -> list[bool]:
        raise TierUnavailable("the mount is gone")

    text = asking(prompt(0, 10 * TOKENS))
    with monkeypatch.context() as patch:
        patch.setattr(SharedFsStore, "exists", away)
        patch.setattr(SharedFsStore, "write", away)
        for number in range(9):
            engine.serve(f"other-{number}", prompt(100 + number, 3 * TOKENS), 1)
        eventually(remote.is_off, "it is not switched off")
        candidate = half._candidate(text, 0)
        half._settle(text, candidate, answered(engine, half._ask(text, candidate.runs)))
        assert candidate.plan is None
    assert half._learning.runs(text, half._namespace, 0).tokens == 10 * TOKENS


def test_runs_that_nobody_searches_for_are_not_taken_for_lost(
    shared: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = shared.engine()
    go = held_searches(monkeypatch)
    lookup = many_runs(engine)
    assert len(answered(engine, lookup).found().missing) == 0
    lookup.abandon()
    go.set()


def test_another_request_finds_its_prefix_beside_them(
    shared: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = shared.engine()
    other = shared.engine(remote_lookup_seconds=PATIENCE_SECONDS)
    fill(shared, engine)
    go = held_searches(monkeypatch)
    lookup = many_runs(engine)
    eventually(lambda: shared.manager.stats().running_gets == RUNS, "they are not taken in")
    other.add("theirs", [*prompt(0, 10 * TOKENS), 7], 2)
    eventually(lambda: shared.manager.stats().running_gets == RUNS + 1, "it is not asked for")
    go.set()
    other.run()
    assert other.runner.loaded_tokens["theirs"] == 10 * TOKENS
    lookup.abandon()

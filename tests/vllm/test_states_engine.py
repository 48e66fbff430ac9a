"""A real Qwen3-Next: what it computes on loaded states is, bit by bit, what it computes on its own.

Requests whose logits are compared come one at a time: a sum in bfloat16 may depend on what else is
computed with it.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.server.harness import serving
from tests.vllm.engine import (
    LOGITS,
    Act,
    Answer,
    Ask,
    Engine,
    transfer_config,
    wait_for_disk,
    wait_for_worker,
    wait_until,
)
from tests.vllm.oracle import random_prompt
from tests.vllm.tiny_qwen3_next import CACHED, SETTINGS, STATES, STEP, write_qwen3_next

from kvstrata.core.config import Config
from kvstrata.core.keys import state_keys
from kvstrata.index.places import NO_SLOT
from kvstrata.manager.manager import KVManager
from kvstrata.manager.tasks import TaskStatus
from kvstrata.server.server import Server

pytestmark = pytest.mark.vllm

HOST = "host:256MiB"
ENGINE = SETTINGS | CACHED | LOGITS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3-next")
    write_qwen3_next(folder)
    return folder


class Pair:
    """An engine, and the server that it is attached to, in this process."""

    def __init__(self, engine: Engine, server: Server) -> None:
        self.engine = engine
        self._server = server
        self._asked = 0

    @property
    def manager(self) -> KVManager:
        assert self._server.manager is not None
        return self._server.manager

    def ask(self, prompt: Sequence[int], new_tokens: int = 4) -> Answer:
        self._asked += 1
        one = Ask(f"one-{self._asked}", tuple(prompt), new_tokens, logits=True)
        answer = self.engine.run([one])[one.id]
        self.saved()
        return answer

    def saved(self) -> None:
        def at_rest() -> bool:
            report = self.manager.stats()
            return not report.running_gets and not report.running_puts

        wait_until(at_rest, "saves do not end")

    def forget_device(self) -> None:
        self.engine.reset_prefix_cache()

    def count(self, name: str) -> int:
        return self.manager.counters.snapshot().get(f"kvstrata_{name}", 0)

    def states(self) -> list[int]:
        """The slots of all states in host memory."""
        index = self.manager._cache.index
        with self.manager._lock:
            ids = np.concatenate(list(index.ids()))
            keys = index.keys(ids)
            of_states = [state_keys(keys, group) for group in range(STATES)]
            states = {row.tobytes() for rows in of_states for row in rows}
            is_state = [row.tobytes() in states for row in keys]
            return [int(slot) for slot in index.host_slot[ids[is_state]] if slot != NO_SLOT]


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    config = Config.model_validate({"tiers": HOST, "prefault": False})
    transfer = transfer_config(
        f"states-{random.randrange(1 << 30)}", STEP, server="attached", socket=str(folder / "s")
    )
    with (
        serving(config, folder / "s", block_bytes=None) as server,
        Engine(model, folder / "vllm.log", transfer, ENGINE) as engine,
    ):
        engine.wait_ready()
        pair = Pair(engine, server)

        def is_there() -> bool:
            workers = [each["workers"] for each in pair.manager.stats().engines]
            return workers == [[0]]

        wait_until(lambda: server.manager is not None and is_there(), "the worker does not come")
        yield pair


@pytest.mark.parametrize("length", [STEP + 1, 300, 700, 704])
def test_loaded_answers_as_a_hit_of_vllms_own_cache_bit_by_bit(pair: Pair, length: int) -> None:
    prompt = random_prompt(random.Random(length), length)
    computed = pair.ask(prompt)
    hit = pair.ask(prompt)
    end = (length - 1) // STEP * STEP
    assert (computed.cached_tokens, hit.cached_tokens) == (0, end)
    pair.forget_device()
    loaded = pair.ask(prompt)
    assert loaded.cached_tokens == end
    assert loaded.logits == hit.logits


def test_other_states_give_other_logits(pair: Pair) -> None:
    """Else the tests here would show nothing."""
    prompt = random_prompt(random.Random(1), 300)
    right = pair.ask(prompt)
    pair.forget_device()
    states = pair.states()
    assert len(states) >= STATES
    for slot in states:
        pair.manager.view(slot)[:] = bytes(pair.manager.block_bytes)
    loaded = pair.ask(prompt)
    assert loaded.cached_tokens == 256
    assert far(loaded, right) > 4 * NEAR
    pair.engine.reset_prefix_cache(connector=True)


def test_second_turn_goes_on_from_the_state_of_the_first(pair: Pair) -> None:
    rng = random.Random(2)
    first = random_prompt(rng, 400)
    answer = pair.ask(first, 20)
    pair.forget_device()
    second = (*first, *answer.tokens, *random_prompt(rng, 50))
    loaded = pair.ask(second)
    assert loaded.cached_tokens == 384
    hit = pair.ask((*first, *answer.tokens, *random_prompt(rng, 50)))
    assert hit.cached_tokens >= 384


NEAR = 0.05  # of logits up to 4: those of requests that were computed beside others, in other steps


def far(one: Answer, other: Answer) -> float:
    """How far the logits of the first token are apart, at most."""
    return float(np.abs(np.array(one.logits[0]) - np.array(other.logits[0])).max())


def test_after_preemption_aborts_and_resets_all_that_is_found_is_right(pair: Pair) -> None:
    rng = random.Random(3)
    library = [random_prompt(rng, 700) for _ in range(3)]
    prompts = [
        (*rng.choice(library)[: rng.randrange(64, 700)], *random_prompt(rng, rng.randrange(1, 200)))
        for _ in range(16)
    ]
    todo: list[Ask | Act] = [
        Ask(f"m{i}", prompt, rng.randrange(1, 80), at_step=3 * i)
        for i, prompt in enumerate(prompts)
    ]
    todo += [Act("abort", f"m{i}", at_step=3 * i + 5) for i in (2, 7, 11)]
    todo += [Act("reset", "running", at_step=20), Act("reset", at_step=31)]
    pair.ask(prompts[0])
    pair.forget_device()
    loaded = pair.count("loaded_blocks_total")
    pair.engine.run(todo)
    pair.saved()
    assert pair.count("loaded_blocks_total") > loaded
    loads = []
    for prompt in prompts:
        pair.forget_device()
        loads.append(pair.ask(prompt))
    assert sum(load.cached_tokens for load in loads) > 1000
    pair.engine.reset_prefix_cache(connector=True)
    for prompt, load in zip(prompts, loads, strict=True):
        pair.forget_device()
        assert far(load, pair.ask(prompt)) < NEAR


def test_failed_loads_are_computed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_prompt(random.Random(4), 500)
    right = pair.ask(prompt)
    pair.forget_device()
    match = pair.manager.get_match

    def stale(*args: Any, **kwargs: Any) -> TaskStatus:
        """The last slot, that of a state, is no longer what it was."""
        status = match(*args, **kwargs)
        generations = [*status.generations[:-1], *(g + 1 for g in status.generations[-1:])]
        return msgspec.structs.replace(status, generations=generations)

    failed = pair.count("failed_loads_total")
    with monkeypatch.context() as patch:
        patch.setattr(pair.manager, "get_match", stale)
        computed = pair.ask(prompt)
    assert pair.count("failed_loads_total") == failed + 1
    assert computed.logits == right.logits
    pair.forget_device()
    loaded = pair.ask(prompt)
    assert loaded.cached_tokens == 448
    assert loaded.tokens == right.tokens


def test_reset_of_the_cache_forgets_states(pair: Pair) -> None:
    prompt = random_prompt(random.Random(5), 300)
    right = pair.ask(prompt)
    pair.engine.reset_prefix_cache(connector=True)
    again = pair.ask(prompt)
    assert again.cached_tokens == 0
    assert again.logits == right.logits


def test_states_survive_the_engine_and_its_server_on_disk(model: Path, tmp_path: Path) -> None:
    prompt = random_prompt(random.Random(6), 500)
    tiers = f"{HOST} | disk:{tmp_path / 'disk'}:512MiB"
    logits = []
    for life in range(2):
        name = f"disk-{random.randrange(1 << 30)}"
        transfer = transfer_config(name, STEP, tiers=tiers)
        with Engine(model, tmp_path / f"{life}.log", transfer, ENGINE) as engine:
            engine.wait_ready()
            wait_for_worker(name)
            answers = [
                engine.run([Ask(f"{life}-{i}", prompt, 4, logits=True)])[f"{life}-{i}"]
                for i in range(2)
            ]
            wait_for_disk(name)
        assert [each.cached_tokens for each in answers] == [448 * life, 448]
        logits.append([each.logits for each in answers])
    assert logits[1][0] == logits[0][1]

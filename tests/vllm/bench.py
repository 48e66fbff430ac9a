"""A server and the engines without a model that use it, with what must hold at the end."""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.caches import eventually, host_slot, known
from tests.server.harness import serving
from tests.vllm.driven import Engine
from tests.vllm.fake_runner import (
    LAYERS,
    SLOT_BYTES,
    TOKENS,
    digests,
    row,
    state_row,
)

from kvstrata.core.config import Config
from kvstrata.core.keys import as_key_array, state_keys
from kvstrata.core.types import NAMESPACE_ID_BYTES, StoreKey
from kvstrata.manager.manager import KVManager
from kvstrata.manager.tasks import UNSETTLED
from kvstrata.server.server import Server


@dataclass
class Bench:
    folder: Path
    server: Server
    engines: list[Engine] = field(default_factory=list)

    @property
    def manager(self) -> KVManager:
        assert self.server.manager is not None
        return self.server.manager

    def engine(self, **settings: Any) -> Engine:
        made = Engine(self.folder, self.server.path, **settings)
        self.engines.append(made)
        made.ready(self.manager)
        return made

    def look(self) -> None:
        """A late answer is given back by the engine that has it, when it looks."""
        for engine in self.engines:
            engine.half._link.tick()

    def nothing_is_leased(self) -> bool:
        self.look()
        return set(known(self.manager).values()) <= {0}

    def hears(self) -> None:
        """The server hears how every load and save ended, which no engine waits for."""

        def all_is_heard() -> bool:
            self.look()
            report = self.manager.stats()
            return not report.running_gets and not report.running_puts

        eventually(all_is_heard, "a load or a save does not end")

    def counters(self) -> dict[str, int]:
        self.hears()
        return self.manager.counters.snapshot()

    def saved_keys(self) -> set[bytes]:
        self.hears()
        return set(known(self.manager))

    def named_blocks(self, engine: Engine) -> dict[bytes, tuple[str, int]]:
        """The key of every block that *engine*'s requests name: of which request, and where."""
        half = engine.half
        return {
            half._namespace + half._math.key(request, i): (name, i)
            for name, request in engine.requests.items()
            for i in range(half._math.known_blocks(request))
        }

    def named_values(self, engine: Engine) -> set[bytes]:
        """The keys of those blocks and of the states behind them."""
        blocks = self.named_blocks(engine)
        return {*blocks, *(s for block in blocks for s in _states_of(block, engine))}

    def check_saved_bytes(self, engine: Engine) -> int:
        """Every block in host memory that *engine*'s requests name; how many there are."""
        self.hears()
        checked = 0
        for key, (name, i) in self.named_blocks(engine).items():
            slot = host_slot(self.manager, key)
            if slot < 0:
                continue
            tokens = list(engine.requests[name].all_token_ids)
            chain = digests(tokens, engine.runner.contexts[name])
            assert (i + 1) * TOKENS <= len(chain)
            expected = []
            for rank in range(len(engine.runner.ranks)):
                before = 0
                for group in engine.runner.groups:
                    if group.is_recurrent:
                        before += len(group.layers)
                        continue
                    expected += [
                        row(chain[i * TOKENS + start + position], before + layer, rank)
                        for start in range(0, TOKENS, group.block_size)
                        for layer in range(len(group.layers))
                        for position in range(group.block_size)
                    ]
                    before += len(group.layers)
            found = np.frombuffer(self.manager.view(slot), dtype=np.uint8)
            assert np.array_equal(found, np.concatenate(expected)), f"block {i} is wrong"
            checked += 1
        return checked

    def check_saved_states(self, engine: Engine) -> set[tuple[str, int]]:
        """Every state in host memory of *engine*'s requests: of which, and after how many blocks.

        Of a prompt that several have, of one of them.
        """
        self.hears()
        checked = set()
        first = [sum(len(g.layers) for g in engine.runner.groups[:n]) for n in range(9)]
        for key, (name, i) in self.named_blocks(engine).items():
            chain = digests(list(engine.requests[name].all_token_ids), engine.runner.contexts[name])
            for group, state in zip(
                engine.half._math.recurrent, _states_of(key, engine), strict=True
            ):
                if (slot := host_slot(self.manager, state)) < 0:
                    continue
                layers = len(engine.runner.groups[group].layers)
                end = chain[(i + 1) * TOKENS - 1]
                right = [state_row(end, first[group] + layer) for layer in range(layers)]
                found = np.frombuffer(self.manager.view(slot), dtype=np.uint8)
                expected = np.concatenate(right)
                assert np.array_equal(found[: len(expected)], expected), f"state {i} is wrong"
                checked.add((name, i + 1))
        return checked

    def check_nothing_is_held(self) -> None:
        for engine in self.engines:
            eventually(engine.is_at_rest, "device blocks are kept")
            eventually(partial(engine.holds_nothing, self.manager), "a lease is kept")
        eventually(self.nothing_is_leased, "a lease is kept")
        self.hears()
        self.manager.check()


def _states_of(key: StoreKey, engine: Engine) -> list[StoreKey]:
    """The keys of the states behind the block of *key*, by group."""
    namespace, block = key[:NAMESPACE_ID_BYTES], as_key_array([key[NAMESPACE_ID_BYTES:]])
    groups = range(len(engine.half._math.recurrent))
    return [namespace + state_keys(block, group).tobytes() for group in groups]


@contextlib.contextmanager
def serve(
    folder: Path,
    slots: int,
    *,
    shared: Path | None = None,
    ranks: int = 1,
    block_format: str = "exact",
    recompute: str = "auto",
) -> Iterator[Bench]:
    """A server with room for *slots* blocks, whatever its engines hold at its end."""
    slot = TOKENS * LAYERS * SLOT_BYTES * ranks
    tiers = f"host:{slots * slot}" + (f" | shared:{shared}:64MiB" if shared else "")
    config = Config.model_validate(
        {
            "tiers": tiers,
            "prefault": False,
            "block_format": block_format,
            "recompute": recompute,
        }
    )
    block_bytes = slot if block_format == "exact" else None
    with serving(config, folder / "s", block_bytes=block_bytes) as server:
        yield Bench(folder, server)


@contextlib.contextmanager
def start(folder: Path, slots: int, **settings: Any) -> Iterator[Bench]:
    """The same, and at its end nothing is held."""
    with serve(folder, slots, **settings) as bench:
        try:
            yield bench
            bench.check_nothing_is_held()
        finally:
            for engine in bench.engines:
                engine.close()


def all_are_settled(engine: Engine) -> bool:
    """What was asked before the turn of a request."""
    engine.half._link.tick()
    statuses = [lookup.status for lookup in engine.half._loads._lookups.values()]
    return all(status is not None and status.state not in UNSETTLED for status in statuses)


MODES = {
    "sync": (False, 0),
    "async": (True, 0),
    "sync-drafts": (False, 3),
    "async-drafts": (True, 3),
}
in_all_modes = pytest.mark.parametrize(("asynchronous", "drafts"), MODES.values(), ids=MODES)


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(900), k=length)

"""The hot paths that are counted, and how often for a count that repeats itself."""

import statistics
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, nullcontext
from functools import partial
from typing import Final, NamedTuple, get_args
from unittest.mock import patch

import numpy as np
from bench.operations import cache, copies, engine, engine_copies, prompts, tiers, wire
from bench.operations.count import Count, Sample, allocations, code
from bench.operations.tallies import tallies

__all__ = ["HOT_PATHS", "HotPath", "Turns", "measure"]

Turns = Callable[[Count], Generator[None]]
"""Takes one turn each time that it is asked for more, and has the calls counted that matter."""


class HotPath(NamedTuple):
    name: str
    turns: Turns
    samples: int = 5  # turns of each way of counting; the median is taken
    warm_up: int = 1  # turns before
    is_seeded: bool = True  # the system's random numbers are the same ones each time


HOT_PATHS: Final = (
    HotPath("keys of 8192 tokens", cache.keys_of_tokens),
    HotPath("lookup of 8192 blocks, all known", partial(cache.lookup, known_blocks=8192)),
    HotPath("lookup of 8192 blocks, half known", partial(cache.lookup, known_blocks=4096)),
    HotPath("lookup of 8192 blocks, none known", partial(cache.lookup, known_blocks=0)),
    HotPath("news of a load of 8192 blocks", cache.load),
    HotPath("save of 8192 blocks, lru evicts", partial(cache.save, eviction="lru"), 1),
    HotPath("save of 8192 blocks, s3fifo evicts", partial(cache.save, eviction="s3fifo"), 1),
    HotPath("save of 8192 blocks, cost evicts", partial(cache.save, eviction="cost"), 1),
    # The server looks for overdue clients now and then: no turn is like all others.
    HotPath("load of 512 blocks, client's end", partial(wire.load, end="client"), 9),
    HotPath("load of 512 blocks, server's end", partial(wire.load, end="server"), 9),
    HotPath("save of 512 blocks, client's end", partial(wire.save, end="client"), 9, warm_up=3),
    HotPath("save of 512 blocks, server's end", partial(wire.save, end="server"), 9, warm_up=3),
    HotPath(
        "descriptors of 1024 blocks, layers outermost",
        partial(copies.descriptors, blocks_outermost=False),
    ),
    HotPath(
        "descriptors of 1024 blocks, blocks outermost",
        partial(copies.descriptors, blocks_outermost=True),
    ),
    HotPath("32 blocks written to disk", copies.disk_write, 9, warm_up=10),
    HotPath("32 blocks read from disk", copies.disk_read),
    HotPath("64 blocks promoted from disk", partial(tiers.promotion, tier="disk"), 3, warm_up=3),
    HotPath(
        "64 blocks promoted from a shared directory",
        partial(tiers.promotion, tier="shared"),
        3,
        warm_up=3,
    ),
    HotPath("32 blocks written to a shared directory", tiers.shared_write, 3),
    HotPath("32 blocks written to Valkey", tiers.valkey_write, 3),
    HotPath("32 blocks read from Valkey", tiers.valkey_read, 3),
    HotPath("blend match of 16384 tokens", prompts.blend_match),
    HotPath("replay of 60 requests", prompts.replay, 1),
    # Now and then the server's process has said something.
    *(
        HotPath(
            f"idle step of vLLM's scheduler, requests: {requests}",
            partial(engine.idle_step, requests=requests),
            101,
            is_seeded=False,  # the name of its socket must be like no other
        )
        for requests in (1, 64)
    ),
    *(
        HotPath(f"8 prompts {done}, {half}'s half", partial(turns, half=half), 3, warm_up=2)
        for done, turns in (("saved", engine_copies.save), ("loaded", engine_copies.load))
        for half in get_args(engine_copies.Half)
    ),
)


def measure(path: HotPath) -> dict[str, int]:
    """How much a turn of *path* does, of each kind that it does anything of."""
    chance = (
        patch("os.urandom", np.random.default_rng(0).bytes) if path.is_seeded else nullcontext()
    )
    with chance, closing(path.turns(count := Count())) as turns:
        for _ in range(path.warm_up):
            next(turns)
        found: dict[str, int] = {}
        for count.measure in (code, allocations, tallies):
            samples = [_sample(count, turns) for _ in range(path.samples)]
            for kind in samples[0]:
                found[kind] = statistics.median_low(sample[kind] for sample in samples)
    return {kind: number for kind, number in found.items() if number}


def _sample(count: Count, turns: Iterator[None]) -> Sample:
    count.sample = Counter()
    next(turns)
    return count.sample

"""Hits of node caches and of one pool that all nodes share, by simulation.

The traffic is that of ``kvstrata make-trace``; a node's cache is the least recently used one of
``kvstrata replay``. Nothing is timed and nothing is random: the same call gives the same shares.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np

from kvstrata.replay.device import DeviceCache
from kvstrata.replay.generate import TOKENS_PER_ID, generate

__all__ = ["Cluster", "Prompt", "Routing", "Shares", "simulate", "traffic"]

Routing = Literal["random", "prefix"]

_CROWDED: Final = 1.25  # times the mean load: such a node gets no prompt for what it has
_HALVED_EVERY: Final = 10  # requests a node, on average: loads of the past count less


class Prompt(NamedTuple):
    """As far as it fills whole blocks of ``TOKENS_PER_ID`` tokens."""

    seconds: float
    tokens: int
    blocks: list[int]


class Cluster(NamedTuple):
    """Nodes that share one pool."""

    nodes: int
    routing: Routing  # of prompts to nodes
    retention_seconds: float  # what the pool has was written or read no longer ago


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the blocks of prompts were found, as shares of all; blocks a prompt, on average."""

    local: float
    remote: float
    computed: float
    blocks: float
    tokens: float  # a prompt, with what fills no block
    searched: float  # blocks a prompt that the node did not have
    found: float  # of these in the pool, in front
    pool_blocks: float  # kept in the pool at the end, for each prompt a second that arrives


def traffic(requests: int, seconds: float, seed: int) -> list[Prompt]:
    return [
        Prompt(
            each.timestamp / 1e3,
            each.input_length,
            each.hash_ids[: each.input_length // TOKENS_PER_ID],
        )
        for each in generate(requests, seconds=seconds, seed=seed)
    ]


def simulate(prompts: Sequence[Prompt], cluster: Cluster, *, local_blocks: int) -> Shares:
    """What the second half of *prompts* finds: the first one fills the caches.

    Each node holds *local_blocks*; the pool has room. A prompt's blocks are in both as soon as it
    has arrived.
    """
    nodes = cluster.nodes
    choose = _Router(nodes) if cluster.routing == "prefix" else _random_router(nodes)
    caches = [DeviceCache(local_blocks) for _ in range(nodes)]
    pool = _Pool(cluster.retention_seconds)
    counted = [0.0, 0.0, 0.0, 0.0]  # local, remote, computed blocks, tokens
    half = len(prompts) // 2
    for number, prompt in enumerate(prompts):
        local = caches[choose(prompt.blocks)].request(np.array(prompt.blocks, np.uint64))
        left = prompt.blocks[local:]
        remote = pool.leading(left, prompt.seconds)
        pool.keep(left, prompt.seconds)
        if number >= half:
            found = (local, remote, len(left) - remote, prompt.tokens)
            counted = [total + each for total, each in zip(counted, found, strict=True)]
    count = len(prompts) - half
    blocks = sum(counted[:3])
    rate = count / max(prompts[-1].seconds - prompts[half].seconds, 1e-9)
    return Shares(
        local=counted[0] / blocks,
        remote=counted[1] / blocks,
        computed=counted[2] / blocks,
        blocks=blocks / count,
        tokens=counted[3] / count,
        searched=(counted[1] + counted[2]) / count,
        found=counted[1] / count,
        pool_blocks=pool.kept(prompts[-1].seconds) / rate,
    )


class _Pool:
    """Blocks and when they were last written or read."""

    def __init__(self, retention_seconds: float) -> None:
        self._retention_seconds = retention_seconds
        self._used: dict[int, float] = {}

    def leading(self, blocks: Sequence[int], now_seconds: float) -> int:
        oldest = now_seconds - self._retention_seconds
        for number, block in enumerate(blocks):
            if self._used.get(block, -np.inf) < oldest:
                return number
        return len(blocks)

    def keep(self, blocks: Sequence[int], now_seconds: float) -> None:
        self._used.update(dict.fromkeys(blocks, now_seconds))

    def kept(self, now_seconds: float) -> int:
        oldest = now_seconds - self._retention_seconds
        return sum(used >= oldest for used in self._used.values())


class _Router:
    """To the node that has had most of a prompt, unless that one is crowded."""

    def __init__(self, nodes: int) -> None:
        self._random = random.Random(nodes)
        self._holders: dict[int, int] = {}
        self._loads = [0.0] * nodes
        self._total = 0.0
        self._routed = 0

    def __call__(self, blocks: Sequence[int]) -> int:
        nodes = len(self._loads)
        holders = (self._holders[block] for block in reversed(blocks) if block in self._holders)
        node = next(holders, -1)
        if node < 0 or self._loads[node] > _CROWDED * self._total / nodes + 1:
            pair = [int(self._random.random() * nodes) for _ in range(2)]
            node = min(pair, key=self._loads.__getitem__)
        self._holders.update(dict.fromkeys(blocks, node))
        self._loads[node] += 1
        self._total += 1
        self._routed += 1
        if self._routed % (_HALVED_EVERY * nodes) == 0:
            self._loads = [load / 2 for load in self._loads]
            self._total /= 2
        return node


def _random_router(nodes: int) -> Callable[[Sequence[int]], int]:
    dice = random.Random(nodes)
    return lambda _blocks: int(dice.random() * nodes)

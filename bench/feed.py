"""What it costs the manager that somebody follows what happens to its blocks.

    python bench/feed.py

A prompt of 8192 blocks is put into a host tier that holds just as many, so that all of the one before
leave. Managers without a follower, with one and with eight take turns.
"""

import statistics
import time
from typing import Final

import numpy as np

from kvstrata.core.config import Config
from kvstrata.manager.manager import KVManager

BLOCKS: Final = 8192
BLOCK_BYTES: Final = 4096
ROUNDS: Final = 40
FOLLOWERS: Final = (0, 1, 8)
NAMESPACE: Final = b"n" * 16


class Cache:
    """A full host tier, and those who follow it."""

    def __init__(self, followers: int) -> None:
        tiers = [{"kind": "host", "capacity": f"{BLOCKS * BLOCK_BYTES // 1024}KiB"}]
        config = Config.model_validate({"tiers": tiers, "prefault": False})
        self._manager = KVManager(config, block_bytes=BLOCK_BYTES)
        self._followers = [
            self._manager.feed.follow(NAMESPACE, lambda: None) for _ in range(followers)
        ]
        self._dice = np.random.default_rng(1)
        self.put_ms: list[float] = []
        self.complete_ms: list[float] = []
        self.take_ms: list[float] = []  # of one follower

    def turn(self) -> None:
        keys = self._dice.integers(0, 256, (BLOCKS, 32), dtype=np.uint8)
        began = time.perf_counter()
        task = self._manager.put_match(NAMESPACE, keys)
        put = time.perf_counter()
        self._manager.launch([task.task_id])
        launched = time.perf_counter()
        self._manager.complete([task.task_id])
        completed = time.perf_counter()
        for follower in self._followers:
            while follower.take(BLOCKS):
                pass
        taken = time.perf_counter()
        self.put_ms.append((put - began) * 1000)
        self.complete_ms.append((completed - launched) * 1000)
        self.take_ms.append((taken - completed) * 1000 / max(1, len(self._followers)))


def main() -> None:
    caches = {count: Cache(count) for count in FOLLOWERS}
    for _ in range(ROUNDS + 2):
        for cache in caches.values():
            cache.turn()
    print(f"{BLOCKS} blocks, ms, median (least) of {ROUNDS}")
    print("followers      put and evict      make visible       take, each")
    for count, cache in caches.items():
        cells = [_cell(values[2:]) for values in (cache.put_ms, cache.complete_ms, cache.take_ms)]
        print(f"{count:>9}  " + "  ".join(f"{cell:>17}" for cell in cells))


def _cell(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f})"


if __name__ == "__main__":
    main()

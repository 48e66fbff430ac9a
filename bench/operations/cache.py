"""Hot paths of the cache in one process: keys, lookups, leases, saves that evict."""

from collections.abc import Generator
from contextlib import closing
from typing import Final

import numpy as np
from bench.operations.count import Count

from kvstrata.core.config import Config
from kvstrata.core.keys import BlockHasher, KeyArray
from kvstrata.manager.manager import KVManager

__all__ = ["NAMESPACE", "keys_of_tokens", "load", "lookup", "random_keys", "save"]

NAMESPACE: Final = b"operations".ljust(16)
_PROMPT_TOKENS: Final = 8192
_TOKENS_PER_BLOCK: Final = 16
_PROMPT_BLOCKS: Final = 8192
_SHORT_BLOCKS: Final = 64  # of the prompts that a save drives out
_BLOCK_BYTES: Final = 4096


def keys_of_tokens(count: Count) -> Generator[None]:
    tokens = np.random.default_rng(0).integers(0, 128_000, _PROMPT_TOKENS)
    hasher = BlockHasher(NAMESPACE, _TOKENS_PER_BLOCK)
    while True:
        count(hasher.keys, tokens)
        yield


def lookup(count: Count, known_blocks: int) -> Generator[None]:
    """Of a prompt of which so many leading blocks are known."""
    resident, fresh = random_keys(0, _PROMPT_BLOCKS), random_keys(1, _PROMPT_BLOCKS)
    keys = np.concatenate((resident[:known_blocks], fresh[known_blocks:]))
    with closing(_manager(2 * _PROMPT_BLOCKS)) as manager:
        _save(manager, resident)
        while True:
            task = count(manager.get_match, NAMESPACE, keys)
            assert task.matched_blocks == known_blocks
            manager.cancel([task.task_id])
            yield


def load(count: Count) -> Generator[None]:
    """What follows the lookup of a prompt that is all there: the copies begin, and have ended."""
    resident = random_keys(0, _PROMPT_BLOCKS)
    with closing(_manager(2 * _PROMPT_BLOCKS)) as manager:
        _save(manager, resident)
        while True:
            task = manager.get_match(NAMESPACE, resident)
            count(manager.launch, [task.task_id])
            count(manager.complete, [task.task_id])
            yield


def save(count: Count, eviction: str) -> Generator[None]:
    """Of a prompt into a full host tier, half of which has to leave for it."""
    keys = random_keys(0, 3 * _PROMPT_BLOCKS)
    while True:
        with closing(_manager(2 * _PROMPT_BLOCKS, eviction)) as manager:
            for start in range(0, 2 * _PROMPT_BLOCKS, _SHORT_BLOCKS):
                _save(manager, keys[start : start + _SHORT_BLOCKS])
            task = count(manager.put_match, NAMESPACE, keys[2 * _PROMPT_BLOCKS :])
            assert len(task.slots) == _PROMPT_BLOCKS
            count(manager.launch, [task.task_id])
            count(manager.complete, [task.task_id])
        yield


def random_keys(seed: int, blocks: int) -> KeyArray:
    return np.random.default_rng(seed).integers(0, 256, (blocks, 32), dtype=np.uint8)


def _manager(slots: int, eviction: str = "lru") -> KVManager:
    capacity = f"{slots * _BLOCK_BYTES // 1024}KiB"
    tiers = [{"kind": "host", "capacity": capacity, "eviction": eviction}]
    config = Config.model_validate({"tiers": tiers, "prefault": False})
    return KVManager(config, block_bytes=_BLOCK_BYTES)


def _save(manager: KVManager, keys: KeyArray) -> None:
    task = manager.put_match(NAMESPACE, keys)
    manager.launch([task.task_id])
    manager.complete([task.task_id])

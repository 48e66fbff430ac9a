"""The control plane beside a dict and vLLM's offloading manager, up to ten million blocks.

    python bench/index.py [--quick] [--blocks 1000 100000 ...] [--json FILE]

Looking a long prompt up, planning what to save of it, leases, evictions, bytes a block. See
bench/README.md for what is measured.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from kvstrata.core.keys import BlockHasher, BlockIds, KeyArray, as_key_array
from kvstrata.index.places import DISK, HOST, WRITING
from kvstrata.index.policies import LRU, S3FIFO, CostAware, EvictionPolicy, PrefillCost
from kvstrata.index.pool import SlotPool
from kvstrata.index.tree import PrefixIndex
from kvstrata.manager.residency import evicted_at_least

PROMPT_TOKENS: Final = 131_072
TOKENS_PER_BLOCK: Final = (16, 32, 64, 256)
BLOCKS: Final = (1_000, 100_000, 1_000_000, 10_000_000)
SPACE: Final = b"bench-index".ljust(16)
PEER_BLOCKS: Final = 1_000_000  # vLLM's manager takes minutes to fill with more
MEMORY_PIECE: Final = 1 << 12  # blocks made at a time: their keys must not count
LABELS: Final = ("operation", "side", "policy")

Nanoseconds = list[int]


class Side(Protocol):
    """One thing to measure. Keys are given in the form that it works with."""

    name: str

    def prepare(self, keys: KeyArray) -> Any:
        """Not measured."""
        ...

    def match(self, keys: Any) -> int: ...
    def lease(self, keys: Any, found: int) -> None:
        """And release."""
        ...

    def put_plan(self, keys: Any) -> None: ...
    def complete(self, keys: Any) -> None:
        """The last put was successful: its blocks count from now on. Not measured."""
        ...

    def abandon(self, keys: Any) -> None:
        """The last put has failed: all is as before. Not measured."""
        ...


class KVStrata:
    """Index, slot pool and one policy, used as the manager does."""

    def __init__(self, capacity: int, slots: int, policy: EvictionPolicy | None = None) -> None:
        self.name = "KVStrata"
        self.index = PrefixIndex(capacity)
        self.pool = SlotPool(slots)
        self.policy: EvictionPolicy = LRU(capacity) if policy is None else policy
        self._planned: BlockIds = np.empty(0, np.int32)

    def prepare(self, keys: KeyArray) -> KeyArray:
        return keys

    def match(self, keys: KeyArray) -> int:
        return len(self.index.longest_prefix(SPACE, keys))

    def lease(self, keys: KeyArray, found: int) -> None:
        ids = self.index.longest_prefix(SPACE, keys)
        self.index.lease(ids)
        self.policy.touch(ids)
        self.index.unlease(ids)

    def put_plan(self, keys: KeyArray) -> None:
        ids = self.index.insert(SPACE, keys)
        new = ids[self.index.where.take(ids) == 0]
        slots = self.take(len(new))
        self.index.host_slot[new] = slots
        self.index.set_where(new, WRITING)
        self._planned = new

    def complete(self, keys: KeyArray) -> None:
        self.index.set_where(self._planned, HOST)
        self.index.clear_where(self._planned, WRITING)
        self.policy.admit(self._planned)

    def abandon(self, keys: KeyArray) -> None:
        self.pool.release(self.index.host_slot.take(self._planned))
        self.index.clear_where(self._planned, WRITING)
        self.index.settle(self._planned)

    def load(self, prompts: list[KeyArray], *, scattered: bool) -> None:
        """Have *prompts*, all of one length, resident; with neighbours far apart if *scattered*."""
        if not scattered:
            for prompt in prompts:
                self.put_plan(prompt)
                self.complete(prompt)
            return
        rng = np.random.default_rng(0)
        everything = np.stack(prompts)
        for level in range(everything.shape[1]):
            order = rng.permutation(len(prompts))
            space = np.tile(np.frombuffer(SPACE, np.uint8), (len(prompts), 1))
            rows = np.concatenate((space, everything[order, level]), axis=1)
            parents = np.concatenate((space, everything[order, level - 1]), axis=1)
            ids = self.index.insert_stored(rows, parents, np.full(len(rows), level > 0))
            self.index.host_slot[ids] = self.pool.take(len(ids))
            self.index.set_where(ids, HOST)
            self.policy.admit(ids)

    def take(self, count: int) -> NDArray[np.int32]:
        """Slots, at the cost of other blocks when they are all taken."""
        missing = count - self.pool.free
        if missing > 0:
            wanted = max(missing, evicted_at_least(self.pool.capacity))
            victims = self.policy.victims(wanted, self._may_leave)
            self.pool.release(self.index.host_slot.take(victims))
            self.index.clear_where(victims, HOST)
            self.policy.remove(victims)
            self.index.settle(victims)
        return self.pool.take(count)

    def _may_leave(self, ids: BlockIds) -> NDArray[np.bool_]:
        return self.index.may_leave(ids, HOST)


class Dict:
    """What is least possible in Python: a dict from key to slot, no eviction, no tree."""

    def __init__(self) -> None:
        self.name = "dict"
        self._slots: dict[bytes, int] = {}
        self._leases: dict[bytes, int] = {}

    def prepare(self, keys: KeyArray) -> list[bytes]:
        joined = keys.tobytes()
        return [joined[i : i + 32] for i in range(0, len(joined), 32)]

    def match(self, keys: list[bytes]) -> int:
        found = 0
        for key in keys:
            if key not in self._slots:
                break
            found += 1
        return found

    def lease(self, keys: list[bytes], found: int) -> None:
        for key in keys[:found]:
            self._leases[key] = self._leases.get(key, 0) + 1
        for key in keys[:found]:
            self._leases[key] -= 1

    def put_plan(self, keys: list[bytes]) -> None:
        slots = len(self._slots)
        for key in keys:
            if key not in self._slots:
                self._slots[key] = slots
                slots += 1

    def complete(self, keys: list[bytes]) -> None:
        pass

    def abandon(self, keys: list[bytes]) -> None:
        for key in keys:
            del self._slots[key]


class VllmManager:
    """vLLM's ``CPUOffloadingManager`` with its LRU, called as its connector does."""

    def __init__(self, slots: int) -> None:
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self.name = "vLLM"
        self._manager = CPUOffloadingManager(slots)
        self._requests = 0

    def prepare(self, keys: KeyArray) -> list[Any]:
        from vllm.v1.kv_offload.base import make_offload_key

        joined = keys.tobytes()
        return [make_offload_key(joined[i : i + 32], 0) for i in range(0, len(joined), 32)]

    def match(self, keys: list[Any]) -> int:
        from vllm.v1.kv_offload.base import LookupResult

        request = self._request()
        found = 0
        for key in keys:
            if self._manager.lookup(key, request) is not LookupResult.HIT:
                break
            found += 1
        return found

    def lease(self, keys: list[Any], found: int) -> None:
        request = self._request()
        self._manager.prepare_load(keys[:found], request)
        self._manager.complete_load(keys[:found], request)
        self._manager.on_request_finished(request)

    def put_plan(self, keys: list[Any]) -> None:
        self._last = self._request()
        assert self._manager.prepare_store(keys, self._last) is not None

    def complete(self, keys: list[Any]) -> None:
        self._manager.complete_store(keys, self._last)
        self._manager.on_request_finished(self._last)

    def abandon(self, keys: list[Any]) -> None:
        self._manager.complete_store(keys, self._last, success=False)
        self._manager.on_request_finished(self._last)

    def _request(self) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        self._requests += 1
        return ReqContext(req_id=str(self._requests))


def elapsed(call: Callable[..., object], *arguments: object) -> int:
    start = time.perf_counter_ns()
    call(*arguments)
    return time.perf_counter_ns() - start


def random_prompts(count: int, blocks: int, seed: int = 0) -> list[KeyArray]:
    rng = np.random.default_rng(seed)
    return [
        np.frombuffer(rng.bytes(32 * blocks), np.uint8).reshape(blocks, 32) for _ in range(count)
    ]


def sides_with(prompts: list[KeyArray], blocks: int, *, peers: bool) -> list[Side]:
    """Every side with *prompts* resident, and room for another long one."""
    room = blocks + 2 * PROMPT_TOKENS // min(TOKENS_PER_BLOCK)
    ordered, scattered = KVStrata(room, room), KVStrata(room, room)
    scattered.name = "KVStrata, scattered"
    ordered.load(prompts, scattered=False)
    scattered.load(prompts, scattered=True)
    others: list[Side] = [Dict(), VllmManager(room)] if peers else [Dict()]
    for side in others:
        for prompt in prompts:
            keys = side.prepare(prompt)
            side.put_plan(keys)
            side.complete(keys)
    return [ordered, scattered, *others]


def one_round(side: Side, resident: KeyArray, fresh: KeyArray) -> dict[str, int]:
    """Nanoseconds of every operation on a prompt that is *resident* and one that is not."""
    half = len(resident) // 2
    mixed = np.concatenate((resident[:half], fresh[half:]))
    known, partly, unknown = (side.prepare(keys) for keys in (resident, mixed, fresh))
    times = {
        "match full": elapsed(side.match, known),
        "match half": elapsed(side.match, partly),
        "match miss": elapsed(side.match, unknown),
    }
    found = [side.match(keys) for keys in (known, partly, unknown)]
    if found != [len(resident), half, 0]:
        raise SystemExit(f"{side.name} finds {found} blocks")
    times["lease + release"] = elapsed(side.lease, known, len(resident))
    times["put plan"] = elapsed(side.put_plan, unknown)
    side.abandon(unknown)
    return times


def measure_operations(blocks: int, rounds: int, *, peers: bool) -> Iterator[dict[str, Any]]:
    longest = min(blocks, PROMPT_TOKENS // min(TOKENS_PER_BLOCK))
    prompts = random_prompts(blocks // longest, longest)
    sides = sides_with(prompts, blocks, peers=peers)
    rng = np.random.default_rng(1)
    for tokens in TOKENS_PER_BLOCK:
        length = min(longest, PROMPT_TOKENS // tokens)
        times: dict[tuple[str, str], Nanoseconds] = {}
        for turn in range(rounds + 1):
            resident = prompts[rng.integers(len(prompts))][:length]
            (fresh,) = random_prompts(1, length, seed=turn + 10)
            for side in sides[turn % len(sides) :] + sides[: turn % len(sides)]:
                for operation, took in one_round(side, resident, fresh).items():
                    if turn:  # the first warms up
                        times.setdefault((side.name, operation), []).append(took)
        for (name, operation), values in times.items():
            yield {
                "blocks": blocks,
                "prompt_blocks": length,
                "operation": operation,
                "side": name,
                **percentiles(values),
            }


def measure_eviction(rounds: int, blocks: int, *, peers: bool) -> Iterator[dict[str, Any]]:
    """A full pool whose prompts are eight blocks each: one slot after another, and a long put."""
    prompts = random_prompts(blocks // 8, 8)
    makers: dict[str, Callable[[KVStrata], EvictionPolicy]] = {
        "LRU": lambda _: LRU(blocks + 8),
        "S3-FIFO": lambda s: S3FIFO(blocks + 8, blocks, s.index.fingerprints),
        "cost-aware": lambda s: CostAware(blocks + 8, PrefillCost(s.index.depth, 2000)),
    }
    for name, make in makers.items():
        side = KVStrata(blocks + 8, blocks)
        side.policy = make(side)
        side.name = f"KVStrata, {name}"
        side.load(prompts, scattered=False)
        yield from evictions(side, rounds)
    if peers:
        vllm = VllmManager(blocks)
        for prompt in prompts:
            keys = vllm.prepare(prompt)
            vllm.put_plan(keys)
            vllm.complete(keys)
        yield from evictions(vllm, rounds)


def evictions(side: Side, rounds: int) -> Iterator[dict[str, Any]]:
    times: dict[str, Nanoseconds] = {}
    for operation, length, turns in (("1 block", 1, 40 * rounds), ("8192 blocks", 8192, rounds)):
        for turn, keys in enumerate(random_prompts(turns, length, seed=length)):
            prepared = side.prepare(keys)
            took = elapsed(side.put_plan, prepared)
            side.complete(prepared)
            if turn:
                times.setdefault(f"put plan, {operation}", []).append(took)
    if isinstance(side, KVStrata):
        for keys in random_prompts(40 * rounds, 1, seed=2):
            start = time.perf_counter_ns()
            slots = side.take(1)
            times.setdefault("allocate a slot", []).append(time.perf_counter_ns() - start)
            side.pool.release(slots)
            side.put_plan(keys)
            side.complete(keys)
    for operation, values in times.items():
        yield {"operation": operation, "side": side.name, **percentiles(values)}


def measure_keys(rounds: int) -> Iterator[dict[str, Any]]:
    """From tokens to keys, and from an engine's keys to an array."""
    tokens = np.random.default_rng(0).integers(0, 128_000, PROMPT_TOKENS)
    for step in TOKENS_PER_BLOCK:
        hasher = BlockHasher(SPACE, step)
        keys = hasher.keys(tokens)
        engine_keys = [key.tobytes() for key in keys]
        made = [elapsed(hasher.keys, tokens) for _ in range(rounds)]
        taken = [elapsed(as_key_array, engine_keys) for _ in range(rounds)]
        for operation, values in (("hash tokens", made), ("take over keys", taken)):
            yield {
                "prompt_blocks": len(keys),
                "operation": operation,
                "side": "KVStrata",
                **percentiles(values),
            }


def percentiles(values: Nanoseconds) -> dict[str, float]:
    """In milliseconds."""
    ordered = sorted(values)
    at = [ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 99)]
    return {"p50_ms": at[0] / 1e6, "p99_ms": at[1] / 1e6, "max_ms": ordered[-1] / 1e6}


def resident_bytes() -> int:
    with Path("/proc/self/statm").open(encoding="ascii") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_memory(blocks: int, policy: str) -> dict[str, Any]:
    """Every block a branch of its own below one root, in host memory and on disk, and churned."""
    before = resident_bytes()
    index, pool = PrefixIndex(blocks), SlotPool(blocks)
    make: dict[str, Callable[[], LRU | S3FIFO | CostAware]] = {
        "LRU": lambda: LRU(blocks),
        "S3-FIFO": lambda: S3FIFO(blocks, blocks, index.fingerprints),
        "cost-aware": lambda: CostAware(blocks, PrefillCost(index.depth, 2000)),
    }
    policies = [make[policy](), make[policy]()]
    root = np.tile(np.frombuffer(SPACE.ljust(48), np.uint8), (MEMORY_PIECE, 1))
    rng = np.random.default_rng(0)
    for start in range(0, blocks, MEMORY_PIECE):
        rows = root[: min(MEMORY_PIECE, blocks - start)].copy()
        first = 1 if start == 0 else 0  # the root itself
        rows[first:, 16:] = random_prompts(1, len(rows) - first, seed=start)[0]
        ids = index.insert_stored(rows, root[: len(rows)], np.arange(len(rows)) >= first)
        index.host_slot[ids] = pool.take(len(ids))
        index.set_where(ids, HOST | DISK)
        for one in policies:
            one.admit(ids)
    for _ in range(blocks // 4096):
        some = rng.integers(0, blocks, 8192).astype(np.int32)
        for one in policies:
            one.touch(some)
    held = index.nbytes + pool.nbytes + sum(one.nbytes for one in policies)
    return {
        "blocks": len(index),
        "policy": policy,
        "arrays_bytes_per_block": held / blocks,
        "resident_bytes_per_block": (resident_bytes() - before) / blocks,
    }


def memory_in_a_process(blocks: int, policy: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--memory", str(blocks), policy]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def show(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="left" if column in LABELS else "right")
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, a million blocks at most")
    parser.add_argument("--blocks", type=int, nargs="+", default=list(BLOCKS))
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--without-vllm", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.blocks = [blocks for blocks in options.blocks if blocks <= 1_000_000]
    options.rounds = options.rounds or (10 if options.quick else 100)
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.memory:
        print(json.dumps(measure_memory(int(options.memory[0]), options.memory[1])))
        return 0
    console = Console(width=130)
    results: dict[str, list[dict[str, Any]]] = {"keys": list(measure_keys(options.rounds))}
    show(console, "Keys of a prompt of 131072 tokens", results["keys"])
    for blocks in options.blocks:
        gc.collect()
        peers = blocks <= PEER_BLOCKS and not options.without_vllm
        rows = list(measure_operations(blocks, options.rounds, peers=peers))
        show(console, f"{blocks} blocks resident", rows)
        results[f"operations at {blocks}"] = rows
    blocks = min(1_000_000, max(options.blocks))
    rows = list(measure_eviction(options.rounds, blocks, peers=not options.without_vllm))
    show(console, f"A full pool of {blocks} blocks, {blocks // 8} leaves", rows)
    results["eviction"] = rows
    rows = [
        memory_in_a_process(blocks, policy)
        for blocks in options.blocks
        if blocks >= 100_000
        for policy in ("LRU", "S3-FIFO", "cost-aware")
    ]
    show(console, "Memory: index, slots and two tiers' policies", rows)
    results["memory"] = rows
    if options.json:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Copies and kernels of a GPU, each beside the plain thing that it should come near.

`make gpu` runs it with the tests and prints its rows; see docs/gpu.md. All of a row is measured in
one process, in turn, and the medians of pairs are compared.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from kvstrata.core.errors import InvariantViolated
from kvstrata.storage.mapping import HostMapping
from kvstrata.transfer.devices import open_device
from kvstrata.transfer.guarded import Copied, RankSlots, split_runs
from kvstrata.transfer.lanes import Handle

__all__ = ["GEOMETRIES", "Bed", "Geometry", "Row", "attention", "copies", "rotation", "slowdown"]

REPETITIONS: Final = 7
Action = Callable[[], object]


class Row(NamedTuple):
    """One thing that was measured."""

    what: str
    found: float
    bound: float
    is_most: bool = False  # whether the bound is not to be exceeded, else to be reached
    note: str = ""

    @property
    def is_met(self) -> bool:
        return self.found <= self.bound if self.is_most else self.found >= self.bound


class Geometry(NamedTuple):
    """Pages of a model."""

    name: str
    layers: int
    page_bytes: int
    per_slot: int = 16  # device blocks
    blocks_outermost: bool = False

    @property
    def row_bytes(self) -> int:
        return self.layers * self.page_bytes


# 16 tokens a page: 8 heads of 128 + 128 bfloat16, or a latent of 512 + 64.
GEOMETRIES: Final = (
    Geometry("8B, layers outermost", 32, 16 * 8 * 256 * 2),
    Geometry("8B, blocks outermost", 32, 16 * 8 * 256 * 2, blocks_outermost=True),
    Geometry("MLA, layers outermost", 61, 16 * 576 * 2),
    Geometry("MLA, blocks outermost", 61, 16 * 576 * 2, blocks_outermost=True),
)


class Bed:
    """A cache on *device*, and as many blocks of a pinned host tier."""

    def __init__(self, geometry: Geometry, device: torch.device, total_bytes: int) -> None:
        self.geometry = geometry
        self.slots = max(1, total_bytes // (geometry.row_bytes * geometry.per_slot))
        blocks = self.slots * geometry.per_slot
        order = (
            (blocks, geometry.layers) if geometry.blocks_outermost else (geometry.layers, blocks)
        )
        self.cache = torch.randint(
            0, 256, (*order, geometry.page_bytes), dtype=torch.uint8, device=device
        )
        layer_axis = 1 if geometry.blocks_outermost else 0
        self.device = open_device([list(self.cache.unbind(layer_axis))])
        slot_bytes = -(-geometry.row_bytes * geometry.per_slot // 4096) * 4096
        self.mapping = HostMapping.create(self.slots, slot_bytes, b"bench")
        self.mapping.touch(threading.Event())
        self.device.pin(self.mapping, lambda: False)
        group_bytes = (geometry.row_bytes * geometry.per_slot,)
        numbers = np.random.default_rng(0).permutation(blocks).tolist()
        self._runs = split_runs(
            numbers,
            [(slot, 0) for slot in range(self.slots)],
            per_slot=(geometry.per_slot,),
            absent=-1,
        )
        self._rank_slots = RankSlots(self.mapping, 0, group_bytes)
        self.total_bytes = blocks * geometry.row_bytes

    def copy(self, *, is_load: bool) -> None:
        """All blocks, as a worker copies them; to be called on one thread."""
        make = self.device.load_job if is_load else self.device.save_job
        if make(self._rank_slots, self._runs, self.device.fence())(Handle()) is not Copied.WHOLE:
            raise InvariantViolated("not copied whole")

    def check(self) -> None:
        """Save, spoil the cache, load: every byte is back."""
        before = self.cache.clone()
        self.mapping.data[:] = 0xAA
        self.copy(is_load=False)
        self.cache.fill_(0x55)
        synchronize(self.cache.device)
        self.copy(is_load=True)
        if not torch.equal(self.cache, before):
            raise InvariantViolated(f"{self.geometry.name}: other bytes came back")

    def close(self) -> None:
        self.device.let_go()
        self.mapping.close()


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def copies(geometry: Geometry, device: torch.device, total_bytes: int) -> Iterator[Row]:
    """Loads and saves, beside one plain copy of as many pinned bytes; right before they are timed."""
    with closing(Bed(geometry, device, total_bytes)) as bed:
        bed.check()
        plain = torch.empty(bed.total_bytes, dtype=torch.uint8, device=device)
        pinned = torch.empty(
            bed.total_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu"
        ).fill_(1)
        for is_load in (True, False):
            target, source = (plain, pinned) if is_load else (pinned, plain)
            ratio, seconds = compare(
                lambda is_load=is_load: bed.copy(is_load=is_load),  # type: ignore[misc]  # binds the loop's value
                lambda target=target, source=source: target.copy_(source, non_blocking=True),  # type: ignore[misc]  # the same
                device,
            )
            what = f"{'load' if is_load else 'save'}, {geometry.name}: share of a plain copy"
            note = f"{bed.total_bytes / seconds / 2**30:.1f} GiB/s"
            yield Row(what, ratio, 0.9, note=note)


def slowdown(device: torch.device, total_bytes: int, size: int = 4096) -> Iterator[Row]:
    """What products of bfloat16 matrices take while blocks are loaded, beside what they take alone."""
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(50):
            torch.mm(left, left)

    with closing(Bed(GEOMETRIES[0], device, total_bytes)) as bed:
        over = threading.Event()

        def loads() -> None:
            while not over.is_set():
                bed.copy(is_load=True)

        samples = []
        for _ in range(REPETITIONS):
            alone = timed(products, device)
            over.clear()
            loader = threading.Thread(target=loads)
            loader.start()
            samples.append(timed(products, device, compute_only=True) / alone)
            over.set()
            loader.join()
    yield Row("matrix products beside loads: time", statistics.median(samples), 1.03, is_most=True)


def rotation(device: torch.device, tokens: int = 16384) -> Iterator[Row]:
    """Tokens moved with their keys turned, beside a copy of as many bytes on the device."""
    from kvstrata.blend.move_triton import Moves, Rope, move_tokens

    shape = (tokens // 16, 8, 16, 256)
    source = torch.randn(shape, device=device).to(torch.bfloat16)
    cache = torch.empty_like(source)
    slots = torch.randperm(tokens, device=device)
    positions = torch.arange(tokens, device=device)
    moves = Moves(slots, slots, positions, positions.flip(0))
    angles = torch.arange(tokens)[:, None] / 10000.0 ** (torch.arange(64) / 64)
    table = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
    ratio, _ = compare(
        lambda: move_tokens(source, cache, moves, Rope(table, is_neox=True)),
        lambda: cache.copy_(source),
        device,
    )
    yield Row("rotation and scatter: share of a copy on the device", ratio, 0.8)


def attention(device: torch.device, tokens: int = 8192) -> Iterator[Row]:
    """All tokens of a prompt as queries, beside torch's own causal attention."""
    from kvstrata.blend.attend_triton import PagedKV, attend

    heads, kv_heads, size = 32, 8, 128
    cache = torch.randn(tokens // 16, kv_heads, 16, 2 * size, device=device).to(torch.bfloat16)
    queries = torch.randn(tokens, heads, size, device=device).to(torch.bfloat16)
    kv = PagedKV(cache, torch.arange(tokens // 16, device=device), size)
    flat = cache.transpose(0, 1).reshape(1, kv_heads, tokens, 2 * size)
    flat = flat.repeat_interleave(heads // kv_heads, dim=1)
    keys, values = (part.contiguous() for part in flat.split(size, dim=3))
    query = queries.transpose(0, 1)[None].contiguous()
    positions = torch.arange(tokens, device=device)
    plain: Any = torch.nn.functional.scaled_dot_product_attention
    ratio, _ = compare(
        lambda: attend(queries, positions, kv, size**-0.5),
        lambda: plain(query, keys, values, is_causal=True),
        device,
    )
    yield Row("attention by position: share of torch's causal attention", ratio, 0.6)


def compare(mine: Action, plain: Action, device: torch.device) -> tuple[float, float]:
    """How fast *mine* is beside *plain*, by the median of pairs, and its median seconds."""
    pairs = [(timed(plain, device), timed(mine, device)) for _ in range(REPETITIONS + 1)][1:]
    seconds = statistics.median(own for _, own in pairs)
    return statistics.median(other / own for other, own in pairs), seconds


def timed(action: Action, device: torch.device, *, compute_only: bool = False) -> float:
    """Seconds until *action* is done on *device*; of its current stream only, if asked so."""
    synchronize(device)
    start = time.perf_counter()
    action()
    if compute_only and device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
    else:
        synchronize(device)
    return time.perf_counter() - start


def rows(device: torch.device, total_bytes: int) -> Iterator[Row]:
    """Everything, in the order of docs/gpu.md."""
    for geometry in GEOMETRIES:
        yield from copies(geometry, device, total_bytes)
    yield from slowdown(device, total_bytes)
    yield from rotation(device)
    yield from attention(device)


def markdown(found: Sequence[Row]) -> str:
    lines = ["| | found | bound | |", "|---|---:|---:|---|"]
    for row in found:
        sign = "≤" if row.is_most else "≥"
        verdict = "met" if row.is_met else "NOT met"
        note = f"{verdict}; {row.note}" if row.note else verdict
        lines.append(f"| {row.what} | {row.found:.2f} | {sign} {row.bound:.2f} | {note} |")
    return "\n".join(lines)

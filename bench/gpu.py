"""Copies and kernels of a GPU, each beside the plain thing that it should come near.

`make gpu` runs it with the tests and prints its rows; see docs/gpu.md. All of a row is measured in
one process, in turn, and the medians of pairs are compared.
"""

import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from bench.gpu_rows import Row

from kvstrata.core.errors import InvariantViolated
from kvstrata.storage.mapping import HostMapping
from kvstrata.transfer.device import Bytes
from kvstrata.transfer.devices import open_device
from kvstrata.transfer.guarded import Copied, RankSlots, split_runs
from kvstrata.transfer.lanes import Handle

__all__ = [
    "GEOMETRIES",
    "Bed",
    "Company",
    "Geometry",
    "attention",
    "compare",
    "copies",
    "rotation",
    "rows",
    "synchronize",
    "timed",
]

_log = logging.getLogger(__name__)

REPETITIONS: Final = 7
Action = Callable[[], object]


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

    @property
    def piece_bytes(self) -> int:
        """What lies side by side on the device."""
        return self.row_bytes if self.blocks_outermost else self.page_bytes


# 16 tokens a page: 8 heads of 128 + 128 bfloat16, or a latent of 512 + 64.
GEOMETRIES: Final = (
    Geometry("8B, layers outermost", 32, 16 * 8 * 256 * 2),
    Geometry("8B, blocks outermost", 32, 16 * 8 * 256 * 2, blocks_outermost=True),
    Geometry("MLA, layers outermost", 61, 16 * 576 * 2),
    Geometry("MLA, blocks outermost", 61, 16 * 576 * 2, blocks_outermost=True),
)


class Company(NamedTuple):
    """What else runs while copies are made, and which share of a plain copy they should reach."""

    name: str = ""
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    bound: float | None = 0.9


class Bed:
    """A cache on *device*, and as many blocks of a pinned host tier."""

    def __init__(self, geometry: Geometry, device: torch.device, total_bytes: int) -> None:
        _log.info("pages of %s:", geometry.name)
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
        self.slot_row_bytes = geometry.row_bytes * geometry.per_slot
        self.blocks = np.random.default_rng(0).permutation(blocks).tolist()  # in the order of slots
        self._runs = split_runs(
            self.blocks,
            [(slot, 0) for slot in range(self.slots)],
            per_slot=(geometry.per_slot,),
            absent=-1,
        )
        self._rank_slots = RankSlots(self.mapping, 0, (self.slot_row_bytes,), (0,))
        self.total_bytes = blocks * geometry.row_bytes

    def copy(self, *, is_load: bool, slot: int | None = None) -> None:
        """All blocks, or those of a slot, as a worker copies them; to be called on one thread."""
        make = self.device.load_job if is_load else self.device.save_job
        runs = self._runs if slot is None else self._runs[slot : slot + 1]
        if make(self._rank_slots, runs, self.device.fence())(Handle()) is not Copied.WHOLE:
            raise InvariantViolated("not copied whole")

    def check(self) -> None:
        """Save, look into the slots, spoil the cache, load: every byte is where it belongs."""
        before = self.cache.clone()
        self.mapping.data[:] = 0xAA
        self.copy(is_load=False)
        self._check_slots(before.cpu().numpy())
        self.cache.fill_(0x55)
        synchronize(self.cache.device)
        self.copy(is_load=True)
        if not torch.equal(self.cache, before):
            raise InvariantViolated(f"{self.geometry.name}: other bytes came back")

    def _check_slots(self, cache: Bytes) -> None:
        """Page by page: a slot is its blocks, of each all layers, and nothing else is written."""
        geometry = self.geometry
        for place, block in enumerate(self.blocks):
            slot, within = divmod(place, geometry.per_slot)
            for layer in range(geometry.layers):
                page = cache[block, layer] if geometry.blocks_outermost else cache[layer, block]
                start = (within * geometry.layers + layer) * geometry.page_bytes
                found = self.mapping.data[slot, start : start + geometry.page_bytes]
                if not np.array_equal(found, page):
                    raise InvariantViolated(f"{geometry.name}: slots hold other bytes")
        if (self.mapping.data[:, self.slot_row_bytes :] != 0xAA).any():
            raise InvariantViolated(f"{geometry.name}: a save has written behind its blocks")

    @property
    def is_pinned(self) -> bool:
        """Whether the host tier is, by the driver's own word."""
        ends = (self.mapping.data[0], self.mapping.data[-1])
        on_gpu = self.cache.device.type != "cpu"
        return on_gpu and all(bool(torch.from_numpy(end).is_pinned()) for end in ends)

    def remarks(self, *, is_load: bool) -> list[str]:
        """What its copies are unlike those of pinned memory by copy engines in."""
        if not self.is_pinned:
            return ["host tier not pinned"]
        device: Any = self.device
        stream = (device._loads if is_load else device._saves)._stream
        if self.geometry.piece_bytes > stream.kernel_bytes:
            return []
        from kvstrata.transfer.cuda_triton import PROGRAMS

        return [f"by kernel, multiprocessors: {PROGRAMS}"]

    def close(self) -> None:
        self.device.let_go()
        self.mapping.close()


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def copies(
    geometry: Geometry,
    device: torch.device,
    total_bytes: int,
    company: Company = Company(),  # noqa: B008 - immutable
) -> Iterator[Row]:
    """Loads and saves, beside one plain copy of as many pinned bytes; right before they are timed.

    The plain copy has no *company*.
    """
    with closing(Bed(geometry, device, total_bytes)) as bed:
        bed.check()
        plain = torch.empty(bed.total_bytes, dtype=torch.uint8, device=device)
        pinned = torch.empty(
            bed.total_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu"
        ).fill_(1)
        for is_load in (True, False):
            target, source = (plain, pinned) if is_load else (pinned, plain)
            ratio, seconds = compare(
                partial(_copy_in, company, bed, is_load=is_load),
                partial(target.copy_, source, non_blocking=True),
                device,
            )
            kind = "load" if is_load else "save"
            what = f"{kind}, {geometry.name}{company.name}: share of a plain copy"
            rate = f"{bed.total_bytes / seconds / 2**30:.1f} GiB/s"
            note = "; ".join([rate, *bed.remarks(is_load=is_load)])
            yield Row(what, ratio, company.bound, note=note)


def _copy_in(company: Company, bed: Bed, *, is_load: bool) -> None:
    with company.around():
        bed.copy(is_load=is_load)


def rotation(device: torch.device, tokens: int = 131072) -> Iterator[Row]:
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


def timed(action: Action, device: torch.device) -> float:
    """Seconds until *action* is done on *device*."""
    synchronize(device)
    start = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - start


def rows(device: torch.device, total_bytes: int) -> Iterator[Row]:
    """In the order of docs/gpu.md."""
    for geometry in GEOMETRIES:
        yield from copies(geometry, device, total_bytes)
    yield from rotation(device)
    yield from attention(device)

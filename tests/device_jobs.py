"""Jobs that any device has to do right: a GPU, and what stands in for one where there is none."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Final, Protocol

import numpy as np
import torch

from kvstrata.storage.mapping import HostMapping
from kvstrata.transfer.device import Bytes
from kvstrata.transfer.devices import PagedDevice
from kvstrata.transfer.guarded import Copied, RankSlots, Run, split_runs
from kvstrata.transfer.lanes import Handle, Job, Lane, Lanes
from kvstrata.transfer.layered import LayerGates, Part

__all__ = ["JOBS", "PATIENCE_SECONDS", "Engine", "cache", "layers", "layers_one_by_one"]

PATIENCE_SECONDS = 30.0  # only a device that hangs takes that long
BLOCKS, SLOTS = 24, 6
ABSENT = -1


class Engine(Protocol):
    """What computes on a device."""

    device: torch.device
    scale: int  # of pages
    blocks_outermost: bool  # whether the pages of a block are side by side

    def open(self, pages: Sequence[Sequence[torch.Tensor]]) -> PagedDevice: ...

    def launch(self, work: Callable[[], object]) -> None:
        """Have it done on the device, behind all that was launched before."""
        ...

    def delay(self) -> None:
        """Let what is launched next wait for a while."""
        ...

    def finish(self) -> None:
        """Wait until all that was launched is done."""
        ...


class Cache:
    """Pages of groups of layers, and slots of other bytes, of which the second of two ranks has half.

    The layers of a group are in memory of their own, or its blocks are.
    """

    def __init__(
        self, engine: Engine, groups: Sequence[Sequence[int]], per_slot: Sequence[int]
    ) -> None:
        """*groups*: bytes of the pages of each layer; *per_slot*: blocks of each group in a slot."""
        self.per_slot = tuple(per_slot)
        self.pages = [_pages(engine, [size * engine.scale for size in sizes]) for sizes in groups]
        self.device = engine.open(self.pages)
        rows = [sum(page.shape[1] for page in pages) for pages in self.pages]
        self._group_bytes = tuple(row * n for row, n in zip(rows, per_slot, strict=True))
        self.start_bytes = sum(self._group_bytes)  # in a slot, behind the first rank
        slot_bytes = -(-2 * self.start_bytes // 4096) * 4096
        self.mapping = HostMapping.create(SLOTS, slot_bytes, b"server")
        self.mapping.data[:] = np.random.default_rng(1).integers(
            0, 256, self.mapping.data.shape, np.uint8
        )
        self.device.pin(self.mapping, lambda: False)
        starts = tuple(accumulate(self._group_bytes[:-1], initial=0))
        self.slots = RankSlots(self.mapping, self.start_bytes, self._group_bytes, starts)

    def runs(self, blocks: Sequence[int], slots: Sequence[int]) -> list[Run]:
        numbered = [(slot, 0) for slot in slots]
        return split_runs(blocks, numbered, per_slot=self.per_slot, absent=ABSENT)

    def rows(self, slot: int, group: int = 0) -> Bytes:
        """The bytes of *group* in a slot, (blocks, row_bytes)."""
        start = self.start_bytes + sum(self._group_bytes[:group])
        part = self.mapping.data[slot, start : start + self._group_bytes[group]]
        return part.reshape(self.per_slot[group], -1)

    def blocks(self, numbers: Sequence[int], group: int = 0) -> Bytes:
        """The bytes of device blocks, (blocks, row_bytes)."""
        pages = [page[list(numbers)] for page in self.pages[group]]
        found: Bytes = torch.cat(pages, dim=1).cpu().numpy()
        return found

    def layer(self, number: int) -> slice:
        """Where in a row of the first group the page of one layer is."""
        ends = list(accumulate((page.shape[1] for page in self.pages[0]), initial=0))
        return slice(ends[number], ends[number + 1])

    def do(self, job: Job[Copied]) -> None:
        assert job(Handle()) is Copied.WHOLE

    def close(self) -> None:
        self.device.let_go()
        self.mapping.close()


def _noise(engine: Engine, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=engine.device)


def _pages(engine: Engine, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Of each layer (BLOCKS, bytes)."""
    if engine.blocks_outermost:
        return list(_noise(engine, BLOCKS, sum(sizes)).split(list(sizes), dim=1))
    return [_noise(engine, BLOCKS, size) for size in sizes]


@contextmanager
def cache(
    engine: Engine,
    groups: Sequence[Sequence[int]] = ((512, 512, 512),),
    per_slot: Sequence[int] = (4,),
) -> Iterator[Cache]:
    made = Cache(engine, groups, per_slot)
    try:
        yield made
    finally:
        made.close()


def parts_of_blocks(engine: Engine) -> None:
    """Of two slots some blocks are copied, and nothing else changes."""
    with cache(engine) as each:
        runs = each.runs([ABSENT, 5, ABSENT, 9, 7, ABSENT, ABSENT, 3], [4, 2])
        places = {5: (4, 1), 9: (4, 3), 7: (2, 0), 3: (2, 3)}  # block: slot, and where in it
        host, blocks = each.mapping.data.copy(), each.blocks(range(BLOCKS))
        each.do(each.device.save_job(each.slots, runs, each.device.fence()))
        for block, (slot, place) in places.items():
            start = each.start_bytes + place * blocks.shape[1]
            host[slot, start : start + blocks.shape[1]] = blocks[block]
        assert np.array_equal(each.mapping.data, host)
        assert np.array_equal(each.blocks(range(BLOCKS)), blocks)
        each.mapping.data[:] = ~host
        each.do(each.device.load_job(each.slots, runs, each.device.fence()))
        for block, (slot, place) in places.items():
            blocks[block] = each.rows(slot)[place]
        assert np.array_equal(each.blocks(range(BLOCKS)), blocks)
        assert np.array_equal(each.mapping.data, ~host)


def layers_one_by_one(engine: Engine) -> None:
    """Saves of two layers: the third stays as it was."""
    with cache(engine) as each:
        blocks = [8, 2, 3, 4]
        part, expected = Part(each.slots, each.runs(blocks, [3])), each.rows(3).copy()
        for layer in (1, 0):
            each.do(each.device.save_layer_job(part, each.device.fence(), layer))
            page = each.layer(layer)
            expected[:, page] = each.blocks(blocks)[:, page]
            assert np.array_equal(each.rows(3), expected)


def two_page_sizes(engine: Engine) -> None:
    """Two groups, whose pages and blocks in a slot differ, go to the host and back."""
    with cache(engine, ((512, 512, 512), (136, 1040)), (2, 3)) as each:
        blocks = [[1, 2, 11, 10], [1, 7, 6, 20, 5, 4]]  # by group
        runs = each.runs([1, 2, 1, 7, 6, 11, 10, 20, 5, 4], [5, 0])
        expected = [each.blocks(numbers, group) for group, numbers in enumerate(blocks)]
        each.do(each.device.save_job(each.slots, runs, each.device.fence()))
        for group, rows in enumerate(expected):
            found = np.concatenate([each.rows(slot, group) for slot in (5, 0)])
            assert np.array_equal(found, rows)
            for page in each.pages[group]:
                engine.launch(partial(page.fill_, 0))
        each.do(each.device.load_job(each.slots, runs, each.device.fence()))
        engine.finish()
        for group, (numbers, rows) in enumerate(zip(blocks, expected, strict=True)):
            assert np.array_equal(each.blocks(numbers, group), rows)
            others = [block for block in range(BLOCKS) if block not in numbers]
            assert not each.blocks(others, group).any()


def layers(engine: Engine) -> None:
    """A forward whose layers wait for their loads, behind what the engine had launched before."""
    with cache(engine) as each:
        lanes, device = Lanes[Copied](threads=each.device.copy_threads), each.device
        blocks, slots = [9, 8, 1, 2, 15, 14, 13, 12], [1, 4]
        index = torch.tensor(blocks, device=engine.device)
        engine.delay()
        for page in each.pages[0]:  # as vLLM does with new blocks
            engine.launch(partial(page.index_fill_, 0, index, 0))
        parts = [
            Part(each.slots, each.runs(blocks[:4], slots[:1])),
            Part(each.slots, each.runs(blocks[4:], slots[1:])),
        ]
        gates = LayerGates(len(each.pages[0]))
        handle = lanes.submit(device.load_layers_job(parts, device.fence(), gates), Lane.LOAD)
        seen: list[torch.Tensor] = []

        def attend(page: torch.Tensor) -> None:
            seen.append(page.index_select(0, index))

        for layer, page in enumerate(each.pages[0]):
            assert gates.wait(layer, PATIENCE_SECONDS)
            if (event := gates.event(layer)) is not None:
                device.follow(event)
            engine.launch(partial(attend, page))
        assert lanes.wait_for(handle, PATIENCE_SECONDS)
        assert (handle.result, handle.error) == (Copied.WHOLE, None)
        assert [part.doubt for part in parts] == [None, None]
        engine.finish()
        found = torch.cat(seen, dim=1).cpu().numpy()
        assert np.array_equal(found, np.concatenate([each.rows(slot) for slot in slots]))
        assert lanes.close(PATIENCE_SECONDS)


def several_jobs(engine: Engine) -> None:
    """Three loads and three saves at a time, the saves of blocks that are yet to be written."""
    with cache(engine) as each:
        lanes, device = Lanes[Copied](threads=4, saves=1), each.device
        blocks = np.random.default_rng(0).permutation(BLOCKS).reshape(SLOTS, 4).tolist()
        saved, loaded = range(3), range(3, SLOTS)  # slots, each with its blocks
        index = torch.tensor(blocks[:3], device=engine.device).flatten()
        new = [_noise(engine, len(index), page.shape[1]) for page in each.pages[0]]
        expected = {slot: each.rows(slot).copy() for slot in loaded}
        engine.delay()
        for page, values in zip(each.pages[0], new, strict=True):
            engine.launch(partial(page.index_copy_, 0, index, values))
        fence, handles = device.fence(), []
        for slot in (0, 3, 1, 4, 2, 5):
            runs, is_save = each.runs(blocks[slot], [slot]), slot in saved
            make = device.save_job if is_save else device.load_job
            lane = Lane.SAVE if is_save else Lane.LOAD
            handles.append(lanes.submit(make(each.slots, runs, fence), lane))
        for handle in handles:
            assert lanes.wait_for(handle, PATIENCE_SECONDS)
            assert (handle.result, handle.error) == (Copied.WHOLE, None)
        written = torch.cat(new, dim=1).cpu().numpy()
        expected |= {slot: written[4 * slot : 4 * slot + 4] for slot in saved}
        for slot, rows in expected.items():
            assert np.array_equal(each.rows(slot), rows)
            assert np.array_equal(each.blocks(blocks[slot]), rows)
        assert lanes.close(PATIENCE_SECONDS)


JOBS: Final = (parts_of_blocks, layers_one_by_one, two_page_sizes, layers, several_jobs)

"""Pages of host slots, layer by layer: read where they are, or brought to the device."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvstrata.integration.vllm.blend.slots import Bring, SlotPages
from kvstrata.storage.mapping import HostMapping

PAGE_BYTES, PER_SLOT, START_BYTES = (6, 2, 4), 3, 5
SLOTS = np.array([4, 0, 2])


def nothing(rows: NDArray[np.uint8], chosen: NDArray[np.int64]) -> None:
    return None


def brought(rows: NDArray[np.uint8], chosen: NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(rows[chosen])


def pages(bring: Bring) -> SlotPages:
    return SlotPages(START_BYTES, PAGE_BYTES, PER_SLOT, bring)


def test_each_layer_has_its_pages_wherever_they_are_read() -> None:
    mapping = HostMapping.create(5, 4096, bytes(16))
    mapping.data[:] = np.random.default_rng(1).integers(0, 256, mapping.data.shape, np.uint8)
    for bring in (nothing, brought):
        found = list(pages(bring).layers(mapping, SLOTS))
        assert [tuple(each.shape) for each in found] == [(9, size) for size in PAGE_BYTES]
        for row, (slot, block) in enumerate((s, b) for s in SLOTS for b in range(PER_SLOT)):
            start = START_BYTES + block * sum(PAGE_BYTES)
            of_block = torch.cat([each[row] for each in found]).numpy()
            assert (of_block == mapping.data[slot, start : start + sum(PAGE_BYTES)]).all()


def test_so_many_slots_are_asked_for_as_take_little_of_a_device() -> None:
    large: Any = SlotPages(0, (1 << 20,) * 32, 2, brought)
    assert large.most_slots == 2
    assert SlotPages(0, (1 << 30,), 1, brought).most_slots == 1

"""Copies between a GPU's cache and the host tier: bytes, order, and what is not there."""

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from bench.gpu import GEOMETRIES, Bed, Geometry

from kvstrata.transfer.cuda_ways import find_ways, is_rocm

MIB = 1 << 20


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: g.name)
def test_every_byte_is_back(geometry: Geometry, by_kernel: bool, kernel_calls: list[int]) -> None:
    with closing(Bed(geometry, torch.device("cuda", 0), 96 * MIB)) as bed:
        device: Any = bed.device
        for queue in (device._loads, device._saves):
            queue._stream.kernel_bytes = 1 << 62 if by_kernel else 0
        kernel_calls.clear()
        bed.check()
    if torch.version.hip is None:
        assert (kernel_calls != []) == by_kernel


@pytest.mark.parametrize("geometry", GEOMETRIES[:2], ids=lambda g: g.name)
def test_the_driver_without_batches_copies_the_same(geometry: Geometry) -> None:
    with closing(Bed(geometry, torch.device("cuda", 0), 96 * MIB)) as bed:
        device: Any = bed.device
        for queue in (device._loads, device._saves):
            queue._stream._ways = queue._stream._ways._replace(batch=None)
            queue._stream.kernel_bytes = 0
        bed.check()


def test_memory_that_is_not_pinned_is_copied_too() -> None:
    with closing(Bed(GEOMETRIES[0], torch.device("cuda", 0), 96 * MIB)) as bed:
        bed.device.let_go()
        bed.check()


def test_a_save_reads_what_the_engine_has_launched() -> None:
    with closing(Bed(GEOMETRIES[0], torch.device("cuda", 0), 96 * MIB)) as bed:
        for value in range(1, 9):
            torch.cuda._sleep(50_000_000)  # tens of milliseconds
            bed.cache.fill_(value)
            bed.copy(is_load=False)
            used = bed.geometry.row_bytes * bed.geometry.per_slot
            assert (bed.mapping.data[:, :used] == value).all()


@pytest.mark.parametrize("is_pinned", [True, False])
def test_rows_are_brought_while_the_engine_computes(is_pinned: bool) -> None:
    with closing(Bed(GEOMETRIES[0], torch.device("cuda", 0), 96 * MIB)) as bed:
        if not is_pinned:
            bed.device.let_go()
        rows = bed.mapping.data
        rows[:] = np.random.default_rng(1).integers(0, 256, rows.shape, np.uint8)
        torch.cuda._sleep(2_000_000_000)  # a second
        computed = torch.cuda.Event()
        computed.record()
        chosen = np.arange(len(rows))[::-2]
        found = bed.device.bring(rows, chosen)
        assert not computed.query()
        assert torch.equal(found.cpu(), torch.from_numpy(rows[chosen]))


def test_a_driver_of_cuda_has_batches() -> None:
    torch.cuda.init()
    assert (find_ways(torch.device("cuda", 0)).batch is None) == is_rocm()

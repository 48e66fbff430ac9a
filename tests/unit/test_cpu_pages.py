"""Copies between a paged cache on the CPU and rows of host memory: right bytes, no temporary."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.errors import ConfigError, InvariantViolated
from kvstrata.core.layout import ElementType, KVCacheLayout, KVCacheLayoutType
from kvstrata.storage.mapping import HostMapping
from kvstrata.transfer.cpu import CpuPageCopier, pages_of
from kvstrata.transfer.device import Bytes
from kvstrata.transfer.guarded import Copied, RankSlots, load_job, save_job, split_runs
from kvstrata.transfer.lanes import Handle

INT8 = ElementType.INT8
PAGE = 1 << 16


def noise(*shape: int) -> Bytes:
    return np.random.default_rng(7).integers(0, 256, shape, np.uint8)


def check_both_ways(copier: CpuPageCopier, pages: list[Bytes], blocks: list[int]) -> None:
    """Copy *blocks* to dirty rows and, changed, back; every byte of every page is accounted for."""
    before = [page.copy() for page in pages]
    rows = noise(len(blocks), copier.device_block_bytes)
    copier.copy_to_host(blocks, rows)
    for block, row in zip(blocks, rows, strict=True):
        assert np.array_equal(row, np.concatenate([page[block] for page in before]))
    copier.copy_to_device(blocks, ~rows)
    for page, old in zip(pages, before, strict=True):
        expected = old.copy()
        expected[blocks] = ~old[blocks]
        assert np.array_equal(page, expected)
    check_layer_by_layer(copier, pages, blocks)


def check_layer_by_layer(copier: CpuPageCopier, pages: list[Bytes], blocks: list[int]) -> None:
    """A layer takes its own page of each row, and leaves the others alone."""
    whole = noise(len(blocks), copier.device_block_bytes)
    copier.copy_to_host(blocks, whole)
    rows = ~whole
    start = 0
    for layer, size in enumerate(copier.page_bytes):
        copier.copy_to_host(blocks, rows, layer)
        start += size
        assert np.array_equal(rows[:, :start], whole[:, :start])
        assert np.array_equal(rows[:, start:], ~whole[:, start:])
    for layer, page in enumerate(pages):
        expected = [each.copy() for each in pages]
        expected[layer][blocks] = ~page[blocks]
        copier.copy_to_device(blocks, ~whole, layer)
        assert all(map(np.array_equal, pages, expected))


@st.composite
def layouts(draw: st.DrawFn) -> KVCacheLayout:
    small = st.integers(1, 5)
    kind = draw(st.sampled_from(KVCacheLayoutType))
    layer, block, token, head, element = (draw(small) for _ in range(5))
    return KVCacheLayout(kind, layer, block, token, head, element, is_mla=draw(st.booleans()))


@given(layouts(), st.data())
def test_rows_are_blockwise_blocks_whatever_the_layout(
    layout: KVCacheLayout, data: st.DataObject
) -> None:
    cache = noise(layout.total_bytes(INT8))
    blocks = data.draw(st.lists(st.integers(0, layout.num_block - 1), unique=True))
    axes = [layout.type.value.index(axis) for axis in KVCacheLayoutType.BLOCKWISE.value]
    blockwise = cache.reshape(layout.shape).transpose(axes).copy()
    pages = pages_of(cache, layout, INT8)
    copier = CpuPageCopier(pages)
    rows = noise(len(blocks), copier.device_block_bytes)
    copier.copy_to_host(blocks, rows)
    assert np.array_equal(rows, blockwise[blocks].reshape(rows.shape))
    check_both_ways(copier, pages, blocks)


@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=8),
    gaps=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    descending=st.booleans(),
    blocks=st.permutations(range(4)),
)
def test_pages_may_lie_anywhere_and_be_of_different_sizes(
    sizes: list[int], gaps: list[int], descending: bool, blocks: list[int]
) -> None:
    memory = noise(sum(4 * size for size in sizes) + sum(gaps))
    pages, start = [], 0
    for size, gap in zip(sizes, gaps, strict=False):
        pages.append(memory[start : start + 4 * size].reshape(4, size))
        start += 4 * size + gap
    if descending:
        pages.reverse()
    check_both_ways(CpuPageCopier(pages), pages, blocks[:3])


def test_views_of_one_allocation_with_heads_before_tokens_are_pages() -> None:
    cache = noise(3, 5, 2, 8, 16)  # layers, blocks, heads, tokens, K and V
    pages = [layer.reshape(5, -1) for layer in cache]
    assert all(np.shares_memory(page, cache) for page in pages)
    check_both_ways(CpuPageCopier(pages), pages, [4, 0, 2])


def test_blocks_outside_of_layers_are_pages() -> None:
    cache = noise(5, 3, 256)  # blocks, layers
    pages = [cache[:, layer] for layer in range(3)]
    check_both_ways(CpuPageCopier(pages), pages, [1, 3])


def _between_layers(distance: int) -> tuple[list[Bytes], Bytes]:
    """Pages of four layers in one region at *distance*, and rows that lie among them."""
    region = noise(4 * abs(distance))
    starts = [layer * abs(distance) for layer in range(4)]
    if distance < 0:
        starts.reverse()
    pages = [region[start : start + 2 * PAGE].reshape(2, PAGE) for start in starts]
    rows = region[2 * PAGE : 2 * PAGE + 8 * PAGE].reshape(2, 4 * PAGE)
    return pages, rows


@pytest.mark.parametrize("distance", [16 * PAGE, -16 * PAGE])
def test_rows_among_the_layers_get_the_right_bytes(distance: int) -> None:
    pages, rows = _between_layers(distance)
    before = [page.copy() for page in pages]
    copier = CpuPageCopier(pages)
    copier.copy_to_host([1, 0], rows)
    assert np.array_equal(rows[0], np.concatenate([page[1] for page in before]))
    copier.copy_to_device([0, 1], rows)
    for page, old in zip(pages, before, strict=True):
        assert np.array_equal(page, old[::-1])


def test_nothing_is_copied_to_a_temporary_first() -> None:
    pages, among = _between_layers(16 * PAGE)
    for rows in (among, noise(2, 4 * PAGE)):
        copier = CpuPageCopier(pages)
        for copy in (copier.copy_to_host, copier.copy_to_device):
            tracemalloc.start()
            copy([1, 0], rows)
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak_bytes < PAGE


@pytest.mark.parametrize("first_offset", [0, 1, 3])
def test_a_part_of_a_block_is_copied_and_the_rest_left_alone(first_offset: int) -> None:
    layout = KVCacheLayout(KVCacheLayoutType.LAYERWISE, 2, 12, 4, 2, 64)
    cache = noise(layout.total_bytes(INT8))
    pages = pages_of(cache, layout, INT8)
    copier = CpuPageCopier(pages)
    row_bytes = copier.device_block_bytes
    mapping = HostMapping.create(3, 4 * row_bytes, b"s")  # slots of four device blocks
    mapping.data[:] = 0xAA
    slots = RankSlots(mapping, 0, (4 * row_bytes,), (0,))
    blocks = [7, 3, 11, 0, 5]
    laid = [*[-1] * first_offset, *blocks, *[-1] * (3 - first_offset)]
    runs = split_runs(laid, [(2, 0), (0, 0)], per_slot=(4,), absent=-1)
    assert save_job([copier], slots, runs)(Handle()) is Copied.WHOLE
    expected = np.full((3 * 4, row_bytes), 0xAA, np.uint8)
    places = [*range(8, 12), *range(4)][first_offset : first_offset + 5]
    for place, block in zip(places, blocks, strict=True):
        expected[place] = np.concatenate([page[block] for page in pages])
    assert np.array_equal(mapping.data.reshape(12, row_bytes), expected)
    before = cache.copy()
    cache[:] = 0
    assert load_job([copier], slots, runs)(Handle()) is Copied.WHOLE
    for page, old in zip(pages, pages_of(before, layout, INT8), strict=True):
        assert np.array_equal(page[blocks], old[blocks])
        assert not page[[1, 2, 4]].any()
    mapping.close()


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([], "pages must be"),
        ([np.zeros(4, np.uint8)], "pages must be"),
        ([np.zeros((4, 8), np.uint8)[:, ::2]], "each contiguous"),
        ([np.zeros((4, 8), np.uint8), np.zeros((5, 8), np.uint8)], "of different length"),
    ],
)
def test_what_is_no_page_is_refused(pages: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CpuPageCopier(pages)


def test_a_cache_that_is_not_of_its_layout_is_refused() -> None:
    layout = KVCacheLayout(KVCacheLayoutType.BLOCKWISE, 1, 2, 1, 1, 8)
    with pytest.raises(ConfigError, match=r"shape \(33,\) for a layout of \(32,\) bytes"):
        pages_of(np.zeros(33, np.uint8), layout, INT8)


def test_rows_and_blocks_that_do_not_fit_are_bugs() -> None:
    copier = CpuPageCopier([np.zeros((4, 8), np.uint8)] * 2)
    with pytest.raises(IndexError, match="device block 4 of 4"):
        copier.copy_to_host([4], np.zeros((1, 16), np.uint8))
    with pytest.raises(IndexError, match="device block -1 of 4"):
        copier.copy_to_device([-1], np.zeros((1, 16), np.uint8))
    with pytest.raises(InvariantViolated, match=r"shape \(1, 15\)"):
        copier.copy_to_host([0], np.zeros((1, 15), np.uint8))
    with pytest.raises(InvariantViolated, match="not contiguous"):
        copier.copy_to_host([0, 1], np.zeros((2, 32), np.uint8)[:, ::2])

"""Spans of device blocks and rows: the bytes of a naive reference, in as few pieces as there can be."""

import ctypes
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.errors import ConfigError, InvariantViolated
from kvstrata.core.layout import ElementType, KVCacheLayout, KVCacheLayoutType
from kvstrata.transfer.cpu import pages_of
from kvstrata.transfer.descriptors import HostRows, PagePlace, PagePlaces, Spans, chunks
from kvstrata.transfer.device import Bytes

UINT8 = ElementType.UINT8


def noise(*shape: int) -> Bytes:
    return np.random.default_rng(3).integers(0, 256, shape, np.uint8)


def places_of(pages: list[Bytes]) -> PagePlaces:
    found = [PagePlace(p.ctypes.data, p.strides[0], p.shape[1]) for p in pages]
    return PagePlaces(found, len(pages[0]))


def run(spans: Spans, *, to_host: bool) -> None:
    """Copy as a device would: nothing is known but the addresses."""
    for device, host, length in zip(*(column.tolist() for column in spans), strict=True):
        ctypes.memmove(*((host, device) if to_host else (device, host)), length)


@st.composite
def caches(draw: st.DrawFn) -> list[Bytes]:
    """Pages of a few layers: of any layout, or anywhere and of different sizes."""
    small = st.integers(1, 4)
    if draw(st.booleans()):
        kind = draw(st.sampled_from(KVCacheLayoutType))
        layer, block, token, head, element = (draw(small) for _ in range(5))
        is_mla = draw(st.booleans())
        layout = KVCacheLayout(kind, layer, block, token, head, element, is_mla=is_mla)
        return pages_of(noise(layout.total_bytes(UINT8)), layout, UINT8)
    blocks, memory = draw(st.integers(2, 4)), noise(1 << 10)
    pages, start = [], 0
    for size, gap in draw(st.lists(st.tuples(small, st.integers(0, 2)), min_size=1, max_size=5)):
        pages.append(memory[start : start + blocks * size].reshape(blocks, size))
        start += blocks * size + gap
    return draw(st.permutations(pages))


@st.composite
def copies(draw: st.DrawFn) -> tuple[list[Bytes], list[int], HostRows, Bytes]:
    """A cache, blocks of it, and rows in dirty memory, in any order and partly side by side."""
    pages = draw(caches())
    blocks = draw(st.lists(st.integers(0, len(pages[0]) - 1), unique=True))
    row_bytes = sum(page.shape[1] for page in pages)
    host = ~noise(2 * len(pages[0]) + 1, row_bytes)
    numbers = draw(st.permutations(range(len(host))))[: len(blocks)]
    if draw(st.booleans()):
        numbers, blocks = sorted(numbers), sorted(blocks)
    addresses = np.array([host[n].ctypes.data for n in numbers], np.int64)
    begins = np.array([draw(st.booleans()) for _ in blocks], np.bool_)
    return pages, blocks, HostRows(addresses, begins), host


def naive(
    pages: list[Bytes], blocks: list[int], rows: HostRows, layer: int | None
) -> dict[int, int]:
    """Device address → host address of every byte."""
    found = {}
    for block, row in zip(blocks, rows.addresses.tolist(), strict=True):
        at = row
        for number, page in enumerate(pages):
            if layer in {None, number}:
                start = page.ctypes.data + block * page.strides[0]
                found.update({start + i: at + i for i in range(page.shape[1])})
            at += page.shape[1]
    return found


def by_byte(spans: Spans) -> dict[int, int]:
    found: dict[int, int] = {}
    for device, host, length in zip(*(column.tolist() for column in spans), strict=True):
        assert length > 0
        piece = {device + i: host + i for i in range(length)}
        assert not found.keys() & piece.keys()
        found |= piece
    return found


@given(copies())
def test_spans_are_the_bytes_of_the_reference(
    copy: tuple[list[Bytes], list[int], HostRows, Bytes],
) -> None:
    pages, blocks, rows, _ = copy
    places, numbers = places_of(pages), np.array(blocks, np.int64)
    for layer in (None, *range(len(pages))):
        assert by_byte(places.spans(numbers, rows, layer)) == naive(pages, blocks, rows, layer)


@given(copies())
def test_bytes_arrive_in_both_directions_and_no_others_change(
    copy: tuple[list[Bytes], list[int], HostRows, Bytes],
) -> None:
    pages, blocks, rows, host = copy
    places, numbers = places_of(pages), np.array(blocks, np.int64)
    before = [page.copy() for page in pages]
    expected = host.copy()
    for block, address in zip(blocks, rows.addresses.tolist(), strict=True):
        row = (address - host.ctypes.data) // host.shape[1]
        expected[row] = np.concatenate([page[block] for page in pages])
    run(places.spans(numbers, rows), to_host=True)
    assert np.array_equal(host, expected)
    host ^= 0xFF
    run(places.spans(numbers, rows), to_host=False)
    for page, old in zip(pages, before, strict=True):
        old[blocks] ^= 0xFF
        assert np.array_equal(page, old)


@given(copies())
def test_pieces_that_touch_on_both_sides_are_one_unless_a_row_begins_apart(
    copy: tuple[list[Bytes], list[int], HostRows, Bytes],
) -> None:
    """Of a block, and of blocks that are one piece each: by chance, others may touch."""
    pages, blocks, rows, host = copy
    begin, apart = {*rows.addresses.tolist()}, {*rows.addresses[rows.begins].tolist()}
    spans = places_of(pages).spans(np.array(blocks, np.int64), rows)
    pieces = list(zip(*(column.tolist() for column in spans), strict=True))
    for (device, at, length), (next_device, next_at, next_length) in pairwise(pieces):
        touches = (device + length, at + length) == (next_device, next_at)
        are_whole = length % host.shape[1] == next_length % host.shape[1] == 0
        can_be_one = are_whole or next_at not in begin
        assert not (touches and can_be_one) or next_at in apart
    assert apart <= {*spans.host.tolist()}


@given(copies(), st.integers(1, 30), st.integers(1, 4))
def test_chunks_are_all_of_it_in_order_and_no_larger_than_they_may_be(
    copy: tuple[list[Bytes], list[int], HostRows, Bytes], most_bytes: int, most_spans: int
) -> None:
    pages, blocks, rows, _ = copy
    spans = places_of(pages).spans(np.array(blocks, np.int64), rows)
    parts = list(chunks(spans, most_bytes, most_spans))
    whole = list(by_byte(spans).items())
    assert [pair for part in parts for pair in by_byte(part).items()] == whole
    for part in parts:
        assert 1 <= len(part.device) <= most_spans
        assert part.total_bytes <= most_bytes


def test_only_spans_that_are_longer_than_a_chunk_are_split() -> None:
    """Their pieces fill chunks, so that no small one is between two large ones."""
    lengths = np.array([5, 5, 2, 3, 3, 9], np.int64)
    spans = Spans(np.arange(6) * 100, np.arange(6) * 200, lengths)
    found = [
        [part.device.tolist(), part.host.tolist(), part.lengths_bytes.tolist()]
        for part in chunks(spans, 4, 3)
    ]
    assert found == [
        [[0], [0], [4]],
        [[4, 100], [4, 200], [1, 3]],
        [[103, 200], [203, 400], [2, 2]],
        [[300], [600], [3]],
        [[400, 500], [800, 1000], [3, 1]],
        [[501], [1001], [4]],
        [[505], [1005], [4]],
    ]


def test_a_block_of_all_layers_is_one_span_where_blocks_are_outermost() -> None:
    cache, host = noise(9, 4, 64), noise(9, 256)
    places = places_of([cache[:, layer] for layer in range(4)])
    rows = np.array([host[i].ctypes.data for i in range(5)], np.int64)
    begins = np.array([True, False, False, True, False])
    spans = places.spans(np.array([2, 3, 4, 5, 7]), HostRows(rows, begins))
    assert spans.lengths_bytes.tolist() == [768, 256, 256]
    layer = places.spans(np.array([2, 3]), HostRows(rows[:2], begins[:2]), layer=1)
    assert layer.lengths_bytes.tolist() == [64, 64]
    assert layer.host.tolist() == [rows[0] + 64, rows[1] + 64]


def test_what_does_not_fit_is_refused() -> None:
    places = PagePlaces([PagePlace(1 << 20, 16, 16)], 4)
    one = HostRows(np.array([4096], np.int64), np.array([True]))
    for block in (-1, 4):
        with pytest.raises(IndexError):
            places.spans(np.array([block]), one)
    with pytest.raises(InvariantViolated, match="1 rows for 2 blocks"):
        places.spans(np.array([0, 1]), one)
    with pytest.raises(ConfigError):
        PagePlaces([], 4)
    none = HostRows(np.empty(0, np.int64), np.empty(0, np.bool_))
    assert len(places.spans(np.empty(0, np.int64), none).device) == 0

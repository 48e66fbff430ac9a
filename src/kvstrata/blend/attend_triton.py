"""Attention of chosen tokens of a prompt over all of its paged KV, causal by position.

The queries are those of tokens that stand anywhere in the prompt, so there is no triangle to cut
off: each query has a position, and sees the keys up to it. Softmax goes along with the keys, after
Milakov and Gimelshein (arXiv:1805.02867), so that no row of it is ever kept.
"""

import math
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

from kvstrata.blend.readable import check_readable
from kvstrata.core.errors import ConfigError, InvariantViolated

__all__ = ["PagedKV", "attend"]


class Tile(NamedTuple):
    """What a program computes at a time, and how far ahead it reads."""

    queries: int
    keys: int
    warps: int
    stages: int

    def shared_bytes(self, row_bytes: int, query_bytes: int) -> int:
        """What it takes of a multiprocessor's own memory, and some for what else is kept there."""
        return self.keys * row_bytes * self.stages + self.queries * query_bytes + _OTHER_BYTES


_OTHER_BYTES: Final = 16 << 10
# The first that fits: of what was tried on an H200, what is fast for all of a prompt and for parts.
_TILES: Final = (
    Tile(128, 128, 8, 2),
    Tile(64, 64, 4, 3),
    Tile(64, 64, 4, 2),
    Tile(64, 32, 4, 2),
    Tile(32, 32, 4, 1),
    Tile(16, 16, 4, 1),
)
_LEAST: Final = 16  # of each side that the matrix units take
_FACTORS: Final = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
_NO_WINDOW: Final = 1 << 30  # tokens, more than a prompt has
_LOG2_E: Final = math.log2(math.e)


class PagedKV(NamedTuple):
    """The KV of one prompt in one layer's cache."""

    cache: torch.Tensor  # (pages, KV heads, tokens, K and V); the last stride is 1
    pages: torch.Tensor  # int32 or int64, the prompt's, in order
    key_size: int  # elements of a key; the rest is the value
    key_scale: float = 1.0  # what quantised elements are multiplied with
    value_scale: float = 1.0


@triton.jit
def _rows(at, is_row, SIZE: tl.constexpr, PADDED: tl.constexpr, ALL: tl.constexpr):
    """SIZE elements from each of *at*; ALL: there are no rows but such that are wanted."""
    element = tl.arange(0, PADDED)[None, :]
    if ALL and SIZE == PADDED:
        found = tl.load(at[:, None] + element)
    elif ALL:
        found = tl.load(at[:, None] + element, element < SIZE, 0.0)
    else:
        found = tl.load(at[:, None] + element, is_row[:, None] & (element < SIZE), 0.0)
    return found


@triton.jit
def _look(
    query,
    position,
    most,
    total,
    sums,
    cache,
    pages,
    first,
    end,
    cache_page,
    cache_token,
    window,
    scale,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    ALL: tl.constexpr,
):
    """What queries make of the keys from *first* to *end*; ALL: each of them sees each key.

    *most* and *total* are, for each query, its highest product so far and the sum of its shares.
    """
    for at in range(first, end, KEYS):
        key_position = at + tl.arange(0, KEYS)
        is_key = key_position < end
        if ALL:
            page = tl.load(pages + key_position // PAGE).to(tl.int64)
        else:
            page = tl.load(pages + key_position // PAGE, is_key, 0).to(tl.int64)
        row = cache + page * cache_page + key_position % PAGE * cache_token
        key = _rows(row, is_key, KEY, KEY_PADDED, ALL).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if not ALL:
            behind = position[:, None] - key_position[None, :]
            is_seen = is_key[None, :] & (behind >= 0) & (behind < window)
            scores = tl.where(is_seen, scores, float("-inf"))
        new_most = tl.maximum(most, tl.max(scores, 1))
        # A row that is no query sees nothing, and has no number to be compared with.
        base = new_most if ALL else tl.where(new_most == float("-inf"), 0.0, new_most)
        share = tl.exp2(scores - base[:, None])
        decay = tl.exp2(most - base)
        most = new_most
        value = _rows(row + KEY, is_key, VALUE, VALUE_PADDED, ALL).to(query.dtype)
        sums = sums * decay[:, None]
        sums += tl.dot(share.to(query.dtype), value, input_precision="ieee")
        total = total * decay + tl.sum(share, 1)
    return most, total, sums


# Specialised on these it would be compiled anew while an engine serves.
@triton.jit(do_not_specialize=["count", "window"])
def _attend(
    queries,
    positions,
    cache,
    pages,
    out,
    count,
    query_token,  # strides in elements
    query_head,
    out_token,
    out_head,
    cache_page,
    cache_head,
    cache_token,
    heads_each,  # query heads of a KV head
    window,  # tokens that a query sees, its own included
    scale,  # of products, with the base of exp2
    value_scale,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    PAGE: tl.constexpr,  # tokens
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    FACTOR: tl.constexpr,  # type of what matrices are multiplied of
    HAS_WINDOW: tl.constexpr,
):
    # The last queries see most keys: who begins with them is not waited for at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    number = (block * QUERIES + tl.arange(0, QUERIES)).to(tl.int64)  # times strides
    head = tl.program_id(1).to(tl.int64)
    is_query = number < count
    position = tl.load(positions + number, is_query, -1).to(tl.int32)
    query_at = queries + number * query_token + head * query_head
    query = _rows(query_at, is_query, KEY, KEY_PADDED, False).to(FACTOR)
    cache += head // heads_each * cache_head

    most = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, VALUE_PADDED], tl.float32)
    end = tl.max(position, 0) + 1
    earliest = tl.min(tl.where(is_query, position, end), 0)
    if HAS_WINDOW:
        first = tl.maximum(earliest - window + 1, 0) // KEYS * KEYS
    else:
        first = (earliest + 1) // KEYS * KEYS  # each query sees all before it
        most, total, sums = _look(
            query, position, most, total, sums, cache, pages, 0, first, cache_page, cache_token,
            window, scale, KEY, VALUE, KEY_PADDED, VALUE_PADDED, PAGE, KEYS, True,
        )  # fmt: skip
    most, total, sums = _look(
        query, position, most, total, sums, cache, pages, first, end, cache_page, cache_token,
        window, scale, KEY, VALUE, KEY_PADDED, VALUE_PADDED, PAGE, KEYS, False,
    )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)
    of_value = tl.arange(0, VALUE_PADDED)[None, :]
    to = out + number[:, None] * out_token + head * out_head + of_value
    found = sums * (value_scale / total)[:, None]
    tl.store(to, found.to(out.dtype.element_ty), is_query[:, None] & (of_value < VALUE))


def attend(
    queries: torch.Tensor,
    positions: torch.Tensor,
    kv: PagedKV,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """What each query makes of the values up to its position: (queries, heads, value size).

    Args:
        queries: (queries, heads, key size) of float32, bfloat16 or float16; the last stride is 1.
        positions: int64 (queries,), in any order, each of a token whose KV is in ``kv.pages``.
        scale: What the products are multiplied with.
        window: How many tokens a query attends to, its own included; None for all before it.

    Raises:
        ConfigError: This GPU has no instructions for the elements of the cache, or too little memory
            for a few of them.
    """
    _check(queries, positions, kv)
    count, heads, key_size = queries.shape
    cache = kv.cache
    value_size = cache.shape[3] - key_size
    out = queries.new_empty(count, heads, value_size)
    if not count:
        return out
    key_padded, value_padded = _padded(key_size), _padded(value_size)
    element_bytes = queries.element_size()
    tile = _tile(
        (key_padded + value_padded) * element_bytes,
        key_padded * element_bytes,
        _shared_bytes(queries.device.index),
    )
    grid: Any = _attend[(triton.cdiv(count, tile.queries), heads)]
    grid(
        queries,
        positions,
        cache,
        kv.pages,
        out,
        count,
        *queries.stride()[:2],
        *out.stride()[:2],
        *cache.stride()[:3],
        heads // cache.shape[1],
        _NO_WINDOW if window is None else window,
        scale * kv.key_scale * _LOG2_E,
        kv.value_scale,
        KEY=key_size,
        VALUE=value_size,
        KEY_PADDED=key_padded,
        VALUE_PADDED=value_padded,
        PAGE=cache.shape[2],
        QUERIES=tile.queries,
        KEYS=tile.keys,
        FACTOR=_FACTORS[queries.dtype],
        HAS_WINDOW=window is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=True,
    )
    return out


def _padded(size: int) -> int:
    return max(_LEAST, int(triton.next_power_of_2(size)))


def _tile(row_bytes: int, query_bytes: int, most_bytes: int) -> Tile:
    """The first that fits into *most_bytes* of a multiprocessor's own memory.

    *row_bytes*: of a key and its value, as they are multiplied.
    """
    for tile in _TILES:
        if tile.shared_bytes(row_bytes, query_bytes) <= most_bytes:
            return tile
    raise ConfigError(
        f"a key and its value take {row_bytes} bytes, and a multiprocessor of this GPU has {most_bytes}",
        hint="serve the model in a type of fewer bits, or with KVStrataConnector, which does not blend",
    )


@lru_cache
def _shared_bytes(device: int | None) -> int:
    """What a program may have of a multiprocessor's own memory, by the driver's word."""
    if knobs.runtime.interpret:
        return 1 << 20
    return int(driver.active.utils.get_device_properties(device)["max_shared_mem"])


def _check(queries: torch.Tensor, positions: torch.Tensor, kv: PagedKV) -> None:
    cache = kv.cache
    shapes = tuple(queries.shape), tuple(cache.shape)
    if queries.dtype not in _FACTORS:
        raise InvariantViolated(f"queries of {queries.dtype}")
    if queries.ndim != 3 or cache.ndim != 4 or queries.stride(2) != 1 or cache.stride(3) != 1:
        raise InvariantViolated(f"queries and pages of shapes {shapes}")
    if queries.shape[2] != kv.key_size or kv.key_size >= cache.shape[3]:
        raise InvariantViolated(f"keys of {kv.key_size} elements: queries and pages are {shapes}")
    if queries.shape[1] % cache.shape[1] or positions.shape != queries.shape[:1]:
        raise InvariantViolated(f"{len(positions)} positions: queries and pages are {shapes}")
    check_readable(cache)

"""Attention of chosen tokens of a prompt over all of its paged KV, causal by position.

The queries are those of tokens that stand anywhere in the prompt, so there is no triangle to cut
off: each query has a position, and sees the keys up to it. Softmax goes along with the keys, after
Milakov and Gimelshein (arXiv:1805.02867), so that no row of it is ever kept.
"""

import math
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from kvstrata.blend.readable import check_readable
from kvstrata.core.errors import InvariantViolated

__all__ = ["PagedKV", "attend"]

_QUERIES: Final = 64  # of a program, and keys that it looks at a time
_KEYS: Final = 64
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
def _shares(scores, most):
    """What keys get of each query, what shares of before are worth now, and the highest score."""
    new_most = tl.maximum(most, tl.max(scores, 1))
    # A row that is no query sees nothing, and has no number to be compared with.
    base = tl.where(new_most == float("-inf"), 0.0, new_most)
    return tl.exp2(scores - base[:, None]), tl.exp2(most - base), new_most


@triton.jit
def _first_key(position, is_query, end, window, KEYS: tl.constexpr):
    """Of those that any query sees, at the beginning of as many as are looked at a time."""
    first = tl.min(tl.where(is_query, position, end), 0) - window + 1
    return tl.maximum(first, 0) // KEYS * KEYS


@triton.jit
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
    page_tokens,
    heads_each,  # query heads of a KV head
    window,  # tokens that a query sees, its own included
    scale,  # of products, with the base of exp2
    value_scale,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    FACTOR: tl.constexpr,  # type of what matrices are multiplied of
):
    number = (tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)).to(tl.int64)  # times strides
    head = tl.program_id(1).to(tl.int64)
    is_query = number < count
    position = tl.load(positions + number, is_query, -1)
    of_key = tl.arange(0, KEY_PADDED)
    of_value = tl.arange(0, VALUE_PADDED)
    at = queries + number[:, None] * query_token + head * query_head + of_key[None, :]
    is_value = (of_value < VALUE)[None, :]
    query = tl.load(at, is_query[:, None] & (of_key < KEY)[None, :], 0.0).to(FACTOR)
    cache += head // heads_each * cache_head

    most = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, VALUE_PADDED], tl.float32)
    end = tl.max(position, 0) + 1
    for first in range(_first_key(position, is_query, end, window, KEYS), end, KEYS):
        key_position = first + tl.arange(0, KEYS)
        is_key = key_position < end
        page = tl.load(pages + key_position // page_tokens, is_key, 0).to(tl.int64)
        row = cache + page * cache_page + key_position % page_tokens * cache_token
        is_part = is_key[None, :] & (of_key < KEY)[:, None]
        key = tl.load(row[None, :] + of_key[:, None], is_part, 0.0)
        scores = tl.dot(query, key.to(FACTOR), input_precision="ieee") * scale
        behind = position[:, None] - key_position[None, :]
        scores = tl.where(is_key & (behind >= 0) & (behind < window), scores, float("-inf"))
        share, decay, most = _shares(scores, most)
        value = tl.load(row[:, None] + KEY + of_value[None, :], is_key[:, None] & is_value, 0.0)
        sums = sums * decay[:, None]
        sums += tl.dot(share.to(FACTOR), value.to(FACTOR), input_precision="ieee")
        total = total * decay + tl.sum(share, 1)
    total = tl.where(total == 0.0, 1.0, total)
    to = out + number[:, None] * out_token + head * out_head + of_value[None, :]
    found = sums * (value_scale / total)[:, None]
    tl.store(to, found.to(out.dtype.element_ty), is_query[:, None] & is_value)


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
        ConfigError: This GPU has no instructions for the elements of the cache.
    """
    _check(queries, positions, kv)
    count, heads, key_size = queries.shape
    cache = kv.cache
    value_size = cache.shape[3] - key_size
    out = queries.new_empty(count, heads, value_size)
    if not count:
        return out
    grid: Any = _attend[(triton.cdiv(count, _QUERIES), heads)]
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
        cache.shape[2],
        heads // cache.shape[1],
        _NO_WINDOW if window is None else window,
        scale * kv.key_scale * _LOG2_E,
        kv.value_scale,
        KEY=key_size,
        VALUE=value_size,
        KEY_PADDED=max(_LEAST, triton.next_power_of_2(key_size)),
        VALUE_PADDED=max(_LEAST, triton.next_power_of_2(value_size)),
        QUERIES=_QUERIES,
        KEYS=_KEYS,
        FACTOR=_FACTORS[queries.dtype],
        enable_fp_fusion=True,
    )
    return out


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

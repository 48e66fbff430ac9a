"""Tokens' KV from the pages of a source into those of a cache, keys turned on the way: one kernel.

What ``kvstrata.blend.position`` says in torch, without what lies between: each element is read once
and written once. Pages are read as vLLM lays them out, by strides, K before V of each head.
"""

import math
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from kvstrata.blend.readable import check_readable
from kvstrata.core.errors import InvariantViolated

__all__ = ["Moves", "Rope", "move_tokens"]

_FLOATING: Final = (torch.float32, torch.bfloat16, torch.float16)
_QUANTISED: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOAT_BITS: Final = 23  # of the fraction of a float32
_HEADS: Final = 8  # of a token at a time: what hides the memory's latency, and fits in registers
_WARPS: Final = 1  # of a token: more of them wait for each other
_TOKENS: Final = 4  # of a program: to begin one takes as long as to move some
_ROUNDS: Final = 1.5 * 2**_FLOAT_BITS  # numbers around it are whole


class Rope(NamedTuple):
    """How a layer's keys are turned; fields as in ``PositionCorrector``."""

    table: torch.Tensor  # (positions, rotary_dim): cosines, then sines
    is_neox: bool
    first_dim: int = 0


class Moves(NamedTuple):
    """Tokens that are moved: int64 tensors (tokens,) on the device of the cache.

    A slot is a page times its tokens and the place in it, as in vLLM.
    """

    source_slots: torch.Tensor
    target_slots: torch.Tensor
    source_positions: torch.Tensor
    target_positions: torch.Tensor


@triton.jit
def _place(pages, slot, page_stride, token_stride, page_tokens):
    """Where a slot is, in its first head."""
    return pages + slot // page_tokens * page_stride + slot % page_tokens * token_stride


@triton.jit
def _ends(pair, ROTARY: tl.constexpr, FIRST: tl.constexpr, IS_NEOX: tl.constexpr):
    """Where in a head the two elements of a pair are."""
    if IS_NEOX:
        left = FIRST + pair
        right = left + ROTARY // 2
    else:
        left = FIRST + 2 * pair
        right = left + 1
    return left, right


@triton.jit
def _turn(source, target, pair, COUNT: tl.constexpr):
    """Cosines and sines of the angles from one row of the table to another."""
    is_pair = pair < COUNT
    cos_from = tl.load(source + pair, is_pair, 1.0).to(tl.float32)
    sin_from = tl.load(source + COUNT + pair, is_pair, 0.0).to(tl.float32)
    cos_to = tl.load(target + pair, is_pair, 1.0).to(tl.float32)
    sin_to = tl.load(target + COUNT + pair, is_pair, 0.0).to(tl.float32)
    squared = cos_from * cos_from + sin_from * sin_from
    cos = (cos_to * cos_from + sin_to * sin_from) / squared
    sin = (sin_to * cos_from - cos_to * sin_from) / squared
    return cos, sin


@triton.jit
def _rounded(x, most, smallest, shift, DROPPED: tl.constexpr):
    """To even, to a number of a type that lacks bits: conversions do not round alike everywhere."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)) & -(1 << DROPPED)
    x = tl.where(tl.abs(x) < smallest, x + shift - shift, bits.to(tl.float32, bitcast=True))
    return tl.minimum(tl.maximum(x, -most), most)


@triton.jit
def _turned(left, right, cos, sin, most, smallest, shift, DROPPED: tl.constexpr):
    """Pairs of a key's elements, of its own type."""
    x = left.to(tl.float32)
    y = right.to(tl.float32)
    x, y = x * cos - y * sin, y * cos + x * sin
    if DROPPED:
        x = _rounded(x, most, smallest, shift, DROPPED)
        y = _rounded(y, most, smallest, shift, DROPPED)
    return x.to(left.dtype), y.to(left.dtype)


# Specialised on how many there are it would be compiled anew while an engine serves.
@triton.jit(do_not_specialize=["tokens"])
def _move(
    source,
    target,
    table,
    source_slots,
    target_slots,
    source_positions,
    target_positions,
    tokens,
    source_page,  # strides in elements, and tokens of a page
    source_head,
    source_token,
    source_tokens,
    target_page,
    target_head,
    target_token,
    target_tokens,
    heads,
    table_row,
    most,  # largest finite number of the cache's type
    smallest,  # that has all of its bits
    shift,  # added and taken away again, it rounds those that are smaller
    ROTARY: tl.constexpr,
    FIRST: tl.constexpr,
    WHOLE: tl.constexpr,
    IS_NEOX: tl.constexpr,
    PAIRS: tl.constexpr,
    KEPT_PADDED: tl.constexpr,
    HEADS: tl.constexpr,  # at a time
    EACH: tl.constexpr,
    DROPPED: tl.constexpr,  # bits of a float32 that a quantised type lacks; 0 if it is not one
):
    """EACH tokens, all heads of one of which turn by the same angles."""
    pair = tl.arange(0, PAIRS)
    left, right = _ends(pair, ROTARY, FIRST, IS_NEOX)
    is_pair = pair < ROTARY // 2
    place = tl.arange(0, KEPT_PADDED)  # of what is not turned, which lies around the rest
    is_kept = place < WHOLE - ROTARY
    place = place + ROTARY if FIRST == 0 else tl.where(place < FIRST, place, place + ROTARY)

    first_token = tl.program_id(0) * EACH
    for token in range(first_token, min(first_token + EACH, tokens)):
        at = _place(source, tl.load(source_slots + token), source_page, source_token, source_tokens)
        to = _place(target, tl.load(target_slots + token), target_page, target_token, target_tokens)
        before = tl.load(source_positions + token)
        after = tl.load(target_positions + token)
        moves = before != after
        cos, sin = _turn(table + before * table_row, table + after * table_row, pair, ROTARY // 2)
        cos, sin = cos[None, :], sin[None, :]
        for first in range(0, heads, HEADS):
            head = (first + tl.arange(0, HEADS)).to(tl.int64)[:, None]  # times strides
            is_head = head < heads
            row, to_row = at + head * source_head, to + head * target_head
            kept = is_head & is_kept[None, :]
            tl.store(to_row + place[None, :], tl.load(row + place[None, :], kept), kept)

            turned = is_head & is_pair[None, :]
            old_left = tl.load(row + left[None, :], turned, 0.0)
            old_right = tl.load(row + right[None, :], turned, 0.0)
            x, y = _turned(old_left, old_right, cos, sin, most, smallest, shift, DROPPED)
            tl.store(to_row + left[None, :], tl.where(moves, x, old_left), turned)
            tl.store(to_row + right[None, :], tl.where(moves, y, old_right), turned)


def move_tokens(source: torch.Tensor, cache: torch.Tensor, moves: Moves, rope: Rope) -> None:
    """Write the KV of tokens in *source* to other places of *cache*, as they are at new positions.

    Tokens whose position stays are copied bit by bit. Quantised elements are turned as numbers and
    rounded again, to the largest finite one where a turn makes them larger: a scale that both have
    in common changes nothing of that.

    Args:
        source: (pages, heads, tokens, K and V) with any strides but the last, which is 1; float32,
            bfloat16, float16, or float8.
        cache: The same, of the same dtype.

    Raises:
        ConfigError: This GPU has no instructions for such elements.
    """
    _check(source, cache, rope)
    tokens, heads = len(moves.source_slots), source.shape[1]
    if not tokens:
        return
    rotary_dim = rope.table.shape[1]
    numbers = torch.finfo(cache.dtype)
    grid: Any = _move[(triton.cdiv(tokens, _TOKENS),)]
    grid(
        source,
        cache,
        rope.table,
        *moves,
        tokens,
        *source.stride()[:3],
        source.shape[2],
        *cache.stride()[:3],
        cache.shape[2],
        heads,
        rope.table.stride(0),
        numbers.max,
        numbers.smallest_normal,
        _ROUNDS * numbers.smallest_normal * numbers.eps,
        ROTARY=rotary_dim,
        FIRST=rope.first_dim,
        WHOLE=source.shape[3],
        IS_NEOX=rope.is_neox,
        PAIRS=triton.next_power_of_2(max(1, rotary_dim // 2)),
        KEPT_PADDED=triton.next_power_of_2(max(1, source.shape[3] - rotary_dim)),
        HEADS=min(_HEADS, triton.next_power_of_2(heads)),
        EACH=_TOKENS,
        DROPPED=_FLOAT_BITS + int(math.log2(numbers.eps)) if cache.dtype in _QUANTISED else 0,
        num_warps=_WARPS,
        enable_fp_fusion=True,
    )


def _check(source: torch.Tensor, cache: torch.Tensor, rope: Rope) -> None:
    for name, pages in (("source", source), ("cache", cache)):
        if pages.ndim != 4 or pages.stride(3) != 1 or pages.dtype not in _FLOATING + _QUANTISED:
            raise InvariantViolated(f"{name} of shape {tuple(pages.shape)} and {pages.dtype}")
    if (source.shape[1], source.shape[3], source.dtype) != (
        cache.shape[1],
        cache.shape[3],
        cache.dtype,
    ):
        raise InvariantViolated(f"{tuple(source.shape)} into {tuple(cache.shape)}")
    if rope.first_dim + rope.table.shape[1] > source.shape[3]:
        raise InvariantViolated(f"heads of {source.shape[3]} elements for {rope.table.shape[1]}")
    check_readable(cache)

"""Where the bytes of a KV cache lie: shapes, strides and the byte ranges of one block.

The kv dimension is 2, keys before values, or 1 for MLA, whose latent serves as both. All strides
and offsets are in bytes.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod
from typing import Final, NamedTuple

from kvstrata.core.errors import ConfigError

__all__ = [
    "ElementType",
    "KVCacheLayout",
    "KVCacheLayoutType",
    "KVGroup",
    "Span",
    "group_offsets_bytes",
]


class ElementType(enum.Enum):
    """What one element of a KV cache is, by the name that frameworks use, and how many bits wide."""

    FLOAT32 = ("float32", 32)
    FLOAT16 = ("float16", 16)
    BFLOAT16 = ("bfloat16", 16)
    FLOAT8_E4M3FN = ("float8_e4m3fn", 8)
    FLOAT8_E4M3FNUZ = ("float8_e4m3fnuz", 8)
    FLOAT8_E5M2 = ("float8_e5m2", 8)
    FLOAT8_E5M2FNUZ = ("float8_e5m2fnuz", 8)
    INT8 = ("int8", 8)
    UINT8 = ("uint8", 8)
    INT4 = ("int4", 4)  # packed, two in a byte
    FLOAT4_E2M1FN = ("float4_e2m1fn", 4)  # packed, two in a byte

    def __init__(self, label: str, bits: int) -> None:
        self.label = label
        self.bits = bits

    @classmethod
    def named(cls, label: str) -> "ElementType":
        """The type called *label*; ``ConfigError`` with the known names if there is none."""
        for each in cls:
            if each.label == label:
                return each
        known = ", ".join(each.label for each in cls)
        raise ConfigError(f"unknown element type {label!r}", hint=f"use one of: {known}")

    def bytes_of(self, elements: int) -> int:
        """Bytes of *elements* in a row; ``ConfigError`` if they do not fill whole bytes.

        >>> ElementType.BFLOAT16.bytes_of(128), ElementType.INT4.bytes_of(128)
        (256, 64)
        """
        if elements * self.bits % 8:
            raise ConfigError(
                f"{elements} elements of {self.label} are no whole number of bytes",
                hint=f"{8 // self.bits} of them share a byte: choose a multiple of that",
            )
        return elements * self.bits // 8


class KVCacheLayoutType(enum.Enum):
    """The order of the axes, outermost first: L layers, B blocks, T tokens, H heads, D elements."""

    LAYERWISE = ("layer", "kv", "block", "token", "head", "element")
    LAYERBLOCK = ("layer", "block", "kv", "token", "head", "element")
    BLOCKWISE = ("block", "layer", "kv", "token", "head", "element")
    LAYERFIRST = LAYERWISE
    BLOCKFIRST = BLOCKWISE

    @classmethod
    def named(cls, name: str) -> "KVCacheLayoutType":
        """The type called *name* in any case, ``LAYERFIRST`` and ``BLOCKFIRST`` included."""
        try:
            return cls[name.upper()]
        except KeyError:
            raise ConfigError(
                f"unknown KV cache layout {name!r}",
                hint=f"use one of: {', '.join(cls.__members__)}",
            ) from None


class Span(NamedTuple):
    """A run of bytes."""

    offset_bytes: int
    length_bytes: int


_SIZES: Final = ("num_layer", "num_block", "tokens_per_block", "num_head", "head_size")


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """A KV cache of ``num_block`` blocks in one allocation without gaps.

    Shapes, with kv = 2, or 1 if ``is_mla``::

        LAYERWISE   (num_layer, kv, num_block, tokens_per_block, num_head, head_size)
        LAYERBLOCK  (num_layer, num_block, kv, tokens_per_block, num_head, head_size)
        BLOCKWISE   (num_block, num_layer, kv, tokens_per_block, num_head, head_size)

    A block is one piece in BLOCKWISE, one for each layer in LAYERBLOCK, and one for each layer, K
    and V in LAYERWISE. Every size that is not a positive whole number, and every index that is not
    of this cache, is a ``ConfigError``.

    Example: Llama-3.1-8B, 16 tokens per block, no tensor parallelism.

    >>> layout = KVCacheLayout(KVCacheLayoutType.LAYERWISE, 32, 1000, 16, 8, 128)
    >>> layout.bytes_per_block(ElementType.BFLOAT16), len(layout.spans(7, ElementType.BFLOAT16))
    (2097152, 64)
    """

    type: KVCacheLayoutType
    num_layer: int
    num_block: int
    tokens_per_block: int
    num_head: int  # on this rank, after tensor parallelism
    head_size: int  # elements of a head
    is_mla: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name} = {size!r} of a KV cache is not a positive whole number")

    @property
    def num_kv(self) -> int:
        return 1 if self.is_mla else 2

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all six axes, in elements, in the order of ``type``."""
        sizes = {
            "layer": self.num_layer,
            "kv": self.num_kv,
            "block": self.num_block,
            "token": self.tokens_per_block,
            "head": self.num_head,
            "element": self.head_size,
        }
        return tuple(sizes[axis] for axis in self.type.value)

    def layer_stride_bytes(self, dtype: ElementType) -> int:
        return self._stride_bytes("layer", dtype)

    def kv_stride_bytes(self, dtype: ElementType) -> int:
        """From K to V of the same block and layer."""
        return self._stride_bytes("kv", dtype)

    def block_stride_bytes(self, dtype: ElementType) -> int:
        """From a block to the next, of the same layer and the same of K and V."""
        return self._stride_bytes("block", dtype)

    def token_stride_bytes(self, dtype: ElementType) -> int:
        return self._stride_bytes("token", dtype)

    def head_stride_bytes(self, dtype: ElementType) -> int:
        return self._stride_bytes("head", dtype)

    def bytes_per_block(self, dtype: ElementType) -> int:
        """Bytes of one block, all layers, K and V."""
        return self.num_layer * self.num_kv * self._piece_bytes(dtype)

    def total_bytes(self, dtype: ElementType) -> int:
        return self.num_block * self.bytes_per_block(dtype)

    def offset_bytes(
        self, layer: int, kv: int, block: int, dtype: ElementType, *, token: int = 0
    ) -> int:
        """Where *token* of *block* begins in *layer*, in K (*kv* 0) or V (1)."""
        indices = (
            ("layer", layer, self.num_layer),
            ("kv", kv, self.num_kv),
            ("block", block, self.num_block),
            ("token", token, self.tokens_per_block),
        )
        for axis, index, size in indices:
            if not 0 <= index < size:
                raise ConfigError(f"{axis} {index} of a KV cache with {size}")
        return sum(index * self._stride_bytes(axis, dtype) for axis, index, _ in indices)

    def spans(self, block: int, dtype: ElementType) -> list[Span]:
        """The bytes of *block*, in the order in which a BLOCKWISE cache holds them.

        Ascending and as few as possible: one for a BLOCKWISE cache.
        """
        piece_bytes = self._piece_bytes(dtype)
        found: list[Span] = []
        for layer, kv in product(range(self.num_layer), range(self.num_kv)):
            start = self.offset_bytes(layer, kv, block, dtype)
            if found and sum(found[-1]) == start:
                found[-1] = Span(found[-1].offset_bytes, found[-1].length_bytes + piece_bytes)
            else:
                found.append(Span(start, piece_bytes))
        return found

    def _piece_bytes(self, dtype: ElementType) -> int:
        """Of one block in one layer, K or V."""
        return self.tokens_per_block * self.num_head * dtype.bytes_of(self.head_size)

    def _stride_bytes(self, axis: str, dtype: ElementType) -> int:
        inside = self.shape[self.type.value.index(axis) + 1 :]
        return prod(inside[:-1]) * dtype.bytes_of(self.head_size)


class KVGroup(NamedTuple):
    """One KV cache group of a model: layers of one layout and element type.

    Most models have one group. Hybrid models have several, each with its own heads and head size.
    """

    layout: KVCacheLayout
    dtype: ElementType

    @property
    def bytes_per_block(self) -> int:
        return self.layout.bytes_per_block(self.dtype)


def group_offsets_bytes(groups: Sequence[KVGroup]) -> tuple[int, ...]:
    """Where each group's part of a slot begins, and last where the block ends.

    >>> attention = KVCacheLayout(KVCacheLayoutType.BLOCKWISE, 2, 1, 16, 8, 64)
    >>> window = KVCacheLayout(KVCacheLayoutType.BLOCKWISE, 3, 1, 16, 4, 64)
    >>> group_offsets_bytes([KVGroup(each, ElementType.FLOAT16) for each in (attention, window)])
    (0, 65536, 114688)
    """
    return tuple(accumulate((group.bytes_per_block for group in groups), initial=0))

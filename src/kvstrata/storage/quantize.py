"""Lossy 8-bit blocks: one power of two for every 64 elements, one signed byte for each.

A frame is a header, the exponents, the codes and the digest of all of them::

    "KVQ1" | element type u8 | 0 u8 u16 | block bytes u32
    exponent i8 for each group of 64 elements, in the order of the block
    code i8 for each element
    XXH3-128 of all that precedes it

An element is ``code * 2**exponent``, exactly: codes have 7 bits, so the product needs no rounding
in bf16, fp16 or fp32. Codes are -126 to 126; 127 is infinity, -127 minus infinity, -128 NaN.
"""

import struct
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from kvstrata.core.errors import ConfigError
from kvstrata.core.types import EXACT, BlockFormat
from kvstrata.storage.checksum import DIGEST_BYTES, digest, is_sealed
from kvstrata.storage.coded import CodedStore
from kvstrata.storage.store import Store

ElementType = Literal["bfloat16", "float16", "float32"]
GROUP: Final = 64  # elements that share an exponent

_MAGIC: Final = b"KVQ1"
_HEADER: Final = struct.Struct("<4sBBHI")
_RUN: Final = 4096 * GROUP  # elements at a time: bounds the temporaries to about 2 MiB
_LARGEST_CODE: Final = 126
_LEAST_EXPONENT: Final = -126  # the power of two and its inverse are normal numbers
_INFINITY, _MINUS_INFINITY, _NAN = 127, -127, -128

_Array = np.ndarray[Any, np.dtype[Any]]


class _Element(NamedTuple):
    """What one element type looks like."""

    code: int  # in the header
    bits: type[np.unsignedinteger[Any]]  # an unsigned integer of its size
    sign_mask: int  # what is left of the bits without the sign
    infinity: int  # its bits; greater ones, but for the sign, are NaN
    greatest_exponent: int  # here code 64 stands for the largest number, which it exceeds
    largest: float


_ELEMENTS: Final[dict[ElementType, _Element]] = {
    "bfloat16": _Element(1, np.uint16, 0x7FFF, 0x7F80, 122, float.fromhex("0x1.fep127")),
    "float16": _Element(2, np.uint16, 0x7FFF, 0x7C00, 10, 65504.0),
    "float32": _Element(3, np.uint32, 0x7FFFFFFF, 0x7F800000, 122, float.fromhex("0x1.fffffep127")),
}


def quantized_bytes(block_bytes: int, element_type: ElementType) -> int:
    """Length of the frame of a block: the block size of the store inside.

    Raises ``ConfigError`` for blocks that are not whole groups of 64 elements.

    >>> quantized_bytes(2 << 20, "bfloat16") / (2 << 20)
    0.5078258514404297
    """
    group_bytes = GROUP * np.dtype(_ELEMENTS[element_type].bits).itemsize
    groups, rest = divmod(block_bytes, group_bytes)
    if rest or not groups:
        raise ConfigError(
            f"blocks of {block_bytes} bytes are not whole groups of {GROUP} {element_type}",
            hint=f"choose tokens_per_block so that a block is a multiple of {group_bytes} bytes",
        )
    return _HEADER.size + groups * (1 + GROUP) + DIGEST_BYTES


def element_type_of(block_format: BlockFormat) -> ElementType | None:
    """What a lossy format is made of; None if it is exact. Others raise ``ConfigError``.

    >>> element_type_of("int8 bfloat16"), element_type_of("exact")
    ('bfloat16', None)
    """
    if block_format == EXACT:
        return None
    kind, _, name = block_format.partition(" ")
    for element_type in _ELEMENTS:
        if (kind, name) == ("int8", element_type):
            return element_type
    raise ConfigError(
        f"blocks of {name or 'unknown elements'} cannot be kept as {kind}",
        hint=f"set block_format to exact; int8 is for {', '.join(_ELEMENTS)}",
    )


class QuantizedStore(CodedStore):
    """Keeps blocks of *block_bytes* in half or a quarter of the room, with loss.

    *inner* holds blocks of ``quantized_bytes(block_bytes, element_type)``. A group of 64
    neighbouring elements x becomes y with ``abs(x - y) <= 2**exponent / 2``, where the largest
    finite ``abs(x)`` of the group, if not 0, is at least ``63 * 2**exponent``; but no exponent is
    below -126. Infinities and NaN come back as such; minus zero as zero.
    The same block always gives the same bytes, and what was read once is kept without further
    loss. Blocks are plain arrays of elements in any order: nothing is assumed of their layout.

    What is read is another value than what was written: exact and lossy blocks must never share
    a namespace.
    """

    def __init__(self, inner: Store, element_type: ElementType, *, block_bytes: int) -> None:
        """Raises ``ConfigError`` if *inner* has blocks of another size."""
        wanted = quantized_bytes(block_bytes, element_type)
        found = inner.statistics().block_bytes
        if found != wanted:
            raise ConfigError(
                f"the store inside has blocks of {found} bytes; "
                f"{block_bytes} bytes of {element_type} become {wanted}",
                hint=f"open it with block_bytes={wanted}",
            )
        super().__init__(inner, block_bytes=block_bytes, variable=False)
        self._element_type: ElementType = element_type
        self._header = _HEADER.pack(_MAGIC, _ELEMENTS[element_type].code, 0, 0, block_bytes)
        self._groups = (wanted - _HEADER.size - DIGEST_BYTES) // (1 + GROUP)

    def _encode(self, block: memoryview, frame: memoryview) -> int:
        end = len(frame) - DIGEST_BYTES
        frame[: _HEADER.size] = self._header
        _quantize(block, *self._exponents_and_codes(frame), self._element_type)
        frame[end:] = digest(frame[:end])
        return len(frame)

    def _decode(self, frame: memoryview, block: memoryview) -> bool:
        if frame[: _HEADER.size] != self._header or not is_sealed(frame):
            return False
        _restore(*self._exponents_and_codes(frame), block, self._element_type)
        return True

    def _exponents_and_codes(self, frame: memoryview) -> tuple[_Array, _Array]:
        """Views, shapes (groups,) and (groups, 64)."""
        signed = np.frombuffer(frame, np.int8)[_HEADER.size : len(frame) - DIGEST_BYTES]
        return signed[: self._groups], signed[self._groups :].reshape(-1, GROUP)


def _quantize(block: memoryview, exponents: _Array, codes: _Array, kind: ElementType) -> None:
    element = _ELEMENTS[kind]
    groups = np.frombuffer(block, element.bits).reshape(-1, GROUP)
    for first in range(0, len(groups), _RUN // GROUP):
        run = slice(first, first + _RUN // GROUP)
        _quantize_run(groups[run], exponents[run], codes[run], kind)


def _quantize_run(bits: _Array, exponents: _Array, codes: _Array, kind: ElementType) -> None:
    element = _ELEMENTS[kind]
    magnitudes = bits & element.sign_mask  # ordered as the values are
    largest = magnitudes.max(axis=1)
    if largest.max() >= element.infinity:
        special = magnitudes >= element.infinity
        _quantize_run(np.where(special, element.bits(0), bits), exponents, codes, kind)
        codes[special] = _special_codes(bits[special], element)
        return
    fraction, exponent = np.frexp(_to_float32(largest, kind))
    exponent += np.where(fraction * 128 > _LARGEST_CODE + 0.5, -6, -7)
    exponents[:] = np.maximum(exponent, _LEAST_EXPONENT)
    values = _to_float32(bits, kind)
    values *= np.ldexp(np.float32(1), -exponents.astype(np.int32))[:, None]
    np.rint(values, out=values)
    np.copyto(codes, values, casting="unsafe")


def _special_codes(bits: _Array, element: _Element) -> _Array:
    magnitudes = bits & element.sign_mask
    infinities = np.where(bits == magnitudes, _INFINITY, _MINUS_INFINITY)
    return np.where(magnitudes > element.infinity, _NAN, infinities)


def _restore(exponents: _Array, codes: _Array, block: memoryview, kind: ElementType) -> None:
    groups = np.frombuffer(block, _ELEMENTS[kind].bits).reshape(-1, GROUP)
    for first in range(0, len(groups), _RUN // GROUP):
        run = slice(first, first + _RUN // GROUP)
        _restore_run(exponents[run], codes[run], groups[run], kind)


def _restore_run(exponents: _Array, codes: _Array, bits: _Array, kind: ElementType) -> None:
    element = _ELEMENTS[kind]
    with np.errstate(over="ignore"):
        values = codes * np.ldexp(np.float32(1), exponents.astype(np.int32))[:, None]
    if exponents.max() == element.greatest_exponent:
        np.clip(values, -element.largest, element.largest, out=values)
    if codes.max() > _LARGEST_CODE or codes.min() < -_LARGEST_CODE:
        for code, value in ((_INFINITY, np.inf), (_MINUS_INFINITY, -np.inf), (_NAN, np.nan)):
            values[codes == code] = value
    _from_float32(values, bits, kind)


def _to_float32(bits: _Array, kind: ElementType) -> _Array:
    if kind == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16 if kind == "float16" else np.float32).astype(np.float32)


def _from_float32(values: _Array, bits: _Array, kind: ElementType) -> None:
    if kind == "bfloat16":
        bits[:] = values.view(np.uint32) >> 16  # the lower half is 0
    else:
        bits.view(np.float16 if kind == "float16" else np.float32)[:] = values

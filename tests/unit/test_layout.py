"""Layouts in plain figures. Against torch's own strides: tests/property/test_layout.py."""

from typing import Any

import pytest

from kvstrata.core.errors import ConfigError
from kvstrata.core.layout import ElementType, KVCacheLayout, KVCacheLayoutType, Span

BF16 = ElementType.BFLOAT16
SIZES: dict[str, Any] = {
    "num_layer": 3,
    "num_block": 10,
    "tokens_per_block": 16,
    "num_head": 8,
    "head_size": 64,
}
PIECE = 16 * 8 * 64 * 2  # bytes of one block in one layer, K or V, of two-byte elements


def layout(kind: str, **changes: Any) -> KVCacheLayout:
    return KVCacheLayout(KVCacheLayoutType[kind], **(SIZES | changes))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("LAYERWISE", (3, 2, 10, 16, 8, 64)),
        ("LAYERBLOCK", (3, 10, 2, 16, 8, 64)),
        ("BLOCKWISE", (10, 3, 2, 16, 8, 64)),
    ],
)
def test_shape_has_the_kv_dimension(kind: str, shape: tuple[int, ...]) -> None:
    assert layout(kind).shape == shape
    with_latent = layout(kind, is_mla=True).shape
    assert with_latent[shape.index(2)] == 1


@pytest.mark.parametrize(
    ("kind", "layer", "kv", "block"),
    [
        ("LAYERWISE", 20 * PIECE, 10 * PIECE, PIECE),
        ("LAYERBLOCK", 20 * PIECE, PIECE, 2 * PIECE),
        ("BLOCKWISE", 2 * PIECE, PIECE, 6 * PIECE),
    ],
)
def test_strides_are_in_bytes(kind: str, layer: int, kv: int, block: int) -> None:
    found = layout(kind)
    assert found.layer_stride_bytes(BF16) == layer
    assert found.kv_stride_bytes(BF16) == kv
    assert found.block_stride_bytes(BF16) == block
    assert found.token_stride_bytes(BF16) == 1024
    assert found.head_stride_bytes(BF16) == 128
    assert found.bytes_per_block(BF16) == 6 * PIECE
    assert found.total_bytes(BF16) == 60 * PIECE


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float32", 128), ("bfloat16", 64), ("float8_e4m3fn", 32), ("int8", 32), ("int4", 16)],
)
def test_a_row_of_elements_takes_the_bytes_of_its_type(dtype: str, expected: int) -> None:
    assert ElementType.named(dtype).bytes_of(32) == expected


def test_a_blockwise_block_is_one_span_and_a_layerwise_one_a_span_for_each_k_and_v() -> None:
    assert layout("BLOCKWISE").spans(2, BF16) == [Span(12 * PIECE, 6 * PIECE)]
    assert layout("LAYERBLOCK").spans(2, BF16) == [
        Span(4 * PIECE, 2 * PIECE),
        Span(24 * PIECE, 2 * PIECE),
        Span(44 * PIECE, 2 * PIECE),
    ]
    starts = [span.offset_bytes // PIECE for span in layout("LAYERWISE").spans(2, BF16)]
    assert starts == [2, 12, 22, 32, 42, 52]
    assert layout("LAYERWISE", is_mla=True).spans(0, BF16)[1] == Span(10 * PIECE, PIECE)


def test_the_only_block_of_a_layerwise_cache_is_one_span() -> None:
    assert layout("LAYERWISE", num_block=1).spans(0, BF16) == [Span(0, 6 * PIECE)]


def test_an_odd_number_of_four_bit_elements_in_a_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="65 elements of int4 are no whole number of bytes"):
        layout("BLOCKWISE", head_size=65).bytes_per_block(ElementType.INT4)


def test_the_names_of_others_are_understood() -> None:
    assert KVCacheLayoutType.named("LayerFirst") is KVCacheLayoutType.LAYERWISE
    assert KVCacheLayoutType.named("blockfirst") is KVCacheLayoutType.BLOCKWISE
    with pytest.raises(ConfigError, match=r"unknown KV cache layout 'pagewise'(.|\n)*LAYERBLOCK"):
        KVCacheLayoutType.named("pagewise")
    with pytest.raises(ConfigError, match=r"unknown element type 'float17'(.|\n)*bfloat16"):
        ElementType.named("float17")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [0, -1, 2.0])
def test_a_size_that_is_no_positive_whole_number_is_refused(name: str, size: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} = {size}"):
        layout("BLOCKWISE", **{name: size})


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ((3, 0, 0), "layer 3 of a KV cache with 3"),
        ((0, 2, 0), "kv 2 of a KV cache with 2"),
        ((0, 0, 10), "block 10 of a KV cache with 10"),
        ((0, 0, -1), "block -1"),
    ],
)
def test_an_index_outside_of_the_cache_is_refused(at: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout("LAYERWISE").offset_bytes(*at, BF16)

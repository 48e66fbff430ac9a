"""Every layout agrees with the strides that torch gives a tensor of its shape, and loses no byte."""

from collections import Counter
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.layout import (
    ElementType,
    KVCacheLayout,
    KVCacheLayoutType,
    KVGroup,
    group_offsets_bytes,
)

TORCH = [dtype for dtype in ElementType if dtype.bits >= 8]
PACKED = [dtype for dtype in ElementType if dtype.bits == 4]


@st.composite
def layouts(draw: st.DrawFn, *, even: bool = False) -> KVCacheLayout:
    small = st.integers(1, 4)
    return KVCacheLayout(
        type=draw(st.sampled_from(KVCacheLayoutType)),
        num_layer=draw(small),
        num_block=draw(small),
        tokens_per_block=draw(small),
        num_head=draw(small),
        head_size=draw(st.integers(1, 4)) * (2 if even else 1),
        is_mla=draw(st.booleans()),
    )


def strides_bytes(layout: KVCacheLayout, dtype: ElementType) -> tuple[int, ...]:
    by_axis = {
        "layer": layout.layer_stride_bytes(dtype),
        "kv": layout.kv_stride_bytes(dtype),
        "block": layout.block_stride_bytes(dtype),
        "token": layout.token_stride_bytes(dtype),
        "head": layout.head_stride_bytes(dtype),
    }
    return tuple(by_axis[axis] for axis in layout.type.value[:-1])


@given(layouts(), st.sampled_from(TORCH))
def test_strides_are_those_of_a_tensor(layout: KVCacheLayout, dtype: ElementType) -> None:
    tensor = torch.empty(layout.shape, dtype=getattr(torch, dtype.label), device="meta")
    expected = tuple(stride * tensor.element_size() for stride in tensor.stride()[:-1])
    assert strides_bytes(layout, dtype) == expected
    assert layout.total_bytes(dtype) == tensor.nbytes


@given(layouts(even=True), st.sampled_from(PACKED))
def test_strides_of_packed_elements_are_those_of_a_tensor_of_pairs(
    layout: KVCacheLayout, dtype: ElementType
) -> None:
    *outer, elements = layout.shape
    tensor = torch.empty((*outer, elements // 2), dtype=torch.uint8, device="meta")
    assert strides_bytes(layout, dtype) == tensor.stride()[:-1]
    assert layout.total_bytes(dtype) == tensor.nbytes


@given(layouts(even=True), st.sampled_from(ElementType))
def test_spans_of_all_blocks_cover_every_byte_once(
    layout: KVCacheLayout, dtype: ElementType
) -> None:
    covered = Counter[int]()
    for block in range(layout.num_block):
        spans = layout.spans(block, dtype)
        assert spans == sorted(spans)
        assert all(sum(a) < b.offset_bytes for a, b in pairwise(spans))
        assert sum(span.length_bytes for span in spans) == layout.bytes_per_block(dtype)
        for start, length in spans:
            covered.update(range(start, start + length))
    assert covered == dict.fromkeys(range(layout.total_bytes(dtype)), 1)


@given(layouts(), st.data())
def test_spans_hold_a_block_in_blockwise_order(layout: KVCacheLayout, data: st.DataObject) -> None:
    block = data.draw(st.integers(0, layout.num_block - 1))
    cache = torch.arange(layout.total_bytes(ElementType.INT8)).reshape(layout.shape)
    axes = [layout.type.value.index(a) for a in KVCacheLayoutType.BLOCKWISE.value]
    expected = cache.permute(axes)[block].flatten().tolist()
    spans = layout.spans(block, ElementType.INT8)
    assert [at for start, length in spans for at in range(start, start + length)] == expected


@given(layouts(), st.sampled_from(TORCH), st.data())
def test_offset_is_where_the_element_of_the_tensor_is(
    layout: KVCacheLayout, dtype: ElementType, data: st.DataObject
) -> None:
    at = {
        "layer": data.draw(st.integers(0, layout.num_layer - 1)),
        "kv": data.draw(st.integers(0, layout.num_kv - 1)),
        "block": data.draw(st.integers(0, layout.num_block - 1)),
        "token": data.draw(st.integers(0, layout.tokens_per_block - 1)),
        "head": 0,
        "element": 0,
    }
    tensor = torch.empty(layout.shape, dtype=getattr(torch, dtype.label), device="meta")
    element = tensor[tuple(at[axis] for axis in layout.type.value)]
    offset = layout.offset_bytes(at["layer"], at["kv"], at["block"], dtype, token=at["token"])
    assert offset == element.storage_offset() * element.element_size()


@given(st.lists(st.builds(KVGroup, layouts(even=True), st.sampled_from(ElementType)), min_size=1))
def test_groups_lie_one_behind_the_other(groups: list[KVGroup]) -> None:
    offsets = group_offsets_bytes(groups)
    assert offsets[0] == 0
    assert len(offsets) == len(groups) + 1
    for group, (start, end) in zip(groups, pairwise(offsets), strict=True):
        assert end - start == group.bytes_per_block

"""The kernel that copies pages: any pages, in any order, between host rows and a device."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.layers import tell

from kvstrata.transfer import cuda_triton
from kvstrata.transfer.cuda_triton import copy_by_kernel, widest_word
from kvstrata.transfer.descriptors import HostRows, PagePlace, PagePlaces


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


class Case(NamedTuple):
    """Pages of some layers, and what is copied of them."""

    element: torch.dtype
    layers: int
    page: int  # elements
    gap: int  # elements between pages
    blocks: list[int]
    copied: int
    outermost: bool
    programs: int
    rows: int
    row_words: int


cases = st.builds(
    Case,
    element=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
    layers=st.integers(1, 4),
    page=st.integers(1, 9),
    gap=st.integers(0, 3),
    blocks=st.permutations(range(6)),
    copied=st.integers(1, 6),
    outermost=st.booleans(),
    programs=st.integers(1, 3),
    rows=st.sampled_from([1, 4]),
    row_words=st.sampled_from([2, 8]),
)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(cases)
def test_pages_of_any_shape_stride_and_order_arrive(device: torch.device, case: Case) -> None:
    tell(case)
    element, layers, page, gap, blocks, count, outermost, programs = case[:8]
    width = element.itemsize
    page_bytes = page * width
    shape = (6, layers, page_bytes + gap * width) if outermost else (layers, 6, page_bytes + gap)
    whole = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    cache = whole if outermost else whole.transpose(0, 1)
    blocks = blocks[:count]
    stride, layer_stride = cache.stride(0), cache.stride(1)
    places = PagePlaces(
        [PagePlace(cache.data_ptr() + n * layer_stride, stride, page_bytes) for n in range(layers)],
        6,
    )
    row_bytes = layers * page_bytes
    host = pinned(torch.randint(0, 256, (count, row_bytes), dtype=torch.uint8))
    expected = cache[blocks, :, :page_bytes].reshape(count, row_bytes).cpu()
    addresses = host.data_ptr() + np.arange(count, dtype=np.int64) * row_bytes
    rows = HostRows(addresses, np.ones(count, np.bool_))
    spans = places.spans(np.array(blocks, np.int64), rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_triton, "PROGRAMS", programs)
        patch.setattr(cuda_triton, "_ROWS", case.rows)
        patch.setattr(cuda_triton, "_ROW_WORDS", case.row_words)
        copy_by_kernel(spans.host, spans.device, spans.lengths_bytes, device)
        if device.type != "cpu":
            torch.cuda.synchronize()
        assert torch.equal(host, expected)
        host ^= 0xFF
        before = whole.clone()
        (before if outermost else before.transpose(0, 1))[blocks, :, :page_bytes] ^= 0xFF
        copy_by_kernel(spans.device, spans.host, spans.lengths_bytes, device)
        assert torch.equal(whole, before)


def test_words_are_as_wide_as_every_number_allows() -> None:
    assert [widest_word(np.array(n)) for n in ([16, 32], [4, 8], [6], [8, 3], [0])] == [
        8,
        4,
        2,
        1,
        8,
    ]

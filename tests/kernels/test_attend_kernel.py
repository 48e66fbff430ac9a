"""The kernel that attends by position: against attention over all keys, masked."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton.language as tl
from bench.gpu import synchronize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.layers import Layer, a_layer, tell

from kvstrata.blend import attend_triton
from kvstrata.blend.attend_triton import PagedKV, Tile, attend
from kvstrata.core.errors import ConfigError, InvariantViolated

pytestmark = pytest.mark.usefixtures("in_bounds")

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Case(NamedTuple):
    """Some tokens of a prompt, and its pages."""

    layer: Layer
    dtype: torch.dtype
    kv_heads: int
    heads_each: int
    key_size: int
    value_size: int
    tokens: int
    apart: int  # elements between the queries of a token
    tile: Tile | None  # None: as is usual
    in_order: bool  # of positions
    window: int | None
    seed: int


cases = st.builds(
    Case,
    layer=a_layer(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    kv_heads=st.integers(1, 2),
    heads_each=st.integers(1, 3),
    key_size=st.sampled_from([3, 8, 16, 24]),
    value_size=st.sampled_from([1, 8, 16, 20]),
    tokens=st.integers(1, 70),
    apart=st.integers(0, 3),
    tile=st.sampled_from([Tile(16, 16, 4, 1), Tile(16, 32, 4, 2), Tile(32, 16, 4, 2), None]),
    in_order=st.booleans(),
    window=st.none() | st.integers(1, 80),
    seed=st.integers(0, 1 << 16),
)


def reference(
    queries: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """float32; keys and values are (tokens, heads, elements)."""
    scores = torch.einsum("qhd,thd->hqt", queries.float(), keys) * 0.3
    behind = positions[:, None] - torch.arange(len(keys), device=keys.device)
    unseen = (behind < 0) | (behind >= (window or len(keys)))
    shares = scores.masked_fill(unseen, -torch.inf).softmax(-1)
    return torch.einsum("hqt,thd->qhd", shares, values)


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(case=cases)
def test_it_is_attention_of_what_stands_before(device: torch.device, case: Case) -> None:
    check(device, case, case.dtype)


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(case=cases)
def test_quantised_pages_are_read_with_their_scales(
    device: torch.device, fp8: torch.dtype, case: Case
) -> None:
    check(device, case, fp8)


def check(device: torch.device, case: Case, stored: torch.dtype) -> None:
    tell(case, stored)
    torch.manual_seed(case.seed)
    chance = np.random.default_rng(case.seed)
    used = -(-case.tokens // case.layer.page_tokens)
    elements = case.key_size + case.value_size
    whole = case.layer.make(used + 2, case.kv_heads, elements).to(stored).to(device)
    cache = case.layer.of(whole, case.kv_heads)
    pages = torch.from_numpy(chance.permutation(used + 2)[:used].astype(np.int32)).to(device)
    kv = PagedKV(cache, pages, case.key_size)
    if stored != case.dtype:
        kv = kv._replace(key_scale=0.7, value_scale=1.9)
    count = int(chance.integers(1, case.tokens + 1))
    chosen = chance.permutation(case.tokens)[:count]
    positions = torch.from_numpy(np.sort(chosen) if case.in_order else chosen).to(device)
    heads = case.kv_heads * case.heads_each
    spread = torch.randn(count, heads + 1, case.key_size + case.apart, device=device)
    queries = spread.to(case.dtype)[:, :heads, : case.key_size]
    tokens = cache[pages.long()].float().transpose(1, 2).reshape(-1, case.kv_heads, elements)
    tokens = tokens[: case.tokens].repeat_interleave(case.heads_each, dim=1)
    keys, values = tokens.split([case.key_size, case.value_size], dim=2)
    keys, values = keys * kv.key_scale, values * kv.value_scale
    expected = reference(queries, positions, keys, values, case.window)
    with pytest.MonkeyPatch.context() as patch:
        if case.tile is not None:
            patch.setattr(attend_triton, "_TILES", (case.tile,))
        if device.type == "cpu":  # the interpreter multiplies the bits of bfloat16 as numbers
            patch.setitem(attend_triton._FACTORS, torch.bfloat16, tl.float32)
        synchronize(device)  # or what it is blamed for may be of something before it
        found = attend(queries, positions, kv, 0.3, case.window)
        synchronize(device)
    assert found.dtype == case.dtype
    error = (found.float() - expected).abs().max().item()
    assert error <= TOLERANCE[case.dtype] * max(1.0, values.abs().max().item())


def test_queries_may_be_further_apart_than_numbers_of_32_bits(device: torch.device) -> None:
    far = torch.empty(
        (2 << 30) + 16, dtype=torch.float16, device=device
    )  # of which little is touched
    queries = far.as_strided((3, 1, 16), (1 << 30, 16, 1))
    near = torch.randn(3, 1, 16, device=device).to(torch.float16)
    queries.copy_(near)
    cache = torch.randn(1, 1, 4, 32, device=device).to(torch.float16)
    kv = PagedKV(cache, torch.zeros(1, dtype=torch.int64, device=device), 16)
    positions = torch.tensor([1, 3, 2], device=device)
    assert torch.equal(attend(queries, positions, kv, 0.3), attend(near, positions, kv, 0.3))


def test_no_query_is_no_work_and_what_does_not_fit_is_refused(device: torch.device) -> None:
    kv = PagedKV(torch.zeros(2, 2, 4, 16, device=device), torch.arange(2, device=device), 8)
    queries = torch.zeros(3, 4, 8, device=device)
    positions = torch.arange(3, device=device)
    assert attend(queries[:0], positions[:0], kv, 1.0).shape == (0, 4, 8)
    wrong = [
        (queries[0], positions, kv),
        (queries.double(), positions, kv),
        (queries[:, :3], positions, kv),
        (queries[..., :7], positions, kv),
        (queries, positions[:2], kv),
        (queries, positions, kv._replace(key_size=16)),
        (queries, positions, kv._replace(cache=kv.cache[..., ::2])),
    ]
    for each in wrong:
        with pytest.raises(InvariantViolated):
            attend(*each, 1.0)


@pytest.mark.parametrize("most_kib", [64, 99, 163, 227])
@pytest.mark.parametrize(
    ("element_bytes", "size"), [(2, 64), (2, 128), (2, 256), (4, 64), (4, 128), (4, 256)]
)
def test_tiles_fit_into_what_a_multiprocessor_has(
    most_kib: int, element_bytes: int, size: int
) -> None:
    row_bytes, query_bytes = 2 * size * element_bytes, size * element_bytes
    tile = attend_triton._tile(row_bytes, query_bytes, most_kib << 10)
    assert tile.shared_bytes(row_bytes, query_bytes) <= most_kib << 10


def test_rows_that_no_tile_holds_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"take 4096 bytes, and a multiprocessor of this GPU has 65536[\s\S]*KVStrataConnector",
    ):
        attend_triton._tile(4096, 2048, 64 << 10)

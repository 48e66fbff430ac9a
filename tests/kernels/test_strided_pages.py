"""KV by token with kernels, beside the same without, in each of vLLM's orders of layers."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.layers import Layer, a_layer, tell

from kvstrata.blend.position import PositionCorrector
from kvstrata.core.errors import InvariantViolated
from kvstrata.integration.vllm.blend.moves import TokenMoves
from kvstrata.integration.vllm.blend.pages import PageMap, Queries, TokenPages
from kvstrata.integration.vllm.blend.strided import StridedPages, StridedPairs

pytestmark = pytest.mark.usefixtures("in_bounds")

SIZE, POSITIONS, PAGES = 8, 300, 5


class Case(NamedTuple):
    layer: Layer
    kv_heads: int
    heads_each: int
    window: int | None
    seed: int


cases = st.builds(
    Case,
    layer=a_layer(),
    kv_heads=st.integers(1, 3),
    heads_each=st.integers(1, 2),
    window=st.none() | st.integers(1, 20),
    seed=st.integers(0, 1 << 16),
)


class Backend:
    """A writer as vLLM's, for pages as *layer* lays them out."""

    scale = 0.3

    def __init__(self, layer: Layer, cache: torch.Tensor) -> None:
        self._layer, self._cache = layer, cache

    def do_kv_cache_update(
        self, layer: Any, keys: torch.Tensor, values: torch.Tensor, cache: Any, slots: torch.Tensor
    ) -> None:
        page, place = slots // self._layer.page_tokens, slots % self._layer.page_tokens
        self._cache[page, :, place] = torch.cat([keys, values], dim=2)


class Subject(NamedTuple):
    pages: TokenPages
    cache: torch.Tensor  # (pages, heads, tokens, K and V)
    rows: torch.Tensor  # uint8 (pages, page bytes)


def page_map(case: Case, device: torch.device) -> PageMap:
    tokens, heads = case.layer.page_tokens, case.kv_heads
    shape = (heads, tokens, 2 * SIZE) if case.layer.heads_first else (tokens, heads, 2 * SIZE)
    places = torch.arange(tokens * heads * 2 * SIZE, device=device).view(shape)
    by_token = places.transpose(0, 1) if case.layer.heads_first else places
    return PageMap(by_token[..., :SIZE], by_token[..., SIZE:])


def subject(case: Case, device: torch.device, *, strided: bool) -> Subject:
    tell(case, strided)
    torch.manual_seed(case.seed)
    whole = case.layer.make(PAGES, case.kv_heads, 2 * SIZE).to(device)
    cache = case.layer.of(whole, case.kv_heads)
    rows = whole.select(1 if case.layer.blocks_outermost else 0, case.layer.number)
    rows = rows[:, : rows.shape[1] - case.layer.gap].view(torch.uint8)
    attention = SimpleNamespace(
        attn_backend=SimpleNamespace(forward_includes_kv_cache_update=False),
        impl=Backend(case.layer, cache),
        num_kv_heads=case.kv_heads,
        head_size=SIZE,
        kv_cache=cache,
        kv_cache_dtype="auto",
        dtype=torch.float32,
        sliding_window=case.window,
        _k_scale_float=1.0,
        _v_scale_float=1.0,
    )
    learned = page_map(case, device)
    if not strided:
        return Subject(TokenPages(attention, rows, learned), cache, rows)
    pairs = StridedPairs.of(learned)
    assert pairs is not None
    return Subject(StridedPages(attention, rows, learned, pairs), cache, rows)


def corrector(device: torch.device) -> PositionCorrector:
    angles = torch.arange(POSITIONS)[:, None] / 10.0 ** (torch.arange(SIZE // 2) / 4)
    table = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
    return PositionCorrector(table, rotary_dim=SIZE, is_neox=True)


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(case=cases)
def test_tokens_are_moved_to_the_same_numbers(device: torch.device, case: Case) -> None:
    chance = np.random.default_rng(case.seed)
    all_tokens = PAGES * case.layer.page_tokens
    count = int(chance.integers(1, all_tokens + 1))
    sources, targets = (chance.integers(0, POSITIONS, count) for _ in range(2))
    rows, slots = (chance.permutation(all_tokens)[:count] for _ in range(2))
    moves = TokenMoves(rows, torch.from_numpy(slots), sources, targets, device)
    found = []
    for strided in (False, True):
        made = subject(case, device, strided=strided)
        size, beside = made.rows.shape[1], case.seed % 3 * 32  # pages of other layers
        kept = torch.randn(len(made.rows), (size + 2 * beside) // 4).view(torch.uint8)
        made.pages.move(kept[:, beside : beside + size], moves, corrector(device))
        found.append(made.cache.clone())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(case=cases)
def test_queries_make_the_same_of_it(device: torch.device, case: Case) -> None:
    chance = np.random.default_rng(case.seed)
    all_tokens = PAGES * case.layer.page_tokens
    positions = np.flatnonzero(chance.random(all_tokens) < 0.4)
    positions = positions if len(positions) else np.array([all_tokens - 1])
    of = Queries(
        torch.from_numpy(positions).to(device),
        torch.from_numpy(chance.permutation(PAGES).astype(np.int32)).to(device),
        first=int(positions[0]),
        last=int(positions[-1]),
    )
    queries = torch.randn(len(positions), case.kv_heads * case.heads_each, SIZE).to(device)
    found = [
        subject(case, device, strided=strided).pages.attend(queries, of)
        for strided in (False, True)
    ]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_elements_that_lie_otherwise_are_no_pairs(device: torch.device) -> None:
    case = Case(Layer(1, 0, True, True, 4, 0), 2, 1, None, 0)
    learned = page_map(case, device)
    transposed = PageMap(learned.keys.flip(2), learned.values)
    apart = PageMap(learned.keys, learned.values.flip(0))
    assert StridedPairs.of(learned) is not None
    assert StridedPairs.of(transposed) is None
    assert StridedPairs.of(apart) is None


def test_a_position_that_the_table_has_not_is_refused(device: torch.device) -> None:
    case = Case(Layer(1, 0, True, True, 4, 0), 2, 1, None, 0)
    made = subject(case, device, strided=True)
    zero = np.array([0])
    moves = TokenMoves(zero, torch.from_numpy(zero), zero, np.array([POSITIONS]), device)
    with pytest.raises(InvariantViolated, match=f"target position {POSITIONS} is not in the rope"):
        made.pages.move(made.rows.cpu(), moves, corrector(device))

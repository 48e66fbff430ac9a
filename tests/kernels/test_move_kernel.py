"""The kernel that moves tokens and turns their keys: against ``kvstrata.blend.position``."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.layers import Layer, a_layer, tell

from kvstrata.blend import move_triton
from kvstrata.blend.move_triton import Moves, Rope, move_tokens
from kvstrata.blend.position import PositionCorrector
from kvstrata.core.errors import InvariantViolated

pytestmark = pytest.mark.usefixtures("in_bounds")

POSITIONS = 64
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
FLOATING = (torch.float32, torch.bfloat16, torch.float16)


class Case(NamedTuple):
    """Tokens of one paged cache, moved into another."""

    source: Layer
    cache: Layer
    dtype: torch.dtype
    heads: int
    pairs: int
    first_dim: int
    rest: int  # elements of a key behind those that are turned
    values: int
    is_neox: bool
    table_dtype: torch.dtype
    scale: float  # of the table, as YaRN has it
    seed: int


cases = st.builds(
    Case,
    source=a_layer(),
    cache=a_layer(),
    dtype=st.sampled_from(FLOATING),
    heads=st.integers(1, 5),
    pairs=st.integers(1, 9),
    first_dim=st.integers(0, 3),
    rest=st.integers(0, 5),
    values=st.integers(0, 9),
    is_neox=st.booleans(),
    table_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.sampled_from([1.0, 1.35]),
    seed=st.integers(0, 1 << 16),
)


def paged(case: Case, layer: Layer, pages: int, device: torch.device) -> torch.Tensor:
    """All layers of a cache whose pages have the heads of the case."""
    elements = case.first_dim + 2 * case.pairs + case.rest + case.values
    return layer.make(pages, case.heads, elements).to(case.dtype).to(device)


def table(case: Case, device: torch.device) -> torch.Tensor:
    angles = torch.arange(POSITIONS)[:, None] / 10.0 ** (torch.arange(case.pairs) / case.pairs)
    made = torch.cat([angles.cos(), angles.sin()], dim=1) * case.scale
    return made.to(case.table_dtype).to(device)


def by_token(pages: torch.Tensor) -> torch.Tensor:
    """(slots, heads, elements)."""
    return pages.transpose(1, 2).reshape(-1, pages.shape[1], pages.shape[3])


def drawn(
    case: Case, source: torch.Tensor, cache: torch.Tensor
) -> tuple[Moves, np.ndarray, np.ndarray]:
    chance = np.random.default_rng(case.seed)
    sizes = [len(pages) * pages.shape[2] for pages in (source, cache)]
    tokens = int(chance.integers(1, min(sizes) + 1))
    sources, targets = (chance.integers(0, POSITIONS, tokens) for _ in range(2))
    targets[::3] = sources[::3]  # that stay where they are
    slots = [chance.permutation(size)[:tokens] for size in sizes]
    on_device = [torch.from_numpy(n).to(cache.device) for n in (*slots, sources, targets)]
    return Moves(*on_device), sources, targets


@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(cases)
def test_keys_are_turned_as_by_the_reference(device: torch.device, case: Case) -> None:
    tell(case)
    torch.manual_seed(case.seed)
    source = case.source.of(paged(case, case.source, 4, device), case.heads)
    whole = paged(case, case.cache, 3, device)
    cache, before = case.cache.of(whole, case.heads), whole.clone()
    moves, sources, targets = drawn(case, source, cache)
    rope = Rope(table(case, device), case.is_neox, case.first_dim)
    corrector = PositionCorrector(
        rope.table, rotary_dim=2 * case.pairs, is_neox=case.is_neox, first_dim=case.first_dim
    )
    old = by_token(source)[moves.source_slots]
    expected = by_token(cache).clone()
    expected[moves.target_slots] = corrector.correct(old, sources, targets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(move_triton, "_HEADS", 2)  # several times for one token
        move_tokens(source, cache, moves, rope)
    found = by_token(cache)
    error = (found.float() - expected.float()).abs().max().item()
    assert error <= TOLERANCE[case.dtype] * max(1.0, old.float().abs().max().item())
    stays = moves.target_slots[moves.source_positions == moves.target_positions]
    assert torch.equal(found[stays], expected[stays])
    kept = torch.ones(found.shape[2], dtype=torch.bool, device=device)
    kept[case.first_dim : case.first_dim + 2 * case.pairs] = False
    assert torch.equal(found[..., kept], expected[..., kept])
    case.cache.of(before, case.heads).copy_(cache)
    assert torch.equal(whole.view(torch.uint8), before.view(torch.uint8))  # around the pages


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(case=cases)
def test_quantised_keys_are_turned_and_rounded_again(
    device: torch.device, fp8: torch.dtype, case: Case
) -> None:
    case = case._replace(dtype=fp8)
    tell(case)
    torch.manual_seed(case.seed)
    source = case.source.of(paged(case, case.source, 3, device), case.heads)
    cache = case.cache.of(paged(case, case.cache, 4, device), case.heads)
    moves, sources, targets = drawn(case, source, cache)
    rope = Rope(table(case, device), case.is_neox, case.first_dim)
    corrector = PositionCorrector(
        rope.table, rotary_dim=2 * case.pairs, is_neox=case.is_neox, first_dim=case.first_dim
    )
    old = by_token(source.float())[moves.source_slots]
    exact = corrector.correct(old, sources, targets)
    expected = exact.to(case.dtype).float()
    move_tokens(source, cache, moves, rope)
    found = by_token(cache.float())[moves.target_slots]
    # The nearest number, but where two are as near but for float32's own rounding.
    error, least = ((each - exact).abs() for each in (found, expected))
    assert (error <= least + 1e-5 * exact.abs().clamp(min=1.0)).all()


def test_a_turn_beyond_the_largest_number_stays_finite(
    device: torch.device, fp8: torch.dtype
) -> None:
    most = torch.finfo(fp8).max
    source = torch.full((1, 1, 1, 2), most, device=device).to(fp8)
    cache = torch.zeros_like(source)
    angles = torch.tensor([[0.0], [-np.pi / 4]], device=device)
    rope = Rope(torch.cat([angles.cos(), angles.sin()], dim=1), is_neox=True)
    zero, one = (torch.tensor([n], device=device) for n in (0, 1))
    move_tokens(source, cache, Moves(zero, zero, zero, one), rope)
    assert cache.float().flatten().tolist() == pytest.approx([most, 0.0], abs=most * 0.01)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    pages = torch.zeros(2, 1, 2, 8, device=device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    rope = Rope(torch.zeros(4, 8, device=device), is_neox=True)
    move_tokens(pages, pages, Moves(none, none, none, none), rope)
    for source in (pages[0], pages.double(), pages[..., ::2], pages.half(), pages[..., :6]):
        with pytest.raises(InvariantViolated):
            move_tokens(source, pages, Moves(none, none, none, none), rope)
    with pytest.raises(InvariantViolated):
        move_tokens(pages, pages, Moves(none, none, none, none), rope._replace(first_dim=1))

"""Attention of tokens here and there, and the most that probes pay, beside what attention is defined as."""

import pytest
import torch

from kvstrata.blend import attention
from kvstrata.blend.attention import attend_by_position, most_attention

TOKENS, SIZE, SCALE = 9, 8, 0.3


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 4, TOKENS])
def test_it_is_the_highest_probability_over_probes_and_heads(
    heads: int, kv_heads: int, dtype: torch.dtype, window: int | None
) -> None:
    drawn = torch.Generator().manual_seed(heads)
    probes = torch.tensor([2, 5, 8])
    queries = torch.randn(len(probes), heads, SIZE, generator=drawn).to(dtype)
    keys = torch.randn(TOKENS, kv_heads, SIZE, generator=drawn).to(dtype)
    expected = torch.zeros(TOKENS)
    for number, probe in enumerate(probes.tolist()):
        for head in range(heads):
            first = 0 if window is None else max(0, probe + 1 - window)
            reached = keys[first : probe + 1, head * kv_heads // heads].float()
            paid = (reached @ queries[number, head].float() * SCALE).softmax(0)
            expected[first : probe + 1] = torch.maximum(expected[first : probe + 1], paid)
    torch.testing.assert_close(most_attention(queries, keys, probes, SCALE, window), expected)


@pytest.mark.parametrize(
    ("heads", "most_products"), [(4, 1 << 22), (40, 1 << 22), (300, 1 << 22), (4, 500 * 4 * 7)]
)  # of more fewer probes are looked at
@pytest.mark.parametrize("window", [None, 1, 100])
def test_probes_that_are_looked_at_some_at_a_time_find_what_each_finds_by_itself(
    window: int | None, heads: int, most_products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_CPU_PRODUCTS", most_products)
    drawn = torch.Generator().manual_seed(1)
    probes = torch.randperm(500, generator=drawn)[:150]
    queries = torch.randn(len(probes), heads, SIZE, generator=drawn)
    keys = torch.randn(500, 2, SIZE, generator=drawn)
    expected = torch.zeros(500)
    for query, probe in zip(queries, probes, strict=True):
        alone = most_attention(query[None], keys, probe[None], SCALE, window)
        expected = torch.maximum(expected, alone)
    torch.testing.assert_close(most_attention(queries, keys, probes, SCALE, window), expected)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 4, TOKENS])
def test_each_query_makes_of_the_values_what_stands_up_to_its_position(
    heads: int, kv_heads: int, dtype: torch.dtype, window: int | None
) -> None:
    drawn = torch.Generator().manual_seed(heads)
    positions = torch.tensor([8, 0, 5])
    queries = torch.randn(len(positions), heads, SIZE, generator=drawn).to(dtype)
    keys = torch.randn(TOKENS, kv_heads, SIZE, generator=drawn)  # as a quantised cache is read
    values = torch.randn(TOKENS, kv_heads, SIZE + 2, generator=drawn)
    found = attend_by_position(queries, keys, values, positions, SCALE, window)
    assert found.dtype == dtype
    for number, position in enumerate(positions.tolist()):
        first = 0 if window is None else max(0, position + 1 - window)
        for head in range(heads):
            seen = (slice(first, position + 1), head * kv_heads // heads)
            paid = (keys[seen].to(dtype).float() @ queries[number, head].float() * SCALE).softmax(0)
            expected = paid @ values[seen].to(dtype).float()
            error = (found[number, head].float() - expected).abs().max()
            assert error <= (1e-5 if dtype == torch.float32 else 3e-2)

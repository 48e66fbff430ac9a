"""The most attention that probes pay, beside attention as it is defined."""

import pytest
import torch

from kvstrata.blend.attention import most_attention

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

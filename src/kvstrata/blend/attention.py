"""Attention of some tokens of a prompt, wherever they stand, to what stands before them."""

from typing import Final

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["attend_by_position", "most_attention"]

_PROBES_AT_ONCE: Final = 64


def attend_by_position(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """What each query makes of the values up to its position: (queries, heads, value size).

    Args:
        queries: (queries, heads, key size), of the tokens at *positions*, int64, in any order.
        keys: (tokens, KV heads, key size), of the tokens from the first on.
        values: (tokens, KV heads, value size).
        scale: What the products are multiplied with.
        window: How many tokens a query attends to, its own included; None for all before it.
    """
    query, key, value = (
        each.to(queries.dtype).transpose(0, 1)[None] for each in (queries, keys, values)
    )
    attended = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=_seen(positions, len(keys), window),
        scale=scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


def most_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    probes: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """The highest probability that any probe pays a token, in any head: float32 (tokens,).

    One head after another, and of it some probes at a time, against the tokens that these reach alone.

    Args:
        queries: (probes, heads, head size), of the tokens at the positions *probes*, int64.
        keys: (tokens, KV heads, head size), of the tokens from the first on, at least one.
        scale: What the products are multiplied with.
        window: How many tokens a probe attends to, itself included; None for all before it.
    """
    tokens, kv_heads, _ = keys.shape
    parts = [_part(some, tokens, window) for some in probes.split(_PROBES_AT_ONCE)]
    most = torch.zeros(tokens, device=keys.device)
    groups = queries.float().mul(scale).transpose(0, 1).chunk(kv_heads)
    for group, key in zip(groups, keys.float().unbind(1), strict=True):
        for head in group:
            for some, (reach, mask) in zip(head.split(_PROBES_AT_ONCE), parts, strict=True):
                paid = torch.addmm(mask, some, key[reach].T).softmax(-1).amax(0)
                torch.maximum(most[reach], paid, out=most[reach])
    return most


def _part(probes: torch.Tensor, tokens: int, window: int | None) -> tuple[slice, torch.Tensor]:
    """Which of *tokens* any of *probes* reaches, and what is added to the products with these."""
    first = 0 if window is None else max(0, int(probes.min()) + 1 - window)
    reach = slice(first, int(probes.max()) + 1)
    seen = _seen(probes, tokens, window)[:, reach]
    return reach, torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)


def _seen(positions: torch.Tensor, tokens: int, window: int | None) -> torch.Tensor:
    """Which of the first *tokens* each of *positions* attends to: bool (positions, tokens)."""
    each = torch.arange(tokens, device=positions.device)
    seen = positions[:, None] >= each
    if window is not None:
        seen &= positions[:, None] < each + window
    return seen

"""Attention of some tokens of a prompt, wherever they stand, to what stands before them."""

import math
from typing import Final

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["attend_by_position", "most_attention"]

# At a time:
_MOST_PROBES: Final = 64
# Probes, each of them once for each head: products of 2 MiB with 2,048 tokens, and as many
# probabilities, as a processor's cache may have.
_CPU_ROWS: Final = 256
_CPU_PRODUCTS: Final = 1 << 22
_GPU_PRODUCTS: Final = 1 << 25


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
        attn_mask=_seen(positions, torch.arange(len(keys), device=keys.device), window),
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

    Some probes at a time, against the tokens that these reach alone.

    Args:
        queries: (probes, heads, head size), of the tokens at the positions *probes*.
        keys: (tokens, KV heads, head size), of the tokens from the first on, at least one.
        probes: int64, not on a GPU: nothing is to wait for one.
        scale: What the products are multiplied with.
        window: How many tokens a probe attends to, itself included; None for all before it.
    """
    tokens, kv_heads, _ = keys.shape
    if keys.device.type == "cpu":
        rows = min(_CPU_ROWS, _CPU_PRODUCTS // tokens)
    else:
        rows = _GPU_PRODUCTS // tokens
    at_once = min(_MOST_PROBES, max(1, rows // queries.shape[1]))
    by_group = queries.float().mul(scale).unflatten(1, (kv_heads, -1)).transpose(0, 1).contiguous()
    by_token = keys.float().permute(1, 2, 0)
    most = torch.zeros(tokens, device=keys.device)
    # Fresh memory for each would take as long as what is done in it.
    room = most.new_empty(2, min(at_once, len(probes)) * queries.shape[1] * tokens)
    each_part = (
        each.split(at_once, dim)
        for each, dim in ((by_group, 1), (probes, 0), (probes.to(keys.device), 0))
    )
    for asking, some, there in zip(*each_part, strict=True):
        least, end = int(some.min()), int(some.max()) + 1
        first = 0 if window is None else max(0, least + 1 - window)
        edge = least + 1 if window is None else first  # of those that all of them see
        unseen = ~_seen(there, torch.arange(edge, end, device=keys.device), window)
        shape = (kv_heads, *asking.shape[1:3], end - first)
        products, paid = room[:, : math.prod(shape)].unflatten(1, shape)
        torch.bmm(asking.flatten(1, 2), by_token[..., first:end], out=products.flatten(1, 2))
        products[..., edge - first :].masked_fill_(unseen[:, None], -torch.inf)
        torch.softmax(products, -1, out=paid)
        torch.maximum(most[first:end], paid.amax((0, 1, 2)), out=most[first:end])
    return most


def _seen(positions: torch.Tensor, tokens: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which of *tokens*, by position, each of *positions* attends to: bool (positions, tokens)."""
    seen = positions[:, None] >= tokens
    if window is not None:
        seen &= positions[:, None] < tokens + window
    return seen

"""Attention of some tokens of a prompt, wherever they stand, to what stands before them."""

from typing import Final

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["attend_by_position", "most_attention"]

_PROBES_AT_ONCE: Final = 64
_PRODUCTS_AT_ONCE: Final = 1 << 25  # on a GPU: 128 MiB


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

    Some probes at a time, against the tokens that these reach alone.

    Args:
        queries: (probes, heads, head size), of the tokens at the positions *probes*.
        keys: (tokens, KV heads, head size), of the tokens from the first on, at least one.
        probes: int64, not on a GPU: nothing is to wait for one.
        scale: What the products are multiplied with.
        window: How many tokens a probe attends to, itself included; None for all before it.
    """
    most = torch.zeros(len(keys), device=keys.device)
    look = _look_by_head if keys.device.type == "cpu" else _look_in_all_heads
    look(most, queries.float().mul(scale).transpose(0, 1), keys.float(), probes, window)
    return most


def _look_by_head(
    most: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    probes: torch.Tensor,
    window: int | None,
) -> None:
    """Raise *most* to what is paid in one head after another: what it takes stays in a cache."""
    parts = _parts(probes, _PROBES_AT_ONCE, keys, window)
    for group, key in zip(queries.chunk(keys.shape[1]), keys.unbind(1), strict=True):
        for head in group:
            for some, (reach, mask) in zip(head.split(_PROBES_AT_ONCE), parts, strict=True):
                paid = torch.addmm(mask, some, key[reach].T).softmax(-1).amax(0)
                torch.maximum(most[reach], paid, out=most[reach])


def _look_in_all_heads(
    most: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    probes: torch.Tensor,
    window: int | None,
) -> None:
    """Raise *most* to what is paid in any head: a GPU takes longer to begin than to do what one is."""
    (tokens, kv_heads, size), heads = keys.shape, len(queries)
    at_once = min(_PROBES_AT_ONCE, max(1, _PRODUCTS_AT_ONCE // (heads * tokens)))
    parts = _parts(probes, at_once, keys, window)
    by_group = queries.unflatten(0, (kv_heads, -1))
    for some, (reach, mask) in zip(by_group.split(at_once, 2), parts, strict=True):
        rows = some.reshape(kv_heads, -1, size)
        masks = mask.repeat(heads // kv_heads, 1)
        paid = torch.baddbmm(masks, rows, keys[reach].permute(1, 2, 0)).softmax(-1).amax((0, 1))
        torch.maximum(most[reach], paid, out=most[reach])


def _parts(
    probes: torch.Tensor, at_once: int, keys: torch.Tensor, window: int | None
) -> list[tuple[slice, torch.Tensor]]:
    """Of some *probes* at a time, which tokens any reaches, and what is added to the products with these."""
    tokens, found = len(keys), []
    for some in probes.split(at_once):
        first = 0 if window is None else max(0, int(some.min()) + 1 - window)
        reach = slice(first, int(some.max()) + 1)
        seen = _seen(some.to(keys.device), tokens, window)[:, reach]
        mask = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)
        found.append((reach, mask))
    return found


def _seen(positions: torch.Tensor, tokens: int, window: int | None) -> torch.Tensor:
    """Which of the first *tokens* each of *positions* attends to: bool (positions, tokens)."""
    each = torch.arange(tokens, device=positions.device)
    seen = positions[:, None] >= each
    if window is not None:
        seen &= positions[:, None] < each + window
    return seen

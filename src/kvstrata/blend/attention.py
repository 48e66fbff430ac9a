"""Attention of some tokens of a prompt, wherever they stand, to what stands before them."""

from typing import Final

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["attend_by_position", "most_attention"]

# At a time:
_MOST_PROBES: Final = 64
_LEAST_CPU_PROBES: Final = 16  # fewer are slower to multiply
_CPU_PRODUCTS: Final = 1 << 18  # 1 MiB, as a core's cache often has
_GPU_PRODUCTS: Final = 1 << 25  # 128 MiB

_Parts = list[tuple[slice, torch.Tensor]]  # which tokens some probes reach, and their mask


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
    tokens, kv_heads, _ = keys.shape
    most = torch.zeros(tokens, device=keys.device)
    by_group = queries.float().mul(scale).transpose(0, 1).unflatten(0, (kv_heads, -1))
    if keys.device.type == "cpu":
        look, least, fitting = _look_by_head, _LEAST_CPU_PROBES, _CPU_PRODUCTS // tokens
    else:
        look, least = _look_in_all_heads, 1
        fitting = _GPU_PRODUCTS // (queries.shape[1] * tokens)
    at_once = min(_MOST_PROBES, max(least, fitting))
    look(most, by_group, keys.float(), _parts(probes, at_once, keys, window))
    return most


def _look_by_head(
    most: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, parts: _Parts
) -> None:
    """Raise *most* to what is paid in one head after another: what it takes stays in a cache.

    *queries*: (KV heads, heads of each, probes, head size).
    """
    for group, key in zip(queries, keys.unbind(1), strict=True):
        for head in group:
            for some, (reach, mask) in zip(_split(head, parts), parts, strict=True):
                paid = torch.addmm(mask, some, key[reach].T).softmax(-1).amax(0)
                torch.maximum(most[reach], paid, out=most[reach])


def _look_in_all_heads(
    most: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, parts: _Parts
) -> None:
    """As ``_look_by_head``, together: a GPU takes longer to begin than to do what one head is."""
    for some, (reach, mask) in zip(_split(queries, parts), parts, strict=True):
        masks = mask.repeat(queries.shape[1], 1)
        products = torch.baddbmm(masks, some.flatten(1, 2), keys[reach].permute(1, 2, 0))
        torch.maximum(most[reach], products.softmax(-1).amax((0, 1)), out=most[reach])


def _split(queries: torch.Tensor, parts: _Parts) -> tuple[torch.Tensor, ...]:
    """Those of the probes of each part, (..., probes, head size)."""
    found: tuple[torch.Tensor, ...] = queries.split([len(mask) for _, mask in parts], -2)
    return found


def _parts(probes: torch.Tensor, at_once: int, keys: torch.Tensor, window: int | None) -> _Parts:
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

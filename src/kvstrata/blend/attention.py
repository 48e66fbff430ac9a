"""What some tokens of a prompt attend to, of all that stand before them."""

import torch

__all__ = ["most_attention"]


def most_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    probes: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """The highest probability that any probe pays a token, in any head: float32 (tokens,).

    One head after another: its probabilities stay in a CPU's cache, which halves the time.

    Args:
        queries: (probes, heads, head size), of the tokens at the positions *probes*, int64.
        keys: (tokens, KV heads, head size), of the tokens from the first on, at least one.
        scale: What the products are multiplied with.
        window: How many tokens a probe attends to, itself included; None for all before it.
    """
    tokens, kv_heads, _ = keys.shape
    positions = torch.arange(tokens, device=keys.device)
    hidden = probes[:, None] < positions
    if window is not None:
        hidden |= probes[:, None] >= positions + window
    mask = torch.zeros(hidden.shape, device=keys.device).masked_fill_(hidden, -torch.inf)
    most = torch.zeros(tokens, device=keys.device)
    groups = queries.float().mul(scale).transpose(0, 1).chunk(kv_heads)
    for group, key in zip(groups, keys.float().unbind(1), strict=True):
        for head in group:
            products = torch.addmm(mask, head, key.T)
            most = torch.maximum(most, products.softmax(-1).amax(0))
    return most

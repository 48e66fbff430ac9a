"""What some tokens of a prompt attend to, of all that stand before them."""

import torch

__all__ = ["most_attention"]


def most_attention(
    queries: torch.Tensor, keys: torch.Tensor, probes: torch.Tensor, scale: float
) -> torch.Tensor:
    """The highest probability that any probe pays a token, in any head: float32 (tokens,).

    One head after another: its probabilities stay in a CPU's cache, which halves the time.

    Args:
        queries: (probes, heads, head size), of the tokens at the positions *probes*, int64.
        keys: (tokens, KV heads, head size), of the tokens from the first on, at least one.
        scale: What the products are multiplied with.
    """
    tokens, kv_heads, _ = keys.shape
    later = probes[:, None] < torch.arange(tokens, device=keys.device)
    mask = torch.zeros(later.shape, device=keys.device).masked_fill_(later, -torch.inf)
    most = torch.zeros(tokens, device=keys.device)
    groups = queries.float().mul(scale).transpose(0, 1).chunk(kv_heads)
    for group, key in zip(groups, keys.float().unbind(1), strict=True):
        for head in group:
            products = torch.addmm(mask, head, key.T)
            most = torch.maximum(most, products.softmax(-1).amax(0))
    return most

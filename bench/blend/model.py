"""A Llama of a few hundred thousand parameters, whose layers can be run one at a time.

Modules are named as in transformers, so that a state is a checkpoint of ``LlamaForCausalLM``.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Layer", "Llama", "Shape", "rope_table"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What ``config.json`` says of the model; as many KV heads as heads."""

    vocabulary: int
    answers: int  # tokens that have a row in the output; the logits of others are 0
    hidden: int = 96
    layers: int = 4
    head_dim: int = 32
    intermediate: int = 192
    positions: int = 1024
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5

    @property
    def heads(self) -> int:
        return self.hidden // self.head_dim


def rope_table(shape: Shape) -> torch.Tensor:
    """Cosines, then sines, of each position's angles: float32 (positions, head_dim)."""
    pairs = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
    angles = torch.outer(torch.arange(shape.positions).float(), 1.0 / shape.rope_theta**pairs)
    return torch.cat((angles.cos(), angles.sin()), 1)


def _turned(heads: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    cos, sin = rope.unsqueeze(-2).chunk(2, -1)
    left, right = heads.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class Norm(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden))
        self._epsilon = shape.norm_epsilon

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(state, self.weight.shape, self.weight, self._epsilon)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden, width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(state)) * self.up_proj(state))


class Layer(nn.Module):
    """One layer without its attention, which the caller computes between the two calls."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape)
        self.mlp = FeedForward(shape)
        self._head_dim = shape.head_dim

    def projected(
        self, state: torch.Tensor, rope: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q and K, turned, and V, each (..., tokens, heads, head_dim).

        Args:
            state: (..., tokens, hidden).
            rope: The tokens' rows of the table, (..., tokens, head_dim).
        """
        normed, attention = self.input_layernorm(state), self.self_attn
        q, k, v = (
            projection(normed).unflatten(-1, (-1, self._head_dim))
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        return _turned(q, rope), _turned(k, rope), v

    def finished(self, state: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The next layer's state, from what the heads have read: (..., tokens, heads, head_dim)."""
        state = state + self.self_attn.o_proj(attended.flatten(-2))
        return state + self.mlp(self.post_attention_layernorm(state))


class Body(nn.Module):
    def __init__(self, shape: Shape, embedding: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = embedding
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape)


class Llama(nn.Module):
    """Whole prompts in, logits of the answers out."""

    def __init__(self, shape: Shape, embedding: nn.Module | None = None) -> None:
        """*embedding*: from tokens to states; a plain table by default."""
        super().__init__()
        self.shape = shape
        self.model = Body(shape, embedding or nn.Embedding(shape.vocabulary, shape.hidden))
        self.lm_head = nn.Linear(shape.hidden, shape.answers, bias=False)
        self.register_buffer("rope", rope_table(shape), persistent=False)

    def initialize(self) -> None:
        """Draw the weights of all projections, so that a state keeps its size through a layer."""
        for name, weight in self.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                scale = 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(weight, std=scale / math.sqrt(weight.shape[1]))

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """(..., answers), from the last layer's state."""
        return self.lm_head(self.model.norm(state))

    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """The last layer's, (prompts, tokens, hidden), of *tokens*, int64 (prompts, tokens)."""
        state, rope = self.model.embed_tokens(tokens), self.rope[: tokens.shape[-1]]
        for layer in self.model.layers:
            q, k, v = (each.transpose(-2, -3) for each in layer.projected(state, rope))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            state = layer.finished(state, attended.transpose(-2, -3))
        return state

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, (prompts, tokens, answers)."""
        return self.logits(self.states(tokens))

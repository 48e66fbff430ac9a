"""Prompts whose KV comes from elsewhere, and the steps of a rule on them, many prompts at a time."""

import math
from collections.abc import Callable, Sequence
from typing import assert_never

import numpy as np
import torch
from bench.blend.model import Llama

from kvstrata.blend.plan import BlendPlan, Positions
from kvstrata.blend.selection import (
    Recompute,
    Rule,
    ScoreAttention,
    ScoreDeviation,
    Scores,
    Step,
)

__all__ = ["BlendedPrompts", "OnePrompt", "blend"]


class BlendedPrompts:
    """Prompts of one length with their KV caches.

    ``keys`` and ``values`` are (layers, prompts, tokens, heads, head_dim): K as turned for its
    position, and zeros where nothing was put yet. Running a token writes its row.
    """

    def __init__(self, model: Llama, tokens: torch.Tensor) -> None:
        """*tokens*: int64 (prompts, tokens)."""
        shape = model.shape
        self.tokens = tokens
        self.keys = torch.zeros(shape.layers, *tokens.shape, shape.heads, shape.head_dim)
        self.values = torch.zeros_like(self.keys)
        self._model = model
        self._rows = torch.arange(len(tokens)).unsqueeze(1)

    def compute(self, first: int, end: int) -> torch.Tensor:
        """Run the tokens ``[first, end)`` of all prompts; return their logits."""
        positions = torch.arange(first, end).expand(len(self.tokens), -1)
        state, _ = self._forward(positions, self._model.shape.layers)
        return self._model.logits(state)

    def run(self, steps: Sequence[Step]) -> list[Scores]:
        """Run one step of each prompt, in their order.

        The steps are of one kind, with equally many positions and probes, for the same layer.
        """
        positions = torch.from_numpy(np.stack([step.positions for step in steps]))
        match steps[0]:
            case Recompute():
                self._forward(positions, self._model.shape.layers)
                scores = torch.zeros(len(steps), 0)
            case ScoreAttention(layers=looked_at):
                probes = [step.probes for step in steps if isinstance(step, ScoreAttention)]
                asking = torch.from_numpy(np.stack(probes))
                _, scores = self._forward(positions, looked_at[-1] + 1, asking, looked_at)
            case ScoreDeviation(layer=layer):
                before = self.keys[layer].clone(), self.values[layer].clone()
                self._forward(positions, layer + 1)
                of_keys, of_values = self.keys[layer] - before[0], self.values[layer] - before[1]
                scores = (of_keys.square() + of_values.square()).sum((-1, -2))
            case _ as never:
                assert_never(never)
        return list(scores.numpy())

    def _forward(
        self,
        positions: torch.Tensor,
        layers: int,
        probes: torch.Tensor | None = None,
        looked_at: Sequence[int] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """State behind the first *layers* of *positions*, and the most attention paid by *probes*.

        Both are int64 (prompts, some); the state is (prompts, positions, hidden), the attention, in
        the layers *looked_at*, (prompts, tokens).
        """
        body = self._model.model
        every = torch.arange(self.tokens.shape[1])
        behind = (every > positions.unsqueeze(-1)).unsqueeze(1)  # (prompts, 1, positions, tokens)
        most = torch.zeros(self.tokens.shape)
        asks = None
        if probes is not None:
            asks = (positions.unsqueeze(-1) == probes.unsqueeze(1)).any(-1)[:, None, :, None]
        state = body.embed_tokens(self.tokens[self._rows, positions])
        rope = self._model.rope[positions]
        for number, layer in enumerate(body.layers[:layers]):
            keys, values = self.keys[number], self.values[number]
            queries, fresh_keys, fresh_values = layer.projected(state, rope)
            keys[self._rows, positions] = fresh_keys
            values[self._rows, positions] = fresh_values
            scale = 1 / math.sqrt(keys.shape[-1])
            weights = torch.einsum("pqhd,pthd->phqt", queries * scale, keys)
            weights = weights.masked_fill_(behind, -math.inf).softmax(-1)
            if asks is not None and number in looked_at:
                most = torch.maximum(most, (weights * asks).amax((1, 2)))
            attended = torch.einsum("phqt,pthd->pqhd", weights, values)
            state = layer.finished(state, attended)
        return state, most


class OnePrompt:
    """The `Scorer` of a prompt that is alone."""

    def __init__(self, prompts: BlendedPrompts) -> None:
        self._prompts = prompts

    def run(self, step: Step) -> Scores:
        return self._prompts.run([step])[0]


def blend(
    prompts: BlendedPrompts, plan: BlendPlan, rule_of: Callable[[int], Rule]
) -> list[Positions]:
    """Run all steps of every prompt, whose *plan* is the same; return what was recomputed of each.

    *rule_of* gives the rule of the prompt with that number; they differ in a seed at most.
    """
    count, tokens = prompts.tokens.shape
    recomputed: list[Positions] = [np.empty(0, np.int64)] * count
    selections = [rule_of(number).select(plan, tokens) for number in range(count)]
    while steps := [each.step for each in selections if each.step is not None]:
        if isinstance(steps[0], Recompute):
            recomputed = [step.positions for step in steps]
        for selection, scores in zip(selections, prompts.run(steps), strict=True):
            selection.advance(scores)
    return recomputed

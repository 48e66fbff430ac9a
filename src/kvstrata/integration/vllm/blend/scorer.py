"""The steps of a rule, run by the engine's model over the engine's cache."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import GroupCoordinator

from kvstrata.blend.attention import most_attention
from kvstrata.blend.plan import Positions
from kvstrata.blend.selection import Recompute, ScoreAttention, ScoreDeviation, Scores, Step
from kvstrata.integration.vllm.blend.nested import NestedForward, Part
from kvstrata.integration.vllm.blend.pages import TokenPages
from kvstrata.integration.vllm.blend.taps import QueryTaps

__all__ = ["Prompt", "StepRunner"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's tokens and where their KV is, up to its last device block and a scratch one."""

    tokens: torch.Tensor  # (n,) ids
    device_blocks: torch.Tensor  # int32

    def part(self, positions: torch.Tensor) -> Part:
        return Part(self.tokens[positions], positions, self.device_blocks)


class StepRunner:
    """A ``Scorer`` of any prompt. All ranks must run the same steps in the same order."""

    def __init__(
        self,
        nested: NestedForward,
        layers: list[TokenPages],
        attention: list[Any],
        taps: QueryTaps,
        scored: tuple[int, ...],
        ranks: GroupCoordinator,
    ) -> None:
        """*taps*: of *attention*; *scored*: the numbers of the layers whose attention counts."""
        self._nested = nested
        self._layers = layers
        self._attention = attention
        self._scored = scored
        self._ranks = ranks
        self._taps = taps

    def run(self, prompt: Prompt, step: Step) -> Scores:
        positions = torch.from_numpy(step.positions)
        match step:
            case Recompute():
                with self._taps.until(len(self._layers) - 1, wanted=()):  # the state is nobody's
                    self._nested.run([prompt.part(positions)])
                return np.empty(0, np.float32)
            case ScoreAttention(probes=probes):
                return self._attention_scores(prompt, positions, torch.from_numpy(probes))
            case ScoreDeviation(layer=layer):
                return self._deviation(prompt, positions, layer)

    @torch.inference_mode()
    def predict(self, prompt: Prompt, positions: Positions) -> Scores | None:
        """Recompute *positions*; logits (vocabulary,) of what follows, None on some ranks."""
        hidden = self._nested.run([prompt.part(torch.from_numpy(positions))])
        logits = self._nested.model.compute_logits(hidden[-1:])
        if logits is None:
            return None
        found: Scores = logits[0].float().cpu().numpy()
        return found

    def _attention_scores(
        self, prompt: Prompt, positions: torch.Tensor, probes: torch.Tensor
    ) -> Scores:
        with self._taps.until(self._scored[-1], wanted=self._scored) as queries:
            self._nested.run([prompt.part(positions)])
        rows = torch.searchsorted(positions, probes)
        scores = torch.zeros(len(prompt.tokens))
        if len(probes):
            for number, query in queries.items():
                theirs = self._most_attention(number, query[rows], probes, prompt)
                scores[: len(theirs)] = torch.maximum(scores[: len(theirs)], theirs)
        return self._over_ranks(scores, torch.distributed.ReduceOp.MAX)

    def _most_attention(
        self, number: int, query: torch.Tensor, probes: torch.Tensor, prompt: Prompt
    ) -> torch.Tensor:
        """What each token up to the last probe gets at most of one probe, in one head."""
        layer = self._attention[number]
        keys = self._layers[number].read_keys(prompt.device_blocks)
        query = query.view(len(query), -1, layer.head_size)
        return most_attention(query, keys[: int(probes[-1]) + 1], probes, layer.impl.scale).cpu()

    def _deviation(self, prompt: Prompt, positions: torch.Tensor, layer: int) -> Scores:
        before = self._read(prompt, positions, layer)
        with self._taps.until(layer, wanted=()):
            self._nested.run([prompt.part(positions)])
        scores = torch.zeros(len(prompt.tokens))
        for old, new in zip(before, self._read(prompt, positions, layer), strict=True):
            scores[positions] += (new.float() - old.float()).square().sum((1, 2)).cpu()
        return self._over_ranks(scores, torch.distributed.ReduceOp.SUM)

    def _read(self, prompt: Prompt, positions: torch.Tensor, layer: int) -> list[torch.Tensor]:
        return [part[positions] for part in self._layers[layer].read_blocks(prompt.device_blocks)]

    def _over_ranks(self, scores: torch.Tensor, operation: Any) -> Scores:
        if self._ranks.world_size > 1:
            torch.distributed.all_reduce(scores, operation, group=self._ranks.cpu_group)
        found: Scores = scores.numpy()
        return found

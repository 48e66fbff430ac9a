"""The steps of a rule, run by the engine's model over the engine's cache."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed.parallel_state import GroupCoordinator

from kvstrata.blend.attention import most_attention
from kvstrata.blend.plan import Positions
from kvstrata.blend.selection import Recompute, ScoreAttention, ScoreDeviation, Scores, Step
from kvstrata.integration.vllm.blend.nested import NestedForward, Part
from kvstrata.integration.vllm.blend.pages import TokenPages
from kvstrata.integration.vllm.blend.taps import AttentionTaps
from kvstrata.integration.vllm.reach import Reach

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

__all__ = ["Prompt", "StepRunner"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's tokens and where their KV is, up to its last device block and a scratch one."""

    tokens: torch.Tensor  # (n,) ids
    device_blocks: torch.Tensor  # int32

    def part(self, positions: torch.Tensor) -> Part:
        return Part(self.tokens[positions], positions, self.device_blocks)


class StepRunner:
    """Runs steps of several prompts in one forward. All ranks must do the same in the same order."""

    def __init__(
        self,
        nested: NestedForward,
        layers: list[TokenPages],
        attention: list["Attention"],
        taps: AttentionTaps,
        ranks: GroupCoordinator,
    ) -> None:
        """*taps*: of *attention*."""
        self._nested = nested
        self._layers = layers
        self._attention = attention
        self._ranks = ranks
        self._taps = taps

    @property
    def most_tokens(self) -> int:
        """Of a forward: those of a step of the engine, which has set memory aside for them."""
        return self._nested.most_tokens

    @property
    def layers(self) -> int:
        """Of the model."""
        return len(self._layers)

    def layers_of(self, step: Step) -> int:
        """How many of them a token of *step* goes through."""
        match step:
            case Recompute():
                return self.layers
            case ScoreAttention(layers=looked_at):
                return looked_at[-1] + 1
            case ScoreDeviation(layer=last):
                return last + 1

    def run(self, prompts: Sequence[Prompt], steps: Sequence[Step]) -> list[Scores]:
        """Run a step of each of *prompts*, all of one kind (`same_kind`); the scores of each."""
        positions = [torch.from_numpy(step.positions) for step in steps]
        match steps[0]:
            case Recompute():
                self._forward(prompts, positions, len(self._layers) - 1)  # the state is nobody's
                return [np.empty(0, np.float32) for _ in steps]
            case ScoreAttention(layers=looked_at):
                probes = [
                    torch.from_numpy(s.probes) for s in steps if isinstance(s, ScoreAttention)
                ]
                return self._attention_scores(prompts, positions, probes, looked_at)
            case ScoreDeviation(layer=layer):
                return self._deviations(prompts, positions, layer)

    @torch.inference_mode()
    def predict(self, prompt: Prompt, positions: Positions) -> Scores | None:
        """Recompute *positions*; logits (vocabulary,) of what follows, None on some ranks."""
        hidden = self._nested.run([prompt.part(torch.from_numpy(positions))])
        logits = self._nested.logits(hidden[-1:])
        if logits is None:
            return None
        found: Scores = logits[0].float().cpu().numpy()
        return found

    def _forward(
        self,
        prompts: Sequence[Prompt],
        positions: Sequence[torch.Tensor],
        last_layer: int,
        wanted: Sequence[int] = (),
    ) -> dict[int, torch.Tensor]:
        """Up to *last_layer*; the queries of the *wanted* layers, prompt after prompt."""
        with self._taps.until(last_layer, wanted=wanted) as queries:
            self._nested.run([p.part(each) for p, each in zip(prompts, positions, strict=True)])
        return queries

    def _attention_scores(
        self,
        prompts: Sequence[Prompt],
        positions: Sequence[torch.Tensor],
        probes: Sequence[torch.Tensor],
        layers: tuple[int, ...],
    ) -> list[Scores]:
        queries = self._forward(prompts, positions, layers[-1], layers)
        scores = [torch.zeros(len(prompt.tokens)) for prompt in prompts]
        with self._over_ranks(scores, torch.distributed.ReduceOp.MAX):
            for number, query in queries.items():
                theirs = query.split([len(each) for each in positions])
                for i, prompt in enumerate(prompts):
                    rows = torch.searchsorted(positions[i], probes[i])
                    first, most = self._most_attention(number, theirs[i][rows], probes[i], prompt)
                    reached = scores[i][first : first + len(most)]
                    torch.maximum(reached, most, out=reached)
        return [each.numpy() for each in scores]

    def _most_attention(
        self, number: int, query: torch.Tensor, probes: torch.Tensor, prompt: Prompt
    ) -> tuple[int, torch.Tensor]:
        """What each token gets at most of one probe, in one head.

        From the first token on that is returned, which is before all that the probes reach, up to
        the last probe.
        """
        if not len(probes):
            return 0, torch.empty(0)
        layer, pages = self._attention[number], self._layers[number]
        reach = Reach(layer.sliding_window)
        first = reach.first_needed(int(probes[0])) // pages.tokens
        last = int(probes[-1])
        keys = pages.read_multiplied(prompt.device_blocks[first : last // pages.tokens + 1])
        first *= pages.tokens
        most = most_attention(
            self._taps.multiplied(number, query),
            keys[: last + 1 - first],
            probes - first,
            layer.impl.scale,
            reach.window,
        )
        return first, most.cpu()

    def _deviations(
        self, prompts: Sequence[Prompt], positions: Sequence[torch.Tensor], layer: int
    ) -> list[Scores]:
        before: list[list[torch.Tensor]] = []
        problem = None
        try:
            before += [self._read(p, at, layer) for p, at in zip(prompts, positions, strict=True)]
        except Exception as e:  # noqa: BLE001 - raised below: the others are in the forward by now
            problem = e
        self._forward(prompts, positions, layer)
        scores = [torch.zeros(len(prompt.tokens)) for prompt in prompts]
        with self._over_ranks(scores, torch.distributed.ReduceOp.SUM):
            if problem is not None:
                raise problem
            for i, prompt in enumerate(prompts):
                after = self._read(prompt, positions[i], layer)
                for was, now in zip(before[i], after, strict=True):
                    changes = (now.float() - was.float()).square().sum((1, 2))
                    scores[i][positions[i]] += changes.cpu()
        return [each.numpy() for each in scores]

    def _read(self, prompt: Prompt, positions: torch.Tensor, layer: int) -> list[torch.Tensor]:
        return [part[positions] for part in self._layers[layer].read_blocks(prompt.device_blocks)]

    @contextmanager
    def _over_ranks(self, scores: Sequence[torch.Tensor], operation: Any) -> Iterator[None]:
        """*scores*, filled within with those of this rank, become those of all.

        Also a rank that fails to fill them takes part: the others wait for it.
        """
        try:
            yield
        finally:
            if self._ranks.world_size > 1:
                for each in scores:
                    torch.distributed.all_reduce(each, operation, group=self._ranks.cpu_group)

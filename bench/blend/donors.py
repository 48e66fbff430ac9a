"""Where the documents of a prompt were seen before, and the prompt with the KV that they had there."""

from typing import Final, Literal, NamedTuple, get_args

import numpy as np
import torch
from bench.blend.model import Llama
from bench.blend.scorer import BlendedPrompts
from bench.blend.task import BOS, DOCUMENT_TOKENS, QUESTIONS, make_prompts

from kvstrata.blend.plan import BlendPlan, ReusedRuns
from kvstrata.blend.position import PositionCorrector

__all__ = ["DONORS", "Before", "Donors", "seen_before"]

Donors = Literal["isolated", "contextual"]
DONORS: Final[tuple[Donors, ...]] = get_args(Donors)
"""isolated: each document alone behind BOS. contextual: behind one to four others, not of the
prompt."""

EXACT_TOKENS: Final = 1 + DOCUMENT_TOKENS  # BOS and the first document
FOREIGN: Final = 4  # documents at most before one that is contextual


class Before(NamedTuple):
    """What is known of some prompts before they are blended; all have the same plan."""

    exact: BlendedPrompts  # wholly computed
    full_logits: torch.Tensor  # of the questions: (prompts, QUESTIONS, answers)
    stored: BlendedPrompts  # exact prefix, and the documents' KV as it was at its old place
    plan: BlendPlan

    def reused(self, model: Llama, *, corrected: bool) -> BlendedPrompts:
        """A copy of what is stored, with the keys moved to their positions if *corrected*."""
        prompts = BlendedPrompts(model, self.stored.tokens)
        prompts.keys.copy_(self.stored.keys)
        prompts.values.copy_(self.stored.values)
        if corrected:
            dim = model.shape.head_dim
            corrector = PositionCorrector(model.rope, rotary_dim=dim, is_neox=True)
            start, length, delta, _ = self.plan.runs
            targets = self.plan.runs.tokens()
            sources = targets - np.repeat(delta, length)
            window = prompts.keys[:, :, start[0] : start[0] + len(targets)]
            by_token = window.movedim(2, 0)
            rotation = corrector.rotation(sources, targets)
            moved = rotation.apply(by_token.flatten(1, 3))
            window.copy_(moved.view(by_token.shape).movedim(0, 2))
        return prompts


def seen_before(
    model: Llama, tokens: torch.Tensor, donors: Donors, rng: np.random.Generator
) -> Before:
    """Compute prompts wholly, and each document but the first as *donors* say.

    Args:
        tokens: Of `make_prompts`, int64 (prompts, tokens).
        rng: Draws the foreign documents.
    """
    exact = BlendedPrompts(model, tokens)
    end = tokens.shape[1] - QUESTIONS
    full_logits = exact.compute(0, tokens.shape[1])[:, end:]
    stored = BlendedPrompts(model, tokens)
    stored.keys[:, :, :EXACT_TOKENS] = exact.keys[:, :, :EXACT_TOKENS]
    stored.values[:, :, :EXACT_TOKENS] = exact.values[:, :, :EXACT_TOKENS]
    starts = np.arange(EXACT_TOKENS, end, DOCUMENT_TOKENS)
    sources = np.empty_like(starts)
    for number, start in enumerate(starts.tolist()):
        there = slice(start, start + DOCUMENT_TOKENS)
        before = _context(donors, len(tokens), rng)
        donor = BlendedPrompts(model, torch.cat((before, tokens[:, there]), 1))
        donor.compute(0, donor.tokens.shape[1])
        stored.keys[:, :, there] = donor.keys[:, :, before.shape[1] :]
        stored.values[:, :, there] = donor.values[:, :, before.shape[1] :]
        sources[number] = before.shape[1]
    runs = ReusedRuns(
        start=starts,
        length=np.full_like(starts, DOCUMENT_TOKENS),
        delta=starts - sources,
        exact=np.zeros(len(starts), np.bool_),
    )
    plan = BlendPlan.of_runs(
        runs, prompt_tokens=tokens.shape[1], block_tokens=1, exact_end=EXACT_TOKENS
    )
    return Before(exact, full_logits, stored, plan)


def _context(donors: Donors, prompts: int, rng: np.random.Generator) -> torch.Tensor:
    """What stood before a document: (prompts, tokens)."""
    if donors == "isolated":
        return torch.full((prompts, 1), BOS)
    foreign = make_prompts(rng, prompts, int(rng.integers(1, FOREIGN + 1)))
    return torch.from_numpy(foreign.tokens[:, :-QUESTIONS])

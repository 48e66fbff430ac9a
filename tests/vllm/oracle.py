"""What the answers must be: the tokens of vLLM alone, and a model of what can be reused."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tests.vllm.engine import BLOCK_SIZE, Answer, Ask, Engine

VOCABULARY = 1024
SAME_NATS = 1e-6


class Oracle:
    """vLLM without KVStrata. Remembers its answers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[tuple[int, ...], list[int]] = {}

    def tokens(self, asks: Iterable[Ask]) -> dict[str, list[int]]:
        """The right continuation of each, by request id."""
        asks = list(asks)
        longest: dict[tuple[int, ...], int] = {}
        for ask in asks:
            longest[ask.prompt] = max(ask.new_tokens, longest.get(ask.prompt, 0))
        unknown = [
            Ask(f"oracle-{i}", prompt, count)
            for i, (prompt, count) in enumerate(longest.items())
            if len(self._known.get(prompt, [])) < count
        ]
        answers = self._engine.run(unknown) if unknown else {}
        self._known |= {ask.prompt: answers[ask.id].tokens for ask in unknown}
        return {ask.id: self._known[ask.prompt][: ask.new_tokens] for ask in asks}

    def check(
        self, asks: Iterable[Ask], answers: Mapping[str, Answer], *, aborted: Iterable[str] = ()
    ) -> None:
        """Every request has completed with the right tokens, an *aborted* one as far as it came."""
        asks, aborted = list(asks), set(aborted)
        for id, right in self.tokens(asks).items():
            if id in aborted:
                tokens = answers[id].tokens if id in answers else []
                assert tokens == right[: len(tokens)], id
            else:
                assert (answers[id].tokens, answers[id].finish_reason) == (right, "length"), id

    def check_distributions(self, asks: Iterable[Ask], answers: Mapping[str, Answer]) -> float:
        """As ``check``, and every token was chosen of the right distribution, up to rounding.

        Of requests that want logits. The largest divergence, in nats.
        """
        asks = list(asks)
        alone = [
            replace(ask, id=f"oracle-{i}", at_step=0, transfer=None) for i, ask in enumerate(asks)
        ]
        known, most = self._engine.run(alone), 0.0
        for ask, one in zip(asks, alone, strict=True):
            found, right = answers[ask.id], known[one.id]
            assert (found.tokens, found.finish_reason) == (right.tokens, "length"), ask.id
            divergence = _divergence(right.logits, found.logits)
            assert divergence.shape == (ask.new_tokens,), ask.id
            most = max(most, float(divergence.max()))
            assert most <= SAME_NATS, ask.id
        return most


def _divergence(
    right: Sequence[Sequence[float]], found: Sequence[Sequence[float]]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Kullback and Leibler's, of each token."""
    logs = []
    for logits in (np.array(right), np.array(found)):
        shifted = logits - logits.max(1, keepdims=True)
        logs.append(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))
    divergence: np.ndarray[Any, np.dtype[np.float64]]
    divergence = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(1)
    return divergence


class ReuseModel:
    """Which tokens a cache of whole blocks can give back: a set of all prefixes it was shown."""

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._blocks: set[tuple[int, ...]] = set()

    def computed(self, tokens: Sequence[int]) -> None:
        """The keys and values of *tokens* have been computed, and saved as far as blocks go."""
        step = self._tokens_per_block
        for end in range(step, len(tokens) + 1, step):
            self._blocks.add(tuple(tokens[:end]))

    def answered(self, prompt: Sequence[int], answer: Answer) -> None:
        """The last token of *answer* was sampled and never an input: it has no key and value."""
        self.computed([*prompt, *answer.tokens[:-1]])

    def reusable(self, prompt: Sequence[int]) -> int:
        """Tokens at the start of *prompt* that need not be computed."""
        step = self._tokens_per_block
        end = 0
        while end + step <= len(prompt) and tuple(prompt[: end + step]) in self._blocks:
            end += step
        return end


def loaded_at_once(prompt_tokens: int, reusable_tokens: int) -> int:
    """What is loaded of them in the step that runs the prompt, and computes its last token."""
    return min(reusable_tokens, (prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE)


def random_prompt(rng: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(tokens))


def random_prompts(
    rng: random.Random, count: int, *, most_tokens: int, documents: int = 4
) -> list[tuple[int, ...]]:
    """Prompts that share prefixes of any length with each other, and some that share nothing."""
    library = [random_prompt(rng, most_tokens) for _ in range(documents)]
    prompts = []
    for _ in range(count):
        own = random_prompt(rng, rng.choice((1, 31, 33, rng.randrange(1, most_tokens))))
        shared = rng.choice((0, 32, 64, rng.randrange(most_tokens), most_tokens))
        prompts.append((rng.choice(library)[:shared] + own)[:most_tokens])
    return prompts

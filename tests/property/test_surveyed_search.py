"""Prompts put together from pieces of a few documents, searched as long prompts are."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.property.brute_sources import BruteSource, BruteSources
from tests.property.test_source_index_machine import BLOCK, DOMAINS, GRID, as_list

from kvstrata.blend.fingerprints import Fingerprints
from kvstrata.blend.source_index import SourceIndex

Prompt = list[int]


@pytest.fixture(autouse=True, scope="module")
def _short_prompts_are_long() -> Iterator[None]:
    """First some windows are looked up, then those around the runs that they found."""
    with pytest.MonkeyPatch.context() as patch:
        for name, windows in (("FIRST_WINDOWS", 0), ("SURVEYED_WINDOWS", 0), ("STRIDE", 2)):
            patch.setattr(f"kvstrata.blend.search._{name}", windows)
        yield


class Traffic:
    """An index and a comparison of everything, given the same."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.letters = rng.choice((2, 3, 8))
        capacity = rng.choice((60, 200, 600))
        prints = Fingerprints(GRID, bytes(range(24)))
        self.index = SourceIndex(prints, tokens_per_block=BLOCK, capacity_tokens=capacity)
        self.brute = BruteSources(GRID, BLOCK, capacity)
        self.documents = [self.text(rng.randrange(3, 60)) for _ in range(5)]
        self.blocks = 0

    def text(self, tokens: int) -> Prompt:
        return [self.rng.randrange(self.letters) for _ in range(tokens)]

    def prompt(self) -> Prompt:
        prompt: Prompt = []
        while len(prompt) < self.rng.randrange(10, 200):
            document = self.rng.choice(self.documents)
            start = self.rng.randrange(len(document))
            piece = document[start : self.rng.randrange(start, len(document) + 1)]
            if piece and self.rng.random() < 0.3:
                piece[self.rng.randrange(len(piece))] = self.rng.randrange(self.letters)
            prompt += piece + self.text(self.rng.randrange(4))
        return prompt

    def add(self) -> None:
        tokens, domain = self.prompt(), self.rng.choice(DOMAINS)
        position, generation = self.rng.randrange(9), self.rng.randrange(2)
        blocks = -(-(position + len(tokens)) // BLOCK) - position // BLOCK
        keys = [number.to_bytes(32, "big") for number in range(self.blocks, self.blocks + blocks)]
        self.blocks += blocks
        added = self.index.add(domain, np.array(tokens, np.uint32), position, keys, generation)
        assert added == self.brute.add(BruteSource(domain, tokens, position, keys, generation))

    def match(self) -> None:
        tokens, domain = self.prompt(), self.rng.choice(DOMAINS)
        first = self.rng.randrange(len(tokens) // 2 + 1)
        last = self.rng.randrange(first, len(tokens) + 1)
        runs = as_list(self.index.match(domain, np.array(tokens, np.uint32), first, last))
        assert runs == self.brute.match(domain, tokens, first, last)

    def forget(self) -> None:
        keys = [key for source in self.brute.sources for key in source.keys]
        lost = [self.rng.choice(keys)] if keys else []
        assert self.index.forget(lost) == self.brute.forget(lost)


@given(seed=st.integers(0, 1 << 32))
def test_a_survey_changes_nothing_of_what_is_found(seed: int) -> None:
    traffic = Traffic(random.Random(seed))
    for _ in range(30):
        step = traffic.rng.choices((traffic.add, traffic.match, traffic.forget), weights=(5, 4, 1))
        step[0]()

"""Random prompts of few different tokens: the source index against a comparison of everything."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.machines import machine_settings
from tests.property.brute_sources import BruteRun, BruteSource, BruteSources

from kvstrata.blend.fingerprints import Fingerprints, Prints, Tokens
from kvstrata.blend.runs import Runs
from kvstrata.blend.source_index import SourceIndex

GRID, BLOCK, CAPACITY = 3, 4, 40
DOMAINS = (b"", b"tenant")
NOBODYS_KEY = b"\xff" * 32

domains = st.sampled_from(DOMAINS)
prompts = st.lists(st.integers(0, 2), max_size=24)


class WeakFingerprints(Fingerprints):
    """Four different ones."""

    def rolling(self, tokens: Tokens, seed: np.uint32) -> Prints:
        return super().rolling(tokens, seed) & np.uint64(3 << 62)

    def grid(self, tokens: Tokens, seed: np.uint32) -> Prints:
        return super().grid(tokens, seed) & np.uint64(3 << 62)


def as_list(runs: Runs) -> list[BruteRun]:
    arrays = (runs.start, runs.length, runs.delta, runs.generation, runs.skip)
    numbers: list[list[int]] = [array.tolist() for array in arrays]
    keys = [row.tobytes() for row in runs.keys]
    bounds = runs.key_offsets.tolist()
    return [
        BruteRun(start, length, delta, generation, tuple(keys[first:last]), skip)
        for (start, length, delta, generation, skip), first, last in zip(
            zip(*numbers, strict=True),
            bounds,
            bounds[1:],
            strict=False,
        )
    ]


class SourceIndexMachine(RuleBasedStateMachine):
    """Without collisions, all that it finds is known beforehand."""

    fingerprints: type[Fingerprints] = Fingerprints
    foreseen = True

    def __init__(self) -> None:
        super().__init__()
        print_maker = self.fingerprints(GRID, bytes(range(24)))
        self.index = SourceIndex(print_maker, tokens_per_block=BLOCK, capacity_tokens=CAPACITY)
        self.brute = BruteSources(GRID, BLOCK, CAPACITY)
        self.donors: dict[bytes, tuple[bytes, list[int], int, int]] = {}  # of each block's key
        self.gone: set[bytes] = set()

    @rule(
        domain=domains,
        tokens=prompts,
        position=st.integers(0, 9),
        generation=st.integers(0, 1),
    )
    def add(self, domain: bytes, tokens: list[int], position: int, generation: int) -> None:
        first, end = position // BLOCK, -(-(position + len(tokens)) // BLOCK)
        keys = [
            (len(self.donors) + n).to_bytes(32, "big") for n in range(end - first if tokens else 0)
        ]
        for block, key in enumerate(keys, start=first):
            self.donors[key] = (domain, [-1] * position + tokens, block * BLOCK, generation)
        added = self.index.add(domain, np.array(tokens, np.uint32), position, keys, generation)
        if self.foreseen:
            source = BruteSource(domain, tokens, position, keys, generation)
            assert added == self.brute.add(source)

    @rule(domain=domains, tokens=prompts, data=st.data())
    def match(self, domain: bytes, tokens: list[int], data: st.DataObject) -> None:
        first = data.draw(st.integers(0, len(tokens)))
        last = data.draw(st.integers(first, len(tokens)))
        runs = as_list(self.index.match(domain, np.array(tokens, np.uint32), first, last))
        if self.foreseen:
            assert runs == self.brute.match(domain, tokens, first, last)
        position = first
        for run in runs:
            assert run.start >= position
            assert run.length >= GRID
            position = run.start + run.length
            self.check_blocks(run, domain, tokens[run.start : position])
        assert position <= last

    def check_blocks(self, run: BruteRun, domain: bytes, tokens: list[int]) -> None:
        """The blocks of *run* hold its tokens, at the place that it names."""
        assert not set(run.keys) & self.gone
        assert 0 <= run.skip < BLOCK
        assert len(run.keys) == -(-(run.skip + run.length) // BLOCK)
        for row, key in enumerate(run.keys):
            donor_domain, donor, begin, generation = self.donors[key]
            assert (donor_domain, generation) == (domain, run.generation)
            assert begin + run.skip - row * BLOCK == run.start - run.delta
        position = run.start - run.delta
        assert donor[position : position + run.length] == tokens

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        offered = [key for source in self.brute.sources for key in source.keys]
        choice = st.lists(
            st.sampled_from(offered or sorted(self.donors) or [NOBODYS_KEY]), max_size=3
        )
        keys = data.draw(choice)
        lost = self.index.forget(keys)
        self.gone |= set(keys)
        if self.foreseen:
            assert lost == self.brute.forget(keys)

    @rule(domain=st.one_of(st.none(), domains))
    def clear(self, domain: bytes | None) -> None:
        self.index.clear(domain)
        for source in [s for s in self.brute.sources if domain in {None, s.domain}]:
            self.brute.drop(source)

    @invariant()
    def counts_agree(self) -> None:
        counts = self.index.statistics()
        assert counts.tokens <= CAPACITY
        if self.foreseen:
            held = [len(source.tokens) for source in self.brute.sources]
            assert counts[:3] == (len(held), sum(held), len(self.brute.windows))


class WeakIndexMachine(SourceIndexMachine):
    """With four fingerprints most of what they find is wrong, and nothing wrong is given out."""

    fingerprints = WeakFingerprints
    foreseen = False


TestSourceIndexMachine = SourceIndexMachine.TestCase
TestSourceIndexMachine.settings = machine_settings(examples=100, steps=30)
TestWeakIndexMachine = WeakIndexMachine.TestCase
TestWeakIndexMachine.settings = machine_settings(examples=50, steps=30)

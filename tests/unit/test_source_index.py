"""The source index at lengths at which pieces matter; states are tested by a machine."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstrata.blend import sources
from kvstrata.blend.fingerprints import PIECE_WINDOWS, Fingerprints, Prints, Tokens
from kvstrata.blend.print_table import Ids, PrintTable
from kvstrata.blend.runs import Runs
from kvstrata.blend.source_index import BLENDED_GENERATION, SourceIndex
from kvstrata.core.keys import KeyArray

GRID, BLOCK = 64, 16


def tokens(count: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, 50_000, count, dtype=np.uint32)


def keys_for(position: int, count: int, seed: int = 0) -> KeyArray:
    blocks = -(-(position % BLOCK + count) // BLOCK)
    return np.random.default_rng(seed).integers(0, 256, (blocks, 32), dtype=np.uint8)


def new_index(capacity_tokens: int = 1 << 20) -> SourceIndex:
    return SourceIndex(Fingerprints(GRID), tokens_per_block=BLOCK, capacity_tokens=capacity_tokens)


def add(index: SourceIndex, some: Tokens, position: int = 0, seed: int = 0) -> KeyArray:
    keys = keys_for(position, len(some), seed)
    assert index.add(b"", some, position, keys) == len(some)
    return keys


def test_a_document_at_another_offset_is_one_run() -> None:
    index = new_index()
    document = tokens(1000)
    keys = add(index, document, position=37)
    prompt = np.concatenate((tokens(21, 1), document[10:990], tokens(9, 2)))
    runs = index.match(b"", prompt)
    assert (runs.start.tolist(), runs.length.tolist()) == ([21], [980])
    assert runs.delta.tolist() == [21 - 47]
    assert (runs.skip.tolist(), runs.key_offsets.tolist()) == ([15], [0, len(runs.keys)])
    assert (runs.keys == keys[0:63]).all()
    assert (runs.tokens, runs.end.tolist(), len(runs)) == (980, [1001], 1)


def test_every_window_of_the_grid_is_found_at_every_offset() -> None:
    index = new_index()
    document = tokens(2 * GRID)
    add(index, document)
    for before in range(GRID + 1):
        for window in (document[:GRID], document[GRID:]):
            prompt = np.concatenate((tokens(before, 1), window, tokens(5, 2)))
            assert index.match(b"", prompt).start.tolist() == [before]


def test_runs_longer_than_a_piece_stay_whole() -> None:
    index = new_index()
    document = tokens(2 * PIECE_WINDOWS + 1000)
    add(index, document)
    runs = index.match(b"", np.concatenate((tokens(100, 1), document)))
    assert (runs.start.tolist(), runs.length.tolist()) == ([100], [len(document)])


def test_a_run_is_extended_far_to_the_left() -> None:
    """Where another source had the windows, and is gone."""
    index = new_index()
    document = tokens(4000)
    index.add(b"", document, 0, keys_for(0, 3000 + 1000), BLENDED_GENERATION)
    exact = keys_for(0, 3000, seed=1)
    assert index.add(b"", document[:3000], 0, exact) == 3000
    assert index.forget(exact) == 3000
    runs = index.match(b"", document)
    assert (runs.start.tolist(), runs.length.tolist()) == ([0], [4000])


def test_a_run_ends_where_the_next_begins_though_both_sources_go_on() -> None:
    index = new_index()
    first, second, common = tokens(200, 1), tokens(200, 2), tokens(50, 3)
    add(index, np.concatenate((first, common)), seed=1)
    add(index, np.concatenate((common, second)), seed=2)
    runs = index.match(b"", np.concatenate((first, common, second)))
    assert (runs.start.tolist(), runs.length.tolist()) == ([0, 250], [250, 200])
    assert runs.delta.tolist() == [0, 200]


def test_what_another_source_has_taken_over_stays_its_own() -> None:
    index = new_index()
    document = tokens(640)
    blended = keys_for(0, 640, 1)
    index.add(b"", document, 0, blended, BLENDED_GENERATION)
    add(index, document, seed=2)
    assert index.forget(blended) == 640
    assert index.statistics()[:3] == (1, 640, 10)
    assert index.match(b"", document).generation.tolist() == [0]


def test_windows_at_the_seams_of_pieces_are_found() -> None:
    index = new_index(capacity_tokens=1 << 22)
    document = tokens(GRID)
    add(index, document)
    for seam in (4096, 4096 + PIECE_WINDOWS, 4096 + 2 * PIECE_WINDOWS):
        for start in (seam - GRID, seam - GRID + 1, seam - 1, seam):
            prompt = tokens(seam + 2 * GRID, 1)
            prompt[start : start + GRID] = document
            assert index.match(b"", prompt).start.tolist() == [start]


def pieces_of(documents: list[Tokens], count: int, rng: np.random.Generator) -> Tokens:
    """Parts of *documents* in any order, some of them with other tokens between or in them."""
    parts = []
    for _ in range(count):
        document = documents[rng.integers(len(documents))]
        start, end = sorted(rng.integers(0, len(document), 2).tolist())
        part = document[start:end].copy()
        part[rng.random(len(part)) < 0.0005] = 7
        parts += [part, tokens(int(rng.integers(0, 30)), int(rng.integers(1 << 30)))]
    return np.concatenate(parts)


@pytest.mark.parametrize("seed", range(4))
def test_a_long_prompt_has_the_runs_of_a_search_of_every_window(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    documents = [tokens(int(rng.integers(100, 5000)), 100 * seed + n) for n in range(20)]
    index = new_index()
    for number in range(8):
        prompt = pieces_of(documents, 20, rng)
        index.add(b"", prompt, 0, keys_for(0, len(prompt), number), number % 2)
    prompt = pieces_of(documents, 130, rng)
    assert len(prompt) > 1 << 16
    found = index.match(b"", prompt)
    monkeypatch.setattr("kvstrata.blend.search._SURVEYED_WINDOWS", len(prompt))
    wanted = index.match(b"", prompt)
    assert len(wanted) > 100
    for mine, right in zip(found_arrays(found), found_arrays(wanted), strict=True):
        assert np.array_equal(mine, right)


def found_arrays(runs: Runs) -> tuple[NDArray[Any], ...]:
    return runs.start, runs.length, runs.delta, runs.generation, runs.key_offsets, runs.keys


def test_windows_within_a_run_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    index = new_index()
    documents = [tokens(3000, seed) for seed in range(40)]
    for seed, document in enumerate(documents):
        add(index, document, seed=seed)
    looked_up = 0
    find = PrintTable.find

    def counting(table: PrintTable, prints: Prints) -> tuple[NDArray[np.intp], Ids]:
        nonlocal looked_up
        looked_up += len(prints)
        return find(table, prints)

    monkeypatch.setattr(PrintTable, "find", counting)
    runs = index.match(b"", np.concatenate(documents))
    assert (len(runs), runs.tokens) == (40, 120_000)
    assert looked_up < 15_000


def test_what_is_known_is_not_stored_again() -> None:
    index = new_index()
    document = tokens(1000)
    add(index, document)
    prompt = np.concatenate((tokens(200, 1), document, tokens(63, 2)))
    assert index.add(b"", prompt, 0, keys_for(0, len(prompt), 1)) == 200
    assert index.add(b"other", prompt, 0, keys_for(0, len(prompt), 1)) == len(prompt)
    assert index.add(b"", prompt, 0, keys_for(0, len(prompt), 1)) == 0
    assert index.statistics().tokens == 1200 + len(prompt)


def test_exact_kv_takes_the_place_of_blended_and_not_the_other_way() -> None:
    index = new_index()
    document = tokens(500)
    blended, exact = keys_for(0, 500, 1), keys_for(5, 500, 2)
    assert index.add(b"", document, 0, blended, BLENDED_GENERATION) == 500
    assert index.match(b"", document).generation.tolist() == [1]
    assert index.add(b"", document, 5, exact) == 500
    assert index.match(b"", document).generation.tolist() == [0]
    assert index.add(b"", document, 0, blended, BLENDED_GENERATION) == 0


def test_the_source_of_the_run_before_is_preferred_where_it_goes_on() -> None:
    index = new_index()
    document = tokens(640)
    whole, half = keys_for(0, 640, 1), keys_for(0, 384, 2)
    index.add(b"", document, 0, whole, BLENDED_GENERATION)
    assert index.add(b"", document[256:], 0, half) == 384
    assert index.match(b"", document[256:]).delta.tolist() == [0]
    edited = document.copy()
    edited[200] += 1
    runs = index.match(b"", edited)
    assert (runs.start.tolist(), runs.length.tolist()) == ([0, 201], [200, 439])
    assert runs.generation.tolist() == [1, 1]
    assert (runs.keys[runs.key_offsets[1] :] == whole[12:]).all()


def test_what_lay_in_a_block_that_is_gone_is_no_longer_offered() -> None:
    index = new_index()
    document = tokens(1000)
    keys = add(index, document, position=8)
    assert index.forget(keys[30:31]) == 16
    runs = index.match(b"", document)
    assert (runs.start.tolist(), runs.length.tolist()) == ([0, 488], [472, 512])
    assert (runs.keys == np.delete(keys, 30, axis=0)).all()
    assert index.forget(keys[30:31]) == 0
    assert index.forget([]) == 0
    assert index.forget(keys) == 984
    assert index.statistics()[:3] == (0, 0, 0)


def test_what_is_left_of_a_source_goes_first() -> None:
    index = new_index(capacity_tokens=2000)
    old, new = tokens(900, 1), tokens(900, 2)
    add(index, old, seed=1)
    keys = add(index, new, seed=2)
    index.forget(keys[-1:])
    add(index, tokens(300, 3), seed=3)
    assert index.match(b"", new).tokens == 0
    assert index.match(b"", old).tokens == 900


def test_what_was_matched_last_stays() -> None:
    index = new_index(capacity_tokens=1000)
    documents = [tokens(400, n) for n in range(3)]
    add(index, documents[0])
    add(index, documents[1], seed=1)
    index.match(b"", documents[0])
    add(index, documents[2], seed=2)
    assert [index.match(b"", d).tokens for d in documents] == [400, 0, 400]


def test_of_a_piece_longer_than_the_capacity_the_beginning_is_kept() -> None:
    index = new_index(capacity_tokens=300)
    document = tokens(1000)
    assert index.add(b"", document, 0, keys_for(0, 1000)) == 300
    assert index.match(b"", document).length.tolist() == [300]


def test_clearing_a_domain_leaves_the_others() -> None:
    index = new_index()
    document = tokens(200)
    for domain in (b"a", b"b"):
        index.add(domain, document, 0, keys_for(0, 200))
    index.clear(b"a")
    assert [index.match(domain, document).tokens for domain in (b"a", b"b")] == [0, 200]
    index.clear()
    assert index.statistics()[:3] == (0, 0, 0)


@pytest.mark.parametrize("known", [0, 10, 40])
@pytest.mark.parametrize("count", [10_000, 40_000, 160_000])
def test_work_grows_with_the_prompt_and_not_with_what_is_known(
    known: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows that are hashed and looked up, and tokens that are compared."""
    index = new_index()
    documents = [tokens(3000, seed) for seed in range(40)]
    for seed, document in enumerate(documents[:known]):
        add(index, document, seed=seed)
    work = {"hashed": 0, "looked up": 0, "compared": 0}
    rolling, find, agreement = Fingerprints.rolling, PrintTable.find, sources.agreement

    def hashing(prints: Fingerprints, some: Tokens, seed: np.uint32) -> Prints:
        work["hashed"] += len(some)
        return rolling(prints, some, seed)

    def finding(table: PrintTable, prints: Prints) -> tuple[NDArray[np.intp], Ids]:
        work["looked up"] += len(prints)
        return find(table, prints)

    def comparing(*arguments: Any) -> tuple[int, int]:
        left, right = agreement(*arguments)
        work["compared"] += left + right
        return left, right

    monkeypatch.setattr(Fingerprints, "rolling", hashing)
    monkeypatch.setattr(PrintTable, "find", finding)
    monkeypatch.setattr("kvstrata.blend.search.agreement", comparing)
    parts = [piece for n in range(8) for piece in (documents[n], tokens(2000, 100 + n))]
    prompt = np.concatenate(parts * 4)[:count]
    found = index.match(b"", prompt).tokens
    assert (found > 0) == (known > 0)
    assert work["compared"] >= found
    assert max(work.values()) <= 1.5 * count


def test_one_token_again_and_again_is_one_window() -> None:
    index = new_index()
    padding = np.zeros(50_000, np.uint32)
    add(index, padding)
    assert index.statistics().windows == 1
    assert index.match(b"", padding).length.tolist() == [50_000]
    assert index.match(b"", padding[:63]).tokens == 0


class OneFingerprint(Fingerprints):
    """As if somebody could make windows that all have the same."""

    def rolling(self, tokens: Tokens, seed: np.uint32) -> Prints:
        return np.zeros_like(super().rolling(tokens, seed))

    def grid(self, tokens: Tokens, seed: np.uint32) -> Prints:
        return np.zeros_like(super().grid(tokens, seed))


def test_false_hits_are_compared_a_bounded_number_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = 0

    def counting(*arguments: object) -> tuple[int, int]:
        nonlocal compared
        compared += 1
        return 0, 0

    monkeypatch.setattr("kvstrata.blend.search.agreement", counting)
    index = SourceIndex(OneFingerprint(GRID), tokens_per_block=BLOCK, capacity_tokens=1 << 20)
    add(index, tokens(6400))
    assert index.statistics().windows == 1
    assert len(index.match(b"", tokens(200_000, 1))) == 0
    assert compared == 1024


def test_equal_fingerprints_of_other_tokens_are_no_match() -> None:
    index = SourceIndex(OneFingerprint(GRID), tokens_per_block=BLOCK, capacity_tokens=1 << 20)
    add(index, tokens(640))
    runs = index.match(b"", np.concatenate((tokens(200, 1), tokens(640))))
    assert (runs.start.tolist(), runs.length.tolist()) == ([200], [640])
    assert len(index.match(b"tenant", tokens(640))) == 0


@pytest.mark.parametrize(
    ("position", "keys", "generation", "message"),
    [
        (0, 6, 0, "6 keys for 100 tokens from position 0 on, which touch 7 blocks"),
        (15, 7, 0, "which touch 8 blocks"),
        (-1, 7, 0, "position -1"),
        (0, 7, 2, "generation 2"),
    ],
)
def test_what_cannot_be_a_piece_is_refused(
    position: int, keys: int, generation: int, message: str
) -> None:
    index = new_index()
    with pytest.raises(ValueError, match=message):
        index.add(b"", tokens(100), position, [bytes(32)] * keys, generation)
    assert index.statistics().sources == 0


def test_tokens_of_another_type_and_ranges_outside_are_refused() -> None:
    index = new_index()
    with pytest.raises(ValueError, match="tokens of type int64"):
        index.match(b"", np.zeros(10, np.int64))
    with pytest.raises(ValueError, match="tokens 5 to 11 of 10"):
        index.match(b"", tokens(10), 5, 11)
    assert index.add(b"", tokens(0), 3, []) == 0


@pytest.mark.parametrize(("block", "capacity"), [(0, 1000), (16, 63), (16, 1 << 40)])
def test_an_index_that_cannot_be_is_refused(block: int, capacity: int) -> None:
    with pytest.raises(ValueError, match="tokens"):
        SourceIndex(Fingerprints(64), tokens_per_block=block, capacity_tokens=capacity)


def test_statistics_count_what_is_held() -> None:
    index = new_index(capacity_tokens=1 << 16)
    add(index, tokens(6400), position=1)
    counts = index.statistics()
    assert counts[:3] == (1, 6400, 100)
    assert counts.nbytes > 6400 * 4 + 401 * 32


def test_what_remains_of_a_source_is_found_though_another_that_knew_it_goes_too() -> None:
    index = SourceIndex(Fingerprints(3), tokens_per_block=4, capacity_tokens=40)
    first, second = np.array([7, 1, 2, 3, 8, 9, 10], np.uint32), np.arange(1, 7, dtype=np.uint32)
    keys = np.random.default_rng(0).integers(0, 256, (5, 32), dtype=np.uint8)
    assert index.add(b"", first, 3, keys[:3]) == 7
    assert index.add(b"", second, 0, keys[3:]) == 6
    assert index.forget(keys[[0, 3]]) == 7  # of the second nothing as long as a window remains
    runs = index.match(b"", np.array([1, 2, 3], np.uint32))
    assert (runs.start.tolist(), runs.length.tolist()) == ([0], [3])
    assert (runs.keys == keys[1:2]).all()

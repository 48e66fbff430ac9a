"""Chunks of a prompt, and which of their tokens are known."""

import logging

import numpy as np
import pytest

from kvstrata.blend.chunks import Chunk, ChunkAnalyzer, ChunkPart, ChunkType
from kvstrata.blend.runs import Runs
from kvstrata.core.errors import ConfigError

KEYS = [bytes([n]) * 32 for n in range(9)]


def runs(*found: tuple[int, int, int]) -> Runs:
    """Of start, length and position in a source whose blocks of 4 tokens are ``KEYS``."""
    start, length, position = np.array(found, np.int64).reshape(-1, 3).T
    rows = [range(p // 4, (p + n + 3) // 4) for _, n, p in found]
    keys = [KEYS[row] for some in rows for row in some]
    return Runs(
        start=start,
        length=length,
        delta=start - position,
        generation=np.zeros(len(found), np.int8),
        skip=position % 4,
        key_offsets=np.cumsum([0, *map(len, rows)]),
        keys=np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32),
        tokens_per_block=4,
    )


def test_chunks_have_their_parts_and_no_more() -> None:
    chunks = ChunkAnalyzer(chunk_size=8).analyze(30, runs((5, 13, 10)))
    assert chunks == [
        Chunk(
            0,
            8,
            ChunkType.PARTIAL_MATCH,
            (ChunkPart(5, 2, KEYS[2], 2, 10), ChunkPart(7, 1, KEYS[3], 0, 12)),
        ),
        Chunk(
            8,
            16,
            ChunkType.FULL_MATCH,
            (
                ChunkPart(8, 3, KEYS[3], 1, 13),
                ChunkPart(11, 4, KEYS[4], 0, 16),
                ChunkPart(15, 1, KEYS[5], 0, 20),
            ),
        ),
        Chunk(16, 24, ChunkType.PARTIAL_MATCH, (ChunkPart(16, 2, KEYS[5], 1, 21),)),
        Chunk(24, 30, ChunkType.NO_MATCH, ()),
    ]


def test_a_chunk_of_two_runs_is_full_when_all_its_tokens_are_known() -> None:
    full, partial = (
        ChunkAnalyzer(chunk_size=8).analyze(8, runs((0, 3, 0), (at, 8 - at, 20))) for at in (3, 4)
    )
    assert full[0].chunk_type is ChunkType.FULL_MATCH
    assert [part.length for part in full[0].parts] == [3, 4, 1]
    assert partial[0].chunk_type is ChunkType.PARTIAL_MATCH


def test_the_last_chunk_is_full_though_it_is_short() -> None:
    chunks = ChunkAnalyzer(chunk_size=8).analyze(10, runs((8, 2, 0)))
    assert [chunk.chunk_type for chunk in chunks] == [ChunkType.NO_MATCH, ChunkType.FULL_MATCH]
    assert (chunks[1].start_idx, chunks[1].end_idx) == (8, 10)


def test_a_source_may_stand_further_on_than_the_prompt() -> None:
    (chunk,) = ChunkAnalyzer().analyze(5, runs((1, 4, 18)))
    assert chunk.parts == (ChunkPart(1, 2, KEYS[4], 2, 18), ChunkPart(3, 2, KEYS[5], 0, 20))


def test_a_prompt_without_tokens_has_no_chunks() -> None:
    assert ChunkAnalyzer().analyze(0, runs()) == []


def test_a_run_outside_of_the_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="a run ends at 12 of 11 tokens"):
        ChunkAnalyzer().analyze(11, runs((8, 4, 0)))


@pytest.mark.parametrize("ratio", [0, 0.8, 1.0])
def test_a_ratio_is_accepted_explained_and_changes_nothing(
    ratio: float, caplog: pytest.LogCaptureFixture
) -> None:
    known = runs((0, 7, 0))
    with caplog.at_level(logging.INFO):
        chunks = ChunkAnalyzer(8, min_match_ratio=ratio).analyze(8, known)
    assert chunks == ChunkAnalyzer(8).analyze(8, known)
    (line,) = caplog.messages
    assert line.startswith(f"min_match_ratio {ratio} changes nothing")


@pytest.mark.parametrize("ratio", [-0.1, 1.01, float("nan"), float("inf")])
def test_a_ratio_that_cannot_be_is_an_error(ratio: float) -> None:
    with pytest.raises(ConfigError, match=r"min_match_ratio is .*\n.*hint: give a number"):
        ChunkAnalyzer(min_match_ratio=ratio)


def test_chunks_of_no_tokens_are_an_error() -> None:
    with pytest.raises(ConfigError, match="blend_chunk_size is 0"):
        ChunkAnalyzer(chunk_size=0)

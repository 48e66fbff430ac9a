"""Synthetic traces: what they promise, and that a seed says all."""

import gzip
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from kvstrata.replay.formats import Reading, open_trace, sample_path
from kvstrata.replay.generate import MIX, GeneratedRequest, Kind, generate
from kvstrata.replay.reuse import find_reuse
from kvstrata.replay.scan import scan

HOUR_SECONDS = 3600


def write(path: Path, requests: Iterable[GeneratedRequest]) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(request) + b"\n" for request in requests))
    return path


def test_the_sample_is_what_its_command_makes() -> None:
    """``kvstrata make-trace sample.jsonl.gz --requests 2000 --hours 0.5 --seed 1``"""
    shipped = gzip.decompress(sample_path().read_bytes()).splitlines()
    made = generate(2000, seconds=HOUR_SECONDS / 2, seed=1)
    assert shipped == [msgspec.json.encode(request) for request in made]
    assert sample_path().stat().st_size < 300_000


def test_another_seed_gives_another_trace() -> None:
    first, again, other = (list(generate(50, seconds=60, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("kind", [*MIX])
def test_requests_arrive_in_order_and_ids_stand_for_all_tokens(kind: Kind) -> None:
    requests = list(generate(2000, seconds=HOUR_SECONDS, seed=3, mix={kind: 1.0}))
    assert len(requests) == 2000
    assert all(a.timestamp <= b.timestamp for a, b in pairwise(requests))
    assert all(len(r.hash_ids) == -(-r.input_length // 512) for r in requests)
    assert all(r.output_length >= 1 for r in requests)
    assert max(r.input_length for r in requests) < 300_000
    assert 0.5 * HOUR_SECONDS < requests[-1].timestamp / 1000 < 2 * HOUR_SECONDS


def test_an_id_always_stands_behind_the_same_ids() -> None:
    before: dict[int, int | None] = {}
    for request in generate(3000, seconds=HOUR_SECONDS, seed=4):
        above = None
        for block in request.hash_ids:
            assert before.setdefault(block, above) == above
            above = block


@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [("chat", 0.5, 0.9), ("document", 0.5, 0.9), ("agent", 0.8, 0.99), ("single", 0.0, 0.0)],
)
def test_share_of_blocks_that_come_again(
    tmp_path: Path, kind: Kind, least: float, most: float
) -> None:
    requests = generate(3000, seconds=HOUR_SECONDS, seed=5, mix={kind: 2.0})
    trace = open_trace(write(tmp_path / "trace.jsonl", requests), Reading())
    spool = scan(trace, tmp_path)
    share = find_reuse(spool).possible_hits / spool.lookup_blocks
    assert least <= share <= most


def test_mix_is_of_requests() -> None:
    requests = generate(4000, seconds=HOUR_SECONDS, seed=6, mix={"single": 1, "agent": 1})
    seen: set[int] = set()
    alone = 0
    for request in requests:
        alone += request.hash_ids[0] not in seen
        seen.update(request.hash_ids)
    assert 0.45 < alone / 4000 < 0.55

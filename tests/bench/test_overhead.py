"""The arithmetic and the options of bench/overhead.py; no engine."""

from pathlib import Path

import pytest
from bench.overhead import (
    PEER_PROMPT_TOKENS,
    PEERS,
    Batch,
    parse,
    peer_bounds,
    shares,
    table,
    throughput,
    turns,
)
from bench.vllm_hit import Sample, Samples, verdicts


def round_of(number: int, operation: str, none: float, ours: float, **changes: bool) -> list[Batch]:
    """Four batches, each half of the seconds."""
    return [
        Batch(number, operation, name, seconds / 2, 1000, changes.get(f"{name}_ok", True))
        for name, seconds in (("none", none), ("kvstrata", ours))
        for _ in range(2)
    ]


def test_share_is_the_median_of_rounds_and_survives_a_machine_that_slows_down() -> None:
    batches = [
        *round_of(1, "miss", 0.98, 1.0),
        *round_of(2, "miss", 9.8, 10.0),
        *round_of(3, "miss", 0.5, 1.0),
    ]
    (share,) = shares(batches)
    assert share.median == pytest.approx(0.98)
    assert share.total == pytest.approx((0.98 + 9.8 + 0.5) / 12)
    assert share.met
    assert str(share).startswith("met     throughput, miss: 98.0% of no connector's")


@pytest.mark.parametrize(("ours", "met"), [(1.0, True), (1.02, False)])
def test_device_hits_may_cost_one_percent(ours: float, met: bool) -> None:
    (share,) = shares(round_of(1, "device hit", 1.0, ours))
    assert share.met == met
    assert str(share).startswith("met " if met else "NOT met")


def test_round_with_a_batch_that_was_not_as_meant_does_not_count() -> None:
    bad = round_of(2, "miss", 1.0, 9.0, kvstrata_ok=False)
    (share,) = shares([*round_of(1, "miss", 1.0, 1.0), *bad])
    assert (share.rounds, share.median) == (1, 1.0)
    assert shares(bad) == []
    assert shares(round_of(1, "miss", 1.0, 1.0)[:3]) == []


def test_turns_are_a_b_b_a_on_two_sets_of_prompts() -> None:
    assert turns("a", "b") == (("a", 0), ("b", 0), ("b", 1), ("a", 1))


def test_table_has_tokens_a_second() -> None:
    lines = table(round_of(1, "miss", 1.0, 2.0)).splitlines()
    assert lines[2:] == [
        "| miss | none | 2 | 2000 | 2000 |",
        "| miss | kvstrata | 2 | 1000 | 1000 |",
    ]


def test_ahead_of_both_peers_in_all_three() -> None:
    def sample(operation: str, configuration: str, seconds: float) -> Sample:
        return Sample(1, PEER_PROMPT_TOKENS, operation, configuration, 0, seconds, 0, True)

    samples = [sample(op, "kvstrata", 1.0) for op in ("miss", "device hit", "host hit")]
    samples += [sample(op, "lmcache", 1.1) for op in ("miss", "device hit", "host hit")]
    samples += [sample(op, "example", 0.9) for op in ("miss", "device hit", "disk hit")]
    judged = verdicts(Samples(samples), peer_bounds())
    assert [v.met for v in judged] == [True] * 3 + [False] * 3
    assert [v.tokens for v in judged] == [PEER_PROMPT_TOKENS] * 6


class FakeEngine:
    """Knows what it was asked since the last reset, in blocks of 32."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, ...]] = set()

    def batch(self, prompts: list[list[int]], _: int) -> tuple[float, int]:
        known = [p for p in prompts if tuple(p) in self._seen]
        self._seen |= {tuple(p) for p in prompts}
        return 1.0, sum((len(p) - 1) // 32 * 32 for p in known)

    def settle(self) -> None:
        """It is always at rest."""

    def reset(self) -> None:
        self._seen.clear()


def test_batches_miss_first_and_hit_then_and_the_first_round_is_not_counted() -> None:
    options = parse(["--rounds", "2", "--prompts", "3", "--prompt-tokens", "65"])
    engines = {"none": FakeEngine(), "kvstrata": FakeEngine()}
    batches = throughput(engines, options)  # type: ignore[arg-type]  # as much of an engine as is used
    assert {b.round for b in batches} == {1, 2}
    assert all(b.as_meant for b in batches)
    assert [b.operation for b in batches[:8]] == ["miss"] * 4 + ["device hit"] * 4
    assert {b.tokens for b in batches} == {3 * (65 + 32)}
    assert [s.rounds for s in shares(batches)] == [2, 2]


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    quick = parse(["--quick"])
    assert (quick.rounds, quick.repetitions) == (3, 3)
    assert quick.configurations == ["none", "kvstrata", "example"]
    assert parse(["--lmcache", "/x"]).configurations == list(PEERS)
    assert parse(["--lmcache", "/x"]).lmcache == Path("/x")
    with pytest.raises(SystemExit):
        parse(["--configurations", "kvstrata", "lmcache"])
    assert "lmcache needs --lmcache FOLDER" in capsys.readouterr().err

"""The arithmetic and the options of bench/overhead.py; no engine."""

import pytest
from bench.overhead import Batch, parse, shares, table, throughput, turns

from kvstrata.bench.models import Model
from kvstrata.bench.traffic import Answer, Ran, Traffic


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


class FakeMember:
    """Knows what it was asked since the last reset, in blocks of 32."""

    def __init__(self, failure: str | None = None) -> None:
        self._failure = failure
        self._seen: set[tuple[int, ...]] = set()
        self.at_once: list[int] = []

    def run(self, traffic: Traffic) -> Ran:
        self.at_once.append(traffic.users)
        prompts = [tuple(talk.turns[0].tokens) for talk in traffic.conversations]
        known = [(len(p) - 1) // 32 * 32 if p in self._seen else 0 for p in prompts]
        self._seen.update(prompts)
        answers = [
            Answer(number, 0, 65, cached, 0.5, [], 32, self._failure)
            for number, cached in enumerate(known)
        ]
        return Ran(1.0, answers)

    def settle(self) -> None:
        """It is always at rest."""

    def reset(self) -> None:
        self._seen.clear()


MODEL = Model("", "float32", 1024, 6144, 8448, 32, "")


def test_batches_miss_first_and_hit_then_and_the_first_round_is_not_counted() -> None:
    options = parse(["--rounds", "2", "--prompts", "3", "--prompt-tokens", "65"])
    members = {"none": FakeMember(), "kvstrata": FakeMember()}
    batches = throughput(members, MODEL, options, 0)  # type: ignore[arg-type]  # as much of a member as is used
    assert {b.round for b in batches} == {1, 2}
    assert all(b.as_meant for b in batches)
    assert [b.operation for b in batches[:8]] == ["miss"] * 4 + ["device hit"] * 4
    assert [b.configuration for b in batches[:4]] == ["none", "kvstrata", "kvstrata", "none"]
    assert {b.tokens for b in batches} == {3 * (65 + 32)}
    assert {b.seconds for b in batches} == {1.0}
    assert set(members["none"].at_once) == {3}
    assert [s.rounds for s in shares(batches)] == [2, 2]


def test_a_batch_with_an_answer_that_failed_is_not_as_meant() -> None:
    options = parse(["--rounds", "1", "--prompts", "1", "--prompt-tokens", "65"])
    members = {"none": FakeMember(), "kvstrata": FakeMember("no answer in 60 s")}
    batches = throughput(members, MODEL, options, 0)  # type: ignore[arg-type]  # as much of a member as is used
    assert {b.configuration for b in batches if b.as_meant} == {"none"}
    assert shares(batches) == []


def test_rounds_of_the_next_start_of_the_engines_have_numbers_of_their_own() -> None:
    options = parse(["--rounds", "2", "--prompts", "1", "--prompt-tokens", "65"])
    batches = []
    for start in range(2):
        members = {"none": FakeMember(), "kvstrata": FakeMember()}
        batches += throughput(members, MODEL, options, start)  # type: ignore[arg-type]  # as much of a member as is used
    assert {b.round for b in batches} == {1, 2, 3, 4}
    assert [s.rounds for s in shares(batches)] == [4, 4]


def test_options() -> None:
    assert (parse([]).starts, parse([]).rounds) == (4, 5)
    quick = parse(["--quick"])
    assert (quick.starts, quick.rounds) == (1, 3)

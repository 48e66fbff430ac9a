"""Engines, their workers, and slots that somebody may still be writing to."""

import time

import pytest

from kvstrata.manager.sessions import LOCAL_OWNER, Sessions


def test_local_owner_needs_no_workers_and_strangers_get_nothing() -> None:
    sessions = Sessions()
    assert LOCAL_OWNER == 0
    assert sessions.can_transfer(0)
    assert not sessions.can_transfer(1)
    assert not sessions.can_transfer(sessions.add_worker("e", 0))


def test_engine_gets_nothing_before_each_of_its_ranks_has_mapped_the_memory() -> None:
    sessions = Sessions()
    engine = sessions.add_engine("e", 2)
    assert not sessions.can_transfer(engine)
    first = sessions.add_worker("e", 0)
    assert not sessions.can_transfer(engine)
    again = sessions.add_worker("e", 0)
    assert not sessions.can_transfer(engine)
    sessions.add_worker("other", 1)
    assert not sessions.can_transfer(engine)
    sessions.add_worker("e", 1)
    assert sessions.can_transfer(engine)
    sessions.remove(first)
    assert sessions.can_transfer(engine)
    sessions.remove(again)
    assert not sessions.can_transfer(engine)


def test_owner_numbers_are_never_used_twice() -> None:
    sessions = Sessions()
    owners = []
    for _ in range(3):
        owners += [sessions.add_engine("e", 1), sessions.add_worker("e", 0)]
        for owner in owners[-2:]:
            sessions.remove(owner)
    assert owners == [1, 2, 3, 4, 5, 6]


def test_slots_of_a_dead_engine_wait_for_the_last_of_its_workers() -> None:
    sessions = Sessions()
    engine = sessions.add_engine("e", 2)
    workers = [sessions.add_worker("e", 0), sessions.add_worker("e", 1)]
    assert sessions.orphan(engine, {1: [4], 2: [7]}) == []
    assert sessions.remove(engine) == []
    assert sessions.orphaned_slots() == [4, 7]
    assert sessions.remove(workers[0]) == []
    assert sessions.remove(workers[1]) == [4, 7]
    assert sessions.orphaned_slots() == []


def test_worker_of_another_session_frees_and_holds_nothing() -> None:
    sessions = Sessions()
    engine = sessions.add_engine("e", 1)
    other = sessions.add_worker("other", 0)
    mine = sessions.add_worker("e", 0)
    assert sessions.orphan(engine, {1: [3]}) == []
    assert sessions.remove(engine) == []
    assert sessions.remove(other) == []
    assert sessions.remove(mine) == [3]


def test_worker_that_came_after_the_engine_died_holds_nothing() -> None:
    """It was never told of the slots."""
    sessions = Sessions()
    engine = sessions.add_engine("e", 1)
    old = sessions.add_worker("e", 0)
    sessions.orphan(engine, {1: [3]})
    sessions.remove(engine)
    sessions.add_worker("e", 0)
    assert sessions.remove(old) == [3]


def test_slots_of_an_engine_without_workers_are_free_at_once() -> None:
    sessions = Sessions()
    engine = sessions.add_engine("e", 1)
    assert sessions.orphan(engine, {1: [1, 2]}) == [1, 2]
    assert sessions.orphan(0, {1: [5]}) == [5]
    assert sessions.orphaned_slots() == []


def test_two_dead_engines_of_one_session_wait_for_the_same_worker() -> None:
    sessions = Sessions()
    worker = sessions.add_worker("e", 0)
    for slot in (1, 2):
        engine = sessions.add_engine("e", 1)
        assert sessions.orphan(engine, {slot: [slot]}) == []
        assert sessions.remove(engine) == []
    assert sessions.remove(worker) == [1, 2]


def orphaned(sessions: Sessions, life: str, slots: dict[int, list[int]]) -> int:
    """A worker of an engine of *life* whose scheduler is gone, with these slots reserved."""
    engine, worker = sessions.add_engine("e", 1, life), sessions.add_worker("e", 0)
    assert sessions.orphan(engine, slots) == []
    assert sessions.remove(engine) == []
    return worker


def test_scheduler_that_comes_back_frees_what_its_workers_do_not_write_to() -> None:
    sessions = Sessions()
    worker = orphaned(sessions, "a", {1: [10], 2: [20, 21], 3: [30]})
    other = orphaned(sessions, "b", {4: [40]})
    nameless = orphaned(sessions, "", {5: [50]})
    assert sessions.succeed("a", [2, 3, 99]) == [10]
    back = sessions.add_engine("e", 1, "a")
    assert sessions.ended(back, [1, 2, 4, 5]) == [20, 21]
    assert sessions.ended(back, [2]) == []
    assert sessions.orphaned_slots() == [30, 40, 50]
    assert sessions.succeed("a", []) == [30]
    assert [sessions.remove(w) for w in (worker, other, nameless)] == [[], [40], [50]]


def test_only_the_same_life_ends_what_is_left_of_it() -> None:
    sessions = Sessions()
    worker = orphaned(sessions, "a", {1: [10]})
    for stranger in (sessions.add_engine("e", 1, "b"), sessions.add_engine("e", 1), worker, 0, 99):
        assert sessions.ended(stranger, [1]) == []
    assert sessions.succeed("b", []) == []
    assert sessions.remove(worker) == [10]


def test_engines_that_tell_no_life_free_nothing_of_each_other() -> None:
    """Two without one are not the same engine: the workers of the other may still be writing."""
    sessions = Sessions()
    worker = orphaned(sessions, "", {1: [10]})
    stranger = sessions.add_engine("other", 1)
    assert sessions.ended(stranger, [1]) == []
    assert sessions.succeed("", []) == []
    assert sessions.orphaned_slots() == [10]
    assert sessions.remove(worker) == [10]


def test_earlier_connections_are_those_of_the_same_life() -> None:
    sessions = Sessions()
    first, second = sessions.add_engine("e", 1, "a"), sessions.add_engine("e", 1, "a")
    sessions.add_engine("e", 1, "b")
    sessions.add_engine("e", 1)
    assert sessions.earlier("a") == [first, second]
    assert sessions.earlier("") == []


def test_slots_of_a_worker_that_is_gone_are_kept_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connection is gone, its thread may be in the middle of a copy."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    sessions = Sessions(grace_seconds=10)
    engine, worker = sessions.add_engine("e", 1, "a"), sessions.add_worker("e", 0)
    assert sessions.orphan(engine, {1: [10], 2: [20]}) == []
    assert sessions.remove(engine) == []
    now[0] += 60
    assert sessions.expire() == []
    assert sessions.remove(worker) == []
    now[0] += 9
    assert sessions.expire() == []
    assert sessions.succeed("a", [2]) == [10]
    now[0] += 1
    assert sessions.expire() == [20]
    assert sessions.orphaned_slots() == []


def test_slots_are_kept_for_a_while_also_when_the_worker_went_before_its_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    sessions = Sessions(grace_seconds=10)
    engine, worker = sessions.add_engine("e", 1), sessions.add_worker("e", 0)
    assert sessions.remove(worker) == []
    assert sessions.orphan(engine, {1: [10]}) == []
    assert sessions.remove(engine) == []
    now[0] += 10
    assert sessions.expire() == [10]


def test_description_names_engines_with_the_ranks_that_are_there() -> None:
    sessions = Sessions()
    sessions.add_engine("e", 2)
    sessions.add_worker("e", 1)
    sessions.add_worker("other", 0)
    assert sessions.describe() == [
        {"session": "e", "workers": [1], "world_size": 2, "blocks_per_second": None}
    ]

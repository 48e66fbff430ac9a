"""Pins: blocks that an operator keeps from leaving, by their keys or by the name of a request."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.caches import (
    ALICE,
    BLOCK_BYTES,
    BOB,
    PATIENCE_SECONDS,
    config,
    contents,
    eventually,
    keys,
    known,
    load,
    save,
    write,
)

from kvstrata.core.errors import LimitExceeded
from kvstrata.core.types import BlockKey
from kvstrata.manager import pins
from kvstrata.manager.manager import KVManager
from kvstrata.manager.tasks import TaskState, TaskStatus

PROMPT = keys(1, 2, 3, 4)


@pytest.fixture
def manager() -> Iterator[KVManager]:
    """Four blocks of host memory, no disk."""
    with opened(4) as made:
        yield made


@pytest.fixture
def roomy() -> Iterator[KVManager]:
    """Sixteen."""
    with opened(16) as made:
        yield made


@contextmanager
def opened(slots: int, disk: Path | None = None) -> Iterator[KVManager]:
    made = KVManager(config(slots, disk), block_bytes=BLOCK_BYTES)
    try:
        yield made
        made.check()
    finally:
        made.close()


def drained(manager: KVManager) -> None:
    eventually(lambda: manager.stats().tiers[1].waiting_blocks == 0, "blocks wait for the disk")
    assert manager._lower["disk"].drain(PATIENCE_SECONDS)


def asks(manager: KVManager, request: str, asked: Sequence[BlockKey]) -> TaskStatus:
    task = manager.get_match(ALICE, asked, request=request)
    manager.cancel([task.task_id])
    return task


def saves(
    manager: KVManager, request: str, asked: Sequence[BlockKey], parent: BlockKey | None = None
) -> None:
    task = manager.put_match(ALICE, asked, parent=parent, request=request)
    manager.launch([task.task_id])
    write(manager, task, ALICE, asked)
    manager.complete([task.task_id])


def pinned(manager: KVManager) -> set[bytes]:
    """Keys of the blocks with a lease, while no task has any."""
    return {name[len(ALICE) :] for name, leases in known(manager).items() if leases}


# -- by keys -------------------------------------------------------------------------------------


def test_pinned_blocks_stay_until_their_time_is_up(
    manager: KVManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(manager, ALICE, keys(1, 2))
    number, blocks = manager.pin(ALICE, keys(1, 2, 3), 60.0)
    assert (blocks, manager.stats().pinned_blocks) == (2, 2)
    for n in range(10, 20):
        save(manager, ALICE, keys(n))
    assert load(manager, ALICE, keys(1, 2)) == contents(ALICE, keys(1, 2))
    later = time.monotonic() + 61.0
    monkeypatch.setattr(time, "monotonic", lambda: later)
    for n in range(20, 30):
        save(manager, ALICE, keys(n))
        load(manager, ALICE, keys(n))
    assert load(manager, ALICE, keys(1, 2)) == []
    assert not manager.unpin(number)


def test_save_finds_the_room_that_pins_and_leases_have_left_whose_time_is_up(
    manager: KVManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nobody looks anything up."""
    save(manager, ALICE, keys(1, 2))
    manager.pin(ALICE, keys(1), 60.0)
    task = manager.get_match(ALICE, keys(1, 2))
    later = time.monotonic() + 3600.0
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert save(manager, BOB, keys(1, 2, 3, 4)).missing == [0, 1, 2, 3]
    assert load(manager, BOB, keys(1, 2, 3, 4)) == contents(BOB, keys(1, 2, 3, 4))
    assert manager.try_wait([task.task_id])[task.task_id].state is TaskState.CANCELLED


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_pin_for_no_time_or_for_ever_is_refused(manager: KVManager, seconds: float) -> None:
    saves(manager, "r", keys(1))
    with pytest.raises(ValueError, match=f"a pin for {seconds} s"):
        manager.pin(ALICE, keys(1), seconds)
    with pytest.raises(ValueError, match="its time is finite and more than 0"):
        manager.pin_request("r", seconds)
    assert manager.stats().pins == []


def test_each_pin_ends_at_its_own_time(roomy: KVManager, monkeypatch: pytest.MonkeyPatch) -> None:
    save(roomy, ALICE, keys(1))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    long, short, middle = (roomy.pin(ALICE, keys(1), ttl)[0] for ttl in (30.0, 10.0, 20.0))
    expected: list[tuple[float, list[int]]]
    expected = [(9.0, [long, short, middle]), (11.0, [long, middle]), (21.0, [long]), (31.0, [])]
    for seconds, left in expected:
        monkeypatch.setattr(time, "monotonic", lambda at=now + seconds: at)
        assert [pin.number for pin in roomy.stats().pins] == left


def test_pin_can_be_ended(manager: KVManager) -> None:
    save(manager, ALICE, keys(1))
    number, _ = manager.pin(ALICE, keys(1), 60.0)
    assert manager.unpin(number)
    assert not manager.unpin(number)
    assert set(known(manager).values()) == {0}


def test_block_whose_load_failed_is_dropped_though_it_is_pinned(roomy: KVManager) -> None:
    """A pin is no reader: a doubt about bytes is worth more."""
    save(roomy, ALICE, keys(1, 2, 3))
    number, _ = roomy.pin(ALICE, keys(1, 2, 3), 60.0)
    task = roomy.get_match(ALICE, keys(1, 2, 3)).task_id
    roomy.launch([task])
    roomy.complete_part(task, 1)
    assert roomy.stats().pinned_blocks == 1
    assert load(roomy, ALICE, keys(1, 2, 3)) == contents(ALICE, keys(1))
    roomy.check()
    assert roomy.unpin(number)


def test_no_more_than_a_half_can_be_pinned(manager: KVManager) -> None:
    save(manager, ALICE, keys(1, 2, 3, 4))
    assert manager.pin(ALICE, keys(1, 2, 3), 60.0) == (1, 2)
    with pytest.raises(LimitExceeded, match="no more may be pinned: 2 blocks are, in 1 pins"):
        manager.pin(ALICE, keys(1), 60.0)
    assert manager.pin(BOB, keys(1), 60.0) == (0, 0)


def test_reset_ends_the_pins_of_its_namespace(roomy: KVManager) -> None:
    """What nobody can find any more would keep its slots until the time of the pin is up."""
    for namespace in (ALICE, BOB):
        save(roomy, namespace, keys(1, 2))
        roomy.pin(namespace, keys(1, 2), 60.0)
    roomy.reset(ALICE)
    roomy.check()
    report = roomy.stats()
    assert ([pin.number for pin in report.pins], report.tiers[0].used_blocks) == ([2], 2)
    assert not roomy.unpin(1)
    assert load(roomy, BOB, keys(1, 2)) == contents(BOB, keys(1, 2))


def test_number_of_pins_is_bounded(roomy: KVManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "_MOST_PINS", 2)
    save(roomy, ALICE, keys(1))
    assert [roomy.pin(ALICE, keys(1), 60.0) for _ in range(2)] == [(1, 1), (2, 1)]
    with pytest.raises(LimitExceeded, match="in 2 pins, and at most 8 can be"):
        roomy.pin(ALICE, keys(1), 60.0)
    roomy.unpin(1)
    assert roomy.pin(ALICE, keys(1), 60.0) == (3, 1)


def test_report_lists_pins_with_the_time_that_they_have_left(
    roomy: KVManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(roomy, ALICE, keys(1, 2, 3))
    save(roomy, BOB, keys(1))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    roomy.pin(ALICE, keys(1, 2, 3), 60.0)
    roomy.pin(BOB, keys(1), 20.0)
    monkeypatch.setattr(time, "monotonic", lambda: now + 15.0)
    report = roomy.stats()
    assert report.pinned_blocks == 4
    assert [(pin.number, pin.namespace, pin.blocks) for pin in report.pins] == [
        (1, ALICE.hex(), 3),
        (2, BOB.hex(), 1),
    ]
    assert [pin.seconds_left for pin in report.pins] == pytest.approx([45.0, 5.0])
    monkeypatch.setattr(time, "monotonic", lambda: now + 21.0)
    report = roomy.stats()
    assert (report.pinned_blocks, [pin.number for pin in report.pins]) == (3, [1])


# -- by the name of a request --------------------------------------------------------------------


def test_decision_names_the_last_block_found_or_saved(roomy: KVManager) -> None:
    asks(roomy, "r", keys(1, 2))
    saves(roomy, "r", keys(1, 2, 3))
    asks(roomy, "r", keys(1, 2, 3, 4))
    saves(roomy, "r", PROMPT[1:], PROMPT[0])
    last = [each.last_block for each in roomy.explain("r")]
    assert last == ["", PROMPT[2].hex(), PROMPT[2].hex(), PROMPT[3].hex()]


def test_decision_names_the_last_block_that_was_found_also_if_not_all_are_loaded(
    tmp_path: Path,
) -> None:
    with opened(2, tmp_path / "kv") as manager:
        for namespace, path in ((ALICE, (1, 2)), (BOB, (7, 8))):
            save(manager, namespace, keys(*path))
            drained(manager)
        held = manager.get_match(BOB, keys(7))  # leaves no room for both
        task = manager.get_match(ALICE, keys(1, 2, 3), request="r")
        manager.wait([task.task_id], 10.0)
        (decision,) = manager.explain("r")
        assert (decision.taken_blocks, decision.last_block) == (1, PROMPT[1].hex())
        manager.cancel([task.task_id, held.task_id])


def test_save_that_has_no_room_names_the_last_block_that_gets_some(manager: KVManager) -> None:
    task = manager.put_match(ALICE, keys(1, 2, 3, 4, 5, 6), request="r")
    (decision,) = manager.explain("r")
    assert (decision.taken_blocks, decision.last_block) == (4, PROMPT[3].hex())
    manager.cancel([task.task_id])
    held = manager.put_match(ALICE, keys(11, 12, 13, 14))
    assert manager.put_match(ALICE, keys(1), request="s").task_id == 0
    assert [each.last_block for each in manager.explain("s")] == [""]
    manager.cancel([held.task_id])


def test_prompt_of_a_request_is_pinned_from_its_first_block_on(roomy: KVManager) -> None:
    saves(roomy, "r", PROMPT[:2])
    saves(roomy, "r", PROMPT[2:], PROMPT[1])
    assert roomy.pin_request("r", 60.0) == (1, 4)
    assert pinned(roomy) == set(PROMPT)
    asks(roomy, "s", keys(1, 2, 9))
    assert roomy.pin_request("s", 60.0) == (2, 2)
    assert roomy.unpin(1)
    assert pinned(roomy) == set(keys(1, 2))


def test_blocks_that_are_nowhere_are_passed_over(roomy: KVManager) -> None:
    saves(roomy, "r", keys(1, 2))
    running = roomy.put_match(ALICE, PROMPT[2:], parent=PROMPT[1], request="r")
    assert roomy.pin_request("r", 60.0) == (1, 2)
    assert pinned(roomy) == set(keys(1, 2))
    roomy.cancel([running.task_id])


def test_decision_before_counts_when_the_blocks_of_the_latest_have_gone(roomy: KVManager) -> None:
    saves(roomy, "r", keys(1, 2))
    failed = roomy.put_match(ALICE, PROMPT[2:3], parent=PROMPT[1], request="r")
    roomy.launch([failed.task_id])
    roomy.fail([failed.task_id])
    assert roomy.explain("r")[-1].last_block == PROMPT[2].hex()
    assert roomy.pin_request("r", 60.0) == (1, 2)


def test_request_without_blocks_here_pins_nothing(roomy: KVManager) -> None:
    saves(roomy, "r", keys(1))
    asks(roomy, "s", keys(5))
    assert roomy.pin_request("s", 60.0) == (0, 0)
    assert roomy.pin_request("unknown", 60.0) == (0, 0)
    roomy.reset(ALICE)
    assert roomy.pin_request("r", 60.0) == (0, 0)
    assert roomy.stats().pins == []


def test_prompt_longer_than_what_may_be_pinned_is_pinned_from_its_beginning(
    manager: KVManager,
) -> None:
    saves(manager, "r", keys(1, 2, 3, 4))
    assert manager.pin_request("r", 60.0) == (1, 2)
    assert pinned(manager) == set(keys(1, 2))
    with pytest.raises(LimitExceeded, match="no more may be pinned"):
        manager.pin_request("r", 60.0)


def test_request_is_known_by_the_name_that_its_client_has(roomy: KVManager) -> None:
    """The engine lets the number of the prompt and random digits follow."""
    saves(roomy, "cmpl-7-0-12ab34cd", keys(1))
    saves(roomy, "cmpl-7-1-56ef7890", keys(2, 3))
    saves(roomy, "cmpl-70", keys(4))
    assert [each.request for each in roomy.explain("cmpl-7")] == [
        "cmpl-7-0-12ab34cd",
        "cmpl-7-1-56ef7890",
    ]
    assert [each.request for each in roomy.explain("cmpl-7-0")] == ["cmpl-7-0-12ab34cd"]
    assert [each.request for each in roomy.explain("cmpl-70")] == ["cmpl-70"]
    assert roomy.explain("cmpl-7-") == roomy.explain("cmpl") == roomy.explain("c") == []
    assert roomy.pin_request("cmpl-7", 60.0) == (1, 2)
    assert pinned(roomy) == set(keys(2, 3))


def test_name_that_another_goes_on_from_is_its_own(roomy: KVManager) -> None:
    saves(roomy, "chatcmpl-job-1-12ab34cd", keys(1))
    saves(roomy, "chatcmpl-job-1-2-56ef7890", keys(2))
    assert [each.request for each in roomy.explain("chatcmpl-job-1")] == ["chatcmpl-job-1-12ab34cd"]
    assert roomy.pin_request("chatcmpl-job-1", 60.0) == (1, 1)
    assert pinned(roomy) == set(keys(1))


def test_requests_without_a_name_have_none(roomy: KVManager) -> None:
    saves(roomy, "", keys(1))
    assert roomy.explain("") == []
    assert roomy.pin_request("", 60.0) == (0, 0)


def test_only_the_latest_decisions_are_known(roomy: KVManager) -> None:
    saves(roomy, "r", keys(1))
    for _ in range(4095):
        asks(roomy, "s", keys(9))
    assert len(roomy.explain("r")) == 1
    asks(roomy, "s", keys(9))
    assert roomy.explain("r") == []
    assert roomy.pin_request("r", 60.0) == (0, 0)

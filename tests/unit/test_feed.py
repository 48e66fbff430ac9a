"""What followers of a cache are told, when they are woken, and what becomes of one who is slow."""

from collections.abc import Iterator

import pytest
from tests.caches import ALICE, BLOCK_BYTES, BOB, config, keys, save
from tests.mirrors import Mirror, held_by

from kvstrata.manager import feed
from kvstrata.manager.manager import KVManager
from kvstrata.observe.block_changes import Change

PROMPT = keys(1, 2, 3)


@pytest.fixture
def manager() -> Iterator[KVManager]:
    manager = KVManager(config(8), block_bytes=BLOCK_BYTES)
    yield manager
    manager.close()


def quiet() -> None:
    """A follower who will look by himself."""


def test_a_save_is_one_change_in_prompt_order_with_the_block_before(manager: KVManager) -> None:
    follower = manager.feed.follow(ALICE, quiet)
    assert follower.take(4096) == []
    save(manager, ALICE, PROMPT[:1])
    save(manager, ALICE, PROMPT[1:], parent=PROMPT[0])
    assert follower.take(4096) == [
        Change("stored", ALICE, "host", PROMPT[0], None),
        Change("stored", ALICE, "host", PROMPT[1] + PROMPT[2], PROMPT[0]),
    ]
    assert follower.take(4096) == []


def test_what_is_saved_becomes_known_when_its_bytes_are_there(manager: KVManager) -> None:
    follower = manager.feed.follow(ALICE, quiet)
    task = manager.put_match(ALICE, PROMPT)
    manager.launch([task.task_id])
    assert follower.take(4096) == []
    manager.complete_part(task.task_id, 2)
    assert follower.take(4096) == [Change("stored", ALICE, "host", b"".join(PROMPT[:2]), None)]


def test_what_is_evicted_is_told(manager: KVManager) -> None:
    save(manager, ALICE, PROMPT)
    follower = manager.feed.follow(ALICE, quiet)
    mirror = Mirror()
    mirror.hear_all(follower)
    save(manager, ALICE, keys(*range(4, 12)))
    changes = follower.take(4096)
    assert [change.kind for change in changes] == ["removed", "stored"]
    mirror.apply(changes)
    assert mirror.held == held_by(manager, [ALICE])
    assert len(mirror.held) == 8


def test_a_reset_is_one_change(manager: KVManager) -> None:
    save(manager, ALICE, PROMPT)
    follower = manager.feed.follow(ALICE, quiet)
    follower.take(4096)
    manager.reset(ALICE)
    assert follower.take(4096) == [Change("cleared", ALICE)]
    save(manager, ALICE, PROMPT[:1])
    assert follower.take(4096) == [Change("stored", ALICE, "host", PROMPT[0])]


def test_nobody_hears_of_another_namespace(manager: KVManager) -> None:
    follower = manager.feed.follow(ALICE, quiet)
    save(manager, BOB, PROMPT)
    manager.reset(BOB)
    assert follower.take(4096) == []


def test_who_comes_later_is_told_what_there_is(manager: KVManager) -> None:
    save(manager, ALICE, PROMPT)
    save(manager, BOB, PROMPT[:1])
    follower = manager.feed.follow(ALICE, quiet)
    assert follower.take(4096) == [Change("stored", ALICE, "host", b"".join(PROMPT))]
    assert follower.take(4096) == []


def test_who_follows_all_hears_of_a_namespace_once_it_is_registered(manager: KVManager) -> None:
    follower = manager.feed.follow(None, quiet)
    save(manager, ALICE, PROMPT)
    assert follower.take(4096) == []
    manager.register_namespace(ALICE, {"model": "m"})
    assert follower.take(4096) == [Change("stored", ALICE, "host", b"".join(PROMPT))]
    assert manager.feed.model(ALICE) == "m"
    assert manager.feed.model(BOB) is None
    manager.register_namespace(ALICE, {"model": "m"})
    assert follower.take(4096) == []


def test_what_there_is_is_told_once(manager: KVManager) -> None:
    follower = manager.feed.follow(None, quiet)
    save(manager, ALICE, PROMPT)
    manager.register_namespace(ALICE, {"model": "m"})
    late = manager.feed.follow(ALICE, quiet)
    save(manager, ALICE, keys(7))
    for each in (follower, late):
        assert each.take(4096) == [
            Change("stored", ALICE, "host", b"".join(PROMPT)),
            Change("stored", ALICE, "host", keys(7)[0]),
        ]
        assert each.take(4096) == []


def test_one_who_waits_is_woken_once_and_by_his_own_news_alone(manager: KVManager) -> None:
    calls: list[int] = []
    follower = manager.feed.follow(ALICE, lambda: calls.append(1))
    assert not calls  # has not looked yet
    assert follower.take(4096) == []
    save(manager, BOB, PROMPT)
    assert not calls
    save(manager, ALICE, PROMPT[:1])
    save(manager, ALICE, PROMPT[1:2], parent=PROMPT[0])
    assert calls == [1]
    follower.take(4096)
    save(manager, ALICE, PROMPT[2:], parent=PROMPT[1])
    assert calls == [1]  # has not looked again since
    follower.close()


def test_one_who_falls_behind_is_told_that_all_is_void_and_what_there_is(
    manager: KVManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "_MOST_BLOCKS", 2)
    follower = manager.feed.follow(ALICE, quiet)
    save(manager, ALICE, PROMPT[:1])
    save(manager, ALICE, PROMPT[1:], parent=PROMPT[0])
    assert len(manager.feed._log) == 1
    assert follower.take(4096) == [
        Change("cleared", ALICE),
        Change("stored", ALICE, "host", b"".join(PROMPT)),
    ]


def test_one_who_waits_does_not_fall_behind_by_what_is_not_for_him(
    manager: KVManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "_MOST_BLOCKS", 2)
    follower = manager.feed.follow(ALICE, quiet)
    assert follower.take(4096) == []
    save(manager, BOB, PROMPT)
    assert follower.take(4096) == []
    save(manager, BOB, keys(7, 8, 9))
    save(manager, ALICE, PROMPT[:1])
    assert follower.take(4096) == [Change("stored", ALICE, "host", PROMPT[0])]


def test_the_log_is_bounded_in_changes_too(
    manager: KVManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "_MOST_CHANGES", 3)
    manager.feed.follow(ALICE, quiet)
    for number in range(6):
        save(manager, ALICE, keys(number))
    assert len(manager.feed._log) == 3


def test_long_runs_come_in_pieces_that_say_what_they_follow() -> None:
    count = 2 * feed.CHANGE_BLOCKS + 5
    manager = KVManager(config(count), block_bytes=BLOCK_BYTES)
    prompt = keys(*range(3)) + [bytes([i % 256, i // 256]) + bytes(30) for i in range(count - 3)]
    early = manager.feed.follow(ALICE, quiet)
    early.take(1)
    save(manager, ALICE, prompt)
    for follower in (early, manager.feed.follow(ALICE, quiet)):
        changes = follower.take(1 << 20)
        assert [change.blocks for change in changes] == [feed.CHANGE_BLOCKS] * 2 + [5]
        assert b"".join(change.keys for change in changes) == b"".join(prompt)
        firsts = [0, feed.CHANGE_BLOCKS, 2 * feed.CHANGE_BLOCKS]
        assert [c.parent for c in changes] == [prompt[i - 1] if i else None for i in firsts]
    manager.close()


def test_no_more_is_taken_than_asked_for() -> None:
    manager = KVManager(config(16), block_bytes=BLOCK_BYTES)
    follower = manager.feed.follow(ALICE, quiet)
    for number in range(4):
        save(manager, ALICE, keys(number, 1, 2))
    follower.take(1 << 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed, "CHANGE_BLOCKS", 2)
        late = manager.feed.follow(ALICE, quiet)
        taken = []
        while changes := late.take(1):
            taken.append(sum(change.blocks for change in changes))
    assert sum(taken) == 12
    assert max(taken) <= 2
    manager.close()


def test_nothing_is_kept_when_nobody_follows(manager: KVManager) -> None:
    first, second = (manager.feed.follow(ALICE, quiet) for _ in range(2))
    save(manager, ALICE, PROMPT)
    first.close()
    first.close()
    assert manager.feed._log
    second.close()
    assert not manager.feed._log
    save(manager, ALICE, keys(7))
    assert not manager.feed._log
    assert manager._cache.index.watcher is None


def test_names_are_bounded_and_those_without_blocks_go_first(
    manager: KVManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "_MOST_NAMESPACES", 2)
    save(manager, ALICE, PROMPT)
    names = [ALICE, *(bytes([i]) * 16 for i in range(5))]
    for name in names:
        manager.register_namespace(name, {})
    assert manager.feed.registered() == [ALICE, names[-1]]

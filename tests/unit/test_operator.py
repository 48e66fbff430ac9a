"""What operators ask: clearing tiers, draining, finding prompts, and the hottest of them."""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
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
    load,
    save,
    write,
)

from kvstrata.core.errors import ConfigError, TierUnavailable
from kvstrata.core.types import StoreKey
from kvstrata.manager import clearing
from kvstrata.manager.manager import KVManager
from kvstrata.manager.tasks import TaskState
from kvstrata.storage.disk import DiskStore
from kvstrata.testing.memory import MemoryStore

PROMPT = keys(1, 2, 3, 4)


@contextmanager
def opened(slots: int, disk: Path | None = None, **changes: object) -> Iterator[KVManager]:
    made = KVManager(config(slots, disk, 64, **changes), block_bytes=BLOCK_BYTES)
    try:
        yield made
        made.check()
    finally:
        made.close()


class Interrupted:
    """A lock; *meanwhile* is called when it has been let go for the second time."""

    def __init__(self, lock: threading.Condition, meanwhile: Callable[[], None]) -> None:
        self._lock = lock
        self._meanwhile = meanwhile
        self._holds = 0

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._holds += 1
        if self._holds == 2:
            self._meanwhile()


def written(manager: KVManager) -> None:
    assert manager._lower["disk"].drain(PATIENCE_SECONDS)


def test_dry_run_tells_what_clearing_would_take_and_takes_nothing(tmp_path: Path) -> None:
    with opened(8, tmp_path) as manager:
        save(manager, ALICE, PROMPT)
        written(manager)
        save(manager, BOB, keys(7))
        written(manager)
        host = manager.operator.clear(ALICE, "host", dry_run=True)
        every = manager.operator.clear(None, None, dry_run=True)
        assert load(manager, ALICE, PROMPT) == contents(ALICE, PROMPT)
    assert (host.blocks, host.in_use_blocks, host.lost_blocks) == ({"host": 4}, 0, 0)
    assert (every.blocks, every.lost_blocks) == ({"host": 5, "disk": 5}, 5)


def test_host_is_cleared_and_the_disk_still_has_the_blocks(tmp_path: Path) -> None:
    with opened(8, tmp_path) as manager:
        save(manager, ALICE, PROMPT)
        save(manager, BOB, keys(7))
        written(manager)
        report = manager.operator.clear(ALICE, "host")
        assert report.blocks == {"host": 4}
        assert manager.operator.locate(ALICE, PROMPT) == (0, 4)
        assert manager.operator.locate(BOB, keys(7)) == (1, 1)
        manager.check()
        assert load(manager, ALICE, PROMPT) == contents(ALICE, PROMPT)


def test_disk_is_cleared_for_good_and_takes_the_blocks_again(tmp_path: Path) -> None:
    with opened(8, tmp_path) as manager:
        save(manager, ALICE, PROMPT)
        written(manager)
        assert manager.operator.clear(ALICE, "disk").blocks == {"disk": 4}
        assert manager.operator.clear(ALICE, "host").lost_blocks == 4
        assert load(manager, ALICE, PROMPT) == []
        manager.check()
    with opened(8, tmp_path) as manager:
        assert manager.operator.locate(ALICE, PROMPT) == (0, 0)
        save(manager, ALICE, PROMPT)
        written(manager)
    with opened(8, tmp_path) as manager:
        assert load(manager, ALICE, PROMPT) == contents(ALICE, PROMPT)


def test_clearing_all_tiers_forgets_the_namespace_and_it_can_begin_anew(tmp_path: Path) -> None:
    with opened(8, tmp_path) as manager:
        save(manager, ALICE, PROMPT)
        save(manager, BOB, keys(7))
        written(manager)
        manager.pin(ALICE, PROMPT, 60.0)
        assert manager.operator.clear(ALICE, None).blocks == {"host": 4, "disk": 4}
        assert load(manager, ALICE, PROMPT) == []
        assert manager.stats().pins == []
        assert load(manager, BOB, keys(7)) == contents(BOB, keys(7))
        save(manager, ALICE, PROMPT[:2])
        assert load(manager, ALICE, PROMPT) == contents(ALICE, PROMPT[:2])
    with opened(8, tmp_path) as manager:
        assert manager.operator.locate(ALICE, PROMPT) == (0, 2)


def test_blocks_that_somebody_uses_stay_when_a_tier_is_cleared(tmp_path: Path) -> None:
    with opened(8, tmp_path) as manager:
        save(manager, ALICE, PROMPT)
        written(manager)
        read = manager.get_match(ALICE, PROMPT[:2])
        saving = manager.put_match(ALICE, keys(1, 2, 3, 4, 5), parent=None)
        manager.launch([read.task_id, saving.task_id])
        report = manager.operator.clear(None, "host")
        assert (report.blocks, report.in_use_blocks) == ({"host": 2}, 2)
        assert [bytes(manager.view(s)) for s in read.slots] == contents(ALICE, PROMPT[:2])
        assert manager.operator.clear(None, "disk").in_use_blocks == 2
        write(manager, saving, ALICE, keys(1, 2, 3, 4, 5))
        manager.complete([read.task_id, saving.task_id])
        manager.check()
        assert load(manager, ALICE, PROMPT[:2]) == contents(ALICE, PROMPT[:2])


def test_pinned_blocks_stay_when_a_tier_is_cleared() -> None:
    with opened(8) as manager:
        save(manager, ALICE, PROMPT)
        number, _ = manager.pin(ALICE, PROMPT[:1], 60.0)
        report = manager.operator.clear(ALICE, "host")
        assert (report.blocks, report.in_use_blocks) == ({"host": 3}, 1)
        manager.unpin(number)
        assert manager.operator.clear(ALICE, "host").blocks == {"host": 1}


def test_a_tier_that_there_is_not_is_named() -> None:
    with opened(4) as manager, pytest.raises(ConfigError, match="no tier 'disk'") as e:
        manager.operator.clear(None, "disk")
    assert e.value.hint == "it has host"


def test_the_remote_tier_is_cleared_of_a_namespace() -> None:
    store = MemoryStore(block_bytes=BLOCK_BYTES, capacity_blocks=64)
    manager = KVManager(config(8), block_bytes=BLOCK_BYTES, remote=store)
    save(manager, ALICE, PROMPT)
    save(manager, BOB, keys(7))
    assert manager._lower["remote"].drain(PATIENCE_SECONDS)
    assert manager.operator.clear(ALICE, "remote").blocks == {"remote": 4}
    assert store.exists([ALICE + k for k in PROMPT]) == [False] * 4
    assert store.exists([BOB + keys(7)[0]]) == [True]
    manager.check()
    manager.close()


def test_a_namespace_may_vanish_while_the_remote_tier_is_cleared_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clearing, "_PIECE_BLOCKS", 1)
    store = MemoryStore(block_bytes=BLOCK_BYTES, capacity_blocks=64)
    manager = KVManager(config(8), block_bytes=BLOCK_BYTES, remote=store)
    save(manager, ALICE, PROMPT)
    assert manager._lower["remote"].drain(PATIENCE_SECONDS)

    def vanish() -> None:
        doubted = manager.get_match(ALICE, PROMPT).task_id
        manager.launch([doubted])
        manager.fail([doubted])

    lock = Interrupted(manager._lock, vanish)  # after the first piece
    monkeypatch.setattr(manager.operator._clearing, "_lock", lock)
    assert manager.operator.clear(ALICE, "remote").blocks == {"remote": 1}
    manager.check()
    manager.close()


def test_a_namespace_that_is_cleared_keeps_its_quota() -> None:
    with opened(8, quotas={"small": 0.25}) as manager:
        manager.register_namespace(ALICE, {"model": "small"})
        save(manager, ALICE, PROMPT)
        assert manager.stats().tiers[0].used_blocks == 2
        manager.operator.clear(ALICE, None)
        save(manager, ALICE, PROMPT)
        assert manager.stats().tiers[0].used_blocks == 2


def test_a_namespace_keeps_its_quota_though_the_disk_refuses_to_be_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_store: DiskStore, _namespace: bytes) -> int:
        raise TierUnavailable("the disk is gone")

    with opened(8, tmp_path, quotas={"small": 0.25}) as manager:
        manager.register_namespace(ALICE, {"model": "small"})
        with monkeypatch.context() as patch:
            patch.setattr(DiskStore, "drop_namespace", refused)
            with pytest.raises(TierUnavailable, match="the disk is gone"):
                manager.operator.clear(ALICE, None)
        save(manager, ALICE, PROMPT)
        assert manager.operator.locate(ALICE, PROMPT)[0] == 2


def test_clearing_says_what_is_done_though_a_tier_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the tier it keeps what it said. A drain is not over before it has answered."""

    def refused(_store: DiskStore, _namespace: bytes) -> int:
        raise TierUnavailable("the disk is gone", hint="mount it", cause="unreachable")

    with opened(8, tmp_path, drain_timeout_seconds=0.05) as manager:
        save(manager, ALICE, PROMPT)
        save(manager, BOB, keys(7))
        written(manager)
        monkeypatch.setattr(DiskStore, "drop_namespace", refused)
        with pytest.raises(TierUnavailable) as e:
            manager.operator.clear(None, None)
        with pytest.raises(TierUnavailable, match="cleared: 0 blocks of host; disk is cleared as"):
            manager.operator.clear(None, None)
        manager.operator.drain(True)
        report = manager.stats()
    assert e.value.args[0] == (
        "the disk is gone; cleared: 5 blocks of host; disk is cleared as soon as it answers: what "
        "was to go is not found any more, but a restart before that can find it again"
    )
    assert (e.value.hint, e.value.cause) == ("mount it", "unreachable")
    assert report.drain == "draining"
    assert [tier.uncleared_namespaces for tier in report.tiers] == [0, 2]
    assert report.tiers[1].waiting_blocks == 0
    assert caplog.messages[-1] == (
        "disk could not be cleared of 2 namespaces in time: the next start can find them again"
    )


def test_a_disk_that_refuses_loses_all_its_blocks_once_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is found meanwhile, and nothing has to be written before they go."""
    monkeypatch.setattr(clearing, "_PIECE_BLOCKS", 1)
    with opened(8, tmp_path) as manager:
        save(manager, ALICE, PROMPT)
        written(manager)
        manager.operator.clear(ALICE, "host")
        with monkeypatch.context() as patch:
            patch.setattr(DiskStore, "remove", refuse)
            with pytest.raises(TierUnavailable, match=r"^the disk is gone; disk is cleared as"):
                manager.operator.clear(ALICE, "disk")
            assert manager.operator.locate(ALICE, PROMPT) == (0, 0)
            manager.operator.drain(True)
            report = manager.stats()
            assert (report.drain, report.tiers[1].uncleared) == ("draining", "4 other blocks")
        store = manager._lower["disk"]._inner
        eventually(lambda: store.statistics().blocks == 0, "they are never removed")
        eventually(lambda: manager.stats().drain == "drained", "the drain does not end")


def test_a_disk_that_refuses_for_a_moment_is_cleared_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, calls = DiskStore.remove, itertools.count()

    def refused_once(store: DiskStore, keys: Sequence[StoreKey]) -> list[bool]:
        if next(calls) == 0:
            raise TierUnavailable("the disk is busy")
        return remove(store, keys)

    with opened(8, tmp_path) as manager:
        save(manager, ALICE, PROMPT)
        save(manager, BOB, keys(7))
        written(manager)
        monkeypatch.setattr(DiskStore, "remove", refused_once)
        report = manager.operator.clear(None, "disk")
        assert report.blocks == {"disk": len(PROMPT) + 1}
        assert manager._lower["disk"]._inner.statistics().blocks == 0


def refuse(_store: DiskStore, _keys: object) -> list[bool]:
    raise TierUnavailable("the disk is gone")


def test_drain_refuses_saves_writes_what_is_late_and_can_be_undone(tmp_path: Path) -> None:
    with opened(8, tmp_path, write="evicted") as manager:
        save(manager, ALICE, PROMPT)
        running = manager.put_match(BOB, keys(7))
        manager.launch([running.task_id])
        assert (manager.stats().drain, manager.stats().tiers[1].used_blocks) == ("off", 0)
        manager.operator.drain(True)
        refused = manager.put_match(BOB, keys(8))
        assert (refused.task_id, refused.state) == (0, TaskState.FAILED)
        assert load(manager, ALICE, PROMPT) == contents(ALICE, PROMPT)
        written(manager)
        assert manager.stats().drain == "draining"  # a save is on its way
        write(manager, running, BOB, keys(7))
        manager.complete([running.task_id])
        eventually(lambda: manager.stats().drain == "drained", "it is never drained")
        assert manager.stats().tiers[1].used_blocks >= 4
        manager.operator.drain(False)
        assert manager.stats().drain == "off"
        save(manager, BOB, keys(8))
        assert load(manager, BOB, keys(8)) == contents(BOB, keys(8))


def test_prompts_are_found_by_their_last_block() -> None:
    with opened(8) as manager:
        save(manager, ALICE, PROMPT)
        found = manager.operator.prompt(ALICE, PROMPT[2])
        assert [bytes(k) for k in found] == PROMPT[:3]
        assert len(manager.operator.prompt(BOB, PROMPT[2])) == 0
        assert manager.operator.locate(ALICE, [*PROMPT, *keys(9)]) == (4, 4)


def test_hottest_prompts_are_a_tree_of_runs_with_their_hits() -> None:
    with opened(16) as manager:
        long, other = keys(1, 2, 3, 4, 5), keys(1, 2, 8, 9)
        for prompt in (long, other, keys(6)):
            save(manager, ALICE, prompt)
        for prompt, times in ((long, 3), (other, 2), (keys(6), 1), (long[:4], 1)):
            for _ in range(times):
                load(manager, ALICE, prompt)
        runs = manager.operator.hottest(8)
        first = manager.operator.hottest(2)
    shape = [(r.above, r.first_block, r.blocks, r.hits, r.children) for r in runs]
    assert shape == [
        (-1, 0, 2, 6, 2),  # what the two begin with
        (0, 2, 2, 4, 1),
        (1, 4, 1, 3, 0),
        (0, 2, 2, 2, 0),
        (-1, 0, 1, 1, 0),
    ]
    assert [bytes.fromhex(r.last_block) for r in runs][:3] == [long[1], long[3], long[4]]
    assert {r.host_blocks - r.blocks for r in runs} == {0}
    assert first == runs[:2]


def test_hottest_looks_at_a_bounded_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.manager.prompts._MOST_BLOCKS", 3)
    with opened(16) as manager:
        save(manager, ALICE, PROMPT)
        load(manager, ALICE, PROMPT)
        (run,) = manager.operator.hottest(8)
    assert (run.first_block, run.blocks, run.is_cut) == (1, 3, True)


def test_hottest_leaves_out_what_is_gone() -> None:
    with opened(16) as manager:
        save(manager, ALICE, PROMPT)
        load(manager, ALICE, PROMPT)
        manager.reset(ALICE)
        assert manager.operator.hottest(8) == []


@pytest.mark.parametrize("seed", range(20))
def test_hottest_of_any_prompts_counts_every_lookup_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    with opened(128) as manager:
        prompts = [
            keys(*rng.integers(0, 2, size=int(rng.integers(1, 7))).tolist()) for _ in range(12)
        ]
        for prompt in prompts:
            save(manager, ALICE, prompt)
            load(manager, ALICE, prompt)
        runs = manager.operator.hottest(64)
        known = {k for prompt in prompts for k in prompt}
    assert sum(r.blocks for r in runs) == len(known)
    for number, run in enumerate(runs):
        assert run.above < number
        whole = [p for p in prompts if bytes.fromhex(run.last_block) in p]
        assert run.hits == len(whole)
        if run.above >= 0:
            above = runs[run.above]
            assert run.first_block == above.first_block + above.blocks

"""What is kept of a decision, for whoever asks how it came about."""

from contextlib import closing
from pathlib import Path

from tests.caches import (
    ALICE,
    BLOCK_BYTES,
    BOB,
    PATIENCE_SECONDS,
    config,
    eventually,
    keys,
    save,
)

from kvstrata.manager.decisions import Decision
from kvstrata.manager.manager import KVManager


def decided(manager: KVManager, *numbers: int) -> Decision:
    """On a save of ALICE's prompt of *numbers*, which then fails."""
    task = manager.put_match(ALICE, keys(*numbers), request="r")
    if task.task_id:
        manager.cancel([task.task_id])
    return manager.explain("r")[-1]


def drained(manager: KVManager) -> None:
    eventually(lambda: manager.stats().tiers[1].waiting_blocks == 0, "blocks wait for the disk")
    assert manager._lower["disk"].drain(PATIENCE_SECONDS)


def test_save_counts_blocks_that_it_knows_by_the_tier_that_has_them(tmp_path: Path) -> None:
    with closing(KVManager(config(4, tmp_path / "kv"), block_bytes=BLOCK_BYTES)) as manager:
        save(manager, ALICE, keys(1, 2))
        drained(manager)
        everywhere = decided(manager, 1, 2, 3)
        save(manager, BOB, keys(7, 8, 9))  # block 2 has to leave host memory
        drained(manager)
        some_below = decided(manager, 1, 2, 3)
        manager.check()
    assert (everywhere.host_blocks, everywhere.disk_blocks, everywhere.taken_blocks) == (2, 0, 1)
    assert (some_below.host_blocks, some_below.disk_blocks, some_below.taken_blocks) == (1, 1, 1)


def test_save_finds_what_another_one_is_writing_in_host_memory() -> None:
    with closing(KVManager(config(4), block_bytes=BLOCK_BYTES)) as manager:
        running = manager.put_match(ALICE, keys(1, 2))
        decision = decided(manager, 1, 2, 3)
        manager.cancel([running.task_id])
    assert (decision.host_blocks, decision.disk_blocks, decision.taken_blocks) == (2, 0, 1)

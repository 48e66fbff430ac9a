"""Host memory above a tier that gets blocks before they leave, and takes none of them."""

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from tests.caches import (
    ALICE,
    BLOCK_BYTES,
    BOB,
    PATIENCE_SECONDS,
    contents,
    eventually,
    host_slot,
    keys,
    load,
    save,
)
from tests.disks import CrowdedFiles
from tests.gated import GatedStore

from kvstrata.core.config import Config
from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import BlockKey, StoreKey, Write
from kvstrata.manager import cascade, choices
from kvstrata.manager.manager import KVManager
from kvstrata.storage.disk import DiskStore
from kvstrata.storage.wrap import BreakerStore
from kvstrata.testing.memory import MemoryStore

HOST_SLOTS = 8
BATCH_BLOCKS = 2


@contextlib.contextmanager
def above(
    tier: dict[str, object], store: MemoryStore | None = None, slots: int = HOST_SLOTS
) -> Iterator[KVManager]:
    host = {"kind": "host", "capacity": f"{slots * 4}KiB"}
    tiers = [host, tier | {"write": "evicted"}]
    changes = {"prefault": False, "drain_timeout_seconds": 0.05}
    settings = Config.model_validate({"tiers": tiers} | changes)
    manager = KVManager(settings, block_bytes=BLOCK_BYTES, remote=store)
    with contextlib.closing(manager):
        yield manager
        manager.check()


def shared(path: Path) -> dict[str, object]:
    return {"kind": "shared", "path": str(path), "capacity": "1MiB"}


def is_kept(manager: KVManager, asked: list[BlockKey]) -> bool:
    save(manager, ALICE, asked)
    return host_slot(manager, ALICE + asked[-1]) >= 0


def turns_over(manager: KVManager, first: int = 0) -> None:
    for prompt in range(first, first + 4 * HOST_SLOTS):
        eventually(partial(is_kept, manager, keys(prompt)), "nothing can be saved any more")


class HungWrites:
    """From now on a write to a disk ends when ``go`` is set; ``hung``: of how many blocks each is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.hung, real = threading.Event(), list[int](), DiskStore.write

        def hanging(
            store: DiskStore,
            keys: Sequence[StoreKey],
            parents: Sequence[StoreKey | None],
            buffers: Sequence[memoryview],
        ) -> list[Write]:
            self.hung.append(len(keys))
            assert self.go.wait(PATIENCE_SECONDS)
            return real(store, keys, parents, buffers)

        monkeypatch.setattr(DiskStore, "write", hanging)


def lost(manager: KVManager) -> int:
    return manager.counters.snapshot()["kvstrata_lost_blocks_total"]


def test_tier_that_is_full(tmp_path: Path) -> None:
    """What it has no room for is lost, and what it has is not."""
    store = MemoryStore(block_bytes=BLOCK_BYTES, capacity_blocks=2)
    with above(shared(tmp_path), store) as manager:
        turns_over(manager)
        assert len(store.values) == 2
        assert lost(manager) == 3 * HOST_SLOTS - 2


@pytest.mark.parametrize("capacity", [2, 100])
def test_prompt_that_was_saved_in_parts(tmp_path: Path, capacity: int) -> None:
    """As chunked prefill saves: the first part is met before what continues from it."""
    store = MemoryStore(block_bytes=BLOCK_BYTES, capacity_blocks=capacity)
    with above(shared(tmp_path), store) as manager:
        prompt = keys(*[0] * HOST_SLOTS)
        save(manager, BOB, prompt[:4])
        save(manager, BOB, prompt[4:], parent=prompt[3])
        turns_over(manager)


def test_tier_that_has_a_reset_to_make_and_is_away(tmp_path: Path) -> None:
    store = GatedStore({})
    with above(shared(tmp_path), store) as manager:
        store.away = True
        with pytest.raises(TierUnavailable):
            manager.reset(BOB)
        turns_over(manager)
        store.away = False


@pytest.mark.parametrize("write_depth", [1, 2])
def test_tier_every_writer_of_which_is_in_a_call_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_depth: int
) -> None:
    """Nobody comes back from the store to tell that it is switched off."""
    writes = HungWrites(monkeypatch)
    monkeypatch.setattr(choices, "_HUNG_SECONDS", 0.05)
    monkeypatch.setattr(cascade, "WRITE_BATCH_BYTES", BATCH_BLOCKS * BLOCK_BYTES)
    disk = {
        "kind": "disk",
        "paths": str(tmp_path),
        "capacity": "512KiB",
        "write_depth": write_depth,
    }
    with above(disk, slots=24) as manager:
        for prompt in range(3):
            save(manager, BOB, keys(prompt, *[0] * 7))
        eventually(
            lambda: writes.hung == [BATCH_BLOCKS] * 2 * write_depth, "not every writer hangs"
        )
        eventually(lambda: manager.stats().tiers[1].switched_off, "the disk is not switched off")
        turns_over(manager)
        writes.go.set()


def test_disk_every_writer_of_which_hangs_while_reads_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that is frozen: each read proves that the disk answers."""
    breaker = {**(BreakerStore.__init__.__kwdefaults__ or {}), "retry_seconds": 0.05}
    monkeypatch.setattr(BreakerStore.__init__, "__kwdefaults__", breaker)
    monkeypatch.setattr(choices, "_HUNG_SECONDS", 0.05)
    monkeypatch.setattr(cascade, "WRITE_BATCH_BYTES", BATCH_BLOCKS * BLOCK_BYTES)
    disk = {"kind": "disk", "paths": str(tmp_path), "capacity": "512KiB", "write_depth": 1}
    with above(disk, slots=24) as manager:
        save(manager, ALICE, keys(7))
        save(manager, BOB, keys(*[9] * 24))
        eventually(lambda: manager.stats().is_at_rest, "not written")
        writes = HungWrites(monkeypatch)
        for prompt in range(3):
            save(manager, BOB, keys(prompt, *[0] * 7))
        eventually(lambda: len(writes.hung) == 2, "not every writer hangs")
        turns_over(manager)
        eventually(lambda: load(manager, ALICE, keys(7)) == contents(ALICE, keys(7)), "not read")
        assert not manager.stats().tiers[1].switched_off
        turns_over(manager)
        writes.go.set()


def test_disk_whose_file_system_others_fill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for it; when there is room again it gets what leaves."""
    monkeypatch.setattr(cascade, "_NO_ROOM_SECONDS", 0.05)
    with above({"kind": "disk", "paths": str(tmp_path), "capacity": "512KiB"}) as manager:
        turns_over(manager)
        eventually(lambda: manager.stats().is_at_rest, "not written")
        on_disk = manager.stats().tiers[1].used_blocks
        files = CrowdedFiles(manager)
        turns_over(manager, 100)
        assert files.refused
        assert manager.stats().tiers[1].used_blocks == on_disk >= 3 * HOST_SLOTS
        eventually(lambda: load(manager, ALICE, keys(0)) == contents(ALICE, keys(0)), "not read")
        files.is_full = False
        numbers = itertools.count(200)
        eventually(
            lambda: (
                is_kept(manager, keys(next(numbers)))
                and manager.stats().tiers[1].used_blocks > on_disk
            ),
            "nothing is written any more",
        )

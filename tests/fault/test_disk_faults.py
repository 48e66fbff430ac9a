"""Whichever call fails, once or for good, or does half: no wrong byte, and all is well afterwards."""

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from tests.fault.lives import Life, fill, make, read

from kvstrata.core.errors import ConfigError, TierUnavailable
from kvstrata.storage import journal
from kvstrata.storage.disk_check import check_store
from kvstrata.testing import FaultyFiles


@pytest.fixture(autouse=True)
def _compacts_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "COMPACT_RECORDS", 8)
    monkeypatch.setattr(journal, "COMPACT_FACTOR", 1)


def live(paths: Sequence[Path], files: FaultyFiles, *, was_there: bool) -> Life:
    """Open, write, read, remove, drop, compact and close a store, as far as *files* let it."""
    life = Life(7)
    if was_there:
        store = make(paths, FaultyFiles(), slots=6)
        life.write(store, 5)
        life.remove(store, 2)
        store.close()
    with suppress(ConfigError):
        store = make(paths, files, discard=was_there)
        try:
            life.run(store, 6)
        except TierUnavailable:
            with suppress(TierUnavailable):
                life.run(store, 3)
        finally:
            store.close()
    return life


@pytest.mark.parametrize(
    ("code", "lasting"),
    [(errno.EIO, False), (errno.ENOSPC, False), (errno.EIO, True)],
    ids=["EIO", "ENOSPC", "EIO for good"],
)
def test_a_fault_of_any_call_loses_no_stored_block_and_serves_nothing_wrong(
    tmp_path: Path, code: int, lasting: bool
) -> None:
    faults = served = stored = wrong = 0
    for was_there in (False, True):
        counted = FaultyFiles()
        live([tmp_path / str(was_there)], counted, was_there=was_there)
        for fail_at in range(1, counted.calls + 1):
            paths = [tmp_path / f"{was_there}-{fail_at}"]
            descriptors = set(os.listdir("/proc/self/fd"))
            files = FaultyFiles(fail_at=fail_at, code=code, lasting=lasting)
            life = live(paths, files, was_there=was_there)
            assert set(os.listdir("/proc/self/fd")) <= descriptors, f"call {fail_at} leaks"
            faults += 1
            if (paths[0] / "kvstrata.superblock").exists():
                assert not check_store(paths).damaged_blocks
            store = make(paths, FaultyFiles())
            found = read(store)
            wrong += life.wrong(found)
            lost = [key for key, content in life.stored.items() if found.get(key) != content]
            assert lost == [], f"stored blocks lost after a fault of call {fail_at}"
            stored += len(life.stored)
            served += len(found)
            fill(store)
            store.close()
    print(  # noqa: T201 - pytest -rP shows it
        f"{faults} calls failed with {errno.errorcode[code]}: {served} blocks served, {stored} of "
        f"them known to be stored, wrong blocks served: {wrong}"
    )
    assert wrong == 0
    assert stored > faults / 2


def test_writes_that_are_cut_anywhere_are_completed(tmp_path: Path) -> None:
    for seed in range(20):
        files, life = FaultyFiles(seed=seed), Life(seed)
        files.cuts_short = True
        paths = [tmp_path / str(seed)]
        store = make(paths, files)
        for _ in range(4):
            life.write(store, 4)
        store.close()
        assert check_store(paths).sound
        store = make(paths, FaultyFiles())
        assert read(store) == life.stored
        store.close()


def test_reads_that_are_cut_anywhere_serve_nothing_wrong(tmp_path: Path) -> None:
    served = 0
    for seed in range(20):
        files, life = FaultyFiles(seed=seed), Life(seed)
        paths = [tmp_path / str(seed)]
        store = make(paths, files)
        life.write(store, 9)
        files.cuts_short = True
        found = read(store)
        files.cuts_short = False
        assert found.items() <= life.stored.items()
        served += len(found)
        fill(store)
        store.close()
    assert 0 < served < 20 * 9


def test_a_close_that_reports_an_error_leaks_nothing_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.close

    def fails(fd: int) -> None:
        real(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    descriptors = set(os.listdir("/proc/self/fd"))
    life = Life(3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", fails)
        life.run(make([tmp_path / "store"]), 6)
    assert set(os.listdir("/proc/self/fd")) <= descriptors
    store = make([tmp_path / "store"])
    assert read(store) == life.stored
    store.close()

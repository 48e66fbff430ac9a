"""Whichever call fails, does half, or loses the power: no wrong byte, and all is well afterwards."""

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from tests.fault.lives import Life, fill, make, read
from tests.machines import some_of

from kvstrata.core.errors import ConfigError, TierUnavailable
from kvstrata.storage import journal
from kvstrata.storage.disk_check import check_store
from kvstrata.testing import FaultyFiles, PowerFailure


@pytest.fixture(autouse=True)
def _compacts_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "COMPACT_RECORDS", 8)
    monkeypatch.setattr(journal, "COMPACT_FACTOR", 1)


class Stage:
    """Where the same life is lived again and again, each time with another fault."""

    def __init__(self, folder: Path, directories: int, *, was_there: bool) -> None:
        self._folder = folder
        self._directories = directories
        self._was_there = was_there

    def paths(self, run: object) -> list[Path]:
        run_folder = self._folder / f"{self._was_there}-{run}"
        return [run_folder / str(number) for number in range(self._directories)]

    def calls(self) -> int:
        """How many calls a life without faults makes."""
        files = FaultyFiles()
        self.live(self.paths("counted"), files)
        return files.calls

    def live(self, paths: Sequence[Path], files: FaultyFiles) -> Life:
        """Use a store that is new, or has blocks and grows, in every way that *files* let it."""
        life = Life(7)
        if self._was_there:
            store = make(paths, FaultyFiles(), slots=6)
            life.write(store, 5)
            life.remove(store, 2)
            store.close()
            life.durable = dict(life.stored)
        with suppress(PowerFailure):
            self._use(life, paths, files)
        return life

    def _use(self, life: Life, paths: Sequence[Path], files: FaultyFiles) -> None:
        try:
            store = make(paths, files, discard=self._was_there)
        except ConfigError:
            if not (self._was_there or files.lasting):
                left = {file.name for path in paths for file in path.glob("*")}
                assert left <= {"kvstrata.lock"}, "what could not be made is there in part"
            return
        try:
            life.run(store, 6)
        except TierUnavailable:
            with suppress(TierUnavailable):
                life.run(store, 3)
        finally:
            store.close()


@pytest.mark.parametrize("directories", [1, 2])
@pytest.mark.parametrize(
    ("code", "lasting"),
    [(errno.EIO, False), (errno.ENOSPC, False), (errno.EIO, True)],
    ids=["EIO", "ENOSPC", "EIO for good"],
)
def test_a_fault_of_any_call_loses_no_stored_block_and_serves_nothing_wrong(
    tmp_path: Path, code: int, lasting: bool, directories: int
) -> None:
    faults = served = stored = wrong = 0
    for was_there in (False, True):
        stage = Stage(tmp_path, directories, was_there=was_there)
        for fail_at in some_of(range(1, stage.calls() + 1), code + directories):
            paths = stage.paths(fail_at)
            descriptors = set(os.listdir("/proc/self/fd"))
            life = stage.live(paths, FaultyFiles(fail_at=fail_at, code=code, lasting=lasting))
            assert set(os.listdir("/proc/self/fd")) <= descriptors, f"call {fail_at} leaks"
            faults += 1
            if all((path / "kvstrata.superblock").exists() for path in paths):
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


@pytest.mark.parametrize(
    ("directories", "was_there"), [(1, False), (2, False), (2, True)], ids=["new", "two", "grown"]
)
def test_a_power_failure_at_any_call_costs_nothing_durable_and_serves_nothing_wrong(
    tmp_path: Path, directories: int, was_there: bool
) -> None:
    stage = Stage(tmp_path, directories, was_there=was_there)
    calls = stage.calls()
    failures = durable = served = wrong = damaged = 0
    for power_off_at in range(1, calls + 2):  # the last one is after the end
        paths = stage.paths(power_off_at)
        files = FaultyFiles(seed=power_off_at, power_off_at=power_off_at)
        life = stage.live(paths, files)
        files.lose_power()
        failures += 1
        if all((path / "kvstrata.superblock").exists() for path in paths):
            damaged += sum(check_store(paths).damaged_blocks.values())
        store = make(paths, FaultyFiles())  # its syncs cost nothing
        found = read(store)
        wrong += life.wrong(found)
        lost = [key for key, content in life.durable.items() if found.get(key) != content]
        assert lost == [], f"durable blocks lost at call {power_off_at}"
        durable += len(life.durable)
        served += len(found)
        fill(store)
        store.close()
    print(  # noqa: T201 - pytest -rP shows it
        f"{failures} power failures at {calls} calls: {served} blocks served, "
        f"{durable} of them durable, {damaged} damaged and not served, wrong blocks served: {wrong}"
    )
    assert wrong == 0
    assert durable > 50


@pytest.mark.parametrize("fault", ["power", "EIO"])
def test_a_repair_that_is_interrupted_at_any_call_keeps_every_good_block(
    tmp_path: Path, fault: str
) -> None:
    def damaged(run: str) -> tuple[list[Path], Life]:
        paths, life = [tmp_path / run / side for side in ("one", "two")], Life(3)
        store = make(paths, FaultyFiles())
        for _ in range(3):
            life.write(store, 6)
            life.remove(store, 1)
        store.close()
        (paths[1] / "kvstrata_0.bin").unlink()
        with (paths[0] / "kvstrata_0.bin").open("r+b") as file:
            file.write(b"wrong")
        return paths, life

    paths, life = damaged("counted")
    counted = FaultyFiles()
    good = sum(check_store(paths, repair=True, system=counted).good_blocks.values())
    assert 0 < good < len(life.stored)
    for at in range(1, counted.calls + 1):
        paths, life = damaged(str(at))
        files = FaultyFiles(seed=at)
        setattr(files, "power_off_at" if fault == "power" else "fail_at", at)
        with suppress(PowerFailure, ConfigError):
            check_store(paths, repair=True, system=files)
        if fault == "power":
            files.lose_power()
        assert sum(check_store(paths, repair=True).good_blocks.values()) == good
        store = make(paths, FaultyFiles())
        found = read(store)
        assert len(found) == good
        assert found.items() <= life.stored.items()
        store.close()


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

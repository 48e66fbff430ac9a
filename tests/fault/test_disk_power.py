"""Whenever the power fails: what was durable is served, and never a wrong byte."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from tests.fault.lives import Life, fill, make, read

from kvstrata.core.errors import ConfigError
from kvstrata.storage import journal
from kvstrata.storage.disk_check import check_store
from kvstrata.testing import FaultyFiles, PowerFailure


@pytest.fixture(autouse=True)
def _compacts_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "COMPACT_RECORDS", 8)
    monkeypatch.setattr(journal, "COMPACT_FACTOR", 1)


def live(paths: Sequence[Path], files: FaultyFiles, *, was_there: bool) -> Life:
    """A life that ends with the power, in a store that is new or has blocks and grows."""
    life = Life(7)
    if was_there:
        store = make(paths, FaultyFiles(), slots=6)
        life.write(store, 5)
        life.remove(store, 2)
        store.close()
        life.durable = dict(life.stored)
    with suppress(PowerFailure):
        life.run(make(paths, files, discard=was_there), 6)
    files.lose_power()
    return life


@pytest.mark.parametrize(
    ("directories", "was_there"), [(1, False), (2, False), (2, True)], ids=["new", "two", "grown"]
)
def test_a_power_failure_at_any_call_costs_nothing_durable_and_serves_nothing_wrong(
    tmp_path: Path, directories: int, was_there: bool
) -> None:
    def paths(run: str) -> list[Path]:
        return [tmp_path / run / str(number) for number in range(directories)]

    counted = FaultyFiles()
    live(paths("counted"), counted, was_there=was_there)
    failures = durable = served = wrong = damaged = 0
    for power_off_at in range(1, counted.calls + 2):  # the last one is after the end
        here = paths(str(power_off_at))
        files = FaultyFiles(seed=power_off_at, power_off_at=power_off_at)
        life = live(here, files, was_there=was_there)
        failures += 1
        if all((path / "kvstrata.superblock").exists() for path in here):
            damaged += sum(check_store(here).damaged_blocks.values())
        store = make(here, FaultyFiles())  # its syncs cost nothing
        found = read(store)
        wrong += life.wrong(found)
        lost = [key for key, content in life.durable.items() if found.get(key) != content]
        assert lost == [], f"durable blocks lost at call {power_off_at}"
        durable += len(life.durable)
        served += len(found)
        fill(store)
        store.close()
    print(  # noqa: T201 - pytest -rP shows it
        f"{failures} power failures at {counted.calls} calls: {served} blocks served, "
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

"""Whenever the power fails: what was durable is served, and never a wrong byte."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from tests.fault.lives import Life, fill, make, read

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

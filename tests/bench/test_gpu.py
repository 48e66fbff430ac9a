"""The table of bench/gpu.py, its copies on a CPU, and what `make gpu` says without a GPU."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import gpu
from bench.gpu import GEOMETRIES, Bed, Geometry, Row, markdown
from scripts import gpu as script

from kvstrata.core.errors import InvariantViolated

SMALL = Geometry("small", 3, 4096, per_slot=2)
CPU = torch.device("cpu")


@pytest.mark.parametrize("outermost", [False, True])
def test_copies_are_checked_before_they_are_timed(
    outermost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = SMALL._replace(blocks_outermost=outermost)
    load, save = gpu.copies(geometry, CPU, 1 << 20)
    assert load.what.startswith("load, small")
    assert save.what.startswith("save, small")
    assert min(load.found, save.found) > 0
    monkeypatch.setattr(Bed, "copy", lambda self, *, is_load: None)
    with closing(Bed(geometry, CPU, 1 << 20)) as bed, pytest.raises(InvariantViolated):
        bed.check()


def test_geometries_are_those_of_the_models() -> None:
    assert {(g.layers, g.page_bytes) for g in GEOMETRIES} == {(32, 65536), (61, 18432)}
    assert {g.blocks_outermost for g in GEOMETRIES} == {False, True}


def test_products_are_compared_with_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "GEOMETRIES", (SMALL,))
    (row,) = gpu.slowdown(CPU, 1 << 20, size=8)
    assert row.is_most
    assert row.found > 0


def test_bounds_are_reached_or_not_exceeded() -> None:
    assert [Row("", n, 0.9).is_met for n in (0.89, 0.9)] == [False, True]
    assert [Row("", n, 1.03, is_most=True).is_met for n in (1.03, 1.04)] == [True, False]
    table = markdown([Row("a", 0.5, 0.9, note="5 GiB/s"), Row("b", 1.0, 1.03, is_most=True)])
    assert table.splitlines()[2:] == [
        "| a | 0.50 | ≥ 0.90 | NOT met; 5 GiB/s |",
        "| b | 1.00 | ≤ 1.03 | met |",
    ]


def test_without_a_gpu_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([]) == 2
    assert "finds no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "passed", "status"), [(1.0, True, 0), (0.5, True, 1), (1.0, False, 1)]
)
def test_it_writes_what_it_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: float, passed: bool, status: int
) -> None:
    monkeypatch.setattr(script, "problem", lambda: None)
    monkeypatch.setattr(script, "run_tests", lambda: passed)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(gpu, "rows", lambda *_: iter([Row("a", found, 0.9)]))
    assert script.main(["--json", str(tmp_path / "gpu.json")]) == status
    written: Any = json.loads((tmp_path / "gpu.json").read_text())
    assert written["about"]["tests_passed"] is passed
    assert written["rows"][0]["is_met"] is (found >= 0.9)

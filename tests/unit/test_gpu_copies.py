"""What `kvstrata doctor` says of a GPU."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvstrata.cli import diagnosis, gpu_copies
from kvstrata.cli.diagnosis import Finding, check_gpu
from kvstrata.cli.gpu_copies import GpuCopies, has_gpu, may_have_gpu, measure_gpu


def test_it_is_measured_in_a_process_of_its_own() -> None:
    found = measure_gpu()
    assert found.problem == "torch finds no GPU"


def test_what_it_prints_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, '{"gpu": "H100", "report": "loads by DMA"}')

    monkeypatch.setattr(subprocess, "run", run)
    assert measure_gpu() == GpuCopies("H100", "loads by DMA")


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("kvstrata.no_such_module", "No module named kvstrata.no_such_module"),
        ("this", "the answer is not JSON"),
    ],
)
def test_why_it_failed_is_said(module: str, problem: str) -> None:
    assert problem in measure_gpu(module).problem


def test_it_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("python", 1.0)

    monkeypatch.setattr(subprocess, "run", run)
    assert "longer than" in measure_gpu().problem


def test_a_gpu_is_known_by_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_copies, "_DRIVERS", (tmp_path / "nvidiactl", tmp_path / "kfd"))
    monkeypatch.setattr(gpu_copies, "_OTHERS", (tmp_path / "dri",))
    assert not may_have_gpu()
    (tmp_path / "dri").mkdir()
    assert (has_gpu(), may_have_gpu()) == (False, True)
    (tmp_path / "dri").rmdir()
    (tmp_path / "kfd").touch()
    assert (has_gpu(), may_have_gpu()) == (True, True)


def finding_of(
    monkeypatch: pytest.MonkeyPatch, found: GpuCopies, *, has: bool, may: bool
) -> Finding:
    monkeypatch.setattr(diagnosis, "has_gpu", lambda: has)
    monkeypatch.setattr(diagnosis, "may_have_gpu", lambda: may)
    return check_gpu(lambda: found)


def test_the_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = GpuCopies("H100", "loads by batched DMA (50.0 GiB/s)")
    finding = finding_of(monkeypatch, measured, has=True, may=True)
    assert (finding.level, finding.message) == ("ok", "H100: loads by batched DMA (50.0 GiB/s)")
    failed = finding_of(monkeypatch, GpuCopies(problem="out of memory"), has=True, may=True)
    assert (failed.level, failed.message) == ("warning", "not measured: out of memory")
    assert failed.remedy
    monkeypatch.setattr(diagnosis, "_installed", lambda *_: None)
    assert "torch is not installed" in check_gpu(lambda: measured).message


def test_a_gpu_of_another_kind_is_one_that_torch_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    by_torch = GpuCopies("xpu", "copied to and from by torch")
    finding = finding_of(monkeypatch, by_torch, has=False, may=True)
    assert (finding.level, finding.message) == ("ok", "xpu: copied to and from by torch")
    screen = finding_of(monkeypatch, GpuCopies(problem="torch finds no GPU"), has=False, may=True)
    assert (screen.level, screen.message[:9]) == ("ok", "none here")
    nothing = finding_of(monkeypatch, by_torch, has=False, may=False)
    assert nothing == screen

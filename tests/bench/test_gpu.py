"""The table of bench/gpu*.py, their copies on a CPU, and what `make gpu` says without a GPU."""

import ctypes
import json
import logging
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench import gpu, gpu_about, gpu_beside, gpu_blend, gpu_native, gpu_serving
from bench.blend_latency import Pair
from bench.gpu import GEOMETRIES, Bed, Geometry
from bench.gpu_rows import Row, markdown
from scripts import gpu as script

from kvstrata.cli.demo_engine import Answered, EngineOrders, LoadMode
from kvstrata.core.errors import InvariantViolated

SMALL = Geometry("small", 3, 4096, per_slot=2)
CPU = torch.device("cpu")
SERVINGS: tuple[tuple[gpu_serving.Serving, tuple[LoadMode, ...]], ...] = (
    (gpu_serving.USUAL, gpu_serving.MODES),
    (gpu_serving.FAST, ("blockwise",)),
)


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


@pytest.mark.parametrize("outermost", [False, True])
def test_a_block_in_the_place_of_another_is_noticed_though_it_comes_back(outermost: bool) -> None:
    geometry = SMALL._replace(blocks_outermost=outermost)
    with closing(Bed(geometry, CPU, 1 << 18)) as bed:
        bed.check()
        bed.blocks[2:4] = bed.blocks[3], bed.blocks[2]
        with pytest.raises(InvariantViolated, match="small: slots hold other bytes"):
            bed.check()


def test_geometries_are_those_of_the_models() -> None:
    assert {(g.layers, g.page_bytes) for g in GEOMETRIES} == {(32, 65536), (61, 18432)}
    assert {g.blocks_outermost for g in GEOMETRIES} == {False, True}


@pytest.fixture
def slow_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few of milliseconds, in which other threads have the interpreter."""
    monkeypatch.setattr(torch, "mm", lambda *_: time.sleep(0.005))  # on a GPU it takes no thread
    monkeypatch.setattr(gpu_beside, "PRODUCTS_SECONDS", 0.03)
    monkeypatch.setattr(gpu_beside, "REPETITIONS", 3)


@pytest.mark.usefixtures("slow_products")
def test_products_are_compared_with_themselves_and_tell_what_was_copied_meanwhile() -> None:
    loads, saves = gpu_beside.slowdown(SMALL, CPU, 1 << 20, size=8)
    assert (loads.is_most, saves.is_most) == (True, True)
    assert min(loads.found, saves.found) > 0
    assert loads.what == "matrix products beside loads, small: time"
    assert saves.what == "matrix products beside saves, small: time"
    assert all("MiB meanwhile" in row.note for row in (loads, saves))


@pytest.mark.usefixtures("slow_products")
def test_copies_that_wait_for_the_products_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those do that stand behind them on the same stream."""
    stream, copy, timed = threading.Lock(), Bed.copy, gpu.timed

    def waits(bed: Bed, *, is_load: bool, slot: int | None = None) -> None:
        time.sleep(0.001)  # or no other thread would have the lock
        with stream:
            copy(bed, is_load=is_load, slot=slot)

    def holds(*arguments: Any, **options: Any) -> float:
        with stream:
            return timed(*arguments, **options)

    monkeypatch.setattr(Bed, "copy", waits)
    monkeypatch.setattr(gpu_beside, "timed", holds)
    with pytest.raises(InvariantViolated, match="loads of small wait for what they run beside"):
        list(gpu_beside.slowdown(SMALL, CPU, 1 << 20, size=8))


def test_what_copies_beside_products_has_a_stream_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda of: ("a new stream", of))
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    with gpu_beside._own_stream(device) as stream:
        assert stream == ("a new stream", device)
    with gpu_beside._own_stream(CPU) as stream:
        assert stream is None


def test_a_thread_is_busy_while_copies_are_made_and_ends() -> None:
    before = threading.active_count()
    with gpu_beside.busy_thread() as company:
        load, save = gpu.copies(SMALL, CPU, 1 << 18, company)
    assert threading.active_count() == before
    assert load.what == "load, small, beside a busy thread: share of a plain copy"
    assert (load.bound, save.bound) == (None, None)
    assert min(load.found, save.found) > 0


def test_bounds_are_reached_or_not_exceeded() -> None:
    assert [Row("", n, 0.9).is_met for n in (0.89, 0.9)] == [False, True]
    assert [Row("", n, 1.03, is_most=True).is_met for n in (1.03, 1.04)] == [True, False]
    table = markdown([Row("a", 0.5, 0.9, note="5 GiB/s"), Row("b", 1.0, 1.03, is_most=True)])
    assert table.splitlines()[2:] == [
        "| a | 0.50 | ≥ 0.90 | NOT met; 5 GiB/s |",
        "| b | 1.00 | ≤ 1.03 | met |",
    ]
    assert Row("", 7.0, None).is_met
    told = markdown([Row("c", 7.0, None, note="of 8")])
    assert told.splitlines()[2:] == ["| c | 7.00 |  | of 8 |"]


class Moved:
    """vLLM's batch copy, in plain memory."""

    def __init__(self) -> None:
        self.pieces: list[int] = []  # of each call
        self.order: list[bool] = []  # whether sources may be read in any order

    def __call__(
        self, sources: Any, targets: Any, sizes: Any, is_src_access_order_any: bool
    ) -> None:
        self.pieces.append(len(sizes))
        self.order.append(is_src_access_order_any)
        for source, target, size in zip(
            sources.tolist(), targets.tolist(), sizes.tolist(), strict=True
        ):
            ctypes.memmove(target, source, size)


@pytest.fixture
def vllms(monkeypatch: pytest.MonkeyPatch) -> Moved:
    ops = pytest.importorskip("vllm._custom_ops")
    moved = Moved()
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(ops, "swap_blocks_batch", moved)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    return moved


@pytest.mark.parametrize(("outermost", "pieces"), [(False, 3), (True, 1)])
def test_vllms_own_copy_moves_the_same_bytes(
    vllms: Moved, monkeypatch: pytest.MonkeyPatch, outermost: bool, pieces: int
) -> None:
    geometry = SMALL._replace(blocks_outermost=outermost, page_bytes=32 << 10)
    monkeypatch.setattr(gpu_native, "GEOMETRIES", (geometry,))
    native = gpu_native.find_native(CPU)
    assert native is not None
    load, save = gpu_native.rows(CPU, native, 1 << 20)
    assert (load.bound, save.bound) == (None, None)
    assert min(load.found, save.found) > 0
    blocks = (1 << 20) // (geometry.row_bytes * 2) * 2
    assert {*vllms.pieces} == {blocks * pieces}
    assert {*vllms.order} == {True, False}


def test_copies_that_are_not_vllms_are_not_compared(
    vllms: Moved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_native, "GEOMETRIES", (SMALL,))
    nothing: Any = lambda *_, is_load: None
    with pytest.raises(InvariantViolated, match="vLLM's copies are not ours"):
        list(gpu_native.rows(CPU, nothing, 1 << 20))


@pytest.mark.parametrize(
    ("piece", "is_load", "by_kernel"),
    [(18432, True, True), (18432, False, False), (28672, True, False), (18436, True, False)],
)
def test_vllms_rule_says_when_its_kernel_copies(piece: int, is_load: bool, by_kernel: bool) -> None:
    small: Any = SimpleNamespace(THRESHOLD_BYTES=28672, swap_blocks_batch=lambda **_: None)
    plain: Any = lambda: None
    chosen: Any = gpu_native._choose(plain, small, piece, is_load=is_load)
    assert (chosen is not plain) is by_kernel
    if by_kernel:
        assert chosen.keywords == {"bytes_per_chunk": 8192}


def test_the_table_to_fill_has_a_row_for_each_that_is_measured_in_that_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = tuple(g._replace(layers=1, page_bytes=4096, per_slot=2) for g in GEOMETRIES)
    monkeypatch.setattr(torch, "mm", lambda *_: time.sleep(0.005))  # in which copies are made
    monkeypatch.setattr(gpu_beside, "PRODUCTS_SECONDS", 0.03)
    monkeypatch.setattr(gpu_beside, "REPETITIONS", 3)
    for module in (gpu, gpu_beside, gpu_native):
        monkeypatch.setattr(module, "GEOMETRIES", small)
    moved = Moved()

    def native(sources: Any, targets: Any, sizes: Any, *, is_load: bool) -> None:
        moved(sources, targets, sizes, is_load)

    answers = [Answered("plain", 1, 0.1, 3000, [1])]
    copies = [row for geometry in small for row in gpu.copies(geometry, CPU, 1 << 16)]
    others = [
        *gpu_beside.rows(CPU, 1 << 16, size=8),
        *(
            row
            for serving, modes in SERVINGS
            for mode in modes
            for row in gpu_serving._compare(serving, mode, answers, answers, answers)
        ),
        *(
            row
            for tokens in (2050, 8200)
            for row in gpu_blend.compare([Pair(tokens, 0.975, 2.0, 1.0, tokens, 1.0, 1.0)])
        ),
        *gpu_beside.busy_rows(CPU, 1 << 16),
        *gpu_native.rows(CPU, native, 1 << 16),
    ]
    kernels = [
        ("rotation and scatter: share of a copy on the device", "≥ 0.80"),
        ("attention by position: share of torch's causal attention", "≥ 0.60"),
    ]
    page = (script.ROOT / "docs" / "gpu.md").read_text()
    measured = [*bounds(markdown(copies)), *kernels, *bounds(markdown(others))]
    assert bounds(page) == measured


def test_a_prompt_that_was_not_blended_is_not_met() -> None:
    pairs = [Pair(2050, 0.975, 2.0, 0.5, cached, 1.0, 1.0) for cached in (2048, 64)]
    share, ratio = gpu_blend.compare(pairs)
    assert (share.found, share.is_met, ratio.found) == (0.5, False, 0.25)


def bounds(text: str) -> list[tuple[str, str]]:
    """What the rows of the table in *text* are of, and their bounds; of one day or of several."""
    table = re.search(r"^\| \|.*\| bound \| \|\n(?:\|.*\n?)+", text, re.MULTILINE)
    assert table is not None
    titles, _, *rows = [[c.strip() for c in line.split("|")] for line in table[0].splitlines()]
    return [(row[1], row[titles.index("bound")]) for row in rows]


@pytest.mark.parametrize(
    ("body", "passed"),
    [
        ("warnings.warn('TRITON_DEFAULT_FP_FUSION is unset', UserWarning)", True),
        ("assert 'TRITON_INTERPRET' not in os.environ", True),
        ("assert os.environ['KERNEL_TESTS']", True),
        ("assert False", False),
    ],
)
def test_a_test_on_a_gpu_may_be_warned_but_must_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, passed: bool
) -> None:
    """Under this repository's own settings, and whatever its environment says."""
    settings = Path(script.__file__).parents[1] / "pyproject.toml"
    (tmp_path / settings.name).write_bytes(settings.read_bytes())
    (tmp_path / "test_it.py").write_text(f"import os, warnings\ndef test_it(): {body}\n")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "TESTS", ("test_it.py",))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert script.run_tests() is passed


def test_without_a_gpu_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([]) == 2
    assert "finds no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "passed", "fault", "status"),
    [
        (1.0, True, None, 0),
        (0.5, True, None, 1),
        (1.0, False, None, 1),
        (1.0, True, RuntimeError("no"), 1),
    ],
)
def test_it_writes_what_it_found(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    found: float,
    passed: bool,
    fault: Exception | None,
    status: int,
) -> None:
    def rows(total_bytes: int) -> Iterator[Row]:
        yield Row("a", found, 0.9)
        if fault is not None:
            raise fault

    monkeypatch.setattr(script, "problem", lambda: None)
    monkeypatch.setattr(script, "run_tests", lambda: passed)
    monkeypatch.setattr(gpu_about, "about", lambda _: {"gpu": "a GPU"})
    monkeypatch.setattr(script, "rows", rows)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr("sys.path", [*sys.path])
    assert script.main(["--json", str(tmp_path / "gpu.json")]) == status
    written: Any = json.loads((tmp_path / "gpu.json").read_text())
    assert written["about"]["tests_passed"] is passed
    assert written["about"]["failed"] == (None if fault is None else "RuntimeError: no")
    assert written["rows"][0]["is_met"] is (found >= 0.9)


def test_what_takes_longer_than_ten_minutes_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended = []

    def rows(total_bytes: int) -> Iterator[Row]:
        yield Row("a", 1.0, 0.9)
        try:
            time.sleep(60)  # longer than the test waits
        finally:
            ended.append(total_bytes)

    monkeypatch.setattr(script, "problem", lambda: None)
    monkeypatch.setattr(script, "ALL_SECONDS", 0.3)
    monkeypatch.setattr(gpu_about, "about", lambda _: {"gpu": "a GPU"})
    monkeypatch.setattr(script, "rows", rows)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr("sys.path", [*sys.path])
    assert script.main(["--skip-tests", "--json", str(tmp_path / "gpu.json")]) == 1
    written: Any = json.loads((tmp_path / "gpu.json").read_text())
    assert "the rest is left out" in written["about"]["failed"]
    assert [row["what"] for row in written["rows"]] == ["a"]
    assert ended == [1 << 30]
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("is_installed", "has_copy", "expected"),
    [(False, False, "cbt"), (True, True, "cbssdtn"), (True, False, "cbssdt")],
)
def test_vllm_is_measured_where_it_is_installed_and_what_is_only_told_comes_last(
    monkeypatch: pytest.MonkeyPatch, is_installed: bool, has_copy: bool, expected: str
) -> None:
    monkeypatch.setattr(gpu, "rows", lambda *_: iter("c"))
    monkeypatch.setattr(gpu_beside, "rows", lambda *_: iter("b"))
    monkeypatch.setattr(gpu_beside, "busy_rows", lambda *_: iter("t"))
    monkeypatch.setattr(gpu_native, "rows", lambda *_: iter("n"))
    monkeypatch.setattr(gpu_native, "find_native", lambda _: "copy" if has_copy else None)
    monkeypatch.setattr(gpu_serving, "rows", lambda *_: iter("s"))
    monkeypatch.setattr(gpu_blend, "rows", lambda *_: iter("d"))
    monkeypatch.setattr(gpu_serving, "is_vllm_installed", lambda: is_installed)
    assert "".join(script.rows(1)) == expected


HANGS = """
import signal, sys, time
from bench.gpu_rows import Row
from scripts import gpu

def measure(report, total_bytes, seconds):
    report.rows.append(Row("a", 1.0, 0.9))
    with gpu.cut_after(seconds):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})  # as in a call of the driver
        time.sleep(60)

gpu.problem, gpu.measure = lambda: None, measure
gpu.ALL_SECONDS, gpu.END_SECONDS = 0.1, 0.2
gpu.main(["--skip-tests", "--json", sys.argv[1]])
"""


def test_what_hangs_is_ended_and_what_there_is_is_written(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(tmp_path / "gpu.json")],
        cwd=script.ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 1
    assert "| a | 1.00 |" in done.stdout
    written: Any = json.loads((tmp_path / "gpu.json").read_text())
    assert "a call hangs: the rest is left out" in written["about"]["failed"]
    assert [row["what"] for row in written["rows"]] == ["a"]


def test_a_run_says_on_what_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="a GPU", total_memory=80 << 30, multi_processor_count=132, major=9, minor=0
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(gpu_about, "driver_library", Driver)
    about = gpu_about.about(torch.device("cuda", 0))
    assert (about["gpu"], about["capability"], about["driver_api"]) == ("a GPU", "9.0", 12080)
    assert {"cuda", "hip", "driver", "cuda-bindings", "triton", "vllm"} <= about.keys()
    json.dumps(about)


class Driver:
    """The library of a driver of CUDA 12.8."""

    def __init__(self, *, is_rocm: bool) -> None:
        assert not is_rocm

    def cuDriverGetVersion(self, found: Any) -> int:
        found._obj.value = 12080
        return 0


def test_without_a_driver_its_version_is_not_known() -> None:
    assert gpu_about.driver_version(is_rocm=True) is None


def test_what_is_said_of_the_choice_and_the_pins_is_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told: list[str] = []
    ours = logging.getLogger("kvstrata")
    before = ours.level, list(ours.handlers)
    with gpu_about.told(told), closing(Bed(SMALL, CPU, 1 << 16)):
        logging.getLogger("kvstrata.transfer").info("copies by %s", "DMA")
        ours.debug("nobody asks")
    assert told == ["pages of small:", "copies by DMA"]
    assert capsys.readouterr().err.splitlines() == told
    assert (ours.level, ours.handlers) == before


def test_a_row_says_what_its_copies_are_unlike_others_in(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = SMALL._replace(page_bytes=512)
    with closing(Bed(geometry, CPU, 1 << 16)) as bed:
        assert bed.remarks(is_load=True) == ["host tier not pinned"]
        monkeypatch.setattr(Bed, "is_pinned", True)
        loads, saves = (
            SimpleNamespace(_stream=SimpleNamespace(kernel_bytes=limit)) for limit in (512, 511)
        )
        monkeypatch.setattr(bed, "device", SimpleNamespace(_loads=loads, _saves=saves))
        assert bed.remarks(is_load=True) == ["by kernel, multiprocessors: 3"]
        assert bed.remarks(is_load=False) == []
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("serving", "expected", "bound"),
    [
        (gpu_serving.USUAL, ("float32", True, 9), 0),
        (gpu_serving.FAST, ("bfloat16", False, 5), None),
    ],
)
def test_engines_compute_exactly_or_as_they_serve(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    serving: gpu_serving.Serving,
    expected: tuple[str, bool, int],
    bound: float | None,
) -> None:
    given: list[EngineOrders] = []

    def play(orders: EngineOrders, log: Path) -> Iterator[Answered]:
        given.append(orders)
        for phase in orders.phases:
            for number in range(len(orders.prompts)):
                yield Answered(phase, number, 0.1, 3000, [number])

    monkeypatch.setattr(gpu_serving, "events_of", play)
    rows = list(gpu_serving.rows(tmp_path, serving, ["blockwise"]))
    assert [row.bound for row in rows] == [bound, bound, 0.9, None, None]
    assert {(each.dtype, each.is_eager, len(each.prompts)) for each in given} == {expected}
    assert [each.tiers is None for each in given] == [True, False]
    assert {Path(each.model).name for each in given} == {f"model-{serving.dtype}"}

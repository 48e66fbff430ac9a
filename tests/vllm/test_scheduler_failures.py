"""Copies that fail under the scheduler half."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.caches import PATIENCE_SECONDS, eventually, host_slot, known
from tests.vllm.bench import Bench, prompt, start
from tests.vllm.faults import Again, Clock, Copies
from tests.vllm.plans import copiers
from vllm.v1.request import RequestStatus

from kvstrata.core.errors import ServerUnavailable
from kvstrata.integration.vllm import worker as worker_module
from kvstrata.manager.tasks import TaskState


def test_failed_loads_are_computed_instead(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bench.engine()
    engine.serve("a", prompt(1, 60), 2)
    engine.forget_device()
    copier: Any = copiers(engine.runner.half)[0]

    def broken(device_blocks: Any, rows: Any) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(copier, "copy_to_device", broken)
        engine.serve("b", prompt(1, 60), 2)
    assert bench.counters()["kvstrata_failed_loads_total"] == 1
    engine.forget_device()
    engine.serve("c", prompt(1, 60), 2)
    engine.forget_device()
    assert engine.serve("d", prompt(1, 60), 2) == 56


def test_what_fails_on_one_rank_alone_is_computed_by_all_and_not_kept(folder: Path) -> None:
    with start(folder, 400, ranks=2) as bench:
        engine = bench.engine(ranks=2)
        ranks = [Copies(engine, 0), Copies(engine, 1)]
        ranks[1].failing_saves = 99
        engine.serve("a", prompt(1, 60), 2)
        assert bench.saved_keys() == set()
        engine.forget_device()
        ranks[1].heal()
        engine.serve("b", prompt(1, 60), 2)
        assert len(bench.saved_keys()) == bench.check_saved_bytes(engine) == 7
        engine.forget_device()
        ranks[1].failing_loads = 1
        engine.serve("c", prompt(1, 60), 2)
        assert ranks[0].seen["failed loads of rank 0"] == 0
        assert ranks[1].seen["failed loads of rank 1"] == 1
        assert bench.counters()["kvstrata_failed_loads_total"] == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_load_that_is_late_is_computed_and_its_blocks_stay_unless_a_rank_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(worker_module, "_COPY_HERE_BYTES", 0)  # or nobody could let them go
    with start(folder, 400, ranks=2) as bench:
        engine = bench.engine(ranks=2)
        engine.serve("a", prompt(1, 60), 2)
        saved = bench.saved_keys()
        engine.forget_device()
        late, other, clock = Copies(engine, 0), Copies(engine, 1), Clock()
        engine.runner.ranks[0].half._clock = clock
        other.failing_loads = int(fails)
        late.hold()
        engine.add("b", prompt(1, 60), 2)

        def is_held() -> bool:
            engine.step()
            return late.seen["held copies"] > 0

        eventually(is_held, "no load begins")
        clock.jump(1000.0)
        for _ in range(20):
            engine.step()
            time.sleep(0.005)  # for the other rank, and for the server
        assert bench.manager.stats().leased_blocks == 7
        assert engine.requests["b"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
        late.go()
        engine.run()
        assert bench.counters()["kvstrata_failed_loads_total"] == 1
        assert bench.counters()["kvstrata_saved_blocks_total"] == (14 if fails else 7)
        assert bench.saved_keys() == saved
        assert bench.check_saved_bytes(engine) == 7
        engine.forget_device()
        assert engine.serve("c", prompt(1, 60), 2) == 56


def test_a_report_that_comes_twice_stands_for_no_other_rank(folder: Path) -> None:
    with start(folder, 400, ranks=2) as bench:
        engine = bench.engine(ranks=2)
        ranks = [Copies(engine, 0), Copies(engine, 1)]
        again = Again(engine.connector)
        again.on = True
        ranks[1].hold()
        engine.add("a", prompt(1, 60), 2)
        for _ in range(20):
            engine.step()
            time.sleep(0.005)  # for the copies of the first rank
        assert all(host_slot(bench.manager, key) < 0 for key in known(bench.manager))
        ranks[1].go()
        engine.run()
        assert len(bench.saved_keys()) == bench.check_saved_bytes(engine) == 7
        engine.forget_device()
        engine.add("c", prompt(2, 8), 40)  # in steps with nothing to compute loads are made at once
        engine.step()
        ranks[1].hold()
        engine.add("b", prompt(1, 60), 2)
        for _ in range(20):
            engine.step()
            time.sleep(0.005)  # as above
        assert bench.manager.counters.snapshot()["kvstrata_loaded_blocks_total"] == 0
        ranks[1].go()
        engine.run()
        assert bench.counters()["kvstrata_loaded_blocks_total"] == 7
        again.on = False


def test_a_load_that_failed_is_not_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the server still has the blocks, as it may from disk or another node."""
    engine = bench.engine()
    engine.serve("a", prompt(1, 60), 2)
    engine.forget_device()
    copier: Any = copiers(engine.runner.half)[0]
    real, tried = copier.copy_to_device, list[Any]()

    def broken(device_blocks: Any, rows: Any) -> None:
        tried.append(device_blocks)
        if len(tried) <= 3:
            raise OSError("no")
        real(device_blocks, rows)

    monkeypatch.setattr(bench.manager, "fail", bench.manager.complete)
    monkeypatch.setattr(copier, "copy_to_device", broken)
    engine.serve("b", prompt(1, 60), 2)
    assert len(tried) == 1


def test_abort_within_a_load_saves_nothing_of_what_has_not_arrived(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM counts the tokens as computed, and a server that came meanwhile lacks them."""
    engine = bench.engine()
    engine.serve("a", prompt(1, 60), 2)
    engine.forget_device()
    aborted = threading.Event()

    def broken(device_blocks: Any, rows: Any) -> None:
        aborted.wait(PATIENCE_SECONDS)
        raise OSError("no")

    monkeypatch.setattr(worker_module, "_COPY_HERE_BYTES", 0)
    monkeypatch.setattr(copiers(engine.runner.half)[0], "copy_to_device", broken)
    engine.add("b", prompt(1, 60), 2)

    def loads() -> bool:
        engine.step()
        return "b" in engine.runner.loaded_tokens

    eventually(loads, "no load begins")
    bench.manager.reset(engine.half._namespace)
    engine.half._link._drop(ServerUnavailable("gone"))
    engine.ready(bench.manager)
    engine.scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)
    aborted.set()
    engine.run()
    assert bench.saved_keys() == set()
    assert engine.half._loads._refused == set()


def test_failed_saves_are_not_found_and_made_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bench.engine()
    copier: Any = copiers(engine.runner.half)[0]

    def broken(device_blocks: Any, rows: Any) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(copier, "copy_to_host", broken)
        engine.serve("a", prompt(1, 60), 2)
    assert bench.saved_keys() == set()
    engine.forget_device()
    engine.serve("b", prompt(1, 60), 2)
    assert len(bench.saved_keys()) == 7
    assert bench.manager.get_match(engine.half._namespace, []).state is TaskState.DONE


def test_of_a_save_that_failed_half_way_the_first_half_is_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.integration.vllm.pieces._SAVE_PIECE_BYTES", 1)
    engine = bench.engine()
    copier: Any = copiers(engine.runner.half)[0]
    real, copied = copier.copy_to_host, list[Any]()

    def broken(device_blocks: Any, rows: Any) -> None:
        copied.append(device_blocks)
        if len(copied) > 3:
            raise OSError("no")
        real(device_blocks, rows)

    with monkeypatch.context() as patch:
        patch.setattr(copier, "copy_to_host", broken)
        engine.serve("a", prompt(1, 60), 2)
    assert len(bench.saved_keys()) == bench.check_saved_bytes(engine) == 3
    engine.forget_device()
    assert engine.serve("b", prompt(1, 60), 2) == 24
    assert len(bench.saved_keys()) == bench.check_saved_bytes(engine) == 7

"""What operators ask over the wire, beside engines that go on."""

from contextlib import closing
from pathlib import Path

import pytest
from tests.caches import (
    ALICE,
    BOB,
    PATIENCE_SECONDS,
    config,
    content,
    contents,
    eventually,
    keys,
    load,
    save,
)
from tests.server.harness import RawClient, engine, serving, worker

from kvstrata.core.errors import ConfigError, NoTiers
from kvstrata.manager.tasks import TaskState
from kvstrata.server import protocol as p
from kvstrata.server.client import observe

PROMPT = keys(1, 2, 3, 4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


def test_observers_clear_drain_and_look_while_an_engine_is_there(path: Path) -> None:
    with serving(config(8), path) as server, closing(engine(path)) as busy, closing(worker(path)):
        assert server.manager is not None
        save(server.manager, ALICE, PROMPT)
        load(server.manager, ALICE, PROMPT)
        with closing(observe(path)) as operator:
            assert [r.blocks for r in operator.hottest(4)] == [4]
            assert [bytes(k) for k in operator.prompt(ALICE, PROMPT[1])] == PROMPT[:2]
            assert operator.locate(ALICE, PROMPT) == (4, 4)
            reading = busy.get_match(ALICE, PROMPT[:1])
            planned = operator.clear(ALICE, "host", dry_run=True)
            assert (planned.blocks, planned.in_use_blocks) == ({"host": 3}, 1)
            assert operator.clear(ALICE, "host") == planned
            assert bytes(server.manager.view(reading.slots[0])) == content(ALICE, PROMPT[0])
            operator.drain(True)
            assert busy.put_match(BOB, keys(7)).state is TaskState.FAILED
            report = operator.stats()
            assert report is not None
            assert report.drain == "drained"
            operator.drain(False)
            assert busy.put_match(BOB, keys(7)).state is TaskState.READY
            assert operator.clear(None, None).blocks == {"host": 1}


def test_an_observer_brings_blocks_up_from_disk(path: Path, tmp_path: Path) -> None:
    with serving(config(8, tmp_path / "d"), path) as server:
        assert server.manager is not None
        save(server.manager, ALICE, PROMPT)
        assert server.manager._lower["disk"].drain(PATIENCE_SECONDS)
        with closing(observe(path, timeout_seconds=PATIENCE_SECONDS)) as operator:
            operator.clear(None, "host")
            task = operator.prefetch(ALICE, PROMPT)
            assert task
            found = operator.wait([task], PATIENCE_SECONDS)
            assert found[task].state is TaskState.DONE
            assert operator.locate(ALICE, PROMPT) == (4, 4)
            assert operator.prefetch(ALICE, PROMPT) == 0
        assert load(server.manager, ALICE, PROMPT) == contents(ALICE, PROMPT)


def test_what_an_observer_has_begun_ends_with_it(path: Path, tmp_path: Path) -> None:
    with serving(config(8, tmp_path / "d"), path) as server:
        manager = server.manager
        assert manager is not None
        save(manager, ALICE, PROMPT)
        assert manager._lower["disk"].drain(PATIENCE_SECONDS)
        manager.operator.clear(None, "host")
        with closing(observe(path)) as operator:
            operator.prefetch(ALICE, PROMPT)
        eventually(lambda: not manager.stats().running_gets, "a task of nobody is left")
        manager.check()


def test_an_observer_has_no_tasks_of_engines(path: Path) -> None:
    for request in (p.GetMatch(1, ALICE, b""), p.Launch([1]), p.Follow(ALICE)):
        with serving(config(8), path):
            raw = RawClient(path)
            raw.send(p.Hello(0, p.PROTOCOL_VERSION, "observer"), p.Prefetch(1, ALICE, b""), request)
            assert isinstance(raw.receive(), p.Welcome)
            assert raw.receive() == p.Number(1, 0)
            assert raw.receive() is None
            raw.close()


def test_a_server_without_tiers_says_so(path: Path) -> None:
    with serving(config(8), path, block_bytes=None), closing(observe(path)) as operator:
        assert operator.hottest(3) == []
        for ask in (
            lambda: operator.clear(None, None),
            lambda: operator.drain(True),
            lambda: operator.prefetch(ALICE, PROMPT),
            lambda: operator.locate(ALICE, PROMPT),
        ):
            with pytest.raises(NoTiers, match="no tiers yet"):
                ask()


def test_wrong_questions_are_refused_or_end_the_connection(path: Path) -> None:
    with serving(config(8), path):
        with closing(observe(path)) as operator:
            with pytest.raises(ConfigError, match="no tier 'tape'"):
                operator.clear(None, "tape")
            assert operator.clear(b"x" * 16, None).blocks == {"host": 0}
        for request in (p.Clear(1, b"short", "", True), p.Prompt(1, ALICE, b"short")):
            raw = RawClient(path)
            raw.send(p.Hello(0, p.PROTOCOL_VERSION, "observer"), request)
            assert isinstance(raw.receive(), p.Welcome)
            assert raw.receive() is None
            raw.close()

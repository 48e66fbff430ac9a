"""What an engine asks its server for its metrics, when, and what it makes of the answers."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.caches import ALICE, BLOCK_BYTES, PATIENCE_SECONDS, config, eventually, key, keys
from tests.server.harness import serving, worker

from kvstrata.core.config import Config
from kvstrata.core.errors import ServerUnavailable
from kvstrata.integration.vllm import meter as meter_module
from kvstrata.integration.vllm.engine_metrics import KVStrataStats
from kvstrata.integration.vllm.link import CacheLink
from kvstrata.integration.vllm.meter import Meter
from kvstrata.server import protocol as p

HELLO = p.Hello(0, p.PROTOCOL_VERSION, "engine", "e", BLOCK_BYTES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


def patient(**changes: Any) -> Config:
    return config(16, lookup_timeout_seconds=10, reconnect_seconds=0.01, **changes)


@contextmanager
def linked(path: Path, settings: Config) -> Iterator[tuple[CacheLink, Meter]]:
    link = CacheLink(settings, path, HELLO, None)
    with suppress(ServerUnavailable):
        link.connect(PATIENCE_SECONDS)
    try:
        yield link, Meter(settings, link)
    finally:
        link.close()


def told(link: CacheLink, meter: Meter, *, is_idle: bool = True) -> dict[str, Any]:
    """What comes of steps until there is nothing more to tell."""
    found = KVStrataStats()
    meter.step(is_idle=is_idle)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while meter.busy and time.monotonic() < deadline:
        link.tick()
        meter.step(is_idle=True)
    while (stats := meter.take()) is not None:
        found.aggregate(stats)
    return found.data


def test_each_count_is_told_once_and_at_the_end_of_the_work(path: Path) -> None:
    with (
        serving(patient(), path),
        linked(path, patient()) as (link, meter),
        closing(worker(path)),
    ):
        first = told(link, meter)
        assert first["counters"] == {}
        assert first["gauges"]["kvstrata_connected|embedded"] == 1
        assert first["gauges"]["kvstrata_tier_capacity_bytes|host"] == 16 * BLOCK_BYTES
        for count in (2, 3):
            asked = keys(*range(count))
            link.submit(p.GetMatch(0, ALICE, b"".join(asked), "r"))
            found = told(link, meter, is_idle=False)
            assert found["counters"] == {
                "kvstrata_lookups_total": 1,
                "kvstrata_lookup_blocks_total|none": count,
            }
            assert found["gauges"] == {}
            spread = found["spreads"]["kvstrata_lookup_seconds|none"]
            assert spread[1] == 1
        assert not meter.busy


def test_what_an_idle_step_has_asked_needs_no_other_step_if_it_is_answered(path: Path) -> None:
    with (
        serving(patient(), path),
        linked(path, patient()) as (link, meter),
        closing(worker(path)),
    ):
        told(link, meter)
        link.submit(p.GetMatch(0, ALICE, b"".join(keys(0, 1)), "r"))
        meter.step(is_idle=True)
        assert meter.busy
        found = KVStrataStats()

        def is_told() -> bool:
            if (stats := meter.take()) is not None:
                found.aggregate(stats)
            return not found.is_empty()

        eventually(is_told, "the answer is not taken in")
        assert found.data["counters"]["kvstrata_lookups_total"] == 1
        assert not meter.busy


def test_a_step_with_work_waits_for_no_answer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an idle step has asked and the server hangs since."""
    with serving(patient(), path), linked(path, patient()) as (link, meter):
        told(link, meter)
        waits: list[float] = []
        monkeypatch.setattr(link, "poll", waits.append)
        link.submit(p.Cancel([1]))
        meter.step(is_idle=True)
        meter.take()
        assert waits.pop() > 0
        for _ in range(3):
            meter.step(is_idle=False)
            meter.take()
        assert waits == [0, 0, 0]


def test_an_engine_that_does_nothing_asks_for_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(patient(), path), linked(path, patient()) as (link, meter):
        told(link, meter)
        monkeypatch.setattr(meter_module, "_PERIOD_SECONDS", 1000.0)
        told(link, meter, is_idle=False)
        asked: list[p.Request] = []
        monkeypatch.setattr(link, "submit", asked.append)
        for _ in range(100):
            meter.step(is_idle=True)
        assert not asked
        assert meter.take() is None


def test_a_step_that_asked_nothing_of_the_server_needs_no_other_to_tell_of_it(path: Path) -> None:
    with serving(patient(), path), linked(path, patient()) as (link, meter):
        told(link, meter)
        meter.step(is_idle=False)
        needs_more = meter.busy
        assert not needs_more
        sent = link.sent
        link.submit(p.Cancel([1]))  # as when a lease is given back
        assert link.sent != sent
        assert meter.busy


def test_a_report_of_a_busy_step_is_not_the_last(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the server does of itself, as writing to disk, goes on."""
    with serving(patient(), path), linked(path, patient()) as (link, meter):
        told(link, meter)
        monkeypatch.setattr(meter, "_next", 0.0)
        meter.step(is_idle=False)
        while meter._pending is not None:
            link.tick()
            meter.step(is_idle=False)
        assert meter.busy
        told(link, meter)
        assert not meter.busy


def test_a_busy_engine_asks_once_a_period(path: Path) -> None:
    with serving(patient(), path), linked(path, patient()) as (link, meter):
        told(link, meter)
        asked: list[p.Request] = []
        submit = link.submit

        def counting(request: p.Request) -> Any:
            asked.append(request)
            return submit(request)

        link.submit = counting  # type: ignore[method-assign]  # counts what goes out
        began = time.monotonic()
        for _ in range(1000):
            link.tick()
            meter.step(is_idle=False)
        periods = (time.monotonic() - began) / meter_module._PERIOD_SECONDS
        assert len(asked) <= 1 + periods


def test_another_server_begins_at_nothing(path: Path) -> None:
    with linked(path, patient()) as (link, meter):
        assert told(link, meter)["gauges"] == {"kvstrata_connected|embedded": 0}
        for _ in range(2):
            with serving(patient(), path):
                eventually(lambda: _is_ready(link), "no connection")
                with closing(worker(path)):
                    eventually(lambda: _looks_up(link), "the worker is not seen")
                    counters = told(link, meter, is_idle=False)["counters"]
                    assert counters["kvstrata_lookup_blocks_total|none"] >= 1
            eventually(lambda: not _is_ready(link), "still connected")
            assert not meter.busy
            assert told(link, meter)["gauges"]["kvstrata_connected|embedded"] == 0


def _is_ready(link: CacheLink) -> bool:
    link.tick()
    return link.ready


def _looks_up(link: CacheLink) -> bool:
    pending = link.submit(p.GetMatch(0, ALICE, key(1), "r"))
    assert pending is not None
    while pending.reply is None:
        link.poll(PATIENCE_SECONDS)
    assert pending.status is not None
    return pending.status.state.value == "done"


def test_of_an_attached_server_only_its_presence_is_told(path: Path) -> None:
    attached = config(4).model_copy(update={"server": "attached", "socket": path})
    with serving(patient(), path), linked(path, attached) as (link, meter):
        found = told(link, meter, is_idle=False)
        assert found["counters"] == found["spreads"] == {}
        assert found["gauges"] == {f"kvstrata_connected|{path}": 1}
        assert not meter.busy


def test_a_server_that_does_not_answer_does_not_keep_the_engine_stepping(path: Path) -> None:
    hasty = patient().model_copy(update={"lookup_timeout_seconds": 0.05})
    with serving(patient(), path), linked(path, hasty) as (_, meter):
        meter.step(is_idle=False)
        meter.step(is_idle=True)
        assert meter.busy
        eventually(lambda: not meter.busy, "busy for ever")  # nobody polls: no answer comes

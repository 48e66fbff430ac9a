"""What a contender has used, by processes that are no engines."""

from collections.abc import Mapping
from typing import Any

import pytest

from kvstrata.bench.meter import Meter
from kvstrata.bench.processes import ROLES, Role, Usage
from kvstrata.bench.traffic import Counters


class Metered:
    """Its engine, and its server number ``server``, have used what they are said to have."""

    def __init__(self) -> None:
        self.server: int | None = 1
        self.seconds: dict[str, float] = {}
        self.moved: dict[str, int] = {}
        self.asked = 0

    @property
    def server_pids(self) -> set[int]:
        return set() if self.server is None else {self.server}

    def usage(self) -> dict[Role, Usage]:
        return {role: Usage(self.seconds.get(role, 0.0), 10, 5, 5) for role in ROLES}

    def counters(self) -> Counters:
        self.asked += 1
        return Counters(dict(self.moved))


def used(meter: Meter) -> Mapping[str, float]:
    return {role: use.cpu_seconds for role, use in meter.used.items()}


@pytest.fixture
def member() -> Any:
    made: Any = Metered()
    made.seconds = {"engine": 7.0, "server": 2.0}
    made.moved = {"host read": 50}
    return made


def test_what_was_used_before_and_between_two_stretches_does_not_count(member: Any) -> None:
    meter = Meter(member)
    member.seconds = {"engine": 8.0, "server": 3.0}
    member.moved = {"host read": 60}
    meter.pause()
    member.server, member.seconds = 2, {"engine": 30.0, "server": 1.0}  # all new, after a restart
    member.moved = {}
    meter.go_on()
    member.seconds = {"engine": 30.5, "server": 1.25}
    member.moved = {"host read": 4, "host write": 0}
    meter.pause()
    assert used(meter) == {"client": 0.0, "engine": 1.5, "worker": 0.0, "server": 1.25}
    assert meter.moved_bytes == {"host read": 14}
    assert meter.used["worker"] == Usage(0.0, 10, 0, 0)


def test_a_server_that_starts_within_a_stretch_counts_from_its_start(member: Any) -> None:
    meter = Meter(member)
    member.seconds["server"] = 2.5
    meter.pause(busy=True)
    asked = member.asked
    member.server, member.seconds["server"] = None, 0.0  # it was killed
    meter.go_on(busy=True)
    assert member.asked == asked
    member.server, member.seconds["server"] = 2, 0.75
    meter.pause()
    assert used(meter)["server"] == 1.25
    assert meter.moved_bytes == {}


def test_of_a_server_that_has_ended_by_itself_nothing_is_said(member: Any) -> None:
    meter = Meter(member)
    member.server, member.moved = 2, {"host read": 60}
    meter.pause()
    assert meter.used.keys() == {"client", "engine", "worker"}
    assert meter.moved_bytes == {}

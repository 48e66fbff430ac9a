"""What a cache did in each second, from the reports of its server."""

from collections.abc import Mapping
from typing import Final

import msgspec

from kvstrata.manager.report import CacheReport

__all__ = ["Activity", "Sample", "activity", "sample"]

_MOVED: Final = {
    "loaded": "kvstrata_loaded_blocks_total",
    "saved": "kvstrata_saved_blocks_total",
    "promoted": "kvstrata_promoted_blocks_total",
    "cascaded": "kvstrata_cascaded_blocks_total",
    "evicted": "kvstrata_evicted_blocks_total",
    "shed": "kvstrata_shed_blocks_total",
}
_LOOKED_UP: Final = ("host", "disk", "remote", "none")
_LOOKUPS: Final = "kvstrata_lookups_total"
_LOOKUP_BLOCKS: Final = "kvstrata_lookup_blocks_total{{tier={}}}"


class Calls(msgspec.Struct, frozen=True):
    """Calls of one operation of a tier's store."""

    calls: int
    seconds: float
    moved_bytes: int


class Sample(msgspec.Struct, frozen=True):
    """What happened between two reports."""

    number: int
    at_seconds: float  # Unix time of the later one
    seconds: float  # between them
    lookups: int
    looked_up: dict[str, int]  # blocks, by the tier that had them; none: a miss
    moved: dict[str, int]  # blocks
    used: dict[str, int]  # blocks in each tier, at the end
    operations: dict[str, Calls]  # by tier and operation


class Activity(msgspec.Struct, frozen=True):
    """The sum of some samples."""

    seconds: float
    lookups: int
    looked_up: dict[str, int]
    moved: dict[str, int]

    @property
    def hit_rate(self) -> float | None:
        """The part of the blocks looked up that was found; None without any."""
        asked = sum(self.looked_up.values())
        return 1 - self.looked_up["none"] / asked if asked else None


def sample(
    before: CacheReport, after: CacheReport, *, number: int, at_seconds: float, seconds: float
) -> Sample:
    """What happened between two reports of one life of a server."""
    counted = {name: value - before.counters.get(name, 0) for name, value in after.counters.items()}
    calls = _operations(before)
    return Sample(
        number,
        at_seconds,
        seconds,
        counted.get(_LOOKUPS, 0),
        {tier: counted.get(_LOOKUP_BLOCKS.format(tier), 0) for tier in _LOOKED_UP},
        {name: _sum(counted, metric) for name, metric in _MOVED.items()},
        {tier.tier: tier.used_blocks for tier in after.tiers},
        {
            name: Calls(
                now.calls - then.calls,
                now.seconds - then.seconds,
                now.moved_bytes - then.moved_bytes,
            )
            for name, now in _operations(after).items()
            if now.calls > (then := calls.get(name, _NO_CALLS)).calls
        },
    )


_NO_CALLS: Final = Calls(0, 0.0, 0)


def activity(samples: list[Sample]) -> Activity:
    """The sum of *samples*."""
    return Activity(
        sum(each.seconds for each in samples),
        sum(each.lookups for each in samples),
        {tier: sum(each.looked_up[tier] for each in samples) for tier in _LOOKED_UP},
        {name: sum(each.moved[name] for each in samples) for name in _MOVED},
    )


def _operations(report: CacheReport) -> dict[str, Calls]:
    return {
        f"{each.tier} {each.operation}": Calls(each.calls, each.seconds, each.moved_bytes)
        for each in report.operations
    }


def _sum(counted: Mapping[str, int], metric: str) -> int:
    """The counter *metric*, over its labels if it has some."""
    return sum(value for name, value in counted.items() if name.partition("{")[0] == metric)

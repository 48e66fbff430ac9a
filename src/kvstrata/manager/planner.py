"""What a lookup should load, and what the engine computes sooner than it could be loaded."""

import enum
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstrata.manager.writes import LowerTier
from kvstrata.transfer.read_meter import ReadCost

_PROBE_SECONDS: Final = 30.0  # a tier that lost is tried again after this: it may have recovered


class Reason(enum.Enum):
    """Why a lookup takes as many of the found blocks as it does."""

    ALL = "all"  # every block found is taken
    RECOMPUTE = "recompute"  # the rest is computed sooner than it could be read
    TOO_LATE = "too_late"  # the rest would come after the load timeout
    PROBE = "probe"  # all is taken, to measure a tier that has lost for a while
    NO_ROOM = "no_room"  # host memory cannot take the rest
    OFF = "off"  # the rest begins in a tier that is switched off
    UNANSWERED = "unanswered"  # the tier that nodes share said too late what it has of the rest


class Plan(NamedTuple):
    """How much of what was found is to be loaded."""

    blocks: int  # the leading ones
    reason: Reason
    load_seconds: float  # until the last of them is expected in host memory
    recompute_seconds: float | None  # for the engine to compute them; None: not measured yet


def all_of(blocks: int, rate: float | None) -> Plan:
    """The plan for found blocks that need not be read; *rate* as of ``Planner.plan``."""
    return Plan(blocks, Reason.ALL, 0.0, blocks / rate if rate else None)


class Planner:
    """Chooses the end of a load. Needs the manager's lock.

    Taking one more block from a tier below pays if the engine would need longer to compute what
    it saves: that block, and all that were found behind it, which a cut would take away. So the
    end is where seconds saved less seconds read are most, over all ends.
    """

    def __init__(
        self,
        costs: Mapping[LowerTier, Callable[[], ReadCost | None]],
        *,
        load_timeout_seconds: float,
        take_all: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*costs* tell what each tier below takes now, None before its first measurement.

        *take_all*: whatever it takes.
        """
        self._costs = costs
        self._take_all = take_all
        self._clock = clock
        self._timeout = load_timeout_seconds
        self._lost_since: dict[LowerTier, float] = {}

    def plan(
        self, sources: NDArray[np.uint8], tiers: tuple[LowerTier, ...], rate: float | None
    ) -> Plan:
        """For found blocks in prompt order: ``sources[i]`` is 0 in host memory or on the way
        there, else 1 + the index in *tiers* of where it has to be read.

        *rate* is the engine's blocks a second.
        """
        if self._take_all or not sources.any():
            return all_of(len(sources), rate)
        read = self._read_seconds(sources, tiers)
        blocks, reason = len(sources), Reason.ALL
        if read[-1] > self._timeout:
            blocks = int(np.searchsorted(read, self._timeout, side="right")) - 1
            reason = Reason.TOO_LATE
        if rate is not None and rate > 0:
            saved = np.arange(len(sources) + 1) / rate - read
            best = int(saved[: blocks + 1].argmax())
            if best < blocks:
                blocks, reason = best, Reason.RECOMPUTE
        if blocks < len(sources) and self._probes(sources[blocks:], tiers):
            blocks, reason = len(sources), Reason.PROBE
        recompute = blocks / rate if rate else None
        return Plan(blocks, reason, float(read[blocks]), recompute)

    def choose(
        self,
        ends: Sequence[tuple[int, NDArray[np.uint8]]],
        tiers: tuple[LowerTier, ...],
        rate: float | None,
    ) -> Plan:
        """``plan`` where a load can end at some places alone; of 0 blocks if at none.

        *ends*: how many blocks lead there, ascending, and the sources of all that it takes.
        """
        found, sources = ends[-1]
        if self._take_all or not sources.any():
            return all_of(found, rate)
        read = {blocks: float(self._read_seconds(s, tiers)[-1]) for blocks, s in ends}
        in_time = [blocks for blocks in read if read[blocks] <= self._timeout]
        blocks, reason = max(in_time, default=0), Reason.ALL
        if blocks < found:
            reason = Reason.TOO_LATE
        read[0] = 0.0
        if rate is not None and rate > 0:
            best = max([0, *in_time], key=lambda end: end / rate - read[end])
            if best < blocks:
                blocks, reason = best, Reason.RECOMPUTE
        if blocks < found and self._probes(sources, tiers):
            blocks, reason = found, Reason.PROBE
        return Plan(blocks, reason, read[blocks], blocks / rate if rate else None)

    def _read_seconds(
        self, sources: NDArray[np.uint8], tiers: tuple[LowerTier, ...]
    ) -> NDArray[np.float64]:
        """What the first ``i`` of *sources* take to be read, for every ``i``."""
        read = np.zeros(len(sources) + 1)
        for number, tier in enumerate(tiers, 1):
            here = sources == number
            if here.any() and (cost := self._costs[tier]()) is not None:
                read[1:] += np.cumsum(here) * cost.block_seconds
                read[1:] += np.maximum.accumulate(here) * cost.wait_seconds
        return read

    def _probes(self, declined: NDArray[np.uint8], tiers: tuple[LowerTier, ...]) -> bool:
        """Whether a tier that has lost is to be tried all the same."""
        now = self._clock()
        probes = False
        for number, tier in enumerate(tiers, 1):
            if (declined == number).any():
                probes |= now - self._lost_since.setdefault(tier, now) > _PROBE_SECONDS
        if probes:
            self._lost_since.clear()
        return probes

"""What a replay found out."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvstrata.replay.sizes import Sizes

__all__ = ["OPTIMUM", "Outcome", "cheapest"]

OPTIMUM: Final = "optimum"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One trace through tiers of one size under one policy. Counts are of blocks."""

    policy: str  # OPTIMUM: two bounds over both tiers, on hits and on seconds
    sizes: Sizes
    host_hits: int  # loaded from host memory; all hits of the optimum, which knows no tiers
    disk_hits: int  # read from disk to be loaded
    declined: int = 0  # found and not loaded: computed sooner, or no room
    saved: int = 0  # taken from engines into host memory
    shed: int = 0  # offered by engines, and no room for it
    written: int = 0  # to disk
    evicted_host: int = 0
    evicted_disk: int = 0
    prefill_seconds: float = 0.0  # of computing, that the hits have saved; optimum: at most
    load_seconds: float = 0.0  # that loading them took
    peak_write_bytes_per_second: float = 0.0  # to disk, in the busiest minute of the trace
    peak_read_bytes_per_second: float = 0.0  # from disk

    @property
    def hits(self) -> int:
        return self.host_hits + self.disk_hits

    @property
    def saved_seconds(self) -> float:
        """Computing less loading."""
        return self.prefill_seconds - self.load_seconds


def cheapest(outcomes: Iterable[Outcome], hits: float) -> list[Outcome]:
    """Those of *outcomes*, all of one policy, that reach *hits* and that none undercuts.

    An outcome is undercut by one that reaches as many hits with no more of either tier. Least host
    memory comes last.
    """
    enough = sorted(
        (each for each in outcomes if each.hits >= hits),
        key=lambda each: (each.sizes.disk_bytes, each.sizes.host_bytes),
    )
    kept: list[Outcome] = []
    for each in enough:
        if not kept or each.sizes.host_bytes < kept[-1].sizes.host_bytes:
            kept.append(each)
    return kept

"""Workloads, by the names that they are chosen by, in the order in which they run."""

from pathlib import Path
from typing import Final

from kvstrata.bench.workloads.arrivals import Arrivals, TraceReplay
from kvstrata.bench.workloads.documents import Documents
from kvstrata.bench.workloads.faults import Restart, ServerKilled
from kvstrata.bench.workloads.single import Single
from kvstrata.bench.workloads.talks import Agents, Chat
from kvstrata.bench.workloads.workload import Workload

__all__ = ["NAMES", "workloads"]

NAMES: Final = (
    *("single", "chat", "agents", "trace", "arrivals"),
    *("documents", "restart", "killed"),
)


def workloads(trace: Path | None = None) -> dict[str, Workload]:
    """All of them; *trace* instead of the sample that comes with the package."""
    made: tuple[Workload, ...] = (
        *(Single(), Chat(), Agents(), TraceReplay(trace), Arrivals()),
        *(Documents(), Restart(), ServerKilled()),
    )
    return dict(zip(NAMES, made, strict=True))

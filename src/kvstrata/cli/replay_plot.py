"""Draws the sweep of `kvstrata replay`."""

from itertools import cycle
from pathlib import Path

from kvstrata.cli.replay_report import Report
from kvstrata.core.units import human_bytes
from kvstrata.replay.outcome import OPTIMUM, Outcome

__all__ = ["draw"]

_COLORS = ("tab:blue", "tab:green", "tab:orange", "tab:red", "tab:purple", "tab:brown")


def draw(path: Path, report: Report) -> None:
    """Write the share of hits over the size that varies, a line for each policy.

    If both tiers vary, host memory is the axis, and there are lines for each size of the disk.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    varies = _varying(report)
    colors = dict(zip(_names(report), cycle(_COLORS), strict=False))
    for (policy, fixed_bytes), outcomes in _lines(report, varies).items():
        fixed = f", disk {human_bytes(fixed_bytes)}" if fixed_bytes and varies == "host" else ""
        axes.plot(
            [_bytes(outcome, varies) for outcome in outcomes],
            [100 * report.hit_rate(outcome) for outcome in outcomes],
            color="0.5" if policy == OPTIMUM else colors[policy],
            linestyle="--" if policy == OPTIMUM else "-",
            marker="o",
            markersize=4,
            label=policy + fixed,
        )
    spool, reuse = report.study.spool, report.study.reuse
    possible = 100 * reuse.possible_hits / spool.lookup_blocks
    axes.axhline(possible, color="0.7", linewidth=1)
    axes.annotate(
        "with room for all", (0.01, possible), xycoords=("axes fraction", "data"), va="bottom"
    )
    sizes = sorted({_bytes(outcome, varies) for outcome in report.outcomes})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [human_bytes(size) for size in sizes], rotation=30)
    axes.minorticks_off()
    axes.set_xlabel("host memory" if varies == "host" else "disk")
    axes.set_ylabel("hits, % of blocks")
    axes.set_ylim(bottom=0, top=max(1.0, 1.1 * possible))
    axes.set_title(f"{report.trace.path.name}, {spool.requests:,} requests", fontsize="medium")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _names(report: Report) -> list[str]:
    return [name for name in dict.fromkeys(o.policy for o in report.outcomes) if name != OPTIMUM]


def _varying(report: Report) -> str:
    hosts = {outcome.sizes.host_bytes for outcome in report.outcomes}
    return "host" if len(hosts) > 1 else "disk"


def _bytes(outcome: Outcome, tier: str) -> int:
    return outcome.sizes.host_bytes if tier == "host" else outcome.sizes.disk_bytes


def _lines(report: Report, varies: str) -> dict[tuple[str, int], list[Outcome]]:
    """The outcomes of each line, by policy and the size that does not vary, ascending."""
    lines: dict[tuple[str, int], list[Outcome]] = {}
    for outcome in sorted(report.outcomes, key=lambda each: each.sizes):
        fixed = _bytes(outcome, "disk" if varies == "host" else "host")
        lines.setdefault((outcome.policy, fixed), []).append(outcome)
    return lines

"""Draws a run: the first token of every contender, a panel for each step."""

from pathlib import Path

from kvstrata.bench.contenders import CONTENDERS
from kvstrata.bench.figures import Results

__all__ = ["draw"]

_COLUMNS = 4


def draw(path: Path, results: Results, workload: str) -> None:
    """Write bars of medians, with whiskers from the least to the 99th percentile."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    steps = results.steps(workload)
    rows = -(-len(steps) // _COLUMNS)
    columns = min(len(steps), _COLUMNS)
    figure = Figure(figsize=(1.5 + 3.6 * columns, 3.2 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    twenty = colormaps["tab20"]
    colors = {name: twenty(number) for number, name in enumerate(CONTENDERS)}
    for panel, step in zip(panels, steps, strict=False):
        shown = [f for f in results.figures(workload, step) if f.first_token_median is not None]
        medians = [1e3 * (f.first_token_median or 0.0) for f in shown]
        least = [1e3 * (f.first_token_least or 0.0) for f in shown]
        most = [1e3 * (f.first_token_p99 or 0.0) for f in shown]
        below = [m - low for m, low in zip(medians, least, strict=True)]
        above = [max(0.0, high - m) for m, high in zip(medians, most, strict=True)]
        panel.barh(
            range(len(shown)),
            medians,
            xerr=[below, above],
            color=[colors[f.contender] for f in shown],
            ecolor="0.4",
        )
        panel.set_yticks(range(len(shown)), [CONTENDERS[f.contender].title for f in shown])
        panel.invert_yaxis()
        panel.set_title(step, fontsize="medium")
        panel.tick_params(labelsize="small")
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(steps) :]:
        panel.set_axis_off()
    figure.supxlabel("first token, ms: median; least to 99th percentile", fontsize="medium")
    figure.savefig(path, dpi=120)

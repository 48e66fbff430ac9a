"""Draws the demo's table."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from kvstrata.core.errors import ConfigError

__all__ = ["check_plot", "draw"]


def check_plot(path: Path) -> None:
    """Raise ConfigError if ``draw`` could not write *path*."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed",
            hint="pip install 'kvstrata[plot]'",
        )
    if path.suffix.lower() not in {".png", ".svg", ".pdf"}:
        raise ConfigError(f"--plot {path}: no PNG, SVG or PDF file", hint="name it FILE.png")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: {path.parent} is not a directory", hint="make it first")


def draw(path: Path, title: str, series: Sequence[tuple[str, list[float]]]) -> None:
    """Write a bar for each median, with a dot for each prompt, in milliseconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.6 * len(series) + 1.4), layout="constrained")
    axes = figure.subplots()
    for row, (_, milliseconds) in enumerate(series):
        middle = median(milliseconds)
        axes.barh(row, middle, color="0.8" if row < 2 else "tab:green", height=0.6)
        axes.plot(milliseconds, [row] * len(milliseconds), "o", color="0.3", markersize=3)
        axes.annotate(
            f"{middle:.0f} ms",
            (max(milliseconds), row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(series)), [name for name, _ in series])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("time to the first token, ms")
    axes.set_title(title, fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)

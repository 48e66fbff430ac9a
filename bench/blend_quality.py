"""What blending leaves of a model's answers: every rule, at every share of recomputed tokens.

    python -m bench.blend_quality [--prompts N] [--quick] [--donors KIND ...] [--json FILE]

Nothing is timed, and the same command prints the same table. See bench/README.md for what is asked.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from bench.blend.checkpoint import SHIPPED, load_model
from bench.blend.donors import DONORS
from bench.blend.evaluate import Row, candidates, evaluate
from rich.console import Console
from rich.table import Table

SHARES = ("ratio", "recomputed", "work")
SEED = 123


def show(console: Console, title: str, rows: list[Row]) -> None:
    table = Table(title=title, title_justify="left")
    for column in Row._fields[1:]:
        table.add_column(column, justify="left" if column == "rule" else "right")
    for row in rows:
        cells = row._asdict()
        del cells["donors"]
        table.add_row(*(cell(name, value) for name, value in cells.items()))
    console.print(table)


def cell(column: str, value: str | float | None) -> str:
    if isinstance(value, float):
        return f"{value:.1%}" if column in SHARES else f"{value:.3f}"
    return value or ""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, help="8 questions each; 256 by default")
    parser.add_argument("--quick", action="store_true", help="64 prompts, isolated donors")
    parser.add_argument("--donors", nargs="+", choices=DONORS)
    parser.add_argument("--model", type=Path, default=SHIPPED, help="as bench.blend.train wrote it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    prompts = options.prompts or (64 if options.quick else 256)
    model = load_model(options.model)
    lines = candidates(model.shape.layers)
    console = Console(width=130)
    found: list[Row] = []
    for donors in options.donors or (DONORS[:1] if options.quick else DONORS):
        rows = evaluate(model, lines, prompts=prompts, donors=donors, seed=SEED)
        show(console, f"{prompts} prompts, {donors} donors", rows)
        found += rows
    if options.json:
        rows_as_json = json.dumps([row._asdict() for row in found], indent=1)
        options.json.write_text(rows_as_json, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

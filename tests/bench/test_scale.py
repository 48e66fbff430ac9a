"""The simulation behind docs/scale.md, small, and that the page shows what the program prints."""

import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from bench.scale import (
    CORES,
    MODELS,
    READ_CPU,
    WRITE_CPU,
    asked,
    engine_table,
    loads,
    models_table,
    node_table,
    verdict_table,
)
from bench.scale_traffic import Cluster, Prompt, Routing, simulate, traffic

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scale.md").read_text()
MEASURED = (ROOT / "docs" / "performance.md").read_text()


def test_kv_of_a_token_is_that_of_the_models() -> None:
    assert [model.token_bytes for model in MODELS] == [131_072, 327_680, 70_272]


def test_a_block_is_found_where_it_was_used_last() -> None:
    prompts = [Prompt(float(second), 1024, [1, 2]) for second in range(8)]
    alone = simulate(prompts, Cluster(1, "random", 60.0), local_blocks=4)
    assert (alone.local, alone.remote, alone.computed) == (1.0, 0.0, 0.0)
    no_room = simulate(prompts, Cluster(1, "random", 60.0), local_blocks=0)
    assert (no_room.local, no_room.remote, no_room.computed) == (0.0, 1.0, 0.0)
    forgotten = simulate(prompts, Cluster(1, "random", 0.5), local_blocks=0)
    assert (forgotten.local, forgotten.remote, forgotten.computed) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("routing", ["random", "prefix"])
def test_shares_are_of_all_blocks(routing: Routing) -> None:
    shares = simulate(traffic(300, 600.0, 1), Cluster(4, routing, 300.0), local_blocks=500)
    assert shares.local + shares.remote + shares.computed == pytest.approx(1.0)
    assert shares.searched == pytest.approx(shares.blocks * (1 - shares.local))


def test_routing_by_prefix_finds_more_in_the_nodes_and_computes_no_more() -> None:
    prompts = traffic(1000, 2000.0, 2)
    by_chance = simulate(prompts, Cluster(8, "random", 1e9), local_blocks=500)
    by_prefix = simulate(prompts, Cluster(8, "prefix", 1e9), local_blocks=500)
    assert by_prefix.local > 1.5 * by_chance.local
    assert by_prefix.computed == pytest.approx(by_chance.computed, abs=0.01)


@pytest.mark.parametrize(
    ("searched", "found", "keys"),
    [(0, 0, 0), (10, 4, 10), (100, 100, 64), (100, 0, 64), (1000, 400, 64 + 15)],
)
def test_keys_asked_for_are_those_of_a_search(searched: int, found: int, keys: int) -> None:
    assert asked(searched, found, 64) == keys


def test_the_program_prints_the_tables_of_the_page() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.scale", "--requests-a-second", "0.0005"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    printed = done.stdout.split("\n\n")
    assert printed[0] == models_table()
    assert models_table() in PAGE
    for table in printed[1:]:
        titles, _, *rows = table.splitlines()
        shown = re.search(re.escape(titles) + r"\n\|[-:|]+\n((?:\|.*\n)+)", PAGE)
        assert shown is not None, titles
        assert _places(rows) == _places(shown[1].splitlines())


@pytest.mark.parametrize(
    ("engine", "row"), [("Valkey", "valkey"), ("S3", "s3"), ("Mooncake, TCP", "mooncake")]
)
def test_costs_are_those_that_were_measured(engine: str, row: str) -> None:
    assert READ_CPU[engine] == _cpu_measured(row, "read")
    assert WRITE_CPU[engine] == _cpu_measured(row, "write")


def test_the_page_shows_figures_that_the_program_prints() -> None:
    """Those of the first model at ten nodes: all of them take minutes."""
    few = list(islice(loads(0.02, 300.0), 2))
    for table in (node_table, engine_table, verdict_table):
        for row in table(few).splitlines()[2:]:
            assert f"{row}\n" in PAGE


def test_cores_and_what_they_break_follow_from_the_bytes_of_the_page() -> None:
    rows = [_cells(line) for line in PAGE.splitlines() if _is_of_a_model(line)]
    costs = list(zip(READ_CPU.values(), WRITE_CPU.values(), strict=True))
    verdicts = {tuple(row[:3]): row[3:] for row in reversed(rows) if len(row) == 6}  # of 5 minutes
    nodes = [row for row in rows if len(row) == 15]
    assert len(nodes) == len(verdicts) == 18
    for row in nodes:
        read, written = float(row[7]), float(row[8])
        for cores, verdict, (read_cpu, write_cpu) in zip(
            map(float, row[12:]), verdicts[tuple(row[:3])], costs, strict=True
        ):
            rounding = 0.05 * (1 + read_cpu + write_cpu) + 1e-9
            assert cores == pytest.approx(read * read_cpu + written * write_cpu, abs=rounding)
            assert ("cores of a node" in verdict) is (cores > CORES)


def _cpu_measured(engine: str, call: str) -> float:
    """CPU seconds a GB of the store, at 4 MiB and four threads."""
    lines = MEASURED.splitlines()
    titles = next(line for line in lines if line.startswith("| engine | blocks |"))
    row = next(line for line in lines if line.startswith(f"| {engine} | 4 MiB | {call} | 4 |"))
    return float(_cells(row)[_cells(titles).index("raw, CPU s/GB") + 2])


def _is_of_a_model(line: str) -> bool:
    return any(line.startswith(f"| {model.title} | 10") for model in MODELS)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _places(rows: list[str]) -> list[list[str]]:
    """Model, nodes and routing of each row."""
    return [row.split("|")[1:4] for row in rows]

"""The simulation behind docs/scale.md, small, and that the page shows what the program prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from bench.scale import MODELS, asked, models_table
from bench.scale_traffic import Cluster, Prompt, Routing, simulate, traffic

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scale.md").read_text()


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


def _places(rows: list[str]) -> list[list[str]]:
    """Model, nodes and routing of each row."""
    return [row.split("|")[1:4] for row in rows]

"""What `kvstrata stats` makes of a report."""

from rich.console import Console

from kvstrata.cli.stats import _counter_table
from kvstrata.manager.report import CacheReport, TierReport
from kvstrata.observe.metrics import Counters

BLOCK_BYTES = 1 << 20


def test_every_counter_has_words_and_only_blocks_have_bytes() -> None:
    for name in Counters().snapshot():
        shown = row(name)
        if name.startswith("kvstrata_loaded_bytes_total"):
            assert shown is None
            continue
        assert shown is not None
        assert "kvstrata" not in shown, name
        assert ("3.0 MiB" in shown) == ("_blocks_total" in name), name


def row(counter: str) -> str | None:
    """The line of *counter*, which has counted 3."""
    tiers = [TierReport("host", 4, 1, BLOCK_BYTES)]
    console = Console(width=200)
    with console.capture() as shown:
        console.print(_counter_table(CacheReport("ab", tiers, {counter: 3}, 0, 0, [], [])))
    return next((line for line in shown.get().splitlines() if "  3  " in f"{line}  "), None)

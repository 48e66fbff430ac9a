"""The table of eviction policies: every trace, every size, and no policy above the bound."""

import subprocess
import sys
from pathlib import Path

from tests.traces import write_ids

BENCH = Path(__file__).parents[2] / "bench" / "policies.py"


def test_no_policy_saves_more_than_the_bound(tmp_path: Path) -> None:
    prompts = [[document, *range(100 * document, 100 * document + 30)] for document in range(8)]
    trace = write_ids(tmp_path / "trace.jsonl", [prompts[n * n % 8] for n in range(200)])
    done = subprocess.run(
        [sys.executable, BENCH, "--trace", trace, "--host", "1GiB,4GiB", "--jobs", "1"],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    titles, _, *rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()]
    assert titles[1:6] == ["host memory", "lru", "s3fifo", "cost", "at most"]
    assert [row[:2] for row in rows] == [["trace.jsonl", "1.0 GiB"], ["trace.jsonl", "4.0 GiB"]]
    for row in rows:
        *policies, most = map(float, row[2:6])
        assert most > 0
        assert max(policies) <= most

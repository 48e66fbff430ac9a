"""Figures of the comparison, wherever they stand, are those that the bench has printed."""

import re
from pathlib import Path
from typing import Final

import pytest
from tests.docs import ahead

ROOT: Final = Path(__file__).parents[2]
PRINTED: Final = ROOT / "docs" / "performance-tables.md"
PERFORMANCE: Final = ROOT / "docs" / "performance.md"
ENGINES: Final = {
    "vLLM tiering with `fs`": "vLLM tiering, fs",
    "vLLM tiering with `fs` (no checksums)": "vLLM tiering, fs",
    "ExampleConnector (through the page cache, no checksums)": "ExampleConnector",
    "KVStrata with a disk": "KVStrata, disk",
    "KVStrata with Valkey": "KVStrata, Valkey",
}
TRAFFIC: Final = {
    "chat of 36 users, two at a time": "chat",
    "a synthetic trace": "trace",
    "arrivals at random, rate 1": "rate 1",
    "documents in random order": "documents",
}
MEDIAN: Final = "first token: median ms"
Row = dict[str, str]


def cells(line: str) -> list[str]:
    return [cell.strip().replace("**", "") for cell in line.strip("|").split("|")]


def tables(text: str) -> list[list[list[str]]]:
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [[cells(line) for line in table.splitlines()] for table in found]


def of_medians(text: str) -> list[list[list[str]]]:
    """Without that of the runs which the figures are of."""
    return [each for each in tables(text) if each[0][0] != "what"]


def unlike(titles: list[str]) -> list[str]:
    """With the 99th percentile of next tokens under another title than that of the first."""
    is_second = "next token: median ms" in titles
    return ["next token: p99" if is_second and each == "p99" else each for each in titles]


def printed() -> dict[tuple[str, str], Row]:
    """By step and engine: all columns of the two tables that a row stands in."""
    rows: dict[tuple[str, str], Row] = {}
    for titles, _, *lines in tables(PRINTED.read_text()):
        for line in lines if titles[-1] != "a peer is ahead in" else ():
            row = rows.setdefault((line[0], line[1]), {})
            row |= {
                title: cell
                for title, cell in zip(unlike(titles), line, strict=True)
                if title not in row
            }
    return rows


ROWS: Final = printed()


def differs(shown: str, row: Row) -> bool:
    """Of a median, and in brackets its ratio to no connector."""
    found = re.fullmatch(r"([\d.]+)(?: \(([\d.]+|blended: .*)\))?", shown)
    assert found, shown
    median, ratio = found.groups()
    half = 0.5 * 10 ** -len(median.partition(".")[2])
    is_near = abs(float(row[MEDIAN]) - float(median)) <= half + 1e-9
    blended = f"blended: {row.get('differ')} of {row['answers']} answers differ"
    return not is_near or ratio not in {None, blended, row["/ cold"]}


def of_prompts(line: list[str]) -> list[tuple[str, tuple[str, str]]]:
    """What a row of *cold, KVStrata* and the like shows, and which rows of the bench that is."""
    what, _, engine = line[0].partition(", ")
    step = {"cold": "miss", "Valkey hit": "remote hit"}.get(what, what)
    engine = "KVStrata, disk" if line[0] == "disk hit, KVStrata" else ENGINES.get(engine, engine)
    engine = "KVStrata, Valkey" if step == "remote hit" else engine
    steps = (f"{step}, {tokens} tokens" for tokens in (1026, 2050, 4098, 8194))
    return [(cell, (name, engine)) for name, cell in zip(steps, line[1:], strict=True) if cell]


def of_traffic(titles: list[str], line: list[str]) -> list[tuple[str, tuple[str, str]]]:
    step = TRAFFIC.get(line[0], line[0]).removeprefix("arrivals, ")
    blended = {title: title for title in titles} | {"KVStrata": "KVStrata, blended"}
    names = blended if step == "documents" else {title: title for title in titles}
    engines = {"no connector", "KVStrata", "vLLM tiering", "LMCache"}
    return [
        (cell, (step, names[title]))
        for title, cell in zip(titles, line, strict=True)
        if title in engines and cell
    ]


@pytest.mark.parametrize(
    ("page", "heading", "at_least"),
    [("README.md", "## Measured", 50), ("docs/performance.md", "## Beside its peers", 90)],
)
def test_a_median_that_is_shown_was_printed(page: str, heading: str, at_least: int) -> None:
    text = (ROOT / page).read_text().partition(heading)[2].partition("\n## ")[0]
    prompts, traffic, *_ = of_medians(text)
    shown = [each for line in prompts[2:] for each in of_prompts(line)]
    shown += [each for line in traffic[2:] for each in of_traffic(traffic[0], line)]
    assert len(shown) >= at_least
    assert [(cell, key) for cell, key in shown if differs(cell, ROWS[key])] == []


def test_medians_below_host_memory_were_printed() -> None:
    """In brackets how many hits there were, where not all three were; of fewer than two none."""
    (found,) = [each for each in tables(PERFORMANCE.read_text()) if each[0][0] == "again"]
    wrong = []
    for what, *shown in found[2:]:
        kind, _, engine = what.partition(", ")
        tier, step = ("disk", kind) if kind == "disk hit" else ("Valkey", "remote hit")
        name = engine.partition(" (")[0]
        below = {"KVStrata": f"KVStrata, {tier}", "LMCache": f"LMCache, {tier}"} | ENGINES
        printed_as = {"LMCache, disk": "LMCache, fs"}
        name = below.get(name, name)
        for tokens, cell in zip((1026, 2050, 4098, 8194), shown, strict=True):
            row = ROWS.get((f"{step}, {tokens} tokens, again", printed_as.get(name, name)))
            hits = int(row["answers"]) if row else 0
            wanted = f"{row[MEDIAN]} ({hits})".removesuffix(" (3)") if row and hits > 1 else ""
            if cell != wanted:
                wrong.append((what, tokens, cell))
    assert wrong == []


def test_a_blended_answer_that_differs_is_told() -> None:
    row = ROWS["documents", "KVStrata, blended"]
    section = (ROOT / "docs/performance.md").read_text().partition("## Beside its peers")[2]
    assert f"{row['differ']} of the {row['answers']} blended answers" in section


def test_ratios_and_cpu_time_of_traffic_were_printed() -> None:
    text = (ROOT / "docs/performance.md").read_text().partition("## Beside its peers")[2]
    _, traffic, cpu, *_ = of_medians(text)
    wrong = []
    for line in traffic[2:]:
        row = ROWS[line[0].removeprefix("arrivals, "), "KVStrata"]
        peer, limit = row["/ best peer"].partition(" ")[0], row.get("/ limit", "")
        if (line[1], *line[-2:]) != (row["answers"], peer, limit):
            wrong.append(line)
    for line in cpu[2:]:
        for title, shown in zip(cpu[0][1:], line[1:], strict=True):
            row = ROWS[line[0].removeprefix("arrivals, "), title]
            parts = ("CPU ms a request: engine", "worker", "client", "server")
            if abs(sum(float(row[part]) for part in parts) - float(shown)) > 0.55:
                wrong.append([line[0], title, shown])
    assert wrong == []


def test_every_figure_of_traffic_was_printed() -> None:
    text = (ROOT / "docs/performance.md").read_text().partition("## Beside its peers")[2]
    (found,) = [each for each in tables(text) if each[0][:2] == ["traffic", "engine"]]
    next_token = ("next token: median ms", "next token: p99")
    columns = (MEDIAN, "p99", *next_token, "in time/s", "moved a request", "memory")
    wanted = [
        [step, engine, *(ROWS[step, engine].get(column, "") for column in columns)]
        for step in ("chat", "agents", "trace", "rate 0.5", "rate 1", "rate 1.5")
        for engine in ("no connector", "KVStrata", "vLLM tiering", "LMCache")
    ]
    assert found[2:] == wanted


def test_every_row_in_which_a_peer_is_ahead_says_so_and_why() -> None:
    page, printed = PERFORMANCE.read_text(), PRINTED.read_text()
    section = page.partition("### Where a peer is ahead")[2].partition("\n### ")[0]
    shown = section.partition(ahead.TITLES)[2].partition("\n\n")[0].splitlines()
    wanted = ahead.lines(printed)
    assert len(wanted) > 15
    said = "the table is to be that of `python -m tests.docs.ahead`"
    assert [line.rpartition(" | ")[0] + " |" for line in shown] == wanted, said
    assert f"In memory peers are ahead in {ahead.rows_of_memory(printed)} rows" in section
    assert not {"", ahead.UNKNOWN} & set(ahead.reasons(page).values())
    assert len(ahead.reasons(page)) == len(shown)


def test_a_reason_stays_with_its_row_and_a_new_row_has_none_yet() -> None:
    printed = (
        "In every round:\n\n| step | engine | a peer is ahead in |\n| --- | --- | --- |\n"
        "| s | KVStrata, disk | next token 2 (vLLM tiering, fs 1); memory 2 (LMCache 1) |\n"
        "| t | KVStrata | first token 2 (LMCache 1) |\n| u | KVStrata | memory 2 (LMCache 1) |\n\n"
    )
    page = f"Before.\n\n{ahead.TITLES}| t | KVStrata | first token 1.9 (LMCache) | it rained |\n\nAfter."
    *_, one, other = ahead.table(printed, page).splitlines()
    assert one == "| s | KVStrata with disk | next token 2 (vLLM tiering with fs 1) | unknown |"
    assert other == "| t | KVStrata | first token 2 (LMCache 1) | it rained |"
    assert ahead.rows_of_memory(printed) == 2

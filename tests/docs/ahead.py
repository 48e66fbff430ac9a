"""Where a peer is ahead, by the tables that the bench has printed: `python -m tests.docs.ahead`."""

import re
from collections.abc import Iterator, Mapping
from typing import Final

Row = Mapping[str, str]
Rows = Mapping[tuple[str, str], Row]
CPU: Final = "CPU ms a request"
CPU_PARTS: Final = (f"{CPU}: engine", "client", "server")
LESS_IS_AHEAD: Final = {
    "p99": "p99",
    "next token: median ms": "next token",
    "next token: p99": "next token p99",
    CPU: "CPU",
    "memory": "memory",
}
MORE_IS_AHEAD: Final = ("tokens/s", "in time/s")
CONTENDERS: Final = {
    "native": "vLLM tiering",
    "native-disk": "vLLM tiering, fs",
    "example": "ExampleConnector",
    "lmcache": "LMCache",
}
NONE: Final = "no connector"
MISSES: Final = ("miss, ", "before the restart")  # nothing is found: no connector is a peer
AHEAD: Final = 1.05
UNKNOWN: Final = "unknown"
TITLES: Final = "| row | engine | a peer is ahead in | why |\n|---|---|---|---|\n"
UNITS: Final = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def lines(rows: Rows) -> list[str]:
    """A line of a table, but for its last column, for each row of KVStrata's in which a peer is
    ahead by more than 5 %; of misses no connector is one.
    """
    found = []
    for (step, engine), row in rows.items():
        if engine.startswith("KVStrata"):
            names = [*CONTENDERS.values(), *([NONE] if step.startswith(MISSES) else [])]
            peers = {
                peer: rows[step, peer]
                for peer in names
                if (step, peer) in rows and not rows[step, peer].get("failed")
            }
            if said := "; ".join([*_first_token(row, peers), *_others(row, peers)]):
                found.append(f"| {step} | {_said(engine)} | {said} |")
    return found


def reasons(page: str) -> dict[str, str]:
    """The last column of the table in *page*, by the first two."""
    table = page.partition(TITLES)[2].partition("\n\n")[0]
    split = [line.strip("|").split("|") for line in table.splitlines()]
    return {_place(row, engine): why.strip() for row, engine, _, why in split}


def _place(row: str, engine: str) -> str:
    return f"| {row.strip()} | {engine.strip()} |"


def table(rows: Rows, page: str) -> str:
    """As it has to stand in *page*: with the reasons that it has, and ``unknown`` for new rows."""
    known = reasons(page)
    filled = []
    for line in lines(rows):
        row, engine, _ = line.strip("|").split("|")
        filled.append(f"{line} {known.get(_place(row, engine), UNKNOWN)} |")
    return TITLES + "\n".join(filled)


def _first_token(row: Row, peers: Mapping[str, Row]) -> Iterator[str]:
    """By the ratios within rounds, which the bench has printed."""
    ahead = []
    if match := re.fullmatch(r"([\d.]+) \(([\w-]+)\)", row.get("/ best peer", "")):
        ahead.append((match[1], CONTENDERS[match[2]]))
    if NONE in peers:
        ahead.append((row["/ cold"], NONE))
    named = [
        f"{ratio} ({_said(peer)})"
        for ratio, peer in ahead
        if float(ratio) > AHEAD and peer in peers
    ]
    if named:
        yield f"first token {', '.join(named)}"


def _others(row: Row, peers: Mapping[str, Row]) -> Iterator[str]:
    """By the figures themselves; of peers the one that is ahead most comes first."""
    for title in (*LESS_IS_AHEAD, *MORE_IS_AHEAD):
        ours, better = _shown(row, title), []
        for peer, theirs in peers.items():
            if ours and (value := _shown(theirs, title)):
                less, more = sorted((ours, value), key=_number)
                is_peers = value == (more if title in MORE_IS_AHEAD else less)
                ratio = _number(more) / max(_number(less), 1e-9)
                if is_peers and ratio > AHEAD:
                    better.append((ratio, f"{_said(peer)} {value}"))
        if better:
            named = ", ".join(name for _, name in sorted(better, reverse=True))
            yield f"{LESS_IS_AHEAD.get(title, title)} {ours} ({named})"


def _shown(row: Row, title: str) -> str:
    """Empty if it is not known. CPU time is that of engine, client and server together."""
    if title != CPU:
        return row.get(title, "")
    parts = [row.get(part, "") for part in CPU_PARTS]
    return f"{sum(map(float, parts)):.0f}" if all(parts) else ""


def _number(shown: str) -> float:
    figure, _, unit = shown.partition(" ")
    return float(figure) * UNITS.get(unit, 1)


def _said(engine: str) -> str:
    return engine.replace(", ", " with ")


if __name__ == "__main__":
    from tests.docs.test_tables import PERFORMANCE, ROWS

    print(table(ROWS, PERFORMANCE.read_text()))  # noqa: T201 - what it is for

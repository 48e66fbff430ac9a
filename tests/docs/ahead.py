"""Where a peer is ahead, by the tables that the bench has printed: `python -m tests.docs.ahead`."""

import re
from collections.abc import Iterator, Mapping
from typing import Final

Row = Mapping[str, str]
Rows = Mapping[tuple[str, str], Row]
LESS_IS_AHEAD: Final = {
    "p99": "p99",
    "next token: median ms": "next token",
    "next token: p99": "next token p99",
}
MORE_IS_AHEAD: Final = ("tokens/s", "in time/s")
CONTENDERS: Final = {
    "native": "vLLM tiering",
    "native-disk": "vLLM tiering, fs",
    "example": "ExampleConnector",
    "lmcache": "LMCache",
}
AHEAD: Final = 1.05


def lines(rows: Rows) -> list[str]:
    """A line of a table for each row of KVStrata's in which a peer is ahead by more than 5 %."""
    found = []
    for (step, engine), row in rows.items():
        if engine.startswith("KVStrata"):
            peers = {
                peer: rows[step, peer]
                for peer in CONTENDERS.values()
                if (step, peer) in rows and not rows[step, peer].get("failed")
            }
            if said := "; ".join([*_first_token(row, peers), *_others(row, peers)]):
                found.append(f"| {step} | {_said(engine)} | {said} |")
    return found


def _first_token(row: Row, peers: Mapping[str, Row]) -> Iterator[str]:
    """By the ratio within rounds, which the bench has printed."""
    if match := re.fullmatch(r"([\d.]+) \(([\w-]+)\)", row.get("/ best peer", "")):
        ratio, peer = match[1], CONTENDERS[match[2]]
        if float(ratio) > AHEAD and peer in peers:
            yield f"first token {ratio} ({_said(peer)})"


def _others(row: Row, peers: Mapping[str, Row]) -> Iterator[str]:
    """By the figures themselves; of peers the one that is ahead most comes first."""
    for title in (*LESS_IS_AHEAD, *MORE_IS_AHEAD):
        ours, better = row.get(title), []
        for peer, theirs in peers.items():
            if ours and (value := theirs.get(title)):
                less, more = sorted((ours, value), key=float)
                is_peers = value == (more if title in MORE_IS_AHEAD else less)
                if is_peers and float(more) > AHEAD * float(less):
                    better.append((float(more) / max(float(less), 1e-9), f"{_said(peer)} {value}"))
        if better:
            named = ", ".join(name for _, name in sorted(better, reverse=True))
            yield f"{LESS_IS_AHEAD.get(title, title)} {ours} ({named})"


def _said(engine: str) -> str:
    return engine.replace(", ", " with ")


if __name__ == "__main__":
    from tests.docs.test_tables import ROWS

    print("\n".join(lines(ROWS)))  # noqa: T201 - what it is for

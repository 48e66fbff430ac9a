"""In what a peer is ahead, as the bench has printed it, with the reason: `python -m tests.docs.ahead`."""

import re
from collections.abc import Iterator
from typing import Final

UNKNOWN: Final = "unknown"
TITLES: Final = "| row | engine | a peer is ahead in | why |\n|---|---|---|---|\n"
_PRINTED: Final = re.compile(
    r"^\| step \| engine \| a peer is ahead in \|\n.*\n((?:\|.*\n)+)", re.MULTILINE
)
_MEMORY: Final = "memory "


def leads(printed: str) -> Iterator[tuple[str, str, list[str]]]:
    """Of the tables in *printed*, a page: row, engine, and each figure in which a peer is ahead."""
    for table in _PRINTED.findall(printed):
        for line in table.splitlines():
            named = re.sub(r", (disk|Valkey|attached server|fs)\b", r" with \1", line)
            row, engine, figures = (cell.strip() for cell in named.strip("|").split("|"))
            yield row, engine, figures.split("; ")


def lines(printed: str) -> list[str]:
    """As the table has them, but for its last column, and without memory, whose reason is always one."""
    found = []
    for row, engine, figures in leads(printed):
        if rest := [each for each in figures if not each.startswith(_MEMORY)]:
            found.append(f"| {row} | {engine} | {'; '.join(rest)} |")
    return found


def rows_of_memory(printed: str) -> int:
    """In how many a peer has less of it."""
    return sum(any(each.startswith(_MEMORY) for each in figures) for *_, figures in leads(printed))


def reasons(page: str) -> dict[str, str]:
    """The last column of the table in *page*, by the first two."""
    table = page.partition(TITLES)[2].partition("\n\n")[0]
    split = [line.strip("|").split("|") for line in table.splitlines()]
    return {_place(row, engine): why.strip() for row, engine, _, why in split}


def _place(row: str, engine: str) -> str:
    return f"| {row.strip()} | {engine.strip()} |"


def table(printed: str, page: str) -> str:
    """As it has to stand in *page*: with the reasons that it has, and ``unknown`` for new rows."""
    known = reasons(page)
    filled = []
    for line in lines(printed):
        row, engine, _ = line.strip("|").split("|")
        filled.append(f"{line} {known.get(_place(row, engine), UNKNOWN)} |")
    return TITLES + "\n".join(filled)


if __name__ == "__main__":
    from tests.docs.test_tables import PERFORMANCE, PRINTED

    print(table(PRINTED.read_text(), PERFORMANCE.read_text()))  # noqa: T201 - what it is for

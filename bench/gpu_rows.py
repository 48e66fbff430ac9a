"""What is measured on a GPU, a row each, and the table of them."""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Row", "markdown"]


class Row(NamedTuple):
    """One thing that was measured."""

    what: str
    found: float
    bound: float | None  # None: it is only told
    is_most: bool = False  # whether the bound is not to be exceeded, else to be reached
    note: str = ""

    @property
    def is_met(self) -> bool:
        if self.bound is None:
            return True
        return self.found <= self.bound if self.is_most else self.found >= self.bound


def markdown(found: Sequence[Row]) -> str:
    lines = ["| | found | bound | |", "|---|---:|---:|---|"]
    for row in found:
        bound, notes = "", []
        if row.bound is not None:
            bound = f"{'≤' if row.is_most else '≥'} {row.bound:.2f}"
            notes.append("met" if row.is_met else "NOT met")
        notes += [row.note] if row.note else []
        lines.append(f"| {row.what} | {row.found:.2f} | {bound} | {'; '.join(notes)} |")
    return "\n".join(lines)

"""The counts that the tree keeps for each version of Python, and what becomes of others."""

import json
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

__all__ = [
    "FILE",
    "REMEDY",
    "Counts",
    "Verdict",
    "compare",
    "growth",
    "interpreter",
    "keep",
    "kept",
]

FILE: Final = Path(__file__).parents[1] / "operations.json"
LIMIT_PERCENT: Final = 5
REMEDY: Final = (
    "make it cheaper, or write down that it is worth it: "
    "`python -m bench.operations --write`, and commit bench/operations.json"
)

Counts = Mapping[str, Mapping[str, int]]
"""Of each hot path, of each kind."""


class Verdict(NamedTuple):
    failures: list[str]
    remarks: list[str]


def interpreter() -> str:
    """Whose numbers are comparable: compilers and libraries differ between minor versions."""
    return f"{platform.python_implementation()} {sys.version_info.major}.{sys.version_info.minor}"


def kept(name: str, file: Path = FILE) -> Counts | None:
    """What *file* has for interpreter *name*."""
    everything: dict[str, dict[str, dict[str, int]]] = json.loads(file.read_text(encoding="utf-8"))
    return everything.get(name)


def keep(name: str, counts: Counts, file: Path = FILE) -> None:
    """Have *file* hold *counts* for interpreter *name*; those of others stay."""
    everything = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    everything[name] = counts
    text = json.dumps(everything, indent=1, sort_keys=True)
    file.write_text(text + "\n", encoding="utf-8")


def growth(before: int, now: int) -> str:
    """In per cent, with a sign."""
    return f"{(now / before - 1) * 100:+.1f} %" if before else "new"


def compare(before: Counts, now: Counts) -> Verdict:
    """A failure for each count that has grown by more than 5 %, or whose path only one side has.

    A remark for each that has shrunk by as much: kept as it is, it could grow back unseen.
    """
    failures = [f"{path}: not kept in {FILE.name}" for path in now if path not in before]
    failures += [f"{path}: kept, but not counted any more" for path in before if path not in now]
    remarks = []
    for path, kind, old, new in _pairs(before, now):
        change = f"{path}: {kind} from {old} to {new} ({growth(old, new)}"
        if new * 100 > old * (100 + LIMIT_PERCENT):
            failures.append(f"{change}, at most +{LIMIT_PERCENT} %)")
        elif new * 100 < old * (100 - LIMIT_PERCENT):
            remarks.append(f"{change}): renew the kept number with --write")
    return Verdict(failures, remarks)


def _pairs(before: Counts, now: Counts) -> Iterator[tuple[str, str, int, int]]:
    """Path, kind and both counts; a kind that is not there is 0."""
    for path in (path for path in now if path in before):
        for kind in sorted(before[path].keys() | now[path].keys()):
            yield path, kind, before[path].get(kind, 0), now[path].get(kind, 0)

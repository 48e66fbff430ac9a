"""What the hot paths do, counted in operations: the same on a busy machine as on an idle one.

    python -m bench.operations [--check | --write]

See bench/README.md for what is counted.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence

from bench.operations.hot_paths import HOT_PATHS, measure
from bench.operations.kept import REMEDY, Counts, compare, growth, interpreter, keep, kept


def rows(path: str, now: Mapping[str, int], before: Mapping[str, int]) -> Iterator[str]:
    """Lines of the table about one hot path."""
    for kind, count in now.items():
        old = before.get(kind)
        cells = ("", "") if old is None else (str(old), growth(old, count))
        yield f"{path:<45} {kind:<16} {cells[0]:>10} {count:>10} {cells[1]:>8}"


def check(before: Counts, now: Counts) -> int:
    """Print what has changed too much; the exit status."""
    failures, remarks = compare(before, now)
    print(*remarks, *failures, sep="\n")
    if failures:
        print(REMEDY)
    return 1 if failures else 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.operations", description="Operations of the hot paths."
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="fail if a count has grown by over 5 %%")
    what.add_argument("--write", action="store_true", help="keep the counts in operations.json")
    options = parser.parse_args(arguments)
    name = interpreter()
    before = kept(name)
    if before is None and options.check:
        print(f"no counts are kept for {name}: nothing is checked")
        return 0
    print(f"{'hot path':<45} {'kind':<16} {'kept':>10} {'now':>10} {'growth':>8}")
    now: dict[str, dict[str, int]] = {}
    for path in HOT_PATHS:
        now[path.name] = measure(path)
        known = (before or {}).get(path.name, {})
        print(*rows(path.name, now[path.name], known), sep="\n", flush=True)
    if options.write:
        keep(name, now)
    return check(before, now) if options.check and before is not None else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

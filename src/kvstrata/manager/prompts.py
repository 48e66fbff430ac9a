"""The prompts that are asked for most, as a tree of runs of blocks. Needs the manager's lock."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstrata.core.keys import ABSENT, BlockIds, as_key_array
from kvstrata.core.types import BlockKey, NamespaceId
from kvstrata.index.places import DISK, HOST, REMOTE
from kvstrata.index.tree import PrefixIndex
from kvstrata.manager.decisions import Decision
from kvstrata.manager.report import RunReport

__all__ = ["hottest", "path_to"]

_MOST_BLOCKS: Final = 4096  # looked at for one answer
_MOST_ENDS: Final = 256  # of lookups


@dataclass(slots=True)
class _Run:
    """Blocks that follow each other, first to last."""

    above: int  # number of the run before it; ABSENT: none
    ids: list[int]
    namespace: NamespaceId
    is_cut: bool  # there are blocks before it that were not looked at
    hits: int = 0


def path_to(index: PrefixIndex, namespace: NamespaceId, last: BlockKey, most: int) -> BlockIds:
    """The blocks of a prompt up to *last*, the first one first; none if it is unknown.

    At most *most* blocks: of a longer prompt those before *last*.
    """
    block = int(index.find(namespace, as_key_array([last]))[0]) if last else ABSENT
    ids: list[int] = []
    while block != ABSENT and len(ids) < most:
        ids.append(block)
        block = int(index.parent[block])
    return np.array(ids[::-1], np.int32)


def hottest(index: PrefixIndex, decisions: Iterable[Decision], most: int) -> list[RunReport]:
    """The *most* runs of blocks that the lookups among *decisions* found most often.

    A run ends where prompts part, and where a lookup found no more. It comes after the run that it
    goes on from, which was found at least as often. Takes time for the decisions and for at most
    4,096 blocks, those of the 256 most frequent ends, however many blocks there are.
    """
    found = Counter(
        (decision.namespace, decision.last_block)
        for decision in decisions
        if decision.kind == "get" and decision.last_block
    )
    ends: dict[NamespaceId, list[tuple[BlockKey, int]]] = {}
    for (name, last), hits in found.most_common(_MOST_ENDS):
        ends.setdefault(bytes.fromhex(name), []).append((bytes.fromhex(last), hits))
    runs: list[_Run] = []
    for namespace, those in ends.items():
        ids = index.find(namespace, as_key_array([last for last, _ in those])).tolist()
        hits_of = {
            block: hits for block, (_, hits) in zip(ids, those, strict=True) if block != ABSENT
        }
        _add_runs(runs, index, namespace, hits_of)
    for run in reversed(runs):  # what comes above a run comes before it
        if run.above != ABSENT:
            runs[run.above].hits += run.hits
    return _report(index, runs, most)


def _add_runs(
    runs: list[_Run], index: PrefixIndex, namespace: NamespaceId, hits_of: Mapping[int, int]
) -> None:
    """The runs of one namespace, with the hits of those that end a lookup."""
    left = _MOST_BLOCKS - sum(len(run.ids) for run in runs)
    seen: set[int] = set()
    paths: list[tuple[int, list[int]]] = []  # the block above, and those that follow it
    for end in hits_of:
        path: list[int] = []
        block = end
        while block != ABSENT and block not in seen and len(path) < left:
            path.append(block)
            block = int(index.parent[block])
        left -= len(path)
        seen.update(path)
        if path:
            paths.append((block, path[::-1]))
    stops = seen.intersection(hits_of) | {above for above, _ in paths}
    run_to: dict[int, int] = {}  # by its last block
    for above, path in paths:
        before = run_to.get(above, ABSENT)
        is_cut = above != ABSENT and before == ABSENT
        start = 0
        for end, block in enumerate(path, 1):
            if block in stops or end == len(path):
                run = _Run(before, path[start:end], namespace, is_cut, hits_of.get(block, 0))
                before = run_to[block] = len(runs)
                runs.append(run)
                start, is_cut = end, False


def _report(index: PrefixIndex, runs: list[_Run], most: int) -> list[RunReport]:
    """The *most* runs with most hits, as a tree: a run, then what goes on from it."""
    chosen = sorted(range(len(runs)), key=lambda n: (-runs[n].hits, n))[:most]
    below: dict[int, list[int]] = {}
    for number in reversed(chosen):
        below.setdefault(runs[number].above, []).append(number)
    reports: list[RunReport] = []
    place = {ABSENT: ABSENT}
    pending = below.get(ABSENT, [])
    while pending:
        number = pending.pop()
        place[number] = len(reports)
        reports.append(_describe(index, runs[number], place[runs[number].above]))
        pending += below.get(number, [])
    return reports


def _describe(index: PrefixIndex, run: _Run, above: int) -> RunReport:
    ids = np.array(run.ids, np.int32)
    where, last = index.where[ids], ids[-1:]

    def count(bit: int) -> int:
        return int(np.count_nonzero(where & np.uint8(bit)))

    return RunReport(
        above,
        run.namespace.hex(),
        int(index.depth[run.ids[0]]),
        len(ids),
        count(HOST),
        count(DISK),
        count(REMOTE),
        int(np.count_nonzero(index.leases[ids])),
        int(index.children[last[0]]),
        run.hits,
        index.keys(last).tobytes().hex(),
        run.is_cut,
    )

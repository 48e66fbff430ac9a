"""Recurrent states: values behind their blocks, without which no prefix ends.

A state of a model with recurrent layers stands for all tokens before it, and is there at the end of
few blocks. The state of each recurrent group is a block of its own, hung under the block that it
follows, with a key made from that block's key (``state_keys``).
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.keys import ABSENT, KeyArray, state_keys
from kvstrata.core.types import BLOCK_KEY_BYTES, StoreKey
from kvstrata.index.places import REMOTE, WRITING
from kvstrata.manager.residency import Residency
from kvstrata.manager.tasks import End, Lookup

__all__ = ["MOST_ENDS", "Question", "ends_known", "ends_told", "question_of"]

MOST_ENDS: Final = 4  # that are weighed against each other, and leased
_MOST_ASKED: Final = 256  # states, in one question to a store
_FIRST_PIECE: Final = 64  # blocks whose states are looked for at once; then four times as many


class Question(NamedTuple):
    """States that a store is asked for: those behind each of ``blocks`` blocks, one a group."""

    blocks: list[int]  # descending
    keys: list[StoreKey]


def ends_known(
    cache: Residency, lookup: Lookup, blocks: int, is_findable: NDArray[np.bool_]
) -> list[End]:
    """The last ends within the first *blocks* of *lookup* whose states are known here, ascending.

    *is_findable*: for each value of ``PrefixIndex.where`` whether it can be loaded from there.
    """
    ends: list[End] = []
    stop, piece = blocks, _FIRST_PIECE
    while stop and len(ends) < MOST_ENDS:
        start = max(0, stop - piece)
        found = _ends_within(cache, lookup, start, stop, is_findable)
        ends = found[-(MOST_ENDS - len(ends)) :] + ends if found else ends
        stop, piece = start, piece * 4
    return ends


def _ends_within(
    cache: Residency, lookup: Lookup, start: int, stop: int, is_findable: NDArray[np.bool_]
) -> list[End]:
    index, keys = cache.index, lookup.keys[start:stop]
    at = np.arange(start + 1, stop + 1)
    columns: list[NDArray[np.int32]] = []
    for group in range(lookup.states):
        ids = index.find(lookup.namespace, state_keys(keys, group))
        there = (ids != ABSENT).nonzero()[0]
        there = there[is_findable.take(index.where.take(ids.take(there)))]
        if not len(there):
            return []
        keys, at, columns = keys[there], at[there], [c[there] for c in columns]
        columns.append(ids[there])
    return [End(int(n), ids) for n, ids in zip(at, np.stack(columns, axis=1), strict=True)]


def question_of(lookup: Lookup, nearest: int, blocks: int) -> Question:
    """What to ask a store for that may have states behind more than *nearest* blocks, and up to *blocks*.

    The last ones, a bounded number.
    """
    first = max(nearest, blocks - max(1, _MOST_ASKED // lookup.states))
    asked = list(range(blocks, first, -1))
    rows = _rows(lookup, asked)
    return Question(asked, [lookup.namespace + row.tobytes() for row in rows])


def ends_told(
    cache: Residency,
    lookup: Lookup,
    question: Question,
    there: Sequence[bool],
    is_findable: NDArray[np.bool_],
    ids: NDArray[np.int32],
) -> list[End]:
    """The last ends of *question* whose states are known here or *there*, in the store, ascending.

    *ids* are the blocks, all known. The states become known, too: those that are of no use are to
    be settled.
    """
    index, groups = cache.index, lookup.states
    rows = _rows(lookup, question.blocks)
    found = index.find(lookup.namespace, rows)
    here = (found != ABSENT) & is_findable.take(index.where.take(found.clip(0)))
    whole = (here | np.array(there, np.bool_)).reshape(-1, groups).all(axis=1)
    ends: list[End] = []
    for at in whole.nonzero()[0][:MOST_ENDS].tolist():
        blocks = question.blocks[at]
        if blocks > len(ids):
            continue
        keys = rows[at * groups : (at + 1) * groups]
        states = index.insert(lookup.namespace, keys, int(ids[blocks - 1]))
        if len(states) < groups or cache.has(states, WRITING).any():
            index.settle(states)
            continue
        index.set_where(states[~is_findable.take(index.where.take(states))], REMOTE)
        ends.append(End(blocks, states))
    return ends[::-1]


def _rows(lookup: Lookup, blocks: Sequence[int]) -> KeyArray:
    """The keys of the states behind each number of *blocks*, by group."""
    keys = lookup.keys[np.array(blocks, np.intp) - 1]
    rows = np.stack([state_keys(keys, group) for group in range(lookup.states)], axis=1)
    return np.ascontiguousarray(rows.reshape(-1, BLOCK_KEY_BYTES))

"""Who continues from whom, for many blocks at once."""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.keys import ABSENT, BlockIds, Index, as_index

Flags = NDArray[np.bool_]
Positions = NDArray[np.int32]  # in a batch; ABSENT for none

_ONE: Final = np.int32(1)  # of the columns' type, which makes additions many times as fast


class Family:
    """The columns of an index that link blocks to parents; a third one holds intermediate results."""

    def __init__(self, parent: BlockIds, children: BlockIds) -> None:
        self._parent = parent
        self._children = children
        self._position = np.zeros_like(parent)

    @property
    def nbytes(self) -> int:
        return self._position.nbytes

    def hang(self, index: Index, above: BlockIds) -> None:
        """New blocks, all different, each under the one in *above*, if any."""
        self._parent[index] = above
        self._children[index] = 0
        parents = as_index(above[above != ABSENT])
        if isinstance(parents, slice):
            self._children[parents] += _ONE
        else:
            np.add.at(self._children, parents, _ONE)

    def hang_stored(self, ids: BlockIds, above: BlockIds, depth: NDArray[np.int32]) -> None:
        """``hang`` for blocks of any prompts, parents before children; their depths into *depth*.

        What comes before its parent in *ids* becomes a first block: there are no rings.
        """
        index = as_index(ids)
        self._parent[index] = above
        inside = self._above(ids)
        early = inside >= np.arange(len(ids), dtype=np.int32)
        above = np.where(early, np.int32(ABSENT), above)
        inside[early] = ABSENT
        self.hang(index, above)
        linked = above != ABSENT
        steps = linked.astype(np.int32)
        outside = linked & (inside == ABSENT)
        steps[outside] += depth[above[outside]]
        while (further := inside != ABSENT).any():
            steps[further] += steps[inside[further]]
            inside[further] = inside[inside[further]]
        depth[index] = steps

    def emptied(self, ids: BlockIds, vanishes: Flags) -> Flags:
        """Which of *ids*, all different, are childless once those before them that may have vanished.

        A block vanishes if *vanishes* and it is childless itself by then.
        """
        line = self._in_line(ids, self._parent.take(ids), vanishes)
        if len(ids) == 1 or line.all():
            return line
        above = self._above(ids)
        above[above <= np.arange(len(ids), dtype=np.int32)] = ABSENT  # met before its child
        return self._emptied(ids, above, vanishes)

    def vanish(self, ids: BlockIds) -> tuple[BlockIds, BlockIds]:
        """Take those of *ids* off the tree that are childless, or become so by that.

        Returns them, and the blocks that have lost their last child and are still there.
        """
        if not isinstance(as_index(ids), slice):
            self._place(ids)
            once = self._position.take(ids) == np.arange(len(ids), dtype=np.int32)
            ids = ids if once.all() else ids[once]
        if len(ids) > 1 and ids[0] < ids[-1]:
            ids = ids[::-1]  # as a rule the last of the prompt then comes first
        parents = self._parent.take(ids)
        if self._in_line(ids, parents, None).all():
            topmost = np.ones(len(ids), np.bool_)
            topmost[:-1] = parents[:-1] != ids[1:]
        else:
            above = self._above(ids)
            leaving = self._emptied(ids, above, np.ones(len(ids), np.bool_))
            topmost = ((above == ABSENT) | ~leaving[above])[leaving]
            ids, parents = ids[leaving], parents[leaving]
        parents = parents[topmost]
        parents = parents[parents != ABSENT]
        if not len(parents):
            return ids, parents
        np.subtract.at(self._children, parents.astype(np.intp), _ONE)
        left = parents[self._children.take(parents) == 0]
        return ids, np.unique(left) if len(left) > 1 else left

    def only_children_above(self, block: int, removable: Callable[[int], bool]) -> list[int]:
        """The blocks above *block* as far as each is *removable* and has no other child."""
        parent, children = self._parent.data, self._children.data
        line: list[int] = []
        above = parent[block]
        while above != ABSENT and children[above] == 1 and removable(above):
            line.append(above)
            above = parent[above]
        return line

    def check(self, ids: BlockIds, numbers: NDArray[np.int32]) -> None:
        """Raises ``InvariantViolated`` unless *ids*, of the namespaces *numbers*, are trees."""
        above = self._parent[ids]
        linked = above != ABSENT
        capacity = len(self._parent)
        namespace = np.full(capacity, ABSENT, np.int32)
        namespace[ids] = numbers
        if (namespace[above[linked]] != numbers[linked]).any():
            raise InvariantViolated("a block's parent is not known or of another namespace")
        counts = np.bincount(above[linked], minlength=capacity)
        if (self._children[ids] != counts[ids]).any():
            raise InvariantViolated("a block counts its children wrongly")
        ancestors = np.full(capacity + 1, ABSENT, np.int32)  # the last stays: it is number -1
        ancestors[ids] = above
        for _ in range(capacity.bit_length()):
            ancestors = ancestors[ancestors]
        if (ancestors != ABSENT).any():
            raise InvariantViolated("blocks continue from each other in a ring")

    def _in_line(self, ids: BlockIds, parents: BlockIds, vanishes: Flags | None) -> Flags:
        """Which of *ids* are childless or the parent of an only child right before them.

        If all are, and vanish, the whole batch is emptied from front to back.
        """
        children = self._children.take(ids)
        line: Flags = children == 0
        if len(ids) > 1 and not line.all():
            follows = (children[1:] == 1) & (parents[:-1] == ids[1:])
            line[1:] |= follows if vanishes is None else follows & vanishes[:-1]
        return line

    def _place(self, ids: BlockIds) -> None:
        """Note of each id its position in *ids*, the last one if it is there several times."""
        self._position[as_index(ids)] = np.arange(len(ids), dtype=np.int32)

    def _above(self, ids: BlockIds) -> Positions:
        """Of each id the position of its parent in *ids*."""
        self._place(ids)
        parents = self._parent.take(ids)
        above = self._position.take(parents)  # left from another batch if the parent is not here
        np.minimum(above, len(ids) - 1, out=above)
        above[(ids.take(above) != parents) | (parents == ABSENT)] = ABSENT
        return above

    def _emptied(self, ids: BlockIds, above: Positions, vanishes: Flags) -> Flags:
        """Which of *ids* have no children left if those under them vanish that can."""
        inside = above != ABSENT
        counts = np.bincount(above[inside], minlength=len(ids))
        alone: Flags = self._children.take(ids) == counts  # has no children but those in the batch
        stays = ~(vanishes & alone)
        line = above  # ancestors at a distance that doubles
        while True:
            reached = line[stays & (line != ABSENT)]
            if not len(reached):
                break
            stays[reached] = True
            line = np.where(line == ABSENT, line, line[line])
        alone[above[stays & inside]] = False
        return alone

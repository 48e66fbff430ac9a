"""Who continues from whom, for many blocks at once."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.keys import ABSENT, BlockIds

Flags = NDArray[np.bool_]
Positions = NDArray[np.int32]  # in a batch; ABSENT for none


class Family:
    """The columns of an index that link blocks to parents; a third one holds intermediate results."""

    def __init__(self, parent: BlockIds, children: BlockIds) -> None:
        self._parent = parent
        self._children = children
        self._position = np.zeros_like(parent)

    @property
    def nbytes(self) -> int:
        return self._position.nbytes

    def hang(self, ids: BlockIds, above: BlockIds) -> None:
        """New blocks, all different, each under the one in *above*, if any."""
        self._parent[ids] = above
        self._children[ids] = 0
        # In a prompt nearly every new block is the only new child of another.
        np.add.at(self._children, above[above != ABSENT], 1)

    def hang_stored(self, ids: BlockIds, above: BlockIds, depth: NDArray[np.int32]) -> None:
        """``hang`` for blocks of any prompts, parents before children; their depths into *depth*.

        What comes before its parent in *ids* becomes a first block: there are no rings.
        """
        self._parent[ids] = above
        inside = self._above(ids)
        early = inside >= np.arange(len(ids), dtype=np.int32)
        above = np.where(early, np.int32(ABSENT), above)
        inside[early] = ABSENT
        self.hang(ids, above)
        linked = above != ABSENT
        steps = linked.astype(np.int32)
        outside = linked & (inside == ABSENT)
        steps[outside] += depth[above[outside]]
        while (further := inside != ABSENT).any():
            steps[further] += steps[inside[further]]
            inside[further] = inside[inside[further]]
        depth[ids] = steps

    def emptied(self, ids: BlockIds, vanishes: Flags) -> Flags:
        """Which of *ids*, all different, are childless once those before them that may have vanished.

        A block vanishes if *vanishes* and it is childless itself by then.
        """
        childless: Flags = self._children[ids] == 0
        if childless.all() or len(ids) == 1:
            return childless
        above = self._above(ids)
        above[above <= np.arange(len(ids), dtype=np.int32)] = ABSENT  # met before its child
        return self._emptied(ids, above, vanishes)

    def vanish(self, ids: BlockIds, vanishes: Flags) -> tuple[BlockIds, BlockIds]:
        """Take those of *ids* off the tree that are to vanish and childless, or become so by that.

        Returns them, and the blocks that have lost their last child and are still there.
        """
        position = self._place(ids)
        once = position == np.arange(len(ids), dtype=np.int32)
        if not once.all():
            ids, vanishes = ids[once], vanishes[once]
        above = self._above(ids)
        leaving = vanishes & self._emptied(ids, above, vanishes)
        topmost = leaving & ((above == ABSENT) | ~leaving[above])
        parents = self._parent[ids[topmost]]
        parents = parents[parents != ABSENT]
        np.subtract.at(self._children, parents, 1)
        left = parents[self._children[parents] == 0]
        return ids[leaving], np.unique(left) if len(left) > 1 else left

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

    def _place(self, ids: BlockIds) -> Positions:
        """Of each id its position in *ids*, the last one if it is there several times."""
        self._position[ids] = np.arange(len(ids), dtype=np.int32)
        return self._position[ids]

    def _above(self, ids: BlockIds) -> Positions:
        """Of each id the position of its parent in *ids*."""
        self._place(ids)
        parents = self._parent[ids]
        above = self._position[parents]  # left from another batch where the parent is not in this
        np.minimum(above, len(ids) - 1, out=above)
        above[(ids[above] != parents) | (parents == ABSENT)] = ABSENT
        return above

    def _emptied(self, ids: BlockIds, above: Positions, vanishes: Flags) -> Flags:
        """Which of *ids* have no children left if those under them vanish that can."""
        inside = above != ABSENT
        counts = np.bincount(above[inside], minlength=len(ids))
        alone: Flags = self._children[ids] == counts  # has no children but those in the batch
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

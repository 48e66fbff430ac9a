"""Eviction policies as one would write them on paper: one block at a time, time no object."""

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol

MayLeave = Callable[[int, list[int]], bool]
"""Whether a block may leave once others have."""


class Model(Protocol):
    def admit(self, ids: list[int]) -> None: ...
    def touch(self, ids: list[int]) -> None: ...
    def remove(self, ids: list[int]) -> None: ...
    def victims(self, count: int, may_leave: MayLeave) -> list[int]: ...


class PlainLRU:
    def __init__(self) -> None:
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def admit(self, ids: list[int]) -> None:
        for block in reversed(ids):
            self.blocks[block] = None

    def touch(self, ids: list[int]) -> None:
        for block in reversed(ids):
            if block in self.blocks:
                self.blocks.move_to_end(block)

    def remove(self, ids: list[int]) -> None:
        for block in ids:
            self.blocks.pop(block, None)

    def victims(self, count: int, may_leave: MayLeave) -> list[int]:
        found: list[int] = []
        refused_in_a_row = 0
        while len(found) < count and refused_in_a_row < len(self.blocks) - len(found):
            block = next(b for b in self.blocks if b not in found)
            if may_leave(block, found):
                found.append(block)
                refused_in_a_row = 0
            else:
                self.blocks.move_to_end(block)
                refused_in_a_row += 1
        return found


class PlainS3FIFO:
    """For blocks that may always leave."""

    def __init__(self, small: int, main: int) -> None:
        self.room = (small, main)
        self.small: deque[int] = deque()
        self.main: deque[int] = deque()
        self.uses: dict[int, int] = {}
        self.gone: list[int] = []  # every departure from the small queue that was not taken back
        self.departures = 0
        self.departed_at: dict[int, int] = {}
        self.leaving: set[int] = set()
        self.was_full = False

    def admit(self, ids: list[int]) -> None:
        remembered = [
            b for b in ids if self.departures - self.departed_at.get(b, -99) < self.room[1]
        ]
        for block in reversed(ids):
            self.uses[block] = 0
            full = not self.was_full and len(self.small) >= self.room[0]
            (self.main if block in remembered or full else self.small).append(block)
        for block in remembered:
            del self.departed_at[block]

    def touch(self, ids: list[int]) -> None:
        for block in ids:
            if block in self.uses:
                self.uses[block] = min(self.uses[block] + 1, 3)
                self.leaving.discard(block)

    def remove(self, ids: list[int]) -> None:
        for block in ids:
            if block in self.small and block in self.leaving:
                self.departed_at[block] = self.departures
                self.departures += 1
            for queue in (self.small, self.main):
                if block in queue:
                    queue.remove(block)
            self.uses.pop(block, None)
            self.leaving.discard(block)

    def victims(self, count: int, may_leave: MayLeave) -> list[int]:
        del may_leave
        self.was_full = True
        small, main = deque(self.small), deque(self.main)
        found: list[int] = []
        count = min(count, len(small) + len(main))
        while len(found) < count:
            if not small or len(main) > self.room[1]:
                found += self.leave(main, main, 1)
            else:
                for _ in range(-(-(count - len(found)) // 2)):
                    found += self.leave(small, main, 2)
        self.leaving |= set(found)
        return found

    def leave(self, queue: deque[int], main: deque[int], uses_to_stay: int) -> list[int]:
        """The next block to leave by *queue*, if any; both are copies of those that change."""
        while queue:
            block = queue.popleft()
            if self.uses[block] < uses_to_stay:
                return [block]
            self.uses[block] = self.uses[block] - 1 if uses_to_stay == 1 else 0
            main.append(block)
            (self.main if uses_to_stay == 1 else self.small).remove(block)
            self.main.append(block)
        return []


class PlainCostAware:
    """Ranks are plain numbers here, without a ring."""

    def __init__(self, costs: list[float]) -> None:
        self.costs = costs
        self.uses: dict[int, int] = {}
        self.rank: dict[int, tuple[int, int]] = {}  # level, and number of the move there
        self.moves = 0
        self.lowest = 0
        self.average = 0.0

    def value(self, block: int) -> float:
        return math.sqrt(math.sqrt(self.costs[block])) * (1 + math.log2(1 + self.uses[block]))

    def put(self, block: int, value: float) -> None:
        level = self.lowest + min(max(int(value * (16 / self.average)), 1), 63)
        self.rank[block] = (level, self.moves)
        self.moves += 1

    def place(self, ids: list[int]) -> None:
        if not ids:
            return
        values = [self.value(block) for block in ids]
        share = min(1.0, 1e-5 * len(ids)) if self.average else 1.0
        self.average += share * (sum(values) / len(values) - self.average)
        for position in reversed(range(len(ids))):
            self.put(ids[position], max(values[position:]))

    def admit(self, ids: list[int]) -> None:
        for block in ids:
            self.uses[block] = 0
        self.place(ids)

    def touch(self, ids: list[int]) -> None:
        inside = [block for block in ids if block in self.rank]
        for block in inside:
            self.uses[block] += 1
        self.place(inside)

    def remove(self, ids: list[int]) -> None:
        for block in ids:
            self.rank.pop(block, None)

    def victims(self, count: int, may_leave: MayLeave) -> list[int]:
        if not self.rank:
            return []
        self.lowest = min(self.rank.values())[0]
        found: list[int] = []
        refused = []
        for block in sorted(self.rank, key=lambda b: self.rank[b]):
            if len(found) == count:
                break
            if may_leave(block, found):
                found.append(block)
            else:
                refused.append(block)
        for block in refused:
            self.put(block, self.value(block))
        return found

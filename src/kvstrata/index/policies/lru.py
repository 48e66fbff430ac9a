"""Least recently used first."""

from kvstrata.core.keys import BlockIds
from kvstrata.index.order import Order
from kvstrata.index.policies.base import MayLeave, search


class LRU:
    """An ``EvictionPolicy``: the block that was not used for longest goes first.

    One that others continue from, met before them, counts as just used (docs/adr/0006).

    Twelve bytes for each id at most.
    """

    def __init__(self, capacity_ids: int) -> None:
        self._order = Order(capacity_ids)

    def __len__(self) -> int:
        return len(self._order)

    @property
    def nbytes(self) -> int:
        return self._order.nbytes

    def admit(self, ids: BlockIds) -> None:
        self._order.append(ids[::-1])

    def touch(self, ids: BlockIds) -> None:
        inside = self._order.contains(ids)
        self._order.append((ids if inside.all() else ids[inside])[::-1])

    def remove(self, ids: BlockIds) -> None:
        self._order.remove(ids)

    def victims(self, count: int, may_leave: MayLeave) -> BlockIds:
        scan = self._order.scan()
        victims = search(len(self._order), count, may_leave, scan.next, self._order.move)
        self._order.tidy(len(victims))
        return victims

    def check(self) -> None:
        self._order.check()

"""Who leaves a tier first, where some namespaces may only have a part of it. Not thread-safe."""

from collections.abc import Callable
from typing import Final

import numpy as np

from kvstrata.core.keys import BlockIds
from kvstrata.core.types import NamespaceId
from kvstrata.index.policies import EvictionPolicy, MayLeave
from kvstrata.index.tree import PrefixIndex

_MOST_PUT_OFF: Final = 256  # lookups


class Shares:
    """An ``EvictionPolicy`` of one for all blocks of a tier, and one for each namespace with a quota.

    A namespace at its quota makes room among its own blocks. When the tier is full, blocks of
    namespaces without a quota go first.
    """

    def __init__(self, index: PrefixIndex, bit: int, make: Callable[[], EvictionPolicy]) -> None:
        """*bit* is the tier's in ``PrefixIndex.where``."""
        self._index = index
        self._bit = bit
        self._make = make
        self._common = make()
        self._own: dict[NamespaceId, EvictionPolicy] = {}
        self._quotas: dict[NamespaceId, int] = {}
        self._touched: list[BlockIds] = []  # what policies have not been told yet

    def __len__(self) -> int:
        return sum(map(len, self._policies()))

    def limit(self, namespace: NamespaceId, blocks: int) -> None:
        """*namespace* may have so many blocks of the tier from now on."""
        self._quotas[namespace] = blocks
        if namespace in self._own:
            return
        self.catch_up()
        policy = self._own[namespace] = self._make()
        for ids in self._index.ids(namespace):
            here = ids[(self._index.where[ids] & self._bit) != 0]
            self._common.remove(here)
            policy.admit(here[::-1])  # the lower id is the older block, by and large

    @property
    def limited(self) -> list[NamespaceId]:
        """The namespaces that have a quota."""
        return list(self._own)

    def unlimit(self, namespace: NamespaceId) -> None:
        """*namespace* ends; what is left of it leaves with the others'."""
        self.catch_up()
        policy = self._own.pop(namespace, None)
        self._quotas.pop(namespace, None)
        if policy is not None:
            self._common.admit(policy.victims(len(policy), lambda ids: np.ones(len(ids), np.bool_)))

    def quota(self, namespace: NamespaceId) -> int | None:
        """How many blocks *namespace* may have; ``None`` without a limit."""
        return self._quotas.get(namespace)

    def excess(self, namespace: NamespaceId, blocks: int) -> int:
        """How many of its own *namespace* has to give up before it gets *blocks* more."""
        quota = self._quotas.get(namespace)
        return 0 if quota is None else max(0, len(self._own[namespace]) + blocks - quota)

    def admit(self, ids: BlockIds) -> None:
        self.catch_up()
        for namespace, policy in self._own.items():
            theirs = self._index.are_of(ids, namespace)
            policy.admit(ids[theirs])
            ids = ids[~theirs]
        self._common.admit(ids)

    def touch(self, ids: BlockIds) -> None:
        """Is put off: a lookup need not wait for it. It counts in all that is asked later."""
        if len(ids):
            self._touched.append(ids)
        if len(self._touched) > _MOST_PUT_OFF:
            self.catch_up()

    def catch_up(self) -> None:
        """Do what was put off."""
        touched, self._touched = self._touched, []
        for ids in touched:
            for policy in (self._common, *self._own.values()):
                policy.touch(ids)

    def remove(self, ids: BlockIds) -> None:
        for policy in self._policies():
            policy.remove(ids)

    def victims(self, count: int, may_leave: MayLeave) -> BlockIds:
        self.catch_up()
        found = self._common.victims(count, may_leave)
        for policy in self._own.values():
            if len(found) < count:
                more = policy.victims(count - len(found), may_leave)
                found = np.concatenate([found, more])
        return found

    def victims_of(self, namespace: NamespaceId, count: int, may_leave: MayLeave) -> BlockIds:
        """``victims`` among the blocks of *namespace*, which has a quota."""
        self.catch_up()
        return self._own[namespace].victims(count, may_leave)

    def check(self) -> None:
        for policy in self._policies():
            policy.check()

    def _policies(self) -> list[EvictionPolicy]:
        """Return all, up to date."""
        self.catch_up()
        return [self._common, *self._own.values()]

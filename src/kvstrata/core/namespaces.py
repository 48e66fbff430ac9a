"""The namespaces of a table, numbered."""

import os

import numpy as np

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.keys import ABSENT
from kvstrata.core.types import NAMESPACE_ID_BYTES, NamespaceId


class Namespaces:
    """Small numbers for the namespaces that have keys in a table, and how many keys each has.

    A number is free again once its namespace has no keys left.
    """

    def __init__(self) -> None:
        self.names: list[NamespaceId | None] = []  # by number; None where that is free
        self.counts: list[int] = []  # keys, by number
        self.masks: list[np.uint64] = []  # random, by number: see ``KeyTable``
        self._numbers: dict[NamespaceId, int] = {}
        self._free: list[int] = []

    def number(self, namespace: NamespaceId) -> int:
        """``ABSENT`` if it has none."""
        return self._numbers.get(namespace, ABSENT)

    def intern(self, namespace: NamespaceId) -> int:
        """Its number, a new one if it has none; ``settle`` that if no key is added after all."""
        number = self.number(namespace)
        if number != ABSENT:
            return number
        if len(namespace) != NAMESPACE_ID_BYTES:
            raise ValueError(f"a namespace has {NAMESPACE_ID_BYTES} bytes, not {len(namespace)}")
        if not self._free:
            self._free.append(len(self.names))
            self.names.append(None)
            self.counts.append(0)
            self.masks.append(np.uint64(0))
        number = self._free.pop()
        self.names[number] = namespace
        self.masks[number] = np.frombuffer(os.urandom(8), np.uint64)[0]
        self._numbers[namespace] = number
        return number

    def retire(self, namespace: NamespaceId) -> int:
        """Its number, or ``ABSENT``. It keeps its keys, and its name gets another one."""
        return self._numbers.pop(namespace, ABSENT)

    def add(self, number: int, keys: int) -> None:
        self.counts[number] += keys

    def settle(self, number: int) -> None:
        """Free *number* if it has no keys."""
        name = self.names[number]
        if self.counts[number] or name is None:
            return
        if self._numbers.get(name) == number:
            del self._numbers[name]
        self.names[number] = None
        self._free.append(number)

    def check(self) -> None:
        """Raises ``InvariantViolated`` if numbers, names and counts contradict each other."""
        for namespace, number in self._numbers.items():
            if self.names[number] != namespace or not self.counts[number]:
                raise InvariantViolated("a namespace without keys has a number")
        if sorted(self._free) != [n for n, name in enumerate(self.names) if name is None]:
            raise InvariantViolated("the number of a namespace is lost")

"""What lies before a block that cannot be read is read all the same."""

import time
from collections.abc import Callable, Sequence

from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import Read, StoreKey
from kvstrata.storage.store import Store
from kvstrata.storage.wrap.forward import WrappedStore


class LeadingStore(WrappedStore):
    """Reads a batch that raised ``TierUnavailable`` again, block by block up to the first failure.

    That block and those behind it are ``FAILED``: a prefix is of use without what follows it. If
    not even the first one can be read, or the store was slow to fail, or does not let us in, the
    error stays what it was. No block is begun later than *deadline_seconds* after the call.
    """

    def __init__(
        self,
        inner: Store,
        *,
        deadline_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self._deadline_seconds = deadline_seconds
        self._clock = clock

    def read_into(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[Read]:
        deadline = self._clock() + self._deadline_seconds
        try:
            return super().read_into(keys, buffers)
        except TierUnavailable as e:
            is_tried = len(keys) > 1 and e.cause != "credentials"
            found = self._leading(keys, buffers, deadline) if is_tried else []
            if not found:
                raise
        return found + [Read.FAILED] * (len(keys) - len(found))

    def _leading(
        self, keys: Sequence[StoreKey], buffers: Sequence[memoryview], deadline: float
    ) -> list[Read]:
        found: list[Read] = []
        for key, buffer in zip(keys, buffers, strict=True):
            if self._clock() > deadline:
                break
            try:
                found += super().read_into([key], [buffer])
            except TierUnavailable:
                break
        return found

"""A limit in time for a call with all that wrappers make of it."""

from collections.abc import Callable

from kvstrata.core.types import NamespaceId
from kvstrata.storage.call_time import call_within
from kvstrata.storage.store import Store
from kvstrata.storage.wrap.forward import T, WrappedStore


class LimitedStore(WrappedStore):
    """Gives a call *call_seconds* in all: each try gets what those before it have left.

    A store that knows the deadline of its calls (``end_within``) ends by it. ``drop_namespace`` has no
    limit: it has as many steps as there are blocks.
    """

    def __init__(self, inner: Store, call_seconds: float) -> None:
        super().__init__(inner)
        self._call_seconds = call_seconds

    def drop_namespace(self, namespace_id: NamespaceId) -> int:
        return self._inner.drop_namespace(namespace_id)

    def _call(self, call: Callable[[], T]) -> T:
        with call_within(self._call_seconds):
            return call()

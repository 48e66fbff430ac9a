"""Tells the event log what engines ask for and offer. Needs the manager's lock."""

import logging
from collections.abc import Mapping

import numpy as np

from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError
from kvstrata.core.keys import ABSENT, KeyArray, as_key_array
from kvstrata.core.types import NAMESPACE_ID_BYTES, BlockKey, NamespaceId
from kvstrata.index.tree import PrefixIndex
from kvstrata.observe import metrics
from kvstrata.observe.event_log import EventLog, Seen
from kvstrata.observe.events import LOG_VERSION, LogHeader

__all__ = ["Recorder"]

_log = logging.getLogger(__name__)


class Recorder:
    """Records if the configuration names an event log; else every method does nothing.

    A log is of blocks with one number of tokens: that of the first namespace. What other ones ask
    for is not recorded, but counted as missing. Where no log can be opened by now there is a warning
    and none: the cache is worth more.
    """

    def __init__(
        self,
        config: Config,
        index: PrefixIndex,
        namespaces: Mapping[NamespaceId, Mapping[str, str]],
        counters: metrics.Counters,
        *,
        block_bytes: int,
    ) -> None:
        """*namespaces* are what engines have said of theirs."""
        self._index = index
        self._namespaces = namespaces
        self._counters = counters
        self._block_bytes = block_bytes
        self._default_tokens = config.tokens_per_block or 0
        self._tokens = 0  # in a block of the log, once it has begun
        self._has_warned = False
        self._log = self._open(config)

    def lookup(self, namespace: NamespaceId, keys: KeyArray, found_blocks: int) -> None:
        """*keys* have just been looked up, and so many were found here; a search may find more."""
        if self._log is None or not self._is_of_log(namespace) or not len(keys):
            return
        block = self._find(namespace, keys[:1])
        first, parent = 0, None
        if block != ABSENT and (first := int(self._index.depth[block])):
            (above,) = self._index.parent_keys(np.array([block]))
            parent = None if above is None else above[NAMESPACE_ID_BYTES:]
        self._log.record(
            Seen(False, namespace, keys.tobytes(), first, parent, found_blocks=found_blocks)
        )

    def put(
        self,
        namespace: NamespaceId,
        keys: KeyArray,
        parent: BlockKey | None,
        *,
        prompt_blocks: int = 0,
    ) -> None:
        """*keys*, which follow *parent*, have just been offered, or found by a search."""
        if self._log is None or not self._is_of_log(namespace) or not len(keys):
            return
        above = ABSENT if parent is None else self._find(namespace, as_key_array([parent]))
        first = 0 if above == ABSENT else 1 + int(self._index.depth[above])
        self._log.record(
            Seen(True, namespace, keys.tobytes(), first, parent, prompt_blocks=prompt_blocks)
        )

    def close(self, timeout_seconds: float) -> None:
        """Write what is not written yet, for *timeout_seconds* at most."""
        if self._log is not None:
            self._log.close(timeout_seconds)

    def _open(self, config: Config) -> EventLog | None:
        if config.event_log is None:
            return None
        try:
            return EventLog(config.event_log, config.event_log_bytes, self._lost)
        except ConfigError as e:
            _log.warning("requests are not recorded: %s", e)
            return None

    def _find(self, namespace: NamespaceId, key: KeyArray) -> int:
        return int(self._index.find(namespace, key)[0])

    def _is_of_log(self, namespace: NamespaceId) -> bool:
        """Whether the log is of blocks such as those of *namespace*; the first one decides."""
        said = self._namespaces.get(namespace, {}).get("tokens_per_block", "")
        tokens = int(said) if said.isascii() and said.isdigit() and len(said) < 10 else 0
        tokens = tokens or self._default_tokens
        if tokens and not self._tokens and self._log is not None:
            self._tokens = tokens
            self._log.begin(LogHeader(LOG_VERSION, tokens, self._block_bytes))
        if tokens and tokens == self._tokens:
            return True
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "event log: requests of namespace %s are left out: a block of it has %s tokens, one "
                "of the log %s. Set tokens_per_block where the engine has not told it",
                namespace.hex(),
                tokens or "unknown",
                self._tokens or "unknown",
            )
        self._lost(1)
        return False

    def _lost(self, events: int) -> None:
        self._counters.add(metrics.UNLOGGED_EVENTS, events)

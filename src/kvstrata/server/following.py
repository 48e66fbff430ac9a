"""How a client is told what happens to blocks: as fast as it listens, and no faster."""

from collections.abc import Callable
from typing import Final

from kvstrata.core.types import NamespaceId
from kvstrata.manager.feed import Feed
from kvstrata.server import protocol as p

_NEWS_BLOCKS: Final = 1024  # of one message: it finds room in an empty socket


class Following:
    """What one client is told of *namespace*: one message, and the next once that was heard.

    So a client that does not listen keeps one message waiting, and finds out later what has become
    of everything. For the thread that serves.
    """

    def __init__(
        self,
        feed: Feed,
        namespace: NamespaceId,
        post: Callable[[Callable[[], None]], None],
        send: Callable[[p.Changed], None],
    ) -> None:
        """*post* is called on any thread, *send* on the one that serves."""
        self._namespace = namespace
        self._send = send
        self._is_heard = True  # all that was sent
        self._is_over = False
        self._follower = feed.follow(namespace, lambda: post(self._tell))
        self._tell()

    def heard(self) -> None:
        """The client has taken in what was sent."""
        self._is_heard = True
        self._tell()

    def end(self) -> None:
        self._is_over = True
        self._follower.close()

    def _tell(self) -> None:
        if self._is_over or not self._is_heard:
            return
        changes = self._follower.take(_NEWS_BLOCKS)
        if changes:
            self._is_heard = False
            packed = [p.BlockChange(c.kind, c.tier, c.keys, c.parent or b"") for c in changes]
            self._send(p.Changed(self._namespace, packed))

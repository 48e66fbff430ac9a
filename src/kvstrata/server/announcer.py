"""Publishes what happens to the blocks of a server, for routers, on a thread of its own."""

import logging
import threading
from typing import Final

from kvstrata.core.config import Config
from kvstrata.core.types import NamespaceId
from kvstrata.manager.feed import Feed
from kvstrata.observe.block_changes import Change
from kvstrata.observe.kv_events import Event, event_of
from kvstrata.observe.kv_publisher import KVPublisher

_log = logging.getLogger(__name__)

_BATCH_BLOCKS: Final = 8192
_REPLAY_SECONDS: Final = 0.1  # between two looks for who asks for a replay


class Announcer:
    """Follows all that is registered, and publishes it under the topics of `kv_events_topic`.

    The server's thread does no more for it than it does for any follower. When the publisher falls
    behind, all that it has published is declared void, and what there is published anew.
    """

    def __init__(self, address: str, config: Config) -> None:
        """Listen at *address*; ``ConfigError`` if that cannot be."""
        self._publisher = KVPublisher(address, config.kv_events_replay)
        self._pause_seconds = None if config.kv_events_replay is None else _REPLAY_SECONDS
        self._topic = config.kv_events_topic
        self._as_numbers = config.kv_events_hashes == "int"
        self._news = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, feed: Feed) -> None:
        """Begin; to be called once."""
        self._feed = feed
        self._follower = feed.follow(None, self._news.set)
        self._thread = threading.Thread(target=self._run, name="kvstrata-kv-events", daemon=True)
        self._thread.start()

    def close(self, timeout_seconds: float) -> None:
        """Publish what has happened until now, for *timeout_seconds* at most, and end."""
        self._closing.set()
        self._news.set()
        if self._thread is None:
            self._publisher.close()
        else:
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        try:
            while self._publish_some() or not self._closing.is_set():
                self._publisher.answer_replays()
        except Exception:
            _log.exception("no KV events are published any more: a bug")
            raise
        finally:
            self._follower.close()
            self._publisher.close()

    def _publish_some(self) -> bool:
        """Whether there was something, after waiting for it a while."""
        self._news.clear()
        changes = self._follower.take(_BATCH_BLOCKS)
        if not changes:
            if not self._closing.is_set():
                self._news.wait(self._pause_seconds)
            return False
        batches: dict[str, list[Event]] = {}
        for change in changes:
            for topic in self._topics_of(change):
                event = event_of(change, as_numbers=self._as_numbers)
                batches.setdefault(topic, []).append(event)
        for topic, events in batches.items():
            self._publisher.publish(topic, events)
        return True

    def _topics_of(self, change: Change) -> list[str]:
        """Under which topics *change* is published; others of a topic that is cleared follow anew."""
        if change.namespace is None:
            return self._publisher.topics
        topic = self._topic_of(change.namespace)
        if change.kind == "cleared":
            for namespace in self._feed.registered():
                if namespace != change.namespace and self._topic_of(namespace) == topic:
                    self._follower.tell(namespace)
        return [topic]

    def _topic_of(self, namespace: NamespaceId) -> str:
        model = self._feed.model(namespace) or ""
        return self._topic.replace("{model}", model).replace("{namespace}", namespace.hex())

"""Whoever applies the changes that a cache tells holds what the cache holds, whatever happens to it.

The random use is that of ``test_manager_machine``: several engines, evictions, disk and remote tiers,
resets, restarts, engines that die.
"""

import os
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from tests.caches import ALICE, BOB
from tests.machines import machine_settings
from tests.mirrors import Held, Mirror, held_by
from tests.property.test_manager_machine import ManagerMachine

from kvstrata.core.types import NamespaceId


class FeedMachine(ManagerMachine):
    """One mirror hears all that is registered at once; another one of Alice's when it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()

    def open(self) -> None:
        super().open()
        self.registered: set[NamespaceId] = set()
        self.register(ALICE)
        self.mirror, self.slow = Mirror(), Mirror()
        self.follower = self.manager.feed.follow(None, lambda: None)
        self.woken = True
        self.slow_follower = self.manager.feed.follow(ALICE, self.wake)

    @initialize(most_blocks=st.sampled_from([3, 20, 1 << 18]))
    def bound(self, most_blocks: int) -> None:
        """A log of so few blocks is lost all the time."""
        self.patch.setattr("kvstrata.manager.feed._MOST_BLOCKS", most_blocks)

    @rule()
    def register_bob(self) -> None:
        self.register(BOB)

    @rule(most_blocks=st.sampled_from([1, 2, 5000]))
    def hear_some(self, most_blocks: int) -> None:
        changes = self.slow_follower.take(most_blocks)
        if not self.woken:
            assert changes == []
        self.woken = bool(changes)
        self.slow.apply(changes)

    @rule()
    def hear_all(self) -> None:
        with self.manager._lock:
            self.slow.hear_all(self.slow_follower)
            self.woken = False
            assert local(self.slow.held) == local(held_by(self.manager, [ALICE]))

    @rule()
    def another_one_comes(self) -> None:
        with self.manager._lock:
            late = Mirror()
            follower = self.manager.feed.follow(None, lambda: None)
            late.hear_all(follower, 1)
            assert late.held == held_by(self.manager, self.registered)
            assert not late.cleared
            follower.close()

    @invariant()
    def the_mirror_holds_what_the_manager_holds(self) -> None:
        if not self.alive:
            return
        with self.manager._lock:
            self.mirror.hear_all(self.follower)
            held = held_by(self.manager, self.registered)
            assert local(self.mirror.held) == local(held)
            assert (
                held <= self.mirror.held
            )  # who has left the index may still be in the remote tier

    def wake(self) -> None:
        assert not self.woken, "woken twice, or without having found nothing"
        self.woken = True

    def register(self, namespace: NamespaceId) -> None:
        self.manager.register_namespace(namespace, {"model": "m"})
        self.registered.add(namespace)

    def teardown(self) -> None:
        super().teardown()
        self.patch.undo()


def local(held: Iterable[Held]) -> set[Held]:
    return {each for each in held if each[1] != "remote"}


@pytest.fixture(autouse=True)
def _fast_disk() -> Iterator[None]:
    """No power fails here: syncing would only be slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda _: None)
        patch.setattr(os, "fsync", lambda _: None)
        yield


TestFeedMachine = FeedMachine.TestCase
TestFeedMachine.settings = machine_settings(examples=60, steps=40)

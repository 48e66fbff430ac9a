"""Random use of a cache by engines of models with and without recurrent states.

All that holds of blocks alone (``test_manager_machine``) goes on holding. What a get with states gives
is a prefix of blocks that were saved with the states behind its last one, all of them, with the right bytes,
whatever leaves the tiers meanwhile.
"""

import os
from collections.abc import Iterator

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from tests.caches import PATIENCE_SECONDS, contents, generation_of, keys
from tests.machines import machine_settings
from tests.property.test_manager_machine import (
    Held,
    ManagerMachine,
    Path_,
    goes_on,
    namespaces,
    paths,
    pick,
    picks,
)

from kvstrata.core.keys import as_key_array, state_keys
from kvstrata.core.types import BlockKey, NamespaceId
from kvstrata.manager.tasks import FINAL, TaskState, TaskStatus

GROUPS = 2
uses = st.sampled_from(["get", "get", "get", "save", "save", "states", "blocks", "go on"])


def states_of(block: BlockKey) -> list[BlockKey]:
    return [state_keys(as_key_array([block]), group).tobytes() for group in range(GROUPS)]


class StatesMachine(ManagerMachine):
    @initialize()
    def begin(self) -> None:
        self.state_gets: list[Held] = []

    @rule(
        what=st.lists(st.tuples(uses, picks, namespaces, paths, goes_on), min_size=4, max_size=12)
    )
    def traffic_with_states(self, what: list[tuple[str, int, NamespaceId, Path_, str]]) -> None:
        """Much of it, for what comes of it is seldom."""
        for use, who, namespace, path, then in what:
            if use == "get":
                self.get_with_states(who, namespace, path, then)
            elif use == "save":
                self.save_whole(who, namespace, path, "complete")
            elif use == "go on":
                self.state_get_goes_on(who, then)
            elif use == "states":
                self.put_states(who, who, namespace, path, then)
            else:
                self.put_match(pick(self.engines, who), namespace, keys(*path), None, "complete")

    def put_states(
        self, who: int, which: int, namespace: NamespaceId, path: Path_, then: str
    ) -> None:
        block = keys(*path)[-1]
        states = states_of(block)
        asked = [states, states, states[:1], states[1:]][which % 4]
        self.put_match(pick(self.engines, who), namespace, asked, block, then)

    def save_whole(self, who: int, namespace: NamespaceId, path: Path_, then: str) -> None:
        """A prompt with its state, as mostly."""
        asked = keys(*path)
        engine = pick(self.engines, who)
        self.put_match(engine, namespace, asked, None, "complete")
        self.put_match(engine, namespace, states_of(asked[-1]), asked[-1], then)

    def get_with_states(self, who: int, namespace: NamespaceId, path: Path_, then: str) -> None:
        asked, engine = keys(*path), pick(self.engines, who)
        expected = self.ends(namespace, asked)
        status = self.manager.get_match(namespace, asked, owner=engine.owner, states=GROUPS)
        assert status.matched_blocks in {0, *expected}
        if self.roomy and self.remote is None and not self.is_being_saved(namespace, asked):
            being = [s for end in expected for s in states_of(asked[end - 1])]
            if not self.is_being_saved(namespace, being):
                assert status.matched_blocks == max(expected, default=0)
        if not status.task_id:
            assert status == TaskStatus(0, TaskState.DONE, declined_blocks=status.declined_blocks)
            return
        held = Held(status, engine.owner, namespace, asked)
        self.state_gets.append(held)
        self.check_bytes(held)
        self.state_step(held, then)

    def state_get_goes_on(self, which: int, then: str) -> None:
        if self.state_gets:
            self.state_step(pick(self.state_gets, which), then)

    def ends(self, namespace: NamespaceId, asked: list[BlockKey]) -> set[int]:
        """How many blocks a prefix may have: they and the states behind were saved."""
        return {
            end
            for end in range(1, self.findable(namespace, asked) + 1)
            if all((namespace, s) in self.saved for s in states_of(asked[end - 1]))
        }

    def state_step(self, held: Held, how: str) -> None:
        """Nothing is on its way afterwards: it would take the slots of what was just saved."""
        if not held.launched:
            found = self.manager.wait([held.task_id], PATIENCE_SECONDS).get(held.task_id)
            if found is None or found.state in FINAL:  # its engine has died
                self.state_gets.remove(held)
                return
            assert found.state is TaskState.READY
            held.status = found
            self.check_bytes(held)
        if how in {"stay", "part"}:
            return
        if how in {"complete", "launch"} and not held.launched:
            self.manager.launch([held.task_id], owner=held.owner)
            held.launched = True
        if how != "launch":
            getattr(self.manager, how)([held.task_id], owner=held.owner)
        if how == "fail":
            self.roomy = False
        if how in {"complete", "fail"} or (how == "cancel" and not held.launched):
            self.state_gets.remove(held)

    def doubt(self, held: Held, loaded: int) -> None:
        """What a failed load drops may be kept by leases of either kind: it counts as saved."""
        self.roomy = False

    def check_bytes(self, held: Held) -> None:
        slots = held.status.slots
        if not slots:
            return
        blocks = len(slots) - GROUPS
        assert 0 < blocks <= held.status.matched_blocks
        wanted = [*held.keys[:blocks], *states_of(held.keys[blocks - 1])]
        assert [bytes(self.manager.view(slot)) for slot in slots] == contents(
            held.namespace, wanted
        )

    @invariant()
    def leases_with_states_are_kept(self) -> None:
        """What an engine was told is there stays until it says that it is done."""
        if not self.alive:
            return
        states = self.manager.try_wait([held.task_id for held in self.state_gets])
        for held in list(self.state_gets):
            found = states.get(held.task_id)
            if found is None or found.state in FINAL:
                self.state_gets.remove(held)
            elif held.status.state is TaskState.READY:
                self.check_bytes(held)
                slots, generations = held.status.slots, held.status.generations
                assert [generation_of(self.manager, slot) for slot in slots] == generations


@pytest.fixture(autouse=True)
def _fast_disk() -> Iterator[None]:
    """No power fails here: syncing would only be slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda _: None)
        patch.setattr(os, "fsync", lambda _: None)
        yield


TestStatesMachine = StatesMachine.TestCase
TestStatesMachine.settings = machine_settings(examples=60, steps=40)

"""Random prompts, moves, leases, evictions and resets: the prefix tree against dicts."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.machines import machine_settings

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.keys import ABSENT, BlockIds, as_key_array
from kvstrata.index.places import ARRIVING, DISK, HELD, HOST, NO_SLOT, REMOTE, WRITING
from kvstrata.index.tree import PrefixIndex

CAPACITY = 14
SPACES = [b"a" * 16, b"b" * 16]
Path = tuple[int, ...]

spaces = st.sampled_from(SPACES)
paths = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
places = st.sampled_from([HOST, DISK, REMOTE, ARRIVING, WRITING, HOST | DISK])


@dataclass(eq=False)
class Block:
    path: Path
    space: bytes
    block_id: int
    parent: "Block | None"
    depth: int
    where: int = 0
    leases: int = 0
    retired: bool = False
    children: set["Block"] = field(default_factory=set)

    @property
    def nowhere(self) -> bool:
        return not self.where & ~REMOTE and not self.leases


def key(path: Path) -> bytes:
    return bytes(path).rjust(32, b"\xff")


def prompt(path: Path) -> list[Path]:
    return [path[: n + 1] for n in range(len(path))]


def array(ids: list[int]) -> BlockIds:
    return np.array(ids, np.int32)


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(CAPACITY)
        self.known: dict[tuple[bytes, Path], Block] = {}
        self.retired: list[Block] = []

    @property
    def blocks(self) -> dict[int, Block]:
        """All of them by id, those of retired namespaces as well."""
        return {b.block_id: b for b in [*self.known.values(), *self.retired]}

    def draw(self, data: st.DataObject, max_size: int = 6) -> list[Block]:
        blocks = self.blocks
        ids = st.lists(st.sampled_from(sorted(blocks)), unique=True, max_size=max_size)
        return [blocks[block_id] for block_id in data.draw(ids)]

    @rule(space=spaces, path=paths, skipped=st.integers(0, 4))
    def insert(self, space: bytes, path: Path, skipped: int) -> None:
        """A prompt, or what comes after a known part of it, or after a hole."""
        chain = prompt(path)[min(skipped, len(path) - 1) :]
        above = self.known.get((space, chain[0][:-1]))
        base = above.depth + 1 if above else 0
        first = above.block_id if above else ABSENT
        ids = self.index.insert(space, as_key_array([key(p) for p in chain]), first).tolist()
        room = CAPACITY - len(self.blocks)
        expected = 0
        for n, (one, block_id) in enumerate(zip(chain, ids, strict=False)):
            block = self.known.get((space, one))
            if block is None:
                room -= 1
                assert block_id not in self.blocks
                block = Block(one, space, block_id, above, base + n)
                self.known[space, one] = block
                if above:
                    above.children.add(block)
                assert self.index.host_slot[block_id] == NO_SLOT
            assert block.block_id == block_id
            above = block
            expected += 1
        assert expected == len(ids)
        assert room >= 0
        assert len(ids) == len(chain) or (room == 0 and (space, chain[len(ids)]) not in self.known)

    @rule(space=spaces, path=paths)
    def insert_a_key_twice(self, space: bytes, path: Path) -> None:
        if (space, path) in self.known or len(self.blocks) + 2 > CAPACITY:
            return
        with pytest.raises(InvariantViolated):
            self.index.insert(space, as_key_array([key(path)] * 2))

    @rule(
        space=spaces, wanted=st.lists(paths, max_size=5, unique=True), links=st.lists(st.booleans())
    )
    def insert_stored(self, space: bytes, wanted: list[Path], links: list[bool]) -> None:
        wanted = [path for path in wanted if (space, path) not in self.known]
        has_parent = [*links, *[True] * 5][: len(wanted)]
        rows = [space + key(path) for path in wanted]
        above = [space + key(path[:-1]) for path in wanted]
        ids = self.index.insert_stored(
            np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 48),
            np.frombuffer(b"".join(above), np.uint8).reshape(-1, 48),
            np.array(has_parent, np.bool_),
        ).tolist()
        assert len(ids) == min(len(wanted), CAPACITY - len(self.blocks))
        for path, block_id, linked in zip(wanted, ids, has_parent, strict=False):
            parent = self.known.get((space, path[:-1])) if linked else None
            block = Block(path, space, block_id, parent, parent.depth + 1 if parent else 0)
            self.known[space, path] = block
            if parent:
                parent.children.add(block)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), where=places, there=st.booleans())
    def move(self, data: st.DataObject, where: int, there: bool) -> None:
        blocks = self.draw(data)
        ids = array([b.block_id for b in blocks])
        if there:
            self.index.set_where(ids, where)
        else:
            self.index.clear_where(ids, where)
        for block in blocks:
            block.where = block.where | where if there else block.where & ~where

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        blocks = self.draw(data)
        self.index.lease(array([b.block_id for b in blocks]))
        for block in blocks:
            block.leases += 1

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def unlease(self, data: st.DataObject) -> None:
        blocks = self.draw(data)
        ids = array([b.block_id for b in blocks])
        if any(not block.leases for block in blocks):
            with pytest.raises(InvariantViolated):
                self.index.unlease(ids)
            return
        self.index.unlease(ids)
        for block in blocks:
            block.leases -= 1

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), repeat=st.booleans())
    def settle(self, data: st.DataObject, repeat: bool) -> None:
        blocks = self.draw(data)
        ids = [b.block_id for b in blocks]
        self.index.settle(array(ids + ids if repeat else ids))
        self.settle_in_the_model(blocks)

    def settle_in_the_model(self, waiting: list[Block]) -> None:
        waiting = list(waiting)
        while waiting:
            block = waiting.pop()
            if block not in self.blocks.values() or not block.nowhere:
                continue
            if block.retired:
                self.retired.remove(block)
            elif not block.children:
                del self.known[block.space, block.path]
                if block.parent:
                    block.parent.children.remove(block)
                    waiting.append(block.parent)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), tier=st.sampled_from([HOST, DISK]), evict=st.booleans())
    def may_leave(self, data: st.DataObject, tier: int, evict: bool) -> None:
        blocks = self.draw(data, max_size=10)
        gone: set[Block] = set()
        expected = []
        for block in blocks:
            last = not block.where & (HOST | DISK) & ~tier and not block.retired
            childless = not block.children - gone
            leaves = not block.leases and (childless or not last)
            expected.append(leaves)
            if leaves and childless and not block.where & ~tier & ~REMOTE:
                gone.add(block)
        ids = array([b.block_id for b in blocks])
        leaving = self.index.may_leave(ids, tier)
        assert leaving.tolist() == expected
        if evict:
            self.index.clear_where(ids[leaving], tier)
            self.index.settle(ids[leaving])
            left = [block for block, leaves in zip(blocks, expected, strict=True) if leaves]
            for block in left:
                block.where &= ~tier
            self.settle_in_the_model(left)

    @rule(space=spaces)
    def retire(self, space: bytes) -> None:
        self.index.retire(space)
        for block in [b for b in self.known.values() if b.space == space]:
            del self.known[space, block.path]
            block.retired = True
            self.retired.append(block)

    @rule(most=st.integers(0, 4))
    def reap(self, most: int) -> None:
        idle = [b for b in self.retired if not b.leases and not b.where & (ARRIVING | WRITING)]
        reaped = self.reaped(most)
        assert len(reaped) <= most
        assert len(set(reaped)) == len(reaped)
        assert set(reaped) <= {b.block_id for b in idle}
        if most >= 1 and idle:
            again = {*reaped, *self.reaped(CAPACITY), *self.reaped(CAPACITY)}
            assert again == {b.block_id for b in idle}
            reaped = list(again)
        self.retired = [b for b in self.retired if b.block_id not in reaped]

    def reaped(self, most: int) -> list[int]:
        left: list[int] = []

        def leave(ids: BlockIds) -> None:
            assert len(self.index.fingerprints(ids)) == len(ids), "they are gone already"
            left.extend(ids.tolist())

        assert self.index.reap(most, leave) == len(left)
        return left

    @rule(space=spaces, path=paths)
    def find(self, space: bytes, path: Path) -> None:
        chain = prompt(path)
        keys = as_key_array([key(p) for p in chain])
        known = [self.known.get((space, p)) for p in chain]
        expected = [b.block_id if b else ABSENT for b in known]
        assert self.index.find(space, keys).tolist() == expected
        leading = expected.index(ABSENT) if ABSENT in expected else len(expected)
        assert self.index.longest_prefix(space, keys).tolist() == expected[:leading]

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        assert len(self.index) == len(self.blocks)
        assert self.index.retired_blocks == len(self.retired)
        assert sorted(self.index.namespaces) == sorted({b.space for b in self.known.values()})
        for space in SPACES:
            mine = [b for b in self.known.values() if b.space == space]
            found = [i for piece in self.index.ids(space) for i in piece.tolist()]
            assert found == sorted(b.block_id for b in mine)
            assert self.index.counts(space) == (
                sum(bool(b.where & (HOST | DISK)) for b in mine),
                sum(bool(b.where & HOST) for b in mine),
                sum(bool(b.where & DISK) for b in mine),
                sum(bool(b.where & HELD) for b in mine),
            )
        everything = [i for piece in self.index.ids() for i in piece.tolist()]
        assert everything == sorted(b.block_id for b in self.known.values())
        for block in self.known.values():
            index, block_id = self.index, block.block_id
            parent = block.parent.block_id if block.parent else ABSENT
            assert index.parent[block_id] == parent
            assert index.children[block_id] == len(block.children)
            assert index.depth[block_id] == block.depth
            assert index.where[block_id] == block.where
            assert index.leases[block_id] == block.leases
        blocks = list(self.blocks.values())
        ids = array([b.block_id for b in blocks])
        assert self.index.store_keys(ids) == [b.space + key(b.path) for b in blocks]
        assert self.index.parent_keys(ids) == [
            b.space + key(b.parent.path) if b.parent and not b.retired else None for b in blocks
        ]


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = machine_settings(examples=100, steps=25)


def test_a_retired_block_is_no_child_of_what_has_the_id_of_its_parent() -> None:
    index = PrefixIndex(CAPACITY)
    old = index.insert(SPACES[0], as_key_array([key(p) for p in prompt((0, 0, 0, 0))])).tolist()
    index.retire(SPACES[0])
    index.settle(array(old[2:3]))
    new = index.insert(SPACES[0], as_key_array([key((0,))])).tolist()
    assert new == old[2:3]
    asked = array([old[0], old[3], old[1], *new])
    assert index.may_leave(asked, HOST).tolist() == [True] * 4

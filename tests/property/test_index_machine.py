"""Random inserts and removals: the prefix tree against a dict of parents."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstrata.index.prefix_index import PrefixIndex

paths = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
Path = tuple[int, ...]


def key(path: Path) -> bytes:
    return bytes(path).rjust(48, b"\xff")


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.parents: dict[Path, Path | None] = {}  # of what is there: who counts it

    @rule(path=paths)
    def insert(self, path: Path) -> None:
        above = path[:-1] or None
        entry = self.index.insert(key(path), key(above) if above else None)
        entry.on_disk = True
        if path not in self.parents:
            self.parents[path] = above if above in self.parents else None

    @rule(path=paths)
    def remove(self, path: Path) -> None:
        entry = self.index.get(key(path))
        assert (entry is not None) == (path in self.parents)
        if entry is None:
            return
        self.index.remove(entry)
        del self.parents[path]
        # Whoever hung under it hangs under nobody now, also if the block comes back.
        for other, parent in self.parents.items():
            if parent == path:
                self.parents[other] = None

    @rule(path=paths)
    def match(self, path: Path) -> None:
        found = self.index.longest_prefix([key(path[: i + 1]) for i in range(len(path))])
        expected = 0
        while expected < len(path) and path[: expected + 1] in self.parents:
            expected += 1
        assert [e.key for e in found] == [key(path[: i + 1]) for i in range(expected)]

    @invariant()
    def tree_agrees(self) -> None:
        self.index.check()
        assert {e.key for e in self.index} == {key(path) for path in self.parents}
        for path in self.parents:
            entry = self.index.get(key(path))
            assert entry is not None
            children = sum(parent == path for parent in self.parents.values())
            assert entry.children == children
            assert self.index.may_leave(entry, "disk") == (children == 0)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)

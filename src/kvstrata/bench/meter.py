"""What a contender uses and moves while it is asked, also if it has other processes at the end."""

from kvstrata.bench.fleet import Member
from kvstrata.bench.processes import Role, Usage
from kvstrata.bench.traffic import Counters

__all__ = ["Meter"]


class Meter:
    """Adds up stretches in which the processes stay the same.

    What starts within a stretch counts from its start on. Of a server that ends within one nobody
    knows any more what it has used, and so nothing is said of servers at all, nor of what was moved.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self.counted: Counters | None = None  # when it was asked last
        self._used: dict[Role, Usage] = {}
        self._moved: dict[str, int] = {}
        self._has_lost_servers = self._has_lost_counts = False
        self.go_on()

    def go_on(self, *, busy: bool = False) -> None:
        """Begin a stretch: what has been used by now does not count.

        *busy*: the engine is at work and is asked for no counts, which are lost then.
        """
        self.counted = None if busy else self._member.counters()
        self._servers, self._before = self._member.server_pids, self._member.usage()

    def pause(self, *, busy: bool = False) -> None:
        """End a stretch: all is done, or processes are about to end. *busy* as in ``go_on``."""
        self._has_lost_servers |= bool(self._servers - self._member.server_pids)
        for role, now in self._member.usage().items():
            before, so_far = self._before[role], self._used.get(role, Usage())
            self._used[role] = Usage(
                so_far.cpu_seconds + max(0.0, now.cpu_seconds - before.cpu_seconds),
                max(so_far.memory_bytes, now.memory_bytes),
                so_far.read_bytes + max(0, now.read_bytes - before.read_bytes),
                so_far.written_bytes + max(0, now.written_bytes - before.written_bytes),
            )
        before_counted, self.counted = self.counted, None if busy else self._member.counters()
        if before_counted is None or self.counted is None:
            self._has_lost_counts = True
            return
        for what, count in self.counted.moved_bytes.items():
            if (moved := count - before_counted.moved_bytes.get(what, 0)) > 0:
                self._moved[what] = self._moved.get(what, 0) + moved

    @property
    def used(self) -> dict[Role, Usage]:
        if not self._has_lost_servers:
            return self._used
        return {role: use for role, use in self._used.items() if role != "server"}

    @property
    def moved_bytes(self) -> dict[str, int]:
        return {} if self._has_lost_servers or self._has_lost_counts else self._moved

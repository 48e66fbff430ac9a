"""What ``stats`` and ``inspect`` show."""

from typing import Literal

import msgspec


class TierReport(msgspec.Struct):
    tier: str
    capacity_blocks: int
    used_blocks: int
    block_bytes: int
    waiting_blocks: int = 0  # below host memory: blocks there that this tier has not got yet
    switched_off: bool = False  # by its circuit breaker
    backed_bytes: int = 0  # host: of the tier that have memory behind them
    padding_bytes: int = 0  # host: what blocks leave of their slots, in all slots
    longest_free_run: int = 0  # host: free slots that lie side by side
    reading_blocks: int = 0  # below host memory: blocks asked of it that have not come yet
    uncleared_namespaces: int = 0  # below host memory: that it has still to forget the blocks of
    unremoved_blocks: int = 0  # below host memory: others that it has still to forget

    @property
    def uncleared(self) -> str:
        """What it has still to be cleared of, in words; empty for nothing."""
        left = {"namespace": self.uncleared_namespaces, "other block": self.unremoved_blocks}
        counted = [f"{n:,} {what}{'' if n == 1 else 's'}" for what, n in left.items() if n]
        return " and ".join(counted)


class NamespaceReport(msgspec.Struct):
    namespace: str  # hex
    parts: dict[str, str]  # what the fingerprint is made of; empty if no engine uses it now
    blocks: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0


class OperationReport(msgspec.Struct):
    """Calls of one operation of one tier's store; see ``observe.operations.OperationCounts``."""

    tier: str
    operation: str
    calls: int
    seconds: float
    moved_bytes: int
    within: list[int]


class DurationReport(msgspec.Struct):
    """One histogram; see ``observe.durations.DurationCounts``."""

    metric: str
    value: str
    calls: int
    seconds: float
    within: list[int]


class PinReport(msgspec.Struct):
    """Blocks that an operator keeps from leaving."""

    number: int  # for ``unpin``
    namespace: str  # hex
    blocks: int
    seconds_left: float


class RunReport(msgspec.Struct):
    """Blocks that follow each other in prompts, up to where prompts part or one of them ends."""

    above: int  # place in the list of the run before it; -1: none
    namespace: str  # hex
    first_block: int  # how many come before it in the prompt
    blocks: int
    host_blocks: int
    disk_blocks: int
    remote_blocks: int  # as far as this node knows
    leased_blocks: int
    children: int  # blocks that go on from the last one, listed or not
    hits: int  # recent lookups that found all of it
    last_block: str  # hex key
    is_cut: bool = False  # what comes before it is not listed


class ClearReport(msgspec.Struct):
    """What a clear takes away, or would."""

    blocks: dict[str, int]  # by tier
    in_use_blocks: int = 0  # that stay where they are: read, written or pinned at this moment
    lost_blocks: int = 0  # that are in no other tier


class CacheReport(msgspec.Struct):
    server_id: str
    tiers: list[TierReport]
    counters: dict[str, int]
    running_gets: int
    running_puts: int
    namespaces: list[NamespaceReport]
    engines: list[dict[str, object]]
    operations: list[OperationReport] = []
    pinned_blocks: int = 0  # the sum over *pins*: a block that is pinned twice counts twice
    pins: list[PinReport] = []
    durations: list[DurationReport] = []
    leased_blocks: int = 0  # that lookups and loads keep; one that several keep counts as often
    spared_prefill_seconds: float = 0.0  # of computing what was loaded
    drain: Literal["off", "draining", "drained"] = "off"  # see ``Operator.drain_state``

    @property
    def is_at_rest(self) -> bool:
        """Nothing is being loaded or saved, and nothing waits to be written to a tier below."""
        waiting = any(tier.waiting_blocks for tier in self.tiers)
        return not (self.running_gets or self.running_puts or waiting)

"""What ``stats`` and ``inspect`` show."""

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


class PinReport(msgspec.Struct):
    """Blocks that an operator keeps from leaving."""

    number: int  # for ``unpin``
    namespace: str  # hex
    blocks: int
    seconds_left: float


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

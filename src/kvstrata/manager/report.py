"""What ``stats`` and ``inspect`` show."""

import msgspec


class TierReport(msgspec.Struct):
    tier: str
    capacity_blocks: int
    used_blocks: int
    block_bytes: int
    waiting_blocks: int = 0  # disk: blocks in host memory that are not on disk yet
    switched_off: bool = False  # by its circuit breaker


class NamespaceReport(msgspec.Struct):
    namespace: str  # hex
    parts: dict[str, str]  # what the fingerprint is made of; empty if no engine uses it now
    blocks: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0


class CacheReport(msgspec.Struct):
    server_id: str
    tiers: list[TierReport]
    counters: dict[str, int]
    running_gets: int
    running_puts: int
    namespaces: list[NamespaceReport]
    engines: list[dict[str, object]]

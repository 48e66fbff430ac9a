"""Which block is in which tier, and who has to leave when a tier is full. Not thread-safe."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.types import NAMESPACE_ID_BYTES, NamespaceId, StoredBlock, StoreKey
from kvstrata.index.eviction import LRU, EvictionPolicy
from kvstrata.index.prefix_index import NO_SLOT, Entry, PrefixIndex
from kvstrata.index.slots import SlotPool
from kvstrata.manager.report import NamespaceReport
from kvstrata.observe import metrics
from kvstrata.storage.host import HostMemory

LowerTier = Literal["disk", "remote"]


class Residency:
    """The index with the slots of the host tier and the room of the disk tier kept in step."""

    def __init__(
        self,
        memory: HostMemory,
        counters: metrics.Counters,
        *,
        disk_capacity_blocks: int,
        remote: bool = False,
    ) -> None:
        self.index = PrefixIndex()
        self.memory = memory
        self.counters = counters
        self._slots = SlotPool(memory.slots)
        self._host: EvictionPolicy = LRU()
        self._disk: EvictionPolicy = LRU()
        self._disk_capacity = disk_capacity_blocks
        lower: list[LowerTier] = []
        lower += ["disk"] if disk_capacity_blocks else []
        lower += ["remote"] if remote else []
        # Of each tier below: what is in host memory and not there.
        self._unwritten: dict[LowerTier, OrderedDict[StoreKey, Entry]] = {
            tier: OrderedDict() for tier in lower
        }
        self._parting: set[int] = set()  # slots of forgotten blocks that are still leased

    @property
    def host_used(self) -> int:
        return self._slots.capacity - self._slots.free

    def longest_free_run(self) -> int:
        """Free host slots that lie side by side."""
        return self._slots.longest_free_run

    @property
    def disk_used(self) -> int:
        return len(self._disk)

    def unwritten(self, tier: LowerTier) -> int:
        return len(self._unwritten[tier])

    def restore(self, blocks: Iterable[StoredBlock]) -> None:
        """Take over what a disk tier held when it was opened."""
        for block in blocks:
            self.index.insert(block.key, block.parent).on_disk = True
            self._disk.add(block.key)

    def touch(self, entries: Sequence[Entry]) -> None:
        """These were used together, in prompt order."""
        keys = [entry.key for entry in entries]
        self._host.touch(keys)
        self._disk.touch(keys)

    def lease(self, entry: Entry) -> None:
        entry.leases += 1

    def unlease(self, entry: Entry) -> None:
        if entry.leases <= 0:
            raise InvariantViolated("a lease is returned that was not taken")
        entry.leases -= 1
        if entry.forgotten and not entry.leases and entry.host_slot != NO_SLOT:
            self._parting.remove(entry.host_slot)
            self.release_slot(entry.host_slot)
            entry.host_slot = NO_SLOT

    def take_slot(self) -> int | None:
        """A host slot with a new owner, at the cost of the worst block there; None if none may go."""
        slot = self._slots.take()
        if slot is None and self._evict_from_host():
            slot = self._slots.take()
        if slot is not None:
            self.memory.disown(slot)
        return slot

    def release_slot(self, slot: int) -> None:
        self.memory.disown(slot)
        self._slots.release(slot)

    def put_in_host(self, entry: Entry, slot: int) -> None:
        """The bytes of *entry* are in *slot* now."""
        entry.host_slot = slot
        entry.arriving = False
        self._host.add(entry.key)
        for tier, waiting in self._unwritten.items():
            if not _is_in(entry, tier):
                waiting[entry.key] = entry

    def expect(self, key: StoreKey, parent: StoreKey | None) -> Entry:
        """A block of the remote tier that is about to be read into host memory."""
        entry = self.index.insert(key, parent)
        entry.arriving = entry.in_remote = True
        return entry

    def give_up(self, entry: Entry) -> None:
        """A block of ``expect`` does not come."""
        entry.arriving = entry.in_remote = False
        self._remove_if_nowhere(entry)

    def drop_from_host(self, entry: Entry) -> None:
        """Give up the host copy of an unleased *entry*."""
        if entry.leases:
            raise InvariantViolated("a leased block is dropped")
        self._host.remove(entry.key)
        for waiting in self._unwritten.values():
            waiting.pop(entry.key, None)
        if self._unwritten and not (entry.on_disk or entry.in_remote):
            self.counters.add(metrics.LOST_BLOCKS, 1)
        self.release_slot(entry.host_slot)
        entry.host_slot = NO_SLOT
        self._remove_if_nowhere(entry)

    def next_unwritten(self, tier: LowerTier, count: int) -> list[Entry]:
        """At most *count* blocks that *tier* lacks, leased; ``written`` gives them back."""
        batch: list[Entry] = []
        waiting = self._unwritten[tier]
        while waiting and len(batch) < count:
            _, entry = waiting.popitem(last=False)
            self.lease(entry)
            batch.append(entry)
        return batch

    def make_disk_room(self, blocks: int) -> list[Entry]:
        """Evict until *blocks* more fit, or nothing more may leave; the caller removes the bytes."""
        victims = []
        while self._disk_capacity - len(self._disk) < blocks:
            key = self._disk.victim(self._may_leave_disk)
            if key is None:
                break
            entry = self._entry(key)
            self.drop_from_disk(entry)
            victims.append(entry)
        self.counters.add(metrics.EVICTED_BLOCKS, len(victims), "disk")
        return victims

    def written(self, tier: LowerTier, entry: Entry, *, stored: bool) -> None:
        """The write of a block of ``next_unwritten`` has ended. A forgotten one does not count."""
        if stored and not entry.forgotten:
            if tier == "disk":
                entry.on_disk = True
                self._disk.add(entry.key)
            else:
                entry.in_remote = True
        self.unlease(entry)

    def write_later(self, tier: LowerTier, entry: Entry) -> None:
        """The store could not be asked: *entry*, of ``next_unwritten``, waits again."""
        if not entry.forgotten:
            self._unwritten[tier][entry.key] = entry
        self.unlease(entry)

    def drop_from_disk(self, entry: Entry) -> None:
        self._disk.remove(entry.key)
        entry.on_disk = False
        self._remove_if_nowhere(entry)

    def forget(self, namespace: NamespaceId) -> int:
        """Drop every block of *namespace*; leased ones are gone for everybody but their holders."""
        entries = self.index.namespace(namespace)
        for entry in entries:
            self.index.remove(entry)
            self._host.remove(entry.key)
            self._disk.remove(entry.key)
            for waiting in self._unwritten.values():
                waiting.pop(entry.key, None)
            entry.on_disk = entry.in_remote = False
            if entry.host_slot == NO_SLOT:
                continue
            if entry.leases:
                self._parting.add(entry.host_slot)
            else:
                self.release_slot(entry.host_slot)
                entry.host_slot = NO_SLOT
        return len(entries)

    def describe(
        self, namespaces: Mapping[NamespaceId, Mapping[str, str]]
    ) -> list[NamespaceReport]:
        """What each namespace holds: *namespaces*, and any other that has blocks."""
        reports = {
            namespace: NamespaceReport(namespace.hex(), dict(parts))
            for namespace, parts in namespaces.items()
        }
        for entry in self.index:
            namespace = entry.key[:NAMESPACE_ID_BYTES]
            report = reports.setdefault(namespace, NamespaceReport(namespace.hex(), {}))
            report.blocks += 1
            report.host_blocks += entry.host_slot != NO_SLOT
            report.disk_blocks += entry.on_disk
        return list(reports.values())

    def check(self, reserved_slots: Sequence[int]) -> None:
        """Raises ``InvariantViolated`` unless every slot is free, in one block or reserved once."""
        self.index.check()
        self._slots.check()
        held = [entry.host_slot for entry in self.index if entry.host_slot != NO_SLOT]
        if len(self._host) != len(held) or len(self._disk) != sum(e.on_disk for e in self.index):
            raise InvariantViolated("a policy holds other blocks than its tier")
        held.extend(self._parting)
        held.extend(reserved_slots)
        if len(set(held)) != len(held):
            raise InvariantViolated("a host slot is in two blocks")
        if len(held) != self.host_used:
            raise InvariantViolated(
                f"{self.host_used} slots are used, {len(held)} are accounted for"
            )

    def _evict_from_host(self) -> bool:
        key = self._host.victim(self._may_leave_host)
        if key is None:
            return False
        self.drop_from_host(self._entry(key))
        self.counters.add(metrics.EVICTED_BLOCKS, 1, "host")
        return True

    def _may_leave_host(self, key: StoreKey) -> bool:
        return self.index.may_leave(self._entry(key), "host")

    def _may_leave_disk(self, key: StoreKey) -> bool:
        return self.index.may_leave(self._entry(key), "disk")

    def _remove_if_nowhere(self, entry: Entry) -> None:
        if not entry.resident and not entry.forgotten:
            self.index.remove(entry)

    def _entry(self, key: StoreKey) -> Entry:
        entry = self.index.get(key)
        if entry is None:
            raise InvariantViolated("a policy holds a block that the index does not")
        return entry


def _is_in(entry: Entry, tier: LowerTier) -> bool:
    return entry.on_disk if tier == "disk" else entry.in_remote

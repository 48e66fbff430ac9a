"""Which block is in which tier, and who has to leave when a tier is full. Not thread-safe."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.keys import BlockIds, as_index
from kvstrata.core.types import NamespaceId, StoreKey
from kvstrata.core.write_rule import WriteRule
from kvstrata.index.places import ARRIVING, DISK, HOST, NO_SLOT, REMOTE, WRITING
from kvstrata.index.policies import EvictionPolicy
from kvstrata.index.pool import SlotPool
from kvstrata.index.tree import PrefixIndex
from kvstrata.manager.report import NamespaceReport
from kvstrata.manager.shares import Shares
from kvstrata.manager.writes import BIT, LowerTier, Writes
from kvstrata.observe import metrics

MakePolicy = Callable[[Literal["host", "disk"], PrefixIndex, int], EvictionPolicy]

_NO_BLOCKS: Final = np.empty(0, np.int32)
_OVERSIZE_SHARE: Final = 10  # what can never fit may take a tenth of the tier from others
_SPARE_IDS: Final = (
    1024  # for blocks that are nowhere and whose children or readers are still there
)

_UNBOUNDED: Final = 1 << 62
_AHEAD_SHARE: Final = 32  # of host memory is written before its slots are needed
_REAP_BLOCKS: Final = 4096  # freed at a time, with the lock held

Slots = NDArray[np.int32]
Bools = NDArray[np.bool_]
Rows = NDArray[np.uint8]


class SlotOwner(Protocol):
    """What is told that slots change hands: ``HostMemory``, or nobody in a simulation."""

    @property
    def slots(self) -> int: ...

    def disown(self, slots: Slots) -> None: ...


def evicted_at_least(slots: int) -> int:
    """How many blocks leave a full tier of *slots* when at least one has to.

    At most one in 4096, and 256: looking for one victim costs nearly as much as for hundreds, and
    the next allocations find free slots.
    """
    return max(1, min(256, slots >> 12))


def _beginning(room: int, above: int) -> int:
    """What a prompt that is not kept may take of *room* from others, *above* blocks being there."""
    return max(0, max(1, room // _OVERSIZE_SHARE) - above)


class Residency:
    """The index with the slots of the host tier and the room of the disk tier kept in step."""

    def __init__(
        self,
        memory: SlotOwner,
        counters: metrics.Counters,
        make_policy: MakePolicy,
        *,
        disk_capacity_blocks: int = 0,
        write: Mapping[LowerTier, WriteRule],
        wake: Callable[[LowerTier], None],
    ) -> None:
        """*make_policy* is called with a tier's name, the index, and the blocks of the tier.

        *write* has the tiers below that there are, and when they get a block; *wake* is called
        when one has something to write.
        """
        blocks = memory.slots + disk_capacity_blocks
        self.index = PrefixIndex(blocks + blocks // 8 + _SPARE_IDS)
        self.counters = counters
        self._memory = memory
        self._slots = SlotPool(memory.slots)
        self._host = Shares(self.index, HOST, lambda: make_policy("host", self.index, memory.slots))
        self._disk = Shares(
            self.index, DISK, lambda: make_policy("disk", self.index, disk_capacity_blocks)
        )
        self._disk_capacity = disk_capacity_blocks
        self._has_remote = "remote" in write
        self.writes = Writes(self.index, write, wake)

    @property
    def host_used(self) -> int:
        return self._slots.used

    @property
    def disk_used(self) -> int:
        return len(self._disk)

    def longest_free_run(self) -> int:
        """Free host slots that lie side by side: ``SlotPool.longest_free_run``."""
        return self._slots.longest_free_run

    def write_late_blocks(self) -> None:
        """Host memory is about to end: what would be written before it leaves is written now."""
        for ids in self.index.ids():
            self.writes.leaving(ids[self.has(ids, HOST)])

    def restore(self, keys: Rows, parents: Rows, has_parent: Bools) -> None:
        """Take over what a disk tier held when it was opened: store keys, one a row."""
        ids = self.index.insert_stored(keys, parents, has_parent)
        self.index.set_where(ids, DISK)
        self._disk.admit(ids)

    # -- use -----------------------------------------------------------------------------------

    def touch(self, ids: BlockIds) -> None:
        """These were found together, in prompt order."""
        self._host.touch(ids)
        if self._disk_capacity:
            self._disk.touch(ids)
        if self.writes.any_reused:
            self.writes.found(ids[self.has(ids, HOST)])

    def lease(self, ids: BlockIds) -> None:
        self.index.lease(ids)

    def unlease(self, ids: BlockIds) -> None:
        """Return leases; what a reset has taken from the index frees its slot with the last."""
        if not len(ids):
            return
        self._host.catch_up()
        self._disk.catch_up()
        self.index.unlease(ids)
        self._bury_forgotten(ids)
        self.index.settle(ids)

    def places(self, ids: BlockIds) -> tuple[int, int]:
        """Bits of ``PrefixIndex.where`` that all of *ids* have, and those that some have."""
        where = self.index.where[as_index(ids)].tobytes()
        if where.count(where[:1]) == len(where):  # mostly, and far sooner known than by numpy
            return (where[0], where[0]) if where else (0xFF, 0)
        bits = np.frombuffer(where, np.uint8)
        return int(np.bitwise_and.reduce(bits)), int(np.bitwise_or.reduce(bits))

    def has(self, ids: BlockIds, bits: int) -> Bools:
        """Which of *ids* have one of *bits* of ``PrefixIndex.where``."""
        found: Bools = (self.index.where.take(ids) & np.uint8(bits)) != 0
        return found

    # -- host memory ---------------------------------------------------------------------------

    def limit(self, namespace: NamespaceId, share: float) -> None:
        """*namespace* may have no more than that share of host memory, and of the disk."""
        self._host.limit(namespace, max(1, int(share * self._slots.capacity)))
        self._disk.limit(namespace, max(1, int(share * self._disk_capacity)))

    def is_limited(self, namespace: NamespaceId) -> bool:
        return self._host.quota(namespace) is not None

    def unlimit(self, namespace: NamespaceId) -> None:
        """*namespace* has no quota any more."""
        self._host.unlimit(namespace)
        self._disk.unlimit(namespace)

    def take_slots(
        self, namespace: NamespaceId, count: int, *, whole: int = 0, above: int = 0
    ) -> Slots:
        """At most *count* host slots for *namespace*, at the cost of the worst blocks there.

        Fewer where no more blocks may leave. They are for a part of a prompt of *whole* blocks, of
        which *above* come before. A prompt that no tier has room for, or not within the namespace's
        quota, can not be kept: it gets free slots and, for its beginning, a tenth of host memory,
        where it would drive out everything else.
        """
        whole = max(whole, count)
        count -= self._make_room_within(namespace, count, whole, above)
        slots = self._slots.take(count)
        capacity = self._slots.capacity
        is_kept = count <= capacity and whole <= max(capacity, self._room_below(None))
        short = min(count - len(slots), capacity if is_kept else _beginning(capacity, above))
        if short:
            self._evict_from_host(max(short, evicted_at_least(capacity)))
            slots = np.concatenate([slots, self._slots.take(short)])
        self._memory.disown(slots)
        return slots

    def release_slots(self, slots: Slots) -> None:
        if len(slots):
            self._memory.disown(slots)
            self._slots.release(slots)

    def reserve(self, ids: BlockIds, slots: Slots, bit: int) -> None:
        """*slots* wait for the bytes of *ids*, which somebody writes (*bit* is ``WRITING``) or
        reads from a tier below (``ARRIVING``).
        """
        self.index.host_slot[ids] = slots
        self.index.set_where(ids, bit)

    def fill(self, ids: BlockIds, bit: int) -> None:
        """The bytes of *ids*, reserved as *bit*, are in their slots now. In prompt order."""
        self.index.clear_where(ids, bit)
        forgotten = self.index.is_retired(ids)
        if forgotten.any():
            self._free(ids[forgotten])
            self._bury(ids[forgotten])
            self.index.settle(ids[forgotten])
            ids = ids[~forgotten]
        self.index.set_where(ids, HOST)
        self._host.admit(ids)
        self.writes.saved(ids)
        if self.writes.any_evicted:
            self._write_ahead(len(ids))

    def abandon(self, ids: BlockIds) -> Slots:
        """The bytes of *ids*, reserved as ``WRITING``, do not come. Their slots, still taken."""
        if not len(ids):
            return _NO_BLOCKS
        slots: Slots = self.index.host_slot[ids]
        self.index.host_slot[ids] = NO_SLOT
        self.index.clear_where(ids, WRITING)
        self._bury_forgotten(ids)
        self.index.settle(ids)
        return slots

    def disappoint(self, ids: BlockIds, absent: Bools, tier: LowerTier) -> None:
        """*ids*, reserved as ``ARRIVING``, do not come from *tier*; *absent* ones are not there."""
        self._free(ids)
        if tier == "disk":
            self._disk.remove(ids[absent])
        self.index.clear_where(ids[absent], BIT[tier])
        self.index.clear_where(ids, ARRIVING)
        self._bury_forgotten(ids)
        self.index.settle(ids)

    def drop_from_host(self, ids: BlockIds) -> None:
        """Give up the host copies of unleased blocks."""
        if self.index.leases[ids].any():
            raise InvariantViolated("a leased block is dropped")
        self.writes.discard(ids)
        self.counters.add(metrics.LOST_BLOCKS, self.writes.lost(ids))
        self._host.remove(ids)
        self._free(ids)
        self.index.clear_where(ids, HOST)
        self.index.settle(ids)

    def doubt(self, ids: BlockIds) -> None:
        """There may be other bytes than these blocks' in host memory: drop what nobody leases.

        *ids* were leased until now, so some may be gone already.
        """
        here = ids[self.has(ids, HOST) & (self.index.leases[ids] == 0)]
        self.drop_from_host(here)

    # -- tiers below ---------------------------------------------------------------------------

    def next_unwritten(self, tier: LowerTier, count: int) -> BlockIds:
        """At most *count* blocks that *tier* lacks, leased; ``written`` gives them back."""
        batch = self.writes.take(tier, count)
        self.index.lease(batch)
        return batch

    def written(self, tier: LowerTier, ids: BlockIds, stored: Bools) -> None:
        """The write of blocks of ``next_unwritten`` has ended. Forgotten ones do not count."""
        kept = ids[stored & ~self.index.is_retired(ids)]
        self.index.set_where(kept, BIT[tier])
        self.writes.refused(tier, ids[~stored])
        if tier == "disk":
            # What leaves host memory comes with the last of a prompt first.
            self._disk.admit(kept[::-1] if self.writes.is_last_moment(tier) else kept)
        self.unlease(ids)

    def write_later(self, tier: LowerTier, ids: BlockIds) -> None:
        """The store could not be asked: *ids*, of ``next_unwritten``, wait again."""
        self.writes.put_back(tier, ids[~self.index.is_retired(ids)])
        self.unlease(ids)

    def make_disk_room(self, ids: BlockIds) -> list[StoreKey]:
        """Evict until *ids* fit, or nothing more may leave; what the disk has to remove."""
        keys: list[StoreKey] = []
        for namespace in self._disk.limited:
            theirs = int(np.count_nonzero(self.index.are_of(ids, namespace)))
            over = self._disk.excess(namespace, theirs)
            if over:
                keys += self._evict_from_disk(
                    self._disk.victims_of(namespace, over, self._may_leave_disk)
                )
        short = len(self._disk) + len(ids) - self._disk_capacity
        if short > 0:
            keys += self._evict_from_disk(self._disk.victims(short, self._may_leave_disk))
        return keys

    def drop_from_disk(self, ids: BlockIds) -> None:
        self._disk.remove(ids)
        self.index.clear_where(ids, DISK)
        self.index.settle(ids)

    # -- whole namespaces ----------------------------------------------------------------------

    def forget(self, namespace: NamespaceId) -> int:
        """Nobody finds a block of *namespace* from now on; how many there were. ``reap`` frees them."""
        blocks = self.index.counts(namespace).blocks
        self.unlimit(namespace)
        self.index.retire(namespace)
        return blocks

    def reap(self) -> int:
        """Free some of what ``forget`` has left and nobody uses; how many blocks.

        Looks at a part of the index only: ``reap_calls`` times 0 means that there is nothing.
        """
        return self.index.reap(_REAP_BLOCKS, self._leave_tiers)

    @property
    def reap_calls(self) -> int:
        """Calls of ``reap`` after which it has looked everywhere."""
        return self.index.reap_calls

    def describe(
        self, namespaces: Mapping[NamespaceId, Mapping[str, str]]
    ) -> list[NamespaceReport]:
        """What each namespace holds: *namespaces*, and any other that has blocks."""
        known = dict.fromkeys([*namespaces, *self.index.namespaces])
        reports = []
        for namespace in known:
            counts = self.index.counts(namespace)
            reports.append(
                NamespaceReport(
                    namespace.hex(),
                    dict(namespaces.get(namespace, {})),
                    counts.blocks,
                    counts.host,
                    counts.disk,
                )
            )
        return reports

    def check(self, reserved: Sequence[int]) -> None:
        """Raises ``InvariantViolated`` unless every slot is free, in one block or reserved once.

        *reserved* are slots that no block of the index names.
        """
        self.index.check()
        self._slots.check()
        self._host.check()
        self._disk.check()
        ids = np.concatenate([*self.index.all_ids(), _NO_BLOCKS])
        where = self.index.where[ids]
        slots = self.index.host_slot[ids]
        holding = (where & (HOST | WRITING | ARRIVING)) != 0
        if not np.array_equal(holding, slots != NO_SLOT):
            raise InvariantViolated("a block has a slot and no use for it, or the reverse")
        for tier, policy, bit in (("host", self._host, HOST), ("disk", self._disk, DISK)):
            if len(policy) != np.count_nonzero(where & bit):
                raise InvariantViolated(f"the policy of {tier} holds other blocks than the tier")
        held = slots[holding].tolist() + list(reserved)
        if len(set(held)) != len(held):
            raise InvariantViolated("a host slot is in two blocks")
        if len(held) != self.host_used:
            raise InvariantViolated(
                f"{self.host_used} slots are used, {len(held)} are accounted for"
            )

    # -- inside --------------------------------------------------------------------------------

    def _evict_from_host(self, count: int) -> None:
        if self.reap():
            count -= min(count, self._slots.free)
        self._leave_host(self._host.victims(count, self._may_be_asked_to_leave), count)

    def _make_room_within(self, namespace: NamespaceId, count: int, whole: int, above: int) -> int:
        """Evict so that *namespace* may have *count* blocks more; by how many it still may not.

        *whole* and *above* are those of ``take_slots``.
        """
        quota = self._host.quota(namespace)
        if quota is None:
            return 0
        over = self._over_quota(namespace, count)
        is_kept = count <= quota and whole <= max(quota, self._room_below(namespace))
        leaving = over if is_kept else min(over, _beginning(quota, above))
        victims = self._host.victims_of(namespace, leaving, self._may_be_asked_to_leave)
        return min(count, over - self._leave_host(victims, leaving))

    def _room_below(self, namespace: NamespaceId | None) -> int:
        """Blocks for which the tiers below have room: within the quota of *namespace*, or all."""
        if self._has_remote:
            return _UNBOUNDED
        quota = None if namespace is None else self._disk.quota(namespace)
        return self._disk_capacity if quota is None else quota

    def _over_quota(self, namespace: NamespaceId, count: int) -> int:
        """How many blocks *namespace* has to give up to get *count* slots more."""
        counts = self.index.counts(namespace)
        return self._host.excess(namespace, count + counts.host_slots - counts.host)

    def _write_ahead(self, count: int) -> None:
        """Have written what leaves next, so that *count* blocks more find room at once."""
        count = max(count, self._slots.capacity // _AHEAD_SHARE)
        short = count - self._slots.free
        if short > 0:
            self.writes.leaving(self._host.victims(short, self._may_be_asked_to_leave))
        for namespace in self._host.limited:
            over = self._over_quota(namespace, count)
            victims = self._host.victims_of(namespace, over, self._may_be_asked_to_leave)
            self.writes.leaving(victims)

    def _leave_host(self, victims: BlockIds, count: int) -> int:
        """Evict *count* of *victims*, or as many as need not be written first; how many."""
        if self.writes.any_evicted:
            self.writes.leaving(victims)
            written = victims[~self.writes.have_to_be_written(victims)]
            victims = written[self.index.may_leave(written, HOST)]
        victims = victims[:count]
        self.drop_from_host(victims)
        self.counters.add(metrics.EVICTED_BLOCKS, len(victims), "host")
        return len(victims)

    def _evict_from_disk(self, victims: BlockIds) -> list[StoreKey]:
        # The store forgets what a reset forgets, and may hold the same prompt anew.
        keys = self.index.store_keys(victims[~self.index.is_retired(victims)])
        self.drop_from_disk(victims)
        self.counters.add(metrics.EVICTED_BLOCKS, len(victims), "disk")
        return keys

    def _may_be_asked_to_leave(self, ids: BlockIds) -> Bools:
        """Which of *ids* may leave host memory, if need be after they were written."""
        may = self.index.may_leave(ids, HOST)
        if self.writes.any_evicted:
            may |= (self.index.leases[ids] == 0) & self.writes.have_to_be_written(ids)
        return may

    def _may_leave_disk(self, ids: BlockIds) -> Bools:
        return self.index.may_leave(ids, DISK)

    def _bury_forgotten(self, ids: BlockIds) -> None:
        """``_bury`` those of *ids* that are forgotten and not leased."""
        forgotten = self.index.is_retired(ids)
        if forgotten.any():
            self._bury(ids[forgotten & (self.index.leases[ids] == 0)])

    def _bury(self, ids: BlockIds) -> None:
        """Forgotten blocks that nobody uses any more leave every tier; ``settle`` them then."""
        self._leave_tiers(ids)
        self.index.clear_where(ids, HOST | DISK | REMOTE)

    def _leave_tiers(self, ids: BlockIds) -> None:
        self.writes.discard(ids)
        self._host.remove(ids)
        self._disk.remove(ids)
        self._free(ids[self.has(ids, HOST)])

    def _free(self, ids: BlockIds) -> None:
        self.release_slots(self.index.host_slot[ids])
        self.index.host_slot[ids] = NO_SLOT


def leading(true: Bools) -> int:
    """How many of the first values are true."""
    return len(true) if true.all() else int(true.argmin())

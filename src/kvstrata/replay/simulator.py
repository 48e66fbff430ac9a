"""The tiers without their bytes: the production index, pools, policies, planner and tasks.

``Gets``, ``Puts``, ``Residency`` and ``Planner`` are those of the cache server. What stands in for
the rest is here: host memory that holds nothing, and a disk that does everything at once.

As far as the cache can see a request ends before the next one begins: its blocks are saved, and on
disk if they are to be, when the next one looks up. What is reported of the disk's busiest minute
says whether a real one could follow.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.config import Config
from kvstrata.core.errors import InvariantViolated
from kvstrata.core.keys import KeyArray
from kvstrata.core.tier_fields import Eviction
from kvstrata.core.types import NAMESPACE_ID_BYTES, BlockKey, NamespaceId, Read, StoreKey
from kvstrata.core.write_rule import WriteRule
from kvstrata.index.policies import EvictionPolicy
from kvstrata.index.tree import PrefixIndex
from kvstrata.manager.choices import make_policy
from kvstrata.manager.desk import Desk
from kvstrata.manager.gets import Gets
from kvstrata.manager.planner import Planner
from kvstrata.manager.puts import Puts
from kvstrata.manager.residency import Residency, Slots
from kvstrata.manager.tasks import Lookup, Offer, TaskState
from kvstrata.manager.writes import LowerTier
from kvstrata.observe import metrics
from kvstrata.replay.cost import Costs
from kvstrata.replay.hashing import keys_of_identities
from kvstrata.replay.outcome import Outcome
from kvstrata.replay.sizes import Sizes
from kvstrata.replay.spool import Spool, Spooled
from kvstrata.replay.trace import NO_PARENT, Kind, Request
from kvstrata.transfer.finder import Found
from kvstrata.transfer.read_meter import ReadCost

__all__ = ["CachePlan", "simulate"]

_NAMESPACE: Final = bytes(NAMESPACE_ID_BYTES)
_OWNER: Final = 1
_WRITE_BLOCKS: Final = 1024  # written to disk in one go
_NEVER_SECONDS: Final = 1e9
_EVENTS_A_TELLING: Final = 256
_MOST_OPEN: Final = 4096  # lookups whose put is still to come: of requests that run


class CachePlan(NamedTuple):
    """A cache to be tried."""

    policy: Eviction
    sizes: Sizes
    disk_write: WriteRule = WriteRule()


class _NoMemory:
    """Host slots without bytes."""

    def __init__(self, slots: int) -> None:
        self.slots = slots

    def disown(self, slots: Slots) -> None:
        """Nobody reads them."""

    def generations(self, slots: Slots) -> NDArray[np.uint64]:
        return np.zeros(len(slots), np.uint64)

    def view(self, slot: int) -> memoryview:
        raise InvariantViolated(f"the bytes of slot {slot} of a simulation are asked for")


class _InstantDisk:
    """Every block can be read, and is read at once."""

    search_seconds = 0.0

    def promote(
        self,
        keys: Sequence[StoreKey],
        slots: Sequence[int],
        done: Callable[[int, Sequence[Read | None]], None],
        begin: Callable[[int, int], bool],
    ) -> None:
        done(0, [Read.HIT] * len(keys))

    def find(self, keys: Sequence[StoreKey], done: Callable[[Found], None], asker: str) -> None:
        raise InvariantViolated("the disk is searched: the index knows what it has")

    def ask(self, keys: Sequence[StoreKey], done: Callable[[list[bool]], None], asker: str) -> None:
        raise InvariantViolated("the disk is asked: the index knows what it has")

    def owes_drop(self, namespace: NamespaceId) -> bool:
        return False

    def is_off(self) -> bool:
        return False

    def relieve(self) -> None:
        """Nothing waits."""


class _PeakRate:
    """The most of something in a minute, a second."""

    _MINUTE_SECONDS: Final = 60.0

    def __init__(self) -> None:
        self._minute = 0
        self._amount = 0
        self._most = 0

    def add(self, now_seconds: float, amount: int) -> None:
        minute = int(now_seconds // self._MINUTE_SECONDS)
        if minute != self._minute:
            self._minute, self._amount = minute, 0
        self._amount += amount
        self._most = max(self._most, self._amount)

    @property
    def per_second(self) -> float:
        return self._most / self._MINUTE_SECONDS


class SimulatedCache:
    """One cache, request after request."""

    def __init__(self, plan: CachePlan, costs: Costs, most_blocks: int) -> None:
        """*most_blocks* is how many different blocks there can be: room for more costs nothing."""
        host, disk = (
            min(size // costs.block_bytes, most_blocks)
            for size in (plan.sizes.host_bytes, plan.sizes.disk_bytes)
        )
        self._plan = plan
        self._costs = costs
        self._disk_blocks = disk
        self._now = 0.0
        self.counters = metrics.Counters()
        memory = _NoMemory(host)
        self.cache = Residency(
            memory,
            self.counters,
            self._make_policy,
            disk_capacity_blocks=disk,
            write={"disk": plan.disk_write} if disk else {},
            wake=self._write,
        )
        self._lock = threading.Condition()
        desk = Desk(self._lock, memory)
        cost = ReadCost(0.0, costs.disk_seconds(1))
        planner = Planner(
            {"disk": lambda: cost},
            load_timeout_seconds=Config().load_timeout_seconds,
            clock=lambda: self._now,
        )
        lower: dict[LowerTier, _InstantDisk] = {"disk": _InstantDisk()}
        self._gets = Gets(
            self.cache,
            lower,
            desk,
            planner=planner,
            lease_seconds=_NEVER_SECONDS,
        )
        self._puts = Puts(self.cache, lower, desk)
        self._open: OrderedDict[int, tuple[Request, int]] = OrderedDict()  # by what is put next
        self._hits = {"host": 0, "disk": 0}
        self._prefill_seconds = self._load_seconds = 0.0
        self._computed_blocks, self._computed_seconds = 0, 0.0
        self._reads, self._writes = _PeakRate(), _PeakRate()

    def request(self, event: Spooled) -> None:
        """One event of a trace."""
        request, on_device = event
        self._now = request.arrival_seconds
        if request.kind is Kind.PUT:
            self._put(request)
            return
        keys = keys_of_identities(request.blocks)
        first = request.first_block + on_device
        wanted = keys[on_device:]
        found = self._load(wanted, first) if len(wanted) else 0
        self._compute(first + found, first + len(wanted))
        done, whole = on_device + found, request.first_block + len(keys)
        if request.kind is Kind.PROMPT or request.found_blocks == len(keys):
            above = keys[done - 1].tobytes() if done else _key_of(request.parent)
            self._save(keys[done:], above, whole)
        else:
            self._await_put(request, done)

    def _await_put(self, request: Request, found_blocks: int) -> None:
        """What *request* lacks in the trace is to be put; here *found_blocks* of it were found."""
        lacking = int(request.blocks[request.found_blocks])
        self._open.pop(lacking, None)
        if found_blocks != request.found_blocks:
            # A copy: else all that was read with it stays.
            own = request._replace(blocks=request.blocks.copy())
            self._open[lacking] = own, found_blocks
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)

    def _put(self, request: Request) -> None:
        """What the engine would have offered here: from the first block on that it did not find."""
        blocks, parent = request.blocks, request.parent
        looked_up, found_blocks = self._open.pop(int(blocks[0]), (None, 0))
        if looked_up is not None:
            blocks = np.concatenate([looked_up.blocks[: looked_up.found_blocks], blocks])
            above = blocks[:found_blocks]
            parent = int(above[-1]) if len(above) else looked_up.parent
            blocks = blocks[found_blocks:]
        self._save(keys_of_identities(blocks), _key_of(parent), request.prompt_blocks)

    def outcome(self) -> Outcome:
        """What has come of all requests."""
        counts = self.counters.snapshot()
        block_bytes = self._costs.block_bytes
        return Outcome(
            self._plan.policy,
            self._plan.sizes,
            host_hits=self._hits["host"],
            disk_hits=self._hits["disk"],
            declined=sum(
                counts[f"{metrics.DECLINED_BLOCKS.name}{{reason={reason}}}"]
                for reason in metrics.DECLINED_BLOCKS.values
            ),
            saved=counts[metrics.SAVED_BLOCKS.name],
            shed=counts[metrics.SHED_BLOCKS.name],
            written=counts[f"{metrics.CASCADED_BLOCKS.name}{{tier=disk}}"],
            evicted_host=counts[f"{metrics.EVICTED_BLOCKS.name}{{tier=host}}"],
            evicted_disk=counts[f"{metrics.EVICTED_BLOCKS.name}{{tier=disk}}"],
            prefill_seconds=self._prefill_seconds,
            load_seconds=self._load_seconds,
            peak_write_bytes_per_second=self._writes.per_second * block_bytes,
            peak_read_bytes_per_second=self._reads.per_second * block_bytes,
        )

    def check(self) -> None:
        """Raises ``InvariantViolated`` if the cache contradicts itself."""
        self.cache.check([])

    def _make_policy(self, tier: str, index: PrefixIndex, tier_blocks: int) -> EvictionPolicy:
        doubling = self._costs.rates.attention_tokens / self._costs.tokens_per_block
        return make_policy(
            self._plan.policy, index, tier_blocks, doubling_blocks=max(1, round(doubling))
        )

    def _load(self, keys: KeyArray, first: int) -> int:
        """Look up blocks *first* and on of a prompt; how many leading ones are loaded."""
        lookup = Lookup(_NAMESPACE, keys, "", self._blocks_per_second())
        with self._lock:
            status, begin = self._gets.match(lookup, _OWNER, None)
            begin()
            if not status.task_id:
                return 0
            task = self._gets.tasks[status.task_id]
            loaded = len(task.ids)
            self._gets.end(task, TaskState.DONE)
        self._hits["disk"] += task.disk_blocks
        self._hits["host"] += loaded - task.disk_blocks
        self._reads.add(self._now, task.disk_blocks)
        self._prefill_seconds += self._costs.prefill_seconds(first, first + loaded)
        self._load_seconds += self._costs.host_seconds(loaded)
        self._load_seconds += self._costs.disk_seconds(task.disk_blocks)
        return loaded

    def _save(self, keys: KeyArray, parent: BlockKey | None, whole: int) -> None:
        """Offer *keys* of a prompt of *whole* blocks, if that is known."""
        if not len(keys):
            return
        with self._lock:
            offer = Offer(_NAMESPACE, keys, parent, prompt_blocks=whole)
            status = self._puts.match(offer, _OWNER)
            if status.task_id:
                task = self._puts.tasks[status.task_id]
                self._puts.publish(task, TaskState.DONE, len(task.ids))

    def _write(self, tier: LowerTier) -> None:
        """Write everything that waits for the disk."""
        while len(batch := self.cache.next_unwritten(tier, _WRITE_BLOCKS)):
            self.cache.make_disk_room(batch)
            stored = np.arange(len(batch)) < self._disk_blocks - self.cache.disk_used
            self.cache.written(tier, batch, stored)
            written = int(np.count_nonzero(stored))
            self.counters.add(metrics.CASCADED_BLOCKS, written, tier)
            self._writes.add(self._now, written)

    def _compute(self, first: int, end: int) -> None:
        self._computed_blocks += end - first
        self._computed_seconds += self._costs.prefill_seconds(first, end)

    def _blocks_per_second(self) -> float | None:
        """What an engine would have measured of its prefill until now."""
        if not self._computed_blocks:
            return None
        return self._computed_blocks / self._computed_seconds


def _key_of(identity: int) -> BlockKey | None:
    if identity == NO_PARENT:
        return None
    return keys_of_identities(np.array([identity], np.uint64)).tobytes()


def simulate(
    spool: Spool,
    costs: Costs,
    plan: CachePlan,
    *,
    most_blocks: int,
    on_event: Callable[[int], None] | None = None,
) -> Outcome:
    """Put all of *spool*, in which *most_blocks* are different, through a cache.

    *on_event* is told how many events are done, now and then.
    """
    cache = SimulatedCache(plan, costs, most_blocks)
    for number, event in enumerate(spool, start=1):
        cache.request(event)
        if on_event is not None and number % _EVENTS_A_TELLING == 0:
            on_event(number)
    return cache.outcome()

"""KVManager: the truth about which blocks exist, and the tasks that load and save them."""

import logging
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from kvstrata.core.config import Config
from kvstrata.core.errors import TierUnavailable
from kvstrata.core.keys import Keys, as_key_array
from kvstrata.core.types import (
    EXACT,
    BlockFormat,
    BlockKey,
    NamespaceId,
)
from kvstrata.core.write_rule import WriteRule, parse_write_rule
from kvstrata.manager.cascade import Cascade, CascadeSettings
from kvstrata.manager.choices import (
    call_seconds_of,
    disk_limits_of,
    hung_seconds_of,
    policy_of,
    remote_limits_of,
    retry_seconds_of,
    search_limits_of,
)
from kvstrata.manager.decisions import Decision
from kvstrata.manager.desk import Desk
from kvstrata.manager.feed import Feed
from kvstrata.manager.gains import Gains
from kvstrata.manager.gets import Gets, Settled
from kvstrata.manager.moves import Moves
from kvstrata.manager.operator import Operator
from kvstrata.manager.pins import Pins
from kvstrata.manager.planner import Planner
from kvstrata.manager.puts import Puts, distinct
from kvstrata.manager.recorder import Recorder
from kvstrata.manager.report import CacheReport, DurationReport, OperationReport, TierReport
from kvstrata.manager.residency import Residency
from kvstrata.manager.sessions import LOCAL_OWNER, Sessions
from kvstrata.manager.tasks import UNSETTLED, Lookup, Offer, TaskState, TaskStatus
from kvstrata.manager.writes import LowerTier
from kvstrata.observe import metrics
from kvstrata.storage.disk_directory import Reservation
from kvstrata.storage.engine import StorageEngine
from kvstrata.storage.host import HostMemory
from kvstrata.storage.store import Store

_log = logging.getLogger(__name__)

_LEASE_SECONDS = 60.0  # plus the time to load: then a get loses its leases
WRITER_GRACE_SECONDS = 10.0  # a worker without a connection writes to its slots no longer
_KEPT_NAMESPACES = 256  # whose parts are shown; each reset of an engine names a new one

OnPrefault = Callable[[int, int], None]


class KVManager:
    """Host memory and the tiers below it, behind get and put tasks.

    Thread-safe; no method but ``wait``, ``reset``, ``drop_forgotten`` and ``close`` waits for I/O.
    The bytes are moved by others: a caller of ``put_match`` writes the reserved ``view``\\ s and
    completes the task, a caller of ``get_match`` reads the leased ones and completes it.
    """

    def __init__(
        self,
        config: Config,
        *,
        block_bytes: int,
        block_format: BlockFormat = EXACT,
        remote: Store | None = None,
        on_prefault: OnPrefault | None = None,
        reservation: Reservation | None = None,
    ) -> None:
        """Open the tiers of *config*; *remote* is a store to use as remote tier instead of its.

        Tiers below host memory keep blocks in *block_format*.

        Host memory is backed in the background; *on_prefault* hears of it, on that thread: bytes
        done, bytes in all. *reservation* is that of the disk tier, if it has one. Raises ``ConfigError`` if a tier cannot be opened, and has then opened
        none.
        """
        self.block_bytes = block_bytes
        self.block_format = block_format
        self.counters = metrics.Counters()
        self._lock = threading.Condition()
        self._quotas = dict(config.quotas)
        self._drain_timeout_seconds = config.drain_timeout_seconds
        self._storage = StorageEngine(
            block_bytes,
            config.tiers,
            remote=remote,
            block_format=block_format,
            reservation=reservation,
        )
        self._memory = self._storage.host.data
        self.server_id = self._memory.mapping.server_id
        disk = self._storage.disk
        self._desk = Desk(self._lock, self._memory)
        self._cache = Residency(
            self._memory,
            self.counters,
            partial(policy_of, config),
            disk_capacity_blocks=disk.capacity_blocks if disk else 0,
            write=self._written_tiers(config),
            wake=lambda tier: self._lower[tier].wake(),
        )
        self._namespaces: dict[NamespaceId, Mapping[str, str]] = {}
        self.feed = Feed(self._lock, self._cache.index)
        self._recorder = Recorder(
            config, self._cache.index, self._namespaces, self.counters, block_bytes=self.block_bytes
        )
        self._lower = self._open_lower(config)
        self._sessions = Sessions(grace_seconds=WRITER_GRACE_SECONDS)
        self._puts = Puts(self._cache, self._lower, self._desk)
        smallest = min([self._memory.slots, *([disk.capacity_blocks] if disk else [])])
        self._pins = Pins(self._cache, smallest)
        self._gets = Gets(
            self._cache,
            self._lower,
            self._desk,
            planner=self._planner(config),
            lease_seconds=_LEASE_SECONDS + config.load_timeout_seconds,
            on_found=self._recorder.put,
        )
        gains = Gains(self.counters, self._namespaces, block_bytes=block_bytes)
        self._moves = Moves(self._cache, self._gets, self._puts, self._sessions, self._pins, gains)
        self.operator = Operator(self._cache, self._lower, self._desk, self._puts, self.reset)
        if config.prefault:
            threading.Thread(
                target=self._prefault, args=[on_prefault], name="kvstrata-prefault", daemon=True
            ).start()

    def _planner(self, config: Config) -> Planner:
        return Planner(
            {tier: lower.meter.cost for tier, lower in self._lower.items()},
            load_timeout_seconds=config.load_timeout_seconds,
            take_all=config.recompute == "never",
        )

    def _written_tiers(self, config: Config) -> dict[LowerTier, WriteRule]:
        """The tiers below that there are, and when each gets a block."""
        found: dict[LowerTier, WriteRule] = {}
        disk, lowest = config.disk_tier, config.lowest_tier
        if self._storage.disk is not None:
            found["disk"] = parse_write_rule(disk.write) if disk else WriteRule()
        if self._storage.remote is not None:
            found["remote"] = parse_write_rule(lowest.write) if lowest else WriteRule()
        return found

    def _open_lower(self, config: Config) -> dict[LowerTier, Cascade]:
        lower: dict[LowerTier, Cascade] = {}
        disk, remote = self._storage.disk, self._storage.remote
        if disk is not None:
            self._cache.restore(*disk.data.stored())
            store = self._storage.as_blocks(disk.data)
            settings = CascadeSettings(
                limits=disk_limits_of(config.disk_tier),
                hung_seconds=hung_seconds_of(config.disk_tier),
            )
            lower["disk"] = Cascade("disk", store, self._cache, self._desk, settings)
        if remote is not None:
            store = self._storage.as_blocks(remote.data)
            settings = CascadeSettings(
                limits=remote_limits_of(config),
                search=search_limits_of(config),
                hung_seconds=hung_seconds_of(config.lowest_tier),
                retry_seconds=retry_seconds_of(config.lowest_tier),
                call_seconds=call_seconds_of(config.lowest_tier),
                upkeep=self._storage.upkeep,
            )
            lower["remote"] = Cascade("remote", store, self._cache, self._desk, settings)
        return lower

    # -- who is there ------------------------------------------------------------------------

    @property
    def memory(self) -> HostMemory:
        return self._memory

    def view(self, slot: int) -> memoryview:
        """The ``block_bytes`` bytes of host slot *slot*."""
        return self._memory.view(slot)

    def register_namespace(self, namespace: NamespaceId, parts: Mapping[str, str]) -> None:
        """Remember what *namespace* stands for, for ``inspect``, and which quota it has.

        Of the last 256 that were registered; those that have blocks stay longest.
        """
        with self._lock:
            self._namespaces.pop(namespace, None)
            self._namespaces[namespace] = dict(parts)
            self.feed.named(namespace, parts.get("model", ""))
            self._limit(namespace)
            if len(self._namespaces) > _KEPT_NAMESPACES:
                oldest = next(
                    filter(self._is_empty, self._namespaces), next(iter(self._namespaces))
                )
                del self._namespaces[oldest]
                self._cache.unlimit(oldest)

    def connect_engine(
        self, session: str, world_size: int, *, life: str = "", running: Collection[int] = ()
    ) -> int:
        """A scheduler; its owner number.

        One that has been connected before says so by the same *life*. Its earlier connections
        count as ended; slots of their puts are free, but for the tasks *running*, for which its
        workers may still be writing: ``complete`` or ``fail`` of those frees them.
        """
        with self._lock:
            if life:
                self._moves.succeed(life, running)
            return self._sessions.add_engine(session, world_size, life)

    def connect_worker(self, session: str, rank: int) -> int:
        with self._lock:
            return self._sessions.add_worker(session, rank)

    def connect_operator(self) -> int:
        """Somebody who may ``prefetch``; his owner number."""
        with self._lock:
            return self._sessions.add_operator()

    def measured(self, owner: int, blocks_per_second: float) -> None:
        """The engine *owner* computes so many blocks a second, by its own measurement."""
        with self._lock:
            self._sessions.measured(owner, blocks_per_second)

    def workers(self, owner: int) -> int:
        """How many workers of the engine *owner* have mapped the host tier."""
        with self._lock:
            return self._sessions.workers(owner)

    def disconnect(self, owner: int) -> None:
        """Release what *owner* held: leases at once, reserved slots when nobody can write to them."""
        with self._lock:
            self._moves.disconnect(owner)

    # -- tasks -------------------------------------------------------------------------------

    def get_match(
        self,
        namespace: NamespaceId,
        keys: Keys,
        *,
        owner: int = LOCAL_OWNER,
        request: str = "",
        states: int = 0,
        settled: Settled | None = None,
    ) -> TaskStatus:
        """Lease the longest prefix of *keys* that is in some tier and sooner loaded than computed.

        The status is ``READY`` if all of it is in host memory. Else its slots are the part that
        is, and *settled* is called, on another thread, when the rest has arrived or failed:
        ``PROMOTING`` while known blocks are on their way up, before it ``SEARCHING`` while the
        remote tier is asked for blocks unknown here (then *settled* tells the end of the search
        too). With nothing found there is no task: ``task_id`` is 0, ``DONE``, or ``FAILED`` while
        not all workers of *owner* are attached. *request* is what ``explain`` will know it by.

        With *states* recurrent groups the prefix ends where there is a state of each, saved under
        ``state_keys`` of its last block's key; they are leased with it, and their slots come last.
        Until then its slots are those up to an end that is nearer, or none.
        """
        lookup = Lookup(namespace, as_key_array(keys), request, states=states)
        return self._get(lookup, owner, settled)

    def put_match(
        self,
        namespace: NamespaceId,
        keys: Keys,
        *,
        parent: BlockKey | None = None,
        owner: int = LOCAL_OWNER,
        request: str = "",
        prompt_blocks: int = 0,
    ) -> TaskStatus:
        """Reserve host slots for those of *keys* that are nowhere, or only in the remote tier or on
        a disk that is switched off, and that nobody is saving.

        *keys* follow each other in a prompt, *parent* is the block before them. When host memory
        has no room for all, the leading ones get it. Who offers a prompt in parts says how many
        *prompt_blocks* it has: one that can never fit must not drive out all others. Without a task ``task_id`` is 0: ``DONE`` if
        all is there, ``FAILED`` if others are still saving it, if there is no room, during a
        ``drain``, or if not all workers are attached.
        """
        asked = distinct(as_key_array(keys))
        self._gets.expire()
        with self._lock:
            self._pins.expire()
            if self.operator.is_draining or not self._sessions.can_transfer(owner):
                return TaskStatus(0, TaskState.FAILED)
            self._moves.expire()
            # A reset by another engine has lifted the quota, and this one goes on here.
            self._limit(namespace)
            offer = Offer(namespace, asked, parent, request, prompt_blocks)
            status = self._puts.match(offer, owner)
            self._recorder.put(namespace, asked, parent, prompt_blocks=prompt_blocks)
        return status

    def launch(self, task_ids: Sequence[int], *, owner: int = LOCAL_OWNER) -> None:
        """The copies of these tasks begin.

        As with all news of tasks, unknown tasks, ended ones and those of others are passed over,
        and news that come twice mean nothing.
        """
        with self._lock:
            self._moves.launch(task_ids, owner)

    def complete(self, task_ids: Sequence[int], *, owner: int = LOCAL_OWNER) -> None:
        """The copies of these running tasks have succeeded: saved blocks can be found from now.

        ``InvariantViolated`` tells of tasks that were not launched; they stay as they are.
        """
        with self._lock:
            self._moves.complete(task_ids, owner)

    def complete_part(self, task_id: int, blocks: int, *, owner: int = LOCAL_OWNER) -> None:
        """The copies of a running task have ended, and only its first *blocks* are whole.

        Those of a put can be found from now; the slots of the others are free. Of a get, the
        others are dropped from host memory as after ``fail``.
        """
        with self._lock:
            self._moves.complete_part(task_id, blocks, owner)

    def fail(self, task_ids: Sequence[int], *, owner: int = LOCAL_OWNER) -> None:
        """The copies of these tasks have failed and have ended.

        A block whose load failed is dropped from host memory: there is a doubt about it.
        """
        with self._lock:
            self._moves.fail(task_ids, owner)

    def cancel(self, task_ids: Sequence[int], *, owner: int = LOCAL_OWNER) -> None:
        """Give up tasks in any state; reads that nobody else waits for are not begun any more.

        The caller vouches that nobody will copy for those that are not running. One that is
        running is ``STOPPING`` until ``complete`` or ``fail`` tells that the copies have ended;
        what they copied does not count. A load then counts as failed; only after ``fail`` are its
        blocks dropped.
        """
        with self._lock:
            self._moves.cancel(task_ids, owner)

    def try_wait(self, task_ids: Sequence[int]) -> dict[int, TaskStatus]:
        """What is known of these tasks now. Tasks ended long ago are absent."""
        with self._lock:
            found = {}
            for task_id in task_ids:
                if task_id in self._gets.tasks:
                    found[task_id] = self._gets.status(self._gets.tasks[task_id])
                elif task_id in self._puts.tasks:
                    found[task_id] = self._puts.status(self._puts.tasks[task_id])
                elif (state := self._desk.ended(task_id)) is not None:
                    found[task_id] = TaskStatus(task_id, state)
            return found

    def wait(self, task_ids: Sequence[int], timeout_seconds: float) -> dict[int, TaskStatus]:
        """``try_wait`` once all tasks have settled, or after *timeout_seconds*."""
        with self._lock:
            self._lock.wait_for(
                lambda: (
                    not any(
                        task_id in self._gets.tasks and self._gets.tasks[task_id].state in UNSETTLED
                        for task_id in task_ids
                    )
                ),
                timeout_seconds,
            )
            return self.try_wait(task_ids)

    def prefetch(self, namespace: NamespaceId, keys: Keys, *, owner: int = LOCAL_OWNER) -> int:
        """Bring the longest prefix of *keys* into host memory; the task, 0 if it is there already.

        The task ends by itself, ``DONE``: its leases are returned as soon as the blocks have
        arrived, or cannot. It can be cancelled before; what has arrived by then stays. It is no lookup
        to those who count these, and no decision tells of it.
        """

        def release(status: TaskStatus) -> None:
            if status.state not in UNSETTLED:
                with self._lock:
                    self._moves.release(status.task_id, owner)

        lookup = Lookup(namespace, as_key_array(keys), is_traffic=False)
        status = self._get(lookup, owner, release)
        if status.state is TaskState.READY:
            release(status)
            return 0
        return status.task_id

    def pin(self, namespace: NamespaceId, keys: Keys, ttl_seconds: float) -> tuple[int, int]:
        """Keep the leading *keys* that are in host memory or on disk from leaving, for a time.

        The number of the pin, for ``unpin``, and how many blocks it holds; 0 and 0 if the first is
        in neither. They stay in the tiers that they are in, and are not copied to another. At most
        half as many blocks as the smaller tier holds can be pinned at a time, in 1024 pins: then
        ``LimitExceeded``. A time that is not finite or not above 0 is a ``ValueError``.
        """
        _check_ttl(ttl_seconds)
        with self._lock:
            return self._pins.add(namespace, as_key_array(keys), ttl_seconds)

    def pin_request(self, request: str, ttl_seconds: float) -> tuple[int, int]:
        """``pin`` the prompt of a recent request, as far as its blocks were found or saved.

        Only requests that ``explain`` has a decision for are known, and of several of one name the
        latest counts.
        """
        _check_ttl(ttl_seconds)
        with self._lock:
            return self._pins.add_request(self._desk.decisions.of(request), ttl_seconds)

    def unpin(self, number: int) -> bool:
        """End a pin before its time; whether there was one of that number."""
        with self._lock:
            return self._pins.remove(number)

    def reset(self, namespace: NamespaceId) -> int:
        """Forget every block of *namespace*, below host memory durably so; how many were known.

        Its pins end. Blocks that are being saved at this moment will not become visible. On ``TierUnavailable``
        none is found either, but it could be after a restart; the drop is tried until it succeeds.
        """
        dropped = self.forget(namespace)
        self.drop_forgotten()
        return dropped

    def forget(self, namespace: NamespaceId) -> int:
        """The part of ``reset`` that waits for nothing; ``drop_forgotten`` has to follow.

        No block of *namespace* is found from now on, in no tier; how many were known.
        """
        with self._gets.settling() as settling:
            self._pins.forget(namespace)
            settling.tasks.update(self._gets.forget(namespace))
            dropped = self._cache.forget(namespace)
            for lower in self._lower.values():
                lower.owe_drop(namespace)
        return dropped

    def drop_forgotten(self) -> None:
        """Free the slots of what ``forget`` was called for, and make tiers below forget it durably.

        ``TierUnavailable`` as of ``reset``.
        """
        in_vain = 0
        while in_vain < self._cache.reap_calls:
            with self._lock:
                in_vain = 0 if self._cache.reap() else in_vain + 1
        refused: TierUnavailable | None = None
        for lower in self._lower.values():
            try:
                lower.pay_drops()
            except TierUnavailable as e:
                refused = e
        if refused is not None:
            raise refused

    # -- what it looks like ------------------------------------------------------------------

    def stats(self) -> CacheReport:
        """Usage of each tier, counters, and what is known of namespaces and engines."""
        with self._lock:
            cache, memory = self._cache, self._memory
            usage = memory.usage()
            pins = self._pins.report()
            tiers = [
                TierReport(
                    "host",
                    memory.slots,
                    cache.host_used,
                    self.block_bytes,
                    backed_bytes=usage.backed_bytes,
                    padding_bytes=usage.padding_bytes,
                    longest_free_run=cache.longest_free_run(),
                )
            ]
            tiers += [lower.report() for lower in self._lower.values()]
            return CacheReport(
                server_id=self.server_id.hex(),
                tiers=tiers,
                counters=self.counters.snapshot(),
                running_gets=len(self._gets.tasks),
                running_puts=len(self._puts.tasks),
                pinned_blocks=self._pins.blocks,
                pins=pins,
                namespaces=self._cache.describe(self._namespaces),
                engines=self._sessions.describe(),
                operations=[OperationReport(*c) for c in self.counters.operations.snapshot()],
                durations=[DurationReport(*c) for c in self.counters.durations.snapshot()],
                leased_blocks=self._gets.leased_blocks,
                spared_prefill_seconds=self.counters.spared_seconds,
                drain=self.operator.drain_state(),
            )

    def explain(self, request: str) -> list[Decision]:
        """What was decided lately for *request*, oldest first."""
        with self._lock:
            return self._desk.decisions.of(request)

    def check(self) -> None:
        """Raises ``InvariantViolated`` unless every slot is accounted for exactly once."""
        with self._lock:
            self._cache.check(self._sessions.orphaned_slots())

    def close(self) -> None:
        """Write what no tier below has yet, at most ``drain_timeout_seconds`` each; release all."""
        for lower in self._lower.values():
            lower.close(self._drain_timeout_seconds)
        self._recorder.close(self._drain_timeout_seconds)
        self._storage.close()

    def _is_empty(self, namespace: NamespaceId) -> bool:
        return not self._cache.index.counts(namespace).blocks

    def _limit(self, namespace: NamespaceId) -> None:
        if not self._quotas or self._cache.is_limited(namespace):
            return
        share = self._quotas.get(self._namespaces.get(namespace, {}).get("model", ""))
        if share is not None:
            self._cache.limit(namespace, share)

    # -- inside, without the lock ------------------------------------------------------------

    def _get(self, lookup: Lookup, owner: int, settled: Settled | None) -> TaskStatus:
        """``get_match``."""
        self._gets.expire()
        with self._lock:
            self._pins.expire()
            self._moves.expire()
            if not self._sessions.can_transfer(owner):
                return TaskStatus(0, TaskState.FAILED)
            lookup.blocks_per_second = self._sessions.blocks_per_second(owner)
            status, begin = self._gets.match(lookup, owner, settled)
            if lookup.is_traffic:
                self._recorder.lookup(lookup.namespace, lookup.keys, status.matched_blocks)
        begin()
        return status

    def _prefault(self, progress: OnPrefault | None) -> None:
        try:
            self._memory.prefault(progress)
        except (OSError, ValueError) as e:
            _log.warning("host memory could not be prefaulted: %s", e)


def _check_ttl(seconds: float) -> None:
    if not 0 < seconds < math.inf:  # as no NaN is
        raise ValueError(f"a pin for {seconds} s: its time is finite and more than 0")

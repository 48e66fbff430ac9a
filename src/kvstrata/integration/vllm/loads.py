"""Loads: what the cache has of a request's prompt, and getting it into the device blocks."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from kvstrata.core.config import Config
from kvstrata.core.types import BlockKey, NamespaceId
from kvstrata.integration.vllm.ahead import AT_ITS_TURN, Ahead
from kvstrata.integration.vllm.at_once import AtOnce
from kvstrata.integration.vllm.awaits import Awaits
from kvstrata.integration.vllm.blocks import BlockIds
from kvstrata.integration.vllm.compat import CacheHitSource
from kvstrata.integration.vllm.link import CacheLink
from kvstrata.integration.vllm.metadata import Load, WorkerReport, all_workers
from kvstrata.integration.vllm.setup import EngineIdentity
from kvstrata.integration.vllm.spans import Origin, RequestSpans, lowest_tier
from kvstrata.integration.vllm.taint import TaintChain
from kvstrata.manager.tasks import UNSETTLED, TaskState, TaskStatus
from kvstrata.server import protocol as p
from kvstrata.server.client import Pending

_log = logging.getLogger(__name__)

_ASK_AGAIN_SECONDS: Final = 0.01  # for blocks that are awaited
_TURN_SECONDS: Final = 0.1  # who has waited so long for its turn may find room that was not there
STALE_SECONDS: Final = 20.0  # after that, and the time to load, leases may be near their end


@dataclass(slots=True)
class _Lookup:
    """A question to the server, and its answer: leased slots of consecutive blocks."""

    pending: Pending
    connection: int
    first_block: int
    known_blocks: int  # that could be found when it was asked
    keys: list[BlockKey]
    is_second: bool  # the first answer had left out some of what was found
    computed_tokens: int = 0  # on the device, as of the last answer to vLLM
    at_once: bool = False  # the request runs in the step that loads it, as of that answer

    @property
    def status(self) -> TaskStatus | None:
        return self.pending.status

    @property
    def is_whole(self) -> bool:
        """Whether every block that was asked for was found."""
        status = self.status
        found = 0 if status is None else status.matched_blocks + status.declined_blocks
        return found == len(self.keys)

    @property
    def may_find_more(self) -> bool:
        """Whether found blocks were left out, for want of room maybe, and that is some time ago."""
        status = self.status
        left_out = (
            status is not None and status.state not in UNSETTLED and status.declined_blocks > 0
        )
        return left_out and not self.is_second and self.age_seconds > _TURN_SECONDS

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self.pending.sent_at


@dataclass(slots=True)
class _RunningLoad:
    request_id: str | None  # None once the request is over
    connection: int
    keys: list[BlockKey]
    workers_left: int  # as bits
    origin: Origin | None  # if spans are wanted
    tier: str  # the lowest that some of it comes from
    began_at: float = field(default_factory=time.monotonic)
    failed: bool = False
    given_up: bool = False


class Loads:
    """Answers vLLM's ``get_num_new_matched_tokens`` and turns answers into ``Load`` plans.

    A request waits for the server no longer than ``lookup_timeout_seconds``, and for its blocks
    to come up from disk no longer than ``load_timeout_seconds``; then it is computed.
    """

    def __init__(
        self,
        config: Config,
        identity: EngineIdentity,
        link: CacheLink,
        taints: TaintChain,
        *,
        blocks_at_once: int,
        spans: RequestSpans | None = None,
    ) -> None:
        self._config = config
        self._at_once = AtOnce(blocks_at_once)
        self._spans = spans
        self._math = identity.math
        self._link = link
        self._taints = taints
        self._all_workers = all_workers(identity.world_size)
        self.ahead = Ahead(link)
        self._is_first = True  # in this step nobody before has asked at its turn, or waits
        self._lookups: dict[str, _Lookup] = {}
        self._running: dict[int, _RunningLoad] = {}
        self._loading_blocks = 0  # of them
        self._awaits = Awaits()
        self._refused: set[str] = set()  # requests whose load failed once: computed from then on
        self._planned: list[Load] = []
        self._sources: dict[str, dict[CacheHitSource, int]] = {}

    def expect(self, request: Request, namespace: NamespaceId, pool: BlockPool) -> None:
        """*request* is new: ask for its prompt now, unless the device cache covers it.

        If lookups keep too much of host memory (``Ahead``), it is asked for at its turn.
        """
        if request.request_id in self._lookups or not self._may_load(request):
            return
        computed = self._math.cached_on_device(request, pool)
        if self.ahead.fits(self._missing_blocks(request, computed)):
            self._ask(request, namespace, computed)

    def match(
        self, request: Request, namespace: NamespaceId, computed: int, wait_seconds: float
    ) -> int | None:
        """Tokens beyond *computed* that can be loaded; None to be asked again.

        Waits *wait_seconds* for the answer, once a lookup. A request that awaits blocks
        which another engine is about to store (``Awaits``) asks until it has them all.
        """
        if not self._may_load(request):
            return 0
        tokens = self._look(request, namespace, computed, wait_seconds)
        if tokens is None or not self._awaits.is_on(request):
            return tokens
        lookup = self._lookups.get(request.request_id)
        if lookup is None:
            asks_for_more = self._findable_blocks(request) * self._math.tokens > computed
            return None if asks_for_more and not self._link.ready else tokens
        if lookup.is_whole and lookup.connection == self._link.number:
            return tokens
        if lookup.age_seconds > _ASK_AGAIN_SECONDS:
            self._drop(request.request_id)
            if self._has_its_turn(request, computed):
                self._ask(request, namespace, computed)
        return None

    def _look(
        self, request: Request, namespace: NamespaceId, computed: int, wait_seconds: float
    ) -> int | None:
        """What ``match`` answers for a request that awaits nothing."""
        if not self._link.ready and not self._is_answered(request.request_id):
            return 0
        if request.request_id not in self._lookups and not self._has_its_turn(request, computed):
            return None
        lookup = self._fresh_lookup(request, namespace, computed)
        if lookup is None:
            return 0
        pending = lookup.pending
        self._link.hear(lambda: pending.reply is not None, pending.sent_at + wait_seconds)
        if lookup.connection != self._link.number:
            return 0
        if not self._settled(lookup):
            self.waits()
            return None
        if lookup.status is None or not lookup.status.slots:
            return 0
        blocks = len(lookup.status.slots) - len(self._math.recurrent)
        found = (lookup.first_block + blocks) * self._math.tokens
        lookup.computed_tokens = computed
        return self._loadable(request, lookup, found)

    def _loadable(self, request: Request, lookup: _Lookup, found: int) -> int | None:
        """Tokens of *found* to load; None if that has to wait for the next step."""
        computed, math = lookup.computed_tokens, self._math
        end = math.loadable_tokens(request, found, runs_at_once=True)
        blocks = -(-end // math.tokens) - computed // math.tokens
        lookup.at_once = self._at_once.fits(blocks)
        if lookup.at_once:
            return max(0, end - computed)
        if computed and self._at_once.has_begun:
            # It may stand on blocks that are loaded at once. If that fails, vLLM takes back the
            # requests that run in this step, and of those that wait for a load not all.
            return None
        return max(0, math.loadable_tokens(request, found, runs_at_once=False) - computed)

    def runs_at_once(self, request: Request) -> bool:
        """Whether *request*, as of the last answer, runs in the step that loads it."""
        lookup = self._lookups.get(request.request_id)
        return lookup is not None and lookup.at_once

    def not_found(self, request: Request) -> list[BlockKey]:
        """The blocks that the server was asked for and does not have (any more)."""
        lookup = self._lookups.get(request.request_id)
        if lookup is None or lookup.status is None or lookup.connection != self._link.number:
            return []
        return lookup.keys[lookup.status.matched_blocks :]

    def plan(
        self, request: Request, block_ids: Callable[[], BlockIds], tokens: int
    ) -> list[BlockKey]:
        """vLLM takes *tokens* of the last answer into *block_ids*; the keys that this loads."""
        lookup = self._pop(request.request_id)
        if lookup is None:
            return []
        if self._spans is not None:
            self._spans.looked_up(request, lookup.pending)
        if tokens == 0 or lookup.status is None or lookup.connection != self._link.number:
            self._link.abandon(lookup.pending, lookup.connection)
            return []
        math, status = self._math, lookup.status
        start = lookup.computed_tokens
        skipped = start // math.tokens - lookup.first_block
        end = -(-(start + tokens) // math.tokens) - lookup.first_block
        states = len(math.recurrent)  # whose slots come behind those of the blocks
        load = Load(
            request.request_id,
            status.task_id,
            math.device_blocks_of_load(block_ids(), start, start + tokens),
            status.slots[skipped : end + states],
            status.generations[skipped : end + states],
            at_once=lookup.at_once,
        )
        self._planned.append(load)
        if lookup.at_once:
            self._at_once.take(len(load.slots))
        self._link.tell(p.Launch([status.task_id]))
        keys = lookup.keys[skipped:end]
        self._loading_blocks += len(keys)
        self._running[status.task_id] = _RunningLoad(
            request.request_id,
            lookup.connection,
            keys,
            self._all_workers,
            self._spans.origin(request) if self._spans is not None else None,
            lowest_tier(status),
        )
        _log.debug(
            "request %s: loading %d tokens, %d blocks, lowest tier %s, task %d",
            request.request_id,
            tokens,
            len(keys),
            lowest_tier(status),
            status.task_id,
        )
        remote = min(tokens, status.remote_blocks * math.tokens)
        disk = min(tokens - remote, status.disk_blocks * math.tokens)
        sources = {
            CacheHitSource.EXTERNAL_UNSPECIFIED: remote,
            CacheHitSource.DISK: disk,
            CacheHitSource.HOST: tokens - remote - disk,
        }
        self._sources[request.request_id] = {s: n for s, n in sources.items() if n}
        return keys

    def may_ask(self, blocks: int) -> bool:
        """Whether to ask now for *blocks* of a request whose turn has come. vLLM goes on to the next in
        line while one waits for its answer, so what they and loads keep has a bound, behind the first.
        """
        is_first, self._is_first = self._is_first, False
        return is_first or self.ahead.fits(self._loading_blocks + blocks, AT_ITS_TURN)

    def waits(self) -> None:
        """A request whose turn has come waits for what it asked for: those behind keep to the bound."""
        self._is_first = False

    def take_plans(self) -> list[Load]:
        """The loads of the step that is scheduled now."""
        self._is_first = True
        if not self._planned:
            return []
        self._at_once.end_step()
        planned, self._planned = self._planned, []
        return planned

    def add_source(self, request: Request, source: CacheHitSource, tokens: int) -> None:
        """*tokens* more of *request*, beyond the load just planned, come from *source*."""
        sources = self._sources.setdefault(request.request_id, {})
        sources[source] = sources.get(source, 0) + tokens

    def take_sources(self, request_id: str) -> dict[CacheHitSource, int]:
        """The tiers that the tokens just promised to vLLM come from."""
        return self._sources.pop(request_id, {})

    def ended(self, report: WorkerReport) -> list[BlockKey]:
        """Workers report; returns the keys that the server may have lost."""
        lost: list[BlockKey] = []
        for task_id, workers in report.load_done.items():
            load = self._running.get(task_id)
            if load is None:
                continue
            load.workers_left &= ~workers
            load.failed = load.failed or task_id in report.load_failed
            load.given_up = load.given_up or task_id in report.load_given_up
            if load.workers_left:
                continue
            del self._running[task_id]
            self._loading_blocks -= len(load.keys)
            is_miss = load.failed or load.given_up
            if self._spans is not None and load.origin is not None:
                self._spans.loaded(
                    load.origin, load.began_at, load.tier, len(load.keys), failed=is_miss
                )
            if load.failed:
                lost += load.keys
            if is_miss and load.request_id is not None:
                self._refused.add(load.request_id)
            if load.connection == self._link.number:
                self._tell_end(task_id, load)
        return lost

    def _tell_end(self, task_id: int, load: _RunningLoad) -> None:
        """No worker reads the slots any more."""
        if load.failed:
            self._link.tell(p.Fail([task_id]))
            return
        if load.given_up:  # nothing was loaded, and nothing is wrong with the blocks
            self._link.tell(p.Cancel([task_id]))
        self._link.tell(p.Complete([task_id]))

    def is_loading(self, request_id: str) -> bool:
        """Whether workers are still to fill, or have failed to fill, blocks of the request."""
        return any(load.request_id == request_id for load in self._running.values())

    def finished(self, request_id: str) -> None:
        """The request is over; a load of it that still runs is ended by the workers."""
        self._drop(request_id)
        self._awaits.finished(request_id)
        self._refused.discard(request_id)
        self._sources.pop(request_id, None)
        for load in self._running.values():
            if load.request_id == request_id:
                load.request_id = None

    def reset(self) -> None:
        """Answers of before do not count."""
        for request_id in list(self._lookups):
            self._drop(request_id)

    def _has_its_turn(self, request: Request, computed: int) -> bool:
        blocks = self._missing_blocks(request, computed)
        return blocks <= 0 or self.may_ask(blocks)

    def _missing_blocks(self, request: Request, computed: int) -> int:
        return self._findable_blocks(request) - computed // self._math.tokens

    def _findable_blocks(self, request: Request) -> int:
        return self._math.findable_blocks(request, self._taints.exact_blocks(request))

    def _may_load(self, request: Request) -> bool:
        return request.request_id not in self._refused and not request.skip_reading_prefix_cache

    def _is_answered(self, request_id: str) -> bool:
        """Whether the server, however slow it is now, has said of the request all that it will."""
        lookup = self._lookups.get(request_id)
        if lookup is None or lookup.status is None or lookup.connection != self._link.number:
            return False
        return self._link.connected and lookup.status.state not in UNSETTLED

    def _fresh_lookup(
        self, request: Request, namespace: NamespaceId, computed: int
    ) -> _Lookup | None:
        lookup = self._lookups.get(request.request_id)
        once_more = lookup is not None and lookup.may_find_more and self._link.ready
        if (
            lookup is None
            or once_more
            or lookup.connection != self._link.number
            or lookup.first_block * self._math.tokens > computed
            or lookup.known_blocks != self._findable_blocks(request)
            or lookup.age_seconds > STALE_SECONDS + self._config.load_timeout_seconds
        ):
            self._drop(request.request_id)
            self._ask(request, namespace, computed, is_second=once_more)
        return self._lookups.get(request.request_id)

    def _ask(
        self, request: Request, namespace: NamespaceId, computed: int, *, is_second: bool = False
    ) -> None:
        first = computed // self._math.tokens
        known = self._findable_blocks(request)
        if not self._link.ready or first >= known or known * self._math.tokens <= computed:
            return
        keys = self._math.keys(request, first, known)
        pending = self._link.submit(
            p.GetMatch(
                0,
                namespace,
                b"".join(keys),
                request.request_id[-256:],
                len(self._math.recurrent),
            )
        )
        if pending is not None:
            self._lookups[request.request_id] = _Lookup(
                pending, self._link.number, first, known, keys, is_second
            )
            self.ahead.take(pending, len(keys))

    def _settled(self, lookup: _Lookup) -> bool:
        """Whether there is an answer to act on: a full one, or the best that came in time."""
        if lookup.pending.reply is None:
            if lookup.age_seconds <= self._config.lookup_timeout_seconds:
                return False
            self._link.too_slow()
            return True
        status = lookup.status
        if status is None or status.state not in UNSETTLED:
            return True
        searching = status.state is TaskState.SEARCHING
        patience_seconds = (
            self._config.remote_lookup_seconds if searching else self._config.load_timeout_seconds
        )
        return lookup.age_seconds > patience_seconds

    def _drop(self, request_id: str) -> None:
        lookup = self._pop(request_id)
        if lookup is not None:
            self._link.abandon(lookup.pending, lookup.connection)

    def _pop(self, request_id: str) -> _Lookup | None:
        """The lookup of the request, which is over."""
        lookup = self._lookups.pop(request_id, None)
        if lookup is not None:
            self.ahead.give_back(lookup.pending)
        return lookup

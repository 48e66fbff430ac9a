"""Saves: which blocks are complete, which of them the cache lacks, and copying those out."""

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from kvstrata.core.config import Config
from kvstrata.core.keys import as_key_array, state_keys
from kvstrata.core.types import BlockKey, NamespaceId
from kvstrata.integration.vllm.blocks import BlockIds, BlockMath, HeldBlocks
from kvstrata.integration.vllm.link import CacheLink
from kvstrata.integration.vllm.metadata import Save, all_workers
from kvstrata.integration.vllm.spans import Origin, RequestSpans
from kvstrata.manager.tasks import TaskState
from kvstrata.server import protocol as p
from kvstrata.server.client import Pending

_KNOWN_KEYS: Final = 65536


class _State(NamedTuple):
    """A state that is being saved: a key and a device block for each recurrent group."""

    name: bytes  # among what the server is known to have
    groups: list[int]


@dataclass(slots=True)
class _Offer:
    """Blocks that the server has been asked to reserve slots for; their device blocks are held."""

    pending: Pending
    connection: int
    keys: list[BlockKey]
    blocks: list[KVCacheBlock]  # ratio of them a key
    origin: Origin | None  # if spans are wanted
    state: _State | None = None  # if it is one

    @property
    def names(self) -> list[BlockKey]:
        """What is known once it is saved."""
        return self.keys if self.state is None else [self.state.name]


@dataclass(slots=True)
class _RunningSave:
    """Blocks that the workers are copying."""

    connection: int
    keys: list[BlockKey]
    blocks: list[KVCacheBlock]  # empty once given up
    workers_left: int  # as bits
    deadline: float
    whole_blocks: int  # leading ones that no worker has failed to copy
    offered_at: float
    origin: Origin | None
    names: list[BlockKey]  # what is known once it is saved: the keys, or the name of a state
    void: bool = False  # of before a reset: must not become visible


def name_of_state(key: BlockKey) -> bytes:
    """What the states behind the block of *key*, of all groups, are known by."""
    return key + b"state"


class Saves:
    """Saves blocks as they are completed, not at the end of the request.

    A block is offered in the step whose forward completes it, or later, and is copied in a later
    step than it was offered, so the copy always finds it written. From the offer until the copy
    has ended its device blocks are held, whatever becomes of the request. A block of which a device
    block is gone, since it is out of reach of what follows, is not saved.
    """

    def __init__(
        self,
        config: Config,
        math: BlockMath,
        link: CacheLink,
        held: HeldBlocks,
        *,
        world_size: int,
        spans: RequestSpans | None = None,
    ) -> None:
        self._config = config
        self._spans = spans
        self._math = math
        self._link = link
        self._held = held
        self._all_workers = all_workers(world_size)
        self._offers: list[_Offer] = []
        self._running: dict[int, _RunningSave] = {}
        self._known: OrderedDict[BlockKey, None] = OrderedDict()  # keys the server has, newest last
        self._known_to = 0  # the connection that they belong to

    @property
    def busy(self) -> bool:
        """Whether device blocks are held: the engine must go on stepping for us to let them go."""
        return self._held.count > 0

    @property
    def is_open(self) -> bool:
        """Whether a block may be offered now."""
        return self._link.ready and self._room >= self._math.ratio

    @property
    def _room(self) -> int:
        """For blocks: what a state needs, which gets it once, and now, is left out."""
        return self._held.room - len(self._math.recurrent)

    @property
    def frees_blocks(self) -> bool:
        """Whether the end of a save frees a device block: nobody else has it any more."""
        saves: list[_Offer | _RunningSave] = [*self._offers, *self._running.values()]
        return any(block.ref_cnt == 1 for save in saves for block in save.blocks)

    def under_way(self) -> set[BlockKey]:
        """The blocks that the server has been offered, and cannot give yet."""
        offered = (offer.keys for offer in self._offers)
        copied = (save.keys for save in self._running.values())
        return set[BlockKey]().union(*offered, *copied)

    def offer(
        self,
        request: Request,
        namespace: NamespaceId,
        block_ids: BlockIds,
        first: int,
        end: int,
        *,
        begins: bool = False,
    ) -> int:
        """Offer blocks *first* to *end* of *request*, as many as may be held now.

        Returns where the next offer of this request has to begin.

        Args:
            begins: Nothing before block *first* is ever saved under the names that the request has.
        """
        math = self._math
        while first < end and (
            self._knows(math.key(request, first)) or not math.has_all(block_ids, first)
        ):
            first += 1
        end = min(end, first + max(0, self._room) // math.ratio)
        if first >= end or not self._link.ready:
            return first
        keys = math.keys(request, first, end)
        parent = math.key(request, first - 1) if first and not begins else b""
        name, whole = request.request_id[-256:], request.num_prompt_tokens // math.tokens
        pending = self._link.tell(p.PutMatch(0, namespace, b"".join(keys), parent, name, whole))
        if pending is None:
            return first
        held = self._held.hold(math.device_blocks(block_ids, first, end))
        origin = self._spans.origin(request) if self._spans is not None else None
        self._offers.append(_Offer(pending, self._link.number, keys, held, origin))
        return end

    def offer_state(
        self,
        request: Request,
        namespace: NamespaceId,
        blocks: int,
        device_blocks: Mapping[int, int],
    ) -> None:
        """Offer the state of *request* after its first *blocks*, if it may be held now.

        *device_blocks*: by recurrent group, to be copied in a later step.
        """
        math = self._math
        key = math.key(request, blocks - 1)
        name = name_of_state(key)
        if self._knows(name) or self._held.room < len(device_blocks) or not self._link.ready:
            return
        groups = sorted(device_blocks)
        keys = as_key_array([key])
        states = [state_keys(keys, number).tobytes() for number in range(len(groups))]
        pending = self._link.tell(
            p.PutMatch(0, namespace, b"".join(states), key, request.request_id[-256:], blocks)
        )
        if pending is None:
            return
        held = self._held.hold([device_blocks[group] for group in groups])
        origin = self._spans.origin(request) if self._spans is not None else None
        state = _State(name, groups)
        self._offers.append(_Offer(pending, self._link.number, states, held, origin, state))

    def take_plans(self) -> list[Save]:
        """Copies for the workers to do in this step: of the offers that have been answered."""
        if not self._offers and not self._running:
            return []
        self._give_up()
        plans: list[Save] = []
        waiting = []
        for offer in self._offers:
            if offer.connection != self._link.number:
                self._held.release(offer.blocks)
            elif offer.pending.reply is None:
                waiting.append(offer)
            else:
                plans.extend(self._plan(offer))
        self._offers = waiting
        if plans:
            self._link.tell(p.Launch([save.task_id for save in plans]))
        return plans

    def ended(self, done: dict[int, int], failed: dict[int, int]) -> list[BlockKey]:
        """Workers report: *done* task id → bits of workers, *failed* → blocks that are whole.

        Returns the last block of each save that the server can count on now.
        """
        saved, whole = [], []
        for task_id, workers in done.items():
            save = self._running.get(task_id)
            if save is None:
                continue
            save.workers_left &= ~workers
            save.whole_blocks = min(save.whole_blocks, failed.get(task_id, save.whole_blocks))
            if save.workers_left:
                continue
            del self._running[task_id]
            self._held.release(save.blocks)
            self._link.write_ended(task_id)
            if self._spans is not None and save.origin is not None:
                is_short = save.void or save.whole_blocks < len(save.keys)
                self._spans.saved(save.origin, save.offered_at, len(save.keys), failed=is_short)
            is_void = save.void or save.connection != self._link.number
            if is_void or not save.whole_blocks:
                self._link.tell(p.Fail([task_id]))
                continue
            if save.whole_blocks < len(save.keys):
                self._link.tell(p.CompletePart(task_id, save.whole_blocks))
            else:
                whole.append(task_id)
            if save.names is save.keys or save.whole_blocks == len(save.keys):
                self.know(save.names[: save.whole_blocks])
            saved.append(save.keys[save.whole_blocks - 1])
        if whole:
            self._link.tell(p.Complete(whole))
        return saved

    def know(self, keys: Iterable[BlockKey]) -> None:
        """The server has these: they need not be offered."""
        if self._known_to != self._link.number:
            self._known.clear()
            self._known_to = self._link.number
        for key in keys:
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > _KNOWN_KEYS:
            self._known.popitem(last=False)

    def doubt(self, keys: Iterable[BlockKey]) -> None:
        """The server may have lost these, and the states behind them: they are offered again when
        they are computed.
        """
        has_states = bool(self._math.recurrent)
        for key in keys:
            self._known.pop(key, None)
            if has_states:
                self._known.pop(name_of_state(key), None)

    def withdraw_offers(self) -> None:
        """What is offered and not being copied yet is not to be saved."""
        for offer in self._offers:
            self._link.abandon(offer.pending, offer.connection)
            self._held.release(offer.blocks)
        self._offers.clear()

    def reset(self) -> None:
        """What was offered or copied before this must not become visible."""
        self.withdraw_offers()
        self._known.clear()
        for save in self._running.values():
            save.void = True

    def _knows(self, key: BlockKey) -> bool:
        return key in self._known and self._known_to == self._link.number

    def _plan(self, offer: _Offer) -> list[Save]:
        """The copies of an answered offer; what needs none is let go."""
        status, state = offer.pending.status, offer.state
        ratio = self._math.ratio if state is None else 1
        missing = set(status.missing) if status is not None else set()
        groups = [offer.blocks[i * ratio : (i + 1) * ratio] for i in range(len(offer.keys))]
        spare = [b for i, group in enumerate(groups) if i not in missing for b in group]
        self._held.release(spare)
        if status is None or not status.task_id:
            if status is not None and status.state is TaskState.DONE:
                self.know(offer.names)
            return []
        blocks = [b for i in status.missing for b in groups[i]]
        if not self._link.write_begins(status.task_id):
            self._held.release(blocks)
            return []
        keys = [offer.keys[i] for i in status.missing]
        self._running[status.task_id] = _RunningSave(
            offer.connection,
            keys,
            blocks,
            self._all_workers,
            time.monotonic() + self._config.save_timeout_seconds,
            len(status.missing),
            offer.pending.sent_at,
            offer.origin,
            keys if state is None else offer.names,
        )
        ids = [block.block_id for block in blocks]
        if state is None:
            laid_out = self._math.laid_out(ids)
        else:
            missing_groups = [state.groups[i] for i in status.missing]
            laid_out = self._math.laid_out_states(dict(zip(missing_groups, ids, strict=True)))
        return [Save(status.task_id, laid_out, status.slots, status.generations)]

    def _give_up(self) -> None:
        """Let go of device blocks whose offer is not answered, or whose copy does not end, in time.

        A copy that was given up may still read device blocks that now change: it never counts.
        """
        now = time.monotonic()
        overdue = [
            offer
            for offer in self._offers
            if offer.pending.reply is None
            and now - offer.pending.sent_at > self._config.lookup_timeout_seconds
        ]
        for offer in overdue:
            self._link.too_slow()
            self._link.abandon(offer.pending, offer.connection)
            self._held.release(offer.blocks)
            self._offers.remove(offer)
        for save in self._running.values():
            if save.blocks and now > save.deadline:
                self._held.release(save.blocks)
                save.blocks, save.void = [], True

"""A forward whose KV is a function of the tokens, and which reads what it builds on.

It writes into every page what only the right tokens in the right order give, and before
it writes it checks all that it would read. So a page that was loaded wrongly, saved before it was
computed, saved from a rejected draft, or given to two requests, is found in the step that uses it.
"""

import hashlib
import itertools
import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvstrata.integration.vllm.metadata import NULL_BLOCK, Load, StepPlan
from kvstrata.integration.vllm.worker import WorkerHalf

DEVICE_TOKENS = 4
TOKENS = 8  # of a block of ours
LAYERS = 4
WRONG_TOKEN = 777_777
SLOT_BYTES = 128  # of one token in one layer's page
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


# -- what the forward would compute --------------------------------------------------------------


Context = tuple[tuple[int, bytes], ...]  # at which position what else goes into the KV


def digests(tokens: list[int], context: Context = ()) -> list[bytes]:
    """For each position 64 bytes that name all tokens, and of *context* all, up to it."""
    others = dict(context)
    chain, last = [], b""
    for position, token in enumerate(tokens):
        last = _digest(last, token, others.get(position, b""))
        chain.append(last)
    return chain


def continuation(prompt: list[int], count: int, context: Context = ()) -> list[int]:
    tokens: list[int] = []
    last = digests(prompt, context)[-1]
    for _ in range(count):
        tokens.append(last[0] % 50 + 1000)
        last = _digest(last, tokens[-1], b"")
    return tokens


def _digest(last: bytes, token: int, other: bytes) -> bytes:
    return hashlib.blake2b(last + token.to_bytes(8, "little", signed=True) + other).digest()


def row(digest: bytes, layer: int, rank: int = 0) -> Bytes:
    named = np.uint8(layer + 64 * rank)
    return np.frombuffer(digest * (SLOT_BYTES // 64), dtype=np.uint8) ^ named


def state_row(digest: bytes, layer: int, rank: int = 0) -> Bytes:
    """The state of a layer after the token of *digest*: as much as the KV of a block of ours."""
    return np.tile(row(digest, layer, rank), TOKENS)


@dataclass
class Running:
    """A request as a worker sees it."""

    tokens: list[int]  # known: prompt, and what was sampled
    blocks: list[list[int]]  # of each KV cache group
    computed: int  # leading positions whose pages are right


@dataclass
class Forward:
    """A request in one step: its positions from *start* on are computed."""

    request: Running
    start: int
    chain: list[bytes]  # of each position what must be in its pages
    sampled: list[int]
    wrong: list[str] = field(default_factory=list)  # of what it has read


class Where(NamedTuple):
    """A page: the layer's number among all, and who holds this share of it."""

    group: int
    layer: int
    rank: int


@dataclass
class Rank:
    """A worker: our half of it, and its pages of each group and layer."""

    half: WorkerHalf
    pages: list[list[Bytes]]


class FakeRunner:
    """Executes steps in order, as an executor would whose model runners have our worker half (vLLM
    ``KVConnectorModelRunnerMixin``, ``KVOutputAggregator``).

    Every rank computes its share of each layer. A group reads what its layers can reach, and
    nothing else.
    """

    def __init__(self, ranks: list[Rank], seed: int) -> None:
        self.ranks = ranks
        self.half = ranks[0].half
        self.groups = self.half.geometry.groups
        self._aggregator = KVOutputAggregator(len(ranks))
        self.rng = random.Random(seed)
        self.running: dict[str, Running] = {}
        self.loaded_tokens: dict[str, int] = {}
        self.contexts: dict[str, Context] = {}

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.take_news(output)
        for copy in output.kv_cache_block_copies or ():
            for page in itertools.chain(*(pages for rank in self.ranks for pages in rank.pages)):
                page[copy.dst_block_id] = page[copy.src_block_id]
        plan: Any = output.kv_connector_metadata
        for load in plan.loads:
            self.loaded_tokens[load.request_id] = self.most_loaded(load)
        if output.has_sync_kv_loads:
            self.start_loads(plan)
        forwards = [
            self.forward(self.running[request_id], count, output, request_id)
            for request_id, count in output.num_scheduled_tokens.items()
        ]
        self.run_layers(forwards, plan)
        if not output.has_sync_kv_loads:
            self.start_loads(plan)
        ended = [self.end_step(rank.half, plan) for rank in self.ranks]
        invalid = set[int]().union(*(each.invalid_block_ids for each in ended))
        sampled = [self.sample(each, invalid) for each in forwards]
        ids = list(output.num_scheduled_tokens)
        results: list[ModelRunnerOutput | None] = [
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=None,
                kv_connector_output=each,
            )
            for each in ended
        ]
        result: ModelRunnerOutput = self._aggregator.aggregate(results)
        return result

    def take_news(self, output: SchedulerOutput) -> None:
        """Which requests there are, what they have, and how far they are."""
        for request_id in output.finished_req_ids:
            self.running.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            assert new.prompt_token_ids is not None
            self.running[new.req_id] = Running(
                list(new.prompt_token_ids),
                [list(ids) for ids in new.block_ids],
                new.num_computed_tokens,
            )
        cached = output.scheduled_cached_reqs
        for request_id, new_blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            added = [list(ids) for ids in new_blocks or [[]] * len(self.groups)]
            request = self.running[request_id]
            if request_id in cached.resumed_req_ids:
                request.tokens = list(cached.all_token_ids[request_id])
                request.blocks, request.computed = added, computed
            else:
                for blocks, new_ones in zip(request.blocks, added, strict=True):
                    blocks.extend(new_ones)
                request.computed = min(request.computed, computed)  # less where a load has failed

    def start_loads(self, plan: StepPlan) -> None:
        for rank in self.ranks:
            rank.half.start_load(plan)

    def end_step(self, half: WorkerHalf, plan: StepPlan) -> KVConnectorOutput:
        half.start_save(plan)
        received, failed = half.collect()
        return KVConnectorOutput(
            finished_recving=received,
            failed_recving=failed,
            invalid_block_ids=half.take_invalid_blocks(),
            kv_connector_worker_meta=half.report(),
        )

    def forward(
        self, request: Running, count: int, output: SchedulerOutput, request_id: str
    ) -> "Forward":
        """What the forward of *request* computes from right pages."""
        drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        start, end = request.computed, request.computed + count
        known = len(request.tokens)
        assert end - known in {drafts, 0} or end < known
        context = self.contexts.get(request_id, ())
        truth = request.tokens + continuation(request.tokens, drafts + 1, context)
        wrong_from = known + self.rng.randint(0, drafts)  # drafts from here on are wrong
        inputs = [t if i < wrong_from else t + 5000 for i, t in enumerate(truth)][:end]
        accepted = min(wrong_from, end) - known
        new = truth[known : known + accepted + 1] if end >= known else []
        return Forward(request, start, digests(inputs, context), new)

    def go_on(self, forward: "Forward", page: Bytes, where: Where) -> None:
        """A recurrent layer: take the state before the step, leave that behind it."""
        start, end = forward.start, len(forward.chain)
        if start and not np.array_equal(
            self.state(forward, where.group, page, start),
            state_row(forward.chain[start - 1], where.layer, where.rank),
        ):
            forward.wrong.append(f"the state at {start}, {where}, is another")
        right = state_row(forward.chain[end - 1], where.layer, where.rank)
        self.state(forward, where.group, page, end)[:] = 0xDD if forward.wrong else right

    def state(self, forward: "Forward", group: int, page: Bytes, tokens: int) -> Bytes:
        """Where the state after *tokens* is."""
        block = (tokens - 1) // self.groups[group].block_size
        device_block = forward.request.blocks[group][block]
        assert device_block != NULL_BLOCK, f"group {group} has no state at {tokens}"
        state: Bytes = page[device_block]
        return state

    def run_layers(self, forwards: "list[Forward]", plan: StepPlan) -> None:
        """Layer by layer; what is computed is written before the connector is asked to wait."""
        number = 0
        for group, geometry in enumerate(self.groups):
            for index, layer in enumerate(geometry.layers):
                for number_of_rank, rank in enumerate(self.ranks):
                    page = rank.pages[group][index]
                    where = Where(group, number, number_of_rank)
                    for forward in forwards:
                        if geometry.is_recurrent:  # nothing is loaded in the step that computes
                            self.go_on(forward, page, where)
                        else:
                            self.write(forward, page, where)
                    rank.half.wait_for_layer(layer)
                    for forward in forwards:
                        if not geometry.is_recurrent:
                            self.read(forward, page, where)
                    rank.half.save_layer(plan, layer)
                number += 1

    def read(self, forward: "Forward", page: Bytes, where: Where) -> None:
        needed = self.groups[where.group].reach.first_needed(forward.start)
        for position in range(needed, forward.start):
            at = self.cell(forward, where.group, page, position)
            if not np.array_equal(at, row(forward.chain[position], where.layer, where.rank)):
                forward.wrong.append(
                    f"position {position} of {forward.start}, {where} holds other bytes"
                )

    def write(self, forward: "Forward", page: Bytes, where: Where) -> None:
        """What stands on wrong pages is wrong itself."""
        for position in range(forward.start, len(forward.chain)):
            at = self.cell(forward, where.group, page, position)
            right = row(forward.chain[position], where.layer, where.rank)
            at[:] = 0xDD if forward.wrong else right

    def cell(self, forward: "Forward", group: int, page: Bytes, position: int) -> Bytes:
        """The bytes of *position* in a layer of *group*."""
        block, slot = divmod(position, self.groups[group].block_size)
        device_block = forward.request.blocks[group][block]
        assert device_block != NULL_BLOCK, f"group {group} has no page of {position}"
        cell: Bytes = page[device_block, slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]
        return cell

    def sample(self, forward: "Forward", invalid: set[int]) -> list[int]:
        """The tokens sampled: none within a prompt, else one and the drafts that were right.

        Of a request that used *invalid* device blocks vLLM must drop whatever it is given.
        """
        request = forward.request
        used = request.blocks[0][: -(-forward.start // self.groups[0].block_size)]
        if not invalid.isdisjoint(used):
            return [WRONG_TOKEN] * len(forward.sampled)
        assert not forward.wrong, forward.wrong[0]
        known = len(request.tokens)
        request.tokens = request.tokens + forward.sampled
        request.computed = min(len(forward.chain), known + max(0, len(forward.sampled) - 1))
        return forward.sampled

    def fill(self, blocks: list[int], tokens: list[int]) -> None:
        """Write what the KV of *tokens* is into *blocks* of the first group, as a load would."""
        chain, size = digests(tokens), self.groups[0].block_size
        for layer, page in enumerate(self.ranks[0].pages[0]):
            for position in range(len(tokens)):
                block, slot = divmod(position, size)
                at = page[blocks[block], slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]
                at[:] = row(chain[position], layer)

    def soil(self, blocks: list[int] | slice = slice(None)) -> None:
        """Leave nothing of what was computed in any page of *blocks*."""
        for rank in self.ranks:
            for pages in rank.pages:
                for page in pages:
                    page[blocks] = 0xEE

    def most_loaded(self, load: Load) -> int:
        """Tokens that *load* brings into the group that takes most."""
        per_slot = len(load.device_blocks) // len(load.slots)
        loaded, start = [], 0
        for geometry in self.groups:
            end = start + geometry.device_blocks(TOKENS)
            ids = [
                id
                for slot in range(len(load.slots))
                for id in load.device_blocks[slot * per_slot + start : slot * per_slot + end]
            ]
            if not geometry.is_recurrent:
                loaded.append(sum(id != NULL_BLOCK for id in ids) * geometry.block_size)
            start = end
        return max(loaded)

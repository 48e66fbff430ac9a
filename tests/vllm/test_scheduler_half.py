"""vLLM's own schedulers with the connector, a real server, real copies and a fake forward.

The forward writes into every page what only the right tokens in the right order give, and before
it writes it checks all that it would read. So a page that was loaded wrongly, saved before it was
computed, saved from a rejected draft, or given to two requests, is found in the step that uses it.
"""

import contextlib
import hashlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.caches import PATIENCE_SECONDS, eventually, host_slot, known
from tests.server.harness import serving
from tests.vllm.plans import full, group, model_folder, plan, tensors
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError, ServerUnavailable
from kvstrata.core.load import load_config
from kvstrata.integration.vllm import worker as worker_module
from kvstrata.integration.vllm.geometry import pages_from_tensors
from kvstrata.integration.vllm.scheduler import SchedulerHalf
from kvstrata.integration.vllm.setup import EngineIdentity
from kvstrata.integration.vllm.worker import WorkerHalf, WorkerSettings
from kvstrata.manager.manager import KVManager
from kvstrata.manager.tasks import TaskState
from kvstrata.server.attach import Attachment
from kvstrata.server.server import Server
from kvstrata.storage.mapping import HostMapping

DEVICE_TOKENS = 4
TOKENS = 8  # of a block of ours
LAYERS = 4
SLOT_BYTES = 128  # of one token in one layer's page
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


# -- what the forward would compute --------------------------------------------------------------


def digests(tokens: list[int]) -> list[bytes]:
    """For each position 64 bytes that name all tokens up to it."""
    chain, last = [], b""
    for token in tokens:
        last = hashlib.blake2b(last + token.to_bytes(8, "little", signed=True)).digest()
        chain.append(last)
    return chain


def next_token(tokens: list[int]) -> int:
    return digests(tokens)[-1][0] % 50 + 1000


def continuation(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def row(digest: bytes, layer: int) -> Bytes:
    return np.frombuffer(digest * (SLOT_BYTES // 64), dtype=np.uint8) ^ np.uint8(layer)


@dataclass
class Running:
    """A request as a worker sees it."""

    tokens: list[int]  # known: prompt, and what was sampled
    blocks: list[int]
    computed: int  # leading positions whose pages are right


class FakeRunner:
    """Executes steps in order, as a model runner with our worker half would."""

    def __init__(self, half: WorkerHalf, pages: list[Bytes], seed: int) -> None:
        self.half = half
        self.pages = pages
        self.rng = random.Random(seed)
        self.running: dict[str, Running] = {}
        self.loaded_tokens: dict[str, int] = {}

    def execute(self, output: SchedulerOutput, scheduler: Scheduler) -> ModelRunnerOutput:
        for request_id in output.finished_req_ids:
            self.running.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            assert new.prompt_token_ids is not None
            self.running[new.req_id] = Running(
                list(new.prompt_token_ids), list(new.block_ids[0]), new.num_computed_tokens
            )
        cached = output.scheduled_cached_reqs
        for request_id, new_blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            added = list(new_blocks[0]) if new_blocks else []
            request = self.running[request_id]
            if request_id in cached.resumed_req_ids:
                request.tokens = list(scheduler.requests[request_id].all_token_ids)
                request.blocks, request.computed = added, computed
            else:
                request.blocks += added
        sampled = [
            self.forward(self.running[request_id], count, output, request_id)
            for request_id, count in output.num_scheduled_tokens.items()
        ]
        plan: Any = output.kv_connector_metadata
        for load in plan.loads:
            self.loaded_tokens[load.request_id] = len(load.device_blocks) * DEVICE_TOKENS
        self.half.start_load(plan)
        self.half.start_save(plan)
        received, failed = self.half.collect()
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=KVConnectorOutput(
                finished_recving=received,
                failed_recving=failed,
                kv_connector_worker_meta=self.half.report(),
            ),
        )

    def forward(
        self, request: Running, count: int, output: SchedulerOutput, request_id: str
    ) -> list[int]:
        """The tokens sampled: none within a prompt, else one and the drafts that were right."""
        drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        start, end = request.computed, request.computed + count
        known = len(request.tokens)
        assert end - known in {drafts, 0} or end < known
        truth = request.tokens + continuation(request.tokens, drafts + 1)
        wrong_from = known + self.rng.randint(0, drafts)  # drafts from here on are wrong
        inputs = [t if i < wrong_from else t + 5000 for i, t in enumerate(truth)][:end]
        chain = digests(inputs)
        self.read(request.blocks, chain[:start])
        for position in range(start, end):
            block, slot = divmod(position, DEVICE_TOKENS)
            for layer, page in enumerate(self.pages):
                at = page[request.blocks[block]][slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]
                at[:] = row(chain[position], layer)
        if end < known:
            request.computed = end
            return []
        accepted = min(wrong_from, end) - known
        new = truth[known : known + accepted + 1]
        request.tokens = request.tokens + new
        request.computed = known + accepted
        return new

    def read(self, blocks: list[int], chain: list[bytes]) -> None:
        for position, digest in enumerate(chain):
            block, slot = divmod(position, DEVICE_TOKENS)
            for layer, page in enumerate(self.pages):
                found = page[blocks[block]][slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]
                assert np.array_equal(found, row(digest, layer)), (
                    f"position {position} of {len(chain)}, layer {layer} holds other bytes"
                )


# -- an engine without a model -------------------------------------------------------------------


@dataclass
class Frontier:
    """How far a step offered a request's blocks, and how far a naive sum would have gone."""

    offered_tokens: int
    naive_tokens: int
    known_tokens: int


class Engine:
    def __init__(
        self,
        folder: Path,
        socket: Path,
        *,
        asynchronous: bool = False,
        drafts: int = 0,
        num_blocks: int = 200,
        **extra: Any,
    ) -> None:
        self.asynchronous = asynchronous
        self.drafts = drafts
        settings = {
            "server": "attached",
            "socket": str(socket),
            "tokens_per_block": TOKENS,
            "weights_fingerprint": "none",
            "lookup_timeout_seconds": PATIENCE_SECONDS,
            "lookup_wait_seconds": 1.0,
            "load_timeout_seconds": PATIENCE_SECONDS,
            "save_timeout_seconds": PATIENCE_SECONDS,
            "reconnect_seconds": 0.01,
            "prefault": False,
        } | extra
        config = self._vllm_config(folder, settings)
        planned = plan(
            config, group(full(block_size=DEVICE_TOKENS), layers=LAYERS), num_blocks=num_blocks
        )
        config.cache_config.num_gpu_blocks = num_blocks
        config.cache_config.block_size = DEVICE_TOKENS
        caches = tensors(planned)
        worker = WorkerHalf(
            WorkerSettings(0, 1, TOKENS, load_timeout_seconds=PATIENCE_SECONDS), config, planned
        )
        worker.register_kv_caches(caches)
        pages = [p.numpy() for p in pages_from_tensors(caches, worker.geometry, planned)]
        for page in pages:
            page[:] = 0xEE
        self.runner = FakeRunner(worker, pages, seed=7)
        identity = EngineIdentity.of(load_config(settings), config, planned)
        self.block_bytes = identity.block_bytes

        def mapped(mapping: HostMapping | None) -> None:
            worker.mapping = mapping

        self.attachment = Attachment(
            identity.socket,
            identity.hello("worker", rank=0),
            mapped,
            patience_seconds=60.0,
            prefault=False,
        )
        kind = AsyncScheduler if asynchronous else Scheduler
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=planned,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
            block_size=DEVICE_TOKENS,
            hash_block_size=DEVICE_TOKENS,
        )
        if drafts:
            self.scheduler.num_spec_tokens = drafts
            if asynchronous:
                self.scheduler._spec_token_placeholders = [-1] * drafts
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.all_free = self.pool.get_num_free_blocks()
        self.connector: Any = self.scheduler.connector
        self.half: SchedulerHalf = self.connector._scheduler
        self.in_flight: deque[SchedulerOutput] = deque()
        self.requests: dict[str, Request] = {}
        self.frontiers: list[Frontier] = []

    @staticmethod
    def _vllm_config(folder: Path, settings: dict[str, Any]) -> VllmConfig:
        return VllmConfig(
            model_config=ModelConfig(
                model=str(folder), skip_tokenizer_init=True, max_model_len=512
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=4,
                max_num_batched_tokens=32,
                max_model_len=512,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            cache_config=CacheConfig(block_size=32, enable_prefix_caching=True),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVStrataConnector",
                kv_connector_module_path="kvstrata.integration.vllm.connector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=settings,
            ),
        )

    def ready(self, manager: KVManager) -> None:
        """The server counts scheduler and worker."""

        def counted() -> bool:
            self.half._link.tick()
            return self.half._link.ready and any(
                each["workers"] == [0] for each in manager.stats().engines
            )

        eventually(counted, "scheduler and worker do not come")

    def add(
        self, name: str, prompt: list[int], tokens: int, transfer: dict[str, Any] | None = None
    ) -> Request:
        """*transfer*: the request's ``kv_transfer_params``."""
        extra = None if transfer is None else {"kv_transfer_params": transfer}
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, extra_args=extra)
        sampling.update_from_generation_config({}, 99_999)
        request = Request(
            name, prompt, sampling, None, block_hasher=get_request_block_hasher(4, sha256)
        )
        self.scheduler.add_request(request)
        self.requests[name] = request
        return request

    def step(self) -> None:
        output = self.scheduler.schedule()
        self.in_flight.append(output)
        if len(self.in_flight) > (1 if self.asynchronous else 0):
            self.finish_step()

    def finish_step(self) -> None:
        output = self.in_flight.popleft()
        result = self.runner.execute(output, self.scheduler)
        self.scheduler.update_from_output(output, result)
        if self.drafts and not self.asynchronous:
            ids = list(output.num_scheduled_tokens)
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(ids, [[0] * self.drafts for _ in ids])
            )

    def run(self) -> None:
        """Until all requests are done and all that was held for copies is let go."""

        def idle() -> bool:
            if not self.scheduler.has_requests() and not self.in_flight:
                return True
            if self.scheduler.has_requests():
                self.step()
            else:
                self.finish_step()
            return False

        eventually(idle, "the engine does not come to rest")

    def serve(self, name: str, prompt: list[int], tokens: int) -> int:
        """Answer *prompt* rightly; how many of its tokens were loaded."""
        request = self.add(name, prompt, tokens)
        self.run()
        assert list(request.output_token_ids) == continuation(prompt, tokens)
        return self.runner.loaded_tokens.get(name, 0)

    def forget_device(self) -> None:
        assert self.scheduler.reset_prefix_cache()

    def is_at_rest(self) -> bool:
        return self.pool.get_num_free_blocks() == self.all_free and not self.half.busy

    def holds_nothing(self, manager: KVManager) -> bool:
        """A task whose request was aborted before the answer came is cancelled at the next tick."""
        self.half._link.tick()
        return manager.stats().running_gets == 0

    def watch_frontiers(self) -> None:
        offer = self.half._offer_completed
        inner = self.half._offer
        scheduled: dict[str, int] = {}

        def offer_completed(output: SchedulerOutput) -> None:
            scheduled.update(output.num_scheduled_tokens)
            offer(output)
            scheduled.clear()

        def record(tracked: Any, computed_tokens: int, block_ids: Any) -> None:
            request = tracked.request
            count = scheduled.get(request.request_id)
            naive = computed_tokens if count is None else request.num_computed_tokens + count
            self.frontiers.append(Frontier(computed_tokens, naive, request.num_tokens))
            inner(tracked, computed_tokens, block_ids)

        self.half._offer_completed = offer_completed  # type: ignore[method-assign]  # a spy
        self.half._offer = record  # type: ignore[method-assign]  # a spy

    def close(self) -> None:
        while self.in_flight:
            self.finish_step()
        self.runner.half.shutdown()
        self.attachment.close()
        self.connector.shutdown()


@dataclass
class Bench:
    folder: Path
    server: Server
    engines: list[Engine] = field(default_factory=list)

    @property
    def manager(self) -> KVManager:
        assert self.server.manager is not None
        return self.server.manager

    def engine(self, **settings: Any) -> Engine:
        made = Engine(self.folder, self.server.path, **settings)
        self.engines.append(made)
        made.ready(self.manager)
        return made

    def nothing_is_leased(self) -> bool:
        """A late answer is given back by the engine that has it, when it looks."""
        for engine in self.engines:
            engine.half._link.tick()
        return set(known(self.manager).values()) <= {0}

    def hears(self) -> None:
        """The server hears how every load and save ended, which no engine waits for."""

        def all_is_heard() -> bool:
            report = self.manager.stats()
            return not report.running_gets and not report.running_puts

        eventually(all_is_heard, "a load or a save does not end")

    def counters(self) -> dict[str, int]:
        self.hears()
        return self.manager.counters.snapshot()

    def saved_keys(self) -> set[bytes]:
        self.hears()
        return set(known(self.manager))

    def check_saved_bytes(self, engine: Engine) -> int:
        """Every block in host memory that *engine*'s requests name; how many there are."""
        checked = set()
        for request in engine.requests.values():
            chain = digests(list(request.all_token_ids))
            for i in range(engine.half._math.known_blocks(request)):
                key = engine.half._namespace + engine.half._math.key(request, i)
                slot = host_slot(self.manager, key)
                if slot < 0 or key in checked:
                    continue
                assert (i + 1) * TOKENS <= len(chain)
                expected = [
                    row(chain[i * TOKENS + device * DEVICE_TOKENS + slot], layer)
                    for device in range(TOKENS // DEVICE_TOKENS)
                    for layer in range(LAYERS)
                    for slot in range(DEVICE_TOKENS)
                ]
                found = np.frombuffer(self.manager.view(slot), dtype=np.uint8)
                assert np.array_equal(found, np.concatenate(expected)), f"block {i} is wrong"
                checked.add(key)
        return len(checked)


def start(
    folder: Path, slots: int, *, shared: Path | None = None, block_format: str = "exact"
) -> contextlib.AbstractContextManager[Bench]:
    @contextlib.contextmanager
    def made() -> Iterator[Bench]:
        slot = TOKENS * LAYERS * SLOT_BYTES
        tiers = f"host:{slots * slot}" + (f" | shared:{shared}:64MiB" if shared else "")
        config = Config.model_validate(
            {"tiers": tiers, "prefault": False, "block_format": block_format}
        )
        block_bytes = slot if block_format == "exact" else None
        with serving(config, folder / "s", block_bytes=block_bytes) as server:
            bench = Bench(folder, server)
            try:
                yield bench
                for engine in bench.engines:
                    eventually(engine.is_at_rest, "device blocks are kept")
                    eventually(partial(engine.holds_nothing, bench.manager), "a lease is kept")
                eventually(bench.nothing_is_leased, "a lease is kept")
                bench.manager.check()
                assert bench.manager.stats().running_puts == 0
            finally:
                for engine in bench.engines:
                    engine.close()

    return made()


@pytest.fixture(scope="module", autouse=True)
def _hashes() -> None:
    init_none_hash(sha256)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path)


@pytest.fixture
def bench(folder: Path) -> Iterator[Bench]:
    with start(folder, 400) as made:
        yield made


MODES = pytest.mark.parametrize(
    ("asynchronous", "drafts"),
    [(False, 0), (True, 0), (False, 3), (True, 3)],
    ids=["sync", "async", "sync-drafts", "async-drafts"],
)


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(900), k=length)


# -- saving --------------------------------------------------------------------------------------


@MODES
def test_every_complete_block_is_saved_and_no_other(
    bench: Bench, asynchronous: bool, drafts: int
) -> None:
    """41 prompt tokens and 30 sampled: the KV of 70 exist, which are 8 blocks of 8."""
    engine = bench.engine(asynchronous=asynchronous, drafts=drafts)
    engine.watch_frontiers()
    engine.serve("a", prompt(1, 41), 30)
    keys = engine.half._math.keys(engine.requests["a"], 0, 8)
    expected = {engine.half._namespace + key for key in keys}
    assert bench.saved_keys() == expected
    assert bench.check_saved_bytes(engine) == 8
    assert all(f.offered_tokens <= f.known_tokens for f in engine.frontiers)


def test_naive_frontier_would_have_named_blocks_that_do_not_exist(bench: Bench) -> None:
    """The sum of computed and scheduled tokens crosses the end of a block before it is known."""
    engine = bench.engine(asynchronous=True, drafts=3)
    engine.watch_frontiers()
    engine.serve("a", prompt(1, 41), 60)
    too_far = [f for f in engine.frontiers if f.naive_tokens // TOKENS > f.known_tokens // TOKENS]
    assert len(too_far) > 3
    assert all(f.offered_tokens <= f.known_tokens for f in too_far)


def test_all_schedulers_save_the_same_blocks(folder: Path) -> None:
    found = []
    for asynchronous, drafts in [(False, 0), (True, 0), (False, 3), (True, 3)]:
        with start(folder, 400) as bench:
            engine = bench.engine(asynchronous=asynchronous, drafts=drafts)
            for i in range(4):
                engine.add(f"r{i}", prompt(i % 3, 50 + 7 * i), 21)
            engine.run()
            found.append(bench.saved_keys())
            assert bench.check_saved_bytes(engine) == len(found[-1])
    assert len(found[0]) > 25
    assert found[1:] == [found[0]] * 3


def test_second_request_of_a_prompt_saves_nothing_again(bench: Bench) -> None:
    engine = bench.engine()
    engine.serve("a", prompt(1, 64), 2)
    saved = bench.counters()["kvstrata_saved_blocks_total"]
    engine.serve("b", prompt(1, 64), 2)
    engine.forget_device()
    engine.serve("c", prompt(1, 64), 2)
    assert bench.counters()["kvstrata_saved_blocks_total"] == saved == 8


@MODES
def test_what_the_server_has_evicted_is_saved_again(
    folder: Path, asynchronous: bool, drafts: int
) -> None:
    """12 slots of host memory: two other prompts of 8 blocks drive the first one out."""
    with start(folder, 12) as bench:
        engine = bench.engine(asynchronous=asynchronous, drafts=drafts)
        for name, tokens in [("a", prompt(1, 64)), ("b", prompt(2, 64)), ("c", prompt(3, 64))]:
            engine.serve(name, tokens, 2)
        engine.forget_device()
        assert engine.serve("again", prompt(1, 64), 2) == 0
        engine.forget_device()
        assert engine.serve("and again", prompt(1, 64), 2) == 64


# -- loading -------------------------------------------------------------------------------------


@MODES
def test_loaded_pages_are_what_the_forward_had_written(
    bench: Bench, asynchronous: bool, drafts: int
) -> None:
    engine = bench.engine(asynchronous=asynchronous, drafts=drafts)
    engine.serve("a", prompt(1, 83), 5)
    engine.forget_device()
    for page in engine.runner.pages:
        page[:] = 0xEE
    assert engine.serve("b", prompt(1, 83), 5) == 80
    assert bench.counters()["kvstrata_loaded_blocks_total"] == 10


def test_another_engine_loads_what_the_first_has_saved(bench: Bench) -> None:
    first, second = bench.engine(), bench.engine(asynchronous=True)
    first.serve("a", prompt(1, 60), 30)
    assert second.serve("b", prompt(1, 60) + continuation(prompt(1, 60), 30), 4) == 88


def test_request_that_awaits_its_blocks_loads_them_when_they_come(bench: Bench) -> None:
    """The decode half of a pair: it is asked before the other engine has saved anything."""
    first, second = bench.engine(), bench.engine()
    second.add("b", prompt(1, 64), 4, {"kvstrata_wait_seconds": PATIENCE_SECONDS})
    for _ in range(20):
        second.step()
    assert second.requests["b"].num_computed_tokens == 0
    first.serve("a", prompt(1, 64), 1)
    second.run()
    assert second.runner.loaded_tokens["b"] == 64
    assert list(second.requests["b"].output_token_ids) == continuation(prompt(1, 64), 4)


@pytest.mark.parametrize("seconds", [0, 0.05, -1, 1e9, "2", True, None, float("nan")])
def test_request_whose_blocks_do_not_come_is_computed(bench: Bench, seconds: object) -> None:
    engine = bench.engine()
    request = engine.add("a", prompt(1, 64), 4, {"kvstrata_wait_seconds": seconds})
    engine.run()
    assert list(request.output_token_ids) == continuation(prompt(1, 64), 4)
    assert not engine.half._loads._awaits._until


def test_load_begins_within_a_block_where_the_device_has_its_beginning(bench: Bench) -> None:
    """The device holds 12 tokens, a block and a half: the other half and the rest are loaded."""
    engine = bench.engine()
    tokens = prompt(1, 60)
    engine.serve("a", tokens, 1)
    engine.forget_device()
    for page in engine.runner.pages:
        page[:] = 0xEE
    half = engine.half._loads
    config = half._config
    half._config = config.model_copy(update={"lookup_timeout_seconds": 1e-9})
    engine.half._link._welcomed = False  # no cache: the 13 tokens are computed
    engine.serve("b", tokens[:13], 1)
    half._config = config
    engine.half._link._welcomed = True
    assert engine.serve("c", tokens, 3) == 56 - 12


def test_prompt_that_is_cached_to_its_last_token_is_answered(bench: Bench) -> None:
    engine = bench.engine()
    engine.serve("a", prompt(1, 64), 9)
    engine.forget_device()
    engine.serve("b", prompt(1, 64), 9)


def test_hooks_called_again_and_again_change_nothing(bench: Bench) -> None:
    engine = bench.engine()
    engine.serve("a", prompt(1, 60), 2)
    engine.forget_device()
    connector = engine.connector
    match, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
    answers = []

    def match_often(request: Request, computed: int) -> Any:
        answers.append([match(request, computed) for _ in range(5)])
        return answers[-1][-1]

    def allocated_twice(request: Request, blocks: Any, tokens: int) -> None:
        allocated(request, blocks, tokens)
        allocated(request, blocks, tokens)

    connector.get_num_new_matched_tokens = match_often
    connector.update_state_after_alloc = allocated_twice
    assert engine.serve("b", prompt(1, 60), 2) == 56
    assert [set(answer) for answer in answers] == [{(56, True)}]
    assert bench.counters()["kvstrata_loaded_blocks_total"] == 7


def test_reset_makes_nothing_found(bench: Bench) -> None:
    engine = bench.engine()
    engine.serve("a", prompt(1, 60), 2)
    assert len(bench.saved_keys()) == 7
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    eventually(lambda: not bench.saved_keys(), "the server keeps the old blocks")
    assert engine.serve("b", prompt(1, 60), 2) == 0
    engine.forget_device()
    assert engine.serve("c", prompt(1, 60), 2) == 56


def test_reset_while_requests_run_leaves_nothing_of_before(bench: Bench) -> None:
    engine = bench.engine(asynchronous=True)
    for i in range(3):
        engine.add(f"r{i}", prompt(i, 70), 20)
    for _ in range(8):
        engine.step()
    old = engine.half._namespace
    engine.connector.reset_cache()
    engine.run()
    assert engine.half._namespace != old
    eventually(
        lambda: not any(key.startswith(old) for key in bench.saved_keys()), "old blocks stay"
    )
    for i in range(3):
        engine.forget_device()
        assert engine.serve(f"s{i}", prompt(i, 70), 1) == 0


@MODES
def test_what_one_node_has_computed_is_loaded_on_another(
    folder: Path, asynchronous: bool, drafts: int
) -> None:
    """Two servers, one after the other, that have nothing in common but a directory."""
    tokens = prompt(1, 64)
    for expected in (0, 64):
        with start(folder, 20, shared=folder / "shared") as bench:
            engine = bench.engine(
                asynchronous=asynchronous, drafts=drafts, remote_lookup_seconds=20
            )
            assert engine.serve("a", tokens, 2) == expected
            assert bench.check_saved_bytes(engine) == 8
            assert bench.manager._lower["remote"].drain(PATIENCE_SECONDS)


def test_blocks_that_are_not_whole_device_blocks_are_refused(bench: Bench) -> None:
    message = (
        f"tokens_per_block = {TOKENS + 1} is no multiple of vLLM's block size of {DEVICE_TOKENS}"
    )
    with pytest.raises(ConfigError, match=message):
        bench.engine(tokens_per_block=TOKENS + 1)


def test_lossy_blocks_have_a_namespace_of_their_own(folder: Path) -> None:
    namespaces = set()
    for block_format in ("exact", "int8"):
        with start(folder, 20, block_format=block_format) as bench:
            engine = bench.engine(block_format=block_format)
            engine.serve("a", prompt(1, 64), 2)
            engine.forget_device()
            assert engine.serve("again", prompt(1, 64), 2) == 64
            namespaces.add(engine.half._namespace)
            parts = bench.manager.stats().namespaces[0].parts
            assert parts.get("block_format", "exact").split()[0] == block_format
    assert len(namespaces) == 2


# -- requests that do not end well ---------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("after_steps", [0, 1, 3, 7])
def test_abort_at_any_time_lets_go_of_every_block(
    bench: Bench, asynchronous: bool, after_steps: int
) -> None:
    engine = bench.engine(asynchronous=asynchronous)
    engine.serve("warm", prompt(1, 60), 1)
    engine.forget_device()
    for i in range(3):
        engine.add(f"r{i}", prompt(i, 90), 9)
    for _ in range(after_steps):
        engine.step()
    engine.scheduler.finish_requests(["r0", "r1", "r2"], RequestStatus.FINISHED_ABORTED)
    engine.run()
    eventually(engine.is_at_rest, "device blocks are kept")
    eventually(lambda: engine.holds_nothing(bench.manager), "a lease is kept")
    engine.serve("after", prompt(1, 90), 9)


@MODES
def test_preempted_requests_go_on_as_if_nothing_had_happened(
    folder: Path, asynchronous: bool, drafts: int
) -> None:
    """40 device blocks for four requests that need 30 each, over 12 slots of host memory."""
    with start(folder, 12) as bench:
        engine = bench.engine(asynchronous=asynchronous, drafts=drafts, num_blocks=40)
        prompts = [prompt(0, 40) + prompt(i + 1, 30) for i in range(6)]
        for i, tokens in enumerate(prompts):
            engine.add(f"r{i}", tokens, 45)
        engine.run()
        for i, tokens in enumerate(prompts):
            assert list(engine.requests[f"r{i}"].output_token_ids) == continuation(tokens, 45)
        assert sum(r.num_preemptions for r in engine.requests.values()) > 0
        assert bench.check_saved_bytes(engine) > 0


@MODES
def test_any_traffic_gives_right_tokens_from_right_pages(
    folder: Path, asynchronous: bool, drafts: int
) -> None:
    """Shared prefixes, aborts, resets, a small device and a small cache."""
    rng = random.Random(5)
    with start(folder, 60) as bench:
        engine = bench.engine(asynchronous=asynchronous, drafts=drafts, num_blocks=60)
        wanted: dict[str, list[int]] = {}
        aborted = set[str]()
        stems = [prompt(i, 64) for i in range(8)]

        def disturb() -> None:
            if len(wanted) < 40 and rng.random() < 0.2:
                name = f"r{len(wanted)}"
                tokens = rng.choice(stems)[: rng.randint(1, 64)] + prompt(
                    rng.randint(0, 3), rng.randint(0, 20)
                )
                wanted[name] = continuation(tokens, 12)
                engine.add(name, tokens, 12)
            if wanted and rng.random() < 0.02:
                name = rng.choice(list(wanted))
                if not engine.requests[name].is_finished():
                    aborted.add(name)
                    engine.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
            if rng.random() < 0.01:
                engine.connector.reset_cache()

        while len(wanted) < 40:
            disturb()
            engine.step()
        engine.run()
        for name, tokens in wanted.items():
            if name not in aborted:
                assert list(engine.requests[name].output_token_ids) == tokens
        assert bench.counters()["kvstrata_loaded_blocks_total"] > 20


# -- servers that are slow or gone ---------------------------------------------------------------


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Call it and lookups are not answered before the end of the test."""
    go = threading.Event()
    real = KVManager.get_match

    def begin() -> None:
        def waiting(*args: Any, **kwargs: Any) -> Any:
            assert go.wait(PATIENCE_SECONDS)
            return real(*args, **kwargs)

        monkeypatch.setattr(KVManager, "get_match", waiting)

    yield begin
    go.set()


def test_silent_server_is_waited_for_until_the_timeout_and_no_longer(
    bench: Bench, silence: Callable[[], None]
) -> None:
    engine = bench.engine(lookup_wait_seconds=0.001, lookup_timeout_seconds=0.2)
    engine.serve("a", prompt(1, 60), 2)
    engine.forget_device()
    silence()
    answers = []
    match = engine.connector.get_num_new_matched_tokens

    def spy(request: Request, computed: int) -> Any:
        answers.append(match(request, computed))
        return answers[-1]

    engine.connector.get_num_new_matched_tokens = spy
    assert engine.serve("b", prompt(1, 60), 2) == 0
    assert answers[0] == (None, False)
    assert answers[-1] == (0, False)
    assert set(answers[:-1]) == {(None, False)}
    assert not engine.half._link.ready
    assert engine.serve("c", prompt(2, 60), 2) == 0


def test_server_that_answers_again_is_used_again(
    bench: Bench, silence: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bench.engine(lookup_wait_seconds=0.001, lookup_timeout_seconds=0.1)
    engine.serve("a", prompt(1, 60), 2)
    engine.forget_device()
    with monkeypatch.context() as patch:
        go = threading.Event()
        real = KVManager.get_match
        patch.setattr(
            KVManager, "get_match", lambda *a, **k: go.wait(PATIENCE_SECONDS) and real(*a, **k)
        )
        engine.serve("b", prompt(1, 60), 2)
        assert not engine.half._link.ready
        go.set()

    def answers() -> bool:
        engine.half._link.tick()
        return engine.half._link.ready

    eventually(answers, "the link is not taken up again")
    eventually(lambda: bench.manager.stats().running_gets == 0, "the late answer keeps its lease")
    engine.forget_device()
    assert engine.serve("c", prompt(1, 60), 2) == 56


def test_server_that_dies_costs_hits_and_the_next_one_is_filled(folder: Path) -> None:
    with start(folder, 100) as first:
        engine = first.engine(asynchronous=True)
        engine.serve("a", prompt(1, 60), 2)
        first.engines.clear()
    try:
        engine.add("b", prompt(2, 60), 20)
        engine.run()
        assert engine.is_at_rest()
        with start(folder, 100) as second:
            engine.ready(second.manager)
            engine.forget_device()
            assert engine.serve("c", prompt(1, 60), 2) == 0
            engine.forget_device()
            assert engine.serve("d", prompt(1, 60), 2) == 56
    finally:
        engine.close()


def test_first_prompt_after_a_restart_of_the_server_is_loaded(folder: Path) -> None:
    """The engine did nothing meanwhile: its two halves have come back by themselves."""
    shared = folder / "shared"
    with start(folder, 100, shared=shared) as first:
        engine = first.engine()
        engine.serve("a", prompt(1, 60), 2)
        engine.forget_device()
        first.hears()
        first.engines.clear()
    try:
        with start(folder, 100, shared=shared) as second:

            def is_whole() -> bool:
                return [each["workers"] for each in second.manager.stats().engines] == [[0]]

            eventually(is_whole, "the idle engine does not come back")
            eventually(lambda: engine.half._link._redial._welcomed is not None, "no welcome")
            assert engine.serve("b", prompt(1, 60), 2) == 56
    finally:
        engine.close()


def test_load_of_the_old_server_never_passes_for_one_of_the_new(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is made anew between vLLM's question and the plan: the slots are still the old's."""
    engine = bench.engine()
    engine.serve("a", prompt(1, 60), 2)
    engine.forget_device()
    link, half = engine.half._link, engine.half
    old, plans = link.server_id, list[Any]()
    allocated, planned = half.allocated, half.plan

    def slow(*args: Any) -> None:
        allocated(*args)
        assert link._client is not None
        link._client.shutdown()
        eventually(lambda: link._redial._welcomed is not None, "the line is not made anew")
        monkeypatch.setattr(bench.manager, "server_id", b"another".ljust(len(old), b"."))
        link._redial._welcomed.client.welcome.reply.server_id = bench.manager.server_id  # type: ignore[union-attr]  # it is there

    def noted(output: SchedulerOutput) -> Any:
        plans.append(planned(output))
        return plans[-1]

    with monkeypatch.context() as patch:
        patch.setattr(half, "allocated", slow)
        patch.setattr(half, "plan", noted)
        engine.add("b", prompt(1, 60), 2)
        engine.step()
    assert [(len(plan.loads), plan.server_id) for plan in plans] == [(1, old)]
    assert link.server_id != old
    engine.run()
    assert list(engine.requests["b"].output_token_ids) == continuation(prompt(1, 60), 2)


def test_failed_loads_are_computed_instead(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bench.engine()
    engine.serve("a", prompt(1, 60), 2)
    engine.forget_device()
    copier: Any = engine.runner.half._copier

    def broken(device_blocks: Any, rows: Any) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(copier, "copy_to_device", broken)
        engine.serve("b", prompt(1, 60), 2)
    assert bench.counters()["kvstrata_failed_loads_total"] == 1
    engine.forget_device()
    engine.serve("c", prompt(1, 60), 2)
    engine.forget_device()
    assert engine.serve("d", prompt(1, 60), 2) == 56


def test_abort_within_a_load_saves_nothing_of_what_has_not_arrived(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM counts the tokens as computed, and a server that came meanwhile lacks them."""
    engine = bench.engine()
    engine.serve("a", prompt(1, 60), 2)
    engine.forget_device()
    aborted = threading.Event()

    def broken(device_blocks: Any, rows: Any) -> None:
        aborted.wait(PATIENCE_SECONDS)
        raise OSError("no")

    monkeypatch.setattr(worker_module, "_COPY_HERE_BYTES", 0)
    monkeypatch.setattr(engine.runner.half._copier, "copy_to_device", broken)
    engine.add("b", prompt(1, 60), 2)

    def loads() -> bool:
        engine.step()
        return "b" in engine.runner.loaded_tokens

    eventually(loads, "no load begins")
    bench.manager.reset(engine.half._namespace)
    engine.half._link._drop(ServerUnavailable("gone"))
    engine.ready(bench.manager)
    engine.scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)
    aborted.set()
    engine.run()
    assert bench.saved_keys() == set()
    assert engine.half._loads._refused == set()


def test_failed_saves_are_not_found_and_made_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bench.engine()
    copier: Any = engine.runner.half._copier

    def broken(device_blocks: Any, rows: Any) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(copier, "copy_to_host", broken)
        engine.serve("a", prompt(1, 60), 2)
    assert bench.saved_keys() == set()
    engine.forget_device()
    engine.serve("b", prompt(1, 60), 2)
    assert len(bench.saved_keys()) == 7
    assert bench.manager.get_match(engine.half._namespace, []).state is TaskState.DONE


def test_of_a_save_that_failed_half_way_the_first_half_is_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.integration.vllm.worker._SAVE_PIECE_BYTES", 1)
    engine = bench.engine()
    copier: Any = engine.runner.half._copier
    real, copied = copier.copy_to_host, list[Any]()

    def broken(device_blocks: Any, rows: Any) -> None:
        copied.append(device_blocks)
        if len(copied) > 3:
            raise OSError("no")
        real(device_blocks, rows)

    with monkeypatch.context() as patch:
        patch.setattr(copier, "copy_to_host", broken)
        engine.serve("a", prompt(1, 60), 2)
    assert len(bench.saved_keys()) == bench.check_saved_bytes(engine) == 3
    engine.forget_device()
    assert engine.serve("b", prompt(1, 60), 2) == 24
    assert len(bench.saved_keys()) == bench.check_saved_bytes(engine) == 7


def test_line_that_breaks_while_workers_copy_costs_no_slot(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers stay: the slots that they write to are nobody else's until they have ended."""
    engine = bench.engine()
    copier: Any = engine.runner.half._copier
    real, entered, go = copier.copy_to_host, threading.Event(), threading.Event()

    def held(device_blocks: Any, rows: Any) -> None:
        entered.set()
        assert go.wait(PATIENCE_SECONDS)
        real(device_blocks, rows)

    monkeypatch.setattr(copier, "copy_to_host", held)
    engine.add("a", prompt(1, 60), 2)

    def all_are_being_saved() -> bool:
        engine.step()
        puts = [*bench.manager._puts.tasks.values()]
        running = [put for put in puts if put.state is TaskState.RUNNING]
        return entered.is_set() and sum(len(put.slots) for put in running) == 7

    eventually(all_are_being_saved, "no copies begin")
    link, sessions = engine.half._link, bench.manager._sessions
    for number in (2, 3):
        assert link._client is not None
        link._client.shutdown()

        def is_back(number: int = number) -> bool:
            link.tick()
            return link.number == number and link.ready

        eventually(is_back, "the line stays broken")
        eventually(lambda: len(sessions.describe()) == 1, "the old connection stays")
        assert len(sessions.orphaned_slots()) == 7
        bench.manager.check()
    go.set()
    engine.run()
    eventually(lambda: sessions.orphaned_slots() == [], "slots are kept")
    engine.forget_device()
    engine.serve("b", prompt(1, 60), 2)
    assert len(bench.saved_keys()) == bench.check_saved_bytes(engine) == 7


def test_reset_that_the_server_did_not_carry_out_is_asked_of_the_next_connection(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its blocks would be there again for the next life of the engine."""
    engine = bench.engine()
    engine.serve("a", prompt(1, 60), 2)
    real, asked = KVManager.reset, list[bytes]()

    def dying(manager: KVManager, namespace: bytes) -> int:
        asked.append(namespace)
        if len(asked) == 1:
            client = engine.half._link._client
            assert client is not None
            client.shutdown()
            raise OSError("the connection ends here")
        return real(manager, namespace)

    monkeypatch.setattr(KVManager, "reset", dying)
    old = engine.half._namespace
    engine.connector.reset_cache()

    def dropped() -> bool:
        engine.half._link.tick()
        return bench.saved_keys() == set()

    eventually(dropped, "the old blocks stay")
    assert asked == [old, old]
    engine.ready(bench.manager)
    engine.half._link.poll(0.05)
    assert engine.half._link._resets == {}
    assert engine.serve("b", prompt(1, 60), 2) == 0

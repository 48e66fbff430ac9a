"""Hot paths of the engine: all that requests cost whose prompts are saved, and whose prompts are loaded.

vLLM's own scheduler, both halves of the connector, a server in a process of its own, and real copies:
only the model's part is made up.
"""

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, ParamSpec, TypeVar
from unittest.mock import patch

import numpy as np
from bench.operations.count import Count
from bench.step_hooks import (
    HOOKS,
    engine_config,
    kv_cache_config,
    request_of,
    scheduler_of,
)

__all__ = ["load", "save"]

P = ParamSpec("P")
T = TypeVar("T")
Half = Literal["scheduler", "worker"]

_REQUESTS: Final = 8
_PROMPT_TOKENS: Final = 768  # in whole blocks; all prompts fit one step
_PATIENCE_SECONDS: Final = 60.0
# Those that vLLM calls for a request.
_REQUEST_HOOKS: Final = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "request_finished_all_groups",
)


def save(count: Count, half: Half) -> Generator[None]:
    """Prompts that are new, from their arrival until all their blocks are saved."""
    with _engine(count, half) as engine:
        for turn in range(1 << 20):
            assert engine.answer(turn) == 0
            yield


def load(count: Count, half: Half) -> Generator[None]:
    """Prompts that are in host memory and not in the device's."""
    with _engine(count, half) as engine:
        engine.answer(0)
        while True:
            engine.scheduler.reset_prefix_cache()
            assert engine.answer(0) == _REQUESTS * _PROMPT_TOKENS // engine.tokens_per_block
            yield


class _Engine:
    """An engine without a model."""

    def __init__(
        self, folder: Path, count: Count, counted: Half, cleanup: contextlib.ExitStack
    ) -> None:
        from kvstrata.core.load import load_config
        from kvstrata.integration.vllm.setup import EngineIdentity
        from kvstrata.integration.vllm.tiny_model import write_tiny_llama
        from kvstrata.integration.vllm.worker import WorkerHalf, WorkerSettings
        from kvstrata.server.attach import Attachment, Patience
        from kvstrata.server.embedded import EmbeddedServer

        self._count, self._counted = count, counted
        settings = {
            "server": "attached",
            "socket": str(folder / "socket"),
            "load_mode": "blockwise",
            "prefault": False,
        }
        config = engine_config(write_tiny_llama(folder / "model"), _REQUESTS, settings)
        planned = kv_cache_config(config)
        identity = EngineIdentity.of(load_config(settings), config, planned)
        server = EmbeddedServer(
            load_config({"tiers": "host:64MiB", "prefault": False}),
            identity.socket,
            block_bytes=identity.block_bytes,
        )
        cleanup.callback(server.close)
        self.tokens_per_block = identity.tokens_per_block
        self._worker = WorkerHalf(
            WorkerSettings(identity.regions.of(0, 0), identity.tokens_per_block), config, planned
        )
        self._worker.register_kv_caches(_tensors(planned))
        cleanup.callback(self._worker.shutdown)
        attachment = Attachment(
            identity.socket,
            identity.hello("worker"),
            partial(setattr, self._worker, "mapping"),
            patience=Patience(_PATIENCE_SECONDS),
            prefault=False,
        )
        cleanup.callback(attachment.close)
        self.scheduler = scheduler_of(config, planned)
        connector = self.scheduler.connector
        cleanup.callback(connector.shutdown)
        self._link = connector._scheduler._link
        for name in (*HOOKS, *_REQUEST_HOOKS):
            setattr(connector, name, partial(self._on, "scheduler", getattr(connector, name)))
        self._copies: Any = self._worker._lanes
        self._main = threading.get_ident()
        self._copies._do = partial(self._do, self._copies._do)  # type: ignore[method-assign]
        # Else a step now and then looks for another server, or tells it how fast it computes.
        cleanup.enter_context(patch("time.monotonic", lambda: 0.0))

    def answer(self, seed: int) -> int:
        """Requests with prompts of *seed*, until all is done; how many blocks are loaded for them."""
        tokens = np.random.default_rng(seed).integers(1, 900, (_REQUESTS, _PROMPT_TOKENS + 1))
        for number, prompt in enumerate(tokens.tolist()):
            self.scheduler.add_request(request_of(f"{seed} {number}", prompt, 1))
        loaded = 0
        while self.scheduler.has_requests():
            loaded += self._step()
        return loaded

    def _step(self) -> int:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        output = self.scheduler.schedule()
        plan, worker = output.kv_connector_metadata, self._worker
        for begin in (worker.begin_step, worker.start_load, worker.start_save):
            self._on("worker", begin, plan)
        received, failed = self._on("worker", worker.collect)
        names = list(output.num_scheduled_tokens)
        answer = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[7] for _ in names],
            kv_connector_output=KVConnectorOutput(
                finished_recving=received,
                failed_recving=failed,
                invalid_block_ids=self._on("worker", worker.take_invalid_blocks),
                kv_connector_worker_meta=self._on("worker", worker.report),
            ),
        )
        self.scheduler.update_from_output(output, answer)
        return sum(len(load.slots) for load in plan.loads)

    def _on(self, half: Half, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What *call* returns, once all is at rest that it may find under way or ended, as luck has it."""
        self._settle()
        if half != self._counted:
            return call(*args, **kwargs)
        return self._count(call, *args, **kwargs)

    def _settle(self) -> None:
        client, copies = self._link._client, self._copies
        while client._pending:
            self._link.poll(_PATIENCE_SECONDS)
        while any(copies._queues.values()) or copies._running or not copies._work._waiters:
            time.sleep(0.0001)

    def _do(self, do: Callable[..., None], *job: Any) -> None:
        """A copy; one of the engine's own thread is part of a call that is counted."""
        if self._counted != "worker" or threading.get_ident() == self._main:
            do(*job)
        else:
            self._count(do, *job)


@contextlib.contextmanager
def _engine(count: Count, half: Half) -> Iterator[_Engine]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as cleanup:
        yield _Engine(Path(folder), count, half, cleanup)


def _tensors(planned: Any) -> dict[str, Any]:
    """What the model runner would register for *planned*."""
    import torch

    return {
        name: torch.zeros((planned.num_blocks, tensor.block_stride), dtype=torch.uint8)
        for tensor in planned.kv_cache_tensors
        for name in tensor.layers
    }

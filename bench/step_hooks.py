"""What KVStrata's hooks cost a step of vLLM's scheduler, in microseconds.

    python -m bench.step_hooks [--steps 4000] [--requests 1 8 64] [--json FILE]

vLLM's own ``Scheduler`` decodes for a number of running requests, with the connector and its server
but without a model: the runner's answer is made up. Every hook that the scheduler calls is timed.
A step in which the hooks have nothing to do is one that completes no block and in which no save
runs; those are what the bound is about. Beside it stands the whole step of the scheduler, with and
without connector, taken in turns (A B B A).
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvstrata.bench.figures import percentile

__all__ = [
    "HOOKS",
    "Side",
    "Steps",
    "engine_config",
    "kv_cache_config",
    "markdown",
    "request_of",
    "scheduler_of",
    "timed",
    "verdict",
]

BOUND_MICROSECONDS: Final = 20.0
BLOCK_TOKENS: Final = 32
TURN_STEPS: Final = 250  # of one side before the other's turn
PROMPT_TOKENS: Final = 70
MAX_TOKENS: Final = 7000
# Those that vLLM calls in a step, whatever becomes of the requests.
HOOKS: Final = (
    "build_connector_meta",
    "get_kv_connector_stats",
    "has_pending_block_frees",
    "has_pending_push_work",
    "take_events",
    "update_connector_output",
)


@dataclasses.dataclass
class Steps:
    """Microseconds of steps with a number of running requests."""

    requests: int
    idle_hooks: list[float]  # of the hooks, in steps in which they had nothing to do
    busy_hooks: list[float]  # of the hooks, in the others
    with_connector: list[float]  # of whole steps
    without: list[float]


def timed(hooks: object, names: Sequence[str], clock: Callable[[], int]) -> list[int]:
    """From now on the *names* of *hooks* add the nanoseconds they take to the returned number."""
    spent = [0]

    def wrap(hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed_hook(*args: Any, **kwargs: Any) -> Any:
            started = clock()
            try:
                return hook(*args, **kwargs)
            finally:
                spent[0] += clock() - started

        return timed_hook

    for name in names:
        setattr(hooks, name, wrap(getattr(hooks, name)))
    return spent


def markdown(measured: Sequence[Steps]) -> str:
    lines = [
        "| requests | hooks p50 | p90 | p99 | busy hooks p50 | step, no connector | step, KVStrata |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for steps in measured:
        figures = [percentile(steps.idle_hooks, p) for p in (50, 90, 99)]
        rest = (steps.busy_hooks, steps.without, steps.with_connector)
        figures += [statistics.median(values) if values else 0.0 for values in rest]
        lines.append(f"| {steps.requests} | {' | '.join(f'{f:.1f}' for f in figures)} |")
    return "\n".join(lines)


def is_met(steps: Steps) -> bool:
    return percentile(steps.idle_hooks, 50) < BOUND_MICROSECONDS


def verdict(steps: Steps) -> str:
    p50 = percentile(steps.idle_hooks, 50)
    return (
        f"{'met    ' if is_met(steps) else 'NOT met'} {steps.requests} requests: a step's hooks with nothing to do: {p50:.1f} µs p50, "
        f"limit {BOUND_MICROSECONDS:g} µs"
    )


class Side:
    """A scheduler that decodes; the model's part is made up."""

    def __init__(self, model: Path, requests: int, *, connector: bool) -> None:
        config = engine_config(model, requests, {"tiers": "host:64MiB"} if connector else None)
        self.scheduler = scheduler_of(config, kv_cache_config(config))
        self.spent = [0]
        if connector:
            self.spent = timed(self.scheduler.connector, HOOKS, time.perf_counter_ns)
        for i in range(requests):
            # Of different lengths: they do not complete their blocks in the same step.
            prompt = [1 + (i + j) % 900 for j in range(PROMPT_TOKENS + i % BLOCK_TOKENS)]
            self.scheduler.add_request(request_of(f"r{i}", prompt, MAX_TOKENS))
        while self.scheduler.waiting:
            self.step()

    def step(self) -> tuple[float, float, bool]:
        """Microseconds of the step and of its hooks, and whether the hooks had something to do."""
        before, started = self.spent[0], time.perf_counter_ns()
        output = self.scheduler.schedule()
        plan = output.kv_connector_metadata
        self.scheduler.update_from_output(output, _answer(output, plan))
        self.scheduler.has_requests()
        took, hooks = time.perf_counter_ns() - started, self.spent[0] - before
        half = getattr(self.scheduler.connector, "_scheduler", None)
        had_work = half is not None and (half._saves.busy or bool(plan.saves or plan.loads))
        return took / 1e3, hooks / 1e3, had_work

    def close(self) -> None:
        if self.scheduler.connector is not None:
            self.scheduler.connector.shutdown()


def request_of(name: str, prompt: list[int], tokens: int) -> Any:
    """vLLM's request for so many *tokens* behind *prompt*."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    sampling.update_from_generation_config({}, 99_999)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    return Request(name, prompt, sampling, None, block_hasher=hasher)


def engine_config(model: Path, requests: int, settings: Mapping[str, object] | None) -> Any:
    """vLLM's configuration of an engine for so many requests, with the connector if it has *settings*."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
    )

    transfer = KVTransferConfig(
        kv_connector="KVStrataConnector",
        kv_connector_module_path="kvstrata.integration.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=dict(settings or {}),
    )
    cache = CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True)
    cache.num_gpu_blocks = requests * (2 + MAX_TOKENS // BLOCK_TOKENS) + 1
    return VllmConfig(
        model_config=ModelConfig(model=str(model), skip_tokenizer_init=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max(8, requests),
            max_num_batched_tokens=8192,
            max_model_len=8192,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=None if settings is None else transfer,
    )


def kv_cache_config(config: Any) -> Any:
    """What vLLM would plan for *config* and a model of one layer, with pages of 256 bytes."""
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
    )

    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    blocks, page_bytes = config.cache_config.num_gpu_blocks, spec.page_size_bytes
    size_bytes = blocks * page_bytes
    tensor = KVCacheTensor(size_bytes, ["layer"], layer_stride=size_bytes, block_stride=page_bytes)
    return KVCacheConfig(blocks, [tensor], [KVCacheGroupSpec(["layer"], spec)])


def scheduler_of(config: Any, planned: Any) -> Any:
    """vLLM's scheduler with the connector that *config* names."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    init_none_hash(sha256)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=planned,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
    )


def _answer(output: Any, plan: Any) -> Any:
    """What a runner would say: a token for each request, and that the plan is carried out."""
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    from kvstrata.integration.vllm.metadata import WorkerReport

    names = list(output.num_scheduled_tokens)
    answer = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[[7] for _ in names],
    )
    if plan is not None:
        report = WorkerReport(saved={save.task_id: 1 for save in plan.saves})
        answer.kv_connector_output = KVConnectorOutput(
            kv_connector_worker_meta=report if plan.saves else None
        )
    return answer


def measure(model: Path, requests: int, steps: int) -> Steps:
    """*steps* of each side, in turns of a few hundred: A B B A."""
    ours = Side(model, requests, connector=True)
    alone = Side(model, requests, connector=False)
    result = Steps(requests, [], [], [], [])
    try:
        for turn in range(-(-steps // TURN_STEPS)):
            for side in (alone, ours) if turn % 2 == 0 else (ours, alone):
                for _ in range(TURN_STEPS):
                    took, hooks, had_work = side.step()
                    if side is alone:
                        result.without.append(took)
                        continue
                    result.with_connector.append(took)
                    (result.busy_hooks if had_work else result.idle_hooks).append(hooks)
    finally:
        ours.close()
    return result


def main() -> int:
    from kvstrata.integration.vllm.tiny_model import write_tiny_llama

    parser = argparse.ArgumentParser(description="What the hooks cost a step of the scheduler.")
    parser.add_argument("--steps", type=int, default=4000, help="of each side; 6000 at most")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement")
    options = parser.parse_args()
    if options.steps + TURN_STEPS >= MAX_TOKENS:
        parser.error(
            f"--steps {options.steps}: a request has {MAX_TOKENS} tokens; give 6000 at most"
        )
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_llama(Path(folder))
        measured = [measure(model, requests, options.steps) for requests in options.requests]
    print(markdown(measured), end="\n\n")
    print(*map(verdict, measured), sep="\n")
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(s) for s in measured]) + "\n")
    return 0 if all(map(is_met, measured)) else 1


if __name__ == "__main__":
    sys.exit(main())

"""One engine of the demo: a process that answers prompts and reports each in a line of JSON.

Its orders are one line on standard input. Everything else that vLLM prints goes to standard error.
"""

import os
import sys
import time
from pathlib import Path
from typing import IO, Any, Final, Literal

import msgspec

from kvstrata.core.errors import ServerUnavailable
from kvstrata.server.client import ManagerClient, observe
from kvstrata.server.sockets import embedded_socket

__all__ = ["Answered", "DType", "EngineOrders", "Event", "LoadMode", "Phase", "PhaseEnded", "Ready"]

Phase = Literal["plain", "cold", "device", "host", "disk"]
LoadMode = Literal["auto", "blockwise", "layerwise"]
DType = Literal["float32", "bfloat16"]

MAX_MODEL_TOKENS: Final = 4096
_SETTLE_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.02
_MOST_REQUESTS: Final = 16  # vLLM records CUDA graphs for up to twice as many tokens
_PATIENT: Final = {  # on a busy machine too a hit is to hit; how long it takes is measured
    "lookup_timeout_seconds": 5.0,
    "load_timeout_seconds": 30.0,
    "save_timeout_seconds": 30.0,
    "recompute": "never",
}
_LOOKUP: Final = "kvstrata_lookup_blocks_total{{tier={}}}"


class EngineOrders(msgspec.Struct):
    """What one engine of the demo does: all *prompts* in each of *phases*."""

    model: str
    prompts: list[list[int]]
    output_tokens: int
    phases: list[Phase]
    engine_id: str
    tiers: str | None = None  # None: without KVStrata
    load_mode: LoadMode = "auto"
    dtype: DType = "float32"  # in which tokens do not depend on how a prompt is split
    is_eager: bool = True  # else, on a GPU, compiled, with CUDA graphs


class Ready(msgspec.Struct, tag=True):
    device: str


class Answered(msgspec.Struct, tag=True):
    phase: Phase
    prompt: int  # its number; 0 is the warm-up
    first_token_seconds: float
    reused_tokens: int
    tokens: list[int]


class PhaseEnded(msgspec.Struct, tag=True):
    """*found_blocks* are those that KVStrata's lookups of the phase found, by tier."""

    phase: Phase
    found_blocks: dict[str, int]


Event = Ready | Answered | PhaseEnded


def main() -> None:
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineOrders)
    with os.fdopen(os.dup(1), "wb") as events:
        os.dup2(2, 1)  # before vLLM is imported: it prints
        _run(orders, events)


def _run(orders: EngineOrders, events: IO[bytes]) -> None:
    llm, device = _start(orders)
    cache = None if orders.tiers is None else observe(embedded_socket(orders.engine_id))
    if cache is not None:
        _wait_for_workers(cache)
    _emit(events, Ready(device))
    found: dict[str, int] = {}
    for phase in orders.phases:
        if phase == "host":
            _forget_device_blocks(llm)
        for number, prompt in enumerate(orders.prompts):
            _emit(events, _ask(llm, phase, number, prompt, orders.output_tokens))
        before, found = found, {} if cache is None else _settle(cache)
        new = {tier: blocks - before.get(tier, 0) for tier, blocks in found.items()}
        _emit(events, PhaseEnded(phase, new))
    if cache is not None:
        cache.close()


def _start(orders: EngineOrders) -> tuple[Any, str]:
    if orders.load_mode == "layerwise":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # which takes no failed load back
    from vllm import LLM
    from vllm.platforms import current_platform

    from kvstrata.integration.vllm.tiny_model import TinyLlama, write_tiny_llama

    folder = Path(orders.model)
    if not (folder / "config.json").exists():
        shape = TinyLlama(
            hidden_size=512,
            intermediate_size=1024,
            layers=8,
            head_dim=64,
            dtype=orders.dtype,
        )
        write_tiny_llama(folder, shape)
    extra: dict[str, Any] = {"block_size": 32} if current_platform.is_cpu() else {}
    if not orders.is_eager:
        extra["max_num_seqs"] = _MOST_REQUESTS
    if orders.tiers is not None:
        extra["kv_transfer_config"] = {
            "kv_connector": "KVStrataConnector",
            "kv_connector_module_path": "kvstrata.integration.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "engine_id": orders.engine_id,
            "kv_connector_extra_config": {
                "tiers": orders.tiers,
                "load_mode": orders.load_mode,
                **_PATIENT,
            },
        }
        if orders.load_mode == "layerwise":
            extra["async_scheduling"] = False
    llm = LLM(
        model=orders.model,
        dtype=orders.dtype,
        skip_tokenizer_init=True,
        enforce_eager=orders.is_eager or current_platform.is_cpu(),
        enable_prefix_caching=True,
        max_model_len=MAX_MODEL_TOKENS,
        max_num_batched_tokens=MAX_MODEL_TOKENS,
        disable_log_stats=False,  # or the engine does not tell its latencies
        **extra,
    )
    return llm, current_platform.device_type


def _ask(llm: Any, phase: Phase, number: int, prompt: list[int], output_tokens: int) -> Answered:
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=output_tokens, temperature=0.0, ignore_eos=True, detokenize=False
    )
    (answer,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
    return Answered(
        phase,
        number,
        answer.metrics.first_token_latency,
        answer.num_cached_tokens or 0,
        list(answer.outputs[0].token_ids),
    )


def _forget_device_blocks(llm: Any) -> None:
    """Empty the engine's own prefix cache, which it refuses while blocks are being saved."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while not llm.reset_prefix_cache():
        if time.monotonic() > deadline:
            raise TimeoutError("vLLM has not given up its prefix cache in time")
        time.sleep(_POLL_SECONDS)  # saves in flight end within milliseconds


def _wait_for_workers(cache: ManagerClient) -> None:
    """Wait until the engine's workers have mapped the host tier: before, every lookup misses."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        report = cache.stats()
        if report is not None and any(engine["workers"] for engine in report.engines):
            return
        if time.monotonic() > deadline:
            raise ServerUnavailable("no worker of the demo's engine has attached in time")
        time.sleep(_POLL_SECONDS)  # workers attach in the background


def _settle(cache: ManagerClient) -> dict[str, int]:
    """Wait until all is saved and on disk; the blocks found by lookups so far, by tier."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        report = cache.stats()
        if report is not None and report.is_at_rest:
            return {tier: report.counters.get(_LOOKUP.format(tier), 0) for tier in ("host", "disk")}
        if time.monotonic() > deadline:
            raise ServerUnavailable("the blocks of the demo have not reached the disk in time")
        time.sleep(_POLL_SECONDS)  # the writer works in the background


def _emit(events: IO[bytes], event: Event) -> None:
    events.write(msgspec.json.encode(event) + b"\n")
    events.flush()


if __name__ == "__main__":
    main()

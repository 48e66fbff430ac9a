"""vLLM that blends, in a process of its own, with a bench that reads its counters there."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Final, TypeVar

from kvstrata.bench.fleet import environment

__all__ = ["blending_engine", "count", "each_in_its_own_process", "generate"]

T = TypeVar("T")

_NOTHING_IS_TIMED: Final = {
    "lookup_timeout_seconds": 30,
    "load_timeout_seconds": 30,
    "save_timeout_seconds": 30,
}

# A core in a process of its own would have to be ended before that of the bench can be.
_SAVE_SECONDS: Final = 60.0
_IN_ONE_PROCESS: Final = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def each_in_its_own_process(measure: Callable[..., T], *arguments: Iterable[Any]) -> Iterator[T]:
    """As ``map``: vLLM keeps the counters of one engine for as long as its process lives.

    What is printed there goes to the standard error.
    """
    with ProcessPoolExecutor(
        1,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(environment(None) | _IN_ONE_PROCESS,),
        max_tasks_per_child=1,
    ) as processes:
        yield from processes.map(measure, *arguments)


def _begin(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def blending_engine(model: str, settings: Mapping[str, Any], **engine: Any) -> Any:
    """A ``vllm.LLM`` in this process and its children; *settings*: of ``BlendConnector``."""
    from vllm import LLM

    return LLM(
        model=model,
        disable_log_stats=False,
        enforce_eager=True,
        kv_transfer_config={
            "kv_connector": "BlendConnector",
            "kv_connector_module_path": "kvstrata.integration.vllm.blend.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {**_NOTHING_IS_TIMED, **settings},
        },
        **engine,
    )


def generate(engine: Any, prompts: Sequence[list[int]], sampling: Any) -> None:
    """Ask *engine* all of *prompts*, then empty its device cache, once all is saved."""
    engine.generate([{"prompt_token_ids": each} for each in prompts], sampling, use_tqdm=False)
    give_up = time.monotonic() + _SAVE_SECONDS
    while not engine.reset_prefix_cache():  # refused while saves hold blocks
        if time.monotonic() > give_up:
            raise RuntimeError(f"saves hold device blocks for more than {_SAVE_SECONDS} s")
        engine.generate([{"prompt_token_ids": [1, 2, 3]}], sampling, use_tqdm=False)


def count(name: str, **labels: str) -> float:
    """The sum of a counter of this process's engine over what has *labels*."""
    from prometheus_client import REGISTRY

    samples = [s for family in REGISTRY.collect() for s in family.samples if s.name == name]
    return sum(s.value for s in samples if labels.items() <= s.labels.items())

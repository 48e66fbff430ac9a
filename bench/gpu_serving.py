"""vLLM on this machine's device with KVStrata and without: the same tokens, and how soon the first comes.

`make gpu` runs it where vLLM is installed; see docs/gpu.md. Each engine is a process of its own, with
a small model of random weights that is written on the spot.
"""

import os
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from bench.gpu_rows import Row

from kvstrata.cli.demo_engine import Answered, DType, EngineOrders, LoadMode, Phase
from kvstrata.cli.demo_process import events_of

__all__ = ["FAST", "MODES", "USUAL", "Serving", "is_vllm_installed", "rows"]

MODES: Final[tuple[LoadMode, ...]] = ("blockwise", "layerwise")

_HOST: Final = "host:1GiB"
_VOCABULARY: Final = 1024


class Serving(NamedTuple):
    """What the engines are asked, and how they compute."""

    prompts: int = 9  # the first warms up
    prompt_tokens: int = 3000
    output_tokens: int = 16
    dtype: DType = "float32"
    is_eager: bool = True
    name: str = ""
    most_unlike: int | None = 0  # answers


USUAL: Final = Serving()
# As engines serve: answers then depend a little on how a prompt is split, and are only told.
FAST: Final = Serving(
    5,
    dtype="bfloat16",
    is_eager=False,
    name=", bfloat16 and CUDA graphs",
    most_unlike=None,
)


def is_vllm_installed() -> bool:
    return find_spec("vllm") is not None


def rows(
    folder: Path, serving: Serving = USUAL, modes: Sequence[LoadMode] = MODES
) -> Iterator[Row]:
    """What an engine without KVStrata answers, then one with it in each of *modes*.

    Files go to *folder*. Raises ``EngineFailed`` for an engine that dies or hangs.
    """
    without = _ask(folder, serving, ["plain"], None)["plain"]
    for mode in modes:
        found = _ask(folder, serving, ["cold", "host"], mode)
        yield from _compare(serving, mode, without, found["cold"], found["host"])


def _ask(
    folder: Path, serving: Serving, phases: list[Phase], mode: LoadMode | None
) -> dict[Phase, list[Answered]]:
    """The answers of one engine by phase, but for the first of each."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(_VOCABULARY) for _ in range(serving.prompt_tokens)]
        for _ in range(serving.prompts)
    ]
    orders = EngineOrders(
        model=str(folder / f"model-{serving.dtype}"),
        prompts=prompts,
        output_tokens=serving.output_tokens,
        phases=phases,
        engine_id=f"gpu-{mode}-{os.getpid()}",
        tiers=None if mode is None else _HOST,
        load_mode=mode or "blockwise",
        dtype=serving.dtype,
        is_eager=serving.is_eager,
    )
    found: dict[Phase, list[Answered]] = {phase: [] for phase in phases}
    log = folder / f"{mode or 'plain'}-{serving.dtype}.log"
    with closing(events_of(orders, log)) as events:
        for event in events:
            if isinstance(event, Answered) and event.prompt:
                found[event.phase].append(event)
    return found


def _compare(
    serving: Serving,
    mode: LoadMode,
    without: list[Answered],
    cold: list[Answered],
    host: list[Answered],
) -> Iterator[Row]:
    name, most = f"vLLM, {mode}{serving.name}", serving.most_unlike
    for what, answers in (("miss", cold), ("host hit", host)):
        different = sum(a.tokens != b.tokens for a, b in zip(without, answers, strict=True))
        text = f"{name}, {what}: answers unlike those without a cache"
        yield Row(text, different, most, is_most=True, note=f"of {len(without)}")
    reused = min(answer.reused_tokens for answer in host) / serving.prompt_tokens
    yield Row(f"{name}, host hit: share of the prompt that is loaded", reused, 0.9)
    plain = _median_ms(without)
    for what, answers in (("miss", cold), ("host hit", host)):
        own = _median_ms(answers)
        text = f"{name}, {what}: time to the first token, over that without a cache"
        yield Row(text, own / plain, None, is_most=True, note=f"{own:.1f} over {plain:.1f} ms")


def _median_ms(answers: list[Answered]) -> float:
    return statistics.median(answer.first_token_seconds for answer in answers) * 1e3

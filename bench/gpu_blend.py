"""vLLM on this machine's device with ``BlendConnector``: whether prompts are blended, and how soon.

`make gpu` runs it where vLLM is installed; see docs/gpu.md.
"""

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from bench.blend_latency import BLEND, FULL, PROMPT_TOKENS, SHARE, Bench, Pair
from bench.gpu_rows import Row
from bench.members import roomy_members

from kvstrata.bench.models import random_model

__all__ = ["compare", "rows"]

_PAIRS: Final = 5
_NAME: Final = "vLLM, documents blended"


def rows(folder: Path) -> Iterator[Row]:
    """Raises ``EngineFailed`` for an engine that does not start, which a gate refuses, or dies."""
    make_model = partial(random_model, layers=12, hidden=512, dtype="bfloat16")
    with roomy_members((FULL, BLEND), folder, make_model) as (members, _):
        bench = Bench(members, seed=1)
        bench.pair(PROMPT_TOKENS, SHARE, 0)  # warms up
        pairs = [bench.pair(PROMPT_TOKENS, SHARE, number) for number in range(_PAIRS)]
    yield from compare(pairs)


def compare(pairs: Sequence[Pair]) -> Iterator[Row]:
    blended = sum(pair.cached_tokens > SHARE * pair.tokens / 2 for pair in pairs)
    yield Row(f"{_NAME}: share of the prompts", blended / len(pairs), 1.0)
    ratio = statistics.median(pair.blend_seconds / pair.full_seconds for pair in pairs)
    text = f"{_NAME}: time to the first token, over that of a whole prefill"
    yield Row(text, ratio, None, is_most=True)

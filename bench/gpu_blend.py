"""vLLM on this machine's device with ``BlendConnector``: whether prompts are blended, and how soon.

`make gpu` runs it where vLLM is installed; see docs/gpu.md.
"""

import random
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from bench.blend_latency import BLEND, FULL, PROMPT_TOKENS, SHARE, Bench, Pair
from bench.gpu_rows import Row
from bench.members import roomy_members

from kvstrata.bench.models import MOST_TOKENS, random_model
from kvstrata.integration.vllm.tiny_model import TinyLlama

__all__ = ["compare", "rows"]

_PAIRS: Final = 5
_LONG_TOKENS: Final = 4 * PROMPT_TOKENS
_HALF_AN_8B: Final = TinyLlama(
    hidden_size=4096,
    intermediate_size=8192,  # of its 14336
    layers=16,  # of its 32
    heads=32,
    kv_heads=8,
    head_dim=128,
    max_position=MOST_TOKENS,
)


def rows(folder: Path) -> Iterator[Row]:
    """Raises ``EngineFailed`` for an engine that does not start, which a gate refuses, or dies."""
    make_model = partial(random_model, shape=_HALF_AN_8B)
    with roomy_members((FULL, BLEND), folder, make_model) as (members, _):
        bench = Bench(members, random.Random(1))
        for tokens in (PROMPT_TOKENS, _LONG_TOKENS):
            bench.pairs(tokens, SHARE, 0)  # warms up
            found = [
                pair for number in range(_PAIRS) for pair in bench.pairs(tokens, SHARE, number)
            ]
            yield from compare(found)


def compare(pairs: Sequence[Pair]) -> Iterator[Row]:
    """Of one length."""
    name = f"vLLM, {pairs[0].tokens} tokens of documents blended"
    blended = sum(pair.cached_tokens > SHARE * pair.tokens / 2 for pair in pairs)
    yield Row(f"{name}: share of the prompts", blended / len(pairs), 1.0)
    ratio = statistics.median(pair.blend_seconds / pair.full_seconds for pair in pairs)
    own = 1e3 * statistics.median(pair.blend_seconds for pair in pairs)
    whole = 1e3 * statistics.median(pair.full_seconds for pair in pairs)
    text = f"{name}: time to the first token, over that of a whole prefill"
    yield Row(text, ratio, None, is_most=True, note=f"{own:.1f} over {whole:.1f} ms")

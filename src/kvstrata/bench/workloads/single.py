"""One prompt at a time: what a miss costs, and a hit in each tier."""

import random
from collections.abc import Iterator
from typing import Final

from kvstrata.bench.workloads.workload import Scale, Step, Tier, one_prompt, tokens

__all__ = ["Single"]

_NAMES: Final[dict[Tier, str]] = {
    "none": "miss",
    "device": "device hit",
    "host": "host hit",
    "disk": "disk hit",
    "remote": "remote hit",
}
_IN_MEMORY: Final[tuple[Tier, ...]] = ("device", "host")
_BELOW: Final[tuple[Tier, ...]] = ("disk", "remote")
_AGAIN: Final = 3  # misses and hits in memory, which vary most
_FILLERS: Final = 3
_BLOCK_TOKENS: Final = 64  # KVStrata's; prompts are whole blocks of everybody, and two tokens


class Single:
    title = "One prompt at a time: time to the first token of a miss, and of a hit in each tier."
    contenders = (
        *("none", "kvstrata", "kvstrata-blockwise", "kvstrata-layerwise", "kvstrata-disk"),
        *("kvstrata-remote", "native", "native-disk", "example"),
        *("lmcache", "lmcache-disk", "lmcache-remote"),
    )

    def steps(self, dice: random.Random, scale: Scale) -> Iterator[Step]:
        prompts = [tokens(dice, scale, count) for count in scale.prompt_tokens]
        for prompt in prompts:
            for _ in range(_AGAIN - 1):
                yield _step("none", tokens(dice, scale, len(prompt)))
            yield _step("none", prompt)
            for tier in _IN_MEMORY:
                for _ in range(_AGAIN):
                    yield _step(tier, prompt)
        # The host memory in front of a disk or of a remote engine holds three of these at most.
        fillers = [tokens(dice, scale, max(scale.prompt_tokens)) for _ in range(_FILLERS)]
        for tier in _BELOW:
            for filler in fillers:
                yield Step("fill", one_prompt(filler), "reset", tier, measured=False)
            for prompt in prompts:
                yield _step(tier, prompt)


def _step(tier: Tier, prompt: list[int]) -> Step:
    return Step(
        f"{_NAMES[tier]}, {len(prompt)} tokens",
        one_prompt(prompt),
        before="nothing" if tier in {"none", "device"} else "reset",
        tier=tier,
        cached_tokens=0 if tier == "none" else len(prompt) // _BLOCK_TOKENS * _BLOCK_TOKENS,
    )

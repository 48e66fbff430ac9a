"""What happens to users when the engine is restarted, and when the server of the cache is killed."""

import random
from collections.abc import Iterator
from typing import Final

from kvstrata.bench.traffic import Conversation, Traffic, Turn
from kvstrata.bench.workloads.arrivals import documents, questions, teach
from kvstrata.bench.workloads.workload import COLD_TOKENS, Scale, Step, tokens

__all__ = ["Restart", "ServerKilled"]

_PROMPTS: Final = 4
_RATE: Final = 0.7  # of what an engine computes one after the other


class Restart:
    title = "The engine is restarted: the first tokens of prompts that were known before."
    contenders = (
        *("none", "kvstrata-disk", "kvstrata-attached"),
        *("native-disk", "example", "lmcache"),
    )

    def steps(self, dice: random.Random, scale: Scale) -> Iterator[Step]:
        prompts = [
            Conversation([Turn(tokens(dice, scale, COLD_TOKENS), 1)]) for _ in range(_PROMPTS)
        ]
        yield Step("before the restart", Traffic(prompts))
        yield Step("after the restart", Traffic(prompts), before="restart")


class ServerKilled:
    title = (
        "The server of the cache is killed in the middle of the traffic (SIGKILL). Failed answers "
        "and the longest wait tell."
    )
    contenders = ("none", "kvstrata", "kvstrata-attached", "lmcache")

    def steps(self, dice: random.Random, scale: Scale) -> Iterator[Step]:
        known = documents(dice, scale)
        yield teach(known, "restart")
        yield Step(
            "killed",
            questions(dice, scale, known, _RATE),
            "reset",
            kill_server_seconds=scale.seconds / 2,
        )
        yield Step("after it", questions(dice, scale, known, _RATE), "reset")

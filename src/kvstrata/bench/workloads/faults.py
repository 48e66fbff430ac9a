"""What happens to users when the engine is restarted, and when the server of the cache is killed."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from kvstrata.bench.traffic import Conversation, Traffic, Turn
from kvstrata.bench.workloads.arrivals import documents, questions, teach
from kvstrata.bench.workloads.workload import COLD_TOKENS, Scale, Step, tokens

__all__ = ["Restart", "ServerKilled"]

_PROMPTS: Final = 4
_LONGER: Final = 3  # than other traffic, so that requests still come in when the engine is back
_RATE: Final = 0.7  # as of ``Arrivals``


class Restart:
    title = (
        "The engine is restarted in the middle of the traffic. What is due meanwhile waits, what was "
        "under way is asked again, and both count from when they were due; afterwards come four "
        "prompts that were known before."
    )
    contenders = (
        *("none", "kvstrata-attached", "kvstrata-disk", "kvstrata-remote"),
        *("native-disk", "example", "lmcache"),
    )

    def steps(self, dice: random.Random, scale: Scale) -> Iterator[Step]:
        prompts = [
            Conversation([Turn(tokens(dice, scale, COLD_TOKENS), 1)]) for _ in range(_PROMPTS)
        ]
        known = documents(dice, scale)
        yield Step("before the restart", Traffic(prompts))
        yield teach(known)
        longer = replace(scale, seconds=_LONGER * scale.seconds)
        yield Step(
            "restart in the traffic",
            questions(dice, longer, known, _RATE),
            "reset",
            restart_seconds=scale.seconds / 2,
        )
        yield Step("after the restart", Traffic(prompts))


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

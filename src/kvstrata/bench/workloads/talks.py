"""Many conversations at once, more than the device cache holds: a chat, and agents at work."""

import random
from collections.abc import Iterator
from typing import Final

from kvstrata.bench.traffic import Conversation, Traffic, Turn
from kvstrata.bench.workloads.workload import Scale, Step, tokens

__all__ = ["Agents", "Chat"]

_PEERS: Final = ("none", "roomy", "kvstrata", "native", "lmcache")


class Chat:
    title = (
        "Chat of several turns with a shared system prompt: more users than the device cache holds."
    )
    contenders = _PEERS
    system_tokens: Final = 512
    turns: Final = 4
    question_tokens: Final = (64, 384)
    answer_tokens: Final = 32
    at_once: Final = 2

    def steps(self, dice: random.Random, scale: Scale) -> Iterator[Step]:
        system = tokens(dice, scale, self.system_tokens)
        talks = []
        for _ in range(scale.users):
            questions = [
                tokens(dice, scale, dice.randint(*self.question_tokens)) for _ in range(self.turns)
            ]
            questions[0] = system + questions[0]
            talks.append(Conversation([Turn(q, self.answer_tokens) for q in questions]))
        yield Step("chat", Traffic(talks, self.at_once), "reset")


class Agents:
    title = "Agents: a loop of short calls and long outputs of tools."
    contenders = _PEERS
    instruction_tokens: Final = 1024
    calls: Final = 5
    output_tokens: Final = (256, 1024)
    call_tokens: Final = 24
    at_once: Final = 2

    def steps(self, dice: random.Random, scale: Scale) -> Iterator[Step]:
        instruction = tokens(dice, scale, self.instruction_tokens)
        talks = []
        for _ in range(max(2, scale.users // 3)):
            outputs = [
                tokens(dice, scale, dice.randint(*self.output_tokens)) for _ in range(self.calls)
            ]
            outputs[0] = instruction + outputs[0]
            talks.append(Conversation([Turn(o, self.call_tokens) for o in outputs]))
        yield Step("agents", Traffic(talks, self.at_once), "reset")

"""Questions about documents that are known, in an order that is not: blending."""

import random
from collections.abc import Iterator
from itertools import chain
from typing import Final

from kvstrata.bench.traffic import Conversation, Traffic, Turn
from kvstrata.bench.workloads.workload import Scale, Step, tokens

__all__ = ["Documents"]


class Documents:
    title = "Questions about six of twelve known documents, in random order."
    contenders = ("none", "kvstrata", "kvstrata-blend", "native", "lmcache")
    documents: Final = 12
    document_tokens: Final = 320
    asked: Final = 6  # documents of a prompt
    question_tokens: Final = 48
    questions: Final = 6

    def steps(self, dice: random.Random, scale: Scale) -> Iterator[Step]:
        system = tokens(dice, scale, 64)
        known = [tokens(dice, scale, self.document_tokens) for _ in range(self.documents)]
        taught = [Conversation([Turn(system + document, 1)]) for document in known]
        yield Step("teach", Traffic(taught), "reset", measured=False)
        asked = []
        for _ in range(self.questions):
            chosen = chain.from_iterable(dice.sample(known, self.asked))
            question = tokens(dice, scale, self.question_tokens)
            asked.append(Conversation([Turn([*system, *chosen, *question], 1)]))
        yield Step("documents", Traffic(asked, blend=True), "reset")

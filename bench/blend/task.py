"""Variable binding over several documents: prompts whose answers hang on what one says of another.

A document is a mark, statements and filler. One token is one statement: ``v := literal``, or
``v := u`` with *u* as it is bound there. Variables are bound again and again, in later documents
too, so that a statement about another variable has to be resolved while it is read: when the
question comes, *u* may be something else. The K and V of such a token thus depend on the documents
before it, which is what reuse of KV at another place loses. A question for what came from another
document is asked only where *u* is something else by then: who follows the names from the question
back is wrong. A guess is right once in 16 times.
"""

from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ANSWERS",
    "BOS",
    "DOCUMENT_TOKENS",
    "NO_TARGET",
    "QUESTIONS",
    "STATEMENT",
    "TERMS",
    "VARIABLES",
    "VOCABULARY",
    "Kind",
    "Prompts",
    "make_prompts",
]

DOCUMENT_TOKENS: Final = 32
STATEMENTS: Final = 8  # of a document
QUESTIONS: Final = 8  # of a prompt, its last tokens

LITERALS: Final = 16
VARIABLES: Final = 24
TERMS: Final = LITERALS + VARIABLES  # what a statement can bind a variable to
FILLERS: Final = 16
HOPS: Final = 4  # from name to name, when they are followed from the question back

# Tokens, by the first of each kind.
BOS: Final = 1
MARK: Final = 2
LITERAL: Final = 4
QUESTION: Final = LITERAL + LITERALS
FILLER: Final = QUESTION + VARIABLES
ANSWERS: Final = 64  # tokens below it: those that a model has to be able to say
STATEMENT: Final = ANSWERS
VOCABULARY: Final = STATEMENT + VARIABLES * TERMS

NO_TARGET: Final = -1
ELSEWHERE_SHARE: Final = 0.6  # of the statements about a variable: prefer one of other documents

Tokens = NDArray[np.int64]


class Kind(IntEnum):
    """What a variable's value can be known from."""

    LOCAL = 0  # a literal in the statement
    ALIAS = 1  # other statements of the same document
    CROSS = 2  # another document


class Prompts(NamedTuple):
    """Prompts of the same number of documents: BOS, the documents, the questions."""

    tokens: Tokens  # (prompts, tokens)
    targets: Tokens  # (prompts, tokens): the value, at statements and questions; else NO_TARGET
    kinds: Tokens  # (prompts, questions): a Kind each


class _Bindings:
    """What every variable of every prompt is bound to; arrays are (prompts, VARIABLES)."""

    def __init__(self, prompts: int) -> None:
        shape = (prompts, VARIABLES)
        self._rows = np.arange(prompts)
        self._hops = np.zeros(shape, np.int64)  # statements between the variable and the literal
        self._document = np.zeros(shape, np.int64)  # of the last statement
        self._source = np.zeros(shape, np.int64)  # its other variable; itself if it has none
        self.bound = np.zeros(shape, np.bool_)
        self.value = np.zeros(shape, np.int64)
        self.kind = np.zeros(shape, np.int64)

    def bind(
        self, rng: np.random.Generator, document: int, *, max_hops: int, alias_share: float
    ) -> tuple[Tokens, Tokens]:
        """Bind one variable of each prompt; return the terms: the statements' tokens, values."""
        rows = self._rows
        variable = rng.integers(VARIABLES, size=len(rows))
        known = self.bound & (self._hops < max_hops)
        known[rows, variable] = False
        elsewhere = known & (self._document != document)
        go_there = elsewhere.any(1) & (rng.random(len(rows)) < ELSEWHERE_SHARE)
        wanted = np.where(go_there[:, None], elsewhere, known)
        source = np.where(wanted, rng.random(wanted.shape), -1.0).argmax(1)

        alias = wanted.any(1) & (rng.random(len(rows)) < alias_share)
        literal = rng.integers(LITERALS, size=len(rows))
        from_elsewhere = (self._document[rows, source] != document) | (
            self.kind[rows, source] == Kind.CROSS
        )
        of_alias = np.where(from_elsewhere, Kind.CROSS, Kind.ALIAS)
        value = np.where(alias, self.value[rows, source], literal)

        self.kind[rows, variable] = np.where(alias, of_alias, Kind.LOCAL)
        self._hops[rows, variable] = np.where(alias, self._hops[rows, source] + 1, 0)
        self._document[rows, variable] = document
        self._source[rows, variable] = np.where(alias, source, variable)
        self.bound[rows, variable] = True
        self.value[rows, variable] = value
        term = np.where(alias, LITERALS + source, literal)
        return STATEMENT + variable * TERMS + term, value

    def askable(self, kind: Kind) -> NDArray[np.bool_]:
        """Variables of a kind; if CROSS, those whose names lead to another value by now."""
        of_kind: NDArray[np.bool_] = self.bound & (self.kind == kind)
        if kind is Kind.CROSS:
            reached = self._source
            for _ in range(HOPS):
                reached = np.take_along_axis(self._source, reached, 1)
            of_kind &= np.take_along_axis(self.value, reached, 1) != self.value
        return of_kind


def make_prompts(
    rng: np.random.Generator,
    prompts: int,
    documents: int,
    *,
    max_hops: int = 2,
    alias_share: float = 0.6,
    questions: int = QUESTIONS,
) -> Prompts:
    """Draw prompts; the same state of *rng* gives the same.

    Args:
        documents: Of each prompt.
        max_hops: Statements about variables between a variable and its literal, at most.
        alias_share: Of statements: those about another variable, where there is one.
        questions: Of each prompt.
    """
    rows = np.arange(prompts)
    body = 1 + documents * DOCUMENT_TOKENS
    tokens = np.full((prompts, body + questions), BOS, np.int64)
    targets = np.full_like(tokens, NO_TARGET)
    bindings = _Bindings(prompts)
    for document in range(documents):
        start = 1 + document * DOCUMENT_TOKENS
        size = (prompts, DOCUMENT_TOKENS)
        tokens[:, start : start + DOCUMENT_TOKENS] = FILLER + rng.integers(FILLERS, size=size)
        tokens[:, start] = MARK
        places = rng.permuted(np.tile(np.arange(1, DOCUMENT_TOKENS), (prompts, 1)), axis=1)
        for place in start + np.sort(places[:, :STATEMENTS], axis=1).T:
            statement, value = bindings.bind(
                rng, document, max_hops=max_hops, alias_share=alias_share
            )
            tokens[rows, place] = statement
            targets[rows, place] = LITERAL + value
    asked = _asked(rng, bindings, questions)
    tokens[:, body:] = QUESTION + asked
    targets[:, body:] = LITERAL + np.take_along_axis(bindings.value, asked, 1)
    return Prompts(tokens, targets, np.take_along_axis(bindings.kind, asked, 1))


def _asked(rng: np.random.Generator, bindings: _Bindings, questions: int) -> Tokens:
    """Variables to ask for, (prompts, questions): half of them cross where there are as many.

    In the order of the kinds cross, local, cross, alias; some twice where there are too few.
    """
    place = np.full(bindings.kind.shape, np.inf)
    drawn = rng.permuted(np.tile(np.arange(VARIABLES), (len(place), 1)), axis=1)
    for kind, step, first in ((Kind.CROSS, 2, 0), (Kind.LOCAL, 4, 1), (Kind.ALIAS, 4, 3)):
        of_kind = np.take_along_axis(bindings.askable(kind), drawn, 1)
        number = of_kind.cumsum(1) - 1
        places = np.where(of_kind, first + step * number, np.inf)
        there = np.take_along_axis(place, drawn, 1)
        np.put_along_axis(place, drawn, np.minimum(there, places), 1)
    order = place.argsort(1, kind="stable")
    turns = np.arange(questions) % np.isfinite(place).sum(1)[:, None]
    return rng.permuted(np.take_along_axis(order, turns, 1), axis=1)

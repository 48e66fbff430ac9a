"""The prompts of bench/blend against a reading of their tokens by hand."""

import numpy as np
import pytest
from bench.blend import task
from bench.blend.task import Kind, Prompts, make_prompts
from numpy.typing import NDArray


def drawn(documents: int, seed: int = 0, max_hops: int = 2) -> Prompts:
    return make_prompts(np.random.default_rng(seed), 40, documents, max_hops=max_hops)


class Reader:
    """Reads one prompt from left to right, as a model has to."""

    def __init__(self, tokens: NDArray[np.int64]) -> None:
        self.targets: dict[int, int] = {}  # by position
        self.kinds: list[Kind] = []  # of the questions
        self.variables: list[int] = []  # asked for
        self.value: dict[int, int] = {}
        self.term: dict[int, int] = {}  # of the last statement
        self._documents: dict[int, set[int]] = {}  # that the value has come by
        for position, token in enumerate(tokens.tolist()):
            if token >= task.STATEMENT:
                variable, term = divmod(token - task.STATEMENT, task.TERMS)
                self._bind(variable, term, (position - 1) // task.DOCUMENT_TOKENS)
                self.targets[position] = task.LITERAL + self.value[variable]
            elif task.QUESTION <= token < task.FILLER:
                self._ask(token - task.QUESTION)
                self.targets[position] = task.LITERAL + self.value[self.variables[-1]]

    def _bind(self, variable: int, term: int, document: int) -> None:
        source = term - task.LITERALS
        self.value[variable] = term if source < 0 else self.value[source]
        before = set[int]() if source < 0 else self._documents[source]
        self._documents[variable] = before | {document}
        self.term[variable] = term

    def _ask(self, variable: int) -> None:
        self.variables.append(variable)
        if self.term[variable] < task.LITERALS:
            self.kinds.append(Kind.LOCAL)
        else:
            alone = len(self._documents[variable]) == 1
            self.kinds.append(Kind.ALIAS if alone else Kind.CROSS)

    def by_names(self, variable: int) -> int | None:
        """The value that the last statements lead to; None if they lead in a circle."""
        for _ in range(task.VARIABLES):
            term = self.term[variable]
            if term < task.LITERALS:
                return term
            variable = term - task.LITERALS
        return None


@pytest.mark.parametrize("documents", [1, 2, 6])
def test_targets_and_kinds_are_what_the_statements_say(documents: int) -> None:
    prompts = drawn(documents)
    for tokens, targets, kinds in zip(*prompts, strict=True):
        reader = Reader(tokens)
        found = {at: value for at, value in enumerate(targets.tolist()) if value != task.NO_TARGET}
        assert found == reader.targets
        assert reader.kinds == kinds.tolist()


def test_who_follows_the_names_back_from_a_question_is_wrong() -> None:
    followed = 0
    for tokens in drawn(6).tokens:
        reader = Reader(tokens)
        for variable, kind in zip(reader.variables, reader.kinds, strict=True):
            value = reader.by_names(variable)
            if kind is Kind.CROSS and value is not None:
                assert value != reader.value[variable]
                followed += 1
    assert followed > 100


def test_a_prompt_is_bos_documents_and_questions() -> None:
    tokens = drawn(6).tokens
    assert tokens.shape == (40, 1 + 6 * task.DOCUMENT_TOKENS + task.QUESTIONS)
    assert (tokens[:, 0] == task.BOS).all()
    documents = tokens[:, 1 : -task.QUESTIONS].reshape(40, 6, task.DOCUMENT_TOKENS)
    assert (documents[:, :, 0] == task.MARK).all()
    assert ((documents >= task.STATEMENT).sum(2) == task.STATEMENTS).all()
    assert tokens.max() < task.VOCABULARY


def test_about_half_of_the_questions_need_another_document() -> None:
    kinds = drawn(6).kinds
    assert 0.45 < (kinds == Kind.CROSS).mean() < 0.6
    assert (kinds == Kind.LOCAL).mean() > 0.2
    assert (kinds == Kind.ALIAS).mean() > 0.1


def test_without_hops_every_statement_is_a_literal() -> None:
    assert (drawn(2, max_hops=0).kinds == Kind.LOCAL).all()


def test_more_can_be_asked() -> None:
    few, many = (
        make_prompts(np.random.default_rng(0), 4, 6, questions=questions) for questions in (8, 16)
    )
    assert many.tokens.shape[1] == few.tokens.shape[1] + 8
    assert (many.tokens[:, :-16] == few.tokens[:, :-8]).all()
    assert many.kinds.shape == (4, 16)


def test_the_same_seed_gives_the_same_prompts() -> None:
    assert (drawn(3, seed=5).tokens == drawn(3, seed=5).tokens).all()
    assert (drawn(3, seed=5).tokens != drawn(3, seed=6).tokens).any()

"""A worker's turns: who runs next and with whom, and what an audited request goes through."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.caches import PATIENCE_SECONDS
from torch.distributed import ReduceOp

from kvstrata.blend.plan import BlendPlan, Positions, ReusedRuns
from kvstrata.blend.rules import HkvdRule, TwoRoundQueryRule
from kvstrata.blend.selection import Recompute, Rule, ScoreAttention, ScoreDeviation, Step
from kvstrata.core.load import load_config
from kvstrata.integration.vllm.blend.connector import BlendConnector
from kvstrata.integration.vllm.blend.metadata import BlendRequestMeta
from kvstrata.integration.vllm.blend.moves import TokenMoves
from kvstrata.integration.vllm.blend.rules import rule_of
from kvstrata.integration.vllm.blend.scorer import Prompt, StepRunner
from kvstrata.integration.vllm.blend.worker import BlendWorker

BLOCK_TOKENS = 32
REUSED_TOKENS = 40
SERVER = bytes(16)
KINDS = {Recompute: "recompute", ScoreAttention: "score", ScoreDeviation: "deviation"}
SLOTS: Any = SimpleNamespace(server_id=SERVER, slots=9, generations=np.zeros(9, np.int64))


@dataclass
class Recorder:
    """A ``StepRunner`` that only writes down what it was given: kind, first token, tokens."""

    forwards: list[list[tuple[str, int, int]]] = field(default_factory=list)
    layers: int = 4
    scored: int = 4  # layers that choosing runs
    most_tokens: int = 1000

    def layers_of(self, step: Step) -> int:
        return self.layers if isinstance(step, Recompute) else self.scored

    def run(self, prompts: Any, steps: Any) -> list[np.ndarray[Any, Any]]:
        kinds = [KINDS[type(step)] for step in steps]
        self._add(zip(kinds, (step.positions for step in steps), strict=True))
        return [np.zeros(len(prompt.tokens), np.float32) for prompt in prompts]

    def predict(self, prompt: Any, positions: Positions) -> None:
        self._add([("predict", positions)])

    def _add(self, steps: Any) -> None:
        self.forwards.append([(kind, int(each[0]), len(each)) for kind, each in steps])


@dataclass
class Layer:
    """``TokenPages``, each of whose tokens is its slot and its place in it, of slots of two blocks."""

    tokens: int = BLOCK_TOKENS
    written: list[dict[int, int]] = field(default_factory=list)  # place → what is there now

    device = torch.device("cpu")

    def move(self, slots: Any, moves: TokenMoves, corrector: Any) -> None:
        tokens = torch.tensor(slots)[:, None] * 100 + torch.arange(2 * BLOCK_TOKENS)
        chosen = tokens.flatten()[moves.rows]
        self.written.append(dict(zip(moves.slots.tolist(), chosen.tolist(), strict=True)))


ALONE: Any = SimpleNamespace(world_size=1)


def two_rounds(ratio: float) -> Rule:
    return TwoRoundQueryRule(ratio, scored=(0,), layers=1, sink_tokens=0)


def worker_of(
    runner: Recorder,
    ranks: Any = ALONE,
    layer: Any = None,
    rule: Callable[[float], Rule] = two_rounds,
    most_slots: int = 9,
) -> BlendWorker:
    layer = layer or Layer()
    source: Any = SimpleNamespace(
        per_slot=2, most_slots=most_slots, layers=lambda mapping, slots: [slots]
    )
    stand_in: Any = runner
    return BlendWorker(
        [layer],
        [None],  # type: ignore[list-item]  # keys are not turned here
        source,
        stand_in,
        rule,
        ranks,
    )


def request(
    name: str,
    exact_blocks: int,
    *,
    is_audited: bool = False,
    awaits_load: bool = False,
    awaits_step: bool = False,
) -> BlendRequestMeta:
    """A prompt of 200 tokens, of which 40 behind the exact prefix are reused.

    All it reuses has a place in its 6 device blocks, its last 8 tokens have not.
    """
    exact_end = exact_blocks * BLOCK_TOKENS
    run = ReusedRuns(
        np.array([exact_end]), np.array([REUSED_TOKENS]), np.array([7]), np.zeros(1, np.bool_)
    )
    plan = BlendPlan.of_runs(run, prompt_tokens=200, block_tokens=BLOCK_TOKENS, exact_end=exact_end)
    return BlendRequestMeta(
        request_id=name,
        task_ids=[1],
        tokens=np.zeros(200, np.int32),
        device_blocks=np.arange(1, 7, dtype=np.int32),
        plan=plan,
        slots=np.array([4]),
        generations=np.zeros(1, np.int64),
        first_row=np.zeros(1, np.int64),
        ratio=0.15,
        is_audited=is_audited,
        awaits_load=awaits_load,
        awaits_step=awaits_step,
    )


def test_a_step_that_was_split_goes_on_before_an_older_request_begins() -> None:
    """All requests write what is behind their last device block into the same one."""
    runner = Recorder()
    worker = worker_of(runner)
    worker.begin(request("older", 1, is_audited=True, awaits_load=True), SERVER)
    worker.begin(request("younger", 2, is_audited=True), SERVER)
    worker.advance(None, 100, 100)
    worker.loaded("older", whole=True)
    worker.advance(None, 100, 100)
    assert runner.forwards == [
        [("recompute", 64, 100)],
        [("predict", 164, 36)],
        [("recompute", 32, 64)],
    ]


def test_what_others_compute_in_the_same_step_is_waited_for() -> None:
    runner = Recorder()
    worker = worker_of(runner)
    worker.begin(request("early", 1, awaits_step=True), SERVER)
    assert worker.advance(SLOTS, 1000, 1000) == []
    assert runner.forwards == []
    (ended,) = worker.advance(SLOTS, 1000, 1000)
    assert (ended.request_id, ended.whole) == ("early", True)


def test_what_is_aborted_is_computed_no_further() -> None:
    worker = worker_of(runner := Recorder())
    connector: Any = object.__new__(BlendConnector)  # the hook of a worker alone
    connector._blending, connector._ended = worker, []
    connector._worker = SimpleNamespace(half=SimpleNamespace(collect=lambda: (set(), set())))
    for name, exact_blocks in (("gone", 1), ("alive", 2)):
        worker.begin(request(name, exact_blocks), SERVER)
    assert worker.advance(SLOTS, 1000, 50) == []
    runner.forwards.clear()
    connector.get_transfer_results({"gone"})
    ended = worker.advance(SLOTS, 1000, 1000)
    assert {each.request_id: each.whole for each in ended} == {"gone": False, "alive": True}
    assert min(first for forward in runner.forwards for _, first, _ in forward) == 64


def test_requests_share_forwards_but_for_the_block_of_what_has_none() -> None:
    runner = Recorder()
    worker = worker_of(runner)
    for name, exact_blocks in (("older", 1), ("younger", 2)):
        worker.begin(request(name, exact_blocks), SERVER)
    assert len(worker.advance(SLOTS, 1000, 1000)) == 2
    assert runner.forwards == [
        [("score", 72, 128)],  # up to the prompt's end, as the younger one's first
        [("score", 32, 3), ("score", 104, 96)],
        [("score", 64, 3)],
        [("recompute", 32, 126), ("recompute", 64, 94)],
    ]


def test_rounds_that_look_at_other_layers_share_no_forward() -> None:
    rule = partial(TwoRoundQueryRule, scored=(1, 2), layers=4, sink_tokens=0)
    worker = worker_of(runner := Recorder(), rule=rule)
    for name, exact_blocks in (("older", 1), ("younger", 2)):
        worker.begin(request(name, exact_blocks), SERVER)
    assert len(worker.advance(SLOTS, 1000, 1000)) == 2
    assert runner.forwards == [
        [("score", 72, 128)],
        [("score", 32, 3)],
        [("score", 104, 96)],
        [("score", 64, 3)],
        [("recompute", 32, 126), ("recompute", 64, 94)],
    ]


@pytest.mark.parametrize(
    ("reaches_differ", "looked_at"), [(False, [(1, 2), (1,)]), (True, [(1, 2), (1, 2)])]
)
def test_where_some_layers_have_windows_a_second_round_looks_at_all_of_its_layers(
    reaches_differ: bool, looked_at: list[tuple[int, ...]]
) -> None:
    rule = rule_of(load_config({}, environ={}), 0.15, 12, reaches_differ=reaches_differ)
    selection = rule.select(request("one", 1).plan, 192 + 8)
    found = []
    while isinstance(step := selection.step, ScoreAttention):
        found.append(step.layers)
        selection.advance(np.zeros(200, np.float32))
    assert found == looked_at


@pytest.mark.parametrize(
    ("settings", "forwards"),
    [
        ({"blend_rule": "full"}, [("recompute", 32, 160)]),
        ({"blend_rule": "random"}, [("recompute", 32, 130)]),
        ({"blend_rule": "hkvd"}, [("deviation", 32, 160), ("recompute", 32, 130)]),
        ({"blend_rule": "query"}, [("score", 32, 132), ("recompute", 32, 130)]),
        (
            {"blend_rule": "two_round_query"},
            [("score", 32, 132), ("score", 36, 3), ("recompute", 32, 130)],
        ),
        (
            {"blend_rule": "two_round_query", "recompute_first_tokens": 0},
            [("score", 72, 128), ("score", 32, 3), ("recompute", 32, 126)],
        ),
        (
            {"blend_rule": "query", "recompute_first_tokens": 0},
            [("score", 72, 128), ("recompute", 32, 126)],
        ),
        (
            {"blend_rule": "hkvd", "recompute_first_tokens": 0},
            [("deviation", 32, 160), ("recompute", 32, 126)],
        ),
        ({"blend_rule": "random", "recompute_first_tokens": 10}, [("recompute", 32, 136)]),
        ({"blend_rule": "boundary", "recompute_first_tokens": 10}, [("recompute", 32, 124)]),
        ({"blend_rule": "boundary"}, [("recompute", 32, 124)]),
        ({"blend_rule": "boundary", "recompute_boundary": 5}, [("recompute", 32, 130)]),
        ({"blend_rule": "boundary", "recompute_boundary": 0}, [("recompute", 72, 120)]),
    ],
    ids=lambda each: "-".join(map(str, each.values())) if isinstance(each, dict) else "",
)
def test_the_rule_of_the_configuration_says_what_is_run(
    settings: dict[str, Any], forwards: list[tuple[str, int, int]]
) -> None:
    """Of tokens 32 to 191 the first 40 are reused: 4 first ones, unless the settings say otherwise, and
    15 %, which are 6, beside the 120.
    """
    runner = Recorder()
    config = load_config(settings, environ={})
    worker = worker_of(runner, rule=partial(rule_of, config, layers=4))
    worker.begin(request("one", 1), SERVER)
    (ended,) = worker.advance(SLOTS, 1000, 1000)
    assert ended.whole
    assert runner.forwards == [[forward] for forward in forwards]


def test_what_the_budget_does_not_hold_waits_and_the_oldest_ends_first() -> None:
    runner = Recorder()
    worker = worker_of(runner)
    for name, exact_blocks in (("older", 1), ("younger", 2)):
        worker.begin(request(name, exact_blocks), SERVER)
    ended: list[str] = []
    while len(ended) < 2:
        runner.forwards.clear()
        ended += [end.request_id for end in worker.advance(SLOTS, 50, 50)]
        tokens = [tokens for forward in runner.forwards for _, _, tokens in forward]
        assert 0 < sum(tokens) <= 50
    assert ended == ["older", "younger"]


def test_tokens_that_choose_count_as_the_share_of_the_layers_that_they_go_through() -> None:
    """128 and three of a quarter of the layers leave 67 of 100."""
    worker = worker_of(runner := Recorder(scored=1))
    worker.begin(request("one", 1), SERVER)
    assert worker.advance(SLOTS, 1000, 100) == []
    chosen = [[("score", 72, 128)], [("score", 32, 3)]]
    assert runner.forwards == [*chosen, [("recompute", 32, 67)]]
    assert len(worker.advance(SLOTS, 1000, 1000)) == 1
    assert runner.forwards[3:] == [[("recompute", 133, 59)]]


def test_no_forward_has_more_tokens_than_the_engine_has_memory_for() -> None:
    worker = worker_of(runner := Recorder(scored=1, most_tokens=30))
    for name, exact_blocks in (("older", 1), ("younger", 2)):
        worker.begin(request(name, exact_blocks), SERVER)
    ended = worker.advance(SLOTS, 1000, 1000)
    assert [each.request_id for each in ended] == ["older", "younger"]
    assert {sum(n for _, _, n in forward) for forward in runner.forwards} <= {*range(1, 31)}
    computed = [n for forward in runner.forwards for kind, _, n in forward if kind == "recompute"]
    assert sum(computed) == 126 + 94


@pytest.mark.parametrize(
    ("step", "layers"),
    [
        (Recompute(np.arange(9)), 12),
        (ScoreAttention(np.arange(9), np.arange(2), (1, 2)), 3),
        (ScoreDeviation(np.arange(9), 4), 5),
    ],
)
def test_a_step_goes_through_the_layers_up_to_the_last_that_it_looks_at(
    step: Step, layers: int
) -> None:
    twelve: list[Any] = [None] * 12
    runner = StepRunner(SimpleNamespace(), twelve, twelve, SimpleNamespace(), ALONE)  # type: ignore[arg-type]  # counted, not run
    assert (runner.layers, runner.layers_of(step)) == (12, layers)


@pytest.mark.parametrize(("most_slots", "moved"), [(9, [50, 50, 16]), (1, [50, 10, 20, 20, 5, 11])])
def test_of_what_is_reused_a_step_moves_no_more_than_it_may(
    most_slots: int, moved: list[int]
) -> None:
    """80 tokens from the 4th of slots 6 and 3 on, and 36 from the 39th of slots 7 and 1 on.

    Of *most_slots* at a time.
    """
    start, length, first_row = np.array([40, 130]), np.array([80, 36]), np.array([4, 128 + 39])
    runs = ReusedRuns(start, length, np.array([7, -3]), np.zeros(2, np.bool_))
    plan = BlendPlan.of_runs(runs, prompt_tokens=200, block_tokens=BLOCK_TOKENS, exact_end=32)
    asked = replace(
        request("long", 1),
        plan=plan,
        slots=np.array([6, 3, 7, 1]),
        generations=np.zeros(4, np.int64),
        first_row=first_row,
    )
    runner, layer = Recorder(), Layer()
    worker = worker_of(runner, layer=layer, most_slots=most_slots)
    worker.begin(asked, SERVER)
    assert worker.advance(SLOTS, 50, 99) == worker.advance(SLOTS, 50, 99) == []
    assert runner.forwards == []
    worker.advance(SLOTS, 50, 99)
    assert runner.forwards != []
    assert [len(part) for part in layer.written] == moved
    found = {place: token for part in layer.written for place, token in part.items()}
    expected = [600 + i for i in range(4, 64)] + [300 + i for i in range(20)]
    expected += [700 + i for i in range(39, 64)] + [100 + i for i in range(11)]
    positions = [*range(40, 120), *range(130, 166)]
    assert found == dict(zip([BLOCK_TOKENS + p for p in positions], expected, strict=True))


class TwoRanks:
    """In place of ``torch.distributed.all_reduce``: an error, and no hang, where ranks differ."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=PATIENCE_SECONDS)
        self._shares: dict[int, torch.Tensor] = {}

    def all_reduce(self, tensor: torch.Tensor, op: object = ReduceOp.MAX, *, group: int) -> None:
        self._shares[group] = tensor.clone()
        self._barrier.wait()
        if len({(each.shape, each.dtype) for each in self._shares.values()}) > 1:
            self._barrier.abort()
        shares = torch.stack([self._shares[rank] for rank in range(2)])
        self._barrier.wait()
        tensor.copy_(shares.amax(0) if op == ReduceOp.MAX else shares.sum(0))

    def run(self, of_rank: Callable[[int, Any], Any]) -> list[Any]:
        """What *of_rank* returns on each rank, given its number and its group."""

        def of(rank: int) -> Any:
            return of_rank(rank, SimpleNamespace(world_size=2, cpu_group=rank))

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(of, range(2)))


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> TwoRanks:
    made = TwoRanks()
    monkeypatch.setattr(torch.distributed, "all_reduce", made.all_reduce)
    return made


@dataclass
class Rank(Recorder):
    """One whose forwards are collectives of both ranks, and which can fail behind one of them."""

    ranks: Any = None
    breaks_in: int = -1  # forward

    def _add(self, steps: Any) -> None:
        super()._add(steps)
        torch.distributed.all_reduce(torch.zeros(7), group=self.ranks.cpu_group)
        if len(self.forwards) - 1 == self.breaks_in:
            raise MemoryError("of one rank alone")


@pytest.mark.parametrize(
    ("breaks_in", "ended", "last"),
    [
        (0, {"older": False, "younger": True}, ("recompute", 64, 94)),
        (2, {"older": True, "younger": False}, ("recompute", 32, 126)),
    ],
)
def test_what_fails_on_one_rank_behind_a_forward_is_given_up_by_both(
    two_ranks: TwoRanks, breaks_in: int, ended: dict[str, bool], last: tuple[str, int, int]
) -> None:
    def run(rank: int, ranks: Any) -> Any:
        runner = Rank(ranks=ranks, breaks_in=breaks_in if rank == 1 else -1)
        worker = worker_of(runner, ranks)
        for name, exact_blocks in (("older", 1), ("younger", 2)):
            worker.begin(request(name, exact_blocks), SERVER)
        whole = {each.request_id: each.whole for each in worker.advance(SLOTS, 1000, 1000)}
        return runner.forwards, whole

    one, other = two_ranks.run(run)
    assert one == other
    forwards, whole = one
    assert whole == ended
    assert forwards[-1] == [last]


def test_a_load_that_ends_on_one_rank_before_the_other_is_waited_for_by_both(
    two_ranks: TwoRanks,
) -> None:
    def run(rank: int, ranks: Any) -> Any:
        runner, ended = Rank(ranks=ranks), []
        worker = worker_of(runner, ranks)
        worker.begin(request("one", 1, awaits_load=True), SERVER)
        for loaded_by in (None, 0, 1):
            if rank == loaded_by:
                worker.loaded("one", whole=True)
            ended.append([each.whole for each in worker.advance(SLOTS, 1000, 1000)])
        return runner.forwards, ended

    one, other = two_ranks.run(run)
    assert one == other
    assert one[1] == [[], [], [True]]


def test_what_is_aborted_while_it_is_loaded_ends_on_all_ranks_with_the_last_load(
    two_ranks: TwoRanks,
) -> None:
    def run(rank: int, ranks: Any) -> Any:
        runner, ended = Rank(ranks=ranks), []
        worker = worker_of(runner, ranks)
        for name, exact_blocks in (("gone", 1), ("alive", 2)):
            worker.begin(request(name, exact_blocks, awaits_load=name == "gone"), SERVER)
        worker.finished({"gone"})
        for loaded_by in (None, 0, 1):
            if rank == loaded_by:
                worker.loaded("gone", whole=True)
            over = worker.advance(SLOTS, 1000, 1000)
            ended.append([(each.request_id, each.whole) for each in over])
        return runner.forwards, ended

    one, other = two_ranks.run(run)
    assert one == other
    forwards, ended = one
    assert ended == [[("alive", True)], [], [("gone", False)]]
    assert min(first for forward in forwards for _, first, _ in forward) == 64


def test_a_rank_that_cannot_score_its_heads_does_not_leave_the_other_waiting(
    two_ranks: TwoRanks,
) -> None:
    prompt = Prompt(torch.zeros(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    positions = np.arange(8)

    def run(rank: int, ranks: Any) -> str:
        def read_multiplied(blocks: torch.Tensor) -> torch.Tensor:
            if rank == 1:
                raise MemoryError("of one rank alone")
            return torch.ones(8, 1, 4)

        layer: Any = SimpleNamespace(sliding_window=None, impl=SimpleNamespace(scale=1.0))
        pages: Any = SimpleNamespace(tokens=8, read_multiplied=read_multiplied)
        nested: Any = SimpleNamespace(run=lambda parts: None)
        taps: Any = SimpleNamespace(
            until=lambda last, wanted: nullcontext({0: torch.ones(8, 1, 4)}),
            multiplied=lambda number, queries: queries,
        )
        runner = StepRunner(nested, [pages], [layer], taps, ranks)
        try:
            (scores,) = runner.run([prompt], [ScoreAttention(positions, positions[-1:], (0,))])
        except MemoryError:
            return "failed"
        assert scores.tolist() == [0.125] * 8
        return "scored"

    assert two_ranks.run(run) == ["scored", "failed"]


@dataclass
class Heads:
    """The model of a rank that has some heads; one forward makes *after* of their keys."""

    most_tokens: ClassVar[int] = 1000
    after: torch.Tensor  # (token,)
    ranks: Any
    breaks: bool = False  # when the keys before it are read
    keys: torch.Tensor = field(init=False)
    forwards: list[list[int]] = field(default_factory=list)  # positions of one prompt

    def __post_init__(self) -> None:
        self.keys = torch.zeros(len(self.after), 1, 1)

    def run(self, parts: Any) -> None:
        torch.distributed.all_reduce(torch.zeros(7), group=self.ranks.cpu_group)
        (part,) = parts
        self.forwards.append(part.positions.tolist())
        self.keys = self.after[:, None, None].clone()

    def read_blocks(self, blocks: torch.Tensor) -> list[torch.Tensor]:
        if self.breaks and not self.forwards:
            raise MemoryError("of one rank alone")
        return [self.keys, torch.zeros_like(self.keys)]

    def runner(self) -> StepRunner:
        model: Any = self
        taps: Any = SimpleNamespace(until=lambda last, wanted: nullcontext({}))
        return StepRunner(model, [model], [], taps, self.ranks)


def test_a_rank_that_cannot_read_what_was_there_does_not_leave_the_other_in_the_forward(
    two_ranks: TwoRanks,
) -> None:
    prompt = Prompt(torch.zeros(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))

    def run(rank: int, ranks: Any) -> str:
        heads = Heads(torch.full((8,), 3.0), ranks, breaks=rank == 1)
        try:
            (scores,) = heads.runner().run([prompt], [ScoreDeviation(np.arange(8), 0)])
        except MemoryError:
            return "failed"
        assert scores.tolist() == [9.0] * 8
        return "scored"

    assert two_ranks.run(run) == ["scored", "failed"]


def forwards_of(heads: Any, rule: Rule) -> list[list[int]]:
    """The positions of each forward in which *heads* blend one request by *rule*."""
    worker = worker_of(heads.runner(), heads.ranks, rule=lambda ratio: rule)
    worker.begin(request("one", 1), SERVER)
    (ended,) = worker.advance(SLOTS, 1000, 1000)
    assert ended.whole
    found: list[list[int]] = heads.forwards
    return found


def test_both_ranks_choose_what_deviates_most_over_the_heads_of_both(two_ranks: TwoRanks) -> None:
    """Of tokens 32 to 71, beyond the first four: 10 %, which are 4."""
    of_rank = torch.zeros(2, 200)
    of_rank[0, 40:44] = 4.0  # most by itself: 16
    of_rank[1, 50:54] = 4.0
    of_rank[:, 60:64] = 3.0  # 9 and 9

    def run(rank: int, ranks: Any) -> list[list[int]]:
        return forwards_of(Heads(of_rank[rank], ranks), HkvdRule(0.1, layer=0, layers=4))

    one, other = two_ranks.run(run)
    assert one == other
    assert one == [[*range(32, 192)], [*range(32, 36), *range(60, 64), *range(72, 192)]]


@dataclass
class AttendingHeads:
    """The model of a rank that has one head, all of whose queries are 1."""

    most_tokens: ClassVar[int] = 1000
    products: torch.Tensor  # (token,), of each query with that key
    ranks: Any
    tokens: int = BLOCK_TOKENS
    forwards: list[list[int]] = field(default_factory=list)  # positions of one prompt
    queries: dict[int, torch.Tensor] = field(default_factory=dict)

    def run(self, parts: Any) -> None:
        torch.distributed.all_reduce(torch.zeros(7), group=self.ranks.cpu_group)
        (part,) = parts
        self.forwards.append(part.positions.tolist())
        self.queries[0] = torch.ones(len(part.positions), 1, 1)

    def read_multiplied(self, blocks: torch.Tensor) -> torch.Tensor:
        return self.products[:, None, None]

    def runner(self) -> StepRunner:
        model: Any = self
        layer: Any = SimpleNamespace(sliding_window=None, impl=SimpleNamespace(scale=1.0))
        taps: Any = SimpleNamespace(
            until=lambda last, wanted: nullcontext(self.queries),
            multiplied=lambda number, queries: queries,
        )
        return StepRunner(model, [model], [layer], taps, self.ranks)


def test_both_ranks_choose_in_both_rounds_what_any_head_of_either_attends_to_most(
    two_ranks: TwoRanks,
) -> None:
    """Of tokens 32 to 71, beyond the first four: 10 %, which are 4. By itself neither would choose so."""
    of_rank = torch.zeros(2, 200)
    of_rank[0, [40, 41, 42, 43]] = torch.tensor([8.0, 8.0, 7.0, 7.0])
    of_rank[1, [50, 51]] = 9.0

    def run(rank: int, ranks: Any) -> list[list[int]]:
        return forwards_of(
            AttendingHeads(of_rank[rank], ranks), TwoRoundQueryRule(0.1, scored=(0,), layers=1)
        )

    one, other = two_ranks.run(run)
    assert one == other
    asked, second, recomputed = one
    assert asked == [*range(32, 36), *range(72, 200)]
    assert second == [50, 51]
    assert recomputed == [*range(32, 36), 40, 41, 50, 51, *range(72, 192)]

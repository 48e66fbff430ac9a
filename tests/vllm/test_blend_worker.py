"""A worker's turns: who runs next and with whom, and what an audited request goes through."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvstrata.blend.plan import BlendPlan, Positions, ReusedRuns
from kvstrata.blend.rules import TwoRoundQueryRule
from kvstrata.blend.selection import Recompute
from kvstrata.integration.vllm.blend.metadata import BlendRequestMeta
from kvstrata.integration.vllm.blend.worker import BlendWorker

BLOCK_TOKENS = 32
REUSED_TOKENS = 40
NOTHING = np.empty(0, np.int64)
SERVER = bytes(16)
NO_SLOTS: Any = SimpleNamespace(server_id=SERVER, slots=0, generations=NOTHING)


@dataclass
class Recorder:
    """A ``StepRunner`` that only writes down what it was given: kind, first token, tokens."""

    forwards: list[list[tuple[str, int, int]]] = field(default_factory=list)

    def run(self, prompts: Any, steps: Any) -> list[np.ndarray[Any, Any]]:
        kinds = ["recompute" if isinstance(step, Recompute) else "score" for step in steps]
        self._add(zip(kinds, (step.positions for step in steps), strict=True))
        return [np.zeros(len(prompt.tokens), np.float32) for prompt in prompts]

    def predict(self, prompt: Any, positions: Positions) -> None:
        self._add([("predict", positions)])

    def _add(self, steps: Any) -> None:
        self.forwards.append([(kind, int(each[0]), len(each)) for kind, each in steps])


@dataclass
class Layer:
    """``TokenPages`` of nothing, and a ``PositionCorrector`` that leaves keys as they are."""

    tokens: int = BLOCK_TOKENS

    def read(self, pages: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(REUSED_TOKENS), torch.zeros(REUSED_TOKENS)

    def write(self, *anything: Any) -> None:
        pass

    def rotation(self, *anything: Any) -> Any:
        return SimpleNamespace(apply=lambda keys: keys)

    def __hash__(self) -> int:
        return id(self)


def worker_of(runner: Recorder) -> BlendWorker:
    layer: Any = Layer()
    source: Any = SimpleNamespace(read=lambda *anything: None)
    ranks: Any = SimpleNamespace(world_size=1)
    stand_in: Any = runner
    return BlendWorker(
        [layer],
        [layer],
        source,
        stand_in,
        lambda ratio: TwoRoundQueryRule(ratio, sink_tokens=0),
        ranks,
    )


def request(
    name: str, exact_blocks: int, *, is_audited: bool = False, awaits_load: bool = False
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
        slots=NOTHING,
        generations=NOTHING,
        first_row=np.zeros(1, np.int64),
        ratio=0.15,
        is_audited=is_audited,
        awaits_load=awaits_load,
    )


def test_a_step_that_was_split_goes_on_before_an_older_request_begins() -> None:
    """All requests write what is behind their last device block into the same one."""
    runner = Recorder()
    worker = worker_of(runner)
    worker.begin(request("older", 1, is_audited=True, awaits_load=True), SERVER)
    worker.begin(request("younger", 2, is_audited=True), SERVER)
    worker.advance(None, 100)
    worker.loaded("older", whole=True)
    worker.advance(None, 100)
    assert runner.forwards == [
        [("recompute", 64, 100)],
        [("predict", 164, 36)],
        [("recompute", 32, 64)],
    ]


def test_requests_share_forwards_but_for_the_block_of_what_has_none() -> None:
    runner = Recorder()
    worker = worker_of(runner)
    for name, exact_blocks in (("older", 1), ("younger", 2)):
        worker.begin(request(name, exact_blocks), SERVER)
    assert len(worker.advance(NO_SLOTS, 1000)) == 2
    assert runner.forwards == [
        [("score", 72, 128)],  # up to the prompt's end, as the younger one's first
        [("score", 32, 3), ("score", 104, 96)],
        [("score", 64, 3)],
        [("recompute", 32, 126), ("recompute", 64, 94)],
    ]


def test_what_the_budget_does_not_hold_waits_and_the_oldest_ends_first() -> None:
    runner = Recorder()
    worker = worker_of(runner)
    for name, exact_blocks in (("older", 1), ("younger", 2)):
        worker.begin(request(name, exact_blocks), SERVER)
    ended: list[str] = []
    while len(ended) < 2:
        runner.forwards.clear()
        ended += [end.request_id for end in worker.advance(NO_SLOTS, 50)]
        tokens = [tokens for forward in runner.forwards for _, _, tokens in forward]
        assert 0 < sum(tokens) <= 50
    assert ended == ["older", "younger"]

"""A worker's turns: who runs next, and what an audited request goes through."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvstrata.blend.plan import BlendPlan, Positions, ReusedRuns
from kvstrata.integration.vllm.blend.metadata import BlendRequestMeta
from kvstrata.integration.vllm.blend.worker import BlendWorker

BLOCK_TOKENS = 32
NOTHING = np.empty(0, np.int64)
SERVER = bytes(16)


@dataclass
class Recorder:
    """A ``StepRunner`` that only writes down what it was given: first token, tokens."""

    steps: list[tuple[int, int]] = field(default_factory=list)

    def run(self, prompt: Any, step: Any) -> np.ndarray[Any, Any]:
        self._add(step.positions)
        return np.empty(0, np.float32)

    def predict(self, prompt: Any, positions: Positions) -> None:
        self._add(positions)

    def _add(self, positions: Positions) -> None:
        self.steps.append((int(positions[0]), len(positions)))


def audited(name: str, exact_blocks: int, *, awaits_load: bool) -> BlendRequestMeta:
    """A request whose prompt is computed exactly first, behind its exact prefix."""
    exact_end = exact_blocks * BLOCK_TOKENS
    run = ReusedRuns(np.array([exact_end]), np.array([40]), np.array([7]), np.zeros(1, np.bool_))
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
        is_audited=True,
        awaits_load=awaits_load,
    )


def test_a_step_that_was_split_goes_on_before_an_older_request_begins() -> None:
    """All requests write what is behind their last device block into the same one."""
    runner = Recorder()
    ranks: Any = SimpleNamespace(world_size=1)
    nobody: Any = None
    worker = BlendWorker([], [], nobody, runner, nobody, ranks)  # type: ignore[arg-type]
    worker.begin(audited("older", 1, awaits_load=True), SERVER)
    worker.begin(audited("younger", 2, awaits_load=False), SERVER)
    worker.advance(None, 100)
    worker.loaded("older", whole=True)
    worker.advance(None, 100)
    assert runner.steps == [(64, 100), (164, 36), (32, 64)]

"""The states of a task: every event in every state, written out."""

import pytest

from kvstrata.core.errors import InvariantViolated
from kvstrata.manager.tasks import FINAL, TaskEvent, TaskState, step

MOVES = {
    ("searching", "found"): "promoting",
    ("searching", "launch"): "running",
    ("searching", "cancel"): "cancelled",
    ("searching", "fail"): "failed",
    ("promoting", "promote"): "ready",
    ("promoting", "launch"): "running",
    ("promoting", "cancel"): "cancelled",
    ("promoting", "fail"): "failed",
    ("ready", "release"): "done",
    ("ready", "launch"): "running",
    ("ready", "cancel"): "cancelled",
    ("ready", "fail"): "failed",
    ("running", "complete"): "done",
    ("running", "fail"): "failed",
    ("running", "cancel"): "stopping",
    ("stopping", "complete"): "cancelled",
    ("stopping", "fail"): "cancelled",
}
PREMATURE = {
    ("searching", "complete"),
    ("searching", "release"),
    ("promoting", "complete"),
    ("promoting", "release"),
    ("ready", "complete"),
}


@pytest.mark.parametrize("event", TaskEvent)
@pytest.mark.parametrize("state", TaskState)
def test_table_of_states_is_as_written_here(state: TaskState, event: TaskEvent) -> None:
    cell = (state.value, event.value)
    if cell in PREMATURE:
        with pytest.raises(InvariantViolated, match=f"cannot {event.value} while {state.value}"):
            step(state, event)
    else:
        assert step(state, event).value == MOVES.get(cell, state.value)


def test_nothing_moves_a_task_that_has_ended() -> None:
    assert {state.value for state in FINAL} == {"done", "failed", "cancelled"}
    assert not {state for state, _ in MOVES} & {"done", "failed", "cancelled"}

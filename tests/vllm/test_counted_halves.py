"""What `make operations` counts of the connector: work of either half, on whatever thread."""

from functools import partial
from typing import Any

import pytest
from bench.operations import engine_copies
from bench.operations.engine_copies import Half
from bench.operations.hot_paths import HotPath
from tests.hot_paths import with_another_system_call

from kvstrata.integration.vllm.loads import Loads
from kvstrata.integration.vllm.pieces import Pieces
from kvstrata.integration.vllm.saves import Saves
from kvstrata.transfer.guarded import RankSlots


@pytest.mark.parametrize(
    ("turns", "half", "owner", "method"),
    [
        (engine_copies.save, "scheduler", Saves, "take_plans"),
        (engine_copies.load, "scheduler", Loads, "plan"),
        (engine_copies.save, "worker", RankSlots, "is_current"),
        (engine_copies.load, "worker", Pieces, "of_load"),
    ],
)
def test_another_system_call_is_seen(turns: Any, half: Half, owner: type, method: str) -> None:
    path = HotPath("prompts", partial(turns, half=half), 1)
    before, after = with_another_system_call(path, owner, method)
    assert after["system calls"] > before.get("system calls", 0)
    assert after["instructions"] > before["instructions"]

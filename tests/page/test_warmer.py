"""Orders to bring prompts up: one at a time, and each ends."""

import threading
from pathlib import Path

import pytest
from tests.caches import ALICE, PATIENCE_SECONDS, config, eventually, keys, save
from tests.server.harness import serving

from kvstrata.core.errors import ConfigError, LimitExceeded
from kvstrata.core.keys import Keys
from kvstrata.server.page.warmer import Warmer, WarmState

PROMPT = keys(1, 2, 3)


def state_at_the_end(warmer: Warmer) -> WarmState:
    eventually(lambda: warmer.state is not None and warmer.state.is_over, "it never ends")
    assert warmer.state is not None
    return warmer.state


def test_another_order_waits_for_the_end_and_one_that_finds_nothing_leaves_nothing(
    tmp_path: Path,
) -> None:
    go = threading.Event()

    def slowly() -> list[Keys]:
        assert go.wait(PATIENCE_SECONDS)
        return [PROMPT, keys(4)]

    def wrongly() -> list[Keys]:
        raise ConfigError("no such prompt")

    with serving(config(8), tmp_path / "s") as server:
        assert server.manager is not None
        save(server.manager, ALICE, PROMPT)
        warmer = Warmer(tmp_path / "s")
        with pytest.raises(ConfigError, match="no such prompt"):
            warmer.begin(ALICE, "a", wrongly).result(PATIENCE_SECONDS)
        assert not warmer.state
        first = warmer.begin(ALICE, "b", slowly)
        with pytest.raises(LimitExceeded, match="other prompts are being brought up"):
            warmer.begin(ALICE, "c", list)
        go.set()
        begun = first.result(PATIENCE_SECONDS)
        assert (begun.prompts, begun.asked_blocks, begun.is_over) == (2, 4, False)
        ended = state_at_the_end(warmer)
        assert (ended.ended_prompts, ended.host_blocks) == (2, 3)


def test_a_server_that_is_gone_is_told_and_the_next_order_is_taken(tmp_path: Path) -> None:
    warmer = Warmer(tmp_path / "s")
    for name in ("a", "b"):
        eventually(lambda: not warmer._order.locked(), "the order before never ends")
        warmer.begin(ALICE, name, lambda: [PROMPT]).result(PATIENCE_SECONDS)
        ended = state_at_the_end(warmer)
        assert ended.name == name
        assert "no server answers" in (ended.problem or "")

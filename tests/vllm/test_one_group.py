"""The end of a request as MultiConnector tells it beside a connector that knows one group only."""

from pathlib import Path

import pytest
from tests.vllm.bench import prompt, start
from tests.vllm.fake_runner import TOKENS
from tests.vllm.plans import model_folder
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash


def test_what_the_last_step_completed_is_saved_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init_none_hash(sha256)
    with start(model_folder(tmp_path), 100) as bench:
        engine = bench.engine()
        connector = engine.connector
        monkeypatch.setattr(
            connector,
            "request_finished_all_groups",
            lambda request, block_ids: connector.request_finished(request, block_ids[0]),
        )
        # The last token that is computed ends a block: only the end of the request tells of it.
        engine.serve("one", prompt(1, 2 * TOKENS), TOKENS + 1)
        assert len(bench.saved_keys()) == 3
        assert engine.half._requests == {}
        engine.forget_device()
        assert engine.serve("again", prompt(1, 2 * TOKENS + 1), 2) == 2 * TOKENS

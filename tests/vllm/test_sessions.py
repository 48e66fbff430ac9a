"""Sessions, vLLM's streaming input: one request id, whose prompt grows after each answer."""

import random

import pytest
from tests.vllm.bench import MODES, Bench, prompt
from tests.vllm.fake_runner import continuation
from vllm.v1.request import Request, RequestStatus

# With drafts and no asynchronous scheduling vLLM 0.32 itself counts drafts behind a stop as computed.
SOUND = {name: mode for name, mode in MODES.items() if name != "sync-drafts"}


@pytest.mark.parametrize(("asynchronous", "drafts"), SOUND.values(), ids=SOUND)
def test_a_session_is_answered_and_saved_as_what_it_says_in_the_end(
    bench: Bench, asynchronous: bool, drafts: int
) -> None:
    """Of each answer the last token goes: no forward has seen it."""
    engine = bench.engine(asynchronous=asynchronous, drafts=drafts)
    rng = random.Random(3)
    session: Request | None = None
    tokens: list[int] = []
    for i in range(12):
        said, count = prompt(i, rng.randint(1, 40)), rng.randint(1, 9)
        added = engine.add("session", said, count, resumable=True)
        session = engine.requests["session"] = session or added
        tokens = tokens[:-1] + said
        answer = continuation(tokens, count)
        while session.status is not RequestStatus.WAITING_FOR_STREAMING_REQ or engine.in_flight:
            if session.status is RequestStatus.WAITING_FOR_STREAMING_REQ:
                engine.finish_step()
            else:
                engine.step()
        assert list(session.output_token_ids) == answer
        tokens += answer
    engine.scheduler.finish_requests(["session"], RequestStatus.FINISHED_ABORTED)
    engine.run()
    saved = (len(tokens) - 1) // 8
    assert len(bench.saved_keys()) == bench.check_saved_bytes(engine) == saved
    assert not engine.leftovers()
    engine.forget_device()
    assert engine.serve("again", tokens, 2) == saved * 8

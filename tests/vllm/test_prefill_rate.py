"""What a scheduler's steps say about how fast the engine computes prompts."""

import time

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from kvstrata.integration.vllm.prefill_rate import PrefillRate


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return clock


def step(**tokens: int) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = dict(tokens)
    output.total_num_scheduled_tokens = sum(tokens.values())
    return output


def steps(rate: PrefillRate, now: list[float], seconds: float, *outputs: SchedulerOutput) -> None:
    for output in outputs:
        rate.step(output)
        now[0] += seconds


def test_step_takes_until_the_next_of_the_same_requests(now: list[float]) -> None:
    rate = PrefillRate()
    steps(rate, now, 0.5, step(a=1000), step(a=1, b=500))
    assert rate.tokens_per_second == 2000
    steps(rate, now, 0.5, step(b=1))
    assert rate.tokens_per_second == pytest.approx(2000 - 0.2 * (2000 - 1002))


def test_time_between_requests_is_not_computing(now: list[float]) -> None:
    rate = PrefillRate()
    steps(rate, now, 60.0, step(a=1000), step(b=1000), step(), step(c=1000))
    assert rate.tokens_per_second is None


def test_decoding_says_nothing(now: list[float]) -> None:
    rate = PrefillRate()
    many = {f"r{i}": 1 for i in range(300)}
    steps(rate, now, 0.1, step(**many), step(**many), step(a=200), step(a=1))
    assert rate.tokens_per_second is None


def test_only_news_are_told_and_not_too_often(now: list[float]) -> None:
    rate = PrefillRate()
    assert rate.news() is None
    steps(rate, now, 1.0, step(a=1000), step(a=1000))
    assert rate.news() == 1000
    assert rate.news() is None
    now[0] += 5.0
    assert rate.news() is None
    rate.tokens_per_second = 1200
    assert rate.news() == 1200
    rate.tokens_per_second = 2400
    assert rate.news() is None
    now[0] += 1.0
    assert rate.news() == 2400


def test_new_server_is_told(now: list[float]) -> None:
    rate = PrefillRate()
    steps(rate, now, 1.0, step(a=1000), step(a=1000))
    assert rate.news() == 1000
    now[0] += 5.0
    rate.tell_again()
    assert rate.news() == 1000

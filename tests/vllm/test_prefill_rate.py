"""What a scheduler's steps say about how fast the engine computes prompts."""

import time
from typing import Any

import pytest
from tests.vllm.bench import Bench, prompt
from vllm.v1.core.sched.output import SchedulerOutput

from kvstrata.integration.vllm import prefill_rate
from kvstrata.integration.vllm.prefill_rate import PrefillRate


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return clock


def step(*new: str, **tokens: int) -> SchedulerOutput:
    """*new*: requests that are in a step for the first time."""
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = list(new)  # they are counted
    output.num_scheduled_tokens = dict(tokens)
    output.total_num_scheduled_tokens = sum(tokens.values())
    return output


def steps(
    rate: PrefillRate,
    now: list[float],
    seconds: float,
    *outputs: SchedulerOutput,
    requests: int = 1,
) -> None:
    for output in outputs:
        rate.step(output, requests=requests)
        now[0] += seconds


def test_step_takes_until_the_next_of_the_same_requests(now: list[float]) -> None:
    rate = PrefillRate(ahead=0)
    steps(rate, now, 0.5, step(a=1000), step(a=1, b=500))
    assert rate.tokens_per_second == 2000
    steps(rate, now, 0.5, step(b=1))
    assert rate.tokens_per_second == 2000  # of most of the tokens


def test_what_the_first_steps_compile_is_soon_forgotten(now: list[float]) -> None:
    rate = PrefillRate(ahead=0)
    steps(rate, now, 20.0, step(a=1000))
    steps(rate, now, 0.5, step(a=1000), step(a=1))
    assert rate.tokens_per_second == 2000


def test_a_long_prompt_counts_for_more_than_short_ones(now: list[float]) -> None:
    rate = PrefillRate(ahead=0)
    steps(rate, now, 0.2, step(a=8000), *[step(a=300) for _ in range(9)], step(a=1))
    assert rate.tokens_per_second == pytest.approx(8000 / 0.2)


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_was_aborted_may_still_run(now: list[float], ahead: int) -> None:
    rate = PrefillRate(ahead)
    steps(rate, now, 0.01, step("a", a=8000))
    rate.ended("a", was_aborted=True)
    for request in "bcde":
        steps(rate, now, 0.2, step(request, **{request: 1000}))
        rate.ended(request, was_aborted=False)
    assert rate.tokens_per_second == pytest.approx(5000)
    assert len(rate._last) == 4 - ahead - 2


def test_a_step_is_measured_once(now: list[float]) -> None:
    rate = PrefillRate(ahead=0)
    steps(rate, now, 0.5, step("a", "b", a=500, b=500), requests=2)
    rate.ended("b", was_aborted=False)
    steps(rate, now, 0.5, step(a=1), step(a=1))
    assert len(rate._last) == 1


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_request_of_one_step_has_its_end(now: list[float], ahead: int) -> None:
    rate = PrefillRate(ahead)
    steps(rate, now, 0.5, step("a", a=1000))
    steps(rate, now, 60.0, step("b", b=1000), requests=2)  # it waits for the first
    rate.ended("a", was_aborted=False)
    assert rate.tokens_per_second == pytest.approx(1000 / 60.5)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_whose_end_is_not_known_says_nothing(now: list[float], ahead: int) -> None:
    rate = PrefillRate(ahead)
    steps(rate, now, 0.5, step("a", a=1000))
    rate.ended("a", was_aborted=True)
    steps(rate, now, 0.5, step(), step(), step(), requests=0)
    steps(rate, now, 0.5, step("b", b=1000), requests=2)  # another one may be in a step
    rate.ended("b", was_aborted=False)
    steps(rate, now, 0.5, step(c=1000))  # it was in one before
    rate.ended("c", was_aborted=False)
    steps(rate, now, 0.5, step("d", d=100))
    rate.ended("d", was_aborted=False)
    assert rate.tokens_per_second is None


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_request_that_goes_on_ends_no_step(now: list[float], ahead: int) -> None:
    rate = PrefillRate(ahead)
    steps(rate, now, 0.5, step("a", a=1000), step(a=1))
    before = rate.tokens_per_second
    now[0] += 60.0
    rate.ended("a", was_aborted=False)
    assert rate.tokens_per_second == before


def test_time_between_requests_is_not_computing(now: list[float]) -> None:
    rate = PrefillRate(ahead=0)
    steps(rate, now, 60.0, step(a=1000), step(b=1000), step(), step(c=1000))
    assert rate.tokens_per_second is None


def test_of_steps_ahead_the_oldest_ends_when_the_next_is_scheduled(now: list[float]) -> None:
    """Asynchronous scheduling: the second step is scheduled at once, each one after that at an end."""
    rate = PrefillRate(ahead=1)
    steps(rate, now, 0.001, step(a=1000))
    steps(rate, now, 0.5, step(a=1))
    while_it_runs = rate.tokens_per_second
    steps(rate, now, 0.01, step(a=1))
    assert (while_it_runs, rate.tokens_per_second) == (None, 2000)
    steps(rate, now, 0.01, step(a=1), step(a=1))
    assert rate.tokens_per_second == 2000


def test_time_between_requests_is_not_computing_with_steps_ahead_either(now: list[float]) -> None:
    rate = PrefillRate(ahead=1)
    steps(rate, now, 0.001, step(a=1000))
    steps(rate, now, 60.0, step(a=1))  # it ends, and so does the request
    steps(rate, now, 0.001, step(b=1000))
    steps(rate, now, 0.5, step(b=1), step(b=1))
    assert rate.tokens_per_second == 2000


def test_decoding_says_nothing(now: list[float]) -> None:
    rate = PrefillRate(ahead=0)
    many = {f"r{i}": 1 for i in range(300)}
    steps(rate, now, 0.1, step(**many), step(**many), step(a=200), step(a=1))
    assert rate.tokens_per_second is None


def test_only_news_are_told_and_not_too_often(now: list[float]) -> None:
    rate = PrefillRate(ahead=0)
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
    rate = PrefillRate(ahead=0)
    steps(rate, now, 1.0, step(a=1000), step(a=1000))
    assert rate.news() == 1000
    now[0] += 5.0
    rate.tell_again()
    assert rate.news() == 1000


@pytest.mark.parametrize("answer_tokens", [1, 4])
@pytest.mark.parametrize("prompt_steps", [1, 3])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_step_counts_as_sooner_done_than_it_was(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    asynchronous: bool,
    prompt_steps: int,
    answer_tokens: int,
) -> None:
    """The step behind is scheduled while this one computes: that is no end of it."""
    step_tokens, step_seconds = 32, 0.05
    monkeypatch.setattr(prefill_rate, "_LEAST_TOKENS", 16)
    engine = bench.engine(asynchronous=asynchronous)
    execute = engine.runner.execute

    def slow(output: Any) -> Any:
        if output.total_num_scheduled_tokens >= 16:
            time.sleep(step_seconds)
        return execute(output)

    monkeypatch.setattr(engine.runner, "execute", slow)
    for number in range(3):
        engine.serve(f"r{number}", prompt(number, prompt_steps * step_tokens), answer_tokens)
    rate = engine.half._rate.tokens_per_second
    assert rate is not None
    assert rate <= step_tokens / step_seconds

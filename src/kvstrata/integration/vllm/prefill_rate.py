"""How fast the engine computes prompts, seen from its scheduler's steps."""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Final

from vllm.v1.core.sched.output import SchedulerOutput

_LEAST_TOKENS: Final = 256  # a step of fewer says more about its overhead
_LEAST_TOKENS_A_REQUEST: Final = 16  # and one of fewer is mostly decoding
_LAST: Final = 16  # measurements
_NEWS: Final = 0.1  # a change by this share is worth telling
_PAUSE_SECONDS: Final = 1.0  # between two tellings


_Step = tuple[int, Mapping[str, int], float]  # tokens, by request, and when it was scheduled


class PrefillRate:
    """Tokens a second of steps that mostly prefill: that of half of the tokens of the last ones.

    So the first step, which may compile, counts for little once there is another, and short ones,
    which take as long as longer ones where a GPU waits for its launches, for what they hold.

    The engine schedules *ahead* steps while another runs, the last of these when that begins, and
    one more when it has ended. That holds if a request goes on from each of them to the next: then
    the engine has not waited in between. And a step that begins when nothing runs has ended when
    one of its requests has, if that is in no step behind it. What an aborted request was in may
    go on.
    """

    def __init__(self, ahead: int) -> None:
        self.tokens_per_second: float | None = None
        self._last: deque[tuple[float, int]] = deque(maxlen=_LAST)  # and of how many tokens
        self._told: float | None = None
        self._told_at = 0.0
        self._reach = ahead + 2
        self._steps = deque[_Step](maxlen=self._reach)  # the last ones
        self._lone: _Step | None = None  # began when nothing ran; none of its requests went on
        self._unclear_steps = 0  # that may begin while one of an aborted request runs

    def step(self, output: SchedulerOutput, *, requests: int, is_pure: bool = True) -> None:
        """The step of *output* is scheduled; it computes and does nothing else if *is_pure*.

        *requests*: how many have not ended, in this step or not.
        """
        tokens = output.total_num_scheduled_tokens if is_pure else 0
        scheduled = output.num_scheduled_tokens
        step = tokens, scheduled, time.monotonic()
        self._steps.append(step)
        ended, theirs, _ = self._steps[0]
        if ended >= _LEAST_TOKENS and len(self._steps) == self._reach:
            self._measure(ended, theirs)
        if self._unclear_steps:
            self._unclear_steps -= 1
        elif tokens >= _LEAST_TOKENS and (
            len(output.scheduled_new_reqs) == len(scheduled) == requests
        ):
            self._lone = step
            return
        if self._lone is not None and not self._lone[1].keys().isdisjoint(scheduled):
            self._lone = None

    def ended(self, request_id: str, *, was_aborted: bool) -> None:
        """*request_id* will be in no step any more, whether or not its last one *was_aborted*."""
        if was_aborted:
            self._unclear_steps = self._reach
        if (lone := self._lone) is None or request_id not in lone[1]:
            return
        self._lone = None
        if not was_aborted:
            tokens, requests, began = lone
            self._note(tokens, requests, time.monotonic() - began)
            self._steps.clear()  # or it would be measured again if another of its requests goes on

    def _measure(self, tokens: int, requests: Mapping[str, int]) -> None:
        """The first of the steps had *tokens* of *requests*."""
        goes_on = all(
            not one.keys().isdisjoint(other) for (_, one, _), (_, other, _) in pairwise(self._steps)
        )
        if goes_on:
            self._note(tokens, requests, self._steps[-1][2] - self._steps[-2][2])

    def _note(self, tokens: int, requests: Mapping[str, int], seconds: float) -> None:
        if seconds > 0 and tokens >= _LEAST_TOKENS_A_REQUEST * len(requests):
            self._last.append((tokens / seconds, tokens))
            fastest_first = sorted(self._last, reverse=True)
            sums = list(accumulate(count for _, count in fastest_first))
            self.tokens_per_second = fastest_first[bisect_left(sums, sums[-1] / 2)][0]

    def news(self) -> float | None:
        """The rate, if it has changed so that the server should know."""
        rate = self.tokens_per_second
        if rate is None or (self._told is not None and abs(rate - self._told) < _NEWS * self._told):
            return None
        now = time.monotonic()
        if now - self._told_at < _PAUSE_SECONDS:
            return None
        self._told, self._told_at = rate, now
        return rate

    def tell_again(self) -> None:
        """There is a new server, which has not been told."""
        self._told = None

"""How fast the engine computes prompts, seen from its scheduler's steps."""

import time
from collections.abc import Mapping
from typing import Final

from vllm.v1.core.sched.output import SchedulerOutput

_LEAST_TOKENS: Final = 256  # a step of fewer says more about its overhead
_LEAST_TOKENS_A_REQUEST: Final = 16  # and one of fewer is mostly decoding
_WEIGHT: Final = 0.2  # of a new measurement in the running mean
_NEWS: Final = 0.1  # a change by this share is worth telling
_PAUSE_SECONDS: Final = 1.0  # between two tellings


class PrefillRate:
    """Tokens a second of steps that mostly prefill; a running mean.

    A step has taken until the next one begins, if a request goes on from one to the other: then
    the engine has not waited in between.
    """

    def __init__(self) -> None:
        self.tokens_per_second: float | None = None
        self._told: float | None = None
        self._told_at = 0.0
        self._began = 0.0
        self._tokens = 0
        self._requests: Mapping[str, int] = {}

    def step(self, output: SchedulerOutput, *, is_pure: bool = True) -> None:
        """The step of *output* begins; it computes and does nothing else if *is_pure*."""
        now = time.monotonic()
        requests = output.num_scheduled_tokens
        counts = self._tokens >= max(_LEAST_TOKENS, _LEAST_TOKENS_A_REQUEST * len(self._requests))
        if counts and now > self._began and not requests.keys().isdisjoint(self._requests):
            measured = self._tokens / (now - self._began)
            known = self.tokens_per_second
            self.tokens_per_second = (
                measured if known is None else known + _WEIGHT * (measured - known)
            )
        self._began, self._requests = now, requests
        self._tokens = output.total_num_scheduled_tokens if is_pure else 0

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

"""Requests that wait for blocks which another engine is about to store: the decode half of P/D."""

import logging
import time
from collections.abc import Mapping
from typing import Final

from vllm.v1.request import Request

from kvstrata.integration.vllm.request_params import MOST_WAIT_SECONDS, WAIT_SECONDS

__all__ = ["Awaits"]

_log = logging.getLogger(__name__)

_OURS: Final = "kvstrata_"
_MOST: Final = 16  # unknown names that are warned of


class Awaits:
    """Until when each request waits: ``kv_transfer_params: {"kvstrata_wait_seconds": 2}``.

    From the first time that the scheduler asks for it, 60 seconds at most. A value that is no
    such number is logged and counts as 0: a request is never refused for it.
    """

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._warned: set[str] = set()

    def is_on(self, request: Request) -> bool:
        """Whether *request* waits at this moment."""
        params = request.kv_transfer_params
        if not params:
            return False
        if WAIT_SECONDS not in params:
            self._warn_of_unknown(params)
            return False
        until = self._until.get(request.request_id)
        if until is None:
            until = time.monotonic() + _seconds(params[WAIT_SECONDS])
            self._until[request.request_id] = until
        return time.monotonic() < until

    def _warn_of_unknown(self, params: Mapping[str, object]) -> None:
        for name in params:
            if name.startswith(_OURS) and name not in self._warned and len(self._warned) < _MOST:
                self._warned.add(name)
                _log.warning(
                    "%.50r in kv_transfer_params is unknown: did you mean %s?", name, WAIT_SECONDS
                )

    def finished(self, request_id: str) -> None:
        self._until.pop(request_id, None)


def _seconds(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and 0 <= (seconds := float(str(value))) <= MOST_WAIT_SECONDS:  # as no NaN is
        return seconds
    _log.warning(
        "%s in kv_transfer_params is %.50r and not a number of seconds from 0 to %d: not waited",
        WAIT_SECONDS,
        value,
        MOST_WAIT_SECONDS,
    )
    return 0.0

"""How long a call of a store may take, all its tries and steps together."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

__all__ = ["call_within", "end_within"]

_end: Final = ContextVar("end of the call of this thread", default=math.inf)


@contextmanager
def call_within(seconds: float) -> Iterator[None]:
    """What stores are asked for in here, on this thread, ends within *seconds*, or those around."""
    token = _end.set(end_within(seconds))
    try:
        yield
    finally:
        _end.reset(token)


def end_within(seconds: float) -> float:
    """When something has to end that may take *seconds*: then, or with the call that it is part of.

    Of ``time.monotonic``.
    """
    return min(time.monotonic() + seconds, _end.get())

"""Hot paths that do a little more than they should."""

import os
from typing import Any
from unittest.mock import patch

from bench.operations.hot_paths import HotPath, measure

__all__ = ["with_another_system_call"]


def with_another_system_call(
    path: HotPath, owner: type, method: str
) -> tuple[dict[str, int], dict[str, int]]:
    """What is counted of *path*, and what once each call of *method* makes a system call more."""
    before = measure(path)
    once = getattr(owner, method)

    def with_another(*args: Any, **kwargs: Any) -> Any:
        os.getppid()
        return once(*args, **kwargs)

    with patch.object(owner, method, with_another):
        after = measure(path)
    return before, after

"""Threads that lose the interpreter in the middle of everything."""

import sys
import threading
from collections.abc import Callable, Sequence


def in_turns(calls: Sequence[Callable[[], None]], meanwhile: Callable[[], None]) -> None:
    """Make *calls* on threads of their own, and *meanwhile* again and again until they have ended."""
    threads = [threading.Thread(target=call) for call in calls]
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            meanwhile()
    finally:
        sys.setswitchinterval(before)
        for thread in threads:
            thread.join()

"""How long a thread that computes keeps the interpreter from the others of its process."""

import sys
from typing import Final

__all__ = ["SWITCH_SECONDS", "hand_over_sooner"]

SWITCH_SECONDS: Final = 0.0002
"""Python's own 5 ms are far more than what our threads need it for, between calls that wait for a
disk or a GPU. Beside a thread that never waits, loads of an H200 reached 0.4 % of its link with 5 ms, and
20 % with this; of a disk's threads ``transfer/engine.py`` tells.
"""


def hand_over_sooner() -> None:
    """For the whole process; an interval that is shorter already stays."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))

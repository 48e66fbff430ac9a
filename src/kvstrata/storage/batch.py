"""What every store checks of a batch before it does anything."""

from collections.abc import Sequence

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.types import STORE_KEY_BYTES, StoreKey

__all__ = ["check_keys", "check_lengths"]


def check_keys(keys: Sequence[StoreKey | None]) -> None:
    """Raise ``InvariantViolated`` for a key of a wrong length; None stands for no parent."""
    for key in keys:
        if key is not None and len(key) != STORE_KEY_BYTES:
            raise InvariantViolated(f"a store key of {len(key)} bytes, expected {STORE_KEY_BYTES}")


def check_lengths(buffers: Sequence[memoryview], block_bytes: int, *, variable: bool) -> None:
    """Raise ``InvariantViolated`` for a buffer that holds no block, or no value if *variable*."""
    shortest = 1 if variable else block_bytes
    for buffer in buffers:
        if not shortest <= buffer.nbytes <= block_bytes:
            raise InvariantViolated(
                f"a buffer of {buffer.nbytes} bytes, expected {shortest} to {block_bytes}"
            )

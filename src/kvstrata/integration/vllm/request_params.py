"""What a request may say in vLLM's ``kv_transfer_params``, and, of ``TAINT_FROM``, an answer."""

from typing import Final

__all__ = ["BLEND", "MOST_WAIT_SECONDS", "TAINT_FROM", "WAIT_SECONDS"]

WAIT_SECONDS: Final = "kvstrata_wait_seconds"
MOST_WAIT_SECONDS: Final = 60.0
BLEND: Final = "blend"
TAINT_FROM: Final = "taint_from"

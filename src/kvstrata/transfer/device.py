"""What a device copy backend does: device blocks to rows of host memory, and back."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

__all__ = ["Bytes", "DeviceCopier"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class DeviceCopier(Protocol):
    """Copies device blocks of one worker and one KV cache group as opaque bytes.

    A row is one device block: the pages of the group's layers one after another, in its order.

    * Calls block until the bytes have arrived and may come from several threads.
    * The caller orders copies against the engine's kernels and owns the device blocks meanwhile.
    """

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Bytes of one page of each layer; their sum is a row."""
        ...

    @property
    def device_block_bytes(self) -> int: ...

    def copy_to_host(
        self, device_blocks: Sequence[int], rows: Bytes, layer: int | None = None
    ) -> None:
        """Gather device block ``device_blocks[i]`` into row i of *rows*.

        Args:
            device_blocks: Ids, length n; ``IndexError`` if one is not of this cache.
            rows: Host memory, shape (n, device_block_bytes), uint8, C-contiguous.
            layer: Index into ``page_bytes``: only that page of each row; None for all.
        """
        ...

    def copy_to_device(
        self, device_blocks: Sequence[int], rows: Bytes, layer: int | None = None
    ) -> None:
        """Scatter row i of *rows* into device block ``device_blocks[i]``; arguments as above."""
        ...

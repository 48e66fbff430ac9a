"""What a disk store holds, for tests, and a file system below it that others fill."""

import errno
import os
from collections.abc import Sequence

from kvstrata.core.types import StoreKey
from kvstrata.manager.manager import KVManager
from kvstrata.storage.disk import DiskStore
from kvstrata.storage.disk_system import FileSystem


class CrowdedFiles(FileSystem):
    """While ``is_full`` there is no room for a journal record, or not for blocks (*of_blocks*).

    ``refused``: bytes of what was not written.
    """

    def __init__(self, manager: KVManager, *, of_blocks: bool = False) -> None:
        """Below the disk tier of *manager*, and full."""
        self.is_full, self.of_blocks, self.refused = True, of_blocks, list[int]()
        storage = manager._storage.disk
        assert storage is not None
        storage.data._files._system = storage.data._journal._system = self

    def pwrite(self, fd: int, data: bytes | memoryview, offset_bytes: int) -> int:
        self._take(len(data), of_blocks=False)
        return super().pwrite(fd, data, offset_bytes)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset_bytes: int) -> int:
        self._take(sum(buffer.nbytes for buffer in buffers), of_blocks=True)
        return super().pwritev(fd, buffers, offset_bytes)

    def _take(self, size_bytes: int, *, of_blocks: bool) -> None:
        if self.is_full and of_blocks is self.of_blocks:
            self.refused.append(size_bytes)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def listed(store: DiskStore) -> list[tuple[StoreKey, StoreKey | None]]:
    """The blocks of *store* as ``stored`` gives them, each with its parent."""
    stored = store.stored()
    return [
        (key.tobytes(), parent.tobytes() if has_parent else None)
        for key, parent, has_parent in zip(*stored, strict=True)
    ]


def listed_keys(store: DiskStore) -> list[StoreKey]:
    return [key for key, _ in listed(store)]

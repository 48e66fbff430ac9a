"""Blocks as objects: how they are named, and what is read, written and found of them."""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstrata.core.types import NamespaceId, Read, StoreKey
from kvstrata.storage.call_time import end_within
from kvstrata.storage.remote.value import HEADER_BYTES, judge_header, judge_value

_NAMESPACE_HEX: Final = 2 * 16
_BLOCK_HEX: Final = 2 * 32
_SNAPSHOT: Final = "snapshot"
_OURS: Final = re.compile(rf"[0-9a-f]{{{_NAMESPACE_HEX}}}/[0-9a-f]{{{_BLOCK_HEX}}}")


@dataclass(frozen=True, slots=True)
class Names:
    """Names of objects: ``PREFIX/<namespace hex>/<block key hex>``.

    One block is one object, so that its name follows from its key alone: several blocks in one
    object would need a directory that says which, and every node would have to keep it up to date.

    >>> Names("kv").namespace(bytes(16))
    'kv/00000000000000000000000000000000'
    """

    prefix: str  # without slashes at its ends; may be empty

    def of(self, key: StoreKey) -> str:
        return f"{self.namespace(key[:16])}/{key[16:].hex()}"

    def namespace(self, namespace_id: NamespaceId) -> str:
        return f"{self._start}{namespace_id.hex()}"

    def snapshot(self, namespace_id: NamespaceId) -> str:
        """What the blocks of *namespace_id* were when they were last listed."""
        return f"{self.namespace(namespace_id)}/{_SNAPSHOT}"

    def is_snapshot(self, name: str) -> bool:
        return name.endswith(f"/{_SNAPSHOT}") and self.is_block(
            name.removesuffix(_SNAPSHOT) + "0" * _BLOCK_HEX
        )

    def key_of(self, name: str) -> StoreKey:
        """The key of *name*, which is a block's."""
        return bytes.fromhex(name[len(self._start) :].replace("/", ""))

    def namespace_of(self, name: str) -> NamespaceId:
        """The namespace of *name*, which is a block's or a snapshot's."""
        start = len(self._start)
        return bytes.fromhex(name[start : start + _NAMESPACE_HEX])

    def is_block(self, name: str) -> bool:
        """Whether *name* is one that ``of`` gives to some key."""
        return name.startswith(self._start) and _OURS.fullmatch(name, len(self._start)) is not None

    @property
    def _start(self) -> str:
        return f"{self.prefix}/" if self.prefix else ""


class Found(NamedTuple):
    """What an engine says of an object without showing it."""

    name: str
    stored_bytes: int
    modified_seconds: float  # since the epoch, by the engine's clock
    e_tag: str  # another one whenever it is written with other bytes; may be empty


class Given(NamedTuple):
    """A block to be written."""

    name: str
    header: bytes
    value: memoryview
    replaces: bool  # what is there already is too old


class Wanted:
    """A block to be read: where its bytes go, and what they prove to be.

    What has not been modified since ``fresh_since_seconds`` of the epoch is a miss.
    """

    def __init__(
        self, name: str, key: StoreKey, buffer: memoryview, fresh_since_seconds: float = 0.0
    ) -> None:
        self.name = name
        self.fate = Read.MISS
        self.e_tag = ""
        self._key = key
        self._buffer = buffer
        self._fresh_since_seconds = fresh_since_seconds

    def parts(self, stored_bytes: int, modified_seconds: float) -> Iterator[memoryview]:
        """Yield the buffers that the object's first bytes go to, each to be filled before the next.

        Yields none for an object that is too old, and none for the rest of what is no good.
        ``fate`` is known at the end. Raises ``InvariantViolated`` if the caller's buffer is
        shorter than its value.
        """
        if modified_seconds < self._fresh_since_seconds:
            return
        self.fate = Read.FAILED
        header = memoryview(bytearray(min(HEADER_BYTES, stored_bytes)))
        yield header
        self.fate = judge_header(header, self._key, stored_bytes, self._buffer.nbytes)
        if self.fate is Read.HIT:
            self.fate = Read.FAILED
            value = self._buffer[: stored_bytes - HEADER_BYTES]
            yield value
            self.fate = judge_value(header, value)

    def take(self, stored: memoryview, stored_bytes: int, modified_seconds: float) -> None:
        """Copy what is wanted of *stored*: the whole object, or its beginning if it is too long."""
        done_bytes = 0
        for part in self.parts(stored_bytes, modified_seconds):
            part[:] = stored[done_bytes : done_bytes + part.nbytes]
            done_bytes += part.nbytes


class Deadline:
    """When a call has to be over, at the latest *seconds* from now."""

    def __init__(self, seconds: float) -> None:
        self._end = end_within(seconds)

    def left_seconds(self) -> float:
        """More than 0; raises ``TimeoutError`` if nothing is left."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def first_of_each(names: Sequence[str]) -> list[int]:
    """Positions of the first occurrence of each name.

    >>> first_of_each(["a", "b", "a"])
    [0, 1]
    """
    first: dict[str, int] = {}
    for position, name in enumerate(names):
        first.setdefault(name, position)
    return list(first.values())

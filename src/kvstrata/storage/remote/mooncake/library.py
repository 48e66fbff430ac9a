"""Calls of the Mooncake library from many threads, each with a deadline that holds."""

import mmap
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from kvstrata.core.errors import ConfigError, InvariantViolated, TierUnavailable
from kvstrata.storage.mapping import HostMapping
from kvstrata.storage.remote.mooncake.faults import unavailable
from kvstrata.storage.remote.mooncake.process import LibraryProcess
from kvstrata.storage.remote.mooncake.wire import Get, Head, Orders, Piece, Put, Request
from kvstrata.storage.remote.value import HEADER_BYTES
from kvstrata.storage.store import MOST_CALLS

__all__ = ["MOST_KEYS", "Lane", "MooncakeLibrary"]

MOST_KEYS: Final = 128  # in one call of the library
_STRIDE_BYTES: Final = -(-HEADER_BYTES // 64) * 64
_NO_HEADER: Final = bytes(HEADER_BYTES)
_HEADERS_BYTES: Final = -(-MOST_KEYS * _STRIDE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
_LOAD_SECONDS: Final = 30.0  # to start Python and load the library, on a busy machine
_PROBE_SECONDS: Final = 0.05
_BUFFERS, _HOST = 0, 1  # ``Piece.memory``


class Lane:
    """The right to make one call at a time, with a part of the shared buffers.

    ``headers`` are for those of values, ``room`` is for values that are not in the host tier.
    """

    def __init__(self, library: "MooncakeLibrary", memory: memoryview, start: int) -> None:
        self._library = library
        self._start = start
        self._process: LibraryProcess | None = None
        self._channel: socket.socket | None = None  # to ``_process``
        starts = range(0, MOST_KEYS * _STRIDE_BYTES, _STRIDE_BYTES)
        self.headers = [memory[at : at + HEADER_BYTES] for at in starts]
        self.header_pieces = [Piece(_BUFFERS, start + at, HEADER_BYTES) for at in starts]
        self.room = memory[_HEADERS_BYTES:]

    @property
    def name(self) -> str:
        """Of the store, for errors."""
        return self._library.name

    def clear_headers(self, count: int) -> None:
        """Leave nothing of earlier calls in the first *count* headers."""
        for header in self.headers[:count]:
            header[:] = _NO_HEADER

    def room_piece(self, offset: int, length_bytes: int) -> Piece:
        """Bytes of ``room``."""
        return Piece(_BUFFERS, self._start + _HEADERS_BYTES + offset, length_bytes)

    def call(self, request: Request, deadline: float) -> list[int]:
        """What the library answers to *request*, for which it joins the pool if it has to.

        Raises ``TierUnavailable`` at *deadline* at the latest. No buffer of *request* is touched
        once the call has ended, however it has.
        """
        process = self._library.joined(deadline)
        channel = self._to(process)
        try:
            return process.call(channel, request, deadline)
        except TimeoutError as e:
            fault = self._library.late(process)
            self.close()
            if isinstance(request, Get | Put | Head):
                process.kill(fault.cause)
            raise fault from e

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._process = self._channel = None

    def _to(self, process: LibraryProcess) -> socket.socket:
        if self._channel is None or self._process is not process:
            self.close()
            self._process, self._channel = process, process.open_lane()
        return self._channel


class MooncakeLibrary:
    """The library in a process of its own, which is started again when it had to be ended.

    A call that has buffers and is not done by its deadline ends the process: that is what keeps
    late bytes out of slots that have another block by then. Others that run meanwhile fail too.
    """

    def __init__(
        self, name: str, orders: Orders, *, room_bytes: int, memory: HostMapping | None
    ) -> None:
        """Load the library, without a word on the network; ``ConfigError`` if it cannot be.

        *orders* without memories: they are *memory*, the host tier, which stays mapped in the
        process until ``close``, and buffers with *room_bytes* for each call.
        """
        self.name = name
        lane_bytes = _HEADERS_BYTES + -(-room_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memories = [(_memfd(MOST_CALLS * lane_bytes), MOST_CALLS * lane_bytes)]
        self._host_start = self._host_bytes = 0
        if memory is not None:
            self._host_start, self._host_bytes = memory.address, memory.total_bytes
            self._memories.append((os.dup(memory.fd), memory.total_bytes))
        buffers = memoryview(mmap.mmap(self._memories[_BUFFERS][0], MOST_CALLS * lane_bytes))
        self._port = orders.port
        self._orders = msgspec.structs.replace(orders, memories=self._memories)
        self._starting = threading.Lock()  # held to change ``_process``, and while it joins
        self._turns = threading.Condition()  # guards ``_free`` and ``_closed``
        self._free = [
            Lane(self, buffers[start : start + lane_bytes], start)
            for start in range(0, MOST_CALLS * lane_bytes, lane_bytes)
        ]
        self._closed = False
        self._process = LibraryProcess(self._orders, name)
        try:
            self._process.load(time.monotonic() + _LOAD_SECONDS)
        except TierUnavailable as e:
            self.close()
            raise ConfigError(e.args[0], hint=e.hint) from e

    @contextmanager
    def lane(self, deadline: float) -> Iterator[Lane]:
        """A lane of one's own; ``TierUnavailable`` if none is free by *deadline*."""
        with self._turns:
            self._turns.wait_for(
                lambda: self._free or self._closed, max(0.0, deadline - time.monotonic())
            )
            self._check_open()
            if not self._free:
                raise unavailable(self.name, "too many calls at a time", "timeout")
            lane = self._free.pop()
        try:
            yield lane
        finally:
            with self._turns:
                if self._closed:
                    lane.close()
                else:
                    self._free.append(lane)
                    self._turns.notify()

    def joined(self, deadline: float) -> LibraryProcess:
        """The process, once it has joined the pool; ``TierUnavailable`` if it cannot."""
        process = self._process
        if process.master_address is not None and process.ended_by is None:
            return process
        if not self._starting.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise unavailable(self.name, "does not answer in time", "timeout")
        try:
            self._check_open()
            if self._process.ended_by is not None:
                self._process = LibraryProcess(self._orders, self.name)
            if self._process.master_address is None:
                self._process.join(deadline)
            return self._process
        finally:
            self._starting.release()

    def late(self, process: LibraryProcess) -> TierUnavailable:
        """What a call has met that did not end: the library keeps trying where nobody listens."""
        if process.master_address is None:
            raise InvariantViolated("a call before the process has joined the pool")
        try:
            address = (process.master_address, self._port)
            socket.create_connection(address, _PROBE_SECONDS).close()
        except ConnectionError as e:
            return unavailable(self.name, e.strerror or str(e), "unreachable")
        except OSError:
            pass  # it is slow, and so is this
        return unavailable(self.name, "does not answer in time", "timeout")

    def host_piece(self, address: int, length_bytes: int) -> Piece | None:
        """The bytes at *address* of this process, if they are in the host tier."""
        offset = address - self._host_start
        if offset < 0 or offset + length_bytes > self._host_bytes:
            return None
        return Piece(_HOST, offset, length_bytes)

    def close(self) -> None:
        """End the process, and with it every call. Idempotent."""
        with self._turns:
            if self._closed:
                return
            self._closed = True
            idle, self._free = self._free, []  # the buffers go with the last lane
            self._turns.notify_all()
        for lane in idle:
            lane.close()
        self._process.kill("closed")
        with self._starting:
            self._process.kill("closed")  # one that was started meanwhile
            for fd, _ in self._memories:
                os.close(fd)

    def _check_open(self) -> None:
        if self._closed:
            raise TierUnavailable(f"{self.name} is closed", cause="closed")


def _memfd(length: int) -> int:
    fd = os.memfd_create("kvstrata-mooncake", os.MFD_CLOEXEC)
    os.ftruncate(fd, length)
    return fd

"""The process that hosts the Mooncake library for a store: ``python -m``, with its orders.

The library cannot end a transfer that has begun: on a slow link it goes on writing into the
buffers of a call for a minute. Only the end of its process stops it, so it has one of its own.
That also keeps its signals, its threads, its environment and its faults away from the server.
"""

import ctypes
import mmap
import os
import select
import socket
import sys
import threading
import time
from typing import Any, Final

import msgspec

from kvstrata.storage.remote.mooncake.codes import NO_OBJECT, NOT_READY
from kvstrata.storage.remote.mooncake.wire import (
    Answer,
    Drop,
    Exist,
    Failed,
    Get,
    Head,
    Joined,
    Loaded,
    Orders,
    Piece,
    Put,
    Remove,
    Request,
    Setup,
    Sizes,
    receive,
    send,
)

_AGAIN_SECONDS: Final = 1.0
_LOG_LEVEL: Final = "MC_LOG_LEVEL"  # an operator who sets it wants to see the library's messages


class Agent:
    """The library, and the memory that it moves bytes to and from."""

    def __init__(self, orders: Orders, library: Any) -> None:
        """*library*: the class ``MooncakeDistributedStore``."""
        self._orders = orders
        self._store = library()
        self._mappings = [mmap.mmap(fd, length) for fd, length in orders.memories]
        self._views = [ctypes.c_char.from_buffer(mapping) for mapping in self._mappings]
        self._addresses = [ctypes.addressof(view) for view in self._views]

    def serve(self, lane: socket.socket) -> None:
        """Answer the requests of *lane* one after the other until it is closed."""
        with lane:
            while True:
                try:
                    request = receive(lane, Request)
                except (EOFError, OSError):
                    return
                answer = self._setup() if isinstance(request, Setup) else Answer(self._do(request))
                try:
                    send(lane, answer)
                except OSError:
                    return

    def _setup(self) -> Joined | Failed:
        answer = join(self._store, self._orders)
        if isinstance(answer, Joined) and self._orders.protocol == "rdma":
            return self._register(answer)
        return answer

    def _register(self, joined: Joined) -> Joined | Failed:
        """Let RDMA devices reach the memory. TCP needs none of it, and strangers could then."""
        for address, (_, length) in zip(self._addresses, self._orders.memories, strict=True):
            code = self._store.register_buffer(address, length)
            if code != 0:
                return Failed("io", f"{length} bytes cannot be registered for RDMA ({code})")
        return joined

    def _do(self, request: Exist | Sizes | Get | Put | Head | Remove | Drop) -> list[int]:
        store = self._store
        match request:
            case Exist(keys):
                codes = store.batch_is_exist(keys)
            case Sizes(keys):
                codes = self._sizes(keys)
            case Get(keys, pieces):
                codes = store.batch_get_into_multi_buffers(keys, *self._buffers(pieces))
            case Put(keys, pieces):
                codes = self._put(keys, pieces)
            case Head(key, piece):
                codes = [self._head(key, piece)]
            case Remove(keys):
                codes = store.batch_remove(keys, True)  # else a block that was just read stays
            case Drop(pattern):
                codes = [store.remove_by_regex(pattern, True)]
        return [int(code) for code in codes]

    def _put(self, keys: list[str], pieces: list[list[Piece]]) -> list[int]:
        """To the library a key that somebody has begun and never ended is as good as stored."""
        codes = self._store.batch_put_from_multi_buffers(keys, *self._buffers(pieces))
        there = self._store.batch_is_exist(keys)
        return [
            code or (0 if found == 1 else min(found, 0) or NOT_READY)
            for code, found in zip(codes, there, strict=True)
        ]

    def _sizes(self, keys: list[str]) -> list[int]:
        found = self._store.batch_get_replica_desc(keys)
        absent = [key for key in keys if not found.get(key)]  # or the master has not answered
        why = dict(zip(absent, self._store.batch_is_exist(absent), strict=True)) if absent else {}
        return [
            self._size(key, found[key]) if key not in why else _absent(why[key]) for key in keys
        ]

    def _size(self, key: str, replicas: list[Any]) -> int:
        for replica in replicas:
            if replica.is_memory_replica():
                return int(replica.get_memory_descriptor().buffer_descriptor.size)
        return int(self._store.get_size(key))  # it has been moved to a disk

    def _head(self, key: str, piece: Piece) -> int:
        (code,) = self._store.batch_get_session_start([key])
        if code < 0:
            return int(code)
        try:
            addresses, lengths = self._buffers([[piece]])
            (code,) = self._store.batch_get_into_multi_buffer_ranges(
                [key], addresses, lengths, [[0]]
            )
        finally:
            self._store.batch_get_session_end([key])
        return int(code)

    def _buffers(self, pieces: list[list[Piece]]) -> tuple[list[list[int]], list[list[int]]]:
        addresses = [[self._addresses[p.memory] + p.offset for p in value] for value in pieces]
        return addresses, [[p.length_bytes for p in value] for value in pieces]


def _absent(existence: int) -> int:
    """Code of an object that has no replica; *existence* is what the library says of its key."""
    return existence if existence < 0 else NO_OBJECT


def join(store: Any, orders: Orders) -> Joined | Failed:
    """Let *store*, a new one, join the pool."""
    try:  # the library itself takes 4 s to find that nobody listens
        master = (orders.host, orders.port)
        with socket.create_connection(master, orders.connect_seconds) as probe:
            towards_master: str = probe.getsockname()[0]
            address: str = probe.getpeername()[0]
    except socket.gaierror as e:
        return Failed("name", f"its name is not known: {e.strerror}")
    except TimeoutError:
        return Failed("timeout", "nobody answers")
    except OSError as e:
        return Failed("unreachable", e.strerror or str(e))
    local_host = orders.local_host or towards_master
    os.environ.setdefault("MC_TCP_BIND_ADDRESS", local_host)  # that it tells a metadata server
    began = time.monotonic()
    code = store.setup(
        local_host,
        orders.metadata,
        orders.segment_bytes,
        0,
        orders.protocol,
        orders.devices,
        orders.master,
    )
    if code != 0 and time.monotonic() - began >= orders.connect_seconds:
        return Failed("timeout", f"the master does not answer in time ({code})")
    if code != 0:
        return Failed("unreachable", f"what listens there does not let us join a pool ({code})")
    return Joined(address)


def hold_segment(life: socket.socket, orders: Orders, library: Any) -> None:
    """Give memory to the pool until *life* ends; then take it back, so that nobody asks for it."""
    while True:
        store = library()
        joined = isinstance(join(store, orders), Joined)
        ended, _, _ = select.select([life], [], [], None if joined else _AGAIN_SECONDS)
        if ended:
            break
    store.close()


def serve_lanes(life: socket.socket, orders: Orders, library: Any) -> None:
    """Serve the lanes that come over *life* until it ends."""
    agent = Agent(orders, library)
    send(life, Loaded())
    while True:
        _, descriptors, _, _ = socket.recv_fds(life, 1, 1)
        if not descriptors:
            return
        lane = socket.socket(fileno=descriptors[0])
        threading.Thread(target=agent.serve, args=[lane], daemon=True).start()


def main(life_fd: int) -> None:
    """Do what the orders on standard input say until the socket *life_fd* is closed."""
    orders = msgspec.json.decode(sys.stdin.buffer.read(), type=Orders)
    _quiet()
    for name, value in orders.environment.items():
        os.environ.setdefault(name, value)
    life = socket.socket(fileno=life_fd)
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as e:
        send(life, Failed("io", str(e)))
        return
    run = hold_segment if orders.segment_bytes else serve_lanes
    run(life, orders, MooncakeDistributedStore)
    os._exit(0)  # threads of the library may still run


def _quiet() -> None:
    """The library logs a line for each key that fails: only to those who ask for it."""
    if _LOG_LEVEL in os.environ:
        return
    os.environ[_LOG_LEVEL] = "ERROR"
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)


if __name__ == "__main__":
    main(int(sys.argv[1]))

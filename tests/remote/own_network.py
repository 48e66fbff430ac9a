"""A network of its own for servers that listen on every address they find."""

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_CLONE_NEWNET: Final = 0x40000000
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP_AND_RUNNING: Final = 0x41


@contextmanager
def own_network() -> Iterator[None]:
    """A new network namespace with nothing but loopback, for this thread.

    Threads and processes that it starts inside the context are in it too, and what they connect
    stays there. The kernel removes it with the last of them. Only root may do this.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.unshare(_CLONE_NEWNET) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise AssertionError(f"no network namespace: {reason}; run this test as root")
        _start_loopback()
        yield
    finally:
        if libc.setns(before, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(before)


def _start_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _IFF_UP_AND_RUNNING))

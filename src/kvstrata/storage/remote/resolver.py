"""Addresses of hosts by a deadline, which the system's own resolver does not know of."""

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

__all__ = ["Place", "Resolver"]

Address = tuple[str, int]  # host and port
# An address of the family comes last.
Place = tuple[socket.AddressFamily, socket.SocketKind, int, str, object]
_TRY_AGAIN: Final = "the resolver does not answer"


class Resolver:
    """Where hosts are. Thread-safe.

    * A call ends in the time it is given, with ``socket.gaierror`` if nothing is known by then.
    * Names are asked for each time, on a thread of their own, since nothing ends a question to the
      system. Who asks for a name that is asked for already waits with the others: there is one
      thread a name at most, and it ends with its question.
    * Addresses that were found hold while the resolver is silent or fails for the moment. To find
      that out costs half of the time of one call; the others do not wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the two below
        self._found: dict[Address, Sequence[Place]] = {}
        self._asked: dict[Address, Future[Sequence[Place]]] = {}

    def places(self, host: str, port: int, left_seconds: float) -> Sequence[Place]:
        """In the order of preference of the system."""
        try:
            return socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )
        except (socket.gaierror, UnicodeError):
            pass  # it is a name
        address = host, port
        question, is_first = self._ask(address)
        known = self._found.get(address)
        patience_seconds = left_seconds if known is None else left_seconds / 2 if is_first else 0.0
        try:
            return question.result(patience_seconds)
        except TimeoutError:
            fault = socket.gaierror(socket.EAI_AGAIN, _TRY_AGAIN)
        except socket.gaierror as e:
            fault = e
        if known is None or fault.errno != socket.EAI_AGAIN:
            raise fault
        return known

    def _ask(self, address: Address) -> tuple[Future[Sequence[Place]], bool]:
        """The question that is under way, and whether this call has begun it."""
        with self._lock:
            question = self._asked.get(address)
            if question is not None:
                return question, False
            question = self._asked[address] = Future()
        thread = threading.Thread(
            target=self._resolve,
            args=[address, question],
            name=f"kvstrata-resolve-{address[0]}",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError as e:  # the system has no thread to give for the moment
            with self._lock:
                del self._asked[address]
            question.set_exception(socket.gaierror(socket.EAI_AGAIN, str(e)))
        return question, True

    def _resolve(self, address: Address, question: "Future[Sequence[Place]]") -> None:
        found: Sequence[Place] = ()
        fault: Exception | None = None
        try:
            found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as e:  # a label may be too long for a name
            fault = e if isinstance(e, OSError) else socket.gaierror(socket.EAI_NONAME, str(e))
        with self._lock:
            del self._asked[address]
            if fault is None:
                self._found[address] = found
        if fault is None:
            question.set_result(found)
        else:
            question.set_exception(fault)

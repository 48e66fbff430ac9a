"""Connections to Valkey servers: made by the library, kept and lent to one call at a time.

The library connects, logs in, packs commands and reads answers; what it reads from and writes to is
our ``DeadlineSocket``, so that whatever it does ends in time. Imports the optional package.
"""

import socket
import ssl
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Self

import libvalkey  # noqa: F401 - without it the parser fails only when it is used
from valkey._parsers import _LibvalkeyParser
from valkey.connection import AbstractConnection
from valkey.exceptions import ResponseError, ValkeyError

from kvstrata.core.errors import InvariantViolated, TierUnavailable
from kvstrata.storage.call_time import end_within
from kvstrata.storage.remote.resolver import Place, Resolver
from kvstrata.storage.remote.valkey.address import Address, Login
from kvstrata.storage.remote.valkey.deadline_socket import DeadlineSocket, remaining_seconds
from kvstrata.storage.remote.valkey.faults import fault_of
from kvstrata.storage.remote.valkey.resp import ErrorReply, NotRespError, RespReader
from kvstrata.storage.store import MOST_CALLS

__all__ = ["FAULTS", "Dialer", "Link", "Links", "Session"]

Word = bytes | str | int
FAULTS: Final = (ValkeyError, ErrorReply, NotRespError, OSError)  # of servers and the way to them
_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class _Parser(_LibvalkeyParser):
    """Leaves errors as the server words them, code included."""

    EXCEPTION_CLASSES: dict[str, object] = {}  # noqa: RUF012 - as the base class declares it


class _Connection(AbstractConnection):
    """The library's, over a stream with a deadline."""

    def __init__(
        self,
        address: Address,
        deadline: float,
        login: Login,
        database: int,
        tls: ssl.SSLContext | None,
        resolver: Resolver,
    ) -> None:
        self.resolver = resolver
        self.address = address
        self.deadline = deadline
        self.tls = tls
        self.stream: DeadlineSocket | None = None
        super().__init__(
            db=database,
            username=login.username,
            password=login.password,
            parser_class=_Parser,
            lib_name=None,
            lib_version=None,
        )

    def repr_pieces(self) -> list[tuple[str, object]]:
        return [("address", str(self.address)), ("db", self.db)]

    def _host_error(self) -> str:
        return str(self.address)

    def _connect(self) -> DeadlineSocket:
        connected = self._dial()
        try:
            if self.tls is not None:
                connected.settimeout(remaining_seconds(self.deadline))
                connected = self.tls.wrap_socket(connected, server_hostname=self.address.host)
            self.stream = DeadlineSocket(connected, self.deadline)
        except BaseException:
            connected.close()
            raise
        return self.stream

    def _dial(self) -> socket.socket:
        """Try each address of the host in turn, each for its share of the time left."""
        places: Sequence[Place]
        if self.address.port:
            places = self.resolver.places(*self.address, remaining_seconds(self.deadline))
        else:
            places = [(socket.AF_UNIX, socket.SOCK_STREAM, 0, "", self.address.host)]
        fault: OSError = OSError(f"{self.address} has no address")
        for number, (family, kind, protocol, _, place) in enumerate(places):
            dialled = socket.socket(family, kind, protocol)
            try:
                if family != socket.AF_UNIX:
                    for option in _KEEPALIVE:
                        dialled.setsockopt(*option)
                left = remaining_seconds(self.deadline)
                dialled.settimeout(left / (len(places) - number))
                dialled.connect(place)  # type: ignore[arg-type]  # an address of its family
            except OSError as e:
                dialled.close()
                fault = e
            else:
                return dialled
        raise fault


class Link:
    """One connection, used by one call at a time."""

    def __init__(self, connection: AbstractConnection, stream: DeadlineSocket) -> None:
        """*connection* is connected, and reads from and writes to *stream*."""
        self.stream = stream
        self.answers = RespReader(stream)
        self._connection = connection

    def ask(self, commands: Sequence[Sequence[Word]]) -> None:
        """Send *commands*, few bytes each; ``answer`` gives one answer for each."""
        self._connection.send_packed_command(self._connection.pack_commands(commands))

    def answer(self) -> object:
        """The next answer; ``ErrorReply`` if it is one."""
        try:
            return self._connection.read_response()
        except ResponseError as e:
            raise ErrorReply(str(e)) from None

    def command(self, *words: Word) -> object:
        self.ask([words])
        return self.answer()

    def disconnect(self) -> None:
        self._connection.disconnect()


class Dialer:
    """Makes connections for one kind of server."""

    def __init__(
        self, login: Login, database: int, tls: ssl.SSLContext | None, *, replicas: bool = False
    ) -> None:
        """With *replicas* those of a cluster answer, too, instead of sending us to their master."""
        self._replicas = replicas
        self._login = login
        self._database = database
        self._tls = tls
        self._resolver = Resolver()

    def __call__(self, address: Address, deadline: float) -> Link:
        made = _Connection(
            address, deadline, self._login, self._database, self._tls, self._resolver
        )
        connection: AbstractConnection = made
        connection.connect()  # or it has closed what it had opened
        if made.stream is None:
            raise InvariantViolated("the library has connected past its own extension point")
        link = Link(connection, made.stream)
        if self._replicas:
            try:
                link.command("READONLY")
            except BaseException:
                link.disconnect()
                raise
        return link


class Session:
    """One call: its connections, and when it has to end.

    What goes wrong inside its ``with`` costs its connections and those like them; a fault is
    raised as ``TierUnavailable``.
    """

    def __init__(self, links: "Links", deadline: float) -> None:
        self.deadline = deadline
        self._lent: dict[Address, Link] = {}
        self._links = links

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, fault: BaseException | None, trace: object) -> None:
        self._links.end(self._lent, whole=fault is None)
        if isinstance(fault, FAULTS):
            raise self._links.fault_of(fault) from fault

    def link(self, address: Address, deadline: float | None = None) -> Link:
        """The connection to *address*, of use until *deadline* or that of the call."""
        link = self._lent.get(address)
        if link is None:
            link = self._links.lend(address, self.deadline if deadline is None else deadline)
            self._lent[address] = link
        elif deadline is not None:
            link.stream.deadline = deadline
        return link

    def attempt(
        self, address: Address, step: Callable[[Link], None], deadline: float
    ) -> Exception | None:
        """Run *step* on the connection to *address* until *deadline*.

        What goes wrong costs that connection and those like it, and is returned.
        """
        try:
            step(self.link(address, deadline))
        except FAULTS as fault:
            if self._links.is_closed:
                raise
            self.lose(address)
            return fault
        return None

    def lose(self, address: Address) -> None:
        """Close the connection to *address*, in the middle of something, and those like it."""
        link = self._lent.pop(address, None)
        if link is not None:
            self._links.forget(link)
        self._links.forget_idle(address)


class Links:
    """The connections of one store. As many as threads call, and few of them idle."""

    def __init__(
        self, name: str, dial: Callable[[Address, float], Link], *secrets: str | None
    ) -> None:
        """*name* is what messages call it; *secrets* never show in them."""
        self.name = name
        self._dial = dial
        self._secrets = [secret for secret in secrets if secret]
        self._lock = threading.Lock()  # guards everything below
        self._idle: defaultdict[Address, list[Link]] = defaultdict(list)
        self._lent: set[Link] = set()
        self._closed = False
        self._failed_calls = 0

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def failed_calls(self) -> int:
        """So many calls have not ended well: what is known about the servers may be outdated."""
        return self._failed_calls

    def session(self, timeout_seconds: float) -> Session:
        """One call, of *timeout_seconds* at most."""
        return Session(self, end_within(timeout_seconds))

    def fault_of(self, error: Exception) -> TierUnavailable:
        """What *error*, which has ended a call, is for a tier."""
        if isinstance(error, TierUnavailable):
            return error
        return self._closed_fault() if self._closed else fault_of(error, self.name, self._secrets)

    def lend(self, address: Address, deadline: float) -> Link:
        """An idle connection that still lives, or a new one."""
        while (link := self._take_idle(address)) is not None:
            if link.stream.is_quiet():
                link.stream.deadline = deadline
                return link
            self.forget(link)
        link = self._dial(address, deadline)
        with self._lock:
            self._lent.add(link)
            closed = self._closed
        if closed:
            self.forget(link)
            raise self._closed_fault()
        return link

    def keep_only(self, addresses: set[Address]) -> None:
        """Close what is idle to other servers: they are no longer asked."""
        with self._lock:
            gone = [self._idle.pop(each) for each in set(self._idle) - addresses]
        for links in gone:
            _disconnect(links)

    def close(self) -> None:
        """Close what is idle, end the calls that use the rest, lend no more. Idempotent."""
        with self._lock:
            self._closed = True
            idle = [link for links in self._idle.values() for link in links]
            self._idle.clear()
            lent = list(self._lent)
        _disconnect(idle)
        for link in lent:
            link.stream.interrupt()

    def _take_idle(self, address: Address) -> Link | None:
        with self._lock:
            if self._closed:
                raise self._closed_fault()
            idle = self._idle.get(address)
            if not idle:
                return None
            link = idle.pop()
            self._lent.add(link)
            return link

    def end(self, lent: Mapping[Address, Link], *, whole: bool) -> None:
        """Take back what a call was lent; unless it was *whole*, close it and those like it."""
        done: list[Link] = []
        with self._lock:
            self._failed_calls += not whole
            for address, link in lent.items():
                self._lent.discard(link)
                idle = self._idle[address]
                if not whole:
                    done += [link, *idle]
                    idle.clear()
                elif link.answers.is_empty and not self._closed and len(idle) < MOST_CALLS:
                    idle.append(link)
                else:
                    done.append(link)
        _disconnect(done)

    def forget_idle(self, address: Address) -> None:
        """Close what is idle to *address*."""
        with self._lock:
            idle = self._idle.pop(address, [])
        _disconnect(idle)

    def forget(self, link: Link) -> None:
        """Close a connection that was lent."""
        with self._lock:
            self._lent.discard(link)
        link.disconnect()

    def _closed_fault(self) -> TierUnavailable:
        return TierUnavailable(f"{self.name} is closed", cause="closed")


def _disconnect(links: Sequence[Link]) -> None:
    for link in links:
        link.disconnect()

"""S3 by signed URLs over connections of our own: values go to and from the caller's buffers.

obstore copies what it reads, which costs more than the reading. It signs here, and does whatever
is answered in another way than these few calls understand: redirects, bodies without a length,
stores that take no signed URLs.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from datetime import timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

import obstore

from kvstrata.core.types import Write
from kvstrata.storage.remote.objects.access import Place, is_proxied, tls_context
from kvstrata.storage.remote.objects.connection import Answer, Exchange, Nonsense
from kvstrata.storage.remote.objects.faults import Refused, is_full, names_no_object
from kvstrata.storage.remote.objects.http import HttpClient
from kvstrata.storage.remote.objects.library import Library
from kvstrata.storage.remote.objects.values import Deadline, Found, Given, Wanted

if TYPE_CHECKING:
    from kvstrata.storage.remote.objects.access import Client

__all__ = ["SignedLibrary"]

_log = logging.getLogger(__name__)

_Method = Literal["HEAD", "GET", "PUT"]

_VALID: Final = timedelta(minutes=15)  # what clocks may differ by, as for any signed request
_BUSY: Final = frozenset({429, 500, 502, 503, 504})
_UNDERSTOOD: Final[Mapping[_Method, frozenset[int]]] = {
    "HEAD": frozenset({200, 404}),
    "GET": frozenset({200, 404}),
    "PUT": frozenset({200, 409, 412, 507}),
}
_MOST_DIGITS: Final = 18  # of a length
_TRIALS: Final = 3  # calls in a row that only obstore can do, before it does them all


class _Get(Exchange):
    def __init__(self, wanted: Wanted, target: str) -> None:
        super().__init__("GET", target)
        self._wanted = wanted

    def parts(self, body_bytes: int, fields: dict[str, str]) -> Iterator[memoryview]:
        self._wanted.e_tag = fields.get("etag", "")
        return self._wanted.parts(body_bytes, _modified_seconds(fields))


class SignedLibrary(Library):
    """Finds, reads and writes by signed URL, and leaves the rest to ``Library``."""

    def __init__(self, client: "Client", place: Place, *, block_bytes: int, parallel: int) -> None:
        super().__init__(client, place, block_bytes=block_bytes, parallel=parallel)
        self._place = place
        self._lock = threading.Lock()  # guards the making of the next
        self._http: HttpClient | None = None
        self._is_closed = False
        self._is_used = True
        self._helped_calls = 0  # in a row

    def find(self, names: Sequence[str], deadline: Deadline) -> list[Found | None]:
        answers = self._ask("HEAD", names, [partial(Exchange, "HEAD")] * len(names), deadline)
        found = [
            _found(name, answer.fields) if answer is not None and answer.status == 200 else None
            for name, answer in zip(names, answers, strict=True)
        ]
        left = _unanswered(answers)
        if left:
            helped = super().find([names[position] for position in left], deadline)
            for position, one in zip(left, helped, strict=True):
                found[position] = one
        self._note_help(bool(left))
        return found

    def read(self, wanted: Sequence[Wanted], deadline: Deadline) -> None:
        makers = [partial(_Get, one) for one in wanted]
        answers = self._ask("GET", [one.name for one in wanted], makers, deadline)
        left = _unanswered(answers)
        if left:
            super().read([wanted[position] for position in left], deadline)
        self._note_help(bool(left))

    def write(self, given: Sequence[Given], deadline: Deadline) -> list[Write]:
        makers = [partial(self._put_exchange, one) for one in given]
        answers = self._ask("PUT", [one.name for one in given], makers, deadline)
        fates = [_fate(answer) for answer in answers]
        left = _unanswered(answers)
        if left:
            helped = super().write([given[position] for position in left], deadline)
            for position, one in zip(left, helped, strict=True):
                fates[position] = one
        self._note_help(bool(left))
        return fates

    def close(self) -> None:
        super().close()
        with self._lock:
            self._is_closed = True
            if self._http is not None:
                self._http.close()

    def _put_exchange(self, given: Given, target: str) -> Exchange:
        is_new = self._can_create and not given.replaces
        fields = b"If-None-Match: *\r\n" if is_new else b""
        return Exchange("PUT", target, fields=fields, payload=(given.header, given.value))

    def _ask(
        self,
        method: _Method,
        names: Sequence[str],
        makers: Sequence[Callable[[str], Exchange]],
        deadline: Deadline,
    ) -> list[Answer | None]:
        """The answers to requests for *names*; ``None`` where obstore has to ask."""
        if not names or not self._is_used:
            return [None] * len(names)
        urls = self._once(partial(obstore.sign, self._client, method, names, _VALID), deadline)
        http = self._http_at(urls[0])
        if http is None:
            return [None] * len(names)
        start = len(http.origin)
        exchanges = [make(url[start:]) for make, url in zip(makers, urls, strict=True)]
        http.run(exchanges, deadline)
        return [_checked(method, exchange.answer) for exchange in exchanges]

    def _http_at(self, url: str) -> HttpClient | None:
        """The client for the origin of *url*, made for the first; ``None`` if it is not for us."""
        with self._lock:
            if self._is_closed:
                raise CancelledError
            if self._http is None and self._is_used:
                split = urlsplit(url)
                origin = f"{split.scheme}://{split.netloc}"
                if is_proxied(origin):
                    self._is_used = False
                    return None
                tls = tls_context() if split.scheme == "https" else None
                self._http = HttpClient(origin, parallel=self._parallel, tls=tls)
            return self._http

    def _note_help(self, was_needed: bool) -> None:
        """Stop to ask in vain: whoever has needed obstore's help often enough always will."""
        self._helped_calls = self._helped_calls + 1 if was_needed else 0
        if self._helped_calls == _TRIALS and self._is_used:
            self._is_used = False
            _log.info("object store %s: no requests by signed URL, by obstore instead", self._place)


def _checked(method: _Method, answer: Answer | None) -> Answer | None:
    """*answer* if it is understood, ``None`` if not; raises ``Refused`` if all is said with it."""
    if answer is None or not answer.is_whole:
        return None
    if answer.status in _BUSY and not is_full(answer):
        raise Refused(answer.status, answer.code)
    if method == "GET" and answer.status == 404 and not names_no_object(answer):
        raise Refused(answer.status, answer.code)
    if method == "HEAD" and answer.status == 200 and "content-length" not in answer.fields:
        return None
    return answer if answer.status in _UNDERSTOOD[method] else None


def _unanswered(answers: Sequence[Answer | None]) -> list[int]:
    return [position for position, answer in enumerate(answers) if answer is None]


def _fate(answer: Answer | None) -> Write:
    if answer is None or answer.status == 507:
        return Write.FULL
    return Write.STORED if answer.status == 200 else Write.EXISTS


def _found(name: str, fields: dict[str, str]) -> Found:
    length = fields.get("content-length", "")
    if not length.isascii() or not length.isdigit() or len(length) > _MOST_DIGITS:
        raise Nonsense("an object of an unknown length")
    return Found(name, int(length), _modified_seconds(fields), fields.get("etag", ""))


def _modified_seconds(fields: dict[str, str]) -> float:
    """When the object was written; 0 if the answer does not say, or not in a way we read."""
    try:
        return parsedate_to_datetime(fields.get("last-modified", "")).timestamp()
    except ValueError:
        return 0.0

"""An object store through obstore: any of S3, GCS and Azure."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotModifiedError,
    NotSupportedError,
    PreconditionError,
)

from kvstrata.core.types import Write
from kvstrata.storage.remote.objects.access import Place
from kvstrata.storage.remote.objects.faults import is_full, names_no_object, refused
from kvstrata.storage.remote.objects.values import Deadline, Found, Given, Wanted
from kvstrata.storage.remote.value import HEADER_BYTES

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta

    from kvstrata.storage.remote.objects.access import Client

__all__ = ["Fetched", "Library"]

T = TypeVar("T")
I = TypeVar("I")

_FLIGHT_BYTES: Final = 64 << 20  # copies of values that one call has on their way
_LIST_OBJECTS: Final = 1000  # in one answer; more is not to be had


class Fetched(NamedTuple):
    """A whole object; ``b""`` of one that is longer than was asked for."""

    stored: bytes
    e_tag: str


class Library:
    """The calls that a store is made of, each under a deadline, many objects side by side.

    They raise what is in ``object_faults.FAULTS``. obstore's blocking calls run on up to
    ``parallel`` threads, and those that look for objects on as many more, so that no value waits
    behind questions: a thread that misses its deadline has no buffer of the caller's, and ends
    soon after, since no request takes longer than the timeout. obstore's asynchronous calls abort
    the process when it ends a moment after one of them (0.12.1).
    """

    def __init__(self, client: "Client", place: Place, *, block_bytes: int, parallel: int) -> None:
        self._client = client
        self._deletes_many = place.scheme == "s3"
        self._stored_bytes = HEADER_BYTES + block_bytes
        self._parallel = parallel
        self._flights = max(1, min(parallel, _FLIGHT_BYTES // self._stored_bytes))
        self._can_create = True  # until the engine says that it knows no conditional write
        self._threads = ThreadPoolExecutor(parallel, "kvstrata-objects")
        self._lookers = ThreadPoolExecutor(parallel, "kvstrata-objects-find")

    def find(self, names: Sequence[str], deadline: Deadline) -> list[Found | None]:
        """Look at objects; ``None`` for one that is not there."""
        return list(self._each(self._find, names, deadline, self._parallel, self._lookers))

    def read(self, wanted: Sequence[Wanted], deadline: Deadline) -> None:
        """Read objects to where they are wanted; a missing one stays as it is."""
        for one, whole in zip(
            wanted,
            self._each(self._get, [one.name for one in wanted], deadline, self._flights),
            strict=True,
        ):
            if whole is not None:
                meta, stored = whole
                one.e_tag = meta["e_tag"] or ""
                one.take(stored, meta["size"], meta["last_modified"].timestamp())

    def fetch(self, name: str, most_bytes: int, *, unless: str) -> "Future[Fetched | None]":
        """Begin to read *name*: ``None`` in the end if it is not there, or its tag is *unless*."""
        return self._start(partial(self._fetch, name, most_bytes, unless))

    def write(self, given: Sequence[Given], deadline: Deadline) -> list[Write]:
        """Write objects, each where none is unless it replaces one."""
        # Joined here: a thread that is late must not read a buffer that is the caller's again.
        copies = ((one.name, b"".join((one.header, one.value)), one.replaces) for one in given)
        return list(self._each(self._put, copies, deadline, self._flights))

    def delete(self, names: Sequence[str], deadline: Deadline) -> None:
        """Delete objects. A missing one is no fault."""
        if self._deletes_many:
            for start in range(0, len(names), _LIST_OBJECTS):
                some = list(names[start : start + _LIST_OBJECTS])
                self._once(partial(obstore.delete, self._client, some), deadline)
            return
        for _ in self._each(self._delete, names, deadline, self._parallel):
            pass

    def pages(self, prefix: str, timeout_seconds: float) -> Iterator[Sequence[Found]]:
        """Everything below *prefix*, some at a time; each time has a deadline of its own."""
        pages = obstore.list(self._client, prefix or None, chunk_size=_LIST_OBJECTS)
        while True:
            page = self._once(lambda: next(pages, None), Deadline(timeout_seconds))
            if page is None:
                return
            yield [_found(meta) for meta in page]

    def close(self) -> None:
        for threads in (self._threads, self._lookers):
            threads.shutdown(wait=False, cancel_futures=True)

    def _once(self, do: Callable[[], T], deadline: Deadline) -> T:
        return self._start(do).result(deadline.left_seconds())

    def _each(
        self,
        do: Callable[[I], T],
        items: Iterable[I],
        deadline: Deadline,
        side_by_side: int,
        threads: ThreadPoolExecutor | None = None,
    ) -> Iterator[T]:
        """*do* each of *items*, and yield the results in order. *items* are taken as needed."""
        running: deque[Future[T]] = deque()
        try:
            for item in items:
                if len(running) == side_by_side:
                    yield running.popleft().result(deadline.left_seconds())
                running.append(self._start(partial(do, item), threads))
            while running:
                yield running.popleft().result(deadline.left_seconds())
        finally:
            for late in running:
                late.cancel()

    def _start(self, do: Callable[[], T], threads: ThreadPoolExecutor | None = None) -> Future[T]:
        try:
            return (threads or self._threads).submit(do)
        except RuntimeError:  # they have been shut down
            raise CancelledError from None

    def _find(self, name: str) -> Found | None:
        try:
            return _found(obstore.head(self._client, name))
        except FileNotFoundError:
            return None

    def _get(self, name: str) -> "tuple[ObjectMeta, memoryview] | None":
        """The object, or its beginning if it is longer than any block."""
        try:
            result = obstore.get(self._client, name)
            meta = result.meta
            if meta["size"] > self._stored_bytes:
                return meta, _beginning(result)
            return meta, memoryview(result.bytes())
        except FileNotFoundError as e:
            if names_no_object(refused(e)):
                return None
            raise

    def _fetch(self, name: str, most_bytes: int, unless: str) -> Fetched | None:
        options: GetOptions = {"if_none_match": unless} if unless else {}
        try:
            result = obstore.get(self._client, name, options=options)
            e_tag = result.meta["e_tag"] or ""
            too_long = result.meta["size"] > most_bytes
            return Fetched(b"" if too_long else bytes(result.bytes()), e_tag)
        except (FileNotFoundError, NotModifiedError):
            return None

    def _put(self, item: tuple[str, bytes, bool]) -> Write:
        name, stored, replaces = item
        try:
            if self._can_create and not replaces:
                try:
                    obstore.put(self._client, name, stored, mode="create", use_multipart=False)
                except BaseError as e:
                    if not _knows_no_condition(e):
                        raise
                    self._can_create = False
                else:
                    return Write.STORED
            obstore.put(self._client, name, stored, mode="overwrite", use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            return Write.EXISTS
        except BaseError as e:
            answer = refused(e)
            if answer is not None and is_full(answer):
                return Write.FULL
            raise
        return Write.STORED

    def _delete(self, name: str) -> None:
        try:
            obstore.delete(self._client, name)
        except FileNotFoundError as e:
            if not names_no_object(refused(e)):
                raise


def _found(meta: "ObjectMeta") -> Found:
    return Found(meta["path"], meta["size"], meta["last_modified"].timestamp(), meta["e_tag"] or "")


def _beginning(result: "GetResult") -> memoryview:
    stream = result.stream(min_chunk_size=HEADER_BYTES)
    return memoryview(bytes(next(iter(stream))))


def _knows_no_condition(fault: BaseError) -> bool:
    """Whether *fault* says that there is no writing only where nothing is."""
    answer = refused(fault)
    return isinstance(fault, NotSupportedError) or (
        answer is not None and (answer.status == 501 or answer.code == "NotImplemented")
    )

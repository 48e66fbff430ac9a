"""Answers of S3 that no real server gives when it is asked to: each is understood, or a fault."""

import os
import socket
import ssl
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from obstore.exceptions import GenericError, UnauthenticatedError
from tests.caches import eventually
from tests.remote.objects_engine import KEY_ID, SECRET, environment
from tests.remote.odd_server import OddServer, Request, answer
from tests.remote.proxy import Fault, Proxy

from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import Read, Write
from kvstrata.storage.remote.objects.connection import Nonsense
from kvstrata.storage.remote.objects.faults import Refused, as_unavailable
from kvstrata.storage.remote.objects.store import ObjectAccess, ObjectStore
from kvstrata.storage.remote.value import header_of
from kvstrata.testing.samples import dirty, key, random_value

BLOCK_BYTES = 64 << 10
VALUE = random_value(1, BLOCK_BYTES)
STORED = header_of(key(1), None, memoryview(VALUE)) + VALUE
DATE = "Last-Modified: Sun, 22 Nov 2026 11:56:20 GMT"
TOKEN = "token-that-nobody-may-see"
OBJECT = answer("200 OK", STORED, DATE, 'ETag: "1"')
NO_KEY = b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code></Error>"


@pytest.fixture
def server() -> Iterator[OddServer]:
    with closing(OddServer(lambda _: OBJECT)) as server:
        yield server


@pytest.fixture
def store(server: OddServer) -> Iterator[ObjectStore]:
    with closing(open_store(server.port)) as store:
        yield store


def open_store(port: int) -> ObjectStore:
    keys = {
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": TOKEN,
    }
    with environment(keys):
        return ObjectStore(
            "s3://bucket/prefix",
            block_bytes=BLOCK_BYTES,
            timeout_seconds=1.0,
            access=ObjectAccess(endpoint=f"http://127.0.0.1:{port}", parallel=4),
        )


def read(store: ObjectStore) -> Read:
    """The fate of block 1; what is a hit is right."""
    buffer = dirty(BLOCK_BYTES)
    (fate,) = store.read_into([key(1)], [buffer])
    assert fate is not Read.HIT or buffer == VALUE
    return fate


def write(store: ObjectStore) -> Write:
    (fate,) = store.write([key(1)], [None], [memoryview(VALUE)])
    return fate


def unless_it_is_there(put: bytes) -> Callable[[Request], bytes]:
    """Of a store without the object, which answers *put* to the attempt to write it."""
    return lambda request: put if request.method == "PUT" else answer("404 Not Found")


def chunked(status: str, *chunks: bytes) -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))
    return f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + body


def test_a_block_is_read_by_a_signed_url_on_a_connection_that_stays(
    server: OddServer, store: ObjectStore
) -> None:
    for _ in range(3):
        assert read(store) is Read.HIT
    assert server.connections == 1
    assert all("X-Amz-Signature=" in request.target for request in server.requests)
    assert all("authorization" not in request.fields for request in server.requests)


@pytest.mark.parametrize(
    "missing",
    [
        answer("404 Not Found", NO_KEY),
        answer("404 Not Found"),
        chunked("404 Not Found", NO_KEY[:20], NO_KEY[20:]),
    ],
)
def test_a_missing_object_is_a_miss_and_the_connection_stays(
    server: OddServer, store: ObjectStore, missing: bytes
) -> None:
    server.answer = lambda _: missing
    assert [read(store), read(store)] == [Read.MISS] * 2
    assert server.connections == 1


def test_a_missing_bucket_is_no_miss(server: OddServer, store: ObjectStore) -> None:
    server.answer = lambda _: answer("404 Not Found", NO_KEY.replace(b"Key", b"Bucket"))
    with pytest.raises(TierUnavailable, match="404 NoSuchBucket") as raised:
        read(store)
    assert raised.value.cause == "refused"
    with pytest.raises(TierUnavailable, match="404 NoSuchBucket"):
        write(store)


def test_a_store_that_asks_for_patience_is_refusing(server: OddServer, store: ObjectStore) -> None:
    """It says so in time, and is not asked a second time: the retries are elsewhere."""
    server.answer = lambda _: answer("503 Slow Down", b"<Error><Code>SlowDown</Code></Error>")
    with pytest.raises(TierUnavailable, match="503 SlowDown") as raised:
        read(store)
    assert raised.value.cause == "refused"
    assert len(server.requests) == 1


def test_a_body_that_is_cut_short_is_a_fault(server: OddServer, store: ObjectStore) -> None:
    server.closes = True
    server.answer = lambda _: OBJECT[:-1000]
    with pytest.raises(TierUnavailable) as raised:
        read(store)
    assert raised.value.cause == "unreachable"
    server.answer, server.closes = (lambda _: OBJECT), False
    assert read(store) is Read.HIT


def test_what_comes_after_a_body_is_never_taken_for_an_answer(
    server: OddServer, store: ObjectStore
) -> None:
    server.answer = lambda _: OBJECT + answer("404 Not Found")
    for _ in range(3):
        assert read(store) is Read.HIT
        time.sleep(0.02)
    assert server.connections > 1


def test_a_connection_that_was_closed_meanwhile_is_replaced(
    server: OddServer, store: ObjectStore
) -> None:
    """Servers close idle connections: that is no fault."""
    server.closes = True
    for _ in range(3):
        assert read(store) is Read.HIT
        time.sleep(0.02)
    assert server.connections == 3


def test_an_object_that_is_not_ours_is_not_read_to_its_end(
    server: OddServer, store: ObjectStore
) -> None:
    server.answer = lambda _: answer("200 OK", b"x" * BLOCK_BYTES, DATE, length=10**12)
    assert read(store) is Read.FOREIGN
    assert [request.method for request in server.requests] == ["GET"]


def test_answers_that_only_announce_one_are_passed_over(
    server: OddServer, store: ObjectStore
) -> None:
    server.answer = lambda _: b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + OBJECT
    assert read(store) is Read.HIT


@pytest.mark.parametrize(
    "nonsense",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno field\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000,
        b"HTTP/2 200\r\n\r\n",
    ],
)
def test_what_is_not_http_is_a_fault(
    server: OddServer, store: ObjectStore, nonsense: bytes
) -> None:
    server.answer = lambda _: nonsense
    with pytest.raises(TierUnavailable) as raised:
        read(store)
    assert raised.value.cause == "refused"


def test_announcements_without_end_are_a_fault(server: OddServer, store: ObjectStore) -> None:
    server.answer = lambda _: b"HTTP/1.1 100 Continue\r\n\r\n" * 100_000 + OBJECT
    with pytest.raises(TierUnavailable) as caught:
        read(store)
    assert caught.value.cause == "refused"


@pytest.mark.parametrize("length", ["abc", "-1", "9" * 5000])
def test_a_length_that_is_no_number_is_a_fault(
    server: OddServer, store: ObjectStore, length: str
) -> None:
    server.answer = lambda _: f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n".encode()
    with pytest.raises(TierUnavailable):
        store.exists([key(1)])


def test_bytes_that_trickle_do_not_move_the_deadline(server: OddServer) -> None:
    """One second for the call, however many requests and however slowly each is answered."""
    with (
        closing(Proxy(("127.0.0.1", server.port))) as proxy,
        closing(open_store(proxy.port)) as store,
    ):
        proxy.fault, proxy.bytes_per_second = Fault.SLOW, 2_000
        begun = time.monotonic()
        with pytest.raises(TierUnavailable) as raised:
            read(store)
        assert raised.value.cause == "timeout"
        with pytest.raises(TierUnavailable) as raised:
            store.exists([key(number) for number in range(100)])
        assert raised.value.cause == "timeout"
        assert time.monotonic() - begun < 10  # the bytes alone would take a minute


@pytest.mark.parametrize(
    "strange",
    [
        "HTTP/1.1 307 Temporary Redirect\r\nLocation: {here}/else\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_what_signed_urls_do_not_get_obstore_does(
    server: OddServer, store: ObjectStore, strange: str
) -> None:
    """After a few calls that needed it, it does them all."""
    reply = strange.format(here=f"http://127.0.0.1:{server.port}").encode()
    server.answer = lambda request: reply if "X-Amz-Signature" in request.target else OBJECT
    for _ in range(5):
        assert read(store) is Read.HIT
    signed = ["X-Amz-Signature" in request.target for request in server.requests]
    assert signed == [True, False] * 3 + [False] * 2


def test_a_body_without_a_length_is_no_block(server: OddServer, store: ObjectStore) -> None:
    server.answer = lambda _: chunked("200 OK", STORED)
    with pytest.raises(TierUnavailable) as raised:
        read(store)
    assert raised.value.cause == "refused"


# Writing


def test_a_block_is_written_once_and_only_where_none_is(
    server: OddServer, store: ObjectStore
) -> None:
    server.answer = unless_it_is_there(answer("200 OK"))
    assert write(store) is Write.STORED
    looked, put = server.requests
    assert (looked.method, put.method, put.fields["if-none-match"]) == ("HEAD", "PUT", "*")
    assert put.body == STORED


@pytest.mark.parametrize("status", ["412 Precondition Failed", "409 Conflict"])
def test_a_block_that_another_writer_has_written_meanwhile_exists(
    server: OddServer, store: ObjectStore, status: str
) -> None:
    server.answer = unless_it_is_there(answer(status))
    assert write(store) is Write.EXISTS


@pytest.mark.parametrize(
    "refusal",
    [
        answer("507 Insufficient Storage", b"<Error><Code>XMinioStorageFull</Code></Error>"),
        answer("507 Insufficient Storage"),
        answer("403 Forbidden", b"<Error><Code>QuotaExceeded</Code></Error>"),
    ],
)
def test_a_store_without_room_is_full(
    server: OddServer, store: ObjectStore, refusal: bytes
) -> None:
    server.answer = unless_it_is_there(refusal)
    assert write(store) is Write.FULL


def test_a_store_without_conditional_writes_is_written_without(
    server: OddServer, store: ObjectStore
) -> None:
    refusal = answer("501 Not Implemented", b"<Error><Code>NotImplemented</Code></Error>")

    def reply(request: Request) -> bytes:
        if request.method != "PUT":
            return answer("404 Not Found")
        return refusal if "if-none-match" in request.fields else answer("200 OK", b"", 'ETag: "1"')

    server.answer = reply
    assert write(store) is Write.STORED
    server.requests.clear()
    assert write(store) is Write.STORED
    assert [request.method for request in server.requests] == ["HEAD", "PUT"]


def test_a_refusal_before_the_value_is_sent_is_heard(server: OddServer, store: ObjectStore) -> None:
    """A server that will not have a value answers before it is there, and hangs up."""
    server.answer = unless_it_is_there(answer("503 Slow Down"))
    server.reads_bodies, server.closes = False, True
    with pytest.raises(TierUnavailable) as raised:
        store.write([key(1)], [None], [memoryview(VALUE)])
    assert raised.value.cause in {"refused", "unreachable"}


# What errors show


@pytest.mark.parametrize(
    "fault",
    [
        TimeoutError(),
        socket.gaierror(socket.EAI_NONAME, "no such name"),
        ConnectionRefusedError(111, "Connection refused"),
        ssl.SSLError(),
        ssl.SSLCertVerificationError(),
        Nonsense("an answer that is not HTTP/1.1"),
        *(Refused(status, "") for status in (301, 401, 403, 404, 503, 507)),
        GenericError("dns error"),
        GenericError("BadScheme"),
        GenericError("invalid peer certificate"),
        GenericError("an error of tomorrow"),
        UnauthenticatedError(),
    ],
    ids=repr,
)
def test_every_fault_has_a_remedy(fault: Exception) -> None:
    assert as_unavailable("object store s3://bucket", "read", fault).hint


@pytest.mark.parametrize(
    ("status", "code", "cause", "remedy"),
    [
        ("400 Bad Request", "ExpiredToken", "credentials", "renew the credentials"),
        ("400 Bad Request", "InvalidToken", "credentials", "renew the credentials"),
        ("400 Bad Request", "TokenRefreshRequired", "credentials", "renew the credentials"),
        ("403 Forbidden", "RequestTimeTooSkewed", "credentials", "clock"),
        ("403 Forbidden", "AccessDenied", "credentials", "allow reading"),
        ("400 Bad Request", "AuthorizationHeaderMalformed", "refused", "region"),
        ("400 Bad Request", "InvalidRequest", "refused", "configuration of the server"),
    ],
)
def test_a_refusal_is_told_with_its_remedy(
    server: OddServer, store: ObjectStore, status: str, code: str, cause: str, remedy: str
) -> None:
    server.answer = lambda _: answer(status, f"<Error><Code>{code}</Code></Error>".encode())
    with pytest.raises(TierUnavailable, match=code) as raised:
        read(store)
    assert raised.value.cause == cause
    assert remedy in (raised.value.hint or "")


def test_a_refusal_that_has_no_body_names_what_it_may_be(
    server: OddServer, store: ObjectStore
) -> None:
    """A HEAD with a token that has expired is answered by a bare 400."""
    server.answer = lambda _: answer("400 Bad Request", b"<Code>ExpiredToken</Code>")
    with pytest.raises(TierUnavailable, match="400") as raised:
        store.exists([key(1)])
    assert raised.value.cause == "refused"
    assert "expired" in (raised.value.hint or "")
    assert "region" in (raised.value.hint or "")


@pytest.mark.parametrize("call", [read, write, lambda store: store.remove([key(1)])])
def test_no_error_shows_a_key_a_token_or_a_signature(
    server: OddServer,
    store: ObjectStore,
    caplog: pytest.LogCaptureFixture,
    call: Callable[[ObjectStore], object],
) -> None:
    """Servers quote what they were sent, and so does obstore."""

    def quote(request: Request) -> bytes:
        quoted = f"{request.target} {request.fields}".encode()
        code = b"<Error><Code>SignatureDoesNotMatch</Code>"
        return answer("403 Forbidden", code + quoted + b"</Error>")

    server.answer = quote
    with caplog.at_level("DEBUG"), pytest.raises(TierUnavailable, match="403") as raised:
        call(store)
    assert raised.value.cause == "credentials"
    shown = "".join(traceback.format_exception(raised.value)) + caplog.text
    sent = "".join(f"{request.target} {request.fields}" for request in server.requests)
    for secret in (KEY_ID, SECRET, TOKEN, "Signature=", "X-Amz-Credential"):
        assert secret not in shown
    assert "ignature=" in sent


def test_the_store_keeps_a_bounded_number_of_connections(
    server: OddServer, store: ObjectStore
) -> None:
    server.answer = lambda _: answer("404 Not Found")
    before = len(os.listdir("/proc/self/fd"))
    assert store.exists([key(number) for number in range(100)]) == [False] * 100
    assert server.connections == 4
    assert len(os.listdir("/proc/self/fd")) <= before + 2 * 4


def meet(server: OddServer, store: ObjectStore, searches: int) -> None:
    """Have so many *searches* at once, each of as many keys as it may have connections."""
    parallel = 4
    together = threading.Barrier(searches * parallel)

    def missing(_: Request) -> bytes:
        together.wait(10)
        return answer("404 Not Found")

    server.answer = missing
    asked = [key(number) for number in range(parallel)]
    with ThreadPoolExecutor(searches) as pool:
        found = pool.map(lambda _: store.exists(asked), range(searches))
        assert list(found) == [[False] * parallel] * searches


def test_a_second_burst_of_searches_finds_the_connections_of_the_first(
    server: OddServer, store: ObjectStore
) -> None:
    for _ in range(2):
        meet(server, store, searches=8)
        assert server.connections == 8 * 4


def test_connections_of_a_burst_that_nobody_needs_are_closed_in_time(
    server: OddServer, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though one of them is used all the while."""
    server.answer = lambda _: answer("404 Not Found")
    store.exists([key(1)])
    before = len(os.listdir("/proc/self/fd"))  # with one connection
    monkeypatch.setattr("kvstrata.storage.remote.objects.http._IDLE_SECONDS", 0.05)
    meet(server, store, searches=8)
    server.answer = lambda _: answer("404 Not Found")

    def is_alone() -> bool:
        assert store.exists([key(1)]) == [False]
        return len(os.listdir("/proc/self/fd")) <= before

    eventually(is_alone, "connections are left")

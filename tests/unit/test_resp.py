"""The reader of answers: right however they are cut into pieces, and never past its deadline."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.storage.remote.valkey.deadline_socket import DeadlineSocket
from kvstrata.storage.remote.valkey.resp import (
    ErrorReply,
    NotRespError,
    RespReader,
    get_command,
    set_command,
)
from kvstrata.testing.samples import random_value

FAR = 1e9

_answers = st.one_of(
    st.binary(max_size=3000), st.none(), st.sampled_from(["ERR wrong", "MOVED 7 a:1"])
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, DeadlineSocket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield theirs, DeadlineSocket(ours, FAR)


@pytest.fixture
def over_tcp() -> Iterator[tuple[socket.socket, DeadlineSocket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with ours, theirs:
        yield theirs, DeadlineSocket(ours, FAR)


def spoken(answer: bytes | str | None) -> bytes:
    if answer is None:
        return b"$-1\r\n"
    if isinstance(answer, str):
        return f"-{answer}\r\n".encode()
    return b"$%d\r\n%b\r\n" % (len(answer), answer)


def heard(reader: RespReader, head_bytes: int) -> bytes | str | None:
    """The next answer, its first bytes taken, the rest received."""
    try:
        found = reader.value(head_bytes)
    except ErrorReply as reply:
        return reply.text
    if found is None:
        return None
    length, head = found
    assert len(head) == min(length, head_bytes)
    rest = bytearray(length - len(head))
    seen: list[bytes] = []
    reader.receive(memoryview(rest), lambda piece: seen.append(bytes(piece)))
    reader.end_value()
    assert b"".join(seen) == rest
    return bytes(head + rest)


@given(st.lists(_answers, max_size=8), st.lists(st.integers(1, 900), min_size=1), st.integers(0, 9))
def test_answers_in_any_pieces(
    answers: list[bytes | str | None], pieces: list[int], head_bytes: int
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream = b"".join(map(spoken, answers))

        def speak() -> None:
            start, turn = 0, 0
            while start < len(stream):
                end = start + pieces[turn % len(pieces)]
                theirs.sendall(stream[start:end])
                start, turn = end, turn + 1

        speaking = threading.Thread(target=speak)
        speaking.start()
        reader = RespReader(DeadlineSocket(ours, FAR))
        assert [heard(reader, head_bytes) for _ in answers] == answers
        speaking.join()
        assert reader.is_empty


@given(st.lists(st.integers(0, 5000), max_size=5), st.integers(1, 700))
def test_what_is_discarded_is_gone(lengths: list[int], buffer_bytes: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"".join(spoken(bytes(length)) for length in lengths) + spoken("ERR end"))
        reader = RespReader(DeadlineSocket(ours, FAR))
        for length in lengths:
            assert reader.value(0) == (length, bytearray())
            reader.discard(length, memoryview(bytearray(buffer_bytes)))
            reader.end_value()
        with pytest.raises(ErrorReply, match="end"):
            reader.value(10)


@pytest.mark.parametrize(
    "said", [b"+OK\r\n", b":1\r\n", b"*1\r\n", b"$x\r\n", b"$--1\r\n", b"\r\n", b"$" + b"1" * 2000]
)
def test_what_is_no_value_is_refused(
    pair: tuple[socket.socket, DeadlineSocket], said: bytes
) -> None:
    theirs, stream = pair
    theirs.sendall(said)
    with pytest.raises(NotRespError):
        RespReader(stream).value(10)


def test_a_value_that_does_not_end(pair: tuple[socket.socket, DeadlineSocket]) -> None:
    theirs, stream = pair
    theirs.sendall(b"$1\r\nabc\r\n")
    reader = RespReader(stream)
    assert reader.value(10) == (1, bytearray(b"a"))
    with pytest.raises(NotRespError):
        reader.end_value()


def test_a_status(pair: tuple[socket.socket, DeadlineSocket]) -> None:
    theirs, stream = pair
    theirs.sendall(b"+OK\r\n$-1\r\n-OOM no room\r\n$1\r\n")
    reader = RespReader(stream)
    assert reader.status()
    assert not reader.status()
    with pytest.raises(ErrorReply) as caught:
        reader.status()
    assert caught.value.code == "OOM"
    with pytest.raises(NotRespError):
        reader.status()


def test_commands_are_those_of_the_protocol() -> None:
    assert get_command(b"ab", None) == b"*2\r\n$3\r\nGET\r\n$2\r\nab\r\n"
    assert get_command(b"ab", 1500) == (
        b"*4\r\n$5\r\nGETEX\r\n$2\r\nab\r\n$2\r\nPX\r\n$4\r\n1500\r\n"
    )
    parts = set_command(b"ab", b"head", memoryview(b"value"), None)
    assert b"".join(parts) == (b"*4\r\n$3\r\nSET\r\n$2\r\nab\r\n$9\r\nheadvalue\r\n$2\r\nNX\r\n")
    parts = set_command(b"ab", b"head", memoryview(b"value"), 7)
    assert b"".join(parts).endswith(b"headvalue\r\n$2\r\nNX\r\n$2\r\nPX\r\n$1\r\n7\r\n")


# The stream


def test_a_trickle_ends_at_the_deadline(pair: tuple[socket.socket, DeadlineSocket]) -> None:
    """Though each byte comes soon after the one before."""
    theirs, stream = pair
    done = threading.Event()

    def trickle() -> None:
        while not done.wait(0.02):
            theirs.sendall(b"x")

    speaking = threading.Thread(target=trickle)
    speaking.start()
    for receive in (
        lambda: stream.receive_all(memoryview(bytearray(100_000)), len),
        lambda: [stream.recv_into(bytearray(10)) for _ in range(100_000)],
    ):
        stream.deadline = time.monotonic() + 0.2
        with pytest.raises(TimeoutError):
            receive()
    done.set()
    speaking.join()


@pytest.mark.parametrize("held_back", [1, 300 << 10, 600 << 10, 1200 << 10])
def test_long_values_over_tcp_that_stop_half_way_and_go_on(
    over_tcp: tuple[socket.socket, DeadlineSocket], held_back: int
) -> None:
    """Each is there as soon as its last byte is, and so is the short answer after it."""
    theirs, stream = over_tcp
    stream.deadline = time.monotonic() + 20.0
    long, short = random_value(1, 3 << 20), b"short"
    heard_of = threading.Event()
    in_time: list[bool] = []

    def speak() -> None:
        for _ in range(4):
            said = spoken(long)
            theirs.sendall(said[:-held_back])
            time.sleep(0.05)  # so that the reader has taken all of that, and waits
            theirs.sendall(said[-held_back:])
            in_time.append(heard_of.wait(5.0))
            heard_of.clear()
            theirs.sendall(spoken(short))
            in_time.append(heard_of.wait(5.0))
            heard_of.clear()

    speaking = threading.Thread(target=speak)
    speaking.start()
    reader = RespReader(stream)
    for _ in range(4):
        for expected in (long, short):
            assert heard(reader, 100) == expected
            heard_of.set()
    speaking.join()
    assert in_time == [True] * 8


def test_a_long_value_over_tcp_that_stops_ends_at_the_deadline_or_with_its_peer(
    over_tcp: tuple[socket.socket, DeadlineSocket],
) -> None:
    theirs, stream = over_tcp
    buffer = memoryview(bytearray(8 << 20))
    theirs.sendall(bytes(1 << 20))
    stream.deadline = time.monotonic() + 0.2
    with pytest.raises(TimeoutError):
        stream.receive_all(buffer, len)
    theirs.sendall(bytes(1 << 20))
    theirs.close()
    stream.deadline = time.monotonic() + 20.0
    with pytest.raises(ConnectionResetError):
        stream.receive_all(buffer, len)


def test_a_peer_that_takes_nothing_ends_at_the_deadline(
    pair: tuple[socket.socket, DeadlineSocket],
) -> None:
    _, stream = pair
    stream.deadline = time.monotonic() + 0.2
    with pytest.raises(TimeoutError):
        stream.sendall(bytes(8 << 20))


def test_a_deadline_that_has_passed(pair: tuple[socket.socket, DeadlineSocket]) -> None:
    theirs, stream = pair
    theirs.sendall(b"there is something")
    stream.deadline = time.monotonic() - 1
    with pytest.raises(TimeoutError):
        stream.recv_into(bytearray(10))


def test_many_parts_are_sent_in_order(pair: tuple[socket.socket, DeadlineSocket]) -> None:
    """More than one call takes, some of them empty, some longer than what the peer takes at once."""
    theirs, stream = pair
    parts = [bytes([n % 251]) * (n * 37 % 4001) for n in range(3000)]
    received = bytearray()

    def take() -> None:
        while len(received) < sum(map(len, parts)):
            received.extend(theirs.recv(100_000))

    taking = threading.Thread(target=take)
    taking.start()
    stream.send_parts(parts)
    taking.join()
    assert received == b"".join(parts)


def test_an_interrupt_ends_a_call_that_waits(pair: tuple[socket.socket, DeadlineSocket]) -> None:
    _, stream = pair
    threading.Timer(0.1, stream.interrupt).start()
    with pytest.raises(ConnectionError):
        stream.receive_all(memoryview(bytearray(10)), len)


def test_a_stream_is_quiet_until_something_is_said(
    pair: tuple[socket.socket, DeadlineSocket],
) -> None:
    theirs, stream = pair
    assert stream.is_quiet()
    theirs.sendall(b"x")
    assert not stream.is_quiet()
    stream.recv_into(bytearray(1))
    assert stream.is_quiet()
    theirs.close()
    assert not stream.is_quiet()

"""Frames: bytes as documented, every message there and back, nothing else accepted."""

from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.errors import LimitExceeded, ProtocolError
from kvstrata.core.keys import as_key_array
from kvstrata.manager.decisions import Decision
from kvstrata.manager.report import (
    CacheReport,
    ClearReport,
    NamespaceReport,
    PinReport,
    RunReport,
    TierReport,
)
from kvstrata.manager.tasks import TaskState, TaskStatus
from kvstrata.server import protocol as p

STATUS = TaskStatus(2**40, TaskState.PROMOTING, [3, 1], [7, 2**63], [0], 5, 4, 3, 2, 1)
REPORT = CacheReport(
    "ab",
    [TierReport("host", 4, 1, 4096), TierReport("disk", 9, 9, 4096, 2, True)],
    {"kvstrata_lookups_total": 3},
    1,
    2,
    [NamespaceReport("6162", {"model": "m"}, 3, 2, 1)],
    [{"session": "e", "workers": [0], "world_size": 1}],
    pinned_blocks=2,
    pins=[PinReport(1, "6162", 2, 59.5)],
)
REQUESTS: list[p.Request] = [
    p.Hello(1, 2, "engine", "séance", 4096, False, 3, 4, "exact", "life", [7]),
    p.Mapped(2),
    p.Register(b"n" * 16, {"model": "m"}),
    p.GetMatch(3, b"n" * 16, b"k" * 64),
    p.PutMatch(4, b"n" * 16, b"k" * 64, b"", "cmpl-1"),
    p.Measured(12.5),
    p.Explain(5, "cmpl-1"),
    p.Pin(6, b"n" * 16, b"k" * 64, 60.0),
    p.PinRequest(6, "cmpl-1", 60.0),
    p.Unpin(7, 3),
    p.Hottest(7, 64),
    p.Prompt(7, b"n" * 16, b"k" * 32),
    p.Locate(7, b"n" * 16, b"k" * 64),
    p.Clear(7, b"", "disk", True),
    p.Drain(7, False),
    p.Launch([1, 2]),
    p.Complete([]),
    p.CompletePart(2**40, 3),
    p.Fail([2**40]),
    p.Cancel([5]),
    p.TryWait(5, [1]),
    p.Prefetch(6, b"n" * 16, b"k" * 32),
    p.Reset(7, b"n" * 16),
    p.Follow(b"n" * 16),
    p.Heard(),
    p.Stats(8),
    p.Workers(11),
    p.Ping(9),
]
REPLIES: list[p.Reply] = [
    p.Welcome(1, b"s" * 16, 4, 4096),
    p.Task(2, p.pack(STATUS)),
    p.Tasks(3, [p.pack(STATUS), p.pack(TaskStatus(0, TaskState.DONE))]),
    p.Settled(p.pack(STATUS)),
    p.Changed(
        b"n" * 16,
        [
            p.BlockChange("stored", "host", b"k" * 64, b"p" * 32),
            p.BlockChange("removed", "disk", b"k" * 32, b""),
            p.BlockChange("cleared", "", b"", b""),
        ],
    ),
    p.Number(4, 5),
    p.Report(5, REPORT),
    p.Report(6, None),
    p.Explained(8, [Decision(1.5, "get", "r", "6162", 9, 4, reason="all", recompute_seconds=0.5)]),
    p.Pinned(9, 2, 7),
    p.Hot(9, [RunReport(-1, "6162", 0, 5, 4, 3, 2, 1, 2, 9, "6b")]),
    p.PromptKeys(9, b"k" * 64),
    p.Located(9, 2, 3),
    p.Cleared(9, ClearReport({"host": 3}, 1, 2)),
    p.Refused(7, "config", "no", None),
]


def test_frame_is_a_little_endian_length_and_a_tagged_array() -> None:
    assert p.encode(p.Ping(7)) == b"\x07\x00\x00\x00\x92\xa4Ping\x07"
    assert p.encode(p.Launch([1, 300])) == b"\x0d\x00\x00\x00\x92\xa6Launch\x92\x01\xcd\x01\x2c"
    assert p.encode(p.Number(2, 9)) == b"\x0a\x00\x00\x00\x93\xa6Number\x02\x09"


@pytest.mark.parametrize("message", REQUESTS, ids=lambda m: type(m).__name__)
def test_request_comes_back_as_it_was(message: p.Request) -> None:
    frame = p.encode(message)
    assert p.frame_length(frame[:4]) == len(frame) - 4
    assert p.decode_request(frame[4:]) == message
    assert p.decode_request(memoryview(frame)[4:]) == message


@pytest.mark.parametrize(
    "message", REPLIES, ids=lambda m: f"{type(m).__name__}{m.seq if hasattr(m, 'seq') else 0}"
)
def test_reply_comes_back_as_it_was(message: p.Reply) -> None:
    assert p.decode_reply(p.encode(message)[4:]) == message


def test_every_message_is_in_this_test() -> None:
    assert {type(m) for m in REQUESTS} == set(get_args(p.Request))
    assert {type(m) for m in REPLIES} == set(get_args(p.Reply))


def test_reply_is_no_request() -> None:
    with pytest.raises(ProtocolError, match="not a request"):
        p.decode_request(p.encode(p.Number(1, 2))[4:])
    with pytest.raises(ProtocolError, match="not a reply"):
        p.decode_reply(p.encode(p.Ping(1))[4:])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",
        b"\x80",
        b"\x92\xa4Ping",
        b"\x92\xa4Ping\xa1x",
        b"\x91\xa4Ping",
        b"\x92\xa4Pong\x07",
        b"\x92\xa4Ping\x07\x07",
        b"\x92\xa8Complete\x91\xa1x",
        b"\x92\xa8Complete\x91\xcb?\xf0\x00\x00\x00\x00\x00\x01",
        b"\x93\xa8Register\xc4\x01n\x81\xa1k\xa1\xff",
        b"\x93\xa4Ping\x07" + b"\x91" * 100_000 + b"\xc0",
    ],
    ids=[
        "empty",
        "nil",
        "map",
        "cut",
        "text for a number",
        "field missing",
        "unknown tag",
        "trailing byte",
        "text in a list of ids",
        "fraction in a list of ids",
        "not utf-8",
        "nested too deep",
    ],
)
def test_what_the_schema_forbids_is_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a request"):
        p.decode_request(body)


@given(st.binary(max_size=60), st.sampled_from(REQUESTS), st.integers(0, 40), st.integers(0, 8))
def test_damaged_bodies_are_messages_or_protocol_errors(
    noise: bytes, message: p.Request, at: int, cut: int
) -> None:
    body = p.encode(message)[4:]
    for damaged in (noise, body[:at] + noise + body[at + cut :]):
        for decode in (p.decode_request, p.decode_reply):
            try:
                found = decode(damaged)
            except ProtocolError:
                continue
            assert isinstance(found, msgspec.Struct)


def test_frame_over_the_limit_is_neither_sent_nor_accepted() -> None:
    assert p.frame_length(b"\x00\x00\x80\x00") == 8 << 20
    with pytest.raises(ProtocolError, match="a frame of 8388609 bytes exceeds 8388608"):
        p.frame_length(b"\x01\x00\x80\x00")
    with pytest.raises(LimitExceeded, match="a frame of 8388644 bytes exceeds 8388608"):
        p.encode(p.GetMatch(0, b"n" * 16, b"k" * (8 << 20)))


@pytest.mark.parametrize(
    ("fits", "too_much"),
    [
        (p.Launch([0] * 4096), p.Launch([0] * 4097)),
        (p.TryWait(1, [0] * 4096), p.TryWait(1, [0] * 4097)),
        (p.Hello(0, 2, "r" * 256), p.Hello(0, 2, "r" * 257)),
        (p.Hello(0, 2, "", "s" * 256), p.Hello(0, 2, "", "s" * 257)),
        (p.Hello(0, 2, "", "", (1 << 40) - 1), p.Hello(0, 2, "", "", 1 << 40)),
        (p.Hello(0, 2, "", "", 0), p.Hello(0, 2, "", "", -1)),
        (p.Hottest(0, 64), p.Hottest(0, 65)),
        (p.Hottest(0, 1), p.Hottest(0, 0)),
        (p.Clear(0, b"", "t" * 256, True), p.Clear(0, b"", "t" * 257, True)),
        (p.Hello(0, 2, "", rank=(1 << 31) - 1), p.Hello(0, 2, "", rank=1 << 31)),
        (p.Hello(0, 2, "", world_size=0), p.Hello(0, 2, "", world_size=-1)),
        (
            p.Register(b"", {str(n): "" for n in range(256)}),
            p.Register(b"", {str(n): "" for n in range(257)}),
        ),
    ],
    ids=[
        *("Launch", "TryWait", "role", "session", "size", "no-size", "most-prompts"),
        *("no-prompts", "tier", "rank", "world", "parts"),
    ],
)
def test_request_of_more_than_its_limit_is_none(fits: p.Request, too_much: p.Request) -> None:
    assert p.decode_request(p.encode(fits)[4:]) == fits
    with pytest.raises(ProtocolError, match="not a request"):
        p.decode_request(p.encode(too_much)[4:])


def test_numbers_of_a_status_are_packed_little_endian() -> None:
    packed = p.pack(STATUS)
    assert packed.slots == b"\x03\x00\x00\x00\x01\x00\x00\x00"
    assert packed.generations == b"\x07" + bytes(14) + b"\x80"
    assert packed.missing == bytes(4)
    assert p.unpack(packed) == STATUS
    empty = p.pack(TaskStatus(0, TaskState.DONE))
    assert (empty.slots, empty.generations, empty.missing) == (b"", b"", b"")
    assert p.unpack(empty) == TaskStatus(0, TaskState.DONE)


@pytest.mark.parametrize("field", ["slots", "generations", "missing"])
def test_packed_numbers_that_are_cut_are_a_protocol_error(field: str) -> None:
    packed = msgspec.structs.replace(p.pack(STATUS), **{field: b"12345"})
    with pytest.raises(ProtocolError, match="5 bytes are no whole number of"):
        p.unpack(packed)


def test_keys_are_split_where_they_were_joined() -> None:
    two = [b"a" * 32, b"b" * 32]
    assert p.join_keys(two) == p.join_keys(as_key_array(two)) == b"a" * 32 + b"b" * 32
    assert [row.tobytes() for row in p.split_keys(p.join_keys(two))] == two
    assert p.split_keys(b"").shape == (0, 32)
    with pytest.raises(ProtocolError, match="33 bytes are no whole number of keys"):
        p.split_keys(b"a" * 33)
    assert p.split_keys(bytes(131_072 * 32)).shape == (131_072, 32)
    with pytest.raises(LimitExceeded, match="131073 keys in one request exceed 131072"):
        p.split_keys(bytes(131_073 * 32))


def test_namespace_has_its_length() -> None:
    assert p.checked_namespace(b"n" * 16) == b"n" * 16
    with pytest.raises(ProtocolError, match="a namespace of 15 bytes"):
        p.checked_namespace(b"n" * 15)

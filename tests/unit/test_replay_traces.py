"""Reading traces: what is counted, and what is said about a bad line."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.traces import id_line, write_ids

from kvstrata.core.errors import ConfigError
from kvstrata.observe.events import LOG_VERSION, LogHeader, LookupEvent, PutEvent, encode_event
from kvstrata.replay.event_trace import EventTrace, read_header
from kvstrata.replay.formats import Reading, open_trace
from kvstrata.replay.hashing import chain, keys_of_identities
from kvstrata.replay.id_trace import MOONCAKE, TIMED, IdFormat, IdTrace, infer_format
from kvstrata.replay.lines import read_lines
from kvstrata.replay.trace import Kind

NAMESPACE = "0123456789abcdef" * 2
OTHER = "ff" * 16
HEADER = LogHeader(LOG_VERSION, 64, 4096)


def key(number: int) -> str:
    return f"{number:02x}" * 32


def mooncake(path: Path, tokens_per_block: int = 512) -> IdTrace:
    return IdTrace(path, MOONCAKE, tokens_per_block)


def test_only_whole_blocks_count(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(id_line([1, 2], tail=511) + "\n" + id_line([], tail=7, timestamp=250))
    first, second = mooncake(path).read()
    assert (first.input_tokens, len(first.blocks)) == (2 * 512 + 511, 2)
    assert (second.input_tokens, len(second.blocks)) == (7, 0)
    assert second.arrival_seconds == 0.25
    assert first.kind is Kind.PROMPT


def test_same_prefix_gives_the_same_blocks_and_nothing_else_does(tmp_path: Path) -> None:
    path = write_ids(tmp_path / "trace.jsonl", [[1, 2, 3], [1, 2, 4], [2, 3], [1, 2, 3, 4]])
    a, b, c, d = (request.blocks.tolist() for request in mooncake(path).read())
    assert a == d[:3]
    assert a[:2] == b[:2]
    assert a[2] != b[2]
    assert not {*c} & {*a, *b, *d}  # the same ids behind another beginning
    assert b[2] != d[3]
    assert len({*a, *b, *c, *d}) == 3 + 1 + 2 + 1


def test_blocks_of_several_ids_are_those_whose_last_id_agrees(tmp_path: Path) -> None:
    path = write_ids(tmp_path / "trace.jsonl", [[1, 2, 3, 4, 5], [1, 2, 3, 9]])
    fine = [request.blocks.tolist() for request in mooncake(path).read()]
    coarse = [request.blocks.tolist() for request in mooncake(path, 1024).read()]
    assert coarse == [[fine[0][1], fine[0][3]], [fine[1][1], fine[1][3]]]
    assert coarse[0][0] == coarse[1][0]


def test_blocks_that_cut_an_id_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"blocks of 768 tokens.*512") as caught:
        mooncake(tmp_path / "trace.jsonl", 768)
    assert caught.value.hint == "give a multiple of that as --tokens-per-block"


def test_gzip_is_read_whatever_the_name(tmp_path: Path) -> None:
    plain = write_ids(tmp_path / "trace.jsonl", [[1, 2], [1, 3]])
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    both = [[r.blocks.tolist() for r in mooncake(path).read()] for path in (plain, packed)]
    assert both[0] == both[1]
    assert len(both[0]) == 2


def test_a_gzip_file_that_was_cut_short_says_so(tmp_path: Path) -> None:
    plain = write_ids(tmp_path / "trace.jsonl", [[n] for n in range(2000)])
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(plain.read_bytes())[:-20])
    with pytest.raises(ConfigError, match=r"cut\.gz: the gzip data ends or breaks after line \d+"):
        list(mooncake(cut).read())


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for reading in (Reading(), Reading(format="kvstrata"), Reading(format="timed")):
        with pytest.raises(ConfigError) as caught:
            open_trace(pipe, reading)
        assert caught.value.args[0] == (
            f"{pipe} is not a regular file, and a trace is read more than once"
        )
        assert caught.value.hint == "save it to a file first"


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory") as caught:
        open_trace(tmp_path, Reading(format="timed", tokens_per_id=16))
    assert caught.value.hint == "name a file in it"


def test_reading_tells_how_far_it_is(tmp_path: Path) -> None:
    path = write_ids(tmp_path / "trace.jsonl", [[n] for n in range(3000)])
    told: list[tuple[int, int]] = []
    assert sum(1 for _ in read_lines(path, lambda done, total: told.append((done, total)))) == 3000
    assert told == sorted(told)
    assert len(told) == 3
    assert told[-1] == (path.stat().st_size, path.stat().st_size)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            '{"timestamp": 0, "input_length": "9", "output_length": 1, "hash_ids": []}',
            "input_length",
        ),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "input_length"),
        ('{"timestamp": 0, "input_length": 9, "hash_ids": []}', "output_length"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [-1]}', "hash_ids"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": ["a"]}', "hash_ids"),
        ('{"timestamp": -1, "input_length": 9, "output_length": 1, "hash_ids": []}', "timestamp"),
        ('{"timestamp": 0, "input_length": 9, "output_', "JSON is malformed"),
        ("[1, 2]", "object"),
        (id_line([1, 2, 3], tokens_per_id=100, timestamp=5), "`hash_ids` has 3 ids for 300 tokens"),
        (id_line([1], timestamp=1), "`timestamp` is 1, less than 2 before"),
    ],
)
def test_a_bad_line_is_named_with_its_number_field_and_remedy(
    tmp_path: Path, line: str, said: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(id_line([1], timestamp=2) + "\n\n" + line + "\n")
    with pytest.raises(ConfigError) as caught:
        list(mooncake(path).read())
    message = str(caught.value)
    assert f"{path}:3: " in message
    assert said in message
    assert caught.value.hint


def test_fields_may_have_other_names(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"ts": 3, "input_length": 512, "output_length": 1, "hash_ids": [4]}\n')
    labels = {"timestamp": "ts"}
    (request,) = IdTrace(path, IdFormat("timed", 512, 1.0, labels), 512).read()
    assert request.arrival_seconds == 3.0
    with pytest.raises(ConfigError, match="missing required field `ts`"):
        list(IdTrace(write_ids(path, [[1]]), IdFormat("timed", 512, 1.0, labels), 512).read())


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([id_line([1], tail=100)], MOONCAKE),
        ([id_line([1, 2, 3], tokens_per_id=16, tail=3)], TIMED),
        ([id_line([], tail=9), id_line([1, 2], tokens_per_id=16)], TIMED),
        ([id_line([], tail=9)], MOONCAKE),
    ],
    ids=["512", "16", "the first says nothing", "nothing says anything"],
)
def test_the_format_is_told_by_the_tokens_of_an_id(
    tmp_path: Path, lines: list[str], found: IdFormat
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    assert infer_format(path, {}) == found


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (id_line([1, 2], tokens_per_id=64), ":1: 2 ids for 128 tokens"),
        ("", "holds no request"),
        ("prose\n", ":1: JSON is malformed"),
    ],
)
def test_what_has_neither_format_is_refused(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=said) as caught:
        infer_format(path, {})
    assert caught.value.hint


def test_times_whose_unit_nobody_says_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(id_line([1, 2], tokens_per_id=128))
    with pytest.raises(ConfigError, match="--tokens-per-id 128 does not say") as caught:
        open_trace(path, Reading(tokens_per_id=128))
    assert "--format mooncake if they are milliseconds" in str(caught.value.hint)
    for said in (
        Reading(format="mooncake", tokens_per_id=128),
        Reading(seconds_per_unit=0.001, tokens_per_id=128),
    ):
        assert open_trace(path, said).tokens_per_block == 128


def test_a_file_that_is_not_there_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"gone\.jsonl cannot be read: No such file[^\n]*\n  hint: "
    ):
        list(mooncake(tmp_path / "gone.jsonl").read())


# -- our own event log -----------------------------------------------------------------------


def write_log(path: Path, *events: LogHeader | LookupEvent | PutEvent) -> EventTrace:
    path.write_bytes(b"".join(map(encode_event, events)))
    header = read_header(path)
    assert header is not None
    return EventTrace(path, header)


def test_an_event_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = write_log(
        tmp_path / "events.jsonl",
        HEADER,
        LookupEvent(
            10.0, NAMESPACE, [key(1), key(2)], found_blocks=1, parent=key(0), first_block=3
        ),
        PutEvent(11.0, NAMESPACE, [key(2), key(3)], parent=key(1), first_block=4),
        PutEvent(9.0, OTHER, [key(1)]),
    )
    lookup, put, other = trace.read()
    assert trace.tokens_per_block == 64
    assert trace.behind_device
    assert (lookup.kind, put.kind, other.kind) == (Kind.LOOKUP, Kind.PUT, Kind.PUT)
    assert (lookup.first_block, lookup.found_blocks, lookup.input_tokens) == (3, 1, 5 * 64)
    assert len({lookup.parent, *lookup.blocks.tolist()}) == 3
    assert put.parent == lookup.blocks[0]
    assert put.blocks[0] == lookup.blocks[1]
    assert other.blocks[0] != lookup.blocks[0]  # another namespace
    assert other.arrival_seconds == 11.0  # the clock was set back


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda event: event.pop("t"), "missing required field `t`"),
        (lambda event: event["keys"].append("ab"), r"\$.keys\[1\]"),
        (lambda event: event["keys"].append("zz" * 32), "a key is not hexadecimal"),
        (lambda event: event["keys"].append(event["keys"][0]), "`keys` has a key twice"),
        (
            lambda event: event.update(found_blocks=2),
            "`found_blocks` is more than the keys there are",
        ),
        (lambda event: event.update(event="get"), "Invalid value 'get'"),
        (lambda event: event.update(more=1), "unknown field `more`"),
        (lambda event: event.update(namespace="00"), "namespace"),
    ],
)
def test_a_bad_event_is_named_with_its_line(
    tmp_path: Path, damage: Callable[[dict[str, object]], object], said: str
) -> None:
    path = tmp_path / "events.jsonl"
    trace = write_log(path, HEADER, LookupEvent(1.0, NAMESPACE, [key(1)]))
    header, event = (json.loads(line) for line in path.read_text().splitlines())
    damage(event)
    path.write_text(json.dumps(header) + "\n" + json.dumps(event) + "\n")
    with pytest.raises(ConfigError, match=said) as caught:
        list(trace.read())
    assert f"{path}:2: " in str(caught.value)


def test_a_log_that_goes_on_with_other_blocks_is_refused(tmp_path: Path) -> None:
    trace = write_log(tmp_path / "events.jsonl", HEADER, HEADER, LogHeader(LOG_VERSION, 32, 4096))
    with pytest.raises(ConfigError, match=r":3: a log of other blocks"):
        list(trace.read())


def test_a_log_that_goes_on_in_another_version_is_refused(tmp_path: Path) -> None:
    trace = write_log(tmp_path / "events.jsonl", HEADER, LogHeader(LOG_VERSION + 1, 64, 4096))
    with pytest.raises(ConfigError, match=r":2: a log of version 3 begins here"):
        list(trace.read())


def test_a_log_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "log", "version": 1, "what": "else"}\n')
    with pytest.raises(ConfigError, match="version 1, this program reads 2"):
        read_header(path)


def test_a_log_without_its_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(encode_event(LookupEvent(1.0, NAMESPACE, [key(1)])))
    with pytest.raises(ConfigError, match=":1: an event log begins with its header"):
        read_header(path)


@pytest.mark.parametrize("content", ["", "prose\n", id_line([1])])
def test_what_is_no_event_log_is_not_taken_for_one(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    assert read_header(path) is None


def test_events_are_spelled_like_this() -> None:
    event = PutEvent(1.5, NAMESPACE, [key(1)], parent=key(2), first_block=1, prompt_blocks=3)
    assert json.loads(encode_event(event)) == {
        "event": "put",
        "t": 1.5,
        "namespace": "0123456789abcdef0123456789abcdef",
        "keys": ["01" * 32],
        "parent": "02" * 32,
        "first_block": 1,
        "prompt_blocks": 3,
    }


# -- identities ------------------------------------------------------------------------------


def test_keys_are_equal_exactly_where_identities_are() -> None:
    identities = chain(np.arange(5000, dtype=np.uint64))
    keys = keys_of_identities(identities)
    assert keys.shape == (5000, 32)
    assert keys.dtype == np.uint8
    assert len({row.tobytes() for row in keys}) == 5000
    assert len({row[:8].tobytes() for row in keys}) == 5000
    assert (keys_of_identities(identities[7:8]) == keys[7]).all()

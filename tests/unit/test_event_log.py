"""The event log that a cache writes: complete, bounded, and never in the way of the cache."""

import errno
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.caches import ALICE, BLOCK_BYTES, BOB, config, eventually, key, keys, load, save

from kvstrata.core.errors import ConfigError
from kvstrata.core.types import NamespaceId
from kvstrata.manager.manager import KVManager
from kvstrata.observe import event_log, events
from kvstrata.observe.event_log import EventLog, Seen
from kvstrata.observe.events import LogHeader, LookupEvent, PutEvent, decode_event
from kvstrata.replay.cost import Costs, Rates
from kvstrata.replay.formats import Reading, open_trace
from kvstrata.replay.outcome import Outcome
from kvstrata.replay.reuse import find_reuse
from kvstrata.replay.scan import scan
from kvstrata.replay.simulator import CachePlan, simulate
from kvstrata.replay.sizes import Sizes
from kvstrata.server.server import Server

HEADER = LogHeader(events.LOG_VERSION, 16, BLOCK_BYTES)
PARTS = {"tokens_per_block": "16"}
MOST_BYTES = 16 << 20
UNLOGGED = "kvstrata_unlogged_events_total"


def open_cache(slots: int, log: Path, disk: Path | None = None) -> KVManager:
    manager = KVManager(config(slots, disk, event_log=log), block_bytes=BLOCK_BYTES)
    manager.register_namespace(ALICE, PARTS)
    manager.register_namespace(BOB, PARTS)
    return manager


def read(path: Path) -> list[events.Event]:
    return [decode_event(line) for line in path.read_bytes().splitlines()]


def replay(log: Path, slots: int) -> tuple[Outcome, int]:
    """What a cache of so many blocks makes of *log*, and the blocks that it looks up."""
    with tempfile.TemporaryDirectory() as folder:
        trace = open_trace(log, Reading())
        assert trace.block_bytes == BLOCK_BYTES
        spool = scan(trace, Path(folder))
        costs = Costs(Rates(), trace.tokens_per_block, BLOCK_BYTES)
        plan = CachePlan("lru", Sizes(slots * BLOCK_BYTES, 0))
        distinct = find_reuse(spool).distinct_blocks
        return simulate(spool, costs, plan, most_blocks=distinct), spool.lookup_blocks


class Lost:
    def __init__(self) -> None:
        self.events = 0

    def __call__(self, count: int) -> None:
        self.events += count


def open_log(path: Path, lost: Lost | None = None, most_bytes: int = MOST_BYTES) -> EventLog:
    log = EventLog(path, most_bytes, lost or Lost())
    log.begin(HEADER)
    return log


def lookup(*path: int) -> Seen:
    return Seen(False, ALICE, b"".join(keys(*path)), 0)


PROMPTS = st.lists(
    st.tuples(st.sampled_from([ALICE, BOB]), st.lists(st.integers(0, 2), min_size=1, max_size=6)),
    min_size=1,
    max_size=40,
)


class Found(NamedTuple):
    hits: int
    misses: int
    saved: int
    evicted: int

    @classmethod
    def by_replay(cls, log: Path, slots: int) -> Self:
        outcome, looked_up = replay(log, slots)
        return cls(outcome.hits, looked_up - outcome.hits, outcome.saved, outcome.evicted_host)


def run(manager: KVManager, prompts: Iterable[tuple[NamespaceId, list[int]]]) -> Found:
    """What a cache finds and keeps of *prompts*, all of whose blocks are computed and saved."""
    for namespace, path in prompts:
        asked = keys(*path)
        found = len(load(manager, namespace, asked))
        if found < len(asked):
            parent, whole = asked[found - 1] if found else None, len(asked)
            save(manager, namespace, asked[found:], parent=parent, prompt_blocks=whole)
    counters = manager.stats().counters
    manager.close()
    assert counters.get(UNLOGGED, 0) == 0
    return Found(
        counters["kvstrata_lookup_blocks_total{tier=host}"],
        counters["kvstrata_lookup_blocks_total{tier=none}"],
        counters["kvstrata_saved_blocks_total"],
        counters["kvstrata_evicted_blocks_total{tier=host}"],
    )


@given(prompts=PROMPTS, recorded=st.integers(3, 14), tried=st.integers(3, 14))
@settings(deadline=None, max_examples=50)
def test_a_replay_finds_what_a_cache_of_that_size_finds(
    prompts: list[tuple[NamespaceId, list[int]]], recorded: int, tried: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "events"
        found = run(open_cache(recorded, log), prompts)
        assert Found.by_replay(log, recorded) == found
        of_that_size = run(open_cache(tried, Path(folder) / "others"), prompts)
        assert Found.by_replay(log, tried) == of_that_size


def test_what_a_cache_had_before_its_log_begins_counts_from_its_second_use_on(
    tmp_path: Path,
) -> None:
    log = tmp_path / "events"
    run(open_cache(8, log), [(ALICE, [1, 2, 3])] * 4)
    header, lookup, put, *rest = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([header, *rest]))
    assert [decode_event(line).__class__ for line in (lookup, put)] == [LookupEvent, PutEvent]
    assert Found.by_replay(log, 8) == (6, 3, 3, 0)


def test_what_is_in_no_store_either_is_not_taken_for_found(tmp_path: Path) -> None:
    log = tmp_path / "events"
    cache = KVManager(
        config(8, shared=tmp_path / "shared", event_log=log, tokens_per_block=16),
        block_bytes=BLOCK_BYTES,
    )
    for _ in range(3):
        assert not load(cache, ALICE, keys(1, 2, 3))
    cache.close()
    assert Found.by_replay(log, 8) == (0, 9, 0, 0)


def test_what_is_found_in_a_store_counts_from_its_second_use_on(tmp_path: Path) -> None:
    asked = keys(1, 2, 3)
    writer = KVManager(config(8, shared=tmp_path / "shared"), block_bytes=BLOCK_BYTES)
    save(writer, ALICE, asked)
    writer.close()
    log = tmp_path / "events"
    reader = KVManager(
        config(8, shared=tmp_path / "shared", event_log=log, tokens_per_block=16),
        block_bytes=BLOCK_BYTES,
    )
    for _ in range(2):
        assert len(load(reader, ALICE, asked)) == 3
    reader.close()
    assert Found.by_replay(log, 8) == (3, 3, 3, 0)


def test_events_are_what_engines_asked_for_and_offered(tmp_path: Path) -> None:
    log = tmp_path / "events"
    manager = open_cache(8, log)
    path = keys(1, 2, 3)
    save(manager, ALICE, path[:2])
    save(manager, ALICE, path[2:], parent=path[1])
    load(manager, ALICE, path[1:])
    manager.prefetch(ALICE, path)
    manager.close()
    header, *rest = read(log)
    assert header == HEADER
    named = [each.hex() for each in path]
    first, second, third = rest
    assert isinstance(first, PutEvent)
    assert isinstance(second, PutEvent)
    assert isinstance(third, LookupEvent)
    assert (first.keys, first.parent, first.first_block) == (named[:2], None, 0)
    assert (second.keys, second.parent, second.first_block) == (named[2:], named[1], 2)
    assert (third.keys, third.namespace, third.first_block) == (named[1:], ALICE.hex(), 1)
    assert (third.found_blocks, third.parent) == (2, named[0])
    assert first.t <= second.t <= third.t
    assert log.stat().st_mode & 0o777 == 0o600


def test_only_blocks_of_the_first_number_of_tokens_are_recorded(tmp_path: Path) -> None:
    manager = open_cache(8, tmp_path / "events")
    manager.register_namespace(BOB, {"tokens_per_block": "32"})
    load(manager, ALICE, keys(1))
    load(manager, BOB, keys(1))
    assert manager.stats().counters[UNLOGGED] == 1
    manager.close()
    assert len(read(tmp_path / "events")) == 2


@pytest.mark.parametrize("said", ["", "0", "-4", "9" * 5000, "٣"])
def test_a_namespace_that_does_not_say_its_tokens_is_not_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said: str
) -> None:
    manager = open_cache(8, tmp_path / "events")
    manager.register_namespace(ALICE, {"tokens_per_block": said})
    load(manager, ALICE, keys(1))
    load(manager, ALICE, keys(1))
    assert manager.stats().counters[UNLOGGED] == 2
    manager.close()
    assert caplog.text.count("Set tokens_per_block") == 1


def test_without_namespaces_the_configuration_says_the_tokens(tmp_path: Path) -> None:
    log = tmp_path / "events"
    with_tokens = config(8, event_log=log, tokens_per_block=16)
    manager = KVManager(with_tokens, block_bytes=BLOCK_BYTES)
    load(manager, ALICE, keys(1))
    manager.close()
    assert len(read(log)) == 2


def test_a_repeated_key_ends_an_event(tmp_path: Path) -> None:
    log = open_log(tmp_path / "events")
    log.record(Seen(False, ALICE, key(1) + key(2) + key(1) + key(3), 0))
    log.close(10.0)
    event = read(tmp_path / "events")[1]
    assert isinstance(event, LookupEvent)
    assert event.keys == [key(1).hex(), key(2).hex()]


def test_a_second_run_goes_on_where_the_first_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "events"
    for prompt in (1, 2):
        log = open_log(path)
        log.record(lookup(prompt))
        log.close(10.0)
        with path.open("ab") as file:
            file.write(b'{"event":"lookup","t":1,"name')  # killed while it wrote
    assert len(list(open_trace(path, Reading()).read())) == 2


def test_a_log_of_other_blocks_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_bytes(events.encode_event(LogHeader(events.LOG_VERSION, 32, BLOCK_BYTES)))
    log = open_log(path)
    log.record(lookup(1))
    log.close(10.0)
    assert read(path)[0] == HEADER
    assert len(read(tmp_path / "events.1")) == 1


def test_files_together_stay_within_their_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "_WRITE_BYTES", 1)  # an event a write
    path, lost = tmp_path / "events", Lost()
    log = open_log(path, lost, most_bytes=4096)
    for number in range(100):
        log.record(lookup(number))
    log.close(10.0)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["events", "events.1"]
    assert all(0 < file.stat().st_size <= 2048 for file in files)
    older, newer = read(files[1]), read(path)
    assert older[0] == newer[0] == HEADER
    kept = [each.keys for each in older[1:] + newer[1:] if isinstance(each, LookupEvent)]
    assert kept == [[key(number).hex()] for number in range(100)][-len(kept) :]
    assert lost.events == 0
    joined = tmp_path / "joined"
    joined.write_bytes(files[1].read_bytes() + path.read_bytes())
    assert len(list(open_trace(joined, Reading()).read())) == len(kept)


def failing(code: int, after: int) -> Callable[[int, Any], int]:
    """``os.write`` that takes *after* bytes and then fails."""
    left, real = [after], os.write

    def write(fd: int, data: Any) -> int:
        if not left[0]:
            raise OSError(code, os.strerror(code))
        written = real(fd, data[: left[0]])
        left[0] -= written
        return written

    return write


def test_a_full_disk_ends_the_log_with_one_warning_and_not_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_log, "_PAUSE_SECONDS", 0.001)
    manager = open_cache(8, tmp_path / "events")
    load(manager, ALICE, keys(1))
    eventually(lambda: (tmp_path / "events").stat().st_size > 0, "nothing is written")
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(os, "write", failing(errno.ENOSPC, 10))
        load(manager, ALICE, keys(2))
        eventually(lambda: manager.stats().counters[UNLOGGED] == 1, "the loss is not counted")
    save(manager, ALICE, keys(3))
    assert len(load(manager, ALICE, keys(3))) == 1
    assert manager.stats().counters[UNLOGGED] == 3
    manager.close()
    warnings = [each for each in caplog.records if "event log" in each.message]
    assert len(warnings) == 1
    assert "No space left" in warnings[0].message
    assert len(list(open_trace(tmp_path / "events", Reading()).read())) == 1  # torn line apart


def test_a_disk_that_hangs_costs_events_and_no_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, real = threading.Event(), os.write
    monkeypatch.setattr(event_log, "_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(event_log, "_MOST_WAITING_BYTES", 64)

    def write(fd: int, data: Any) -> int:
        assert may_write.wait(20)
        return real(fd, data)

    lost = Lost()
    log = open_log(tmp_path / "events", lost)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        log.record(lookup(1))
        eventually(lambda: not log._waiting, "the writer does not begin")
        for number in range(2, 6):
            log.record(lookup(number))
        assert lost.events == 2  # two wait, no more fit
        log.close(0.01)
        may_write.set()
        log.close(10.0)
    assert len(read(tmp_path / "events")) == 4


def test_a_cache_whose_log_cannot_be_opened_goes_on_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = open_cache(8, tmp_path / "none" / "events")
    assert "cannot be opened: No such file" in caplog.text
    save(manager, ALICE, keys(1))
    assert load(manager, ALICE, keys(1))
    manager.close()


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda path: None, "kv is no directory"),
        (lambda path: path.mkdir(parents=True), "it is no file"),
        (lambda path: path.parent.write_text(""), "kv is no directory"),
    ],
    ids=["nothing is there", "a directory is there", "a file is in the place of its directory"],
)
def test_server_refuses_a_log_that_cannot_be_written_at_its_start(
    tmp_path: Path, make: Callable[[Path], object], fault: str
) -> None:
    log = tmp_path / "kv" / "events"
    make(log)
    with pytest.raises(ConfigError, match=f"cannot be written: .*{fault}") as e:
        Server(config(8, event_log=log), tmp_path / "socket")
    assert e.value.hint
    assert not (tmp_path / "socket").exists()


def test_two_servers_do_not_write_one_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = open_cache(8, tmp_path / "events")
    second = open_cache(8, tmp_path / "events", tmp_path / "kv")
    assert "written by another process" in caplog.text
    save(second, ALICE, keys(1))
    save(first, ALICE, keys(2))
    second.close()
    first.close()
    assert [e.keys for e in read(tmp_path / "events")[1:] if isinstance(e, PutEvent)] == [
        [key(2).hex()]
    ]


def test_a_broken_line_inside_a_log_is_still_an_error(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_bytes(events.encode_event(HEADER) + b'{"event":"look\n')
    with pytest.raises(ConfigError, match="events:2"):
        list(open_trace(path, Reading()).read())

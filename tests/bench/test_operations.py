"""What the gate of operations lets pass, and that what it counts does not depend on luck."""

import os
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from bench.operations import __main__ as command
from bench.operations import cache, kept, tiers, wire
from bench.operations.count import Count
from bench.operations.hot_paths import HOT_PATHS, HotPath, Turns, measure
from bench.operations.kept import compare
from tests.hot_paths import with_another_system_call

from kvstrata.core.keys import BlockHasher
from kvstrata.server.connection import Connection
from kvstrata.storage.remote.valkey.resp import RespReader
from kvstrata.storage.shared_fs_quota import Quota
from kvstrata.storage.wrap import BreakerStore, CountedStore, LeadingStore
from kvstrata.transfer.finder import Finder

KEPT = {"lookup": {"instructions": 1000, "C calls": 100}, "save": {"instructions": 500}}


def test_growth_of_six_per_cent_fails_and_says_where() -> None:
    now = KEPT | {"lookup": {"instructions": 1060, "C calls": 100}}
    failures, remarks = compare(KEPT, now)
    assert failures == ["lookup: instructions from 1000 to 1060 (+6.0 %, at most +5 %)"]
    assert remarks == []


@pytest.mark.parametrize("instructions", [950, 1000, 1040, 1050])
def test_growth_and_shrinkage_of_five_per_cent_pass(instructions: int) -> None:
    now = KEPT | {"lookup": {"instructions": instructions, "C calls": 100}}
    assert compare(KEPT, now) == ([], [])


def test_shrinkage_of_six_per_cent_passes_with_a_remark() -> None:
    failures, remarks = compare(KEPT, KEPT | {"save": {"instructions": 470}})
    assert failures == []
    assert remarks == [
        "save: instructions from 500 to 470 (-6.0 %): renew the kept number with --write"
    ]


def test_a_kind_that_was_not_done_at_all_before_fails() -> None:
    now = KEPT | {"save": {"instructions": 500, "system calls": 1}}
    assert compare(KEPT, now).failures == ["save: system calls from 0 to 1 (new, at most +5 %)"]


def test_a_path_that_only_one_side_has_fails() -> None:
    assert compare(KEPT, KEPT | {"load": {"instructions": 1}}).failures == [
        "load: not kept in operations.json"
    ]
    assert compare(KEPT, {"save": KEPT["save"]}).failures == [
        "lookup: kept, but not counted any more"
    ]


def test_a_failure_names_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.check(KEPT, {"save": KEPT["save"]}) == 1
    assert "`python -m bench.operations --write`" in capsys.readouterr().out
    assert command.check(KEPT, KEPT) == 0
    assert "--write" not in capsys.readouterr().out


def test_another_version_of_python_passes_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(command, "interpreter", lambda: "CPython 9.9"):
        assert command.main(["--check"]) == 0
    assert capsys.readouterr().out == "no counts are kept for CPython 9.9: nothing is checked\n"


def test_written_counts_are_kept_beside_those_of_other_versions(tmp_path: Path) -> None:
    file = tmp_path / "operations.json"
    kept.keep("CPython 3.11", KEPT, file)
    kept.keep("CPython 3.12", {"save": {"instructions": 1}}, file)
    assert kept.kept("CPython 3.11", file) == KEPT
    assert kept.kept("CPython 3.12", file) == {"save": {"instructions": 1}}
    assert kept.kept("CPython 3.13", file) is None


def test_the_tree_keeps_counts_of_every_hot_path() -> None:
    counts = kept.kept("CPython 3.11")
    assert counts is not None
    assert counts.keys() == {path.name for path in HOT_PATHS}


def test_a_request_that_decodes_adds_less_than_an_operation_to_an_idle_step() -> None:
    """By the kept counts, which `make operations` holds the tree to."""
    counts = kept.kept("CPython 3.11")
    assert counts is not None
    one, many = (counts[f"idle step of vLLM's scheduler, requests: {n}"] for n in (1, 64))
    assert one.keys() == many.keys() == {"instructions", "C calls"}
    for kind in one:
        assert many[kind] - one[kind] < 64 - 1


def test_the_command_prints_kept_and_new_counts(capsys: pytest.CaptureFixture[str]) -> None:
    def turns(count: Count) -> Generator[None]:
        while True:
            count(BlockHasher(bytes(16), 2).keys, [1, 2])
            yield

    with patch.object(command, "HOT_PATHS", [HotPath("keys", turns)]):
        assert command.main([]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["hot", "path", "kind", "kept", "now", "growth"]
        assert any(line.startswith("keys ") and "hashed bytes" in line for line in lines)
        with patch.object(command, "kept", lambda _: {"keys": {"instructions": 1}}):
            assert command.main(["--check"]) == 1
    assert "keys: instructions from 1 to " in capsys.readouterr().out


KEYS = HotPath("keys", cache.keys_of_tokens, 1)
LOOKUP = HotPath("lookup", lambda count: cache.lookup(count, 8192), 1)
ANSWER = HotPath("load", lambda count: wire.load(count, "server"), 3)


def test_counts_are_the_same_each_time() -> None:
    assert measure(LOOKUP) == pytest.approx(measure(LOOKUP), rel=0.001)


def test_a_path_that_does_its_work_twice_is_seen() -> None:
    before = measure(KEYS)
    once = BlockHasher.keys

    def twice(self: BlockHasher, tokens: Any) -> Any:
        once(self, tokens)
        return once(self, tokens)

    with patch.object(BlockHasher, "keys", twice):
        failures = compare({"keys": before}, {"keys": measure(KEYS)}).failures
    kinds = {line.partition(": ")[2].partition(" from ")[0] for line in failures}
    assert kinds == {"instructions", "C calls", "allocated bytes", "hashed bytes"}


def test_work_that_grows_within_one_call_of_numpy_is_seen() -> None:
    def conversion(elements: int) -> HotPath:
        def turns(count: Count) -> Generator[None]:
            ids = np.zeros(elements, np.int32)
            while True:
                count(ids.astype, np.int64)
                yield

        return HotPath("conversion", turns)

    few, many = measure(conversion(8192)), measure(conversion(16384))
    more = many["allocated bytes"] - few["allocated bytes"]
    assert more == pytest.approx(8192 * 8, rel=0.01)
    assert compare({"conversion": few}, {"conversion": many}).failures


@pytest.mark.parametrize(
    ("turns", "owner", "method"),
    [
        (partial(tiers.promotion, tier="shared"), Finder, "_search"),
        (partial(tiers.promotion, tier="shared"), BreakerStore, "_end"),
        (partial(tiers.promotion, tier="disk"), LeadingStore, "read_into"),
        (tiers.shared_write, Quota, "reserve"),
        (tiers.valkey_write, CountedStore, "write"),
        (tiers.valkey_read, RespReader, "end_value"),
    ],
)
def test_another_system_call_below_host_memory_is_seen(
    turns: Turns, owner: type, method: str
) -> None:
    path = HotPath("tiers", turns, 1, warm_up=2)
    before, after = with_another_system_call(path, owner, method)
    assert after["system calls"] > before["system calls"]
    assert after["instructions"] > before["instructions"]


def test_another_system_call_of_the_server_is_seen() -> None:
    before = measure(ANSWER)
    flush = Connection.flush

    def with_another(self: Connection) -> None:
        os.getppid()
        flush(self)

    with patch.object(Connection, "flush", with_another):
        after = measure(ANSWER)
    assert after["system calls"] == before["system calls"] + after["messages"]
    assert after["messages"] == before["messages"]

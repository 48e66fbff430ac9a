"""`kvstrata gc` deletes what it is told to, beside readers and writers, and nothing else."""

import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from uuid import uuid4

import pytest
from tests.ports import free_port
from tests.remote.gcs_engine import GcsEngine
from tests.remote.objects_engine import (
    BUCKET,
    AzuriteEngine,
    MotoEngine,
    ObjectEngine,
    environment,
)
from typer.testing import CliRunner, Result

from kvstrata.cli.main import app
from kvstrata.core.types import Read
from kvstrata.storage.remote.objects.access import ObjectAccess
from kvstrata.storage.remote.objects.gc import GcReport, GcRule, collect
from kvstrata.storage.remote.objects.store import ObjectStore
from kvstrata.storage.remote.objects.values import Names
from kvstrata.storage.remote.value import HEADER_BYTES
from kvstrata.testing.samples import ONE, OTHER, dirty, key, random_value

BLOCK_BYTES = 4096
STORED_BYTES = BLOCK_BYTES + HEADER_BYTES
DAY_SECONDS = 86_400.0


@pytest.fixture(scope="module", params=[MotoEngine, AzuriteEngine, GcsEngine])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ObjectEngine]:
    engine: ObjectEngine = request.param()
    engine.start(tmp_path_factory.mktemp("engine"))
    yield engine
    engine.stop()


@pytest.fixture(autouse=True)
def _credentials(engine: ObjectEngine) -> Iterator[None]:
    with environment(engine.credentials()):
        yield


@pytest.fixture
def prefix() -> str:
    return f"some/{uuid4().hex}"


@pytest.fixture
def store(engine: ObjectEngine, prefix: str) -> Iterator[ObjectStore]:
    store = engine.open(block_bytes=BLOCK_BYTES, timeout_seconds=10.0, prefix=prefix)
    with closing(store):
        yield store


def put(store: ObjectStore, *numbers: int, namespace: bytes = ONE) -> None:
    keys = [key(number, namespace) for number in numbers]
    values = [memoryview(random_value(number, BLOCK_BYTES)) for number in numbers]
    store.write(keys, [None] * len(keys), values)


def there(store: ObjectStore, *numbers: int, namespace: bytes = ONE) -> list[int]:
    found = store.exists([key(number, namespace) for number in numbers])
    return [number for number, is_there in zip(numbers, found, strict=True) if is_there]


Invoke = Callable[..., Result]
Run = Callable[[GcRule], GcReport]


@pytest.fixture
def run(engine: ObjectEngine, prefix: str) -> Run:
    access = ObjectAccess(endpoint=engine.endpoint(*engine.address()), region="us-east-1")
    return lambda rule: collect(f"{engine.scheme}://{BUCKET}/{prefix}", rule, access=access)


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """It is *seconds* later, for us and not for the engine: what it holds is that much older."""
    now = time.time
    monkeypatch.setattr("time.time", lambda: now() + seconds)


def test_old_blocks_go_and_young_ones_stay(
    run: Run, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1, 2, 3)
    assert run(GcRule(older_than_seconds=DAY_SECONDS)).old_blocks == 0
    later(monkeypatch, 2 * DAY_SECONDS)
    report = run(GcRule(older_than_seconds=DAY_SECONDS))
    assert report == GcReport(
        blocks=3, found_bytes=3 * STORED_BYTES, old_blocks=3, old_bytes=3 * STORED_BYTES
    )
    assert report.left_bytes == 0
    assert there(store, 1, 2, 3) == []


def test_a_dry_run_says_the_same_and_deletes_nothing(
    run: Run, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1, 2, 3)
    later(monkeypatch, 2 * DAY_SECONDS)
    rule = GcRule(older_than_seconds=DAY_SECONDS, keep_bytes=1, dry_run=True)
    assert run(rule).old_blocks == 3
    assert there(store, 1, 2, 3) == [1, 2, 3]


def test_the_oldest_go_until_the_size_is_kept(run: Run, store: ObjectStore) -> None:
    """Ages are told apart in steps; within a step any may go."""
    put(store, *range(6))
    keep = GcRule(keep_bytes=4 * STORED_BYTES, spared_seconds=-10.0)
    report = run(keep)
    assert (report.excess_blocks, report.left_bytes) == (2, 4 * STORED_BYTES)
    assert len(there(store, *range(6))) == 4
    assert run(keep).excess_blocks == 0


def test_the_older_go_before_the_younger(
    run: Run, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, *range(4))
    time.sleep(1.1)  # ages are in seconds
    put(store, *range(4, 8))
    monkeypatch.setattr("kvstrata.storage.remote.objects.gc._BUCKET_SECONDS", 1.0)
    run(GcRule(keep_bytes=3 * STORED_BYTES, spared_seconds=-10.0))
    left = there(store, *range(8))
    assert len(left) == 3
    assert set(left) < set(range(4, 8))


def test_the_young_are_spared_whatever_the_size(run: Run, store: ObjectStore) -> None:
    put(store, 1, 2, 3)
    report = run(GcRule(keep_bytes=1))
    assert (report.excess_blocks, report.blocks) == (0, 3)
    assert there(store, 1, 2, 3) == [1, 2, 3]


def test_one_namespace_alone(run: Run, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, 1, 2)
    put(store, 1, namespace=OTHER)
    later(monkeypatch, DAY_SECONDS)
    assert run(GcRule(older_than_seconds=60, namespace=OTHER)).blocks == 1
    assert there(store, 1, 2) == [1, 2]
    assert there(store, 1, namespace=OTHER) == []


def test_what_is_not_a_block_is_counted_and_never_touched(
    engine: ObjectEngine, prefix: str, run: Run, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = Names(prefix).of(key(1))
    others = [
        f"{prefix}/README",
        f"{name}x",
        f"{name[:-1]}g",
        f"{name}/below",
        f"{prefix}/deeper/{name.removeprefix(prefix + '/')}",
        f"{prefix}2/{name.removeprefix(prefix + '/')}",  # not below the prefix
    ]
    for other in others:
        engine.put_object(other, b"of somebody else")
    put(store, 2)
    later(monkeypatch, DAY_SECONDS)
    report = run(GcRule(older_than_seconds=60))
    assert (report.old_blocks, report.other_objects) == (1, len(others) - 1)
    assert store.drop_namespace(ONE) == 0
    assert set(others) <= set(engine.names())


def test_a_block_that_is_written_anew_after_it_was_listed_stays(
    run: Run, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1, 2)
    time.sleep(1.1)  # ages are in seconds
    monkeypatch.setattr("kvstrata.storage.remote.objects.gc._CLOCK_SECONDS", 0.0)
    later(monkeypatch, DAY_SECONDS)
    from kvstrata.storage.remote.objects.library import Library

    pages = Library.pages

    def pages_then_a_write(self: Library, prefix: str, timeout_seconds: float) -> Iterator[object]:
        for page in pages(self, prefix, timeout_seconds):
            store.remove([key(2)])
            put(store, 2)
            yield page

    monkeypatch.setattr(Library, "pages", pages_then_a_write)
    report = run(GcRule(older_than_seconds=60))
    assert (report.old_blocks, report.renewed_blocks) == (1, 1)
    assert there(store, 1, 2) == [2]


def test_a_block_that_somebody_else_deletes_meanwhile_is_no_fault(
    run: Run, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, *range(20))
    later(monkeypatch, DAY_SECONDS)
    rule = GcRule(older_than_seconds=60)
    with ThreadPoolExecutor(3) as pool:
        reports = list(pool.map(lambda _: run(rule), range(3)))
    assert there(store, *range(20)) == []
    assert max(report.old_blocks for report in reports) > 0


def test_beside_readers_and_writers_no_byte_is_wrong_and_nothing_young_goes(
    run: Run, store: ObjectStore
) -> None:
    """What is younger than 1.5 seconds stays; what is older goes and is written again, all the time."""
    end = time.monotonic() + 4.0
    written = dict.fromkeys(range(12), 0.0)
    failures: list[str] = []

    def use(seed: int) -> None:
        """A node of its own: it writes and reads blocks that no other node does."""
        draw = random.Random(seed)
        mine = range(4 * seed, 4 * seed + 4)
        while time.monotonic() < end:
            number = draw.choice(mine)
            now = time.monotonic()
            if (
                store.write([key(number)], [None], [memoryview(random_value(number, BLOCK_BYTES))])[
                    0
                ].name
                == "STORED"
            ):
                if written[number] and now - written[number] < 0.5:
                    failures.append(f"block {number} was deleted young")
                written[number] = now
            buffer = dirty(BLOCK_BYTES)
            (fate,) = store.read_into([key(number)], [buffer])
            if fate is Read.HIT and buffer != random_value(number, BLOCK_BYTES):
                failures.append(f"block {number} is wrong")
            if fate not in {Read.HIT, Read.MISS}:
                failures.append(f"block {number} is {fate}")

    deleted = 0
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(use, seed) for seed in range(3)]
        while time.monotonic() < end:
            deleted += run(GcRule(older_than_seconds=1.5)).old_blocks
        for user in running:
            user.result()
    assert failures == []
    assert deleted > 0
    assert store.statistics().corrupt_blocks == 0


# The command


@pytest.fixture
def invoke(engine: ObjectEngine, prefix: str) -> Invoke:
    def invoke(*options: str) -> Result:
        url = f"{engine.scheme}://{BUCKET}/{prefix}"
        where = ["--region", "us-east-1"]
        if "--endpoint" not in options:
            where += ["--endpoint", engine.endpoint(*engine.address())]
        return CliRunner().invoke(app, ["gc", url, *where, *options])

    return invoke


def test_the_command_says_what_it_did(
    engine: ObjectEngine,
    prefix: str,
    invoke: Invoke,
    store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(store, 1, 2)
    engine.put_object(f"{prefix}/README", b"of somebody else")
    later(monkeypatch, 8 * DAY_SECONDS)
    result = invoke("--older-than", "7d", "--dry-run")
    assert "would be deleted for their age: 2 blocks, 8.3 KiB" in result.output
    result = invoke("--older-than", "1w", "--keep", "10TiB")
    assert result.exit_code == 0
    assert "found 2 blocks, 8.3 KiB" in result.output
    assert "deleted for their age: 2 blocks, 8.3 KiB" in result.output
    assert "not blocks, and not touched: 1 object\n" in result.output
    assert "left 0 B" in result.output
    found = invoke("--older-than", "1w").output
    assert f"nothing to delete: look whether {engine.scheme}://{BUCKET}/{prefix} is the" in found
    put(store, 3)
    found = invoke("--older-than", "52w").output
    assert "nothing was deleted: no block is due; a lower --older-than or --keep does\n" in found
    assert "nothing was deleted\n" in invoke("--snapshot").output


def test_the_command_as_json(invoke: Invoke, store: ObjectStore) -> None:
    put(store, 1, 2)
    result = invoke("--keep", "1", "--namespace", ONE.hex(), "--json")
    report = json.loads(result.output)
    assert (report["blocks"], report["left_bytes"]) == (2, 2 * STORED_BYTES)
    assert report["dry_run"] is False


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--older-than", "7 days"],
        ["--older-than", "-1d"],
        ["--keep", "much"],
        ["--keep", "1TiB", "--namespace", "12"],
        ["--keep", "1TiB", "--endpoint", "127.0.0.1:9000"],
    ],
)
def test_wrong_input_is_refused_before_anything_is_done(invoke: Invoke, options: list[str]) -> None:
    assert invoke(*options).exit_code == 2


def test_a_store_that_cannot_be_reached_is_named(
    engine: ObjectEngine, prefix: str, invoke: Invoke
) -> None:
    result = invoke("--keep", "1TiB", "--endpoint", engine.endpoint("127.0.0.1", free_port()))
    assert result.exit_code == 1
    assert f"{engine.scheme}://{BUCKET}/{prefix} cannot be cleaned up" in result.output

"""What `kvstrata gc --snapshot` has not listed is not asked for, for as long as that is trusted."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.remote.gcs_engine import GcsEngine
from tests.remote.objects_engine import (
    BUCKET,
    KEY_ID,
    SECRET,
    AzuriteEngine,
    MotoEngine,
    ObjectEngine,
    RcloneEngine,
    environment,
)
from tests.remote.odd_server import OddServer, Request, answer
from typer.testing import CliRunner, Result

from kvstrata.cli.main import app
from kvstrata.core.types import StoreKey
from kvstrata.storage.remote.objects.access import ObjectAccess
from kvstrata.storage.remote.objects.gc import GcRule, collect
from kvstrata.storage.remote.objects.snapshot import Snapshot, seed_of
from kvstrata.storage.remote.objects.store import ObjectStore
from kvstrata.storage.remote.objects.values import Names
from kvstrata.testing.samples import ONE, OTHER, random_value

BLOCK_BYTES = 4096
TRUSTED_SECONDS = 8.0  # so that a new one is looked for every second
Open = Callable[..., ObjectStore]


def key(number: int, namespace: bytes = ONE) -> StoreKey:
    return namespace + hashlib.sha256(str(number).encode()).digest()


# The filter


def test_what_is_in_a_snapshot_is_never_denied_and_little_else_is_not() -> None:
    keys = [key(number) for number in range(20_000)]
    snapshot = Snapshot.of(1.0, b"".join(map(seed_of, keys)))
    assert all(snapshot.may_have(keys))
    strangers = [key(number) for number in range(20_000, 40_000)]
    assert 0.002 < sum(snapshot.may_have(strangers)) / len(strangers) < 0.016
    assert snapshot.may_have([]) == []


@given(st.lists(st.binary(min_size=48, max_size=48)), st.floats(0, 4e9))
def test_a_snapshot_is_read_as_it_was_written(keys: list[bytes], listed_seconds: float) -> None:
    written = Snapshot.of(listed_seconds, b"".join(map(seed_of, keys)))
    read = Snapshot.parse(ONE, b"".join(written.to_object(ONE)))
    assert read is not None
    assert (read.listed_seconds, read.blocks) == (listed_seconds, len(keys))
    assert all(read.may_have(keys))
    assert read.to_object(ONE) == written.to_object(ONE)


@given(st.data())
@settings(max_examples=50)
def test_a_damaged_one_or_that_of_another_namespace_is_none(data: st.DataObject) -> None:
    stored = bytearray(b"".join(Snapshot.of(1.0, b"8 bytes.").to_object(ONE)))
    assert Snapshot.parse(OTHER, bytes(stored)) is None
    length = data.draw(st.integers(0, len(stored) - 1))
    assert Snapshot.parse(ONE, bytes(stored[:length])) is None
    at = data.draw(st.integers(0, len(stored) - 1))
    stored[at] ^= 1 << data.draw(st.integers(0, 7))
    assert Snapshot.parse(ONE, bytes(stored)) is None


def test_names() -> None:
    for names in (Names(""), Names("some/prefix")):
        assert names.namespace_of(names.snapshot(ONE)) == ONE
        assert names.is_snapshot(names.snapshot(ONE))
        assert not names.is_block(names.snapshot(ONE))
        assert not names.is_snapshot(names.of(key(1)))
        assert not names.is_snapshot(names.snapshot(ONE).replace("/snapshot", "/a/snapshot"))
        assert names.key_of(names.of(key(1))) == key(1)
        assert names.namespace_of(names.of(key(1, OTHER))) == OTHER


# On real engines


@pytest.fixture(scope="module", params=[MotoEngine, RcloneEngine, AzuriteEngine, GcsEngine])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ObjectEngine]:
    engine: ObjectEngine = request.param()
    engine.start(tmp_path_factory.mktemp("engine"))
    yield engine
    engine.stop()


@pytest.fixture(autouse=True)
def _credentials(request: pytest.FixtureRequest) -> Iterator[None]:
    if "engine" not in request.fixturenames:
        yield
        return
    with environment(request.getfixturevalue("engine").credentials()):
        yield


@pytest.fixture
def prefix() -> str:
    return f"some/{uuid4().hex}"


@pytest.fixture
def open_store(engine: ObjectEngine, prefix: str) -> Iterator[Open]:
    opened = []

    def open_store(snapshot_seconds: float | None = None) -> ObjectStore:
        store = engine.open(
            block_bytes=BLOCK_BYTES,
            timeout_seconds=10.0,
            prefix=prefix,
            snapshot_seconds=snapshot_seconds,
        )
        opened.append(store)
        return store

    yield open_store
    for store in opened:
        store.close()


@pytest.fixture
def run(engine: ObjectEngine, prefix: str) -> Callable[..., Result]:
    def run(*options: str) -> Result:
        url = f"{engine.scheme}://{BUCKET}/{prefix}"
        where = ["--endpoint", engine.endpoint(*engine.address()), "--region", "us-east-1"]
        return CliRunner().invoke(app, ["gc", url, *where, *options])

    return run


def put(store: ObjectStore, *numbers: int, namespace: bytes = ONE) -> None:
    """One by one: rclone answers 500 when two objects are the first of a folder at once."""
    for number in numbers:
        value = memoryview(random_value(number, BLOCK_BYTES))
        store.write([key(number, namespace)], [None], [value])


def there(store: ObjectStore, *numbers: int, namespace: bytes = ONE) -> list[int]:
    found = store.exists([key(number, namespace) for number in numbers])
    return [number for number, is_there in zip(numbers, found, strict=True) if is_there]


def settled(store: ObjectStore, expected: list[int], *numbers: int, namespace: bytes = ONE) -> bool:
    """Whether the store says *expected* within some seconds: snapshots are read behind questions."""
    give_up = time.monotonic() + 6.0
    while time.monotonic() < give_up:
        if there(store, *numbers, namespace=namespace) == expected:
            return True
        time.sleep(0.05)
    return False


def test_what_another_node_writes_later_is_found_with_the_next_snapshot(
    open_store: Open, run: Callable[..., Result]
) -> None:
    writer, reader = open_store(), open_store(TRUSTED_SECONDS)
    put(writer, 1, 2)
    assert there(reader, 1, 2, 3) == [1, 2]  # there is no snapshot
    assert "snapshots written: 1" in run("--snapshot").output
    put(writer, 3)
    assert settled(reader, [1, 2], 1, 2, 3)
    put(reader, 4)
    assert there(reader, 1, 2, 3, 4) == [1, 2, 4]  # its own are there at once
    assert run("--snapshot").exit_code == 0
    assert settled(reader, [1, 2, 3, 4], 1, 2, 3, 4)
    assert there(writer, 1, 2, 3, 4) == [1, 2, 3, 4]


def test_an_old_snapshot_is_not_trusted(open_store: Open, run: Callable[..., Result]) -> None:
    writer, reader = open_store(), open_store(2.0)
    put(writer, 1)
    run("--snapshot")
    put(writer, 2)
    assert settled(reader, [1], 1, 2)
    assert settled(reader, [1, 2], 1, 2)


def test_each_namespace_has_its_own(open_store: Open, run: Callable[..., Result]) -> None:
    writer, reader = open_store(), open_store(60.0)
    put(writer, 1)
    put(writer, 2, namespace=OTHER)
    assert "snapshots written: 1" in run("--snapshot", "--namespace", ONE.hex()).output
    put(writer, 3)
    put(writer, 3, namespace=OTHER)
    assert settled(reader, [1], 1, 3)
    assert there(reader, 2, 3, namespace=OTHER) == [2, 3]


def test_what_is_left_is_listed_and_snapshots_are_no_blocks(
    engine: ObjectEngine, prefix: str, open_store: Open, run: Callable[..., Result]
) -> None:
    store = open_store()
    put(store, 1, 2, 3)
    access = ObjectAccess(endpoint=engine.endpoint(*engine.address()), region="us-east-1")
    url = f"{engine.scheme}://{BUCKET}/{prefix}"
    dry = GcRule(keep_bytes=1, snapshot=True, dry_run=True)
    report = collect(url, dry, access=access)
    assert (report.blocks, report.snapshots) == (3, 0)
    young = GcRule(keep_bytes=1, snapshot=True)  # they stay
    assert collect(url, young, access=access).snapshots == 1
    rule = GcRule(keep_bytes=1, spared_seconds=-10.0, snapshot=True)
    report = collect(url, rule, access=access)
    assert (report.excess_blocks, report.other_objects, report.snapshots) == (3, 0, 1)
    reader = open_store(60.0)
    put(store, 4)
    assert settled(reader, [], 4)
    assert store.drop_namespace(ONE) == 1
    assert collect(url, rule, access=access).snapshots == 0  # it went with its namespace


def test_a_damaged_snapshot_counts_for_nothing(
    engine: ObjectEngine,
    prefix: str,
    open_store: Open,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    engine.put_object(Names(prefix).snapshot(ONE), b"of somebody else")
    with closing(open_store(TRUSTED_SECONDS)) as store:
        put(open_store(), 1)
        for _ in range(100):
            assert there(store, 1, 2) == [1]
            if caplog.records:
                break
            time.sleep(0.02)
    assert "is damaged" in caplog.text


def test_a_server_that_demands_signed_payloads_gets_them() -> None:
    name = Names("kv").of(key(1))
    listing = (
        "<ListBucketResult><Name>bucket</Name><KeyCount>1</KeyCount>"
        f"<IsTruncated>false</IsTruncated><Contents><Key>{name}</Key><Size>4260</Size>"
        '<LastModified>2026-11-22T11:56:20.000Z</LastModified><ETag>"1"</ETag></Contents>'
        "</ListBucketResult>"
    )

    def reply(request: Request) -> bytes:
        if request.method == "GET":
            return answer("200 OK", listing.encode())
        signed = request.fields["x-amz-content-sha256"]
        is_right = signed == hashlib.sha256(request.body).hexdigest()
        return answer("200 OK", b"", 'ETag: "2"') if is_right else answer("403 Forbidden")

    keys = {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET}
    with closing(OddServer(reply)) as server, environment(keys):
        query = f"region=us-east-1&sign_payload=true&endpoint=http://127.0.0.1:{server.port}"
        result = CliRunner().invoke(app, ["gc", f"s3://bucket/kv?{query}", "--snapshot"])
    assert result.exit_code == 0, result.output
    assert "snapshots written: 1" in result.output

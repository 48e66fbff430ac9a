"""How a store on object storage finds its bucket and is let in, and what it makes of the clock."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.remote.authority import Authority
from tests.remote.objects_engine import (
    BUCKET,
    KEY_ID,
    PREFIX,
    SECRET,
    MotoEngine,
    RcloneEngine,
    environment,
)
from tests.remote.odd_server import OddServer, answer

from kvstrata.core.errors import ConfigError, TierUnavailable
from kvstrata.core.types import Read, Write
from kvstrata.storage.remote.objects.access import ObjectAccess, Place
from kvstrata.storage.remote.objects.library import Library
from kvstrata.storage.remote.objects.signed import SignedLibrary
from kvstrata.storage.remote.objects.store import ObjectStore
from kvstrata.testing.samples import ONE, dirty, fetch, key, random_value

BLOCK_BYTES = 4096
KEYS = {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET}
AZURE = {"AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}
GOOGLE = {"GOOGLE_BEARER_TOKEN": "token"}


def open_at(url: str, environ: dict[str, str] = KEYS, **access: Any) -> ObjectStore:
    with environment(environ):
        return ObjectStore(
            url, block_bytes=BLOCK_BYTES, timeout_seconds=2.0, access=ObjectAccess(**access)
        )


def put(store: ObjectStore, number: int = 1) -> Write:
    (fate,) = store.write([key(number)], [None], [memoryview(random_value(number, BLOCK_BYTES))])
    return fate


# URLs and settings


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://bucket", Place("s3", "bucket", "")),
        ("s3://bucket/", Place("s3", "bucket", "")),
        ("gs://my_bucket.example/a/b", Place("gs", "my_bucket.example", "a/b")),
        ("az://container/model=7/kv/", Place("az", "container", "model=7/kv")),
    ],
)
def test_urls(url: str, place: Place) -> None:
    assert Place.of_url(url) == place


@pytest.mark.parametrize(
    "url",
    [
        "bucket/prefix",
        "http://bucket/prefix",
        "s3://",
        "s3:///prefix",
        f"s3://{KEY_ID}:hunter2@bucket/prefix",
        "s3://bucket/a//b",
        "s3://bucket/../other",
        "s3://bucket/prefix?token=hunter2",
        "s3://bucket/pre fix",
        "s3://bucket/prefix%2f",
    ],
)
def test_a_url_that_is_not_understood_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        open_at(url)
    assert "hunter2" not in str(raised.value)
    assert "s3://bucket/prefix" in str(raised.value)


@pytest.mark.parametrize(
    "access",
    [
        {"endpoint": "127.0.0.1:9000"},
        {"endpoint": "http://user:hunter2@127.0.0.1:9000"},
        {"endpoint": "http://127.0.0.1:9000?sig=hunter2"},
        {"parallel": 0},
        {"parallel": 5000},
    ],
)
def test_wrong_settings(access: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        open_at("s3://bucket/prefix", **access)
    assert raised.value.hint
    assert "hunter2" not in str(raised.value)


def test_a_wrong_setting_of_the_environment_is_not_shown() -> None:
    with pytest.raises(ConfigError) as raised:
        open_at("gs://bucket", {"GOOGLE_SERVICE_ACCOUNT_KEY": "{hunter2"})
    assert "hunter2" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"AWS_CA_BUNDLE[\s\S]*hint: name a file"):
        open_at("s3://bucket", KEYS | {"AWS_CA_BUNDLE": "/no/such/file"})


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("objects.library", "objects.signed"):
        monkeypatch.delitem(sys.modules, f"kvstrata.storage.remote.{module}")
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvstrata\[objects\]'"):
        open_at("s3://bucket")


@pytest.mark.parametrize(
    ("url", "environ"),
    [("s3://bucket", KEYS), ("gs://bucket", GOOGLE), ("az://container", AZURE)],
)
def test_opening_and_closing_asks_nobody(url: str, environ: dict[str, str]) -> None:
    """Whether an engine is there shows at the first call."""
    store = open_at(url, environ, endpoint="http://127.0.0.1:9", region="nowhere-1")
    with pytest.raises(TierUnavailable) as raised:
        store.exists([key(1)])
    assert raised.value.cause == "unreachable"
    store.close()


@pytest.mark.parametrize(
    ("url", "environ", "access"),
    [
        ("gs://bucket", GOOGLE, {}),
        ("az://container", AZURE, {}),
        ("s3://bucket", KEYS, {"anonymous": True}),
        ("s3://bucket", KEYS, {"sign_payload": True}),
        ("s3://bucket--use1-az4--x-s3", KEYS, {}),
        ("s3://bucket", KEYS | {"AWS_SERVER_SIDE_ENCRYPTION": "aws:kms"}, {}),
        ("s3://bucket", KEYS | {"AWS_REQUEST_PAYER": "requester"}, {}),
    ],
)
def test_obstore_does_what_a_signed_url_would_do_in_another_way(
    url: str, environ: dict[str, str], access: dict[str, Any]
) -> None:
    with environment(environ), closing(open_at(url, environ, **access)) as store:
        assert type(store._library) is Library
    with closing(open_at("s3://bucket")) as store:
        assert type(store._library) is SignedLibrary


def test_the_environment_may_put_the_bucket_into_the_host_name() -> None:
    with closing(OddServer(lambda _: answer("404 Not Found"))) as server:
        settings = KEYS | {
            "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
            "AWS_ENDPOINT": f"http://127.0.0.1:{server.port}",
            "AWS_ALLOW_HTTP": "true",
        }
        with closing(open_at("s3://bucket/prefix", settings)) as store:
            assert store.exists([key(1)]) == [False]
        (request,) = server.requests
        assert request.target.startswith("/prefix/")


# Real servers


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoEngine]:
    engine = MotoEngine()
    engine.start(tmp_path_factory.mktemp("engine"))
    yield engine
    engine.stop()


def test_the_credentials_of_a_profile(rclone: RcloneEngine, tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text(
        f"[kv]\naws_access_key_id = {KEY_ID}\naws_secret_access_key = {SECRET}\n"
        "region = nowhere-1\n"
    )
    profile = {"AWS_SHARED_CREDENTIALS_FILE": str(file), "AWS_PROFILE": "kv"}
    url, endpoint = f"s3://{BUCKET}/profile", rclone.endpoint(*rclone.address())
    with environment(profile), closing(open_at(url, profile, endpoint=endpoint)) as store:
        assert put(store) is Write.STORED
        assert fetch(store, key(1)) == random_value(1, BLOCK_BYTES)
    with pytest.raises(ConfigError, match=r"profile another [\s\S]*hint: check AWS_PROFILE"):
        open_at(url, profile | {"AWS_PROFILE": "another"}, endpoint=endpoint)


def test_where_no_credentials_are_found_it_says_so(rclone: RcloneEngine, tmp_path: Path) -> None:
    """Neither in the environment, nor from the metadata of the machine, nor in a profile."""
    endpoint = rclone.endpoint(*rclone.address())
    with closing(OddServer(lambda _: answer("404 Not Found"))) as metadata:
        nothing = {"AWS_METADATA_ENDPOINT": f"http://127.0.0.1:{metadata.port}"}
        with closing(open_at("s3://bucket", nothing, endpoint=endpoint)) as store:
            with pytest.raises(TierUnavailable, match="no credentials were found") as raised:
                store.exists([key(1)])
            assert raised.value.cause == "credentials"
        assert metadata.requests
    (tmp_path / "config").write_text("[profile kv]\nregion = nowhere-1\n")
    profile = {
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
        "AWS_PROFILE": "kv",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with environment(profile), closing(open_at("s3://bucket", profile, endpoint=endpoint)) as store:
        with pytest.raises(TierUnavailable, match="no credentials were found") as raised:
            store.exists([key(1)])
        assert raised.value.cause == "credentials"


def test_a_proxy_of_the_environment_is_used() -> None:
    """By obstore: connections of our own know no proxies."""
    with closing(OddServer(lambda _: answer("404 Not Found"))) as server:
        proxied = KEYS | {"http_proxy": f"http://127.0.0.1:{server.port}", "no_proxy": ""}
        with (
            environment(proxied),
            closing(open_at("s3://bucket", proxied, endpoint="http://storage.example")) as store,
        ):
            assert store.exists([key(1)]) == [False]
        (request,) = server.requests
        assert request.target.startswith("http://storage.example/bucket/")


def test_an_endpoint_by_tls_whose_certificate_is_in_a_bundle(tmp_path: Path) -> None:
    engine = _TlsEngine()
    engine.start(tmp_path)
    try:
        url, endpoint = f"s3://{BUCKET}/{PREFIX}", engine.endpoint(*engine.address())
        trusting = KEYS | {"AWS_CA_BUNDLE": str(tmp_path / "ca.pem")}
        value = random_value(1, 3 << 20)
        with (
            environment(trusting),
            closing(
                ObjectStore(url, block_bytes=3 << 20, access=ObjectAccess(endpoint=endpoint))
            ) as store,
        ):
            keys = [key(number) for number in range(4)]
            assert store.write(keys, [None] * 4, [memoryview(value)] * 4) == [Write.STORED] * 4
            buffers = [dirty(len(value)) for _ in keys]
            for _ in range(2):
                assert store.read_into(keys, buffers) == [Read.HIT] * 4
            assert buffers == [value] * 4
            assert store.drop_namespace(ONE) == 4
            assert store._library._is_used  # type: ignore[attr-defined]  # by signed URLs
        with environment(KEYS), closing(open_at(url, endpoint=endpoint)) as store:
            with pytest.raises(TierUnavailable, match="certificate is not trusted"):
                store.exists([key(1)])
            with pytest.raises(TierUnavailable, match="certificate is not trusted"):
                store.drop_namespace(ONE)  # by obstore
    finally:
        engine.stop()


def test_a_block_that_is_too_old_is_a_miss_and_is_written_anew(
    moto: MotoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = moto.open(block_bytes=BLOCK_BYTES, ttl_seconds=1000.0)
    through_obstore = moto.open(block_bytes=BLOCK_BYTES, ttl_seconds=1000.0, sign_payload=True)
    with closing(store), closing(through_obstore):
        assert put(store) is Write.STORED
        assert put(store) is Write.EXISTS
        now = time.time
        monkeypatch.setattr("time.time", lambda: now() + 2000.0)
        for old in (store, through_obstore):
            assert old.exists([key(1)]) == [False]
            assert fetch(old, key(1)) is Read.MISS
            assert put(old) is Write.STORED  # its age is that of the server's clock
        assert store.remove([key(1)]) == [False]
        monkeypatch.setattr("time.time", now)
        assert store.exists([key(1)]) == [False]


def test_a_block_that_is_written_anew_before_it_is_removed_stays(
    moto: MotoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes find it damaged, and one of them has already healed it."""
    with closing(moto.open(block_bytes=BLOCK_BYTES)) as store:
        moto.put_raw(key(5), b"KVSREMO1 and no more")
        find = store._library.find

        def heal_and_find(*args: Any) -> Any:
            other = moto.open(block_bytes=BLOCK_BYTES)
            with closing(other):
                other.remove([key(5)])
                put(other, 5)
            return find(*args)

        monkeypatch.setattr(store._library, "find", heal_and_find)
        assert fetch(store, key(5)) is Read.CORRUPT
        monkeypatch.undo()
        assert fetch(store, key(5)) == random_value(5, BLOCK_BYTES)


def test_a_process_ends_well_right_after_its_last_call(rclone: RcloneEngine) -> None:
    """obstore's asynchronous calls abort it, half of the time."""
    program = (
        "from kvstrata.storage.remote.objects.store import ObjectAccess, ObjectStore\n"
        f"store = ObjectStore('s3://{BUCKET}/exit', block_bytes=4096,\n"
        f"    access=ObjectAccess(endpoint='{rclone.endpoint(*rclone.address())}', "
        "sign_payload={}))\n"
        "keys = [bytes([n]) * 48 for n in range(8)]\n"
        "store.write(keys, [None] * 8, [memoryview(bytes(4096))] * 8)\n"
        "store.read_into(keys, [memoryview(bytearray(4096)) for _ in keys])\n"
        "store.exists(keys)\n"
    )
    for number in range(8):
        run = subprocess.run(
            [sys.executable, "-c", program.format(number % 2 == 0)],
            env=os.environ | KEYS | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            timeout=30,
            check=False,
        )
        assert run.returncode == 0, run.stderr.decode()


class _TlsEngine(RcloneEngine):
    def endpoint(self, host: str, port: int) -> str:
        return f"https://{host}:{port}"

    def command(self) -> list[str]:
        certificate, key_file = Authority(self.folder.parent, "ca").issue("server")
        return [*super().command(), "--cert", str(certificate), "--key", str(key_file)]

    def make_bucket(self) -> None:
        (self.folder / BUCKET).mkdir()
